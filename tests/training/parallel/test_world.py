"""The mesh of data, context and tensor ranks: one process, four processes over gloo, and ranks that
die."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ranks import announce, meeting_point, run_ranks, start_torchrun
from tests.training.data.test_packing import make_documents, make_loader
from training.host.errors import UserError
from training.parallel import world
from training.parallel.world import World, join_world, make_mesh

DOCUMENTS = make_documents([40, 90, 15, 60, 50])


def test_one_process_needs_no_process_group():
    with join_world("cpu") as world:
        assert (world.rank, world.size, world.data_rank, world.data_size) == (0, 1, 0, 1)
        assert world.mesh is None and not dist.is_initialized()


def test_processes_share_the_cores_but_one_keeps_the_threads_that_it_was_given(monkeypatch):
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    for threads, local_size in ((None, 1), ("1", 1), ("1", 4), (None, 16)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        world.choose_device("cpu", 0, local_size)
    assert given == [8, 2, 1]


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 4)])
def test_sizes_that_do_not_divide_the_processes_are_refused(sizes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = (
        f"context_parallel_size {sizes[0]} x tensor_parallel_size {sizes[1]} must divide .* "
        "processes, 4; start"
    )
    with pytest.raises(UserError, match=message), join_world("cpu", *sizes):
        pass


def test_sequences_are_not_shared_between_machines(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = (
        "context_parallel_size 4 x tensor_parallel_size 1 must divide each machine's processes, 2: "
        "no sequence"
    )
    with pytest.raises(UserError, match=message), join_world("cpu", 4):
        pass


def test_a_lone_process_among_several_tasks_is_warned(monkeypatch, capfd):
    """srun without torchrun starts as many runs as it has tasks, each alone; the first task says
    so."""
    for tasks, others, warned in (("8", {}, True), ("8", {"SLURM_PROCID": "3"}, False), ("1", {}, False),
                                  ("8", {"WORLD_SIZE": "1"}, False)):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.delenv("WORLD_SIZE", raising=False)
            for name, value in {"SLURM_NTASKS": tasks, **others}.items():
                patch.setenv(name, value)
            with join_world("cpu"):
                pass
        error = capfd.readouterr().err
        assert (
            ("Slurm has 8 tasks" in error and "torchrun per machine" in error)
            if warned
            else not error
        )


def test_an_environment_that_torchrun_did_not_set_is_refused(monkeypatch):
    good = {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
    }
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: pytest.fail("the ranks would meet")
    )
    for broken, message in (
        (
            {"MASTER_ADDR": ""},
            "WORLD_SIZE is 2 in the environment, without a MASTER_ADDR and a MASTER_PORT",
        ),
        *(
            ({"MASTER_PORT": port}, "without a MASTER_ADDR and a MASTER_PORT from 1 to 65535")
            for port in ("0", "65536")
        ),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x' in the environment, not a whole number"),
        *(
            ({name: value}, f"{name} is {value[:40]!r} in the environment, not a whole number")
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            for value in ("", "x", "-1", "1.0", " 1", "1_0", "\u0661", "9" * 5000)
        ),
        (
            {"RANK": "2"},
            "^RANK 2, WORLD_SIZE 2, LOCAL_RANK 1, LOCAL_WORLD_SIZE 2 in the environment do not fit",
        ),
        ({"RANK": "0"}, "do not fit"),  # below LOCAL_RANK
        ({"WORLD_SIZE": "0"}, "do not fit"),
        ({"WORLD_SIZE": "1"}, "do not fit"),
        ({"LOCAL_RANK": "2"}, "do not fit"),
        ({"LOCAL_WORLD_SIZE": "0"}, "do not fit"),
        ({"LOCAL_WORLD_SIZE": "3"}, "do not fit"),
    ):
        with monkeypatch.context() as patch:
            for name, value in {**good, "MASTER_PORT": "29500", **broken}.items():
                patch.setenv(name, value)
            message = message if message.startswith("^") else re.escape(message)
            with pytest.raises(UserError, match=message) as error, join_world("cpu"):
                pass
            assert len(str(error.value)) < 300


def test_a_rank_that_waits_for_others_says_so(monkeypatch, capfd):
    def wait(*_, **__):
        time.sleep(0.5)
        raise RuntimeError("nobody came")

    def end(error, *_):
        raise error

    monkeypatch.setattr(world, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(world, "end_by", end)
    monkeypatch.setattr(dist, "init_process_group", wait)
    for name, value in {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "here",
        "MASTER_PORT": "9",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="did not meet"), join_world("cpu"):
        pass
    assert (
        capfd.readouterr().err
        == "rank 0 still waits for the other 1 of WORLD_SIZE, at MASTER_ADDR:MASTER_PORT here:9\n"
    )


DYING = "-m", "tests.training.parallel.dying_rank"


def fail(folder, *program):
    """Run a program that fails in two ranks; returns their output, their errors, and torchrun's."""
    process = start_torchrun(
        folder, "--standalone", "--nproc_per_node=2", *program, forks="cuda" not in program
    )
    process.join(120)
    assert process.exitcode == 1
    return (folder / "output").read_text(), *(folder / "errors").read_text().split(
        "closing signal SIGTERM", 1
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gpus=2))])
@pytest.mark.parametrize(("death", "rank", "message"), [
    ("UserError", 0, "error: rank 0 fails"),
    ("RuntimeError", 1, "RuntimeError: rank 1 fails"),
    ("SIGKILL", 1, None),
    ("in the last barrier", 1, None),
])  # fmt: skip
def test_a_rank_that_dies_ends_all_within_seconds(death, rank, message, device, tmp_path):
    """The output has no other rank's error, and ends with torchrun's summary, where the error
    stands again."""
    died, ranks, torchruns = fail(tmp_path, *DYING, death, device)
    assert died, ranks
    assert time.time() - float(died) < 20
    cause = torchruns.split("Root Cause (first observed failure)")[1]
    assert f"rank      : {rank} " in cause and (message or "Signal 9 (SIGKILL)") in cause
    assert re.findall(r"\w+: rank \d fails", ranks) == ([message] if message else [])
    assert (
        ranks.count("Traceback") == (death == "RuntimeError")
        and "closed by peer" not in ranks + torchruns
    )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ((*DYING, "unlike sizes", "cpu"),
         "error: ranks differ in context_parallel_size: [1, 2]; start all ranks alike"),
        (("-m", "training.plots"), "error: run is missing: output_dir of a run"),
    ],
)  # fmt: skip
def test_what_ranks_refuse_before_they_have_met_is_shown_once_and_by_torchrun(
    module, message, tmp_path
):
    _, ranks, torchruns = fail(tmp_path, *module)
    assert (
        ranks.count(message) == 1
        and message in torchruns.split("Root Cause (first observed failure)")[1]
    )


def meet_a_rank_that_leaves(rank, port, log):
    announce(rank, 2, port)
    if rank == 0:
        dist.init_process_group("gloo")
        os._exit(0)
    sys.stderr = log.open("w", buffering=1)
    with join_world("cpu"):
        os._exit(0)


def test_a_rank_that_leaves_before_all_have_met_is_one_line(tmp_path):
    store, log = meeting_point(), tmp_path / "log"
    context = mp.get_context("forkserver")
    ranks = [
        context.Process(target=meet_a_rank_that_leaves, args=(rank, store.port, log))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert ranks[1].exitcode == 1
    assert (
        log.read_text().startswith("error: the ranks did not meet")
        and log.read_text().count("\n") == 1
    )


def test_the_ranks_of_two_machines_end_together(tmp_path):
    """Ranks 0 and 1 run on one machine, 2 and 3 on the other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"--rdzv_endpoint=127.0.0.1:{free.getsockname()[1]}"
    words = (
        "--nnodes=2",
        "--nproc_per_node=2",
        "--rdzv_backend=c10d",
        endpoint,
        *DYING,
        "SIGKILL",
        "cpu",
    )
    agents = [start_torchrun(tmp_path, *words) for _ in range(2)]
    for agent in agents:
        agent.join(120)
    died = (tmp_path / "output").read_text()
    assert [agent.exitcode for agent in agents] == [1, 1] and time.time() - float(died) < 20


def test_ranks_end_with_their_torchrun():
    """Kill torchrun while rank 1 sleeps and rank 0 waits for it: both must end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    torchrun = subprocess.Popen(
        [*command, "-m", "tests.training.parallel.dying_rank", "with torchrun", "cpu"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert float(torchrun.stdout.readline()) > 0
    torchrun.kill()
    torchrun.communicate(timeout=60)  # ends once no rank has its output open


def in_containers(rank: int, port: int, folder: Path) -> None:
    """A rank whose process number and PID namespace are its container's own."""
    announce(rank, 2, port)
    readlink, exists, own = os.readlink, os.path.exists, 2**30 + rank
    os.readlink = lambda path: f"pid:[{rank}]" if path == "/proc/self/ns/pid" else readlink(path)
    os.getpid, os.path.exists = lambda: own, lambda path: path == f"/proc/{own}" or exists(path)
    with join_world("cpu") as world:
        time.sleep(3 + world.rank)
        assert world.sum(1.0) == [2]
    (folder / f"{rank}").touch()


def test_ranks_in_pid_namespaces_of_their_own(tmp_path):
    """No rank sees the process of the other, and none takes it for dead."""
    store = meeting_point()
    mp.start_processes(in_containers, (store.port, tmp_path), 2, start_method="forkserver")
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def wait_long_and_short(world: World, folder: Path) -> None:
    """Rank 1 comes a second and a half late: in time at first, and too late once waits are limited
    to a second."""
    assert len({*map(timeout_of, groups_of(world))}) == 1 and timeout_of(dist.group.WORLD) == 3600
    time.sleep(1.5 * world.rank)
    assert world.sum(1.0) == [2]
    world.limit_waits(1)
    assert {*map(timeout_of, groups_of(world))} == {1}
    time.sleep(1.5 * world.rank)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            world.sum(1.0)
        (folder / "seen").touch()
    os._exit(0)


def groups_of(world: World) -> list:
    return [dist.group.WORLD, world.fsdp_mesh.get_group(), *world.mesh.get_all_groups()]


def timeout_of(group) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_waits_are_long_before_the_first_step_and_short_after(tmp_path):
    run_ranks(2, wait_long_and_short, tmp_path)
    assert (tmp_path / "seen").exists()


def test_four_ranks():
    run_ranks(4, check_four_ranks, context_parallel_size=2)


def check_four_ranks(world: World) -> None:
    check_meshes(world)
    check_sequences(world)


def check_meshes(world: World) -> None:
    """Compare each rank's place in the mesh, and the ranks that FSDP2 shards its parameters
    over."""
    assert world.mesh.mesh.tolist() == [[[0], [1]], [[2], [3]]]
    assert (world.data_rank, world.data_size) == (world.rank // 2, 2)
    assert world.fsdp_mesh.mesh.tolist() == [0, 1, 2, 3] and world.fsdp_mesh.get_group().size() == 4
    assert world.sum(1.0, 2.0**60 + world.rank) == [4, 2.0**62] and world.min(world.rank) == [0]
    shared = World(world.rank, 4, world.device, make_mesh("cpu", 4, 2, 2))
    assert (shared.data_rank, shared.data_size) == (0, 1)
    assert shared.fsdp_mesh.mesh.tolist() == [[0, 2], [1, 3]][world.rank % 2]
    alone = World(world.rank, 4, world.device, make_mesh("cpu", 4))
    assert (alone.data_rank, alone.data_size) == (world.rank, 4)


def check_sequences(world: World) -> None:
    """Ranks 0 and 1 have the same sequences, ranks 2 and 3 the others."""
    loader = make_loader(DOCUMENTS, 32, 1, rank=world.data_rank, world_size=world.data_size)
    taken = torch.cat([batch.input_ids for batch in loader.next_step(2)])
    all_taken = [torch.empty_like(taken) for _ in range(4)]
    dist.all_gather(all_taken, taken)
    assert torch.equal(all_taken[0], all_taken[1]) and torch.equal(all_taken[2], all_taken[3])
    [one] = make_loader(DOCUMENTS, 32, 4).next_step()
    assert sorted(torch.cat(all_taken[::2]).tolist()) == sorted(one.input_ids.tolist())


def test_a_rank_that_is_stopped_is_named(monkeypatch, capfd):
    monkeypatch.setattr(world, "STOPPED_SECONDS", 0.5)
    rank, left, error = subprocess.Popen(["sleep", "60"]), threading.Event(), ""
    os.kill(rank.pid, signal.SIGSTOP)
    thread = threading.Thread(
        target=world.end_with, args=([os.getpid(), rank.pid], os.getppid(), left, None)
    )
    thread.start()
    deadline = time.time() + 20
    while "stopped" not in error and time.time() < deadline:
        time.sleep(0.1)
        error += capfd.readouterr().err
    left.set()
    thread.join()
    rank.kill()
    rank.wait()
    assert (
        f"local rank 1, process {rank.pid}, was stopped" in error
        and f"kill -CONT {rank.pid} lets it go" in error
    )
