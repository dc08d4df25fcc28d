"""The processes of a run: the group, its mesh of data, context and tensor ranks, and sums."""

import datetime
import functools
import gc
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.host.errors import UserError, whole_number
from training.host.processes import GRACE_SECONDS, show_error
from training.host.torch_internals import flatten_mesh, set_timeout, unflatten_mesh

# A rank waits for the others until the first step: some tokenize or read more slowly.
START_SECONDS = 3600.0
WAIT_SECONDS = 30.0  # without others, until a rank says so
POLL_SECONDS = 0.5  # time between two looks at the other ranks
STOPPED_SECONDS = 5.0  # time from a process's SIGSTOP to the warning


@dataclass(frozen=True)
class World:
    """Place of this process among all processes of the run.

    The ranks form a mesh of three axes. Along "data" each rank has its own sequences, along
    "context" ranks share each sequence, and along "tensor" they share each matrix. For example,
    among 8 ranks with context and tensor of size 2, rank 6 stands at (1, 1, 0): it shares its
    sequences with ranks 4, 5 and 7, and its data_rank is 1 of 2.

    Weights and their optimizer state are sharded over data and context. With replicate 2, half of
    these ranks shard one copy, and the other half another.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None  # None in a world of one process
    replicate: int = 1  # copies of the weights

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank("data")

    @property
    def data_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["data"].size()

    @property
    def context_rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank("context")

    @property
    def context_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["context"].size()

    @property
    def num_machines(self) -> int:
        """Machines of equally many processes."""
        return self.size // whole_number("LOCAL_WORLD_SIZE", self.size)

    @property
    def tensor_size(self) -> int:
        return 1 if self.mesh is None else self.mesh["tensor"].size()

    @functools.cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The axes data and context as one: FSDP2 shards parameters over it.

        With copies it is cut into the axes replicate and shard. Neighbouring ranks, on one machine,
        shard a copy.
        """
        assert self.mesh is not None, "one process shards nothing"
        flat = flatten_mesh(self.mesh["data", "context"], "fsdp")
        sizes = self.replicate, flat.size() // self.replicate
        return flat if self.replicate == 1 else unflatten_mesh(flat, sizes, ("replicate", "shard"))

    def sum(
        self, *values: float, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> list[float]:
        """Returns each value summed over the ranks, in float64."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def min(self, *values: float) -> list[float]:
        """Returns each value's least over the ranks, in float64."""
        return self.sum(*values, operation=dist.ReduceOp.MIN)

    def limit_waits(self, seconds: float) -> None:
        """Makes collectives fail, from now on, where a rank waits so long for another."""
        if self.mesh is not None:
            for group in (
                dist.group.WORLD,
                *self.fsdp_mesh.get_all_groups(),
                *self.mesh.get_all_groups(),
            ):
                set_timeout(group, seconds)

    def broadcast(self, value):
        """Returns the main rank's value, on every rank; it may be anything that pickles."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, device=self.device)
        return values[0]


def check_same_on_all_ranks(ours: dict, world: World) -> None:
    """Refuses settings or data, by name, that differ from the main rank's."""
    for name, value in world.broadcast(ours).items():
        if ours[name] != value:
            raise UserError(
                f"{name} is {ours[name]} on rank {world.rank} and {value} on rank 0; "
                "start all ranks alike"
            )


def make_mesh(
    device_type: str, size: int, context_parallel_size: int = 1, tensor_parallel_size: int = 1
) -> DeviceMesh:
    """Returns the mesh of `World`.

    Neighbouring ranks, on one machine, share matrices first and sequences second.
    """
    shape = (
        size // (context_parallel_size * tensor_parallel_size),
        context_parallel_size,
        tensor_parallel_size,
    )
    return init_device_mesh(device_type, shape, mesh_dim_names=("data", "context", "tensor"))


def check_sizes(
    size: int,
    local_size: int,
    context_parallel_size: int,
    tensor_parallel_size: int,
    replicate: int,
) -> None:
    sizes = (
        f"context_parallel_size {context_parallel_size} x "
        f"tensor_parallel_size {tensor_parallel_size}"
    )
    advice = "start another number by torchrun --nproc_per_node, or lower one of them"
    if size % (context_parallel_size * tensor_parallel_size):
        raise UserError(f"{sizes} must divide the number of processes, {size}; {advice}")
    if size > local_size and local_size % (context_parallel_size * tensor_parallel_size):
        raise UserError(
            f"{sizes} must divide each machine's processes, {local_size}: no sequence or matrix is "
            f"shared between machines; {advice}"
        )
    check_replicate(size, local_size, tensor_parallel_size, replicate)


def check_replicate(size: int, local_size: int, tensor_parallel_size: int, replicate: int) -> None:
    """Raises UserError unless so many copies of the weights have equally many processes, and whole
    machines or parts."""
    if size % (replicate * tensor_parallel_size):
        raise UserError(
            f"replicate {replicate} x tensor_parallel_size {tensor_parallel_size} must divide the "
            f"number of processes, {size}; start another number of them, or lower replicate"
        )
    machines = max(1, size // local_size)
    if replicate % machines and machines % replicate:
        raise UserError(
            f"replicate {replicate} must be a multiple or a divisor of the {machines} machines, so "
            "that none of the copies lies on a machine and a half; "
            f"give {machines} for a copy per machine"
        )


def common_divisors(numbers: Iterable[int]) -> list[int]:
    """Returns the numbers that divide all of `numbers`, ascending: [1, 2, 4] for 8 and 12."""
    largest = math.gcd(*numbers)
    return [n for n in range(1, largest + 1) if largest % n == 0]


def choose_device(device: str, local_rank: int, local_size: int) -> torch.device:
    """Returns this process's device, and makes it the current device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda, but PyTorch sees no CUDA GPU here; "
            "use --device cpu, or check nvidia-smi"
        )
    if device == "cpu" or not torch.cuda.is_available():
        # torchrun allows each process one thread;
        # share the cores among this machine's processes instead.
        if local_size > 1 or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise UserError(
            f"more processes than the {count} GPUs here: torchrun --nproc_per_node={count} at most"
        )
    place = torch.device("cuda", local_rank)
    torch.cuda.set_device(place)
    return place


class Launched(NamedTuple):
    """Place of this process among the processes that torchrun starts."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def read_environment() -> Launched:
    """Returns torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without torchrun 0, 1,
    0 and 1.

    Raises UserError for values that torchrun does not give: ranks would wait for others that do not
    exist.
    """
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    values = {name: whole_number(name, default) for name, default in defaults.items()}
    rank, size, local_rank, local_size = launched = Launched(*values.values())
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        raise UserError(
            f"{shown} in the environment do not fit: a rank is below the number of ranks; "
            "start by torchrun, or unset them"
        )
    return launched


@contextmanager
def join_world(
    device: str, context_parallel_size: int = 1, tensor_parallel_size: int = 1, replicate: int = 1
) -> Iterator[World]:
    """Joins the process group that torchrun announced (NCCL on GPUs, gloo on CPUs), or makes a
    world of one process.

    A rank that fails shows its error, and all ranks end within seconds. One exception: where a rank
    is killed that was alone on its machine, or alone in a PID namespace as of a container, other
    ranks notice only by NCCL or gloo.

    Args:
        device: "auto" (a GPU if there is one), "cuda" or "cpu".

    Raises:
        UserError: CUDA is asked for and not found; this machine has fewer GPUs than processes; the
            sizes do not divide the processes, or the processes of each of several machines; or
            ranks were given different sizes.
    """
    # Before CUDA starts: less fragmentation.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    launched = read_environment()
    sizes = {
        "context_parallel_size": context_parallel_size,
        "tensor_parallel_size": tensor_parallel_size,
        "replicate": replicate,
    }
    check_sizes(launched.size, launched.local_size, *sizes.values())
    place = choose_device(device, launched.local_rank, launched.local_size)
    left = threading.Event()
    warn_of_slurm()
    if launched.size == 1:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_in_thread([], left)
        yield World(launched.rank, launched.size, place)
        left.set()
        return
    with joined_group(launched, place, sizes, left):
        mesh = make_mesh(place.type, launched.size, context_parallel_size, tensor_parallel_size)
        world = World(launched.rank, launched.size, place, mesh, replicate)
        world.limit_waits(START_SECONDS)
        yield world
        dist.barrier()  # no rank ends while another is still at work


@contextmanager
def joined_group(
    launched: Launched, place: torch.device, sizes: dict[str, int], left: threading.Event
) -> Iterator[None]:
    """Has the process group while this context lasts; an error in it ends all ranks.

    Sets `left` at the end. Raises UserError, on all ranks, if they have other `sizes`.
    """
    ranks = meet(launched.rank, launched.size, place, sizes)
    first = launched.rank - launched.local_rank
    machine = ranks[first:][: launched.local_size]
    namespace = own_namespace()
    neighbours = [pid for pid, pid_namespace, _ in machine if pid_namespace == namespace]
    machines = Machines() if launched.size > len(neighbours) else None
    end_in_thread(neighbours, left, machines)
    try:
        for name in sizes:
            numbers = {rank_sizes[name] for _, _, rank_sizes in ranks}
            if len(numbers) > 1:
                raise UserError(f"ranks differ in {name}: {sorted(numbers)}; start all ranks alike")
        yield
    except Exception as error:
        end_by(error, launched.rank == 0, machines)
    left.set()
    gc.collect()  # frees objects that refer to the group: gloo may abort where any are left
    dist.destroy_process_group()


def end_in_thread(
    pids: list[int], left: threading.Event, machines: "Machines | None" = None
) -> None:
    """Runs `end_with` in a thread, for the process that started this one."""
    arguments = pids, os.getppid(), left, machines
    threading.Thread(target=end_with, args=arguments, daemon=True).start()


def warn_of_slurm() -> None:
    """Warns that Slurm started several tasks, none of which knows the other tasks."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if (
        "WORLD_SIZE" not in os.environ
        and tasks != "1"
        and os.environ.get("SLURM_PROCID", "0") == "0"
    ):
        print(
            f"Slurm has {tasks} tasks (SLURM_NTASKS), but this process runs alone: there is no "
            "WORLD_SIZE; start a torchrun per machine (srun --ntasks-per-node=1 torchrun ...), or "
            "ask for one task",
            file=sys.stderr,
            flush=True,
        )


def own_namespace() -> str:
    """Returns the PID namespace: in a container, a number means another process than outside."""
    return os.readlink("/proc/self/ns/pid")


def meet(
    rank: int, size: int, place: torch.device, sizes: dict[str, int]
) -> list[tuple[int, str, dict[str, int]]]:
    """Joins the process group; returns (process, its PID namespace, `sizes`) of each rank.

    Raises:
        UserError: torchrun has not said where to meet. Where ranks do not come, the process ends
            with an error.
    """
    if not (os.environ.get("MASTER_ADDR") and 0 < whole_number("MASTER_PORT", 0) < 2**16):
        raise UserError(
            f"WORLD_SIZE is {size} in the environment, without a MASTER_ADDR and a MASTER_PORT "
            "from 1 to 65535; start by torchrun, or unset it"
        )
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    told = (
        f"rank {rank} still waits for the other {size - 1} of WORLD_SIZE, at "
        f"MASTER_ADDR:MASTER_PORT {where}"
    )
    waiting = threading.Timer(WAIT_SECONDS, print, [told], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    ranks: list = [None] * size
    start = datetime.timedelta(seconds=START_SECONDS)
    gpu = place.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo", device_id=place if gpu else None, timeout=start
        )
        dist.all_gather_object(ranks, (os.getpid(), own_namespace(), sizes))
    except RuntimeError as error:
        why = str(error).splitlines()[0][:300]
        end_by(
            UserError(
                f"the ranks did not meet: one of them has ended, or cannot be reached ({why})"
            ),
            rank == 0,
        )
    waiting.cancel()
    return ranks


class Machines:
    """Shares between machines that a rank has ended, by a key in the store where all ranks met."""

    def __init__(self):
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        self.key = f"a rank has ended in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"

    def report_end(self) -> None:
        """Says that a rank of this machine has ended, unless the store is gone."""
        with suppress(dist.DistError):
            self.store.set(self.key, "")

    def has_ended(self) -> bool:
        """Whether a rank of any machine has ended, or the machine that has the store is gone."""
        try:
            return self.store.check([self.key])
        except dist.DistError:
            return True


def end_with(
    pids: list[int], parent: int, left: threading.Event, machines: Machines | None
) -> None:
    """Ends this process soon after its launcher or any other rank has ended.

    A rank that outlived the launcher would write checkpoints while a new run writes its own. A
    thread of its own runs this: if a rank died, the main thread may wait in an NCCL kernel for
    good, and Python's signal handlers with it.

    Args:
        pids: processes of this machine's ranks.
        parent: process of the launcher.
        left: is set once this rank has left the group as it should; then the process goes on.
        machines: tells of ranks that ended on other machines; None: there are none.
    """
    polls_stopped = 0
    while os.getppid() == parent and all(os.path.exists(f"/proc/{pid}") for pid in pids):
        if left.wait(POLL_SECONDS):
            return
        polls_stopped = polls_stopped + 1 if any(map(is_stopped, pids)) else 0
        if polls_stopped == STOPPED_SECONDS / POLL_SECONDS:
            warn_of_stopped(pids)
        if machines and machines.has_ended():
            break
    if machines:
        machines.report_end()
    if not left.wait(GRACE_SECONDS):
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether a process has got SIGSTOP or SIGTSTP, and no SIGCONT since."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def warn_of_stopped(pids: list[int]) -> None:
    """Names this machine's stopped ranks; only the first rank that runs prints."""
    stopped = {pid: local_rank for local_rank, pid in enumerate(pids) if is_stopped(pid)}
    first = next((pid for pid in pids if pid not in stopped), None)
    for pid, local_rank in stopped.items() if first == os.getpid() else ():
        print(
            f"\nlocal rank {local_rank}, process {pid}, was stopped (SIGSTOP, Ctrl-Z or a "
            f"debugger), and all ranks wait for it: kill -CONT {pid} lets it go on",
            file=sys.stderr,
            flush=True,
        )


def end_by(error: Exception, is_main: bool, machines: Machines | None = None) -> NoReturn:
    """Shows the error that ended this rank, tells other machines of it, and exits.

    No destructor runs: it might wait for other ranks.
    """
    show_error(error, is_main)
    sys.stdout.flush()
    if machines:
        machines.report_end()
    os._exit(1)
