"""Where activations wait for backward: on the GPU, in pinned host memory, or nowhere, to be computed again.

A placed block is one autograd function, after Chen et al., arXiv 1604.06174. Forward runs without a graph and keeps
what the block's `Placement` says; backward builds the block again from its input and runs through that graph, so that
one block's activations exist at a time. Two things of the block are not computed twice: attention, where its output
and log-sum-exp were kept, and the tiled MLP, whose output no gradient needs. Attention by groups of heads does the
same once more inside attention, so that one group's queries, keys, values and gradients exist at a time. Where memory
is plenty, a block is left whole to autograd, and nothing of it is computed twice.
Offloading: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857.
"""

import functools
import math
import mmap
import os
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention import choose_backend
from kernels.rms_norm import rms_norm
from kernels.rope import rope

PLACES = ("gpu", "host", "recompute")
DRIVER_BYTES = 2**30  # of a GPU's memory: CUDA's and NCCL's own
# Slots start at multiples of this: whole cache lines, and whole sectors for the copy engines.
SLOT_ALIGNMENT = 512


class PinnedArena:
    """One block of host memory, page-locked where there is a GPU to copy to, given out in slots that are never freed.

    The pages are registered and not taken from PyTorch's pinned allocator, which rounds up to powers of two.

    Args:
        num_bytes: of the whole.
        device: whose copies it serves; a CPU needs plain memory only.

    Raises:
        ValueError: the host does not let this much be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes, self.used_bytes, self.device = num_bytes, 0, device
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        if device.type == "cuda" and num_bytes:
            with suppress(OSError):  # a kernel without huge pages: small ones take longer to pin
                pages.madvise(mmap.MADV_HUGEPAGE)
            address = self._bytes.data_ptr()
            error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            if error:
                raise ValueError(
                    f"cannot pin {num_bytes / 2**30:.1f} GB of host memory (CUDA error {error}); lower host_budget"
                )
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of the arena, on the CPU.

        Raises:
            ValueError: it does not fit into what is left.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        start = -(-self.used_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if start + num_bytes > self.num_bytes:
            left = self.num_bytes - self.used_bytes
            raise ValueError(f"the pinned arena of {self.num_bytes} bytes has {left} left, {num_bytes} are asked for")
        self.used_bytes = start + num_bytes
        return self._bytes[start : self.used_bytes].view(dtype).view(shape)


@dataclass(frozen=True)
class Placement:
    """Where one block's activations wait for backward.

    Args:
        input: "gpu", "host", or "recompute": from the input of the block before it, by running that block again.
        attention: attention's output and log-sum-exp, "gpu", "host" or "recompute".
        rest: all its other activations, "gpu" or "recompute". On the GPU they need the two above there.

    Raises:
        ValueError: another place.
    """

    input: str = "gpu"
    attention: str = "recompute"
    rest: str = "recompute"

    def __post_init__(self):
        for name, places in (("input", PLACES), ("attention", PLACES), ("rest", ("gpu", "recompute"))):
            if getattr(self, name) not in places:
                raise ValueError(f"{name} must be placed in one of {', '.join(places)}, got {getattr(self, name)!r}")
        if self.is_whole and (self.input, self.attention) != ("gpu", "gpu"):
            raise ValueError(
                f"rest on gpu needs input and attention there, got {self.input} and {self.attention}; "
                "place them on gpu, or rest in recompute"
            )

    @property
    def is_whole(self) -> bool:
        """Whether the block is left to autograd, which keeps all of it."""
        return self.rest == "gpu"


WHOLE = Placement("gpu", "gpu", "gpu")


def needed_for_backward(placements: Sequence[Placement], layer: int) -> list[tuple[int, str]]:
    """What block `layer` is rebuilt from: pairs (block, "input" or "attention"), the input it starts from first.

    A whole block is not rebuilt: nothing.
    """
    if placements[layer].is_whole:
        return []
    start = layer
    while placements[start].input == "recompute":
        start -= 1
    blocks = range(start, layer + 1)
    return [(start, "input"), *((i, "attention") for i in blocks if placements[i].attention != "recompute")]


def apply_placement(
    blocks: nn.ModuleList,
    placements: Sequence[Placement],
    *,
    mlp_tile_size: int | None = None,
    attention_by_groups: bool = False,
    arena: PinnedArena | None = None,
) -> None:
    """Give each block a forward that keeps for backward what its placement says, and where.

    Backward gives the same numbers as without it, except by groups, where attention's input gradient is a sum over
    groups, rounded to its dtype after each.

    Args:
        blocks: of the model, called as block(x_BTD, context), in this order, each having `self_attn` and `mlp`; each
            forward pass that is to have a backward must have it before the next. They may be sharded by FSDP2.
        placements: one a block. `Placement()` for all is gradient checkpointing as it is commonly understood. Whole
            blocks keep their own forward, with all rows and heads at once, whatever the next two say.
        mlp_tile_size: rows that the MLP works on at a time; None: all.
        attention_by_groups: one key/value head and its query heads at a time.
        arena: where "host" is.

    Raises:
        ValueError: placements that do not fit the blocks or each other, or need an arena.
    """
    if len(placements) != len(blocks):
        raise ValueError(f"{len(blocks)} blocks need as many placements, got {len(placements)}")
    if placements[0].input == "recompute":
        raise ValueError("the first block has none before it to recompute its input from; place it on gpu or host")
    for layer, (before, placement) in enumerate(pairwise(placements), start=1):
        if before.is_whole and placement.input == "recompute":
            raise ValueError(
                f"block {layer}'s input cannot be recomputed from block {layer - 1}, which is left to autograd; "
                "place it on gpu or host"
            )
    if arena is None and any("host" in (p.input, p.attention) for p in placements):
        raise ValueError("placements in host memory need an arena")
    placed = _PlacedBlocks(blocks, placements, arena)
    for layer, block in enumerate(blocks):
        if placements[layer].is_whole:
            block.mlp.tile_size = None
            continue
        block.mlp.tile_size = mlp_tile_size
        if attention_by_groups:
            whole = block.self_attn.forward
            block.self_attn.forward = functools.partial(_attention_by_groups_forward, block.self_attn, whole)
        block.forward = functools.partial(placed.run, layer)


class _PlacedBlocks:
    """All blocks' own forwards, and what those that are not whole keep between forward and backward."""

    def __init__(self, blocks: nn.ModuleList, placements: Sequence[Placement], arena: PinnedArena | None):
        self.blocks, self.placements = blocks, placements
        self.forwards = [block.forward for block in blocks]
        self.first = next((i for i, placement in enumerate(placements) if not placement.is_whole), None)
        self.copies = None if arena is None else _HostCopies(arena)
        self.on_gpu: dict[tuple[int, str], Sequence[Tensor]] = {}
        self.passes = [0] * len(blocks)

    def run(self, layer: int, x_BTD: Tensor, context) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forwards[layer](x_BTD, context)
        assert x_BTD.requires_grad, "without it no gradient would reach this block's parameters"
        return _PlacedBlock.apply(x_BTD, self, layer, context)

    def forward(self, layer: int, x_BTD: Tensor, context) -> Tensor:
        if layer == self.first:  # a pass that was broken off may have left something
            if self.copies is not None:
                self.copies.finish_fetching()
            self.on_gpu.clear()
        self._keep(layer, "input", (x_BTD,))
        keeps_attention = self.placements[layer].attention != "recompute"
        keep = functools.partial(self._keep, layer, "attention")
        with _Interception(keep=keep) if keeps_attention else nullcontext():
            y_BTD = self.forwards[layer](x_BTD, context)
        if self.copies is not None:
            self.copies.finish_sending()
        return y_BTD

    def backward(self, layer: int, dy_BTD: Tensor, context) -> Tensor:
        """Rebuild the block, run its graph: parameters get their gradients, x's is returned."""
        self._fetch(layer)  # under way since the block after this one, but for the last
        if self.copies is not None:
            self.copies.finish_fetching()
        if layer > 0:
            self._fetch(layer - 1)
        x_BTD = self._input(layer, context).detach().requires_grad_()
        attention = self.on_gpu.pop((layer, "attention"), None)
        self.on_gpu.pop((layer, "input"), None)
        intercepted = attention is not None or self.blocks[layer].mlp.tile_size is not None
        with torch.enable_grad(), _Interception(kept=attention, skip_mlp=True) if intercepted else nullcontext():
            y_BTD = self.forwards[layer](x_BTD, context)
        root = torch.autograd.graph.get_gradient_edge(y_BTD)
        del attention, y_BTD  # backward needs neither; the graph lets go of attention's output when it has used it
        torch.autograd.backward(root, dy_BTD)
        return x_BTD.grad

    def _input(self, layer: int, context) -> Tensor:
        """The block's input, from where it was kept or from the blocks before."""
        (start, _), *_ = needed_for_backward(self.placements, layer)
        [x_BTD] = self.on_gpu[start, "input"]
        for i in range(start, layer):
            if isinstance(self.blocks[i], FSDPModule):
                self.blocks[i].unshard()  # its own backward, which comes next, finds it so
            kept = self.on_gpu.get((i, "attention"))
            with torch.no_grad(), _Interception(kept=kept) if kept is not None else nullcontext():
                x_BTD = self.forwards[i](x_BTD, context)
        return x_BTD

    def _keep(self, layer: int, name: str, tensors: Sequence[Tensor]) -> None:
        place = getattr(self.placements[layer], name)
        if place == "gpu":
            self.on_gpu[layer, name] = tensors
        elif place == "host":
            self.copies.send((layer, name), tensors)

    def _fetch(self, layer: int) -> None:
        for key in needed_for_backward(self.placements, layer):
            if key not in self.on_gpu:
                self.on_gpu[key] = self.copies.fetch(key)


class _PlacedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTD, blocks, layer, context):
        blocks.passes[layer] += 1
        ctx.blocks, ctx.layer, ctx.context, ctx.number = blocks, layer, context, blocks.passes[layer]
        return blocks.forward(layer, x_BTD, context)

    @staticmethod
    def backward(ctx, dy_BTD):
        if ctx.number != ctx.blocks.passes[ctx.layer]:
            raise RuntimeError(f"block {ctx.layer} went forward or backward again since this forward: nothing is kept")
        ctx.blocks.passes[ctx.layer] += 1
        return ctx.blocks.backward(ctx.layer, dy_BTD, ctx.context), None, None, None


class _HostCopies:
    """Copies of tensors to slots of the arena and back, on two streams made once; on a CPU, plain copies.

    A tensor's memory belongs to the compute stream's allocator throughout. Waits keep it from being used again under
    a copy, and not record_stream: the peak would depend on how far the host is ahead.
    """

    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self.slots: dict[tuple[int, str], list[Tensor]] = {}
        self.leaving: list[Sequence[Tensor]] = []
        self.device_module = torch.get_device_module(arena.device)  # torch.cpu's streams do nothing
        self.to_host, self.to_gpu = self.device_module.Stream(), self.device_module.Stream()

    def send(self, key: tuple[int, str], tensors: Sequence[Tensor]) -> None:
        slots = self.slots.get(key)
        if slots is None or [s.shape for s in slots] != [t.shape for t in tensors]:
            slots = self.slots[key] = [self.arena.allocate(t.shape, t.dtype) for t in tensors]
        # After what computes the tensors, and after backward's last use of what was fetched from these slots.
        self._copy(slots, tensors, self.to_host)
        self.leaving.append(tensors)  # so that nobody gets their memory while they are read

    def finish_sending(self) -> None:
        """Let go of the tensors: compute queued from here on, which may write into their memory, waits for copies."""
        self.device_module.current_stream().wait_stream(self.to_host)
        self.leaving.clear()

    def fetch(self, key: tuple[int, str]) -> list[Tensor]:
        """Tensors that may be read after `finish_fetching`."""
        slots = self.slots[key]
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=self.arena.device) for slot in slots]
        # After the last use of the memory that `tensors` got, and after finish_sending, so that the slots are written.
        self._copy(tensors, slots, self.to_gpu)
        return tensors

    def finish_fetching(self) -> None:
        """Compute queued from here on waits for all fetches; it alone uses the tensors then, and may free them."""
        self.device_module.current_stream().wait_stream(self.to_gpu)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: torch.Stream) -> None:
        stream.wait_stream(self.device_module.current_stream())
        with self.device_module.stream(stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)


class _Interception(TorchDispatchMode):
    """Sees the operations of a block while it runs: hands attention's results to `keep`, or returns those `kept`.

    With `skip_mlp` the tiled MLP returns a tensor of anything: its output is only added to the block's, its backward
    starts from its input.
    """

    def __init__(
        self,
        *,
        keep: Callable[[Sequence[Tensor]], None] | None = None,
        kept: Sequence[Tensor] | None = None,
        skip_mlp: bool = False,
    ):
        super().__init__()
        self.keep, self.kept, self.skip_mlp = keep, kept, skip_mlp

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ops = torch.ops.fathom
        if func is ops.tiled_gated_mlp.default and self.skip_mlp:
            return args[0].new_empty(1).expand(args[0].shape)
        if func not in (ops.attention_forward.default, ops.attention_by_groups.default):
            return func(*args, **(kwargs or {}))
        if self.kept is not None:
            return tuple(tensor.detach() for tensor in self.kept)  # new ones, as autograd writes its graph into them
        outputs = func(*args, **(kwargs or {}))
        if self.keep is not None:
            self.keep(outputs)
        return outputs


def _group_weight(weights: Sequence[Tensor], group: int, num_groups: int) -> Tensor:
    """The rows of the q, k and v projections that make one group's heads, [(R + 2) K, D]; R query heads a group."""
    return torch.cat([weight.chunk(num_groups)[group] for weight in weights])


def _group_heads(qkv: Tensor, norms: Sequence[Tensor], eps: float, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """[B, T, (R + 2) K] -> q [B, T, R, K], k and v [B, T, 1, K], normalised and rotated as attention takes them."""
    K = len(norms[0])
    heads = qkv.unflatten(-1, (-1, K)).split([qkv.shape[-1] // K - 2, 1, 1], dim=2)
    q, k = rope(*(rms_norm(x, weight, eps) for x, weight in zip(heads, norms)), cos, sin)
    return [q, k, heads[2].contiguous()]


@torch.library.custom_op("fathom::attention_by_groups", mutates_args=())
def _attention_by_groups(
    x: Tensor, weights: list[Tensor], norms: list[Tensor], eps: float, cos: Tensor, sin: Tensor,
    segments: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [B, T, D] -> attention's output [B, T, H, K] and log-sum-exp [B, H, T]; weights of q, k, v; norms of q, k."""
    out, lse = _empty_outputs(x, weights, norms)
    G = len(weights[1]) // len(norms[1])
    for group, (out_g, lse_g) in enumerate(zip(out.chunk(G, dim=2), lse.chunk(G, dim=1))):
        q, k, v = _group_heads(F.linear(x, _group_weight(weights, group, G)), norms, eps, cos, sin)
        for whole, part in zip((out_g, lse_g), torch.ops.fathom.attention_forward(q, k, v, segments, backend)):
            whole.copy_(part)
    return out, lse


def _empty_outputs(x: Tensor, weights: list[Tensor], norms: list[Tensor]) -> tuple[Tensor, Tensor]:
    (B, T, _), K = x.shape, len(norms[0])
    H = len(weights[0]) // K
    return x.new_empty(B, T, H, K), x.new_empty(B, H, T, dtype=torch.float32)


@_attention_by_groups.register_fake
def _(x, weights, norms, eps, cos, sin, segments, backend):
    return _empty_outputs(x, weights, norms)


class _AttentionByGroups(torch.autograd.Function):
    """Projections, q/k norm, RoPE, attention and the output projection, one key/value head and its queries at a time.

    Kept for backward: the input, attention's output and log-sum-exp. Backward computes a group's q, k and v again. The
    input's gradient is rounded to its dtype after each group: G roundings of at most half a unit in the last place.
    """

    @staticmethod
    def forward(ctx, x, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm, cos, sin, segments, eps, backend):
        weights, norms = [q_weight, k_weight, v_weight], [q_norm, k_norm]
        out, lse = torch.ops.fathom.attention_by_groups(x, weights, norms, eps, cos, sin, segments, backend)
        ctx.save_for_backward(x, *weights, o_weight, *norms, cos, sin, out, lse)
        ctx.segments, ctx.eps, ctx.backend = segments, eps, backend
        return F.linear(out.flatten(2), o_weight)

    @staticmethod
    def backward(ctx, dy):
        x, *weights, o_weight, q_norm, k_norm, cos, sin, out, lse = ctx.saved_tensors
        G = len(weights[1]) // len(k_norm)
        norms = [weight.detach().requires_grad_() for weight in (q_norm, k_norm)]
        x_rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
        dx_rows, d_weights = torch.zeros_like(x_rows), [torch.empty_like(weight) for weight in weights]
        d_norms = [torch.zeros_like(n, dtype=torch.promote_types(n.dtype, torch.float32)) for n in norms]
        groups = zip(out.chunk(G, dim=2), lse.chunk(G, dim=1), o_weight.chunk(G, dim=1))
        for group, (out_g, lse_g, o_weight_g) in enumerate(groups):
            weight = _group_weight(weights, group, G)
            qkv = F.linear(x, weight).requires_grad_()
            with torch.enable_grad():
                heads = _group_heads(qkv, norms, ctx.eps, cos, sin)
            d_out = (dy @ o_weight_g).view(out_g.shape)
            d_heads = torch.ops.fathom.attention_backward(
                d_out, *(head.detach() for head in heads), out_g.contiguous(), lse_g.contiguous(),
                ctx.segments, ctx.backend,
            )  # fmt: skip
            d_qkv, *d_norms_g = torch.autograd.grad(heads, [qkv, *norms], d_heads)
            d_qkv_rows = d_qkv.flatten(0, 1)
            dx_rows.addmm_(d_qkv_rows, weight)
            parts = (d_qkv_rows.T @ x_rows).split([len(w) // G for w in weights])
            for d_weight, part in zip(d_weights, parts):
                d_weight.chunk(G)[group].copy_(part)
            for d_norm, part in zip(d_norms, d_norms_g):
                d_norm += part
            del qkv, heads, d_out, d_heads, d_qkv, d_qkv_rows, parts  # before the next group's are made
        d_norms = [d.to(n.dtype) for d, n in zip(d_norms, norms)]
        return dx_rows.view_as(x), *d_weights, dy_rows.T @ out.flatten(0, 1).flatten(1), *d_norms, *[None] * 5


def _attention_by_groups_forward(module: nn.Module, whole: Callable, x_BTD: Tensor, context) -> Tensor:
    """What `module.forward` does, by groups; `whole` is that forward, for generation."""
    if context.caches is not None:
        return whole(x_BTD, context)
    projections = (module.q_proj, module.k_proj, module.v_proj, module.o_proj, module.q_norm, module.k_norm)
    return _AttentionByGroups.apply(
        x_BTD, *(projection.weight for projection in projections), context.cos, context.sin, context.segments,
        module.q_norm.eps, choose_backend(module.backend, x_BTD.device),
    )  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes in "24GB" or "24GiB" (both 2**30 bytes a GB, as GPUs are sold), "512MB" or a plain number of bytes.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f'a memory size looks like "24GB", got {text!r}')
    return int(float(match[1]) * 2 ** (10 * " KMGT".index(match[2].upper() or " ")))


def gpu_budget(text: str, device: torch.device) -> int:
    """Bytes of a --memory_budget: a size, or "auto", what is free or this process's less a gigabyte for the driver.

    Raises:
        ValueError: that much is not free.
    """
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    budget = free - DRIVER_BYTES if text == "auto" else parse_bytes(text)
    if not 0 < budget <= free:
        raise ValueError(
            f"memory_budget {text}: {free / 2**30:.1f} GB of this GPU are free, of which the driver needs one; "
            "lower it, or end what else runs there"
        )
    return budget


def available_host_bytes() -> int:
    """80% of what this machine, and the container we are in, have left, shared by torchrun's processes here."""
    left = [1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no container, or one without a limit, which reads "max"
        cached = int(re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)[1])
        used = int((group / "memory.current").read_text()) - cached
        left.append(int((group / "memory.max").read_text()) - used)
    return int(0.8 * min(left)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cap_gpu_memory(num_bytes: int, device: torch.device) -> None:
    """Make `num_bytes` the hard limit of this process's GPU allocator, everything reserved included."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)
