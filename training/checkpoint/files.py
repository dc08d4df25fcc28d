"""A run's checkpoints on disk: complete or absent, checked byte for byte, and readable by Hugging Face tools.

output_dir/step_00000100/
    model.safetensors, config.json   the weights under Hugging Face's names
    optimizer.safetensors            masters and moments, float32: written by any number of ranks, read by any other
    trainer.json                     step and the trainer's state
    rng_0.json, rng_1.json, ...      random generators, one file a rank
    manifest.json                    of every file above its size and checksums (CRC-32), written last

`saver.Saver` writes a checkpoint beside its place under a dotted name, flushes it to disk, reads it back and renames
it: a killed save leaves nothing that looks like one. Nothing in a checkpoint is a pickle, so reading it runs no code.
In a process group verify_checkpoint and load_optimizer_state are collective: all ranks call them, on a file system that
all share, and what fails on one is raised on all.
"""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import random
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from training.checkpoint.blocks import Block, bytes_of, local_blocks, read_entries, read_header
from training.checkpoint.weights import read_json
from training.host.direct import DirectFile
from training.host.errors import UserError
from training.run.settings import IO_THREADS

logger = logging.getLogger(__name__)
FORMAT_VERSION = 2
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SPARE_BYTES = 64 * 2**20  # for everything in a checkpoint that is not a tensor


@contextlib.contextmanager
def only_run_in(output_dir: Path) -> Iterator[None]:
    """Make the folder and lock it, as long as this block or its process lasts.

    Raises:
        UserError: another process has the lock; the folder cannot be written to.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / ".lock").open("a+")
    except OSError as error:
        raise UserError(f"folder {output_dir} cannot be written to: {error}; choose another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"another run, process {file.read().strip()}, writes into {output_dir}: wait for its end, or choose "
                "another folder"
            ) from None
        except OSError as error:
            logger.warning("%s has no locks (%s): take care that no other run writes there", output_dir, error)
        with contextlib.suppress(OSError):  # on a full disk the lock has no number, and holds
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def check_is_for_a_run(output_dir: Path) -> None:
    """Refuse a folder of weights, of a checkpoint, or of another program, whose config.json a run would replace."""
    content = {"output_dir": ""}
    with contextlib.suppress(UserError):  # there is none, or a kill cut it short
        content = read_json(output_dir / "config.json")
    holds_weights = any(output_dir.glob("*.safetensors")) or step_of(output_dir.absolute()) is not None
    if holds_weights or "output_dir" not in content:
        raise UserError(
            f"output_dir {output_dir} holds weights, or a config.json that is not of a run; give another folder, as "
            "runs/default"
        )


def check_is_shared(output_dir: Path) -> None:
    """Refuse a folder that is not one for all ranks, as where each machine has a disk of its own. All ranks call this.

    Raises:
        UserError: a rank does not see what the main rank makes there.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return
    made = Path(tempfile.mkdtemp(".tmp", ".step_", output_dir)) if rank == 0 else None  # a leftover, if it stays
    [name, *_] = all_gather(made and made.name)
    sees = all_gather((output_dir / name).is_dir())
    if made:
        made.rmdir()
    if not all(sees):
        raise UserError(
            f"output_dir {output_dir} of rank {sees.index(False)} is not the folder that rank 0 writes to; give one "
            "that all machines see, by its absolute path"
        )


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder by its name; None of other names, as of step_00000020_best."""
    match = re.fullmatch(r"step_([0-9]{8,})", path.name)
    return int(match[1]) if match else None


def checkpoints(output_dir: Path, up_to: float = math.inf) -> list[Path]:
    """The folders that are named as checkpoints, by step, up to that one.

    Those of later steps, which somebody left or a run has not reached yet, are no business of the run.
    """
    found = output_dir.iterdir() if output_dir.is_dir() else ()
    steps = {path: step for path in found if (step := step_of(path)) is not None and step <= up_to}
    return sorted(steps, key=steps.__getitem__)


def latest_checkpoint(output_dir: Path, passed_over: dict[Path, str]) -> Path | None:
    """The newest checkpoint without visible damage, or None; `passed_over` gets those newer than it, and why.

    Args:
        passed_over: checkpoint -> why it cannot be used; those in it are not looked at again.
    """
    for path in reversed(checkpoints(output_dir)):
        if path not in passed_over:
            try:
                check_files(path)
            except UserError as error:
                passed_over[path] = str(error)
            else:
                return path
    return None


def check_files(path: Path) -> dict[str, list]:
    """Compare all sizes, small files and the headers of tensors with the manifest: what can be seen in milliseconds.

    Returns:
        For each file of tensors, its blocks: [tensor's name, offset, shape, CRC-32 of the elements in order].

    Raises:
        UserError: one line naming the file that is missing, truncated or corrupted.
    """
    manifest = read_json(path / "manifest.json")
    version, crc = manifest.get("format_version"), manifest.pop("crc32", None)
    if version != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path} has format {version}, this code {FORMAT_VERSION}: it can only start from its weights, "
            f"with --init_from {path} and another --output_dir"
        )
    if crc != zlib.crc32(json.dumps(manifest).encode()):
        raise UserError(f"checkpoint {path}: manifest.json is corrupted (its CRC-32 differs); use another checkpoint")
    for name, (size, _) in manifest["files"].items():
        if not (path / name).is_file():
            raise UserError(f"checkpoint {path} is incomplete: {name} is missing; use another checkpoint")
        found = (path / name).stat().st_size
        if found != size:
            raise UserError(f"checkpoint {path}: {name} is truncated or changed: {found} bytes, "
                            f"saved with {size}; use another checkpoint")  # fmt: skip
    for name, (_, crc) in manifest["files"].items():
        content = read_header(path / name) if name in manifest["blocks"] else (path / name).read_bytes()
        if zlib.crc32(content) != crc:
            raise corrupted(path, name)
    return manifest["blocks"]


def corrupted(path: Path, name: str) -> UserError:
    return UserError(f"checkpoint {path}: {name} is corrupted (its CRC-32 differs); use another checkpoint")


def verify_checkpoint(
    path: Path, group: dist.ProcessGroup | None = None, *, direct: bool = False, stop: threading.Event | None = None
) -> float:
    """Compare every byte with the manifest; the tensors are shared out over the ranks of `group`, by default all.

    Args:
        direct: whether to read what the disk has, and not what the page cache has; a checkpoint that is to be loaded
            is better read through the cache.
        stop: once it is set, tensors that are not yet read are left out. They are read in random order.

    Returns:
        The share of the tensors' blocks that were compared: 1.0, unless `stop` was set.

    Raises:
        UserError: one line naming the file that is missing, truncated or corrupted.
    """
    rank, world_size = rank_and_world_size()
    with failing_together(group), contextlib.ExitStack() as opened:
        parts = []
        for name, blocks in check_files(path).items():
            header = read_header(path / name)
            entries = read_entries(header, path / name)
            if any(t not in entries or len(entries[t].shape) != len(shape) for t, _, shape, _ in blocks):
                raise corrupted(path, name)
            missing = (path / name).stat().st_size - len(header)
            missing -= sum(math.prod(shape) * entries[tensor].dtype.itemsize for tensor, _, shape, _ in blocks)
            if missing:
                raise UserError(f"checkpoint {path}: {missing} bytes of {name} were written by nobody")
            file = opened.enter_context(contextlib.closing(DirectFile(path / name, direct=direct)))
            parts += [(name, file, entries[block[0]], block) for block in blocks[rank::world_size]]
        if stop is not None:
            random.Random().shuffle(parts)  # training's own generator stays as it is

        def check(part) -> bool:
            if stop is not None and stop.is_set():
                return False
            name, file, entry, (tensor, offset, shape, crc) = part
            if Block(tensor, tuple(offset), tuple(shape)).crc32(file, entry) != crc:
                raise corrupted(path, name)
            return True

        compared = in_threads(check, parts)
    counts = all_gather((sum(compared), len(compared)), group)
    return sum(n for n, _ in counts) / max(1, sum(n for _, n in counts))


def load_optimizer_state(path: Path, state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Read the optimizer's state into its tensors and DTensors, in place, on any number of ranks.

    Args:
        path: a checkpoint's folder, verified.
        state: as at saving; its shapes are those of this run, its sharding may differ.

    Raises:
        UserError: the checkpoint has no optimizer state, or one of other names or shapes.
    """
    tensors = flat(state)
    with failing_together():
        if not (path / OPTIMIZER).is_file():
            raise UserError(
                f"checkpoint {path} has no optimizer state; start from its weights with --init_from instead"
            )
        entries = read_entries(read_header(path / OPTIMIZER), path / OPTIMIZER)
        if differing := tensors.keys() ^ entries.keys():
            raise UserError(
                f"checkpoint {path} is of another model or optimizer: {min(differing)} is only in one of them"
            )
        for name, tensor in tensors.items():
            if (tensor.dtype, tuple(tensor.shape)) != (entries[name].dtype, entries[name].shape):
                raise UserError(f"checkpoint {path} is of another model: {name} has shape {list(entries[name].shape)}, "
                                f"this model needs {list(tensor.shape)}")  # fmt: skip

        def load(block_and_part):
            block, part = block_and_part
            on_host = part if part.device.type == "cpu" and part.is_contiguous() else torch.empty(part.shape)
            block.read(descriptor, entries[block.name], bytes_of(on_host))
            if on_host is not part:
                part.copy_(on_host)

        with reading(path / OPTIMIZER) as descriptor:
            in_threads(load, local_blocks(tensors))


def flat(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The optimizer's state by the names that optimizer.safetensors has: norm.weight.exp_avg."""
    return {f"{name}.{key}": tensor for name, tensors in state.items() for key, tensor in tensors.items()}


def load_trainer_state(path: str | Path) -> dict:
    """The trainer_state that was saved, and "step". Raises UserError where it cannot be read."""
    file = Path(path) / "trainer.json"
    trainer = read_json(file)
    if not isinstance(trainer.get("trainer_state"), dict):
        raise UserError(f"{file} is damaged: it has no trainer_state")
    return {"step": trainer.get("step"), **trainer["trainer_state"]}


def tokenizer_of(folder: Path) -> str:
    """What a folder's weights were trained with: its tokenizer.json's path, or "bytes" where its run or 256 ids say so.

    Raises:
        UserError: nothing says it.
    """
    if (folder / "tokenizer.json").is_file():
        return str(folder / "tokenizer.json")
    if (folder / "trainer.json").is_file() and load_trainer_state(folder).get("tokenizer") == "bytes":
        return "bytes"
    if read_json(folder / "config.json").get("vocab_size") == 256:
        return "bytes"
    raise UserError(
        f"{folder} has no tokenizer.json: give --tokenizer FILE, the one that its weights were trained with, or "
        "--tokenizer bytes"
    )


def restore_rng(path: Path) -> bool:
    """Set this rank's random generators (Python, NumPy, torch's CPU and current CUDA device) as they were at saving.

    Returns:
        False, with nothing set, where the checkpoint was saved by fewer ranks and has no state for this one.
    """
    file = path / f"rng_{rank_and_world_size()[0]}.json"
    if not file.is_file():
        return False
    state = read_json(file)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    return True


def rng_state() -> dict:
    """What `restore_rng` sets, of this rank."""
    numpy = np.random.get_state(legacy=False)
    state = numpy["state"]
    return {
        "python": random.getstate(),
        "numpy": [numpy["bit_generator"], state["key"].tolist(), state["pos"], numpy["has_gauss"], numpy["gauss"]],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None,
    }


def check_room(output_dir: Path, needed: int, given_back: int = 0) -> None:
    """Raise OSError where the disk has less than `needed` bytes free, `given_back` bytes of old files counted in."""
    free = shutil.disk_usage(output_dir).free + given_back
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{needed / 2**30:.2f} GB are needed for checkpoints, {output_dir} has {free / 2**30:.2f} GB"
        )


def size_on_disk(paths: list[Path]) -> int:
    """Bytes of all files in these folders."""
    return sum(file.stat().st_size for path in paths for file in path.rglob("*") if file.is_file())


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint, in place of another one of its step."""
    flush(temporary)
    replaced = _hide(final) if final.exists() else None
    temporary.rename(final)
    flush(final.parent)
    if replaced:
        _delete(replaced)


def delete_old(newest: Path, keep: int, verified: Path | None) -> None:
    """Of the checkpoints up to `newest`, leave the last `keep`, the one of lowest validation loss, and `verified`.

    Also the newest one with an optimizer's state, as where a run was resumed with --save model.
    """
    own = checkpoints(newest.parent, step_of(newest) or 0)
    best = _best(own)
    resumable = next((path for path in reversed(own) if (path / OPTIMIZER).is_file()), None)
    for path in own[:-keep]:
        if path not in (best, verified, resumable):
            _delete_checkpoint(path)


def make_room(output_dir: Path, needed: int, last: Path | None, verified: Path | None) -> None:
    """Where fewer than `needed` bytes are free, delete checkpoints before `last`, the best at the end, not `verified`.

    Raises:
        OSError: that was not enough.
    """
    own = checkpoints(output_dir, step_of(last) or 0) if last else []
    older = [path for path in own if path not in (last, verified)]
    best = _best(older)
    for path in sorted(older, key=lambda path: path == best):
        if shutil.disk_usage(output_dir).free < needed:
            logger.warning("%s has no room for another checkpoint: %s is deleted before its time", output_dir, path)
            _delete_checkpoint(path)
    check_room(output_dir, needed)


def _best(paths: list[Path]) -> Path | None:
    """The one of the lowest validation loss, of equal ones the oldest; None: none has a loss that is finite."""
    losses = {}
    for path in paths:
        with contextlib.suppress(UserError):
            loss = load_trainer_state(path).get("validation_loss")
            if isinstance(loss, float) and math.isfinite(loss):
                losses[path] = loss
    return min(losses, key=lambda path: losses[path], default=None)


def _delete_checkpoint(path: Path) -> None:
    try:
        _delete(_hide(path))
    except OSError as error:
        logger.warning("%s is no longer needed and cannot be deleted: %s", path, error)


def clear_leftovers(output_dir: Path) -> None:
    """Delete what killed saves and interrupted deletions left."""
    for leftover in output_dir.glob(".step_*.tmp"):
        _delete(leftover)


def _hide(checkpoint: Path) -> Path:
    """Rename a checkpoint before its deletion: if that is interrupted, the rest no longer counts as a checkpoint."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old.tmp"))


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    except OSError as error:
        logger.warning("%s is a leftover and cannot be deleted: %s", folder, error)


def write_file(file: Path, content: bytes, size: int | None = None) -> list[int]:
    """Write and flush a file, longer than its content where `size` says so; returns [bytes, CRC-32 of the content]."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.truncate(len(content) if size is None else size)
        opened.flush()
        os.fsync(opened.fileno())
    return [file.stat().st_size, zlib.crc32(content)]


def replace_file(file: Path, content: str) -> None:
    """Write a small file beside its place and rename it: a kill leaves the one before whole."""
    temporary = file.with_name(f".{file.name}.tmp")
    write_file(temporary, content.encode())
    temporary.replace(file)


def flush(path: Path) -> None:
    """Have the file's or folder's content on the disk."""
    with reading(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """A file's or folder's descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def in_threads(function, values) -> list:
    """The function's results of all values, IO_THREADS at a time: copies, checksums and I/O let go of Python's lock."""
    with ThreadPoolExecutor(IO_THREADS) as pool:
        return list(pool.map(function, values))


def rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_gather(value, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value; anything that pickles."""
    values = [value] * rank_and_world_size()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value, group)
    return values


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """All ranks leave the block together, all with an error if one had one: no rank waits for a rank that is gone."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    kind = next((kind for kind in (OSError, UserError) if isinstance(error, kind)), RuntimeError)
    failures = all_gather(None if error is None else (kind, f"{type(error).__name__}: {error}"), group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, message = failure
            raise kind(f"rank {rank} failed: {message}")
