"""Rotary position embedding of queries and keys in one launch, and the frequencies of its
rotations.

Halves are rotated, as in Llama and Qwen3:

    [first, second] -> [first cos - second sin, second cos + first sin]

The first R elements of a head are rotated, the others pass. cos and sin are float32 tables with a
row for each token. The caller may have scaled them. A column more in cos has a factor of each
token's queries. The transpose of a rotation is the rotation by the negated angle, so that backward
runs the same kernel.

Kept for backward: the tables, nothing of q and k.

R elements are R / 2 pairs. A token at position t turns pair i by t theta^(-2i / R). Models with an
extended context turn some pairs more slowly: `LinearScaling`, `Llama3Scaling` and `YarnScaling`,
with the fields of config.json.
"""

import math
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import operation, shown, sum_dtype, use_triton

LARGEST_NUMBER = 1e30  # limit of a scaling's settings; its inverse is the least
# Elements in registers: heads x half a head of one token, each padded to a power of two.
LARGEST_TILE = 16384


def rope_reference(
    q_BTHK: Tensor, k_BTGK: Tensor, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch with the contract of `rope`; float64 stays float64."""
    compute_dtype = sum_dtype(q_BTHK)
    rotary_dim = rotary_dim or q_BTHK.shape[-1]
    half = rotary_dim // 2
    cos, sin = (table.to(compute_dtype).unsqueeze(-2) for table in (cos, sin))
    factor = cos[..., half:] if cos.shape[-1] > half else 1.0
    cos, sin = cos[..., :half], sin[..., :half]

    def rotate(x, factor=1.0):
        first, second, rest = x.to(compute_dtype).split(
            [half, half, x.shape[-1] - 2 * half], dim=-1
        )
        return (
            factor
            * torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
        ).to(x.dtype)

    return rotate(q_BTHK, factor), rotate(k_BTGK)


@triton.jit
def _store_rotated(out, first, second, cos, sin, mask, HALF: tl.constexpr):
    """Stores the rotated halves of heads; `out` points to the first half."""
    dtype = out.dtype.element_ty
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    tl.store(out, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out + HALF, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, T, q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_t, k_stride_g, table_stride_b, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, WIDTH: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token. Tables have WIDTH columns: HALF, and perhaps one for the
    factor of q."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    columns = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    h = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]  # [BLOCK_H, 1]
    g = tl.arange(0, BLOCK_G).to(tl.int64)[:, None]  # [BLOCK_G, 1]
    q_mask = (h < H) & (columns < HALF)[None, :]  # [BLOCK_H, BLOCK_HALF]
    k_mask = (g < G) & (columns < HALF)[None, :]  # [BLOCK_G, BLOCK_HALF]

    # All loads come before the first use, so that a program waits for memory once.
    q_rows = q_ptr + b * q_stride_b + t * q_stride_t + h * q_stride_h
    k_rows = k_ptr + b * k_stride_b + t * k_stride_t + g * k_stride_g
    q = q_rows + columns[None, :]
    k = k_rows + columns[None, :]
    q_first = tl.load(q, mask=q_mask, other=0.0)
    q_second = tl.load(q + HALF, mask=q_mask, other=0.0)
    k_first = tl.load(k, mask=k_mask, other=0.0)
    k_second = tl.load(k + HALF, mask=k_mask, other=0.0)

    table = b * table_stride_b + t * WIDTH + columns
    # [1, BLOCK_HALF]
    cos = tl.load(cos_ptr + table, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + table, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    if WIDTH > HALF:
        factor = tl.load(cos_ptr + b * table_stride_b + t * WIDTH + HALF)
        q_first = q_first.to(tl.float32) * factor
        q_second = q_second.to(tl.float32) * factor
    q_out = q_out_ptr + token * (H * K) + h * K
    k_out = k_out_ptr + token * (G * K) + g * K
    _store_rotated(q_out + columns[None, :], q_first, q_second, cos, sin, q_mask, HALF)
    _store_rotated(k_out + columns[None, :], k_first, k_second, cos, sin, k_mask, HALF)
    if K > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]  # [1, BLOCK_REST]
        q_rest_mask = (h < H) & (rest < K)
        k_rest_mask = (g < G) & (rest < K)
        q_rest = tl.load(q_rows + rest, q_rest_mask)
        k_rest = tl.load(k_rows + rest, k_rest_mask)
        if WIDTH > HALF:
            q_rest = (q_rest.to(tl.float32) * factor).to(q_out_ptr.dtype.element_ty)
        tl.store(q_out + rest, q_rest, q_rest_mask)
        tl.store(k_out + rest, k_rest, k_rest_mask)


@operation("fathom::rope", lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)))
def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, inverse: bool
) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    B, T, H, K = q.shape
    G = k.shape[2]
    block_h = triton.next_power_of_2(H)
    half = rotary_dim // 2
    block_half = triton.next_power_of_2(half)
    q_out = q.new_empty(q.shape)
    k_out = k.new_empty(k.shape)
    _rope_kernel[(B * T,)](
        q, k, q_out, k_out, cos, sin, T, *q.stride()[:3], *k.stride()[:3],
        cos.stride(0) if cos.dim() == 3 else 0, H=H, G=G, K=K, HALF=half, BLOCK_H=block_h,
        BLOCK_G=triton.next_power_of_2(G), BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(1, K - rotary_dim)), WIDTH=cos.shape[-1],
        INVERSE=inverse, num_warps=max(1, min(16, block_h * triton.next_power_of_2(K) // 1024)),
    )  # fmt: skip
    return q_out, k_out


def _setup_context(ctx, inputs, output):
    _, _, *tables, ctx.rotary_dim, ctx.inverse = inputs
    ctx.save_for_backward(*tables)


def _gradients(ctx, *d_heads):
    return (
        *_rotate(*d_heads, *ctx.saved_tensors, ctx.rotary_dim, not ctx.inverse),
        None,
        None,
        None,
        None,
    )


_rotate.register_autograd(_gradients, setup_context=_setup_context)


def rope(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries and keys, halves
    rotated.

    Args:
        q_BTHK, k_BTGK: [batch, tokens, heads, head_dim], both float32, bfloat16 or float16, with
            any numbers of heads and any strides (copied only where head_dim is not contiguous).
        cos, sin: [T, R / 2] or [B, T, R / 2], float32, for each token's angles. Both may have one
            column more, with which cos multiplies the token's queries.
        rotary_dim: R, the first elements of each head that are rotated; the others pass. None: all
            of them.

    Returns the rotated q and k, contiguous, in their dtype. Gradients flow to q and k only.

    Raises ValueError for shapes or dtypes that do not fit together, or an odd head_dim or
    rotary_dim; with Triton, another dtype, or more than 16,384 elements in the half heads of a
    token.
    """
    rotary_dim = rotary_dim or q_BTHK.shape[-1]
    _check(q_BTHK, k_BTGK, cos, sin, rotary_dim)
    if not use_triton(impl, q_BTHK):
        return rope_reference(q_BTHK, k_BTGK, cos, sin, rotary_dim=rotary_dim)
    heads = max(q_BTHK.shape[2], k_BTGK.shape[2])
    half = q_BTHK.shape[-1] // 2
    tile = triton.next_power_of_2(heads) * triton.next_power_of_2(half)
    if tile > LARGEST_TILE and not q_BTHK.is_meta:
        raise ValueError(
            f"rope's kernel takes heads * head_dim / 2 up to {LARGEST_TILE}, got {heads} * {half}"
        )
    return _rotate(q_BTHK, k_BTGK, cos, sin, rotary_dim, False)


def _check(q, k, cos, sin, R) -> None:
    B, T, _, K = q.shape
    if K % 2 or k.shape != (B, T, k.shape[2], K) or k.dtype != q.dtype:
        raise ValueError(
            f"q and k must be [B, T, heads, K] of one dtype with an even K, got {shown(q, k)}"
        )
    if R % 2 or not 0 < R <= K:
        raise ValueError(f"rotary_dim must be even and up to {K}, got {R}")
    # Compared by ==: in traces of torch.compile, a symbolic length is "in" no tuple of numbers.
    fits = cos.shape[:-1] == (T,) or cos.shape[:-1] == (B, T)
    if cos.shape != sin.shape or not fits or cos.shape[-1] - R // 2 not in (0, 1):
        got = f"{list(cos.shape)} and {list(sin.shape)}"
        raise ValueError(f"cos and sin must be [{T}, {R // 2}] or [{B}, {T}, {R // 2}], got {got}")


# Frequencies


@dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    rope_type = "linear"
    table_factor = 1.0  # multiplies cos and sin

    def __post_init__(self):
        _check_numbers(self)

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Divides frequencies of few turns in the original context by `factor`, keeps those with many
    (arXiv:2407.21783).

    Few means up to `low_freq_factor` turns, many `high_freq_factor` and more. A ramp connects the
    two.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type = "llama3"
    table_factor = 1.0

    def __post_init__(self):
        _check_numbers(self)
        if self.high_freq_factor <= self.low_freq_factor:
            low = self.low_freq_factor
            high = self.high_freq_factor
            raise ValueError(f"high_freq_factor must be above low_freq_factor {low}, got {high}")

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = frequencies * self.original_max_position_embeddings / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies / self.factor, frequencies, kept.clamp(0, 1))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): as `Llama3Scaling`, with a ramp over pairs, and
    larger cos and sin."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32  # turns in the original context from which a frequency is kept
    beta_slow: float = 1  # turns up to which a frequency is divided by `factor`
    # Multiplies cos and sin. None stands for 0.1 ln(factor) + 1 or, given `mscale` and
    # `mscale_all_dim`, for (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the ramp begins and ends at whole pairs
    # Multiplies queries at position t by 1 + beta ln(1 + floor(t / original length)), as Ministral
    # 3 does; None: by 1.
    llama_4_scaling_beta: float | None = None
    rope_type = "yarn"

    def __post_init__(self):
        _check_numbers(self)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast must be above beta_slow {self.beta_slow}, got {self.beta_fast}"
            )

    @property
    def table_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    def _grown(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        half = len(frequencies)
        # Indices, fractions, of the pairs that turn so often in the original context.
        circles = self.original_max_position_embeddings / (2 * math.pi)
        first, last = (
            half * math.log(circles / n) / math.log(theta) for n in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        pairs = torch.arange(half, dtype=frequencies.dtype, device=frequencies.device)
        divided = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
        return torch.lerp(frequencies, frequencies / self.factor, divided)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
ROPE_TYPES: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


def _check_numbers(scaling) -> None:
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        is_switch = field.name == "truncate"
        if value is None and field.default is None:
            continue
        is_number = type(value) in (int, float) and abs(value) < LARGEST_NUMBER
        if not (isinstance(value, bool) if is_switch else is_number):
            raise ValueError(
                f"{field.name} of rope_type {scaling.rope_type} is {str(value)[:80]!r}"
            )
        least = {"factor": 1, "original_max_position_embeddings": 1, "llama_4_scaling_beta": 0}.get(
            field.name, 1 / LARGEST_NUMBER
        )
        if not is_switch and value < least:
            raise ValueError(
                f"{field.name} of rope_type {scaling.rope_type} must be at least {least:g}, "
                f"got {value}"
            )


def rope_frequencies(
    rotary_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns each pair's turn from one token to the next, radians, float64 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    frequencies = theta**-exponents
    return frequencies if scaling is None else scaling.scale(frequencies, theta)


class RotaryTables:
    """cos and sin of position x frequency, [positions, R / 2] float32, grown on demand on the
    device that asks.

    A scaling with `llama_4_scaling_beta` adds a column, in which cos has the factor of queries.
    Angles are formed in float64, so that they are right at a million positions. The cache is a
    plain object, not a buffer: there is nothing to move, cast, shard or save.
    """

    def __init__(
        self, rotary_dim: int, theta: float, scaling: RopeScaling | None = None, factor: float = 1.0
    ):
        """`factor` multiplies queries and keys, beside what `scaling` multiplies them by."""
        self.rotary_dim = rotary_dim
        self.theta = theta
        self.scaling = scaling
        self.factor = factor * (1.0 if scaling is None else scaling.table_factor)
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns cos and sin for positions 0 to length - 1 at least, on `device`."""
        cached = 0 if self._tables is None else len(self._tables[0])
        if self._tables is None or cached < length or self._tables[0].device != device:
            length = max(length, 2 * cached) if cached < length else cached
            positions = torch.arange(length, dtype=torch.float64, device=device)
            angles = torch.outer(
                positions, rope_frequencies(self.rotary_dim, self.theta, self.scaling, device)
            )
            cos = angles.cos().mul_(self.factor).float()
            sin = angles.sin_().mul_(self.factor).float()
            if (
                isinstance(self.scaling, YarnScaling)
                and (beta := self.scaling.llama_4_scaling_beta) is not None
            ):
                times = (positions / self.scaling.original_max_position_embeddings).floor()
                factor = (1 + beta * times.log1p()).float()[:, None]
                cos = torch.cat([cos, factor], 1)
                sin = torch.cat([sin, torch.zeros_like(factor)], 1)
            self._tables = cos, sin
        return self._tables
