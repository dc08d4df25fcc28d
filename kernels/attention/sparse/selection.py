"""The choice of blocks: scores from mean keys, then the `selected` best blocks of each list. It carries no gradient.

k[j, w] is the mean key of part w of block j, 32 keys, and k[j] the mean key of the whole block. Let token t be in block
b, and let its window begin at block `left`. Its candidates are the blocks 1 <= j < left. For the query heads h of a
key/value head,

    lse[h] = log sum_{j < b} exp(scale q[h] . k[j])
    score[j] = max_w sum_h exp(scale q[h] . k[j, w] - lse[h])

exp's argument is capped at 80, so that a sum over 16 heads stays finite. The highest scores are chosen, and among equal
scores the lowest index: every run makes the same list. Score and sum follow InfLLM-V2 (arXiv 2509.24663), but its parts
overlap.

Scores by windows follow native sparse attention (arXiv 2502.11089): blocks of 64, and windows of 32 keys, one every 16,
to which each token has attended before. Windows 4 j - 1 to 4 j + 3 touch block j, and the outer two reach into its
neighbours. With the lse of the attention to windows,

    score[j] = sum_w weight[w] sum_h exp(scale q[h] . k[4 j - 1 + w] - lse[h]),  weight = 1, 2, 2, 2, 1

A candidate ends at least 64 tokens before t, so t sees all of these windows.

The best blocks are found in two rounds, see `top_blocks`. At 131,072 tokens, 32 blocks are searched among 128 chunks
of 16, then among the 512 blocks of the best chunks, not among all 2,048.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import LOG2_E, TileConfig, launch_constants, matmul
from .layout import EMPTY, Layout

PART_KEYS = 32
LARGEST_EXPONENT = 80.0
SCORES_CONFIG, WINDOW_SCORES_CONFIG = (TileConfig(rows=128, num_warps=4, num_stages=stages) for stages in (2, 3))
BLOCK_J = 64  # blocks of a tile of scores
CHUNK = 16  # neighbouring blocks: the rows of a product that one warp holds, so their largest score costs least
TOPK_ELEMENTS, WARP_ELEMENTS = 256, 1024  # scores per program that chooses (or one row, if longer); most per warp
WINDOW_WEIGHTS = (1, 2, 2, 2, 1)  # weights of the windows that touch a block; _scores_kernel has the same


def pool_reference(k: Tensor, layout: Layout) -> Tensor:
    """Returns mean keys [G, parts + 1, blocks, K] in k's dtype.

    The last of parts + 1 is the mean of the whole block. Short blocks have 0: nobody can choose them.
    """
    block_size, parts = layout.block_size, layout.block_size // PART_KEYS
    pooled = k.new_zeros(k.shape[1], parts + 1, layout.num_blocks, k.shape[2])
    for block, (start, stop) in enumerate(zip(layout.block_start.tolist(), layout.block_stop.tolist())):
        if stop - start == block_size:
            pooled[:, :-1, block] = k[start:stop].unflatten(0, (parts, PART_KEYS)).mean(1).transpose(0, 1)
            pooled[:, -1, block] = k[start:stop].mean(0)
    return pooled


def scores_reference(q: Tensor, pooled: Tensor, layout: Layout) -> Tensor:
    """Returns scores [tokens, G, blocks of the longest document], -1 where a block is not a candidate."""
    (N, H, _), G = q.shape, pooled.shape[0]
    scores = q.new_full((N, G, int(layout.index_of_block.max()) + 1), -1.0)
    for block, (start, stop) in enumerate(zip(layout.block_start.tolist(), layout.block_stop.tolist())):
        own = int(layout.index_of_block[block])
        first, left = block - own, own - layout.window_blocks + 1
        if left > 1:
            queries = q[start:stop].unflatten(1, (G, H // G))
            of_blocks = candidate_scores(queries, pooled[:, :, first:block].to(q.dtype))
            scores[start:stop, :, 1:left] = of_blocks[..., 1:left]
    return scores


def candidate_scores(q_TGRK: Tensor, pooled_GWJK: Tensor) -> Tensor:
    """Returns scores [T, G, J] of J blocks, for queries that see all of them; W as in `pool_reference`."""
    logits = torch.einsum("tgrk,gwjk->tgrwj", q_TGRK, pooled_GWJK) / math.sqrt(q_TGRK.shape[-1])
    lse = logits[:, :, :, -1].logsumexp(-1)[..., None, None]
    return (logits[:, :, :, :-1] - lse).clamp(max=LARGEST_EXPONENT).exp().sum(2).amax(2)


def window_scores_reference(q: Tensor, pooled: Tensor, lse: Tensor, left: Tensor, num_blocks: int) -> Tensor:
    """Returns scores by windows, [tokens, G, num_blocks] in one document, -1 where a block is not a candidate.

    q is [tokens, H, K]. The compressed branch has mean keys of windows, `pooled` [windows, G, K], and lse [tokens, H].
    `left` [tokens] is each token's first local block.
    """
    (N, H, K), G = q.shape, pooled.shape[1]
    scores = q.new_full((N, G, num_blocks), -1.0)
    queries, lse = q.unflatten(1, (G, H // G)), lse.unflatten(1, (G, H // G))
    shares = torch.einsum("tgrk,wgk->tgrw", queries, pooled) / math.sqrt(K) - lse[..., None].to(q.dtype)
    shares = shares.clamp(max=LARGEST_EXPONENT).exp().sum(2)  # [tokens, G, windows]
    for j in range(1, int(left.max()) if N else 0):
        windows = shares[:, :, 4 * j - 1 : 4 * j + 4]
        score = (windows * windows.new_tensor(WINDOW_WEIGHTS)).sum(-1)
        scores[:, :, j] = torch.where(j < left[:, None], score, -1.0)
    return scores


def top_blocks_reference(scores: Tensor, selected: int) -> Tensor:
    """Returns the indices of the `selected` highest scores, ascending, int16 [..., selected].

    Negative scores are not taken. A list with fewer candidates ends in EMPTY.
    """
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    order = torch.where(values >= 0, order, EMPTY)[..., :selected]
    padded = order.new_full((*order.shape[:-1], selected), EMPTY)
    padded[..., : order.shape[-1]] = order
    return padded.sort(-1).values.to(torch.int16)


@triton.jit
def _pool_kernel(
    k_ptr, pooled_ptr, block_start_ptr, block_stop_ptr, num_blocks,
    G: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(block_start_ptr + block).to(tl.int64)
    columns = tl.arange(0, K)
    # A tensor, though its elements are equal: Triton 3.9's interpreter takes no scalar as a mask.
    whole = tl.load(block_stop_ptr + block) - start + tl.zeros([1, K], tl.int64) == BLOCK
    parts: tl.constexpr = BLOCK // PART
    target = pooled_ptr + (head * (parts + 1) * num_blocks + block) * K + columns  # part 0, and the others follow
    address = k_ptr + ((start + tl.arange(0, PART)[:, None]) * G + head) * K + columns[None, :]  # [PART, K]
    total = tl.zeros([K], tl.float32)
    for i in tl.static_range(parts):
        here = tl.sum(tl.load(address + i * PART * G * K, mask=whole, other=0.0).to(tl.float32), 0)
        tl.store(target + i * num_blocks * K, (here / PART).to(k_ptr.dtype.element_ty))
        total += here
    tl.store(target + parts * num_blocks * K, (total / BLOCK).to(k_ptr.dtype.element_ty))


@triton.jit
def _whole_block_lse(q, pooled_ptr, first_row, num_keys, scale, K: tl.constexpr, BLOCK_J: tl.constexpr):
    """Returns the base-2 log-sum-exp of the rows of q [ROWS, K] over `num_keys` rows of pooled_ptr from first_row on.

    Keys are columns of the product here, so that a row's maximum is found among the registers of four threads.
    """
    ROWS: tl.constexpr = q.shape[0]
    columns = tl.arange(0, K)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j0 in range(0, num_keys, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)[:, None]
        address = pooled_ptr + (first_row + j) * K + columns[None, :]
        keys = tl.load(address, mask=j < num_keys, other=0.0)
        logits = matmul(q, tl.trans(keys)) * scale  # [ROWS, BLOCK_J]
        logits = tl.where(tl.trans(j) < num_keys, logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        total = total * tl.exp2(maximum - new_maximum) + tl.sum(tl.exp2(logits - new_maximum[:, None]), 1)
        maximum = new_maximum
    return maximum + tl.log2(total)


@triton.jit(do_not_specialize=["first_query_block", "first_head", "width"])
def _scores_kernel(
    q_ptr, pooled_ptr, lse_ptr, first_window_ptr, scores_ptr, maxima_ptr, block_start_ptr, block_stop_ptr,
    first_block_ptr, first_query_block, first_head, num_blocks, num_windows, width, scale,
    G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, BY_WINDOWS: tl.constexpr,
):  # fmt: skip
    """Computes scores [heads, tokens of the query blocks, width], and the largest of each CHUNK of blocks.

    Scores of blocks that are not candidates stay unwritten. pooled_ptr is [G, PARTS + 1, num_blocks, K]. BY_WINDOWS, it
    is [G, num_windows, K]; lse_ptr is then [tokens, H], and first_window_ptr [blocks] has the first window of a block's
    document.
    """
    tiles: tl.constexpr = BLOCK // BLOCK_T
    query_block = first_query_block + tl.program_id(0) // tiles
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(first_block_ptr + query_block)
    own = query_block - first
    left = own - WINDOW + 1
    start = tl.load(block_start_ptr + query_block) + (tl.program_id(0) % tiles) * BLOCK_T
    stop = tl.load(block_stop_ptr + query_block)
    if (left <= 1) | (start >= stop):
        return
    # Heads slow, tokens fast: the sum over heads then adds registers of one thread.
    row = tl.arange(0, GROUP_PAD * BLOCK_T)
    r, token = row // BLOCK_T, start + row % BLOCK_T  # [ROWS]
    columns = tl.arange(0, K)
    q_rows = (token.to(tl.int64) * G + first_head + head) * GROUP + r
    mask = (token < stop) & (r < GROUP)
    q = tl.load(q_ptr + q_rows[:, None] * K + columns[None, :], mask=mask[:, None], other=0.0)  # [ROWS, K]
    scale *= LOG2_E
    # first_row is the mean key of part 0 of the document's block 0; the other two are steps to the next part and block.
    if BY_WINDOWS:  # Part 0 of block j is window 4 j - 1.
        first_row = (first_head + head) * num_windows + tl.load(first_window_ptr + query_block) - 1
        part_rows, block_rows = 1, 4
        lse = tl.load(lse_ptr + q_rows, mask=mask, other=float("inf")) * LOG2_E
    else:
        first_row = (first_head + head) * (PARTS + 1) * num_blocks + first
        part_rows, block_rows = num_blocks, 1
        lse = _whole_block_lse(q, pooled_ptr, first_row + PARTS * num_blocks, own, scale, K, BLOCK_J)
        lse = tl.where(r < GROUP, lse, float("inf"))  # Heads of padding add 0.
    q_t = tl.trans(q)  # [K, ROWS]
    score_rows = head * (tl.num_programs(0) * BLOCK_T) + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    best = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
    for i in range(0, tl.cdiv(left, BLOCK_J) * PARTS):
        part = i % PARTS
        j = i // PARTS * BLOCK_J + tl.arange(0, BLOCK_J)[:, None]
        is_candidate = (j >= 1) & (j < left)
        address = pooled_ptr + (first_row + part * part_rows + j * block_rows) * K + columns[None, :]
        logits = matmul(tl.load(address, mask=is_candidate, other=0.0), q_t) * scale - lse[None, :]
        shares = tl.exp2(tl.minimum(logits, LARGEST_EXPONENT * LOG2_E))
        score = tl.sum(tl.reshape(shares, [BLOCK_J, GROUP_PAD, BLOCK_T]), 1)
        if BY_WINDOWS:
            best = tl.where(part == 0, score, best + tl.where(part == PARTS - 1, 1.0, 2.0) * score)
        else:
            best = tl.where(part == 0, score, tl.maximum(best, score))
        if part == PARTS - 1:
            tl.store(scores_ptr + score_rows[None, :] * width + j, best, mask=is_candidate)
            of_chunks = tl.reshape(tl.where(is_candidate, best, -1.0), [BLOCK_J // CHUNK, CHUNK, BLOCK_T])
            chunk = i // PARTS * (BLOCK_J // CHUNK) + tl.arange(0, BLOCK_J // CHUNK)[:, None]
            maxima = maxima_ptr + score_rows[None, :] * (width // CHUNK) + chunk
            tl.store(maxima, tl.max(of_chunks, 1), mask=chunk * CHUNK < left)


@triton.jit(do_not_specialize=["first_query_block", "first_head", "num_queries", "width"])
def _top_kernel(
    scores_ptr, chunks_ptr, chosen_ptr, block_start_ptr, block_stop_ptr, first_block_ptr,
    first_query_block, first_head, num_queries, width,
    S: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, OF_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Writes the S best chunks by their maxima (OF_CHUNKS) to [heads, queries, S], or their S best blocks to the lists.

    The S-th highest score is found by bisection of its bits: read as integers, positive floats keep their order.
    """
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    query_block = first_query_block + query // BLOCK
    inside = query < num_queries
    block_start = tl.load(block_start_ptr + query_block, mask=inside, other=0)
    token = (block_start + query % BLOCK).to(tl.int64)
    inside &= token < tl.load(block_stop_ptr + query_block, mask=inside, other=0)
    left = query_block - tl.load(first_block_ptr + query_block, mask=inside, other=0) - WINDOW + 1
    row = head * num_queries + query
    column = tl.arange(0, COLUMNS)[None, :]
    if OF_CHUNKS:
        index = column + tl.zeros([BLOCK_T, COLUMNS], tl.int32)
        is_candidate = inside & (tl.maximum(index * CHUNK, 1) < left)
        target = row
    else:  # Chunks 2 and 5 of 4 blocks each, if chosen, are blocks 8, 9, 10, 11, 20, 21, 22, 23.
        in_list = inside & (column < S * CHUNK)
        chunk = tl.load(chunks_ptr + row * S + column // CHUNK, mask=in_list, other=0).to(tl.int32)
        index = chunk * CHUNK + column % CHUNK
        is_candidate = in_list & (index >= 1) & (index < left)
        target = token * G + first_head + head
    scores = tl.load(scores_ptr + row * width + index, mask=is_candidate, other=0.0)
    key = tl.where(is_candidate, scores.to(tl.int32, bitcast=True), -1)
    threshold = tl.zeros([BLOCK_T], tl.int32)  # the highest with at least S keys at or above it, or 0
    reached = tl.sum(is_candidate.to(tl.int32), 1)  # keys at or above the threshold
    bit = 30
    unresolved = 1
    while (bit >= 0) & (unresolved > 0):
        higher = threshold | (1 << bit)
        count = tl.sum((key >= higher[:, None]).to(tl.int32), 1)
        threshold = tl.where(count >= S, higher, threshold)
        reached = tl.where(count >= S, count, reached)
        # A row is resolved once exactly S keys are at or above its threshold: lower bits cannot change the choice.
        unresolved = tl.max((reached > S).to(tl.int32), 0)
        bit -= 1
    chosen = key >= threshold[:, None]
    if unresolved > 0:  # Some row has more than S: among keys equal to the threshold the first are taken.
        above = key > threshold[:, None]
        equal = chosen & (key == threshold[:, None])
        room = S - tl.sum(above.to(tl.int32), 1)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= room[:, None]))
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(chosen_ptr + target * S + place, index.to(tl.int16), mask=chosen)


def pool(k: Tensor, layout: Layout) -> Tensor:
    """Returns what `pool_reference` returns; k [tokens, G, K]."""
    _, G, K = k.shape
    parts = layout.block_size // PART_KEYS
    pooled = torch.empty(G, parts + 1, layout.num_blocks, K, dtype=k.dtype, device=k.device)
    _pool_kernel[(layout.num_blocks, G)](
        k, pooled, layout.block_start, layout.block_stop, layout.num_blocks,
        G=G, K=K, BLOCK=layout.block_size, PART=PART_KEYS,
    )  # fmt: skip
    return pooled


def score_blocks(
    q: Tensor, pooled: Tensor, layout: Layout, heads: range, query_blocks: range, width: int,
    config: TileConfig | None = None, *, lse: Tensor | None = None, first_window: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns scores [heads, len(query_blocks) * block_size, width] float32, and the largest of each CHUNK of blocks.

    Scores are valid for candidates alone, 1 <= j < left. The maxima [..., width // CHUNK] are valid for chunks that
    have a candidate. With `lse` [tokens, H] float32 and `first_window` [blocks] scores are by windows, and pooled is
    [G, windows, K].
    """
    by_windows = lse is not None
    config = config or (WINDOW_SCORES_CONFIG if by_windows else SCORES_CONFIG)
    tile = launch_constants(q, len(pooled), layout.block_size, config)
    rows = len(heads), len(query_blocks) * layout.block_size
    scores, maxima = (torch.empty(*rows, n, dtype=torch.float32, device=q.device) for n in (width, width // CHUNK))
    _scores_kernel[(len(query_blocks) * (layout.block_size // tile["BLOCK_T"]), len(heads))](
        q, pooled, lse, first_window, scores, maxima, layout.block_start, layout.block_stop, layout.first_block,
        query_blocks.start, heads.start, layout.num_blocks, pooled.shape[1], width, 1 / math.sqrt(q.shape[-1]),
        **tile, BLOCK_J=BLOCK_J, WINDOW=layout.window_blocks,
        PARTS=len(WINDOW_WEIGHTS) if by_windows else pooled.shape[1] - 1, CHUNK=CHUNK,
        LARGEST_EXPONENT=LARGEST_EXPONENT, BY_WINDOWS=by_windows,
    )  # fmt: skip
    return scores, maxima


def top_blocks(
    scores: Tensor, maxima: Tensor, blocks: Tensor, layout: Layout, heads: range, query_blocks: range
) -> None:
    """Writes the chosen blocks into `blocks` [tokens, G, selected] int16, ascending; the rest of a list stays EMPTY.

    First the best chunks are chosen by their maxima, then the best blocks of these chunks. Any other chunk has nothing
    to add: `selected` chunks rank before it, and each of them has a block that ranks before all of its blocks.
    """
    (num_heads, num_queries, width), (_, G, S) = scores.shape, blocks.shape
    chunks = torch.full((num_heads, num_queries, S), EMPTY, dtype=torch.int16, device=blocks.device)
    tables = layout.block_start, layout.block_stop, layout.first_block
    of_chunks = min(width, triton.next_power_of_2(S) * CHUNK)  # blocks of the chosen chunks, or all blocks
    for of, chosen, columns in ((maxima, chunks, width // CHUNK), (scores, blocks, of_chunks)):
        block_t = max(1, TOPK_ELEMENTS // columns)
        _top_kernel[(triton.cdiv(num_queries, block_t), num_heads)](
            of, chunks, chosen, *tables, query_blocks.start, heads.start, num_queries, of.shape[-1],
            S=S, G=G, BLOCK=layout.block_size, BLOCK_T=block_t, WINDOW=layout.window_blocks, COLUMNS=columns,
            CHUNK=CHUNK, OF_CHUNKS=of is maxima, num_warps=max(1, columns // WARP_ELEMENTS),
        )  # fmt: skip


def ranges(total: int, step: int) -> list[range]:
    return [range(start, min(start + step, total)) for start in range(0, total, step)]


def score_columns(last: int, window_blocks: int) -> int:
    """Returns the columns of scores for queries up to block `last`: a power of two above every candidate's index."""
    return max(16, triton.next_power_of_2(max(1, last - window_blocks + 1)))


def query_bytes(columns: int, selected: int) -> int:
    """Returns the bytes of a choice per query and key/value head: scores, chunks' largest scores, chosen chunks."""
    return 4 * (columns + columns // CHUNK) + 2 * selected


def score_width(layout: Layout, query_blocks: range) -> int:
    last = int(layout.index_of_block[query_blocks.start : query_blocks.stop].max())
    return score_columns(last, layout.window_blocks)


def choose_blocks(
    q: Tensor, k: Tensor, layout: Layout, chosen: Tensor, workspace_bytes: int, *, lse: Tensor | None = None,
    first_window: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes every token's list into `chosen` [tokens, G, selected] int16, which the caller has filled with EMPTY.

    k [tokens, G, K] are keys or, with `lse` and `first_window`, `pooled` of `score_blocks`. Scores of `workspace_bytes`
    exist at a time, about.
    """
    has_windows, (_, G, selected) = lse is not None, chosen.shape
    if selected == 0 or not layout.has_candidates:
        return
    pooled = k if has_windows else pool(k, layout)
    widest = score_width(layout, range(layout.num_blocks))
    # A range of blocks is scored for all heads, then chosen from: its scores are read while they are in the L2 cache.
    block_bytes = layout.block_size * G * query_bytes(widest, selected)
    for query_blocks in ranges(layout.num_blocks, max(1, workspace_bytes // block_bytes)):
        heads, width = range(G), score_width(layout, query_blocks)
        of_range = q, pooled, layout, heads, query_blocks, width
        scores, maxima = score_blocks(*of_range, lse=lse, first_window=first_window)
        top_blocks(scores, maxima, chosen, layout, heads, query_blocks)
        del scores, maxima  # before the next range's are made
