"""Linear maps as parts: the product y = x weight^T + bias, and the pieces of its backward.

    dx = dy weight,  d_weight = dy^T x,  d_bias = sum of dy's rows

`Plain` multiplies in the dtype of its inputs: bfloat16 on GPUs, float32 on CPUs. A product sums in float32 and rounds
once. A weight's gradient that adds up over tiles or chunks stays float32: a bfloat16 sum of many tiles loses small
addends. `F.linear` is the reference.

Kept for backward: x and weight by a call of the part itself; nothing by the pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import runs_as_on_gpu
from .parts import Part, Weight


def _product(a: Tensor, b: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    """Returns a @ b. If `out` is given, a @ b is written into it or added to it, in out's dtype.

    On CUDA, cuBLAS adds products of 16-bit factors to a float32 `out`. On a CPU the factors are cast first.
    """
    if out is None:
        return a @ b
    if not runs_as_on_gpu(a):
        a, b = a.to(out.dtype), b.to(out.dtype)
    out_dtype = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if out_dtype and a.is_meta:  # PyTorch 2.11 has no such product without data
        return out
    return torch.addmm(out, a, b, **out_dtype, out=out) if accumulate else torch.mm(a, b, **out_dtype, out=out)


@dataclass(frozen=True)
class Plain(Part):
    """Products in the dtype of the inputs. `kernels.parts.Linear` describes the methods."""

    name = "bf16"
    rate = weight_rate = "products"
    trains_matrices = True

    @property
    def plain(self) -> "Plain":
        return PLAIN

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def maps(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
        return [self(x, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights))]

    def factor(self, x: Tensor) -> Tensor:
        return x

    def transpose(self, x: Tensor) -> Tensor:
        return x.t()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def input_gradient(
        self, dy: Tensor, weight_t: Tensor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        return _product(dy, weight_t.t(), out, accumulate)

    def weight_gradient(
        self, dy_t: Tensor, x_t: Tensor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        return _product(dy_t, x_t.t(), out, accumulate)

    def weight_gradients(
        self, dy_t: Any, x_t: Any, weight: Weight, needs: Sequence[bool],
        totals: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        total = None if totals is None else totals[0]
        return [self.weight_gradient(dy_t, x_t, out=total, accumulate=total is not None) if needs[0] else None]

    @property
    def head(self) -> "Plain":
        return PLAIN


PLAIN = Plain()
