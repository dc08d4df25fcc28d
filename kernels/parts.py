"""What varies from model to model and plugs into operations, and what each operation takes.

Custom operations of PyTorch take tensors, numbers and strings, but no objects. A part therefore has a number, by which
an operation is told of it and finds it again.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

_PARTS: list["Part"] = []


class Part:
    """Base of the frozen dataclasses that operations find by `number`. Equal parts have the same number."""

    number: int

    def __post_init__(self) -> None:
        if self not in _PARTS:
            _PARTS.append(self)
        object.__setattr__(self, "number", _PARTS.index(self))


def part_of(number: int):
    """Returns the part that has this number in this process."""
    return _PARTS[number]


class Linear(Protocol):
    """A linear map, y = x weight^T + bias, with its backward in pieces.

    The tiled MLP, attention of some heads at a time and the chunked loss call the pieces; everything else calls the
    object itself, which autograd sees through.

    Attributes:
        number: see `Part`.
        rate: name of the measured rate of its matrix products, see `training.memory.machine.Rates`.
    """

    number: int
    rate: str

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Differentiable: x [..., K], weight [N, K], bias [N] -> [..., N]."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Without a graph: x [M, K] -> [M, N], into `out` where it is given."""

    def input_gradient(
        self, dy: Tensor, weight: Tensor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """dy [M, N] -> dx = dy weight [M, K], into `out` or, with `accumulate`, added to it."""

    def weight_gradient(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        """dy [M, N], x [M, K] -> dy^T x [N, K], into `out`, which may be float32, or added to it."""


@dataclass(frozen=True)
class Footprint:
    """What an operation takes for a number of tokens. Weights and their gradients are counted by whoever holds them.

    Args:
        saved: bytes from forward to backward, its input included if backward needs it.
        forward: bytes at the fullest moment of a forward that saves nothing, beside its input.
        backward: bytes at the fullest moment of backward, beside what is saved.
        keepable: bytes of what is saved that stands in for a second forward, see `operation`.
        matrix_flops, backward_matrix_flops: floating-point operations of the matrix products of forward and backward.
        elementwise_bytes: read and written in forward by what is neither a matrix product nor attention.
        choices: bytes of what is saved that is kept always, see `operation`.
        is_skippable: whether forward need not run again for backward, see `operation`.
    """

    saved: int
    forward: int
    backward: int
    keepable: int = 0
    matrix_flops: float = 0
    backward_matrix_flops: float = 0
    elementwise_bytes: int = 0
    choices: int = 0
    is_skippable: bool = False
