"""Calibrated numbers of blocks: a layer that needs its blocks gets them, on any number of ranks; runs that ask."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention.full import FULL
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from model import ModelConfig, Transformer
from tests.ranks import run_ranks
from training import calibration
from training.calibration import begin, choose_numbers, long_texts, mean_loss, summed_loss
from training.data.sources import Document
from training.data.tokens import TokenStore
from training.evaluation.positions import Piece, losses_of
from training.host.errors import UserError
from training.memory.placement import set_kinds
from training.parallel.world import World

WORLD = World(0, 1, torch.device("cpu"))
EVEN = Sparse(4, block_size=32, window=32, dense_below=64)
# Bytes as one-hot hidden states; value heads copy them.
SHAPE = ModelConfig(
    vocab_size=256, hidden_size=256, intermediate_size=32, num_hidden_layers=3, num_attention_heads=1,
    num_key_value_heads=1, head_dim=256, qk_norm=None,
)  # fmt: skip


def model_that_counts(far: dict[int, float], shape: ModelConfig = SHAPE) -> Transformer:
    """A model whose layers do nothing, but for `far`: these add up all tokens that they attend to, by these weights.

    The more blocks such a layer sees, the better it knows how frequent each byte is in the text.
    """
    model = Transformer(shape)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.eye(256))
        for layer, block in enumerate(model.layers):
            block.mlp.down_proj.weight.zero_()
            block.self_attn.q_proj.weight.zero_()
            block.self_attn.v_proj.weight.copy_(torch.eye(256))
            block.self_attn.o_proj.weight.copy_(torch.eye(256) * far.get(layer, 0.0))
    return model.requires_grad_(False)


def texts_of(count: int, longest: int, seed: int = 0, masked: bool = False) -> list[Piece]:
    """Texts of unlike lengths, each of random bytes among 40 of its own."""
    draws, texts = np.random.default_rng(seed), []
    for i in range(count):
        length = longest - 37 * i
        ids = draws.choice(draws.permutation(256)[:40], length).astype(np.int64)
        texts.append(Piece(ids, draws.random(length) < (0.5 if masked and i % 2 else 0.0)))
    return texts


def sparse_model(far, shape=SHAPE, even=EVEN):
    model = model_that_counts(far, shape)
    set_kinds(model, [even if kind == FULL else kind for kind in shape.kinds])
    return model


@pytest.mark.parametrize("far", [{0: 8.0}, {2: 8.0}, {1: 6.0, 2: 6.0}, {}])
def test_layers_that_reach_far_get_the_blocks(far, caplog):
    """The last tokens choose from 12 blocks; few of them lose by seeing 8 of these alone."""
    caplog.set_level(logging.INFO)
    found = choose_numbers(sparse_model(far), EVEN, texts_of(4, 420, masked=True), WORLD)
    if far:
        assert sum(found) == 12 and sum(found[layer] for layer in far) >= 8 and min(found[layer] for layer in far) >= 4
    else:
        assert found == [4, 4, 4]
    assert ("gains less than 0.001, so 4 in every layer" in caplog.text) == (not far)
    assert "calibrating on 2 texts of up to 420 tokens, each read 7 times" in caplog.text


def test_windows_keep_their_kind_and_take_no_part_in_the_mean():
    window = Window(64)
    model = sparse_model({0: 3.0, 2: 8.0}, replace(SHAPE, layer_kinds=(window, FULL, FULL)))
    assert choose_numbers(model, EVEN, texts_of(4, 420), WORLD) == [4, 0, 8]
    assert model.layers[0].self_attn.kind == window


def test_losses_are_those_of_whole_forwards():
    """A walk from a layer on equals the model's own forward; targets before the position, and masked ones, are out."""
    model, text = sparse_model({1: 6.0}), texts_of(2, 420, masked=True)[1]
    own = losses_of(model, text.ids[None])[0]
    context, x_BTD = begin(model, text)
    expected = own[100:][text.is_target[100:]].sum(dtype=np.float64)
    assert 0 < text.is_target[100:].sum() < len(own) - 100
    for layer, block in enumerate(model.layers):
        assert summed_loss(model, text, 100, context, x_BTD, layer) == pytest.approx(expected, rel=1e-6)
        x_BTD = block(x_BTD, context)
    count = int(text.is_target[100:].sum())
    assert mean_loss(model, [text], 100, WORLD) == pytest.approx(expected / count, rel=1e-6)


def numbers_on(world: World) -> list[int]:
    """Three texts calibrate and three check: the ranks have unlike shares."""
    return choose_numbers(sparse_model({1: 8.0}), EVEN, texts_of(6, 420, seed=3), world)


def check_numbers(world: World, expected: list[int]) -> None:
    assert numbers_on(world) == expected


def test_two_ranks_find_the_numbers_of_one():
    numbers = numbers_on(WORLD)
    assert numbers[1] >= 8
    run_ranks(2, check_numbers, numbers)


# Texts


def store_of(lengths, masked=()) -> TokenStore:
    """Documents of one repeated byte each, and an end; documents in `masked` have no target in two thirds."""
    documents = []
    for i, length in enumerate(lengths):
        tokens, is_masked = np.full(length - 1, i + 1, np.uint8), np.zeros(length - 1, bool)
        is_masked[length // 3 :] = i in masked
        documents.append(Document(tokens, is_masked if masked else None))
    return TokenStore(documents, eos_id=0)


def test_the_longest_texts_that_choose(monkeypatch):
    """Tokens choose behind 192 tokens, with 4 blocks of 32 and a window of 32."""
    store = store_of([100, 400, 193, 250, 900, 260, 500], masked={6})
    lengths = lambda *flags: [len(text.ids) for text in long_texts(store, EVEN, *flags)]  # noqa: E731
    assert lengths(600, 0) == [600, 399, 299, 259] and lengths(2000, 1) == [899, 399, 259, 249]
    assert lengths(300, 0)[:3] == [300] * 3 and len(lengths(300, 0)) % 2 == 0
    monkeypatch.setattr(calibration, "TOKENS", 700)
    assert lengths(600, 0) == [600, 399]
    monkeypatch.setattr(calibration, "MOST_TEXTS", 2)
    assert lengths(300, 0) == [300, 300]
    equal = store_of([300] * 9)
    drawn = {tuple(text.ids[0] for text in long_texts(equal, EVEN, 300, seed)) for seed in range(5)}
    assert len(drawn) > 1 and all(len({*pair}) == 2 for pair in drawn)
    for kind in (replace(EVEN, selected_blocks=20), replace(EVEN, dense_below=500)):
        with pytest.raises(UserError, match=r"is calibrated on two texts of [0-9,]+ tokens or more, the data have 1;"):
            long_texts(store, kind, 1000, 0)
