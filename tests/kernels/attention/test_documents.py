"""Which documents attend alone and which together, decided from their lengths."""

import itertools
import random

import pytest
import torch

from kernels.attention.attend import packed_attention
from kernels.attention.documents import (
    SPACING,
    divide,
    document_calls,
    rounded_length,
    split_by_length,
)
from tests.kernels.attention.inputs import segments_of


def documents_of(*lengths):
    ends = [*itertools.accumulate(lengths)]
    return [*zip([0, *ends], ends)]


def test_short_neighbours_attend_together():
    calls = divide(documents_of(3, 2, 9, 4, 3), longest_together=4, most_tokens=10**6)
    assert [call[:3] for call in calls] == [(0, 5, (3, 5)), (5, 14, ()), (14, 21, (4, 7))]
    together = divide(documents_of(3, 2, 9, 4, 3), longest_together=float("inf"), most_tokens=10**6)
    assert [call[:3] for call in together] == [(0, 21, (3, 5, 14, 18, 21))]
    assert [len(call.ends) for call in divide(documents_of(3, 2, 9), 0, 10**6)] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_calls_cover_every_token_and_have_an_end(seed):
    generator = random.Random(seed)
    lengths = [generator.choice([1, 5, 200, 900, 3000]) for _ in range(generator.randint(1, 40))]
    limit = generator.choice([1, 1000, 5000])
    calls = divide(documents_of(*lengths), 1000, limit)
    assert [call.start for call in calls[1:]] == [call.stop for call in calls[:-1]]
    assert calls[0].start == 0 and calls[-1].stop == sum(lengths)
    found = []
    for call in calls:
        of_call = [b - a for a, b in itertools.pairwise((0, *call.ends))] or [
            call.stop - call.start
        ]
        found += of_call
        assert call.ends == () or call.ends[-1] == call.stop - call.start
        assert (call.ends == ()) == (max(of_call) > 1000)
        assert len(call.ends) < 2 or sum(of_call) + SPACING * len(of_call) <= limit
    assert found == lengths


def test_offsets_of_all_calls_and_rows():
    """A row's last document and the next row's first attend together."""
    q = torch.empty(2, 10, 4, 8, dtype=torch.bfloat16)
    segments = torch.tensor([[0, 0, 8], [0, 8, 10], [1, 3, 10], [1, 0, 3]])
    calls = document_calls(q, segments, 5)
    assert [call[:3] for call in calls] == [(0, 8, ()), (8, 13, (2, 5)), (13, 20, ())]
    assert calls[1].offsets.tolist() == [0, 2, 5] and calls[1].offsets.dtype == torch.int32
    assert calls[1].longest == 256 and calls[0].offsets is calls[2].offsets is None
    assert document_calls(q, segments.clone(), 5) is calls  # another layer takes the same calls
    one = document_calls(q, segments, float("inf"))
    assert [call.offsets.tolist() for call in one] == [[0, 8, 10, 13, 20]]


def test_rows_of_one_long_document_share_a_call():
    """Rows of short documents do not, nor rows apart, nor documents of half a row."""
    q = torch.empty(8, 10, 4, 8, dtype=torch.bfloat16)
    segments = segments_of([10], [10], [6, 4], [10], [5, 5], [10], [10], [10])
    calls = [call[:3] for call in document_calls(q, segments, 4)]
    apart = [(20, 26, ()), (26, 30, (4,)), (30, 40, ()), (40, 45, ()), (45, 50, ())]
    assert calls == [(0, 20, ()), *apart, (50, 80, ())]
    assert len(document_calls(q, segments, 10)) == 1


def test_long_neighbours_are_one_span():
    """As documented; then over the ends of rows, which are no gaps."""
    short, spans = split_by_length(segments_of([3, 9, 9, 4, 9]), 34, 9)
    assert short.tolist() == [[0, 0, 3], [0, 21, 25]]
    assert [span[:2] for span in spans] == [(3, 21), (25, 34)]
    assert [span.segments.tolist() for span in spans] == [[[0, 0, 9], [0, 9, 18]], [[0, 0, 9]]]
    rows = segments_of([1, 9], [10], [2, 8])
    short, [span] = split_by_length(rows[[4, 2, 0, 1, 3]], 10, 9)
    assert short.tolist() == [[2, 2, 10], [0, 0, 1], [2, 0, 2]]
    assert span[:2] == (1, 20) and span.segments.tolist() == [[0, 0, 9], [0, 9, 19]]
    assert span.segments.dtype == torch.int64


@pytest.mark.parametrize(
    ("long_from", "num_short", "num_spans"), [(0, 0, 1), (1, 0, 1), (10, 4, 0)]
)
def test_documents_that_are_all_long_or_all_short(long_from, num_short, num_spans):
    segments = segments_of([1, 9], [5, 5])
    short, spans = split_by_length(segments, 10, long_from)
    assert len(short) == num_short and len(spans) == num_spans and short.shape[1] == 3
    assert all(span[:2] == (0, 20) for span in spans)


@pytest.mark.parametrize("seed", range(20))
def test_short_documents_and_spans_cover_every_token_once(seed):
    generator = random.Random(seed)
    rows, T = [], 60
    for _ in range(generator.randint(1, 4)):
        ends = sorted({*generator.sample(range(1, T), generator.randint(0, 12)), T})
        rows.append([b - a for a, b in itertools.pairwise([0, *ends])])
    segments = segments_of(*rows)
    shuffled = segments[
        torch.randperm(len(segments), generator=torch.Generator().manual_seed(seed))
    ]
    short, spans = split_by_length(shuffled, T, 8)
    assert all(stop - start < 8 for _, start, stop in short.tolist())
    long = []
    for span in spans:
        assert (span.segments[:, 0] == 0).all() and (
            span.segments[:, 2] - span.segments[:, 1] >= 8
        ).all()
        assert span.segments[0, 1] == 0 and span.segments[-1, 2] == span.stop - span.start
        assert torch.equal(span.segments[1:, 1], span.segments[:-1, 2])
        long += [
            (span.start + start, span.start + stop) for _, start, stop in span.segments.tolist()
        ]
    assert all(before.stop < after.start for before, after in itertools.pairwise(spans))
    found = sorted(
        [*long, *((row * T + start, row * T + stop) for row, start, stop in short.tolist())]
    )
    assert found == [(row * T + start, row * T + stop) for row, start, stop in segments.tolist()]


def test_few_rounded_lengths():
    assert [rounded_length(n, 256) for n in (2049, 2304, 5000, 40_000, 65_536, 131_073)] == [
        2304, 2304, 5120, 40_960, 65_536, 139_264,
    ]  # fmt: skip
    assert rounded_length(37, 1) == 37
    lengths = range(2049, 131_073)
    rounded = [rounded_length(n, 256) for n in lengths]
    assert all(n <= up <= n * 17 / 16 or up - n < 256 for n, up in zip(lengths, rounded))
    assert len(set(rounded)) == 8 + 5 * 16


def test_packed_attention_takes_documents_as_flash_attn_does():
    q, k = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
    out = packed_attention(q, k, k, torch.tensor([0, 4, 9], dtype=torch.int32))
    alone = [
        packed_attention(x[None], y[None], y[None])[0]
        for x, y in zip(q.split([4, 5]), k.split([4, 5]))
    ]
    torch.testing.assert_close(out, torch.cat(alone))
    for bounds in ([0, 4], [1, 9], [0, 4, 4, 9], [9], [[0, 9]]):
        with pytest.raises(ValueError, match="must rise from 0 to the 9 tokens"):
            packed_attention(q, k, k, torch.tensor(bounds))
