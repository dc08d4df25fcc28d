"""Stretches of chunks, the matrices of their chunks, and the scan: shared by forward and backward
of the delta rule.

Launches take a stretch of up to 256 chunks, so that memory does not grow with the sequence.
`_chunk_kernel` writes G, (I + A)^-1 and the scores (q k^T) D of all its chunks in parallel.
`_scan_kernel` carries each state S^T through them one by one, some of V's columns in float32
registers. `rule.py` has the mathematics.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..attention.documents import document_bounds
from ..common import describe

CHUNK = 64  # tokens
PIECE = 64  # chunks from one kept state to the next
STRETCH = 256  # chunks whose states exist at once, and up to a piece more


class Tiles(NamedTuple):
    """Sizes of the programs of both scans and of the gradients."""

    columns: int  # columns of V in a program of a scan
    stages: int  # chunks that a scan loads at a time
    gradient_stages: int = 2
    warps: int = 4
    by_pointer: bool = False  # whether matrices are read without descriptors


HOPPER = Tiles(64, 3)
RTX_50 = Tiles(32, 2)  # has 99 KiB of shared memory
# GPUs before Hopper have as little. They lack descriptors: what Triton makes of these spills
# kilobytes of registers.
OLDER = Tiles(32, 2, gradient_stages=1, warps=8, by_pointer=True)


class Stretch(NamedTuple):
    """Chunks that the same launches take. Tables are int64 on the device.

    The tokens of one document in a stretch are a part, and divide into pieces. Rows of `parts` and
    `pieces` are: first token; one past the last; first chunk, counted in the stretch; row of the
    kept state at the start, -1 where the document starts; row of the kept state at the end of the
    first piece; document; 1 where the document ends, else 0.
    """

    chunks: Tensor  # [chunks, 2]: first token and one past the last
    pieces: Tensor  # [pieces, 7]
    parts: Tensor  # [parts, 7], the longest first


@functools.lru_cache(maxsize=4)
def stretches_of(B: int, T: int, documents: bytes | None, device: torch.device) -> list[Stretch]:
    """Divides documents, `as_bytes(segments)`, into stretches. All layers of a step share them."""
    start, length = document_bounds(B, T, documents)
    chunks, _, _ = _divide(start, length, CHUNK)
    pieces, document, is_first = _divide(start, length, PIECE * CHUNK)
    pieces_first_chunk = torch.searchsorted(chunks[:, 0].contiguous(), pieces[:, 0].contiguous())
    next_state = (~is_first).cumsum(0)  # pieces up to this one that begin at a kept state
    state = torch.where(is_first, -1, next_state - 1)
    ends = (pieces[:, 1] == (start + length)[document]).long()
    stretch_of_piece = pieces_first_chunk // STRETCH
    chunk_stops = torch.cat([pieces_first_chunk[1:], torch.tensor([len(chunks)])])
    stretches = []
    for number in stretch_of_piece.unique().tolist():
        is_inside = stretch_of_piece == number
        first_chunk = int(pieces_first_chunk[is_inside][0])
        stop_chunk = int(chunk_stops[is_inside][-1])
        columns = (
            pieces[:, 0],
            pieces[:, 1],
            pieces_first_chunk - first_chunk,
            state,
            next_state,
            document,
            ends,
        )
        rows = torch.stack(columns, dim=1)[is_inside]
        tables = chunks[first_chunk:stop_chunk], rows, _parts_of(rows)
        stretches.append(Stretch(*(table.contiguous().to(device) for table in tables)))
    return stretches


def _parts_of(pieces: Tensor) -> Tensor:
    """Joins the pieces of each document, rows as in `Stretch`; the longest part comes first."""
    _, counts = pieces[:, 5].unique_consecutive(return_counts=True)
    last = counts.cumsum(0) - 1
    parts = pieces[last - counts + 1]
    for column in (1, 6):  # one past the last token; whether the document ends
        parts[:, column] = pieces[last, column]
    return parts[(parts[:, 0] - parts[:, 1]).argsort(stable=True)]


def _divide(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts documents every `size` tokens.

    Returns rows (start, stop), the document of each row, and whether the row is its document's
    first.
    """
    count = (length + size - 1) // size
    document = torch.arange(len(count)).repeat_interleave(count)
    index = torch.arange(len(document)) - (count.cumsum(0) - count)[document]
    first = start[document] + size * index
    stop = torch.minimum(first + size, (start + length)[document])
    return torch.stack([first, stop], dim=1), document, index == 0


# Kernels. Their workspaces have a row for each chunk of the stretch and value head, padded to CHUNK
# tokens: (I + A)^-1 and the scores, zero at tokens that the chunk lacks, and `gates` [2, CHUNK], G
# and beta. Matrices (_d) are descriptors or pointers. A descriptor reads whole chunks, tokens of
# the next document included, which zeros cancel.


@triton.jit
def _invert(A, C: tl.constexpr, DTYPE: tl.constexpr):
    """Returns (I + A)^-1 for a strictly lower A [C, C], from pairs of blocks of 1, 2, 4, ... rows.

    [[X, 0], [L, Y]] has the inverse [[X', 0], [-Y' L X', Y']]. DTYPE rounds the products' factors.
    With keys of norm 1 and beta up to 1, all elements are at most 1.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    X = tl.where(i == j, 1.0, tl.where((i ^ j) == 1, -A, 0.0))
    for level in tl.static_range(1, 6):
        if (1 << level) < C:
            # A is zero above the diagonal.
            L = tl.where(((i >> level) ^ (j >> level)) == 1, A, 0.0).to(DTYPE)
            factor = X.to(DTYPE)
            product = tl.dot(factor, L, input_precision="ieee").to(DTYPE)
            X -= tl.dot(product, factor, input_precision="ieee")
    return X


@triton.jit
def _chunk_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, gates_ptr, inverse_ptr, scores_ptr, chunks_ptr, G: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Writes one chunk's gates, (I + A)^-1 and scores, for the value heads of one key head."""
    chunk = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    start = tl.load(chunks_ptr + 2 * chunk)
    stop = tl.load(chunks_ptr + 2 * chunk + 1)
    i, c = tl.arange(0, C), tl.arange(0, K)
    is_token = i < stop - start
    keys = (start * G + key_head) * K + (i[:, None] * (G * K) + c[None, :])
    q = tl.load(q_ptr + keys, mask=is_token[:, None], other=0.0)
    k = tl.load(k_ptr + keys, mask=is_token[:, None], other=0.0)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    for r in range(R):
        head = key_head * R + r
        g = tl.load(g_ptr + start * (G * R) + head + i * (G * R), mask=is_token, other=0.0)
        beta = tl.load(beta_ptr + start * (G * R) + head + i * (G * R), mask=is_token, other=0.0)
        total = tl.cumsum(g, axis=0)
        row = chunk * (G * R) + head
        tl.store(gates_ptr + row * (2 * C) + i, total)
        tl.store(gates_ptr + row * (2 * C) + C + i, beta)
        decay = tl.exp(
            tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf"))
        )
        matrix = row * (C * C) + (i[:, None] * C + i[None, :])
        tl.store(scores_ptr + matrix, (qk * decay).to(q.dtype))
        inverse = _invert(
            tl.where(i[:, None] > i[None, :], beta[:, None] * kk * decay, 0.0), C, DTYPE
        )
        tl.store(inverse_ptr + matrix, tl.where(is_token[:, None], inverse, 0.0).to(q.dtype))


@triton.jit
def load_gates(gates_ptr, row, C: tl.constexpr):
    """Returns G and beta [C] of a row of workspaces, and G of the last token."""
    gates = gates_ptr + row * (2 * C)
    i = tl.arange(0, C)
    return tl.load(gates + i), tl.load(gates + C + i), tl.load(gates + C - 1)


@triton.jit
def _pointers(matrix, row, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    return matrix + (row.to(tl.int64) * WIDTH + column) + (rows[:, None] * WIDTH + columns[None, :])


@triton.jit
def load_block(
    matrix, row, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, stop=None
):
    """Returns [ROWS, COLUMNS] of a matrix of WIDTH columns; by pointer, rows from `stop` are 0."""
    if not isinstance(matrix, tl.tensor):
        return matrix.load([row.to(tl.int32), column])
    elif stop is None:
        return tl.load(_pointers(matrix, row, column, WIDTH, ROWS, COLUMNS))
    else:
        is_row = (tl.arange(0, ROWS) < stop - row)[:, None]
        return tl.load(_pointers(matrix, row, column, WIDTH, ROWS, COLUMNS), mask=is_row, other=0.0)


@triton.jit
def store_block(matrix, row, column, block, WIDTH: tl.constexpr):
    """Writes a block of a matrix of WIDTH columns."""
    if isinstance(matrix, tl.tensor):
        tl.store(_pointers(matrix, row, column, WIDTH, block.shape[0], block.shape[1]), block)
    else:
        matrix.store([row.to(tl.int32), column], block)


@triton.jit
def _scan_kernel(
    q_d, k_d, v_d, inverse_d, scores_d, gates_ptr, parts_ptr, initial_ptr, kept_ptr, out_ptr,
    final_ptr, new_d, states_d, H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Carries BLOCK_V columns of a head's state through a part.

    Forward writes outputs, kept states and final states. Backward, without `out_ptr`, writes `new`
    and the state before each chunk. All products have the state's columns as rows, so that the
    state is an operand in registers.
    """
    part = parts_ptr + 7 * tl.program_id(0)
    head = tl.program_id(1) // (V // BLOCK_V)
    column = tl.program_id(1) % (V // BLOCK_V) * BLOCK_V
    start = tl.load(part)
    stop = tl.load(part + 1)
    chunk = tl.load(part + 2)
    kept = tl.load(part + 3)
    next_kept = tl.load(part + 4)
    document = tl.load(part + 5)
    i = tl.arange(0, C)
    c = tl.arange(0, K)
    d = column + tl.arange(0, BLOCK_V)
    own_state = head * (K * V) + (d[:, None] * K + c[None, :])  # in tensors [..., H, V, K]
    # In tensors [..., H, K, V].
    public_state = (document * H + head) * (K * V) + (d[:, None] + c[None, :] * V)
    S = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    if kept >= 0:
        S = tl.load(kept_ptr + kept * (H * K * V) + own_state)
    elif initial_ptr is not None:
        S = tl.load(initial_ptr + public_state)

    num_chunks = ((stop - start + C - 1) // C).to(tl.int32)
    for piece in range(0, num_chunks, PIECE):
        for n in tl.range(piece, tl.minimum(piece + PIECE, num_chunks), num_stages=STAGES):
            row = (chunk + n) * H + head  # index into workspaces
            first = start + n * C
            k = load_block(k_d, first, head // R * K, H // R * K, C, K, stop)
            v = load_block(v_d, first, head * V + column, H * V, C, BLOCK_V, stop)
            inverse = load_block(inverse_d, row * C, 0, C, C, C)
            total, beta, last = load_gates(gates_ptr, row, C)
            operand = S.to(k.dtype)
            held = tl.dot(operand, tl.trans(k), input_precision="ieee")
            change = (tl.trans(v).to(tl.float32) - held * tl.exp(total)[None, :]) * beta[None, :]
            new = tl.dot(change.to(k.dtype), tl.trans(inverse), input_precision="ieee")
            if out_ptr is not None:
                q = load_block(q_d, first, head // R * K, H // R * K, C, K, stop)
                scores = load_block(scores_d, row * C, 0, C, C, C)
                out = tl.dot(operand, tl.trans(q), input_precision="ieee") * tl.exp(total)[None, :]
                out = tl.dot(new.to(k.dtype), tl.trans(scores), out, input_precision="ieee")
                values = ((start + n * C) * H + head) * V + (i[None, :] * (H * V) + d[:, None])
                tl.store(
                    out_ptr + values, out.to(k.dtype), mask=(i < stop - start - n * C)[None, :]
                )
            else:
                store_block(states_d, row * V + column, 0, operand, K)
                store_block(new_d, row * C, column, tl.trans(new.to(k.dtype)), V)
            rest = tl.exp(last - total)
            S = tl.dot(
                (new * rest[None, :]).to(k.dtype), k, S * tl.exp(last), input_precision="ieee"
            )
        if out_ptr is not None and piece + PIECE < num_chunks:
            tl.store(kept_ptr + next_kept * (H * K * V) + own_state, S)
            next_kept += 1

    if out_ptr is not None:
        if tl.load(part + 6) == 0:
            tl.store(kept_ptr + next_kept * (H * K * V) + own_state, S)
        elif final_ptr is not None:
            tl.store(final_ptr + public_state, S)


def sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    """Returns the constants that all kernels over descriptors take."""
    return {"R": v.shape[2] // k.shape[2], "K": k.shape[3], "V": v.shape[3], "C": CHUNK}


@functools.cache
def tiles_of(device: torch.device) -> Tiles:
    """Returns the fastest sizes on a device. CPUs run Triton's interpreter as Hopper."""
    if device.type != "cuda":
        return HOPPER
    major, _ = torch.cuda.get_device_capability(device)
    if major < 9:
        return OLDER
    return RTX_50 if major == 12 else HOPPER


def scan_options(k: Tensor, v: Tensor) -> tuple[int, dict[str, int]]:
    """Returns the programs per part of both scans, and their options."""
    H, V = v.shape[2:]
    tiles = tiles_of(k.device)
    block = min(tiles.columns, V)
    stages = 1 if k.dtype == torch.float32 else tiles.stages
    return H * V // block, {
        "H": H,
        "BLOCK_V": block,
        "STAGES": stages,
        "num_warps": tiles.warps,
        **sizes(k, v),
    }


class Chunks(NamedTuple):
    """Matrices and gates of a stretch's chunks, written by `_chunk_kernel`."""

    gates: Tensor  # [chunks, H, 2, CHUNK] float32
    inverse: Tensor  # [chunks, H, CHUNK, CHUNK]
    scores: Tensor  # [chunks, H, CHUNK, CHUNK]


def _empty_chunks(k: Tensor, v: Tensor, stretch: Stretch) -> Chunks:
    shape = len(stretch.chunks), v.shape[2]
    matrices = (k.new_empty(*shape, CHUNK, CHUNK) for _ in range(2))
    return Chunks(k.new_empty(*shape, 2, CHUNK, dtype=torch.float32), *matrices)


def _launch_chunks(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, stretch: Stretch, chunks: Chunks
) -> None:
    G = k.shape[2]
    _chunk_kernel[(len(stretch.chunks), G)](
        q, k, g, beta, *chunks, stretch.chunks, G=G, R=g.shape[2] // G, K=k.shape[3], C=CHUNK,
        DTYPE=tl.float32 if q.dtype == torch.float32 else tl.float16, num_warps=4,
    )  # fmt: skip


def prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, stretches: list[Stretch]
) -> Iterator[tuple[Stretch, Chunks, list[Callable]]]:
    """Yields each stretch, its chunks' matrices, and launches that make the next matrices."""
    chunks = _empty_chunks(k, v, stretches[0])
    _launch_chunks(q, k, g, beta, stretches[0], chunks)
    for stretch, following in itertools.pairwise(stretches):
        upcoming = _empty_chunks(k, v, following)
        launch = functools.partial(_launch_chunks, q, k, g, beta, following, upcoming)
        yield stretch, chunks, [launch]
        chunks = upcoming
    yield stretches[-1], chunks, []


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launch_beside(device: torch.device, scan: Callable, launches: list[Callable]) -> None:
    """Launches a scan, and beside it kernels for the multiprocessors that it leaves free. They
    share no data."""
    if device.type != "cuda":
        for launch in (scan, *launches):
            launch()
        return
    stream = torch.cuda.current_stream(device)
    second = _second_stream(device)
    second.wait_stream(stream)
    scan()
    with torch.cuda.stream(second):
        for launch in launches:
            launch()
    stream.wait_stream(second)


def as_matrix(x: Tensor, width: int, rows: int, columns: int) -> Tensor | TensorDescriptor:
    """Describes x as `describe` does, or returns x where kernels read it by pointer."""
    return x if tiles_of(x.device).by_pointer else describe(x, width, rows, columns)


def describe_inputs(
    q: Tensor, k: Tensor, v: Tensor, block_v: int
) -> list[Tensor | TensorDescriptor]:
    """Describes q, k and v for a scan, which reads `block_v` columns of V."""
    G, K = k.shape[2:]
    H, V = v.shape[2:]
    return [as_matrix(x, G * K, CHUNK, K) for x in (q, k)] + [as_matrix(v, H * V, CHUNK, block_v)]


def describe_matrices(chunks: Chunks) -> list:
    """Describes the inverses and the scores for a scan; the gates follow as they are."""
    matrices = [as_matrix(x, CHUNK, CHUNK, CHUNK) for x in (chunks.inverse, chunks.scores)]
    return [*matrices, chunks.gates]


def scan_states(
    k: Tensor, v: Tensor, inputs: Sequence, matrices: Sequence, rows: Tensor,
    initial: Tensor | None, kept: Tensor, *written: Tensor | TensorDescriptor | None,
) -> Callable:  # fmt: skip
    """Returns the launch that carries states through `rows`, a stretch's parts or pieces.

    `written` are the output, final states, `new`, and the states before each chunk. None of them is
    not written.
    """
    programs, options = scan_options(k, v)
    launch = _scan_kernel[(len(rows), programs)]
    tensors = *inputs, *matrices, rows, initial, kept, *written
    return functools.partial(launch, *tensors, **options, PIECE=PIECE)


def kept_rows(q: Tensor) -> int:
    """Returns the kept states of a batch of q's size, however its tokens are divided into
    documents, or a few more."""
    return (q.shape[0] * q.shape[1] - 1) // (PIECE * CHUNK)
