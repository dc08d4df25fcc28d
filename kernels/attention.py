"""Causal attention of query heads that share key/value heads, within the documents of a packed sequence.

    out[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K)) v[s],  s <= t and s in t's document

This file chooses which library's kernel computes attention. Query head h reads key/value head h // (H / G); keys and
values are never repeated in memory. Kept for backward, for each token: q, k, v and out, (2H + 2G) K elements, and the
float32 log-sum-exp, H elements.

Method: Dao et al., FlashAttention, arXiv 2205.14135; grouped-query attention: Ainslie et al., arXiv 2305.13245.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import torch_internals
from kernels.common import operation

_CUDNN_SHORTEST = 64  # tokens; shorter rows run in FlashAttention-2, as cuDNN refuses a row of one token
_LONGEST_COPIED = 32_768  # tokens; a document of more, rounded up, is not copied to pad it at the end of its row
_NEVER_ATTENDS = 1e30  # a log-sum-exp under which every probability is exactly 0
BACKWARD_FLOPS = 2.5  # floating-point operations of backward over those of forward: five matrix products against two


def attention_reference(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, segments: Tensor | None = None) -> Tensor:
    """Attention with the T x T matrix written out, in the inputs' dtype. Arguments as `attention`."""
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    document_BT = torch.zeros(B, T, dtype=torch.long)
    for i, (row, start, stop) in enumerate(segments.tolist() if segments is not None else []):
        document_BT[row, start:stop] = i
    document_BT = document_BT.to(q_BTHK.device)
    visible_BTT = (document_BT[:, :, None] == document_BT[:, None, :]).tril()
    q_BTGRK = q_BTHK.unflatten(2, (G, H // G))
    scores = torch.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BTGK) / math.sqrt(K)
    probabilities = scores.masked_fill(~visible_BTT[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bgrts,bsgk->btgrk", probabilities, v_BTGK).flatten(2, 3)


class Kernel(NamedTuple):
    """A library's causal attention over rows of one document each.

    Args:
        forward: q [B, T, H, K], k and v [B, T, G, K] -> out [B, T, H, K], log-sum-exp [B, H, T] float32.
        backward: dout, q, k, v, out, log-sum-exp -> dq, dk, dv, in the layouts of q, k and v.
        workspace_rows: memory that backward allocates for itself, as a multiple of q's: float32 dq, dk, dv of each
            query head. Measured.
        length_multiple: tokens; documents are rounded up to a multiple, as cuDNN builds a plan for each new length.
    """

    forward: Callable
    backward: Callable
    workspace_rows: int = 4
    length_multiple: int = 1


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, T, H, K] <-> [B, H, T, K]"""
    return [x.transpose(1, 2) for x in tensors]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if q.shape[1] < _CUDNN_SHORTEST:
        return _flash_forward(q, k, v)
    out, lse = torch_internals.cudnn_attention(*_heads_first(q, k, v), None, True, 0.0, True)[:2]
    return out.transpose(1, 2), lse.squeeze(-1)


def _cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    T = q.shape[1]
    if T < _CUDNN_SHORTEST:
        return _flash_backward(dout, q, k, v, out, lse)
    seed = _unused_seed(q)
    return _heads_first(*torch_internals.cudnn_attention_backward(
        *_heads_first(dout, q, k, v, out), lse.unsqueeze(-1), seed, seed, None, None, None, T, T, 0.0, True
    ))  # fmt: skip


def _flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch_internals.flash_attention(*_heads_first(q, k, v), 0.0, True)[:2]
    return out.transpose(1, 2), lse


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    T, seed = q.shape[1], _unused_seed(q)
    return _heads_first(*torch_internals.flash_attention_backward(
        *_heads_first(dout, q, k, v, out), lse, None, None, T, T, 0.0, True, seed, seed
    ))  # fmt: skip


def _unused_seed(q: Tensor) -> Tensor:
    """The random seed that backward kernels take for dropout, which is off: no kernel reads it."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch_internals.cpu_attention(*_heads_first(q, k, v), 0.0, True)
    return out.transpose(1, 2), lse


def _cpu_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    heads_first = _heads_first(dout, q, k, v, out)
    return _heads_first(*torch_internals.cpu_attention_backward(*heads_first, lse, 0.0, True))


def _flash_attn_4_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2]


def _flash_attn_4_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(q, k, v, out, dout, lse, causal=True)[:3]


KERNELS = {
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, length_multiple=1024),
    "flash": Kernel(_flash_forward, _flash_backward, workspace_rows=6),
    "flash-attn-4": Kernel(_flash_attn_4_forward, _flash_attn_4_backward, workspace_rows=3),
    "cpu": Kernel(_cpu_forward, _cpu_backward),
}
BACKENDS = ("auto", *KERNELS)


@torch.compiler.assume_constant_result  # the function asks the driver; a compiled graph cannot
def choose_backend(requested: str, device: torch.device) -> str:
    """The kernel that `attention` will run on `device`: never a slower one than was asked for.

    "auto" is cuDNN's kernel on Hopper and newer, FlashAttention-2 on older GPUs, PyTorch's CPU kernel on a CPU.

    Raises:
        ValueError: unknown name, or a kernel that this device or installation does not have.
    """
    if requested not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if device.type != "cuda":
        if requested not in ("auto", "cpu"):
            raise ValueError(f'attention backend {requested!r} needs a CUDA device, got {device}; use "auto"')
        return "cpu"
    if requested == "cpu":
        raise ValueError(f'attention backend "cpu" does not run on {device}; use "auto"')
    capability, has_cudnn = torch.cuda.get_device_capability(device), torch.backends.cudnn.is_available()
    if capability < (8, 0):
        raise ValueError(
            "attention's GPU kernels need compute capability 8.0 (Ampere) or newer, "
            f"{device} has {capability[0]}.{capability[1]}; use a newer GPU, or the CPU"
        )
    if requested == "auto":
        return "cudnn" if capability >= (9, 0) and has_cudnn else "flash"
    if requested == "cudnn" and not has_cudnn:
        raise ValueError('cuDNN attention needs cuDNN, which this installation of PyTorch lacks; use "auto"')
    if requested == "flash-attn-4":
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            raise ValueError('flash-attn-4 is not installed: pip install "flash-attn-4>=4.0.0b36", or use "auto"')
        if capability < (9, 0):
            raise ValueError(f"flash-attn-4 needs compute capability 9.0, this GPU has {capability}; use flash")
    return requested


def _padded_length(backend: str, length: int, room: int, position_tokens: int = 1) -> int:
    """Positions of the window in which a document of `length` runs; its row has `room` from the document's start on.

    position_tokens: that a position stands for, 16 in NSA's compressed branch; multiples are of as many tokens.
    """
    multiple = max(1, KERNELS[backend].length_multiple // position_tokens)
    padded = -(-length // multiple) * multiple
    return padded if padded * position_tokens <= _LONGEST_COPIED else min(padded, room)


def _window(x: Tensor, row: int, start: int, length: int) -> Tensor:
    """`length` tokens of a row, [1, length, heads, K]: the row's own from `start` on and, past its end, zeros.

    A window may run into the next document, which causality hides from this one; the extra rows are thrown away.
    """
    window = x[row : row + 1, start : start + length]
    return F.pad(window, (0, 0, 0, 0, 0, length - window.shape[1])) if window.shape[1] < length else window


@operation("fathom::attention_forward", keepable="results")
def _attention_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, backend: str, position_tokens: int = 1
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    if segments is None:
        out, lse = KERNELS[backend].forward(q, k, v)
        return out.contiguous(), lse.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    for row, start, stop in segments.tolist():
        length = stop - start
        padded = _padded_length(backend, length, T - start, position_tokens)
        out_window, lse_window = KERNELS[backend].forward(*(_window(x, row, start, padded) for x in (q, k, v)))
        out[row, start:stop] = out_window[0, :length]
        lse[row, :, start:stop] = lse_window[0, :, :length]
    return out, lse


@_attention_forward.register_fake
def _(q, k, v, segments, backend, position_tokens=1):
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, T, dtype=torch.float32)


@torch.library.custom_op("fathom::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor | None, backend: str,
    position_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dout = dout.contiguous()
    if segments is None:
        dq, dk, dv = KERNELS[backend].backward(dout, q, k, v, out, lse)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for row, start, stop in segments.tolist():
        length = stop - start
        padded = _padded_length(backend, length, q.shape[1] - start, position_tokens)
        # The rows past the document have no gradient and, by their log-sum-exp, no probabilities.
        dout_window = dout.new_zeros(1, padded, *dout.shape[2:])
        dout_window[0, :length] = dout[row, start:stop]
        lse_window = lse.new_full((1, lse.shape[1], padded), _NEVER_ATTENDS)
        lse_window[0, :, :length] = lse[row, :, start:stop]
        q_window, k_window, v_window, out_window = (_window(x, row, start, padded) for x in (q, k, v, out))
        gradients = KERNELS[backend].backward(dout_window, q_window, k_window, v_window, out_window, lse_window)
        for whole, part in zip((dq, dk, dv), gradients):
            whole[row, start:stop] = part[0, :length]
    return dq, dk, dv


@_attention_backward.register_fake
def _(dout, q, k, v, out, lse, segments, backend, position_tokens=1):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    *qkv, segments, ctx.backend, ctx.position_tokens = inputs
    ctx.save_for_backward(*qkv, *output, segments)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout, _dlse):
    q, k, v, out, lse, segments = ctx.saved_tensors
    options = segments, ctx.backend, ctx.position_tokens
    return *_attention_backward(dout, q, k, v, out, lse, *options), None, None, None


_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, segments: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Causal grouped-query attention, each document of a packed sequence on its own.

    Args:
        q_BTHK: queries [B, T, H, K]; bfloat16 or float16 on CUDA, any floating dtype on a CPU.
        k_BTGK, v_BTGK: keys and values [B, T, G, K], G a divisor of H.
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, first token, one past the last token) that
            cover every token once; None: each batch row is one document.
        backend: one of `BACKENDS`, see `choose_backend`.

    Returns:
        [B, T, H, K] in q's dtype.

    Raises:
        ValueError: heads that do not divide, shapes or a dtype that no kernel takes, an unavailable backend.
    """
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    if k_BTGK.shape != (B, T, G, K) or v_BTGK.shape != k_BTGK.shape or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BTHK, k_BTGK, v_BTGK))
        raise ValueError(f"attention needs q [B, T, H, K] and k, v [B, T, G, K] with H a multiple of G, got {shapes}")
    if q_BTHK.is_cuda and q_BTHK.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"attention on CUDA needs bfloat16 or float16, got {q_BTHK.dtype}; cast q, k and v")
    if q_BTHK.is_cuda and (K > 256 or K % 8):
        raise ValueError(f"attention on CUDA needs a head_dim that is a multiple of 8 up to 256, got {K}")
    if segments is not None and segments.is_cuda:
        raise ValueError("segments must lie on the CPU: they decide what is launched")
    return _attention_forward(q_BTHK, k_BTGK, v_BTGK, segments, choose_backend(backend, q_BTHK.device))[0]


def attention_flops(num_heads: int, head_dim: int, num_pairs: float) -> float:
    """Floating-point operations of forward over `num_pairs` pairs of a query and a key that the query sees."""
    return 4 * num_heads * head_dim * num_pairs


def backward_workspace(
    backend: str, num_tokens: int, q_bytes: int, k_bytes: int, context_length: int, longest: int | None,
    position_tokens: int = 1,
) -> int:  # fmt: skip
    """Bytes that backward takes beside its arguments and results.

    Rows of one document each run at once. Of packed rows one document runs after the other, with copies of its dout,
    dq, dk and dv; where its row ends, of q, k, v and out as well.

    Args:
        num_tokens: of all rows, which have `context_length` each.
        q_bytes, k_bytes: of one token's queries and keys.
        longest: tokens of the longest packed document; None: each row is one document.
        position_tokens: where positions stand for several tokens, how many; all numbers above are then of positions.
    """
    backend = "cudnn" if backend == "auto" else backend
    kernel = KERNELS[backend]
    row = kernel.workspace_rows * q_bytes
    at_once = row * num_tokens if longest is None or longest >= context_length else 0
    if longest is None:
        return at_once
    padded = _padded_length(backend, longest, context_length, position_tokens)
    copies = 4 if padded * position_tokens <= _LONGEST_COPIED and kernel.length_multiple > 1 else 2
    return max(at_once, (row + copies * (q_bytes + k_bytes)) * padded)
