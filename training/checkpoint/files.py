"""A run's checkpoints on disk: complete or absent, checked byte for byte, and readable by Hugging
Face tools.

output_dir/step_00000100/
    model.safetensors, config.json   the weights under Hugging Face's names; adapters alone are in
                                     adapter_model.safetensors and adapter_config.json, as by peft
    optimizer.safetensors            the optimizer's state, by any number of ranks for any other
    trainer.json                     step and the trainer's state
    rng_0.json, rng_1.json, ...      random generators, a file for each rank
    manifest.json                    sizes and checksums of all files above, written last

`saver.Saver` writes a checkpoint under a dotted name, flushes it to disk and renames it: a killed
save leaves nothing that looks like a checkpoint. Nothing in it is a pickle, so reading it runs no
code.
"""

import contextlib
import errno
import logging
import math
import os
import random
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from training.checkpoint.manifest import OPTIMIZER, check_beside, check_files
from training.checkpoint.ranks import all_gather, rank_and_world_size
from training.families.lora import has_adapters, read_adapters
from training.families.rows import is_wrapper
from training.host.errors import UserError
from training.host.files import delete, flush, read_json

logger = logging.getLogger(__name__)
REPLACED = ".replaced.tmp"  # end of the name that a checkpoint has while another takes its place
# Names that a save, a deletion and `check_is_shared` give.
LEFTOVER = re.compile(r"\.step_([0-9]{8,}(\.old|\.replaced)?|[a-z0-9_]{8})\.tmp")
SPARE_BYTES = 64 * 2**20  # room for everything in a checkpoint but tensors


def check_is_for_a_run(output_dir: Path) -> None:
    """Refuses a folder of weights, of a checkpoint, or with another program's config.json."""
    # Stands for a config.json that is missing, or that a kill cut short.
    content = {"output_dir": ""}
    with contextlib.suppress(UserError):
        content = read_json(output_dir / "config.json")
    holds_weights = (
        any(output_dir.glob("*.safetensors")) or step_of(output_dir.absolute()) is not None
    )
    if holds_weights or not ("output_dir" in content or checkpoints(output_dir)):
        raise UserError(
            f"output_dir {output_dir} holds weights, or a config.json that is not of a run; "
            "give another folder, as runs/default"
        )


def check_is_shared(output_dir: Path) -> None:
    """Refuses a folder that is another one on another rank, as on machines with their own disks.

    All ranks call this.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return
    folder = None
    if rank == 0:  # a leftover, if it stays
        folder = Path(tempfile.mkdtemp(".tmp", ".step_", output_dir))
    name, *_ = all_gather(folder and folder.name)
    sees = all_gather((output_dir / name).is_dir())
    if folder:
        folder.rmdir()
    if not all(sees):
        raise UserError(
            f"output_dir {output_dir} of rank {sees.index(False)} is not the folder that rank 0 "
            "writes to; give one that all machines see, by its absolute path"
        )


def step_of(path: Path) -> int | None:
    """Returns the step in a checkpoint folder's name; None for other names, as step_20_best."""
    match = re.fullmatch(r"step_([0-9]{8,})", path.name)
    return int(match[1]) if match else None


def checkpoints(output_dir: Path, up_to: float = math.inf) -> list[Path]:
    """Returns the folders with names of checkpoints, by step.

    Ignores checkpoints of steps after `up_to`: a later run may have left them.
    """
    paths = output_dir.iterdir() if output_dir.is_dir() else ()
    steps = {path: step_of(path) for path in paths}
    numbered = {path: step for path, step in steps.items() if step is not None and step <= up_to}
    return sorted(numbered, key=numbered.__getitem__)


def latest_checkpoint(output_dir: Path, passed_over: dict[Path, str]) -> Path | None:
    """Returns the newest checkpoint without visible damage, or None.

    Skips the paths in `passed_over`, and adds damaged ones with the reason.
    """
    for path in reversed(checkpoints(output_dir)):
        if path not in passed_over:
            try:
                check_files(path)
                if (step := read_json(path / "trainer.json").get("step")) != step_of(path):
                    raise UserError(
                        f"it is a copy, under another name, of a checkpoint of step {step}"
                    )
                return path
            except UserError as error:
                passed_over[path] = str(error)
    return None


def load_trainer_state(path: str | Path) -> dict:
    """Returns the trainer_state that was saved, and "step".

    Raises UserError for a damaged or edited trainer.json.
    """
    file = Path(path, "trainer.json")
    trainer = read_json(file)
    check_beside(file.parent, ["trainer.json"])
    state = trainer.get("trainer_state")
    if not isinstance(state, dict) or not all(
        isinstance(state.get(name, {}), dict) for name in ("settings", "loader")
    ):
        raise UserError(
            f"{file} is damaged: it has no trainer_state, or one without settings or loader"
        )
    return {"step": trainer.get("step"), **state}


def tokenizer_of(folder: Path) -> str:
    """Returns the path of the folder's tokenizer.json, or of its base's.

    Returns "bytes" for a run on bytes, or a model of 256 ids.
    """
    if (folder / "tokenizer.json").is_file():
        return str(folder / "tokenizer.json")
    if (folder / "trainer.json").is_file() and load_trainer_state(folder).get(
        "tokenizer"
    ) == "bytes":
        return "bytes"
    if has_adapters(folder):
        return tokenizer_of(read_adapters(folder)[1])
    content = read_json(folder / "config.json")
    if (content["text_config"] if is_wrapper(content) else content).get("vocab_size") == 256:
        return "bytes"
    raise UserError(
        f"{folder} has no tokenizer.json: give --tokenizer FILE, the one that its weights were "
        "trained with, or --tokenizer bytes"
    )


def rng_state() -> dict:
    """Returns the state of this rank's generators: Python, NumPy, torch's CPU and CUDA device."""
    numpy = np.random.get_state(legacy=False)
    state = numpy["state"]
    return {
        "python": random.getstate(),
        "numpy": [
            numpy["bit_generator"],
            state["key"].tolist(),
            state["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None,
    }


def restore_rng(path: Path) -> bool:
    """Sets this rank's random generators as at saving.

    Returns False if the checkpoint, saved by fewer ranks, has no state for this rank.
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


def check_room(output_dir: Path, needed: int, given_back: int = 0) -> None:
    """Raises OSError if the disk has less than `needed` bytes free, counting `given_back` bytes of
    old files as free."""
    free = shutil.disk_usage(output_dir).free + given_back
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{needed / 2**30:.2f} GB are needed for checkpoints, {output_dir} has "
            f"{free / 2**30:.2f} GB",
        )


def put_in_place(temporary: Path, final: Path) -> None:
    """Renames a complete checkpoint to its place; a checkpoint of the same step is replaced.

    `clear_leftovers` gives the replaced checkpoint its name back if an error or a kill comes
    between the two renames.
    """
    flush(temporary)
    replaced = final.with_name(f".{final.name}{REPLACED}")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    flush(final.parent)
    if replaced.exists():
        _delete(replaced)


def delete_old(newest: Path, keep: int) -> None:
    """Deletes checkpoints before `newest`, but for the best and the last `keep`, `newest` included.

    The newest checkpoint with an optimizer's state stays as well: a run with --save model can
    resume from no other.
    """
    paths = checkpoints(newest.parent, step_of(newest) or 0)
    resumable = [path for path in paths if os.path.isfile(path / OPTIMIZER)]
    kept = {_best(paths), *resumable[-1:], *paths[-keep:]}
    for path in paths:
        if path not in kept:
            _delete_checkpoint(path)


def make_room(output_dir: Path, needed: int, last: Path | None) -> None:
    """Deletes checkpoints before `last`, the oldest first and the best at the end, until `needed`
    bytes are free."""
    older = []
    if last:
        older = [path for path in checkpoints(output_dir, step_of(last) or 0) if path != last]
    best = _best(older)
    for path in sorted(older, key=lambda path: path == best):
        if shutil.disk_usage(output_dir).free < needed:
            logger.warning(
                "%s has no room for another checkpoint: %s is deleted before its time",
                output_dir,
                path,
            )
            _delete_checkpoint(path)
    check_room(output_dir, needed)


def _best(paths: list[Path]) -> Path | None:
    """Returns the first path with the lowest validation loss; None if none has a finite loss."""
    losses = {}
    for path in paths:
        with contextlib.suppress(UserError):
            loss = load_trainer_state(path).get("validation_loss")
            if isinstance(loss, float) and math.isfinite(loss):
                losses[path] = loss
    return min(losses, key=losses.__getitem__, default=None)


def _delete_checkpoint(path: Path) -> None:
    """Renames a checkpoint and deletes it: a rest that an interruption leaves is no checkpoint.

    Names are flushed before and after: a loss of power leaves the newer checkpoint.
    """
    try:
        flush(path.parent)
        renamed = path.rename(path.with_name(f".{path.name}.old.tmp"))
        flush(path.parent)
        _delete(renamed)
    except OSError as error:
        logger.warning("%s is no longer needed and cannot be deleted: %s", path, error)


def clear_leftovers(output_dir: Path) -> None:
    """Deletes what killed saves and interrupted deletions left.

    A checkpoint that was not yet replaced gets its name back. Names are flushed before files are
    deleted: a loss of power does not bring back the name of a deleted folder.
    """
    leftovers = [path for path in output_dir.glob(".step_*.tmp") if LEFTOVER.fullmatch(path.name)]
    if not leftovers:
        return
    for replaced in output_dir.glob(f".step_*{REPLACED}"):
        final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(REPLACED))
        if not final.exists():
            replaced.rename(final)
            leftovers.remove(replaced)
    flush(output_dir)
    for leftover in leftovers:
        _delete(leftover)


def _delete(folder: Path) -> None:
    try:
        delete(folder)
    except OSError as error:
        logger.warning("%s is a leftover and cannot be deleted: %s", folder, error)
