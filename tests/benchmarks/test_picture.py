import pytest

from benchmarks.picture import peak_of_peer, stages_of_peer
from benchmarks.report import ROOT
from training.host.sizes import GIB


def test_the_picture_shows_the_peer_that_the_table_measures():
    peak = peak_of_peer()
    assert max(stage.bytes for stage in stages_of_peer()) / GIB == pytest.approx(peak, rel=0.02)
    caption, table = (ROOT / "README.md").read_text().split("## Measured")[:2]
    assert f"checkpointing, {peak:.1f} GiB" in caption and f"| {peak:.1f} GiB |" in table
