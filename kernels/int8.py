"""Forward's product y = x weight^T from factors of 8 bits that are integers, after a rotation.

    r(x) = x, where the Hadamard matrix of 64, orthonormal, multiplies each 64 elements of a row
    scales[i] = max_j |r(x)[i, j]| / 127,  values[i, j] = round(r(x)[i, j] / scales[i])
    (a b^T)[i, j] = a.scales[i] * b.scales[j] * sum_k a.values[i, k] * b.values[j, k]

Both factors are rotated alike, which leaves their product. A rotation spreads a row's outliers: the
row is then near to a normal distribution, whose products then err by a third as much as in FP8. The
sum is exact: it is below 2^31 for rows of 133,000 elements. Backward has another map, see
`kernels.mixed.Mixed`: gradients have a wider range.

Kept for backward: nothing.

Method: Ashkboos et al., QuaRot, arXiv 2404.00456.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import operation, use_triton
from .linear import InPieces

WIDTH_MULTIPLE = 64  # elements of a row that are rotated together
LARGEST = 127
LONGEST_ROW = 32_768  # elements; a row lives in one program's registers
_LEAST_SCALE = 1e-30  # a row of zeros has it
_WIDE_SHARED_MEMORY = 147_456  # bytes of a program with tiles of 128 x 256
_GROUP = 8  # rows of tiles that run together, whose weights stay in the cache


class Factor(NamedTuple):
    """A matrix of integers."""

    values: Tensor  # [M, K] int8
    scales: Tensor  # [M] float32
    dtype: torch.dtype  # the matrix's, and its products'


@functools.cache
def signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the Hadamard matrix [64, 64] times 8: 1 and -1."""
    rows = torch.ones(1, 1, device=device, dtype=dtype)
    while len(rows) < WIDTH_MULTIPLE:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows


def rotate_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch with the contract of `rotate_rows`."""
    rotated = (
        x.float().unflatten(1, (-1, WIDTH_MULTIPLE)) @ signs(x.device, torch.float32) / 8
    ).flatten(1)
    scales = (rotated.abs().amax(1) / LARGEST).clamp(min=_LEAST_SCALE)
    return (rotated / scales[:, None]).round().to(torch.int8), scales


@triton.jit
def _rotate_rows_kernel(
    x_ptr, signs_ptr, values_ptr, scales_ptr, row_stride, LEAST_SCALE: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rotates, scales and rounds one row; BLOCKS * 64 is K or more."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 64)
    columns = tl.arange(0, BLOCKS)[:, None] * 64 + lane[None, :]  # [BLOCKS, 64]
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < K, other=0.0)
    signs = tl.load(signs_ptr + lane[:, None] * 64 + lane[None, :])  # [64, 64]
    rotated = tl.dot(x, signs, out_dtype=tl.float32, input_precision="ieee") * 0.125
    sizes = tl.reshape(tl.abs(rotated), [BLOCKS * 64])
    scale = tl.maximum(tl.max(sizes, 0) / 127.0, LEAST_SCALE)
    scale = tl.where(
        tl.max((sizes != sizes).to(tl.int32), 0) > 0, float("nan"), scale
    )  # maxima leave NaN out
    tl.store(scales_ptr + row, scale)
    values = tl.floor(rotated / scale + 0.5).to(tl.int8)
    tl.store(values_ptr + row * K + columns, values, mask=columns < K)


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    a_ptr, b_ptr, a_scales_ptr, b_scales_ptr, out_ptr, out_stride, M, N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes one tile of a b^T. Programs go through GROUP rows of tiles at a time, column by
    column.

    BLOCK_K divides K. Rows past the last are rows from the first on, which are not stored.
    """
    tiles_per_row: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    first = tile // (GROUP * tiles_per_row) * GROUP
    group = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    row_tile = first + tile % (GROUP * tiles_per_row) % group
    column_tile = tile % (GROUP * tiles_per_row) // group
    rows = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = column_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k = tl.arange(0, BLOCK_K)
    a = a_ptr + (rows % M)[:, None] * K + k[None, :]  # [BLOCK_M, BLOCK_K]
    b = b_ptr + (columns % N)[None, :] * K + k[:, None]  # [BLOCK_K, BLOCK_N]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        total = tl.dot(tl.load(a + start), tl.load(b + start), total, out_dtype=tl.int32)
    scales = (
        tl.load(a_scales_ptr + rows % M)[:, None] * tl.load(b_scales_ptr + columns % N)[None, :]
    )
    out = (total.to(tl.float32) * scales).to(out_ptr.dtype.element_ty)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out_ptr + rows[:, None] * out_stride + columns[None, :], out, mask=mask)


def _empty_factor(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)


@operation("fathom::rotate_rows", _empty_factor)
def _rotate_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = _empty_factor(x)
    K = x.shape[1]
    blocks = max(16, triton.next_power_of_2(triton.cdiv(K, WIDTH_MULTIPLE)))
    x = x if x.stride(1) == 1 else x.contiguous()
    _rotate_rows_kernel[(len(x),)](
        x, signs(x.device, x.dtype), values, scales, x.stride(0), LEAST_SCALE=_LEAST_SCALE, K=K,
        BLOCKS=blocks,
        num_warps=4 if blocks <= 64 else 8,
    )  # fmt: skip
    return values, scales


@operation("fathom::int8_product", None, mutates=("out",))
def _multiply(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, out: Tensor) -> None:
    (M, K), N = a.shape, len(b)
    shared_memory = (
        a.is_cuda and torch.cuda.get_device_properties(a.device).shared_memory_per_block_optin
    )
    block_n, block_k = (256, 128) if shared_memory >= _WIDE_SHARED_MEMORY else (128, 64)
    block_k = block_k if K % block_k == 0 else WIDTH_MULTIPLE
    _product_kernel[(triton.cdiv(M, 128) * triton.cdiv(N, block_n),)](
        a, b, a_scales, b_scales, out, out.stride(0), M, N=N, K=K, BLOCK_M=128, BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=_GROUP, num_warps=8, num_stages=3,
    )  # fmt: skip


def rotate_rows(x: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Rotates each row of x [M, K], scales it to 127 and rounds it. Returns values [M, K] int8 and
    scales [M] float32.

    Raises ValueError where 64 does not divide K, or K is above LONGEST_ROW.
    """
    if x.shape[1] % WIDTH_MULTIPLE or x.shape[1] > LONGEST_ROW:
        limits = f"multiples of {WIDTH_MULTIPLE} elements up to {LONGEST_ROW:,}"
        raise ValueError(f"rows in int8 need {limits}, got {x.shape[1]:,}; use linear bf16")
    return _rotate_rows(x) if use_triton(impl, x) else rotate_rows_reference(x)


@dataclass(frozen=True)
class INT8(InPieces):
    """Products of rows in int8: y alone, as a part of `kernels.mixed.Mixed`. `Linear` describes the
    methods."""

    impl: str = "auto"  # "auto", "triton" or "torch"

    name = "int8"
    rate = "int8 products"
    width_multiple = WIDTH_MULTIPLE

    def factor(self, x: Tensor) -> Factor:
        return Factor(*rotate_rows(x, impl=self.impl), x.dtype)

    def kept(self, x: Factor) -> tuple[Tensor, ...]:
        raise TypeError("int8 makes y alone; kernels.mixed.Mixed has maps for gradients")

    def forward(
        self, x: Factor, weight: Factor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        if use_triton(self.impl, x.scales):
            out = (
                x.scales.new_empty(len(x.values), len(weight.values), dtype=x.dtype)
                if out is None
                else out
            )
            _multiply(x.values, weight.values, x.scales, weight.scales, out)
        else:
            product = (
                x.values.float() @ weight.values.float().t() * x.scales[:, None] * weight.scales
            )
            out = product.to(x.dtype) if out is None else out.copy_(product)
        return out if bias is None else out.add_(bias)
