"""Stores of tokens: any part of a document, its end included; joined stores; the split into two
shares."""

import json
import tracemalloc
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.data.test_packing import EOS, make_documents
from training.data.corpus import open_stores
from training.data.tokenizer import ByteTokenizer
from training.data.tokens import JoinedStore, TokenStore, split


def with_peak(call):
    """Returns what a call returns, and the most bytes that were allocated while it ran."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_corpus_takes_little_more_memory_than_its_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(json.dumps({"text": "word " * (20 + i % 100)}) + "\n" for i in range(6000))
    )
    size = file.stat().st_size
    [store], bytes_ = with_peak(lambda: open_stores([str(file)], ByteTokenizer(), 256))
    assert size > 2_000_000 and len(store.lengths) == 6000 and store.source(5999) == f"{file}:6000"
    assert bytes_ < 1.5 * size


def test_identity_is_the_checksum_of_lengths_tokens_and_masks():
    """Checkpoints hold it, so a change of it would make them refuse their own data."""
    documents = [*make_documents([3]), *make_documents([4, 2], masked=2), *make_documents([1])]
    expected = 0
    for document in documents:
        parts = [f"{len(document.tokens) + 1};".encode(), document.tokens]
        for part in parts if document.masked is None else [*parts, document.masked]:
            expected = zlib.crc32(part, expected)
    store = TokenStore(iter(documents), eos_id=99)
    assert store.identity == expected
    assert [store.read_masked(i, 0, 2)[1].tolist() for i in range(4)] == [
        [False] * 2,
        *[[True] * 2] * 2,
        [False] * 2,
    ]
    selected = split(store, 0.3, seed=0)[0]
    arrays = [selected.documents, np.zeros(len(selected.documents), np.int64), selected.lengths]
    assert selected.identity == zlib.crc32(b"".join(array.tobytes() for array in arrays), expected)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=40),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 3),
)
def test_split_takes_documents_one_after_the_other(lengths, fraction, seed):
    """Each drawn document is held out if what is left of the share holds it."""
    store = SimpleNamespace(
        lengths=np.array(lengths), eos_id=0, are_samples=False, identity=0, columns=()
    )
    allowed, expected = fraction * sum(lengths), []
    for i in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        if lengths[i] <= allowed:
            allowed -= lengths[i]
            expected.append(i)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.data.tokens.AT_ONCE", 7)
        train, held_out = split(store, fraction, seed)
    assert held_out.documents.tolist() == (expected or [int(np.argmin(lengths))])
    assert (
        sorted([*train.documents.tolist(), *expected]) == list(range(len(lengths))) or not expected
    )


def test_split_takes_17_bytes_per_document():
    count = 2_000_000
    lengths = np.random.default_rng(0).integers(2, 3000, count)
    store = SimpleNamespace(lengths=lengths, eos_id=0, are_samples=False, identity=0, columns=())
    (train, _), bytes_ = with_peak(lambda: split(store, 0.01, seed=0))
    assert bytes_ < 17.5 * count and len(train.lengths) > 0.98 * count


def test_any_part_of_a_document_ends_with_its_end():
    store = TokenStore([*make_documents([3], masked=2), *make_documents([4])], eos_id=99)
    assert store.lengths.tolist() == [4, 5] and store.are_samples
    ids, is_masked = store.read_masked(0, 1, 4)
    assert ids.tolist() == [2, 3, 99] and is_masked.tolist() == [True, False, False]
    assert store.read(0, 0, 4).tolist() == [1, 2, 3, 99] and store.read(0, 1, 3).tolist() == [2, 3]
    assert store.read(1, 4, 5).tolist() == [99] and store.read(1, 2, 2).tolist() == []
    assert store.read(0, 0, 4).dtype == store.lengths.dtype == np.int64


def test_documents_of_several_stores_are_one_store():
    one, two = (TokenStore(make_documents(lengths), eos_id=99) for lengths in ([3, 1], [2]))
    joined = JoinedStore([one, two])
    assert joined.lengths.tolist() == [4, 2, 3] and not joined.are_samples
    assert [joined.read(i, 0, 2).tolist() for i in range(3)] == [[1, 2], [4, 99], [1, 2]]
    assert joined.identity != JoinedStore([two, one]).identity


def test_split_holds_out_whole_documents():
    lengths = [49, 2, 6, 39, 19, 8, 10, 59]
    store = TokenStore(make_documents(lengths), EOS)
    train, held_out = split(store, 0.15, seed=5)
    again = split(store, 0.15, seed=5)
    assert [s.documents.tolist() for s in again] == [
        s.documents.tolist() for s in (train, held_out)
    ]
    assert sorted([*train.documents, *held_out.documents]) == list(range(8))
    assert 0 < held_out.lengths.sum() <= 0.15 * 200 and train.identity != held_out.identity
    assert train.read(1, 0, 3).tolist() == store.read(int(train.documents[1]), 0, 3).tolist()
    others = [split(store, 0.15, seed=s)[1] for s in range(6)]
    assert len({tuple(sorted(other.documents.tolist())) for other in others}) > 1
    train, held_out = split(store, 0.001, seed=0)
    assert held_out.lengths.tolist() == [3] and len(train.lengths) == 7


def test_split_of_one_document():
    store = TokenStore(make_documents([9]), EOS)
    train, held_out = split(store, 0.2, seed=0)
    assert train.read(0, 0, 8).tolist() == list(range(1, 9)) and train.lengths.tolist() == [8]
    assert held_out.read(0, 0, 2).tolist() == [9, EOS] and held_out.lengths.tolist() == [2]
    with pytest.raises(ValueError, match="one document of 2 tokens, too short"):
        split(TokenStore(make_documents([1]), EOS), 0.5, seed=0)
    with pytest.raises(ValueError, match="the data are one sample"):
        split(TokenStore(make_documents([9], masked=2), EOS), 0.2, seed=0)
