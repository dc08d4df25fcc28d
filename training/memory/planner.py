"""The planner searches for the fastest execution of a step that fits, by the predictions of the
cost model."""

import bisect
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from training.host.errors import UserError
from training.host.sizes import gib
from training.memory.cost_model import pinned_bytes, step_seconds
from training.memory.execution import Execution, Placement
from training.memory.machine import H200, Rates
from training.memory.plan import Plan
from training.memory.stages import Stages
from training.memory.step import Step
from training.optim.formats import STATE_FORMATS

# A plan's predicted peak must stay below budget / HEADROOM. The 4% cover allocator fragmentation
# and what the cost model does not count. Where no plan stays below, a plan below budget /
# LEAST_HEADROOM will do: at the limit the allocator gives back free pages of its expandable
# segments, and that costs some time.
HEADROOM = 1.04
LEAST_HEADROOM = 1.01
# Share of a step's seconds that a smaller format of optimizer state must save where the first fits
# too: it is less precise.
FORMAT_SAVES = 0.01
# Share that optimizer state on the host must save as well, and weights there once more.
OFFLOAD_SAVES = 0.01
# Parts of a quarter of the optimizer's state: the precision to which its share on the GPU is found.
STATE_PARTS = 16
_CONTEXT_MULTIPLE = 1024  # tokens: the precision to which the largest context is found


def make_plan(step: Step, gpu_bytes: float, host_bytes: float, rates: Rates = H200) -> Plan:
    """Returns the plan of the fewest predicted seconds within the bytes of the GPU and of pinned
    host memory.

    Raises UserError if no plan fits, with the batch size and the context that would, or if a
    document is longer than some layer's attention takes.
    """
    if step.has_too_long_document:
        raise UserError(
            f"attention to chosen blocks takes documents of up to {step.longest_document:,} "
            f"tokens, and context_length {step.context_length:,} has longer ones; "
            "lower it, or use attention_type full"
        )
    for waiting, headroom in itertools.product(_waiting(step), (HEADROOM, LEAST_HEADROOM)):
        search = _Search(step, gpu_bytes / headroom, host_bytes, waiting)
        if seconds := search.candidates(rates):
            execution, why = _choose(step, seconds)
            execution = search.with_more_state(execution, rates)
            return Plan(step, execution, gpu_bytes, host_bytes, rates, why)
    raise UserError(_why_no_plan(step, (gpu_bytes, host_bytes)))


def _why_no_plan(step: Step, budgets: tuple[float, float]) -> str:
    """Returns a refusal of a step, with changes that fit: a smaller format of the optimizer's
    state, a smaller batch, a shorter context."""
    length = f"context_length {step.context_length}"
    if step.batch_size > 1:
        length += f" with batch_size {step.batch_size}"
    length += f" does not fit into {describe_budgets(*budgets)}"
    first, *_, smallest = STATE_FORMATS
    advice = ""
    if step.given.state_format == first and has_plan(step.with_format(smallest), *budgets):
        advice = f"; give optimizer_state {smallest}"
    fewer = _largest(step.batch_size - 1, lambda n: has_plan(step.with_batch(n), *budgets))
    largest = find_max_context(step if fewer else step.with_batch(1), *budgets)
    if fewer:
        lower = f"lower batch_size to {fewer}"
        if largest:
            lower += f", or context_length to {largest}"
        return f"{length}{advice}; {'or ' if advice else ''}{lower}"
    if largest:
        which = f"the largest that does in {first}" if advice else "the largest that does"
        alone = " with batch_size 1" if step.batch_size > 1 else ""
        return f"{length}{advice}; {which} is {largest}{alone}"
    least = step.with_format(_formats(step)[-1])
    state = f"its optimizer's state {gib(step.inventory(least.given).gpu_state)} of either"
    budget = "either" if step.can_visit else "the GPU"
    parameters = f"its parameters take {gib(step.parameter_bytes)} of {budget}"
    if step.can_visit and step.given.loss_impl == "standard":
        parameters += ", but embedding and head of the GPU with loss_impl standard"
    return (
        f"the model does not fit into {describe_budgets(*budgets)} at {_CONTEXT_MULTIPLE} tokens "
        f"of context and batch_size 1: {parameters}, {state}{advice}"
    )


def _choose(step: Step, seconds: dict[Execution, float]) -> tuple[Execution, str]:
    """Returns the fastest execution, or the fastest in the first format where others hardly save
    time; and why.

    Optimizer state and weights on the host must save time as well, see OFFLOAD_SAVES.
    """

    def cost(execution: Execution) -> float:
        return _cost(step, execution, seconds[execution])

    fastest = min(seconds, key=cost)
    if step.given.state_format != "auto":
        return fastest, ""
    first = STATE_FORMATS[0]
    precise = min(
        (execution for execution in seconds if execution.state_format == first),
        key=cost,
        default=None,
    )
    if precise is None:
        return fastest, f"too little room for {first}"
    saved = seconds[precise] - seconds[fastest]
    if saved < FORMAT_SAVES * seconds[precise]:
        return precise, f"costs less than {FORMAT_SAVES:.0%} of a step"
    return fastest, f"saves {saved:.1f} s of a step"


def _formats(step: Step) -> tuple[str, ...]:
    """Returns formats that optimizer state may have; the last takes the least of both budgets."""
    return STATE_FORMATS if step.given.state_format == "auto" else (step.given.state_format,)


def _heads_at_a_time(step: Step) -> tuple[int | None, ...]:
    """Returns the key/value heads of attention at a time; the last takes the least memory."""
    return (None, 1) if step.shard.attends_in_groups else (None,)


def describe_budgets(gpu_bytes: float, host_bytes: float) -> str:
    """Returns both budgets in GiB as text."""
    host = "any amount" if math.isinf(host_bytes) else gib(host_bytes)
    return f"{gib(gpu_bytes)} of GPU and {host} of host memory"


def has_plan(step: Step, gpu_bytes: float, host_bytes: float) -> bool:
    """Whether any plan fits into both budgets."""
    return any(_has_room(step, layout, gpu_bytes, host_bytes) for layout in _least_layouts(step))


def find_max_context(step: Step, gpu_bytes: float, host_bytes: float) -> int:
    """Returns the longest context for which a plan exists, in tokens, a multiple of 1024; 0 if
    there is none."""

    def is_too_long(layout: Execution, multiple: int) -> bool:
        return not _has_room(step.at(multiple * _CONTEXT_MULTIPLE), layout, gpu_bytes, host_bytes)

    longest = 0
    # a short context has a layout for each loss
    for layout in _least_layouts(step.at(_CONTEXT_MULTIPLE)):
        too_long = longest + 1
        while not is_too_long(layout, too_long):
            longest, too_long = too_long, 2 * too_long
        untried = range(longest + 1, too_long)
        longest += bisect.bisect_left(untried, True, key=functools.partial(is_too_long, layout))
    return longest * _CONTEXT_MULTIPLE


def _least_layouts(step: Step) -> Iterator[Execution]:
    """Yields the layouts that take the least memory, of each number of blocks whose weights wait on
    the host."""
    for layout in _Search(step, 0, 0, [*itertools.chain(*_waiting(step))]).layouts():
        least = layout.heads_at_a_time, layout.state_format
        if least == (_heads_at_a_time(step)[-1], _formats(step)[-1]):
            yield layout


def _has_room(step: Step, layout: Execution, gpu_bytes: float, host_bytes: float) -> bool:
    """Whether a layout fits with half of the inputs recomputed, which takes the least memory."""
    search = _Search(step, gpu_bytes / LEAST_HEADROOM, host_bytes)
    return not step.has_too_long_document and search.has_room(layout, step.layers // 2)


@dataclass(frozen=True)
class _Search:
    """A search for executions of a step within limits of its predicted bytes, headroom already
    taken off.

    The last layers keep on the GPU what fits there: backward needs them first, and their memory is
    free when gradients need it. Layers before them keep on the host, and the first layers not at
    all. The weights of the first `waiting` blocks wait on the host; one more than all blocks means
    all of them with embedding and head.
    """

    step: Step
    gpu_bytes: float
    host_bytes: float
    waiting: Sequence[int] = (0,)

    def candidates(self, rates: Rates) -> dict[Execution, float]:
        """Returns executions that fit, with their seconds: the fastest by layout and number of
        inputs on the host.

        Leaves out what cannot be faster. A layout without space for all inputs and attention
        outputs on the GPU is at best as fast as with that space. Once all attention outputs stay
        there, more inputs on the host only take time. If they stay there with all weights on the
        GPU, no weights wait on the host.
        """
        seconds: dict[Execution, float] = {}
        L, least = self.step.layers, math.inf

        def cost(execution: Execution) -> float:
            return _cost(self.step, execution, step_seconds(self.step, execution, rates))

        for base in self.layouts():
            if base.num_visiting and any(map(_keeps_all_there, seconds)):
                break
            on_gpu = _placed(base, ["gpu"] * L, L)
            if seconds and cost(on_gpu) >= least and not self.fits(on_gpu):
                continue
            for inputs in self.fastest_inputs(base):
                if seconds and "host" in inputs and cost(_placed(base, inputs, L)) >= least:
                    continue
                execution = self.keep(base, inputs, next(reversed(seconds), None))
                seconds[execution] = step_seconds(self.step, execution, rates)
                least = min(least, cost(execution))
                if all(placement.results == "gpu" for placement in execution.placements):
                    break
        return seconds

    def with_more_state(self, execution: Execution, rates: Rates) -> Execution:
        """Returns an execution with all the optimizer's state on the GPU for which it has space, if
        that saves time."""
        if math.isinf(execution.gpu_state_bytes) or execution.num_visiting:
            return execution
        state = self.step.inventory(replace(execution, gpu_state_bytes=math.inf)).gpu_state
        part = state / 4 / STATE_PARTS

        def with_parts(parts: int) -> Execution:
            return replace(execution, gpu_state_bytes=execution.gpu_state_bytes + parts * part)

        parts = _largest(STATE_PARTS - 1, lambda parts: self.fits(with_parts(parts)))
        both = execution, with_parts(parts)
        return min(both, key=lambda candidate: step_seconds(self.step, candidate, rates))

    def fits(self, execution: Execution) -> bool:
        """Whether an execution fits.

        Stops at the first stage that is too full: most executions do not fit.
        """
        if pinned_bytes(self.step, execution) > self.host_bytes:
            return False
        stages = Stages(self.step, execution)
        likely_first = itertools.chain(stages.from_loss(), stages.forward())
        return all(stage.bytes + stage.idle <= self.gpu_bytes for stage in likely_first)

    def layouts(self) -> Iterator[Execution]:
        """Yields executions whose placements only say where weights are; those with all of them on
        the GPU come first.

        They are all combinations of the blocks whose weights wait on the host, the state's format
        and share on the GPU, heads at a time, and the loss.
        """
        step, requested, L = self.step, self.step.given, self.step.layers
        ends = step.shard.num_ends
        # Tiles cost no time, and save one matrix product that a placed block otherwise recomputes.
        tile_size = max(parts.mlp.tile_size for parts in {*step.parts})
        can_choose = requested.loss_impl == "auto" and not step.uses_chunked_loss(requested)
        for num, state_format in itertools.product(self.waiting, _formats(step)):
            weights = (_placement(weights="host"),) * min(num, L) + (_placement(),) * (L - num)
            base = replace(
                requested, placements=weights, mlp_tile_size=tile_size, state_format=state_format
            )
            losses = ["auto", "chunked"] if can_choose else [requested.loss_impl]
            # shares of the optimizer's state on the GPU; with weights of blocks on the host, only
            # state of embedding and head can be there
            shares = [math.inf, 0.75, 0.5, 0.25, 0]
            if num > L:
                base, losses = replace(base, loss_impl="chunked", ends="host"), ["chunked"]
                shares = [0]
            elif num > 0:
                shares = [math.inf, *(i / ends for i in reversed(range(ends)))]
            for share, heads, loss_impl in itertools.product(
                shares, _heads_at_a_time(step), losses
            ):
                on_gpu = share  # inf * 0 is NaN
                if math.isfinite(share):
                    on_gpu = share * step.inventory(base).gpu_state
                yield replace(
                    base, gpu_state_bytes=on_gpu, heads_at_a_time=heads, loss_impl=loss_impl
                )

    def fastest_inputs(self, base: Execution) -> list[tuple[str, ...]]:
        """Returns ways of `inputs_within_host` that fit, with the fewest inputs recomputed: more
        only take longer."""
        half = self.step.layers // 2
        if not self.has_room(base, half):  # half of the inputs recomputed takes the least memory
            return []
        recomputed = half - _largest(half, lambda fewer: self.has_room(base, half - fewer))
        ways = self.inputs_within_host(base, recomputed)
        first = bisect.bisect_left(ways, True, key=lambda way: self.fits(_placed(base, way)))
        return ways[first:]

    def has_room(self, base: Execution, recomputed: int) -> bool:
        """Whether an execution fits in any of the ways of `inputs_within_host`.

        If any does, the last does.
        """
        num_ways = self._num_ways(base, recomputed)
        if not num_ways:
            return False
        inputs = _inputs(self.step.layers, recomputed, num_ways - 1)
        return self.fits(_placed(base, inputs))

    def inputs_within_host(self, base: Execution, recomputed: int) -> list[tuple[str, ...]]:
        """Returns the ways to place the layers' inputs for which the host has room, as one place
        per layer.

        `recomputed` inputs are recomputed. Each next way has one more on the host, and in no stage
        more on the GPU.
        """
        num_ways = self._num_ways(base, recomputed)
        return [_inputs(self.step.layers, recomputed, on_host) for on_host in range(num_ways)]

    def _num_ways(self, base: Execution, recomputed: int) -> int:
        """Returns the number of ways of `inputs_within_host`."""
        L = self.step.layers

        def has_room(num_ways: int) -> bool:
            execution = _placed(base, _inputs(L, recomputed, num_ways - 1))
            return pinned_bytes(self.step, execution) <= self.host_bytes

        return _largest(L - recomputed + 1, has_room)

    def keep(
        self, base: Execution, inputs: Sequence[str], near: Execution | None = None
    ) -> Execution:
        """Returns `base` with these places of inputs, and as many kept outputs as fit.

        Outputs are kept on the GPU, then on the host. If the GPU keeps all inputs and outputs,
        as many blocks as fit are kept whole. The search begins at the numbers of outputs in `near`.
        """

        def most(
            limit: int, place: Callable[[int], Execution], guess: int | None = None
        ) -> Execution:
            """Returns the execution that places the most blocks, up to `limit`, and fits."""
            return place(_largest(limit, lambda n: self.fits(place(n)), guess))

        L = self.step.layers
        results = Counter({"gpu": L, "host": L})
        if near:
            results = Counter(placement.results for placement in near.placements)
        kept = most(L, lambda n: _placed(base, inputs, n), results["gpu"])
        on_gpu = sum(placement.results == "gpu" for placement in kept.placements)
        if on_gpu == L and set(inputs) == {"gpu"}:
            limit = 0 if base.frozen.holds_weight else L - base.num_visiting
            return most(limit, lambda n: _placed(base, inputs, L, num_whole=n))
        return most(L - on_gpu, lambda n: _placed(base, inputs, on_gpu, n), results["host"])


# A search makes the same few placements many thousand times.
_placement = functools.cache(Placement)


def _keeps_all_there(execution: Execution) -> bool:
    """Whether all inputs, attention outputs and weights stay on the GPU."""
    places = {(placement.input, placement.results) for placement in execution.placements}
    return places == {("gpu", "gpu")} and not execution.num_visiting


@functools.cache
def _inputs(layers: int, recomputed: int, on_host: int) -> tuple[str, ...]:
    """Returns places of the layers' inputs.

    With 6 layers, 2 recomputed and 1 on the host: host, recompute, gpu, recompute, gpu, gpu.
    """
    places = ["host"] * on_host + ["gpu"] * (layers - recomputed - on_host)
    for i in range(recomputed):
        places.insert(2 * i + 1, "recompute")
    return tuple(places)


def _placed(
    base: Execution, inputs: Sequence[str], on_gpu: int = 0, on_host: int = 0, num_whole: int = 0
) -> Execution:
    """Returns `base` with these inputs, so many outputs, and the last `num_whole` whole."""
    L = len(inputs)
    results = ["recompute"] * (L - on_gpu - on_host) + ["host"] * on_host + ["gpu"] * on_gpu
    rest = ["recompute"] * (L - num_whole) + ["gpu"] * num_whole
    weights = base.places_of_weights
    return replace(base, placements=tuple(map(_placement, inputs, results, rest, weights)))


def _waiting(step: Step) -> list[Sequence[int]]:
    """Returns numbers of blocks whose weights wait on the host, see `_Search`: the next where the
    ones before fail.

    Half of the blocks is a multiple of 2, since a pair of blocks may have one input, from which
    both are rebuilt.
    """
    if not step.can_visit:
        return [(0,)]
    L, can_take_ends = step.layers, step.given.loss_impl != "standard"
    half = L // 4 * 2
    return [
        (0, L, half),
        [n for n in range(4, L, 4) if n != half],
        [L + 1] if can_take_ends else (),
    ]


def _cost(step: Step, execution: Execution, seconds: float) -> float:
    """Returns an execution's seconds, and more if its use of the host must save OFFLOAD_SAVES."""
    offloads = (step.inventory(execution).host > 0) + (execution.num_visiting > 0)
    return seconds / (1 - OFFLOAD_SAVES * offloads)


def _largest(limit: int, holds: Callable[[int], bool], guess: int | None = None) -> int:
    """Returns the largest n in 0 .. limit with `holds(n)`, which is true up to some n only.

    Where a `guess` is near the answer, few n are tried: from 8 on 9, 11, 15, or down 7, 5, 1.
    Without one, the limit is tried first.
    """
    largest, too_large = 0, limit + 1
    n, stride = (limit, limit) if guess is None else (max(1, min(guess, limit)), 1)
    while largest < n < too_large:
        if holds(n):
            largest, n = n, n + stride
        else:
            too_large, n = n, n - stride
        stride *= 2
    untried = range(largest + 1, too_large)
    return largest + bisect.bisect_left(untried, True, key=lambda n: not holds(n))
