"""AdamW on float32 state, in one pass over a parameter.

PyTorch's fused kernel takes tensors of one dtype: a bf16 weight and its gradient, which is to be scaled, need three
passes more, and 48 bytes per parameter are read and written in place of 28. compact_adamw.py has the mathematics.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a program: each thread has 8


@triton.jit
def _adamw_kernel(
    weight_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, bias_corrections_ptr,
    numel, gradient_scale, lr, decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    master = tl.load(master_ptr + offsets, mask=mask, other=0.0)
    m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * gradient_scale
    step_size = lr / tl.load(bias_corrections_ptr)
    inverse_root = 1 / tl.sqrt_rn(tl.load(bias_corrections_ptr + 1))
    m += (gradient - m) * one_minus_beta1
    v = v * beta2 + gradient * gradient * one_minus_beta2
    master = master * decay - step_size * m / (tl.sqrt_rn(v) * inverse_root + eps)
    tl.store(master_ptr + offsets, master, mask=mask)
    tl.store(exp_avg_ptr + offsets, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)
    if weight_ptr is not None:
        tl.store(weight_ptr + offsets, master.to(weight_ptr.dtype.element_ty), mask=mask)


def adamw(
    weight: Tensor | None, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor,
    bias_corrections: Tensor, gradient_scale: float = 1.0, *,
    lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
) -> None:  # fmt: skip
    """Makes an update of AdamW in place, by Triton alone. All tensors are flat, contiguous, and on one device.

    Args:
        weight: [n] that the new master is rounded into; None: the master is the weight.
        master, exp_avg, exp_avg_sq: float32 [n].
        gradient: [n], of a floating-point dtype, to be multiplied by `gradient_scale`.
        bias_corrections: float32 [2], 1 - beta^steps of the first and of the second moment.
    """
    _adamw_kernel[(triton.cdiv(master.numel(), BLOCK),)](
        weight, master, exp_avg, exp_avg_sq, gradient, bias_corrections,
        master.numel(), gradient_scale, lr, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps, BLOCK=BLOCK,
    )  # fmt: skip
