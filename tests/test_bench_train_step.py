"""benchmarks/bench_train_step.py runs, as far as a CPU can tell: its steps, clocks and table."""

import json
import sys

import pytest

from benchmarks import bench_train_step


@pytest.mark.parametrize("flags", [[], ["--packed", "--steps", "3", "--in_order"]])
def test_times_every_step_but_the_first(flags, monkeypatch, capsys):
    arguments = ["--model_size", "tiny", "--context_length", "64", "--settings", "checkpointing", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["bench_train_step", *arguments, *flags])
    bench_train_step.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["checkpointing"]
    every = result["seconds_of_each_step"]
    assert len(every) == len(result["losses"]) == (3 if flags else 2)
    assert result["seconds"] == pytest.approx(sum(every[1:]) / len(every[1:]), abs=0.01)
