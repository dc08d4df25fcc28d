"""Folders that one run has, and small files that are replaced as a whole."""

import os
from pathlib import Path

import pytest

from training.checkpoint.weights import shape_of_weights
from training.data.sources import find_files
from training.data.tokenizer import load_tokenizer
from training.host.errors import UserError
from training.host.files import inside, making, only_run_in, replace_file, replacing


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
    assert link.is_symlink() and target.read_text() == "after" and Path("/dev/null").is_char_device()


def test_a_folder_is_made_once_and_whole(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), making(folder) as temporary:
        (temporary / "half").write_text("half")
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]
    leftover = tmp_path / ".out.tmp"  # of a process that got SIGKILL
    (leftover / "part").mkdir(parents=True)
    (leftover / "model").write_text("half")
    folder.mkdir()
    with making(folder) as temporary:
        with pytest.raises(UserError, match=rf"another run, process {os.getpid()}, writes into"), making(folder):
            pass
        (temporary / "whole").write_text("whole")
    assert [*tmp_path.iterdir()] == [folder] and [path.name for path in folder.iterdir()] == ["whole"]
    with pytest.raises(UserError, match="is already there"), making(folder):
        pass
    with pytest.raises(UserError, match="cannot be made: Directory not empty"), making(tmp_path / "late") as temporary:
        (tmp_path / "late").mkdir()
        (tmp_path / "late/other").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "late"}


@pytest.mark.parametrize("folder", ["/", "/proc", "."])
def test_a_folder_that_cannot_be_replaced_is_refused_before_it_is_made(tmp_path, monkeypatch, folder):
    """/proc stands for a container's volume."""
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(UserError, match="is a mount point or the working directory; give a new folder"),
        making(Path(folder)),
    ):
        raise AssertionError
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "../private", "/etc/passwd", "a/b", "a/", "a\0b", "\ud800", "a" * 256, None, 3, ["a"]]
)
def test_a_file_names_only_files_of_its_folder(tmp_path, name):
    with pytest.raises(UserError, match=r"index.json names .*, which is no file of its folder") as error:
        inside(tmp_path, name, tmp_path / "index.json")
    assert len(str(error.value)) < 300
    assert inside(tmp_path, "a b.arrow", tmp_path / "index.json") == tmp_path / "a b.arrow"


def test_a_missing_path_that_differs_by_case_from_another_is_answered_with_that(tmp_path, monkeypatch):
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
        refused = pytest.raises(UserError, match=rf"another run, process {os.getpid()}, writes into")
        with refused, only_run_in(tmp_path / "run"):
            pass
        with only_run_in(tmp_path / "other"):
            pass
    with only_run_in(tmp_path / "run"):
        pass


def test_a_run_has_its_lock_on_a_full_disk(tmp_path):
    (tmp_path / ".lock").symlink_to("/dev/full")
    with only_run_in(tmp_path):
        pass
