"""Lets the ranks that share each sequence attend over it; `kernels/head_exchange.py` exchanges
tokens for heads."""

from collections.abc import Sequence

from torch import nn

from kernels.head_exchange import HeadExchange
from kernels.parts import MixerKind
from model import ModelConfig
from training.host.errors import UserError
from training.parallel.world import World, common_divisors


def share_sequences(model: nn.Module, world: World) -> None:
    """Lets the blocks of a model.Transformer attend over sequences that the ranks of `world`'s
    context axis share."""
    assert world.mesh is not None, "one process shares nothing"
    exchange = HeadExchange(world.mesh.get_group("context")) if world.context_size > 1 else None
    for block in model.layers:
        block.mixer.exchange = exchange


def check_sharing(
    size: int, model_config: ModelConfig, kinds: Sequence[MixerKind] = (), tensor_size: int = 1
) -> None:
    """Raises UserError, with the sizes that can, unless `size` ranks can share the heads of each
    sequence equally.

    Args:
        kinds: how each layer attends; (): as the configuration says.
        tensor_size: ranks that share each matrix. They divide the heads first; `size` ranks share
            one part.
    """
    whose = "the model's" if tensor_size == 1 else "a rank's"
    mixers = [parts.mixer for parts in model_config.shard(tensor_size).all_parts(kinds)]
    counts = dict.fromkeys(heads for mixer in mixers for heads in mixer.heads_to_share().items())
    divisors = common_divisors(number for _, number in counts)
    if size not in divisors:
        named = " and ".join(f"{number} {kind}" for kind, number in counts)
        raise UserError(
            f"context_parallel_size {size} must divide {whose} {named}; "
            f"give one of {', '.join(map(str, divisors))}"
        )
