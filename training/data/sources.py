"""Documents: read from files and folders, and tokenized."""

import contextlib
import functools
import itertools
import json
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.data.chat import UNSTORABLE, ChatTemplate, NothingToLearn
from training.data.tokenizer import check_ids
from training.host.errors import UserError
from training.host.files import read_file

logger = logging.getLogger(__name__)
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows' editors begin files so
SHOWN = 8  # suffixes of files that are left out
# The forms of a line by their names, each with the name that decides first.
CHAT, SAMPLE, TEXT = FORMS = (("messages", "tools"), ("completion", "prompt"), ("text",))
NAMES = {name for form in FORMS for name in form}
# Folders of installed packages, and folders of the standard library with tables or tests in place of programs.
STANDARD_LIBRARY_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Document:
    """A document's tokens, without the end-of-text id behind them."""

    tokens: np.ndarray  # [N], uint8 for bytes, else uint32
    masked: np.ndarray | None = None  # bool [N]: tokens that are not targets, as a prompt's; None: all are targets
    is_complete: bool = False  # whether the tokens have an end of their own, a chat's; an end-of-text id follows others
    file: str = ""
    line: int = 0  # its number in a .jsonl file; 0: the document is the whole file


def place(file: str | Path, line: int) -> str:
    """Returns a document's file; for a .jsonl file with the line's number."""
    return f"{file}:{line}" if line else str(file)


def read_documents(path: str | None, tokenizer, vocab_size: int, reasoning: str = "template") -> Iterator[Document]:
    """Reads and tokenizes a corpus: each text file and each line of a .jsonl file is a document. Yields at least one.

    Args:
        path: a .txt, .md, .py or .jsonl file, or a folder, whose subfolders are searched, too, in sorted order. None:
            the sources of Python's standard library on this machine.
        tokenizer, vocab_size, reasoning: see DocumentReader.

    Raises:
        UserError: see find_files and DocumentReader; or the path holds no text.
    """
    reader, document = DocumentReader(tokenizer, vocab_size, reasoning), None
    parts = [_standard_library(reader)] if path is None else map(reader.read, find_files(Path(path)))
    for document in itertools.chain.from_iterable(parts):
        yield document
    if path is not None:  # the standard library has many empty files
        say_left_out([reader.left_out])
    if document is None:
        where = path or "Python's standard library"
        raise UserError(f"{where} is empty: no text in any {', '.join(SUFFIXES)} file; give other --data")


def say_left_out(parts: list[dict[str, list]]) -> None:
    """Warns of what was left out of the parts of a corpus; see DocumentReader."""
    for what in dict.fromkeys(what for part in parts for what in part):
        found = [part[what] for part in parts if what in part]
        logger.warning("data: left out %s: %s, the first in %s", what, f"{sum(n for n, _ in found):,}", found[0][1])


def find_files(path: Path) -> list[Path]:
    """Returns the files of text at a path of --data: the file itself, or all files in the folder, sorted."""

    def refuse(error: OSError):
        raise UserError(f"cannot read {error.filename}: {error.strerror}; make it readable, or give other --data")

    if not path.exists():
        raise UserError(f"data path {path} does not exist; give --data a file or a folder")
    if path.is_dir():
        files: list[Path] = []
        for root, folders, names in os.walk(path, onerror=refuse):
            if links := [Path(root, name) for name in folders if Path(root, name).is_symlink()]:
                raise UserError(f"{links[0]} is a link to a folder, which is not followed; give its target to --data")
            files += [Path(root, name) for name in names]
        texts = sorted(file for file in files if file.suffix.lower() in SUFFIXES and file.is_file())
        if others := Counter(file.suffix or file.name for file in sorted({*files}.difference(texts))).most_common():
            kinds = ", ".join(f"{count:,} {kind[:30]}" for kind, count in others[:SHOWN])
            more = " and others" if len(others) > SHOWN else ""
            logger.warning("data: left out files of other kinds in %s: %s%s", path, kinds, more)
        return texts
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"cannot read {path}: it is no regular file; give --data a file or a folder")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"data file {path} has suffix {path.suffix!r}; it must be one of {', '.join(SUFFIXES)}")
    return [path]


class DocumentReader:
    """Turns files of text into tokenized documents.

    A line of a .jsonl file is {"text": ...}; {"prompt": ..., "completion": ...}, without targets in the prompt; or
    {"messages": [...], "tools": [...]}, a chat with targets in the assistant's turns.

    Args:
        tokenizer: see load_tokenizer.
        vocab_size: the model's; every id must be below it.
        reasoning: see ChatTemplate.

    Attributes:
        left_out: files and lines from which nothing can be learnt: by what they are, [their number, the first's place].
    """

    def __init__(self, tokenizer, vocab_size: int, reasoning: str = "template"):
        self._tokenizer, self._vocab_size, self._reasoning = tokenizer, vocab_size, reasoning
        self.eos_id, self.left_out = tokenizer.eos_id, dict[str, list]()
        self._largest = -1  # id that was checked

    @functools.cached_property
    def _chat(self) -> ChatTemplate:
        """The template, opened at the first chat: other data need no template."""
        return ChatTemplate(self._tokenizer, self._reasoning)

    def read(self, file: Path) -> Iterator[Document]:
        """Yields the documents of a file; none if it is empty. A UserError names the file, and the offset or line."""
        if file.suffix.lower() != ".jsonl":
            yield from self.read_text(_decode(read_file(file, "give --data a readable file"), str(file)), file)
            return
        try:
            with file.open("rb") as lines:
                yield from self.read_lines(lines, file)
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}; give --data a readable file") from None

    def read_text(self, text: str, file: Path) -> Iterator[Document]:
        """Yields a text file's one document; none if the text is blank."""
        if text.strip():
            yield self._checked(Document(self._tokenizer.encode_from_start(text), file=str(file)))
        else:
            self._leave_out("files without text", str(file))

    def read_lines(self, lines: Iterable[bytes], file: Path, first_number: int = 1) -> Iterator[Document]:
        """Yields the documents of lines of a .jsonl file. The first line has the number `first_number`.

        Lines end with \\n alone: JSON allows the other separators inside a string.
        """
        name = str(file)
        for number, line in enumerate(lines, start=first_number):
            where = f"{name}:{number}"
            if number == 1 and line.startswith(BYTE_ORDER_MARK):
                self._leave_out("byte order marks", where)
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                self._leave_out("blank lines", where)
                continue
            text = _decode(line, where)
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:  # ValueError also for 5,000 digits
                raise UserError(f"{where}: not JSON ({str(error)[:100]}); each line must be one JSON object") from None
            try:
                encoded = self._encode(record if isinstance(record, dict) else {})
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            except NothingToLearn as what:
                self._leave_out(str(what), where)
            else:
                yield self._checked(Document(*encoded, name, number))

    def _leave_out(self, what: str, where: str) -> None:
        self.left_out.setdefault(what, [0, where])[0] += 1

    def _encode(self, record: dict) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """Returns (tokens, masked, is_complete) of a line; see Document."""
        given = [name for name in sorted(NAMES.intersection(record)) if record[name] is not None]
        form = next((form for form in FORMS if form[0] in given), None)
        for name in given:
            # Released chats often repeat the first question as "prompt".
            is_repeated = name == "prompt" and form is CHAT and _is_content(record[name], record["messages"])
            if form and name not in form and record[name] and not is_repeated:
                raise UserError(f'has "{name}" beside "{form[0]}", where it would be ignored; remove one')
        if form is CHAT:
            return *self._chat.encode(record), True
        is_sample = form is SAMPLE
        prompt, text = (record.get("prompt"), record["completion"]) if is_sample else ("", record.get("text"))
        if not isinstance(text, str) or not isinstance(prompt, str):
            raise UserError('needs a string "text", strings "prompt" and "completion", or a list "messages"')
        if not text.strip():
            raise NothingToLearn("lines without text")
        if UNSTORABLE.search(prompt + text):
            raise UserError("escaped NUL or lone surrogate in the text; remove it")
        if not is_sample:
            return self._tokenizer.encode_from_start(text), None, False
        before = self._tokenizer.encode_from_start(prompt)
        tokens = np.concatenate([before, self._tokenizer.encode(text)])
        return tokens, np.arange(len(tokens)) < len(before), False

    def _checked(self, document: Document) -> Document:
        largest = int(document.tokens.max(initial=0))
        if largest > self._largest:
            check_ids(largest, self._tokenizer, self._vocab_size, place(document.file, document.line))
            self._largest = largest
        return document


def _standard_library(reader: DocumentReader) -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if STANDARD_LIBRARY_SKIPS.isdisjoint(file.relative_to(root).parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):  # some tests cannot be decoded, on purpose
                yield from reader.read_text(file.read_bytes().decode(), file)


def _is_content(value, messages) -> bool:
    """Whether a value is the content of a message."""
    found = messages if isinstance(messages, list) else []
    return any(isinstance(message, dict) and message.get("content") == value for message in found)


def _decode(raw: bytes, where: str) -> str:
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UserError(f"{where} is binary: NUL byte at offset {nul}; give --data UTF-8 text")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
                         "convert it, or leave it out of --data") from None  # fmt: skip
