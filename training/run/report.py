"""A run's page: report.html beside metrics.jsonl, written anew as the run goes on, for a browser on
any machine.

It has curves, the hours left, the memory plan, warnings, the data's lengths against the context,
and the last sample.
"""

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from tqdm import tqdm

from training.host.errors import UserError
from training.host.pages import escaped, page
from training.host.processes import line_of
from training.plots.curves import title_of
from training.plots.panels import panels_of, points, read_metrics
from training.plots.svg import STYLE as OF_PANELS
from training.plots.svg import draw_panels

logger = logging.getLogger(__name__)
NAME = "report.html"
SECONDS_BETWEEN_PAGES = 15.0
# limit for pages: one that computes for a second is followed by 50 seconds without
SHARE_OF_TIME = 0.02
SECONDS_OF_LAST_PAGE = 10.0  # time that the end of a run waits for the page before
MOST_ROWS = 4000  # steps that are kept; more lose every second one
MOST_WARNINGS = 50
STYLE = """
.bar { background: var(--box); border: 1px solid var(--line); height: .8rem; max-width: 40rem; }
.bar div { background: var(--target-line); height: 100%; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .15rem .8rem .15rem 0;
  text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } td.wide { width: 20rem; }
td.wide div { background: var(--target-line); height: .7rem; }
tr.beyond td { color: var(--warning); }
mark { background: var(--target); color: inherit; }
"""


class RecentWarnings(logging.Handler):
    """Keeps the last MOST_WARNINGS warnings of a run as (time, text)."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines, self.count = deque[tuple[str, str]](maxlen=MOST_WARNINGS), 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        self.lines.append(
            (_clock(datetime.fromtimestamp(record.created).astimezone()), record.getMessage())
        )

    def recent(self) -> tuple[list[tuple[str, str]], int]:
        """Returns the last warnings, and how many there were."""
        with self.lock or contextlib.nullcontext():  # other threads may warn
            return [*self.lines], self.count


@contextlib.contextmanager
def recorded_warnings() -> Iterator[RecentWarnings]:
    """Keeps what is warned of inside the context."""
    handler, root = RecentWarnings(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)


@dataclass
class About:
    """Describes a run by what does not change with its steps.

    Args:
        facts: what is trained on what, by name.
        shown_settings: settings that differ from defaults.
        plan: the memory plan as it is logged; "": there is none.
        lengths: tokens of each training document, int64 [N].
    """

    settings: dict
    shown_settings: dict
    facts: dict[str, str]
    plan: str
    lengths: np.ndarray
    context_length: int
    max_steps: int


@dataclass
class Progress:
    """Progress of a run, as a page shows it."""

    step: int
    status: str
    seconds_left: float | None = None  # None: it does not go on, or no step tells
    sample: tuple[str, str] | None = None  # a prompt, and what the model wrote
    warnings: list[tuple[str, str]] = field(default_factory=list)
    num_warnings: int = 0


class Report:
    """Writes the page of a run, on the main rank.

    `write` takes the metrics of a step, as other writers do. A page is made and written in a thread
    beside the next steps, and none is begun before SECONDS_BETWEEN_PAGES are over. The error of the
    last page is raised by each `write` until a page succeeds.
    """

    def __init__(self, folder: Path, about: About, first_step: int, warnings: RecentWarnings):
        self._file, self._about, self._warnings = folder / NAME, about, warnings
        # once: there may be millions
        self._lengths = lengths_in_html(about.lengths, about.context_length)
        self.sample: tuple[str, str] | None = None
        self._rows = list[dict]()
        if first_step:
            with contextlib.suppress(UserError):
                self._rows = read_metrics(folder)
        while len(self._rows) > MOST_ROWS:
            self._rows = thinned(self._rows)
        self._first = self._step = first_step
        self._began = self._begun_page = time.monotonic()
        self._seconds, self._thread = 0.0, None  # type: float, threading.Thread | None
        self._error: Exception | None = None
        self._begin_page("the first step goes on", None)

    def write(self, values: dict) -> None:
        self._step = values["step"]
        self._rows.append(values)
        if len(self._rows) > MOST_ROWS:
            self._rows = thinned(self._rows)
        now = time.monotonic()
        is_due = now - self._begun_page >= max(SECONDS_BETWEEN_PAGES, self._seconds / SHARE_OF_TIME)
        if is_due and (self._thread is None or not self._thread.is_alive()):
            taken = max(1, self._step - self._first)
            left = (now - self._began) / taken * (self._about.max_steps - self._step)
            self._begin_page("the run goes on", left)
        if (error := self._error) is not None:
            raise error.with_traceback(None)

    def finish(self, kind, error: BaseException | None, _) -> None:
        """Writes the last page, at the end of a run; `error` is what ended it."""
        if error is not None:
            status = f"ended by {line_of(error) or f'error: {error!r}'}"
        else:
            status = (
                "complete" if self._step >= self._about.max_steps else "stopped; --resume goes on"
            )
        if self._thread is not None:
            self._thread.join(SECONDS_OF_LAST_PAGE)
        try:
            if self._thread is not None and self._thread.is_alive():
                raise TimeoutError(f"the disk takes more than {SECONDS_OF_LAST_PAGE:.0f} s")
            self._write_page([*self._rows], self._progress(status, None), is_last=True)
        except Exception as failure:  # a run that has ended well does not fail for its page
            logger.warning("%s cannot be written: %s", self._file, failure)

    def _progress(self, status: str, seconds_left: float | None) -> Progress:
        return Progress(self._step, status, seconds_left, self.sample, *self._warnings.recent())

    def _begin_page(self, status: str, seconds_left: float | None) -> None:
        self._begun_page = time.monotonic()
        words = [*self._rows], self._progress(status, seconds_left)
        self._thread = threading.Thread(
            target=self._write_in_thread, args=words, name="report", daemon=True
        )
        self._thread.start()

    def _write_in_thread(self, rows: list[dict], progress: Progress) -> None:
        began = time.thread_time()  # waits for a disk cost the steps nothing
        try:
            self._write_page(rows, progress, is_last=False)
            self._error = None
        except Exception as error:
            self._error = error
        self._seconds = time.thread_time() - began

    def _write_page(self, rows: list[dict], progress: Progress, is_last: bool) -> None:
        content = page_of(self._file.parent, self._about, rows, progress, self._lengths, is_last)
        # The same name each time: a kill leaves one such file at most, which the next page takes.
        temporary = self._file.with_name(f".{NAME}.tmp")
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as opened:  # never through a link
            opened.write(content.encode())
        temporary.replace(self._file)


def thinned(rows: list[dict]) -> list[dict]:
    """Returns every second row, the last one, and rows with a validation, a spike or a loss that
    was left out.

    Where most rows have such an event, as validations of every step, every second row has to do.
    """
    events = [
        "validation_loss" in row or bool(row.get("is_spike")) or row.get("loss", 0) is None
        for row in rows
    ]
    are_few = sum(events) < len(rows) // 4
    last = len(rows) - 1
    return [
        row
        for number, row in enumerate(rows)
        if number % 2 == 0 or number == last or (are_few and events[number])
    ]


def page_of(
    folder: Path, about: About, rows: list[dict], progress: Progress, lengths: str, is_last: bool
) -> str:
    """Returns the page of a run, HTML. A browser loads it anew by itself until the run ends."""
    now = datetime.now().astimezone()
    parts = [
        _head(about, progress, now, is_last),
        _table({**about.facts, **_last_numbers(rows)}),
        _warnings(progress),
        f"<h2>Curves</h2>{draw_panels(panels_of(rows, about.settings))}" if rows else "",
        f"<h2>Memory plan</h2>{_preformatted(about.plan)}" if about.plan else "",
        f"<h2>Lengths of the training documents</h2>{lengths}",
        _sample(progress.sample),
        f"<h2>Settings</h2>{_preformatted(json.dumps(about.shown_settings, indent=1))}",
        "<details><summary>All "
        f"settings</summary>{_preformatted(json.dumps(about.settings, indent=1))}</details>",
    ]
    seconds = None if is_last else int(SECONDS_BETWEEN_PAGES)
    body = "\n".join(part for part in parts if part)
    return page(title_of(folder, about.settings), body, STYLE + OF_PANELS, seconds)


def _head(about: About, progress: Progress, now: datetime, is_last: bool) -> str:
    share = min(1.0, progress.step / max(1, about.max_steps))
    done = f"step {progress.step:,} of {about.max_steps:,}, {share:.0%}"
    bar = f'<div class="bar"><div style="width:{100 * share:.2f}%"></div></div>'
    left = ""
    if progress.seconds_left is not None:
        end = _clock(now + timedelta(seconds=progress.seconds_left))
        left = (
            f" About {tqdm.format_interval(progress.seconds_left)} left, to {end}, by the mean of "
            "the steps so far."
        )
    if is_last:
        again = ""
    else:
        again = f" It is written anew every {SECONDS_BETWEEN_PAGES:.0f} s while the run goes on."
    about_page = f'<p class="faint">This page is of {_clock(now)}.{again}</p>'
    return (
        f"<p><b>{escaped(done)}</b>: "
        f"{escaped(progress.status)}.{escaped(left)}</p>{bar}{about_page}"
    )


def _clock(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z")


def _last_numbers(rows: list[dict]) -> dict[str, str]:
    """Returns the last loss, validation and speed."""
    shown = dict[str, str]()
    for name, title, spec in (
        ("loss", "last loss", ".4f"),
        ("validation_loss", "last validation loss", ".4f"),
        ("text_tokens_per_second", "tokens per second, without padding", ",.0f"),
        ("tokens_per_second", "tokens per second, padding included", ",.0f"),
        ("seconds", "seconds of a step", ".2f"),
    ):
        steps, values = points(rows, name)
        if steps:
            shown[title] = f"{values[-1]:{spec}}, step {steps[-1]:,}"
    return shown


def _table(rows: dict[str, str]) -> str:
    lines = (
        f"<tr><th>{escaped(name)}</th><td>{escaped(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{''.join(lines)}</table>"


def _preformatted(text: str) -> str:
    return f"<pre>\n{escaped(text)}</pre>"  # browsers drop this line feed, and keep the text's own


def _warnings(progress: Progress) -> str:
    if not progress.warnings:
        return ""
    lines = "\n".join(f"{moment}  {text}" for moment, text in progress.warnings)
    missing = progress.num_warnings - len(progress.warnings)
    title = f"Warnings: {progress.num_warnings:,}" + (
        f", without the first {missing:,}" if missing else ""
    )
    return f'<h2 class="warning">{title}</h2>{_preformatted(lines)}'


def _sample(sample: tuple[str, str] | None) -> str:
    if sample is None:
        return ""
    before, after = map(escaped, sample)
    text = f"<pre>\n{before}<mark>{after}</mark></pre>"
    return f"<h2>Last sample</h2><p>The model wrote <mark>what is marked</mark>.</p>{text}"


def lengths_in_html(lengths: np.ndarray, context_length: int) -> str:
    """Returns a table of documents by their lengths, in powers of two; longer ones than the context
    are marked."""
    count, tokens = len(lengths), int(lengths.sum())
    beyond = int((lengths > context_length).sum())
    summary = (
        f"{count:,} documents of {tokens:,} tokens, "
        f"the longest of {int(lengths.max(initial=0)):,}; "
        f"a sequence has {context_length:,} tokens, and {beyond:,} documents are longer."
    )
    # a document of 129 to 256 tokens has 8
    power = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts, sums = np.bincount(power), np.bincount(power, lengths)
    rows = list[str]()
    for number in counts.nonzero()[0].tolist():
        low, high = (2 ** (number - 1) + 1 if number else 0), 2**number
        share = sums[number] / max(1, tokens)
        mark = ' class="beyond"' if low > context_length else ""
        cells = f"{low:,} to {high:,}", f"{counts[number]:,}", f"{share:.1%}"
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        bar = f'<td class="wide"><div style="width:{100 * share:.2f}%"></div></td>'
        rows.append(f"<tr{mark}>{numbers}{bar}</tr>")
    head = "<tr><th>tokens</th><th>documents</th><th>of all tokens</th><th></th></tr>"
    return f"<p>{summary}</p><table>{head}{''.join(rows)}</table>"
