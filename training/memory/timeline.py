"""Seconds of a step as a timeline of named phases, each with compute and with copies beside it.

Seconds are amounts of work divided by measured rates, and copies that compute is too short to hide.
Copies to the host and the traffic of FSDP2 are counted one after the other: without NVLink they
share one link.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
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
PLACED_IS_LONGER = (
    0.01  # share of time that smaller launches add where some heads are attended at a time
)
COPIES_COST = 0.01  # share of the copies' time that kernels beside them lose


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    seconds: float  # from start to end, where copies that compute does not hide count
    compute: dict[str, float] = field(
        default_factory=dict
    )  # seconds of kernels by the name of their work
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
        # Seconds in which a visit reads weights that a format holds and writes them.
        self.visits = [unpacked.get(i, 0) / rates["memory"] for i in range(self.layers)]
        self.documents = step.documents or PackedDocuments.one_each(
            step.context_length, step.batch_size
        )
        self.mixers = Counter(parts.mixer for parts in self.parts)
        self.seconds_of = {
            mixer: attention_seconds(step, execution, mixer, self.documents, rates)
            for mixer in self.mixers
        }
        self.attending = [self.seconds_of[parts.mixer] for parts in self.parts]
        of_parts = {parts: work(step, execution, parts) for parts in {*self.parts}}
        self.linear = execution.linear
        self.work = [of_parts[parts] for parts in self.parts]
        # q, k and v go to other ranks, and attention's output comes back.
        sent = 2 * step.element_size * step.tokens * (1 - 1 / step.num_ranks)
        sizes = ((H + G) * K for H, G, K in (parts.mixer.heads for parts in self.parts))
        self.exchange = [size * sent / rates["gpu link"] for size in sizes]
        self.attention = [
            forward + more for (forward, _, _), more in zip(self.attending, self.exchange)
        ]  # in forward
        # Ranks that share matrices sum hidden states after attention and after the MLP; backward
        # sums their gradients.
        self.reduction = 2 * step.input_bytes * (1 - 1 / step.tensor_ranks) / rates["gpu link"]
        # Seconds of parameters that were added to a layer, in forward and in backward, by the name
        # of their rate.
        unit = step.element_size * step.tokens
        self.added = [
            tuple(
                {rate: unit * size / rates[rate] for rate, size in sizes.items()}
                for sizes in traffic
            )
            for traffic in step.traffic
        ]
        # Seconds of each layer's matrix products in forward.
        self.products = [*map(self._products, self.work)]
        self.again = functools.cache(self._again)

    def _products(self, parts: list[Work]) -> float:
        return sum(part.matrix_flops / self._rates(part)[0] for part in parts)

    def _rates(self, part: Work) -> list[float]:
        """Returns the FLOP/s of a part's three matrix products."""
        return [self.rates[part.rate or name] for name in self.linear.rates]

    @functools.cached_property
    def moves(self) -> list[float]:
        """Seconds of each layer's operations that only read and write memory, in forward."""
        step, shard = self.step, self.step.shard
        # Two norms of a block, two sums and their copies read and write nine hidden states, other
        # norms two each, and two multipliers four.
        hidden_states = 9 + 2 * (step.norms_per_layer - 2) + 4 * (shard.block.multiplier != 1)
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
        before, blocks = (
            range(start, layer),
            range(start, layer + 1),
        )  # blocks before run again for this block's input
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


class _Timeline:
    def __init__(self, step: Step, execution: Execution, rates: Rates):
        self.step, self.execution, self.rates = step, execution, rates
        self.layers, self.placements, self.parts = step.layers, execution.placements, step.parts
        self.needed, self.each = execution.needed, _layer_seconds(step, execution, rates)
        self.placed = [i for i in range(self.layers) if not self.placements[i].is_whole]
        self.longer = 1 + (
            PLACED_IS_LONGER * len(self.placed) / self.layers if execution.heads_at_a_time else 0
        )

    def forward(self, with_added: bool = True) -> dict[str, float]:
        """Returns the seconds of kernels in forward of all blocks, by their work."""
        return {
            **{work: self.longer * seconds for work, seconds in self.each.forward.items()},
            **_sum(forward for forward, _ in self.each.added if with_added),
            "sums over ranks": 2 * self.layers * self.each.reduction,
        }

    def backward(self) -> dict[str, float]:
        """Returns the seconds of kernels in backward of all blocks, by their work."""
        once = {work: self.longer * seconds for work, seconds in self.each.backward.items()}
        once["sums over ranks"] = 2 * self.layers * self.each.reduction
        again = map(self._again, self.placed)
        return _sum([once, *(backward for _, backward in self.each.added), *again])

    def _again(self, layer: int) -> dict[str, float]:
        """Returns seconds in which backward computes again what a placed block did not keep."""
        (start, _), *results = self.needed[layer]
        return self.each.again(start, layer, tuple(i for i, _ in results))

    def phases(self) -> list[Phase]:
        """Returns the phases, in the order of a step; the reference's, which comes first, is the
        last."""
        step, rates, L, link = self.step, self.rates, self.layers, self.rates["link"]
        forward, backward, loss = self.forward(), self.backward(), self._loss()
        reference = self.forward(with_added=False) | {"loss": self._head()}
        # Most blocks are equal.
        seconds_sent = functools.cache(lambda *block: sum(sent_bytes(step, *block)) / link)
        sent = [*map(seconds_sent, self.placements, self.parts)]
        weights = [
            size / link for size in step.waiting_weights(self.execution)
        ]  # the last: the embedding's
        waits, beside = (
            [size / link for size in sizes] for sizes in step.fetched_bytes(self.execution)
        )
        copies = sum(sent) + sum(weights[:L])
        # A block's copies have the time of one block: only one block's tensors leave, or come back,
        # at a time. In forward, the next block's weights come as activations leave. The head's come
        # beside the last block.
        each, each_back = sum(forward.values()) / L, sum(backward.values()) / L
        seconds = (
            weights[-1] + weights[0] + sum(max(each, *both) for both in zip(sent, weights[1:]))
        )
        back = sum(
            wait + max(each_back, out + more) for wait, out, more in zip(waits, sent, beside)
        )
        for i, _ in self.needed[L - 1][:1] if weights[L] else ():
            loss = max(loss, weights[i])
        ends, gather, add, sums = self._sharding()
        seconds = max(seconds, copies + (1 - ends) * gather)
        alone = max(
            sum(reference.values()), sum(weights), (1 - ends) * gather
        )  # nothing is kept for backward
        back = max(back, copies + (1 - ends) * (gather + add))
        last = max(back, copies + (1 - ends) * (gather + add + sums))
        # Gradients leave for the host in the first micro-batch. In each later one, the sums come
        # back and leave again. With copies of the weights they leave in the last alone.
        gradients = step.inventory(self.execution).leaving_gradients / link
        moved = 2 * gradients if step.num_copies == 1 else 0
        begun, added = self._gradient_sums()
        update, fetched = self._update(seconds, sum(weights), sum(sent))
        on_gpu = {"update": step.inventory(self.execution).updated_here / rates["memory"]}
        count = step.micro_batches
        return [
            Phase("forward", seconds + COPIES_COST * copies, forward, copies, count),
            Phase("loss", loss, {"loss": loss}, times=count),
            Phase(
                "gradients of later micro-batches",
                max(back, moved) + added,
                backward | {"sums": added},
                copies + moved,
                count - 1,
            ),
            Phase(
                "backward",
                max(last, gradients) + begun,
                backward | {"sums": begun},
                copies + gradients,
            ),
            Phase(
                "embedding and head between ranks",
                ends * (gather + add),
                link=ends * (gather + add),
                times=count,
            ),
            Phase("sums of embedding and head between copies", ends * sums, link=ends * sums),
            Phase("update", update, on_gpu, fetched),
            Phase(
                "forward without backward",
                alone,
                reference,
                sum(weights),
                count * step.scoring.forward_passes,
            ),
        ]

    def _gradient_sums(self) -> tuple[float, float]:
        """Returns the seconds in which the GPU begins the sums of a step's gradients, and adds to
        all of them.

        Each sum is float32. It begins as a copy of a bf16 gradient, and its norm is read after each
        micro-batch.
        """
        if self.step.micro_batches == 1:
            return 0.0, 0.0
        whole = self.step.inventory(self.execution).gpu_gradients / self.rates["memory"]
        return 2.5 * whole, 3.5 * whole

    def _loss(self) -> float:
        again = self.step.scoring.head_passes * self.step.uses_chunked_loss(self.execution)
        # Products of logits, of the input's gradient and of the head's, which both losses make.
        return (2 + (self.step.head_gradient > 0) + again) * self._head()

    def _head(self) -> float:
        """Returns the seconds of the head's product in forward."""
        step = self.step
        return (
            2
            * step.tokens
            * step.head
            / step.element_size
            / self.rates[self.execution.linear.head.rate]
        )

    def _sharding(self) -> tuple[float, float, float, float]:
        """Returns the share of embedding and head, and the seconds to gather all parameters, to add
        up, to sum copies.

        FSDP2 gathers parameters and sums float32 gradients while other blocks compute. Embedding
        and head are gathered before anything runs and stay until backward. Their gradients are
        summed last. The rate of a machine is measured with exchanges of heads, which also pay for
        copies. Other machines send to all its GPUs at once.
        """
        step, shard, rates = self.step, self.step.shard, self.rates
        elements, ranks = step.elements, step.num_shards or 1
        apart = min(step.num_copies, step.num_machines)  # copies that share no machine
        between_machines = elements * (step.num_machines // apart - 1) / ranks / rates["network"]
        byte = max(
            elements * (1 - 1 / ranks) / rates["gpu link"], between_machines
        )  # seconds, 1 byte each
        gather, add = step.element_size * byte, 4 * byte * step.trained_elements / elements
        ends = shard.vocab_size * shard.hidden_size / elements * shard.num_ends
        # Copies sum their float32 shards, there and back, in the last backward. It is counted after
        # the other exchange, although both overlap where they go by different links.
        link = rates["network" if apart > 1 else "gpu link"]
        return (
            ends,
            gather,
            add,
            4 * 2 * (1 - 1 / step.num_copies) * step.trained_elements / ranks / link,
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
        fetched, returned = (
            inventory.updated / link,
            (inventory.updated - inventory.leaving_gradients) / link,
        )
        update = inventory.updated_here / self.rates["memory"]
        if step.num_shards:
            return update + fetched, fetched
        # Nothing runs before the embedding and the first block are updated.
        on_gpu = inventory.gpu_gradients / (inventory.gpu_gradients + inventory.leaving_gradients)
        head, block = max(0, step.head_share - on_gpu), step.layer_shares[0]
        first = (
            fetched * (head + block) / (max(1 - on_gpu, block) or 1)
        )  # nothing is fetched if all stays
        forward -= self._held(inventory.gpu_slots / link)
        return update + max(
            min(first, fetched), fetched + weights - forward, returned + sent - forward
        ), fetched

    def _held(self, filled: float) -> float:
        """Returns the seconds of forward in which no state comes or goes.

        While attention's kernel fills the GPU no piece is updated, and in `filled` seconds the
        slots of pieces are full. One document and one group of heads are a kernel.
        """
        documents = self.each.documents
        pairs, held = sum(count * length**2 for length, count in documents.lengths), 0.0
        for mixer, layers in self.each.mixers.items():
            steps = _steps(self.step, self.execution, mixer)
            forward, _, _ = self.each.seconds_of[mixer]
            for length, count in documents.lengths:
                held += (
                    layers * count * steps * max(0.0, forward * length**2 / pairs / steps - filled)
                )
        return held


def _sum(seconds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Returns sums by name."""
    total: dict[str, float] = {}
    for each in seconds:
        for name, amount in each.items():
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
        rows.append([name, *(f"{phase.times * each:.3f}" if each else "" for each in seconds)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:]))
        for row in rows
    )


def draw_phases(axes, phases: list[Phase]) -> None:
    """Draw phases one after another on Matplotlib's axes: kernels by work in a lane, copies beside
    them in another."""
    start, (shown, works) = 0.0, _shown(phases)
    total = sum(phase.times * phase.seconds for phase in shown)
    for phase in shown:
        at = start
        for name, seconds in phase.compute.items():
            if seconds:
                label = None if name in axes.get_legend_handles_labels()[1] else name
                axes.barh(
                    "kernels",
                    phase.times * seconds,
                    left=at,
                    color=f"C{works.index(name)}",
                    label=label,
                )
            at += phase.times * seconds
        axes.barh("copies", phase.times * phase.link, left=start, color="0.6")
        axes.axvline(start, color="k", linewidth=0.8)
        if (
            phase is shown[-1] or phase.times * phase.seconds > total / 25
        ):  # names of short phases would overlap
            axes.annotate(
                f" {phase.name}",
                (start, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=8,
                va="bottom",
            )
        start += phase.times * phase.seconds
    axes.set(
        xlabel="seconds, predicted; the update's copies go on beside the next forward",
        ylim=(-0.6, 1.6),
    )


def _shown(phases: list[Phase]) -> tuple[list[Phase], list[str]]:
    """Returns the phases that take time, and the names of their work."""
    shown = [phase for phase in phases if phase.times * phase.seconds > 0]
    return shown, [
        *dict.fromkeys(
            work for phase in shown for work, seconds in phase.compute.items() if seconds
        )
    ]


def attention_seconds(
    step: Step,
    execution: Execution,
    attention: AttentionPart,
    documents: PackedDocuments,
    rates: Rates,
) -> tuple[float, float, float]:
    """Returns the seconds of one layer: of forward, of choosing blocks of keys (once per step), of
    backward."""
    H, G, K = attention.heads
    work = attention.kind.work(
        documents.lengths, H // step.num_ranks, G // step.num_ranks, K,
        backend=execution.attention_backend,
        steps=_steps(step, execution, attention), is_packed=documents.count > step.batch_size,
        prompts=documents.prompts,
    )  # fmt: skip
    forward, choice, backward = (
        sum(n / rates[name] for name, n in amounts.items() if n) for amounts in work
    )
    return forward, choice, backward


def _steps(step: Step, execution: Execution, attention: AttentionPart) -> int:
    """Returns the groups of key/value heads that attend one after another."""
    own_heads = attention.heads[1] // step.num_ranks
    return own_heads // (execution.heads_at_a_time or own_heads)
