"""Kills at random moments, as many as are asked for: `python -m tests.storm --count 100 --ranks 2`.

The command `train.py --resume auto` is started again and again. SIGKILL ends some or all of its
processes at a random moment of starting, training or saving; half of the kills come while a save
goes on. After each kill, every folder named as a checkpoint must verify, and the newest must not be
older than before: only the steps since then are lost. A run that reaches its end must equal an
undisturbed run bit for bit, and leave the same files. Then another run begins.

`python -m tests.storm signals --count 100` sends signals, `damage --count 500` damages checkpoints,
`power_loss --count 10000` rebuilds what a loss of power leaves, and `bad_input --count 1000`
generates bad input of all commands.
"""

import argparse
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import train
from tests.ranks import announce, meeting_point
from tests.storm_of_damage import storm_of_damage
from tests.storm_of_input import storm_of_input
from tests.storm_of_power_loss import storm_of_power_loss
from training.checkpoint.files import checkpoints, step_of
from training.checkpoint.manifest import verify_checkpoint
from training.run.stopping import exit_with

ROOT = Path(__file__).parents[1]
STALL_SECONDS = 300.0  # a run that starts and saves nothing for so long hangs
SECONDS_TO_END = 20.0  # torchrun would have ended the peers of a dead rank by then
KINDS = "kills", "signals", "damage", "power_loss", "bad_input"
INTERVAL, STEPS = 2, 30  # steps between checkpoints, and of a run
SECONDS = 6.0  # a kill comes within so many
FLAGS = (
    "--context_length 64 --batch_size 2 --warmup_steps 2 --sample_tokens 0 --validation_sequences "
    "4 --device cpu"
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="?", default="kills", choices=KINDS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of a run that is killed or signalled"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--optimizer_state", default="float32", help="train.py's flag, of the runs that are killed"
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder, count, seed = Path(name), arguments.count, arguments.seed
        if arguments.kind == "kills":
            print(storm(folder, count, arguments.ranks, seed, state=arguments.optimizer_state))
        elif arguments.kind == "signals":
            from tests.storm_of_signals import storm_of_signals  # imports this module

            print(storm_of_signals(folder, count, arguments.ranks, seed))
        elif arguments.kind == "damage":
            print(storm_of_damage(folder, count, seed))
        elif arguments.kind == "power_loss":
            logging.disable(logging.WARNING)
            print(storm_of_power_loss(folder, count, seed))
        else:
            seen = storm_of_input(folder, count, seed)
            for case in seen.pop("bad"):
                print(*case, sep="\n")
            print(seen)


def storm(
    folder: Path, count: int, ranks: int, seed: int, seconds: float = SECONDS, steps: int = STEPS,
    state: str = "float32",
) -> dict:  # fmt: skip
    """Kill `count` times; returns what was seen. Raises AssertionError if anything was lost or
    damaged."""
    draws = random.Random(seed)
    flags = [
        "--data",
        str(ROOT / "model.py"),
        "--max_steps",
        str(steps),
        "--checkpoint_interval",
        str(INTERVAL),
    ]
    flags += [*FLAGS.split(), "--optimizer_state", state, "--resume", "auto", "--output_dir"]
    whole, seen = (
        folder / "whole",
        {"kills": 0, "while saving": 0, "before the first checkpoint": 0, "whole runs": 0},
    )
    assert wait(start([*flags, str(whole)], ranks, folder / "log")) == [0] * ranks, (
        folder / "log"
    ).read_text()
    run, newest, taken = folder / "run0", 0, 0
    while seen["kills"] < count:
        processes = start([*flags, str(run)], ranks, folder / "log")
        began, in_save = time.monotonic(), draws.random() < 0.5
        deadline = began + draws.uniform(0, seconds)
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            time.sleep(0.002)
        while (
            in_save
            and any(process.is_alive() for process in processes)
            and not any(run.glob(".step_*.tmp"))
        ):
            time.sleep(0.001)
            assert_not_stalled(processes, began, folder / "log")
        time.sleep(draws.uniform(0, 0.05))
        if not any(process.is_alive() for process in processes):
            assert wait(processes) == [0] * ranks, (folder / "log").read_text()
            compare(run, whole)
            seen["whole runs"] += 1
            run, newest = folder / f"run{seen['whole runs']}", 0
            continue
        for process in processes[draws.randrange(ranks) :] if draws.random() < 0.5 else processes:
            process.kill()
        for process in processes:
            process.join(SECONDS_TO_END)
            process.kill()  # a rank may wait to meet a dead peer
        wait(processes)
        seen["kills"] += 1
        seen["while saving"] += any(run.glob(".step_*.tmp"))
        found = checkpoints(run)
        for path in found:
            verify_checkpoint(path)
        newest_now = max(map(step_of, found), default=0)
        taken = last_step(run)
        assert newest_now >= newest, f"step {newest} was there, {newest_now} is the newest"
        # A step's checkpoint is begun once the one before is complete.
        assert taken - newest_now < 2 * INTERVAL + 1, (
            f"{taken} steps were taken, {newest_now} is the newest"
        )
        newest = newest_now
        seen["before the first checkpoint"] += newest == 0
    return seen


def start(argv: list[str], ranks: int, log: Path) -> list:
    store, context = meeting_point(), multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=train_in_rank, args=(r, ranks, store.port, argv, log))
        for r in range(ranks)
    ]
    for process in processes:
        process.start()
        process.store = store  # kept for as long as the processes live
    return processes


def train_in_rank(rank: int, ranks: int, port: int, argv: list[str], log: Path) -> None:
    announce(rank, ranks, port)
    faulthandler.register(signal.SIGUSR2, file=log.open("a"))  # asked for by `assert_not_stalled`
    torch.set_num_threads(1)
    torch.set_num_threads = lambda _: (
        None
    )  # threads of one process would wait for each other on a busy machine
    sys.stdout = sys.stderr = log.open("a")
    exit_with(train.main(argv))


def assert_not_stalled(processes: list, began: float, log: Path) -> None:
    """Raise AssertionError, with every rank's stack, if nothing has been saved for
    STALL_SECONDS."""
    if time.monotonic() < began + STALL_SECONDS:
        return
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR2)
    time.sleep(1)
    raise AssertionError(f"nothing was saved for {STALL_SECONDS} s:\n{log.read_text()[-10_000:]}")


def wait(processes: list) -> list[int]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def compare(run: Path, whole: Path) -> None:
    """Require equal weights, masters and moments in both last checkpoints, and the same names of
    files."""
    ours, theirs = (sorted(path.name for path in folder.iterdir()) for folder in (run, whole))
    assert ours == theirs, f"{ours} are there, and of an undisturbed run {theirs}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (checkpoints(folder)[-1] / name for folder in (run, whole))
        assert ours.read_bytes() == theirs.read_bytes(), (
            f"{ours} is not what an undisturbed run saves"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
