"""A few cases of each `python -m tests.storm`."""

from tests.storm import storm
from tests.storm_of_damage import storm_of_damage
from tests.storm_of_input import storm_of_input
from tests.storm_of_power_loss import storm_of_power_loss
from tests.storm_of_signals import storm_of_signals


def test_kills_lose_nothing(tmp_path):
    assert storm(tmp_path, count=2, ranks=2, seed=1, seconds=3, steps=10)["kills"] == 2


def test_signals_lose_nothing(tmp_path):
    assert (
        sum(storm_of_signals(tmp_path, count=2, ranks=1, seed=2, seconds=2, steps=10).values()) >= 2
    )


def test_damage_is_seen(tmp_path):
    assert sum(storm_of_damage(tmp_path, count=18, seed=1).values()) == 18


def test_bad_input_is_refused_in_a_line(tmp_path):
    seen = storm_of_input(tmp_path, count=40, seed=1)
    assert not seen["bad"] and seen["refused"] > 20


def test_a_loss_of_power_loses_nothing_that_was_promised(tmp_path):
    assert sum(storm_of_power_loss(tmp_path, count=60, seed=1).values()) == 60
