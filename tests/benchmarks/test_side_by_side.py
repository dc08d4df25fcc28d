"""benchmarks.side_by_side: every command has GPUs and host memory of its own, and none outlives the
limit."""

import json
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import side_by_side
from benchmarks.side_by_side import Job, in_order, run_all

FAKE = """#!/bin/sh
echo "start $CUDA_VISIBLE_DEVICES $*" >> {events}
for word; do starts=$word; done
wait="until [ \\$(grep -c ^start {events}) -ge $starts ]; do sleep 0.02; done"
case $2 in
    torch.distributed.run) setsid sh -c "$wait" & trap "kill $!; exit 1" TERM ;;
    *) sh -c "$wait" & ;;
esac
echo $! >> {events}.children; wait $!
echo "end $CUDA_VISIBLE_DEVICES" >> {events}
echo "a warning without an end \\c" >&2
echo '{{"starts": '$starts'}}'
test $starts != 0
"""


@pytest.fixture
def events(tmp_path, monkeypatch):
    """Returns a file of what starts and ends.

    A command ends once as many commands have started as its last word says; one that waits for none
    ends in an error.

    A rank of torchrun is in a session of its own.
    """
    fake, found = tmp_path / "python", tmp_path / "events"
    fake.write_text(FAKE.format(events=found))
    fake.chmod(0o755)
    monkeypatch.setattr(side_by_side.sys, "executable", str(fake))
    return found


def replay(lines):
    """Returns the most commands and GPUs that were busy at once; fails if two commands had one
    GPU."""
    busy, most = [], (0, 0)
    for line in lines:
        event, gpus, *_ = line.split(" ")
        if event == "start":
            assert not {*gpus.split(",")} & {gpu for own in busy for gpu in own.split(",")}
            busy.append(gpus)
            most = max(most, (len(busy), len(",".join(busy).split(","))))
        else:
            busy.remove(gpus)
    assert not busy
    return most


def test_commands_share_no_gpu_and_no_port(events, tmp_path):
    jobs = [Job("two", "torchrun --nproc_per_node=2 a 2", 0, 2), Job("pair", "torchrun b 2", 0, 2)]
    jobs += [Job(f"one{i}", f"python c{i} 6", 0) for i in range(5)]
    ended = [*run_all(jobs, ["4", "5", "6", "7"], 1e3, 60, tmp_path / "logs")]
    lines = events.read_text().splitlines()
    assert replay(lines) == (4, 4)
    starts = sorted([line for line in lines if line.startswith("start ")][:2])
    assert (
        starts[0] == "start 4,5 -m torch.distributed.run --master_port=29500 --nproc_per_node=2 a 2"
    )
    assert starts[1] == "start 6,7 -m torch.distributed.run --master_port=29502 b 2"
    assert {job.name: found["starts"] for job, found, _ in ended} == {
        job.name: int(job.command.split()[-1]) for job in jobs
    }
    beside = {job.name: number for job, _, number in ended}
    assert beside["two"] >= 1 and beside["pair"] >= 1 and max(beside.values()) == 3
    assert json.loads((tmp_path / "logs/two.log").read_text()) == {"starts": 2}
    assert (tmp_path / "logs/two.err").read_text() == "a warning without an end "


def test_host_memory_that_is_pinned_fits_the_machine(events, tmp_path):
    large = [Job(f"large{i}", f"python --host_budget 100GB large{i} 3", 0) for i in range(3)]
    pair = Job("pair", "torchrun --host_budget 100GB pair 1", 0, 2)
    assert [job.gib for job in (*large, pair, Job("small", "python a", 0))] == [
        106,
        106,
        106,
        212,
        6,
    ]
    small = Job("small", "python small 3", 0)
    [*run_all([*large, small], ["0", "1", "2", "3"], 230, 60, tmp_path)]
    lines = events.read_text().splitlines()
    assert replay(lines) == (3, 3)  # two large ones and the small one
    assert lines.index(next(line for line in lines if "large2" in line)) > 3
    events.unlink()
    last = Job("last", "python --host_budget 100GB last 2", 0)
    [*run_all([pair, last], ["0", "1", "2", "3"], 100, 60, tmp_path)]
    assert replay(events.read_text().splitlines()) == (1, 2)  # more than there is runs alone


def test_nothing_outlives_the_limit_or_the_caller(events, tmp_path, capsys):
    hangs, fails = Job("hangs", "torchrun 30", 0), Job("fails", "python 0", 0)
    others = [
        fails,
        Job("long", "python 30", 3),
        Job("two", "python 0", 0, 2),
    ]  # no time, no second GPU is left
    with closing(run_all([hangs, *others], ["0"], 1e3, 0.7, tmp_path)) as running:
        assert [(job.name, found) for job, found, _ in running] == [("hangs", {})]
    said = capsys.readouterr().out
    assert "killed after " in said and said.count("left out, ") == 3
    with (
        pytest.raises(KeyboardInterrupt),
        closing(run_all([fails, hangs], ["0", "1"], 1e3, 60, tmp_path)) as running,
    ):
        assert next(running)[:2] == (fails, {})
        signal.raise_signal(signal.SIGTERM)  # the caller is told to end
    said = capsys.readouterr().out
    assert (
        said.startswith("a warning without an end\nfailed with status 1")
        and "killed after " in said
    )
    children = events.with_suffix(".children").read_text().split()
    assert len(children) == 3
    for _ in range(100):  # a process that was killed ends soon
        time.sleep(0.02 * any(map(is_alive, children)))
    assert not any(map(is_alive, children))


def is_alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_first_jobs_that_fill_the_time_run_longest_first():
    jobs = [
        Job("a", "", 10),
        Job("b", "", 30),
        Job("c", "", 20, 2),
        Job("d", "", 90),
        Job("e", "", 5),
    ]
    assert [job.name for job in in_order(jobs, 80)] == ["c", "b", "a", "d", "e"]
    assert [job.name for job in in_order(jobs, float("inf"))] == ["c", "d", "b", "a", "e"]
    assert [job.name for job in in_order(jobs, 0)] == ["a", "b", "c", "d", "e"]
