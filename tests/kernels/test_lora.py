import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.fp8 import FP8
from kernels.gated_mlp import gated_mlp
from kernels.linear import PLAIN
from kernels.lora import LORA, LoRA, lora_reference, merged
from kernels.parts import Adapted
from kernels.qkv_attention import QKVParameters, qkv_attention
from tests.kernels.compare import DTYPES, compare_with_float64, random


class Checking(type(LORA)):
    """Makes no product as large as a matrix for a gradient."""

    def weight_gradient(self, dy_t, x_t, **options):
        assert min(len(dy_t), len(x_t)) <= RANK * 3, "a product for the gradient of a frozen matrix"
        return super().weight_gradient(dy_t, x_t, **options)


RANK, CHECKING = 3, Checking()


def adapters(*matrices, rank=RANK, seed=50):
    """Returns A and B of each matrix, one after the other."""
    shapes = [
        shape for N, K in (matrix.shape for matrix in matrices) for shape in ((rank, K), (N, rank))
    ]
    like = {"dtype": matrices[0].dtype, "device": matrices[0].device}
    return [
        random(*shape, seed=seed + i, **like) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)
    ]


def adapted(matrices, tensors):
    return [Adapted(*each) for each in zip(matrices, tensors[::2], tensors[1::2])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 37, 11), (33, 64, 128)])
def test_a_map_matches_float64(shape, has_bias, dtype, device, poisoned_memory):
    M, K, N = shape
    matrix = random(N, K, seed=1, dtype=dtype) / K**0.5
    bias = [random(N, seed=2, dtype=dtype)] if has_bias else []

    def reference(x, a, b, *bias):
        return lora_reference(x, matrix.to(x.dtype), a, b, *bias)

    def map_of(x, a, b, *bias):
        return CHECKING(x, Adapted(matrix, a, b), *bias)

    compare_with_float64(reference, map_of, [random(M, K, dtype=dtype), *adapters(matrix), *bias])


def test_a_map_makes_each_thin_product_once():
    """Counts 3 products of y, and 5 of backward: dy B, both of dx, dA and dB."""
    matrix = random(64, 32)
    x, a, b = (t.requires_grad_() for t in (random(16, 32, seed=5), *adapters(matrix)))

    class Counter(TorchDispatchMode):
        counted = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.counted += function.name().split("::")[1].split(".")[0] in (
                "mm",
                "addmm",
                "addmm_",
            )
            return function(*arguments, **(options or {}))

    with Counter() as counter:
        y = LORA(x, Adapted(matrix, a, b))
        assert counter.counted == 3
        y.sum().backward()
    assert counter.counted == 8


def mlp_case(D, F_, dtype):
    matrices = [
        random(*shape, seed=i, dtype=dtype) / 4
        for i, shape in enumerate([(F_, D), (F_, D), (D, F_)])
    ]

    def reference(x, *tensors):
        def mapped(x, i):
            return lora_reference(x, matrices[i].to(x.dtype), *tensors[2 * i : 2 * i + 2])

        return mapped(F.silu(mapped(x, 0)) * mapped(x, 1), 2)

    def ours(x, *tensors, **options):
        return gated_mlp(x, *adapted(matrices, tensors), linear=CHECKING, **options)

    return reference, ours, [random(2, 7, D, seed=9, dtype=dtype), *adapters(*matrices)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_size", [None, 1, 4, 14, 20])
def test_the_mlp_matches_float64(tile_size, dtype, device, poisoned_memory):
    reference, ours, inputs = mlp_case(16, 24, dtype)
    compare_with_float64(reference, functools.partial(ours, tile_size=tile_size), inputs)


def attention_case(B, T, G, group, K, D, targets, dtype=torch.float32):
    """Attention whose projections of `targets`, of q, k, v and o, are adapted; on the CPU, where it
    takes float32."""
    like = {"dtype": dtype, "device": "cpu"}
    H = G * group
    shapes = (H * K, D), (G * K, D), (G * K, D), (D, H * K)
    matrices = [random(*shape, seed=i, **like) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    biases = [random(len(matrix), seed=20 + i, **like) for i, matrix in enumerate(matrices[:3])]
    chosen = [i for i, name in enumerate("qkvo") if name in targets]

    def weights(tensors, weight_of):
        pairs = dict(zip(chosen, zip(tensors[::2], tensors[1::2])))
        return [weight_of(m, *pairs[i]) if i in pairs else m for i, m in enumerate(matrices)]

    def run(x, *tensors, weight_of=Adapted, linear=CHECKING, **options):
        *qkv, o = weights(tensors, weight_of)
        cast = [
            [t.to(x.dtype) for t in part] if linear is PLAIN else part for part in (qkv, biases)
        ]
        o = o.to(x.dtype) if linear is PLAIN else o
        return qkv_attention(
            x, QKVParameters(*cast, [], 1e-6, K), o, None, None, linear=linear, **options
        )

    reference = functools.partial(
        run, weight_of=lambda m, a, b: m.to(a.dtype) + b @ a, linear=PLAIN
    )
    x = (
        random(B, T, D, seed=9, **like) / 2
    )  # Scores are near 1: gradients of a sharp softmax lose digits.
    return reference, run, [x, *adapters(*(matrices[i] for i in chosen))]


@pytest.mark.parametrize("heads_at_a_time", [None, 1, 2])
@pytest.mark.parametrize("targets", ["qkvo", "qv", "k", "o"])
def test_attention_matches_float64(targets, heads_at_a_time, poisoned_memory):
    reference, ours, inputs = attention_case(2, 13, 2, 2, 16, 24, targets)
    compare_with_float64(
        reference, functools.partial(ours, heads_at_a_time=heads_at_a_time), inputs, units=4
    )


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    T=st.integers(1, 20), G=st.integers(1, 4), group=st.integers(1, 3), D=st.integers(1, 30),
    targets=st.sets(st.sampled_from("qkvo"), min_size=1), data=st.data(),
)  # fmt: skip
def test_property_attention_matches_float64(T, G, group, D, targets, data):
    n = data.draw(st.sampled_from([n for n in range(1, G + 1) if G % n == 0]))
    reference, ours, inputs = attention_case(1, T, G, group, 8, D, targets)
    compare_with_float64(reference, functools.partial(ours, heads_at_a_time=n), inputs, units=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_weights_are_rounded_once(dtype, device):
    matrix = random(37, 11, dtype=dtype)
    a, b = adapters(matrix)
    exact = matrix.double() + b.double() @ a.double()
    error = (merged(Adapted(matrix, a, b)).double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps * (0.51 * exact.abs() + 1e-3) + 1e-6).all()


def test_rows_and_transposes_of_an_adapted_weight():
    matrix = random(11, 7)
    weight = Adapted(matrix, *adapters(matrix))
    assert len(weight) == 11 and weight.shape == (11, 7)
    torch.testing.assert_close(merged(weight[2:5]), merged(weight)[2:5])
    torch.testing.assert_close(merged(weight.t()), merged(weight).t())


ON_FP8 = LoRA(FP8(impl="torch"))


def outputs_and_gradients(function, inputs, like=None):
    """Returns y and the gradients of inputs, for the same dy in the dtype of `like` or of y."""
    inputs = [t.clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    torch.manual_seed(0)
    dy = torch.randn_like(y if like is None else like).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * dy).sum(), inputs)]


def beside(x, matrix, a, b):
    """FP8's own product with a frozen matrix, and the adapter's term beside it."""
    return ON_FP8.base(x, matrix) + (x @ a.t()) @ b.t()


@pytest.mark.parametrize("tile_size", [None, 4, 14])
def test_the_mlp_on_fp8_is_fp8s_products_and_adapters_beside_them(tile_size):
    matrices = [
        random(*shape, seed=i, device="cpu") / 4
        for i, shape in enumerate([(48, 16), (48, 16), (16, 48)])
    ]

    def composed(x, *tensors):
        gate, up = (beside(x, matrices[i], *tensors[2 * i : 2 * i + 2]) for i in range(2))
        return beside(F.silu(gate) * up, matrices[2], *tensors[4:])

    def ours(x, *tensors):
        return gated_mlp(
            x, *adapted(matrices, tensors), linear=ON_FP8, tile_size=tile_size, impl="torch"
        )

    inputs = [random(2, 7, 16, seed=9, device="cpu"), *adapters(*matrices)]
    for found, expected in zip(
        *(outputs_and_gradients(function, inputs) for function in (ours, composed))
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
@pytest.mark.parametrize("targets", ["qkvo", "qv", "o"])
def test_attention_on_fp8_is_near_attention_on_plain_products(targets, heads_at_a_time):
    """Rounding to 8 bits is all that differs: three bits behind the point, through four products
    and a softmax."""
    _, ours, inputs = attention_case(2, 13, 2, 2, 16, 32, targets)
    on_fp8, plain = (
        outputs_and_gradients(
            functools.partial(ours, linear=linear, heads_at_a_time=heads_at_a_time), inputs
        )
        for linear in (ON_FP8, CHECKING)
    )
    for found, expected in zip(on_fp8, plain):
        assert 1e-4 < (found - expected).norm() / expected.norm() < 0.2


def test_attention_on_fp8_is_the_same_some_heads_at_a_time():
    _, ours, inputs = attention_case(2, 13, 2, 2, 16, 32, "qkvo")
    at_once, one = (
        outputs_and_gradients(functools.partial(ours, linear=ON_FP8, heads_at_a_time=n), inputs)
        for n in (None, 1)
    )
    for found, expected in zip(one, at_once):
        torch.testing.assert_close(
            found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())
        )


def test_a_frozen_weight_on_fp8_keeps_no_input():
    x, matrix = random(8, 16, device="cpu").requires_grad_(), random(32, 16, seed=1, device="cpu")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ON_FP8(x, matrix).sum().backward()
    assert [t.shape for t in saved] == [matrix.shape]


def exact_mlp(matrices, x, *tensors):
    gate, up = (
        lora_reference(x, matrices[i].to(x.dtype), *tensors[2 * i : 2 * i + 2]) for i in range(2)
    )
    return lora_reference(F.silu(gate) * up, matrices[2].to(x.dtype), *tensors[4:])


def mlp_on_fp8(matrices, tile_size, x, *tensors):
    return gated_mlp(x, *adapted(matrices, tensors), linear=LoRA(FP8()), tile_size=tile_size)


@pytest.mark.gpu
@pytest.mark.parametrize("tile_size", [None, 100])
def test_the_mlp_on_fp8_matches_float64_on_a_gpu(tile_size):
    """Every gradient of unlike batches within the rounding of factors of 8 bits, the same bits
    twice."""
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    shapes = (768, 256), (768, 256), (256, 768)
    matrices = [random(*shape, seed=i, **like) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    for rows in (512, 7, 300):
        inputs = [random(rows, 256, seed=rows, **like), *adapters(*matrices, rank=16)]
        ours = functools.partial(mlp_on_fp8, matrices, tile_size)
        found, again = (outputs_and_gradients(ours, inputs) for _ in range(2))
        exact = functools.partial(exact_mlp, matrices)
        expected = outputs_and_gradients(exact, [t.double() for t in inputs], like=found[0])
        for one, other, theirs in zip(found, again, expected):
            assert torch.equal(one, other) and (one.double() - theirs).norm() / theirs.norm() < 0.1
