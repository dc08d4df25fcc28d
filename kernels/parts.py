"""What varies from model to model and plugs into operations, and what each operation takes.

Custom operations of PyTorch take tensors, numbers and strings, but no objects. A part therefore has a number, by which
an operation is told of it and finds it again.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
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
    """A linear map, y = x weight^T + bias, and the pieces of its backward.

    Operations with a backward of their own call the pieces: the tiled MLP, attention of some heads at a time and the
    chunked loss. Everything else calls the object itself and leaves backward to autograd.

    Attributes:
        number: names the part to custom operations, see `Part`.
        rate: name of the measured rate of its matrix products, a field of `training.memory.machine.Rates`.
    """

    number: int
    rate: str

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Maps x [..., K] to [..., N] by weight [N, K] and bias [N]. Differentiable."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Maps x [M, K] to [M, N] without a graph, into `out` where it is given."""

    def input_gradient(
        self, dy: Tensor, weight: Tensor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """Returns dx = dy weight [M, K] for dy [M, N], in `out` where it is given; `accumulate` adds to `out`."""

    def weight_gradient(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        """Returns dy^T x [N, K] for dy [M, N] and x [M, K], as `input_gradient` does; `out` may be float32."""


class AttentionBytes(NamedTuple):
    """Memory of attention alone, from q, k and v to its output."""

    results: int  # bytes per token of the outputs and log-sum-exps, which backward needs
    choices: int  # bytes per token of the lists of key blocks, which backward needs
    forward: int  # bytes at the fullest moment of forward, beside the two above
    backward: int  # bytes at the fullest moment of backward, beside dq, dk and dv


class AttentionFlops(NamedTuple):
    """Floating-point operations of attention to one document, from q, k and v to its output."""

    forward: float  # without the choice
    choice: float  # choosing key blocks, which happens once per step
    backward: float


class AttentionWork(NamedTuple):
    """Amounts of work by the name of the measured rate that does it, see `training.memory.machine.Rates`."""

    forward: dict[str, float]
    choice: dict[str, float]
    backward: dict[str, float]


class AttentionKind(Part, ABC):
    """A kind of causal attention, and everything that is its own. Kinds are frozen dataclasses.

    A document is attended to by what it is alone: nothing depends on the documents packed beside it.

    Tensors: q [B, T, H, K], k and v [B, T, G, K] after rotary positions. `segments` are the documents, int64 [S, 3] on
    the CPU, rows (batch row, first token, one past the last token); None: each batch row is one document. `lists` are
    int16 [B, T, G, `list_length`]: indices of key blocks within their document. `backend` is one of
    `kernels.attention.full.BACKENDS` but "auto". `on_triton` says whether Triton's kernels run.

    Attributes:
        name: what flags call it.
        takes: names of the flags that it obeys.
        branches: outputs that are kept for backward, each with a log-sum-exp.
        gates_per_head: logits per token and query head that the model makes of a block's input for it.
        selected_blocks: blocks of keys per token as flags count them; 0: nothing is chosen.
        list_length: blocks of keys in a list, those that are not selected anyway.
        longest_document: tokens of the longest document that it takes.
        gpu_head_dims: head widths that its GPU kernels take; (): any.
        h200_rates: rates on an H200, by name, see `measure_rates`.
    """

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ()
    branches: ClassVar[int] = 1
    gates_per_head: ClassVar[int] = 0
    selected_blocks: int = 0
    gpu_head_dims: ClassVar[tuple[int, ...]] = ()
    h200_rates: ClassVar[dict[str, float]]

    @property
    def list_length(self) -> int:
        return 0

    @property
    def longest_document(self) -> float:
        return math.inf

    @classmethod
    def from_flags(cls, values: dict[str, int]) -> Self:
        """Returns the kind of one layer that flags describe; `values` has some of `takes`.

        Raises:
            ValueError: a value out of range.
        """
        return cls(**values)

    def with_blocks(self, selected_blocks: int) -> Self:
        """Returns the same kind with another number of selected blocks."""
        return replace(self, selected_blocks=selected_blocks)  # type: ignore[type-var]

    @abstractmethod
    def describe(self, selected_blocks: str) -> str:
        """Returns a line for people. `selected_blocks` are the numbers of all layers as flags spell them."""

    @abstractmethod
    def check(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, impl: str) -> bool:
        """Returns `on_triton` for `impl` of `kernels.common.IMPLEMENTATIONS`.

        Raises:
            ValueError: shapes, dtypes or sizes that no kernel takes.
        """

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, lists: Tensor | None, backend: str,
        on_triton: bool,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:  # fmt: skip
        """Returns outputs [B, T, H, K], log-sum-exps [B, T, H] float32, one each per branch, and the lists.

        Lists are chosen where None are given; a kind that chooses nothing returns None.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, outs: Sequence[Tensor],
        lses: Sequence[Tensor], lists: Tensor | None, segments: Tensor | None, backend: str, on_triton: bool,
    ) -> Sequence[Tensor]:  # fmt: skip
        """Returns dq, dk, dv and, where there are gates, their gradient. The arguments are what `forward` returned."""

    def output(self, outs: Sequence[Tensor], gates: Tensor | None, on_triton: bool) -> Tensor:
        """Returns attention's output [B, T, H, K] from the branches' outputs and gates [B, T, H, gates_per_head]."""
        return outs[0]

    @abstractmethod
    def decode(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, state: Any) -> Tensor:
        """Returns the output [B, 1, H, K] of one new token, q [B, 1, H, K], the last of the cached k and v.

        Args:
            state: what `decoding_state` made for this sequence and layer.
        """

    def decoding_state(self) -> Any:
        """Returns what a key/value cache keeps for this kind beside keys and values."""
        return None

    def for_longest(self, longest: int) -> "AttentionKind":
        """Returns the cheapest kind that computes the same for documents of up to `longest` tokens."""
        return self

    @abstractmethod
    def footprint(
        self, T: int, H: int, G: int, K: int, *, element_size: int = 2, backend: str = "auto",
        context_length: int | None = None, longest: int | None = None,
    ) -> AttentionBytes:  # fmt: skip
        """Returns what T tokens take; the other arguments as `kernels.attention.full.backward_workspace` takes them."""

    @abstractmethod
    def flops(self, length: int, H: int, G: int, K: int) -> AttentionFlops:
        """Returns the floating-point operations of one document of `length` tokens."""

    def forward_flops(self, lengths: Iterable[int], H: int, G: int, K: int) -> float:
        """Returns the floating-point operations of forward and choice over documents of these lengths."""
        flops = {length: self.flops(length, H, G, K) for length in {*lengths}}
        return sum(flops[length].forward + flops[length].choice for length in lengths)

    def work(
        self, lengths: Iterable[tuple[float, float]], H: int, G: int, K: int, *, backend: str, steps: int,
        is_packed: bool = True,
    ) -> AttentionWork:  # fmt: skip
        """Returns the work over documents: pairs of a length in tokens and a number of documents.

        Args:
            steps: calls into which the heads are divided.
            is_packed: whether a batch row may hold several documents.
        """
        totals = [0.0, 0.0, 0.0]
        for length, count in lengths:
            flops = self.flops(max(1, round(length)), H, G, K)
            totals = [total + count * of_part for total, of_part in zip(totals, flops)]
        return AttentionWork(*({f"{self.name} {part}": n} for part, n in zip(AttentionWork._fields, totals)))

    def rates_with(self, backend: str, native: str) -> dict[str, float]:
        """Returns an H200's rates with this backend, as they are on a GPU whose own best backend is `native`."""
        return self.h200_rates

    @abstractmethod
    def measure_rates(
        self, H: int, G: int, K: int, context_length: int, backend: str, seconds: Callable[[Callable], float],
        device: torch.device,
    ) -> dict[str, float]:  # fmt: skip
        """Returns the rates of a GPU by the names that `work` uses, FLOP/s or calls per second.

        Args:
            seconds: times a function on the GPU.
        """

    def time(
        self, T: int, H: int, G: int, K: int, backend: str, seconds: Callable[[Callable], float],
        device: torch.device, segments: Tensor | None = None,
    ) -> tuple[float, float]:  # fmt: skip
        """Returns the seconds of one forward, without the choice, and of one backward over T random tokens."""
        q, k, v = (torch.randn(1, T, n, K, device=device, dtype=torch.bfloat16) for n in (H, G, G))
        gates = torch.randn(1, T, H, self.gates_per_head, device=device, dtype=q.dtype) if self.gates_per_head else None
        outs, lses, lists = self.forward(q, k, v, segments, None, backend, True)
        forward = seconds(lambda: self.forward(q, k, v, segments, lists, backend, True))
        kept = gates, outs, lses, lists, segments
        return forward, seconds(lambda: self.backward(q, q, k, v, *kept, backend, True))


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
