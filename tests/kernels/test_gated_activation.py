import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gated_activation import gated_activation_reference, geglu, sigmoid_gated, swiglu
from kernels.gated_mlp import ACTIVATIONS
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DTYPES, compare_with_float64, outputs_and_gradients, random

GATES = (*ACTIVATIONS, "sigmoid")
_SIGNATURE = {
    "gate_ptr": "*bf16",
    "up_ptr": "*bf16",
    "output_ptr": "*bf16",
    "gate_stride": "i64",
    "up_stride": "i64",
}
_GRADIENTS = {"d_output_ptr": "*bf16", "d_gate_ptr": "*bf16", "d_up_ptr": "*bf16"}
_4B = {"F": 9728, "BLOCK_F": 2048}
KERNELS_TO_COMPILE = [
    kernel
    for activation in GATES
    for kernel in (
        KernelToCompile(
            "_gated_activation_forward_kernel", _SIGNATURE, _4B | {"ACTIVATION": activation}
        ),
        KernelToCompile(
            "_gated_activation_backward_kernel",
            _SIGNATURE | _GRADIENTS,
            _4B | {"ACTIVATION": activation},
        ),
    )
]


def gated(gate, up, activation, impl="triton"):
    return {"silu": swiglu, "gelu_tanh": geglu, "sigmoid": sigmoid_gated}[activation](
        gate, up, impl=impl
    )


def compare(gate, up, activation):
    compare_with_float64(
        functools.partial(gated_activation_reference, activation=activation),
        functools.partial(gated, activation=activation),
        [gate, up],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("shape", [(1,), (5, 37), (2, 3, 64), (2, 5000)])
def test_activation_matches_float64(shape, activation, dtype, device, poisoned_memory):
    compare(4 * random(*shape, dtype=dtype), random(*shape, seed=9, dtype=dtype), activation)


@pytest.mark.parametrize("activation", GATES)
def test_extreme_gates_stay_finite(activation, device):
    gate = torch.tensor([-1e12, -1e4, -90.0, -1e-30, 0.0, 1e-30, 90.0, 1e4, 1e12], device=device)
    gradients = []
    for impl in ("torch", "triton"):
        x = gate.clone().requires_grad_()
        output = gated(x, torch.ones_like(x), activation, impl)
        gradients.append([output, *torch.autograd.grad(output.sum(), x)])
    for plain, ours in zip(*gradients):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, plain)


def test_halves_of_a_fused_projection(device):
    fused = random(3, 5, 2 * 37)
    functions = [functools.partial(gated, activation=activation) for activation in ACTIVATIONS]
    for function in functions:
        strided = outputs_and_gradients(lambda x, f=function: f(*x.chunk(2, dim=-1)), [fused])
        contiguous = outputs_and_gradients(
            function, [x.contiguous() for x in fused.chunk(2, dim=-1)]
        )
        assert torch.equal(strided[0], contiguous[0])
        assert torch.equal(strided[1], torch.cat(contiguous[1:], dim=-1))


@pytest.mark.parametrize(("call", "message"), [
    (lambda t: swiglu(t(2, 8), t(2, 9), impl="triton"), r"\[2, 8\]"),
    (lambda t: swiglu(t(2, 8), t(2, 8).half(), impl="triton"), "float16"),
    (lambda t: swiglu(t(2, 8).double(), t(2, 8).double(), impl="triton"), "float64"),
])  # fmt: skip
def test_refused(call, message, device):
    with pytest.raises(ValueError, match=message):
        call(functools.partial(torch.ones, device=device))


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.lists(st.integers(1, 5), max_size=2), width=st.integers(1, 3000),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 100),
)  # fmt: skip
def test_property_activation_matches_float64(shape, width, activation, dtype, seed):
    compare(
        random(*shape, width, seed=seed, dtype=dtype),
        random(*shape, width, seed=seed + 1, dtype=dtype),
        activation,
    )


@pytest.mark.gpu(gib=16)
def test_past_2_to_the_31_elements(device):
    """Halves of a fused projection, 131,072 x 2 x 9728: rows at both ends and around the 2^31st
    element."""
    T, F = 131_072, 9728
    fused = torch.randn(T, 2 * F, dtype=torch.bfloat16, device=device)
    assert fused.numel() > 2**31
    gate, up = (x.requires_grad_() for x in fused.chunk(2, dim=-1))
    output = swiglu(gate, up)
    d_gate, d_up = torch.autograd.grad(output, [gate, up], output.detach())
    rows = torch.tensor([0, 1, 2**31 // (2 * F), 2**31 // (2 * F) + 1, T - 1], device=device)
    gate_s, up_s = (x.detach()[rows].double().requires_grad_() for x in (gate, up))
    exact = gated_activation_reference(gate_s, up_s, "silu")
    torch.testing.assert_close(output[rows].double(), exact, rtol=1e-2, atol=1e-2)
    for ours, e in zip(
        (d_gate, d_up), torch.autograd.grad(exact, [gate_s, up_s], output.detach()[rows].double())
    ):
        torch.testing.assert_close(ours[rows].double(), e, rtol=1e-2, atol=1e-2)
