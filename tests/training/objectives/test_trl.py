"""Losses and gradients of every parameter against values that TRL 1.16.0 computed, see
record_trl.py."""

import json
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from model import Transformer
from tests.training.objectives.trl_cases import (
    CONFIG,
    KTOS,
    LABELS,
    OBJECTIVES,
    PAIRS,
    RECORDED,
    Row,
    rows,
    set_weights,
)
from training.data.loader import make_batch
from training.data.sources import Document
from training.data.tokens import TokenStore
from training.objectives.scored import Objective
from training.objectives.sharing import beside_answer_of
from training.parallel.world import World
from training.run.train_step import beside_step, count_losses, run_model

FOUND = json.loads(RECORDED.read_text())


def documents_of(given: list[Row], together: int) -> list[Document]:
    """Documents of so many answers each, every answer behind its own prompt."""
    documents = []
    for first in range(0, len(given), together):
        own = given[first : first + together]
        tokens = np.concatenate(
            [part for row in own for part in (row.prompt, row.completion)]
        ).astype(np.uint32)
        masked = np.concatenate(
            [part for row in own for part in (np.ones(len(row.prompt), bool), ~row.mask)]
        )
        columns = {
            name: np.concatenate(
                [part for row in own for part in (0 * row.prompt, getattr(row, name))]
            )
            for name in ("reference", "old", "written")
        }
        lengths = [len(row.prompt) + len(row.completion) for row in own]
        columns["answer"] = np.repeat(np.arange(len(own)), lengths)
        columns["advantage"] = np.repeat([row.advantage for row in own], lengths)
        documents.append(
            Document(
                tokens, masked, True, columns={n: x.astype(np.float32) for n, x in columns.items()}
            )
        )
    return documents


def loss_of(
    model: Transformer, objective: Objective, documents: Iterable[Document]
) -> torch.Tensor:
    world, store = World(0, 1, torch.device("cpu")), TokenStore(documents, 0)
    set_weights(dict(model.named_parameters()))
    batches = [make_batch(store, [[(i, 0, int(n)) for i, n in enumerate(store.lengths)]], 80)]
    objective = beside_step(model, batches, world, objective)
    return run_model(model, batches[0], world, count_losses(batches, world, objective), objective)


def assert_as_trl(name: str, documents: Iterable[Document]) -> None:
    model = Transformer(CONFIG)
    loss = loss_of(model, OBJECTIVES[name], documents)
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
    """One token of a rollout is a tool's; TRL's pairs and labelled answers have none."""
    is_rollout = name not in {**PAIRS, **KTOS}
    given = rows(name)
    if not is_rollout:
        given = [row._replace(mask=np.ones_like(row.mask)) for row in given]
    if name == "dpo, smoothed":  # TRL smooths labels where there is no reference
        given = [row._replace(reference=np.zeros_like(row.reference)) for row in given]
    documents = documents_of(given, 2 if name in PAIRS else 1)
    for document, label in zip(documents, LABELS):
        document.columns["label"] = np.full(len(document.tokens), label, np.float32)
        if name != "dapo":  # the others are rollouts of one engine
            del document.columns["written"]
    if name in KTOS:
        # TRL takes the answer of the row before, where it is to the same prompt too.
        documents = [
            beside_answer_of(row, before)
            for row, before in zip(documents[1:] + documents[:1], documents)
        ]
        _give_references(documents, given)
    assert_as_trl(name, documents)


def test_orpo_of_unlike_rows_differs_from_trl_in_the_likelihood_alone():
    """TRL's mean is over tokens, prompts' too. Ours is over the answer's tokens, given its prompt,
    as in the paper."""
    given = [row._replace(mask=np.ones_like(row.mask)) for row in rows()]
    loss = loss_of(Transformer(CONFIG), OBJECTIVES["orpo"], documents_of(given, 2))
    model, nll = Transformer(CONFIG), []
    set_weights(dict(model.named_parameters()))
    for row in given[::2]:
        ids = torch.from_numpy(np.concatenate([row.prompt, row.completion]))
        logits = model(ids[None], return_logits=True).logits[0, len(row.prompt) - 1 : -1]
        nll.append(torch.nn.functional.cross_entropy(logits, ids[len(row.prompt) :]))
    theirs, ours = FOUND["orpo of unlike rows"], torch.stack(nll).mean().item()
    assert abs(theirs["nll"] - ours) > 0.005
    assert loss.item() - ours == pytest.approx(theirs["loss"] - theirs["nll"], abs=1e-5)


def _give_references(documents: list[Document], given: list[Row]) -> None:
    """Gives each answer in a document of two the numbers of its own row."""
    for number, document in enumerate(documents):
        row, other = given[(number + 1) % len(given)], given[number]
        document.columns["reference"][~document.masked] = np.concatenate(
            [row.reference, other.reference]
        )
