import re

import pytest

from benchmarks.memory_report import REPORT, TABLES, regenerate


def test_the_report_holds_what_its_command_writes():
    """A new measurement shows in the report."""
    report = REPORT.read_text()
    assert set(re.findall(r"<!-- (\w+) -->", report)) == {*TABLES, "end"}
    assert regenerate(report) == report


def test_a_marker_without_a_table():
    with pytest.raises(KeyError, match="nowhere"):
        regenerate("<!-- nowhere -->\n<!-- end -->")
