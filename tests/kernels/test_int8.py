import functools

import pytest
import torch

from kernels.fp8 import FP8
from kernels.gated_mlp import gated_mlp
from kernels.int8 import INT8, LARGEST, rotate_rows, signs
from kernels.linear import PLAIN
from kernels.mixed import Mixed
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DEVICE, outputs_and_gradients, random

_ROTATE = {
    "x_ptr": "*bf16",
    "signs_ptr": "*bf16",
    "values_ptr": "*i8",
    "scales_ptr": "*fp32",
    "row_stride": "i32",
}
_PRODUCT = {
    "a_ptr": "*i8",
    "b_ptr": "*i8",
    "a_scales_ptr": "*fp32",
    "b_scales_ptr": "*fp32",
    "out_ptr": "*bf16",
}
_PRODUCT |= {"out_stride": "i32", "M": "i32"}
_MATRIX = {"N": 9728, "K": 2560, "BLOCK_M": 128, "GROUP": 8}
_WIDE, _NARROW = {"BLOCK_N": 256, "BLOCK_K": 128}, {"BLOCK_N": 128, "BLOCK_K": 64}
KERNELS_TO_COMPILE = [
    KernelToCompile(
        "_rotate_rows_kernel",
        _ROTATE,
        {"LEAST_SCALE": 1e-30, "K": 9728, "BLOCKS": 256},
        num_warps=8,
    ),
    KernelToCompile("_product_kernel", _PRODUCT, _MATRIX | _WIDE, num_warps=8, least_capability=90),
    KernelToCompile("_product_kernel", _PRODUCT, _MATRIX | _NARROW, num_warps=8),
]
DTYPE = (
    torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
)  # products in FP8 on a GPU are bfloat16


def draw(M, K, seed=0):
    """Rows of unlike magnitude and a channel of outliers."""
    x = random(M, K, seed=seed) * 2.0 ** (torch.arange(M, device=DEVICE) % 9 - 4)[:, None]
    x[:, 3] *= 30
    return x.to(DTYPE)


@pytest.mark.parametrize(("M", "K"), [(1, 64), (70, 192), (5, 1088)])
def test_kernels_round_as_pytorch_does(M, K, device, poisoned_memory):
    x = draw(M, K)
    (values, scales), (expected, expected_scales) = (
        rotate_rows(x, impl=impl) for impl in ("triton", "torch")
    )
    torch.testing.assert_close(scales, expected_scales, rtol=1e-4, atol=0)
    assert (
        values.int() - expected.int()
    ).abs().max() <= 1  # sums in another order, which halves may decide
    assert (values != expected).float().mean() < 0.01
    assert values.abs().amax(1).eq(LARGEST).all()
    rotated = (values * scales[:, None]).unflatten(1, (-1, 64)) @ signs(device, torch.float32) / 8
    assert (rotated.flatten(1) - x.float()).norm() <= 0.02 * x.float().norm()


@pytest.mark.parametrize(("M", "K", "N"), [(1, 64, 16), (130, 192, 48), (5, 1088, 304)])
def test_products_err_by_a_third_of_fp8s(M, K, N, device, poisoned_memory):
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(1, N, seed=2)[0]
    exact = PLAIN.forward(x.double(), weight.double(), bias.double())
    found = {
        linear: linear.forward(linear.factor(x), linear.factor(weight), bias)
        for linear in (INT8("triton"), INT8("torch"), FP8("torch"))
    }
    triton, reference, fp8 = found.values()
    assert (triton - reference).norm() <= {torch.float32: 5e-3, torch.bfloat16: 1e-2}[
        DTYPE
    ] * reference.norm()
    assert (triton - exact).norm() < max(0.4 * (fp8 - exact).norm(), 0.004 * exact.norm())
    part = INT8("triton")
    out = torch.empty(M, N + 3, dtype=DTYPE, device=device)[:, :N]
    assert part.forward(part.factor(x), part.factor(weight), bias, out=out) is out and torch.equal(
        out, triton
    )


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_rows_of_zeros_stay_zeros(impl, device):
    x, weight = torch.zeros(3, 64, dtype=DTYPE, device=device), draw(16, 64)
    part = INT8(impl)
    x[1] = weight[0]
    y = part.forward(part.factor(x), part.factor(weight))
    assert not y[[0, 2]].any() and y[1].all()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_give_no_finite_products(value, impl, device):
    x, weight, part = draw(3, 128), draw(16, 128, seed=1), INT8(impl)
    x[1, 70] = value
    y = part.forward(part.factor(x), part.factor(weight))
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


def test_forward_in_int8_and_backward_in_fp8_whole_and_in_tiles(device):
    linear = Mixed(INT8(), FP8(), FP8())
    inputs = [
        random(*shape, seed=i, dtype=DTYPE) / 8
        for i, shape in enumerate([(2, 7, 64), *2 * [(128, 64)], (64, 128)])
    ]
    whole, tiled, fp8, plain = (
        outputs_and_gradients(functools.partial(gated_mlp, **options), inputs)
        for options in (
            {"linear": linear},
            {"linear": linear, "tile_size": 4},
            {"linear": FP8()},
            {},
        )
    )
    for a, b, of_fp8, exact in zip(whole, tiled, fp8, plain):
        assert (a - b).norm() <= 0.04 * exact.norm()
        assert (a - exact).norm() <= 0.9 * (of_fp8 - exact).norm()
    assert all(
        map(
            torch.equal,
            whole,
            outputs_and_gradients(functools.partial(gated_mlp, linear=linear), inputs),
        )
    )


def test_refuses_rows_and_backward(device):
    for K in (80, 32_832):
        with pytest.raises(
            ValueError, match=f"multiples of 64 elements up to 32,768, got {K:,}; use linear bf16"
        ):
            rotate_rows(torch.zeros(1, K, device=device))
    with pytest.raises(TypeError, match="int8 makes y alone"):
        INT8()(draw(2, 64), draw(16, 64).requires_grad_())
