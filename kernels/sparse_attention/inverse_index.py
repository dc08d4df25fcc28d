"""From lists of blocks by token to lists of tokens by block: a stable counting sort, without atomics.

A token of a key/value head has a list of `selected` blocks; an entry is its place there, token * selected + s. The
gather kernels want, for each head and block, the entries that name it, in the order of tokens. For lists
[[0], [1], [0, 1]] with 2 entries each, those of block 0 are 0 and 4, those of block 1 are 2 and 5.

Tokens are cut into at most 1,024 tiles, each with its own count of every block. A program walks through its tiles token
by token, and an entry's rank is the count that it finds. No token names a block twice, so the entries of one step never
meet. An exclusive sum of the counts in the order (head, block, tile) is where a tile's entries of a block begin.

A row is a (head, block) pair: head * num_blocks + block. Its entries are worked on in items of up to `chunk` of them,
so that a block which all tokens chose is many items. Item i belongs to the row r with first_item[r] <= i <
first_item[r + 1]. There are at most rows + entries / chunk items: the grid is that large, and the surplus is idle.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.sparse_attention.layout import EMPTY, Layout

MOST_TILES, SMALLEST_TILE = 1024, 16  # tokens are cut into up to 1,024 tiles of at least 16
TILES_AT_A_TIME = 8  # that one program of _rank_kernel walks through, side by side


class InverseIndex(NamedTuple):
    entries: Tensor  # [heads * tokens * selected] int32: entries, ordered by head, block and token
    first_entry: Tensor  # [rows + 1] int32: where a row's entries begin
    first_item: Tensor  # [rows + 1] int32: where a row's items begin
    item_row: Tensor  # [items] int32: an item's row; `rows` for surplus items
    chunk: int  # entries an item


def inverse_index_reference(blocks: Tensor, layout: Layout, heads: range, tokens: range) -> list[list[int]]:
    """Entries by row, in plain Python; blocks [tokens of all rows, G, selected]."""
    rows: list[list[int]] = [[] for _ in range(len(heads) * layout.num_blocks)]
    for i, head in enumerate(heads):
        for t, token in enumerate(tokens):
            first_block = int(layout.first_block[layout.token_block[token]])
            for s, block in enumerate(blocks[token, head].tolist()):
                if block != EMPTY:
                    rows[i * layout.num_blocks + first_block + block].append(t * blocks.shape[-1] + s)
    return rows


@triton.jit(do_not_specialize=["first_token", "num_tokens", "first_head", "num_tiles", "tile_tokens"])
def _rank_kernel(
    blocks_ptr, token_block_ptr, first_block_ptr, count_ptr, rank_ptr,
    first_token, num_tokens, first_head, num_heads, num_blocks, num_tiles, tile_tokens,
    S: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_TILES: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)[:, None]  # [BLOCK_TILES, 1]
    columns = tl.arange(0, BLOCK_S)[None, :]
    for step in range(0, tile_tokens):
        t = tile * tile_tokens + step
        mask = t < num_tokens
        token = (first_token + t).to(tl.int64)
        first_block = tl.load(first_block_ptr + tl.load(token_block_ptr + token, mask=mask, other=0))
        address = blocks_ptr + (token * num_heads + first_head + head) * S + columns
        block = tl.load(address, mask=mask & (columns < S), other=EMPTY).to(tl.int32)
        chosen = block != EMPTY  # [BLOCK_TILES, BLOCK_S]
        count = count_ptr + (head * num_blocks + first_block + block).to(tl.int64) * num_tiles + tile
        rank = tl.load(count, mask=chosen, other=0)
        tl.store(count, rank + 1, mask=chosen)
        tl.store(rank_ptr + (head.to(tl.int64) * num_tokens + t) * S + columns, rank.to(tl.int16), mask=chosen)
        tl.debug_barrier()  # The next token may find its count written by another thread.


@triton.jit(do_not_specialize=["first_token", "num_tokens", "first_head", "num_tiles", "tile_tokens"])
def _scatter_kernel(
    blocks_ptr, token_block_ptr, first_block_ptr, count_ptr, count_sum_ptr, rank_ptr, entries_ptr,
    first_token, num_tokens, first_head, num_heads, num_blocks, num_tiles, tile_tokens,
    S: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    columns = tl.arange(0, BLOCK_S)[None, :]
    mask = (t < num_tokens) & (columns < S)  # [BLOCK_T, BLOCK_S]
    first_block = tl.load(
        first_block_ptr + tl.load(token_block_ptr + first_token + t, mask=t < num_tokens, other=0)
    )  # [BLOCK_T, 1]
    address = ((first_token + t).to(tl.int64) * num_heads + first_head + head) * S + columns
    block = tl.load(blocks_ptr + address, mask=mask, other=EMPTY).to(tl.int32)
    chosen = block != EMPTY
    count = (head * num_blocks + first_block + block).to(tl.int64) * num_tiles + t // tile_tokens
    start = tl.load(count_sum_ptr + count, mask=chosen, other=0) - tl.load(count_ptr + count, mask=chosen, other=0)
    rank = tl.load(rank_ptr + (head.to(tl.int64) * num_tokens + t) * S + columns, mask=chosen, other=0)
    tl.store(entries_ptr + (start + rank).to(tl.int64), t * S + columns, mask=chosen)


def build_inverse_index(blocks: Tensor, layout: Layout, heads: range, tokens: range, chunk: int) -> InverseIndex:
    """The index of `tokens` and key/value `heads`; blocks [tokens of all rows, G, selected] int16."""
    _, G, S = blocks.shape
    n, rows = len(tokens), len(heads) * layout.num_blocks
    tile_tokens = max(SMALLEST_TILE, triton.cdiv(n, MOST_TILES))
    num_tiles = triton.cdiv(n, tile_tokens)
    count = torch.zeros(rows, num_tiles, dtype=torch.int32, device=blocks.device)
    rank = torch.empty(len(heads) * n * S, dtype=torch.int16, device=blocks.device)
    entries = torch.empty(len(heads) * n * S, dtype=torch.int32, device=blocks.device)
    tables = (blocks, layout.token_block, layout.first_block, count)
    sizes = (tokens.start, n, heads.start, G, layout.num_blocks, num_tiles, tile_tokens)
    lists = {"S": S, "BLOCK_S": triton.next_power_of_2(S), "EMPTY": EMPTY}
    _rank_kernel[(triton.cdiv(num_tiles, TILES_AT_A_TIME), len(heads))](
        *tables, rank, *sizes, **lists, BLOCK_TILES=TILES_AT_A_TIME, num_warps=1
    )
    count_sum = count.view(-1).cumsum(0, dtype=torch.int32)
    block_t = max(1, 1024 // lists["BLOCK_S"])
    grid = (triton.cdiv(n, block_t), len(heads))
    _scatter_kernel[grid](*tables, count_sum, rank, entries, *sizes, **lists, BLOCK_T=block_t)

    first_entry = F.pad(count_sum[num_tiles - 1 :: num_tiles], (1, 0))  # [rows + 1]
    row_items = (first_entry.diff() + (chunk - 1)) // chunk
    first_item = F.pad(row_items.cumsum(0, dtype=torch.int32), (1, 0))
    items = torch.arange(rows + len(entries) // chunk, dtype=torch.int32, device=blocks.device)
    item_row = torch.searchsorted(first_item[1:], items, right=True, out_int32=True)
    return InverseIndex(entries, first_entry, first_item, item_row, chunk)
