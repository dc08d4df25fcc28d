"""Attention, its projections included, one key/value head and its query heads at a time: a G-th of the activations.

Forward keeps the block's normalised input, attention's output and log-sum-exp; backward makes each group's queries,
keys and values again. Attention costs the same, the products are smaller.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import choose_backend
from kernels.rms_norm import rms_norm
from kernels.rope import rope


def _group_weight(weights: Sequence[Tensor], group: int, num_groups: int) -> Tensor:
    """The rows of the q, k and v projections that make one group's heads, [(R + 2) K, D]; R query heads a group."""
    return torch.cat([weight.chunk(num_groups)[group] for weight in weights])


def _group_heads(qkv: Tensor, norms: Sequence[Tensor], eps: float, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """[B, T, (R + 2) K] -> q [B, T, R, K], k and v [B, T, 1, K], normalised and rotated as attention takes them."""
    K = len(norms[0])
    heads = qkv.unflatten(-1, (-1, K)).split([qkv.shape[-1] // K - 2, 1, 1], dim=2)
    q, k = rope(*(rms_norm(x, weight, eps) for x, weight in zip(heads, norms)), cos, sin)
    return [q, k, heads[2].contiguous()]


@torch.library.custom_op("fathom::attention_by_groups", mutates_args=())
def _attention_by_groups(
    x: Tensor, weights: list[Tensor], norms: list[Tensor], eps: float, cos: Tensor, sin: Tensor,
    segments: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [B, T, D] -> attention's output [B, T, H, K] and log-sum-exp [B, H, T]; weights of q, k, v; norms of q, k."""
    out, lse = _empty_outputs(x, weights, norms)
    G = len(weights[1]) // len(norms[1])
    for group, (out_g, lse_g) in enumerate(zip(out.chunk(G, dim=2), lse.chunk(G, dim=1))):
        q, k, v = _group_heads(F.linear(x, _group_weight(weights, group, G)), norms, eps, cos, sin)
        for whole, part in zip((out_g, lse_g), torch.ops.fathom.attention_forward(q, k, v, segments, backend)):
            whole.copy_(part)
    return out, lse


def _empty_outputs(x: Tensor, weights: list[Tensor], norms: list[Tensor]) -> tuple[Tensor, Tensor]:
    (B, T, _), K = x.shape, len(norms[0])
    H = len(weights[0]) // K
    return x.new_empty(B, T, H, K), x.new_empty(B, H, T, dtype=torch.float32)


@_attention_by_groups.register_fake
def _(x, weights, norms, eps, cos, sin, segments, backend):
    return _empty_outputs(x, weights, norms)


class _AttentionByGroups(torch.autograd.Function):
    """Projections, q/k norm, RoPE, attention and the output projection, one key/value head and its queries at a time.

    Kept for backward: the input, attention's output and log-sum-exp. Backward computes a group's q, k and v again. The
    input's gradient is rounded to its dtype after each group: G roundings of at most half a unit in the last place.
    """

    @staticmethod
    def forward(ctx, x, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm, cos, sin, segments, eps, backend):
        weights, norms = [q_weight, k_weight, v_weight], [q_norm, k_norm]
        out, lse = torch.ops.fathom.attention_by_groups(x, weights, norms, eps, cos, sin, segments, backend)
        ctx.save_for_backward(x, *weights, o_weight, *norms, cos, sin, out, lse)
        ctx.segments, ctx.eps, ctx.backend = segments, eps, backend
        return F.linear(out.flatten(2), o_weight)

    @staticmethod
    def backward(ctx, dy):
        x, *weights, o_weight, q_norm, k_norm, cos, sin, out, lse = ctx.saved_tensors
        G = len(weights[1]) // len(k_norm)
        norms = [weight.detach().requires_grad_() for weight in (q_norm, k_norm)]
        x_rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
        dx_rows, d_weights = torch.zeros_like(x_rows), [torch.empty_like(weight) for weight in weights]
        d_norms = [torch.zeros_like(n, dtype=torch.promote_types(n.dtype, torch.float32)) for n in norms]
        groups = zip(out.chunk(G, dim=2), lse.chunk(G, dim=1), o_weight.chunk(G, dim=1))
        for group, (out_g, lse_g, o_weight_g) in enumerate(groups):
            weight = _group_weight(weights, group, G)
            qkv = F.linear(x, weight).requires_grad_()
            with torch.enable_grad():
                heads = _group_heads(qkv, norms, ctx.eps, cos, sin)
            d_out = (dy @ o_weight_g).view(out_g.shape)
            d_heads = torch.ops.fathom.attention_backward(
                d_out, *(head.detach() for head in heads), out_g.contiguous(), lse_g.contiguous(),
                ctx.segments, ctx.backend,
            )  # fmt: skip
            d_qkv, *d_norms_g = torch.autograd.grad(heads, [qkv, *norms], d_heads)
            d_qkv_rows = d_qkv.flatten(0, 1)
            dx_rows.addmm_(d_qkv_rows, weight)
            parts = (d_qkv_rows.T @ x_rows).split([len(w) // G for w in weights])
            for d_weight, part in zip(d_weights, parts):
                d_weight.chunk(G)[group].copy_(part)
            for d_norm, part in zip(d_norms, d_norms_g):
                d_norm += part
            del qkv, heads, d_out, d_heads, d_qkv, d_qkv_rows, parts  # before the next group's are made
        d_norms = [d.to(n.dtype) for d, n in zip(d_norms, norms)]
        return dx_rows.view_as(x), *d_weights, dy_rows.T @ out.flatten(0, 1).flatten(1), *d_norms, *[None] * 5


def attention_by_groups_forward(module: nn.Module, whole: Callable, x_BTD: Tensor, context) -> Tensor:
    """What `module.forward` does, by groups; `whole` is that forward, for generation."""
    if context.caches is not None:
        return whole(x_BTD, context)
    projections = (module.q_proj, module.k_proj, module.v_proj, module.o_proj, module.q_norm, module.k_norm)
    return _AttentionByGroups.apply(
        x_BTD, *(projection.weight for projection in projections), context.cos, context.sin, context.segments,
        module.q_norm.eps, choose_backend(module.backend, x_BTD.device),
    )  # fmt: skip
