"""A rank that dies: `torchrun --nproc_per_node=2 -m tests.training.parallel.dying_rank SIGKILL
cpu`.

The arguments are the kind of death and the device. A separate file imports no model, which would
take seconds.
"""

import os
import signal
import sys
import time

from training.host.errors import UserError
from training.parallel.world import World, join_world


def die(world: World, death: str) -> None:
    """Die: all ranks by a UserError, rank 1 alone by another death; or sleep until torchrun itself
    is killed.

    The other ranks then fail in a collective. Where rank 1 is killed they wait in an NCCL kernel
    that no SIGTERM ends; on a CPU they sleep in its place.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world.sum(1.0)  # from here on no rank ends by the SIGTERM that follows another's death
    if world.rank != 1 and death not in ("UserError", "in the last barrier"):
        time.sleep(600) if (death, world.device.type) == ("SIGKILL", "cpu") else world.sum(1.0)
    if death == "in the last barrier":
        if world.rank == 0:
            return  # to the barrier
        time.sleep(1)
    if world.rank == 1:
        print(time.time(), flush=True)
    if death == "with torchrun":
        time.sleep(600)
    if death in ("SIGKILL", "in the last barrier"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"UserError": UserError, "RuntimeError": RuntimeError}[death](f"rank {world.rank} fails")


if __name__ == "__main__":
    # Unlike sizes, as on two machines with different flags, stop every rank in `join_world`.
    size = 1 + int(os.environ["RANK"]) if sys.argv[1] == "unlike sizes" else 1
    with join_world(sys.argv[2], size) as world:
        die(world, sys.argv[1])
