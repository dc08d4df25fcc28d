"""What a training step takes, measured: its memory stage by stage and category by category, beside the prediction.

Hooks on the model split a step into the stages of cost_model.Step, so that measured and predicted rows pair up. Bytes
are told apart in two ways. Exactly, from tensors that are known: parameters, gradients, optimizer state, blocks'
inputs, the gradients that flow between blocks, attention outputs that placed blocks keep. And by who ran: between two
readings of the allocator the rest of the change, and of the peak, is booked on the part of the block that ran
(attention or MLP).
"""

import gc
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from training.host.memory import GIB
from training.host.torch_internals import dump_memory_snapshot, record_memory_history
from training.memory.cost_model import Stage, Step
from training.memory.execution import Execution
from training.memory.placement import apply_execution
from training.optimizer import MasterAdamW

CATEGORIES = ("parameters", "gradients", "optimizer", "layer inputs", "attention", "MLP", "loss", "workspace")
# A step of up to 32,768 tokens of context runs twice, and the second run is measured. A longer step runs once, to save
# time, after a warm-up step of 2,048 tokens, which compiles kernels and makes the libraries' workspaces.
LONGEST_REPEATED, WARM_UP_TOKENS = 32_768, 2048
_CONTEXT_MULTIPLE = 128  # tokens


@dataclass(frozen=True)
class MeasuredStage(Stage):
    """A stage as it was: bytes by category when it was fullest, the most reserved, and seconds."""

    reserved: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """A measured step. `host_bytes` are pinned; `alloc_retries` counts how often the allocator freed its cache."""

    stages: list[MeasuredStage]
    seconds: float
    host_bytes: int
    alloc_retries: int

    @property
    def peak(self) -> MeasuredStage:
        """The fullest stage."""
        return max(self.stages, key=lambda stage: stage.bytes)

    @property
    def reserved(self) -> int:
        """The most that the allocator had of the GPU."""
        return max(stage.reserved for stage in self.stages)


class Reading(NamedTuple):
    """Bytes allocated now, and the most allocated and reserved since the reading before."""

    allocated: int
    peak: int
    reserved: int


class CudaCounter:
    """PyTorch's allocator on one GPU, which counts when the host allocates, and its clock: nothing has to wait."""

    def __init__(self, device: torch.device):
        self.device = device

    def read(self) -> Reading:
        cuda = torch.cuda
        peaks = cuda.max_memory_allocated(self.device), cuda.max_memory_reserved(self.device)
        cuda.reset_peak_memory_stats(self.device)
        return Reading(cuda.memory_allocated(self.device), *peaks)

    def alloc_retries(self) -> int:
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"]

    def mark(self) -> torch.cuda.Event:
        """This moment of the compute stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        stop.synchronize()
        return start.elapsed_time(stop) / 1000


class Recorder:
    """Splits the steps of a model into stages.

    Args:
        model: a model.Transformer, with its placement applied.
        optimizer: of its parameters.
        counter: a `CudaCounter`, or what stands for one where nothing is real.
    """

    def __init__(self, model: nn.Module, optimizer: MasterAdamW, counter: CudaCounter):
        self.model, self.optimizer, self.counter = model, optimizer, counter
        placed = [block.forward.func.__self__ for block in model.layers if "forward" in vars(block)]
        self.placed = placed[0] if placed else None  # None: all blocks are left to autograd
        self.known: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()  # living storage: category
        self.booked: defaultdict[Any, Counter] = defaultdict(Counter)  # part of the model: bytes by category
        self.held: Counter = Counter()
        self.stages: dict[str, tuple[Counter, int]] = {}
        self.spans: defaultdict[str, list[tuple]] = defaultdict(list)
        self.owner, self.category, self.in_backward = "before the step", "workspace", False
        self.peak: Counter = Counter()
        self.reserved, self.began = 0, counter.mark()
        counter.read()
        self._read()
        self._start_stage()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Stages are told apart in here."""
        model = self.model
        hooks = [
            model.embed_tokens.register_forward_pre_hook(lambda *_: self._run("embedding", "layer inputs")),
            model.embed_tokens.register_forward_hook(lambda module, inputs, x: self._enter_layers(x)),
            model.norm.register_forward_pre_hook(lambda module, inputs: self._enter_loss(inputs[0])),
        ]
        for i, block in enumerate(model.layers):
            hooks += [
                block.register_forward_pre_hook(lambda _, inputs, i=i: self._watch_gradient(i, inputs[0])),
                block.input_layernorm.register_forward_pre_hook(lambda _, inputs: self._enter_attention(inputs[0])),
                block.post_attention_layernorm.register_forward_pre_hook(
                    lambda _, inputs, i=i: self._enter_mlp(i, inputs[0])
                ),
                block.register_forward_hook(lambda _, inputs, y, i=i: self._leave_block(i, y)),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def end_stage(self, name: str) -> None:
        self._read()
        self.stages[name] = self.peak, self.reserved  # the last micro-batch's
        stop = self.counter.mark()
        self.spans[name].append((self.began, stop))
        self.began = stop
        self._start_stage()

    def end_backward(self) -> None:
        self.end_stage("backward of embedding")
        self.booked.clear()
        self.in_backward = False
        self._run("update", "workspace")

    def measured(self) -> list[MeasuredStage]:
        seconds = {name: sum(self.counter.seconds(*span) for span in spans) for name, spans in self.spans.items()}
        return [
            MeasuredStage(name, {category: categories[category] for category in CATEGORIES}, reserved, seconds[name])
            for name, (categories, reserved) in self.stages.items()
        ]

    # Hooks, in the order of a step

    def _enter_layers(self, x: Tensor) -> None:
        self._know("layer inputs", x)
        self.end_stage("embedding")
        self._run(0, "layer inputs")

    def _watch_gradient(self, layer: int, x: Tensor) -> None:
        x.register_hook(lambda dx: self._end_block_backward(layer, dx))

    def _enter_attention(self, x: Tensor) -> None:
        self._read()
        if self.in_backward:  # the block is rebuilt: only its input and what was kept of it exist
            self._know("layer inputs", x)
            self.booked.pop(self.owner, None)
        self.category = "attention"
        self._read()

    def _enter_mlp(self, layer: int, attended: Tensor) -> None:
        if attended.requires_grad:  # it belongs to a graph, whose backward gets here
            attended.register_hook(lambda _: self._end_mlp_backward(layer))
        self._read()
        self.booked[self.owner]["attention"] -= attended.nbytes  # made by attention, kept by the MLP
        self.booked[self.owner]["MLP"] += attended.nbytes
        self.category = "MLP"
        self._read()

    def _leave_block(self, layer: int, y: Tensor) -> None:
        self._know("layer inputs", y)
        self.end_stage(f"forward of layer {layer}")
        if self.placed and not self.placed.placements[layer].is_whole:  # what a placed block keeps is known
            self.booked.pop(layer, None)
        self._run(layer + 1, "layer inputs")

    def _enter_loss(self, x: Tensor) -> None:
        self._know("loss", x)
        self._run("loss", "loss")
        x.register_hook(self._end_loss)

    def _end_loss(self, dx: Tensor) -> None:
        self._know("MLP", dx)
        self.end_stage("loss")
        self.booked.pop("loss", None)
        # Only the head's gradient is left of the loss; a tied head's waits for the embedding's gradient.
        self._run("head", "gradients")
        self.in_backward = True
        self._run(len(self.model.layers) - 1, "MLP")

    def _end_mlp_backward(self, layer: int) -> None:
        self.end_stage(f"backward of layer {layer}, MLP")
        self.category = "attention"

    def _end_block_backward(self, layer: int, dx: Tensor) -> None:
        self._know("MLP" if layer else "layer inputs", dx)
        self.end_stage(f"backward of layer {layer}, attention")
        self.booked.pop(layer, None)
        self._run(*((layer - 1, "MLP") if layer else ("embedding", "gradients")))

    # Readings

    def _run(self, owner: Any, category: str) -> None:
        """From here on `owner` runs: bytes that nothing else accounts for are booked on it, under `category`."""
        self.owner, self.category = owner, category
        self._read()

    def _know(self, category: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.known[tensor.untyped_storage()] = category

    def _start_stage(self) -> None:
        self.peak, self.reserved = Counter(self.held), 0

    def _read(self) -> None:
        allocated, peak, reserved = self.counter.read()
        self.reserved = max(self.reserved, reserved)
        if peak > self.peak.total():
            self.peak = Counter(self.held)
            self.peak[self.category] += peak - self.held.total()
        held = self._state_bytes()
        for storage, category in self.known.items():
            held[category] += storage.nbytes()
        for of_owner in self.booked.values():
            held.update(of_owner)
        self.booked[self.owner][self.category] += allocated - held.total()
        held[self.category] += allocated - held.total()
        self.held = held

    def _state_bytes(self) -> Counter:
        """Bytes of parameters, gradients and optimizer; notes the category of what placed blocks keep on the GPU."""
        for (_, name), calls in self.placed.on_gpu.items() if self.placed else ():
            for tensors in calls:
                self._know("layer inputs" if name == "input" else "attention", *tensors)
        optimizer = self.optimizer
        states = [state for state in optimizer.states.values() if not state.on_host]
        parameters = list(self.model.parameters())
        tensors = [*(state.tensors for state in states), *(slot.tensors for slot in optimizer.slots)]
        groups = {
            "parameters": parameters,
            "gradients": [
                *(p.grad for p in parameters),
                *(state.gradient for state in states),
                *(gradient for gradient, _ in optimizer.leaving),
            ],
            "optimizer": [optimizer.room, *(tensor for by_name in tensors for tensor in by_name.values())],
        }
        return Counter({name: sum(t.nbytes for t in group if t is not None) for name, group in groups.items()})


class Bench:
    """A model and its optimizer, built once, whose step is measured under one placement after another.

    Args:
        model: a model.Transformer, without a placement.
        optimizer: of its parameters; its choice of where state lives stays.
    """

    def __init__(self, model: nn.Module, optimizer: MasterAdamW):
        self.model, self.optimizer, self.config = model, optimizer, model.config
        self.device = model.embed_tokens.weight.device

    def measure(
        self, step: Step, execution: Execution, counter: CudaCounter | None = None, snapshot: Path | None = None
    ) -> Measurement:
        """One step of random tokens, one document a sequence.

        Args:
            snapshot: where PyTorch's memory snapshot of it goes, for pytorch.org/memory_viz.

        Raises:
            torch.OutOfMemoryError: then call `clear`, once the error is let go of.
            UserError: the host does not let the arena be pinned.
        """
        self.clear()
        counter = counter or CudaCounter(self.device)
        warm_up = step if step.context_length <= LONGEST_REPEATED else step.at(WARM_UP_TOKENS)
        arena_bytes = sum(one.arena_bytes(execution) for one in {step, warm_up})
        apply_execution(self.model, execution, arena_bytes)
        self.model.rotary.tables(step.context_length, self.device)  # in time to count as workspace
        self._run(warm_up, self._random_ids(warm_up))

        ids, retries = self._random_ids(step), counter.alloc_retries()
        recorder = Recorder(self.model, self.optimizer, counter)
        if snapshot is not None:
            record_memory_history()
        try:
            start = counter.mark()
            with recorder.hooked():
                self._run(step, ids, recorder)
            seconds = counter.seconds(start, counter.mark())
        finally:
            if snapshot is not None:
                dump_memory_snapshot(str(snapshot))
                record_memory_history(enabled=None)
        host_bytes = arena_bytes + (self.optimizer.arena.num_bytes if self.optimizer.slots else 0)
        return Measurement(recorder.measured(), seconds, host_bytes, counter.alloc_retries() - retries)

    def _random_ids(self, step: Step) -> Tensor:
        shape = step.batch_size, step.context_length
        return torch.randint(self.config.vocab_size, shape, device=self.device)

    def _run(self, step: Step, ids: Tensor, recorder: Recorder | None = None) -> None:
        for _ in range(step.micro_batches):
            self.model(ids, ids).loss.backward()
            if recorder is not None:
                recorder.end_backward()
        self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step(1e-5)
        if recorder is not None:
            recorder.end_stage("update")

    def clear(self) -> None:
        """Take the placement off again, and what a step that was broken off has left."""
        for block in self.model.layers:
            vars(block).pop("forward", None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # copies to and from the arena
        self.optimizer.zero_grad()
        gc.collect()  # the arena, before the next is pinned
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def thin(execution: Execution, layers: int) -> Execution:
    """The same execution for fewer layers, taken evenly, with these layers' share of the optimizer's state.

    As in a plan, no two layers in a row have their inputs recomputed, and the first ones do.
    """
    every, state = len(execution.placements), execution.gpu_state_bytes
    taken = [execution.placements[i * every // layers] for i in range(layers)]
    recomputed = [placement for placement in taken if placement.input == "recompute"]
    others = [placement for placement in taken if placement.input != "recompute"]
    while len(recomputed) > len(others):
        others.append(replace(recomputed.pop(), input="host"))
    pairs = itertools.zip_longest(others, recomputed)
    placements = tuple(placement for pair in pairs for placement in pair if placement is not None)
    kinds = tuple(execution.kinds[i * every // layers] for i in range(layers) if execution.kinds)
    return replace(execution, placements=placements, gpu_state_bytes=state * layers / every, kinds=kinds)


def extrapolate(measured: Measurement, part: Step, whole: Step) -> float:
    """Seconds of a step of all layers: layers' stages by their number, the update by the parameters."""
    scales = {"update": whole.parameter_bytes / part.parameter_bytes}
    layers = whole.layers / part.layers
    return sum(s.seconds * (layers if "of layer" in s.name else scales.get(s.name, 1)) for s in measured.stages)


def largest_that_runs(predicted: int, runs: Callable[[int], bool]) -> int:
    """The longest context that runs, to 1%: from `predicted` by 3% up or down to where it changes, then by halves.

    Args:
        predicted: tokens to start from.
        runs: whether so many tokens run, all multiples of 128; each is tried once.

    Returns:
        Tokens, a multiple of 128; 0 if nothing runs.
    """

    def rounded(tokens: float) -> int:
        return int(tokens) // _CONTEXT_MULTIPLE * _CONTEXT_MULTIPLE

    tried = max(rounded(predicted), _CONTEXT_MULTIPLE)
    if runs(tried):
        ran, failed = tried, max(rounded(1.03 * tried), tried + _CONTEXT_MULTIPLE)
        while runs(failed):
            ran, failed = failed, max(rounded(1.03 * failed), failed + _CONTEXT_MULTIPLE)
    else:
        failed, ran = tried, rounded(tried / 1.03)
        while ran and not runs(ran):
            failed, ran = ran, rounded(ran / 1.03)
    while failed - ran > max(_CONTEXT_MULTIPLE, 0.01 * ran):
        middle = rounded((ran + failed) / 2)
        ran, failed = (middle, failed) if runs(middle) else (ran, middle)
    return ran


def format_table(
    stages: Sequence[Stage], measured: Sequence[MeasuredStage] | None = None, all_stages: bool = False
) -> str:
    """A row a stage, GiB: its peak, as predicted and measured, and by category as measured, else as predicted.

    "fragmented" is what was reserved but not allocated. Unless `all_stages`, neighbouring layers whose stages are equal
    share rows, "backward of layers 29 to 1, MLP": the bytes of the first of them, and their mean seconds.
    """
    header = ["predicted", *(["measured", "differs", "fragmented", "seconds"] if measured else []), *CATEGORIES]
    rows = [("peak of each stage, GiB", header)]
    sides = [stages, measured] if measured else [stages]
    for indices in [[i] for i in range(len(stages))] if all_stages else _fold(sides):
        first, last = indices[0], indices[-1]
        stage = shown = stages[first]
        name, cells = stage.name, [f"{stage.bytes / GIB:.3f}"]
        if last > first:
            [number] = _NUMBER.findall(stages[last].name)
            name = re.sub(r"layer (\d+)", rf"layers \1 to {number}", name)
        if measured:
            shown = measured[first]
            assert shown.name == stage.name
            seconds = sum(measured[i].seconds for i in indices) / len(indices)
            cells += [f"{shown.bytes / GIB:.3f}", f"{100 * (stage.bytes / shown.bytes - 1):+.1f}%"]
            cells += [f"{(shown.reserved - shown.bytes) / GIB:.3f}", f"{seconds:.3f}"]
        rows.append((name, [*cells, *(f"{shown.categories.get(category, 0) / GIB:.3f}" for category in CATEGORIES)]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}" + "".join(f"{cell:>13}" for cell in cells) for name, cells in rows)


_NUMBER = re.compile(r"\d+")


def _fold(sides: list[Sequence[Stage]]) -> list[list[int]]:
    """For each row of a table the indices of the stages that share it.

    A layer has one stage in forward, and two in backward: of two equal layers whose backward are stages 5 to 8, rows
    are [5, 7] and [6, 8]. A layer is compared with the first of its run, so that small differences do not add up. The
    layer of a peak, predicted or measured, shares no row.

    Args:
        sides: the predicted stages of a step, and the measured ones if there are any.
    """
    count = range(len(sides[0]))
    peaks = {max(enumerate(side), key=lambda item: item[1].bytes)[0] for side in sides}
    runs: list[list[list[int]]] = []
    for _, indices in itertools.groupby(count, key=lambda i: sides[0][i].name.partition(",")[0]):
        layer, first = list(indices), runs[-1][0] if runs else []
        equal = len(layer) == len(first) and not peaks & {*first, *layer}
        if equal and all(_are_equal(side[i], side[j]) for side in sides for i, j in zip(first, layer)):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [list(row) for run in runs for row in zip(*run)]


def _are_equal(one: Stage, other: Stage) -> bool:
    """Whether two layers' stages may share a row.

    Predicted bytes of each category may differ by the last digit shown, 0.001 GiB. Measured ones, and what was
    reserved, may differ by 1% of the stage's peak, seconds by 10% or a millisecond.
    """
    if _NUMBER.sub("", one.name) != _NUMBER.sub("", other.name):  # forward and backward, or no layers at all
        return False
    sizes, tolerance = [(one.categories.get(name, 0), other.categories.get(name, 0)) for name in CATEGORIES], GIB / 1000
    if isinstance(one, MeasuredStage) and isinstance(other, MeasuredStage):
        sizes, tolerance = [*sizes, (one.reserved, other.reserved)], 0.01 * one.bytes
        if abs(one.seconds - other.seconds) > max(0.1 * one.seconds, 1e-3):
            return False
    return all(abs(a - b) <= tolerance for a, b in sizes)


def draw_timeline(
    path: Path, stages: Sequence[Stage], measured: Sequence[MeasuredStage] | None = None, budget: float | None = None
) -> None:
    """Write a picture of a step: a .png, .svg or .pdf file. The other arguments are those of `draw_stages`."""
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(14, 6), layout="constrained")
    axes = figure.subplots()
    draw_stages(axes, stages, measured, budget)
    axes.set(ylabel="GiB, peak of each stage", title="GPU memory along a step, categories as predicted")
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path)


def draw_stages(
    axes, stages: Sequence[Stage], measured: Sequence[MeasuredStage] | None = None, budget: float | None = None
) -> None:
    """Draw a step on Matplotlib's axes: predicted categories as areas on top of each other, the rest as lines.

    Args:
        measured: their peaks are a line.
        budget: bytes, a line.
    """
    positions = range(len(stages))
    heights = [[stage.categories.get(category, 0) / GIB for stage in stages] for category in CATEGORIES]
    axes.stackplot(positions, heights, labels=CATEGORIES, step="mid")
    if measured:
        axes.step(positions, [stage.bytes / GIB for stage in measured], "k", where="mid", label="measured")
    if budget is not None:
        axes.axhline(budget / GIB, color="k", linestyle="--", label="budget")
    every = max(1, len(stages) // 20)
    axes.set_xticks(positions[::every], [stage.name for stage in stages][::every], rotation=90, fontsize=7)
    axes.set_xmargin(0)
