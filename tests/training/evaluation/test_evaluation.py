"""`python -m training.evaluation`: from a folder to tables, JSON and pictures."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model import Transformer
from tests.checkpoints import save_checkpoint
from tests.pictures import check_texts
from tests.training.evaluation.test_needle import oracle
from tests.training.generate.test_inference import TINY
from training.data.corpus import open_stores
from training.data.sources import Reading
from training.data.tokenizer import ByteTokenizer
from training.data.tokens import split
from training.evaluation import __main__ as command
from training.evaluation import pictures, positions
from training.evaluation.__main__ import main
from training.evaluation.flags import read_evaluation_flags
from training.families.config_json import to_config_json
from training.families.decide import shape_with
from training.host import errors
from training.host.errors import UserError, pip_install
from training.host.files import only_run_in, only_writer_of
from training.parallel.fsdp import copy_weights, initial_weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a dense and an nsa model, whose runs held out some of the texts, and of these
    texts."""
    root = tmp_path_factory.mktemp("evaluation")
    data = root / "data"
    data.mkdir()
    for i in range(12):
        (data / f"{i}.txt").write_text("".join(f"line {j} of {i * j}\n" for j in range(10 + 5 * i)))
    found = {"data": str(data)}
    for kind, heads in (("full", "qwen3"), ("nsa", "qwen3_nsa")):
        shape = shape_with(kind, replace(TINY, num_hidden_layers=1))
        model = Transformer(shape)
        copy_weights(model, initial_weights(model, seed=0))
        settings = {
            "data": [str(data)],
            "validation_fraction": 0.3,
            "seed": 1,
            "context_length": 256,
        }
        [store] = open_stores(settings["data"], ByteTokenizer(), 256)
        trained_on, _ = split(store, 0.3, seed=1)
        found[kind] = str(save_checkpoint(
            root / kind, 1, weights=model.state_dict(), model_config=to_config_json(shape),
            optimizer_state=None,
            trainer_state={
                "settings": {**settings, "attention_type": kind},
                "loader": {"corpus_crc32": trained_on.identity}
            },
        ))  # fmt: skip
        assert (
            json.loads((root / kind / "step_00000001" / "config.json").read_text())["model_type"]
            == heads
        )
    return found


def run(folder, out, *flags):
    code = main([folder, "--device", "cpu", "--output_dir", str(out), *flags])
    return code, json.loads((out / "evaluation.json").read_text()) if code == 0 else None


def test_losses_and_needles_of_a_checkpoint(folders, tmp_path, capsys):
    """Random weights: every loss is at chance, and no needle is found."""
    flags = "--samples", "2", "--lengths", "150", "300", "450"
    code, found = run(folders["full"], tmp_path / "first", *flags)
    assert code == 0
    [store] = open_stores([folders["data"]], ByteTokenizer(), 256)
    held_out = split(store, 0.3, 1)[1].lengths - 1
    expected = sum(length - math.ceil(length / 256) for length in held_out.tolist())
    rows = found["loss_by_position"]
    assert [row["first"] for row in rows] == [0, 16, 32, 64, 128] and sum(
        row["tokens"] for row in rows
    ) == expected
    assert all(abs(row["loss"] - math.log(256)) < 0.3 for row in rows)
    assert found["key_tokens"]["short_context"] == 64 and found["key_tokens"]["key_tokens"] == 0
    scores = {(row["task"], row["length"]): row["score"] for row in found["tasks"]}
    assert scores == {("needle", 150): None, ("needle", 300): 0, ("needle", 450): 0}
    assert found["is_complete"]
    names = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert names == ["evaluation.json", "loss_by_position.png", "needle_depths.png", "needles.png"]
    out = capsys.readouterr().out
    assert (
        "loss, nats per byte, by the number of bytes before it" in out
    )  # the tokenizer's tokens are bytes
    assert "128 to 255" in out and "\ndepth 25%" in out and "-: too short" in out
    beside = str(tmp_path / "first" / "evaluation.json")
    flags = "--samples", "0", "--evaluator", folders["full"], "--beside", beside, "--sequences", "2"
    code, found = run(folders["nsa"], tmp_path / "second", *flags)
    assert (
        code == 0 and found["tasks"] == [] and f"{rows[2]['loss']:14.4f}" in capsys.readouterr().out
    )


def test_rows_are_read_as_the_run_read_them(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(['{"body": "some text"}'] * 20 + ['{"txt": "bad"}'])
    )
    reading = {"columns": "text=body", "bad_rows": "drop"}
    settings = {
        "data": [str(tmp_path / "a.jsonl")],
        "validation_fraction": 0.3,
        "seed": 1,
        **reading,
    }
    [store] = open_stores(settings["data"], ByteTokenizer(), 256, Reading(**reading))
    trained_on, held_out = split(store, 0.3, seed=1)
    opened = SimpleNamespace(
        tokenizer=ByteTokenizer(),
        shape=TINY,
        settings=settings,
        folder=tmp_path,
        corpus_crc32=trained_on.identity,
    )
    for words in (
        [],
        ["--data", settings["data"][0], "--columns", "text=body", "--bad_rows", "drop"],
    ):
        flags = read_evaluation_flags([str(tmp_path), *words])
        found = command.open_texts(flags, opened, command.settings_of(opened))
        assert found.identity == (store if words else held_out).identity


def test_a_model_that_answers_scores_one(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "write", lambda model, ids, count, stop_ids: oracle(ids, count))
    code, found = run(
        folders["full"], tmp_path, "--sequences", "0", "--samples", "6", "--lengths", "1500"
    )
    assert code == 0 and found["loss_by_position"] == [] and len(found["tasks"]) == 1
    assert all(row["score"] == 1 and row["samples"] == 6 for row in found["tasks"])
    assert capsys.readouterr().out.count("     1.00") == 1 + 5


def test_what_was_finished_before_memory_ran_out_is_written(folders, tmp_path, monkeypatch, capsys):
    asked = []

    def answer(*arguments):
        asked.append(arguments)
        if len(asked) == 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 9.00 GiB.\nMore of it."
            )
        return oracle(*arguments[1:3])

    monkeypatch.setattr(
        command, "write", lambda model, ids, count, stop_ids: answer(model, ids, count)
    )
    flags = "--samples", "1", "--lengths", "1000", "1200", "1400"
    assert run(folders["full"], tmp_path, "--sequences", "2", *flags) == (1, None)
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert [(row["length"], row["score"]) for row in found["tasks"]] == [(1000, 1), (1200, 1)]
    assert found["loss_by_position"] and found["key_tokens"] and not found["is_complete"]
    out, error = capsys.readouterr()
    assert "128 to 255" in out and ["all", "depths", "1.00", "1.00"] in map(
        str.split, out.splitlines()
    )
    assert error.splitlines()[-1] == (
        "error: CUDA out of memory. Tried to allocate 9.00 GiB. Give shorter texts, fewer new "
        "tokens or a larger "
        "--memory_budget, or end what else runs here"
    )


@pytest.mark.parametrize(("flags", "message"), [
    (["--sequences", "0", "--samples", "0"], "leave nothing to evaluate"),
    (["--samples", "0", "--lengths", "300"], "lengths has no effect with samples 0"),
    (["--sequences", "0", "--margin", "1"], "margin has no effect with sequences 0"),
    (["--short_context", "300"], "no text is longer than short_context 300, the longest has 256 "
                                 "tokens"),
    (["--lengths", "20"], "no needle fits 20 tokens"),
    (["--lengths", "0", "300"], "lengths must be between 2 and"),
    (["--margin", "-1"], "margin must be between 0 and"),
    (["--beside", "no/such.json"], "no/such.json is missing or damaged"),
    (["--data", "no/such"], "data path no/such does not exist"),
    (["--memory_budget", "1MB"], "the weights take 0.00 GiB"),
    (["--attention_type", "nsa"], "it has no gates of nsa"),
    (["--evaluator", "no/such"], "no/such does not exist"),
    (["--context_length", str(2**27 + 1)], "context_length must be between 2 and 134217728, got "
                                           "134217729"),
    (["--lengths", "300", "9" * 400], "lengths must be between 2 and 134217728, got 999"),
    (["--margin", "1" + 400 * "0"], "margin must be between 0 and 1000000.0, got inf"),
    (["--output_dir", "{loop}"], "output_dir {loop} cannot be made"),
    (["--output_dir", "{loop}/out"], "Too many levels of symbolic links"),
    (["--beside", "{loop}"], "Too many levels of symbolic links"),
    (["--data", "{loop}"], "data path {loop} does not exist"),
    (["--evaluator", "{loop}"], "{loop} does not exist"),
])  # fmt: skip
def test_bad_input_is_one_line(flags, message, folders, tmp_path, capsys):
    """`loop` is a link to itself."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert run(
        folders["full"], tmp_path, *(flag.replace("{loop}", str(loop)) for flag in flags)
    ) == (1, None)
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (
        message.replace("{loop}", str(loop)) in error
        and not (tmp_path / "evaluation.json").exists()
    )


def test_the_second_of_two_evaluations_into_one_folder_is_refused(folders, tmp_path, capsys):
    with only_writer_of(tmp_path):
        assert run(folders["full"], tmp_path) == (1, None)
    assert (
        f"another process of this command writes into {tmp_path}: wait" in capsys.readouterr().err
    )
    with only_writer_of(tmp_path), only_run_in(tmp_path):  # a run may write there meanwhile
        pass


@pytest.mark.parametrize(
    "flags", [("--lengths", "300", str(2**27)), ("--context_length", str(2**27))]
)
def test_lengths_that_do_not_fit_are_refused_before_a_sample_or_text_is_made(
    flags, folders, monkeypatch, capsys
):
    for name in ("Samples", "open_stores"):
        monkeypatch.setattr(command, name, lambda *_: pytest.fail("texts were made"))
    assert main([folders["full"], "--device", "cpu", "--memory_budget", "1GB", *flags]) == 1
    error = capsys.readouterr().err
    assert (
        "keys and values of 134,217,728 tokens" in error
        and "1.00 GiB are there: give shorter texts" in error
    )


def edited(folder, target, **settings):
    """A copy of a checkpoint whose run had other settings."""
    copied = shutil.copytree(folder, target)
    trainer = json.loads((copied / "trainer.json").read_text())
    trainer["trainer_state"]["settings"] |= settings
    (copied / "trainer.json").write_text(json.dumps(trainer))
    (copied / "manifest.json").unlink()  # it would refuse any edit
    return str(copied)


def test_the_validation_data_of_a_run_are_read(folders, tmp_path):
    """A run with files of its own held out nothing of its data."""
    own = tmp_path / "own.txt"
    own.write_text("a text of its own")
    folder = edited(folders["full"], tmp_path / "copy", data=["gone"], validation_data=[str(own)])
    code, found = run(folder, tmp_path / "out", "--samples", "0")
    assert (
        code == 0
        and sum(row["tokens"] for row in found["loss_by_position"]) == len(own.read_text()) - 1
    )


@pytest.mark.parametrize(("edit", "message"), [
    ({"data": 5}, "data path 5 does not exist"),
    ({"seed": "a"}, "seed: 'a' is not a whole number"),
    ({"seed": None}, "seed is missing"),
    ({"validation_fraction": [1]}, "validation_fraction"),
    ({"context_length": 0}, "context_length must be between 2 and"),
    ({"chat_reasoning": 3}, "chat_reasoning: '3' is not one of template"),
])  # fmt: skip
def test_edited_settings_of_a_run_are_refused(edit, message, folders, tmp_path, capsys):
    assert (
        main(
            [
                edited(folders["full"], tmp_path / "copy", **edit),
                "--device",
                "cpu",
                "--samples",
                "0",
            ]
        )
        == 1
    )
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_what_a_run_held_out_is_not_guessed_from_other_data(folders, tmp_path, capsys):
    more = Path(folders["data"], "more.txt")
    more.write_text("more text\n" * 50)
    try:
        assert run(folders["full"], tmp_path, "--samples", "0") == (1, None)
    finally:
        more.unlink()
    assert (
        "step_00000001's run have changed: which it held out is not known; give --data"
        in capsys.readouterr().err
    )


def test_the_texts_that_weights_of_no_run_are_judged_by_are_named(folders, monkeypatch, caplog):
    [store] = open_stores([folders["data"]], ByteTokenizer(), 256)
    monkeypatch.setattr(command, "open_stores", lambda *_: [store])  # the library has 10 MB
    opened = SimpleNamespace(folder="exported", tokenizer=ByteTokenizer(), shape=TINY)
    other = SimpleNamespace(data=["other"], suffixes=None, columns=None, bad_rows=None)
    assert command.open_texts(other, opened, None).identity == store.identity and not caplog.text
    assert command.open_texts(SimpleNamespace(data=[]), opened, None).identity == store.identity
    assert (
        "data: Python's standard library, because exported is of no run; --data reads others"
        in caplog.text
    )


@pytest.mark.parametrize(
    "rows",
    ['{"loss_by_position": [1], "tasks": []}', '{"loss_by_position": [{"first": 1, "last": 2}], '
                                               '"tasks": []}',
             '{"loss_by_position": [{"first": 1, "last": 2, "loss": "1"}], "tasks": []}',
             '{"loss_by_position": [{"first": -9, "last": -8, "loss": 1}], "tasks": []}',
             '{"loss_by_position": [{"first": 1, "last": 2, "loss": 1' + 400 * "0" + "}], \"tasks\": []}",
             '{"loss_by_position": [], "tasks": [{"task": "needle", "length": 8}]}', "{}"]
)  # fmt: skip
def test_a_file_beside_that_is_no_evaluation(rows, folders, tmp_path, capsys):
    (tmp_path / "other.json").write_text(rows)
    assert run(folders["full"], tmp_path, "--beside", str(tmp_path / "other.json")) == (1, None)
    assert "other.json is no evaluation.json of this command" in capsys.readouterr().err


def test_an_error_has_a_line_of_its_own_below_the_progress_bar(folders, monkeypatch, capsys):
    def fail(*_):
        raise UserError("no more")

    for flags in ([], ["--evaluator", folders["full"]]):
        with monkeypatch.context() as patch:
            patch.setattr(positions, "losses_of", fail)
            assert main([folders["full"], "--device", "cpu", *flags]) == 1
        shown = capsys.readouterr().err
        assert "0%" in shown and shown.endswith("\nerror: no more\n")


def test_without_matplotlib_a_line_says_so(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert run(folders["full"], tmp_path, "--samples", "0", "--sequences", "1")[0] == 0
    shown = capsys.readouterr().err
    assert shown.endswith(
        f"no pictures: a picture needs the package matplotlib: {pip_install('matplotlib')}\n"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["evaluation.json"]


@pytest.mark.parametrize(
    ("share", "samples", "expected"),
    [(0.0, 20, (0.0, 0.1611)), (0.5, 20, (0.2993, 0.7007)), (1.0, 0, (1.0, 1.0))],
)
def test_a_score_of_few_samples_has_a_wide_interval(share, samples, expected):
    assert pictures.interval(share, samples) == pytest.approx(expected, abs=1e-4)


def test_pictures_are_read_at_every_score_and_length(tmp_path, monkeypatch):
    """Numbers on dark cells are white. Lengths are numbers, not powers; no text lies across
    another."""
    drawn = []
    monkeypatch.setattr(pictures, "save_picture", lambda figure, path: drawn.append(figure))
    by_depth = {"0.0": 1.0, "0.25": 0.9, "0.5": 0.5, "0.75": 0.05, "1.0": float("nan")}
    rows = [
        {"length": n, "score": 0.5, "samples": 9, "by_depth": by_depth}
        for n in (4096, 16_384, 131_072)
    ]
    pictures.draw_depths(tmp_path, rows)
    pictures.draw_needles(tmp_path, [("base", rows), ("longer", rows[1:])])
    pictures.draw_losses(
        tmp_path,
        [("a", [{"first": 0, "last": 15, "loss": 3.0}, {"first": 16, "last": 31, "loss": 2.0}])],
    )
    for figure in drawn:
        check_texts(figure)
    shown = [(text.get_text(), text.get_color()) for text in drawn[0].axes[0].texts[::3]]
    assert shown == [
        ("1.00", "white"), ("0.90", "black"), ("0.50", "black"), ("0.05", "white"), ("-", "black")
    ]  # fmt: skip
    for figure, numbers in zip(drawn[1:], (["4,096", "16,384", "131,072"], ["16", "32"])):
        assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == numbers


def test_evaluations_without_a_score_have_no_curve(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "save_picture", lambda figure, path: drawn.append(figure))
    rows = [{"length": 8, "score": None}, {"length": 16, "score": 0.5, "samples": 20}]
    pictures.draw_needles(tmp_path, [("a", rows), ("b", rows[:1])])
    [panel] = drawn[0].axes
    assert [text.get_text() for text in panel.get_legend().texts] == ["a"]


def test_other_tasks_of_an_earlier_evaluation_are_left_out(tmp_path):
    """Versions before 2026-11-27 had five tasks."""
    rows = [
        {"task": name, "length": 8, "score": 0.5, "samples": 20}
        for name in ("needle", "common_words")
    ]
    (tmp_path / "evaluation.json").write_text(json.dumps({"loss_by_position": [], "tasks": rows}))
    [(name, content)] = command.read_earlier([tmp_path / "evaluation.json"])
    assert name == tmp_path.name and content["tasks"] == rows[:1]
