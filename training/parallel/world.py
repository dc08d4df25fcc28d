"""One process or many: the process group, this rank's device, and sums over ranks."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.errors import UserError


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the ranks, in float64."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def min(self, *values: float) -> list[float]:
        """Each value's least over the ranks, in float64."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return tensor.tolist()

    def broadcast(self, value):
        """The main rank's value, on every rank; anything that pickles."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, device=self.device)
        return values[0]


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """The process group that torchrun announced (NCCL on GPUs, gloo on CPUs), or a world of one without it.

    Args:
        device: "auto" (a GPU if there is one), "cuda" or "cpu".

    Raises:
        UserError: CUDA asked for where there is none, or fewer GPUs than processes on this machine.
    """
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before CUDA starts: less fragmentation
    rank, size, local_rank = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f'device must be "auto", "cuda" or "cpu", got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but PyTorch sees no CUDA GPU here; use --device cpu, or check nvidia-smi")
    if device == "cpu" or not torch.cuda.is_available():
        world = World(rank, size, torch.device("cpu"))
        # torchrun allows each process one thread; share the cores among this machine's processes instead.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    else:
        if local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise UserError(f"more processes than the {count} GPUs here: torchrun --nproc_per_node={count} at most")
        world = World(rank, size, torch.device("cuda", local_rank))
        torch.cuda.set_device(world.device)
    if size > 1:
        gpu = world.device.type == "cuda"
        dist.init_process_group("nccl" if gpu else "gloo", device_id=world.device if gpu else None)
    yield world
    # Not after an error: the other ranks may wait in a collective, and so would this; torchrun ends them as it exits.
    if dist.is_initialized():
        gc.collect()  # what still refers to the group; gloo aborts now and then otherwise
        dist.destroy_process_group()
