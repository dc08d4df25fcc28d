"""Functions run by several ranks of one process group, each a process of this machine."""

import gc
import multiprocessing
import os
from collections.abc import Callable

import torch.multiprocessing as mp
from torch.distributed import TCPStore

from training.parallel.world import join_world

# Ranks are forked from a server, one for each process of pytest, which has imported these once: that takes seconds.
multiprocessing.set_forkserver_preload(["hypothesis", "pytest", "train", "tests.ranks"])
gc.freeze()  # in the server, after these: a rank that collected their garbage would copy all their memory


def run_ranks(num_ranks: int, function: Callable, *args, device: str = "cpu", **sizes: int) -> None:
    """Call `function(world, *args)` in each rank, as under torchrun.

    Args:
        function: of the top level of a module.
        device, sizes: as of `join_world`.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank raised an error, or was killed.
    """
    store = meeting_point()
    mp.start_processes(
        _call_in_rank, (num_ranks, store.port, function, args, device, sizes), num_ranks, start_method="forkserver"
    )


def meeting_point() -> TCPStore:
    """Where ranks meet, in this process, as torchrun has it. A port that is chosen for rank 0 may be taken meanwhile:
    then rank 0 fails, and the others wait for it for half an hour.
    """
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def announce(rank: int, num_ranks: int, port: int) -> None:
    """Tell `join_world` in this process which rank it is, and the port of the `meeting_point`."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{num_ranks}"}
    os.environ |= {"LOCAL_WORLD_SIZE": f"{num_ranks}", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def _call_in_rank(rank, num_ranks, port, function, args, device, sizes):
    announce(rank, num_ranks, port)
    with join_world(device, **sizes) as world:
        function(world, *args)
