"""From lists of blocks by token to lists of tokens by block: a stable sort.

An entry is a place in the lists of blocks [heads, tokens, selected], counted through. The gather kernels want, for each
head and block, the entries that name it, in the order of tokens. For one head's lists [[0], [1], [0, 1]] with 2 entries
each, those of block 0 are 0 and 4, those of block 1 are 2 and 5.

A row is a (head, block) pair: head * num_blocks + block. Its entries are worked on in items of up to `chunk` of them,
so that a block which all tokens chose is many items. Item i belongs to the row r with first_item[r] <= i <
first_item[r + 1]. There are at most rows + entries / chunk items: the grid is that large, and the surplus is idle.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sparse_attention.layout import EMPTY, Layout


class InverseIndex(NamedTuple):
    entries: Tensor  # [heads * tokens * selected] int32: entries, ordered by row and token
    first_entry: Tensor  # [rows + 1] int32: where a row's entries begin
    first_item: Tensor  # [rows + 1] int32: where a row's items begin
    item_row: Tensor  # [items] int32: an item's row; `rows` for surplus items
    chunk: int  # entries an item


def inverse_index_reference(blocks: Tensor, layout: Layout, heads: range, tokens: range) -> list[list[int]]:
    """Entries by row, in plain Python; blocks [tokens of all documents, G, selected]."""
    rows: list[list[int]] = [[] for _ in range(len(heads) * layout.num_blocks)]
    for i, head in enumerate(heads):
        for t, token in enumerate(tokens):
            first_block = int(layout.first_block[layout.token_block[token]])
            for s, block in enumerate(blocks[token, head].tolist()):
                if block != EMPTY:
                    entry = (i * len(tokens) + t) * blocks.shape[-1] + s
                    rows[i * layout.num_blocks + first_block + block].append(entry)
    return rows


def build_inverse_index(blocks: Tensor, layout: Layout, heads: range, tokens: range, chunk: int) -> InverseIndex:
    """The index of `tokens` and key/value `heads`; blocks [tokens of all rows, G, selected] int16."""
    rows = len(heads) * layout.num_blocks
    lists = blocks[tokens.start : tokens.stop, heads.start : heads.stop].transpose(0, 1)  # [heads, tokens, selected]
    first_block = layout.first_block[layout.token_block[tokens.start : tokens.stop]]
    first_row = torch.arange(len(heads), device=blocks.device)[:, None] * layout.num_blocks + first_block
    # Two bytes are sorted in half the passes of four.
    dtype = torch.int16 if rows < 2**15 else torch.int32
    row = torch.where(lists == EMPTY, rows, first_row[:, :, None] + lists).to(dtype)
    row, entries = row.flatten().sort(stable=True)
    first_entry = torch.searchsorted(row, torch.arange(rows + 1, dtype=dtype, device=blocks.device), out_int32=True)

    row_items = (first_entry.diff() + (chunk - 1)) // chunk
    first_item = F.pad(row_items.cumsum(0, dtype=torch.int32), (1, 0))
    items = torch.arange(rows + len(entries) // chunk, dtype=torch.int32, device=blocks.device)
    item_row = torch.searchsorted(first_item[1:], items, right=True, out_int32=True)
    return InverseIndex(entries.int(), first_entry, first_item, item_row, chunk)
