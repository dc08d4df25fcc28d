"""Commands that run side by side on one machine, each on GPUs of its own, as far as host memory
goes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import ROOT

FIRST_PORT = 29_500  # torchrun's on the machine's first GPU; on the second it is the next
LEAST_GIB = 6.0  # host memory that a command takes beside what it pins
# seconds that torchrun has to end its ranks, which no signal to its process group reaches
GRACE = 10.0


@dataclass(frozen=True)
class Job:
    name: str  # of its log
    command: str
    seconds: int  # about what it takes
    gpus: int = 1

    @property
    def gib(self) -> float:
        """Host memory that the command may take, by its --host_budget, which each rank has."""
        budget = re.search(r"--host_budget (\d+)GB", self.command)
        return self.gpus * (LEAST_GIB + (float(budget[1]) if budget else 0.0))


@dataclass
class Running:
    job: Job
    gpus: list[str]
    port: int  # of torchrun
    ends: float  # it is killed then
    log: Path  # stdout; stderr is in the file with .err
    beside: int = 0  # the most commands that ran at the same time
    began: float = field(default_factory=time.monotonic)
    folder: tempfile.TemporaryDirectory = field(default_factory=tempfile.TemporaryDirectory)

    def __post_init__(self) -> None:
        words = [
            str(self.written) if word == "FILE" else word for word in shlex.split(self.job.command)
        ]
        launcher = [sys.executable]
        if words[0] == "torchrun":
            launcher += ["-m", "torch.distributed.run", f"--master_port={self.port}"]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("w") as out, self.log.with_suffix(".err").open("w") as errors:
            self.process = subprocess.Popen(
                [*launcher, *words[1:]],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def written(self) -> Path:
        """The command's FILE."""
        return Path(self.folder.name) / "line.json"

    def end(self) -> dict:
        """Kills what is left of the command, and returns the keys of its JSON lines; {} where it
        failed."""
        failed = self.process.poll()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        lines = self.log.read_text(errors="replace").splitlines()
        lines += [self.written.read_text()] if self.written.exists() else []
        self.folder.cleanup()
        found: dict = {}
        for text in lines:
            with suppress(ValueError):
                if isinstance(value := json.loads(text), dict):
                    found |= value
        how = {None: "killed", 0: "ended"}.get(failed, f"failed with status {failed}")
        if failed:
            print(self.log.with_suffix(".err").read_text(errors="replace").rstrip()[-300:])
        print(
            f"{how} after {time.monotonic() - self.began:.0f} s: {self.job.command}; {self.log}",
            flush=True,
        )
        return found if failed == 0 else {}


def in_order(jobs: list[Job], room: float) -> list[Job]:
    """Returns the first jobs that fill `room` GPU seconds, by GPUs, then the longest first; behind
    them the others.

    Jobs of two GPUs would wait for two at once, and a long job that starts last has others wait for
    it.
    """
    chosen, rest = list[Job](), list[Job]()
    for job in jobs:
        room -= job.seconds * job.gpus
        (chosen if room >= 0 else rest).append(job)
    return sorted(chosen, key=lambda job: (-job.gpus, -job.seconds)) + rest


def run_all(
    jobs: Iterable[Job], gpus: list[str], gib: float, limit: float, logs: Path
) -> Iterator[tuple[Job, dict, int]]:
    """Runs jobs side by side. Yields each that ends, the keys of its JSON lines, and the most that
    ran beside it.

    Args:
        gpus: names for CUDA_VISIBLE_DEVICES; [""] runs one job after another without a GPU.
        gib: the host's memory. A job waits until what runs leaves as much as it may take, or runs
            alone.
        limit: seconds from now. A job that would end later is left out, and what runs is killed.
        logs: folder of what each command prints.
    """
    began, free, waiting, running = time.monotonic(), list(gpus), list(jobs), list[Running]()
    logs.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            for job in [*waiting]:
                left = began + limit - time.monotonic()
                if left < job.seconds or job.gpus > len(gpus):
                    print(f"left out, {left:.0f} s and {len(gpus)} GPUs are left, and it takes "
                          f"{job.seconds} s of "
                          f"{job.gpus}: {job.command}", flush=True)  # fmt: skip
                    waiting.remove(job)
                elif len(free) >= job.gpus and (
                    not running or job.gib + sum(r.job.gib for r in running) <= gib
                ):
                    waiting.remove(job)
                    own = [free.pop(0) for _ in range(job.gpus)]
                    port = FIRST_PORT + gpus.index(own[0])
                    running.append(Running(job, own, port, began + limit, logs / f"{job.name}.log"))
                    for other in running:
                        other.beside = max(other.beside, len(running) - 1)
            for each in [*running]:
                if each.process.poll() is not None or time.monotonic() > each.ends:
                    found = each.end()
                    running.remove(each)
                    free = sorted(free + each.gpus)
                    yield each.job, found, each.beside
            time.sleep(0.05)
    finally:  # after Ctrl+C and SIGTERM too
        for each in running:
            each.end()
        signal.signal(signal.SIGTERM, before)
