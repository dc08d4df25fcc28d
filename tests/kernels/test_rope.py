import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from kernels.rope import rope, rope_reference
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DEVICE, DTYPES, compare_with_float64, outputs_and_gradients, random

_STRIDES = {f"{name}_stride_{d}": "i64" for name, dims in (("q", "bth"), ("k", "btg")) for d in dims}
_SIGNATURE = {
    **{name: "*bf16" for name in ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr")}, **_STRIDES,
    "T": "i32", "num_table_rows": "i32", "attention_scaling": "fp32",
    "table_stride_b": "i32", "table_stride_row": "i32", "positions_stride_b": "i32",
}  # fmt: skip
_TABLE = {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
_4B = {"H": 32, "G": 8, "HALF": 64, "BLOCK_H": 32, "BLOCK_G": 8, "BLOCK_HALF": 64, "INVERSE": False}
KERNELS_TO_COMPILE = [
    KernelToCompile(
        "_rope_kernel",
        _SIGNATURE | _TABLE,
        _4B | {"HAS_TABLE": True, "HAS_POSITIONS": False, "positions_ptr": None, "inv_freq_ptr": None},
    ),
    KernelToCompile(
        "_rope_kernel",
        _SIGNATURE | _TABLE | {"positions_ptr": "*i64"},
        _4B | {"HAS_TABLE": True, "HAS_POSITIONS": True, "inv_freq_ptr": None},
    ),
    # The bytes reported as spilled are the stack of the cosine's reduction of arguments above 105,615: never used here.
    KernelToCompile(
        "_rope_kernel",
        _SIGNATURE | {"positions_ptr": "*i64", "inv_freq_ptr": "*fp64"},
        _4B | {"HAS_TABLE": False, "HAS_POSITIONS": True, "cos_ptr": None, "sin_ptr": None},
    ),
]


def frequencies(K):
    return 1e6 ** -(torch.arange(0, K, 2, dtype=torch.float64, device=DEVICE) / K)


def table(num_positions, K):
    angles = torch.arange(num_positions, device=DEVICE)[:, None] * frequencies(K)
    return angles.cos().float(), angles.sin().float()


def queries_and_keys(B, T, H, G, K, dtype=torch.float32, seed=0):
    return [random(B, T, heads, K, seed=seed + i, dtype=dtype) for i, heads in enumerate((H, G))]


def compare(q, k, cos=None, sin=None, **options):
    compare_with_float64(
        lambda q, k: rope_reference(q, k, cos, sin, **options),
        lambda q, k: rope(q, k, cos, sin, **options, impl="triton"),
        [q, k],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "G"), [(4, 2), (5, 1), (3, 3), (2, 6)])
@pytest.mark.parametrize("K", [12, 32, 64, 128, 256])
def test_matches_float64(H, G, K, dtype, device):
    compare(*queries_and_keys(1, 3, H, G, K, dtype), *table(3, K))


def test_every_way_of_giving_the_angles(device):
    B, T, K = 2, 5, 32
    q, k = queries_and_keys(B, T, 3, 1, K)
    cos, sin = table(40, K)
    positions = torch.tensor([[0, 1, 2, 0, 1], [39, 7, 7, 20, 3]], device=device)
    for given_positions in (positions, positions[1]):
        compare(q, k, cos, sin, positions=given_positions)
        compare(q, k, positions=given_positions, inv_freq=frequencies(K), attention_scaling=1.1386)
        compare(q, k, positions=given_positions, inv_freq=frequencies(K).float())
    compare(q, k, cos[:T], sin[:T], attention_scaling=0.5)
    compare(q, k, cos[positions], sin[positions])
    compare(q, k, cos[:T].bfloat16(), sin[:T].bfloat16())


def test_angles_computed_in_the_kernel_are_right_at_a_million(device):
    """q = (1, 0) rotates to (cos, sin): both within 1e-6 of float64."""
    K, positions = 128, torch.tensor([0, 1, 131_071, 1_048_575], device=device)
    q = torch.zeros(1, len(positions), 1, K, device=device)
    q[..., : K // 2] = 1
    rotated, _ = rope(q, q, None, None, positions=positions, inv_freq=frequencies(K), impl="triton")
    angles = positions[:, None] * frequencies(K)
    exact = torch.cat([angles.cos(), angles.sin()], dim=-1)
    assert (rotated[0, :, 0].double() - exact).abs().max() < 1e-6


def test_position_outside_the_table_is_not_silent(device):
    q, k = queries_and_keys(1, 4, 2, 1, 32)
    positions = torch.tensor([0, 7, 8, -1], device=device)
    rotated, _ = rope(q, k, *table(8, 32), positions=positions, impl="triton")
    assert rotated.isnan().all(dim=(2, 3)).tolist() == [[False, False, True, True]]


def test_strided_heads(device):
    """Slices of a fused projection, a [B, H, T, K] tensor seen as [B, T, H, K], and an uncontiguous last dimension."""
    B, T, H, G, K = 2, 5, 4, 2, 32
    cos, sin = table(T, K)
    fused = random(B, T, (H + 2 * G) * K).unflatten(-1, (-1, K))
    sliced = fused[:, :, :H], fused[:, :, H : H + G]
    transposed = random(B, H, T, K).transpose(1, 2), random(B, G, T, K, seed=1).transpose(1, 2)
    interleaved = random(B, T, H, 2 * K)[..., ::2], random(B, T, G, 2 * K, seed=1)[..., ::2]
    for q, k in (sliced, transposed, interleaved):
        function = functools.partial(rope, cos=cos, sin=sin, impl="triton")
        strided = outputs_and_gradients(function, [q, k])
        contiguous = outputs_and_gradients(function, [q.contiguous(), k.contiguous()])
        assert all(torch.equal(a, b) for a, b in zip(strided, contiguous))
        assert strided[0].is_contiguous() and strided[1].is_contiguous()


def test_backward_undoes_the_rotation_and_repeats_bitwise(device):
    q, k = (x.requires_grad_() for x in queries_and_keys(2, 7, 4, 2, 64))
    rotated = rope(q, k, *table(7, 64), impl="triton")
    first = torch.autograd.grad(rotated, [q, k], [x.detach() for x in rotated], retain_graph=True)
    torch.testing.assert_close(first, (q.detach(), k.detach()))
    assert all(map(torch.equal, first, torch.autograd.grad(rotated, [q, k], [x.detach() for x in rotated])))


def test_gradient_where_one_output_goes_nowhere(device):
    q, k = (x.requires_grad_() for x in queries_and_keys(2, 5, 4, 2, 32))
    both = torch.autograd.grad([x.sum() for x in rope(q, k, *table(5, 32), impl="triton")], [q, k])
    for i in range(2):
        (alone,) = torch.autograd.grad(rope(q, k, *table(5, 32), impl="triton")[i].sum(), [(q, k)[i]])
        assert torch.equal(alone, both[i])


@pytest.mark.parametrize("wrap", ["compile", "checkpoint"])
def test_under_compile_and_checkpoint(wrap, device):
    cos, sin = table(7, 32)

    def function(q, k):
        q, k = rope(q, k, cos, sin, impl="triton")
        return q * 2, k.square()

    def checkpointed(*inputs):
        return checkpoint(function, *inputs, use_reentrant=False)

    wrapped = checkpointed if wrap == "checkpoint" else torch.compile(function, fullgraph=True, backend="aot_eager")
    plain, ours = (outputs_and_gradients(f, queries_and_keys(2, 7, 4, 2, 32)) for f in (function, wrapped))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours))


def test_custom_op(device):
    q, k = (x.requires_grad_() for x in queries_and_keys(2, 3, 4, 2, 32))
    torch.library.opcheck(torch.ops.fathom.rope, (q, k, *table(3, 32), None, None, 1.0, False))
    positions = torch.arange(3, device=device)
    torch.library.opcheck(torch.ops.fathom.rope, (q, k, None, None, positions, frequencies(32), 1.5, True))


def test_rotates_as_transformers_does(device):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    q, k = queries_and_keys(2, 7, 4, 2, 32)
    cos, sin = table(7, 32)
    doubled = [torch.cat([t, t], dim=-1)[None] for t in (cos, sin)]
    expected = qwen3.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *doubled)
    for impl in ("torch", "triton"):
        for ours, theirs in zip(rope(q, k, cos, sin, impl=impl), expected):
            torch.testing.assert_close(ours, theirs.transpose(1, 2))


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "tables", "options", "message"),
    [
        ((1, 3, 2, 33), (1, 3, 2, 33), (3, 16), {}, "even K"),
        ((1, 3, 2, 32), (1, 4, 2, 32), (3, 16), {}, "q and k must be"),
        ((1, 3, 2, 32), (1, 3, 2, 32), (2, 16), {}, r"\[3, 16\]"),
        ((1, 3, 2, 32), (1, 3, 2, 32), (3, 32), {}, r"\[3, 16\]"),
        ((1, 3, 2, 32), (1, 3, 2, 32), None, {}, "cos and sin"),
        ((1, 3, 2, 32), (1, 3, 2, 32), None, {"inv_freq": torch.ones(16)}, "with positions"),
        ((1, 3, 2, 32), (1, 3, 2, 32), (9, 16), {"positions": torch.arange(4)}, r"positions must be \[3\]"),
        ((1, 3, 200, 256), (1, 3, 2, 256), (3, 128), {}, "got 200 . 128"),
    ],
)
def test_refused(q_shape, k_shape, tables, options, message, device):
    tables = (None, None) if tables is None else (torch.ones(tables, device=device),) * 2
    options = {name: value.to(device) for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        rope(torch.ones(q_shape, device=device), torch.ones(k_shape, device=device), *tables, **options, impl="triton")


def test_float64_is_refused_by_the_kernel(device):
    q, k = queries_and_keys(1, 3, 2, 1, 32, torch.float64)
    with pytest.raises(ValueError, match="float64"):
        rope(q, k, *table(3, 32), impl="triton")


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 6),
    H=st.integers(1, 9),
    G=st.integers(1, 9),
    half=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    by=st.sampled_from(["token", "position", "frequency"]),
    seed=st.integers(0, 100),
)
def test_property_matches_float64(B, T, H, G, half, dtype, by, seed):
    q, k = queries_and_keys(B, T, H, G, 2 * half, dtype, seed)
    positions = torch.randint(0, 30, (B, T), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    if by == "token":
        compare(q, k, *table(T, 2 * half))
    elif by == "position":
        compare(q, k, *table(30, 2 * half), positions=positions)
    else:
        compare(q, k, positions=positions, inv_freq=frequencies(2 * half))


@pytest.mark.gpu
def test_past_2_to_the_31_elements(device):
    """q of 530,000 tokens x 32 heads x 128; tokens at both ends and beside the 2^31st element."""
    T, K = 530_000, 128
    q = torch.randn(1, T, 32, K, dtype=torch.bfloat16, device=device).requires_grad_()
    k = torch.randn(1, T, 8, K, dtype=torch.bfloat16, device=device)
    assert q.numel() > 2**31
    positions = torch.arange(T, device=device)
    rotated = rope(q, k, None, None, positions=positions, inv_freq=frequencies(K))
    (d_q,) = torch.autograd.grad(rotated[0], q, rotated[0].detach())

    sample = torch.tensor([0, 1, 2**31 // (32 * K) - 1, 2**31 // (32 * K), T - 1], device=device)
    exact = rope_reference(
        q.detach()[:, sample].double(), k[:, sample].double(), None, None, positions=sample, inv_freq=frequencies(K)
    )
    for ours, expected in zip(rotated, exact):
        torch.testing.assert_close(ours[:, sample].double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(d_q[:, sample].double(), q.detach()[:, sample].double(), rtol=2e-2, atol=3e-2)
