"""A checkpoint saved and waited for, and files that the disk cannot read."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernels.parts import Parameter
from training.checkpoint.saver import Saver


def save_checkpoint(output_dir, step: int, keep: int = 2, **state) -> Path:
    """Save what `Saver.begin` takes; returns the checkpoint's folder."""
    saver = Saver(output_dir, keep)
    saver.begin(step, **state)
    saver.finish()
    return saver.last


def parameters_of(shapes) -> dict[str, Parameter]:
    """Returns parameters that have a shape, and nothing else that is known; `shapes` may be
    tensors."""
    return {name: Parameter(tuple(getattr(s, "shape", s))) for name, s in shapes.items()}


def damage(file: Path, place: int = -5) -> None:
    """Flip a bit of a byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


@contextmanager
def unreadable(file: Path, only_tensors: bool = False) -> Iterator[None]:
    """Fail reads of a file as a bad sector does: all of them, or only reads of a tensor."""
    open_file, preadv = io.open, os.preadv

    def opened(path, mode="r", *args, **kwargs):
        if Path(path) == file and mode.startswith("r") and not only_tensors:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_file(path, mode, *args, **kwargs)

    def read(descriptor, *args):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(os, "preadv", read)
        yield
