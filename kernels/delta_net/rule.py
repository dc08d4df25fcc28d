"""Gated delta rule: linear attention with a state that forgets, and that replaces the value it held
for a key.

A value head has a state S [K, V], which starts each document at zero. Each token has a key k, a
value v, a query q, a log decay g <= 0 and a strength beta:

    S <- exp(g) S;    S <- S + beta k (v - S^T k)^T;    out = S^T q

Key head j serves value heads j R to j R + R - 1. Kernels compute chunks of 64 tokens. G is the sum
of g from the start of the chunk up to and with a token. D_ij = exp(G_i - G_j) for i >= j, else 0:

    A_ij = beta_i (k_i . k_j) D_ij for i > j    strictly lower: token i removes so much of token j
    new  = (I + A)^-1 beta (v - exp(G) k S)     [64, V]: each token adds its row along its key
    out  = exp(G) q S + ((q k^T) D) new
    S    = exp(G_last) S + (exp(G_last - G) k)^T new

No exponent is positive, so nothing overflows. `chunks.py` runs stretches of 256 chunks;
`backward.py` has gradients.

Kept for backward: q, k, v, g, beta, and the state every 64 chunks in float32, H K V / 1024 bytes
per token. Sums have a fixed order: every run gives the same bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.documents import as_bytes, check_documents, document_bounds
from ..common import aligned, operation, shown, sum_dtype, use_triton
from .backward import delta_rule_backward
from .chunks import (
    CHUNK,
    PIECE,
    STRETCH,
    describe_inputs,
    describe_matrices,
    kept_rows,
    launch_beside,
    prepared,
    scan_options,
    scan_states,
    stretches_of,
)

HEAD_WIDTHS = 16, 32, 64, 128  # K and V that Triton's kernels take


def delta_rule_reference(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, *,
    segments: Tensor | None = None, initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs the recurrence in plain PyTorch, as `delta_rule` promises; float64 stays float64."""
    return _by_document(
        _recurrence, q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH, segments, initial_state
    )


def _recurrence(q, k, v, g, beta, state):
    """Runs one document: q, k [T, H, K], v [T, H, V], g, beta [T, H], and the state [H, K, V]."""
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
    # [chunks, H, CHUNK, ...]
    q, k, v, g, beta = (x.unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in padded)
    total = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    A = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    right = torch.cat([beta[..., None] * v, (beta * total.exp())[..., None] * k], dim=-1)
    eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    new, held = torch.linalg.solve_triangular(
        A + eye, right, upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.mT) * decay
    q = total.exp()[..., None] * q
    k = (total[..., -1:] - total).exp()[..., None] * k
    last = total[..., -1, None, None].exp()
    outs = []
    for q_n, k_n, new_n, held_n, scores_n, last_n in zip(q, k, new, held, scores, last):
        new_n = new_n - held_n @ state
        outs.append(q_n @ state + scores_n @ new_n)
        state = last_n * state + k_n.mT @ new_n
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[:T], state


def _by_document(function, q, k, v, g, beta, segments, initial_state):
    dtype = sum_dtype(q)
    H = v.shape[2]
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


def _empty_outputs(q, v, segments, with_state):
    B, _, H, V = v.shape
    documents = 0
    if with_state:
        documents = B if segments is None else len(segments)
    shapes = (kept_rows(q), H, V, q.shape[3]), (documents, H, q.shape[3], V)
    return v.new_empty(v.shape), *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


@operation(
    "fathom::delta_rule",
    lambda q, k, v, *options: _empty_outputs(q, v, *options[3:]),
    keepable="results",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    segments: Tensor | None, with_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output, kept states [rows, H, V, K], and final states [documents, H, K, V] (empty
    if not asked)."""
    q, k, v, g, beta = (aligned(x) for x in (q, k, v, g, beta))
    out, kept, final = _empty_outputs(q, v, segments, with_state)
    inputs = describe_inputs(q, k, v, scan_options(k, v)[1]["BLOCK_V"])
    initial = None if initial is None else initial.contiguous()
    stretches = stretches_of(q.shape[0], q.shape[1], as_bytes(segments), q.device)
    written = out, final if with_state else None, None, None
    for stretch, chunks, launches in prepared(q, k, v, g, beta, stretches):
        matrices = describe_matrices(chunks)
        scan = scan_states(k, v, inputs, matrices, stretch.parts, initial, kept, *written)
        launch_beside(q.device, scan, launches)
        del chunks, matrices, scan, launches  # before the stretch after the next
    return out, kept, final


def _setup_context(ctx, inputs, output):
    *tensors, ctx.segments, ctx.with_state = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx, d_out, d_kept, d_final):
    *tensors, initial, kept = ctx.saved_tensors
    if d_out is None and d_final is None:
        return (None,) * 8
    d_out = torch.zeros_like(tensors[2]) if d_out is None else d_out
    d_final = d_final if ctx.with_state else None
    *gradients, d_initial = delta_rule_backward(
        d_out, d_final, *tensors, kept, initial, ctx.segments
    )
    return *gradients, None if initial is None else d_initial, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def delta_rule(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, *,
    segments: Tensor | None = None, initial_state: Tensor | None = None, with_state: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464), each document from its own state.

    Args:
        q_BTGK, k_BTGK: [batch, tokens, key heads, K]. The caller normalises k, and normalises and
            scales q.
        v_BTHV: [batch, tokens, value heads, V]; H is a multiple of G. q, k and v are of one dtype.
        g_BTH, beta_BTH: log decay, at most 0, and strength, 0 to 1, float32.
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, first token, one past the
            last token), which have each token once; None: each batch row is one document.
        initial_state: [documents, H, K, V] float32, in the order of the documents' tokens; None:
            zeros.
        with_state: whether to return the states after each document's last token.

    Returns the output, of v's shape and dtype; with `with_state`, also the states, [documents, H,
    K, V] float32.

    Raises ValueError for shapes or dtypes that do not fit together; with Triton, another dtype,
    widths K and V other than 16, 32, 64 or 128, or float32 wider than 64 on a GPU.
    """
    tensors = q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH
    _check(*tensors, segments, initial_state)
    if use_triton(impl, q_BTGK):
        _check_widths(q_BTGK, v_BTHV)
        out, _, final = _forward(*tensors, initial_state, segments, with_state)
    else:
        out, final = _by_document(_chunked, *tensors, segments, initial_state)
    return (out, final) if with_state else out


def _check(q, k, v, g, beta, segments, initial_state) -> None:
    (B, T, G, K), (H, V) = q.shape, v.shape[2:]
    if k.shape != q.shape or v.shape[:2] != (B, T) or H % G or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "q and k must be [B, T, G, K] and v [B, T, H, V], of one dtype, H a multiple of G, got "
            f"{shown(q, k, v)}"
        )
    state_dtype = sum_dtype(q)
    if g.shape != (B, T, H) or beta.shape != (B, T, H) or not g.dtype == beta.dtype == state_dtype:
        raise ValueError(f"g and beta must be {[B, T, H]} {state_dtype}, got {shown(g, beta)}")
    expected = [check_documents(segments, B, T), H, K, V]
    if initial_state is not None and (
        [*initial_state.shape] != expected or initial_state.dtype != state_dtype
    ):
        raise ValueError(
            f"initial_state must be {expected} {state_dtype}, got {shown(initial_state)}"
        )


def _check_widths(q: Tensor, v: Tensor) -> None:
    widths = q.shape[-1], v.shape[-1]
    if not {*widths} <= {*HEAD_WIDTHS} and not q.is_meta:
        raise ValueError(
            f"the delta rule's kernels take head widths {HEAD_WIDTHS}, "
            f"got {widths[0]} and {widths[1]}"
        )
    if q.dtype == torch.float32 and q.is_cuda and max(widths) > 64:
        raise ValueError(
            f"on a GPU, float32 heads have up to 64 elements, got {max(widths)}; use bfloat16"
        )


def delta_rule_bytes(
    num_tokens: int, H: int, K: int, V: int, element_size: int = 2
) -> tuple[int, int, int]:
    """Returns the bytes of the kept states, inside of forward, and inside of backward.

    Documents are taken to be longer than a stretch.
    """
    state = H * K * V
    chunks = min(-(-num_tokens // CHUNK), STRETCH)
    kept = 4 * state * ((num_tokens - 1) // (PIECE * CHUNK))
    stretches_at_once = 1 + (num_tokens > STRETCH * CHUNK)
    gates_and_matrices = H * CHUNK * (2 * 4 + 2 * element_size * CHUNK)
    forward = stretches_at_once * chunks * gates_and_matrices
    scratch = 2 * element_size * chunks * (state + CHUNK * H * V)
    return kept, forward, forward + 2 * 4 * state + scratch
