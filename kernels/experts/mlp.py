"""Gated MLPs of a mixture's experts: each token goes through k of E, and none is dropped.

For a token x with experts e_1 ... e_k and weights w_1 ... w_k, and gate_e and up_e the two halves of gate_up[e],

    y = sum over j of down_e (w_j silu(gate_e x) * up_e x),  e = e_j

The sum is in float32, in the order of j. Let h = silu(gate) * up, d = down_e^T dy and d_h = w d. Then

    d_w = d . h,  d_gate = d_h * up * silu'(gate),  d_up = d_h * silu(gate)
    d_down = sum of dy (w h)^T,  d_gate_up = sum of (d_gate, d_up) x^T,  dx = sum over j of gate_up^T (d_gate, d_up)

The output of down is needed nowhere. `products.py` has the matrix products.

Kept for backward: x, and gate and up of each of the N k entries; in tiles x alone. A tile is some tokens, sorted by
expert among themselves. In tiles, backward makes gate and up again, d_gate and d_up overwrite them, and gradients of
the matrices add up over tiles in float32. No sum uses atomics: every run gives the same bits.
"""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..common import aligned, cast_by_autocast, operation, rounds, use_triton
from .products import (
    Groups,
    gate_up_gradients,
    gate_up_product,
    group,
    project,
    sum_entries,
    weight_gradient,
)

ALIGNED = 8  # elements whose multiples the kernels' widths are


def expert_mlp_reference(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """A loop over experts in plain PyTorch, with the contract of `expert_mlp`; float64 stays float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(*experts.shape, x.shape[1])
    for e, (into, out_of) in enumerate(zip(gate_up, down)):
        token, j = (experts == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], into).chunk(2, dim=-1)
        hidden = F.silu(gate.to(dtype)) * up.to(dtype) * weights[token, j, None].to(dtype)
        rows = rows.index_put((token, j), F.linear(hidden.to(x.dtype), out_of))
    return rows.sum(1, dtype=dtype).to(x.dtype)


def _run(
    x: Tensor, gate_up: Tensor, down: Tensor, groups: Groups, weights: Tensor, kept: Tensor | None, y: Tensor
) -> None:
    """Writes y [N, D], and gate and up into kept [N k, 2 F], if given."""
    hidden = x.new_empty(weights.numel(), down.shape[2])
    gate_up_product(x, gate_up, groups, weights, kept, hidden)
    rows = x.new_empty(*weights.shape, x.shape[1])
    project(hidden, down, groups, rows)
    sum_entries(rows, y)


def _empty_outputs(x, gate_up, down, experts, weights):
    return x.new_empty(x.shape), x.new_empty(experts.numel(), gate_up.shape[1])


@operation("fathom::expert_mlp", _empty_outputs, composed=True)
def _forward(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y, and gate and up of the entries by expert, [N k, 2 F]."""
    x, gate_up, down, weights = (aligned(t) for t in (x, gate_up, down, weights))
    y, kept = _empty_outputs(x, gate_up, down, experts, weights)
    _run(x, gate_up, down, group(experts, len(down), x), weights, kept, y)
    return y, kept


def _run_tiles(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, tile_size: int
) -> Tensor:  # fmt: skip
    x, gate_up, down, weights = (aligned(t) for t in (x, gate_up, down, weights))
    y = x.new_empty(x.shape)
    for i in rounds(triton.cdiv(len(x), tile_size), x):
        tile = slice(i * tile_size, (i + 1) * tile_size)
        groups = group(experts[tile], len(down), x)
        _run(x[tile], gate_up, down, groups, weights[tile], None, y[tile])
    return y


def _empty_output(x, *rest):
    return x.new_empty(x.shape)


_tiled = operation("fathom::tiled_expert_mlp", _empty_output, composed=True)(_run_tiles)
_skippable_tiled = operation("fathom::skippable_tiled_expert_mlp", _empty_output, composed=True, skippable=True)(
    _run_tiles
)


def _empty_gradients(dy, x, gate_up, down, experts, weights, kept, tile_size, needs_gradient):
    tensors = x, gate_up, down, weights
    return [t.new_empty(t.shape) for t, needed in zip(tensors, needs_gradient) if needed]


@operation("fathom::expert_mlp_backward", _empty_gradients, composed=True)
def _backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, kept: Tensor | None,
    tile_size: int, needs_gradient: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients that `needs_gradient` asks for, of x, gate_up, down and weights in this order.

    `kept` has gate and up of all entries, and the only tile is all tokens; None: they are made again.
    """
    needs_x, needs_gate_up, needs_down, _ = needs_gradient
    dy, x, gate_up, down, weights = (aligned(t) for t in (dy, x, gate_up, down, weights))
    num_tiles = triton.cdiv(len(x), tile_size)
    dx, d_weights = x.new_empty(x.shape), weights.new_empty(weights.shape)
    totals = [
        torch.empty_like(w, dtype=torch.float32 if num_tiles > 1 else w.dtype) if needed else None
        for w, needed in ((gate_up, needs_gate_up), (down, needs_down))
    ]
    for i in rounds(num_tiles, x):
        tile = slice(i * tile_size, (i + 1) * tile_size)
        x_tile, dy_tile, weights_tile = x[tile], dy[tile], weights[tile]
        entries, groups = weights_tile.numel(), group(experts[tile], len(down), x)
        hidden = x.new_empty(entries, down.shape[2])
        if kept is None:
            pair = d_pair = x.new_empty(entries, gate_up.shape[1])
            gate_up_product(x_tile, gate_up, groups, weights_tile, pair, hidden)
        else:
            pair, d_pair = kept, x.new_empty(kept.shape)
        writes_hidden = needs_down and kept is not None  # else `gate_up_product` has written it
        d_weights[tile] = gate_up_gradients(
            dy_tile, down, groups, weights_tile, pair, d_pair, hidden if writes_hidden else None
        )
        if totals[1] is not None:
            weight_gradient(dy_tile, hidden, groups, totals[1], add=i > 0)
        del hidden, pair
        if totals[0] is not None:
            weight_gradient(x_tile, d_pair, groups, totals[0], transposed=True, add=i > 0)
        if needs_x:
            rows = x.new_empty(*weights_tile.shape, x.shape[1])
            project(d_pair, gate_up, groups, rows, transposed=True)
            sum_entries(rows, dx[tile])
            del rows
        del d_pair
    d_gate_up, d_down = (None if total is None else total.to(x.dtype) for total in totals)
    return [g for g, needed in zip((dx, d_gate_up, d_down, d_weights), needs_gradient) if needed and g is not None]


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # saves the zeros that autograd would make for `kept`
    ctx.save_for_backward(*inputs[:5], output[1])


def _setup_tiled(ctx, inputs, output):
    *tensors, ctx.tile_size = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, dy, _=None):
    x, gate_up, down, experts, weights, *kept = ctx.saved_tensors
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    needs = [needed for i, needed in enumerate(ctx.needs_input_grad[:5]) if i != 3]
    tensors = dy, x, gate_up, down, experts, weights, *(kept or [None])
    found = iter(_backward(*tensors, len(x) if kept else ctx.tile_size, needs))
    dx, d_gate_up, d_down, d_weights = (next(found) if needed else None for needed in needs)
    return dx, d_gate_up, d_down, None, d_weights, *([] if kept else [None])


_forward.register_autograd(_gradients, setup_context=_setup_context)
for _operation in (_tiled, _skippable_tiled):
    _operation.register_autograd(_gradients, setup_context=_setup_tiled)


def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, *, tile_size: int | None = None,
    skippable: bool = False, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Returns the sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        x: [N, D].
        gate_up: [E, 2 F, D], an expert's gate rows before its up rows.
        down: [E, D, F].
        experts: [N, k], integers, the experts of each token.
        weights: [N, k], any floating dtype.
        tile_size: tokens of a tile; None runs all at once and keeps gate and up, [N k, 2 F], for backward. In tiles
            backward makes these again, two thirds of forward's work, and adds weight gradients up in float32; a single
            tile needs no such sums.
        skippable: whether a second forward may leave tiles out, because no gradient depends on the result, see
            `kernels.common.operation`.
        impl: "auto", "triton" or "torch".

    Returns:
        [N, D].

    Raises:
        ValueError: shapes or dtypes that do not fit together, or tile_size below 1.
    """
    x, gate_up, down = cast_by_autocast(x, gate_up, down)
    (N, D), (E, width) = x.shape, (len(down), down.shape[-1])
    if gate_up.shape != (E, 2 * width, D) or down.shape[1] != D or not x.dtype == gate_up.dtype == down.dtype:
        got = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (gate_up, down))
        raise ValueError(f"for {x.dtype} and width {D}, weights must be [E, 2 F, {D}] and [E, {D}, F], got {got}")
    if experts.dim() != 2 or len(experts) != N or weights.shape != experts.shape or experts.is_floating_point():
        got = " and ".join(f"{list(t.shape)} {t.dtype}" for t in (experts, weights))
        raise ValueError(f"experts and weights must be [{N}, k], integers and numbers, got {got}")
    if tile_size is not None and tile_size < 1:
        raise ValueError(f"tile_size must be at least 1 token, got {tile_size}")
    if not use_triton(impl, x) or not N:
        return expert_mlp_reference(x, gate_up, down, experts, weights)
    if D % ALIGNED or width % ALIGNED:
        x, gate_up, down = _widened(x, gate_up, down)
    if tile_size is None and torch.is_grad_enabled():
        y, _ = _forward(x, gate_up, down, experts, weights)
    else:
        tiled = _skippable_tiled if skippable else _tiled
        y = tiled(x, gate_up, down, experts, weights, tile_size or N)
    return y[:, :D]


def _widened(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns copies with zeros up to widths that the kernels take."""
    D, width = (-n % ALIGNED for n in (x.shape[1], down.shape[2]))
    gate_up = F.pad(gate_up.unflatten(1, (2, -1)), (0, D, 0, width)).flatten(1, 2)
    return F.pad(x, (0, D)), gate_up, F.pad(down, (0, width, 0, D))
