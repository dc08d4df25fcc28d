"""Numbers of chosen blocks: layer by layer, as flags spell them, and annealed over the first steps of a run."""

import itertools
import re
from collections.abc import Sequence

from training.errors import UserError

ANNEALING_STAGES = 8  # numbers that annealing takes, both ends included: kernels are compiled anew for each
ANNEALING_MULTIPLE = 4  # of blocks


def numbers_by_layer(name: str, text: str, layers: int) -> list[int]:
    """One number a layer, first layer first: of 4 layers "64x2,32" and "64,64,32" are [64, 64, 32, 32].

    An entry is a number of blocks, or "number x layers" without the spaces. If the last one is a number alone, it holds
    for all layers that are left.

    Args:
        name: of the flag, for errors.

    Raises:
        UserError: another form, a negative number, too many layers or too few.
    """
    entry = r"(\d{1,5})(?:x([1-9]\d{0,4}))?"
    if not re.fullmatch(f"{entry}(,{entry})*", text):
        raise UserError(f'{name} must be a number, 0 or more, or look like "64x4,32" or "64,48,32", got {text!r}')
    numbers: list[int] = []
    for number, times in re.findall(entry, text):
        numbers += [int(number)] * int(times or 1)
    if not times:
        numbers += numbers[-1:] * (layers - len(numbers))
    if len(numbers) != layers:
        raise UserError(f"{name} {text} names {len(numbers)} layers, the model has {layers}; name each once")
    return numbers


def spell_by_layer(numbers: Sequence[int]) -> str:
    """As `numbers_by_layer` reads it, short: [64, 64, 32, 32] is "64x2,32", and [32, 32] is "32"."""
    runs = [(number, len(list(run))) for number, run in itertools.groupby(numbers)]
    before = [f"{number}x{count}" if count > 1 else str(number) for number, count in runs[:-1]]
    return ",".join([*before, str(runs[-1][0])])


def annealed(start: int, final: int, step: int, steps: int) -> int:
    """The number of chosen blocks in a step, counted from 1: `start` at first, and `final` from step `steps` + 1 on.

    Between them it falls linearly, in at most `ANNEALING_STAGES` - 1 equal intervals and by multiples of
    `ANNEALING_MULTIPLE`: from 64 to 32 it is 64, 60, 56, 52, 44, 40, 36, 32.
    """
    stage = min(ANNEALING_STAGES - 1, (step - 1) * (ANNEALING_STAGES - 1) // steps)
    fall = (start - final) * stage / (ANNEALING_STAGES - 1)
    return (
        final
        if stage == ANNEALING_STAGES - 1
        else max(final, start - ANNEALING_MULTIPLE * round(fall / ANNEALING_MULTIPLE))
    )
