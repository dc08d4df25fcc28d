"""What holds for every operation with Triton kernels: equal bits, second backwards, compilation,
custom operations."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.convolution import qkv_convolution
from kernels.delta_net import delta_rule
from kernels.gated_activation import swiglu
from kernels.gated_mlp import gated_mlp
from kernels.linear import PLAIN
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from tests.kernels import test_convolution, test_delta_net
from tests.kernels.compare import outputs_and_gradients, random
from tests.kernels.test_convolution import G, H, K
from tests.kernels.test_convolution import (
    small_blocks as small_blocks,
)  # a fixture of all tests here
from tests.kernels.test_delta_net import segments_of
from tests.kernels.test_delta_net import small_stretches as small_stretches  # a fixture
from tests.kernels.test_gated_mlp import mlp_inputs
from tests.kernels.test_rope import queries_and_keys, table

pytestmark = pytest.mark.usefixtures("small_stretches")


class Operation(NamedTuple):
    # of the inputs and `impl`, and of `segments` where documents matter; one output or several
    call: Callable
    inputs: Callable[[], list[torch.Tensor]]
    lengths: tuple[int, ...] = ()  # of documents


def normalised(x, weight, residual, impl):
    return rms_norm(x, weight, residual=residual, impl=impl)


def gated(x, weight, gate, impl):
    return 1 * rms_norm(
        x, weight, gate=gate, read_once=True, impl=impl
    )  # the product makes its gradient anew


def ruled(*inputs, segments=None, **options):
    initial = inputs[5] if segments is not None else inputs[5][:1]
    return delta_rule(
        *inputs[:5], initial_state=initial, segments=segments, with_state=True, **options
    )


TABLE = table(7, 32)
OPERATIONS = {
    **{
        name: Operation(call, lambda: [random(70, 37), random(37, seed=1), random(70, 37, seed=2)])
        for name, call in (("rms_norm", normalised), ("gated rms_norm", gated))
    },
    "rope": Operation(
        lambda q, k, impl: rope(q, k, *TABLE, impl=impl), lambda: queries_and_keys(2, 7, 4, 2, 32)
    ),
    "swiglu": Operation(swiglu, lambda: [random(5, 37), random(5, 37, seed=1)]),
    "gated_mlp": Operation(gated_mlp, lambda: mlp_inputs((2, 7), 16, 24)),
    "gated_mlp in tiles": Operation(
        functools.partial(gated_mlp, tile_size=8), lambda: mlp_inputs((33,), 16, 24)
    ),
    "qkv_convolution": Operation(
        lambda *x, **options: qkv_convolution(*x, G, H, K, **options),
        lambda: test_convolution.inputs(25),
        (20, 5),
    ),
    "delta_rule": Operation(ruled, lambda: test_delta_net.inputs(170, documents=2), (100, 70)),
}
NAMES = pytest.mark.parametrize("name", OPERATIONS)


def outputs_of(name, inputs, **options):
    if OPERATIONS[name].lengths:
        options["segments"] = segments_of(OPERATIONS[name].lengths)
    outputs = OPERATIONS[name].call(*inputs, **{"impl": "triton", **options})
    return outputs if isinstance(outputs, tuple) else (outputs,)


@NAMES
def test_two_runs_and_second_backwards_are_bitwise_equal(name, device, poisoned_memory):
    runs = []
    for _ in range(2):
        inputs = [x.requires_grad_() for x in OPERATIONS[name].inputs()]
        kept = [x.detach().clone() for x in inputs]
        outputs = outputs_of(name, inputs)
        total = sum(out.square().sum() for out in outputs)
        runs += [
            [*outputs, *torch.autograd.grad(total, inputs, retain_graph=again)]
            for again in (True, False)
        ]
        assert all(map(torch.equal, inputs, kept))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


@NAMES
def test_gradients_where_other_outputs_go_nowhere(name, device):
    inputs = [x.requires_grad_() for x in OPERATIONS[name].inputs()]
    for used in range(len(outputs_of(name, inputs))):
        plain, ours = (
            torch.autograd.grad(
                outputs_of(name, inputs, impl=impl)[used].square().sum(), inputs, allow_unused=True
            )
            for impl in ("torch", "triton")
        )
        for expected, found in zip(plain, ours):
            assert found is not None or expected is None
            if found is not None:
                expected = torch.zeros_like(found) if expected is None else expected
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@NAMES
def test_under_compile_and_checkpoint(name, device):
    call = OPERATIONS[name].call

    def function(*inputs):
        outputs = call(*inputs, impl="triton")
        return tuple(2 * out for out in outputs) if isinstance(outputs, tuple) else 2 * outputs

    torch._dynamo.reset()  # all names share this code, whose lengths would become symbols
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    plain = outputs_and_gradients(function, OPERATIONS[name].inputs())
    for wrapped in (compiled, functools.partial(checkpoint, function, use_reentrant=False)):
        ours = outputs_and_gradients(wrapped, OPERATIONS[name].inputs())
        if name.startswith("gated_mlp"):
            torch.testing.assert_close(ours, plain)
        else:
            assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize(("operation", "name", "rest"), [
    ("rms_norm_forward", "rms_norm", lambda x, weight, residual: (x, None, None, weight, 1e-6, 0.0, True, False)),
    ("rms_norm_forward", "rms_norm", lambda x, weight, residual: (x, residual, None, weight, 1e-6, 0.0, True, False)),
    ("rms_norm_forward", "gated rms_norm", lambda x, weight, gate: (x, None, gate, weight, 1e-6, 0.0, True, False)),
    *(("rope", "rope", lambda q, k, i=i: (q, k, *TABLE, 32, i)) for i in (False, True)),
    ("gated_activation", "swiglu", lambda gate, up: (gate, up, "gelu_tanh")),
    ("tiled_gated_mlp", "gated_mlp in tiles", lambda x, *w: (x, *([m] for m in w), PLAIN.number, "silu", 4, True)),
    ("qkv_convolution", "qkv_convolution", lambda x, weight: ([x], weight, G, H, K, segments_of([20, 5]))),
    ("delta_rule", "delta_rule", lambda *x: (*x, segments_of([100, 70]), True)),
    ("delta_rule", "delta_rule", lambda *x: (*(t[:, :20] for t in x[:5]), x[5][:1], None, False)),
])  # fmt: skip
def test_custom_operations(operation, name, rest, device):
    inputs = [x.requires_grad_() for x in OPERATIONS[name].inputs()]
    torch.library.opcheck(getattr(torch.ops.fathom, operation), rest(*inputs))
