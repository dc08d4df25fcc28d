"""Losses by position and on key tokens equal full forwards and numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import MODEL_SIZES, Transformer
from training.data.sources import Document
from training.data.tokens import TokenStore
from training.evaluation.positions import (
    Piece,
    by_position,
    format_key_tokens,
    format_positions,
    key_token_losses,
    longest_pieces,
    losses_of,
    short_losses_of,
    windows,
)
from training.generate import inference


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=1, initializer_range=0.2))


def pieces_for(losses):
    """A piece for each array of losses, with one more token; all tokens are targets."""
    return [Piece(np.zeros(len(x) + 1, np.int64), np.zeros(len(x) + 1, bool)) for x in losses]


def by_full_logits(model, ids):
    logits = model(torch.tensor(ids)[None], return_logits=True).logits[0, :-1].double()
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").detach().numpy()


def test_losses_are_those_of_full_logits(model, monkeypatch):
    ids = np.random.default_rng(0).integers(0, 256, (2, 50))
    expected = [by_full_logits(model, row) for row in ids]
    np.testing.assert_allclose(losses_of(model, ids), expected, rtol=1e-5)
    monkeypatch.setattr(
        inference, "LOSS_BYTES", 12 * 256 * 7
    )  # the logits of seven tokens at a time
    np.testing.assert_allclose(losses_of(model, ids), expected, rtol=1e-5)


@pytest.mark.parametrize(("length", "short"), [(20, 8), (21, 8), (9, 8), (30, 3)])
def test_windows_take_each_position_once(length, short):
    places = [*windows(length, short)]
    stops = [first for _, first in places[1:]] + [length]
    assert places[0][1] == short
    for (start, first), stop in zip(places, stops):
        assert start >= 0 and start + short == stop and first - start >= short - max(1, short // 4)


def test_short_losses_are_those_of_a_forward_of_each_window(model):
    ids = np.random.default_rng(0).integers(0, 256, 45).astype(np.uint8)
    found = short_losses_of(model, ids, 16)
    assert len(found) == 45 - 16
    for position, loss in enumerate(found, start=16):
        [start] = [s for s, first in windows(45, 16) if first <= position < s + 16]
        assert 12 <= position - start < 16
        expected = by_full_logits(model, ids[start : start + 16].astype(np.int64))[
            position - start - 1
        ]
        assert loss == pytest.approx(expected, rel=1e-5)
    assert len(short_losses_of(model, ids[:16], 16)) == 0


def test_buckets_are_powers_of_two():
    losses = [
        np.arange(1, 200, dtype=np.float32),
        np.arange(1, 70, dtype=np.float32),
    ]  # the loss is the position
    buckets = by_position(pieces_for(losses), losses)
    borders = [(0, 15, 30), (16, 31, 32), (32, 63, 64), (64, 127, 64 + 6), (128, 255, 72)]
    assert [(b.first, b.last, b.tokens) for b in buckets] == borders
    middle = (sum(range(64, 128)) + sum(range(64, 70))) / 70
    assert [b.loss for b in buckets] == [8, 23.5, 47.5, middle, np.arange(128, 200).mean()]
    table = format_positions(buckets, [("before", {64: 9.5})])
    assert (
        "128 to 255" in table
        and "163.5000" in table
        and "9.5000" in table
        and table.count(" -") == 4
    )


def test_key_tokens_by_hand():
    """Only the third token past the short context of 4 is better by more than 2 nats and below 2
    nats."""
    long = [np.array([9, 9, 9, 1.0, 0.5, 0.5, 3.0], np.float32), np.array([7.0], np.float32)]
    short = [np.array([1.0, 2.0, 4.0, 9.0], np.float32), np.zeros(0, np.float32)]
    judged = [np.array([9, 9, 9, 4.0, 4.0, 2.0, 4.0], np.float32), long[1]]
    pieces = pieces_for(long)
    found = key_token_losses(pieces, judged, long, short, 4, 2.0, 2.0)
    assert (found.tokens, found.key_tokens, found.long, found.short) == (4, 1, 2.0, 4.0)
    assert found.long_ppl == pytest.approx(math.e**2) and (
        found.long_of_all,
        found.short_of_all,
    ) == (3.5, 4.0)
    assert "1 of 4 tokens past 4" in format_key_tokens(found, 2.0, 2.0)
    none = key_token_losses(pieces, judged, long, short, 4, 5.0, 2.0)
    assert none.key_tokens == 0 and none.long is none.long_ppl is None
    assert key_token_losses(pieces[1:], [long[1]], [long[1]], [short[1]], 4, 2.0, 2.0) is None


def test_the_longest_pieces():
    """Documents of 5, 12, 1 and 7 tokens and their ends; of equal pieces the starts of documents
    come first."""
    documents = [Document(100 * i + np.arange(tokens)) for i, tokens in enumerate((5, 12, 1, 7))]
    store = TokenStore(documents, eos_id=0)
    places = [(piece.ids[0], len(piece.ids)) for piece in longest_pieces(store, 5, 10)]
    assert places == [(0, 5), (100, 5), (300, 5), (105, 5), (305, 2), (110, 2)]
    assert [len(piece.ids) for piece in longest_pieces(store, 100, 2)] == [12, 7]
    assert longest_pieces(TokenStore(documents[2:3], eos_id=0), 5, 10) == []


def test_prompts_do_not_count():
    """A prompt of 60 tokens and a completion of 20. Cut every 40 tokens, the first piece has no
    target."""
    ids = np.arange(80)
    store = TokenStore([Document(ids, ids < 60)], eos_id=0)
    assert [piece.ids[0] for piece in longest_pieces(store, 40, 10)] == [40]
    pieces = longest_pieces(store, 100, 10)
    losses = [np.arange(1, 80, dtype=np.float32)]  # the loss is the position
    buckets = [(bucket.first, bucket.tokens, bucket.loss) for bucket in by_position(pieces, losses)]
    assert buckets == [(32, 4, 61.5), (64, 16, 71.5)]
    found = key_token_losses(pieces, losses, losses, [losses[0][49:] + 3], 50, 2.0, 70.0)
    assert (found.tokens, found.long_of_all, found.key_tokens, found.long) == (20, 69.5, 10, 64.5)
