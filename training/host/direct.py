"""Files written and read past the page cache.

A checkpoint of 56 GB is larger than the page cache that a machine has left beside pinned memory. Written through the
cache it waits for the kernel to find pages and to write dirty ones back, and what is read back to be verified is the
cache's content, not the disk's. O_DIRECT needs offsets, lengths and addresses that are multiples of ALIGNMENT: whatever
the caller's, the bytes go through a small aligned buffer, and those at the ends of a range through the cache.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ALIGNMENT = 4096
BUFFER_BYTES = 2**23  # 8 MiB for each thread: as much is in flight at a time
LEAST_BYTES = 2**18  # shorter ranges go through the cache, which gathers them
_buffers = threading.local()  # a thread's, for all of its files


class DirectFile:
    """A file that exists, for threads to read at places of their own, or to write.

    Without O_DIRECT, as on some network file systems, all goes through the page cache.

    Args:
        direct: whether to try O_DIRECT.
        writes: whether to write, and not to read. NFS writes whole pages of a file that may be read, too, those with
            bytes that another machine writes; of a file that is only written, it writes these bytes alone.
    """

    def __init__(self, path: Path, *, direct: bool = True, writes: bool = False):
        mode = os.O_WRONLY if writes else os.O_RDONLY
        self._cached = os.open(path, mode)
        self._direct: int | None = None
        with contextlib.suppress(OSError):
            self._direct = os.open(path, mode | os.O_DIRECT) if direct else None

    def write(self, content: memoryview, start: int) -> None:
        """Put the bytes at `start`."""
        first, last = _round_up(start), _round_down(start + len(content))
        if self._direct is None or len(content) < LEAST_BYTES:
            _write(self._cached, content, start)
            return
        _write(self._cached, content[: first - start], start)
        buffer = _buffer()
        for place in range(first, last, BUFFER_BYTES):
            piece = content[place - start : min(place + BUFFER_BYTES, last) - start]
            np.copyto(np.frombuffer(buffer, np.uint8, len(piece)), np.frombuffer(piece, np.uint8))  # without the GIL
            try:
                _write(self._direct, buffer[: len(piece)], place)
            except OSError as error:  # a file system that opens a file so, and does not write it
                if error.errno != errno.EINVAL:
                    raise
                _write(self._cached, piece, place)
        _write(self._cached, content[last - start :], last)

    def read(self, start: int, length: int) -> Iterator[memoryview]:
        """The bytes from `start` on in pieces, each valid until the next; fewer where the file ends."""
        is_direct = self._direct is not None and length >= LEAST_BYTES
        end, buffer = start + length, _buffer()
        place = _round_down(start) if is_direct else start
        while place < end:
            size = min(_round_up(end - place), BUFFER_BYTES)
            descriptor = self._direct if is_direct else self._cached
            assert descriptor is not None
            try:
                count = os.preadv(descriptor, [buffer[:size]], place)
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                is_direct = False
                continue
            if not count:
                return
            yield buffer[max(start - place, 0) : min(count, end - place)]
            place += count  # no multiple of ALIGNMENT where the file ends: the next read goes through the cache

    def close(self) -> None:
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def _buffer() -> memoryview:
    """This thread's, which starts at a page."""
    if not hasattr(_buffers, "of_thread"):
        _buffers.of_thread = memoryview(mmap.mmap(-1, BUFFER_BYTES))
    return _buffers.of_thread


def _round_down(number: int) -> int:
    return number // ALIGNMENT * ALIGNMENT


def _round_up(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


def _write(descriptor: int, content: memoryview, start: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, start)
        start, content = start + written, content[written:]
