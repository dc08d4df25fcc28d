"""How much memory a run may have: sizes as people write them, what is free, and the cap that makes a budget hold."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from training.errors import UserError

DRIVER_BYTES = 2**30  # of a GPU's memory: CUDA's and NCCL's own


def parse_bytes(text: str) -> int:
    """Bytes in "24GB" or "24GiB" (both 2**30 bytes a GB, as GPUs are sold), "512MB" or a plain number of bytes.

    Raises:
        UserError: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UserError(f'a memory size looks like "24GB", got {text!r}')
    return int(float(match[1]) * 2 ** (10 * " KMGT".index(match[2].upper() or " ")))


def gpu_budget(text: str, device: torch.device) -> int:
    """Bytes of a --memory_budget: a size, or "auto", what is free or this process's less a gigabyte for the driver.

    Raises:
        UserError: that much is not free.
    """
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    budget = free - DRIVER_BYTES if text == "auto" else parse_bytes(text)
    if not 0 < budget <= free:
        raise UserError(
            f"memory_budget {text}: {free / 2**30:.1f} GB of this GPU are free, of which the driver needs one; "
            "lower it, or end what else runs there"
        )
    return budget


def available_host_bytes() -> int:
    """80% of what this machine and this process's control groups have left, shared by torchrun's processes here."""
    available = 1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])
    return int(0.8 * min(available, *_bytes_left_in_groups())) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _bytes_left_in_groups() -> Iterator[float]:
    """What each memory limit on this process leaves: of its control group and those around it (container, Slurm job).

    cgroup v2 lists one path with an empty controller, v1 one path for the controller "memory". In a container the path
    may be the host's and not exist here; the limit is then that of the nearest folder above which does.
    """
    yield math.inf
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, cache = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = Path(root, path.lstrip("/"))
        for folder in (group, *group.parents[: len(group.parts) - len(Path(root).parts)]):
            with suppress(OSError, ValueError):  # no such folder or file, or no limit, which v2 writes as "max"
                size = int((folder / limit).read_text())
                cached = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)[1]
                yield size - (int((folder / usage).read_text()) - int(cached))


def cap_gpu_memory(num_bytes: int, device: torch.device) -> None:
    """Make `num_bytes` the hard limit of this process's GPU allocator, everything reserved included."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)
