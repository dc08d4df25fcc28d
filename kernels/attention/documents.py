"""Documents of a packed batch, and the calls of a library's kernels that attend to them.

Tokens are counted through all rows of a batch: in rows of T tokens, row 2 begins at token 2 T. A
long document has a call of its own, which neighbouring rows of one document each share.
Neighbouring short documents attend together in one call, with a table of where each begins.

Some libraries build a plan for each new length. They get few lengths: `rounded_length` rounds up a
document that attends alone, which adds 4% to its work on average and 13% at most.

Documents may go on from another one, their prompt, as prompts.py describes.
"""

import ctypes
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of the longest document that attends together with others, if cuDNN attends to longer ones.
# cuDNN's kernel is faster but costs more per call. Both ways are equally fast at 1,800 tokens with
# 8 key/value heads, and at 5,000 with one (`python -m benchmarks.bench_packed_attention`, one
# H200).
LONGEST_TOGETHER = 2048
# most tokens of one call, counting SPACING more per document: a call's memory grows with them
TOGETHER_TOKENS = 32_768
SPACING = 128  # tokens between documents in the float32 sums of FlashAttention's backward
_TILE = 128  # tokens of a FlashAttention tile


@dataclass
class Documents:
    """Documents packed in each row of a batch. Tensors are on the CPU: the host launches attention
    by document.

    If ranks share a sequence, a rank has what is [B, T] of its own tokens, but segments and lengths
    of whole sequences.
    """

    # int64 [S, 3], rows (batch row, start, stop), or [S, 5] with start and stop of the prompt that
    # a document goes on from, both 0 where it has none; None where each row is one document.
    segments: Tensor | None
    # int64, each token's position in its document, counted from its prompt's first token
    positions_BT: Tensor
    lengths: list[int]  # tokens of each document, without its prompt
    is_padding_BT: Tensor | None = None  # bool; None: no token is padding

    @property
    def longest(self) -> int:
        """Tokens of the longest document, with its prompt."""
        if self.segments is None or not has_prompts(self.segments):
            return max(self.lengths)
        return int((self.segments[:, 2::2].sum(1) - self.segments[:, 1::2].sum(1)).max())

    @property
    def prompts(self) -> list[tuple[int, int, int]]:
        """Tokens of each prompt, the number of its answers, and their tokens."""
        lengths_of: dict[tuple[int, ...], list[int]] = {}
        if self.segments is not None and has_prompts(self.segments):
            for row, start, stop, first, last in self.segments.tolist():
                if last:
                    lengths_of.setdefault((row, first, last), []).append(stop - start)
        return [
            (last - first, len(lengths), sum(lengths))
            for (_, first, last), lengths in lengths_of.items()
        ]

    @property
    def are_whole(self) -> bool:
        """Whether the positions cover whole sequences, not one rank's share."""
        return self.positions_BT.numel() == sum(self.lengths)

    def padded(self, count: int) -> "Documents":
        """Returns whole sequences, each with `count` tokens of padding at its end, a document."""
        B, T = self.positions_BT.shape
        table = all_segments(self.segments, B, T)
        padding = torch.tensor(
            [(row, T, T + count) + (0, 0) * has_prompts(self.segments) for row in range(B)]
        )
        table = torch.cat([table, padding])
        table = table[table[:, 0].argsort(stable=True)]
        positions_BT = torch.cat([self.positions_BT, torch.arange(count).expand(B, -1)], 1)
        is_padding_BT = self.is_padding_BT
        if is_padding_BT is None:
            is_padding_BT = torch.zeros(B, T, dtype=torch.bool)
        is_padding_BT = torch.cat([is_padding_BT, torch.ones(B, count, dtype=torch.bool)], 1)
        return Documents(table, positions_BT, (table[:, 2] - table[:, 1]).tolist(), is_padding_BT)

    def share(self, positions: slice) -> "Documents":
        """Returns what a rank has of whole sequences, of which it takes `positions`."""
        is_padding_BT = None if self.is_padding_BT is None else self.is_padding_BT[:, positions]
        return replace(
            self, positions_BT=self.positions_BT[:, positions], is_padding_BT=is_padding_BT
        )


def find_documents(document_ids: Tensor, prompt_ids: Tensor | None = None) -> Documents:
    """Returns the documents packed in each row, by the document of each token, integers [B, T].

    [[0, 0, 0, 1, 1]] has documents of 3 and 2 tokens. `prompt_ids` are the documents from which
    documents go on, or their own: with [[0, 0, 0, 1, 1, 2]], [[0, 0, 0, 0, 0, 0]] makes documents 1
    and 2 answers to document 0.

    Raises:
        ValueError: ids that decrease within a row; an answer that follows neither its prompt nor
            its prompt's answer.
    """
    ids_BT = document_ids.cpu()
    B, T = ids_BT.shape
    if bool((ids_BT[:, 1:] < ids_BT[:, :-1]).any()):
        raise ValueError(
            "document_ids must not decrease within a row: documents are packed one after another"
        )
    first_BT = torch.ones(B, T, dtype=torch.bool)
    first_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    rows, starts = first_BT.nonzero(as_tuple=True)
    stops = torch.where(rows == rows.roll(-1), starts.roll(-1), T)
    stops[-1] = T
    segments, lengths = torch.stack([rows, starts, stops], dim=1), stops - starts
    index_BT = torch.arange(T).expand(B, T)
    positions_BT = index_BT - torch.where(first_BT, index_BT, 0).cummax(dim=1).values
    if prompt_ids is not None and not torch.equal(prompts_BT := prompt_ids.cpu(), ids_BT):
        segments = _with_prompts(segments, ids_BT, prompts_BT)
        before = segments[:, 4] - segments[:, 3]
        positions_BT = positions_BT + before.repeat_interleave(lengths).view(B, T)
    return Documents(None if len(segments) == B else segments, positions_BT, lengths.tolist())


def _with_prompts(segments: Tensor, ids_BT: Tensor, prompts_BT: Tensor) -> Tensor:
    """Returns segments with two more columns, see `Documents`; arguments as in `find_documents`."""
    ids, prompts = (x[segments[:, 0], segments[:, 1]] for x in (ids_BT, prompts_BT))
    rows: list[tuple[int, ...]] = []
    for (row, start, stop), document, prompt in zip(
        segments.tolist(), ids.tolist(), prompts.tolist()
    ):
        last = rows[-1] if rows and rows[-1][0] == row else (row, 0, 0, 0, 0)
        begin, end = last[1:3] if last[4] == 0 else last[3:]
        if document == prompt:
            begin = end = 0
        elif start == 0 or ids_BT[row, begin] != prompt:
            raise ValueError(
                f"document {document} of row {row} must follow its prompt, {prompt}, "
                "or another answer to it"
            )
        rows.append((row, start, stop, begin, end))
    return torch.tensor(rows)


def has_prompts(segments: Tensor | None) -> bool:
    """Returns whether some document goes on from another one."""
    return segments is not None and segments.shape[1] == 5


class Span(NamedTuple):
    """Neighbouring documents: tokens `start` to `stop` - 1 of the batch."""

    start: int
    stop: int
    # int64 [S, 3], rows (0, start, stop) counted from the span's start; or [S, 5], see `Documents`
    segments: Tensor


def split_by_length(segments: Tensor, T: int, long_from: int) -> tuple[Tensor, list[Span]]:
    """Returns the rows of `segments` below `long_from` tokens, and spans of the others, in order.

    Documents of 3, 9, 9, 4 and 9 tokens with long_from=9 are two short ones and two spans: (9, 9)
    and (9). Documents that go on from another one have its tokens, too, and stand in its span.
    """
    lengths = segments[:, 2::2].sum(1) - segments[:, 1::2].sum(1)
    long = segments[lengths >= long_from]
    chains: list[list[list[int]]] = []
    for document in sorted((long[:, 1:] + T * long[:, :1]).tolist()):
        if not chains or chains[-1][-1][1] != document[0]:
            chains.append([])
        chains[-1].append(document)
    spans = []
    for chain in chains:
        first, stop = chain[0][0], chain[-1][1]
        spans.append(Span(first, stop, F.pad(torch.tensor(chain) - first, (1, 0))))
    return segments[lengths < long_from, :3], spans


class Call(NamedTuple):
    """Tokens `start` to `stop` - 1 of the batch: a document or rows that attend alone, or several
    that do together."""

    start: int
    stop: int
    # Ends of documents that attend together, counted from `start`. (): one attends alone, or rows
    # of one document each.
    ends: tuple[int, ...] = ()
    offsets: Tensor | None = None  # 0 and `ends`, int32 on the device
    # tokens of the longest document that attends together, rounded up, see `_longest`
    longest: int = 0


def divide(
    documents: Iterable[tuple[int, int]], longest_together: float, most_tokens: int
) -> list[Call]:
    """Returns the calls that attend to documents (start, stop), in order. Only neighbours attend
    together.

    With longest_together=4, documents of 3, 2, 9, 4 and 3 tokens need three calls: (3, 2), 9 and
    (4, 3). A call has at most `most_tokens`, counting SPACING more per document; one document
    always fits.
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


def join_rows(calls: Iterable[Call], T: int) -> list[Call]:
    """Returns the calls with neighbouring rows of T tokens in one, where each row is a document
    that attends alone."""
    joined: list[Call] = []
    for call in calls:
        is_row = not call.ends and call.stop - call.start == T
        last = joined[-1] if joined else None
        if is_row and last and not last.ends and last.stop == call.start and is_rows(last, T):
            joined[-1] = Call(last.start, call.stop)
        else:
            joined.append(call)
    return joined


def is_rows(call: Call, T: int) -> bool:
    """Whether a call without `ends` has whole rows of T tokens. All other documents are shorter
    than a row."""
    return (call.stop - call.start) % T == 0


def most_tokens_together(num_tokens: int, position_tokens: int = 1) -> int:
    """Returns `most_tokens` of `divide` for a batch of `num_tokens` positions of `position_tokens`
    tokens each."""
    return min(TOGETHER_TOKENS // position_tokens, 2 * num_tokens + 32 * SPACING)


def all_segments(segments: Tensor | None, B: int, T: int) -> Tensor:
    """Returns `segments`, or, if they are None, the B rows of T tokens as documents."""
    return torch.tensor([(row, 0, T) for row in range(B)]) if segments is None else segments


def as_bytes(segments: Tensor | None) -> bytes | None:
    """Returns segments without prompts as bytes, which can be the key of a cache."""
    return None if segments is None else table_as_bytes(segments[:, :3])


def table_as_bytes(table: Tensor) -> bytes:
    table = table.long().contiguous()
    return ctypes.string_at(table.data_ptr(), table.nbytes)


def from_bytes(documents: bytes | None, B: int, T: int, columns: int = 3) -> Tensor:
    """Returns the segments of which `as_bytes` made `documents`; the rows, if it is None."""
    segments = None
    if documents is not None:
        segments = torch.frombuffer(bytearray(documents), dtype=torch.long).view(-1, columns)
    return all_segments(segments, B, T)


def document_bounds(B: int, T: int, documents: bytes | None) -> tuple[Tensor, Tensor]:
    """Returns the first token and the length of each document, in order, on the CPU; `documents` as
    in `from_bytes`."""
    row, start, stop = from_bytes(documents, B, T).unbind(1)
    first, order = (row * T + start).sort()
    return first, (stop - start)[order]


def check_documents(segments: Tensor | None, B: int, T: int) -> int:
    """Returns the number of documents. Raises ValueError unless segments have each token once, and
    none is empty."""
    if segments is None:
        return B
    first, length = document_bounds(B, T, as_bytes(segments))
    if (
        int(length.min()) < 1
        or not torch.equal(first, length.cumsum(0) - length)
        or int(length.sum()) != B * T
    ):
        raise ValueError(f"segments must have each of {B} x {T} tokens once, and no empty document")
    return len(segments)


def document_calls(
    q_BTHK: Tensor, segments: Tensor, longest_together: float, position_tokens: int = 1
) -> tuple[Call, ...]:
    """Returns the calls for q's documents, see `divide`, of positions of so many tokens each.
    Layers share them."""
    B, T = q_BTHK.shape[:2]
    limits = longest_together / position_tokens, most_tokens_together(B * T, position_tokens)
    return _document_calls(as_bytes(segments), T, *limits, q_BTHK.device)


@functools.lru_cache(maxsize=16)
def _document_calls(
    documents: bytes, T: int, longest_together: float, most_tokens: int, device: torch.device
) -> tuple[Call, ...]:
    first, length = document_bounds(0, T, documents)
    bounds = zip(first.tolist(), (first + length).tolist())
    calls = join_rows(divide(bounds, longest_together, most_tokens), T)
    # One copy to the device serves all calls, and the host does not wait for it.
    together = [i for i, call in enumerate(calls) if call.ends]
    offsets = [(0, *calls[i].ends) for i in together]
    table = torch.tensor([*itertools.chain(*offsets)], dtype=torch.int32)
    parts = table.to(device, non_blocking=True).split([*map(len, offsets)])
    for i, part in zip(together, parts):
        calls[i] = calls[i]._replace(offsets=part, longest=_longest(calls[i]))
    return tuple(calls)


def _longest(call: Call) -> int:
    """Returns the longest document's tokens in whole tiles, at least two: one has other kernels."""
    longest = max(stop - start for start, stop in zip((0, *call.ends), call.ends))
    return max(2 * _TILE, -(-longest // _TILE) * _TILE)


def rounded_length(length: int, step: int) -> int:
    """Returns a document's tokens rounded up to a multiple of `step`, or of 1/16 of the largest
    power of two below.

    With a step of 256, 2,100 becomes 2,304, 5,000 becomes 5,120 and 40,000 becomes 40,960. A step
    of 1 rounds nothing.
    """
    if step > 1:
        step = max(step, 1 << max(0, (length - 1).bit_length() - 5))
    return -(-length // step) * step
