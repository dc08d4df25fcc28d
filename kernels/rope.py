"""Rotary position embedding of queries and keys in one launch: halves rotated, as Llama and Qwen3 do.

    [first, second] -> [first cos - second sin, second cos + first sin],  angle = position * inv_freq

cos and sin come from float32 tables, by token or by position, or are computed in the kernel from the position: the
product in float64 and reduced to one turn there, so that position 1,048,575 is as exact as position 1.
The rotation is orthogonal: backward is the same kernel with the angle negated. Kept for backward: the tables (or
inv_freq) and the positions, nothing of q and k.
"""

import torch
import triton
import triton.language as tl

from kernels.common import use_triton

LARGEST_TILE = 16384  # elements of half the heads of one token, padded to powers of two: one program's registers


def rope_reference(
    q_BTHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    positions: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch with the contract of `rope`; float64 stays float64."""
    if inv_freq is not None:
        angles = positions.double()[..., None] * inv_freq.double()
        cos, sin = angles.cos(), angles.sin()
    elif positions is not None:
        cos, sin = cos[positions], sin[positions]
    compute_dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    cos, sin = ((attention_scaling * table).to(compute_dtype).unsqueeze(-2) for table in (cos, sin))

    def rotate(x):
        first, second = x.to(compute_dtype).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    return rotate(q_BTHK), rotate(k_BTGK)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, inv_freq_ptr,
    T, num_table_rows, attention_scaling,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_g,
    table_stride_b, table_stride_row, positions_stride_b,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_HALF: tl.constexpr,
    HAS_TABLE: tl.constexpr, HAS_POSITIONS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One token: all heads of q and k. The outputs are contiguous."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    columns = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    h = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]  # [BLOCK_H, 1]
    g = tl.arange(0, BLOCK_G).to(tl.int64)[:, None]  # [BLOCK_G, 1]
    q_mask = (h < H) & (columns < HALF)[None, :]  # [BLOCK_H, BLOCK_HALF]
    k_mask = (g < G) & (columns < HALF)[None, :]  # [BLOCK_G, BLOCK_HALF]

    # All loads before the first use: one wait for memory a program.
    q = q_ptr + b * q_stride_b + t * q_stride_t + h * q_stride_h + columns[None, :]
    k = k_ptr + b * k_stride_b + t * k_stride_t + g * k_stride_g + columns[None, :]
    q_first, q_second = tl.load(q, mask=q_mask, other=0.0), tl.load(q + HALF, mask=q_mask, other=0.0)
    k_first, k_second = tl.load(k, mask=k_mask, other=0.0), tl.load(k + HALF, mask=k_mask, other=0.0)

    row = t
    if HAS_POSITIONS:
        row = tl.load(positions_ptr + b * positions_stride_b + t)
    if HAS_TABLE:
        table = b * table_stride_b + row * table_stride_row + columns
        mask = (columns < HALF) & (row >= 0) & (row < num_table_rows)
        cos = tl.load(cos_ptr + table, mask=mask, other=float("nan")).to(tl.float32)  # [BLOCK_HALF]
        sin = tl.load(sin_ptr + table, mask=mask, other=float("nan")).to(tl.float32)
    else:
        two_pi = tl.full([], 6.283185307179586, tl.float64)  # a bare constant would be rounded to float32
        one_over_two_pi = tl.full([], 0.15915494309189535, tl.float64)
        inv_freq = tl.load(inv_freq_ptr + columns, mask=columns < HALF, other=0.0).to(tl.float64)
        turns = row.to(tl.float64) * inv_freq * one_over_two_pi
        angle = ((turns - tl.floor(turns)) * two_pi).to(tl.float32)  # [BLOCK_HALF]
        cos, sin = tl.cos(angle), tl.sin(angle)
    cos = (cos * attention_scaling)[None, :]
    sin = (sin * attention_scaling)[None, :]
    if INVERSE:
        sin = -sin

    q_out = q_out_ptr + token * (H * 2 * HALF) + h * (2 * HALF) + columns[None, :]
    k_out = k_out_ptr + token * (G * 2 * HALF) + g * (2 * HALF) + columns[None, :]
    dtype = q_first.dtype
    tl.store(q_out, (q_first.to(tl.float32) * cos - q_second.to(tl.float32) * sin).to(dtype), mask=q_mask)
    tl.store(q_out + HALF, (q_second.to(tl.float32) * cos + q_first.to(tl.float32) * sin).to(dtype), mask=q_mask)
    tl.store(k_out, (k_first.to(tl.float32) * cos - k_second.to(tl.float32) * sin).to(dtype), mask=k_mask)
    tl.store(k_out + HALF, (k_second.to(tl.float32) * cos + k_first.to(tl.float32) * sin).to(dtype), mask=k_mask)


@torch.library.custom_op("fathom::rope", mutates_args=())
def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    inv_freq: torch.Tensor | None,
    attention_scaling: float,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin, positions, inv_freq = (x if x is None else x.contiguous() for x in (cos, sin, positions, inv_freq))
    B, T, H, K = q.shape
    G = k.shape[2]
    block_h, block_half = triton.next_power_of_2(H), triton.next_power_of_2(K // 2)
    q_out, k_out = _empty_outputs(q, k)
    _rope_kernel[(B * T,)](
        q, k, q_out, k_out, cos, sin, positions, inv_freq,
        T, 0 if cos is None else cos.shape[-2], attention_scaling,
        *q.stride()[:3], *k.stride()[:3],
        cos.stride(0) if cos is not None and cos.dim() == 3 else 0, K // 2,
        positions.stride(0) if positions is not None and positions.dim() == 2 else 0,
        H=H, G=G, HALF=K // 2, BLOCK_H=block_h, BLOCK_G=triton.next_power_of_2(G), BLOCK_HALF=block_half,
        HAS_TABLE=cos is not None, HAS_POSITIONS=positions is not None, INVERSE=inverse,
        num_warps=max(1, min(16, block_h * block_half // 512)),
    )  # fmt: skip
    return q_out, k_out


def _empty_outputs(q, k):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))


@_rotate.register_fake
def _(q, k, cos, sin, positions, inv_freq, attention_scaling, inverse):
    return _empty_outputs(q, k)


def _setup_context(ctx, inputs, output):
    _, _, *tables, ctx.attention_scaling, ctx.inverse = inputs
    ctx.save_for_backward(*tables)


def _gradients(ctx, d_q, d_k):
    return *_rotate(d_q, d_k, *ctx.saved_tensors, ctx.attention_scaling, not ctx.inverse), *[None] * 6


_rotate.register_autograd(_gradients, setup_context=_setup_context)


def rope(
    q_BTHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    positions: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries and keys, halves rotated.

    Args:
        q_BTHK, k_BTGK: [batch, tokens, heads, head_dim], one dtype of float32, bfloat16 and float16, any number of
            heads each, any strides (copied only where head_dim is not contiguous).
        cos, sin: float32 tables. Without `positions`, [T, K / 2] or [B, T, K / 2], already at the tokens' positions;
            with it, [P, K / 2] indexed by position. None with `inv_freq`.
        positions: int64, [T] or [B, T].
        inv_freq: float64 or float32 [K / 2], radians a position: the angles are then computed from `positions`.
            float32 frequencies are themselves off by up to 0.06 radians at position 1,048,575.
        attention_scaling: factor of cos and sin (YaRN, Peng et al. 2023, arXiv:2309.00071).
        impl: "auto", "triton" or "torch".

    Returns:
        The rotated q and k, contiguous, in their dtype. Gradients flow to q and k only.
        A position outside the table gives NaN on a GPU (a check would have to wait for it) and IndexError in PyTorch.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an odd head_dim; for Triton, also a dtype other than
            the three above, or more than 16,384 elements in half the heads of a token.
    """
    _check(q_BTHK, k_BTGK, cos, sin, positions, inv_freq)
    if not use_triton(impl, q_BTHK):
        return rope_reference(
            q_BTHK, k_BTGK, cos, sin, positions=positions, inv_freq=inv_freq, attention_scaling=attention_scaling
        )
    if q_BTHK.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"rope's kernel takes float32, bfloat16 or float16, got {q_BTHK.dtype}")
    heads, half = max(q_BTHK.shape[2], k_BTGK.shape[2]), q_BTHK.shape[-1] // 2
    tile = triton.next_power_of_2(heads) * triton.next_power_of_2(half)
    if tile > LARGEST_TILE:
        raise ValueError(f"rope's kernel takes heads * head_dim / 2 up to {LARGEST_TILE}, got {heads} * {half}")
    return _rotate(q_BTHK, k_BTGK, cos, sin, positions, inv_freq, attention_scaling, False)


def _check(q, k, cos, sin, positions, inv_freq) -> None:
    B, T, _, K = q.shape
    if K % 2 or k.shape != (B, T, k.shape[2], K) or k.dtype != q.dtype:
        raise ValueError(
            "q and k must be [B, T, heads, K] of one dtype with an even K, "
            f"got {list(q.shape)} {q.dtype} and {list(k.shape)} {k.dtype}"
        )
    if positions is not None and positions.shape not in ((T,), (B, T)):
        raise ValueError(f"positions must be [{T}] or [{B}, {T}], got {list(positions.shape)}")
    if inv_freq is not None:
        if cos is not None or sin is not None or positions is None or inv_freq.shape != (K // 2,):
            raise ValueError(f"inv_freq must be [{K // 2}], with positions and without cos and sin")
        return
    if cos is None or sin is None or cos.shape != sin.shape:
        raise ValueError("rope needs cos and sin of one shape, or inv_freq and positions")
    by_token = cos.shape in ((T, K // 2), (B, T, K // 2))
    if not (by_token if positions is None else cos.dim() == 2 and cos.shape[1] == K // 2):
        raise ValueError(
            f"cos and sin must be [{T}, {K // 2}] or [{B}, {T}, {K // 2}], or [any, {K // 2}] with positions, "
            f"got {list(cos.shape)}"
        )
