"""Which calls of a library's kernels attend to the documents of a packed batch.

A long document has a call of its own. Short documents that follow each other attend together in one call, which is told
where each ends. All rows of a batch are one line of tokens here: of rows of T tokens, row 2 begins at token 2 T.

A library that builds a plan for each new length gets few lengths: a document that attends alone is rounded up to a
multiple of a sixteenth of the power of two below it, which adds 4% to its work on average and 13% at most.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Tokens of the longest document that attends together with others where cuDNN attends to long ones, whose kernel is
# faster but costs more a call. Both take as long at 1,800 tokens with 8 key/value heads, at 5,000 with one
# (`python -m benchmarks.bench_packed_attention`, one H200).
LONGEST_TOGETHER = 2048
TOGETHER_TOKENS = 32_768  # of one call at most, each document counted with SPACING more: calls need memory
SPACING = 128  # tokens between documents in the float32 sums of FlashAttention's backward
_TILE = 128  # tokens of the library's tiles


class Call(NamedTuple):
    """Tokens `start` to `stop` - 1 of the batch: one document that attends alone, or several that attend together."""

    start: int
    stop: int
    ends: tuple[int, ...] = ()  # of documents that attend together, counted from `start`; (): one attends alone
    offsets: Tensor | None = None  # 0 and `ends`, int32 on the device
    longest: int = 0  # tokens of the longest that attends together, or a little more; kernels skip what is not there


def divide(documents: Iterable[tuple[int, int]], longest_together: float, most_tokens: int) -> list[Call]:
    """The calls that attend to documents (start, stop), which follow each other without gaps.

    Of documents of 3, 2, 9, 4 and 3 tokens, of which those of up to 4 attend together, the calls are of (3, 2), 9 and
    (4, 3).

    Args:
        longest_together: tokens of the longest document that does not attend alone.
        most_tokens: of the documents of one call, each of them counted with SPACING more; one document always fits.
    """
    calls: list[Call] = []
    counted = 0  # tokens and SPACING of the documents of the last call
    for start, stop in documents:
        length = stop - start
        if length > longest_together:
            calls.append(Call(start, stop))
            continue
        counted += length + SPACING
        if calls and calls[-1].ends and counted <= most_tokens:
            first, ends = calls[-1].start, calls[-1].ends
            calls[-1] = Call(first, stop, (*ends, stop - first))
        else:
            calls.append(Call(start, stop, (length,)))
            counted = length + SPACING
    return calls


def most_tokens_together(num_tokens: int, position_tokens: int = 1) -> int:
    """`divide`'s, of a batch of `num_tokens`, or of positions that stand for several tokens each."""
    return min(TOGETHER_TOKENS // position_tokens, 2 * num_tokens + 32 * SPACING)


def document_calls(
    q_BTHK: Tensor, segments: Tensor, longest_together: float, position_tokens: int = 1
) -> tuple[Call, ...]:
    """The calls for q's documents. All layers of a step share them: they are made and sent to the device once.

    Args:
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, start, stop) that cover every token once.
        longest_together: tokens of the longest document that does not attend alone.
        position_tokens: where q's positions stand for several tokens, how many.
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
    # One copy for all calls, which the host does not wait for.
    offsets = torch.tensor([i for call in calls if call.ends for i in (0, *call.ends)], dtype=torch.int32)
    parts = iter(offsets.to(device, non_blocking=True).split([1 + len(call.ends) for call in calls if call.ends]))
    return tuple(call._replace(offsets=next(parts), longest=_longest(call)) if call.ends else call for call in calls)


def _longest(call: Call) -> int:
    """A multiple of a tile, and at least two: FlashAttention has other kernels for documents of one token or tile."""
    longest = max(stop - start for start, stop in zip((0, *call.ends), call.ends))
    return max(2 * _TILE, -(-longest // _TILE) * _TILE)


def rounded_length(length: int, step: int) -> int:
    """Tokens that a call of one document of `length` has, for a library that builds a plan for each new number.

    A multiple of the sixteenth part of the largest power of two below `length`, at least of `step`: for a step of 256,
    2,100 tokens are 2,304, 5,000 are 5,120, 40,000 are 40,960. A step of 1 rounds nothing.
    """
    if step > 1:
        step = max(step, 1 << max(0, (length - 1).bit_length() - 5))
    return -(-length // step) * step
