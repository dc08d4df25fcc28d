"""Checkpoints written beside training, straight from where the state lives.

Weights, masters and moments stand still between two updates, and a step takes seconds to an hour: a thread reads them
during the next forward and backward, without a copy of the state, and only the update waits for what is not yet read.
State in host memory is written from there. State on a GPU goes through a small pinned staging buffer, on a stream of
its own. Each rank writes its own part of each tensor into the files that all ranks share (`blocks`), with checksums
taken from the same memory; nothing is gathered. The thread's collectives are of a process group of its own, on gloo:
they meet no collective of training.

What was written is read back from the disk. Where the next save begins before that is done, and the disk has room for
it beside the last checkpoint that was read back whole, the rest is not read and that one stays: a disk that writes for
most of a step has no time to give all of it back. Without that room the next save waits, and so it does where the last
whole reading was more than READ_BACK_SECONDS ago.
"""

import json
import logging
import math
import queue
import shutil
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.blocks import Block, Entry, bytes_of, header_of, is_written_here, local_blocks, read_entries
from training.checkpoint.files import (
    FORMAT_VERSION,
    OPTIMIZER,
    SPARE_BYTES,
    WEIGHTS,
    all_gather,
    clear_leftovers,
    delete_old,
    failing_together,
    flat,
    flush,
    in_threads,
    make_room,
    put_in_place,
    rank_and_world_size,
    rng_state,
    verify_checkpoint,
    write_file,
)
from training.checkpoint.weights import NO_COMPANIONS, Companions, name_in_file
from training.host.direct import DirectFile
from training.host.errors import UserError
from training.run.settings import IO_THREADS

logger = logging.getLogger(__name__)
# After so long a thread that runs Python gives its lock to one that waits for it. A save's threads ask for the lock ten
# times a block: beside a thread that runs Python all the time, Python's own 5 ms halve their rate.
SWITCH_SECONDS = 0.0005
READ_BACK_SECONDS = 1800.0  # so long after a checkpoint was read back whole, a save waits until another one is
ATTEMPTS, SECONDS_BETWEEN = 20, 30.0  # of a save at the end of a run that the disk refuses: 10 minutes in all


@dataclass
class _Save:
    """A checkpoint as it was when it began: small files as bytes, tensors as references to this rank's parts."""

    step: int
    small: dict[str, bytes]  # by file, of this rank
    headers: dict[str, tuple[bytes, int]]  # by file of tensors: (header, size of the whole file)
    blocks: list[tuple[str, Entry, Block, Tensor]]  # (file, whole tensor, where the part belongs, the part)

    @property
    def size(self) -> int:
        """Bytes on the disk, of all ranks."""
        return sum(size for _, size in self.headers.values()) + SPARE_BYTES


class Saver:
    """Writes a run's checkpoints: `begin` after an update, `before_update` ahead of the next one, `finish` at the end.

    All ranks make these calls, on one file system. A save that fails leaves the earlier checkpoints, and is logged.

    Args:
        output_dir: where checkpoints are.
        keep: how many of the last ones to keep, at least 1; the one of the lowest validation loss is kept besides.
        last: the checkpoint that the run goes on from, if any, every byte of it compared: where the disk is full, it
            stays.
        companions: small files, as of a tokenizer, and settings that every checkpoint has besides.

    Attributes:
        last: the newest checkpoint that was completed here, or the one that was given.
        verified: the newest of them that was read back whole, or the one that was given.
        error: why the last save failed; None where it did not, or is still going on.
        seconds: that the last save took.
        seconds_read: of them until all of this rank's state was read, and the update could go on.
    """

    def __init__(
        self, output_dir: str | Path, keep: int, last: Path | None = None, companions: Companions = NO_COMPANIONS
    ):
        assert keep >= 1, f"keep must be at least 1: got {keep}"
        self.output_dir, self.keep = Path(output_dir), keep
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.last, self.verified, self.companions = last, last, companions
        self._read_back_due = -math.inf if last is None else time.monotonic() + READ_BACK_SECONDS
        self.error: Exception | None = None
        self.seconds = self.seconds_read = 0.0
        self._thread: threading.Thread | None = None
        self._read = threading.Event()
        self._next_waits = threading.Event()
        self._is_current = False  # whether the state is still that of the last `begin`
        self._stream: torch.cuda.Stream | None = None  # until a part is on a GPU
        self._staging: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # pinned buffers, one for each thread
        self._staging_bytes = 0  # of a buffer

    def begin(
        self,
        step: int,
        *,
        weights: dict[str, Tensor],
        model_config: dict,
        optimizer_state: dict[str, dict[str, Tensor]] | None,
        trainer_state: dict,
    ) -> None:
        """Start to write output_dir/step_<step>, once the save before has ended; it may stop to read back.

        Args:
            step: optimizer steps taken.
            weights: parameter name -> tensor or DTensor, the same names in the same order on every rank. On GPUs
                float32 weights are rounded to bf16, in which the model computes.
            model_config: written as config.json, with what the companions add, and the weights' dtype.
            optimizer_state: of `MasterAdamW.state_dict`; None: the checkpoint cannot be resumed from. A plain tensor
                is the same on every rank.
            trainer_state: what JSON can hold; its "validation_loss", if there is one, says which checkpoint is best.
        """
        self._next_waits.set()
        self.wait()
        rank, _ = rank_and_world_size()
        small = {f"rng_{rank}.json": _json(rng_state())}
        if rank == 0:
            small |= self.companions.files
            first = next(iter(weights.values()))
            dtype = str(torch.bfloat16 if first.is_cuda else first.dtype).removeprefix("torch.")
            content = {**model_config, **self.companions.settings, "torch_dtype": dtype}
            small["config.json"] = _json(content, indent=2)
            small["trainer.json"] = _json({"step": step, "trainer_state": trainer_state}, indent=2)
        files = {WEIGHTS: {name_in_file(name): tensor for name, tensor in weights.items()}}
        if optimizer_state is not None:
            files[OPTIMIZER] = flat(optimizer_state)
        save = _Save(step, small, {}, [])
        for file, tensors in files.items():
            dtypes = {n: torch.bfloat16 if t.is_cuda and file == WEIGHTS else t.dtype for n, t in tensors.items()}
            header = header_of(tensors, dtypes)
            size = len(header) + sum(tensor.numel() * dtypes[name].itemsize for name, tensor in tensors.items())
            save.headers[file] = header, size
            entries = read_entries(header, Path(file))
            own = {name: tensor for name, tensor in tensors.items() if is_written_here(tensor, rank)}
            save.blocks += [(file, entries[block.name], block, part) for block, part in local_blocks(own)]
        self._stage(max((part.nbytes for *_, part in save.blocks if part.is_cuda), default=0))
        self._save, self._is_current = save, True
        self._start()

    def before_update(self) -> None:
        """Wait until the state that `begin` was given has been read, as far as this rank has it."""
        if self._thread is not None:
            self._read.wait()
        self._is_current = False

    def wait(self) -> None:
        """Wait for the end of the save that is going on, if any; `error` says whether it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait as `wait`; a last save that the disk refused, of state that still stands, is tried again for a while.

        Raises:
            UserError: the disk refused it, or weights are not finite. Exception: what else failed.
        """
        self.wait()
        for left in range(ATTEMPTS - 1, 0, -1):
            if not isinstance(self.error, OSError) or not self._is_current:
                break
            logger.warning("the checkpoint is tried again in %.0f s, at most %d times", SECONDS_BETWEEN, left)
            time.sleep(SECONDS_BETWEEN)
            self._start()
            self.wait()
        if isinstance(self.error, OSError):
            raise UserError(f"the last checkpoint could not be written: {self.error}")
        if self.error is not None:
            raise self.error

    def _start(self) -> None:
        self.error = None
        self._read.clear()
        self._next_waits.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._run, args=(self._save,), daemon=True)
        self._thread.start()

    def _stage(self, num_bytes: int) -> None:
        """Have pinned buffers of that size, one for each writing thread, and a stream for the copies to them."""
        if num_bytes > self._staging_bytes:
            self._stream, self._staging, self._staging_bytes = torch.cuda.Stream(), queue.SimpleQueue(), num_bytes
            for _ in range(IO_THREADS):
                self._staging.put(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))

    def _run(self, save: _Save) -> None:
        self._began = began = time.monotonic()
        usual = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self.last = self._write(save)
            self.seconds = time.monotonic() - began
        except Exception as error:
            self.error = error
            if rank_and_world_size()[0] == 0:
                logger.warning("the checkpoint of step %d failed: %s", save.step, error)
        finally:
            sys.setswitchinterval(usual)
            self._read.set()

    def _write(self, save: _Save) -> Path:
        rank, _ = rank_and_world_size()
        final = self.output_dir / f"step_{save.step:08d}"
        temporary = final.with_name(f".{final.name}.tmp")
        sizes: dict[str, list[int]] = {}
        try:
            with failing_together(self.group):
                if rank == 0:
                    self.output_dir.mkdir(parents=True, exist_ok=True)
                    clear_leftovers(self.output_dir)
                    make_room(self.output_dir, save.size, self.last, self.verified)
                    temporary.mkdir()
                    for file, (header, size) in save.headers.items():
                        sizes[file] = write_file(temporary / file, header, size)
            with failing_together(self.group):
                for file, content in save.small.items():
                    sizes[file] = write_file(temporary / file, content)
                blocks = self._write_blocks(temporary, save)
                # Whether the next save may begin before this one is read back.
                has_room = shutil.disk_usage(self.output_dir).free >= save.size
                may_stop = has_room and time.monotonic() < self._read_back_due
            shares = all_gather((sizes, blocks, may_stop), self.group)
            with failing_together(self.group):
                if rank == 0:
                    manifest: dict = {"format_version": FORMAT_VERSION, "files": {}, "blocks": {}}
                    for their_sizes, their_blocks, _ in shares:
                        manifest["files"] |= their_sizes
                        for file, more in their_blocks.items():
                            manifest["blocks"].setdefault(file, []).extend(more)
                    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
                    write_file(temporary / "manifest.json", json.dumps(manifest).encode())
            stop = self._next_waits if all(may_stop for *_, may_stop in shares) else None
            share = verify_checkpoint(temporary, self.group, direct=True, stop=stop)
            verified = final if share == 1.0 else self.verified
            with failing_together(self.group):
                if rank == 0:
                    put_in_place(temporary, final)
                    delete_old(final, self.keep, verified)
        except BaseException:
            if rank == 0:
                clear_leftovers(self.output_dir)
            raise
        self.verified = verified
        if verified == final:
            self._read_back_due = time.monotonic() + READ_BACK_SECONDS
        told = "" if verified == final else f", {share:.0%} of it read back when the next began"
        logger.info("checkpoint: %s%s", final, told)
        return final

    def _write_blocks(self, folder: Path, save: _Save) -> dict[str, list]:
        """Write this rank's parts; returns of each file its blocks, as the manifest lists them."""
        files = {file: DirectFile(folder / file, writes=True) for file in save.headers}
        checksums: dict[str, list] = {file: [] for file in save.headers}

        def write(item):
            file, entry, block, part = item
            staging = self._staging.get() if part.is_cuda else None
            try:
                on_host = part.contiguous() if staging is None else self._fetch(part, staging)
                if not _is_finite(on_host):
                    raise UserError(f"{block.name} is not finite: no checkpoint of step {save.step} is written")
                content = bytes_of(on_host.to(entry.dtype))
                block.write(files[file], entry, content)
                checksums[file].append([block.name, block.offset, block.shape, zlib.crc32(content)])
            finally:
                if staging is not None:
                    self._staging.put(staging)

        try:
            in_threads(write, save.blocks)
            self.seconds_read = time.monotonic() - self._began
            self._read.set()
            for file in files:
                flush(folder / file)
        finally:
            for opened in files.values():
                opened.close()
        return checksums

    def _fetch(self, part: Tensor, staging: Tensor) -> Tensor:
        """A copy in pinned memory of a part that is on a GPU."""
        assert self._stream is not None
        on_host = staging[: part.nbytes].view(part.dtype).view(part.shape)
        with torch.cuda.stream(self._stream):
            on_host.copy_(part, non_blocking=True)
            copied = self._stream.record_event()
        copied.synchronize()
        return on_host


def _json(content: dict, indent: int | None = None) -> bytes:
    return (json.dumps(content, indent=indent) + "\n").encode()


def _is_finite(tensor: Tensor) -> bool:
    """Whether a CPU tensor's elements are finite, and of float32 ones the sum too; one thread of the CPU is used."""
    flattened = tensor.reshape(-1)
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know; of an infinity or NaN all exponent bits are 1
        numbers = flattened.view(torch.int16).numpy()
        pieces = (numbers[start : start + 2**20] for start in range(0, len(numbers), 2**20))
        return all((piece & 0x7FFF).max() < 0x7F80 for piece in pieces)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(flattened.numpy().sum()))
