"""Ulysses: the ranks that share a sequence exchange tokens for heads around attention.

Outside attention each of N ranks has T / N neighbouring tokens of every sequence, with all heads. In attention it has
all T tokens with 1 / N of the query heads, so that kernels, packed documents and causality are those of whole sequences
and all ranks have equal work. q, k and v go one way, attention's output comes back; backward goes the other ways.
Nothing is kept for backward.

Method: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Part i of x [N, ...] goes to rank i, and part i of the result comes from rank i. Its transpose is itself."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx, d_received):
        return _AllToAll.apply(d_received, ctx.group), None


class HeadExchange:
    """Some tokens of all heads <-> all tokens of some heads, for the ranks of one group. Differentiable.

    Of 32 query and 8 key/value heads, rank 1 of 4 attends with query heads 8 to 15 and key/value heads 2 and 3; rank 5
    of 16 with query heads 10 and 11 and key/value head 2, which rank 4 has as well.

    Args:
        group: N ranks, which share each sequence: rank i has the i-th N-th of its tokens. None: a rank by itself, to
            which both directions return what they are given.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.size = group, 1 if group is None else group.size()

    def to_heads(self, x_BTHK: Tensor) -> Tensor:
        """[B, T / N, heads, K] -> [B, T, heads / N, K], any dtype.

        Heads that N does not divide are repeated as often as is needed: 8 heads of 16 ranks twice, 6 heads of 4 ranks
        twice, which gives each rank 3 of (0, 0, 1, 1, 2, 2, ...). The gradients of the copies are summed in
        float32, in a fixed order, and rounded once.
        """
        if self.group is None:
            return x_BTHK
        copies = self.size // math.gcd(self.size, x_BTHK.shape[2])
        x_BTHK = x_BTHK.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
        parts = _AllToAll.apply(x_BTHK.unflatten(2, (self.size, -1)).movedim(2, 0), self.group)
        return parts.movedim(0, 1).flatten(1, 2)  # [N, B, T / N, heads / N, K] -> [B, T, heads / N, K]

    def to_tokens(self, x_BTHK: Tensor) -> Tensor:
        """[B, T, heads / N, K] -> [B, T / N, heads, K]: back from `to_heads`, where that repeated no heads."""
        if self.group is None:
            return x_BTHK
        parts = _AllToAll.apply(x_BTHK.unflatten(1, (self.size, -1)).movedim(1, 0), self.group)
        return parts.movedim(0, 2).flatten(2, 3)  # [N, B, T / N, heads / N, K] -> [B, T / N, heads, K]
