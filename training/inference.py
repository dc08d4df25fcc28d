"""A trained model to read and to write with: opened from its folder, counted before it is loaded, within a budget.

Shared by `python -m training.evaluation` and `python -m training.generate`. What a forward takes is counted from the
operations' footprints, as for a training step: weights, keys and values of all tokens, and one layer's working memory.
Where that is too much, attention works on fewer key/value heads at a time.
"""

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import KINDS
from kernels.attention.full import choose_backend
from kernels.gated_mlp import gated_mlp_footprint
from kernels.parts import AttentionKind
from kernels.qkv_attention import qkv_attention_footprint
from model import IGNORE_INDEX, ModelConfig, Transformer
from training.attention_flags import FLAGS, check_head_dim, kinds_of
from training.checkpoint.files import load_trainer_state, tokenizer_of
from training.checkpoint.weights import load_model_weights, parameter_shapes, shape_of_weights
from training.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from training.host.errors import UserError
from training.host.files import read_json
from training.host.memory import available_host_bytes, parse_bytes
from training.memory.cost_model import LIBRARY_BYTES, gib
from training.memory.execution import Execution
from training.memory.machine import cap_gpu_memory, gpu_budget
from training.memory.placement import set_kinds
from training.memory.planner import LEAST_HEADROOM, MLP_TILE_SIZE
from training.parallel.fsdp import copy_weights
from training.parallel.world import World
from training.run.settings import ATTENTION_TYPES

logger = logging.getLogger(__name__)
LOSS_BYTES = 2**29  # of logits, in the activations' dtype and twice in float32, that exist at a time


def add_model_flags(parser: ArgumentParser) -> None:
    """The flags that say which model is opened, and how it attends."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="a step_ folder of a run, or a folder in Hugging Face's form")
    add("--attention_type", choices=ATTENTION_TYPES, help="default: as the checkpoint was trained, else full or nsa")
    add("--selected_blocks", help="by layer as 64x4,32; default: as the checkpoint was trained, else 32, nsa: 16")
    add("--dense_below", type=int, help="of sparse: shorter texts attend to everything; default: as trained, else 8192")
    add("--tokenizer", help="a tokenizer.json, or bytes; default: the one that the weights were trained with")
    add("--memory_budget", help="of GPU memory, of host memory on a CPU: 24GB; default: what is free")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))


@dataclass(frozen=True)
class Opened:
    """What a model's folder says, before any weight is read.

    Args:
        settings: of the run that saved the folder; empty for weights from elsewhere.
        kinds: how each layer attends.
        stop_ids: that end what the model writes: the tokenizer's end of text, and the eos_token_id of config.json and
            generation_config.json.
        corpus_crc32: of the documents that its run was trained on; None where no run made it.
    """

    folder: Path
    shape: ModelConfig
    settings: dict
    kinds: tuple[AttentionKind, ...]
    tokenizer: ByteTokenizer | FileTokenizer
    stop_ids: frozenset[int]
    corpus_crc32: int | None


def open_folder(folder: Path, flags: Namespace, world: World) -> Opened:
    """Read what is small: config.json, the run's settings, the tokenizer. Raises UserError for what does not fit."""
    if world.size > 1:
        raise UserError("this runs in one process: start it with python, not torchrun")
    shape = shape_of_weights(folder)
    state = load_trainer_state(folder) if (folder / "trainer.json").is_file() else {}
    settings, corpus = state.get("settings", {}), state.get("loader", {}).get("corpus_crc32")
    kinds = attention_of(flags, shape, settings, world.device)
    tokenizer = open_tokenizer(flags.tokenizer, folder, shape.vocab_size)
    return Opened(folder, shape, settings, kinds, tokenizer, _stop_ids(folder, tokenizer), corpus)


def attention_of(
    flags: Namespace, shape: ModelConfig, settings: dict, device: torch.device
) -> tuple[AttentionKind, ...]:
    """How each layer attends, by the flags and else by the settings that the model was trained with."""
    own = shape.layer_kinds[0]
    trained = settings.get("attention_type", own.name if own.name in ATTENTION_TYPES else "full")
    asked = flags.attention_type or trained
    if bool(KINDS[asked].gates_per_head) != bool(own.gates_per_head):
        gated = own.name if own.gates_per_head else asked
        has = f"has {'' if own.gates_per_head else 'no '}gates of {gated}"
        raise UserError(f"attention_type {asked} is not this model's: it {has}; drop the flag")
    found = Namespace(attention_type=asked, context_length=None)
    for name in FLAGS:
        given = getattr(flags, name)
        setattr(found, name, settings.get(name) if given is None and asked == trained else given)
    kinds = kinds_of(found, shape)
    check_head_dim(kinds, shape.head_dim, device)
    return kinds


def open_tokenizer(name: str | None, folder: Path, vocab_size: int) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of that name; None: the one that the folder's weights were trained with.

    Raises:
        UserError: nothing says which that was, or it has ids that the model does not have.
    """
    tokenizer = load_tokenizer(tokenizer_of(folder) if name is None else name)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, the model of {folder} has a "
            f"vocab_size of {vocab_size}; give the --tokenizer that it was trained with"
        )
    return tokenizer


def _stop_ids(folder: Path, tokenizer: ByteTokenizer | FileTokenizer) -> frozenset[int]:
    ids = [tokenizer.eos_id]
    for file in (folder / "config.json", folder / "generation_config.json"):
        given = read_json(file).get("eos_token_id") if file.is_file() else None
        ids += given if isinstance(given, list) else [given]
    return frozenset(i for i in ids if isinstance(i, int))


# Memory


@dataclass(frozen=True)
class Reading:
    """What is to be read at most, from which its memory follows.

    Args:
        tokens: of a forward.
        cached: tokens whose keys and values are kept, those to be written included; 0: none are.
        element_size: bytes of a weight and of an activation.
    """

    shape: ModelConfig
    tokens: int
    cached: int
    element_size: int
    execution: Execution

    @property
    def new_tokens(self) -> int:
        return max(0, self.cached - self.tokens)

    @property
    def weight_bytes(self) -> int:
        return self.element_size * self.shape.num_parameters()

    @property
    def cache_bytes(self) -> int:
        shape = self.shape
        of_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
        return self.element_size * of_token * self.cached

    @property
    def forward_bytes(self) -> int:
        """Of the tensors of one layer, or of a part of the tokens' logits, whichever is more."""
        shape, execution, size = self.shape, self.execution, self.element_size
        x = size * shape.hidden_size * self.tokens
        attention = max(self._attention_bytes(kind.for_longest(self.tokens)) for kind in {*execution.kinds})
        mlp = gated_mlp_footprint(
            self.tokens, shape.hidden_size, shape.intermediate_size, element_size=size,
            tile_size=execution.mlp_tile_size,
        ).forward  # fmt: skip
        logits = min(LOSS_BYTES, (size + 8) * shape.vocab_size * self.tokens)
        tables = 4 * shape.head_dim * max(self.tokens, self.cached)  # cos and sin, float32
        keys = 4 * size * shape.num_key_value_heads * shape.head_dim * self.tokens if self.cached else 0
        # A block's input, and attention's input and working memory, or the sum, its norm and the MLP.
        block = x + max(x + max(attention, x + keys), 3 * x + mlp)
        return tables + max(block, 2 * x + logits) + LIBRARY_BYTES

    def _attention_bytes(self, kind: AttentionKind) -> int:
        shape, execution = self.shape, self.execution
        counted = qkv_attention_footprint(
            self.tokens, shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim,
            element_size=self.element_size, backend=execution.attention_backend, context_length=self.tokens,
            kind=kind, heads_at_a_time=execution.heads_at_a_time, has_norms=shape.has_head_norms,
        ).forward  # fmt: skip
        if kind.gpu_head_dims and execution.attention_backend == "cpu":
            # The reference writes scores, their mask and probabilities out, of the heads of a step.
            heads = shape.num_attention_heads // shape.num_key_value_heads
            heads *= execution.heads_at_a_time or shape.num_key_value_heads
            counted += 4 * self.element_size * heads * self.tokens**2
        return counted

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.forward_bytes

    def describe(self) -> str:
        cache = f", keys and values {gib(self.cache_bytes)}" if self.cached else ""
        return f"weights {gib(self.weight_bytes)}{cache}, working memory {gib(self.forward_bytes)}"


def plan_reading(reading: Reading, budget: float) -> Reading:
    """The same, with as many key/value heads at a time as fit the budget.

    Raises:
        UserError: not even one at a time fits; names the longest text that would.
    """
    found = _fitting(reading, budget)
    if found:
        return found
    new = f" and {reading.new_tokens:,} new ones" if reading.new_tokens else ""
    longest, refused = 0, reading.tokens
    while refused - longest > max(1, longest // 100):
        tokens = (longest + refused) // 2
        fits = _fitting(_of_tokens(reading, tokens), budget)
        longest, refused = (tokens, refused) if fits else (longest, tokens)
    reads = f"at most {longest:,} tokens would fit" if longest else "not even one token would fit"
    least = replace(reading, execution=replace(reading.execution, heads_at_a_time=1))
    raise UserError(
        f"{reading.tokens:,} tokens{new} take {gib(least.bytes)} ({least.describe()}), {gib(budget)} are there; "
        f"{reads}{new and ' besides the new ones'}: give a shorter text, fewer new tokens, or a larger --memory_budget"
    )


def _of_tokens(reading: Reading, tokens: int) -> Reading:
    return replace(reading, tokens=tokens, cached=min(reading.cached, tokens + reading.new_tokens))


def _fitting(reading: Reading, budget: float) -> Reading | None:
    heads = reading.shape.num_key_value_heads
    for n in (None, *(n for n in range(heads - 1, 0, -1) if heads % n == 0)):
        execution = replace(reading.execution, heads_at_a_time=n)
        candidate = replace(reading, execution=execution)
        if candidate.bytes * LEAST_HEADROOM <= budget:
            return candidate
    return None


def memory_budget(text: str | None, device: torch.device) -> int:
    """Bytes of a --memory_budget: of GPU memory, or of host memory on a CPU; None: what is free."""
    if device.type == "cuda":
        return gpu_budget(text or "auto", device)
    free = available_host_bytes()
    budget = free if text is None else parse_bytes(text)
    if not 0 < budget <= free:
        raise UserError(f"memory_budget {text}: {gib(free)} of this machine's memory are free; lower it")
    return budget


# Loading


def load(opened: Opened, tokens: int, cached: int, world: World, budget_text: str | None) -> Transformer:
    """The model on its device, bf16 on a GPU and float32 on a CPU, within the budget; nothing is read if it is not.

    Args:
        tokens: of the longest forward.
        cached: of the longest text that is read and written with a key/value cache; 0: none is.
    """
    device = world.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = choose_backend("auto", device)
    execution = Execution(mlp_tile_size=MLP_TILE_SIZE, attention_backend=backend, kinds=opened.kinds)
    budget = memory_budget(budget_text, device)
    reading = plan_reading(Reading(opened.shape, tokens, cached, dtype.itemsize, execution), budget)
    weights = load_model_weights(opened.folder, parameter_shapes(opened.shape))  # refuses what does not fit and damage
    logger.info("memory: %s, of %s", reading.describe(), gib(budget))
    if device.type == "cuda":
        cap_gpu_memory(budget, device)
    with torch.device("meta"):
        model = Transformer(opened.shape)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    copy_weights(model, weights)
    model.rotary.tables(max(tokens, cached), device)  # once: writing past a prompt would make them anew, twice as long
    set_kinds(model, opened.kinds)
    for block in model.layers:
        block.self_attn.backend = backend
        block.self_attn.heads_at_a_time = reading.execution.heads_at_a_time
        block.mlp.tile_size = reading.execution.mlp_tile_size
    return model


# Reading and writing


@torch.no_grad()
def token_losses(model: Transformer, hidden_BTD: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each token, float32 [B * T] on the CPU; 0 without a target. Few logits exist at a time."""
    num_rows = max(1, LOSS_BYTES // ((hidden_BTD.element_size() + 8) * model.config.vocab_size))
    rows = zip(hidden_BTD.flatten(0, 1).split(num_rows), targets.flatten().to(hidden_BTD.device).split(num_rows))
    losses = [
        F.cross_entropy(F.linear(x, model.output_weight).float(), y, ignore_index=IGNORE_INDEX, reduction="none").cpu()
        for x, y in rows
    ]
    return torch.cat(losses)


def write(
    model: Transformer, ids: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int] = frozenset(), **options
) -> Iterator[int]:
    """The tokens that follow `ids`, up to the first of `stop_ids`, which is left out; options: of `next_tokens`."""
    prompt = torch.as_tensor([int(i) for i in ids]).to(model.embed_tokens.weight.device)[None]
    for next_ids in model.next_tokens(prompt, max_new_tokens, **options):
        token = int(next_ids)
        if token in stop_ids:
            return
        yield token
