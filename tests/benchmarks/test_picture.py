import pytest

from benchmarks import picture
from benchmarks.picture import draw_picture, peak_of_peer, stages_of_peer
from benchmarks.report import ROOT
from tests.pictures import check_texts
from training.host.sizes import GIB


def test_the_picture_shows_the_peer_that_the_table_measures():
    peak = peak_of_peer()
    assert max(stage.bytes for stage in stages_of_peer()) / GIB == pytest.approx(peak, rel=0.02)
    caption, table = (ROOT / "README.md").read_text().split("## Measured")[:2]
    assert f"checkpointing, {peak:.1f} GiB" in caption and f"| {peak:.1f} GiB |" in table


def test_titles_stay_inside_the_picture(monkeypatch):
    drawn = []
    monkeypatch.setattr(picture, "save_picture", lambda figure, path: drawn.append(figure))
    draw_picture()
    check_texts(drawn[0])
