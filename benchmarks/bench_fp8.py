"""Products in FP8 against bf16, and what their factors cost, at the 4B's shapes: `python -m benchmarks.bench_fp8`."""

import torch

from benchmarks.common import parse_flags, print_json, print_table, time_interleaved
from kernels.fp8 import FP8_LINEAR, quantize_rows
from kernels.linear import PLAIN

SHAPES = ((2560, 6144), (4096, 2560), (2560, 9728), (9728, 2560))  # inputs and outputs of a map


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=64)
    results = {}
    for K, N in SHAPES if arguments.device.type == "cuda" else ((64, 96),):
        results[f"{K} -> {N}"] = bench(arguments.tokens, K, N, arguments.device)
    header = ["map", *next(iter(results.values()))]
    print_table(
        f"forward and the input's gradient of {arguments.tokens} tokens, ms",
        header,
        [[name, *values.values()] for name, values in results.items()],
    )
    print_json("fp8", arguments.device, tokens=arguments.tokens, results=results)


def bench(tokens: int, K: int, N: int, device: torch.device) -> dict[str, float]:
    """Returns milliseconds of each part, and the relative error of forward."""
    x, dy = (torch.randn(tokens, width, dtype=torch.bfloat16, device=device) for width in (K, N))
    weight = torch.randn(N, K, dtype=torch.bfloat16, device=device) / K**0.5
    factors = FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight)
    factors_t = FP8_LINEAR.factor(dy), FP8_LINEAR.factor(weight.t())
    exact, found = PLAIN.forward(x, weight).float(), FP8_LINEAR.forward(*factors).float()
    functions = {
        "bf16": lambda: (PLAIN.forward(x, weight), PLAIN.input_gradient(dy, weight.t())),
        "FP8": lambda: (
            FP8_LINEAR.forward(FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight)),
            FP8_LINEAR.input_gradient(FP8_LINEAR.factor(dy), FP8_LINEAR.factor(weight.t())),
        ),
        "FP8, products alone": lambda: (FP8_LINEAR.forward(*factors), FP8_LINEAR.input_gradient(*factors_t)),
        "factor of x": lambda: quantize_rows(x),
        "factor of dy": lambda: quantize_rows(dy),
        "factor of the weight": lambda: quantize_rows(weight),
        "factor of the transposed weight": lambda: quantize_rows(weight.t()),
    }
    return time_interleaved(functions, device) | {"error": float((found - exact).norm() / exact.norm())}


if __name__ == "__main__":
    main()
