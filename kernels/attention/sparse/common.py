"""Helpers of this folder's kernels: the rows of a tile, matrix products, a step of a softmax."""

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FLOAT32_ROWS = 32
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def query_rows(token, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns the token of each row of a tile, its query head within the group, and whether that is
    a real head.

    A row is one query head of one token, heads fastest. With GROUP_PAD = 4 rows have the tokens
    token + [0, 0, 0, 0, 1, ...] and the heads [0, 1, 2, 3, 0, ...]; with GROUP = 3 the heads 3 are
    padding.
    """
    rows = tl.arange(0, BLOCK_T * GROUP_PAD)
    return token + rows // GROUP_PAD, rows % GROUP_PAD, rows % GROUP_PAD < GROUP


@triton.jit
def matmul(a, b):
    """Returns a @ b, accumulated in float32. Float32 factors are not rounded to TF32."""
    if INTERPRETED:  # The interpreter would multiply the bits of bfloat16 as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def softmax_step(scores, v, out, maximum, total):
    """Takes one step of an online softmax in base 2: scores [ROWS, BLOCK], v [BLOCK, K], out [ROWS,
    K].

    Returns the new out, which is not divided by the total yet, the rows' maxima and their totals.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    p = tl.exp2(scores - new_maximum[:, None])
    correction = tl.exp2(maximum - new_maximum)
    out = out * correction[:, None] + matmul(p.to(v.dtype), v)
    return out, new_maximum, total * correction + tl.sum(p, 1)


class TileConfig(NamedTuple):
    """Tile sizes of a kernel over queries."""

    rows: int  # rows of a tile: its tokens times the padded query heads of a group
    num_warps: int
    num_stages: int
    tiles: int = 1  # most tiles that a program of a gather kernel goes through


def wide_config(config: TileConfig, device: torch.device) -> TileConfig:
    """Returns tiles of a kernel for heads wider than 128, of which `config` has Hopper's.

    On other GPUs tiles have 16 rows: more would spill thousands of bytes on Ampere, and not fit on
    B200. A program goes through as many rows.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9:
        return config
    return TileConfig(rows=16, num_warps=8, num_stages=2, tiles=config.tiles * config.rows // 16)


def launch_constants(q: Tensor, G: int, block_size: int, config: TileConfig) -> dict[str, Any]:
    """Returns the constants and launch options that all kernels over queries q [tokens, H, K] take.

    float32 needs twice the shared memory of bfloat16, so its tiles are smaller and nothing is
    prefetched.
    """
    _, H, K = q.shape
    group_pad = triton.next_power_of_2(H // G)
    rows, num_stages = (
        (config.rows, config.num_stages) if q.element_size() == 2 else (FLOAT32_ROWS, 1)
    )
    return {
        **{"G": G, "GROUP": H // G, "GROUP_PAD": group_pad, "K": K, "BLOCK": block_size},
        "BLOCK_T": min(block_size, max(1, rows // group_pad)),
        "num_warps": max(config.num_warps, block_size // 16),
        "num_stages": num_stages,
    }
