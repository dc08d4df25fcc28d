"""Folders that one run has, and small files that are replaced as a whole."""

import contextlib
import errno
import io
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from training.checkpoint.weights import shape_of_weights
from training.data.sources import find_files
from training.data.tokenizer import load_tokenizer
from training.host.direct import DirectFile
from training.host.errors import UserError
from training.host.files import (
    DEEPEST,
    LOCK,
    inside,
    making,
    naming,
    only_run_in,
    read_json,
    replace_file,
    replacing,
    write_file,
)
from training.host.processes import command
from training.host.signals import ENDING_SIGNALS, Signalled


def test_a_kill_while_a_file_is_replaced_leaves_the_earlier_one(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    replace_file(file, "first")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", die)
        replace_file(file, "second")
    assert file.read_text() == "first"
    replace_file(file, "third")
    assert file.read_text() == "third" and [*tmp_path.iterdir()] == [file]


def test_two_writers_of_a_file_have_a_path_each(tmp_path):
    file = tmp_path / "evaluation.json"
    with replacing(file) as one, replacing(file) as other:
        assert one != other and not file.exists()
        one.write_text("one")
        other.write_text("other")
    assert file.read_text() == "one" and [*tmp_path.iterdir()] == [file]


def test_what_is_no_plain_file_is_written_in_place(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    replace_file(link, "after")
    replace_file(Path("/dev/null"), "dropped")
    assert (
        link.is_symlink() and target.read_text() == "after" and Path("/dev/null").is_char_device()
    )


def test_a_folder_is_made_once_and_whole(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), making(folder) as temporary:
        (temporary / "half").write_text("half")
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]
    folder.mkdir()
    with making(folder) as temporary:
        refusal = rf"another run, process {os.getpid()}, writes into {folder}: wait"
        with pytest.raises(UserError, match=refusal), making(folder):
            pass
        (temporary / "whole").write_text("whole")
    assert [*tmp_path.iterdir()] == [folder] and [path.name for path in folder.iterdir()] == [
        "whole"
    ]
    with pytest.raises(UserError, match="is already there"), making(folder):
        pass
    with (
        pytest.raises(UserError, match="cannot be made: Directory not empty"),
        making(tmp_path / "late") as temporary,
    ):
        (tmp_path / "late").mkdir()
        (tmp_path / "late/other").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "late"}


def test_what_a_killed_process_left_is_deleted_and_what_a_link_in_it_leads_to_stays(tmp_path):
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    child = os.fork()
    if not child:
        with making(folder) as temporary:
            (temporary / "part").mkdir()
            (temporary / "part/model").write_text("half")
            (temporary / "link").symlink_to(elsewhere)
            os._exit(0)  # as SIGKILL does, it cleans nothing up
    os.waitpid(child, 0)
    assert len([*tmp_path.iterdir()]) == 2 and not folder.exists()
    with making(folder) as temporary:
        assert os.listdir(temporary) == [LOCK]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "elsewhere"}
    assert not [*folder.iterdir()] and (elsewhere / "mine").read_text() == "mine"


def occupy(path: Path, how: str, elsewhere: Path) -> None:
    """Put something of a user's in the place of a folder or of its lock."""
    if how == "link":
        path.symlink_to(elsewhere)
    elif how == "file":
        path.write_text("mine")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))
    elif how == "dangling link":
        path.symlink_to(elsewhere / "nothing")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
        (path / LOCK).write_text(
            {"folder of a run": "123\n", "folder with a lock": "\xff\n"}.get(how, "")
        )


def snapshot(folder: Path) -> dict[str, object]:
    return {
        str(path): (
            path.lstat().st_mode,
            path.lstat().st_ino,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


OCCUPANTS = (
    "link",
    "dangling link",
    "file",
    "pipe",
    "socket",
    "folder",
    "folder of a run",
    "folder with a lock",
)


def test_a_link_that_leads_to_itself_is_no_folder_to_make(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for folder in (tmp_path / "loop", tmp_path / "loop/below"):
        with pytest.raises(UserError, match="cannot be made"), making(folder):
            raise AssertionError


@pytest.mark.parametrize("how", OCCUPANTS)
def test_a_folder_is_made_beside_what_others_have_under_its_temporary_names(
    tmp_path, monkeypatch, how
):
    monkeypatch.chdir(tmp_path)  # the paths of sockets are short
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    with making(tmp_path / "out") as temporary:
        first = Path(temporary.name)
    (tmp_path / "out").rmdir()
    second = Path(first.name.replace(".0.tmp", ".1.tmp"))
    for path in (Path(".out.tmp"), first, second):
        occupy(path, how, elsewhere)
    before = snapshot(tmp_path)
    with making(tmp_path / "out") as temporary:
        (temporary / "model").write_text("whole")
    assert snapshot(tmp_path / "out").keys() == {f"{tmp_path}/out/model"}
    (tmp_path / "out/model").unlink()
    (tmp_path / "out").rmdir()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_signals_clean_up_as_an_interrupt_does(tmp_path, number):
    """A second signal, while the folder is deleted, is ignored; afterwards signals do what they did
    before."""
    for start in (making, replacing):
        with pytest.raises(Signalled) as raised, start(tmp_path / "out") as temporary:
            if start is making:
                (temporary / "model").write_text("half")
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)
        assert raised.value.number == number and not [*tmp_path.iterdir()]
        assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("how", ["link", "dangling link", "pipe", "socket", "folder"])
def test_a_lock_that_is_no_file_is_refused_and_never_followed(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    occupy(Path(LOCK), how, elsewhere / "mine")
    before = snapshot(tmp_path)
    with (
        pytest.raises(UserError, match=r"cannot be written to: its \.lock is a link or"),
        only_run_in(tmp_path),
    ):
        raise AssertionError
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0\0", b"12\n", b"\xff\xfe\n", b"12 a diary\n", b"9" * 400]
)
def test_a_lock_holds_whatever_is_in_it_and_keeps_what_is_not_its_own(tmp_path, content):
    lock = tmp_path / LOCK
    lock.write_bytes(content)
    is_own = not content.strip(b"\0") or content == b"12\n"
    with only_run_in(tmp_path):
        assert lock.read_bytes() == (f"{os.getpid()}\n".encode() if is_own else content)
        lock.write_bytes(content)
        with pytest.raises(UserError, match=r"another run.* writes into"), only_run_in(tmp_path):
            raise AssertionError
    with only_run_in(tmp_path):
        pass


@pytest.mark.parametrize("folder", ["/", "/proc", "."])
def test_a_folder_that_cannot_be_replaced_is_refused_before_it_is_made(
    tmp_path, monkeypatch, folder
):
    """/proc stands for a container's volume."""
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(
            UserError, match="is a mount point or the working directory; give a new folder"
        ),
        making(Path(folder)),
    ):
        raise AssertionError
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "../private",
        "/etc/passwd",
        "a/b",
        "a/",
        "a\0b",
        "\ud800",
        "a" * 256,
        None,
        3,
        ["a"],
    ],
)
def test_a_file_names_only_files_of_its_folder(tmp_path, name):
    with pytest.raises(
        UserError, match=r"index.json names .*, which is no file of its folder"
    ) as error:
        inside(tmp_path, name, tmp_path / "index.json")
    assert len(str(error.value)) < 300
    assert inside(tmp_path, "a b.arrow", tmp_path / "index.json") == tmp_path / "a b.arrow"


def test_a_missing_path_that_differs_by_case_from_another_is_answered_with_that(
    tmp_path, monkeypatch
):
    (tmp_path / "SmolLM2-135M").mkdir()
    (tmp_path / "SmolLM2-360M").touch()
    monkeypatch.chdir(tmp_path)
    meant = "; did you mean SmolLM2-135M?"
    for find, path, hint in (
        (shape_of_weights, "smollm2-135m", meant), (shape_of_weights, "smollm2-135", None),
        (find_files, Path("smollm2-135M"), meant), (find_files, Path("SmolLM3"), None),
        (load_tokenizer, "smollm2-135m", meant), (load_tokenizer, "smollm2", None),
        (load_tokenizer, f"{tmp_path}/smollm2-135m", f"; did you mean {tmp_path}/SmolLM2-135M?"),
    ):  # fmt: skip
        with pytest.raises(UserError) as error:
            find(path)
        assert str(error.value).endswith(hint) if hint else "did you mean" not in str(error.value)


def test_two_runs_in_one_folder_refuse_each_other(tmp_path):
    with only_run_in(tmp_path / "run"):
        refused = pytest.raises(
            UserError, match=rf"another run, process {os.getpid()}, writes into"
        )
        with refused, only_run_in(tmp_path / "run"):
            pass
        with only_run_in(tmp_path / "other"):
            pass
    with only_run_in(tmp_path / "run"):
        pass


def test_a_run_has_its_lock_on_a_full_disk(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", write)
    refused = pytest.raises(UserError, match="another run writes into")
    with only_run_in(tmp_path), refused, only_run_in(tmp_path):
        pass


def test_a_full_disk_is_named_with_the_file_that_was_written(tmp_path, capsys, monkeypatch):
    """A write to /dev/full fails as on a full disk, and the error names no file."""
    ways = {
        "out/model": lambda: fill(making(tmp_path / "out"), "model"),
        "small": lambda: replace_file(tmp_path / "small", "a" * 9000),
        "new": lambda: write_file(tmp_path / "new", b"a"),
        "pieces": lambda: DirectFile(tmp_path / "pieces").write(memoryview(b"a"), 0),
    }
    (tmp_path / "pieces").touch()
    open_file, open_descriptor = io.open, os.open

    def opened(path, mode="r", *args, **kwargs):
        return open_file("/dev/full" if "w" in mode else path, mode, *args, **kwargs)

    def opened_descriptor(path, flags, *args, **kwargs):
        return open_descriptor("/dev/full" if flags & os.O_WRONLY else path, flags, *args, **kwargs)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(os, "open", opened_descriptor)
    for name, write in ways.items():
        assert command(lambda _, write=write: write())([]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: No space left on device: {tmp_path / name}; the disk at /")
        assert re.search(
            r" has [\d.]+ of [\d.]+ GB free; free some there, or write to another\n$", error
        )
    assert not (tmp_path / "out").exists()


def fill(context, name: str) -> None:
    with context as folder, naming(folder / name):
        (folder / name).write_bytes(b"a")


def test_values_that_are_nested_too_deeply_are_refused(tmp_path):
    for depth, refused in ((DEEPEST - 1, False), (DEEPEST, True), (900, True), (100_000, True)):
        (tmp_path / "config.json").write_text('{"a":' + "[" * depth + "]" * depth + "}")
        with (
            pytest.raises(UserError, match=r"is missing or damaged|nested")
            if refused
            else contextlib.nullcontext()
        ):
            read_json(tmp_path / "config.json")
