"""Bytes of a step, stage by stage: what is alive at the fullest moment of each."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kernels.head_loss import projected_logits_bytes
from kernels.linear_cross_entropy import logits_bytes
from kernels.parts import LayerParts
from training.host.sizes import MIB
from training.memory.dry_run import BlockBytes, block_bytes, sent_bytes, waiting_bytes
from training.memory.execution import Execution, Placement
from training.memory.step import Step

LIBRARY_BYTES = 160 * MIB  # cuBLAS workspaces and the small tensors that nothing below counts


@dataclass(frozen=True)
class Stage:
    """A part of a step, with the bytes that are alive at its fullest moment, by category."""

    name: str
    categories: dict[str, int]
    # Bytes that FSDP2's streams have and do not use: the allocator lends no CUDA stream the memory
    # of another.
    idle: int = field(default=0, kw_only=True)

    @property
    def bytes(self) -> int:
        """Bytes alive in all categories, without `idle`."""
        return sum(self.categories.values())


class Stages:
    """The stages of a step under an execution, in order: of its last micro-batch, with the
    optimizer's state in place.

    In lists of weights the numbers from 0 to L - 1 are blocks, number L the head and number -1 the
    embedding.
    """

    def __init__(self, step: Step, execution: Execution):
        self.step, self.execution, self.optimizer = step, execution, step.inventory(execution)
        self.weights = step.waiting_weights(execution)
        self.visits = step.visiting_weights(execution)
        self.blocks = [*zip(execution.placements, step.parts)]
        self.needed = execution.needed
        size_of = functools.cache(self._sizes)  # most blocks are equal
        waiting, self.block_bytes, self.sent = zip(*itertools.starmap(size_of, self.blocks))
        # Bytes that the blocks before each layer keep on the GPU for backward.
        self.before = [*itertools.accumulate(waiting, _add, initial=(0, 0, 0))]
        self.any_visits, self.any_sent = any(self.visits), any(map(any, self.sent))
        self.always = self._always()

    def _sizes(
        self, placement: Placement, parts: LayerParts
    ) -> tuple[tuple[int, int, int], BlockBytes, tuple[int, int]]:
        """Returns bytes of a block: waiting on the GPU, at fullest moments, sent to the host."""
        step, execution = self.step, self.execution
        fullest = block_bytes(step, execution, placement, parts)
        waiting = waiting_bytes(step, execution, placement, parts)
        return waiting, fullest, sent_bytes(step, placement, parts)

    def __iter__(self) -> Iterator[Stage]:
        yield from self.forward()
        yield from self.from_loss()

    def from_loss(self) -> Iterator[Stage]:
        """Returns the stages after forward, among which the fullest mostly is."""
        L, x = self.step.layers, self.step.input_bytes
        # 2 * x: the last norm's output, and the gradient of its input.
        with_head = (L, *(i for i, _ in self.needed[-1][:1])) if self.weights[L] else ()
        yield self._stage("loss", L, loss=self._loss_bytes() + 2 * x, running=with_head)
        yield from self._backward()
        yield self._stage("update", 0, 1, slots=self.optimizer.gpu_slots)

    def _always(self) -> dict[str, int]:
        """Returns the bytes that all stages have."""
        step = self.step
        tables = 1 + (step.shard.local_rope_theta is not None)
        positions = step.num_ranks + (step.is_packed or step.num_ranks > 1)
        return {
            "parameters": step.parameter_bytes - sum(self.optimizer.waiting.values()),
            "optimizer": self.optimizer.gpu_state + self.optimizer.gpu_scratch,
            # cos and sin: cached for whole sequences, and at the positions of packed documents or
            # of a rank's tokens. Some layers may have their own. 64 bytes per token: token ids,
            # labels, losses.
            "workspace": LIBRARY_BYTES
            + step.tokens
            * (4 * step.shard.rotary_width * positions * tables + 64 + step.scoring.token_bytes)
            + self.optimizer.arriving,
        }

    def _stage(
        self,
        name: str,
        layer: int,
        ready: float = 0.0,
        gradients: int = 0,
        block: tuple[int, int, int] = (0, 0, 0),
        running: Iterable[int] = (),
        slots: int = 0,
        loss: int = 0,
    ) -> Stage:
        """Returns a stage in which the blocks before `layer` wait for backward.

        `ready` is the share of the gradients on the GPU that exist. The arguments after it are
        bytes beside these. `running` are the block that runs, and the next: two blocks' weights
        visit. `slots` are the update's.
        """
        step, always, on_gpu = self.step, self.always, self.optimizer.gpu_gradients
        ready = 1 if step.micro_batches > 1 and step.num_copies == 1 else ready
        inputs, attention, mlp = _add(self.before[layer], block)
        absent = step.not_gathered_bytes.get(name, 0)
        visiting = sum(self.visits[i] for i in running) if self.any_visits else 0
        idle = step.idle_bytes + absent + int(on_gpu * (1 - ready)) if step.num_shards else 0
        categories = {
            "parameters": always["parameters"] + visiting - absent,
            "optimizer": always["optimizer"] + slots,
            "workspace": always["workspace"],
            "gradients": gradients + int(on_gpu * ready),
            "layer inputs": inputs,
            "attention": attention,
            "MLP": mlp,
        }
        if loss:
            categories["loss"] = loss
        return Stage(name, categories, idle=idle)

    def forward(self) -> Iterator[Stage]:
        """Returns the stages before the loss."""
        step, L, x = self.step, self.step.layers, self.step.input_bytes
        # An update goes on beside forward. Of several, that is the first, before gradients exist.
        # The others may have the last gradients that backward before made.
        late = 0 if step.num_shards else self.optimizer.gpu_slots
        if step.micro_batches > 1:
            late = max(self._leaving(1), late - self.optimizer.gpu_gradients)
        first = (-1, 0) if self.weights[-1] else ()
        # Ranks that share the embedding have both the rows of their own words and the sum over the
        # ranks.
        yield self._stage(
            "embedding", 0, block=(x * min(2, step.tensor_ranks), 0, 0), running=first, slots=late
        )
        last_placed = max((i for i in range(L) if not self.blocks[i][0].is_whole), default=None)
        # bytes that the placed block before still sends to the host; the last one waits for its own
        sent = 0, 0
        for layer, (placement, *_) in enumerate(self.blocks):
            attention, mlp = self.block_bytes[layer][0]
            sizes, two = (x + sent[0], attention + sent[1], mlp), (layer, layer + 1)
            yield self._stage(
                f"forward of layer {layer}", layer, block=sizes, running=two, slots=late
            )
            if not placement.is_whole:
                sent = self.sent[layer] if layer != last_placed else (0, 0)

    def _backward(self) -> Iterator[Stage]:
        step, optimizer, weights, L = self.step, self.optimizer, self.weights, self.step.layers
        # A separate head's gradient is ready after the loss. If head and embedding are one matrix,
        # it waits for the embedding's.
        separate = step.shard.num_ends - 1
        waiting = (1 - separate) * step.head_gradient
        # Shares of the parameters: those with a gradient, those whose gradients have left for the
        # host, and those whose gradients stay on the GPU.
        ready_share = separate * step.head_share
        offloaded_share = ready_share * optimizer.rows[-1].state_on_host
        # Compute waits until a large head's gradient has left.
        waited = offloaded_share * (step.last_bytes > optimizer.leaving_limit)
        visiting = (share for share, size in zip(step.layer_shares, weights) if size)
        embedding = step.head_share * (weights[L] > 0)
        resident_share = 1 - sum(visiting) - embedding - offloaded_share
        if resident_share <= 1e-9:  # all of them leave: a share of none is none
            resident_share = math.inf
        for layer in reversed(range(L)):
            share = step.layer_shares[layer]
            for part, sizes in zip(("MLP", "attention"), self.block_bytes[layer][1:]):
                if part == "attention":
                    ready_share += share * (not step.num_shards)
                    offloaded_share += share * (weights[layer] > 0)
                gradients = waiting + self._leaving(ready_share - waited)
                on_gpu = (ready_share - offloaded_share) / resident_share
                block = _add((step.input_bytes, *sizes), (*self._fetched(layer), 0))
                name = f"backward of layer {layer}, {part}"
                yield self._stage(name, layer, on_gpu, gradients, block, self._running(layer))
            ready_share += share * (step.num_shards > 0)  # FSDP2 sums them once a block has all
        # The embedding's gradient, as it is made.
        gradients = waiting + step.head_gradient + self._leaving(1)
        if step.num_shards and step.tensor_ranks > 1:  # autograd adds two DTensors into a third
            gradients += waiting
        gradients += embedding_sums(step) if step.head_gradient else 0
        on_gpu = 1 - step.head_share / resident_share * (weights[-1] == 0)
        yield self._stage("backward of embedding", 0, on_gpu, gradients, (step.input_bytes, 0, 0))

    def _leaving(self, share: float) -> int:
        """Returns the bytes of gradients on their way to the host after this share is made."""
        return min(self.optimizer.leaving_limit, int(self.optimizer.leaving_made * share))

    def _fetched(self, layer: int) -> tuple[int, int]:
        """Returns the bytes that come back from the host in backward of a block: inputs, and
        attention's results.

        The block is rebuilt from some, others are on their way for the next. A whole block fetches
        nothing.
        """
        if not self.any_sent:
            return 0, 0
        fetched, needed = {"input": 0, "results": 0}, set()
        if self.needed[layer]:
            needed = {*self.needed[layer], *self.needed[max(layer - 1, 0)]}
        for i, name in needed:
            if i < layer:
                fetched[name] += self.sent[i][name == "results"]
        return fetched["input"], fetched["results"]

    def _running(self, layer: int) -> set[int]:
        """Returns the blocks whose weights visit in backward of a block."""
        if not self.any_visits or not self.needed[layer]:
            return set()
        return {layer, *(i for i, _ in self.needed[max(layer - 1, 0)][:1])}

    def _loss_bytes(self) -> int:
        """Returns the bytes of the logits that exist at a time, and of the gradients of the head
        and its input."""
        step, shard, size = self.step, self.step.shard, self.step.element_size
        if step.uses_chunked_loss(self.execution):  # the head's gradient is float32
            # Once they are gone, with a head that visits and the last norm's output, its gradient
            # is rounded to a copy.
            logits = logits_bytes(step.tokens, shard.vocab_size, size)
            logits = max(logits, step.head_gradient - self.weights[step.layers] - step.input_bytes)
            # Without the last position of each, several whole sequences are copied to lie side by
            # side.
            inputs = 2 if step.batch_size > 1 and step.num_ranks == 1 else 1
            return logits + step.head_gradient * 4 // size + inputs * step.input_bytes
        logits = projected_logits_bytes(shard.vocab_size, step.tokens, size)
        return logits + step.head_gradient + step.input_bytes


def _add(block: tuple[int, int, int], added: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns sums of bytes of inputs, of attention and of the MLP."""
    return block[0] + added[0], block[1] + added[1], block[2] + added[2]


def embedding_sums(step: Step) -> int:
    """Returns the bytes of the embedding's float32 gradients, each summed over up to ten tokens of
    a word."""
    sums = min(step.tokens, step.shard.vocab_size) + step.tokens // 10
    return 4 * step.shard.hidden_size * sums
