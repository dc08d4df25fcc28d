"""Prepared sets: tokens equal to a direct reading's, work that goes on after a stop, and refusals
of bad folders."""

import contextlib
import errno
import json
import multiprocessing
import multiprocessing.synchronize
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import tests.ranks  # noqa: F401  sets up the server that worker processes are forked from
from tests.test_bad_input import mutations
from tests.training.data.test_tokenizer import write_tokenizer
from tests.training.data.test_tokens import with_peak
from training.data import prepare as preparing
from training.data.__main__ import main
from training.data.chat import open_tokenizer
from training.data.corpus import load_corpus, open_stores
from training.data.prepare import histogram, prepare
from training.data.prepared import PreparedStore, hash_of_index
from training.data.sources import Reading
from training.data.tokenizer import load_tokenizer
from training.host.errors import UserError


@pytest.fixture
def one_process(monkeypatch):
    """Makes parts in this process: worker processes take seconds to start."""

    class Pool:
        def __init__(self, workers, context, initializer, arguments):
            initializer(*arguments)

        def submit(self, function, *arguments):
            task = Future()
            try:
                task.set_result(function(*arguments))
            except Exception as error:
                task.set_exception(error)
            return task

        def shutdown(self, cancel_futures):
            pass

    monkeypatch.setattr(preparing, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(preparing, "PART_BYTES", 60)


@pytest.fixture
def corpus(tmp_path):
    """A folder of text files and a .jsonl file with prompts; the folder of a tokenizer is beside
    it."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"the text of file {i}, " * (i + 1))
    lines = [
        {"prompt": "p" * i, "completion": "he said" * i} if i % 3 else {"text": f"line {i}"}
        for i in range(1, 9)
    ]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "z.txt").write_text(" " * 99)  # blank, and a part of its own
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    return folder


def contents(store):
    return [
        (store.source(i), *(array.tolist() for array in store.read_masked(i, 0, n)))
        for i, n in enumerate(store.lengths.tolist())
    ]


def test_a_prepared_set_has_what_is_read_directly(tmp_path, corpus, one_process, capsys, caplog):
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    index = prepare(corpus, tmp_path / "set", str(tmp_path / "tokenizer"))
    assert f"data: left out files without text: 1, the first in {corpus}/z.txt" in caplog.text
    assert len(index["parts"]) > 4 and index["are_samples"]
    [direct], [prepared] = (
        open_stores([str(p)], tokenizer, 300) for p in (corpus, tmp_path / "set")
    )
    assert (
        contents(prepared) == contents(direct)
        and prepared.are_samples
        and isinstance(prepared, PreparedStore)
    )
    assert [prepared.source(i).rpartition("/")[2] for i in (3, 4, 11)] == [
        "3.txt",
        "lines.jsonl:1",
        "lines.jsonl:8",
    ]
    targets = sum(
        int((~prepared.read_masked(i, 0, int(n))[1][1:]).sum())
        for i, n in enumerate(prepared.lengths)
    )
    assert index["targets"] == targets and index["tokens"] == prepared.lengths.sum()
    ids, is_masked = prepared.read_masked(6, 1, 4)
    assert [ids.tolist(), is_masked.tolist()] == [part[1:4] for part in contents(direct)[6][1:]]
    train, held_out, packing = load_corpus(
        [str(tmp_path / "set")], tokenizer, 300, validation_fraction=0.2, context_length=128, seed=0
    )
    assert (
        packing.identity["packing"] == "best_fit"
        and len(train.lengths) + len(held_out.lengths) == 12
    )
    assert main(["verify", str(tmp_path / "set")]) == 0
    shutil.copytree(corpus, tmp_path / "copy")
    copied = prepare(tmp_path / "copy", tmp_path / "again", str(tmp_path / "tokenizer"))
    assert copied["sha256"] != index["sha256"]
    assert open_stores([str(tmp_path / "again")], tokenizer, 300)[0].identity == prepared.identity
    file = tmp_path / "tokenizer" / "tokenizer.json"  # the same tokenizer by its file
    assert main(["prepare", str(corpus), str(tmp_path / "set"), "--tokenizer", str(file)]) == 0
    out, error = capsys.readouterr()
    size = sum(file.stat().st_size for file in corpus.iterdir())
    assert f"0.00/{size} " in error.partition("finding lines:")[2].partition("tokenizing:")[0]
    assert "12 documents" in out


def test_preparing_goes_on_where_it_stopped_and_names_bad_lines(
    tmp_path, corpus, one_process, monkeypatch
):
    make, made = preparing._make_part, []
    monkeypatch.setattr(
        preparing, "_make_part", lambda *arguments: made.append(arguments) or make(*arguments)
    )
    good = (corpus / "lines.jsonl").read_text()
    (corpus / "lines.jsonl").write_text(good + '\n{"text": 3}')
    with pytest.raises(ValueError, match=r'lines\.jsonl:9: needs a string "text"'):
        prepare(corpus, tmp_path / "set", "bytes")
    with pytest.raises(
        ValueError, match="set is prepared in part: the command that began it goes on"
    ):
        open_stores([str(tmp_path / "set")], load_tokenizer("bytes"), 256)
    with pytest.raises(ValueError, match="does not exist"):
        prepare(corpus / "missing", tmp_path / "none", "bytes")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="corpus has text in it, which its set would hide"):
        prepare(corpus / "0.txt", corpus, "bytes")
    with pytest.raises(
        ValueError, match=r"0\.txt has changed since the command began: start it again"
    ):
        preparing._make_part(
            tmp_path / "part", [preparing.Extent(str(corpus / "0.txt"), 1, 1, 0, 1, 0)]
        )
    first = len(made)
    (corpus / "lines.jsonl").write_text(good)
    expected = prepare(corpus, tmp_path / "set", "bytes")
    assert first < len(made) < 2 * first  # the text files' parts existed already
    names = {file.name.split(".")[0] for file in (tmp_path / "set").glob("part-*")}
    in_use = {part["name"] for part in expected["parts"]}
    assert (
        in_use < names and len(names) == len(in_use) + 1
    )  # the blank part is left; the bad file's parts are gone
    # This is what a stop in the middle of a part leaves.
    (tmp_path / "set" / "set.json").unlink()
    last = expected["parts"][-1]["name"]
    (tmp_path / "set" / f"{last}.json").unlink()
    (tmp_path / "set" / f"{last}.tokens").write_bytes(b"half")
    made.clear()
    assert prepare(corpus, tmp_path / "set", "bytes") == expected and len(made) == 1
    assert prepare(corpus, tmp_path / "set", "bytes") == expected and len(made) == 1


def test_a_change_of_some_files_makes_their_parts_alone_anew_also_in_a_finished_set(
    tmp_path, corpus, one_process, monkeypatch, capsys
):
    make, made, folder = preparing._make_part, [], tmp_path / "set"
    monkeypatch.setattr(
        preparing, "_make_part", lambda *arguments: made.append(arguments) or make(*arguments)
    )
    command = ["prepare", str(corpus), str(folder), "--tokenizer", "bytes"]

    def prepare_again() -> int:
        made.clear()
        assert main(command) == 0 and main(["verify", str(folder)]) == 0
        assert contents(PreparedStore(folder, load_tokenizer("bytes"), 256)) == contents(
            open_stores([str(corpus)], load_tokenizer("bytes"), 256)[0]
        )
        in_use = {part["name"] for part in json.loads((folder / "set.json").read_text())["parts"]}
        names = {file.name.partition(".")[0] for file in folder.glob("part-*")}
        assert in_use <= names and len(names - in_use) == 1  # the blank file's part is in no set
        return len(made)

    whole = prepare_again()
    assert whole > 5 and prepare_again() == 0
    (corpus / "3.txt").write_text(
        "another text of file 3 that is longer than sixty bytes for a part of its own"
    )
    assert prepare_again() == 1
    os.utime(corpus / "2.txt", ns=(1, 1))
    assert prepare_again() == 1
    (corpus / "y.txt").write_text(
        "one more text, which is longer than sixty bytes for a part of its own, too"
    )
    assert prepare_again() == 1
    (corpus / "y.txt").unlink()
    assert prepare_again() == 0
    good = (folder / "set.json").read_bytes()
    (corpus / "zz.jsonl").write_text('{"text": 3}')
    assert main(command) == 1 and (folder / "set.json").read_bytes() == good
    assert main(["verify", str(folder)]) == 0
    for other in (
        ["prepare", str(corpus / "0.txt"), *command[2:]],
        [*command, "--columns", "text=b"],
    ):
        assert main(other) == 1 and "has another set in it, of " in capsys.readouterr().err
    assert (folder / "set.json").read_bytes() == good


@pytest.mark.parametrize("suffix", [".tokens", ".documents", ".json", "set.json"])
def test_verify_refuses_every_damaged_or_special_file_by_name(
    tmp_path, corpus, one_process, capsys, suffix
):
    folder, elsewhere = tmp_path / "set", tmp_path / "elsewhere"
    part = prepare(corpus, folder, "bytes")["parts"][1]["name"]
    file = folder / (suffix if suffix == "set.json" else part + suffix)
    good = file.read_bytes()
    elsewhere.write_bytes(good[:-1])
    places = range(0, len(good), max(1, len(good) // 24))
    damages = [
        lambda at=at: file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        for at in places
    ]
    damages += [lambda: file.write_bytes(good + b" "), lambda: file.write_bytes(b" " + good)]
    damages += [
        lambda: None,
        lambda: os.mkfifo(file),
        file.mkdir,
        lambda: file.symlink_to(elsewhere),
    ]
    damages += [
        lambda: file.symlink_to("nothing"),
        lambda: file.symlink_to(file.name),
        lambda: file.write_bytes(b""),
    ]
    for damage in damages:
        file.unlink()
        damage()
        assert main(["verify", str(folder)]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and file.name in error, error
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
        file.write_bytes(good)
    assert main(["verify", str(folder)]) == 0


def edit_summary(**changes):
    def edit(path):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"summary": content["summary"] | changes}))

    return edit


EDITS = {
    "deep": lambda path: path.write_text("[" * 100_000),
    # a sparse file: the disk stores nothing of it
    "huge": lambda path: os.truncate(path, 3 * 2**30),
    "no object": lambda path: path.write_text("[]"),
    **{
        f"{name} {value}": edit_summary(**{name: value})
        for name, value in (
            ("are_samples", None),
            ("targets", "3"),
            ("found", []),
            ("found", {"a": "b"}),
            ("left_out", {"a": 1}),
        )
    },
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_part_that_somebody_edited_is_made_anew(edit, tmp_path, corpus, one_process):
    """A part of another corpus lies in the same folder, and is left or deleted."""
    folder = tmp_path / "set"
    expected = prepare(corpus, folder, "bytes")
    part = folder / f"{expected['parts'][0]['name']}.json"
    good = part.read_text()
    other = folder / "part-0000000000000000.json"
    shutil.copyfile(part, other)
    edit(part)
    edit(other)
    assert PreparedStore(folder, load_tokenizer("bytes"), 256).source(0)
    assert prepare(corpus, folder, "bytes") == expected
    (folder / "set.json").unlink()
    assert with_peak(lambda: prepare(corpus, folder, "bytes"))[1] < 2**27
    assert json.loads((folder / "set.json").read_text()) == expected and part.read_text() == good


def test_a_pipe_for_a_template_is_not_waited_for(tmp_path, corpus, one_process):
    os.mkfifo(tmp_path / "tokenizer" / "tokenizer_config.json")
    assert prepare(corpus, tmp_path / "set", str(tmp_path / "tokenizer"))["parts"]


def test_tokens_that_templates_write_decide_what_parts_hold(tmp_path, corpus, one_process):
    """A template may write bos_token, which special_tokens_map.json names among tokens that
    tokenizer.json has."""
    named, parts = tmp_path / "tokenizer" / "special_tokens_map.json", []
    for number, content in enumerate(("{}", '{"bos_token": "<|endoftext|>"}')):
        named.write_text(content)
        parts.append(
            prepare(corpus, tmp_path / str(number), str(tmp_path / "tokenizer"))["parts"][0]["name"]
        )
    assert parts[0] != parts[1]


def test_a_set_of_chats_is_trained_with_the_template_that_wrote_it(tmp_path, one_process):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    for end in "AB":
        template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[" + end + "]{% endfor %}"
        (tmp_path / f"{end}.jinja").write_text(template)
    chat = {"messages": [{"role": "user", "content": "he"}, {"role": "assistant", "content": "x"}]}
    for name, row in (("chats", chat), ("samples", {"prompt": "he", "completion": "x"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        source, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name} set"
        reading = Reading(needs_chats=name == "chats")
        prepare(source, out, path, reading=reading, chat_template=str(tmp_path / "A.jinja"))
    with_templates = [
        open_tokenizer(path, name and str(tmp_path / name)) for name in ("A.jinja", "B.jinja", None)
    ]
    for tokenizer in with_templates:
        PreparedStore(tmp_path / "samples set", tokenizer, 300)
    PreparedStore(tmp_path / "chats set", with_templates[0], 300)
    with_templates[2].has_template_flag = False
    for tokenizer, flag in zip(with_templates[1:], ("--chat_template", "--tokenizer")):
        was = "chats set was prepared with another chat template than this run's"
        with pytest.raises(UserError, match=f"{was}; give {flag} as then, or delete"):
            PreparedStore(tmp_path / "chats set", tokenizer, 300)


def processes_of(session):
    """Returns the processes of a session that have not ended, by their ids."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = file.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(file.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_hang_end_with_the_command(tmp_path, number):
    """The template compares huge strings in C code, which holds Python's lock: no thread of the
    worker runs."""
    write_tokenizer(tmp_path / "tokenizer.json")
    endless = "{% set a = 'a' * 10000000 %}{{ (a ~ 'b') in ([a ~ 'c'] * 10000000) }}"
    (tmp_path / "chat_template.jinja").write_text(endless)
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user"}]}')
    argv = [
        "prepare",
        tmp_path / "a.jsonl",
        tmp_path / "out",
        "--tokenizer",
        tmp_path,
        "--workers",
        "1",
    ]
    command = subprocess.Popen(
        [sys.executable, "-m", "training.data", *map(str, argv)], start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("out/*.tokens.new")):  # the worker has opened its part
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    assert len(processes_of(command.pid)) >= 3  # the command, the server that forks, a worker
    os.killpg(command.pid, number) if number == signal.SIGINT else command.send_signal(number)
    status = command.wait(20)
    assert not any(tmp_path.glob("out/*.new"))
    assert status == (130 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 10
    while processes_of(command.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_full_disk_is_a_line(tmp_path, corpus, one_process, capsys):
    """A file of a part and set.json are each written through a link to /dev/full."""
    folder, source = tmp_path / "set", corpus / "0.txt"
    command = ["prepare", str(source), str(folder), "--tokenizer", "bytes"]
    expected = prepare(source, folder, "bytes")
    part = expected["parts"][0]["name"]
    for name in (f"{part}.json", "set.json"):
        for file in (folder / name, folder / "set.json"):
            file.unlink(missing_ok=True)
        new = folder / f"{name}.new"
        new.symlink_to("/dev/full")
        assert main(command) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(
            f"error: cannot write {folder / name}: No space left on device; mend that"
        )
        assert not (folder / name).exists()
        new.unlink()
        new.write_bytes(b"half")
        assert (
            main(command) == 0 and prepare(source, folder, "bytes") == expected and not new.exists()
        )


def test_nothing_is_written_through_a_link_or_waits_for_a_pipe(tmp_path, corpus, one_process):
    """At each name that a file has before it is whole."""
    source, folder, other = corpus / "0.txt", tmp_path / "set", tmp_path / "other"
    expected = prepare(source, folder, "bytes")
    part = expected["parts"][0]["name"]
    names = [f"{part}.tokens", f"{part}.documents", f"{part}.json", "set.json"]
    for make in (
        lambda new: new.symlink_to(other),
        lambda new: new.symlink_to(tmp_path / "none"),
        os.mkfifo,
    ):
        other.write_text("precious")
        for name in names:
            (folder / name).unlink()
            make(folder / f"{name}.new")
        assert prepare(source, folder, "bytes") == expected
        assert {file.name for file in folder.iterdir()} == {*names, ".lock"}
        assert other.read_text() == "precious" and not (tmp_path / "none").exists()
        assert not any(file.is_symlink() for file in folder.iterdir())


def test_workers_make_the_same_set(tmp_path, corpus, one_process, monkeypatch, capfd):
    """Two processes work. A worker's error is a line, and the parts made before it are kept."""
    expected = prepare(corpus, tmp_path / "one", "bytes")
    monkeypatch.undo()
    monkeypatch.setattr(preparing, "PART_BYTES", 60)
    (corpus / "zz.jsonl").write_text('{"text": 3}')
    assert (
        main(
            [
                "prepare",
                str(corpus),
                str(tmp_path / "two"),
                "--tokenizer",
                "bytes",
                "--workers",
                "2",
            ]
        )
        == 1
    )
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .startswith(f'error: {corpus}/zz.jsonl:1: needs a string "text"')
    )
    (corpus / "zz.jsonl").unlink()
    monkeypatch.setattr(preparing, "ProcessPoolExecutor", None)  # every part exists
    assert prepare(corpus, tmp_path / "two", "bytes") == expected


def test_an_open_set_takes_16_bytes_per_document(tmp_path, one_process, monkeypatch):
    monkeypatch.setattr(preparing, "PART_BYTES", 30_000)
    count = 60_000
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * count)
    assert len(prepare(tmp_path / "a.jsonl", tmp_path / "set", "bytes")["parts"]) > 20
    tokenizer = load_tokenizer("bytes")
    store, bytes_ = with_peak(lambda: PreparedStore(tmp_path / "set", tokenizer, 256))
    assert len(store.lengths) == count and bytes_ < 19 * count


def change_index(folder, change, keep_hash=False):
    index = json.loads((folder / "set.json").read_text())
    change(index)
    if not keep_hash:
        index["sha256"] = hash_of_index(index)
    (folder / "set.json").write_text(json.dumps(index))


def test_bad_sets(tmp_path, corpus, one_process):
    """Each kind of damage has its own message, also if somebody has made the hash of the index
    anew."""
    good, folder, bytes_ = tmp_path / "good", tmp_path / "bad", load_tokenizer("bytes")
    prepare(corpus, good, "bytes")
    part = json.loads((good / "set.json").read_text())["parts"][1]["name"]

    def refusal(tokenizer=bytes_, vocab_size=256):
        with pytest.raises(ValueError) as error:
            store = PreparedStore(folder, tokenizer, vocab_size)
            [store.read(i, 0, int(n)) for i, n in enumerate(store.lengths)]
        assert "\n" not in str(error.value) and len(str(error.value)) < 600
        return str(error.value)

    def edit(name, value, where=lambda index: index):
        def change():
            change_index(folder, lambda index: where(index).update({name: value}))

        return change

    def one(index):
        return index["parts"][1]

    def write(suffix, content):
        return lambda: (folder / (part + suffix)).write_bytes(content)

    size = (good / f"{part}.documents").stat().st_size
    tokens = (good / f"{part}.tokens").stat().st_size
    beyond = np.array([[2**40, 0, 0]] * (size // 24)).astype("<i8").tobytes()
    cases = [
        (edit("name", "../good/" + part, one), "which is no part of its folder"),
        (edit("name", "/etc/passwd", one), "names the part {'name': '/etc/passwd', "),
        (edit("name", None, one), "names the part {'name': None, "),
        (edit("tokens", 10**30, one), "set.json says 4,000,000,000,000,000,000,000,000,000,000"),
        (edit("documents", 10**12, one), f"is {size:,} bytes, set.json says 24,000,000,000,000"),
        (edit("documents", True, one), "which is no part of its folder"),
        (edit("documents", 0, one), f"is {size:,} bytes, set.json says 0"),
        (edit("tokens", -1, one), f"is {tokens:,} bytes, set.json says -4"),
        (edit("sha256", [], one), "which is no part of its folder"),
        (edit("parts", []), "has no parts"),
        (edit("parts", {}), "has no parts, or values of wrong types"),
        (edit("format", "other"), 'not of format "fathom tokens 1"'),
        (
            lambda: change_index(folder, lambda i: one(i).update(tokens=3), keep_hash=True),
            "damaged or was edited",
        ),
        (
            lambda: (folder / "set.json").write_text("[" * 200_000),
            "set.json is missing or damaged: maximum",
        ),
        (
            lambda: (folder / "set.json").write_bytes(b"\0" * (2**26 + 1)),
            "67,108,865 bytes, more than",
        ),
        (
            write(".tokens", b"\0" * (tokens - 4)),
            f"tokens is {tokens - 4:,} bytes, set.json says {tokens:,}",
        ),
        (lambda: (folder / f"{part}.tokens").unlink(), "is missing, set.json says"),
        (write(".documents", beyond), "does not end behind its start and within the"),
        (write(".documents", b"\0" * size), "document 0 does not end behind its start"),
        (
            write(".tokens", np.full(tokens // 4, 256, "<u4").tobytes()),
            "2.txt has token id 256, not below the model's",
        ),
    ]
    for damage, message in cases:
        shutil.copytree(good, folder)
        damage()
        assert message in refusal(), message
        shutil.rmtree(folder)
    shutil.copytree(good, folder)
    index = json.loads((good / "set.json").read_text())
    [part_0, *others] = index["parts"]
    damaged = [
        *mutations(index),
        *({**index, "parts": [each, *others]} for each in mutations(part_0)),
    ]
    for content in damaged:  # each is refused, or its value is not needed to open and read
        with contextlib.suppress(UserError):
            content["sha256"] = hash_of_index(content)
            (folder / "set.json").write_text(json.dumps(content))
            store = PreparedStore(folder, bytes_, 256)
            assert store.lengths.sum() <= index["tokens"] and [
                store.source(i) for i in range(len(store.lengths))
            ]
    shutil.copy(good / "set.json", folder)
    foreign = load_tokenizer(str(tmp_path / "tokenizer"))
    assert f"was prepared with tokenizer bytes (bytes), this run has {foreign.name}" in refusal(
        foreign
    )
    assert "is not below the model's vocab_size 100; tokenizer bytes needs" in refusal(
        vocab_size=100
    )
    content = bytearray((folder / f"{part}.tokens").read_bytes())
    content[0] ^= 1
    write(".tokens", content)()
    assert main(["verify", str(folder)]) == 1 and main(["verify", str(good)]) == 0


def test_histogram():
    assert histogram(np.array([3, 4, 7, 100])).splitlines() == [
        "4 documents, 114 tokens: median 5, 95% below 86, longest 100",
        "     tokens in a document    documents  of all tokens",
        "                   2 to 3            1           2.6% #",
        "                   4 to 7            2           9.6% #####",
        "                  8 to 15            0           0.0%",
        "                 16 to 31            0           0.0%",
        "                 32 to 63            0           0.0%",
        "                64 to 127            1          87.7% "
        "############################################",
    ]


def test_rows_that_cannot_be_read(tmp_path, corpus, one_process, caplog):
    bad = '{"q": "x"}'
    (corpus / "bad.jsonl").write_text(
        "\n".join([f'{{"q": {i}, "a": "answer {i}"}}' for i in range(40)] + [bad] * 4)
    )
    reading = Reading(columns="text=a,prompt=b")
    (corpus / "bad.jsonl").write_text(
        (corpus / "bad.jsonl").read_text() + '\n{"b": "c", "completion": "d"}'
    )
    places = ", ".join(f"{corpus}/bad.jsonl:{line}" for line in (41, 42, 43))
    for _ in range(2):  # the second time the parts are there
        with pytest.raises(
            UserError, match=rf"bad\.jsonl:41: .*; mend the 4 rows that cannot be read, at {places}"
        ):
            prepare(corpus, tmp_path / "set", "bytes", reading=reading)
    assert not (tmp_path / "set" / "set.json").exists()
    made = len([*(tmp_path / "set").glob("*.tokens")])
    caplog.clear()
    prepare(corpus, tmp_path / "set", "bytes", reading=reading._replace(bad_rows="drop"))
    assert len([*(tmp_path / "set").glob("*.tokens")]) == made
    assert (
        f"data: left out rows that cannot be read: 4, the first {places} (has the fields"
        in caplog.text
    )
    with pytest.raises(
        UserError, match="mend the 4 rows that cannot be read"
    ):  # the set leaves them out
        prepare(corpus, tmp_path / "set", "bytes", reading=reading)
    [direct] = open_stores(
        [str(corpus)], load_tokenizer("bytes"), 256, reading._replace(bad_rows="drop")
    )
    [prepared] = open_stores([str(tmp_path / "set")], load_tokenizer("bytes"), 256)
    assert contents(prepared) == contents(direct)
    with pytest.raises(UserError, match="columns has no effect on prepared sets"):
        open_stores([str(tmp_path / "set")], load_tokenizer("bytes"), 256, reading)
    with pytest.raises(UserError, match="columns names 'none', which no row has"):
        prepare(
            corpus,
            tmp_path / "other",
            "bytes",
            reading=Reading(None, None, "text=a,prompt=none", "drop"),
        )
    with pytest.raises(UserError, match="chat_reasoning has no effect without chats; drop it"):
        prepare(
            corpus,
            tmp_path / "third",
            "bytes",
            reading=reading._replace(bad_rows="drop", needs_chats=True),
        )


def test_no_part_is_begun_after_one_with_rows_that_cannot_be_read(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.jsonl").write_text('{"text": "a"}' if i else '{"txt": "a"}')
    with pytest.raises(UserError, match=r"00\.jsonl:1: has the fields"):
        prepare(folder, tmp_path / "set", "bytes", workers=1)
    assert (
        main(
            [
                "prepare",
                str(folder),
                str(tmp_path / "set"),
                "--tokenizer",
                "bytes",
                "--bad_rows",
                "drop",
            ]
        )
        == 0
    )
    [store] = open_stores([str(tmp_path / "set")], load_tokenizer("bytes"), 256)
    assert len(store.lengths) == 29


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.ENOSYS, errno.EMFILE])
def test_workers_that_cannot_be_started_are_one_line(tmp_path, monkeypatch, capsys, code):
    """Queues between processes are made in /dev/shm, which may be read-only or full."""

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refuse)
    (tmp_path / "a.txt").write_text("text")
    assert (
        main(["prepare", str(tmp_path / "a.txt"), str(tmp_path / "set"), "--tokenizer", "bytes"])
        == 1
    )
    error = capsys.readouterr().err
    assert (
        f"error: cannot start worker processes: [Errno {code}] {os.strerror(code)}; make /dev/shm "
        "writable" in error
    )
    assert "Traceback" not in error
