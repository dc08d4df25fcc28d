"""AdamW on optimizer state of 4.1 bytes per parameter beside a bf16 weight.

    master      a bf16 weight and an int16 correction: the master's bits M are
                (weight << 16) + correction; weight = (M + 0x8000) >> 16 is the master rounded to
                nearest, ties away from zero
    exp_avg     int8 codes of x = m / s by softsign: code = round(127 y), y = 2x / (1 + |x|);
                m = s y / (2 - |y|) with y = code / 127
    exp_avg_sq  uint8 codes of u = sqrt(v): code = round(255 u / t); v = (t code / 255)^2

s and t are bfloat16, the largest |m| and the largest u of GROUP neighbouring elements, rounded as a
weight is. A group of zeros has the scale 0. A group of moments below 2^-126 becomes 0. Ties to even
would not do for the weight: the masters 0x00008000 and 0x00018000 would have the corrections 0x8000
and -0x8000, and int16 has only the second.

Softsign gives small moments more codes than large ones: the code of x = 1/64 is 4, and a linear
code would be 2. The code of a second moment above 0 is at least 1: the update by a moment that
became 0 would be m / eps.

The update is torch.optim.AdamW's, by the new moments before they are rounded to codes:

    weight -= lr weight_decay weight
    m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
    weight -= lr m / c1 / (sqrt(v) / sqrt(c2) + eps)    with the bias corrections c = 1 - beta^steps

Method: FlashOptim, arXiv 2602.23349.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import use_triton

GROUP = 32  # neighbouring elements with one scale
PROGRAM_GROUPS = 32  # groups of one program: each thread has 8 elements, 16 bytes of bf16


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 masters into bf16 weights and int16 corrections.

    0x3F818000 becomes 0x3F82 and -0x8000.
    """
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_master(weight: Tensor, correction: Tensor) -> Tensor:
    """Returns the float32 masters that `split_master` split, bit for bit."""
    return ((weight.view(torch.int16).int() << 16) + correction.int()).view(torch.float32)


def encode_exp_avg(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 codes [n] and bf16 scales [n / GROUP] of first moments, float32 [n]."""
    x, scale = _scaled(moment)
    y = 2 * x / (1 + x.abs())
    return (127 * y + 0.5).floor().clamp(-127, 127).to(torch.int8).view(-1), scale


def decode_exp_avg(codes: Tensor, scale: Tensor) -> Tensor:
    y = codes.view(-1, GROUP) / 127
    return (scale.float()[:, None] * (y / (2 - y.abs()))).view(-1)


def encode_exp_avg_sq(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Returns uint8 codes [n] and bf16 scales [n / GROUP] of second moments, float32 [n]."""
    x, scale = _scaled(moment.sqrt())
    return (255 * x + 0.5).floor().clamp(max=255).maximum((x > 0).float()).to(torch.uint8).view(
        -1
    ), scale


def decode_exp_avg_sq(codes: Tensor, scale: Tensor) -> Tensor:
    return (scale.float()[:, None] * (codes.view(-1, GROUP) / 255)).square().view(-1)


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values [n] over their group's largest, and the scales [n / GROUP] in bf16."""
    groups = values.view(-1, GROUP)
    scale, _ = split_master(groups.abs().amax(1))
    is_normal = scale >= torch.finfo(torch.bfloat16).tiny
    return groups / torch.where(is_normal, scale.float(), 1)[:, None], scale


def adamw_reference(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, bias_corrections: Tensor,
    *, lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the new weight and moments of an update of float32 tensors [n]."""
    exp_avg = exp_avg + (gradient - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)
    step_size = lr / bias_corrections[0]
    root = bias_corrections[1].sqrt()
    weight = weight - (
        lr * weight_decay * weight + step_size * exp_avg / (exp_avg_sq.sqrt() / root + eps)
    )
    return weight, exp_avg, exp_avg_sq


def compact_adamw_reference(
    weight: Tensor, correction: Tensor | None, codes: Tensor, scale: Tensor, codes_sq: Tensor,
    scale_sq: Tensor, gradient: Tensor, bias_corrections: Tensor, gradient_scale: float = 1.0,
    **options: float,
) -> None:  # fmt: skip
    """Plain PyTorch with the contract of `compact_adamw`."""
    master = weight if correction is None else join_master(weight, correction)
    master, m, v = adamw_reference(
        master, gradient.float() * gradient_scale, decode_exp_avg(codes, scale),
        decode_exp_avg_sq(codes_sq, scale_sq), bias_corrections, **options,
    )  # fmt: skip
    olds = [
        old for old in (weight, correction, codes, scale, codes_sq, scale_sq) if old is not None
    ]
    new_weight = (master,) if correction is None else split_master(master)
    for old, new in zip(olds, (*new_weight, *encode_exp_avg(m), *encode_exp_avg_sq(v))):
        old.copy_(new)


@triton.jit
def _widened(high):
    """Returns float32 numbers whose upper halves are the bits `high`, int16, of bf16 numbers."""
    return (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_bits(x):
    """Returns the bits of float32 numbers rounded to bf16, ties away from zero, as int32."""
    return (x.to(tl.int32, bitcast=True) + 0x8000) >> 16


@triton.jit
def _inverse(high):
    """Returns the inverses of the scales with the bits `high`.

    It is 1 for 0 and denormal numbers, whose inverse may be infinite.
    """
    return 1 / tl.where(high >= 0x0080, _widened(high), 1.0)


@triton.jit
def _compact_adamw_kernel(
    weight_ptr, correction_ptr, codes_ptr, scale_ptr, codes_sq_ptr, scale_sq_ptr, gradient_ptr,
    bias_corrections_ptr, num_groups, gradient_scale, lr, lr_decay, one_minus_beta1, beta2,
    one_minus_beta2, eps, GROUP: tl.constexpr, PROGRAM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Updates PROGRAM_GROUPS groups. bf16 weights and scales come as int16."""
    # [PROGRAM_GROUPS]
    groups = tl.program_id(0).to(tl.int64) * PROGRAM_GROUPS + tl.arange(0, PROGRAM_GROUPS)
    is_group = groups < num_groups
    offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [PROGRAM_GROUPS, GROUP]
    mask = is_group[:, None]

    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    if correction_ptr is not None:
        correction = tl.load(correction_ptr + offsets, mask=mask, other=0)
        bits = (weight.to(tl.int32) << 16) + correction.to(tl.int32)
        weight = bits.to(tl.float32, bitcast=True)
    y = tl.load(codes_ptr + offsets, mask=mask, other=0).to(tl.float32) * (1 / 127)
    s = _widened(tl.load(scale_ptr + groups, mask=is_group, other=0))
    u = tl.load(codes_sq_ptr + offsets, mask=mask, other=0).to(tl.float32) * (1 / 255)
    t = _widened(tl.load(scale_sq_ptr + groups, mask=is_group, other=0))
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0).to(tl.float32) * gradient_scale
    step_size = lr / tl.load(bias_corrections_ptr)
    inverse_root = 1 / tl.sqrt_rn(tl.load(bias_corrections_ptr + 1))

    m = s[:, None] * (y / (2 - tl.abs(y)))
    u = t[:, None] * u
    m = m + (gradient - m) * one_minus_beta1
    u = tl.sqrt(u * u * beta2 + gradient * gradient * one_minus_beta2)
    # One small number is taken off: 1 - lr weight_decay would round decay to 6e-8 of a weight,
    # alike for each of them.
    weight -= lr_decay * weight + step_size * m / (u * inverse_root + eps)

    if correction_ptr is not None:
        high = _rounded_bits(weight)
        tl.store(weight_ptr + offsets, high.to(tl.int16), mask=mask)
        tl.store(
            correction_ptr + offsets,
            (weight.to(tl.int32, bitcast=True) - (high << 16)).to(tl.int16),
            mask=mask,
        )
    else:
        tl.store(weight_ptr + offsets, weight, mask=mask)

    high = _rounded_bits(tl.max(tl.abs(m), axis=1))  # [PROGRAM_GROUPS]
    tl.store(scale_ptr + groups, high.to(tl.int16), mask=is_group)
    x = m * _inverse(high)[:, None]
    codes = tl.floor(127 * (2 * x / (1 + tl.abs(x))) + 0.5)
    tl.store(codes_ptr + offsets, tl.minimum(tl.maximum(codes, -127), 127).to(tl.int8), mask=mask)

    high = _rounded_bits(tl.max(u, axis=1))
    tl.store(scale_sq_ptr + groups, high.to(tl.int16), mask=is_group)
    x = u * _inverse(high)[:, None]
    # Cut to integers below.
    codes = tl.maximum(tl.minimum(255 * x + 0.5, 255), tl.where(u > 0, 1.0, 0.0))
    tl.store(codes_sq_ptr + offsets, codes.to(tl.int32).to(tl.uint8), mask=mask)


def compact_adamw(
    weight: Tensor, correction: Tensor | None, codes: Tensor, scale: Tensor, codes_sq: Tensor,
    scale_sq: Tensor, gradient: Tensor, bias_corrections: Tensor, gradient_scale: float = 1.0, *,
    lr: float, beta1: float, beta2: float, weight_decay: float, eps: float, impl: str = "auto",
) -> None:  # fmt: skip
    """Makes an update of AdamW in place. All tensors are flat, contiguous, and on one device; n is
    a multiple of GROUP.

    Args:
        weight: bf16 [n] with a correction, else float32 [n], its own master.
        correction: int16 [n] that makes the weight a float32 master, see `split_master`.
        codes, scale: first moments, int8 [n] and bfloat16 [n / GROUP].
        codes_sq, scale_sq: second moments, uint8 [n] and bfloat16 [n / GROUP].
        gradient: [n], of a floating-point dtype, to be multiplied by `gradient_scale`.
        bias_corrections: float32 [2], 1 - beta^steps of the first and of the second moment.

    Raises ValueError for tensors that do not fit together.
    """
    expected = torch.float32 if correction is None else torch.bfloat16
    if weight.dtype != expected or weight.numel() != scale.numel() * GROUP:
        raise ValueError(
            f"weight must be {expected} of {scale.numel()} x {GROUP} elements, got {weight.dtype} "
            f"of {weight.numel()}"
        )
    if not use_triton(impl, gradient):
        compact_adamw_reference(
            weight, correction, codes, scale, codes_sq, scale_sq, gradient, bias_corrections,
            gradient_scale, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
        )  # fmt: skip
        return
    # A custom op that writes six tensors would take the host longer than the GPU takes for a piece,
    # and nothing differentiates or compiles an update.
    _compact_adamw_kernel[(triton.cdiv(scale.numel(), PROGRAM_GROUPS),)](
        weight if correction is None else weight.view(torch.int16), correction, codes,
        scale.view(torch.int16), codes_sq, scale_sq.view(torch.int16), gradient, bias_corrections,
        scale.numel(), gradient_scale, lr, lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps,
        GROUP=GROUP, PROGRAM_GROUPS=PROGRAM_GROUPS,
    )  # fmt: skip
