"""Tokenizes a corpus in parallel into a prepared set; prepared.py describes the folder.

The corpus is cut into parts of about 16 MB, each made by one process. A part's name is a hash of
all that decides its content: files, their sizes and times, tokenizer, chat template and settings.
Parts that exist are not made again: after a stop the same command goes on, and after a change of
some files it makes only their parts, also in a set that is complete. This set stays as it was until
the new one takes its place; then parts of the old one are deleted.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.data.chat import open_tokenizer
from training.data.containers import CONTAINERS, cut_rows, suffix_of
from training.data.prepared import (
    DOCUMENT,
    FORMAT,
    INDEX,
    MASKED,
    TOKEN,
    PreparedStore,
    canonical,
    hash_of_index,
    hash_of_part,
    is_summary,
    read_index,
)
from training.data.sources import (
    AS_CHATS,
    DEFAULT,
    BadRows,
    DocumentReader,
    Reading,
    find_files,
    is_data,
    refuse_unused,
    say_found,
    say_left_out,
)
from training.data.template import template_hash
from training.data.tokenizer import ByteTokenizer, FileTokenizer
from training.host.errors import UserError, as_json
from training.host.files import flush, only_run_in, read_json, space_on, write_file
from training.host.processes import DISK_ERRORS
from training.host.progress import Progress
from training.host.signals import interrupted_by_signals

PART_BYTES = 2**24  # of text
# Counts changes of what rows mean, and of what summaries hold: parts made before are made anew.
MEANING = 6
OURS = re.compile(r"part-[0-9a-f]{16}\.(tokens|documents|json)(\.new)?")

GOES_ON = "mend that, as by making room, and the same command goes on from here"


class Extent(NamedTuple):
    """A text file, or some whole rows of another file."""

    path: str
    size: int  # bytes of the file, and when it was changed: another file has other parts
    time_ns: int
    start: int  # bytes start .. stop - 1 of the file
    stop: int
    line: int  # number of the first row; 0 for a text file

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Tokenizing(NamedTuple):
    """A tokenizer, all that names it, and the flags by which a worker opens it."""

    opened: FileTokenizer | ByteTokenizer
    identity: str
    path: str
    chat_template: str | None


def prepare(
    source: Path,
    out: Path,
    tokenizer: str,
    workers: int = 1,
    reading: Reading = DEFAULT,
    chat_template: str | None = None,
) -> dict:
    """Makes a prepared set of `source`, a file or a folder, in the folder `out`; returns its index.

    Parts with rows that cannot be read are made without them. Where such rows are refused, no part
    is begun after one was found; the same command with `--bad_rows drop` makes the others.
    """
    opened, files = open_tokenizer(tokenizer, chat_template), find_files(source, reading)
    reading.refuse_without_effect([source])
    identity = f"{opened.identity}{opened.eos_id}{getattr(opened, 'special_tokens', '')}"
    with contextlib.suppress(UserError):  # texts need no template
        identity += str(template_hash(opened))
    for file in out.iterdir() if out.is_dir() else ():
        if file.suffix != ".json" and is_data(file, reading):
            raise UserError(
                f"{out} has text in it, which its set would hide from --data; choose another folder"
            )
    tokenizing = Tokenizing(opened, identity, tokenizer, chat_template)
    with interrupted_by_signals(), only_run_in(out):
        try:
            return _prepare_in(out, source, files, tokenizing, reading, workers)
        except KeyboardInterrupt:
            for file in out.iterdir():
                if OURS.fullmatch(file.name) and file.suffix == ".new":
                    file.unlink(missing_ok=True)
            raise


def _prepare_in(
    out: Path,
    source: Path,
    files: list[Path],
    tokenizing: Tokenizing,
    reading: Reading,
    workers: int,
) -> dict:
    """Makes the set of `prepare` in its locked folder."""
    opened = tokenizing.opened
    parts = _find_parts(files, tokenizing.identity, reading)
    summaries = {name: _read_part(out / name) for name in parts}
    done = {name: summary for name, summary in summaries.items() if summary is not None}
    if reading.bad_rows != "drop":
        _settle_bad_rows(parts, done, reading)
    if os.path.lexists(out / INDEX):
        _check_is_earlier(out, opened, source, reading)
    settings = tokenizing.path, reading, tokenizing.chat_template
    _make_parts(parts, done, out, settings, workers)
    _settle_bad_rows(parts, done, reading)
    kept = [{"name": name, **done[name]} for name in parts if done[name]["documents"]]
    if os.path.lexists(out / INDEX):
        index = read_index(out)
        if index["parts"] == kept:
            _delete_others(out, parts)
            return index
    say_found(source, [done[name]["found"] for name in parts])
    say_left_out([done[name]["left_out"] for name in parts])
    has_chats = any(AS_CHATS in what for name in parts for what in done[name]["found"])
    used = (done[name]["used"] for name in parts)  # parts of earlier versions lack AS_CHATS
    refuse_unused(reading.awaited.difference(*used, [AS_CHATS] * has_chats))
    if not kept:
        raise UserError(f"{source} has no text; give a path that holds some")
    index = {
        "format": FORMAT,
        "tokenizer": opened.identity,
        "tokenizer_name": opened.name,
        "eos_id": opened.eos_id,
        "are_samples": any(part["are_samples"] for part in kept),
        "source": str(source),
        "columns": reading.renames,
        "reasoning": reading.reasoning or "template",
        "chat_template": template_hash(opened) if has_chats else None,
        **{name: sum(part[name] for part in kept) for name in ("documents", "tokens", "targets")},
        "parts": kept,
    }
    index["sha256"] = hash_of_index(index)
    flush(out)
    _write(out / INDEX, json.dumps(index, indent=1).encode())
    flush(out)
    _delete_others(out, parts)
    return index


def _delete_others(out: Path, parts: Iterable[str]) -> None:
    """Deletes parts of an earlier set, and what kills have left."""
    kept = {f"{name}{kind}" for name in parts for kind in (".tokens", ".documents", ".json")}
    for file in out.iterdir():
        if OURS.fullmatch(file.name) and file.name not in kept:
            file.unlink()


def _check_is_earlier(out: Path, tokenizer, source: Path, reading: Reading) -> None:
    """Refuses to replace a set of another source, or one made by other settings."""
    PreparedStore(out, tokenizer, tokenizer.vocab_size)
    earlier = read_index(out)
    settings = {
        "source": str(source),
        "reasoning": reading.reasoning or "template",
        "columns": reading.renames,
    }
    for name, value in settings.items():
        if earlier.get(name, value) != value:
            raise UserError(
                f"{out} has another set in it, of {name} {as_json(earlier[name], 100)}, this one's "
                f"is {as_json(value, 100)}; choose another folder"
            )


def _settle_bad_rows(parts: Iterable[str], done: dict[str, dict], reading: Reading) -> None:
    bad = BadRows()
    for name in parts:
        bad.add(BadRows(**done[name]["bad"]) if name in done else BadRows())
    bad.settle(reading.bad_rows, or_more=not done.keys() >= {*parts})


def _find_parts(files: list[Path], identity: str, reading: Reading) -> dict[str, list[Extent]]:
    """Returns the parts by their names. Shows progress: ends of lines are looked for."""
    parts = {}
    total = sum(file.stat().st_size for file in files)
    bar = {"unit": "B", "unit_scale": True, "desc": "finding lines", "leave": False}
    with Progress(total=total, **bar) as progress:
        for extents in _plan(files):
            content = {
                "format": FORMAT,
                "meaning": MEANING,
                "pieces": extents,
                "identity": identity,
                "reasoning": reading.reasoning or "template",
                "columns": reading.renames,
            }
            parts[f"part-{hashlib.sha256(canonical(content)).hexdigest()[:16]}"] = extents
            progress.update(sum(extent.num_bytes for extent in extents))
    return parts


def _plan(files: list[Path]) -> Iterator[list[Extent]]:
    """Yields the parts, each some whole text files, or some whole rows of one file."""
    texts: list[Extent] = []
    for file in files:
        status = file.stat()
        extent = Extent(str(file), status.st_size, status.st_mtime_ns, 0, status.st_size, 0)
        if suffix_of(file) in CONTAINERS:
            for start, stop, line in cut_rows(file, PART_BYTES):
                yield [extent._replace(start=start, stop=stop, line=line)]
            continue
        texts.append(extent)
        if sum(text.size for text in texts) >= PART_BYTES or len(texts) == 1000:
            yield texts
            texts = []
    if texts:
        yield texts


def _read_part(path: Path) -> dict | None:
    """Returns a part's summary; None if the part is not complete, or its .json was changed."""
    try:
        content = read_json(path.with_suffix(".json"))
        if not is_summary(content):
            return None
        summary = content["summary"]
        files = [path.with_suffix(kind) for kind in (".tokens", ".documents")]
        sizes = [file.stat().st_size for file in files if file.is_file()]
        return summary if sizes == [4 * summary["tokens"], 24 * summary["documents"]] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _has_changed(extent: Extent) -> bool:
    status = os.stat(extent.path)
    return (extent.size, extent.time_ns) != (status.st_size, status.st_mtime_ns)


def _make_parts(
    parts: dict[str, list[Extent]],
    done: dict[str, dict],
    out: Path,
    settings: tuple[str, Reading, str | None],
    workers: int,
) -> None:
    """Makes the parts that are not done, in parallel, and adds their summaries to `done`."""
    missing = [name for name in parts if name not in done]
    if not missing:
        return
    sizes = {name: sum(extent.num_bytes for extent in extents) for name, extents in parts.items()}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process
    context = multiprocessing.get_context("forkserver")
    with contextlib.ExitStack() as stack:
        try:
            pool = ProcessPoolExecutor(min(workers, len(missing)), context, _open_reader, settings)
            stack.callback(pool.shutdown, cancel_futures=True)
            stack.push(_end_workers({*multiprocessing.active_children()}))
            tasks = {pool.submit(_make_part, out / name, parts[name]): name for name in missing}
        except (OSError, RuntimeError) as error:
            if isinstance(error, UserError | BrokenProcessPool):
                raise
            limits = "raise the limits of processes and open files (ulimit -u, ulimit -n)"
            cure = f"make /dev/shm writable, make room in it, or {limits}"
            raise UserError(f"cannot start worker processes: {error}; {cure}") from None
        size = {"total": sum(sizes.values()), "initial": sum(sizes[name] for name in done)}
        bar = {"unit": "B", "unit_scale": True, "desc": "tokenizing"}
        progress = stack.enter_context(Progress(**size, **bar))
        try:
            for task in as_completed(tasks):
                if task.cancelled():
                    continue
                name, summary = tasks[task], task.result()
                done[name] = summary
                if settings[1].bad_rows != "drop" and summary["bad"]["count"]:
                    for waiting in tasks:
                        waiting.cancel()
                progress.set_postfix(tokens=f"{sum(part['tokens'] for part in done.values()):,}")
                progress.update(sizes[name])
        except BrokenProcessPool:
            cure = "the same command with fewer --workers goes on"
            raise UserError(f"a worker was killed, as when memory runs out: {cure}") from None


def _end_workers(earlier: set) -> Callable[..., None]:
    """Returns an exit of a context that kills its processes, not `earlier` ones, if interrupted."""

    def end(kind: type | None, *_) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            for process in {*multiprocessing.active_children()} - earlier:
                process.kill()

    return end


_reader: DocumentReader | None = None  # a worker's


def _open_reader(path: str, reading: Reading, chat_template: str | None) -> None:
    global _reader
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Ctrl-C ends the worker. KeyboardInterrupt would end the part at hand, and the worker would
        # begin the next.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # A pipe that the parent holds closes when the parent ends. The system then sends SIGIO,
        # which ends the worker also in a library call that does not return.
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
        if not parent.is_alive():
            os._exit(1)
    tokenizer = open_tokenizer(path, chat_template)
    _reader = DocumentReader(tokenizer, tokenizer.vocab_size, reading._replace(bad_rows="drop"))


def _make_part(path: Path, extents: list[Extent]) -> dict:
    """Writes a part's three files, the .json last; returns its summary."""
    assert _reader is not None
    eos_id = np.array([_reader.eos_id], dtype=TOKEN)
    rows, targets, largest, end, are_samples = [], 0, 0, 0, False
    _reader.found, _reader.left_out, _reader.bad, _reader.used = Counter(), {}, BadRows(), set()
    digest = hashlib.sha256()
    try:
        with _cleared(path.with_suffix(".tokens.new")).open("wb") as stream:
            for number, extent in enumerate(extents):
                if _has_changed(extent):
                    raise UserError(
                        f"{extent.path} has changed since the command began: start it again, it "
                        "goes on"
                    )
                path_of_text = Path(extent.path)
                documents = _reader.read(path_of_text, extent.start, extent.stop, extent.line)
                for document in documents:
                    tokens = document.tokens.astype(TOKEN)
                    largest = max(largest, int(tokens.max(initial=0)))
                    if document.masked is not None:
                        are_samples = True
                        tokens |= np.where(document.masked, MASKED, 0).astype(TOKEN)
                    if not document.is_complete:
                        tokens = np.concatenate([tokens, eos_id])
                    stream.write(tokens.data)
                    digest.update(tokens.data)
                    end += len(tokens)
                    targets += int((tokens[1:] < MASKED).sum())
                    rows.append((end, number, document.line))
            stream.flush()
            os.fsync(stream.fileno())
        path.with_suffix(".tokens.new").rename(path.with_suffix(".tokens"))
    except OSError as error:
        raise UserError(_why_not_written(path, error)) from None
    table = np.array(rows, dtype=DOCUMENT).reshape(-1, 3).tobytes()
    _write(path.with_suffix(".documents"), table)
    summary = {
        "documents": len(rows),
        "tokens": end,
        "targets": targets,
        "largest_id": largest,
        "are_samples": are_samples,
        "found": _reader.found,
        "left_out": _reader.left_out,
        "bad": dataclasses.asdict(_reader.bad),
        "used": sorted(_reader.used),
        "sha256": {".tokens": digest.hexdigest(), ".documents": hashlib.sha256(table).hexdigest()},
    }
    content = {"pieces": extents, "summary": summary, "sha256": hash_of_part(extents, summary)}
    _write(path.with_suffix(".json"), json.dumps(content).encode())
    return summary


def _write(file: Path, content: bytes) -> None:
    """Writes a file that is complete or absent, by a rename. Raises UserError."""
    new = file.with_name(file.name + ".new")
    try:
        write_file(_cleared(new), content)
        new.rename(file)
    except OSError as error:
        raise UserError(_why_not_written(file, error)) from None


def _cleared(new: Path) -> Path:
    """Deletes what has the name of a file that is written and renamed then; a device stays.

    A link leads to somebody else's file, and a pipe would be waited for.
    """
    if not new.is_char_device():
        new.unlink(missing_ok=True)
    return new


def _why_not_written(file: Path, error: OSError) -> str:
    disk = f" ({space_on(file)})" if error.errno in DISK_ERRORS else ""
    return f"cannot write {file}: {error.strerror}; {GOES_ON}{disk}"


def histogram(lengths: np.ndarray) -> str:
    """Returns the lengths of documents as a table by powers of two, with bars of tokens."""
    exponents = np.log2(lengths).astype(int)
    quantiles = np.quantile(lengths, [0.5, 0.95]).astype(int)
    counts = f"{len(lengths):,} documents, {lengths.sum():,} tokens"
    lines = [
        f"{counts}: median {quantiles[0]:,}, 95% below {quantiles[1]:,}, longest {lengths.max():,}",
        f"{'tokens in a document':>25} {'documents':>12} {'of all tokens':>14}",
    ]
    for exponent in range(exponents.min(), exponents.max() + 1):
        inside = lengths[exponents == exponent]
        share = inside.sum() / lengths.sum()
        span = f"{2**exponent:,} to {2 ** (exponent + 1) - 1:,}"
        bar = "#" * round(50 * share)
        lines.append(f"{span:>25} {len(inside):>12,} {share:>14.1%} {bar}".rstrip())
    return "\n".join(lines)
