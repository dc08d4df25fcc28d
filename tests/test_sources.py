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
