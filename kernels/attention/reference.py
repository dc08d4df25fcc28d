"""Attention with every score written out, in the inputs' dtype, for the references of all kinds."""

import math

import torch
from torch import Tensor

from ..common import sum_dtype
from .documents import all_segments


def attend_written_out(
    q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, K] and the log-sum-exp [B, T, H], float32 or wider; 0 for
    queries without a key.

    Args:
        q, k, v: [B, T, H, K], and [B, S, G, K] twice.
        is_visible: which keys a query sees, of a shape that expands to [B, G, H / G, T, S].
    """
    scores = torch.einsum("btgrk,bsgk->bgrts", q.unflatten(2, (k.shape[2], -1)), k) / math.sqrt(
        q.shape[-1]
    )
    sees = is_visible.any(-1, keepdim=True)
    # a query without a key sees all, not infinities
    scores = scores.masked_fill(~is_visible & sees, float("-inf"))
    out = torch.einsum("bgrts,bsgk->btgrk", scores.softmax(-1).where(sees, 0), v).flatten(2, 3)
    lse = scores.logsumexp(-1).where(sees[..., 0], 0).permute(0, 3, 1, 2).flatten(2)
    return out, lse.to(sum_dtype(lse))


def backward_written_out(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor
) -> tuple[Tensor, ...]:
    """Returns dq, dk and dv; arguments as in `attend_written_out`."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, _ = attend_written_out(q, k, v, is_visible)
    return torch.autograd.grad(out, (q, k, v), dout)


def within_documents(q: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns which earlier tokens share a token's document or are its prompt, [B, T, T], and
    indices in it, [B, T]."""
    B, T = q.shape[:2]
    is_earlier = torch.zeros(B, T, T, dtype=torch.bool)
    index_BT = torch.empty(B, T, dtype=torch.long)
    for row, start, stop, *prompt in all_segments(segments, B, T).tolist():
        first, last = prompt or (0, 0)
        is_earlier[row, start:stop, first:last] = True
        is_earlier[row, start:stop, start:stop] = torch.ones(
            stop - start, stop - start, dtype=torch.bool
        ).tril()
        index_BT[row, start:stop] = torch.arange(stop - start) + last - first
    return is_earlier.to(q.device), index_BT.to(q.device)
