"""Libraries' kernels of causal attention, each as one `Kernel`, and the choice between them.

cuDNN's dq may differ in its last bits from run to run, and PyTorch offers no deterministic mode of
it. Under `torch.use_deterministic_algorithms(True)`, "auto" therefore means FlashAttention-2. Its
backward is then deterministic, as flash-attn-4's is. That takes more float32 sums of dq, which no
plan counts. Also set `torch.utils.deterministic.fill_uninitialized_memory` to False, or PyTorch
fills every new tensor.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import torch_internals
from .documents import LONGEST_TOGETHER

# Tokens. Shorter rows and prompts run in FlashAttention-2: cuDNN refuses a row of one token.
_CUDNN_SHORTEST = 64

# where the keys of documents that attend together begin, and the most keys of one document
Keys = tuple[Tensor, int]


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
    # dout, q, k, v, out, log-sum-exp -> dq, dk, dv, in the layouts of q, k and v
    backward: Callable
    # q [N, H, K], k and v [N, G, K], begins, longest -> out, log-sum-exp [H, N] float32
    forward_together: Callable
    # dout, q, k, v, out, log-sum-exp, begins, longest -> dq, dk, dv
    backward_together: Callable
    # bytes that `backward` allocates for itself, divided by q's bytes; measured
    workspace_rows: int
    # bytes of `backward_together` in the same unit, without the float32 dq of SPACING more tokens
    # per document
    rows_together: int
    # the part of both for dk and dv of each query head, where query heads share keys
    expanded_rows: int = 0
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
    begins_k, longest_k = keys or (begins, longest)
    return begins, begins_k, longest, longest_k


def _window_sides(window: int | None) -> dict[str, int]:
    """Returns FlashAttention's arguments for a window: tokens before a token, and after it."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _unused_seed(q: Tensor) -> Tensor:
    """Returns the random seed that backward kernels take for dropout.

    Dropout is off, so no kernel reads it.
    """
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
    lengths, lengths_k = _cpu_lengths(begins, keys)
    documents = zip(q.split(lengths), k.split(lengths_k), v.split(lengths_k))
    outs, lses = zip(
        *(_cpu_forward(q[None], k[None], v[None], keys is None) for q, k, v in documents)
    )
    return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0]


def _cpu_backward_together(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, begins: Tensor,
    longest: int,
    keys: Keys | None = None,
) -> list[Tensor]:  # fmt: skip
    lengths, lengths_k = _cpu_lengths(begins, keys)
    tokens = lengths, lengths, lengths_k, lengths_k, lengths
    tensors = [x.split(sizes) for x, sizes in zip((dout, q, k, v, out), tokens)]
    gradients = []
    for document in zip(*tensors, lse.split(lengths, 1)):
        dout, q, k, v, out, lse = (x[None] for x in document)
        gradients.append(_cpu_backward(dout, q, k, v, out, lse, keys is None))
    return [torch.cat(documents, 1)[0] for documents in zip(*gradients)]


def _cpu_lengths(begins: Tensor, keys: Keys | None) -> tuple[list[int], list[int]]:
    """Returns the tokens of each document, and of its keys."""
    begins_k = begins if keys is None else keys[0]
    return begins.diff().tolist(), begins_k.diff().tolist()


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
    options["deterministic"] = _is_deterministic()
    return _flash_attn_bwd(q, k, v, out, dout, lse, **options)[:3]


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
# versions of flash-attn-4 whose results and speed were compared with cuDNN's
TESTED_FLASH_ATTN_4 = ("4.0.0b36",)


@torch_internals.assume_constant  # the function asks the driver; a compiled graph cannot
def choose_backend(requested: str, device: torch.device) -> str:
    """Returns the name of the kernel that attention runs on `device`. Names other than "auto" are
    taken or refused.

    "auto" is cuDNN's kernel on Hopper and newer GPUs. It is FlashAttention-2 on older GPUs, and on
    all GPUs if PyTorch is told to use deterministic algorithms. A run with a plan also compares
    flash-attn-4's, see `plan_memory`.

    Raises ValueError for an unknown name, or a kernel that this device or installation does not
    have.
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
    capability = torch.cuda.get_device_capability(device)
    has_cudnn = torch.backends.cudnn.is_available()
    if capability < (8, 0):
        raise ValueError(
            "attention's GPU kernels need compute capability 8.0 (Ampere) or newer, "
            f"{device} has {capability[0]}.{capability[1]}; use a newer GPU, or the CPU"
        )
    if requested == "auto":
        prefers_cudnn = capability >= (9, 0) and has_cudnn and not _is_deterministic()
        return "cudnn" if prefers_cudnn else "flash"
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
