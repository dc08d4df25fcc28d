"""Progress of a command: a bar in a terminal alone."""

import io
import sys

import pytest

from training.host import progress
from training.host.progress import Progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_for_terminals_and_files_get_a_line_now_and_then(is_terminal, monkeypatch):
    """Ten samples of ten seconds each: a file has a line at 0, 30, 60 and 90 s."""
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    file.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", file)
    with Progress(total=10, desc="needles", unit="sample") as bar:
        for _ in range(10):
            now[0] += 10.0
            bar.set_postfix_str("4,096 tokens")
            bar.update()
    written = file.getvalue()
    if is_terminal:
        assert "\r" in written and "10/10" in written
        return
    assert "\r" not in written and "|" not in written
    lines = written.splitlines()
    assert lines[0] == "needles: 0%, 0/10 sample, 00:00 so far, ? left" and len(lines) == 4
    assert lines[1] == "needles: 20%, 2/10 sample, 00:30 so far, 01:20 left, 4,096 tokens"
