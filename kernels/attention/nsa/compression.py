"""NSA's compressed branch: attention to the mean key and value of windows of 32 tokens, one every
16 tokens.

A document of L tokens has floor(L / 16) - 1 windows, or none if that is negative. Tokens that see
none have an output and a log-sum-exp of 0. ../README.md says how a library's causal kernel attends
to windows: a tile, 16 tokens that see the same windows, is one position with 16 times as many query
heads. A document of 100 tokens has windows and tiles 0 to 4; tile 4 has only the tokens 95 to 99.

Keys are pooled after RoPE, as MoBA (arXiv 2502.13189) and flash-linear-attention's NSA pool them.
The mean of 32 keys keeps RoPE's slow frequencies, which tell long distances. The other two branches
have what the mean loses.

A tile's heads are ordered (key/value head, token, query head), so that the queries of a key/value
head are neighbours. Kept for backward, per token: the branch's output, H K elements, and the
float32 log-sum-exp, H. Windows are pooled again.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..documents import as_bytes, document_bounds
from ..full import backward_workspace, full_backward, full_forward
from ..sparse.selection import ranges

WINDOW_KEYS, WINDOW_STRIDE = 32, 16
_NEVER_ATTENDS = 1e30  # a log-sum-exp under which every probability is exactly 0
ROW_ELEMENTS = 4096  # elements that a program of _rows_kernel copies
BLOCK_W = 16  # windows per program of _pool_windows_kernel
BLOCK_T = 32  # tokens per program of _unpool_kernel


class Windows(NamedTuple):
    """Tables of the windows and tiles of packed documents.

    Both are counted through all documents.
    """

    num_windows: int
    # batch rows that the library's kernel gets, of one document each or,
    # with segments, a single row
    rows: int
    # the row's documents, int64 [S, 3], counted in windows; None: each row is one document
    segments: Tensor | None
    window_start: Tensor  # [windows] int32: a window's first token
    first_window: Tensor  # [tokens] int32: the first window of a token's document
    # [2, tokens] int32: the windows that hold a token, the later one first; -1: none
    windows_of_token: Tensor
    # [tokens] int32: the token's place in the tiles [windows, 16]; -1: it sees no window
    tile_of_token: Tensor
    # [windows * 16] int32: the token at a place in the tiles; -1 past a document's end
    token_of_tile: Tensor


def make_windows(q: Tensor, segments: Tensor | None) -> Windows:
    """Returns the tables on q's device, for q [B, T, ...]; segments as in `make_layout`.

    All layers share them.
    """
    return _make_windows(q.shape[0], q.shape[1], as_bytes(segments), q.device)


@functools.lru_cache(maxsize=2)
def _make_windows(B: int, T: int, documents: bytes | None, device: torch.device) -> Windows:
    start, length = document_bounds(B, T, documents)
    count = (length // WINDOW_STRIDE - 1).clamp(min=0)
    first = count.cumsum(0) - count
    num_windows, rows = int(count.sum()), B if documents is None else 1
    segments = torch.stack([torch.zeros_like(first), first, first + count], 1)[count > 0]

    start, stop, first, count = torch.stack([start, start + length, first, count]).to(device)
    window = torch.arange(num_windows, device=device)
    # skips documents without windows
    document = torch.searchsorted(first + count, window, right=True)
    window_start = start[document] + (window - first[document]) * WINDOW_STRIDE
    # [windows, 16]
    tile = window_start[:, None] + WINDOW_KEYS - 1 + torch.arange(WINDOW_STRIDE, device=device)
    token = torch.arange(B * T, device=device)
    document_of_token = torch.searchsorted(start, token, right=True) - 1
    first_window, index = first[document_of_token], token - start[document_of_token]
    sixteenth, num_there = index // WINDOW_STRIDE, count[document_of_token]
    return Windows(
        num_windows=num_windows,
        rows=rows,
        segments=None if documents is None or len(segments) == 1 else segments,
        window_start=window_start.int(),
        first_window=first_window.int(),
        windows_of_token=torch.stack(
            [
                torch.where(sixteenth < num_there, first_window + sixteenth, -1),
                torch.where(
                    (sixteenth > 0) & (sixteenth <= num_there), first_window + sixteenth - 1, -1
                ),
            ]
        ).int(),
        tile_of_token=torch.where(
            index >= WINDOW_KEYS - 1, first_window * WINDOW_STRIDE + index - WINDOW_KEYS + 1, -1
        ).int(),
        token_of_tile=torch.where(tile < stop[document, None], tile, -1).view(-1).int(),
    )


def pool_windows_reference(x: Tensor) -> Tensor:
    """Returns the means of one document's windows: [tokens, G, K] -> [windows, G, K]."""
    if len(x) < WINDOW_KEYS:
        return x[:0]
    return x.unfold(0, WINDOW_KEYS, WINDOW_STRIDE).mean(-1)


@triton.jit(do_not_specialize=["num_windows"])
def _pool_windows_kernel(
    x_ptr, pooled_ptr, window_start_ptr, num_windows,
    G: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    window = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)[:, None]  # [BLOCK_W, 1]
    mask = window < num_windows
    start = tl.load(window_start_ptr + window, mask=mask, other=0).to(tl.int64)
    columns = tl.arange(0, K)[None, :]
    offsets = (start * G + head) * K + columns  # [BLOCK_W, K]
    total = tl.zeros([BLOCK_W, K], tl.float32)
    for i in range(KEYS):
        total += tl.load(x_ptr + offsets + i * G * K, mask=mask, other=0.0).to(tl.float32)
    target = pooled_ptr + (head * num_windows + window) * K + columns
    tl.store(target, (total / KEYS).to(pooled_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_windows"])
def _unpool_kernel(
    d_pooled_ptr, target_ptr, windows_of_token_ptr, num_tokens, num_windows,
    G: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Adds to dk or dv [tokens, G, K] each token's part, 1 / KEYS, of its windows' gradients [G,
    windows, K]."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    mask = token < num_tokens
    columns = tl.arange(0, K)[None, :]
    d_pooled_ptr += head * num_windows * K
    offsets = (token.to(tl.int64) * G + head) * K + columns  # [BLOCK_T, K]
    total = tl.zeros([BLOCK_T, K], tl.float32)
    for i in tl.static_range(2):
        window = tl.load(windows_of_token_ptr + i * num_tokens + token, mask=mask, other=-1)
        total += tl.load(
            d_pooled_ptr + window.to(tl.int64) * K + columns, mask=window >= 0, other=0.0
        )
    total = total / KEYS + tl.load(target_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(target_ptr + offsets, total.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "first_head", "units", "group"])
def _rows_kernel(
    source_ptr, target_ptr, index_ptr, num_rows, first_head, units, group,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, TO_TILES: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Copies rows of some heads from tokens to tiles (TO_TILES), or from tiles to tokens; with ADD
    it adds them.

    Tokens are [tokens, H, K]. Of each, units * group heads are copied, from head first_head on.
    Tiles are [windows, units, 16, group, K]: a unit is the query heads of one key/value head. Row i
    of the target is row index_ptr[i] of the source, or 0 if index_ptr[i] is -1.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    head = tl.program_id(1)
    column = tl.arange(0, K)[None, :]
    mask = row < num_rows
    indices = tl.load(index_ptr + row, mask=mask, other=-1)
    token = (indices if TO_TILES else row).to(tl.int64)
    place = (row if TO_TILES else indices).to(tl.int64)
    in_tokens = (token * H + first_head + head) * K + column  # [BLOCK, K]
    in_tiles = (
        ((place // 16 * units + head // group) * 16 + place % 16) * group + head % group
    ) * K + column
    value = tl.load(
        source_ptr + (in_tokens if TO_TILES else in_tiles),
        mask=mask & (indices >= 0),
        other=0.0,
    )
    target = target_ptr + (in_tiles if TO_TILES else in_tokens)
    if ADD:
        value = (value.to(tl.float32) + tl.load(target, mask=mask, other=0.0).to(tl.float32)).to(
            value.dtype
        )
    tl.store(target, value, mask=mask)


def pool_windows(x: Tensor, windows: Windows) -> Tensor:
    """Returns windows' means [G, windows, K] of keys or values x [tokens, G, K], in x's dtype."""
    _, G, K = x.shape
    pooled = x.new_empty(G, windows.num_windows, K)
    if windows.num_windows:
        _pool_windows_kernel[(triton.cdiv(windows.num_windows, BLOCK_W), G)](
            x,
            pooled,
            windows.window_start,
            windows.num_windows,
            G=G,
            K=K,
            KEYS=WINDOW_KEYS,
            BLOCK_W=BLOCK_W,
        )
    return pooled


def add_unpooled(dk: Tensor, dv: Tensor, d_pooled: Tensor, windows: Windows) -> None:
    """Adds the gradients of pooled keys and values, [2, G, windows, K] float32, to dk and dv
    [tokens, G, K]."""
    N, G, K = dk.shape
    if windows.num_windows:
        for target, gradient in zip((dk, dv), d_pooled):
            _unpool_kernel[(triton.cdiv(N, BLOCK_T), G)](
                gradient, target, windows.windows_of_token, N, windows.num_windows,
                G=G, K=K, KEYS=WINDOW_KEYS, BLOCK_T=BLOCK_T,
            )  # fmt: skip


def _copy_rows(
    tokens: Tensor,
    tiles: Tensor,
    heads: range,
    units: int,
    windows: Windows,
    to_tiles: bool,
    add: bool,
):
    """Copies rows of query `heads` between tokens [tokens, H, K] and tiles, see `_rows_kernel`."""
    _, H, K = tokens.shape
    block = ROW_ELEMENTS // K
    index = windows.token_of_tile if to_tiles else windows.tile_of_token
    source, target = (tokens, tiles) if to_tiles else (tiles, tokens)
    _rows_kernel[(triton.cdiv(len(index), block), len(heads))](
        source, target, index, len(index), heads.start, units, len(heads) // units,
        H=H, K=K, BLOCK=block, TO_TILES=to_tiles, ADD=add,
    )  # fmt: skip


def to_tiles(x: Tensor, heads: range, units: int, windows: Windows) -> Tensor:
    """[tokens, H, K] -> [rows, windows of a row, 16 * heads, K]; places past the end of a document
    are 0."""
    tiles = x.new_empty(
        windows.rows, windows.num_windows // windows.rows, WINDOW_STRIDE * len(heads), x.shape[-1]
    )
    _copy_rows(x, tiles, heads, units, windows, to_tiles=True, add=False)
    return tiles


def _lse_to_tiles(lse: Tensor, heads: range, units: int, windows: Windows) -> Tensor:
    """[tokens, H] -> [rows, windows of a row, 16 * heads]; places past a document never attend."""
    token = windows.token_of_tile.long()
    in_tiles = lse[token.clamp(min=0), heads.start : heads.stop].masked_fill_(
        token[:, None] < 0, _NEVER_ATTENDS
    )
    in_tiles = in_tiles.view(windows.rows, -1, WINDOW_STRIDE, units, len(heads) // units)
    return in_tiles.transpose(2, 3).flatten(2)


def _lse_to_tokens(lse: Tensor, units: int, windows: Windows) -> Tensor:
    """[rows, windows of a row, 16 * heads] -> [tokens, heads]; tokens that see no window have 0."""
    in_tiles = lse.unflatten(2, (units, WINDOW_STRIDE, -1)).transpose(2, 3).flatten(0, 2).flatten(1)
    place = windows.tile_of_token.long()
    return in_tiles[place.clamp(min=0)].masked_fill_(place[:, None] < 0, 0.0)


def head_bytes(
    backend: str, num_windows: int, row_windows: int, longest: int | None, K: int, element_size: int
) -> int:
    """Returns a query head's bytes in backward: q, out, dout, dq in tiles, and `backward_workspace`
    of windows."""
    tile = WINDOW_STRIDE * K * element_size
    library = backward_workspace(backend, num_windows, tile, 0, row_windows, longest, WINDOW_STRIDE)
    return 4 * tile * num_windows + library


def heads_at_a_time(H: int, G: int, bytes_of_a_head: int, workspace_bytes: int) -> int:
    """Returns how many query heads' tiles fit, at least 1. For H = 32 and G = 8 it tries 32, 16, 8,
    4 and 2."""
    group = H // G
    sizes = [n * group for n in range(G, 0, -1) if G % n == 0] + [
        n for n in range(group - 1, 0, -1) if group % n == 0
    ]
    return next((size for size in sizes if size * bytes_of_a_head <= workspace_bytes), 1)


def head_ranges(
    q: Tensor, G: int, windows: Windows, backend: str, workspace_bytes: int
) -> Iterator[tuple[range, range]]:
    """Yields ranges of query heads, and for each the key/value heads that they share."""
    (_, H, K), group = q.shape, q.shape[1] // G
    row_windows, segments = windows.num_windows // windows.rows, windows.segments
    longest = None if segments is None else int((segments[:, 2] - segments[:, 1]).max())
    taken = head_bytes(backend, windows.num_windows, row_windows, longest, K, q.element_size())
    for heads in ranges(H, heads_at_a_time(H, G, taken, workspace_bytes)):
        yield heads, range(heads.start // group, (heads.stop - 1) // group + 1)


def _windows_first(pooled: Tensor, groups: range, windows: Windows) -> Tensor:
    """[G, windows, K] -> [rows, windows of a row, groups, K], a view of the heads `groups`."""
    some = pooled[groups.start : groups.stop]
    return some.unflatten(1, (windows.rows, -1)).permute(1, 2, 0, 3)


def compressed_forward(
    q: Tensor,
    pooled_k: Tensor,
    pooled_v: Tensor,
    windows: Windows,
    backend: str,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """q [tokens, H, K], pooled keys and values [G, windows, K] -> out [tokens, H, K], lse [tokens,
    H] float32."""
    if windows.num_windows == 0:
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for heads, groups in head_ranges(q, len(pooled_k), windows, backend, workspace_bytes):
        k, v = (_windows_first(x, groups, windows) for x in (pooled_k, pooled_v))
        tiles = to_tiles(q, heads, len(groups), windows)
        tiles, lse_n = full_forward(tiles, k, v, windows.segments, backend, WINDOW_STRIDE)
        _copy_rows(out, tiles, heads, len(groups), windows, to_tiles=False, add=False)
        lse[:, heads.start : heads.stop] = _lse_to_tokens(lse_n, len(groups), windows)
        del tiles, lse_n  # before the next heads' are made
    return out, lse


def compressed_backward(
    dout: Tensor, q: Tensor, pooled_k: Tensor, pooled_v: Tensor, out: Tensor, lse: Tensor,
    windows: Windows,
    backend: str, workspace_bytes: int, dq: Tensor,
) -> Tensor:  # fmt: skip
    """Adds to dq [tokens, H, K]; returns the gradients of pooled keys and values, [2, G, windows,
    K] float32."""
    d_pooled = torch.zeros(2, *pooled_k.shape, dtype=torch.float32, device=q.device)
    if windows.num_windows == 0:
        return d_pooled
    for heads, groups in head_ranges(q, len(pooled_k), windows, backend, workspace_bytes):
        k, v = (_windows_first(x, groups, windows) for x in (pooled_k, pooled_v))
        tiles = [to_tiles(x, heads, len(groups), windows) for x in (dout, q, out)]
        arguments = (
            tiles[0],
            tiles[1],
            k,
            v,
            tiles[2],
            _lse_to_tiles(lse, heads, len(groups), windows),
        )
        dq_n, *gradients = full_backward(*arguments, windows.segments, backend, WINDOW_STRIDE)
        _copy_rows(dq, dq_n, heads, len(groups), windows, to_tiles=False, add=True)
        for total, gradient in zip(d_pooled, gradients):
            _windows_first(total, groups, windows).add_(gradient)
        del tiles, arguments, dq_n, gradients, gradient  # before the next heads' are made
    return d_pooled
