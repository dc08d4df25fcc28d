"""--epochs: as many steps as complete them, from wherever the run is in its data."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

import train
from model import MODEL_SIZES
from tests.runs import losses, metrics, only_resume, saved_settings
from training.data.corpus import load_corpus
from training.data.loader import PackedLoader
from training.data.tokenizer import ByteTokenizer
from training.flags import LARGE
from training.host.errors import UserError
from training.parallel.world import World
from training.run.decide import recipe_of
from training.run.schedule import Progress, count_steps
from training.run.settings import TrainConfig

SETTINGS = {"context_length": 32, "batch_size": 2, "warmup_steps": 0}


@pytest.fixture
def texts(tmp_path):
    """Two files of 30 texts of unlike lengths each."""
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        file.write_text("\n".join(json.dumps({"text": "word " * (1 + i % 5)}) for i in range(30)))
    files[1].write_text(files[1].read_text().replace("word", "other"))
    return [str(file) for file in files]


def loader_of(texts, config, ranks=1, **settings):
    store, _, packing = load_corpus(
        texts,
        ByteTokenizer(),
        256,
        validation_fraction=0.1,
        context_length=config.context_length,
        seed=0,
        **settings,
    )
    return PackedLoader(store, packing, config.batch_size, 0, ranks)


def count(config, loader, given=(), cosine_steps=LARGE, **progress):
    start = Progress(config.max_steps or LARGE, cosine_steps, **progress)
    world = World(0, 1, torch.device("cpu"))
    recipe = recipe_of(config, MODEL_SIZES["tiny"], world, flag_names=frozenset(given))
    return count_steps(recipe.schedule, start, loader, recipe.batch.micro_batches, None)


def steps_of(config, loader, **progress):
    progress = count(config, loader, **progress)
    assert progress.cosine_steps == progress.max_steps
    return progress.max_steps


@pytest.mark.parametrize(
    "settings", [{"packing": "best_fit"}, {"packing": "concatenate"}, {"weights": "2,1"}]
)
@pytest.mark.parametrize("epochs", [1.0, 0.5, 2.25])
def test_steps_complete_the_epochs_on_any_ranks(texts, settings, epochs):
    """The last step completes them. A run that goes on with other sizes ends at the same place in
    the data."""
    for ranks, accumulation in ((1, 1), (2, 1), (1, 3), (4, 2)):
        config = TrainConfig(epochs=epochs, gradient_accumulation_steps=accumulation, **SETTINGS)
        loader = loader_of(texts, config, ranks, **settings)
        goal, per_step = epochs * loader.sequences_per_epoch, 2 * accumulation * ranks
        assert (steps := steps_of(config, loader)) * per_step >= goal > (steps - 1) * per_step
        loader.next_sequence = per_step  # after a step
        assert steps_of(config, loader, step=1) == steps
        other = loader_of(texts, replace(config, batch_size=1), **settings)
        other.next_sequence = per_step
        config = replace(config, batch_size=1, gradient_accumulation_steps=1)
        assert steps_of(config, other, step=1) == 1 + max(0, np.ceil(goal) - per_step)


def test_an_epoch_has_every_document(texts):
    config = TrainConfig(epochs=1.0, packing="best_fit", **SETTINGS)
    loader = loader_of(texts, config, packing="best_fit")
    steps = steps_of(config, loader)
    seen = {document for index in range(2 * steps) for document, _, _ in loader.spans(index)}
    assert seen == {*range(len(loader.store.lengths))}


def test_decimal_shares_of_an_epoch_are_exact(texts):
    """0.1 * 30 is 3.0000000000000004 as floats, which would be a fourth step."""
    config = TrainConfig(epochs=0.1, context_length=32, batch_size=1, warmup_steps=0)
    loader = loader_of(texts, config)
    loader.sequences_per_epoch = 30
    assert 0.1 * 3 > 0.3 and steps_of(config, loader) == 3


def test_runs_say_their_epochs_and_many_are_warned_of(texts, caplog):
    caplog.set_level(logging.INFO)
    config = TrainConfig(max_steps=300, **SETTINGS)
    loader = loader_of(texts, config)
    for sequences, line in (
        (30_000, "300 steps make 0.02 epochs"),
        (4000, "0.15 epochs"),
        (60, "10.00 epochs"),
    ):
        loader.sequences_per_epoch = sequences
        count(config, loader)
        assert line in caplog.text and "by heart" not in caplog.text
    loader.sequences_per_epoch = 2
    count(config, loader)
    assert "data: 300 steps make 300.00 epochs of 2 sequences" in caplog.text
    assert (
        "data: the model sees each text 300 times, and soon learns it by heart; give more --data"
        in caplog.text
    )


def test_a_run_that_ends_within_its_default_warm_up_is_warned_of(texts, caplog):
    for steps, warmup_steps, share in (
        (6, 20, "30%"),
        (19, 20, "95%"),
        (20, 20, None),
        (6, 0, None),
    ):
        caplog.clear()
        config = TrainConfig(**{**SETTINGS, "max_steps": steps, "warmup_steps": warmup_steps})
        count(config, loader_of(texts, config), cosine_steps=steps)
        assert ("of the peak" in caplog.text) == (share is not None)
        assert (
            share is None
            or f"{steps} steps end within a warm-up of 20, at {share} of the peak; give"
            in caplog.text
        )


def test_epochs_that_cannot_be(texts):
    config = TrainConfig(epochs=1e9, **SETTINGS)
    with pytest.raises(
        UserError, match=r"epochs 1e\+09 are [\d,]+ steps, more than 2,147,483,647; lower it"
    ):
        steps_of(config, loader_of(texts, config))
    config = TrainConfig(epochs=1.0, **{**SETTINGS, "warmup_steps": 100})
    with pytest.raises(
        UserError, match=r"warmup_steps 100 is longer than the run of \d+ steps, .* or raise epochs"
    ):
        count(config, loader_of(texts, config), ["warmup_steps", "epochs"])


def test_a_run_of_epochs_goes_on(texts, tmp_path, capsys, caplog):
    """A run that was stopped ends as the whole run does. More epochs stretch the cosine; --resume
    auto ends at once."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [
        "--data", *texts, "--context_length", "256", "--batch_size", "1", "--sample_tokens", "0",
        "--device", "cpu",
    ]  # fmt: skip
    flags += [
        "--warmup_steps", "1", "--validation_sequences", "1", "--checkpoint_interval", "1",
        "--keep_checkpoints", "9",
        "--epochs", "0.5",
    ]  # fmt: skip
    assert train.main([*flags, "--output_dir", str(whole)]) == 0
    steps = len(losses(whole))
    assert steps > 1 and metrics(whole)[-1]["epoch"] >= 0.5 > metrics(whole)[-2]["epoch"]
    assert train.main([*flags, "--output_dir", str(parts)]) == 0
    for step in range(2, steps + 1):
        (parts / f"step_{step:08d}").rename(tmp_path / f"lost_{step}")
    assert train.main(only_resume(parts)) == 0
    assert losses(parts) == losses(whole) and saved_settings(parts, steps)["epochs"] == 0.5
    caplog.set_level(logging.INFO)
    assert train.main([*flags, "--output_dir", str(parts), "--resume", "auto"]) == 0
    assert "nothing is left to do" in caplog.text
    assert train.main(only_resume(parts, "--epochs", "0.5")) == 1
    assert f"is at step {steps}, epochs is 0.5; raise epochs to go on" in capsys.readouterr().err
    assert train.main(only_resume(parts, "--epochs", "0.25")) == 1
    assert "epochs are behind it, epochs is 0.25; raise epochs to go on" in capsys.readouterr().err
    assert train.main(only_resume(parts, "--max_steps", f"{steps + 1}")) == 0
    assert saved_settings(parts, steps + 1)["epochs"] is None
    assert (
        train.main(only_resume(parts, "--epochs", "1", "--gradient_accumulation_steps", "2")) == 0
    )
    assert metrics(parts)[-1]["epoch"] >= 1 > metrics(parts)[-2]["epoch"]
