"""A step of training: its model, sizes and documents, and the weights that wait on the host under
an execution."""

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from torch import Tensor

from kernels.config import ModelConfig
from kernels.head_loss import uses_chunked_loss
from kernels.parts import LayerParts, MixerKind
from training.data.packing import deal
from training.families.trained import ALL, Trained
from training.memory.execution import Execution, Placement, host_weights, inventory_of
from training.optim.inventory import Inventory, Row

LENGTHS_PER_OCTAVE = 8  # bins of document lengths between one power of two and the next


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of one rank's micro-batch, as a histogram of their lengths."""

    longest: int  # tokens of the longest document that may come
    # (tokens, average number of such documents in a micro-batch)
    lengths: tuple[tuple[float, float], ...]
    # (tokens, answers, tokens of all answers, average number) of prompts; `lengths` has prompts and
    # answers as well.
    prompts: tuple[tuple[float, float, float, float], ...] = ()

    @property
    def count(self) -> float:
        """Documents in a micro-batch, on average."""
        return sum(count for _, count in self.lengths)

    def with_prompts(self, share: float, answers: float) -> "PackedDocuments":
        """Returns the same tokens where each document is a prompt, a `share` of its tokens, and so
        many answers."""
        if not share:
            return self
        parts = ((share * n, (1 - share) * n, count) for n, count in self.lengths)
        prompts = tuple((prompt, answers, tokens, count) for prompt, tokens, count in parts)
        lengths = [(prompt, count) for prompt, _, _, count in prompts]
        lengths += [(tokens / answers, answers * count) for _, _, tokens, count in prompts]
        return PackedDocuments(self.longest, tuple(lengths), prompts)

    @classmethod
    def one_each(cls, context_length: int, batch_size: int) -> "PackedDocuments":
        """Returns documents as long as their sequences, one in each."""
        return cls(context_length, ((context_length, batch_size),))

    @classmethod
    def average(
        cls,
        lengths: np.ndarray,
        sequences: np.ndarray,
        longest: int,
        batch_size: int,
        num_ranks: int,
        micro_batches: int = 1,
    ) -> "PackedDocuments":
        """Returns the average over an epoch's micro-batches, each of the rank with the most pairs
        of a query and a key.

        All ranks wait for that rank. Documents of similar lengths count as documents of one length
        with as many pairs.

        Args:
            lengths: int [N], tokens of each document.
            sequences: int [N], the number of each document's sequence in the epoch.
            longest: tokens of the longest document that any epoch may have.
            batch_size, num_ranks, micro_batches: of a step, whose sequences `packing.deal` gives
                out to ranks.
        """
        step = batch_size * num_ranks * micro_batches
        used = (sequences.max() + 1) // step * step
        pairs = lengths * (lengths + 1) / 2
        pairs_of_sequences = np.bincount(sequences, weights=pairs)[:used].reshape(-1, step)
        # [micro-batches of the epoch, sequences, ranks]: numbers of sequences
        dealt = deal(pairs_of_sequences, num_ranks) + np.arange(0, used, step)[:, None, None]
        dealt = dealt.reshape(-1, batch_size, num_ranks)
        slowest = pairs_of_sequences.reshape(-1)[dealt].sum(1).argmax(1)
        counts = np.zeros(sequences.max() + 1)
        np.add.at(counts, dealt[np.arange(len(dealt)), :, slowest], 1 / len(dealt))
        bins = np.ceil(LENGTHS_PER_OCTAVE * np.log2(lengths)).astype(np.int64)
        in_bin = np.bincount(bins, weights=counts[sequences])
        pairs_in_bin = np.bincount(bins, weights=counts[sequences] * pairs)
        filled = in_bin.nonzero()[0]
        # n with n (n + 1) / 2 pairs
        typical = np.sqrt(2 * pairs_in_bin[filled] / in_bin[filled] + 0.25) - 0.5
        # Rounded, so that documents of 2,048 tokens each are not of 2,048.0000000001, which other
        # kernels attend to.
        return cls(longest, tuple(zip(typical.round(6).tolist(), in_bin[filled].tolist())))


@dataclass(frozen=True)
class Scoring:
    """Scoring of a micro-batch for an objective: passes and bytes that the loss of next tokens does
    not take."""

    # forward passes of the head where the loss is chunked; the standard loss keeps its logits
    head_passes: int = 0
    forward_passes: int = 0  # of blocks and head, without a backward
    token_bytes: int = 0


@dataclass(eq=False, repr=False)
class Step:
    """A training step of a model, with its bytes and seconds under any execution."""

    shard: ModelConfig  # one rank's part of the model
    # on any device; where FSDP2 shards them, DTensors or shards
    named_parameters: Iterable[tuple[str, Tensor]]
    # Lengths and numbers are of one rank, or of the ranks that share sequences.
    context_length: int
    batch_size: int = 1
    micro_batches: int = 1
    # The documents of a micro-batch. None: not known. Bytes are then counted for sequences of
    # several documents, the longest of nearly the whole length, and seconds for sequences of one
    # document.
    documents: PackedDocuments | None = None
    # Settings that planning does not change: attention backend, kinds and implementation, and the
    # loss and the format of the optimizer's state unless they are "auto".
    given: Execution = Execution()
    element_size: int = 2  # bytes per element of an activation
    num_ranks: int = 1  # ranks that share each sequence, a divisor of the key/value heads
    # ranks over which FSDP2 shards each parameter; 1 where all share matrices; 0: no FSDP2
    num_shards: int = 0
    tensor_ranks: int = 1  # ranks that share each matrix
    num_machines: int = 1  # machines of equally many ranks; ranks of one share sequences, matrices
    # copies of the sharded parameters, on machines of their own where there are enough
    num_copies: int = 1
    trained: Trained = ALL
    scoring: Scoring = Scoring()  # work of the loss beyond the loss of next tokens

    def __post_init__(self):
        shard, self.named_parameters = self.shard, list(self.named_parameters)
        declared = shard.parameters()
        declared |= self.trained.added(declared)
        on_gpus = replace(self.given, placements=(), ends="gpu", gpu_state_bytes=math.inf)

        @functools.cache
        def on_gpu(state_format: str) -> Inventory:
            execution = replace(on_gpus, state_format=state_format)
            accumulate = self.micro_batches > 1
            return inventory_of(self.named_parameters, declared, execution, accumulate=accumulate)

        @functools.cache
        def away(places: tuple[str, ...], ends: str) -> set[str]:
            return {*host_weights(declared, places, ends)}

        @functools.cache
        def inventory(
            places: tuple[str, ...], ends: str, gpu_state_bytes: float, state_format: str
        ) -> Inventory:
            return on_gpu(state_format).placed(gpu_state_bytes, away(places, ends))

        self._inventory = inventory
        self.prices: dict[tuple, Any] = {}  # what `timeline.py` derives for all placements
        self.layers = shard.num_hidden_layers
        self.head = self.element_size * shard.vocab_size * shard.hidden_size  # bytes
        rows = inventory((), "gpu", math.inf, "float32").rows
        # the embedding's gradient, and all other matrices'
        has_gradient = rows[0].gradient_dtype is not None
        # Elements in all, and shares of the trained ones.
        self.elements, self.trained_elements = shard.num_parameters(), self.trained.elements(shard)
        in_layers = (self.trained.layer_elements(shard, layer) for layer in range(self.layers))
        self.layer_shares = [elements / self.trained_elements for elements in in_layers]
        self.head_share = (
            has_gradient * shard.vocab_size * shard.hidden_size / self.trained_elements
        )
        self.head_gradient = has_gradient * self.head  # bytes
        self.traffic = [self.trained.traffic(shard, layer) for layer in range(self.layers)]
        self.last_bytes = self.element_size * rows[-1].numel  # a separate head's, on one rank
        self.parameter_bytes = sum(row.stored_bytes for row in rows)
        # bytes of `parameter_bytes` that FSDP2 has not gathered, by the name of the stage
        self.not_gathered_bytes: dict[str, int] = {}
        if self.num_shards:
            self._count_gathered(rows, has_gradient)

    def _count_gathered(self, rows: Iterable[Row], has_gradient: bool) -> None:
        """Adds what FSDP2 holds gathered to the parameters, and counts the memory that its streams
        keep idle.

        It holds the embedding, and a separate head with its gradient. In backward it holds the
        block that runs with its gradients, the next as it arrives, and the gradients of the block
        before in float32. In forward it holds the block that runs, whole and as it arrived. In the
        loss it holds the last as it arrived.
        """
        shard, L = self.shard, self.layers
        elements = max(map(shard.layer_matrix_parameters, range(L)))
        block, summed = self.element_size * elements, has_gradient * 4 * elements
        gradients = has_gradient * block + summed
        self.parameter_bytes += shard.num_ends * self.head
        self.parameter_bytes += (shard.num_ends - 1) * self.head_gradient
        self.parameter_bytes += 2 * block + gradients
        not_gathered = {f"forward of layer {layer}": gradients for layer in range(L)}
        not_gathered |= {"loss": block + gradients}
        not_gathered |= dict.fromkeys(("embedding", "update"), 2 * block + gradients)
        for part in ("MLP", "attention"):
            not_gathered[f"backward of layer {L - 1}, {part}"] = summed
        self.not_gathered_bytes = not_gathered
        # The stream that gathers has had two blocks in forward, as they arrived. On its reduction
        # stream FSDP2 allocates the gradients' shards and the float32 tensor that it sums. That
        # tensor is larger for the embedding and a separate head than for a block.
        head_elements = self.head // self.element_size * shard.num_ends
        self.idle_bytes = block + has_gradient * 4 * max(0, head_elements - elements)
        # FSDP2 keeps the sums of copies until the last backward, beside the gradients.
        if self.num_copies > 1:
            self.idle_bytes += 4 * sum(row.numel for row in rows if row.gradient_dtype)

    def at(self, context_length: int, documents: PackedDocuments | None = None) -> Self:
        """Returns the same step at another context length; documents that are not one each are
        unknown, or given."""
        if documents is None and not self.is_packed:
            documents = PackedDocuments.one_each(context_length, self.batch_size)
        return self._with(context_length=context_length, documents=documents)

    def with_batch(self, batch_size: int) -> Self:
        """Returns the same step with another number of sequences in a micro-batch, of documents
        like this step's."""
        documents = self.documents
        if documents:
            times = batch_size / self.batch_size
            lengths = tuple((length, count * times) for length, count in documents.lengths)
            prompts = tuple(
                (tokens, answers, answer_tokens, count * times)
                for tokens, answers, answer_tokens, count in documents.prompts
            )
            documents = PackedDocuments(documents.longest, lengths, prompts)
        return self._with(batch_size=batch_size, documents=documents)

    def with_format(self, state_format: str) -> Self:
        """Returns the same step with another format of the optimizer's state."""
        return self._with(given=replace(self.given, state_format=state_format))

    def _with(self, **fields: Any) -> Self:
        """Returns the same step with other values of fields that `__post_init__` does not read."""
        step = copy.copy(self)
        for name in ("tokens", "input_bytes", "kinds", "parts"):  # are derived again
            vars(step).pop(name, None)
        vars(step).update(fields, prices={})
        return step

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return -(-self.context_length // self.num_ranks) * self.batch_size

    @property
    def is_packed(self) -> bool:
        """Whether a sequence may hold several documents."""
        return self.documents is None or self.documents.count > self.batch_size

    @property
    def longest_packed(self) -> int | None:
        """Tokens of the longest document, if a sequence may hold several."""
        if not self.is_packed:
            return None
        return self.documents.longest if self.documents else self.context_length

    @functools.cached_property
    def kinds(self) -> tuple[MixerKind, ...]:
        """Kind of each layer: the cheapest with the same results for these documents."""
        longest = self.documents.longest if self.documents else self.context_length
        return tuple(kind.for_longest(longest) for kind in self.given.kinds or self.shard.kinds)

    @functools.cached_property
    def parts(self) -> tuple[LayerParts, ...]:
        """The parts of each layer, whose attention is of this step's kind."""
        return _parts(self.shard, self.kinds)

    @functools.cached_property
    def input_bytes(self) -> int:
        """Bytes of a block's input, and of any hidden states."""
        return self.element_size * self.shard.hidden_size * self.tokens

    @property
    def longest_document(self) -> float:
        """Tokens of the longest document that every layer's attention takes."""
        return min(kind.longest_document for kind in self.kinds)

    @property
    def has_too_long_document(self) -> bool:
        """Whether a document is known to be longer than `longest_document`."""
        return self.documents is not None and self.documents.longest > self.longest_document

    def unplanned(self, placement: Placement, **changes: Any) -> Execution:
        """Returns an execution that nobody searched: blocks placed alike, and float32 state unless
        asked otherwise."""
        if placement.is_whole and self.given.frozen.holds_weight:
            placement = Placement()
        if self.given.state_format == "auto":
            changes = {"state_format": "float32"} | changes
        return replace(self.given, placements=(placement,) * self.layers, **changes)

    @property
    def can_visit(self) -> bool:
        """Whether weights may wait on the host: where one GPU has them whole."""
        return not self.num_shards and self.tensor_ranks == 1

    def inventory(self, execution: Execution) -> Inventory:
        """Returns what each parameter is under an execution, with the bytes of its state."""
        state = execution.gpu_state_bytes, execution.state_format
        return self._inventory(execution.places_of_weights, execution.ends, *state)

    def uses_chunked_loss(self, execution: Execution) -> bool:
        """Whether an execution takes the chunked loss for a micro-batch of this step."""
        return uses_chunked_loss(
            self.shard.vocab_size, self.tokens, self.element_size, execution.loss_impl
        )

    def waiting_weights(self, execution: Execution) -> list[int]:
        """Returns bytes of blocks' weights that wait on the host, then of the head (L) and of the
        embedding (-1)."""
        return self._by_block(execution, self.inventory(execution).waiting)

    def visiting_weights(self, execution: Execution) -> list[int]:
        """Returns the bytes of weights that visit the GPU, in the order of `waiting_weights`."""
        return self._by_block(execution, self.inventory(execution).visiting)

    def _by_block(self, execution: Execution, sizes: Mapping[int | None, int]) -> list[int]:
        head = self.head if execution.ends == "host" else 0
        return [*(sizes.get(i, 0) for i in range(self.layers)), head, head]

    def fetched_bytes(self, execution: Execution) -> tuple[list[int], list[int]]:
        """Returns the bytes of weights that backward of each block waits for, and that arrive
        beside it.

        Each block that runs has its weights fetched beside the block that runs before it, if there
        is one. Nothing is fetched twice in a row: weights of block 0, from which block 1's input is
        recomputed, stay for its own turn. The first to run has its weights fetched beside the loss
        if the head visits.
        """
        weights = self.waiting_weights(execution)
        waits, beside = [0] * self.layers, [0] * self.layers
        needed = execution.needed if any(weights) else []
        starts = {i: block[0][0] for i, block in enumerate(needed) if block}
        present = {starts.get(self.layers - 1)} if weights[-1] else set()
        for i in reversed(starts):
            for runs in range(starts[i], i + 1):
                then = runs + 1 if runs < i else starts.get(i - 1, i)
                waits[i] += weights[runs] * (runs not in present)
                beside[i] += weights[then] * (then not in {*present, runs})
                present = {runs, then}
        return waits, beside


@functools.cache  # a search for a context asks for the same parts many times
def _parts(shard: ModelConfig, kinds: tuple[MixerKind, ...]) -> tuple[LayerParts, ...]:
    return tuple(shard.all_parts(kinds))
