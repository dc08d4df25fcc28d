"""The fastest placement of activations and optimizer state that fits: a cost model of a step, and a search.

Bytes are counted stage by stage: of each stage of a step, what is alive at its fullest moment. Shapes: T tokens of the
micro-batch, D model width, H query and G key/value heads of width K, F feed-forward width, V vocabulary; "a row" is
what one token takes. Seconds are floating-point operations over measured rates, attention and matrix products apart,
and copies where compute is too short to hide them.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.memory import PinnedArena, Placement, needed_for_backward
from training.optimizer import OptimizerBytes, optimizer_bytes

# Reserved over allocated: what the allocator loses between blocks, and what the model below leaves out.
HEADROOM = 1.04
MLP_TILE_SIZE = 8192  # rows, in every plan: tiles cost no time, and one matrix product less than all rows at once
LOSS_CHUNK_SIZE = 4096  # tokens, the default of kernels.linear_cross_entropy
LIBRARY_BYTES = 160 * 2**20  # cuBLAS workspaces and the small tensors that nothing below counts
_CONTEXT_MULTIPLE = 1024  # tokens; the largest context is found to this
# Elements of the attention backward's own buffers, in rows of q: float32 dq, dk and dv of each query head; measured.
_ATTENTION_WORKSPACE = {"cudnn": 4, "flash": 6, "flash-attn-4": 3, "cpu": 4}


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second; the defaults are one H200's."""

    matrix_flops: float = 650e12
    attention_forward_flops: float = 570e12
    attention_backward_flops: float = 535e12
    memory_bytes: float = 4.2e12  # read and written
    link_bytes: float = 50e9  # each way between host and GPU, both at once


def measure_rates(config, device: torch.device) -> Rates:
    """The rates of this GPU at the model's shapes, in about two seconds and 1.5 GiB; on a CPU, an H200's.

    Args:
        config: as of `Step`.
    """
    if device.type != "cuda":
        return Rates()
    T, H, G, K = 16_384, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)

    x, weight = make(T, config.hidden_size), make(config.hidden_size, config.intermediate_size)
    matrix = 2 * x.shape[0] * weight.numel() / _seconds(lambda: x @ weight)

    q, k, v, segments = make(1, T, H, K), make(1, T, G, K), make(1, T, G, K), None
    ops, backend, flops = torch.ops.fathom, config.attention_backend, 4 * H * K * (T * (T + 1) // 2)
    out, lse = ops.attention_forward(q, k, v, segments, backend)
    forward = flops / _seconds(lambda: ops.attention_forward(q, k, v, segments, backend))
    backward = 2.5 * flops / _seconds(lambda: ops.attention_backward(q, q, k, v, out, lse, segments, backend))

    source, target = (torch.empty(2**28, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * source.numel() / _seconds(lambda: target.copy_(source))
    arena, side = PinnedArena(2 * source.numel(), device), torch.cuda.Stream(device)
    sent, fetched = (arena.allocate(source.shape, torch.uint8) for _ in range(2))

    def copy_both_ways() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sent.copy_(source, non_blocking=True)
        target.copy_(fetched, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    link = source.numel() / _seconds(copy_both_ways)
    return Rates(matrix, forward, backward, memory, link)


def _seconds(work: Callable[[], object]) -> float:
    """Of one call, over enough of them for the clock that the GPU settles at under load."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()  # libraries choose their kernels
    calls, milliseconds = 1, 0.0
    while milliseconds < 200:
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        milliseconds, calls = start.elapsed_time(stop), 4 * calls
    return milliseconds / (calls // 4) / 1000


@dataclass(frozen=True)
class Choices:
    """What is up to the planner."""

    placements: tuple[Placement, ...]
    mlp_tile_size: int | None = None
    attention_by_groups: bool = False
    gpu_state_bytes: float = math.inf  # of the optimizer, see training.optimizer.MasterAdamW
    loss_impl: str = "auto"


@dataclass(frozen=True)
class Stage:
    """A part of a step, and what is alive at its fullest moment, bytes by category."""

    name: str
    categories: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.categories.values())


class Step:
    """A training step of a model: its bytes and seconds under any choices.

    Args:
        config: the model's shape, as model.ModelConfig names it, with the attention backend that will run.
        parameters: the model's, on the meta device or any; DTensors where FSDP2 shards them.
        context_length, batch_size, gradient_accumulation_steps: of one rank.
        packed: whether documents are packed in a sequence. Counted as if one of them had nearly all of it.
        element_size: bytes of an activation.
    """

    def __init__(
        self,
        config,
        parameters: Iterable[Tensor],
        context_length: int,
        batch_size: int = 1,
        gradient_accumulation_steps: int = 1,
        packed: bool = True,
        element_size: int = 2,
    ):
        self.config, self.parameters, self.element_size = config, list(parameters), element_size
        self.context_length, self.batch_size, self.packed = context_length, batch_size, packed
        self.micro_batches = gradient_accumulation_steps
        self.tokens, self.layers = context_length * batch_size, config.num_hidden_layers
        # Bytes of a row of hidden states, queries, keys, feed-forward, and of attention's log-sum-exp
        self.d, self.q, self.k, self.f = (
            element_size * n
            for n in (
                config.hidden_size,
                config.num_attention_heads * config.head_dim,
                config.num_key_value_heads * config.head_dim,
                config.intermediate_size,
            )
        )
        self.lse = 4 * config.num_attention_heads
        self.head = element_size * config.vocab_size * config.hidden_size
        self.mlp_elements = 3 * config.hidden_size * config.intermediate_size
        layer_elements = config.layer_matrix_parameters()
        self.layer_share = layer_elements / config.num_parameters()
        self.head_share = config.vocab_size * config.hidden_size / config.num_parameters()
        self.parameter_bytes = sum(_local_elements(p) * p.element_size() for p in self.parameters)
        if isinstance(self.parameters[0], DTensor):  # gathered: the head, two blocks, gradients on the way to float32
            self.parameter_bytes += self.head + layer_elements * (3 * element_size + 4)
        self._optimizer_bytes: dict[float, OptimizerBytes] = {}

    def at(self, context_length: int) -> "Step":
        """The same at another context."""
        step = copy.copy(self)
        step.context_length, step.tokens = context_length, context_length * self.batch_size
        return step

    def optimizer(self, choices: Choices) -> OptimizerBytes:
        if choices.gpu_state_bytes not in self._optimizer_bytes:
            self._optimizer_bytes[choices.gpu_state_bytes] = optimizer_bytes(
                self.parameters, accumulate=self.micro_batches > 1, gpu_state_bytes=choices.gpu_state_bytes
            )
        return self._optimizer_bytes[choices.gpu_state_bytes]

    def kept_bytes(self, name: str) -> int:
        """Of a block's "input", or its "attention" output and log-sum-exp."""
        return self.tokens * (self.d if name == "input" else self.q + self.lse)

    def arena_bytes(self, choices: Choices) -> int:
        """Of the arena that `apply_placement` needs, slots aligned."""
        return sum(
            self.kept_bytes(name) + 1024
            for placement in choices.placements
            for name in ("input", "attention")
            if getattr(placement, name) == "host"
        )

    def host_bytes(self, choices: Choices) -> int:
        return self.arena_bytes(choices) + self.optimizer(choices).host

    def uses_chunked_loss(self, choices: Choices) -> bool:
        config = self.config
        if config.loss_impl == "auto":
            config = replace(config, loss_impl=choices.loss_impl)
        return config.uses_chunked_loss(self.tokens, self.element_size)

    def peak(self, choices: Choices) -> Stage:
        """The fullest stage."""
        return max(self.stages(choices), key=lambda stage: stage.bytes)

    def stages(self, choices: Choices) -> Iterator[Stage]:
        """The stages of a step in order, once the optimizer's state exists; the last micro-batch of several."""
        T, L, optimizer = self.tokens, self.layers, self.optimizer(choices)
        always = {
            "parameters": self.parameter_bytes,
            "optimizer": optimizer.gpu_state + optimizer.gpu_buffers,
            # cos and sin, cached, and at the positions of packed documents; token ids, labels, losses
            "workspace": LIBRARY_BYTES + T * (4 * self.config.head_dim * (1 + self.packed) + 64),
            **dict.fromkeys(("gradients", "layer inputs", "attention"), 0),
        }

        places = {kind: [getattr(p, kind) for p in choices.placements] for kind in ("input", "attention")}
        inputs_on_gpu, attention_on_gpu = ([0, *accumulate(p == "gpu" for p in of_kind)] for of_kind in places.values())
        input_bytes, attention_bytes = self.kept_bytes("input"), self.kept_bytes("attention")

        def stage(name: str, layer: int, fetched: list[str], ready: float, working: dict[str, int]) -> Stage:
            """`layer`: those before it keep what they have on the GPU; `ready`: the parameters that have gradients."""
            sizes = {**always, **working}
            sizes["gradients"] += int(optimizer.gpu_gradients * (1 if self.micro_batches > 1 else ready))
            sizes["layer inputs"] += (inputs_on_gpu[layer] + fetched.count("input")) * input_bytes
            sizes["attention"] += (attention_on_gpu[layer] + fetched.count("attention")) * attention_bytes
            return Stage(name, sizes)

        yield stage("embedding", 0, [], 0, {"layer inputs": T * self.d})
        forward = self._forward_bytes(choices)
        for layer in range(L):
            yield stage(f"forward of layer {layer}", layer, [], 0, forward)
        chunked = self.uses_chunked_loss(choices)
        logits = self.element_size * self.config.vocab_size * (min(LOSS_CHUNK_SIZE, T) if chunked else T)
        d_head = 4 * self.head // self.element_size if chunked else self.head
        yield stage("loss", L, [], 0, {"loss": logits + d_head + 3 * T * self.d})

        # The head's gradient is one of those that are ready, or waits for the embedding's, to which it is tied.
        tied, head_share = (self.head, 0) if self.config.tie_word_embeddings else (0, self.head_share)
        mlp, attention = ({**working, "gradients": tied} for working in self._backward_bytes(choices))
        needed = [needed_for_backward(choices.placements, layer) for layer in range(L)]
        for layer in reversed(range(L)):
            keys = {*needed[layer], *needed[max(layer - 1, 0)]}  # this one's, and those on their way for the next
            fetched = [kind for i, kind in keys if i < layer and places[kind][i] == "host"]
            ready = head_share + self.layer_share * (L - 1 - layer)
            yield stage(f"backward of layer {layer}, MLP", layer, fetched, ready, mlp)
            yield stage(f"backward of layer {layer}, attention", layer, fetched, ready + self.layer_share, attention)
        yield stage("backward of embedding", 0, [], 1, {"layer inputs": T * self.d, "gradients": self.head})
        yield stage("update", 0, [], 1, {})

    def _forward_bytes(self, choices: Choices) -> dict[str, int]:
        """Bytes by category of a block's fullest moment in forward, its input included: RoPE, or the MLP."""
        d, q, k, T = self.d, self.q, self.k, self.tokens
        groups = self.config.num_key_value_heads if choices.attention_by_groups else 1
        rope = d + (3 * q + 4 * k) // groups + (q if groups > 1 else 0)
        tile = T if choices.mlp_tile_size is None else min(choices.mlp_tile_size, T)
        mlp = 5 * d * T + q * T + 3 * self.f * tile
        return {"layer inputs": d * T, "attention": rope * T} if rope * T > mlp else {"layer inputs": d * T, "MLP": mlp}

    def _backward_bytes(self, choices: Choices) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by category of a block's two fullest moments in backward, its input and what was kept of it included.

        In the backward of the MLP, with all that attention saved, and in that of attention's kernel.
        """
        d, q, k, T, e = self.d, self.q, self.k, self.tokens, self.element_size
        workspace = _ATTENTION_WORKSPACE[self.config.attention_backend] * q
        if self.packed:
            workspace += 2 * q + 2 * k  # a document's dout, dq, dk and dv, beside all documents'
        norms = 4 * (2 + self.config.num_attention_heads + self.config.num_key_value_heads)  # 1 / rms of each row
        if choices.attention_by_groups:
            groups = self.config.num_key_value_heads
            saved = d + q + self.lse + 8  # x, out
            # the gradient of x; of one group qkv, q, k, v, out, dout, dq, dk, dv and buffers
            running = saved + d + (5 * q + 6 * k + workspace) // groups
        else:
            saved = d + 3 * q + 3 * k + self.lse + norms  # x, q and k before and after RoPE, v, out
            running = saved + 2 * q + 2 * k + workspace  # dout, dq, dk, dv
        weights = self.mlp_elements
        if choices.mlp_tile_size is None:
            mlp = 2 * d * T + 5 * self.f * T  # sum and its norm; gate, up, and gradients of all three
        else:  # and dx; float32 dW with the tiles, or with its rounding. Before that: outputs of attention and block
            tiles = 3 * self.f * min(choices.mlp_tile_size, T)
            mlp = 2 * d * T + max(d * T + weights * 4 + max(tiles, weights * e), 2 * d * T)
        inputs = {"layer inputs": d * T}
        return (
            {**inputs, "attention": saved * T, "MLP": d * T + mlp},
            {**inputs, "attention": running * T + d * self.config.hidden_size, "MLP": 2 * d * T},
        )

    def seconds(self, choices: Choices, rates: Rates) -> float:
        """Of one whole step."""
        config, T, L, placements = self.config, self.tokens, self.layers, choices.placements
        layer = 2 * config.layer_matrix_parameters() * T / rates.matrix_flops
        mlp = 2 * self.mlp_elements * T / rates.matrix_flops
        heads = config.num_attention_heads * config.head_dim
        pairs = self.batch_size * self.context_length * (self.context_length + 1) // 2
        attention_forward = 4 * heads * pairs / rates.attention_forward_flops
        attention_backward = 2.5 * 4 * heads * pairs / rates.attention_backward_flops
        elementwise = T * (9 * self.d + 4 * self.q + 4 * self.k + 3 * self.f) / rates.memory_bytes
        forward = L * (layer + attention_forward + elementwise)
        backward = L * (2 * layer + attention_backward + 2 * elementwise)
        # What runs again: all but the MLP, of which the tiled one computes gate and up again, the untiled one all.
        backward += L * (layer - mlp * (1 / 3 if choices.mlp_tile_size else 0))
        if choices.attention_by_groups:  # smaller launches
            forward, backward = 1.01 * forward, 1.01 * backward
        for i in range(L):
            again = range(needed_for_backward(placements, i)[0][0], i)  # blocks run again for this one's input
            backward += len(again) * (layer + elementwise)
            blocks = [*again, i]
            backward += attention_forward * sum(placements[j].attention == "recompute" for j in blocks)
        copies = self.arena_bytes(choices) / rates.link_bytes
        optimizer = self.optimizer(choices)
        loss = 3 * 2 * config.vocab_size * config.hidden_size * T / rates.matrix_flops
        micro_batch = max(forward, copies) + max(backward, copies) + 0.01 * copies + loss
        update = optimizer.host / rates.link_bytes + 4 * optimizer.gpu_state / rates.memory_bytes
        return self.micro_batches * micro_batch + update


@dataclass(frozen=True)
class Plan:
    """Choices that fit, and what they are predicted to take.

    `arena_bytes` is what the arena for `apply_placement` must have; the optimizer makes its own.
    """

    choices: Choices
    peak: Stage
    host_bytes: int
    arena_bytes: int
    seconds: float

    def __str__(self) -> str:
        choices, placements = self.choices, self.choices.placements
        rows = []
        for title, name in (("layer inputs", "input"), ("attention outputs", "attention")):
            places = [getattr(p, name) for p in placements]
            counts = [f"{places.count(p)} {p}" for p in dict.fromkeys(places)]
            rows.append((title, ", ".join(counts)))
        state = {math.inf: "GPU", 0: "host"}.get(choices.gpu_state_bytes)
        state = state or f"up to {_gib(choices.gpu_state_bytes)} on the GPU, the rest on the host"
        heads = "one key/value head at a time" if choices.attention_by_groups else "all heads at once"
        tiles = f"{choices.mlp_tile_size} rows at a time" if choices.mlp_tile_size else "all rows at once"
        rows += [("attention", heads), ("MLP", tiles), ("loss", choices.loss_impl), ("optimizer state", state)]
        rows += [("predicted GPU peak", f"{_gib(self.peak.bytes)}, in {self.peak.name}")]
        rows += [(f"  {name}", _gib(size)) for name, size in self.peak.categories.items() if size]
        rows += [("predicted host memory", _gib(self.host_bytes)), ("predicted step", f"{self.seconds:.1f} s")]
        width = max(len(title) for title, _ in rows)
        return "\n".join(f"{title:<{width}}  {value}" for title, value in rows)


def make_plan(step: Step, gpu_bytes: float, host_bytes: float, rates: Rates = Rates()) -> Plan:
    """The plan of the fewest predicted seconds within both budgets.

    Args:
        step: what is to be trained.
        gpu_bytes: what the allocator may reserve.
        host_bytes: what may be pinned.

    Raises:
        ValueError: none fits; names the largest context that would.
    """
    found = []
    for base in _layouts(step):
        for recomputed in range(step.layers // 2 + 1):
            fitting = [
                _keep_attention(step, base, inputs, gpu_bytes, host_bytes)
                for inputs in _input_places(step.layers, recomputed)
                if _fits(step, _placed(base, inputs, 0, 0), gpu_bytes, host_bytes)
            ]
            if fitting:  # recomputing more inputs would only take longer
                found += fitting
                break
    if not found:
        budgets = f"{_gib(gpu_bytes)} of GPU and {_gib(host_bytes)} of host memory"
        largest = find_max_context(step, gpu_bytes, host_bytes)
        if largest == 0:
            raise ValueError(f"the model does not fit into {budgets} at any context")
        raise ValueError(
            f"context_length {step.context_length} does not fit into {budgets}; the largest that does is {largest}"
        )
    seconds, best = min(((step.seconds(choices, rates), choices) for choices in found), key=lambda pair: pair[0])
    return Plan(best, step.peak(best), step.host_bytes(best), step.arena_bytes(best), seconds)


def find_max_context(step: Step, gpu_bytes: float, host_bytes: float) -> int:
    """The longest context for which a plan exists, a multiple of 1024 tokens; 0 if there is none."""

    def fits(multiple: int) -> bool:
        longer = step.at(multiple * _CONTEXT_MULTIPLE)
        return any(
            _fits(longer, _placed(base, inputs, 0, 0), gpu_bytes, host_bytes)
            for base in _layouts(longer)
            if base.attention_by_groups  # which takes the least, as recomputing half of the inputs does
            for recomputed in (0, step.layers // 2)
            for inputs in _input_places(step.layers, recomputed)
        )

    too_long = 1
    while fits(too_long):
        too_long *= 2
    fitting = too_long // 2
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if fits(middle) else (fitting, middle)
    return fitting * _CONTEXT_MULTIPLE


def _fits(step: Step, choices: Choices, gpu_bytes: float, host_bytes: float) -> bool:
    return step.host_bytes(choices) <= host_bytes and step.peak(choices).bytes * HEADROOM <= gpu_bytes


def _layouts(step: Step) -> Iterator[Choices]:
    """All there is to choose but the placements."""
    state = step.optimizer(Choices(())).gpu_state
    can_choose = step.config.loss_impl == "auto" and not step.uses_chunked_loss(Choices(()))
    for gpu_state in (math.inf, *(state * quarters / 4 for quarters in (3, 2, 1, 0))):
        for by_groups in (False, True):
            for loss_impl in ("auto", "chunked") if can_choose else ("auto",):
                yield Choices((), MLP_TILE_SIZE, by_groups, gpu_state, loss_impl)


def _input_places(layers: int, recomputed: int) -> Iterator[list[str]]:
    """Of each layer's input: so many recomputed, any number of the others on the host.

    The GPU's share is that of the last layers: backward needs theirs first, and frees it as gradients come.
    """
    for on_host in range(layers - recomputed + 1):
        places = ["host"] * on_host + ["gpu"] * (layers - recomputed - on_host)
        for i in range(recomputed):
            places.insert(2 * i + 1, "recompute")
        yield places


def _keep_attention(step: Step, base: Choices, inputs: list[str], gpu_bytes: float, host_bytes: float) -> Choices:
    """As many attention outputs as fit on the GPU, then on the host."""

    def fits(on_gpu: int, on_host: int) -> bool:
        return _fits(step, _placed(base, inputs, on_gpu, on_host), gpu_bytes, host_bytes)

    on_gpu = _largest(step.layers, lambda n: fits(n, 0))
    return _placed(base, inputs, on_gpu, _largest(step.layers - on_gpu, lambda n: fits(on_gpu, n)))


def _placed(base: Choices, inputs: list[str], attention_on_gpu: int, attention_on_host: int) -> Choices:
    recomputed = len(inputs) - attention_on_gpu - attention_on_host
    attention = ["recompute"] * recomputed + ["host"] * attention_on_host + ["gpu"] * attention_on_gpu
    return replace(base, placements=tuple(map(Placement, inputs, attention)))


def _largest(limit: int, holds) -> int:
    """The largest n of 0 .. limit for which `holds(n)`, which holds for 0 and for all below one for which it does."""
    if limit and holds(limit):
        return limit
    low, high = 0, max(limit, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _local_elements(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
