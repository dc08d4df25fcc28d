"""Forward's product in int8 with a Hadamard rotation, beside FP8's and bf16's: milliseconds and
errors.

`python -m benchmarks.experiments.int8_products`. `fp8_error` finds that nearly all of FP8's error
is forward's, and that int8 with a rotation has a tenth of its divergence. This measures whether a
GPU is as fast. "FP8" and "int8" make their factors anew, other rows of int8 have tiles and stages
of their own. "_int_mm" is cuBLAS's product, int32 and not scaled.
"""

import functools

import torch
import triton
from torch import Tensor

from benchmarks.common import parse_flags, print_json, print_table, time_interleaved
from kernels.fp8 import FP8_LINEAR
from kernels.int8 import INT8, Factor, _product_kernel
from kernels.linear import PLAIN

SHAPES = (
    (2560, 6144),
    (4096, 2560),
    (2560, 9728),
    (9728, 2560),
)  # inputs and outputs of the 4B's maps
TILES = {  # BLOCK_M, BLOCK_N, BLOCK_K, stages, warps
    "128x256x128": (128, 256, 128, 3, 8), "128x128x128": (128, 128, 128, 4, 8),
    "256x128x128": (256, 128, 128, 3, 8),
    "128x256x64": (128, 256, 64, 4, 8),
}  # fmt: skip


def product(a: Factor, b: Factor, tile: str) -> Tensor:
    (M, K), N = a.values.shape, len(b.values)
    block_m, block_n, block_k, stages, warps = TILES[tile]
    out = a.scales.new_empty(M, N, dtype=a.dtype)
    _product_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        a.values, b.values, a.scales, b.scales, out, N, M, N=N, K=K, BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k, GROUP=8, num_stages=stages, num_warps=warps,
    )  # fmt: skip
    return out


def bench(tokens: int, K: int, N: int, device: torch.device) -> dict[str, float]:
    """Returns milliseconds, and relative errors against the product of the same matrices in
    float32."""
    part, dtype = INT8("triton"), torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, K, device=device, dtype=dtype)
    x[:, 3] *= 30  # a channel of outliers, as trained models have it
    weight = torch.randn(N, K, device=device, dtype=dtype) / K**0.5
    x8, weight8 = part.factor(x), part.factor(weight)
    functions = {
        "bf16": lambda: PLAIN.forward(x, weight),
        "FP8": lambda: FP8_LINEAR.forward(FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight)),
        "of it FP8's factors": lambda: (FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight)),
        "int8": lambda: part.forward(part.factor(x), part.factor(weight)),
        "of it int8's factors": lambda: (part.factor(x), part.factor(weight)),
        "_int_mm": lambda: torch._int_mm(x8.values, weight8.values.t()),
    }
    functions |= {f"int8 {tile}": functools.partial(product, x8, weight8, tile) for tile in TILES}
    exact = x.float() @ weight.float().t()
    results = {name: functions[name]() for name in ("bf16", "FP8", "int8")}
    errors = {
        f"error of {name}": float((y.float() - exact).norm() / exact.norm())
        for name, y in results.items()
    }
    return time_interleaved(functions, device) | errors


def main() -> None:
    arguments = parse_flags(__doc__.split("\n\n")[0], cpu_tokens=64)
    tokens = min(arguments.tokens, 32_768)
    shapes = SHAPES if arguments.device.type == "cuda" else ((128, 96), (256, 32))
    results = {f"{K} -> {N}": bench(tokens, K, N, arguments.device) for K, N in shapes}
    rows = [
        [name, *(found[name] for found in results.values())]
        for name in next(iter(results.values()))
    ]
    print_table(f"forward of {tokens} tokens, ms", ["", *results], rows)
    print_json("int8_products", arguments.device, tokens=tokens, results=results)


if __name__ == "__main__":
    main()
