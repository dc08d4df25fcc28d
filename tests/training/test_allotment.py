"""Numbers of blocks shared among layers, against every way to share them."""

import itertools
import random

import pytest

from kernels.attention.sparse.sparse_attention import Sparse
from training.allotment import allot, choices_of, convex

CHOICES = (8, 16, 32, 64, 128)


def losses_of(kind, draws):
    """A layer's losses: none, falling fast or slowly, falling late, noise, or noise around what falls."""
    scale = 10 ** draws.uniform(-3, 1)
    falling = {
        "none": lambda n: 0.0, "fast": lambda n: scale * 8 / n, "slow": lambda n: -scale * n / 128,
        "late": lambda n: -scale * (n >= 64), "noise": lambda n: draws.gauss(0, scale),
        "noisy": lambda n: scale * 8 / n + draws.gauss(0, scale / 4),
    }  # fmt: skip
    return [falling[kind](n) for n in CHOICES]


def interpolated(points, x):
    """The least of all chords between two points at x, by brute force."""
    return min(
        a[1] if a == b else a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])
        for a, b in itertools.combinations_with_replacement(points, 2) if a[0] <= x <= b[0] and (a != b or a[0] == x)
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_no_other_numbers_lose_less(seed):
    draws = random.Random(seed)
    kinds = ["none", "fast", "slow", "late", "noise", "noisy"]
    losses = [losses_of(draws.choice(kinds), draws) for _ in range(draws.randint(1, 4))]
    mean = draws.choice((8, 16, 32, 36, 64))
    numbers = allot(losses, CHOICES, mean)
    curves = [dict(zip(CHOICES, convex(of_layer, CHOICES))) for of_layer in losses]
    every = [n for n in itertools.product(CHOICES, repeat=len(losses)) if sum(n) <= mean * len(losses)]
    sums = {n: sum(curve[number] for curve, number in zip(curves, n)) for n in every}
    assert tuple(numbers) in sums and sums[tuple(numbers)] == pytest.approx(min(sums.values()), abs=1e-9)
    assert sum(numbers) == max(sum(n) for n in every if sums[n] <= sums[tuple(numbers)])
    assert allot(losses, CHOICES, mean) == numbers


@pytest.mark.parametrize("kind", ["none", "fast", "slow", "late", "noise", "noisy"])
def test_losses_never_rise_and_fall_ever_less_steeply(kind):
    for seed in range(5):
        losses = losses_of(kind, random.Random(seed))
        curve = convex(losses, CHOICES)
        slopes = [(b - a) / (y - x) for (x, a), (y, b) in itertools.pairwise(zip(CHOICES, curve))]
        assert all(slope <= 1e-12 for slope in slopes)
        assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(slopes))
        points = [*zip(CHOICES, itertools.accumulate(losses, min))]
        assert curve == pytest.approx([interpolated(points, n) for n in CHOICES])
        if kind in ("none", "fast", "slow"):
            assert curve == pytest.approx(losses)


def test_noise_buys_no_blocks_from_layers_that_need_them():
    """The first layer is better with few blocks than with many, as no layer is; the second gains by each block."""
    noisy, needy = [0.0, 0.01, -0.01, 0.03, 0.02], [1.0, 0.5, 0.25, 0.12, 0.06]
    assert allot([noisy, needy], CHOICES, 32) == [8, 32] or sum(allot([noisy, needy], CHOICES, 32)) <= 64
    assert allot([noisy, needy, noisy, noisy], CHOICES, 32)[1] == 64


@pytest.mark.parametrize(
    ("mean", "longest", "choices"),
    [
        (32, 32_768, [8, 16, 32, 64, 128]),
        (32, 8192, [8, 16, 32, 64, 120]),  # the last of 128 blocks chooses from 119
        (32, 2689, [8, 16, 32, 36]),
        (16, 2**17, [4, 8, 16, 32, 64]),
        (12, 2**17, [0, 4, 12, 24, 48]),
        (4, 2**17, [0, 4, 8, 16]),
    ],
)
def test_numbers_to_choose_from(mean, longest, choices):
    assert choices_of(Sparse(mean), longest) == choices
