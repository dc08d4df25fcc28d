"""How much memory a run may have: sizes as people write them, what is free, and the cap that makes a budget hold."""

import os
import re
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
    """80% of what this machine, and the container we are in, have left, shared by torchrun's processes here."""
    left = [1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no container, or one without a limit, which reads "max"
        cached = int(re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)[1])
        used = int((group / "memory.current").read_text()) - cached
        left.append(int((group / "memory.max").read_text()) - used)
    return int(0.8 * min(left)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cap_gpu_memory(num_bytes: int, device: torch.device) -> None:
    """Make `num_bytes` the hard limit of this process's GPU allocator, everything reserved included."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)
