"""Runs functions in several ranks of one process group, each a process of this machine."""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed.run
import torch.multiprocessing as mp
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from training.parallel.world import join_world

# Each process of pytest has a server that ranks are forked from. It imports these once, because
# that takes seconds.
multiprocessing.set_forkserver_preload(
    ["hypothesis", "pytest", "train", "torch._dynamo", "tests.ranks"]
)
# a rank whose garbage collection looked at the server's imports would copy their memory
gc.freeze()


def run_ranks(num_ranks: int, function: Callable, *args, device: str = "cpu", **sizes: int) -> None:
    """Call `function(world, *args)` in each rank, as under torchrun.

    Args:
        function: a function at the top level of a module.
        device, sizes: see `join_world`.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank raised an
            error, or was killed.
    """
    store = meeting_point()
    mp.start_processes(
        _call_in_rank,
        (num_ranks, store.port, function, args, device, sizes),
        num_ranks,
        start_method="forkserver",
    )


def start_torchrun(folder: Path, *arguments: str, forks: bool = True) -> multiprocessing.Process:
    """Start torchrun in a process that has imported it. Output and errors go to the ends of two
    files of a folder.

    Its ranks are forked from that process, with torch imported, if `forks`: CUDA does not start in
    a forked process.
    """
    process = multiprocessing.get_context("forkserver").Process(
        target=_torchrun, args=(folder, arguments, forks)
    )
    process.start()
    return process


def _torchrun(folder, arguments, forks):
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(Path(__file__).parents[1])
    if forks:
        subprocess_handler.Popen = _ForkedProgram
    torch.distributed.run.main(arguments)


class _ForkedProgram:
    """A Python program that torchrun starts, with the part of `subprocess.Popen` that torchrun
    calls."""

    def __init__(self, args, env, **_):
        self.args = args
        self._process = multiprocessing.get_context("fork").Process(
            target=_program, args=(args, env)
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode


def _program(words, env):
    """Run `python -u -m MODULE ...` with the session, the signals and the environment of a new
    program."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    sys.stdout.reconfigure(write_through=True)
    gc.freeze = gc.unfreeze = lambda: None
    sys.argv = list(words[words.index("-m") + 1 :])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def meeting_point() -> TCPStore:
    """Returns a store in this process, at which ranks meet, as torchrun has it.

    A port chosen for rank 0 in advance may be taken by another program: rank 0 would fail, and the
    others would wait half an hour for it.
    """
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def announce(rank: int, num_ranks: int, port: int, per_machine: int | None = None) -> None:
    """Tell `join_world` in this process its rank, and the port of the `meeting_point`; all ranks
    are on one machine."""
    per_machine = per_machine or num_ranks
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank % per_machine}",
        "WORLD_SIZE": f"{num_ranks}",
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": f"{per_machine}",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}",
    }
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def _call_in_rank(rank, num_ranks, port, function, args, device, sizes):
    announce(rank, num_ranks, port)
    gc.freeze = gc.unfreeze = lambda: None  # a run would thaw the server's imports when it ends
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import patch_interpreter

        patch_interpreter()
    with join_world(device, **sizes) as world:
        function(world, *args)
