"""Reads the flags of every command, and the TOML file that --config names.

A command declares a flat dataclass whose fields `flag` makes: a field's name is the flag and the
key of the file, and the class's docstring is what --help says. With the field `times: int = flag(1,
"how often", least=1)` a command takes `--times 2`, and a file `times = 2`. Flags override the file,
the file overrides defaults. All numbers have bounds, no word is empty, and dashes may stand for
underscores. No torch is imported here: --help is to be quick.
"""

import math
import os
import re
import shlex
import sys
import tomllib
import typing
from argparse import Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields
from pathlib import Path

from training.host.errors import UserError, import_with_variables, program
from training.host.files import check_paths, check_working_directory, read_file
from training.host.other_trainers import WORDS, Meaning, meaning
from training.host.threads import device_of, limit_spinning

LARGE = 2**31 - 1  # larger steps, sizes and seeds are nonsense, or overflow
SMALLEST = 1e-12  # stands for "above 0"
SETTINGS = ".toml", ".yaml", ".yml", ".json"  # endings of files that are meant for --config
ROWS = ".jsonl", ".ndjson", ".csv", ".tsv"  # endings of data, which --config does not read
TOML_BYTES = 2**20  # a longer file of settings is refused
NEARLY = 0.01  # share by which thousands of tokens may be off a power of two: 131k, 262k
MOST_REASONS = 6  # that a message about a file gives
MANY_NAMES = 3  # a file with so many settings of another trainer is to be translated


def flag(
    default=MISSING,
    help: str = "",
    choices: Iterable[str | int] | None = None,
    *,
    least: float = 0,
    most: float = LARGE,
    bare: str | None = None,
    positional: bool = False,
    group: str | None = None,
    tokens: bool = False,
    share_of: str | None = None,
):
    """Makes a field whose type is bool, int, float, str or Path, a list of such a type, or such a
    type or None.

    A field of `bool | str` is a switch that also takes a word, as `--show_batch` and `--show_batch
    FILE`.

    Args:
        default: value of a flag that is not given; `list` stands for an empty list. Without it the
            flag must be given.
        choices: words or numbers that the flag takes.
        least, most: range of a number, or of each number of a list.
        bare: value of a flag that stands without a value.
        positional: given by place, without the name, and not in a file; of a list one or more.
        group: title in --help, also of the fields below up to the next title.
        tokens: a number of tokens, which may be written 128k or 1M.
        share_of: attribute of the command's object, a number: 0.1 is refused with what a tenth of
            it is.
    """
    metadata = {
        "help": help,
        "choices": choices and tuple(choices),
        "least": least,
        "most": most,
        "bare": bare,
    }
    default_options = {"default_factory": list} if default is list else {"default": default}
    metadata |= {"positional": positional, "group": group, "tokens": tokens, "share_of": share_of}
    return field(**default_options, metadata=metadata)


class Rule(typing.NamedTuple):
    """Settings that are refused beside each other: a row of the table `rules` that a command's
    dataclass has."""

    # flags, separated by spaces, that have no effect; "": the settings exclude each other
    idle: str
    # end of the message "NAME has no effect ...", or all of it; {name} stands for a setting's value
    why: str
    # takes an object of the dataclass; the row holds if the result is true
    when: Callable[[typing.Any], object]


def refuse(flags, flag_names: Iterable[str], rules: Iterable[Rule]) -> None:
    """Raises UserError by the first rule that holds and names one of `flag_names`, or no flag.

    A switch that is off by default, and is turned off, may stand beside anything.
    """
    off = {
        entry.name
        for entry in fields(flags)
        if entry.default is False and getattr(flags, entry.name) is False
    }
    for idle, why, when in rules:
        named = [name for name in idle.split() if name in {*flag_names} - off]
        if (named or not idle) and when(flags):
            why = why.format(**vars(flags), program=program())
            raise UserError(f"{named[0]} has no effect {why}" if named else why)


def read_flags(kind: type, argv: list[str], program: str):
    """Returns an object of the dataclass `kind`; otherwise as `given_flags`.

    Flags without effect are refused.
    """
    flag_values = given_flags(kind, argv, program)
    flags = kind(**flag_values)
    refuse(flags, flag_values, getattr(kind, "rules", ()))
    return flags


def read_command(kinds: dict[str, type], argv: list[str], program: str):
    parser = Parser(prog=program)
    parser.add_argument(
        "command", choices=kinds, help="; ".join(f"{name}: {kinds[name].__doc__}" for name in kinds)
    )
    if not argv:
        raise UserError(f"a command is missing: give {program} {' or '.join(kinds)}")
    name = parser.parse_args(argv[:1]).command
    return read_flags(kinds[name], argv[1:], f"{program} {name}")


def given_flags(kind: type, argv: list[str], program: str) -> dict[str, typing.Any]:
    """Returns the values that --config's file and flags give, by the names of the fields; defaults
    are left out.

    Raises UserError for a flag or key that is unknown or missing, or has a value that it does not
    take.
    """
    command = CommandLine(kind, program)
    values = command.parse(argv)
    if (path := values.pop("config", None)) is not None:
        values = command.parse_file(path) | values
    for entry in fields(kind):
        if entry.name in values:
            values[entry.name] = _checked(entry, values[entry.name])
        elif _is_needed(entry):
            raise UserError(f"{entry.name} is missing: {entry.metadata['help']}")
    _refuse_shares(kind, values)
    return values


def _is_needed(entry: Field) -> bool:
    return entry.default is entry.default_factory is MISSING


class CommandLine:
    """Reads the words of a command line: the flags of the dataclass `kind`, and --config."""

    def __init__(self, kind: type, program: str):
        self._kind = kind
        positional = [entry.name for entry in fields(kind) if entry.metadata["positional"]]
        places = "".join(f" {name}" for name in positional)
        self._call = f"{program}{places}"
        self._by_place = f"; without a name, by their place: {self._call}" if places else ""
        self._positional = positional
        self._names = [entry.name for entry in fields(kind) if not entry.metadata["positional"]]
        self._parser = Parser(
            prog=program,
            usage=f"%(prog)s{places} [--flag value ...]",
            description=kind.__doc__,
            allow_abbrev=False,
        )
        self._parser.add_argument(
            "--config", metavar="FILE", help="TOML file with the same names as the flags"
        )
        self._spelled: dict[str, str] = {}  # each flag by its name in underscores alone
        for title, members in grouped(kind).items():
            section = self._parser.add_argument_group(title) if title else self._parser
            for entry in members:
                for option in _add_argument(section, entry).option_strings:
                    self._spelled[_underscored(option)] = option

    def parse(self, words: list[str]) -> dict[str, typing.Any]:
        """Returns the values of words, and of "config" if they have that."""
        arguments, unknown = self._parser.parse_known_intermixed_args(self._spell(words))
        if unknown:
            self._refuse_word(unknown[0])
        return {
            name: value
            for name, value in vars(arguments).items()
            # A positional list is empty where a file gives it, or nothing does.
            if value is not None and not (name in self._positional and value == [])
        }

    def parse_file(self, path: str) -> dict[str, typing.Any]:
        """Returns the values of a TOML file."""
        _check_word("config", path)
        try:
            words = as_words(_read_toml(Path(path), self._kind), self._names, self._kind, path)
            return self.parse(words)
        except (ValueError, RecursionError) as error:  # also a UserError
            raise UserError(f"--config {path}: {error}") from None

    def _spell(self, words: list[str]) -> list[str]:
        """Returns the words with each flag as argparse knows it. Raises UserError for others."""
        options = {*self._spelled, "--config", "--help"}
        cut = [word.partition("=") for word in words]
        unknown = [
            word
            for word, (name, _, _) in zip(words, cut)
            if re.match("--[a-zA-Z_]", word) and _underscored(name) not in options
        ]
        if unknown:
            raise self._unknown(unknown)
        return [
            self._spelled.get(_underscored(name), name) + equals + value
            for name, equals, value in cut
        ]

    def _refuse_word(self, word: str) -> typing.NoReturn:
        """Raises UserError for a word that argparse left over: it is neither a flag nor a value."""
        if word.lower() in ("true", "false"):
            raise UserError(
                f"{word!r} stands behind a switch, which has no value: give --NAME, or --no-NAME"
            )
        if not word.startswith("-") and not word.endswith(SETTINGS):
            raise UserError(
                f"{word[:80]!r} has no flag before it; give {self._call} [--flag value ...]"
            )
        raise self._unknown([word])

    def _unknown(self, words: list[str]) -> UserError:
        names = ["config", *self._names]
        return UserError(_unknown("flag", words, names, self._kind) + self._by_place)


def answer_early(
    read: Callable[[list[str]], object] = lambda words: None,
    packages: Sequence[str] = ("tqdm", "torch"),
) -> None:
    """Answers --help, and refuses wrong flags and paths, before a script imports torch.

    That import takes seconds. `read` returns the command's flags, an object or a dict.

    Ranks of torchrun read the words only then: the main rank shows the error. Environment variables
    that `packages` refuse at their import are refused. Threads of torch that wait spin for a short
    while only, where no GPU computes.
    """
    try:
        if "RANK" not in os.environ:
            check_working_directory()
            flags = read(sys.argv[1:])
            if flags is not None:
                check_paths(flags if isinstance(flags, dict) else vars(flags))
        if "torch" in packages:
            limit_spinning(device_of(sys.argv[1:]))
        for package in packages:
            import_with_variables(package, package.upper())
    except UserError as error:
        sys.exit(f"error: {' '.join(str(error).splitlines())}")


def as_words(values: dict, names: list[str], kind: type | None = None, file: str = "") -> list[str]:
    """Returns the words of a command line: {"times": 2, "aloud": False} is ["--times=2",
    "--no-aloud"].

    Raises UserError for names that are not in `names`, all at once, and for values that no flag
    has.

    Args:
        kind: the command's class, as in `_unknown`.
        file: the path of the settings, for a command that translates them.
    """
    if unknown := [
        name
        for name in flattened(values)
        if name not in names and name.partition(".")[0] not in names
    ]:
        raise UserError(_unknown("key", unknown, names, kind) + _translation(unknown, kind, file))
    words = []
    for name, value in values.items():
        if not all(
            isinstance(one, (str, int, float))
            for one in (value if isinstance(value, list) else [value])
        ):
            raise UserError(
                f"{name} must be a word, a number, true, false or a list, got {value!r}"
            )
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={value}")
    return words


def flattened(values: dict, tables: str = "") -> dict[str, typing.Any]:
    """Returns the values of tables within tables by their names with dots: {"a": {"b": 1}} is
    {"a.b": 1}."""
    flat: dict[str, typing.Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{tables}{name}.")
        else:
            flat[f"{tables}{name}"] = value
    return flat


def grouped(kind: type) -> dict[str, list[Field]]:
    """Returns the fields of a command by their titles in --help; "" has fields above any title.

    A field that a class declares anew without a title keeps the title that its base gave it.
    """
    groups: dict[str, list[Field]] = {}
    title = ""  # a field without a title continues the group of the field before it
    for entry in fields(kind):
        title = _title_of(kind, entry.name) or title
        groups.setdefault(title, []).append(entry)
    return groups


def _title_of(kind: type, name: str) -> str:
    """Returns the title that a class or the nearest of its bases gives a field; "" if none does."""
    for base in kind.__mro__:
        declared = vars(base).get("__dataclass_fields__", {}).get(name)
        if declared and declared.metadata["group"]:
            return declared.metadata["group"]
    return ""


class Parser(ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        message = message.removeprefix("argument --")
        name, _, why = message.partition(": ")
        action = self._option_string_actions.get(f"--{name}")
        if why.endswith("argument") and action is not None:  # it has no value
            message += f": {', '.join(map(str, action.choices)) if action.choices else action.help}"
        raise UserError(message)


class SwitchOrWord(Action):
    """Reads --name as true, --name WORD as the word, and --no-name as false."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options):
        super().__init__([*option_strings, f"--no-{dest}"], dest, nargs="?", const=True, **options)

    def __call__(self, parser, namespace, values, option_string=None):
        if str(option_string).startswith("--no-"):
            if values is not True:
                raise UserError(
                    f"{option_string[2:]} takes no word, got {values[:80]!r}; drop one of both"
                )
            values = False
        setattr(namespace, self.dest, values)


def _add_argument(parser, entry: Field) -> Action:
    metadata, is_list = entry.metadata, typing.get_origin(entry.type) is list
    element = _element(entry)
    default = "" if entry.default in (MISSING, None, False) else f"; default: {entry.default}"
    options: dict[str, typing.Any] = {
        "help": (metadata["help"] + default).replace("%", "%%"),
        "default": None,
    }
    if entry.type == bool | str:
        options |= {"action": SwitchOrWord, "metavar": "WORD"}
    elif element is bool:
        options["action"] = BooleanOptionalAction
    else:
        options |= {"type": _reader(entry, element), "choices": metadata["choices"]}
        if metadata["choices"] is None:
            options["metavar"] = entry.name if metadata["positional"] else element.__name__.upper()
        if is_list and metadata["positional"]:
            options["nargs"] = "*"  # none are the words of a file, or are refused below as missing
        elif is_list:  # --data a --data b is --data a b
            options |= {"nargs": "+", "action": "extend"}
        elif metadata["positional"] or metadata["bare"] is not None:
            options |= {"nargs": "?", "const": metadata["bare"]}
    return parser.add_argument(
        entry.name if metadata["positional"] else f"--{entry.name}", **options
    )


def _reader(entry: Field, element: type) -> Callable[[str], str | int | float]:
    """Returns a function that makes a flag's value of a word, and refuses other words with what may
    stand there."""
    choices: tuple = entry.metadata["choices"] or ()

    def read(word: str) -> str | int | float:
        try:
            if entry.metadata["tokens"]:
                return read_tokens(word)
            value = word if element is Path else element(word)
        except ValueError as error:
            if isinstance(error, UserError):
                raise ArgumentTypeError(str(error)) from None
            number = _likely_number(word)
            if entry.metadata["share_of"] and number is not None and 0 < number < 1:
                return number
            kind = "whole number, such as 512" if element is int else "number, such as 0.5"
            is_likely = number is not None and (element is float or number == int(number))
            meant = f"; did you mean {element(number)}?" if is_likely and number is not None else ""
            raise ArgumentTypeError(f"{word[:80]!r} is not a {kind}{meant}") from None
        if choices and value not in choices:
            # sizes of Qwen3 have no prefix
            names = (word.lower(), word.lower().rpartition("/")[2].removeprefix("qwen3-"))
            elsewhere = WORDS.get(entry.name, {}).items()
            likely = [one for one in choices if str(one).lower() in names]
            likely += [
                ours for ours, theirs in elsewhere if word.lower() in theirs.split() and not likely
            ]
            meant = "".join(f"; did you mean {one}?" for one in likely)
            raise ArgumentTypeError(
                f"{word[:80]!r} is not one of {', '.join(map(str, choices))}{meant}"
            )
        return value

    return read


def read_tokens(word: str) -> int:
    """Returns a number of tokens from 131072, 131_072, 128k or 1M: k is 1,024, and M is k times k.

    Raises ValueError for other words, and UserError for 131k: it is nearly a power of two in
    thousands, which is written 128k.
    """
    written = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([kKmM])i?", word, re.ASCII)
    if written is None:
        return int(word)
    unit = 10 if written[2] in "kK" else 20
    amount = float(written[1])
    tokens = amount * 2**unit
    in_thousands = amount * 1000 ** (unit // 10)
    power = 2 ** round(math.log2(max(1.0, in_thousands)))
    if abs(in_thousands / power - 1) < NEARLY and tokens != power:
        said = f"{word!r} is {tokens:,.0f} tokens, as k is 1,024"
        raise UserError(f"{said}; did you mean {power // 2**10}k, which is {power:,}?")
    if tokens != int(tokens):
        raise UserError(
            f"{word!r} is no whole number of tokens, as k is 1,024; "
            f"give one, such as {round(tokens)}"
        )
    return int(tokens)


def _likely_number(word: str) -> float | None:
    """Returns the number that a word stands for elsewhere, such as 131,072 or 1e5, 10k of
    thousands, 10%; or None."""
    scales = {"k": 1e3, "m": 1e6, "%": 0.01, "": 1.0}
    written = re.fullmatch(
        r"([\d_,.]{1,20}(?:e[+-]?\d{1,2})?)([km%]?)", word.strip().lower(), re.ASCII
    )
    if written is None:
        return None
    plain = re.sub(r"[,_](?=\d{3}(\D|$))", "", written[1])
    with suppress(ValueError):
        return float(plain) * scales[written[2]]
    return None


def _refuse_shares(kind: type, flag_values: dict[str, typing.Any]) -> None:
    """Refuses a share in place of a number, as --warmup_steps 0.1, and names the number meant."""
    for entry in fields(kind):
        share = flag_values.get(entry.name)
        if entry.metadata["share_of"] is None or not isinstance(share, float):
            continue
        remaining = {name: value for name, value in flag_values.items() if name != entry.name}
        total = getattr(kind(**remaining), entry.metadata["share_of"])
        what = f"{entry.name} {share:g} is a share, and a number of steps is asked for"
        if total is None:
            raise UserError(
                f"{what}: how many steps the run has, its data or its checkpoint settle; "
                "give a number"
            )
        number = max(1, round(share * total))
        raise UserError(
            f"{what}: {100 * share:g}% of {total} steps are {number}; give {entry.name} {number}"
        )


def _underscored(option: str) -> str:
    return option[:2] + option[2:].replace("-", "_")


def _element(entry: Field) -> typing.Any:
    return next(iter(typing.get_args(entry.type)), entry.type)


def _checked(entry: Field, value):
    """Returns the value, with words as paths if the field has paths.

    Raises UserError for a value out of range.
    """
    if value == []:
        raise UserError(f"{entry.name} is --, which argparse takes for nothing; give another value")
    if isinstance(value, list):
        return [_checked(entry, one) for one in value]
    least, most = entry.metadata["least"], entry.metadata["most"]
    if type(value) in (int, float) and not least <= value <= most:
        raise UserError(f"{entry.name} must be between {least} and {most}, got {value}")
    if not isinstance(value, str):
        return value
    _check_word(entry.name, value)
    return Path(value) if _element(entry) is Path else value


def _check_word(name: str, word: str) -> None:
    if not word or "\0" in word:
        raise UserError(f"{name} is an empty string or has a NUL; give a value, or drop it")


def _settings_in(text: str) -> dict[str, typing.Any]:
    if settings := tomllib.loads(text):
        return settings
    raise UserError("it has no settings; write some, such as max_steps = 20, or drop --config")


def _read_toml(path: Path, kind: type) -> dict[str, typing.Any]:
    """Returns the keys of a file.

    Raises ValueError for a file that is no TOML, and names YAML and JSON.
    """
    text = read_file(path, "give --config a TOML file", TOML_BYTES).decode("utf-8-sig")
    if path.suffix.lower() in ROWS and any(entry.name == "data" for entry in fields(kind)):
        raise UserError(
            f"it is a file of rows, and settings are TOML; to train on it, give --data {path}"
        )
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        if not is_yaml:
            return _settings_in(text)
    except tomllib.TOMLDecodeError:
        if not re.search(r"^[\w-]+:(\s|$)|^\s*\{", text, re.MULTILINE):
            raise
    write = "it is YAML or JSON, and settings are TOML: for max_steps: 20 write max_steps = 20"
    raise UserError(write + _translation([], kind, str(path)))


def _translation(unknown: Sequence[str], kind: type | None, file: str) -> str:
    """Returns the end of an error: the command that translates a file of settings, where the
    command has one.

    `unknown` are the file's unknown keys; none: the file is no TOML. A few may be slips.
    """
    translator = getattr(kind, "translator", None)
    is_other = not unknown or any("." in name for name in unknown) or len(unknown) >= MANY_NAMES
    if not (translator and file and is_other):
        return ""
    return (
        f"; {program()} -m {translator} {shlex.quote(file)} prints a config of another trainer "
        "as ours"
    )


def _unknown(what: str, words: Sequence[str], names: list[str], kind: type | None) -> str:
    """Returns the message for flags or keys that a command lacks: it names the flag that each
    means.

    The table `absent` of the command's class says why there is nothing like some other trainer's
    flag.
    """
    dashes = "--" if what == "flag" else ""
    meant: list[str] = []
    reasons: dict[str, list[str]] = {}
    for word in dict.fromkeys(words):
        if dashes and word.endswith(SETTINGS) and not word.startswith("-"):
            known, likely = Meaning(flag=f"config {word}"), f"--config {word}"
        else:
            name = _underscored(word.partition("=")[0]).lstrip("-")
            known = meaning(name, names, getattr(kind, "absent", {}))
            likely = f"{dashes}{known.flag}"
        if known.why is not None:
            reasons.setdefault(known.why, []).append(f"{dashes}{name}")
        else:
            shown = word if dashes else repr(word)
            meant.append(f"{shown}; did you mean {likely}?" if known.flag else shown)
    # a command that is named in the message gives them
    if len(reasons) > MOST_REASONS and what == "key":
        reasons = {"": [flag for flags in reasons.values() for flag in flags]}
    there_is_no = []
    for why, theirs in reasons.items():
        reason = f": {why.format(python=program(), torchrun=program('torchrun'))}" if why else ""
        there_is_no.append(f"there is no {', '.join(theirs)}{reason}")
    if len(meant) == 1:
        return "; ".join([f"unknown {what} {meant[0]}", *there_is_no])
    listed = ", ".join(
        sentence.replace("; did you mean ", " (did you mean ").replace("?", "?)")
        for sentence in meant
    )
    return "; ".join([f"unknown {what}s {listed}", *there_is_no] if meant else there_is_no)
