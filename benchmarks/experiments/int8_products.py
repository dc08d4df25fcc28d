"""Forward's product in int8 with a Hadamard rotation, beside FP8's and bf16's: milliseconds and errors.

`python -m benchmarks.experiments.int8_products`. `fp8_error` finds that nearly all of FP8's error is forward's, and
that int8 with a rotation has a tenth of its divergence. This measures whether a GPU is as fast:

    r(x) = x (I of K / 64 Hadamard matrices of 64),  scales[i] = max |r(x)[i]| / 127,  values = round(r(x) / scales)
    (a b^T)[i, j] = a.scales[i] * b.scales[j] * sum_k a.values[i, k] * b.values[j, k]

The rotation is orthonormal and the same for both factors, so it leaves their product. It spreads a row's outliers over
64 elements; int8 then rounds with a quarter of FP8's error. "int8" is the kernel below with its factors made anew.
"_int_mm" is cuBLAS's product alone, int32 and not scaled.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.common import parse_flags, print_json, print_table, time_interleaved
from benchmarks.experiments.fp8_error import Rounded, hadamard
from kernels.fp8 import FP8_LINEAR
from kernels.linear import PLAIN

SHAPES = ((2560, 6144), (4096, 2560), (2560, 9728), (9728, 2560))  # inputs and outputs of the 4B's maps
ROTATED = 64  # elements that are rotated together
Factor = tuple[Tensor, Tensor]  # values [M, K] int8, scales [M] float32
TILES = {  # BLOCK_M, BLOCK_N, BLOCK_K, stages, warps
    "128x256x128": (128, 256, 128, 3, 8), "128x128x128": (128, 128, 128, 4, 8), "256x128x128": (256, 128, 128, 3, 8),
    "128x256x64": (128, 256, 64, 4, 8),
}  # fmt: skip


@triton.jit
def _rotate_rows_kernel(x_ptr, hadamard_ptr, values_ptr, scales_ptr, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Rotates, scales and rounds one row. K is a multiple of 64, and BLOCKS * 64 is K or more."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 64)
    columns = tl.arange(0, BLOCKS)[:, None] * 64 + lane[None, :]  # [BLOCKS, 64]
    x = tl.load(x_ptr + row * K + columns, mask=columns < K, other=0.0)
    matrix = tl.load(hadamard_ptr + lane[:, None] * 64 + lane[None, :])  # 1 and -1, which every dtype holds
    rotated = tl.dot(x, matrix, out_dtype=tl.float32, input_precision="ieee") * 0.125
    scale = tl.maximum(tl.max(tl.max(tl.abs(rotated), 1), 0) / 127.0, 1e-38)
    tl.store(scales_ptr + row, scale)
    scaled = rotated / scale
    values = tl.floor(scaled + 0.5).to(tl.int8)
    tl.store(values_ptr + row * K + columns, values, mask=columns < K)


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, a_scales_ptr, b_scales_ptr, out_ptr, M, N, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of a b^T; GROUP rows of tiles run together, which share b in the cache."""
    tile, columns_of_tiles = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * columns_of_tiles) * GROUP
    group = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    row_tile = first + tile % (GROUP * columns_of_tiles) % group
    column_tile = tile % (GROUP * columns_of_tiles) // group
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a = a_ptr + (rows % M)[:, None] * K + k[None, :]  # [BLOCK_M, BLOCK_K]
    b = b_ptr + (columns % N)[None, :] * K + k[:, None]  # [BLOCK_K, BLOCK_N]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        a_tile = tl.load(a + start, mask=inside[None, :], other=0)
        b_tile = tl.load(b + start, mask=inside[:, None], other=0)
        total = tl.dot(a_tile, b_tile, total, out_dtype=tl.int32)
    scales = tl.load(a_scales_ptr + rows % M)[:, None] * tl.load(b_scales_ptr + columns % N)[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    out = (total.to(tl.float32) * scales).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], out, mask=mask)


@functools.cache
def signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return (hadamard(ROTATED, device) * ROTATED**0.5).round().to(dtype)


def factor(x: Tensor) -> Factor:
    M, K = x.shape
    values, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty(M, dtype=torch.float32)
    blocks = max(16, triton.next_power_of_2(triton.cdiv(K, ROTATED)))
    _rotate_rows_kernel[(M,)](x, signs(x.device, x.dtype), values, scales, K, blocks, num_warps=4 if K < 8192 else 8)
    return values, scales


def product(a: Factor, b: Factor, dtype: torch.dtype, tile: str) -> Tensor:
    (M, K), N = a[0].shape, len(b[0])
    block_m, block_n, block_k, stages, warps = TILES[tile]
    out = torch.empty(M, N, dtype=dtype, device=a[0].device)
    grid = (triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)
    _product_kernel[grid](
        a[0], b[0], a[1], b[1], out, M, N, K, block_m, block_n, block_k, 8, num_stages=stages, num_warps=warps
    )
    return out


def bench(tokens: int, K: int, N: int, device: torch.device) -> dict[str, float]:
    """Returns milliseconds, and relative errors against the product of the same matrices in float32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, K, device=device, dtype=dtype)
    x[:, 3] *= 30  # a channel of outliers, as trained models have it
    weight = torch.randn(N, K, device=device, dtype=dtype) / K**0.5
    x8, weight8 = factor(x), factor(weight)
    functions = {
        "bf16": lambda: PLAIN.forward(x, weight),
        "FP8": lambda: FP8_LINEAR.forward(FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight)),
        "of it factors": lambda: (FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight)),
        "int8's factors": lambda: (factor(x), factor(weight)),
        "_int_mm": lambda: torch._int_mm(x8[0], weight8[0].t()),
    }
    functions |= {f"int8 {tile}": functools.partial(product, x8, weight8, dtype, tile) for tile in TILES}
    exact = x.float() @ weight.float().t()
    rounded = Rounded(torch.int8, rotates=True).forward(x, weight)
    results = {"FP8": functions["FP8"](), "int8": product(x8, weight8, dtype, next(iter(TILES))), "rounded": rounded}
    errors = {f"error of {name}": float((y.float() - exact).norm() / exact.norm()) for name, y in results.items()}
    return time_interleaved(functions, device) | errors


def main() -> None:
    arguments = parse_flags(__doc__.splitlines()[0], cpu_tokens=64)
    tokens = min(arguments.tokens, 32_768)
    shapes = SHAPES if arguments.device.type == "cuda" else ((128, 96), (192, 32))
    results = {f"{K} -> {N}": bench(tokens, K, N, arguments.device) for K, N in shapes}
    rows = [[name, *(found[name] for found in results.values())] for name in next(iter(results.values()))]
    print_table(f"forward of {tokens} tokens, ms", ["", *results], rows)
    print_json("int8_products", arguments.device, tokens=tokens, results=results)


if __name__ == "__main__":
    main()
