"""Packing: which pieces of which documents make each training sequence, decided from the documents' lengths alone.

A piece (document, start, stop) is the tokens at positions start .. stop - 1 of a document.
"""

import numpy as np

from training.errors import UserError

Piece = tuple[int, int, int]


def deal(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Which of a step's sequences each rank takes, so that in every micro-batch ranks finish together.

    In the order of their costs, each num_ranks neighbours make a row, of which rank r takes the one at r; every second
    row is turned round, so that no rank gets the costlier one each time. One rank keeps the order as it is. For costs
    [7, 1, 5, 2] and 2 ranks this is [[1, 3], [0, 2]]: rank 0 takes costs 1, then 7, rank 1 takes 2, then 5.

    Args:
        costs: number [..., N], of each sequence; N is a multiple of num_ranks.

    Returns:
        int64 [..., N / num_ranks, num_ranks], positions in `costs`; a micro-batch is as many neighbouring rows as a
        rank has sequences in it.
    """
    order = np.argsort(costs, axis=-1, kind="stable") if num_ranks > 1 else np.indices(costs.shape)[-1]
    rows = order.reshape(*costs.shape[:-1], -1, num_ranks)
    rows[..., 1::2, :] = rows[..., 1::2, ::-1]
    return rows


class Stream:
    """Documents one after the other in a given order, from which pieces are cut only when they are asked for.

    Args:
        lengths: int64 [N], tokens of each document.
        order: int64 [N], the documents' numbers, in the order in which they follow each other.
    """

    def __init__(self, lengths: np.ndarray, order: np.ndarray):
        self.order, self.ends = order, np.cumsum(lengths[order])
        self._starts = self.ends - lengths[order]

    def cut(self, start: int, stop: int) -> list[Piece]:
        """The pieces at positions start .. stop - 1 of the stream, or up to its end.

        For documents of 3 and 5 tokens in this order, cut(2, 6) is [(0, 2, 3), (1, 0, 3)].
        """
        first, last = np.searchsorted(self.ends, start, side="right"), np.searchsorted(self._starts, stop)
        found = (array[first:last].tolist() for array in (self.order, self._starts, self.ends))
        return [(document, max(start, begin) - begin, min(stop, end) - begin) for document, begin, end in zip(*found)]


class ConcatenatedPacking:
    """An epoch is one stream: the documents in random order, cut every context_length tokens.

    The sequences are taken in random order, so that a batch is not one document; a document that is cut goes on in the
    next sequence as a new segment. The incomplete sequence at an epoch's end is dropped; the next epoch's order drops
    other tokens. Another packing is another class with these attributes and the methods `pieces` and
    `document_lengths`.

    Args:
        lengths: int64 [N], tokens of each document, its end included.
        context_length: tokens of a sequence, at least 2.
        seed: of both orders, which are drawn anew from (seed, epoch).

    Attributes:
        context_length: as given.
        identity: what decides the sequences besides the corpus; a resumed run must have the same.
        sequences_per_epoch: full sequences of context_length tokens.
        longest_document: tokens of the longest document, as far as a sequence can hold it.

    Raises:
        UserError: a context_length below 2, or a corpus shorter than one sequence.
    """

    def __init__(self, lengths: np.ndarray, context_length: int, seed: int):
        if context_length < 2:
            raise UserError(f"context_length must be at least 2 (a token and the one it predicts): {context_length}")
        self.context_length, self.seed, self._lengths = context_length, seed, lengths
        self.identity = {"context_length": context_length, "seed": seed}
        self.sequences_per_epoch = int(lengths.sum()) // context_length
        if self.sequences_per_epoch == 0:
            raise UserError(
                f"the corpus of {lengths.sum()} training tokens is shorter than one context_length "
                f"{context_length}; lower --context_length or give more --data"
            )
        self.longest_document = min(context_length, int(lengths.max()))
        self._drawn: dict[int, tuple[Stream, np.ndarray]] = {}  # of the epoch that was asked for last

    def pieces(self, epoch: int, index: int) -> list[Piece]:
        """The pieces of an epoch's sequence `index`, 0 .. sequences_per_epoch - 1, context_length tokens together."""
        stream, places = self._draw(epoch)
        start = int(places[index]) * self.context_length
        return stream.cut(start, start + self.context_length)

    def document_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, sequence), int64 [P] each, of the pieces of the first epoch; sequences count as they are taken.

        For documents of 3 and 5 tokens and a context_length of 4: ([3, 1, 4], [0, 0, 1]).
        """
        stream, places = self._draw(0)
        last = self.sequences_per_epoch * self.context_length
        borders = np.arange(self.context_length, last + 1, self.context_length)
        stops = np.union1d(stream.ends[stream.ends < last], borders)
        order = np.argsort(places)
        return np.diff(stops, prepend=0), order[(stops - 1) // self.context_length]

    def _draw(self, epoch: int) -> tuple[Stream, np.ndarray]:
        """The epoch's stream of documents, and the place in it of each of the epoch's sequences."""
        if epoch not in self._drawn:
            random = np.random.default_rng([self.seed, epoch])
            stream = Stream(self._lengths, random.permutation(len(self._lengths)))
            self._drawn = {epoch: (stream, random.permutation(self.sequences_per_epoch))}
        return self._drawn[epoch]
