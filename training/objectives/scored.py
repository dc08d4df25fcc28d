"""Log-probabilities of a micro-batch's answers, and what an objective says of them.

An objective is a formula: it gives a loss for each token or for each answer, which autograd
differentiates by the log-probabilities. Minus these derivatives are the weights of the targets,
with which the model's loss is run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.head_loss import IGNORE_INDEX
from training.data.loader import Answers, Batch
from training.memory.step import Scoring
from training.parallel.world import World


class _SumByAnswer(torch.autograd.Function):
    """Sums x [B, T] over the tokens of each answer, [A], and over ranks that share sequences."""

    @staticmethod
    def forward(ctx, x_BT, index_BT, num_answers, group):
        ctx.save_for_backward(index_BT)
        places = torch.arange(num_answers + 1, device=x_BT.device)
        # Beginning of each answer: indices ascend.
        offsets = torch.searchsorted(index_BT.flatten(), places)
        sums = torch.segment_reduce(x_BT.flatten(), "sum", offsets=offsets, unsafe=True)
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums

    @staticmethod
    def backward(ctx, d_sums):
        (index_BT,) = ctx.saved_tensors
        return d_sums[index_BT], None, None, None


@dataclass
class Scored:
    """A micro-batch whose targets have log-probabilities, float64; A documents with padding."""

    log_probs_BT: Tensor  # 0 where there is no target
    is_target_BT: Tensor
    answers: Answers  # on the device
    reference_BT: Tensor | None = None  # log-probabilities of the reference
    entropy_BT: Tensor | None = None
    group: dist.ProcessGroup | None = None  # ranks that share the sequences

    def sum(self, x_BT: Tensor) -> Tensor:
        """Sums over the tokens of each answer, [A]."""
        num_answers = len(self.answers.values["answer"])
        return _SumByAnswer.apply(x_BT, self.answers.index_BT, num_answers, self.group)

    @property
    def lengths(self) -> Tensor:
        """Targets of each answer, [A], at least 1."""
        return self.sum(self.is_target_BT.double()).clamp(min=1)

    @property
    def is_answer(self) -> Tensor:
        """Whether a document is neither padding nor the prompt of others, [A]."""
        return self.answers.values["answer"] >= 0

    def column(self, name: str) -> Tensor:
        """Numbers of the targets, float64 [B, T]; 0 where there is no target."""
        return self.answers.columns_BT[name].double()


@dataclass
class Terms:
    """A loss in parts, of which all are added up, and its metrics.

    Args:
        by_token: [B, T], 0 where there is no target; None: there is no such part.
        by_answer: [A], 0 of documents that have no such loss.
        means: numerator and denominator of each metric, [] both, to be added up over micro-batches
            and ranks.
        largest: [] by name, of which the largest counts.
    """

    by_token: Tensor | None = None
    by_answer: Tensor | None = None
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """A formula that a step minimises, of answers that have log-probabilities."""

    reads_entropy: ClassVar[bool] = False
    reads_step: ClassVar[bool] = False  # its loss depends on its metrics of the whole step

    @property
    def needs_reference(self) -> bool:
        """Whether it reads log-probabilities of a reference."""
        return False

    def beside(self, metrics: dict[str, float]) -> "Objective":
        """Returns the objective of a step with these metrics, if it `reads_step`."""
        return self

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """Returns what a micro-batch of all ranks adds to the denominator of the step's loss."""

    @abstractmethod
    def __call__(self, scored: Scored) -> Terms:
        """Returns the loss before it is divided."""


# answer's number (8), mask (1), five columns, and log-probability, loss, weight and entropy (36)
TOKEN_BYTES = 45


def scoring(objective: Objective | None, has_adapters: bool) -> Scoring:
    """Returns what an objective takes, with the pass of a base that is adapters' reference."""
    if objective is None:
        return Scoring()
    passes = 1 + (objective.needs_reference and has_adapters)  # to score the answers
    return Scoring(1, passes - 1 + passes * objective.reads_step, TOKEN_BYTES)


def differentiate(
    objective: Callable[[Scored], Terms], scored: Scored, denominator: float
) -> tuple[Tensor, Tensor, Terms]:
    """Returns the loss [], minus its derivatives by log-probabilities, and the terms.

    The derivatives are float32 [B, T]. Ranks that share sequences have the losses of all answers
    and of their own tokens. A loss of answers is divided by the number of ranks, so that the sum
    over ranks is the loss; its derivatives are by a rank's own tokens, and whole.
    """
    with torch.enable_grad():
        leaf = scored.log_probs_BT.detach().requires_grad_()
        scored.log_probs_BT = leaf
        terms = objective(scored)
        parts = [
            part.sum() / denominator
            for part in (terms.by_token, terms.by_answer)
            if part is not None
        ]
        (gradient,) = torch.autograd.grad(torch.stack(parts).sum(), leaf)
    ranks = 1 if scored.group is None else dist.get_world_size(scored.group)
    shares = [1.0] * (terms.by_token is not None) + [1 / ranks] * (terms.by_answer is not None)
    value = torch.stack([part.detach() * share for part, share in zip(parts, shares)]).sum()
    return value.float(), -gradient.float(), terms


class Minimised:
    """An objective over one micro-batch, as kernels/head_loss.py takes it; then it has `terms`."""

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        denominator: float,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        reference_BT: Tensor | None = None,
    ):
        assert batch.answers is not None, "an objective has answers"
        self.objective, self.denominator, self.group = objective, denominator, group
        self.answers, self.reads_entropy = batch.answers.to(device), objective.reads_entropy
        self.is_target_BT = (batch.targets != IGNORE_INDEX).to(device, non_blocking=True)
        if reference_BT is None and "reference" in self.answers.columns_BT:
            reference_BT = self.answers.columns_BT["reference"]
        self.reference_BT, self.terms = reference_BT, Terms()

    def __call__(self, log_probs_BT: Tensor, entropy_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        reference_BT = None if self.reference_BT is None else self.reference_BT.double()
        scored = Scored(
            log_probs_BT=log_probs_BT.double(),
            is_target_BT=self.is_target_BT,
            answers=self.answers,
            reference_BT=reference_BT,
            entropy_BT=entropy_BT,
            group=self.group,
        )
        value, weights, terms = differentiate(self.objective, scored, self.denominator)
        # Detached, so that no graph stays.
        means = {name: (a.detach(), b.detach()) for name, (a, b) in terms.means.items()}
        self.terms = Terms(
            means=means, largest={name: x.detach() for name, x in terms.largest.items()}
        )
        return value, weights


def collect(all_terms: list[Terms], world: World) -> dict[str, float]:
    """Returns metrics by name, from all micro-batches of all ranks. Each has the same names."""
    if not all_terms or not all_terms[0].means:
        return {}
    means, largest = all_terms[0].means.keys(), all_terms[0].largest.keys()
    parts = [torch.stack([x for name in means for x in terms.means[name]]) for terms in all_terms]
    numbers = world.sum(*torch.stack(parts).sum(0).tolist())
    metrics = {name: a / b if b else 0.0 for name, a, b in zip(means, numbers[::2], numbers[1::2])}
    if largest:
        parts = [torch.stack([terms.largest[name] for name in largest]) for terms in all_terms]
        tops = torch.stack(parts).amax(0).tolist()
        metrics |= dict(zip(largest, world.sum(*tops, operation=dist.ReduceOp.MAX)))
    return metrics


def mean_of(x: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Returns numerator and denominator of the mean of x where a condition holds, [] float64."""
    return torch.where(where, x.double(), 0).sum(), where.sum().double()
