"""What a step reports: throughput, model FLOP utilisation, memory; a line a step in metrics.jsonl."""

import json
import logging
import statistics
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from training.host.files import read_file, replace_file
from training.memory.machine import find_gpu
from training.parallel.world import World

logger = logging.getLogger(__name__)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the GPU, FLOP/s; None on a CPU or a GPU that the table does not know."""
    if device.type != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.flops


def peak_memory_gib(world: World) -> list[float]:
    """Peak of allocated GPU memory since the last call, GiB, of every rank."""
    peaks = torch.zeros(world.size, dtype=torch.float64)
    peaks[world.rank] = torch.cuda.max_memory_allocated(world.device) / 2**30
    torch.cuda.reset_peak_memory_stats(world.device)
    return [round(peak, 2) for peak in world.sum(*peaks.tolist())]


def is_spike(loss: float, recent: Sequence[float]) -> bool:
    """Whether a loss is above the mean of 20 or more recent ones by more than 6 of their standard deviations."""
    return len(recent) >= 20 and loss > statistics.mean(recent) + 6 * statistics.pstdev(recent)


def set_aside(path: Path) -> None:
    """Rename what an earlier run left of a metrics.jsonl to metrics.1.jsonl, or to the first number that is free."""
    if path.exists() and path.stat().st_size:
        earlier = next(p for n in count(1) if not (p := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
        path.rename(earlier)
        logger.info("%s of an earlier run is kept as %s", path, earlier.name)


class MetricsFile:
    """metrics.jsonl of a run; written by one rank only, a line at a time, flushed.

    Args:
        path: appended to. Lines past `from_step` (of a run that went on after its last checkpoint) are dropped, and so
            are lines that were cut short, by a kill or a full disk.
        tensorboard: whether TensorBoard's event files are written as well, into the folder tensorboard beside it.
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
        self._events = TensorBoardFiles(path.with_name("tensorboard"), from_step) if tensorboard else None

    def write(self, **values) -> None:
        """Append a line. One that cannot be written is a warning: the run is worth more than its log."""
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
            if self._events is not None:
                self._events.write(**values)
        except OSError as error:
            logger.warning("step %s cannot be written to %s: %s", values["step"], self._file.name, error)


class TensorBoardFiles:
    """The numbers of steps as TensorBoard's event files, in a folder; of a list, as of memory by rank, the largest.

    Args:
        folder: is added to. What it shows of steps past `from_step` is replaced.
    """

    def __init__(self, folder: Path, from_step: int):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard, which is optional

        self._writer = SummaryWriter(str(folder), purge_step=from_step + 1)

    def write(self, **values) -> None:
        for name, value in values.items():
            value = max(value) if isinstance(value, list) else value
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, values["step"])
        self._writer.flush()


def _step(line: str) -> int | None:
    """The step of a line; None of a damaged one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
