import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gated_mlp import (
    ACTIVATIONS,
    gated_activation_reference,
    gated_mlp,
    gated_mlp_reference,
    geglu,
    sigmoid_gated,
    swiglu,
)
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DTYPES, compare_with_float64, outputs_and_gradients, random, requested_peak

GATES = (*ACTIVATIONS, "sigmoid")
_SIGNATURE = {"gate_ptr": "*bf16", "up_ptr": "*bf16", "output_ptr": "*bf16", "gate_stride": "i64", "up_stride": "i64"}
_GRADIENTS = {"d_output_ptr": "*bf16", "d_gate_ptr": "*bf16", "d_up_ptr": "*bf16"}
_4B = {"F": 9728, "BLOCK_F": 2048}
KERNELS_TO_COMPILE = [
    kernel
    for activation in GATES
    for kernel in (
        KernelToCompile("_gated_activation_forward_kernel", _SIGNATURE, _4B | {"ACTIVATION": activation}),
        KernelToCompile("_gated_activation_backward_kernel", _SIGNATURE | _GRADIENTS, _4B | {"ACTIVATION": activation}),
    )
]


def gated(gate, up, activation, impl="triton"):
    return {"silu": swiglu, "gelu_tanh": geglu, "sigmoid": sigmoid_gated}[activation](gate, up, impl=impl)


def compare(gate, up, activation):
    compare_with_float64(
        functools.partial(gated_activation_reference, activation=activation),
        functools.partial(gated, activation=activation),
        [gate, up],
    )


def mlp_inputs(rows, D, F, dtype=torch.float32, seed=0):
    shapes = [(*rows, D), (F, D), (F, D), (D, F)]
    scales = [1, D**-0.5, D**-0.5, F**-0.5]
    return [(s * random(*shape, seed=seed + i)).to(dtype) for i, (shape, s) in enumerate(zip(shapes, scales))]


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
        contiguous = outputs_and_gradients(function, [x.contiguous() for x in fused.chunk(2, dim=-1)])
        assert torch.equal(strided[0], contiguous[0])
        assert torch.equal(strided[1], torch.cat(contiguous[1:], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_size", [None, 1, 4, 14, 100])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_mlp_matches_float64(impl, tile_size, dtype, device, poisoned_memory):
    for activation in ACTIVATIONS if tile_size == 4 else ("silu",):
        compare_with_float64(
            functools.partial(gated_mlp_reference, activation=activation),
            functools.partial(gated_mlp, activation=activation, tile_size=tile_size, impl=impl),
            mlp_inputs((2, 7), 16, 24, dtype),
        )


def test_weight_gradients_do_not_lose_small_tiles(device):
    """Sums a thousand tiles of one row, all terms of one sign. A bfloat16 sum would stop growing at 256 terms."""
    inputs = [t.abs() for t in mlp_inputs((1000,), 8, 8, torch.bfloat16)]
    gradients = []
    for function, dtype in ((gated_mlp_reference, torch.float64), (functools.partial(gated_mlp, tile_size=1), None)):
        tensors = [t.to(dtype or t.dtype).requires_grad_() for t in inputs]
        output = function(*tensors)
        gradients.append(torch.autograd.grad(output, tensors[1:], torch.ones_like(output)))
    for exact, ours in zip(*gradients):
        assert ((ours.double() - exact).abs() <= 0.02 * exact).all()


@pytest.mark.parametrize("needed", [(0,), (1,), (3,), (1, 3), (0, 2), (1, 2, 3)])
def test_only_the_gradients_asked_for(needed, device):
    inputs = mlp_inputs((9,), 8, 12)
    gradients = []
    for tile_size in (None, 4):
        tensors = [t.clone().requires_grad_(i in needed) for i, t in enumerate(inputs)]
        gated_mlp(*tensors, tile_size=tile_size, impl="triton").square().sum().backward()
        gradients.append([t.grad for t in tensors])
    for plain, ours in zip(*gradients):
        assert (plain is None) == (ours is None)
        if ours is not None:
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize(("tile_size", "made"), [(4, 0), (None, 2)])
def test_keeps_its_inputs_and_at_once_gate_and_up(tile_size, made, device):
    kept = {}
    x, *weights = (t.requires_grad_() for t in mlp_inputs((9,), 8, 12))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t):
        gated_mlp(x, *weights, tile_size=tile_size, impl="triton")
    new = [t for pointer, t in kept.items() if pointer not in {t.data_ptr() for t in (x, *weights)}]
    assert len(kept) == 4 + made and all(t.shape == (9, 12) for t in new)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(2, 7), ()])
def test_at_once_has_the_gradients_of_products_that_are_kept(rows, activation, dtype, device, poisoned_memory):
    """Its products are the same as where act(gate) * up is kept, bit for bit, also in a second backward."""
    inputs = mlp_inputs(rows, 16, 24, dtype)

    def kept(x, gate, up, down):
        hidden = gated(F.linear(x, gate), F.linear(x, up), activation)
        return F.linear(hidden, down)

    expected = outputs_and_gradients(kept, inputs)
    ours = [t.clone().requires_grad_() for t in inputs]
    output = gated_mlp(*ours, activation=activation, impl="triton")
    for again in (True, False):
        found = torch.autograd.grad(output, ours, random(*output.shape, seed=1, dtype=dtype), retain_graph=again)
        assert all(map(torch.equal, [output, *found], expected))


def test_under_autocast(device):
    """Takes float32 weights, as in training under autocast: products are bfloat16, gradients float32."""
    inputs = mlp_inputs((9,), 8, 12)
    with torch.autocast(device.type, torch.bfloat16):
        untiled, tiled = (
            outputs_and_gradients(functools.partial(gated_mlp, tile_size=t, impl="torch"), inputs) for t in (None, 4)
        )
    assert tiled[0].dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in tiled[1:])
    for p, o in zip(untiled, tiled):
        torch.testing.assert_close(o, p, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("call", "message"), [
    (lambda t: swiglu(t(2, 8), t(2, 9), impl="triton"), r"\[2, 8\]"),
    (lambda t: swiglu(t(2, 8), t(2, 8).half(), impl="triton"), "float16"),
    (lambda t: swiglu(t(2, 8).double(), t(2, 8).double(), impl="triton"), "float64"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(8, 4), activation="relu"), "'relu'"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(5, 8), t(8, 4)), r"\[5, 8\]"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(4, 8)), r"\[4, 8\]"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(8, 4), tile_size=0), "got 0"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(8, 4).half(), tile_size=4), "float16"),
])  # fmt: skip
def test_refused(call, message, device):
    with pytest.raises(ValueError, match=message):
        call(functools.partial(torch.ones, device=device))


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.lists(st.integers(1, 5), max_size=2), width=st.integers(1, 3000), activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 100),
)  # fmt: skip
def test_property_activation_matches_float64(shape, width, activation, dtype, seed):
    compare(
        random(*shape, width, seed=seed, dtype=dtype), random(*shape, width, seed=seed + 1, dtype=dtype), activation
    )


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 20), D=st.integers(1, 20), F=st.integers(1, 40), tile_size=st.integers(1, 25),
    activation=st.sampled_from(ACTIVATIONS), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 100),
)  # fmt: skip
def test_property_tiled_mlp_matches_float64(rows, D, F, tile_size, activation, dtype, seed):
    compare_with_float64(
        functools.partial(gated_mlp_reference, activation=activation),
        functools.partial(gated_mlp, activation=activation, tile_size=tile_size, impl="triton"),
        mlp_inputs((rows,), D, F, dtype, seed),
    )


@pytest.mark.gpu
def test_past_2_to_the_31_elements(device):
    """Halves of a fused projection, 131,072 x 2 x 9728: rows at both ends and around the 2^31st element."""
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
    for ours, e in zip((d_gate, d_up), torch.autograd.grad(exact, [gate_s, up_s], output.detach()[rows].double())):
        torch.testing.assert_close(ours[rows].double(), e, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_tiled_mlp_memory_does_not_grow_with_rows(device):
    """Leaves the output and the input's gradient out, which do grow."""
    D, F, tile_size = 512, 2048, 1024
    weights = [t.requires_grad_() for t in mlp_inputs((1,), D, F, torch.bfloat16)[1:]]

    def forward_and_backward(x, d_output):
        output = gated_mlp(x, *weights, tile_size=tile_size)
        return output, *torch.autograd.grad(output, [x, *weights], d_output)

    extra = []
    for rows in (4096, 4096, 32768):  # the first call also allocates cuBLAS's workspace
        x = torch.randn(rows, D, dtype=torch.bfloat16, device=device).requires_grad_()
        d_output = torch.randn(rows, D, dtype=torch.bfloat16, device=device)
        results, taken = requested_peak(forward_and_backward, x, d_output)
        extra.append(taken - results[0].nbytes - results[1].nbytes)
        del x, d_output, results
    assert extra[2] <= extra[1] + 2**20


@pytest.mark.gpu
def test_tiled_mlp_never_waits_for_the_gpu(device):
    inputs = [t.requires_grad_() for t in mlp_inputs((300,), 64, 128, torch.bfloat16)]
    for mode in ("default", "error"):  # compiles in the first round
        torch.cuda.set_sync_debug_mode(mode)
        try:
            gated_mlp(*inputs, tile_size=128).backward(torch.ones_like(inputs[0]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
