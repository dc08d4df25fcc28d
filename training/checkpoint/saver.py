"""Checkpoints written beside training, straight from where the state lives.

Weights, masters and moments stand still between two updates, and a step takes seconds to an hour. A
thread reads them during the next forward and backward, without a copy of the state; only the update
waits for what is not yet read. State in host memory is written from where it is. State on a GPU
goes through a small pinned staging buffer, on a stream of its own. Each rank writes its own part of
each tensor into the files that all ranks share (`pieces`), and computes checksums from the same
memory; nothing is gathered. The thread's collectives use a gloo process group of its own, and so
never meet training's.

Nothing is read back: checksums are compared by whoever reads the checkpoint (`manifest`).
"""

import contextlib
import errno
import json
import logging
import math
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kernels.parts import Parameter
from training.checkpoint import pieces
from training.checkpoint.files import (
    SPARE_BYTES,
    clear_leftovers,
    delete_old,
    make_room,
    put_in_place,
    rng_state,
)
from training.checkpoint.manifest import OPTIMIZER, WEIGHTS, write_manifest
from training.checkpoint.pieces import Entry, Piece
from training.checkpoint.ranks import all_gather, failing_together, rank_and_world_size
from training.checkpoint.weights import NO_COMPANIONS, Companions
from training.families.lora import ADAPTER_WEIGHTS
from training.families.names import Rows
from training.host.direct import DirectFile
from training.host.errors import UserError
from training.host.files import flush, make_folder, shown_as, write_file

logger = logging.getLogger(__name__)
# A thread that runs Python gives its lock after so long to a thread that waits for it. A save's
# threads ask for the lock ten times for each piece: with Python's own 5 ms, a thread that runs
# Python all the time halves their rate.
SWITCH_SECONDS = 0.0005
# If the disk refuses the save at a run's end, it is tried for 10 minutes.
ATTEMPTS = 20
SECONDS_BETWEEN = 30.0


class Saver:
    """Writes a run's checkpoints: `begin` after an update, `before_update` ahead of the next one,
    `finish` at the end.

    All ranks make these calls, on one file system. A save that fails leaves the earlier
    checkpoints, and is logged.

    Args:
        keep: how many of the last checkpoints stay, at least 1. The best by validation loss stays
            as well.
        last: the checkpoint that the run goes on from, if any, then the newest completed here. It
            stays if the disk is full.
        companions: small files, settings and tensors that are not trained, which go into every
            checkpoint.
    """

    def __init__(
        self,
        output_dir: str | Path,
        keep: int,
        last: Path | None = None,
        companions: Companions = NO_COMPANIONS,
    ):
        assert keep >= 1, f"keep must be at least 1: got {keep}"
        self.output_dir = Path(output_dir)
        self.keep = keep
        self.last = last
        self.companions = companions
        if tensors := companions.carried.tensors:
            size = companions.carried.num_bytes / 1e9
            logger.info(
                "checkpoints carry %d tensors that are not trained (%.2f GB) along",
                len(tensors),
                size,
            )
        self._carried = self._checksums_of_carried()
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.error: Exception | None = None  # of the last save, if it failed
        self.seconds = self.seconds_read = 0.0  # of a save, and until the update could go on
        self._thread: threading.Thread | None = None
        self._read = threading.Event()
        self._is_current = False  # whether the state has stood still since the last `begin`
        # The checkpoint as it was when it began: small files as bytes, tensors as references to
        # this rank's parts.
        self._small: dict[str, bytes] = {}  # this rank's files
        # File of tensors -> (header, size of the whole file).
        self._headers: dict[str, tuple[bytes, int]] = {}
        # (whole tensor, place in it, elements).
        self._pieces: list[tuple[Entry, Piece, Tensor]] = []
        self._stream: torch.cuda.Stream | None = None  # made with the buffers
        # A pinned buffer for each thread.
        self._staging: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._staging_bytes = 0  # size of a buffer

    def _checksums_of_carried(self) -> dict[Piece, int]:
        """Returns the CRC-32 of each piece that is carried, on the rank that writes them."""
        carried = self.companions.carried
        if rank_and_world_size()[0] > 0:
            return {}
        parts = [piece for piece, _ in pieces.local_pieces(carried.tensors)]
        return dict(zip(parts, pieces.in_threads(lambda piece: _crc32(carried.read(piece)), parts)))

    def begin(
        self,
        step: int,
        *,
        weights: dict[str, Tensor],
        model_config: dict,
        optimizer_state: dict[str, dict[str, Tensor]] | None,
        trainer_state: dict,
        declared: Mapping[str, Parameter] = MappingProxyType({}),
    ) -> None:
        """Starts to write output_dir/step_<step>, once the save before has ended.

        Args:
            weights: parameter name -> tensor or DTensor, the same names in the same order on every
                rank: a model's or its adapters'. On several GPUs float32 shards are rounded to
                bf16, in which the model computes.
            declared: what the weights are, by name; a weight without has its shape alone. Exact
                ones are not rounded, as the model computes with them in float32.
            model_config: written as config.json, with the companions' settings and the weights'
                dtype.
            optimizer_state: from `MasterAdamW.state_dict`; None: the checkpoint cannot be resumed
                from. A plain tensor is the same on every rank.
            trainer_state: what JSON can hold; its "validation_loss", if there is one, says which
                checkpoint is best.
        """
        self.wait()
        self._step = step
        self._small = self._small_files(model_config, weights, trainer_state)
        self._headers = {}
        self._pieces = []
        self._is_current = True
        self._plan_weights(weights, declared)
        if optimizer_state is not None:
            tensors = pieces.flat(optimizer_state)
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            self._plan_file(OPTIMIZER, tensors, _places_of(tensors), dtypes, is_aligned=False)
        self._stage(max((part.nbytes for *_, part in self._pieces if part.is_cuda), default=0))
        self._start()

    def _small_files(
        self, model_config: dict, weights: dict[str, Tensor], trainer_state: dict
    ) -> dict[str, bytes]:
        """Returns the files of this rank that hold no tensors."""
        rank, _ = rank_and_world_size()
        files = {f"rng_{rank}.json": _json(rng_state())}
        if rank > 0:
            return files
        first = next(iter(weights.values()))
        dtype = torch.bfloat16 if first.is_cuda else first.dtype
        settings = self.companions.settings
        config = self.companions.carried.config_json(model_config, settings, dtype)
        trainer = {"step": self._step, "trainer_state": trainer_state}
        files |= self.companions.files
        files["config.json"] = _json(config, indent=2)
        files["trainer.json"] = _json(trainer, indent=2)
        return files

    def _plan_weights(self, weights: dict[str, Tensor], declared: Mapping[str, Parameter]) -> None:
        """Plans the file of weights and of what is carried. All but exact weights are rounded."""
        carried = self.companions.carried
        tensors = weights | carried.tensors
        places = _places_of(carried.tensors)
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        roles = set[str]()
        for name, weight in weights.items():
            parameter = declared.get(name) or Parameter(tuple(weight.shape))
            roles.add(parameter.role)
            places[name] = carried.in_files(name, parameter)
            if not parameter.is_exact and isinstance(weight, DTensor) and weight.is_cuda:
                dtypes[name] = torch.bfloat16
        file = ADAPTER_WEIGHTS if roles == {"adapter"} else WEIGHTS
        self._plan_file(file, tensors, places, dtypes, is_aligned=True)

    def _plan_file(
        self,
        file: str,
        tensors: dict[str, Tensor],
        places: dict[str, list[Rows]],
        dtypes: dict[str, torch.dtype],
        *,
        is_aligned: bool,
    ) -> None:
        """Plans a file's header, and the pieces of `tensors` that this rank writes.

        Args:
            places: where the file has each tensor.
            dtypes: of each tensor in the file.
            is_aligned: whether each tensor starts at a multiple of its element's size.
        """
        rank, _ = rank_and_world_size()
        in_file = {
            rows.tensor: (dtypes[name], rows.shape) for name in tensors for rows in places[name]
        }
        header = pieces.header_of(pieces.aligned(in_file) if is_aligned else in_file)
        data_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in in_file.values())
        self._headers[file] = header, len(header) + data_bytes
        entries = pieces.read_entries(header, Path(file))
        for name, tensor in tensors.items():
            if pieces.is_written_here(tensor, rank):
                place = Entry.joined(name, tuple(tensor.shape), places[name], entries)
                for piece, elements in pieces.local_pieces({name: tensor}):
                    self._pieces.append((place, piece, elements))

    def before_update(self) -> None:
        """Waits until this rank's part of the state that `begin` was given has been read."""
        if self._thread is not None:
            self._read.wait()
        self._is_current = False

    def wait(self) -> None:
        """Waits for the end of a save that is going on. `error` says whether it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Waits for the last save. While the disk refuses it and the state has not changed, it is
        tried again.

        Raises the save's error; a disk that refuses for good is a UserError.

        Args:
            gives_up: whether to try no more, the same on all ranks; called once a second.
        """
        self.wait()
        for left in range(ATTEMPTS - 1, 0, -1):
            # A limit of the size of files stays: another try would meet it as well.
            may_pass = isinstance(self.error, OSError) and self.error.errno != errno.EFBIG
            if not may_pass or not self._is_current:
                break
            logger.warning(
                "the checkpoint is tried again in %.0f s, at most %d times; "
                "a signal, as of Ctrl-C or kill, gives up",
                SECONDS_BETWEEN,
                left,
            )
            for _ in range(int(SECONDS_BETWEEN)):
                time.sleep(1)
                if gives_up():
                    raise UserError(
                        f"the last checkpoint is given up, as a signal asked: {self.error}"
                    )
            self._start()
            self.wait()
        if isinstance(self.error, OSError):
            raise UserError(f"the last checkpoint could not be written: {self.error}")
        if self.error is not None:
            raise self.error

    def _start(self) -> None:
        self.error = None
        self._read.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _stage(self, num_bytes: int) -> None:
        """Makes a pinned buffer of that size per writing thread, and a stream for its copies."""
        if num_bytes > self._staging_bytes:
            self._stream = torch.cuda.Stream()
            self._staging = queue.SimpleQueue()
            self._staging_bytes = num_bytes
            for _ in range(pieces.IO_THREADS):
                self._staging.put(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))

    def _run(self) -> None:
        self._began = began = time.monotonic()
        usual = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self.last = self._write()
            self.seconds = time.monotonic() - began
        except Exception as error:
            self.error = error
            if rank_and_world_size()[0] == 0:
                logger.warning("the checkpoint of step %d failed: %s", self._step, error)
        finally:
            sys.setswitchinterval(usual)
            self._read.set()

    def _write(self) -> Path:
        rank, _ = rank_and_world_size()
        final = self.output_dir / f"step_{self._step:08d}"
        temporary = final.with_name(f".{final.name}.tmp")
        sizes: dict[str, list[int]] = {}
        try:
            with failing_together(self.group), shown_as(final, temporary):
                if rank == 0:
                    make_folder(self.output_dir)
                    clear_leftovers(self.output_dir)
                    size = sum(size for _, size in self._headers.values()) + SPARE_BYTES
                    make_room(self.output_dir, size, self.last)
                    temporary.mkdir()
                    for file, (header, size) in self._headers.items():
                        sizes[file] = write_file(temporary / file, header, size)
            with failing_together(self.group), shown_as(final, temporary):
                for file, content in self._small.items():
                    sizes[file] = write_file(temporary / file, content)
                checksums = self._write_pieces(temporary)
            written = all_gather((sizes, checksums), self.group)
            with failing_together(self.group), shown_as(final, temporary):
                if rank == 0:
                    write_manifest(temporary, written)
                    put_in_place(temporary, final)
                    delete_old(final, self.keep)
        except BaseException:
            if rank == 0:
                clear_leftovers(self.output_dir)
            raise
        logger.info("checkpoint: %s", final)
        return final

    def _write_pieces(self, folder: Path) -> dict[str, list]:
        """Writes this rank's pieces and flushes them.

        Returns rows of the manifest's "blocks" by file.
        """
        files = {file: DirectFile(folder / file) for file in self._headers}
        checksums: dict[str, list] = {file: [] for file in self._headers}

        def write(item):
            entry, piece, part = item
            staging = self._staging.get() if part.is_cuda else None
            try:
                is_carried = piece in self._carried
                if is_carried:
                    on_host = self._read_carried(piece)
                else:
                    on_host = part.contiguous() if staging is None else self._fetch(part, staging)
                if not is_carried and not pieces.is_finite(on_host):
                    raise UserError(
                        f"{entry.name} is not finite: no checkpoint of step {self._step} is written"
                    )
                content = pieces.bytes_of(on_host.to(entry.dtype))
                for tensor, box, elements in piece.in_parts(entry, content):
                    box.write(files[tensor.file.name], tensor, elements)
                    row = [tensor.name, box.offset, box.shape, zlib.crc32(elements)]
                    checksums[tensor.file.name].append(row)
            finally:
                if staging is not None:
                    self._staging.put(staging)

        try:
            pieces.in_threads(write, self._pieces)
            self.seconds_read = time.monotonic() - self._began
            self._read.set()
            for file in files:
                flush(folder / file)
        finally:
            for opened in files.values():
                opened.close()
        return checksums

    def _read_carried(self, piece: Piece) -> Tensor:
        """Returns a piece of what is carried, as it was when the run began.

        Its file may have been written over since. The last checkpoint then has the piece.
        """
        carried = self.companions.carried

        def read_from_last() -> Tensor:
            assert self.last is not None
            return piece.content(pieces.open_entries(self.last / WEIGHTS)[piece.name])

        for read in (lambda: carried.read(piece), read_from_last)[: 2 if self.last else 1]:
            with contextlib.suppress(UserError, OSError, KeyError):
                content = read()
                if tuple(content.shape) == piece.shape and _crc32(content) == self._carried[piece]:
                    return content
        file = carried.places[piece.name][0].name
        what = f"{piece.name} of {file} is not what it was when the run began: bring that file back"
        raise OSError(errno.ESTALE, what)  # the run's end waits for it, as for a full disk

    def _fetch(self, part: Tensor, staging: Tensor) -> Tensor:
        """Returns a copy of a GPU's tensor in pinned memory."""
        assert self._stream is not None
        on_host = staging[: part.nbytes].view(part.dtype).view(part.shape)
        with torch.cuda.stream(self._stream):
            on_host.copy_(part, non_blocking=True)
            copied = self._stream.record_event()
        copied.synchronize()
        return on_host


def _crc32(content: Tensor) -> int:
    return zlib.crc32(pieces.bytes_of(content))


def _places_of(tensors: dict[str, Tensor]) -> dict[str, list[Rows]]:
    """Returns the places in a file of tensors that it has under their own names."""
    return {name: [Rows(name, tuple(tensor.shape))] for name, tensor in tensors.items()}


def _json(content: dict, indent: int | None = None) -> bytes:
    return (json.dumps(content, indent=indent) + "\n").encode()
