"""Each piece alone against its reference."""

import functools
import itertools

import pytest
import torch

from kernels.attention.nsa import window_scores
from kernels.attention.nsa.window_scores import (
    WINDOW_WEIGHTS,
    score_windows,
    window_scores_reference,
)
from kernels.attention.sparse import selection, sparse_attention
from kernels.attention.sparse.inverse_index import build_inverse_index
from kernels.attention.sparse.layout import EMPTY, make_layout
from kernels.attention.sparse.selection import (
    ScoresConfig,
    blocks_at_a_time,
    choose_blocks,
    ranges,
    round_keys,
    score_blocks,
    score_width,
    scored_keys,
    scores_reference,
    top_blocks,
    top_blocks_reference,
)
from tests.kernels.attention.inputs import make_qkv, random_lists, segments_of, select_blocks
from tests.kernels.compare import random

SMALL = {"block_size": 32, "window": 64}
SEGMENTS = segments_of([150, 30, 120], [300])


def entries_by_row(blocks, layout, heads, tokens):
    """Entries of a range of tokens by row, in plain Python; blocks [tokens of all documents, G,
    selected]."""
    (N, _, S), rows = blocks.shape, [[] for _ in range(len(heads) * layout.num_blocks)]
    for (i, head), token in itertools.product(enumerate(heads), tokens):
        first_block = int(layout.first_block[layout.token_block[token]])
        for s, block in enumerate(blocks[token, head].tolist()):
            if block != EMPTY:
                rows[i * layout.num_blocks + first_block + block].append((i * N + token) * S + s)
    return rows


@pytest.mark.parametrize(("heads", "num_tokens"), [(range(0, 3), 600), (range(1, 2), 250)])
def test_inverse_index(heads, num_tokens, device, poisoned_memory):
    layout = make_layout(torch.empty(2, 300, 0, device=device), SEGMENTS, **SMALL)
    blocks = random_lists(torch.empty(2, 300, 0, device=device), 3, SEGMENTS, 3, **SMALL).flatten(
        0, 1
    )
    token_ranges = ranges(600, num_tokens)
    indices = build_inverse_index(blocks, layout, heads, token_ranges, chunk=20)
    all_expected = [entries_by_row(blocks, layout, heads, tokens) for tokens in token_ranges]
    for index, expected in zip(indices, all_expected, strict=True):
        first = index.first_entry.tolist()
        assert [index.entries[a:b].tolist() for a, b in itertools.pairwise(first)] == expected
        items = [-(-len(row) // 20) for row in expected]
        assert index.first_item.diff().tolist() == items and sum(items) <= len(index.item_row)
        item_row = [row for row, count in enumerate(items) for _ in range(count)]
        assert index.item_row.tolist() == item_row + [len(expected)] * (
            len(index.item_row) - len(item_row)
        )


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("mean_keys", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_round_keys(dtype, mean_keys, device, poisoned_memory):
    """Keys past FP8's range included; keys of short blocks are 0."""
    k = 1000 * random(600, 2, 64, dtype=torch.float32 if dtype == FP8 else dtype, device=device)
    layout = make_layout(k.view(2, 300, 2, 64), SEGMENTS, 32, 64)
    found = round_keys(k, layout, dtype, mean_keys).float()
    assert found.abs().max() == 448 or dtype != FP8
    for block, (start, stop) in enumerate(
        zip(layout.block_start.tolist(), layout.block_stop.tolist())
    ):
        if stop - start == 32:
            keys = k[start:stop]
            keys = keys.float().unflatten(0, (-1, 2)).mean(1).to(k.dtype) if mean_keys else keys
            expected = scored_keys(keys, dtype).transpose(0, 1)
            torch.testing.assert_close(
                found[:, block], expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
            )
        else:
            assert (found[:, block, (stop - start + 1) // (1 + mean_keys) :] == 0).all()


@pytest.mark.parametrize(("early", "late"), [(selection.EARLY, selection.LATE), (0, 96), (96, 128)])
@pytest.mark.parametrize(("group", "dtype", "scored"), [
    (1, torch.float32, torch.float32),
    (3, torch.float32, FP8),
    (4, torch.bfloat16, torch.bfloat16),
    (4, torch.bfloat16, FP8),
])  # fmt: skip
def test_scores(group, dtype, scored, early, late, device, monkeypatch):
    """A range that begins and ends within documents. Each `Look` has tokens, in documents of unlike
    lengths."""
    if scored == FP8 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    monkeypatch.setattr(selection, "CHUNK", 4)
    monkeypatch.setattr(selection, "EARLY", early)
    monkeypatch.setattr(selection, "LATE", late)
    q, k, _ = (x.flatten(0, 1) for x in make_qkv(2, 300, 2 * group, 2, 64, dtype, device))
    layout = make_layout(q.view(2, 300, 2 * group, 64), SEGMENTS, **SMALL)
    expected = scores_reference(q, k, layout, scored)
    query_blocks = range(3, layout.num_blocks - 1)
    width = score_width(layout, query_blocks)
    config = ScoresConfig(rows=64, keys=64, num_warps=4, num_stages=1)
    scores, maxima = score_blocks(
        q,
        lambda mean_keys: round_keys(k, layout, scored, mean_keys),
        layout,
        query_blocks,
        width,
        config,
    )
    compared = 0
    for i, block in enumerate(query_blocks):
        start, stop = int(layout.block_start[block]), int(layout.block_stop[block])
        left = int(layout.index_of_block[block]) - layout.window_blocks + 1
        if left > 1:
            found = scores[1, i * 32 : i * 32 + stop - start, 1:left]
            tolerance = 1e-5 if scored == torch.float32 else 2e-2
            largest_score = float(expected[start:stop, 1, 1:left].abs().max())
            torch.testing.assert_close(
                found, expected[start:stop, 1, 1:left], rtol=0, atol=tolerance * largest_score
            )
            block_0 = torch.full_like(found[:, :1], float("-inf"))  # is no candidate
            largest = [chunk.amax(1) for chunk in torch.cat([block_0, found], 1).split(4, 1)]
            of_chunks = maxima[1, i * 32 : i * 32 + stop - start, : len(largest)]
            assert torch.equal(of_chunks, torch.stack(largest, 1))
            compared += left - 1
    assert compared > 10


@pytest.mark.parametrize(("early", "score"), [(selection.EARLY, 11.0), (0, 8.0)])
def test_scores_by_hand(early, score, monkeypatch):
    """Two query heads [1, 0] and [3, 4], whose mean is [2, 2]; block 1's best key is [5, -1]:
    logits 5, 11 and 8."""
    monkeypatch.setattr(selection, "EARLY", early)
    q = torch.tensor([[1.0, 0.0], [3.0, 4.0]]).expand(32 * 4, 2, 2)
    k = torch.zeros(32 * 4, 1, 2)
    k[40, 0] = torch.tensor([5.0, -1.0])
    layout = make_layout(q[None], None, **SMALL)
    assert scores_reference(q, k, layout)[-1, 0].tolist() == [
        float("-inf"),
        score,
        float("-inf"),
        float("-inf"),
    ]


@pytest.mark.parametrize(
    ("group", "dtype"), [(1, torch.float32), (3, torch.float32), (4, torch.bfloat16)]
)
def test_nsa_scores(group, dtype, device, monkeypatch):
    """Two documents with 22 and 15 windows, in blocks of 64; keys of windows as the compressed
    branch has them.

    In the interpreter a tile has 2 blocks, so that windows between two tiles count in both.
    """
    if device.type == "cpu":
        monkeypatch.setattr(window_scores, "BLOCK_J", 2)
        for module in (selection, window_scores):
            monkeypatch.setattr(module, "CHUNK", 2)
    lengths, first_window = (370, 260), (0, 22)
    q = random(630, 2 * group, 64, dtype=dtype, device=device)
    pooled, lse = (
        random(2, 37, 64, seed=1, dtype=dtype, device=device),
        random(630, 2 * group, seed=2, device=device),
    )
    layout = make_layout(q[None], segments_of(lengths), 64, 128)
    windows = torch.tensor(first_window, dtype=torch.int32, device=device).repeat_interleave(
        torch.tensor([6, 5], device=device)
    )
    scores, _ = score_windows(
        q, pooled, lse, windows, layout, range(11), score_width(layout, range(11))
    )
    compared = 0
    for start, length, window, row in ((0, 370, 0, 0), (370, 260, 22, 384)):
        tokens, left = slice(start, start + length), torch.arange(length, device=device) // 64 - 1
        keys = pooled[:, window:].transpose(0, 1).double()
        expected = window_scores_reference(
            q[tokens].double(), keys, lse[tokens], left, -(-length // 64)
        )
        found = scores[:, row : row + length, : expected.shape[2]].double().transpose(0, 1)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        is_candidate = expected > float("-inf")
        torch.testing.assert_close(
            found[is_candidate], expected[is_candidate], rtol=tolerance, atol=0
        )
        compared += int(is_candidate.sum())
    assert compared > 800 and sum(WINDOW_WEIGHTS) == 8


@pytest.mark.parametrize("chunk", [2, 4])
@pytest.mark.parametrize("kind", ["random", "negative", "ties", "all equal", "zeros", "huge"])
def test_top_blocks(kind, chunk, device, poisoned_memory, monkeypatch):
    """Exactly the reference's lists on given scores: highest first, of equals the lowest index."""
    monkeypatch.setattr(selection, "CHUNK", chunk)
    layout = make_layout(torch.empty(2, 300, 0, device=device), SEGMENTS, **SMALL)
    num_blocks, S = layout.num_blocks, 3
    scores = torch.rand(2, num_blocks * 32, 16, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    if kind == "ties":
        scores = (scores * 5).floor() - 2
        scores[:, ::2][scores[:, ::2] == 0] = -0.0
    elif kind == "negative":
        scores -= 0.7
    elif kind != "random":
        scores = torch.full_like(scores, {"all equal": 0.3, "zeros": 0.0, "huge": 3e38}[kind])
    of_candidates = torch.full_like(scores, float("-inf"))
    by_token = torch.full((600, 2, 16), float("-inf"), device=device)
    for block in range(num_blocks):
        start, stop = int(layout.block_start[block]), int(layout.block_stop[block])
        candidates = slice(1, max(1, int(layout.index_of_block[block]) - layout.window_blocks + 1))
        rows = slice(block * 32, block * 32 + stop - start)
        of_candidates[:, rows, candidates] = scores[:, rows, candidates]
        by_token[start:stop] = of_candidates[:, rows].transpose(0, 1)
    blocks = torch.full((600, 2, S), EMPTY, dtype=torch.int16, device=device)
    maxima = of_candidates.unflatten(-1, (-1, chunk)).amax(-1)
    top_blocks(scores, maxima, blocks, layout, range(num_blocks))
    assert torch.equal(blocks, top_blocks_reference(by_token, S))


def test_choosing_by_ranges_is_choosing_at_once(device):
    q, k, _ = (x.flatten(0, 1) for x in make_qkv(2, 300, 2, 1, 64, torch.float32, device))
    layout = make_layout(q.view(2, 300, 2, 64), SEGMENTS, **SMALL)
    keys = round_keys(k, layout, k.dtype)
    score = functools.partial(score_blocks, q, lambda mean_keys: keys, layout)
    whole, by_ranges = (
        torch.full((600, 1, 3), EMPTY, dtype=torch.int16, device=device) for _ in range(2)
    )
    choose_blocks(score, layout, whole, 2**30)
    choose_blocks(score, layout, by_ranges, 1)
    assert torch.equal(whole, by_ranges) and (whole != EMPTY).any()


@pytest.mark.parametrize(("wave", "blocks"), [(1, 8), (2 * 3 * 32, 6), (2 * 9 * 32, 8), (10, 8)])
def test_blocks_at_a_time(wave, blocks):
    """Blocks of 32 tokens and two heads. The workspace holds 8 blocks: two waves of 3 blocks, no
    wave of 9."""
    assert blocks_at_a_time(899, 100, 32, 2, wave) == blocks
    assert blocks_at_a_time(99, 100, 32, 2, wave) == 1


def test_a_head_chooses_alike_alone_and_among_others(device):
    q, k, _ = make_qkv(1, 250, 4, 2, 64, torch.float32, device)
    both = select_blocks(q, k, selected_blocks=2, impl="triton", **SMALL)
    second = select_blocks(q[:, :, 2:], k[:, :, 1:], selected_blocks=2, impl="triton", **SMALL)
    assert torch.equal(both[:, :, 1:], second)


@pytest.mark.parametrize(("scored", "scale"), [
    (torch.float32, 1), (torch.float32, 50), (torch.bfloat16, 1), (FP8, 1),
])  # fmt: skip
def test_lists_differ_from_the_references_in_near_ties_alone(scored, scale, device, monkeypatch):
    """Two documents; where lists differ, the scores of what they hold differ by rounding."""
    if scored == FP8 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    monkeypatch.setattr(sparse_attention, "scoring_dtype", lambda q: scored)
    segments, options = segments_of([330, 270]), {"selected_blocks": 3, **SMALL}
    q, k, _ = make_qkv(
        1, 600, 4, 2, 64, torch.float32 if scored == torch.float32 else torch.bfloat16, device
    )
    ours = select_blocks(q * scale, k, segments, impl="triton", **options)[0]
    layout = make_layout(q, segments, **SMALL)
    scores = scores_reference(q[0] * scale, k[0], layout, scored)
    expected = top_blocks_reference(scores, 3)
    padded = torch.nn.functional.pad(scores, (0, 1), value=0)  # the last column stands for EMPTY

    def held(lists):
        return padded.gather(-1, lists.long().clamp(max=padded.shape[-1] - 1)).sort(-1).values

    # The interpreter rounds halves up to bfloat16. On an H200 FP8 scores of one in 3,600 differ by
    # a rounding.
    tolerance = {torch.bfloat16: 5e-3, FP8: 1e-2 if device.type == "cuda" else 1e-5}.get(
        scored, 1e-5
    )
    torch.testing.assert_close(
        held(ours),
        held(expected),
        rtol=tolerance,
        atol=tolerance * float(scores[scores.isfinite()].max()),
    )
    different = (ours != expected).any(-1).float().mean()
    assert different < 0.01 and (ours != EMPTY).any(-1).float().mean() > 0.5
    own = layout.index_of_block.to(device)[layout.token_block.to(device).long()].long()[
        :, None, None
    ]
    assert ((ours == EMPTY) | ((ours >= 1) & (ours <= own - 2))).all()
    assert (ours[..., 1:] > ours[..., :-1])[ours[..., 1:] != EMPTY].all()


def test_a_needle_is_found(device):
    """One key that a late query points at: its block is chosen."""
    q, k, _ = make_qkv(1, 400, 2, 1, 64, torch.float32, device)
    k[0, 75] = 3 * q[0, 399, 0]
    blocks = select_blocks(q, k, selected_blocks=1, impl="triton", **SMALL)
    assert blocks[0, 399, 0].tolist() == [75 // 32]
