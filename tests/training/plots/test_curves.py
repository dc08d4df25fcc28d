"""Pictures of a run."""

import json
import logging
import re

import pytest
from matplotlib.figure import Figure

from tests.pictures import check_texts
from training.evaluation.pictures import draw_losses, draw_needles
from training.host import errors
from training.host.errors import pip_install, program
from training.objectives.flags import OBJECTIVES
from training.plots import curves
from training.plots.__main__ import main
from training.plots.curves import as_label, draw_at_end, draw_run
from training.plots.panels import read_metrics


def write_run(folder, steps):
    rows = [
        {
            "step": i,
            "loss": 3 - i / 100,
            "learning_rate": 1e-3,
            "tokens_per_second": 100.0,
            "mfu": 0.4,
            "peak_memory_gib": [1.0, 2.0],
        }
        for i in range(1, steps + 1)
    ]
    rows[-1] |= {"is_spike": True, "validation_loss": 2.5}
    rows[0] |= {"loss": None, "peak_memory_gib": []}
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9'
    )


@pytest.fixture
def drawn(monkeypatch):
    """Figures in place of the files that they would become."""
    figures = []
    monkeypatch.setattr(curves, "save_picture", lambda figure, path: figures.append(figure))
    yield figures
    for figure in figures:
        check_texts(figure)


def titles_of(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


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


def test_a_picture_has_no_empty_panel_and_names_what_is_drawn(tmp_path, drawn):
    """A run on a GPU with a spike, a validation and a step left out; a short run on a CPU with
    nothing of that."""
    write_run(tmp_path / "long", 45)
    draw_run(tmp_path / "long", read_metrics(tmp_path / "long"))
    draw_run(tmp_path, [{"step": step, "loss": 3.0, "tokens_per_second": 9.0} for step in range(9)])
    on_gpu, on_cpu = drawn
    of_gpu = ["learning rate", "tokens per second, padding included", "model FLOP utilisation"]
    assert titles_of(on_gpu) == [
        "loss, nats per token or byte",
        *of_gpu,
        "peak GPU memory, fullest rank, GiB",
    ]
    assert titles_of(on_cpu) == [
        "loss, nats per token or byte",
        "tokens per second, padding included",
    ]
    assert (
        all(axes.lines for axes in on_gpu.axes) and on_cpu.axes[0].get_legend() is None
    )  # one line needs no name
    names = [text.get_text() for text in on_gpu.axes[0].get_legend().texts]
    assert names == ["training", "training, mean of 2 steps", "validation", "spike", "left out"]
    smooth = on_gpu.axes[0].lines[1].get_ydata()
    assert list(smooth[:2]) == pytest.approx([2.98, 2.975])
    assert on_gpu.get_suptitle() == "long" and on_cpu.get_suptitle() == tmp_path.name


@pytest.mark.parametrize("steps", [1, 2, 6, 30])
def test_short_runs_have_one_line_and_whole_steps(steps, tmp_path, drawn):
    """From 20 to 39 steps the mean of a twentieth of the run was the same line, drawn twice."""
    (tmp_path / "config.json").write_text(
        '{"model_size": "tiny", "tokenizer": "bytes", "objective": "next_token"}'
    )
    draw_run(
        tmp_path,
        [{"step": step, "loss": 3.0 / step, "gradient_norm": 1.0} for step in range(1, steps + 1)],
    )
    [figure] = drawn
    assert titles_of(figure) == ["loss, nats per byte", "gradient norm, before clipping"]
    assert figure.get_suptitle() == f"{tmp_path.name}: tiny"
    for axes in figure.axes:
        [line] = axes.lines
        assert steps == 30 or line.get_marker() == "o"  # one step alone is no line
        assert all(tick == round(tick) for tick in axes.get_xticks())


def test_metrics_of_an_objective_have_panels_of_their_own(tmp_path, drawn):
    rows = [
        {"step": step, "loss": 0.6, "accuracy": step / 9, "margin": -step, "kl": None}
        for step in range(9)
    ]
    rows[-1] |= {"validation_accuracy": 0.75, "validation_loss": 0.5}
    rows[3] |= {"reward_chosen": 1.0, "reward_rejected": 2.0}
    for more in ({}, {"tokens_per_second": 9.0, "learning_rate": 0.1}):
        draw_run(tmp_path, [row | more for row in rows])
    loss = "loss, nats per token or byte"
    ours, speed = (
        ["accuracy, share of pairs", "margin of rewards", "reward of answers"],
        "tokens per second",
    )
    assert titles_of(drawn[0]) == [loss, *ours]
    assert titles_of(drawn[1]) == [loss, "learning rate", f"{speed}, padding included", *ours]
    training, validation = drawn[0].axes[1].lines
    assert list(training.get_ydata()) == [step / 9 for step in range(9)] and list(
        validation.get_ydata()
    ) == [0.75]
    assert drawn[0].axes[2].get_ylim()[0] < -8  # margins may be negative
    assert [text.get_text() for text in drawn[0].axes[3].get_legend().texts] == [
        "chosen",
        "rejected",
    ]


@pytest.mark.parametrize(
    ("content", "label"),
    [
        ('{"tokenizer": "bytes"}', "loss, nats per byte"),
        ('{"tokenizer": "Qwen3-4B"}', "loss, nats per token"),
        ('{"tokenizer": "Qwen3-4B", "objective": "next_token"}', "loss, nats per token"),
        *((json.dumps({"tokenizer": "bytes", "objective": name}), f"loss ({name})") for name in OBJECTIVES[1:]),
        *((broken, "loss, nats per token or byte") for broken in (None, '{"tokenizer": 3}', "[", '{"objective": 3}')),
    ],
)  # fmt: skip
def test_a_loss_is_named_by_its_objective_and_its_unit(content, label, tmp_path, drawn):
    if content:
        (tmp_path / "config.json").write_text(content)
    draw_run(tmp_path, [{"step": 1, "loss": 2.0}])
    assert titles_of(drawn[0]) == [label]


def test_padding_counts_only_where_it_is_said(tmp_path, drawn):
    """Runs of earlier versions have one speed, with padding; of data without padding both are one
    line."""
    speeds = {"tokens_per_second": 100.0, "text_tokens_per_second": 60.0}
    for own in (speeds, speeds | {"text_tokens_per_second": 100.0}, {"tokens_per_second": 100.0}):
        draw_run(tmp_path, [{"step": step, **own} for step in range(9)])
    texts, without, earlier = (figure.axes[0] for figure in drawn)
    assert texts.get_title(loc="left") == "tokens per second, without padding"
    assert [(line.get_label(), line.get_ydata()[0]) for line in texts.lines] == [
        ("without padding", 60.0), ("padding included", 100.0)
    ]  # fmt: skip
    assert [list(line.get_ydata()) for line in without.lines] == [[100.0] * 9]
    assert earlier.get_title(loc="left") == "tokens per second, padding included"


@pytest.mark.parametrize("count", [5, 6, 60, 2000])
def test_an_outlier_does_not_flatten_an_axis(count, tmp_path, drawn):
    """One slow step among steady ones, one large norm, one spike of the loss: each is counted, or
    has a cross."""
    rows = [
        {
            "step": step,
            "loss": 2 + 0.1 * (step % 3),
            "text_tokens_per_second": 9000.0 + 50 * (step % 3),
            "gradient_norm": 1 + 0.1 * (step % 3),
            "mfu": 0.4 + 0.01 * (step % 3),
        }
        for step in range(1, count + 1)
    ]
    rows[0] |= {"text_tokens_per_second": 30.0, "mfu": 0.001}
    rows[3] |= {"gradient_norm": 500.0, "loss": 300.0, "is_spike": True}
    draw_run(tmp_path, rows)
    heights = {axes.get_title(loc="left"): axes.get_ylim() for axes in drawn[0].axes}
    assert heights.keys() == {
        "loss, nats per token or byte (1 off the axis)",
        "gradient norm, before clipping (1 off the axis)",
        "tokens per second, without padding (1 off the axis)",
        "model FLOP utilisation (1 off the axis)",
    }  # fmt: skip
    for (low, high), (least, most) in zip(
        heights.values(), ((1, 3), (0, 2), (8000, 10_000), (0.3, 0.5))
    ):
        assert least < low < high < most
    spike = next(line for line in drawn[0].axes[0].lines if line.get_label().startswith("spike"))
    assert (
        spike.get_label() == "spike, up to 300"
        and spike.get_ydata()[0] < heights.popitem()[1][1] + 3
    )


def test_a_steady_or_wide_curve_has_no_outlier(tmp_path, drawn):
    norms = [10 / step for step in range(1, 50)], [3.0] * 9, [0.0] * 9, [1.0, 50.0], [7.0]
    for values in norms:
        draw_run(
            tmp_path, [{"step": step, "gradient_norm": value} for step, value in enumerate(values)]
        )
    for figure, values in zip(drawn, norms):
        assert titles_of(figure) == ["gradient norm, before clipping"]
        low, high = figure.axes[0].get_ylim()
        assert low <= min(values) and max(values) < high


def test_runs_share_a_picture_each_in_its_colour(tmp_path, drawn, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, objective in (("one/a", "dpo"), ("two/a", "dpo"), ("two/b", "next_token")):
        folder = tmp_path / name
        folder.parent.mkdir(exist_ok=True)
        write_run(folder, 45)
        (folder / "config.json").write_text(
            json.dumps({"objective": objective, "tokenizer": "bytes"})
        )
    assert main(["one/a", "two/a"]) == 0 and main(["one/a", "two/b", "--out", "both.svg"]) == 0
    assert capsys.readouterr().out == "runs.png\nboth.svg\n"
    alike, unlike = drawn
    assert alike.get_suptitle() == "one/a and two/a" and titles_of(alike)[0] == "loss (dpo)"
    names = [text.get_text() for text in alike.axes[0].get_legend().texts]
    assert names == ["one/a", "one/a, validation", "two/a", "two/a, validation"]
    assert [line.get_color() for line in alike.axes[0].lines] == ["C0", "C0", "C1", "C1"]
    assert titles_of(unlike)[0] == "loss" and len(unlike.axes[1].lines) == 2
    names = [text.get_text() for text in unlike.axes[0].get_legend().texts]
    assert names[::2] == ["a: loss (dpo)", "b: loss, nats per byte"]


def test_runs_that_cannot_share_a_picture_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", 5)
    write_run(tmp_path / "b", 5)
    for words, message in (
        (["a", "a/"], "a run is given twice: a a; give each once"),
        (["a", "none"], "none/metrics.jsonl"),
        (["a", "b", "--out", "x.jpg"], "out x.jpg is none of .png, .svg, .pdf"),
        (["a", "b", "--out", "no/x.png"], "--out 'no/x.png' cannot be written to"),
        (["a", "--out", "x.png"], "out has no effect with one run"),
    ):  # fmt: skip
        assert main(words) == 1 and message in capsys.readouterr().err
    assert (
        not [*tmp_path.glob("*.png")]
        and main(["a", "b"]) == 0
        and (tmp_path / "runs.png").stat().st_size > 10_000
    )


def test_what_is_refused_and_what_is_a_warning(tmp_path, capsys, monkeypatch, caplog):
    write_run(tmp_path / "run", 25)
    (tmp_path / "run" / "metrics.png").mkdir()
    draw_at_end(tmp_path / "run")
    assert "cannot be drawn" in caplog.text
    for argv, message in (
        ([], "run is missing: output_dir of a run"),
        ([str(tmp_path / "none")], "give the output_dir of a run\n"),
        ([str(tmp_path)], f"give the output_dir of a run, as {tmp_path / 'run'}\n"),
        (
            [str(tmp_path / "run" / "metrics.jsonl")],
            f"give the output_dir of a run, as {tmp_path / 'run'}\n",
        ),
        (
            [str(tmp_path / "run" / "step_00000025")],
            f"give the output_dir of a run, as {tmp_path / 'run'}\n",
        ),
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
    names = [
        "step",
        "loss",
        "learning_rate",
        "tokens_per_second",
        "mfu",
        "peak_memory_gib",
        "is_spike",
    ]
    edited = ["[" * 100_000, "3"]
    for value in NO_NUMBERS:
        edited += [
            json.dumps({"step": 6, "loss": 2.0, name: "?"}).replace('"?"', value) for name in names
        ]
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
    assert (tmp_path / "losses.png").stat().st_size > 10_000 and {
        p.name for p in tmp_path.iterdir()
    } == {"losses.png", "needles.svg"}
    figure = Figure()
    axes = figure.subplots()
    for name in names:
        axes.plot([1], label=as_label(name))
    shown = axes.legend().texts
    figure.savefig(tmp_path / "legend.svg", format="svg")
    assert [text.get_text() for text in shown] == [as_label(name) for name in names]
