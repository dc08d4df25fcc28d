"""What holds for every source file."""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def layout(page: str) -> list[str]:
    """Returns the paths of a tree of files, as "training/" and "training/flags.py": two spaces of
    indentation per folder."""
    paths, folders = [], []
    for line in page.split("## Layout", 1)[1].split("```")[1].strip().splitlines():
        indentation, name = re.match(r"( *)(\S+)", line).groups()
        del folders[len(indentation) // 2 :]
        paths.append("".join(folders) + name)
        folders += [name] if name.endswith("/") else []
    return paths


def test_layout_names_every_file_once_in_its_folder():
    """CONTRIBUTING.md's tree is the program's: a stranger finds a file there, and in one place."""
    programs = [*ROOT.glob("*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("training/**/*.py")]
    files = {str(path.relative_to(ROOT)): path for path in programs if "__" not in path.name}
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in programs} - {"./"}
    named = [
        path
        for path in layout((ROOT / "CONTRIBUTING.md").read_text())
        if path.endswith(".py") or path.startswith(("kernels/", "training/"))
    ]
    mend = [f"delete the line of {path}" for path in sorted({*named} - {*files} - folders)]
    mend += [f"name {path} once" for path in {*named} if named.count(path) > 1]
    for path in sorted(({*files} | folders) - {*named}):
        folder, _, name = path.rstrip("/").rpartition("/")
        name = "  " * path.rstrip("/").count("/") + name + "/" * path.endswith("/")
        sentence = ast.get_docstring(ast.parse(files[path].read_text())) if path in files else ""
        mend.append(f"below the line of {folder}/ add:\n{name:<27} {sentence.split(chr(10))[0]}")
    assert not mend, "mend the tree of CONTRIBUTING.md:\n" + "\n".join(mend)


def test_layout_has_folders_by_indentation():
    page = (
        "## Layout\n\n```\na.py  b.py\nk/  sums: c.py\n  d/  e\n    f.py  g\n  h.py  i\n```\nrest"
    )
    assert layout(page) == ["a.py", "k/", "k/d/", "k/d/f.py", "k/h.py"]


def test_private_parts_of_torch_have_their_files():
    """Nothing reaches for a name with an underscore, except of its own object; tests and benchmarks
    may.

    A named tuple's `_asdict`, `_fields` and `_replace` are public, and so are `os._exit` and
    `sys._current_frames`.
    """
    public = r"asdict\b|fields\b|replace\b|exit\b|current_frames\b"
    private = re.compile(
        rf"(?<!\bself)(?<!\bcls)\._(?!{public})[a-zA-Z]|from torch\b.* import .*\b_"
    )
    sources = [*ROOT.glob("*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("training/**/*.py")]
    assert len(sources) > 30
    found = {
        str(path.relative_to(ROOT)): line.strip()
        for path in sources
        for line in path.read_text().splitlines()
        if path.name != "torch_internals.py" and private.search(line)
    }
    assert found == {}, (
        "import it from kernels/torch_internals.py or training/host/torch_internals.py"
    )


def test_rooms_import_only_rooms_below_them():
    """A room of training/ imports itself and rooms that CONTRIBUTING.md lists below it; only
    flags.py is in no room."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    layout = page[page.index("\ntraining/ ") : page.index("\nconfigs/ ")]
    rooms = re.findall(r"^  (\w+)(?:/|\.py) ", layout, re.MULTILINE)
    assert sorted(rooms) == sorted(
        path.stem for path in ROOT.glob("training/[a-z]*") if path.suffix != ".toml"
    )
    assert [path.name for path in ROOT.glob("training/[a-z]*.py")] == ["flags.py"]
    found = [
        f"{path.relative_to(ROOT)}: {imported}"
        for path in ROOT.glob("training/**/[a-z_]*.py")
        for imported in re.findall(
            r"^\s*(?:from|import) training\.(\w+)", path.read_text(), re.MULTILINE
        )
        if (room := path.relative_to(ROOT / "training").parts[0].removesuffix(".py")) in rooms
        and rooms.index(imported) < rooms.index(room)
    ]
    below = r"^\s*(?:from|import) (?:training|model|train|profile_memory)\b"
    found += [
        str(path)
        for path in ROOT.glob("kernels/**/*.py")
        if re.search(below, path.read_text(), re.MULTILINE)
    ]
    assert rooms[0] == "evaluation" and rooms[-1] == "host" and found == []


def commands_in(text: str) -> set[str]:
    """Returns the modules and scripts that a text tells to run, as {"training.logprobs",
    "train"}."""
    joined = re.sub(r'"\s*\n\s*f?"|\\\n\s*', "", text)  # strings of several lines
    modules = re.findall(r"-m\s+((?:training|tests|benchmarks|docs)(?:\.\w+)*)", joined)
    return {*modules} | {
        *re.findall(r"(?:python|\{program\(\)\}|\d) (train|profile_memory|verify\w+)\.py", joined)
    }


def test_commands_that_are_named_do_something(capsys):
    """Each module that a message, a page or a table tells to run has a main part, and those of
    users have --help."""
    sources = (
        "*.py",
        "kernels/**/*.py",
        "training/**/*.py",
        "training/*.toml",
        "configs/*",
        "tests/*.py",
        "examples/*",
    )
    pages = "docs/*.*", "*.md", "Makefile", ".ci/run"
    texts = [path.read_text() for kind in (*sources, *pages) for path in ROOT.glob(kind)]
    named = set[str]().union(*map(commands_in, texts))
    assert len(named) > 15 and {"training.logprobs", "training.export", "train"} <= named
    for name in sorted(named):
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        module = f"{name}.__main__" if spec.submodule_search_locations else name
        main_spec = importlib.util.find_spec(module)
        assert main_spec is not None, f"{name} is named as a command, and does nothing"
        source = Path(str(main_spec.origin)).read_text()
        assert re.search(r'^if __name__ == "__main__":\n    \S', source, re.MULTILINE), name
        if name.startswith(("tests", "benchmarks", "docs")):
            continue
        main = importlib.import_module(module).main
        if "argv" in inspect.signature(main).parameters:  # verify_chunked_loss.py has no flags
            with pytest.raises(SystemExit) as ended:
                main(["--help"])
            assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: "), name


def test_texts_of_several_lines_name_their_commands():
    text = (
        'f"by {program()} -m "\n    "training.logprobs, then"; {program()} train.py, -m docs.flags'
    )
    assert commands_in(text) == {"training.logprobs", "train", "docs.flags"}
