"""Losses of pairs: an answer that was chosen, and one that was rejected. Each pair is one document
of the data.

With c and r the sums of log-probabilities of both answers, beside a reference's C and R, and means
over their tokens written c', r':

    DPO     -log sigmoid(beta ((c - C) - (r - R)))               arXiv 2305.18290
    IPO     ((c' - C') - (r' - R') - 1 / (2 beta))^2             arXiv 2310.12036
    SimPO   -log sigmoid(beta (c' - r') - margin)                arXiv 2405.14734
    ORPO    -c' - beta log sigmoid(log odds(c') - log odds(r'))  arXiv 2403.07691

Label smoothing is as in cDPO. IPO is of means, as in TRL. odds(x) = e^x / (1 - e^x).

To DPO, IPO and SimPO `nll_weight` times -c' may be added. The mean over the pairs of a step is its
loss. TRL's ORPO has the mean log-probability of prompts and answers, over all tokens of a
micro-batch, in place of c'.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.loader import Batch
from training.objectives.scored import Objective, Scored, Terms, mean_of

CHOSEN, REJECTED = 0, 1  # values of the column "answer"


@dataclass(frozen=True)
class Preference(Objective):
    """A loss of pairs."""

    name: str
    beta: float
    label_smoothing: float = 0.0  # share of pairs whose answers are taken to be in the wrong order
    nll_weight: float = 0.0
    margin: float = 0.0

    @property
    def needs_reference(self) -> bool:
        return self.name in ("dpo", "ipo")

    def count(self, batch: Batch) -> float:
        """Returns the number of pairs."""
        assert batch.answers is not None
        return float((batch.answers.values["answer"] == CHOSEN).sum())

    def __call__(self, scored: Scored) -> Terms:
        lengths = scored.lengths
        log_probs = scored.sum(scored.log_probs_BT)  # [A]
        x = log_probs
        if self.needs_reference:
            assert scored.reference_BT is not None, "the recipe has looked for a reference"
            x = scored.sum(
                scored.log_probs_BT - torch.where(scored.is_target_BT, scored.reference_BT, 0)
            )
        x = x if self.name == "dpo" else x / lengths
        # The rejected answer follows the chosen one. Elsewhere the numbers mean nothing and are
        # left out.
        is_pair, rejected = scored.answers.values["answer"] == CHOSEN, x.roll(-1)
        losses = self._losses(x, rejected)
        nll_weight = 1.0 if self.name == "orpo" else self.nll_weight
        if nll_weight:
            losses = losses - nll_weight * log_probs / lengths
        rewards = self.beta * x.detach(), self.beta * rejected.detach()
        means = {
            "accuracy": mean_of(rewards[0] > rewards[1], is_pair),
            "margin": mean_of(rewards[0] - rewards[1], is_pair),
            "reward_chosen": mean_of(rewards[0], is_pair),
            "reward_rejected": mean_of(rewards[1], is_pair),
        }
        return Terms(by_answer=torch.where(is_pair, losses, 0), means=means)

    def _losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        difference = chosen - rejected
        if self.name == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        if self.name == "orpo":
            return -self.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
        logits = self.beta * difference - self.margin
        smoothing = self.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def _log_odds(log_p: Tensor) -> Tensor:
    """Returns log(p / (1 - p)). A p of 1, as of padding, counts as a little less."""
    log_p = log_p.clamp(max=-1e-12)
    return log_p - torch.log(-torch.expm1(log_p))
