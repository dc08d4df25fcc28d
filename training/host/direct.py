"""Files written past the page cache.

A checkpoint of 56 GB is larger than the page cache that a machine has left beside pinned memory.
Written through the cache, it waits for the kernel to find pages and to write dirty ones back.
O_DIRECT goes past the cache, and needs offsets, lengths and addresses that are multiples of
ALIGNMENT: the bytes are copied through a small aligned buffer. The unaligned bytes at both ends of
a range go through the cache.
"""

import contextlib
import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from training.host.files import naming

ALIGNMENT = 4096
BUFFER_BYTES = 2**23  # 8 MiB for each thread, all of it in flight at a time
LEAST_BYTES = 2**18  # shorter ranges go through the cache, which gathers them
_buffers = threading.local()  # one buffer for each thread, shared by its files


class DirectFile:
    """An existing file into which threads write, each at places of its own.

    Without O_DIRECT, as on some network file systems, all bytes go through the page cache. The file
    is opened for writing only: NFS writes whole pages of a file that can also be read, over what
    another machine writes to them.
    """

    def __init__(self, path: Path):
        self._path = path
        self._cached = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        with contextlib.suppress(OSError):
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)

    def write(self, content: memoryview, start: int) -> None:
        """Puts the bytes at `start`.

        Of 300,000 bytes at 5,000, those from 8,192 to 303,103 go past the cache.
        """
        with naming(self._path):
            self._write_all(content, start)

    def _write_all(self, content: memoryview, start: int) -> None:
        first = -(-start // ALIGNMENT) * ALIGNMENT
        last = (start + len(content)) // ALIGNMENT * ALIGNMENT
        if self._direct is None or len(content) < LEAST_BYTES:
            _write(self._cached, content, start)
            return
        _write(self._cached, content[: first - start], start)
        buffer = _buffer()
        for place in range(first, last, BUFFER_BYTES):
            chunk = content[place - start : min(place + BUFFER_BYTES, last) - start]
            # Without the GIL.
            np.copyto(np.frombuffer(buffer, np.uint8, len(chunk)), np.frombuffer(chunk, np.uint8))
            try:
                _write(self._direct, buffer[: len(chunk)], place)
            except OSError as error:
                # EINVAL: the file system lets a file be opened so, but not written.
                if error.errno != errno.EINVAL:
                    raise
                _write(self._cached, chunk, place)
        _write(self._cached, content[last - start :], last)

    def close(self) -> None:
        """Closes the file. No thread may write to it any more."""
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def _buffer() -> memoryview:
    if not hasattr(_buffers, "of_thread"):
        _buffers.of_thread = memoryview(mmap.mmap(-1, BUFFER_BYTES))
    return _buffers.of_thread


def _write(descriptor: int, content: memoryview, start: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, start)
        start, content = start + written, content[written:]
