"""Attention to a window: kernels and reference against float64, packed documents, and one token
after the other."""

import functools

import pytest
import torch

from kernels.attention.attend import attention
from kernels.attention.full import attention_reference
from kernels.attention.sparse import band
from kernels.attention.window import Window, begins_of, window_reference
from tests.kernels.attention.inputs import NoLaunch, Peak, make_qkv, segments_of
from tests.kernels.compare import compare_with_float64, outputs_and_gradients

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def attend(window, impl="triton", segments=None):
    return functools.partial(attention, segments=segments, kind=Window(window), impl=impl)


def reference(*inputs, **options):
    return window_reference(*inputs, **options)[0]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("H", "G", "K", "dtype", "lengths", "window"),
    [
        (4, 1, 128, bf16, ([201],), 64),
        (4, 2, 64, fp32, ([1, 63, 64, 65, 131],), 64),
        (3, 1, 64, fp32, ([197], [33, 164]), 128),
        (2, 2, 64, fp16, ([150, 1, 2],), 64),
        (16, 1, 64, fp32, ([99],), 4096),
        (1, 1, 64, bf16, ([71, 66, 129],), 64),
        *(
            (2, 1, 64, fp32, ([1, 63, 64, 65, 131],), window)
            for window in (2, 37, 63, 65, 100, 127, 129, 191)
        ),
        (4, 1, 128, bf16, ([201],), 100),
        (1, 1, 64, fp16, ([150, 1, 2],), 33),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_matches_float64(H, G, K, dtype, lengths, window, impl, device, poisoned_memory):
    """Output, dq, dk and dv; documents of odd lengths, shorter and longer than the window."""
    segments = segments_of(*lengths)
    inputs = make_qkv(len(lengths), sum(lengths[0]), H, G, K, dtype, device)
    exact = functools.partial(reference, window=window, segments=segments)
    compare_with_float64(exact, attend(window, impl, segments), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "G"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("window", [128, 100, 20])
def test_tiles_of_a_gpu(H, G, K, window, device, poisoned_memory):
    segments = segments_of([777, 65, 1], [300, 543])
    inputs = make_qkv(2, 843, H, G, K, bf16, device)
    exact = functools.partial(reference, window=window, segments=segments)
    compare_with_float64(exact, attend(window, "auto", segments), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [([777],), ([300, 65, 1],), ([200, 5], [2, 203])])
@pytest.mark.parametrize("K", [256, 96])
def test_heads_that_run_in_flash_attention(K, lengths, device, poisoned_memory):
    segments = segments_of(*lengths)
    inputs = make_qkv(len(lengths), sum(lengths[0]), 4, 2, K, bf16, device)
    for window in (128, 100):
        exact = functools.partial(reference, window=window, segments=segments)
        compare_with_float64(exact, attend(window, "auto", segments), inputs)
    rows = make_qkv(2, 333, 4, 2, K, bf16, device)
    compare_with_float64(functools.partial(reference, window=128), attend(128, "auto"), rows)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([[3, 2], [5]], ([0, 3, 5, 10], 5)), ([[4, 1]], ([0, 4, 5], 4)), (None, ([0, 5, 10], 5))],
)
def test_where_documents_begin(lengths, expected):
    q = torch.empty(2 if lengths is None else len(lengths), 5, 1, 8)
    begins, longest = begins_of(q, lengths and segments_of(*lengths).flip(0))
    assert (begins.tolist(), longest) == expected and begins.dtype == torch.int32


@pytest.mark.parametrize("T", [37, 64, 65, 193])
def test_rows_that_are_one_document_each(T, device, poisoned_memory):
    inputs = make_qkv(2, T, 2, 1, 64, fp32, device)
    compare_with_float64(functools.partial(reference, window=64), attend(64), inputs)


@pytest.mark.parametrize(("T", "window"), [(1, 64), (2, 64), (150, 1), (2, 1)])
def test_rows_or_windows_of_one_or_two_tokens(T, window, device, poisoned_memory):
    """Gradients of q and k are 0 or nearly so, and their rounding is not: errors are compared in
    absolute terms."""
    inputs = make_qkv(2, T, 2, 1, 64, fp32, device)
    expected = outputs_and_gradients(functools.partial(reference, window=window), inputs)
    for e, found in zip(expected, outputs_and_gradients(attend(window), inputs), strict=True):
        torch.testing.assert_close(found, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [64, 50, 70])
def test_the_window_is_exact(window, device):
    """Checks what a token sees: in a window of 64 tokens, token 100 sees tokens 37 to 100."""
    q, k, v = make_qkv(1, 150, 2, 1, 64, fp32, device)
    seen = slice(101 - window, 101)
    scores = torch.einsum("hk,sk->hs", q[0, 100], k[0, seen, 0]) / 8
    expected = scores.softmax(-1) @ v[0, seen, 0]
    for impl in ("triton", "torch"):
        torch.testing.assert_close(attend(window, impl)(q, k, v)[0, 100], expected)
    _, lse, _ = torch.ops.fathom.attend(q, k, v, None, None, Window(window).number, "cpu", True)
    torch.testing.assert_close(lse[0, 100], scores.logsumexp(-1))
    assert lse.dtype == fp32 and lse.shape == (1, 150, 2)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_window_as_long_as_the_documents_is_attention_to_everything(impl, device):
    segments, inputs = segments_of([70, 128, 3]), make_qkv(1, 201, 4, 2, 64, fp32, device)
    dense = outputs_and_gradients(lambda *x: attention_reference(*x, segments), inputs)
    for expected, found in zip(dense, outputs_and_gradients(attend(128, impl, segments), inputs)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_packed_documents_equal_each_alone(impl, device):
    lengths = ([45, 130, 26], [201])
    segments, inputs = segments_of(*lengths), make_qkv(2, 201, 4, 2, 64, fp32, device)
    packed = outputs_and_gradients(attend(64, impl, segments), inputs)
    arriving = outputs_and_gradients(lambda x: x, [torch.zeros_like(inputs[0])])[
        1
    ]  # the gradient that all outputs get
    for row, start, stop in segments.tolist():
        here = slice(row, row + 1), slice(start, stop)
        alone = [x[here].detach().clone().requires_grad_() for x in inputs]
        out = attend(64, impl)(*alone)
        for expected, found in zip([out, *torch.autograd.grad(out, alone, arriving[here])], packed):
            torch.testing.assert_close(found[here], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [64, 1, 50])
@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_a_decoded_token_is_that_of_the_whole_sequence(dtype, window, device):
    kind = Window(window)
    q, k, v = make_qkv(2, 150, 6, 2, 64, dtype, device)
    whole = attend(window, "torch")(q, k, v)
    tolerance = 1e-5 if dtype == fp32 else 2e-2
    for T in (1, 2, 63, 64, 65, 66, 128, 129, 150):
        found = kind.decode(q[:, T - 1 : T], k[:, :T], v[:, :T], None)
        torch.testing.assert_close(found, whole[:, T - 1 : T], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [256, 100])
def test_footprint_is_what_is_allocated(window, monkeypatch):
    T, H, G, K, kind = 8192, 8, 2, 64, Window(window)
    for name in [name for name in vars(band) if name.endswith("_kernel")]:
        monkeypatch.setattr(band, name, NoLaunch())
    q, k, v = (torch.empty(1, T, n, K, dtype=bf16) for n in (H, G, G))
    kind.forward(q, k, v, None, None, "cpu", True)  # makes the tables, which are kept
    footprint = kind.footprint(T, H, G, K)
    with Peak() as forward:
        [out], [lse], lists = kind.forward(q, k, v, None, None, "cpu", True)
    assert lists is None and out.nbytes + lse.nbytes == T * footprint.results
    assert forward.peak == T * footprint.results + footprint.forward
    with Peak() as backward:
        gradients = kind.backward(out, q, k, v, None, [out], [lse], None, None, "cpu", True)
    assert backward.peak == sum(x.nbytes for x in gradients) + footprint.backward


def test_flops():
    """Windows of two blocks: block b multiplies with itself, with up to two before it."""
    pairs, product = 1 + 2 + 3 + 3 + 3, 2 * 64 * 64 * 2 * 64
    for window in (128, 65):
        flops = Window(window).flops(64 * 5 - 3, 2, 1, 64)
        assert flops == (2 * pairs * product, 0, 7 * pairs * product)
