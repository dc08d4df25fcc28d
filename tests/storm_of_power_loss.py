"""Losses of power: `python -m tests.storm power_loss --count 10000`.

Saves, an export, stored log-probabilities, a prepared set, its change, and a small file that is
replaced are recorded once each, and then the states rebuilt in which a disk may be left after any
call; see power_loss.py. In each state what was promised must be there bit for bit, nothing damaged
may be taken for whole, and the same command must come to its end and leave nothing of the stopped
one.
"""

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.checkpoints import save_checkpoint
from tests.power_loss import Recording, read_tree, recording, states, write_tree
from tests.runs import weights_of_another_shape
from training.checkpoint import files as checkpoint_files
from training.checkpoint import manifest, saver
from training.checkpoint.files import checkpoints, clear_leftovers, latest_checkpoint, step_of
from training.checkpoint.manifest import verify_checkpoint, verify_weights
from training.data import prepare as preparing
from training.data.prepare import prepare
from training.data.prepared import INDEX, PreparedStore, is_prepared, verify
from training.data.tokenizer import load_tokenizer
from training.export.__main__ import main as export
from training.host.errors import UserError
from training.host.files import LOCK, making, replace_file
from training.logprobs.__main__ import main as log_probabilities
from training.objectives.stored import Stored, digest_of

REPEATED = 10  # a command is repeated in one of so many states


class Scenario(NamedTuple):
    """A recording, and a check of (a state's folder, promises, draws) by AssertionError."""

    recorded: Recording
    check: Callable[[Path, list, random.Random], None]


def storm_of_power_loss(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Looks at `count` states, or as many as there are; returns how many of each scenario."""
    draws, seen, left = random.Random(seed), dict[str, int](), count
    for number, (name, make) in enumerate(SCENARIOS.items()):
        scenario = make(folder / name)
        share = left // (len(SCENARIOS) - number)
        seen[name] = 0
        for time, tree in states(scenario.recorded, draws, share):
            root = folder / "state"
            write_tree(tree, root)
            try:
                with quickly():
                    scenario.check(root, scenario.recorded.promised(time), draws)
            except Exception as error:
                names = {
                    path: None if content is None else len(content)
                    for path, content in tree.items()
                }
                raise AssertionError(
                    f"{name}, after call {time}: {error!r}\n{json.dumps(names, indent=1)}"
                ) from error
            shutil.rmtree(root)
            seen[name] += 1
        left -= seen[name]
    return seen


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Without output, and without threads that start for a few bytes."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(manifest, "in_threads", lambda function, values: [*map(function, values)])
        patch.setattr(saver.pieces, "in_threads", lambda function, values: [*map(function, values)])
        with contextlib.redirect_stderr(io.StringIO()):
            yield


def root_in(folder: Path) -> Path:
    root = folder / "root"
    root.mkdir(parents=True)
    return root


# Checkpoints


def state_of(step: int, variant: float = 0.0) -> dict:
    """Returns a small state. Its largest tensor is written past the page cache, its others through
    it."""
    weights = {
        "embed_tokens.weight": torch.full((300, 256), step + variant),
        "norm.weight": torch.full((7,), variant),
    }
    moments = {name: {"exp_avg": torch.full((5,), 2 * step + variant)} for name in weights}
    return {"weights": weights, "optimizer_state": moments, "model_config": {"model_type": "qwen3"}}


def saves(folder: Path) -> Scenario:
    """Saves, deletions of older ones, a step that is saved again, a kill in a save, and a disk
    without room."""
    root = root_in(folder)
    run, known = root / "runs" / "one", dict[int, list[dict]]()

    def save(
        step: int, variant: float = 0.0, loss: float = 1.0, keep: int = 2, last: Path | None = None
    ) -> None:
        writer = saver.Saver(run, keep, last)
        writer.begin(step, **state_of(step, variant), trainer_state={"validation_loss": loss})
        writer.finish()
        known.setdefault(step, []).append(read_tree(run / f"step_{step:08d}"))
        recorded.promise((step, len(known[step]) - 1))

    def save_without_room(step: int) -> None:
        """Saves as a run does that goes on, on a disk that has room when a single checkpoint is
        left."""
        with pytest.MonkeyPatch.context() as patch:
            free = lambda _: shutil._ntuple_diskusage(  # noqa: E731
                2**40, 0, 0 if len(checkpoints(run)) > 1 else 2**40
            )
            patch.setattr(checkpoint_files.shutil, "disk_usage", free)
            save(step, last=latest_checkpoint(run, {}))

    def killed_save(step: int, module, where: str, variant: float = 0.0) -> None:
        """Ends a save as SIGKILL does, which cleans nothing up. Syncs of names are then syncs of
        the run's folder."""
        usual = getattr(module, where)

        def call_or_die(*given):
            if where == "flush" and given != (run,):
                return usual(*given)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(module, where, call_or_die)
            patch.setattr(saver, "clear_leftovers", at_most_once(clear_leftovers))
            writer = saver.Saver(run, keep=2)
            writer._began = 0.0
            patch.setattr(writer, "_start", writer._write)
            writer.begin(step, **state_of(step, variant), trainer_state={"validation_loss": 1.0})
        if (path := run / f"step_{step:08d}").exists():
            known.setdefault(step, []).append(read_tree(path))

    with recording(root) as recorded:
        save(1)
        save(2, loss=0.5)
        save(3)
        save(3, variant=0.25)
        killed_save(3, checkpoint_files, "flush", variant=0.5)
        killed_save(4, saver, "write_manifest")
        save(4)
        killed_save(5, saver, "delete_old")
        clear_leftovers(run)
        killed_save(6, checkpoint_files, "flush")
        save_without_room(7)
        save(8, loss=0.25, keep=1)
        killed_save(9, checkpoint_files, "flush")
        save_without_room(10)

    def check(state: Path, promised: list, draws: random.Random) -> None:
        run = state / "runs" / "one"
        if not run.is_dir():
            assert not promised, "the folder of checkpoints is gone"
            return
        if any(run.glob(".step_*")):
            check_checkpoints(run, [], known)
        clear_leftovers(run)  # as a run does at its start
        check_checkpoints(run, promised, known)
        assert not [*run.glob(".step_*")], "leftovers stay"
        if draws.randrange(REPEATED) == 0:
            verify_checkpoint(save_checkpoint(run, 11, **state_of(11), trainer_state={}))

    return Scenario(recorded, check)


def at_most_once(function: Callable) -> Callable:
    """Returns `function`, which does nothing when it is called again."""
    calls = []

    def call(*arguments):
        calls.append(arguments)
        return function(*arguments) if len(calls) == 1 else None

    return call


def check_checkpoints(run: Path, promised: list, known: dict[int, list[dict]]) -> None:
    """Requires verified folders to equal saved ones, and the newest to be no older than the
    promise."""
    step, variant = promised[-1] if promised else (0, 0)
    newest = 0
    for path in checkpoints(run):
        saved = known[step_of(path)]
        content = read_tree(path)
        is_whole = content in saved
        with contextlib.suppress(UserError):
            verify_checkpoint(path)
            assert is_whole, f"{path.name} is damaged and verifies"
        if is_whole:
            newest = max(newest, step_of(path))
            assert step_of(path) != step or saved.index(content) >= variant, (
                f"{path.name} is an earlier one"
            )
        with contextlib.suppress(UserError):
            verify_weights(path)
            names = "model.safetensors", "config.json"
            assert any(all(content.get(name) == each[name] for name in names) for each in saved), (
                "damaged weights"
            )
    assert newest >= step, f"step {step} was complete, {newest} is the newest that is"
    passed_over: dict[Path, str] = {}
    while (latest := latest_checkpoint(run, passed_over)) is not None:
        try:
            verify_checkpoint(latest)
            break
        except UserError as error:
            passed_over[latest] = str(error)
    assert latest is None or step_of(latest) == newest, f"{latest} is taken, {newest} is the newest"


# Folders that are made at once


def exports(folder: Path) -> Scenario:
    """An export, into a folder that is not there yet, and one beside what a killed export has
    left."""
    root = root_in(folder)
    source = weights_of_another_shape(
        folder / "source", num_hidden_layers=1, hidden_size=32, intermediate_size=64
    )
    target = root / "models" / "one"
    with recording(root) as recorded:
        leave_half(target)
        assert export([str(source), str(target)]) == 0
        recorded.promise("whole")
    whole = read_tree(target)

    def check(state: Path, promised: list, draws: random.Random) -> None:
        def again(folder: Path) -> None:
            assert export([str(source), str(folder)]) == 0

        check_folder(
            state / "models" / "one",
            whole,
            promised,
            again if draws.randrange(REPEATED) == 0 else None,
        )

    return Scenario(recorded, check)


def leave_half(target: Path) -> None:
    """Leaves what a process leaves that was killed while it filled the folder."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.suppress(KeyboardInterrupt),
        making(target) as temporary,
    ):
        (temporary / "model.safetensors").write_bytes(b"half" * 500)
        (temporary / "folder").mkdir()
        (temporary / "folder" / "more").write_bytes(b"half")
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        raise KeyboardInterrupt


def check_folder(
    target: Path, whole: dict, promised: list, again: Callable[[Path], None] | None
) -> None:
    """Requires a folder to be whole or empty; then, that it can be made and nothing else stays
    beside it."""
    content = read_tree(target) if target.is_dir() else {}
    content.pop(LOCK, None)
    assert content in ({}, whole), f"{target.name} is neither whole nor empty"
    assert content == whole or not promised, f"{target.name} was whole, and is gone"
    if content == whole or (target / LOCK).exists():
        return
    if again is None:
        with making(target) as temporary:
            (temporary / "model.safetensors").write_bytes(b"whole")
        assert os.listdir(target) == ["model.safetensors"]
    else:
        again(target)
        assert read_tree(target) == whole
    assert os.listdir(target.parent) == [target.name], (
        f"leftovers stay: {os.listdir(target.parent)}"
    )


def log_probability_files(folder: Path) -> Scenario:
    root = root_in(folder)
    source = weights_of_another_shape(
        folder / "source", num_hidden_layers=1, hidden_size=32, intermediate_size=64
    )
    (folder / "a.jsonl").write_text('{"text": "one and two"}\n' * 90)
    command = ["--data", str(folder / "a.jsonl"), "--context_length", "64", "--device", "cpu"]
    target = root / "stored" / "one"
    with recording(root) as recorded:
        leave_half(target)
        assert log_probabilities([str(source), str(target), *command]) == 0
        recorded.promise("whole")
    whole = read_tree(target)

    def check(state: Path, promised: list, draws: random.Random) -> None:
        def again(folder: Path) -> None:
            assert log_probabilities([str(source), str(folder), *command]) == 0

        target = state / "stored" / "one"
        check_folder(
            target, whole, promised, again if draws.randrange(10 * REPEATED) == 0 else None
        )
        with contextlib.suppress(UserError):
            assert Stored.read(target).weights == digest_of(source)

    return Scenario(recorded, check)


# Prepared sets


class Pool:
    """Makes parts in this process, where they are recorded."""

    def __init__(self, workers, context, initializer, arguments):
        initializer(*arguments)

    def submit(self, function, *arguments):
        task = Future()
        task.set_result(function(*arguments))
        return task

    def shutdown(self, cancel_futures):
        pass


@contextlib.contextmanager
def in_small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "ProcessPoolExecutor", Pool)
        patch.setattr(preparing, "PART_BYTES", 300)
        yield


def write_corpus(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(5):
        (corpus / f"{number}.txt").write_text(f"the text of file {number}, " * 40)
    return corpus


def prepared_sets(folder: Path) -> Scenario:
    """A set of which the first half was made by a stopped command."""
    root, corpus = root_in(folder), write_corpus(folder)
    with in_small_parts(), recording(root) as recorded:
        stop_in_the_midst(corpus, root / "sets" / "one")
        prepare(corpus, root / "sets" / "one", "bytes")
        recorded.promise("whole")
    return Scenario(recorded, checker_of_sets(corpus, [read_tree(root / "sets" / "one")]))


def stop_in_the_midst(corpus: Path, out: Path) -> None:
    class Stopped(Pool):
        def submit(self, function, path, extents):
            if extents[0].path.endswith("2.txt"):
                path.with_suffix(".tokens.new").write_bytes(b"half")
                raise KeyboardInterrupt
            return super().submit(function, path, extents)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(preparing, "ProcessPoolExecutor", Stopped)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a kill deletes nothing
        prepare(corpus, out, "bytes")


def changed_sets(folder: Path) -> Scenario:
    """A finished set, of which some files change."""
    root, corpus = root_in(folder), write_corpus(folder)
    out = root / "sets" / "one"
    with in_small_parts():
        prepare(corpus, out, "bytes")
        before = read_tree(out)
        (corpus / "1.txt").write_text("another text of the second file " * 30)
        (corpus / "3.txt").unlink()
        with recording(root) as recorded:
            prepare(corpus, out, "bytes")
            recorded.promise("whole")
    return Scenario(recorded, checker_of_sets(corpus, [read_tree(out), before]))


def checker_of_sets(
    corpus: Path, wholes: list[dict]
) -> Callable[[Path, list, random.Random], None]:
    """Returns a check that sets are one of `wholes`, the newest first, wherever they are taken for
    whole."""
    tokenizer = load_tokenizer("bytes")

    def check(state: Path, promised: list, draws: random.Random) -> None:
        out = state / "sets" / "one"
        is_whole = False
        with contextlib.suppress(UserError):
            if is_prepared(out):
                PreparedStore(out, tokenizer, 256)
                verify(out)
                is_whole = True
        content = read_tree(out) if out.is_dir() else {}
        indices = [whole[INDEX] for whole in wholes]
        assert content.get(INDEX) in (None, *indices), f"{INDEX} is damaged"
        if INDEX in content:
            assert is_whole, "a part of the set is damaged or gone"
            expected = wholes[indices.index(content[INDEX])]
            parts = [part["name"] for part in json.loads(content[INDEX])["parts"]]
            files = {
                name: each for name, each in expected.items() if name.partition(".")[0] in parts
            }
            assert files.items() <= content.items(), "the set verifies and is another"
        assert content.get(INDEX) == indices[0] or not promised, "the set was whole, and is gone"
        if draws.randrange(REPEATED) == 0:
            with in_small_parts():
                prepare(corpus, out, "bytes")
            again = {name: each for name, each in read_tree(out).items() if name != LOCK}
            assert again == {name: each for name, each in wholes[0].items() if name != LOCK}, (
                "it does not go on"
            )

    return check


# Small files


def small_files(folder: Path) -> Scenario:
    root = root_in(folder)
    (root / "run").mkdir()
    contents = [f"content {number} ".encode() * 900 * (number + 1) for number in range(4)]
    (root / "run" / "config.json").write_bytes(contents[0])
    with recording(root) as recorded:
        for number in range(1, 4):
            replace_file(root / "run" / "config.json", contents[number].decode())
            recorded.promise(number)

    def check(state: Path, promised: list, draws: random.Random) -> None:
        content = (state / "run" / "config.json").read_bytes()
        assert content in contents[promised[-1] if promised else 0 :], (
            "the file is damaged, or an earlier one"
        )

    return Scenario(recorded, check)


SCENARIOS = {
    "small files": small_files, "exports": exports, "log-probabilities": log_probability_files,
    "prepared sets": prepared_sets, "changed sets": changed_sets, "saves": saves,
}  # fmt: skip
