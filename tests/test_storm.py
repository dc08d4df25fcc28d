"""A few kills of `python -m tests.storm`."""

import pytest

from tests.storm import storm


@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_lose_nothing(ranks, tmp_path):
    assert storm(tmp_path, count=3, ranks=ranks, seed=ranks, seconds=4, steps=12)["kills"] == 3
