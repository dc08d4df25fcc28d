import functools

import pytest
import torch

from kernels.attention.attend import attention
from kernels.attention.full import attention_reference
from kernels.attention.reference import attend_written_out
from kernels.attention.sparse import band, combine, gather, selection
from kernels.attention.sparse import sparse_attention as sparse
from kernels.attention.sparse.layout import EMPTY, make_layout
from kernels.attention.sparse.sparse_attention import Sparse, sparse_forward, visible_keys
from tests.kernels.attention.inputs import (
    NoLaunch,
    Peak,
    all_blocks,
    attend_sparsely,
    make_qkv,
    random_lists,
    segments_of,
    select_blocks,
)
from tests.kernels.compare import compare_with_float64, outputs_and_gradients, random

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SMALL = {"block_size": 32, "window": 32}


def compare_on_lists(q, k, v, segments, blocks, sizes, **options):
    compare_with_float64(
        lambda *x: attend_written_out(*x, visible_keys(x[0], blocks, segments, **sizes))[0],
        lambda *x: attend_sparsely(*x, segments, blocks=blocks, impl="triton", **sizes),
        [q, k, v],
        **options,
    )


@pytest.mark.parametrize(
    ("H", "G", "K", "dtype", "lengths", "block_size", "window", "selected"),
    [
        (4, 1, 128, bf16, ([270],), 64, 64, 2),
        (8, 2, 64, bf16, ([150, 40],), 32, 64, 2),
        (2, 2, 64, fp16, ([130], [33, 97]), 32, 32, 3),
        (4, 2, 64, fp32, ([141],), 32, 32, 3),
        (3, 1, 64, fp32, ([101, 99],), 32, 32, 2),
        (8, 1, 64, bf16, ([150],), 32, 32, 3),
        (16, 1, 64, fp32, ([110],), 32, 32, 1),
        (1, 1, 128, bf16, ([400],), 64, 128, 1),
        (4, 1, 256, bf16, ([65, 129],), 32, 32, 2),
        (6, 2, 256, fp16, ([63, 1, 64],), 32, 32, 1),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_matches_float64_on_given_lists(
    H, G, K, dtype, lengths, block_size, window, selected, device, poisoned_memory
):
    segments, sizes = segments_of(*lengths), {"block_size": block_size, "window": window}
    q, k, v = make_qkv(len(lengths), sum(lengths[0]), H, G, K, dtype, device)
    compare_on_lists(q, k, v, segments, random_lists(q, G, segments, selected, **sizes), sizes)


@pytest.mark.parametrize("lengths", [[1, 31, 47, 63, 65], [32, 48, 64, 130]], ids=str)
def test_with_all_blocks_it_is_dense_attention(lengths, device, poisoned_memory):
    segments = segments_of(lengths)
    q, k, v = make_qkv(1, sum(lengths), 4, 2, 64, fp32, device)
    blocks = all_blocks(q, 2, segments, **SMALL)
    dense = outputs_and_gradients(lambda *x: attention_reference(*x, segments), [q, k, v])
    for impl in ("torch", "triton"):
        ours = outputs_and_gradients(
            lambda *x, impl=impl: attend_sparsely(*x, segments, blocks=blocks, impl=impl, **SMALL),
            [q, k, v],
        )
        for expected, found in zip(dense, ours):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 31, 64, 65])
def test_short_rows(T, device, poisoned_memory):
    q, k, v = make_qkv(2, T, 2, 1, 64, fp32, device)
    dense, ours = (
        outputs_and_gradients(function, [q, k, v])
        for function in (attention_reference, lambda *x: attend_sparsely(*x, impl="triton"))
    )
    for expected, found in zip(dense, ours):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_order_and_needless_entries_change_nothing(device):
    q, k, v = make_qkv(1, 150, 2, 1, 64, bf16, device)
    blocks = random_lists(q, 1, None, 4, **SMALL)
    # The first block, the own block, later ones and duplicates are dropped.
    needless = torch.tensor([0, 4, 7, 900], dtype=torch.int16, device=device).expand(1, 150, 1, 4)
    disturbed = torch.cat([blocks.flip(-1), needless, blocks], -1)
    plain, ours = (
        outputs_and_gradients(
            lambda *x, b=b: attend_sparsely(*x, blocks=b, impl="triton", **SMALL), [q, k, v]
        )
        for b in (blocks, disturbed)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, ours))


def test_a_block_chosen_by_none_has_no_gradient(device, poisoned_memory):
    """Block 2 is in the windows of blocks 2 and 3 alone, whose outputs get no gradient here."""
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 230, 2, 1, 64, fp32, device))
    sizes = {"block_size": 32, "window": 64}
    blocks = random_lists(q, 1, None, 5, **sizes, share=2)
    blocks = blocks.masked_fill(blocks == 2, EMPTY)
    out = attend_sparsely(q, k, v, blocks=blocks, impl="triton", **sizes)
    dk, dv = torch.autograd.grad(out[:, 128:].square().sum(), (k, v))
    for gradient in (dk, dv):
        assert (gradient[:, 64:96] == 0).all()
        assert (gradient[:, 32:64] != 0).any(-1).all() and (gradient[:, 96:] != 0).any(-1).all()


def test_a_block_chosen_by_all(device, poisoned_memory):
    """Its queries are many items, added up in order."""
    q, k, v = make_qkv(1, 200, 8, 1, 64, fp16, device)
    blocks = torch.ones(1, 200, 1, 1, dtype=torch.int16, device=device)
    compare_on_lists(q, k, v, None, blocks, SMALL)


@pytest.mark.parametrize("scale", [0.0, 50.0])
def test_extreme_logits(scale, device):
    q, k, v = make_qkv(1, 150, 2, 1, 64, fp32, device)
    blocks = random_lists(q, 1, None, 2, **SMALL)
    # Logits of up to 4 * scale are rounded to as many units in the last place of 1, and so is their
    # log-sum-exp.
    compare_on_lists(q * scale, k, v, None, blocks, SMALL, units=8 * scale + 0.5)


def test_ranges_of_heads_and_tokens_change_nothing_but_the_order_of_sums(device, poisoned_memory):
    q, k, v = make_qkv(1, 200, 4, 2, 64, fp32, device)
    blocks = random_lists(q, 2, None, 4, **SMALL)
    whole, ranges = (
        outputs_and_gradients(
            lambda *x, w=w: attend_sparsely(
                *x, blocks=blocks, workspace_bytes=w, impl="triton", **SMALL
            ),
            [q, k, v],
        )
        for w in (2**30, 250_000)
    )
    # In the interpreter NumPy multiplies, which rounds a row by its place among the others.
    if device.type == "cuda":
        assert torch.equal(whole[0], ranges[0]) and torch.equal(whole[1], ranges[1])  # out and dq
    for expected, found in zip(whole, ranges):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_chosen_lists_are_those_of_select_blocks(device):
    q, k, v = make_qkv(1, 150, 2, 1, 64, bf16, device)
    blocks = select_blocks(q, k, selected_blocks=2, impl="triton", **SMALL)
    function = functools.partial(attend_sparsely, selected_blocks=2, impl="triton", **SMALL)
    chosen, given = (
        outputs_and_gradients(functools.partial(function, blocks=b), [q, k, v])
        for b in (None, blocks)
    )
    assert all(torch.equal(a, b) for a, b in zip(chosen, given))


def at_one_kind(kind, impl, inputs, segments):
    attended = functools.partial(attention, segments=segments, kind=kind, impl=impl)
    return outputs_and_gradients(attended, inputs)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    "lengths", [([40, 150, 59],), ([130, 149], [100, 52, 127]), ([99, 52, 99, 100],)], ids=str
)
def test_a_document_does_not_depend_on_its_neighbours(lengths, impl, device, poisoned_memory):
    """Documents below 100 tokens attend to everything, longer ones to chosen blocks, packed as well
    as alone."""
    kind, dtype = Sparse(1, **SMALL, dense_below=100), bf16 if device.type == "cuda" else fp32
    segments, T = segments_of(*lengths), sum(lengths[0])
    inputs = make_qkv(len(lengths), T, 4, 2, 64, dtype, device)
    packed = at_one_kind(kind, impl, inputs, segments)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == fp32 else {"rtol": 2e-2, "atol": 2e-2}
    arriving = random(*inputs[0].shape, seed=1, dtype=dtype, device=device)
    for row, start, stop in segments.tolist():
        here = slice(row, row + 1), slice(start, stop)
        alone = [x[here].detach().clone().requires_grad_() for x in inputs]
        out = attention(*alone, kind=kind, impl=impl)
        expected = [out, *torch.autograd.grad(out, alone, arriving[here])]
        dense = attention_reference(*(x[here] for x in inputs))
        is_dense = torch.allclose(out, dense, **tolerance)
        assert is_dense == (stop - start < 100)
        for e, found in zip(expected, packed):
            torch.testing.assert_close(found[here], e, **tolerance)
    backend = "cpu" if device.type == "cpu" else "flash"
    # Lists are empty in documents that attend to everything; their choice does not depend on the
    # others.
    *_, lists = torch.ops.fathom.attend(
        *inputs, segments, None, kind.number, backend, impl == "triton"
    )
    for row, start, stop in segments.tolist():
        of_document, here = lists[row, start:stop], (slice(row, row + 1), slice(start, stop))
        if stop - start < 100:
            assert (of_document == EMPTY).all()
        else:
            chosen = select_blocks(
                *(x[here] for x in inputs[:2]), selected_blocks=1, impl=impl, **SMALL
            )
            assert torch.equal(of_document, chosen[0]) and (chosen != EMPTY).any()


def test_log_sum_exp(device):
    q, k, v = make_qkv(1, 150, 2, 1, 64, fp32, device)
    blocks = all_blocks(q, 1, None, **SMALL)
    layout = make_layout(q, None, **SMALL)
    _, lse = sparse_forward(q[0], k[0], v[0], blocks[0], layout, 2**30)
    scores = torch.einsum("thk,sk->ths", q[0], k[0, :, 0]) / 8
    causal = torch.ones(150, 150, dtype=torch.bool, device=device).tril()[:, None]
    torch.testing.assert_close(lse, scores.masked_fill(~causal, float("-inf")).logsumexp(-1))


@pytest.mark.gpu
def test_wide_heads_of_float32_are_refused(device):
    with pytest.raises(ValueError, match="head_dim of 256 take bfloat16 or float16"):
        attend_sparsely(*make_qkv(1, 8, 4, 1, 256, fp32, device), impl="triton")


def test_refuses_a_document_that_its_lists_cannot_name():
    q = torch.empty(1, 32 * (EMPTY + 1), 0)
    with pytest.raises(ValueError, match="up to 32767 blocks of 32 tokens"):
        make_layout(q, None, 32, 32)


@pytest.mark.parametrize(
    ("workspace_bytes", "K"), [(2**22, 64), (2**23, 64), (2**30, 64), (2**24, 256)]
)
def test_footprint_is_what_is_allocated(workspace_bytes, K, monkeypatch):
    """Launches are left out, so that 8,192 tokens take no time; what is allocated does not depend
    on the lists."""
    T, H, G = 8192, 8, 2
    for module in (band, combine, gather, selection):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, NoLaunch())
    monkeypatch.setattr(sparse, "SCORES_BYTES", 2**21)
    # Nothing is taken from a cache, whose numbers are for other SCORES_BYTES.
    monkeypatch.setattr(sparse, "sparse_workspace", sparse.sparse_workspace.__wrapped__)
    q, k, v = (torch.empty(1, T, n, K, dtype=bf16) for n in (H, G, G))
    kind = Sparse(8, window=256, dense_below=0, workspace_bytes=workspace_bytes)
    kind._divide(q, None)  # tables are made once and kept
    footprint = kind.footprint(T, H, G, K)
    with Peak() as forward:
        [out], [lse], lists = kind.forward(q, k, v, None, None, "cpu", True)
    assert (
        out.nbytes + lse.nbytes == T * footprint.results and lists.nbytes == T * footprint.choices
    )
    kept = out.nbytes + lse.nbytes + lists.nbytes
    assert forward.peak == pytest.approx(kept + footprint.forward, rel=0.01)
    with Peak() as backward:
        gradients = kind.backward(out, q, k, v, None, [out], [lse], lists, None, "cpu", True)
    expected = sum(g.nbytes for g in gradients) + footprint.backward
    assert backward.peak == pytest.approx(expected, rel=0.01)


def test_flops(monkeypatch):
    """Blocks of 64, window of 1: tokens of block b attend to block 0, b, and one of b - 1
    candidates."""
    flops = Sparse(1, window=64, dense_below=0).flops(64 * 5, 2, 1, 64)
    product = 2 * 64 * 64 * 2 * 64  # two query heads
    gathered, in_band, scored = 0 + 0 + 1 + 1 + 1, 1 + 2 + 2 + 2 + 2, 1 + 2 + 3
    assert flops.forward == 2 * (gathered + in_band) * product and flops.choice == scored * product
    assert flops.backward == (5 * gathered + 7 * in_band) * product
    # Block 2 has two queries per key/value head, block 3 one, and block 4 one on half as many keys.
    monkeypatch.setattr(sparse, "EARLY", 64 * 3)
    monkeypatch.setattr(sparse, "LATE", 64 * 4)
    monkeypatch.setattr(sparse, "_scored_pairs", sparse._scored_pairs.__wrapped__)
    flops = Sparse(1, window=64, dense_below=0).flops(64 * 5, 2, 1, 64)
    assert flops.choice == (1 + 2 / 2 + 3 / 4) * product


@pytest.mark.gpu(gib=44)
def test_past_2_to_the_31_elements(device):
    """q, out and slots past 2^31 elements. Every block holds the same keys: to attend to many is to
    attend to one."""
    T, S = 540_672, 8
    q, k, v = (random(1, 64, n, 128, seed=n, dtype=bf16, device=device) for n in (32, 8, 9))
    v = v[:, :, :8]
    long = [x.repeat(1, T // 64, 1, 1).requires_grad_() for x in (q, k, v)]
    out = attend_sparsely(*long, selected_blocks=S, workspace_bytes=2**34)
    dq, dk, dv = torch.autograd.grad(out, long, torch.ones_like(out))
    assert dk.isfinite().all() and dv.isfinite().all()
    q, k, v = (x.float().requires_grad_() for x in (q, k, v))
    expected = attention_reference(q, k, v)
    (expected_dq,) = torch.autograd.grad(expected.sum(), q)
    torch.testing.assert_close(out[:, -1].float(), expected[:, 63], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dq[:, -1].float(), expected_dq[:, 63], rtol=2e-2, atol=2e-2)
