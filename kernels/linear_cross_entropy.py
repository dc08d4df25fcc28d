"""The output projection and its cross-entropy, chunk by chunk: [tokens, V] logits never exist.

Forward makes the gradients. A chunk has hidden states x [n, D]; the head is W [V, D];
kernels/cross_entropy.py has the loss of a row.

    logits = x W^T                                        one GEMM, into one buffer for all chunks
    g = d(sum of the chunk's losses) / d(logits)          one kernel, in place
    dx = g W,  dW += g^T x,  d_bias += sum of g's rows    two GEMMs; dW is float32

Backward multiplies dx and the float32 dW by 1 / tokens and by the incoming gradient, once, so that
neither factor underflows g's 16 bits. Rows with an ignored label take part in no GEMM.

A row's weight multiplies its loss in float32, and g's row before it is rounded. With
reduction="none" each row has an incoming gradient of its own, and only backward knows it. Forward
then computes the losses alone. Backward runs the chunks again and takes the incoming gradients as
weights.

Kept for backward: dx in the input's dtype and dW in float32; with reduction="none" the inputs
instead. On top of inputs and gradients the loss takes chunk_size * V * 2 bytes for 16-bit logits,
and 4 * V * D bytes for dW.

Gradients in forward follow mgmalek's efficient_cross_entropy and Liger-Kernel (arXiv:2410.10989).
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .common import cast_by_autocast, operation, sum_dtype, use_triton
from .cross_entropy import (
    CrossEntropyLoss,
    Details,
    RowOptions,
    Shard,
    check_targets,
    cross_entropy_reference,
    details,
    row_entropies,
    row_losses,
    row_step,
    shard_of,
)
from .linear import PLAIN, Linear
from .parts import part_of
from .torch_internals import assert_async, backward_keeps_graph

CHUNK_SIZE = 4096  # tokens with logits at one time
# cuBLAS's fast products need multiples of 8 words, in rows that begin at multiples of 16 bytes.
WORDS_MULTIPLE = 8
ROW_MULTIPLE = 64  # elements from one row of logits to the next


def linear_cross_entropy_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    **options,
) -> Tensor | Details:
    """Plain PyTorch with full logits; `cross_entropy_reference` takes the `options`."""
    return cross_entropy_reference(F.linear(input, linear_weight, linear_bias), target, **options)


def rows_to_compute(
    target: Tensor, ignore_index: int, num_valid_tokens: int | None
) -> Tensor | None:
    """Returns the rows with a valid label, None for all rows. Waits for the device unless their
    number is given."""
    valid = target != ignore_index
    if num_valid_tokens is None:
        num_valid_tokens = int(valid.sum())
    else:
        assert_async(
            valid.sum() == num_valid_tokens, "num_valid_tokens is not the number of valid labels"
        )
    if num_valid_tokens == len(target):
        return None
    return torch.argsort((~valid).byte(), stable=True)[:num_valid_tokens]


def row_length(V: int) -> int:
    """Returns the elements that a row of V logits takes: 128 for 100."""
    return -(-V // ROW_MULTIPLE) * ROW_MULTIPLE


def empty_logits(weight: Tensor, num_rows: int) -> Tensor:
    """Returns a buffer for logits of the head's dtype, [num_rows, V], in rows of `row_length`."""
    V = len(weight)
    rows = weight.new_empty(num_rows, row_length(V))
    # PyTorch 2.13 on a CPU with AMX multiplies what is past an odd number of columns by 0.
    rows[:, V:] = 0
    return rows[:, :V]


def logits_bytes(num_tokens: int, vocab_size: int, element_size: int = 2) -> int:
    """Returns the bytes that `linear_cross_entropy` takes besides its inputs and gradients: a
    chunk's logits."""
    return element_size * row_length(vocab_size) * min(CHUNK_SIZE, num_tokens)


class HeadProducts:
    """Products of the head: logits of a chunk of rows, and the gradients from theirs.

    The head's words are multiplied in groups, [24:27] and [0:24] for 27. The few past the last
    multiple of 8 come first: dx rounds what they add while it is small.

    Args:
        weight, bias: [V, D] and [V]; None: no bias.
        needs_input: whether `add_gradients` makes the input's gradient.
        d_weight: [V, D], to which gradients of the head are written and added; None: not needed.
        num_rows: most rows of a chunk.
    """

    def __init__(
        self, linear: Linear, weight: Tensor, bias: Tensor | None, needs_input: bool,
        d_weight: Tensor | None, num_rows: int,
    ):  # fmt: skip
        V = len(weight)
        most = V // WORDS_MULTIPLE * WORDS_MULTIPLE
        groups = slice(most, V), slice(0, most)
        self.linear, self.bias, self.d_weight = linear, bias, d_weight
        self.groups = [words for words in groups if words.start < words.stop]
        self.factors = [linear.factor(weight[words]) for words in self.groups]
        self.factors_t = [linear.transpose(f) for f in self.factors] if needs_input else []
        self.buffer = empty_logits(weight, num_rows)
        self.is_first = True

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits of rows x [n, D], in a buffer that the next chunk's overwrite."""
        self.x_factor = self.linear.factor(x)
        logits = self.buffer[: len(x)]
        for words, factor in zip(self.groups, self.factors):
            bias = None if self.bias is None else self.bias[words]
            self.linear.forward(self.x_factor, factor, bias, out=logits[:, words])
        return logits

    def add_gradients(self, d_logits: Tensor, d_x: Tensor | None = None) -> Tensor | None:
        """Adds the gradient of the head for the rows of the last `logits`.

        Returns the gradient of these rows, written into `d_x` if given; None if it is not needed.
        """
        linear = self.linear
        factors = [linear.factor(d_logits[:, words]) for words in self.groups]
        for i, (factor, head_t) in enumerate(zip(factors, self.factors_t)):
            d_x = linear.input_gradient(factor, head_t, out=d_x, accumulate=i > 0)
        if self.d_weight is not None:
            x_t = linear.transpose(self.x_factor)
            for words, factor in zip(self.groups, factors):
                linear.weight_gradient(
                    linear.transpose(factor), x_t, out=self.d_weight[words],
                    accumulate=not self.is_first,
                )  # fmt: skip
        self.is_first = False
        return d_x


class _Outputs(NamedTuple):
    """Results by row, and gradients before the loss's scale. What is not needed is empty.

    All are float32 or wider, but d_input has the input's dtype.
    """

    losses: Tensor  # [N]
    log_sum_exp: Tensor  # [N]
    entropies: Tensor  # [N]
    d_input: Tensor  # [N, D]
    d_weight: Tensor  # [V, D]
    d_bias: Tensor  # [V]


def _empty_outputs(
    input, linear_weight, target, needs_input, needs_weight, needs_bias, needs_entropy
) -> _Outputs:
    losses = input.new_empty(target.shape, dtype=sum_dtype(input))
    return _Outputs(
        losses,
        torch.empty_like(losses),
        losses.new_empty(target.shape if needs_entropy else 0),
        input.new_empty(input.shape if needs_input else 0),
        losses.new_empty(linear_weight.shape if needs_weight else 0),
        losses.new_empty(len(linear_weight) if needs_bias else 0),
    )


def _fake_outputs(input, linear_weight, target, linear_bias, weights, scale, *options):
    outputs = _empty_outputs(input, linear_weight, target, *options[:4])
    return outputs.losses.new_empty(()), *outputs


def _run_chunks(
    input: Tensor, target: Tensor, weights: Tensor | None, rows: Tensor | None, chunk_size: int,
    head: HeadProducts, options: RowOptions, shard: Shard, outputs: _Outputs,
) -> Tensor:  # fmt: skip
    """Computes `rows`, all for None: their gradients and entropies are written to `outputs`.

    Returns their statistics, [3, rows], see `row_step`.
    """
    _, _, entropies, *gradients = outputs
    d_input, _, d_bias = gradients
    needs_gradient = any(gradient.numel() for gradient in gradients)
    num_rows = len(target) if rows is None else len(rows)
    statistics = outputs.losses.new_empty(3, num_rows)
    # Gradients of `cross_entropy` have a scale: with one here, a compiled kernel serves both.
    one = outputs.losses.new_ones(()) if needs_gradient else None
    for start in range(0, num_rows, chunk_size):
        places = slice(start, start + chunk_size)
        chunk = places if rows is None else rows[places]
        labels = target[chunk]
        logits = head.logits(input[chunk])
        if entropies.numel():
            entropies[chunk] = row_entropies(logits, labels, options, shard)
        gradient = logits if needs_gradient else None  # the gradient overwrites the logits
        row_scale = one if weights is None else weights[chunk]
        statistics[:, places] = row_step(
            logits, labels, options, shard, gradient=gradient, scale=row_scale
        )
        if gradient is None:
            continue
        d_x = head.add_gradients(gradient, d_input[places] if rows is None else None)
        if d_x is not None and rows is not None:
            d_input[chunk] = d_x
        if d_bias.numel():
            d_bias += gradient.sum(0, dtype=d_bias.dtype)
    return statistics


@operation("fathom::linear_cross_entropy", _fake_outputs)
def _loss_and_gradients(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None,
    weights: Tensor | None, scale: Tensor, needs_input: bool, needs_weight: bool, needs_bias: bool,
    needs_entropy: bool, part: int, num_valid_tokens: int | None, chunk_size: int,
    group_name: str | None, ignore_index: int, softcap: float | None, use_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the loss, each row's loss, log-sum-exp and entropy, and the gradients of input, head
    and bias.

    What is not needed is empty. `weights` [N] multiply each row's loss and its gradients. `scale`
    [] multiplies the sum of the losses, but not yet the gradients. `part` is the number of a
    `kernels.linear.Linear`.
    """
    options = RowOptions(ignore_index, softcap, use_triton)
    shard = shard_of(group_name, len(linear_weight))
    rows = rows_to_compute(target, ignore_index, num_valid_tokens)
    num_rows = len(target if rows is None else rows)
    outputs = _empty_outputs(
        input, linear_weight, target, needs_input, needs_weight, needs_bias, needs_entropy
    )
    losses, log_sum_exp, *_ = outputs
    outputs.d_bias.zero_()
    outputs.entropies.zero_()
    if rows is not None:
        outputs.d_input.zero_()
    if num_rows == 0:
        outputs.d_weight.zero_()
    d_weight = outputs.d_weight if needs_weight else None
    head = HeadProducts(
        part_of(part), linear_weight, linear_bias, needs_input, d_weight, min(chunk_size, num_rows)
    )
    statistics = _run_chunks(
        input, target, weights, rows, chunk_size, head, options, shard, outputs
    )
    if needs_input and shard.group is not None:
        dist.all_reduce(outputs.d_input, group=shard.group)
    computed = slice(None) if rows is None else rows
    losses.zero_()[computed], log_sum_exp.zero_()[computed] = row_losses(statistics)
    terms = losses if weights is None else losses * weights
    return (terms * scale).sum(), *outputs


def _setup_context(ctx, inputs, output):
    input, linear_weight, target, linear_bias, _, scale, *needs = inputs[:9]
    ctx.set_materialize_grads(False)
    ctx.dtype = input.dtype
    ctx.options = inputs[10:]
    ctx.has_gradients = any(needs)
    if ctx.has_gradients:
        ctx.save_for_backward(scale, *output[4:])
    else:
        ctx.save_for_backward(input, linear_weight, target, linear_bias)


def scaled_gradients(gradients: list[Tensor], scale: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Returns gradients times `scale` [], in `dtype`.

    Gradients that have this dtype are scaled in place, if backward runs once.
    """
    scale = scale.reshape(1)  # CUDA rounds a 0-d factor to the gradient's dtype
    kept = backward_keeps_graph()
    scaled = []
    for gradient in gradients:
        is_new = kept or gradient.dtype != dtype
        out = torch.empty_like(gradient, dtype=dtype) if is_new else gradient
        scaled.append(torch.mul(gradient, scale, out=out))
    return scaled


def _backward(ctx, d_loss, d_losses, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy has no second derivative (create_graph=True); its reference has"
        )
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    if ctx.has_gradients:
        scale, *gradients = ctx.saved_tensors
        gradients = scaled_gradients(gradients, scale * d_loss, ctx.dtype)
    else:
        tensors = *ctx.saved_tensors, d_losses.contiguous(), d_losses.new_ones(())
        _, _, _, _, *gradients = _loss_and_gradients(*tensors, *needs, False, *ctx.options)
    d_input, d_weight, d_bias = (
        g.to(ctx.dtype) if needed else None for g, needed in zip(gradients, needs)
    )
    return d_input, d_weight, None, d_bias, *[None] * (6 + len(ctx.options))


_loss_and_gradients.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    reduction: str = "mean", ignore_index: int = -100, softcap: float | None = None,
    weights: Tensor | None = None, denominator: float | Tensor | None = None,
    num_valid_tokens: int | None = None, chunk_size: int = CHUNK_SIZE,
    process_group: dist.ProcessGroup | None = None, return_details: bool = False,
    return_entropy: bool = False, linear: Linear = PLAIN, impl: str = "auto",
) -> Tensor | Details:  # fmt: skip
    """Cross-entropy of `input @ linear_weight.T + linear_bias`, with logits of one chunk at a time.

    The signature follows PyTorch's `F.linear_cross_entropy`, without class weights and label
    smoothing. Autocast casts as for F.linear.

    Args:
        input: [..., D] hidden states, float32, bfloat16 or float16 (float64 too with impl="torch").
        linear_weight: [V, D], the head, of the input's dtype. A DTensor is gathered once. Its
            gradient is summed over the ranks of its mesh, which are taken to have different rows of
            the input.
        target, reduction, ignore_index, softcap, weights, denominator, return_details,
            return_entropy: as in `cross_entropy`. Rows with an ignored label cost nothing, and
            reduction="none" costs a fourth GEMM in backward.
        linear_bias: [V], of the input's dtype.
        num_valid_tokens: number of labels other than `ignore_index`. It spares the host a wait for
            the device. A wrong number is an error (on CUDA a device-side assertion).
        chunk_size: tokens per chunk.
        process_group: shards the vocabulary, as in `cross_entropy`: each rank calls with the same
            input and its own rows of linear_weight and linear_bias. Every rank returns the whole
            gradient of the input.
        linear: the part that makes the matrix products.
        impl: "auto", "triton" or "torch", for a chunk's loss and gradient between the GEMMs.

    Returns as `cross_entropy`: the loss, or `Details`.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together; a denominator that
            `cross_entropy` refuses.
        RuntimeError: wrong num_valid_tokens; in backward, create_graph=True.
    """
    input, weight, bias = cast_by_autocast(input, gathered(linear_weight), linear_bias)
    on_triton = use_triton(impl, input)
    _check(input, weight, bias, target, num_valid_tokens, chunk_size)
    targets = check_targets(input, target, reduction, ignore_index, softcap, weights, denominator)
    # Forward computes the gradients, except for reduction="none".
    has_gradients = torch.is_grad_enabled() and reduction != "none"
    needs = [has_gradients and t is not None and t.requires_grad for t in (input, weight, bias)]
    group_name = None if process_group is None else process_group.group_name
    loss, losses, log_sum_exp, entropies, *_ = _loss_and_gradients(
        input.reshape(-1, input.shape[-1]), weight, targets.labels, bias, targets.weights,
        targets.scale, *needs, return_entropy, linear.number, num_valid_tokens, chunk_size,
        group_name, ignore_index, softcap, on_triton,
    )  # fmt: skip
    if reduction == "none":
        loss = losses.view(target.shape)
    if not (return_details or return_entropy):
        return loss
    return details(loss, losses, log_sum_exp, target.shape, entropies if return_entropy else None)


def gathered(linear_weight: Tensor) -> Tensor:
    """Returns a DTensor's whole tensor, whose gradient is summed over its ranks; any other tensor
    as it is."""
    if not hasattr(linear_weight, "full_tensor"):
        return linear_weight
    from torch.distributed.tensor import Partial

    return linear_weight.full_tensor(grad_placements=[Partial()] * linear_weight.device_mesh.ndim)


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """`linear_cross_entropy` as a module: loss(hidden, model.lm_head.weight, labels), without a
    shift of labels."""

    function = staticmethod(linear_cross_entropy)


def _check(input, linear_weight, linear_bias, target, num_valid_tokens, chunk_size):
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"linear_weight must be [V, {input.shape[-1]}], got {list(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ValueError(
            f"linear_bias must be [{linear_weight.shape[0]}], got {list(linear_bias.shape)}"
        )
    for name, tensor in {"linear_weight": linear_weight, "linear_bias": linear_bias}.items():
        if tensor is not None and tensor.dtype != input.dtype:
            raise ValueError(
                f"{name} must have the input's dtype, {input.dtype}, got {tensor.dtype}"
            )
    if num_valid_tokens is not None and not 0 <= num_valid_tokens <= target.numel():
        raise ValueError(
            f"num_valid_tokens must be between 0 and {target.numel()}, got {num_valid_tokens}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
