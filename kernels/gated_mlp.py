"""Gated feed-forward layer, down(act(gate(x)) * up(x)): its activation in one launch, and the whole layer in tiles.

Let a = act(gate), and d the gradient of a * up. Then

    d_gate = d * up * act'(gate),  d_up = d * a

act is SiLU (SwiGLU) or GELU in its tanh form (GEGLU). Both are x * sigmoid(y): y = x for SiLU, and y = 2 z for GELU,
since 0.5 (1 + tanh(z)) = sigmoid(2 z). A gate of attention's output has the sigmoid alone. Arithmetic is in float32,
with one rounding at the end.

Kept for backward: gate and up by `swiglu` and `geglu`, which compute the activation again; the input, gate and up by
`gated_mlp` at once. For down_weight's gradient one launch makes a * up again beside the other gradients. In PyTorch,
and with linear maps other than the plain one, a * up is kept as well. `gated_mlp` in tiles keeps the input alone.

A tile is some rows of the input. Tiles go through the layer one after another, in buffers of one tile. Backward
computes a tile's gate and up again, two of its eleven matrix products. Then d_gate overwrites gate, d_up overwrites up,
and a * up, which the gradient of down_weight needs, overwrites d. Memory grows with the rows by the input, the output
and their gradients only. Weight gradients add up over tiles in float32.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .common import cast_by_autocast, operation, rounds, use_triton
from .linear import PLAIN, Linear
from .parts import Parameter, Weight, Work, part_of, tensors_of, weight_of

ACTIVATIONS = ("silu", "gelu_tanh")  # of an MLP
BLOCK_SIZE = 2048  # columns of one row that one program works on


def gated_activation_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Returns act(gate) * up in plain PyTorch; float64 stays float64."""
    compute_dtype = torch.promote_types(gate.dtype, torch.float32)
    x = gate.to(compute_dtype)
    gelu = partial(F.gelu, approximate="tanh")
    functions: dict[str, Callable] = {"silu": F.silu, "gelu_tanh": gelu, "sigmoid": F.sigmoid}
    value = functions[activation](x)
    return (value * up.to(compute_dtype)).to(gate.dtype)


def gated_mlp_reference(
    input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, *, activation: str = "silu"
) -> Tensor:
    """Plain PyTorch with the contract of `gated_mlp`, untiled."""
    gate, up = F.linear(input, gate_weight), F.linear(input, up_weight)
    return F.linear(gated_activation_reference(gate, up, activation), down_weight)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Returns act(x) and act'(x)."""
    if ACTIVATION == "gelu_tanh":
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi) (...)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        y = x
        slope = 1.0
    e = tl.exp(-tl.abs(y))  # never overflows; sigmoid(y) (1 - sigmoid(y)) keeps its digits at both ends
    r = 1.0 / (1.0 + e)
    sigmoid = tl.where(y >= 0, r, e * r)
    if ACTIVATION == "sigmoid":
        return sigmoid, e * r * r
    return x * sigmoid, sigmoid + e * r * r * x * slope


@triton.jit
def _gated_activation_forward_kernel(
    gate_ptr, up_ptr, output_ptr, gate_stride, up_stride,
    F: tl.constexpr, BLOCK_F: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    blocks_per_row: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = (tl.program_id(0) % blocks_per_row) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    mask = columns < F
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0)
    value, _ = activate(gate, ACTIVATION)
    tl.store(output_ptr + row * F + columns, (value * up.to(tl.float32)).to(up.dtype), mask=mask)


@triton.jit
def _gated_activation_backward_kernel(
    gate_ptr, up_ptr, d_output_ptr, d_gate_ptr, d_up_ptr, output_ptr, gate_stride, up_stride,
    F: tl.constexpr, BLOCK_F: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Outputs may be inputs: each program reads its elements before it writes them."""
    blocks_per_row: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = (tl.program_id(0) % blocks_per_row) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    mask = columns < F
    offsets = row * F + columns
    d_output = tl.load(d_output_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0)
    dtype = up.dtype
    up = up.to(tl.float32)
    value, derivative = activate(gate, ACTIVATION)
    tl.store(d_gate_ptr + offsets, (d_output * up * derivative).to(dtype), mask=mask)
    tl.store(d_up_ptr + offsets, (d_output * value).to(dtype), mask=mask)
    if output_ptr is not None:
        tl.store(output_ptr + offsets, (value * up).to(dtype), mask=mask)


def _launch(kernel, gate, up, *others, activation):
    """Runs `kernel` over gate and up, [rows, F] with rows of any spacing, and over `others`, [rows, F] contiguous."""
    if gate.is_meta:
        return
    rows, columns = gate.shape
    block = min(BLOCK_SIZE, triton.next_power_of_2(columns))
    kernel[(rows * triton.cdiv(columns, block),)](
        gate, up, *others, gate.stride(0), up.stride(0), F=columns, BLOCK_F=block, ACTIVATION=activation
    )


def _rows(x: Tensor) -> Tensor:
    """Views `x` as [rows, F] with contiguous rows, without a copy for halves of a fused projection."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


@operation("fathom::gated_activation", lambda gate, *_: gate.new_empty(gate.shape))
def _gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    output = gate.new_empty(gate.shape)
    _launch(_gated_activation_forward_kernel, _rows(gate), _rows(up), output, activation=activation)
    return output


@operation("fathom::gated_activation_backward", lambda _, *two: tuple(x.new_empty(x.shape) for x in two[:2]))
def _gated_activation_backward(d_output: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    gradients = d_output.contiguous(), d_gate, d_up, None
    _launch(_gated_activation_backward_kernel, _rows(gate), _rows(up), *gradients, activation=activation)
    return d_gate, d_up


@operation(
    "fathom::gated_activation_again", lambda _, *two: tuple(x.new_empty(x.shape) for x in two[:2]), mutates=["d_output"]
)
def _gated_activation_again(d_output: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, and overwrites d_output, which is contiguous, by act(gate) * up."""
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _launch(
        _gated_activation_backward_kernel, _rows(gate), _rows(up), d_output, d_gate, d_up, d_output,
        activation=activation,
    )  # fmt: skip
    return d_gate, d_up


class _GatedDown(torch.autograd.Function):
    """(act(gate) * up) weight^T. Keeps gate, up and the weight."""

    @staticmethod
    def forward(ctx, gate, up, weight, activation):
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        return F.linear(_gated_activation(gate, up, activation), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up, weight = ctx.saved_tensors
        hidden = dy @ weight  # its gradient, until the next line
        d_gate, d_up = _gated_activation_again(hidden, gate, up, ctx.activation)
        dy_rows, rows = dy.reshape(-1, dy.shape[-1]), hidden.view(-1, hidden.shape[-1])
        d_weight = dy_rows.t() @ rows if ctx.needs_input_grad[2] else None
        return d_gate, d_up, d_weight, None


def _setup_context(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


_gated_activation.register_autograd(
    lambda ctx, dy: (*_gated_activation_backward(dy, *ctx.saved_tensors, ctx.activation), None),
    setup_context=_setup_context,
)


def _run_tiles(
    x: Tensor, gate_tensors: list[Tensor], up_tensors: list[Tensor], down_tensors: list[Tensor],
    part: int, activation: str, tile_size: int, on_triton: bool,
) -> Tensor:  # fmt: skip
    """Runs the layer on x [rows, D] tile by tile, with the tensors of three weights and a `Linear`'s number."""
    linear: Linear = part_of(part)
    weights = gate_tensors, up_tensors, down_tensors
    output = x.new_empty(len(x), len(down_tensors[0]))
    gate_buffer, up_buffer = (x.new_empty(min(tile_size, len(x)), len(gate_tensors[0])) for _ in range(2))
    gate_factor, up_factor, down_factor = (linear.factor(weight_of(tensors)) for tensors in weights)
    for i in rounds(triton.cdiv(len(x), tile_size), x):
        x_tile, output_tile = (rows[i * tile_size : (i + 1) * tile_size] for rows in (x, output))
        x_factor = linear.factor(x_tile)
        gate = linear.forward(x_factor, gate_factor, out=gate_buffer[: len(x_tile)])
        up = linear.forward(x_factor, up_factor, out=up_buffer[: len(x_tile)])
        del x_factor
        if on_triton:
            _launch(_gated_activation_forward_kernel, gate, up, gate, activation=activation)
        else:
            gate.copy_(gated_activation_reference(gate, up, activation))
        linear.forward(linear.factor(gate), down_factor, out=output_tile)
    return output


def _like_output(x, gate, up, down, *options):
    return x.new_empty(len(x), len(down[0]))


_tiled_mlp = operation("fathom::tiled_gated_mlp", _like_output, composed=True)(_run_tiles)
_skippable_tiled_mlp = operation("fathom::skippable_tiled_gated_mlp", _like_output, composed=True, skippable=True)(
    _run_tiles
)


def _split(flat: Iterable, like: Iterable[Iterable]) -> list[list]:
    """Splits a flat sequence into lists as long as `like` has: such as 1, 2, 3 for [[0], [0, 0]] into [1], [2, 3]."""
    elements = iter(flat)
    return [[next(elements) for _ in of_weight] for of_weight in like]


def _fake_gradients(d_output, x, gate_tensors, up_tensors, down_tensors, *options):
    tensors = x, *gate_tensors, *up_tensors, *down_tensors
    return [t.new_empty(t.shape) for t, needed in zip(tensors, options[-1]) if needed]


@operation("fathom::tiled_gated_mlp_backward", _fake_gradients, composed=True)
def _tiled_mlp_backward(
    d_output: Tensor, x: Tensor, gate_tensors: list[Tensor], up_tensors: list[Tensor], down_tensors: list[Tensor],
    part: int, activation: str, tile_size: int, on_triton: bool, needs_gradient: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients that `needs_gradient` asks for, of x and the tensors of the weights in this order."""
    linear: Linear = part_of(part)
    weights = gate_tensors, up_tensors, down_tensors
    gate_weight, up_weight, down_weight = map(weight_of, weights)
    tensors = [*itertools.chain(*weights)]
    d_x = x.new_empty(x.shape) if needs_gradient[0] else None
    totals = [
        torch.zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32), device=w.device) if needed else None
        for w, needed in zip(tensors, needs_gradient[1:])
    ]
    buffers = [x.new_empty(min(tile_size, len(x)), len(gate_weight)) for _ in range(3)]
    gate_factor, up_factor = linear.factor(gate_weight), linear.factor(up_weight)
    gate_factor_t, up_factor_t = linear.transpose(gate_factor), linear.transpose(up_factor)
    down_factor_t = linear.transpose(linear.factor(down_weight))
    of_gate, of_up, of_down = zip(_split(needs_gradient[1:], weights), _split(totals, weights))
    for i in rounds(triton.cdiv(len(x), tile_size), x):
        tile = slice(i * tile_size, (i + 1) * tile_size)
        x_tile, d_output_tile = x[tile], d_output[tile]
        gate, up, d_hidden = (buffer[: len(x_tile)] for buffer in buffers)
        x_factor = linear.factor(x_tile)
        linear.forward(x_factor, gate_factor, out=gate)
        linear.forward(x_factor, up_factor, out=up)
        d_output_factor = linear.factor(d_output_tile)
        linear.input_gradient(d_output_factor, down_factor_t, out=d_hidden)
        if on_triton:
            _launch(_gated_activation_backward_kernel, gate, up, d_hidden, gate, up, d_hidden, activation=activation)
        else:
            _activation_backward_in_place(d_hidden, gate, up, activation)
        d_gate, d_up, hidden = gate, up, d_hidden  # the buffers' contents from here on

        if any(of_down[0]):
            factors_t = linear.transpose(d_output_factor), linear.transpose(linear.factor(hidden))
            linear.weight_gradients(*factors_t, down_weight, *of_down)
            del factors_t
        del d_output_factor
        x_factor_t = linear.transpose(x_factor)
        del x_factor
        maps = (d_gate, gate_weight, gate_factor_t, of_gate), (d_up, up_weight, up_factor_t, of_up)
        for dy, weight, weight_t, of_weight in maps:
            dy_factor = linear.factor(dy)
            if d_x is not None:
                linear.input_gradient(dy_factor, weight_t, out=d_x[tile], accumulate=dy is d_up)
            if any(of_weight[0]):
                linear.weight_gradients(linear.transpose(dy_factor), x_factor_t, weight, *of_weight)
            del dy_factor
    # Freed before the casts, whose results need memory.
    del buffers, gate, up, d_hidden, d_gate, d_up, hidden, maps, dy, weight_t, x_factor_t
    del gate_factor, up_factor, gate_factor_t, up_factor_t, down_factor_t
    d_weights = [total.to(w.dtype) for total, w in zip(totals, tensors) if total is not None]
    return d_weights if d_x is None else [d_x, *d_weights]


def _activation_backward_in_place(d_hidden, gate, up, activation):
    compute_dtype = torch.promote_types(gate.dtype, torch.float32)
    d, x, u = (t.to(compute_dtype, copy=True) for t in (d_hidden, gate, up))
    if activation == "silu":
        value, d_gate = F.silu(x), torch.ops.aten.silu_backward(d * u, x)
    else:
        value, d_gate = F.gelu(x, approximate="tanh"), torch.ops.aten.gelu_backward(d * u, x, approximate="tanh")
    gate.copy_(d_gate)
    up.copy_(d * value)
    d_hidden.copy_(value * u)


def _setup_tiled(ctx, inputs, output):
    x, *weights = inputs[:4]
    ctx.save_for_backward(x, *itertools.chain(*weights))
    ctx.options = inputs[4:]


def _tiled_gradients(ctx, d_output):
    (x, *weights), (needs_x, *needs_weights) = ctx.saved_tensors, ctx.needs_input_grad[:4]
    needs = [needs_x, *itertools.chain(*needs_weights)]
    found = iter(_tiled_mlp_backward(d_output, x, *_split(weights, needs_weights), *ctx.options, needs))
    d_x, *d_weights = (next(found) if needed else None for needed in needs)
    return d_x, *_split(d_weights, needs_weights), *[None] * len(ctx.options)


for _operation in (_tiled_mlp, _skippable_tiled_mlp):
    _operation.register_autograd(_tiled_gradients, setup_context=_setup_tiled)


def swiglu(gate: Tensor, up: Tensor, *, impl: str = "auto") -> Tensor:
    """Returns silu(gate) * up (Shazeer 2020, arXiv:2002.05202), contiguous, in their dtype.

    Both are [..., F], float32, bfloat16 or float16; halves of a fused projection are read in place. Raises ValueError
    for unequal shapes or dtypes, or with Triton another dtype.
    """
    return _gated(gate, up, "silu", impl)


def geglu(gate: Tensor, up: Tensor, *, impl: str = "auto") -> Tensor:
    """Returns gelu(gate) * up, GELU in the tanh form that Gemma uses; arguments and errors as in `swiglu`."""
    return _gated(gate, up, "gelu_tanh", impl)


def sigmoid_gated(gate: Tensor, x: Tensor, *, impl: str = "auto") -> Tensor:
    """Returns sigmoid(gate) * x, as attention with an output gate does; arguments and errors as in `swiglu`."""
    return _gated(gate, x, "sigmoid", impl)


def _gated(gate: Tensor, up: Tensor, activation: str, impl: str) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        got = " and ".join(f"{list(x.shape)} {x.dtype}" for x in (gate, up))
        raise ValueError(f"gate and up must be of one shape and dtype, got {got}")
    function = _gated_activation if use_triton(impl, gate) else gated_activation_reference
    return function(gate, up, activation)


def gated_mlp(
    input: Tensor, gate_weight: Weight, up_weight: Weight, down_weight: Weight, *, activation: str = "silu",
    tile_size: int | None = None, skippable: bool = False, linear: Linear = PLAIN, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Returns down(act(gate(input)) * up(input)), in tiles of rows if asked (ALST, Snowflake 2025, arXiv:2506.13996).

    Args:
        input: [..., D].
        gate_weight, up_weight: [F, D].
        down_weight: [D, F]. All weights are laid out as in `torch.nn.Linear`, without biases.
        activation: "silu" or "gelu_tanh".
        tile_size: rows of a tile; None runs all rows at once and keeps gate and up for backward. Tiles need
            3 * tile_size * F elements at a time, 0.45 GiB for the 4B's MLP in tiles of 8192, and in backward the three
            weight gradients in float32.
        skippable: whether a second forward may leave tiles out, because no gradient depends on the result, see
            `kernels.common.operation`. A norm that reads the result needs it.
        linear: the part that makes the matrix products.

    Raises ValueError for unknown activation, tile_size below 1, shapes or dtypes that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    width, hidden = input.shape[-1], gate_weight.shape[0]
    if not gate_weight.shape == up_weight.shape == (hidden, width) or down_weight.shape != (width, hidden):
        raise ValueError(
            f"for an input of width {width}, weights must be [F, {width}], [F, {width}] and [{width}, F], got "
            f"{list(gate_weight.shape)}, {list(up_weight.shape)} and {list(down_weight.shape)}"
        )
    if tile_size is None:
        gate, up = linear.maps(input, [gate_weight, up_weight])
        if linear == PLAIN and isinstance(down_weight, Tensor) and use_triton(impl, gate):
            return _GatedDown.apply(*cast_by_autocast(gate, up, down_weight), activation)
        hidden = _gated(gate, up, activation, impl)
        del gate, up  # before the projection's input is factored
        return linear(hidden, down_weight)

    if tile_size < 1:
        raise ValueError(f"tile_size must be at least 1 row, got {tile_size}")
    weights = [[*cast_by_autocast(*tensors_of(weight))] for weight in (gate_weight, up_weight, down_weight)]
    (x,) = cast_by_autocast(input)
    dtypes = [str(tensor.dtype) for tensor in (x, *itertools.chain(*weights))]
    if len({*dtypes}) > 1:
        raise ValueError(f"input and weights must be of one dtype, got {dtypes}")
    options = linear.number, activation, tile_size, use_triton(impl, x)
    tiled = _skippable_tiled_mlp if skippable else _tiled_mlp
    return tiled(x.reshape(-1, width), *weights, *options).view(input.shape)


@dataclass(frozen=True)
class GatedMLPPart:
    """The gated MLP as a `kernels.parts.LayerPart`. Raises ValueError for an unknown activation or no width."""

    intermediate_size: int
    activation: str = "silu"
    module: ClassVar[str] = "mlp"
    tile_size: ClassVar[int] = 8192
    kept_whole: ClassVar[None] = None

    def __post_init__(self):
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, got {self.intermediate_size}")

    def share(self, ranks: int) -> "GatedMLPPart":
        """Returns the part of each of `ranks` that share the matrices."""
        return replace(self, intermediate_size=self.intermediate_size // ranks)

    def choice_bytes(self, num_tokens: int) -> int:
        return 0

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        into = Parameter((self.intermediate_size, hidden_size), shared_dim=0, is_map=True)
        down = Parameter((hidden_size, self.intermediate_size), "residual", shared_dim=1, is_map=True)
        return {"gate_proj.weight": into, "up_proj.weight": into, "down_proj.weight": down}

    def shared_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.intermediate_size}

    def linear_work(
        self, num_tokens: int, hidden_size: int, element_size: int, *, tile_size: int | None = None,
        is_skippable: bool = True,
    ) -> Work:  # fmt: skip
        """Backward in tiles computes gate and up again, and spares a second forward if that may skip the MLP."""
        flops = 2 * 3 * hidden_size * self.intermediate_size * num_tokens
        is_skipped = is_skippable and tile_size is not None
        again = flops * (not is_skipped) + (0 if tile_size is None else 2 / 3 * flops)
        return Work(flops, again, 3 * element_size * self.intermediate_size * num_tokens, is_skipped)
