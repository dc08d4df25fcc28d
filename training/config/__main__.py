"""Prints a config of another trainer as settings of train.py: `python -m training.config
theirs.yaml > run.toml`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from training.config.theirs import read_theirs
from training.config.translate import as_toml, translate
from training.flags import flag, read_flags
from training.host.files import check_can_write, replace_file
from training.host.processes import command


@dataclass
class ConfigFlags:
    """Print a config of axolotl, LLaMA-Factory, ms-swift, torchtitan, TRL or verl for train.py."""

    file: Path = flag(help="their YAML, JSON or TOML", positional=True)
    out: Path | None = flag(None, "a file in place of standard output", positional=True)


@command
def main(argv: list[str]) -> None:
    flags = read_flags(ConfigFlags, argv, "python -m training.config")
    theirs = read_theirs(flags.file)
    target = flags.out or flags.file.with_suffix(
        ".toml" if flags.file.suffix != ".toml" else ".fathom.toml"
    )
    if flags.out:
        check_can_write(flags.out, "out")
    text = as_toml(translate(theirs), str(target))
    if flags.out:
        replace_file(flags.out, text)
    else:
        print(text, end="")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
