"""Shares blocks of keys among layers: the numbers that a layer may get, and the best of them by their losses."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from kernels.attention.sparse.sparse_attention import Sparse
from training.attention_flags import MULTIPLE, sees_all


def choices_of(even: Sparse, longest: int) -> list[int]:
    """Returns the numbers that a layer may get, ascending: 8, 16, 32, 64 and 128 for 32.

    They are few, because kernels are compiled for each, and not above what a text of `longest` tokens has to offer.
    """
    candidates = -(-(longest - sees_all(replace(even, selected_blocks=0))) // even.block_size)
    most, mean = -(-candidates // MULTIPLE) * MULTIPLE, even.selected_blocks
    return sorted({min(most, n // MULTIPLE * MULTIPLE) for n in (mean // 4, mean // 2, mean, 2 * mean, 4 * mean)})


def allot(losses: Sequence[Sequence[float]], choices: Sequence[int], mean: int) -> list[int]:
    """Returns each layer's number of blocks: the least sum of `convex` losses of all numbers with that mean or less.

    Among equal sums the most blocks are taken. Exact, by dynamic programming over the blocks spent so far.

    Args:
        losses: [layers][choices], of each layer with each number.
        choices: ascending, the first not above `mean`.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by blocks spent: the sum, and the numbers
    for of_layer in losses:
        before, best, own = best, {}, [*zip(choices, convex(of_layer, choices))]
        for (spent, (total, numbers)), (n, loss) in itertools.product(before.items(), own):
            after = spent + n
            if after <= mean * len(losses) and (after not in best or total + loss < best[after][0]):
                best[after] = total + loss, (*numbers, n)
    return [*best[min(best, key=lambda spent: (best[spent][0], -spent))][1]]


def convex(losses: Sequence[float], choices: Sequence[int]) -> list[float]:
    """Returns the highest losses, none above the given ones, that never rise and fall ever less steeply."""
    points = list(zip(choices, itertools.accumulate(losses, min)))
    lowest = []
    for i, (x, y) in enumerate(points):
        chords = ((b, d, a, c) for a, c in points[:i] for b, d in points[i + 1 :])  # from (a, c) to (b, d), over x
        lowest.append(min([y, *(c + (d - c) * (x - a) / (b - a) for b, d, a, c in chords)]))
    return lowest
