"""Causal depthwise convolution of width 4 with SiLU, then the norm of queries and keys, in one pass
over memory.

The input has a row of channels for each token: query heads, key heads, value heads. With x_t = 0
before a document,

    y_t = silu(w_0 x_(t-3) + w_1 x_(t-2) + w_2 x_(t-1) + w_3 x_t)      per channel
    v = y,   k = y / sqrt(sum over the head of y^2 + eps),   q the same times K^-0.5

Backward makes y again. Each program walks down through a strip of tokens, and carries what tokens
owe to the three before them, so that it reads the input and the gradient once, and writes the
input's gradient once.

Kept for backward: the input and the weight.

The weight's gradient is summed in float32 in two stages, without atomics: every run gives the same
bits.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .attention.documents import as_bytes, check_documents, document_bounds
from .common import operation, sum_dtype, use_triton

WIDTH = 4  # tokens that the convolution sees
BLOCK_T = 16  # tokens of a program in forward
STRIPS, STRIP = 4, 128  # strips of a program in backward, and their tokens
EPS = 1e-6
HEAD_WIDTHS = 16, 32, 64, 128, 256  # Triton's kernels take these


def qkv_convolution_reference(
    x_BTC: Tensor, weight_CW: Tensor, G: int, H: int, K: int, *, segments: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch with the contract of `qkv_convolution`; float64 stays float64."""
    B, T, C = x_BTC.shape
    dtype = sum_dtype(x_BTC)
    rows = x_BTC.to(dtype).reshape(B * T, C)
    weight = weight_CW.to(dtype)
    parts = []
    for first, length in zip(
        *(bound.tolist() for bound in document_bounds(B, T, as_bytes(segments)))
    ):
        padded = F.pad(rows[first : first + length].T, (WIDTH - 1, 0))
        parts.append(F.silu(F.conv1d(padded, weight[:, None], groups=C)).T)
    q, k, v = torch.cat(parts).view(B, T, C).split([G * K, G * K, C - 2 * G * K], dim=-1)
    q = q.unflatten(-1, (G, K))
    k = k.unflatten(-1, (G, K))
    v = v.unflatten(-1, (H, -1))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    return tuple(x.to(x_BTC.dtype) for x in (q * K**-0.5, k, v))


@functools.lru_cache(maxsize=4)
def _positions(B: int, T: int, documents: bytes | None, device: torch.device) -> Tensor:
    """Returns each token's position in its document, at most 3, int8 [B * T].

    All layers of a step share it.
    """
    start, length = document_bounds(B, T, documents)
    positions = torch.arange(B * T) - start.repeat_interleave(length)
    return positions.clamp_(max=WIDTH - 1).to(torch.int8).to(device)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_tokens"])
def _convolution_kernel(
    x_ptr, weight_ptr, positions_ptr, out_ptr, num_tokens, x_stride, eps, scale,
    HEADS: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Writes one head of BLOCK_T tokens.

    `x_ptr` and `weight_ptr` point to the first channel of the first head.
    """
    first = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK_T
    head = tl.program_id(0) % HEADS
    t, c = tl.arange(0, BLOCK_T), tl.arange(0, K)
    is_token = t < num_tokens - first
    position = tl.load(positions_ptr + first + t, mask=is_token, other=0)
    x = x_ptr + first * x_stride + head * K + (t[:, None] * x_stride + c[None, :])
    weight = weight_ptr + (head * K + c) * 4
    total = tl.zeros([BLOCK_T, K], dtype=tl.float32)
    for back in tl.static_range(4):
        seen = tl.load(
            x - back * x_stride, mask=(is_token & (position >= back))[:, None], other=0.0
        )
        total += seen.to(tl.float32) * tl.load(weight + 3 - back).to(tl.float32)[None, :]
    y = total * _sigmoid(total)
    if NORMALISE:
        y *= (tl.rsqrt(tl.sum(y * y, axis=1) + eps) * scale)[:, None]
    out = out_ptr + (first * HEADS + head) * K + (t[:, None] * (HEADS * K) + c[None, :])
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=is_token[:, None])


@triton.jit
def _d_total(d_out, x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3, eps, scale, NORMALISE: tl.constexpr):
    """Returns the gradient of a row's sum over taps, [STRIPS, K]; x_3 is three tokens earlier."""
    total = w_3 * x_0 + w_2 * x_1 + w_1 * x_2 + w_0 * x_3
    sigmoid = _sigmoid(total)
    y = total * sigmoid
    if NORMALISE:
        rstd = tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
        d_out = (scale * rstd) * (d_out - y * (rstd * rstd * tl.sum(d_out * y, axis=1)[:, None]))
    return d_out * (sigmoid + y * (1.0 - sigmoid))


@triton.jit
def _load(head, t, stride, num_tokens):
    return tl.load(
        head + t[:, None] * stride, mask=((t >= 0) & (t < num_tokens))[:, None], other=0.0
    )


@triton.jit
def _walk_down(
    d_out_head, x_head, weight_ptr, positions_ptr, dx_head, partial_ptr, top, num_tokens, x_stride,
    eps, scale, CHANNELS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, STRIPS: tl.constexpr,
    STRIP: tl.constexpr, NORMALISE: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Walks down STRIPS strips of one head. Documents start in them only with HAS_STARTS.

    x_0 to x_3 are a token and the three before it. owed_1 to owed_3 are the gradients that later
    tokens owe to these three.
    """
    weight = weight_ptr + tl.arange(0, K) * 4
    w_0 = tl.load(weight).to(tl.float32)[None, :]
    w_1 = tl.load(weight + 1).to(tl.float32)[None, :]
    w_2 = tl.load(weight + 2).to(tl.float32)[None, :]
    w_3 = tl.load(weight + 3).to(tl.float32)[None, :]
    zeros = tl.zeros([STRIPS, K], dtype=tl.float32)
    dw_0, dw_1, dw_2, dw_3 = zeros, zeros, zeros, zeros
    owed_1, owed_2, owed_3 = zeros, zeros, zeros
    x_0 = _load(x_head, top, x_stride, num_tokens).to(tl.float32)
    x_1 = _load(x_head, top - 1, x_stride, num_tokens).to(tl.float32)
    x_2 = _load(x_head, top - 2, x_stride, num_tokens).to(tl.float32)
    # Rows are loaded two steps before they are used.
    next_x = _load(x_head, top - 3, x_stride, num_tokens)
    then_x = _load(x_head, top - 4, x_stride, num_tokens)
    next_d = _load(d_out_head, top, HEADS * K, num_tokens)
    then_d = _load(d_out_head, top - 1, HEADS * K, num_tokens)
    for n in range(STRIP + 3):
        t = top - n
        is_token = t < num_tokens
        x_3 = next_x.to(tl.float32)
        d_out = next_d.to(tl.float32)
        next_x, next_d = then_x, then_d
        then_x = _load(x_head, t - 5, x_stride, num_tokens)
        then_d = _load(d_out_head, t - 2, HEADS * K, num_tokens)
        if HAS_STARTS:
            position = tl.load(positions_ptr + t, mask=is_token, other=0)[:, None]
            seen_1 = tl.where(position >= 1, x_1, 0.0)
            seen_2 = tl.where(position >= 2, x_2, 0.0)
            seen_3 = tl.where(position >= 3, x_3, 0.0)
        else:
            seen_1, seen_2, seen_3 = x_1, x_2, x_3
        d_total = _d_total(
            d_out, x_0, seen_1, seen_2, seen_3, w_0, w_1, w_2, w_3, eps, scale, NORMALISE
        )
        is_own = n >= 3
        dx = owed_1 + w_3 * d_total
        tl.store(
            dx_head + t[:, None] * CHANNELS,
            dx.to(dx_head.dtype.element_ty),
            mask=(is_token & is_own)[:, None],
        )
        owed_1 = owed_2 + w_2 * d_total
        owed_2 = owed_3 + w_1 * d_total
        owed_3 = w_0 * d_total
        if HAS_STARTS:  # the first token of a document owes nothing
            owed_1 = tl.where(position >= 1, owed_1, 0.0)
            owed_2 = tl.where(position >= 1, owed_2, 0.0)
            owed_3 = tl.where(position >= 1, owed_3, 0.0)
        if is_own:
            dw_0 += seen_3 * d_total
            dw_1 += seen_2 * d_total
            dw_2 += seen_1 * d_total
            dw_3 += x_0 * d_total
        x_0, x_1, x_2 = x_1, x_2, x_3
    partial = partial_ptr + tl.arange(0, K) * 4
    tl.store(partial, tl.sum(dw_0, axis=0))
    tl.store(partial + 1, tl.sum(dw_1, axis=0))
    tl.store(partial + 2, tl.sum(dw_2, axis=0))
    tl.store(partial + 3, tl.sum(dw_3, axis=0))


@triton.jit(do_not_specialize=["num_tokens"])
def _convolution_backward_kernel(
    d_out_ptr, x_ptr, weight_ptr, positions_ptr, dx_ptr, partial_ptr, num_tokens, x_stride, eps,
    scale, CHANNELS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, STRIPS: tl.constexpr,
    STRIP: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Works on STRIPS strips of one head, and looks for documents' starts among BLOCK tokens, a
    power of two."""
    head = tl.program_id(0) % HEADS
    block = (tl.program_id(0) // HEADS).to(tl.int64)
    first = block * (STRIPS * STRIP)
    c = head * K + tl.arange(0, K)[None, :]
    t = tl.arange(0, BLOCK)
    near = (t < STRIPS * STRIP + 3) & (first + t < num_tokens)
    has_starts = tl.min(tl.load(positions_ptr + first + t, mask=near, other=3), axis=0) < 3
    # [STRIPS]: the third token above each strip.
    top = first + tl.arange(0, STRIPS) * STRIP + STRIP + 2
    weight = weight_ptr + head * K * 4
    partial = partial_ptr + (block * CHANNELS + head * K) * 4
    if has_starts:
        _walk_down(
            d_out_ptr + c, x_ptr + c, weight, positions_ptr, dx_ptr + c, partial, top, num_tokens,
            x_stride, eps, scale, CHANNELS, HEADS, K, STRIPS, STRIP, NORMALISE, True,
        )  # fmt: skip
    else:
        _walk_down(
            d_out_ptr + c, x_ptr + c, weight, positions_ptr, dx_ptr + c, partial, top, num_tokens,
            x_stride, eps, scale, CHANNELS, HEADS, K, STRIPS, STRIP, NORMALISE, False,
        )  # fmt: skip


class _Heads(NamedTuple):
    """Queries, keys or values among the channels."""

    tensor: int  # index of the tensor that has them
    channel: int  # their first channel in that tensor
    num_heads: int
    width: int
    scale: float  # factor of the results
    is_normalised: bool


def _heads(xs: Sequence[Tensor], G: int, H: int, K: int) -> list[_Heads]:
    """Returns queries, keys and values, which are in one tensor or in three."""
    V = (sum(x.shape[-1] for x in xs) - 2 * G * K) // H
    places = [(0, 0), (0, G * K), (0, 2 * G * K)] if len(xs) == 1 else [(0, 0), (1, 0), (2, 0)]
    return [
        _Heads(*places[0], G, K, K**-0.5, True),
        _Heads(*places[1], G, K, 1.0, True),
        _Heads(*places[2], H, V, 1.0, False),
    ]


def _rows(x: Tensor) -> Tensor:
    """Views x [B, T, C] as evenly spaced rows of contiguous channels, or copies it."""
    evenly_spaced = x.stride(-1) == 1 and (len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if evenly_spaced else x.contiguous()


def _empty_outputs(xs, G, H, K):
    return tuple(
        xs[0].new_empty(*xs[0].shape[:2], heads.num_heads, heads.width)
        for heads in _heads(xs, G, H, K)
    )


@operation("fathom::qkv_convolution", lambda xs, weight, *sizes: _empty_outputs(xs, *sizes[:3]))
def _forward(
    xs: list[Tensor], weight: Tensor, G: int, H: int, K: int, segments: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    xs, weights = [*map(_rows, xs)], weight.contiguous().split([x.shape[2] for x in xs])
    B, T, _ = xs[0].shape
    outs = _empty_outputs(xs, G, H, K)
    positions = _positions(B, T, as_bytes(segments), xs[0].device)
    for out, heads in zip(outs, _heads(xs, G, H, K)):
        x = xs[heads.tensor][..., heads.channel :]
        weight = weights[heads.tensor][heads.channel :]
        _convolution_kernel[(heads.num_heads * triton.cdiv(B * T, BLOCK_T),)](
            x, weight, positions, out, B * T, x.stride(1), EPS, heads.scale, HEADS=heads.num_heads,
            K=heads.width, BLOCK_T=BLOCK_T, NORMALISE=heads.is_normalised, num_warps=4,
        )  # fmt: skip
    return outs


@operation(
    "fathom::qkv_convolution_backward",
    lambda _, xs, weight, *sizes: [x.new_empty(x.shape) for x in (*xs, weight)],
)
def _backward(
    d_outs: list[Tensor],
    xs: list[Tensor],
    weight: Tensor,
    G: int,
    H: int,
    K: int,
    segments: Tensor | None,
) -> list[Tensor]:
    """Returns the gradients of xs and of the weight."""
    xs, weights = [*map(_rows, xs)], weight.contiguous().split([x.shape[2] for x in xs])
    B, T, _ = xs[0].shape
    blocks = triton.cdiv(B * T, STRIPS * STRIP)
    dxs = [x.new_empty(x.shape) for x in xs]
    partials = [x.new_empty(blocks, x.shape[2], WIDTH, dtype=torch.float32) for x in xs]
    positions = _positions(B, T, as_bytes(segments), xs[0].device)
    for d_out, heads in zip(d_outs, _heads(xs, G, H, K)):
        i, channel = heads.tensor, heads.channel
        _convolution_backward_kernel[(heads.num_heads * blocks,)](
            d_out.contiguous(), xs[i][..., channel:], weights[i][channel:], positions,
            dxs[i][..., channel:], partials[i][:, channel:], B * T, xs[i].stride(1), EPS,
            heads.scale, CHANNELS=xs[i].shape[2], HEADS=heads.num_heads, K=heads.width,
            STRIPS=STRIPS, STRIP=STRIP, NORMALISE=heads.is_normalised,
            BLOCK=triton.next_power_of_2(STRIPS * STRIP + 3), num_warps=4,
        )  # fmt: skip
    return [*dxs, torch.cat([partial.sum(0) for partial in partials]).to(weight.dtype)]


def _setup_context(ctx, inputs, output):
    xs, weight, *ctx.rest = inputs
    ctx.save_for_backward(*xs, weight)


def _gradients(ctx, *d_outs):
    *xs, weight = ctx.saved_tensors
    *dxs, d_weight = _backward([*d_outs], xs, weight, *ctx.rest)
    return dxs, d_weight, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def qkv_convolution(
    x_BTC: Tensor | Sequence[Tensor], weight_CW: Tensor, G: int, H: int, K: int, *,
    segments: Tensor | None = None, impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Convolves queries, keys and values, per document, with SiLU; normalises queries and keys.

    Args:
        x_BTC: [batch, tokens, channels]: G query heads of width K, G key heads of width K, H value
            heads. Rows may be strided, like channels sliced out of a fused projection. Or the
            channels of queries, keys and values as three tensors.
        weight_CW: [channels, 4], the last column for the token itself, any floating dtype.
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, first token, one past the
            last token), which have each token once; None: each batch row is one document.

    Returns q [B, T, G, K], of norm K^-0.5, k [B, T, G, K], of norm 1, and v [B, T, H, V],
    contiguous, in x's dtype.

    Raises ValueError for shapes that do not fit together; with Triton, another dtype than float32,
    bfloat16 or float16, or a head width other than 16, 32, 64, 128 or 256.
    """
    xs = [x_BTC] if isinstance(x_BTC, Tensor) else [*x_BTC]
    (B, T, _), C = xs[0].shape, sum(x.shape[2] for x in xs)
    V = (C - 2 * G * K) // H
    if weight_CW.shape != (C, WIDTH) or V < 1 or 2 * G * K + H * V != C:
        expected = f"{2 * G * K} + {H} * V channels and a weight [channels, {WIDTH}]"
        raise ValueError(f"expected {expected}, got {[B, T, C]} and {list(weight_CW.shape)}")
    check_documents(segments, B, T)
    if not use_triton(impl, xs[0]):
        return qkv_convolution_reference(torch.cat(xs, -1), weight_CW, G, H, K, segments=segments)
    if not {K, V} <= {*HEAD_WIDTHS} and not xs[0].is_meta:
        raise ValueError(
            f"the convolution's kernels take head widths {HEAD_WIDTHS}, got {K} and {V}"
        )
    return _forward(xs, weight_CW, G, H, K, segments)


def convolution_workspace(num_tokens: int, channels: int) -> int:
    """Returns the bytes of backward's partial sums of the weight's gradient."""
    return 4 * WIDTH * channels * -(-num_tokens // (STRIPS * STRIP))
