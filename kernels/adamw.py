"""AdamW on float32 state, in one pass over a parameter.

PyTorch's fused kernel takes tensors of one dtype: a bf16 weight and its gradient, which is to be
scaled, need three passes more, and 48 bytes per parameter are read and written in place of 28.
compact_adamw.py has the mathematics.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements that a program takes at once: each thread has 8
PROGRAMS = 64  # programs per parameter, where several are updated in one launch
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _update(
    weight_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, bias_corrections_ptr,
    offsets, mask, gradient_scale, lr, lr_decay, one_minus_beta1, beta2, one_minus_beta2, eps,
):  # fmt: skip
    master = tl.load(master_ptr + offsets, mask=mask, other=0.0)
    m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * gradient_scale
    step_size = lr / tl.load(bias_corrections_ptr)
    inverse_root = 1 / tl.sqrt_rn(tl.load(bias_corrections_ptr + 1))
    m += (gradient - m) * one_minus_beta1
    v = v * beta2 + gradient * gradient * one_minus_beta2
    # One small number is taken off: 1 - lr weight_decay would round decay to 6e-8 of a weight,
    # alike for each of them.
    master -= lr_decay * master + step_size * m / (tl.sqrt_rn(v) * inverse_root + eps)
    tl.store(master_ptr + offsets, master, mask=mask)
    tl.store(exp_avg_ptr + offsets, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)
    if weight_ptr is not None:
        tl.store(weight_ptr + offsets, master.to(weight_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    weight_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, bias_corrections_ptr, numel,
    gradient_scale, lr, lr_decay, one_minus_beta1, beta2, one_minus_beta2, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _update(
        weight_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, bias_corrections_ptr,
        offsets, offsets < numel, gradient_scale, lr, lr_decay, one_minus_beta1, beta2,
        one_minus_beta2, eps,
    )  # fmt: skip


@triton.jit
def _adamw_of_several_kernel(
    table_ptr, bias_corrections_ptr, gradient_scale, lr, lr_decay, one_minus_beta1, beta2,
    one_minus_beta2, eps, BLOCK: tl.constexpr, GRADIENT: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Updates the parameter of a row of the table: its elements, and addresses of its tensors."""
    row = table_ptr + tl.program_id(0) * 6
    numel = tl.load(row)
    gradient_ptr = tl.load(row + 1).to(tl.pointer_type(GRADIENT))
    master_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    exp_avg_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    exp_avg_sq_ptr = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    weight_ptr = None
    if WEIGHT is not None:
        weight_ptr = tl.load(row + 5).to(tl.pointer_type(WEIGHT))
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        _update(
            weight_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, bias_corrections_ptr,
            offsets, offsets < numel, gradient_scale, lr, lr_decay, one_minus_beta1, beta2,
            one_minus_beta2, eps,
        )  # fmt: skip


class Tensors(NamedTuple):
    """A parameter's tensors, flat [n], contiguous, and on one device."""

    gradient: Tensor  # any floating-point dtype
    master: Tensor  # float32, as both moments
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight: Tensor | None  # gets the new master, rounded; None: the master is the weight


def _dtypes(parameter: Tensors) -> tuple[torch.dtype | None, ...]:
    """Returns the dtypes of a parameter's tensors, in order.

    Raises ValueError for tensors that do not fit together.
    """
    tensors = [tensor for tensor in parameter if tensor is not None]
    is_flat = all(tensor.is_contiguous() for tensor in tensors)
    has_one_length = len({len(tensor) for tensor in tensors}) == 1
    has_float_state = {tensor.dtype for tensor in parameter[1:4]} == {torch.float32}
    if not (is_flat and has_one_length and has_float_state):
        raise ValueError(
            "gradient, master, both moments and weight must be contiguous and as long as each "
            "other, and master and moments float32, got "
            f"{', '.join(f'{tensor.dtype} {list(tensor.shape)}' for tensor in tensors)}"
        )
    return tuple(None if tensor is None else tensor.dtype for tensor in parameter)


def adamw(
    parameters: Sequence[Tensors], bias_corrections: Tensor, gradient_scale: float = 1.0, *,
    lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
) -> None:  # fmt: skip
    """Makes an update of AdamW in place, by Triton alone, in one launch.

    Args:
        parameters: one, or several small ones whose gradients and whose weights have a dtype each.
        bias_corrections: float32 [2], 1 - beta^steps of the first and of the second moment.
        gradient_scale: factor of the gradients.

    Raises ValueError for tensors that do not fit together: a kernel would write past their ends.
    """
    if len({*map(_dtypes, parameters)}) > 1:
        raise ValueError(
            "the gradients of parameters that are updated together must have one dtype, "
            "and the weights"
        )
    numbers = gradient_scale, lr, lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps
    first = parameters[0]
    if len(parameters) == 1:
        grid = (triton.cdiv(first.master.numel(), BLOCK),)
        gradient, *state, weight = first
        _adamw_kernel[grid](
            weight, *state, gradient, bias_corrections, first.master.numel(), *numbers, BLOCK=BLOCK
        )
        return
    rows = [
        (tensors.master.numel(), *(0 if x is None else x.data_ptr() for x in tensors))
        for tensors in parameters
    ]
    is_on_gpu = first.master.is_cuda
    table = torch.tensor(rows, pin_memory=is_on_gpu).to(first.master.device, non_blocking=True)
    weight_dtype = None if first.weight is None else TRITON_DTYPES[first.weight.dtype]
    _adamw_of_several_kernel[(len(rows), PROGRAMS)](
        table, bias_corrections, *numbers, BLOCK=BLOCK,
        GRADIENT=TRITON_DTYPES[first.gradient.dtype], WEIGHT=weight_dtype,
    )  # fmt: skip
