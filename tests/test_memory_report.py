import pytest

from benchmarks.memory_report import PEER, REPORT, ROOT, latest_of_peer, regenerate, stages_of_peer
from training.host.sizes import GIB


def test_the_report_holds_what_its_command_writes():
    """A new measurement shows in the report."""
    report = REPORT.read_text()
    assert regenerate(report) == report
    assert regenerate("<!-- budgets -->\n<!-- end -->").splitlines()[3].startswith("| H100 | 131,072 | none |")


def test_the_picture_shows_the_peer_that_the_table_measures():
    peak = latest_of_peer()["results"][PEER]["peak_gib"]
    assert max(stage.bytes for stage in stages_of_peer()) / GIB == pytest.approx(peak, rel=0.02)
    caption, table = (ROOT / "README.md").read_text().split("## Measured")[:2]
    assert f"checkpointing, {peak:.1f} GiB" in caption and f"| {peak:.1f} GiB |" in table
