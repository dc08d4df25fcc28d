"""Sums of many terms of one sign, where what arithmetic of few bits drops does not cancel as among
random signs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.attention.attend import attention
from kernels.attention.full import FULL, attention_reference
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.convolution import qkv_convolution, qkv_convolution_reference
from kernels.delta_net import delta_rule
from kernels.experts import expert_mlp, expert_mlp_reference
from kernels.fp8 import FP8_LINEAR
from kernels.gated_mlp import gated_mlp, gated_mlp_reference
from kernels.linear import PLAIN
from kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from kernels.mixed import linear_maps
from kernels.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.compare import DEVICE

IS_GPU = DEVICE.type == "cuda"
ROWS = 131_072 if IS_GPU else 64  # tokens of a batch
LONG = 9728 if IS_GPU else 64  # the 4B's longest row
FEW = 4096 if IS_GPU else 32
TOKENS = 8192 if IS_GPU else 128
MOST_LOST = 0.004  # share of a sum, for factors of 16 bits or more
# factors of few numbers may round to one side; fast accumulation lost 0.04 to 0.23
MOST_LOST_IN_8_BITS = 0.01


def positive(*shape, seed, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.rand(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def positive_like(x, seed):
    return positive(x.numel(), seed=seed, dtype=torch.float32).view(x.shape).to(x.dtype)


def lost(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The share of `exact` that `found` lacks: 1 - <found, exact> / <exact, exact>."""
    found, exact = found.detach(), exact.detach()
    return float(1 - (found.double() * exact).sum() / exact.square().sum())


def outputs_and_gradients(function, inputs):
    """Outputs, and gradients of all inputs for output gradients that are positive."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    arriving = [positive_like(out, seed=90 + i) for i, out in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, arriving)]


def check_nothing_is_lost(function, reference, inputs, most=MOST_LOST):
    exact = outputs_and_gradients(reference, [x.double() for x in inputs])
    found = outputs_and_gradients(function, inputs)
    shares = [lost(a, b) for a, b in zip(found, exact)]
    assert all(abs(share) < most for share in shares), shares


def most_lost(name):
    return MOST_LOST if name == "bf16" else MOST_LOST_IN_8_BITS


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8-all"])
@pytest.mark.parametrize("sizes", [(FEW, LONG, 256), (FEW, 256, LONG), (ROWS, 256, 320)])
def test_a_linear_map_of_long_rows_and_of_many(name, sizes):
    """y sums over the input's width, dx over the output's, d_weight and d_bias over rows."""
    rows, inner, outer = sizes
    inputs = positive(rows, inner, seed=0), positive(outer, inner, seed=1), positive(outer, seed=2)
    check_nothing_is_lost(linear_maps()[name], F.linear, inputs, most_lost(name))


@pytest.mark.gpu(gib=8)
def test_a_map_in_float32():
    inputs = (
        positive(FEW, LONG, seed=0, dtype=torch.float32),
        positive(256, LONG, seed=1, dtype=torch.float32),
    )
    check_nothing_is_lost(PLAIN, F.linear, inputs)


@pytest.mark.gpu(gib=8)
def test_a_weight_gradient_of_channels_with_means():
    """An eighth of the channels of x and dy have means of 3 and 1 standard deviations: 0.815 of
    right, once."""
    x, dy = (
        torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        for seed in (0, 1)
    )
    x[:, :64] += 3
    dy[:, :64] += 1
    x, dy = x.bfloat16(), dy.bfloat16()
    factors = (FP8_LINEAR.transpose(FP8_LINEAR.factor(matrix)) for matrix in (dy, x))
    found = FP8_LINEAR.weight_gradient(*factors)[:64, :64]
    assert abs(lost(found, dy[:, :64].double().t() @ x[:, :64].double())) < MOST_LOST_IN_8_BITS


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize("tile_size", [None, 4096])
@pytest.mark.parametrize("name", ["bf16", "fp8-all"])
def test_an_mlp(name, tile_size):
    weights = (
        positive(256, 128, seed=1, scale=0.1),
        positive(256, 128, seed=2),
        positive(128, 256, seed=3),
    )
    inputs = positive(ROWS // 2, 128, seed=0), *weights
    function = partial(gated_mlp, linear=linear_maps()[name], tile_size=tile_size)
    check_nothing_is_lost(function, gated_mlp_reference, inputs, most_lost(name))


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize("tile_size", [None, 4096])
def test_experts(tile_size):
    rows = ROWS // 2
    experts = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
    experts[:100] = 1
    inputs = (
        positive(rows, 128, seed=0),
        positive(2, 256, 128, seed=1, scale=0.1),
        positive(2, 128, 128, seed=2),
        positive(rows, 1, seed=3),
    )
    check_nothing_is_lost(
        lambda x, gate_up, down, weights: expert_mlp(
            x, gate_up, down, experts, weights, tile_size=tile_size
        ),
        lambda x, gate_up, down, weights: expert_mlp_reference(x, gate_up, down, experts, weights),
        inputs,
    )


@pytest.mark.gpu(gib=8)
def test_the_chunked_loss():
    """The word of all targets has a row of zeros, so that no term of a sum is negative but in its
    own gradient."""
    hidden, head = positive(ROWS // 2, 128, seed=0), positive(512, 128, seed=1, scale=0.1)
    head[0] = 0
    targets = torch.zeros(ROWS // 2, dtype=torch.int64, device=DEVICE)
    check_nothing_is_lost(
        lambda x, weight: linear_cross_entropy(x, weight, targets, reduction="sum"),
        lambda x, weight: linear_cross_entropy_reference(x, weight, targets, reduction="sum"),
        (hidden, head),
    )


@pytest.mark.gpu(gib=8)
def test_a_norm():
    inputs = positive(ROWS, 256, seed=0), positive(256, seed=1)
    check_nothing_is_lost(rms_norm, rms_norm_reference, inputs)


@pytest.mark.gpu(gib=8)
def test_the_delta_rule():
    """A state that hardly forgets adds up the values of many tokens."""
    shape = 1, TOKENS, 1, 64
    q, k = (
        F.normalize(positive(*shape, seed=seed, dtype=torch.float32), dim=-1).bfloat16()
        for seed in (0, 1)
    )
    v = positive(1, TOKENS, 2, 64, seed=2)
    gates = (
        torch.full((1, TOKENS, 2), -1e-5, device=DEVICE),
        torch.full((1, TOKENS, 2), 1e-3, device=DEVICE),
    )
    check_nothing_is_lost(delta_rule, partial(delta_rule, impl="torch"), (q, k, v, *gates))


@pytest.mark.gpu(gib=8)
def test_the_convolution():
    inputs = positive(1, ROWS // 2, 4 * 64, seed=0), positive(4 * 64, 4, seed=1)
    sizes = {"G": 1, "H": 2, "K": 64}
    check_nothing_is_lost(
        partial(qkv_convolution, **sizes), partial(qkv_convolution_reference, **sizes), inputs
    )


@pytest.mark.gpu(gib=12)
@pytest.mark.parametrize(
    "kind", [FULL, Window(4096), Sparse(128, dense_below=0)], ids=["full", "window", "sparse"]
)
def test_attention(kind):
    """Scores are alike, and sparse attention chooses all blocks: an output is a mean of thousands
    of values."""
    q = positive(1, TOKENS, 2, 64, seed=0, scale=0.01)
    k, v = (positive(1, TOKENS, 1, 64, seed=seed) for seed in (1, 2))
    reference = attention_reference if kind is FULL else partial(attention, kind=kind, impl="torch")
    arriving = positive(1, TOKENS, 2, 64, seed=3)

    def values(function, *tensors):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        out = function(q, k, v)
        return out, *torch.autograd.grad(out, [v], arriving.to(out.dtype))

    exact = values(reference, q.double(), k.double(), v.double())
    found = values(partial(attention, kind=kind), q, k, v)
    shares = [lost(a, b) for a, b in zip(found, exact)]
    assert all(abs(share) < MOST_LOST for share in shares), shares


@pytest.mark.gpu(gib=8)
def test_the_embedding_of_one_word():
    from model import Embedding

    embedding = Embedding(16, 64).to(DEVICE, torch.bfloat16)
    ids = torch.ones(1, ROWS, dtype=torch.int64, device=DEVICE)
    arriving = positive(1, ROWS, 64, seed=0)
    embedding(ids).backward(arriving)
    assert abs(lost(embedding.weight.grad[1], arriving.double().sum((0, 1)))) < MOST_LOST
