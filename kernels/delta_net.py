"""Gated delta rule: linear attention whose state forgets, and replaces what it held for a key.

Each value head has a state S [K, V], zero at the start of a document. With a log decay g <= 0 and a strength beta,
a token's key k, value v and query q do

    S <- exp(g) S;    S <- S + beta k (v - S^T k)^T;    out = S^T q

Key head j serves value heads j R to j R + R - 1. Tokens of a document are processed in chunks of 64. With G the sum of
g from the chunk's start to a token, itself included, and D_ij = exp(G_i - G_j) for i >= j, else 0:

    A_ij = beta_i (k_i . k_j) D_ij for i > j        strictly lower: what a token removes of those before it
    new  = (I + A)^-1 beta (v - exp(G) k S)         [64, V]: what each token adds along its key
    out  = exp(G) q S + ((q k^T) D) new
    S    = exp(G_last) S + (exp(G_last - G) k)^T new

Exponents are differences of G, and none is positive: nothing overflows, however fast a state decays.

Three kinds of work, in stretches of 256 chunks at a time, so that memory does not grow with the sequence:

    chunks, in parallel    G, (I + A)^-1 and the scores (q k^T) D
    scan, one by one       S^T [64 of V, K] in float32 registers, the output
    gradients, in parallel of q, k, v, g and beta, from states before each chunk and gradients of states after it

Backward goes through the stretches from last to first. In each it makes the chunks' matrices again, then all states
from the kept ones, piece by piece in parallel. With dS of the state after a chunk, and dS' of the state before it:

    y    = (I + A)^-T (((q k^T) D)^T dout + exp(G_last - G) k dS)
    dv   = beta y
    dS'  = exp(G_last) dS + (exp(G) q)^T dout - (exp(G) k)^T dv
    dA   = -y new^T,  d((q k^T) D) = dout new^T

and the other gradients by the chain rule. G multiplies queries, and keys as rows, by exp(G), keys as columns by
exp(-G). Its gradient is q . dq plus k . dk of rows, less k . dk of columns; at the last token, also S . dS after it.

Kept for backward: q, k, v, g, beta, and the state every 64 chunks, float32, H K V / 1024 bytes per token. No sum uses
atomics: every run gives the same bits.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention.documents import as_bytes, check_documents, document_bounds
from .common import operation, use_triton
from .parts import Footprint

CHUNK = 64  # tokens
PIECE = 64  # chunks from one kept state to the next
STRETCH = 256  # chunks whose states exist at once, and up to a piece more
SCAN_STAGES, GRADIENT_STAGES, GRADIENT_KEYS = 3, 2, 32
HEAD_WIDTHS = 16, 32, 64, 128  # K and V that Triton's kernels take


def delta_rule_reference(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, *,
    segments: Tensor | None = None, initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence token by token in plain PyTorch, with the contract of `delta_rule`; float64 stays float64."""
    return _by_document(_recurrence, q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH, segments, initial_state)


def _recurrence(q, k, v, g, beta, state):
    """Takes one document: q, k [T, H, K], v [T, H, V], g and beta [T, H], and the state [H, K, V]."""
    outs = []
    for q_t, k_t, v_t, decay_t, beta_t in zip(q, k, v, g.exp(), beta):
        state = decay_t[:, None, None] * state
        held = torch.einsum("hkv,hk->hv", state, k_t)
        state = state + torch.einsum("hk,hv->hkv", k_t, beta_t[:, None] * (v_t - held))
        outs.append(torch.einsum("hkv,hk->hv", state, q_t))
    return torch.stack(outs), state


def _chunked(q, k, v, g, beta, state):
    """Computes what `_recurrence` does, in chunks."""
    T = len(q)
    padded = (F.pad(x, (0, 0) * (x.dim() - 1) + (0, -T % CHUNK)) for x in (q, k, v, g, beta))
    q, k, v, g, beta = (x.unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in padded)  # [chunks, H, CHUNK, ...]
    total = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    A = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    right = torch.cat([beta[..., None] * v, (beta * total.exp())[..., None] * k], dim=-1)
    eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    new, held = torch.linalg.solve_triangular(A + eye, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    scores, q = (q @ k.mT) * decay, total.exp()[..., None] * q
    k, last = (total[..., -1:] - total).exp()[..., None] * k, total[..., -1, None, None].exp()
    outs = []
    for q_n, k_n, new_n, held_n, scores_n, last_n in zip(q, k, new, held, scores, last):
        new_n = new_n - held_n @ state
        outs.append(q_n @ state + scores_n @ new_n)
        state = last_n * state + k_n.mT @ new_n
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[:T], state


def _by_document(function, q, k, v, g, beta, segments, initial_state):
    dtype, H = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    start, length = document_bounds(q.shape[0], q.shape[1], as_bytes(segments))
    tensors = [x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k)] + [v, g, beta]
    tensors = [x.to(dtype).flatten(0, 1) for x in tensors]
    if initial_state is None:
        initial_state = tensors[0].new_zeros(len(start), H, q.shape[-1], v.shape[-1])
    outs, states = [], []
    for first, size, state in zip(start.tolist(), length.tolist(), initial_state.to(dtype)):
        out, state = function(*(x[first : first + size] for x in tensors), state)
        outs.append(out)
        states.append(state)
    return torch.cat(outs).view(v.shape).to(v.dtype), torch.stack(states)


# Tables: which tokens, chunks and kept states a program works on.


class Stretch(NamedTuple):
    """Chunks that are processed in the same launches. Tables are int64 on the device.

    A part is what one document has in a stretch, and consists of pieces. Rows of `parts` and `pieces` are: first token;
    one past the last; first chunk, counted in the stretch; row of the kept state at the start, -1 where the document
    starts; row of the kept state at the end of its first piece; document; 1 where the document ends, else 0.
    """

    chunks: Tensor  # [chunks, 2]: first token and one past the last
    pieces: Tensor  # [pieces, 7]
    parts: Tensor  # [parts, 7], the longest first


@functools.lru_cache(maxsize=4)
def _stretches(B: int, T: int, documents: bytes | None, device: torch.device) -> list[Stretch]:
    """Divides documents, `as_bytes(segments)`, into stretches. All layers of a step share them."""
    start, length = document_bounds(B, T, documents)
    chunks, _, _ = _divide(start, length, CHUNK)
    pieces, document, is_first = _divide(start, length, PIECE * CHUNK)
    pieces_first_chunk = torch.searchsorted(chunks[:, 0].contiguous(), pieces[:, 0].contiguous())
    next_state = (~is_first).cumsum(0)  # pieces up to this one that begin at a kept state
    state = torch.where(is_first, -1, next_state - 1)
    ends = (pieces[:, 1] == (start + length)[document]).long()
    stretch_of_piece = pieces_first_chunk // STRETCH
    chunk_stops = torch.cat([pieces_first_chunk[1:], torch.tensor([len(chunks)])])
    stretches = []
    for number in stretch_of_piece.unique().tolist():
        mine = stretch_of_piece == number
        first_chunk, last_chunk = int(pieces_first_chunk[mine][0]), int(chunk_stops[mine][-1])
        columns = pieces[:, 0], pieces[:, 1], pieces_first_chunk - first_chunk, state, next_state, document, ends
        rows = torch.stack(columns, dim=1)[mine]
        _, counts = rows[:, 5].unique_consecutive(return_counts=True)
        last = counts.cumsum(0) - 1
        parts = rows[last - counts + 1]
        parts[:, 1], parts[:, 6] = rows[last, 1], rows[last, 6]
        parts = parts[(parts[:, 0] - parts[:, 1]).argsort(stable=True)]
        tables = (table.contiguous().to(device) for table in (chunks[first_chunk:last_chunk], rows, parts))
        stretches.append(Stretch(*tables))
    return stretches


def _divide(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts documents every `size` tokens.

    Returns rows (start, stop), the document of each row, and whether the row is its document's first.
    """
    count = (length + size - 1) // size
    document = torch.arange(len(count)).repeat_interleave(count)
    index = torch.arange(len(document)) - (count.cumsum(0) - count)[document]
    first = start[document] + size * index
    stop = torch.minimum(first + size, (start + length)[document])
    return torch.stack([first, stop], dim=1), document, index == 0


# Kernels. Their workspaces have a row for each chunk of the stretch and value head, padded to CHUNK tokens: (I + A)^-1
# and the scores, zero at tokens that the chunk lacks, and `gates` [2, CHUNK], G and beta. Tensors that descriptors (_d)
# describe are matrices. A descriptor reads whole chunks, tokens of the next document included, which zeros cancel.


@triton.jit
def _invert(A, C: tl.constexpr, DTYPE: tl.constexpr):
    """Returns (I + A)^-1 for a strictly lower A [C, C], from pairs of blocks of 1, 2, 4, ... rows.

    [[X, 0], [L, Y]] has the inverse [[X', 0], [-Y' L X', Y']]. DTYPE rounds the products' factors. With keys of norm 1
    and beta up to 1, all elements are at most 1.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    X = tl.where(i == j, 1.0, tl.where((i ^ j) == 1, -A, 0.0))
    for level in tl.static_range(1, 6):
        if (1 << level) < C:
            L = tl.where(((i >> level) ^ (j >> level)) == 1, A, 0.0).to(DTYPE)  # A is zero above the diagonal
            factor = X.to(DTYPE)
            product = tl.dot(factor, L, input_precision="ieee").to(DTYPE)
            X -= tl.dot(product, factor, input_precision="ieee")
    return X


@triton.jit
def _chunk_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, gates_ptr, inverse_ptr, scores_ptr, chunks_ptr,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Writes the gates, (I + A)^-1 and the scores of one chunk for the value heads of one key head."""
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    i, c = tl.arange(0, C), tl.arange(0, K)
    is_token = i < stop - start
    keys = (start * G + key_head) * K + (i[:, None] * (G * K) + c[None, :])
    q = tl.load(q_ptr + keys, mask=is_token[:, None], other=0.0)
    k = tl.load(k_ptr + keys, mask=is_token[:, None], other=0.0)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    for r in range(R):
        head = key_head * R + r
        g = tl.load(g_ptr + start * (G * R) + head + i * (G * R), mask=is_token, other=0.0)
        beta = tl.load(beta_ptr + start * (G * R) + head + i * (G * R), mask=is_token, other=0.0)
        total = tl.cumsum(g, axis=0)
        row = chunk * (G * R) + head
        tl.store(gates_ptr + row * (2 * C) + i, total)
        tl.store(gates_ptr + row * (2 * C) + C + i, beta)
        decay = tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))
        matrix = row * (C * C) + (i[:, None] * C + i[None, :])
        tl.store(scores_ptr + matrix, (qk * decay).to(q.dtype))
        inverse = _invert(tl.where(i[:, None] > i[None, :], beta[:, None] * kk * decay, 0.0), C, DTYPE)
        tl.store(inverse_ptr + matrix, tl.where(is_token[:, None], inverse, 0.0).to(q.dtype))


@triton.jit
def _load_gates(gates_ptr, row, C: tl.constexpr):
    """Returns G and beta [C] of a row of workspaces, and G of the last token."""
    gates = gates_ptr + row * (2 * C)
    i = tl.arange(0, C)
    return tl.load(gates + i), tl.load(gates + C + i), tl.load(gates + C - 1)


@triton.jit
def _scan_kernel(
    q_d, k_d, v_d, inverse_d, scores_d, gates_ptr, parts_ptr,
    initial_ptr, kept_ptr, out_ptr, final_ptr, new_d, states_d,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    C: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Carries BLOCK_V columns of a head's state through a part.

    Forward writes outputs, kept states and final states. Backward, without `out_ptr`, writes `new` and the state before
    each chunk. All products have the state's columns as rows, so that the state is an operand in registers.
    """
    part = parts_ptr + 7 * tl.program_id(0)
    head, column = tl.program_id(1) // (V // BLOCK_V), tl.program_id(1) % (V // BLOCK_V) * BLOCK_V
    start, stop, chunk = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    kept, next_kept, document = tl.load(part + 3), tl.load(part + 4), tl.load(part + 5)
    i, c, d = tl.arange(0, C), tl.arange(0, K), column + tl.arange(0, BLOCK_V)
    own_state = head * (K * V) + (d[:, None] * K + c[None, :])  # in tensors [..., H, V, K]
    public_state = (document * H + head) * (K * V) + (d[:, None] + c[None, :] * V)  # in tensors [..., H, K, V]
    S = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    if kept >= 0:
        S = tl.load(kept_ptr + kept * (H * K * V) + own_state)
    elif initial_ptr is not None:
        S = tl.load(initial_ptr + public_state)

    num_chunks = ((stop - start + C - 1) // C).to(tl.int32)
    for piece in range(0, num_chunks, PIECE):
        for n in tl.range(piece, tl.minimum(piece + PIECE, num_chunks), num_stages=STAGES):
            row = (chunk + n) * H + head  # index into workspaces
            first = (start + n * C).to(tl.int32)
            k = k_d.load([first, head // R * K])
            v = v_d.load([first, head * V + column])
            inverse = inverse_d.load([(row * C).to(tl.int32), 0])
            total, beta, last = _load_gates(gates_ptr, row, C)
            operand = S.to(k.dtype)
            held = tl.dot(operand, tl.trans(k), input_precision="ieee")
            change = (tl.trans(v).to(tl.float32) - held * tl.exp(total)[None, :]) * beta[None, :]
            new = tl.dot(change.to(k.dtype), tl.trans(inverse), input_precision="ieee")
            if out_ptr is not None:
                q = q_d.load([first, head // R * K])
                scores = scores_d.load([(row * C).to(tl.int32), 0])
                out = tl.dot(operand, tl.trans(q), input_precision="ieee") * tl.exp(total)[None, :]
                out = tl.dot(new.to(k.dtype), tl.trans(scores), out, input_precision="ieee")
                values = ((start + n * C) * H + head) * V + (i[None, :] * (H * V) + d[:, None])
                tl.store(out_ptr + values, out.to(k.dtype), mask=(i < stop - start - n * C)[None, :])
            else:
                states_d.store([(row * V).to(tl.int32) + column, 0], operand)
                new_d.store([(row * C).to(tl.int32), column], tl.trans(new.to(k.dtype)))
            rest = tl.exp(last - total)
            S = tl.dot((new * rest[None, :]).to(k.dtype), k, S * tl.exp(last), input_precision="ieee")
        if out_ptr is not None and piece + PIECE < num_chunks:
            tl.store(kept_ptr + next_kept * (H * K * V) + own_state, S)
            next_kept += 1

    if out_ptr is not None:
        if tl.load(part + 6) == 0:
            tl.store(kept_ptr + next_kept * (H * K * V) + own_state, S)
        elif final_ptr is not None:
            tl.store(final_ptr + public_state, S)


@triton.jit
def _reverse_scan_kernel(
    d_out_d, q_d, k_d, inverse_d, scores_d, gates_ptr, parts_ptr,
    d_final_ptr, d_initial_ptr, carried_ptr, carry_ptr, y_d, d_states_d,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Carries the gradient of BLOCK_V columns of a head's state back through a part.

    It writes y, and the gradient of the state after each chunk. `carried` comes from the stretch that follows, and
    `carry` goes to the one before.
    """
    part = parts_ptr + 7 * tl.program_id(0)
    head, column = tl.program_id(1) // (V // BLOCK_V), tl.program_id(1) % (V // BLOCK_V) * BLOCK_V
    start, stop, chunk, document = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 5)
    i, c, d = tl.arange(0, C), tl.arange(0, K), column + tl.arange(0, BLOCK_V)
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
        first = (start + n * C).to(tl.int32)
        q, k = q_d.load([first, head // R * K]), k_d.load([first, head // R * K])
        d_out = tl.trans(d_out_d.load([first, head * V + column]))  # [BLOCK_V, C]
        inverse, scores = inverse_d.load([(row * C).to(tl.int32), 0]), scores_d.load([(row * C).to(tl.int32), 0])
        total, beta, last = _load_gates(gates_ptr, row, C)

        operand = dS.to(k.dtype)
        d_states_d.store([(row * V).to(tl.int32) + column, 0], operand)
        d_new = tl.dot(operand, tl.trans(k), input_precision="ieee") * tl.exp(last - total)[None, :]
        d_new = tl.dot(d_out, scores, d_new, input_precision="ieee")
        y = tl.dot(d_new.to(k.dtype), inverse, input_precision="ieee")
        y_d.store([(row * C).to(tl.int32), column], tl.trans(y.to(k.dtype)))
        since = tl.exp(total)
        dS = tl.dot((y * (-beta * since)[None, :]).to(k.dtype), k, dS * tl.exp(last), input_precision="ieee")
        since = tl.where(i < stop - start - n * C, since, 0.0)
        dS = tl.dot((d_out * since[None, :]).to(k.dtype), q, dS, input_precision="ieee")

    if tl.load(part + 3) >= 0:
        tl.store(carry_ptr + own_state, dS)
    elif d_initial_ptr is not None:
        tl.store(d_initial_ptr + public_state, dS)


@triton.jit
def _gradients_kernel(
    d_out_d, new_d, y_d, q_d, k_d, states_d, d_states_d, v_ptr, gates_ptr, chunks_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, d_beta_ptr,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Writes all gradients of one chunk for the value heads of one key head, BLOCK_K columns of keys at a time."""
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    i, c, d, first = tl.arange(0, C), tl.arange(0, BLOCK_K), tl.arange(0, V), start.to(tl.int32)
    is_token = i < stop - start
    keys = (start * G + key_head) * K + (i[:, None] * (G * K) + c[None, :])
    for r in range(R):
        head = key_head * R + r
        row = (chunk * (G * R) + head).to(tl.int32)
        gates = start * (G * R) + head + i * (G * R)
        total, beta, last = _load_gates(gates_ptr, row, C)
        since, rest = tl.exp(total), tl.exp(last - total)

        # Gradients of the scores and of A, from the output's gradient and from y.
        d_out, new, y = d_out_d.load([first, head * V]), new_d.load([row * C, 0]), y_d.load([row * C, 0])
        values = (start * (G * R) + head) * V + (i[:, None] * (G * R * V) + d[None, :])
        v = tl.load(v_ptr + values, mask=is_token[:, None], other=0.0)
        d_beta = tl.sum(y.to(tl.float32) * v.to(tl.float32), axis=1)
        tl.store(dv_ptr + values, (y * beta[:, None]).to(v.dtype), mask=is_token[:, None])
        is_past = (i[:, None] >= i[None, :]) & is_token[:, None]
        decay = tl.exp(tl.where(is_past, total[:, None] - total[None, :], float("-inf")))
        d_scores = (tl.dot(d_out, tl.trans(new), input_precision="ieee") * decay).to(v.dtype)
        decay = tl.where(i[:, None] > i[None, :], decay, 0.0)
        d_A = tl.dot(y, tl.trans(new), input_precision="ieee") * decay
        d_scores_t, d_A_t = tl.trans(d_scores), tl.trans((-beta[:, None] * d_A).to(v.dtype))
        d_A = d_A.to(v.dtype)

        # `left` is what y does to a key on its own row, but for -beta; the rest of dk goes to keys as columns.
        d_total, held, d_last = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), 0.0
        for block in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            q, k = q_d.load([first, key_head * K + block]), k_d.load([first, key_head * K + block])
            S, dS = states_d.load([row * V, block]), d_states_d.load([row * V, block])  # [V, BLOCK_K]
            is_sum = (is_token & (r > 0))[:, None]
            dq_before = tl.load(dq_ptr + keys + block, mask=is_sum, other=0.0)
            dk_before = tl.load(dk_ptr + keys + block, mask=is_sum, other=0.0)
            d_last += tl.exp(last) * tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0)
            dq = tl.dot(d_out, S, input_precision="ieee") * since[:, None]
            dq = tl.dot(d_scores, k, dq, input_precision="ieee")
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


# Launchers


def _aligned(x: Tensor) -> Tensor:
    """Returns x as descriptors take it: contiguous, and from an address that is a multiple of 16."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _describe(x: Tensor, width: int, rows: int, columns: int) -> TensorDescriptor:
    """Describes x as a matrix of rows of `width` elements, read in blocks of `rows` x `columns`."""
    return TensorDescriptor.from_tensor(x.view(-1, width), [rows, columns])


def _sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    return {"R": v.shape[2] // k.shape[2], "K": k.shape[3], "V": v.shape[3], "C": CHUNK}


def _scan_options(k: Tensor, v: Tensor) -> tuple[int, dict[str, int]]:
    """Returns the programs per part of both scans, and their options."""
    H, V = v.shape[2:]
    block = min(64, V)
    stages = 1 if k.dtype == torch.float32 else SCAN_STAGES
    return H * V // block, {"H": H, "BLOCK_V": block, "STAGES": stages, **_sizes(k, v)}


class _Chunks(NamedTuple):
    """Matrices and gates of a stretch's chunks, written by `_chunk_kernel`."""

    gates: Tensor  # [chunks, H, 2, CHUNK] float32
    inverse: Tensor  # [chunks, H, CHUNK, CHUNK], as scores
    scores: Tensor


def _empty_chunks(k: Tensor, v: Tensor, stretch: Stretch) -> _Chunks:
    shape = len(stretch.chunks), v.shape[2]
    matrices = (k.new_empty(*shape, CHUNK, CHUNK) for _ in range(2))
    return _Chunks(k.new_empty(*shape, 2, CHUNK, dtype=torch.float32), *matrices)


def _launch_chunks(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, stretch: Stretch, made: _Chunks) -> None:
    G = k.shape[2]
    _chunk_kernel[(len(stretch.chunks), G)](
        q, k, g, beta, *made, stretch.chunks, G=G, R=g.shape[2] // G, K=k.shape[3], C=CHUNK,
        DTYPE=tl.float32 if q.dtype == torch.float32 else tl.float16, num_warps=4,
    )  # fmt: skip


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, stretches: list[Stretch]
) -> Iterator[tuple[Stretch, _Chunks, list[Callable]]]:
    """Yields each stretch, its chunks as `_launch_chunks` makes them, and launches that make the next one's."""
    made = _empty_chunks(k, v, stretches[0])
    _launch_chunks(q, k, g, beta, stretches[0], made)
    for stretch, following in zip(stretches, [*stretches[1:], None]):
        if following is None:
            yield stretch, made, []
        else:
            upcoming = _empty_chunks(k, v, following)
            yield stretch, made, [functools.partial(_launch_chunks, q, k, g, beta, following, upcoming)]
            made = upcoming


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _launch_beside(device: torch.device, scan: Callable, others: list[Callable]) -> None:
    """Launches a scan, and beside it others, for the multiprocessors that it leaves free.

    No launch reads what another writes.
    """
    if device.type != "cuda":
        for launch in (scan, *others):
            launch()
        return
    stream, second = torch.cuda.current_stream(device), _second_stream(device)
    second.wait_stream(stream)
    scan()
    with torch.cuda.stream(second):
        for launch in others:
            launch()
    stream.wait_stream(second)


def _describe_inputs(q: Tensor, k: Tensor, v: Tensor, block_v: int) -> list[TensorDescriptor]:
    G, H, K, V = k.shape[2], v.shape[2], k.shape[3], v.shape[3]
    return [_describe(x, G * K, CHUNK, K) for x in (q, k)] + [_describe(v, H * V, CHUNK, block_v)]


def _describe_matrices(made: _Chunks) -> list:
    return [*(_describe(x, CHUNK, CHUNK, CHUNK) for x in (made.inverse, made.scores)), made.gates]


def _kept_rows(q: Tensor) -> int:
    """Returns the kept states of a batch of q's size, however its tokens are divided into documents, or a few more."""
    return (q.shape[0] * q.shape[1] - 1) // (PIECE * CHUNK)


@operation("fathom::delta_rule", keepable="results")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, segments: Tensor | None,
    with_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output, kept states [rows, H, V, K], and final states [documents, H, K, V] (empty if not asked)."""
    q, k, v, g, beta = (_aligned(x) for x in (q, k, v, g, beta))
    out, kept, final = _empty_outputs(q, v, segments, with_state)
    programs, options = _scan_options(k, v)
    read = _describe_inputs(q, k, v, options["BLOCK_V"])
    initial = None if initial is None else initial.contiguous()
    stretches = _stretches(q.shape[0], q.shape[1], as_bytes(segments), q.device)
    for stretch, made, launches in _prepared(q, k, v, g, beta, stretches):
        scan = functools.partial(
            _scan_kernel[(len(stretch.parts), programs)],
            *read, *_describe_matrices(made), stretch.parts, initial, kept, out, final if with_state else None,
            None, None, **options, PIECE=PIECE, num_warps=4,
        )  # fmt: skip
        _launch_beside(q.device, scan, launches)
        del made, scan, launches  # before the stretch after the next
    return out, kept, final


def _empty_outputs(q, v, segments, with_state):
    B, _, H, V = v.shape
    documents = (B if segments is None else len(segments)) if with_state else 0
    states = (q.new_empty(n, H, *shape, dtype=torch.float32) for n, shape in _state_shapes(q, V, documents))
    return v.new_empty(v.shape), *states


def _state_shapes(q, V, documents):
    K = q.shape[3]
    return (_kept_rows(q), (V, K)), (documents, (K, V))


_forward.register_fake(lambda q, k, v, g, beta, initial, *rest: _empty_outputs(q, v, *rest))


@operation("fathom::delta_rule_backward")
def _backward(
    d_out: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, kept: Tensor,
    initial: Tensor | None, segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v, g, beta and the initial states (empty without these)."""
    d_out, q, k, v, g, beta = (_aligned(x) for x in (d_out, q, k, v, g, beta))
    initial, d_final = (x if x is None else x.contiguous() for x in (initial, d_final))
    dq, dk, dv, dg, d_beta, d_initial = _empty_gradients(q, k, v, g, beta, initial)
    G, H, K, V = k.shape[2], v.shape[2], k.shape[3], v.shape[3]
    carry, carried = (g.new_empty(H, V, K) for _ in range(2))
    programs, options = _scan_options(k, v)
    block_k = min(GRADIENT_KEYS, K)
    q_d, k_d, v_d = _describe_inputs(q, k, v, options["BLOCK_V"])
    d_out_d, d_out_heads_d = (_describe(d_out, H * V, CHUNK, width) for width in (options["BLOCK_V"], V))
    stretches = _stretches(q.shape[0], q.shape[1], as_bytes(segments), q.device)[::-1]
    for stretch, made, launches in _prepared(q, k, v, g, beta, stretches):
        matrices, num_chunks = _describe_matrices(made), len(stretch.chunks)
        new, y = (v.new_empty(num_chunks, H, CHUNK, V) for _ in range(2))
        states, d_states = (q.new_empty(num_chunks, H, V, K) for _ in range(2))
        pairs, block_v = ((new, states), (y, d_states)), options["BLOCK_V"]
        written = [d for x, S in pairs for d in (_describe(x, V, CHUNK, block_v), _describe(S, K, block_v, K))]
        states_scan = functools.partial(
            _scan_kernel[(len(stretch.pieces), programs)],
            q_d, k_d, v_d, *matrices, stretch.pieces, initial, kept, None, None, *written[:2],
            **options, PIECE=PIECE, num_warps=4,
        )  # fmt: skip
        scan = functools.partial(
            _reverse_scan_kernel[(len(stretch.parts), programs)],
            d_out_d, q_d, k_d, *matrices, stretch.parts, d_final, None if initial is None else d_initial,
            carried, carry, *written[2:], **options, num_warps=4,
        )  # fmt: skip
        _launch_beside(q.device, scan, [states_scan, *launches])
        rows_d = [_describe(x, V, CHUNK, V) for x in (new, y)]
        rows_d += [_describe(x, G * K, CHUNK, block_k) for x in (q, k)]
        rows_d += [_describe(x, K, V, block_k) for x in (states, d_states)]
        _gradients_kernel[(num_chunks, G)](
            d_out_heads_d, *rows_d, v, made.gates, stretch.chunks, dq, dk, dv, dg, d_beta,
            G=G, BLOCK_K=block_k, **_sizes(k, v), STAGES=GRADIENT_STAGES, num_warps=4,
        )  # fmt: skip
        carry, carried = carried, carry
        del made, matrices, new, y, states, d_states, pairs, written, states_scan, scan, launches, rows_d
    return dq, dk, dv, dg, d_beta, d_initial


def _empty_gradients(q, k, v, g, beta, initial):
    like = q, k, v, g, beta, g.new_empty(0) if initial is None else initial
    return tuple(x.new_empty(x.shape) for x in like)


_backward.register_fake(lambda d_out, d_final, q, k, v, g, beta, kept, initial, segments: _empty_gradients(
    q, k, v, g, beta, initial
))  # fmt: skip


def _setup_context(ctx, inputs, output):
    *tensors, ctx.segments, ctx.with_state = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx, d_out, d_kept, d_final):
    q, k, v, g, beta, initial, kept = ctx.saved_tensors
    if d_out is None and d_final is None:
        return (None,) * 8
    d_out = torch.zeros_like(v) if d_out is None else d_out
    d_final = d_final if ctx.with_state else None
    *gradients, d_initial = _backward(d_out, d_final, q, k, v, g, beta, kept, initial, ctx.segments)
    return *gradients, None if initial is None else d_initial, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def delta_rule(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, *,
    segments: Tensor | None = None, initial_state: Tensor | None = None, with_state: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464), each document from its own state.

    Args:
        q_BTGK, k_BTGK: [batch, tokens, key heads, K]. k is normalised by the caller, q also scaled.
        v_BTHV: [batch, tokens, value heads, V]; H is a multiple of G. q, k and v are of one dtype.
        g_BTH: log decay, at most 0, float32.
        beta_BTH: strength, 0 to 1, float32.
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, first token, one past the last token), which
            have each token once; None: each batch row is one document.
        initial_state: [documents, H, K, V] float32, in the order of the documents' tokens; None: zeros.
        with_state: whether to return the states after each document's last token.
        impl: "auto", "triton" or "torch".

    Returns:
        The output, of v's shape and dtype; with `with_state`, also the states, [documents, H, K, V] float32.

    Raises:
        ValueError: shapes or dtypes that do not fit together; with Triton, another dtype, widths K and V other than 16,
            32, 64 or 128, or float32 wider than 64 on a GPU.
    """
    tensors = q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH
    _check(*tensors, segments, initial_state)
    if use_triton(impl, q_BTGK):
        _check_for_triton(q_BTGK, v_BTHV)
        out, _, final = _forward(*tensors, initial_state, segments, with_state)
    else:
        out, final = _by_document(_chunked, *tensors, segments, initial_state)
    return (out, final) if with_state else out


def _check(q, k, v, g, beta, segments, initial_state) -> None:
    (B, T, G, K), (H, V) = q.shape, v.shape[2:]
    if k.shape != q.shape or v.shape[:2] != (B, T) or H % G or not q.dtype == k.dtype == v.dtype:
        got = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (q, k, v))
        raise ValueError(f"q and k must be [B, T, G, K] and v [B, T, H, V], of one dtype, H a multiple of G, got {got}")
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    if g.shape != (B, T, H) or beta.shape != (B, T, H) or not g.dtype == beta.dtype == state_dtype:
        got = " and ".join(f"{list(x.shape)} {x.dtype}" for x in (g, beta))
        raise ValueError(f"g and beta must be {[B, T, H]} {state_dtype}, got {got}")
    expected = [check_documents(segments, B, T), H, K, V]
    if initial_state is not None and ([*initial_state.shape] != expected or initial_state.dtype != state_dtype):
        got = f"{list(initial_state.shape)} {initial_state.dtype}"
        raise ValueError(f"initial_state must be {expected} {state_dtype}, got {got}")


def _check_for_triton(q: Tensor, v: Tensor) -> None:
    widths = q.shape[-1], v.shape[-1]
    if not {*widths} <= {*HEAD_WIDTHS}:
        raise ValueError(f"the delta rule's kernels take head widths {HEAD_WIDTHS}, got {widths[0]} and {widths[1]}")
    if q.dtype == torch.float32 and q.is_cuda and max(widths) > 64:
        raise ValueError(f"on a GPU, float32 heads have up to 64 elements, got {max(widths)}; use bfloat16")


def delta_rule_footprint(num_tokens: int, G: int, H: int, K: int, V: int, *, element_size: int = 2) -> Footprint:
    """Footprint of `delta_rule` without states of the caller, for documents longer than a stretch.

    `saved` has q, k, v, g, beta and the kept states. Results worth keeping are these states and the output, which is
    not counted: the norm that reads it keeps it.
    """
    q, v, gates = element_size * num_tokens * G * K, element_size * num_tokens * H * V, 4 * num_tokens * H
    state, chunks = H * K * V, min(-(-num_tokens // CHUNK), STRETCH)
    kept = 4 * state * ((num_tokens - 1) // (PIECE * CHUNK))
    matrices = (1 + (num_tokens > STRETCH * CHUNK)) * chunks * H * CHUNK * (2 * 4 + 2 * element_size * CHUNK)
    backward = matrices + 2 * 4 * state + 2 * element_size * chunks * (state + CHUNK * H * V)
    products = CHUNK * (K + V) + 3 * K * V + CHUNK * K  # multiplications and additions of a token and head in a scan
    flops = 2.0 * num_tokens * H * products
    return Footprint(
        saved=2 * q + v + 2 * gates + kept,
        forward=v + kept + matrices,
        backward=2 * q + v + 2 * gates + backward,
        keepable=kept,
        matrix_flops=flops,
        backward_matrix_flops=3 * flops,
        elementwise_bytes=0,
    )
