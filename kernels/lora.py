"""Low-rank adapters: a linear map whose matrix is frozen, beside two small matrices that are trained.

    y = x W^T + (x A^T) B^T,  W [N, K] frozen, A [r, K], B [N, r]
    dx = dy W + (dy B) A,  dA = (dy B)^T x,  dB = dy^T (x A^T)

No gradient of W's size exists, and no product is made for one: backward has half of the products of full training. The
adapter's scale alpha / r is part of B, see `model.adapted`. x A^T [M, r] and dy B [M, r] are computed once by a
call of the part itself, and by each piece that needs them: r is small. The adapter's term of y, and of dx, is written
first. The product with W is added to it, and has the time to read it.

Kept for backward: x, x A^T and the weight's tensors by a call of the part itself; nothing by the pieces.

Method: Hu et al., LoRA, arXiv 2106.09685.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .common import cast_by_autocast
from .linear import Plain
from .parts import Adapted, Weight, tensors_of


def lora_reference(x: Tensor, matrix: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Maps x [..., K] by an adapted weight, in plain PyTorch; float64 stays float64."""
    return F.linear(x, matrix, bias) + (x @ a.t()) @ b.t()


@dataclass(frozen=True)
class LoRA(Plain):
    """Products with adapted weights; other weights are multiplied as `Plain` does.

    `kernels.parts.Linear` describes the methods.
    """

    name = "lora"
    trains_matrices = False

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return super().__call__(x, weight, bias)
        x, bias, *tensors = cast_by_autocast(x, bias, *tensors_of(weight))
        return _Map.apply(self, x.flatten(0, -2), bias, *tensors).unflatten(0, x.shape[:-1])

    def forward(self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return super().forward(x, weight, bias, out=out)
        y = super().forward(x @ weight.a.t(), weight.b, bias, out=out)
        return y.addmm_(x, weight.matrix.t())

    def input_gradient(
        self, dy: Tensor, weight_t: Weight, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        if isinstance(weight_t, Tensor):
            return super().input_gradient(dy, weight_t, out=out, accumulate=accumulate)
        dx = super().input_gradient(dy @ weight_t.a.t(), weight_t.b, out=out, accumulate=accumulate)
        return dx.addmm_(dy, weight_t.matrix.t())

    def weight_gradients(
        self, dy_t: Tensor, x_t: Tensor, weight: Weight, needs: Sequence[bool],
        totals: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Makes no gradient of an adapted weight's matrix, whatever `needs` says."""
        if isinstance(weight, Tensor):
            return super().weight_gradients(dy_t, x_t, weight, needs, totals)
        factors = (weight.b.t() @ dy_t, x_t), (dy_t, weight.a @ x_t)
        gradients = [
            self.weight_gradient(*pair, out=total, accumulate=total is not None) if needed else None
            for pair, needed, total in zip(factors, needs[1:], totals[1:] if totals else (None, None))
        ]
        return [None, *gradients]


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, x, bias, matrix, a, b):
        xa = x @ a.t()  # [M, r]
        ctx.save_for_backward(x, xa, matrix, a, b)
        ctx.part = part
        return F.linear(xa, b, bias).addmm_(x, matrix.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, xa, matrix, a, b), part = ctx.saved_tensors, ctx.part
        _, needs_x, needs_bias, _, needs_a, needs_b = ctx.needs_input_grad
        dyb = dy @ b  # [M, r]
        dx = (dyb @ a).addmm_(dy, matrix) if needs_x else None
        da = part.weight_gradient(dyb.t(), x.t()) if needs_a else None
        db = part.weight_gradient(dy.t(), xa.t()) if needs_b else None
        return None, dx, dy.sum(0) if needs_bias else None, None, da, db


LORA = LoRA()


def merged(weight: Adapted) -> Tensor:
    """Returns W + B A, [N, K], summed in float32 and rounded once to W's dtype."""
    dtype = torch.promote_types(weight.matrix.dtype, torch.float32)
    return torch.addmm(weight.matrix.to(dtype), weight.b.to(dtype), weight.a.to(dtype)).to(weight.matrix.dtype)
