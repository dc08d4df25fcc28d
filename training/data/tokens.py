"""Stores of tokens, from which any part of any document is read. prepared.py has the store on disk."""

import functools
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from training.data.sources import Document
from training.host.errors import UserError


class Store(Protocol):
    """Documents by their number. Each ends with the end-of-text id, or as its chat's template ends it."""

    eos_id: int  # the tokenizer's end-of-text id; padding of sequences has it, too
    lengths: np.ndarray  # int64 [N], tokens of each document, its end included
    are_samples: bool  # whether any document has tokens that are not targets, as a prompt's: it should not be cut

    @property
    def identity(self) -> int:
        """A checksum of 32 bits over the documents, their order and their masks. The first call may read them all."""

    def source(self, document: int) -> str:
        """Returns a document's file; for a .jsonl file with the line's number."""

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, is_masked) at positions start .. stop - 1 of a document, 0 <= start <= stop <= its length.

        Both are [stop - start], int64 and bool; a masked token is not a target. In a document of the tokens 5 6 7,
        positions 1 .. 3 are 6, 7 and the end-of-text id.
        """

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Returns the ids of read_masked."""
        return self.read_masked(document, start, stop)[0]


class TokenStore(Store):
    """Documents in memory; see Store."""

    def __init__(self, documents: list[Document], eos_id: int):
        self.eos_id, self._documents = eos_id, documents
        self.lengths = np.array([len(each.tokens) + (not each.is_complete) for each in documents], dtype=np.int64)
        self.are_samples = any(document.masked is not None for document in documents)

    @functools.cached_property
    def identity(self) -> int:
        crc = 0
        for length, document in zip(self.lengths, self._documents):
            crc = zlib.crc32(f"{length};".encode(), crc)
            crc = zlib.crc32(np.ascontiguousarray(document.tokens).data, crc)
            crc = crc if document.masked is None else zlib.crc32(document.masked.data, crc)
        return crc

    def source(self, document: int) -> str:
        return self._documents[document].source

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        ids, is_masked = np.full(stop - start, self.eos_id, dtype=np.int64), np.zeros(stop - start, dtype=bool)
        whole = self._documents[document]
        tokens = whole.tokens[start:stop]
        ids[: len(tokens)] = tokens
        if whole.masked is not None:
            is_masked[: len(tokens)] = whole.masked[start:stop]
        return ids, is_masked


class JoinedStore(Store):
    """The documents of several stores, one store after the other."""

    def __init__(self, stores: Sequence[Store]):
        self._stores, self.eos_id = stores, stores[0].eos_id
        self.lengths = np.concatenate([store.lengths for store in stores])
        self.are_samples = any(store.are_samples for store in stores)
        self._ends = np.cumsum([len(store.lengths) for store in stores])

    @functools.cached_property
    def identity(self) -> int:
        return zlib.crc32(repr([store.identity for store in self._stores]).encode())

    def _find(self, document: int) -> tuple[Store, int]:
        """Returns (store, the document's number in that store)."""
        index = int(np.searchsorted(self._ends, document, side="right"))
        store = self._stores[index]
        return store, document - int(self._ends[index]) + len(store.lengths)

    def source(self, document: int) -> str:
        store, number = self._find(document)
        return store.source(number)

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        store, number = self._find(document)
        return store.read_masked(number, start, stop)


def join(stores: Sequence[Store]) -> Store:
    return stores[0] if len(stores) == 1 else JoinedStore(stores)


class Selection(Store):
    """Some documents of a store, with numbers from 0.

    Args:
        documents: int64 [N], their numbers in `store`.
        part: (start, stop) of the positions that are selected of each document; None: the whole documents.
    """

    def __init__(self, store: Store, documents: np.ndarray, part: tuple[int, int] | None = None):
        self._store, self.eos_id, self.are_samples = store, store.eos_id, store.are_samples
        self.documents, self._start = documents, part[0] if part else 0
        self.lengths = np.full(len(documents), part[1] - part[0]) if part else store.lengths[documents]

    @functools.cached_property
    def identity(self) -> int:
        crc = self._store.identity
        for array in (self.documents, np.full_like(self.documents, self._start), self.lengths):
            crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
        return crc

    def source(self, document: int) -> str:
        return self._store.source(int(self.documents[document]))

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self._store.read_masked(int(self.documents[document]), self._start + start, self._start + stop)


def split(store: Store, validation_fraction: float, seed: int) -> tuple[Selection, Selection]:
    """Holds out whole documents, drawn by `seed`: at least one, and at most `validation_fraction` of all tokens.

    A corpus of one document is cut, and its tail is held out.

    Returns:
        (training documents in their order, held-out documents), neither empty. The held-out documents are in random
        order, so that a validation that stops early has seen a fair sample.

    Raises:
        UserError: there is one document, and it is a sample or too short to be cut.
    """
    lengths = store.lengths
    if len(lengths) == 1:
        whole, only = int(lengths[0]), np.zeros(1, dtype=np.int64)
        cut = whole - max(2, int(whole * validation_fraction))  # at least a token and the one it predicts
        if cut < 2 or store.are_samples:
            what = "sample" if store.are_samples else f"document of {whole} tokens"
            raise UserError(f"the data are one {what}, too short to hold some out; give more --data")
        return Selection(store, only, (0, cut)), Selection(store, only, (cut, whole))
    allowed, shortest = validation_fraction * lengths.sum(), lengths.min()
    held_out = []
    for i in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        if lengths[i] <= allowed:
            allowed -= lengths[i]
            held_out.append(i)
        if allowed < shortest:
            break
    chosen = np.array(held_out or [int(np.argmin(lengths))])
    is_kept = np.ones(len(lengths), dtype=bool)
    is_kept[chosen] = False
    return Selection(store, is_kept.nonzero()[0]), Selection(store, chosen)
