"""Decoding: one new token chooses blocks of the cached keys, and attends to them, its first block and its window.

It chooses as `Sparse.choose` does for the last token of the cached sequence. A full block's mean keys never change, so
`PooledKeys` keeps them next to the cache. To choose, a token reads three mean keys per block of 64; to attend, it reads
the keys and values of its visible blocks. All is plain PyTorch: one query is too little work for kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .selection import PART_KEYS, candidate_scores, ranges, top_blocks_reference

BLOCKS_AT_A_TIME = 1024  # blocks of a long prompt that are pooled at a time


class PooledKeys:
    """Mean keys of a cache's full blocks, as `selection.pool` computes them: [B, parts + 1, blocks, G, K]."""

    def __init__(self):
        self._pooled: Tensor | None = None

    def of(self, k_BTGK: Tensor, block_size: int) -> Tensor:
        """Returns the mean keys of all full blocks. Blocks that were full at the last call are not pooled again."""
        parts = [] if self._pooled is None else [self._pooled]
        done, full = sum(part.shape[2] for part in parts), k_BTGK.shape[1] // block_size
        for blocks in ranges(full - done, BLOCKS_AT_A_TIME):
            start, stop = (done + block for block in (blocks.start, blocks.stop))
            parts.append(_pool(k_BTGK[:, start * block_size : stop * block_size], block_size))
        if len(parts) > 1 or self._pooled is None:
            self._pooled = torch.cat(parts, dim=2) if parts else _pool(k_BTGK[:, :0], block_size)
        return self._pooled


def _pool(k_BTGK: Tensor, block_size: int) -> Tensor:
    """Returns the mean keys of blocks of `block_size` tokens and, last of parts + 1, of each whole block."""
    keys = k_BTGK.unflatten(1, (k_BTGK.shape[1] // block_size, block_size)).float()  # [B, blocks, block_size, G, K]
    means = [part.mean(2) for part in keys.split(PART_KEYS, dim=2)]
    return torch.stack([*means, keys.mean(2)], dim=1).to(k_BTGK.dtype)


def choose_for_last_token(q_BHK: Tensor, pooled: Tensor, num_tokens: int, kind) -> Tensor:
    """Returns the last token's list [B, G, blocks] int64, ascending. All rows and heads choose equally many blocks.

    `pooled` is what `PooledKeys.of` returns for all `num_tokens` keys, and `kind` a `Sparse`.
    """
    B, G, own = len(q_BHK), pooled.shape[3], (num_tokens - 1) // kind.block_size
    left = own - kind.window // kind.block_size + 1  # the window's first block
    count = min(kind.selected_blocks, max(0, left - 1))
    if count == 0:
        return torch.zeros(B, G, 0, dtype=torch.int64, device=q_BHK.device)
    queries, keys = q_BHK.unflatten(1, (G, -1)).float(), pooled[:, :, :own].permute(0, 3, 1, 2, 4).float()
    scores = torch.cat([candidate_scores(queries[row : row + 1], keys[row]) for row in range(B)])  # [B, G, own]
    scores[..., 0] = scores[..., left:] = -1
    return top_blocks_reference(scores, count).long()


def attend_to_cache(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, pooled_keys: PooledKeys, kind) -> Tensor:
    """Attends as `Sparse.decode` does, for the `Sparse` `kind`; brings the cache's `pooled_keys` up to date."""
    (B, S, G, K), block_size = k_BSGK.shape, kind.block_size
    q_BHK, device = q_BTHK.squeeze(1), q_BTHK.device
    blocks = choose_for_last_token(q_BHK, pooled_keys.of(k_BSGK, block_size), S, kind)
    left = max(1, (S - 1) // block_size - kind.window // block_size + 1)  # the window's first block besides block 0
    band = (0, min(S, block_size)), (left * block_size, max(S, left * block_size))
    chosen = (blocks[..., None] * block_size + torch.arange(block_size, device=device)).flatten(2)  # [B, G, tokens]
    visible = torch.cat([*(torch.arange(*part, device=device).expand(B, G, -1) for part in band), chosen], dim=-1)
    index = visible.transpose(1, 2)[..., None].expand(-1, -1, -1, K)  # [B, tokens, G, K]
    keys, values = (cached.gather(1, index).transpose(1, 2) for cached in (k_BSGK, v_BSGK))
    return F.scaled_dot_product_attention(q_BHK[:, :, None], keys, values, enable_gqa=True).transpose(1, 2)
