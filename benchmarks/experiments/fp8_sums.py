"""Measures what FP8 products lose to the tensor cores' fast accumulation, and what float32 sums
cost in time.

`python -m benchmarks.experiments.fp8_sums --model MODEL` on a GPU; MODEL is a folder of trained
weights. Without it only random terms are summed. A product with fast accumulation is compared with
the same product in float64.

- shrink: 1 - <found, exact> / <exact, exact>, the share of a product that is lost;
- error: |found - exact| / |exact|, which holds the rounding to bf16 as well (0.0017 alone);
- worst: the largest shrink of one channel, a column of y, of dx or of d_weight.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import parse_flags, print_json, print_table, time_interleaved
from benchmarks.experiments.fp8_error import read_batches, use
from kernels import torch_internals
from kernels.fp8 import FP8, FP8_LINEAR, Factor
from kernels.head_loss import NextToken
from model import Transformer
from training.checkpoint.weights import load_model_weights, shape_of_weights

MEANS = {"0": (0.0, 0.0), "0.5 and 0.1": (0.5, 0.1), "1 and 0.3": (1.0, 0.3), "3 and 1": (3.0, 1.0)}
GPU_ROWS = 131_072
FORWARD_SHAPES = ((2560, 6144), (4096, 2560), (2560, 9728), (9728, 2560))  # the 4B's maps
Statistics = dict[str, dict[str, float]]
scaled_mm = torch_internals.scaled_mm


def multiply(a: Factor, b: Factor, is_fast: bool) -> Tensor:
    """Returns a b^T in bf16, [M, N]."""
    a_scales, b_scales = a.scales, b.scales
    if a_scales.dim() != b_scales.dim():
        a_scales = a_scales.expand(len(a.values), 1).contiguous()
        b_scales = b_scales.expand(len(b.values), 1).contiguous()
    b_scales = b_scales.t() if b_scales.dim() else b_scales
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": is_fast}
    return scaled_mm(a.values, b.values.t(), a_scales, b_scales, **options)


def multiply_exactly(a: Factor, b: Factor) -> Tensor:
    """Returns a b^T in float64, [M, N]."""
    total = torch.zeros(len(a.values), len(b.values), dtype=torch.float64, device=a.values.device)
    for a_part, b_part in zip(a.values.split(8192, 1), b.values.split(8192, 1)):
        total += a_part.double() @ b_part.double().t()
    b_scales = b.scales.t() if b.scales.dim() else b.scales
    return total * a.scales.double() * b_scales.double()


def statistics(found: Tensor, exact: Tensor) -> dict[str, float]:
    found = found.double()
    squares = exact.square().sum(0)
    shrinks = 1 - (found * exact).sum(0) / squares.clamp(min=1e-300)
    heard = squares > 1e-6 * squares.max()  # channels that are near to zero have no direction
    return {
        "shrink": float(1 - (found * exact).sum() / squares.sum()),
        "error": float((found - exact).norm() / exact.norm()),
        "worst": float(shrinks[heard].max()),
    }


@dataclass(frozen=True)
class Recording(FP8):
    """FP8 whose products are recorded by the map's label and the product's name."""

    label: str = ""

    def forward(self, x, weight, bias=None, *, out=None):
        record(f"y of {self.label}", x, weight)
        return super().forward(x, weight, bias, out=out)

    def input_gradient(self, dy, weight_t, *, out=None, accumulate=False):
        record(f"dx of {self.label}", dy, weight_t)
        return super().input_gradient(dy, weight_t, out=out, accumulate=accumulate)

    def weight_gradient(self, dy_t, x_t, *, out=None, accumulate=False):
        record(f"d_weight of {self.label}", dy_t, x_t)
        return super().weight_gradient(dy_t, x_t, out=out, accumulate=accumulate)


RECORDS: dict[str, list[dict[str, float]]] = defaultdict(list)


def record(name: str, a: Factor, b: Factor) -> None:
    """Adds a product's statistics with and without fast accumulation to RECORDS."""
    if len(RECORDS[name]) >= 2:
        return
    exact = multiply_exactly(a, b)
    fast = statistics(multiply(a, b, True), exact)
    slow = statistics(multiply(a, b, False), exact)
    RECORDS[name].append(
        {f"{key}, fast": value for key, value in fast.items()}
        | {f"{key}, not fast": value for key, value in slow.items()}
    )


def random_terms(device: torch.device) -> Statistics:
    """Sums of random terms: the weight's gradient by means of an eighth of the channels, y and dx
    by sign."""
    results: Statistics = {}
    rows, width = (GPU_ROWS, 2560) if device.type == "cuda" else (64, 32)
    for name, (mean_x, mean_dy) in MEANS.items():
        x, dy = (torch.randn(rows, width, device=device) for _ in range(2))
        x[:, : width // 8] += mean_x
        dy[:, : width // 8] += mean_dy
        results[f"d_weight, means {name}"] = compare(
            *(transposed(matrix) for matrix in (dy, x)), part=width // 8
        )
    x, dy = (torch.rand(rows, width, device=device) for _ in range(2))
    results["d_weight, all positive"] = compare(transposed(dy), transposed(x), part=width)
    for inner in (2560, 9728) if device.type == "cuda" else (64,):
        for sign, draw in (("random signs", torch.randn), ("all positive", torch.rand)):
            x, weight = (
                draw(2048 if device.type == "cuda" else 32, inner, device=device).bfloat16()
                for _ in range(2)
            )
            results[f"y, {inner}, {sign}"] = compare(
                FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight), part=None
            )
    return results


def transposed(matrix: Tensor) -> Factor:
    return FP8_LINEAR.transpose(FP8_LINEAR.factor(matrix.bfloat16()))


def compare(a: Factor, b: Factor, part: int | None) -> dict[str, float]:
    """Statistics of a product's first `part` rows and columns."""
    a, b = (
        Factor(x.values[:part], x.scales if x.scales.dim() == 0 else x.scales[:part], x.dtype)
        for x in (a, b)
    )
    exact = multiply_exactly(a, b)
    results = {}
    for is_fast in (True, False):
        name = "fast" if is_fast else "not fast"
        found = statistics(multiply(a, b, is_fast), exact)
        results |= {f"{key}, {name}": value for key, value in found.items()}
    return results


def trained_terms(folder: Path, device: torch.device) -> Statistics:
    """The same of all maps of a trained model on source code: mean of shrinks and errors over
    layers, and the worst."""
    shape = shape_of_weights(folder)
    model = Transformer(shape)
    model.load_state_dict(dict(load_model_weights(folder, shape.parameters())))
    model = model.to(device).cast(torch.bfloat16)
    RECORDS.clear()
    use(model, lambda layer, name: Recording(label=f"{name} {layer}"))
    for ids in read_batches(folder, 64, 512, device)[:2]:
        model(ids, loss=NextToken.from_labels(ids)).loss.backward()
    by_kind: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, entries in RECORDS.items():
        by_kind[name.rsplit(" ", 1)[0]] += entries
    results = {}
    for name, entries in by_kind.items():
        columns = {key: [entry[key] for entry in entries] for key in entries[0]}
        results[name] = {
            key: max(values) if key.startswith("worst") else sum(values) / len(values)
            for key, values in columns.items()
        }
    return results


def times(device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds of the three products of the 4B's maps, 32,768 tokens, with and without fast
    accumulation."""
    results = {}
    for inner, outer in FORWARD_SHAPES:
        x, dy = (torch.randn(32_768, width, device=device).bfloat16() for width in (inner, outer))
        weight = FP8_LINEAR.factor(torch.randn(outer, inner, device=device).bfloat16())
        x8, dy8, weight_t = (
            FP8_LINEAR.factor(x),
            FP8_LINEAR.factor(dy),
            FP8_LINEAR.transpose(weight),
        )
        pairs = {
            "y": (x8, weight),
            "dx": (dy8, weight_t),
            "d_weight": (FP8_LINEAR.transpose(dy8), FP8_LINEAR.transpose(x8)),
        }
        functions = {}
        for name, (a, b) in pairs.items():
            functions[f"{name}, fast"] = lambda a=a, b=b: multiply(a, b, True)
            functions[f"{name}, not fast"] = lambda a=a, b=b: multiply(a, b, False)
        results[f"{inner} -> {outer}"] = time_interleaved(functions, device)
    return results


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    header = ["product", *next(iter(results.values()))]
    print_table(
        title,
        header,
        [[name, *(f"{value:.5f}" for value in row.values())] for name, row in results.items()],
    )


def main() -> None:
    arguments = parse_flags(
        __doc__.split("\n\n")[0], model={"type": Path, "help": "folder of trained weights"}
    )
    device = arguments.device
    if device.type != "cuda":
        raise SystemExit("fast accumulation is a GPU's: run this on one")
    results = {"random": random_terms(device)}
    show("random terms", results["random"])
    results["ms"] = times(device)
    show("ms, 32,768 tokens", results["ms"])
    if arguments.model is not None:
        results["trained"] = trained_terms(arguments.model, device)
        show(arguments.model.name, results["trained"])
    print_json("fp8_sums", device, results=results)


if __name__ == "__main__":
    main()
