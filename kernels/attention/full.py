"""Causal attention of query heads that share key/value heads, within the documents of a packed
sequence.

    out[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K)) v[s],  s <= t and s in t's document

Libraries' kernels compute it; this file chooses the library. Query head h reads key/value head h //
(H / G); keys and values are never repeated in memory. documents.py says which documents attend
together in one call.

Kept for backward, per token: q, k, v and out, (2H + 2G) K elements, and the float32 log-sum-exp, H
elements.

cuDNN's dq may differ in its last bits from run to run, and PyTorch offers no deterministic mode of
it. Under `torch.use_deterministic_algorithms(True)`, "auto" therefore means FlashAttention-2. Its
backward is then deterministic, as flash-attn-4's is. That takes more float32 sums of dq, which no
plan counts. Also set `torch.utils.deterministic.fill_uninitialized_memory` to False, or PyTorch
fills every new tensor.

Method: Dao et al., FlashAttention, arXiv 2205.14135; grouped-query attention: Ainslie et al., arXiv
2305.13245.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import torch_internals
from ..parts import AttentionBytes, AttentionFlops, AttentionKind, AttentionWork
from .documents import (
    LONGEST_TOGETHER,
    SPACING,
    document_calls,
    has_prompts,
    is_rows,
    most_tokens_together,
    rounded_length,
)
from .prompts import add_gradients_of_prompts, attend_to_prompts
from .reference import attend_written_out, within_documents

_CUDNN_SHORTEST = (
    64  # tokens; shorter rows and prompts run in FlashAttention-2: cuDNN refuses a row of one token
)
# Tokens. A document whose rounded length runs past the end of the batch is copied, to pad it. If
# that length is above this limit, one key/value head is copied at a time.
_LONGEST_COPIED = 32_768
_NEVER_ATTENDS = 1e30  # a log-sum-exp under which every probability is exactly 0
# backward's floating-point operations divided by forward's: five matrix products against two
BACKWARD_FLOPS = 2.5


def attention_reference(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, segments: Tensor | None = None
) -> Tensor:
    """Attention with the T x T matrix written out, in the inputs' dtype. Arguments are as in
    `attention`."""
    is_earlier, _ = within_documents(q_BTHK, segments)
    return attend_written_out(q_BTHK, k_BTGK, v_BTGK, is_earlier[:, None, None])[0]


Keys = tuple[
    Tensor, int
]  # where keys of documents that attend together begin, and the most of one document


class Kernel(NamedTuple):
    """A library's causal attention: functions for rows of one document each, and for documents that
    attend together.

    Documents that attend together follow each other in N tokens. `begins` has the first token of
    each and N, int32 on the device of q; `longest` is the number of tokens of the longest. A
    keyword `window` has each token attend to so many last tokens; only FlashAttention's kernels
    take it. With a keyword `causal` of False, or `keys`, begins and longest of the keys, a
    document's queries see all its keys, which may be more or fewer.
    """

    # q [B, T, H, K], k and v [B, T, G, K] -> out [B, T, H, K], log-sum-exp [B, H, T] float32
    forward: Callable
    backward: (
        Callable  # dout, q, k, v, out, log-sum-exp -> dq, dk, dv, in the layouts of q, k and v
    )
    # q [N, H, K], k and v [N, G, K], begins, longest -> out, log-sum-exp [H, N] float32
    forward_together: Callable
    backward_together: Callable  # dout, q, k, v, out, log-sum-exp, begins, longest -> dq, dk, dv
    workspace_rows: (
        int  # bytes that `backward` allocates for itself, divided by q's bytes; measured
    )
    # the same of `backward_together`, without the float32 dq of SPACING more tokens per document
    rows_together: int
    expanded_rows: int = (
        0  # the part of both for dk and dv of each query head, where query heads share keys
    )
    longest_together: float = math.inf  # tokens of the longest document that does not attend alone
    length_step: int = 1  # tokens; `step` of `rounded_length`, for a document that attends alone


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, T, H, K] -> [B, H, T, K], and back."""
    return [x.transpose(1, 2) for x in tensors]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    if min(q.shape[1], k.shape[1]) < _CUDNN_SHORTEST:
        return _flash_forward(q, k, v, causal)
    out, lse = torch_internals.cudnn_attention(*_heads_first(q, k, v), None, True, 0.0, causal)[:2]
    return out.transpose(1, 2), lse.squeeze(-1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = True
) -> Sequence[Tensor]:
    if min(q.shape[1], k.shape[1]) < _CUDNN_SHORTEST:
        return _flash_backward(dout, q, k, v, out, lse, causal)
    lengths, seed = (q.shape[1], k.shape[1]), _unused_seed(q)
    options = lse.unsqueeze(-1), seed, seed, None, None, None, *lengths, 0.0, causal
    return _heads_first(
        *torch_internals.cudnn_attention_backward(*_heads_first(dout, q, k, v, out), *options)
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    out, lse = torch_internals.flash_attention(*_heads_first(q, k, v), 0.0, causal)[:2]
    return out.transpose(1, 2), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = True
) -> Sequence[Tensor]:
    lengths, seed = (q.shape[1], k.shape[1]), _unused_seed(q)
    options = lse, None, None, *lengths, 0.0, causal, seed, seed
    return _heads_first(
        *torch_internals.flash_attention_backward(*_heads_first(dout, q, k, v, out), *options)
    )


def _flash_forward_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    longest: int,
    window: int | None = None,
    keys: Keys | None = None,
) -> Sequence[Tensor]:
    arguments = *_flash_lengths(begins, longest, keys), 0.0, keys is None, False
    return torch_internals.varlen_flash_attention(q, k, v, *arguments, **_window_sides(window))[:2]


def _flash_backward_together(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, begins: Tensor,
    longest: int,
    window: int | None = None, keys: Keys | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    arguments, seed = (*_flash_lengths(begins, longest, keys), 0.0, keys is None), _unused_seed(q)
    backward = torch_internals.varlen_flash_attention_backward
    return backward(dout, q, k, v, out, lse, *arguments, seed, seed, **_window_sides(window))


def _flash_lengths(
    begins: Tensor, longest: int, keys: Keys | None
) -> tuple[Tensor, Tensor, int, int]:
    of_keys = keys or (begins, longest)
    return begins, of_keys[0], longest, of_keys[1]


def _window_sides(window: int | None) -> dict[str, int]:
    """Returns FlashAttention's arguments for a window, which count tokens before a token and after
    it."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _unused_seed(q: Tensor) -> Tensor:
    """Returns the random seed that backward kernels take for dropout. Dropout is off, so no kernel
    reads it."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def _is_deterministic() -> bool:
    """Returns whether backward must give the same bits from run to run."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    out, lse = torch_internals.cpu_attention(*_heads_first(q, k, v), 0.0, causal)
    return out.transpose(1, 2), lse


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = True
) -> Sequence[Tensor]:
    heads_first = _heads_first(dout, q, k, v, out)
    return _heads_first(*torch_internals.cpu_attention_backward(*heads_first, lse, 0.0, causal))


def _cpu_forward_together(
    q: Tensor, k: Tensor, v: Tensor, begins: Tensor, longest: int, keys: Keys | None = None
) -> tuple[Tensor, Tensor]:
    """Attends to one document after the other: the CPU has no kernel for several."""
    lengths, of_keys = begins.diff().tolist(), (begins if keys is None else keys[0]).diff().tolist()
    documents = zip(q.split(lengths), k.split(of_keys), v.split(of_keys))
    outs, lses = zip(
        *(_cpu_forward(q[None], k[None], v[None], keys is None) for q, k, v in documents)
    )
    return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0]


def _cpu_backward_together(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, begins: Tensor,
    longest: int,
    keys: Keys | None = None,
) -> list[Tensor]:  # fmt: skip
    lengths, of_keys = begins.diff().tolist(), (begins if keys is None else keys[0]).diff().tolist()
    tensors = (
        *(x.split(lengths) for x in (dout, q)),
        *(x.split(of_keys) for x in (k, v)),
        out.split(lengths),
    )
    documents = zip(*tensors, lse.split(lengths, 1))
    options = {"causal": keys is None}
    gradients = zip(
        *(_cpu_backward(*(x[None] for x in document), **options) for document in documents)
    )
    return [torch.cat(parts, 1)[0] for parts in gradients]


def _flash_attn_4_forward(
    q: Tensor, k: Tensor, v: Tensor, *together, window: int | None = None, **options
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    options = {**_flash_attn_4_options(*together, **options), **_window_sides(window)}
    return _flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]


def _flash_attn_4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *together,
    window: int | None = None,
    **options,
) -> Sequence[Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    options = {**_flash_attn_4_options(*together, **options), **_window_sides(window)}
    return _flash_attn_bwd(q, k, v, out, dout, lse, deterministic=_is_deterministic(), **options)[
        :3
    ]


def _flash_attn_4_options(
    begins: Tensor | None = None, longest: int = 0, *, causal: bool = True, keys: Keys | None = None
) -> dict:
    """Returns flash-attn-4's arguments for documents that attend together; `causal` alone for rows
    of one each."""
    if begins is None:
        return {"causal": causal}
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return {"causal": keys is None, **dict(zip(names, _flash_lengths(begins, longest, keys)))}


_FLASH = Kernel(
    _flash_forward, _flash_backward, _flash_forward_together, _flash_backward_together, 6, 4, 2
)
KERNELS = {
    "cudnn": _FLASH._replace(
        forward=_cudnn_forward, backward=_cudnn_backward, workspace_rows=4,
        longest_together=LONGEST_TOGETHER,
        length_step=256,
    ),
    "flash": _FLASH,
    "flash-attn-4": Kernel(*2 * (_flash_attn_4_forward, _flash_attn_4_backward), 3, 3),
    "cpu": Kernel(_cpu_forward, _cpu_backward, _cpu_forward_together, _cpu_backward_together, 4, 4),
}  # fmt: skip
BACKENDS = ("auto", *KERNELS)
TESTED_FLASH_ATTN_4 = (
    "4.0.0b36",
)  # versions of flash-attn-4 whose results and speed were compared with cuDNN's


@torch_internals.assume_constant  # the function asks the driver; a compiled graph cannot
def choose_backend(requested: str, device: torch.device) -> str:
    """Returns the name of the kernel that attention runs on `device`. Names other than "auto" are
    taken or refused.

    "auto" is cuDNN's kernel on Hopper and newer GPUs. It is FlashAttention-2 on older GPUs, and on
    all GPUs if PyTorch is told to use deterministic algorithms. A run with a plan also compares
    flash-attn-4's, see `plan_memory`.

    Raises ValueError for unknown name, or a kernel that this device or installation does not have.
    """
    if requested not in BACKENDS:
        raise ValueError(
            f"attention backend must be one of {', '.join(BACKENDS)}, got {requested!r}"
        )
    if device.type != "cuda":
        if requested not in ("auto", "cpu"):
            raise ValueError(
                f'attention backend {requested!r} needs a CUDA device, got {device}; use "auto"'
            )
        return "cpu"
    if requested == "cpu":
        raise ValueError(f'attention backend "cpu" does not run on {device}; use "auto"')
    capability, has_cudnn = (
        torch.cuda.get_device_capability(device),
        torch.backends.cudnn.is_available(),
    )
    if capability < (8, 0):
        raise ValueError(
            "attention's GPU kernels need compute capability 8.0 (Ampere) or newer, "
            f"{device} has {capability[0]}.{capability[1]}; use a newer GPU, or the CPU"
        )
    if requested == "auto":
        return (
            "cudnn" if capability >= (9, 0) and has_cudnn and not _is_deterministic() else "flash"
        )
    if requested == "cudnn" and not has_cudnn:
        raise ValueError(
            'cuDNN attention needs cuDNN, which this installation of PyTorch lacks; use "auto"'
        )
    if requested == "flash-attn-4":
        if (
            importlib.util.find_spec("flash_attn") is None
            or importlib.util.find_spec("flash_attn.cute") is None
        ):
            install = f'{sys.executable} -m pip install "flash-attn-4[cu13]>=4.0.0b36"'
            raise ValueError(f'flash-attn-4 is not installed: {install}, or use "auto"')
        if capability < (9, 0):
            raise ValueError(
                f"flash-attn-4 needs compute capability 9.0, this GPU has {capability}; use flash"
            )
    return requested


def _rows(x: Tensor, T: int) -> Tensor:
    """Views whole rows, [n T, ...], as [n, T, ...]."""
    return x.unflatten(0, (-1, T))


def _window(x: Tensor, start: int, length: int) -> Tensor:
    """Returns x[start : start + length] as [1, length, heads, K], with zeros past x's end;
    causality hides the rest."""
    window = x[start : start + length]
    return (
        window if len(window) == length else F.pad(window, (0, 0, 0, 0, 0, length - len(window)))
    )[None]


def _alone(
    start: int, stop: int, q: Tensor, k: Tensor, kernel: Kernel, position_tokens: int
) -> tuple[int, list[tuple[slice, slice]]]:
    """Returns how a document attends alone: its padded length, and the query heads and key/value
    heads of each call."""
    padded = rounded_length(stop - start, max(1, kernel.length_step // position_tokens))
    is_copied = start + padded > len(q) and padded * position_tokens > _LONGEST_COPIED
    count = k.shape[1] if is_copied else 1
    H, G = q.shape[1] // count, k.shape[1] // count
    return padded, [(slice(i * H, (i + 1) * H), slice(i * G, (i + 1) * G)) for i in range(count)]


def put(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, place in zip(parts, places):
        place.copy_(part)


def full_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, backend: str,
    position_tokens: int = 1,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output [B, T, H, K] and the log-sum-exp [B, T, H] float32, computed by
    `KERNELS[backend]`.

    `into` are both, to be written to at the rows of the documents, which then need not cover all
    tokens. Each position stands for `position_tokens` tokens.
    """
    (B, T), kernel = q.shape[:2], KERNELS[backend]
    if segments is None:
        out, lse = kernel.forward(q, k, v)
        return out.contiguous(), lse.transpose(1, 2).contiguous()
    calls = document_calls(q, segments, kernel.longest_together, position_tokens)
    shape, (q, k, v) = q.shape, (x.flatten(0, 1) for x in (q, k, v))
    if (
        into is None and len(calls) == 1 and calls[0].offsets is not None
    ):  # one call makes the whole result
        out, lse = kernel.forward_together(q, k, v, calls[0].offsets, calls[0].longest)
        return out.contiguous().view(shape), lse.T.contiguous().view(shape[:3])
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    results = into or (q.new_empty(shape), q.new_empty(shape[:3], dtype=lse_dtype))
    out, lse = (x.view(B * T, *x.shape[2:]) for x in results)
    for call in calls:
        start, stop, _, begins, longest = call
        if begins is not None:
            made = kernel.forward_together(
                q[start:stop], k[start:stop], v[start:stop], begins, longest
            )
            put((made[0], made[1].T), (out[start:stop], lse[start:stop]))
            del made  # before the next call's is made
            continue
        if is_rows(call, T):
            out_n, lse_n = kernel.forward(*(_rows(x[start:stop], T) for x in (q, k, v)))
            put(
                (out_n, lse_n.transpose(1, 2)),
                (_rows(out[start:stop], T), _rows(lse[start:stop], T)),
            )
            del out_n, lse_n
            continue
        padded, ranges = _alone(start, stop, q, k, kernel, position_tokens)
        for heads, groups in ranges:
            windows = (_window(x, start, padded) for x in (q[:, heads], k[:, groups], v[:, groups]))
            out_n, lse_n = kernel.forward(*windows)
            made = out_n[0, : stop - start], lse_n[0, :, : stop - start].T
            put(made, (out[start:stop, heads], lse[start:stop, heads]))
            del out_n, lse_n, made
    return results


def full_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor | None, backend: str,
    position_tokens: int = 1, into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Returns dq, dk and dv from what `full_forward` returned; `into` are all three, as in
    `full_forward`."""
    (B, T), kernel = q.shape[:2], KERNELS[backend]
    dout = dout.contiguous()
    if segments is None:
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse.transpose(1, 2).contiguous())
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    calls = document_calls(q, segments, kernel.longest_together, position_tokens)
    shapes = q.shape, k.shape, v.shape
    dout, q, k, v, out, lse = (x.flatten(0, 1) for x in (dout, q, k, v, out, lse))
    if into is None and len(calls) == 1 and calls[0].offsets is not None:
        arguments = dout, q, k, v, out, lse.T.contiguous(), calls[0].offsets, calls[0].longest
        return [
            x.contiguous().view(shape)
            for x, shape in zip(kernel.backward_together(*arguments), shapes)
        ]
    results = into or [q.new_empty(shape) for shape in shapes]
    gradients = [x.view(B * T, *x.shape[2:]) for x in results]
    for call in calls:
        start, stop, _, begins, longest = call
        if begins is not None:
            own = [x[start:stop] for x in (dout, q, k, v, out)]
            made = kernel.backward_together(*own, lse[start:stop].T.contiguous(), begins, longest)
            put(made, [x[start:stop] for x in gradients])
            del made
            continue
        if is_rows(call, T):
            own = [_rows(x[start:stop], T) for x in (dout, q, k, v, out)]
            made = kernel.backward(*own, _rows(lse[start:stop], T).transpose(1, 2).contiguous())
            put(made, [_rows(x[start:stop], T) for x in gradients])
            del own, made
            continue
        padded, ranges = _alone(start, stop, q, k, kernel, position_tokens)
        for heads, groups in ranges:
            # Rows of padding add nothing: their dout is 0, and their log-sum-exp makes all
            # probabilities 0.
            dout_n = _window(dout[start:stop, heads], 0, padded)
            lse_n = F.pad(
                lse[start:stop, heads].T, (0, padded - (stop - start)), value=_NEVER_ATTENDS
            ).contiguous()
            windows = [
                _window(x, start, padded)
                for x in (q[:, heads], k[:, groups], v[:, groups], out[:, heads])
            ]
            parts = [x[0, : stop - start] for x in kernel.backward(dout_n, *windows, lse_n[None])]
            put(parts, [x[start:stop, own] for x, own in zip(gradients, (heads, groups, groups))])
            del dout_n, lse_n, windows, parts  # before the next ones are made
    return results


def check_shapes(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> None:
    """Raises ValueError for shapes that no kind of attention takes, and for segments on a GPU."""
    (B, T, H, K), G = q.shape, k.shape[2]
    if k.shape != (B, T, G, K) or v.shape != k.shape or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"attention needs q [B, T, H, K] and k, v [B, T, G, K] with H = n G, got {shapes}"
        )
    if segments is not None and segments.is_cuda:
        raise ValueError("segments must lie on the CPU: they decide what is launched")


@dataclass(frozen=True)
class Full(AttentionKind):
    """Attention to everything before a token and to the token itself."""

    name: ClassVar[str] = "full"
    reads_prompts: ClassVar[bool] = True
    h200_rates: ClassVar[dict[str, float]] = {
        "full forward": 570e12,
        "full backward": 535e12,
        # Calls per second: long packed documents attend alone, and a call costs time on top of its
        # FLOPs.
        "full calls forward": 12_000,
        "full calls backward": 5_000,
        "together forward": 570e12 * 0.58,
        "together backward": 535e12 * 0.58,
    }
    draws_full_power: ClassVar[bool] = True

    def describe(self, selected_blocks: str) -> str:
        return "everything before a token"

    def check(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, impl: str) -> bool:
        check_shapes(q, k, v, segments)
        K = q.shape[-1]
        if q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"attention on CUDA needs bfloat16 or float16, got {q.dtype}; cast q, k and v"
            )
        if q.is_cuda and (K > 256 or K % 8):
            raise ValueError(
                f"attention on CUDA needs a head_dim that is a multiple of 8 up to 256, got {K}"
            )
        return False

    def forward(self, q, k, v, segments, lists, backend, on_triton):
        out, lse = full_forward(q, k, v, segments, backend)
        if has_prompts(segments):
            attend_to_prompts(q, k, v, out, lse, segments, KERNELS[backend])
        return [out], [lse], None

    def backward(self, dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton):
        gradients = full_backward(dout, q, k, v, outs[0], lses[0], segments, backend)
        if has_prompts(segments):
            add_gradients_of_prompts(
                dout, q, k, v, outs[0], lses[0], gradients, segments, KERNELS[backend]
            )
        return gradients

    def decode(self, q, k, v, gates):
        q, k, v = _heads_first(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def footprint(
        self, T, H, G, K, *, element_size=2, backend="auto", context_length=None, longest=None
    ):
        of_q, of_k = H * K * element_size, G * K * element_size
        row = context_length or T
        backward = backward_workspace(backend, T, of_q, of_k, row, longest, num_key_value_heads=G)
        of_call = (
            0 if longest is None else T * of_q
        )  # its output, before it is copied to the output of all documents
        return AttentionBytes(of_q + 4 * H, 0, of_call, backward)

    def flops(self, length, H, G, K):
        forward = attention_flops(H, K, length * (length + 1) / 2)
        return AttentionFlops(forward, 0, BACKWARD_FLOPS * forward)

    def prompt_flops(self, prompt, answers, tokens, H, G, K):
        forward = attention_flops(H, K, prompt * tokens)
        return AttentionFlops(forward, 0, BACKWARD_FLOPS * forward)

    def work(self, lengths, H, G, K, *, backend, steps, is_packed=True, prompts=()):
        longest = (
            KERNELS["cudnn" if backend == "auto" else backend].longest_together if is_packed else 0
        )
        alone = [pair for pair in lengths if pair[0] > longest]
        together = [pair for pair in lengths if pair[0] <= longest]
        flops = attention_flops(H, K, sum(count * n * (n + 1) / 2 for n, count in alone))
        of_together = sum(count * together_pairs(n * (n + 1) / 2, n) for n, count in together)
        amounts = {"full": flops, "together": attention_flops(H, K, of_together)}
        for prompt, _, tokens, count in prompts:
            amounts["full" if prompt > longest else "together"] += attention_flops(
                H, K, count * prompt * tokens
            )
        calls = steps * sum(count for _, count in alone) if is_packed else 0
        return AttentionWork(
            {**{f"{name} forward": n for name, n in amounts.items()}, "full calls forward": calls},
            {},
            {
                **{f"{name} backward": BACKWARD_FLOPS * n for name, n in amounts.items()},
                "full calls backward": calls,
            },
        )

    def rates_with(self, backend, native, head_dim):
        alone = 1 if native == "flash" else _HOPPER_RATES[backend]
        # FlashAttention-2 attends to short packed documents where cuDNN attends to long ones.
        together = _HOPPER_RATES["flash"] if native == backend == "cudnn" else alone
        rates = {
            name: rate * (1 if "calls" in name else alone) for name, rate in self.h200_rates.items()
        }
        rates |= {f"together {part}": together * self.h200_rates[f"full {part}"] for part in _PARTS}
        wide = dict(zip(_PARTS, _WIDE_RATES[backend] if head_dim > 128 else (1, 1)))
        return {
            name: rate * (1 if "calls" in name else wide[name.split()[-1]])
            for name, rate in rates.items()
        }

    def measure_rates(self, H, G, K, context_length, backend, seconds, device):
        """Measures one document of 16,384 tokens, and packed documents that attend together and
        alone.

        Past 131,072 tokens forward gets slower: the one document then has the context's length,
        524,288 tokens at most, and one key/value head.
        """
        group, T, groups = H // G, 16_384, G
        if context_length > 131_072:
            T, groups = min(context_length, 524_288), 1
        rates = self.rates_at(T, group * groups, groups, K, backend, seconds, device)

        def packed(count: int, length: int) -> dict[str, float]:
            segments = torch.tensor([[0, i * length, (i + 1) * length] for i in range(count)])
            return dict(
                zip(_PARTS, self.time(count * length, H, G, K, backend, seconds, device, segments))
            )

        count, length = 64, 512
        together = packed(count, length)
        forward = attention_flops(H, K, count * together_pairs(length * (length + 1) / 2, length))
        rates["together forward"] = forward / together["forward"]
        rates["together backward"] = BACKWARD_FLOPS * forward / together["backward"]
        if KERNELS[backend].longest_together == math.inf:  # no document attends alone
            return rates | {
                f"full calls {part}": self.h200_rates[f"full calls {part}"] for part in _PARTS
            }
        count, length = 12, LONGEST_TOGETHER + 256  # just long enough to attend alone
        flops, alone = self.flops(length, H, G, K), packed(count, length)
        for part in _PARTS:
            left = alone[part] - count * getattr(flops, part) / rates[f"full {part}"]
            rates[f"full calls {part}"] = count / max(left, 1e-9)
        return rates


FULL = Full()
_PARTS = "forward", "backward"
# Measured on an H200: the rate of each attention kernel divided by cuDNN's. FlashAttention-2 does
# not use Hopper's new instructions. On an A100, for which it was written, it reaches the share of
# peak that cuDNN reaches on Hopper (Dao, arXiv 2307.08691).
_HOPPER_RATES = {"cudnn": 1.0, "flash": 0.58, "flash-attn-4": 1.14}
# The rates of forward and backward with heads of 256, divided by the rates with heads of 128, on an
# H100 and an H200. flash-attn-4's were not measured: they are as cuDNN's.
_WIDE_RATES = {"cudnn": (1.0, 0.71), "flash": (0.8, 0.86), "flash-attn-4": (0.88, 0.62)}


def together_pairs(pairs: float, tokens: float) -> float:
    """Returns the pairs of query and key to count for documents that attend together and have
    `pairs` of their own.

    Memory traffic and partly filled tiles cost as much as 360 more keys per token. Measured:
    forward and backward of 131,072 tokens in FlashAttention-2 take 8.6 ms in documents of 128, and
    498 ms in documents of up to 65,536 (32 query and 8 key/value heads of 128, one H200).
    """
    return pairs + 360 * tokens


def attention_flops(num_heads: int, head_dim: int, num_pairs: float) -> float:
    """Returns forward's floating-point operations for `num_pairs` pairs of a query and a key that
    the query sees."""
    return 4 * num_heads * head_dim * num_pairs


def backward_workspace(
    backend: str, num_tokens: int, q_bytes: int, k_bytes: int, context_length: int,
    longest: int | None,
    position_tokens: int = 1, num_key_value_heads: int = 1,
) -> int:  # fmt: skip
    """Returns the bytes that backward of all rows takes besides its arguments and results.

    Packed rows run one call after another, each with its own results. All rows but the one with
    several documents may share a call. A document that attends alone also has a padded copy of dout
    and, at the end of the batch, of q, k, v and out. `q_bytes` and `k_bytes` are of one token, a
    row has `context_length` tokens, and `longest` are the longest packed document's; None: each row
    is one document. If a position stands for `position_tokens`, all numbers count positions.
    `num_key_value_heads` attend at a time.
    """
    kernel = KERNELS["cudnn" if backend == "auto" else backend]
    spared = kernel.expanded_rows if q_bytes == k_bytes else 0
    row = (kernel.workspace_rows - spared) * q_bytes
    at_once = row * num_tokens if longest is None or longest >= context_length else 0
    if longest is None:
        return at_once
    longest_together = min(longest, kernel.longest_together / position_tokens)
    counted = max(
        most_tokens_together(num_tokens, position_tokens), int(longest_together) + SPACING
    )
    tokens = min(num_tokens, counted)
    together = (
        tokens * ((kernel.rows_together - spared + 1) * q_bytes + 2 * k_bytes)
        + (counted - tokens) * 2 * q_bytes
    )
    alone = 0
    if longest > longest_together:
        padded = rounded_length(longest, max(1, kernel.length_step // position_tokens))
        copies = 4 if padded * position_tokens <= _LONGEST_COPIED or num_key_value_heads == 1 else 2
        alone = (row + copies * (q_bytes + k_bytes)) * padded
        if (
            longest >= context_length and position_tokens == 1
        ):  # else positions of all rows are in one row
            alone = max(alone, (row + q_bytes + 2 * k_bytes) * (num_tokens - context_length))
    return max(at_once, together, alone)
