"""metrics.jsonl: a resumed run keeps its lines up to the checkpoint, and a full disk costs a line."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.run.metrics import MetricsFile, is_spike, set_aside


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_past_the_checkpoint_and_damaged_ones_are_dropped(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    damaged = ["\0\0", "7", '{"step": 1e999}', "[" * 200_000, "{}"]
    path.write_bytes("\n".join([*lines[:2], *damaged, lines[2], lines[0][:-5]]).encode() + b"\xff")
    metrics = MetricsFile(path, from_step=2)
    assert steps_in(path) == [1, 2]  # on disk before the first step ends
    assert caplog.messages == [f"{path}: 6 of 9 lines are damaged and were dropped"]
    metrics.write(step=3)
    assert steps_in(path) == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_earlier_runs_lines_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for run in (1, 2, 3):
        set_aside(path)
        MetricsFile(path, from_step=0).write(step=run)
    assert [steps_in(path.with_name(f"metrics{n}.jsonl")) for n in ("", ".1", ".2")] == [[3], [1], [2]]


def test_a_rewrite_that_fails_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')

    def fail(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk on fire"):
        MetricsFile(path, from_step=1)
    assert steps_in(path) == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_line_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", from_step=0)
    metrics._file = Path("/dev/full").open("w")  # noqa: SIM115
    for step in (1, 2):
        metrics.write(step=step)
    error = "[Errno 28] No space left on device"
    assert caplog.messages == [f"step {step} cannot be written to /dev/full: {error}" for step in (1, 2)]


def test_a_spike_stands_out_of_what_came_before():
    recent = [3.0 + 0.01 * (i % 5) for i in range(20)]
    assert is_spike(3.2, recent) and not is_spike(3.06, recent)
    assert not is_spike(9.0, recent[:19]) and not is_spike(float("nan"), recent)


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    """A list gives its largest number; other values are left out. A stand-in is the writer: the package is optional."""
    calls = []
    writer = SimpleNamespace(add_scalar=lambda *call: calls.append(call), flush=lambda: calls.append("flushed"))

    def make(folder, purge_step):
        calls.append((folder, purge_step))
        return writer

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    metrics = MetricsFile(tmp_path / "metrics.jsonl", from_step=4, tensorboard=True)
    metrics.write(step=5, loss=2.5, peak_memory_gib=[1.0, 3.0], selected_blocks="8", validation_loss=None)
    assert calls == [(str(tmp_path / "tensorboard"), 5), ("loss", 2.5, 5), ("peak_memory_gib", 3.0, 5), "flushed"]
    assert steps_in(tmp_path / "metrics.jsonl") == [5]
