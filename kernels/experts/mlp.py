"""Gated MLPs of a mixture's experts: each token goes through k of E, and none is dropped.

For a token x with experts e_1 ... e_k and weights w_1 ... w_k, and gate_e and up_e the two halves
of gate_up[e],

    y = sum over j of down_e (w_j silu(gate_e x) * up_e x),  e = e_j

The sum is in float32, in the order of j. Let h = silu(gate) * up, d = down_e^T dy and d_h = w d.
Then

    d_w = d . h,  d_gate = d_h * up * silu'(gate),  d_up = d_h * silu(gate)
    d_down = sum of dy (w h)^T,  d_gate_up = sum of (d_gate, d_up) x^T
    dx = sum over j of gate_up^T (d_gate, d_up)

The output of down is needed nowhere. `products.py` has the matrix products.

Frozen matrices may have adapters, gate_up + b_in a_in and down + b_out a_out, of each expert. Let v
= a_in x, u = a_out (w h), g = b_in^T (d_gate, d_up) and e = b_out^T dy. Products of the rank's
width make these, and

    (gate, up) += b_in v,  y += b_out u,  d += a_out^T e,  dx += a_in^T g
    d_a_in = sum of g x^T,  d_b_in = sum of (d_gate, d_up) v^T
    d_a_out = sum of e (w h)^T,  d_b_out = sum of dy u^T

Kept for backward: x, and gate and up of each of the N k entries; in tiles x alone. A tile is some
tokens, sorted by expert among themselves. In tiles, backward makes gate and up again, d_gate and
d_up overwrite them, and gradients of the matrices add up over tiles in float32. No sum uses
atomics: every run gives the same bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..common import aligned, cast_by_autocast, operation, rounds, shown, sum_dtype, use_triton
from ..lora import lora_reference
from ..parts import Weight, tensors_of, weight_of
from .products import (
    Groups,
    LowRank,
    by_place,
    gate_up_gradients,
    gate_up_product,
    group,
    narrow,
    project,
    sum_entries,
    weight_gradient,
)

ALIGNED = 8  # elements whose multiples the kernels' widths are


class Adapters(NamedTuple):
    """Adapters of all experts' matrices, of ranks r and s."""

    a_in: Tensor  # [E, r, D]
    b_in: Tensor  # [E, 2 F, r]
    a_out: Tensor  # [E, s, F]
    b_out: Tensor  # [E, D, s]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> "Adapters | None":
        return None if tensors[0] is None else cls(*(aligned(t) for t in tensors if t is not None))


def expert_mlp_reference(
    x: Tensor, gate_up: Weight, down: Weight, experts: Tensor, weights: Tensor
) -> Tensor:
    """Loops over experts in plain PyTorch, as `expert_mlp` promises; float64 stays float64."""
    dtype = sum_dtype(x)
    rows = x.new_zeros(*experts.shape, x.shape[1])
    for e in range(len(down)):
        token, j = (experts == e).nonzero(as_tuple=True)
        gate, up = _linear(x[token], gate_up, e).chunk(2, dim=-1)
        hidden = F.silu(gate.to(dtype)) * up.to(dtype) * weights[token, j, None].to(dtype)
        rows = rows.index_put((token, j), _linear(hidden.to(x.dtype), down, e))
    return rows.sum(1, dtype=dtype).to(x.dtype)


def _linear(x: Tensor, weight: Weight, e: int) -> Tensor:
    matrix, *factors = (tensor[e] for tensor in tensors_of(weight))
    return lora_reference(x, matrix, *factors) if factors else F.linear(x, matrix)


def _run(
    x: Tensor, gate_up: Tensor, down: Tensor, groups: Groups, weights: Tensor,
    adapters: Adapters | None, kept: Tensor | None, y: Tensor,
) -> None:  # fmt: skip
    """Writes y [N, D], and gate and up into kept [N k, 2 F], if given."""
    hidden = x.new_empty(weights.numel(), down.shape[2])
    low = LowRank(narrow(x, adapters.a_in, groups), adapters.b_in) if adapters else None
    gate_up_product(x, gate_up, groups, weights, kept, hidden, low)
    low = None
    if adapters:
        low = LowRank(narrow(hidden, adapters.a_out, by_place(groups)), adapters.b_out)
    rows = x.new_empty(*weights.shape, x.shape[1])
    project(hidden, down, groups, rows, low=low)
    sum_entries(rows, y)


def _empty_outputs(x, gate_up, down, experts, weights, *adapters):
    return x.new_empty(x.shape), x.new_empty(experts.numel(), gate_up.shape[1])


@operation("fathom::expert_mlp", _empty_outputs, composed=True)
def _forward(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, a_in: Tensor | None,
    b_in: Tensor | None, a_out: Tensor | None, b_out: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns y, and gate and up of the entries by expert, [N k, 2 F]."""
    x, gate_up, down, weights = (aligned(t) for t in (x, gate_up, down, weights))
    y, kept = _empty_outputs(x, gate_up, down, experts, weights)
    adapters = Adapters.of([a_in, b_in, a_out, b_out])
    _run(x, gate_up, down, group(experts, len(down), x), weights, adapters, kept, y)
    return y, kept


def _run_tiles(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, tile_size: int,
    a_in: Tensor | None, b_in: Tensor | None, a_out: Tensor | None, b_out: Tensor | None,
) -> Tensor:  # fmt: skip
    x, gate_up, down, weights = (aligned(t) for t in (x, gate_up, down, weights))
    y = x.new_empty(x.shape)
    adapters = Adapters.of([a_in, b_in, a_out, b_out])
    for i in rounds(triton.cdiv(len(x), tile_size), x):
        tile = slice(i * tile_size, (i + 1) * tile_size)
        groups = group(experts[tile], len(down), x)
        _run(x[tile], gate_up, down, groups, weights[tile], adapters, None, y[tile])
    return y


def _empty_output(x, *rest):
    return x.new_empty(x.shape)


_tiled = operation("fathom::tiled_expert_mlp", _empty_output, composed=True)(_run_tiles)
_skippable_tiled = operation(
    "fathom::skippable_tiled_expert_mlp", _empty_output, composed=True, skippable=True
)(_run_tiles)


def _empty_gradients(
    dy, x, gate_up, down, experts, weights, kept, tile_size, needs_gradient, *adapters
):
    tensors = x, gate_up, down, weights, *adapters
    return [t.new_empty(t.shape) for t, needed in zip(tensors, needs_gradient) if needed]


def _empty_totals(
    tensors: Sequence[Tensor], needs: Sequence[bool], num_tiles: int
) -> list[Tensor | None]:
    """Makes the gradients of matrices that `needs` asks for; several tiles add up in float32."""
    dtype = torch.float32 if num_tiles > 1 else None
    return [
        torch.empty_like(tensor, dtype=dtype) if needed else None
        for tensor, needed in zip(tensors, needs)
    ]


@operation("fathom::expert_mlp_backward", _empty_gradients, composed=True)
def _backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor,
    kept: Tensor | None, tile_size: int, needs_gradient: list[bool], a_in: Tensor | None,
    b_in: Tensor | None, a_out: Tensor | None, b_out: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients that `needs_gradient` asks for, of x, gate_up, down, weights and
    adapters in this order.

    With `kept`, gate and up of all entries, the only tile is all tokens. Without it, backward makes
    gate and up again.
    """
    needs_matrices = [*needs_gradient[1:3], *needs_gradient[4:]]
    dy, x, gate_up, down, weights = (aligned(t) for t in (dy, x, gate_up, down, weights))
    adapters = Adapters.of([a_in, b_in, a_out, b_out])
    num_tiles = triton.cdiv(len(x), tile_size)
    dx, d_weights = x.new_empty(x.shape), weights.new_empty(weights.shape)
    totals = _empty_totals([gate_up, down, *(adapters or ())], needs_matrices, num_tiles)
    for i in rounds(num_tiles, x):
        tile = slice(i * tile_size, (i + 1) * tile_size)
        products = _TileProducts(
            x[tile], dy[tile], group(experts[tile], len(down), x), adapters, totals, add=i > 0
        )
        dx_tile = dx[tile] if needs_gradient[0] else None
        products.run(gate_up, down, weights[tile], kept, d_weights[tile], dx_tile)
        del products  # before the next tile's adapters narrow their rows
    matrices = [None if total is None else total.to(x.dtype) for total in totals]
    gradients = dx, *matrices[:2], d_weights, *matrices[2:]
    return [g for g, needed in zip(gradients, needs_gradient) if needed and g is not None]


class _TileProducts:
    """Backward of a tile. It writes gradients of matrices and adapters to `totals`, or adds them.

    Args:
        x, dy: rows of the tile's tokens [n, D].
        groups: entries of these tokens.
        totals: gradients of gate_up, down and the adapters; None: not needed.
        add: whether earlier tiles are in `totals`.
    """

    def __init__(
        self, x: Tensor, dy: Tensor, groups: Groups, adapters: Adapters | None,
        totals: Sequence[Tensor | None], *, add: bool,
    ):  # fmt: skip
        self.x, self.dy, self.groups, self.adapters = x, dy, groups, adapters
        self.d_gate_up, self.d_down, *self.d_adapters = totals
        self.add = add
        self.gate_up_term: LowRank | None = None  # b_in v
        self.d_hidden_term: LowRank | None = None  # a_out^T e
        if adapters:
            self.sorted_groups = by_place(groups)  # rows are sorted by expert
            self.gate_up_term = LowRank(narrow(x, adapters.a_in, groups), adapters.b_in)
            narrowed = narrow(dy, adapters.b_out.mT.contiguous(), groups)
            self.d_hidden_term = LowRank(narrowed, adapters.a_out)

    def run(
        self, gate_up: Tensor, down: Tensor, weights: Tensor, kept: Tensor | None,
        d_weights: Tensor, dx: Tensor | None,
    ) -> None:  # fmt: skip
        """Writes the gradient of weights into d_weights [n, k], and x's into dx, if given."""
        x, dy, groups = self.x, self.dy, self.groups
        hidden = x.new_empty(weights.numel(), down.shape[2])
        hidden_to_write = None
        if kept is None:
            pair = d_pair = x.new_empty(weights.numel(), gate_up.shape[1])
            gate_up_product(x, gate_up, groups, weights, pair, hidden, self.gate_up_term)
        else:
            pair, d_pair = kept, x.new_empty(kept.shape)
            if self.d_down is not None or self.adapters:
                hidden_to_write = hidden
        d_weights.copy_(
            gate_up_gradients(
                dy, down, groups, weights, pair, d_pair, hidden_to_write, self.d_hidden_term
            )
        )
        if self.d_down is not None:
            weight_gradient(dy, hidden, groups, self.d_down, add=self.add)
        self._take_hidden(hidden)
        del hidden, hidden_to_write, pair
        if self.d_gate_up is not None:
            weight_gradient(x, d_pair, groups, self.d_gate_up, transposed=True, add=self.add)
        dx_term = self._take_pair(d_pair)
        if dx is not None:
            rows = x.new_empty(*weights.shape, x.shape[1])
            project(d_pair, gate_up, groups, rows, transposed=True, low=dx_term)
            sum_entries(rows, dx)

    def _take_hidden(self, hidden: Tensor) -> None:
        """Makes the gradients of a_out and b_out from w h, whose rows are sorted by expert."""
        if self.adapters is None or self.d_hidden_term is None:
            return
        _, _, d_a_out, d_b_out = self.d_adapters
        if d_a_out is not None:
            rows = self.d_hidden_term.rows
            weight_gradient(
                hidden, rows, self.sorted_groups, d_a_out, transposed=True, add=self.add
            )
        if d_b_out is not None:
            narrowed = narrow(hidden, self.adapters.a_out, self.sorted_groups)
            weight_gradient(self.dy, narrowed, self.groups, d_b_out, add=self.add)

    def _take_pair(self, d_pair: Tensor) -> LowRank | None:
        """Makes a_in's and b_in's gradients from (d_gate, d_up). Returns dx's adapter term."""
        if self.adapters is None or self.gate_up_term is None:
            return None
        d_a_in, d_b_in, *_ = self.d_adapters
        if d_b_in is not None:
            weight_gradient(
                d_pair, self.gate_up_term.rows, self.sorted_groups, d_b_in, add=self.add
            )
        narrowed = narrow(d_pair, self.adapters.b_in.mT.contiguous(), self.sorted_groups)
        if d_a_in is not None:
            weight_gradient(self.x, narrowed, self.groups, d_a_in, transposed=True, add=self.add)
        return LowRank(narrowed, self.adapters.a_in)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # saves the zeros that autograd would make for `kept`
    ctx.save_for_backward(*inputs, output[1])
    ctx.tile_size = None


def _setup_tiled(ctx, inputs, output):
    *tensors, ctx.tile_size = inputs[:6]
    ctx.save_for_backward(*tensors, *inputs[6:], None)


def _gradients(ctx, dy, _=None):
    x, gate_up, down, experts, weights, *adapters, kept = ctx.saved_tensors
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4, -4, -3, -2, -1)]
    tensors = dy, x, gate_up, down, experts, weights, kept
    gradients = iter(_backward(*tensors, ctx.tile_size or len(x), needs, *adapters))
    dx, d_gate_up, d_down, d_weights, *d_adapters = (
        next(gradients) if needed else None for needed in needs
    )
    return dx, d_gate_up, d_down, None, d_weights, *([None] if ctx.tile_size else []), *d_adapters


_forward.register_autograd(_gradients, setup_context=_setup_context)
for _operation in (_tiled, _skippable_tiled):
    _operation.register_autograd(_gradients, setup_context=_setup_tiled)


def expert_mlp(
    x: Tensor, gate_up: Weight, down: Weight, experts: Tensor, weights: Tensor, *,
    tile_size: int | None = None, skippable: bool = False, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Returns the sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        x: [N, D].
        gate_up: [E, 2 F, D], an expert's gate rows before its up rows. Its adapter has A [E, r, D]
            and B [E, 2 F, r].
        down: [E, D, F]; its adapter has A [E, s, F] and B [E, D, s]. Both matrices have adapters,
            or none.
        experts: [N, k], integers, the experts of each token.
        weights: [N, k], any floating dtype.
        tile_size: tokens of a tile; None runs all at once and keeps gate and up, [N k, 2 F], for
            backward. In tiles backward makes these again, two thirds of forward's work, and adds
            weight gradients up in float32; a single tile needs no such sums.
        skippable: whether a second forward may leave tiles out, because no gradient depends on the
            result, see `kernels.common.operation`.
        impl: "auto", "triton" or "torch".

    Returns:
        [N, D].

    Raises:
        ValueError: shapes or dtypes that do not fit together, or tile_size below 1.
    """
    x, gate_up, *in_factors = cast_by_autocast(x, *tensors_of(gate_up))
    down, *out_factors = cast_by_autocast(*tensors_of(down))
    factors = [*in_factors, *out_factors]
    _check(x, gate_up, down, factors, experts, weights, tile_size)
    N, D = x.shape
    if not use_triton(impl, x) or not N:
        return expert_mlp_reference(
            x, weight_of([gate_up, *in_factors]), weight_of([down, *out_factors]), experts, weights
        )
    if any(t.shape[-1] % ALIGNED for t in (x, down, *factors)):
        x, gate_up, down, *factors = _widened(x, gate_up, down, *factors)
    adapters = factors or [None] * 4
    if tile_size is None and torch.is_grad_enabled():
        y, _ = _forward(x, gate_up, down, experts, weights, *adapters)
    else:
        tiled = _skippable_tiled if skippable else _tiled
        y = tiled(x, gate_up, down, experts, weights, tile_size or N, *adapters)
    return y[:, :D]


def _check(
    x: Tensor, gate_up: Tensor, down: Tensor, factors: Sequence[Tensor], experts: Tensor,
    weights: Tensor, tile_size: int | None,
) -> None:  # fmt: skip
    """Raises ValueError as `expert_mlp` does. `factors` of adapters are none or all four."""
    N, D = x.shape
    E, width = len(down), down.shape[-1]
    fits = gate_up.shape == (E, 2 * width, D) and down.shape[1] == D
    if not (fits and x.dtype == gate_up.dtype == down.dtype):
        raise ValueError(
            f"for {x.dtype} and width {D}, weights must be [E, 2 F, {D}] and [E, {D}, F], got "
            f"{shown(gate_up, down)}"
        )
    r, s = (factors[i].shape[1] if factors else 0 for i in (0, -2))
    expected = [(E, r, D), (E, 2 * width, r), (E, s, width), (E, D, s)][: 4 * bool(factors)]
    if [t.shape for t in factors] != expected or any(t.dtype != x.dtype for t in factors):
        raise ValueError(
            f"adapters of experts must be {[*map(list, expected)]} in {x.dtype}, "
            f"got {shown(*factors)}"
        )
    fits = experts.shape == weights.shape and experts.shape[:-1] == (N,)
    if not fits or experts.is_floating_point():
        raise ValueError(
            f"experts and weights must be [{N}, k], integers and numbers, got "
            f"{shown(experts, weights)}"
        )
    if tile_size is not None and tile_size < 1:
        raise ValueError(f"tile_size must be at least 1 token, got {tile_size}")


def _widened(x: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> list[Tensor]:
    """Returns copies with zeros up to widths and ranks that the kernels take."""
    ranks = [t.shape[1] for t in factors[::2]] or [0, 0]
    D, width, r, s = (-n % ALIGNED for n in (x.shape[1], down.shape[2], *ranks))

    def both(rows: Tensor, columns: int) -> Tensor:  # rows of gate and of up
        return F.pad(rows.unflatten(1, (2, -1)), (0, columns, 0, width)).flatten(1, 2)

    widened = [F.pad(x, (0, D)), both(gate_up, D), F.pad(down, (0, width, 0, D))]
    if factors:
        a_in, b_in, a_out, b_out = factors
        widened += [
            F.pad(a_in, (0, D, 0, r)),
            both(b_in, r),
            F.pad(a_out, (0, width, 0, s)),
            F.pad(b_out, (0, s, 0, D)),
        ]
    return widened
