"""A few kills of `python -m tests.storm`."""

from tests.storm import storm


def test_kills_lose_nothing(tmp_path):
    assert storm(tmp_path, count=3, ranks=2, seed=1, seconds=3, steps=10)["kills"] == 3
