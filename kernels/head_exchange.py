"""Ulysses: the ranks that share a sequence exchange tokens for heads around attention.

Outside attention each of N ranks has T / N neighbouring tokens of every sequence, with all heads. Inside, it has all T
tokens with 1 / N of the query heads: attention sees whole sequences, and all ranks have equal work. q, k and v are
exchanged before attention, its output after it. Backward makes the opposite exchanges, and nothing is kept for it.

Method: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_internals import resolve_process_group


class RanksOnMeta:
    """Stands for a process group of so many ranks where tensors have no data, and nothing is sent."""

    NAME = " ranks on meta"

    def __init__(self, size: int):
        self.size, self.rank, self.group_name = lambda: size, lambda: 0, f"{size}{self.NAME}"


def group_named(name: str | None) -> dist.ProcessGroup | RanksOnMeta | None:
    """Returns the group of a name, as custom operations take it; None for None."""
    if name is None:
        return None
    is_on_meta = name.endswith(RanksOnMeta.NAME)
    return RanksOnMeta(int(name.removesuffix(RanksOnMeta.NAME))) if is_on_meta else resolve_process_group(name)


class _AllToAll(torch.autograd.Function):
    """Sends part i of x [N, ...] to rank i, and receives part i of the result from rank i. It is its own transpose."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        received = torch.empty_like(x)
        if x.is_meta:
            return received
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx, d_received):
        return _AllToAll.apply(d_received, ctx.group), None


class HeadExchange:
    """Exchanges some tokens of all heads for all tokens of some heads, between the ranks of one group. Differentiable.

    Take 32 query and 8 key/value heads. Rank 1 of 4 attends with query heads 8 to 15 and key/value heads 2 and 3. Rank
    5 of 16 attends with query heads 10 and 11 and key/value head 2, and rank 4 has this key/value head as well.

    Args:
        group: N ranks that share each sequence: rank i has the i-th N-th of its tokens. None: a rank by itself, whose
            tensors pass unchanged in both directions.
    """

    def __init__(self, group: dist.ProcessGroup | RanksOnMeta | None):
        self.group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())

    def to_heads(self, x_BTHK: Tensor) -> Tensor:
        """Turns [B, T / N, heads, K] into [B, T, heads / N, K], of any dtype.

        Heads are repeated until N divides them. For 16 ranks, 8 heads are repeated twice. For 4 ranks, 6 heads are
        repeated twice, and each rank gets 3 of (0, 0, 1, 1, 2, 2, ...). The gradients of the copies are summed in
        float32, in a fixed order, and rounded once.
        """
        if self.group is None:
            return x_BTHK
        copies = self.size // math.gcd(self.size, x_BTHK.shape[2])
        x_BTHK = x_BTHK.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
        parts = _AllToAll.apply(x_BTHK.unflatten(2, (self.size, -1)).movedim(2, 0), self.group)
        return parts.movedim(0, 1).flatten(1, 2)  # [N, B, T / N, heads / N, K] -> [B, T, heads / N, K]

    def to_tokens(self, x_BTHK: Tensor) -> Tensor:
        """Turns [B, T, heads / N, K] into [B, T / N, heads, K]: undoes `to_heads`, if that repeated no heads."""
        if self.group is None:
            return x_BTHK
        parts = _AllToAll.apply(x_BTHK.unflatten(1, (self.size, -1)).movedim(1, 0), self.group)
        return parts.movedim(0, 2).flatten(2, 3)  # [N, B, T / N, heads / N, K] -> [B, T / N, heads, K]
