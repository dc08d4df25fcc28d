"""Choice of the next token from logits, greedy or sampled."""

import torch
from torch import Tensor


def choose_tokens(
    logits_BV: Tensor,
    temperature: float,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token of each row, int64 [B, 1]; arguments as `model.Transformer.next_tokens`. top_p:
    arXiv 1904.09751."""
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    probabilities_BV = (logits_BV / temperature).softmax(-1)
    if top_p < 1:
        sorted_BV, order_BV = probabilities_BV.sort(-1, descending=True)
        # The share of all tokens before it in this order.
        likelier_BV = sorted_BV.cumsum(-1) - sorted_BV
        kept_BV = sorted_BV.masked_fill(likelier_BV >= top_p, 0)
        probabilities_BV = torch.zeros_like(kept_BV).scatter(-1, order_BV, kept_BV)
    return torch.multinomial(probabilities_BV, 1, generator=generator)
