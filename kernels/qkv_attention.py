"""Attention of a transformer block, from its input to its output projection.

All heads run at once, or some at a time.

Some heads at a time, each step projects the input to n of the G key/value heads and their query
heads, normalises and rotates them, and attends. q, k, v and their gradients then take n / G of
their memory.

All heads at once keep for backward: the input, attention's outputs and log-sum-exps, v, and q and k
after their rotation; if heads are normalised, also q and k before it. Some heads at a time keep no
q, k and v: backward projects them again, step by step. Attention itself costs the same either way,
but the matrix products of a step are smaller.

N ranks may share each sequence (`HeadExchange`). Each step then projects this rank's tokens to n
key/value heads of every rank, and exchanges tokens for heads around attention. With 8 key/value
heads, 2 ranks and n = 1, the first step has heads 0 and 4. A rank keeps attention's outputs for its
own tokens, and log-sum-exps and lists for its own heads.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention.attend import attend_backward, attention, check_gates
from .attention.full import FULL
from .attention.libraries import choose_backend
from .common import operation, rounds, sum_dtype
from .gated_activation import sigmoid_gated
from .head_exchange import HeadExchange, group_named
from .linear import PLAIN, Factor, Linear
from .parts import Adapted, AttentionKind, Parameter, Weight, Work, part_of, tensors_of, weight_of
from .rms_norm import rms_norm
from .rope import rope


class QKVParameters(NamedTuple):
    """Parameters that turn a transformer block's input into q, k and v."""

    weights: list[Weight]  # q's [H K, D], k's [G K, D] and v's [G K, D]
    biases: list[Tensor]  # [H K], [G K] and [G K], or none
    # RMSNorm weights of q and of k: [K] both, for each head; [H K] and [G K], for all; or none.
    norms: list[Tensor]
    eps: float  # added to mean squares under the norms' roots
    head_dim: int
    # The weight of q is [2 H K, D]: for each head, K rows of q, then K rows of a gate.
    has_output_gate: bool = False
    rotary_dim: int | None = None  # elements of a head that are rotated; None: all

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return len(self.weights[0]) // len(self.weights[1]) // (1 + self.has_output_gate)

    def parted(self) -> tuple["QKVParameters", list]:
        """Returns the parameters of q, k and v alone, and the gate's weight and bias, if any."""
        if not self.has_output_gate:
            return self, []
        q, gate = _alternate(self.weights[0], self.head_dim)
        parameters = self._replace(weights=[q, *self.weights[1:]], has_output_gate=False)
        if not self.biases:
            return parameters, [gate]
        q_bias, gate_bias = _alternate(self.biases[0], self.head_dim)
        return parameters._replace(biases=[q_bias, *self.biases[1:]]), [gate, gate_bias]

    def with_one_query_head(self) -> "QKVParameters":
        """Returns these parameters with only the first head in q's weight, bias and norm."""
        count = self.head_dim * (1 + self.has_output_gate)
        weights, biases, norms = (
            [rows[:count] for rows in tensors[:1]] + tensors[1:]
            for tensors in (self.weights, self.biases, self.norms)
        )
        return self._replace(weights=weights, biases=biases, norms=norms)


def _alternate(rows: Weight, K: int) -> list[Weight]:
    """Returns rows 0 to K - 1, 2 K to 3 K - 1, ... of a weight or a bias, and the others."""
    if isinstance(rows, Adapted):
        pairs = zip(*(_alternate(part, K) for part in (rows.matrix, rows.b)))
        return [Adapted(matrix, rows.a, b) for matrix, b in pairs]  # type: ignore[arg-type]
    return [part.flatten(0, 1) for part in rows.unflatten(0, (-1, 2, K)).unbind(1)]


def _normalise(heads: Tensor, weight: Tensor, eps: float, impl: str) -> Tensor:
    """Normalises heads [B, T, H, K] by a weight [K], or all of a token by [H K]; a float32 weight
    before rounding."""
    rows = heads if len(weight) == heads.shape[-1] else heads.flatten(2)
    normed = rms_norm(rows, weight, eps, cast_before_weight=weight.dtype == heads.dtype, impl=impl)
    return normed.view(heads.shape)  # type: ignore[union-attr]


def _normalise_and_rotate(
    q: Tensor, k: Tensor, norms: Sequence[Tensor], eps: float, cos: Tensor | None,
    sin: Tensor | None, impl: str, rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if norms:
        q = _normalise(q, norms[0], eps, impl)
        k = _normalise(k, norms[1], eps, impl)
    return (q, k) if cos is None else rope(q, k, cos, sin, rotary_dim=rotary_dim, impl=impl)


def project_heads(
    x_BTD: Tensor, parameters: QKVParameters, cos: Tensor | None, sin: Tensor | None,
    linear: Linear = PLAIN, impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns q [B, T, H, K], k and v [B, T, G, K], normalised and rotated, and logits of the
    output's gate, if any."""
    weights, biases, norms, eps, K, has_gate, rotary_dim = parameters
    q, k, v = (x.unflatten(-1, (-1, K)) for x in linear.maps(x_BTD, weights, biases))
    q, gate = q.unflatten(2, (-1, 2)).unbind(3) if has_gate else (q, None)
    return *_normalise_and_rotate(q, k, norms, eps, cos, sin, impl, rotary_dim), v, gate


def gated(out_BTHK: Tensor, gate_BTHK: Tensor | None, impl: str = "auto") -> Tensor:
    """Returns attention's output times sigmoid(gate); as it is without a gate."""
    return out_BTHK if gate_BTHK is None else sigmoid_gated(gate_BTHK, out_BTHK, impl=impl)


class _Division(NamedTuple):
    """A division of heads, first among ranks and then each rank's into steps.

    With 8 heads, 2 ranks and 4 steps, step 0 has heads 0 and 4. Dimension `dim` of the tensors
    below counts heads.
    """

    ranks: int
    steps: int

    def _view(self, x: Tensor, step: int, dim: int) -> Tensor:
        return x.unflatten(dim, (self.ranks, self.steps, -1)).select(dim + 1, step)

    def take(self, x, step: int, dim: int = 2):
        """Returns one step's heads of x, contiguous, in the order of the ranks.

        Returns None if x is None.
        """
        return None if x is None else self._view(x, step, dim).flatten(dim, dim + 1).contiguous()

    def put(self, x: Tensor, step: int, heads: Tensor, dim: int = 2) -> None:
        """Writes one step's `heads` into x, where `take` finds them."""
        self._view(x, step, dim).copy_(heads.unflatten(dim, (self.ranks, -1)))


def _divide(
    num_heads: int, n: int, group_name: str | None
) -> tuple[HeadExchange, _Division, _Division]:
    """Returns the exchange, and the divisions of all ranks' heads and of this rank's, each rank n
    of them in a step."""
    exchange = HeadExchange(group_named(group_name))
    steps = num_heads // exchange.size // n
    return exchange, _Division(exchange.size, steps), _Division(1, steps)


def _rows_of_step(parameters: Sequence[Tensor], step: int, division: _Division) -> Tensor | None:
    """Returns a step's rows of the q, k and v projections, [(R + 2) n K, D], or of biases; None
    without parameters."""
    return torch.cat([division.take(rows, step, 0) for rows in parameters]) if parameters else None


def _weight_of_step(tensors: Sequence[Tensor], step: int, division: _Division) -> Weight:
    """Returns one step's rows of the q, k and v projections, whose `tensors` are as `_fused`
    returns them."""
    rows = [_rows_of_step(tensors[start : start + 3], step, division) for start in (0, 4)]
    return weight_of([rows[0]] if len(tensors) == 3 else [rows[0], tensors[3], rows[1]])


class _Gradients:
    """Gradients of the tensors that need them, filled step by step.

    `division` divides their heads along the dimensions `dims`. A tensor without heads has None
    there: its gradient adds up over steps, in float32.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        dims: Sequence[int | None],
        division: _Division,
    ):
        self.dims = dims
        self.division = division
        self.dtypes = [tensor.dtype for tensor in tensors]
        self.gradients: list[Tensor | None] = []
        for tensor, needed, dim in zip(tensors, needs, dims):
            gradient = None
            if needed and dim is None:
                gradient = torch.zeros_like(tensor, dtype=sum_dtype(tensor))
            elif needed:
                gradient = torch.empty_like(tensor)
            self.gradients.append(gradient)

    @property
    def needed(self) -> bool:
        return any(gradient is not None for gradient in self.gradients)

    def add(self, step: int, parts: Sequence[Tensor | None]) -> None:
        """Takes one step's parts of all gradients; None where a tensor has no gradient."""
        for gradient, part, dim in zip(self.gradients, parts, self.dims):
            if gradient is None or part is None:
                continue
            if dim is None:
                gradient += part
            else:
                self.division.put(gradient, step, part, dim)

    def finished(self) -> list[Tensor | None]:
        """Returns the gradients in their tensors' dtypes."""
        return [None if d is None else d.to(dtype) for d, dtype in zip(self.gradients, self.dtypes)]


def _fused(weights: Sequence[Weight]) -> list[Tensor]:
    """Returns the tensors of the q, k and v projections: three matrices and, if some are adapted,
    one A and three B's.

    A [3 r, D] holds the A of each projection. Each B [N, 3 r] is zero in the columns of the other
    projections' A. Steps divide the rows of a B as they divide the rows of a matrix.
    """
    adapted = [weight for weight in weights if isinstance(weight, Adapted)]
    if not adapted:
        return [*weights]
    bs = []
    before = 0
    rank = sum(len(weight.a) for weight in adapted)
    for weight in weights:
        b = weight.b if isinstance(weight, Adapted) else weight.new_empty(len(weight), 0)
        bs.append(F.pad(b, (before, rank - before - b.shape[1])))
        before += b.shape[1]
    return [
        *(tensors_of(weight)[0] for weight in weights),
        torch.cat([weight.a for weight in adapted]),
        *bs,
    ]


def _split_heads(
    qkv: Tensor,
    norms: Sequence[Tensor],
    eps: float,
    n: int,
    cos: Tensor | None,
    sin: Tensor | None,
    K: int,
    impl: str,
) -> list[Tensor]:
    """Splits [B, T, (R + 2) n K] into q [B, T, R n, K], k and v [B, T, n, K]; normalises and
    rotates q and k."""
    heads = qkv.unflatten(-1, (-1, K)).split([qkv.shape[-1] // K - 2 * n, n, n], dim=2)
    q, k = _normalise_and_rotate(heads[0], heads[1], norms, eps, cos, sin, impl)
    return [q, k, heads[2].contiguous()]


def _parts_of_step(parts: Sequence[Tensor | None], lengths: list[int]) -> list[Tensor | None]:
    """Returns a step's weight (matrix, A and B) for each of the tensors that `_fused` returns."""
    by_rows = [[None] * 3 if part is None else [*part.split(lengths)] for part in parts[::2]]
    return [*by_rows[0], *parts[1:2], *(by_rows[1] if len(parts) > 1 else ())]


def _fake_results(x, weights, biases, norms, eps, head_dim, *options):
    _, _, _, lists, kind, *_, n, group_name = options
    exchange, _, _ = _divide(len(weights[1]) // head_dim, n, group_name)
    return _empty_results(x, weights, head_dim, lists, part_of(kind), exchange.size)


@operation(
    "fathom::qkv_attention", _fake_results, keepable="results", chooses="lists", composed=True
)
def _qkv_attention(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], norms: list[Tensor], eps: float,
    head_dim: int, cos: Tensor | None, sin: Tensor | None, segments: Tensor | None,
    lists: Tensor | None, kind: int, linear: int, backend: str, on_triton: bool, impl: str, n: int,
    group_name: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns outputs [branches, B, T, H, K], log-sum-exps [branches, B, T, H] and lists [B, T, G,
    blocks] for x [B, T, D].

    `weights` are as `_fused` returns them. Biases and norms may be empty. If `lists` is None,
    lists are chosen here. In a group of N ranks, x and outputs are of this rank's T tokens and all
    heads; log-sum-exps and lists are of all T N tokens and this rank's heads.
    """
    exchange, all_heads, rank_heads = _divide(len(weights[1]) // head_dim, n, group_name)
    results = _empty_results(x, weights, head_dim, lists, part_of(kind), exchange.size)
    for step in rounds(rank_heads.steps, x):
        qkv = _project_step(x, weights, biases, part_of(linear), step, all_heads)
        heads = _split_heads(qkv, norms, eps, n * exchange.size, cos, sin, head_dim, impl)
        del qkv
        q, k, v = (exchange.to_heads(heads.pop(0)) for _ in range(3))
        step_lists = rank_heads.take(lists, step)
        step_results = torch.ops.fathom.attend(
            q, k, v, segments, step_lists, kind, backend, on_triton
        )
        del q, k, v
        _put_results(results, step_results, step, exchange, all_heads, rank_heads)
        del step_results, step_lists  # before the next step's are made
    return results


def _project_step(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], linear: Linear, step: int,
    division: _Division,
) -> Tensor:  # fmt: skip
    """Projects x [B, T, D] to one step's heads of q, k and v, [B, T, (R + 2) n K]."""
    weight = linear.factor(_weight_of_step(weights, step, division))
    bias = _rows_of_step(biases, step, division)
    return linear.forward(linear.factor(x.flatten(0, 1)), weight, bias).unflatten(0, x.shape[:2])


def _put_results(
    results: tuple[Tensor, Tensor, Tensor], step_results: Sequence[Tensor], step: int,
    exchange: HeadExchange, all_heads: _Division, rank_heads: _Division,
) -> None:  # fmt: skip
    """Writes a step's outputs, log-sum-exps and lists into those of all heads."""
    outs, lses, lists = results
    branches = len(outs)
    for branch in range(branches):
        all_heads.put(outs[branch], step, exchange.to_tokens(step_results[branch]))
        rank_heads.put(lses[branch], step, step_results[branches + branch])
    if lists.numel():
        rank_heads.put(lists, step, step_results[-1])


def _empty_results(
    x: Tensor, weights: list[Tensor], K: int, lists: Tensor | None, kind: AttentionKind, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, _ = x.shape
    H, G = len(weights[0]) // K, len(weights[1]) // K
    blocks = kind.list_length if lists is None else 0
    return (
        x.new_empty(kind.branches, B, T, H, K),
        x.new_empty(kind.branches, B, T * ranks, H // ranks, dtype=sum_dtype(x)),
        x.new_empty(B, T * ranks, G // ranks, blocks, dtype=torch.int16),
    )


class _Options(NamedTuple):
    """Arguments of `_QKVAttention` that are not tensors."""

    eps: float
    head_dim: int
    kind: AttentionKind
    linear: Linear
    backend: str
    on_triton: bool
    impl: str
    n: int  # key/value heads of a rank in one step
    group_name: str | None
    # Tensors of the output projection, of q's, k's and v's weights, biases, norms.
    counts: tuple[int, ...]

    def split(self, parameters: Sequence) -> Iterator[list]:
        """Yields the tensors of each of `counts`."""
        elements = iter(parameters)
        return ([next(elements) for _ in range(count)] for count in self.counts)


class _QKVAttention(torch.autograd.Function):
    """Attention of n key/value heads per step.

    The input's gradient is summed over steps in the input's dtype.
    """

    @staticmethod
    def forward(ctx, x, gates, cos, sin, segments, options, *parameters):
        o_tensors, weights, biases, norms = options.split(parameters)
        kind, linear = options.kind, options.linear
        outs, lses, lists = torch.ops.fathom.qkv_attention(
            x, weights, biases, norms, options.eps, options.head_dim, cos, sin, segments, None,
            kind.number, linear.number, options.backend, options.on_triton, options.impl, options.n,
            options.group_name,
        )  # fmt: skip
        ctx.save_for_backward(x, gates, cos, sin, lists, outs, lses, *parameters)
        ctx.segments, ctx.options = segments, options
        return linear(
            kind.output([*outs], gates, options.on_triton).flatten(2), weight_of(o_tensors)
        )

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention some heads at a time has no second derivative (create_graph=True)"
            )
        steps = _Backward(ctx, dy)
        for step in rounds(steps.rank_heads.steps, dy):
            steps.run(step)
        parameters = steps.d_o, steps.d_weights, steps.d_biases, steps.d_norms
        d_parameters = [gradient for part in parameters for gradient in part.finished()]
        return steps.dx_rows.view_as(dy), steps.d_gates, *[None] * 4, *d_parameters


class _Backward:
    """Backward of `_QKVAttention`, step by step.

    Tensors of a step are freed where its methods return.
    """

    def __init__(self, ctx, dy: Tensor):
        x, self.gates, self.cos, self.sin, self.lists, self.outs, self.lses, *parameters = (
            ctx.saved_tensors
        )
        self.segments = ctx.segments
        self.options = ctx.options
        self.batch = x.shape[:2]
        self.x_rows = x.flatten(0, 1)
        self.dy_rows = dy.flatten(0, 1)
        options = ctx.options
        self.linear = ctx.options.linear
        self.kind = ctx.options.kind
        self.o_tensors, self.weights, self.biases, norms = options.split(parameters)
        self.norms = [weight.detach().requires_grad_() for weight in norms]
        self.exchange, self.all_heads, self.rank_heads = _divide(
            len(self.weights[1]) // options.head_dim, options.n, options.group_name
        )
        self.needs_o, needs, needs_biases, _ = options.split(
            ctx.needs_input_grad[-len(parameters) :]
        )
        # Whether matrices, A and B of q, k and v need gradients.
        self.needs_rows = [any(needs[part]) for part in (slice(3), slice(3, 4), slice(4, None))]
        needs = [*self.needs_rows[:1] * 3, *needs[3:]]
        self.dx_rows = torch.zeros_like(self.x_rows)
        self.d_o = _Gradients(self.o_tensors, self.needs_o, (1, 1, None), self.all_heads)
        self.d_weights = _Gradients(self.weights, needs, (0, 0, 0, None, 0, 0, 0), self.all_heads)
        self.d_biases = _Gradients(self.biases, needs_biases, (0, 0, 0), self.all_heads)
        self.d_norms = _Gradients(
            self.norms, [True] * len(norms), [None] * len(norms), self.all_heads
        )
        self.d_gates = None if self.gates is None else torch.empty_like(self.gates)

    def run(self, step: int) -> None:
        """Adds one step's part to all gradients."""
        weight = _weight_of_step(self.weights, step, self.all_heads)
        weight_factor = self.linear.factor(weight)
        qkv, edges, d_heads = self._through_attention(step, weight_factor)
        d_heads = [self.exchange.to_tokens(d_heads.pop(0)) for _ in range(len(d_heads))]
        if self.d_gates is not None:
            self.all_heads.put(self.d_gates, step, d_heads.pop())
        d_qkv, *d_norms = torch.autograd.grad(edges, [qkv, *self.norms], d_heads)
        self._through_projections(step, d_qkv.flatten(0, 1), weight, weight_factor)
        self.d_norms.add(step, d_norms)

    def _through_attention(self, step: int, weight_factor: Factor):
        """Returns q, k and v before norms, the graph's edges after RoPE, and gradients there and of
        gates, if any."""
        options = self.options
        to_heads = self.exchange.to_heads
        outs = [self.all_heads.take(out, step) for out in self.outs]
        gates = self.all_heads.take(self.gates, step)
        d_out = to_heads(self._through_output(step, outs, gates).view(outs[0].shape))
        outs = [to_heads(out) for out in outs]
        gates = None if gates is None else to_heads(gates)
        lses = [self.rank_heads.take(lse, step) for lse in self.lses]
        lists = self.rank_heads.take(self.lists, step)
        bias = _rows_of_step(self.biases, step, self.all_heads)
        qkv = self.linear.forward(self.linear.factor(self.x_rows), weight_factor, bias)
        qkv = qkv.unflatten(0, self.batch).requires_grad_()
        with torch.enable_grad():
            heads = _split_heads(
                qkv, self.norms, options.eps, options.n * self.exchange.size, self.cos, self.sin,
                options.head_dim, options.impl,
            )  # fmt: skip
        edges = [torch.autograd.graph.get_gradient_edge(head) for head in heads]
        q, k, v = (to_heads(heads.pop(0).detach()) for _ in range(3))
        d_heads = attend_backward(
            d_out, q, k, v, gates, outs, lses, lists, self.segments, self.kind, options.backend,
            options.on_triton,
        )  # fmt: skip
        return qkv, edges, [*d_heads]

    def _through_output(self, step: int, outs: list[Tensor], gates: Tensor | None) -> Tensor:
        """Returns the gradient of attention's output, [B T, R n K].

        Adds to the output projection's gradient.
        """
        columns = [self.all_heads.take(tensor, step, 1) for tensor in self.o_tensors[:2]]
        linear = self.linear
        # An adapter has one B for all steps.
        weight = weight_of([*columns, *self.o_tensors[2:]])
        output = self.kind.output(outs, gates, self.options.on_triton).flatten(0, 1).flatten(1)
        dy = linear.factor(self.dy_rows)
        output = linear.factor(output)
        factors_t = linear.transpose(dy), linear.transpose(output)
        self.d_o.add(step, linear.weight_gradients(*factors_t, weight, self.needs_o))
        del output, factors_t  # before the result is made
        return linear.input_gradient(dy, linear.transpose(linear.factor(weight)))

    def _through_projections(
        self, step: int, d_qkv_rows: Tensor, weight: Weight, weight_factor: Factor
    ) -> None:
        """Adds to the gradients of the input, and of the q, k and v projections."""
        linear = self.linear
        d_qkv = self.linear.factor(d_qkv_rows)
        linear.input_gradient(
            d_qkv, linear.transpose(weight_factor), out=self.dx_rows, accumulate=True
        )
        factors_t = linear.transpose(d_qkv), linear.transpose(linear.factor(self.x_rows))
        parts = linear.weight_gradients(*factors_t, weight, self.needs_rows)
        lengths = [len(rows) // self.rank_heads.steps for rows in self.weights[:3]]
        self.d_weights.add(step, _parts_of_step(parts, lengths))
        if self.d_biases.needed:
            self.d_biases.add(step, d_qkv_rows.sum(0).split(lengths))


def qkv_attention(
    x_BTD: Tensor, parameters: QKVParameters, o_weight: Weight, cos: Tensor | None,
    sin: Tensor | None, segments: Tensor | None = None, *, kind: AttentionKind = FULL,
    gates: Tensor | None = None, heads_at_a_time: int | None = None,
    exchange: HeadExchange | None = None, linear: Linear = PLAIN, backend: str = "auto",
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Projects to q, k and v, normalises and rotates q and k, attends causally, and applies the
    output projection.

    Args:
        x_BTD, o_weight: [B, T, D] and [D, H K], of the weights' dtype.
        parameters: for H query heads and G key/value heads; G divides H.
        cos, sin: float32, as `rope` takes them; None: heads are not rotated.
        segments, backend: as in `kernels.attention.attend.attention`.
        kind: what a token attends to.
        gates: logits [B, T, H, gates_per_head], for a kind that has gates.
        heads_at_a_time: key/value heads per step, a divisor of G / N for N ranks that share each
            sequence. None: all at once, and backward projects nothing again.
        exchange: the exchange between ranks that share each sequence. x_BTD, cos, sin and gates are
            then of this rank's tokens, segments of whole sequences. None: nothing is shared.
        linear: the linear map of all projections.

    Raises:
        ValueError: heads_at_a_time does not divide a rank's key/value heads, or the ranks do not
            divide all of them; an exchange would separate query heads that choose blocks together;
            heads_at_a_time with norms of all heads; inputs that `kind` does not take, as for
            `attention`.
        RuntimeError: in backward, create_graph=True.
    """
    exchange = exchange or HeadExchange(None)
    if heads_at_a_time is None:
        return _all_heads(
            x_BTD, parameters, o_weight, cos, sin, segments, kind, gates, exchange, linear,
            backend, impl,
        )  # fmt: skip
    return _some_heads_at_a_time(
        x_BTD, parameters, o_weight, cos, sin, segments, kind, gates, heads_at_a_time, exchange,
        linear, backend, impl,
    )  # fmt: skip


def _all_heads(
    x_BTD: Tensor, parameters: QKVParameters, o_weight: Weight, cos: Tensor | None,
    sin: Tensor | None, segments: Tensor | None, kind: AttentionKind, gates: Tensor | None,
    exchange: HeadExchange, linear: Linear, backend: str, impl: str,
) -> Tensor:  # fmt: skip
    """Runs `qkv_attention` with all heads at once."""
    parameters, output_gate = parameters.parted()
    heads = project_heads(x_BTD, parameters, cos, sin, linear, impl)[:3]
    receive = [exchange.start_to_heads(x) for x in heads]
    del heads
    q, k, v = (receive.pop(0)() for _ in range(3))
    gates = None if gates is None else exchange.to_heads(gates)
    if kind.list_length and q.shape[2] // k.shape[2] != parameters.group:
        raise ValueError(
            "query heads of one key/value head choose blocks together; share between fewer ranks"
        )
    out = attention(q, k, v, segments, kind=kind, gates=gates, backend=backend, impl=impl)
    del q, k, v  # before the projections are made
    receive_out = exchange.start_to_tokens(out)
    del out
    # Beside the exchange; and backward frees the gate's gradient before attention's backward.
    gate = linear(x_BTD, *output_gate) if output_gate else None
    out = receive_out()
    del receive_out
    out = gated(out, None if gate is None else gate.view(out.shape), impl)
    return linear(out.flatten(2), o_weight)


def _some_heads_at_a_time(
    x_BTD: Tensor, parameters: QKVParameters, o_weight: Weight, cos: Tensor | None,
    sin: Tensor | None, segments: Tensor | None, kind: AttentionKind, gates: Tensor | None, n: int,
    exchange: HeadExchange, linear: Linear, backend: str, impl: str,
) -> Tensor:  # fmt: skip
    """Checks the arguments of `qkv_attention` with n heads at a time, and applies `_QKVAttention`
    to them."""
    on_triton = _check_steps(x_BTD, parameters, segments, kind, gates, n, exchange.size, impl)
    group_name = None if exchange.group is None else exchange.group.group_name
    tensors = tensors_of(o_weight), _fused(parameters.weights), parameters.biases, parameters.norms
    options = _Options(
        parameters.eps, parameters.head_dim, kind, linear, choose_backend(backend, x_BTD.device),
        on_triton, impl, n, group_name, tuple(map(len, tensors)),
    )  # fmt: skip
    flat = itertools.chain(*tensors)
    return _QKVAttention.apply(x_BTD, gates, cos, sin, segments, options, *flat)


def _check_steps(
    x_BTD: Tensor, parameters: QKVParameters, segments: Tensor | None, kind: AttentionKind,
    gates: Tensor | None, n: int, num_ranks: int, impl: str,
) -> bool:  # fmt: skip
    """Returns `on_triton`, see `AttentionKind.check`. Raises ValueError for what cannot run n heads
    at a time."""
    weights, _, norms, _, K, has_output_gate, rotary_dim = parameters
    H, G = len(weights[0]) // K, len(weights[1]) // K
    if G % num_ranks:
        raise ValueError(
            f"{num_ranks} ranks do not divide the {G} key/value heads; attend by all heads at once"
        )
    if (norms and len(norms[0]) > K) or has_output_gate or rotary_dim:
        raise ValueError(
            "a norm of all heads together, an output gate, or rotation of a part of each head "
            "needs all heads at once, not heads_at_a_time"
        )
    if n < 1 or G // num_ranks % n:
        raise ValueError(
            f"heads_at_a_time must divide a rank's {G // num_ranks} key/value heads, got {n}"
        )
    B, T, _ = x_BTD.shape
    # Tensors of the shapes and dtype of a step's q, and of its k or v, without memory of their own.
    empty = x_BTD.new_empty(())
    q, k = (empty.expand(B, T * num_ranks, heads * n // G, K) for heads in (H, G))
    on_triton = kind.check(q, k, k, segments, impl)
    check_gates(gates, kind, (B, T, H))
    return on_triton


@dataclass(frozen=True)
class AttentionPart:
    """Attention as a part of a layer, see `kernels.parts.MixerPart`.

    Args:
        num_heads: H, query heads.
        num_key_value_heads: G.
        head_dim: K.
        qk_norm: RMSNorms of q and k before rotary positions, of each "head" or of all heads
            together ("width"); None: there are none.
        has_biases: whether the projections to q, k and v have biases.
        rotates: whether q and k have rotary positions.
        has_output_gate: whether the output is multiplied by sigmoid(gate), one for each element.
        rotary_dim: elements of each head that are rotated; None: all.

    Raises:
        ValueError: heads below 1 or that do not divide, an odd number of rotated elements, an
            unknown norm.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    kind: AttentionKind = FULL
    qk_norm: str | None = "head"
    has_biases: bool = False
    rotates: bool = True
    has_output_gate: bool = False
    rotary_dim: int | None = None
    module: ClassVar[str] = "self_attn"

    def __post_init__(self):
        H, G, K = self.heads
        if min(self.heads) < 1:
            raise ValueError(
                "num_attention_heads, num_key_value_heads and head_dim must be at least 1, got "
                f"{H}, {G} and {K}"
            )
        if H % G:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads ({G}), got {H}"
            )
        rotary_dim = K if self.rotary_dim is None else self.rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= K:
            raise ValueError(
                f"head_dim and rotary_dim must be even for rotary positions, got {rotary_dim}"
            )
        if self.qk_norm not in ("head", "width", None):
            raise ValueError(f"qk_norm must be head, width or None, got {self.qk_norm!r}")

    @property
    def rotary_width(self) -> int:
        if not self.rotates:
            return 0
        return self.rotary_dim or self.head_dim

    @property
    def works_in_groups(self) -> bool:
        """Whether heads may be computed apart: norm and rotation take each head as a whole."""
        return self.qk_norm != "width" and not self.has_output_gate and self.rotary_dim is None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head width."""
        return self.num_heads, self.num_key_value_heads, self.head_dim

    @property
    def kept_whole(self) -> str | None:
        return "heads that are normalised together" if self.qk_norm == "width" else None

    @property
    def norm_sizes(self) -> tuple[int, int]:
        """Elements of q's and k's norm."""
        H, G, K = self.heads
        return {"head": (K, K), "width": (H * K, G * K), None: (0, 0)}[self.qk_norm]

    @property
    def num_gates(self) -> int:
        """Logits per token that the layer makes for its kind of attention."""
        return self.kind.gates_per_head * self.num_heads

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        (H, G, K), parameters = self.heads, {}
        for name, heads in (
            ("q_proj", H * (1 + self.has_output_gate)),
            ("k_proj", G),
            ("v_proj", G),
        ):
            parameters[f"{name}.weight"] = Parameter(
                (heads * K, hidden_size), shared_dim=0, role="map", target=name
            )
            if self.has_biases:
                parameters[f"{name}.bias"] = Parameter((heads * K,), "zero", shared_dim=0)
        parameters["o_proj.weight"] = Parameter(
            (hidden_size, H * K), "residual", shared_dim=1, role="map", target="o_proj"
        )
        norms = zip(("q_norm.weight", "k_norm.weight"), self.norm_sizes)
        parameters |= {name: Parameter((size,), "neutral") for name, size in norms if size}
        if n := self.num_gates:
            parameters["g_proj.weight"] = Parameter((n, hidden_size), shared_dim=0, role="gate")
            parameters["g_proj.bias"] = Parameter((n,), "zero", shared_dim=0, role="gate")
        return parameters

    def shared_sizes(self) -> dict[str, int]:
        return {"num_key_value_heads": self.num_key_value_heads}

    def heads_to_share(self) -> dict[str, int]:
        if self.kind.list_length:
            heads = "key/value heads, whose query heads choose blocks together"
            return {heads: self.num_key_value_heads}
        return {"query heads": self.num_heads}

    def shard(self, ranks: int) -> "AttentionPart":
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_key_value_heads=self.num_key_value_heads // ranks,
        )

    def with_kind(self, kind: AttentionKind) -> "AttentionPart":
        return replace(self, kind=kind)

    def results_bytes(self, num_tokens: int, element_size: int) -> tuple[int, int]:
        declared = self.kind.footprint(num_tokens, *self.heads, element_size=element_size)
        return declared.results * num_tokens, declared.choices * num_tokens

    def inside_bytes(
        self, num_tokens: int, element_size: int, *, backend: str, context_length: int,
        longest: int | None = None, heads_at_a_time: int | None = None, num_ranks: int = 1,
        prompts: Iterable[tuple[float, float, float, float]] = (),
    ) -> dict[str, int]:  # fmt: skip
        (H, G, K), N = self.heads, num_ranks
        steps = G // N // (heads_at_a_time or G // N)
        H, G = H // N // steps, G // N // steps
        copies = [
            (answers - 1) * count * self.kind.copied(round(prompt))
            for prompt, answers, _, count in prompts
        ]
        tokens = num_tokens * N + math.ceil(sum(copies))
        declared = self.kind.footprint(
            tokens,
            H,
            G,
            K,
            element_size=element_size,
            backend=backend,
            context_length=context_length,
            longest=longest,
        )
        if self.kind.reads_prompts or not copies:
            return {
                "fathom::attend": declared.forward,
                "fathom::attend_backward": declared.backward,
            }
        # q, k and v in a row with copies, and results; then also the results' gradient, and dq, dk
        # and dv.
        q = H * K * element_size
        kv = 2 * G * K * element_size
        forward, backward = (tokens * (n * (q + kv) + declared.results) for n in (1, 2))
        return {
            "fathom::attend": declared.forward + forward,
            "fathom::attend_backward": declared.backward + backward + tokens * q,
        }

    def linear_work(
        self, num_tokens: int, hidden_size: int, element_size: int, *, tile_size: int | None = None,
        is_skippable: bool = True,
    ) -> Work:  # fmt: skip
        """Counts the projections: `AttentionKind.flops` has attention's own operations."""
        q = self.num_heads * self.head_dim
        k = self.num_key_value_heads * self.head_dim
        flops = (
            2 * hidden_size * ((2 + self.has_output_gate) * q + 2 * k + self.num_gates) * num_tokens
        )
        moved = 2 * element_size * (q + k) * (1 + (self.qk_norm is not None)) * num_tokens
        return Work(flops, flops, moved)
