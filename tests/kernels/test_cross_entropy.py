import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cross_entropy import cross_entropy, cross_entropy_reference
from kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DEVICE, STRIDES, strided
from tests.storage_counter import StorageCounter

module = importlib.import_module(
    "kernels.cross_entropy"
)  # the package has the function by this name

_ROW = {
    "target_ptr": "*i64", "statistics_ptr": "*fp32", "logits_stride": "i64",
    "gradient_stride": "i64",
    "scale_stride": "i32", "num_rows": "i32", "num_columns": "i32", "first_class": "i32",
}  # fmt: skip
_CONSTANTS = {
    "scale_ptr": None, "gradient_ptr": None,
    "IGNORE_INDEX": -100, "SOFTCAP": None, "HAS_STATISTICS": False, "VECTOR": module.VECTOR,
}  # fmt: skip
_GRADIENT_IN_PLACE = {"logits_ptr": "*bf16", "gradient_ptr": "*bf16"}


def _row_kernel(pointers: dict, itemsize: int = 2, **constants) -> KernelToCompile:
    configuration = module.launch_configuration(151936, itemsize)
    num_warps = configuration.pop("num_warps")
    constants = {**_CONSTANTS, **configuration, **constants}
    constants = {name: value for name, value in constants.items() if name not in pointers}
    kernel = KernelToCompile("_cross_entropy_kernel", {**_ROW, **pointers}, constants, num_warps)
    return kernel if pointers == _GRADIENT_IN_PLACE else replace(kernel, most_capability=80)


KERNELS_TO_COMPILE = [
    _row_kernel(_GRADIENT_IN_PLACE),
    _row_kernel({"logits_ptr": "*bf16"}),
    _row_kernel(_GRADIENT_IN_PLACE | {"scale_ptr": "*fp32"}, HAS_STATISTICS=True),
    _row_kernel(
        {p: "*fp32" for p in ("logits_ptr", "gradient_ptr", "scale_ptr")}, itemsize=4, SOFTCAP=30.0
    ),
    KernelToCompile(
        "_entropy_kernel",
        {
            "logits_ptr": "*bf16",
            "logits_stride": "i64",
            "statistics_ptr": "*fp32",
            "out_ptr": "*fp32",
            "num_rows": "i32",
            "num_columns": "i32",
        },
        {"SOFTCAP": None, "VECTOR": module.VECTOR, "BLOCK": 8192},
        num_warps=16,
    ),
    KernelToCompile(
        "_scale_rows_kernel",
        {
            "gradient_ptr": "*bf16",
            "gradient_stride": "i64",
            "scale_ptr": "*fp32",
            "scale_stride": "i32",
            "num_columns": "i32",
        },
        {"BLOCK": 8192},
        num_warps=16,
    ),
]

IMPLEMENTATIONS = ("torch", "triton")
# Casts to bf16 round on a GPU and in PyTorch. Triton's interpreter truncates, which doubles the
# error.
GRADIENT_FACTOR = 2 if torch.cuda.is_available() else 3


def _inputs(device, shape=(2, 5), vocab=2101, dtype=torch.float32, spread=3.0):
    """Makes logits that fill a block and part of another, and labels: one ignored, others at the
    blocks' edges."""
    torch.manual_seed(0)
    logits = (spread * torch.randn(*shape, vocab)).to(dtype).to(device)
    target = torch.randint(vocab, shape)
    target.view(-1)[:4] = torch.tensor([0, -100, vocab - 1, 2048 % vocab])
    return logits, target.to(device)


def _loss_and_gradient(function, logits, target, d_loss=1.0, **options):
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf * 1, target, **options)
    (loss * d_loss).sum().backward()
    return loss.detach().double(), leaf.grad.double()


def _error(actual, exact):
    return float((actual - exact).norm() / exact.norm().clamp(min=1e-30))


def _in_float64(options):
    return {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def _assert_as_exact_as_pytorch(
    logits, target, d_loss=1.0, impl="triton", inplace=False, slack=1e-6, **options
):
    exact_loss, exact = _loss_and_gradient(
        cross_entropy_reference, logits.double(), target, d_loss, **_in_float64(options)
    )
    torch_loss, torch_gradient = _loss_and_gradient(
        cross_entropy_reference, logits, target, d_loss, **options
    )
    loss, gradient = _loss_and_gradient(
        cross_entropy, logits, target, d_loss, impl=impl, inplace=inplace, **options
    )
    assert _error(loss, exact_loss) <= 3 * _error(torch_loss, exact_loss) + slack
    assert _error(gradient, exact) <= GRADIENT_FACTOR * _error(torch_gradient, exact) + slack


OPTIONS = [
    {}, {"reduction": "sum"}, {"denominator": 17}, {"softcap": 5.0}, {"ignore_index": 0},
    {"softcap": 5.0, "reduction": "none"}, {"weights": True},
    {"weights": True, "denominator": 17, "softcap": 5.0},
]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("dtype", "options"), [
    *((torch.float32, options) for options in OPTIONS),
    *((dtype, options) for dtype in (torch.bfloat16, torch.float16) for options in ({}, {"weights": True})),
])  # fmt: skip
def test_every_option_is_as_exact_as_pytorch(device, dtype, options, inplace, impl):
    logits, target = _inputs(device, dtype=dtype)
    if "ignore_index" in options:
        target[target == -100] = 7
    if "weights" in options:
        options = {**options, "weights": weights_of(target)}
    # 16-bit gradients that stand in the logits' place are rounded once more by a factor
    d_loss = 0.7 if dtype == torch.float32 else 1.0
    _assert_as_exact_as_pytorch(logits, target, d_loss, impl, inplace, **options)


def weights_of(target):
    """Weights above, below and at 0, fractions, and numbers that no 16 bits hold."""
    generator = torch.Generator().manual_seed(2)
    weights = (
        torch.randn(target.shape, generator=generator) + 1.0001
    )  # so that the sum does not cancel
    weights.view(-1)[2::5], weights.view(-1)[3::5] = 0.0, 1 / 3
    return weights.to(target.device)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_weights_of_1_change_no_bit_and_of_0_leave_nothing(device, inplace, impl):
    logits, target = _inputs(device, dtype=torch.bfloat16)
    options = {"impl": impl, "inplace": inplace}
    plain = _loss_and_gradient(cross_entropy, logits, target, **options)
    ones = _loss_and_gradient(
        cross_entropy, logits, target, weights=torch.ones_like(logits[..., 0]), **options
    )
    assert all(map(torch.equal, ones, plain))
    weights = weights_of(target).double()  # taken as float32
    _, gradient = _loss_and_gradient(cross_entropy, logits, target, weights=weights, **options)
    assert (
        gradient[weights == 0].eq(0).all()
        and gradient[(weights != 0) & (target != -100)].ne(0).any(-1).all()
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("spread", [0.0, 3.0, 1e4])
def test_entropy_of_flat_and_of_certain_rows(device, spread, impl):
    """log(2101) where all words are alike, 0 where one is certain; a word that cannot occur adds
    nothing."""
    logits, target = _inputs(device, spread=spread)
    logits[0, 2, 5:] = -torch.inf
    exact = cross_entropy_reference(logits.double(), target, return_entropy=True).entropy
    found = cross_entropy(logits, target, return_entropy=True, impl=impl).entropy
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6)
    assert found[target == -100].eq(0).all() and (spread or abs(found[1, 1].item() - 7.6502) < 1e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_incoming_gradient_of_each_row(device, inplace, impl):
    logits, target = _inputs(device)
    d_loss = torch.randn(target.shape, device=device)
    d_loss[0, 0] = 1.0  # the in-place scaling leaves this row alone
    _assert_as_exact_as_pytorch(logits, target, d_loss, impl, inplace, reduction="none")


@pytest.mark.parametrize("inplace", [False, True])
def test_fp16_gradient_of_a_scaled_mean_over_many_tokens_does_not_underflow(device, inplace):
    logits, target = _inputs(device, dtype=torch.float16)
    options = {"denominator": 2**20, "d_loss": 2.0**16}
    _, exact = _loss_and_gradient(cross_entropy_reference, logits.double(), target, **options)
    _, gradient = _loss_and_gradient(
        cross_entropy, logits, target, impl="triton", inplace=inplace, **options
    )
    of_label = exact.abs() > 1e-3
    assert of_label.sum() >= 8
    torch.testing.assert_close(gradient[of_label], exact[of_label], rtol=2e-3, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_certain_label_keeps_its_tiny_gradient_and_loss(device, impl):
    logits, target = _inputs(device, spread=1.0)
    logits.scatter_(-1, target.clamp(min=0)[..., None], 30.0)  # p(label) rounds to 1 in float32
    exact_loss, exact = _loss_and_gradient(cross_entropy_reference, logits.double(), target)
    loss, gradient = _loss_and_gradient(cross_entropy, logits, target, impl=impl)
    assert 0 < exact_loss < 1e-8
    torch.testing.assert_close(loss, exact_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("offset", [2.0**24, -(2.0**24)])
def test_an_offset_common_to_all_logits_changes_nothing(device, offset, impl):
    logits, target = _inputs(device, vocab=53)
    logits = 2 * logits.round()  # multiples of 2 stay exact after the offset
    loss, gradient = _loss_and_gradient(cross_entropy, logits, target, impl=impl)
    shifted_loss, shifted_gradient = _loss_and_gradient(
        cross_entropy, logits + offset, target, impl=impl
    )
    torch.testing.assert_close(shifted_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(shifted_gradient, gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_logits_of_minus_infinity_are_classes_that_cannot_occur(device, impl):
    """A label out of range makes the loss infinite."""
    logits, target = _inputs(device)
    logits[..., 5:2000] = -torch.inf
    target[(target >= 5) & (target < 2000)] = 3
    _assert_as_exact_as_pytorch(logits, target, impl=impl)
    target[0, 0] = logits.shape[-1]
    assert cross_entropy(logits, target, impl=impl) == torch.inf


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_all_labels_ignored_and_no_rows(device, inplace, impl):
    logits, target = _inputs(device)
    for rows in (logits, logits[:0]):
        ignored = torch.full_like(target[: len(rows)], -100)
        loss, gradient = _loss_and_gradient(
            cross_entropy, rows, ignored, impl=impl, inplace=inplace
        )
        assert loss == 0 and gradient.eq(0).all() and gradient.shape == rows.shape


def _whole_and_chunked(logits, target, **options):
    yield lambda: cross_entropy(logits, target, **options)
    yield lambda: linear_cross_entropy(
        logits, torch.eye(logits.shape[-1]).to(logits), target, **options
    )


@pytest.mark.parametrize("value", [0, -3, float("nan"), float("inf")])
def test_a_denominator_that_is_not_positive_is_refused(device, value):
    """Tries numbers and CPU tensors. The assertion of a CUDA tensor would end this process."""
    for number in (float(value), torch.tensor(value), torch.tensor([value], dtype=torch.float64)):
        for function in _whole_and_chunked(*_inputs(device, vocab=53), denominator=number):
            with pytest.raises(
                ValueError, match=f"denominator must be positive and finite, got {float(value)}"
            ):
                function()


def test_a_denominator_of_one_element_is_a_number_and_of_more_is_refused(device):
    inputs = _inputs(device, vocab=53)
    expected = cross_entropy(*inputs, denominator=7)
    for shape in ((), (1,), (1, 1)):
        for function in _whole_and_chunked(*inputs, denominator=torch.full(shape, 7)):
            torch.testing.assert_close(function(), expected)
    for function in _whole_and_chunked(*inputs, denominator=torch.tensor(7.0).expand(10)):
        with pytest.raises(ValueError, match="one number, got a tensor of shape"):
            function()


def test_checked_denominators_compile_in_one_graph():
    logits, target = _inputs("cpu", vocab=53)
    for function in _whole_and_chunked(logits, target, denominator=torch.tensor(7)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(), function())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_details(device, impl):
    logits, target = _inputs(device)
    options = {"return_details": True, "return_entropy": True, "weights": weights_of(target)}
    expected = cross_entropy_reference(logits, target, **options)
    for inplace in (False, True):
        details = cross_entropy(
            logits.clone().requires_grad_() * 1, target, inplace=inplace, impl=impl, **options
        )
        for value, wanted in zip(details, expected):
            torch.testing.assert_close(value.detach(), wanted)
        assert (
            details.per_token_loss.shape
            == details.log_sum_exp.shape
            == details.entropy.shape
            == target.shape
        )
        assert details.log_sum_exp[target == -100].eq(0).all()
        assert not details.log_sum_exp.requires_grad and not details.per_token_loss.requires_grad


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_without_inplace_the_logits_stay_and_backward_may_run_again(device, impl):
    logits, target = _inputs(device)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, impl=impl)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert leaf.equal(logits) and first.equal(second)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_inplace_needs_no_memory_and_refuses_a_second_backward(device, impl):
    logits, target = _inputs(device)
    activations = logits.clone().requires_grad_() * 1
    loss = cross_entropy(activations, target, impl=impl, inplace=True)
    (gradient,) = torch.autograd.grad(loss, activations, retain_graph=True)
    assert gradient.data_ptr() == activations.data_ptr()
    cross_entropy(
        leaf := logits.clone().requires_grad_(), target, impl=impl, inplace=True
    ).backward()
    assert leaf.grad.data_ptr() == leaf.data_ptr()
    with pytest.raises(RuntimeError, match="inplace=False"):
        torch.autograd.grad(loss, activations)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_another_user_of_overwritten_logits_gets_an_error_not_a_wrong_gradient(device, impl):
    logits, target = _inputs(device)
    activations = logits.clone().requires_grad_() * 1
    entropy = activations.square().sum()
    loss = cross_entropy(activations, target, impl=impl, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + entropy).backward()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_inplace_overwrites_nothing_where_no_gradient_is_asked_for(device, impl):
    logits, target = _inputs(device)
    before = logits.clone()
    expected = cross_entropy(logits, target, impl=impl)
    assert cross_entropy(logits, target, impl=impl, inplace=True) == expected
    with torch.no_grad():
        assert cross_entropy(logits.requires_grad_(), target, impl=impl, inplace=True) == expected
    assert logits.equal(before)


@pytest.mark.parametrize("layout", ["rows of a wider tensor", "transposed"])
def test_strided_logits(device, layout):
    logits, target = _inputs(device, vocab=130)
    strided = logits[..., :127] if layout == "rows of a wider tensor" else logits.mT.contiguous().mT
    target[target >= strided.shape[-1]] = 1
    assert not strided.is_contiguous()
    leaf = strided.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(leaf, target, impl="triton"), leaf)
    _, expected = _loss_and_gradient(cross_entropy_reference, strided.double(), target)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-7)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.sampled_from([(6,), (6, 1), (1, 6), (2, 3)]), of_target=st.sampled_from(STRIDES),
    reduction=st.sampled_from(["mean", "none"]), inplace=st.booleans(),
    impl=st.sampled_from(IMPLEMENTATIONS),
)  # fmt: skip
def test_strides_of_target(shape, of_target, reduction, inplace, impl):
    target = torch.tensor([2, 0, -100, 3, 1, 4], device=DEVICE).view(shape)
    logits = 3 * torch.randn(*shape, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    _assert_as_exact_as_pytorch(
        logits, strided(target, of_target), 1.0, impl, inplace, reduction=reduction
    )


@pytest.mark.parametrize("num_columns", [1, 127, 17000, 66000])
def test_every_launch_configuration(device, num_columns):
    logits, target = _inputs(device, shape=(1, 5), vocab=num_columns)
    target.clamp_(max=num_columns - 1)
    _assert_as_exact_as_pytorch(logits, target, reduction="sum")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_shards_of_the_classes(device, impl):
    logits, target = _inputs(device, shape=(10,), vocab=4202, dtype=torch.bfloat16)
    target[4] = 2101
    options = module.RowOptions(-100, 5.0, use_triton=impl == "triton")
    whole = torch.empty_like(logits)
    statistics = module.row_step(logits, target, options, module.Shard(None, 0), gradient=whole)

    shards = [(module.Shard(None, first), logits[:, first : first + 2101]) for first in (0, 2101)]
    own = [module.row_step(columns, target, options, shard) for shard, columns in shards]
    maximum = torch.maximum(own[0][0], own[1][0])
    torch.testing.assert_close(maximum, statistics[0])
    others = sum(s[1] * (s[0] - maximum).exp() for s in own)
    torch.testing.assert_close(others, statistics[1])
    torch.testing.assert_close(torch.maximum(own[0][2], own[1][2]), statistics[2])
    for shard, columns in shards:
        expected = whole[:, shard.first_class : shard.first_class + 2101].clone()
        module.row_step(columns, target, options, shard, statistics=statistics, gradient=columns)
        torch.testing.assert_close(columns, expected)


def test_same_bits_every_time_out_of_poisoned_memory(device, poisoned_memory):
    logits, target = _inputs(device, dtype=torch.bfloat16)
    runs = [_loss_and_gradient(cross_entropy, logits, target, impl="triton") for _ in range(2)]
    assert runs[0][0].equal(runs[1][0]) and runs[0][1].equal(runs[1][1])
    assert runs[0][1].isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_in_one_graph(device, inplace, impl):
    logits, target = _inputs(device, vocab=53)
    options = {"impl": impl, "inplace": inplace, "weights": weights_of(target)}
    expected = _loss_and_gradient(cross_entropy, logits, target, **options)
    backend = "inductor" if device.type == "cuda" else "aot_eager"  # compiles no C++
    compiled = torch.compile(
        lambda x: cross_entropy(x * 1, target, **options), fullgraph=True, backend=backend
    )
    leaf = logits.clone().requires_grad_()
    loss = compiled(leaf)
    loss.backward()
    torch.testing.assert_close((loss.detach().double(), leaf.grad.double()), expected)


def test_triton_runs_the_kernel_and_torch_does_not(device, monkeypatch):
    launches = []

    class Spy:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    kernel = module._cross_entropy_kernel
    monkeypatch.setattr(module, "_cross_entropy_kernel", Spy())
    logits, target = _inputs(device)
    cross_entropy(logits, target, impl="torch")
    assert launches == []
    cross_entropy(logits, target, impl="triton")
    assert launches == [(10,)]
    cross_entropy(logits, target)
    assert len(launches) == (2 if device.type == "cuda" else 1)


@pytest.mark.parametrize("change, message", [
    ({"target": torch.zeros(3, dtype=torch.long)}, "target must be"),
    ({"target": torch.zeros(2, 5)}, "integer labels"),
    ({"reduction": "average"}, "reduction"),
    ({"softcap": 0.0}, "softcap"),
    ({"logits": torch.zeros(2, 5, 53, dtype=torch.float64)}, "float64"),
    ({"logits": torch.zeros(2, 53, 5).mT, "inplace": True}, "contiguous"),
])  # fmt: skip
def test_refuses(device, change, message):
    arguments = {
        "logits": torch.zeros(2, 5, 53),
        "target": torch.zeros(2, 5, dtype=torch.long),
        "impl": "triton",
    }
    arguments = {
        k: v.to(device) if isinstance(v, torch.Tensor) else v
        for k, v in {**arguments, **change}.items()
    }
    with pytest.raises(ValueError, match=message):
        cross_entropy(**arguments)


REDUCTIONS = [{"reduction": reduction} for reduction in ("none", "mean", "sum")]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.data())
def test_any_shape_and_options(data):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocab = data.draw(st.integers(2, 300))
    logits = torch.empty(data.draw(st.integers(1, 9)), vocab, device=device)
    generator = torch.Generator(device).manual_seed(data.draw(st.integers(0, 2**31)))
    logits.normal_(std=data.draw(st.sampled_from([0.1, 1.0, 10.0])), generator=generator)
    target = torch.randint(vocab, logits.shape[:1], device=device, generator=generator)
    target[torch.rand(target.shape, device=device, generator=generator) < 0.2] = -100
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    _assert_as_exact_as_pytorch(
        logits.to(dtype),
        target,
        slack=max(1e-6, torch.finfo(dtype).eps),  # in a few numbers, PyTorch may be lucky
        d_loss=data.draw(st.sampled_from([1.0, -3.0])),
        impl=data.draw(st.sampled_from(IMPLEMENTATIONS)),
        inplace=data.draw(st.booleans()),
        **data.draw(st.sampled_from([*REDUCTIONS, {"weights": weights_of(target)}])),
        softcap=data.draw(st.sampled_from([None, 8.0])),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 50264, 50257, 128256, 151936])
@pytest.mark.parametrize("inplace", [False, True])
def test_real_vocabularies(device, vocab, inplace):
    logits, target = _inputs(device, shape=(4, 33), vocab=vocab, dtype=torch.bfloat16)
    _assert_as_exact_as_pytorch(logits, target, impl="auto", inplace=inplace)


@pytest.mark.gpu(gib=8)
def test_rows_beyond_2_31_elements(device):
    """Row 14,134 of this vocabulary starts past the largest int32."""
    num_rows, vocab = 14_200, 151_936
    target = torch.randint(vocab, (num_rows,), device=device)
    logits = torch.empty(num_rows, vocab, dtype=torch.bfloat16, device=device).normal_()
    rows = torch.tensor([0, 14_133, 14_134, 14_199], device=device)
    sample = logits[rows]
    leaf = logits.requires_grad_()
    details = cross_entropy(leaf, target, reduction="sum", inplace=True, return_details=True)
    details.loss.backward()
    assert leaf.grad.data_ptr() == leaf.data_ptr()
    loss, gradient = _loss_and_gradient(
        cross_entropy_reference, sample.double(), target[rows], reduction="none"
    )
    torch.testing.assert_close(details.per_token_loss[rows].double(), loss, rtol=1e-5, atol=0)
    assert _error(leaf.grad[rows].double(), gradient) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_no_host_synchronisation(device, inplace):
    logits, target = _inputs(device)
    leaf = logits.requires_grad_()
    denominators = [{"denominator": 7}, {"denominator": torch.tensor(7, device=device)}]
    denominators.append({"weights": weights_of(target), "return_details": False})
    for mode in ("default", "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for options in denominators:
                cross_entropy(leaf * 1, target, inplace=inplace, **options).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert leaf.grad.isfinite().all()


@pytest.mark.gpu
def test_a_cuda_denominator_that_is_not_positive_is_a_device_side_assertion():
    """Runs in a process of its own, because the assertion ends it."""
    program = """
import torch
from kernels.cross_entropy import cross_entropy
zero = torch.zeros((), device="cuda")
cross_entropy(torch.zeros(5, 53, device="cuda"), torch.arange(5, device="cuda"), denominator=zero)
torch.cuda.synchronize()
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert process.returncode != 0 and "device-side assert" in process.stderr, process.stderr


def test_a_cpu_copies_some_rows_at_a_time_and_changes_no_bit(monkeypatch):
    """Losses and gradients in bfloat16 take a few copies of 8 rows in float32, not of all 1,024
    rows."""
    module, columns = importlib.import_module("kernels.cross_entropy"), 256
    logits = torch.randn(1024, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.arange(1024) % columns
    target[::7] = -100
    options, shard, results, peaks = (
        module.RowOptions(-100, 30.0, False),
        module.Shard(None, 0),
        [],
        [],
    )
    for elements in (8 * columns, 1024 * columns):
        monkeypatch.setattr(module, "ROWS_ELEMENTS", elements)
        for scale in (torch.tensor(0.5), torch.linspace(0, 1, 1024)):
            gradient = logits.clone()
            with StorageCounter() as counter:
                counter.known.update(x.untyped_storage() for x in (logits, gradient, target, scale))
                statistics = module.row_step(
                    logits, target, options, shard, gradient=gradient, scale=scale
                )
                again = module.row_step(
                    logits,
                    target,
                    options,
                    shard,
                    statistics=statistics,
                    gradient=gradient,
                    scale=scale,
                )
            peaks.append(counter.peak / (4 * logits.numel()))
            module._scale_rows_(gradient, torch.linspace(1, 2, 1024), False)
            results.append((statistics, again, gradient))
    assert max(peaks[:2]) < 0.1 and min(peaks[2:]) > 2
    for some, together in zip(results[:2], results[2:]):
        assert all(map(torch.equal, some, together))
