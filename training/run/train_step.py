"""One training step, and a validation."""

import math
from collections.abc import Callable, Iterable

import torch

from kernels.head_loss import NextToken, Scored, TopK
from model import ModelOutput, Transformer
from training.data.loader import Batch
from training.families.lora import without_adapters
from training.host.errors import UserError
from training.memory.placement import products_in_bf16
from training.objectives.scored import Minimised, Objective, Terms, collect
from training.objectives.stored import teacher_of
from training.optim.adamw import MasterAdamW
from training.parallel.world import World
from training.run.stopping import Stopped


class NoTarget(Exception):
    """A step has no token to predict: all are masked, padding, or the first of their documents."""


class NotRead(Exception):
    """A rank could not read its batches of a step; all ranks know."""


class NotFinite(UserError):
    """A step's loss or gradient is not finite; the weights are as they were before it."""


def run_model(
    model: Transformer,
    batch: Batch,
    world: World,
    denominator: float | None = None,
    objective: Objective | None = None,
    all_terms: list[Terms] | None = None,
) -> torch.Tensor:
    """The loss of a micro-batch, float32 [], divided by `denominator`. Adds an objective's metrics
    to `all_terms`.

    Without an objective it is the summed loss of the next tokens, times their weights if the data
    have some. A `denominator` of None is the number of its targets.
    """
    input_ids, targets = (_sent(x, world.device) for x in (batch.input_ids, batch.targets))
    num_targets = batch.num_valid_tokens
    if objective is None:
        columns_BT = {} if batch.answers is None else batch.answers.to(world.device).columns_BT
        loss = NextToken(targets, columns_BT.get("weight"), denominator, num_targets)
        if teacher := teacher_of(columns_BT):
            loss = TopK(targets, loss.weights, denominator, num_targets, teacher=teacher)
        output = model(input_ids, batch.documents, loss)
        if all_terms is not None and output.expert_load is not None:
            all_terms.append(terms_of_experts(output))
        return output.loss
    assert denominator is not None
    reference_BT = None
    group = world.mesh.get_group("context") if world.mesh and world.context_size > 1 else None
    assert batch.answers is not None, "an objective has answers"
    # it is the base of adapters
    if objective.needs_reference and "reference" not in batch.answers.columns_BT:
        with torch.no_grad(), without_adapters(model):
            reference = NextToken(targets, denominator=1.0, num_targets=num_targets)
            reference_BT = model(input_ids, batch.documents, reference).log_probs
    minimised = Minimised(objective, batch, denominator, world.device, group, reference_BT)
    output = model(input_ids, batch.documents, Scored(minimised, targets, num_targets))
    if all_terms is not None:
        terms = terms_of_experts(output) if output.expert_load is not None else Terms()
        means = minimised.terms.means | terms.means
        largest = minimised.terms.largest | terms.largest
        all_terms.append(Terms(means=means, largest=largest))
    return output.loss


def _sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns x on the device. From pinned memory the host need not wait until the micro-batch
    before is done."""
    return (x.contiguous().pin_memory() if device.type == "cuda" else x).to(
        device, non_blocking=True
    )


def terms_of_experts(output: ModelOutput) -> Terms:
    """Returns metrics of a micro-batch's experts: tokens of a layer's fullest over the mean, and
    the auxiliary loss."""
    assert output.expert_load is not None
    load = output.expert_load.double()
    fullest, one = load.amax(1) / load.mean(1), load.new_ones(())
    means = {"expert_load": (fullest.mean(), one)}
    if output.auxiliary_loss is not None:
        means["auxiliary_loss"] = output.auxiliary_loss.detach().double(), one
    return Terms(means=means, largest={"expert_load_max": fullest.max()})


def beside_step(
    model: Transformer, batches: Iterable[Batch], world: World, objective: Objective | None
) -> Objective | None:
    """Returns the objective of a step whose micro-batches these are.

    A forward pass more finds what it reads.
    """
    if objective is None or not objective.reads_step:
        return objective
    terms = list[Terms]()
    with torch.no_grad():
        for batch in batches:
            run_model(model, batch, world, 1.0, objective, terms)
    return objective.beside(collect(terms, world))


def count_losses(batches: list[Batch], world: World, objective: Objective | None) -> float:
    """Returns the denominator of the loss of `batches`, whole ones, and of the other ranks'; NaN if
    a rank has none."""
    count: float = math.nan
    if batches and objective is None:
        count = sum(
            batch.slice(world.context_rank, world.context_size).num_valid_tokens
            for batch in batches
        )
    elif batches and objective is not None:
        count = sum(map(objective.count, batches)) / world.context_size
    # Ranks that share matrices have the same tokens, and the whole loss each: both count once.
    return world.sum(count)[0] / world.tensor_size


def train_step(
    model: Transformer,
    optimizer: MasterAdamW,
    batches: list[Batch],
    world: World,
    learning_rate: float,
    max_grad_norm: float,
    before_update: Callable[[], None] = lambda: None,
    objective: Objective | None = None,
) -> tuple[float, float, dict[str, float]]:
    """One optimizer step over all micro-batches of all ranks. Returns (mean loss, gradient norm,
    the other metrics).

    The update may go on afterwards: from one return to the next is the time of one step. Raises
    NoTarget, NotRead, NotFinite, or Stopped inside `Stopping.looking`; the weights are as they were
    then.

    Args:
        batches: of whole sequences; ranks that share sequences have the same ones, and each takes
            its part. []: this rank could not read its batches.
        before_update: called ahead of the update, as `Saver.before_update`.
        objective: what is minimised; None: the loss of the next tokens.
    """
    num_valid = count_losses(batches, world, objective)
    batches = [batch.slice(world.context_rank, world.context_size) for batch in batches]
    if math.isnan(num_valid):
        raise NotRead
    if not num_valid:
        raise NoTarget
    losses, all_terms = list[torch.Tensor](), list[Terms]()
    try:
        objective = beside_step(model, batches, world, objective)
        for batch in batches:
            # FSDP2 adds up each copy's gradients, and sums over copies once per step
            if world.replicate > 1:
                model.set_requires_all_reduce(batch is batches[-1])
            loss = run_model(model, batch, world, num_valid, objective, all_terms)
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
    metrics = collect(all_terms, world)
    optimizer.step(learning_rate)
    return loss, norm, metrics


@torch.no_grad()
def validate(
    model: Transformer,
    batches: Iterable[Batch],
    world: World,
    is_asked: Callable[[], bool],
    objective: Objective | None = None,
) -> tuple[float, dict[str, float]]:
    """Mean loss on held-out data, over all ranks, with products in bf16 as in generation and
    evaluation; metrics.

    `batches` are of whole sequences, as many on each rank. Raises Stopped where `is_asked` says so
    before a batch.
    """
    total, count, all_terms = 0.0, 0.0, list[Terms]()
    with products_in_bf16(model):
        if objective is not None and objective.reads_step:
            batches = [*batches]
            shards = (batch.slice(world.context_rank, world.context_size) for batch in batches)
            objective = beside_step(model, shards, world, objective)
        for batch in batches:
            if is_asked():
                raise Stopped
            count += objective.count(batch) / world.context_size if objective else 0
            batch = batch.slice(world.context_rank, world.context_size)
            total += float(run_model(model, batch, world, 1.0, objective, all_terms))
            count += 0 if objective else batch.num_valid_tokens
    total, everything = world.sum(total, count)
    return total / everything, collect(all_terms, world)
