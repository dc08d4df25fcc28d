import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import linear
from kernels.gated_mlp import gated_mlp
from kernels.linear import PLAIN, Linear
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.parts import Part, part_of
from kernels.qkv_attention import QKVParameters, qkv_attention
from tests.kernels.compare import DTYPES, compare_with_float64, outputs_and_gradients, random
from tests.storage_counter import StorageCounter


class _Pieces(torch.autograd.Function):
    """Calls the pieces of a part, differentiably, with memory for their results where `given` is
    True."""

    @staticmethod
    def forward(ctx, part, given, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.part, ctx.given, ctx.bias_dtype = part, given, None if bias is None else bias.dtype
        return part.forward(
            part.factor(x),
            part.factor(weight),
            bias,
            out=x.new_empty(len(x), len(weight)) if given else None,
        )

    @staticmethod
    def backward(ctx, dy):
        (x, weight), part = ctx.saved_tensors, ctx.part
        given = {"out": torch.empty_like(x)} if ctx.given else {}
        dx = part.input_gradient(part.factor(dy), part.transpose(part.factor(weight)), **given)
        given = {"out": torch.empty_like(weight)} if ctx.given else {}
        d_weight = part.weight_gradient(
            *(part.transpose(part.factor(each)) for each in (dy, x)), **given
        )
        return (
            None,
            None,
            dx,
            d_weight,
            None if ctx.bias_dtype is None else dy.sum(0, dtype=ctx.bias_dtype),
        )


@dataclass(frozen=True)
class Rounded(Linear):
    """Rounds factors to `bits` bits of mantissa. Its products are not `Linear`'s."""

    bits: int

    def _round(self, x):
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**self.bits).round() / 2**self.bits, exponent)

    def __call__(self, x, weight, bias=None):
        return _Pieces.apply(self, False, x.reshape(-1, x.shape[-1]), weight, bias).unflatten(
            0, x.shape[:-1]
        )

    def factor(self, x):
        return self._round(x)


def inputs_of(M, K, N, dtype=torch.float32, has_bias=False, seed=0):
    shapes = [(M, K), (N, K), (N,)] if has_bias else [(M, K), (N, K)]
    return [random(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def compare(inputs, given):
    compare_with_float64(
        F.linear, lambda x, w, b=None: _Pieces.apply(PLAIN, given, x, w, b), inputs
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 37, 11), (33, 64, 128)])
def test_pieces_match_float64(shape, given, has_bias, dtype, device, poisoned_memory):
    compare(inputs_of(*shape, dtype, has_bias), given)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    M=st.integers(1, 40), K=st.integers(1, 40), N=st.integers(1, 40), given=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 100),
)  # fmt: skip
def test_property_pieces_match_float64(M, K, N, given, has_bias, dtype, seed):
    compare(inputs_of(M, K, N, dtype, has_bias, seed), given)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_call_is_pytorchs(has_bias, device):
    x, *rest = inputs_of(6, 37, 11, has_bias=has_bias)
    x = x.view(2, 3, 37)
    expected = outputs_and_gradients(F.linear, [x, *rest])
    assert all(map(torch.equal, outputs_and_gradients(PLAIN, [x, *rest]), expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_added_to_what_is_there(dtype, device):
    """Checks that a float32 total of a weight's gradient is never rounded to the factors' dtype."""
    dy, x, weight = (
        random(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(9, 11), (9, 37), (11, 37)])
    )
    total = random(11, 37, seed=3)
    expected = total.double() + dy.double().T @ x.double()
    assert PLAIN.weight_gradient(dy.t(), x.t(), out=total, accumulate=True) is total
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    assert PLAIN.weight_gradient(dy.t(), x.t(), out=total) is total
    torch.testing.assert_close(total.double(), dy.double().T @ x.double(), rtol=1e-5, atol=1e-5)

    dx = random(9, 37, seed=4, dtype=dtype)
    expected = dx.double() + dy.double() @ weight.double()
    assert PLAIN.input_gradient(dy, weight.t(), out=dx, accumulate=True) is dx
    torch.testing.assert_close(dx, expected.to(dtype))


def test_small_products_are_not_lost_in_a_float32_total(device):
    """Sums a thousand products of one row, all terms of one sign. A bfloat16 sum would stop growing
    at 256 terms."""
    dy, x = (random(1000, 8, seed=i, dtype=torch.bfloat16).abs() for i in range(2))
    total = torch.zeros(8, 8, device=device)
    for dy_row, x_row in zip(dy.split(1), x.split(1)):
        PLAIN.weight_gradient(dy_row.t(), x_row.t(), out=total, accumulate=True)
    exact = dy.double().T @ x.double()
    assert ((total.double() - exact).abs() <= 1e-4 * exact).all()


def test_pieces_are_bitwise_equal_in_two_runs(device):
    inputs = inputs_of(33, 64, 128, torch.bfloat16, has_bias=True)
    first, second = (
        outputs_and_gradients(functools.partial(_Pieces.apply, PLAIN, True), inputs)
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_a_cpu_copies_some_rows_at_a_time(monkeypatch):
    """A gradient of bfloat16 logits is added to float32 by copies of 16 rows; 1,024 x 64 elements
    have 1,024 rows."""
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(64, width, generator=generator).bfloat16() for width in (1024, 8))
    for accumulate in (False, True):
        peaks, results = [], []
        for elements in (16 * 64, 2**24):
            monkeypatch.setattr(linear, "COPIED_ELEMENTS", elements)
            total = torch.ones(1024, 8)
            with StorageCounter() as counter:
                counter.known.update(tensor.untyped_storage() for tensor in (dy, x, total))
                PLAIN.weight_gradient(dy.t(), x.t(), out=total, accumulate=accumulate)
            peaks.append(counter.peak)
            results.append(total)
        expected = dy.double().t() @ x.double() + accumulate
        assert all((total - expected).abs().max() < 1e-4 for total in results)
        assert peaks[0] < 0.1 * 4 * dy.numel() < peaks[1]


def test_equal_parts_have_one_number():
    assert Linear() == PLAIN and Linear().number == PLAIN.number
    assert Rounded(5).number == Rounded(5).number != Rounded(6).number != PLAIN.number
    assert all(part_of(part.number) == part for part in (PLAIN, Rounded(5), Rounded(6)))
    assert isinstance(PLAIN, Part)


def test_the_mlp_has_all_its_products_from_its_part(device):
    inputs = [
        random(*shape, seed=i) for i, shape in enumerate([(2, 7, 16), (24, 16), (24, 16), (16, 24)])
    ]
    plain = outputs_and_gradients(gated_mlp, inputs)
    untiled, tiled = (
        outputs_and_gradients(
            functools.partial(gated_mlp, linear=Rounded(3), tile_size=tile_size), inputs
        )
        for tile_size in (None, 4)
    )
    torch.testing.assert_close(tiled, untiled)
    assert all(0.01 < (a - b).norm() / b.norm() < 0.5 for a, b in zip(untiled, plain))


class Refusing(Linear):
    """Makes no product for the gradient of a weight."""

    def weight_gradient(self, dy_t, x_t, **options):
        raise AssertionError("a product for the gradient of a weight")


@pytest.mark.parametrize("at_a_time", [None, 1])
def test_no_product_is_made_for_the_gradient_of_a_frozen_weight(at_a_time):
    """Checks the MLP in tiles and attention by heads: the input's gradient is the one beside
    trained weights.

    On the CPU, where attention takes float32.
    """
    on_cpu = functools.partial(random, device="cpu")
    B, T, G, K, D, F_ = 2, 7, 2, 16, 24, 48
    x = on_cpu(B, T, D)
    mlp = [on_cpu(*shape, seed=i) for i, shape in enumerate([(F_, D), (F_, D), (D, F_)], start=1)]
    qkvo = [
        on_cpu(*shape, seed=i) / 5
        for i, shape in enumerate([(4 * K, D), (G * K, D), (G * K, D), (D, 4 * K)])
    ]
    biases = [on_cpu(len(weight), seed=9) for weight in qkvo[:3]]

    def attention(x, q, k, v, o, *biases, **options):
        return qkv_attention(
            x, QKVParameters([q, k, v], [*biases], [], 1e-6, K), o, None, None, **options
        )

    for function, weights, knob in (
        (gated_mlp, mlp, "tile_size"),
        (attention, [*qkvo, *biases], "heads_at_a_time"),
    ):
        trained = outputs_and_gradients(
            functools.partial(function, **{knob: at_a_time}), [x, *weights]
        )
        frozen = outputs_and_gradients(
            lambda x: function(x, *weights, linear=Refusing(), **{knob: at_a_time}),  # noqa: B023
            [x],
        )
        assert all(map(torch.equal, frozen, trained[:2]))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_head_has_all_its_products_from_its_part(reduction, device):
    x, head = random(2, 7, 16, dtype=torch.float64), random(53, 16, seed=1, dtype=torch.float64)
    target = torch.randint(53, (2, 7), generator=torch.Generator().manual_seed(0)).to(device)
    target[0, 2] = -100

    def chunked(x, head, linear):
        options = {"reduction": reduction, "chunk_size": 4, "impl": "torch"}
        return linear_cross_entropy(x, head, target, linear=linear, **options)

    def whole(x, head):
        logits = Rounded(3)(x, head).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(), reduction=reduction)

    def results(function, **options):
        leaves = [t.clone().requires_grad_() for t in (x, head)]
        loss = function(*leaves, **options)
        return [loss.flatten(), *torch.autograd.grad(loss.sum(), leaves)]

    plain, rounded = results(chunked, linear=PLAIN), results(chunked, linear=Rounded(3))
    torch.testing.assert_close(rounded, results(whole))
    assert all(0.001 < (a - b).norm() / b.norm() < 0.5 for a, b in zip(rounded, plain))
