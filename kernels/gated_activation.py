"""Gated activation act(gate) * up in one launch, and its gradients.

Let a = act(gate), and d the gradient of a * up. Then

    d_gate = d * up * act'(gate),  d_up = d * a

act is SiLU (SwiGLU) or GELU in its tanh form (GEGLU). Both are x * sigmoid(y): y = x for SiLU, and
y = 2 z for GELU, since 0.5 (1 + tanh(z)) = sigmoid(2 z). A gate of attention's output has the
sigmoid alone. Arithmetic is in float32, with one rounding at the end.

Kept for backward: gate and up by `swiglu` and `geglu`, which compute the activation again.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .common import operation, shown, sum_dtype, use_triton

BLOCK_SIZE = 2048  # columns of one row that one program works on


def gated_activation_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Returns act(gate) * up in plain PyTorch; float64 stays float64."""
    compute_dtype = sum_dtype(gate)
    x = gate.to(compute_dtype)
    gelu = partial(F.gelu, approximate="tanh")
    functions: dict[str, Callable] = {"silu": F.silu, "gelu_tanh": gelu, "sigmoid": F.sigmoid}
    value = functions[activation](x)
    return (value * up.to(compute_dtype)).to(gate.dtype)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Returns act(x) and act'(x)."""
    if ACTIVATION == "gelu_tanh":
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi) (...)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        y = x
        slope = 1.0
    # Never overflows; sigmoid(y) (1 - sigmoid(y)) keeps its digits at both ends.
    e = tl.exp(-tl.abs(y))
    r = 1.0 / (1.0 + e)
    sigmoid = tl.where(y >= 0, r, e * r)
    if ACTIVATION == "sigmoid":
        return sigmoid, e * r * r
    return x * sigmoid, sigmoid + e * r * r * x * slope


@triton.jit
def _gated_activation_forward_kernel(
    gate_ptr, up_ptr, output_ptr, gate_stride, up_stride, F: tl.constexpr, BLOCK_F: tl.constexpr,
    ACTIVATION: tl.constexpr,
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


def _launch(kernel, gate, up, *tensors, activation):
    """Runs `kernel` over gate and up, [rows, F] with rows of any spacing, and over `tensors`,
    [rows, F] contiguous."""
    if gate.is_meta:
        return
    rows, columns = gate.shape
    block = min(BLOCK_SIZE, triton.next_power_of_2(columns))
    kernel[(rows * triton.cdiv(columns, block),)](
        gate, up, *tensors, gate.stride(0), up.stride(0), F=columns, BLOCK_F=block,
        ACTIVATION=activation,
    )  # fmt: skip


def _as_rows(x: Tensor) -> Tensor:
    """Views `x` as [rows, F] with contiguous rows, without a copy for half of a projection."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


@operation("fathom::gated_activation", lambda gate, *_: gate.new_empty(gate.shape))
def _gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    output = gate.new_empty(gate.shape)
    _launch(
        _gated_activation_forward_kernel,
        _as_rows(gate),
        _as_rows(up),
        output,
        activation=activation,
    )
    return output


@operation(
    "fathom::gated_activation_backward",
    lambda _, *two: tuple(x.new_empty(x.shape) for x in two[:2]),
)
def _gated_activation_backward(
    d_output: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    d_gate = gate.new_empty(gate.shape)
    d_up = up.new_empty(up.shape)
    gradients = d_output.contiguous(), d_gate, d_up, None
    _launch(
        _gated_activation_backward_kernel,
        _as_rows(gate),
        _as_rows(up),
        *gradients,
        activation=activation,
    )
    return d_gate, d_up


@operation(
    "fathom::gated_activation_again",
    lambda _, *two: tuple(x.new_empty(x.shape) for x in two[:2]),
    mutates=["d_output"],
)
def _gated_activation_again(
    d_output: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, and overwrites d_output, which is contiguous, by
    act(gate) * up."""
    d_gate = gate.new_empty(gate.shape)
    d_up = up.new_empty(up.shape)
    _launch(
        _gated_activation_backward_kernel, _as_rows(gate), _as_rows(up), d_output, d_gate, d_up,
        d_output, activation=activation,
    )  # fmt: skip
    return d_gate, d_up


def _setup_context(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


_gated_activation.register_autograd(
    lambda ctx, dy: (*_gated_activation_backward(dy, *ctx.saved_tensors, ctx.activation), None),
    setup_context=_setup_context,
)


def activated(
    gate: Tensor, up: Tensor, activation: str, on_triton: bool, out: Tensor | None = None
) -> Tensor:
    """Returns act(gate) * up.

    With `out`, which may be gate, it is written there, without a graph.
    """
    if out is None:
        function = _gated_activation if on_triton else gated_activation_reference
        return function(gate, up, activation)
    if on_triton:
        _launch(_gated_activation_forward_kernel, gate, up, out, activation=activation)
        return out
    return out.copy_(gated_activation_reference(gate, up, activation))


def activation_gradients(
    d_hidden: Tensor, gate: Tensor, up: Tensor, activation: str, on_triton: bool, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, and overwrites their product's gradient d_hidden by
    act(gate) * up.

    Arguments are [rows, F]. With `in_place` the gradients overwrite gate and up.
    """
    if on_triton and not in_place:
        return _gated_activation_again(d_hidden, gate, up, activation)
    d_gate, d_up = (gate, up) if in_place else (torch.empty_like(gate), torch.empty_like(up))
    if on_triton:
        _launch(
            _gated_activation_backward_kernel,
            gate,
            up,
            d_hidden,
            d_gate,
            d_up,
            d_hidden,
            activation=activation,
        )
        return d_gate, d_up
    compute_dtype = sum_dtype(gate)
    d, x, u = (t.to(compute_dtype, copy=True) for t in (d_hidden, gate, up))
    if activation == "silu":
        value = F.silu(x)
        d_x = torch.ops.aten.silu_backward(d * u, x)
    else:
        value = F.gelu(x, approximate="tanh")
        d_x = torch.ops.aten.gelu_backward(d * u, x, approximate="tanh")
    d_hidden.copy_(value * u)
    return d_gate.copy_(d_x), d_up.copy_(d * value)


def swiglu(gate: Tensor, up: Tensor, *, impl: str = "auto") -> Tensor:
    """Returns silu(gate) * up (Shazeer 2020, arXiv:2002.05202), contiguous, in their dtype.

    Both are [..., F], float32, bfloat16 or float16; halves of a fused projection are read in place.
    Raises ValueError for unequal shapes or dtypes, or with Triton another dtype.
    """
    return gated_activation(gate, up, "silu", impl)


def geglu(gate: Tensor, up: Tensor, *, impl: str = "auto") -> Tensor:
    """Returns gelu(gate) * up, GELU in Gemma's tanh form.

    Arguments and errors are as in `swiglu`.
    """
    return gated_activation(gate, up, "gelu_tanh", impl)


def sigmoid_gated(gate: Tensor, x: Tensor, *, impl: str = "auto") -> Tensor:
    """Returns sigmoid(gate) * x, the product of an output gate.

    Arguments and errors are as in `swiglu`.
    """
    return gated_activation(gate, x, "sigmoid", impl)


def gated_activation(gate: Tensor, up: Tensor, activation: str, impl: str) -> Tensor:
    """Returns act(gate) * up by the name of an activation; arguments and errors as in `swiglu`."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate and up must be of one shape and dtype, got {shown(gate, up)}")
    return activated(gate, up, activation, use_triton(impl, gate))
