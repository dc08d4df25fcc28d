"""Lets the ranks that share each sequence attend over it; `kernels/head_exchange.py` exchanges tokens for heads."""

from torch import nn

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
    if heads % size:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(f"context_parallel_size {size} must divide {whose} {heads} {kind}; give one of {divisors}")
