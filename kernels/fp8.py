"""Linear maps in FP8: y = x weight^T and dx = dy weight from factors of 8 bits, weights' gradients from whole ones.

A factor's rows are scaled to FP8's range one by one. With m_i the largest magnitude of row i, and 448 the largest
number of float8_e4m3fn,

    values[i, j] = round(x[i, j] * 448 / m_i),  scales[i] = m_i / 448
    (a b^T)[i, j] = a.scales[i] * b.scales[j] * sum_k a.values[i, k] * b.values[j, k]

forward scales x by token and the weight by output. input_gradient scales dy by token and the transposed weight by
input. Sums are float32, with one rounding at the end. weight_gradient is `Plain`'s: dy^T x sums over tokens, whose
magnitudes differ most.

Kept for backward: x and weight, as given. Factors are made anew where they are used.

Method: Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433; scales by row: Llama 3, arXiv 2407.21783.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import torch_internals
from .common import cast_by_autocast, operation, use_triton
from .linear import PLAIN, Plain

FP8_TYPE, LARGEST = torch.float8_e4m3fn, 448.0
SHAPE_MULTIPLE = 16  # widths of matrices that the GPUs' products take
LONGEST_ROW = 32_768  # elements; a row lives in one program's registers
_TILE = 64  # rows and columns that are transposed at once
_ROWS_ADDED = 8192  # rows of a product that is added to another: it exists for so many rows at a time


class Factor(NamedTuple):
    """A matrix in FP8."""

    values: Tensor  # [M, K] float8_e4m3fn
    scales: Tensor  # [M, 1] float32
    dtype: torch.dtype  # the matrix's, and its products'


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch with the contract of `quantize_rows`."""
    largest = x.float().abs().amax(1, keepdim=True)
    largest = torch.where(largest == 0, LARGEST, largest)
    return (x.float() * (LARGEST / largest)).to(FP8_TYPE).contiguous(), largest / LARGEST


@triton.jit
def _quantize_rows_kernel(x_ptr, values_ptr, scales_ptr, row_stride, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scales and rounds one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    largest = tl.where(largest == 0, 448.0, largest)
    tl.store(scales_ptr + row, tl.math.div_rn(largest, 448.0))
    values = (x * tl.math.div_rn(448.0, largest)).to(tl.float8e4nv, fp_downcast_rounding="rtne")
    tl.store(values_ptr + row * K + columns, values, mask=columns < K)


@triton.jit
def _quantize_columns_kernel(x_ptr, largest_ptr, values_ptr, N, K, column_stride, TILE: tl.constexpr):
    """Scales, rounds and transposes a tile of x [N, K], stored with K contiguous, into values [K, N]."""
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # [TILE] of N
    columns = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)  # [TILE] of K
    mask = (rows < N)[:, None] & (columns < K)[None, :]  # [TILE, TILE]
    x = tl.load(x_ptr + rows[:, None] * column_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + columns, mask=columns < K, other=448.0)
    values = (x * tl.math.div_rn(448.0, largest)[None, :]).to(tl.float8e4nv, fp_downcast_rounding="rtne")
    tl.store(values_ptr + columns[None, :] * N + rows[:, None], values, mask=mask)


@operation("fathom::quantize_rows")
def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    if x.stride(0) == 1 and x.stride(1) >= M > 1:  # a transposed matrix
        largest = torch.linalg.vector_norm(x, torch.inf, 1, dtype=torch.float32)
        largest.masked_fill_(largest == 0, LARGEST)
        values = x.new_empty(M, K, dtype=FP8_TYPE)
        grid = triton.cdiv(K, _TILE), triton.cdiv(M, _TILE)
        _quantize_columns_kernel[grid](x, largest, values, K, M, x.stride(1), TILE=_TILE)
        return values, (largest / LARGEST).unsqueeze(1)
    if K > LONGEST_ROW:
        raise ValueError(f"rows in FP8 have {LONGEST_ROW:,} elements at most, got {K:,}; use linear bf16")
    x = x if x.stride(1) == 1 else x.contiguous()
    values, scales = x.new_empty(M, K, dtype=FP8_TYPE), x.new_empty(M, 1, dtype=torch.float32)
    block = triton.next_power_of_2(K)
    _quantize_rows_kernel[(M,)](
        x, values, scales, x.stride(0), K=K, BLOCK_K=block, num_warps=min(8, max(1, block // 512))
    )
    return values, scales


@_quantize_rows.register_fake
def _(x):
    return x.new_empty(x.shape, dtype=FP8_TYPE), x.new_empty(len(x), 1, dtype=torch.float32)


def quantize_rows(x: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Scales each row of x to FP8's range and rounds it. Rows of zeros have a scale of 1.

    Args:
        x: [M, K], float32, bfloat16 or float16; a transposed matrix is read in place.
        impl: "auto", "triton" or "torch".

    Returns:
        values [M, K] float8_e4m3fn and scales [M, 1] float32.

    Raises:
        ValueError: with Triton, rows above LONGEST_ROW elements.
    """
    return _quantize_rows(x) if use_triton(impl, x) else quantize_rows_reference(x)


def _product(a: Factor, b: Factor, out: Tensor | None = None) -> Tensor:
    """Returns a b^T in the factors' dtype, [M, N]. A CPU multiplies in float32."""
    if a.values.device.type != "cpu":
        if a.dtype != torch.bfloat16:
            raise ValueError(f"products in FP8 on CUDA need bfloat16, got {a.dtype}; use linear bf16")
        factors = a.values, b.values.t(), a.scales, b.scales.t()
        return torch_internals.scaled_mm(*factors, out_dtype=a.dtype, out=out)
    product = (a.values.float() @ b.values.float().t()) * a.scales * b.scales.t()
    return product.to(a.dtype) if out is None else out.copy_(product)


@dataclass(frozen=True)
class FP8(Plain):
    """Products of FP8 factors. `kernels.parts.Linear` describes the methods.

    Args:
        impl: how factors are made: "auto", "triton" or "torch".
    """

    impl: str = "auto"

    name = "fp8"
    rate = "fp8 products"
    weight_rate = PLAIN.rate

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight, bias = cast_by_autocast(x, weight, bias)
        return _Map.apply(self, x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    def factor(self, x: Tensor) -> Factor:
        return Factor(*quantize_rows(x, impl=self.impl), x.dtype)

    def factor_bytes(self, rows: int, columns: int) -> int:
        return rows * columns + 4 * rows

    def forward(self, x: Factor, weight: Factor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        y = _product(x, weight, out)
        return y if bias is None else y.add_(bias)

    def input_gradient(
        self, dy: Factor, weight_t: Factor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        if out is None or not accumulate:
            return _product(dy, weight_t, out)
        for values, scales, part in zip(*(x.split(_ROWS_ADDED) for x in (dy.values, dy.scales, out))):
            part += _product(Factor(values, scales, dy.dtype), weight_t)
        return out


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.part = part
        return part.forward(part.factor(x), part.factor(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), part = ctx.saved_tensors, ctx.part
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = part.input_gradient(part.factor(dy), part.factor(weight.t())) if needs_x else None
        d_weight = part.weight_gradient(dy, x) if needs_weight else None
        return None, dx, d_weight, dy.sum(0) if needs_bias else None


FP8_LINEAR = FP8()


def check_fp8(device: torch.device, widths: dict[str, int]) -> None:
    """Raises ValueError where products in FP8 cannot run.

    Args:
        widths: sizes of matrices by name, such as {"hidden_size": 2560}.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"FP8 needs compute capability 8.9 (Ada, Hopper) or newer, {device} is older; use linear bf16")
    for name, width in widths.items():
        if width % SHAPE_MULTIPLE or width > LONGEST_ROW:
            limits = f"multiples of {SHAPE_MULTIPLE} up to {LONGEST_ROW:,}"
            raise ValueError(f"FP8 needs widths that are {limits}, {name} is {width:,}; use linear bf16")
