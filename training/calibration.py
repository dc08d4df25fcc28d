"""Calibrates how many blocks layers choose, by loss on a run's own weights and data; auto:32 asks for a mean of 32.

1. The longest training texts are read. Every second text calibrates, the others check.
2. All layers choose the mean. One layer at a time then chooses fewer or more blocks, and the loss changes. Forwards
   begin at that layer.
3. `allot` adds up the changes of single layers: of all numbers with that mean or less, it finds the least sum.
4. The other texts compare these numbers with the mean in every layer. They are taken if they gain `LEAST_GAIN`.
"""

import gc
import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kernels.attention.sparse.sparse_attention import Sparse
from model import IGNORE_INDEX, Context, ModelConfig, Transformer
from training.allotment import allot, choices_of
from training.attention_flags import kinds_at, sees_all, spell_by_layer, with_blocks
from training.data.tokens import Selection, Store
from training.evaluation.positions import Piece, pieces_by_length
from training.host.errors import UserError
from training.inference import Opened, load, token_losses
from training.memory.placement import set_kinds
from training.parallel.world import World
from training.run.settings import TrainConfig

logger = logging.getLogger(__name__)
LEAST_GAIN = 0.001  # nats per token; each number of blocks needs kernels of its own
TOKENS, MOST_TEXTS = 2**19, 64  # texts are read until they have so many tokens, and so many texts at most


def calibrate(
    config: TrainConfig, model_config: ModelConfig, folder: Path, store: Store, tokenizer, world: World
) -> str:
    """Returns selected_blocks by layer, of the mean that `config` gives every layer; the same text on all ranks.

    Args:
        folder: the weights that the run starts from.
        store: the training documents.

    Raises:
        UserError: too few long documents, or too little memory for the weights.
    """
    kinds = kinds_at(config, model_config, step=1)
    even = next(kind for kind in kinds if isinstance(kind, Sparse))
    texts = long_texts(store, even, config.context_length, config.seed)
    opened = Opened(folder, model_config, {}, kinds, tokenizer, frozenset(), None)
    try:
        model = load(opened, config.context_length, 0, world, config.memory_budget)
        for module in model.modules():
            if hasattr(module, "impl"):
                module.impl = config.kernels
        numbers = choose_numbers(model, even, texts, world)
    except torch.OutOfMemoryError as error:
        raise UserError(f"calibrating selected_blocks: {error}; give numbers by layer in place of auto") from None
    del model
    gc.collect()  # the plan counts on memory that is free
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, world.device)  # a run without a plan has no cap
    return spell_by_layer(world.broadcast(numbers))


def long_texts(store: Store, even: Sparse, context_length: int, seed: int) -> list[Piece]:
    """Returns the longest texts in which tokens choose, an even number of them; `seed` draws among equal lengths."""
    shuffled = Selection(store, np.random.default_rng(seed).permutation(len(store.lengths)))
    texts: list[Piece] = []
    for text in pieces_by_length(shuffled, context_length):
        is_enough = len(texts) >= 2 and sum(len(each.ids) for each in texts) >= TOKENS
        if is_enough or len(texts) == MOST_TEXTS or even.for_longest(len(text.ids)) != even:
            break
        if text.is_target[sees_all(even) :].any():
            texts.append(text)
    if len(texts) < 2:
        least = max(sees_all(even) + 2, even.dense_below)
        raise UserError(
            f"selected_blocks auto:{even.selected_blocks} is calibrated on two texts of {least:,} tokens or more, the "
            f"data have {len(texts)}; give longer --data, or numbers in place of auto"
        )
    return texts[: len(texts) // 2 * 2]


def choose_numbers(model: Transformer, even: Sparse, texts: list[Piece], world: World) -> list[int]:
    """Returns the number of each layer: calibrated where it attends by `even`, or the mean if that gains little."""
    began, mean, choices = time.monotonic(), even.selected_blocks, choices_of(even, len(texts[0].ids))
    first, halves = sees_all(replace(even, selected_blocks=choices[0])), (texts[::2], texts[1::2])
    layers = [layer for layer, block in enumerate(model.layers) if block.self_attn.kind == even]
    changes, numbers = changes_of(model, layers, even, choices, halves[0], first, world), [mean] * len(model.layers)
    for layer, number in zip(layers, allot(changes.tolist(), choices, mean)):
        numbers[layer] = number
    old, old_on_others = (mean_loss(model, half, first, world) for half in halves)
    set_kinds(model, [with_blocks(block.self_attn.kind, n) for block, n in zip(model.layers, numbers)])
    new, new_on_others = (mean_loss(model, half, first, world) for half in halves)
    is_better = old_on_others - new_on_others >= LEAST_GAIN
    logger.info(
        "selected_blocks %s: loss %.4f on %d other texts, %+.4f against %d in every layer (%+.4f on the texts that "
        "calibrated); took %.0f s%s", spell_by_layer(numbers), new_on_others, len(halves[1]),
        new_on_others - old_on_others, mean, new - old, time.monotonic() - began,
        "" if is_better else f"; gains less than {LEAST_GAIN}, so {mean} in every layer",
    )  # fmt: skip
    return numbers if is_better else [mean] * len(numbers)


@torch.no_grad()
def changes_of(
    model: Transformer, layers: list[int], even: Sparse, choices: list[int], texts: list[Piece], first: int,
    world: World,
) -> np.ndarray:  # fmt: skip
    """Returns changes of the summed loss where one layer alone has another number: float64 [layers, choices]."""
    own, others = texts[world.rank :: world.size], [(i, n) for i, n in enumerate(choices) if n != even.selected_blocks]
    changes = np.zeros((len(model.layers), len(choices)))
    num_blocks = len(others) * sum(len(model.layers) - layer for layer in layers)
    logger.info(
        "selected_blocks: calibrating on %d texts of up to %s tokens, each read %d times", len(texts),
        f"{len(texts[0].ids):,}", 1 + num_blocks // len(model.layers),
    )  # fmt: skip
    hidden = None if world.is_main else True  # None: where there is no terminal
    with tqdm(total=len(own) * num_blocks, desc="calibrating", unit="block", disable=hidden) as bar:
        for text in own:
            context, x_BTD = begin(model, text)
            loss = summed_loss(model, text, first, context, x_BTD)
            for layer, block in enumerate(model.layers):
                for i, number in others if layer in layers else ():
                    block.self_attn.kind = replace(even, selected_blocks=number)
                    changes[layer, i] += summed_loss(model, text, first, context, x_BTD, layer) - loss
                    block.self_attn.kind = even
                    bar.update(len(model.layers) - layer)
                x_BTD = block(x_BTD, context)
    return np.reshape(world.sum(*changes.flat), changes.shape)[layers]


def begin(model: Transformer, text: Piece) -> tuple[Context, Tensor]:
    """Returns what all blocks know of a text, and the first block's input."""
    ids_BT = torch.from_numpy(text.ids)[None].to(model.embed_tokens.weight.device)
    return model.context(ids_BT), model.embed(ids_BT)


def summed_loss(model: Transformer, text: Piece, first: int, context: Context, x_BTD: Tensor, layer: int = 0) -> float:
    """Returns the summed loss of a text's targets behind position `first`; x_BTD is the input of block `layer`."""
    for block in model.layers[layer:]:
        x_BTD = block(x_BTD, context)
    targets = torch.from_numpy(np.where(text.is_masked, IGNORE_INDEX, text.ids))[None, first + 1 :]
    return float(token_losses(model, model.head_input(x_BTD[:, first:-1]), targets).sum(dtype=torch.float64))


@torch.no_grad()
def mean_loss(model: Transformer, texts: list[Piece], first: int, world: World) -> float:
    """Returns the loss per target behind position `first`, over all ranks, which share the texts."""
    own = texts[world.rank :: world.size]
    total = sum(summed_loss(model, text, first, *begin(model, text)) for text in own)
    total, count = world.sum(total, sum(int(text.is_target[first:].sum()) for text in own))
    return total / count
