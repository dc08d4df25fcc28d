"""Error of products in FP8 on fixed weights and batches: of each product of each map alone, and of
candidate settings.

`python -m benchmarks.experiments.fp8_error --model MODEL`, on a CPU or a GPU; MODEL is a folder of
trained weights. y, dx and d_weight are the three products of a map: its output, and the gradients
of its input and of its weight. Settings run `kernels.fp8`, on a GPU its kernels. "Rounded" ones
multiply, in the inputs' dtype, matrices that were rounded to 8 bits: candidates that have no
kernel. Each row has the difference of the mean loss with its standard error over tokens, the mean
divergence of the words' probabilities, and |g - g'| / |g| of the gradients of all matrices of
blocks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import parse_flags, print_json, print_table
from benchmarks.experiments.package_corpus import package_texts
from kernels.fp8 import FP8_LINEAR, FP8_TYPE
from kernels.head_loss import NextToken
from kernels.linear import PLAIN, Linear
from kernels.mixed import Mixed
from model import Transformer
from training.checkpoint.files import tokenizer_of
from training.checkpoint.weights import load_model_weights, shape_of_weights
from training.data.tokenizer import load_tokenizer
from training.memory.placement import set_linear

MAPS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
PRODUCTS = "y", "dx", "d_weight"
ROWS_AT_ONCE = 8
TEXT_CHARACTERS = 40_000  # read from each package, so that there are several
MODEL = {"type": Path, "required": True, "help": "folder of trained weights"}
Choice = Callable[[int, str], Linear]  # the map of a layer's matrix: (layer, name) -> Linear


@dataclass(frozen=True)
class Rounded(Linear):
    """Products of rounded matrices. Scales lie along the summed dimension; `kernels.linear.Linear`
    has the methods."""

    dtype: torch.dtype = FP8_TYPE  # float8_e4m3fn, float8_e5m2 or int8
    dy_dtype: torch.dtype | None = None  # the gradients of outputs have it; None: as the others
    block: int | None = None  # elements that share a scale; None: a row
    is_power: bool = False  # whether scales are powers of two
    # whether blocks of 64 are multiplied by a Hadamard matrix before they are rounded
    rotates: bool = False

    def forward(self, x, weight, bias=None, *, out=None):
        return PLAIN.forward(self._rounded(x), self._rounded(weight), bias, out=out)

    def input_gradient(self, dy, weight_t, *, out=None, accumulate=False):
        return PLAIN.input_gradient(
            self._rounded(dy, self.dy_dtype),
            self._rounded(weight_t),
            out=out,
            accumulate=accumulate,
        )

    def weight_gradient(self, dy_t, x_t, *, out=None, accumulate=False):
        return PLAIN.weight_gradient(
            self._rounded(dy_t, self.dy_dtype), self._rounded(x_t), out=out, accumulate=accumulate
        )

    def _rounded(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns x [M, K], rounded; K is the summed dimension. A rotation of both factors leaves
        their product."""
        dtype, (M, K) = dtype or self.dtype, x.shape
        block = 64 if self.rotates else 1
        padded = F.pad(x.float(), (0, -K % math.lcm(block, self.block or 1)))
        if self.rotates:
            padded = (padded.view(M, -1, block) @ hadamard(block, x.device)).view(M, -1)
        groups = padded.view(M, -1, self.block or padded.shape[1])
        largest = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
        scales = (groups.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-38)
        scales = torch.exp2(torch.log2(scales).ceil()) if self.is_power else scales
        values = groups / scales
        rounded = values.round() if dtype == torch.int8 else values.to(dtype).float()
        return (rounded * scales).view(M, -1).to(x.dtype)


def hadamard(size: int, device: torch.device) -> Tensor:
    """Returns the orthonormal Hadamard matrix of a power of two."""
    rows = torch.ones(1, 1, device=device)
    while len(rows) < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)]) / 2**0.5
    return rows


class ByMatrix(Linear):
    """The map of each matrix by its identity, which blocks that run whole pass on."""

    # an MLP then calls this map, in place of the pieces of one map for all its matrices
    trains_matrices = False

    def __init__(self, chosen: dict[int, Linear]):
        object.__setattr__(self, "chosen", chosen)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.chosen[id(weight)](x, weight, bias)


def every(linear: Linear, products: Sequence[str] = PRODUCTS, maps: Sequence[str] = MAPS) -> Choice:
    """Returns the choice of `linear` for these products of these maps in all layers."""
    chosen = Mixed(**dict.fromkeys(products, linear))
    return lambda layer, name: chosen if name in maps else PLAIN


def settings(layers: int) -> dict[str, Choice]:
    """Returns the settings to compare, by their names."""

    def inside(choice: Choice) -> Choice:
        """All layers but the first and the last."""
        return lambda layer, name: choice(layer, name) if 0 < layer < layers - 1 else PLAIN

    def down(linear: Linear, others: Choice, products: Sequence[str] = PRODUCTS) -> Choice:
        """One map for the down projections, and others for the rest."""
        own = every(linear, products)
        return lambda layer, name: (own if name == "down_proj" else others)(layer, name)

    fp8, gradients, but_down = (
        FP8_LINEAR,
        ("y", "dx"),
        [name for name in MAPS if name != "down_proj"],
    )
    found = {"bf16": every(PLAIN, ()), "fp8": every(fp8)}
    found |= {f"{product} alone": every(fp8, [product]) for product in PRODUCTS}
    found |= {
        f"{product} of {name} alone": every(fp8, [product], [name])
        for name in MAPS
        for product in PRODUCTS
    }
    in_mlps, in_mixers = Mixed(fp8, fp8, fp8), Mixed(PLAIN, fp8, fp8)
    found |= {
        "d_weight in bf16": every(fp8, gradients),
        "dx in bf16": every(fp8, ["y", "d_weight"]),
        "y in bf16": every(fp8, ["dx", "d_weight"]),
        "ends in bf16": inside(every(fp8)),
        "down in bf16": every(fp8, maps=but_down),
        "y of down in bf16": down(fp8, every(fp8), ["dx", "d_weight"]),
        "ends and down in bf16": inside(every(fp8, maps=but_down)),
        "d_weight and ends in bf16": inside(every(fp8, gradients)),
        "d_weight and down in bf16": every(fp8, gradients, but_down),
        "d_weight, ends and down in bf16": inside(every(fp8, gradients, but_down)),
        "v in bf16": every(fp8, maps=[name for name in MAPS if name != "v_proj"]),
        "attention in bf16": every(fp8, maps=MAPS[4:]),
        "attention and ends in bf16": inside(every(fp8, maps=MAPS[4:])),
        "attention and down in bf16": every(fp8, maps=MAPS[4:6]),
        "attention, ends and down in bf16": inside(every(fp8, maps=MAPS[4:6])),
        "y of attention in bf16": lambda layer, name: in_mlps if name in MAPS[4:] else in_mixers,
        "MLP's y and dx in fp8": every(fp8, gradients, MAPS[4:]),
        "gate's and up's y and dx in fp8": every(fp8, gradients, MAPS[4:6]),
        "rounded, rows": every(Rounded(is_power=True)),
        "rounded, scales of any size": every(Rounded()),
        "rounded, blocks of 128": every(Rounded(block=128)),
        "rounded, dy in e5m2": every(Rounded(dy_dtype=torch.float8_e5m2, is_power=True)),
        "rounded, d_weight alone": every(Rounded(is_power=True), ["d_weight"]),
        "rounded, d_weight alone in blocks of 128": every(Rounded(block=128), ["d_weight"]),
        "rounded, Hadamard before down": down(
            Rounded(rotates=True, is_power=True), every(Rounded(is_power=True))
        ),
        "rounded, int8, rows": every(Rounded(torch.int8)),
        "rounded, int8, rows, Hadamard": every(Rounded(torch.int8, rotates=True)),
        "rounded, int8, blocks of 128": every(Rounded(torch.int8, block=128)),
    }
    return found


def use(model: Transformer, choice: Choice) -> None:
    """Sets the map of each matrix of the blocks."""
    chosen = {}
    for i, block in enumerate(model.layers):
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                chosen[id(module.weight)] = choice(i, name.rsplit(".", 1)[-1])
    set_linear(model, PLAIN)
    for block in model.layers:
        block.mixer.linear = block.mlp.linear = ByMatrix(chosen)


class Measured(NamedTuple):
    """Results of a setting on all batches."""

    losses: Tensor  # one for each token
    # one for each token: the words' Kullback-Leibler divergence from the exact ones
    divergences: Tensor
    gradients: dict[str, Tensor]  # the mean loss's, of the blocks' matrices
    logits: list[Tensor]  # one for each batch; none of a setting that is compared


def measure(
    model: Transformer, batches: Sequence[Tensor], exact: Measured | None = None
) -> Measured:
    model.zero_grad(set_to_none=True)
    losses, divergences, logits, rows = [], [], [], sum(map(len, batches))
    for i, ids in enumerate(batches):
        result = model(ids, loss=NextToken.from_labels(ids), return_logits=True)
        (result.loss * (len(ids) / rows)).backward()
        losses.append(-result.log_probs[:, :-1].detach().float().flatten())
        logits.append(result.logits[:, :-1].detach().flatten(0, 1))
        expected = logits[-1] if exact is None else exact.logits[i]
        logs = (x.float().log_softmax(-1) for x in (logits[-1], expected))
        divergences.append(F.kl_div(*logs, reduction="none", log_target=True).sum(-1))
    named = model.layers.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.ndim > 1}
    return Measured(
        torch.cat(losses), torch.cat(divergences), gradients, logits if exact is None else []
    )


def compare(found: Measured, exact: Measured) -> dict[str, float]:
    difference, count = found.losses - exact.losses, len(exact.losses)
    pairs = [(g.float(), exact.gradients[name].float()) for name, g in found.gradients.items()]
    error, norm = (
        sum(float(x.square().sum()) for x in xs) ** 0.5
        for xs in zip(*[(a - b, b) for a, b in pairs])
    )
    return {
        "loss": float(difference.mean()),
        "its standard error": float(difference.std()) / count**0.5,
        "divergence": float(found.divergences.mean()), "error of gradients": error / norm,
    }  # fmt: skip


def read_batches(
    folder: Path, count: int, context_length: int, device: torch.device
) -> list[Tensor]:
    """Returns the beginnings of installed packages' sources as token ids, some rows at a time."""
    tokenizer, rows = load_tokenizer(tokenizer_of(folder)), []
    for _, text in package_texts(TEXT_CHARACTERS):
        ids = torch.as_tensor(
            tokenizer.encode(text)[:context_length].astype("int64"), device=device
        )
        if len(ids) == context_length:
            rows.append(ids)
        if len(rows) == count:
            break
    return list(torch.stack(rows).split(ROWS_AT_ONCE))


def main() -> None:
    arguments = parse_flags(
        __doc__.split("\n\n")[0],
        only={"nargs": "*", "help": "settings, by their names; default: all"},
        model=MODEL,
        rows={"type": int, "help": "texts; default: 64 on a GPU, 2 on a CPU"},
        context_length={"type": int, "default": 512},
        out={"type": Path, "help": "file to append a line of JSON to"},
    )  # fmt: skip
    folder, device = arguments.model, arguments.device
    shape = shape_of_weights(folder)
    model = Transformer(shape)
    model.load_state_dict(dict(load_model_weights(folder, shape.parameters())))
    model = model.to(device).cast(torch.bfloat16) if device.type == "cuda" else model.float()
    batches = read_batches(
        folder,
        arguments.rows or (64 if device.type == "cuda" else 2),
        arguments.context_length,
        device,
    )
    use(model, every(PLAIN, ()))
    exact = measure(model, batches)
    print(f"{exact.losses.numel():,} tokens, loss {exact.losses.mean():.4f}", flush=True)
    results: dict[str, dict[str, float]] = {}
    for name, choice in settings(shape.num_hidden_layers).items():
        if arguments.only and name not in arguments.only:
            continue
        use(model, choice)
        results[name] = compare(measure(model, batches, exact), exact)
        print(name, *(f"{value:+.5f}" for value in results[name].values()), flush=True)
    header = ["setting", *next(iter(results.values()))]
    rows = [[name, *(f"{value:+.5f}" for value in row.values())] for name, row in results.items()]
    print_table(f"{folder.name}, {exact.losses.numel():,} tokens", header, rows)
    print_json(
        "fp8_error",
        device,
        arguments.out,
        model=folder.name,
        tokens=exact.losses.numel(),
        results=results,
    )


if __name__ == "__main__":
    main()
