"""Documents of a packed batch, and the calls of a library's kernels that attend to them.

All rows of a batch are one line of tokens here: row 2 of rows of T tokens begins at token 2 T. A long document has a
call of its own. Neighbouring short documents attend together in one call, with a table of where each begins.

A library that builds a plan for each new length gets few lengths: a document that attends alone is rounded up to a
multiple of a sixteenth of the power of two below it. That adds 4% to its work on average and 13% at most.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Tokens of the longest document that attends together with others where cuDNN attends to long ones. cuDNN's kernel is
# faster but costs more per call. Both take as long at 1,800 tokens with 8 key/value heads, at 5,000 with one
# (`python -m benchmarks.bench_packed_attention`, one H200).
LONGEST_TOGETHER = 2048
TOGETHER_TOKENS = 32_768  # tokens of one call at most, each document counted with SPACING more: calls need memory
SPACING = 128  # tokens between documents in the float32 sums of FlashAttention's backward
_TILE = 128  # tokens of the library's tiles


@dataclass
class Documents:
    """Documents packed in each row of a batch, on the CPU, because the host launches attention per document.

    Ranks that share a sequence have each their own positions, and the segments and lengths of whole sequences.
    """

    segments: Tensor | None  # int64 [S, 3], rows (batch row, start, stop); None where each row is one document
    positions_BT: Tensor  # int64, each token's position in its document
    lengths: list[int]  # tokens of each document

    @property
    def are_whole(self) -> bool:
        """Whether the positions cover whole sequences, not one rank's share."""
        return self.positions_BT.numel() == sum(self.lengths)


def find_documents(document_ids: Tensor) -> Documents:
    """Returns the documents packed in each row, from integers [B, T] that do not decrease in a row.

    Raises:
        ValueError: ids that decrease within a row.
    """
    ids_BT = document_ids.cpu()
    B, T = ids_BT.shape
    if bool((ids_BT[:, 1:] < ids_BT[:, :-1]).any()):
        raise ValueError("document_ids must not decrease within a row: documents are packed one after another")
    first_BT = torch.ones(B, T, dtype=torch.bool)
    first_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    rows, starts = first_BT.nonzero(as_tuple=True)
    stops = torch.where(rows == rows.roll(-1), starts.roll(-1), T)
    stops[-1] = T
    index_BT = torch.arange(T).expand(B, T)
    positions_BT = index_BT - torch.where(first_BT, index_BT, 0).cummax(dim=1).values
    segments = torch.stack([rows, starts, stops], dim=1)
    return Documents(None if len(segments) == B else segments, positions_BT, (stops - starts).tolist())


class Span(NamedTuple):
    """Neighbouring documents: tokens `start` to `stop` - 1 of the batch."""

    start: int
    stop: int
    segments: Tensor  # int64 [S, 3], rows (0, start, stop) counted from the span's start


def split_by_length(segments: Tensor, T: int, long_from: int) -> tuple[Tensor, list[Span]]:
    """Divides the documents of rows of T tokens into short ones and spans of long ones.

    Documents of 3, 9, 9, 4 and 9 tokens with long_from=9 are two short ones and two spans: (9, 9) and (9).

    Args:
        segments: the documents, int64 [S, 3] on the CPU, as `document_calls` takes them.
        long_from: tokens of the shortest long document.

    Returns:
        The rows of `segments` that are short documents, and the spans in order.
    """
    lengths = segments[:, 2] - segments[:, 1]
    long = segments[lengths >= long_from]
    spans: list[list[tuple[int, int]]] = []
    for start, stop in sorted((row * T + start, row * T + stop) for row, start, stop in long.tolist()):
        if not spans or spans[-1][-1][1] != start:
            spans.append([])
        spans[-1].append((start, stop))
    return segments[lengths < long_from], [
        Span(first, span[-1][1], torch.tensor([(0, start - first, stop - first) for start, stop in span]))
        for span in spans
        for first in [span[0][0]]
    ]


class Call(NamedTuple):
    """Tokens `start` to `stop` - 1 of the batch: one document that attends alone, or several that attend together."""

    start: int
    stop: int
    ends: tuple[int, ...] = ()  # ends of documents that attend together, counted from `start`; (): one attends alone
    offsets: Tensor | None = None  # 0 and `ends`, int32 on the device
    longest: int = 0  # tokens of the longest that attends together, or a little more; kernels skip what is not there


def divide(documents: Iterable[tuple[int, int]], longest_together: float, most_tokens: int) -> list[Call]:
    """Returns the calls that attend to documents (start, stop), in order. Neighbours alone attend together.

    Documents of 3, 2, 9, 4 and 3 tokens, where up to 4 tokens attend together, need three calls: (3, 2), 9 and (4, 3).

    Args:
        longest_together: tokens of the longest document that does not attend alone.
        most_tokens: tokens of one call, each document counted with SPACING more; one document always fits.
    """
    calls: list[Call] = []
    counted = 0  # tokens and SPACING of the documents of the last call
    for start, stop in documents:
        length = stop - start
        if length > longest_together:
            calls.append(Call(start, stop))
            continue
        counted += length + SPACING
        if calls and calls[-1].ends and calls[-1].stop == start and counted <= most_tokens:
            first, ends = calls[-1].start, calls[-1].ends
            calls[-1] = Call(first, stop, (*ends, stop - first))
        else:
            calls.append(Call(start, stop, (length,)))
            counted = length + SPACING
    return calls


def most_tokens_together(num_tokens: int, position_tokens: int = 1) -> int:
    """Returns `divide`'s `most_tokens` for a batch of `num_tokens`, or of positions that stand for several tokens."""
    return min(TOGETHER_TOKENS // position_tokens, 2 * num_tokens + 32 * SPACING)


def document_calls(
    q_BTHK: Tensor, segments: Tensor, longest_together: float, position_tokens: int = 1
) -> tuple[Call, ...]:
    """Returns the calls for q's documents. All layers of a step share them: they are sent to the device once.

    Args:
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, start, stop).
        longest_together: tokens of the longest document that does not attend alone.
        position_tokens: tokens that each of q's positions stands for.
    """
    (B, T), documents = q_BTHK.shape[:2], segments.long().contiguous().numpy().tobytes()
    limits = longest_together / position_tokens, most_tokens_together(B * T, position_tokens)
    return _document_calls(documents, T, *limits, q_BTHK.device)


@functools.lru_cache(maxsize=16)
def _document_calls(
    documents: bytes, T: int, longest_together: float, most_tokens: int, device: torch.device
) -> tuple[Call, ...]:
    segments = torch.frombuffer(bytearray(documents), dtype=torch.long).view(-1, 3)
    in_order = sorted((row * T + start, row * T + stop) for row, start, stop in segments.tolist())
    calls = divide(in_order, longest_together, most_tokens)
    # One copy for all calls, without a wait of the host.
    offsets = torch.tensor([i for call in calls if call.ends for i in (0, *call.ends)], dtype=torch.int32)
    parts = iter(offsets.to(device, non_blocking=True).split([1 + len(call.ends) for call in calls if call.ends]))
    return tuple(call._replace(offsets=next(parts), longest=_longest(call)) if call.ends else call for call in calls)


def _longest(call: Call) -> int:
    """Returns a multiple of a tile, two at least: FlashAttention has other kernels for documents of one tile."""
    longest = max(stop - start for start, stop in zip((0, *call.ends), call.ends))
    return max(2 * _TILE, -(-longest // _TILE) * _TILE)


def rounded_length(length: int, step: int) -> int:
    """Returns the tokens of a call for one document of `length`, where a library builds a plan for each new number.

    The result is a multiple of the sixteenth part of the largest power of two below `length`, and of `step` at least.
    A step of 256 makes 2,304 of 2,100 tokens, 5,120 of 5,000, and 40,960 of 40,000. A step of 1 rounds nothing.
    """
    if step > 1:
        step = max(step, 1 << max(0, (length - 1).bit_length() - 5))
    return -(-length // step) * step
