"""One process or many: process group, device, sharding with FSDP2, and sums over ranks."""

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

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


def shard_model(
    model: nn.Module, blocks: nn.ModuleList, world: World, compute_dtype: torch.dtype | None = None
) -> None:
    """FSDP2: each block a group, the rest another; parameters and gradient sums in float32.

    Gradients are summed over ranks, not averaged: the loss is divided by all ranks' valid tokens already.

    Args:
        compute_dtype: of the gathered parameters; None: bfloat16 on GPUs, float32 on CPUs.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    if compute_dtype is None:
        compute_dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    # Inputs are not cast: hidden states have the parameters' dtype already, and RoPE's tables must stay float32.
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in (*blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def initial_weights(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, full float32 tensor) of each parameter, drawn one at a time, the same on every rank.

    Args:
        model: has `initialize_parameter(name, tensor, generator)`; its parameters may be sharded, of any dtype.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        model.initialize_parameter(name, full, generator)
        yield name, full


def local_part(parameter: Tensor, full: Tensor) -> Tensor:
    """This rank's part of a full tensor that every rank has; all of it if `parameter` is not sharded."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()  # None: no communication


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy full tensors, the same on every rank, into the parameters of these names, which may be sharded."""
    parameters = dict(model.named_parameters())
    for name, full in weights:
        parameter = parameters[name]
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(local_part(parameter, full))
