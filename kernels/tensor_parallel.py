"""Tensor parallelism: N ranks share each matrix; they have the same tokens, and between blocks the same hidden states.

Each of N ranks has whole heads: an N-th of the rows of the q, k and v projections, and those columns of the output
projection that take its heads. In the same way it has rows of the MLP's gate and up and columns of down. What comes out
is then a part of a sum:

    y = sum over ranks r of  down[:, r] (act(gate[r] x) * (up[r] x))

An all-reduce behind the last product makes the sum in forward (`leave`). Backward has another before the first product,
for the gradient of x, to which each rank's heads add theirs (`enter`). Of the embedding and of the head each rank has
the rows of an N-th of the vocabulary. Nothing is kept for backward: a block that is rebuilt there sums what its heads
make again, and what its MLP makes only where no operation is skipped in backward (`apply_execution`).

Method: Shoeybi et al., Megatron-LM, arXiv 1909.08053.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .common import operation
from .torch_internals import resolve_process_group


def local(weight: Tensor) -> Tensor:
    """What this rank has of a weight, which FSDP2 gathers as a DTensor where tensor-parallel ranks share it."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _sum_over_ranks(x: Tensor, group_name: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=resolve_process_group(group_name))
    return total


_sum = operation("fathom::sum_over_ranks")(_sum_over_ranks)
_skippable_sum = operation("fathom::skippable_sum_over_ranks", skippable=True)(_sum_over_ranks)
for _operation in (_sum, _skippable_sum):
    _operation.register_fake(lambda x, group_name: x.new_empty(x.shape))
    _operation.register_autograd(lambda ctx, dy: (dy, None))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group_name):
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return _sum(dx, ctx.group_name), None


class TensorRanks:
    """The ranks that share each matrix.

    Args:
        group: N ranks, of which rank i has the i-th N-th of each matrix. None: a rank by itself, with whole matrices,
            to which `enter`, `leave` and `gather` return what they are given.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """x, which all ranks have, for what each computes of it with its part of a matrix: gradients add up."""
        return x if self.group is None else _Enter.apply(x, self.group.group_name)

    def leave(self, x: Tensor, skippable: bool = False) -> Tensor:
        """The sum of what the ranks have computed, in x's dtype; see `kernels.common.operation` for `skippable`."""
        if self.group is None:
            return x
        return (_skippable_sum if skippable else _sum)(x, self.group.group_name)

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of the embedding, [..., D]; `weight` [V / N, D] has those of the rank's words, ids are below V."""
        if self.group is None:
            return F.embedding(ids, weight)
        # Another rank's word takes the row of one of this rank's, then zeros: of 2 ranks and 256 words, 130 that of 2.
        is_elsewhere = ids // len(weight) != self.group.rank()
        return self.leave(F.embedding(ids % len(weight), weight).masked_fill(is_elsewhere.unsqueeze(-1), 0))

    def gather(self, logits: Tensor) -> Tensor:
        """[..., V / N] of each rank -> [..., V], without a gradient."""
        if self.group is None:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.group.size())]
        dist.all_gather(parts, logits.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
