"""Load of each expert in a forward, and the auxiliary loss, which is least for even loads.

Let c_e be the number of rows that go to expert e, and p_e the sum of its probabilities, over the R
rows of all layers. A row is a token of text: padding counts nowhere.

    loss = coefficient E sum over e of (c_e / R) (p_e / R)

Its derivative by a row's probability of e is coefficient E c_e / R^2. The c_e of later layers are
known after forward alone: forward adds the loss's value, and backward of each layer's logits adds
its derivative. A layer whose activations are computed again needs nothing beside them.

The loss is of one micro-batch, as transformers computes it. Another split into micro-batches has
another loss.

Method: Fedus et al., Switch Transformers, arXiv 2101.03961.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..common import first_derivative
from .route import probabilities_of, tokens_per_expert


class Routing:
    """Notes of a forward's routers.

    Args:
        coefficient: of the loss; 0: there is none.
        is_padding: bool [N] or [B, T], on any device; None: no token is padding.
    """

    def __init__(self, coefficient: float = 0.0, is_padding: Tensor | None = None):
        self.coefficient = coefficient
        self.is_padding = None if is_padding is None else is_padding.flatten()
        self.per_token = 1
        self.counts: dict[int, Tensor] = {}  # by layer: rows that go to each expert, [E]
        self.sums: dict[int, Tensor] = {}  # by layer: sums of probabilities, float32 [E]
        # Derivative by a row's probabilities, [E], once backward has begun.
        self.slope: Tensor | None = None

    def balanced(self, logits: Tensor) -> Tensor:
        """Returns logits [N, E], to which backward adds the derivative of the loss."""
        return _Balanced.apply(logits, self) if self.coefficient else logits

    def note(self, layer: int, logits: Tensor, experts: Tensor) -> None:
        """Notes the choice of a layer. A second forward changes nothing."""
        if layer in self.counts:
            return
        E = logits.shape[1]
        self.per_token = experts.shape[1]
        # Experts 0 to E - 1 are counted.
        self.counts[layer] = tokens_per_expert(self.fill_padding(experts, E), E)
        if self.coefficient:
            self.sums[layer] = self.fill_padding(probabilities_of(logits.detach()), 0).sum(0)

    def fill_padding(self, x: Tensor, value: int) -> Tensor:
        """Returns x [N, ...] with `value` in the rows of padding."""
        if self.is_padding is None:
            return x
        self.is_padding = self.is_padding.to(x.device, non_blocking=True)
        return x.masked_fill(self.is_padding[:, None], value)

    def finish(
        self, loss: Tensor, share: Tensor | float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ends a forward. Returns its loss, with the auxiliary loss added, the load and the
        auxiliary loss, whole, [].

        The load is rows of each expert, float32 [layers, E], of all ranks that share sequences.

        Args:
            share: of this rank's tokens in the loss. A step's shares sum to 1.
            group: ranks that share sequences; None: each rank has its own.
        """
        load = _summed(torch.stack([*self.counts.values()]).float(), group)
        auxiliary = None
        if self.coefficient:
            sums = _summed(torch.stack([*self.sums.values()]).sum(0), group)
            shares = _summed(
                torch.as_tensor(share, dtype=torch.float32, device=loss.device).clone(), group
            )
            rows = (load.sum() / self.per_token).clamp(min=1)
            slope = self.coefficient * load.shape[1] / rows**2 * load.sum(0)
            auxiliary = slope @ sums
            loss = _Added.apply(loss, share * auxiliary, shares * slope, self)
        return loss, load, auxiliary


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


class _Added(torch.autograd.Function):
    """Adds a value to the loss. Backward tells the routing the slope of that value."""

    @staticmethod
    def forward(ctx, loss, value, slope, routing):
        ctx.slope, ctx.routing = slope, routing
        return loss + value

    @staticmethod
    @first_derivative
    def backward(ctx, d_loss):
        ctx.routing.slope = d_loss * ctx.slope
        return d_loss, None, None, None


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, routing):
        ctx.save_for_backward(logits)
        ctx.routing = routing
        return logits.view_as(logits)

    @staticmethod
    @first_derivative
    def backward(ctx, d_logits):
        slope = ctx.routing.slope
        p = ctx.routing.fill_padding(probabilities_of(ctx.saved_tensors[0]), 0)
        return d_logits + (p * (slope - (p @ slope)[:, None])).to(d_logits.dtype), None
