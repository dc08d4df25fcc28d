"""Reads the flags of every command, and the TOML file that --config names.

A command declares a flat dataclass whose fields `flag` makes: a field's name is the flag and the key of the file. Flags
override the file, the file overrides defaults. The class's docstring is what --help says of the command.

    @dataclass
    class Greeting:
        \"\"\"Greet somebody.\"\"\"

        name: str = flag(help="whom to greet", positional=True)
        times: int = flag(1, "how often", least=1)

    read_flags(Greeting, ["Ada", "--times", "2"], "python -m greet")  # Greeting(name="Ada", times=2)
"""

import difflib
import tomllib
import typing
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable
from dataclasses import MISSING, Field, field, fields
from pathlib import Path

from training.host.errors import UserError
from training.host.files import read_file

LARGE = 2**31 - 1  # larger steps, sizes and seeds are nonsense, or overflow
SMALLEST = 1e-12  # stands for "above 0"


def flag(
    default=MISSING,
    help: str = "",
    choices: Iterable[str] | None = None,
    *,
    least: float = 0,
    most: float = LARGE,
    bare: str | None = None,
    positional: bool = False,
):
    """A field of a command's dataclass, of type bool, int, float, str, Path, a list of these, or one of these or None.

    Args:
        default: its value where nothing is given; `list` is an empty list. Without a default it must be given.
        help: its line in --help.
        choices: the words that it takes.
        least, most: range of a number, or of each number of a list.
        bare: the value of a flag that stands without one.
        positional: given by its place on the command line, without its name.
    """
    metadata = {"help": help, "choices": choices and tuple(choices), "least": least, "most": most, "bare": bare}
    made = {"default_factory": list} if default is list else {"default": default}
    return field(**made, metadata={**metadata, "positional": positional})


def read_flags(kind: type, argv: list[str], program: str):
    """An object of the dataclass `kind` with the values that flags and --config give; `program` is its name in --help.

    Raises:
        UserError: as `given_flags`.
    """
    return kind(**given_flags(kind, argv, program))


def read_command(kinds: dict[str, type], argv: list[str], program: str):
    """Like `read_flags`, for a program of several commands: the first word names one, and with it the dataclass."""
    parser = Parser(prog=program)
    parser.add_argument("command", choices=kinds, help="; ".join(f"{name}: {kinds[name].__doc__}" for name in kinds))
    name = parser.parse_args(argv[:1]).command
    return read_flags(kinds[name], argv[1:], f"{program} {name}")


def given_flags(kind: type, argv: list[str], program: str) -> dict[str, typing.Any]:
    """The values that --config's file and flags give, by the names of the fields of `kind`; defaults are left out.

    Raises:
        UserError: an unknown flag or key (the nearest name is offered), a value that its flag does not take, a missing
            one without a default, an unreadable file.
    """
    known = {each.name: each for each in fields(kind)}
    parser = Parser(prog=program, description=kind.__doc__, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same names as the flags")
    for each in known.values():
        _add_argument(parser, each)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        flags = ["--config", *(f"--{each.name}" for each in known.values() if not each.metadata["positional"])]
        raise UserError(f"unknown flag {unknown[0]}{_nearest(unknown[0].split('=')[0], flags)}")
    given = {name: value for name, value in vars(arguments).items() if value is not None and name != "config"}
    for name, value in given.items():
        if why := refusal(known[name], value):
            raise UserError(f"{name} {why}")
    given = (_read_toml(known, arguments.config) if arguments.config else {}) | given
    for each in known.values():
        if each.name not in given and each.default is each.default_factory is MISSING:
            raise UserError(f"{each.name} is missing: {each.metadata['help']}")
    return given


def refusal(each: Field, value) -> str | None:
    """Why a field does not take a value, such as "must be int, got True"; None: it does."""
    metadata, element = each.metadata, _element_type(each.type)
    if not has_type(value, each.type):
        return f"must be {'a list of ' * _is_list(each.type)}{element.__name__}, got {value!r}"
    for one in value if isinstance(value, list) else [value]:
        if metadata["choices"] and one not in (None, *metadata["choices"]):
            return f"must be one of {', '.join(metadata['choices'])}, got {one!r}"
        if type(one) in (int, float) and not metadata["least"] <= one <= metadata["most"]:
            return f"must be between {metadata['least']} and {metadata['most']}, got {one}"
        if isinstance(one, str) and (not one or "\0" in one):
            return "is an empty string or has a NUL; give a value, or drop it"
    return None


def has_type(value, annotation) -> bool:
    """Whether a value is what the annotation says. A whole number will do for a float."""
    if _is_list(annotation):
        return isinstance(value, list) and all(has_type(one, _element_type(annotation)) for one in value)
    kind, kinds = type(value), typing.get_args(annotation) or (annotation,)
    return kind in kinds or (kind is int and float in kinds) or (isinstance(value, Path) and Path in kinds)


def refuse_together(flags, *pairs: tuple[str, str]) -> None:
    """Raise UserError where both flags of a pair have another value than their default: the first has no effect."""
    given = {each.name for each in fields(flags) if getattr(flags, each.name) not in (each.default, [])}
    for name, other in pairs:
        if {name, other} <= given:
            raise UserError(f"{name} has no effect with {other}; drop one")


class Parser(ArgumentParser):
    """An ArgumentParser whose errors are of one line."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def _add_argument(parser: Parser, each: Field) -> None:
    metadata, element = each.metadata, _element_type(each.type)
    default = "" if each.default in (MISSING, None, False) else f"; default: {each.default}"
    options: dict[str, typing.Any] = {"help": (metadata["help"] + default).replace("%", "%%"), "default": None}
    if element is bool:
        options["action"] = BooleanOptionalAction
    else:
        options |= {"type": element, "choices": metadata["choices"]}
        if metadata["choices"] is None:
            options["metavar"] = each.name if metadata["positional"] else element.__name__.upper()
        if _is_list(each.type):
            options["nargs"] = "+"
        elif metadata["positional"] or metadata["bare"] is not None:
            options |= {"nargs": "?", "const": metadata["bare"]}
    parser.add_argument(each.name if metadata["positional"] else f"--{each.name}", **options)


def _is_list(annotation) -> bool:
    return typing.get_origin(annotation) is list


def _element_type(annotation) -> type:
    """int of `int`, `int | None` and `list[int]`."""
    return next((kind for kind in typing.get_args(annotation) if kind is not type(None)), annotation)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_toml(known: dict[str, Field], path: str) -> dict[str, typing.Any]:
    content = read_file(Path(path), "give --config a TOML file")
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read --config {path}: {error}") from None
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown key {name!r} in {path}{_nearest(name, [*known])}")
        value = values[name] = _from_toml(value, _element_type(known[name].type))
        if why := "is an empty list; give at least one, or drop it" if value == [] else refusal(known[name], value):
            raise UserError(f"{name} in {path} {why}")
    return values


def _from_toml(value, element: type):
    """The value as its flag would read it: 32 is "32" of a flag of words, "a.png" a Path."""
    if isinstance(value, list):
        return [_from_toml(one, element) for one in value]
    if type(value) is int and (element is str or (element is float and abs(value) <= LARGE)):
        return element(value)
    return Path(value) if element is Path and isinstance(value, str) else value
