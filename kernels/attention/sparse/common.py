"""What the kernels of this folder share: how queries are laid out in tiles, and the arithmetic of a softmax's parts."""

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FLOAT32_ROWS = 32
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def query_rows(token, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_T: tl.constexpr):
    """A tile's rows are query heads of one key/value head, head fastest: tokens first + [0, 0, 0, 0, 1, ...] of 4.

    Returns the rows' tokens, their heads within the group, and which of them stand for a head.
    """
    rows = tl.arange(0, BLOCK_T * GROUP_PAD)
    return token + rows // GROUP_PAD, rows % GROUP_PAD, rows % GROUP_PAD < GROUP


@triton.jit
def matmul(a, b):
    """a @ b, accumulated in float32; float32 factors are not rounded to TF32."""
    if INTERPRETED:  # The interpreter would multiply the bits of bfloat16 as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def softmax_step(scores, v, out, maximum, total):
    """One step of an online softmax in base 2: scores [ROWS, BLOCK], v [BLOCK, K], out [ROWS, K]."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    p = tl.exp2(scores - new_maximum[:, None])
    correction = tl.exp2(maximum - new_maximum)
    out = out * correction[:, None] + matmul(p.to(v.dtype), v)
    return out, new_maximum, total * correction + tl.sum(p, 1)


def group_constants(q: Tensor, G: int) -> dict[str, Any]:
    """Heads and head dimension as every kernel takes them; q [tokens, H, K]."""
    _, H, K = q.shape
    return {"G": G, "GROUP": H // G, "GROUP_PAD": triton.next_power_of_2(H // G), "K": K}


class TileConfig(NamedTuple):
    """How a kernel over queries is cut: a tile's rows are tokens times the (padded) query heads of a group."""

    rows: int
    num_warps: int
    num_stages: int
    tiles: int = 1  # that a program of a gather kernel goes through at most


def tile_options(config: TileConfig, q: Tensor, group_pad: int, block_size: int) -> dict[str, int]:
    """Launch options of `config`; float32, of twice the shared memory, takes smaller tiles and no prefetch."""
    rows, num_stages = (config.rows, config.num_stages) if q.element_size() == 2 else (FLOAT32_ROWS, 1)
    return {
        "BLOCK_T": min(block_size, max(1, rows // group_pad)),
        "num_warps": max(config.num_warps, block_size // 16),
        "num_stages": num_stages,
    }
