"""Triton's interpreter as tests speed it up: what an operation remembers is what it computed
first."""

import torch
import triton
import triton.language as tl

NUM_ROWS, BLOCK = 13, 8


@triton.jit
def _operations_kernel(x_ptr, out_ptr, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes a row for each operation on floats, integers, masks and numbers: all programs
    alike."""
    index = tl.arange(0, BLOCK)
    out_ptr += tl.program_id(0) * ROWS * BLOCK + index
    x = tl.load(x_ptr + index, mask=index < count, other=2.5)
    wide = index.to(tl.int64) * 3000000000
    mask = (x > 0) & (index != 3) | (wide >= 6000000000) ^ (x <= -0.5)
    tl.store(out_ptr, x + True)
    tl.store(out_ptr + BLOCK, x - 1)
    tl.store(out_ptr + 2 * BLOCK, 1.0 - x)
    tl.store(out_ptr + 3 * BLOCK, index / 3)
    tl.store(out_ptr + 4 * BLOCK, index % 3 + wide / 7)
    tl.store(out_ptr + 5 * BLOCK, tl.minimum(x, index) + tl.maximum(x, 0.5))
    tl.store(out_ptr + 6 * BLOCK, mask.to(tl.float32) + index)
    tl.store(out_ptr + 7 * BLOCK, (x.to(tl.bfloat16).to(tl.float32) < x) == (x >= 0.25))
    tl.store(out_ptr + 8 * BLOCK, x.to(tl.float16) * x + wide)
    tl.store(out_ptr + 9 * BLOCK, tl.sum(x[:, None] * index[None, :] + index[:, None], 1))
    tl.store(out_ptr + 10 * BLOCK, -x - index)
    tl.store(out_ptr + 11 * BLOCK, count - index)
    tl.store(out_ptr + 12 * BLOCK, index + count)


def test_an_operation_remembers_what_it_computed():
    """The second program computes by what the first has learnt."""
    x = torch.tensor([0.3, -0.7, 1.1, 4.0, 0.2, -3.0, 0.1, 9.0])
    out = torch.empty(2, NUM_ROWS, BLOCK)
    _operations_kernel[(2,)](x, out, 7, NUM_ROWS, BLOCK)
    learnt, remembered = out
    x[7] = 2.5
    index = torch.arange(BLOCK)
    wide = index * 3_000_000_000
    mask = (x > 0) & (index != 3) | (wide >= 6_000_000_000) ^ (x <= -0.5)
    right = [
        x + 1,
        x - 1,
        1 - x,
        index / 3,
        index % 3 + wide.float() / 7,
        torch.minimum(x, index) + x.clamp(min=0.5),
        mask + index.float(),
        ((x.bfloat16().float() < x) == (x >= 0.25)).float(),
        (x.half() * x).float() + wide.float(),
        x * index.sum() + BLOCK * index,
        -x - index,
        7.0 - index,
        7.0 + index,
    ]
    torch.testing.assert_close(remembered, torch.stack(right))
    assert learnt.equal(remembered)
