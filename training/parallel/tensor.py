"""Gives each tensor-parallel rank its part of each matrix; `kernels/tensor_parallel.py` computes with the parts."""

import logging
import math

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from kernels.gated_delta_net import DeltaNet
from kernels.tensor_parallel import TensorRanks
from model import ModelConfig
from training.host.errors import UserError
from training.parallel.world import World


def share_matrices(model: nn.Module, world: World) -> None:
    """Let the ranks of `world`'s tensor axis share the matrices of a model.Transformer, made for them on "meta".

    Its parameters become DTensors with the shapes of initial weights and checkpoints. FSDP2 must come after: it shards
    each rank's part further.
    """
    if world.tensor_size == 1:
        return
    assert world.mesh is not None
    # PyTorch warns, on each rank, that a weight is gathered by two collectives. Only checkpoints gather whole weights.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = world.mesh["tensor"]
    ranks, declared = TensorRanks(mesh.get_group()), model.declared
    for name, module in model.named_modules():
        if hasattr(module, "tensor_ranks"):
            module.tensor_ranks = ranks
        for key, part in [*module.named_parameters(recurse=False)]:
            dim = declared[f"{name}.{key}"].shared_dim
            placement = Replicate() if dim is None else Shard(dim)
            whole = DTensor.from_local(part.detach(), mesh, [placement], run_check=False)
            module.register_parameter(key, nn.Parameter(whole))


def check_matrix_sharing(size: int, model_config: ModelConfig) -> None:
    """Raise UserError, with the sizes that can, unless so many ranks can share each of a model's matrices equally."""
    if size > 1 and model_config.qk_norm == "width":
        raise UserError(
            f"tensor_parallel_size {size} would part the heads that {model_config.model_type} normalises together; use "
            "context_parallel_size"
        )
    layers = map(model_config.parts, range(model_config.num_hidden_layers))
    named = dict.fromkeys(size for layer in layers for part in layer for size in part.shared_sizes().items())
    sizes = [*named, ("vocab_size", model_config.vocab_size)]
    if size > 1 and any(isinstance(kind, DeltaNet) for kind in model_config.layer_kinds):
        raise UserError(
            f"tensor_parallel_size {size} would part q, k and v, which gated delta nets have in one matrix; use "
            "context_parallel_size"
        )
    common = math.gcd(*(number for _, number in sizes))
    if common % size:
        divisors = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        *words, last = (f"{name} {number}" for name, number in sizes)
        raise UserError(
            f"tensor_parallel_size {size} must divide the model's {', '.join(words)} and {last}; give one of {divisors}"
        )
