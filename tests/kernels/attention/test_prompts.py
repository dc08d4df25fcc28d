"""Answers that share a prompt: attention of every kind against its reference, which sees prompts as
beginnings."""

import functools

import pytest
import torch

from kernels.attention import libraries, prompts
from kernels.attention.attend import attention
from kernels.attention.documents import find_documents
from kernels.attention.full import FULL, attention_reference
from kernels.attention.prompts import copies_for
from kernels.attention.sparse import selection
from kernels.attention.sparse.layout import EMPTY
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window, window_reference
from kernels.parts import AttentionKind
from tests.kernels.attention.inputs import make_qkv, segments_of_groups
from tests.kernels.compare import compare_with_float64, outputs_and_gradients

ROWS = [(9, 3, 1, 20, 2, 5, 1, 1, 8), (4,), (3, 1), (30, 2)], [(60, 25), (1, 1, 3)]


@pytest.mark.parametrize("longest_together", [0, 3, 30, 10**6])
def test_full_attention_alone_and_together(longest_together, monkeypatch):
    segments = segments_of_groups(*ROWS)
    changed = libraries.KERNELS["cpu"]._replace(longest_together=longest_together, length_step=16)
    monkeypatch.setitem(libraries.KERNELS, "cpu", changed)
    inputs = make_qkv(2, 90, 4, 2, 32, torch.float32, torch.device("cpu"))
    compare_with_float64(
        functools.partial(attention_reference, segments=segments),
        functools.partial(attention, segments=segments),
        inputs, units=8,
    )  # fmt: skip


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("window", [2, 5, 64, 1000])
def test_windows_reach_into_the_prompt(window, impl, device, poisoned_memory):
    segments = segments_of_groups(*ROWS)
    inputs = make_qkv(2, 90, 2, 1, 64, torch.float32, device)
    compare_with_float64(
        lambda *x: window_reference(*x, window, segments)[0],
        functools.partial(attention, segments=segments, kind=Window(window), impl=impl), inputs,
    )  # fmt: skip


@pytest.mark.parametrize(("impl", "rows", "sizes", "looks"), [
    ("triton", [(150, 40, 1, 70), (96, 33, 64), (6,)], {"window": 64}, None),
    ("torch", [(150, 40, 1, 70), (96, 33, 64), (6,)], {"window": 64}, None),
    ("triton", [(31, 70, 9), (32, 40), (101, 1, 1, 5)], {"window": 32, "workspace_bytes": 2**14}, (32, 96)),
    ("triton", [(64,), (161, 7, 66)], {"window": 128}, None),
])  # fmt: skip
def test_sparse_answers_see_whole_blocks_of_their_prompt(
    impl, rows, sizes, looks, device, monkeypatch, poisoned_memory
):
    """Compares with answers before which the whole prompt is copied: outputs, every gradient, and
    the choice."""
    if looks:  # positions from which tokens look less closely
        for name, position in zip(("EARLY", "LATE"), looks):
            monkeypatch.setattr(selection, name, position)
    segments, kind = segments_of_groups(rows), Sparse(2, block_size=32, dense_below=32, **sizes)
    dtype, near = (torch.float32, 1e-5) if device.type == "cpu" else (torch.bfloat16, 2e-2)
    q, k, v = make_qkv(1, int(segments[-1, 2]), 2, 1, 64, dtype, device)
    ours = outputs_and_gradients(
        lambda *x: attention(*x, segments, kind=kind, impl=impl), [q, k, v]
    )
    copies = copies_for(kind, q, segments)
    assert len(copies.rows) < q.shape[1] + 32 * len(segments) and copies.segments.shape[1] == 5
    lists = copies.drop(
        kind.choose(*map(copies.expand, (q, k)), copies.segments, impl == "triton"), q
    )
    prompts._cached_copies.cache_clear()
    monkeypatch.setattr(Sparse, "copied", AttentionKind.copied)
    copied = outputs_and_gradients(
        lambda *x: attention(*x, segments, kind=kind, impl=impl), [q, k, v]
    )
    copies = copies_for(kind, q, segments)
    assert copies.segments.shape[1] == 3
    wanted = copies.drop(
        kind.choose(*map(copies.expand, (q, k)), copies.segments, impl == "triton"), q
    )
    prompts._cached_copies.cache_clear()
    assert torch.equal(lists, wanted) and (lists != EMPTY).any()
    for x, y in zip(ours, copied):
        torch.testing.assert_close(x, y, rtol=near, atol=near)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize(
    "rows",
    [
        [(2501, 600, 1, 70)],
        [(300, 7, 65), (2300, 100), (128, 129), (143,)],
        [(2100, 1072)],
        [(1, 2200), (40, 930, 1)],
    ],
)
def test_gpu_backends_match_float64(backend, rows, device):
    segments = segments_of_groups(rows)
    inputs = make_qkv(1, int(segments[-1, 2]), 2, 1, 64, torch.bfloat16, device)
    ours = functools.partial(attention, segments=segments, backend=backend)
    compare_with_float64(functools.partial(attention_reference, segments=segments), ours, inputs)


def test_prompts_are_found_and_refused():
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 2, 2, 2, 2, 2]])
    prompt_ids = torch.tensor([[0, 0, 0, 0, 0, 0, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1]])
    documents = find_documents(ids, prompt_ids)
    expected = [(0, 0, 3, 0, 0), (0, 3, 5, 0, 3), (0, 5, 6, 0, 3), (0, 6, 8, 0, 0)]
    expected += [(1, 0, 1, 0, 0), (1, 1, 3, 0, 0), (1, 3, 8, 1, 3)]
    assert documents.segments.tolist() == [list(row) for row in expected]
    assert documents.positions_BT.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert documents.lengths == [3, 2, 1, 2, 1, 2, 5] and documents.longest == 7
    assert documents.prompts == [(3, 2, 3), (2, 1, 5)]
    padded = documents.padded(2)
    assert padded.positions_BT[:, 8:].tolist() == 2 * [[0, 1]] and padded.are_whole
    assert padded.segments[[4, -1]].tolist() == [[0, 8, 10, 0, 0], [1, 8, 10, 0, 0]]
    assert find_documents(ids, ids).segments.shape[1] == 3
    for prompt_ids in (
        [[0, 0, 0, 0, 0, 0, 2, 2]],
        [[0, 0, 0, 1, 1, 0, 0, 0]],
        [[1, 1, 1, 1, 1, 1, 1, 1]],
    ):
        with pytest.raises(ValueError, match="must follow its prompt"):
            find_documents(ids[:1], torch.tensor(prompt_ids))
    q, k, v = make_qkv(1, 8, 1, 1, 64, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="give no lists"):
        attention(q, k, v, documents.segments[:4], kind=Sparse(1), lists=torch.zeros(1, 8, 1, 1))
    assert FULL.reads_prompts
