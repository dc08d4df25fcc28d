"""The layout of a packed batch: tables of its documents' blocks, which every kernel of this folder reads.

The B * T tokens of a batch are counted through all rows, and so are the blocks. A document of L tokens has
ceil(L / block_size) blocks, counted from its first token; the last block may be short. For documents of 100 and 30
tokens and blocks of 64, block_start is [0, 64, 100], block_stop [64, 100, 130] and first_block [0, 0, 2].
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..documents import as_bytes, document_bounds

EMPTY = 32767  # marks an entry of a list that names no block; lists are int16
LONGEST_DOCUMENT = EMPTY  # blocks


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
    first_block: Tensor  # [blocks] int32: the first block of its document
    document_stop: Tensor  # [blocks] int32: one past the last token of its document
    token_block: Tensor  # [tokens] int32: the block of a token
    # All tokens of a document attend to its first block. The gradients of that block's keys are computed in chunks of
    # queries, each `window_blocks` blocks long. The first chunk is handled as any other block's queries are; the chunks
    # after it are "extra". With 7 blocks and window_blocks = 2, block 0 has extra chunks from blocks 2, 4 and 6 on.
    extra_block: Tensor  # [extra chunks] int32: the first block that a chunk belongs to
    extra_start: Tensor  # [extra chunks] int32: the chunk's first query
    first_extra: Tensor  # [blocks + 1] int32: number of extra chunks of all blocks before this one

    @property
    def has_candidates(self) -> bool:
        """Whether some document is so long that a token has blocks to choose from."""
        return int(self.index_of_block.max()) > self.window_blocks


def make_layout(q: Tensor, segments: Tensor | None, block_size: int, window: int) -> Layout:
    """Returns the tables on q's device, for q [B, T, ...]. All layers of a step share them: the last four are kept."""
    return _cached_layout(q.shape[0], q.shape[1], as_bytes(segments), q.device, block_size, window)


def build_layout(B: int, T: int, documents: bytes | None, device: torch.device, block_size: int, window: int) -> Layout:
    """Builds the tables that `make_layout` returns, from `as_bytes(segments)`."""
    start, length = document_bounds(B, T, documents)
    window_blocks = -(-window // block_size)
    num_blocks = (length + block_size - 1) // block_size  # [documents]
    if num_blocks.max() > LONGEST_DOCUMENT:
        raise ValueError(
            f"sparse attention takes documents of up to {LONGEST_DOCUMENT} blocks of {block_size} tokens, "
            f"got one of {int(length.max())} tokens"
        )
    num_extra = (num_blocks + window_blocks - 1) // window_blocks - 1
    first_block = num_blocks.cumsum(0) - num_blocks
    first_extra = num_extra.cumsum(0) - num_extra
    total = int(num_blocks.sum())
    total_extra = int(num_extra.sum())

    def repeat(counts, size):
        """Counts [2, 3], whose sum is `size`, give documents [0, 0, 1, 1, 1] and indices in them [0, 1, 0, 1, 2]."""
        position, stop = torch.arange(size, device=counts.device), counts.cumsum(0)
        document = torch.searchsorted(stop, position, right=True)
        return document, position - (stop - counts)[document]

    index_of_block = repeat(num_blocks, total)[1].int()
    # One small copy goes to the device, which computes everything below.
    table = torch.stack([start, length, num_blocks, first_block, num_extra, first_extra]).to(device)
    start, length, num_blocks, first_block, num_extra, first_extra = table
    document, index = repeat(num_blocks, total)
    block_start = start[document] + index * block_size
    document_stop = (start + length)[document]
    token_document, token_index = repeat(length, B * T)
    extra_document, extra_index = repeat(num_extra, total_extra)
    first_extra_of_block = first_extra[document] + torch.where(index == 0, 0, num_extra[document])
    return Layout(
        num_tokens=B * T,
        num_blocks=total,
        block_size=block_size,
        window_blocks=window_blocks,
        window_short=window_blocks * block_size - window,
        index_of_block=index_of_block,
        block_start=block_start.int(),
        block_stop=torch.minimum(block_start + block_size, document_stop).int(),
        first_block=first_block[document].int(),
        document_stop=document_stop.int(),
        token_block=(first_block[token_document] + token_index // block_size).int(),
        extra_block=first_block[extra_document].int(),
        extra_start=(start[extra_document] + (extra_index + 1) * window_blocks * block_size).int(),
        first_extra=torch.nn.functional.pad(first_extra_of_block, (0, 1), value=total_extra).int(),
    )


_cached_layout = functools.lru_cache(maxsize=4)(build_layout)


def first_local_block(layout: Layout) -> Tensor:
    """Returns the first block of each token's window, [tokens], in its document; candidates are 1 to the one before."""
    token_block = layout.token_block.long()
    return token_block - layout.first_block[token_block] - layout.window_blocks + 1


def normalise_lists(blocks_BTGS: Tensor, layout: Layout) -> Tensor:
    """Returns lists as int16, sorted, without duplicates and without blocks that their token cannot choose.

    With a window of 2 blocks, a token of block 6 chooses from blocks 1 to 4: [9, 3, 3, 0, 5] becomes [3, EMPTY, ...].
    """
    B, T = blocks_BTGS.shape[:2]
    first_local = first_local_block(layout).view(B, T, 1, 1)
    blocks = torch.where((blocks_BTGS >= 1) & (blocks_BTGS < first_local), blocks_BTGS, EMPTY).sort(-1).values
    duplicate = torch.zeros_like(blocks, dtype=torch.bool)
    duplicate[..., 1:] = blocks[..., 1:] == blocks[..., :-1]
    return blocks.masked_fill_(duplicate, EMPTY).sort(-1).values.to(torch.int16)
