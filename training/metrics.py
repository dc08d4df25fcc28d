"""What a step reports: throughput, model FLOP utilisation, memory; a line a step in metrics.jsonl."""

import json
from pathlib import Path

import torch

from training.distributed import World
from training.gpus import find_gpu


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


class MetricsFile:
    """metrics.jsonl of a run; written by one rank only, a line at a time, flushed.

    Args:
        path: appended to; lines past `from_step` (of a run that went on after its last checkpoint) are dropped.
    """

    def __init__(self, path: Path, from_step: int):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= from_step]
        self._file = path.open("w")
        self._file.writelines(f"{line}\n" for line in kept)

    def write(self, **values) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
