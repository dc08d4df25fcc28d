"""Reports print one step, the longest context, or a comparison with and without checkpointing and the chunked loss.

The cost model predicts each answer. With `build_bench` the GPU measures it as well. Each report returns what it printed
as a dictionary for JSON.
"""

import bisect
import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from model import ModelConfig
from training.host.errors import UserError
from training.host.memory import GIB, parse_bytes
from training.memory.cost_model import Step, gib
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.machine import Rates, cap_gpu_memory
from training.memory.planner import LEAST_HEADROOM, Plan, describe_budgets, find_max_context, has_plan, make_plan
from training.memory.profiler import (
    CATEGORIES,
    Bench,
    Measurement,
    draw_timeline,
    extrapolate,
    format_table,
    largest_that_runs,
    thin,
)

COMPARED_CONTEXTS = (32_768, 65_536, 131_072, 262_144)
COMPARED_BUDGET = "24GB"
LARGEST_GPU_GIB = 192
LONGEST_COMPARED_SECONDS = 30.0  # a step that is predicted to take longer is not measured by a comparison
BuildBench = Callable[[Step, Execution], Bench]  # makes a model and its optimizer on the GPU that is measured


@dataclass(frozen=True)
class Machine:
    """The GPU and the host that are planned for, and the model to run on them."""

    description: str
    gpu_bytes: float  # PyTorch's allocator may reserve this much
    host_bytes: float  # and this much may be page-locked
    rates: Rates
    model: ModelConfig
    given: Execution  # the loss and the kinds that were asked for, and this machine's attention backend

    @property
    def limits(self) -> tuple[float, float, Rates]:
        """The arguments of `make_plan` after the step."""
        return self.gpu_bytes, self.host_bytes, self.rates

    @property
    def budgets(self) -> str:
        """Both memory budgets as text."""
        return describe_budgets(self.gpu_bytes, self.host_bytes)


# One step


def report_step(
    step: Step,
    machine: Machine,
    *,
    gradient_checkpointing: bool | None = None,
    part: Step | None = None,
    all_stages: bool = False,
    timeline: Path | None = None,
    build_bench: BuildBench | None = None,
    snapshot: Path | None = None,
) -> dict:
    """Print the plan, the table of stages, and a summary of the peak.

    Args:
        gradient_checkpointing: None: the step is planned. Otherwise all blocks are checkpointed, or none.
        part: the same step with fewer layers, for the table, the measurement and the timeline.
        all_stages: whether each stage has its own row in the table. Otherwise equal neighbouring layers share rows.
        timeline: a file for a picture of the step.
        build_bench: builds the bench that measures the step; None: predicted only.
        snapshot: a file for PyTorch's memory snapshot of the measured step.

    Raises:
        UserError: no plan fits, or the measured step ran out of memory.
    """
    if gradient_checkpointing is None:
        plan = make_plan(step, *machine.limits)
        print(f"plan for {machine.budgets}:")
    else:
        placement = Placement() if gradient_checkpointing else WHOLE
        execution = dataclasses.replace(step.given, placements=(placement,) * step.layers)
        plan = Plan(step, execution, *machine.limits)
        print(f"gradient checkpointing {'on' if gradient_checkpointing else 'off'}, nothing planned:")
        if plan.peak.bytes * LEAST_HEADROOM > machine.gpu_bytes:
            print(f"does not fit into {gib(machine.gpu_bytes)}")
    print(f"{plan}\n")
    shown, execution = step, plan.execution
    if part is not None:
        shown, execution = part, thin(execution, part.layers)
        print(f"below, {part.layers} of the {step.layers} layers:")
    stages = list(shown.stages(execution))
    measured = _measure_or_refuse(build_bench, machine, shown, execution, all_stages, snapshot) if build_bench else None
    print(format_table(stages, measured.stages if measured else None, all_stages))
    peak = max(stages, key=lambda stage: stage.bytes)
    summary = {
        "predicted_peak": peak.bytes, "predicted_peak_stage": peak.name,
        "predicted_host": shown.host_bytes(execution), "predicted_seconds": shown.seconds(execution, machine.rates),
    }  # fmt: skip
    if measured:
        summary |= {
            "measured_peak": measured.peak.bytes, "measured_peak_stage": measured.peak.name,
            "reserved": measured.reserved,
            "fragmentation": measured.peak.reserved - measured.peak.bytes,
            "host": measured.host_bytes, "measured_seconds": measured.seconds,
            "num_alloc_retries": measured.alloc_retries,
        }  # fmt: skip
        if part is not None:
            summary["extrapolated_seconds"] = extrapolate(measured, shown, step)
            summary["predicted_seconds_of_all_layers"] = plan.seconds
    _print_summary(summary, peak.categories, measured)
    if timeline:
        budget = machine.gpu_bytes if gradient_checkpointing is None else None
        draw_timeline(timeline, stages, measured.stages if measured else None, budget)
    return {
        "plan": str(plan), "execution": dataclasses.asdict(execution), "summary": summary,
        "predicted": [dataclasses.asdict(stage) for stage in stages],
        "measured": [dataclasses.asdict(stage) for stage in measured.stages] if measured else None,
    }  # fmt: skip


def _measure_or_refuse(
    build_bench: BuildBench,
    machine: Machine,
    step: Step,
    execution: Execution,
    all_stages: bool,
    snapshot: Path | None,
) -> Measurement:
    """Returns one measured step. If memory runs out, prints the prediction and raises UserError."""
    try:
        return build_bench(step, execution).measure(step, execution, snapshot=snapshot)
    except torch.OutOfMemoryError:
        table = format_table(list(step.stages(execution)), all_stages=all_stages)
        print(f"predicted, not measured (out of memory):\n{table}")
    limit, peak = gib(machine.gpu_bytes), step.peak(execution)
    raise UserError(
        f"out of memory: a peak of {gib(peak.bytes)} is predicted, in {peak.name}, of {limit} that are free"
    )


def _print_summary(summary: dict, predicted: dict[str, int], measured: Measurement | None) -> None:
    """Print the peak by category, then the numbers of `summary`, predicted and measured."""
    print(f"\n{'at the peak, GiB':<16}{'predicted':>12}" + (f"{'measured':>12}" if measured else ""))
    for category in CATEGORIES:
        measured_cell = f"{measured.peak.categories[category] / GIB:12.3f}" if measured else ""
        print(f"{category:<16}{predicted.get(category, 0) / GIB:12.3f}{measured_cell}")
    print(f"\npredicted peak: {gib(summary['predicted_peak'])}, in {summary['predicted_peak_stage']}")
    if measured:
        error = 100 * (summary["predicted_peak"] / summary["measured_peak"] - 1)
        print(f"measured peak: {gib(summary['measured_peak'])}, in {summary['measured_peak_stage']} ({error:+.1f}%)")
        print(f"reserved: {gib(summary['reserved'])}; at the peak {gib(summary['fragmentation'])} more than allocated")
        print(f"the allocator had to give back what it cached: {summary['num_alloc_retries']} times")
    host, seconds = gib(summary["predicted_host"]), f"{summary['predicted_seconds']:.2f} s"
    print(f"pinned host memory: predicted {host}" + (f", measured {gib(summary['host'])}" if measured else ""))
    print(f"step: predicted {seconds}" + (f", measured {summary['measured_seconds']:.2f} s" if measured else ""))
    if "extrapolated_seconds" in summary:
        both = summary["predicted_seconds_of_all_layers"], summary["extrapolated_seconds"]
        print("step of all layers: predicted {:.2f} s, extrapolated {:.2f} s".format(*both))


# The longest context


def report_max_context(step: Step, machine: Machine, build_bench: BuildBench | None = None) -> dict:
    """Print the longest context that is predicted to fit, and its plan. With `build_bench`, find the longest that does.

    Raises:
        UserError: no context fits.
    """
    budgets = machine.gpu_bytes, machine.host_bytes
    predicted = find_max_context(step, *budgets)
    plan = make_plan(step.at(predicted or step.context_length), *budgets, machine.rates)  # raises where none fits
    print(f"predicted: {predicted:,} tokens in {machine.budgets}\n{plan}")
    results = {"predicted_context": predicted, "plan": str(plan), "execution": dataclasses.asdict(plan.execution)}
    if build_bench:
        # Placements that take the least: a context longer than predicted leaves no room for attention outputs.
        placements = tuple(Placement(placement.input) for placement in plan.execution.placements)
        execution = dataclasses.replace(plan.execution, placements=placements)
        probes: list[dict] = []
        bench = build_bench(step, execution)
        longest = largest_that_runs(predicted, _make_probe(bench, step, execution, machine, probes))
        print(f"measured: {longest:,} tokens, {longest / predicted:.3f} of the prediction")
        results |= {"measured_context": longest, "ratio": longest / predicted, "probes": probes}
    return results


def _make_probe(
    bench: Bench, step: Step, execution: Execution, machine: Machine, probes: list[dict]
) -> Callable[[int], bool]:
    """Returns a function that tells whether a step of so many tokens runs. It prints, and appends to `probes`."""

    def runs(context_length: int) -> bool:
        longer, start, measured = step.at(context_length), time.perf_counter(), None
        outcome = "out of memory"
        if longer.host_bytes(execution) > machine.host_bytes:
            outcome = "more host memory than may be pinned"
        else:
            with suppress(torch.OutOfMemoryError):
                measured = bench.measure(longer, execution)
        probe: dict[str, float] = {"context_length": context_length, "ran": measured is not None}
        if measured:
            probe |= {"seconds": measured.seconds, "peak": measured.peak.bytes, "reserved": measured.reserved}
            outcome = f"ran: peak {gib(measured.peak.bytes)}, reserved {gib(measured.reserved)}"
        print(f"  {context_length:>9,} tokens {time.perf_counter() - start:8.1f} s  {outcome}", flush=True)
        probes.append(probe)
        return measured is not None

    return runs


# Comparison


def compared_executions(given: Execution, layers: int) -> dict[str, Execution]:
    """Returns executions with and without checkpointing, and with the standard and the chunked loss, by name."""
    return {
        f"{name}, {loss_impl} loss": dataclasses.replace(given, placements=(placement,) * layers, loss_impl=loss_impl)
        for name, placement in (("no checkpointing", WHOLE), ("checkpointing", Placement()))
        for loss_impl in ("standard", "chunked")
    }


def report_comparison(
    step: Step, machine: Machine, budget: str | None, device: torch.device, build_bench: BuildBench | None = None
) -> dict:
    """Print the bytes and seconds of each way at each context, and the smallest GPU on which each context fits.

    Args:
        budget: GPU memory of the planned way; None: COMPARED_BUDGET if the GPU has that much, otherwise all it has.
        device: the GPU that measures. Its allocator is capped at each way's budget.
        build_bench: builds the benches that measure steps; None: predicted only.

    Raises:
        UserError: a budget that is more than the GPU has.
    """
    if budget is None:
        budget = COMPARED_BUDGET if parse_bytes(COMPARED_BUDGET) <= machine.gpu_bytes else "auto"
    planned_bytes = machine.gpu_bytes if budget == "auto" else parse_bytes(budget)
    if planned_bytes > machine.gpu_bytes:
        raise UserError(f"memory_budget {budget} is more than the {gib(machine.gpu_bytes)} that can be used; lower it")
    compared = compared_executions(step.given, step.layers)
    ways: dict[str, tuple[Execution | None, float]] = {n: (e, machine.gpu_bytes) for n, e in compared.items()}
    ways[f"planned for {budget}"] = None, planned_bytes
    columns = ["tokens", "logits", "peak", "pinned", "seconds", *(["measured", "seconds"] if build_bench else [])]
    print(f"{'predicted, GiB':<33}" + "".join(f"{name:>10}" for name in columns))
    rows: list[dict] = []
    benches: dict[float, Bench] = {}
    for way, (execution, gpu_bytes) in ways.items():
        for at in map(step.at, COMPARED_CONTEXTS):
            row = {"way": way, "context_length": at.context_length}
            row["logits"] = machine.model.projected_logits_bytes(at.tokens)
            try:
                limits = gpu_bytes, machine.host_bytes, machine.rates
                plan = Plan(at, execution, *limits) if execution else make_plan(at, *limits)
            except UserError:
                plan = None
            if plan is not None:
                row |= {"peak": plan.peak.bytes, "host": plan.host_bytes, "predicted_seconds": plan.seconds}
                fits = plan.peak.bytes * LEAST_HEADROOM <= gpu_bytes
                if build_bench and fits and plan.seconds < LONGEST_COMPARED_SECONDS:
                    cap_gpu_memory(int(gpu_bytes), device)
                    row |= _measure_compared(at, plan.execution, benches, build_bench)
            _print_compared(row)
            rows.append(row)
    print("\nthe smallest GPU memory in which each context fits, whatever has to move or to be computed again:")
    smallest = smallest_gpus(step, machine.host_bytes)
    for context_length, size in smallest.items():
        print(f"{context_length:>9,} tokens: {size:.1f} GiB")
    return {"compared": rows, "smallest_gpu_gib": smallest}


def _measure_compared(step: Step, execution: Execution, benches: dict[float, Bench], build_bench: BuildBench) -> dict:
    """Returns the measured columns of a row of the comparison.

    Args:
        benches: the last bench that was built, by its execution.gpu_state_bytes. It is used again if they are the same.
    """
    if execution.gpu_state_bytes not in benches:
        benches.clear()  # frees its memory before the next is built
        benches[execution.gpu_state_bytes] = build_bench(step, execution)
    try:
        measured = benches[execution.gpu_state_bytes].measure(step, execution)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    return {"measured_peak": measured.peak.bytes, "measured_seconds": measured.seconds}


def _print_compared(row: dict) -> None:
    cells = [f"{row['context_length']:,}", f"{row['logits'] / GIB:.2f}"]
    if "peak" in row:
        cells += [f"{row['peak'] / GIB:.2f}", f"{row['host'] / GIB:.2f}", f"{row['predicted_seconds']:.1f}"]
    else:
        cells.append("no plan")
    if "measured_peak" in row:
        cells += [f"{row['measured_peak'] / GIB:.2f}", f"{row['measured_seconds']:.1f}"]
    if "out_of_memory" in row:
        cells.append("no memory")
    print(f"{row['way']:<33}" + "".join(f"{cell:>10}" for cell in cells))


def smallest_gpus(step: Step, host_bytes: float) -> dict[int, float]:
    """Returns the smallest GPU memory for each compared context, in steps of 0.5 GiB; inf if the host is too small."""
    halves = range(2 * LARGEST_GPU_GIB)

    def smallest(at: Step) -> float:
        fitting = bisect.bisect_left(halves, True, key=lambda n: has_plan(at, n * GIB / 2, host_bytes))
        return fitting / 2 if fitting < len(halves) else math.inf

    return {at.context_length: smallest(at) for at in map(step.at, COMPARED_CONTEXTS)}
