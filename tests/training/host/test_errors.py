"""Memory that runs out and files that cannot be written are shown in one line."""

import io
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from training.host.errors import UserError
from training.host.files import check_can_write
from training.host.memory import PinnedArena
from training.host.processes import command, line_of


@pytest.mark.parametrize("make", [torch.empty, np.empty, lambda size: bytearray(size * 2**6)])
def test_host_memory_that_runs_out_is_a_line(make):
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        make(2**55)
    pattern = r"error: out of host memory, of which \d+\.\d GB are left to this process \(.+\); lower --host_budget .+"
    assert re.fullmatch(pattern, line_of(raised.value))
    assert line_of(RuntimeError("out of luck")) is None


def test_pages_that_cannot_be_had_are_told_with_what_there_is():
    pattern = r"cannot pin 1073741824\.0 GB of host memory \(.+\): \d+\.\d GB are left .*, and ulimit -l .+; lower"
    for device in ("cpu", "cuda"):  # the pages are asked for before the GPU
        with pytest.raises(UserError, match=pattern):
            PinnedArena(2**60, torch.device(device))


def test_files_that_cannot_be_written_are_refused_and_others_left_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path, tmp_path / "pipe", tmp_path / "a" / "b", tmp_path / ("a" * 5000), "a\0b"):
        with pytest.raises(UserError, match=r"^--json .+ cannot be written to: .+; give another file$"):
            check_can_write(type(tmp_path)(file), "--json")
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        check_can_write(tmp_path / name, "--json")
    assert (tmp_path / "old").read_text() == "old" and not (tmp_path / "new").exists()


def test_a_disk_that_is_full_at_the_end_is_one_line(capsys):
    """As --json /dev/full: the file can be opened, and what is written later has no place."""

    @command
    def write(argv):
        check_can_write(Path(argv[0]), "--json")
        Path(argv[0]).write_text("x")

    assert write(["/dev/full"]) == 1
    assert capsys.readouterr().err == (
        "error: No space left on device: a file is cut short; free some space on the disk, or use another\n"
    )


@pytest.mark.parametrize("name", ["run\udcff", "é→"])
def test_names_that_the_terminal_cannot_show_are_escaped(name, monkeypatch):
    """A name of a file need not be UTF-8, and a terminal need not be."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert command(lambda argv: print(argv[0], flush=True))([name]) == 0
    assert shown.getvalue() == name.encode("ascii", "backslashreplace") + b"\n"
