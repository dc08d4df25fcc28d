"""Every Triton kernel compiles for sm_80 and sm_90 on a machine without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {path.stem: path.read_text() for path in sorted((ROOT / "kernels").glob("*.py"))}


def test_compiles_for_sm_80_and_sm_90(capsys):
    operations = ",".join(name for name, source in SOURCES.items() if "@triton.jit" in source)
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", operations, "80", "90"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    with capsys.disabled():
        print(f"\n{process.stdout}", end="")
    listed = {line.split()[0] for line in process.stdout.splitlines()}
    jitted = {
        f"{operation}.{name}"
        for operation, source in SOURCES.items()
        for name in re.findall(r"@triton\.jit.*\ndef (\w+_kernel)\(", source)
    }
    assert jitted <= listed, f"kernels that nothing compiles ahead of time: {sorted(jitted - listed)}"
