"""The band: every token attends to its document's first block and to its window, causally,
flash-attention style.

../README.md has the mathematics. A program of backward's first kernel holds queries and makes dq
and delta. A program of the second holds a block of keys and makes dk and dv. All later tokens of a
document attend to its first block: tokens past that block's window are taken in extra chunks of
`window` tokens, and combine.py adds up the chunks' sums.

An exact band (`exact`) is the last `window` tokens, the token itself included, without the first
block. It reaches into one block more, where a mask hides the keys that are too far back. With a
window of 512, token 700 sees 189 to 700. The window is WINDOW blocks without SHORT tokens: 100
tokens are two blocks of 64 without 28. A mask is then needed in one block more as well.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    LN_2,
    LOG2_E,
    TileConfig,
    launch_constants,
    matmul,
    query_rows,
    softmax_step,
    wide_config,
)
from .layout import Layout

# The fastest on an H200 with 32 and 8 heads of 128, for exact windows of 1,024 and 4,096 tokens.
# With 4 warps the first two kernels would spill on Ampere.
QUERIES_CONFIG = TileConfig(rows=128, num_warps=8, num_stages=3)
# Where a block has at most 64 rows, as of heads that share no keys:
# the fastest with 32 heads of 128.
NARROW_CONFIG = TileConfig(rows=64, num_warps=4, num_stages=2)
KEYS_CONFIG = TileConfig(rows=32, num_warps=4, num_stages=3)
# Heads wider than 128. Forward's was the fastest on an H100 with 16 and 4 heads of 256: 64 rows
# took twice as long. As many rows do not fit in backward.
WIDE_FORWARD_CONFIG = TileConfig(rows=128, num_warps=8, num_stages=2)
WIDE_BACKWARD_CONFIG = TileConfig(rows=64, num_warps=8, num_stages=2)


@triton.jit
def _load_tile(
    block_start_ptr, block_stop_ptr, first_block_ptr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr, SHORT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Returns a program's first token, its block's end, its document's start, and its block's index
    in the document.

    A document that goes on from blocks of another one starts that many blocks before its first
    token.

    Also returns where to begin visiting blocks of keys, `left`, the window's first block, and
    `first_unmasked`, from which on no visit before the own block needs a mask. A visit before
    `left` stands for block 0: for a window from block 5 on, visits are to 4, 5, 6, ..., and blocks
    are 0, 5, 6, ... An exact window reaches into block `left` in part.
    """
    tiles: tl.constexpr = BLOCK // BLOCK_T
    block = tl.program_id(0) // tiles
    first_block = tl.load(first_block_ptr + block)
    block_in_document = block - first_block
    block_start = tl.load(block_start_ptr + block).to(tl.int64)
    left = tl.maximum(block_in_document - WINDOW if EXACT else block_in_document - WINDOW + 1, 0)
    return (
        block_start + (tl.program_id(0) % tiles) * BLOCK_T,
        tl.load(block_stop_ptr + block).to(tl.int64),
        block_start - block_in_document * BLOCK,
        block_in_document,
        left if EXACT else tl.maximum(left - 1, 0),
        left,
        tl.minimum(tl.maximum(block_in_document - WINDOW + 2, 0), block_in_document)
        if SHORT
        else tl.where(block_in_document >= WINDOW, left + 1, left)
        if EXACT
        else tl.maximum(left - 1, 0),
    )


@triton.jit
def _load_keys(
    k_ptr, v_ptr, document_start, shared, shared_start, block, head, stop, columns,
    G: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Returns the tokens [BLOCK] of a block's keys, and k and v [BLOCK, K]. With MASKED, `stop`
    ends the document.

    With SHARED, the document's first `shared` blocks are another one's, which starts at
    `shared_start`.
    """
    if SHARED:
        document_start = tl.where(block < shared, shared_start, document_start)
    key = document_start + block * BLOCK + tl.arange(0, BLOCK)
    offsets = (key[:, None] * G + head) * K + columns[None, :]
    if MASKED:
        mask = key[:, None] < stop
        return (
            key,
            tl.load(k_ptr + offsets, mask=mask, other=0.0),
            tl.load(v_ptr + offsets, mask=mask, other=0.0),
        )
    return key, tl.load(k_ptr + offsets), tl.load(v_ptr + offsets)


@triton.jit
def _load_shared(
    block_start_ptr,
    shared_ptr,
    first_shared_ptr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Returns how many blocks a program's document shares with another, and where they start."""
    if SHARED:
        block = tl.program_id(0) // (BLOCK // BLOCK_T)
        first = tl.load(first_shared_ptr + block)
        return tl.load(shared_ptr + block), tl.load(block_start_ptr + first).to(tl.int64)
    else:
        return 0, 0


@triton.jit
def _band_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, block_start_ptr, block_stop_ptr, first_block_ptr,
    shared_ptr, first_shared_ptr, scale,
    G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr, SHORT: tl.constexpr,
    EXACT: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    start, stop, document_start, query_block, visit, left, first_unmasked = _load_tile(
        block_start_ptr, block_stop_ptr, first_block_ptr, BLOCK, BLOCK_T, WINDOW, SHORT, EXACT
    )
    shared, shared_start = _load_shared(
        block_start_ptr, shared_ptr, first_shared_ptr, BLOCK, BLOCK_T, SHARED
    )
    if start >= stop:
        return
    head = tl.program_id(1)
    token, r, mask = query_rows(start, GROUP, GROUP_PAD, BLOCK_T)  # [ROWS]
    mask &= token < stop
    columns = tl.arange(0, K)
    rows = (token * G + head) * GROUP + r
    offsets = rows[:, None] * K + columns[None, :]
    q = tl.load(q_ptr + offsets, mask=mask[:, None], other=0.0)  # [ROWS, K]
    scale *= LOG2_E
    # Below every score but finite, because a row may see nothing of an exact window's first block.
    maximum = tl.full([BLOCK_T * GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([BLOCK_T * GROUP_PAD], tl.float32)
    out = tl.zeros([BLOCK_T * GROUP_PAD, K], tl.float32)
    for i in range(visit, first_unmasked):
        key, k, v = _load_keys(
            k_ptr,
            v_ptr,
            document_start,
            shared,
            shared_start,
            i,
            head,
            stop,
            columns,
            G,
            K,
            BLOCK,
            False,
            SHARED,
        )
        visible = key[None, :] > token[:, None] - (WINDOW * BLOCK - SHORT)
        scores = tl.where(visible, matmul(q, tl.trans(k)) * scale, float("-inf"))  # [ROWS, BLOCK]
        out, maximum, total = softmax_step(scores, v, out, maximum, total)
    for i in range(first_unmasked, query_block):
        block = tl.where(i < left, 0, i)
        key, k, v = _load_keys(
            k_ptr,
            v_ptr,
            document_start,
            shared,
            shared_start,
            block,
            head,
            stop,
            columns,
            G,
            K,
            BLOCK,
            False,
            SHARED,
        )
        out, maximum, total = softmax_step(matmul(q, tl.trans(k)) * scale, v, out, maximum, total)
    key, k, v = _load_keys(
        k_ptr,
        v_ptr,
        document_start,
        shared,
        shared_start,
        query_block,
        head,
        stop,
        columns,
        G,
        K,
        BLOCK,
        True,
        False,
    )
    visible = (key[None, :] <= token[:, None]) & (key[None, :] < stop)
    if SHORT and WINDOW == 1:
        visible &= key[None, :] > token[:, None] - (BLOCK - SHORT)
    scores = tl.where(visible, matmul(q, tl.trans(k)) * scale, float("-inf"))
    out, maximum, total = softmax_step(scores, v, out, maximum, total)
    tl.store(out_ptr + offsets, (out / total[:, None]).to(q.dtype), mask=mask[:, None])
    tl.store(lse_ptr + rows, (maximum + tl.log2(total)) * LN_2, mask=mask)


@triton.jit
def _band_dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr,
    block_start_ptr, block_stop_ptr, first_block_ptr, shared_ptr, first_shared_ptr, scale,
    G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr, SHORT: tl.constexpr,
    EXACT: tl.constexpr,
    SHARED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    start, stop, document_start, query_block, visit, left, first_unmasked = _load_tile(
        block_start_ptr, block_stop_ptr, first_block_ptr, BLOCK, BLOCK_T, WINDOW, SHORT, EXACT
    )
    shared, shared_start = _load_shared(
        block_start_ptr, shared_ptr, first_shared_ptr, BLOCK, BLOCK_T, SHARED
    )
    if start >= stop:
        return
    head = tl.program_id(1)
    token, r, mask = query_rows(start, GROUP, GROUP_PAD, BLOCK_T)  # [ROWS]
    mask &= token < stop
    columns = tl.arange(0, K)
    rows = (token * G + head) * GROUP + r
    offsets = rows[:, None] * K + columns[None, :]
    q = tl.load(q_ptr + offsets, mask=mask[:, None], other=0.0)  # [ROWS, K]
    dout = tl.load(dout_ptr + offsets, mask=mask[:, None], other=0.0)
    out = tl.load(out_ptr + offsets, mask=mask[:, None], other=0.0)
    lse = tl.load(lse_ptr + rows, mask=mask, other=float("inf")) * LOG2_E
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)  # [ROWS]
    tl.store(delta_ptr + rows, delta, mask=mask)
    dq = tl.zeros([BLOCK_T * GROUP_PAD, K], tl.float32)
    for i in range(visit, first_unmasked):
        key, k, v = _load_keys(
            k_ptr,
            v_ptr,
            document_start,
            shared,
            shared_start,
            i,
            head,
            stop,
            columns,
            G,
            K,
            BLOCK,
            False,
            SHARED,
        )
        visible = key[None, :] > token[:, None] - (WINDOW * BLOCK - SHORT)
        # [ROWS, BLOCK]
        p = tl.where(
            visible, tl.exp2(matmul(q, tl.trans(k)) * (scale * LOG2_E) - lse[:, None]), 0.0
        )
        dq += matmul((p * (matmul(dout, tl.trans(v)) - delta[:, None])).to(q.dtype), k)
    for i in range(first_unmasked, query_block):
        block = tl.where(i < left, 0, i)
        key, k, v = _load_keys(
            k_ptr,
            v_ptr,
            document_start,
            shared,
            shared_start,
            block,
            head,
            stop,
            columns,
            G,
            K,
            BLOCK,
            False,
            SHARED,
        )
        p = tl.exp2(matmul(q, tl.trans(k)) * (scale * LOG2_E) - lse[:, None])
        dq += matmul((p * (matmul(dout, tl.trans(v)) - delta[:, None])).to(q.dtype), k)
    key, k, v = _load_keys(
        k_ptr,
        v_ptr,
        document_start,
        shared,
        shared_start,
        query_block,
        head,
        stop,
        columns,
        G,
        K,
        BLOCK,
        True,
        False,
    )
    visible = key[None, :] <= token[:, None]
    if SHORT and WINDOW == 1:
        visible &= key[None, :] > token[:, None] - (BLOCK - SHORT)
    p = tl.where(visible, tl.exp2(matmul(q, tl.trans(k)) * (scale * LOG2_E) - lse[:, None]), 0.0)
    dq += matmul((p * (matmul(dout, tl.trans(v)) - delta[:, None])).to(q.dtype), k)
    dq *= scale
    if ADD:
        dq += tl.load(dq_ptr + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
    tl.store(dq_ptr + offsets, dq.to(q.dtype), mask=mask[:, None])


@triton.jit
def _add_queries(
    dk, dv, k, v, key, q_ptr, dout_ptr, lse_ptr, delta_ptr, start, stop, first_head, head, scale,
    G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CAUSAL: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv [BLOCK, K] of queries from token `start`, which see their last REACH keys
    (None: all)."""
    columns = tl.arange(0, K)
    token, r, mask = query_rows(start, GROUP, GROUP_PAD, BLOCK_T)  # [ROWS]
    mask &= token < stop
    rows = (token.to(tl.int64) * G + first_head + head) * GROUP + r
    offsets = rows[:, None] * K + columns[None, :]
    q = tl.load(q_ptr + offsets, mask=mask[:, None], other=0.0)  # [ROWS, K]
    dout = tl.load(dout_ptr + offsets, mask=mask[:, None], other=0.0)
    # Rows of padding have probability 0.
    lse = tl.load(lse_ptr + rows, mask=mask, other=float("inf"))
    delta = tl.load(delta_ptr + rows, mask=mask, other=0.0)
    # [BLOCK, ROWS]
    p = tl.exp2(matmul(k, tl.trans(q)) * (scale * LOG2_E) - (lse * LOG2_E)[None, :])
    if CAUSAL:
        p = tl.where(key[:, None] <= token[None, :], p, 0.0)
    if REACH is not None:
        p = tl.where(key[:, None] > token[None, :] - REACH, p, 0.0)
    dv += matmul(p.to(dout.dtype), dout)
    ds = p * (matmul(v, tl.trans(dout)) - delta[None, :])
    dk += matmul(ds.to(q.dtype), q)
    return dk, dv


@triton.jit(do_not_specialize=["first_head"])
def _band_dkv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, total_ptr, dk_ptr, dv_ptr, item_block_ptr,
    item_start_ptr,
    item_stop_ptr, block_start_ptr, block_stop_ptr, document_stop_ptr, first_head, head_elements,
    scale,
    G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, WINDOW: tl.constexpr, SHORT: tl.constexpr, EXTRA: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a block of keys from `WINDOW` blocks of queries.

    With EXTRA, item tables name a document's first block and an extra chunk of queries. The sums go
    to total_ptr [2, heads * chunks, BLOCK, K].

    Without EXTRA, the queries are the tokens that have the block in their window. total_ptr [2,
    heads, all tokens, K] then holds the sums of gathered queries and of extra chunks. They are
    added, and the result goes to dk and dv [tokens, G, K]. With EXACT there is no total.
    """
    item, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(item_block_ptr + item) if EXTRA else item
    query_start = tl.load(item_start_ptr + item) if EXTRA else tl.load(block_start_ptr + block)
    if EXTRA:
        query_stop = tl.load(item_stop_ptr + item)
    else:
        query_stop = query_start + (WINDOW + 1 if EXACT else WINDOW) * BLOCK
        query_stop = tl.minimum(query_stop, tl.load(document_stop_ptr + block))
    key_stop = tl.load(block_stop_ptr + block).to(tl.int64)
    columns = tl.arange(0, K)
    key = tl.load(block_start_ptr + block).to(tl.int64) + tl.arange(0, BLOCK)
    key_mask = key[:, None] < key_stop
    kv_offsets = (key[:, None] * G + first_head + head) * K + columns[None, :]  # [BLOCK, K]
    k = tl.load(k_ptr + kv_offsets, mask=key_mask, other=0.0)
    v = tl.load(v_ptr + kv_offsets, mask=key_mask, other=0.0)
    dk = tl.zeros([BLOCK, K], tl.float32)
    dv = tl.zeros([BLOCK, K], tl.float32)
    # The block's own tokens see some of its keys, and so do the tokens in the last block of an
    # exact window, or in the last two of a short one: these need masks.
    own_stop = query_start if EXTRA else tl.minimum(query_start + BLOCK, query_stop)
    whole_stop = tl.minimum(query_start + WINDOW * BLOCK, query_stop) if EXACT else query_stop
    if SHORT:
        whole_stop = tl.maximum(
            tl.minimum(query_start + (WINDOW - 1) * BLOCK, query_stop), own_stop
        )
    for part in tl.static_range(3):
        first = query_start if part == 0 else own_stop if part == 1 else whole_stop
        last = own_stop if part == 0 else whole_stop if part == 1 else query_stop
        for i in range(first, last, BLOCK_T):
            dk, dv = _add_queries(
                dk,
                dv,
                k,
                v,
                key,
                q_ptr,
                dout_ptr,
                lse_ptr,
                delta_ptr,
                i,
                query_stop,
                first_head,
                head,
                scale,
                G,
                GROUP,
                GROUP_PAD,
                K,
                BLOCK_T,
                CAUSAL=part == 0,
                REACH=WINDOW * BLOCK - SHORT
                if part == 2 or (part == 0 and SHORT and WINDOW == 1)
                else None,
            )
    dk *= scale
    if EXTRA:
        chunk = head * tl.num_programs(0) + item
        offsets = tl.arange(0, BLOCK)[:, None] * K + columns[None, :]
        tl.store(total_ptr + chunk * BLOCK * K + offsets, dk)
        tl.store(
            total_ptr + (tl.num_programs(1) * tl.num_programs(0) + chunk) * BLOCK * K + offsets, dv
        )
    else:
        if not EXACT:
            offsets = key[:, None] * K + columns[None, :]
            dk += tl.load(total_ptr + head * head_elements + offsets, mask=key_mask, other=0.0)
            dv += tl.load(
                total_ptr + (tl.num_programs(1) + head) * head_elements + offsets,
                mask=key_mask,
                other=0.0,
            )
        tl.store(dk_ptr + kv_offsets, dk.to(k.dtype), mask=key_mask)
        tl.store(dv_ptr + kv_offsets, dv.to(v.dtype), mask=key_mask)


def queries_config(device: torch.device, block_rows: int) -> TileConfig:
    """Returns tiles of kernels over queries, of which a block has so many rows, with heads of up to
    128 elements.

    Three stages need shared memory that only Hopper and B200 have. On older GPUs narrow tiles of 64
    rows would spill hundreds of bytes, tiles of 32 rows 8.
    """
    is_large = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    if block_rows <= NARROW_CONFIG.rows:
        return NARROW_CONFIG if is_large else NARROW_CONFIG._replace(rows=32)
    return QUERIES_CONFIG if is_large else QUERIES_CONFIG._replace(num_stages=2)


def _launch_over_queries(kernel, wide, q, k, tensors, layout, **constants):
    """Launches a kernel whose programs have a tile of queries and a key/value head each; `wide` is
    for wide heads."""
    rows = layout.block_size * triton.next_power_of_2(q.shape[1] // k.shape[1])
    config = queries_config(q.device, rows) if q.shape[2] <= 128 else wide_config(wide, q.device)
    tile = launch_constants(q, k.shape[1], layout.block_size, config)
    kernel[layout.num_blocks * (layout.block_size // tile["BLOCK_T"]), k.shape[1]](
        *tensors, layout.block_start, layout.block_stop, layout.first_block,
        *(layout.shared or (None, None))[:2],
        1 / math.sqrt(q.shape[-1]), **tile, WINDOW=layout.window_blocks, SHORT=layout.window_short,
        SHARED=layout.shared is not None, **constants,
    )  # fmt: skip


def band_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, exact: bool = False,
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [tokens, H, K], k and v [tokens, G, K] -> out [tokens, H, K], lse [tokens, H] float32,
    written `into` both."""
    out, lse = into or (
        torch.empty_like(q),
        torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
    )
    _launch_over_queries(
        _band_forward_kernel, WIDE_FORWARD_CONFIG, q, k, (q, k, v, out, lse), layout, EXACT=exact
    )
    return out, lse


def band_dq(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor,
    layout: Layout, *,
    exact: bool = False, add: bool = False,
) -> Tensor:  # fmt: skip
    """Writes the band's part into dq, or adds it with `add`; returns delta = sum(dout * out)
    [tokens, H] float32."""
    delta = torch.empty_like(lse)
    tensors = dout, q, k, v, out, lse, delta, dq
    _launch_over_queries(
        _band_dq_kernel, WIDE_BACKWARD_CONFIG, q, k, tensors, layout, EXACT=exact, ADD=add
    )
    return delta


def _launch_dkv(dout, q, k, v, lse, delta, total, dk, dv, layout, heads, extra=False, exact=False):
    config = KEYS_CONFIG if q.shape[2] <= 128 else wide_config(WIDE_BACKWARD_CONFIG, q.device)
    tile = launch_constants(q, k.shape[1], layout.block_size, config)
    _band_dkv_kernel[len(layout.extra_block) if extra else layout.num_blocks, len(heads)](
        dout, q, k, v, lse, delta, total, dk, dv, layout.extra_block, layout.extra_start,
        layout.extra_stop,
        layout.block_start, layout.block_stop, layout.document_stop, heads.start,
        layout.num_tokens * q.shape[-1],
        1 / math.sqrt(q.shape[-1]), **tile, WINDOW=layout.window_blocks, SHORT=layout.window_short,
        EXTRA=extra,
        EXACT=exact,
    )  # fmt: skip


def band_dkv_extra(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    layout: Layout,
    heads: range,
) -> tuple[Tensor, Tensor]:
    """Returns the parts of dk and dv that extra chunks of queries give to the documents' first
    blocks.

    They are [2, heads * chunks, block_size, K] float32. The second result is the first chunk of
    each (head, block).
    """
    num_extra, shape = len(layout.extra_block), (layout.block_size, q.shape[-1])
    partial = torch.empty(2, len(heads) * num_extra, *shape, dtype=torch.float32, device=q.device)
    if num_extra:
        _launch_dkv(dout, q, k, v, lse, delta, partial, None, None, layout, heads, extra=True)
    head = torch.arange(len(heads), dtype=torch.int32, device=q.device)[:, None]
    first_item = torch.cat(
        [(head * num_extra + layout.first_extra[:-1]).view(-1), (head[-1] + 1) * num_extra]
    )
    return partial, first_item


def band_dkv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, total: Tensor | None,
    dk: Tensor,
    dv: Tensor, layout: Layout, heads: range,
) -> None:  # fmt: skip
    """Writes dk and dv [tokens, G, K] of `heads`: the part of queries in the window, plus `total`.

    `total` [2, heads, tokens, K] float32 has all other parts. None: the band is exact, and has no
    other parts.
    """
    _launch_dkv(dout, q, k, v, lse, delta, total, dk, dv, layout, heads, exact=total is None)
