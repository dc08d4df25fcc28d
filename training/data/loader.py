"""Batches of packed sequences: training's, in an endless order that can be resumed, and
validation's."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.documents import Documents, find_documents
from model import IGNORE_INDEX
from training.data.packing import BestFitPacking, Packing, Span, Stream, deal, padding_lengths
from training.data.tokens import PROMPT, Store
from training.host.errors import UserError


@dataclass(frozen=True)
class Answers:
    """The answers in a micro-batch, each with its prompt a document, and their numbers for an
    objective."""

    index_BT: (
        torch.Tensor
    )  # int64 [B, T], the document of each token, counted over all rows, padding included
    # float32 [documents, counted so]: what a document's last token has, by the names of
    # Store.columns; padding: NaN.
    values: dict[str, torch.Tensor]
    columns_BT: dict[
        str, torch.Tensor
    ]  # float32 [B, T]: what the target at a position has; 0 where there is none

    def slice(self, own: slice, padding: int) -> "Answers":
        """Returns these documents with a rank's positions of [B, T + padding]: the last of a row
        has its padding."""
        index_BT = torch.cat([self.index_BT, self.index_BT[:, -1:].expand(-1, padding)], 1)[:, own]
        columns_BT = {
            name: F.pad(x_BT, (0, padding))[:, own] for name, x_BT in self.columns_BT.items()
        }
        return Answers(index_BT, self.values, columns_BT)

    def to(self, device: torch.device) -> "Answers":
        values, columns_BT = (
            {name: x.to(device, non_blocking=True) for name, x in each.items()}
            for each in (self.values, self.columns_BT)
        )
        return Answers(self.index_BT.to(device, non_blocking=True), values, columns_BT)


@dataclass(frozen=True)
class Batch:
    """A micro-batch of packed sequences, or one rank's share of it, on the CPU."""

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
        """Returns the share of `rank`, 0 .. size - 1, if `size` ranks share each sequence: [B, T /
        size] neighbours.

        With 8 tokens and 4 ranks, rank 1 has positions 2 and 3. The documents describe whole
        sequences: each rank attends over whole sequences with some of the heads. Sequences are
        padded first to a multiple of `size`, by a document without targets.
        """
        input_ids, targets, documents, length = (
            self.input_ids,
            self.targets,
            self.documents,
            self.input_ids.shape[1],
        )
        padding = self.padding
        if count := -length % size:
            documents = documents.padded(count)
            input_ids, targets = (
                F.pad(input_ids, (0, count)),
                F.pad(targets, (0, count), value=IGNORE_INDEX),
            )
            padding += (count,) * len(targets)
        share, answers = (length + count) // size, self.answers
        own = slice(rank * share, (rank + 1) * share)
        documents, targets = documents.share(own), targets[:, own]
        answers = answers and answers.slice(own, count)
        return Batch(
            input_ids[:, own],
            targets,
            documents,
            int((targets != IGNORE_INDEX).sum()),
            padding,
            answers,
        )


def longest_first(spans: list[Span]) -> list[Span]:
    """Returns a sequence's spans, the longest first: the short ones, one behind the other, attend
    in one call."""
    return sorted(spans, key=lambda span: span[1] - span[2])


def make_batch(store: Store, sequences: list[list[Span]], context_length: int) -> Batch:
    """Makes a batch with a sequence in each row: its spans, the longest first, then end-of-text ids
    without targets."""
    shape = len(sequences), context_length
    input_ids, targets = (
        np.full(shape, store.eos_id, dtype=np.int64),
        np.full(shape, IGNORE_INDEX, dtype=np.int64),
    )
    (document_ids, prompt_ids), all_padding = np.zeros((2, *shape), dtype=np.int32), []
    is_padding = np.zeros(shape, dtype=bool)
    columns = {name: np.zeros(shape, dtype=np.float32) for name in store.columns}
    ends: list[int] = []  # documents of each row that are not padding
    for row, spans in enumerate(sequences):
        position, segment = 0, 0
        for document, start, stop in longest_first(spans):
            ids, is_masked = store.read_masked(document, start, stop)
            end = position + len(ids)
            input_ids[row, position:end] = ids
            # The first token of a span is not a target, whatever precedes it. Neither is a prompt.
            targets[row, position : end - 1] = np.where(is_masked[1:], IGNORE_INDEX, ids[1:])
            values = store.read_columns(document, start, stop)
            for name, column in values.items():
                columns[name][row, position:end] = column
            texts = (
                np.diff(values["answer"], prepend=values["answer"][:1]).astype(bool).cumsum()
                if values
                else 0
            )
            document_ids[row, position:end] = segment + texts
            has_prompt = bool(values) and end > position and values["answer"][0] == PROMPT
            prompt_ids[row, position:end] = segment + (0 if has_prompt else texts)
            segment, position = document_ids[row, end - 1] + 1 if end > position else segment, end
        padding = padding_lengths(context_length - position)
        of_padding = np.repeat(np.arange(len(padding)), padding)
        document_ids[row, position:] = prompt_ids[row, position:] = segment + of_padding
        is_padding[row, position:] = True
        all_padding += padding
        ends.append(segment)
    answers = (
        _make_answers(document_ids, ends, targets != IGNORE_INDEX, columns) if columns else None
    )
    num_valid_tokens = int((targets != IGNORE_INDEX).sum())
    made = [torch.from_numpy(x) for x in (input_ids, targets, document_ids, prompt_ids)]
    documents = replace(
        find_documents(*made[2:]),
        is_padding_BT=torch.from_numpy(is_padding) if all_padding else None,
    )
    return Batch(made[0], made[1], documents, num_valid_tokens, tuple(all_padding), answers)


def _make_answers(
    document_ids: np.ndarray,
    num_texts: list[int],
    is_target: np.ndarray,
    columns: dict[str, np.ndarray],
) -> Answers:
    """Makes the answers of a batch.

    Args:
        document_ids: [B, T], counted from 0 in each row, texts before padding.
        num_texts: documents of each row that are not padding.
        columns: float32 [B, T] by name, of the tokens at their own positions.
    """
    counts = document_ids[:, -1:] + 1
    index = (document_ids + np.cumsum(counts, 0) - counts).astype(np.int64)
    _, firsts = np.unique(index.ravel()[::-1], return_index=True)
    lasts = index.size - 1 - firsts  # place of each document's last token
    is_padding = document_ids.ravel()[lasts] >= np.repeat(num_texts, counts.ravel())
    values = {
        name: np.where(is_padding, np.float32(np.nan), x.ravel()[lasts])
        for name, x in columns.items()
    }
    shifted = {
        name: np.where(is_target, np.roll(x, -1, 1), np.float32(0)) for name, x in columns.items()
    }
    made = ({name: torch.from_numpy(x) for name, x in each.items()} for each in (values, shifted))
    return Answers(torch.from_numpy(index), *made)


def prompts_of(store: Store) -> tuple[float, float]:
    """Returns the share of tokens in prompts of several answers, and answers in a document, from
    1,000 documents."""
    if "answer" not in store.columns:
        return 0.0, 0.0
    sample = (
        np.linspace(0, len(store.lengths) - 1, min(1000, len(store.lengths))).astype(int).tolist()
    )
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
        self, store: Store, packing: Packing, batch_size: int, rank: int = 0, world_size: int = 1,
        read_ahead: bool = False, identity: dict | None = None,
    ):  # fmt: skip
        self.store, self.packing, self.batch_size = store, packing, batch_size
        self.rank, self.world_size = rank, world_size
        self.num_tokens = int(store.lengths.sum()) - packing.left_out
        self.sequences_per_epoch = packing.sequences_per_epoch
        self.next_sequence = 0
        self._thread = ThreadPoolExecutor(1, "read ahead") if read_ahead else None
        # The next step's (first sequence, number of micro-batches), and its batches.
        self._ahead: tuple[tuple[int, int], Future[list[Batch]]] | None = None
        self._identity = {
            **packing.identity,
            "eos_id": store.eos_id,
            "corpus_crc32": store.identity,
        }
        self._identity |= identity or {}

    @property
    def epoch(self) -> float:
        """Epochs taken so far, with the fraction of the present epoch."""
        return self.next_sequence / self.sequences_per_epoch

    def check_enough_for_step(self, gradient_accumulation_steps: int) -> None:
        needed = self.batch_size * gradient_accumulation_steps * self.world_size
        if needed > self.sequences_per_epoch:
            sizes = (
                f"batch_size {self.batch_size} x gradient_accumulation_steps "
                f"{gradient_accumulation_steps}"
            )
            taken = (
                f"{needed} sequences of {self.packing.context_length} tokens ({sizes} x "
                f"{self.world_size} ranks)"
            )
            raise UserError(
                f"one step takes {taken}, the corpus has {self.sequences_per_epoch}; lower "
                "--gradient_accumulation_steps, --batch_size or --context_length, or give more "
                "--data"
            )

    def next_step(self, micro_batches: int = 1) -> list[Batch]:
        """Returns this rank's share of the next sequences: micro-batches of [batch_size,
        context_length] tokens."""
        first, count = self.next_sequence, micro_batches * self.batch_size * self.world_size
        self.next_sequence = first + count
        asked, self._ahead = self._ahead, None
        is_made = asked is not None and asked[0] == (first, micro_batches)
        batches = asked[1].result() if asked and is_made else self._make(first, micro_batches)
        if self._thread is not None:
            self._ahead = (
                (first + count, micro_batches),
                self._thread.submit(self._make, first + count, micro_batches),
            )
        return batches

    def _make(self, first: int, micro_batches: int) -> list[Batch]:
        indices = range(first, first + micro_batches * self.batch_size * self.world_size)
        sequences, length = [self.spans(index) for index in indices], self.packing.context_length
        # Pairs of tokens that attend to each other are the cost of a sequence.
        lengths = [[stop - start for _, start, stop in spans] for spans in sequences]
        pairs = [
            sum(n * (n + 1) // 2 for n in [*each, *padding_lengths(length - sum(each))])
            for each in lengths
        ]
        own = deal(np.array(pairs), self.world_size)[:, self.rank].reshape(
            micro_batches, self.batch_size
        )
        return [
            make_batch(self.store, [sequences[i] for i in positions], length) for positions in own
        ]

    def spans(self, index: int) -> list[Span]:
        """Returns the spans of sequence `index` of the global order, over all epochs."""
        return self.packing.spans(*divmod(index, self.sequences_per_epoch))

    def sources(self, first: int, last: int) -> list[str]:
        """Returns the files of the documents in sequences first .. last - 1, each file once, in
        order."""
        spans = [span for index in range(first, last) for span in self.spans(index)]
        return [*dict.fromkeys(self.store.source(document) for document, _, _ in spans)]

    def state_dict(self) -> dict:
        """Returns the position and the identity of the data, as plain numbers and strings, the same
        on every rank."""
        return {"next_sequence": self.next_sequence, **self._identity}

    def load_state_dict(self, state: dict) -> None:
        check_same_data(state, self._identity)
        self.next_sequence = state["next_sequence"]


DOCUMENTS = {"corpus_crc32": "the training documents", "validation_crc32": "the held-out documents"}


def check_same_data(state: dict, ours: dict) -> None:
    """Raise UserError if a loader's saved `state` differs from `ours`, this run's values under the
    same names."""
    for name, value in ours.items():
        if state.get(name) != value:
            found = f"the checkpoint's data has {name} {state.get(name)}, this run {value}"
            if name in DOCUMENTS:
                found = f"{DOCUMENTS[name]} have changed since the checkpoint"
            data = "--data, --validation_data, their settings and stored log-probabilities"
            raise UserError(
                f"cannot resume: {found}; resume with the same {data}, --tokenizer, "
                "--context_length and --seed, or "
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
    stream, stride = Stream(store.lengths, np.arange(len(store.lengths))), context_length - 1
    packing = BestFitPacking(store.lengths, context_length, seed=0) if store.columns else None
    num_sequences = (
        packing.sequences_per_epoch if packing else count_sequences(store, context_length)
    )
    num_sequences = num_sequences if limit is None else min(num_sequences, limit)

    def spans(i: int) -> list[Span]:
        if i >= num_sequences:
            return []
        return (
            packing.spans(0, i) if packing else stream.cut(i * stride, i * stride + context_length)
        )

    for first in range(rank, num_sequences + rank, batch_size * world_size):
        indices = range(first, first + batch_size * world_size, world_size)
        yield make_batch(store, [spans(i) for i in indices], context_length)


def check_can_validate(store: Store, context_length: int, limit: int) -> None:
    """Raise UserError if no sequence of `validation_batches` has a target, as where all tokens are
    prompts."""
    if not any(
        batch.num_valid_tokens
        for batch in validation_batches(store, context_length, 1, limit=limit)
    ):
        none = f"the first {limit} held-out sequences have no token to be predicted"
        raise UserError(
            f"{none}; raise --validation_sequences, or give 0, or other --validation_data"
        )
