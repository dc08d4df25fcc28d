"""Block-sparse causal attention without new parameters: first block, window and chosen blocks share one softmax.

    out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s],  s <= t, in t's document, in one of t's blocks

README.md has the mathematics. Heads are worked on in ranges of key/value heads, and of tokens where one head's slots
are too many, so that slots take no more than `workspace_bytes`. Forward is band, then per range: inverse index,
gather, combine. Backward is the band's dq, then per range of heads: gather by ranges of tokens, the band's dk and dv.

Kept for backward, a token: q, k, v and out, (2H + 2G) K elements, the float32 log-sum-exp, H, and the lists of blocks,
G * selected int16. The choice carries no gradient, and backward never chooses again.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from ...common import operation, use_triton
from .band import band_dkv, band_dkv_extra, band_dq, band_forward
from .combine import add_partials, add_slots, combine
from .common import TileConfig
from .gather import (
    BACKWARD_CONFIG,
    FORWARD_CONFIG,
    gather_backward,
    gather_forward,
    item_tokens,
)
from .inverse_index import SORT_BYTES, build_inverse_index
from .layout import Layout, make_layout, normalise_lists
from .selection import (
    PART_KEYS,
    choose_blocks,
    pool_reference,
    query_bytes,
    ranges,
    score_columns,
    scores_reference,
    top_blocks_reference,
)


class Sparsity(NamedTuple):
    """Which tokens a token attends to: its document's first block, a window, and blocks that it chooses.

    Args:
        selected_blocks: blocks a list at most.
        block_size: tokens a block: 32, 64 or 128.
        window: tokens, a multiple of `block_size`.
        dense_below: a batch whose documents are all shorter attends to everything.
    """

    selected_blocks: int = 32
    block_size: int = 64
    window: int = 512
    dense_below: int = 8192

    def describe(self, selected_blocks: str) -> str:
        """For people; `selected_blocks` as they are spelled for all layers."""
        window = f"a window of {self.window}; all below {self.dense_below} tokens"
        return f"{selected_blocks} chosen blocks of {self.block_size}, {window}"

    def footprint(self, T: int, H: int, G: int, K: int, *, element_size: int = 2, **_) -> "AttentionFootprint":
        """What one document of T tokens costs; how documents are packed, and the backend, are of no importance."""
        return attention_footprint(T, H, G, K, self, element_size=element_size)


BLOCK_SIZES, HEAD_DIMS, LARGEST_GROUP = (32, 64, 128), (64, 128), 16
WORKSPACE_BYTES = 9 * 2**28  # half of one key/value head's slots at 131,072 tokens, 32 blocks: 2.03 GiB
SCORES_BYTES = 2**29


def sparse_attention_reference(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, blocks_BTGS: Tensor, segments: Tensor | None = None, *,
    block_size: int = 64, window: int = 512,
) -> Tensor:  # fmt: skip
    """Attention with the T x T matrix written out, in the inputs' dtype, on given lists."""
    scores, is_visible = _written_out(q_BTHK, k_BTGK, blocks_BTGS, segments, block_size, window)
    probabilities = scores.masked_fill(~is_visible, float("-inf")).softmax(-1)
    return torch.einsum("bgrts,bsgk->btgrk", probabilities, v_BTGK).flatten(2, 3)


def _written_out(q, k, blocks_BTGS, segments, block_size, window) -> tuple[Tensor, Tensor]:
    """Scores [B, G, R, T, T], and which of them count [B, G, 1, T, T]."""
    B, T, H, K = q.shape
    G = k.shape[2]
    document_BT = torch.zeros(B, T, dtype=torch.long)
    index_BT = torch.arange(T).expand(B, T).clone()  # a token's index within its document
    for i, (row, start, stop) in enumerate(segments.tolist() if segments is not None else []):
        document_BT[row, start:stop] = i
        index_BT[row, start:stop] = torch.arange(stop - start)
    document_BT = document_BT.to(q.device)
    block_BT = (index_BT // block_size).to(q.device)
    in_band = (block_BT[:, None, :] == 0) | (block_BT[:, None, :] > block_BT[:, :, None] - window // block_size)
    num_blocks = int(block_BT.max()) + 1  # of the longest document; EMPTY goes to a column behind these
    chosen = torch.zeros(B, T, G, num_blocks + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter_(-1, blocks_BTGS.long().clamp(max=num_blocks), True)[..., :num_blocks]
    in_lists = chosen.gather(-1, block_BT[:, None, None, :].expand(B, T, G, T)).permute(0, 2, 1, 3)  # [B, G, T, T]
    within_document = (document_BT[:, :, None] == document_BT[:, None, :]).tril()
    is_visible = within_document[:, None] & (in_band[:, None] | in_lists)
    scores = torch.einsum("btgrk,bsgk->bgrts", q.unflatten(2, (G, H // G)), k) / math.sqrt(K)
    return scores, is_visible[:, :, None]


def _reference_forward(q, k, v, lists, segments, block_size, window) -> tuple[Tensor, Tensor]:
    """out [B, T, H, K] and its log-sum-exp [B, T, H] float32."""
    scores, is_visible = _written_out(q, k, lists, segments, block_size, window)
    lse = scores.masked_fill(~is_visible, float("-inf")).logsumexp(-1).permute(0, 3, 1, 2).flatten(2)
    out = sparse_attention_reference(q, k, v, lists, segments, block_size=block_size, window=window)
    return out, lse.to(torch.promote_types(lse.dtype, torch.float32))


def _reference_backward(dout, q, k, v, out, lse, lists, segments, block_size, window) -> tuple[Tensor, Tensor, Tensor]:
    scores, is_visible = _written_out(q, k, lists, segments, block_size, window)

    def by_group(x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [B, T, G, R, ...]"""
        return x.unflatten(2, (k.shape[2], -1))

    p = (scores - by_group(lse).permute(0, 2, 3, 1)[..., None].to(scores)).exp().masked_fill(~is_visible, 0)
    delta = by_group((dout * out).sum(-1)).permute(0, 2, 3, 1)[..., None]  # [B, G, R, T, 1]
    ds = p * (torch.einsum("btgrk,bsgk->bgrts", by_group(dout), v) - delta) / math.sqrt(q.shape[-1])
    return (
        torch.einsum("bgrts,bsgk->btgrk", ds, k).flatten(2, 3),
        torch.einsum("bgrts,btgrk->bsgk", ds, by_group(q)),
        torch.einsum("bgrts,btgrk->bsgk", p, by_group(dout)),
    )


def select_blocks_reference(
    q_BTHK: Tensor, k_BTGK: Tensor, segments: Tensor | None = None, *,
    selected_blocks: int = 32, block_size: int = 64, window: int = 512,
) -> Tensor:  # fmt: skip
    """`select_blocks` with every score written out."""
    layout = make_layout(q_BTHK, segments, block_size, window)
    scores = scores_reference(q_BTHK.flatten(0, 1), pool_reference(k_BTGK.flatten(0, 1), layout), layout)
    return top_blocks_reference(scores, selected_blocks).unflatten(0, q_BTHK.shape[:2])


def work_ranges(
    layout: Layout, q: Tensor, G: int, selected: int, workspace_bytes: int
) -> list[tuple[range, list[range]]]:
    """Ranges of key/value heads, and for each its ranges of tokens, whose slots take up to `workspace_bytes`."""
    if selected == 0 or not layout.has_candidates:
        return [(range(G), [])]
    token_bytes = slot_bytes_per_token(q.shape[1] // G, q.shape[2], selected, q.element_size())
    N = layout.num_tokens
    tokens_at_a_time = min(N, max(64, workspace_bytes // token_bytes))
    heads_at_a_time = max(1, min(G, workspace_bytes // token_bytes // N))
    return [(heads, ranges(N, tokens_at_a_time)) for heads in ranges(G, heads_at_a_time)]


def sparse_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, layout: Layout, workspace_bytes: int,
    config: TileConfig = FORWARD_CONFIG,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [tokens, H, K], k and v [tokens, G, K], blocks [tokens, G, selected] -> out, lse [tokens, H] float32."""
    (_, H, K), G, S = q.shape, k.shape[1], blocks.shape[-1]
    out, lse = band_forward(q, k, v, layout)
    for heads, token_ranges in work_ranges(layout, q, G, S, workspace_bytes):
        indices = build_inverse_index(blocks, layout, heads, token_ranges, item_tokens(config, q, k, layout.block_size))
        for tokens, index in zip(token_ranges, indices):
            slots = q.new_empty(len(heads), len(tokens), S, H // G, K)
            slot_lse = lse.new_empty(slots.shape[:-1])
            gather_forward(q, k, v, slots, slot_lse, index, layout, heads, tokens, config)
            combine(out, lse, slots, slot_lse, blocks, heads, tokens)
            del slots, slot_lse  # before the next range's
        del indices  # before those of the next heads
    return out, lse


def sparse_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Tensor, layout: Layout,
    workspace_bytes: int, config: TileConfig = BACKWARD_CONFIG, *, add_to: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, in the layouts and dtypes of q, k and v.

    add_to: dq, dk and dv to which they are added, in place; None: there are none yet.
    """
    (N, H, K), G, S = q.shape, k.shape[1], blocks.shape[-1]
    dq, dk, dv = (None, torch.empty_like(k), torch.empty_like(v)) if add_to is None else add_to
    dq, delta = band_dq(dout, q, k, v, out, lse, layout, add_to=dq)
    for heads, token_ranges in work_ranges(layout, q, G, S, workspace_bytes):
        total = torch.zeros(2, len(heads), N, K, dtype=torch.float32, device=q.device)
        if add_to is not None:
            for sums, before in zip(total, (dk, dv)):
                sums.copy_(before[:, heads.start : heads.stop].transpose(0, 1))
        indices = build_inverse_index(blocks, layout, heads, token_ranges, item_tokens(config, q, k, layout.block_size))
        for tokens, index in zip(token_ranges, indices):
            slots = q.new_empty(len(heads), len(tokens), S, H // G, K)
            partial = gather_backward(dout, q, k, v, lse, delta, slots, index, layout, heads, tokens, config)
            add_slots(dq, slots, blocks, heads, tokens)
            add_partials(total, partial, index.first_item, layout)
            del slots, partial  # before the next range's
        del indices
        if len(layout.extra_block):
            add_partials(total, *band_dkv_extra(dout, q, k, v, lse, delta, layout, heads), layout)
        band_dkv(dout, q, k, v, lse, delta, total, dk, dv, layout, heads)
    return dq, dk, dv


def flat(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...], contiguous."""
    return x.contiguous().flatten(0, 1)


@operation("fathom::select_blocks", keepable="choices")
def _select_blocks(
    q: Tensor, k: Tensor, segments: Tensor | None, selected_blocks: int, block_size: int, window: int,
    triton_kernels: bool,
) -> Tensor:  # fmt: skip
    if not triton_kernels:
        sizes = {"selected_blocks": selected_blocks, "block_size": block_size, "window": window}
        return select_blocks_reference(q, k, segments, **sizes)
    layout = make_layout(q, segments, block_size, window)
    return choose_blocks(flat(q), flat(k), layout, selected_blocks, SCORES_BYTES).unflatten(0, q.shape[:2])


@_select_blocks.register_fake
def _(q, k, segments, selected_blocks, block_size, window, triton_kernels):
    return q.new_empty(*k.shape[:3], selected_blocks, dtype=torch.int16)


@operation("fathom::sparse_attention_forward", keepable="results")
def _sparse_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, lists: Tensor,
    block_size: int, window: int, workspace_bytes: int, triton_kernels: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, T, H, K] and its log-sum-exp [B, T, H] float32; lists as `select_blocks` returns them."""
    if not triton_kernels:
        return _reference_forward(q, k, v, lists, segments, block_size, window)
    layout = make_layout(q, segments, block_size, window)
    out, lse = sparse_forward(flat(q), flat(k), flat(v), flat(lists), layout, workspace_bytes)
    return out.view(q.shape), lse.view(q.shape[:3])


@_sparse_attention_forward.register_fake
def _(q, k, v, segments, lists, block_size, window, workspace_bytes, triton_kernels):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("fathom::sparse_attention_backward", mutates_args=())
def _sparse_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: Tensor, segments: Tensor | None,
    block_size: int, window: int, workspace_bytes: int, triton_kernels: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not triton_kernels:
        return _reference_backward(dout, q, k, v, out, lse, lists, segments, block_size, window)
    layout = make_layout(q, segments, block_size, window)
    gradients = sparse_backward(
        flat(dout), flat(q), flat(k), flat(v), flat(out), flat(lse), flat(lists), layout, workspace_bytes
    )
    return tuple(g.view(x.shape) for g, x in zip(gradients, (q, k, v)))


@_sparse_attention_backward.register_fake
def _(dout, q, k, v, out, lse, lists, segments, block_size, window, workspace_bytes, triton_kernels):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, segments, lists, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, lists, segments)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout, *_):
    if torch.is_grad_enabled():
        raise RuntimeError("sparse_attention has no second derivative (create_graph=True); its reference has")
    gradients = _sparse_attention_backward(dout, *ctx.saved_tensors, *ctx.options)
    return *gradients, *[None] * 6


_sparse_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def check_inputs(q, k, v, segments, block_size, window, impl) -> bool:
    """Whether Triton's kernels are to run, see `use_triton`; raises a ValueError for what they do not take."""
    (B, T, H, K), G = q.shape, k.shape[2]
    if k.shape != (B, T, G, K) or v.shape != k.shape or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"sparse attention needs q [B, T, H, K] and k, v [B, T, G, K] with H = n G, got {shapes}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if window < block_size or window % block_size:
        raise ValueError(f"window must be a multiple of block_size, {block_size}, and not 0, got {window}")
    if segments is not None and segments.is_cuda:
        raise ValueError("segments must lie on the CPU: they decide what is launched")
    if not use_triton(impl, q):
        return False
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "sparse attention's kernels take q, k and v of one dtype, float32, bfloat16 or float16, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    if K not in HEAD_DIMS or H // G > LARGEST_GROUP:
        raise ValueError(
            f"sparse attention's kernels take a head_dim of {HEAD_DIMS} and up to {LARGEST_GROUP} query heads a "
            f"key/value head, got {K} and {H // G}"
        )
    return True


def select_blocks(
    q_BTHK: Tensor, k_BTGK: Tensor, segments: Tensor | None = None, *,
    selected_blocks: int = 32, block_size: int = 64, window: int = 512, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """The blocks that each token and key/value head gathers, beyond its document's first block and its window.

    Args:
        q_BTHK, k_BTGK: queries [B, T, H, K] and keys [B, T, G, K], after RoPE.
        segments: the documents, as `kernels.attention.full.attention` takes them.
        selected_blocks: blocks a list at most.
        block_size: tokens a block, counted from the document's start: 32, 64 or 128.
        window: tokens, a multiple of `block_size`, see `sparse_attention`.
        impl: "auto", "triton" or "torch".

    Returns:
        int16 [B, T, G, selected_blocks]: block indices within the document, ascending, then `EMPTY` (32767).

    Raises:
        ValueError: shapes, dtypes or sizes that no kernel takes.
    """
    on_triton = check_inputs(q_BTHK, k_BTGK, k_BTGK, segments, block_size, window, impl)
    q, k = q_BTHK.detach(), k_BTGK.detach()
    return _select_blocks(q, k, segments, selected_blocks, block_size, window, on_triton)


def sparse_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, segments: Tensor | None = None, *, blocks: Tensor | None = None,
    selected_blocks: int = 32, block_size: int = 64, window: int = 512, workspace_bytes: int = WORKSPACE_BYTES,
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Causal grouped-query attention to the first block, a window and the chosen blocks of a token's document.

    Equal to `kernels.attention.full.attention` where the lists name every block between the first one and the window.

    Args:
        q_BTHK: queries [B, T, H, K], K of 64 or 128; bfloat16, float16 or float32.
        k_BTGK, v_BTGK: keys and values [B, T, G, K], H a multiple of G, up to 16 times.
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, first token, one past the last token) that
            cover every token once; None: each batch row is one document.
        blocks: lists as `select_blocks` returns them. Order, duplicates, and blocks that the band holds or that lie
            ahead are of no importance. None: chosen here, once, and kept for backward.
        selected_blocks: as in `select_blocks`; without effect where `blocks` is given.
        block_size: tokens a block: 32, 64 or 128.
        window: a token in block b attends to blocks b - window / block_size + 1 to b, itself being the last token.
        workspace_bytes: of slots at a time; fewer take more, smaller launches.
        impl: "auto", "triton" or "torch".

    Returns:
        [B, T, H, K] in q's dtype.

    Raises:
        ValueError: shapes, dtypes or sizes that no kernel takes.
        RuntimeError: in backward, create_graph=True.
    """
    on_triton = check_inputs(q_BTHK, k_BTGK, v_BTGK, segments, block_size, window, impl)
    if blocks is None:
        lists = _select_blocks(
            q_BTHK.detach(), k_BTGK.detach(), segments, selected_blocks, block_size, window, on_triton
        )
    else:
        lists = normalise_lists(blocks, make_layout(q_BTHK, segments, block_size, window))
    return _sparse_attention_forward(
        q_BTHK, k_BTGK, v_BTGK, segments, lists, block_size, window, workspace_bytes, on_triton
    )[0]


def slot_bytes_per_token(group: int, K: int, selected: int, element_size: int) -> int:
    """Of one key/value head: a slot's partial output or dq, and its log-sum-exp."""
    return selected * group * (K * element_size + 4)


def scores_bytes(num_blocks: int, block_size: int, window_blocks: int, G: int, selected: int) -> int:
    """Of the scores that exist at a time."""
    row = block_size * G * query_bytes(score_columns(num_blocks - 1, window_blocks), selected)  # of a block of queries
    return row * min(num_blocks, max(1, SCORES_BYTES // row))


class AttentionFootprint(NamedTuple):
    kept_bytes_per_token: int  # out, log-sum-exp and lists, beside q, k and v
    forward_workspace_bytes: int  # beside what is kept
    backward_workspace_bytes: int  # beside dq, dk and dv
    forward_flops: int
    backward_flops: int
    choice_flops: int  # of forward_flops, those of choosing the blocks
    choice_bytes_per_token: int  # of the kept ones, the lists'


@functools.cache
def attention_footprint(
    T: int, H: int, G: int, K: int, sparsity: Sparsity, *, workspace_bytes: int = WORKSPACE_BYTES, element_size: int = 2
) -> AttentionFootprint:
    """What one document of T tokens costs, tables of a few bytes a block left out."""
    S, block_size, window, _ = sparsity
    group = H // G
    num_blocks, window_blocks = -(-T // block_size), window // block_size
    lists = 2 * G * S
    kept = H * K * element_size + 4 * H + lists

    # (query block, candidate) pairs; where none is to be selected, none is scored.
    blocks = np.arange(num_blocks)
    before_window = np.maximum(0, blocks - window_blocks)
    candidates = int(before_window.sum()) if S else 0
    gathered = int(np.minimum(S, before_window).sum())
    band = int((np.minimum(blocks + 1, window_blocks) + (blocks >= window_blocks)).sum())
    means = num_blocks * (num_blocks - 1) // 2 if candidates else 0
    parts = block_size // PART_KEYS
    block_flops = 2 * block_size * block_size * H * K  # of one product of a block of queries and a block of keys
    scores_flops = (parts * candidates + means) * block_flops // block_size
    forward_flops = 2 * (gathered + band) * block_flops + scores_flops
    backward_flops = (5 * gathered + 7 * band) * block_flops

    token_bytes = slot_bytes_per_token(group, K, S, element_size)
    delta = 4 * T * H
    if not gathered:
        workspace = delta + 8 * T * G * K
        return AttentionFootprint(kept, 0, workspace, forward_flops, backward_flops, scores_flops, lists)
    tokens = min(T, max(64, workspace_bytes // token_bytes))
    heads = max(1, min(G, workspace_bytes // token_bytes // T))
    slots, entries = heads * tokens * token_bytes, heads * T * S
    scores = scores_bytes(num_blocks, block_size, window_blocks, G, S) + (parts + 1) * num_blocks * G * K * element_size
    chunk = BACKWARD_CONFIG.tiles * min(block_size, BACKWARD_CONFIG.rows // triton.next_power_of_2(group))
    items = heads * num_blocks + heads * tokens * S // chunk
    partials = 8 * items * block_size * K  # float32 dk and dv of each item
    slots_of_dq = slots - 4 * heads * tokens * S * group  # no log-sum-exps
    scores -= T * (kept - lists)  # out and log-sum-exp do not exist yet
    sorting, totals = SORT_BYTES * entries, delta + 8 * heads * T * K  # of float32 dk and dv
    return AttentionFootprint(
        kept,
        max(slots + 4 * entries, sorting, scores),
        totals + max(slots_of_dq + 4 * entries + partials, sorting),
        forward_flops,
        backward_flops,
        scores_flops,
        lists,
    )
