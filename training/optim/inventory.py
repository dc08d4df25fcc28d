"""The inventory of a model's parameters on one rank: each is trained or frozen, in a format, and
has a place.

The optimizer makes what the inventory says, and plans count it: both read the same rows. Parameters
on the meta device will do.
"""

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kernels.parts import Parameter
from training.host.memory import SLOT_ALIGNMENT, PinnedArena
from training.optim.formats import FROZEN, Kept, StateFormat, format_of

# 32 MiB of float32: copies of that size run at the link's full rate.
# A multiple of every format's group.
PIECE_ELEMENTS = 2**23
# Parameters of up to so many elements are updated together: a launch for each takes the host longer
# than the GPU.
SMALL_ELEMENTS = 2**22
# pieces on the GPU at once: an update waits for a kernel of the forward beside it, up to 20 ms
NUM_SLOTS = 8
# Gradients on their way to the host at once: about one transformer block's, in bf16.
# See `Inventory.leaving_limit`.
LEAVING_BYTES = 2**28


@dataclass(frozen=True)
class Row:
    """One parameter on this rank: its size, its format, and where its weight and state live."""

    name: str  # in the model
    declared: Parameter
    numel: int  # on this rank
    copies: int  # ranks that have the same elements, this one included
    # The tensors that are kept for it: masters and moments, or a quantized weight.
    format: StateFormat
    # The dtype in which its gradient waits for the update; None: the parameter is frozen.
    gradient_dtype: torch.dtype | None
    state_on_host: bool = False  # whether the kept tensors are in pinned host memory
    weight_on_host: bool = False  # whether its weight is there as well, and visits the GPU

    @property
    def block(self) -> int | None:
        """Number of the transformer block that the parameter belongs to."""
        return self.declared.block

    @property
    def pieces(self) -> list[slice]:
        """Elements of each piece, the unit of an update. Pieces of 4 in 10 elements: 0 to 3, 4 to
        7, 8 and 9."""
        starts = range(0, self.numel, PIECE_ELEMENTS)
        return [slice(start, min(start + PIECE_ELEMENTS, self.numel)) for start in starts]

    @property
    def is_visiting(self) -> bool:
        """Whether the parameter has memory on the GPU only while its block runs."""
        return self.weight_on_host or self.format.holds_weight

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight while its block runs."""
        return self.numel * self.format.parameter_dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight where it is kept."""
        return self.format.num_bytes(self.numel) if self.format.holds_weight else self.weight_bytes

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of masters and moments."""
        return 0 if self.format.holds_weight else self.format.num_bytes(self.numel)

    @property
    def gradient_bytes(self) -> int:
        return self.gradient_dtype.itemsize * self.numel if self.gradient_dtype else 0

    @functools.cached_property
    def tensors(self) -> dict[str, Kept]:
        """Tensors that are on the host if the state is there, by name.

        An update moves them through the GPU.
        """
        return _on_host(self.format, self.gradient_dtype, self.weight_on_host)

    @functools.cached_property
    def host_bytes(self) -> int:
        """Bytes of `tensors`, each from a multiple of SLOT_ALIGNMENT; 0 if they are on the GPU."""
        if not self.state_on_host:
            return 0
        return _host_bytes(self.format, self.gradient_dtype, self.weight_on_host, self.numel)

    @functools.cached_property
    def with_state_on_host(self) -> "Row":
        return replace(self, state_on_host=True)

    @functools.cached_property
    def with_weight_on_host(self) -> "Row":
        return replace(self, state_on_host=True, weight_on_host=True)


@dataclass(frozen=True)
class Inventory:
    """All parameters on this rank, in order; `accumulate`: several backwards before an update."""

    rows: tuple[Row, ...]
    accumulate: bool = True

    @classmethod
    def of(
        cls,
        named_parameters: Iterable[tuple[str, Tensor]],
        declared: Mapping[str, Parameter] = MappingProxyType({}),
        *,
        accumulate: bool = True,
        gpu_state_bytes: float = math.inf,
        state_format: str = "float32",
        host_weights: Collection[str] = (),
        frozen: StateFormat = FROZEN,
    ) -> "Inventory":
        """Decides where the state of each parameter lives, and in which format.

        Args:
            named_parameters: the model's. Those that take no gradient have no state.
            declared: what they are, by name; a parameter without has its shape alone.
            gpu_state_bytes: limit on the masters and moments that stay on the GPU, whole parameters
                in their order; the rest lives in pinned host memory. State of `host_weights` is
                never on the GPU, and does not count.
            state_format: "float32" or "compact", see `training.optim.formats`.
            host_weights: names of the parameters whose weights live in pinned host memory, as their
                state does.
            frozen: format of the blocks' frozen matrices.

        Raises ValueError for weights on the host or quantized of sharded parameters; a name that is
        no parameter's.
        """
        rows, named = [], dict(named_parameters)
        if unknown := {*host_weights} - named.keys():
            raise ValueError(f"{', '.join(sorted(unknown))}: no parameters of these names")
        for name, parameter in named.items():
            facts = declared.get(name) or Parameter(tuple(parameter.shape))
            format = format_of(parameter, state_format, frozen if facts.may_quantize else FROZEN)
            if (name in host_weights or format.holds_weight) and isinstance(parameter, DTensor):
                raise ValueError(
                    "weights of sharded parameters stay on the GPU, in bf16; place them there"
                )
            gradient_dtype = None
            if parameter.requires_grad:
                gradient_dtype = torch.float32 if accumulate else parameter.dtype
            numel = _local(parameter).numel()
            rows.append(Row(name, facts, numel, _num_copies(parameter), format, gradient_dtype))
        return cls(tuple(rows), accumulate).placed(gpu_state_bytes, host_weights)

    def placed(self, gpu_state_bytes: float, host_weights: Collection[str]) -> "Inventory":
        """Returns this inventory with state and weights on the host, see `of`."""
        rows = []
        for row in self.rows:
            if row.name in host_weights:
                rows.append(row.with_weight_on_host)
            elif row.state_bytes > gpu_state_bytes:
                rows.append(row.with_state_on_host)
            else:
                rows.append(row)
                gpu_state_bytes -= row.state_bytes
        return Inventory(tuple(rows), self.accumulate)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @functools.cached_property
    def gpu_state(self) -> int:
        """Bytes of masters and moments on the GPU."""
        return sum(row.state_bytes for row in self.rows if not row.state_on_host)

    @functools.cached_property
    def gpu_gradients(self) -> int:
        """Bytes of the gradients whose state is on the GPU.

        They exist from backward to the update.
        """
        return sum(row.gradient_bytes for row in self.rows if not row.state_on_host)

    @functools.cached_property
    def leaving_gradients(self) -> int:
        """Bytes of the gradients that leave for the host. At most `leaving_limit` of them are on
        the GPU at once."""
        return sum(row.gradient_bytes for row in self.rows if row.state_on_host)

    @functools.cached_property
    def leaving_made(self) -> int:
        """Bytes of these gradients as backward makes them: their sums on the host may be wider."""
        return sum(
            row.weight_bytes for row in self.rows if row.state_on_host and row.gradient_dtype
        )

    @functools.cached_property
    def leaving_limit(self) -> int:
        """LEAVING_BYTES, or a block's gradients if one of its parameters has more: compute would
        wait for its copy."""
        leaving = [
            (row, row.gradient_bytes)
            for row in self.rows
            if row.state_on_host and row.block is not None
        ]
        if max((size for _, size in leaving), default=0) <= LEAVING_BYTES:
            return LEAVING_BYTES
        return max(self._by_block(leaving).values())

    @functools.cached_property
    def host(self) -> int:
        """Bytes of pinned memory: masters, moments, gradients, weights that live there, and
        quantized weights."""
        return sum(row.host_bytes for row in self.rows)

    def arena(self, device: torch.device) -> PinnedArena | None:
        """Returns memory for all that is not on the GPU; None if nothing is."""
        return PinnedArena(self.host, device) if self.host else None

    @functools.cached_property
    def updated(self) -> int:
        """The part of `host` that an update fetches: all but frozen weights."""
        return sum(row.host_bytes for row in self.rows if row.gradient_dtype)

    @functools.cached_property
    def updated_here(self) -> int:
        """Bytes read and written by an update of what is on the GPU: all of it, and the gradients
        for their norm."""
        rows = [row for row in self.rows if row.gradient_dtype and not row.state_on_host]
        return 2 * sum(row.state_bytes + row.weight_bytes + row.gradient_bytes for row in rows)

    def seconds_here(self, rates: Mapping[str, float]) -> float:
        """Returns the seconds of an update of what is on the GPU, by the GPU's rates."""
        return self.updated_here / rates["memory"]

    @functools.cached_property
    def waiting(self) -> dict[int | None, int]:
        """Bytes of the weights that wait on the host, by block; None: of embedding and head."""
        return self._by_block((row, row.stored_bytes) for row in self.rows if row.weight_on_host)

    @functools.cached_property
    def visiting(self) -> dict[int | None, int]:
        """Bytes of the weights that are on the GPU only while their block runs, by block."""
        return self._by_block((row, row.weight_bytes) for row in self.rows if row.is_visiting)

    @functools.cached_property
    def unpacked(self) -> dict[int | None, int]:
        """Bytes that are read and written as weights leave the format that holds them, by block."""
        return self._by_block((row, row.stored_bytes + row.weight_bytes) for row in self._held)

    @functools.cached_property
    def arriving(self) -> int:
        """Bytes of a weight on its way from the host, in the format that holds it."""
        is_away = any(row.weight_on_host for row in self._held)
        return max(row.stored_bytes for row in self._held) if is_away else 0

    @property
    def _held(self) -> Iterator[Row]:
        return (row for row in self.rows if row.format.holds_weight)

    @staticmethod
    def _by_block(sizes: Iterable[tuple[Row, int]]) -> dict[int | None, int]:
        total: Counter[int | None] = Counter()
        for row, size in sizes:
            total[row.block] += size
        return total

    @functools.cached_property
    def slots(self) -> dict[StateFormat, tuple[int, dict[str, Kept]]]:
        """Elements and tensors of the largest piece that is updated through the GPU, by format."""
        slots: dict[StateFormat, tuple[int, dict[str, Kept]]] = {}
        for row in self.rows:
            if row.state_on_host and row.gradient_dtype:
                most, tensors = slots.get(row.format, (0, {}))
                slots[row.format] = max(most, min(PIECE_ELEMENTS, row.numel)), tensors | row.tensors
        return slots

    @functools.cached_property
    def gpu_slots(self) -> int:
        """Bytes of pieces on their way through an update.

        They exist from `step` until all are updated.
        """
        return NUM_SLOTS * sum(
            kept.num_bytes(size) for size, all in self.slots.values() for kept in all.values()
        )

    @functools.cached_property
    def scratch(self) -> int:
        """Elements of the largest piece of a gradient that is added, in float32, to a host sum."""
        rows = (
            row for row in self.rows if row.gradient_dtype and row.state_on_host and self.accumulate
        )
        return max((min(PIECE_ELEMENTS, row.numel) for row in rows), default=0)

    @property
    def gpu_scratch(self) -> int:
        """Bytes of `scratch`."""
        return 4 * self.scratch


def _on_host(
    format: StateFormat, gradient_dtype: torch.dtype | None, weight_on_host: bool
) -> dict[str, Kept]:
    has_weight = weight_on_host and not format.holds_weight
    weight = {"weight": Kept(format.parameter_dtype)} if has_weight else {}
    gradient = {"gradient": Kept(gradient_dtype)} if gradient_dtype else {}
    return {**format.kept, **gradient, **weight}


@functools.cache  # a search for a plan asks for a few sizes many thousand times
def _host_bytes(
    format: StateFormat, gradient_dtype: torch.dtype | None, weight_on_host: bool, numel: int
) -> int:
    sizes = (
        kept.num_bytes(numel) for kept in _on_host(format, gradient_dtype, weight_on_host).values()
    )
    return sum(-(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for size in sizes)


@torch.no_grad()
def local_view(tensor: Tensor) -> Tensor:
    """Returns a view [n] of this rank's elements. No view of a parameter is kept: FSDP may replace
    a shard's memory."""
    return _local(tensor).detach().view(-1)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_copies(parameter: Tensor) -> int:
    """Returns the ranks that have the same elements of a parameter as this one, itself included."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(axis) for axis, p in enumerate(parameter.placements) if p.is_replicate()
    )
