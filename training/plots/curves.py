"""Draws curves of runs with Matplotlib; panels.py says which curves there are."""

import logging
from pathlib import Path

from training.host.errors import import_optional, is_installed, pip_install, program
from training.host.files import replacing
from training.plots.panels import Curve, Panel, panels_of, panels_of_runs, read_metrics, settings_of

logger = logging.getLogger(__name__)
FEWEST_STEPS = 20  # a run of fewer steps has no picture at its end
FEW_POINTS = 30  # so many points of a line are seen as points, too: one alone is no line


def draw_run(run: Path, rows: list[dict]) -> Path:
    """Draws what a run has numbers of, by step; returns the picture's path."""
    settings = settings_of(run)
    path = run / "metrics.png"
    _draw(path, title_of(run, settings), panels_of(rows, settings))
    return path


def draw_runs(path: Path, runs: list[Path]) -> None:
    """Draws several runs, each in its colour, into one picture."""
    by_name = {name: (read_metrics(run), settings_of(run)) for name, run in names_of(runs).items()}
    title = " and ".join(by_name) if len(by_name) < 4 else f"{len(by_name)} runs"
    _draw(path, title, panels_of_runs(by_name))


def names_of(runs: list[Path]) -> dict[str, Path]:
    """Returns the folders by the shortest ends of their paths that differ, as "one/a", "two/a"."""
    absolute = [run.absolute() for run in runs]
    longest = max(len(run.parts) for run in absolute)
    for count in range(1, longest + 1):
        names = [str(Path(*run.parts[-count:])) for run in absolute]
        if len({*names}) == len({*absolute}):
            break
    return dict(zip(names, runs))


def title_of(run: Path, settings: dict) -> str:
    """Returns the name of a run's folder, and which model is trained: "default: tiny"."""
    model = settings.get("model_size") or settings.get("init_from")
    name = Path(model).name if isinstance(model, str) else ""
    if settings and not name:
        name = "tiny"
    return ": ".join(filter(None, (run.absolute().name, name)))


def _draw(path: Path, title: str, panels: list[Panel]) -> None:
    figures = import_optional("matplotlib.figure", "a picture")
    columns = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns) or 1
    figure = figures.Figure(figsize=(12, 3.5 * lines if lines > 1 else 4), layout="constrained")
    every_axes = [*figure.subplots(lines, columns, squeeze=False).flat]
    for empty in every_axes[len(panels) :]:
        empty.remove()
    for axes, panel in zip(every_axes, panels):
        _draw_panel(axes, panel)
    figure.suptitle(as_label(title))
    save_picture(figure, path)


def _draw_panel(axes, panel: Panel) -> None:
    axes.set_title(as_label(panel.title), fontsize=9, loc="left")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for curve in panel.curves:
        axes.plot(curve.steps, curve.values, **_style(curve))
    for number, step in enumerate(panel.left_out):
        axes.axvline(step, color="r", linewidth=0.5, label="left out" if number == 0 else None)
    if panel.low is not None or panel.high is not None:
        axes.set_ylim(*panel.limits)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=8)


def _style(curve: Curve) -> dict:
    """Returns Matplotlib's options of a curve."""
    options = {"label": as_label(curve.label), "color": f"C{curve.color % 10}", "linewidth": 1.2}
    if curve.kind == "dashed":
        options["linestyle"] = "--"
    if curve.kind == "faint":
        options |= {"linewidth": 0.8, "alpha": 0.4}
    if curve.kind == "dots" or (curve.kind == "line" and len(curve.steps) < FEW_POINTS):
        options |= {"marker": "o", "markersize": 5 if curve.kind == "dots" else 3}
    if curve.kind == "crosses":
        options |= {"marker": "x", "linestyle": "", "color": "r"}
    return options


def save_picture(figure, path: Path) -> None:
    """Writes a Matplotlib figure as a whole, in the format of the path's suffix."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:])


def as_label(name: str) -> str:
    """Returns a folder's name as Matplotlib shows it: "$x^$" is no formula.

    Bytes that are no text are escaped. A space goes before "_": Matplotlib leaves labels that begin
    so out of legends.
    """
    shown = name.encode(errors="backslashreplace").decode().replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def draw_at_end(run: Path) -> None:
    """Draws a finished run that is long enough; without Matplotlib says how to install it."""
    try:
        rows = read_metrics(run)
        if len(rows) < FEWEST_STEPS:
            return
        if is_installed("matplotlib"):
            logger.info("curves: %s", draw_run(run, rows))
        else:
            install, draw = pip_install("matplotlib"), f"{program()} -m training.plots {run}"
            logger.info("no picture of the curves: %s, then %s", install, draw)
    except Exception as error:  # a run that has ended well does not fail for its picture
        logger.warning("the curves of %s cannot be drawn: %s", run, error)
