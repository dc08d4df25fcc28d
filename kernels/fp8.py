"""Linear maps in FP8: y = x weight^T, dx = dy weight and d_weight = dy^T x of 8-bit factors.

Each row of a matrix is scaled by a power of two. With m_i the largest magnitude of row i, and 448
the largest number of float8_e4m3fn,

    scales[i] = the least power of two with m_i <= 448 * scales[i]
    values[i, j] = round(x[i, j] / scales[i])
    (a b^T)[i, j] = a.scales[i] * b.scales[j] * sum_k a.values[i, k] * b.values[j, k]

A product that sums over rows, dx over the weight's and d_weight over tokens, takes a transposed
factor with one scale:

    values_t[j, i] = values[i, j] * scales[i] / max(scales)

Powers of two move a number without rounding it again. Only numbers below 2^-14 of the matrix's
largest lose bits, and below 2^-18 all. A matrix is therefore rounded once, and dx has the weight's
values that y had.

Products sum in float32. The tensor cores' own sums ("fast accumulation") keep about 14 bits: of
terms of one sign they lost 4% over 2,560 terms, 15% over 9,728 and 75% over 131,072
(benchmarks/results/fp8_sums_h200_2026-11-28.md), where sums in float32 lose 0.1% at most. d_weight
adds up products of ROWS_SUMMED rows.

An MLP's act(gate) * up, and the gradients of gate and up, exist as factors alone: the kernels that
compute them write FP8, bit for bit what a second pass over them would.

Kept for backward: x as a factor, and weight.

Method: Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433; scales by row: Llama
3, arXiv 2407.21783.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import torch_internals
from .common import operation, rounds, use_triton
from .gated_activation import activate
from .linear import InPieces

FP8_TYPE, LARGEST = torch.float8_e4m3fn, 448.0
SHAPE_MULTIPLE = 16  # widths of matrices that the GPUs' products take
LONGEST_ROW = 32_768  # elements; a row lives in one program's registers
LEAST_SCALE = 2.0**-126  # a row of zeros has it
_TILE_M, _TILE_K = 128, 64  # rows and columns that are transposed at once
# Rows of a product that is added to another: it exists for so many rows at a time.
_ROWS_ADDED = 8192
# elements of a row, of whose three gradients registers hold all; longer ones are spilled
_LONGEST_HELD = 20_480
# Most that one product sums for a weight's gradient; a multiple of SHAPE_MULTIPLE.
ROWS_SUMMED = 16_384


class Factor(NamedTuple):
    """A matrix in FP8."""

    values: Tensor  # [M, K] float8_e4m3fn
    scales: Tensor  # float32: [M, 1], or [] of a transposed matrix
    dtype: torch.dtype  # the matrix's, and its products'


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch with the contract of `quantize_rows`."""
    # NaN has no part in it.
    largest = x.float().abs().nan_to_num(0, torch.inf).amax(1, keepdim=True)
    bits = (largest * (1 / LARGEST)).clamp(min=LEAST_SCALE).view(torch.int32)
    scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # rounds up to a power of two
    return (x.float() * (1 / scales)).to(FP8_TYPE).contiguous(), scales


def transpose_reference(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch with the contract of `transpose_values`."""
    largest = scales.amax()
    values_t = (values.float() * (scales / largest)).t()
    return torch.nn.functional.pad(values_t, (0, -len(values) % SHAPE_MULTIPLE)).to(
        FP8_TYPE
    ).contiguous(), largest


@triton.jit
def _quantize(parts, values_ptr, scales_ptr, row, K: tl.constexpr, WIDTHS: tl.constexpr):
    """Scales and rounds one row, which registers hold in parts of WIDTHS columns, with zeros behind
    column K."""
    largest = 0.0
    for i in tl.static_range(len(WIDTHS)):
        largest = tl.maximum(largest, tl.max(tl.abs(parts[i].to(tl.float32)), axis=0))
    scale = tl.maximum(largest * 0.002232142857142857, 1.1754943508222875e-38)  # 1 / 448, 2^-126
    bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000  # rounds up to a power of two
    scale = bits.to(tl.float32, bitcast=True)
    tl.store(scales_ptr + row, scale)
    for i in tl.static_range(len(WIDTHS)):
        columns = i * WIDTHS[0] + tl.arange(0, WIDTHS[i])
        values = parts[i].to(tl.float32) * tl.math.div_rn(1.0, scale)
        values = values.to(tl.float8e4nv, fp_downcast_rounding="rtne")
        tl.store(values_ptr + row * K + columns, values, mask=columns < K)


@triton.jit
def _quantize_rows_kernel(
    x_ptr, values_ptr, scales_ptr, row_stride, K: tl.constexpr, WIDTHS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTHS[0])
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < K, other=0.0)
    _quantize((x,), values_ptr, scales_ptr, row, K, WIDTHS)


@triton.jit
def _quantize_activation_kernel(
    gate_ptr, up_ptr, values_ptr, scales_ptr, gate_stride, up_stride, F: tl.constexpr,
    WIDTHS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Quantizes one row of act(gate) * up, which is first rounded to gate's dtype."""
    row, hidden = tl.program_id(0).to(tl.int64), ()
    for i in tl.static_range(len(WIDTHS)):
        columns = i * WIDTHS[0] + tl.arange(0, WIDTHS[i])
        gate = tl.load(gate_ptr + row * gate_stride + columns, mask=columns < F, other=0.0).to(
            tl.float32
        )
        up = tl.load(up_ptr + row * up_stride + columns, mask=columns < F, other=0.0)
        value, _ = activate(gate, ACTIVATION)
        hidden += ((value * up.to(tl.float32)).to(up.dtype),)  # type: ignore[assignment]
    _quantize(hidden, values_ptr, scales_ptr, row, F, WIDTHS)


@triton.jit
def _quantize_activation_gradients_kernel(
    gate_ptr, up_ptr, d_hidden_ptr, d_gate_ptr, d_up_ptr, hidden_ptr, d_gate_scales_ptr,
    d_up_scales_ptr, hidden_scales_ptr, gate_stride, up_stride, F: tl.constexpr,
    WIDTHS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Quantizes a row of gate's and up's gradients, and of act(gate) * up, all rounded alike."""
    row = tl.program_id(0).to(tl.int64)
    d_gate = ()
    d_up = ()
    hidden = ()
    for i in tl.static_range(len(WIDTHS)):
        columns = i * WIDTHS[0] + tl.arange(0, WIDTHS[i])
        gate = tl.load(gate_ptr + row * gate_stride + columns, mask=columns < F, other=0.0).to(
            tl.float32
        )
        up = tl.load(up_ptr + row * up_stride + columns, mask=columns < F, other=0.0)
        d_hidden = tl.load(d_hidden_ptr + row * F + columns, mask=columns < F, other=0.0).to(
            tl.float32
        )
        dtype = up.dtype
        up = up.to(tl.float32)
        value, derivative = activate(gate, ACTIVATION)
        d_gate += ((d_hidden * up * derivative).to(dtype),)  # type: ignore[assignment]
        d_up += ((d_hidden * value).to(dtype),)  # type: ignore[assignment]
        hidden += ((value * up).to(dtype),)  # type: ignore[assignment]
    _quantize(d_gate, d_gate_ptr, d_gate_scales_ptr, row, F, WIDTHS)
    _quantize(d_up, d_up_ptr, d_up_scales_ptr, row, F, WIDTHS)
    _quantize(hidden, hidden_ptr, hidden_scales_ptr, row, F, WIDTHS)


@triton.jit(do_not_specialize=["M"])
def _transpose_kernel(
    values_ptr,
    scales_ptr,
    largest_ptr,
    output_ptr,
    M,
    K,
    output_columns,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Transposes a tile of values [M, K] into output [K, output_columns]: zeros follow column M."""
    rows = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)  # [TILE_M]
    columns = tl.program_id(1).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)  # [TILE_K]
    mask = (rows < M)[:, None] & (columns < K)[None, :]  # [TILE_M, TILE_K]
    values = tl.load(values_ptr + rows[:, None] * K + columns[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    scales = tl.load(scales_ptr + rows, mask=rows < M, other=0.0) * tl.math.div_rn(
        1.0, tl.load(largest_ptr)
    )
    # [TILE_K, TILE_M]
    values = tl.trans((values * scales[:, None]).to(tl.float8e4nv, fp_downcast_rounding="rtne"))
    mask = (columns < K)[:, None] & (rows < output_columns)[None, :]
    tl.store(output_ptr + columns[:, None] * output_columns + rows[None, :], values, mask=mask)


def _empty_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8_TYPE), x.new_empty(len(x), 1, dtype=torch.float32)


@operation("fathom::quantize_rows", _empty_quantized)
def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    if K > LONGEST_ROW:
        raise ValueError(
            f"rows in FP8 have {LONGEST_ROW:,} elements at most, got {K:,}; use linear bf16"
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    values, scales = _empty_quantized(x)
    block = triton.next_power_of_2(K)
    _quantize_rows_kernel[(M,)](
        x, values, scales, x.stride(0), K=K, WIDTHS=(block,), num_warps=min(8, max(1, block // 512))
    )
    return values, scales


def _widths(columns: int) -> dict[str, Any]:
    """Returns a power of two below a row's columns and one that has the rest, and warps for rows of
    this size."""
    first = 2 ** (columns.bit_length() - 1)
    widths = (first, triton.next_power_of_2(columns - first)) if columns > first else (first,)
    return {
        "WIDTHS": widths,
        "num_warps": min(32, max(4, triton.next_power_of_2(triton.cdiv(sum(widths), 1280)))),
    }


@operation("fathom::quantize_activation", lambda gate, up, activation: _empty_quantized(gate))
def _quantize_activation(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    M, F = gate.shape
    values, scales = _empty_quantized(gate)
    _quantize_activation_kernel[(M,)](
        gate,
        up,
        values,
        scales,
        gate.stride(0),
        up.stride(0),
        F=F,
        ACTIVATION=activation,
        **_widths(F),
    )
    return values, scales


def _three_empty(d_hidden, *rest):
    return [tensor for _ in range(3) for tensor in _empty_quantized(d_hidden)]


@operation("fathom::quantize_activation_gradients", _three_empty)
def _quantize_activation_gradients(
    d_hidden: Tensor, gate: Tensor, up: Tensor, activation: str
) -> list[Tensor]:
    """Returns values and scales of d_gate, of d_up, and of act(gate) * up."""
    M, F = gate.shape
    factors = _three_empty(d_hidden)
    _quantize_activation_gradients_kernel[(M,)](
        gate, up, d_hidden, *factors[::2], *factors[1::2], gate.stride(0), up.stride(0), F=F,
        ACTIVATION=activation, maxnreg=128, **_widths(F),
    )  # fmt: skip
    return factors


def _empty_transposed(values: Tensor) -> Tensor:
    return values.new_empty(
        values.shape[1], triton.cdiv(len(values), SHAPE_MULTIPLE) * SHAPE_MULTIPLE
    )


@operation(
    "fathom::transpose_fp8",
    lambda values, scales: (_empty_transposed(values), scales.new_empty(())),
)
def _transpose_values(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    (M, K), largest = values.shape, scales.amax()
    values_t = _empty_transposed(values)
    grid = triton.cdiv(values_t.shape[1], _TILE_M), triton.cdiv(K, _TILE_K)
    _transpose_kernel[grid](
        values, scales, largest, values_t, M, K, values_t.shape[1], TILE_M=_TILE_M, TILE_K=_TILE_K
    )
    return values_t, largest


def quantize_rows(x: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Scales each row of x [M, K] to FP8's range by a power of two, and rounds it.

    Returns values [M, K] float8_e4m3fn and scales [M, 1] float32. Raises ValueError with Triton for
    rows above LONGEST_ROW elements.
    """
    return _quantize_rows(x) if use_triton(impl, x) else quantize_rows_reference(x)


def transpose_values(
    values: Tensor, scales: Tensor, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Transposes what `quantize_rows` returned, and scales it by one number.

    Returns values [K, M] float8_e4m3fn, with zeros for columns that round M up to a multiple of 16,
    and the scale [] float32.
    """
    if use_triton(impl, scales):
        return _transpose_values(values, scales)
    return transpose_reference(values, scales)


def _product(a: Factor, b: Factor, out: Tensor | None = None) -> Tensor:
    """Returns a b^T in the factors' dtype, [M, N]. A CPU multiplies in float32."""
    if a.values.is_meta and out is not None:
        return out
    if a.values.device.type != "cpu":
        if a.dtype != torch.bfloat16:
            raise ValueError(
                f"products in FP8 on CUDA need bfloat16, got {a.dtype}; use linear bf16"
            )
        scales = a.scales, b.scales
        if a.scales.dim() != b.scales.dim():
            scales = tuple(x.scales.expand(len(x.values), 1).contiguous() for x in (a, b))
        return torch_internals.scaled_mm(
            a.values, b.values.t(), scales[0], scales[1].t(),
            out_dtype=a.dtype if out is None else out.dtype, out=out, use_fast_accum=False,
        )  # fmt: skip
    product = (a.values.float() @ b.values.float().t()) * a.scales * b.scales.t()
    return product.to(a.dtype) if out is None else out.copy_(product)


@dataclass(frozen=True)
class FP8(InPieces):
    """Products of FP8 factors. `kernels.linear.Linear` describes the methods."""

    impl: str = "auto"  # how factors are made: "auto", "triton" or "torch"

    name = "fp8"
    rate, weight_rate = "fp8 products", "fp8 weights' gradients"

    def factor(self, x: Tensor) -> Factor:
        return Factor(*quantize_rows(x, impl=self.impl), x.dtype)

    def transpose(self, x: Factor) -> Factor:
        return Factor(*transpose_values(x.values, x.scales, impl=self.impl), x.dtype)

    def activated(
        self, gate: Tensor, up: Tensor, activation: str, on_triton: bool, out: Tensor | None = None
    ) -> Factor:
        if not on_triton:
            return super().activated(gate, up, activation, on_triton, out)
        values, scales = _quantize_activation(gate, up, activation)
        return Factor(values, scales, gate.dtype)

    def activation_gradients(
        self,
        d_hidden: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        on_triton: bool,
        in_place: bool,
    ) -> list[Factor]:
        if not on_triton or gate.shape[1] > _LONGEST_HELD:
            return super().activation_gradients(d_hidden, gate, up, activation, on_triton, in_place)
        tensors = iter(_quantize_activation_gradients(d_hidden, gate, up, activation))
        return [Factor(values, scales, gate.dtype) for values, scales in zip(tensors, tensors)]

    def kept(self, x: Factor) -> tuple[Tensor, ...]:
        return x.values, x.scales

    def restored(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Factor:
        values, scales = tensors
        return Factor(values, scales, dtype)

    def forward(
        self, x: Factor, weight: Factor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        y = _product(x, weight, out)
        return y if bias is None else y.add_(bias)

    def input_gradient(
        self, dy: Factor, weight_t: Factor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        if out is None or not accumulate:
            return _product(dy, weight_t, out)
        for i in rounds(triton.cdiv(len(out), _ROWS_ADDED), out):
            values, scales, part = (
                x[i * _ROWS_ADDED : (i + 1) * _ROWS_ADDED] for x in (dy.values, dy.scales, out)
            )
            part += _product(Factor(values, scales, dy.dtype), weight_t)
        return out

    def weight_gradient(
        self, dy_t: Factor, x_t: Factor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        parts = triton.cdiv(dy_t.values.shape[1], ROWS_SUMMED)
        if out is not None and accumulate:
            for i in rounds(parts, out):
                rows = slice(i * ROWS_SUMMED, (i + 1) * ROWS_SUMMED)
                dy_rows, x_rows = (f._replace(values=f.values[:, rows]) for f in (dy_t, x_t))
                out += _product(dy_rows, x_rows)  # rounded to 16 bits, the sum is not
            return out
        if parts == 1:
            return _product(dy_t, x_t, out)
        total = dy_t.scales.new_zeros(len(dy_t.values), len(x_t.values))
        self.weight_gradient(dy_t, x_t, out=total, accumulate=True)
        return total.to(dy_t.dtype) if out is None else out.copy_(total)


FP8_LINEAR = FP8()


def check_fp8(device: torch.device, widths: dict[str, int]) -> None:
    """Raises ValueError where products in FP8 cannot run; `widths` are sizes of matrices:
    {"hidden_size": 2560}."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"FP8 needs compute capability 8.9 (Ada, Hopper) or newer, {device} is older; "
            "use linear bf16"
        )
    for name, width in widths.items():
        if width % SHAPE_MULTIPLE or width > LONGEST_ROW:
            limits = f"multiples of {SHAPE_MULTIPLE} up to {LONGEST_ROW:,}"
            raise ValueError(
                f"FP8 needs widths that are {limits}, {name} is {width:,}; use linear bf16"
            )
