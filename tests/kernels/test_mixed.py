import functools

import pytest
import torch

from kernels.fp8 import FP8
from kernels.gated_mlp import gated_mlp
from kernels.linear import PLAIN
from kernels.lora import LoRA
from kernels.mixed import Mixed
from kernels.parts import Adapted
from kernels.qkv_attention import QKVParameters, qkv_attention
from tests.kernels.compare import DEVICE, outputs_and_gradients, random

DTYPE = (
    torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
)  # products in FP8 on a GPU are bfloat16
FP8_ALONE = FP8("torch")
GRADIENTS = Mixed(dx=FP8_ALONE, d_weight=FP8_ALONE)
PRODUCTS = ("y", "dx", "d_weight")


def assert_near(found, expected):
    """Within the rounding of one sum, far below FP8's error of 0.04."""
    assert (found - expected).norm() <= {torch.float32: 1e-5, torch.bfloat16: 0.01}[
        DTYPE
    ] * expected.norm()


def draw(*shapes):
    return [
        random(*shape, seed=i, dtype=DTYPE) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("product", PRODUCTS)
def test_each_product_is_its_own_maps(product):
    """Biases and their gradients are no products."""
    inputs = draw((2, 20, 48), (32, 48), (32,))
    mixed, plain, fp8 = (
        outputs_and_gradients(linear, inputs)
        for linear in (Mixed(**{product: FP8_ALONE}), PLAIN, FP8_ALONE)
    )
    for name, found, exact, rounded in zip(PRODUCTS, mixed, plain, fp8):
        assert not torch.equal(rounded, exact)
        assert_near(found, rounded if name == product else exact)
    assert_near(mixed[3], plain[3])


def test_several_maps_of_one_input_and_frozen_weights():
    x, *weights = draw((2, 5, 32), (16, 32), (48, 32))
    found, expected = (
        outputs_and_gradients(lambda x, *w, linear=linear: tuple(linear.maps(x, w)), [x, *weights])
        for linear in (GRADIENTS, Mixed(*3 * [FP8_ALONE]))
    )
    plain = outputs_and_gradients(lambda x, *w: tuple(PLAIN.maps(x, w)), [x, *weights])
    for i, of_map in enumerate(found):
        assert_near(of_map, (plain if i < 2 else expected)[i])
    [_, frozen] = outputs_and_gradients(lambda x: GRADIENTS(x, weights[0]), [x])
    assert_near(frozen, outputs_and_gradients(lambda x: FP8_ALONE(x, weights[0]), [x])[1])


@pytest.mark.parametrize("product", PRODUCTS)
def test_tiles_and_heads_at_a_time_mix_as_whole_layers_do(product):
    linear = Mixed(**{product: FP8_ALONE})
    mlp = draw((2, 7, 16), (48, 16), (48, 16), (16, 48))
    B, T, H, G, K, D = 2, 7, 4, 2, 16, 32
    attention = draw((B, T, D), (H * K, D), (G * K, D), (G * K, D), (D, H * K))

    def attend(x, q, k, v, o, **options):
        return qkv_attention(x, QKVParameters([q, k, v], [], [], 1e-6, K), o, None, None, **options)

    for function, name, inputs in (
        (gated_mlp, "tile_size", mlp),
        (attend, "heads_at_a_time", attention),
    ):
        whole, parted, plain = (
            outputs_and_gradients(functools.partial(function, **options), inputs)
            for options in ({"linear": linear}, {"linear": linear, name: 1}, {})
        )
        for a, b, exact in zip(whole, parted, plain):
            assert (a - b).norm() <= 0.08 * exact.norm() and (
                a - exact
            ).norm() <= 0.15 * exact.norm()
        is_plain = (parted[0] - plain[0]).norm() < 0.015 * plain[0].norm()
        assert is_plain == (product != "y")


def test_adapters_beside_products_of_both_kinds():
    x, matrix, a, b = draw((20, 48), (32, 48), (4, 48), (32, 4))
    found, plain, fp8 = (
        outputs_and_gradients(
            lambda x, a, b, base=base: LoRA(base)(x, Adapted(matrix, a, b)), [x, a, b]
        )
        for base in (Mixed(dx=FP8_ALONE), PLAIN, FP8_ALONE)
    )
    for i in (0, 2, 3):
        assert_near(found[i], plain[i])
    assert_near(found[1], fp8[1])
    assert not torch.equal(fp8[1], plain[1])


def test_an_adapted_y_in_bf16_has_the_bits_that_it_has_without_fp8():
    x, matrix, a, b = (each.bfloat16() for each in draw((20, 48), (32, 48), (4, 48), (32, 4)))
    found, plain = (LoRA(base)(x, Adapted(matrix, a, b)) for base in (GRADIENTS, PLAIN))
    assert torch.equal(found, plain)


def test_names_say_what_is_rounded():
    assert (
        LoRA(GRADIENTS).name == "lora on y bf16, dx fp8"
    )  # the adapters' own gradients are in bf16
    assert GRADIENTS.name == "y bf16, dx fp8, d_weight fp8"
    assert LoRA(FP8_ALONE).name == "lora on fp8" and LoRA(PLAIN).name == "lora"


def test_rates_are_of_each_product():
    rates = ("products", "fp8 products", "fp8 weights' gradients")
    assert LoRA(GRADIENTS).rates == GRADIENTS.rates == rates
