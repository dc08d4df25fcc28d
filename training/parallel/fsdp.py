"""FSDP2: parameters sharded over the ranks, and full tensors brought into them."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from training.parallel.world import World


def shard_model(
    model: nn.Module, blocks: nn.ModuleList, world: World, compute_dtype: torch.dtype | None = None
) -> None:
    """Shards a model by FSDP2, each transformer block a group and the rest another; gradient sums
    are float32.

    Gradients are summed over ranks, and over copies, not averaged: the loss is divided by all
    ranks' valid tokens already. Gathered parameters are of `compute_dtype`, by default bfloat16 on
    GPUs and float32 on CPUs. A mixer's exact parameters, see `kernels.parts.Parameter`, are a group
    of their own, gathered in float32.
    """
    compute_dtype = compute_dtype or (
        torch.bfloat16 if world.device.type == "cuda" else torch.float32
    )
    named = dict(model.named_parameters())
    declared = model.declared
    exact = {p for name, p in named.items() if name in declared and declared[name].is_exact}
    mixers = [block.mixer for block in blocks if not exact.isdisjoint(block.mixer.parameters())]
    for module in (*blocks, model):
        _shard(module, world, compute_dtype, exact)
    for mixer in mixers:  # after the blocks, which have its other parameters already
        _shard(
            mixer, world, torch.float32, {*mixer.parameters()} - exact, reshard_after_forward=False
        )
    for module in (*mixers, *blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction but the sum


def _shard(
    module: nn.Module, world: World, dtype: torch.dtype, ignored: set[nn.Parameter], **options: bool
) -> None:
    # Inputs are not cast: hidden states have the parameters' dtype already, and RoPE's tables must
    # stay float32.
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=world.fsdp_mesh, mp_policy=policy, ignored_params=ignored, **options)


def initial_weights(
    model: nn.Module, seed: int, role: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full float32 tensor) of each parameter, sharded or not, the same on every rank.

    They are drawn one at a time. Parameters of another role are left out; None: none are.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if role not in (None, model.declared[name].role):
            continue
        full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        model.initialize_parameter(name, full, generator)
        yield name, full


def local_part(parameter: Tensor, full: Tensor) -> Tensor:
    """Returns this rank's part of a full tensor that every rank has; all of it if `parameter` is
    not sharded."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    placements = parameter.placements
    # Without a source rank nothing is communicated: each rank takes its part of its own tensor.
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies full tensors, the same on every rank, into named parameters, sharded or not."""
    parameters = dict(model.named_parameters())
    for name, full in weights:
        parameter = parameters[name]
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(
            local_part(parameter, full)
        )
