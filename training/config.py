"""A configuration dataclass as command-line flags and as a TOML file."""

import difflib
import tomllib
import typing
from argparse import ArgumentParser, BooleanOptionalAction
from dataclasses import field, fields
from pathlib import Path

from training.errors import UserError


def flag(default, help: str, choices: tuple[str, ...] | None = None):
    """A field of a configuration: its default, and what `--help` says of it."""
    make = {"default_factory": default} if callable(default) else {"default": default}
    return field(**make, metadata={"help": help, "choices": choices})


def given_settings(config_type: type, argv: list[str], description: str) -> dict:
    """The settings that are given, field name -> value: those of --config's TOML file, overridden by flags.

    Args:
        config_type: a dataclass whose fields `flag` made: field name = flag = key of the file.

    Raises:
        UserError: unknown flag or key (the nearest name is offered), a value of the wrong type, an unreadable file.
    """
    parser = ArgumentParser(description=description, allow_abbrev=False)
    parser.error = _raise_user_error
    parser.add_argument("--config", help="TOML file with the same names as the flags")
    types = typing.get_type_hints(config_type)
    for f in fields(config_type):
        kind = _element_type(types[f.name])
        options = {"help": f.metadata["help"].replace("%", "%%"), "default": None, "dest": f.name}
        if kind is bool:
            options["action"] = BooleanOptionalAction
        else:
            options |= {"type": kind, "choices": f.metadata["choices"]}
            if f.metadata["choices"] is None:
                options["metavar"] = kind.__name__.upper()
            if types[f.name] == list[str]:
                options["nargs"] = "+"
        parser.add_argument(f"--{f.name}", **options)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [f"--{f.name}" for f in fields(config_type)] + ["--config"]
        raise UserError(f"unknown flag {unknown[0]}{_nearest(unknown[0].split('=')[0], known)}")
    flags = {name: value for name, value in vars(arguments).items() if value is not None and name != "config"}
    return (_read_toml(arguments.config, config_type) if arguments.config else {}) | flags


def _raise_user_error(message: str) -> typing.NoReturn:
    raise UserError(message)


def _element_type(annotation) -> type:
    """int for `int` and `int | None`, str for `list[str]`."""
    return next((t for t in typing.get_args(annotation) if t is not type(None)), annotation)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_toml(path: str, config_type: type) -> dict:
    types = typing.get_type_hints(config_type)
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read --config {path}: {error}") from None
    choices = {f.name: f.metadata["choices"] for f in fields(config_type)}
    for name, value in values.items():
        if name not in types:
            raise UserError(f"unknown key {name!r} in {path}{_nearest(name, list(types))}")
        kind = _element_type(types[name])
        if kind is float and type(value) is int:
            value = values[name] = float(value)
        elements = value if types[name] == list[str] and isinstance(value, list) else [value]
        if any(type(e) is not kind for e in elements) or (types[name] == list[str]) != isinstance(value, list):
            expected = f"a list of {kind.__name__}" if types[name] == list[str] else kind.__name__
            raise UserError(f"{name} in {path} must be {expected}, got {value!r}")
        if choices[name] and value not in choices[name]:
            raise UserError(f"{name} in {path} must be one of {', '.join(choices[name])}, got {value!r}")
    return values
