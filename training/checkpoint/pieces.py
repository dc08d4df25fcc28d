"""Tensors in safetensors files that several ranks write and read, each rank its own part, in place.

A file holds whole tensors. Any number of ranks reads what any other number wrote, sharded in any
other way, and nothing is gathered. Each rank cuts its part into pieces of at most PIECE_BYTES;
IO_THREADS of them are on their way at a time. Whatever reads raises UserError where a file is
damaged or ends too soon.
"""

import itertools
import json
import math
import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.families.names import Rows
from training.host.direct import BUFFER_BYTES, DirectFile
from training.host.errors import UserError
from training.host.torch_internals import compute_local_shape_and_global_offset

IO_THREADS = 8
PIECE_BYTES = 2**25  # 32 MiB: a thread copies, adds up and writes that much at a time
# Pieces that a thread converts, with several copies of their elements in float32.
CONVERTED_BYTES = 2**21
# Host memory for saving. Each thread has a pinned buffer for a piece from a GPU, the same piece in
# bf16, and the buffer of `DirectFile`.
SAVING_BYTES = IO_THREADS * (PIECE_BYTES + PIECE_BYTES // 2 + BUFFER_BYTES)
LONGEST_HEADER = 10**8  # bytes; safetensors' own limit
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A whole tensor in a file, or in `parts`: tensors of equal size, whose elements follow one
    another, or one larger tensor, whose rows it is from `first_row` on."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # first byte in the file
    name: str = ""  # in the file
    parts: tuple["Entry", ...] = ()
    first_row: int = 0

    @classmethod
    def joined(
        cls,
        name: str,
        shape: tuple[int, ...],
        rows: Sequence[Rows],
        entries: Mapping[str, "Entry"],
    ) -> "Entry":
        """Returns the tensor of this shape whose elements are these rows of `entries`, in order."""
        parts = [entries[part.tensor] for part in rows]
        first = parts[0]
        if len({part.dtype for part in parts}) > 1:
            raise UserError(
                f"{first.file}: {first.name} and {len(parts) - 1} others of {name} are of unlike "
                "dtypes; give one dtype"
            )
        if first.shape == shape:
            return first
        return cls(first.file, first.dtype, shape, first.start, name, tuple(parts), rows[0].first)


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor."""

    name: str
    offset: tuple[int, ...]  # index of the first element
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, entry: Entry) -> "Piece":
        """Returns the piece that is all of a tensor in a file."""
        return cls(entry.name, (0,) * len(entry.shape), entry.shape)

    def in_groups(self, group: int, unit: int) -> "Piece":
        """Returns the box of whole groups of a row around this piece, in a tensor with one number
        for `unit` elements of a row.

        Columns 40 to 69 are in groups of 32 columns 32 to 95, and columns 1 and 2 of a tensor of
        one number for each.
        """
        start = self.offset[-1] // group * group
        stop = -(-(self.offset[-1] + self.shape[-1]) // group) * group
        return Piece(
            self.name,
            (*self.offset[:-1], start // unit),
            (*self.shape[:-1], (stop - start) // unit),
        )

    def in_parts(
        self, entry: Entry, content: memoryview
    ) -> Iterator[tuple[Entry, "Piece", memoryview]]:
        """Yields the tensors in files that this piece consists of, the piece of each, and its bytes
        of `content`.

        A piece of a tensor in several parts holds some of them whole.
        """
        if not entry.parts:
            yield entry, self, content
            return
        # A single expert's matrix has a dimension less: it is all of its entry.
        if len(entry.parts) == 1 and len(entry.parts[0].shape) == len(entry.shape):
            part, (row, *columns) = entry.parts[0], self.offset
            yield part, Piece(part.name, (entry.first_row + row, *columns), self.shape), content
            return
        numel = math.prod(entry.shape) // len(entry.parts)
        first = self.offset[0] * math.prod(entry.shape[1:]) // numel
        size = numel * entry.dtype.itemsize
        assert self.shape[1:] == entry.shape[1:] and len(content) % size == 0, f"{self} cuts parts"
        for i in range(len(content) // size):
            part = entry.parts[first + i]
            yield part, Piece.whole(part), content[i * size : (i + 1) * size]

    def runs(self, entry: Entry) -> Iterator[tuple[int, int]]:
        """Yields (first byte in the file, bytes) of each contiguous run, in the elements' order.

        Rows 2 and 3, columns 4 to 7 of a tensor [8, 10] of 2-byte elements at byte 100: (148, 8),
        (168, 8).
        """
        size = entry.dtype.itemsize
        strides = [math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
        # Elements follow one another behind the last dimension that the piece does not have in
        # full.
        cut = max((dim for dim, n in enumerate(self.shape) if n != entry.shape[dim]), default=0)
        length = math.prod(self.shape[cut:])
        ranges = (range(first, first + n) for first, n in zip(self.offset[:cut], self.shape))
        for index in itertools.product(*ranges):
            element = sum(
                i * stride for i, stride in zip((*index, *self.offset[cut : cut + 1]), strides)
            )
            yield entry.start + element * size, length * size

    def write(self, file: DirectFile, entry: Entry, content: memoryview) -> None:
        """Puts the piece's elements, contiguous in `content`, into the file."""
        for start, length in self.runs(entry):
            file.write(content[:length], start)
            content = content[length:]

    def read(self, entry: Entry, content: memoryview) -> None:
        """Fills `content` with the piece's elements."""
        for part, piece, part_content in self.in_parts(entry, content):
            piece.read_whole(part, part_content)

    def read_whole(self, entry: Entry, content: memoryview) -> None:
        """Fills `content` from an entry without parts."""
        try:
            with entry.file.open("rb", buffering=0) as file:
                self.read_from(file, entry, content)
        except OSError as error:  # such as EIO for a sector that the disk cannot read
            raise UserError(
                f"{entry.file} cannot be read: {error.strerror}, at {entry.name}"
            ) from None

    def read_from(self, file: IO[bytes], entry: Entry, content: memoryview) -> None:
        """Fills `content` from an open file. It is read as it is now, even if its name is of
        another file or gone."""
        for start, length in self.runs(entry):
            run = content[:length]
            content = content[length:]
            while run:
                count = os.preadv(file.fileno(), [run], start)
                if not count:
                    raise UserError(f"{entry.file} is truncated: it ends before {entry.name}")
                start, run = start + count, run[count:]

    def content(self, entry: Entry) -> Tensor:
        """Returns the piece's elements in the file."""
        content = torch.empty(self.shape, dtype=entry.dtype)
        self.read(entry, bytes_of(content))
        return content

    def crc32(self, entry: Entry) -> int:
        """Returns the CRC-32 of the piece's elements in the file."""
        return zlib.crc32(bytes_of(self.content(entry)))


@torch.no_grad()
def read_tensors(entries: dict[str, Entry], tensors: dict[str, Tensor]) -> None:
    """Fills tensors and DTensors of any dtype and device from the entries of the same names.

    Each rank reads its own part. No tensor has a second copy: at most IO_THREADS pieces exist
    twice. Elements that are not finite are refused.
    """

    def read(piece_and_part: tuple[Piece, Tensor]) -> None:
        piece, part = piece_and_part
        entry = entries[piece.name]
        is_read_in_place = (
            part.dtype == entry.dtype and part.device.type == "cpu" and part.is_contiguous()
        )
        content = part if is_read_in_place else torch.empty(part.shape, dtype=entry.dtype)
        piece.read(entry, bytes_of(content))
        check_finite(content, entry)
        if content is not part:
            part.copy_(content.to(part.device))  # travels in the file's dtype, then is cast

    in_threads(read, local_pieces({name: tensors[name] for name in entries}))


def read_pieces(
    entries: dict[str, Entry],
    tensors: dict[str, Tensor],
    use: Callable[[Piece, Tensor, Tensor], None],
) -> None:
    """Calls use(piece, this rank's elements, the file's) for pieces of CONVERTED_BYTES, on several
    threads.

    The file's elements are on the CPU, in the file's dtype, and finite.
    """

    def read(piece_and_part: tuple[Piece, Tensor]) -> None:
        piece, part = piece_and_part
        content = piece.content(entries[piece.name])
        check_finite(content, entries[piece.name])
        use(piece, part, content)

    in_threads(read, local_pieces({name: tensors[name] for name in entries}, CONVERTED_BYTES))


def header_of(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Returns a safetensors file up to its data: the header's length in 8 little-endian bytes, then
    the header in JSON.

    `tensors` are (dtype, shape) by name. Each tensor's data_offsets count from the end of the
    header, which is padded with spaces to a multiple of 8 bytes: two tensors of 24 and 66 bytes
    have [0, 24] and [24, 90].
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end = end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": [*shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def aligned(
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns tensors in the order in which a file has them, larger elements first.

    Each tensor then starts at a multiple of its element's size.
    """
    return dict(sorted(tensors.items(), key=lambda tensor: -tensor[1][0].itemsize))


def flat(state: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the optimizer's state by names in optimizer.safetensors: norm.weight.exp_avg."""
    return {
        f"{name}.{key}": tensor
        for name, tensors in state.items()
        for key, tensor in tensors.items()
    }


def read_entries(header: bytes, file: Path) -> dict[str, Entry]:
    """Returns the tensors that the header of `file` lists, by name.

    Raises UserError for other dtypes than DTYPES, and for a damaged header.
    """
    try:
        header_json = json.loads(header[8:])
        return {
            name: _entry(name, value, len(header), file)
            for name, value in header_json.items()
            if name != "__metadata__"
        }
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(
            f"{file} is damaged: its header describes no tensors; use another checkpoint"
        ) from None


def _entry(name: str, value: dict, data_start: int, file: Path) -> Entry:
    """Returns the tensor that a value in a header describes. Raises ValueError for wrong sizes."""
    if value["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise UserError(
            f"{file}: {name} is of dtype {value['dtype']!s:.20}, tensors must be of {known}"
        )
    dtype = DTYPES[value["dtype"]]
    shape = tuple(map(operator.index, value["shape"]))
    start, end = map(operator.index, value["data_offsets"])
    if min(start, *shape, 0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(name)
    return Entry(file, dtype, shape, data_start + start, name)


def read_header(file: Path) -> bytes:
    """Returns a safetensors file up to its data. Raises UserError if it cannot be read."""
    refusal = UserError(
        f"{file} is missing, truncated or no safetensors file; copy or download it anew"
    )
    if not os.path.isfile(file):  # a pipe would be waited for
        raise refusal
    try:
        with file.open("rb") as opened:
            length = opened.read(8)
            size = int.from_bytes(length, "little")
            if len(length) == 8 and 8 + size <= file.stat().st_size and size <= LONGEST_HEADER:
                return length + opened.read(size)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    raise refusal


def open_entries(file: Path) -> dict[str, Entry]:
    """Returns the tensors in a safetensors file, by name.

    The library checks that offsets, shapes and the file's size agree.
    """
    try:
        # Before the library maps the file: SIGBUS would end it at an unreadable sector.
        header = read_header(file)
        # "pt" maps the file writably: limits of a process's memory count it.
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        what = f"is missing, truncated or no safetensors file ({error})"
        raise UserError(f"{file} {what}; copy or download it anew") from None
    return read_entries(header, file)


def local_pieces(
    tensors: dict[str, Tensor], piece_bytes: int | None = None
) -> Iterator[tuple[Piece, Tensor]]:
    """Yields this rank's pieces of tensors, and views of their elements.

    A piece has at most `piece_bytes`, by default PIECE_BYTES, or one row.
    """
    for name, tensor in tensors.items():
        local, offset = tensor.detach(), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            local = local.to_local()
            _, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
        if local.ndim == 0:
            yield Piece(name, (), ()), local
        elif local.numel():
            rows = max(1, (piece_bytes or PIECE_BYTES) // local[0].nbytes)
            for start in range(0, len(local), rows):
                part = local[start : start + rows]
                yield Piece(name, (offset[0] + start, *offset[1:]), tuple(part.shape)), part


def pieces_of(entries: dict[str, Entry]) -> Iterator[tuple[Entry, Piece]]:
    """Yields the pieces of whole tensors in files."""
    shapes = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in entries.items()
    }
    return ((entries[piece.name], piece) for piece, _ in local_pieces(shapes))


def check_finite(content: Tensor, entry: Entry) -> None:
    """Raises UserError unless all elements of a CPU tensor, a piece of `entry`, are finite."""
    if is_finite(content):
        return
    for part in entry.parts:
        if not is_finite(Piece.whole(part).content(part)):
            entry = part
            break
    raise UserError(f"{entry.name} in {entry.file} is not finite; give other weights")


def is_finite(tensor: Tensor) -> bool:
    """Whether a CPU tensor's elements are finite, as integers are. Takes one thread of the CPU."""
    if not tensor.is_floating_point():
        return True
    flattened = tensor.reshape(-1)
    # NumPy has no bfloat16; infinities and NaN have all exponent bits set.
    if tensor.dtype != torch.float32:
        exponent = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[tensor.dtype]
        numbers = flattened.view(torch.int16).numpy()
        chunks = (numbers[start : start + 2**20] for start in range(0, len(numbers), 2**20))
        return all((chunk & 0x7FFF).max() < exponent for chunk in chunks)
    numbers = flattened.numpy()
    # The sum takes no memory, but finite elements may have one that overflows.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(numbers.sum()) or np.isfinite(numbers).all())


def is_written_here(tensor: Tensor, rank: int) -> bool:
    """Whether this rank writes its part of a tensor: of ranks with the same part, the first does.

    A DTensor on a mesh of some ranks is the same on all such meshes, and the mesh with rank 0
    writes it.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the tensor's mesh"
    is_copy = any(
        at for at, placement in zip(coordinate, tensor.placements) if placement.is_replicate()
    )
    return not is_copy and bool((tensor.device_mesh.mesh == 0).any())


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def in_threads(function: Callable, values: Iterable) -> list:
    """Returns the function's results for all values, IO_THREADS at a time.

    Copies, checksums, reads and writes let go of Python's lock.
    """
    with ThreadPoolExecutor(IO_THREADS) as pool:
        return list(pool.map(function, values))
