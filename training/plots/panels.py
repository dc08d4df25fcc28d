"""Curves of runs as plain numbers, panel by panel, from the rows of metrics.jsonl."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from training.host.errors import UserError
from training.host.files import read_file, read_json

LARGEST_NUMBER = 1e300  # Matplotlib overflows beyond it; somebody may have edited the file
STEPS_PER_SMOOTHED = 20  # the smoothed loss is a mean over a twentieth of the run
FEWEST_WITH_OUTLIERS = 4  # values of a curve
TRAINING, VALIDATION, WITHOUT_PADDING = "training", "validation", "without padding"
GRADIENT_NORM, MFU = "gradient norm, before clipping", "model FLOP utilisation"
TEXTS_SPEED = "tokens per second, without padding"
PADDED_SPEED = "tokens per second, padding included"
ROBUST = {GRADIENT_NORM, MFU, TEXTS_SPEED, PADDED_SPEED}  # panels whose outliers leave the axis
# Curves of one panel, each with its name in the legend; the panel's label stands beside its axis.
OBJECTIVES_PANELS: dict[str, dict[str, str]] = {
    "accuracy, share of pairs": {"accuracy": TRAINING, "validation_accuracy": VALIDATION},
    "margin of rewards": {"margin": TRAINING, "validation_margin": VALIDATION},
    "reward of answers": {"reward_chosen": "chosen", "reward_rejected": "rejected"},
    "divergence from the reference, nats": {"kl": TRAINING, "validation_kl": VALIDATION},
    "clipped tokens, share": {"clip_share": TRAINING, "validation_clip_share": VALIDATION},
    "entropy, nats": {"entropy": TRAINING, "validation_entropy": VALIDATION},
    "fullest expert ÷ mean": {"expert_load": TRAINING, "validation_expert_load": VALIDATION},
}


@dataclass
class Curve:
    """Values by step. A line is faint behind its smoothed form; dots are joined; crosses are not.

    A second line of the same colour is dashed.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    kind: str = "line"  # or "dashed", "faint", "dots", "crosses"
    color: int = 0  # 0: training; 1: validation; with several runs the run's number


@dataclass
class Panel:
    """Curves over one axis of steps.

    Attributes:
        left_out: steps whose loss or gradient was not finite, and which were left out.
        low, high: limits of the axis; None: what the values need.
        outside: values beyond the limits.
    """

    label: str
    curves: list[Curve]
    left_out: list[float] = field(default_factory=list)
    low: float | None = None
    high: float | None = None
    outside: int = 0

    @property
    def title(self) -> str:
        """Returns the label, and how many values the axis leaves out."""
        return f"{self.label} ({self.outside} off the axis)" if self.outside else self.label

    @property
    def limits(self) -> tuple[float, float]:
        """Returns both ends of the axis, which differ."""
        values = [value for curve in self.curves for value in curve.values]
        low = min(values, default=0.0) if self.low is None else self.low
        high = max(values, default=1.0) if self.high is None else self.high
        margin = _margin(low, high)
        return low - margin * (self.low is None), high + margin * (self.high is None or high == low)


def read_metrics(run: Path) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl without damaged ones.

    Raises UserError where there is none.
    """
    file = run / "metrics.jsonl"
    near = [run.parent / file.name, *run.glob(f"*/{file.name}")]
    runs = sorted(path.parent for path in near if path.is_file())
    advice = "give the output_dir of a run"
    if runs:
        advice += f", as {runs[0]}"
    lines = read_file(file, advice).decode(errors="replace").splitlines()
    rows = [row for row in map(parse_line, lines) if row]
    if not rows:
        raise UserError(f"{file} has no step yet; give the output_dir of a run")
    return rows


def parse_line(line: str) -> dict | None:
    """Returns the metrics of a line, which have a step; None of a damaged line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_number(row.get("step")) else None


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and abs(value) < LARGEST_NUMBER


def points(rows: Iterable[dict], name: str) -> tuple[list[int], list[float]]:
    """Returns the steps that have a number of this name, and the numbers."""
    with_number = [row for row in rows if is_number(row.get(name))]
    return [row["step"] for row in with_number], [row[name] for row in with_number]


def settings_of(run: Path) -> dict:
    """Returns the settings in a run's config.json; none if it is missing or damaged."""
    try:
        return read_json(run / "config.json")
    except UserError:
        return {}


def objective_of(settings: dict) -> str | None:
    """Returns the objective of a run's settings; None if they do not tell.

    Runs before 0.6.0 had next_token alone.
    """
    objective = settings.get("objective", "next_token" if settings else None)
    return objective if isinstance(objective, str) else None


def loss_in_words(objective: str | None) -> str:
    """Returns "loss" of next tokens, and "loss (dpo)" of another objective."""
    return "loss" if objective in (None, "next_token") else f"loss ({objective})"


def unit_of(settings: dict) -> str:
    """Returns a loss's unit: "nats per token" or byte; "" for objectives, whose units differ."""
    objective, tokenizer = objective_of(settings), settings.get("tokenizer")
    if objective not in (None, "next_token"):
        return ""
    if objective is None or not isinstance(tokenizer, str):
        return "nats per token or byte"
    return "nats per byte" if tokenizer == "bytes" else "nats per token"


def loss_label(settings: dict) -> str:
    """Returns the label of a loss: "loss, nats per token" or "loss (dpo)"."""
    return ", ".join(filter(None, (loss_in_words(objective_of(settings)), unit_of(settings))))


def panels_of(rows: list[dict], settings: dict) -> list[Panel]:
    """Returns the panels of a run, without panels of which it has no number."""
    panels = [
        _loss_panel(rows, loss_label(settings)),
        _panel(rows, "learning rate", {"learning_rate": TRAINING}, low=0.0),
        _robust(_panel(rows, GRADIENT_NORM, {"gradient_norm": TRAINING})),
        _speed_panel(rows),
        _robust(_panel(rows, MFU, {"mfu": TRAINING})),
        _panel(with_peaks(rows), "peak GPU memory, fullest rank, GiB", {"peak": TRAINING}, low=0.0),
        *(_panel(rows, label, names) for label, names in OBJECTIVES_PANELS.items()),
    ]
    return [panel for panel in panels if panel.curves]


def panels_of_runs(runs: dict[str, tuple[list[dict], dict]]) -> list[Panel]:
    """Returns panels of several runs, each of which has a curve of its own colour.

    Validations are dots in the colour of their run. A panel is there if a run has its numbers.

    Args:
        runs: rows and settings of each run, by its name.
    """
    shared: dict[str, Panel] = {}
    labels = {name: loss_label(settings) for name, (_, settings) in runs.items()}
    are_alike = len({*labels.values()}) == 1
    for number, (name, (rows, settings)) in enumerate(runs.items()):
        for panel in panels_of(rows, settings):
            is_loss = panel.label == labels[name]
            shown = f"{name}: {panel.label}" if is_loss and not are_alike else name
            label = "loss" if is_loss and not are_alike else panel.label
            joint = shared.setdefault(label, Panel(label, [], low=panel.low))
            for curve in _beside_other_runs(panel.curves):
                is_main = curve.label.startswith((TRAINING, WITHOUT_PADDING))
                what = shown if is_main else f"{name}, {curve.label}"
                joint.curves.append(Curve(what, curve.steps, curve.values, curve.kind, number))
    for label in ROBUST & shared.keys():
        _robust(shared[label])
    return [*shared.values()]


def _beside_other_runs(curves: list[Curve]) -> list[Curve]:
    """Returns the curves of a run beside other runs, without raw ones; a second line is dashed."""
    kept = [curve for curve in curves if curve.kind in ("line", "dots")]
    lines = [curve for curve in kept if curve.kind == "line"]
    for curve in lines[1:]:
        curve.kind = "dashed"
    return kept


def with_peaks(rows: list[dict]) -> list[dict]:
    """Returns rows whose "peak" is the largest of "peak_memory_gib", a list by rank."""
    with_number: list[dict] = []
    for row in rows:
        peaks = row.get("peak_memory_gib")
        numbers = [*filter(is_number, peaks)] if isinstance(peaks, list) else []
        if numbers:
            with_number.append({"step": row["step"], "peak": max(numbers)})
    return with_number


def _panel(rows: list[dict], label: str, names: dict[str, str], low: float | None = None) -> Panel:
    curves: list[Curve] = []
    for number, (name, shown) in enumerate(names.items()):
        steps, values = points(rows, name)
        if steps:
            kind = "dots" if name.startswith(VALIDATION) else "line"
            curves.append(Curve(shown, steps, values, kind, number))
    return Panel(label, curves, low=low)


def _loss_panel(rows: list[dict], label: str) -> Panel:
    """Returns the loss raw and smoothed, validations, spikes and left-out steps.

    Spikes do not stretch the axis: a cross beyond the other losses stands at its upper end.
    """
    steps, losses = points(rows, "loss")
    curves, span = list[Curve](), len(losses) // STEPS_PER_SMOOTHED
    if losses and span < 2:  # a mean of one step is the same line
        curves.append(Curve(TRAINING, steps, losses))
    elif losses:
        curves.append(Curve(TRAINING, steps, losses, "faint"))
        # A page of a long run has some rows alone.
        num_steps = round(span * (steps[-1] - steps[0] + 1) / len(steps))
        label_of_mean = f"{TRAINING}, mean of {num_steps} steps"
        curves.append(Curve(label_of_mean, steps, _smoothed(losses, span)))
    validations = points(rows, "validation_loss")
    if validations[0]:
        curves.append(Curve(VALIDATION, *validations, kind="dots", color=1))
    panel = Panel(label, curves)
    _add_spikes(panel, rows, validations[1])
    panel.left_out = [row["step"] for row in rows if row.get("loss", 0) is None]
    return panel


def _add_spikes(panel: Panel, rows: list[dict], validations: list[float]) -> None:
    steps, spikes = points([row for row in rows if row.get("is_spike")], "loss")
    if not spikes:
        return
    _, calm = points([row for row in rows if not row.get("is_spike")], "loss")
    calm = calm + validations or spikes
    low, high = min(calm), max(calm)
    ceiling = high + 0.25 * (high - low)
    panel.outside = sum(value > ceiling for value in spikes)
    label = "spike"
    if panel.outside:
        panel.high = high + 0.3 * (high - low)
        label += f", up to {max(spikes):.4g}"
    shown = [min(value, ceiling) for value in spikes]
    panel.curves.append(Curve(label, steps, shown, "crosses", 3))


def _smoothed(values: list[float], span: int) -> list[float]:
    """Returns means of `span` values that end at each: 1, 2, 4 for 1, 3, 5 and span 2."""
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[max(0, end - span)]) / min(span, end) for end in range(1, len(sums))]


def _speed_panel(rows: list[dict]) -> Panel:
    """Returns the speed without padding, and beside it with padding if there is some.

    Earlier runs have only the latter.
    """
    texts, padded = points(rows, "text_tokens_per_second"), points(rows, "tokens_per_second")
    if not texts[0]:
        return _robust(_panel(rows, PADDED_SPEED, {"tokens_per_second": TRAINING}))
    curves = [Curve(WITHOUT_PADDING, *texts)]
    if sum(padded[1][-len(texts[1]) :]) > 1.005 * sum(texts[1]):
        curves.append(Curve("padding included", *padded, kind="faint", color=1))
    return _robust(Panel(TEXTS_SPEED, curves))


def _robust(panel: Panel) -> Panel:
    """Sets limits without a curve's few outliers, such as a slow first step.

    The highest and the lowest hundredth of the values may be outliers, of each at least one value.
    They are if they are further from the others than these from each other: of 300, 8950, 9000,
    9050 and 9100 it is 300.
    """
    lows, highs = list[float](), list[float]()
    for curve in panel.curves:
        ordered = sorted(curve.values)
        cut = max(1, len(ordered) // 100) if len(ordered) >= FEWEST_WITH_OUTLIERS else 0
        low, high = ordered[cut], ordered[-1 - cut]
        height = max(high - low, 0.02 * abs(high))
        lows.append(max(ordered[0], low - height))
        highs.append(min(ordered[-1], high + height))
    if lows:
        low, high = min(lows), max(highs)
        margin = _margin(low, high)
        panel.low, panel.high = low - margin, high + margin
        if low >= 0:
            panel.low = max(0.0, panel.low)
        values = [value for curve in panel.curves for value in curve.values]
        panel.outside = sum(not panel.low <= value <= panel.high for value in values)
    return panel


def _margin(low: float, high: float) -> float:
    """Returns what an axis has beyond its values on either side."""
    return 0.05 * (high - low) or 0.05 * abs(high) or 1.0
