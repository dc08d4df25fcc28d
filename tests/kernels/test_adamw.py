import pytest
import torch
import triton.language as tl

from kernels.adamw import BLOCK, PROGRAMS, Tensors, adamw
from kernels.compact_adamw import adamw_reference
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DTYPES, random

OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
SIZES = 1, 5, BLOCK, 2 * BLOCK + 48, 3 * BLOCK + 1
NUMBERS = ("gradient_scale", "lr", "lr_decay", "one_minus_beta1", "beta2", "one_minus_beta2", "eps")
POINTERS = ("master_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "bias_corrections_ptr")
KERNELS_TO_COMPILE = [
    KernelToCompile(
        "_adamw_kernel",
        {
            **dict.fromkeys(POINTERS, "*fp32"),
            **dict.fromkeys(NUMBERS, "fp32"),
            "numel": "i32",
            **pointers,
        },
        {"BLOCK": BLOCK, **({} if "weight_ptr" in pointers else {"weight_ptr": None})},
    )
    for pointers in (
        {"weight_ptr": "*bf16", "gradient_ptr": "*bf16"},
        {"weight_ptr": "*bf16", "gradient_ptr": "*fp32"},
        {"gradient_ptr": "*fp32"},
    )
] + [
    KernelToCompile(
        "_adamw_of_several_kernel",
        {"table_ptr": "*i64", "bias_corrections_ptr": "*fp32", **dict.fromkeys(NUMBERS, "fp32")},
        {"BLOCK": BLOCK, "GRADIENT": tl.float32, "WEIGHT": tl.bfloat16},
    )
]


def bias_corrections(step, device):
    return 1 - torch.tensor([0.9, 0.95], device=device) ** step


def make(n, device):
    """Returns a master and both moments, as an update leaves them, and one element behind each."""
    master, m, g = (random(n + 1, seed=i, device=device) for i in range(3))
    return [master, m, (m + g).square() / 10]


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_three_updates_equal_float64s(n, gradient_dtype, device):
    """Nothing past the end is written."""
    found = make(n, device)
    expected, behind = [x[:n].double() for x in found], [float(x[n]) for x in found]
    weight = torch.zeros(n + 1, dtype=torch.bfloat16, device=device)
    for step in range(1, 4):
        gradient = random(n, seed=9 + step, dtype=gradient_dtype, device=device) * 10.0 ** (
            step - 3
        )
        given = gradient, bias_corrections(step, device)
        adamw([Tensors(gradient, *(x[:n] for x in found), weight[:n])], given[1], 0.5, **OPTIONS)
        master, m, v = expected
        expected = adamw_reference(
            master, gradient.double() * 0.5, m, v, given[1].double(), **OPTIONS
        )
        for x, reference in zip(found, expected):
            torch.testing.assert_close(x[:n].double(), reference, rtol=1e-6, atol=1e-6)
        rounded = found[0][:n].to(torch.bfloat16)
        torch.testing.assert_close(
            weight[:n], rounded, rtol=2**-7, atol=0
        )  # Triton's interpreter cuts
        assert device.type == "cpu" or torch.equal(weight[:n], rounded)
    assert [float(x[n]) for x in found] == behind and weight[n] == 0


@pytest.mark.parametrize("n", SIZES)
def test_a_float32_weight_is_its_own_master(n, device):
    """It moves as a bf16 weight's master, bit for bit, and by torch.optim.AdamW from moments of
    zero."""
    weight, gradient = random(n, device=device), random(n, seed=1, device=device)
    masters = [weight.clone(), weight.clone()]
    for rounded, master in zip((None, weight.to(torch.bfloat16)), masters):
        moments = torch.zeros(2, n, device=device)
        adamw(
            [Tensors(gradient, master, *moments, rounded)], bias_corrections(1, device), **OPTIONS
        )
    assert torch.equal(*masters)
    theirs = weight.clone().requires_grad_()
    theirs.grad = gradient
    torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step()
    torch.testing.assert_close(masters[0], theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("has_masters", [True, False])
def test_several_parameters_are_updated_as_one_by_one(has_masters, gradient_dtype, device):
    """Bit for bit, and nothing past an end is written; the longest is more than its programs take
    at once."""
    runs = []
    for alone in (True, False):
        parameters, everything = [], []
        for seed, n in enumerate((*SIZES, PROGRAMS * BLOCK + 5)):
            state, gradient = (
                make(n, device),
                random(n, seed=9 + seed, dtype=gradient_dtype, device=device),
            )
            weight = torch.zeros(n + 1, dtype=torch.bfloat16, device=device)
            everything += [*state, weight]
            parameters.append(
                Tensors(gradient, *(x[:n] for x in state), weight[:n] if has_masters else None)
            )
        for given in [[each] for each in parameters] if alone else [parameters]:
            adamw(given, bias_corrections(2, device), 0.5, **OPTIONS)
        runs.append(everything)
    assert all(map(torch.equal, *runs)) and runs[0][-1].any() == has_masters


def test_small_decay_is_no_rounding(device):
    """At a rate of 1e-6 the decay of 1e-7 a step is near float64's; 1 - 1e-7 in float32 is 1 -
    1.19e-7."""
    n, options = 4096, OPTIONS | {"lr": 1e-6}
    found = [random(n, device=device), *torch.zeros(2, n, device=device)]
    start, expected = found[0].double(), [x.double() for x in found]
    for step in range(1, 31):
        gradient, corrections = random(n, seed=step, device=device), bias_corrections(step, device)
        adamw([Tensors(gradient, *found, None)], corrections, **options)
        master, m, v = expected
        expected = adamw_reference(master, gradient.double(), m, v, corrections.double(), **options)
    more = (expected[0] - found[0].double()) @ start / (start @ start)
    assert abs(more) < 0.05 * 30 * 1e-7


def test_tensors_that_do_not_fit_are_refused(device):
    gradient, *state = torch.ones(4, 8, device=device)
    weight, corrections = (
        torch.ones(8, dtype=torch.bfloat16, device=device),
        bias_corrections(1, device),
    )
    fitting = Tensors(gradient, *state, weight)
    for wrong in (
        {"exp_avg": state[1].bfloat16()}, {"master": state[0][:4]}, {"weight": None},
        {"gradient": gradient.bfloat16()}, {"gradient": gradient[:1].expand(8)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must (be contiguous|have one dtype)"):
            adamw([fitting, fitting._replace(**wrong)], corrections, **OPTIONS)
    assert all(bool((x == 1).all()) for x in fitting)


@pytest.mark.gpu(gib=36)
def test_past_2_to_the_31_elements():
    n = 2**31 + 40
    weight, gradient = (torch.ones(n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    master = torch.ones(n, device="cuda")
    moments = [torch.zeros(n, device="cuda") for _ in range(2)]
    adamw([Tensors(gradient, master, *moments, weight)], bias_corrections(1, "cuda"), **OPTIONS)
    for x in (weight, master, *moments):
        assert x[0] != 1 and bool((x[:: n - 1] == x[0]).all()) and x[n // 2] == x[0]
