"""A block's attention from its input to its output projection, all key/value heads at once or some at a time.

With n of G key/value heads at a time, q, k, v and their gradients take n / G of their memory: each step projects the
input to n key/value heads and their query heads, normalises and rotates these, and attends. Models differ in whether
the projections have biases, and whether heads are normalised.

Kept for backward: the input, attention's output and log-sum-exp; with all heads at once also v, q and k after their
rotation and, if they are normalised, before it. Some heads at a time, backward projects each step's q, k and v again.
Attention costs the same as all heads at once; the matrix products are smaller.

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

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention.full import attention, backward_workspace, choose_backend
from .attention.nsa import nsa
from .attention.nsa.nsa import NSA, nsa_attention
from .attention.sparse.sparse_attention import WORKSPACE_BYTES, Sparsity, sparse_attention
from .common import operation, use_triton
from .head_exchange import HeadExchange
from .parts import Footprint
from .rms_norm import rms_norm
from .rope import rope
from .torch_internals import resolve_process_group


class QKVParameters(NamedTuple):
    """What makes q, k and v of the input."""

    weights: list[Tensor]  # of q [H K, D], k [G K, D] and v [G K, D]
    biases: list[Tensor]  # [H K], [G K] and [G K], or none
    norms: list[Tensor]  # RMSNorm weights of each query and of each key head, [K] both, or none
    eps: float  # of the norms

    def with_query_rows(self, count: int) -> "QKVParameters":
        """The same with the first `count` rows alone of what makes q."""
        weights, biases = ([rows[:count] for rows in of_qkv[:1]] + of_qkv[1:] for of_qkv in (self.weights, self.biases))
        return QKVParameters(weights, biases, self.norms, self.eps)


def _normalised(q: Tensor, k: Tensor, norms: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    return (rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)) if norms else (q, k)


def project_heads(x_BTD: Tensor, parameters: QKVParameters, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, K], k and v [B, T, G, K] of all heads, normalised and rotated; arguments as `qkv_attention`."""
    weights, biases, norms, eps = parameters
    K = 2 * cos.shape[-1]
    q, k, v = (F.linear(x_BTD, w, b).unflatten(-1, (-1, K)) for w, b in zip(weights, biases or [None] * 3))
    return *rope(*_normalised(q, k, norms, eps), cos, sin), v


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


def _divide(num_heads: int, n: int, group_name: str | None) -> tuple[HeadExchange, _Division, _Division]:
    """The exchange between the ranks of a group, and the division of all heads and of a rank's own heads.

    Args:
        num_heads: key/value heads of all ranks.
        n: of a rank in one step.
    """
    exchange = HeadExchange(None if group_name is None else resolve_process_group(group_name))
    steps = num_heads // exchange.size // n
    return exchange, _Division(exchange.size, steps), _Division(1, steps)


def _rows_of_step(parameters: Sequence[Tensor], step: int, division: _Division) -> Tensor | None:
    """Rows of the q, k and v projections that make the n heads of one step, [(R + 2) n K, D]; R query heads a group.

    Of their biases [(R + 2) n K]; None where there are none.
    """
    return torch.cat([division.take(rows, step, 0) for rows in parameters]) if parameters else None


def _split_heads(qkv: Tensor, norms: Sequence[Tensor], eps: float, n: int, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """[B, T, (R + 2) n K] -> q [B, T, R n, K], k and v [B, T, n, K], normalised and rotated as attention takes them."""
    K = 2 * cos.shape[-1]
    heads = qkv.unflatten(-1, (-1, K)).split([qkv.shape[-1] // K - 2 * n, n, n], dim=2)
    q, k = rope(*_normalised(heads[0], heads[1], norms, eps), cos, sin)
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
    x: Tensor, weights: list[Tensor], biases: list[Tensor], norms: list[Tensor], eps: float, cos: Tensor, sin: Tensor,
    segments: Tensor | None, lists: Tensor | None, kind: str, backend: str, sizes: list[int], n: int,
    group_name: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [B, T, D] -> outputs [branches, B, T, H, K], log-sum-exps [branches, B, T, H] and lists [B, T, G, blocks].

    Weights and biases are those of q, k, v, norms those of q, k; of biases and norms there may be none. Lists are
    int16 and chosen here where none are given. In a group of N ranks x and outputs have the tokens of this rank,
    log-sum-exps and lists its heads of T N tokens.
    """
    K = 2 * cos.shape[-1]
    exchange, all_heads, own_heads = _divide(len(weights[1]) // K, n, group_name)
    out, lse, chosen = _empty_results(x, weights, K, lists, kind, sizes, exchange.size)
    for step in range(own_heads.steps):
        qkv = F.linear(x, _rows_of_step(weights, step, all_heads), _rows_of_step(biases, step, all_heads))
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


def _empty_results(x, weights, K: int, lists, kind: str, sizes: list[int], ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    B, T, _ = x.shape
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
def _(x, weights, biases, norms, eps, cos, sin, segments, lists, kind, backend, sizes, n, group_name):
    K = 2 * cos.shape[-1]
    exchange, _, _ = _divide(len(weights[1]) // K, n, group_name)
    return _empty_results(x, weights, K, lists, kind, sizes, exchange.size)


def _gated(outs: Sequence[Tensor], gates: Tensor | None) -> Tensor:
    """Attention's output from those of its branches."""
    return outs[0] if gates is None else torch.ops.fathom.nsa_gated_sum(list(outs), gates, use_triton("auto", gates))


class _QKVAttention(torch.autograd.Function):
    """Attention of n key/value heads a step. Each step rounds the input's gradient to the input's dtype."""

    @staticmethod
    def forward(ctx, x, o_weight, gates, cos, sin, segments, eps, kind, backend, sizes, n, group_name, counts, *qkv):
        """qkv: as many weights, biases and norms as `counts` says."""
        weights, biases, norms = _split(qkv, counts)
        heads = x, weights, biases, norms, eps, cos, sin, segments
        outs, lses, lists = torch.ops.fathom.qkv_attention(*heads, None, kind, backend, sizes, n, group_name)
        ctx.save_for_backward(x, o_weight, gates, cos, sin, lists, outs, lses, *qkv)
        ctx.segments, ctx.eps, ctx.kind, ctx.backend, ctx.sizes = segments, eps, kind, backend, sizes
        ctx.n, ctx.group_name, ctx.counts = n, group_name, counts
        return F.linear(_gated([*outs], gates).flatten(2), o_weight)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError("attention some heads at a time has no second derivative (create_graph=True)")
        x, o_weight, gates, cos, sin, lists, outs, lses, *qkv_parameters = ctx.saved_tensors
        weights, biases, norms = _split(qkv_parameters, ctx.counts)
        norms = [weight.detach().requires_grad_() for weight in norms]
        exchange, all_heads, own_heads = _divide(len(weights[1]) // (2 * cos.shape[-1]), ctx.n, ctx.group_name)
        x_rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
        dx_rows, d_o_weight = torch.zeros_like(x_rows), torch.empty_like(o_weight)
        d_weights, d_biases = ([torch.empty_like(rows) for rows in parameters] for parameters in (weights, biases))
        d_gates = None if gates is None else torch.empty_like(gates)
        d_norms = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in norms]
        for step in range(own_heads.steps):
            weight, o_weight_n = _rows_of_step(weights, step, all_heads), all_heads.take(o_weight, step, 1)
            outs_n, gates_n = [all_heads.take(out, step) for out in outs], all_heads.take(gates, step)
            all_heads.put(d_o_weight, step, dy_rows.T @ _gated(outs_n, gates_n).flatten(0, 1).flatten(1), 1)
            d_out = exchange.to_heads((dy @ o_weight_n).view(outs_n[0].shape))
            outs_n = [exchange.to_heads(out) for out in outs_n]
            gates_n = None if gates is None else exchange.to_heads(gates_n)
            lses_n, lists_n = [own_heads.take(lse, step) for lse in lses], own_heads.take(lists, step)
            qkv = F.linear(x, weight, _rows_of_step(biases, step, all_heads)).requires_grad_()
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
            lengths = [len(w) // own_heads.steps for w in weights]
            parts = (d_qkv_rows.T @ x_rows).split(lengths)
            for d_weight, part in zip(d_weights, parts):
                all_heads.put(d_weight, step, part, 0)
            for d_bias, part in zip(d_biases, d_qkv_rows.sum(0).split(lengths) if biases else ()):
                all_heads.put(d_bias, step, part, 0)
            for d_norm, part in zip(d_norms, d_norms_n):
                d_norm += part
            del qkv, heads, q, k, v, outs_n, lses_n, gates_n, lists_n, given, d_out  # before those of the next step
            del d_heads, d_qkv, d_qkv_rows, parts, part
        d_norms = [d.to(w.dtype) for d, w in zip(d_norms, norms)]
        return dx_rows.view_as(x), d_o_weight, d_gates, *[None] * 10, *d_weights, *d_biases, *d_norms


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Lists of so many each: of the lengths 3, 0 and 2 the first three, none, and the last two."""
    remaining = iter(tensors)
    return [list(itertools.islice(remaining, count)) for count in counts]


def qkv_attention(
    x_BTD: Tensor,
    parameters: QKVParameters,
    o_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    segments: Tensor | None = None,
    *,
    backend: str = "auto",
    sparsity: Sparsity | NSA | None = None,
    gates: Tensor | None = None,
    heads_at_a_time: int | None = None,
    exchange: HeadExchange | None = None,
) -> Tensor:
    """Projections, q/k RMSNorm, RoPE, causal grouped-query attention and the output projection.

    Args:
        x_BTD: [B, T, D], of the weights' dtype.
        parameters: of H query heads and G key/value heads, a divisor of H.
        o_weight: [D, H K].
        cos, sin: float32, as `rope` takes them.
        segments, backend: as `attention` takes them.
        sparsity: attention to chosen blocks alone, or NSA, see `kernels.attention.sparse`; None: to everything.
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
    weights, biases, norms, eps = parameters
    if heads_at_a_time is None:
        q, k, v = project_heads(x_BTD, parameters, cos, sin)
        q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        gates = None if gates is None else exchange.to_heads(gates)
        if sparsity is not None and q.shape[2] // k.shape[2] != len(weights[0]) // len(weights[1]):
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
    G = len(weights[1]) // (2 * cos.shape[-1])
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
        x_BTD, o_weight, gates, cos, sin, segments, eps, kind, choose_backend(backend, x_BTD.device), sizes,
        heads_at_a_time, None if exchange.group is None else exchange.group.group_name,
        (len(weights), len(biases), len(norms)), *weights, *biases, *norms,
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
    has_norms: bool = True,
) -> Footprint:
    """What `qkv_attention` takes; `context_length` and `longest` as `backward_workspace` takes them.

    Attention's own floating-point operations are those of `kernels.attention.full.attention_flops`.

    Args:
        num_tokens: of this rank.
        num_ranks: those that share each sequence, a divisor of the key/value heads.
        has_norms: whether heads are normalised. Biases take nothing worth counting.
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
    projecting = 2 * q + 3 * k + (q + k) * has_norms  # q, k and v, normalised, and rotated
    if longest is not None:  # of packed documents a call's output, too, before it is put beside the others
        projecting = max(projecting, 3 * q + 2 * k)
    if N > 1:  # q, k and v as q is sent; all heads at once also as v is sent, when the first two have arrived
        projecting = max(projecting, 3 * q + 2 * k, (2 * q + 5 * k) * (heads_at_a_time is None))
    if heads_at_a_time is None:
        # q and k after their rotation and v; of normalised heads q and k before it, and 1 / rms of each head of q and
        # k; then dout, dq, dk and dv.
        # Where ranks share sequences the output projection takes this rank's tokens, attention's backward its heads.
        gated = q if N > 1 else gated
        saved = x + qkv + results + choices + gated + gates
        saved += (q + k + 4 * (num_heads + num_key_value_heads)) * has_norms
        forward, backward = (
            max(projecting * T, (q + 2 * k + results + choices + gates) * T + forward_workspace),
            (2 * q + 2 * k - gated + gates) * T,  # the projection's input is gone by then
        )
    else:
        # Forward holds the whole output, and one step's heads or the projection of all. Backward holds dx
        # and, of one step, qkv, q, k, v, out, dout, dq, dk and dv. Ranks that share sequences hold what they send, too.
        saved = x + results + choices + gates
        attending = (qkv + outs + choices) // steps * T + forward_workspace
        working = max(max(projecting, (outs + 2 * q) * (N > 1)) // steps * T, attending)
        forward = max(working + (outs + choices + gates) * T, (results + choices + gates + gated + x) * T)
        backward = (x + gates + (3 * qkv + q + outs) // steps) * T
    flops = 2 * hidden_size * (2 * q + 2 * k + gates) // element_size * T
    return Footprint(
        saved * T,
        forward,
        backward + workspace,
        results * T,
        flops,
        2 * flops,
        2 * (q + k) * (1 + has_norms) * T,
        choices * T,
    )
