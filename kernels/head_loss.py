"""Losses of the head: of next tokens, of an objective of log-probabilities, of a teacher's words.

A model gives its loss the head's input and the head. The loss decides whether the [tokens, V]
logits exist as a whole: above 10 GB they never do, see `uses_chunked_loss`.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention.documents import Documents
from .cross_entropy import Details, cross_entropy
from .linear import PLAIN, Linear
from .linear_cross_entropy import WORDS_MULTIPLE, linear_cross_entropy
from .tensor_parallel import TensorRanks
from .top_k_divergence import top_k_divergence
from .torch_internals import assert_async

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100  # the target of a position that is not trained
# Above this size the projected logits are never materialised (GB = 2**30 bytes).
CHUNKED_LOSS_THRESHOLD_BYTES = 10 * 2**30


def projected_logits_bytes(vocab_size: int, num_tokens: int, bytes_per_logit: int = 2) -> int:
    """Returns the size of the [num_tokens, V] logits that the standard loss materialises."""
    return num_tokens * vocab_size * bytes_per_logit


def uses_chunked_loss(
    vocab_size: int, num_tokens: int, bytes_per_logit: int = 2, loss_impl: str = "auto"
) -> bool:
    """Returns whether a loss makes its logits chunk by chunk: where they would exceed
    `CHUNKED_LOSS_THRESHOLD_BYTES`, unless `loss_impl` is "chunked" or "standard".

    A vocabulary that 8 does not divide is chunked too: products with whole logits take twice as
    long.
    """
    if loss_impl != "auto":
        return loss_impl == "chunked"
    size = projected_logits_bytes(vocab_size, num_tokens, bytes_per_logit)
    return vocab_size % WORDS_MULTIPLE != 0 or size > CHUNKED_LOSS_THRESHOLD_BYTES


@functools.lru_cache(maxsize=64)
def log_loss_choice(
    is_chunked: bool, vocab_size: int, num_tokens: int, bytes_per_logit: int, loss_impl: str
) -> None:
    """Logs once for each size which loss runs, and why."""
    if loss_impl != "auto":
        reason = "forced by loss_impl"
    elif vocab_size % WORDS_MULTIPLE != 0:
        reason = f"{vocab_size:,} words are no multiple of {WORDS_MULTIPLE}"
    else:
        reason = "the threshold is 10 GB"
    logger.info(
        "loss: %s (%d tokens would project to %.2f GB of logits; %s)",
        "chunked" if is_chunked else "standard",
        num_tokens,
        projected_logits_bytes(vocab_size, num_tokens, bytes_per_logit) / 2**30,
        reason,
    )


@dataclass
class OutputHead:
    """The output projection, in one forward pass."""

    weight: Tensor  # [V, D]; [V / N, D] of each of N ranks that share it
    linear: Linear = PLAIN
    tensor_ranks: TensorRanks = TensorRanks(None)  # ranks that share the matrix
    impl: str = "auto"  # see kernels.common.IMPLEMENTATIONS
    loss_impl: str = "auto"  # "chunked" or "standard" force one
    is_whole: bool = True  # whether rows are whole sequences, not a rank's part of longer ones
    logits_BTV: Tensor | None = None  # where the caller reads them; None: the loss makes its own

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Returns the logits [B, T, V], or this rank's [B, T, V / N]."""
        return self.linear(self.tensor_ranks.enter(hidden_BTD), self.weight)


@dataclass
class LossOutput:
    loss: Tensor  # float32 []
    log_probs_BT: Tensor  # float32, of the targets; 0 without a target; has no gradient


class HeadLoss(Protocol):
    """A loss, given to `model.Transformer.forward` beside the tokens."""

    balances_experts: ClassVar[bool]  # whether the auxiliary loss of experts is added to it

    def step_fraction(self) -> Tensor | float:
        """Returns the fraction of a step's targets that this loss covers."""

    def __call__(self, hidden_BTD: Tensor, head: OutputHead) -> LossOutput:
        """Returns the loss and the targets' log-probabilities of the head's input.

        Raises:
            RuntimeError: a target at the last position of a whole sequence.
            ValueError: targets or weights that are not [B, T].
        """


@dataclass
class NextToken:
    """The cross-entropy of each position's target.

    Args:
        targets: int64 [B, T]. Position t is trained to predict targets[:, t]; -100 is ignored, and
            must stand at the last position of a whole sequence.
        weights: float32 [B, T], multiply the targets' losses; None: 1.
        denominator: divides the sum of losses: valid targets of all micro-batches and ranks. None:
            valid targets of this call.
        num_targets: number of targets that are not -100. A caller that knows it spares the host a
            wait for the GPU.
    """

    targets: Tensor
    weights: Tensor | None = None
    denominator: Tensor | float | None = None
    num_targets: int | None = None
    balances_experts: ClassVar[bool] = True

    def __post_init__(self):
        if self.weights is not None:
            check_shape("weights", self.weights, self.targets.shape)

    @classmethod
    def from_labels(cls, labels: Tensor, documents: Documents | None = None, **options) -> Self:
        """Returns the loss of labels [B, T], unshifted as transformers has them.

        Position t is trained to predict labels[:, t + 1], unless that token begins one of
        `documents`.
        """
        if documents is not None:
            # A token of the same document, or of its prompt, stands before.
            follows = F.pad(documents.positions_BT.diff(dim=1) == 1, (1, 0))
            labels = labels.masked_fill(~follows.to(labels.device), IGNORE_INDEX)
        return cls(F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX), **options)

    def step_fraction(self) -> Tensor | float:
        if self.denominator is None:
            return 1.0
        return self.targets.ne(IGNORE_INDEX).sum() / self.denominator

    def weights_of(self, targets: Tensor) -> Tensor | None:
        """Returns the weights of `trained_targets`."""
        return None if self.weights is None else self.weights[:, : targets.shape[1]]

    def __call__(self, hidden_BTD: Tensor, head: OutputHead) -> LossOutput:
        targets = trained_targets(self.targets, hidden_BTD, head)
        token_losses = cross_entropy_of(targets, self.num_targets, hidden_BTD, head)
        weights = self.weights_of(targets)
        details = token_losses(denominator=self.denominator, weights=weights)
        return LossOutput(details.loss, padded(-details.per_token_loss, hidden_BTD))


@dataclass(kw_only=True)
class TopK(NextToken):
    """The divergence from a teacher's likeliest words, see kernels/top_k_divergence.py.

    Args:
        teacher: the words' ids, int64, and log-probabilities, float32, [B, T, k] both.
    """

    teacher: tuple[Tensor, Tensor]

    def __call__(self, hidden_BTD: Tensor, head: OutputHead) -> LossOutput:
        targets = trained_targets(self.targets, hidden_BTD, head)
        length = targets.shape[1]  # T, or T - 1 if the last position has no target
        ids, log_probs = (x[:, :length] for x in self.teacher)
        details = top_k_divergence(
            hidden_BTD[:, :length], head.weight, targets, ids, log_probs,
            weights=self.weights_of(targets), denominator=self.denominator,
            num_valid_tokens=self.num_targets, linear=head.linear, impl=head.impl,
        )  # fmt: skip
        return LossOutput(details.loss, padded(-details.per_token_loss, hidden_BTD))


class Objective(Protocol):
    """A formula of log-probabilities, see `Scored`."""

    reads_entropy: bool

    def __call__(self, log_probs_BT: Tensor, entropy_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the loss [] and minus its derivative by each log-probability, float32 [B, T].

        Where there is no target, the log-probability is 0, and the derivative is not read.
        """


@dataclass
class Scored:
    """An objective of the targets' log-probabilities.

    Without logits the head runs twice, and the blocks once: the first run scores the targets, the
    second weights their losses by the objective's derivatives.

    Args:
        objective: the formula.
        targets, num_targets: as in `NextToken`.
    """

    objective: Objective
    targets: Tensor
    num_targets: int | None = None
    balances_experts: ClassVar[bool] = False

    def step_fraction(self) -> float:
        return 1.0

    def __call__(self, hidden_BTD: Tensor, head: OutputHead) -> LossOutput:
        targets = trained_targets(self.targets, hidden_BTD, head)
        token_losses = cross_entropy_of(targets, self.num_targets, hidden_BTD, head)
        with torch.no_grad():
            details = token_losses(return_entropy=self.objective.reads_entropy)
        log_probs_BT = padded(-details.per_token_loss, hidden_BTD)
        entropy_BT = None
        if details.entropy is not None:
            entropy_BT = padded(details.entropy, hidden_BTD)
        value, weights_BT = self.objective(log_probs_BT, entropy_BT)
        if torch.is_grad_enabled():
            weights_BT = weights_BT[:, : targets.shape[1]]
            surrogate = token_losses(reduction="sum", weights=weights_BT).loss
            value = _Valued.apply(surrogate, value)
        return LossOutput(value, log_probs_BT)


class _Valued(torch.autograd.Function):
    """Returns `value` with the gradient of `surrogate`, another sum with the same derivatives."""

    @staticmethod
    def forward(ctx, surrogate, value):
        return value.clone()

    @staticmethod
    def backward(ctx, d_loss):
        return d_loss, None


def check_shape(name: str, tensor: Tensor, expected: torch.Size) -> None:
    """Raises ValueError unless a tensor has the shape of the token ids."""
    if tensor.shape != expected:
        got = tuple(tensor.shape)
        raise ValueError(f"{name} must have input_ids' shape {tuple(expected)}, got {got}")


def trained_targets(targets: Tensor, hidden_BTD: Tensor, head: OutputHead) -> Tensor:
    """Returns the targets of the positions that a loss computes, [B, T] or [B, T - 1].

    The last position of a whole sequence has no target and is left out, unless its logits exist.
    Were it kept, the chunked loss would have to gather the rows that have a target.

    Raises: as `HeadLoss`.
    """
    check_shape("targets", targets, hidden_BTD.shape[:2])
    if not head.is_whole:
        return targets
    has_none = (targets[:, -1] == IGNORE_INDEX).all()
    assert_async(has_none, "targets must be -100 at the last position of a whole sequence")
    return targets[:, :-1] if head.logits_BTV is None else targets


def padded(x: Tensor, hidden_BTD: Tensor) -> Tensor:
    """Returns x [B, T or T - 1] as [B, T], with zeros at the positions that the loss left out."""
    return F.pad(x, (0, hidden_BTD.shape[1] - x.shape[1]))


def cross_entropy_of(
    targets: Tensor, num_targets: int | None, hidden_BTD: Tensor, head: OutputHead
) -> Callable[..., Details]:
    """Returns the cross-entropy of `trained_targets`, a function of reduction, weights, denominator
    and return_entropy.

    It reads the head's logits where they exist. Without them, `uses_chunked_loss` chooses.
    """
    size = hidden_BTD.shape[:2].numel(), hidden_BTD.element_size(), head.loss_impl
    is_chunked = head.logits_BTV is None and uses_chunked_loss(len(head.weight), *size)
    log_loss_choice(is_chunked, len(head.weight), *size)
    options: dict = {
        "ignore_index": IGNORE_INDEX,
        "process_group": head.tensor_ranks.group,
        "impl": head.impl,
        "return_details": True,
    }
    hidden_BTD = hidden_BTD[:, : targets.shape[1]]
    if is_chunked:
        options |= {"num_valid_tokens": num_targets, "linear": head.linear}
        return functools.partial(linear_cross_entropy, hidden_BTD, head.weight, targets, **options)
    if head.logits_BTV is None:
        logits = head.logits(hidden_BTD)  # read nowhere else: their gradient may overwrite them
        return functools.partial(cross_entropy, logits, targets, inplace=True, **options)
    return functools.partial(cross_entropy, head.logits_BTV, targets, **options)
