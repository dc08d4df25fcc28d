"""Attention with every score written out, in the inputs' dtype: what the references of all kinds share."""

import math

import torch
from torch import Tensor

from .documents import all_segments


def attend_written_out(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, K] and the log-sum-exp [B, T, H].

    Args:
        q, k, v: [B, T, H, K], and [B, S, G, K] twice.
        is_visible: which keys a query sees, of a shape that expands to [B, G, H / G, T, S].
    """
    scores = scores_written_out(q, k).masked_fill(~is_visible, float("-inf"))
    out = torch.einsum("bgrts,bsgk->btgrk", scores.softmax(-1), v).flatten(2, 3)
    return out, scores.logsumexp(-1).permute(0, 3, 1, 2).flatten(2)


def scores_written_out(q: Tensor, k: Tensor) -> Tensor:
    """Returns the logits [B, G, H / G, T, S]."""
    return torch.einsum("btgrk,bsgk->bgrts", q.unflatten(2, (k.shape[2], -1)), k) / math.sqrt(q.shape[-1])


def within_documents(q: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns which earlier tokens share a token's document, bool [B, T, T], and each token's index in it, [B, T].

    A document's prompt is its beginning.
    """
    B, T = q.shape[:2]
    is_earlier, index_BT = torch.zeros(B, T, T, dtype=torch.bool), torch.empty(B, T, dtype=torch.long)
    for row, start, stop, *prompt in all_segments(segments, B, T).tolist():
        first, last = prompt or (0, 0)
        is_earlier[row, start:stop, first:last] = True
        is_earlier[row, start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        index_BT[row, start:stop] = torch.arange(stop - start) + last - first
    return is_earlier.to(q.device), index_BT.to(q.device)
