"""Losses and gradients of every parameter against values that TRL 1.16.0 computed, see record_trl.py."""

import json

import numpy as np
import pytest
import torch

from model import Transformer
from tests.training.objectives.trl_cases import CONFIG, OBJECTIVES, PAIRS, RECORDED, Row, rows, set_weights
from training.data.loader import make_batch
from training.data.sources import Document
from training.data.tokens import TokenStore
from training.parallel.world import World
from training.run.step import count_losses, run_model

FOUND = json.loads(RECORDED.read_text())


def store_of(given: list[Row], together: int) -> TokenStore:
    """Documents of so many answers each, every answer behind its own prompt."""
    documents = []
    for first in range(0, len(given), together):
        own = given[first : first + together]
        tokens = np.concatenate([part for row in own for part in (row.prompt, row.completion)]).astype(np.uint32)
        masked = np.concatenate([part for row in own for part in (np.ones(len(row.prompt), bool), ~row.mask)])
        columns = {
            name: np.concatenate([part for row in own for part in (0 * row.prompt, getattr(row, name))])
            for name in ("reference", "old", "written")
        }
        lengths = [len(row.prompt) + len(row.completion) for row in own]
        columns["answer"] = np.repeat(np.arange(len(own)), lengths)
        columns["advantage"] = np.repeat([row.advantage for row in own], lengths)
        documents.append(Document(tokens, masked, True, columns={n: x.astype(np.float32) for n, x in columns.items()}))
    return TokenStore(documents, 0)


def assert_as_trl(name: str, store: TokenStore) -> None:
    model, objective, world = Transformer(CONFIG), OBJECTIVES[name], World(0, 1, torch.device("cpu"))
    set_weights(dict(model.named_parameters()))
    batches = [make_batch(store, [[(i, 0, int(n)) for i, n in enumerate(store.lengths)]], 80)]
    loss = run_model(model, batches[0], world, count_losses(batches, world, objective), objective)
    loss.backward()
    assert loss.item() == pytest.approx(FOUND[name]["loss"], abs=1e-5)
    scale = max(abs(x) for values in FOUND[name]["gradients"].values() for x in values)
    for parameter, theirs in FOUND[name]["gradients"].items():
        ours = model.get_parameter(parameter).grad
        assert ours is not None
        difference = (ours.flatten() - torch.tensor(theirs)).abs().max()
        assert difference <= 1e-5 * max(1, scale), (parameter, float(difference), scale)
    assert scale > 1e-3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_every_gradient_are_trls(name):
    """One token of a rollout is a tool's; TRL's pairs have none."""
    is_pair = name in PAIRS
    given = [row._replace(mask=np.ones_like(row.mask)) if is_pair else row for row in rows()]
    columns = {"dapo": ()}.get(name, ("written",))  # rollouts of one engine alone
    store = store_of(given, 2 if is_pair else 1)
    for column in columns:
        store.drop_column(column)
    assert_as_trl(name, store)
