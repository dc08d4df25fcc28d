"""Tensor parallelism: N ranks share each matrix. They have the same tokens, and between blocks the
same hidden states.

Each rank has whole heads: an N-th of the rows of the q, k and v projections, and the columns of the
output projection that take its heads. It also has rows of the MLP's gate and up projections, and
columns of down. Its output is one term of a sum:

    y = sum over ranks r of  down[:, r] (act(gate[r] x) * (up[r] x))

An all-reduce after the last product makes the sum in forward (`leave`), and another the gradient of
x in backward (`enter`). Each rank has the rows of the embedding and of the head for an N-th of the
vocabulary.

Nothing is kept for backward. A block that is built again in backward sums its attention output
again. It sums its MLP output again only where no operation is skipped in backward
(`apply_execution`).

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
    """Returns this rank's share of a weight. FSDP2 gathers a weight that tensor-parallel ranks
    share as a DTensor."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _sum_over_ranks(x: Tensor, group_name: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=resolve_process_group(group_name))
    return total


def _like_input(x, group_name):
    return x.new_empty(x.shape)


_sum = operation("fathom::sum_over_ranks", _like_input)(_sum_over_ranks)
_skippable_sum = operation("fathom::skippable_sum_over_ranks", _like_input, skippable=True)(
    _sum_over_ranks
)
for _operation in (_sum, _skippable_sum):
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
    """Ranks that share each matrix.

    Args:
        group: N ranks; rank i has the i-th N-th of each matrix. None: a rank by itself with whole
            matrices, whose tensors pass `enter`, `leave` and `gather` unchanged.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """Returns x for products with each rank's share of a matrix.

        Backward sums x's gradient over ranks.
        """
        return x if self.group is None else _Enter.apply(x, self.group.group_name)

    def leave(self, x: Tensor, skippable: bool = False) -> Tensor:
        """Returns the sum of x over ranks, in its dtype.

        `skippable` is as in `kernels.common.operation`.
        """
        if self.group is None:
            return x
        return (_skippable_sum if skippable else _sum)(x, self.group.group_name)

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Returns rows of the embedding, [..., D], for ids in [0, V).

        `weight` [V / N, D] is this rank's share.
        """
        if self.group is None:
            return F.embedding(ids, weight)
        # Words of other ranks read a row of this rank's, then become 0: of 256 words on 2 ranks,
        # 130 reads row 2.
        is_elsewhere = ids // len(weight) != self.group.rank()
        return self.leave(
            F.embedding(ids % len(weight), weight).masked_fill(is_elsewhere.unsqueeze(-1), 0)
        )

    def gather(self, logits: Tensor) -> Tensor:
        """Joins [..., V / N] of each rank to [..., V], without a gradient."""
        if self.group is None:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.group.size())]
        dist.all_gather(parts, logits.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
