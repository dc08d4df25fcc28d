"""Stores of tokens, from which any part of any document is read. prepared.py has the store on
disk."""

import zlib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from training.data.containers import place
from training.data.sources import Document
from training.host.errors import UserError

PROMPT = -1  # in the column "answer": a text that those behind it in its document go on from
NO_PROMPT = -1  # Python gives no object this hash
AT_ONCE = 2**16  # documents looked at together


class Store(Protocol):
    """Documents by their number. Each ends with the end-of-text id, or as its chat's template ends
    it."""

    eos_id: int  # the tokenizer's end-of-text id; padding of sequences has it, too
    lengths: np.ndarray  # int64 [N], tokens of each document, its end included
    # whether any document has tokens that are not targets, as a prompt's: it should not be cut
    are_samples: bool
    identity: (
        int  # a checksum of 32 bits over the documents, their order, their masks and their columns
    )
    columns: tuple[
        str, ...
    ] = ()  # names of the numbers that each token has beside its id, see sources.Document

    def source(self, document: int) -> str:
        """Returns a document's file; for a row with its number, as "a.jsonl:7"."""

    def prompt(self, document: int) -> int | None:
        """Returns a hash of a document's prompt, see sources.Document."""
        return None

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, is_masked) at positions start .. stop - 1 of a document, 0 <= start <= stop
        <= its length.

        Both are [stop - start], int64 and bool; a masked token is not a target. In a document of
        the tokens 5 6 7, positions 1 .. 3 are 6, 7 and the end-of-text id.
        """

    def read_columns(self, document: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns numbers of the tokens of read_masked, [stop - start], by the names of `columns`.

        They are float32, rewards and groups float64 until they are advantages.
        """
        return {}

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.read_masked(document, start, stop)[0]


class TokenStore(Store):
    """Documents in memory, all in one array: their tokens, 36 bytes per document, and a byte per
    token for masks.

    Each column takes 4 bytes per token. The documents are of one dtype, and each is dropped once it
    is copied.

    Attributes:
        text_identity: a checksum as `identity`, of no other column than "answer".
    """

    def __init__(self, documents: Iterable[Document], eos_id: int):
        self.eos_id, self.identity = eos_id, 0
        tokens, masked, borders = bytearray(), bytearray(), array("q", [0])
        self._files, self._numbers, self._lines = (
            [""],
            array("i"),
            array("q"),
        )  # a document's file is _files[number]
        dtype, values, self._prompts = np.dtype(np.uint8), dict[str, bytearray](), array("q")
        dtypes = dict[str, np.dtype]()  # of columns: float32, or float64 where a document's are
        for document in documents:
            own, dtype = np.ascontiguousarray(document.tokens).data, document.tokens.dtype
            length = len(own) + (not document.is_complete)
            self.identity = zlib.crc32(own, zlib.crc32(b"%d;" % length, self.identity))
            if document.masked is not None:  # masks begin with the first document that has one
                masked += bytes(borders[-1] - len(masked))
                masked += document.masked.data
                self.identity = zlib.crc32(document.masked.data, self.identity)
            for name, column in document.columns.items():
                assert len(column) == length, "whoever gives columns ends the tokens"
                is_wide = column.dtype == np.float64
                kind = dtypes.setdefault(name, np.dtype(np.float64 if is_wide else np.float32))
                values.setdefault(name, bytearray()).extend(column.astype(kind).tobytes())
            tokens += own
            if not document.is_complete:
                tokens += np.array(eos_id, dtype).tobytes()
            borders.append(borders[-1] + length)
            if document.file != self._files[-1]:
                self._files.append(document.file)
            self._numbers.append(len(self._files) - 1)
            self._lines.append(document.line)
            self._prompts.append(NO_PROMPT if document.prompt is None else document.prompt)
        self.are_samples = bool(masked)
        masked += bytes(borders[-1] - len(masked) if masked else 0)
        self._tokens, self._masked = np.frombuffer(tokens, dtype), np.frombuffer(masked, bool)
        self._borders = np.frombuffer(borders, np.int64)
        self.lengths, self.text_identity = (
            np.diff(self._borders),
            zlib.crc32(values.get("answer", b""), self.identity),
        )
        self._values = {
            name: np.frombuffer(column, dtypes[name]) for name, column in values.items()
        }
        for name, column in self._values.items():
            content = np.ascontiguousarray(column, np.float32).data
            self.identity = zlib.crc32(content, zlib.crc32(name.encode(), self.identity))
        assert all(len(column) == self._borders[-1] for column in self._values.values()), (
            "all documents have columns"
        )

    @property
    def has_targets(self) -> bool:
        """Whether some token is not masked."""
        return not len(self._masked) or not self._masked.all()

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._values)

    def column(self, name: str) -> np.ndarray:
        """Returns a column's numbers of the tokens of all documents, in their order."""
        return self._values[name]

    def drop_column(self, name: str) -> None:
        del self._values[name]

    def add_column(self, name: str, values: np.ndarray) -> None:
        """Gives each token another number. Values are float32 [tokens of all documents], in their
        order."""
        assert len(values) == self._borders[-1]
        self._values[name] = values
        self.identity = zlib.crc32(
            np.ascontiguousarray(values).data, zlib.crc32(name.encode(), self.identity)
        )

    def read_columns(self, document: int, start: int, stop: int) -> dict[str, np.ndarray]:
        first = int(self._borders[document])
        return {name: column[first + start : first + stop] for name, column in self._values.items()}

    def source(self, document: int) -> str:
        return place(self._files[self._numbers[document]], self._lines[document])

    def prompt(self, document: int) -> int | None:
        found = self._prompts[document]
        return None if found == NO_PROMPT else found

    def files(self) -> list[str]:
        return self._files[1:]

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        first = int(self._borders[document])
        ids, is_masked = (
            self._tokens[first + start : first + stop],
            self._masked[first + start : first + stop],
        )
        return ids.astype(np.int64), is_masked.copy() if self.are_samples else np.zeros(
            len(ids), bool
        )


class _View(Store):
    """Documents of other stores: `_find` returns (store, a document's number there, the position
    where it begins)."""

    @abstractmethod
    def _find(self, document: int) -> tuple[Store, int, int]: ...

    def source(self, document: int) -> str:
        store, number, _ = self._find(document)
        return store.source(number)

    def prompt(self, document: int) -> int | None:
        store, number, _ = self._find(document)
        return store.prompt(number)

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        store, number, first = self._find(document)
        return store.read_masked(number, first + start, first + stop)

    def read_columns(self, document: int, start: int, stop: int) -> dict[str, np.ndarray]:
        store, number, first = self._find(document)
        return store.read_columns(number, first + start, first + stop)


class JoinedStore(_View):
    """The documents of several stores, one store after the other."""

    def __init__(self, stores: Sequence[Store]):
        self._stores, self.eos_id = stores, stores[0].eos_id
        self.lengths = np.concatenate([store.lengths for store in stores])
        self.are_samples = any(store.are_samples for store in stores)
        self.identity = zlib.crc32(repr([store.identity for store in stores]).encode())
        self._ends = np.cumsum([len(store.lengths) for store in stores])
        self.columns = stores[0].columns
        if any(set(store.columns) != set(self.columns) for store in stores):
            first = " and ".join(self.columns) or "none"
            raise UserError(
                f"the first path of data has columns {first}, another one has not; give rows of "
                "one form"
            )

    def _find(self, document: int) -> tuple[Store, int, int]:
        index = int(np.searchsorted(self._ends, document, side="right"))
        store = self._stores[index]
        return store, document - int(self._ends[index]) + len(store.lengths), 0


def join(stores: Sequence[Store]) -> Store:
    return stores[0] if len(stores) == 1 else JoinedStore(stores)


class Selection(_View):
    """Some documents of a store, with numbers from 0.

    Args:
        documents: int64 [N], their numbers in `store`.
        part: (start, stop) of the positions that are selected of each document; None: the whole
        documents.
    """

    def __init__(self, store: Store, documents: np.ndarray, part: tuple[int, int] | None = None):
        self._store, self.eos_id, self.are_samples = store, store.eos_id, store.are_samples
        self.columns = store.columns
        self.documents, self._start = documents, part[0] if part else 0
        self.lengths = (
            np.full(len(documents), part[1] - part[0]) if part else store.lengths[documents]
        )
        starts = np.broadcast_to(np.int64(self._start), len(documents))
        self.identity = store.identity
        for numbers in (documents, starts, self.lengths):
            for i in range(0, len(numbers), AT_ONCE):
                self.identity = zlib.crc32(
                    np.ascontiguousarray(numbers[i : i + AT_ONCE]).data, self.identity
                )

    def _find(self, document: int) -> tuple[Store, int, int]:
        return self._store, int(self.documents[document]), self._start


def whole(store: Store, seed: int | None = None) -> Selection:
    """Selects all documents of a store in their order, or in one drawn by `seed`: any part is a
    fair sample then."""
    numbers = np.arange(len(store.lengths))
    return Selection(
        store, numbers if seed is None else np.random.default_rng(seed).permutation(numbers)
    )


def split(
    store: Store, validation_fraction: float, seed: int, may_be_one: bool = False
) -> tuple[Selection, Selection]:
    """Holds out whole documents, drawn by `seed`: at least one, and at most `validation_fraction`
    of all tokens.

    Answers to one prompt are held out together, unless there is no other prompt. A corpus of one
    document is cut, and its tail is held out; UserError if it is a sample or too short. Returns
    (training documents in their order, held-out documents in random order), neither empty. With
    `may_be_one` such a document is no error, and none is held out.
    """
    lengths = store.lengths
    if len(lengths) == 1:
        whole, only = int(lengths[0]), np.zeros(1, dtype=np.int64)
        cut = whole - max(
            2, int(whole * validation_fraction)
        )  # at least a token and the one it predicts
        if may_be_one and (cut < 2 or store.are_samples):
            return Selection(store, only), Selection(store, only[:0])
        if cut < 2 or store.are_samples:
            what = "sample" if store.are_samples else f"document of {whole} tokens"
            raise UserError(
                f"the data are one {what}, too short to hold some out; give more --data"
            )
        return Selection(store, only, (0, cut)), Selection(store, only, (cut, whole))
    units = _units(store)
    lengths = lengths if units is None else np.bincount(units, lengths).astype(np.int64)
    allowed, shortest = int(validation_fraction * lengths.sum()), lengths.min()
    order = np.random.default_rng(seed).permutation(len(lengths))
    held_out = [order[:0]]
    for i in range(0, len(order), AT_ONCE):
        drawn = order[i : i + AT_ONCE]
        while allowed >= shortest and len(drawn := drawn[lengths[drawn] <= allowed]):
            sums = np.cumsum(lengths[drawn])
            count = int(
                np.searchsorted(sums, allowed, side="right")
            )  # the first of them that fit together
            held_out.append(drawn[:count])
            allowed, drawn = allowed - int(sums[count - 1]), drawn[count:]
    chosen = np.concatenate(held_out) if len(held_out) > 1 else np.array([int(np.argmin(lengths))])
    del order, held_out, drawn
    if units is not None:
        chosen = np.concatenate([(units == unit).nonzero()[0] for unit in chosen])
    is_kept = np.ones(len(store.lengths), dtype=bool)
    is_kept[chosen] = False
    return Selection(store, is_kept.nonzero()[0]), Selection(store, chosen)


def _units(store: Store) -> np.ndarray | None:
    """Returns a number for each document with answers, equal for one prompt, int64 [N]. None: each
    is by itself.

    Documents are of one prompt if their rows say so: a tokenizer may join its end with an answer's
    beginning.
    """
    if "answer" not in store.columns:
        return None
    keys, first = list[int](), dict[int | None, int]()
    for document, length in enumerate(store.lengths.tolist()):
        ids, is_masked = store.read_masked(document, 0, length)
        shared = np.count_nonzero(store.read_columns(document, 0, length)["answer"] == PROMPT)
        prompt = shared + 1 if shared else int(np.append(is_masked, False).argmin())
        key = zlib.crc32(ids[:prompt].tobytes()) if prompt > 1 else -1 - document
        keys.append(
            key if (said := store.prompt(document)) is None else first.setdefault(said, key)
        )
    found, units = np.unique(keys, return_inverse=True)
    return units if len(found) > 1 else None
