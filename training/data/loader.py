"""Batches of packed sequences: an endless training order that can be resumed, and the held-out documents once.

An epoch is one stream: the documents in an order drawn from (seed, epoch), each followed by the end-of-text id.
Training cuts the stream every context_length tokens and takes the sequences in random order, so that a batch is not one
document. The incomplete sequence at an epoch's end is dropped; the next epoch's order drops other tokens.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from model import IGNORE_INDEX, Documents, find_documents
from training.data.packing import PackedStream
from training.data.sources import Document
from training.errors import UserError


@dataclass(frozen=True)
class Batch:
    """A micro-batch of packed sequences, or one rank's share of it, on the CPU."""

    input_ids: torch.Tensor  # int64 [B, T]
    # int64 [B, T], already shifted: position t is trained to predict targets[b, t]. -100 where nothing is predicted: a
    # token of a prompt or of padding, the next document's first token, and what lies behind the last position.
    targets: torch.Tensor
    documents: Documents  # which tokens see each other; padding is a document of its own
    num_valid_tokens: int  # number of targets that are not -100

    def slice(self, rank: int, size: int) -> "Batch":
        """What `rank` (0 .. size - 1) has where `size` ranks share each sequence: [B, T / size] neighbouring tokens.

        Of 8 tokens and 4 ranks, rank 1 has those at positions 2 and 3. The documents' segments and lengths stay those
        of whole sequences, because each rank attends over whole sequences with some of the heads.

        Raises:
            ValueError: a sequence of a number of tokens that `size` does not divide.
        """
        length = self.input_ids.shape[1]
        if length % size:
            raise ValueError(f"{size} ranks cannot share a sequence of {length} tokens equally; it must be a multiple")
        own = slice(rank * length // size, (rank + 1) * length // size)
        targets = self.targets[:, own]
        documents = replace(self.documents, positions_BT=self.documents.positions_BT[:, own])
        return Batch(self.input_ids[:, own], targets, documents, int((targets != IGNORE_INDEX).sum()))


def stack_sequences(sequences: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Batch:
    """A batch of what `PackedStream.read` returned, one sequence a row."""
    input_ids, targets, document_ids = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*sequences))
    return Batch(input_ids, targets, find_documents(document_ids), int((targets != IGNORE_INDEX).sum()))


class PackedLoader:
    """Endless training batches of full sequences in one global order, which depends on seed and corpus alone.

    A step of any number of ranks takes the next batch_size * world_size sequences of that order, rank r the ones at
    r, r + world_size, ...; so the position, and a resumed run, do not depend on the number of ranks.

    Args:
        documents: of load_documents or split_documents.
        context_length: tokens of a sequence, at least 2. A document continues in the next sequence as a new segment.
        batch_size: sequences of a micro-batch on this rank.
        eos_id: the tokenizer's.
        seed: of the documents' order in every epoch.
        rank, world_size: of the data-parallel group.

    Raises:
        UserError: a context_length below 2, or a corpus shorter than one sequence.
    """

    def __init__(
        self,
        documents: list[Document],
        context_length: int,
        batch_size: int,
        eos_id: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        if context_length < 2:
            raise UserError(f"context_length must be at least 2 (a token and the one it predicts): {context_length}")
        self.documents, self.eos_id, self.seed = documents, eos_id, seed
        self.context_length, self.batch_size = context_length, batch_size
        self.rank, self.world_size = rank, world_size
        self.num_tokens = sum(len(document.tokens) + 1 for document in documents)
        self.sequences_per_epoch = self.num_tokens // context_length
        if self.sequences_per_epoch == 0:
            raise UserError(
                f"the corpus of {self.num_tokens} training tokens is shorter than one context_length "
                f"{context_length}; lower --context_length or give more --data"
            )
        self.next_sequence = 0  # in the global order, over all epochs and ranks
        self._stream_epoch, self._stream, self._places = -1, None, None
        fingerprint = 0
        for document in documents:
            fingerprint = zlib.crc32(f"{len(document.tokens)},{document.num_masked};".encode(), fingerprint)
            fingerprint = zlib.crc32(np.ascontiguousarray(document.tokens), fingerprint)
        self._identity = {"context_length": context_length, "seed": seed, "eos_id": eos_id, "corpus_crc32": fingerprint}

    @property
    def epoch(self) -> float:
        """Epochs taken so far, with the fraction of the present one."""
        return self.next_sequence / self.sequences_per_epoch

    def check_enough_for_step(self, gradient_accumulation_steps: int) -> None:
        """Raises UserError where one optimizer step would take more sequences than an epoch has."""
        needed = self.batch_size * gradient_accumulation_steps * self.world_size
        if needed > self.sequences_per_epoch:
            raise UserError(
                f"one step takes {needed} sequences of {self.context_length} tokens (batch_size {self.batch_size} x "
                f"gradient_accumulation_steps {gradient_accumulation_steps} x {self.world_size} ranks), the corpus has "
                f"{self.sequences_per_epoch}; lower --gradient_accumulation_steps, --batch_size or --context_length, "
                "or give more --data"
            )

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document, its end included, as far as a sequence can hold it."""
        return min(self.context_length, 1 + max(len(document.tokens) for document in self.documents))

    def document_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, sequence) of each document as the first epoch packs it; sequences are counted as they are taken.

        For documents of 3 and 5 tokens, their ends included, and a context_length of 4: ([3, 1, 4], [0, 0, 1]).
        """
        self._sequence(0)
        last = self.sequences_per_epoch * self.context_length
        borders = np.arange(self.context_length, last + 1, self.context_length)
        stops = np.union1d(self._stream.ends[self._stream.ends < last], borders)
        order = np.argsort(self._places)
        return np.diff(stops, prepend=0), order[(stops - 1) // self.context_length]

    def next_batch(self) -> Batch:
        first = self.next_sequence + self.rank
        self.next_sequence += self.batch_size * self.world_size
        return stack_sequences([self._sequence(i) for i in range(first, self.next_sequence, self.world_size)])

    def _sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        epoch, index = divmod(index, self.sequences_per_epoch)
        if epoch != self._stream_epoch:
            random = np.random.default_rng([self.seed, epoch])
            order = random.permutation(len(self.documents))
            self._stream_epoch, self._stream = epoch, PackedStream(self.documents, order, self.eos_id)
            self._places = random.permutation(self.sequences_per_epoch)
        return self._stream.read(int(self._places[index]) * self.context_length, self.context_length)

    def state_dict(self) -> dict:
        """The position, and what it is a position in. Plain numbers, the same on every rank."""
        return {"next_sequence": self.next_sequence, **self._identity}

    def load_state_dict(self, state: dict) -> None:
        """Go on from state, on any number of ranks.

        Raises:
            UserError: the state belongs to another corpus, tokenizer, seed or context_length.
        """
        check_same_data(state, self._identity)
        self.next_sequence = state["next_sequence"]


def check_same_data(state: dict, ours: dict) -> None:
    """Refuse a loader's saved state that differs from `ours`: what this run's data have under the same names."""
    for name, value in ours.items():
        if state.get(name) != value:
            raise UserError(
                f"cannot resume: the checkpoint's data has {name} {state.get(name)}, this run {value}; "
                "resume with the same --data, --tokenizer, --context_length and --seed"
            )


def validation_batches(
    documents: list[Document],
    context_length: int,
    batch_size: int,
    eos_id: int,
    rank: int = 0,
    world_size: int = 1,
    limit: int | None = None,
) -> Iterator[Batch]:
    """The held-out documents once, in order, in the same number of batches on every rank.

    Consecutive sequences share one token, the last of one being the first of the next: so every token but
    a document's first is a target exactly once. The tail is padded, and so are the ranks that have no sequence left:
    their batches hold no target, but let collectives match.

    Args:
        documents: of split_documents.
        context_length, batch_size, eos_id, rank, world_size: as in PackedLoader.
        limit: at most this many sequences over all ranks, so that the result does not depend on their number.

    Returns:
        Iterator of Batch, [batch_size, context_length] each.
    """
    stream = PackedStream(documents, np.arange(len(documents)), eos_id)
    stride = context_length - 1
    num_sequences = -(-(int(stream.ends[-1]) - 1) // stride)
    if limit is not None:
        num_sequences = min(num_sequences, limit)
    for first in range(rank, num_sequences + rank, batch_size * world_size):
        indices = range(first, first + batch_size * world_size, world_size)
        # A sequence past the last is read from beyond the stream: padding only.
        starts = [i * stride if i < num_sequences else int(stream.ends[-1]) for i in indices]
        yield stack_sequences([stream.read(start, context_length) for start in starts])
