import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from kernels import fp8, torch_internals
from kernels.fp8 import (
    FP8,
    FP8_LINEAR,
    FP8_TYPE,
    LARGEST,
    LONGEST_ROW,
    check_fp8,
    quantize_rows,
    transpose_values,
)
from kernels.gated_activation import gated_activation
from kernels.gated_mlp import ACTIVATIONS, gated_mlp
from kernels.linear import PLAIN
from kernels.mixed import Mixed
from kernels.parts import part_of
from kernels.qkv_attention import QKVParameters, qkv_attention
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DEVICE, DTYPES, outputs_and_gradients, random

_ROWS = {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "row_stride": "i32"}
_TRANSPOSE = {
    "values_ptr": "*fp8e4nv",
    "scales_ptr": "*fp32",
    "largest_ptr": "*fp32",
    "output_ptr": "*fp8e4nv",
}
_TRANSPOSE |= dict.fromkeys(("M", "K", "output_columns"), "i32")
_ACTIVATION = dict.fromkeys(("gate_ptr", "up_ptr", "d_hidden_ptr"), "*bf16") | dict.fromkeys(
    ("gate_stride", "up_stride"), "i64"
)
_ACTIVATION |= {f"{name}_ptr": "*fp8e4nv" for name in ("values", "d_gate", "d_up", "hidden")}
_ACTIVATION |= {f"{name}scales_ptr": "*fp32" for name in ("", "d_gate_", "d_up_", "hidden_")}
KERNELS_TO_COMPILE = [
    *(
        KernelToCompile(
            f"_quantize_{name}_kernel",
            _ACTIVATION,
            sizes | {"ACTIVATION": act},
            8,
            least_capability=89,
        )
        for name in ("activation", "activation_gradients")
        for act, sizes in zip(
            ACTIVATIONS, ({"F": 9728, "WIDTHS": (8192, 2048)}, {"F": 1024, "WIDTHS": (1024,)})
        )
    ),
    KernelToCompile(
        "_quantize_rows_kernel",
        _ROWS,
        {"K": 9728, "WIDTHS": (16384,)},
        num_warps=8,
        least_capability=89,
    ),
    KernelToCompile(
        "_transpose_kernel", _TRANSPOSE, {"TILE_M": 128, "TILE_K": 64}, least_capability=89
    ),
]
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # products on a GPU are bfloat16
ROUNDING = 2**-4  # largest relative error of a number in FP8, which has three bits after the first


def weight_gradient(dy, x, **options):
    return FP8_LINEAR.weight_gradient(FP8_LINEAR.transpose(dy), FP8_LINEAR.transpose(x), **options)


def exact_in_fp8(M, K, dtype, seed=0):
    """Returns a matrix that quantising does not change, with rows of unlike magnitude, and its
    transposing neither."""
    values = random(M, K, seed=seed).to(FP8_TYPE).float().clamp(-2, 2)
    values[values.abs() < 2**-3] = 0
    values[:, 0] = LARGEST / 128
    return (values * 2.0 ** (torch.arange(M, device=values.device) % 7 - 3)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (70, 130), (3, 1000)])
def test_what_fp8_can_hold_is_held(shape, dtype, device, poisoned_memory):
    x = exact_in_fp8(*shape, dtype)
    for impl in ("triton", "torch"):
        values, scales = quantize_rows(x, impl=impl)
        assert values.is_contiguous() and (values.dtype, scales.shape) == (FP8_TYPE, (shape[0], 1))
        assert torch.equal(values.float() * scales, x.float())
        values_t, scale = transpose_values(values, scales, impl=impl)
        assert values_t.is_contiguous() and values_t.shape == (shape[1], -(-shape[0] // 16) * 16)
        assert torch.equal(values_t[:, : shape[0]].float() * scale, x.t().float())
        assert not values_t[:, shape[0] :].float().any()


@pytest.mark.parametrize("shape", [(300, 1280), (130, 9728), (1, 16), (17, 48)])
def test_kernels_round_as_pytorch_does(shape, device):
    """Rows of all magnitudes, from those that vanish beside the largest to some that do not."""
    x = (
        random(*shape, dtype=torch.bfloat16)
        * 2.0 ** (torch.arange(shape[0], device=device) % 40 - 30)[:, None]
    )
    found, expected = (quantize_rows(x.bfloat16(), impl=impl) for impl in ("triton", "torch"))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected))
    found, expected = (transpose_values(*found, impl=impl) for impl in ("triton", "torch"))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected))


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_scales_are_powers_of_two_that_use_the_range(impl, device):
    x = torch.tensor([1.0, 448, 449, 1e-30, 3e38, 448 * 2.0**-40])[:, None].expand(6, 16).to(device)
    values, scales = quantize_rows(x, impl=impl)
    assert (torch.frexp(scales)[0] == 0.5).all() and (values.float().abs() <= LARGEST).all()
    assert (values.float().abs().amax(1) > LARGEST / 2 - 16).all()


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_rows_of_zeros_and_of_what_is_not_finite(impl, device):
    x = torch.ones(4, 16, device=device)
    x[0], x[2, 3], x[3, 5] = 0, torch.nan, torch.inf
    values, scales = quantize_rows(x, impl=impl)
    product = values.float() * scales
    torch.testing.assert_close(product[:3], x[:3], rtol=0, atol=0, equal_nan=True)
    assert product[3].isnan().any()
    for rows, is_nan in (
        ([0, 1], []),
        ([0, 1, 2], [3]),
        ([0, 1, 3], [*range(16)]),
    ):  # infinity scales all by itself
        values_t, scale = transpose_values(values[rows], scales[rows], impl=impl)
        product = values_t.float() * scale
        assert product.isnan().any(1).nonzero().flatten().tolist() == is_nan


@pytest.mark.parametrize(("linear", "needed"), [
    *((FP8("triton"), needed) for needed in (range(4), (0, 2), (3,))),
    (Mixed(PLAIN, FP8("triton"), FP8("triton")), range(4)),
    (Mixed(dx=FP8("triton")), range(4)),
])  # fmt: skip
def test_an_mlp_has_the_bits_that_it_has_where_the_activation_is_written(
    linear, needed, device, poisoned_memory
):  # fmt: skip
    """Rows of unlike magnitude; few, many and few again, of widths that are powers of two and
    others."""

    def parts(x, gate, up, down, activation):
        gate, up = linear.maps(x, [gate, up])
        return linear(gated_activation(gate, up, activation, "triton"), down)

    D = 16
    for rows, F, activation in (((2, 3), D, "silu"), ((9,), 3 * D, "silu"), ((1,), D, "gelu_tanh")):
        shapes = (*rows, D), (F, D), (F, D), (D, F)
        inputs = [random(*shape, seed=i, dtype=DTYPE) for i, shape in enumerate(shapes)]
        inputs[0] *= 2.0 ** (torch.arange(inputs[0].numel() // D, device=device) % 9 - 4).view(
            *rows, 1
        ).to(DTYPE)
        found = []
        ours = (
            functools.partial(gated_mlp, linear=linear, impl="triton", tile_size=size)
            for size in (None, 5)
        )
        for function in (parts, *ours):
            tensors = [x.clone().requires_grad_(i in needed) for i, x in enumerate(inputs)]
            y = function(*tensors, activation=activation)
            y.backward(random(*y.shape, seed=9, dtype=DTYPE))
            found.append([y, *(x.grad for x in tensors)])
        for i, (expected, whole, tiled) in enumerate(zip(*found)):
            assert (
                (expected is None)
                == (whole is None)
                == (tiled is None)
                == (i > 0 and i - 1 not in needed)
            )
            assert expected is None or torch.equal(whole, expected)
            assert expected is None or (tiled - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("linear", [FP8("triton"), Mixed(dx=FP8("triton"), d_weight=FP8("triton"))])
def test_under_compile_and_checkpoint(linear, device):
    def mlp(*inputs):
        return 2 * gated_mlp(*inputs, linear=linear, impl="triton")

    for function, shapes in (
        (linear, ((5, 16), (48, 16))),
        (mlp, ((5, 16), (48, 16), (48, 16), (16, 48))),
    ):
        inputs = [random(*shape, seed=i, dtype=DTYPE) for i, shape in enumerate(shapes)]
        torch._dynamo.reset()
        is_traced = torch_internals.untraced_in_8_bits(function) is function
        compiled = torch.compile(function, fullgraph=is_traced, backend="aot_eager")
        plain, *ours = (
            outputs_and_gradients(each, inputs)
            for each in (
                function,
                compiled,
                functools.partial(checkpoint, function, use_reentrant=False),
            )
        )
        assert all(torch.equal(a, b) for found in ours for a, b in zip(found, plain))


def test_an_mlp_at_once_keeps_its_input_gate_and_up(device):
    x, *weights = (
        random(*shape, dtype=DTYPE).requires_grad_()
        for shape in ((9, 16), (48, 16), (48, 16), (16, 48))
    )
    for linear, elements in (
        (FP8("triton"), 9 * (16 + 1)),
        (Mixed(dx=FP8("triton"), d_weight=FP8("triton")), 0),
    ):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, k=kept: k.update({t.data_ptr(): t}) or t, lambda t: t
        ):
            gated_mlp(x, *weights, linear=linear, impl="triton")
        new = [
            t for pointer, t in kept.items() if pointer not in {t.data_ptr() for t in (x, *weights)}
        ]
        assert sum(t.numel() for t in new) == 2 * 9 * 48 + elements


def test_long_rows_are_not_held_in_registers(device, monkeypatch):
    """A program has 65,536 registers. 25,600 columns are the 32B's."""
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launches.append(options)

    monkeypatch.setattr(fp8, "_quantize_activation_gradients_kernel", Kernel())
    zeros = lambda F: torch.zeros(1, F, dtype=DTYPE, device=device)  # noqa: E731
    for F in (48, 3072, 9728, 17_408, 20_480, 25_600, LONGEST_ROW):
        launches.clear()
        made = FP8("triton").activation_gradients(*(zeros(F) for _ in range(3)), "silu", True, True)
        assert [len(factor.values[0]) for factor in made] == 3 * [F] and len(launches) == (
            F <= 20_480
        )
        for options in launches:
            assert F <= sum(options["WIDTHS"]) < 2 * F
            assert 32 * options["num_warps"] * options["maxnreg"] <= 65_536


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_that_is_not_finite_is_quantized_as_where_it_is_written(activation, device):
    gate, up, d = (random(6, 48, seed=i, dtype=DTYPE) for i in range(3))
    gate[1], up[2, 5], gate[3, 7], d[4, 1], d[5] = 0, torch.nan, torch.inf, -torch.inf, 1e-30
    linear = FP8("triton")
    found = [linear.activated(gate, up, activation, True)]
    found += linear.activation_gradients(d.clone(), gate, up, activation, True, in_place=False)
    expected = [PLAIN.activated(gate, up, activation, True)]
    expected += PLAIN.activation_gradients(d, gate, up, activation, True, in_place=False)
    for ours, written in zip(found, map(linear.factor, expected)):
        torch.testing.assert_close(
            ours.values.float(), written.values.float(), rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(ours.scales, written.scales)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    M=st.integers(1, 40),
    K=st.integers(1, 4),
    N=st.integers(1, 4),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_property_products_are_within_the_rounding_of_their_factors(M, K, N, has_bias, seed):
    """Each product of two factors is off by (1 + 2^-4)^2 - 1 at most, and products add up with both
    signs.

    A number far below the largest of its row, or of its matrix where the matrix is transposed, is
    off by 2^-10 of FP8's range at most.
    """
    x, weight = (
        random(M, 16 * K, seed=seed, dtype=DTYPE),
        random(16 * N, 16 * K, seed=seed + 1, dtype=DTYPE),
    )
    bias = [random(16 * N, seed=seed + 2, dtype=DTYPE)] if has_bias else []
    ours, plain = (
        outputs_and_gradients(linear, [x, weight, *bias]) for linear in (FP8_LINEAR, PLAIN)
    )
    dy = random(*ours[0].shape, seed=1, dtype=DTYPE)
    for found, expected, (a, b) in zip(ours, plain, ((x, weight.t()), (dy, weight), (dy.t(), x))):
        a, b = a.abs().float(), b.abs().float()
        least = 2**-9 / LARGEST * (a.amax() * b.sum(0) + b.amax() * a.sum(1, keepdim=True))
        most = (2 * ROUNDING + ROUNDING**2) * (a @ b) + least
        assert ((found - expected).abs() <= most + 0.02 * expected.abs()).all()
    assert all(map(torch.equal, ours[3:], plain[3:]))  # the bias's gradient is not in FP8


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_weight_gradient_sums_no_more_rows_at_once_than_tensor_cores_do_well(
    dtype, device, monkeypatch
):
    sums, product = [], fp8._product
    monkeypatch.setattr(
        fp8, "_product", lambda a, *b: sums.append(a.values.shape[1]) or product(a, *b)
    )
    for M in (300, 16, 65, 64, 1, 300):
        dy, x = (FP8_LINEAR.factor(random(M, 32, seed=seed, dtype=DTYPE)) for seed in (0, 1))
        for adds in (False, True) if dtype else (False,):
            out = None if dtype is None else torch.ones(32, 32, dtype=dtype, device=device)
            expected = weight_gradient(
                dy, x, out=None if out is None else out.clone(), accumulate=adds
            )
            monkeypatch.setattr(fp8, "ROWS_SUMMED", 64)
            sums.clear()
            found = weight_gradient(dy, x, out=out, accumulate=adds)
            monkeypatch.setattr(fp8, "ROWS_SUMMED", 2**14)
            assert sum(sums) >= M and max(sums) <= 64
            assert found.dtype == expected.dtype and (out is None or found is out)
            torch.testing.assert_close(
                found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())
            )


@pytest.mark.gpu
def test_a_weight_gradient_of_a_million_rows_that_add_up():
    """Summed at once by the tensor cores, it was 0.33 off."""
    x, weight = (
        random(2**20 + 16, 512, dtype=DTYPE),
        random(256, 512, seed=1, dtype=DTYPE) / 512**0.5,
    )
    dy = x @ weight.t()
    found = weight_gradient(FP8_LINEAR.factor(dy), FP8_LINEAR.factor(x)).float()
    expected = sum((a.t().float() @ b.float() for a, b in zip(dy.split(2**16), x.split(2**16))))
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_a_large_row_costs_other_rows_nothing(device):
    x, weight = random(8, 64, dtype=DTYPE), random(32, 64, seed=1, dtype=DTYPE)
    expected = FP8_LINEAR(x, weight)
    x[3] *= 1e4
    found = FP8_LINEAR(x, weight)
    rows = torch.arange(8, device=device) != 3
    assert torch.equal(found[rows], expected[rows])


def test_gradients_of_rows_without_a_target_take_no_range(device):
    """Rows of zeros scale to nothing: the others' weight gradient is what it is alone."""
    x, dy = random(48, 32, dtype=DTYPE), 1e-9 * random(48, 16, seed=1, dtype=DTYPE)
    alone = weight_gradient(FP8_LINEAR.factor(dy[16:]), FP8_LINEAR.factor(x[16:]))
    dy[:16] = 0
    found = weight_gradient(FP8_LINEAR.factor(dy), FP8_LINEAR.factor(x))
    torch.testing.assert_close(found, alone, rtol=0.05, atol=0.05 * float(alone.abs().max()))
    assert alone.any()


def test_several_maps_of_one_input_are_each_alone(device):
    x, *weights = (
        random(*shape, seed=i, dtype=DTYPE)
        for i, shape in enumerate([(2, 5, 32), (16, 32), (48, 32)])
    )
    biases = [random(len(w), seed=3, dtype=DTYPE) for w in weights]
    found = outputs_and_gradients(
        lambda x, *p: tuple(FP8_LINEAR.maps(x, p[:2], p[2:])), [x, *weights, *biases]
    )
    expected = outputs_and_gradients(
        lambda x, *p: (FP8_LINEAR(x, p[0], p[2]), FP8_LINEAR(x, p[1], p[3])), [x, *weights, *biases]
    )
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    frozen = outputs_and_gradients(lambda p: FP8_LINEAR(x, p), weights[:1])
    assert torch.equal(frozen[1], outputs_and_gradients(FP8_LINEAR, [x, weights[0]])[2])


def test_tiles_and_heads_at_a_time_compute_the_same(device):
    """Rows are scaled one by one, so that no product depends on what is computed with it."""
    mlp = [
        random(*shape, seed=i, dtype=DTYPE)
        for i, shape in enumerate([(2, 7, 16), (48, 16), (48, 16), (16, 48)])
    ]
    untiled, tiled = (
        outputs_and_gradients(
            functools.partial(gated_mlp, linear=FP8_LINEAR, tile_size=tile_size), mlp
        )
        for tile_size in (None, 4)
    )
    for a, b in zip(untiled, tiled):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(a.detach().abs().max()))
    B, T, H, G, K, D = 2, 7, 4, 2, 16, 32
    shapes = (B, T, D), (H * K, D), (G * K, D), (G * K, D), (D, H * K)
    inputs = [
        random(*shape, seed=i, dtype=DTYPE) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)
    ]

    def attention(x, q, k, v, o, **options):
        parameters = QKVParameters([q, k, v], [], [], 1e-6, K)
        return qkv_attention(x, parameters, o, None, None, **options)

    together, one, plain = (
        outputs_and_gradients(functools.partial(attention, **options), inputs)
        for options in ({"linear": FP8_LINEAR}, {"linear": FP8_LINEAR, "heads_at_a_time": 1}, {})
    )
    torch.testing.assert_close(together[0], one[0])
    for a, b, c in zip(together, one, plain):
        # Backward scales dq, dk and dv together or by head.
        assert (a - b).norm() <= 0.08 * c.norm() and 0 < (a - c).norm() <= 0.15 * c.norm()


def test_two_runs_are_bitwise_equal_and_sums_are_kept(device):
    x, weight = random(20_000, 32, dtype=DTYPE), random(48, 32, seed=1, dtype=DTYPE)
    first, second = (outputs_and_gradients(FP8_LINEAR, [x, weight]) for _ in range(2))
    assert all(map(torch.equal, first, second))
    dy, total = random(20_000, 48, seed=2, dtype=DTYPE), random(20_000, 32, seed=3, dtype=DTYPE)
    factors = FP8_LINEAR.factor(dy), FP8_LINEAR.transpose(FP8_LINEAR.factor(weight))
    expected = total + FP8_LINEAR.input_gradient(*factors)
    assert FP8_LINEAR.input_gradient(*factors, out=total, accumulate=True) is total
    assert torch.equal(total, expected)
    factors, total = (FP8_LINEAR.factor(dy), FP8_LINEAR.factor(x)), random(48, 32, seed=4)
    expected = total + weight_gradient(*factors)
    assert weight_gradient(*factors, out=total, accumulate=True) is total
    # Each of two products is rounded to DTYPE, and their sum is, where it is a gradient of its own.
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[DTYPE]
    torch.testing.assert_close(total, expected, rtol=0, atol=rounding * float(expected.abs().max()))


def test_equal_parts_have_one_number():
    assert FP8().number == FP8_LINEAR.number != PLAIN.number != FP8("torch").number
    assert part_of(FP8_LINEAR.number) == FP8_LINEAR


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 2560, 6144), (33, 9728, 2560), (1, 16, 16)])
def test_a_gpu_multiplies_what_a_cpu_does(shape, device):
    M, K, N = shape
    x, weight = random(M, K, dtype=torch.bfloat16), random(N, K, seed=1, dtype=torch.bfloat16)
    bias = random(N, seed=2, dtype=torch.bfloat16)
    factors = FP8_LINEAR.factor(x), FP8_LINEAR.factor(weight)

    def on_cpu(factor):
        return factor._replace(values=factor.values.cpu(), scales=factor.scales.cpu())

    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    assert FP8_LINEAR.forward(*factors, bias, out=out) is out
    dy = FP8_LINEAR.factor(random(M, N, seed=3, dtype=torch.bfloat16))
    found = (
        out,
        FP8_LINEAR.input_gradient(dy, FP8_LINEAR.transpose(factors[1])),
        weight_gradient(dy, factors[0]),
    )
    x8, weight8, dy8 = on_cpu(factors[0]), on_cpu(factors[1]), on_cpu(dy)
    expected = (
        FP8_LINEAR.forward(x8, weight8, bias.cpu()),
        FP8_LINEAR.input_gradient(dy8, FP8_LINEAR.transpose(weight8)),
        weight_gradient(dy8, x8),
    )
    for ours, exact in zip(found, expected):
        assert (ours.cpu() - exact).float().norm() <= 0.008 * exact.float().norm()
    with pytest.raises(ValueError, match="products in FP8 on CUDA need bfloat16"):
        FP8_LINEAR(x.half(), weight.half())


def test_refuses_widths_and_rows(device):
    for width in (100, LONGEST_ROW + 16):
        with pytest.raises(
            ValueError,
            match=f"multiples of 16 up to 32,768, hidden_size is {width:,}; use linear bf16",
        ):
            check_fp8(torch.device("cpu"), {"head_dim": 64, "hidden_size": width})
    check_fp8(device, {"hidden_size": 2560})
    with pytest.raises(
        ValueError, match="rows in FP8 have 32,768 elements at most, got 32,784; use linear bf16"
    ):
        quantize_rows(torch.zeros(1, LONGEST_ROW + 16, device=device), impl="triton")
