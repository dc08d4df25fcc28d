"""One training step, and a validation."""

import math
from collections.abc import Callable, Iterable

import torch

from model import Transformer
from training.data.loader import Batch
from training.host.errors import UserError
from training.memory.placement import products_in_bf16
from training.optim.adamw import MasterAdamW
from training.parallel.world import World
from training.run.stopping import Stopped


class NoTarget(Exception):
    """A step has no token to predict: all are masked, padding, or the first of their documents."""


class NotRead(Exception):
    """A rank could not read its batches of a step; all ranks know."""


class NotFinite(UserError):
    """A step's loss or gradient is not finite; the weights are as they were before it."""


def run_model(model: Transformer, batch: Batch, world: World, denominator: float | None = None) -> torch.Tensor:
    """The summed loss of a micro-batch, float32 [], divided by `denominator`; None: by the number of its targets."""
    input_ids, targets = (x.to(world.device, non_blocking=True) for x in (batch.input_ids, batch.targets))
    known = {"documents": batch.documents, "num_targets": batch.num_valid_tokens}
    return model(input_ids, targets=targets, denominator=denominator, **known).loss


def train_step(
    model: Transformer,
    optimizer: MasterAdamW,
    batches: list[Batch],
    world: World,
    learning_rate: float,
    max_grad_norm: float,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """One optimizer step over all micro-batches of all ranks. Returns (mean loss per token, gradient norm).

    The update may go on afterwards. From one return to the next is the time of one step: the last update, beside
    forward, and backward.

    Raises NoTarget, NotRead, NotFinite, or Stopped inside `Stopping.looking`; the weights are as they were then.

    Args:
        batches: of whole sequences; ranks that share sequences have the same ones, and each takes its part. []: this
            rank could not read its batches.
        before_update: called ahead of the update, as `Saver.before_update`.
    """
    batches = [batch.slice(world.context_rank, world.context_size) for batch in batches]
    # Ranks that share matrices have the same tokens, and the whole loss each: both count once.
    num_valid = world.sum(sum(batch.num_valid_tokens for batch in batches) if batches else math.nan)[0]
    num_valid /= world.tensor_size
    if math.isnan(num_valid):
        raise NotRead
    if not num_valid:
        raise NoTarget
    losses: list[torch.Tensor] = []
    try:
        for batch in batches:
            if world.replicate > 1:  # FSDP2 adds up each copy's gradients, and sums over copies once per step
                model.set_requires_all_reduce(batch is batches[-1])
            loss = run_model(model, batch, world, num_valid)
            loss.backward()
            losses.append(loss.detach())
        norm, loss = optimizer.clip_grad_norm(max_grad_norm, torch.stack(losses).sum())
        loss /= world.tensor_size
        if not math.isfinite(loss + norm):
            raise NotFinite(f"loss {loss}, gradient norm {norm}")
    except (Stopped, NotFinite):
        optimizer.zero_grad()
        raise
    before_update()
    optimizer.step(learning_rate)
    return loss, norm


@torch.no_grad()
def validate(model: Transformer, batches: Iterable[Batch], world: World, is_asked: Callable[[], bool]) -> float:
    """Mean loss per held-out token, over all ranks, with products in bf16 as in generation and evaluation.

    Args:
        batches: of whole sequences, as many on each rank.
        is_asked: called before each batch; if it returns True, Stopped is raised.
    """
    total, count = 0.0, 0
    with products_in_bf16(model):
        for batch in batches:
            if is_asked():
                raise Stopped
            batch = batch.slice(world.context_rank, world.context_size)
            total += float(run_model(model, batch, world, 1.0))
            count += batch.num_valid_tokens
    total, all_tokens = world.sum(total, count)
    return total / all_tokens
