"""A run's page: what it says while the run goes on and after it, and that no page ends or slows a
run."""

import json
import logging
import re
import sys
import threading
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.browser import Page, needs_chromium, read_page, run_chromium
from training.host.errors import UserError
from training.run import report
from training.run.metrics import Metrics
from training.run.report import (
    MOST_ROWS,
    About,
    RecentWarnings,
    Report,
    lengths_in_html,
    recorded_warnings,
    thinned,
)

HOSTILE = "<script>document.body.innerHTML = ''</script>&amp; \x1b \ud800"
SHOWN = HOSTILE.replace("\x1b", "\u241b").replace("\ud800", "\\ud800")


def about(**changes):
    facts = {"model": "tiny, 820,608 parameters", "data": HOSTILE}
    settings = {"model_size": "tiny", "objective": "dpo", "data": [HOSTILE]}
    values = {
        "settings": settings, "shown_settings": {"data": [HOSTILE]},
        "facts": facts, "plan": f"blocks kept whole  4\n{HOSTILE}",
        "lengths": np.array([5, 64, 65, 200, 1]),
        "context_length": 64, "max_steps": 10,
    }  # fmt: skip
    return About(**values | changes)


def row(step, **more):
    speeds = {"tokens_per_second": 900.0, "text_tokens_per_second": 600.0}
    return {
        "step": step,
        "loss": 3.0 / step,
        "learning_rate": 1e-3,
        "seconds": 2.0,
        **speeds,
        **more,
    }


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    return now


def settle(page_report):
    page_report._thread.join(10)
    assert not page_report._thread.is_alive()


def test_a_page_follows_its_run(tmp_path, clock, monkeypatch):
    """Reads it before the first step, while the run goes on, and at its end; without Matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    warnings = RecentWarnings()
    file, written = tmp_path / "report.html", Report(tmp_path, about(), 0, warnings)
    settle(written)
    begun = read_page(file)
    assert (
        "step 0 of 10, 0%: the first step goes on." in begun.texts["p"][0]
        and "polyline" not in begun.texts
    )
    warnings.emit(
        logging.makeLogRecord({"msg": "beware %s", "args": (HOSTILE,), "levelno": logging.WARNING})
    )
    clock[0] += 30.0
    written.write(row(1))
    settle(written)
    clock[0] += 30.0
    written.write(row(2, validation_loss=1.25, is_spike=True))
    settle(written)
    page = read_page(file)
    assert page.texts["p"][0].startswith(
        "step 2 of 10, 20%: the run goes on. About 04:00 left, to 20"
    )
    assert [values for name, values in page.elements if values.get("http-equiv") == "refresh"]
    assert page.texts["pre"][0].endswith(f"beware {SHOWN}") and page.texts["h2"][0] == "Warnings: 1"
    assert page.texts["pre"][1] == f"\nblocks kept whole  4\n{SHOWN}"
    titles = ["loss (dpo)", "learning rate", "tokens per second, without padding"]
    assert page.texts["figcaption"] == titles
    cells = dict(zip(page.texts["th"], page.texts["td"]))
    assert cells["data"] == SHOWN and cells["last loss"] == "1.5000, step 2"
    assert cells["last validation loss"] == "1.2500, step 2"
    written.sample = HOSTILE, "written <b>"
    written.write(row(10))
    written.finish(None, None, None)
    page = read_page(file)
    assert page.texts["p"][0] == "step 10 of 10, 100%: complete."
    assert not [values for name, values in page.elements if values.get("http-equiv") == "refresh"]
    assert f"\n{SHOWN}written <b>" in page.texts["pre"] and page.texts["mark"][1] == "written <b>"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "stopped; --resume goes on."),
     (UserError(f"no room\n{HOSTILE}"), f"ended by error: no room {SHOWN}."),
     (ValueError("a defect"), "ended by error: ValueError('a defect')."),
     (KeyboardInterrupt(), "ended by error: KeyboardInterrupt().")],
)  # fmt: skip
def test_a_page_says_how_its_run_ended(error, status, tmp_path):
    written = Report(tmp_path, about(), 0, RecentWarnings())
    written.write(row(3))
    written.finish(type(error) if error else None, error, None)
    assert read_page(tmp_path / "report.html").texts["p"][0] == f"step 3 of 10, 30%: {status}"


def test_pages_are_seldom_and_beside_the_steps(tmp_path, clock, monkeypatch):
    """The steps do not wait for a page, and a page that computes for a second is followed by 50
    seconds without one."""
    made, is_free = [], threading.Event()

    def page_of(folder, about, rows, *_):
        assert threading.current_thread().name == "report" and is_free.wait(10)
        made.append(len(rows))
        return "a page"

    thread_time = iter(range(1000))
    monkeypatch.setattr(report, "page_of", page_of)
    monkeypatch.setattr(report.time, "thread_time", lambda: next(thread_time))
    written = Report(tmp_path, about(), 0, RecentWarnings())
    for step in range(1, 100):
        clock[0] += 1.0
        written.write(row(step))  # returns at once: the first page is not made yet
    is_free.set()
    settle(written)
    assert made == [0]
    for step in range(100, 200):
        clock[0] += 1.0
        written.write(row(step))
        settle(written)
    assert made == [0, 100, 150]


def test_a_page_that_cannot_be_written_is_a_warning_and_comes_later(tmp_path, clock, caplog):
    folder = tmp_path / "run"
    written = Report(folder, about(), 0, RecentWarnings())  # there is no such folder
    settle(written)
    metrics = Metrics({})
    metrics.add("report.html", written.write)

    def write(*steps):
        for step in steps:
            clock[0] += 100.0
            metrics.write(**row(step))
            settle(written)

    write(1, 2, 3)
    folder.mkdir()
    write(4, 5)
    assert (folder / "report.html").is_file()
    folder.rename(tmp_path / "moved")
    write(6, 7, 8)  # which of them begins a page depends on how long the last one took
    written.finish(None, None, None)
    missing = "[Errno 2] No such file or directory"
    said = [message.partition(": '")[0] for message in caplog.messages]
    assert [re.sub("step [678] ", "step N ", message) for message in said] == [
        f"step 1 cannot be written to report.html: {missing}",
        f"step N cannot be written to report.html: {missing}",
        f"{folder}/report.html cannot be written: {missing}",
    ]  # fmt: skip
    folder.mkdir()
    written.finish(None, None, None)
    assert len(read_page(folder / "report.html").texts["figcaption"]) == 3


def test_a_page_goes_through_no_link(tmp_path):
    """A link in the place of the temporary file, and one in the page's own."""
    stranger = tmp_path / "stranger"
    stranger.write_text("kept")
    for name in (".report.html.tmp", "report.html"):
        (tmp_path / name).symlink_to(stranger)
    settle(Report(tmp_path, about(), 0, RecentWarnings()))
    assert stranger.read_text() == "kept" and not (tmp_path / "report.html").is_symlink()


def test_a_long_run_has_all_its_events_in_few_rows(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row(step)) + "\n" for step in range(1, 3 * MOST_ROWS))
    )
    resumed = Report(tmp_path, about(max_steps=9 * MOST_ROWS), 3 * MOST_ROWS, RecentWarnings())
    for step in range(3 * MOST_ROWS, 6 * MOST_ROWS):
        events = {7: {"validation_loss": 1.0}, 13: {"loss": None}, 21: {"is_spike": True}}
        resumed.write(row(step, **events.get(step % 10_000, {})))
    resumed.finish(None, None, None)
    rows = resumed._rows
    assert len(rows) <= MOST_ROWS and rows[0]["step"] == 1 and rows[-1]["step"] == 6 * MOST_ROWS - 1
    for name in ("validation_loss", "is_spike"):
        assert sum(name in each for each in rows) == 1
    assert sum(each["loss"] is None for each in rows) == 1
    smoothed = read_page(tmp_path / "report.html").texts["span"][1]
    assert 0.045 < int(smoothed.split("mean of ")[1].split()[0]) / (6 * MOST_ROWS) < 0.055
    assert (tmp_path / "report.html").stat().st_size < 200_000


def test_rows_of_many_events_are_thinned_too():
    rows = [row(step, validation_loss=1.0) for step in range(1, 100)]
    assert [each["step"] for each in thinned(rows)] == [*range(1, 100, 2)]
    rows = [
        row(step, **({"validation_loss": 1.0} if step % 8 == 0 else {})) for step in range(1, 100)
    ]
    assert [each["step"] for each in thinned(rows) if each["step"] % 2 == 0] == [*range(8, 100, 8)]


def test_documents_are_counted_by_their_lengths():
    page = Page(lengths_in_html(np.array([1, 2, 3, 4, 64, 65, 130]), 64))
    assert "7 documents of 269 tokens, the longest of 130" in page.texts["p"][0]
    assert "a sequence has 64 tokens, and 2 documents are longer" in page.texts["p"][0]
    cells = [page.texts["td"][i : i + 3] for i in range(0, len(page.texts["td"]), 4)]
    assert [tuple(each[:2]) for each in cells] == [
        ("0 to 1", "1"), ("2 to 2", "1"), ("3 to 4", "2"), ("33 to 64", "1"), ("65 to 128", "1"),
        ("129 to 256", "1")
    ]  # fmt: skip
    assert cells[-1][2] == f"{130 / 269:.1%}"
    marked = [
        values for name, values in page.elements if name == "tr" and values.get("class") == "beyond"
    ]
    assert len(marked) == 2


def test_warnings_are_kept_with_their_number():
    logger = logging.getLogger("somewhere")
    with recorded_warnings() as warnings:
        for number in range(60):
            logger.warning("warning %d", number)
        logger.info("no warning")
    logger.warning("after the run")
    assert warnings.count == 60 and [text for _, text in warnings.lines] == [
        f"warning {n}" for n in range(10, 60)
    ]


@needs_chromium
def test_a_browser_draws_the_curves_and_runs_nothing(tmp_path):
    written = Report(tmp_path, about(), 0, RecentWarnings())
    for step in range(1, 8):
        written.write(row(step, validation_loss=2.0))
    written.finish(None, None, None)
    picture = tmp_path / "page.png"
    run_chromium(
        tmp_path,
        f"--screenshot={picture}",
        "--window-size=900,1200",
        f"file://{Path(tmp_path)}/report.html",
    )
    pixels = np.round(255 * matplotlib.image.imread(picture)[..., :3]).astype(int)
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):  # training and validation
        assert (abs(pixels - color).max(-1) < 8).sum() > 100
    assert (pixels < 100).all(-1).sum() > 1000  # letters: the script has not emptied the page
