"""Packing: training sequences made of spans of documents, by the documents' lengths alone.

A span (document, start, stop) is the tokens at positions start .. stop - 1 of a document.
"""

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from training.host.errors import UserError

PADDING_TOKENS = 1024  # at most, in a document of padding: attention over more costs time
Span = tuple[int, int, int]


class Packing(Protocol):
    """Endless sequences of spans, epoch by epoch."""

    context_length: int  # tokens of a sequence, at least 2
    # settings that decide the sequences of a given corpus; a resumed run must have the same
    identity: dict
    sequences_per_epoch: int
    longest_document: int  # tokens, at most context_length
    left_out: int  # tokens of documents that no sequence has

    def spans(self, epoch: int, index: int) -> list[Span]:
        """Returns the spans of an epoch's sequence `index`, context_length tokens at most."""

    def document_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens, sequence) of each document of the first epoch, int64 [P] both.

        `sequence` is the index of its sequence. Documents of padding come last. Documents of 3 and
        5 tokens, end to end in sequences of 4, give ([3, 1, 4], [0, 0, 1]).
        """


def padding_lengths(count: int) -> list[int]:
    """Returns the lengths of documents of padding: [1024, 1024, 452] for `count` 2,500."""
    return [min(PADDING_TOKENS, count - start) for start in range(0, count, PADDING_TOKENS)]


def deal(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Deals a step's sequences to ranks, so that the ranks finish every micro-batch together.

    Sequences are sorted by cost, and each num_ranks neighbours make a row: rank r takes place r of
    each row. Every second row is reversed, so that no rank gets the costlier sequence each time. A
    single rank keeps the order. For costs [7, 1, 5, 2] and 2 ranks this is [[1, 3], [0, 2]]: rank 0
    takes costs 1, then 7, rank 1 takes 2, then 5.

    Args:
        costs: number [..., N], each sequence's cost; N is a multiple of num_ranks.

    Returns:
        int64 [..., N / num_ranks, num_ranks], positions in `costs`; a micro-batch of b sequences is
        b rows.
    """
    order = np.indices(costs.shape)[-1]
    if num_ranks > 1:
        order = np.argsort(costs, axis=-1, kind="stable")
    rows = order.reshape(*costs.shape[:-1], -1, num_ranks)
    rows[..., 1::2, :] = rows[..., 1::2, ::-1]
    return rows


class Stream:
    """Documents one after the other in a given order. Spans are cut from it on demand.

    `lengths` are the tokens of each document, `order` the documents' numbers in their order; both
    int64 [N].
    """

    def __init__(self, lengths: np.ndarray, order: np.ndarray):
        self.order, self.ends = order, np.cumsum(lengths[order])
        self._starts = self.ends - lengths[order]

    def cut(self, start: int, stop: int) -> list[Span]:
        """Returns the spans at positions start .. stop - 1 of the stream, or up to its end.

        For documents of 3 and 5 tokens in this order, cut(2, 6) is [(0, 2, 3), (1, 0, 3)].
        """
        first = np.searchsorted(self.ends, start, side="right")
        last = np.searchsorted(self._starts, stop)
        columns = (array[first:last].tolist() for array in (self.order, self._starts, self.ends))
        return [
            (document, max(start, begin) - begin, min(stop, end) - begin)
            for document, begin, end in zip(*columns)
        ]


class ConcatenatedPacking:
    """Packs documents end to end: a stream in random order, cut every context_length tokens.

    The sequences are taken in random order, too, so that a batch is not one document. A document
    that is cut goes on in another sequence as a new segment. The incomplete sequence at an epoch's
    end is dropped; another epoch, whose order differs, drops other tokens. `lengths` are int64 [N],
    ends included; orders are drawn from (seed, epoch).
    """

    def __init__(self, lengths: np.ndarray, context_length: int, seed: int):
        self.context_length, self.seed, self._lengths = context_length, seed, lengths
        self.identity = {"context_length": context_length, "seed": seed, "packing": "concatenate"}
        self.sequences_per_epoch = int(lengths.sum()) // context_length
        if self.sequences_per_epoch == 0:
            raise UserError(
                f"the corpus of {lengths.sum()} training tokens is shorter than one context_length "
                f"{context_length}; lower --context_length or give more --data"
            )
        self.longest_document, self.left_out = min(context_length, int(lengths.max())), 0
        self._draw = functools.lru_cache(maxsize=1)(self._draw_anew)

    def spans(self, epoch: int, index: int) -> list[Span]:
        stream, places = self._draw(epoch)
        start = int(places[index]) * self.context_length
        return stream.cut(start, start + self.context_length)

    def document_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        stream, places = self._draw(0)
        last = self.sequences_per_epoch * self.context_length
        borders = np.arange(self.context_length, last + 1, self.context_length)
        stops = np.union1d(stream.ends[stream.ends < last], borders)
        order = np.argsort(places)
        return np.diff(stops, prepend=0), order[(stops - 1) // self.context_length]

    def _draw_anew(self, epoch: int) -> tuple[Stream, np.ndarray]:
        """Returns an epoch's stream of documents, and each sequence's place in it."""
        random = np.random.default_rng([self.seed, epoch])
        stream = Stream(self._lengths, random.permutation(len(self._lengths)))
        return stream, random.permutation(self.sequences_per_epoch)


class BestFitPacking:
    """Packs whole documents by best-fit decreasing; the rest of each sequence is padding.

    From the longest document to the shortest, each goes into the fullest sequence that still holds
    it. The number of sequences depends on the lengths alone. For each epoch it is drawn anew which
    documents of a length meet, and in which order the sequences are taken. Longer documents are
    left out, or `split` every context_length tokens.

    Attributes:
        filled: share of the sequences' tokens that are not padding.
    """

    def __init__(self, lengths: np.ndarray, context_length: int, seed: int, split: bool = False):
        self.context_length, self.seed = context_length, seed
        name = "best_fit, split" if split else "best_fit"
        self.identity = {"context_length": context_length, "seed": seed, "packing": name}
        document = np.arange(len(lengths)) if split else (lengths <= context_length).nonzero()[0]
        # Spans of a document of 10 tokens start at 0, 4 and 8 if context_length is 4.
        count = -(-lengths[document] // context_length)
        document = np.repeat(document, count)
        first = np.repeat(np.cumsum(count) - count, count)
        start = context_length * (np.arange(len(document)) - first)
        sizes = np.minimum(lengths[document] - start, context_length)
        by_size = np.argsort(-sizes, kind="stable")
        self._document, self._start, self._sizes = document[by_size], start[by_size], sizes[by_size]
        if not len(sizes):
            raise UserError(
                f"no document fits into context_length {context_length}; "
                "raise it, or split texts by --overlong"
            )
        sequence = best_fit(self._sizes, context_length)
        # Indices into `_sizes`, sequence after sequence.
        self._places = np.argsort(sequence, kind="stable")
        self._borders = np.concatenate([[0], np.cumsum(np.bincount(sequence))])
        self.sequences_per_epoch = len(self._borders) - 1
        self.longest_document = int(self._sizes[0])
        self.left_out = int(lengths.sum() - self._sizes.sum())
        self.filled = int(self._sizes.sum()) / (self.sequences_per_epoch * context_length)
        self._draw = functools.lru_cache(maxsize=1)(self._draw_anew)

    def spans(self, epoch: int, index: int) -> list[Span]:
        order, sequences = self._draw(epoch)
        first, last = self._borders[sequences[index] :][:2]
        chosen = order[self._places[first:last]]
        starts = self._start[chosen]
        stops = starts + self._sizes[chosen]
        return [*zip(self._document[chosen].tolist(), starts.tolist(), stops.tolist())]

    def document_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        _, sequences = self._draw(0)
        taken = np.argsort(sequences)  # the index at which each sequence is taken
        sizes = self._sizes[self._places]
        free = self.context_length - np.add.reduceat(sizes, self._borders[:-1])
        padding = [padding_lengths(count) for count in free.tolist()]
        padding_sizes = np.fromiter(itertools.chain.from_iterable(padding), sizes.dtype)
        counts = np.concatenate([np.diff(self._borders), [*map(len, padding)]])
        return np.concatenate([sizes, padding_sizes]), np.repeat(np.tile(taken, 2), counts)

    def _draw_anew(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws the spans of each size and the order of sequences; returns both as indices."""
        random = np.random.default_rng([self.seed, epoch])
        order = np.lexsort((random.random(len(self._sizes)), -self._sizes))
        return order, random.permutation(self.sequences_per_epoch)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Puts items into bins: each goes into the fullest bin that holds it, or into a new bin.

    Items of one size and bins that are equally full are taken together. Items of size 3 go in pairs
    into bins with 7 free, so that a million items of a hundred sizes take a few thousand rounds.
    `sizes` are int64 [N], descending, from 1.

    Returns:
        int64 [N], the bin of each item. For sizes [5, 3, 3, 2, 1] and capacity 6 this is [0, 1, 1,
        2, 0].
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    free_sizes: list[int] = []  # ascending, what is free in some bin
    bins_by_free: dict[int, list[np.ndarray]] = {}
    opened, position = 0, 0

    def put(free: int, which: np.ndarray) -> None:
        if free and len(which):
            if free not in bins_by_free:
                bisect.insort(free_sizes, free)
            bins_by_free.setdefault(free, []).append(which)

    borders = np.concatenate([(np.diff(sizes) != 0).nonzero()[0] + 1, [len(sizes)]])
    for stop in borders.tolist():
        size = int(sizes[position])
        while position < stop:
            at = bisect.bisect_left(free_sizes, size)
            if at < len(free_sizes):
                free = free_sizes.pop(at)
                which = np.concatenate(bins_by_free.pop(free))
            else:
                free = capacity
                which = np.arange(opened, opened - (position - stop) // (capacity // size))
                opened += len(which)
            fitting = free // size
            count = min(stop - position, fitting * len(which))
            bins[position : position + count] = np.repeat(which, fitting)[:count]
            position += count
            full, rest = divmod(count, fitting)
            put(free - fitting * size, which[:full])
            put(free - rest * size, which[full : full + 1])
            put(free, which[full + 1 :])
    return bins


MIX_PERIOD = 10_000


class MixedPacking:
    """Takes sequences of several packings in turn, as often as their weights say.

    A packing that ends begins anew. An epoch has as many sequences as the epochs of all packings
    together.

    Args:
        packings: packings of the same context_length.
        first_documents: offset of each packing's document numbers.
        weights: numbers above 0; their ratios matter. None may be below a 10,000th of their sum.
    """

    def __init__(
        self, packings: Sequence[Packing], first_documents: np.ndarray, weights: list[float]
    ):
        self._packings, self._first_documents = packings, first_documents.tolist()
        self.context_length = packings[0].context_length
        self.identity = packings[0].identity | {
            "packing": str([packing.identity["packing"] for packing in packings]),
            "data_weights": ",".join(f"{weight:g}" for weight in weights),
        }
        self.sequences_per_epoch = sum(packing.sequences_per_epoch for packing in packings)
        self.longest_document = max(packing.longest_document for packing in packings)
        self.left_out = sum(packing.left_out for packing in packings)
        # Sequences of each packing among every MIX_PERIOD; the largest remainders are rounded up.
        exact = MIX_PERIOD * np.array(weights) / sum(weights)
        counts = exact.astype(int)
        counts[np.argsort(counts - exact)[: MIX_PERIOD - counts.sum()]] += 1
        if not counts.all():
            raise UserError(
                f"data_weights: {weights[int(counts.argmin())]:g} is less than 1 / {MIX_PERIOD:,} "
                "of all"
            )
        # Sequence k of a packing's n is due at (k + 1/2) / n of the period.
        packing = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(MIX_PERIOD) - np.repeat(np.cumsum(counts) - counts, counts)
        turns = np.argsort((number + 0.5) / counts[packing], kind="stable")
        self._packing, self._number, self._counts = packing[turns], number[turns], counts

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the packing at each place of the order, and the place in its own order."""
        periods, within = np.divmod(indices, MIX_PERIOD)
        packing = self._packing[within]
        return packing, periods * self._counts[packing] + self._number[within]

    def spans(self, epoch: int, index: int) -> list[Span]:
        places = self._locate(np.array(epoch * self.sequences_per_epoch + index))
        which, place = map(int, places)
        packing, first = self._packings[which], self._first_documents[which]
        spans = packing.spans(*divmod(place, packing.sequences_per_epoch))
        return [(document + first, start, stop) for document, start, stop in spans]

    def document_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        # A packing's second epoch counts as its first.
        which, _ = self._locate(np.arange(self.sequences_per_epoch))
        all_lengths, all_sequences = [], []
        for number, packing in enumerate(self._packings):
            lengths, sequences = packing.document_lengths()
            # Ascending in the mixture's order, and so in the packing's.
            [taken] = (which == number).nonzero()
            for start in range(0, len(taken), packing.sequences_per_epoch):
                epoch = taken[start : start + packing.sequences_per_epoch]
                is_taken = sequences < len(epoch)
                all_lengths.append(lengths[is_taken])
                all_sequences.append(epoch[sequences[is_taken]])
        return np.concatenate(all_lengths), np.concatenate(all_sequences)
