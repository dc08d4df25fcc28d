"""Damage to every file of a checkpoint: `python -m tests.storm damage --count 500`.

A run of two checkpoints is made once. Each time, one file of the newer checkpoint is damaged: a bit
is flipped, the file is truncated, lengthened, emptied or deleted, a sector is zeroed, two bytes
change places, or the disk cannot read the file. Then the checkpoint must be refused by the damaged
file's name, and a resumed run must pass it over for the older one. Its weights must be refused by
the same name if they, config.json or the manifest are damaged, and else be accepted.
"""

import contextlib
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

import train
from tests.checkpoints import unreadable
from tests.runs import SMALL
from training.checkpoint.manifest import MANIFEST, MODEL_FILES, verify_checkpoint, verify_weights
from training.host.errors import UserError
from training.parallel.world import join_world
from training.run import decide

ROOT = Path(__file__).parents[1]
SECTOR = 512


def storm_of_damage(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Damage `count` times; returns how often each file was damaged. Raises AssertionError if
    damage was not seen."""
    run, draws, seen = folder / "run", random.Random(seed), Counter()
    flags = [
        "--data",
        str(ROOT / "model.py"),
        "--output_dir",
        str(run),
        *SMALL,
        "--validation_sequences",
        "0",
    ]
    assert train.main([*flags, "--max_steps", "2", "--checkpoint_interval", "1"]) == 0
    older, newer = run / "step_00000001", run / "step_00000002"
    shutil.copytree(newer, folder / "undamaged")
    names = sorted(path.name for path in newer.iterdir())
    given = {
        "data": [str(ROOT / "model.py")],
        "output_dir": str(run),
        "resume": "auto",
        "device": "cpu",
    }
    with join_world("cpu") as world:
        for number in range(count):
            name = names[number % len(names)]
            is_unreadable = draws.random() < 0.2
            how = "unreadable" if is_unreadable else damage(newer / name, draws)
            with (
                unreadable(newer / name, name.endswith("s"))
                if is_unreadable
                else contextlib.nullcontext()
            ):
                with pytest.raises(UserError, match=name.replace(".", r"\.")):
                    verify_checkpoint(newer)
                if how != "deleted" and name in (*MODEL_FILES, MANIFEST):
                    with pytest.raises(UserError, match=name.replace(".", r"\.")):
                        verify_weights(newer)
                elif name not in MODEL_FILES:
                    verify_weights(newer)
                passed_over: dict[Path, str] = {}
                with pytest.MonkeyPatch.context() as patch:
                    note = lambda _, path, why, into=passed_over: into.update({path: why})  # noqa: E731
                    patch.setattr(decide.logger, "warning", note)
                    start = decide.decide(given, world).start
            assert start.checkpoint == older and name in passed_over[newer], (
                name,
                how,
                start,
                passed_over,
            )
            shutil.copyfile(folder / "undamaged" / name, newer / name)
            seen[name] += 1
        verify_checkpoint(newer)
    return dict(seen)


def damage(file: Path, draws: random.Random) -> str:
    """Change a file; returns the kind of change and its place."""
    content = file.read_bytes()
    place = draws.randrange(len(content))
    sector = content[place : place + SECTOR]
    other = draws.randrange(len(content))
    swapped = bytearray(content)
    swapped[place], swapped[other] = swapped[other], swapped[place]
    changed = {
        "truncated": content[:place],
        "lengthened": content + draws.randbytes(draws.randrange(1, 100)), "emptied": b"",
        "sector zeroed": content[:place] + bytes(len(sector)) + content[place + len(sector) :],
        "two bytes swapped": bytes(swapped),
    }  # fmt: skip
    how = draws.choice(["deleted", *changed, *["bit flipped"] * 6])
    if how == "deleted":
        file.unlink()
        return how
    if changed.get(how, content) == content:  # a sector of zeros, or two equal bytes
        how = "bit flipped"
    flipped = (
        content[:place] + bytes([content[place] ^ 1 << draws.randrange(8)]) + content[place + 1 :]
    )
    file.write_bytes(changed.get(how, flipped))
    return f"{how} at {place}"
