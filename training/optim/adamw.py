"""AdamW on float32 master weights, state on the GPU or in pinned host memory, for plain and for
sharded parameters.

A float32 parameter is its own master: on a CPU, or as a shard under FSDP, which computes in bf16.
For a bf16 parameter the optimizer keeps a float32 copy, or in compact format
(`training.optim.formats`) the 16 bits that the parameter lacks. The optimizer takes each gradient
as soon as backward has made it: a single micro-batch's as it is, several added in float32. The
exact global norm is known before any weight moves, and the update scales by it.

Parameters are updated on the GPU, a launch for each, or for many small ones. State from the host
passes through in pieces of at most PIECE_ELEMENTS. Results are equal bit for bit: each element's is
its own, and norms are of the same pieces. State in host memory costs only the time of its copies,
which the next forward hides, see `update_beside_forward`. A weight may live there as well: an
update moves it like state, and `training.memory.visiting` brings it to its block. With all float32
state of the 4B in host memory, at 50 GB/s each way, 8 GB of gradients leave during backward, and
the update fetches 14 bytes per parameter and sends 12 back: 1.13 s.
"""

import functools
import itertools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kernels.common import use_triton
from training.host.torch_internals import dtensor_like
from training.optim.formats import BETA1, BETA2, Home, Kept, QuantizedState, StateFormat, Update
from training.optim.inventory import SMALL_ELEMENTS, Inventory, Row, local_view
from training.optim.ring import Ring, allocate


@dataclass
class State:
    """State of one parameter: flat tensors [n / group], all on the GPU or all on the host."""

    parameter: nn.Parameter
    row: Row
    weight_decay: float
    rate_ratio: float  # its learning rate, divided by the update's
    pieces: list[tuple[int, slice]]  # (index into the norms, elements)
    tensors: dict[str, Tensor]
    updated: torch.Event  # recorded once an update is on the host again, where state is there
    # Exists always where state is on the host, else from backward to the update.
    gradient: Tensor | None = None
    # The weight in host memory, in the parameter's shape; None: it is elsewhere.
    home: Tensor | None = None
    arrived: bool = False  # whether a gradient has come since the last update

    @property
    def format(self) -> StateFormat:
        return self.row.format

    @property
    def weight(self) -> Tensor:
        """The weight where it lives. A quantized weight is on "meta": only its state has values."""
        if self.format.holds_weight:
            return torch.empty_like(self.parameter, device="meta")
        return self.parameter if self.home is None else self.home

    @property
    def lent(self) -> Home | None:
        """The weight that a visit copies to the GPU; None for a weight that stays on the GPU."""
        if isinstance(self.format, QuantizedState):
            return self.format.weight(self.tensors)
        return self.home

    @property
    def is_trained(self) -> bool:
        return self.row.gradient_dtype is not None

    @property
    def is_here(self) -> bool:
        """Whether the parameter has memory now: a visiting weight has it during its visit."""
        return not self.row.is_visiting or self.parameter.untyped_storage().nbytes() > 0

    def slices(self, piece: slice) -> dict[str, Tensor]:
        """Returns the tensors, gradient and host weight of some elements of the parameter."""
        parts = {}
        for name, kept in self.format.kept.items():
            groups = slice(piece.start // kept.group, piece.stop // kept.group)
            parts[name] = self.tensors[name][groups]
        if self.gradient is not None:
            parts["gradient"] = self.gradient[piece]
        if self.home is not None:
            parts["weight"] = local_view(self.home)[piece]
        return parts

    @torch.no_grad()
    def write(self, piece: slice, values: dict[str, Tensor]) -> None:
        """Sets values of some elements, see `StateFormat.write`."""
        values = {key: value.float() for key, value in values.items()}
        self.format.write(self.slices(piece), local_view(self.weight)[piece], values)

    def saved(self) -> dict[str, Tensor]:
        """Returns the state, shaped and sharded as the parameter; float32 weights are masters."""
        saved = {
            name: _like(self.parameter, self.tensors[name], kept)
            for name, kept in self.format.kept.items()
        }
        if self.parameter.dtype == torch.float32:
            master = _like(self.parameter, local_view(self.weight), Kept(torch.float32))
            saved = {"master": master} | saved
        return saved


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), decoupled weight decay on matrices only.

    Args:
        named_parameters: the model's, sharded over one mesh of all ranks or not at all, on a CPU or
            the current GPU. The names are keys of the saved state. Parameters that take no gradient
            have no state.
        inventory: where state and weights live, and in which formats, for these parameters; None:
            in float32 on the GPU. Visiting weights lose their memory on the GPU, whose content
            becomes the weight. UserError where the host does not let so much be pinned.
        lora_plus: factor of the learning rate of parameters that declare it.
        impl: Triton kernels or their PyTorch references, a name in kernels.common.IMPLEMENTATIONS.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        inventory: Inventory | None = None,
        *,
        weight_decay: float = 0.1,
        lora_plus: float = 1.0,
        impl: str = "auto",
    ):
        self.parameters = dict(named_parameters)
        self.inventory = inventory = inventory or Inventory.of(self.parameters.items())
        assert [row.name for row in inventory] == [*self.parameters], (
            "an inventory of other parameters"
        )
        parameters = self.parameters.values()
        self.device = device = local_view(next(iter(parameters))).device
        meshes = {
            p.device_mesh if isinstance(p, DTensor) else None for p in parameters if p.requires_grad
        }
        assert len(meshes) == 1, f"parameters of several meshes: {meshes}"
        self.accumulate = inventory.accumulate
        self.impl = impl
        self.ring = Ring(device, inventory.slots, inventory.leaving_limit)
        # Pieces of states whose update is not queued yet.
        self.late: deque[tuple[State, int, slice]] = deque()
        # Whether the next forward queues them, see `update_beside_forward`.
        self.queues_in_forward = False
        # A piece of a gradient is added here to its sum on the host.
        self.scratch = torch.empty(inventory.scratch, device=device)
        self.arena = inventory.arena(device)

        # The hooks refer to the optimizer weakly: Python cannot free a cycle that goes through a
        # tensor's hook.
        optimizer = weakref.proxy(self)
        self.states: dict[str, State] = {}
        indices = itertools.count()
        for row, parameter in zip(inventory, parameters):
            pieces = [(next(indices), piece) for piece in row.pieces]
            decay = weight_decay if row.declared.decays else 0.0
            ratio = lora_plus if row.declared.takes_lora_plus else 1.0
            self.states[row.name] = state = self._state(row, parameter, decay, ratio, pieces)
            if state.is_trained:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda _, name=row.name: optimizer.take_gradient(name)
                )
                weakref.finalize(self, hook.remove)
        lent = ((state.parameter, state.lent) for state in self.states.values())
        # Weights of all parameters without memory: in host memory, or quantized.
        self.homes: dict[nn.Parameter, Home] = {
            p: weight for p, weight in lent if weight is not None
        }
        # Norm of each piece of the gradients.
        self.norms = torch.zeros(next(indices), device=device)
        copies = [state.row.copies for state in self.states.values() for _ in state.pieces]
        # Ranks that have the same elements, for each piece.
        self.copies = torch.tensor(copies, device=device)
        self.steps = torch.zeros((), device=device)  # updates made; float32, for the fused kernel
        self.corrections = torch.zeros(2, device=device)  # factors 1 - beta^steps of both moments
        self.scale = 1.0  # factor of the gradients in the next update

    def _state(
        self,
        row: Row,
        parameter: nn.Parameter,
        decay: float,
        ratio: float,
        pieces: list[tuple[int, slice]],
    ) -> State:
        """Returns a parameter's state, zeros but for masters; frees a visiting weight."""
        empty: Callable[..., Tensor] = functools.partial(torch.empty, device=self.device)
        if row.state_on_host:
            assert self.arena is not None
            empty = self.arena.allocate
        tensors = allocate(row.tensors if row.state_on_host else row.format.kept, row.numel, empty)
        gradient = tensors.pop("gradient", None)
        home = tensors.pop("weight", None)
        home = None if home is None else home.view(parameter.shape)
        updated = self.ring.device_module.Event()
        state = State(parameter, row, decay, ratio, pieces, tensors, updated, gradient, home)
        for tensor in tensors.values():
            tensor.zero_()
        if state.is_here:
            for _, piece in pieces:  # rounding and widening are done on the GPU, a piece at a time
                state.write(piece, {"master": local_view(parameter)[piece]})
        if row.is_visiting:
            parameter.untyped_storage().resize_(0)
        return state

    @torch.no_grad()
    def take_gradient(self, name: str) -> None:
        """Adds the gradient that backward has just made to the sum since the last update."""
        state = self.states[name]
        gradient = local_view(state.parameter.grad)
        state.parameter.grad = None
        is_first = not state.arrived
        assert is_first or self.accumulate, (
            "a second gradient before the update: accumulate must be True"
        )
        state.arrived = True
        if state.row.state_on_host:  # the scratch is no longer read once `gradient` is written
            send = functools.partial(self._add_on_host, state, gradient, is_first)
            self.ring.send_gradient(gradient, send)
        elif state.gradient is not None:
            state.gradient.add_(gradient)
        else:
            total = gradient.float() if self.accumulate else gradient
            # FSDP's gradients of a layer are views of one tensor:
            # a copy does not keep all of it alive.
            is_view = total.untyped_storage().nbytes() > total.nbytes
            state.gradient = total.clone() if is_view else total

    def _add_on_host(self, state: State, gradient: Tensor, is_first: bool) -> None:
        """Adds a gradient to its sum on the host, and takes the sum's norm, piece by piece on the
        current stream."""
        assert state.gradient is not None
        for index, piece in state.pieces:
            total, host_total = gradient[piece], state.gradient[piece]
            if self.accumulate:
                scratch = self.scratch[: len(total)]
                if is_first:
                    total = scratch.copy_(total)
                else:
                    total = scratch.copy_(host_total, non_blocking=True).add_(total)
            torch.linalg.vector_norm(total, dtype=torch.float32, out=self.norms[index])
            host_total.copy_(total, non_blocking=True)

    def zero_grad(self) -> None:
        """Drops all gradients since the last update, also after a backward that failed half way."""
        self.ring.let_go(0)  # after this wait the norms of gradients that were leaving are written
        self.norms.zero_()
        self.scale = 1.0
        for state in self.states.values():
            state.parameter.grad, state.arrived = None, False
            if not state.row.state_on_host:
                state.gradient = None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, *values: Tensor) -> list[float]:
        """Makes the next `step` scale all gradients to a global norm of at most `max_norm`.

        Returns the norm before, and each of `values` [] summed over the ranks. One collective and
        one wait serve all of them.
        """
        for state in self.states.values():
            if state.arrived and state.gradient is not None and not state.row.state_on_host:
                for index, piece in state.pieces:
                    torch.linalg.vector_norm(
                        state.gradient[piece], dtype=torch.float32, out=self.norms[index]
                    )
        # Norms that were taken on the outward stream are written before they are read.
        self.ring.device_module.current_stream().wait_stream(self.ring.outward)
        squares = (self.norms.double().square() / self.copies).sum()
        sums = torch.stack([squares, *(value.double() for value in values)])
        if isinstance(next(iter(self.parameters.values())), DTensor):
            dist.all_reduce(sums)
        square, *summed = sums.tolist()
        norm = math.sqrt(square)
        self.scale = min(1.0, max_norm / (norm + 1e-6))
        return [norm, *summed]

    def update_beside_forward(self, parts: Sequence[nn.Module]) -> None:
        """Makes `step` leave updates of state on the host to the next forward, which hides their
        copies.

        The model's `parts` run in this order. Each waits for its own parameters and the next
        part's, which may be fetched beside it. The last part waits for all parameters. An untied
        head is fetched with the last block. Sharded parameters are still updated in `step`: FSDP2
        gathers them before their part runs.
        """
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters.values())
        parts = parts[-1:] if is_sharded else parts
        self.queues_in_forward = not is_sharded
        optimizer = weakref.proxy(self)
        hooks = [parts[-1].register_forward_pre_hook(lambda *_: optimizer.end_update())]
        head = self.homes.keys() - {parameter for part in parts for parameter in part.parameters()}
        trained = (state for state in self.states.values() if state.is_trained)
        on_host = [state for state in trained if state.row.state_on_host]
        for pair in itertools.pairwise(parts):
            awaited = {parameter for part in pair for parameter in part.parameters()}
            if pair[1] is parts[-1]:
                awaited |= head
            states = [state for state in on_host if state.parameter in awaited]
            for last in states[-1:]:
                # A method of the proxy that is kept would keep the optimizer.
                hooks.append(
                    pair[0].register_forward_pre_hook(
                        lambda *_, last=last: optimizer.wait_for_update(last)
                    )
                )
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    def wait_for_update(self, state: State) -> None:
        """Makes kernels queued from now on wait for updates of `state` and all states before it."""
        self._queue_updates(state.pieces[-1][0])
        state.updated.wait()

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates masters and parameters, and drops gradients.

        After `update_beside_forward`, state on the host is updated by the next forward.
        """
        self.end_update()
        self.ring.device_module.current_stream().wait_stream(self.ring.outward)  # `norms` are free
        self.ring.open()
        self.steps.add_(1)
        self.corrections.copy_(
            1 - torch.stack([beta ** self.steps.double() for beta in (BETA1, BETA2)])
        )
        self.update = Update(
            learning_rate, 0.0, self.scale, self.steps, self.corrections, self.impl
        )
        arrived = [state for state in self.states.values() if state.arrived]
        for state in arrived:
            if state.row.state_on_host:
                self.late += [(state, *piece) for piece in state.pieces]
        self._update_here([state for state in arrived if not state.row.state_on_host])
        # The host has all gradients, and the state that the last step sent back.
        self.ring.follow()
        if not self.queues_in_forward:
            self.end_update()
        self.zero_grad()

    @torch.no_grad()
    def _queue_updates(self, until: float = math.inf) -> None:
        """Queues the late updates of pieces whose index is at most `until`.

        After an error, the next call goes on where this call ended.
        """
        while self.late:
            state, index, piece = self.late[0]
            if index > until:
                return
            update = functools.partial(self._update, state, piece)
            self.ring.pass_through(state.format, state.slices(piece), update)
            self.late.popleft()
            last_index = state.pieces[-1][0]
            if index == last_index:
                state.updated.record(self.ring.outward)

    def _update_here(self, states: list[State]) -> None:
        """Updates states on the GPU. Triton takes small ones that are alike in one launch; PyTorch,
        which copies what it updates, takes pieces."""
        if not use_triton(self.impl, self.norms):
            for state in states:
                for piece in state.row.pieces:
                    self._update(state, piece, state.slices(piece))
            return
        groups: dict[tuple, list[State]] = defaultdict(list)
        for state in states:
            row = state.row
            alike: tuple = row.format, state.weight_decay, state.rate_ratio, row.gradient_dtype
            if row.numel > SMALL_ELEMENTS:
                alike = (row.name,)
            groups[alike].append(state)
        for group in groups.values():
            pieces = [
                (state.tensors, local_view(state.parameter), state.gradient) for state in group
            ]
            group[0].format.update_together(pieces, self._update_of(group[0]))

    def _update(self, state: State, piece: slice, tensors: dict[str, Tensor]) -> None:
        """Updates one piece; `tensors`, which are its state, gradient and host weight, are on the
        parameter's device."""
        weight = local_view(state.parameter)[piece] if state.home is None else tensors["weight"]
        state.format.update(tensors, weight, tensors["gradient"], self._update_of(state))

    def _update_of(self, state: State) -> Update:
        """Returns the update with a parameter's own learning rate and weight decay."""
        rate = state.rate_ratio * self.update.learning_rate
        return self.update._replace(weight_decay=state.weight_decay, learning_rate=rate)

    def end_update(self) -> None:
        """Queues what is left of an update: later kernels find it done, and may write over
        gradients that have left."""
        self._queue_updates()
        self.ring.let_go(0)
        self.ring.close()

    def weights(self, *, frozen: bool = False) -> dict[str, Tensor]:
        """Returns the trained weights by name, to save: parameters, or host tensors of their shape.

        With `frozen`, all weights.
        """
        self.end_update()
        self.ring.device_module.synchronize()
        return {
            name: state.weight for name, state in self.states.items() if frozen or state.is_trained
        }

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns the state by name, to save. Where it has no "master", the parameter holds a part
        of the master."""
        self.end_update()
        self.ring.device_module.synchronize()
        trained = {name: state for name, state in self.states.items() if state.is_trained}
        return {name: {**state.saved(), "step": self.steps} for name, state in trained.items()}

    def on_gpu(self) -> dict[str, list[Tensor]]:
        """Returns all tensors on the GPU, as "parameters", "gradients" and "optimizer"."""
        states = self.states.values()
        tensors: dict[str, list[Tensor | None]] = {
            "parameters": [s.parameter for s in states if s.is_here],
            "gradients": [s.parameter.grad for s in states]
            + [gradient for gradient, _ in self.ring.leaving],
            "optimizer": [self.scratch, *self.ring.tensors()],
        }
        for state in states:
            if not state.row.state_on_host:
                tensors["parameters" if state.format.holds_weight else "optimizer"] += (
                    state.tensors.values()
                )
                tensors["gradients"].append(state.gradient)
        return {
            group: [tensor for tensor in members if tensor is not None]
            for group, members in tensors.items()
        }


@torch.no_grad()
def _like(parameter: nn.Parameter, flat: Tensor, kept: Kept) -> Tensor:
    """Returns `flat` in the parameter's shape and sharding but for the last dimension.

    For groups of 32 and a parameter [6, 64] it is [6, 2].
    """
    if not isinstance(parameter, DTensor):
        return flat.view(kept.shape(parameter.shape))
    local = flat.view(kept.shape(parameter.to_local().shape))
    return dtensor_like(parameter, local, kept.shape(parameter.shape))


def warmup_cosine(
    step: int, *, learning_rate: float, warmup_steps: int, max_steps: int, final_ratio: float
) -> float:
    """Returns the learning rate of a step, 0 to max_steps - 1.

    It rises linearly, then falls by a cosine to `final_ratio` of the peak.
    """
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return learning_rate * (final_ratio + (1 - final_ratio) * cosine)
