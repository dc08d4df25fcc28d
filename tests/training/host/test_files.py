"""Folders that one run has, and small files that are replaced as a whole."""

import os

import pytest

from training.host.errors import UserError
from training.host.files import only_run_in, replace_file


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
