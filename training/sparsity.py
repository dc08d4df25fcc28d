"""What flags say of attention: chosen blocks layer by layer, and annealed over the first steps of a run."""

import itertools
import re
from collections.abc import Sequence

from kernels.attention.nsa.nsa import FORCED_BLOCKS, NSA
from kernels.attention.sparse.sparse_attention import Sparsity
from training.host.errors import UserError
from training.run.settings import TrainConfig

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


def sparsity_of(flags, layers: int) -> tuple[Sparsity | NSA, ...]:
    """What the flags --attention_type, --selected_blocks and --dense_below say, of a run or of profile_memory.py.

    Args:
        layers: of the model.

    Returns:
        One a layer; () where attention is to everything.

    Raises:
        UserError: a value out of range, a flag without effect, a model whose heads the kernels do not take.
    """
    kind, given = flags.attention_type, {name: getattr(flags, name) for name in ("selected_blocks", "dense_below")}
    given = {name: value for name, value in given.items() if value is not None}
    takes = {"full": (), "sparse": ("selected_blocks", "dense_below"), "nsa": ("selected_blocks",)}[kind]
    for name in given:
        if name not in takes:
            raise UserError(f"{name} has no effect with attention_type {kind}; drop it, or use sparse")
    if kind == "full":
        return ()
    default: Sparsity | NSA = NSA() if kind == "nsa" else Sparsity()
    blocks = str(given.get("selected_blocks", default.selected_blocks))
    if isinstance(default, NSA):
        numbers = numbers_by_layer("selected_blocks", blocks, layers)
        if min(numbers) <= FORCED_BLOCKS:
            raise UserError(
                f"selected_blocks must be at least {FORCED_BLOCKS + 1}, got {blocks}: nsa forces {FORCED_BLOCKS}"
            )
        return tuple(NSA(number) for number in numbers)
    dense_below = given.get("dense_below", default.dense_below)
    if dense_below < 1:
        raise UserError(f"dense_below must be at least 1, got {dense_below}")
    if flags.context_length is not None and flags.context_length < dense_below:
        raise UserError(
            f"attention_type sparse has no effect at context_length {flags.context_length}: documents shorter than "
            f"dense_below {dense_below} attend to everything; raise the one, lower the other, or use full"
        )
    numbers = numbers_by_layer("selected_blocks", blocks, layers)
    return tuple(Sparsity(selected_blocks=number, dense_below=dense_below) for number in numbers)


def sparsity_at(config: TrainConfig, layers: int, step: int) -> tuple[Sparsity | NSA, ...]:
    """A run's `sparsity_of` in one of its steps, counted from 1; no step has more chosen blocks than the first.

    Raises:
        UserError: as `sparsity_of`; annealing without start or end, without effect, or to more blocks.
    """
    final, start, steps = sparsity_of(config, layers), config.selected_blocks_start, config.selected_blocks_steps
    if start is None and steps is None:
        return final
    if start is None or steps is None or not final:
        name, needed = ("selected_blocks_start", "selected_blocks_steps")[:: 1 if steps is None else -1]
        needed = needed if final else "attention_type sparse or nsa"
        raise UserError(f"{name} has no effect without {needed}; drop the one, or give the other")
    if steps < 1:
        raise UserError(f"selected_blocks_steps must be at least 1, got {steps}")
    pairs = [*zip(numbers_by_layer("selected_blocks_start", str(start), len(final)), final)]
    if not any(number > one.selected_blocks for number, one in pairs) or any(
        n < one.selected_blocks for n, one in pairs
    ):
        numbers = spell_by_layer([one.selected_blocks for one in final])
        raise UserError(f"selected_blocks_start {start} must be above selected_blocks {numbers}, in no layer below it")
    return tuple(one._replace(selected_blocks=annealed(n, one.selected_blocks, step, steps)) for n, one in pairs)
