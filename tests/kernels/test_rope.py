import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope import rope, rope_reference
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import (
    DEVICE,
    DTYPES,
    compare_with_float64,
    outputs_and_gradients,
    random,
)

_STRIDES = {
    f"{name}_stride_{d}": "i64" for name, dims in (("q", "bth"), ("k", "btg")) for d in dims
}
_SIGNATURE = {
    **{name: "*bf16" for name in ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr")}, **_STRIDES,
    "cos_ptr": "*fp32", "sin_ptr": "*fp32", "T": "i32", "table_stride_b": "i32",
}  # fmt: skip
_4B = {
    "H": 32, "G": 8, "K": 128, "HALF": 64, "BLOCK_H": 32, "BLOCK_G": 8, "BLOCK_HALF": 64,
    "BLOCK_REST": 1,
    "WIDTH": 64, "INVERSE": False,
}  # fmt: skip
_A_QUARTER = {
    **_4B,
    "H": 16,
    "G": 4,
    "K": 256,
    "HALF": 32,
    "BLOCK_HALF": 32,
    "BLOCK_REST": 256,
    "WIDTH": 32,
}
KERNELS_TO_COMPILE = [
    KernelToCompile("_rope_kernel", _SIGNATURE, sizes) for sizes in (_4B, _A_QUARTER)
]


def table(num_positions, K):
    frequencies = 1e6 ** -(torch.arange(0, K, 2, dtype=torch.float64, device=DEVICE) / K)
    angles = torch.arange(num_positions, device=DEVICE)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def queries_and_keys(B, T, H, G, K, dtype=torch.float32, seed=0):
    return [random(B, T, heads, K, seed=seed + i, dtype=dtype) for i, heads in enumerate((H, G))]


def compare(q, k, cos, sin, R=None):
    compare_with_float64(
        lambda q, k: rope_reference(q, k, cos, sin, rotary_dim=R),
        lambda q, k: rope(q, k, cos, sin, rotary_dim=R, impl="triton"),
        [q, k],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "R"), [(256, 64), (32, 24), (12, 2), (64, 64)])
def test_only_the_first_elements_are_rotated(K, R, dtype, device):
    """Compares with rope of the first elements alone, too, with and without a factor of queries."""
    (q, k), (cos, sin) = queries_and_keys(2, 5, 6, 2, K, dtype), table(5, R)
    compare(q, k, cos, sin, R)
    rotated = rope(q, k, cos, sin, rotary_dim=R, impl="triton")
    for whole, first, x in zip(
        rotated, rope(q[..., :R], k[..., :R], cos, sin, impl="triton"), (q, k)
    ):
        assert torch.equal(whole, torch.cat([first, x[..., R:]], -1))
    compare(q, k, *(torch.cat([x, x[:, :1] + 2], 1) for x in (cos, sin)), R)
    with pytest.raises(ValueError, match=f"rotary_dim must be even and up to {K}, got {K + 2}"):
        rope(q, k, *table(5, K + 2), rotary_dim=K + 2)


@pytest.mark.parametrize("batches", [1, 3])
def test_a_column_more_multiplies_queries(batches, device):
    """Compares with rope of queries that are multiplied first, for tables of a batch or of each
    row."""
    (q, k), (cos, sin) = queries_and_keys(3, 37, 4, 2, 32), table(37, 32)
    factor = 1 + torch.arange(37, device=device) / 37
    tables = [torch.cat([x, y[:, None]], 1) for x, y in ((cos, factor), (sin, 7 * factor))]
    if batches > 1:
        tables = [
            x.expand(3, *x.shape) * torch.tensor([1.0, 2.0, 3.0], device=device)[:, None, None]
            for x in tables
        ]
        cos, sin = (x[..., :16] for x in tables)
        factor = tables[0][..., 16]
    compare(q, k, *tables)
    expected, _ = rope(factor[..., None, None] * q, k, cos, sin, impl="triton")
    torch.testing.assert_close(rope(q, k, *tables, impl="triton")[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "G"), [(4, 2), (5, 1), (3, 3), (2, 6)])
@pytest.mark.parametrize("K", [12, 32, 64, 128, 256])
def test_matches_float64(H, G, K, dtype, device):
    compare(*queries_and_keys(1, 3, H, G, K, dtype), *table(3, K))


def test_every_kind_of_table(device):
    T, K = 5, 32
    q, k = queries_and_keys(2, T, 3, 1, K)
    cos, sin = table(40, K)
    positions = torch.tensor([[0, 1, 2, 0, 1], [39, 7, 7, 20, 3]], device=device)
    compare(q, k, cos[:T], sin[:T])
    compare(q, k, cos[positions], sin[positions])
    compare(q, k, cos[:10:2], sin[:10:2])
    compare(q, k, cos[:1].expand(2, T, -1), sin[:1].expand(2, T, -1))
    compare(q, k, 1.1386 * cos[:T], 1.1386 * sin[:T])  # YaRN scales the tables
    compare(q, k, cos[:T].bfloat16(), sin[:T].bfloat16())


def test_strided_heads(device):
    """Tries slices of a fused projection, [B, H, T, K] viewed as [B, T, H, K], and a last dimension
    with a stride."""
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
    assert all(
        map(torch.equal, first, torch.autograd.grad(rotated, [q, k], [x.detach() for x in rotated]))
    )


def test_rotates_as_transformers_does(device):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    q, k = queries_and_keys(2, 7, 4, 2, 32)
    cos, sin = table(7, 32)
    doubled = [torch.cat([t, t], dim=-1)[None] for t in (cos, sin)]
    expected = qwen3.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *doubled)
    for impl in ("torch", "triton"):
        for ours, theirs in zip(rope(q, k, cos, sin, impl=impl), expected):
            torch.testing.assert_close(ours, theirs.transpose(1, 2))


@pytest.mark.parametrize(("q_shape", "k_shape", "table_shape", "message"), [
    ((1, 3, 2, 33), (1, 3, 2, 33), (3, 16), "even K"),
    ((1, 3, 2, 32), (1, 4, 2, 32), (3, 16), "q and k must be"),
    ((1, 3, 2, 32), (1, 3, 2, 32), (2, 16), r"\[3, 16\]"),
    ((1, 3, 2, 32), (1, 3, 2, 32), (3, 32), r"\[3, 16\]"),
    ((1, 3, 200, 256), (1, 3, 2, 256), (3, 128), "got 200 . 128"),
    ((1, 3, 2, 32), (1, 3, 1, 32), (3, 16), "float64"),
])  # fmt: skip
def test_refused(q_shape, k_shape, table_shape, message, device):
    dtype = torch.float64 if message == "float64" else None
    q, k, cos = (
        torch.ones(shape, device=device, dtype=dtype) for shape in (q_shape, k_shape, table_shape)
    )
    with pytest.raises(ValueError, match=message):
        rope(q, k, cos, cos, impl="triton")


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    B=st.integers(1, 2), T=st.integers(1, 6), H=st.integers(1, 9), G=st.integers(1, 9),
    half=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES), by_row=st.booleans(), seed=st.integers(0, 100),
)  # fmt: skip
def test_property_matches_float64(B, T, H, G, half, dtype, by_row, seed):
    q, k = queries_and_keys(B, T, H, G, 2 * half, dtype, seed)
    positions = torch.randint(0, 30, (B, T), generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )
    compare(q, k, *(t[positions] if by_row else t[:T] for t in table(30, 2 * half)))


@pytest.mark.gpu(gib=18)
def test_past_2_to_the_31_elements(device):
    """Samples q of 530,000 tokens x 32 heads x 128: tokens at both ends and around the 2^31st
    element."""
    T, K = 530_000, 128
    q = torch.randn(1, T, 32, K, dtype=torch.bfloat16, device=device).requires_grad_()
    k = torch.randn(1, T, 8, K, dtype=torch.bfloat16, device=device)
    assert q.numel() > 2**31
    cos, sin = table(T, K)
    rotated = rope(q, k, cos, sin)
    (d_q,) = torch.autograd.grad(rotated[0], q, rotated[0].detach())

    sample = torch.tensor([0, 1, 2**31 // (32 * K) - 1, 2**31 // (32 * K), T - 1], device=device)
    exact = rope_reference(
        q.detach()[:, sample].double(), k[:, sample].double(), cos[sample], sin[sample]
    )
    for ours, expected in zip(rotated, exact):
        torch.testing.assert_close(ours[:, sample].double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        d_q[:, sample].double(), q.detach()[:, sample].double(), rtol=2e-2, atol=3e-2
    )


def test_lengths_that_are_symbols_under_compile():
    """Compiles one function for several lengths. The tables' own lengths are numbers."""
    torch._dynamo.reset()
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    for T in (7, 5, 1):
        inputs = queries_and_keys(2, T, 4, 2, 32)
        for x in inputs:
            torch._dynamo.maybe_mark_dynamic(x, 1)
        for tables in (table(T, 32), [x.repeat(2, 1, 1) for x in table(T, 32)]):
            assert all(map(torch.equal, compiled(*inputs, *tables), rope(*inputs, *tables)))
