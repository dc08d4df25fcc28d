"""Linear maps as parts: the product y = x weight^T + bias, and the pieces of its backward.

    dx = dy weight,  d_weight = dy^T x,  d_bias = sum of dy's rows

A product sums in float32 and rounds once. A weight's gradient that adds up over tiles or chunks
stays float32: a bfloat16 sum of many tiles loses small addends. `F.linear` is the reference.

Kept for backward: x and weight by a call of the part itself; nothing by the pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_internals
from .common import cast_by_autocast, first_derivative, runs_as_on_gpu
from .gated_activation import activated, activation_gradients
from .parts import Part, Weight

Factor = Any  # a result of `Linear.factor`
COPIED_ELEMENTS = 2**24  # elements of a matrix that a CPU copies into another dtype at a time


def _product(a: Tensor, b: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    """Returns a @ b, or writes or adds it to `out` in out's dtype.

    cuBLAS adds 16-bit products in float32.
    """
    if out is None:
        return a @ b
    if not runs_as_on_gpu(a) and a.dtype != out.dtype:
        count = max(1, COPIED_ELEMENTS // max(1, a.shape[1]))
        if len(a) > count:  # a chunk of 4,096 rows of logits has 2.3 GiB in float32
            for a_rows, out_rows in zip(a.split(count), out.split(count)):
                _product(a_rows, b, out_rows, accumulate)
            return out
        a, b = a.to(out.dtype), b.to(out.dtype)
    out_dtype = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if out_dtype and a.is_meta:  # PyTorch 2.11 has no such product without data
        return out
    if accumulate:
        return torch.addmm(out, a, b, **out_dtype, out=out)
    return torch.mm(a, b, **out_dtype, out=out)


@dataclass(frozen=True)
class Linear(Part):
    """A linear map in the dtype of its inputs: bfloat16 on GPUs, float32 on CPUs. Other maps derive
    from it.

    The tiled MLP, attention of some heads at a time and the chunked loss call the pieces. All other
    code calls the object itself, or `maps`, and leaves backward to autograd. Pieces take what
    `factor` made of their matrices. A weight's factor serves all tiles.
    """

    name = "bf16"  # in flags
    # Names of the measured rates of y and dx, and of weights' gradients.
    rate = weight_rate = "products"
    trains_matrices = True  # whether matrices have gradients; if not, adapters have

    @property
    def plain(self) -> "Linear":
        """The map by the same weights in the dtype of its inputs, as outside of training."""
        return PLAIN

    @property
    def head(self) -> "Linear":
        """The map of the head where blocks have this map."""
        return PLAIN

    @property
    def products(self) -> tuple["Linear", "Linear", "Linear"]:
        """The maps that make y, dx and d_weight."""
        return self, self, self

    @property
    def rates(self) -> tuple[str, str, str]:
        """Names of the measured rates of y, dx and d_weight."""
        y, dx, d_weight = self.products
        return y.rate, dx.rate, d_weight.weight_rate

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Maps x [..., K] to [..., N] by weight [N, K] and bias [N]. Differentiable."""
        return F.linear(x, weight, bias)

    def maps(
        self, x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Maps x [..., K] by each weight [N_i, K] and bias [N_i], if there are biases.

        Differentiable.
        """
        return [
            self(x, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights))
        ]

    def factor(self, x: Any) -> Factor:
        """Returns x [M, K], an input or a weight, as the operand that products multiply."""
        return x

    def activated(
        self, gate: Tensor, up: Tensor, activation: str, on_triton: bool, out: Tensor | None = None
    ) -> Factor:
        """Returns act(gate) * up as an input's factor; gate and up are [M, F]. `out`, which may be
        gate, has room."""
        return self.factor(activated(gate, up, activation, on_triton, out))

    def activation_gradients(
        self,
        d_hidden: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        on_triton: bool,
        in_place: bool,
    ) -> list[Factor]:
        """Returns the gradients of gate and up, and act(gate) * up, as factors. The last may
        overwrite d_hidden.

        With `in_place` the others may overwrite gate and up.
        """
        gradients = activation_gradients(d_hidden, gate, up, activation, on_triton, in_place)
        return [self.factor(x) for x in (*gradients, d_hidden)]

    def transpose(self, x: Factor) -> Factor:
        """Returns the factor of the transposed matrix."""
        return x.t()

    def kept(self, x: Factor) -> tuple[Tensor, ...]:
        """Returns the tensors that backward needs of an input's factor."""
        return (x,)

    def restored(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Factor:
        """Returns the factor of an input of this dtype from the tensors that `kept` returned."""
        return tensors[0]

    def forward(
        self, x: Factor, weight: Factor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Maps x [M, K] by weight [N, K] to [M, N] without a graph. The result is written into
        `out` if it is given."""
        if out is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def input_gradient(
        self, dy: Factor, weight_t: Factor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """Returns dx = dy weight, [M, K], written into `out` or added to it. dy is [M, N], weight_t
        [K, N]."""
        return _product(dy, weight_t.t(), out, accumulate)

    def weight_gradient(
        self, dy_t: Factor, x_t: Factor, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """Returns dy^T x, [N, K], for dy_t [N, M] and x_t [K, M].

        `out` is as in `input_gradient`, or float32.
        """
        return _product(dy_t, x_t.t(), out, accumulate)

    def weight_gradients(
        self, dy_t: Factor, x_t: Factor, weight: Weight, needs: Sequence[bool],
        totals: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Returns a weight's gradients in the order of `tensors_of`, added to `totals`; None where
        `needs` is False."""
        total = None if totals is None else totals[0]
        return [
            self.weight_gradient(dy_t, x_t, out=total, accumulate=total is not None)
            if needs[0]
            else None
        ]


PLAIN = Linear()


class InPieces(Linear):
    """A linear map whose calls run its pieces, forward and backward."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.maps(x, [weight], () if bias is None else [bias])[0]

    def maps(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        x, *parameters = cast_by_autocast(x, *weights, *biases)
        outputs = _apply_maps(self, len(weights), x.flatten(0, -2), *parameters)
        return [y.unflatten(0, x.shape[:-1]) for y in outputs]


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, count, x, *parameters):
        weights = parameters[:count]
        biases = parameters[count:] or [None] * count
        factor = part.factor(x)
        # Frozen weights need no input.
        kept = part.kept(factor) if any(ctx.needs_input_grad[3 : 3 + count]) else ()
        ctx.save_for_backward(*weights, *kept)
        ctx.part = part
        ctx.dtype = x.dtype
        ctx.count = count
        return tuple(
            part.forward(factor, part.factor(weight), bias) for weight, bias in zip(weights, biases)
        )

    @staticmethod
    @first_derivative
    def backward(ctx, *gradients):
        tensors = ctx.saved_tensors  # checkpointing gives them once
        weights = tensors[: ctx.count]
        kept = tensors[ctx.count :]
        part = ctx.part
        _, _, needs_x, *needs = ctx.needs_input_grad
        dx = None
        d_weights = []
        d_biases = [dy.sum(0) if n else None for dy, n in zip(gradients, needs[ctx.count :])]
        x_t = part.transpose(part.restored(kept, ctx.dtype)) if kept else None
        for dy, weight, needs_weight in zip(gradients, weights, needs):
            factor = part.factor(dy)
            if needs_x:
                weight_t = part.transpose(part.factor(weight))
                dx = part.input_gradient(factor, weight_t, out=dx, accumulate=dx is not None)
            d_weights.append(
                part.weight_gradient(part.transpose(factor), x_t) if needs_weight else None
            )
        return None, None, dx, *d_weights, *d_biases


_apply_maps = torch_internals.untraced_in_8_bits(_Maps.apply)
