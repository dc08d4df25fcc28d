"""Runs that go on from a checkpoint: with the same results, and with other settings."""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file

import train
from kernels.gated_mlp import GatedMLPPart
from model import MODEL_SIZES
from tests.runs import (
    ROOT,
    SPARSE,
    arguments,
    edit_trainer_json,
    interrupt,
    losses,
    metrics,
    only_resume,
    saved_settings,
    weights,
    weights_of_another_shape,
)
from tests.shapes import reshape
from tests.training.data.test_tokenizer import write_tokenizer
from training.checkpoint.files import SPARE_BYTES, load_trainer_state
from training.export.__main__ import main as export
from training.families.config_json import from_config_json, to_config_json
from training.optim.adamw import warmup_cosine
from training.parallel.world import World
from training.run import decide, resume
from training.run.decide import recipe_of
from training.run.running import checkpoint_bytes
from training.run.settings import TrainConfig, check_config


def test_resume_equals_an_uninterrupted_run(corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(corpus, whole, steps=6)) == 0
    assert train.main(arguments(corpus, parts, "--checkpoint_interval", "3", steps=6)) == 0
    (parts / "step_00000006").rename(tmp_path / "lost")
    assert train.main(arguments(corpus, parts, "--resume", steps=6)) == 0
    assert losses(parts) == losses(whole)
    for name, tensor in weights(whole, 6).items():
        assert torch.equal(tensor, weights(parts, 6)[name]), name


def test_wider_mlps_in_some_layers_train_and_resume(corpus, tmp_path, monkeypatch):
    """Three layers of four are as wide as the model's own. No family's config.json says so: here
    the test does."""
    usual, wider = GatedMLPPart(384), GatedMLPPart(768, "gelu_tanh")
    shape = reshape(MODEL_SIZES["tiny"], mlps=(usual, usual, usual, wider))
    monkeypatch.setitem(MODEL_SIZES, "tiny", shape)
    monkeypatch.setattr(
        "training.run.running.to_config_json",
        lambda config: to_config_json(reshape(config, mlps=(usual,))),
    )
    monkeypatch.setattr(
        "training.checkpoint.weights.from_config_json",
        lambda content: replace(from_config_json(content), layers=shape.layers),
    )
    test_resume_equals_an_uninterrupted_run(corpus, tmp_path)
    saved = weights(tmp_path / "whole", 6)
    rows = [len(saved[f"model.layers.{layer}.mlp.up_proj.weight"]) for layer in range(4)]
    assert rows == [384, 384, 384, 768]


def test_compact_state_resumes_exactly_and_in_float32(corpus, tmp_path, caplog):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    compact = ["--optimizer_state", "compact", "--checkpoint_interval", "3"]
    assert train.main(arguments(corpus, whole, *compact, steps=6)) == 0
    assert train.main(arguments(corpus, parts, *compact, steps=6)) == 0
    interrupt(parts, 3, tmp_path / "lost")
    assert train.main(only_resume(parts)) == 0  # the run before says that its state is compact
    assert losses(parts) == losses(whole)
    for name, tensor in weights(whole, 6).items():
        assert torch.equal(tensor, weights(parts, 6)[name]), name
    files = [
        load_file(path / "optimizer.safetensors")
        for path in (parts / "step_00000006", whole / "step_00000006")
    ]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    assert {tensor.dtype for tensor in files[0].values()} > {torch.int8, torch.uint8}
    world = World(0, 1, torch.device("cpu"))
    recipe = recipe_of(TrainConfig(optimizer_state="compact"), MODEL_SIZES["tiny"], world)
    size = checkpoint_bytes(recipe, world) - SPARE_BYTES
    assert sum(
        file.stat().st_size for file in (parts / "step_00000006").glob("*.safetensors")
    ) == pytest.approx(size, rel=0.02)

    shutil.rmtree(parts / "step_00000006")
    caplog.set_level(logging.INFO)
    assert train.main(only_resume(parts, "--optimizer_state", "float32")) == 0
    assert "optimizer_state: compact -> float32" in caplog.messages
    assert losses(parts)[:4] == losses(whole)[:4] and losses(parts) == pytest.approx(
        losses(whole), rel=1e-2
    )
    shutil.rmtree(parts / "step_00000006")
    assert train.main(only_resume(parts, "--optimizer_state", "compact")) == 0


def test_a_run_keeps_the_format_of_its_state(corpus, tmp_path, caplog, monkeypatch):
    """Without a plan auto is float32. A resumed run has the format that the settings of the run
    before name."""
    run, name = tmp_path / "run", "optimizer_state"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    assert (
        saved_settings(run, 1)[name]
        == "float32"
        == json.loads((run / "config.json").read_text())[name]
    )
    assert train.main(only_resume(run, "--max_steps", "2", f"--{name}", "compact")) == 0
    caplog.set_level(logging.INFO)
    caplog.clear()
    again = arguments(corpus, run, "--resume", "auto", f"--{name}", "auto", steps=3)
    assert train.main(again) == 0 and not any(line.startswith(name) for line in caplog.messages)
    assert saved_settings(run, 3)[name] == "compact"
    edited = (
        run / "step_00000003" / "trainer.json"
    )  # like checkpoints from before there was a choice
    content = json.loads(edited.read_text())
    del content["trainer_state"]["settings"][name]
    monkeypatch.setattr(resume, "load_trainer_state", lambda _: content["trainer_state"])
    assert resume.load_state(run / "step_00000003")["settings"][name] == "float32"
    for said, means in (("fp8", "fp8-all"), ("fp8-gradients", "fp8")):  # before names changed
        content["trainer_state"]["settings"]["linear"] = said
        content["trainer_state"].pop("version", None)
        assert resume.load_state(run / "step_00000003")["settings"]["linear"] == means
    content["trainer_state"] |= {
        "version": "0.6.0",
        "settings": {**content["trainer_state"]["settings"], "linear": "fp8"},
    }
    assert resume.load_state(run / "step_00000003")["settings"]["linear"] == "fp8"


def test_a_run_with_a_removed_flag_is_refused(corpus, tmp_path, capsys):
    """Its later steps would be of another function than its settings say."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, *SPARSE, steps=1)) == 0
    checkpoint = run / "step_00000001"
    removed = {"settings": saved_settings(run, 1) | {"selected_blocks_start": "8x2,4"}}
    edit_trainer_json(checkpoint, lambda state: state.update(removed))
    assert train.main(only_resume(run, "--max_steps", "2")) == 1
    refusal = capsys.readouterr().err
    assert "selected_blocks_start 8x2,4" in refusal and f"--init_from {checkpoint}" in refusal
    assert export([str(checkpoint), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "README.md").exists()


def test_settings_of_another_version_are_named_if_they_had_a_value(corpus, tmp_path, caplog):
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    others = {"selected_blocks_start": None, "a_later_flag": 3}
    settings = {"settings": saved_settings(run, 1) | others}
    edit_trainer_json(run / "step_00000001", lambda state: state.update(settings))
    with caplog.at_level("INFO"):
        assert train.main(only_resume(run, "--max_steps", "2")) == 0
    assert "ignored: a_later_flag" in caplog.text and "selected_blocks_start" not in caplog.text


def test_a_run_of_int8_goes_on_with_another_linear_map(
    corpus, tmp_path, capsys, caplog, monkeypatch
):
    """int8 was removed after 0.6.0; weights and state of such a run are as any other's."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    state = load_trainer_state(run / "step_00000001")
    state["settings"]["linear"] = "int8"
    monkeypatch.setattr(resume, "load_trainer_state", lambda _: state)
    assert resume.load_state(run / "step_00000001")["settings"]["linear"] == "int8"
    more = only_resume(run, "--max_steps", "2")
    assert train.main(more) == 1
    error = capsys.readouterr().err
    assert "linear int8: " in error and "give --linear fp8 to go on" in error
    caplog.set_level(logging.INFO)
    assert train.main([*more, "--linear", "fp8"]) == 0 and "linear: int8 -> fp8" in caplog.messages


def test_resume_of_a_finished_run_goes_on(corpus, tmp_path, monkeypatch):
    for part in (decide, resume):
        monkeypatch.setattr(part, "DEFAULT_STEPS", 2)
    command = [a for a in arguments(corpus, tmp_path / "run") if a not in ("--max_steps", "4")]
    assert train.main(command) == 0
    assert train.main([*command, "--resume"]) == 0
    assert [v["step"] for v in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_resume_keeps_the_shape_that_was_trained(corpus, tmp_path):
    start = weights_of_another_shape(tmp_path / "start")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(corpus, whole, "--init_from", str(start))) == 0
    command = arguments(corpus, parts, "--init_from", str(start), "--checkpoint_interval", "2")
    assert train.main(command) == 0
    (parts / "step_00000004").rename(tmp_path / "lost")
    assert train.main(arguments(corpus, parts, "--resume")) == 0
    assert losses(parts) == losses(whole)
    config = json.loads((parts / "step_00000004" / "config.json").read_text())
    assert config == json.loads((whole / "step_00000004" / "config.json").read_text())
    assert (config["rope_theta"], config["head_dim"], config["max_position_embeddings"]) == (
        5e6,
        16,
        4096,
    )


def test_inherited_settings_that_a_flag_contradicts_are_dropped(corpus, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    command = arguments(
        corpus, run, *SPARSE, "--selected_blocks", "4", "--checkpoint_interval", "3", steps=2
    )
    assert train.main(command) == 0
    assert (
        train.main(
            only_resume(run, "--attention_type", "full", "--max_steps", "3", "--save", "model")
        )
        == 0
    )
    assert {"selected_blocks: 4 -> None", "attention_type: sparse -> full"} <= {*caplog.messages}
    kept = sorted(path.name for path in run.glob("step_*"))
    assert kept == [
        "step_00000002",
        "step_00000003",
    ]  # the older is the newest with an optimizer's state
    (run / "step_00000003").rename(tmp_path / "weights")
    assert train.main(only_resume(run, "--save", "none", "--max_steps", "4")) == 0
    assert (
        train.main(arguments(corpus, tmp_path / "auto", "--resume", "auto", "--save", "model")) == 1
    )
    assert (
        "a run that goes on with resume auto needs checkpoints of save full"
        in capsys.readouterr().err
    )


CHANGED = ["--batch_size", "3", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3"]
CHANGED += ["--weight_decay", "0.3", "--max_grad_norm", "0.5", "--final_learning_rate_ratio", "0.2"]


def test_resume_without_flags_keeps_every_setting(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(corpus, whole, *CHANGED, steps=6)) == 0
    assert (
        train.main(arguments(corpus, parts, *CHANGED, "--checkpoint_interval", "3", steps=6)) == 0
    )
    interrupt(parts, 3, tmp_path / "lost")
    caplog.clear()
    assert train.main(only_resume(parts)) == 0
    assert losses(parts) == losses(whole)
    assert " -> " not in caplog.text and "held at" not in caplog.text
    settings = json.loads((parts / "step_00000006" / "trainer.json").read_text())["trainer_state"][
        "settings"
    ]
    assert (settings["batch_size"], settings["learning_rate"], settings["max_steps"]) == (
        3,
        1e-3,
        6,
    )


def test_resume_says_what_changed(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, "--checkpoint_interval", "2")) == 0
    interrupt(run, 2, tmp_path / "lost")
    edit_trainer_json(
        run / "step_00000002", lambda state: state.update(ranks=4, tokens_per_step=512)
    )
    edit_trainer_json(run / "step_00000002", lambda state: state["settings"].update(warp_speed=9))
    caplog.clear()
    (tmp_path / "run.toml").write_text("weight_decay = 0.2\n")
    assert (
        train.main(only_resume(run, "--batch_size", "4", "--config", str(tmp_path / "run.toml")))
        == 0
    )
    changes = [line for line in caplog.messages if " -> " in line]
    assert changes == [
        "batch_size: 2 -> 4",
        "weight_decay: 0.1 -> 0.2",
        "tokens a step: 512 -> 256 (4 -> 1 ranks)",
    ]
    assert "settings of another version, ignored: warp_speed" in caplog.messages
    assert metrics(run)[-1]["tokens"] == 2 * 128 + 2 * 256


def test_a_given_flag_replaces_the_saved_ones_that_it_contradicts():
    saved = {
        "memory_budget": "24GB",
        "host_budget": "84GB",
        "batch_size": 3,
        "output_dir": "there",
        "device": "cpu",
    }
    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    def inherit(saved, given, device=cuda):
        config = TrainConfig(**resume.inherited_settings(saved, given, device))
        check_config(config, given)
        default = TrainConfig()
        return {
            f.name: value
            for f in fields(config)
            if (value := getattr(config, f.name)) != getattr(default, f.name)
        }

    assert inherit(saved, {}) == {"memory_budget": "24GB", "host_budget": "84GB", "batch_size": 3}
    assert inherit(saved, {}, cpu) == {"batch_size": 3}
    assert inherit(saved, {"compile": True}) == {"compile": True, "batch_size": 3}
    assert inherit(saved, {"compile": False, "batch_size": 8})["memory_budget"] == "24GB"
    assert inherit({"compile": True, "gradient_checkpointing": True}, {"host_budget": "8GB"}) == {
        "host_budget": "8GB"
    }
    assert (
        inherit(saved, {"memory_budget": "9GB"}, cpu)["memory_budget"] == "9GB"
    )  # given: refused as in a fresh run


def rates(output_dir):
    return [line["learning_rate"] for line in metrics(output_dir)]


def test_steps_past_the_end_hold_the_last_learning_rate(corpus, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resume, "DEFAULT_STEPS", 3)
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=5)) == 0
    assert train.main(only_resume(run, "--checkpoint_interval", "2")) == 0
    assert (
        "learning rate: held at 0.0003, where its cosine ended; --max_steps stretches it"
        in caplog.messages
    )
    interrupt(run, 6, tmp_path / "lost")
    assert (
        train.main(only_resume(run)) == 0
    )  # it was stopped in these steps: the rate is still held
    assert rates(run)[4:] == [pytest.approx(3e-4)] * 4
    caplog.clear()
    assert train.main(only_resume(run, "--max_steps", "16")) == 0
    expected = warmup_cosine(8, learning_rate=3e-3, warmup_steps=2, max_steps=16, final_ratio=0.1)
    assert rates(run)[8] == expected and rates(run)[15] == pytest.approx(3e-4)
    assert f"learning rate: 0.0003 in step 8 -> {expected:.3g} in step 9" in caplog.messages


def test_other_weights_beside_resume_auto_are_refused(released, corpus, tmp_path, capsys):
    """The run goes on from its own weights, whether or not a resume before named them."""
    command = arguments(corpus, tmp_path / "run", "--resume", "auto", "--tokenizer", "bytes")
    other = tmp_path / "other"
    shutil.copytree(released, other)
    for steps, words in (
        (2, ["--init_from", str(released)]),
        (3, []),
        (4, ["--init_from", f"{released}/."]),
    ):
        assert train.main([*command, *words, "--max_steps", str(steps)]) == 0
    assert train.main([*command, "--init_from", str(other), "--max_steps", "5"]) == 1
    assert (
        f"step_00000004 is of a run from {released}/.; give that, drop init_from, or"
        in capsys.readouterr().err
    )
    command[command.index(str(tmp_path / "run"))] = str(tmp_path / "fresh")
    assert train.main([*command, "--max_steps", "2"]) == 0
    assert train.main([*command, "--init_from", str(other), "--max_steps", "3"]) == 1
    assert "is of a run from random weights" in capsys.readouterr().err


def test_resume_refuses_another_tokenizer_before_the_data(
    released, corpus, tmp_path, monkeypatch, capsys
):
    run, file = tmp_path / "run", released / "tokenizer.json"
    write_tokenizer(file)
    assert train.main(arguments(corpus, run, "--init_from", str(released), steps=1)) == 0
    content = file.read_bytes()
    write_tokenizer(file, special="</s>")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(
            "training.data.decide.load_corpus", lambda *_, **__: pytest.fail("the data were read")
        )
        for extra in ([], ["--tokenizer", "bytes"]):
            assert train.main(only_resume(run, "--max_steps", "2", *extra)) == 1
            expected = f"was trained with tokenizer {hashlib.sha256(content).hexdigest()[:12]}"
            assert expected in capsys.readouterr().err


def test_resume_with_a_damaged_metrics_file(corpus, tmp_path, caplog):
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=3)) == 0
    file = run / "metrics.jsonl"
    file.write_text(file.read_text()[:-40])  # killed while it wrote the third line
    assert train.main(only_resume(run, "--max_steps", "4")) == 0
    assert [line["step"] for line in metrics(run)] == [1, 2, 4]
    assert f"{file}: 1 of 3 lines are damaged and were dropped" in caplog.messages


# train.py with an H200's rates: measured ones depend on what else runs, and other plans round
# otherwise.
STEADY = """
import sys, train
from benchmarks.bench_train_step import resident_bytes
from training.checkpoint.pieces import SAVING_BYTES
from training.host.sizes import PROCESS_BYTES
from training.memory.machine import H200
from training.run import build

build.measure_rates = lambda *arguments: dict(H200)
plans, make_plan = [], build.make_plan
build.make_plan = lambda *arguments: plans.append(make_plan(*arguments)) or plans[-1]
status = train.main(sys.argv[1:])
promised, taken = plans[-1].host_bytes + PROCESS_BYTES + SAVING_BYTES, resident_bytes("VmHWM")
sys.exit(status or (f"{taken:,} bytes of host memory were resident, {promised:,} promised" if taken > promised else 0))
"""


@pytest.mark.gpu(gib=8)
def test_a_plan_chooses_compact_state_and_a_resumed_run_keeps_it(tmp_path):
    """Float32 state of the 0.6B takes 6.7 GiB, and within 5 GiB of a GPU the way to the host and
    back takes time.

    Resident host memory stays below the bytes of the plan, of saving and of a process.
    """
    flags = {
        "model_size": "0.6B", "context_length": "512", "batch_size": "2", "memory_budget": "5GB",
        "host_budget": "12GB",
        "data": str(ROOT / "model.py"), "max_steps": "3", "warmup_steps": "1",
        "checkpoint_interval": "2",
        "keep_checkpoints": "3", "validation_sequences": "1", "sample_tokens": "0",
    }  # fmt: skip
    run, whole = tmp_path / "run", tmp_path / "whole"
    for folder in (run, whole):
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        subprocess.run(
            [sys.executable, "-c", STEADY, *words, "--output_dir", folder], cwd=ROOT, check=True
        )
    shutil.rmtree(run / "step_00000003")
    words = ["--resume", "--optimizer_state", "auto", "--output_dir", run]
    subprocess.run([sys.executable, "-c", STEADY, *words], cwd=ROOT, check=True)
    for step in (2, 3):
        assert saved_settings(run, step)["optimizer_state"] == "compact"
        for name in ("model.safetensors", "optimizer.safetensors"):
            ours, theirs = (
                load_file(folder / f"step_{step:08d}" / name) for folder in (run, whole)
            )
            assert ours.keys() == theirs.keys() and all(
                torch.equal(ours[key], theirs[key]) for key in ours
            )
    assert any(key.endswith("exp_avg_scale") for key in ours)
