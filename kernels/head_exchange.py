"""Ulysses: the ranks that share a sequence exchange tokens for heads around attention.

Outside attention each of N ranks has T / N neighbouring tokens of every sequence, with all heads. In attention it has
all T tokens with 1 / N of the query heads, so that kernels, packed documents and causality are those of whole sequences
and all ranks have equal work. q, k and v go one way, attention's output comes back; backward goes the other ways.
Nothing is kept for backward. An exchange that is begun early runs beside the kernels that are launched before its end.

Method: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Arrival:
    """What an exchange brings: part i of x [N, ...] goes to rank i, and part i of what arrives comes from rank i."""

    def __init__(self, parts: Tensor, group: dist.ProcessGroup | None, arrange: Callable[[Tensor], Tensor]):
        self.arrange, self.buffers, self.work = arrange, [parts], None
        if group is not None:
            sent = parts.contiguous()
            self.buffers = [torch.empty_like(sent), sent]
            self.work = dist.all_to_all_single(*self.buffers, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The result, once; on CUDA the stream waits, not the host. Nothing else holds its memory from here on."""
        if self.work is not None:
            self.work.wait()
        received, *_ = self.buffers
        del self.buffers, self.work
        return self.arrange(received)


class _Exchange(torch.autograd.Function):
    """Each direction is the other's transpose."""

    @staticmethod
    def forward(ctx, x, begin, begin_back):
        ctx.directions = begin_back, begin
        return begin(x).wait()

    @staticmethod
    def backward(ctx, dy):
        return _Exchange.apply(dy, *ctx.directions), None, None


class HeadExchange:
    """Some tokens of all heads <-> all tokens of some heads, for the ranks of one group.

    Of 32 query and 8 key/value heads, rank 1 of 4 attends with query heads 8 to 15 and key/value heads 2 and 3; rank 5
    of 16 with query heads 10 and 11 and key/value head 2, which rank 4 has as well.

    Args:
        group: N ranks, which share each sequence: rank i has the i-th N-th of its tokens. None: a rank by itself, to
            which both directions return what they are given.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.size = group, 1 if group is None else group.size()

    def begin_to_heads(self, x_BTHK: Tensor) -> Arrival:
        """As `to_heads`, of heads that N divides, without autograd."""
        parts = x_BTHK.unflatten(2, (self.size, -1)).movedim(2, 0)  # [N, B, T / N, heads / N, K]
        return Arrival(parts, self.group, lambda received: received.movedim(0, 1).flatten(1, 2))

    def begin_to_tokens(self, x_BTHK: Tensor) -> Arrival:
        """As `to_tokens`, without autograd."""
        parts = x_BTHK.unflatten(1, (self.size, -1)).movedim(1, 0)  # [N, B, T / N, heads / N, K]
        return Arrival(parts, self.group, lambda received: received.movedim(0, 2).flatten(2, 3))

    def to_heads(self, x_BTHK: Tensor) -> Tensor:
        """[B, T / N, heads, K] -> [B, T, heads / N, K], any dtype. Differentiable.

        Heads that N does not divide are repeated as often as is needed: 8 heads of 16 ranks twice, 6 heads of 4 ranks
        twice, which gives each rank 3 of (0, 0, 1, 1, 2, 2, ...). The gradients of the copies are summed in
        float32, in a fixed order, and rounded once.
        """
        if self.group is None:
            return x_BTHK
        copies = self.size // math.gcd(self.size, x_BTHK.shape[2])
        x_BTHK = x_BTHK.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
        return _Exchange.apply(x_BTHK, self.begin_to_heads, self.begin_to_tokens)

    def to_tokens(self, x_BTHK: Tensor) -> Tensor:
        """[B, T, heads / N, K] -> [B, T / N, heads, K]: back from `to_heads`, where that repeated no heads."""
        if self.group is None:
            return x_BTHK
        return _Exchange.apply(x_BTHK, self.begin_to_tokens, self.begin_to_heads)
