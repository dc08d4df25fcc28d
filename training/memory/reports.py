"""Reports print one step, the longest context, or a comparison with and without checkpointing and
the chunked loss.

The cost model predicts each answer, and a GPU measures one step as well. Each report returns what
it printed as a dictionary for JSON.
"""

import bisect
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.head_loss import projected_logits_bytes
from model import ModelConfig
from training.checkpoint.files import SPARE_BYTES
from training.host.errors import UserError
from training.host.sizes import GIB, PROCESS_BYTES, SYSTEM_BYTES, gib, parse_bytes
from training.memory import profiler
from training.memory.cost_model import forward_flops, fullest_stage, pinned_bytes, step_seconds
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.machine import Rates
from training.memory.plan import Plan
from training.memory.planner import (
    LEAST_HEADROOM,
    describe_budgets,
    find_max_context,
    has_plan,
    make_plan,
)
from training.memory.stages import Stage, Stages
from training.memory.step import Step
from training.memory.timeline import format_timeline, timeline
from training.optim.formats import bytes_saved

COMPARED_CONTEXTS = (32_768, 65_536, 131_072, 262_144)
COMPARED_BUDGET = "24GB"
LARGEST_GPU_GIB = 192
COSTS = {  # words on a change that trains another function, by the beginning of the flag to give
    "--attention_type sparse": "costs some loss",
    "--lora ": "trains adapters alone, which costs some loss",
    "--lora_bits": "fewer bits cost some loss",
    "drop --rope_scaling": "training.export extends the base first",
}
BuildBench = Callable[[Step, Execution], profiler.Bench]


@dataclass(frozen=True)
class Machine:
    """The GPU and the host that are planned for, and the model to run on them."""

    description: str
    gpu_bytes: float  # PyTorch's allocator may reserve this much
    host_bytes: float  # and this much may be page-locked
    rates: Rates
    model: ModelConfig
    # the loss and the kinds that were asked for, and this machine's attention backend
    given: Execution
    flops: float | None = None  # dense bf16 peak of the GPU, FLOP/s; None: not known
    host_memory: int | None = None  # bytes of the machine, as sold; None: not known
    processes: int = 1  # on the machine
    carried_bytes: int = 0  # tensors of the weights' folder that checkpoints carry untrained

    @property
    def limits(self) -> tuple[float, float, Rates]:
        """The arguments of `make_plan` after the step."""
        return self.gpu_bytes, self.host_bytes, self.rates

    def print_host(self, plan: Plan) -> None:
        """Prints the host memory of a process and of the machine, if that is known, and a
        checkpoint's bytes on disk."""
        if self.host_memory:
            process = plan.host_bytes + PROCESS_BYTES
            shares = f"{gib(plan.host_bytes)} pinned, about {gib(process)} of the whole process"
            total = (self.processes * process + SYSTEM_BYTES) / GIB
            print(f"host memory: {shares}, {total:.2f} of {gib(self.host_memory)} of the machine")
        print(f"disk: {gib(self.checkpoint_bytes(plan))} per checkpoint; a run needs room for two")

    def checkpoint_bytes(self, plan: Plan) -> int:
        """Returns the bytes on disk of a checkpoint of a planned run, to resume from."""
        step, state_format = plan.step, plan.execution.state_format
        elements = step.trained.elements(self.model)
        num_bytes = bytes_saved(elements, state_format, is_half=step.num_shards == 0)
        if step.trained.is_whole:
            num_bytes += self.carried_bytes
        return num_bytes + SPARE_BYTES


@dataclass(frozen=True)
class Epoch:
    """An epoch of a run's training data."""

    tokens: int  # tokens of the documents that are not held out
    sequences: int
    filled: float  # share of the sequences' tokens that is not padding
    context_length: int  # of the sequences

    def seconds(self, plan: Plan) -> float:
        return self.sequences / _sequences(plan.step) * plan.seconds


# One step


def choose_plan(
    step: Step, machine: Machine, checkpointing: bool | None
) -> tuple[Plan | None, bool]:
    """Returns the plan of a step, if there is one, and whether it fits.

    With `checkpointing` nothing is planned: all blocks are checkpointed, or none. None: `make_plan`
    plans, and raises.
    """
    if checkpointing is None:
        if step.has_too_long_document or has_plan(step, *machine.limits[:2]):
            return make_plan(step, *machine.limits), True  # raises for the document
        return None, False
    execution = step.unplanned(Placement() if checkpointing else WHOLE)
    plan = Plan(step, execution, *machine.limits)
    return plan, plan.peak.bytes * LEAST_HEADROOM <= machine.gpu_bytes


def report_step(
    step: Step,
    machine: Machine,
    flags,
    about: str,
    plan: Plan | None,
    fits: bool,
    changes: dict[str, Plan],
    epoch: Epoch | None = None,
    part: Step | None = None,
    build_bench: BuildBench | None = None,
) -> dict:
    """Prints the answer, then `about` the machine and the model, the plan, and the stages that the
    flags ask for.

    `changes` are plans of changed steps by the flags to give: steps that are faster, or that fit if
    this step does not. `part` is the same step with fewer layers, for the stages, the measurement
    and the timeline. Raises UserError where neither the step nor a changed step fits, or where the
    measured step ran out of memory.
    """
    answer: dict[str, Any] = {"fits": fits}
    if not fits:
        if plan is None and not changes:
            make_plan(step, *machine.limits)  # raises and says why
        _print_refusal(step, machine)
        title = "what would, the cheapest change first, predicted:"
        answer["would_fit"] = _print_changes(title, changes, machine, epoch)
    if plan is None:
        print(about)
        return {"answer": answer}
    answer |= _print_answer(plan, machine, fits, epoch)
    if fits:
        answer["faster"] = _print_changes("faster, predicted:", changes, machine, epoch)
    shown, execution = step, plan.execution
    if part is not None:
        shown, execution = part, profiler.thin(execution, part.layers)
    predicted, measured = list(Stages(shown, execution)), None
    if build_bench:
        measured = _measure(shown, execution, machine, build_bench, f"{about}\n{plan}")
        answer["fits"] = True
    summary = _summarize(shown, execution, machine, measured)
    if measured and part is not None:
        print(f"below, {part.layers} of the {step.layers} layers:")
        summary["extrapolated_seconds"] = profiler.extrapolate(measured, shown, step)
        summary["predicted_seconds_of_all_layers"] = plan.seconds
    if measured:
        _print_measured(summary)
    _print_plan(plan, machine, flags, about, predicted, measured.stages if measured else None)
    return {
        "answer": answer,
        "plan": str(plan),
        "execution": dataclasses.asdict(execution),
        "summary": summary,
        "predicted": [*map(dataclasses.asdict, predicted)],
        "measured": [*map(dataclasses.asdict, measured.stages)] if measured else None,
    }


def _print_refusal(step: Step, machine: Machine) -> None:
    """Prints that a step does not fit the machine's budgets."""
    length = f"{step.context_length:,} tokens"
    if step.batch_size > 1:
        length += f" x batch_size {step.batch_size}"
    print(f"does not fit: {length} into {describe_budgets(*machine.limits[:2])}")


def _print_plan(
    plan: Plan,
    machine: Machine,
    flags,
    about: str,
    predicted: list[Stage],
    measured: Sequence[profiler.MeasuredStage] | None,
) -> None:
    """Prints the plan, its timeline, and stages as flags ask."""
    title, limit = "nothing planned", None
    if flags.gradient_checkpointing is None:
        title, limit = f"plan for {describe_budgets(*machine.limits[:2])}", machine.gpu_bytes
    phases = timeline(plan.step, plan.execution, plan.rates)
    print(f"{about}\n{title}:\n{plan}\n\n{format_timeline(phases)}")
    if flags.stages:
        print("\n" + profiler.format_table(predicted, measured, flags.stages == "all"))
    if flags.timeline:
        profiler.draw_timeline(flags.timeline, phases, predicted, measured, limit)


def _measure(
    step: Step, execution: Execution, machine: Machine, build_bench: BuildBench, about: str
) -> profiler.Measurement:
    """Returns a step as measured.

    Where it runs out of memory, prints what was predicted and raises UserError.
    """
    try:
        sys.stdout.flush()  # measuring may take minutes
        return build_bench(step, execution).measure(step, execution)
    except torch.OutOfMemoryError:
        table = profiler.format_table(list(Stages(step, execution)))
        peak = fullest_stage(step, execution)
        print(f"{about}\npredicted, not measured (out of memory):\n{table}")
        what = f"a peak of {gib(peak.bytes)} is predicted, in {peak.name}"
        raise UserError(
            f"out of memory: {what}, of {gib(machine.gpu_bytes)} that are free"
        ) from None


def _summarize(
    step: Step, execution: Execution, machine: Machine, measured: profiler.Measurement | None
) -> dict:
    """Returns a step's peak, host memory and seconds, as predicted and, if measured, measured."""
    peak = fullest_stage(step, execution)
    summary = {
        "predicted_peak": peak.bytes,
        "predicted_peak_stage": peak.name,
        "predicted_host": pinned_bytes(step, execution),
        "predicted_seconds": step_seconds(step, execution, machine.rates),
    }
    if measured:
        summary |= {
            "measured_peak": measured.peak.bytes,
            "measured_peak_stage": measured.peak.name,
            "reserved": measured.reserved,
            "fragmentation": measured.peak.reserved - measured.peak.bytes,
            "host": measured.host_bytes,
            "measured_seconds": measured.seconds,
            "num_alloc_retries": measured.alloc_retries,
        }
    return summary


def _speed(plan: Plan) -> dict[str, float]:
    """Returns a plan's seconds and tokens per second, by the names of the answer."""
    tokens = _sequences(plan.step) * plan.step.context_length
    return {"seconds": plan.seconds, "tokens_per_second": tokens / plan.seconds}


def _padding(epoch: Epoch | None) -> str:
    """Returns what tokens per second count beside texts: of data whose sequences are not full."""
    return " with padding" if epoch and epoch.filled < 1 else ""


def _duration(seconds: float) -> str:
    """Returns a text: _duration(5400) is "1.5 hours", and _duration(90) is "1.5 minutes"."""
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _sequences(step: Step) -> int:
    """Returns the sequences of a whole step, on all GPUs."""
    groups = max(1, step.num_copies * step.num_shards // step.num_ranks)
    return step.batch_size * step.micro_batches * groups


def _print_changes(
    title: str, changes: dict[str, Plan], machine: Machine, epoch: Epoch | None
) -> list[dict]:
    """Prints a row for each change, if there is one; returns the rows for JSON."""
    if changes:
        print(title)
    rows, width = [], max(map(len, changes), default=0)
    for words, plan in changes.items():
        costs = [cost for flag, cost in COSTS.items() if f" {flag}" in f" {words}"]
        row: dict[str, Any] = {
            "flags": words,
            **_speed(plan),
            "host_bytes": plan.host_bytes,
            "costs": costs,
            "checkpoint_bytes": machine.checkpoint_bytes(plan),
        }
        tokens = f"{row['tokens_per_second']:,.0f} tokens/s{_padding(epoch)}"
        speed = f"{row['seconds']:8.1f} s per step, {tokens}"
        # the data are packed anew at another context
        if epoch and epoch.context_length == plan.step.context_length:
            row["hours_per_epoch"] = epoch.seconds(plan) / 3600
            speed += f", {_duration(epoch.seconds(plan))} per epoch"
        disk = f"{gib(row['checkpoint_bytes'])} per checkpoint"
        print("; ".join([f"  {words:<{width}}  {speed}, {disk}", *costs]))
        rows.append(row)
    return rows


def _print_answer(
    plan: Plan, machine: Machine, fits: bool, epoch: Epoch | None
) -> dict[str, float]:
    """Prints what a step takes, and how long; returns that for JSON."""
    answer = {"peak": plan.peak.bytes, "host_bytes": plan.host_bytes, **_speed(plan)}
    answer["checkpoint_bytes"] = machine.checkpoint_bytes(plan)
    host = gib(plan.host_bytes)
    if math.isfinite(machine.host_bytes):
        host = f"{plan.host_bytes / GIB:.2f} of {gib(machine.host_bytes)}"
    gpu = f"{plan.peak.bytes / GIB:.2f} of {gib(machine.gpu_bytes)} of GPU memory"
    print(f"{'fits' if fits else 'as it is'}: predicted {gpu}, {host} of host memory")
    machine.print_host(plan)
    tokens = f"{answer['tokens_per_second']:,.0f} tokens/s{_padding(epoch)}"
    speed = f"step: {answer['seconds']:.2f} s, {tokens}"
    if machine.flops:
        answer["mfu"] = _model_flops(plan, machine) / plan.seconds / machine.flops
        speed += f", MFU {answer['mfu']:.0%}"
    answer["hours_per_billion_tokens"] = 1e9 / answer["tokens_per_second"] / 3600
    if epoch is None:
        billion = _duration(3600 * answer["hours_per_billion_tokens"])
        print(f"{speed}; {billion} per billion tokens")
        return answer
    print(speed)
    answer |= dataclasses.asdict(epoch) | {"hours_per_epoch": epoch.seconds(plan) / 3600}
    count = f"{epoch.sequences:,} sequence{'s' * (epoch.sequences != 1)}, {epoch.filled:.1%} filled"
    duration = f"{_duration(epoch.seconds(plan))} per epoch"
    print(f"data: {epoch.tokens:,} training tokens in {count}: {duration}")
    return answer


def _model_flops(plan: Plan, machine: Machine) -> float:
    """Returns the FLOP of a step on one GPU, without recomputed activations."""
    step = plan.step
    assert step.documents is not None
    flops = functools.partial(
        forward_flops,
        machine.model,
        kinds=step.given.kinds,
        trains_matrices=step.given.linear.trains_matrices,
    )
    forward = sum(count * flops([round(length)]) for length, count in step.documents.lengths)
    for prompt, answers, tokens, count in step.documents.prompts:
        group = round(prompt), round(answers), round(tokens)
        forward += count * flops([], prompts=[group])
    return 3 * step.micro_batches * forward / (step.num_ranks * step.tensor_ranks)


def _print_measured(summary: dict) -> None:
    """Prints the measured numbers of `summary`, beside their predictions."""
    error = 100 * (summary["predicted_peak"] / summary["measured_peak"] - 1)
    print(
        f"measured peak: {gib(summary['measured_peak'])}, "
        f"in {summary['measured_peak_stage']} ({error:+.1f}%)"
    )
    print(
        f"reserved: {gib(summary['reserved'])}; at the peak {gib(summary['fragmentation'])} more "
        "than allocated"
    )
    print(f"the allocator had to give back what it cached: {summary['num_alloc_retries']} times")
    print(
        "pinned host memory: "
        f"predicted {gib(summary['predicted_host'])}, measured {gib(summary['host'])}"
    )
    print(
        f"step: predicted {summary['predicted_seconds']:.2f} s, measured "
        f"{summary['measured_seconds']:.2f} s"
    )
    if "extrapolated_seconds" in summary:
        both = summary["predicted_seconds_of_all_layers"], summary["extrapolated_seconds"]
        print("step of all layers: predicted {:.2f} s, extrapolated {:.2f} s".format(*both))


# The longest context


def report_max_context(step: Step, machine: Machine) -> dict:
    """Prints the longest context that is predicted to fit. Raises UserError for none."""
    longest = find_max_context(step, machine.gpu_bytes, machine.host_bytes)
    plan = make_plan(step.at(longest or step.context_length), *machine.limits)  # raises for none
    print(f"predicted: {longest:,} tokens in {describe_budgets(*machine.limits[:2])}")
    machine.print_host(plan)
    print(plan)
    return {
        "predicted_context": longest,
        "plan": str(plan),
        "execution": dataclasses.asdict(plan.execution),
    }


# Comparison


def compared_executions(step: Step) -> dict[str, Execution]:
    """Returns executions with and without checkpointing, and with the standard and the chunked
    loss, by name."""
    return {
        f"{name}, {loss} loss": step.unplanned(place, loss_impl=loss)
        for name, place in (("no checkpointing", WHOLE), ("checkpointing", Placement()))
        for loss in ("standard", "chunked")
    }


def report_comparison(step: Step, machine: Machine, budget: str | None) -> dict:
    """Prints the bytes and seconds of each way at each context, and the smallest GPU on which each
    context fits.

    `budget` is the GPU memory of the planned way; None: COMPARED_BUDGET if the GPU has that much,
    otherwise all it has. Raises UserError for more than the GPU has.
    """
    if budget is None:
        budget = COMPARED_BUDGET if parse_bytes(COMPARED_BUDGET) <= machine.gpu_bytes else "auto"
    planned_bytes = machine.gpu_bytes if budget == "auto" else parse_bytes(budget)
    if planned_bytes > machine.gpu_bytes:
        raise UserError(
            f"memory_budget {budget} is more than the {gib(machine.gpu_bytes)} that can be used; "
            "lower it"
        )
    ways: dict[str, Execution | None] = {**compared_executions(step), f"planned for {budget}": None}
    columns = "tokens", "logits", "peak", "pinned", "seconds"
    print(f"{'predicted, GiB':<33}" + "".join(f"{name:>10}" for name in columns))
    rows = []
    for way, execution in ways.items():
        limits = planned_bytes, machine.host_bytes, machine.rates
        for longer in map(step.at, COMPARED_CONTEXTS):
            plan = None
            if execution:
                plan = Plan(longer, execution, *machine.limits)
            elif has_plan(longer, *limits[:2]):
                plan = make_plan(longer, *limits)
            rows.append(_print_compared(way, longer, machine.model, plan))
    print(
        "\nthe smallest GPU memory in which each context fits, whatever has to move or to be "
        "computed again:"
    )
    smallest = smallest_gpus(step, machine.host_bytes)
    for context_length, size in smallest.items():
        print(f"{context_length:>9,} tokens: {size:.1f} GiB")
    return {"compared": rows, "smallest_gpu_gib": smallest}


def _print_compared(way: str, step: Step, model: ModelConfig, plan: Plan | None) -> dict[str, Any]:
    """Prints a row of the comparison; returns it for JSON."""
    logits = projected_logits_bytes(model.vocab_size, step.tokens)
    row: dict[str, Any] = {"way": way, "context_length": step.context_length, "logits": logits}
    cells = [f"{step.context_length:,}", f"{logits / GIB:.2f}"]
    if plan is None:
        cells.append("no plan")
    else:
        peak, host, seconds = plan.peak.bytes, plan.host_bytes, plan.seconds
        row |= {"peak": peak, "host": host, "predicted_seconds": seconds}
        cells += [f"{peak / GIB:.2f}", f"{host / GIB:.2f}", f"{seconds:.1f}"]
    print(f"{way:<33}" + "".join(f"{cell:>10}" for cell in cells))
    return row


def smallest_gpus(step: Step, host_bytes: float) -> dict[int, float]:
    """Returns the smallest GPU memory for each compared context, in steps of 0.5 GiB; inf if the
    host is too small."""
    halves = range(2 * LARGEST_GPU_GIB)

    def smallest(longer: Step) -> float:
        fitting = bisect.bisect_left(
            halves, True, key=lambda n: has_plan(longer, n * GIB / 2, host_bytes)
        )
        return fitting / 2 if fitting < len(halves) else math.inf

    return {length: smallest(step.at(length)) for length in COMPARED_CONTEXTS}
