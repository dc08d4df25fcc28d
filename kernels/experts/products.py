"""Matrix products of a mixture's experts, over rows that are sorted by expert.

An entry is a token's j-th expert, number n k + j. Its place is its position among the entries
sorted by expert. Rows of a product are entries by place. Rows of x and of dy are gathered where
they are loaded, and results go back to the order of entries where they are stored, so neither is
copied.

A tile is up to ROWS places of one expert and some columns. How many tiles there are is known on the
GPU alone: programs go through all of them in turns. No sum is shared by programs.

An adapter adds a second product to some: narrow rows, by place, times a narrow matrix of each
expert.

Matrices are read by descriptors, which give zeros past the end. Past an expert's last row or column
they give its neighbour's: such results are not stored, or the other factor has zeros. Widths are
multiples of 8 elements.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import describe
from ..gated_activation import activate
from .route import sort_by_expert

SUMMED = 1024  # columns that a program sums over a token's experts
RANK_DEPTH = 32  # most of an adapter's rank that a step multiplies by


class Tile(NamedTuple):
    """Sizes of a product's tiles: a step multiplies [ROWS, depth] by [depth, columns]."""

    columns: int
    depth: int
    stages: int  # steps in flight
    warps: int
    persistent: bool = False  # a program per multiprocessor; else one per tile


# By product, the fastest in benchmarks/bench_experts.py on an H100. "gate_up" has as many columns
# of up beside gate.
HOPPER = {
    "gate_up": Tile(128, 64, 4, 8),
    "down": Tile(256, 64, 3, 8, True),
    "d_hidden": Tile(256, 64, 4, 8),
    "d_down": Tile(256, 64, 3, 8),
    "d_gate_up": Tile(256, 64, 3, 8),
    "dx": Tile(256, 64, 3, 8, True),
    "narrow": Tile(128, 64, 3, 8),
}
OLDER = dict.fromkeys(HOPPER, Tile(128, 32, 3, 8)) | {"gate_up": Tile(64, 32, 3, 8)}
EXACT = dict.fromkeys(HOPPER, Tile(64, 32, 2, 8)) | {"gate_up": Tile(32, 32, 2, 8)}  # float32


def rows_of(x: Tensor) -> int:
    """Returns the rows of a tile."""
    return 64 if x.dtype == torch.float32 else 128


def tile_of(product: str, x: Tensor) -> Tile:
    if x.dtype == torch.float32:
        return EXACT[product]
    return (OLDER if x.is_cuda and _capability(x.device) < (9, 0) else HOPPER)[product]


def fitted(tile: Tile, columns: int) -> Tile:
    """Returns a tile with fewer columns, where a product has no more."""
    return tile._replace(columns=min(tile.columns, max(16, triton.next_power_of_2(columns))))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1


class Groups(NamedTuple):
    """Entries by expert, see `sort_by_expert`, and the tiles of their rows."""

    order: Tensor
    offsets: Tensor
    # [as many as there can be, 3] int32: expert, first place, place past the expert's last
    tiles: Tensor
    count: Tensor  # [1] int32: number of tiles, which come first


class LowRank(NamedTuple):
    """An adapter's term of a product: each row times the weight of its expert."""

    rows: Tensor  # [N k, r], sorted by expert
    weight: Tensor  # [E, M, r]; transposed [E, r, M]


def by_place(groups: Groups) -> Groups:
    """Returns the groups for rows that are sorted by expert already."""
    return groups._replace(
        order=torch.arange(len(groups.order), dtype=torch.int32, device=groups.order.device)
    )


def group(experts: Tensor, num_experts: int, x: Tensor) -> Groups:
    """Groups the entries of experts [N, k] for products of x, without waiting for the GPU.

    For 3 entries of expert 0 and 1 of expert 1 in tiles of 2 rows, the tiles are (0, 0, 3), (0, 2,
    3), (1, 3, 4).
    """
    order, offsets = sort_by_expert(experts, num_experts)
    rows = rows_of(x)
    counts = (offsets.diff() + rows - 1) // rows
    ends = counts.cumsum(0)
    tile = torch.arange(experts.numel() // rows + num_experts, device=experts.device)
    expert = torch.searchsorted(ends, tile, right=True).clamp(max=num_experts - 1)
    first = offsets[expert] + (tile - (ends - counts)[expert]) * rows
    tiles = torch.stack([expert, first, offsets[expert + 1]], dim=1).int()
    return Groups(order, offsets, tiles, ends[-1:].int())


@triton.jit
def _tile(tiles_ptr, number):
    """Returns a tile's expert, its first place, and the place past the expert's last."""
    tile = tiles_ptr + 3 * number
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def _gathered(ptr, order_ptr, places, stop, K: tl.constexpr, D: tl.constexpr):
    """Returns the entries of places, and pointers to their tokens' rows; any row past `stop`."""
    entries = tl.load(order_ptr + places, mask=places < stop, other=0)
    return entries, ptr + (entries // K).to(tl.int64)[:, None] * D


@triton.jit
def _load_columns(rows, k, D: tl.constexpr, DEPTH: tl.constexpr):
    """Returns columns k to k + DEPTH - 1 of rows of D elements, zeros past the end."""
    depth = k + tl.arange(0, DEPTH)
    if D % DEPTH == 0:
        columns = tl.load(rows + depth[None, :])
    else:
        columns = tl.load(rows + depth[None, :], mask=(depth < D)[None, :], other=0.0)
    return columns


@triton.jit
def _add_low_rank(
    total, low_d, factor_d, first, row, column, RANK: tl.constexpr, STEP: tl.constexpr,
    TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Adds rows from `first` on times the matrix that begins in `row`.

    Past the rank one factor has zeros.
    """
    if RANK > 0:
        # Unrolled, its buffers would stand beside each other.
        for k in tl.range(0, RANK, STEP, num_stages=1):
            rows = low_d.load([first, k])
            if TRANSPOSED:
                factor = factor_d.load([row + k, column])
            else:
                factor = tl.trans(factor_d.load([row, k]))
            total = tl.dot(rows, factor, total, input_precision="ieee")
    return total


@triton.jit
def _gate_up_kernel(
    x_ptr, gate_up_d, order_ptr, tiles_ptr, count_ptr, weights_ptr, kept_ptr, hidden_ptr, low_d,
    factor_d, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, RANK: tl.constexpr,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Writes gate and up of a tile, and weight * silu(gate) * up."""
    COLUMN_TILES: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    for number in tl.range(
        tl.program_id(0), tl.load(count_ptr) * COLUMN_TILES, tl.num_programs(0), flatten=PERSISTENT
    ):
        expert, first, stop = _tile(tiles_ptr, number // COLUMN_TILES)
        column = number % COLUMN_TILES * COLUMNS
        places = first + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        entries, x_rows = _gathered(x_ptr, order_ptr, places, stop, K, D)
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        row = expert * (2 * F) + column
        for k in range(0, D, DEPTH):
            x = _load_columns(x_rows, k, D, DEPTH)
            gate = tl.dot(x, tl.trans(gate_up_d.load([row, k])), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(gate_up_d.load([row + F, k])), up, input_precision="ieee")
        gate = _add_low_rank(gate, low_d, factor_d, first, row, 0, RANK, STEP, False)
        up = _add_low_rank(up, low_d, factor_d, first, row + F, 0, RANK, STEP, False)

        dtype = hidden_ptr.dtype.element_ty
        gate, up = gate.to(dtype), up.to(dtype)
        is_stored = (places < stop)[:, None] & (columns < F)[None, :]
        place = places.to(tl.int64)[:, None]
        if kept_ptr is not None:
            kept = kept_ptr + place * (2 * F) + columns[None, :]
            tl.store(kept, gate, mask=is_stored)
            tl.store(kept + F, up, mask=is_stored)
        value, _ = activate(gate.to(tl.float32), "silu")
        weight = tl.load(weights_ptr + entries).to(tl.float32)[:, None]
        tl.store(
            hidden_ptr + place * F + columns[None, :],
            (value * up.to(tl.float32) * weight).to(dtype),
            mask=is_stored,
        )


@triton.jit
def _narrow_kernel(
    rows_ptr, weight_d, order_ptr, tiles_ptr, count_ptr, out_ptr, K: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Writes a tile of tokens' rows [D] times weights [WIDTH, D], by place."""
    COLUMN_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    for number in tl.range(
        tl.program_id(0), tl.load(count_ptr) * COLUMN_TILES, tl.num_programs(0), flatten=PERSISTENT
    ):
        expert, first, stop = _tile(tiles_ptr, number // COLUMN_TILES)
        column = number % COLUMN_TILES * COLUMNS
        places = first + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        _, rows = _gathered(rows_ptr, order_ptr, places, stop, K, D)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, D, DEPTH):
            x = _load_columns(rows, k, D, DEPTH)
            weight = tl.trans(weight_d.load([expert * WIDTH + column, k]))
            total = tl.dot(x, weight, total, input_precision="ieee")
        out = out_ptr + places.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        is_stored = (places < stop)[:, None] & (columns < WIDTH)[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def _project_kernel(
    rows_d, weight_d, order_ptr, tiles_ptr, count_ptr, out_ptr, low_d, factor_d, INTO: tl.constexpr,
    OUT_OF: tl.constexpr, TRANSPOSED: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Writes a tile of rows [places, INTO] times weights [OUT_OF, INTO], transposed [INTO, OUT_OF],
    by entry."""
    COLUMN_TILES: tl.constexpr = (OUT_OF + COLUMNS - 1) // COLUMNS
    for number in tl.range(
        tl.program_id(0), tl.load(count_ptr) * COLUMN_TILES, tl.num_programs(0), flatten=PERSISTENT
    ):
        expert, first, stop = _tile(tiles_ptr, number // COLUMN_TILES)
        column = number % COLUMN_TILES * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, INTO, DEPTH):
            rows = rows_d.load([first, k])
            if TRANSPOSED:
                weight = weight_d.load([expert * INTO + k, column])
            else:
                weight = tl.trans(weight_d.load([expert * OUT_OF + column, k]))
            total = tl.dot(rows, weight, total, input_precision="ieee")
        row = expert * RANK if TRANSPOSED else expert * OUT_OF + column
        total = _add_low_rank(total, low_d, factor_d, first, row, column, RANK, STEP, TRANSPOSED)
        places = first + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        is_row = places < stop
        entries = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
        out = out_ptr + entries[:, None] * OUT_OF + columns[None, :]
        tl.store(
            out,
            total.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (columns < OUT_OF)[None, :],
        )


@triton.jit
def _split(d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the left and the right half of the columns."""
    return tl.split(d.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))


@triton.jit
def _load_pair(kept_ptr, places, stop, columns, F: tl.constexpr):
    """Returns gate and up of some columns."""
    is_there = (places < stop)[:, None] & (columns < F)[None, :]
    pair = kept_ptr + places.to(tl.int64)[:, None] * (2 * F) + columns[None, :]
    return tl.load(pair, mask=is_there, other=0.0), tl.load(pair + F, mask=is_there, other=0.0)


@triton.jit
def _store_d_pair(
    d, weight, gate, up, d_kept_ptr, hidden_ptr, places, stop, columns, F: tl.constexpr
):
    """Does for some columns what `_d_hidden_kernel` does from d = dy down on; returns sums of d *
    silu(gate) * up."""
    is_stored = (places < stop)[:, None] & (columns < F)[None, :]
    place = places.to(tl.int64)[:, None]
    value, slope = activate(gate.to(tl.float32), "silu")
    hidden = value * up.to(tl.float32)
    dtype = d_kept_ptr.dtype.element_ty
    if hidden_ptr is not None:
        tl.store(
            hidden_ptr + place * F + columns[None, :], (hidden * weight).to(dtype), mask=is_stored
        )
    d_h = d * weight
    pair = d_kept_ptr + place * (2 * F) + columns[None, :]
    tl.store(pair, (d_h * up.to(tl.float32) * slope).to(dtype), mask=is_stored)
    tl.store(pair + F, (d_h * value).to(dtype), mask=is_stored)
    return tl.sum(d * hidden, axis=1)


@triton.jit
def _d_hidden_kernel(
    dy_ptr, down_d, order_ptr, tiles_ptr, count_ptr, weights_ptr, kept_ptr, d_kept_ptr, hidden_ptr,
    d_weights_ptr, low_d, factor_d, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    RANK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a tile's gate and up, which may overwrite these, and hidden as
    `_gate_up_kernel` does.

    Gradients of the entries' weights are written as sums over the tile's columns. An eighth of the
    columns at a time has room in registers: its gate and up are read while the eighth before is
    worked on.
    """
    COLUMN_TILES: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    EIGHTH: tl.constexpr = COLUMNS // 8
    for number in tl.range(
        tl.program_id(0), tl.load(count_ptr) * COLUMN_TILES, tl.num_programs(0), flatten=PERSISTENT
    ):
        expert, first, stop = _tile(tiles_ptr, number // COLUMN_TILES)
        column_tile = number % COLUMN_TILES
        column = column_tile * COLUMNS
        places = first + tl.arange(0, ROWS)
        entries, dy_rows = _gathered(dy_ptr, order_ptr, places, stop, K, D)
        columns = column + tl.arange(0, EIGHTH)
        gate, up = _load_pair(kept_ptr, places, stop, columns, F)
        weight = tl.load(weights_ptr + entries).to(tl.float32)[:, None]
        d = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, D, DEPTH):
            dy = _load_columns(dy_rows, k, D, DEPTH)
            d = tl.dot(dy, down_d.load([expert * D + k, column]), d, input_precision="ieee")
        d = _add_low_rank(d, low_d, factor_d, first, expert * RANK, column, RANK, STEP, True)

        d_weight = tl.zeros([ROWS], tl.float32)
        halves = _split(d, ROWS, COLUMNS)
        for i in tl.static_range(2):
            quarters = _split(halves[i], ROWS, COLUMNS // 2)
            for j in tl.static_range(2):
                eighths = _split(quarters[j], ROWS, COLUMNS // 4)
                for k in tl.static_range(2):
                    next_gate, next_up = _load_pair(kept_ptr, places, stop, columns + EIGHTH, F)
                    d_weight += _store_d_pair(
                        eighths[k],
                        weight,
                        gate,
                        up,
                        d_kept_ptr,
                        hidden_ptr,
                        places,
                        stop,
                        columns,
                        F,
                    )
                    columns += EIGHTH
                    gate, up = next_gate, next_up
        tl.store(d_weights_ptr + entries * COLUMN_TILES + column_tile, d_weight, mask=places < stop)


@triton.jit
def _d_weight_kernel(
    tokens_ptr, rows_d, order_ptr, offsets_ptr, out_ptr, K: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Writes [ROWS, COLUMNS] of the sum over an expert's places of token [D] times row [WIDTH].

    The result is [D, WIDTH], transposed [WIDTH, D]. With ADD it is added to `out_ptr`.
    """
    COLUMN_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = COLUMN_TILES * ((D + ROWS - 1) // ROWS)
    expert = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    column = tile % COLUMN_TILES * COLUMNS
    d = tile // COLUMN_TILES * ROWS + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    start = tl.load(offsets_ptr + expert)
    stop = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    _, token_rows = _gathered(tokens_ptr, order_ptr, start + tl.arange(0, DEPTH), stop, K, D)
    for first in range(start, stop, DEPTH):
        places = first + tl.arange(0, DEPTH)
        is_there = (
            (places < stop)[:, None]
            if D % ROWS == 0
            else (places < stop)[:, None] & (d < D)[None, :]
        )
        tokens = tl.load(token_rows + d[None, :], mask=is_there, other=0.0)
        # Rows of the next step's tokens.
        _, token_rows = _gathered(tokens_ptr, order_ptr, places + DEPTH, stop, K, D)
        total = tl.dot(
            tl.trans(tokens), rows_d.load([first, column]), total, input_precision="ieee"
        )
    out = d[:, None] + columns[None, :] * D if TRANSPOSED else d[:, None] * WIDTH + columns[None, :]
    out += expert.to(tl.int64) * (D * WIDTH) + out_ptr
    is_stored = (d < D)[:, None] & (columns < WIDTH)[None, :]
    if ADD:
        total += tl.load(out, mask=is_stored, other=0.0)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def _sum_kernel(rows_ptr, out_ptr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the sum over j of rows [N, K, D], for one token and BLOCK_D columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for j in tl.static_range(K):
        total += tl.load(rows_ptr + (token * K + j) * D + columns, mask=columns < D, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * D + columns, total.to(out_ptr.dtype.element_ty), mask=columns < D)


def _options(tile: Tile, x: Tensor) -> dict[str, int]:
    sizes = {"ROWS": rows_of(x), "COLUMNS": tile.columns, "DEPTH": tile.depth}
    return {**sizes, "num_warps": tile.warps, "num_stages": tile.stages}


def _go_through_tiles(
    kernel: triton.JITFunction, tile: Tile, groups: Groups, columns: int, x: Tensor, *args, **sizes
):
    """Launches a kernel over all tiles of so many columns."""
    programs = len(groups.tiles) * triton.cdiv(columns, tile.columns)
    if tile.persistent:
        programs = min(programs, _multiprocessors(x.device))
    tables = groups.order, groups.tiles, groups.count
    kernel[(programs,)](
        *args[:2], *tables, *args[2:], PERSISTENT=tile.persistent, **sizes, **_options(tile, x)
    )


def _low_rank(low: LowRank | None, columns: int, transposed: bool) -> dict:
    """Returns the arguments of `_add_low_rank`."""
    if low is None:
        return {"low_d": None, "factor_d": None, "RANK": 0, "STEP": RANK_DEPTH}
    rank = low.rows.shape[1]
    step = min(RANK_DEPTH, max(16, triton.next_power_of_2(rank)))
    block = (step, columns) if transposed else (columns, step)
    low_d = describe(low.rows, rank, rows_of(low.rows), step)
    factor_d = describe(low.weight, low.weight.shape[2], *block)
    return {"low_d": low_d, "factor_d": factor_d, "RANK": rank, "STEP": step}


def narrow(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Returns tokens' rows [N, D] times weight [E, r, D] of each entry's expert.

    The result is [N k, r], sorted by expert.
    """
    D, r = rows.shape[1], weight.shape[1]
    out = rows.new_empty(len(groups.order), r)
    if not rows.is_meta:
        tile = fitted(tile_of("narrow", rows), r)
        tensors = (rows, describe(weight, D, tile.columns, tile.depth), out)
        sizes = {"D": D, "WIDTH": r}
        _go_through_tiles(
            _narrow_kernel, tile, groups, r, rows, *tensors, K=len(out) // len(rows), **sizes
        )
    return out


def gate_up_product(
    x: Tensor, gate_up: Tensor, groups: Groups, weights: Tensor, kept: Tensor | None,
    hidden: Tensor, low: LowRank | None = None,
) -> None:  # fmt: skip
    """Writes weight * silu(gate) * up by place into hidden [N k, F]; gate and up into kept [N k, 2
    F], if given.

    Tokens are x [N, D], matrices gate_up [E, 2 F, D], weights [N, k], and low's matrices [E, 2 F,
    r].
    """
    if x.is_meta:
        return
    F, tile = hidden.shape[1], tile_of("gate_up", x)
    tensors = x, describe(gate_up, x.shape[1], tile.columns, tile.depth), weights, kept, hidden
    sizes = {"K": weights.shape[1], "D": x.shape[1], "F": F, **_low_rank(low, tile.columns, False)}
    _go_through_tiles(_gate_up_kernel, tile, groups, F, x, *tensors, **sizes)


def project(
    rows: Tensor,
    weight: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    transposed: bool = False,
    low: LowRank | None = None,
) -> None:
    """Writes rows [N k, K], by place, times weight [E, M, K], transposed [E, K, M], into out [N, k,
    M], by entry."""
    if rows.is_meta:
        return
    K = rows.shape[1]
    M = out.shape[-1]
    tile = tile_of("dx" if transposed else "down", rows)
    block = (tile.depth, tile.columns) if transposed else (tile.columns, tile.depth)
    tensors = (
        describe(rows, K, rows_of(rows), tile.depth),
        describe(weight, M if transposed else K, *block),
        out,
    )
    sizes = {
        "INTO": K,
        "OUT_OF": M,
        "TRANSPOSED": transposed,
        **_low_rank(low, tile.columns, transposed),
    }
    _go_through_tiles(_project_kernel, tile, groups, M, rows, *tensors, **sizes)


def gate_up_gradients(
    dy: Tensor, down: Tensor, groups: Groups, weights: Tensor, kept: Tensor, d_kept: Tensor,
    hidden: Tensor | None, low: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """Writes the gradients of gate and up into d_kept, which may be kept, and hidden as in
    `gate_up_product`.

    Matrices of low are [E, r, F].

    Returns:
        The gradient of weights [N, k], float32.
    """
    F, tile = down.shape[-1], tile_of("d_hidden", dy)
    partial = dy.new_empty(*weights.shape, triton.cdiv(F, tile.columns), dtype=torch.float32)
    if not dy.is_meta:
        tensors = (
            dy,
            describe(down, F, tile.depth, tile.columns),
            weights,
            kept,
            d_kept,
            hidden,
            partial,
        )
        sizes = {
            "K": weights.shape[1],
            "D": dy.shape[1],
            "F": F,
            **_low_rank(low, tile.columns, True),
        }
        _go_through_tiles(_d_hidden_kernel, tile, groups, F, dy, *tensors, **sizes)
    return partial.sum(-1)


def weight_gradient(
    tokens: Tensor,
    rows: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    transposed: bool = False,
    add: bool = False,
) -> None:
    """Writes or adds each expert's sum over its places of token [D] times row [W] into out [E, D,
    W].

    Args:
        tokens: [N, D].
        rows: [N k, W], by place.
        out: of any floating dtype; sums are float32. Experts without tokens get zeros.
        transposed: whether out is [E, W, D].
        add: whether to add to out.
    """
    if tokens.is_meta:
        return
    D, W = tokens.shape[1], rows.shape[1]
    tile = fitted(tile_of("d_gate_up" if transposed else "d_down", tokens), W)
    programs = len(out) * triton.cdiv(D, rows_of(tokens)) * triton.cdiv(W, tile.columns)
    _d_weight_kernel[(programs,)](
        tokens, describe(rows, W, tile.depth, tile.columns), groups.order, groups.offsets, out,
        K=len(rows) // len(tokens), D=D, WIDTH=W, TRANSPOSED=transposed, ADD=add,
        **_options(tile, tokens),
    )  # fmt: skip


def sum_entries(rows: Tensor, out: Tensor) -> None:
    """Writes the sum over j of rows [N, k, D] into out [N, D]."""
    if rows.is_meta:
        return
    N, K, D = rows.shape
    block = min(SUMMED, triton.next_power_of_2(D))
    _sum_kernel[(N, triton.cdiv(D, block))](rows, out, K=K, D=D, BLOCK_D=block, num_warps=4)
