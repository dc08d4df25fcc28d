"""Lets the ranks that share each sequence attend over it; `kernels/head_exchange.py` exchanges tokens for heads."""

import math

from torch import nn

from kernels.gated_delta_net import DeltaNet
from kernels.head_exchange import HeadExchange
from model import ModelConfig
from training.host.errors import UserError
from training.parallel.world import World


def share_sequences(model: nn.Module, world: World) -> None:
    """Let the blocks of a model.Transformer attend over sequences that the ranks of `world`'s context axis share."""
    assert world.mesh is not None, "one process shares nothing"
    exchange = HeadExchange(world.mesh.get_group("context")) if world.context_size > 1 else None
    for block in model.layers:
        block.mixer.exchange = exchange


def check_sharing(size: int, model_config: ModelConfig, chooses_blocks: bool, tensor_size: int = 1) -> None:
    """Raise UserError, with the sizes that can, unless `size` ranks can share the heads of each sequence equally.

    Args:
        chooses_blocks: whether any layer attends to chosen blocks.
        tensor_size: ranks that share each matrix. They divide the heads first; `size` ranks share one part.
    """
    whose, share = "the model's" if tensor_size == 1 else "a rank's", model_config.share(tensor_size)
    heads, kind = share.num_attention_heads, "query heads"
    if chooses_blocks:
        heads, kind = share.num_key_value_heads, "key/value heads, whose query heads choose blocks together"
    delta_nets = (part.num_key_heads for part in share.layer_kinds if isinstance(part, DeltaNet))
    counts = dict.fromkeys([(heads, kind), *((number, "key heads of gated delta nets") for number in delta_nets)])
    common = math.gcd(*(number for number, _ in counts))
    if common % size:
        named = " and ".join(f"{number} {kind}" for number, kind in counts)
        divisors = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise UserError(f"context_parallel_size {size} must divide {whose} {named}; give one of {divisors}")
