"""Writes flags.md from the commands' own dataclasses of flags: `.venv/bin/python -m docs.flags`."""

import re
import sys
import typing
from argparse import ArgumentParser
from dataclasses import MISSING, Field, fields
from pathlib import Path

from training.config.__main__ import ConfigFlags
from training.data.__main__ import PrepareFlags, VerifyFlags
from training.evaluation.__main__ import EvaluationFlags
from training.export.__main__ import ExportFlags
from training.flags import SMALLEST, Rule, grouped
from training.generate.flags import GenerateFlags
from training.host.files import replace_file
from training.logprobs.flags import LogProbsFlags
from training.plots.__main__ import PlotsFlags
from training.run.profile_flags import ProfileFlags
from training.run.settings import TrainConfig

PAGE = Path(__file__).with_suffix(".md")
COMMANDS = {
    "train.py": TrainConfig,
    "profile_memory.py": ProfileFlags,
    "-m training.evaluation": EvaluationFlags,
    "-m training.generate": GenerateFlags,
    "-m training.logprobs": LogProbsFlags,
    "-m training.data prepare": PrepareFlags,
    "-m training.data verify": VerifyFlags,
    "-m training.export": ExportFlags,
    "-m training.plots": PlotsFlags,
    "-m training.config": ConfigFlags,
}
MOST_SHOWN = 1000  # larger limits keep nonsense out
INTRODUCTION = """\
# Flags

`.venv/bin/python -m docs.flags` writes this page from the commands' own tables. `--help` prints the same.

Each flag is also a key of a TOML file that `--config` names: `--max_steps 20` is `max_steps = 20`, and a switch such as
`--show_batch` is `show_batch = true`. Defaults give way to the file, and the file to flags. A switch is turned off by
`--no-show_batch`. Names in capitals are given by their place, without a name. A flag that does not exist, a value out
of range and a flag without effect are refused in one line before any work. Dashes may stand for underscores, as in
`--max-steps 20`.
"""


def page() -> str:
    """Returns the page's text."""
    return "\n".join([INTRODUCTION, *(section(name, kind) for name, kind in COMMANDS.items())])


def section(name: str, kind: type) -> str:
    """Returns a command's table, and which settings are refused beside each other."""
    must = [each for each in fields(kind) if each.default is each.default_factory is MISSING]
    summary = " ".join(kind.__doc__.split())
    words = [
        name,
        *(
            spelled(each) + f" {each.name.upper()}" * (not each.metadata["positional"])
            for each in must
        ),
    ]
    lines = [
        f"## {name.removeprefix('-m ')}",
        "",
        f"`.venv/bin/python {' '.join(words)}`. {summary}",
        "",
    ]
    for title, members in grouped(kind).items():
        lines += [f"**{title}**", ""] if title else []
        lines += [
            "| flag | values | default | meaning |",
            "| --- | --- | --- | --- |",
            *map(row, members),
            "",
        ]
    rules = [*map(refusal, getattr(kind, "rules", ()))]
    lines += ["Refused:", "", *rules, ""] if rules else []
    return "\n".join(lines)


def refusal(rule: Rule) -> str:
    """Returns a rule's line, with a setting's name in capitals for its value."""
    why = re.sub(
        r"\{(\w+)\}",
        lambda found: found[1].upper(),
        rule.why.replace("{program}", ".venv/bin/python"),
    )
    return (
        f"- {', '.join(f'`--{flag}`' for flag in rule.idle.split())}: no effect {why}"
        if rule.idle
        else f"- {why}"
    )


def row(each: Field) -> str:
    """Returns a flag's row. The end of its help, "; default: ...", goes to the column of
    defaults."""
    meaning, _, default = each.metadata["help"].partition("default: ")
    if each.default is each.default_factory is MISSING:
        default = "must be given"
    elif each.default not in (MISSING, None):
        meaning, default = (
            each.metadata["help"],
            "off" if each.default is False else str(each.default),
        )
    cells = f"`{spelled(each)}`", values(each), default, meaning.rstrip("; ")
    return f"| {' | '.join(cell.replace('|', ', ') for cell in cells)} |"


def spelled(each: Field) -> str:
    """Returns --name, or NAME of a flag that is given by its place."""
    return each.name.upper() if each.metadata["positional"] else f"--{each.name}"


def values(each: Field) -> str:
    """Returns what a flag takes, such as "whole number, from 1"."""
    if each.type == bool | str:
        return "switch, or word"
    element = next(iter(typing.get_args(each.type)), each.type)
    least, most = each.metadata["least"], each.metadata["most"]
    if each.metadata["choices"]:
        found = ", ".join(map(str, each.metadata["choices"]))
    elif element in (int, float):
        found = (
            "tokens, as 512 or 128k,"
            if each.metadata["tokens"]
            else "whole number"
            if element is int
            else "number"
        )
        found += " above 0" if least == SMALLEST else f" from {least:,g}" if least else ""
        found += f", at most {most:,g}" if most <= MOST_SHOWN else ""
    else:
        found = {bool: "switch", Path: "path"}.get(element, "word")
    return found + (", or several" if typing.get_origin(each.type) is list else "")


def main(argv: list[str]) -> None:
    ArgumentParser(description=__doc__).parse_args(argv)  # there are no flags
    replace_file(PAGE, page())


if __name__ == "__main__":
    main(sys.argv[1:])
