"""What holds for every source file."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_private_parts_of_torch_have_their_files():
    """Nothing reaches for a name with an underscore, except of its own object; tests and benchmarks may.

    A named tuple's `_asdict`, `_fields` and `_replace` are public, and so are `os._exit` and `sys._current_frames`.
    """
    public = r"asdict\b|fields\b|replace\b|exit\b|current_frames\b"
    private = re.compile(rf"(?<!\bself)(?<!\bcls)\._(?!{public})[a-zA-Z]|from torch\b.* import .*\b_")
    sources = [*ROOT.glob("*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("training/**/*.py")]
    assert len(sources) > 30
    found = {
        str(path.relative_to(ROOT)): line.strip()
        for path in sources
        for line in path.read_text().splitlines()
        if path.name != "torch_internals.py" and private.search(line)
    }
    assert found == {}, "import it from kernels/torch_internals.py or training/host/torch_internals.py"


def test_rooms_import_only_rooms_below_them():
    """A room of training/ imports itself and rooms that CONTRIBUTING.md lists below it; only flags.py is in no room."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    layout = page[page.index("\ntraining/ ") : page.index("\nconfigs/ ")]
    rooms = re.findall(r"^  (\w+)(?:/|\.py) ", layout, re.MULTILINE)
    assert sorted(rooms) == sorted(path.stem for path in ROOT.glob("training/[a-z]*") if path.suffix != ".toml")
    assert [path.name for path in ROOT.glob("training/[a-z]*.py")] == ["flags.py"]
    found = [
        f"{path.relative_to(ROOT)}: {imported}"
        for path in ROOT.glob("training/**/[a-z_]*.py")
        for imported in re.findall(r"^\s*(?:from|import) training\.(\w+)", path.read_text(), re.MULTILINE)
        if (room := path.relative_to(ROOT / "training").parts[0].removesuffix(".py")) in rooms
        and rooms.index(imported) < rooms.index(room)
    ]
    below = r"^\s*(?:from|import) (?:training|model|train|profile_memory)\b"
    found += [str(path) for path in ROOT.glob("kernels/**/*.py") if re.search(below, path.read_text(), re.MULTILINE)]
    assert rooms[0] == "evaluation" and rooms[-1] == "host" and found == []
