"""Scores of blocks in native sparse attention, by the compressed branch's windows (arXiv
2502.11089). No gradient.

../README.md has the mathematics: windows 4 j - 1 to 4 j + 3 touch block j. exp's argument is capped
at 80, so that a sum over 16 heads stays finite. ../sparse/selection.py takes the best blocks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sparse.common import LOG2_E, TileConfig, launch_constants, matmul
from ..sparse.layout import Layout
from ..sparse.selection import CHUNK

LARGEST_EXPONENT = 80.0
SCORES_CONFIG = TileConfig(rows=128, num_warps=4, num_stages=3)
BLOCK_J = 64  # blocks of a tile of scores
WINDOW_WEIGHTS = (1, 2, 2, 2, 1)  # _window_scores_kernel has the same


def window_scores_reference(
    q: Tensor, pooled: Tensor, lse: Tensor, left: Tensor, num_blocks: int
) -> Tensor:
    """Returns scores [tokens, G, num_blocks] in one document, -inf where a block is not a
    candidate.

    q is [tokens, H, K]. The compressed branch has mean keys of windows, `pooled` [windows, G, K],
    and lse [tokens, H]. `left` [tokens] is each token's first local block.
    """
    (N, H, K), G = q.shape, pooled.shape[1]
    scores = q.new_full((N, G, num_blocks), float("-inf"))
    queries, lse = q.unflatten(1, (G, H // G)), lse.unflatten(1, (G, H // G))
    shares = torch.einsum("tgrk,wgk->tgrw", queries, pooled) / math.sqrt(K) - lse[..., None].to(
        q.dtype
    )
    shares = shares.clamp(max=LARGEST_EXPONENT).exp().sum(2)  # [tokens, G, windows]
    for j in range(1, int(left.max()) if N else 0):
        windows = shares[:, :, 4 * j - 1 : 4 * j + 4]
        score = (windows * windows.new_tensor(WINDOW_WEIGHTS)).sum(-1)
        scores[:, :, j] = torch.where(j < left[:, None], score, float("-inf"))
    return scores


@triton.jit(do_not_specialize=["first_query_block", "num_windows", "width"])
def _window_scores_kernel(
    q_ptr, pooled_ptr, lse_ptr, first_window_ptr, scores_ptr, maxima_ptr, block_start_ptr,
    block_stop_ptr,
    first_block_ptr, first_query_block, num_windows, width, scale,
    G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Computes what `score_windows` returns.

    Tokens of a tile's rows are fast: a thread sums over heads.
    """
    tiles: tl.constexpr = BLOCK // BLOCK_T
    query_block = first_query_block + tl.program_id(0) // tiles
    head = tl.program_id(1).to(tl.int64)
    left = query_block - tl.load(first_block_ptr + query_block) - WINDOW + 1
    start = tl.load(block_start_ptr + query_block) + (tl.program_id(0) % tiles) * BLOCK_T
    stop = tl.load(block_stop_ptr + query_block)
    if (left <= 1) | (start >= stop):
        return
    row = tl.arange(0, GROUP_PAD * BLOCK_T)
    r, token = row // BLOCK_T, start + row % BLOCK_T  # [ROWS]
    columns = tl.arange(0, K)
    q_rows = (token.to(tl.int64) * G + head) * GROUP + r
    mask = (token < stop) & (r < GROUP)
    # [ROWS, K]
    q = tl.load(q_ptr + q_rows[:, None] * K + columns[None, :], mask=mask[:, None], other=0.0)
    scale *= LOG2_E
    # Heads of padding add 0.
    lse = tl.load(lse_ptr + q_rows, mask=mask, other=float("inf")) * LOG2_E
    # Block j begins with window 4 j - 1.
    first_row = head * num_windows + tl.load(first_window_ptr + query_block) - 1
    q_t = tl.trans(q)  # [K, ROWS]
    score_rows = (
        head * (tl.num_programs(0) * BLOCK_T) + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    )
    best = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
    for i in range(0, tl.cdiv(left, BLOCK_J) * 5):
        part = i % 5
        j = i // 5 * BLOCK_J + tl.arange(0, BLOCK_J)[:, None]
        is_candidate = (j >= 1) & (j < left)
        address = pooled_ptr + (first_row + part + j * 4) * K + columns[None, :]
        logits = matmul(tl.load(address, mask=is_candidate, other=0.0), q_t) * scale - lse[None, :]
        shares = tl.exp2(tl.minimum(logits, LARGEST_EXPONENT * LOG2_E))
        score = tl.sum(tl.reshape(shares, [BLOCK_J, GROUP_PAD, BLOCK_T]), 1)
        best = tl.where(part == 0, score, best + tl.where(part == 4, 1.0, 2.0) * score)
        if part == 4:
            tl.store(scores_ptr + score_rows[None, :] * width + j, best, mask=is_candidate)
            chunk_scores = tl.where(is_candidate, best, float("-inf"))
            chunk_scores = tl.reshape(chunk_scores, [BLOCK_J // CHUNK, CHUNK, BLOCK_T])
            chunk = i // 5 * (BLOCK_J // CHUNK) + tl.arange(0, BLOCK_J // CHUNK)[:, None]
            maxima = maxima_ptr + score_rows[None, :] * (width // CHUNK) + chunk
            tl.store(maxima, tl.max(chunk_scores, 1), mask=chunk * CHUNK < left)


def score_windows(
    q: Tensor,
    pooled: Tensor,
    lse: Tensor,
    first_window: Tensor,
    layout: Layout,
    query_blocks: range,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Returns scores of query blocks as `choose_blocks` takes them; q [tokens, H, K], pooled [G,
    windows, K]."""
    G = len(pooled)
    tile = launch_constants(q, G, layout.block_size, SCORES_CONFIG)
    rows = G, len(query_blocks) * layout.block_size
    scores, maxima = (
        torch.empty(*rows, n, dtype=torch.float32, device=q.device) for n in (width, width // CHUNK)
    )
    _window_scores_kernel[(rows[1] // tile["BLOCK_T"], G)](
        q, pooled, lse, first_window, scores, maxima, layout.block_start, layout.block_stop,
        layout.first_block,
        query_blocks.start, pooled.shape[1], width, 1 / math.sqrt(q.shape[-1]),
        **tile, BLOCK_J=BLOCK_J, WINDOW=layout.window_blocks, CHUNK=CHUNK,
        LARGEST_EXPONENT=LARGEST_EXPONENT,
    )  # fmt: skip
    return scores, maxima
