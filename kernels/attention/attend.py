"""Attention of any kind, from q, k and v to its output, each document of a packed batch on its own.

All kinds share two operations: `fathom::attend` runs a kind's forward, and
`fathom::attend_backward` its backward. Each kind's own file says what it computes and keeps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common import operation, sum_dtype
from ..parts import AttentionKind, part_of
from .documents import has_prompts
from .full import FULL
from .libraries import choose_backend
from .prompts import copies_for


def _no_lists(k: Tensor) -> Tensor:
    return k.new_empty(*k.shape[:3], 0, dtype=torch.int16)


def _fake_results(q, k, v, segments, lists, kind, backend, on_triton):
    attention, dtype = part_of(kind), sum_dtype(q)
    outs = [q.new_empty(q.shape) for _ in range(attention.branches)]
    if lists is None:
        chosen_lists = k.new_empty(*k.shape[:3], attention.list_length, dtype=torch.int16)
    else:
        chosen_lists = _no_lists(k)
    return [*outs, *(q.new_empty(q.shape[:3], dtype=dtype) for _ in outs), chosen_lists]


@operation("fathom::attend", _fake_results, keepable="results", chooses="lists")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, lists: Tensor | None, kind: int,
    backend: str,
    on_triton: bool,
) -> list[Tensor]:  # fmt: skip
    """Returns the outputs of all branches, their log-sum-exps, and the lists of blocks, in one list
    of tensors.

    The last tensor has the lists if the kind chose them here. If they were given, or the kind has
    none, it is empty.

    Args:
        kind: the kind's number, see `kernels.parts.Part`.
    """
    attention, copies = part_of(kind), copies_for(part_of(kind), q, segments)
    if copies is None:
        outs, lses, chosen = attention.forward(q, k, v, segments, lists, backend, on_triton)
    else:
        q_n, k_n, v_n = map(copies.expand, (q, k, v))
        lists_n = None if lists is None else copies.expand(lists)
        outs, lses, chosen = attention.forward(
            q_n, k_n, v_n, copies.segments, lists_n, backend, on_triton
        )
        outs, lses = [copies.drop(x, q) for x in outs], [copies.drop(x, q) for x in lses]
        chosen = None if chosen is None else copies.drop(chosen, q)
    # Compiled code expects the strides of `_fake_results`.
    results = [x.contiguous() for x in (*outs, *lses)]
    return [*results, chosen if lists is None and chosen is not None else _no_lists(k)]


@operation(
    "fathom::attend_backward",
    lambda _, *inputs: [x.new_empty(x.shape) for x in inputs[:4] if x is not None],
)
def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, outs: list[Tensor],
    lses: list[Tensor],
    lists: Tensor, segments: Tensor | None, kind: int, backend: str, on_triton: bool,
) -> list[Tensor]:  # fmt: skip
    return [
        *_backward(
            part_of(kind), dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton
        )
    ]


def _backward(kind, dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton):
    copies = copies_for(kind, q, segments)
    if copies is None:
        return kind.backward(dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton)
    inputs = [None if x is None else copies.expand(x) for x in (q, k, v, gates)]
    kept = [copies.expand(x) for x in outs], [copies.expand(x) for x in lses], copies.expand(lists)
    dout = copies.without_copies(copies.expand(dout))
    dq, dk, dv, *d_gates = kind.backward(dout, *inputs, *kept, copies.segments, backend, on_triton)
    return [
        copies.drop(dq, q),
        copies.add(dk, q),
        copies.add(dv, q),
        *(copies.drop(x, q) for x in d_gates),
    ]


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, outs: Sequence[Tensor],
    lses: Sequence[Tensor], lists: Tensor, segments: Tensor | None, kind: AttentionKind,
    backend: str, on_triton: bool,
) -> Sequence[Tensor]:  # fmt: skip
    """Returns dq, dk, dv and, if there are gates, their gradient.

    Arguments are as in `AttentionKind.backward`.
    """
    # a reference, which may call autograd: not inside an operation
    if kind.gpu_head_dims and not on_triton:
        return _backward(
            kind, dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton
        )
    kept = list(outs), list(lses), lists, segments, kind.number, backend, on_triton
    return torch.ops.fathom.attend_backward(dout, q, k, v, gates, *kept)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gates, segments, lists, kind, backend, on_triton):
        *results, chosen = torch.ops.fathom.attend(
            q, k, v, segments, lists, kind, backend, on_triton
        )
        outs, lses = results[: len(results) // 2], results[len(results) // 2 :]
        ctx.save_for_backward(
            q, k, v, gates, segments, chosen if lists is None else lists, *outs, *lses
        )
        ctx.options = part_of(kind), backend, on_triton
        return part_of(kind).output(outs, gates, on_triton)

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention has no second derivative (create_graph=True); its reference has"
            )
        q, k, v, gates, segments, lists, *results = ctx.saved_tensors
        outs, lses = results[: len(results) // 2], results[len(results) // 2 :]
        gradients = attend_backward(dout, q, k, v, gates, outs, lses, lists, segments, *ctx.options)
        num_inputs = len(ctx.needs_input_grad)
        return *gradients, *[None] * (num_inputs - len(gradients))


def check_gates(gates: Tensor | None, kind: AttentionKind, shape: Sequence[int]) -> None:
    """Raises ValueError unless there are gates for queries [B, T, H, K] of `shape` (B, T, H), if
    the kind has any."""
    if kind.gates_per_head and (gates is None or gates.shape != (*shape, kind.gates_per_head)):
        gates_shape = None if gates is None else tuple(gates.shape)
        raise ValueError(
            f"gates must be [B, T, H, {kind.gates_per_head}] for (B, T, H) {tuple(shape)}, "
            f"got {gates_shape}"
        )


def attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, segments: Tensor | None = None, *,
    kind: AttentionKind = FULL,
    gates: Tensor | None = None, lists: Tensor | None = None, backend: str = "auto",
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Attends causally with grouped queries, each document of a packed sequence on its own.

    Args:
        q_BTHK: queries [B, T, H, K]; bfloat16 or float16 on CUDA, any floating dtype on a CPU.
        k_BTGK, v_BTGK: keys and values [B, T, G, K], G a divisor of H.
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, first token, one past the
            last token) that cover every token once, or five columns, see
            `kernels.attention.documents.Documents`; None: each batch row is one document.
        kind: what a token attends to.
        gates: logits [B, T, H, gates_per_head], for a kind that has gates.
        lists: blocks [B, T, G, blocks] by index in their document, in place of the kind's own
            choice; their order does not matter. Duplicates, and blocks that a token cannot choose,
            are dropped.
        backend: the library's kernel for attention to everything, see
            `kernels.attention.libraries.choose_backend`.

    Returns [B, T, H, K] in q's dtype.

    Raises:
        ValueError: an H that is not a multiple of G, shapes or a dtype that no kernel takes, an
            unavailable backend, lists for a kind without a choice or for documents with prompts.
        RuntimeError: in backward, create_graph=True.
    """
    on_triton = kind.check(q_BTHK, k_BTGK, v_BTGK, segments, impl)
    check_gates(gates, kind, q_BTHK.shape[:3])
    if lists is not None and has_prompts(segments):
        raise ValueError("documents with prompts choose blocks of keys themselves; give no lists")
    if lists is not None:
        lists = kind.normalise_lists(lists, q_BTHK, segments)
    options = kind.number, choose_backend(backend, q_BTHK.device), on_triton
    return _Attention.apply(q_BTHK, k_BTGK, v_BTGK, gates, segments, lists, *options)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *,
    kind: AttentionKind = FULL,
    backend: str = "auto", impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Attends causally within documents that follow each other, as flash-attn's
    flash_attn_varlen_func does.

    Args:
        q: queries [N, H, K], tokens of all documents; without `cu_seqlens`, rows of one document
            each, [B, T, H, K].
        k, v: keys and values [N, G, K] or [B, T, G, K], G a divisor of H.
        cu_seqlens: integers [documents + 1]: 0, and where each document ends. The host reads them;
            a tensor on the CPU spares it a wait for the GPU.
        kind: `Full()`, `Window(window)` or `Sparse(selected_blocks=...)`.

    Returns q's shape and dtype. Scores are scaled by 1 / sqrt(K). Raises as `attention`, and
    ValueError for `cu_seqlens` that do not rise from 0 to N.
    """
    if cu_seqlens is None:
        return attention(q, k, v, kind=kind, backend=backend, impl=impl)
    bounds = cu_seqlens.cpu().long()
    rises = bounds.dim() == 1 and len(bounds) > 1 and bool((bounds.diff() > 0).all())
    if not rises or bounds[0] != 0 or bounds[-1] != len(q):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {len(q)} tokens, got {bounds.tolist()[:8]}"
        )
    segments = torch.stack([torch.zeros_like(bounds[1:]), bounds[:-1], bounds[1:]], dim=1)
    return attention(q[None], k[None], v[None], segments, kind=kind, backend=backend, impl=impl)[0]
