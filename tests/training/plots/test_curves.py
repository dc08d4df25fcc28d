"""Pictures of a run."""

import json
import logging
import re

import pytest
from matplotlib.figure import Figure

from training.evaluation.pictures import draw_losses, draw_needles
from training.host import errors
from training.host.errors import pip_install, program
from training.plots import curves
from training.plots.__main__ import main
from training.plots.curves import as_label, draw_at_end, draw_run, read_metrics


def write_run(folder, steps):
    rows = [
        {"step": i, "loss": 3 - i / 100, "learning_rate": 1e-3, "tokens_per_second": 100.0, "mfu": 0.4,
         "peak_memory_gib": [1.0, 2.0]} for i in range(1, steps + 1)
    ]  # fmt: skip
    rows[-1] |= {"is_spike": True, "validation_loss": 2.5}
    rows[0] |= {"loss": None, "peak_memory_gib": []}
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')


def test_the_command_and_a_runs_end(tmp_path, capsys):
    long, short = tmp_path / "long", tmp_path / "short"
    write_run(long, 25)
    write_run(short, 5)
    draw_at_end(short)  # a few steps are no curve
    assert not (short / "metrics.png").exists()
    draw_at_end(long)
    size = (long / "metrics.png").stat().st_size
    assert size > 10_000
    assert main([str(short)]) == 0 and capsys.readouterr().out == f"{short / 'metrics.png'}\n"
    assert (short / "metrics.png").stat().st_size > 10_000


def test_a_picture_has_no_empty_panel_and_names_what_is_drawn(tmp_path, monkeypatch):
    """A run on a GPU with a spike, a validation and a step left out; a short run on a CPU with nothing of that."""
    drawn = []
    monkeypatch.setattr(curves, "save_picture", lambda figure, path: drawn.append(figure))
    write_run(tmp_path / "long", 45)
    draw_run(tmp_path, read_metrics(tmp_path / "long"))
    draw_run(tmp_path, [{"step": step, "loss": 3.0, "tokens_per_second": 9.0} for step in range(9)])
    on_gpu, on_cpu = ({axes.get_ylabel().split(",")[0]: axes for axes in figure.axes} for figure in drawn)
    assert list(on_gpu) == ["loss", "learning rate", "tokens per second", "peak GPU memory of the fullest rank",
                            "model FLOP utilisation"]  # fmt: skip
    assert list(on_cpu) == ["loss", "tokens per second"] and all(axes.lines for axes in on_gpu.values())
    names = [[text.get_text() for text in each["loss"].get_legend().texts] for each in (on_gpu, on_cpu)]
    assert names == [["training", "training, mean of 2 steps", "validation", "spike", "left out"], ["training"]]
    smooth = on_gpu["loss"].lines[1].get_ydata()
    assert list(smooth[:2]) == pytest.approx([2.98, 2.975])


def test_metrics_of_an_objective_have_panels_of_their_own(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_picture", lambda figure, path: drawn.append(figure))
    rows = [{"step": step, "loss": 0.6, "accuracy": step / 9, "margin": -step, "kl": None} for step in range(9)]
    rows[-1] |= {"validation_accuracy": 0.75, "validation_loss": 0.5}
    for own in ({}, {"tokens_per_second": 9.0, "learning_rate": 0.1}):
        draw_run(tmp_path, [row | own for row in rows])
    names = [[axes.get_ylabel().split(",")[0] for axes in figure.axes] for figure in drawn]
    ours = ["accuracy", "margin of rewards"]
    assert names == [["loss", *ours], ["loss", "learning rate", "tokens per second", *ours]]  # no empty sixth
    training, validation = drawn[0].axes[1].lines
    assert list(training.get_ydata()) == [step / 9 for step in range(9)] and list(validation.get_ydata()) == [0.75]
    assert drawn[0].axes[2].get_ylim()[0] < -8  # margins may be negative


@pytest.mark.parametrize(
    ("content", "unit"),
    [('{"tokenizer": "bytes"}', "byte"), ('{"tokenizer": "Qwen3-4B"}', "token"), (None, "token or byte"),
     ('{"tokenizer": 3}', "token or byte"), ("[", "token or byte")],
)  # fmt: skip
def test_a_loss_is_per_byte_where_the_run_reads_bytes(content, unit, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save_picture", lambda figure, path: drawn.append(figure))
    write_run(tmp_path / "run", 25)
    if content:
        (tmp_path / "run" / "config.json").write_text(content)
    draw_run(tmp_path / "run", read_metrics(tmp_path / "run"))
    assert drawn[0].axes[0].get_ylabel() == f"loss, nats per {unit}"


def test_what_is_refused_and_what_is_a_warning(tmp_path, capsys, monkeypatch, caplog):
    write_run(tmp_path / "run", 25)
    (tmp_path / "run" / "metrics.png").mkdir()
    draw_at_end(tmp_path / "run")
    assert "cannot be drawn" in caplog.text
    for argv, message in (
        ([], "run is missing: output_dir of a run"),
        ([str(tmp_path)], "give the output_dir of a run"),
    ):
        assert main(argv) == 1 and message in capsys.readouterr().err
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    caplog.set_level(logging.INFO)
    draw_at_end(tmp_path / "run")
    install = pip_install("matplotlib")
    assert f"no picture of the curves: {install}, then {program()} -m training.plots" in caplog.text
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: a picture needs the package matplotlib: {install}\n"


NO_NUMBERS = "1" + "0" * 400, "1e999", "NaN", '"x"', "[]", "[[]]", "{}", "true", "null", "-1"


def test_an_edited_file_is_drawn_without_the_values_that_are_no_numbers(tmp_path, capsys):
    write_run(tmp_path / "run", 5)
    file = tmp_path / "run" / "metrics.jsonl"
    names = ["step", "loss", "learning_rate", "tokens_per_second", "mfu", "peak_memory_gib", "is_spike"]
    edited = ["[" * 100_000, "3"]
    for value in NO_NUMBERS:
        edited += [json.dumps({"step": 6, "loss": 2.0, name: "?"}).replace('"?"', value) for name in names]
        edited.append(f'{{"step": 7, "peak_memory_gib": [1.0, {value}]}}')
    file.write_text("\n".join([file.read_text(), *edited]))
    assert main([str(tmp_path / "run")]) == 0 and capsys.readouterr().err == ""


def test_a_picture_on_a_full_disk_is_one_line(tmp_path, capsys):
    write_run(tmp_path / "run", 5)
    (tmp_path / "run" / "metrics.png").symlink_to("/dev/full")
    assert main([str(tmp_path / "run")]) == 1
    assert re.fullmatch("error: [^\n]*No space left on device[^\n]*\n", capsys.readouterr().err)


def test_a_folders_name_is_a_label_as_it_is(tmp_path):
    names = "$x^$", "$", r"a\$b$", "_run", "\udcff\udcfe", "\ud800", "100%", "{x}"
    rows = [{"first": 0, "last": 63, "loss": 2.0}, {"first": 64, "last": 127, "loss": 1.0}]
    draw_losses(tmp_path / "losses.png", [(name, rows) for name in names])
    needles = [{"length": 256, "score": 0.5, "samples": 3}]
    draw_needles(tmp_path / "needles.svg", [(name, needles) for name in names])
    assert (tmp_path / "losses.png").stat().st_size > 10_000 and {p.name for p in tmp_path.iterdir()} == {
        "losses.png", "needles.svg"
    }  # fmt: skip
    figure = Figure()
    axes = figure.subplots()
    for name in names:
        axes.plot([1], label=as_label(name))
    shown = axes.legend().texts
    figure.savefig(tmp_path / "legend.svg", format="svg")
    assert [text.get_text() for text in shown] == [as_label(name) for name in names]
