"""A block's attention from its input to its output projection, all key/value heads at once or some at a time.

With n of G key/value heads at a time, q, k, v and their gradients take n / G of their memory: each step projects the
input to n key/value heads and their query heads, normalises and rotates these, and attends.

Kept for backward: the input, attention's output and log-sum-exp; with all heads at once also q and k before and after
their rotation, and v. Some heads at a time, backward projects each step's q, k and v again. Attention costs the same
as all heads at once; the matrix products are smaller.

N ranks may share each sequence (`HeadExchange`). Each step then projects this rank's tokens to n key/value heads of
every rank, and exchanges tokens for heads around attention: of 8 key/value heads and 2 ranks, one at a time, the first
step has heads 0 and 4. Attention's output is kept for this rank's tokens, log-sum-exp and chosen blocks for its heads.

Attention is to everything, to chosen blocks (`Sparsity`) or native sparse attention (`NSA`). The operation that makes
some heads at a time names it by `kind`, and by `sizes` that are its own:

    kind      branches     sizes
    full      1            none
    sparse    1            blocks a list, block size, window
    nsa       3            selected blocks, window
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention, backward_workspace, choose_backend
from kernels.common import Footprint, operation, use_triton
from kernels.head_exchange import HeadExchange
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.sparse_attention import NSA, Sparsity, nsa, nsa_attention, sparse_attention
from kernels.sparse_attention.sparse_attention import WORKSPACE_BYTES
from kernels.torch_internals import resolve_process_group


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


class _Division(NamedTuple):
    """Of heads: first among ranks, then each rank's into steps. Methods take tensors whose dimension `dim` is heads."""

    ranks: int
    steps: int

    def _view(self, x: Tensor, step: int, dim: int) -> Tensor:
        return x.unflatten(dim, (self.ranks, self.steps, -1)).select(dim + 1, step)

    def take(self, x, step: int, dim: int = 2):
        """One step's heads of x, those of the first rank first, contiguous; None of None."""
        return None if x is None else self._view(x, step, dim).flatten(dim, dim + 1).contiguous()

    def put(self, x: Tensor, step: int, heads: Tensor, dim: int = 2) -> None:
        """Write into x what `take` is to return."""
        self._view(x, step, dim).copy_(heads.unflatten(dim, (self.ranks, -1)))


def _divide(
    weights: Sequence[Tensor], norms: Sequence[Tensor], n: int, group_name: str | None
) -> tuple[HeadExchange, _Division, _Division]:
    """The exchange between the ranks of a group, and the division of all heads and of a rank's own heads."""
    exchange = HeadExchange(None if group_name is None else resolve_process_group(group_name))
    steps = len(weights[1]) // len(norms[1]) // exchange.size // n
    return exchange, _Division(exchange.size, steps), _Division(1, steps)


def _weight_of_step(weights: Sequence[Tensor], step: int, division: _Division) -> Tensor:
    """Rows of the q, k and v projections that make the n heads of one step, [(R + 2) n K, D]; R query heads a group."""
    return torch.cat([division.take(weight, step, 0) for weight in weights])


def _split_heads(qkv: Tensor, norms: Sequence[Tensor], eps: float, n: int, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """[B, T, (R + 2) n K] -> q [B, T, R n, K], k and v [B, T, n, K], normalised and rotated as attention takes them."""
    K = len(norms[0])
    heads = qkv.unflatten(-1, (-1, K)).split([qkv.shape[-1] // K - 2 * n, n, n], dim=2)
    q, k = rope(rms_norm(heads[0], norms[0], eps), rms_norm(heads[1], norms[1], eps), cos, sin)
    return [q, k, heads[2].contiguous()]


def _attend(
    kind: str, q, k, v, segments, backend: str, lists, sizes: list[int]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """Of each branch the output [B, T, H, K] and log-sum-exp [B, T, H]; and the lists, chosen where none are given."""
    ops, on_triton = torch.ops.fathom, use_triton("auto", q)
    if kind == "full":
        out, lse = ops.attention_forward(q, k, v, segments, backend)
        return [(out, lse.transpose(1, 2))], None
    if kind == "nsa":
        return nsa.nsa_forward(q, k, v, segments, lists, NSA(*sizes), backend, nsa.WORKSPACE_BYTES, on_triton)
    if lists is None:
        lists = ops.select_blocks(q, k, segments, *sizes, on_triton)
    return [ops.sparse_attention_forward(q, k, v, segments, lists, *sizes[1:], WORKSPACE_BYTES, on_triton)], lists


def _attend_backward(
    kind: str, dout, q, k, v, gates, outs, lses, segments, backend: str, lists, sizes: list[int]
) -> Sequence[Tensor]:
    """dq, dk, dv and, of NSA, the gradient of its gates."""
    ops, on_triton = torch.ops.fathom, use_triton("auto", q)
    if kind == "full":
        lse = lses[0].transpose(1, 2).contiguous()
        return ops.attention_backward(dout, q, k, v, outs[0], lse, segments, backend)
    if kind == "sparse":
        options = *sizes[1:], WORKSPACE_BYTES, on_triton
        return ops.sparse_attention_backward(dout, q, k, v, outs[0], lses[0], lists, segments, *options)
    kept = outs, lses, lists, segments
    return nsa.nsa_backward(dout, q, k, v, gates, *kept, sizes[1], backend, nsa.WORKSPACE_BYTES, on_triton)


@operation("fathom::qkv_attention", keepable="results", chooses="lists")
def _qkv_attention(
    x: Tensor, weights: list[Tensor], norms: list[Tensor], eps: float, cos: Tensor, sin: Tensor,
    segments: Tensor | None, lists: Tensor | None, kind: str, backend: str, sizes: list[int], n: int,
    group_name: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [B, T, D] -> outputs [branches, B, T, H, K], log-sum-exps [branches, B, T, H] and lists [B, T, G, blocks].

    Weights are those of q, k, v, norms those of q, k. Lists are int16 and chosen here where none are given. In a group
    of N ranks x and outputs have the tokens of this rank, log-sum-exps and lists its heads of T N tokens.
    """
    exchange, all_heads, own_heads = _divide(weights, norms, n, group_name)
    out, lse, chosen = _empty_results(x, weights, norms, lists, kind, sizes, exchange.size)
    for step in range(own_heads.steps):
        qkv = F.linear(x, _weight_of_step(weights, step, all_heads))
        heads = _split_heads(qkv, norms, eps, n * exchange.size, cos, sin)
        del qkv
        q, k, v = (exchange.to_heads(heads.pop(0)) for _ in range(3))
        parts, lists_n = _attend(kind, q, k, v, segments, backend, own_heads.take(lists, step), sizes)
        del q, k, v
        for branch, (out_n, lse_n) in enumerate(parts):
            all_heads.put(out[branch], step, exchange.to_tokens(out_n))
            own_heads.put(lse[branch], step, lse_n)
        if lists is None and lists_n is not None:
            own_heads.put(chosen, step, lists_n)
        del parts, out_n, lse_n, lists_n  # before those of the next step are made
    return out, lse, chosen


def _empty_results(x, weights, norms, lists, kind: str, sizes: list[int], ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    (B, T, _), K = x.shape, len(norms[0])
    H, G, branches, blocks = len(weights[0]) // K, len(weights[1]) // K, 1, 0
    if kind == "nsa":
        branches = nsa.BRANCHES
    if kind != "full" and lists is None:
        blocks = NSA(*sizes).chosen_blocks if kind == "nsa" else sizes[0]
    return (
        x.new_empty(branches, B, T, H, K),
        x.new_empty(branches, B, T * ranks, H // ranks, dtype=torch.float32),
        x.new_empty(B, T * ranks, G // ranks, blocks, dtype=torch.int16),
    )


@_qkv_attention.register_fake
def _(x, weights, norms, eps, cos, sin, segments, lists, kind, backend, sizes, n, group_name):
    exchange, _, _ = _divide(weights, norms, n, group_name)
    return _empty_results(x, weights, norms, lists, kind, sizes, exchange.size)


def _gated(outs: Sequence[Tensor], gates: Tensor | None) -> Tensor:
    """Attention's output from those of its branches."""
    return outs[0] if gates is None else torch.ops.fathom.nsa_gated_sum(list(outs), gates, use_triton("auto", gates))


class _QKVAttention(torch.autograd.Function):
    """Attention of n key/value heads a step. Each step rounds the input's gradient to the input's dtype."""

    @staticmethod
    def forward(
        ctx, x, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm, gates, cos, sin, segments, eps, kind, backend,
        sizes, n, group_name,
    ):  # fmt: skip
        weights, norms = [q_weight, k_weight, v_weight], [q_norm, k_norm]
        heads = x, weights, norms, eps, cos, sin, segments
        outs, lses, lists = torch.ops.fathom.qkv_attention(*heads, None, kind, backend, sizes, n, group_name)
        ctx.save_for_backward(x, *weights, o_weight, *norms, gates, cos, sin, lists, outs, lses)
        ctx.segments, ctx.eps, ctx.kind, ctx.backend, ctx.sizes = segments, eps, kind, backend, sizes
        ctx.n, ctx.group_name = n, group_name
        return F.linear(_gated([*outs], gates).flatten(2), o_weight)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError("attention some heads at a time has no second derivative (create_graph=True)")
        x, *weights, o_weight, q_norm, k_norm, gates, cos, sin, lists, outs, lses = ctx.saved_tensors
        norms = [weight.detach().requires_grad_() for weight in (q_norm, k_norm)]
        exchange, all_heads, own_heads = _divide(weights, norms, ctx.n, ctx.group_name)
        x_rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
        dx_rows, d_weights = torch.zeros_like(x_rows), [torch.empty_like(weight) for weight in (*weights, o_weight)]
        d_gates = None if gates is None else torch.empty_like(gates)
        d_norms = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in norms]
        for step in range(own_heads.steps):
            weight, o_weight_n = _weight_of_step(weights, step, all_heads), all_heads.take(o_weight, step, 1)
            outs_n, gates_n = [all_heads.take(out, step) for out in outs], all_heads.take(gates, step)
            all_heads.put(d_weights[3], step, dy_rows.T @ _gated(outs_n, gates_n).flatten(0, 1).flatten(1), 1)
            d_out = exchange.to_heads((dy @ o_weight_n).view(outs_n[0].shape))
            outs_n = [exchange.to_heads(out) for out in outs_n]
            gates_n = None if gates is None else exchange.to_heads(gates_n)
            lses_n, lists_n = [own_heads.take(lse, step) for lse in lses], own_heads.take(lists, step)
            qkv = F.linear(x, weight).requires_grad_()
            with torch.enable_grad():
                heads = _split_heads(qkv, norms, ctx.eps, ctx.n * exchange.size, cos, sin)
            edges = [torch.autograd.graph.get_gradient_edge(head) for head in heads]
            q, k, v = (exchange.to_heads(heads.pop(0).detach()) for _ in range(3))
            given = gates_n, outs_n, lses_n, ctx.segments, ctx.backend, lists_n, ctx.sizes
            d_heads = [exchange.to_tokens(d) for d in _attend_backward(ctx.kind, d_out, q, k, v, *given)]
            if d_gates is not None:
                all_heads.put(d_gates, step, d_heads.pop())
            d_qkv, *d_norms_n = torch.autograd.grad(edges, [qkv, *norms], d_heads)
            d_qkv_rows = d_qkv.flatten(0, 1)
            dx_rows.addmm_(d_qkv_rows, weight)
            parts = (d_qkv_rows.T @ x_rows).split([len(w) // own_heads.steps for w in weights])
            for d_weight, part in zip(d_weights, parts):
                all_heads.put(d_weight, step, part, 0)
            for d_norm, part in zip(d_norms, d_norms_n):
                d_norm += part
            del qkv, heads, q, k, v, outs_n, lses_n, gates_n, lists_n, given, d_out  # before those of the next step
            del d_heads, d_qkv, d_qkv_rows, parts, part
        d_norms = [d.to(w.dtype) for d, w in zip(d_norms, norms)]
        return dx_rows.view_as(x), *d_weights, *d_norms, d_gates, *[None] * 9


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
    sparsity: Sparsity | NSA | None = None,
    gates: Tensor | None = None,
    heads_at_a_time: int | None = None,
    exchange: HeadExchange | None = None,
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
        sparsity: attention to chosen blocks alone, or NSA, see `kernels.sparse_attention`; None: to everything.
        gates: of NSA, the logits [B, T, H, 3] of its branches' gates.
        heads_at_a_time: key/value heads that one step works on, a divisor of G, or of G / N where N ranks share each
            sequence; None: all, and backward projects nothing again.
        exchange: between the ranks that share each sequence: x_BTD, cos, sin and gates have this rank's tokens,
            segments are of whole sequences. None: nothing is shared.

    Returns:
        [B, T, D].

    Raises:
        ValueError: heads_at_a_time does not divide the key/value heads, or the ranks do not divide them where it is
            given; an exchange that parts query heads that choose blocks together; an unavailable backend.
        RuntimeError: in backward, create_graph=True.
    """
    exchange = exchange or HeadExchange(None)
    if heads_at_a_time is None:
        q, k, v = project_heads(x_BTD, q_weight, k_weight, v_weight, q_norm, k_norm, cos, sin, eps)
        q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        gates = None if gates is None else exchange.to_heads(gates)
        if sparsity is not None and q.shape[2] // k.shape[2] != len(q_weight) // len(k_weight):
            raise ValueError("query heads of one key/value head choose blocks together; share between fewer ranks")
        if sparsity is None:
            out = attention(q, k, v, segments, backend=backend)
        elif isinstance(sparsity, NSA):
            out = nsa_attention(q, k, v, gates, segments, **sparsity._asdict(), backend=backend)
        else:
            blocks, block_size, window, _ = sparsity
            out = sparse_attention(q, k, v, segments, selected_blocks=blocks, block_size=block_size, window=window)
        del q, k, v  # before the projection is made
        out = exchange.to_tokens(out)
        return F.linear(out.flatten(2), o_weight)
    G = len(k_weight) // len(k_norm)
    own = G // exchange.size
    if G % exchange.size:
        raise ValueError(f"{exchange.size} ranks do not divide the {G} key/value heads; attend by all heads at once")
    if heads_at_a_time < 1 or own % heads_at_a_time:
        raise ValueError(f"heads_at_a_time must divide a rank's {own} key/value heads, got {heads_at_a_time}")
    kind, sizes = "full", []
    if isinstance(sparsity, NSA):
        kind, sizes = "nsa", [*sparsity]
    elif sparsity is not None:
        kind, sizes = "sparse", list(sparsity[:3])
    return _QKVAttention.apply(
        x_BTD, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm, gates, cos, sin, segments,
        eps, kind, choose_backend(backend, x_BTD.device), sizes, heads_at_a_time,
        None if exchange.group is None else exchange.group.group_name,
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
    sparsity: Sparsity | NSA | None = None,
    heads_at_a_time: int | None = None,
    num_ranks: int = 1,
) -> Footprint:
    """What `qkv_attention` takes; `context_length` and `longest` as `kernels.attention.backward_workspace` takes them.

    Attention's own floating-point operations are those of `kernels.attention.attention_flops`.

    Args:
        num_tokens: of this rank.
        num_ranks: those that share each sequence, a divisor of the key/value heads.
    """
    T, N, own_heads = num_tokens, num_ranks, num_key_value_heads // num_ranks
    steps = 1 if heads_at_a_time is None else own_heads // heads_at_a_time
    x, q, k = (element_size * size for size in (hidden_size, num_heads * head_dim, num_key_value_heads * head_dim))
    results = q + 4 * num_heads  # the output and the float32 log-sum-exp
    of_step = q // N // steps, k // N // steps
    workspace = backward_workspace(
        backend, T * N, *of_step, context_length, longest, num_key_value_heads=own_heads // steps
    )
    choices, forward_workspace = 0, 0
    if sparsity is not None:
        attention = sparsity.footprint(
            T * N, num_heads // N // steps, own_heads // steps, head_dim, element_size=element_size, backend=backend,
            context_length=context_length, longest=longest,
        )  # fmt: skip
        choices = N * steps * attention.choice_bytes_per_token
        results = N * steps * attention.kept_bytes_per_token - choices
        forward_workspace, workspace = attention.forward_workspace_bytes, attention.backward_workspace_bytes
    # NSA has three outputs, and makes of them the one that the output projection takes; and logits of its gates.
    has_gates = isinstance(sparsity, NSA)
    outs, gated, gates = (3 * q, q, 3 * num_heads * element_size) if has_gates else (q, 0, 0)
    qkv = q + 2 * k
    if heads_at_a_time is None:
        # q and k before and after their rotation, v, and 1 / rms of each head of q and k; then dout, dq, dk and dv.
        # Where ranks share sequences the output projection takes this rank's tokens, attention's backward its heads.
        gated = q if N > 1 else gated
        saved = x + 2 * q + 3 * k + results + choices + 4 * (num_heads + num_key_value_heads) + gated + gates
        forward, backward = (
            max((3 * q + 4 * k) * T, (q + 2 * k + results + choices + gates) * T + forward_workspace),
            (2 * q + 2 * k - gated + gates) * T,  # the projection's input is gone by then
        )
    else:
        # Forward holds the whole output, and one step's heads or the projection of all. Backward holds dx
        # and, of one step, qkv, q, k, v, out, dout, dq, dk and dv. Ranks that share sequences hold what they send, too.
        saved = x + results + choices + gates
        attending = (qkv + outs + choices) // steps * T + forward_workspace
        working = max(max(3 * q + 4 * k, (outs + 2 * q) * (N > 1)) // steps * T, attending)
        forward = max(working + (outs + choices + gates) * T, (results + choices + gates + gated + x) * T)
        backward = (x + gates + (3 * qkv + q + outs) // steps) * T
    flops = 2 * hidden_size * (2 * q + 2 * k + gates) // element_size * T
    return Footprint(
        saved * T, forward, backward + workspace, results * T, flops, 2 * flops, (4 * q + 4 * k) * T, choices * T
    )
