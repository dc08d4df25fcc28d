"""Knows the settings of other trainers by name: the flag here that is meant, or why there is none.

training/other_trainers.toml has the names. A name may have tables before it, as
actor_rollout_ref.actor.optim.lr of verl has.
"""

import difflib
import tomllib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

LEAST_NEAR = 0.82  # likeness of a name to the one that is meant: --eval_data is no slip of --data
NAMES = tomllib.loads(Path(__file__).parents[1].joinpath("other_trainers.toml").read_text())
USUAL_NAMES: dict[str, str] = NAMES["usual"]
WORDS: dict[str, dict[str, str]] = NAMES["words"]  # of values, by flag: a word here = their words
BY_VALUE: dict[str, str] = NAMES["by_value"]
ABSENT: dict[str, str] = {row["names"]: row["why"] for row in NAMES["absent"]}


class Meaning(NamedTuple):
    """Meaning of a name: a flag, or the reason why there is none; both None for an unknown name."""

    flag: str | None = None
    why: str | None = None


def meaning(name: str, flags: Collection[str], absent: Mapping[str, str] = ABSENT) -> Meaning:
    """Returns what a name of another trainer, or a slip of a flag's name, stands for among a
    command's flags.

    Names that end alike are tried from the longest: of actor.optim.lr first the whole, then
    optim.lr, then lr.

    Args:
        absent: names, separated by spaces, that have nothing in their place, and why.
    """
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    for tried in (ends[:1], ends[1:]):
        for end in tried:
            if known := _exactly(end, flags, absent):
                return known
        for end in tried:
            if near := difflib.get_close_matches(end, flags, 1, LEAST_NEAR):
                return Meaning(flag=near[0])
            for names, why in absent.items():
                if any("*" in pattern and fnmatchcase(end, pattern) for pattern in names.split()):
                    return Meaning(why=why)
    return Meaning()


def _exactly(name: str, flags: Collection[str], absent: Mapping[str, str]) -> Meaning | None:
    usual = [ours for ours, theirs in USUAL_NAMES.items() if name in theirs.split()]
    for flag in usual:
        if flag in flags:
            return Meaning(flag=flag)
    for names, why in absent.items():
        if name in names.split():
            return Meaning(why=why)
    if usual:  # another command has it
        return Meaning()
    return Meaning(flag=name) if name in flags else None
