"""Opens a trained model to read and to write with.

Weights, keys and values that do not fit the memory budget are refused before a weight is read. A
forward takes little beyond them: the MLP works on some rows at a time, attention to long texts on
one key/value head at a time, and logits exist for some tokens at a time.
"""

import logging
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import KINDS
from kernels.attention.cache import cache_capacity
from kernels.attention.libraries import choose_backend
from kernels.head_loss import IGNORE_INDEX
from kernels.parts import MixerKind
from model import ModelConfig, Transformer
from training.checkpoint.files import load_trainer_state, tokenizer_of
from training.checkpoint.weights import (
    Located,
    find_all,
    folders_of,
    load_model_weights,
    shape_of_weights,
)
from training.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from training.families.rope import beyond
from training.families.rows import token_ids
from training.flags import as_words, given_flags
from training.generate.flags import ModelFlags
from training.host.errors import UserError, is_out_of_host_memory, refused_as_user_error
from training.host.files import read_json
from training.host.sizes import available_host_bytes, gib, parse_bytes
from training.memory.flags import ATTENTION_TYPES
from training.memory.kinds import FLAGS, check_head_dim, kinds_of
from training.memory.machine import cap_gpu_memory, gpu_budget
from training.memory.placement import set_kinds
from training.parallel.fsdp import copy_weights
from training.parallel.world import World

logger = logging.getLogger(__name__)
LOSS_BYTES = 2**29  # logits that exist at a time, in the activations' dtype and twice in float32
LONG_TEXT = 32_768  # tokens from which on attention works on one key/value head at a time


@dataclass(frozen=True)
class Opened:
    """A model's folder, before any weight is read."""

    folder: Path
    shape: ModelConfig
    settings: dict  # the run's that saved the folder; empty for weights from elsewhere
    kinds: tuple[MixerKind, ...]  # how each layer attends
    tokenizer: ByteTokenizer | FileTokenizer
    stop_ids: frozenset[int]  # the tokenizer's end of text, and the folder's eos_token_id
    weights: Located
    corpus_crc32: int | None  # identity of the documents of its run; None where no run made it


def open_folder(flags: ModelFlags, world: World) -> Opened:
    """Reads what is small: config.json, headers of weights, the run's settings, the tokenizer.

    Raises UserError for what does not fit.
    """
    if world.size > 1:
        raise UserError("this runs in one process: start it with python, not torchrun")
    folder = flags.checkpoint
    shape = shape_of_weights(folder)
    state = load_trainer_state(folder) if (folder / "trainer.json").is_file() else {}
    settings, corpus = state.get("settings", {}), state.get("loader", {}).get("corpus_crc32")
    kinds = attention_of(flags, shape, settings, world.device)
    tokenizer = open_tokenizer(flags.tokenizer, folder, shape.vocab_size)
    tokenizer.has_template_flag = hasattr(flags, "chat_template")
    # Weights that are not whole are refused before data are read.
    weights = find_all(folder, shape.parameters())
    stop_ids = _stop_ids(folder, tokenizer)
    return Opened(folder, shape, settings, kinds, tokenizer, stop_ids, weights, corpus)


def attention_of(
    flags: ModelFlags, shape: ModelConfig, settings: dict, device: torch.device
) -> tuple[MixerKind, ...]:
    """Returns how each layer attends, by the flags, else by the settings of the model's run."""
    first = shape.kinds[0]
    names = ("attention_type", *FLAGS)
    saved = {name: settings[name] for name in names if settings.get(name) is not None}
    # Somebody may have edited the file.
    with refused_as_user_error(f"trainer.json of {flags.checkpoint}: "):
        saved = given_flags(ModelFlags, ["a checkpoint", *as_words(saved, [*saved])], "")
    name_of_shape = first.name if first.name in ATTENTION_TYPES else "full"
    trained = saved.get("attention_type", name_of_shape)
    name = flags.attention_type or trained
    if bool(KINDS[name].gates_per_head) != bool(first.gates_per_head):
        has = f"has gates of {first.name}" if first.gates_per_head else f"has no gates of {name}"
        raise UserError(f"attention_type {name} is not this model's: it {has}; drop the flag")
    chosen = Namespace(attention_type=name, context_length=None)
    for flag in FLAGS:
        value = getattr(flags, flag)
        if value is None and name == trained:
            value = saved.get(flag)
        setattr(chosen, flag, value)
    kinds = kinds_of(chosen, shape)
    check_head_dim(kinds, shape.attention.head_dim, device)
    return kinds


def open_tokenizer(
    name: str | None, folder: Path, vocab_size: int
) -> ByteTokenizer | FileTokenizer:
    """Returns the named tokenizer; None: the tokenizer that the folder's weights were trained with.

    Raises UserError if the folder names none, or words have ids that the model lacks. Added tokens
    may have them, as Gemma 3's for images.
    """
    tokenizer = load_tokenizer(tokenizer_of(folder) if name is None else name)
    if tokenizer.ordinary_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has ids up to {tokenizer.ordinary_size - 1}, the model of "
            f"{folder} has a "
            f"vocab_size of {vocab_size}; give the --tokenizer that it was trained with"
        )
    return tokenizer


def _stop_ids(folder: Path, tokenizer: ByteTokenizer | FileTokenizer) -> frozenset[int]:
    ids: list = [tokenizer.eos_id]
    for path in folders_of(folder):
        for name in ("config.json", "generation_config.json"):
            if (path / name).is_file():
                stops = token_ids(read_json(path / name)).get("eos_token_id")
                ids += stops if isinstance(stops, list) else [stops]
    return frozenset(i for i in ids if isinstance(i, int))


# Loading


def memory_budget(text: str | None, device: torch.device) -> int:
    """Returns the bytes of a --memory_budget; None: what is free. Raises UserError for more."""
    if device.type == "cuda":
        return gpu_budget(text or "auto", device)
    free = available_host_bytes()
    budget = free if text is None else parse_bytes(text, "memory_budget")
    if not 0 < budget <= free:
        raise UserError(
            f"memory_budget {text}: {gib(free)} of this machine's memory are free; lower it"
        )
    return budget


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_memory(shape: ModelConfig, cached: int, device: torch.device, budget: int) -> str:
    """Returns what weights and a cache of `cached` tokens take, in words.

    Raises UserError if it is above `budget`.
    """
    size = dtype_on(device).itemsize
    weight_bytes = size * shape.num_parameters()
    tokens = sum(cache_capacity(cached, kind.reach) for kind in shape.kinds if kind.has_keys)
    attention = shape.attention
    elements_per_token = 2 * attention.num_key_value_heads * attention.head_dim
    cache_bytes = size * elements_per_token * tokens
    takes = f"the weights take {gib(weight_bytes)}"
    if cached:
        takes += f", keys and values of {cached:,} tokens {gib(cache_bytes)}"
    if weight_bytes + cache_bytes > budget:
        raise UserError(
            f"{takes}, {gib(budget)} are there: give shorter texts, or a larger --memory_budget"
        )
    return takes


def warn_beyond(shape: ModelConfig, longest: int, command: str = "training.export ") -> None:
    """Warns of texts that go past the declared context; `command` is as in `beyond`."""
    text = beyond(shape, shape.max_position_embeddings, longest, command)
    if text:
        logger.warning("positions: %s", text)


def load(
    opened: Opened, tokens: int, cached: int, world: World, budget_text: str | None
) -> Transformer:
    """Returns the model on its device, bf16 on a GPU and float32 on a CPU.

    Raises UserError, before a weight is read, if the weights and a cache of `cached` tokens do not
    fit the budget.

    Args:
        tokens: length of the longest forward.
        cached: tokens of the longest text with a key/value cache; 0: there is none.
        budget_text: the --memory_budget, to which a GPU's memory is capped.
    """
    device, shape = world.device, opened.shape
    dtype, budget = dtype_on(device), memory_budget(budget_text, device)
    takes = check_memory(shape, cached, device, budget)
    # No tensor is read yet.
    weights = load_model_weights(opened.folder, shape.parameters(), opened.weights)
    logger.info("memory: %s, of %s", takes, gib(budget))
    if device.type == "cuda":
        cap_gpu_memory(budget, device)
    with torch.device("meta"):
        model = Transformer(shape)
    model = model.cast(dtype).to_empty(device=device).requires_grad_(False)
    copy_weights(model, weights)
    # Made once: writing past a prompt would make them anew, twice as long.
    model.rotations(max(tokens, cached), device)
    set_kinds(model, opened.kinds)
    for block in model.layers:
        block.mixer.backend = choose_backend("auto", device)
        block.mixer.heads_at_a_time = 1 if tokens >= LONG_TEXT and shape.attends_in_groups else None
        block.mlp.tile_size = block.mlp.part.tile_size
    return model


@contextmanager
def mending_out_of_memory() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and not is_out_of_host_memory(error):
            raise
        first = (str(error).strip().splitlines() or ["out of host memory."])[0]
        raise UserError(
            f"{first} Give shorter texts, fewer new tokens or a larger --memory_budget, or end "
            "what else runs here"
        ) from None


# Reading and writing


@torch.no_grad()
def token_losses(model: Transformer, hidden_BTD: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of each token, float32 [B * T] on the CPU, 0 without a target.

    Few logits exist at a time.

    Args:
        hidden_BTD: the head's input, already normalised.
        targets: ids, int64 [B, T].
    """
    num_rows = max(1, LOSS_BYTES // ((hidden_BTD.element_size() + 8) * model.config.vocab_size))
    parts = hidden_BTD.flatten(0, 1).split(num_rows)
    losses = []
    for x, y in zip(parts, targets.flatten().to(hidden_BTD.device).split(num_rows)):
        logits = F.linear(x, model.output_weight).float()
        losses.append(F.cross_entropy(logits, y, ignore_index=IGNORE_INDEX, reduction="none").cpu())
    return torch.cat(losses)


@torch.no_grad()
def top_log_probs(model: Transformer, hidden_BTD: Tensor, targets: Tensor, k: int) -> Tensor:
    """Returns log-probabilities of each target and of the k likeliest words, with their ids.

    The result is [B, T, 1 + 2 k], float32 on the CPU, 0 without a target: the target's, k ids, and
    k log-probabilities. Arguments are as in `token_losses`.
    """
    hidden, targets = hidden_BTD.flatten(0, 1), targets.to(hidden_BTD.device)
    result = torch.zeros(len(hidden), 1 + 2 * k)
    num_rows = max(1, LOSS_BYTES // ((hidden.element_size() + 8) * model.config.vocab_size))
    for rows in (targets.flatten() != IGNORE_INDEX).nonzero()[:, 0].split(num_rows):
        logits = F.linear(hidden[rows], model.output_weight).float()
        log_sum_exp = logits.logsumexp(-1, keepdim=True)
        values, ids = logits.topk(k)
        log_probs = logits.gather(1, targets.flatten()[rows, None]) - log_sum_exp
        result[rows.cpu()] = torch.cat([log_probs, ids.float(), values - log_sum_exp], 1).cpu()
    return result.view(*hidden_BTD.shape[:2], -1)


def write(
    model: Transformer,
    ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    **options,
) -> Iterator[int]:
    """Yields the tokens after `ids`, up to the first of `stop_ids`, which is left out.

    Options are as in `next_tokens`.
    """
    prompt = torch.as_tensor([int(i) for i in ids]).to(model.embed_tokens.weight.device)[None]
    for next_ids in model.next_tokens(prompt, max_new_tokens, **options):
        token = int(next_ids)
        if token in stop_ids:
            return
        yield token
