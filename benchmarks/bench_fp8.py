"""Products in FP8 against bf16, and what their factors cost, at the 4B's shapes: `python -m
benchmarks.bench_fp8`."""

import torch

from benchmarks.common import parse_flags, print_json, print_table, time_interleaved
from kernels.fp8 import FP8_LINEAR
from kernels.linear import PLAIN

SHAPES = ((2560, 6144), (4096, 2560), (2560, 9728), (9728, 2560))  # inputs and outputs of a map


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=64)
    results = {}
    for K, N in SHAPES if arguments.device.type == "cuda" else ((64, 96),):
        results[f"{K} -> {N}"] = bench(arguments.tokens, K, N, arguments.device)
    header = ["map", *next(iter(results.values()))]
    print_table(
        f"forward and backward of {arguments.tokens} tokens, ms",
        header,
        [[name, *values.values()] for name, values in results.items()],
    )
    print_json("fp8", arguments.device, tokens=arguments.tokens, results=results)


def bench(tokens: int, K: int, N: int, device: torch.device) -> dict[str, float]:
    """Returns milliseconds of each part, and the relative error of each of the three products."""
    x, dy = (torch.randn(tokens, width, dtype=torch.bfloat16, device=device) for width in (K, N))
    weight = torch.randn(N, K, dtype=torch.bfloat16, device=device) / K**0.5

    def products(linear, x, dy, weight, weight_t):
        d_weight = linear.weight_gradient(linear.transpose(dy), linear.transpose(x))
        return linear.forward(x, weight), linear.input_gradient(dy, weight_t), d_weight

    def factors():
        weight8 = FP8_LINEAR.factor(weight)
        return FP8_LINEAR.factor(x), FP8_LINEAR.factor(dy), weight8, FP8_LINEAR.transpose(weight8)

    made = factors()
    functions = {
        "bf16": lambda: products(PLAIN, x, dy, weight, weight.t()),
        "FP8": lambda: products(FP8_LINEAR, *factors()),
        "of it factors": factors,
        "and transposing for the weight's gradient": lambda: [
            FP8_LINEAR.transpose(factor) for factor in made[:2]
        ],
    }
    pairs = zip(products(FP8_LINEAR, *made), products(PLAIN, x, dy, weight, weight.t()))
    errors = [
        float((found.float() - exact.float()).norm() / exact.float().norm())
        for found, exact in pairs
    ]
    return time_interleaved(functions, device) | dict(
        zip(("error of y", "of dx", "of d_weight"), errors)
    )


if __name__ == "__main__":
    main()
