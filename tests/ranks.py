"""Runs functions in several ranks of one process group, each a process of this machine."""

import gc
import multiprocessing
import os
from collections.abc import Callable

import torch.multiprocessing as mp
from torch.distributed import TCPStore

from training.parallel.world import join_world

# Each process of pytest has a server that ranks are forked from. It imports these once, because that takes seconds.
multiprocessing.set_forkserver_preload(["hypothesis", "pytest", "train", "torch._dynamo", "tests.ranks"])
gc.freeze()  # a rank whose garbage collection looked at the server's imports would copy their memory


def run_ranks(num_ranks: int, function: Callable, *args, device: str = "cpu", **sizes: int) -> None:
    """Call `function(world, *args)` in each rank, as under torchrun.

    Args:
        function: a function at the top level of a module.
        device, sizes: see `join_world`.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank raised an error, or was killed.
    """
    store = meeting_point()
    mp.start_processes(
        _call_in_rank, (num_ranks, store.port, function, args, device, sizes), num_ranks, start_method="forkserver"
    )


def meeting_point() -> TCPStore:
    """Returns a store in this process, at which ranks meet, as torchrun has it.

    A port chosen for rank 0 in advance may be taken by another program: rank 0 would fail, and the others would wait
    half an hour for it.
    """
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def announce(rank: int, num_ranks: int, port: int) -> None:
    """Tell `join_world` in this process its rank, and the port of the `meeting_point`."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{num_ranks}"}
    os.environ |= {"LOCAL_WORLD_SIZE": f"{num_ranks}", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def _call_in_rank(rank, num_ranks, port, function, args, device, sizes):
    announce(rank, num_ranks, port)
    gc.freeze = gc.unfreeze = lambda: None  # a run would thaw the server's imports when it ends
    with join_world(device, **sizes) as world:
        function(world, *args)
