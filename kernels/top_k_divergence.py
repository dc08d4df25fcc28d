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
    Shard,
    check_targets,
    details,
    loss_scale,
    row_losses,
    row_step,
)
from .linear import PLAIN, Linear
from .linear_cross_entropy import (
    CHUNK_SIZE,
    HeadProducts,
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
    p_rest, q_rest = (
        (1 - probabilities.sum(-1)).clamp(min=LEAST) for probabilities in (p, log_q.exp())
    )
    rest_term = p_rest * (p_rest.log() - q_rest.log())
    return (p * (log_p - log_q)).sum(-1) + rest_term, p_rest / q_rest


def _run_chunk(
    logits: Tensor, words: Tensor, log_p: Tensor, weights: Tensor | None, options: RowOptions
) -> Tensor:
    """Returns the losses of rows of logits [n, V], with the teacher's words and log_p, both [n, k].

    With weights [n], the weighted losses' gradient overwrites the logits.
    """
    whole_head = Shard(None, 0)
    labels = words[:, 0].contiguous()  # any of the words: all of them are written below
    statistics = row_step(logits, labels, options, whole_head)
    log_sum_exp = row_losses(statistics)[1]
    log_q = logits.gather(1, words).to(log_p.dtype) - log_sum_exp[:, None]
    losses, ratio = _divergences(log_q, log_p)
    if weights is not None:
        row_step(
            logits, labels, options, whole_head, statistics=statistics, gradient=logits,
            scale=weights * (1 - ratio),
        )  # fmt: skip
        at_words = weights[:, None] * (log_q.exp() - log_p.exp())
        logits.scatter_(1, words, at_words.to(logits.dtype))
    return losses


def _empty_outputs(input, linear_weight, needs_input, needs_weight):
    """Makes each row's loss, and gradients.

    The input's gradient has its dtype, all else is float32 or wider.
    """
    losses = input.new_empty(len(input), dtype=sum_dtype(input))
    d_weight = losses.new_empty(linear_weight.shape if needs_weight else 0)
    return losses, input.new_empty(input.shape if needs_input else 0), d_weight


def _fake(input, linear_weight, target, ids, log_probs, weights, scale, *options):
    outputs = _empty_outputs(input, linear_weight, *options[:2])
    return outputs[0].new_empty(()), *outputs


@operation("fathom::top_k_divergence", _fake)
def _loss_and_gradients(
    input: Tensor, linear_weight: Tensor, target: Tensor, ids: Tensor, log_probs: Tensor,
    weights: Tensor | None, scale: Tensor, needs_input: bool, needs_weight: bool, part: int,
    num_valid_tokens: int | None, chunk_size: int, ignore_index: int, use_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the loss, each row's loss, and the gradients of input and head before `scale`.

    What is not needed is empty.
    """
    options = RowOptions(ignore_index, None, use_triton)
    rows = rows_to_compute(target, ignore_index, num_valid_tokens)
    if rows is None:
        rows = torch.arange(len(target), device=target.device)
    losses, d_input, d_weight = (
        x.zero_() for x in _empty_outputs(input, linear_weight, needs_input, needs_weight)
    )
    head = HeadProducts(
        part_of(part), linear_weight, None, needs_input, d_weight if needs_weight else None,
        min(chunk_size, len(rows)),
    )  # fmt: skip
    for start in range(0, len(rows), chunk_size):
        chunk = rows[start : start + chunk_size]
        logits = head.logits(input[chunk])
        row_weights = None
        if needs_input or needs_weight:
            row_weights = losses.new_ones(len(chunk)) if weights is None else weights[chunk]
        losses[chunk] = _run_chunk(logits, ids[chunk], log_probs[chunk], row_weights, options)
        if row_weights is None:
            continue
        d_x = head.add_gradients(logits)
        if needs_input:
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
    ignore_index: int = -100, num_valid_tokens: int | None = None, chunk_size: int = CHUNK_SIZE,
    linear: Linear = PLAIN, impl: str = "auto",
) -> Details:  # fmt: skip
    """Divergence of softmax(input @ linear_weight.T) from a teacher's likeliest words.

    Args:
        target: [...] int64; rows with `ignore_index` have no loss.
        ids, log_probs: [..., k], the teacher's words, int64 and all different, and their
            log-probabilities, float32.
        input, linear_weight, weights, denominator, num_valid_tokens, chunk_size, linear, impl: as
            in `linear_cross_entropy`, with reduction="mean".

    Returns:
        The loss, and each row's without its weight; log-sum-exps are not among them.
    """
    input, linear_weight = cast_by_autocast(input, gathered(linear_weight))
    on_triton = use_triton(impl, input)
    targets = check_targets(input, target, "mean", ignore_index, None, weights, denominator)
    if ids.shape != log_probs.shape or ids.shape[:-1] != target.shape:
        raise ValueError(
            f"ids and log_probs must be {[*target.shape, 'k']}, "
            f"got {[*ids.shape]}, {[*log_probs.shape]}"
        )
    needs = [torch.is_grad_enabled() and t.requires_grad for t in (input, linear_weight)]
    loss, losses, *_ = _loss_and_gradients(
        input.reshape(-1, input.shape[-1]), linear_weight, targets.labels, ids.flatten(0, -2),
        log_probs.flatten(0, -2).to(sum_dtype(input)), targets.weights, targets.scale, *needs,
        linear.number, num_valid_tokens, chunk_size, ignore_index, on_triton,
    )  # fmt: skip
    return details(loss, losses, torch.zeros_like(losses), target.shape)
