"""KL divergence of the head's probabilities from a teacher's k likeliest words, chunk by chunk,
without [tokens, V].

A position has logits z, with q = softmax(z), and the teacher's words with their probabilities p.
All other words are one bucket, p_r = 1 - sum p against q_r = 1 - sum q:

    loss = sum of p (log p - log q)  +  p_r (log p_r - log q_r)
    dz = q - p at the k words,  q (1 - p_r / q_r) at the others

p_r and q_r count as 1e-6 at least. TRL's distillation from a server has this bucket, too
(loss_add_tail).

Chunks run as in linear_cross_entropy.py: forward makes the gradients of input and head, and keeps
them for backward.
"""

import torch
from torch import Tensor

from .common import cast_by_autocast, operation, sum_dtype, use_triton
from .cross_entropy import (
    Details,
    RowOptions,
    checked_labels,
    checked_weights,
    details,
    loss_scale,
    row_losses,
    row_step,
    shard_of,
)
from .linear import PLAIN, Linear
from .linear_cross_entropy import (
    CHUNK_SIZE,
    add_gradients,
    empty_logits,
    factor_head,
    gathered,
    rows_to_compute,
    scaled_gradients,
)
from .parts import part_of

LEAST = 1e-6  # probability of a bucket


def top_k_divergence_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, ids: Tensor, log_probs: Tensor, *,
    weights: Tensor | None = None, denominator: float | Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Plain PyTorch with full logits and the contract of `top_k_divergence`; returns the loss."""
    z = input @ linear_weight.T
    log_q = z.to(sum_dtype(z)).log_softmax(-1).gather(-1, ids)
    losses, _ = _divergences(log_q, log_probs.to(log_q.dtype))
    losses = torch.where(target == ignore_index, 0, losses if weights is None else losses * weights)
    return losses.sum() * loss_scale(target, "mean", ignore_index, denominator, log_q.dtype)


def _divergences(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's loss, and p_r / q_r, of log-probabilities [..., k]."""
    p = log_p.exp()
    p_rest, q_rest = ((1 - each.sum(-1)).clamp(min=LEAST) for each in (p, log_q.exp()))
    return (p * (log_p - log_q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log()), p_rest / q_rest


def _empty_outputs(input, linear_weight, needs_input, needs_weight):
    """Makes each row's loss, and gradients: the input's has its dtype, all else is float32 or
    wider."""
    losses = input.new_empty(len(input), dtype=sum_dtype(input))
    d_weight = losses.new_empty(linear_weight.shape if needs_weight else 0)
    return losses, input.new_empty(input.shape if needs_input else 0), d_weight


def _fake(
    input,
    linear_weight,
    target,
    ids,
    log_probs,
    weights,
    scale,
    needs_input,
    needs_weight,
    *options,
):
    outputs = _empty_outputs(input, linear_weight, needs_input, needs_weight)
    return outputs[0].new_empty(()), *outputs


@operation("fathom::top_k_divergence", _fake)
def _loss_and_gradients(
    input: Tensor, linear_weight: Tensor, target: Tensor, ids: Tensor, log_probs: Tensor,
    weights: Tensor | None, scale: Tensor, needs_input: bool, needs_weight: bool,
    part: int, num_valid_tokens: int | None, chunk_size: int, ignore_index: int, use_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the loss, each row's, and the gradients of input and head before `scale`; what is not
    needed is empty."""
    linear: Linear = part_of(part)
    options = RowOptions(ignore_index, None, use_triton)
    shard = shard_of(None, len(linear_weight))
    rows = rows_to_compute(target, ignore_index, num_valid_tokens)
    rows = torch.arange(len(target), device=target.device) if rows is None else rows
    losses, d_input, d_weight = (
        x.zero_() for x in _empty_outputs(input, linear_weight, needs_input, needs_weight)
    )
    V = len(linear_weight)
    logits_buffer = empty_logits(input, min(chunk_size, len(rows)), V)
    head = factor_head(linear, linear_weight, None, needs_input)
    for start in range(0, len(rows), chunk_size):
        chunk = rows[start : start + chunk_size]
        x, words = input[chunk], ids[chunk]
        x_factor = linear.factor(x)
        logits = logits_buffer[: len(x)]
        for columns, factor in zip(head.groups, head.factors):
            linear.forward(x_factor, factor, None, out=logits[:, columns])
        of_words = logits.gather(1, words).to(losses.dtype)
        labels = words[:, 0].contiguous()
        statistics = row_step(logits, labels, options, shard)
        log_q = of_words - row_losses(statistics)[1][:, None]
        losses[chunk], ratio = _divergences(log_q, log_probs[chunk])
        if not (needs_input or needs_weight):
            continue
        row_weights = torch.ones_like(ratio) if weights is None else weights[chunk]
        factors = row_weights * (1 - ratio)
        row_step(
            logits, labels, options, shard, statistics=statistics, gradient=logits, scale=factors
        )
        at_words = row_weights[:, None] * (log_q.exp() - log_probs[chunk].exp())
        logits.scatter_(1, words, at_words.to(logits.dtype))
        d_x = torch.empty_like(x) if needs_input else None
        add_gradients(
            linear, logits, x_factor, head, d_x, d_weight if needs_weight else None, start > 0
        )
        if d_x is not None:
            d_input[chunk] = d_x
    terms = losses if weights is None else losses * weights
    return (terms * scale).sum(), losses, d_input, d_weight


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(inputs[6], *output[2:])


def _backward(ctx, d_loss, *_):
    scale, *gradients = ctx.saved_tensors
    gradients = scaled_gradients(gradients, scale * d_loss, ctx.dtype)
    needed = (g if needs else None for g, needs in zip(gradients, ctx.needs_input_grad))
    return *needed, *[None] * 12


_loss_and_gradients.register_autograd(_backward, setup_context=_setup_context)


def top_k_divergence(
    input: Tensor, linear_weight: Tensor, target: Tensor, ids: Tensor, log_probs: Tensor, *,
    weights: Tensor | None = None, denominator: float | Tensor | None = None,
    ignore_index: int = -100,
    num_valid_tokens: int | None = None, chunk_size: int = CHUNK_SIZE, linear: Linear = PLAIN,
    impl: str = "auto",
) -> Details:  # fmt: skip
    """Divergence of softmax(input @ linear_weight.T) from a teacher's likeliest words, which must
    be unlike each other.

    Args:
        target: [...] int64; rows with `ignore_index` have no loss.
        ids, log_probs: [..., k], the teacher's words, int64, and their log-probabilities, float32.
        others: as in `linear_cross_entropy`, with reduction="mean".

    Returns:
        The loss, and each row's without its weight; log-sum-exps are not among them.
    """
    input, linear_weight = cast_by_autocast(input, gathered(linear_weight))
    on_triton = use_triton(impl, input)
    labels = checked_labels(input, target, "mean", None)
    if ids.shape != log_probs.shape or ids.shape[:-1] != target.shape:
        raise ValueError(
            f"ids and log_probs must be {[*target.shape, 'k']}, got {[*ids.shape]}, "
            f"{[*log_probs.shape]}"
        )
    weights = checked_weights(weights, input, target, "mean")
    dtype = sum_dtype(input)
    scale = loss_scale(labels, "mean", ignore_index, denominator, dtype)
    needs = [torch.is_grad_enabled() and t.requires_grad for t in (input, linear_weight)]
    ids = ids.flatten(0, -2)
    log_probs = log_probs.flatten(0, -2).to(dtype)
    loss, losses, *_ = _loss_and_gradients(
        input.reshape(-1, input.shape[-1]), linear_weight, labels, ids, log_probs,
        weights, scale, *needs, linear.number, num_valid_tokens, chunk_size, ignore_index,
        on_triton,
    )  # fmt: skip
    return details(loss, losses, torch.zeros_like(losses), target.shape)
