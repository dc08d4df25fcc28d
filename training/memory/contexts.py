"""Draws memory and seconds of steps by their context: `profile_memory.py --picture card.png`."""

import math
from collections.abc import Iterable
from pathlib import Path

from training.host.sizes import GIB
from training.memory.cost_model import fullest_stage
from training.memory.execution import Placement
from training.memory.machine import Rates
from training.memory.plan import Plan
from training.memory.planner import find_max_context, make_plan
from training.memory.step import Step
from training.plots.curves import save_picture

SHORTEST_DRAWN = 4096


def plan_contexts(step: Step, gpu_bytes: float, host_bytes: float, rates: Rates) -> dict[int, Plan]:
    """Returns the plans of contexts that double from 4,096 tokens on, and of the longest that fits,
    by their tokens.

    There are none where no context fits.
    """
    if not (longest := find_max_context(step, gpu_bytes, host_bytes)):
        return {}
    contexts = [min(SHORTEST_DRAWN, longest)]
    while 3 * contexts[-1] <= longest:
        contexts.append(2 * contexts[-1])
    return {
        n: make_plan(step.at(n), gpu_bytes, host_bytes, rates)
        for n in dict.fromkeys([*contexts, longest])
    }


def draw_contexts(path: Path, title: str, plans: dict[int, Plan]) -> None:
    """Writes a picture of plans by their contexts: GPU and host memory with their limits, and
    seconds per step.

    Beside the planned peak stands the peak of a step whose layers are all checkpointed, as most
    trainers run it.
    """
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(12, 5), layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    plan = next(iter(plans.values()))
    usual = {
        n: fullest_stage(p.step, p.step.unplanned(Placement(), loss_impl="chunked")).bytes
        for n, p in plans.items()
    }
    memory.plot(
        [*plans],
        gibs(usual.values()),
        "0.6",
        marker="x",
        label="GPU, every layer checkpointed, not planned",
    )
    memory.plot(
        [*plans], gibs(p.peak.bytes for p in plans.values()), "C0", marker="o", label="GPU, planned"
    )
    memory.plot(
        [*plans], gibs(p.host_bytes for p in plans.values()), "C1", marker="o", label="host, pinned"
    )
    for limit, color, label in (
        (plan.gpu_budget, "C0", "GPU's limit"),
        (plan.host_budget, "C1", "host's limit"),
    ):
        if math.isfinite(limit):
            memory.axhline(limit / GIB, color=color, linestyle="--", label=label)
    memory.set(ylabel="GiB", title="memory of a step", ylim=(0, None))
    memory.legend(fontsize=8)
    seconds.plot([*plans], [p.seconds for p in plans.values()], "C2", marker="o")
    for tokens, plan in plans.items():
        text = f"{plan.seconds:.3g} s" if plan.seconds < 1000 else f"{plan.seconds:,.0f} s"
        # Right below its point, where neither the rising curve nor an axis is.
        seconds.annotate(
            text, (tokens, plan.seconds), xytext=(6, -3), textcoords="offset points", va="top"
        )
    seconds.set(ylabel="s", title="seconds of a step", yscale="log")
    for axes in (memory, seconds):
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            [*plans], [f"{n:,}" for n in plans], rotation=45, ha="right", rotation_mode="anchor"
        )
        axes.set_xlabel("tokens of one text")
        axes.grid(alpha=0.3)
    memory.margins(x=0.08)
    seconds.margins(x=0.24, y=0.12)
    figure.suptitle(title)
    save_picture(figure, path)


def gibs(sizes: Iterable[float]) -> list[float]:
    return [size / GIB for size in sizes]
