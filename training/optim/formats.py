"""Formats of the optimizer's state: which tensors a parameter has, and their meaning.

Only a format knows what its tensors hold. All else, such as streams, checkpoints and the planner,
asks it to read or to write values, to make an update, or how large its tensors are.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kernels.adamw import Tensors, adamw
from kernels.common import use_triton
from kernels.compact_adamw import (
    GROUP,
    compact_adamw,
    decode_exp_avg,
    decode_exp_avg_sq,
    encode_exp_avg,
    encode_exp_avg_sq,
    join_master,
    split_master,
)
from training.host.torch_internals import fused_adamw_
from training.optim.quantized import GROUP as QUANTIZED_GROUP
from training.optim.quantized import Quantized, quantize

# formats of trained parameters, from the most bytes to the least
STATE_FORMATS = ("float32", "compact")
Home = Tensor | Quantized  # a weight between visits to the GPU
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8  # of AdamW


class Kept(NamedTuple):
    """A tensor that a format keeps for each parameter: one number for each `group` neighbouring
    elements of a row."""

    dtype: torch.dtype
    group: int = 1

    def num_bytes(self, numel: int) -> int:
        """Returns the bytes of the tensor for so many elements of a parameter."""
        return numel // self.group * self.dtype.itemsize

    def shape(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """Returns the tensor's shape for a parameter's: (6, 2) for groups of 32 and [6, 64]."""
        if self.group == 1:
            return tuple(parameter)
        return (*parameter[:-1], parameter[-1] // self.group)


class Update(NamedTuple):
    """The numbers of an update, which are the same for all pieces of a parameter."""

    learning_rate: float
    weight_decay: float
    gradient_scale: float
    steps: Tensor  # [] float32, this update included
    bias_corrections: Tensor  # [2] float32, 1 - beta^steps of both moments
    impl: str  # a name in kernels.common.IMPLEMENTATIONS


@dataclass(frozen=True)
class StateFormat(ABC):
    """A format for parameters of one dtype.

    Methods take a piece of one parameter: `parameter` [n], and `state`, the kept tensors [n /
    group] by name. Float32 values by name are "master", "exp_avg" and "exp_avg_sq". A float32
    parameter is its own master.
    """

    parameter_dtype: torch.dtype
    # Whether a frozen weight is in the kept tensors, and not in the parameter.
    holds_weight: ClassVar[bool] = False

    @property
    @abstractmethod
    def kept(self) -> dict[str, Kept]:
        """Dtype and group of each tensor that is kept, by name."""

    @abstractmethod
    def read(self, state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
        """Returns the values [n], perhaps views of the state; all tensors are on one device."""

    @abstractmethod
    def write(self, state: dict[str, Tensor], parameter: Tensor, values: dict[str, Tensor]) -> None:
        """Sets the values [n] that are given.

        A master is rounded into the parameter. Devices may differ.
        """

    @abstractmethod
    def update(
        self, state: dict[str, Tensor], parameter: Tensor, gradient: Tensor, update: Update
    ) -> None:
        """Makes a step of AdamW by the gradient [n], of any dtype, all on one device."""

    def update_together(
        self, pieces: Sequence[tuple[dict[str, Tensor], Tensor, Tensor]], update: Update
    ) -> None:
        """Makes the steps of several small parameters, (state, parameter, gradient) each, of one
        gradient dtype."""
        for piece in pieces:
            self.update(*piece, update)

    @property
    def described(self) -> list[tuple[str, str]]:
        """Rows of a plan, each with a title."""
        return []

    @property
    def group(self) -> int:
        """A piece's elements are a multiple of this number."""
        return max((kept.group for kept in self.kept.values()), default=1)

    def num_bytes(self, numel: int) -> int:
        """Bytes of the state of so many elements."""
        return _num_bytes(self, numel)


@functools.cache  # a search for a plan asks for a few sizes many thousand times
def _num_bytes(format: StateFormat, numel: int) -> int:
    return sum(kept.num_bytes(numel) for kept in format.kept.values())


class Float32State(StateFormat):
    """Float32 moments, and a float32 master of each bf16 parameter."""

    @property
    def kept(self) -> dict[str, Kept]:
        masters = () if self.parameter_dtype == torch.float32 else ("master",)
        return dict.fromkeys((*masters, "exp_avg", "exp_avg_sq"), Kept(torch.float32))

    def read(self, state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
        return {"master": parameter, **state}

    def write(self, state: dict[str, Tensor], parameter: Tensor, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            if name == "master":
                parameter.copy_(value)
            if name in state:
                state[name].copy_(value)

    def update(
        self, state: dict[str, Tensor], parameter: Tensor, gradient: Tensor, update: Update
    ) -> None:
        self.update_together([(state, parameter, gradient)], update)

    def update_together(
        self, pieces: Sequence[tuple[dict[str, Tensor], Tensor, Tensor]], update: Update
    ) -> None:
        options = {
            "lr": update.learning_rate,
            "beta1": BETA1,
            "beta2": BETA2,
            "weight_decay": update.weight_decay,
            "eps": EPS,
        }
        tensors = [
            Tensors(
                gradient,
                state.get("master", parameter),
                state["exp_avg"],
                state["exp_avg_sq"],
                parameter if "master" in state else None,
            )
            for state, parameter, gradient in pieces
        ]
        if use_triton(update.impl, tensors[0].gradient):
            adamw(tensors, update.bias_corrections, update.gradient_scale, **options)
            return
        for gradient, *state, weight in tensors:
            # The kernel takes one dtype.
            scaled = gradient.to(torch.float32, copy=True).mul_(update.gradient_scale)
            master, *moments = ([tensor] for tensor in state)
            fused_adamw_(
                master,
                [scaled],
                *moments,
                [],
                [update.steps],
                **options,
                amsgrad=False,
                maximize=False,
            )
            if weight is not None:
                weight.copy_(master[0])


class CompactState(StateFormat):
    """Moments of 8 bits, and 16 bits that make bf16 a float32 master; see `compact_adamw`."""

    @property
    def kept(self) -> dict[str, Kept]:
        scale = Kept(torch.bfloat16, GROUP)
        corrections = (
            {} if self.parameter_dtype == torch.float32 else {"correction": Kept(torch.int16)}
        )
        return {
            **corrections,
            "exp_avg": Kept(torch.int8),
            "exp_avg_scale": scale,
            "exp_avg_sq": Kept(torch.uint8),
            "exp_avg_sq_scale": scale,
        }

    def read(self, state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
        return {
            "master": join_master(parameter, state["correction"])
            if "correction" in state
            else parameter,
            "exp_avg": decode_exp_avg(state["exp_avg"], state["exp_avg_scale"]),
            "exp_avg_sq": decode_exp_avg_sq(state["exp_avg_sq"], state["exp_avg_sq_scale"]),
        }

    def write(self, state: dict[str, Tensor], parameter: Tensor, values: dict[str, Tensor]) -> None:
        """Sets the values that are given: encodes moments, and splits a float32 master.

        The master of a bf16 parameter becomes the parameter and a correction of 16 bits. A float32
        parameter has no correction: it is the master.
        """
        encoded: dict[str, Tensor] = {}
        if "master" in values and "correction" not in state:
            parameter.copy_(values["master"])
        elif "master" in values:
            weight, encoded["correction"] = split_master(values["master"])
            parameter.copy_(weight)
        for name, encode in (("exp_avg", encode_exp_avg), ("exp_avg_sq", encode_exp_avg_sq)):
            if name in values:
                encoded[name], encoded[f"{name}_scale"] = encode(values[name])
        for name, tensor in encoded.items():
            state[name].copy_(tensor)

    def update(
        self, state: dict[str, Tensor], parameter: Tensor, gradient: Tensor, update: Update
    ) -> None:
        compact_adamw(
            parameter,
            state.get("correction"),
            state["exp_avg"],
            state["exp_avg_scale"],
            state["exp_avg_sq"],
            state["exp_avg_sq_scale"],
            gradient,
            update.bias_corrections,
            update.gradient_scale,
            lr=update.learning_rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=update.weight_decay,
            eps=EPS,
            impl=update.impl,
        )


class FrozenState(StateFormat):
    """No state: the parameter is not trained, and never updated."""

    @property
    def kept(self) -> dict[str, Kept]:
        return {}

    def read(self, state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
        return {"master": parameter}

    def write(self, state: dict[str, Tensor], parameter: Tensor, values: dict[str, Tensor]) -> None:
        if "master" in values:
            parameter.copy_(values["master"])

    def update(
        self, state: dict[str, Tensor], parameter: Tensor, gradient: Tensor, update: Update
    ) -> None:
        raise AssertionError("a frozen parameter has no gradient")


@dataclass(frozen=True)
class QuantizedState(FrozenState):
    """A frozen weight in `bits` bits per element, see `quantized.py`.

    The parameter itself keeps no memory.
    """

    holds_weight = True
    bits: int

    @property
    def kept(self) -> dict[str, Kept]:
        return {
            "codes": Kept(torch.uint8, 8 // self.bits),
            "scales": Kept(torch.float32, QUANTIZED_GROUP),
        }

    @property
    def described(self) -> list[tuple[str, str]]:
        return [("frozen matrices", f"{self.bits} bits; costs some loss, see docs/lora.md")]

    def weight(self, state: dict[str, Tensor]) -> Quantized:
        """Returns the weight that the kept tensors hold."""
        return Quantized(state["codes"], state["scales"], self.bits)

    def read(self, state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
        raise AssertionError("a quantized weight is read from its checkpoint's base")

    def write(self, state: dict[str, Tensor], parameter: Tensor, values: dict[str, Tensor]) -> None:
        if "master" in values:
            quantized = quantize(values["master"], self.bits)
            state["codes"].copy_(quantized.codes)
            state["scales"].copy_(quantized.scales)


FROZEN = FrozenState(torch.bfloat16)


def frozen_format(bits: int) -> StateFormat:
    """Returns the format of frozen block matrices in `bits` per element; 16: as parameters."""
    return FROZEN if bits == 16 else QuantizedState(torch.bfloat16, bits)


def format_with(
    dtypes: Mapping[str, torch.dtype], parameter_dtype: torch.dtype
) -> StateFormat | None:
    """Returns the format that keeps tensors of these names and dtypes for such a parameter, if
    there is one."""
    formats = Float32State(parameter_dtype), CompactState(parameter_dtype)
    return next(
        (f for f in formats if {name: kept.dtype for name, kept in f.kept.items()} == dtypes), None
    )


def format_of(parameter: Tensor, state_format: str, frozen: StateFormat = FROZEN) -> StateFormat:
    """Returns a parameter's state format: `frozen`, in its own dtype, if it takes no gradient.

    In "compact", matrices whose rows are groups on every rank are compact. All other state is
    small, and float32.
    """
    if state_format not in STATE_FORMATS:
        raise ValueError(f"a format is {' or '.join(STATE_FORMATS)}, got {state_format}")
    if not parameter.requires_grad:
        return replace(frozen, parameter_dtype=parameter.dtype)
    ranks = 1  # number of ranks with a part of each row
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.device_mesh.mesh.shape, parameter.placements)
        ranks = math.prod(
            size for size, placement in sizes if placement.is_shard(parameter.ndim - 1)
        )
    if (
        state_format == "compact"
        and parameter.ndim >= 2
        and parameter.shape[-1] % (GROUP * ranks) == 0
    ):
        return CompactState(parameter.dtype)
    return Float32State(parameter.dtype)


def bytes_saved(
    numel: int, state_format: str | None, *, is_half: bool, weight_bytes: int = 2
) -> int:
    """Returns the bytes of a checkpoint's tensors: so many trained elements, and their state.

    Args:
        state_format: of the matrices, which are nearly all elements; None: weights alone are saved.
        is_half: weights are halves of masters, as on one GPU; else float32 masters are in the
            state.
        weight_bytes: per element.
    """
    if state_format is None:
        return weight_bytes * numel
    matrix = torch.empty(
        1, GROUP, dtype=torch.bfloat16 if is_half else torch.float32, device="meta"
    )
    matrix.requires_grad_()  # or it would have no state
    state = format_of(matrix, state_format).num_bytes(numel)
    return weight_bytes * numel + state + (0 if is_half else 4 * numel)
