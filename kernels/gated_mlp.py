"""Gated feed-forward layer, down(act(gate(x)) * up(x)), at once or in tiles.

Kept for backward: the input, gate and up by `gated_mlp` at once, where one launch makes act(gate) *
up again beside the gradients; with adapters act(gate) * up as well. `gated_mlp` in tiles keeps the
input alone.

A tile is some rows of the input. Tiles go through the layer one after another, in buffers of one
tile. Backward computes a tile's gate and up again, two of its eleven matrix products. Then d_gate
overwrites gate, d_up overwrites up, and a * up, which the gradient of down_weight needs, overwrites
d. Memory grows with the rows by the input, the output and their gradients only. Weight gradients
add up over tiles in float32.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import torch_internals
from .common import cast_by_autocast, first_derivative, operation, rounds, sum_dtype, use_triton
from .gated_activation import gated_activation, gated_activation_reference
from .linear import PLAIN, Factor, Linear
from .parts import Parameter, Weight, Work, part_of, tensors_of, weight_of

ACTIVATIONS = ("silu", "gelu_tanh")  # of an MLP


def gated_mlp_reference(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """Plain PyTorch with the contract of `gated_mlp`, untiled."""
    gate = F.linear(input, gate_weight)
    up = F.linear(input, up_weight)
    return F.linear(gated_activation_reference(gate, up, activation), down_weight)


class _AtOnce(torch.autograd.Function):
    """The layer on x [rows, D], without adapters. Keeps x, gate, up and the weights."""

    @staticmethod
    def forward(ctx, x, gate_weight, up_weight, down_weight, linear, activation, on_triton):
        factor = linear.factor(x)
        gate = linear.forward(factor, linear.factor(gate_weight))
        up = linear.forward(factor, linear.factor(up_weight))
        kept = linear.kept(factor) if any(ctx.needs_input_grad[1:3]) else ()
        ctx.save_for_backward(gate, up, gate_weight, up_weight, down_weight, *kept)
        ctx.linear = linear
        ctx.options = (activation, on_triton)
        ctx.dtype = x.dtype
        del factor
        return linear.forward(
            linear.activated(gate, up, activation, on_triton), linear.factor(down_weight)
        )

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        gate, up, *tensors = ctx.saved_tensors  # checkpointing gives them once
        weights, kept = tensors[:3], tensors[3:]
        linear = ctx.linear
        needs_x, *needs = ctx.needs_input_grad[:4]
        x = linear.restored(kept, ctx.dtype) if kept else None
        d_x = dy.new_empty(len(dy), weights[0].shape[1]) if needs_x else None
        weights_t = [linear.transpose(linear.factor(weight)) for weight in weights]
        backward = _Backward(
            linear, ctx.options, weights, weights_t, [[needed] for needed in needs], [None] * 3
        )
        d_weights = backward.run(x, gate, up, dy, d_x)
        return d_x, *itertools.chain(*d_weights), None, None, None


_at_once_in_8_bits = torch_internals.untraced_in_8_bits(_AtOnce.apply)


def _run_tiles(
    x: Tensor, gate_tensors: list[Tensor], up_tensors: list[Tensor], down_tensors: list[Tensor],
    part: int, activation: str, tile_size: int, on_triton: bool,
) -> Tensor:  # fmt: skip
    """Runs the layer on x [rows, D] tile by tile, with the tensors of three weights and a
    `Linear`'s number."""
    linear: Linear = part_of(part)
    weights = gate_tensors, up_tensors, down_tensors
    output = x.new_empty(len(x), len(down_tensors[0]))
    gate_buffer, up_buffer = (
        x.new_empty(min(tile_size, len(x)), len(gate_tensors[0])) for _ in range(2)
    )
    gate_factor, up_factor, down_factor = (linear.factor(weight_of(tensors)) for tensors in weights)
    for i in rounds(triton.cdiv(len(x), tile_size), x):
        x_tile, output_tile = (rows[i * tile_size : (i + 1) * tile_size] for rows in (x, output))
        x_factor = linear.factor(x_tile)
        gate = linear.forward(x_factor, gate_factor, out=gate_buffer[: len(x_tile)])
        up = linear.forward(x_factor, up_factor, out=up_buffer[: len(x_tile)])
        del x_factor
        linear.forward(
            linear.activated(gate, up, activation, on_triton, gate), down_factor, out=output_tile
        )
    return output


def _like_output(x, gate, up, down, *options):
    return x.new_empty(len(x), len(down[0]))


_tiled_mlp = operation("fathom::tiled_gated_mlp", _like_output, composed=True)(_run_tiles)
_skippable_tiled_mlp = operation(
    "fathom::skippable_tiled_gated_mlp", _like_output, composed=True, skippable=True
)(_run_tiles)


def _split(flat: Iterable, like: Iterable[Sequence]) -> list[list]:
    """Splits a flat sequence into lists as long as `like` has: such as 1, 2, 3 for [[0], [0, 0]]
    into [1], [2, 3]."""
    elements = iter(flat)
    return [[*itertools.islice(elements, len(group))] for group in like]


def _fake_gradients(d_output, x, gate_tensors, up_tensors, down_tensors, *options):
    tensors = x, *gate_tensors, *up_tensors, *down_tensors
    return [t.new_empty(t.shape) for t, needed in zip(tensors, options[-1]) if needed]


def _zero_totals(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Returns zeros in which the gradients of tensors add up; None where none is needed."""
    return [
        torch.zeros(t.shape, dtype=sum_dtype(t), device=t.device) if needed else None
        for t, needed in zip(tensors, needs)
    ]


@operation("fathom::tiled_gated_mlp_backward", _fake_gradients, composed=True)
def _tiled_mlp_backward(
    d_output: Tensor, x: Tensor, gate_tensors: list[Tensor], up_tensors: list[Tensor],
    down_tensors: list[Tensor], part: int, activation: str, tile_size: int, on_triton: bool,
    needs_gradient: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients that `needs_gradient` asks for, of x and the tensors of the weights in
    this order."""
    linear: Linear = part_of(part)
    groups = gate_tensors, up_tensors, down_tensors
    tensors = [*itertools.chain(*groups)]
    d_x = x.new_empty(x.shape) if needs_gradient[0] else None
    needs = needs_gradient[1:]
    totals = _zero_totals(tensors, needs)
    buffers = [x.new_empty(min(tile_size, len(x)), len(gate_tensors[0])) for _ in range(3)]
    backward, factors = _backward_and_factors(
        linear, (activation, on_triton), groups, _split(needs, groups), _split(totals, groups)
    )
    for i in rounds(triton.cdiv(len(x), tile_size), x):
        tile = slice(i * tile_size, (i + 1) * tile_size)
        gate, up, d_hidden = (buffer[: len(x[tile])] for buffer in buffers)
        x_tile = linear.factor(x[tile])
        linear.forward(x_tile, factors[0], out=gate)
        linear.forward(x_tile, factors[1], out=up)
        backward.run(x_tile, gate, up, d_output[tile], None if d_x is None else d_x[tile], d_hidden)
        del x_tile, gate, up, d_hidden
    del backward, buffers, factors  # before the casts, whose results need memory
    d_tensors = [total.to(t.dtype) for total, t in zip(totals, tensors) if total is not None]
    return d_tensors if d_x is None else [d_x, *d_tensors]


@dataclass(frozen=True)
class _Backward:
    """Backward of rows through the layer."""

    linear: Linear
    options: tuple[str, bool]  # activation and on_triton, as `Linear.activated` takes them
    weights: Sequence[Weight]  # gate's, up's and down's, as in all fields below
    weights_t: Sequence[Factor]
    needs: Sequence[Sequence[bool]]  # whether each tensor of a weight needs a gradient
    totals: Sequence[Sequence[Tensor | None] | None]  # where gradients add up; None: they do not

    def run(
        self, x: Factor | None, gate: Tensor, up: Tensor, d_output: Tensor, d_x: Tensor | None,
        d_hidden: Tensor | None = None,
    ) -> list[list[Tensor | None]]:  # fmt: skip
        """Returns the gradients of the weights' tensors; writes x's gradient into d_x, if given.

        `d_hidden` is scratch for the gradient of the hidden rows; with it, gate and up are
        overwritten. x may be None where neither gate's nor up's weight has a gradient.
        """
        linear, is_in_place = self.linear, d_hidden is not None
        dy = linear.factor(d_output)
        d_hidden = linear.input_gradient(dy, self.weights_t[2], out=d_hidden)
        d_gate, d_up, hidden = linear.activation_gradients(
            d_hidden, gate, up, *self.options, is_in_place
        )
        d_pair = [d_gate, d_up]
        del d_hidden, gate, up, d_gate, d_up
        hidden_t = linear.transpose(hidden) if any(self.needs[2]) else None
        d_down = self._weight_gradients(2, dy, hidden_t)
        del dy, hidden, hidden_t
        x_t = None if x is None else linear.transpose(x)
        d_weights = []
        for i in range(2):
            d_rows = d_pair.pop(0)
            if d_x is not None:
                linear.input_gradient(d_rows, self.weights_t[i], out=d_x, accumulate=i > 0)
            d_weights.append(self._weight_gradients(i, d_rows, x_t))
        return [*d_weights, d_down]

    def _weight_gradients(self, i: int, dy: Factor, x_t: Factor | None) -> list[Tensor | None]:
        """Returns the gradients of the tensors of weight i, whose map of x gives y."""
        needs = self.needs[i]
        if not any(needs):
            return [None] * len(needs)
        dy_t = self.linear.transpose(dy)
        return self.linear.weight_gradients(dy_t, x_t, self.weights[i], needs, self.totals[i])


def _backward_and_factors(
    linear: Linear, options: tuple[str, bool], groups: Iterable[list[Tensor]],
    needs: list[list[bool]], totals: list[list[Tensor | None]],
) -> tuple[_Backward, list[Factor]]:  # fmt: skip
    """Returns backward of weights with tensors `groups`, and the factors of gate's and up's."""
    weights = [*map(weight_of, groups)]
    factors = [linear.factor(weight) for weight in weights]
    weights_t = [linear.transpose(factor) for factor in factors]
    return _Backward(linear, options, weights, weights_t, needs, totals), factors[:2]


def _setup_tiled(ctx, inputs, output):
    x, *weights = inputs[:4]
    ctx.save_for_backward(x, *itertools.chain(*weights))
    ctx.options = inputs[4:]


def _tiled_gradients(ctx, d_output):
    x, *weights = ctx.saved_tensors
    needs_x, *needs_weights = ctx.needs_input_grad[:4]
    needs = [needs_x, *itertools.chain(*needs_weights)]
    gradients = iter(
        _tiled_mlp_backward(d_output, x, *_split(weights, needs_weights), *ctx.options, needs)
    )
    d_x, *d_weights = (next(gradients) if needed else None for needed in needs)
    return d_x, *_split(d_weights, needs_weights), *[None] * len(ctx.options)


for _operation in (_tiled_mlp, _skippable_tiled_mlp):
    _operation.register_autograd(_tiled_gradients, setup_context=_setup_tiled)


def gated_mlp(
    input: Tensor, gate_weight: Weight, up_weight: Weight, down_weight: Weight, *,
    activation: str = "silu", tile_size: int | None = None, skippable: bool = False,
    linear: Linear = PLAIN, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Returns down(act(gate(input)) * up(input)), at once or in tiles of rows.

    Tiles are ALST's (Snowflake 2025, arXiv:2506.13996).

    Args:
        input: [..., D].
        gate_weight, up_weight: [F, D].
        down_weight: [D, F]. All weights are laid out as in `torch.nn.Linear`, without biases.
        activation: "silu" or "gelu_tanh".
        tile_size: rows of a tile; None runs all rows at once and keeps gate and up for backward.
            Tiles need 3 * tile_size * F elements at a time, 0.45 GiB for the 4B's MLP in tiles of
            8192, and in backward the three weight gradients in float32.
        skippable: whether a second forward may leave tiles out, because no gradient depends on the
            result, see `kernels.common.operation`. A norm that reads the result needs it.
        linear: the part that makes the matrix products.

    Raises ValueError for unknown activation, tile_size below 1, shapes or dtypes that do not fit;
    in backward RuntimeError for create_graph=True without adapters, or in tiles.
    """
    _check(input, gate_weight, up_weight, down_weight, activation, tile_size)
    all_weights = gate_weight, up_weight, down_weight
    if tile_size is None and linear.trains_matrices:
        x, *matrices = cast_by_autocast(input, *all_weights)
        rows = x.reshape(-1, x.shape[-1])
        at_once = _AtOnce.apply if linear == PLAIN else _at_once_in_8_bits
        output = at_once(rows, *matrices, linear, activation, use_triton(impl, rows))
        return output.view(input.shape)
    if tile_size is None:  # adapters share what they make of their input
        gate, up = linear.maps(input, [gate_weight, up_weight])
        hidden = gated_activation(gate, up, activation, impl)
        del gate, up  # before the projection's input is factored
        return linear(hidden, down_weight)

    weights = [[*cast_by_autocast(*tensors_of(weight))] for weight in all_weights]
    (x,) = cast_by_autocast(input)
    dtypes = [str(tensor.dtype) for tensor in (x, *itertools.chain(*weights))]
    if len({*dtypes}) > 1:
        raise ValueError(f"input and weights must be of one dtype, got {dtypes}")
    tiled = _skippable_tiled_mlp if skippable else _tiled_mlp
    output = tiled(
        x.reshape(-1, x.shape[-1]),
        *weights,
        linear.number,
        activation,
        tile_size,
        use_triton(impl, x),
    )
    return output.view(input.shape)


def _check(
    input: Tensor, gate: Weight, up: Weight, down: Weight, activation: str, tile_size: int | None
) -> None:
    """Raises ValueError for options and shapes as `gated_mlp` does."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    D, F = input.shape[-1], len(gate)
    shapes = [[*weight.shape] for weight in (gate, up, down)]
    if shapes != [[F, D], [F, D], [D, F]]:
        raise ValueError(
            f"for an input of width {D}, weights must be [F, {D}], [F, {D}] and [{D}, F], got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if tile_size is not None and tile_size < 1:
        raise ValueError(f"tile_size must be at least 1 row, got {tile_size}")


@dataclass(frozen=True)
class GatedMLPPart:
    """The gated MLP as a `kernels.parts.LayerPart`.

    Raises ValueError for an unknown activation or no width.
    """

    intermediate_size: int
    activation: str = "silu"
    module: ClassVar[str] = "mlp"
    tile_size: ClassVar[int] = 8192
    kept_whole: ClassVar[None] = None
    routes: ClassVar[bool] = False

    def __post_init__(self):
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )
        if self.intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, got {self.intermediate_size}")

    def shard(self, ranks: int) -> "GatedMLPPart":
        return replace(self, intermediate_size=self.intermediate_size // ranks)

    @property
    def active_width(self) -> int:
        return self.intermediate_size

    def measure_rates(self, hidden_size, seconds, device) -> dict[str, float]:
        return {}

    def choice_bytes(self, num_tokens: int) -> int:
        return 0

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        F, D = self.intermediate_size, hidden_size
        gate, up = (
            Parameter((F, D), shared_dim=0, role="map", target=name)
            for name in ("gate_proj", "up_proj")
        )
        down = Parameter((D, F), "residual", shared_dim=1, role="map", target="down_proj")
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}

    def shared_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.intermediate_size}

    def linear_work(
        self, num_tokens: int, hidden_size: int, element_size: int, *, tile_size: int | None = None,
        is_skippable: bool = True,
    ) -> Work:  # fmt: skip
        """Backward in tiles computes gate and up again, and spares a second forward if that may
        skip the MLP."""
        flops = 2 * 3 * hidden_size * self.intermediate_size * num_tokens
        is_skipped = is_skippable and tile_size is not None
        again = flops * (not is_skipped) + (0 if tile_size is None else 2 / 3 * flops)
        return Work(
            flops, again, 3 * element_size * self.intermediate_size * num_tokens, is_skipped
        )
