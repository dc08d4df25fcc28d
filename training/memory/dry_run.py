"""Bytes of a block, measured on the meta device: its tensors have sizes and lifetimes, but no data.

The block runs forward and backward as a step runs it, under its placement and knobs. After each
operation the bytes of all living tensors are noted, as the GPU's allocator counts them. Memory that
an operation takes inside is invisible there: mixers declare it, see
`kernels.parts.MixerPart.inside_bytes`. Operations that are made of others run as these, see
`kernels.common.operation`. Gradients of parameters are freed as they are made: a step counts them.

At each moment the bytes are a constant and so many per token. So two runs give the bytes of all
longer ones.
"""

import functools
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.common import BODIES
from kernels.context import Context, Rotations
from kernels.head_exchange import HeadExchange, RanksOnMeta
from kernels.linear import Linear
from kernels.parts import LayerParts, Work
from kernels.tensor_parallel import TensorRanks
from model import ModelConfig, Transformer
from training.families.trained import Trained
from training.host.torch_internals import TorchDispatchMode
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.placement import apply_execution
from training.memory.step import Step

# tokens: half of it is more than the largest piece in which anything but an MLP is computed
LONG = 65_536
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes per element


class Setting(NamedTuple):
    """A block and how it runs: all that its bytes depend on, but for tokens and documents."""

    shard: ModelConfig
    parts: LayerParts
    is_whole: bool
    keeps_results: bool
    heads_at_a_time: int | None
    mlp_tile_size: int | None
    linear: Linear
    trained: Trained
    element_size: int
    num_ranks: int
    tensor_ranks: int


class Moment(NamedTuple):
    """The end of an operation."""

    phase: str  # "forward", "MLP" or "attention", the last two of backward
    in_mlp: bool
    operation: str  # its name


class Trace(NamedTuple):
    """Bytes along a block's forward and backward, without its input."""

    moments: list[Moment]
    alive: list[int]  # bytes of living tensors at each moment
    kept: int  # bytes after forward
    attention_kept: int  # bytes of attention among these
    attention_rebuilt: int  # bytes of attention in backward, beside the output's gradient
    # bytes of the MLP as its backward ends, with what else attention's backward does not need
    mlp_gradients: int


class BlockBytes(NamedTuple):
    """Bytes (attention's, the MLP's) at a block's fullest moments, and kept for backward."""

    forward: tuple[int, int]
    mlp_backward: tuple[int, int]
    attention_backward: tuple[int, int]
    kept: tuple[int, int]


def block_bytes(
    step: Step, execution: Execution, placement: Placement, parts: LayerParts
) -> BlockBytes:
    """Returns the bytes of a block of a step, with its kept results and the gradient of its output,
    but no input."""
    is_whole = placement.is_whole
    setting = Setting(
        step.shard,
        parts,
        is_whole,
        placement.results != "recompute",
        None if is_whole or not parts.mixer.works_in_groups else execution.heads_at_a_time,
        None if is_whole else execution.mlp_tile_size,
        execution.linear,
        step.trained,
        step.element_size,
        step.num_ranks,
        step.tensor_ranks,
    )
    prompts = step.documents.prompts if step.documents else ()
    documents = step.context_length, step.longest_packed, prompts
    return _block_bytes(setting, step.tokens, execution.attention_backend, *documents)


@functools.lru_cache(maxsize=8192)
def _block_bytes(
    setting: Setting,
    tokens: int,
    backend: str,
    context_length: int,
    longest: int | None,
    prompts: tuple[tuple[float, float, float, float], ...],
) -> BlockBytes:
    """`longest`: tokens of the longest document, where a sequence may have several."""
    inside = setting.parts.mixer.inside_bytes(
        tokens,
        setting.element_size,
        backend=backend,
        context_length=context_length,
        longest=longest,
        heads_at_a_time=setting.heads_at_a_time,
        num_ranks=setting.num_ranks,
        prompts=prompts,
    )
    traced = trace(setting, tokens)
    dy = setting.element_size * setting.shard.hidden_size * tokens

    def fullest(phase: str) -> tuple[int, bool]:
        sizes = (
            (size + inside.get(moment.operation, 0), moment.in_mlp)
            for moment, size in zip(traced.moments, traced.alive)
            if moment.phase == phase
        )
        return max(sizes)

    forward, in_mlp = fullest("forward")
    backward, runs_mlp = fullest("MLP")
    last, _ = fullest("attention")
    kept, rebuilt, gradients = traced.attention_kept, traced.attention_rebuilt, traced.mlp_gradients
    return BlockBytes(
        forward=(kept, forward - kept) if in_mlp else (forward, 0),
        # or attention runs again, beside the output's gradient alone
        mlp_backward=(rebuilt, backward - rebuilt) if runs_mlp else (backward - dy, dy),
        attention_backward=(last - gradients, gradients),
        kept=(kept, traced.kept - kept),
    )


def results_bytes(step: Step, parts: LayerParts) -> tuple[int, int]:
    """Returns the bytes of the mixer's results, which a block can keep, and of its choices, which
    it always keeps."""
    return _results_bytes(parts, step.tokens, step.element_size)


@functools.lru_cache(maxsize=8192)  # a search for a plan asks for the same few many thousand times
def _results_bytes(parts: LayerParts, tokens: int, element_size: int) -> tuple[int, int]:
    return parts.mixer.results_bytes(tokens, element_size)


def sent_bytes(step: Step, placement: Placement, parts: LayerParts) -> tuple[int, int]:
    """Returns the bytes that a block sends to the host: its input, results of attention."""
    return (
        step.input_bytes if placement.input == "host" else 0,
        results_bytes(step, parts)[0] if placement.results == "host" else 0,
    )


def waiting_bytes(
    step: Step, execution: Execution, placement: Placement, parts: LayerParts
) -> tuple[int, int, int]:
    """Returns the bytes that a block keeps on the GPU for backward: its input, of attention and of
    the MLP."""
    if placement.is_whole:
        return step.input_bytes, *block_bytes(step, execution, placement, parts).kept
    results, choices = results_bytes(step, parts)
    kept = results if placement.results == "gpu" else 0
    return (
        step.input_bytes if placement.input == "gpu" else 0,
        kept + choices,
        parts.mlp.choice_bytes(step.tokens),
    )


def work(step: Step, execution: Execution, parts: LayerParts) -> list[Work]:
    """Returns the work of the linear maps in a block's mixer and in its MLP under an execution."""
    sizes = step.tokens, step.shard.hidden_size, step.element_size
    is_skippable = not step.shard.block.after
    return [
        part.linear_work(*sizes, tile_size=execution.mlp_tile_size, is_skippable=is_skippable)
        for part in parts
    ]


def trace(setting: Setting, tokens: int) -> Trace:
    """Returns the bytes of a block along a run of so many tokens. From two tiles on each token
    takes as much."""
    most = max(LONG, 4 * (setting.mlp_tile_size or 0))
    if tokens <= most:
        return _run(setting, tokens)
    short, long = _run(setting, most // 2), _run(setting, most)
    times = tokens / (most // 2) - 1

    def extended(in_short: int, in_long: int) -> int:
        return round(in_short + (in_long - in_short) * times)

    alive = [*map(extended, short.alive, long.alive)]
    return Trace(short.moments, alive, *map(extended, short[2:], long[2:]))


@functools.lru_cache(maxsize=256)
def _run(setting: Setting, tokens: int) -> Trace:
    """Runs a block on the meta device, as the only block of a model."""
    shape = replace(setting.shard, num_hidden_layers=1, vocab_size=1, layers=(setting.parts,))
    placement = Placement("gpu", "gpu" if setting.keeps_results else "recompute")
    if setting.is_whole:
        placement = WHOLE
    execution = Execution((placement,), setting.mlp_tile_size, setting.heads_at_a_time)
    with torch.device("meta"), torch.enable_grad():
        model = Transformer(shape).cast(DTYPES[setting.element_size])
        setting.trained.prepare(model)
        apply_execution(model, execution)
        [block] = model.layers
        block.mixer.linear = block.mlp.linear = setting.linear
        block.mixer.exchange = (
            HeadExchange(RanksOnMeta(setting.num_ranks)) if setting.num_ranks > 1 else None
        )
        for part in (block.mixer, block.mlp) if setting.tensor_ranks > 1 else ():
            part.tensor_ranks = TensorRanks(RanksOnMeta(setting.tensor_ranks))
        x = torch.empty(
            1, tokens, shape.hidden_size, dtype=DTYPES[setting.element_size], requires_grad=True
        )
        cos, sin = (torch.empty(tokens, shape.rotary_width // 2) for _ in range(2))
        rotations = Rotations(full=(cos, sin), windowed=(cos, sin))
        with StorageCounter([x, cos, sin, *model.parameters()]) as counter:
            return _follow(block, x, Context(rotations, longest=2**62), counter)


class StorageCounter(TorchDispatchMode):
    """Notes the bytes of all tensors but some that exist before, at the end of each operation."""

    def __init__(self, existing: Iterable[Tensor]):
        super().__init__()
        self.known = weakref.WeakSet(x.untyped_storage() for x in existing)
        self.allocated = 0  # bytes of all living tensors
        self.elsewhere = 0  # bytes of gradients among them that a step counts
        self.phase, self.in_mlp = "forward", False
        self.moments: list[Moment] = []
        self.alive: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name in BODIES:
            with self:
                return BODIES[name](*args, **(kwargs or {}))
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                self.allocated += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.moments.append(Moment(self.phase, self.in_mlp, name))
        self.alive.append(self.allocated - self.elsewhere)
        return output

    def _free(self, num_bytes: int) -> None:
        self.allocated -= num_bytes


class _End(torch.autograd.Function):
    """Ends the graph of a block's output. Nothing but autograd holds the gradient that it makes."""

    @staticmethod
    def forward(ctx, y):
        ctx.like = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx, dy):
        shape, dtype = ctx.like
        return dy.new_empty(shape, dtype=dtype)


def _follow(block: nn.Module, x: Tensor, context: Context, counter: StorageCounter) -> Trace:
    """Runs a block forward and backward, and has the counter know where it is."""
    attention: list[int] = []  # bytes of attention as the MLP begins, the last time in backward
    mlp: list[int] = []  # bytes of the MLP as its backward ends

    def enter_mlp(module: nn.Module, inputs: tuple[Tensor]) -> None:
        attended, counter.in_mlp = inputs[0], True
        gradient_bytes = 0 if counter.phase == "forward" else x.nbytes
        attention.append(counter.allocated - attended.nbytes - gradient_bytes)
        if attended.requires_grad:
            attended.register_hook(leave_mlp)

    def leave_mlp(gradient: Tensor) -> None:
        mlp.append(counter.allocated - attention[-1])
        counter.phase, counter.in_mlp = "attention", False
        if block.mixer.heads_at_a_time:  # all gradients of its parameters are there at once
            counter.elsewhere = sum(p.nbytes for p in block.mixer.parameters() if p.requires_grad)

    for parameter in block.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    block.post_attention_layernorm.register_forward_pre_hook(enter_mlp)
    y = block(x, context)
    kept, is_rebuilt = counter.allocated - y.nbytes, "forward" in vars(block)
    counter.phase, counter.in_mlp = "MLP", not is_rebuilt
    end = _End.apply(y)
    del y
    end.backward()
    return Trace(
        counter.moments,
        counter.alive,
        kept=kept,
        attention_kept=attention[0],
        attention_rebuilt=attention[-1],
        mlp_gradients=mlp[-1],
    )
