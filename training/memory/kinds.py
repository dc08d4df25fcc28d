"""Flags of attention: the kind of each layer, and numbers of chosen blocks by layer."""

import itertools
import re
from collections.abc import Sequence

import torch

from kernels.attention import KINDS
from kernels.attention.full import Full
from kernels.parts import MixerKind
from training.host.errors import UserError, refused_as_user_error

FLAGS = sorted({name for kind in KINDS.values() for name in kind.takes})  # obeyed by some kind


def numbers_by_layer(name: str, text: str, layers: int) -> list[int]:
    """Returns one number per layer, from the text of the flag `name`.

    For 4 layers, "64x2,32" and "64,64,32" are [64, 64, 32, 32]: a last entry without "x" holds for
    all layers left.

    Raises UserError for another form, a negative number, too many layers or too few.
    """
    entry = r"(\d{1,5})(?:x([1-9]\d{0,4}))?"
    if not re.fullmatch(f"{entry}(,{entry})*", text):
        raise UserError(
            f'{name} must be a number, 0 or more, or look like "64x4,32" or "64,48,32", got '
            f"{text!r}"
        )
    numbers: list[int] = []
    for number, times in re.findall(entry, text):
        numbers += [int(number)] * int(times or 1)
    if not times:
        numbers += numbers[-1:] * (layers - len(numbers))
    if len(numbers) != layers:
        raise UserError(
            f"{name} {text} names {len(numbers)} layers, the model has {layers}; name each once"
        )
    return numbers


def spell_by_layer(numbers: Sequence[int]) -> str:
    """Returns `numbers_by_layer`'s short text: "64x2" for [64, 64], "32" for [32, 32]."""
    runs = [(number, len(list(run))) for number, run in itertools.groupby(numbers)]
    before = [f"{number}x{count}" if count > 1 else str(number) for number, count in runs[:-1]]
    return ",".join([*before, str(runs[-1][0])])


def kinds_of(flags, config) -> tuple[MixerKind, ...]:
    """Returns how each layer attends by --attention_type and the flags of its kind; every command
    reads them here.

    The flags set layers that attend to everything in the configuration, and layers that have the
    asked kind already. All other layers, such as windows, keep their own kind. Attributes of
    `flags` are None where not given.

    Raises UserError for a value out of range, or a flag without effect.
    """
    kind = KINDS[flags.attention_type]
    settings = {name: value for name in FLAGS if (value := getattr(flags, name)) is not None}
    for name in settings:
        if name not in kind.takes:
            raise UserError(
                f"{name} has no effect with attention_type {kind.name}; drop it, or use sparse"
            )
    layers = [settings] * config.num_hidden_layers
    if "selected_blocks" in settings:
        text = str(settings["selected_blocks"])
        numbers = numbers_by_layer("selected_blocks", text, len(layers))
        layers = [settings | {"selected_blocks": number} for number in numbers]
    with refused_as_user_error():
        kinds = [kind(**values) for values in layers]
    longest = flags.context_length
    if longest is not None and kinds[0] != kinds[0].for_longest(longest):
        below = getattr(kinds[0], "dense_below", 0)
        raise UserError(
            f"attention_type {kind.name} has no effect at context_length {longest}: documents "
            f"shorter than dense_below {below} attend to everything; "
            "raise the one, lower the other, or use full"
        )
    is_set = [type(trained) in (Full, kind) for trained in config.kinds]
    if kind is not Full and not any(is_set):
        names = ", ".join(sorted({trained.name for trained in config.kinds}))
        raise UserError(
            f"attention_type {kind.name} has no effect on a model whose layers all attend by "
            f"{names}; drop it, or give a model with layers that attend to everything"
        )
    choices = zip(is_set, kinds, config.kinds)
    return tuple(flagged if obeys else trained for obeys, flagged, trained in choices)


def check_head_dim(kinds: Sequence[MixerKind], head_dim: int, device: torch.device) -> None:
    """Raises UserError if the device is a GPU without kernels of some kind for such heads."""
    with refused_as_user_error():
        for kind in kinds if device.type == "cuda" else ():
            kind.check_heads(head_dim)


def describe(kinds: Sequence[MixerKind]) -> str:
    """Returns how the layers attend, for people: each kind once, in the order of the layers."""
    lines = []
    for name in dict.fromkeys(kind.name for kind in kinds):
        alike = [kind for kind in kinds if kind.name == name]
        line = alike[0].describe(spell_by_layer([kind.selected_blocks for kind in alike]))
        lines.append(line if len(alike) == len(kinds) else f"{len(alike)} layers: {line}")
    return "; ".join(lines)
