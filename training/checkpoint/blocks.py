"""Tensors in safetensors files that several ranks write and read, each rank its own part, in place.

A file holds whole tensors, however they are sharded. What some ranks wrote, any other number of ranks reads, sharded in
any other way. Nothing is gathered, and nothing here is larger than BLOCK_BYTES.
"""

import itertools
import json
import math
import operator
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.host.direct import BUFFER_BYTES, DirectFile
from training.host.errors import UserError
from training.host.torch_internals import compute_local_shape_and_global_offset
from training.run.settings import IO_THREADS

BLOCK_BYTES = 2**25  # 32 MiB: a thread copies, adds up and writes that much at a time
# Host memory that saving takes: in each thread a pinned buffer for what comes from a GPU, that part in bf16, and the
# buffer through which the file is written.
SAVING_BYTES = IO_THREADS * (BLOCK_BYTES + BLOCK_BYTES // 2 + BUFFER_BYTES)
LONGEST_HEADER = 10**8  # bytes; safetensors' own limit
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A whole tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file


@dataclass(frozen=True)
class Block:
    """A box of a whole tensor."""

    name: str
    offset: tuple[int, ...]  # of its first element
    shape: tuple[int, ...]

    def runs(self, entry: Entry) -> Iterator[tuple[int, int]]:
        """(first byte of the file, bytes) of each contiguous run, in the order of the block's elements.

        Rows 2 and 3, columns 4 to 7 of a tensor [8, 10] of 2-byte elements at byte 100: (148, 8), (168, 8).
        """
        whole, size = entry.shape, entry.dtype.itemsize
        strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
        # Behind the last dimension of which the block has only a part, its elements follow one another.
        cut = max((dim for dim, n in enumerate(self.shape) if n != whole[dim]), default=0)
        length = math.prod(self.shape[cut:])
        ranges = (range(first, first + n) for first, n in zip(self.offset[:cut], self.shape))
        for index in itertools.product(*ranges):
            element = sum(i * stride for i, stride in zip((*index, *self.offset[cut : cut + 1]), strides))
            yield entry.start + element * size, length * size

    def write(self, file: DirectFile, entry: Entry, content: memoryview) -> None:
        """Put the block's elements, contiguous in `content`, into the file."""
        for start, length in self.runs(entry):
            file.write(content[:length], start)
            content = content[length:]

    def crc32(self, file: DirectFile, entry: Entry) -> int:
        """The checksum of the block's elements in the file; another one where the file ends before them."""
        crc = 0
        for run in self.runs(entry):
            for piece in file.read(*run):
                crc = zlib.crc32(piece, crc)
        return crc

    def read(self, descriptor: int, entry: Entry, content: memoryview) -> None:
        """Fill `content` with the block's elements. Raises UserError where the file ends before them."""
        for start, length in self.runs(entry):
            run, content = content[:length], content[length:]
            while run:
                count = os.preadv(descriptor, [run], start)
                if not count:
                    raise UserError(f"{self.name} reaches past the end of its file")
                start, run = start + count, run[count:]


def header_of(tensors: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> bytes:
    """A safetensors file up to its data: the header's length in 8 little-endian bytes, then the header in JSON.

    Each tensor's data_offsets count from the end of the header, which is padded with spaces to a multiple of 8 bytes:
    two tensors of 24 and 66 bytes have [0, 24] and [24, 90].
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * dtypes[name].itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtypes[name]], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_entries(header: bytes, file: Path) -> dict[str, Entry]:
    """What `header_of` wrote into the file. Raises UserError where it is something else, as quantized."""
    entries = {}
    try:
        for name, value in json.loads(header[8:]).items():
            if name != "__metadata__":
                if value["dtype"] not in DTYPES:
                    raise UserError(
                        f"{file}: {name} is of dtype {str(value['dtype'])[:20]}, weights must be of {', '.join(DTYPES)}"
                    )
                shape, (start, end) = tuple(map(operator.index, value["shape"])), value["data_offsets"]
                entries[name] = entry = Entry(DTYPES[value["dtype"]], shape, len(header) + operator.index(start))
                if min(start, *shape, 0) < 0 or end - start != math.prod(shape) * entry.dtype.itemsize:
                    raise ValueError(name)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{file} is damaged: its header describes no tensors; use another checkpoint") from None
    return entries


def read_header(file: Path) -> bytes:
    """A safetensors file up to its data. Raises UserError where the file is no such file."""
    try:
        with file.open("rb") as opened:
            length = opened.read(8)
            size = int.from_bytes(length, "little")
            if len(length) == 8 and 8 + size <= file.stat().st_size and size <= LONGEST_HEADER:
                return length + opened.read(size)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    raise UserError(f"{file} is truncated or no safetensors file")


def local_blocks(tensors: dict[str, Tensor]) -> Iterator[tuple[Block, Tensor]]:
    """This rank's parts, in blocks of at most BLOCK_BYTES or one row: (where it belongs, a view of its elements)."""
    for name, tensor in tensors.items():
        local, offset = _local_part(tensor)
        if local.ndim == 0:
            yield Block(name, (), ()), local
            continue
        if not local.numel():
            continue
        rows = max(1, BLOCK_BYTES // (local[0].numel() * local.element_size()))
        for start in range(0, len(local), rows):
            part = local[start : start + rows]
            yield Block(name, (offset[0] + start, *offset[1:]), tuple(part.shape)), part


def is_written_here(tensor: Tensor, rank: int) -> bool:
    """Whether this rank writes its part: of the ranks that have the same part, the first one does.

    A tensor on a mesh of some of the ranks is the same on the meshes of the others: the one with rank 0 writes it.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the tensor's mesh"
    if not (tensor.device_mesh.mesh == 0).any():
        return False
    return not any(at for at, placement in zip(coordinate, tensor.placements) if placement.is_replicate())


def _local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(this rank's part, the offset of its first element in the whole tensor)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    local = tensor.detach().to_local()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(local.shape) == tuple(shape), f"a part of {tuple(local.shape)} where PyTorch expects {shape}"
    return local, tuple(offset)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
