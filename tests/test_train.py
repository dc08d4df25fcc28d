import hashlib
import json
import logging
import math
import re
import shutil
import socket
import subprocess
import sys
import time
import zlib
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from model import MODEL_SIZES, Transformer
from tests.checkpoints import save_checkpoint
from tests.ranks import start_torchrun
from tests.training.data.test_tokenizer import write_tokenizer
from training.attention_flags import numbers_by_layer
from training.checkpoint.files import SPARE_BYTES
from training.families import to_config_json
from training.host.errors import UserError
from training.host.files import write_file
from training.inference import open_tokenizer
from training.memory.cost_model import forward_flops
from training.memory.execution import WHOLE, Placement
from training.memory.planner import Plan
from training.optimizer import MasterAdamW, warmup_cosine
from training.parallel.fsdp import copy_weights, initial_weights
from training.parallel.world import World
from training.run import resume
from training.run.build import resolve_memory_budget, step_of
from training.run.saving import checkpoint_bytes
from training.run.settings import TrainConfig, given_settings

ROOT = Path(__file__).parents[1]
GIB = 2**30
SMALL = ["--context_length", "64", "--batch_size", "2", "--sample_tokens", "0", "--device", "cpu"]
SPARSE = ["--attention_type", "sparse", "--dense_below", "64"]
ANNEALED = ["--selected_blocks_start", "8x2,4", "--selected_blocks_steps"]


def arguments(corpus, output_dir, *extra, steps=4):
    warmup = ["--warmup_steps", str(min(steps, 2))]
    return ["--data", corpus, "--output_dir", str(output_dir), "--max_steps", str(steps), *SMALL, *warmup, *extra]


def metrics(output_dir):
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir):
    return [line["loss"] for line in metrics(output_dir)]


def weights(output_dir, step):
    return load_file(Path(output_dir) / f"step_{step:08d}" / "model.safetensors")


def test_trains_validates_saves_and_samples(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, "--sample_tokens", "5", steps=30)) == 0
    values = metrics(run)
    assert [v["step"] for v in values] == list(range(1, 31))
    assert abs(values[0]["loss"] - math.log(256)) < 0.3 and values[-1]["loss"] < values[0]["loss"] - 1
    assert values[-1]["validation_loss"] < values[0]["loss"] - 1
    assert values[-1]["tokens"] == 30 * 2 * 64 and values[0]["tokens_per_second"] > 0
    assert "sample, after a held-out prompt" in caplog.text
    assert json.loads((run / "config.json").read_text())["max_steps"] == 30
    assert (run / "metrics.png").is_file()


def test_only_what_the_user_can_mend_is_shown_without_a_traceback(corpus, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(train, "train_step", fail)
    with pytest.raises(ValueError, match="a defect"):
        train.main(arguments(corpus, tmp_path / "run"))
    capsys.readouterr()
    assert train.main(arguments(corpus, tmp_path / "other", "--attention_backend", "none")) == 1
    assert capsys.readouterr().err.startswith("error: attention backend must be one of")


def test_an_error_has_a_line_of_its_own_below_the_progress_bar(corpus, tmp_path, monkeypatch, capsys):
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


def test_resume_equals_an_uninterrupted_run(corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(corpus, whole, steps=6)) == 0
    assert train.main(arguments(corpus, parts, "--checkpoint_interval", "3", steps=6)) == 0
    (parts / "step_00000006").rename(tmp_path / "lost")
    assert train.main(arguments(corpus, parts, "--resume", steps=6)) == 0
    assert losses(parts) == losses(whole)
    for name, tensor in weights(whole, 6).items():
        assert torch.equal(tensor, weights(parts, 6)[name]), name


def test_a_run_is_the_same_wherever_weights_live(corpus, tmp_path, monkeypatch, caplog):
    """Losses, validations, sample and checkpoints; each kind of run goes on from the other's checkpoint."""
    caplog.set_level(logging.INFO)
    flags = "--optimizer_state", "compact", "--checkpoint_interval", "2", "--validation_interval", "2"
    flags += "--gradient_accumulation_steps", "2", "--validation_sequences", "2", "--sample_tokens", "8"

    def run(folder, weights, *more):
        def plan_memory(config, model, world, documents=None):
            step = step_of(config, model, world, documents)
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
        found = [(line["loss"], line["gradient_norm"], line.get("validation_loss")) for line in metrics(folder)]
        return found, re.search("(?s)sample, .*", caplog.text)[0].splitlines()[:2]

    folders = {weights: tmp_path / weights for weights in ("gpu", "host")}
    expected = run(folders["gpu"], "gpu")
    assert run(folders["host"], "host") == expected
    files = [load_file(folder / "step_00000004" / "model.safetensors") for folder in folders.values()]
    assert all(torch.equal(files[0][name], tensor) for name, tensor in files[1].items())
    for weights, folder in folders.items():
        shutil.rmtree(folder / "step_00000004")
        assert run(folder, {"gpu": "host", "host": "gpu"}[weights], "--resume") == expected
        assert all(
            torch.equal(files[0][name], tensor)
            for name, tensor in load_file(folder / "step_00000004" / "model.safetensors").items()
        )


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
    files = [load_file(path / "optimizer.safetensors") for path in (parts / "step_00000006", whole / "step_00000006")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    assert {tensor.dtype for tensor in files[0].values()} > {torch.int8, torch.uint8}
    size = checkpoint_bytes(
        TrainConfig(optimizer_state="compact"), MODEL_SIZES["tiny"], World(0, 1, torch.device("cpu"))
    ) - SPARE_BYTES  # fmt: skip
    assert sum(file.stat().st_size for file in (parts / "step_00000006").glob("*.safetensors")) == pytest.approx(
        size, rel=0.02
    )

    shutil.rmtree(parts / "step_00000006")
    caplog.set_level(logging.INFO)
    assert train.main(only_resume(parts, "--optimizer_state", "float32")) == 0
    assert "optimizer_state: compact -> float32" in caplog.messages
    assert losses(parts)[:4] == losses(whole)[:4] and losses(parts) == pytest.approx(losses(whole), rel=1e-2)
    shutil.rmtree(parts / "step_00000006")
    assert train.main(only_resume(parts, "--optimizer_state", "compact")) == 0


def test_a_run_keeps_the_format_of_its_state(corpus, tmp_path, caplog, monkeypatch):
    """Without a plan auto is float32. A resumed run has the format that the settings of the run before name."""
    run, name = tmp_path / "run", "optimizer_state"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    assert saved_settings(run, 1)[name] == "float32" == json.loads((run / "config.json").read_text())[name]
    assert train.main(only_resume(run, "--max_steps", "2", f"--{name}", "compact")) == 0
    caplog.set_level(logging.INFO)
    caplog.clear()
    again = arguments(corpus, run, "--resume", "auto", f"--{name}", "auto", steps=3)
    assert train.main(again) == 0 and not any(line.startswith(name) for line in caplog.messages)
    assert saved_settings(run, 3)[name] == "compact"
    edited = run / "step_00000003" / "trainer.json"  # as checkpoints were before there was a choice
    content = json.loads(edited.read_text())
    del content["trainer_state"]["settings"][name]
    monkeypatch.setattr(resume, "load_trainer_state", lambda _: content["trainer_state"])
    assert resume.load_state(run / "step_00000003")["settings"][name] == "float32"


def test_chosen_blocks_are_annealed_and_resumed(corpus, tmp_path):
    """A resumed run goes on with the numbers of its steps; a token of the last of 11 blocks chooses one or none."""
    run, flags = tmp_path / "run", ["--context_length", "704", "--batch_size", "1", "--validation_sequences", "0"]
    flags += [*SPARSE, *ANNEALED, "3", "--selected_blocks", "0", "--checkpoint_interval", "2"]
    assert train.main(arguments(corpus, run, *flags)) == 0
    whole, numbers = losses(run), [line["selected_blocks"] for line in metrics(run)]
    assert numbers == ["8x2,4", "4", "4x2,0", "0"]
    (run / "step_00000004").rename(tmp_path / "lost")
    assert train.main(["--output_dir", str(run), "--resume", "--device", "cpu"]) == 0
    assert losses(run) == whole and [line["selected_blocks"] for line in metrics(run)] == numbers


def test_numbers_are_calibrated_once(corpus, tmp_path, caplog, capsys, monkeypatch):
    """The settings of a run have the numbers; the same command goes on with them, another mean is calibrated anew."""
    monkeypatch.setattr("training.calibration.MOST_TEXTS", 2)
    assert train.main(arguments(corpus, tmp_path / "dense", steps=1)) == 0
    run = tmp_path / "run"
    sizes = ["--context_length", "960", "--batch_size", "1", "--validation_sequences", "0", *SPARSE]
    command = ["--init_from", str(tmp_path / "dense" / "step_00000001"), *sizes]
    caplog.set_level(logging.INFO)
    assert train.main(arguments(corpus, run, *command, "--selected_blocks", "auto:4", steps=1)) == 0
    numbers = saved_settings(run, 1)["selected_blocks"]
    assert "auto" not in numbers and sum(numbers_by_layer("selected_blocks", numbers, 4)) <= 16
    assert re.search(r"selected_blocks [0-9x,]+: loss \d\.\d+ on 1 other texts, [+-]", caplog.text)
    assert json.loads((run / "config.json").read_text())["selected_blocks"] == numbers
    monkeypatch.setattr(train, "calibrate", lambda *_: pytest.fail("calibrated again"))
    again = [*command, "--selected_blocks", "auto:4", "--resume", "auto"]
    assert train.main(arguments(corpus, run, *again, steps=2)) == 0
    assert saved_settings(run, 2)["selected_blocks"] == numbers
    calls = []
    monkeypatch.setattr(train, "calibrate", lambda config, shape, folder, *_: calls.append(folder) or "8x2,0")
    assert train.main(only_resume(run, "--max_steps", "3", "--selected_blocks", "auto:8")) == 1
    assert "auto:8 has no effect at context_length 960" in capsys.readouterr().err
    assert train.main(only_resume(run, "--max_steps", "3", "--selected_blocks", "4x1,0")) == 0
    assert train.main(only_resume(run, "--max_steps", "4", "--selected_blocks", "auto:4")) == 0
    assert calls == [run / "step_00000003"] and saved_settings(run, 4)["selected_blocks"] == "8x2,0"
    assert "selected_blocks: 4x1,0 -> auto:4" in caplog.messages


def saved_settings(run, step):
    return json.loads((run / f"step_{step:08d}" / "trainer.json").read_text())["trainer_state"]["settings"]


def test_resume_of_a_finished_run_goes_on(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "DEFAULT_STEPS", 2)
    command = [a for a in arguments(corpus, tmp_path / "run") if a not in ("--max_steps", "4")]
    assert train.main(command) == 0
    assert train.main([*command, "--resume"]) == 0
    assert [v["step"] for v in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_accumulation_equals_one_batch(corpus, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    assert train.main(arguments(corpus, one, "--batch_size", "8")) == 0
    assert train.main(arguments(corpus, many, "--batch_size", "2", "--gradient_accumulation_steps", "4")) == 0
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize("option", ["--gradient_checkpointing", "--compile", "--kernels=torch", "--loss_impl=chunked"])
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
    assert train.main(arguments(corpus, tmp_path / "first", "--resume", steps=20)) == 1  # no optimizer state in it


def weights_of_another_shape(folder):
    """A checkpoint of weights whose shape is no MODEL_SIZES entry's."""
    shape = {"intermediate_size": 200, "head_dim": 16, "tie_word_embeddings": False, "rope_theta": 5e6}
    config = replace(MODEL_SIZES["tiny"], **shape, max_position_embeddings=4096)
    model = Transformer(config)
    copy_weights(model, initial_weights(model, seed=1))
    state = {"weights": model.state_dict(), "model_config": to_config_json(config)}
    return save_checkpoint(folder, 1, **state, optimizer_state=None, trainer_state={"tokenizer": "bytes"})


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
    assert (config["rope_theta"], config["head_dim"], config["max_position_embeddings"]) == (5e6, 16, 4096)


def test_config_json_declares_the_trained_length(corpus, tmp_path):
    assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 0
    config = json.loads((tmp_path / "run" / "step_00000001" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64


def test_refusals_come_before_the_data(corpus, tmp_path, monkeypatch, capsys):
    assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 0
    assert train.main(arguments(corpus, tmp_path / "weights", "--save", "model", steps=1)) == 0
    monkeypatch.setattr(train, "load_corpus", lambda *_, **__: pytest.fail("the data were read"))
    monkeypatch.setattr(resume, "verify_checkpoint", lambda *_: pytest.fail("checksums were computed"))
    start = weights_of_another_shape(tmp_path / "start")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, "intermediate_size": 300}))
    for folder, extra, message in (
        ("run", [], "is already there"),
        (
            "run",
            ["--resume", "--max_steps", "1", "--warmup_steps", "1"],
            "is at step 1, max_steps is 1; raise max_steps",
        ),
        ("run", ["--resume", "--context_length", "32"], "context_length 64, this run 32"),
        ("run", ["--resume", "--model_size", "0.6B"], "of another size"),
        ("weights", ["--resume"], "has no optimizer state"),
        ("new", ["--resume"], "no checkpoint in"),
        ("new", ["--init_from", str(start)], "of another size"),
    ):
        assert train.main([*arguments(corpus, tmp_path / folder, steps=2), *extra]) == 1
        assert message in capsys.readouterr().err


def test_a_folder_that_is_not_for_a_run_is_refused(corpus, tmp_path, capsys):
    """The run would replace its config.json."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    (run / "step_00000001" / "model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.json").write_text('{"theme": "dark"}')
    for folder in (run / "step_00000001", tmp_path, tmp_path / "app"):
        before = {file: file.read_bytes() for file in folder.glob("*.json")}
        for flags in ([], ["--resume", "auto"], ["--save", "none"]):
            assert train.main(arguments(corpus, folder, *flags)) == 1
            assert (
                f"output_dir {folder} holds weights, or a config.json that is not of a run" in capsys.readouterr().err
            )
        assert before == {file: file.read_bytes() for file in folder.glob("*.json")}
    (run / "config.json").write_text('{"cut')  # by a kill
    (run / "step_00000001").rename(tmp_path / "elsewhere")
    assert train.main(arguments(corpus, run, steps=1)) == 0


def test_what_a_run_writes_is_not_its_data(corpus, tmp_path, capsys):
    assert train.main(arguments(str(tmp_path), tmp_path / "run")) == 1
    assert f"output_dir {tmp_path}/run lies in data {tmp_path}, which would be read" in capsys.readouterr().err
    assert train.main(arguments(corpus, tmp_path / "run", "--log_file", corpus)) == 1
    assert f"log_file {corpus} lies in data {corpus}, which would be read" in capsys.readouterr().err


def test_data_of_a_symbolic_link_to_itself(tmp_path, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert train.main(arguments(str(loop), tmp_path / "run")) == 1
    assert f"data path {loop} does not exist" in capsys.readouterr().err


def test_inherited_settings_that_a_flag_contradicts_are_dropped(corpus, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    command = arguments(corpus, run, *SPARSE, "--selected_blocks", "4", "--checkpoint_interval", "3", steps=2)
    assert train.main(command) == 0
    assert train.main(only_resume(run, "--attention_type", "full", "--max_steps", "3", "--save", "model")) == 0
    assert {"selected_blocks: 4 -> None", "attention_type: sparse -> full"} <= {*caplog.messages}
    kept = sorted(path.name for path in run.glob("step_*"))
    assert kept == ["step_00000002", "step_00000003"]  # the older is the newest with an optimizer's state
    (run / "step_00000003").rename(tmp_path / "weights")
    assert train.main(only_resume(run, "--save", "none", "--max_steps", "4")) == 0
    assert train.main(arguments(corpus, tmp_path / "auto", "--resume", "auto", "--save", "model")) == 1
    assert "a run that goes on with resume auto needs checkpoints of save full" in capsys.readouterr().err


CHANGED = ["--batch_size", "3", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3"]
CHANGED += ["--weight_decay", "0.3", "--max_grad_norm", "0.5", "--final_learning_rate_ratio", "0.2"]


def only_resume(output_dir, *extra):
    return ["--output_dir", str(output_dir), "--device", "cpu", "--resume", *extra]


def interrupt(run, step, lost):
    """Leave a run as if it had been stopped after `step`."""
    [later] = [path for path in run.glob("step_*") if int(path.name.split("_")[1]) > step]
    later.rename(lost)


def edit_trainer_json(path, edit):
    """Change a checkpoint's trainer.json, and the manifest with it."""
    trainer = json.loads((path / "trainer.json").read_text())
    edit(trainer["trainer_state"])
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["trainer.json"] = write_file(path / "trainer.json", json.dumps(trainer).encode())
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_resume_without_flags_keeps_every_setting(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(corpus, whole, *CHANGED, steps=6)) == 0
    assert train.main(arguments(corpus, parts, *CHANGED, "--checkpoint_interval", "3", steps=6)) == 0
    interrupt(parts, 3, tmp_path / "lost")
    caplog.clear()
    assert train.main(only_resume(parts)) == 0
    assert losses(parts) == losses(whole)
    assert " -> " not in caplog.text and "held at" not in caplog.text
    settings = json.loads((parts / "step_00000006" / "trainer.json").read_text())["trainer_state"]["settings"]
    assert (settings["batch_size"], settings["learning_rate"], settings["max_steps"]) == (3, 1e-3, 6)


def test_resume_says_what_changed(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, "--checkpoint_interval", "2")) == 0
    interrupt(run, 2, tmp_path / "lost")
    edit_trainer_json(run / "step_00000002", lambda state: state.update(ranks=4, tokens_per_step=512))
    edit_trainer_json(run / "step_00000002", lambda state: state["settings"].update(warp_speed=9))
    caplog.clear()
    (tmp_path / "run.toml").write_text("weight_decay = 0.2\n")
    assert train.main(only_resume(run, "--batch_size", "4", "--config", str(tmp_path / "run.toml"))) == 0
    changes = [line for line in caplog.messages if " -> " in line]
    assert changes == ["batch_size: 2 -> 4", "weight_decay: 0.1 -> 0.2", "tokens a step: 512 -> 256 (4 -> 1 ranks)"]
    assert "settings of another version, ignored: warp_speed" in caplog.messages
    assert metrics(run)[-1]["tokens"] == 2 * 128 + 2 * 256


def test_a_given_flag_replaces_the_saved_ones_that_it_contradicts():
    saved = {"memory_budget": "24GB", "host_budget": "84GB", "batch_size": 3, "output_dir": "there", "device": "cpu"}
    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    def inherit(saved, given, device=cuda):
        config = resume.inherit_settings(saved, given, device)
        train.check_config(config, given)
        default = TrainConfig()
        return {f.name: value for f in fields(config) if (value := getattr(config, f.name)) != getattr(default, f.name)}

    assert inherit(saved, {}) == {"memory_budget": "24GB", "host_budget": "84GB", "batch_size": 3}
    assert inherit(saved, {}, cpu) == {"batch_size": 3}
    assert inherit(saved, {"compile": True}) == {"compile": True, "batch_size": 3}
    assert inherit(saved, {"compile": False, "batch_size": 8})["memory_budget"] == "24GB"
    assert inherit({"compile": True, "gradient_checkpointing": True}, {"host_budget": "8GB"}) == {"host_budget": "8GB"}
    assert inherit(saved, {"memory_budget": "9GB"}, cpu)["memory_budget"] == "9GB"  # given: refused as in a fresh run


def rates(output_dir):
    return [line["learning_rate"] for line in metrics(output_dir)]


def test_steps_past_the_end_hold_the_last_learning_rate(corpus, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resume, "DEFAULT_STEPS", 3)
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=5)) == 0
    assert train.main(only_resume(run, "--checkpoint_interval", "2")) == 0
    assert "learning rate: held at 0.0003, where its cosine ended; --max_steps stretches it" in caplog.messages
    interrupt(run, 6, tmp_path / "lost")
    assert train.main(only_resume(run)) == 0  # it was stopped in these steps: the rate is still held
    assert rates(run)[4:] == [pytest.approx(3e-4)] * 4
    caplog.clear()
    assert train.main(only_resume(run, "--max_steps", "16")) == 0
    expected = warmup_cosine(8, learning_rate=3e-3, warmup_steps=2, max_steps=16, final_ratio=0.1)
    assert rates(run)[8] == expected and rates(run)[15] == pytest.approx(3e-4)
    assert f"learning rate: 0.0003 in step 8 -> {expected:.3g} in step 9" in caplog.messages


def test_nsa_from_dense_weights_on(corpus, tmp_path, caplog, capsys):
    """A dense folder gets fresh gates; only nsa takes a folder with gates. Runs resume, and end with a sample."""
    caplog.set_level(logging.INFO)
    dense, nsa, on = (tmp_path / name for name in ("dense", "nsa", "on"))
    assert train.main(arguments(corpus, dense, steps=1)) == 0
    start = str(dense / "step_00000001")
    command = ["--init_from", start, "--attention_type", "nsa", "--selected_blocks", "4", "--weight_decay", "0"]
    assert train.main([*arguments(corpus, nsa, steps=1), *command, "--sample_tokens", "2"]) == 0
    assert f"attention: {start} has no gates of nsa; they are initialised" in caplog.text
    assert "sample, after a held-out prompt" in caplog.text
    trained = weights(nsa, 1)
    gates = [trained[f"model.layers.{i}.self_attn.g_proj.{part}"] for i in range(4) for part in ("weight", "bias")]
    assert [list(g.shape) for g in gates] == [[12, 128], [12]] * 4 and all(g.any() for g in gates)
    assert gates[0].std() == pytest.approx(0.02, rel=0.2)
    declared = json.loads((nsa / "step_00000001" / "config.json").read_text())
    assert declared["model_type"] == "qwen3_nsa"
    assert train.main(only_resume(nsa, "--max_steps", "2")) == 0
    caplog.clear()
    start = str(nsa / "step_00000002")
    assert train.main(arguments(corpus, on, "--init_from", start, "--attention_type", "nsa", steps=1)) == 0
    assert "initialised" not in caplog.text
    capsys.readouterr()
    assert train.main(arguments(corpus, tmp_path / "other", "--init_from", start)) == 1
    assert "would drop its gates; give --attention_type nsa" in capsys.readouterr().err
    assert train.main(only_resume(dense, "--max_steps", "2", "--attention_type", "nsa")) == 1
    assert "start from its weights with --init_from" in capsys.readouterr().err


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A folder as transformers saves a model, without a tokenizer; its vocabulary has room for more than bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = replace(MODEL_SIZES["tiny"], vocab_size=300)
    monkeypatch.setitem(MODEL_SIZES, "tiny", shape)
    Qwen3ForCausalLM(Qwen3Config(**to_config_json(shape))).save_pretrained(tmp_path / "released")
    return tmp_path / "released"


def trainer_state(run, step):
    return json.loads((run / f"step_{step:08d}" / "trainer.json").read_text())["trainer_state"]


def test_released_weights_want_their_tokenizer(released, corpus, tmp_path, capsys):
    command = ["--init_from", str(released)]
    assert train.main([*arguments(corpus, tmp_path / "run"), *command]) == 1
    assert "give --tokenizer FILE, the one that its weights were trained with, or" in capsys.readouterr().err
    assert train.main([*arguments(corpus, tmp_path / "bytes", steps=1), *command, "--tokenizer", "bytes"]) == 0
    assert trainer_state(tmp_path / "bytes", 1)["tokenizer"] == "bytes"
    write_tokenizer(released / "tokenizer.json")
    assert train.main([*arguments(corpus, tmp_path / "file", steps=1), *command]) == 0
    state = trainer_state(tmp_path / "file", 1)
    assert state["tokenizer"] == hashlib.sha256((released / "tokenizer.json").read_bytes()).hexdigest()
    assert train.main(only_resume(tmp_path / "file", "--max_steps", "2")) == 0  # tokenizer.json is found again
    folder = arguments(corpus, tmp_path / "folder", *command, "--tokenizer", str(released), steps=1)
    assert train.main(folder) == 0 and (tmp_path / "folder" / "step_00000001" / "tokenizer.json").is_file()


def test_checkpoints_trained_on_bytes_need_no_tokenizer(released, corpus, tmp_path, capsys):
    first = arguments(corpus, tmp_path / "first", "--init_from", str(released), "--tokenizer", "bytes", steps=1)
    assert train.main(first) == 0
    start = tmp_path / "first" / "step_00000001"
    second = arguments(corpus, tmp_path / "second", "--init_from", str(start), "--save", "none", steps=1)
    assert train.main(second) == 0
    assert open_tokenizer(None, start, 300).name == "bytes"  # to generate and to evaluate
    edit_trainer_json(start, lambda state: state.update(tokenizer="another"))
    capsys.readouterr()
    assert train.main([*second, "--output_dir", str(tmp_path / "third")]) == 1
    assert "--tokenizer bytes" in capsys.readouterr().err


def test_resume_refuses_another_tokenizer_before_the_data(released, corpus, tmp_path, monkeypatch, capsys):
    run, file = tmp_path / "run", released / "tokenizer.json"
    write_tokenizer(file)
    assert train.main(arguments(corpus, run, "--init_from", str(released), steps=1)) == 0
    content = file.read_bytes()
    write_tokenizer(file, special="</s>")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(train, "load_corpus", lambda *_, **__: pytest.fail("the data were read"))
        for extra in ([], ["--tokenizer", "bytes"]):
            assert train.main(only_resume(run, "--max_steps", "2", *extra)) == 1
            expected = f"was trained with tokenizer {hashlib.sha256(content).hexdigest()[:12]}"
            assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "window must be a multiple of 64"),
        ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling beside other rope_parameters"),
    ],
)
def test_released_weights_that_this_decoder_cannot_compute(settings, message, released, corpus, tmp_path, capsys):
    path = released / "config.json"
    config = {**json.loads(path.read_text()), "layer_types": None, **settings}
    path.write_text(json.dumps(config))
    command = arguments(corpus, tmp_path / "run", "--init_from", str(released), "--tokenizer", "bytes")
    assert train.main(command) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: cannot take {path}: ") and message in error and "\n" not in error


def test_resume_with_a_damaged_metrics_file(corpus, tmp_path, caplog):
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=3)) == 0
    file = run / "metrics.jsonl"
    file.write_text(file.read_text()[:-40])  # killed while it wrote the third line
    assert train.main(only_resume(run, "--max_steps", "4")) == 0
    assert [line["step"] for line in metrics(run)] == [1, 2, 4]
    assert f"{file}: 1 of 3 lines are damaged and were dropped" in caplog.messages


def test_an_output_dir_that_cannot_be_written_is_one_line(corpus, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert train.main(arguments(corpus, tmp_path / "file" / "run")) == 1
    assert "file/run cannot be written to: " in capsys.readouterr().err


def parse(argv):
    return TrainConfig(**given_settings(argv))


def test_two_machines_equal_one_process(corpus, tmp_path):
    """Two machines of one process each train and save; one process goes on, and equals a process that did it all."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main(arguments(corpus, one, "--gradient_accumulation_steps", "2")) == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"--rdzv_endpoint=127.0.0.1:{free.getsockname()[1]}"
    words = arguments(corpus, two, "--gradient_checkpointing", "--sample_tokens", "3", "--checkpoint_interval", "2")
    words = "--nnodes=2", "--rdzv_backend=c10d", endpoint, "train.py", *words
    for machine in [start_torchrun(tmp_path, *words) for _ in range(2)]:
        machine.join(300)
        assert machine.exitcode == 0, (tmp_path / "errors").read_text()[-3000:]
    equals_one(two, one)
    interrupt(two, 2, tmp_path / "lost")
    assert train.main(arguments(corpus, two, "--gradient_accumulation_steps", "2", "--resume")) == 0
    equals_one(two, one)


def equals_one(two, one):
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert metrics(two)[-1]["validation_loss"] == pytest.approx(metrics(one)[-1]["validation_loss"], rel=1e-5)
    found, expected = weights(two, 4), weights(one, 4)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensor, found[name], rtol=1e-3, atol=1e-4)


def test_flags_override_the_file_which_overrides_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('context_length = 1024\nlearning_rate = 1\ndata = ["a", "b"]\ngradient_checkpointing = true\n')
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
        train.check_config(TrainConfig(**given), given)


def test_the_default_batch_is_one_sequence_where_sequences_are_long():
    assert [parse(["--context_length", str(n)]).batch_size for n in (512, 16_383, 16_384, 131_072)] == [8, 8, 1, 1]
    assert parse(["--context_length", "131072", "--batch_size", "8"]).batch_size == 8


BAD_FLAGS = [
    (["--context_lenght", "64"], "unknown flag --context_lenght; did you mean --context_length?"),
    (["--pipeline_parallel_size", "2"], "there is no --pipeline_parallel_size: the last stage would hold the loss"),
    (["--context_length", "0"], "context_length must be between 2 and 134217728, got 0"),
    (["--seed", "9" * 400], "seed must be between 0 and 2147483647, got 999"),
    (["--max_grad_norm", "inf"], "max_grad_norm must be between 1e-12 and 1000000000.0, got inf"),
    (["--weight_decay", "nan"], "weight_decay must be between 0.0 and 10.0, got nan"),
    (["--final_learning_rate_ratio", "1e9"], "final_learning_rate_ratio must be between 0.0 and 1.0, got 1000000000.0"),
    (["--checkpoint_interval", "often"], "checkpoint_interval must be a number of steps, or of minutes as 30min"),
    (["--keep_checkpoints", "0"], "keep_checkpoints must be between 1 and"),
    (["--context_length", "many"], "invalid int value: 'many'"),
    (["--model_size", "5B"], "'5B' (choose from"),
    (["--learning_rate", "-1"], "learning_rate must be between 1e-12 and 1.0, got -1.0"),
    (["--learning_rate", "nan"], "learning_rate must be between 1e-12 and 1.0, got nan"),
    (["--data", "no/such/file.txt"], "no/such/file.txt"),
    (["--attention_type", "nsa", "--dense_below", "99"], "dense_below has no effect with attention_type nsa; drop"),
    (["--attention_type", "nsa", "--selected_blocks", "3"], "selected_blocks must be at least 4, got 3: nsa forces 3"),
    (["--selected_blocks", "16"], "selected_blocks has no effect with attention_type full"),
    (["--selected_blocks=-1", *SPARSE], "selected_blocks must be a number, 0 or more, or"),
    (["--selected_blocks", "auto:16"], "selected_blocks has no effect with attention_type full"),
    (["--selected_blocks", "auto:16", "--attention_type", "nsa"], "auto:16 is for attention_type sparse, not nsa"),
    (
        ["--selected_blocks", "auto:6", *SPARSE],
        "selected_blocks auto:N must have a multiple of 4 as N, as auto:32",
    ),
    (
        ["--selected_blocks", "auto:0", *SPARSE],
        "selected_blocks auto:N must have a multiple of 4 as N, as auto:32",
    ),
    (["--selected_blocks", "auto", *SPARSE], "selected_blocks auto:N must have a multiple of 4 as N, as auto:32"),
    (["--selected_blocks", "auto:4", *SPARSE], "auto:4 has no effect at context_length 64: tokens choose from 832"),
    (["--selected_blocks", "auto:4", *SPARSE, "--context_length", "900"], "this run starts from random ones; give"),
    (["--selected_blocks", "auto:4", *SPARSE, *ANNEALED, "4"], "selected_blocks_start has no effect with selected_bl"),
    (["--selected_blocks_start", "auto:4", "--selected_blocks_steps", "2", *SPARSE], "only --selected_blocks of train"),
    (["--selected_blocks", "8x2,4x1", *SPARSE], "selected_blocks 8x2,4x1 names 3 layers, the model has 4"),
    ([*ANNEALED, "4", "--compile", *SPARSE], "past PyTorch's limit; drop one"),
    (["--selected_blocks_start", "16"], "selected_blocks_start has no effect without an attention_type"),
    (["--selected_blocks_start", "40", *SPARSE], "selected_blocks_start has no effect without selected_blocks_steps"),
    (["--selected_blocks_steps", "40", *SPARSE], "selected_blocks_steps has no effect without selected_blocks_start"),
    ([*ANNEALED, "0", *SPARSE], "selected_blocks_steps must be between 1 and 2147483647, got 0"),
    (
        [*ANNEALED, "4", "--selected_blocks", "8x3,4", *SPARSE],
        "selected_blocks_start 8x2,4 must be above selected_blocks",
    ),
    (
        [*ANNEALED, "4", "--selected_blocks", "8x2,4", *SPARSE],
        "selected_blocks_start 8x2,4 must be above selected_blocks",
    ),
    (["--attention_type", "sparse"], "dense_below 8192 attend to everything; raise the one"),
    (["--attention_backend", "cudnn"], "needs a CUDA device"),
    (["--context_parallel_size", "0"], "context_parallel_size must be between 1 and 1048576, got 0"),
    (["--context_parallel_size", "2"], "context_parallel_size 2 x tensor_parallel_size 1 must divide the number of"),
    (["--memory_budget", "24GB"], "memory_budget has no effect on a CPU"),
    (["--host_budget", "24GB"], "host_budget has no effect on a CPU"),
    (["--collective_timeout", "5"], "collective_timeout has no effect on one process, which waits for nobody; drop it"),
    (["--memory_budget", "24GB", "--gradient_checkpointing"], "no effect with memory_budget"),
    (["--memory_budget", "auto", "--compile"], "compile has no effect with memory_budget; drop one"),
    (["--host_budget", "24GB", "--gradient_checkpointing"], "host_budget has no effect with gradient_checkpointing"),
    (["--host_budget", "24GB", "--compile"], "host_budget has no effect with compile"),
    (["--kernels", "triton"], "needs a CUDA GPU"),
    (["--gradient_accumulation_steps", "1000000"], "lower --gradient_accumulation_steps"),
    (["--config", "no/such.toml"], "no/such.toml"),
    (["--resume"], "no checkpoint in"),
    (["--tokenizer", "no/such.json"], "no/such.json"),
    (["--save", "none", "--checkpoint_interval", "5"], "checkpoint_interval has no effect with save none"),
    (["--save", "none", "--keep_checkpoints", "5"], "keep_checkpoints has no effect with save none"),
    (["--resume", "--init_from", "x"], "init_from has no effect with resume; drop one, or give --resume auto"),
    (["--rope_scaling", "yarn:4"], "rope_scaling has no effect without init_from"),
    (["--packing", "concatenate", "--overlong", "drop"], "overlong has no effect where documents are concatenated"),
    (["--validation_sequences", "0", "--validation_interval", "100"], "validation_interval has no effect without"),
    (["--max_steps", "10", "--warmup_steps", "11"], "warmup_steps 11 is longer than the run of 10 steps"),
    (["--max_steps", "10", "--warmup_steps", "10", "--final_learning_rate_ratio", "0.1"], "ends with its warm-up"),
    ([*ANNEALED, "5", *SPARSE], "selected_blocks_steps 5 is longer than the run of 4 steps, which would never reach"),
    (["--config="], "config is an empty string or has a NUL; give a value, or drop it"),
    (["--output_dir="], "output_dir is an empty string or has a NUL"),
    (["--init_from", "no/such/folder"], "has no config.json"),
]


@pytest.mark.parametrize(("extra", "message"), BAD_FLAGS, ids=[" ".join(e) for e, _ in BAD_FLAGS])
def test_bad_input_is_one_line_before_any_model(extra, message, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.run.build.build_model", lambda *_: pytest.fail("a model was built"))
    status = train.main([*arguments(corpus, tmp_path / "run"), *extra])
    error = capsys.readouterr().err.strip()
    assert status == 1 and error.startswith("error: ") and "\n" not in error and message in error
    assert [file.name for file in (tmp_path / "run").glob("*")] in ([], [".lock"])


def test_a_validation_without_a_token_to_predict_is_refused(tmp_path, capsys):
    line = json.dumps({"prompt": "long " * 100, "completion": "yes"}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 20)
    flags = arguments(
        str(tmp_path / "a.jsonl"), tmp_path / "run", "--validation_fraction", "0.1", "--overlong", "split"
    )
    assert train.main([*flags, "--validation_sequences", "2"]) == 1
    assert "the first 2 held-out sequences have no token to be predicted; raise" in capsys.readouterr().err
    assert train.main([*flags, "--validation_sequences", "20"]) == 0


@pytest.mark.parametrize(
    ("length", "given", "expected"),
    [(512, None, 128), (131_072, None, 8), (2**21, None, 1), (2**21, 0, 0), (2**17, 9, 9)],
)
def test_a_validation_counts_tokens_unless_told_otherwise(length, given, expected):
    config = resume.with_defaults(TrainConfig(context_length=length, validation_sequences=given))
    assert config.validation_sequences == expected


def test_a_validation_says_its_share_of_the_time(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    flags = "--validation_interval", "1", "--sample_tokens", "0"
    assert train.main(arguments(corpus, tmp_path / "run", *flags)) == 0
    lines = metrics(tmp_path / "run")
    assert all(0 < line["validation_share"] < 1 for line in lines)
    assert 0 < sum(line["validation_seconds"] for line in lines) < sum(line["seconds"] for line in lines) + 60
    shown = re.findall(r"nats per byte; validations take (\d+)% of the time", caplog.text)
    assert [int(percent) for percent in shown] == [round(100 * line["validation_share"]) for line in lines]


def test_mfu_counts_neither_padding_nor_the_head_of_masked_tokens(tmp_path, monkeypatch):
    """Each sample fills 31 of a sequence's 64 tokens, 20 of them a prompt's; two are in a sequence, two in a batch."""
    line = json.dumps({"prompt": "q" * 20, "completion": "a" * 10}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 40)
    counted = []
    monkeypatch.setattr(train, "gpu_metrics", lambda amounts, seconds, world: counted.append(amounts[0]) or {})
    flags = arguments(str(tmp_path / "a.jsonl"), tmp_path / "run", "--validation_sequences", "0", steps=1)
    assert train.main(flags) == 0
    assert counted == [forward_flops(MODEL_SIZES["tiny"], [31] * 4, num_targets=4 * 11)]


def test_a_steps_seconds_hold_one_update(corpus, tmp_path, monkeypatch):
    """It is queued between two readings of the clock. Where it goes on afterwards, the next step waits for it."""
    events, step, clock = [], MasterAdamW.step, time.perf_counter
    monkeypatch.setattr(MasterAdamW, "step", lambda *a: events.append("update") or step(*a))
    monkeypatch.setattr(train.time, "perf_counter", lambda: events.append("clock") or clock())
    assert train.main(arguments(corpus, tmp_path / "run", "--save", "none", steps=2)) == 0
    assert events == ["clock", "update", "clock"] * 2


def test_a_plan_that_cannot_be_is_refused_before_the_data_are_read(corpus, tmp_path, monkeypatch, capsys):
    """A 4B on a pretended GPU of 24 GiB: the error names the longest context for documents of any length."""
    monkeypatch.setattr(train, "resolve_memory_budget", lambda config, device: "24GB")
    monkeypatch.setattr("training.run.build.gpu_budget", lambda text, device: 24 * GIB)
    monkeypatch.setattr(train, "load_corpus", lambda *_, **__: pytest.fail("the data were read"))
    flags = [
        "--model_size",
        "4B",
        "--context_length",
        str(2**21),
        "--host_budget",
        "64GB",
        "--attention_backend",
        "cpu",
    ]
    assert train.main(arguments(corpus, tmp_path / "run", *flags)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: context_length 2097152 with batch_size 2 does not fit into 24.00 GiB of GPU and 64")


def test_a_cpu_has_no_plan(corpus, tmp_path):
    assert resolve_memory_budget(TrainConfig(), torch.device("cpu")) is None
    assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["memory_budget"] is None


def test_out_of_memory_is_explained_before_the_one_line(corpus, tmp_path, monkeypatch, capsys):
    def train_step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore than anybody reads.")

    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(train, "explain_out_of_memory", lambda config, plan, device: f"{plan.step.tokens} tokens")
    assert train.main(arguments(corpus, tmp_path / "run")) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == ["128 tokens", "error: CUDA out of memory."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("context_lenght = 5", r"bad.toml: unknown key 'context_lenght'; did you mean context_length\?"),
        ("context_length = 'long'", "bad.toml: argument --context_length: invalid int value: 'long'"),
        ("context_length = true", "bad.toml: argument --context_length: expected one argument"),
        ("data = 1979-05-27", "bad.toml: data must be a word, a number, true, false or a list"),
        ("model_size = '5B'", "bad.toml: argument --model_size: invalid choice: '5B'"),
        ("context_length =", "bad.toml: Invalid value"),
    ],
)
def test_bad_toml_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse(["--config", str(path)])


def test_links_to_themselves_are_one_line(corpus, tmp_path, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for command in (arguments(corpus, loop), arguments(corpus, loop / "run"), arguments(str(loop), tmp_path / "run"),
                    [*arguments(corpus, loop), "--resume", "auto"]):  # fmt: skip
        assert train.main(command) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ") and "\n" not in error and str(loop) in error


def test_a_batch_is_shown_where_a_run_has_been(corpus, tmp_path, capsys):
    """Most people try --show_batch after a run in the same, default, output_dir."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    capsys.readouterr()
    assert train.main(arguments(corpus, run, "--show_batch", "--context_length", "32")) == 0
    assert "of 32 tokens are trained on" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_asked_for_and_absent(corpus, tmp_path, capsys):
    assert train.main([*arguments(corpus, tmp_path / "run"), "--device", "cuda"]) == 1
    assert "PyTorch sees no CUDA GPU" in capsys.readouterr().err


def test_checkpoints_that_do_not_fit_are_refused(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    capsys.readouterr()
    assert train.main(arguments(corpus, run, steps=1)) == 1  # without --resume a run is never run over
    assert "is already there" in capsys.readouterr().err
    assert train.main(arguments(corpus, run, "--resume", steps=1)) == 1
    assert "raise max_steps" in capsys.readouterr().err
    assert train.main(arguments(corpus, run, "--resume", "--model_size", "0.6B", steps=2)) == 1
    assert "of another size" in capsys.readouterr().err
    file = run / "step_00000001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for how in ("yes", "auto"):  # never from the start where there is something to lose
        assert train.main(arguments(corpus, run, "--resume", how, steps=2)) == 1
        error = capsys.readouterr().err
        assert "can be used; of the newest: checkpoint" in error and "model.safetensors is truncated" in error


# train.py in a process that may take 1 GiB of memory beside what its plan pins. The limit also counts pinned pages.
LIMITED = """
import resource, sys, torch, train
from benchmarks.bench_train_step import resident_bytes
from training.run import build

def make_limited_plan(*arguments):
    plan = make_plan(*arguments)
    most = resident_bytes("VmData") + plan.host_bytes + 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        torch.empty(plan.host_bytes + 2**31, dtype=torch.uint8)
    except RuntimeError:
        return plan
    sys.exit("nothing is limited")

make_plan, build.make_plan = build.make_plan, make_limited_plan
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.gpu
def test_a_plan_chooses_compact_state_and_a_resumed_run_keeps_it(tmp_path):
    """Float32 state of the 0.6B takes 6.7 GiB, and within 5 GiB of a GPU the way to the host and back takes time.

    The resumed run may take no more host memory than planned.
    """
    flags = {
        "model_size": "0.6B", "context_length": "512", "batch_size": "2", "memory_budget": "5GB", "host_budget": "12GB",
        "data": str(ROOT / "model.py"), "max_steps": "3", "warmup_steps": "1", "checkpoint_interval": "2",
        "keep_checkpoints": "3", "validation_sequences": "1", "sample_tokens": "0",
    }  # fmt: skip
    run, whole = tmp_path / "run", tmp_path / "whole"
    for folder in (run, whole):
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        subprocess.run([sys.executable, "train.py", *words, "--output_dir", folder], cwd=ROOT, check=True)
    shutil.rmtree(run / "step_00000003")
    words = ["--resume", "--optimizer_state", "auto", "--output_dir", run]
    subprocess.run([sys.executable, "-c", LIMITED, *words], cwd=ROOT, check=True)
    for step in (2, 3):
        assert saved_settings(run, step)["optimizer_state"] == "compact"
        for name in ("model.safetensors", "optimizer.safetensors"):
            ours, theirs = (load_file(folder / f"step_{step:08d}" / name) for folder in (run, whole))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert any(key.endswith("exp_avg_scale") for key in ours)


@pytest.mark.gpu
def test_a_compiled_block_trains_alike_on_a_gpu(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_SIZES, "tiny", replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    for option in ("--gradient_checkpointing", "--compile"):
        assert train.main(arguments(corpus, tmp_path / option, "--device", "cuda", option, steps=2)) == 0
    assert losses(tmp_path / "--compile") == pytest.approx(losses(tmp_path / "--gradient_checkpointing"), rel=0.01)
