"""Seconds of a step as a timeline of named phases, each with compute and with copies beside it.

Seconds are amounts of work divided by measured rates, and copies that compute is too short to hide.
Copies to the host and the traffic of FSDP2 are counted one after the other: without NVLink they
share one link.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernels.parts import Work
from kernels.qkv_attention import AttentionPart
from training.memory.dry_run import sent_bytes, work
from training.memory.execution import Execution
from training.memory.machine import Rates
from training.memory.step import PackedDocuments, Step

# Share of the link's rate at which state on the host is updated beside forward, whose kernels its
# kernels wait for.
UPDATE_BESIDE_FORWARD = 0.8
# share of time that smaller launches add where some heads are attended at a time
PLACED_IS_LONGER = 0.01
COPIES_COST = 0.01  # share of the copies' time that kernels beside them lose


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    seconds: float  # from start to end, with copies that kernels do not hide
    compute: dict[str, float] = field(default_factory=dict)  # seconds of kernels by their work
    link: float = 0.0  # seconds of copies to and from other memory beside them
    times: int = 1  # in a step, one after another


def timeline(step: Step, execution: Execution, rates: Rates) -> list[Phase]:
    """Returns the phases of one whole step, its update included."""
    return _Timeline(step, execution, rates).phases()


class _LayerSeconds:
    """Seconds of each layer's work under any placements: a search derives them once."""

    def __init__(self, step: Step, execution: Execution, rates: Rates):
        self.step, self.rates, self.layers, self.parts = step, rates, step.layers, step.parts
        self.heads_at_a_time = execution.heads_at_a_time
        unpacked = step.inventory(execution).unpacked
        # Seconds per block to decode quantized weights: bytes read and written by the GPU.
        self.visits = [unpacked.get(i, 0) / rates["memory"] for i in range(self.layers)]
        self.documents = step.documents or PackedDocuments.one_each(
            step.context_length, step.batch_size
        )
        # how many layers have each kind of attention or linear attention
        self.mixers = Counter(parts.mixer for parts in self.parts)
        self.seconds_of = {
            mixer: attention_seconds(step, execution, mixer, self.documents, rates)
            for mixer in self.mixers
        }
        # each layer's seconds of forward, of the choice of key blocks, and of backward
        self.attending = [self.seconds_of[parts.mixer] for parts in self.parts]
        # Work of each layer's linear maps, derived once for all layers that are alike.
        works = {parts: work(step, execution, parts) for parts in {*self.parts}}
        self.linear = execution.linear
        self.work = [works[parts] for parts in self.parts]
        # Exchanges between ranks that share sequences: q, k and v go to other ranks, (H + 2G) K
        # elements per token, and attention's output comes back, H K. `sent` has the seconds of two
        # elements of each token.
        sent = 2 * step.element_size * step.tokens * (1 - 1 / step.num_ranks) / rates["gpu link"]
        heads = [parts.mixer.heads for parts in self.parts]
        self.exchange = [(H + G) * K * sent for H, G, K in heads]
        # each layer's seconds of attention in forward, exchanges included
        self.attention = [
            forward + exchange for (forward, _, _), exchange in zip(self.attending, self.exchange)
        ]
        # Ranks that share matrices sum hidden states after attention and after the MLP; backward
        # sums their gradients.
        self.reduction = 2 * step.input_bytes * (1 - 1 / step.tensor_ranks) / rates["gpu link"]
        # Seconds of parameters that were added to a layer, in forward and in backward, by the name
        # of their rate.
        self.added = [tuple(map(self._added, traffic)) for traffic in step.traffic]
        # Seconds of each layer's matrix products in forward.
        self.products = [*map(self._products, self.work)]
        # A search asks for the same blocks many times.
        self.again = functools.cache(self._again)

    def _added(self, sizes: Mapping[str, float]) -> dict[str, float]:
        """Returns seconds by rate, from elements per token."""
        unit = self.step.element_size * self.step.tokens
        return {rate: unit * size / self.rates[rate] for rate, size in sizes.items()}

    def _products(self, parts: list[Work]) -> float:
        return sum(part.matrix_flops / self._rates(part)[0] for part in parts)

    def _rates(self, part: Work) -> list[float]:
        """Returns the FLOP/s of a part's three matrix products."""
        return [self.rates[part.rate or name] for name in self.linear.rates]

    @functools.cached_property
    def moves(self) -> list[float]:
        """Seconds of each layer's operations that only read and write memory, in forward."""
        step, block = self.step, self.step.shard.block
        # Two norms of a block, two sums and their copies read and write nine hidden states, two
        # norms more four, and two multipliers four.
        hidden_states = 9 + 4 * (block.before and block.after) + 4 * (block.multiplier != 1)
        moved = [sum(part.elementwise_bytes for part in parts) for parts in self.work]
        return [(hidden_states * step.input_bytes + size) / self.rates["memory"] for size in moved]

    @functools.cached_property
    def forward(self) -> dict[str, float]:
        """Seconds of kernels in forward of all blocks, by work, without added parameters."""
        return {
            "attention": sum(self.attention),
            "choice of blocks": sum(choice for _, choice, _ in self.attending),
            "products": sum(self.products),
            "memory": sum(self.moves),
            "dequantization": sum(self.visits),
        }

    @functools.cached_property
    def backward(self) -> dict[str, float]:
        """Seconds of kernels in backward of all blocks, as `forward`."""
        attention = sum(backward for _, _, backward in self.attending)
        # Backward sends q, k, v and the output again where it attends some heads at a time.
        attention += sum(self.exchange) * (2 if self.heads_at_a_time else 1)
        products = 0.0
        for part in itertools.chain(*self.work):
            _, dx, d_weight = (part.matrix_flops / rate for rate in self._rates(part))
            products += dx + d_weight * self.linear.trains_matrices
        return {
            "attention": attention,
            "products": products,
            "memory": 2 * sum(self.moves),
            "dequantization": sum(self.visits),
        }

    def _again(self, start: int, layer: int, kept: tuple[int, ...]) -> dict[str, float]:
        """Returns seconds in which backward computes again what a placed block did not keep.

        The block is rebuilt from the input of block `start`. Blocks `kept` have their results.
        """
        _, mlp = self.work[layer]
        # blocks before run again for this block's input
        before, blocks = range(start, layer), range(start, layer + 1)
        attention = sum(self.attention[i] for i in blocks if i not in kept)
        if not self.heads_at_a_time:  # kept outputs are exchanged again
            attention += sum(self.exchange[i] for i in kept)
        products = sum(part.repeated_flops / self._rates(part)[0] for part in self.work[layer])
        return {
            "attention": attention,
            "products": products + sum(self.products[i] for i in before),
            "memory": sum(self.moves[i] for i in before),
            "dequantization": sum(self.visits[i] for i in before),
            **_sum(self.added[i][0] for i in blocks),
            "sums over ranks": self.reduction * (2 * len(before) + (1 if mlp.is_skipped else 2)),
        }


@dataclass(frozen=True)
class _Sharding:
    """Seconds of FSDP2's exchanges between ranks."""

    ends: float  # share of embedding and head in the parameters
    gather: float  # to gather all parameters
    add: float  # to sum the gradients of all ranks
    add_copies: float  # to sum the gradients of copies of the weights


class _Timeline:
    def __init__(self, step: Step, execution: Execution, rates: Rates):
        self.step, self.execution, self.rates = step, execution, rates
        self.layers, self.placements, self.parts = step.layers, execution.placements, step.parts
        self.needed, self.by_layer = execution.needed, _layer_seconds(step, execution, rates)
        self.placed = [i for i in range(self.layers) if not self.placements[i].is_whole]
        self.longer = 1.0
        if execution.heads_at_a_time:
            self.longer += PLACED_IS_LONGER * len(self.placed) / self.layers
        link = rates["link"]
        # Most blocks are equal.
        seconds_sent = functools.cache(lambda *block: sum(sent_bytes(step, *block)) / link)
        # seconds in which each block's activations leave for the host, or come back
        self.sent = [*map(seconds_sent, self.placements, self.parts)]
        # seconds in which weights come: of each block, of the head, of the embedding
        self.weights = [size / link for size in step.waiting_weights(execution)]
        self.sharding = self._sharding()
        self.kernels = self.forward()
        self.forward_seconds = self._forward_seconds()

    def phases(self) -> list[Phase]:
        """Returns the phases in the order of a step; the reference's, which runs first, is last."""
        return [
            self._forward_phase(),
            self._loss_phase(),
            *self._backward_phases(),
            *self._exchanges(),
            self._update_phase(),
            self._reference_phase(),
        ]

    def forward(self, with_added: bool = True) -> dict[str, float]:
        """Returns the seconds of kernels in forward of all blocks, by their work."""
        return {
            **{work: self.longer * seconds for work, seconds in self.by_layer.forward.items()},
            **_sum(forward for forward, _ in self.by_layer.added if with_added),
            "sums over ranks": 2 * self.layers * self.by_layer.reduction,
        }

    def backward(self) -> dict[str, float]:
        """Returns the seconds of kernels in backward of all blocks, by their work."""
        once = {work: self.longer * seconds for work, seconds in self.by_layer.backward.items()}
        once["sums over ranks"] = 2 * self.layers * self.by_layer.reduction
        again = map(self._again, self.placed)
        return _sum([once, *(backward for _, backward in self.by_layer.added), *again])

    def _again(self, layer: int) -> dict[str, float]:
        """Returns seconds in which backward computes again what a placed block did not keep."""
        (start, _), *results = self.needed[layer]
        return self.by_layer.again(start, layer, tuple(i for i, _ in results))

    @functools.cached_property
    def _copies(self) -> float:
        """Seconds in which all blocks' activations leave and their weights come."""
        return sum(self.sent) + sum(self.weights[: self.layers])

    def _beside_blocks(self, seconds: float) -> float:
        """Returns the part of an exchange between ranks that goes on beside the blocks' kernels."""
        return (1 - self.sharding.ends) * seconds

    def _forward_seconds(self) -> float:
        """Returns the seconds of forward with the copies that kernels do not hide.

        While a block runs, its own activations leave for the host and the next block's weights
        come. The head's weights come beside the last block. Each block therefore takes as long as
        the slowest of the three: its kernels, its activations, the next weights.
        """
        # a block's kernels, on average
        block = sum(self.kernels.values()) / self.layers
        # Weights of the embedding and of block 0 come before any kernel could hide them.
        seconds = self.weights[-1] + self.weights[0]
        seconds += sum(max(block, *both) for both in zip(self.sent, self.weights[1:]))
        # FSDP2 gathers parameters over the same link.
        return max(seconds, self._copies + self._beside_blocks(self.sharding.gather))

    def _forward_phase(self) -> Phase:
        seconds = self.forward_seconds + COPIES_COST * self._copies
        return Phase("forward", seconds, self.kernels, self._copies, self.step.micro_batches)

    def _loss_phase(self) -> Phase:
        """Returns the loss, beside which weights come that backward needs first."""
        loss = self._loss()
        if self.weights[self.layers]:
            for first, _ in self.needed[-1][:1]:
                loss = max(loss, self.weights[first])
        return Phase("loss", loss, {"loss": loss}, times=self.step.micro_batches)

    def _backward_phases(self) -> list[Phase]:
        """Returns backward of later micro-batches, and of the one in which gradients leave."""
        step, kernels, copies, sharding = self.step, self.backward(), self._copies, self.sharding
        link = self.rates["link"]
        block = sum(kernels.values()) / self.layers
        seconds = 0.0
        for sent, wait, beside in zip(self.sent, *step.fetched_bytes(self.execution)):
            seconds += wait / link + max(block, sent + beside / link)
        exchanged = sharding.gather + sharding.add
        seconds = max(seconds, copies + self._beside_blocks(exchanged))
        last = max(seconds, copies + self._beside_blocks(exchanged + sharding.add_copies))
        # Gradients leave for the host in the first micro-batch. In each later one, the sums come
        # back and leave again. With copies of the weights they leave in the last alone.
        leaving = step.inventory(self.execution).leaving_gradients / link
        moved = 2 * leaving if step.num_copies == 1 else 0
        begun, added = self._gradient_sums()
        return [
            Phase(
                "gradients of later micro-batches",
                max(seconds, moved) + added,
                kernels | {"sums": added},
                copies + moved,
                step.micro_batches - 1,
            ),
            Phase(
                "backward", max(last, leaving) + begun, kernels | {"sums": begun}, copies + leaving
            ),
        ]

    def _exchanges(self) -> list[Phase]:
        """Returns the exchanges between ranks that no kernels run beside."""
        sharding = self.sharding
        seconds = sharding.ends * (sharding.gather + sharding.add)
        sums = sharding.ends * sharding.add_copies
        ends, count = "embedding and head between", self.step.micro_batches
        return [
            Phase(f"{ends} ranks", seconds, link=seconds, times=count),
            Phase(f"sums of {ends} copies", sums, link=sums),
        ]

    def _update_phase(self) -> Phase:
        update, fetched = self._update(self.forward_seconds, sum(self.weights), sum(self.sent))
        on_gpu = self.step.inventory(self.execution).seconds_here(self.rates)
        return Phase("update", update, {"update": on_gpu}, fetched)

    def _reference_phase(self) -> Phase:
        """Returns forward without a backward, for which nothing is kept."""
        kernels = self.forward(with_added=False) | {"loss": self._head()}
        weights, gather = sum(self.weights), self._beside_blocks(self.sharding.gather)
        seconds = max(sum(kernels.values()), weights, gather)
        times = self.step.micro_batches * self.step.scoring.forward_passes
        return Phase("forward without backward", seconds, kernels, weights, times)

    def _gradient_sums(self) -> tuple[float, float]:
        """Returns the seconds in which the GPU begins the sums of a step's gradients, and adds to
        all of them.

        Each sum is float32. It begins as a copy of a bf16 gradient, and its norm is read after each
        micro-batch.
        """
        if self.step.micro_batches == 1:
            return 0.0, 0.0
        once = self.step.inventory(self.execution).gpu_gradients / self.rates["memory"]
        return 2.5 * once, 3.5 * once

    def _loss(self) -> float:
        again = self.step.scoring.head_passes * self.step.uses_chunked_loss(self.execution)
        # Products of logits, of the input's gradient and of the head's, which both losses make.
        return (2 + (self.step.head_gradient > 0) + again) * self._head()

    def _head(self) -> float:
        """Returns the seconds of the head's product in forward."""
        flops = 2 * self.step.tokens * self.step.head / self.step.element_size
        return flops / self.rates[self.execution.linear.head.rate]

    def _sharding(self) -> _Sharding:
        """Returns the seconds of exchanges between ranks.

        FSDP2 gathers parameters and sums float32 gradients while other blocks compute. Embedding
        and head are gathered before anything runs and stay until backward. Their gradients are
        summed last. The rate of a machine is measured with exchanges of heads, which also pay for
        copies. Other machines send to all its GPUs at once.
        """
        step, shard, rates = self.step, self.step.shard, self.rates
        elements, trained, ranks = step.elements, step.trained_elements, step.num_shards or 1
        apart = min(step.num_copies, step.num_machines)  # copies that share no machine
        # seconds to exchange one byte of each element
        between_machines = elements * (step.num_machines // apart - 1) / ranks / rates["network"]
        byte = max(elements * (1 - 1 / ranks) / rates["gpu link"], between_machines)
        # Copies sum their float32 shards, there and back, in the last backward. It is counted after
        # the other exchange, although both overlap where they go by different links.
        link = rates["network" if apart > 1 else "gpu link"]
        return _Sharding(
            ends=shard.vocab_size * shard.hidden_size / elements * shard.num_ends,
            gather=step.element_size * byte,
            add=4 * byte * trained / elements,
            add_copies=4 * 2 * (1 - 1 / step.num_copies) * trained / ranks / link,
        )

    def _update(self, forward: float, weights: float, sent: float) -> tuple[float, float]:
        """Returns the seconds of the update beyond the forward beside it, and the seconds of its
        copies.

        One GPU's next forward of so many seconds runs beside the update of state on the host, which
        fetches it and sends it back without the gradients. Activations leave, and weights come, at
        the same time.
        """
        step, inventory = self.step, self.step.inventory(self.execution)
        link = self.rates["link"] * (1 if step.num_shards else UPDATE_BESIDE_FORWARD)
        fetched = inventory.updated / link
        returned = (inventory.updated - inventory.leaving_gradients) / link
        update = inventory.seconds_here(self.rates)
        if step.num_shards:
            return update + fetched, fetched
        # Nothing runs before the embedding and the first block are updated.
        on_gpu = inventory.gpu_gradients / (inventory.gpu_gradients + inventory.leaving_gradients)
        head, block = max(0, step.head_share - on_gpu), step.layer_shares[0]
        away = max(1 - on_gpu, block) or 1  # 1: all stays, and nothing is fetched
        first = min(fetched, fetched * (head + block) / away)
        forward -= self._held(inventory.gpu_slots / link)
        waits = max(first, fetched + weights - forward, returned + sent - forward)
        return update + waits, fetched

    def _held(self, filled: float) -> float:
        """Returns the seconds of forward in which no state comes or goes.

        While attention's kernel fills the GPU no piece is updated, and in `filled` seconds the
        slots of pieces are full. One document and one group of heads are a kernel.
        """
        lengths, held = self.by_layer.documents.lengths, 0.0
        pairs = sum(count * length**2 for length, count in lengths)
        for mixer, layers in self.by_layer.mixers.items():
            steps = _steps(self.step, self.execution, mixer)
            forward, _, _ = self.by_layer.seconds_of[mixer]
            for length, count in lengths:
                kernel = forward * length**2 / pairs / steps
                held += layers * count * steps * max(0.0, kernel - filled)
        return held


def _sum(seconds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Returns sums by name."""
    total: dict[str, float] = {}
    for amounts in seconds:
        for name, amount in amounts.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _layer_seconds(step: Step, execution: Execution, rates: Rates) -> _LayerSeconds:
    """Returns seconds of each layer's work, derived once for all placements."""
    sizes = execution.heads_at_a_time, execution.mlp_tile_size
    key = (execution.attention_backend, execution.linear, *sizes, *rates.items())
    if key not in step.prices:
        step.prices[key] = _LayerSeconds(step, execution, rates)
    return step.prices[key]


def format_timeline(phases: list[Phase]) -> str:
    """Returns a table of the phases that take time: their seconds in a step, of kernels by work,
    and of copies."""
    shown, works = _shown(phases)
    rows = [["seconds of a step", "in all", *works, "copies beside"]]
    for phase in shown:
        seconds = phase.seconds, *(phase.compute.get(work, 0.0) for work in works), phase.link
        name = phase.name + (f", {phase.times} times" if phase.times > 1 else "")
        cells = [f"{phase.times * once:.3f}" if once else "" for once in seconds]
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *cells in rows:
        columns = [f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:])]
        lines.append(f"{name:<{widths[0]}}" + "".join(columns))
    return "\n".join(lines)


def draw_phases(axes, phases: list[Phase]) -> None:
    """Draws phases one after another on Matplotlib's axes: kernels by work in a lane, copies beside
    them in another."""
    start, (shown, works) = 0.0, _shown(phases)
    total = sum(phase.times * phase.seconds for phase in shown)
    for phase in shown:
        at = start
        for name, seconds in phase.compute.items():
            if seconds:
                label = None if name in axes.get_legend_handles_labels()[1] else name
                look = {"color": f"C{works.index(name)}", "label": label}
                axes.barh("kernels", phase.times * seconds, left=at, **look)
            at += phase.times * seconds
        axes.barh("copies", phase.times * phase.link, left=start, color="0.6")
        axes.axvline(start, color="k", linewidth=0.8)
        # names of short phases would overlap
        if phase is shown[-1] or phase.times * phase.seconds > total / 25:
            place = {"xycoords": ("data", "axes fraction"), "va": "bottom"}
            axes.annotate(f" {phase.name}", (start, 1.0), fontsize=8, **place)
        start += phase.times * phase.seconds
    label = "seconds, predicted; the update's copies go on beside the next forward"
    axes.set(xlabel=label, ylim=(-0.6, 1.6))


def _shown(phases: list[Phase]) -> tuple[list[Phase], list[str]]:
    """Returns the phases that take time, and the names of their work."""
    shown = [phase for phase in phases if phase.times * phase.seconds > 0]
    works: dict[str, None] = {}
    for phase in shown:
        works |= dict.fromkeys(work for work, seconds in phase.compute.items() if seconds)
    return shown, [*works]


def attention_seconds(
    step: Step,
    execution: Execution,
    attention: AttentionPart,
    documents: PackedDocuments,
    rates: Rates,
) -> tuple[float, float, float]:
    """Returns a layer's seconds: forward, choice of key blocks (once per step), backward."""
    H, G, K = attention.heads
    work = attention.kind.work(
        documents.lengths,
        H // step.num_ranks,
        G // step.num_ranks,
        K,
        backend=execution.attention_backend,
        steps=_steps(step, execution, attention),
        is_packed=documents.count > step.batch_size,
        prompts=documents.prompts,
    )
    forward, choice, backward = (
        sum(n / rates[name] for name, n in amounts.items() if n) for amounts in work
    )
    return forward, choice, backward


def _steps(step: Step, execution: Execution, attention: AttentionPart) -> int:
    """Returns the groups of key/value heads that attend one after another."""
    heads = attention.heads[1] // step.num_ranks
    return heads // (execution.heads_at_a_time or heads)
