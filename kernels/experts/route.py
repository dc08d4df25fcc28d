"""Router of a mixture of experts: which experts a token goes to, with what weights, and how evenly
tokens spread.

Let p be the softmax of a token's logits over all experts, in float32. The token goes to the `top_k`
experts of the largest p. Their weights are p itself or, normalised, p over the sum of the chosen.
Gradients flow through the weights, not through the choice.

Kept for backward: the choice and the probabilities. Under activation checkpointing the choice is
made once: a second forward takes the first one's, so that rounding cannot route a token otherwise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common import operation, sum_dtype


class Choice(NamedTuple):
    experts: Tensor  # [N, k] int32, the most probable first
    weights: Tensor  # [N, k] in the logits' dtype


def _empty_choice(logits, top_k):
    return logits.new_empty(len(logits), top_k, dtype=torch.int32)


@operation("fathom::choose_experts", _empty_choice, keepable="choices")
def choose_experts(logits: Tensor, top_k: int) -> Tensor:
    """Returns the experts [N, top_k] of the largest logits [N, E], int32."""
    return probabilities_of(logits).topk(top_k, dim=-1).indices.int()


def probabilities_of(logits: Tensor) -> Tensor:
    """Returns the softmax of logits [N, E], in float32 at least."""
    return logits.softmax(-1, dtype=sum_dtype(logits))


def route(logits: Tensor, top_k: int, *, normalize: bool, experts: Tensor | None = None) -> Choice:
    """Chooses experts as Qwen3-MoE and Qwen3.5-MoE do (Qwen 2025, arXiv:2505.09388).

    Args:
        logits: [N, E].
        top_k: experts per token.
        normalize: whether a token's weights sum to 1.
        experts: [N, top_k], a choice made before; None: the most probable.

    Raises:
        ValueError: top_k that is not 1 to E, or experts of another shape.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"top_k must be 1 to {logits.shape[-1]} experts, got {top_k}")
    if experts is None:
        experts = choose_experts(logits.detach(), top_k)
    elif experts.shape != (len(logits), top_k):
        raise ValueError(f"experts must be {[len(logits), top_k]}, got {list(experts.shape)}")
    weights = probabilities_of(logits).gather(-1, experts.long())
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights.to(logits.dtype))


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the entries of experts [N, k], without waiting for the GPU.

    Returns:
        order: [N k] int32, the entries n k + j by expert; entries of one expert keep their order.
        offsets: [num_experts + 1] int32, the first place of each expert in `order`, then N k.

    For [[1, 0], [1, 2]] and 4 experts these are [1, 0, 2, 3] and [0, 1, 3, 4, 4].
    """
    keys, order = experts.flatten().to(torch.int16).sort(stable=True)  # a radix sort of two bytes
    first = torch.arange(num_experts + 1, dtype=torch.int16, device=experts.device)
    return order.int(), torch.searchsorted(keys, first, out_int32=True)


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Returns how many tokens of experts [N, k] each expert has, int32 [num_experts], without
    waiting for the GPU."""
    return sort_by_expert(experts, num_experts)[1].diff()
