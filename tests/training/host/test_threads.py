"""training.host.threads: where no GPU computes, threads that wait spin for a short while."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from training.flags import answer_early
from training.host import threads
from training.host.threads import LIMITS

ROOT = Path(__file__).parents[3]
BUSY = """
import resource, time
from training.flags import answer_early
answer_early()
import torch

def seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, time.thread_time()

torch.set_num_threads(2)
x, y = torch.ones(2**16), torch.ones(2**10)
x.exp_()
began = seconds()
for _ in range(300):
    x.exp_()  # by two threads
    until = time.perf_counter() + 0.001
    while time.perf_counter() < until:
        y.fill_(1)  # by one, while the other waits
print(*(after - before for before, after in zip(began, seconds())))
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns a function that answers early on a machine with NVIDIA's driver or without, and what
    it then set."""

    def start(words, environment, driver, **options):
        monkeypatch.setattr(threads, "DRIVERS", (tmp_path,) if driver else (tmp_path / "none",))
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
        with mock.patch.dict(os.environ, environment):
            for name in {*LIMITS, "KMP_BLOCKTIME", "CUDA_VISIBLE_DEVICES"} - {*environment}:
                os.environ.pop(name, None)
            before = dict(os.environ)
            answer_early(**options)
            return {name: value for name, value in os.environ.items() if before.get(name) != value}

    return start


@pytest.mark.parametrize(("words", "environment", "driver", "limited"), [
    ("", {}, False, True), ("", {}, True, False), ("--device cpu", {}, True, True),
    ("--device cuda --device=cpu --lora 16", {}, True, True), ("--device cuda", {}, True, False),
    ("--device", {}, True, False), ("", {"CUDA_VISIBLE_DEVICES": ""}, True, True),
    ("", {"CUDA_VISIBLE_DEVICES": "-1"}, True, True),
    ("", {"CUDA_VISIBLE_DEVICES": "1"}, True, False),
    ("", {"RANK": "1"}, False, True),
    ("", {"OMP_WAIT_POLICY": "active"}, False, False), ("", {"GOMP_SPINCOUNT": "0"}, False, False),
    ("", {"KMP_BLOCKTIME": "200"}, False, False),
])  # fmt: skip
def test_spinning_is_limited_where_no_gpu_computes_and_nobody_chose(
    machine, words, environment, driver, limited
):
    assert machine(words, environment, driver) == (LIMITS if limited else {})
    assert machine(words, environment, driver, packages=["tqdm"]) == {}  # a command without torch


def test_a_thread_that_waits_takes_no_core():
    """Two threads take at most 1.5 times the time of one.

    It is 2 where the second spins as it waits, and 1.2 to 1.4 where it sleeps.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a thread on one core waits anyway")
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    said = subprocess.run(
        [sys.executable, "-c", BUSY],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    process, main_thread = map(float, said.split())
    assert process < 1.5 * main_thread, (process, main_thread)
