"""The profiler measures the memory and seconds of a training step, by stages and by categories.

Hooks on the model split a step into the stages of `stages.Stages`, so each measured stage has a
predicted one. Known tensors have their category: parameters, gradients, optimizer state, blocks'
inputs, the gradients that flow between blocks, and attention outputs that placed blocks keep. All
other bytes are booked on the part of the block that ran between two readings of the allocator:
attention or MLP.
"""

import gc
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kernels.head_loss import NextToken
from training.host.sizes import GIB
from training.memory.cost_model import arena_bytes
from training.memory.execution import Execution
from training.memory.placement import apply_execution
from training.memory.stages import Stage
from training.memory.step import Step
from training.memory.timeline import Phase, draw_phases
from training.optim.adamw import MasterAdamW
from training.plots.curves import save_picture

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "layer inputs",
    "attention",
    "MLP",
    "loss",
    "workspace",
)
# A step of up to 32,768 tokens of context runs three times: the second run is timed, and the bytes
# of the third are measured. A longer step runs once to save time, after the same step of few
# layers: it hides the time of measuring.
LONGEST_REPEATED = 32_768


@dataclass(frozen=True)
class MeasuredStage(Stage):
    """A stage as measured: its bytes at the peak by category, most bytes reserved, and seconds."""

    reserved: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """A measured step."""

    stages: list[MeasuredStage]
    seconds: float
    host_bytes: int  # pinned
    alloc_retries: int  # how often the allocator gave its cache back because memory ran out

    @property
    def peak(self) -> MeasuredStage:
        """The fullest stage."""
        return max(self.stages, key=lambda stage: stage.bytes)

    @property
    def reserved(self) -> int:
        """The most bytes of the GPU that the allocator had."""
        return max(stage.reserved for stage in self.stages)


class Reading(NamedTuple):
    """Bytes allocated now, and the most allocated and reserved since the reading before."""

    allocated: int
    peak: int
    reserved: int


class CudaCounter:
    """The allocator and the clock of the current GPU.

    PyTorch counts bytes as the host allocates: nothing waits.
    """

    def read(self) -> Reading:
        """Returns bytes now, and their peaks since the last call."""
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return Reading(torch.cuda.memory_allocated(), *peaks)

    def alloc_retries(self) -> int:
        """Returns how often the allocator has given its cache back because memory ran out."""
        return torch.cuda.memory_stats()["num_alloc_retries"]

    def mark(self) -> torch.cuda.Event:
        """Returns an event at this point of the compute stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Returns the seconds between two marks. Waits for the second."""
        stop.synchronize()
        return start.elapsed_time(stop) / 1000


class Recorder:
    """Splits the steps of a model.Transformer, whose placements are applied, into stages."""

    def __init__(self, model: nn.Module, optimizer: MasterAdamW, counter: CudaCounter):
        self.model, self.optimizer, self.counter = model, optimizer, counter
        placed = [block.forward.func.__self__ for block in model.layers if "forward" in vars(block)]
        self.placed = placed[0] if placed else None  # None: all blocks are whole
        # living storage: category
        self.known: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()
        # part of the model: bytes by category
        self.booked: defaultdict[Any, Counter] = defaultdict(Counter)
        self.held: Counter = Counter()
        self.stages: dict[str, tuple[Counter, int]] = {}
        self.spans: defaultdict[str, list[tuple]] = defaultdict(list)
        self.owner, self.category, self.in_backward = "before the step", "workspace", False
        self.peak: Counter = Counter()
        self.hooks: list[RemovableHandle] = []
        self.reserved, self.began = 0, counter.mark()
        counter.read()
        self._read()
        self._start_stage()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Splits the model's forward and backward into stages, by hooks, while it is entered."""
        model = self.model
        self.hooks = [
            model.embed_tokens.register_forward_pre_hook(
                lambda *_: self._run("embedding", "layer inputs")
            ),
            model.embed_tokens.register_forward_hook(
                lambda module, inputs, x: self._enter_layers(x)
            ),
            model.norm.register_forward_pre_hook(
                lambda module, inputs: self._enter_loss(inputs[0])
            ),
        ]
        for i, block in enumerate(model.layers):
            self.hooks += [
                block.register_forward_pre_hook(
                    lambda _, inputs, i=i: self._enter_block(i, inputs[0])
                ),
                (block.input_layernorm or block.mixer).register_forward_pre_hook(
                    lambda _, inputs: self._enter_attention(inputs[0])
                ),
                # After attention, and not at its end, where its caller still holds its input.
                block.post_attention_layernorm.register_forward_pre_hook(
                    lambda _, inputs, i=i: self._enter_mlp(i, inputs[0])
                ),
                block.register_forward_hook(lambda _, inputs, y, i=i: self._leave_block(i, y)),
            ]
        try:
            yield
        finally:
            # of tensors, too: a broken-off backward's graph would hold this recorder for good
            for hook in self.hooks:
                hook.remove()

    def end_stage(self, name: str) -> None:
        """Ends the stage that runs and gives it a name. The next one begins."""
        self._read()
        self.stages[name] = self.peak, self.reserved  # the last micro-batch stays
        before, self.began = self.began, self.counter.mark()
        self.spans[name].append((before, self.began))
        self._start_stage()

    def end_backward(self) -> None:
        """Ends a micro-batch's backward: no hook sees the end of its last stage."""
        self.end_stage("backward of embedding")
        self.booked.clear()
        self.in_backward = False
        self._run("update", "workspace")

    def measured(self) -> list[MeasuredStage]:
        """Returns the stages in order. Waits for the GPU."""
        seconds = {
            name: sum(self.counter.seconds(*span) for span in spans)
            for name, spans in self.spans.items()
        }
        return [
            MeasuredStage(
                name,
                {category: categories[category] for category in CATEGORIES},
                reserved,
                seconds[name],
            )
            for name, (categories, reserved) in self.stages.items()
        ]

    # Hooks, in the order of a step

    def _enter_layers(self, x: Tensor) -> None:
        self._know("layer inputs", x)
        self.end_stage("embedding")
        self._run(0, "layer inputs")

    def _enter_block(self, layer: int, x: Tensor) -> None:
        def end_backward(dx: Tensor) -> None:
            self._know("MLP" if layer else "layer inputs", dx)
            self.end_stage(f"backward of layer {layer}, attention")
            self.booked.pop(layer, None)
            self._run(*((layer - 1, "MLP") if layer else ("embedding", "gradients")))

        self.hooks.append(x.register_hook(end_backward))

    def _enter_attention(self, x: Tensor) -> None:
        self._read()
        if self.in_backward:  # the block is rebuilt: only its input and its kept results exist
            self._know("layer inputs", x)
            self.booked.pop(self.owner, None)
        self.category = "attention"
        self._read()

    def _enter_mlp(self, layer: int, attended: Tensor) -> None:
        def end_backward(gradient: Tensor) -> None:
            self.end_stage(f"backward of layer {layer}, MLP")
            self.category = "attention"

        if attended.requires_grad:  # part of a graph, so backward comes back to it
            self.hooks.append(attended.register_hook(end_backward))
        self._read()
        # made by attention, kept by the MLP
        self.booked[self.owner]["attention"] -= attended.nbytes
        self.booked[self.owner]["MLP"] += attended.nbytes
        self.category = "MLP"
        self._read()

    def _leave_block(self, layer: int, y: Tensor) -> None:
        self._know("layer inputs", y)
        self.end_stage(f"forward of layer {layer}")
        # the tensors that it keeps are known
        if self.placed and not self.placed.placements[layer].is_whole:
            self.booked.pop(layer, None)
        self._run(layer + 1, "layer inputs")

    def _enter_loss(self, x: Tensor) -> None:
        def end_backward(dx: Tensor) -> None:
            self._know("MLP", dx)
            self.end_stage("loss")
            self.booked.pop("loss", None)
            # Only the head's gradient is left of the loss. The gradient of a tied head waits for
            # the embedding's.
            self._run("head", "gradients")
            self.in_backward = True
            self._run(len(self.model.layers) - 1, "MLP")

        self._know("loss", x)
        self._run("loss", "loss")
        self.hooks.append(x.register_hook(end_backward))

    # Readings

    def _run(self, owner: Any, category: str) -> None:
        """Begins to book the bytes of unknown tensors on `owner`, under `category`."""
        self.owner, self.category = owner, category
        self._read()

    def _know(self, category: str, tensor: Tensor) -> None:
        """Gives a tensor its category for as long as it lives."""
        self.known[tensor.untyped_storage()] = category

    def _start_stage(self) -> None:
        self.peak, self.reserved = Counter(self.held), 0

    def _read(self) -> None:
        """Reads the counter: books changes since the last reading, and updates the peak."""
        allocated, peak, reserved = self.counter.read()
        self.reserved = max(self.reserved, reserved)
        if peak > self.peak.total():
            self.peak = Counter(self.held)
            self.peak[self.category] += peak - self.held.total()
        held = self._state_bytes()
        for storage, category in self.known.items():
            held[category] += storage.nbytes()
        for bytes_by_category in self.booked.values():
            held.update(bytes_by_category)
        self.booked[self.owner][self.category] += allocated - held.total()
        held[self.category] += allocated - held.total()
        self.held = held

    def _state_bytes(self) -> Counter:
        """Returns bytes of parameters, gradients and optimizer. Notes the category of tensors kept
        by placed blocks."""
        if self.placed:
            kept = [
                (name, x)
                for (_, name), calls in self.placed.on_gpu.items()
                for x in itertools.chain(*calls)
            ]
            if self.placed.copies is not None:
                kept += [
                    (name, x)
                    for (_, name, _), (sent, _) in self.placed.copies.leaving.items()
                    for x in sent
                ]
            for name, tensor in kept:
                self._know("layer inputs" if name == "input" else "attention", tensor)
        groups = self.optimizer.on_gpu()
        return Counter(
            {category: sum(tensor.nbytes for tensor in group) for category, group in groups.items()}
        )


class Bench:
    """A model.Transformer and its optimizer, whose step is measured under several executions."""

    def __init__(self, model: nn.Module, optimizer: MasterAdamW):
        self.model, self.optimizer, self.device = model, optimizer, model.embed_tokens.weight.device
        optimizer.update_beside_forward([model.embed_tokens, *model.layers, model.norm])

    def measure(
        self, step: Step, execution: Execution, counter: CudaCounter | None = None
    ) -> Measurement:
        """Measures one step of random tokens, one document per sequence.

        Seconds of a step above LONGEST_REPEATED tokens are without the update of state on the host.

        Raises:
            torch.OutOfMemoryError: call `clear` once the error is gone; until then its traceback
                holds tensors.
            UserError: the host does not let the arena be pinned.
        """
        self.clear()
        counter = counter or CudaCounter()
        # early, so that they count as workspace
        self.model.rotations(step.context_length, self.device)
        ids = torch.randint(
            step.shard.vocab_size, (step.batch_size, step.context_length), device=self.device
        )
        if step.context_length > LONGEST_REPEATED:
            self._warm_up(step, execution, ids)
        arena = arena_bytes(step, execution)
        apply_execution(self.model, execution, arena, self.optimizer.homes)
        seconds = 0.0
        if step.context_length <= LONGEST_REPEATED:
            self._run(step, ids)
            start = counter.mark()
            self._run(step, ids)
            seconds = counter.seconds(start, counter.mark())

        retries = counter.alloc_retries()
        recorder = Recorder(self.model, self.optimizer, counter)
        start = counter.mark()
        with recorder.hooked():
            self._run(step, ids, recorder)
        seconds = seconds or counter.seconds(start, counter.mark())
        host_bytes = arena + self.optimizer.inventory.host
        return Measurement(
            recorder.measured(), seconds, host_bytes, counter.alloc_retries() - retries
        )

    def _warm_up(self, step: Step, execution: Execution, ids: Tensor) -> None:
        """Runs two steps of one layer of each way to run, which compiles the kernels of `step`."""
        layers, kinds = self.model.layers, execution.kinds or self.model.config.kinds
        on_gpu = [
            replace(p, input="gpu", results=p.results.replace("host", "gpu"))
            for p in execution.placements
        ]
        chosen = dict(zip(zip(kinds, on_gpu), layers))  # a layer of each way
        kinds, placements = zip(*chosen)
        self.model.layers = nn.ModuleList(chosen.values())
        try:
            apply_execution(
                self.model,
                replace(execution, placements=placements, kinds=kinds),
                homes=self.optimizer.homes,
            )
            for _ in range(2):
                self._run(replace(step, micro_batches=1), ids)
            self.clear()
        finally:
            self.model.layers = layers

    def _run(self, step: Step, ids: Tensor, recorder: Recorder | None = None) -> None:
        for _ in range(step.micro_batches):
            self.model(ids, loss=NextToken.from_labels(ids)).loss.backward()
            if recorder is not None:
                recorder.end_backward()
        self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step(1e-5)
        if recorder is not None:
            recorder.end_stage("update")

    def clear(self) -> None:
        """Removes placements from the model, and frees what a broken-off step has left."""
        for part in (self.model.embed_tokens, *self.model.layers):
            vars(part).pop("forward", None)
        self.model.head_visit = nullcontext
        torch.get_device_module(self.device).synchronize()  # copies to and from the arena
        self.optimizer.zero_grad()
        for parameter in self.optimizer.homes:  # weights that were visiting
            parameter.untyped_storage().resize_(0)
        gc.collect()  # frees the arena before the next is pinned
        torch.cuda.empty_cache()


def thin(execution: Execution, layers: int) -> Execution:
    """Returns the same execution for fewer layers: an even sample, with its share of the
    optimizer's state.

    As many inputs as the sample has are recomputed, in the layers of a plan: every second, starting
    with the second.
    """
    every, kinds = len(execution.placements), execution.kinds
    # Types of kinds repeat after so many layers, and so they do in the sample.
    period = next(
        (n for n in range(1, len(kinds)) if [*map(type, kinds[n:])] == [*map(type, kinds[:-n])]), 1
    )
    sample = [
        i // period * (every // period) // -(-layers // period) * period + i % period
        for i in range(layers)
    ]
    taken = [execution.placements[i] for i in sample]
    recomputed = [placement for placement in taken if placement.input == "recompute"]
    kept = [placement for placement in taken if placement.input != "recompute"]
    while len(recomputed) > len(kept):
        kept.append(replace(recomputed.pop(), input="host"))
    pairs = itertools.zip_longest(kept, recomputed)
    # State of blocks whose weights wait on the host is there too, and the limit is of embedding and
    # head.
    visits = any(placement.weights == "host" for placement in taken)
    return replace(
        execution,
        placements=tuple(
            placement for pair in pairs for placement in pair if placement is not None
        ),
        gpu_state_bytes=execution.gpu_state_bytes
        if visits
        else execution.gpu_state_bytes * layers / every,
        kinds=tuple(kinds[i] for i in sample if kinds),
    )


def extrapolate(measured: Measurement, part: Step, step: Step) -> float:
    """Returns the seconds of a step of all layers.

    Stages are scaled by layers, the update by bytes of parameters.
    """
    layers, parameters = step.layers / part.layers, step.parameter_bytes / part.parameter_bytes
    scales = (
        layers if "of layer" in s.name else parameters if s.name == "update" else 1
        for s in measured.stages
    )
    return sum(scale * stage.seconds for scale, stage in zip(scales, measured.stages))


def format_table(
    stages: Sequence[Stage],
    measured: Sequence[MeasuredStage] | None = None,
    all_stages: bool = False,
) -> str:
    """Returns a table with a row per stage, in GiB: its predicted and measured peak, and its bytes
    by category.

    Bytes by category are measured, or predicted where nothing is measured. "fragmented" bytes are
    reserved but not allocated. Unless `all_stages`, neighbouring layers with equal stages share
    rows: "backward of layers 29 to 1, MLP" has the bytes of layer 29, and mean seconds.
    """
    header = [
        "predicted",
        *(["measured", "differs", "fragmented", "seconds"] if measured else []),
        *CATEGORIES,
    ]
    rows = [("peak of each stage, GiB", header)]
    sides = [stages, measured] if measured else [stages]
    for indices in [[i] for i in range(len(stages))] if all_stages else _fold(sides):
        stage = shown = stages[indices[0]]
        name, cells = stage.name, [f"{stage.bytes / GIB:.3f}"]
        if len(indices) > 1:
            [number] = _NUMBER.findall(stages[indices[-1]].name)
            name = re.sub(r"layer (\d+)", rf"layers \1 to {number}", name)
        if measured:
            shown = measured[indices[0]]
            seconds = sum(measured[i].seconds for i in indices) / len(indices)
            cells += [f"{shown.bytes / GIB:.3f}", f"{100 * (stage.bytes / shown.bytes - 1):+.1f}%"]
            cells += [f"{(shown.reserved - shown.bytes) / GIB:.3f}", f"{seconds:.3f}"]
        rows.append(
            (
                name,
                [
                    *cells,
                    *(f"{shown.categories.get(category, 0) / GIB:.3f}" for category in CATEGORIES),
                ],
            )
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{width}}" + "".join(f"{cell:>13}" for cell in cells) for name, cells in rows
    )


_NUMBER = re.compile(r"\d+")


def _fold(sides: list[Sequence[Stage]]) -> list[list[int]]:
    """Returns, for each row of a table, the indices of the stages that share it.

    If stages 5 to 8 are the backward of two equal layers, the rows are [5, 7] and [6, 8]. Each
    layer is compared with the first of its run. The layer with a peak shares no row. `sides` are
    the predicted and the measured stages.
    """
    peaks = {max(range(len(side)), key=lambda i: side[i].bytes) for side in sides}
    runs: list[list[list[int]]] = []
    for _, indices in itertools.groupby(
        range(len(sides[0])), key=lambda i: sides[0][i].name.partition(",")[0]
    ):
        layer, first = list(indices), runs[-1][0] if runs else []
        equal = len(layer) == len(first) and not peaks & {*first, *layer}
        if equal and all(
            _are_equal(side[i], side[j]) for side in sides for i, j in zip(first, layer)
        ):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [list(row) for run in runs for row in zip(*run)]


def _are_equal(first: Stage, second: Stage) -> bool:
    """Whether two layers' stages may share a row: nearly equal bytes, and seconds that differ by
    10% at most."""
    sizes = [(first.categories.get(name, 0), second.categories.get(name, 0)) for name in CATEGORIES]
    tolerance = GIB / 1000
    if isinstance(first, MeasuredStage) and isinstance(second, MeasuredStage):
        sizes, tolerance = [*sizes, (first.reserved, second.reserved)], 0.01 * first.bytes
        if abs(first.seconds - second.seconds) > max(0.1 * first.seconds, 1e-3):
            return False
    same_part = _NUMBER.sub("", first.name) == _NUMBER.sub("", second.name)
    return same_part and all(abs(a - b) <= tolerance for a, b in sizes)


def draw_timeline(
    path: Path,
    phases: list[Phase],
    stages: Sequence[Stage],
    measured: Sequence[MeasuredStage] | None = None,
    budget: float | None = None,
) -> None:
    """Writes a picture of a step to a .png, .svg or .pdf file: memory, see `draw_stages`, and
    seconds by phases."""
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(14, 8), layout="constrained")
    axes, below = figure.subplots(2, 1, height_ratios=(4, 1))
    draw_phases(below, phases)
    below.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    draw_stages(axes, stages, measured, budget)
    axes.set(
        ylabel="GiB, peak of each stage", title="GPU memory along a step, categories as predicted"
    )
    # beside the axes: it would hide the budget
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    save_picture(figure, path)


def draw_stages(
    axes,
    stages: Sequence[Stage],
    measured: Sequence[MeasuredStage] | None = None,
    budget: float | None = None,
) -> None:
    """Draws a step's bytes on Matplotlib's axes: predicted categories as areas, others as lines.

    The lines are measured peaks and a budget.
    """
    positions = range(len(stages))
    heights = [
        [stage.categories.get(category, 0) / GIB for stage in stages] for category in CATEGORIES
    ]
    axes.stackplot(positions, heights, labels=CATEGORIES, step="mid")
    if measured:
        axes.step(
            positions, [stage.bytes / GIB for stage in measured], "k", where="mid", label="measured"
        )
    if budget is not None:
        axes.axhline(budget / GIB, color="k", linestyle="--", label="budget")
    every = max(1, len(stages) // 20)
    axes.set_xticks(
        positions[::every], [stage.name for stage in stages][::every], rotation=90, fontsize=7
    )
    axes.set_xmargin(0)
