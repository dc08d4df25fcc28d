import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DTYPES, compare_with_float64, outputs_and_gradients, random

GEMMA = {"weight_offset": 1.0, "cast_before_weight": False}

_POINTERS = {"weight_ptr": "*bf16", "rstd_ptr": "*fp32"}
_ROWS = {"num_rows": "i32", "outer_stride": "i64", "inner_stride": "i64", "weight_offset": "fp32"}
_FORWARD = {"input_ptr": "*bf16", "normed_ptr": "*bf16", "eps": "fp32", **_POINTERS, **_ROWS}
_BACKWARD = {
    "d_normed_ptr": "*bf16",
    "x_ptr": "*bf16",
    "dx_ptr": "*bf16",
    "partial_ptr": "*fp32",
    **_POINTERS,
    **_ROWS,
}
_HIDDEN = {"INNER": 1, "D": 2560, "BLOCK_ROWS": 1, "BLOCK_D": 4096}
_HEADS = {"INNER": 32, "D": 128, "BLOCK_D": 128}
_NO_GATE = {"gate_ptr": None, "d_gate_ptr": None}
KERNELS_TO_COMPILE = [
    KernelToCompile(
        "_rms_norm_forward_kernel",
        _FORWARD | {"residual_ptr": "*bf16", "total_ptr": "*bf16"},
        _HIDDEN | {"CAST_BEFORE_WEIGHT": True, "gate_ptr": None},
    ),
    *(
        KernelToCompile(
            "_rms_norm_forward_kernel",
            _FORWARD | gate,
            _HEADS
            | {
                "BLOCK_ROWS": 16,
                "CAST_BEFORE_WEIGHT": True,
                "residual_ptr": None,
                "total_ptr": None,
            }
            | without,
        )
        for gate, without in (({}, {"gate_ptr": None}), ({"gate_ptr": "*bf16"}, {}))
    ),
    KernelToCompile(
        "_rms_norm_backward_kernel",
        _BACKWARD | {"d_total_ptr": "*bf16"},
        _HIDDEN | {"NUM_STAGES": 4, **_NO_GATE},
        num_warps=8,
    ),
    *(
        KernelToCompile(
            "_rms_norm_backward_kernel",
            _BACKWARD | gate,
            _HEADS | {"BLOCK_ROWS": 32, "NUM_STAGES": stages, "d_total_ptr": None} | without,
            num_warps=8,
        )
        for gate, stages, without in (
            ({}, 4, _NO_GATE),
            ({"gate_ptr": "*bf16", "d_gate_ptr": "*bf16", "weight_ptr": "*fp32"}, 3, {}),
        )
    ),
]


def compare(x, weight, residual=None, **options):
    def call(function, x, weight, residual=None):
        return function(x, weight, residual=residual, **options)

    compare_with_float64(
        functools.partial(call, rms_norm_reference),
        functools.partial(call, functools.partial(rms_norm, impl="triton")),
        [x, weight] if residual is None else [x, weight, residual],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (2, 3, 2560), (2, 3, 5, 128), (70, 128)])
def test_matches_float64(shape, options, dtype, device, poisoned_memory):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], seed=9, dtype=dtype)
    compare(x, weight, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 2560)])
def test_residual_matches_float64(shape, options, dtype, device, poisoned_memory):
    x, residual = (random(*shape, seed=seed, dtype=dtype) for seed in (0, 8))
    compare(x, random(shape[-1], seed=9, dtype=dtype), residual, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (2, 3, 5, 128), (70, 128)])
def test_gate_matches_float64(shape, dtype, device, poisoned_memory):
    """The weight is float32, as a gated delta net's; the gate reaches far to both sides."""
    x, gate = random(*shape, dtype=dtype), 9 * random(*shape, seed=8, dtype=dtype)

    def call(function, x, weight, gate):
        return function(x, weight, gate=gate)

    compare_with_float64(
        functools.partial(call, rms_norm_reference),
        functools.partial(call, functools.partial(rms_norm, impl="triton")),
        [x, random(shape[-1], seed=9), gate],
    )


@pytest.mark.parametrize("other", ["residual", "gate", None])
@pytest.mark.parametrize("shape", [(5, 37), (70, 3, 128)])
def test_backward_writes_over_the_gradient_of_a_result_that_is_read_once(shape, other, device):
    tensors = [random(*shape, seed=seed).requires_grad_() for seed in range(2)]
    weight, gradients = (
        random(shape[-1], seed=2).requires_grad_(),
        [random(*shape, seed=3), random(*shape, seed=4)],
    )
    found = {}
    for read_once in (False, True):
        second = {other: tensors[1]} if other else {}
        results = rms_norm(tensors[0], weight, read_once=read_once, impl="triton", **second)
        results = results if other == "residual" else (results,)
        given = [gradient.clone() for gradient in gradients[: len(results)]]
        inputs = [*tensors[: 1 + (other is not None)], weight]
        found[read_once] = torch.autograd.grad(results, inputs, given, retain_graph=True)
        assert (found[read_once][0].data_ptr() == given[0].data_ptr()) == read_once
    assert all(map(torch.equal, found[True], found[False]))


@pytest.mark.parametrize("read_once", [False, True])
def test_has_no_second_derivative(read_once, device):
    x, weight, matrix = (
        random(5, 37).requires_grad_(),
        random(37, seed=1),
        random(4, 37, seed=2).requires_grad_(),
    )
    y = rms_norm(x, weight, read_once=read_once, impl="triton") @ matrix.t()
    with pytest.raises(RuntimeError, match="no second derivative"):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (dx + x).square().sum().backward()


def test_total_is_rounded_as_eager_would(device):
    x, residual = random(4, 64, dtype=torch.float16), random(4, 64, seed=1, dtype=torch.float16)
    weight = random(64, seed=2, dtype=torch.float16)
    normed, total = rms_norm(x, weight, residual=residual, impl="triton")
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, impl="triton"))


def test_heads_sliced_out_of_a_fused_projection(device):
    fused = random(2, 7, 12 * 32, dtype=torch.bfloat16)
    heads = fused[..., 4 * 32 : 10 * 32].unflatten(-1, (6, 32))  # [B, T, H, K], strided
    transposed = fused.unflatten(-1, (12, 32)).transpose(
        1, 2
    )  # no pair of strides describes its rows
    weight = random(32, seed=1, dtype=torch.bfloat16)
    for x in (heads, transposed):
        strided = outputs_and_gradients(lambda x, w: rms_norm(x, w, impl="triton"), [x, weight])
        contiguous = outputs_and_gradients(
            lambda x, w: rms_norm(x, w, impl="triton"), [x.contiguous(), weight]
        )
        for s, c in zip(strided, contiguous):
            torch.testing.assert_close(s, c)


def test_rounds_as_transformers_does(device):
    """Compares PyTorch's path bit for bit. Triton's sums in another order and may be off by two
    last units."""
    gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    x, weight = random(5, 64, dtype=torch.float16), random(64, seed=1, dtype=torch.float16)
    for module, options in ((qwen3.Qwen3RMSNorm(64), {}), (gemma2.Gemma2RMSNorm(64), GEMMA)):
        module.weight.data = weight
        expected = module(x)
        assert torch.equal(rms_norm(x, weight, impl="torch", **options), expected)
        difference = (rms_norm(x, weight, impl="triton", **options) - expected).abs()
        assert (difference <= 2 * torch.finfo(x.dtype).eps * expected.abs()).all()


@pytest.mark.parametrize(("x", "weight", "residual", "message"), [
    (torch.ones(2, 8), torch.ones(4), None, r"weight must be \[8\]"),
    (torch.ones(2, 8), torch.ones(8), torch.ones(3, 8), r"residual must be \[2, 8\]"),
    (torch.ones(2, 8), torch.ones(8), torch.ones(2, 8).bfloat16(), "bfloat16"),
    (torch.ones(2, 8).double(), torch.ones(8), None, "float64"),
    (torch.ones(2, 8193), torch.ones(8193), None, "8192 elements, got 8193"),
])  # fmt: skip
def test_refused(x, weight, residual, message, device):
    x, weight, residual = (t if t is None else t.to(device) for t in (x, weight, residual))
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, residual=residual, impl="triton")


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), d=st.integers(8, 300),
    dtype=st.sampled_from(DTYPES),
    with_residual=st.booleans(),
    options=st.sampled_from([{}, GEMMA, {"weight_offset": 0.5}, {"eps": 1e-3}]),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_property_matches_float64(shape, d, dtype, with_residual, options, seed):
    x, weight = random(*shape, d, seed=seed, dtype=dtype), random(d, seed=seed + 1, dtype=dtype)
    residual = random(*shape, d, seed=seed + 2, dtype=dtype) if with_residual else None
    compare(x, weight, residual, **options)


@pytest.mark.gpu(gib=20)
@pytest.mark.parametrize(
    ("shape", "fused"),
    [((1, 900_000, 2560), 1), ((1, 400_000, 32, 128), 2)],
    ids=["hidden", "heads of a fused tensor"],
)
def test_past_2_to_the_31_elements(shape, fused, device):
    """Samples rows at both ends and around the 2^31st element."""
    *outer, d = shape
    storage = torch.randn(*outer[:-1], fused * outer[-1], d, dtype=torch.bfloat16, device=device)
    x = storage[..., : outer[-1], :].requires_grad_()
    assert max(i * s for i, s in zip(shape, x.stride())) > 2**31
    weight = torch.randn(d, dtype=torch.bfloat16, device=device).requires_grad_()
    output = rms_norm(x, weight)
    d_output = torch.randn_like(output)
    dx, d_weight = torch.autograd.grad(output, [x, weight], d_output)

    per_token = d * (outer[-1] if len(shape) == 4 else 1)
    sample = torch.tensor([0, 1, 2**31 // per_token // fused, shape[1] - 1], device=device)
    x_s, d_s = x[0, sample].detach().double().requires_grad_(), d_output[0, sample].double()
    exact = rms_norm_reference(x_s, weight.detach().double())
    (dx_exact,) = torch.autograd.grad(exact, x_s, d_s)
    torch.testing.assert_close(output[0, sample].double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dx[0, sample].double(), dx_exact, rtol=2e-2, atol=2e-2)

    d_weight_exact = torch.zeros(d, dtype=torch.float64, device=device)
    for x_part, d_part in zip(x[0].detach().split(10_000), d_output[0].split(10_000)):
        x_part = x_part.double()
        x_hat = x_part * torch.rsqrt(x_part.square().mean(-1, keepdim=True) + 1e-6)
        d_weight_exact += (d_part.double() * x_hat).reshape(-1, d).sum(0)
    torch.testing.assert_close(d_weight.double(), d_weight_exact, rtol=1e-2, atol=1.0)
