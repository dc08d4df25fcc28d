"""AdamW on float32 master weights, state on the GPU or in pinned host memory, for plain and for sharded parameters.

A float32 parameter is its own master: on a CPU, or as a shard under FSDP, which computes in bf16. For a bf16 parameter
the optimizer keeps a float32 copy, or in compact format (`state_format`) the 16 bits that the parameter lacks. The
optimizer takes each gradient as soon as backward has made it: a single micro-batch's as it is, several added in
float32. The last addition takes the norm, so the exact global norm is known before any weight moves, and the update
scales by it.

Each parameter is updated on the GPU, in pieces of at most PIECE_ELEMENTS. Pieces and calls are the same wherever the
state lives, so results are equal bit for bit. State in host memory costs only the time of its copies. A weight may
live there as well: an update moves it like state, and `training.memory.visiting` brings it to its block. For the 4B
(4.02e9 parameters) with all state in host memory, at 50 GB/s each way:
- one micro-batch: bf16 gradients leave during backward, 8 GB in 0.16 s. The update fetches 14 bytes per parameter and
  sends 12 back at the same time: 1.13 s. Host: 52.4 GiB.
- several: backward fetches and sends the float32 sums on a side stream, 32 GB in 0.64 s (0.32 s the first time). The
  update fetches 16 bytes per parameter: 1.29 s. Host: 59.9 GiB.
With everything on the GPU the update takes about 0.05 s. These are numbers of the float32 format. The next forward
hides an update that goes through the GPU, see `update_beside_forward`.
"""

import functools
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.checkpoint.files import load_optimizer_state
from training.checkpoint.pieces import (
    CONVERTED_BYTES,
    Entry,
    Piece,
    check_finite,
    in_threads,
    local_pieces,
    read_pieces,
    read_tensors,
)
from training.checkpoint.ranks import failing_together
from training.checkpoint.weights import find_weights
from training.host.errors import UserError
from training.host.memory import SLOT_ALIGNMENT, PinnedArena
from training.host.torch_internals import dtensor_like
from training.parallel.fsdp import local_part
from training.quantized import Quantized
from training.state_format import BETA1, BETA2, Kept, QuantizedState, StateFormat, Update, format_of, format_with

# 32 MiB of float32: copies of that size run at the link's full rate. A multiple of every format's group.
PIECE_ELEMENTS = 2**23
NUM_SLOTS = 8  # pieces on the GPU at once: an update waits for a kernel of the forward beside it, up to 20 ms
LEAVING_BYTES = 2**28  # gradients on their way to the host at once: about one transformer block's, in bf16


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes that a `MasterAdamW` takes, without quantized weights on the GPU, which count as parameters."""

    gpu_state: int  # masters and moments
    gpu_gradients: int  # gradients of parameters whose state is on the GPU; exist from backward to the update
    gpu_room: int  # a piece of a gradient in float32
    gpu_slots: int  # pieces on their way through an update; exist from `step` until all are updated
    leaving_gradients: int  # gradients on their way to the host; at most LEAVING_BYTES of them are on the GPU at once
    host: int  # masters, moments, gradients, `host_weights` and quantized weights, pinned
    updated: int  # the part of `host` that an update fetches, in updated / link rate seconds: all but frozen weights
    last_on_host: bool  # whether the last parameter's state is on the host


def optimizer_bytes(
    parameters: Iterable[Tensor], *, accumulate: bool = True, gpu_state_bytes: float = math.inf,
    state_format: str = "float32", host_weights: Iterable[Tensor] = (),
    quantized: Mapping[Tensor, int] = MappingProxyType({}),
) -> OptimizerBytes:  # fmt: skip
    """Predicts the bytes of a `MasterAdamW` with these arguments; parameters on the meta device will do."""
    layout = _layout(list(parameters), accumulate, gpu_state_bytes, state_format, host_weights, quantized)
    on_gpu, on_host = ([item for item in layout if item.on_host is wanted] for wanted in (False, True))
    slots = (kept.num_bytes(size) for size, tensors in _slots(layout).values() for kept in tensors.values())
    return OptimizerBytes(
        gpu_state=sum(item.format.num_bytes(item.numel) for item in on_gpu if not item.format.is_quantized),
        gpu_gradients=sum(item.gradient_bytes for item in on_gpu),
        gpu_room=4 * _room_size(layout, accumulate),
        gpu_slots=NUM_SLOTS * sum(slots),
        leaving_gradients=sum(item.gradient_bytes for item in on_host),
        host=sum(item.host_bytes for item in layout),
        updated=sum(item.host_bytes for item in layout if item.gradient_dtype),
        last_on_host=layout[-1].on_host,
    )


@dataclass(frozen=True)
class _Layout:
    """Place and size of one parameter's state."""

    format: StateFormat
    gradient_dtype: torch.dtype | None  # None: the parameter is frozen
    numel: int
    on_host: bool
    has_home: bool  # whether the weight is on the host, too

    @property
    def gradient_bytes(self) -> int:
        return self.gradient_dtype.itemsize * self.numel if self.gradient_dtype else 0

    @property
    def tensors(self) -> dict[str, Kept]:
        """Tensors that are on the host if the state is there, by name. An update moves them through the GPU."""
        has_weight = self.has_home and not self.format.is_quantized
        weight = {"weight": Kept(self.format.parameter_dtype)} if has_weight else {}
        gradient = {"gradient": Kept(self.gradient_dtype)} if self.gradient_dtype else {}
        return {**self.format.kept, **gradient, **weight}

    @property
    def host_bytes(self) -> int:
        sizes = [kept.num_bytes(self.numel) for kept in self.tensors.values()] if self.on_host else []
        return sum(-(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for size in sizes)


def _layout(
    parameters: list[Tensor], accumulate: bool, gpu_state_bytes: float, state_format: str,
    host_weights: Iterable[Tensor], quantized: Mapping[Tensor, int],
) -> list[_Layout]:  # fmt: skip
    layout, homes = [], {id(parameter) for parameter in host_weights}
    assert homes <= set(map(id, parameters)), "host_weights must be some of the parameters"
    for parameter in parameters:
        format = format_of(parameter, state_format, quantized.get(parameter, 16))
        numel, has_home = _flat(parameter).numel(), id(parameter) in homes
        if (has_home or parameter in quantized) and isinstance(parameter, DTensor):
            raise ValueError("weights of sharded parameters stay on the GPU")
        state_bytes = 0 if format.is_quantized else format.num_bytes(numel)  # the limit is of what updates change
        on_host = has_home or state_bytes > gpu_state_bytes
        gpu_state_bytes -= 0 if on_host else state_bytes
        gradient_dtype = (torch.float32 if accumulate else parameter.dtype) if parameter.requires_grad else None
        layout.append(_Layout(format, gradient_dtype, numel, on_host, has_home))
    return layout


def _allocate(tensors: dict[str, Kept], numel: int, empty: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Returns tensors for so many elements, made by `empty`, which takes arguments of torch.empty."""
    return {name: empty((numel // kept.group,), dtype=kept.dtype) for name, kept in tensors.items()}


def _slots(layout: list[_Layout]) -> dict[StateFormat, tuple[int, dict[str, Kept]]]:
    """Elements and tensors of the largest piece that is updated through the GPU, by format."""
    slots: dict[StateFormat, tuple[int, dict[str, Kept]]] = {}
    for item in layout:
        if item.on_host and item.gradient_dtype:
            most, tensors = slots.get(item.format, (0, {}))
            slots[item.format] = max(most, min(PIECE_ELEMENTS, item.numel)), tensors | item.tensors
    return slots


def _room_size(layout: list[_Layout], accumulate: bool) -> int:
    """Elements of the largest piece of a gradient that is needed in float32: for the update, or to be added up."""
    trained = (item for item in layout if item.gradient_dtype)
    needing = (item for item in trained if item.format.needs_room or (accumulate and item.on_host))
    return max((min(PIECE_ELEMENTS, item.numel) for item in needing), default=0)


@torch.no_grad()
def _flat(tensor: Tensor) -> Tensor:
    """A view [n] of this rank's elements. No view of a parameter is kept: FSDP may replace a shard's memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)


def _num_copies(parameter: Tensor) -> int:
    """Ranks that have the same elements of a parameter as this one, itself included."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(axis) for axis, p in enumerate(parameter.placements) if p.is_replicate())


@dataclass
class _State:
    """State of one parameter: flat tensors [n / group], all on the GPU or all on the host."""

    parameter: nn.Parameter
    format: StateFormat
    weight_decay: float
    rate_ratio: float  # its learning rate, divided by the update's
    on_host: bool
    pieces: list[tuple[int, slice]]  # (index into the norms, elements)
    tensors: dict[str, Tensor]
    updated: torch.Event  # recorded once an update is on the host again, where state is there
    gradient: Tensor | None = None  # exists always where state is on the host, else from backward to the update
    home: Tensor | None = None  # the weight in host memory, in the parameter's shape; None: it is elsewhere
    arrived: bool = False  # whether a gradient has come since the last update

    @property
    def weight(self) -> Tensor:
        """The weight where it lives. A quantized weight is on "meta": only its state has values."""
        if self.format.is_quantized:
            return torch.empty_like(self.parameter, device="meta")
        return self.parameter if self.home is None else self.home

    @property
    def is_trained(self) -> bool:
        return self.parameter.requires_grad

    def slices(self, piece: slice) -> dict[str, Tensor]:
        """The part of the tensors for some elements of the parameter; also of gradient and host weight, if any."""
        gradient = {} if self.gradient is None else {"gradient": self.gradient[piece]}
        weight = {} if self.home is None else {"weight": _flat(self.home)[piece]}
        groups = {name: kept.group for name, kept in self.format.kept.items()}
        parts = {name: t[piece.start // groups[name] : piece.stop // groups[name]] for name, t in self.tensors.items()}
        return parts | gradient | weight


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), decoupled weight decay on matrices only.

    Args:
        named_parameters: the model's, sharded over one mesh of all ranks or not at all. The names are keys of the saved
            state. Parameters on a GPU are on the current one. Those that take no gradient stay as they are, and have no
            state. The others are of one dtype.
        weight_decay: argument of torch.optim.AdamW.
        rate_ratios: factors of the learning rate of some parameters, by the end of their names.
        accumulate: whether there may be more than one backward before an update.
        gpu_state_bytes: limit on the masters and moments that stay on the GPU, whole parameters in their order; the
            rest lives in pinned host memory, if the host lets that much be pinned (else UserError). State of
            `host_weights` is never on the GPU, and does not count.
        state_format: "float32" or "compact", see `training.state_format`.
        impl: Triton kernels or their PyTorch references, a name in kernels.common.IMPLEMENTATIONS.
        host_weights: parameters whose weights live in pinned host memory, as their state does. They lose their memory
            on the GPU, whose content becomes the weight. Sharded parameters are refused (ValueError).
        quantized: bits per element of frozen parameters that are kept quantized, on the host if they are among
            `host_weights`. They lose their memory as well, and are whole (ValueError).

    Attributes:
        homes: the weights of all parameters without memory: in host memory, or quantized.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float = 0.1,
        accumulate: bool = True,
        gpu_state_bytes: float = math.inf,
        state_format: str = "float32",
        impl: str = "auto",
        host_weights: Iterable[nn.Parameter] = (),
        rate_ratios: Mapping[str, float] = MappingProxyType({}),
        quantized: Mapping[nn.Parameter, int] = MappingProxyType({}),
    ):
        self.parameters = dict(named_parameters)
        parameters, host_weights = list(self.parameters.values()), list(host_weights)
        self.device = device = _flat(parameters[0]).device
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        kinds = {(p.dtype, p.device_mesh if isinstance(p, DTensor) else None) for p in trained}
        assert len(kinds) == 1, f"parameters of several dtypes or meshes: {kinds}"
        self.accumulate, self.impl = accumulate, impl
        layout = _layout(parameters, accumulate, gpu_state_bytes, state_format, host_weights, quantized)

        # On a CPU, torch.cpu's streams and events do nothing and copies are done when they return.
        self.device_module = torch.get_device_module(device)
        self.compute = self.device_module.current_stream()
        # State on the host comes, is updated, and leaves, each on a stream.
        self.inward, self.updating, self.outward = (self.device_module.Stream() for _ in range(3))
        self.late: deque[tuple[_State, int, slice]] = deque()  # pieces of states whose update is not queued yet
        self.queues_in_forward = False  # whether the next forward queues them, see `update_beside_forward`
        self.leaving: deque[tuple[Tensor, torch.Event]] = deque()  # gradients and their arrivals on the host
        self.room = torch.empty(_room_size(layout, accumulate), device=device)  # one piece of a gradient in float32
        if any(item.on_host for item in layout):
            needed = optimizer_bytes(
                parameters, accumulate=accumulate, gpu_state_bytes=gpu_state_bytes, state_format=state_format,
                host_weights=host_weights, quantized=quantized,
            )  # fmt: skip
            self.arena = PinnedArena(needed.host, device)
        # Pieces of state from the host on the GPU, by format: (tensors, the gradient included, and an event that is
        # recorded once the piece that was here last has gone back).
        self.slots: dict[StateFormat, deque[tuple[dict[str, Tensor], torch.Event]]] = {}
        self.slot_sizes = _slots(layout)
        empty = functools.partial(torch.empty, device=device)

        # The hooks refer to the optimizer weakly: Python cannot free a cycle that goes through a tensor's hook.
        optimizer = weakref.proxy(self)
        self.states: dict[str, _State] = {}
        indices = itertools.count()
        for (name, parameter), item in zip(self.parameters.items(), layout):
            starts = range(0, item.numel, PIECE_ELEMENTS)
            pieces = [(next(indices), slice(start, min(start + PIECE_ELEMENTS, item.numel))) for start in starts]
            kept, allocate = (item.tensors, self.arena.allocate) if item.on_host else (item.format.kept, empty)
            tensors = _allocate(kept, item.numel, allocate)
            gradient, home = tensors.pop("gradient", None), tensors.pop("weight", None)
            decay = weight_decay if parameter.ndim >= 2 else 0.0
            home = None if home is None else home.view(parameter.shape)
            ratio = math.prod(ratio for end, ratio in rate_ratios.items() if name.endswith(end))
            updated = self.device_module.Event()
            state = _State(parameter, item.format, decay, ratio, item.on_host, pieces, tensors, updated, gradient, home)
            for tensor in tensors.values():
                tensor.zero_()
            is_away = home is not None or item.format.is_quantized
            is_there = not is_away or parameter.untyped_storage().nbytes()
            for _, piece in pieces if is_there else ():  # rounding and widening are done on the GPU, a piece at a time
                weights = _flat(parameter)[piece]
                item.format.write(state.slices(piece), _flat(state.weight)[piece], {"master": weights.float()})
            if is_away:
                parameter.untyped_storage().resize_(0)
            self.states[name] = state
            if not state.is_trained:
                continue
            hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: optimizer.take_gradient(name))
            weakref.finalize(self, hook.remove)
        self.homes: dict[nn.Parameter, Tensor | Quantized] = {}
        for state in self.states.values():
            if isinstance(state.format, QuantizedState):
                self.homes[state.parameter] = state.format.weight(state.tensors)
            elif state.home is not None:
                self.homes[state.parameter] = state.home
        self.norms = torch.zeros(next(indices), device=device)  # norm of each piece of the gradients
        copies = [_num_copies(state.parameter) for state in self.states.values() for _ in state.pieces]
        self.copies = torch.tensor(copies, device=device)  # ranks that have the same elements, for each piece
        self.steps = torch.zeros((), device=device)  # updates made; float32, for the fused kernel
        self.corrections = torch.zeros(2, device=device)  # of the moments' bias, at this step
        self.scale = 1.0  # factor of the gradients in the next update

    @torch.no_grad()
    def take_gradient(self, name: str) -> None:
        """Add the gradient that backward has just made to those before it, and take the norm of the sum."""
        state = self.states[name]
        made, first = _flat(state.parameter.grad), not state.arrived
        state.parameter.grad = None
        assert first or self.accumulate, "a second gradient before the update: accumulate must be True"
        state.arrived = True
        if state.on_host:
            self._send_gradient(state, made, first)
            return
        if state.gradient is None:
            gradient = made.float() if self.accumulate else made
            # FSDP's gradients of a layer are views of one tensor: a copy does not keep all of it alive.
            is_view = gradient.untyped_storage().nbytes() > gradient.nbytes
            state.gradient = gradient.clone() if is_view else gradient
        else:
            state.gradient.add_(made)
        for index, piece in state.pieces:
            torch.linalg.vector_norm(state.gradient[piece], dtype=torch.float32, out=self.norms[index])

    def _send_gradient(self, state: _State, made: Tensor, first: bool) -> None:
        """Add, take the norm and copy to the host, all in order on one side stream while backward goes on."""
        self.outward.wait_stream(self.device_module.current_stream())  # `made` is written, and `room` no longer read
        assert state.gradient is not None
        with self.device_module.stream(self.outward):
            for index, piece in state.pieces:
                total, host = made[piece], state.gradient[piece]
                if self.accumulate:
                    room = self.room[: len(total)]
                    total = room.copy_(total) if first else room.copy_(host, non_blocking=True).add_(total)
                torch.linalg.vector_norm(total, dtype=torch.float32, out=self.norms[index])
                host.copy_(total, non_blocking=True)
            self.leaving.append((made, self.outward.record_event()))
        self._let_go(LEAVING_BYTES)

    def _let_go(self, num_bytes: int) -> None:
        """Wait on the compute stream until at most `num_bytes` of gradients are on their way to the host.

        Kernels queued after the wait may write over the memory of the gradients that have left. So may FSDP2's, which
        wait for the compute stream; they run on two streams, and either may have made the gradients. With record_stream
        in place of the wait, the memory in use would depend on how far the host runs ahead of the GPU.
        """
        while sum(gradient.nbytes for gradient, _ in self.leaving) > num_bytes:
            _, left = self.leaving.popleft()
            self.compute.wait_event(left)

    def zero_grad(self) -> None:
        """Drop all gradients since the last update, after a backward that failed half way as well."""
        self._let_go(0)  # after this wait the norms of gradients that were leaving are written
        self.norms.zero_()
        self.scale = 1.0
        for state in self.states.values():
            state.parameter.grad, state.arrived = None, False
            if not state.on_host:
                state.gradient = None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, *values: Tensor) -> list[float]:
        """Have the next `step` scale all gradients to a global norm of at most `max_norm`.

        Returns [the norm before, each of `values` [] summed over the ranks]: one collective, and one wait, serve all.
        """
        self.device_module.current_stream().wait_stream(self.outward)  # the norms taken there are written
        squares = (self.norms.double().square() / self.copies).sum()
        sums = torch.stack([squares, *(value.double() for value in values)])
        if isinstance(next(iter(self.parameters.values())), DTensor):
            dist.all_reduce(sums)
        square, *summed = sums.tolist()
        norm = math.sqrt(square)
        self.scale = min(1.0, max_norm / (norm + 1e-6))
        return [norm, *summed]

    def update_beside_forward(self, parts: Sequence[nn.Module]) -> None:
        """Have `step` leave updates of state on the host to the next forward, which hides their copies.

        The model's `parts` run in this order. Each waits for its own parameters and the next part's, which may be
        fetched beside it, and the last waits for all. A head that is none of them is fetched beside the last but one.
        Updates are queued as parts run: a GPU's queue holds about a thousand copies, and the host waits where it is
        full. Sharded parameters are still updated in `step`: FSDP2 gathers them before their part runs.
        """
        if any(isinstance(parameter, DTensor) for parameter in self.parameters.values()):
            return
        self.queues_in_forward, optimizer = True, weakref.proxy(self)
        hooks = [parts[-1].register_forward_pre_hook(lambda *_: optimizer.end_update())]
        head = self.homes.keys() - {parameter for part in parts for parameter in part.parameters()}
        for pair in itertools.pairwise(parts):
            awaited = {parameter for part in pair for parameter in part.parameters()}
            awaited |= head if pair[1] is parts[-1] else set()
            on_host = (state for state in self.states.values() if state.on_host and state.is_trained)
            states = [state for state in on_host if state.parameter in awaited]
            for last in states[-1:]:
                hooks.append(pair[0].register_forward_pre_hook(lambda *_, last=last: optimizer.wait_for_update(last)))
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    def wait_for_update(self, state: _State) -> None:
        """Have kernels queued from now on wait for updates up to that of `state`."""
        self._queue_updates(state.pieces[-1][0])
        state.updated.wait()

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the masters from their gradients, round them into the parameters, and drop the gradients.

        After `update_beside_forward`, state on the host is updated later: in the next forward, or by `end_update`.
        """
        self.end_update()
        current = self.device_module.current_stream()
        self._let_go(0)
        current.wait_stream(self.outward)  # `room` and `norms` are free
        empty = functools.partial(torch.empty, device=self.device)
        for format, (most, kept) in self.slot_sizes.items():
            made = (_allocate(kept, most, empty) for _ in range(NUM_SLOTS))
            self.slots[format] = deque((tensors, self.device_module.Event()) for tensors in made)
        self.steps.add_(1)
        self.corrections.copy_(1 - torch.stack([beta ** self.steps.double() for beta in (BETA1, BETA2)]))
        self.update = Update(learning_rate, 0.0, self.scale, self.steps, self.corrections, self.room, self.impl)
        for state in self.states.values():
            for index, piece in state.pieces if state.arrived else ():
                if state.on_host:
                    self.late.append((state, index, piece))
                else:
                    self._update(state.slices(piece), state, piece)
        # The host has all gradients, and the state that the last step sent back; the updates before leave `room`.
        self.inward.wait_stream(current)
        self.updating.wait_stream(current)
        if not self.queues_in_forward:
            self.end_update()
        self.zero_grad()

    @torch.no_grad()
    def _queue_updates(self, until: float = math.inf) -> None:
        """Queue the late updates of the pieces up to that number. After an error the next call goes on where it was."""
        while self.late and self.late[0][1] <= until:
            state, index, piece = self.late[0]
            self._update_through(state, piece)
            self.late.popleft()
            if index == state.pieces[-1][0]:
                state.updated.record(self.outward)

    def _update_through(self, state: _State, piece: slice) -> None:
        """Update a piece of state that lives on the host, on three streams."""
        slots = self.slots[state.format]
        room, left = slots[0]
        slots.rotate(-1)
        host = state.slices(piece)
        tensors = {key: room[key][: len(part)] for key, part in host.items()}
        with self.device_module.stream(self.inward):
            self.inward.wait_event(left)  # the slot is free
            for key, part in host.items():
                tensors[key].copy_(part, non_blocking=True)
        self.updating.wait_stream(self.inward)  # the piece has arrived: its copies are the last issued there
        with self.device_module.stream(self.updating):
            self._update(tensors, state, piece)
        self.outward.wait_stream(self.updating)  # the piece is updated
        with self.device_module.stream(self.outward):
            for key in host.keys() - {"gradient"}:
                host[key].copy_(tensors[key], non_blocking=True)
            left.record()

    def _update(self, tensors: dict[str, Tensor], state: _State, piece: slice) -> None:
        """Update one piece; `tensors`, which are its state, gradient and host weight, are on the parameter's device."""
        rate = state.rate_ratio * self.update.learning_rate
        update = self.update._replace(weight_decay=state.weight_decay, learning_rate=rate)
        weight = _flat(state.parameter)[piece] if state.home is None else tensors["weight"]
        state.format.update(tensors, weight, tensors["gradient"], update)

    def end_update(self) -> None:
        """Queue all that is left of an update. Kernels that are queued later find the state on the host updated."""
        self._queue_updates()
        if self.slots:  # their memory may be reused after the wait
            self.device_module.current_stream().wait_stream(self.outward)
            self.slots.clear()

    def weights(self) -> dict[str, Tensor]:
        """References to the trained weights by name, to save: parameters, or tensors of their shape on the host."""
        self.end_update()
        self.device_module.synchronize()
        return {name: state.weight for name, state in self.states.items() if state.is_trained}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """References to the state by parameter name, to save.

        Without a "master" the parameter is a part of its master, and must be saved as it is.
        """
        self.end_update()
        self.device_module.synchronize()
        return {name: self._state_of(state) for name, state in self.states.items() if state.is_trained}

    def _state_of(self, state: _State) -> dict[str, Tensor]:
        is_master = state.parameter.dtype == torch.float32
        own = {"master": _like(state.parameter, _flat(state.weight), 1)} if is_master else {}
        groups = {name: kept.group for name, kept in state.format.kept.items()}
        kept = {name: _like(state.parameter, tensor, groups[name]) for name, tensor in state.tensors.items()}
        return {**own, **kept, "step": self.steps}

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Start from full tensors, the same on every rank, by parameter name: float32 masters keep what bf16 rounds."""
        for name, full in weights:
            local = local_part(self.states[name].parameter, full).flatten()
            for _, piece in self.states[name].pieces:
                self._write(name, piece, {"master": local[piece].to(self.device)})  # quantized alike on any device

    def read_weights(self, entries: dict[str, Entry]) -> None:
        """Start from the weights of these names in files, each rank from its own part."""

        def write(piece: Piece, part: Tensor, content: Tensor) -> None:
            self._write(piece.name, self._elements(piece.name, part), {"master": content.to(self.device).view(-1)})

        read_pieces(entries, {name: self.states[name].weight for name in entries}, write)

    def _elements(self, name: str, part: Tensor) -> slice:
        """The elements of a parameter's weight that `part`, some of its rows, is a view of."""
        start = part.storage_offset() - _flat(self.states[name].weight).storage_offset()
        return slice(start, start + part.numel())

    @torch.no_grad()
    def _write(self, name: str, piece: slice, values: dict[str, Tensor]) -> None:
        """Set values of some elements, see `StateFormat.write`."""
        state = self.states[name]
        values = {key: value.float() for key, value in values.items()}
        state.format.write(state.slices(piece), _flat(state.weight)[piece], values)

    @torch.no_grad()
    def load(self, checkpoint: Path) -> None:
        """Read state and weights from a verified checkpoint. All ranks call this, as `load_optimizer_state`.

        State of the same format is read as it is. State of another format is decoded and encoded, piece by piece;
        masters stay exact.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        weights = functools.cache(lambda: find_weights(checkpoint, shapes))
        own, converted = self.state_dict(), set()

        def convert(name: str, stored: dict[str, Entry], done: set[str]) -> None:
            converted.add(name)
            self._convert(name, stored, stored.get("master") or weights()[name], done)

        load_optimizer_state(checkpoint, own, convert)
        stored = [name for name in self.states if "master" not in own.get(name, {}) and name not in converted]
        quantized = [name for name in stored if self.states[name].format.is_quantized]
        halves = {name: self.states[name].weight for name in stored if name not in quantized}
        with failing_together():
            read_tensors({name: weights()[name] for name in halves}, halves)
            self.read_weights({name: weights()[name] for name in quantized})
        for state in self.states.values():
            for _, piece in state.pieces if "master" in state.tensors else ():
                weight = _flat(state.weight)[piece]
                weight.copy_(state.tensors["master"][piece].to(weight.device))

    def _convert(self, name: str, stored: dict[str, Entry], weight: Entry, done: set[str]) -> None:
        """Set the values of one parameter but those in `done`, from the weight and the state that are `stored`."""
        dtype = torch.float32 if "master" in stored else torch.bfloat16
        source, parameter = format_with(stored.keys() - {"master", "step"}, dtype), self.states[name].weight
        if source is None:
            raise UserError(f"{weight.file.parent} is of another model or optimizer: {name} has {', '.join(stored)}")
        for entry, kept in [(weight, Kept(dtype)), *((stored[key], kept) for key, kept in source.kept.items())]:
            shape = _grouped(parameter.shape, kept.group)
            if (entry.dtype, entry.shape) != (kept.dtype, shape):
                raise UserError(
                    f"{entry.file.parent} is of another model: {entry.name} has shape {list(entry.shape)} and dtype "
                    f"{entry.dtype}, this model needs {list(shape)} and {kept.dtype}"
                )

        def read(piece_and_part: tuple[Piece, Tensor]) -> None:
            piece, part = piece_and_part
            whole = piece.in_groups(source.group, 1)  # the file's groups, of which this rank may have a part
            content = {
                key: piece.in_groups(source.group, kept.group).content(stored[key]) for key, kept in source.kept.items()
            }
            content["master"] = whole.content(weight)
            for key, tensor in content.items():
                check_finite(tensor, weight if key == "master" else stored[key])
            tensors = {key: tensor.to(self.device).view(-1) for key, tensor in content.items()}
            values = source.read(tensors, tensors.pop("master"))
            start = piece.offset[-1] - whole.offset[-1]
            cut = {key: value.view(whole.shape).narrow(-1, start, piece.shape[-1]) for key, value in values.items()}
            missing = {key: value.reshape(-1) for key, value in cut.items() if key not in done}
            self._write(name, self._elements(name, part), missing)

        in_threads(read, local_pieces({name: parameter}, CONVERTED_BYTES))


@torch.no_grad()
def _like(parameter: nn.Parameter, flat: Tensor, group: int) -> Tensor:
    """`flat` [n / group] in the parameter's shape but for the last dimension, sharded as it is, wherever `flat` is.

    For a group of 32 and a parameter [6, 64] it is [6, 2].
    """

    if not isinstance(parameter, DTensor):
        return flat.view(_grouped(parameter.shape, group))
    local = flat.view(_grouped(parameter.to_local().shape, group))
    return dtensor_like(parameter, local, _grouped(parameter.shape, group))


def _grouped(shape: tuple[int, ...], group: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // group) if group > 1 else tuple(shape)


def warmup_cosine(step: int, *, learning_rate: float, warmup_steps: int, max_steps: int, final_ratio: float) -> float:
    """Learning rate of step 0 .. max_steps-1: linear warm-up, then a cosine down to `final_ratio` of the peak."""
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return learning_rate * (final_ratio + (1 - final_ratio) * cosine)
