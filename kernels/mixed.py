"""Linear maps that make some of their products as one map does and some as another.

`Mixed(dx=FP8(), d_weight=FP8())` makes y in the dtype of its inputs and both gradients in FP8. A
matrix is brought into the form that a product takes when that product is first made. Products of
one map share the form.

Kept for backward: x and weight, as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .fp8 import FP8
from .linear import PLAIN, Factor, InPieces, Linear


@dataclass(eq=False)
class Forms:
    """A matrix as the factor of each map that multiplies it."""

    make: Callable[[Linear], Factor]
    factors: dict[Linear, Factor] = field(default_factory=dict)

    def of(self, linear: Linear) -> Factor:
        if linear not in self.factors:
            self.factors[linear] = self.make(linear)
        return self.factors[linear]


def _never(linear: Linear) -> Factor:
    raise TypeError(f"a matrix that exists as a factor alone has no form for {linear.name}")


@dataclass(frozen=True)
class Mixed(InPieces):
    """A map whose products are made by three maps.

    `kernels.linear.Linear` describes the methods.
    """

    y: Linear = PLAIN
    dx: Linear = PLAIN
    d_weight: Linear = PLAIN

    @property
    def name(self) -> str:  # type: ignore[override]
        """Names the three maps: "y bf16, dx fp8, d_weight fp8"."""
        return f"y {self.y.name}, dx {self.dx.name}, d_weight {self.d_weight.name}"

    @property
    def products(self) -> tuple[Linear, Linear, Linear]:
        return self.y, self.dx, self.d_weight

    def kept(self, x: Forms) -> tuple[Tensor, ...]:
        return (x.of(PLAIN),)

    def restored(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Forms:
        return self.factor(*tensors)

    def factor(self, x: Tensor) -> Forms:
        return Forms(lambda linear: linear.factor(x))

    def activated(
        self, gate: Tensor, up: Tensor, activation: str, on_triton: bool, out: Tensor | None = None
    ) -> Forms:
        return Forms(_never, {self.y: self.y.activated(gate, up, activation, on_triton, out)})

    def activation_gradients(
        self,
        d_hidden: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        on_triton: bool,
        in_place: bool,
    ) -> list[Forms]:
        arguments = d_hidden, gate, up, activation, on_triton, in_place
        if self.dx != self.d_weight:
            return super().activation_gradients(*arguments)
        return [
            Forms(_never, {self.dx: factor}) for factor in self.dx.activation_gradients(*arguments)
        ]

    def transpose(self, x: Forms) -> Forms:
        return Forms(lambda linear: linear.transpose(x.of(linear)))

    def forward(
        self, x: Forms, weight: Forms, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        return self.y.forward(x.of(self.y), weight.of(self.y), bias, out=out)

    def input_gradient(
        self, dy: Forms, weight_t: Forms, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        return self.dx.input_gradient(
            dy.of(self.dx), weight_t.of(self.dx), out=out, accumulate=accumulate
        )

    def weight_gradient(
        self, dy_t: Forms, x_t: Forms, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        factors = dy_t.of(self.d_weight), x_t.of(self.d_weight)
        return self.d_weight.weight_gradient(*factors, out=out, accumulate=accumulate)


def linear_maps(impl: str = "auto") -> dict[str, Linear]:
    """Returns the maps that a flag can ask for, by their names; `impl` is their factors'.

    "fp8" makes the products of backward in FP8: forward's would cost some loss.
    """
    fp8 = FP8(impl)
    return {"bf16": PLAIN, "fp8": Mixed(dx=fp8, d_weight=fp8), "fp8-all": fp8}
