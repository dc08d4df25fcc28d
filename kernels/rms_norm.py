"""Root-mean-square normalisation in one launch, of the input or of input + residual; with a gate.

    total = input + residual                          rounded to the input's dtype, as by PyTorch
    normed = total * rstd * (weight + weight_offset)  with rstd = 1 / sqrt(mean(total^2) + eps)
    output = normed * silu(gate)                      normed itself without a gate

Backward, with x_hat = total * rstd, d_normed = d_output * silu(gate) and g = d_normed * (weight +
weight_offset):

    d_input = d_residual = rstd * (g - x_hat * mean(g * x_hat)) + d_total
    d_weight = sum over rows of d_normed * x_hat
    d_gate = d_output * normed * silu'(gate)

Kept for backward: the input, or the total, an output anyway; the gate; and one float32 rstd per
row.

d_weight is summed in float32 in two stages: a fixed number of partial sums, then their sum. Without
atomics, every run gives the same bits.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .common import operation, shown, sum_dtype, use_triton
from .gated_activation import activate

LARGEST_ROW = 8192  # elements; a row lives in one program's registers
# elements that a program works on at once: many short rows, or one
FORWARD_BLOCK = 2048
BACKWARD_BLOCK = 4096
# In backward; each loops over rows and leaves one partial sum of d_weight; more do not fit.
PROGRAMS_PER_SM = 2


def rms_norm_reference(
    input: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None,
    gate: Tensor | None = None, weight_offset: float = 0.0, cast_before_weight: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Plain PyTorch with the contract of `rms_norm`; float64 stays float64."""
    total = input if residual is None else input + residual
    x = total.to(sum_dtype(total))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        normed = normed.to(total.dtype)
    normed = normed * (weight.to(x.dtype) + weight_offset)
    if gate is not None:
        normed = normed * F.silu(gate.to(x.dtype))
    normed = normed.to(total.dtype)
    return normed if residual is None else (normed, total)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_forward_kernel(
    input_ptr, residual_ptr, gate_ptr, weight_ptr, normed_ptr, total_ptr, rstd_ptr, num_rows,
    outer_stride, inner_stride, eps, weight_offset, INNER: tl.constexpr, D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CAST_BEFORE_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Normalises BLOCK_ROWS rows.

    All tensors but the input are contiguous; INNER rows of it are evenly spaced.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = (rows < num_rows)[:, None] & (columns < D)[None, :]  # [BLOCK_ROWS, BLOCK_D]
    input_rows = (rows // INNER) * outer_stride + (rows % INNER) * inner_stride
    offsets = rows[:, None] * D + columns[None, :]

    x = tl.load(input_ptr + input_rows[:, None] + columns[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    scale = (
        tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + weight_offset
    )

    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)  # [BLOCK_ROWS]
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    normed = x * rstd[:, None]
    if CAST_BEFORE_WEIGHT:
        normed = normed.to(dtype).to(tl.float32)
    normed *= scale[None, :]
    if gate_ptr is not None:
        value, _ = activate(
            tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32), "silu"
        )
        normed *= value
    tl.store(normed_ptr + offsets, normed.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    d_normed_ptr, d_total_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, dx_ptr, d_gate_ptr,
    partial_ptr, num_rows, outer_stride, inner_stride, weight_offset, INNER: tl.constexpr,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    scale = (
        tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + weight_offset
    )
    d_weight = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)

    # num_stages lets the next rows load while the program works on these.
    first = tl.program_id(0) * BLOCK_ROWS
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(first, num_rows, step, num_stages=NUM_STAGES):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)  # [BLOCK_ROWS]
        mask = (rows < num_rows)[:, None] & (columns < D)[None, :]  # [BLOCK_ROWS, BLOCK_D]
        x_rows = (rows // INNER) * outer_stride + (rows % INNER) * inner_stride
        offsets = rows[:, None] * D + columns[None, :]

        x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=mask, other=0.0)
        d_normed = tl.load(d_normed_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)  # [BLOCK_ROWS]

        x_hat = x.to(tl.float32) * rstd[:, None]
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0)
            value, slope = activate(gate.to(tl.float32), "silu")
            d_gate = d_normed * x_hat * scale[None, :] * slope
            tl.store(d_gate_ptr + offsets, d_gate.to(gate.dtype), mask=mask)
            d_normed *= value
        g = d_normed * scale[None, :]
        dx = rstd[:, None] * g - x_hat * (rstd * tl.sum(g * x_hat, axis=1) / D)[:, None]
        if d_total_ptr is not None:
            dx += tl.load(d_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(x.dtype), mask=mask)
        d_weight += d_normed * x_hat

    partial = partial_ptr + tl.program_id(0) * D + columns
    tl.store(partial, tl.sum(d_weight, axis=0), mask=columns < D)


def _evenly_spaced_rows(x: Tensor) -> Tensor:
    """Views `x` as [outer, inner, D], or copies it where two strides cannot say where its rows
    start.

    inner is 1 for evenly spaced rows. It is the number of heads for heads sliced out of a fused
    projection.
    """
    for inner in (1, x.shape[-2] if x.dim() > 2 else 1):
        try:
            rows = x.view(-1, inner, x.shape[-1])
        except RuntimeError:
            continue
        if rows.stride(-1) == 1:
            return rows
    return x.contiguous().view(-1, 1, x.shape[-1])


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _blocks(d: int, elements: int) -> dict[str, int]:
    block_d = triton.next_power_of_2(d)
    return {"D": d, "BLOCK_D": block_d, "BLOCK_ROWS": max(1, elements // block_d)}


def _empty_outputs(input, residual, *_):
    total = input.new_empty(0 if residual is None else input.shape)
    return (
        input.new_empty(input.shape),
        total,
        input.new_empty(input.shape[:-1], dtype=torch.float32),
    )


@operation("fathom::rms_norm_forward", _empty_outputs)
def _forward(
    input: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor, eps: float,
    weight_offset: float, cast_before_weight: bool, read_once: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns normed, total (empty without a residual) and rstd.

    Only backward reads `read_once`.
    """
    if residual is None:
        x = _evenly_spaced_rows(input)
    else:
        x = input.reshape(-1, 1, input.shape[-1]).contiguous()
    normed, total, rstd = _empty_outputs(input, residual)
    blocks = _blocks(input.shape[-1], FORWARD_BLOCK)
    _rms_norm_forward_kernel[(triton.cdiv(rstd.numel(), blocks["BLOCK_ROWS"]),)](
        x, _contiguous(residual), _contiguous(gate), weight.contiguous(), normed, total, rstd,
        rstd.numel(), x.stride(0), x.stride(1), eps, weight_offset, INNER=x.shape[1], **blocks,
        CAST_BEFORE_WEIGHT=cast_before_weight, num_warps=max(4, blocks["BLOCK_D"] // 1024),
    )  # fmt: skip
    return normed, total, rstd


def _empty_gradients(weight, gate):
    return torch.empty_like(weight), weight.new_empty(0) if gate is None else gate.new_empty(
        gate.shape
    )


@operation(
    "fathom::rms_norm_backward",
    lambda dx, d_normed, d_total, x, weight, gate, *options: _empty_gradients(weight, gate),
    mutates=["dx"],
)
def _backward(
    dx: Tensor, d_normed: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor,
    gate: Tensor | None, rstd: Tensor, weight_offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes the gradient of x (the input, or the total) into `dx`, which may be `d_normed`.

    Returns the gradients of the weight and of the gate (empty without it).
    """
    rows = _evenly_spaced_rows(x)
    blocks = _blocks(x.shape[-1], BACKWARD_BLOCK)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    num_programs = min(PROGRAMS_PER_SM * num_sms, triton.cdiv(rstd.numel(), blocks["BLOCK_ROWS"]))
    d_weight, d_gate = _empty_gradients(weight, gate)
    partial = x.new_empty(num_programs, x.shape[-1], dtype=torch.float32)
    stages = 4 if gate is None else 3
    if blocks["BLOCK_D"] > BACKWARD_BLOCK:
        stages = 1
    _rms_norm_backward_kernel[(num_programs,)](
        d_normed.contiguous(), _contiguous(d_total), rows, _contiguous(gate), weight.contiguous(),
        rstd, dx, None if gate is None else d_gate, partial, rstd.numel(), rows.stride(0),
        rows.stride(1), weight_offset, INNER=rows.shape[1], **blocks, NUM_STAGES=stages,
        num_warps=max(8, blocks["BLOCK_D"] // 512),
    )  # fmt: skip
    return d_weight.copy_(partial.sum(0)), d_gate


def _setup_context(ctx, inputs, output):
    input, residual, gate, weight, _, ctx.weight_offset, _, ctx.read_once = inputs
    _, total, rstd = output
    ctx.set_materialize_grads(False)  # saves the zeros that autograd would make for an unused total
    ctx.save_for_backward(input if residual is None else total, weight, gate, rstd)
    ctx.has_residual = residual is not None


def _gradients(ctx, d_normed, d_total, d_rstd):
    if torch.is_grad_enabled():  # autograd would take what is written over for what it was before
        raise RuntimeError(
            "rms_norm has no second derivative (create_graph=True); its reference has"
        )
    d_total = d_total if ctx.has_residual else None
    if d_normed is None:
        return d_total, d_total, *[None] * 6
    x, weight, gate, rstd = ctx.saved_tensors
    dx = d_normed if ctx.read_once and d_normed.is_contiguous() else x.new_empty(x.shape)
    d_weight, d_gate = _backward(dx, d_normed, d_total, x, weight, gate, rstd, ctx.weight_offset)
    d_residual = dx if ctx.has_residual else None
    return dx, d_residual, None if gate is None else d_gate, d_weight, *[None] * 4


_forward.register_autograd(_gradients, setup_context=_setup_context)


def rms_norm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None,
    gate: Tensor | None = None, weight_offset: float = 0.0, cast_before_weight: bool = True,
    read_once: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        input: [..., D], float32, bfloat16 or float16. Rows may be strided, like heads sliced out of
            a fused projection. [B, T, H, K] is normalised per head.
        weight: [D], any floating dtype.
        eps: added to the mean of squares.
        residual: of the input's shape and dtype; added to the input before the norm.
        gate: of the input's shape and dtype; silu of it multiplies the normalised input.
        weight_offset: added to the weight in float32; 1.0 is Gemma's convention.
        cast_before_weight: rounds to the input's dtype before the product with the weight, as Llama
            and Qwen3 do in transformers. False keeps float32 until the end, as Gemma does.
        read_once: whether the result is read by functions alone that make its gradient anew, such
            as matrix products: backward then writes the input's gradient over it. A sum passes its
            own gradient on, which others read. Hooks must copy what they keep of it.

    Returns the normalised input, in the input's dtype; with `residual`, a pair of it and input +
    residual.

    Raises ValueError for shapes or dtypes that do not fit together; with Triton, another dtype, or
    D above 8,192, and in backward RuntimeError for create_graph=True.
    """
    if weight.shape != input.shape[-1:]:
        raise ValueError(
            f"weight must be [{input.shape[-1]}], the input's last dimension, "
            f"got {list(weight.shape)}"
        )
    for name, tensor in (("residual", residual), ("gate", gate)):
        if tensor is not None and (tensor.shape, tensor.dtype) != (input.shape, input.dtype):
            raise ValueError(f"{name} must be {shown(input)} as the input is, got {shown(tensor)}")
    if not use_triton(impl, input):
        return rms_norm_reference(
            input, weight, eps, residual=residual, gate=gate, weight_offset=weight_offset,
            cast_before_weight=cast_before_weight,
        )  # fmt: skip
    if input.shape[-1] > LARGEST_ROW and not input.is_meta:
        raise ValueError(
            f"rms_norm's kernel takes rows of up to {LARGEST_ROW} elements, got {input.shape[-1]}"
        )
    normed, total, _ = _forward(
        input, residual, gate, weight, eps, weight_offset, cast_before_weight, read_once
    )
    return normed if residual is None else (normed, total)
