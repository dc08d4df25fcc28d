"""A prepared set: a corpus as tokens in a folder, which `python -m training.data prepare` makes and training maps.

The folder has set.json, which is written last, and of each part of the corpus

    part-<16 digits>.tokens     uint32 [tokens]; the top bit says that a token is no target
    part-<16 digits>.documents  int64 [documents, 3]: where a document ends in .tokens, and which line (0: all) of which
                                of the part's files it is
    part-<16 digits>.json       what the part was made of and has in it; written when the other two are complete

all of it little-endian. In memory a set takes 16 bytes a document, whatever its tokens take.
"""

import hashlib
import json
import re
import zlib
from pathlib import Path

import numpy as np

from training.data.tokens import Store
from training.host.errors import UserError
from training.host.files import read_file

FORMAT = "fathom tokens 1"
INDEX = "set.json"
TOKEN, DOCUMENT = np.dtype("<u4"), np.dtype("<i8")
MASKED = 1 << 31  # the bit of a token that is no target
MOST_INDEX_BYTES = 2**26  # an index has 200 bytes for 16 MB of text
PART_NAME = re.compile(r"part-[0-9a-f]{16}")
AGAIN = "delete the set, and prepare it again"


def canonical(value: dict | list) -> bytes:
    """JSON of which a hash is taken: the same bytes for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def hash_of_index(index: dict) -> str:
    return hashlib.sha256(canonical({name: value for name, value in index.items() if name != "sha256"})).hexdigest()


def is_prepared(path: Path) -> bool:
    """Raises UserError where preparing has begun and not ended."""
    if (path / INDEX).exists():
        return True
    if any(path.glob("part-*.tokens*")):
        raise UserError(f"{path} is prepared in part: the command that began it goes on from there")
    return False


def read_index(folder: Path) -> dict:
    """A set's set.json, of the form that prepare.py writes, undamaged.

    Raises:
        UserError: another form, a size that no index has, a part outside the folder, or a hash that does not fit.
    """
    file = folder / INDEX
    if file.exists() and file.stat().st_size > MOST_INDEX_BYTES:
        raise UserError(f"{file} has {file.stat().st_size:,} bytes, more than {MOST_INDEX_BYTES:,}; {AGAIN}")
    try:
        index = json.loads(read_file(file, f"give a folder with {INDEX}, as prepare makes it"))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{file} is not JSON; {AGAIN}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f'{file} is not of format "{FORMAT}": it is no set, or one to be made anew with this version')
    types = {"tokenizer": str, "tokenizer_name": str, "eos_id": int, "are_samples": bool, "parts": list, "sha256": str}
    for key, kind in types.items():
        if type(index.get(key)) is not kind:
            raise UserError(f"{file}: {key} is {str(index.get(key))[:50]}, no {kind.__name__}; {AGAIN}")
    for part in index["parts"]:
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or not PART_NAME.fullmatch(name):
            raise UserError(f"{file} names the part {str(name)[:50]!r}, which is no part of its folder; {AGAIN}")
        for key, least in (("documents", 1), ("tokens", 1), ("largest_id", 0)):
            if type(part.get(key)) is not int or not least <= part[key] < 2**48:
                raise UserError(f"{file}: {key} of {name} is {str(part.get(key))[:50]}; {AGAIN}")
        if not isinstance(part.get("sha256"), dict):
            raise UserError(f"{file}: sha256 of {name} is {str(part.get('sha256'))[:50]}; {AGAIN}")
    if index["sha256"] != hash_of_index(index):
        raise UserError(f"{file} does not have the hash that it says: it is damaged or was edited; {AGAIN}")
    if not index["parts"]:
        raise UserError(f"{file} has no parts; {AGAIN}")
    return index


class PreparedStore(Store):
    """The documents of a prepared set, read from disk when they are asked for.

    Args:
        folder: the set's.
        tokenizer: of load_tokenizer; the set must have been made with the same.
        vocab_size: the model's; every id must be below it.

    Raises:
        UserError: as read_index; another tokenizer; ids that the model has not; files whose sizes or documents are not
            those of the index.
    """

    def __init__(self, folder: Path, tokenizer, vocab_size: int):
        index = read_index(folder)
        if index["tokenizer"] != tokenizer.identity:
            raise UserError(
                f"{folder} was prepared with tokenizer {index['tokenizer_name'][:200]} ({index['tokenizer'][:12]}), "
                f"this run has {tokenizer.name} ({tokenizer.identity[:12]}): give that --tokenizer, or {AGAIN}"
            )
        self.folder, self.eos_id, self.are_samples = folder, tokenizer.eos_id, index["are_samples"]
        self._vocab_size, self.parts = vocab_size, [part["name"] for part in index["parts"]]
        self._hashes = [part["sha256"] for part in index["parts"]]
        largest = max(self.eos_id, *(part["largest_id"] for part in index["parts"]))
        if largest >= vocab_size:
            raise UserError(
                f"{folder}: token id {largest} is not below the model's vocab_size {vocab_size}; "
                f"tokenizer {tokenizer.name} needs a model of vocab_size {tokenizer.vocab_size} or more"
            )
        borders = [self._borders(part) for part in index["parts"]]
        self._starts = np.concatenate([each[:-1] for each in borders])  # in the part's tokens
        self.lengths = np.concatenate([np.diff(each) for each in borders])
        self._first = np.cumsum([0] + [len(each) - 1 for each in borders])  # each part's first document

    def _borders(self, part: dict) -> np.ndarray:
        """int64 [documents + 1]: where the documents of a part begin and end in its tokens."""
        for kind, size in ((".tokens", 4 * part["tokens"]), (".documents", 24 * part["documents"])):
            file = self.folder / (part["name"] + kind)
            if not file.is_file() or file.stat().st_size != size:
                actual = f"{file.stat().st_size:,} bytes" if file.is_file() else "missing"
                raise UserError(f"{file} is {actual}, {INDEX} says {size:,}; {AGAIN}")
        table = np.memmap(self.folder / (part["name"] + ".documents"), DOCUMENT, "r").reshape(-1, 3)
        borders = np.concatenate([[0], table[:, 0]])
        wrong = ((borders[1:] <= borders[:-1]) | (borders[1:] > part["tokens"])).nonzero()[0]
        if len(wrong) or borders[-1] != part["tokens"]:
            which = f"document {wrong[0]}" if len(wrong) else f"the last document, at {borders[-1]:,},"
            raise UserError(
                f"{self.folder / part['name']}.documents: {which} does not end behind its start and within the "
                f"{part['tokens']:,} tokens of the part; {AGAIN}"
            )
        return borders

    @property
    def identity(self) -> int:
        """CRC-32 of the parts' hashes: equal for sets of the same corpus, wherever and whenever they were made."""
        return zlib.crc32(canonical(self._hashes))

    def _find(self, document: int) -> tuple[str, int]:
        """The part that has a document, and the document's number there."""
        index = int(np.searchsorted(self._first, document, side="right")) - 1
        return self.parts[index], document - int(self._first[index])

    def source(self, document: int) -> str:
        name, number = self._find(document)
        _, file, line = np.memmap(self.folder / f"{name}.documents", DOCUMENT, "r").reshape(-1, 3)[number].tolist()
        try:
            path = json.loads((self.folder / f"{name}.json").read_bytes())["pieces"][file][0]
        except (OSError, ValueError, LookupError, TypeError):
            return f"{self.folder / name}, document {number}"
        return f"{path}:{line}" if line else str(path)

    def read_masked(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The file is mapped for this call alone, so that what was read once is the system's to forget."""
        if start == stop:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
        name, _ = self._find(document)
        first = int(self._starts[document]) + start
        raw = np.memmap(self.folder / f"{name}.tokens", TOKEN, "r", 4 * first, (stop - start,))
        ids, is_masked = (raw & (MASKED - 1)).astype(np.int64), raw >= MASKED
        if ids.max() >= self._vocab_size:
            raise UserError(
                f"{self.folder / name}.tokens: {self.source(document)} has token id {ids.max()}, not below the "
                f"model's vocab_size {self._vocab_size}: the file is damaged; {AGAIN}"
            )
        return ids, np.asarray(is_masked)


def verify(folder: Path) -> None:
    """Compare every byte of a set with its hashes. Raises UserError that names the damaged file."""
    for part in read_index(folder)["parts"]:
        for kind in (".tokens", ".documents"):
            file = folder / (part["name"] + kind)
            try:
                with file.open("rb") as stream:
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}; {AGAIN}") from None
            if found != part["sha256"].get(kind):
                raise UserError(f"{file} does not have the hash of {INDEX}: it is damaged; {AGAIN}")
