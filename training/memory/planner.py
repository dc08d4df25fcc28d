"""The planner searches for the fastest execution of a step that fits, by the predictions of the cost model."""

import bisect
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from training.attention_flags import describe
from training.checkpoint.pieces import SAVING_BYTES
from training.host.errors import UserError
from training.memory.cost_model import Stage, Step, gib
from training.memory.execution import Execution, Placement
from training.memory.machine import H200, Rates

# A plan's predicted peak must stay below budget / HEADROOM. The 4% cover allocator fragmentation and what the cost
# model does not count. Where no plan stays below, a plan below budget / LEAST_HEADROOM will do: at the limit the
# allocator gives back free pages of its expandable segments, and that costs some time.
HEADROOM = 1.04
LEAST_HEADROOM = 1.01
# Tokens, in every plan. Tiles cost no time, and save one matrix product that a placed block otherwise recomputes.
MLP_TILE_SIZE = 8192
_CONTEXT_MULTIPLE = 1024  # tokens: the precision to which the largest context is found


@dataclass(frozen=True)
class Plan:
    """An execution of a step, with its predicted bytes and seconds, and the budgets and rates it was made for.

    Args:
        gpu_budget, host_budget: bytes that the allocator may reserve, and bytes that may be pinned.
    """

    step: Step
    execution: Execution
    gpu_budget: float = math.inf
    host_budget: float = math.inf
    rates: Rates = field(default_factory=lambda: H200)

    @functools.cached_property
    def peak(self) -> Stage:
        return self.step.peak(self.execution)

    @property
    def host_bytes(self) -> int:
        return self.step.host_bytes(self.execution)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that `apply_placement` needs. The optimizer makes an arena of its own."""
        return self.step.arena_bytes(self.execution)

    @property
    def seconds(self) -> float:
        return self.step.seconds(self.execution, self.rates)

    def __str__(self) -> str:
        execution, placements, sharing = self.execution, self.execution.placements, self.step.num_ranks
        axes = {"data": self.step.num_shards // sharing, "context": sharing}
        axes |= {"tensor": self.step.tensor_ranks} if self.step.tensor_ranks > 1 else {}
        sizes = " x ".join(map(str, axes.values()))
        rows = [(f"GPUs, {' x '.join(axes)}", f"{sizes}; below, of each")] if math.prod(axes.values()) > 1 else []
        for title, name in (("layer inputs", "input"), ("attention outputs", "results")):
            places = [getattr(p, name) for p in placements]
            counts = [f"{places.count(p)} {p}" for p in dict.fromkeys(places)]
            rows.append((title, ", ".join(counts)))
        num_whole = sum(p.is_whole for p in placements)
        rows.append(("blocks kept whole", str(num_whole)))
        state = {math.inf: "GPU", 0: "host"}.get(execution.gpu_state_bytes)
        state = state or f"up to {gib(execution.gpu_state_bytes)} on the GPU, the rest on the host"
        if num_whole < len(placements):
            heads = "one key/value head at a time" if execution.heads_at_a_time else "all heads at once"
            tiles = f"{execution.mlp_tile_size} rows at a time" if execution.mlp_tile_size else "all rows at once"
            rows += [("attention", heads), ("MLP", tiles)]
        rows += [("attends to", describe(execution.kinds or self.step.share.kinds))]
        rows += [("loss", execution.loss_impl), ("optimizer state", state)]
        rows += [("predicted GPU peak", f"{gib(self.peak.bytes)}, in {self.peak.name}")]
        rows += [(f"  {name}", gib(size)) for name, size in self.peak.categories.items() if size]
        rows += [("  and idle in FSDP's stream", gib(self.peak.idle))] if self.peak.idle else []
        rows += [("predicted host memory", gib(self.host_bytes))]
        rows += [("  and while saving", gib(SAVING_BYTES)), ("predicted step", f"{self.seconds:.1f} s")]
        width = max(len(title) for title, _ in rows)
        return "\n".join(f"{title:<{width}}  {value}" for title, value in rows)


def make_plan(step: Step, gpu_bytes: float, host_bytes: float, rates: Rates = H200) -> Plan:
    """Returns the plan of the fewest predicted seconds within both budgets.

    Args:
        gpu_bytes: bytes that the allocator may reserve. A plan leaves `HEADROOM`, or `LEAST_HEADROOM` if none can.
        host_bytes: bytes that may be pinned.
        rates: the machine's.

    Raises:
        UserError: no plan fits, and the message names the largest context that would; or a document is longer than
            some layer's attention takes.
    """
    if step.has_too_long_document:
        raise UserError(
            f"attention to chosen blocks takes documents of up to {step.longest_document:,} tokens, and context_length "
            f"{step.context_length:,} has longer ones; lower it, or use attention_type full"
        )
    found = _search(step, gpu_bytes / HEADROOM, host_bytes) or _search(step, gpu_bytes / LEAST_HEADROOM, host_bytes)
    if not found:
        budgets = describe_budgets(gpu_bytes, host_bytes)
        largest = find_max_context(step, gpu_bytes, host_bytes)
        if largest == 0:
            state = step.optimizer(step.given).gpu_state
            raise UserError(
                f"the model does not fit into {budgets} at {_CONTEXT_MULTIPLE} tokens of context and batch_size "
                f"{step.batch_size}: its parameters take {gib(step.parameter_bytes)} of the GPU, its optimizer's state "
                f"{gib(state)} of either"
            )
        raise UserError(
            f"context_length {step.context_length} does not fit into {budgets}; the largest that does is {largest}"
        )
    fastest = min(found, key=lambda execution: step.seconds(execution, rates))
    return Plan(step, fastest, gpu_bytes, host_bytes, rates)


def describe_budgets(gpu_bytes: float, host_bytes: float) -> str:
    """Returns both budgets in GiB as text."""
    host = "any amount" if math.isinf(host_bytes) else gib(host_bytes)
    return f"{gib(gpu_bytes)} of GPU and {host} of host memory"


def has_plan(step: Step, gpu_bytes: float, host_bytes: float) -> bool:
    """Whether any plan fits into both budgets."""
    return not step.has_too_long_document and any(
        _fitting_inputs(step, base, step.layers // 2, gpu_bytes / LEAST_HEADROOM, host_bytes)
        for base in _layouts(step)
        if base.heads_at_a_time  # this, with half of the inputs recomputed, takes the least memory
    )


def find_max_context(step: Step, gpu_bytes: float, host_bytes: float) -> int:
    """Returns the longest context for which a plan exists, in tokens, a multiple of 1024; 0 if there is none."""

    def fits(multiple: int) -> bool:
        return has_plan(step.at(multiple * _CONTEXT_MULTIPLE), gpu_bytes, host_bytes)

    too_long = 1
    while fits(too_long):
        too_long *= 2
    # too_long // 2 fits (0 counts as fitting), so the first multiple that does not fit lies after it.
    first = bisect.bisect_left(range(too_long), True, too_long // 2 + 1, key=lambda multiple: not fits(multiple))
    return (first - 1) * _CONTEXT_MULTIPLE


def _search(step: Step, gpu_bytes: float, host_bytes: float) -> list[Execution]:
    """Returns the executions that fit: the fastest for each layout and each number of inputs on the host.

    Args:
        gpu_bytes, host_bytes: limits of the predicted bytes, headroom already taken off.
    """
    return [
        _keep(step, base, inputs, gpu_bytes, host_bytes)
        for base in _layouts(step)
        for inputs in _fastest_inputs(step, base, gpu_bytes, host_bytes)
    ]


def _fastest_inputs(step: Step, base: Execution, gpu_bytes: float, host_bytes: float) -> list[list[str]]:
    """Returns `_fitting_inputs` with as few inputs recomputed as possible: recomputing more only takes longer."""
    half = step.layers // 2

    @functools.cache
    def fitting(recomputed: int) -> list[list[str]]:
        return _fitting_inputs(step, base, recomputed, gpu_bytes, host_bytes)

    if not fitting(half):  # half of the inputs recomputed takes the least memory
        return []
    return fitting(half - _largest(half, lambda fewer: bool(fitting(half - fewer))))


def _fits(step: Step, execution: Execution, gpu_bytes: float, host_bytes: float) -> bool:
    """Whether an execution fits. Stages are computed up to the first that is too full: most executions do not fit."""
    fits_host = step.host_bytes(execution) <= host_bytes
    return fits_host and all(stage.bytes + stage.idle <= gpu_bytes for stage in step.stages(execution))


def _layouts(step: Step) -> Iterator[Execution]:
    """Yields executions without placements: all combinations of state on the GPU, heads at a time, and loss."""
    state = step.optimizer(step.given).gpu_state
    can_choose = step.given.loss_impl == "auto" and not step.uses_chunked_loss(step.given)
    for gpu_state in (math.inf, *(state * quarters / 4 for quarters in (3, 2, 1, 0))):
        for heads in (None, 1):
            for loss_impl in ("auto", "chunked") if can_choose else (step.given.loss_impl,):
                yield replace(
                    step.given, mlp_tile_size=MLP_TILE_SIZE, heads_at_a_time=heads, gpu_state_bytes=gpu_state,
                    loss_impl=loss_impl,
                )  # fmt: skip


def _fitting_inputs(
    step: Step, base: Execution, recomputed: int, gpu_bytes: float, host_bytes: float
) -> list[list[str]]:
    """Returns all ways to place the layers' inputs with which an execution fits, as one place per layer.

    `recomputed` inputs are recomputed, and each way has another number of inputs on the host. The last layers' inputs
    stay on the GPU: backward needs them first, and their memory is free when gradients need it.
    """
    candidates = []
    for on_host in range(step.layers - recomputed + 1):
        places = ["host"] * on_host + ["gpu"] * (step.layers - recomputed - on_host)
        for i in range(recomputed):
            places.insert(2 * i + 1, "recompute")
        candidates.append(places)
    # Each next candidate takes more of the host and in no stage more of the GPU, so all that fit are neighbours.
    stop = bisect.bisect_left(candidates, True, key=lambda inputs: step.host_bytes(_placed(base, inputs)) > host_bytes)
    start = bisect.bisect_left(
        candidates, True, hi=stop, key=lambda inputs: _fits(step, _placed(base, inputs), gpu_bytes, host_bytes)
    )
    return candidates[start:stop]


def _keep(step: Step, base: Execution, inputs: list[str], gpu_bytes: float, host_bytes: float) -> Execution:
    """Returns `base` with these inputs and as many attention outputs kept as fit: first on the GPU, then on the host.

    If all inputs and outputs stay on the GPU, as many blocks as fit are left whole. The last layers come first here,
    too, for the reason given in `_fitting_inputs`.
    """

    def largest(limit: int, place: Callable[[int], Execution]) -> int:
        return _largest(limit, lambda n: _fits(step, place(n), gpu_bytes, host_bytes))

    L = step.layers
    on_gpu = largest(L, lambda n: _placed(base, inputs, n))
    if on_gpu == L and set(inputs) == {"gpu"}:
        return _placed(base, inputs, L, whole=largest(L, lambda n: _placed(base, inputs, L, whole=n)))
    return _placed(base, inputs, on_gpu, largest(L - on_gpu, lambda n: _placed(base, inputs, on_gpu, n)))


_placement = functools.cache(Placement)  # a search makes the same few placements many thousand times


def _placed(
    base: Execution, inputs: list[str], attention_on_gpu: int = 0, attention_on_host: int = 0, whole: int = 0
) -> Execution:
    """Returns `base` with placements.

    The last layers keep attention's output on the GPU, layers before them on the host, and the first layers not at all.
    The last `whole` blocks are left whole.
    """
    recomputed = len(inputs) - attention_on_gpu - attention_on_host
    attention = ["recompute"] * recomputed + ["host"] * attention_on_host + ["gpu"] * attention_on_gpu
    rest = ["recompute"] * (len(inputs) - whole) + ["gpu"] * whole
    return replace(base, placements=tuple(map(_placement, inputs, attention, rest)))


def _largest(limit: int, holds) -> int:
    """Returns the largest n in 0 .. limit with `holds(n)`, which is true from 0 up to some n and false beyond."""
    if limit and holds(limit):
        return limit
    return bisect.bisect_left(range(1, limit), True, key=lambda n: not holds(n))
