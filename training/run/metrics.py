"""Shows a run: its settings at the start, then each step on the progress bar and as a line of metrics.jsonl."""

import dataclasses
import json
import logging
import statistics
import typing
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from tqdm import tqdm

from model import ModelConfig
from training.host.errors import UserError
from training.host.files import read_file, replace_file
from training.memory.machine import find_gpu
from training.memory.planner import Plan
from training.parallel.world import World
from training.run.settings import TrainConfig

logger = logging.getLogger(__name__)


def describe(config: TrainConfig, model_config: ModelConfig, plan: Plan, world: World) -> None:
    """Log a run's settings and its model."""
    logger.info("config: %s", json.dumps(dataclasses.asdict(config)))
    logger.info(
        "model: %s, %s parameters; attention: %s, kernel: %s; device: %s x %d (data x context x tensor: %d x %d x %d)",
        config.model_size or model_config.model_type, f"{model_config.num_parameters():,}", config.attention_type,
        plan.execution.attention_backend, world.device.type, world.size,
        world.data_size, world.context_size, world.tensor_size,
    )  # fmt: skip


def show(bar: tqdm, values: dict, are_bytes: bool) -> None:
    """Show a step's metrics on the progress bar, and its validation on a line; `are_bytes` says what tokens are."""
    loss = "left out" if values["loss"] is None else f"{values['loss']:.3f}" + " (spike)" * ("is_spike" in values)
    shown = {"loss": loss, "tokens/s": f"{values['tokens_per_second']:,.0f}"}
    if "mfu" in values:
        shown["mfu"] = f"{values['mfu']:.1%}"
    if "peak_memory_gib" in values:
        shown["GiB"] = max(values["peak_memory_gib"])
    bar.set_postfix(shown)
    bar.update()
    if "validation_loss" in values:
        show_validation(bar, values, are_bytes)


def show_validation(bar: tqdm, values: dict, are_bytes: bool) -> None:
    """Show a validation's loss, and the share of the run's time that validations have taken."""
    loss = f"{values['validation_loss']:.4f} nats per {'byte' if are_bytes else 'token'}"
    share = f"{values['validation_share']:.0%}"
    bar.write(f"step {values['step']}: validation loss {loss}; validations take {share} of the time")


def gpu_metrics(forward_flops: float, seconds: float, world: World) -> dict:
    """Every rank's peak of allocated memory in GiB and a step's model FLOP utilisation; nothing on a CPU.

    All ranks call this. `forward_flops` are of this rank's forwards; a backward takes twice as many.
    """
    on_gpu, peaks = world.device.type == "cuda", [0.0] * world.size
    if on_gpu:
        peaks[world.rank] = torch.cuda.max_memory_allocated(world.device) / 2**30
        torch.cuda.reset_peak_memory_stats(world.device)
    flops, *peaks = world.sum(forward_flops, *peaks)
    found: dict = {"peak_memory_gib": [round(peak, 2) for peak in peaks]} if on_gpu else {}
    if (most := peak_flops(world.device)) is not None:
        found["mfu"] = 3 * flops / world.size / (world.context_size * world.tensor_size) / seconds / most
    return found


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the GPU, FLOP/s; None on a CPU or a GPU that the table does not know."""
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else gpu.flops


def is_spike(loss: float, recent: Sequence[float]) -> bool:
    """Whether a loss is above the mean of 20 or more recent ones by more than 6 of their standard deviations."""
    return len(recent) >= 20 and loss > statistics.mean(recent) + 6 * statistics.pstdev(recent)


def set_aside(path: Path) -> None:
    """Rename an earlier run's metrics.jsonl to metrics.1.jsonl, or to the first number that is free."""
    if path.exists() and path.stat().st_size:
        earlier = next(p for n in count(1) if not (p := path.with_suffix(f".{n}{path.suffix}")).exists())
        path.rename(earlier)
        logger.info("%s of an earlier run is kept as %s", path, earlier.name)


def open_metrics(config: TrainConfig, from_step: int) -> "MetricsFile":
    """Write the resolved settings into output_dir, and open metrics.jsonl beside them; raises UserError."""
    folder = Path(config.output_dir)
    try:
        replace_file(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        if config.resume == "no":
            set_aside(folder / "metrics.jsonl")
        return MetricsFile(folder / "metrics.jsonl", from_step, config.tensorboard)
    except OSError as error:
        raise UserError(f"output_dir {folder} cannot be written to: {error}; choose another") from None


class MetricsFile:
    """Writes a run's metrics.jsonl, on one rank, a line at a time, flushed.

    Args:
        path: appended to. Lines past `from_step`, of a run that went on after its last checkpoint, are dropped, and so
            are lines that a kill or a full disk cut short.
        tensorboard: also write TensorBoard's event files, into the folder tensorboard beside it. A list, such as memory
            by rank, is its largest number in them.
    """

    def __init__(self, path: Path, from_step: int, tensorboard: bool = False):
        given = read_file(path, "move it elsewhere") if path.exists() else b""
        lines = given.decode(errors="replace").splitlines()
        steps = [_step(line) for line in lines]
        if damaged := steps.count(None):
            logger.warning("%s: %d of %d lines are damaged and were dropped", path, damaged, len(lines))
        kept = (line for line, step in zip(lines, steps) if step is not None and step <= from_step)
        replace_file(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a")
        self._events: typing.Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard, which is optional

            self._events = SummaryWriter(str(path.with_name("tensorboard")), purge_step=from_step + 1)

    def write(self, **values) -> None:
        """Append a line. A line that cannot be written is a warning: the run is worth more than its log."""
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
            for name, value in values.items() if self._events else ():
                number = max(value) if isinstance(value, list) else value
                if name != "step" and isinstance(number, int | float):
                    self._events.add_scalar(name, number, values["step"])
            if self._events:
                self._events.flush()
        except OSError as error:
            logger.warning("step %s cannot be written to %s: %s", values["step"], self._file.name, error)


def _step(line: str) -> int | None:
    """The step of a line; None of a damaged one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
