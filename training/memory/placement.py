"""Placement of activations until backward: on the GPU, in pinned host memory, or nowhere, to be
computed again.

A placed block is one autograd function, after Chen et al., arXiv 1604.06174. Forward runs without a
graph and keeps the activations that the block's `Placement` names. Backward rebuilds the block from
its input and runs through that graph, so only one block's activations exist at a time. An operation
does not run again if its results were kept, or if no gradient needs its result:
`kernels.common.operation` declares both. A whole block is left to autograd.

The weights of a placed block are on the GPU, or visit it from where they are kept, see
`training.memory.visiting`: in forward, with or without gradients, and in backward. Embedding and
head need none in backward: the chunked loss makes the head's gradient in forward.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from types import MappingProxyType
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from kernels.common import KEEPABLE, SKIPPABLE
from kernels.linear import Linear
from kernels.parts import MixerKind
from training.host.memory import HostCopies, PinnedArena
from training.host.torch_internals import TorchDispatchMode
from training.memory.execution import Execution, Placement, needed_for_backward
from training.memory.visiting import Homes, VisitingWeights
from training.optim.inventory import Inventory

# Operations of a block on results of skippable operations.
ELEMENTWISE = {"aten::add.Tensor", "aten::mul.Tensor"}


def allocate(model: nn.Module, inventory: Inventory, device: torch.device) -> None:
    """Gives a model on the meta device memory on `device`, for all but visiting weights."""
    visiting = {row.name for row in inventory if row.is_visiting}
    if not visiting:
        model.to_empty(device=device)
        return
    for prefix, part in model.named_modules():
        part.to_empty(device=device, recurse=False)
        for name, parameter in part.named_parameters(prefix, recurse=False):
            if name in visiting:
                parameter.untyped_storage().resize_(0)


def apply_execution(
    model: nn.Module,
    execution: Execution,
    arena_bytes: int = 0,
    homes: Homes = MappingProxyType({}),
) -> None:
    """Makes a model.Transformer, on its device, run as `execution` says.

    Pins `arena_bytes` of host memory for the activations with placements on the host. `homes` are
    the weights of visiting parameters, see `MasterAdamW.homes`.

    Raises:
        UserError: the host does not let that much be pinned.
        ValueError: embedding or head with a home but not on the host, or the reverse; see
            `apply_placement` and `set_kinds`.
    """
    model.loss_impl = execution.loss_impl
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = execution.impl
    set_kinds(model, execution.kinds)
    set_linear(model, execution.linear)
    for block, placement in zip(model.layers, execution.placements):
        block.mixer.backend = execution.attention_backend
        block.mixer.heads_at_a_time = None if placement.is_whole else execution.heads_at_a_time
        block.mlp.tile_size = None if placement.is_whole else execution.mlp_tile_size
    arena = PinnedArena(arena_bytes, model.embed_tokens.weight.device) if arena_bytes else None
    chooses = any(block.mixer.kind.list_length or block.mlp.part.routes for block in model.layers)
    skips = execution.mlp_tile_size is not None or chooses
    placed = apply_placement(model.layers, execution.placements, arena, skips, homes)
    embedding, head = model.embed_tokens, model.output_weight
    if any((end in homes) != (execution.ends == "host") for end in (embedding.weight, head)):
        raise ValueError(
            f"embedding and head are placed on the {execution.ends}, where they do not live"
        )
    if execution.ends == "host":
        ends = {-1: embedding.weight, len(model.layers): head}
        placed.weights.homes |= {number: {end: homes[end]} for number, end in ends.items()}
        embedding.forward = functools.partial(placed.embed, embedding.forward)
        model.head_visit = placed.visit_head


def set_kinds(model: nn.Module, kinds: Sequence[MixerKind]) -> None:
    """Sets how each block attends; (): as configured.

    Raises ValueError for a kind that needs other gates.
    """
    for block, kind in zip(model.layers, kinds or model.config.kinds):
        trained = block.mixer.kind
        if (kind.gates_per_head, kind.has_keys) != (trained.gates_per_head, trained.has_keys):
            raise ValueError(
                f"a layer whose own attention is {trained.name} has no parameters for {kind.name}"
            )
        block.mixer.kind = kind


def set_linear(model: nn.Module, linear: Linear) -> None:
    """Sets the linear maps of all blocks and of the head of a model.Transformer."""
    model.linear = linear.head
    for block in model.layers:
        block.mixer.linear = block.mlp.linear = linear


@contextmanager
def products_in_bf16(model: nn.Module) -> Iterator[None]:
    """Has a model.Transformer compute as it does outside of training, whatever linear maps it
    trains with."""
    blocks = ((block.mixer, block.mlp) for block in model.layers)
    had = [(module, module.linear) for module in (model, *itertools.chain(*blocks))]
    for module, linear in had:
        module.linear = linear.plain
    try:
        yield
    finally:
        for module, linear in had:
            module.linear = linear


def apply_placement(
    blocks: nn.ModuleList,
    placements: Sequence[Placement],
    arena: PinnedArena | None = None,
    skips: bool = True,
    homes: Homes = MappingProxyType({}),
) -> "_PlacedBlocks":
    """Gives each block a forward that keeps activations for backward as its placement says.
    Gradients stay the same.

    Args:
        blocks: the model's blocks, called as block(x_BTD, context), in this order. FSDP2 may shard
            them. A forward pass with gradients must have its backward before the next such pass
            begins.
        placements: one per block. `Placement()` for all is gradient checkpointing as commonly
            understood.
        arena: pinned memory for everything placed on the "host".
        skips: whether to keep choices in forward, and to leave out skippable operations in
            backward. False for compiled blocks, whose operations cannot be seen.
        homes: weights of the blocks that have them on the "host", and quantized weights of blocks
            that are not whole.

    Raises:
        ValueError: placements that do not fit the blocks, the homes or each other, or need an
            arena.
    """
    if len(placements) != len(blocks):
        raise ValueError(f"{len(blocks)} blocks need as many placements, got {len(placements)}")
    if placements[0].input == "recompute":
        raise ValueError(
            "the first block has none before it to recompute its input from; "
            "place it on gpu or host"
        )
    for layer, (before, placement) in enumerate(pairwise(placements), start=1):
        if before.is_whole and placement.input == "recompute":
            cause = f"cannot be recomputed from block {layer - 1}, which is left to autograd"
            raise ValueError(f"block {layer}'s input {cause}; place it on gpu or host")
    if arena is None and any("host" in (p.input, p.results) for p in placements):
        raise ValueError("placements in host memory need an arena")
    for layer, (block, placement) in enumerate(zip(blocks, placements)):
        weight_homes = [homes.get(parameter) for parameter in block.parameters()]
        if any(
            (h is not None) != (placement.weights == "host")
            for h in weight_homes
            if h is None or isinstance(h, Tensor)
        ):
            raise ValueError(
                f"block {layer} is placed with weights on the {placement.weights}, where they do "
                "not live"
            )
        if placement.is_whole and any(h is not None for h in weight_homes):
            raise ValueError(
                f"block {layer} is left to autograd, but its weights visit; recompute its rest"
            )
    placed = _PlacedBlocks(blocks, placements, arena, skips, homes)
    for layer, block in enumerate(blocks):
        if not placements[layer].is_whole:
            block.forward = functools.partial(placed.run, layer)
    return placed


class _PlacedBlocks:
    """The blocks' own forwards, and the tensors that placed blocks keep until backward."""

    def __init__(
        self,
        blocks: nn.ModuleList,
        placements: Sequence[Placement],
        arena: PinnedArena | None,
        skips: bool,
        homes: Homes,
    ):
        self.blocks, self.placements, self.skips = blocks, placements, skips
        self.forwards = [block.forward for block in blocks]
        placed = [i for i, placement in enumerate(placements) if not placement.is_whole]
        self.first, self.last = min(placed, default=None), max(placed, default=None)
        self.copies = None if arena is None else HostCopies(arena)
        visiting: dict[int, Homes] = {}
        for layer, block in enumerate(blocks):
            if block_homes := {p: homes[p] for p in block.parameters() if p in homes}:
                visiting[layer] = block_homes
        self.weights = VisitingWeights(visiting, next(blocks.parameters()).device)
        # By (layer, name): tensors of each call.
        # Names are "input" and the roles of kernels.common.Keepable.
        self.on_gpu: dict[tuple[int, str], list[Sequence[Tensor]]] = {}
        # by (layer, name): calls of `_keep` in the last forward
        self.kept_calls: Counter = Counter()
        self.passes = [0] * len(blocks)

    def embed(self, forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """Runs the embedding's own forward, in a visit that begins a pass."""
        self.weights.free()  # as in `run`
        with self.weights.visit(-1, 0):
            return forward(ids)

    def visit_head(self) -> AbstractContextManager[None]:
        """Returns the visit of the head.

        If a backward follows, the last block's weights come beside it.
        """
        last = len(self.blocks)
        return self.weights.visit(last, self._start(last - 1) if torch.is_grad_enabled() else None)

    def run(self, layer: int, x_BTD: Tensor, context) -> Tensor:
        """Runs a block as one autograd function; without gradients, in a visit of its weights."""
        embedding_visits = -1 in self.weights.homes  # then `embed` begins the pass
        if layer == self.first and not embedding_visits:
            # A pass that was broken off left weights on the GPU, which may be older than an update.
            self.weights.free()
        if not torch.is_grad_enabled():
            with self.weights.visit(layer, layer + 1):
                return self.forwards[layer](x_BTD, context)
        assert x_BTD.requires_grad, "without it no gradient would reach this block's parameters"
        return _PlacedBlock.apply(x_BTD, self, layer, context)

    def forward(self, layer: int, x_BTD: Tensor, context) -> Tensor:
        if layer == self.first:  # an earlier pass that was broken off may have left something
            if self.copies is not None:
                self.copies.begin_pass()
            self.on_gpu.clear()
            self.kept_calls.clear()
        self._keep(layer, "input", (x_BTD,))
        intercepted = self.placements[layer].results != "recompute" or self.skips
        keeping: AbstractContextManager = nullcontext()
        if intercepted:
            keeping = _Interception(keep=functools.partial(self._keep, layer))
        with self.weights.visit(layer, layer + 1), keeping:
            y_BTD = self.forwards[layer](x_BTD, context)
        if self.copies is not None:  # its own copies go on beside the next block
            self.copies.finish_sending(but=layer if layer != self.last else None)
        return y_BTD

    def backward(self, layer: int, dy_BTD: Tensor, context) -> Tensor:
        """Rebuilds the block and runs backward through its graph.

        Returns dx_BTD; parameters get their gradients.
        """
        # Only for the last block: otherwise the backward of block layer + 1 began these copies.
        self._fetch(layer)
        if self.copies is not None:
            self.copies.finish_fetching()
        if layer > 0:
            self._fetch(layer - 1)
        x_BTD = self._input(layer, context).detach().requires_grad_()
        with self.weights.visit(layer, self._start(layer - 1)):
            with torch.enable_grad():
                y_BTD = self._rebuild(layer, x_BTD, context, self.skips)
            # The graph frees each kept tensor once it has used it.
            for name in ("input", "results", "choices"):
                self.on_gpu.pop((layer, name), None)
            root = torch.autograd.graph.get_gradient_edge(y_BTD)
            del y_BTD  # backward does not need it
            torch.autograd.backward(root, dy_BTD)
        return x_BTD.grad

    def _start(self, layer: int) -> int | None:
        """Returns the first block that runs again for the backward of `layer`; None: none does."""
        needed = needed_for_backward(self.placements, layer) if layer >= 0 else []
        return needed[0][0] if needed else None

    def _input(self, layer: int, context) -> Tensor:
        """Returns the block's input: as it was kept, or recomputed from the blocks before."""
        (start, _), *_ = needed_for_backward(self.placements, layer)
        [[x_BTD]] = self.on_gpu[start, "input"]
        for i in range(start, layer):
            if isinstance(self.blocks[i], FSDPModule):
                self.blocks[i].unshard()  # stays gathered for block i's backward, which follows
            with torch.no_grad(), self.weights.visit(i, i + 1):
                x_BTD = self._rebuild(i, x_BTD, context)
        return x_BTD

    def _rebuild(self, layer: int, x_BTD: Tensor, context, skips: bool = False) -> Tensor:
        """Runs a block's forward again, with what its operations kept."""
        kept = {
            name: calls
            for (i, name), calls in self.on_gpu.items()
            if i == layer and name != "input"
        }
        with _Interception(kept=kept, skips=skips) if kept or skips else nullcontext():
            return self.forwards[layer](x_BTD, context)

    def _keep(self, layer: int, name: str, tensors: Sequence[Tensor]) -> None:
        place = "gpu" if name == "choices" else getattr(self.placements[layer], name)
        if place == "gpu":
            self.on_gpu.setdefault((layer, name), []).append(tensors)
        elif place == "host":
            assert self.copies is not None
            self.copies.send((layer, name, self.kept_calls[layer, name]), tensors)
        self.kept_calls[layer, name] += 1

    def _fetch(self, layer: int) -> None:
        for key in needed_for_backward(self.placements, layer):
            calls = range(self.kept_calls[key])  # none in a block whose operations keep nothing
            if key not in self.on_gpu and calls:
                assert self.copies is not None
                self.on_gpu[key] = [self.copies.fetch((*key, call)) for call in calls]


class _PlacedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTD, blocks, layer, context):
        blocks.passes[layer] += 1
        ctx.blocks, ctx.layer, ctx.context = blocks, layer, context
        ctx.number = blocks.passes[layer]
        return blocks.forward(layer, x_BTD, context)

    @staticmethod
    def backward(ctx, dy_BTD):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a placed block has no second derivative (create_graph=True); leave it whole"
            )
        if ctx.number != ctx.blocks.passes[ctx.layer]:
            raise RuntimeError(
                f"block {ctx.layer} went forward or backward again since this forward: "
                "nothing is kept"
            )
        ctx.blocks.passes[ctx.layer] += 1
        return ctx.blocks.backward(ctx.layer, dy_BTD, ctx.context), None, None, None


class _Interception(TorchDispatchMode):
    """Sees each operation of a block: in forward to keep results, in the second forward to return
    the kept results.

    Kept results are returned in the order of the calls that made them, and all of them must be
    asked for. If only the choice of an operation was kept, the operation runs again with that
    choice.

    Args:
        keep: called for each keepable operation with a role, "results" or "choices", and the
            tensors of the call.
        kept: tensors of each call that was kept, by role.
        skips: whether skippable operations return anything of the first argument's shape, and do
            not run. Sums and products with what they return do not run either: they would take
            memory for a result that nobody reads.
    """

    def __init__(
        self,
        *,
        keep: Callable[[str, Sequence[Tensor]], None] = lambda role, tensors: None,
        kept: dict[str, list[Sequence[Tensor]]] | None = None,
        skips: bool = False,
    ):
        super().__init__()
        self.keep, self.skips = keep, skips
        self.kept = {role: list(calls) for role, calls in (kept or {}).items()}
        # storages of results without values
        self.skipped: WeakSet[torch.UntypedStorage] = WeakSet()

    def _reads_skipped(self, args: tuple) -> bool:
        return any(isinstance(x, Tensor) and x.untyped_storage() in self.skipped for x in args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if self.skips and (
            name in SKIPPABLE or (name in ELEMENTWISE and self._reads_skipped(args))
        ):
            result = args[0].new_empty(1)
            self.skipped.add(result.untyped_storage())
            return result.expand(args[0].shape)
        if name not in KEEPABLE:
            return func(*args, **(kwargs or {}))
        roles, choice = KEEPABLE[name]
        # Autograd writes its graph into the tensors that are returned, so the kept tensors
        # themselves are not returned.
        kept = {
            role: [x.detach() for x in self.kept[role].pop(0)]
            for role in roles
            if role in self.kept
        }
        if len(kept) < len(roles):
            if kept:
                assert choice is not None, "of one role all are kept or none"
                args = (*args[:choice], *kept["choices"], *args[choice + 1 :])
            results = func(*args, **(kwargs or {}))
            results = [results] if isinstance(results, Tensor) else [*results]
            by_role = {"choices": [results.pop()]} if len(roles) == 2 else {}
            by_role[roles[0]] = results
            for role in roles:
                self.keep(role, by_role[role])
            kept = by_role | kept
        results = [result for role in roles for result in kept[role]]
        return results[0] if len(results) == 1 else tuple(results)

    def __exit__(self, exc_type, exc_value, traceback):
        super().__exit__(exc_type, exc_value, traceback)
        assert exc_type or not any(self.kept.values()), (
            "an operation ran less often than when its results were kept"
        )
