"""Stores of tokens: any part of a document, its end included; joined stores; the split into two shares."""

import numpy as np
import pytest

from tests.training.data.test_packing import EOS, make_documents
from training.data.tokens import JoinedStore, TokenStore, split


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
    assert [s.documents.tolist() for s in again] == [s.documents.tolist() for s in (train, held_out)]
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
