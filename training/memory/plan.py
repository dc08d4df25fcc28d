"""A plan: a step's execution with the budgets and rates it was made for, and its text."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from training.checkpoint.pieces import SAVING_BYTES
from training.host.sizes import gib
from training.memory.cost_model import arena_bytes, fullest_stage, pinned_bytes, step_seconds
from training.memory.execution import Execution
from training.memory.kinds import describe
from training.memory.machine import ASSUMED_NETWORK, H200, Rates
from training.memory.stages import Stage
from training.memory.step import Step
from training.optim.formats import STATE_FORMATS

Rows = list[tuple[str, str]]  # titles and texts of a plan's lines


@dataclass(frozen=True)
class Plan:
    """An execution of a step, with its predicted bytes and seconds, and the budgets and rates it
    was made for."""

    step: Step
    execution: Execution
    gpu_budget: float = math.inf  # bytes that the allocator may reserve
    host_budget: float = math.inf  # bytes that may be pinned
    rates: Rates = field(default_factory=lambda: H200)
    why: str = ""  # the reason for the format of the optimizer's state, where the planner chose it
    # seconds per step with each attention kernel, if several were compared
    compared: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def peak(self) -> Stage:
        return fullest_stage(self.step, self.execution)

    @property
    def host_bytes(self) -> int:
        return pinned_bytes(self.step, self.execution)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that `apply_execution` needs.

        The optimizer makes an arena of its own.
        """
        return arena_bytes(self.step, self.execution)

    @property
    def seconds(self) -> float:
        return step_seconds(self.step, self.execution, self.rates)

    def __str__(self) -> str:
        step, execution = self.step, self.execution
        rows = _ranks(self) + _places(execution) + _rebuilt_blocks(execution)
        rows.append(("attends to", describe(execution.kinds or step.shard.kinds)))
        rows += step.trained.described(step.shard) + execution.frozen.described
        if execution.maps_in_words is not None:
            rows.append(("linear maps", execution.maps_in_words))
        if self.compared:
            seconds = ", ".join(f"{name} {taken:.2f} s" for name, taken in self.compared.items())
            chosen = f"{execution.attention_backend} (auto: a step takes {seconds})"
            rows.append(("attention kernel", chosen))
        rows.append(("loss", execution.loss_impl))
        rows.append(("optimizer state", _state(self)))
        rows += _predictions(self)
        width = max(len(title) for title, _ in rows)
        return "\n".join(f"{title:<{width}}  {text}" for title, text in rows)


def _ranks(plan: Plan) -> Rows:
    """Returns how several GPUs share the step; one GPU has no row."""
    step, rows = plan.step, Rows()
    data = max(1, step.num_copies * step.num_shards // step.num_ranks)
    axes = {"data": data, "context": step.num_ranks}
    if step.tensor_ranks > 1:
        axes["tensor"] = step.tensor_ranks
    if math.prod(axes.values()) > 1:
        sizes = " x ".join(map(str, axes.values()))
        rows.append((f"GPUs, {' x '.join(axes)}", f"{sizes}; below, of each"))
    if step.num_copies > 1:
        shards = step.num_shards * step.tensor_ranks
        rows.append(("copies of the weights", f"{step.num_copies}, each sharded over {shards}"))
    if step.num_machines > 1:
        network = plan.rates["network"]
        source = "assumed" if network == ASSUMED_NETWORK else "measured"
        speed = f"{network / 1e9:.1f} GB/s per GPU between them, {source}"
        title = "FSDP" if step.num_copies == 1 else "FSDP and copies"
        rows.append((title, f"over {step.num_machines} machines, {speed}"))
    return rows


def _places(execution: Execution) -> Rows:
    """Returns the blocks by the place of each part; weights have a row if some are on the host."""
    placements = execution.placements
    rows = [
        ("layer inputs", _count(placement.input for placement in placements)),
        ("attention outputs", _count(placement.results for placement in placements)),
    ]
    weights = _count(execution.places_of_weights)
    if execution.ends == "host":
        rows.append(("weights", f"{weights}, embedding and head too"))
    elif execution.num_visiting:
        rows.append(("weights", weights))
    return rows


def _count(places: Iterable[str]) -> str:
    """Returns a text: of "host", "gpu" and "gpu" it is "1 host, 2 gpu"."""
    return ", ".join(f"{count} {place}" for place, count in Counter(places).items())


def _rebuilt_blocks(execution: Execution) -> Rows:
    """Returns how many blocks are kept whole, and how the others run again."""
    num_whole = sum(placement.is_whole for placement in execution.placements)
    rows = [("blocks kept whole", str(num_whole))]
    if num_whole < len(execution.placements):
        heads, tokens = "all heads at once", "all rows at once"
        if execution.heads_at_a_time:
            heads = "one key/value head at a time"
        if execution.mlp_tile_size:
            tokens = f"{execution.mlp_tile_size} rows at a time"
        rows += [("attention", heads), ("MLP", tokens)]
    return rows


def _state(plan: Plan) -> str:
    """Returns where the optimizer's state is, its format, and why it has this format."""
    execution, on_gpu = plan.execution, plan.execution.gpu_state_bytes
    if math.isinf(on_gpu) and execution.num_visiting:  # state of visiting weights is on the host
        on_gpu = plan.step.inventory(execution).gpu_state
    if math.isinf(on_gpu):
        text = "GPU"
    elif on_gpu == 0:
        text = "host"
    else:
        text = f"up to {gib(on_gpu)} on the GPU, the rest on the host"
    if plan.why or execution.state_format != STATE_FORMATS[0]:
        text += f", {execution.state_format}"
    return text + f" (auto: {plan.why})" if plan.why else text


def _predictions(plan: Plan) -> Rows:
    peak = plan.peak
    rows = [("predicted GPU peak", f"{gib(peak.bytes)}, in {peak.name}")]
    rows += [(f"  {name}", gib(size)) for name, size in peak.categories.items() if size]
    if peak.idle:
        rows.append(("  and idle in FSDP's stream", gib(peak.idle)))
    rows.append(("predicted host memory", f"{gib(plan.host_bytes)}, pinned"))
    rows.append(("  and while saving", gib(SAVING_BYTES)))
    rows.append(("predicted step", f"{plan.seconds:.1f} s"))
    return rows
