"""The loss of single answers that are desirable or not, KTO: arXiv 2402.01306.

With x the sum of log p - R over an answer's tokens, R being the reference's, and z the mean of x
over answers that belong to other prompts, at least 0 and without gradient:

    desirable      desirable_weight (1 - sigmoid(beta (x - z)))
    undesirable    undesirable_weight (1 - sigmoid(beta (z - x)))

z estimates the KL divergence to the reference. Each document has, as `rows.Labelled` makes it, an
answer to its prompt and one to the prompt before. z is a mean over the whole step, so that a
forward pass over all micro-batches comes first. TRL takes the mean over a micro-batch of all ranks.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from training.data.loader import Batch
from training.objectives.scored import Objective, Scored, Terms, mean_of

OWN, OTHER = 0, 1  # values of the column "answer": the row's, and one to another prompt


@dataclass(frozen=True)
class KTO(Objective):
    """A loss of answers with labels."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0  # z

    reads_step: ClassVar[bool] = True

    @property
    def needs_reference(self) -> bool:
        return True

    def beside(self, metrics: dict[str, float]) -> "KTO":
        return replace(self, kl=max(0.0, metrics["kl"]))

    def count(self, batch: Batch) -> float:
        """Returns the number of rows."""
        assert batch.answers is not None
        return float((batch.answers.values["answer"] == OWN).sum())

    def __call__(self, scored: Scored) -> Terms:
        assert scored.reference_BT is not None, "the recipe has looked for a reference"
        # [A]
        x = scored.sum(
            scored.log_probs_BT - torch.where(scored.is_target_BT, scored.reference_BT, 0)
        )
        values = scored.answers.values
        is_own, is_desirable = values["answer"] == OWN, values["label"] > 0
        weight = torch.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        gain = self.beta * torch.where(is_desirable, x - self.kl, self.kl - x)
        reward = self.beta * x.detach()
        means = {
            "kl": mean_of(x.detach(), values["answer"] == OTHER),
            "reward_chosen": mean_of(reward, is_own & is_desirable),
            "reward_rejected": mean_of(reward, is_own & ~is_desirable),
        }
        return Terms(by_answer=torch.where(is_own, weight * gain.neg().sigmoid(), 0), means=means)
