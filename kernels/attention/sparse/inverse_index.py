"""The inverse index: it turns each token's list of blocks into each block's list of tokens, by a
stable sort.

An entry is a place in the lists [heads, tokens, selected], counted through. The gather kernels take
a range of tokens, a head and a block, and want the entries that name this block, in the order of
tokens. Example: one head, three tokens, lists of 2. The lists [0, -], [1, -] and [0, 1] name block
0 in the entries 0 and 4, and block 1 in 2 and 5.

A row is a (head, block) pair, head * num_blocks + block. Its entries are cut into items of up to
`chunk` entries. In each range, row r has the items first_item[r] to first_item[r + 1] - 1. The grid
has the most items that a range can have, rows + entries / chunk, and programs of surplus items do
nothing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import EMPTY, Layout

# bytes per entry of a sort: keys and places before and after it, and the sort's own copies
SORT_BYTES = 37


class InverseIndex(NamedTuple):
    """The index of one range of tokens. All ranges share `entries`."""

    entries: Tensor  # [heads * tokens * selected] int32: entries, ordered by range, row and token
    first_entry: Tensor  # [rows + 1] int32: where a row's entries begin
    first_item: Tensor  # [rows + 1] int32: where a row's items begin
    item_row: Tensor  # [items] int32: an item's row; `rows` for surplus items
    chunk: int  # most entries of an item


def build_inverse_index(
    blocks: Tensor, layout: Layout, heads: range, token_ranges: list[range], chunk: int
) -> list[InverseIndex]:
    """Returns one index per range of tokens, for some key/value heads.

    Args:
        blocks: the lists [tokens of all documents, G, selected] int16.
        token_ranges: ranges of one length that cover all tokens in order; the last may be shorter.
            []: no index.
        chunk: most entries of an item.
    """
    if not token_ranges:
        return []
    num_ranges, rows, device = len(token_ranges), len(heads) * layout.num_blocks, blocks.device
    S = blocks.shape[2]
    range_tokens = len(token_ranges[0])
    lists = blocks[:, heads.start : heads.stop].transpose(0, 1)  # [heads, tokens, selected]
    row = _rows(lists, layout, range_tokens, num_ranges * rows)
    row, entries = row.flatten().sort(stable=True)
    limits = torch.arange(num_ranges * rows + 1, dtype=row.dtype, device=device)
    bounds = torch.searchsorted(row, limits, out_int32=True)
    first_entry = bounds.unfold(0, rows + 1, rows).contiguous()  # [ranges, rows + 1]

    row_items = (first_entry.diff() + (chunk - 1)) // chunk
    first_item = F.pad(row_items.cumsum(1, dtype=torch.int32), (1, 0))
    most_items = rows + len(heads) * range_tokens * S // chunk
    items = torch.arange(most_items, dtype=torch.int32, device=device)
    items = items.expand(num_ranges, -1).contiguous()
    item_row = torch.searchsorted(first_item[:, 1:].contiguous(), items, right=True, out_int32=True)
    entries = entries.int()
    tables = zip(first_entry, first_item, item_row)
    return [InverseIndex(entries, *range_tables, chunk) for range_tables in tables]


def _rows(lists: Tensor, layout: Layout, range_tokens: int, num_rows: int) -> Tensor:
    """Returns the row of each entry of lists [heads, tokens, selected], counted through all ranges;
    `num_rows` for an entry that names no block."""
    heads, N, _ = lists.shape
    tokens, head = (torch.arange(n, device=lists.device) for n in (N, heads))
    rows_before = tokens // range_tokens * (heads * layout.num_blocks)
    first_row = rows_before + layout.first_block[layout.token_block]
    first_row = first_row + head[:, None] * layout.num_blocks  # [heads, tokens]
    # two bytes sort in half the passes of four
    dtype = torch.int16 if num_rows < 2**15 else torch.int32
    no_row = torch.full((), num_rows, dtype=dtype, device=lists.device)
    row = torch.where(lists == EMPTY, no_row, first_row[:, :, None].to(dtype) + lists)
    if layout.shared is not None:
        to_shared = (layout.shared.first - layout.first_block)[layout.token_block, None]
        is_shared = lists < layout.shared.count[layout.token_block, None]
        row += torch.where(is_shared, to_shared.to(dtype), 0)
    return row
