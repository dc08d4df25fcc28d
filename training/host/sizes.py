"""Sizes of memory: how they are written, and how much of the host is left to this process."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from training.host.errors import UserError, whole_number

MIB, GIB = 2**20, 2**30  # bytes
SYSTEM_BYTES = 2 * GIB  # assumed: host memory of Linux, a desktop and page tables
# Host memory of a process beside what it pins, for Python, torch, CUDA and libraries. Measured with
# CUDA 13 on an H200: 1.3 to 1.6 GiB. The rest is for a loader and a tokenizer.
PROCESS_BYTES = 2 * GIB

# Bounds of a model's sizes, by their names in config.json and adapter_config.json. Plans have
# something for each layer, readers have a name for each expert of a layer, and products of sizes
# count elements in 64 bits.
HEADS = 2**12
WIDTHS = 2**12
COLUMNS = 2**20
TOKENS = 2**31 - 1
MOST = {
    "vocab_size": 2**24,
    "hidden_size": COLUMNS,
    "intermediate_size": 2**22,
    "num_hidden_layers": 4096,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTHS,
    "max_position_embeddings": TOKENS,
    "original_max_position_embeddings": TOKENS,
    "max_window_layers": TOKENS,
    "sliding_window_pattern": TOKENS,
    "no_rope_layer_interval": TOKENS,
    "full_attention_interval": TOKENS,
    "decoder_sparse_step": TOKENS,
    "query_pre_attn_scalar": TOKENS,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "num_experts_per_tok": 4096,
    "moe_intermediate_size": 2**22,
    "shared_expert_intermediate_size": 2**22,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": WIDTHS,
    "linear_value_head_dim": WIDTHS,
    "r": 2**16,
}
MOST_EXPERTS = 2**17  # of all layers together


def check_sizes(content: dict) -> None:
    """Raises ValueError, with its name, for a size in a JSON file that is above its bound."""
    for name, most in MOST.items():
        value = content.get(name)
        if isinstance(value, int | float) and value > most:
            raise ValueError(f"{name} is {value!r:.80}; at most {most} are built")


def parse_bytes(text: str, name: str = "a memory size") -> int:
    """Returns the bytes in "24GB", "24GiB", "512MB" or a plain number. A GB is 2**30 bytes too, as
    GPUs are sold.

    Raises UserError for text that is not a size, or is below 1 MiB, such as gigabytes without their
    unit. It names the flag `name`.
    """
    match = re.fullmatch(
        r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE
    )
    if match is None:
        size = 0
    else:
        size = int(float(match[1]) * 2 ** (10 * " KMGT".index(match[2].upper() or " ")))
    if not MIB <= size < 2**50:
        raise UserError(
            f'{name} is between 1MB and 1023TB and looks like "24GB", got {text[:80]!r}'
        )
    return size


def budget_of(free_bytes: float, processes: int) -> int:
    """Returns the bytes that each process of a machine may pin by default: its share of 80% of what
    is free."""
    return int(0.8 * free_bytes) // processes


def budget_of_machine(memory_bytes: int, processes: int) -> int:
    """Returns the bytes that each process may pin by default, on an idle machine of so much memory.

    Raises UserError if the processes fill the memory before they pin anything.
    """
    taken = SYSTEM_BYTES + processes * PROCESS_BYTES
    if memory_bytes <= taken:
        take = f"the system and nproc {processes} take {taken / GIB:g}GB before any is pinned"
        raise UserError(f"host_memory {memory_bytes / GIB:g}GB: {take}; give more")
    return budget_of(memory_bytes - taken, processes)


def free_host_bytes() -> float:
    """Returns the host memory that the machine and this process's control groups have left."""
    available = 1024 * int(
        re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]
    )
    return min(available, *_bytes_left_in_groups())


def available_host_bytes() -> int:
    """Returns this rank's share of 80% of the host memory that is free."""
    return budget_of(free_host_bytes(), whole_number("LOCAL_WORLD_SIZE", 1))


def _bytes_left_in_groups() -> Iterator[float]:
    """Yields the bytes left under each memory limit: of the process's control group and its
    parents.

    cgroup v2 lists one path with an empty controller, v1 one path for the controller "memory". In a
    container the path may be the host's and not exist here. The nearest folder above it that exists
    then has the limit.
    """
    yield math.inf
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup"
        limit = "memory.max"
        usage = "memory.current"
        cache = "inactive_file"
        if "memory" in controllers.split(","):
            root = f"{root}/memory"
            limit = "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
            cache = "total_inactive_file"
        elif controllers:
            continue
        group = Path(root, path.lstrip("/"))
        for folder in (group, *group.parents[: len(group.parts) - len(Path(root).parts)]):
            # No such folder or file, or no limit, which v2 writes as "max".
            with suppress(OSError, ValueError):
                size = int((folder / limit).read_text())
                cached = re.findall(
                    rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE
                )[0]
                yield size - (int((folder / usage).read_text()) - int(cached))


def gib(num_bytes: float) -> str:
    """Returns a number of bytes as text: gib(3 * 2**29) is "1.50 GiB"."""
    return f"{num_bytes / GIB:.2f} GiB"
