"""Documents: read from files and folders, and tokenized."""

import contextlib
import functools
import itertools
import json
import logging
import os
import re
import shlex
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn, Protocol

import numpy as np

from training.data.chat import ChatTemplate, NoTemplate, has_template
from training.data.containers import (
    COMPRESSIONS,
    CONTAINERS,
    SEPARATORS,
    BrokenRow,
    check_packages,
    is_compressed,
    place,
    read_compressed,
    read_rows,
    suffix_of,
)
from training.data.flags import SUFFIXES
from training.data.forms import (
    ANSWERS,
    FIELDS,
    Form,
    columns_of,
    is_row,
    parse_columns,
    recognise,
    rename,
    with_chats,
    with_values,
)
from training.data.masks import NothingToLearn
from training.data.tokenizer import check_ids
from training.data.unread import find_lost, squeeze, words
from training.data.writer import UNSTORABLE
from training.host.errors import UserError
from training.host.files import check_data_exists, inside, read_file, read_json

logger = logging.getLogger(__name__)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows' editors begin files so
# in names of files of rows
SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev|eval)(?:[-_./]|$)")
UNREAD_FIELD = "field of chats "  # what is left out of chats: before a field's name
AS_CHATS = ", as chats"  # in the log, behind a form that a chat template wrote
SHOWN = 8  # suffixes of files, or fields of chats, that are left out
PANDOC = "pandoc -t plain -o {0}.txt {0}"
TO_TEXT = {".pdf": "pdftotext {0} {0}.txt", ".docx": PANDOC, ".epub": PANDOC, ".odt": PANDOC}
# rows that are looked at after one that cannot be read, before all such rows are refused
READ_ON = 10_000
PLACES = 3  # named of rows that cannot be read
# Folders of installed packages, and folders of the standard library with tables or tests in place
# of programs.
STANDARD_LIBRARY_SKIPS = words(
    "site-packages dist-packages test tests idle_test encodings pydoc_data"
)


@dataclass(frozen=True)
class Document:
    """A document's tokens, without the end-of-text id behind them.

    Attributes:
        tokens: [N], uint8 for bytes, else uint32.
        masked: bool [N], tokens that are not targets, as a prompt's; None: all are targets.
        is_complete: the tokens have an end of their own, a chat's; else an end-of-text id follows.
        line: number of the line in a .jsonl file, or of the row in a table; 0: the whole file.
        columns: numbers of the tokens that an objective reads, float32 or float64 [N], by name; see
            training/objectives/rows.py. Where "answer" changes, another text begins: it does not
            see the text before, and is not cut from it.
        prompt: a hash of its row's prompt, for answers to one prompt to be held out together.
    """

    tokens: np.ndarray
    masked: np.ndarray | None = None
    is_complete: bool = False
    file: str = ""
    line: int = 0
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    prompt: int | None = None


class RowReader(Protocol):
    """Reads the rows of an objective, whose fields differ from those that forms.py knows."""

    foreign: ClassVar[frozenset[str]] = frozenset()  # names of other programs that it reads, too

    @property
    def fields(self) -> frozenset[str]:
        """Fields that a row may have, by our names."""

    def __call__(self, row: object, encode: Callable[[dict], Document]) -> tuple[str, Document]:
        """Returns a row's form and its document.

        `encode` takes a row that forms.py knows. Raises UserError and NothingToLearn, as
        `forms.recognise`.
        """

    def join(self, documents: Iterable[Document]) -> Iterable[Document]:
        """Returns documents of the same answers, of which neighbours may have become one."""
        return documents

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        """Returns what an answer is, from the columns of its targets: "chosen", or "weight 0.5"."""
        return ""


class Reading(NamedTuple):
    """Ways by which files become documents, as the flags of these names say.

    Attributes:
        reasoning: see ChatTemplate; None: "template".
        suffixes: suffixes of texts, such as ".rs,.c"; None: SUFFIXES.
        columns: see parse_columns.
        bad_rows: "drop" leaves rows out that cannot be read; None or "refuse": UserError.
        rows: reads the rows of an objective; None: forms.py reads them.
        needs_chats: data without chats are refused: `reasoning` is a flag of this command.
    """

    reasoning: str | None = None
    suffixes: str | None = None
    columns: str | None = None
    bad_rows: str | None = None
    rows: RowReader | None = None
    needs_chats: bool = False

    @property
    def renames(self) -> dict[str, str]:
        """Names of fields that are read, by names in the data; see parse_columns."""
        return parse_columns(self.columns, self.rows.fields if self.rows else ())

    @property
    def awaited(self) -> set[str]:
        """Columns in the data, and AS_CHATS, that some row must have; see DocumentReader.used."""
        return {*self.renames, *([AS_CHATS] if self.needs_chats else [])}

    def refuse_without_effect(self, paths: list[Path]) -> None:
        """Raises UserError for flags that no path of data heeds. A folder may heed any.

        Args:
            paths: paths of the data without prepared sets, which were read with their own flags.
        """
        about_rows = {"bad_rows": self.bad_rows, "chat_reasoning": self.needs_chats}
        flags = {"suffixes": self.suffixes, "columns": self.columns} | about_rows
        flags = {name: value for name, value in flags.items() if value}
        if flags and not paths:
            raise UserError(
                f"{next(iter(flags))} has no effect on prepared sets; "
                "drop it (prepare has a flag of its own)"
            )
        have_rows = {suffix_of(path) in CONTAINERS if path.is_file() else None for path in paths}
        if self.suffixes and have_rows == {True}:
            raise UserError(
                f"suffixes has no effect on {paths[0]}, whose rows are read whatever they are; "
                "drop it"
            )
        for name in flags:
            if name in about_rows and have_rows == {False}:
                raise UserError(f"{name} has no effect on {paths[0]}, a text without rows; drop it")


DEFAULT = Reading()


@dataclass
class BadRows:
    """Rows that cannot be read: their number, the first places, and the fault of the first."""

    count: int = 0
    places: list[str] = field(default_factory=list)
    why: str = ""

    def add(self, rows: "BadRows") -> None:
        self.count, self.why = self.count + rows.count, self.why or rows.why
        self.places = [*self.places, *rows.places][:PLACES]

    def settle(self, bad_rows: str | None, or_more: bool = False) -> None:
        """Warns of rows that are left out, or raises UserError."""
        if not self.count:
            return
        count = f"{self.count:,} or more" if or_more else f"{self.count:,}"
        where = ", ".join(self.places)
        if bad_rows == "drop":
            left_out = "data: left out rows that cannot be read: %s, the first %s (%s)"
            logger.warning(left_out, count, where, self.why)
            return
        rows = "that row"
        if count != "1":
            rows = f"the {count} rows that cannot be read, at {where}"
        raise UserError(
            f"{self.places[0]}: {self.why}; "
            f"mend {rows}, or give --bad_rows drop to leave out such rows"
        )


def read_documents(
    path: str | None,
    tokenizer,
    vocab_size: int,
    reading: Reading = DEFAULT,
    unused: set[str] | None = None,
    files: list[Path] | None = None,
) -> Iterator[Document]:
    """Reads and tokenizes a corpus: each text file and each row of the other files is a document.

    Args:
        path: a file, or a folder, whose subfolders are searched, too, in sorted order. None: the
            sources of Python's standard library on this machine.
        unused: Reading.awaited; what a row has is taken out.
        files: those that find_files has found at the path, if it was asked before.

    Yields:
        Documents, at least one.

    Raises UserError: see find_files and DocumentReader; the path holds no text, or rows that cannot
    be read.
    """
    reader = DocumentReader(tokenizer, vocab_size, reading)
    if path is None:
        parts: Iterable[Iterator[Document]] = [_standard_library(reader)]
    else:
        parts = map(reader.read, find_files(Path(path), reading) if files is None else files)
    is_empty = True
    for document in itertools.chain.from_iterable(parts):
        is_empty = False
        if reading.bad_rows == "drop" or not reader.bad.count:
            yield document
    reader.bad.settle(reading.bad_rows, or_more=reader.has_read_enough)
    if path is not None:  # the standard library has many empty files
        say_found(path, [reader.found])
        say_left_out([reader.left_out])
    if unused is not None:
        unused -= reader.used
    if is_empty:
        where = path or "Python's standard library"
        raise UserError(
            f"{where} has nothing to read: no text in any {', '.join(_kinds(reading))} file; "
            "give other --data"
        )


def refuse_unused(unused: set[str]) -> None:
    """Raises UserError for flags that no row has heeded; see Reading.awaited."""
    if AS_CHATS in unused:
        raise UserError("chat_reasoning has no effect without chats; drop it")
    for name in sorted(unused):
        raise UserError(f"columns names {name!r}, which no row has; correct it, or leave it out")


def say_found(path: str | Path, parts: list[dict[str, int]]) -> None:
    """Logs what the parts of a corpus hold; see DocumentReader."""
    counts = []
    for form, count in sum(map(Counter, parts), Counter()).items():
        counts.append(f"{count:,} {form if count > 1 else form.replace('s of', ' of', 1)}")
    if counts:
        logger.info("data: %s: %s", path, ", ".join(counts))


def say_left_out(parts: list[dict[str, list]]) -> None:
    """Warns of what was left out of the parts of a corpus; see DocumentReader."""
    left_out: dict[str, list] = {}
    for part in parts:
        for what, (count, first) in part.items():
            left_out.setdefault(what, [0, first])[0] += count
    fields, first_of_fields = [], ""
    for what, (count, first) in left_out.items():
        if what.startswith(UNREAD_FIELD):
            fields.append(f'"{what.removeprefix(UNREAD_FIELD)}" of {count:,}')
            first_of_fields = first_of_fields or first
        else:
            logger.warning("data: left out %s: %s, the first in %s", what, f"{count:,}", first)
    if fields:
        names = ", ".join(fields[:SHOWN])
        if len(fields) > SHOWN:
            names += f" and {len(fields) - SHOWN} others"
        left_out_fields = "data: left out fields of chats that are not trained on: %s, the first in"
        logger.warning(f"{left_out_fields} %s", names, first_of_fields)


def find_files(path: Path, reading: Reading = DEFAULT) -> list[Path]:
    """Returns the files of documents at a path of --data: the file itself, or a folder's, sorted.

    Raises UserError: the path, a file or a folder cannot be read, or is of a kind that is not; a
    package is missing.
    """
    check_data_exists(path)
    files = [path]
    if path.is_dir():
        walked = _walk(path)
        files = sorted(file for file in walked if is_data(file, reading))
        _warn_of_other_kinds(path, sorted({*walked}.difference(files)))
        files = _without_held_out(path, files)
    elif not path.is_file():  # a pipe would be waited for
        raise UserError(
            f"cannot read {path}: it is no regular file; give --data a file or a folder"
        )
    elif suffix_of(path) not in _kinds(reading):
        _refuse_kind(path, reading)
    check_packages(files)
    return files


def _walk(path: Path) -> list[Path]:
    """Returns all files in a folder; of datasets that were saved, one split's."""

    def refuse(error: OSError):
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}; "
            "make it readable, or give other --data"
        )

    files: list[Path] = []
    for root, folders, names in os.walk(path, onerror=refuse):
        for name in folders:
            if Path(root, name).is_symlink():
                raise UserError(
                    f"{Path(root, name)} is a link to a folder, which is not followed; "
                    "give its target to --data"
                )
        if {"state.json", "dataset_info.json"} <= {*names}:
            names = _files_of_saved(Path(root))
        if "dataset_dict.json" in names:
            folders[:] = _choose_split(Path(root))
            continue
        files += [Path(root, name) for name in names]
    return files


def _warn_of_other_kinds(path: Path, files: list[Path]) -> None:
    kinds = Counter(file.suffix or file.name for file in files).most_common()
    if not kinds:
        return
    left_out = ", ".join(f"{count:,} {kind[:30]}" for kind, count in kinds[:SHOWN])
    if len(kinds) > SHOWN:
        left_out += " and others"
    for kind, _ in kinds:
        if kind in TO_TEXT:
            left_out += f"; text of a {kind}: {TO_TEXT[kind].format('FILE')}"
    logger.warning("data: left out files of other kinds in %s: %s", path, left_out)


def _refuse_kind(file: Path, reading: Reading) -> NoReturn:
    """Refuses a file of a kind that is not read, with a way to read it."""
    suffix = suffix_of(file)
    if reading.rows is not None:
        cure = "this --objective reads rows"
    elif suffix in TO_TEXT:
        cure = "make text of it: " + TO_TEXT[suffix].format(shlex.quote(str(file)))
    elif not suffix or suffix in COMPRESSIONS:
        cure = "decompress it, or rename it to tell its kind, as in NAME.jsonl.gz"
    elif _is_binary(file):
        cure = "it is binary; make text or rows of it, as .txt or .jsonl"
    else:
        cure = f"to read it as text, give --suffixes {suffix}"
    kinds = ", ".join(_kinds(reading))
    raise UserError(f"data file {file} has suffix {file.suffix!r}, not {kinds}; {cure}")


def _without_held_out(folder: Path, files: list[Path]) -> list[Path]:
    """Returns files of rows without other splits than train, and without cards beside them.

    A download of the Hugging Face Hub has data/train-00000-of-00001.parquet, data/test-..., and
    README.md.
    """
    splits: dict[Path, str] = {}
    for file in files:
        match = SPLIT.search(str(file.relative_to(folder)).lower())
        if match and suffix_of(file) in CONTAINERS:
            splits[file] = match[1]
    left_out = {*splits.values()} - {"train"} if "train" in splits.values() else set()
    if left_out:
        read = "data: %s: split train is read; left out: %s; give files by name to read them"
        logger.warning(read, folder, ", ".join(sorted(left_out)))
    files = [file for file in files if splits.get(file) not in left_out]
    has_rows = any(suffix_of(file) in CONTAINERS for file in files)
    cards = [file for file in files if has_rows and file.name == "README.md"]
    cards = [file for file in cards if file.read_bytes()[:4] == b"---\n"]
    if cards:
        logger.warning("data: left out %s, which describes a dataset", cards[0])
    return [file for file in files if file not in cards]


def _kinds(reading: Reading) -> list[str]:
    """Returns the suffixes of files that are read. An objective's rows are not in texts."""
    return [*([] if reading.rows else _suffixes_of_texts(reading.suffixes)), *CONTAINERS]


def _suffixes_of_texts(suffixes: str | None) -> list[str]:
    """Returns the suffixes of texts. Raises UserError for words that are none."""
    names = [suffix.strip().lower() for suffix in (suffixes or SUFFIXES).split(",")]
    taken = {*CONTAINERS, *COMPRESSIONS, *TO_TEXT}
    for name in names:
        if not re.fullmatch(r"\.[^./\s]+", name) or name in taken:
            raise UserError(
                "suffixes must be of text files, with commas between them, as .rs,.c: "
                f"got {name[:30]!r}"
            )
    return names


def _is_binary(file: Path) -> bool:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        return b"\0" in stream.read(4096)
    return False


def is_data(file: Path, reading: Reading = DEFAULT) -> bool:
    """Whether a file of a folder is data.

    Many .json and .csv files hold other things: their first row must have a known form. For an
    objective it must have two of its fields.
    """
    suffix = suffix_of(file)
    if suffix not in (".json", *SEPARATORS) or not file.is_file():
        return suffix in _kinds(reading) and file.is_file()
    with contextlib.suppress(UserError, StopIteration):
        _, row = next(read_rows(file))
        if isinstance(row, BrokenRow):
            row = dict.fromkeys(row.names, "")
        row = rename(row, reading.renames)
        names = reading.rows.fields | reading.rows.foreign if reading.rows else frozenset()
        return is_row(row) or (isinstance(row, dict) and len(row.keys() & names) > 1)
    return False


def _files_of_saved(folder: Path) -> list[str]:
    """Returns the files of a dataset that `datasets` saved; others in its folder are caches."""
    state = folder / "state.json"
    try:
        paths = [file["filename"] for file in read_json(state)["_data_files"]]
    except (LookupError, TypeError):
        raise UserError(f"{state} is damaged: it does not name the dataset's files") from None
    names = []
    for path in paths:
        file = inside(folder, path, state)
        if not file.is_file():
            raise UserError(
                f"{folder} is not whole: {file.name[:100]} of its state.json is missing; "
                "save it again"
            )
        names.append(file.name)
    caches = {file.name for file in folder.glob("*.arrow")}.difference(names)
    if caches:
        left_out = "data: left out %s .arrow in %s, which its state.json does not name"
        logger.warning(left_out, f"{len(caches):,}", folder)
    return names


def _choose_split(folder: Path) -> list[str]:
    """Returns the split to read of those that `datasets` saved: the only one, or train."""
    file = folder / "dataset_dict.json"
    splits = read_json(file).get("splits")
    if not isinstance(splits, list) or not splits:
        raise UserError(f"{file} is damaged: it does not name the splits")
    splits = [inside(folder, split, file).name for split in splits]
    if len(splits) == 1:
        return splits
    if "train" not in splits:
        raise UserError(
            f"{folder} has the splits {', '.join(splits)}; give --data the folder of one"
        )
    left_out = ", ".join(split for split in splits if split != "train")
    logger.warning("data: %s: split train is read; left out: %s", folder, left_out)
    return ["train"]


class DocumentReader:
    """Turns files into tokenized documents; forms.py has the forms of rows.

    Args:
        tokenizer: see load_tokenizer.
        vocab_size: the model's; every id must be below it.
        reading: what rows mean, and whether reading ends soon after a row that cannot be read.

    Attributes:
        found: how many documents of each form were made, by words for the log.
        left_out: files and rows from which nothing can be learnt: by what they are, [their number,
            the first's place].
        bad: rows that cannot be read.
        used: names of columns that rows have had, and AS_CHATS if one was a chat.
    """

    def __init__(self, tokenizer, vocab_size: int, reading: Reading = DEFAULT):
        self._tokenizer, self._vocab_size, self._reading = tokenizer, vocab_size, reading
        self.eos_id, self.found, self.left_out = tokenizer.eos_id, Counter[str](), dict[str, list]()
        self.bad, self.used, self._columns = BadRows(), set[str](), reading.renames
        self._rows, self._last_row = 0, 0  # rows that were looked at, and after which reading ends
        self._unread = set[str]()  # fields that are left out of the present row, in words
        self._largest = -1  # id that was checked

    @functools.cached_property
    def _chat(self) -> ChatTemplate:
        """The template, opened at the first chat: other data need no template."""
        try:
            return ChatTemplate(self._tokenizer, self._reading.reasoning or "template")
        except UserError as error:
            raise NoTemplate(str(error)) from None

    @functools.cached_property
    def _has_template(self) -> bool:
        return has_template(self._tokenizer)

    @property
    def has_read_enough(self) -> bool:
        """Whether a row was bad, bad rows are refused, and READ_ON rows were looked at since."""
        is_refused = self.bad.count > 0 and self._reading.bad_rows != "drop"
        return is_refused and self._rows >= self._last_row

    def read(self, file: Path, start: int = 0, stop: int = 0, first: int = 1) -> Iterator[Document]:
        """Yields the documents of a file, or of its piece that cut_rows gave; none if it is empty.

        Raises UserError: names the file, and the offset; or chats have no template.
        """
        if self.has_read_enough:
            return
        if suffix_of(file) in CONTAINERS:
            # An objective's rows are read whole: forms.py refuses fields by words in their names.
            fields = frozenset() if self._reading.rows else FIELDS.union(self._columns)
            for number, row in read_rows(file, start, stop, first, fields):
                yield from self._read_row(row, str(file), number)
                if self.has_read_enough:
                    return
            return
        if is_compressed(file):
            content = read_compressed(file)
        else:
            content = read_file(file, "give --data a readable file")
        content = self._without_mark(content, str(file))
        yield from self.read_text(_decode(content, str(file)), file)

    def read_text(self, text: str, file: Path) -> Iterator[Document]:
        """Yields a text file's one document; none if the text is blank."""
        if text.strip():
            self.found["files of text"] += 1
            yield self._checked(replace(self._encode_text(text), file=str(file)))
        else:
            self._leave_out("files without text", str(file))

    def _read_row(self, row, file: str, number: int) -> Iterator[Document]:
        """Yields the document of a row, an object or a line of JSON.

        Yields none if the row is bad, or has nothing to learn.
        """
        where = place(file, number)
        self._rows, self._unread = self._rows + 1, set()
        try:
            if isinstance(row, bytes):
                row = self._parse(row, where, number)
            if isinstance(row, dict):
                self.used.update(self._columns.keys() & row.keys())
            if isinstance(row, BrokenRow):
                raise UserError(row.why)
            row = rename(row, self._columns)
            if isinstance(row, dict) and suffix_of(Path(file)) in SEPARATORS:
                row = with_values(row)
            row = with_chats(row)
            if self._reading.rows is None:
                form, document = self._encode(row)
            else:
                form, document = self._reading.rows(row, lambda part: self._encode(part)[1])
        except NothingToLearn as what:
            self._leave_out(str(what), where)
        except NoTemplate as error:
            raise UserError(f"{where}: {error}") from None
        except RecursionError:
            self._refuse(where, "values are nested too deeply")
        except UserError as error:
            self._refuse(where, str(error))
        else:
            self.found[f"rows of {form}"] += 1
            for left_out in sorted(self._unread):
                self._leave_out(left_out, where)
            yield self._checked(replace(document, file=file, line=number))

    def _refuse(self, where: str, why: str) -> None:
        self._last_row = self._last_row or self._rows + READ_ON
        self.bad.add(BadRows(1, [where], why))

    def _parse(self, line: bytes, where: str, number: int) -> object:
        line = self._without_mark(line, where) if number == 1 else line
        if not line.strip():
            raise NothingToLearn("blank lines")
        text = _decode(line, "the line")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for 5,000 digits
            why = str(error)
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg}, character {error.pos + 1}"
            cure = "each line must be one JSON object"
            if number == 1 and text.lstrip().startswith(("[{", "[\r", "[\n", "{\r", "{\n")):
                cure = "rename the file to .json"
            raise UserError(f"not JSON ({why[:100]}); {cure}") from None

    def _without_mark(self, content: bytes, where: str) -> bytes:
        if content.startswith(BYTE_ORDER_MARK):
            self._leave_out("byte order marks", where)
        return content.removeprefix(BYTE_ORDER_MARK)

    def _leave_out(self, what: str, where: str) -> None:
        self.left_out.setdefault(what, [0, where])[0] += 1

    def _encode(self, row: object) -> tuple[str, Document]:
        """Returns a row's form, in words for the log, and its tokens."""
        form, sample = recognise(row)
        if "messages" in sample and ("completion" not in sample or self._has_template):
            self.used.add(AS_CHATS)
            ids, masked = self._chat.encode(sample)
            self._unread.update(UNREAD_FIELD + name[:40] for name in self._chat.unread)
            return f"{form.name}{AS_CHATS}", Document(ids, masked, True)
        is_pair = "completion" in sample
        texts = []
        for name in ("prompt", "completion") if is_pair else ("text",):
            text = sample.get(name)
            if not isinstance(text, str):
                is_mixed = name == "prompt" and isinstance(sample["completion"], str)
                where = ', where "completion" is one' if is_mixed else ""
                raise UserError(f'needs a string "{name}"{where}')
            texts.append(text)
        if not texts[-1].strip():
            raise NothingToLearn("rows with an empty answer" if is_pair else "rows without text")
        if UNSTORABLE.search("".join(texts)):
            raise UserError("escaped NUL or lone surrogate in the text; remove it")
        if not is_pair:
            return form.name, self._encode_text(texts[0])
        self._check_fields_beside(sample, form)
        return f"{form.name}, as prompts with completions", self._encode_sample(*texts)

    def _check_fields_beside(self, sample: dict, form: Form) -> None:
        """Refuses fields beside a sample that may be of its answer.

        They are counted where --columns names the answer, and so leaves them out.
        """
        columns = columns_of(form)
        if self._reading.rows and "chosen" in self._reading.rows.fields:
            columns = "chosen=chosen,rejected=rejected"
        if not sample["beside"]:
            return
        said = [squeeze(sample["prompt"]), squeeze(sample["completion"])]
        for name, value in sample["beside"].items():
            lost = find_lost(name, value, said)
            if lost is None or not lost.is_answer:
                continue
            if ANSWERS.isdisjoint(self._columns.values()):
                raise UserError(
                    f"has {json.dumps(name[:40])} beside its answer: {lost.text[:40]!r}, which "
                    "would be ignored; write it into the prompt or the answer, or give --columns "
                    f"{columns} to leave it out"
                )
            self._unread.add(f'the field "{name[:40]}" of rows')

    def _encode_text(self, text: str) -> Document:
        """Returns the tokens of a text, complete if it ends with the end-of-text token."""
        tokens = self._tokenizer.encode_from_start(self._without_space_at_end(text))
        return Document(tokens, None, self.eos_id in tokens[-1:])

    def _encode_sample(self, prompt: str, completion: str) -> Document:
        """Returns the tokens of a prompt and a completion; the prompt's are masked."""
        completion = self._without_space_at_end(completion)
        tokens, prompt_length = self._tokenizer.encode_sample(prompt, completion)
        masked = np.arange(len(tokens)) < prompt_length
        return Document(tokens, masked, self.eos_id in tokens[-1:])

    def _without_space_at_end(self, text: str) -> str:
        """Returns a text without the space behind an end-of-text token at its end."""
        stripped = text.rstrip()
        return stripped if stripped.endswith(self._tokenizer.eos_token) else text

    def _checked(self, document: Document) -> Document:
        largest = int(document.tokens.max(initial=0))
        if largest > self._largest:
            where = place(document.file, document.line)
            check_ids(largest, self._tokenizer, self._vocab_size, where)
            self._largest = largest
        return document


def _standard_library(reader: DocumentReader) -> Iterator[Document]:
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        # Installed packages have many files, and none is looked at.
        folders[:] = {*folders} - STANDARD_LIBRARY_SKIPS
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(files):
        # Some tests cannot be decoded, on purpose.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield from reader.read_text(file.read_bytes().decode(), file)


def _decode(raw: bytes, where: str) -> str:
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UserError(f"{where} is binary: NUL byte at offset {nul}; give --data UTF-8 text")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
            "convert it, or leave it out of --data"
        ) from None
