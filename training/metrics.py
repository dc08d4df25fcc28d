"""What a step reports: throughput, model FLOP utilisation, memory; a line a step in metrics.jsonl."""

import json
from pathlib import Path

import torch

from training.distributed import World

# Dense bf16 tensor-core peaks of NVIDIA's data sheets, FLOP/s; the first name found in the GPU's name counts.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "A6000": 155e12, "A10G": 70e12,
    "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the GPU, FLOP/s; None on a CPU or a GPU that the table does not know."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)


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
