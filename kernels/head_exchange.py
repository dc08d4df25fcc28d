"""Ulysses: the ranks that share a sequence exchange tokens for heads around attention.

Outside attention each of N ranks has T / N neighbouring tokens of every sequence, with all heads.
Inside, it has all T tokens with 1 / N of the query heads: attention sees whole sequences, and all
ranks have equal work. q, k and v are exchanged before attention, its output after it. Backward
makes the opposite exchanges, and nothing is kept for it.

Method: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .common import first_derivative
from .torch_internals import resolve_process_group


class RanksOnMeta:
    """Stands for a process group of so many ranks where tensors have no data: nothing is sent."""

    NAME = " ranks on meta"

    def __init__(self, size: int):
        self.size = lambda: size
        self.rank = lambda: 0
        self.group_name = f"{size}{self.NAME}"


def group_named(name: str | None) -> dist.ProcessGroup | RanksOnMeta | None:
    """Returns the group of a name, as custom operations take it; None for None."""
    if name is None:
        return None
    is_on_meta = name.endswith(RanksOnMeta.NAME)
    if is_on_meta:
        return RanksOnMeta(int(name.removesuffix(RanksOnMeta.NAME)))
    return resolve_process_group(name)


class _Flight:
    """An exchange on its way, of part i of x [N, ...] to rank i; kernels that are queued until
    `wait` run beside it."""

    def start(self, x: Tensor, group: dist.ProcessGroup | RanksOnMeta) -> Tensor:
        """Returns what is received: part i from rank i. Nobody may read it before `wait`."""
        self.sent, self.work = x.contiguous(), None
        received = torch.empty_like(self.sent)
        if not x.is_meta:
            self.work = dist.all_to_all_single(received, self.sent, group=group, async_op=True)
        return received

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        # the work would hold what was received as long as the graph holds this flight
        del (self.sent, self.work)


class _Sent(torch.autograd.Function):
    """Starts an exchange.

    Its backward waits for the exchange that `_Received` starts in backward.
    """

    @staticmethod
    def forward(ctx, x, flight, group):
        ctx.flight = flight
        return flight.start(x, group)

    @staticmethod
    @first_derivative
    def backward(ctx, d_received):
        ctx.flight.wait()
        return d_received, None, None


class _Received(torch.autograd.Function):
    """Waits for an exchange.

    It is its own transpose: backward starts another one, of the gradient.
    """

    @staticmethod
    def forward(ctx, received, flight, group):
        flight.wait()
        ctx.flight, ctx.group = flight, group
        return received.view_as(received)

    @staticmethod
    @first_derivative
    def backward(ctx, d_received):
        return ctx.flight.start(d_received, ctx.group), None, None


class _Parts:
    """Parts on their way: part i goes to rank i; this rank's own is left out, and may be made
    beside them."""

    def __init__(self, group: dist.ProcessGroup | RanksOnMeta):
        self.group, self.rank = group, group.rank()

    def start(self, sent: Sequence[Tensor | None], received: Sequence[Tensor]) -> None:
        """Sends parts, and receives as many, of other ranks.

        Nobody may read these before `wait`.
        """
        self.sent, self.works = sent, []
        if received[0].is_meta:
            return
        operations = []
        for i in range(self.group.size()):
            if i != self.rank:
                for way, part in ((dist.isend, sent[i]), (dist.irecv, received[i])):
                    operations.append(dist.P2POp(way, part, group=self.group, group_peer=i))
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        del self.sent, self.works


class _PartsSent(torch.autograd.Function):
    """Starts to send parts, and returns [N, ...] with room for this rank's own.

    Its backward waits, as `_Sent`'s.
    """

    @staticmethod
    def forward(ctx, parts, *tensors):
        ctx.parts = parts
        part = next(tensor for tensor in tensors if tensor is not None)
        received = part.new_empty(len(tensors), *part.shape)
        parts.start(tensors, received.unbind())
        return received

    @staticmethod
    @first_derivative
    def backward(ctx, d_received):
        ctx.parts.wait()
        gradients = [None if i == ctx.parts.rank else d for i, d in enumerate(ctx.parts.gradients)]
        del ctx.parts.gradients
        return None, *gradients


class _PartsReceived(torch.autograd.Function):
    """Waits for parts, and adds this rank's own.

    Backward sends the gradients of the others back.
    """

    @staticmethod
    def forward(ctx, received, local_part, parts):
        parts.wait()
        ctx.parts = parts
        received[parts.rank].copy_(local_part)
        return received.view_as(received)

    @staticmethod
    @first_derivative
    def backward(ctx, d_received):
        sent = d_received.contiguous().unbind()
        rank = ctx.parts.rank
        ctx.parts.gradients = [d if i == rank else torch.empty_like(d) for i, d in enumerate(sent)]
        ctx.parts.start(sent, ctx.parts.gradients)
        return d_received, sent[rank], None  # `_PartsSent` takes the gradients that come


class HeadExchange:
    """Exchanges some tokens of all heads for all tokens of some heads, between the ranks of one
    group. Differentiable.

    Take 32 query and 8 key/value heads. Rank 1 of 4 attends with query heads 8 to 15 and key/value
    heads 2 and 3. Rank 5 of 16 attends with query heads 10 and 11 and key/value head 2, and rank 4
    has this key/value head as well.

    Rank i of a `group` of N has the i-th N-th of a sequence's tokens. None: tensors pass unchanged
    in both directions.
    """

    def __init__(self, group: dist.ProcessGroup | RanksOnMeta | None):
        self.group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())

    def _send(self, x: Tensor) -> Callable[[], Tensor]:
        """Sends part i of x [N, ...] to rank i; returns a function that waits for what arrives."""
        flight = _Flight()
        received = _Sent.apply(x, flight, self.group)
        return lambda: _Received.apply(received, flight, self.group)

    def to_heads(self, x_BTHK: Tensor) -> Tensor:
        """Turns [B, T / N, heads, K] into [B, T, heads / N, K], of any dtype."""
        return self.start_to_heads(x_BTHK)()

    def start_to_heads(self, x_BTHK: Tensor) -> Callable[[], Tensor]:
        """Starts `to_heads`, and returns a function that waits for its result, beside kernels that
        are queued before.

        Heads are repeated until N divides them. For 16 ranks, 8 heads are repeated twice. For 4
        ranks, 6 heads are repeated twice, and each rank gets 3 of (0, 0, 1, 1, 2, 2, ...). The
        gradients of the copies are summed in float32, in a fixed order, and rounded once.
        """
        if self.group is None:
            return lambda: x_BTHK
        copies = self.size // math.gcd(self.size, x_BTHK.shape[2])
        x_BTHK = x_BTHK.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
        receive = self._send(x_BTHK.unflatten(2, (self.size, -1)).movedim(2, 0))
        # [N, B, T / N, heads / N, K] -> [B, T, heads / N, K].
        return lambda: receive().movedim(0, 1).flatten(1, 2)

    def start_parts_to_heads(self, parts: Sequence[Tensor | None]) -> Callable[[Tensor], Tensor]:
        """Starts to send part i [B, T / N, C] to rank i; this rank's own is None.

        Returns a function that takes the own part, which may be made beside the exchange. It waits,
        and returns the parts of all ranks' tokens, [B, T, C]. Kernels that are queued between run
        beside it, as in `start_to_heads`.
        """
        assert self.group is not None, "one rank has no other to send to"
        flight = _Parts(self.group)
        received = _PartsSent.apply(flight, *parts)
        return lambda local_part: (
            _PartsReceived.apply(received, local_part, flight).movedim(0, 1).flatten(1, 2)
        )

    def to_tokens(self, x_BTHK: Tensor) -> Tensor:
        """Turns [B, T, heads / N, K] into [B, T / N, heads, K]: undoes `to_heads`, if that repeated
        no heads."""
        return self.start_to_tokens(x_BTHK)()

    def start_to_tokens(self, x_BTHK: Tensor) -> Callable[[], Tensor]:
        """Starts `to_tokens`; returns a function that waits for its result, as `start_to_heads`."""
        if self.group is None:
            return lambda: x_BTHK
        receive = self._send(x_BTHK.unflatten(1, (self.size, -1)).movedim(1, 0))
        # [N, B, T / N, heads / N, K] -> [B, T / N, heads, K].
        return lambda: receive().movedim(0, 2).flatten(2, 3)
