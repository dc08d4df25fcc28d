"""Sums in a fixed order: a token's band and slots into its output or dq, a block's items into its
dk and dv.

A slot has the output of a token's attention to one chosen block, see gather.py; ../README.md says
how parts make one softmax. Each slot is read once, in ascending order. In backward, dq is the plain
sum of band and slots.
"""

import triton
import triton.language as tl
from torch import Tensor

from .common import LN_2, LOG2_E, query_rows
from .layout import EMPTY, Layout

ROWS, NUM_WARPS = 16, 4  # rows of a tile: a row is one query head of one token
PARTIAL_ELEMENTS = 2048  # elements of a block's dk or dv that one program adds up


@triton.jit(do_not_specialize=["first_token", "num_tokens", "first_head"])
def _combine_kernel(
    out_ptr, lse_ptr, slots_ptr, slot_lse_ptr, blocks_ptr, first_token, num_tokens, first_head,
    S: tl.constexpr, BLOCK_S: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    K: tl.constexpr, BLOCK_T: tl.constexpr, EMPTY: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Adds slots to `out` in place; with WEIGHTED by their log-sum-exps, and updates `lse`."""
    head = tl.program_id(1).to(tl.int64)
    t, r, mask = query_rows(tl.program_id(0) * BLOCK_T, GROUP, GROUP_PAD, BLOCK_T)  # [ROWS]
    mask &= t < num_tokens
    token_head = (first_token + t).to(tl.int64) * G + first_head + head
    rows = token_head * GROUP + r
    list_rows = head * num_tokens + t
    columns = tl.arange(0, K)
    out_offsets = rows[:, None] * K + columns[None, :]
    out = tl.load(out_ptr + out_offsets, mask=mask[:, None], other=0.0)  # [ROWS, K]
    dtype = out.dtype
    out = out.to(tl.float32)
    if WEIGHTED:
        s = tl.arange(0, BLOCK_S)[None, :]
        block = tl.load(
            blocks_ptr + token_head[:, None] * S + s, mask=mask[:, None] & (s < S), other=EMPTY
        )
        # [ROWS, BLOCK_S]
        slot_lse = tl.load(
            slot_lse_ptr + (list_rows[:, None] * S + s) * GROUP + r[:, None],
            mask=block != EMPTY,
            other=float("-inf"),
        )
        band_lse = tl.load(lse_ptr + rows, mask=mask, other=0.0)
        maximum = tl.maximum(tl.max(slot_lse, 1), band_lse)
        band_part = tl.exp2((band_lse - maximum) * LOG2_E)
        total = band_part + tl.sum(tl.exp2((slot_lse - maximum[:, None]) * LOG2_E), 1)
        lse = maximum + tl.log2(total) * LN_2
        tl.store(lse_ptr + rows, lse, mask=mask)
        out *= (band_part / total)[:, None]
    for s in tl.range(0, S, loop_unroll_factor=8):
        chosen = mask & (tl.load(blocks_ptr + token_head * S + s, mask=mask, other=EMPTY) != EMPTY)
        slot_rows = (list_rows * S + s) * GROUP + r
        slot = tl.load(
            slots_ptr + slot_rows[:, None] * K + columns[None, :], mask=chosen[:, None], other=0.0
        )
        if WEIGHTED:
            weight = tl.exp2(
                (tl.load(slot_lse_ptr + slot_rows, mask=chosen, other=float("-inf")) - lse) * LOG2_E
            )
            out += weight[:, None] * slot.to(tl.float32)
        else:
            out += slot.to(tl.float32)
    tl.store(out_ptr + out_offsets, out.to(dtype), mask=mask[:, None])


@triton.jit(
    do_not_specialize=["num_items", "num_blocks"], do_not_specialize_on_alignment=["first_item_ptr"]
)
def _add_partials_kernel(
    total_ptr, partial_ptr, first_item_ptr, block_start_ptr, num_blocks, num_items, head_elements,
    BLOCK: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, which = tl.program_id(0), tl.program_id(2).to(tl.int64)
    start, stop = tl.load(first_item_ptr + row), tl.load(first_item_ptr + row + 1)
    if start == stop:
        return
    num_heads = tl.num_programs(0) // num_blocks
    offsets = tl.program_id(1) * PART + tl.arange(0, PART)  # elements, among a block's BLOCK * K
    block_start = tl.load(block_start_ptr + row % num_blocks).to(tl.int64)
    target = (
        total_ptr
        + (which * num_heads + row // num_blocks) * head_elements
        + block_start * K
        + offsets
    )
    total = tl.load(target)
    for item in range(start, stop):
        total += tl.load(partial_ptr + (which * num_items + item) * (BLOCK * K) + offsets)
    tl.store(target, total)


def combine(
    out: Tensor, slots: Tensor, blocks: Tensor, heads: range, tokens: range,
    lse: Tensor | None = None,
    slot_lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds slots to the band's output or dq, `out` [all tokens, H, K], in place.

    With `lse` [all tokens, H] both are outputs: one softmax is made over both, and `lse` becomes
    its log-sum-exp.
    """
    (_, H, K), (_, G, S) = out.shape, blocks.shape
    group_pad = triton.next_power_of_2(H // G)
    block_t = max(1, ROWS // group_pad)
    _combine_kernel[(triton.cdiv(len(tokens), block_t), len(heads))](
        out, lse, slots, slot_lse, blocks, tokens.start, len(tokens), heads.start,
        S=S, BLOCK_S=triton.next_power_of_2(S), G=G, GROUP=H // G, GROUP_PAD=group_pad, K=K,
        BLOCK_T=block_t,
        EMPTY=EMPTY, WEIGHTED=lse is not None, num_warps=NUM_WARPS,
    )  # fmt: skip


def add_partials(total: Tensor, partial: Tensor, first_item: Tensor, layout: Layout) -> None:
    """Adds the items' partial sums [2, items, block_size, K] to total [2, heads, all tokens, K], in
    place.

    Row r, head * num_blocks + block, has the items first_item[r] to first_item[r + 1] - 1. Only
    whole blocks have any.
    """
    _, num_heads, num_tokens, K = total.shape
    block_elements = layout.block_size * K
    part = min(PARTIAL_ELEMENTS, block_elements)
    _add_partials_kernel[(num_heads * layout.num_blocks, block_elements // part, 2)](
        total, partial, first_item, layout.block_start, layout.num_blocks, partial.shape[1],
        num_tokens * K,
        BLOCK=layout.block_size, K=K, PART=part,
    )  # fmt: skip
