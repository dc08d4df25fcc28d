"""Batches of packed sequences, for training and validation.

Training's are in an endless order, which can be resumed.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.documents import Documents, find_documents
from kernels.head_loss import IGNORE_INDEX
from training.data.packing import BestFitPacking, Packing, Span, Stream, deal, padding_lengths
from training.data.tokens import PROMPT, Store
from training.host.errors import UserError


@dataclass(frozen=True)
class Answers:
    """The answers in a micro-batch, each a document with its prompt, and their numbers.

    Attributes:
        index_BT: int64 [B, T], the document of each token, counted over all rows with padding.
        values: float32 [documents], numbers of a document's last token, by the names of
            Store.columns; NaN for padding.
        columns_BT: float32 [B, T], numbers of the target at a position; 0 where there is none.
    """

    index_BT: torch.Tensor
    values: dict[str, torch.Tensor]
    columns_BT: dict[str, torch.Tensor]

    def slice(self, positions: slice, padding: int) -> "Answers":
        """Returns these documents with a rank's positions of [B, T + padding].

        The last document of a row has its padding.
        """
        last = self.index_BT[:, -1:].expand(-1, padding)
        index_BT = torch.cat([self.index_BT, last], 1)[:, positions]
        columns_BT = {}
        for name, x_BT in self.columns_BT.items():
            columns_BT[name] = F.pad(x_BT, (0, padding))[:, positions]
        return Answers(index_BT, self.values, columns_BT)

    def to(self, device: torch.device) -> "Answers":
        values = {name: x.to(device, non_blocking=True) for name, x in self.values.items()}
        columns_BT = {name: x.to(device, non_blocking=True) for name, x in self.columns_BT.items()}
        return Answers(self.index_BT.to(device, non_blocking=True), values, columns_BT)


@dataclass(frozen=True)
class Batch:
    """A micro-batch of packed sequences, or one rank's shard of it, on the CPU."""

    input_ids: torch.Tensor  # int64 [B, T]
    # int64 [B, T], already shifted: position t is trained to predict targets[b, t]. A target is
    # -100 if the next token belongs to a prompt, to padding or to another document, and at the last
    # position.
    targets: torch.Tensor
    # tokens see only their own document; padding is documents, too, see padding_lengths
    documents: Documents
    num_valid_tokens: int  # number of targets that are not -100
    padding: tuple[int, ...] = ()  # tokens of each document that is padding
    answers: Answers | None = None  # None: data without columns

    @property
    def text_lengths(self) -> list[int]:
        return list((Counter(self.documents.lengths) - Counter(self.padding)).elements())

    def slice(self, rank: int, size: int) -> "Batch":
        """Returns a rank's shard, [B, T / size] neighbours, if `size` ranks share each sequence.

        With 8 tokens and 4 ranks, rank 1 has positions 2 and 3. The documents describe whole
        sequences: each rank attends over whole sequences with some of the heads. Sequences are
        padded first to a multiple of `size`, by a document without targets.
        """
        rows, length = self.input_ids.shape
        count = -length % size
        tokens = (length + count) // size
        positions = slice(rank * tokens, (rank + 1) * tokens)
        input_ids, targets, documents = self.input_ids, self.targets, self.documents
        if count:  # F.pad copies sequences that need no padding, too
            input_ids = F.pad(input_ids, (0, count))
            targets = F.pad(targets, (0, count), value=IGNORE_INDEX)
            documents = documents.padded(count)
        targets = targets[:, positions]
        return Batch(
            input_ids=input_ids[:, positions],
            targets=targets,
            documents=documents.share(positions),
            num_valid_tokens=int((targets != IGNORE_INDEX).sum()),
            padding=self.padding + ((count,) * rows if count else ()),
            answers=self.answers and self.answers.slice(positions, count),
        )


def longest_first(spans: list[Span]) -> list[Span]:
    """Returns a sequence's spans, the longest first: short ones side by side attend in one call."""
    return sorted(spans, key=lambda span: span[1] - span[2])


def make_batch(store: Store, sequences: list[list[Span]], context_length: int) -> Batch:
    """Makes a batch with a sequence in each row: its spans, the longest first, then padding.

    Padding is end-of-text ids without targets.
    """
    rows = _Rows(store, (len(sequences), context_length))
    for row, spans in enumerate(sequences):
        rows.fill(row, spans)
    is_target = rows.targets != IGNORE_INDEX
    documents = find_documents(
        torch.from_numpy(rows.document_ids), torch.from_numpy(rows.prompt_ids)
    )
    is_padding_BT = torch.from_numpy(rows.is_padding) if rows.padding else None
    return Batch(
        input_ids=torch.from_numpy(rows.input_ids),
        targets=torch.from_numpy(rows.targets),
        documents=replace(documents, is_padding_BT=is_padding_BT),
        num_valid_tokens=int(is_target.sum()),
        padding=tuple(rows.padding),
        answers=rows.answers(is_target) if rows.columns else None,
    )


class _Rows:
    """Arrays of a batch, [B, T] each, which are filled row by row.

    Attributes:
        num_texts: documents of each row that are not padding.
        padding: tokens of each document of padding.
    """

    def __init__(self, store: Store, shape: tuple[int, int]):
        self._store = store
        self.input_ids = np.full(shape, store.eos_id, dtype=np.int64)
        self.targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        self.document_ids = np.zeros(shape, dtype=np.int32)  # counted from 0 in each row
        self.prompt_ids = np.zeros(shape, dtype=np.int32)  # equal for answers to one prompt
        self.is_padding = np.zeros(shape, dtype=bool)
        self.columns = {name: np.zeros(shape, dtype=np.float32) for name in store.columns}
        self.num_texts: list[int] = []
        self.padding: list[int] = []

    def fill(self, row: int, spans: list[Span]) -> None:
        position, number = 0, 0
        for span in longest_first(spans):
            position, number = self._put(row, position, number, span)
        lengths = padding_lengths(self.input_ids.shape[1] - position)
        numbers = number + np.repeat(np.arange(len(lengths)), lengths)
        self.document_ids[row, position:] = numbers
        self.prompt_ids[row, position:] = numbers
        self.is_padding[row, position:] = True
        self.padding += lengths
        self.num_texts.append(number)

    def _put(self, row: int, position: int, number: int, span: Span) -> tuple[int, int]:
        """Writes a span, whose first document gets this number; returns what follows it."""
        ids, is_masked = self._store.read_masked(*span)
        if not len(ids):
            return position, number
        place = slice(position, position + len(ids))
        self.input_ids[row, place] = ids
        # The first token of a span is not a target, whatever precedes it. Neither is a prompt.
        self.targets[row, position : place.stop - 1] = np.where(
            is_masked[1:], IGNORE_INDEX, ids[1:]
        )
        numbers = np.full(len(ids), number)
        columns = self._store.read_columns(*span)
        for name, column in columns.items():
            self.columns[name][row, place] = column
        if columns:
            answer = columns["answer"]
            numbers[1:] += np.cumsum(answer[1:] != answer[:-1])
        self.document_ids[row, place] = numbers
        has_prompt = bool(columns) and columns["answer"][0] == PROMPT
        self.prompt_ids[row, place] = number if has_prompt else numbers
        return place.stop, int(numbers[-1]) + 1

    def answers(self, is_target: np.ndarray) -> Answers:
        """Returns the answers of the batch, whose documents are numbered over all rows."""
        counts = self.document_ids[:, -1:] + 1
        index = (self.document_ids + np.cumsum(counts, 0) - counts).astype(np.int64)
        _, firsts = np.unique(index.ravel()[::-1], return_index=True)
        lasts = index.size - 1 - firsts  # place of each document's last token
        num_texts = np.repeat(self.num_texts, counts.ravel())
        is_padding = self.document_ids.ravel()[lasts] >= num_texts
        values, shifted = {}, {}
        for name, column in self.columns.items():
            last = np.where(is_padding, np.float32(np.nan), column.ravel()[lasts])
            values[name] = torch.from_numpy(last)
            following = np.where(is_target, np.roll(column, -1, 1), np.float32(0))
            shifted[name] = torch.from_numpy(following)
        return Answers(torch.from_numpy(index), values, shifted)


def prompts_of(store: Store) -> tuple[float, float]:
    """Returns the share of tokens in prompts of several answers, and answers in a document.

    They are estimated from 1,000 documents.
    """
    if "answer" not in store.columns:
        return 0.0, 0.0
    count = len(store.lengths)
    sample = np.linspace(0, count - 1, min(1000, count)).astype(int).tolist()
    columns = [store.read_columns(i, 0, int(store.lengths[i]))["answer"] for i in sample]
    answers = sum(1 + np.count_nonzero(np.diff(column[column != PROMPT])) for column in columns)
    return float((np.concatenate(columns) == PROMPT).mean()), float(answers) / len(columns)


class PackedLoader:
    """Endless training batches of full sequences, in a global order that depends on corpus and
    packing alone.

    A step takes the next sequences of that order, and `packing.deal` deals them to the ranks by the
    cost of attention. The position, and so a resumed run, does not depend on the number of ranks.

    Args:
        packing: made of the lengths of `store`, the training documents.
        batch_size: sequences of a micro-batch on this rank.
        rank, world_size: this process in the data-parallel group.
        read_ahead: make the next step's batches in a thread, while the present step is trained.
        identity: what else must be the same in a resumed run, beside the packing's identity and the
            store's.

    Attributes:
        next_sequence: the position in the global order, over all epochs and ranks.
    """

    def __init__(
        self,
        store: Store,
        packing: Packing,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        read_ahead: bool = False,
        identity: dict | None = None,
    ):
        self.store, self.packing, self.batch_size = store, packing, batch_size
        self.rank, self.world_size = rank, world_size
        self.num_tokens = int(store.lengths.sum()) - packing.left_out
        self.sequences_per_epoch = packing.sequences_per_epoch
        self.next_sequence = 0
        self._thread = ThreadPoolExecutor(1, "read ahead") if read_ahead else None
        # The next step's (first sequence, number of micro-batches), and its batches.
        self._ahead: tuple[tuple[int, int], Future[list[Batch]]] | None = None
        self._identity = packing.identity | {"eos_id": store.eos_id, "corpus_crc32": store.identity}
        self._identity |= identity or {}

    @property
    def epoch(self) -> float:
        """Epochs taken so far, with the fraction of the present epoch."""
        return self.next_sequence / self.sequences_per_epoch

    def check_enough_for_step(self, gradient_accumulation_steps: int) -> None:
        """Raises UserError if a step takes more sequences than an epoch has."""
        needed = self.batch_size * gradient_accumulation_steps * self.world_size
        if needed <= self.sequences_per_epoch:
            return
        raise UserError(
            f"one step takes {needed} sequences of {self.packing.context_length} tokens "
            f"(batch_size {self.batch_size} x gradient_accumulation_steps "
            f"{gradient_accumulation_steps} x {self.world_size} ranks), the corpus has "
            f"{self.sequences_per_epoch}; lower --gradient_accumulation_steps, --batch_size or "
            "--context_length, or give more --data"
        )

    def next_step(self, micro_batches: int = 1) -> list[Batch]:
        """Returns this rank's part of the next sequences: micro-batches of [batch_size,
        context_length] tokens."""
        first = self.next_sequence
        self.next_sequence += micro_batches * self.batch_size * self.world_size
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (first, micro_batches):
            batches = ahead[1].result()
        else:
            batches = self._make(first, micro_batches)
        if self._thread is not None:
            step = (self.next_sequence, micro_batches)
            self._ahead = step, self._thread.submit(self._make, *step)
        return batches

    def _make(self, first: int, micro_batches: int) -> list[Batch]:
        count = micro_batches * self.batch_size * self.world_size
        sequences = [self.spans(index) for index in range(first, first + count)]
        costs = np.array([self._count_pairs(spans) for spans in sequences])
        places = deal(costs, self.world_size)[:, self.rank].reshape(micro_batches, self.batch_size)
        return [
            make_batch(self.store, [sequences[i] for i in row], self.packing.context_length)
            for row in places
        ]

    def _count_pairs(self, spans: list[Span]) -> int:
        """Returns the pairs of tokens that attend to each other: the cost of a sequence."""
        lengths = [stop - start for _, start, stop in spans]
        lengths += padding_lengths(self.packing.context_length - sum(lengths))
        return sum(length * (length + 1) // 2 for length in lengths)

    def spans(self, index: int) -> list[Span]:
        """Returns the spans of sequence `index` of the global order, over all epochs."""
        return self.packing.spans(*divmod(index, self.sequences_per_epoch))

    def sources(self, first: int, last: int) -> list[str]:
        """Returns the files of the documents in sequences first .. last - 1, each file once."""
        spans = [span for index in range(first, last) for span in self.spans(index)]
        return [*dict.fromkeys(self.store.source(document) for document, _, _ in spans)]

    def state_dict(self) -> dict:
        """Returns the position and the identity of the data, the same on every rank."""
        return {"next_sequence": self.next_sequence, **self._identity}

    def load_state_dict(self, state: dict) -> None:
        check_same_data(state, self._identity)
        self.next_sequence = state["next_sequence"]


DOCUMENTS = {"corpus_crc32": "the training documents", "validation_crc32": "the held-out documents"}


def check_same_data(state: dict, ours: dict) -> None:
    """Raises UserError if a loader's saved `state` differs from `ours`, this run's values."""
    for name, value in ours.items():
        if state.get(name) == value:
            continue
        change = f"the checkpoint's data has {name} {state.get(name)}, this run {value}"
        if name in DOCUMENTS:
            change = f"{DOCUMENTS[name]} have changed since the checkpoint"
        raise UserError(
            f"cannot resume: {change}; resume with the same --data, --validation_data, their "
            "settings and stored log-probabilities, --tokenizer, --context_length and --seed, or "
            "start another run from the checkpoint's weights by --init_from"
        )


def count_sequences(store: Store, context_length: int) -> int:
    """Returns the number of sequences that `validation_batches` makes without a limit."""
    if store.columns:
        return BestFitPacking(store.lengths, context_length, seed=0).sequences_per_epoch
    return -(-(int(store.lengths.sum()) - 1) // (context_length - 1))


def validation_batches(
    store: Store,
    context_length: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Yields the held-out documents once, in order, in batches of [batch_size, context_length].

    A sequence begins with the last token of the sequence before: so each token except a document's
    first is a target exactly once. The tail is padded. Every rank gets the same number of batches,
    for its collectives to match; a batch behind the last sequence is padding only. Documents with
    columns stay whole, as in training. `limit` bounds the sequences over all ranks, so that the
    result does not depend on the number of ranks.
    """
    packing = BestFitPacking(store.lengths, context_length, seed=0) if store.columns else None
    if packing:
        num_sequences = packing.sequences_per_epoch
    else:
        num_sequences = count_sequences(store, context_length)
    if limit is not None:
        num_sequences = min(num_sequences, limit)
    stream = Stream(store.lengths, np.arange(len(store.lengths)))

    def spans(i: int) -> list[Span]:
        if i >= num_sequences:
            return []
        if packing:
            return packing.spans(0, i)
        start = i * (context_length - 1)
        return stream.cut(start, start + context_length)

    for first in range(rank, num_sequences + rank, batch_size * world_size):
        indices = range(first, first + batch_size * world_size, world_size)
        yield make_batch(store, [spans(i) for i in indices], context_length)


def check_can_validate(store: Store, context_length: int, limit: int) -> None:
    """Raises UserError if no sequence of `validation_batches` has a target."""
    batches = validation_batches(store, context_length, 1, limit=limit)
    if not any(batch.num_valid_tokens for batch in batches):
        raise UserError(
            f"the first {limit} held-out sequences have no token to be predicted; "
            "raise --validation_sequences, or give 0, or other --validation_data"
        )
