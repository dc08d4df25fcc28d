"""Low-rank adapters: a linear map whose matrix is frozen, beside two small matrices that are
trained.

    y = x W^T + (x A^T) B^T,  W [N, K] frozen, A [r, K], B [N, r]
    dx = dy W + (dy B) A,  dA = (dy B)^T x,  dB = dy^T (x A^T)

No gradient of W's size exists, and no product is made for one: backward has half of the products of
full training. The adapter's scale alpha / r is part of B, see `adapted`. x A^T [M, r] and dy B [M,
r] are computed once by a call of the part itself, and by each piece that needs them: r is small.
The adapter's term of y, and of dx, is written first. The product with W is added to it, and has the
time to read it. Another map, such as FP8, may multiply by W: it writes first, and the adapter's
term is added.

Kept for backward: x, x A^T and the weight's tensors by a call of the part itself; nothing by the
pieces.

Method: Hu et al., LoRA, arXiv 2106.09685.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import cast_by_autocast, first_derivative, sum_dtype
from .linear import PLAIN, Factor, Linear
from .parts import Adapted, Weight, tensors_of
from .tensor_parallel import local


def lora_reference(
    x: Tensor, matrix: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Maps x [..., K] by an adapted weight, in plain PyTorch; float64 stays float64."""
    return F.linear(x, matrix, bias) + (x @ a.t()) @ b.t()


@dataclass(eq=False)
class Both:
    """A matrix as it is, which adapters multiply, and on demand as the factor that the base's
    products multiply."""

    raw: Weight
    make: Callable[[], Factor]

    @functools.cached_property
    def factor(self) -> Factor:
        return self.make()


@dataclass(frozen=True)
class LoRA(Linear):
    """Products with adapted weights; other weights are multiplied as `base` does. `Linear`
    describes the methods."""

    # Multiplies by frozen matrices; adapters are multiplied in their own dtype.
    base: Linear = PLAIN

    trains_matrices = False

    @property
    def name(self) -> str:  # type: ignore[override]
        # Frozen matrices have no gradient.
        frozen = self.base.name.replace(f", d_weight {self.products[2].name}", "")
        return "lora" if self.base == PLAIN else f"lora on {frozen}"

    @property
    def products(self) -> tuple[Linear, Linear, Linear]:
        return self.base.products

    @property
    def plain(self) -> "LoRA":
        return LORA

    @property
    def head(self) -> Linear:  # type: ignore[override]
        return self.base.head

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self.maps(x, [weight], () if bias is None else [bias])[0]

    def maps(
        self, x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        (x,) = cast_by_autocast(x)
        factor = self.factor(x.detach().flatten(0, -2))
        outputs = []
        for weight, bias in zip(weights, biases or [None] * len(weights)):
            if isinstance(weight, Tensor):
                outputs.append(self.base(x, weight, bias))
                continue
            bias, *tensors = cast_by_autocast(bias, *tensors_of(weight))
            y = _Map.apply(self, factor, x.flatten(0, -2), bias, *tensors)
            outputs.append(y.unflatten(0, x.shape[:-1]))
        return outputs

    def factor(self, x: Weight) -> Both:
        matrix = x.matrix if isinstance(x, Adapted) else x
        return Both(x, lambda: self.base.factor(matrix))

    def transpose(self, x: Both) -> Both:
        return Both(x.raw.t(), lambda: self.base.transpose(x.factor))

    def forward(
        self, x: Both, weight: Both, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(weight.raw, Tensor):
            return self.base.forward(x.factor, weight.factor, bias, out=out)
        return self.with_adapter(x, x.raw @ weight.raw.a.t(), weight, bias, out)

    def with_adapter(
        self, x: Both, xa: Tensor, weight: Both, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Returns x W^T + (x A^T) B^T + bias, given x A^T."""
        # The product with W is added, and has the time to read the adapter's term.
        if self.products[0] == PLAIN:
            return PLAIN.forward(xa, weight.raw.b, bias, out=out).addmm_(
                x.raw, weight.raw.matrix.t()
            )
        return self.base.forward(x.factor, weight.factor, bias, out=out).addmm_(
            xa, weight.raw.b.t()
        )

    def input_gradient(
        self, dy: Both, weight_t: Both, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        if isinstance(weight_t.raw, Tensor):
            return self.base.input_gradient(
                dy.factor, weight_t.factor, out=out, accumulate=accumulate
            )
        dyb = dy.raw @ weight_t.raw.a.t()
        if self.base == PLAIN:
            dx = PLAIN.input_gradient(dyb, weight_t.raw.b, out=out, accumulate=accumulate)
            return dx.addmm_(dy.raw, weight_t.raw.matrix.t())
        dx = self.base.input_gradient(dy.factor, weight_t.factor, out=out, accumulate=accumulate)
        return dx.addmm_(dyb, weight_t.raw.b.t())

    def weight_gradients(
        self, dy_t: Both, x_t: Both, weight: Weight, needs: Sequence[bool],
        totals: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Makes no gradient of an adapted weight's matrix, whatever `needs` says."""
        if isinstance(weight, Tensor):
            return self.base.weight_gradients(dy_t.factor, x_t.factor, weight, needs, totals)
        factors = (weight.b.t() @ dy_t.raw, x_t.raw), (dy_t.raw, weight.a @ x_t.raw)
        gradients = [
            self.weight_gradient(*pair, out=total, accumulate=total is not None) if needed else None
            for pair, needed, total in zip(
                factors, needs[1:], totals[1:] if totals else (None, None)
            )
        ]
        return [None, *gradients]


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, factor, x, bias, matrix, a, b):
        xa = x @ a.t()  # [M, r]
        ctx.save_for_backward(x, xa, matrix, a, b)
        ctx.part = part
        return part.with_adapter(factor, xa, part.factor(Adapted(matrix, a, b)), bias)

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        x, xa, matrix, a, b = ctx.saved_tensors
        part = ctx.part
        _, _, needs_x, needs_bias, _, needs_a, needs_b = ctx.needs_input_grad
        dyb = dy @ b  # [M, r]
        dx = None
        if needs_x and part.base == PLAIN:
            dx = (dyb @ a).addmm_(dy, matrix)
        elif needs_x:
            matrix_t = part.base.transpose(part.base.factor(matrix))
            dx = part.base.input_gradient(part.base.factor(dy), matrix_t).addmm_(dyb, a)
        da = part.weight_gradient(dyb.t(), x.t()) if needs_a else None
        db = part.weight_gradient(dy.t(), xa.t()) if needs_b else None
        return None, None, dx, dy.sum(0) if needs_bias else None, None, da, db


LORA = LoRA()


def adapted(projection: nn.Module, matrix: Tensor | None = None) -> Weight:
    """Returns a projection's matrix, with the adapter that families/lora.py gave it, unless its
    scale is 0.

    Args:
        projection: has the adapter.
        matrix: of all experts, [E, N, K]; None: the projection's own.
    """
    matrix = local(projection.weight if matrix is None else matrix)
    if not getattr(projection, "lora_scale", 0):
        return matrix
    a = local(projection.lora_A.weight)
    b = local(projection.lora_B.weight)
    scale = projection.lora_scale
    return adapt(matrix, a, b if scale == 1 else b * scale)


def adapt(matrix: Tensor, a: Tensor, b: Tensor) -> Adapted:
    """Returns the weight of a matrix and the factors of its adapter, as peft has them.

    Matrices [E, N, K] of all experts have factors [E r, K], whose rows begin with the first
    expert's, and [N, r E], whose columns begin with the first of each expert. The weight has them
    as [E, r, K] and [E, N, r].
    """
    if matrix.ndim == 2:
        return Adapted(matrix, a, b)
    E = len(matrix)
    return Adapted(matrix, a.unflatten(0, (E, -1)), b.unflatten(1, (-1, E)).permute(2, 0, 1))


def merged(weight: Adapted) -> Tensor:
    """Returns W + B A, [N, K] or of all experts, summed in float32, rounded once to W's dtype."""
    dtype = sum_dtype(weight.matrix)
    product = torch.addmm if weight.matrix.ndim == 2 else torch.baddbmm
    return product(weight.matrix.to(dtype), weight.b.to(dtype), weight.a.to(dtype)).to(
        weight.matrix.dtype
    )
