"""Packing: no token is lost or duplicated, and none is predicted across documents."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.loader import PackedLoader
from training.data.packing import (
    BestFitPacking,
    ConcatenatedPacking,
    MixedPacking,
    Stream,
    best_fit,
    deal,
)
from training.data.sources import Document, read_documents
from training.data.tokens import TokenStore

EOS = 0


def make_documents(lengths, masked=0):
    """Returns documents of these lengths. Their tokens are all different, and none is EOS."""
    ids = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    mask = [np.arange(length) < masked if masked else None for length in lengths]
    return [
        Document(tokens, mask[i]) for i, tokens in enumerate(np.split(ids, np.cumsum(lengths)[:-1]))
    ]


def load_documents(path, tokenizer, vocab_size):
    return list(read_documents(path, tokenizer, vocab_size))


def make_loader(
    documents,
    context_length,
    batch_size,
    seed=0,
    rank=0,
    world_size=1,
    eos_id=EOS,
    packing=ConcatenatedPacking,
):
    store = TokenStore(documents, eos_id)
    return PackedLoader(
        store, packing(store.lengths, context_length, seed), batch_size, rank, world_size
    )


def test_a_stream_is_cut_into_pieces():
    stream = Stream(np.array([5, 1, 3]), np.array([2, 0, 1]))  # positions 0 .. 2, 3 .. 7, 8
    assert stream.cut(2, 6) == [(2, 2, 3), (0, 0, 3)]
    assert stream.cut(3, 8) == [(0, 0, 5)] and stream.cut(4, 5) == [(0, 1, 2)]
    assert stream.cut(7, 20) == [(0, 4, 5), (1, 0, 1)] and stream.cut(9, 20) == []


def test_sequences_are_dealt_to_ranks_by_cost():
    costs = np.array([[7, 1, 5, 2, 9, 0], [3, 3, 3, 3, 3, 3]])
    assert deal(costs[0, :4], 2).tolist() == [[1, 3], [0, 2]]
    assert deal(costs, 3).tolist() == [[[5, 1, 3], [4, 0, 2]], [[0, 1, 2], [5, 4, 3]]]
    assert deal(costs, 1)[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_packing_reads_no_tokens():
    """A packing is given lengths alone: its spans are the same for any tokens."""
    packing = ConcatenatedPacking(np.array([3, 6]), 4, seed=0)
    assert sorted(packing.spans(0, index) for index in range(2)) == [
        [(0, 0, 3), (1, 0, 1)],
        [(1, 1, 5)],
    ]
    assert packing.longest_document == 4 and packing.sequences_per_epoch == 2


def test_segments_and_masks():
    # Seed 0 keeps the order as given: 1 2 end 3 | 4 5 6 7, and the last end is dropped.
    [batch] = make_loader(make_documents([2, 5]), 4, 2).next_step()
    assert batch.input_ids.tolist() == [[1, 2, EOS, 3], [4, 5, 6, 7]]
    assert batch.targets.tolist() == [[2, EOS, -100, -100], [5, 6, 7, -100]]
    assert batch.documents.segments.tolist() == [[0, 0, 3], [0, 3, 4], [1, 0, 4]]
    assert batch.documents.positions_BT.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch.num_valid_tokens == 5
    assert (batch.input_ids.dtype, batch.targets.dtype) == (torch.int64, torch.int64)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    context_length=st.integers(2, 17),
    batch_size=st.integers(1, 3), seed=st.integers(0, 3),
)  # fmt: skip
def test_packing_loses_and_duplicates_no_token(lengths, context_length, batch_size, seed):
    documents = make_documents(lengths)
    total = sum(lengths) + len(lengths)
    if total < context_length:
        with pytest.raises(
            ValueError, match=f"{total} training tokens is shorter than one context_length"
        ):
            make_loader(documents, context_length, batch_size, seed)
        return
    loader = make_loader(documents, context_length, batch_size, seed)
    per_epoch = total // context_length
    sequences = []  # two epochs and a little more, in the global order
    while len(sequences) < 2 * per_epoch:
        [batch] = loader.next_step()
        sequences += list(zip(batch.input_ids, batch.targets, batch.documents.positions_BT))
        assert batch.num_valid_tokens == int((batch.targets != -100).sum())
        starts = (batch.documents.positions_BT == 0).nonzero().tolist()
        expected = (
            starts if batch.documents.segments is None else batch.documents.segments[:, :2].tolist()
        )
        assert starts == expected and batch.documents.are_whole
    for epoch in range(2):
        random = np.random.default_rng([seed, epoch])
        order, places = random.permutation(len(documents)), random.permutation(per_epoch)
        stream = np.concatenate([np.append(documents[i].tokens, EOS) for i in order])
        owner = np.concatenate([np.full(lengths[i] + 1, rank) for rank, i in enumerate(order)])
        rows = sequences[epoch * per_epoch : (epoch + 1) * per_epoch]
        rows = [rows[i] for i in np.argsort(places)]  # in the order of the stream
        for i, (ids, targets, positions) in enumerate(rows):
            cut = slice(i * context_length, (i + 1) * context_length)
            part = owner[cut]
            longest_first = np.lexsort(
                (np.arange(len(part)), part, -(part[:, None] == part).sum(1))
            )
            assert ids.tolist() == stream[cut][longest_first].tolist()
            part = part[longest_first]
            assert positions.tolist() == [
                j - part.tolist().index(rank) for j, rank in enumerate(part)
            ]
            following, crosses = np.append(ids[1:], -100), np.append(part[1:] != part[:-1], True)
            assert targets.tolist() == np.where(crosses, -100, following).tolist()


def best_fit_one_by_one(sizes, capacity):
    """Returns each bin's room, ascending, after every item went into the bin with the least room
    that holds it."""
    rooms = []
    for size in sizes:
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - size)
    return sorted(rooms)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=40), capacity=st.integers(12, 20))
def test_best_fit_is_that_of_items_taken_one_by_one(sizes, capacity):
    sizes = np.array(sorted(sizes, reverse=True))
    used = np.bincount(best_fit(sizes, capacity), weights=sizes)
    assert sorted((capacity - used).tolist()) == best_fit_one_by_one(sizes.tolist(), capacity)
    assert best_fit(np.array([5, 3, 3, 2, 1]), 6).tolist() == [0, 1, 1, 2, 0]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    context_length=st.integers(2, 17),
    split=st.booleans(),
)
def test_best_fit_packs_each_document_once_an_epoch(lengths, context_length, split):
    lengths = np.array(lengths)
    if not split and lengths.min() > context_length:
        with pytest.raises(ValueError, match="no document fits into context_length"):
            BestFitPacking(lengths, context_length, 0, split)
        return
    packing = BestFitPacking(lengths, context_length, 0, split)
    for epoch in range(2):
        sequences = [packing.spans(epoch, index) for index in range(packing.sequences_per_epoch)]
        assert all(0 < sum(b - a for _, a, b in spans) <= context_length for spans in sequences)
        found = [(d, i) for spans in sequences for d, a, b in spans for i in range(a, b)]
        held = [d for d, n in enumerate(lengths) if split or n <= context_length]
        assert sorted(found) == [(d, i) for d in held for i in range(lengths[d])]
        if not split:
            assert all(a == 0 and b == lengths[d] for spans in sequences for d, a, b in spans)
        sizes, of_sequence = packing.document_lengths()
        for index, spans in enumerate(sequences if epoch == 0 else []):
            expected = [b - a for _, a, b in spans]
            expected += [context_length - sum(expected)] if sum(expected) < context_length else []
            assert sorted(sizes[of_sequence == index].tolist()) == sorted(expected)
    assert packing.longest_document == max(
        min(n, context_length) for n in lengths if split or n <= context_length
    )


def test_best_fit_meets_others_in_each_epoch():
    packing = BestFitPacking(np.full(40, 5), 10, seed=0)
    epochs = [
        {
            frozenset(d for d, _, _ in packing.spans(epoch, i))
            for i in range(packing.sequences_per_epoch)
        }
        for epoch in (0, 1)
    ]
    assert packing.sequences_per_epoch == 20 and len(epochs[0] & epochs[1]) < 10


def test_a_mixture_has_each_path_in_its_share_at_every_length():
    lengths = [np.full(200, 10), np.full(7, 9), np.full(30, 4)]
    packings = [ConcatenatedPacking(lengths[0], 10, 0), BestFitPacking(lengths[1], 10, 0)]
    packings.append(BestFitPacking(lengths[2], 10, 0))
    mixed = MixedPacking(packings, np.array([0, 200, 207]), [6, 3, 1])
    assert mixed.sequences_per_epoch == 200 + 7 + 15
    taken = [[], [], []]
    for index in range(2000):
        spans = mixed.spans(*divmod(index, mixed.sequences_per_epoch))
        which = int(np.searchsorted([200, 207], spans[0][0], side="right"))
        taken[which].append([(d - [0, 200, 207][which], a, b) for d, a, b in spans])
        assert all(
            abs(len(taken[i]) - (index + 1) * share) < 1.5
            for i, share in enumerate((0.6, 0.3, 0.1))
        )
    for packing, sequences in zip(
        packings, taken
    ):  # each packing keeps its own order, epoch after epoch
        assert sequences == [
            packing.spans(*divmod(i, packing.sequences_per_epoch)) for i in range(len(sequences))
        ]
    sizes, of_sequence = mixed.document_lengths()
    assert set(of_sequence.tolist()) == set(range(mixed.sequences_per_epoch))
    for index in range(7):
        whole = sum(b - a for _, a, b in mixed.spans(0, index))
        assert (
            sizes[of_sequence == index].sum() == 10 and sizes[of_sequence == index].max() <= whole
        )
    assert MixedPacking(packings[:2], np.array([0, 200]), [2e4, 1e4]).spans(5, 100)
    with pytest.raises(ValueError, match=r"data_weights: 1 is less than 1 / 10,000 of all"):
        MixedPacking(packings[:2], np.array([0, 200]), [1, 1e6])
