"""Backward of the gated delta rule.

Stretches run from last to first. Each makes the chunks' matrices again, and all states from the
kept ones, pieces in parallel. dS is the gradient of the state after a chunk, dS' of the state
before the chunk:

    y    = (I + A)^-T (((q k^T) D)^T dout + exp(G_last - G) k dS)
    dv   = beta y
    dS'  = exp(G_last) dS + (exp(G) q)^T dout - (exp(G) k)^T dv
    dA   = -y new^T,  d((q k^T) D) = dout new^T

and the other gradients by the chain rule. G multiplies queries, and keys as rows, by exp(G), keys
as columns by exp(-G). Its gradient is q . dq plus k . dk of rows, less k . dk of columns; at the
last token, also S . dS after it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..attention.documents import as_bytes
from ..common import aligned, operation
from .chunks import (
    CHUNK,
    as_matrix,
    describe_inputs,
    describe_matrices,
    launch_beside,
    load_block,
    load_gates,
    prepared,
    scan_options,
    scan_states,
    sizes,
    store_block,
    stretches_of,
    tiles_of,
)

GRADIENT_KEYS = 32  # columns of keys at a time


@triton.jit
def _reverse_scan_kernel(
    d_out_d, q_d, k_d, inverse_d, scores_d, gates_ptr, parts_ptr, d_final_ptr, d_initial_ptr,
    carried_ptr, carry_ptr, y_d, d_states_d, H: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Carries the gradient of BLOCK_V columns of a head's state back through a part.

    It writes y, and the gradient of the state after each chunk. `carried` comes from the stretch
    that follows, and `carry` goes to the one before.
    """
    part = parts_ptr + 7 * tl.program_id(0)
    head = tl.program_id(1) // (V // BLOCK_V)
    column = tl.program_id(1) % (V // BLOCK_V) * BLOCK_V
    start = tl.load(part)
    stop = tl.load(part + 1)
    chunk = tl.load(part + 2)
    document = tl.load(part + 5)
    i = tl.arange(0, C)
    c = tl.arange(0, K)
    d = column + tl.arange(0, BLOCK_V)
    own_state = head * (K * V) + (d[:, None] * K + c[None, :])
    public_state = (document * H + head) * (K * V) + (d[:, None] + c[None, :] * V)
    dS = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    if tl.load(part + 6) == 0:
        dS = tl.load(carried_ptr + own_state)
    elif d_final_ptr is not None:
        dS = tl.load(d_final_ptr + public_state)

    num_chunks = ((stop - start + C - 1) // C).to(tl.int32)
    for step in tl.range(0, num_chunks, num_stages=STAGES):
        n = num_chunks - 1 - step
        row = (chunk + n) * H + head
        first = start + n * C
        q = load_block(q_d, first, head // R * K, H // R * K, C, K, stop)
        k = load_block(k_d, first, head // R * K, H // R * K, C, K, stop)
        # [BLOCK_V, C]
        d_out = tl.trans(load_block(d_out_d, first, head * V + column, H * V, C, BLOCK_V, stop))
        inverse = load_block(inverse_d, row * C, 0, C, C, C)
        scores = load_block(scores_d, row * C, 0, C, C, C)
        total, beta, last = load_gates(gates_ptr, row, C)

        operand = dS.to(k.dtype)
        store_block(d_states_d, row * V + column, 0, operand, K)
        d_new = tl.dot(operand, tl.trans(k), input_precision="ieee") * tl.exp(last - total)[None, :]
        d_new = tl.dot(d_out, scores, d_new, input_precision="ieee")
        y = tl.dot(d_new.to(k.dtype), inverse, input_precision="ieee")
        store_block(y_d, row * C, column, tl.trans(y.to(k.dtype)), V)
        since = tl.exp(total)
        dS = tl.dot(
            (y * (-beta * since)[None, :]).to(k.dtype), k, dS * tl.exp(last), input_precision="ieee"
        )
        since = tl.where(i < stop - start - n * C, since, 0.0)
        dS = tl.dot((d_out * since[None, :]).to(k.dtype), q, dS, input_precision="ieee")

    if tl.load(part + 3) >= 0:
        tl.store(carry_ptr + own_state, dS)
    elif d_initial_ptr is not None:
        tl.store(d_initial_ptr + public_state, dS)


@triton.jit
def _gradients_kernel(
    d_out_d, new_d, y_d, q_d, k_d, states_d, d_states_d, v_ptr, gates_ptr, chunks_ptr, dq_ptr,
    dk_ptr, dv_ptr, dg_ptr, d_beta_ptr, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes all gradients of one chunk for the value heads of one key head, BLOCK_K columns of
    keys at a time."""
    chunk = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    start = tl.load(chunks_ptr + 2 * chunk)
    stop = tl.load(chunks_ptr + 2 * chunk + 1)
    i = tl.arange(0, C)
    c = tl.arange(0, BLOCK_K)
    d = tl.arange(0, V)
    is_token = i < stop - start
    keys = (start * G + key_head) * K + (i[:, None] * (G * K) + c[None, :])
    for r in range(R):
        head = key_head * R + r
        row = (chunk * (G * R) + head).to(tl.int32)
        gates = start * (G * R) + head + i * (G * R)
        total, beta, last = load_gates(gates_ptr, row, C)
        since, rest = tl.exp(total), tl.exp(last - total)

        # Gradients of the scores and of A, from the output's gradient and from y.
        d_out = load_block(d_out_d, start, head * V, G * R * V, C, V, stop)
        new = load_block(new_d, row * C, 0, V, C, V)
        y = load_block(y_d, row * C, 0, V, C, V)
        values = (start * (G * R) + head) * V + (i[:, None] * (G * R * V) + d[None, :])
        v = tl.load(v_ptr + values, mask=is_token[:, None], other=0.0)
        d_beta = tl.sum(y.to(tl.float32) * v.to(tl.float32), axis=1)
        tl.store(dv_ptr + values, (y * beta[:, None]).to(v.dtype), mask=is_token[:, None])
        is_past = (i[:, None] >= i[None, :]) & is_token[:, None]
        decay = tl.exp(tl.where(is_past, total[:, None] - total[None, :], float("-inf")))
        d_scores = (tl.dot(d_out, tl.trans(new), input_precision="ieee") * decay).to(v.dtype)
        decay = tl.where(i[:, None] > i[None, :], decay, 0.0)
        d_A = tl.dot(y, tl.trans(new), input_precision="ieee") * decay
        d_scores_t = tl.trans(d_scores)
        d_A_t = tl.trans((-beta[:, None] * d_A).to(v.dtype))
        d_A = d_A.to(v.dtype)

        # `left` is what y does to a key on its own row, but for -beta; the rest of dk goes to keys
        # as columns.
        d_total = tl.zeros([C], tl.float32)
        held = tl.zeros([C], tl.float32)
        d_last = 0.0
        for block in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            q = load_block(q_d, start, key_head * K + block, G * K, C, BLOCK_K, stop)
            k = load_block(k_d, start, key_head * K + block, G * K, C, BLOCK_K, stop)
            S = load_block(states_d, row * V, block, K, V, BLOCK_K)
            dS = load_block(d_states_d, row * V, block, K, V, BLOCK_K)
            is_sum = (is_token & (r > 0))[:, None]
            dq_before = tl.load(dq_ptr + keys + block, mask=is_sum, other=0.0)
            dk_before = tl.load(dk_ptr + keys + block, mask=is_sum, other=0.0)
            d_last += tl.exp(last) * tl.sum(
                tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0
            )
            dq = tl.dot(
                d_scores,
                k,
                tl.dot(d_out, S, input_precision="ieee") * since[:, None],
                input_precision="ieee",
            )
            d_total += tl.sum(dq * q, axis=1)
            left = tl.dot(y, S, input_precision="ieee") * since[:, None]
            left = tl.dot(d_A, k, left, input_precision="ieee")
            held += tl.sum(left * k, axis=1)
            dk = tl.dot(new, dS, input_precision="ieee") * rest[:, None]
            d_last += tl.sum(tl.sum(dk * k, axis=1), axis=0)
            dk = tl.dot(d_scores_t, q, dk, input_precision="ieee")
            dk = tl.dot(d_A_t, k, dk, input_precision="ieee")
            d_total -= tl.sum(dk * k, axis=1)
            dk -= beta[:, None] * left
            tl.store(dq_ptr + keys + block, (dq + dq_before).to(k.dtype), mask=is_token[:, None])
            tl.store(dk_ptr + keys + block, (dk + dk_before).to(k.dtype), mask=is_token[:, None])

        d_total = tl.where(is_token, d_total - beta * held, 0.0)
        tl.store(d_beta_ptr + gates, d_beta - held, mask=is_token)
        tl.store(dg_ptr + gates, d_last + tl.cumsum(d_total, axis=0, reverse=True), mask=is_token)


def _empty_gradients(d_out, d_final, q, k, v, g, beta, kept, initial, segments):
    like = q, k, v, g, beta, g.new_empty(0) if initial is None else initial
    return tuple(x.new_empty(x.shape) for x in like)


class _Scratch(NamedTuple):
    """Workspaces of a stretch, with a row for each chunk and value head."""

    new: Tensor  # [chunks, H, CHUNK, V]
    states: Tensor  # [chunks, H, V, K]: before each chunk
    y: Tensor  # [chunks, H, CHUNK, V]
    d_states: Tensor  # [chunks, H, V, K]: after each chunk


def _empty_scratch(k: Tensor, v: Tensor, num_chunks: int) -> _Scratch:
    H, V = v.shape[2:]
    rows = num_chunks, H, CHUNK, V
    states = num_chunks, H, V, k.shape[3]
    return _Scratch(*(k.new_empty(shape) for shape in (rows, states, rows, states)))


def _described(rows: Tensor, states: Tensor, block_v: int) -> list[Tensor | TensorDescriptor]:
    """Describes a pair of workspaces for a scan, which writes `block_v` columns of V."""
    V, K = states.shape[2:]
    return [as_matrix(rows, V, CHUNK, block_v), as_matrix(states, K, block_v, K)]


def _launch_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, chunks: Tensor,
    scratch: _Scratch, gradients: Sequence[Tensor],
) -> None:  # fmt: skip
    """Writes the gradients of q, k, v, g and beta at the tokens of `chunks` [chunks, 2]."""
    G, K = k.shape[2:]
    H, V = v.shape[2:]
    tiles = tiles_of(k.device)
    # A single step of the loop over keys takes more memory than two.
    block_k = min(GRADIENT_KEYS, K // 2 if tiles.by_pointer else K)
    matrices = [
        as_matrix(d_out, H * V, CHUNK, V),
        *(as_matrix(x, V, CHUNK, V) for x in (scratch.new, scratch.y)),
        *(as_matrix(x, G * K, CHUNK, block_k) for x in (q, k)),
        *(as_matrix(x, K, V, block_k) for x in (scratch.states, scratch.d_states)),
    ]
    _gradients_kernel[(len(chunks), G)](
        *matrices, v, gates, chunks, *gradients, G=G, BLOCK_K=block_k, **sizes(k, v),
        STAGES=tiles.gradient_stages, num_warps=tiles.warps,
    )  # fmt: skip


@operation("fathom::delta_rule_backward", _empty_gradients)
def delta_rule_backward(
    d_out: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    kept: Tensor, initial: Tensor | None, segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v, g, beta and the initial states (empty without these).

    Arguments are as `delta_rule` takes them, and what its forward keeps; `d_final` is the gradient
    of the final states, [documents, H, K, V].
    """
    d_out, q, k, v, g, beta = (aligned(x) for x in (d_out, q, k, v, g, beta))
    initial, d_final = (x if x is None else x.contiguous() for x in (initial, d_final))
    *gradients, d_initial = _empty_gradients(
        d_out, d_final, q, k, v, g, beta, kept, initial, segments
    )
    carry, carried = (g.new_empty(kept.shape[1:]) for _ in range(2))
    programs, options = scan_options(k, v)
    block_v = options["BLOCK_V"]
    inputs = describe_inputs(q, k, v, block_v)
    d_out_d = as_matrix(d_out, v.shape[2] * v.shape[3], CHUNK, block_v)
    stretches = stretches_of(q.shape[0], q.shape[1], as_bytes(segments), q.device)[::-1]
    for stretch, chunks, launches in prepared(q, k, v, g, beta, stretches):
        matrices = describe_matrices(chunks)
        scratch = _empty_scratch(k, v, len(stretch.chunks))
        states_scan = scan_states(
            k, v, inputs, matrices, stretch.pieces, initial, kept, None, None,
            *_described(scratch.new, scratch.states, block_v),
        )  # fmt: skip
        reverse_scan = functools.partial(
            _reverse_scan_kernel[(len(stretch.parts), programs)], d_out_d, *inputs[:2], *matrices,
            stretch.parts, d_final, None if initial is None else d_initial, carried, carry,
            *_described(scratch.y, scratch.d_states, block_v), **options,
        )  # fmt: skip
        launch_beside(q.device, reverse_scan, [states_scan, *launches])
        _launch_gradients(d_out, q, k, v, chunks.gates, stretch.chunks, scratch, gradients)
        carry, carried = carried, carry
        del chunks, launches, matrices, scratch, states_scan, reverse_scan  # before the next exist
    return *gradients, d_initial
