"""A rank that dies: `torchrun --nproc_per_node=2 -m tests.training.parallel.dying_rank SIGKILL cpu`.

The arguments say how, and where. In a file of its own a rank imports no model, which would take seconds.
"""

import os
import signal
import sys
import time

from training.host.errors import UserError
from training.parallel.world import World, join_world


def die(world: World, death: str) -> None:
    """By a UserError all ranks die, else rank 1 does; the others then fail in a collective, or where rank 1 is killed,
    wait in an NCCL kernel, or on a CPU as if in one, where no SIGTERM reaches them. Or none dies before torchrun."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank != 1 and death != "UserError":
        time.sleep(600) if (death, world.device.type) == ("SIGKILL", "cpu") else world.sum(1.0)
    if world.rank == 1:
        print(time.time(), flush=True)
    if death == "with torchrun":
        time.sleep(600)
    if death == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"UserError": UserError, "RuntimeError": RuntimeError}[death](f"rank {world.rank} fails")


if __name__ == "__main__":
    # Where sizes are unlike, as on two machines with other flags each, no rank gets past `join_world`.
    size = 1 + int(os.environ["RANK"]) if sys.argv[1] == "unlike sizes" else 1
    with join_world(sys.argv[2], size) as world:
        die(world, sys.argv[1])
