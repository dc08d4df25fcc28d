"""Attention to chosen blocks: a program loads one block of keys and values, and gathers the queries
that chose it.

Slot (t, s) holds the attention of query t to the block at place s of its list, over that block's
keys alone. combine.py makes one softmax of a token's slots and its band. A chosen block lies wholly
before its query, so there is nothing to mask. Backward has the same grid; ../README.md has the
mathematics.

A program takes one item of the inverse index: up to `chunk` queries of one block. It writes the
item's dk and dv once, as float32 partial sums, which combine.py adds up.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import LN_2, LOG2_E, TileConfig, launch_constants, matmul, query_rows, wide_config
from .inverse_index import InverseIndex
from .layout import Layout

FORWARD_CONFIG = TileConfig(rows=64, num_warps=4, num_stages=3, tiles=32)
BACKWARD_CONFIG = TileConfig(rows=64, num_warps=4, num_stages=3, tiles=64)
# Heads wider than 128, of which a block's keys and values fill 64 KiB of shared memory. Two
# programs of forward fit. Two warp groups of backward halve the columns of dk and dv, which
# together take half of all registers.
WIDE_FORWARD_CONFIG = TileConfig(rows=64, num_warps=4, num_stages=1, tiles=32)
# An item has as many rows in all backward configurations, which `sparse_workspace` counts on.
WIDE_BACKWARD_CONFIG = TileConfig(rows=64, num_warps=8, num_stages=3, tiles=64)


# Rows of an inverse index. They begin at any address, and one compiled kernel serves all.
TABLES = ["first_entry_ptr", "first_item_ptr", "item_row_ptr"]


@triton.jit
def _load_item(
    first_entry_ptr, first_item_ptr, item_row_ptr, block_start_ptr, num_blocks, num_rows,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the item's head among this call's, its keys, and the bounds of its entries (surplus
    items have none)."""
    item = tl.program_id(0)
    row = tl.load(item_row_ptr + item)
    surplus = row == num_rows
    row = tl.where(surplus, 0, row)
    start = tl.load(first_entry_ptr + row) + (item - tl.load(first_item_ptr + row)) * CHUNK
    stop = tl.minimum(start + CHUNK, tl.load(first_entry_ptr + row + 1))
    keys = tl.load(block_start_ptr + row % num_blocks).to(tl.int64) + tl.arange(0, BLOCK)
    return row // num_blocks, keys, start, tl.where(surplus, start, stop)


@triton.jit
def _load_rows(
    entries_ptr, i, stop, first_token, before_head, kv_head,
    S: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Returns the rows of q and the rows of the slots for the entries from i on, and which rows
    count; all [ROWS].

    An entry is a place in the lists [heads, tokens, S], counted through. The lists of `before_head`
    tokens come before this head's: entry e is of token e // S - before_head. Slots begin with token
    `first_token`: entry e has slot e - first_token * S. A row is one query head, of q [tokens, G,
    GROUP] or of the slots [slots, GROUP].
    """
    position, r, mask = query_rows(i, GROUP, GROUP_PAD, BLOCK_T)
    mask &= position < stop
    entry = tl.load(entries_ptr + position, mask=position < stop, other=0)
    token = (entry // S - before_head).to(tl.int64)
    return (
        (token * G + kv_head) * GROUP + r,
        (entry - first_token * S).to(tl.int64) * GROUP + r,
        mask,
    )


@triton.jit(
    do_not_specialize=["first_token", "num_tokens", "first_head", "num_blocks", "num_rows"],
    do_not_specialize_on_alignment=TABLES,
)
def _gather_forward_kernel(
    q_ptr, k_ptr, v_ptr, slots_ptr, slot_lse_ptr,
    entries_ptr, first_entry_ptr, first_item_ptr, item_row_ptr, block_start_ptr,
    first_token, num_tokens, first_head, num_blocks, num_rows, scale,
    S: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head, keys, start, stop = _load_item(
        first_entry_ptr,
        first_item_ptr,
        item_row_ptr,
        block_start_ptr,
        num_blocks,
        num_rows,
        CHUNK,
        BLOCK,
    )
    if start >= stop:
        return
    columns = tl.arange(0, K)
    kv_head = first_head + head
    kv_offsets = (keys[:, None] * G + kv_head) * K + columns[None, :]  # [BLOCK, K]
    k = tl.load(k_ptr + kv_offsets)
    v = tl.load(v_ptr + kv_offsets)
    for i in range(start, stop, BLOCK_T):
        q_rows, slot_rows, mask = _load_rows(
            entries_ptr,
            i,
            stop,
            first_token,
            head * num_tokens,
            kv_head,
            S,
            G,
            GROUP,
            GROUP_PAD,
            BLOCK_T,
        )
        # [ROWS, K]
        q = tl.load(q_ptr + q_rows[:, None] * K + columns[None, :], mask=mask[:, None], other=0.0)
        scores = matmul(q, tl.trans(k)) * (scale * LOG2_E)  # [ROWS, BLOCK]
        maximum = tl.max(scores, 1)
        p = tl.exp2(scores - maximum[:, None])
        total = tl.sum(p, 1)
        out = matmul(p.to(v.dtype), v) * (1 / total)[:, None]  # [ROWS, K]
        tl.store(
            slots_ptr + slot_rows[:, None] * K + columns[None, :],
            out.to(q.dtype),
            mask=mask[:, None],
        )
        tl.store(slot_lse_ptr + slot_rows, (maximum + tl.log2(total)) * LN_2, mask=mask)


@triton.jit(
    do_not_specialize=["first_token", "num_tokens", "first_head", "num_blocks", "num_rows"],
    do_not_specialize_on_alignment=TABLES,
)
def _gather_backward_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, slots_ptr, partial_ptr,
    entries_ptr, first_entry_ptr, first_item_ptr, item_row_ptr, block_start_ptr,
    first_token, num_tokens, first_head, num_blocks, num_rows, scale,
    S: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head, keys, start, stop = _load_item(
        first_entry_ptr,
        first_item_ptr,
        item_row_ptr,
        block_start_ptr,
        num_blocks,
        num_rows,
        CHUNK,
        BLOCK,
    )
    if start >= stop:
        return
    columns = tl.arange(0, K)
    kv_head = first_head + head
    kv_offsets = (keys[:, None] * G + kv_head) * K + columns[None, :]  # [BLOCK, K]
    k = tl.load(k_ptr + kv_offsets)
    v = tl.load(v_ptr + kv_offsets)
    dk = tl.zeros([BLOCK, K], tl.float32)
    dv = tl.zeros([BLOCK, K], tl.float32)
    for i in range(start, stop, BLOCK_T):
        q_rows, slot_rows, mask = _load_rows(
            entries_ptr,
            i,
            stop,
            first_token,
            head * num_tokens,
            kv_head,
            S,
            G,
            GROUP,
            GROUP_PAD,
            BLOCK_T,
        )
        q_offsets = q_rows[:, None] * K + columns[None, :]
        q = tl.load(q_ptr + q_offsets, mask=mask[:, None], other=0.0)  # [ROWS, K]
        dout = tl.load(dout_ptr + q_offsets, mask=mask[:, None], other=0.0)
        # Rows of padding have probability 0.
        lse = tl.load(lse_ptr + q_rows, mask=mask, other=float("inf"))
        delta = tl.load(delta_ptr + q_rows, mask=mask, other=0.0)
        # [BLOCK, ROWS]
        p = tl.exp2(matmul(k, tl.trans(q)) * (scale * LOG2_E) - (lse * LOG2_E)[None, :])
        dv += matmul(p.to(dout.dtype), dout)
        dp = matmul(v, tl.trans(dout))  # [BLOCK, ROWS]
        ds = (p * (dp - delta[None, :]) * scale).to(q.dtype)
        dk += matmul(ds, q)
        # Transposes the product instead of ds, which then goes to shared memory as it is.
        dq = tl.trans(matmul(tl.trans(k), ds))  # [ROWS, K]
        tl.store(
            slots_ptr + slot_rows[:, None] * K + columns[None, :],
            dq.to(q.dtype),
            mask=mask[:, None],
        )
    item = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)[:, None] * K + columns[None, :]
    tl.store(partial_ptr + item * BLOCK * K + offsets, dk)
    tl.store(partial_ptr + (tl.num_programs(0) + item) * BLOCK * K + offsets, dv)


def forward_config(q: Tensor) -> TileConfig:
    return FORWARD_CONFIG if q.shape[-1] <= 128 else wide_config(WIDE_FORWARD_CONFIG, q.device)


def backward_config(q: Tensor) -> TileConfig:
    return BACKWARD_CONFIG if q.shape[-1] <= 128 else wide_config(WIDE_BACKWARD_CONFIG, q.device)


def item_tokens(config: TileConfig, q: Tensor, k: Tensor, block_size: int) -> int:
    """Returns the most tokens of an item, `chunk` of the inverse index."""
    return config.tiles * launch_constants(q, k.shape[1], block_size, config)["BLOCK_T"]


def _launch(kernel, config, q, k, tensors, slots, index, layout, heads, tokens):
    kernel[(len(index.item_row),)](
        *tensors, index.entries, index.first_entry, index.first_item, index.item_row,
        layout.block_start,
        tokens.start, layout.num_tokens, heads.start, layout.num_blocks,
        len(heads) * layout.num_blocks,
        1 / math.sqrt(q.shape[-1]), S=slots.shape[2], CHUNK=index.chunk,
        **launch_constants(q, k.shape[1], layout.block_size, config),
    )  # fmt: skip


def gather_forward(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, slot_lse: Tensor, index: InverseIndex,
    layout: Layout,
    heads: range, tokens: range, config: TileConfig,
) -> None:  # fmt: skip
    """Fills `slots` [heads, tokens, selected, group, K], and `slot_lse` without the last size."""
    tensors = q, k, v, slots, slot_lse
    _launch(_gather_forward_kernel, config, q, k, tensors, slots, index, layout, heads, tokens)


def gather_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, slots: Tensor,
    index: InverseIndex,
    layout: Layout, heads: range, tokens: range, config: TileConfig,
) -> Tensor:  # fmt: skip
    """Fills `slots` with parts of dq; returns dk and dv of each real item, [2, items, block_size,
    K] float32."""
    items = len(index.item_row)
    partial = torch.empty(
        2, items, layout.block_size, q.shape[-1], dtype=torch.float32, device=q.device
    )
    tensors = dout, q, k, v, lse, delta, slots, partial
    _launch(_gather_backward_kernel, config, q, k, tensors, slots, index, layout, heads, tokens)
    return partial
