"""Every Triton kernel compiles for sm_80 and sm_90 on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON_OPERATIONS = sorted(p.stem for p in (ROOT / "kernels").glob("*.py") if "@triton.jit" in p.read_text())


@pytest.mark.parametrize("operation", TRITON_OPERATIONS)
def test_compiles_for_sm_80_and_sm_90(operation, capsys):
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", operation, "80", "90"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    with capsys.disabled():
        print(f"\n{process.stdout}", end="")
    listed = {line.split(".")[1].split()[0] for line in process.stdout.splitlines()}
    source = (ROOT / "kernels" / f"{operation}.py").read_text()
    jitted = {
        line.split("def ")[1].split("(")[0]
        for before, line in zip(source.splitlines(), source.splitlines()[1:])
        if before.startswith("@triton.jit") and line.startswith("def ") and "_kernel(" in line
    }
    assert jitted <= listed, f"kernels that nothing compiles ahead of time: {sorted(jitted - listed)}"
