import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.fp8 import FP8
from kernels.gated_activation import gated_activation
from kernels.gated_mlp import ACTIVATIONS, gated_mlp, gated_mlp_reference
from kernels.linear import PLAIN
from kernels.lora import LORA
from kernels.parts import Adapted
from tests.kernels.compare import (
    DEVICE,
    DTYPES,
    compare_with_float64,
    outputs_and_gradients,
    random,
    requested_peak,
)

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # FP8 on a GPU takes bfloat16


def mlp_inputs(rows, D, F, dtype=torch.float32, seed=0):
    shapes = [(*rows, D), (F, D), (F, D), (D, F)]
    scales = [1, D**-0.5, D**-0.5, F**-0.5]
    return [
        (s * random(*shape, seed=seed + i)).to(dtype)
        for i, (shape, s) in enumerate(zip(shapes, scales))
    ]


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
    """Sums a thousand tiles of one row, all terms of one sign. A bfloat16 sum would stop growing at
    256 terms."""
    inputs = [t.abs() for t in mlp_inputs((1000,), 8, 8, torch.bfloat16)]
    gradients = []
    for function, dtype in (
        (gated_mlp_reference, torch.float64),
        (functools.partial(gated_mlp, tile_size=1), None),
    ):
        tensors = [t.to(dtype or t.dtype).requires_grad_() for t in inputs]
        output = function(*tensors)
        gradients.append(torch.autograd.grad(output, tensors[1:], torch.ones_like(output)))
    for exact, ours in zip(*gradients):
        assert ((ours.double() - exact).abs() <= 0.02 * exact).all()


@pytest.mark.parametrize(
    ("rows", "needed"),
    [*((9, needed) for needed in ((0,), (1,), (3,), (1, 3), (0, 2), (1, 2, 3))), (0, range(4))],
)
def test_only_the_gradients_asked_for(rows, needed, device):
    inputs = mlp_inputs((rows,), 8, 12)
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
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t
    ):
        gated_mlp(x, *weights, tile_size=tile_size, impl="triton")
    new = [t for pointer, t in kept.items() if pointer not in {t.data_ptr() for t in (x, *weights)}]
    assert len(kept) == 4 + made and all(t.shape == (9, 12) for t in new)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(2, 7), ()])
def test_at_once_has_the_gradients_of_products_that_are_kept(
    rows, activation, dtype, device, poisoned_memory
):
    """Bit for bit, also in a second backward, but for the input's: its two products are added
    before they round."""
    inputs = mlp_inputs(rows, 16, 24, dtype)

    def kept(x, gate, up, down):
        hidden = gated_activation(F.linear(x, gate), F.linear(x, up), activation, "triton")
        return F.linear(hidden, down)

    expected = outputs_and_gradients(kept, inputs)
    ours = [t.clone().requires_grad_() for t in inputs]
    output = gated_mlp(*ours, activation=activation, impl="triton")
    for again in (True, False):
        found = torch.autograd.grad(
            output, ours, random(*output.shape, seed=1, dtype=dtype), retain_graph=again
        )
        assert all(map(torch.equal, [output, *found[1:]], [expected[0], *expected[2:]]))
        assert (found[0] - expected[1]).norm() <= {2: 0.01, 4: 1e-6}[
            found[0].element_size()
        ] * expected[1].norm()


@pytest.mark.parametrize("linear", [PLAIN, LORA, FP8("triton")])
def test_a_second_derivative_is_refused(linear, device):
    """Also where the output's gradient is a constant, which PyTorch's own decorator overlooks."""
    x, gate, up, down = (t.to(DTYPE).requires_grad_() for t in mlp_inputs((9,), 16, 16))
    if linear == LORA:
        down = Adapted(
            down.detach(),
            torch.ones_like(down[:4]),
            torch.ones_like(down[:, :4], requires_grad=True),
        )
    output = gated_mlp(x, gate, up, down, linear=linear, impl="triton")
    with pytest.raises(RuntimeError, match=r"no second derivative \(create_graph=True\)"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


def test_under_autocast(device):
    """Takes float32 weights, as in training under autocast: products are bfloat16, gradients
    float32."""
    inputs = mlp_inputs((9,), 8, 12)
    with torch.autocast(device.type, torch.bfloat16):
        untiled, tiled = (
            outputs_and_gradients(functools.partial(gated_mlp, tile_size=t, impl="torch"), inputs)
            for t in (None, 4)
        )
    assert tiled[0].dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in tiled[1:])
    for p, o in zip(untiled, tiled):
        torch.testing.assert_close(o, p, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("call", "message"), [
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(8, 4), activation="relu"), "'relu'"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(5, 8), t(8, 4)), r"\[5, 8\]"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(4, 8)), r"\[4, 8\]"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(8, 4), tile_size=0), "got 0"),
    (lambda t: gated_mlp(t(2, 8), t(4, 8), t(4, 8), t(8, 4).half(), tile_size=4), "float16"),
])  # fmt: skip
def test_refused(call, message, device):
    with pytest.raises(ValueError, match=message):
        call(functools.partial(torch.ones, device=device))


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 20), D=st.integers(1, 20), F=st.integers(1, 40),
    tile_size=st.integers(1, 25),
    activation=st.sampled_from(ACTIVATIONS), dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_property_tiled_mlp_matches_float64(rows, D, F, tile_size, activation, dtype, seed):
    compare_with_float64(
        functools.partial(gated_mlp_reference, activation=activation),
        functools.partial(gated_mlp, activation=activation, tile_size=tile_size, impl="triton"),
        mlp_inputs((rows,), D, F, dtype, seed),
    )


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
