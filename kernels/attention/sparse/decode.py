"""Decoding: one new token chooses blocks of the cached keys, and attends to them, its first block
and its window.

It chooses as `Sparse.choose` does for the last token of the cached sequence. To choose, it reads
all cached keys; to attend, it reads the keys and values of its visible blocks. All is plain
PyTorch: one query is too little work for kernels.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from .selection import candidate_scores, look_from, ranges, scoring_dtype, top_blocks_reference

BLOCKS_AT_A_TIME = 1024  # blocks that are scored at a time


def choose_for_last_token(q_BHK: Tensor, k_BSGK: Tensor, kind) -> Tensor:
    """Returns the blocks [B, G, blocks] int64, ascending, of the last of S tokens."""
    (B, S, G, _), size = k_BSGK.shape, kind.block_size
    last_block = (S - 1) // size
    left = last_block - kind.window // size + 1  # the window's first block
    count = min(kind.selected_blocks, max(0, left - 1))
    if count == 0:
        return torch.zeros(B, G, 0, dtype=torch.int64, device=q_BHK.device)
    look, dtype = look_from(last_block * size), scoring_dtype(q_BHK)
    scores = torch.full((B, G, left), float("-inf"), device=q_BHK.device)
    for row, blocks in itertools.product(range(B), ranges(left, BLOCKS_AT_A_TIME)):
        keys = k_BSGK[row, blocks.start * size : blocks.stop * size].unflatten(0, (-1, size))
        scores[row, :, blocks.start : blocks.stop] = candidate_scores(
            q_BHK[row, None], keys, look, dtype
        )[0]
    scores[..., 0] = float("-inf")
    return top_blocks_reference(scores, count).long()


def attend_to_cache(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, kind) -> Tensor:
    """Attends as `Sparse.decode` does, for the `Sparse` `kind`."""
    (B, S, G, K), block_size = k_BSGK.shape, kind.block_size
    q_BHK, device = q_BTHK.squeeze(1), q_BTHK.device
    blocks = choose_for_last_token(q_BHK, k_BSGK, kind)
    # the window's first block besides block 0
    left = max(1, (S - 1) // block_size - kind.window // block_size + 1)
    band = (0, min(S, block_size)), (left * block_size, max(S, left * block_size))
    # [B, G, tokens]
    chosen = (blocks[..., None] * block_size + torch.arange(block_size, device=device)).flatten(2)
    visible = torch.cat(
        [*(torch.arange(*part, device=device).expand(B, G, -1) for part in band), chosen], dim=-1
    )
    index = visible.transpose(1, 2)[..., None].expand(-1, -1, -1, K)  # [B, tokens, G, K]
    keys, values = (cached.gather(1, index).transpose(1, 2) for cached in (k_BSGK, v_BSGK))
    return F.scaled_dot_product_attention(
        q_BHK[:, :, None], keys, values, enable_gqa=True
    ).transpose(1, 2)
