"""The reader of flags: types, places, files, and refusals of one line; a command declares a dataclass."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from training.flags import flag, read_command, read_flags, refuse_together
from training.host.errors import UserError


@dataclass
class Greeting:
    """Greet somebody."""

    name: str = flag(help="whom to greet", positional=True)
    day: str | None = flag(None, "the day's name", positional=True)
    times: int = flag(1, "how often, 100% sure", least=1, most=9)
    tone: str = flag("plain", "how", ("plain", "warm"), bare="warm")
    pauses: list[float] = flag(list, "seconds between", most=60)
    file: Path | None = flag(None, "goes there")
    aloud: bool | None = flag(None, "or not")


@dataclass
class Farewell:
    """Say goodbye."""

    names: list[str] = flag(help="to whom")


def read(*argv):
    return read_flags(Greeting, [*argv], "python -m greet")


def test_flags_stand_anywhere_and_have_their_types():
    assert read("Ada") == Greeting("Ada", None, 1, "plain", [], None, None)
    given = read("--times=2", "Ada", "--pauses", "1", "2.5", "--tone", "--file", "a.txt", "Monday", "--no-aloud")
    assert given == Greeting("Ada", "Monday", 2, "warm", [1.0, 2.5], Path("a.txt"), False)
    assert read("--tone", "plain", "Ada", "--aloud") == Greeting("Ada", aloud=True)


def test_a_file_gives_way_to_flags(tmp_path):
    file = tmp_path / "greeting.toml"
    file.write_text('times = 3\npauses = [1, 2.5]\nfile = "a.txt"\naloud = true\n')
    given = read("--config", str(file), "Ada", "--times", "4")
    assert given == Greeting("Ada", None, 4, "plain", [1, 2.5], Path("a.txt"), True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name is missing: whom to greet"),
        (["Ada", "--time", "2"], "unknown flag --time; did you mean --times?"),
        (["Ada", "--name", "Ada"], "unknown flag --name"),
        (["Ada", "Monday", "noon"], "unknown flag noon"),
        (["Ada", "--times", "0"], "times must be between 1 and 9, got 0"),
        (["Ada", "--times", "2.5"], "argument --times: invalid int value: '2.5'"),
        (["Ada", "--tone", "cold"], "invalid choice: 'cold' (choose from 'plain', 'warm')"),
        (["Ada", "--pauses", "1", "nan"], "pauses must be between 0 and 60, got nan"),
        (["Ada", "--pauses"], "argument --pauses: expected at least one argument"),
        ([""], "name is an empty string or has a NUL; give a value, or drop it"),
    ],
)
def test_flags_that_are_refused(argv, message):
    with pytest.raises(UserError) as refused:
        read(*argv)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("times = true", "argument --times: expected one argument"),
        ("times = 10", "times must be between 1 and 9, got 10"),
        ("pauses = ['a']", "argument --pauses: invalid float value: 'a'"),
        ("pauses = [[1]]", r"pauses must be a word, a number, true, false or a list, got \[\[1\]\]"),
        ("pauses = []", "argument --pauses: expected at least one argument"),
        ("tone = 'cold'", "argument --tone: invalid choice: 'cold'"),
        ("file = 1979-05-27", "file must be a word, a number, true, false or a list, got"),
        ("time = 3", "unknown key 'time'; did you mean times?"),
        ("name = 'Ada'", "unknown key 'name'"),
        ("help = true", "unknown key 'help'"),
        ("times =", "Invalid value"),
    ],
)
def test_files_that_are_refused(text, message, tmp_path):
    (tmp_path / "greeting.toml").write_text(text)
    with pytest.raises(UserError, match=message if "between" in message else f"greeting.toml: {message}"):
        read("Ada", "--config", str(tmp_path / "greeting.toml"))


def test_flags_that_have_no_effect_together():
    pairs = ("times", "file"), ("pauses", "tone")
    refuse_together(Greeting("Ada", times=2, tone="warm"), *pairs)
    with pytest.raises(UserError, match="pauses has no effect with tone; drop one"):
        refuse_together(Greeting("Ada", pauses=[1.0], tone="warm"), *pairs)


def test_a_program_of_several_commands(capsys):
    commands = {"greet": Greeting, "part": Farewell}
    assert read_command(commands, ["part", "--names", "Ada", "Bob"], "python -m say") == Farewell(["Ada", "Bob"])
    for argv, message in ((["shout"], "invalid choice: 'shout'"), (["part"], "names is missing: to whom")):
        with pytest.raises(UserError, match=message):
            read_command(commands, argv, "python -m say")
    for argv, words in (
        (["--help"], ["greet", "Say goodbye."]),
        (["greet", "--help"], ["python -m say greet", "--times INT", "how often, 100% sure; default: 1", "--no-aloud"]),
    ):
        with pytest.raises(SystemExit) as exit:
            read_command(commands, argv, "python -m say")
        out = capsys.readouterr().out
        assert exit.value.code == 0 and all(word in out for word in words)
