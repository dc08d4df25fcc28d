"""Signals at random moments: `python -m tests.storm signals --count 100 --ranks 2`.

A run of `train.py --resume auto` gets one or two signals, in one rank or in all, and is started
again until it ends. Four of five signals come after the run has begun. A rank that had begun must
end with 128 + the signal's number, within SECONDS_TO_SAVE and without a traceback, and no step may
be lost. The last checkpoint must equal an undisturbed run's bit for bit.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.storm import FLAGS, INTERVAL, ROOT, SECONDS, STEPS, last_step, start, wait
from training.checkpoint.files import checkpoints, step_of
from training.checkpoint.manifest import verify_checkpoint

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
SECONDS_TO_SAVE = 20.0
BEGUN = "config: "  # a run's log has it once signals are noted


def storm_of_signals(
    folder: Path, count: int, ranks: int, seed: int, seconds: float = SECONDS, steps: int = STEPS
) -> dict:
    """Send signals `count` times; returns what was seen. Raises AssertionError if a run lost a step
    or ended badly."""
    draws, seen, runs = random.Random(seed), Counter(), 0
    flags = [
        "--data",
        str(ROOT / "model.py"),
        "--max_steps",
        str(steps),
        "--checkpoint_interval",
        str(INTERVAL),
    ]
    flags += [*FLAGS.split(), "--resume", "auto", "--output_dir"]
    whole, log = folder / "whole", folder / "log"
    assert wait(start([*flags, str(whole)], ranks, log)) == [0] * ranks, log.read_text()
    while sum(seen.values()) - seen["whole runs"] < count:
        run, before = folder / f"run{runs}", log.stat().st_size
        processes = start([*flags, str(run)], ranks, log)
        is_after_start, deadline = (
            draws.random() < 0.8,
            time.monotonic() + draws.uniform(0, seconds),
        )
        while (
            is_after_start
            and BEGUN not in log.read_text()[before:]
            and all(p.is_alive() for p in processes)
        ):
            time.sleep(0.01)
            deadline = time.monotonic() + draws.uniform(0, seconds)
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            time.sleep(0.002)
        targets = processes[: draws.choice([1, ranks])]
        for number in draws.sample(SIGNALS, draws.choice([1, 1, 2])):
            for process in targets:
                if process.is_alive():
                    with contextlib.suppress(ProcessLookupError):  # it may end in between
                        os.kill(process.pid, number)
            time.sleep(draws.uniform(0, 0.1))
        for process in processes:
            process.join(SECONDS_TO_SAVE)
        said = log.read_text()[before:]
        has_begun = (
            BEGUN in said
        )  # before that, Python's own handlers may end a rank, and others wait to meet it
        for process in processes:
            assert not (has_begun and process.is_alive()), (
                f"it runs on after {SECONDS_TO_SAVE} s: {run}"
            )
            process.kill()
        codes = wait(processes)
        if (
            f"step_{steps:08}" in said
        ):  # the last checkpoint is complete: a signal may end Python's own end
            for name in ("model.safetensors", "optimizer.safetensors"):
                ours, theirs = (checkpoints(each)[-1] / name for each in (run, whole))
                assert ours.read_bytes() == theirs.read_bytes(), (
                    f"{ours} is not what an undisturbed run saves"
                )
            seen["whole runs"] += 1
            runs += 1
            continue
        assert "Traceback" not in said, said[-10_000:]
        if has_begun:
            stopped = {128 + number for number in SIGNALS}
            assert stopped.issuperset(codes), f"exit statuses {codes}:\n{said[-10_000:]}"
        seen["saved and ended" if has_begun else "had not begun"] += 1
        found = checkpoints(run)
        for path in found:
            verify_checkpoint(path)
        newest = max(map(step_of, found), default=0)
        assert newest == last_step(run), (
            f"{last_step(run)} steps were taken, {newest} is the newest"
        )
    return seen
