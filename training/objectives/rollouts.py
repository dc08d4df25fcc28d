"""Losses of recorded rollouts: answers that an older policy wrote, with advantages.

With the ratio q = exp(log p - old) of a token, its advantage A, and clip(q) within [1 - clip_low, 1
+ clip_high]:

    grpo                 -min(q A, clip(q) A)                mean over answers of each one's mean
    dapo                 the same                            mean over all tokens
    dr_grpo              the same                            sum / (answers x context_length)
    gspo                 the same of s = exp(mean of log q)  mean over answers
    cispo                -min(q, 1 + clip_high) A log p      mean over all tokens; min is a constant
    importance_sampling  -q A                                mean over all tokens

The first five are of arXiv 2402.03300, 2503.14476, 2503.20783, 2507.18071 and 2506.13585, in this
order.

`beta` times exp(R - log p) - (R - log p) - 1 is added to each token's loss, R being the reference's
log-probability. Where the rollouts have log-probabilities of the engine that wrote them beside the
old policy's, each token's loss of A is multiplied by min(exp(old - written), truncation), see Yao
et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.head_loss import IGNORE_INDEX
from training.data.loader import Batch
from training.objectives.scored import Objective, Scored, Terms, mean_of

BY_ANSWER = ("grpo", "gspo")
# ratios end at e^60 = 1e26, which float32 holds after it was multiplied by an advantage
LARGEST_EXPONENT = 60.0


@dataclass(frozen=True)
class Rollout(Objective):
    """A loss of recorded rollouts."""

    name: str
    beta: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    truncation: float = 1.0
    context_length: int = 1

    reads_entropy: ClassVar[bool] = True

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    def count(self, batch: Batch) -> float:
        """Returns the number of answers, of tokens, or of tokens in answers of full length."""
        assert batch.answers is not None
        if self.name not in (*BY_ANSWER, "dr_grpo"):
            return float((batch.targets != IGNORE_INDEX).sum())
        answers = float((batch.answers.values["answer"] >= 0).sum())  # neither padding nor prompts
        return answers * self.context_length if self.name == "dr_grpo" else answers

    def __call__(self, scored: Scored) -> Terms:
        is_target, advantage = scored.is_target_BT, scored.column("advantage")
        # Differences are 0 where there is no target, so that no exp overflows there.
        moved = torch.where(is_target, scored.log_probs_BT - scored.column("old"), 0)
        lengths = scored.lengths
        share = 1 / lengths[scored.answers.index_BT] if self.name in BY_ANSWER else 1.0
        factor: Tensor | float = 1.0
        if "written" in scored.answers.columns_BT:
            ratio = (scored.column("old") - scored.column("written")).exp()
            factor = ratio.clamp(max=self.truncation)
        terms = Terms()
        if self.name == "gspo":
            means = [scored.sum(x) / lengths for x in (moved, factor * advantage)]
            terms.by_answer, is_clipped = self._clipped(_ratio(means[0]), means[1])
            terms.means["clip_share"] = mean_of(is_clipped, scored.is_answer)
        else:
            losses, is_clipped = self._by_token(moved, advantage, scored.log_probs_BT)
            terms.by_token = losses * factor * share
            terms.means["clip_share"] = mean_of(is_clipped, is_target)
        if self.needs_reference:
            assert scored.reference_BT is not None, "the recipe has looked for a reference"
            ahead = torch.where(is_target, scored.reference_BT - scored.log_probs_BT, 0)
            ahead = ahead.clamp(max=LARGEST_EXPONENT)
            divergence = ahead.expm1() - ahead
            terms.means["kl"] = mean_of(divergence, is_target)
            penalty = self.beta * divergence * share
            terms.by_token = penalty if terms.by_token is None else terms.by_token + penalty
        terms.means["old_difference"] = mean_of(moved.abs(), is_target)
        terms.largest["old_difference_max"] = moved.abs().amax()
        if scored.entropy_BT is not None:
            terms.means["entropy"] = mean_of(scored.entropy_BT, is_target)
        return terms

    def _by_token(
        self, moved: Tensor, advantage: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the losses, and where a ratio was cut."""
        ratio = _ratio(moved)
        if self.name == "importance_sampling":
            return -ratio * advantage, torch.zeros_like(ratio, dtype=torch.bool)
        if self.name == "cispo":
            cap = 1 + self.clip_high
            return -ratio.detach().clamp(max=cap) * advantage * log_probs, ratio > cap
        return self._clipped(ratio, advantage)

    def _clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = -torch.minimum(ratio * advantage, clipped * advantage)
        return losses, clipped * advantage < ratio * advantage


def _ratio(moved: Tensor) -> Tensor:
    """Returns e^moved, constant beyond `LARGEST_EXPONENT`: the old policy could not have written
    such a token."""
    return moved.clamp(max=LARGEST_EXPONENT).exp()
