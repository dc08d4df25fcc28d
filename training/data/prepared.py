"""A prepared set: a corpus as tokens in a folder, made by `python -m training.data prepare`.

The folder has set.json, which is written last, and three files for each part of the corpus,
little-endian:

- part-<16 digits>.tokens: uint32 [tokens]. The top bit marks a token that is not a target.
- part-<16 digits>.documents: int64 [documents, 3]. A row is a document's end in .tokens, the number
  of its file among the part's files, and the number of its line or row, 0 for a whole file.
- part-<16 digits>.json: the part's files and its summary, written when the other two are complete.

In memory a set takes 16 bytes per document, however long its documents are.
"""

import hashlib
import json
import re
import zlib
from pathlib import Path

import numpy as np

from training.data.containers import place
from training.data.template import template_hash
from training.data.tokenizer import check_ids
from training.data.tokens import Store
from training.host.errors import UserError
from training.host.files import read_file, read_json

FORMAT = "fathom tokens 1"
INDEX = "set.json"
TOKEN, DOCUMENT = np.dtype("<u4"), np.dtype("<i8")
MASKED = 1 << 31  # set in tokens that are not targets
MOST_INDEX_BYTES = 2**26  # set.json grows by 200 bytes per 16 MB of text
PART_NAME = re.compile(r"part-[0-9a-f]{16}")
# Types of the values by which a set is opened, in set.json and for each of its parts.
TYPES = {"tokenizer": str, "tokenizer_name": str, "are_samples": bool, "parts": list}
PART_TYPES = {"name": str, "documents": int, "tokens": int, "largest_id": int, "sha256": dict}
AGAIN = "delete the set, and prepare it again"


def canonical(value: dict | list) -> bytes:
    """Returns JSON to take a hash of: the same bytes for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def hash_of_index(index: dict) -> str:
    return hashlib.sha256(
        canonical({name: value for name, value in index.items() if name != "sha256"})
    ).hexdigest()


def is_prepared(path: Path) -> bool:
    """Whether a folder is a prepared set. Raises UserError if it is one in part."""
    if (path / INDEX).exists():
        return True
    if any(path.glob("part-*.tokens*")):
        raise UserError(f"{path} is prepared in part: the command that began it goes on from there")
    return False


def read_index(folder: Path) -> dict:
    """Returns a set's set.json. Raises UserError for damage, and for parts outside the folder."""
    file = folder / INDEX
    if file.exists() and file.stat().st_size > MOST_INDEX_BYTES:
        raise UserError(
            f"{file} has {file.stat().st_size:,} bytes, more than {MOST_INDEX_BYTES:,}; {AGAIN}"
        )
    index = read_json(file)
    if index.get("format") != FORMAT:
        raise UserError(
            f'{file} is not of format "{FORMAT}": it is no set, or one to be made anew with this '
            "version"
        )
    if index.get("sha256") != hash_of_index(index):
        raise UserError(
            f"{file} does not have the hash that it says: it is damaged or was edited; {AGAIN}"
        )
    if not _is_typed(index, TYPES) or not index["parts"]:
        raise UserError(f"{file} has no parts, or values of wrong types; {AGAIN}")
    for part in index["parts"]:
        if not _is_typed(part, PART_TYPES) or not PART_NAME.fullmatch(part["name"]):
            raise UserError(
                f"{file} names the part {str(part)[:50]}, which is no part of its folder; {AGAIN}"
            )
    return index


def _is_typed(values: object, types: dict[str, type]) -> bool:
    if not isinstance(values, dict):
        return False
    return all(type(values.get(name)) is kind for name, kind in types.items())


def _check_tokenizer(folder: Path, index: dict, tokenizer) -> None:
    """Refuses a set that was made with another tokenizer or chat template."""
    was = f"{folder} was prepared with"
    if index["tokenizer"] != tokenizer.identity:
        theirs = f"{was} tokenizer {index['tokenizer_name'][:200]} ({index['tokenizer'][:12]})"
        ours = f"this run has {tokenizer.name} ({tokenizer.identity[:12]})"
        raise UserError(f"{theirs}, {ours}: give that --tokenizer, or {AGAIN}")
    end = index.get("eos_id", tokenizer.eos_id)
    if end != tokenizer.eos_id:
        ours = f"this run's end with {tokenizer.eos_id} ({tokenizer.eos_token})"
        raise UserError(f"{was} documents that end with id {end}, {ours}: {AGAIN}")
    template = index.get("chat_template")
    if template and template != template_hash(tokenizer):
        flag = "--chat_template" if tokenizer.has_template_flag else "--tokenizer"
        raise UserError(
            f"{was} another chat template than this run's; give {flag} as then, or {AGAIN}"
        )


class PreparedStore(Store):
    """The documents of a prepared set, read from disk when they are asked for.

    Raises UserError: see read_index; the set was made with another tokenizer; an id is not below
    the model's vocab_size; a file does not fit the index by its size or by its documents' ends.
    """

    def __init__(self, folder: Path, tokenizer, vocab_size: int):
        index = read_index(folder)
        _check_tokenizer(folder, index, tokenizer)
        self.folder, self.eos_id, self.are_samples = folder, tokenizer.eos_id, index["are_samples"]
        self._vocab_size, self.parts = vocab_size, [part["name"] for part in index["parts"]]
        # Equal for sets of the same corpus, wherever and whenever they were made.
        self.identity = zlib.crc32(canonical([part["sha256"] for part in index["parts"]]))
        largest = max(part["largest_id"] for part in index["parts"])
        check_ids(largest, tokenizer, vocab_size, str(folder))
        for part in index["parts"]:
            self._check_sizes(part)
        # Each part's first document.
        self._first = np.cumsum([0] + [part["documents"] for part in index["parts"]])
        # Starts are counted in the tokens of the document's part.
        self._starts, self.lengths = np.empty((2, self._first[-1]), dtype=np.int64)
        for part, first, stop in zip(index["parts"], self._first, self._first[1:]):
            borders = self._borders(part)
            self._starts[first:stop], self.lengths[first:stop] = borders[:-1], np.diff(borders)

    def _check_sizes(self, part: dict) -> None:
        for kind, size in ((".tokens", 4 * part["tokens"]), (".documents", 24 * part["documents"])):
            file = self.folder / (part["name"] + kind)
            if not file.is_file() or file.stat().st_size != size:
                actual = f"{file.stat().st_size:,} bytes" if file.is_file() else "missing"
                raise UserError(f"{file} is {actual}, {INDEX} says {size:,}; {AGAIN}")

    def _borders(self, part: dict) -> np.ndarray:
        """Returns 0, then the end of each of a part's documents in .tokens, int64."""
        table = self._read(part["name"] + ".documents", DOCUMENT, 0, 3 * part["documents"])
        borders = np.concatenate([[0], table[::3]])
        wrong = ((borders[1:] <= borders[:-1]) | (borders[1:] > part["tokens"])).nonzero()[0]
        if len(wrong) or borders[-1] != part["tokens"]:
            document = wrong[0] if len(wrong) else len(borders) - 2
            raise UserError(
                f"{self.folder / part['name']}.documents: document {document} does not end behind "
                f"its start and within the {part['tokens']:,} tokens of the part; {AGAIN}"
            )
        return borders

    def _find(self, document: int) -> tuple[str, int]:
        index = int(np.searchsorted(self._first, document, side="right")) - 1
        return self.parts[index], document - int(self._first[index])

    def _read(self, name: str, dtype: np.dtype, first: int, count: int) -> np.ndarray:
        """Reads count values. A mapping would end the process where the file is damaged."""
        try:
            values = np.fromfile(self.folder / name, dtype, count, offset=first * dtype.itemsize)
        except OSError as error:
            raise UserError(
                f"cannot read {self.folder / name}: {error.strerror or error}; {AGAIN}"
            ) from None
        if len(values) < count:
            raise UserError(
                f"{self.folder / name} is cut short or damaged, "
                f"before value {first + count:,}; {AGAIN}"
            )
        return values

    def source(self, document: int) -> str:
        name, number = self._find(document)
        _, file, line = self._read(f"{name}.documents", DOCUMENT, 3 * number, 3).tolist()
        files = self._files(name)
        if file < len(files):
            return place(files[file], line)
        return f"{self.folder / name}, document {number}"

    def files(self) -> list[str]:
        tokens = [str(self.folder / f"{name}.tokens") for name in self.parts]
        return tokens + [file for name in self.parts for file in self._files(name)]

    def _files(self, part: str) -> list[str]:
        """Returns the files that a part was prepared from; none if its .json is damaged."""
        try:
            return [str(piece[0]) for piece in read_json(self.folder / f"{part}.json")["pieces"]]
        except (OSError, ValueError, LookupError, TypeError):
            return []

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if start == stop:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
        name, _ = self._find(document)
        first = int(self._starts[document]) + start
        raw = self._read(f"{name}.tokens", TOKEN, first, stop - start)
        ids, is_masked = (raw & (MASKED - 1)).astype(np.int64), raw >= MASKED
        if ids.max() >= self._vocab_size:
            raise UserError(
                f"{self.folder / name}.tokens: {self.source(document)} has token id {ids.max()}, "
                f"not below the model's vocab_size {self._vocab_size}: it is damaged; {AGAIN}"
            )
        return ids, is_masked


def verify(folder: Path) -> None:
    """Compares every byte of a set with its hashes. Raises UserError, which names the file."""
    index = read_index(folder)
    _compare_bytes(folder / INDEX, json.dumps(index, indent=1))
    for part in index["parts"]:
        for kind in (".tokens", ".documents"):
            file = folder / (part["name"] + kind)
            if not file.is_file():  # a pipe would be waited for
                raise UserError(f"{file} is missing, or is no regular file; {AGAIN}")
            try:
                with file.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}; {AGAIN}") from None
            if digest != part["sha256"].get(kind):
                raise UserError(f"{file} does not have the hash of {INDEX}: it is damaged; {AGAIN}")
        file = folder / f"{part['name']}.json"
        content = read_json(file)
        _compare_bytes(file, json.dumps(content))
        if not is_summary(content) or {"name": part["name"], **content["summary"]} != part:
            raise UserError(f"{file} is not what {INDEX} says of this part: it is damaged; {AGAIN}")


def _compare_bytes(file: Path, written: str) -> None:
    """Compares a file of JSON with what Python writes of its content."""
    if read_file(file, AGAIN) != written.encode():
        raise UserError(f"{file} is not as it was written: it is damaged or was edited; {AGAIN}")


def hash_of_part(pieces: list, summary: dict) -> str:
    """Returns the hash that a part's .json has of itself."""
    return hashlib.sha256(canonical([pieces, summary])).hexdigest()


def is_summary(content: dict) -> bool:
    """Whether a part's .json has the hash that it says.

    Earlier versions took the hash of the summary alone.
    """
    pieces, summary = content.get("pieces"), content.get("summary")
    if not isinstance(pieces, list) or not isinstance(summary, dict):
        return False
    earlier = hashlib.sha256(canonical(summary)).hexdigest()
    return content.get("sha256") in (hash_of_part(pieces, summary), earlier)
