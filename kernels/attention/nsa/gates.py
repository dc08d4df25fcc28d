"""The gated sum of NSA's branches: every token and query head has a gate for each branch b, the
sigmoid of a logit.

    out = sum_b g[b] out[b],  g = sigmoid(logits)
    d_out[b] = g[b] dout,  d_logits[b] = g[b] (1 - g[b]) (dout . out[b])

Backward takes one branch at a time, so that only one d_out exists. Kept for backward: the branches'
outputs, and 3 logits per token and query head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common import sum_dtype

BRANCHES = 3  # compressed, selected, window: the order of a head's logits
ELEMENTS = 4096  # elements of a program's tile


def gated_sum_reference(outs: list[Tensor], logits: Tensor) -> Tensor:
    """Returns the gated sum [..., H, K] of three outs [..., H, K] by logits [..., H, 3], in the
    dtype of outs."""
    gates = logits.to(sum_dtype(logits)).sigmoid()
    return sum(out * gates[..., b, None] for b, out in enumerate(outs)).to(outs[0].dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_sum_kernel(
    compressed_ptr,
    selected_ptr,
    window_ptr,
    logits_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    mask = row < num_rows
    offsets = row * K + tl.arange(0, K)[None, :]  # [BLOCK, K]
    out = tl.zeros([BLOCK, K], tl.float32)
    for b in tl.static_range(3):
        out_b_ptr = compressed_ptr if b == 0 else (selected_ptr if b == 1 else window_ptr)
        gate = tl.sigmoid(tl.load(logits_ptr + row * 3 + b, mask=mask, other=0.0).to(tl.float32))
        out += gate * tl.load(out_b_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_backward_kernel(
    dout_ptr, out_ptr, logits_ptr, d_out_ptr, d_logits_ptr, num_rows,
    BRANCH: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    mask = row < num_rows
    offsets = row * K + tl.arange(0, K)[None, :]  # [BLOCK, K]
    dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(tl.load(logits_ptr + row * 3 + BRANCH, mask=mask, other=0.0).to(tl.float32))
    tl.store(d_out_ptr + offsets, (gate * dout).to(d_out_ptr.dtype.element_ty), mask=mask)
    d_logits = gate * (1 - gate) * tl.sum(dout * out, 1)[:, None]
    tl.store(d_logits_ptr + row * 3 + BRANCH, d_logits.to(d_logits_ptr.dtype.element_ty), mask=mask)


def gated_sum(outs: list[Tensor], logits: Tensor) -> Tensor:
    """Returns the gated sum [tokens, H, K] of three outs [tokens, H, K] by logits [tokens, H, 3],
    in outs' dtype."""
    out = torch.empty_like(outs[0])
    (N, H, K), block = out.shape, max(1, ELEMENTS // out.shape[-1])
    _gated_sum_kernel[(triton.cdiv(N * H, block),)](*outs, logits, out, N * H, K=K, BLOCK=block)
    return out


def gate_backward(
    dout: Tensor, out: Tensor, logits: Tensor, branch: int, d_logits: Tensor
) -> Tensor:
    """Returns the gradient of one branch's output [tokens, H, K]; fills its part of d_logits
    [tokens, H, 3]."""
    d_out = torch.empty_like(out)
    (N, H, K), block = out.shape, max(1, ELEMENTS // out.shape[-1])
    _gate_backward_kernel[(triton.cdiv(N * H, block),)](
        dout, out, logits, d_out, d_logits, N * H, BRANCH=branch, K=K, BLOCK=block
    )
    return d_out
