"""Batches of packed sequences: an endless training order that can be resumed, and the held-out documents once."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.documents import Documents, find_documents
from model import IGNORE_INDEX
from training.data.packing import Packing, Piece, Stream, deal, padding_lengths
from training.data.tokens import Store
from training.host.errors import UserError


@dataclass(frozen=True)
class Batch:
    """A micro-batch of packed sequences, or one rank's share of it, on the CPU."""

    input_ids: torch.Tensor  # int64 [B, T]
    # int64 [B, T], already shifted: position t is trained to predict targets[b, t]. -100 where nothing is predicted: a
    # token of a prompt or of padding, the next document's first token, and what lies behind the last position.
    targets: torch.Tensor
    documents: Documents  # which tokens see each other; padding is documents as of `padding_lengths`
    num_valid_tokens: int  # number of targets that are not -100

    def slice(self, rank: int, size: int) -> "Batch":
        """What `rank` (0 .. size - 1) has where `size` ranks share each sequence: [B, T / size] neighbouring tokens.

        Of 8 tokens and 4 ranks, rank 1 has those at positions 2 and 3. The documents' segments and lengths stay those
        of whole sequences, because each rank attends over whole sequences with some of the heads. A sequence of a
        number of tokens that `size` does not divide is padded to a multiple first.
        """
        length = self.input_ids.shape[1]
        if length % size:
            return self._padded(-length % size).slice(rank, size)
        own = slice(rank * length // size, (rank + 1) * length // size)
        targets = self.targets[:, own]
        documents = replace(self.documents, positions_BT=self.documents.positions_BT[:, own])
        return Batch(self.input_ids[:, own], targets, documents, int((targets != IGNORE_INDEX).sum()))

    def _padded(self, count: int) -> "Batch":
        """With `count` more tokens behind each sequence, which are a document of their own and have no targets."""
        document_ids = (self.documents.positions_BT == 0).cumsum(1)
        documents = find_documents(F.pad(document_ids, (0, count), value=self.input_ids.shape[1] + 1))
        targets = F.pad(self.targets, (0, count), value=IGNORE_INDEX)
        return Batch(F.pad(self.input_ids, (0, count)), targets, documents, self.num_valid_tokens)


def longest_first(pieces: list[Piece]) -> list[Piece]:
    """The order of a sequence's pieces. Short documents that follow each other attend in one call: they come last."""
    return sorted(pieces, key=lambda piece: piece[1] - piece[2])


def make_batch(store: Store, sequences: list[list[Piece]], context_length: int) -> Batch:
    """One sequence a row, of its pieces, the longest first; behind the last piece, end-of-text ids without targets."""
    shape = len(sequences), context_length
    input_ids, targets = np.full(shape, store.eos_id, dtype=np.int64), np.full(shape, IGNORE_INDEX, dtype=np.int64)
    document_ids = np.zeros(shape, dtype=np.int32)
    for row, pieces in enumerate(sequences):
        position = 0
        for segment, (document, start, stop) in enumerate(longest_first(pieces)):
            ids, is_masked = store.read_masked(document, start, stop)
            end = position + len(ids)
            input_ids[row, position:end] = ids
            # A piece's first token is never predicted, whatever precedes it, and neither is a prompt.
            targets[row, position : end - 1] = np.where(is_masked[1:], IGNORE_INDEX, ids[1:])
            document_ids[row, position:end] = segment
            position = end
        padding = padding_lengths(context_length - position)
        document_ids[row, position:] = len(pieces) + np.repeat(np.arange(len(padding)), padding)
    input_ids, targets, document_ids = map(torch.from_numpy, (input_ids, targets, document_ids))
    return Batch(input_ids, targets, find_documents(document_ids), int((targets != IGNORE_INDEX).sum()))


class PackedLoader:
    """Endless training batches of full sequences in one global order, which depends on corpus and packing alone.

    A step of any number of ranks takes the next sequences of that order; so the position, and a resumed run, do not
    depend on the number of ranks. Which of them a rank takes is decided by attention's cost (`packing.deal`).

    Args:
        store: the training documents.
        packing: of the store's lengths.
        batch_size: sequences of a micro-batch on this rank.
        rank, world_size: of the data-parallel group.
        read_ahead: make the next step's batches in a thread while this one's are trained on; the batches are the same.

    Attributes:
        store, packing, batch_size, rank, world_size: as given.
        num_tokens: of the store, the documents' ends included.
        sequences_per_epoch, longest_document, document_lengths: the packing's.
        next_sequence: the position in the global order, over all epochs and ranks.
    """

    def __init__(
        self, store: Store, packing: Packing, batch_size: int, rank: int = 0, world_size: int = 1,
        read_ahead: bool = False,
    ):  # fmt: skip
        self.store, self.packing, self.batch_size = store, packing, batch_size
        self.rank, self.world_size = rank, world_size
        self.num_tokens, self.sequences_per_epoch = int(store.lengths.sum()), packing.sequences_per_epoch
        self.longest_document, self.document_lengths = packing.longest_document, packing.document_lengths
        self.next_sequence = 0
        self._thread = ThreadPoolExecutor(1, "read ahead") if read_ahead else None
        self._ahead: tuple[tuple[int, int], Future[list[Batch]]] | None = None  # (first sequence, micro-batches) of it
        self._identity = {**packing.identity, "eos_id": store.eos_id, "corpus_crc32": store.identity}

    @property
    def epoch(self) -> float:
        """Epochs taken so far, the fraction of the present one included."""
        return self.next_sequence / self.sequences_per_epoch

    def check_enough_for_step(self, gradient_accumulation_steps: int) -> None:
        """Raise UserError where one optimizer step would take more sequences than an epoch has."""
        needed = self.batch_size * gradient_accumulation_steps * self.world_size
        if needed > self.sequences_per_epoch:
            raise UserError(
                f"one step takes {needed} sequences of {self.packing.context_length} tokens "
                f"(batch_size {self.batch_size} x gradient_accumulation_steps {gradient_accumulation_steps} x "
                f"{self.world_size} ranks), the corpus has {self.sequences_per_epoch}; "
                "lower --gradient_accumulation_steps, --batch_size or --context_length, or give more --data"
            )

    def next_step(self, micro_batches: int = 1) -> list[Batch]:
        """This rank's share of the next sequences: the micro-batches of a step, [batch_size, context_length] each."""
        first, count = self.next_sequence, micro_batches * self.batch_size * self.world_size
        self.next_sequence = first + count
        asked, self._ahead = self._ahead, None
        batches = (
            asked[1].result() if asked and asked[0] == (first, micro_batches) else self._make(first, micro_batches)
        )
        if self._thread is not None:
            self._ahead = (first + count, micro_batches), self._thread.submit(self._make, first + count, micro_batches)
        return batches

    def _make(self, first: int, micro_batches: int) -> list[Batch]:
        indices = range(first, first + micro_batches * self.batch_size * self.world_size)
        sequences = [self.pieces(index) for index in indices]
        # Of tokens that attend to each other.
        lengths = [[stop - start for _, start, stop in pieces] for pieces in sequences]
        lengths = [[*each, *padding_lengths(self.packing.context_length - sum(each))] for each in lengths]
        pairs = np.array([sum(n * (n + 1) // 2 for n in each) for each in lengths])
        own = deal(pairs, self.world_size)[:, self.rank].reshape(micro_batches, self.batch_size)
        length = self.packing.context_length
        return [make_batch(self.store, [sequences[i] for i in positions], length) for positions in own]

    def pieces(self, index: int) -> list[Piece]:
        """The pieces of the sequence `index` of the global order, over all epochs."""
        return self.packing.pieces(*divmod(index, self.sequences_per_epoch))

    def sources(self, first: int, last: int) -> list[str]:
        """The files of the documents in sequences `first` to `last` - 1 of the global order, each once, in order."""
        pieces = [piece for index in range(first, last) for piece in self.pieces(index)]
        return [*dict.fromkeys(self.store.source(document) for document, _, _ in pieces)]

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
    """Refuse a loader's saved `state` that differs from `ours`, the values of this run under the same names."""
    for name, value in ours.items():
        if state.get(name) != value:
            raise UserError(
                f"cannot resume: the checkpoint's data has {name} {state.get(name)}, this run {value}; "
                "resume with the same --data and its settings, --tokenizer, --context_length and --seed"
            )


def validation_batches(
    store: Store,
    context_length: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    limit: int | None = None,
) -> Iterator[Batch]:
    """The held-out documents once, in order, in the same number of batches on every rank.

    Consecutive sequences share one token, the last of one being the first of the next: so every token but a document's
    first is a target exactly once. The tail is padded, and so are the ranks that have no sequence left: their batches
    hold no target, but let collectives match.

    Args:
        store: the held-out documents.
        context_length: tokens of a sequence, at least 2.
        batch_size, rank, world_size: as in PackedLoader.
        limit: at most this many sequences over all ranks, so that the result does not depend on their number.

    Returns:
        Iterator of Batch, [batch_size, context_length] each.
    """
    stream = Stream(store.lengths, np.arange(len(store.lengths)))
    stride = context_length - 1
    num_sequences = -(-(int(stream.ends[-1]) - 1) // stride)
    if limit is not None:
        num_sequences = min(num_sequences, limit)
    for first in range(rank, num_sequences + rank, batch_size * world_size):
        indices = range(first, first + batch_size * world_size, world_size)
        # A sequence past the last has no pieces: it is padding only.
        sequences = [stream.cut(i * stride, i * stride + context_length) if i < num_sequences else [] for i in indices]
        yield make_batch(store, sequences, context_length)


def check_can_validate(store: Store, context_length: int, limit: int) -> None:
    """Raise UserError where none of the `validation_batches` has a token to predict, as where all are prompts."""
    if not any(batch.num_valid_tokens for batch in validation_batches(store, context_length, 1, limit=limit)):
        raise UserError(
            f"the first {limit} held-out sequences have no token to be predicted; raise --validation_sequences, or "
            "give 0"
        )
