"""Packing: documents one after the other as a stream of tokens, from which sequences of any length are cut.

A sequence is cut from the documents only when it is asked for, so the corpus is in memory once.
"""

import numpy as np

from model import IGNORE_INDEX
from training.data.sources import Document


class PackedStream:
    """Documents in a given order, each followed by eos_id, as one sequence of tokens that is never materialized."""

    def __init__(self, documents: list[Document], order: np.ndarray, eos_id: int):
        self.documents, self.order, self.eos_id = documents, order, eos_id
        self.ends = np.cumsum([len(documents[i].tokens) + 1 for i in order])

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, targets, document ids), [length] each, from position `start`; past the end, eos_id without a target."""
        ids = np.full(length, self.eos_id, dtype=np.int64)
        targets = np.full(length, IGNORE_INDEX, dtype=np.int64)
        document_ids = np.zeros(length, dtype=np.int32)
        rank = int(np.searchsorted(self.ends, start, side="right"))  # the document's place in the order
        position = segment = 0
        while position < length and rank < len(self.order):
            document = self.documents[self.order[rank]]
            size = len(document.tokens) + 1
            offset = start + position - (int(self.ends[rank]) - size)
            stop = min(position + size - offset, length)
            piece = document.tokens[offset : offset + stop - position]
            ids[position : position + len(piece)] = piece  # an eos_id stands behind it already
            # A segment's first token is never predicted, whatever precedes it, and neither is a prompt.
            first_target = position + max(1, document.num_masked - offset)
            targets[first_target - 1 : stop - 1] = ids[first_target:stop]
            document_ids[position:stop] = segment
            position, rank, segment = stop, rank + 1, segment + 1
        document_ids[position:] = segment
        return ids, targets, document_ids
