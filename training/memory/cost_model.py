"""What a training step takes under given execution of where activations and optimizer state live: bytes and seconds.

Bytes are counted stage by stage: of each stage of a step, what is alive at its fullest moment. Shapes: T tokens of the
micro-batch, D model width, H query and G key/value heads of width K, F feed-forward width, V vocabulary; "a row" is
what one token takes. Seconds are floating-point operations over measured rates, attention and matrix products apart,
and copies where compute is too short to hide them.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from kernels.attention import PADDED_LENGTH_MULTIPLE
from training.checkpoint.files import IO_THREADS
from training.memory.execution import Execution, needed_for_backward
from training.memory.host_copies import SLOT_ALIGNMENT
from training.memory.machine import Rates
from training.optimizer import LEAVING_BYTES, OptimizerBytes, optimizer_bytes

LOSS_CHUNK_SIZE = 4096  # tokens, the default of kernels.linear_cross_entropy
LIBRARY_BYTES = 160 * 2**20  # cuBLAS workspaces and the small tensors that nothing below counts
# Elements of the attention backward's own buffers, in rows of q: float32 dq, dk and dv of each query head; measured.
_ATTENTION_WORKSPACE = {"auto": 4, "cudnn": 4, "flash": 6, "flash-attn-4": 3, "cpu": 4}


@dataclass(frozen=True)
class Stage:
    """A part of a step, and what is alive at its fullest moment, bytes by category.

    `idle` bytes are free, but for FSDP2's reduction alone: the allocator lends no CUDA stream another one's memory.
    """

    name: str
    categories: dict[str, int]
    idle: int = field(default=0, kw_only=True)

    @property
    def bytes(self) -> int:
        return sum(self.categories.values())


@dataclass(frozen=True)
class PackedDocuments:
    """What the documents of one rank's micro-batch ask of attention.

    Args:
        longest: tokens of the longest one that may come.
        count: documents, on average.
        pairs: of a query and a key that it sees, on average: n (n + 1) / 2 of a document of n tokens.
    """

    longest: int
    count: float
    pairs: float

    @classmethod
    def one_each(cls, context_length: int, batch_size: int) -> "PackedDocuments":
        """Each sequence is one document."""
        return cls(context_length, batch_size, batch_size * context_length * (context_length + 1) / 2)

    @classmethod
    def average(
        cls, lengths: np.ndarray, sequences: np.ndarray, longest: int, batch_size: int, num_ranks: int
    ) -> "PackedDocuments":
        """Over the micro-batches of an epoch, of the rank that has most pairs: the others wait for it.

        Args:
            lengths: int [N], tokens of each document.
            sequences: int [N], in which sequence of the epoch it is. Of each batch_size * num_ranks sequences rank r
                takes those at r, r + num_ranks, ...
            longest: tokens of the longest document that any epoch may have.
        """
        size = batch_size * num_ranks
        used = (sequences.max() + 1) // size * size
        count = np.bincount(sequences)[:used].reshape(-1, batch_size, num_ranks).sum(1)
        pairs = np.bincount(sequences, weights=lengths * (lengths + 1) / 2)[:used]
        pairs = pairs.reshape(-1, batch_size, num_ranks).sum(1)
        slowest = np.arange(len(pairs)), pairs.argmax(1)
        return cls(longest, float(count[slowest].mean()), float(pairs[slowest].mean()))


class Step:
    """A training step of a model: its bytes and seconds under any execution.

    Args:
        config: the model's shape, as model.ModelConfig names it.
        parameters: the model's, on the meta device or any; DTensors where FSDP2 shards them.
        context_length, batch_size, gradient_accumulation_steps: of one rank.
        documents: what is packed in a sequence. None, not known: bytes are counted as if several documents were and
            one of them had nearly all of the sequence, seconds as if each sequence were one document.
        given: what is settled before anything is planned: loss and attention backend.
        element_size: bytes of an activation.
    """

    def __init__(
        self,
        config,
        parameters: Iterable[Tensor],
        context_length: int,
        batch_size: int = 1,
        gradient_accumulation_steps: int = 1,
        documents: PackedDocuments | None = None,
        given: Execution | None = None,
        element_size: int = 2,
    ):
        self.config, self.parameters, self.element_size = config, list(parameters), element_size
        self.context_length, self.batch_size, self.documents = context_length, batch_size, documents
        self.micro_batches, self.given = gradient_accumulation_steps, given or Execution()
        self.tokens, self.layers = context_length * batch_size, config.num_hidden_layers
        # Bytes of a row of hidden states, queries, keys and feed-forward
        self.d, self.q, self.k, self.f = (
            element_size * n
            for n in (
                config.hidden_size,
                config.num_attention_heads * config.head_dim,
                config.num_key_value_heads * config.head_dim,
                config.intermediate_size,
            )
        )
        # Of attention's log-sum-exp, and of 1 / rms of the two norms and of each head
        self.lse = 4 * config.num_attention_heads
        self.norms = 4 * (2 + config.num_attention_heads + config.num_key_value_heads)
        self.head = element_size * config.vocab_size * config.hidden_size
        self.mlp_elements = 3 * config.hidden_size * config.intermediate_size
        layer_elements = config.layer_matrix_parameters()
        self.layer_share = layer_elements / config.num_parameters()
        self.head_share = config.vocab_size * config.hidden_size / config.num_parameters()
        self.parameter_bytes = sum(_local_elements(p) * p.element_size() for p in self.parameters)
        self.is_sharded = isinstance(self.parameters[0], DTensor)
        if self.is_sharded:
            # Gathered: embedding and head, with the gradient of a head that is not the embedding; a block, and the
            # next as it comes and whole. A block's gradients, and once more in float32, on their way to other ranks.
            self.parameter_bytes += self.head * (1 if config.tie_word_embeddings else 3)
            self.parameter_bytes += layer_elements * (4 * element_size + 4)
            # The reduction's stream makes the gradients' shards, and in float32 what is summed: of the embedding, and
            # of a head of its own, more than of a block.
            head_elements = self.head // element_size * (1 if config.tie_word_embeddings else 2)
            self._reduction_bytes = 4 * max(0, head_elements - layer_elements)
        self._optimizer_bytes: dict[float, OptimizerBytes] = {}

    def at(self, context_length: int, documents: PackedDocuments | None = None) -> "Step":
        """The same at another context: of these documents, else of one a sequence if this one is, else not known."""
        step = copy.copy(self)
        step.context_length, step.tokens = context_length, context_length * self.batch_size
        if documents is None and not self.is_packed:
            documents = PackedDocuments.one_each(context_length, self.batch_size)
        step.documents = documents
        return step

    @property
    def is_packed(self) -> bool:
        """Whether a sequence may hold several documents."""
        return self.documents is None or self.documents.count > self.batch_size

    def optimizer(self, execution: Execution) -> OptimizerBytes:
        if execution.gpu_state_bytes not in self._optimizer_bytes:
            self._optimizer_bytes[execution.gpu_state_bytes] = optimizer_bytes(
                self.parameters, accumulate=self.micro_batches > 1, gpu_state_bytes=execution.gpu_state_bytes
            )
        return self._optimizer_bytes[execution.gpu_state_bytes]

    def kept_bytes(self, name: str) -> int:
        """Of a block's "input", or of its "results" that are worth keeping."""
        return self.tokens * (self.d if name == "input" else self.q + self.lse)

    def arena_bytes(self, execution: Execution) -> int:
        """Of the arena that `apply_placement` needs, slots aligned."""
        return sum(
            self.kept_bytes(name) + 2 * SLOT_ALIGNMENT
            for placement in execution.placements
            for name in ("input", "results")
            if getattr(placement, name) == "host"
        )

    def host_bytes(self, execution: Execution) -> int:
        return self.arena_bytes(execution) + self.optimizer(execution).host

    def checkpoint_bytes(self) -> int:
        """Host memory that saving a checkpoint takes for a moment, besides what is pinned.

        One weight gathered whole, and a copy of a float32 tensor of the optimizer in each writing thread.
        """
        weight = max(parameter.numel() * parameter.element_size() for parameter in self.parameters)
        return weight + IO_THREADS * 4 * max(map(_local_elements, self.parameters))

    def uses_chunked_loss(self, execution: Execution) -> bool:
        return self.config.uses_chunked_loss(self.tokens, self.element_size, execution.loss_impl)

    def _steps_of_attention(self, execution: Execution) -> int:
        """In how many steps a block's attention goes through the key/value heads."""
        return self.config.num_key_value_heads // (execution.heads_at_a_time or self.config.num_key_value_heads)

    def peak(self, execution: Execution) -> Stage:
        """The fullest stage."""
        return max(self.stages(execution), key=lambda stage: stage.bytes)

    def stages(self, execution: Execution) -> Iterator[Stage]:
        """The stages of a step in order, once the optimizer's state exists; the last micro-batch of several."""
        T, L, optimizer = self.tokens, self.layers, self.optimizer(execution)
        always = {
            "parameters": self.parameter_bytes,
            "optimizer": optimizer.gpu_state + optimizer.gpu_buffers,
            # cos and sin, cached, and at the positions of packed documents; token ids, labels, losses
            "workspace": LIBRARY_BYTES + T * (4 * self.config.head_dim * (1 + self.is_packed) + 64),
            **dict.fromkeys(("gradients", "layer inputs", "attention", "MLP"), 0),
        }

        kinds = ("input", "results", "rest")
        places = {kind: [getattr(p, kind) for p in execution.placements] for kind in kinds}
        inputs_on_gpu, attention_on_gpu, whole_before = (
            [0, *accumulate(place == "gpu" for place in places[kind])] for kind in kinds
        )
        input_bytes, attention_bytes, rest = self.kept_bytes("input"), self.kept_bytes("results"), self._rest_bytes()

        def stage(name: str, layer: int, fetched: list[str], ready: float, working: dict[str, int]) -> Stage:
            """`layer`: those before it keep what they have on the GPU; `ready`: the parameters that have gradients."""
            sizes = {**always, **working}
            ready = 1 if self.micro_batches > 1 else ready
            sizes["gradients"] += int(optimizer.gpu_gradients * ready)
            idle = self._reduction_bytes + int(optimizer.gpu_gradients * (1 - ready)) if self.is_sharded else 0
            sizes["layer inputs"] += (inputs_on_gpu[layer] + fetched.count("input")) * input_bytes
            sizes["attention"] += (attention_on_gpu[layer] + fetched.count("results")) * attention_bytes
            for category, size in rest.items():
                sizes[category] += whole_before[layer] * size
            return Stage(name, sizes, idle=idle)

        yield stage("embedding", 0, [], 0, {"layer inputs": T * self.d})
        forward = [self._forward_bytes(execution, keeps_attention) for keeps_attention in (False, True)]
        backward = self._backward_bytes(execution)
        working = [
            self._whole_bytes(execution) if p.is_whole else (forward[p.results != "recompute"], *backward)
            for p in execution.placements
        ]
        for layer, (forward, _, _) in enumerate(working):
            yield stage(f"forward of layer {layer}", layer, [], 0, forward)
        chunked = self.uses_chunked_loss(execution)
        logits = self.element_size * self.config.vocab_size * (min(LOSS_CHUNK_SIZE, T) if chunked else T)
        d_head = 4 * self.head // self.element_size if chunked else self.head
        yield stage("loss", L, [], 0, {"loss": logits + d_head + 3 * T * self.d})

        # The head's gradient is one of those that are ready, or waits for the embedding's, to which it is tied.
        tied, head_share = (self.head, 0) if self.config.tie_word_embeddings else (0, self.head_share)
        needed = [needed_for_backward(execution.placements, layer) for layer in range(L)]
        for layer in reversed(range(L)):
            # This one's, and those on their way for the next; a whole block fetches nothing.
            keys = {*needed[layer], *needed[max(layer - 1, 0)]} if needed[layer] else ()
            fetched = [kind for i, kind in keys if i < layer and places[kind][i] == "host"]
            ready = head_share + self.layer_share * (L - 1 - layer)
            for part, sizes in zip(("MLP", "attention"), working[layer][1:]):
                ready += self.layer_share * (part == "attention")
                gradients = tied + min(LEAVING_BYTES, int(optimizer.leaving_gradients * ready))
                sizes = {**sizes, "gradients": gradients}
                yield stage(f"backward of layer {layer}, {part}", layer, fetched, ready, sizes)
        gradients = tied + self.head + min(LEAVING_BYTES, optimizer.leaving_gradients)  # the head's as it is made
        embedding = {"layer inputs": T * self.d, "gradients": gradients + self.embedding_sums()}
        yield stage("backward of embedding", 0, [], 1 - self.head_share, embedding)
        yield stage("update", 0, [], 1, {})

    def embedding_sums(self) -> int:
        """Bytes of the float32 sums, of up to ten tokens of a word each, that the embedding's backward first makes."""
        return 4 * self.config.hidden_size * (min(self.tokens, self.config.vocab_size) + self.tokens // 10)

    def _forward_bytes(self, execution: Execution, keeps_attention: bool) -> dict[str, int]:
        """Bytes by category of a block's fullest moment in forward, its input included: RoPE, or the MLP."""
        d, q, k, T = self.d, self.q, self.k, self.tokens
        groups = self._steps_of_attention(execution)
        rope = (d + (3 * q + 4 * k) // groups + (q if groups > 1 else 0)) * T
        kept = self.kept_bytes("results") if keeps_attention else 0
        # Attention's output, the sum, its norm and what the MLP works with; then its output and the block's.
        tile = execution.mlp_tile_size
        mlp = max(5 * d * T, 3 * d * T + 3 * self.f * T if tile is None else 4 * d * T + 3 * self.f * min(tile, T))
        if rope > kept + mlp:
            return {"layer inputs": d * T, "attention": rope}
        return {"layer inputs": d * T, "attention": kept, "MLP": mlp}

    def _backward_bytes(self, execution: Execution) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by category of a block's two fullest moments in backward, its input and what was kept of it included.

        In the backward of the MLP, with all that attention saved, and in that of attention's kernel.
        """
        d, q, k, T, e = self.d, self.q, self.k, self.tokens, self.element_size
        if execution.heads_at_a_time:
            groups = self._steps_of_attention(execution)
            saved = d + q + self.lse + 8  # x, out
            # the gradient of x; of one group qkv, q, k, v, out, dout, dq, dk, dv and buffers
            running = (saved + d + (5 * q + 6 * k) // groups) * T + self._attention_workspace(execution) // groups
        else:
            saved = d + 3 * q + 3 * k + self.lse + self.norms  # x, q and k before and after RoPE, v, out
            running = (saved + 2 * q + 2 * k) * T + self._attention_workspace(execution)  # dout, dq, dk, dv
        weights = self.mlp_elements
        if execution.mlp_tile_size is None:
            mlp = 2 * d * T + 5 * self.f * T  # sum and its norm; gate, up, and gradients of all three
        else:  # and dx; float32 dW with the tiles, or with its rounding. Before that: outputs of attention and block
            tiles = 3 * self.f * min(execution.mlp_tile_size, T)
            mlp = 2 * d * T + max(d * T + weights * 4 + max(tiles, weights * e), 2 * d * T)
        inputs = {"layer inputs": d * T}
        return (
            {**inputs, "attention": saved * T, "MLP": d * T + mlp},
            {**inputs, "attention": running + d * self.config.hidden_size, "MLP": 2 * d * T},
        )

    def _attention_workspace(self, execution: Execution) -> int:
        """Bytes of what attention's backward takes beside its arguments and results.

        A micro-batch whose sequences are one document each runs at once; else one document after the other runs, with
        copies of its dout, dq, dk and dv.
        """
        row = _ATTENTION_WORKSPACE[execution.attention_backend] * self.q
        longest = self.documents.longest if self.documents else self.context_length
        at_once = row * self.tokens if longest >= self.context_length else 0
        if not self.is_packed:
            return at_once
        multiple = PADDED_LENGTH_MULTIPLE if execution.attention_backend in ("auto", "cudnn") else 1
        padded = min(-(-longest // multiple) * multiple, self.context_length)
        return max(at_once, (row + 2 * self.q + 2 * self.k) * padded)

    def _rest_bytes(self) -> dict[str, int]:
        """Bytes by category of what autograd keeps of a whole block besides its input and attention's output."""
        attention = self.d + 2 * self.q + 3 * self.k + self.norms  # norm's output, q and k before and after RoPE, v
        mlp = 2 * self.d + 3 * self.f  # sum and its norm; gate, up and the activated product
        return {"attention": attention * self.tokens, "MLP": mlp * self.tokens}

    def _whole_bytes(self, execution: Execution) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """As the two above, of a whole block: in forward, and in the backward of the MLP and of attention's kernel."""
        d, q, k, T = self.d, self.q, self.k, self.tokens
        inputs, rest = {"layer inputs": d * T}, self._rest_bytes()
        kept = {**inputs, "attention": rest["attention"] + self.kept_bytes("results"), "MLP": rest["MLP"]}
        gradients = (2 * q + 2 * k) * T + self._attention_workspace(execution) + d * self.config.hidden_size
        return (
            {**kept, "MLP": rest["MLP"] + 3 * d * T},  # outputs of attention, MLP and block
            {**kept, "MLP": rest["MLP"] + (d + 2 * self.f) * T},  # dy; gradients of all three in one's place
            {**inputs, "attention": kept["attention"] + gradients, "MLP": d * T},  # the sum's gradient
        )

    def seconds(self, execution: Execution, rates: Rates) -> float:
        """Of one whole step."""
        config, T, L, placements = self.config, self.tokens, self.layers, execution.placements
        layer = 2 * config.layer_matrix_parameters() * T / rates.matrix_flops
        mlp = 2 * self.mlp_elements * T / rates.matrix_flops
        heads = config.num_attention_heads * config.head_dim
        documents = self.documents or PackedDocuments.one_each(self.context_length, self.batch_size)
        calls = documents.count if documents.count > self.batch_size else 0
        calls *= self._steps_of_attention(execution)
        flops = 4 * heads * documents.pairs
        attention_forward = flops / rates.attention_forward_flops + calls / rates.forward_documents
        attention_backward = 2.5 * flops / rates.attention_backward_flops + calls / rates.backward_documents
        elementwise = T * (9 * self.d + 4 * self.q + 4 * self.k + 3 * self.f) / rates.memory_bytes
        placed = [i for i in range(L) if not placements[i].is_whole]
        blocks = L + (0.01 * len(placed) if execution.heads_at_a_time else 0)  # smaller launches
        forward = blocks * (layer + attention_forward + elementwise)
        backward = blocks * (2 * layer + attention_backward + 2 * elementwise)
        # What runs again: all but the MLP, of which the tiled one computes gate and up again, the untiled one all.
        backward += len(placed) * (layer - mlp * (1 / 3 if execution.mlp_tile_size else 0))
        for i in placed:
            start, _ = needed_for_backward(placements, i)[0]
            backward += (i - start) * (layer + elementwise)  # blocks run again for this one's input
            backward += attention_forward * sum(placements[j].results == "recompute" for j in range(start, i + 1))
        copies = self.arena_bytes(execution) / rates.link_bytes
        optimizer = self.optimizer(execution)
        loss = 3 * 2 * config.vocab_size * config.hidden_size * T / rates.matrix_flops
        # Gradients leave in the first micro-batch; in each later one their sums come and, after that, leave again.
        gradients = optimizer.leaving_gradients / rates.link_bytes
        backwards = max(backward, copies, gradients) + (self.micro_batches - 1) * max(backward, copies, 2 * gradients)
        update = optimizer.host / rates.link_bytes + 4 * optimizer.gpu_state / rates.memory_bytes
        return self.micro_batches * (max(forward, copies) + 0.01 * copies + loss) + backwards + update


def _local_elements(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def gib(num_bytes: float) -> str:
    """As people read it."""
    return f"{num_bytes / 2**30:.2f} GiB"
