"""Documents: read from files and folders, tokenized, and split into a training and a held-out share."""

import json
import os
import re
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from training.errors import UserError, read_file

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
# JSON can spell in escapes what documents must not hold: NUL, and halves of surrogate pairs.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# Other people's packages, and folders of the standard library that are tables or test fixtures rather than programs.
STANDARD_LIBRARY_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Document:
    tokens: np.ndarray  # [N] as the tokenizer made them (uint8 for bytes, else uint32), without the end-of-text id
    num_masked: int = 0  # leading tokens that are no targets: the prompt of a fine-tuning sample
    source: str = ""  # the file that it comes from, of a .jsonl file with the line's number


def load_documents(paths: list[str] | str | None, tokenizer, vocab_size: int) -> list[Document]:
    """Read and tokenize the corpus: a text file is one document, a .jsonl line is one document.

    Args:
        paths: files, or folders searched recursively in sorted order, of .txt, .md, .py and .jsonl (each line
            {"text": ...}, or {"prompt": ..., "completion": ...} whose prompt is no target). None: the sources of
            Python's standard library on this machine. Empty text files inside a folder are passed over.
        tokenizer: of load_tokenizer.
        vocab_size: the model's; every id must be below it.

    Returns:
        The documents, never an empty list.

    Raises:
        UserError: one line naming file, and offset or line number, for a path that is missing, empty, unreadable,
            binary or of another type, a .jsonl line of another form, or an id >= vocab_size.
    """
    if paths is None:
        return _standard_library(tokenizer, vocab_size)
    documents = []
    for path in [Path(paths)] if isinstance(paths, str) else map(Path, paths):
        if not path.exists():
            raise UserError(f"data path {path} does not exist; give --data a file or a folder")
        is_folder = path.is_dir()
        files = _files_in(path) if is_folder else [path]
        found = []
        for file in files:
            suffix = file.suffix.lower()
            if suffix == ".jsonl":
                found += _read_lines(file, tokenizer, vocab_size)
            elif suffix in SUFFIXES:
                text = _decode(read_file(file, "give --data a readable file"), str(file))
                if text.strip():
                    found.append(Document(_tokenize(text, tokenizer, vocab_size, str(file)), source=str(file)))
            elif not is_folder:
                raise UserError(f"data file {file} has suffix {suffix!r}; it must be one of {', '.join(SUFFIXES)}")
        if not found:
            what = f"folder {path} has no text in any {', '.join(SUFFIXES)} file" if is_folder else f"{path} is empty"
            raise UserError(f"data {what}; give --data a path that holds text")
        documents += found
    if not documents:
        raise UserError("data is an empty list of paths; give at least one, or none at all for the default corpus")
    return documents


def _standard_library(tokenizer, vocab_size: int) -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for file in sorted(root.rglob("*.py")):
        if STANDARD_LIBRARY_SKIPS.isdisjoint(file.relative_to(root).parts):
            try:
                text = _decode(file.read_bytes(), str(file))
            except (OSError, ValueError):  # lib2to3 and others carry sources that are undecodable on purpose
                continue
            if text.strip():
                documents.append(Document(_tokenize(text, tokenizer, vocab_size, str(file)), source=str(file)))
    if not documents:
        raise UserError(f"no Python sources in {root} to serve as the default corpus; give --data a file or a folder")
    return documents


def _files_in(folder: Path) -> list[Path]:
    """All regular files, also of subfolders, in order. Raises UserError where a subfolder cannot be read."""

    def refuse(error: OSError):
        raise UserError(f"cannot read {error.filename}: {error.strerror}; make it readable, or give other --data")

    files = (Path(root, name) for root, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(file for file in files if file.is_file())


def _decode(raw: bytes, where: str) -> str:
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UserError(f"{where} is binary: NUL byte at offset {nul}; give --data UTF-8 text")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
                         "convert it, or leave it out of --data") from None  # fmt: skip


def _tokenize(text: str, tokenizer, vocab_size: int, where: str) -> np.ndarray:
    tokens = tokenizer.encode(text)
    largest = max(int(tokens.max(initial=0)), tokenizer.eos_id)
    if largest >= vocab_size:
        raise UserError(
            f"{where}: token id {largest} is not below the model's vocab_size {vocab_size}; "
            f"tokenizer {tokenizer.name} needs a model of vocab_size {tokenizer.vocab_size} or more"
        )
    return tokens


def _read_lines(file: Path, tokenizer, vocab_size: int) -> list[Document]:
    documents = []
    raw = read_file(file, "give --data a readable file").removesuffix(b"\n")
    # Only \n ends a line: str.splitlines would also cut at separators that JSON allows inside a string.
    for number, line in enumerate(raw.split(b"\n") if raw else [], start=1):
        where = f"{file}:{number}"
        try:
            record = json.loads(_decode(line, where))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({str(error)[:100]}); each line must be one JSON object") from None
        record = record if isinstance(record, dict) else {}
        is_sample = "completion" in record
        prompt, text = (record.get("prompt"), record["completion"]) if is_sample else ("", record.get("text"))
        if not isinstance(text, str) or not isinstance(prompt, str):
            raise UserError(f'{where}: needs a string "text", or strings "prompt" and "completion"')
        if not text.strip():
            raise UserError(f"{where}: empty text leaves nothing to learn from; remove the line")
        if UNSTORABLE.search(prompt + text):
            raise UserError(f"{where}: escaped NUL or lone surrogate in the text; remove it")
        masked = _tokenize(prompt, tokenizer, vocab_size, where)
        tokens = _tokenize(text, tokenizer, vocab_size, where)
        documents.append(Document(np.concatenate([masked, tokens]), len(masked), where))
    return documents


def split_documents(
    documents: list[Document], validation_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Hold out whole documents, drawn by seed, of at most validation_fraction of all tokens, and at least one.

    A corpus of one document is cut instead: its tail is held out.

    Returns:
        (training documents, validation documents), neither empty. The held-out ones are in random order, so that a
        validation that stops early still sees a fair sample.

    Raises:
        UserError: a fraction outside (0, 1), or one document too short to cut.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"validation_fraction must be between 0 and 1, both excluded: got {validation_fraction}")
    sizes = [len(document.tokens) for document in documents]
    if len(documents) == 1:
        whole = documents[0]
        cut = sizes[0] - max(1, int(sizes[0] * validation_fraction))
        if cut <= whole.num_masked:
            raise UserError(f"the one document of {sizes[0]} tokens is too short to hold some out; give more --data")
        return [replace(whole, tokens=whole.tokens[:cut])], [Document(whole.tokens[cut:], source=whole.source)]
    allowed = validation_fraction * sum(sizes)
    held_out = []
    for i in np.random.default_rng(seed).permutation(len(documents)).tolist():
        if sizes[i] <= allowed:
            allowed -= sizes[i]
            held_out.append(i)
    held_out = held_out or [int(np.argmin(sizes))]
    chosen = set(held_out)
    return [d for i, d in enumerate(documents) if i not in chosen], [documents[i] for i in held_out]
