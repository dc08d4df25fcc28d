"""Stores of tokens, from which any part of any document is read.

prepared.py has the store on disk.
"""

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
    """Documents by their number, each with an end: the end-of-text id, or a chat's own.

    Attributes:
        eos_id: the tokenizer's end-of-text id; padding of sequences has it, too.
        lengths: int64 [N], tokens of each document, its end included.
        are_samples: some document has tokens that are not targets, and so should not be cut.
        identity: a checksum of 32 bits over the documents, their order, masks and columns.
        columns: names of the numbers that each token has beside its id, see sources.Document.
    """

    eos_id: int
    lengths: np.ndarray
    are_samples: bool
    identity: int
    columns: tuple[str, ...] = ()

    def source(self, document: int) -> str:
        """Returns a document's file; for a row with its number, as "a.jsonl:7"."""

    def prompt(self, document: int) -> int | None:
        """Returns a hash of a document's prompt, see sources.Document."""
        return None

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, is_masked) at positions start .. stop - 1 of a document, within its length.

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
    """Documents in memory, their tokens in one array.

    A document takes 36 bytes, a token a byte for its mask and 4 bytes per column. The documents are
    of one dtype, and each is dropped once it is copied.

    Attributes:
        text_identity: a checksum as `identity`, of no other column than "answer".
    """

    def __init__(self, documents: Iterable[Document], eos_id: int):
        self.eos_id, self.identity = eos_id, 0
        tokens, masked, borders = bytearray(), bytearray(), array("q", [0])
        # A document's file is _files[number].
        self._files, self._numbers, self._lines = [""], array("i"), array("q")
        self._prompts = array("q")
        columns = _Columns()
        dtype = np.dtype(np.uint8)
        for document in documents:
            dtype = document.tokens.dtype
            added = np.ascontiguousarray(document.tokens).data
            length = len(added) + (not document.is_complete)
            self.identity = zlib.crc32(added, zlib.crc32(b"%d;" % length, self.identity))
            if document.masked is not None:  # masks begin with the first document that has one
                masked += bytes(borders[-1] - len(masked))
                masked += document.masked.data
                self.identity = zlib.crc32(document.masked.data, self.identity)
            columns.add(document.columns, length)
            tokens += added
            if not document.is_complete:
                tokens += np.array(eos_id, dtype).tobytes()
            borders.append(borders[-1] + length)
            self._add_place(document)
        self.are_samples = bool(masked)
        if masked:
            masked += bytes(borders[-1] - len(masked))
        self._tokens, self._masked = np.frombuffer(tokens, dtype), np.frombuffer(masked, bool)
        self._borders = np.frombuffer(borders, np.int64)
        self.lengths = np.diff(self._borders)
        self.text_identity = zlib.crc32(columns.values.get("answer", b""), self.identity)
        self._values = columns.arrays()
        for name, column in self._values.items():
            self._identify_column(name, column)
        num_tokens = self._borders[-1]
        are_whole = all(len(column) == num_tokens for column in self._values.values())
        assert are_whole, "all documents have columns"

    def _add_place(self, document: Document) -> None:
        if document.file != self._files[-1]:
            self._files.append(document.file)
        self._numbers.append(len(self._files) - 1)
        self._lines.append(document.line)
        self._prompts.append(NO_PROMPT if document.prompt is None else document.prompt)

    def _identify_column(self, name: str, column: np.ndarray) -> None:
        """Makes a column a part of `identity`."""
        content = np.ascontiguousarray(column, np.float32).data
        self.identity = zlib.crc32(content, zlib.crc32(name.encode(), self.identity))

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
        """Gives each token another number: float32 [tokens of all documents], in their order."""
        assert len(values) == self._borders[-1]
        self._values[name] = values
        self._identify_column(name, values)

    def read_columns(self, document: int, start: int, stop: int) -> dict[str, np.ndarray]:
        first = int(self._borders[document])
        return {name: column[first + start : first + stop] for name, column in self._values.items()}

    def source(self, document: int) -> str:
        return place(self._files[self._numbers[document]], self._lines[document])

    def prompt(self, document: int) -> int | None:
        prompt = self._prompts[document]
        return None if prompt == NO_PROMPT else prompt

    def files(self) -> list[str]:
        return self._files[1:]

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        first = int(self._borders[document])
        part = slice(first + start, first + stop)
        ids = self._tokens[part].astype(np.int64)
        return ids, self._masked[part].copy() if self.are_samples else np.zeros(len(ids), bool)


class _Columns:
    """Numbers of tokens, by name, as they come: float32, or float64 where a document's are."""

    def __init__(self):
        self.values: dict[str, bytearray] = {}
        self._dtypes: dict[str, np.dtype] = {}

    def add(self, columns: dict[str, np.ndarray], length: int) -> None:
        for name, column in columns.items():
            assert len(column) == length, "whoever gives columns ends the tokens"
            kind = np.float64 if column.dtype == np.float64 else np.float32
            dtype = self._dtypes.setdefault(name, np.dtype(kind))
            self.values.setdefault(name, bytearray()).extend(column.astype(dtype).tobytes())

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.frombuffer(x, self._dtypes[name]) for name, x in self.values.items()}


class _View(Store):
    """Documents of other stores."""

    @abstractmethod
    def _find(self, document: int) -> tuple[Store, int, int]:
        """Returns a document's store, its number there, and the position where it begins."""

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
                f"the first path of data has columns {first}, another one has not; "
                "give rows of one form"
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
        self.columns, self.documents = store.columns, documents
        self._start, self.lengths = 0, store.lengths[documents]
        if part:
            self._start = part[0]
            self.lengths = np.full(len(documents), part[1] - part[0])
        starts = np.broadcast_to(np.int64(self._start), len(documents))
        self.identity = store.identity
        for numbers in (documents, starts, self.lengths):
            for i in range(0, len(numbers), AT_ONCE):
                content = np.ascontiguousarray(numbers[i : i + AT_ONCE]).data
                self.identity = zlib.crc32(content, self.identity)

    def _find(self, document: int) -> tuple[Store, int, int]:
        return self._store, int(self.documents[document]), self._start


def whole(store: Store, seed: int | None = None) -> Selection:
    """Selects all documents of a store, in their order or in an order drawn by `seed`.

    Any part of a drawn order is a fair sample.
    """
    numbers = np.arange(len(store.lengths))
    if seed is not None:
        numbers = np.random.default_rng(seed).permutation(numbers)
    return Selection(store, numbers)


def split(
    store: Store, validation_fraction: float, seed: int, may_be_one: bool = False
) -> tuple[Selection, Selection]:
    """Holds out documents, drawn by `seed`: at most `validation_fraction` of all tokens.

    At least one document is held out. Answers to one prompt are held out together, unless there is
    no other prompt. A corpus of one document is cut, and its tail is held out; UserError if it is a
    sample or too short. With `may_be_one` such a document is no error, and none is held out.

    Returns:
        Training documents in their order, and held-out documents in random order; neither empty.
    """
    if len(store.lengths) == 1:
        return _cut_document(store, validation_fraction, may_be_one)
    units = _units(store)
    lengths = store.lengths
    if units is not None:
        lengths = np.bincount(units, lengths).astype(np.int64)
    chosen = _draw(lengths, int(validation_fraction * lengths.sum()), seed)
    if units is not None:
        chosen = np.concatenate([(units == unit).nonzero()[0] for unit in chosen])
    is_kept = np.ones(len(store.lengths), dtype=bool)
    is_kept[chosen] = False
    return Selection(store, is_kept.nonzero()[0]), Selection(store, chosen)


def _cut_document(
    store: Store, validation_fraction: float, may_be_one: bool
) -> tuple[Selection, Selection]:
    length, only = int(store.lengths[0]), np.zeros(1, dtype=np.int64)
    # At least a token and the token that it predicts are held out.
    cut = length - max(2, int(length * validation_fraction))
    if cut >= 2 and not store.are_samples:
        return Selection(store, only, (0, cut)), Selection(store, only, (cut, length))
    if may_be_one:
        return Selection(store, only), Selection(store, only[:0])
    what = "sample" if store.are_samples else f"document of {length} tokens"
    raise UserError(f"the data are one {what}, too short to hold some out; give more --data")


def _draw(lengths: np.ndarray, allowed: int, seed: int) -> np.ndarray:
    """Draws documents at random for as long as their lengths sum to at most `allowed`.

    Returns indices into `lengths`; the shortest document alone if none fits. Documents are drawn
    `AT_ONCE` at a time. A document that no longer fits is passed over.
    """
    order, shortest = np.random.default_rng(seed).permutation(len(lengths)), lengths.min()
    held_out = []
    for i in range(0, len(order), AT_ONCE):
        drawn = order[i : i + AT_ONCE]
        while allowed >= shortest and len(drawn := drawn[lengths[drawn] <= allowed]):
            sums = np.cumsum(lengths[drawn])
            count = int(np.searchsorted(sums, allowed, side="right"))  # the first that fit together
            held_out.append(drawn[:count])
            allowed -= int(sums[count - 1])
            drawn = drawn[count:]
    return np.concatenate(held_out) if held_out else np.array([int(np.argmin(lengths))])


def _units(store: Store) -> np.ndarray | None:
    """Returns a number for each document with answers, equal for one prompt, int64 [N].

    None: each document is by itself. Documents are of one prompt if their rows say so: a tokenizer
    may join its end with an answer's beginning.
    """
    if "answer" not in store.columns:
        return None
    keys, key_by_prompt = list[int](), dict[int, int]()
    for document, length in enumerate(store.lengths.tolist()):
        ids, is_masked = store.read_masked(document, 0, length)
        shared = np.count_nonzero(store.read_columns(document, 0, length)["answer"] == PROMPT)
        size = shared + 1 if shared else int(np.append(is_masked, False).argmin())
        key = zlib.crc32(ids[:size].tobytes()) if size > 1 else -1 - document
        prompt = store.prompt(document)
        keys.append(key if prompt is None else key_by_prompt.setdefault(prompt, key))
    distinct, units = np.unique(keys, return_inverse=True)
    return units if len(distinct) > 1 else None
