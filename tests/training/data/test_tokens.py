"""The store of tokens: any part of a document, its end included, and an identity that every token decides."""

import numpy as np

from tests.training.data.test_packing import make_documents
from training.data.sources import Document
from training.data.tokens import TokenStore


def test_any_part_of_a_document_ends_with_its_end():
    store = TokenStore([Document(np.array([5, 6, 7], dtype=np.uint8), 2), *make_documents([4])], eos_id=99)
    assert store.lengths.tolist() == [4, 5] and store.num_masked.tolist() == [2, 0]
    assert store.read(0, 0, 4).tolist() == [5, 6, 7, 99] and store.read(0, 1, 3).tolist() == [6, 7]
    assert store.read(1, 4, 5).tolist() == [99] and store.read(1, 2, 2).tolist() == []
    assert store.read(0, 0, 4).dtype == store.lengths.dtype == np.int64


def test_identity_is_that_of_earlier_checkpoints():
    """CRC-32 of "2,1;" and the two bytes, then "1,0;" and the one."""
    documents = [Document(np.frombuffer(b"ab", np.uint8), 1), Document(np.frombuffer(b"c", np.uint8))]
    assert TokenStore(documents, 0).identity == 0x7D37692F
    assert TokenStore(documents[::-1], 0).identity != TokenStore(documents, 0).identity
