import pytest
import torch

from kernels.compact_adamw import (
    GROUP,
    PROGRAM_GROUPS,
    adamw_reference,
    compact_adamw,
    compact_adamw_reference,
    decode_exp_avg,
    decode_exp_avg_sq,
    encode_exp_avg,
    encode_exp_avg_sq,
    join_master,
    split_master,
)
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DTYPES, random

OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
CODES = 2, 4  # positions of the codes among the arguments
POINTERS = {
    "codes_ptr": "*i8", "scale_ptr": "*i16", "codes_sq_ptr": "*u8", "scale_sq_ptr": "*i16",
    "bias_corrections_ptr": "*fp32", "num_groups": "i32",
}  # fmt: skip
NUMBERS = ("gradient_scale", "lr", "lr_decay", "one_minus_beta1", "beta2", "one_minus_beta2", "eps")
KERNELS_TO_COMPILE = [
    KernelToCompile(
        "_compact_adamw_kernel",
        {**POINTERS, **dict.fromkeys(NUMBERS, "fp32"), "gradient_ptr": gradient, **weight},
        {"GROUP": GROUP, "PROGRAM_GROUPS": PROGRAM_GROUPS, **constant},
    )
    for weight, constant in (
        ({"weight_ptr": "*i16", "correction_ptr": "*i16"}, {}),
        ({"weight_ptr": "*fp32"}, {"correction_ptr": None}),
    )
    for gradient in ("*bf16", "*fp32")
]


def make(n, dtype, device, seed=0):
    """Arguments of `compact_adamw` up to scale_sq, as a few updates leave them."""
    master, m, g = (random(n, seed=3 * seed + i, device=device) for i in range(3))
    weight, correction = split_master(master) if dtype == torch.bfloat16 else (master, None)
    return [weight, correction, *encode_exp_avg(m), *encode_exp_avg_sq((m + g).square() / 10)]


def bias_corrections(step, device):
    return 1 - torch.tensor([0.9, 0.95], device=device) ** step


def copies(tensors):
    return [t if t is None else t.clone() for t in tensors]


def masters(tensors):
    weight, correction, *_ = tensors
    return weight if correction is None else join_master(weight, correction)


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, PROGRAM_GROUPS, 2 * PROGRAM_GROUPS + 7])
def test_kernel_equals_reference(groups, dtype, gradient_dtype, device):
    """Codes may differ by one next to a tie: roots and quotients differ in the last bit, also from
    torch's on a CPU."""
    expected = make(groups * GROUP, dtype, device)
    found, again = copies(expected), copies(expected)
    for step in range(1, 4):
        gradient = random(groups * GROUP, seed=9 + step, dtype=gradient_dtype, device=device)
        arguments = gradient, bias_corrections(step, device), 0.5
        compact_adamw_reference(*expected, *arguments, **OPTIONS)
        for tensors in (found, again):
            compact_adamw(*tensors, *arguments, **OPTIONS, impl="triton")
        assert all(torch.equal(a, b) for a, b in zip(found, again) if a is not None)
        torch.testing.assert_close(masters(found), masters(expected), rtol=5e-7, atol=3e-7)
        for i, (a, b) in enumerate(zip(found, expected)):
            difference = 0 if a is None else (a.float() - b.float()).abs()
            assert i not in CODES or (difference.max() <= 1 and difference.mean() < 1e-2)
        found, again = copies(expected), copies(expected)  # an update each, from the same state


def test_nothing_past_the_end_is_written(device):
    n, space = 3 * GROUP, 5 * GROUP
    whole = make(space, torch.bfloat16, device)
    before, sizes = copies(whole), [n, n, n, n // GROUP, n, n // GROUP]
    gradient = random(n, device=device)
    compact_adamw(
        *(t[:size] for t, size in zip(whole, sizes)),
        gradient,
        bias_corrections(1, device),
        **OPTIONS,
        impl="triton",
    )
    assert all(torch.equal(t[size:], b[size:]) for t, b, size in zip(whole, before, sizes))


def test_masters_equal_float32_masters_over_1000_updates(device):
    """A bf16 weight and its correction are a float32 master bit for bit, updated with the same
    moments."""
    tensors = make(4 * GROUP, torch.bfloat16, device)
    master = masters(tensors)
    for step in range(1, 1001):
        gradient = random(4 * GROUP, seed=step, device=device) * 10.0 ** (step % 7 - 5)
        moments = decode_exp_avg(*tensors[2:4]), decode_exp_avg_sq(*tensors[4:6])
        master, *_ = adamw_reference(
            master, gradient, *moments, bias_corrections(step, device), **OPTIONS
        )
        compact_adamw_reference(*tensors, gradient, bias_corrections(step, device), **OPTIONS)
        assert torch.equal(masters(tensors), master), step


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_float32_weight_is_updated_as_torchs_adamw_by_exact_moments(impl, device):
    """From moments of zero, the first update uses moments that no code has rounded."""
    tensors = [
        random(2 * GROUP, device=device),
        None,
        *encode_exp_avg(torch.zeros(2 * GROUP, device=device)),
    ]
    tensors += encode_exp_avg_sq(torch.zeros(2 * GROUP, device=device))
    theirs = tensors[0].clone().requires_grad_()
    theirs.grad = random(2 * GROUP, seed=1, device=device)
    compact_adamw(*tensors, theirs.grad, bias_corrections(1, device), **OPTIONS, impl=impl)
    torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step()
    torch.testing.assert_close(tensors[0], theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_small_decay_is_no_rounding(impl, device):
    """Decay of 1e-7 a step is near float64's, although codes round the moments."""
    n, options = 128 * GROUP, OPTIONS | {"lr": 1e-6}
    zeros = torch.zeros(n, device=device)
    found = [random(n, device=device), None, *encode_exp_avg(zeros), *encode_exp_avg_sq(zeros)]
    start, expected = found[0].double(), [x.double() for x in (found[0], zeros, zeros)]
    for step in range(1, 31):
        gradient, corrections = random(n, seed=step, device=device), bias_corrections(step, device)
        compact_adamw(*found, gradient, corrections, **options, impl=impl)
        master, m, v = expected
        expected = adamw_reference(master, gradient.double(), m, v, corrections.double(), **options)
    more = (expected[0] - found[0].double()) @ start / (start @ start)
    assert abs(more) < 0.05 * 30 * 1e-7


def test_masters_are_split_and_joined_bit_for_bit(device):
    """Every lower half, at exponents from denormal to largest, of both signs; ties go away from
    zero."""
    low = torch.arange(2**16, device=device, dtype=torch.int32)
    for high in (0, 1, 0x0080, 0x3F80, 0x3FFF, 0x7F7F):
        for sign in (0, -(2**31)):
            bits = low + (high << 16) + sign
            master = bits.view(torch.float32)
            weight, correction = split_master(master)
            assert torch.equal(join_master(weight, correction).view(torch.int32), bits)
            nearest = master.bfloat16()
            is_tie = low == 0x8000
            assert torch.equal(weight[~is_tie], nearest[~is_tie])
            assert weight[is_tie].abs() > master[is_tie].abs()


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-3, 1.0, 1e30])
def test_moments_are_within_half_a_code(scale, device):
    m = random(100 * GROUP, device=device) * scale
    m[GROUP : 2 * GROUP] = 0
    codes, s = encode_exp_avg(m)
    assert codes.dtype == torch.int8 and s.dtype == torch.bfloat16 and codes.abs().max() <= 127
    # PyTorch on a GPU divides by a number as it multiplies by the inverse: 1 / 1e-42 is infinite in
    # float32.
    x, m = ((each.double() / scale).view(-1, GROUP) for each in (decode_exp_avg(codes, s), m))
    largest = m.abs().amax(1, keepdim=True)
    # d x / d y is (1 + |x|)^2 / 2: half a code is an error of at most 2 / 254 of the largest, at
    # the largest.
    assert scale < 1e-40 or ((x - m).abs() <= largest * (2 / 254 + 2**-8)).all()
    assert (x[1] == 0).all() and s[1] == 0

    if scale in (1e-3, 1.0):
        v = (m * scale).square().float().view(-1)
        codes, t = encode_exp_avg_sq(v)
        u, root = decode_exp_avg_sq(codes, t).sqrt(), v.sqrt()
        step = root.view(-1, GROUP).amax(1, keepdim=True) / 255
        assert ((u - root).view(-1, GROUP).abs() <= step * (1 + 2**-8 * 255) / 1.9).all()
        assert (codes[GROUP : 2 * GROUP] == 0).all() and t[1] == 0


@pytest.mark.parametrize("ratio", [1e4, 1e12])
def test_a_second_moment_above_zero_never_becomes_zero(ratio, device):
    """The update of a zero second moment would be m / eps."""
    v = torch.full((4 * GROUP,), 1.0, device=device)
    v[1::2] = ratio**-2
    v[2] = 0
    codes, t = encode_exp_avg_sq(v)
    assert ((codes == 0) == (v == 0)).all() and (decode_exp_avg_sq(codes, t)[v > 0] > 0).all()

    gradient = v.sqrt() * random(4 * GROUP, device=device).sign()
    for impl in ("torch", "triton"):
        tensors = make(4 * GROUP, torch.bfloat16, device)
        for moment in tensors[2:]:
            moment.zero_()
        for step in range(1, 30):
            before = masters(tensors)
            compact_adamw(*tensors, gradient, bias_corrections(step, device), **OPTIONS, impl=impl)
            assert ((tensors[4] == 0) == (v == 0)).all()
            assert (masters(tensors) - before).abs().max() < 0.02 + 1e-2  # lr, and the weight decay


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_denormal_moments_stay_finite(impl, device):
    tensors = make(2 * GROUP, torch.bfloat16, device)
    for moment in tensors[2:]:
        moment.zero_()
    gradient = torch.tensor([1e-37, 1e-44], device=device).repeat_interleave(GROUP)
    for _ in range(3):
        compact_adamw(*tensors, gradient, bias_corrections(1, device), **OPTIONS, impl=impl)
    assert decode_exp_avg(*tensors[2:4]).isfinite().all() and masters(tensors).isfinite().all()


def test_decoded_moments_are_encoded_as_they_were(device):
    codes = torch.arange(-127, 128, device=device, dtype=torch.int8)[: 7 * GROUP].clone()
    codes.view(-1, GROUP)[:, 3] = 127  # each group has a largest element
    scale = torch.tensor([1.0, 3.0, 1e-20, 1e20, 0.3, 7.0, 1.01], device=device).bfloat16()
    found = encode_exp_avg(decode_exp_avg(codes, scale))
    assert torch.equal(found[0], codes) and torch.equal(found[1], scale)
    codes = torch.arange(7 * GROUP, device=device).to(torch.uint8)
    codes.view(-1, GROUP)[:, 3] = 255
    scale[2:4] = torch.tensor([1e-10, 1e10])
    found = encode_exp_avg_sq(decode_exp_avg_sq(codes, scale))
    assert torch.equal(found[0], codes) and torch.equal(found[1], scale)


def test_tensors_that_do_not_fit_are_refused(device):
    weight, correction, *moments = make(2 * GROUP, torch.bfloat16, device)
    gradient, corrections = random(2 * GROUP, device=device), bias_corrections(1, device)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32"):
        compact_adamw(weight, None, *moments, gradient, corrections, **OPTIONS)
    with pytest.raises(ValueError, match=r"of 2 x 32 elements, got torch\.bfloat16 of 32"):
        compact_adamw(weight[:GROUP], correction, *moments, gradient, corrections, **OPTIONS)


@pytest.mark.gpu(gib=20)
def test_past_2_to_the_31_elements(device):
    n = 2**31 + 3 * GROUP
    weight = torch.ones(n, dtype=torch.bfloat16, device=device)
    tensors = [weight, *(torch.zeros(k, dtype=d, device=device) for k, d in (
        (n, torch.int16), (n, torch.int8), (n // GROUP, torch.bfloat16), (n, torch.uint8),
        (n // GROUP, torch.bfloat16)
    ))]  # fmt: skip
    compact_adamw(*tensors, torch.ones_like(weight), bias_corrections(1, device), **OPTIONS)
    for place in (slice(0, GROUP), slice(n - GROUP, n)):
        torch.testing.assert_close(
            join_master(weight[place], tensors[1][place]),
            torch.full((GROUP,), 0.989, device=device),
        )
