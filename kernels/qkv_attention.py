"""A block's attention from its input to its output projection, all key/value heads at once or some at a time.

With n of G key/value heads at a time, q, k, v and their gradients take n / G of their memory: each step projects the
input to n key/value heads and their query heads, normalises and rotates these, and attends.

Kept for backward: the input, attention's output and log-sum-exp; with all heads at once also q and k before and after
their rotation, and v. Some heads at a time, backward projects each step's q, k and v again. Attention costs the same
as all heads at once; the matrix products are smaller.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention, backward_workspace, choose_backend
from kernels.common import Footprint, operation, use_triton
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.sparse_attention import Sparsity, sparse_attention
from kernels.sparse_attention.sparse_attention import WORKSPACE_BYTES, attention_footprint


def project_heads(
    x_BTD: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, K], k and v [B, T, G, K] of all heads, normalised and rotated; arguments as `qkv_attention`."""
    q, k, v = (F.linear(x_BTD, weight).unflatten(-1, (-1, len(q_norm))) for weight in (q_weight, k_weight, v_weight))
    return *rope(rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps), cos, sin), v


def _weight_of_step(weights: Sequence[Tensor], step: int, num_steps: int) -> Tensor:
    """Rows of the q, k and v projections that make the heads of one step, [(R + 2) n K, D]; R query heads a group."""
    return torch.cat([weight.chunk(num_steps)[step] for weight in weights])


def _split_heads(qkv: Tensor, norms: Sequence[Tensor], eps: float, n: int, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """[B, T, (R + 2) n K] -> q [B, T, R n, K], k and v [B, T, n, K], normalised and rotated as attention takes them."""
    K = len(norms[0])
    heads = qkv.unflatten(-1, (-1, K)).split([qkv.shape[-1] // K - 2 * n, n, n], dim=2)
    q, k = rope(rms_norm(heads[0], norms[0], eps), rms_norm(heads[1], norms[1], eps), cos, sin)
    return [q, k, heads[2].contiguous()]


def _attend(q, k, v, segments, backend: str, lists, sparsity: list[int]) -> tuple[Tensor, Tensor]:
    """Attention's output and log-sum-exp; `lists`, and `sparsity` [blocks, their size, window], of sparse attention."""
    if lists is None:
        return torch.ops.fathom.attention_forward(q, k, v, segments, backend)
    options = *sparsity[1:], WORKSPACE_BYTES, use_triton("auto", q)
    return torch.ops.fathom.sparse_attention_forward(q, k, v, segments, lists, *options)


def _attend_backward(dout, q, k, v, out, lse, segments, backend: str, lists, sparsity: list[int]):
    if lists is None:
        return torch.ops.fathom.attention_backward(dout, q, k, v, out, lse, segments, backend)
    options = *sparsity[1:], WORKSPACE_BYTES, use_triton("auto", q)
    return torch.ops.fathom.sparse_attention_backward(dout, q, k, v, out, lse, lists, segments, *options)


def _heads_of_step(out: Tensor, lse: Tensor, lists: Tensor | None, step: int, steps: int):
    """Views of one step's output and log-sum-exp ([B, H, T], with lists [B, T, H]), and its lists [B, T, n, blocks]."""
    lse_dim = 1 if lists is None else 2
    lists_n = None if lists is None else lists.chunk(steps, 2)[step].contiguous()
    return out.chunk(steps, 2)[step], lse.chunk(steps, lse_dim)[step], lists_n


@operation("fathom::qkv_select", keepable="choices")
def _qkv_select(
    x: Tensor, weights: list[Tensor], norms: list[Tensor], eps: float, cos: Tensor, sin: Tensor,
    segments: Tensor | None, sparsity: list[int], n: int,
) -> Tensor:  # fmt: skip
    """x [B, T, D] -> the blocks that each token chooses, int16 [B, T, G, blocks]."""
    lists = _empty_lists(x, weights, norms, sparsity)
    steps = len(weights[1]) // len(norms[1]) // n
    for step in range(steps):
        q, k, _ = _split_heads(F.linear(x, _weight_of_step(weights, step, steps)), norms, eps, n, cos, sin)
        chosen = torch.ops.fathom.select_blocks(q, k, segments, *sparsity, use_triton("auto", q))
        lists.chunk(steps, 2)[step].copy_(chosen)
        del q, k, _, chosen  # before those of the next step are made
    return lists


def _empty_lists(x: Tensor, weights: list[Tensor], norms: list[Tensor], sparsity: list[int]) -> Tensor:
    return x.new_empty(*x.shape[:2], len(weights[1]) // len(norms[1]), sparsity[0], dtype=torch.int16)


@_qkv_select.register_fake
def _(x, weights, norms, eps, cos, sin, segments, sparsity, n):
    return _empty_lists(x, weights, norms, sparsity)


@operation("fathom::qkv_attention", keepable="results")
def _qkv_attention(
    x: Tensor, weights: list[Tensor], norms: list[Tensor], eps: float, cos: Tensor, sin: Tensor,
    segments: Tensor | None, backend: str, lists: Tensor | None, sparsity: list[int], n: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [B, T, D] -> attention's output [B, T, H, K] and log-sum-exp; weights of q, k, v; norms of q, k."""
    out, lse = _empty_outputs(x, weights, norms, lists)
    steps = len(weights[1]) // len(norms[1]) // n
    for step in range(steps):
        out_n, lse_n, lists_n = _heads_of_step(out, lse, lists, step, steps)
        q, k, v = _split_heads(F.linear(x, _weight_of_step(weights, step, steps)), norms, eps, n, cos, sin)
        parts = _attend(q, k, v, segments, backend, lists_n, sparsity)
        out_n.copy_(parts[0])
        lse_n.copy_(parts[1])
        del q, k, v, parts, lists_n  # before those of the next step are made
    return out, lse


def _empty_outputs(
    x: Tensor, weights: list[Tensor], norms: list[Tensor], lists: Tensor | None
) -> tuple[Tensor, Tensor]:
    (B, T, _), K = x.shape, len(norms[0])
    H = len(weights[0]) // K
    return x.new_empty(B, T, H, K), x.new_empty((B, H, T) if lists is None else (B, T, H), dtype=torch.float32)


@_qkv_attention.register_fake
def _(x, weights, norms, eps, cos, sin, segments, backend, lists, sparsity, n):
    return _empty_outputs(x, weights, norms, lists)


class _QKVAttention(torch.autograd.Function):
    """Attention of n key/value heads a step. Each step rounds the input's gradient to the input's dtype."""

    @staticmethod
    def forward(
        ctx, x, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm, cos, sin, segments, eps, backend, sparsity, n
    ):
        weights, norms = [q_weight, k_weight, v_weight], [q_norm, k_norm]
        heads = x, weights, norms, eps, cos, sin, segments
        lists = torch.ops.fathom.qkv_select(*heads, sparsity, n) if sparsity else None
        out, lse = torch.ops.fathom.qkv_attention(*heads, backend, lists, sparsity, n)
        ctx.save_for_backward(x, *weights, o_weight, *norms, cos, sin, out, lse, lists)
        ctx.segments, ctx.eps, ctx.backend, ctx.sparsity, ctx.n = segments, eps, backend, sparsity, n
        return F.linear(out.flatten(2), o_weight)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError("attention some heads at a time has no second derivative (create_graph=True)")
        x, *weights, o_weight, q_norm, k_norm, cos, sin, out, lse, lists = ctx.saved_tensors
        steps = len(weights[1]) // len(k_norm) // ctx.n
        norms = [weight.detach().requires_grad_() for weight in (q_norm, k_norm)]
        x_rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
        dx_rows, d_weights = torch.zeros_like(x_rows), [torch.empty_like(weight) for weight in weights]
        d_norms = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in norms]
        for step, o_weight_n in enumerate(o_weight.chunk(steps, dim=1)):
            weight = _weight_of_step(weights, step, steps)
            out_n, lse_n, lists_n = _heads_of_step(out, lse, lists, step, steps)
            kept_n = out_n.contiguous(), lse_n.contiguous()
            qkv = F.linear(x, weight).requires_grad_()
            with torch.enable_grad():
                heads = _split_heads(qkv, norms, ctx.eps, ctx.n, cos, sin)
            d_out = (dy @ o_weight_n).view(out_n.shape)
            q, k, v = (head.detach() for head in heads)
            d_heads = _attend_backward(d_out, q, k, v, *kept_n, ctx.segments, ctx.backend, lists_n, ctx.sparsity)
            d_qkv, *d_norms_n = torch.autograd.grad(heads, [qkv, *norms], d_heads)
            d_qkv_rows = d_qkv.flatten(0, 1)
            dx_rows.addmm_(d_qkv_rows, weight)
            parts = (d_qkv_rows.T @ x_rows).split([len(w) // steps for w in weights])
            for d_weight, part in zip(d_weights, parts):
                d_weight.chunk(steps)[step].copy_(part)
            for d_norm, part in zip(d_norms, d_norms_n):
                d_norm += part
            del qkv, heads, q, k, v, kept_n, lists_n, d_out  # before those of the next step are made
            del d_heads, d_qkv, d_qkv_rows, parts, part
        d_norms = [d.to(w.dtype) for d, w in zip(d_norms, norms)]
        return dx_rows.view_as(x), *d_weights, dy_rows.T @ out.flatten(0, 1).flatten(1), *d_norms, *[None] * 7


def qkv_attention(
    x_BTD: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    o_weight: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    segments: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str = "auto",
    sparsity: Sparsity | None = None,
    heads_at_a_time: int | None = None,
) -> Tensor:
    """Projections, q/k RMSNorm, RoPE, causal grouped-query attention and the output projection.

    Args:
        x_BTD: [B, T, D], of the weights' dtype.
        q_weight: [H K, D].
        k_weight, v_weight: [G K, D], G a divisor of H.
        o_weight: [D, H K].
        q_norm, k_norm: RMSNorm weights of each head, [K].
        cos, sin: float32, as `rope` takes them.
        segments, backend: as `attention` takes them.
        eps: of the two norms.
        sparsity: attention to chosen blocks alone, see `kernels.sparse_attention`; None: to everything.
        heads_at_a_time: key/value heads that one step works on, a divisor of G; None: all, and backward
            projects nothing again.

    Returns:
        [B, T, D].

    Raises:
        ValueError: heads_at_a_time does not divide G; an unavailable backend.
        RuntimeError: in backward, create_graph=True.
    """
    if heads_at_a_time is None:
        q, k, v = project_heads(x_BTD, q_weight, k_weight, v_weight, q_norm, k_norm, cos, sin, eps)
        if sparsity is None:
            out = attention(q, k, v, segments, backend=backend)
        else:
            blocks, block_size, window, _ = sparsity
            out = sparse_attention(q, k, v, segments, selected_blocks=blocks, block_size=block_size, window=window)
        return F.linear(out.flatten(2), o_weight)
    G = len(k_weight) // len(k_norm)
    if heads_at_a_time < 1 or G % heads_at_a_time:
        raise ValueError(f"heads_at_a_time must divide the {G} key/value heads, got {heads_at_a_time}")
    return _QKVAttention.apply(
        x_BTD, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm, cos, sin, segments,
        eps, choose_backend(backend, x_BTD.device), [] if sparsity is None else list(sparsity[:3]), heads_at_a_time,
    )  # fmt: skip


def qkv_attention_footprint(
    num_tokens: int,
    hidden_size: int,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    *,
    element_size: int = 2,
    backend: str = "auto",
    context_length: int,
    longest: int | None = None,
    sparsity: Sparsity | None = None,
    heads_at_a_time: int | None = None,
) -> Footprint:
    """What `qkv_attention` takes; `context_length` and `longest` as `kernels.attention.backward_workspace` takes them.

    Attention's own floating-point operations are those of `kernels.attention.attention_flops`.
    """
    T, steps = num_tokens, 1 if heads_at_a_time is None else num_key_value_heads // heads_at_a_time
    x, q, k = (element_size * size for size in (hidden_size, num_heads * head_dim, num_key_value_heads * head_dim))
    results = q + 4 * num_heads  # the output and the float32 log-sum-exp
    choices, forward_workspace, workspace = 0, 0, backward_workspace(backend, T, q, k, context_length, longest) // steps
    if sparsity is not None:
        choices = 2 * num_key_value_heads * sparsity.selected_blocks
        heads = num_heads // steps, num_key_value_heads // steps, head_dim
        _, forward_workspace, workspace = attention_footprint(T, *heads, sparsity, element_size=element_size)[:3]
    if heads_at_a_time is None:
        # q and k before and after their rotation, v, and 1 / rms of each head of q and k; then dout, dq, dk and dv
        saved = x + 2 * q + 3 * k + results + choices + 4 * (num_heads + num_key_value_heads)
        forward, backward = (
            max((3 * q + 4 * k) * T, (q + 2 * k + results + choices) * T + forward_workspace),
            (2 * q + 2 * k) * T,
        )
    else:
        # Forward holds the whole output, and one step's heads or the projection of all. Backward holds dx
        # and, of one step, qkv, q, k, v, out, dout, dq, dk and dv.
        saved = x + results + choices
        working = max((3 * q + 4 * k) // steps * T, (2 * q + 2 * k) // steps * T + forward_workspace)
        forward = max(working + (q + choices) * T, (results + choices + x) * T)
        backward = (x + (5 * q + 6 * k) // steps) * T
    flops = 2 * hidden_size * (2 * q + 2 * k) // element_size * T
    return Footprint(
        saved * T, forward, backward + workspace, results * T, flops, 2 * flops, (4 * q + 4 * k) * T, choices * T
    )
