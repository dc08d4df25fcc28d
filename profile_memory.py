"""Layer-by-layer memory of a training step: `python profile_memory.py --model_size 4B --context_length 131072`.

On a GPU the table is measured: two whole steps as train.py runs them on one GPU (bf16 weights, float32 masters and
Adam moments, random tokens). The first compiles kernels and makes the libraries' workspaces: the second is shown.
Without a GPU, and beside the measurement on one, the table is predicted: `predict` walks through the same step tensor
by tensor. Its assumptions: one GPU, bf16, the Triton kernels, one document a sequence, no allocator overhead
(fragmentation is in "reserved", which only a measurement knows), and what cuBLAS and cuDNN were seen to take.

Categories. residual stream: layer inputs, norms' outputs, and the gradients that flow through them; attention and MLP:
what they keep for backward and work with; loss: the last norm, the hidden states, logits and their gradients, and the
head's gradient until it reaches the optimizer; other: token ids, rotary tables, library workspaces.
GiB = 2**30 bytes.
"""

import dataclasses
import json
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from kernels.attention import choose_backend
from model import MODEL_SIZES, ModelConfig, Transformer
from train import TrainConfig, build_model
from training.distributed import World, join_world
from training.optimizer import PIECE_ELEMENTS, MasterAdamW

GIB = 2**30
CATEGORIES = ("parameters", "gradients", "optimizer", "residual stream", "attention", "MLP", "loss", "other")
LOSS_CHUNK_TOKENS = 4096  # linear_cross_entropy's default
# Bytes for each element of q that a backward kernel takes beyond dq, dk, dv: measured on an H200 at 131,072 tokens and
# 32 query / 8 key-value heads (cuDNN: float32 dq, and dk and dv of each query head before they are summed).
ATTENTION_WORKSPACE = {"cudnn": 8, "flash": 12, "flash-attn-4": 6}
LIBRARY_WORKSPACE = 64 * 2**20  # cuBLAS on Hopper: 32 MiB for the forward thread, 32 for backward's


@dataclass(frozen=True)
class Run:
    """What is profiled."""

    model: ModelConfig  # its attention_backend is a kernel of `ATTENTION_WORKSPACE`
    context_length: int
    batch_size: int
    gradient_checkpointing: bool

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context_length


@dataclass(frozen=True)
class Row:
    """One stage: bytes of each category when it ends (for backward's peak: at the peak), and the most in between."""

    stage: str
    held: dict[str, int]
    peak: int

    @property
    def allocated(self) -> int:
        return sum(self.held.values())


def largest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row.peak)


# Predicted


class Ledger:
    """Which tensors live, stage by stage, as `predict` makes and frees them."""

    def __init__(self):
        self.live: dict[tuple, tuple[str, int]] = {}  # (layer, name) -> category, bytes
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.rows: list[Row] = []
        self.peak = Row("", dict(self.held), 0)
        self.layer, self.owner = 0, ""

    def make(self, category: str, **tensors: int) -> None:
        """Allocate tensors of the current layer; the peak and its owner follow."""
        for name, num_bytes in tensors.items():
            assert (self.layer, name) not in self.live, name
            self.live[self.layer, name] = category, num_bytes
            self.held[category] += num_bytes
        total = sum(self.held.values())
        if total > self.peak.peak:
            self.peak = Row(self.owner, dict(self.held), total)

    def free(self, *names: str) -> None:
        for name in names:
            category, num_bytes = self.live.pop((self.layer, name))
            self.held[category] -= num_bytes

    def end_stage(self, stage: str) -> None:
        total = sum(self.held.values())
        self.rows.append(Row(stage, dict(self.held), max(self.peak.peak, total)))
        self.peak = Row(self.owner, dict(self.held), total)


class Block:
    """The tensors of one decoder layer, in the order in which model.py and its Triton kernels make and free them."""

    def __init__(self, run: Run, ledger: Ledger):
        config, self.ledger, self.checkpointing = run.model, ledger, run.gradient_checkpointing
        tokens = run.tokens
        H, G, K = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.hidden = 2 * tokens * config.hidden_size  # bytes of a bf16 [B, T, D]
        self.q, self.k = 2 * tokens * H * K, 2 * tokens * G * K
        self.feed_forward = 2 * tokens * config.intermediate_size
        self.head_float = 4 * tokens * H  # a float32 for each query head: log-sum-exp
        self.rstd, self.head_rstds = 2 * 4 * tokens, 4 * tokens * (H + G)  # what the two norms, and q's and k's, keep
        self.workspace = ATTENTION_WORKSPACE[config.attention_backend] * tokens * H * K
        self.mlp_gradient = 4 * config.hidden_size * config.intermediate_size  # of one of three matrices, float32
        self.attention_gradients = 4 * config.layer_matrix_parameters() - 3 * self.mlp_gradient
        self.attention_gradients += 4 * 2 * (config.hidden_size + K)

    def forward(self, layer: int, keep: bool, recompute: bool = False) -> None:
        """`keep`: for backward. Of a recomputation's output, made and dropped below the peak, nothing is counted."""
        ledger, hidden = self.ledger, self.hidden
        ledger.layer = layer
        needed = ("normed", "q_raw", "k_raw", "rstd", "head_rstds", "total", "normed_2", "gate", "up", "activated")

        def free(*names: str) -> None:
            ledger.free(*(name for name in names if not (keep and name in needed)))

        ledger.owner = f"layer {layer} attention"
        ledger.make("residual stream", normed=hidden, rstd=self.rstd if keep else 0)
        ledger.make("attention", q_raw=self.q, k_raw=self.k, v=self.k)
        ledger.make("attention", q_normed=self.q, k_normed=self.k, head_rstds=self.head_rstds if keep else 0)
        ledger.make("attention", q=self.q, k=self.k)
        ledger.free("q_normed", "k_normed")
        free("q_raw", "k_raw")
        ledger.make("attention", out=self.q, log_sum_exp=self.head_float)
        ledger.make("residual stream", attended=hidden)
        if not keep:
            ledger.free("q", "k", "v", "out", "log_sum_exp")
        free("normed")
        ledger.make("residual stream", total=hidden, normed_2=hidden)

        ledger.owner = f"layer {layer} MLP"
        ledger.make("MLP", gate=self.feed_forward, up=self.feed_forward)
        ledger.make("MLP", activated=self.feed_forward)
        free("gate", "up")
        if not recompute:
            ledger.make("residual stream", mlp_out=hidden)
            free("activated", "normed_2", "total", "rstd", "head_rstds")
            ledger.layer = layer + 1
            ledger.make("residual stream", input=hidden)
            ledger.layer = layer
            ledger.free("mlp_out")
        ledger.free("attended")

    def backward(self, layer: int) -> None:
        """From the gradient of the layer's output to that of its input, both named d_output."""
        ledger, hidden = self.ledger, self.hidden
        if self.checkpointing:
            self.forward(layer, keep=True, recompute=True)
        ledger.layer, ledger.owner = layer, f"layer {layer} MLP"
        ledger.make("MLP", d_activated=self.feed_forward)
        ledger.make("gradients", down=self.mlp_gradient)
        ledger.free("activated")
        ledger.make("MLP", d_gate=self.feed_forward, d_up=self.feed_forward)
        ledger.free("gate", "up", "d_activated")
        ledger.make("residual stream", d_normed_2=hidden)
        ledger.free("d_up")
        ledger.make("MLP", d_normed_2_part=hidden)
        ledger.free("d_gate", "d_normed_2_part")
        ledger.make("gradients", gate_and_up=2 * self.mlp_gradient)
        ledger.free("normed_2")
        ledger.make("residual stream", d_total=hidden)
        ledger.free("d_normed_2", "total", "d_output")

        ledger.owner = f"layer {layer} attention"
        ledger.make("attention", d_out=self.q)
        ledger.make("attention", d_q=self.q, d_k=self.k, d_v=self.k, workspace=self.workspace)
        ledger.free("workspace", "d_out", "q", "k", "v", "out", "log_sum_exp")
        ledger.make("attention", d_q_normed=self.q, d_k_normed=self.k)
        ledger.free("d_q", "d_k")
        ledger.make("attention", d_q_raw=self.q, d_k_raw=self.k)
        ledger.free("d_q_normed", "d_k_normed", "q_raw", "k_raw", "head_rstds")
        ledger.make("residual stream", d_normed=hidden)
        ledger.make("attention", d_normed_part=hidden)
        ledger.free("d_normed_part", "d_q_raw", "d_k_raw", "d_v")
        ledger.make("gradients", attention_gradients=self.attention_gradients)
        ledger.free("normed")
        ledger.make("residual stream", d_input=hidden)
        ledger.free("d_normed", "d_total", "d_input", "input", "rstd")
        ledger.layer = layer - 1
        ledger.make("residual stream", d_output=hidden)


def predict(run: Run) -> list[Row]:
    """The table of a training step, from shapes alone. See the top of the file for what is assumed."""
    config, ledger = run.model, Ledger()
    block = Block(run, ledger)
    tokens, parameters = run.tokens, config.num_parameters()
    head = 2 * config.vocab_size * config.hidden_size  # bytes of a bf16 [V, D]
    layers, hidden = config.num_hidden_layers, block.hidden
    chunked = config.uses_chunked_loss(tokens)

    ledger.make("parameters", parameters=2 * parameters)
    ledger.end_stage("parameters")
    ledger.make(
        "optimizer", master_m_v=12 * parameters, room=4 * min(PIECE_ELEMENTS, config.vocab_size * config.hidden_size)
    )
    ledger.make("other", ids_and_labels=16 * tokens, rotary=4 * run.context_length * config.head_dim)
    ledger.make("other", libraries=LIBRARY_WORKSPACE)
    ledger.end_stage("start of the step")

    ledger.owner = "embedding"
    ledger.make("residual stream", input=hidden)
    ledger.end_stage("after embedding")
    for layer in range(layers):
        block.forward(layer, keep=not run.gradient_checkpointing)
        ledger.end_stage(f"layer {layer}")
    ledger.layer, ledger.owner = layers, "loss"
    ledger.make("loss", hidden_states=hidden)
    ledger.end_stage("after forward")
    logits = 2 * config.vocab_size * (min(LOSS_CHUNK_TOKENS, tokens) if chunked else tokens)
    if chunked:
        ledger.make("loss", d_hidden=hidden, d_head=2 * head, logits=logits)
        ledger.free("logits", "hidden_states")
    else:
        ledger.make("loss", logits=logits)
    ledger.end_stage("loss")

    ledger.make("loss", d_head_bf16=head)
    if chunked:
        ledger.free("d_head")
    else:
        ledger.make("loss", d_hidden=hidden)
        ledger.free("logits", "hidden_states")
    if not config.tie_word_embeddings:
        ledger.make("gradients", head=2 * head)
        ledger.free("d_head_bf16")
    ledger.make("residual stream", d_last=hidden)
    ledger.free("d_hidden", "d_last", "input")
    ledger.layer = layers - 1
    ledger.make("residual stream", d_output=hidden)
    for layer in reversed(range(layers)):
        block.backward(layer)
    ledger.owner = "embedding"
    ledger.make("loss", d_embedding=head)
    ledger.free("d_output")
    if config.tie_word_embeddings:  # the head's part has waited to be added to the embedding's
        ledger.layer = layers
        ledger.free("d_head_bf16")
        ledger.layer = -1
    ledger.make("gradients", embedding_and_norm=2 * head + 4 * config.hidden_size)
    ledger.free("d_embedding")
    peak = ledger.peak
    ledger.end_stage("after backward")
    ledger.rows.insert(-1, dataclasses.replace(peak, stage=f"backward's peak: {peak.stage}"))

    ledger.owner, ledger.held["gradients"] = "optimizer", 0
    ledger.end_stage("optimizer")
    return ledger.rows


# Measured


class CudaCounter:
    """PyTorch's allocator on one GPU. It counts when the host allocates, so nothing has to be synchronised."""

    def __init__(self, device: torch.device):
        self.device = device

    def read(self) -> tuple[int, int]:
        """Bytes allocated now, and the most since the last call."""
        allocated, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return allocated, peak


class Recorder:
    """Splits a step into parts by hooks on the model, and books what changes during a part on the part's category.

    Parameters, gradients and optimizer state are counted exactly, from their tensors. A module's output, and the
    gradient of its input, belong to the residual stream. Under gradient checkpointing the forward hooks of attention
    and MLP run again while backward recomputes them, and mark that time as theirs too.
    """

    def __init__(self, model: Transformer, counter: CudaCounter):
        self.model, self.counter = model, counter
        self.optimizer: MasterAdamW | None = None
        self.start()
        self._hook(model)

    def start(self) -> None:
        """Begin a new table."""
        self.rows: list[Row] = []
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.category, self.owner, self.in_backward = "other", "", False
        self.counter.read()
        self.peak = Row("", dict(self.held), 0)

    def end_stage(self, stage: str) -> None:
        self._read()
        self.rows.append(Row(stage, dict(self.held), self.peak.peak))
        self.peak = Row("", dict(self.held), sum(self.held.values()))

    def enter(self, category: str, owner: str) -> None:
        """What is allocated from here on belongs to `category`; a peak to `owner`."""
        self._read()
        self.category, self.owner = category, owner

    def _read(self) -> None:
        allocated, peak = self.counter.read()
        if peak > self.peak.peak:
            held = dict(self.held)
            held[self.category] += peak - sum(held.values())
            self.peak = Row(self.owner, held, peak)
        self.held |= self._state_bytes()
        self.held[self.category] += allocated - sum(self.held.values())

    def _state_bytes(self) -> dict[str, int]:
        parameters = list(self.model.parameters())
        gradients, state = [p.grad for p in parameters if p.grad is not None], []
        if self.optimizer is not None:
            of_parameters = self.optimizer.states.values()
            gradients += [s.gradient for s in of_parameters if s.gradient is not None]
            state = [self.optimizer.room, *(tensor for s in of_parameters for tensor in s.tensors.values())]
        groups = {"parameters": parameters, "gradients": gradients, "optimizer": state}
        return {name: sum(t.nbytes for t in tensors) for name, tensors in groups.items()}

    def _hand_over(self, tensor: Tensor, category: str) -> None:
        """The part that ends made this tensor, but not for itself."""
        self._read()
        self.held[self.category] -= tensor.nbytes
        self.held[category] += tensor.nbytes

    def _hook(self, model: Transformer) -> None:
        """The embedding, each block and its two halves, the last norm and the model."""
        self._before(model.embed_tokens, lambda _: self.enter("residual stream", "embedding"))
        self._after(model.embed_tokens, lambda _: self.end_stage("after embedding"))
        for i, block in enumerate(model.layers):
            self._watch_half(block.self_attn, "attention", f"layer {i} attention")
            self._watch_half(block.mlp, "MLP", f"layer {i} MLP")
            self._before(block, self._watch_block(i))
            self._after(block, lambda _, i=i: self.end_stage(f"layer {i}"))
        self._before(model.norm, self._enter_loss)
        self._after(model.norm, lambda _: self.end_stage("after forward"))
        self._after(model, self._leave_forward)

    def _before(self, module: nn.Module, act: Callable[[Tensor], None]) -> None:
        module.register_forward_pre_hook(lambda _, inputs: act(inputs[0]))

    def _after(self, module: nn.Module, act: Callable[[Tensor], None]) -> None:
        module.register_forward_hook(lambda _, inputs, output: act(output))

    def _watch_block(self, layer: int) -> Callable[[Tensor], None]:
        below = f"layer {layer - 1} MLP" if layer else "embedding"

        def enter(x: Tensor) -> None:
            self.enter("residual stream", f"layer {layer} attention")
            x.register_hook(lambda _: self.enter("residual stream", below))

        return enter

    def _watch_half(self, module: nn.Module, category: str, owner: str) -> None:
        """Forward: pre-hook to hook. Backward: from the gradient of the output to that of the input."""

        def before(x: Tensor) -> None:
            if self.in_backward:  # a recomputation, of which x is the first part
                self._hand_over(x, "residual stream")
            if x.requires_grad:
                x.register_hook(lambda _: self.enter("residual stream", owner))  # the gradient has taken x's place
            self.enter(category, owner)

        def after(output: Tensor) -> None:
            self._hand_over(output, "residual stream")
            if output.requires_grad:
                output.register_hook(lambda _: self.enter(category, owner))
            self.enter("residual stream", owner)

        self._before(module, before)
        self._after(module, after)

    def _enter_loss(self, x: Tensor) -> None:
        # In backward the gradient of x has then taken x's place.
        self.enter("loss", "loss")
        x.register_hook(lambda _: self.enter("residual stream", f"layer {len(self.model.layers) - 1} MLP"))

    def _leave_forward(self, _) -> None:
        self.end_stage("loss")
        self.in_backward = True

    def end_backward(self) -> None:
        self._read()
        self.rows.append(dataclasses.replace(self.peak, stage=f"backward's peak: {self.peak.stage}"))
        for category in ("attention", "MLP", "loss"):  # all is freed; what was booked apart cancels
            self.held["residual stream"] += self.held[category]
            self.held[category] = 0
        self.end_stage("after backward")
        self.category, self.owner, self.in_backward = "other", "optimizer", False


def measure(model: Transformer, input_ids: Tensor, labels: Tensor, counter: CudaCounter) -> list[Row]:
    """Two training steps, the first of which compiles kernels and makes workspaces: the table of the second."""
    recorder = Recorder(model, counter)
    recorder.end_stage("parameters")
    parameters = recorder.rows[0]
    recorder.optimizer = optimizer = MasterAdamW(model.named_parameters())
    for _ in range(2):
        recorder.start()
        recorder.end_stage("start of the step")
        model(input_ids, labels).loss.backward()
        recorder.end_backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step(1e-5)
        recorder.end_stage("optimizer")
    return [parameters, *recorder.rows]


# Shown


def print_table(rows: list[Row], predicted: list[Row] | None) -> None:
    """In GiB; `predicted`, if given, beside the measured rows."""
    narrow = {"parameters": "params", "gradients": "grads", "residual stream": "residual"}
    header = ["allocated", "peak", "change", *(narrow.get(c, c) for c in CATEGORIES)]
    header += ["| predicted", "peak"] if predicted else []
    print(f"{'stage, GiB':<36}" + "".join(f"{name:>11}" for name in header))
    before = 0
    for i, row in enumerate(rows):
        values = [row.allocated, row.peak, row.allocated - before, *row.held.values()]
        values += [predicted[i].allocated, predicted[i].peak] if predicted else []
        print(f"{row.stage:<36}" + "".join(f"{value / GIB:11.3f}" for value in values))
        before = row.allocated


def print_without_optimizer(rows: list[Row]) -> None:
    """The few stages by which a model's own memory is usually told, without the optimizer's state."""
    names = ("parameters", "after embedding", "layer 0", "after forward", "loss")
    held = {row.stage: (row.allocated - row.held["optimizer"]) / GIB for row in rows}
    print("without the optimizer's state: " + ", ".join(f"{name} {held[name]:.2f}" for name in names) + " GiB")


def parse_flags(argv: list[str]) -> Namespace:
    """The flags, checked.

    Raises:
        ValueError: an unknown flag, a value out of range, a folder for --json that is not there.
    """
    parser = ArgumentParser(prog="profile_memory.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = _raise_value_error
    parser.add_argument("--model_size", default="4B", choices=MODEL_SIZES)
    parser.add_argument("--context_length", type=int, default=131_072)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--gradient_checkpointing", action=BooleanOptionalAction, default=True)
    parser.add_argument("--attention_type", default="full", choices=("full", "nsa"))
    parser.add_argument("--attention_backend", default="auto", choices=("auto", *ATTENTION_WORKSPACE))
    parser.add_argument("--loss_impl", default="auto", choices=("auto", "chunked", "standard"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="cpu: prediction only")
    parser.add_argument("--json", type=Path, help="write the tables there too")
    flags = parser.parse_args(argv)
    for name, least in (("context_length", 2), ("batch_size", 1)):
        if getattr(flags, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(flags, name)}")
    if flags.attention_type == "nsa":
        raise ValueError("attention_type nsa: sparse attention is not in this version; use full")
    if flags.json and not flags.json.parent.is_dir():
        raise ValueError(f"--json {flags.json}: no folder {flags.json.parent}")
    return flags


def _raise_value_error(message: str) -> NoReturn:
    raise ValueError(message)


def profile(flags: Namespace, world: World) -> dict:
    """Print the tables; what --json writes."""
    on_gpu = world.device.type == "cuda"
    backend = choose_backend(flags.attention_backend, world.device) if on_gpu else flags.attention_backend
    config = dataclasses.replace(
        MODEL_SIZES[flags.model_size],
        loss_impl=flags.loss_impl,
        attention_backend="cudnn" if backend == "auto" else backend,
    )
    run = Run(config, flags.context_length, flags.batch_size, flags.gradient_checkpointing)
    print(
        f"{flags.model_size}, {config.num_parameters():,} parameters, {run.batch_size} x {run.context_length:,} tokens"
        f"; gradient checkpointing {'on' if run.gradient_checkpointing else 'off'}; attention kernel "
        f"{config.attention_backend}; loss {'chunked' if config.uses_chunked_loss(run.tokens) else 'standard'}\n"
    )
    rows = predicted = predict(run)
    settings = {name: value for name, value in vars(flags).items() if name != "json"}
    results = {**settings, "predicted": [dataclasses.asdict(row) for row in predicted]}
    kind = "predicted, not measured (for a GPU, see the top of profile_memory.py)"
    if on_gpu:
        try:
            rows = measure_on_gpu(run, world)
        except torch.OutOfMemoryError:
            print("predicted, not measured (out of memory):")
            print_table(predicted, None)
            size = torch.cuda.get_device_properties(world.device).total_memory / GIB
            peak = largest(predicted).peak / GIB
            raise ValueError(f"out of memory: a peak of {peak:.1f} GiB is predicted, this GPU has {size:.1f}") from None
        results["measured"] = [dataclasses.asdict(row) for row in rows]
        kind = f"measured on {torch.cuda.get_device_name(world.device)}, torch {torch.__version__}, second step"
    print(f"{kind}:")
    print_table(rows, predicted if on_gpu else None)
    print()
    print_without_optimizer(rows)
    top, expected = largest(rows), largest(predicted)
    print(f"peak: {top.peak / GIB:.2f} GiB ({top.stage})")
    if on_gpu:
        error = 100 * (expected.peak / top.peak - 1)
        print(f"predicted: {expected.peak / GIB:.2f} GiB ({expected.stage}), {error:+.1f}%")
        print(f"reserved by the allocator at the end: {torch.cuda.memory_reserved(world.device) / GIB:.2f} GiB")
    return results


def measure_on_gpu(run: Run, world: World) -> list[Row]:
    model, _ = build_model(TrainConfig(gradient_checkpointing=run.gradient_checkpointing), run.model, world)
    shape = run.batch_size, run.context_length
    input_ids = torch.randint(run.model.vocab_size, shape, device=world.device)
    return measure(model, input_ids, input_ids.clone(), CudaCounter(world.device))


def main(argv: list[str]) -> int:
    try:
        flags = parse_flags(argv)
        with join_world(flags.device) as world:
            if world.size > 1:
                raise ValueError("profile_memory.py profiles one GPU: start it with python, not torchrun")
            results = profile(flags, world)
        if flags.json:
            flags.json.write_text(json.dumps(results) + "\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
