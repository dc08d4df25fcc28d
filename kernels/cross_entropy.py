"""Cross-entropy over given logits, with softcap.

With z = softcap(logits), label y and p = softmax(z):

    loss = logsumexp(z) - z[y],  dz[v] = p[v] - (v == y)

Three float32 statistics describe a row: the maximum m of z; the sum of exp(z[v] - m) over the other
classes, v != y; and z[y]. The label's own term stays apart. Hence neither logsumexp(z) - z[y] nor
p[y] - 1 cancels where the model is sure of the label, and an offset common to all logits costs no
digits. Statistics leave the kernel because ranks that share V combine theirs (`process_group`).

Kept for backward: logits and 12 bytes per row; with inplace=True only the gradient, in the logits'
storage.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from .common import operation, shown, sum_dtype, use_triton
from .torch_internals import assert_async, resolve_process_group

ROWS_ELEMENTS = 2**24  # elements of rows that PyTorch computes at a time: 64 MiB in float32
VECTOR = 8  # neighbouring columns that one thread holds: 16 bytes of bf16
LOG2_E = tl.constexpr(1.4426950408889634)


class Details(NamedTuple):
    """A loss, and each row's unweighted loss, log-sum-exp and entropy: float32, detached, 0 for
    ignored labels."""

    loss: Tensor
    per_token_loss: Tensor
    log_sum_exp: Tensor
    entropy: Tensor | None = None  # nats; None: not asked for


class RowOptions(NamedTuple):
    """Options of the loss of a row."""

    ignore_index: int
    softcap: float | None
    use_triton: bool


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, reduction: str = "mean", ignore_index: int = -100,
    softcap: float | None = None, weights: Tensor | None = None,
    denominator: float | Tensor | None = None, return_details: bool = False,
    return_entropy: bool = False,
) -> Tensor | Details:  # fmt: skip
    """Plain PyTorch with the contract of `cross_entropy`; float64 stays float64."""
    z = _capped(logits, softcap).flatten(0, -2)
    labels = target.flatten()
    losses = F.cross_entropy(z, labels, reduction="none", ignore_index=ignore_index)
    log_sum_exp = torch.where(labels == ignore_index, 0, z.logsumexp(-1))
    scale = loss_scale(labels, reduction, ignore_index, denominator, z.dtype)
    terms = losses if weights is None else losses * weights.flatten()
    loss = losses.view(target.shape) if reduction == "none" else terms.sum() * scale
    if not (return_details or return_entropy):
        return loss
    p = z.softmax(-1)
    entropies = None
    if return_entropy:
        entropies = torch.where(labels == ignore_index, 0, -torch.special.xlogy(p, p).sum(-1))
    return details(loss, losses, log_sum_exp, target.shape, entropies)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Returns softcap(logits), float32 or wider."""
    z = logits.to(sum_dtype(logits))
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def loss_scale(
    target: Tensor,
    reduction: str,
    ignore_index: int,
    denominator: float | Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the factor [] of the sum of the losses, 1 where no row is valid. The host never waits
    for the device."""
    if reduction != "mean":
        return torch.ones((), device=target.device, dtype=dtype)
    if denominator is None:
        return 1 / (target != ignore_index).sum(dtype=dtype).clamp(min=1)
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1:
            raise ValueError(
                f"denominator must be one number, got a tensor of shape {list(denominator.shape)}"
            )
        scale = _reciprocal(denominator.detach().reshape(()).to(dtype))
        return scale.to(target.device, non_blocking=True)
    _check_denominator(0 < denominator < torch.inf, denominator)
    return torch.full((), 1 / denominator, device=target.device, dtype=dtype)


@operation("fathom::reciprocal", torch.empty_like)
def _reciprocal(denominator: Tensor) -> Tensor:
    """Returns 1 / denominator.

    The denominator must be positive and finite; on CUDA the device asserts it.
    """
    is_valid = (denominator > 0) & (denominator < torch.inf)
    if denominator.is_cuda:
        assert_async(is_valid, "denominator is not positive and finite")
    else:
        _check_denominator(is_valid, denominator)
    return 1 / denominator


def _check_denominator(is_valid, value):
    if not is_valid:
        raise ValueError(
            f"denominator must be positive and finite, got {float(value)}; "
            "give the number of labels that count in all micro-batches, 1 if there are none"
        )


def details(
    loss: Tensor,
    losses: Tensor,
    log_sum_exp: Tensor,
    shape: torch.Size,
    entropies: Tensor | None = None,
) -> Details:
    """Makes `Details` of a loss, and of values of rows [N], which take the labels' shape."""
    by_row = losses, log_sum_exp, entropies
    return Details(loss, *(x if x is None else x.detach().view(shape) for x in by_row))


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)  # half the instructions of tl.exp, which handles denormal results


@triton.jit
def _softcap(z, SOFTCAP: tl.constexpr):
    if SOFTCAP is not None:
        z = SOFTCAP * (2 * tl.sigmoid(2 * z / SOFTCAP) - 1)  # tanh
    return z


@triton.jit
def _load_logits(
    row_ptr, columns, num_columns, SOFTCAP: tl.constexpr, EVICT: tl.constexpr, MASKED: tl.constexpr
):
    if MASKED:
        mask = columns < num_columns
        z = tl.load(row_ptr + columns, mask=mask, other=float("-inf"), eviction_policy=EVICT).to(
            tl.float32
        )
        if SOFTCAP is not None:
            z = tl.where(mask, _softcap(z, SOFTCAP), float("-inf"))
    else:
        z = _softcap(tl.load(row_ptr + columns, eviction_policy=EVICT).to(tl.float32), SOFTCAP)
    return z


@triton.jit
def _add_block(
    maxima, sums, logits_ptr, columns, y, num_columns, SOFTCAP: tl.constexpr,
    HAS_LABEL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds a block of columns, but for the label's, to each thread's running maximum and sum."""
    z = _load_logits(logits_ptr, columns, num_columns, SOFTCAP, "evict_last", MASKED)
    if HAS_LABEL:
        z = tl.where(columns == y, float("-inf"), z)
    larger = tl.maximum(maxima, tl.max(z, axis=1))
    sums = sums * _exp(maxima - larger) + tl.sum(_exp(z - larger[:, None]), axis=1)
    return larger, sums


@triton.jit
def _store_gradient(
    gradient_ptr,
    logits_ptr,
    columns,
    maximum,
    factor,
    num_columns,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores the gradient of a block of columns as if none were the label."""
    z = _load_logits(logits_ptr, columns, num_columns, SOFTCAP, "evict_first", MASKED)
    dz = _exp(z - maximum) * factor
    if SOFTCAP is not None:
        dz *= 1 - (z / SOFTCAP) * (z / SOFTCAP)
    dz = dz.to(gradient_ptr.dtype.element_ty)
    if MASKED:
        tl.store(gradient_ptr + columns, dz, mask=columns < num_columns, cache_modifier=".cs")
    else:
        tl.store(gradient_ptr + columns, dz, cache_modifier=".cs")


@triton.jit
def _store_ignored(
    gradient_ptr, statistics_ptr, offsets, num_rows, num_columns, HAS_STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Stores statistics and a gradient of 0.

    `offsets` are the columns of a block, [BLOCK/VECTOR, VECTOR].
    """
    if not HAS_STATISTICS:
        for i in tl.static_range(3):
            tl.store(statistics_ptr + i * num_rows, 0.0)
    if gradient_ptr is not None:
        for start in range(0, num_columns, BLOCK):
            zeros = tl.zeros([BLOCK // VECTOR, VECTOR], dtype=gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + start + offsets, zeros, mask=start + offsets < num_columns)


@triton.jit
def _statistics_of_row(
    logits_ptr,
    offsets,
    y,
    is_here,
    num_columns,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Returns the maximum, the sum over other classes and the label's logit.

    Only the last blocks need masks.
    """
    full = num_columns // BLOCK * BLOCK
    true_logit = tl.load(logits_ptr + y, mask=is_here, other=float("-inf")).to(tl.float32)
    true_logit = tl.where(is_here, _softcap(true_logit, SOFTCAP), float("-inf"))
    sums = tl.zeros([BLOCK // VECTOR], dtype=tl.float32)
    # Finite, to avoid inf - inf where all is masked.
    maxima = tl.full([BLOCK // VECTOR], -1e38, dtype=tl.float32)
    label_start = tl.where(is_here, y // BLOCK * BLOCK, -1)
    for start in range(0, full, BLOCK):
        if start != label_start:
            maxima, sums = _add_block(
                maxima,
                sums,
                logits_ptr,
                start + offsets,
                y,
                num_columns,
                SOFTCAP,
                HAS_LABEL=False,
                MASKED=False,
            )
    if (full < num_columns) & (full != label_start):
        maxima, sums = _add_block(
            maxima,
            sums,
            logits_ptr,
            full + offsets,
            y,
            num_columns,
            SOFTCAP,
            HAS_LABEL=False,
            MASKED=True,
        )
    if is_here:
        maxima, sums = _add_block(
            maxima,
            sums,
            logits_ptr,
            label_start + offsets,
            y,
            num_columns,
            SOFTCAP,
            HAS_LABEL=True,
            MASKED=True,
        )
    maximum = tl.maximum(tl.max(maxima, axis=0), true_logit)
    return maximum, tl.sum(sums * _exp(maxima - maximum), axis=0), true_logit


@triton.jit
def _gradient_of_row(
    gradient_ptr, logits_ptr, offsets, y, is_here, maximum, other_sum, true_logit, scale,
    num_columns, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores a row's gradient, from the last column to the first: the last logits read are still in
    the L2 cache."""
    full = num_columns // BLOCK * BLOCK
    factor = scale / (other_sum + _exp(true_logit - maximum))
    if full < num_columns:
        _store_gradient(
            gradient_ptr,
            logits_ptr,
            full + offsets,
            maximum,
            factor,
            num_columns,
            SOFTCAP,
            MASKED=True,
        )
    for start in range(0, full, BLOCK):
        columns = full - BLOCK - start + offsets
        _store_gradient(
            gradient_ptr, logits_ptr, columns, maximum, factor, num_columns, SOFTCAP, MASKED=False
        )
    if is_here:
        dz_label = -factor * other_sum  # scale * (p[y] - 1)
        if SOFTCAP is not None:
            dz_label *= 1 - (true_logit / SOFTCAP) * (true_logit / SOFTCAP)
        tl.debug_barrier()  # after another thread's store to this column
        tl.store(gradient_ptr + y, dz_label.to(gradient_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _cross_entropy_kernel(
    logits_ptr, logits_stride, target_ptr, statistics_ptr, gradient_ptr, gradient_stride, scale_ptr,
    scale_stride, num_rows, num_columns, first_class, IGNORE_INDEX: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_STATISTICS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Computes or reads the statistics of a row, then stores its gradient if gradient_ptr is given.

    Whole blocks of columns without the label need no masks, and so half the instructions. The
    gradient may overwrite the logits. Column 0 is class first_class.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    statistics_ptr += row
    if gradient_ptr is not None:
        gradient_ptr += row * gradient_stride
    # A thread holds VECTOR neighbours. Maximum and sum over axis 1 therefore stay inside it.
    # [BLOCK/VECTOR, VECTOR]
    offsets = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    label = tl.load(target_ptr + row)
    if label == IGNORE_INDEX:
        _store_ignored(
            gradient_ptr,
            statistics_ptr,
            offsets,
            num_rows,
            num_columns,
            HAS_STATISTICS,
            BLOCK,
            VECTOR,
        )
        return
    y = (label - first_class).to(tl.int32)
    is_here = (y >= 0) & (y < num_columns)
    if HAS_STATISTICS:
        maximum = tl.load(statistics_ptr)
        other_sum = tl.load(statistics_ptr + num_rows)
        true_logit = tl.load(statistics_ptr + 2 * num_rows)
    else:
        maximum, other_sum, true_logit = _statistics_of_row(
            logits_ptr, offsets, y, is_here, num_columns, SOFTCAP, BLOCK, VECTOR
        )
        tl.store(statistics_ptr, maximum)
        tl.store(statistics_ptr + num_rows, other_sum)
        tl.store(statistics_ptr + 2 * num_rows, true_logit)
    if gradient_ptr is not None:
        scale = 1.0
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + row * scale_stride)
        _gradient_of_row(
            gradient_ptr, logits_ptr, offsets, y, is_here, maximum, other_sum, true_logit, scale,
            num_columns, SOFTCAP, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _entropy_kernel(
    logits_ptr, logits_stride, statistics_ptr, out_ptr, num_rows, num_columns,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Stores the sum of exp(z - m) (z - m) over a row's columns; m is the row's maximum."""
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.load(statistics_ptr + row)
    # [BLOCK/VECTOR, VECTOR]
    offsets = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    sums = tl.zeros([BLOCK // VECTOR, VECTOR], dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        z = _load_logits(
            logits_ptr + row * logits_stride,
            start + offsets,
            num_columns,
            SOFTCAP,
            "evict_first",
            MASKED=True,
        )
        below = tl.maximum(z - maximum, -1e38)  # finite, to avoid 0 * inf
        sums += _exp(below) * below
    tl.store(out_ptr + row, tl.sum(tl.sum(sums, axis=1), axis=0))


@triton.jit
def _scale_rows_kernel(
    gradient_ptr, gradient_stride, scale_ptr, scale_stride, num_columns, BLOCK: tl.constexpr
):
    """Multiplies each row of the gradient by its scale. Rows of scale 1, as after loss.backward(),
    are left alone."""
    row = tl.program_id(0).to(tl.int64)
    gradient_ptr += row * gradient_stride
    scale = tl.load(scale_ptr + row * scale_stride)
    if scale != 1.0:
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)  # [BLOCK]
            dz = tl.load(gradient_ptr + columns, mask=columns < num_columns).to(tl.float32) * scale
            tl.store(
                gradient_ptr + columns,
                dz.to(gradient_ptr.dtype.element_ty),
                mask=columns < num_columns,
            )


def launch_configuration(num_columns: int, itemsize: int) -> dict[str, int]:
    """Returns the row kernel's columns per block and warps per program, the fastest on an H200.

    `bench_cross_entropy --sweep` measured them. A multiprocessor works on one row at a time, so
    that all rows in flight fit into the L2 cache, from which the second pass reads.
    """
    num_warps = 16 if num_columns > 16384 else 4
    thread_bytes = 64 if num_columns > 65536 else 32
    return {"BLOCK": num_warps * 32 * thread_bytes // itemsize, "num_warps": num_warps}


class Shard(NamedTuple):
    """Classes of the columns of this rank's logits."""

    group: dist.ProcessGroup | None
    first_class: int


def shard_of(group_name: str | None, num_columns: int) -> Shard:
    """Returns this rank's shard where each rank of a group has `num_columns`, in the order of
    ranks; None: no group."""
    if group_name is None:
        return Shard(None, 0)
    group = resolve_process_group(group_name)
    return Shard(group, dist.get_rank(group) * num_columns)


def row_step(
    logits: Tensor, target: Tensor, options: RowOptions, shard: Shard, *,
    statistics: Tensor | None = None, gradient: Tensor | None = None, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the statistics of whole rows, and writes gradients times `scale` into `gradient`. Not
    differentiable.

    Args:
        logits: [N, C], this shard's classes. Rows are contiguous.
        target: [N] int64, contiguous.
        statistics: [3, N] float32 (float64 for float64 logits); computed if None, by one all-gather
            between ranks.
        gradient: [N, C], may be `logits`.
        scale: [] or [N], of the statistics' dtype.
    """
    if shard.group is not None and statistics is None:
        shard_statistics = row_step(logits, target, options, shard._replace(group=None))
        statistics = _statistics_of_whole_rows(shard_statistics, shard.group)
        if gradient is None:
            return statistics
    if not options.use_triton:
        return _row_steps_in_torch(logits, target, options, shard, statistics, gradient, scale)
    num_rows, num_columns = logits.shape
    has_statistics = statistics is not None
    if not has_statistics:
        statistics = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        _cross_entropy_kernel[(num_rows,)](
            logits, logits.stride(0), target, statistics, gradient,
            0 if gradient is None else gradient.stride(0), scale,
            scale.stride(0) if scale is not None and scale.dim() else 0, num_rows, num_columns,
            shard.first_class, IGNORE_INDEX=options.ignore_index, SOFTCAP=options.softcap,
            HAS_STATISTICS=has_statistics, VECTOR=VECTOR,
            **launch_configuration(num_columns, logits.element_size()),
        )  # fmt: skip
    return statistics


def rows_at_a_time(num_columns: int) -> int:
    """Returns how many rows PyTorch computes at a time: of 151,936 columns it is 110."""
    return max(1, ROWS_ELEMENTS // max(1, num_columns))


def _row_steps_in_torch(logits, target, options, shard, statistics, gradient, scale):
    """Takes some rows at a time, since each has several copies in float32."""
    num_rows, num_columns = logits.shape
    count = rows_at_a_time(num_columns)
    if num_rows <= count:
        return _row_step_in_torch(logits, target, options, shard, statistics, gradient, scale)
    parts = list[Tensor]()
    for start in range(0, num_rows, count):
        rows = slice(start, start + count)
        part = None if statistics is None else statistics[:, rows]
        own_scale = scale[rows] if scale is not None and scale.dim() else scale
        own_gradient = None if gradient is None else gradient[rows]
        parts.append(
            _row_step_in_torch(
                logits[rows], target[rows], options, shard, part, own_gradient, own_scale
            )
        )
    return torch.cat(parts, 1)


def _row_step_in_torch(logits, target, options, shard, statistics, gradient, scale):
    z = _capped(logits, options.softcap)
    valid = target != options.ignore_index
    # [N, C]
    is_label = torch.arange(z.shape[1], device=z.device) == (target - shard.first_class)[:, None]
    if statistics is None:
        maximum = z.amax(1)
        other_sum = torch.where(is_label, 0, (z - maximum[:, None]).exp()).sum(1)
        true_logit = torch.where(is_label, z, -torch.inf).amax(1)
        statistics = torch.where(valid, torch.stack([maximum, other_sum, true_logit]), 0)
    if gradient is not None:
        maximum, other_sum, true_logit = statistics
        total = other_sum + (true_logit - maximum).exp()
        dz = (
            torch.where(is_label, -other_sum[:, None], (z - maximum[:, None]).exp())
            / total[:, None]
        )
        if options.softcap is not None:
            dz *= 1 - (z / options.softcap).square()
        if scale is not None:
            dz *= scale.expand(len(dz))[:, None]
        gradient.copy_(torch.where(valid[:, None], dz, 0))
    return statistics


def row_entropies(logits: Tensor, target: Tensor, options: RowOptions, shard: Shard) -> Tensor:
    """Returns the entropy of each row's probabilities, [N]; ignored rows give 0. Arguments as in
    `row_step`.

    For the maximum m of z and the sum s of exp(z - m) it is log s - sum(exp(z - m) (z - m)) / s.
    """
    statistics = row_step(logits, target, options, shard)
    num_rows, num_columns = logits.shape
    if options.use_triton:
        sums = torch.empty_like(statistics[0])
        if num_rows > 0:
            _entropy_kernel[(num_rows,)](
                logits, logits.stride(0), statistics, sums, num_rows, num_columns,
                SOFTCAP=options.softcap, VECTOR=VECTOR,
                **launch_configuration(num_columns, logits.element_size()),
            )  # fmt: skip
    else:
        below = (_capped(logits, options.softcap) - statistics[0][:, None]).clamp(min=-1e38)
        sums = (below.exp() * below).sum(1)
    if shard.group is not None:
        dist.all_reduce(sums, group=shard.group)
    maximum, other_sum, true_logit = statistics
    total = other_sum + (true_logit - maximum).exp()
    return torch.where(target == options.ignore_index, 0, total.log() - sums / total)


def _statistics_of_whole_rows(shard_statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Combines each rank's statistics of its own columns, [3, N]."""
    gathered = [torch.empty_like(shard_statistics) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, shard_statistics, group=group)
    maxima, other_sum, true_logits = torch.stack(gathered, dim=1)  # [n, N] each
    maximum = maxima.amax(0)
    return torch.stack(
        [maximum, (other_sum * (maxima - maximum).exp()).sum(0), true_logits.amax(0)]
    )


def row_losses(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Returns loss and log-sum-exp of each row, [N], from statistics of whole rows, [3, N]; ignored
    rows give 0."""
    maximum, other_sum, true_logit = statistics
    # lse - z[y] = log(1 + others / exp(z[y] - m)), without a difference of two large numbers
    losses = F.softplus(maximum - true_logit + other_sum.log(), threshold=50)
    return losses, maximum + (other_sum + (true_logit - maximum).exp()).log()


def _step(
    logits: Tensor, target: Tensor, group_name: str | None, *options, **tensors: Tensor
) -> Tensor:
    return row_step(
        logits, target, RowOptions(*options), shard_of(group_name, logits.shape[1]), **tensors
    )


def _empty(logits: Tensor, *shape: int) -> Tensor:
    return logits.new_empty(*shape, len(logits), dtype=sum_dtype(logits))


@operation(
    "fathom::cross_entropy", lambda logits, *_: (_empty(logits), _empty(logits), _empty(logits, 3))
)
def _forward(
    logits: Tensor,
    target: Tensor,
    group_name: str | None,
    ignore_index: int,
    softcap: float | None,
    use_triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns losses, log-sum-exps and statistics."""
    statistics = _step(logits, target, group_name, ignore_index, softcap, use_triton)
    return *row_losses(statistics), statistics


@operation(
    "fathom::cross_entropy_backward", lambda d_losses, logits, *_: logits.new_empty(logits.shape)
)
def _backward(
    d_losses: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, group_name: str | None,
    ignore_index: int, softcap: float | None, use_triton: bool,
) -> Tensor:  # fmt: skip
    """Returns the gradient of the logits, each row times its d_losses."""
    tensors = {
        "statistics": statistics,
        "gradient": logits.new_empty(logits.shape),
        "scale": d_losses,
    }
    _step(logits, target, group_name, ignore_index, softcap, use_triton, **tensors)
    return tensors["gradient"]


@operation("fathom::row_entropies", lambda logits, *_: _empty(logits))
def _entropies(
    logits: Tensor,
    target: Tensor,
    group_name: str | None,
    ignore_index: int,
    softcap: float | None,
    use_triton: bool,
) -> Tensor:
    options = RowOptions(ignore_index, softcap, use_triton)
    return row_entropies(logits, target, options, shard_of(group_name, logits.shape[1]))


def _setup_context(ctx, inputs, output):
    logits, target, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, output[2])


def _gradients(ctx, d_losses, d_log_sum_exp, d_statistics):
    return _backward(d_losses, *ctx.saved_tensors, *ctx.options), *[None] * (1 + len(ctx.options))


_forward.register_autograd(_gradients, setup_context=_setup_context)


@operation(
    "fathom::cross_entropy_in_place",
    lambda logits, *_: (_empty(logits), _empty(logits)),
    mutates=("logits",),
)
def _forward_in_place(
    logits: Tensor, target: Tensor, scale: Tensor, group_name: str | None, ignore_index: int,
    softcap: float | None, use_triton: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns losses and log-sum-exps, and overwrites the logits by their gradients times scale."""
    options = group_name, ignore_index, softcap, use_triton
    return row_losses(_step(logits, target, *options, gradient=logits, scale=scale))


@operation("fathom::scale_rows_", None, mutates=("gradient",))
def _scale_rows_(gradient: Tensor, scale: Tensor, use_triton: bool) -> None:
    """Multiplies the rows of gradient [N, V] by scale [N]."""
    if not use_triton:
        for rows, row_scales in zip(
            *(x.split(rows_at_a_time(gradient.shape[1])) for x in (gradient, scale))
        ):
            rows.mul_(row_scales[:, None])  # PyTorch makes copies in float32
    elif len(gradient) > 0:
        _scale_rows_kernel[(len(gradient),)](
            gradient,
            gradient.stride(0),
            scale,
            scale.stride(0),
            gradient.shape[1],
            BLOCK=8192,
            num_warps=16,
        )


class _InPlace(torch.autograd.Function):
    """Returns losses times `scale`, losses and log-sum-exps.

    Forward leaves the gradient in the logits' storage.
    """

    @staticmethod
    def forward(ctx, logits, target, scale, group_name, options):
        losses, log_sum_exp = _forward_in_place(logits, target, scale, group_name, *options)
        ctx.mark_non_differentiable(losses, log_sum_exp)
        ctx.save_for_backward(logits.detach())
        ctx.use_triton = options.use_triton
        return losses * scale, losses, log_sum_exp

    @staticmethod
    def backward(ctx, d_terms, d_losses, d_log_sum_exp):
        try:
            (gradient,) = ctx.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(
                "cross_entropy(inplace=True) left its gradient in the logits' storage, which was "
                "written to since, by a first backward or by you; use inplace=False"
            ) from error
        _scale_rows_(gradient, d_terms, ctx.use_triton)
        return gradient, None, None, None, None


def cross_entropy(
    logits: Tensor, target: Tensor, *, reduction: str = "mean", ignore_index: int = -100,
    softcap: float | None = None, weights: Tensor | None = None,
    denominator: float | Tensor | None = None, return_details: bool = False,
    return_entropy: bool = False, inplace: bool = False,
    process_group: dist.ProcessGroup | None = None, impl: str = "auto",
) -> Tensor | Details:  # fmt: skip
    """Cross-entropy of integer labels, computed in float32 whatever the logits' dtype.

    Args:
        logits: [..., V], float32, bfloat16 or float16 (float64 too with impl="torch").
        target: [...] int64 labels in [0, V), or `ignore_index`.
        reduction: "mean", "sum" or "none".
        ignore_index: rows with this label have a loss and a gradient of 0.
        softcap: replaces logits by softcap * tanh(logits / softcap), as Gemma 2 (arXiv:2408.00118).
        weights: [...], finite factors of the rows' losses and gradients, taken as float32. They are
            not differentiated, and do not change `denominator`'s default.
        denominator: divides the sum for "mean": a positive number or tensor of one element, such as
            the number of labels in all micro-batches of all ranks. The default is the number of
            rows not ignored. The loss is 0 where all rows are ignored.
        return_details: also return each row's loss and log-sum-exp.
        return_entropy: also return these and each row's entropy; reads the logits twice more.
        inplace: lets the gradient overwrite the logits in forward, which saves a second [..., V]
            and a read of it. The logits are gone, and backward can run once.
        process_group: shards the vocabulary. Each rank calls with the same target and the logits of
            its own classes, equally many on every rank, in the order of ranks. Every rank returns
            the loss over all classes.

    Returns the loss, float32 (float64 for float64 logits): [], or [...] for "none"; or `Details`.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together; a denominator that is not
            positive and finite (in a CUDA tensor, a device-side assertion).
        RuntimeError: in backward, a gradient of inplace=True that has been used or overwritten.
    """
    on_triton = use_triton(impl, logits)
    group_name = None if process_group is None else process_group.group_name
    labels, weights, scale = check_targets(
        logits, target, reduction, ignore_index, softcap, weights, denominator
    )
    if inplace and not logits.is_contiguous():
        raise ValueError(f"inplace=True needs contiguous logits, got strides {logits.stride()}")
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    options = RowOptions(ignore_index, softcap, on_triton)
    # Before the gradient overwrites the logits.
    entropies = _entropies(rows.detach(), labels, group_name, *options) if return_entropy else None
    if inplace and torch.is_grad_enabled() and logits.requires_grad:
        # Forward scales the stored gradient, but in float16, where 1 / tokens would underflow.
        one = torch.ones_like(scale)
        in_gradient, scale = (one, scale) if logits.dtype == torch.float16 else (scale, one)
        in_gradient = in_gradient if weights is None else in_gradient * weights
        terms, losses, log_sum_exp = _InPlace.apply(rows, labels, in_gradient, group_name, options)
    else:
        losses, log_sum_exp, _ = _forward(rows, labels, group_name, *options)
        terms = losses if weights is None else losses * weights
    loss = terms.view(target.shape) if reduction == "none" else terms.sum() * scale
    if return_details or return_entropy:
        return details(loss, losses, log_sum_exp, target.shape, entropies)
    return loss


class CrossEntropyLoss(nn.Module):
    """`cross_entropy` as a module, with options given to the constructor; a call may add others.

    Raises TypeError for an option that the function does not take.
    """

    function: Callable = staticmethod(cross_entropy)

    def __init__(self, **options):
        super().__init__()
        inspect.signature(self.function).bind_partial(**options)
        self.options = options

    def forward(self, *tensors: Tensor, **options):
        return self.function(*tensors, **self.options, **options)


class Targets(NamedTuple):
    """Checked labels and factors of a loss, by row."""

    labels: Tensor  # [N] int64, contiguous
    weights: Tensor | None  # [N], float32 (float64 for float64 logits), contiguous
    scale: Tensor  # [], the factor of the losses' sum


def check_targets(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int, softcap: float | None,
    weights: Tensor | None, denominator: float | Tensor | None,
) -> Targets:  # fmt: skip
    """Returns the targets for logits, or for their hidden states.

    Raises ValueError as the losses do.
    """
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target must be {list(logits.shape[:-1])}, got {list(target.shape)}")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target must hold integer labels, got {target.dtype}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be none, mean or sum, got {reduction!r}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    dtype = sum_dtype(logits)
    if weights is not None:
        if weights.shape != target.shape or not weights.is_floating_point():
            raise ValueError(
                f"weights must be {list(target.shape)} of floating point, got {shown(weights)}"
            )
        if reduction == "none":
            raise ValueError(
                'weights have no effect with reduction="none", whose losses the caller may weigh'
            )
        weights = weights.detach().reshape(-1).to(dtype).contiguous()
    labels = target.reshape(-1).long().contiguous()
    scale = loss_scale(labels, reduction, ignore_index, denominator, dtype)
    return Targets(labels, weights, scale)
