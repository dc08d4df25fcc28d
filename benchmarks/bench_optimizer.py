"""One update of AdamW with float32 and with compact state: `python -m benchmarks.bench_optimizer`.

First `--pieces` pieces of 8M bf16 weights with their state on the GPU, beside
torch.optim.AdamW(fused=True) on as many float32 weights. Bytes are those that each update must
move: state read and written, gradients read, weights written, and read where they are a part of the
masters. The floor is a copy on the GPU that moves as many bytes.

Then a whole model's update, with all state on the GPU and with all state in pinned host memory. The
model has the shapes of --model_size, random weights, and random gradients of one micro-batch; no
forward runs. Link rates are measured with a copy of one piece, 32 MiB, in the same process. GB are
10^9 bytes. Clocks are read when the GPU has finished.
"""

import functools
import gc
import statistics
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from benchmarks.common import parse_flags, print_json, print_results, require_close, time_once
from model import MODEL_SIZES, Transformer
from training.host.memory import PinnedArena
from training.host.sizes import GIB
from training.optim.adamw import MasterAdamW
from training.optim.formats import BETA1, BETA2, EPS, StateFormat
from training.optim.inventory import PIECE_ELEMENTS, Inventory

FORMATS = "float32", "compact"
PLACES = {"gpu": float("inf"), "host": 0.0}  # gpu_state_bytes
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1


def main() -> None:
    arguments = parse_flags(
        __doc__,
        model_size={"default": "4B", "choices": MODEL_SIZES},
        num_layers={"type": positive, "help": "default: all of the model's"},
        pieces={"type": positive, "help": "default: 16 on a GPU, 1 on a CPU"},
        places={
            "nargs": "+",
            "choices": PLACES,
            "default": [*PLACES],
            "help": "of the whole model's state",
        },
        repeats={"type": positive, "default": 5, "help": "timed updates; the median counts"},
        out={"type": Path, "help": "a file that the last line is appended to"},
    )
    device = arguments.device
    num_weights = PIECE_ELEMENTS * (arguments.pieces or (16 if device.type == "cuda" else 1))
    check(device)
    pieces = measure_pieces(num_weights, arguments.repeats, device)
    print_results(f"update of {num_weights:,} weights, state on the GPU", pieces)
    link = link_rates(device)
    print_results("link, one piece", {"GB per second": link})

    shape = MODEL_SIZES[arguments.model_size]
    shape = replace(shape, num_hidden_layers=arguments.num_layers or shape.num_hidden_layers)
    with torch.device("meta"):
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in Transformer(shape).named_parameters()
        }
    model: dict[str, dict[str, float]] = {}
    for place in arguments.places:
        for state_format in FORMATS:
            model[f"{state_format}, {place}"] = measure_model(
                shapes, state_format, place, arguments.repeats, device
            )
        seconds = [model[f"{state_format}, {place}"]["seconds"] for state_format in FORMATS]
        for state_format, own in zip(FORMATS, seconds):
            model[f"{state_format}, {place}"]["of_float32"] = own / seconds[0]
    print_results(f"update of {arguments.model_size}, {shape.num_hidden_layers} layers", model)
    results = {
        "model_size": arguments.model_size, "num_layers": shape.num_hidden_layers,
        "num_weights": num_weights,
        "pieces": pieces, "link_gb_per_second": link, "model": model,
    }  # fmt: skip
    print_json("optimizer", device, arguments.out, **results)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def check(device: torch.device) -> None:
    """Exit with status 1 if the masters after an update are far from float64's."""
    for state_format in FORMATS:
        weight = nn.Parameter(torch.randn(300, 256, device=device).bfloat16())
        gradient, exact = torch.randn_like(weight), nn.Parameter(weight.detach().double())
        exact.grad = gradient.double()
        options = {"betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WEIGHT_DECAY}
        torch.optim.AdamW([exact], lr=LEARNING_RATE, **options).step()
        optimizer = make_optimizer([("weight", weight)], state_format)
        give_gradients(optimizer, {"weight": gradient})
        optimizer.step(LEARNING_RATE)
        state = optimizer.states["weight"]
        master = state.format.read(state.tensors, weight.detach().view(-1))["master"]
        require_close(
            f"the update of {state_format} state", [master], [exact.detach().view(-1)], 1e-5
        )


def make_optimizer(
    named_parameters: list[tuple[str, nn.Parameter]],
    state_format: str,
    gpu_state_bytes: float = PLACES["gpu"],
) -> MasterAdamW:
    """Returns an optimizer of single micro-batches."""
    inventory = Inventory.of(
        named_parameters,
        accumulate=False,
        gpu_state_bytes=gpu_state_bytes,
        state_format=state_format,
    )
    return MasterAdamW(named_parameters, inventory)


def give_gradients(optimizer: MasterAdamW, gradients: dict[str, torch.Tensor]) -> None:
    """Hand gradients over as backward does."""
    for name, gradient in gradients.items():
        optimizer.parameters[name].grad = gradient
        optimizer.take_gradient(name)


def moved_bytes(format: StateFormat, numel: int) -> int:
    """Bytes that an update of bf16 weights by bf16 gradients reads and writes."""
    reads_weight = "master" not in format.kept
    return 2 * format.num_bytes(numel) + numel * (2 + 2 + (2 if reads_weight else 0))


def measure_pieces(numel: int, repeats: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Times updates of `numel` weights and copies of as many bytes, in turns."""
    gradient = torch.randn(numel // 32, 32, device=device).bfloat16()
    updates: dict[str, tuple[int, Callable, Callable]] = {}  # name -> (bytes, preparation, update)
    for state_format in FORMATS:
        weight = nn.Parameter(torch.randn(numel // 32, 32, device=device).bfloat16())
        optimizer = make_optimizer([("weight", weight)], state_format)
        updates[state_format] = (
            moved_bytes(optimizer.states["weight"].format, numel),
            functools.partial(give_gradients, optimizer, {"weight": gradient}),
            functools.partial(optimizer.step, LEARNING_RATE),
        )
    reference = nn.Parameter(torch.randn(numel, device=device))
    reference.grad = torch.randn(numel, device=device)
    step = torch.optim.AdamW([reference], lr=LEARNING_RATE, fused=True).step
    updates["torch, float32 weights"] = (28 * numel, lambda: None, step)

    copies: dict[int, Callable] = {}
    for num_bytes in {num_bytes for num_bytes, *_ in updates.values()}:
        source = torch.randint(0, 255, (num_bytes // 2,), dtype=torch.uint8, device=device)
        copies[num_bytes] = functools.partial(torch.empty_like(source).copy_, source)
    times: dict[str | int, list[float]] = {name: [] for name in (*updates, *copies)}
    for _ in range(2 + repeats):
        for name, (_, prepare, update) in updates.items():
            prepare()
            times[name].append(time_once(update, device))
        for num_bytes, copy in copies.items():
            times[num_bytes].append(time_once(copy, device))
    # without the warm-up
    ms = {name: statistics.median(values[2:]) for name, values in times.items()}
    return {
        name: {
            "ms": ms[name],
            "bytes_per_weight": num_bytes / numel,
            "gb_per_second": num_bytes / ms[name] / 1e6,
            "of_copy": ms[num_bytes] / ms[name],
        }
        for name, (num_bytes, *_) in updates.items()
    }


def link_rates(device: torch.device) -> dict[str, float]:
    """GB per second of copies of one piece in float32, between pinned memory and the GPU."""
    here = torch.zeros(PIECE_ELEMENTS, device=device)
    arena = PinnedArena(here.nbytes, device)  # the memory is pinned as long as this lives
    host = arena.allocate((PIECE_ELEMENTS,), torch.float32).zero_()
    rates = {}
    for name, target, source in (("to_gpu", here, host), ("to_host", host, here)):
        copy = functools.partial(target.copy_, source, non_blocking=True)
        ms = statistics.median([time_once(copy, device) for _ in range(12)][2:])
        rates[name] = here.nbytes / ms / 1e6
    return rates


@contextmanager
def timed_pinning(device: torch.device):
    """A list of one number: the seconds in which arenas were made."""
    seconds, make = [0.0], PinnedArena.__init__

    def timed(*arguments) -> None:
        synchronize(device)
        began = time.perf_counter()
        make(*arguments)
        seconds[0] += time.perf_counter() - began

    with mock.patch.object(PinnedArena, "__init__", timed):
        yield seconds


def measure_model(
    shapes: dict[str, tuple[int, ...]],
    state_format: str,
    place: str,
    repeats: int,
    device: torch.device,
) -> dict[str, float]:
    """Builds parameters and an optimizer, and times updates."""
    release(device)
    parameters = {
        name: nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02))
        for name, shape in shapes.items()
    }
    with timed_pinning(device) as pinning:
        optimizer = make_optimizer([*parameters.items()], state_format, PLACES[place])
    seconds = []
    for _ in range(1 + repeats):
        for (
            name,
            parameter,
        ) in parameters.items():  # each leaves, or is kept, before the next is made
            give_gradients(optimizer, {name: torch.randn_like(parameter)})
        synchronize(device)
        began = time.perf_counter()
        optimizer.step(LEARNING_RATE)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    found = statistics.median(seconds[1:])
    states = optimizer.states.values()
    sent = sum(
        tensor.nbytes
        for state in states
        for tensor in state.tensors.values()
        if state.row.state_on_host
    )
    fetched = sent + sum(state.gradient.nbytes for state in states if state.gradient is not None)
    return {
        "seconds": found,
        "pinned_gib": optimizer.arena.num_bytes / GIB if place == "host" else 0.0,
        "pinning_seconds": pinning[0],
        "to_gpu_gb_per_second": fetched / found / 1e9,
        "to_host_gb_per_second": sent / found / 1e9,
        "peak_gpu_gib": torch.cuda.max_memory_allocated(device) / GIB
        if device.type == "cuda"
        else 0.0,
    }


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def release(device: torch.device) -> None:
    """Free the memory of the last model, which nothing refers to any more, and start the GPU's peak
    anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
