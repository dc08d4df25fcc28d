"""What a training step takes, stage by stage: `python profile_memory.py --model_size 4B --context_length 131072`.

On a GPU, predicted and measured side by side: a whole step as train.py runs it on one GPU (bf16 weights, float32
masters and Adam moments), of random tokens, one document a sequence. Without one, or with --gpu for another, predicted.
What is profiled is the plan that train.py would make for the memory there is; --gradient_checkpointing and
--no-gradient_checkpointing profile the classic choices instead.

`--find_max_context` and `--compare` answer the other two questions: how long a context fits, and what the chunked loss,
checkpointing and offloading save. With `--measure` they put it to the test on the GPU.
Memory sizes are in GiB, 2**30 bytes; "24GB" on the command line means that too.
"""

import bisect
import dataclasses
import gc
import json
import math
import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch

from kernels.attention import choose_backend
from model import MODEL_SIZES, ModelConfig, Transformer
from train import TrainConfig, build_model
from training.errors import UserError, refused_as_user_error
from training.memory.cost_model import Choices, PackedDocuments, Step, gib
from training.memory.machine import (
    DRIVER_BYTES,
    Rates,
    available_host_bytes,
    cap_gpu_memory,
    gpu_budget,
    measure_rates,
    parse_bytes,
    parse_gpu,
    scale_rates,
)
from training.memory.placement import WHOLE, Placement
from training.memory.planner import LEAST_HEADROOM, Plan, describe_budgets, find_max_context, has_plan, make_plan
from training.memory.profiler import (
    CATEGORIES,
    GIB,
    Bench,
    Measurement,
    draw_timeline,
    extrapolate,
    format_table,
    largest_that_runs,
    thin,
)
from training.optimizer import MasterAdamW
from training.parallel.fsdp import copy_weights, initial_weights
from training.parallel.world import World, join_world

CONTEXT_LENGTH = 131_072
COMPARED_CONTEXTS = (32_768, 65_536, 131_072, 262_144)
COMPARED_BUDGET = "24GB"
LARGEST_GPU_GIB = 192
LONGEST_COMPARED_SECONDS = 30.0  # a step that is predicted to take longer is not measured by --compare


def parse_flags(argv: list[str]) -> Namespace:
    """The flags, each for itself.

    Raises:
        UserError: an unknown flag, or not a value of it.
    """
    parser = ArgumentParser(prog="profile_memory.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = _raise_user_error
    add = parser.add_argument
    add("--model_size", default="4B", choices=MODEL_SIZES)
    add("--context_length", type=int, help=f"default: {CONTEXT_LENGTH}")
    add("--batch_size", type=int, default=1)
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--attention_type", default="full", choices=("full", "nsa"))
    add("--attention_backend", default="auto", choices=("auto", "cudnn", "flash", "flash-attn-4"))
    add("--loss_impl", choices=("auto", "chunked", "standard"), help="default: auto")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="cpu: prediction only")
    add("--gradient_checkpointing", action=BooleanOptionalAction, help="no plan: checkpoint every block, or keep all")
    add("--memory_budget", help="GPU memory to plan for and not to exceed: 24GB, or auto for what is free (default)")
    add("--host_budget", help="host memory that the plan may pin; default: 80%% of what is available, else no limit")
    add("--gpu", help="predict for another GPU: RTX4090, A100-80GB, H100 ..., or a size such as 24GB")
    add("--find_max_context", action="store_true", help="the longest context that fits")
    add("--compare", action="store_true", help="with and without chunked loss, checkpointing, a plan; 32k to 256k")
    add("--measure", action="store_true", help="of --find_max_context and --compare: confirm on the GPU")
    add("--num_layers", type=int, help="measure with so many of the layers, where a whole step takes too long")
    add("--timeline", type=Path, help="draw the step there (.png, .svg)")
    add("--snapshot", type=Path, help="write PyTorch's memory snapshot of the step there (.pickle)")
    add("--json", type=Path, help="write everything there")
    return parser.parse_args(argv)


def _raise_user_error(message: str) -> NoReturn:
    raise UserError(message)


def check_flags(flags: Namespace, on_gpu: bool) -> None:
    """Refuse values out of range, flags that would have no effect, and files that could not be written."""
    layers = MODEL_SIZES[flags.model_size].num_hidden_layers
    limits = {"context_length": (2, math.inf), "batch_size": (1, math.inf), "num_layers": (1, layers)}
    for name, (least, most) in {**limits, "gradient_accumulation_steps": (1, math.inf)}.items():
        value = getattr(flags, name)
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            raise UserError(f"{name} must be {limit}, got {value}")
    if flags.attention_type == "nsa":
        raise UserError("attention_type nsa: sparse attention is not in this version; use full")
    given = {name for name, value in vars(flags).items() if value not in (None, False)}
    if flags.gradient_checkpointing is not None:
        given.add("gradient_checkpointing")
    for_one_step = ("context_length", "gradient_checkpointing", "num_layers", "timeline", "snapshot")
    without_effect = [
        ("find_max_context", "compare"),
        ("loss_impl", "compare"),
        *((name, mode) for name in for_one_step for mode in ("find_max_context", "compare")),
        ("memory_budget", "gradient_checkpointing"),  # which leaves nothing to plan
        ("host_budget", "gradient_checkpointing"),
    ]
    for name, other in without_effect:
        if {name, other} <= given:
            raise UserError(f"{name} has no effect with {other}; drop one")
    if flags.device == "cuda" and "gpu" in given:
        raise UserError("device cuda has no effect with gpu, which predicts for another; drop one")
    if "measure" in given and not given & {"find_max_context", "compare"}:
        raise UserError(
            "measure has no effect but with find_max_context or compare: on a GPU a step is measured anyway"
        )
    for name in ("measure", "num_layers", "snapshot"):
        if name in given and not on_gpu:
            raise UserError(f"{name} needs a GPU to measure on, without --gpu or --device cpu; drop it")
    for name in ("timeline", "snapshot", "json"):
        path = getattr(flags, name)
        if path is not None and not path.parent.is_dir():
            raise UserError(f"--{name} {path}: no folder {path.parent}")
    if flags.timeline and flags.timeline.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--timeline draws .png, .svg or .pdf, got {flags.timeline}")
    if flags.timeline and find_spec("matplotlib") is None:
        raise UserError("--timeline needs matplotlib: pip install matplotlib")


@dataclass(frozen=True)
class Machine:
    """What is planned for: bytes that the allocator may reserve and that may be pinned, and the speed."""

    description: str
    gpu_bytes: float
    host_bytes: float
    rates: Rates
    model: ModelConfig  # with the attention kernel that runs there

    @property
    def budgets(self) -> str:
        return describe_budgets(self.gpu_bytes, self.host_bytes)


def choose_machine(flags: Namespace, memory_budget: str | None, world: World) -> Machine:
    """The GPU at hand, the one of --gpu, or in want of both an H200."""
    shape = dataclasses.replace(MODEL_SIZES[flags.model_size], loss_impl=flags.loss_impl or "auto")
    if world.device.type == "cuda":
        with refused_as_user_error():
            backend = choose_backend(flags.attention_backend, world.device)
        model = dataclasses.replace(shape, attention_backend=backend)
        gpu_bytes = gpu_budget(memory_budget or "auto", world.device)
        rates = measure_rates(model, world.device, lengths(flags)[0])
        torch.cuda.empty_cache()
        name = torch.cuda.get_device_name(world.device)
        host_bytes = available_host_bytes() if flags.host_budget is None else parse_bytes(flags.host_budget)
        return Machine(name, gpu_bytes, host_bytes, rates, model)
    gpu, name = parse_gpu(flags.gpu or "H200"), flags.gpu or "no GPU in use, so an H200"
    gpu_bytes = gpu.memory_bytes - DRIVER_BYTES
    if memory_budget not in (None, "auto"):
        gpu_bytes = parse_bytes(memory_budget)
        if flags.gpu and gpu_bytes > gpu.memory_bytes:
            raise UserError(f"memory_budget {gib(gpu_bytes)} is more than the {gib(gpu.memory_bytes)} of {flags.gpu}")
    backend = gpu.attention_backend if flags.attention_backend == "auto" else flags.attention_backend
    if backend == "flash-attn-4" and gpu.attention_backend == "flash":
        raise UserError(f"flash-attn-4 needs compute capability 9.0, which {flags.gpu} has not; use auto")
    model = dataclasses.replace(shape, attention_backend=backend)
    description = f"{name}; its speed is an H200's scaled by data sheets, not measured"
    host_bytes = math.inf if flags.host_budget is None else parse_bytes(flags.host_budget)
    return Machine(description, gpu_bytes, host_bytes, scale_rates(gpu, backend), model)


def step_of(model: ModelConfig, context_length: int, batch_size: int = 1, micro_batches: int = 1) -> Step:
    """A step of a model on the meta device, one document a sequence."""
    with torch.device("meta"):
        parameters = list(Transformer(model).to(torch.bfloat16).parameters())
    documents = PackedDocuments.one_each(context_length, batch_size)
    return Step(model, parameters, context_length, batch_size, micro_batches, documents)


def lengths(flags: Namespace) -> tuple[int, int, int]:
    return flags.context_length or CONTEXT_LENGTH, flags.batch_size, flags.gradient_accumulation_steps


def build_bench(step: Step, choices: Choices, world: World) -> Bench:
    gc.collect()  # an earlier one
    model, _ = build_model(TrainConfig(), step.config, world)
    copy_weights(model, initial_weights(model, seed=0))
    optimizer = MasterAdamW(
        model.named_parameters(), accumulate=step.micro_batches > 1, gpu_state_bytes=choices.gpu_state_bytes
    )
    return Bench(model, optimizer)


# One step


def profile(flags: Namespace, machine: Machine, world: World) -> dict:
    """Print the plan, the table and what stands out of it; what --json writes."""
    step, limits = step_of(machine.model, *lengths(flags)), (machine.gpu_bytes, machine.host_bytes, machine.rates)
    if flags.gradient_checkpointing is None:
        plan = make_plan(step, *limits)
        print(f"plan for {machine.budgets}:")
    else:
        placement = Placement() if flags.gradient_checkpointing else WHOLE
        plan = Plan(step, Choices((placement,) * step.layers, loss_impl=machine.model.loss_impl), *limits)
        print(f"gradient checkpointing {'on' if flags.gradient_checkpointing else 'off'}, nothing planned:")
        if plan.peak.bytes * LEAST_HEADROOM > machine.gpu_bytes:
            print(f"does not fit into {gib(machine.gpu_bytes)}")
    print(f"{plan}\n")
    shown, choices = step, plan.choices
    if flags.num_layers is not None:
        shown = step_of(dataclasses.replace(machine.model, num_hidden_layers=flags.num_layers), *lengths(flags))
        choices = thin(choices, flags.num_layers)
        print(f"below, {flags.num_layers} of the {step.layers} layers:")
    stages = list(shown.stages(choices))
    measured = measure(flags, machine, shown, choices, world) if world.device.type == "cuda" else None
    print(format_table(stages, measured.stages if measured else None))
    peak = max(stages, key=lambda stage: stage.bytes)
    summary = {
        "predicted_peak": peak.bytes, "predicted_peak_stage": peak.name,
        "predicted_host": shown.host_bytes(choices), "predicted_seconds": shown.seconds(choices, machine.rates),
    }  # fmt: skip
    if measured:
        summary |= {
            "measured_peak": measured.peak.bytes, "measured_peak_stage": measured.peak.name,
            "reserved": measured.reserved,
            "fragmentation": measured.peak.reserved - measured.peak.bytes,
            "host": measured.host_bytes, "measured_seconds": measured.seconds,
            "num_alloc_retries": measured.alloc_retries,
        }  # fmt: skip
        if flags.num_layers is not None:
            summary["extrapolated_seconds"] = extrapolate(measured, shown, step)
            summary["predicted_seconds_of_all_layers"] = plan.seconds
    print_summary(summary, peak.categories, measured)
    if flags.timeline:
        budget = None if flags.gradient_checkpointing is not None else machine.gpu_bytes
        draw_timeline(flags.timeline, stages, measured.stages if measured else None, budget)
    return {
        "plan": str(plan), "choices": dataclasses.asdict(choices), "summary": summary,
        "predicted": [dataclasses.asdict(stage) for stage in stages],
        "measured": [dataclasses.asdict(stage) for stage in measured.stages] if measured else None,
    }  # fmt: skip


def measure(flags: Namespace, machine: Machine, step: Step, choices: Choices, world: World) -> Measurement:
    """On the GPU at hand, under the cap of --memory_budget; where memory runs out, the prediction and an error."""
    if flags.memory_budget is not None:
        cap_gpu_memory(int(machine.gpu_bytes), world.device)
    try:
        return build_bench(step, choices, world).measure(step, choices, snapshot=flags.snapshot)
    except torch.OutOfMemoryError:
        print(f"predicted, not measured (out of memory):\n{format_table(list(step.stages(choices)))}")
    limit, peak = gib(machine.gpu_bytes), step.peak(choices)
    raise UserError(
        f"out of memory: a peak of {gib(peak.bytes)} is predicted, in {peak.name}, of {limit} that are free"
    )


def print_summary(summary: dict, predicted: dict[str, int], measured: Measurement | None) -> None:
    """The peak by category, then the figures of `summary`, predicted | measured."""
    by_category = measured.peak.categories if measured else None
    print(f"\n{'at the peak, GiB':<16}{'predicted':>12}" + (f"{'measured':>12}" if measured else ""))
    for category in CATEGORIES:
        measured_cell = f"{by_category[category] / GIB:12.3f}" if measured else ""
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


def report_max_context(flags: Namespace, machine: Machine, world: World) -> dict:
    """Print the longest context that should fit and its plan; with --measure, the longest that does."""
    step = step_of(machine.model, *lengths(flags))
    budgets = machine.gpu_bytes, machine.host_bytes
    predicted = find_max_context(step, *budgets)
    plan = make_plan(step.at(predicted or step.context_length), *budgets, machine.rates)  # where none fits, says why
    print(f"predicted: {predicted:,} tokens in {machine.budgets}\n{plan}")
    results = {"predicted_context": predicted, "plan": str(plan), "choices": dataclasses.asdict(plan.choices)}
    if flags.measure:
        cap_gpu_memory(int(machine.gpu_bytes), world.device)
        # What takes the least: a longer context than predicted leaves no room for attention outputs.
        placements = tuple(Placement(placement.input) for placement in plan.choices.placements)
        choices = dataclasses.replace(plan.choices, placements=placements)
        probes: list[dict] = []
        bench = build_bench(step, choices, world)
        longest = largest_that_runs(predicted, make_probe(bench, step, choices, machine, probes))
        print(f"measured: {longest:,} tokens, {longest / predicted:.3f} of the prediction")
        results |= {"measured_context": longest, "ratio": longest / predicted, "probes": probes}
    return results


def make_probe(
    bench: Bench, step: Step, choices: Choices, machine: Machine, probes: list[dict]
) -> Callable[[int], bool]:
    """Whether a context runs: one step of it, with a line printed and kept in `probes`."""

    def runs(context_length: int) -> bool:
        longer, start, measured = step.at(context_length), time.perf_counter(), None
        outcome = "out of memory"
        if longer.host_bytes(choices) > machine.host_bytes:
            outcome = "more host memory than may be pinned"
        else:
            with suppress(torch.OutOfMemoryError):
                measured = bench.measure(longer, choices)
        probe = {"context_length": context_length, "ran": measured is not None}
        if measured:
            probe |= {"seconds": measured.seconds, "peak": measured.peak.bytes, "reserved": measured.reserved}
            outcome = f"ran: peak {gib(measured.peak.bytes)}, reserved {gib(measured.reserved)}"
        print(f"  {context_length:>9,} tokens {time.perf_counter() - start:8.1f} s  {outcome}", flush=True)
        probes.append(probe)
        return measured is not None

    return runs


# With and without


def compared_choices(layers: int) -> dict[str, Choices]:
    """With and without checkpointing and the chunked loss, by name."""
    return {
        f"{name}, {loss_impl} loss": Choices((placement,) * layers, loss_impl=loss_impl)
        for name, placement in (("no checkpointing", WHOLE), ("checkpointing", Placement()))
        for loss_impl in ("standard", "chunked")
    }


def compare(flags: Namespace, machine: Machine, world: World) -> dict:
    """Print what each way takes at each context, and the smallest GPU on which each context fits at all."""
    step, budget = step_of(machine.model, *lengths(flags)), flags.memory_budget
    if budget is None:
        budget = COMPARED_BUDGET if parse_bytes(COMPARED_BUDGET) <= machine.gpu_bytes else "auto"
    planned_bytes = machine.gpu_bytes if budget == "auto" else parse_bytes(budget)
    if planned_bytes > machine.gpu_bytes:
        raise UserError(f"memory_budget {budget} is more than the {gib(machine.gpu_bytes)} that can be used; lower it")
    ways = {name: (choices, machine.gpu_bytes) for name, choices in compared_choices(step.layers).items()}
    ways[f"planned for {budget}"] = None, planned_bytes
    columns = ["tokens", "logits", "peak", "pinned", "seconds", *(["measured", "seconds"] if flags.measure else [])]
    print(f"{'predicted, GiB':<33}" + "".join(f"{name:>10}" for name in columns))
    rows, benches = [], {}
    for way, (choices, gpu_bytes) in ways.items():
        for at in map(step.at, COMPARED_CONTEXTS):
            row = {"way": way, "context_length": at.context_length}
            row["logits"] = machine.model.projected_logits_bytes(at.tokens)
            try:
                limits = gpu_bytes, machine.host_bytes, machine.rates
                plan = Plan(at, choices, *limits) if choices else make_plan(at, *limits)
            except UserError:
                plan = None
            if plan is not None:
                row |= {"peak": plan.peak.bytes, "host": plan.host_bytes, "predicted_seconds": plan.seconds}
                fits = plan.peak.bytes * LEAST_HEADROOM <= gpu_bytes
                if flags.measure and fits and plan.seconds < LONGEST_COMPARED_SECONDS:
                    cap_gpu_memory(int(gpu_bytes), world.device)
                    row |= measure_compared(at, plan.choices, benches, world)
            print_compared(row)
            rows.append(row)
    print("\nthe smallest GPU memory in which each context fits, whatever has to move or to be computed again:")
    smallest = smallest_gpus(step, machine.host_bytes)
    for context_length, size in smallest.items():
        print(f"{context_length:>9,} tokens: {size:.1f} GiB")
    return {"compared": rows, "smallest_gpu_gib": smallest}


def measure_compared(step: Step, choices: Choices, benches: dict[float, Bench], world: World) -> dict:
    """`benches`: one at most, of the last place of the optimizer's state, which serves again where it stays there."""
    if choices.gpu_state_bytes not in benches:
        benches.clear()  # its memory, before the next is built
        benches[choices.gpu_state_bytes] = build_bench(step, choices, world)
    try:
        measured = benches[choices.gpu_state_bytes].measure(step, choices)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    return {"measured_peak": measured.peak.bytes, "measured_seconds": measured.seconds}


def print_compared(row: dict) -> None:
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
    """GiB, a multiple of a half, in which each of the compared contexts fits; infinite where the host is too small."""
    halves = range(2 * LARGEST_GPU_GIB)
    found = {}
    for at in map(step.at, COMPARED_CONTEXTS):
        fitting = bisect.bisect_left(halves, True, key=lambda n, at=at: has_plan(at, n * GIB / 2, host_bytes))
        found[at.context_length] = fitting / 2 if fitting < len(halves) else math.inf
    return found


def main(argv: list[str]) -> int:
    try:
        flags = parse_flags(argv)
        with join_world("cpu" if flags.gpu else flags.device) as world:
            if world.size > 1:
                raise UserError("profile_memory.py profiles one GPU: start it with python, not torchrun")
            check_flags(flags, on_gpu=world.device.type == "cuda")
            # The budget of a comparison is that of one way only.
            machine = choose_machine(flags, None if flags.compare else flags.memory_budget, world)
            print(f"machine: {machine.description}; attention kernel {machine.model.attention_backend}")
            print(f"model: {flags.model_size}, {machine.model.num_parameters():,} parameters")
            report = report_max_context if flags.find_max_context else compare if flags.compare else profile
            results = report(flags, machine, world)
        if flags.json:
            settings = {name: value for name, value in vars(flags).items() if not isinstance(value, Path)}
            environment = {**dataclasses.asdict(machine), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
            results = {"settings": settings, "environment": environment, **results}
            flags.json.write_text(json.dumps(finite(results), allow_nan=False) + "\n")
    except (UserError, torch.OutOfMemoryError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


def finite(value):
    """The same for JSON, which knows no infinity: None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
