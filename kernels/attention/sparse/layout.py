"""The layout of a packed batch: tables of its documents' blocks, which every kernel of this folder
reads.

The B * T tokens of a batch are counted through all rows, and so are the blocks. A document of L
tokens has ceil(L / block_size) blocks, counted from its first token; the last block may be short.
For documents of 100 and 30 tokens and blocks of 64, block_start is [0, 64, 100], block_stop [64,
100, 130] and first_block [0, 0, 2].

A document may go on from another one, after whole blocks of it, as prompts.py has answers. These
blocks are its first ones, by index, and no blocks of its own: the second document of 30 tokens
after a block of the first one has a block of index 1. Its first_block is then 1, as if its blocks
stood in a row.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..documents import as_bytes, document_bounds

EMPTY = 32767  # marks an entry of a list that names no block; lists are int16
LONGEST_DOCUMENT = EMPTY  # blocks


class Shared(NamedTuple):
    """Blocks of another document with which a document begins, such as a prompt's.

    Each tensor is [blocks], and speaks of the document that has the block.
    """

    count: Tensor  # int32: how many; 0 for documents that begin by themselves
    first: Tensor  # int32: the first of them
    firsts: list[int]  # the same on the host


class Layout(NamedTuple):
    """Tables of a packed batch. The top of this file has an example."""

    num_tokens: int
    num_blocks: int
    block_size: int
    window_blocks: int
    window_short: int  # tokens that an exact window has less than its blocks
    index_of_block: Tensor  # [blocks] int32, on the CPU: a block's index within its document
    block_start: Tensor  # [blocks] int32: a block's first token
    block_stop: Tensor  # [blocks] int32: one past its last token
    first_block: Tensor  # [blocks] int32: the first block of its document: a block less its index
    document_stop: Tensor  # [blocks] int32: one past the last token of its document
    token_block: Tensor  # [tokens] int32: the block of a token
    # All tokens of a document attend to its first block. The gradients of that block's keys are
    # computed in chunks of queries, each `window_blocks` blocks long. The first chunk is handled as
    # any other block's queries are; the chunks after it are "extra". With 7 blocks and
    # window_blocks = 2, block 0 has extra chunks from blocks 2, 4 and 6 on. Queries that see a
    # block of another document are an extra chunk of that block.
    extra_block: Tensor  # [extra chunks] int32: the first block that a chunk belongs to
    extra_start: Tensor  # [extra chunks] int32: the chunk's first query
    extra_stop: Tensor  # [extra chunks] int32: one past its last query
    first_extra: Tensor  # [blocks + 1] int32: number of extra chunks of all blocks before this one
    shared: Shared | None = None  # None: all documents begin by themselves

    @property
    def has_candidates(self) -> bool:
        """Whether some document is so long that a token has blocks to choose from."""
        return int(self.index_of_block.max()) > self.window_blocks


def make_layout(q: Tensor, segments: Tensor | None, block_size: int, window: int) -> Layout:
    """Returns the tables on q's device, for q [B, T, ...]. All layers of a step share them: the
    last four are kept."""
    return _cached_layout(q.shape[0], q.shape[1], as_bytes(segments), q.device, block_size, window)


class _Documents(NamedTuple):
    """Tables of the documents in order, [documents] int64 each."""

    start: Tensor  # first token
    length: Tensor  # tokens
    num_blocks: Tensor
    first_block: Tensor  # the first of its own blocks
    before: Tensor  # blocks of another document that it begins with
    origin: Tensor  # the first block that it begins with: its own, or another document's
    num_extra: Tensor  # extra chunks of its first block, see `Layout`

    def to(self, device: torch.device) -> "_Documents":
        """Returns the tables on a device, in one copy."""
        return _Documents(*torch.stack(self).to(device))


def build_layout(
    B: int, T: int, documents: bytes | None, device: torch.device, block_size: int, window: int,
    prompts: Tensor | None = None,
) -> Layout:  # fmt: skip
    """Builds the tables that `make_layout` returns, from `as_bytes(segments)`.

    `prompts` are the first token of what each document goes on from, and one past the last, int64
    [documents, 2] in their order: whole blocks of a document, whose first token it is. Both are
    equal where there are none.

    Raises ValueError for a document of more than LONGEST_DOCUMENT blocks.
    """
    window_blocks = -(-window // block_size)
    tables = _tables(*document_bounds(B, T, documents), block_size, window_blocks, prompts)
    total, total_extra = int(tables.num_blocks.sum()), int(tables.num_extra.sum())
    document, index = _repeat(tables.num_blocks, total)
    index_of_block = (index + tables.before[document]).int()
    firsts = tables.origin[document].tolist()
    in_windows = _seen_in_windows(tables, block_size, window_blocks)
    # One small copy goes to the device, which computes everything below.
    tables, in_windows = tables.to(device), in_windows.to(device)
    document, index = _repeat(tables.num_blocks, total)
    block_start = tables.start[document] + index * block_size
    document_stop = (tables.start + tables.length)[document]
    token_document, token_index = _repeat(tables.length, B * T)
    token_block = tables.first_block[token_document] + token_index // block_size
    extra = _extra_chunks(tables, total_extra, window_blocks * block_size)
    extra = torch.cat([extra, in_windows], 1)
    extra_block, extra_start, extra_stop = extra[:, extra[0].argsort(stable=True)].contiguous()
    shared = None
    if prompts is not None:
        shared = Shared(tables.before[document].int(), tables.origin[document].int(), firsts)
    return Layout(
        num_tokens=B * T,
        num_blocks=total,
        block_size=block_size,
        window_blocks=window_blocks,
        window_short=window_blocks * block_size - window,
        index_of_block=index_of_block,
        block_start=block_start.int(),
        block_stop=torch.minimum(block_start + block_size, document_stop).int(),
        first_block=(tables.first_block - tables.before)[document].int(),
        document_stop=document_stop.int(),
        token_block=token_block.int(),
        extra_block=extra_block.int(),
        extra_start=extra_start.int(),
        extra_stop=extra_stop.int(),
        first_extra=torch.searchsorted(extra_block, torch.arange(total + 1, device=device)).int(),
        shared=shared,
    )


def _tables(
    start: Tensor, length: Tensor, block_size: int, window_blocks: int, prompts: Tensor | None
) -> _Documents:
    """Returns tables of documents by first tokens and lengths.

    Other arguments are as in `build_layout`.
    """
    num_blocks = (length + block_size - 1) // block_size
    first_block = num_blocks.cumsum(0) - num_blocks
    before, origin = torch.zeros_like(start), first_block
    if prompts is not None:
        before = (prompts[:, 1] - prompts[:, 0]) // block_size
        document = torch.searchsorted(start, prompts[:, 0].contiguous(), right=True) - 1
        origin = torch.where(before > 0, first_block[document], first_block)
    if (num_blocks + before).max() > LONGEST_DOCUMENT:
        limit = f"{LONGEST_DOCUMENT} blocks of {block_size} tokens"
        raise ValueError(
            f"sparse attention takes documents of up to {limit}, "
            f"got one of {int(length.max())} tokens"
        )
    num_extra = (num_blocks + window_blocks - 1) // window_blocks - (before == 0).long()
    return _Documents(start, length, num_blocks, first_block, before, origin, num_extra)


def _extra_chunks(tables: _Documents, count: int, chunk_tokens: int) -> Tensor:
    """Returns the extra chunks of documents' first blocks: block, start and stop, int64
    [3, count]."""
    document, index = _repeat(tables.num_extra, count)
    # A document that begins by itself has its first chunk of queries with its first block.
    index = index + (tables.before == 0).long()[document]
    start = tables.start[document] + index * chunk_tokens
    stop = torch.minimum(start + chunk_tokens, (tables.start + tables.length)[document])
    return torch.stack([tables.origin[document], start, stop])


def _repeat(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Counts [2, 3], whose sum is `size`, give documents [0, 0, 1, 1, 1] and indices in them [0, 1,
    0, 1, 2]."""
    position, stop = torch.arange(size, device=counts.device), counts.cumsum(0)
    document = torch.searchsorted(stop, position, right=True)
    return document, position - (stop - counts)[document]


def _seen_in_windows(tables: _Documents, block_size: int, window_blocks: int) -> Tensor:
    """Returns which queries have blocks of another document in their window: block, start and stop,
    int64 [3, items].

    After 5 blocks and with a window of 3, tokens of block 5 see the blocks 3 and 4, tokens of block
    6 see block 4.
    """
    items: list[tuple[int, int, int]] = []
    columns = tables.start, tables.length, tables.before, tables.origin
    for start, length, before, origin in zip(*(column.tolist() for column in columns)):
        for block in range(max(1, before - window_blocks + 1), before):
            tokens = min(length, (block + window_blocks - before) * block_size)
            items.append((origin + block, start, start + tokens))
    return torch.tensor(items, dtype=torch.long).view(-1, 3).T


_cached_layout = functools.lru_cache(maxsize=4)(build_layout)


def first_local_block(layout: Layout) -> Tensor:
    """Returns the first block of each token's window, [tokens], in its document; candidates are 1
    to the one before."""
    token_block = layout.token_block.long()
    return token_block - layout.first_block[token_block] - layout.window_blocks + 1


def normalise_lists(blocks_BTGS: Tensor, layout: Layout) -> Tensor:
    """Returns lists as int16, sorted, without duplicates and without blocks that their token cannot
    choose.

    With a window of 2 blocks, a token of block 6 chooses from blocks 1 to 4: [9, 3, 3, 0, 5]
    becomes [3, EMPTY, ...].
    """
    B, T = blocks_BTGS.shape[:2]
    first_local = first_local_block(layout).view(B, T, 1, 1)
    can_choose = (blocks_BTGS >= 1) & (blocks_BTGS < first_local)
    blocks = torch.where(can_choose, blocks_BTGS, EMPTY).sort(-1).values
    duplicate = torch.zeros_like(blocks, dtype=torch.bool)
    duplicate[..., 1:] = blocks[..., 1:] == blocks[..., :-1]
    return blocks.masked_fill_(duplicate, EMPTY).sort(-1).values.to(torch.int16)
