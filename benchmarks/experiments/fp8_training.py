"""Trains one model's weights on with several settings of FP8, and compares the losses of held-out
texts with bf16's.

`python -m benchmarks.experiments.fp8_training --model MODEL --at_once 4`. MODEL is a folder of
weights, settings have the names of `benchmarks.experiments.fp8_error`. Runs of one seed take the
same rows of installed packages' sources. Each run is a process, and `--at_once` of them share the
GPU: small models wait for launches. With `--from_scratch` the folder needs config.json alone, and
initial weights are drawn by the seed.
"""

import functools
import multiprocessing
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import parse_flags, print_json, print_table
from benchmarks.experiments.fp8_error import MODEL, every, settings, use
from benchmarks.experiments.package_corpus import package_texts
from kernels.head_loss import NextToken
from kernels.linear import PLAIN
from model import Transformer
from training.checkpoint.files import tokenizer_of
from training.checkpoint.state import load_weights
from training.checkpoint.weights import load_model_weights, shape_of_weights
from training.data.tokenizer import load_tokenizer
from training.memory.execution import WHOLE, Execution
from training.memory.placement import apply_execution
from training.optim.adamw import MasterAdamW, warmup_cosine
from training.parallel.fsdp import initial_weights

DEFAULT = (
    "bf16", "fp8", "y in bf16", "d_weight in bf16", "attention and ends in bf16",
)  # fmt: skip
WARMUP = 0.05  # share of the steps


def read_tokens(arguments: Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of packages to train on, and of one package in ten, which is held out."""
    tokenizer, texts = load_tokenizer(tokenizer_of(arguments.model)), ([], [])
    for name, text in package_texts(arguments.characters):
        texts[zlib.crc32(name.encode()) % 10 == 0].append(text)
    return tuple(
        np.concatenate([tokenizer.encode(text) for text in each]).astype(np.int64) for each in texts
    )


def draw(
    tokens: np.ndarray, rows: int, length: int, seed: tuple[int, ...], device: torch.device
) -> Tensor:
    """Returns rows of `length` tokens from places that the seed draws."""
    starts = np.random.default_rng(seed).integers(len(tokens) - length, size=rows)
    return torch.as_tensor(
        np.stack([tokens[start : start + length] for start in starts]), device=device
    )


@torch.no_grad()
def validate(model: Transformer, batches: list[Tensor]) -> float:
    return float(
        torch.stack([model(ids, loss=NextToken.from_labels(ids)).loss for ids in batches]).mean()
    )


def train(
    arguments: Namespace, tokens: tuple[np.ndarray, np.ndarray], job: tuple[str, int]
) -> dict[str, float]:
    """Returns the held-out loss in bf16 and in the run's own products, the mean loss of the last
    steps, and seconds."""
    (name, seed), device, shape = job, arguments.device, shape_of_weights(arguments.model)
    model = Transformer(shape).to(device)
    model = model.cast(torch.bfloat16) if device.type == "cuda" else model
    apply_execution(model, Execution((WHOLE,) * shape.num_hidden_layers))
    optimizer = MasterAdamW(model.named_parameters())
    drawn = initial_weights(model, seed) if arguments.from_scratch else None
    load_weights(optimizer, drawn or load_model_weights(arguments.model, shape.parameters()))
    choice = settings(shape.num_hidden_layers)[name]
    use(model, choice)
    rows, length, steps = arguments.batch_size, arguments.context_length, arguments.steps
    losses, began = [], time.perf_counter()
    for step in range(steps):
        ids = draw(tokens[0], rows, length, (seed, step), device)
        loss = model(ids, loss=NextToken.from_labels(ids)).loss
        loss.backward()
        _, loss = optimizer.clip_grad_norm(1.0, loss.detach())
        rate = warmup_cosine(
            step, learning_rate=arguments.learning_rate, warmup_steps=max(1, int(WARMUP * steps)),
            max_steps=steps,
            final_ratio=0.1,
        )  # fmt: skip
        optimizer.step(rate)
        losses.append(loss)
    seconds = time.perf_counter() - began
    held_out = list(draw(tokens[1], arguments.held_out, length, (0,), device).split(rows))
    own = validate(model, held_out)
    use(model, every(PLAIN, ()))
    last = losses[-max(1, steps // 5) :]
    found = {
        "held out": validate(model, held_out),
        "in own products": own,
        "training": sum(last) / len(last),
    }
    print(
        name,
        "seed",
        seed,
        *(f"{value:.5f}" for value in found.values()),
        f"{seconds:.0f} s",
        flush=True,
    )
    return found | {"seconds": seconds}


def differences(found: dict[tuple[str, int], dict[str, float]]) -> Iterator[list]:
    """Yields a row of each setting: held-out losses above bf16's, of each seed and their mean, and
    the other means."""
    names, seeds = (list(dict.fromkeys(parts)) for parts in zip(*found))
    for name in names:
        runs = [(found[name, seed], found[names[0], seed]) for seed in seeds]
        columns = [
            [one[key] - other[key] for one, other in runs]
            for key in ("held out", "in own products", "training")
        ]
        each = " ".join(f"{difference:+.4f}" for difference in columns[0])
        yield [
            name,
            each,
            *(f"{sum(column) / len(column):+.5f}" for column in columns),
            max(r["seconds"] for r, _ in runs),
        ]


def main() -> None:
    arguments = parse_flags(
        __doc__.split("\n\n")[0], model=MODEL,
        settings={"nargs": "*", "default": DEFAULT, "help": "the first is what the others are "
                                                            "compared with"},
        seeds={"type": int, "nargs": "*", "default": [0]}, steps={"type": int, "default": 400},
        batch_size={"type": int, "default": 8}, context_length={"type": int, "default": 1024},
        learning_rate={"type": float, "default": 3e-4},
        held_out={"type": int, "default": 256, "help": "rows"},
        characters={"type": int, "default": 100_000, "help": "limit of each package"},
        from_scratch={"action": "store_true", "help": "weights by the seed, for the shape that "
                                                      "config.json has"},
        at_once={"type": int, "default": 1, "help": "runs that share the device"},
    )  # fmt: skip
    tokens = read_tokens(arguments)
    print(f"{len(tokens[0]):,} tokens to train on, {len(tokens[1]):,} held out", flush=True)
    jobs = [(name, seed) for seed in arguments.seeds for name in arguments.settings]
    with ProcessPoolExecutor(arguments.at_once, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(functools.partial(train, arguments, tokens), jobs))
    found = dict(zip(jobs, results))
    header = ["setting", "held out", "mean", "in own products", "training", "seconds"]
    print_table(
        f"losses above {arguments.settings[0]}'s after {arguments.steps} steps",
        header,
        list(differences(found)),
    )
    recorded = {
        key: value for key, value in vars(arguments).items() if key not in ("device", "model")
    }
    named = {f"{name}, seed {seed}": result for (name, seed), result in found.items()}
    print_json(
        "fp8_training", arguments.device, model=arguments.model.name, results=named, **recorded
    )


if __name__ == "__main__":
    main()
