"""A run's checkpoints: complete or absent, checked byte for byte, and readable by Hugging Face tools.

output_dir/step_00000100/
    model.safetensors, config.json   the weights under Hugging Face's names
    optimizer/                       torch.distributed.checkpoint: saved by any number of ranks, loaded by any other
    trainer.json                     step, the trainer's state, the optimizer's plain numbers
    rng_0.json, rng_1.json, ...      random generators, one file a rank
    manifest.json                    size and CRC-32 of every file above, written last

A checkpoint is written beside its place under a dotted name, flushed to disk and renamed: a killed save leaves nothing
that looks like one. In a process group save_checkpoint, verify_checkpoint and load_optimizer_state are collective: all
ranks call them, on a file system that all share, and what fails on one is raised on all.
"""

import contextlib
import json
import os
import random
import shutil
import warnings
import zlib
from collections import ChainMap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from training.checkpoint.weights import append_weights, read_json, safetensors_header
from training.config import IO_THREADS
from training.errors import UserError

FORMAT_VERSION = 1
SPARE_BYTES = 64 * 2**20  # for everything in a checkpoint that is not a tensor


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    model_state: dict[str, torch.Tensor],
    model_config: dict,
    optimizer_state: dict | None,
    trainer_state: dict,
    keep: int = 2,
) -> Path:
    """Write output_dir/step_<step>, then delete the oldest checkpoints so that keep are left up to this step.

    Args:
        step: optimizer steps taken.
        model_state: parameter name -> tensor or DTensor, the same names in the same order on every rank; gathered and
            written one at a time.
        model_config: written as config.json.
        optimizer_state: nested dict of tensors, DTensors and plain numbers. A plain tensor is the same on every rank.
        trainer_state: what JSON can hold; load_trainer_state returns it.
        keep: checkpoints to keep, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: too little free disk space, found out before anything is written.
        Exception: what the writing rank met; the other ranks raise RuntimeError. Earlier checkpoints stand.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1: got {keep}")
    output_dir = Path(output_dir)
    final = output_dir / f"step_{step:08d}"
    temporary = output_dir / f".{final.name}.tmp"
    rank, world_size = _rank_and_world_size()
    tensors, numbers = _split_leaves(optimizer_state or {})
    try:
        with _failing_together():
            if rank == 0:
                output_dir.mkdir(parents=True, exist_ok=True)
                for leftover in output_dir.glob(".step_*.tmp"):
                    shutil.rmtree(leftover)
                _check_free_space(output_dir, [*model_state.values(), *tensors.values()])
                temporary.mkdir()
        with _failing_together():
            _write_json(temporary / f"rng_{rank}.json", _rng_state())
            if rank == 0:
                (temporary / "model.safetensors").write_bytes(safetensors_header(model_state))
                _write_json(temporary / "config.json", model_config)
                trainer = {"step": step, "trainer_state": trainer_state, "optimizer_numbers": numbers}
                _write_json(temporary / "trainer.json", {"format_version": FORMAT_VERSION, **trainer})
        with _failing_together():
            append_weights(temporary / "model.safetensors", model_state, rank)
        if optimizer_state is not None:
            with _one_line_errors("cannot write the optimizer state"):
                dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary / "optimizer", thread_count=IO_THREADS))
        checksums = {}
        with _failing_together():
            names = sorted(str(file.relative_to(temporary)) for file in temporary.rglob("*") if file.is_file())
            for name in names[rank::world_size]:
                _flush(temporary / name)
            checksums = _checksums(temporary, names[rank::world_size])
        shares = _all_gather(checksums)
        with _failing_together():
            if rank == 0:
                _write_json(temporary / "manifest.json", dict(ChainMap(*shares)))
                _put_in_place(temporary, final)
                earlier = [other for other in _checkpoints(output_dir) if other.name < final.name]
                for old in earlier[::-1][keep - 1 :]:
                    shutil.rmtree(_hide(old))
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in output_dir, or None."""
    return max(_checkpoints(Path(output_dir)), default=None)


def verify_checkpoint(path: str | Path) -> None:
    """Compare every file with the manifest: all sizes first, then the contents, shared out over the ranks.

    Raises:
        UserError: one line naming the file that is missing, truncated or corrupted.
    """
    path = Path(path)
    rank, world_size = _rank_and_world_size()
    with _failing_together():
        manifest = read_json(path / "manifest.json")
        for name, (size, _) in manifest.items():
            if not (path / name).is_file():
                raise UserError(f"checkpoint {path} is incomplete: {name} is missing; use another checkpoint")
            found = (path / name).stat().st_size
            if found != size:
                raise UserError(f"checkpoint {path}: {name} is truncated or changed: {found} bytes, "
                                 f"saved with {size}; use another checkpoint")  # fmt: skip
        for name, entry in _checksums(path, sorted(manifest)[rank::world_size]).items():
            if entry != manifest[name]:
                raise UserError(f"checkpoint {path}: {name} is corrupted (its CRC-32 differs); use another checkpoint")


def load_optimizer_state(path: str | Path, state: dict) -> None:
    """Read the optimizer's state into the tensors, DTensors and numbers of state, in place, on any number of ranks.

    Args:
        path: a checkpoint's folder.
        state: nested as at saving; its shapes are those of this run, its sharding may differ.

    Raises:
        UserError: the checkpoint has no optimizer state, or one of other names or shapes.
    """
    path = Path(path)
    if not (path / "optimizer" / ".metadata").is_file():
        raise UserError(f"checkpoint {path} has no optimizer state; start from its weights with --init_from instead")
    reader = dcp.FileSystemReader(path / "optimizer")
    tensors, numbers = _split_leaves(state)
    saved_numbers = _read_trainer(path)["optimizer_numbers"]
    differing = {*tensors, *numbers} ^ {*reader.read_metadata().state_dict_metadata, *saved_numbers}
    if differing:
        raise UserError(f"checkpoint {path} is of another model or optimizer: {min(differing)} is only in one of them")
    with _one_line_errors(f"cannot read the optimizer state of {path}"):
        dcp.load(tensors, storage_reader=reader)
    for name, container, key in _leaves(state):
        if name in saved_numbers:
            container[key] = saved_numbers[name]


def load_trainer_state(path: str | Path) -> dict:
    """The trainer_state given to save_checkpoint, and "step". Raises UserError where it cannot be read."""
    trainer = _read_trainer(Path(path))
    return {"step": trainer["step"], **trainer["trainer_state"]}


def restore_rng(path: str | Path) -> bool:
    """Set this rank's random generators (Python, NumPy, torch's CPU and current CUDA device) as they were at saving.

    Returns:
        False, with nothing set, where the checkpoint was saved by fewer ranks and has no state for this one.
    """
    file = Path(path) / f"rng_{_rank_and_world_size()[0]}.json"
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


def _rng_state() -> dict:
    numpy = np.random.get_state(legacy=False)
    state = numpy["state"]
    return {
        "python": random.getstate(),
        "numpy": [numpy["bit_generator"], state["key"].tolist(), state["pos"], numpy["has_gauss"], numpy["gauss"]],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None,
    }


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _all_gather(value) -> list:
    values = [value] * _rank_and_world_size()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def _failing_together():
    """All ranks leave the block together, all with an error if one had one: no rank waits for a rank that is gone."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    messages = _all_gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} failed: {message}")


@contextlib.contextmanager
def _one_line_errors(what: str):
    """Raise a UserError of one line where dcp raises its BaseException, which carries the traceback of every rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process needs no group
        try:
            yield
        except dcp.CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise UserError(f"{what}: {first}") from error


def _leaves(state: dict, prefix: str = "") -> Iterator[tuple[str, dict, str]]:
    """For each value in a nested dict: (its path, the dict that holds it, its key there)."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", state, key


def _split_leaves(state: dict) -> tuple[dict[str, torch.Tensor], dict]:
    values = {name: container[key] for name, container, key in _leaves(state)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in values.items() if name not in tensors}


def _read_trainer(path: Path) -> dict:
    trainer = read_json(path / "trainer.json")
    if trainer.get("format_version") != FORMAT_VERSION:
        raise UserError(f"checkpoint {path} has format {trainer.get('format_version')}, this code {FORMAT_VERSION}")
    return trainer


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=None if file.name.startswith("rng_") else 2) + "\n")


def _check_free_space(folder: Path, tensors: list[torch.Tensor]) -> None:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"a checkpoint needs {needed / 2**30:.2f} GB, {folder} has {free / 2**30:.2f} GB free; "
                         "free some space or choose another --output_dir")  # fmt: skip


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _checksums(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """name -> [bytes, CRC-32], files in parallel (zlib lets go of the interpreter's lock)."""

    def checksum(name):
        value = 0
        with (folder / name).open("rb") as file:
            while block := file.read(2**24):
                value = zlib.crc32(block, value)
            return [file.tell(), value]

    with ThreadPoolExecutor(IO_THREADS) as pool:
        return dict(zip(names, pool.map(checksum, names)))


def _checkpoints(output_dir: Path) -> list[Path]:
    return sorted(path for path in output_dir.glob("step_[0-9]*") if (path / "manifest.json").is_file())


def _put_in_place(temporary: Path, final: Path) -> None:
    for path in (temporary / "manifest.json", *(f for f in temporary.rglob("*") if f.is_dir()), temporary):
        _flush(path)
    replaced = _hide(final) if final.exists() else None
    temporary.rename(final)
    _flush(final.parent)
    if replaced:
        shutil.rmtree(replaced)


def _hide(checkpoint: Path) -> Path:
    """Rename a checkpoint before its deletion: if that is interrupted, the rest no longer counts as a checkpoint."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old.tmp"))
