"""The cost model predicts the bytes and seconds of a training step under an execution.

It adds up the `kernels.parts.Footprint` that each operation declares in its own file. Bytes are counted for each stage
of a step, at the stage's fullest moment. Seconds are amounts of work divided by measured rates, and copies that compute
is too short to hide. Copies to the host and the traffic of FSDP2 are counted one after the other: without NVLink they
share one link.
"""

import copy
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import numpy as np
from torch import Tensor

from kernels.cross_entropy import cross_entropy_footprint
from kernels.gated_mlp import gated_mlp_footprint
from kernels.linear import PLAIN
from kernels.linear_cross_entropy import linear_cross_entropy_footprint
from kernels.parts import AttentionKind, Footprint
from kernels.qkv_attention import qkv_attention_footprint
from model import Share
from training.data.packing import deal
from training.host.memory import SLOT_ALIGNMENT
from training.host.sizes import GIB, MIB
from training.lora import Adapters
from training.memory.execution import Execution, Placement, host_weights, needed_for_backward, quantized_weights
from training.memory.machine import Rates
from training.optim.inventory import LEAVING_BYTES, Inventory, Row

QKV, INTO_MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# A search for a plan asks for the same few footprints many thousand times.
_attention_footprint, _mlp_footprint = functools.cache(qkv_attention_footprint), functools.cache(gated_mlp_footprint)
# Share of the link's rate at which state on the host is updated beside forward, whose kernels its kernels wait for.
UPDATE_BESIDE_FORWARD = 0.8
LIBRARY_BYTES = 160 * MIB  # cuBLAS workspaces and the small tensors that nothing below counts


@dataclass(frozen=True)
class Stage:
    """A part of a step, with the bytes that are alive at its fullest moment, by category."""

    name: str
    categories: dict[str, int]
    # Bytes that only FSDP2's reduction can use: the allocator lends no CUDA stream the memory of another.
    idle: int = field(default=0, kw_only=True)

    @property
    def bytes(self) -> int:
        """Bytes alive in all categories, without `idle`."""
        return sum(self.categories.values())


LENGTHS_PER_OCTAVE = 8  # bins of document lengths between one power of two and the next


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of one rank's micro-batch, as a histogram of their lengths."""

    longest: int  # tokens of the longest document that may come
    lengths: tuple[tuple[float, float], ...]  # (tokens, average number of such documents in a micro-batch)

    @property
    def count(self) -> float:
        """Documents in a micro-batch, on average."""
        return sum(count for _, count in self.lengths)

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
        """Returns the average over an epoch's micro-batches, each of the rank with the most pairs of a query and a key.

        All ranks wait for that rank. Documents of similar lengths count as documents of one length with as many pairs.

        Args:
            lengths: int [N], tokens of each document.
            sequences: int [N], the number of each document's sequence in the epoch.
            longest: tokens of the longest document that any epoch may have.
            batch_size, num_ranks, micro_batches: of a step, whose sequences `packing.deal` gives out to ranks.
        """
        step = batch_size * num_ranks * micro_batches
        used = (sequences.max() + 1) // step * step
        pairs = lengths * (lengths + 1) / 2
        of_sequence = np.bincount(sequences, weights=pairs)[:used].reshape(-1, step)
        # [micro-batches of the epoch, sequences, ranks]: numbers of sequences
        dealt = deal(of_sequence, num_ranks) + np.arange(0, used, step)[:, None, None]
        dealt = dealt.reshape(-1, batch_size, num_ranks)
        slowest = of_sequence.reshape(-1)[dealt].sum(1).argmax(1)
        counts = np.zeros(sequences.max() + 1)
        np.add.at(counts, dealt[np.arange(len(dealt)), :, slowest], 1 / len(dealt))
        bins = np.ceil(LENGTHS_PER_OCTAVE * np.log2(lengths)).astype(np.int64)
        in_bin, pairs_in_bin = (np.bincount(bins, weights=counts[sequences] * of) for of in (1, pairs))
        found = in_bin.nonzero()[0]
        typical = np.sqrt(2 * pairs_in_bin[found] / in_bin[found] + 0.25) - 0.5  # n with n (n + 1) / 2 pairs
        # Rounded, so that documents of 2,048 tokens each are not of 2,048.0000000001, which other kernels attend to.
        return cls(longest, tuple(zip(typical.round(6).tolist(), in_bin[found].tolist())))


@dataclass(eq=False, repr=False)
class Step:
    """A training step of a model, with its bytes and seconds under any execution.

    Args:
        share: one rank's share of the model, a model.Share.
        named_parameters: the model's, on any device. Where FSDP2 shards them, DTensors or a rank's shards.
        context_length, batch_size, micro_batches: for one rank, or for the ranks that share sequences.
        documents: the documents of a micro-batch. None: not known. Bytes are then counted for sequences of several
            documents, the longest of nearly the whole length, and seconds for sequences of one document.
        given: settings that planning does not change: attention backend, kinds and implementation, and the loss and
            the optimizer state's format unless they are "auto".
        element_size: bytes per element of an activation.
        num_ranks: ranks that share each sequence, a divisor of the key/value heads.
        num_shards: ranks over which FSDP2 shards each parameter; 1 where all ranks share matrices; 0: no FSDP2.
        tensor_ranks: ranks that share each matrix.
        num_machines: machines of equally many ranks. Ranks of one machine share sequences and matrices.
        num_copies: copies of the sharded parameters, on machines of their own where there are enough.
        adapters: all that is trained; None: every parameter is.
    """

    share: Any
    named_parameters: Iterable[tuple[str, Tensor]]
    context_length: int
    batch_size: int = 1
    micro_batches: int = 1
    documents: PackedDocuments | None = None
    given: Execution = Execution()
    element_size: int = 2
    num_ranks: int = 1
    num_shards: int = 0
    tensor_ranks: int = 1
    num_machines: int = 1
    num_copies: int = 1
    adapters: Adapters | None = None

    def __post_init__(self):
        share, self.named_parameters = self.share, list(self.named_parameters)
        names = [name for name, _ in self.named_parameters]
        quantized = quantized_weights(self.named_parameters, self.given.frozen_bits)

        @functools.cache
        def inventory(places: tuple[str, ...], ends: str, gpu_state_bytes: float, state_format: str) -> Inventory:
            return Inventory.of(
                self.named_parameters, accumulate=self.micro_batches > 1, gpu_state_bytes=gpu_state_bytes,
                state_format=state_format, host_weights=host_weights(names, places, ends), quantized=quantized,
            )  # fmt: skip

        self._inventory = inventory
        self.layers = share.num_hidden_layers
        self.head = self.element_size * share.vocab_size * share.hidden_size  # bytes
        layer_elements = max(share.layer_matrix_parameters(layer) for layer in range(self.layers))
        # Shares of what is trained.
        adapter_elements = self.adapters.layer_parameters(share) if self.adapters else 0
        self.layer_share = 1 / self.layers if self.adapters else layer_elements / share.num_parameters()
        self.head_share = 0.0 if self.adapters else share.vocab_size * share.hidden_size / share.num_parameters()
        self.trained = self.layers * adapter_elements or share.num_parameters()  # elements
        self.head_gradient = 0 if self.adapters else self.head  # bytes
        rows = inventory((), "gpu", math.inf, "float32").rows
        self.last_bytes = self.element_size * rows[-1].numel  # an untied head's, on one rank
        self.parameter_bytes = sum(row.stored_bytes for row in rows)
        if self.num_shards:
            # FSDP2 holds gathered: the embedding and an untied head with its gradient; one block; the next block, both
            # as it arrives and whole. The gradients of one block exist in the activations' dtype and, on their way to
            # other ranks, in float32.
            self.parameter_bytes += self.head if share.tie_word_embeddings else 2 * self.head + self.head_gradient
            gradient_bytes = 0 if self.adapters else self.element_size + 4
            self.parameter_bytes += layer_elements * (3 * self.element_size + gradient_bytes)
            # FSDP2 allocates the gradients' shards and the float32 tensor that it sums on its reduction stream. That
            # tensor is larger for the embedding and an untied head than for a block.
            head_elements = self.head // self.element_size * (1 if share.tie_word_embeddings else 2)
            self._reduction_bytes = 0 if self.adapters else 4 * max(0, head_elements - layer_elements)
            if self.num_copies > 1:  # FSDP2 keeps the sums of copies until the last backward, beside the gradients
                self._reduction_bytes += 4 * sum(row.numel for row in rows if row.gradient_dtype)
        # Bytes of each block's weights: as they are kept, during a visit, and of the quantized ones alone.
        blocks: list[list[Row]] = [[] for _ in range(self.layers)]
        for row in rows:
            if row.block is not None:
                blocks[row.block].append(row)
        compressed = [[row for row in block if row.format.is_quantized] for block in blocks]
        self.stored_bytes = [sum(row.stored_bytes for row in block) for block in blocks]
        self.weight_bytes = [sum(row.weight_bytes for row in block) for block in blocks]
        self.quantized_bytes = [sum(row.stored_bytes for row in block) for block in compressed]
        self.visiting_bytes = [sum(row.weight_bytes for row in block) for block in compressed]
        # A weight on its way from the host.
        self.arriving_bytes = max((row.stored_bytes for block in compressed for row in block), default=0)

    def at(self, context_length: int, documents: PackedDocuments | None = None) -> "Step":
        """Returns the same step at another context length, of one document per sequence if this step's are.

        Otherwise the documents are not known, unless they are given.
        """
        step = copy.copy(self)
        step.context_length = context_length
        if documents is None and not self.is_packed:
            documents = PackedDocuments.one_each(context_length, self.batch_size)
        step.documents = documents
        return step

    def with_batch(self, batch_size: int) -> "Step":
        """Returns the same step with another number of sequences in a micro-batch, of documents like this step's."""
        step = copy.copy(self)
        step.batch_size = batch_size
        if self.documents:
            lengths = tuple((length, count * batch_size / self.batch_size) for length, count in self.documents.lengths)
            step.documents = PackedDocuments(self.documents.longest, lengths)
        return step

    def with_format(self, state_format: str) -> "Step":
        """Returns the same step with another format of the optimizer's state."""
        step = copy.copy(self)
        step.given = replace(self.given, state_format=state_format)
        return step

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return -(-self.context_length // self.num_ranks) * self.batch_size

    @property
    def is_packed(self) -> bool:
        """Whether a sequence may hold several documents."""
        return self.documents is None or self.documents.count > self.batch_size

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """How each layer attends: the cheapest kind that computes the same for these documents."""
        longest = self.documents.longest if self.documents else self.context_length
        return tuple(kind.for_longest(longest) for kind in self.given.kinds or self.share.kinds)

    @property
    def input_bytes(self) -> int:
        """Bytes of a block's input, and of any hidden states."""
        return self.element_size * self.share.hidden_size * self.tokens

    @property
    def _norms_bytes(self) -> tuple[int, int]:
        """Bytes that a block's norms keep for backward, in its attention and in its MLP.

        They are 1 / rms of each token, float32, the residual sum, and the inputs of norms after attention and MLP.
        Without norms before, attention's input is the block's own, and the MLP's is the residual sum.
        """
        share, x = self.share, self.input_bytes
        same = 0 if share.norms_before else x
        return 4 * share.norms_per_layer * self.tokens - same, x + 2 * x * share.norms_after - same

    @property
    def longest_document(self) -> float:
        """Tokens of the longest document that every layer's attention takes."""
        return min(kind.longest_document for kind in self.kinds)

    @property
    def has_too_long_document(self) -> bool:
        """Whether a document is known to be longer than `longest_document`."""
        return self.documents is not None and self.documents.longest > self.longest_document

    def unplanned(self, placement: Placement, **changes: Any) -> Execution:
        """Returns an execution that nobody searched: blocks placed alike, and float32 state unless asked otherwise.

        Blocks with quantized weights keep their input in place of all activations.
        """
        placement = Placement() if placement.is_whole and self.given.frozen_bits < 16 else placement
        given = replace(self.given, state_format="float32") if self.given.state_format == "auto" else self.given
        return replace(given, placements=(placement,) * self.layers, **changes)

    @property
    def can_visit(self) -> bool:
        """Whether weights may wait on the host: where one GPU has them whole."""
        return not self.num_shards and self.tensor_ranks == 1

    def inventory(self, execution: Execution) -> Inventory:
        """Returns what each parameter is under an execution, with the bytes of its state."""
        places = tuple(placement.weights for placement in execution.placements)
        return self._inventory(places, execution.ends, execution.gpu_state_bytes, execution.state_format)

    def results_bytes(self, kind: AttentionKind) -> int:
        """Returns the bytes of the results that the attention of a block can keep."""
        return self._footprints(self.given, kind)[0].keepable

    def arena_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the pinned arena that `apply_placement` needs, with every slot aligned."""
        total = 0
        for placement, kind in zip(execution.placements, self.kinds):
            slots = (placement.input == "host") + (placement.results == "host") * kind.branches
            total += sum(self._sent_bytes(placement, kind)) + 2 * SLOT_ALIGNMENT * slots
        return total

    def host_bytes(self, execution: Execution) -> int:
        """Returns the bytes of pinned host memory, for activations and for the optimizer."""
        return self.arena_bytes(execution) + self.inventory(execution).host

    def uses_chunked_loss(self, execution: Execution) -> bool:
        """Whether an execution takes the chunked loss for a micro-batch of this step."""
        return self.share.uses_chunked_loss(self.tokens, self.element_size, execution.loss_impl)

    def peak(self, execution: Execution) -> Stage:
        """Returns the fullest stage."""
        return max(self.stages(execution), key=lambda stage: stage.bytes)

    def stages(self, execution: Execution) -> Iterator[Stage]:
        """Yields the stages of a step in order: of its last micro-batch, and with the optimizer's state in place."""
        T, L, optimizer = self.tokens, self.layers, self.inventory(execution)
        tables = 1 + (self.share.local_rope_theta is not None)
        positions = self.num_ranks + (self.is_packed or self.num_ranks > 1)
        weights, visits = self._waiting_weights(execution), self._visiting_weights(execution)
        visit, ends = any(visits), 1 if self.share.tie_word_embeddings else 2  # matrices of embedding and head
        always = {
            "parameters": self.parameter_bytes - sum(weights[:L]) - ends * weights[L],
            "optimizer": optimizer.gpu_state + optimizer.gpu_room,
            # cos and sin: cached for whole sequences, and at the positions of packed documents or of a rank's tokens.
            # Layers with a window may have their own. 64 bytes per token: token ids, labels, losses.
            "workspace": LIBRARY_BYTES
            + T * (4 * self.share.head_dim * positions * tables + 64)
            + self._adapter_bytes()
            + self.arriving_bytes * any(weights[:L]),
        }
        x, blocks = self.input_bytes, [*zip(execution.placements, self.kinds)]
        waiting = {block: self._waiting_bytes(*block) for block in {*blocks}}
        before = [(0, 0, 0)]  # bytes that the blocks before each layer keep on the GPU for backward
        for block in blocks:
            inputs, attention, mlp = map(add, before[-1], waiting[block])
            before.append((inputs, attention, mlp))

        def stage(
            name: str, layer: int, ready=0.0, gradients=0, block=(0, 0, 0), running: Iterable[int] = (), slots=0,
            **others: int,
        ) -> Stage:  # fmt: skip
            """Returns a stage in which the blocks before `layer` wait for backward.

            `ready` is the share of the gradients on the GPU that exist. The arguments after it are bytes beside these.
            `running` are the block that runs, and the next: two blocks' weights visit. The embedding is block -1, the
            head block L. `slots` are the update's.
            """
            ready = 1 if self.micro_batches > 1 and self.num_copies == 1 else ready
            gradients += int(optimizer.gpu_gradients * ready)
            inputs, attention, mlp = map(add, before[layer], block)
            sizes = {"gradients": gradients, "layer inputs": inputs, "attention": attention, "MLP": mlp}
            sizes["optimizer"] = always["optimizer"] + slots
            if visit:
                sizes["parameters"] = always["parameters"] + sum(visits[i] for i in running)
            idle = self._reduction_bytes + int(optimizer.gpu_gradients * (1 - ready)) if self.num_shards else 0
            return Stage(name, {**always, **sizes, **others}, idle=idle)

        # An update goes on beside forward. Of several, that is the first, before gradients exist.
        late = 0 if self.num_shards else optimizer.gpu_slots
        late = max(0, late - optimizer.gpu_gradients) if self.micro_batches > 1 else late
        first = (-1, 0) if weights[-1] else ()
        # Ranks that share the embedding have both the rows of their own words and the sum over the ranks.
        yield stage("embedding", 0, block=(x * min(2, self.tensor_ranks), 0, 0), running=first, slots=late)
        block_bytes = {block: self._block_bytes(execution, *block) for block in {*blocks}}
        sent_by_block = {block: self._sent_bytes(*block) for block in {*blocks}}
        sent_bytes = [sent_by_block[block] for block in blocks]
        last_placed = max((i for i in range(L) if not blocks[i][0].is_whole), default=None)
        sent = 0, 0  # bytes that the placed block before still sends to the host; the last one waits for its own
        for layer, block in enumerate(blocks):
            attention, mlp = block_bytes[block][0]
            sizes, two = (x + sent[0], attention + sent[1], mlp), (layer, layer + 1)
            yield stage(f"forward of layer {layer}", layer, block=sizes, running=two, slots=late)
            if not block[0].is_whole:
                sent = sent_bytes[layer] if layer != last_placed else (0, 0)
        # 2 * x: the last norm's output, and the gradient of its input.
        needed = [needed_for_backward(execution.placements, layer) for layer in range(L)]
        with_head = (L, *(i for i, _ in needed[-1][:1])) if weights[L] else ()
        yield stage("loss", L, loss=self._loss_bytes(execution) + 2 * x, running=with_head)

        # An untied head's gradient is ready after the loss. A tied head's gradient waits for the embedding's.
        tied, ready = (self.head_gradient, 0.0) if self.share.tie_word_embeddings else (0, self.head_share)
        # Shares of the parameters. Gradients of `gone` have left for the host, of `stays` none do.
        gone = ready * optimizer.rows[-1].state_on_host
        waited = gone * (self.last_bytes > LEAVING_BYTES)  # compute waits until a large head's gradient has left
        embedding = self.head_share * (weights[L] > 0)
        stays = 1 - self.layer_share * sum(map(bool, weights[:L])) - embedding - gone
        stays = stays if stays > 1e-9 else math.inf  # all of them leave: a share of none is none
        for layer in reversed(range(L)):
            # Tensors that come back from the host: this block is rebuilt from some, others are on their way for the
            # next. A whole block fetches nothing.
            fetched = {"input": 0, "results": 0}
            for i, name in {*needed[layer], *needed[max(layer - 1, 0)]} if needed[layer] else ():
                if i < layer:
                    fetched[name] += sent_bytes[i][name == "results"]
            running = {layer, *(i for i, _ in needed[max(layer - 1, 0)][:1])} if needed[layer] else ()
            for part, (attention, mlp) in zip(("MLP", "attention"), block_bytes[blocks[layer]][1:]):
                here = ready + self.layer_share * (L - 1 - layer) + self.layer_share * (part == "attention")
                gone += self.layer_share * (part == "attention" and weights[layer] > 0)
                gradients = tied + min(LEAVING_BYTES, int(optimizer.leaving_gradients * (here - waited)))
                sizes = x + fetched["input"], attention + fetched["results"], mlp
                on_gpu = (here - gone) / stays
                yield stage(f"backward of layer {layer}, {part}", layer, on_gpu, gradients, sizes, running)
        # The embedding's gradient, as it is made.
        gradients = tied + self.head_gradient + min(LEAVING_BYTES, optimizer.leaving_gradients)
        if self.num_shards and self.tensor_ranks > 1:  # autograd adds two DTensors into a third
            gradients += tied
        gradients += 0 if self.adapters else self.embedding_sums()
        on_gpu = 1 - self.head_share / stays * (weights[-1] == 0)
        yield stage("backward of embedding", 0, on_gpu, gradients, (x, 0, 0))
        yield stage("update", 0, 1, slots=optimizer.gpu_slots)

    def embedding_sums(self) -> int:
        """Returns the bytes of the embedding's float32 gradients, each summed over up to ten tokens of a word."""
        return 4 * self.share.hidden_size * (min(self.tokens, self.share.vocab_size) + self.tokens // 10)

    def _attention_seconds(
        self, execution: Execution, kind: AttentionKind, documents: PackedDocuments, rates: Rates
    ) -> tuple[float, float, float]:
        """Returns the seconds of one layer: of forward, of choosing blocks of keys (once per step), of backward."""
        H, G, K = self.share.heads
        own_heads = G // self.num_ranks
        steps = own_heads // (execution.heads_at_a_time or own_heads)
        work = kind.work(
            documents.lengths, H // self.num_ranks, own_heads, K, backend=execution.attention_backend, steps=steps,
            is_packed=documents.count > self.batch_size,
        )  # fmt: skip
        forward, choice, backward = (sum(n / rates[name] for name, n in amounts.items() if n) for amounts in work)
        return forward, choice, backward

    def _footprints(self, execution: Execution, kind: AttentionKind) -> tuple[Footprint, Footprint]:
        """Returns the footprints of a block's attention and of its MLP under an execution."""
        share, longest = self.share, None
        if self.is_packed:
            longest = self.documents.longest if self.documents else self.context_length
        footprints = (
            _attention_footprint(
                self.tokens, share.hidden_size, *share.heads, element_size=self.element_size,
                backend=execution.attention_backend, context_length=self.context_length, longest=longest, kind=kind,
                heads_at_a_time=execution.heads_at_a_time, num_ranks=self.num_ranks, qk_norm=share.qk_norm,
                linear=execution.linear,
            ),
            _mlp_footprint(
                self.tokens, share.hidden_size, share.intermediate_size, element_size=self.element_size,
                tile_size=execution.mlp_tile_size, skippable=not share.norms_after, linear=execution.linear,
            ),
        )  # fmt: skip
        return footprints if self.adapters is None else self._with_adapters(self.adapters, execution, kind, *footprints)

    def _with_adapters(
        self, adapters: Adapters, execution: Execution, kind: AttentionKind, attention: Footprint, mlp: Footprint
    ) -> tuple[Footprint, Footprint]:
        """Returns the footprints where a projection with an adapter keeps x and x A^T, and a frozen one nothing.

        Attention of some heads at a time, and the MLP in tiles, keep their input in any case, and no x A^T.
        """
        share, unit = self.share, self.element_size * self.tokens

        def changed(footprint: Footprint, first: Sequence[str], x: int, last: str, y: int) -> Footprint:
            """Returns a part's footprint. x and y are bytes of inputs that its first and its last projections keep."""
            x, y = (0 if self._adapts(*first) else x), (0 if self._adapts(last) else y)
            thin = unit * adapters.rank * len({*first, last}.intersection(adapters.targets))
            # Backward counts on the end of y, which gives its memory back.
            return replace(footprint, saved=footprint.saved - x - y + thin, backward=footprint.backward + y)

        if not execution.heads_at_a_time:
            # Otherwise the output projection keeps attention's own output, which is there in any case.
            has_own_input = kind.branches > 1 or self.num_ranks > 1
            output = unit * share.num_attention_heads * share.head_dim * has_own_input
            attention = changed(attention, QKV, self.input_bytes * share.norms_before, "o_proj", output)
        if not execution.mlp_tile_size:
            mlp = changed(mlp, INTO_MLP, self.input_bytes, "down_proj", unit * share.intermediate_size)
        return attention, mlp

    def _adapts(self, *projections: str) -> bool:
        """Whether one of these projections is trained: by its adapter, or because there are no adapters."""
        return self.adapters is None or not {*projections}.isdisjoint(self.adapters.targets)

    def _block_bytes(self, execution: Execution, placement: Placement, kind: AttentionKind) -> list[tuple[int, int]]:
        """Returns bytes (of attention, of the MLP) at a block's fullest: in forward, the MLP's backward, attention's.

        They include the block's kept results, but not its input. `x` are the bytes of the hidden states.
        """
        x, whole = self.input_bytes, placement.is_whole
        attention, mlp = self._footprints(
            replace(execution, heads_at_a_time=None, mlp_tile_size=None) if whole else execution, kind
        )
        norms, mlp_norms = self._norms_bytes
        saved = attention.saved + norms
        if whole:  # x: the residual sum; 3 x: outputs of attention, MLP and block, the last after the MLP's factors
            factor_bytes, D, F = execution.linear.factor_bytes, self.share.hidden_size, self.share.intermediate_size
            factors = factor_bytes(D, F)
            if factors:  # inputs of which backward keeps factors
                factors += self.element_size * self.tokens * (D + F)
            needed = mlp.saved + max(3 * x, 2 * x + factors)
            if self.adapters is not None:  # inputs of frozen projections exist as well, though they are not kept
                running = mlp.forward + (3 - self.share.norms_after) * x  # a norm's input is in mlp_norms
                needed = max(needed + (0 if self._adapts(*INTO_MLP) else x), running)
            forward = saved, mlp_norms + needed
        else:
            kept = attention.choices + (attention.keepable if placement.results != "recompute" else 0)
            # 3 x: attention's output, the residual sum and its norm. Then the MLP's working memory, or 2 x: the outputs
            # of MLP and block.
            forward = kept, 3 * x + max(mlp.forward, 2 * x)
            attending = x * self.share.norms_before + attention.forward  # attention works on its norm's output
            if self.num_ranks > 1 and not execution.heads_at_a_time:
                # Attention's output, as it is sent and as it is received. The output of a single branch may be kept.
                output = self.element_size * self.share.num_attention_heads * self.share.head_dim * self.tokens
                is_kept = placement.results != "recompute" and kind.branches == 1
                attending = max(attending, x + kept + (2 if is_kept else 3) * output)
            if attending > sum(forward):
                forward = attending, 0
        # 2 * x: the gradient of the block's output, and the residual sum. A placed block was just rebuilt, and the
        # outputs of its attention and of the block still exist.
        after = x * (self.share.norms_after and whole)  # the MLP's output, gone when its norm has made its gradient
        mlp_backward = saved, x + mlp_norms + mlp.saved + max(mlp.backward - after, after if whole else 2 * x)
        if self.share.residual_multiplier != 1 and not whole:  # gradients of the MLP's and of attention's own outputs
            mlp_backward = saved, mlp_backward[1] + (x if execution.mlp_tile_size else 0)
            saved += x if execution.heads_at_a_time else 0
        if placement.results == "recompute" and attention.forward > sum(mlp_backward) - 2 * x:
            mlp_backward = x + attention.forward, x  # attention runs again
        rebuilt = 0 if whole else x * (1 + (self.share.norms_per_layer > 2))  # outputs of attention, and of its norm
        return [forward, mlp_backward, (saved + attention.backward, x + rebuilt)]

    def _sent_bytes(self, placement: Placement, kind: AttentionKind) -> tuple[int, int]:
        """Returns the bytes that a block sends to the host: its input, results of attention."""
        return (
            self.input_bytes if placement.input == "host" else 0,
            self.results_bytes(kind) if placement.results == "host" else 0,
        )

    def _waiting_weights(self, execution: Execution) -> list[int]:
        """Returns the bytes of each block's weights that wait on the host; 0 where they stay on the GPU.

        After the blocks come the head, number L as it runs, and the embedding, number -1 of the list.
        """
        blocks = [size * (p.weights == "host") for p, size in zip(execution.placements, self.stored_bytes)]
        return blocks + 2 * [self.head * (execution.ends == "host")]

    def _visiting_weights(self, execution: Execution) -> list[int]:
        """Returns the bytes of weights that are on the GPU only during a visit, in the order of `_waiting_weights`.

        Quantized weights visit wherever they are kept.
        """
        sizes = zip(execution.placements, self.weight_bytes, self.visiting_bytes)
        blocks = [whole if placement.weights == "host" else quantized for placement, whole, quantized in sizes]
        return blocks + 2 * [self.head * (execution.ends == "host")]

    def _fetched_bytes(self, execution: Execution) -> tuple[list[int], list[int]]:
        """Returns the bytes of weights that backward of each block waits for, and that arrive beside it.

        Each block that runs has its weights fetched beside the block that runs before it, if there is one. Nothing is
        fetched twice in a row: weights of block 0, from which block 1's input is recomputed, stay for its own turn.
        The first to run has its weights fetched beside the loss if the head visits.
        """
        weights = self._waiting_weights(execution)
        waits, beside = [0] * self.layers, [0] * self.layers
        needed = [needed_for_backward(execution.placements, i) for i in range(self.layers)] if any(weights) else []
        starts = {i: each[0][0] for i, each in enumerate(needed) if each}
        present = {starts.get(self.layers - 1)} if weights[-1] else set()
        for i in reversed(starts):
            for runs in range(starts[i], i + 1):
                then = runs + 1 if runs < i else starts.get(i - 1, i)
                waits[i] += weights[runs] * (runs not in present)
                beside[i] += weights[then] * (then not in {*present, runs})
                present = {runs, then}
        return waits, beside

    def _waiting_bytes(self, placement: Placement, kind: AttentionKind) -> tuple[int, int, int]:
        """Returns the bytes that a block keeps on the GPU for backward: its input, of attention and of the MLP."""
        attention, mlp = self._footprints(self.given, kind)
        if placement.is_whole:
            norms, mlp_norms = self._norms_bytes
            return self.input_bytes, attention.saved + norms, mlp_norms + mlp.saved
        results = attention.keepable if placement.results == "gpu" else 0
        return self.input_bytes if placement.input == "gpu" else 0, results + attention.choices, 0

    def _loss_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the logits that exist at a time, and of the gradients of the head and its input."""
        T, D, V, size = self.tokens, self.share.hidden_size, self.share.vocab_size, self.element_size
        if self.uses_chunked_loss(execution):
            trains_head = self.adapters is None
            return linear_cross_entropy_footprint(T, D, V, element_size=size, trains_head=trains_head).forward
        return cross_entropy_footprint(T, V, element_size=size).forward + self.head_gradient + self.input_bytes

    def _adapter_bytes(self) -> int:
        """Returns the bytes of x A^T and dy B of q, k and v together, the widest that exist at a time."""
        return 2 * 3 * self.adapters.rank * self.element_size * self.tokens if self.adapters else 0

    def _adapter_traffic(self) -> tuple[int, int]:
        """Returns the bytes that adapters of a block read and write, in forward and in backward.

        Forward reads x and writes y. Backward reads dy and writes dx, then reads both factors of each gradient.
        """
        if self.adapters is None:
            return 0, 0
        rows, columns = (sum(sizes) for sizes in zip(*self.adapters.widths(self.share).values()))
        unit = self.element_size * self.tokens
        return unit * (columns + rows), unit * 3 * (columns + rows)

    def seconds(self, execution: Execution, rates: Rates) -> float:
        """Returns the seconds of one whole step, its update included."""
        share, L, placements, kinds = self.share, self.layers, execution.placements, self.kinds
        documents = self.documents or PackedDocuments.one_each(self.context_length, self.batch_size)
        of_kind = {kind: self._attention_seconds(execution, kind, documents, rates) for kind in {*kinds}}
        # q, k and v go to other ranks, and attention's output comes back.
        heads = share.num_attention_heads + share.num_key_value_heads
        sent_bytes = 2 * self.element_size * heads * share.head_dim * self.tokens * (1 - 1 / self.num_ranks)
        exchange = sent_bytes / rates["gpu link"]
        attend = [of_kind[kind][0] + exchange for kind in kinds]
        choose = sum(of_kind[kind][1] for kind in kinds)
        attention_backward = sum(of_kind[kind][2] for kind in kinds)
        # Backward sends q, k, v and the output again where it attends some heads at a time.
        attention_backward += L * exchange * (2 if execution.heads_at_a_time else 1)
        footprints = {kind: self._footprints(execution, kind) for kind in {*kinds}}
        mlp = footprints[kinds[0]][1]
        products = [
            (footprints[kind][0].matrix_flops + mlp.matrix_flops) / rates[execution.linear.rate] for kind in kinds
        ]
        of_weights = sum(products) * rates[execution.linear.rate] / rates[execution.linear.weight_rate]  # gradients
        of_weights *= execution.linear.trains_matrices
        # Two norms of a block, two sums and their copies read and write nine hidden states, other norms two each, and
        # two multipliers four.
        hidden_states = 9 + 2 * (share.norms_per_layer - 2) + 4 * (share.residual_multiplier != 1)
        moved_bytes = hidden_states * self.input_bytes + mlp.elementwise_bytes
        moves = [(moved_bytes + footprints[kind][0].elementwise_bytes) / rates["memory"] for kind in kinds]
        # A visit reads quantized weights, and writes them in bf16: in forward, and where a block runs again.
        visits = [sum(sizes) / rates["memory"] for sizes in zip(self.quantized_bytes, self.visiting_bytes)]
        adapting, adapting_backward = (size / rates["adapters"] for size in self._adapter_traffic())
        layers = [sum(seconds) for seconds in zip(products, moves, visits)]
        # Ranks that share matrices sum hidden states after attention and after the MLP; backward sums their gradients.
        reduction = 2 * self.input_bytes * (1 - 1 / self.tensor_ranks) / rates["gpu link"]
        placed = [i for i in range(L) if not placements[i].is_whole]
        longer = 1 + (0.01 * len(placed) / L if execution.heads_at_a_time else 0)  # 1% more time: smaller launches
        forward = longer * (sum(layers) + sum(attend) + choose) + L * adapting + 2 * L * reduction
        backward = longer * (sum(layers) + of_weights + sum(moves) + attention_backward) + 2 * L * reduction
        backward += L * adapting_backward
        # Backward recomputes a placed block's matrix products, except skippable ones: the tiled MLP's own backward
        # recomputes gate and up.
        again = mlp.backward_matrix_flops - (execution.linear.trains_matrices + 1) * mlp.matrix_flops
        again -= mlp.matrix_flops if mlp.is_skippable else 0
        for i in placed:
            start, _ = needed_for_backward(placements, i)[0]
            backward += adapting + products[i] + again / rates[execution.linear.rate]
            backward += (1 if mlp.is_skippable else 2) * reduction
            # They run again for this block's input.
            backward += sum(layers[start:i]) + (i - start) * (adapting + 2 * reduction)
            backward += sum(attend[j] for j in range(start, i + 1) if placements[j].results == "recompute")
            if not execution.heads_at_a_time:  # kept outputs are exchanged again
                backward += exchange * sum(placements[j].results != "recompute" for j in range(start, i + 1))
        sent = [sum(self._sent_bytes(*block)) / rates["link"] for block in zip(placements, kinds)]
        weights = [size / rates["link"] for size in self._waiting_weights(execution)]  # the last: the embedding's
        waits, beside = ([size / rates["link"] for size in sizes] for sizes in self._fetched_bytes(execution))
        copies = sum(sent) + sum(weights[:L])
        # A block's copies have the time of one block: only one block's tensors leave, or come back, at a time. In
        # forward, the next block's weights come as activations leave. The head's come beside the last block.
        forward = weights[-1] + weights[0] + sum(max(forward / L, *both) for both in zip(sent, weights[1:]))
        backward = sum(wait + max(backward / L, back + more) for wait, back, more in zip(waits, sent, beside))
        optimizer = self.inventory(execution)
        sizes, trains_head = (self.tokens, share.hidden_size, share.vocab_size), self.adapters is None
        loss = linear_cross_entropy_footprint(*sizes, trains_head=trains_head).matrix_flops
        loss /= rates[PLAIN.rate]  # the standard loss has the same products
        for i, _ in needed_for_backward(placements, L - 1)[:1] if weights[L] else ():
            loss = max(loss, weights[i])
        # FSDP2 gathers parameters and sums float32 gradients while other blocks compute. Embedding and head are
        # gathered before anything runs and stay until backward. Their gradients are summed last. The rate of a machine
        # is measured with exchanges of heads, which also pay for copies. Other machines send to all its GPUs at once.
        elements, ranks = share.num_parameters(), self.num_shards or 1
        apart = min(self.num_copies, self.num_machines)  # copies that share no machine
        between_machines = elements * (self.num_machines // apart - 1) / ranks / rates["network"]
        byte = max(elements * (1 - 1 / ranks) / rates["gpu link"], between_machines)  # seconds, 1 byte each
        gather, add = self.element_size * byte, 4 * byte * self.trained / elements
        ends = share.vocab_size * share.hidden_size / elements * (1 if share.tie_word_embeddings else 2)
        forward = max(forward, copies + (1 - ends) * gather)
        backward = max(backward, copies + (1 - ends) * (gather + add))
        # Copies sum their float32 shards, there and back, in the last backward. It is counted after the other exchange,
        # although both overlap where they go by different links.
        sums = 4 * 2 * (1 - 1 / self.num_copies) * self.trained / ranks / rates["network" if apart > 1 else "gpu link"]
        last = max(backward, copies + (1 - ends) * (gather + add + sums))
        # Gradients leave for the host in the first micro-batch. In each later one, the sums come back and leave again.
        # With copies of the weights they leave in the last alone.
        gradients = optimizer.leaving_gradients / rates["link"]
        moved = 2 * gradients if self.num_copies == 1 else 0
        backwards = max(last, gradients) + (self.micro_batches - 1) * max(backward, moved) + ends * sums
        update = 4 * optimizer.gpu_state / rates["memory"]
        # One GPU's next forward runs beside the update of state on the host, which fetches it and sends it back without
        # the gradients. Activations leave, and weights come, at the same time.
        link = rates["link"] if self.num_shards else UPDATE_BESIDE_FORWARD * rates["link"]
        fetched, returned = optimizer.updated / link, (optimizer.updated - optimizer.leaving_gradients) / link
        if self.num_shards:
            update += fetched
        else:  # nothing runs before the embedding and the first block are updated
            on_gpu = optimizer.gpu_gradients / (optimizer.gpu_gradients + optimizer.leaving_gradients)
            first = fetched * (max(0, self.head_share - on_gpu) + self.layer_share) / max(1 - on_gpu, self.layer_share)
            update += max(min(first, fetched), fetched + sum(weights) - forward, returned + sum(sent) - forward)
        return self.micro_batches * (forward + 0.01 * copies + loss + ends * (gather + add)) + backwards + update


def gib(num_bytes: float) -> str:
    """Returns a number of bytes as text: gib(3 * 2**29) is "1.50 GiB"."""
    return f"{num_bytes / GIB:.2f} GiB"


def forward_flops(
    share: Share, document_lengths: Sequence[int], kinds: Sequence[AttentionKind] = (), num_targets: int | None = None,
    trains_matrices: bool = True,
) -> float:  # fmt: skip
    """Returns the floating-point operations of one forward over documents of these lengths, attention causal.

    A training step needs three times as many; recomputed activations are not counted (model FLOPs). Where matrices are
    frozen a step needs two products of each, not three: returns a third of the step's operations.

    Args:
        kinds: how each layer attends; (): as the configuration says.
        num_targets: tokens that the head predicts; None: as many as the documents have.
    """
    matrices, tokens = sum(map(share.layer_matrix_parameters, range(share.num_hidden_layers))), sum(document_lengths)
    head = share.vocab_size * share.hidden_size * (tokens if num_targets is None else num_targets)
    layers = Counter(kinds or share.kinds)
    attention = sum(n * kind.forward_flops(document_lengths, *share.heads) for kind, n in layers.items())
    return 2 * (matrices * tokens + head) * (1 if trains_matrices else 2 / 3) + attention
