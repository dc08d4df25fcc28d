"""metrics.jsonl and other writers, lines of steps, the log file: none of them ends a run."""

import contextlib
import importlib
import json
import logging
import re
import sys
import time
from dataclasses import asdict, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training.host import errors
from training.host.errors import UserError, pip_install
from training.run.metrics import (
    Display,
    Metrics,
    also_logged_into,
    is_spike,
    jsonl_writer,
    open_metrics,
    own_amounts,
    set_aside,
    summed_metrics,
)
from training.run.recipe import Outputs
from training.run.settings import TrainConfig, check_config, differing


@pytest.mark.parametrize(
    "given",
    [{}, {"weight_decay": 0.2, "max_steps": 7}, {"context_length": 32_768, "model_size": "4B", "data": ["corpus"]},
     {"init_from": "x", "lora": 8, "lora_alpha": 32.0},
     {"init_from": "x", "lora": 8, "learning_rate": 1e-3}],
)  # fmt: skip
def test_the_settings_that_are_shown_differ_from_defaults(given):
    """What a run fills in by itself is no difference, such as the learning rate, the steps and
    adapters' targets."""
    config = TrainConfig(**given)
    found = {"max_steps": config.steps, "optimizer_state": "float32", "memory_budget": "auto"}
    assert differing(asdict(config) | found | {"tokenizer": config.tokenizer or "bytes"}) == given


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_past_the_checkpoint_and_damaged_ones_are_dropped(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    damaged = ["\0\0", "7", '{"step": 1e999}', "[" * 200_000, "{}"]
    path.write_bytes("\n".join([*lines[:2], *damaged, lines[2], lines[0][:-5]]).encode() + b"\xff")
    write = jsonl_writer(path, from_step=2)
    assert steps_in(path) == [1, 2]  # on disk before the first step ends
    assert caplog.messages == [f"{path}: 6 of 9 lines are damaged and were dropped"]
    write({"step": 3})
    assert steps_in(path) == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_earlier_runs_lines_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for run in (1, 2, 3):
        set_aside(path)
        jsonl_writer(path, from_step=0)({"step": run})
    assert [steps_in(path.with_name(f"metrics{n}.jsonl")) for n in ("", ".1", ".2")] == [
        [3],
        [1],
        [2],
    ]


def test_a_rewrite_that_fails_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')

    def fail(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk on fire"):
        jsonl_writer(path, from_step=1)
    assert steps_in(path) == [1]


def test_a_writer_that_fails_is_a_warning(caplog):
    """A full disk may have room later: of steps 1, 2 and 4 it is said twice. What fails otherwise
    is given up."""
    caplog.set_level(logging.WARNING)
    got, full = [], Path("/dev/full").open("w")  # noqa: SIM115

    def write_to_full_disk(values):
        if values["step"] != 3:
            full.write("x")
            full.flush()

    def fail(values):
        raise OSError("a timeout") if values["step"] == 1 else RuntimeError("the server is gone")

    metrics = Metrics({"disk": write_to_full_disk, "W": fail, "list": got.append})
    for step in (1, 2, 3, 4):
        metrics.write(step=step)
    assert got == [{"step": step} for step in (1, 2, 3, 4)]
    disk = "cannot be written to disk: [Errno 28] No space left on device"
    assert caplog.messages == [
        f"step 1 {disk}", "step 1 cannot be written to W: a timeout",
        "step 2 cannot be written to W: the server is gone", "nothing more is written to W",
        f"step 4 {disk}",
    ]  # fmt: skip


def test_a_spike_stands_out_of_what_came_before():
    recent = [3.0 + 0.01 * (i % 5) for i in range(20)]
    assert is_spike(3.2, recent) and not is_spike(3.06, recent)
    assert not is_spike(9.0, recent[:19]) and not is_spike(float("nan"), recent)


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    """A list gives its largest number; other values are left out. A stand-in is the writer: the
    package is optional."""
    calls = []
    writer = SimpleNamespace(
        add_scalar=lambda *call: calls.append(call), flush=lambda: calls.append("flushed")
    )

    def make(folder, purge_step):
        calls.append((folder, purge_step))
        return writer

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    metrics = open_metrics(
        Outputs(tmp_path, True, {"tensorboard": True}), {}, 4, contextlib.ExitStack()
    )
    metrics.write(
        step=5,
        loss=2.5,
        peak_memory_gib=[1.0, 3.0],
        selected_blocks="8",
        validation_loss=None,
    )
    assert calls == [
        (str(tmp_path / "tensorboard"), 5),
        ("loss", 2.5, 5),
        ("peak_memory_gib", 3.0, 5),
        "flushed",
    ]


FAKE_WANDB = """
import json, pathlib
calls = []

class Run:
    id = "r1"
    def __getattr__(self, name):
        return lambda *words, **options: calls.append((name, words, options))

def init(**options):
    if options["project"] == "closed":
        raise RuntimeError("no login")
    calls.append(("init", options))
    return Run()
"""


def test_weights_and_biases_gets_the_numbers_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    """A stand-in has the calls that are made; wandb 0.31.0 itself was tried offline, with a run and
    a resumed run."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    wandb = importlib.import_module("wandb")
    monkeypatch.setitem(sys.modules, "wandb", sys.modules.pop("wandb"))  # until the test ends
    cached = "/home/alice/hub/models--Qwen--Qwen3-4B/snapshots/1"
    paths = {
        "data": ["/home/alice/a.txt", "b.txt"],
        "init_from": cached,
        "log_file": "/home/alice/log",
    }
    settings = asdict(TrainConfig(output_dir=str(tmp_path / "run"), wandb="p", **paths))
    outputs = Outputs(tmp_path / "run", False, {"wandb": "p"})
    (tmp_path / "run").mkdir()
    for goes_on, error in ((False, None), (True, ValueError("a defect"))):
        with contextlib.suppress(ValueError), contextlib.ExitStack() as stack:
            metrics = open_metrics(replace(outputs, goes_on=goes_on), settings, 0, stack)
            metrics.write(step=1, loss=2.5, peak_memory_gib=[1.0, 3.0], selected_blocks="8")
            if error:
                raise error
    (_, first), *calls = wandb.calls[:4]
    assert (first["project"], first["dir"], first["id"]) == ("p", str(tmp_path / "run"), None)
    names = {
        "data": ["a.txt", "b.txt"],
        "init_from": "Qwen/Qwen3-4B",
        "log_file": "log",
        "output_dir": "run",
    }
    assert first["config"].items() >= names.items() and "alice" not in json.dumps(first["config"])
    assert (
        first["config"]["learning_rate"] == settings["learning_rate"] and first["resume"] == "allow"
    )
    assert calls == [
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"step": 1, "loss": 2.5, "peak_memory_gib": 3.0},), {}),
        ("finish", (), {"exit_code": 0}),
    ]  # fmt: skip
    assert wandb.calls[4][1]["id"] == "r1" and wandb.calls[-1] == ("finish", (), {"exit_code": 1})
    with pytest.raises(
        UserError,
        match=r"^--wandb closed: no login; log in with `.*/wandb login`, set WANDB_MODE=off",
    ):
        closed = replace(outputs, trackers={"wandb": "closed"})
        open_metrics(closed, settings, 0, contextlib.ExitStack())
    file, resumed = tmp_path / "run" / "wandb_id", replace(outputs, goes_on=True)
    file.write_bytes(b"r\xff\n")  # edited, or damaged
    with contextlib.ExitStack() as stack:
        open_metrics(resumed, settings, 0, stack)
    assert wandb.calls[-3][1]["id"] == "r\ufffd"
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"wandb_id: it is no regular file; delete it$"):
        open_metrics(resumed, settings, 0, contextlib.ExitStack())


def test_trackio_gets_the_numbers_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    """A stand-in has trackio's signatures, and so refuses what only wandb takes."""
    calls = []

    def init(project, name=None, config=None, resume="never"):
        if project == "closed":
            raise RuntimeError("no disk")
        calls.append((project, name, config["seed"], resume))
        log = lambda metrics, step=None: calls.append((metrics, step))  # noqa: E731
        return SimpleNamespace(
            name=name or "sunset-0", id="1", log=log, finish=lambda: calls.append("finished")
        )

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    settings = asdict(TrainConfig(output_dir=str(tmp_path), trackio="p", seed=3))
    outputs = Outputs(tmp_path, False, {"trackio": "p"})
    for goes_on, step in ((False, 1), (True, 2)):
        with contextlib.ExitStack() as stack:
            metrics = open_metrics(replace(outputs, goes_on=goes_on), settings, step - 1, stack)
            metrics.write(step=step, loss=2.5, peak_memory_gib=[1.0, 3.0], selected_blocks="8")
    numbers = {"loss": 2.5, "peak_memory_gib": 3.0}
    first, second = ("p", None, 3, "allow"), ("p", "sunset-0", 3, "allow")
    assert calls == [first, (numbers, 1), "finished", second, (numbers, 2), "finished"]
    with pytest.raises(UserError, match=r"^--trackio closed: no disk; drop it$"):
        closed = replace(outputs, trackers={"trackio": "closed"})
        open_metrics(closed, settings, 0, contextlib.ExitStack())


def test_packages_that_are_missing_are_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # a folder of logs is no package
    monkeypatch.setattr(
        errors, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)])
    )
    for flags in ({"tensorboard": True}, {"wandb": "p"}, {"trackio": "p"}):
        [name] = flags
        with pytest.raises(
            UserError, match=f"^--{name} needs the package {name}: {pip_install(name)}$"
        ):
            check_config(TrainConfig(**flags), [])


VALUES = {
    "loss": 3.21,
    "tokens_per_second": 5634.2,
    "text_tokens_per_second": 5634.2,
    "seconds": 35.23,
}


def test_without_a_terminal_a_step_is_a_line_of_the_log(monkeypatch, caplog):
    """The clock says 0 s at the start, and the end of step 11 is 100 s later; steps 13 and 14 are
    too fast to show."""
    caplog.set_level(logging.INFO)
    ends = iter([0.0, 100.0, 200.0, 200.4, 200.8, 200.9])
    monkeypatch.setattr(time, "monotonic", lambda: next(ends))
    with Display(10, 15, is_main=True, unit="nats per byte") as display:
        for step in range(11, 16):
            display.show({"step": step, **VALUES, **({"loss": None} if step == 12 else {})})
        display.show_validation({"step": 15, "validation_loss": 2.5, "validation_share": 0.061})
    assert caplog.messages == [
        "step 11/15: loss 3.210, 5,634 tokens/s, 35.2 s, ETA 06:40",
        "step 12/15: loss left out, 5,634 tokens/s, 35.2 s, ETA 05:00",
        "step 15/15: loss 3.210, 5,634 tokens/s, 35.2 s, ETA 00:00",
        "step 15: validation loss 2.5000 nats per byte; validations take 6% of the time",
    ]


def test_the_line_of_a_step_names_its_objective_and_what_counts(monkeypatch, caplog):
    """Accuracy and margin of pairs stand in it. A speed without padding has the speed with padding
    beside it."""
    caplog.set_level(logging.INFO)
    speeds = {
        "loss": 0.6931,
        "seconds": 2.0,
        "tokens_per_second": 5634.2,
        "text_tokens_per_second": 3100.7,
    }
    for objective, more, shown in (
        ("dpo", {"accuracy": 0.625, "margin": 0.0123, "reward_chosen": 1.0, "reward_rejected": 0.9},
         "accuracy 62.5%, margin 0.012"),
        ("kto", {"kl": 0.01, "reward_chosen": 0.5, "reward_rejected": -0.25},
         "reward chosen 0.500, reward rejected -0.250, kl 0.0100"),
        ("ipo", {"accuracy": 0.0, "margin": -1e-9}, "accuracy 0.0%, margin 0.000"),
        ("dapo", {"clip_share": 0.02, "old_difference": 0.1, "entropy": 0.3}, "clip share 2.0%, entropy 0.300"),
    ):  # fmt: skip
        caplog.clear()
        validation = {f"validation_{name}": value for name, value in more.items()}
        with Display(0, 1, is_main=True, unit="", objective=objective) as display:
            values = {
                "step": 1,
                **speeds,
                **more,
                **validation,
                "validation_loss": 0.5,
                "validation_share": 0.1,
            }
            display.show(values)
        assert caplog.messages == [
            f"step 1/1: loss ({objective}) 0.693, {shown}, 3,101 tokens/s, 5,634 with padding, 2.0 "
            "s, ETA 00:00",
            f"step 1: validation loss ({objective}) 0.5000, {shown}; validations take 10% of the "
            "time",
        ]


def test_tokens_of_texts_are_counted_once_for_ranks_that_share_them():
    """Four ranks, of which two share a sequence: 2 x (30 + 50) tokens in two seconds."""
    world = SimpleNamespace(
        device=torch.device("cpu"), size=4, rank=1, context_size=2, tensor_size=1
    )
    assert own_amounts(5.0, 30, world) == [5.0, 30, 0.0, 0.0, 0.0, 0.0]
    summed = summed_metrics([0.0, 30 + 30 + 50 + 50, *[0.0] * 4], 2.0, world)
    assert summed == {"text_tokens": 80, "text_tokens_per_second": 40.0}


def test_the_log_file_has_what_is_printed_and_the_bars_steps_as_lines(
    tmp_path, monkeypatch, capsys, caplog
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    caplog.set_level(logging.INFO)
    logger, file = logging.getLogger("train"), tmp_path / "new" / "log.txt"
    for error in (UserError("no more"), ValueError("a defect")):
        with contextlib.suppress(ValueError), also_logged_into(str(file)):
            logger.info("begun")
            with Display(0, 9, is_main=True) as display:
                display.show({"step": 1, **VALUES})
            raise error
        logger.info("not in the file")
    lines = [
        re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", "", line)
        for line in file.read_text().splitlines()
    ]
    step = "step 1/9: loss 3.210, 5,634 tokens/s, 35.2 s, ETA 00:00"
    assert (
        lines[:4] == ["begun", step, "error: no more", "begun"]
        and lines[-1] == "ValueError: a defect"
    )
    assert "1/9" in capsys.readouterr().err
    for wrong, why in ((tmp_path, "Is a directory"), (file / "x", "Not a directory")):
        with pytest.raises(UserError, match=f"^--log_file '{wrong}' cannot be written to: {why}"):
            also_logged_into(str(wrong)).__enter__()
