"""The choice of blocks: each token scores blocks of keys and takes the `selected` best. It carries
no gradient.

A block's score is its largest logit with a query head of the key/value head; ../README.md has the
mathematics. With a window that begins at block `left`, the candidates are the blocks 1 <= j < left.
Far positions look less closely (`Look`). GPUs that multiply in FP8 score in FP8: the queries of a
token are scaled so that their largest element is FP8's largest number, and keys are divided by 4
(`KEY_DIVISOR`). Every run makes the same lists.

The best blocks are found in two rounds, see `top_blocks`. At 131,072 tokens, 32 blocks are searched
among 128 chunks of 16, then among the 512 blocks of the best chunks, not among all 2,048.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common import sum_dtype
from .common import matmul
from .layout import EMPTY, Layout

EARLY, LATE = 32_768, 262_144  # tokens
KEY_DIVISOR = tl.constexpr(4.0)
FP8, LARGEST_FP8 = torch.float8_e4m3fn, tl.constexpr(448.0)
LOWEST = tl.constexpr(-(2**31))
CHUNK = 16  # neighbouring blocks that the first round takes together
# tokens x key/value heads that the 132 multiprocessors of an H100 or H200 score at once: 264
# programs
WAVE = 33_792
# scores per program that chooses (or one row, if longer); most per warp
TOPK_ELEMENTS, WARP_ELEMENTS = (256, 1024)


class ScoresConfig(NamedTuple):
    """Sizes of a tile of logits."""

    rows: int  # tokens
    keys: int
    num_warps: int
    num_stages: int


SCORES_CONFIGS = {
    1: ScoresConfig(128, 128, 8, 4),
    2: ScoresConfig(128, 128, 8, 2),
    4: ScoresConfig(64, 64, 4, 1),
}


def scoring_dtype(q: Tensor) -> torch.dtype:
    """Returns the dtype in which q's GPU scores: FP8 if it has it and q is a 16-bit number, else
    q's own."""
    has_fp8 = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 9)
    return FP8 if has_fp8 and q.element_size() == 2 else q.dtype


class Look(NamedTuple):
    """Precision with which tokens score blocks."""

    mean_query: bool  # whether the mean of a group's query heads looks, or each of them
    mean_keys: bool  # whether it looks at means of two neighbouring keys, or at each key


def look_from(position: int) -> Look:
    """Returns how the tokens of a block look that begins at `position` of its document."""
    return Look(position >= EARLY, position >= LATE)


def scoring_queries(q: Tensor, G: int, look: Look, dtype: torch.dtype) -> Tensor:
    """Returns the queries that score blocks, rounded to `dtype`, for q [tokens, H, K].

    The result is [tokens, G, H / G, K], or [tokens, G, 1, K] if the look takes mean queries.
    """
    queries = q.to(sum_dtype(q)).unflatten(1, (G, -1))
    queries = queries.mean(2, keepdim=True) if look.mean_query else queries
    if dtype == FP8:
        largest = queries.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
        return (queries / largest * LARGEST_FP8.value).to(FP8).float()
    return queries.to(dtype).to(queries.dtype)


def scored_keys(k: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns keys as `dtype` rounds them, for k [..., K]."""
    if dtype == FP8:
        return (
            (k.float() / KEY_DIVISOR.value)
            .clamp(-LARGEST_FP8.value, LARGEST_FP8.value)
            .to(FP8)
            .float()
        )
    return k.to(dtype).to(sum_dtype(k))


def candidate_scores(q: Tensor, k: Tensor, look: Look, dtype: torch.dtype) -> Tensor:
    """Returns scores [T, G, J] of J blocks, for queries that see all of them.

    Args:
        q: [T, H, K].
        k: whole blocks of keys, [J, block_size, G, K].
        dtype: of the product's factors, see `scoring_dtype`.
    """
    if look.mean_keys:
        k = k.to(sum_dtype(k)).unflatten(1, (-1, 2)).mean(2).to(k.dtype)
    queries = scoring_queries(q, k.shape[2], look, dtype)
    return torch.einsum("tgrk,jsgk->tgrjs", queries, scored_keys(k, dtype)).amax((2, 4))


def scores_reference(
    q: Tensor, k: Tensor, layout: Layout, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns scores [tokens, G, blocks of the longest document], -inf for no candidates; `dtype`
    None: q's own."""
    size, index_of_block = layout.block_size, layout.index_of_block.tolist()
    shape = len(q), k.shape[1], max(index_of_block) + 1
    scores = q.new_full(shape, float("-inf"), dtype=sum_dtype(q))
    for block, (start, stop) in enumerate(
        zip(layout.block_start.tolist(), layout.block_stop.tolist())
    ):
        query_block = index_of_block[block]
        left = query_block - layout.window_blocks + 1
        places = start - query_block * size + torch.arange(query_block * size)
        if left > 1:
            if layout.shared is not None and (count := int(layout.shared.count[block])):
                begin = int(layout.block_start[layout.shared.firsts[block]])
                places[: count * size] = begin + torch.arange(count * size)
            keys = k[places[size : left * size].to(k.device)].unflatten(0, (-1, size))
            block_scores = candidate_scores(
                q[start:stop], keys, look_from(query_block * size), dtype or q.dtype
            )
            scores[start:stop, :, 1:left] = block_scores
    return scores


def top_blocks_reference(scores: Tensor, selected: int) -> Tensor:
    """Returns the indices of the `selected` highest scores above -inf, ascending, then EMPTY, int16
    [..., selected]."""
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    order = torch.where(values > float("-inf"), order, EMPTY)[..., :selected]
    padded = order.new_full((*order.shape[:-1], selected), EMPTY)
    padded[..., : order.shape[-1]] = order
    return padded.sort(-1).values.to(torch.int16)


@triton.jit(do_not_specialize=["num_blocks", "G"])
def _round_keys_kernel(
    k_ptr, keys_ptr, block_start_ptr, block_stop_ptr, num_blocks, G,
    K: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes one block of what `round_keys` returns."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, stop = tl.load(block_start_ptr + block).to(tl.int64), tl.load(block_stop_ptr + block)
    rows, columns = tl.arange(0, KEYS)[:, None], tl.arange(0, K)[None, :]
    total = tl.zeros([KEYS, K], tl.float32)
    for i in tl.static_range(BLOCK // KEYS):
        token = start + rows * (BLOCK // KEYS) + i
        total += tl.load(k_ptr + (token * G + head) * K + columns, mask=token < stop, other=0.0).to(
            tl.float32
        )
    mean = total / (BLOCK // KEYS)
    if keys_ptr.dtype.element_ty == tl.float8e4nv:
        mean = mean.to(k_ptr.dtype.element_ty).to(tl.float32) / KEY_DIVISOR
        mean = tl.minimum(tl.maximum(mean, -LARGEST_FP8), LARGEST_FP8)
    tl.store(
        keys_ptr + ((head * num_blocks + block) * KEYS + rows) * K + columns,
        mean.to(keys_ptr.dtype.element_ty),
    )


@triton.jit(do_not_specialize=[
    "own_block", "first_block", "first_index", "stop_index", "before", "num_blocks", "num_tokens",
    "shared",
    "first_shared", "G",
])  # fmt: skip
def _scores_kernel(
    q_ptr, keys_ptr, scores_ptr, maxima_ptr, block_start_ptr, document_stop_ptr,
    own_block, first_block, first_index, stop_index, before, num_blocks, num_tokens, width, shared,
    first_shared, G,
    GROUP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Computes what `score_blocks` returns, for the tokens first_index to stop_index - 1 of one
    document.

    The document has `own_block`. With SHARED its first `shared` blocks are another one's, from
    `first_shared` on.

    A program has ROWS queries, QUERIES per token: the mean of its query heads, or all of them, of
    which the last is repeated up to a power of two. It goes through BLOCKS blocks of KEYS keys at a
    time. Long programs start first.
    """
    TOKENS: tl.constexpr = ROWS // QUERIES
    head = tl.program_id(1).to(tl.int64)
    first = first_index + (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS  # in the document
    start = tl.load(block_start_ptr + own_block).to(tl.int64) - (own_block - first_block) * BLOCK
    stop = tl.load(document_stop_ptr + own_block)
    row, columns = first + tl.arange(0, ROWS) // QUERIES, tl.arange(0, K)
    inside = (row < stop_index) & (start + row < stop)
    # [ROWS, K]
    address = q_ptr + ((start + row)[:, None] * G + head) * GROUP * K + columns[None, :]
    if QUERIES == 1:
        q = tl.zeros([ROWS, K], tl.float32)
        for r in tl.static_range(GROUP):
            q += tl.load(address + r * K, mask=inside[:, None], other=0.0).to(tl.float32)
        q /= GROUP
    else:
        r = tl.minimum(tl.arange(0, ROWS) % QUERIES, GROUP - 1)
        q = tl.load(address + r[:, None] * K, mask=inside[:, None], other=0.0).to(tl.float32)
    if keys_ptr.dtype.element_ty == tl.float8e4nv:
        largest = tl.max(tl.reshape(tl.max(tl.abs(q), 1), [TOKENS, QUERIES]), 1)
        largest = tl.reshape(tl.broadcast_to(largest[:, None], [TOKENS, QUERIES]), [ROWS])
        q = q / tl.maximum(largest, 1e-30)[:, None] * LARGEST_FP8
    q = q.to(keys_ptr.dtype.element_ty)
    token = first + tl.arange(0, TOKENS)
    # [TOKENS]
    left = tl.where((token < stop_index) & (start + token < stop), token // BLOCK - WINDOW + 1, 0)
    last = tl.max(left, 0)
    first_key = (head * num_blocks + first_block) * KEYS
    score_row = head * num_tokens + token - before
    largest = tl.full([TOKENS], float("-inf"), tl.float32)
    for j0 in range(0, last, BLOCKS):
        key = j0 * KEYS + tl.arange(0, BLOCKS * KEYS)
        place = first_key + key
        if SHARED:
            place += tl.where(key < shared * KEYS, (first_shared - first_block) * KEYS, 0)
        keys = tl.load(
            keys_ptr + place[:, None] * K + columns[None, :],
            mask=key[:, None] < last * KEYS,
            other=0.0,
        )
        logits = matmul(q, tl.trans(keys))  # [ROWS, BLOCKS * KEYS]
        best = tl.max(tl.reshape(logits, [ROWS, BLOCKS, KEYS]), 2)
        if QUERIES > 1:
            best = tl.max(tl.reshape(best, [TOKENS, QUERIES, BLOCKS]), 1)
        j = j0 + tl.arange(0, BLOCKS)[None, :]
        is_candidate = (j >= 1) & (j < left[:, None])
        tl.store(scores_ptr + score_row[:, None] * width + j, best, mask=is_candidate)
        best = tl.max(tl.where(is_candidate, best, float("-inf")), 1)
        largest = tl.where(j0 % CHUNK == 0, best, tl.maximum(largest, best))
        if ((j0 + BLOCKS) % CHUNK == 0) | (j0 + BLOCKS >= last):
            tl.store(
                maxima_ptr + score_row * (width // CHUNK) + j0 // CHUNK,
                largest,
                mask=j0 // CHUNK * CHUNK < left,
            )


@triton.jit(do_not_specialize=["first_query_block", "num_queries", "width", "G"])
def _top_kernel(
    scores_ptr, chunks_ptr, chosen_ptr, block_start_ptr, block_stop_ptr, first_block_ptr,
    first_query_block, num_queries, width, G,
    S: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, OF_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Writes the S best chunks by their maxima (OF_CHUNKS) to [heads, queries, S], or their S best
    blocks to the lists.

    Scores are read as integers, and the S-th highest is found by bisection. The integers keep the
    order of the floats if the other bits of negative numbers are inverted.
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
        target = token * G + head
    scores = tl.load(scores_ptr + row * width + index, mask=is_candidate, other=0.0)
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    key = tl.where(is_candidate, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
    highest = tl.max(key, 1)
    lowest = tl.min(tl.where(is_candidate, key, highest[:, None]), 1)
    if not OF_CHUNKS:  # A block of each of the S chunks reaches the chunks' lowest maximum.
        maxima = tl.max(tl.reshape(key, [BLOCK_T, COLUMNS // CHUNK, CHUNK]), 2)
        is_chunk = tl.arange(0, COLUMNS // CHUNK)[None, :] < S
        lowest = tl.maximum(lowest, tl.min(tl.where(is_chunk, maxima, highest[:, None]), 1))
        is_candidate &= key >= lowest[:, None]
    reached = tl.sum(is_candidate.to(tl.int32), 1)  # candidates at or above `lowest`
    # The S-th highest key lies between `lowest` and `highest`. A row is resolved once S keys are at
    # or above `lowest`.
    unresolved = tl.max(reached, 0) > S
    while unresolved:
        # their mean, rounded up; a sum would overflow
        middle = (lowest | highest) - ((lowest ^ highest) >> 1)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        enough = count >= S
        lowest = tl.where(enough, middle, lowest)
        reached = tl.where(enough, count, reached)
        highest = tl.where(enough, highest, middle - 1)
        unresolved = tl.max(((reached > S) & (lowest < highest)).to(tl.int32), 0) > 0
    chosen = is_candidate & (key >= lowest[:, None])
    # Some row has more than S: among keys equal to the lowest the first are taken.
    if tl.max(reached, 0) > S:
        above = key > lowest[:, None]
        equal = chosen & (key == lowest[:, None])
        num_equal = S - tl.sum(above.to(tl.int32), 1)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= num_equal[:, None]))
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(chosen_ptr + target * S + place, index.to(tl.int16), mask=chosen)


def round_keys(k: Tensor, layout: Layout, dtype: torch.dtype, mean_keys: bool = False) -> Tensor:
    """Returns keys, or means of two, [G, blocks, keys per block, K], for k [tokens, G, K]; 0 past a
    document's end."""
    (_, G, K), size = k.shape, layout.block_size
    keys = torch.empty(
        G, layout.num_blocks, size // 2 if mean_keys else size, K, dtype=dtype, device=k.device
    )
    _round_keys_kernel[(layout.num_blocks, G)](
        k,
        keys,
        layout.block_start,
        layout.block_stop,
        layout.num_blocks,
        G,
        K=K,
        BLOCK=size,
        KEYS=keys.shape[2],
    )
    return keys


def queries_per_token(group: int, look: Look) -> int:
    """Returns the queries that `_scores_kernel` multiplies per token and key/value head."""
    return 1 if look.mean_query else triton.next_power_of_2(group)


class Part(NamedTuple):
    """Query blocks of one document that are scored by one launch."""

    first_block: int  # the document's, as `Layout.first_block`
    # how many blocks of another document it begins with, and the first of them
    shared: tuple[int, int]
    blocks: range
    look: Look


def parts_of(layout: Layout, query_blocks: range) -> Iterator[Part]:
    """Yields the parts of `query_blocks` with candidates.

    Ends of documents and another `Look` divide parts.
    """
    index = layout.index_of_block
    borders = [0, *((index.diff() != 1).nonzero().squeeze(1) + 1).tolist(), layout.num_blocks]
    for first_block, stop in itertools.pairwise(borders):
        count = int(index[first_block])
        first = first_block - count
        begin = max(first_block, first + layout.window_blocks + 1)
        shared = (count, layout.shared.firsts[first_block]) if layout.shared else (0, first_block)
        bounds = sorted(
            [begin, *(first + position // layout.block_size for position in (EARLY, LATE)), stop]
        )
        for start, end in itertools.pairwise(bounds):
            blocks = range(max(start, begin, query_blocks.start), min(end, stop, query_blocks.stop))
            if blocks:
                yield Part(
                    first, shared, blocks, look_from((blocks.start - first) * layout.block_size)
                )


def score_blocks(
    q: Tensor, keys: Callable[[bool], Tensor], layout: Layout, query_blocks: range, width: int,
    config: ScoresConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns scores of query blocks as `choose_blocks` takes them; keys(mean_keys) are what
    `round_keys` returns."""
    (_, H, K), size, num_tokens = q.shape, layout.block_size, len(query_blocks) * layout.block_size
    scores = maxima = None
    for first, shared, blocks, look in parts_of(layout, query_blocks):
        scored = keys(look.mean_keys)
        G, per_block = len(scored), scored.shape[2]
        if scores is None:
            scores = q.new_empty(G, num_tokens, width, dtype=torch.float32)
            maxima = q.new_empty(G, num_tokens, width // CHUNK, dtype=torch.float32)
        tile = config or SCORES_CONFIGS[scored.element_size()]
        queries = queries_per_token(H // G, look)
        _scores_kernel[(triton.cdiv(len(blocks) * size, tile.rows // queries), G)](
            q, scored, scores, maxima, layout.block_start, layout.document_stop,
            blocks.start, first,
            *((block - first) * size for block in (blocks.start, blocks.stop, query_blocks.start)),
            layout.num_blocks, num_tokens, width, *shared, G, GROUP=H // G, K=K, BLOCK=size,
            KEYS=per_block,
            WINDOW=layout.window_blocks, CHUNK=CHUNK, ROWS=tile.rows, QUERIES=queries,
            SHARED=shared[0] > 0,
            BLOCKS=max(1, tile.keys // per_block), num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
    return scores, maxima


def top_blocks(
    scores: Tensor, maxima: Tensor, blocks: Tensor, layout: Layout, query_blocks: range
) -> None:
    """Writes the chosen blocks into `blocks` [tokens, G, selected] int16, ascending; the rest of a
    list stays EMPTY.

    First the best chunks are chosen by their maxima, then the best blocks of these chunks. Any
    other chunk has nothing to add: `selected` chunks rank before it, and each of them has a block
    that ranks before all of its blocks.
    """
    (num_heads, num_queries, width), (_, G, S) = scores.shape, blocks.shape
    chunks = torch.full((num_heads, num_queries, S), EMPTY, dtype=torch.int16, device=blocks.device)
    tables = layout.block_start, layout.block_stop, layout.first_block
    # 128, 512 or 2,048 columns: few sizes, as each is compiled
    chunk_columns = 2 ** (max(7, (width // CHUNK - 1).bit_length()) | 1)
    for of, chosen, columns in (
        (maxima, chunks, chunk_columns),
        (scores, blocks, triton.next_power_of_2(S) * CHUNK),
    ):
        block_t = max(1, TOPK_ELEMENTS // columns)
        _top_kernel[(triton.cdiv(num_queries, block_t), num_heads)](
            of, chunks, chosen, *tables, query_blocks.start, num_queries, of.shape[-1], G,
            S=S, BLOCK=layout.block_size, BLOCK_T=block_t, WINDOW=layout.window_blocks,
            COLUMNS=columns,
            CHUNK=CHUNK, OF_CHUNKS=of is maxima, num_warps=max(1, columns // WARP_ELEMENTS),
        )  # fmt: skip


def ranges(total: int, step: int) -> list[range]:
    return [range(start, min(start + step, total)) for start in range(0, total, step)]


def score_columns(last: int, window_blocks: int) -> int:
    """Returns the columns of scores for queries up to block `last`: a power of two above every
    candidate's index."""
    return max(16, triton.next_power_of_2(max(1, last - window_blocks + 1)))


def query_bytes(columns: int, selected: int) -> int:
    """Returns the bytes of a choice per query and key/value head: scores, chunks' largest scores,
    chosen chunks."""
    return 4 * (columns + columns // CHUNK) + 2 * selected


def score_width(layout: Layout, query_blocks: range) -> int:
    last = int(layout.index_of_block[query_blocks.start : query_blocks.stop].max())
    return score_columns(last, layout.window_blocks)


def blocks_at_a_time(
    workspace_bytes: int, block_bytes: int, block_size: int, G: int, wave: int
) -> int:
    """Returns how many blocks of queries are scored at a time: as `workspace_bytes` hold, and whole
    waves if one fits.

    Args:
        block_bytes: of the scores of one block of queries.
        wave: tokens x key/value heads that the GPU scores at once; 1: any number will do.
    """
    blocks, wave_blocks = workspace_bytes // block_bytes, max(1, wave // (block_size * G))
    return max(1, blocks // wave_blocks * wave_blocks or blocks)


def choose_blocks(
    score: Callable[[range, int], tuple[Tensor, Tensor]], layout: Layout, chosen: Tensor,
    workspace_bytes: int,
    wave: int = 1,
) -> None:  # fmt: skip
    """Writes every token's list into `chosen` [tokens, G, selected] int16, which the caller has
    filled with EMPTY.

    `workspace_bytes` and `wave` are as in `blocks_at_a_time`.

    Args:
        score: score(query_blocks, width) returns scores [G, len(query_blocks) * block_size, width]
            float32, valid for candidates alone, 1 <= j < left; and the largest of each CHUNK of
            candidates [..., width // CHUNK], valid for chunks that have one.
    """
    _, G, selected = chosen.shape
    widest = score_width(layout, range(layout.num_blocks))
    # A range of blocks is scored for all heads, then chosen from: its scores are read while they
    # are in the L2 cache.
    block_bytes = layout.block_size * G * query_bytes(widest, selected)
    step = blocks_at_a_time(workspace_bytes, block_bytes, layout.block_size, G, wave)
    for query_blocks in ranges(layout.num_blocks, step):
        if (
            int(layout.index_of_block[query_blocks.start : query_blocks.stop].max())
            > layout.window_blocks
        ):
            scores, maxima = score(query_blocks, score_width(layout, query_blocks))
            top_blocks(scores, maxima, chosen, layout, query_blocks)
            del scores, maxima  # before the next range's are made
