"""Runs of train.py from their start to their end."""

import json
import logging
import math
import re
import shutil
import sys
import time
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

import train
from model import MODEL_SIZES
from tests.browser import read_page
from tests.ranks import announce, meeting_point
from tests.runs import (
    ROOT,
    arguments,
    edit_trainer_json,
    interrupt,
    losses,
    metrics,
    only_resume,
    parse,
    weights,
    weights_of_another_shape,
)
from training.generate.inference import open_tokenizer
from training.host.errors import UserError
from training.memory.cost_model import forward_flops
from training.memory.decide import decide_memory_budget
from training.memory.execution import WHOLE, Placement
from training.memory.plan import Plan
from training.optim.adamw import MasterAdamW
from training.run.build import step_of
from training.run.settings import TrainConfig, check_config, given_settings


def test_trains_validates_saves_and_samples(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, "--sample_tokens", "5", steps=30)) == 0
    values = metrics(run)
    assert [v["step"] for v in values] == list(range(1, 31))
    assert (
        abs(values[0]["loss"] - math.log(256)) < 0.3 and values[-1]["loss"] < values[0]["loss"] - 1
    )
    assert values[-1]["validation_loss"] < values[0]["loss"] - 1
    assert values[-1]["tokens"] == 30 * 2 * 64 and values[0]["tokens_per_second"] > 0
    assert "sample, after a held-out prompt" in caplog.text
    assert json.loads((run / "config.json").read_text())["max_steps"] == 30
    assert (run / "metrics.png").is_file()
    page = read_page(run / "report.html")
    assert page.texts["p"][0] == "step 30 of 30, 100%: complete." and page.texts["mark"][1]
    assert {"loss, nats per byte", "learning rate"} <= {*page.texts["figcaption"]}


def test_only_what_the_user_can_mend_is_shown_without_a_traceback(
    corpus, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(train, "train_step", fail)
    with pytest.raises(ValueError, match="a defect"):
        train.main(arguments(corpus, tmp_path / "run"))
    capsys.readouterr()
    assert train.main(arguments(corpus, tmp_path / "other", "--attention_backend", "none")) == 1
    assert capsys.readouterr().err.startswith("error: attention backend must be one of")


def test_an_error_has_a_line_of_its_own_below_the_progress_bar(
    corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    steps, step = iter(range(2)), train.train_step
    error = UserError("no more")

    def fail_later(*arguments, **options):
        if next(steps, None) is None:
            raise error
        return step(*arguments, **options)

    monkeypatch.setattr(train, "train_step", fail_later)
    assert train.main(arguments(corpus, tmp_path / "run")) == 1
    shown = capsys.readouterr().err
    assert "2/4" in shown and shown.endswith("\nerror: no more\n")


def test_a_run_is_the_same_wherever_weights_live(corpus, tmp_path, monkeypatch, caplog):
    """Losses, validations, sample and checkpoints; each kind of run goes on from the other's
    checkpoint."""
    caplog.set_level(logging.INFO)
    flags = (
        "--optimizer_state",
        "compact",
        "--checkpoint_interval",
        "2",
        "--validation_interval",
        "2",
    )
    flags += (
        "--gradient_accumulation_steps",
        "2",
        "--validation_sequences",
        "2",
        "--sample_tokens",
        "8",
    )

    def run(folder, weights, *more):
        def plan_memory(recipe, model, world, documents=None):
            step = step_of(recipe, model, world, documents)
            placements = (
                Placement(weights=weights),
                Placement("recompute", weights=weights),
                WHOLE,
                Placement(weights=weights),
            )
            execution = step.unplanned(Placement(), loss_impl="chunked", ends=weights)
            return Plan(step, replace(execution, placements=placements))

        caplog.clear()
        monkeypatch.setattr("training.run.build.plan_memory", plan_memory)
        assert train.main(arguments(corpus, folder, *flags, *more, steps=4)) == 0
        found = [
            (line["loss"], line["gradient_norm"], line.get("validation_loss"))
            for line in metrics(folder)
        ]
        return found, re.search("(?s)sample, .*", caplog.text)[0].splitlines()[:2]

    folders = {weights: tmp_path / weights for weights in ("gpu", "host")}
    expected = run(folders["gpu"], "gpu")
    assert run(folders["host"], "host") == expected
    files = [
        load_file(folder / "step_00000004" / "model.safetensors") for folder in folders.values()
    ]
    assert all(torch.equal(files[0][name], tensor) for name, tensor in files[1].items())
    for place, folder in folders.items():
        shutil.rmtree(folder / "step_00000004")
        assert run(folder, {"gpu": "host", "host": "gpu"}[place], "--resume") == expected
        assert all(
            torch.equal(files[0][name], tensor)
            for name, tensor in load_file(folder / "step_00000004" / "model.safetensors").items()
        )


def test_accumulation_equals_one_batch(corpus, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    assert train.main(arguments(corpus, one, "--batch_size", "8")) == 0
    assert (
        train.main(
            arguments(corpus, many, "--batch_size", "2", "--gradient_accumulation_steps", "4")
        )
        == 0
    )
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize(
    "option", ["--gradient_checkpointing", "--compile", "--kernels=torch", "--loss_impl=chunked"]
)
def test_options_do_not_change_the_losses(option, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_SIZES, "tiny", replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    # The whole of torch.compile but its last stage, which takes a C++ compiler 40 s.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert train.main(arguments(corpus, tmp_path / "plain", steps=2)) == 0
    assert train.main(arguments(corpus, tmp_path / "option", option, steps=2)) == 0
    assert losses(tmp_path / "option") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_init_from_a_checkpoint(corpus, tmp_path):
    assert train.main(arguments(corpus, tmp_path / "first", "--save", "model", steps=10)) == 0
    start = str(tmp_path / "first" / "step_00000010")
    assert train.main(arguments(corpus, tmp_path / "second", "--init_from", start, steps=1)) == 0
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0] - 0.3
    assert (
        train.main(arguments(corpus, tmp_path / "first", "--resume", steps=20)) == 1
    )  # no optimizer state in it


def test_config_json_declares_the_trained_length(corpus, tmp_path):
    assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 0
    config = json.loads((tmp_path / "run" / "step_00000001" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64


def test_nsa_from_dense_weights_on(corpus, tmp_path, caplog, capsys):
    """A dense folder gets fresh gates; only nsa takes a folder with gates. Runs resume, and end
    with a sample."""
    caplog.set_level(logging.INFO)
    dense, nsa, on = (tmp_path / name for name in ("dense", "nsa", "on"))
    assert train.main(arguments(corpus, dense, steps=1)) == 0
    start = str(dense / "step_00000001")
    command = [
        "--init_from",
        start,
        "--attention_type",
        "nsa",
        "--selected_blocks",
        "4",
        "--weight_decay",
        "0",
    ]
    assert train.main([*arguments(corpus, nsa, steps=1), *command, "--sample_tokens", "2"]) == 0
    assert f"attention: {start} has no gates of nsa; they are initialised" in caplog.text
    assert "sample, after a held-out prompt" in caplog.text
    trained = weights(nsa, 1)
    gates = [
        trained[f"model.layers.{i}.self_attn.g_proj.{part}"]
        for i in range(4)
        for part in ("weight", "bias")
    ]
    assert [list(g.shape) for g in gates] == [[12, 128], [12]] * 4 and all(g.any() for g in gates)
    assert gates[0].std() == pytest.approx(0.02, rel=0.2)
    declared = json.loads((nsa / "step_00000001" / "config.json").read_text())
    assert declared["model_type"] == "qwen3_nsa"
    assert train.main(only_resume(nsa, "--max_steps", "2")) == 0
    caplog.clear()
    start = str(nsa / "step_00000002")
    assert (
        train.main(arguments(corpus, on, "--init_from", start, "--attention_type", "nsa", steps=1))
        == 0
    )
    assert "initialised" not in caplog.text
    capsys.readouterr()
    assert train.main(arguments(corpus, tmp_path / "other", "--init_from", start)) == 1
    assert "attention_type full would drop; give --attention_type nsa" in capsys.readouterr().err
    assert train.main(only_resume(dense, "--max_steps", "2", "--attention_type", "nsa")) == 1
    assert "start from its weights with --init_from" in capsys.readouterr().err


def test_checkpoints_trained_on_bytes_need_no_tokenizer(released, corpus, tmp_path, capsys):
    first = arguments(
        corpus, tmp_path / "first", "--init_from", str(released), "--tokenizer", "bytes", steps=1
    )
    assert train.main(first) == 0
    start = tmp_path / "first" / "step_00000001"
    second = arguments(
        corpus, tmp_path / "second", "--init_from", str(start), "--save", "none", steps=1
    )
    assert train.main(second) == 0
    assert open_tokenizer(None, start, 300).name == "bytes"  # to generate and to evaluate
    edit_trainer_json(start, lambda state: state.update(tokenizer="another"))
    capsys.readouterr()
    assert train.main([*second, "--output_dir", str(tmp_path / "third")]) == 1
    assert "--tokenizer bytes" in capsys.readouterr().err


def train_on_a_machine(rank, port, argv):
    announce(rank, 2, port, per_machine=1)
    assert train.main(argv) == 0


def test_two_machines_equal_one_process(corpus, tmp_path):
    """Two machines of one process each train and save; one process goes on, and equals a process
    that did it all.

    test_train_stops.py has train.py under torchrun, test_world.py the torchruns of two machines.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main(arguments(corpus, one, "--gradient_accumulation_steps", "2")) == 0
    words = arguments(
        corpus,
        two,
        "--gradient_checkpointing",
        "--sample_tokens",
        "3",
        "--checkpoint_interval",
        "2",
    )
    store = meeting_point()
    mp.start_processes(train_on_a_machine, (store.port, words), 2, start_method="forkserver")
    equals_one(two, one)
    interrupt(two, 2, tmp_path / "lost")
    assert train.main(arguments(corpus, two, "--gradient_accumulation_steps", "2", "--resume")) == 0
    equals_one(two, one)


def equals_one(two, one):
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert metrics(two)[-1]["validation_loss"] == pytest.approx(
        metrics(one)[-1]["validation_loss"], rel=1e-5
    )
    found, expected = weights(two, 4), weights(one, 4)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensor, found[name], rtol=1e-3, atol=1e-4)


def test_flags_override_the_file_which_overrides_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'context_length = 1024\nlearning_rate = 1\ndata = ["a", "b"]\ngradient_checkpointing = '
        "true\n"
    )
    config = parse(["--config", str(path), "--context_length=2048", "--no-gradient_checkpointing"])
    assert (config.context_length, config.learning_rate, config.data) == (2048, 1.0, ["a", "b"])
    assert not config.gradient_checkpointing and config.batch_size == TrainConfig().batch_size


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert exit.value.code == 0 and all(f"--{f.name}" in out for f in fields(TrainConfig))


def test_every_recipe_is_valid():
    recipes = sorted((ROOT / "configs").glob("*.toml"))
    assert {"tiny", "4b_32k", "4b_131k"} <= {p.stem for p in recipes}
    for recipe in recipes:
        given = given_settings(["--config", str(recipe)])
        check_config(TrainConfig(**given), given)


def test_the_default_batch_is_one_sequence_where_sequences_are_long():
    assert [
        parse(["--context_length", str(n)]).batch_size for n in (512, 16_383, 16_384, 131_072)
    ] == [8, 8, 1, 1]
    assert parse(["--context_length", "131072", "--batch_size", "8"]).batch_size == 8


@pytest.mark.parametrize(
    ("length", "given", "expected"),
    [(512, None, 128), (131_072, None, 8), (2**21, None, 1), (2**21, 0, 0), (2**17, 9, 9)],
)
def test_a_validation_counts_tokens_unless_told_otherwise(length, given, expected):
    assert (
        TrainConfig(context_length=length, validation_sequences=given).validation_sequences
        == expected
    )


def test_a_validation_says_its_share_of_the_time(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    flags = "--validation_interval", "1", "--sample_tokens", "0"
    assert train.main(arguments(corpus, tmp_path / "run", *flags)) == 0
    lines = metrics(tmp_path / "run")
    assert all(0 < line["validation_share"] < 1 for line in lines)
    assert (
        0
        < sum(line["validation_seconds"] for line in lines)
        < sum(line["seconds"] for line in lines) + 60
    )
    shown = re.findall(r"nats per byte; validations take (\d+)% of the time", caplog.text)
    assert [int(percent) for percent in shown] == [
        round(100 * line["validation_share"]) for line in lines
    ]


def test_mfu_counts_neither_padding_nor_the_head_of_masked_tokens(tmp_path, monkeypatch):
    """Each sample fills 31 of a sequence's 64 tokens, 20 of them a prompt's; two are in a sequence,
    two in a batch."""
    line = json.dumps({"prompt": "q" * 20, "completion": "a" * 10}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 40)
    counted = []
    summed_metrics = train.summed_metrics
    monkeypatch.setattr(
        train,
        "summed_metrics",
        lambda amounts, *rest: counted.append(amounts[0]) or summed_metrics(amounts, *rest),
    )
    flags = arguments(
        str(tmp_path / "a.jsonl"), tmp_path / "run", "--validation_sequences", "0", steps=1
    )
    assert train.main(flags) == 0
    assert counted == [forward_flops(MODEL_SIZES["tiny"], [31] * 4, num_targets=4 * 11)]
    [values] = metrics(tmp_path / "run")
    assert (values["text_tokens"], values["tokens"]) == (4 * 31, 2 * 64)
    assert values["text_tokens_per_second"] / values["tokens_per_second"] == pytest.approx(
        4 * 31 / (2 * 64)
    )


def test_a_steps_seconds_hold_one_update(corpus, tmp_path, monkeypatch):
    """It is queued between two readings of the clock. Where it goes on afterwards, the next step
    waits for it."""
    events, step, clock = [], MasterAdamW.step, time.perf_counter
    monkeypatch.setattr(MasterAdamW, "step", lambda *a: events.append("update") or step(*a))
    monkeypatch.setattr(train.time, "perf_counter", lambda: events.append("clock") or clock())
    assert train.main(arguments(corpus, tmp_path / "run", "--save", "none", steps=2)) == 0
    assert events == ["clock", "update", "clock"] * 2


def test_a_cpu_has_no_plan(corpus, tmp_path):
    assert decide_memory_budget(TrainConfig(), torch.device("cpu")) is None
    assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["memory_budget"] is None


def test_out_of_memory_is_explained_before_the_one_line(corpus, tmp_path, monkeypatch, capsys):
    def train_step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore than anybody reads.")

    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(
        train, "explain_out_of_memory", lambda recipe, plan, device: f"{plan.step.tokens} tokens"
    )
    assert train.main(arguments(corpus, tmp_path / "run")) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == ["128 tokens", "error: CUDA out of memory."]


def test_defaults_for_generation_go_along_with_weights_trained_on_bytes(corpus, tmp_path):
    """They have ids of the weights' tokenizer: a run that takes words' weights to bytes leaves them
    out."""
    folder = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1)
    defaults, ids = (
        b'{"eos_token_id": [7, 5], "top_p": 0.9}',
        {"eos_token_id": 7, "bos_token_id": 3},
    )
    (folder / "generation_config.json").write_bytes(defaults)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | ids)
    )
    (folder / "manifest.json").unlink()  # it has checksums of config.json
    for name, more in (("whole", []), ("adapters", ["--lora", "4", "--tokenizer", "bytes"])):
        run = tmp_path / name
        start = arguments(
            corpus, run, "--init_from", str(folder), "--validation_sequences", "0", *more, steps=1
        )
        assert train.main(start) == 0 and train.main(only_resume(run, "--max_steps", "2")) == 0
        for step in (1, 2):
            saved = run / f"step_{step:08d}"
            assert (saved / "generation_config.json").read_bytes() == defaults
            assert json.loads((saved / "config.json").read_text()).items() >= ids.items()
    (folder / "trainer.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    start = arguments(
        corpus, tmp_path / "words", "--init_from", str(folder), "--tokenizer", "bytes", steps=1
    )
    assert train.main(start) == 0
    assert not (tmp_path / "words" / "step_00000001" / "generation_config.json").exists()


def test_a_batch_is_shown_where_a_run_has_been_and_without_weights(
    corpus, tmp_path, capsys, monkeypatch
):
    """Most people try --show_batch after a run in the same, default, output_dir, and before they
    install wandb."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    capsys.readouterr()
    monkeypatch.setattr("training.host.errors.find_spec", lambda name: None)
    assert (
        train.main(
            arguments(corpus, run, "--show_batch", "--context_length", "32", "--wandb", "project")
        )
        == 0
    )
    assert "of 32 tokens are trained on" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before
    (folder := run / "step_00000001").joinpath("model.safetensors").unlink()
    start = arguments(
        corpus, tmp_path / "other", "--init_from", str(folder), "--context_length", "32"
    )
    assert train.main(start) == 1 and "model.safetensors" in capsys.readouterr().err
    assert train.main([*start, "--show_batch"]) == 0
    assert "of 32 tokens are trained on" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_compiled_block_trains_alike_on_a_gpu(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_SIZES, "tiny", replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    for option in ("--gradient_checkpointing", "--compile"):
        assert (
            train.main(arguments(corpus, tmp_path / option, "--device", "cuda", option, steps=2))
            == 0
        )
    assert losses(tmp_path / "--compile") == pytest.approx(
        losses(tmp_path / "--gradient_checkpointing"), rel=0.01
    )
