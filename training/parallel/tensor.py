"""Gives each tensor-parallel rank its part of each matrix; `kernels/tensor_parallel.py` computes
with the parts."""

import logging

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from kernels.tensor_parallel import TensorRanks
from model import ModelConfig
from training.host.errors import UserError
from training.parallel.world import World, common_divisors


def share_matrices(model: nn.Module, world: World) -> None:
    """Lets the ranks of `world`'s tensor axis share the matrices of a model.Transformer, made for
    them on "meta".

    Its parameters become DTensors with the shapes of initial weights and checkpoints. FSDP2 must
    come after: it shards each rank's part further.
    """
    if world.tensor_size == 1:
        return
    assert world.mesh is not None
    # PyTorch warns, on each rank, that a weight is gathered by two collectives. Only checkpoints
    # gather whole weights.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = world.mesh["tensor"]
    ranks = TensorRanks(mesh.get_group())
    declared = model.declared
    for name, module in model.named_modules():
        if hasattr(module, "tensor_ranks"):
            module.tensor_ranks = ranks
        for key, part in [*module.named_parameters(recurse=False)]:
            dim = declared[f"{name}.{key}"].shared_dim
            placement = Replicate() if dim is None else Shard(dim)
            sharded = DTensor.from_local(part.detach(), mesh, [placement], run_check=False)
            module.register_parameter(key, nn.Parameter(sharded))


def check_matrix_sharing(size: int, model_config: ModelConfig) -> None:
    """Raises UserError, with the sizes that can, unless so many ranks can share each of a model's
    matrices equally."""
    layers = model_config.all_parts()
    kept_whole = (part.kept_whole for parts in layers for part in parts if part.kept_whole)
    if size > 1 and (indivisible := next(kept_whole, None)):
        raise UserError(
            f"tensor_parallel_size {size} would part {indivisible}; use context_parallel_size"
        )
    named = dict.fromkeys(
        size for parts in layers for part in parts for size in part.shared_sizes().items()
    )
    sizes = [*named, ("vocab_size", model_config.vocab_size)]
    divisors = common_divisors(number for _, number in sizes)
    if size not in divisors:
        *words, last = (f"{name} {number}" for name, number in sizes)
        raise UserError(
            f"tensor_parallel_size {size} must divide the model's {', '.join(words)} and {last}; "
            f"give one of {', '.join(map(str, divisors))}"
        )
