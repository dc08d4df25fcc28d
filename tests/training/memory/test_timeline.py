"""Phases of a step add up to its seconds, and say which work takes them."""

import pytest

from model import MODEL_SIZES
from training.memory.execution import Execution
from training.memory.machine import H200
from training.memory.planner import make_plan
from training.memory.timeline import format_timeline, timeline
from training.run.build import step_on_meta

GIB = 2**30


@pytest.mark.parametrize(("gpu", "host"), [(24, 100), (139, 1000)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_phases_are_the_steps_seconds_and_no_shorter_than_their_kernels(gpu, host, micro_batches):
    step = step_on_meta(
        MODEL_SIZES["4B"], 65_536, 1, micro_batches, Execution(attention_backend="cudnn")
    )
    plan = make_plan(step, gpu * GIB, host * GIB)
    phases = timeline(step, plan.execution, H200)
    assert sum(phase.times * phase.seconds for phase in phases) == pytest.approx(
        plan.seconds, rel=1e-12
    )
    for phase in phases:
        assert phase.seconds >= sum(phase.compute.values()) * (1 - 1e-12), phase
        assert phase.seconds >= 0 and phase.times >= 0
    by_name = {phase.name: phase for phase in phases}
    assert by_name["forward"].times == by_name["loss"].times == micro_batches
    assert by_name["gradients of later micro-batches"].times == micro_batches - 1
    # Causal attention reads half of T x T keys, in two products of 2 x heads x width FLOPs: 4096 x
    # T^2 x 2 per layer.
    flops = 36 * 2 * 4096 * 65_536**2
    assert by_name["forward"].compute["attention"] == pytest.approx(
        flops / H200["full forward"], rel=0.05
    )


def test_the_table_leaves_out_what_takes_no_time():
    step = step_on_meta(MODEL_SIZES["0.6B"], 8192, 1, 1, Execution(attention_backend="cudnn"))
    plan = make_plan(step, 80 * GIB, 100 * GIB)
    table = format_timeline(timeline(step, plan.execution, H200)).splitlines()
    assert [row.split("  ")[0] for row in table] == [
        "seconds of a step",
        "forward",
        "loss",
        "backward",
        "update",
    ]
    assert "attention" in table[0] and "adapters" not in table[0] and "choice" not in table[0]
    assert len({len(row) for row in table}) == 1  # columns are aligned
