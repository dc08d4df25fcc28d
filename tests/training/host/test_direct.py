"""Files written past the page cache have the bytes of files written through it, wherever these
lie."""

import contextlib
import errno
import fcntl
import mmap
import os
import random
import threading

import pytest

from training.host import direct
from training.host.direct import ALIGNMENT, DirectFile

SIZE = 3 * 2**20 + 77


@pytest.mark.parametrize(
    "kind", ["as the file system can", "without O_DIRECT", "refused when used"]
)
def test_any_place_and_length(kind, tmp_path, monkeypatch):
    """Ranges on, before and behind multiples of ALIGNMENT, longer and shorter than the buffer, up
    to the file's end."""
    monkeypatch.setattr(direct, "BUFFER_BYTES", 2**19)
    monkeypatch.setattr(direct, "_buffers", threading.local())
    path, draws = tmp_path / "file", random.Random(0)
    expected = bytearray(draws.randbytes(SIZE))
    path.write_bytes(expected)
    file = DirectFile(path)
    if kind == "without O_DIRECT":
        file._direct = None
    if kind == "refused when used":
        file._direct, write = os.open(path, os.O_WRONLY), os.pwrite

        def refuse(descriptor, content, start):
            if descriptor == file._direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return write(descriptor, content, start)

        monkeypatch.setattr(direct.os, "pwrite", refuse)
    edges = [
        0,
        1,
        ALIGNMENT - 1,
        ALIGNMENT,
        2**19,
        2**19 + 5,
        2**20,
        SIZE - ALIGNMENT,
        SIZE - 1,
        SIZE,
    ]
    ranges = [(start, stop) for start in edges for stop in edges if start <= stop]
    ranges += [sorted(draws.choices(range(SIZE + 1), k=2)) for _ in range(20)]
    for start, stop in ranges:
        content = draws.randbytes(stop - start)
        expected[start:stop] = content
        file.write(memoryview(content), start)
        assert path.read_bytes() == expected
    assert fcntl.fcntl(file._cached, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    file.close()


def test_a_thread_has_one_buffer_for_all_files(tmp_path, monkeypatch):
    """SAVING_BYTES counts on that."""
    monkeypatch.setattr(direct, "_buffers", threading.local())
    sizes, new = [], mmap.mmap
    monkeypatch.setattr(
        direct.mmap, "mmap", lambda file, size: sizes.append(size) or new(file, size)
    )
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(2**20))
        with contextlib.closing(DirectFile(tmp_path / name)) as file:
            file.write(memoryview(bytes(2**20)), 0)
    assert sizes in ([], [direct.BUFFER_BYTES])  # none if the file system has no O_DIRECT
