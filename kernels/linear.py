"""Linear maps as parts: the product y = x weight^T + bias, and the pieces of its backward.

    dx = dy weight,  d_weight = dy^T x,  d_bias = sum of dy's rows

A product sums in float32 and rounds once. A weight's gradient that adds up over tiles or chunks stays float32: a
bfloat16 sum of many tiles loses small addends. `F.linear` is the reference.

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

Factor = Any  # a result of `Linear.factor`


def _product(a: Tensor, b: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    """Returns a @ b, or writes or adds it to `out` in out's dtype: cuBLAS adds 16-bit products in float32."""
    if out is None:
        return a @ b
    if not runs_as_on_gpu(a):
        a, b = a.to(out.dtype), b.to(out.dtype)
    out_dtype = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if out_dtype and a.is_meta:  # PyTorch 2.11 has no such product without data
        return out
    return torch.addmm(out, a, b, **out_dtype, out=out) if accumulate else torch.mm(a, b, **out_dtype, out=out)


@dataclass(frozen=True)
class Linear(Part):
    """A linear map in the dtype of its inputs: bfloat16 on GPUs, float32 on CPUs. Other maps derive from it.

    The tiled MLP, attention of some heads at a time and the chunked loss call the pieces. All other code calls the
    object itself, or `maps`, and leaves backward to autograd. Pieces take what `factor` made of their matrices. A
    weight's factor serves all tiles.
    """

    name = "bf16"  # in flags
    rate = weight_rate = "products"  # names of the measured rates of products along rows, and of weights' gradients
    trains_matrices = True  # whether matrices have gradients; if not, adapters have

    @property
    def plain(self) -> "Linear":
        """The map by the same weights in the dtype of its inputs, as outside of training."""
        return PLAIN

    @property
    def head(self) -> "Linear":
        """The map of the head where blocks have this map."""
        return PLAIN

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Maps x [..., K] to [..., N] by weight [N, K] and bias [N]. Differentiable."""
        return F.linear(x, weight, bias)

    def maps(self, x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor] = ()) -> list[Tensor]:
        """Maps x [..., K] by each weight [N_i, K] and bias [N_i], if there are biases. Differentiable."""
        return [self(x, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights))]

    def factor(self, x: Any) -> Factor:
        """Returns x [M, K], an input or a weight, in the form in which products multiply it."""
        return x

    def transpose(self, x: Factor) -> Factor:
        """Returns the factor of the transposed matrix."""
        return x.t()

    def forward(self, x: Factor, weight: Factor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Maps x [M, K] by weight [N, K] to [M, N] without a graph. The result is written into `out` if it is given."""
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def input_gradient(
        self, dy: Factor, weight_t: Factor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """Returns dx = dy weight, [M, K], written into `out` or added to it. dy is [M, N], weight_t [K, N]."""
        return _product(dy, weight_t.t(), out, accumulate)

    def weight_gradient(
        self, dy_t: Factor, x_t: Factor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """Returns dy^T x, [N, K], for dy_t [N, M] and x_t [K, M]; `out` as in `input_gradient`, or float32."""
        return _product(dy_t, x_t.t(), out, accumulate)

    def weight_gradients(
        self, dy_t: Factor, x_t: Factor, weight: Weight, needs: Sequence[bool],
        totals: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Returns a weight's gradients in the order of `tensors_of`, added to `totals`; None where `needs` is False."""
        total = None if totals is None else totals[0]
        return [self.weight_gradient(dy_t, x_t, out=total, accumulate=total is not None) if needs[0] else None]


PLAIN = Linear()
