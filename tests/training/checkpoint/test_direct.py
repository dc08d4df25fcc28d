"""Bytes written and read past the page cache are those of a plain file, wherever they lie."""

import errno
import os
import random

import pytest

from training.checkpoint import direct
from training.checkpoint.direct import ALIGNMENT, DirectFile

SIZE = 3 * 2**20 + 77


@pytest.mark.parametrize("kind", ["as the file system can", "without O_DIRECT", "refused when used"])
def test_any_place_and_length(kind, tmp_path, monkeypatch):
    """Ranges on, before and behind multiples of ALIGNMENT, longer and shorter than the buffer, up to the file's end."""
    monkeypatch.setattr(direct, "BUFFER_BYTES", 2**19)
    path, draws = tmp_path / "file", random.Random(0)
    expected = bytearray(draws.randbytes(SIZE))
    path.write_bytes(expected)
    file = DirectFile(path, direct=kind != "without O_DIRECT", writes=True)
    if kind == "refused when used":

        def refused(name):
            call = getattr(os, name)

            def refuse(descriptor, content, start):
                if descriptor == file._direct:
                    raise OSError(errno.EINVAL, "Invalid argument")
                return call(descriptor, content, start)

            return refuse

        file._direct = os.open(path, os.O_RDWR)
        for name in ("pwrite", "preadv"):
            monkeypatch.setattr(direct.os, name, refused(name))
    edges = [0, 1, ALIGNMENT - 1, ALIGNMENT, 2**19, 2**19 + 5, 2**20, SIZE - ALIGNMENT, SIZE - 1, SIZE]
    ranges = [(start, stop) for start in edges for stop in edges if start <= stop]
    ranges += [sorted(draws.choices(range(SIZE + 1), k=2)) for _ in range(20)]
    for start, stop in ranges:
        content = draws.randbytes(stop - start)
        expected[start:stop] = content
        file.write(memoryview(content), start)
        assert b"".join(map(bytes, file.read(start, stop - start))) == content
    assert path.read_bytes() == expected
    assert b"".join(map(bytes, file.read(SIZE - 10, 2**21))) == expected[-10:]
    file.close()
