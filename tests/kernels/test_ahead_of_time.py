"""Every Triton kernel compiles for sm_80 and sm_90 on a machine without a GPU, within its
resources."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kernels.attention.sparse.sparse_attention import WIDE_SHARED_MEMORY

ROOT = Path(__file__).parents[2]
SOURCES = {path.stem: path.read_text() for path in sorted((ROOT / "kernels").glob("*.py"))}
for folder in ("delta_net", "experts"):
    SOURCES[folder] = "".join(
        path.read_text() for path in sorted((ROOT / "kernels" / folder).glob("*.py"))
    )
SPARSE = {
    path.stem: path.read_text() for path in sorted((ROOT / "kernels/attention").rglob("*.py"))
}
# bytes per thread; gather backward with heads of 256 spills 1008 by Triton 3.6 on sm_80
MOST_SPILLED = 1024
MOST_SHARED = {
    "sm_80": 99 * 1024,
    "sm_90": 227 * 1024,
}  # sm_86 and sm_89 have 99 KiB, and run sm_80's code
MOST_SHARED |= {"sm_80_wide": WIDE_SHARED_MEMORY, "sm_90_wide": 227 * 1024}  # heads of 256 elements
PROGRAM = """
import sys
from kernels import apply_to
assert callable(apply_to) and "transformers" not in sys.modules, "importing kernels imported transformers"
from tests.kernels import ahead_of_time
from tests.kernels.attention import ahead_of_time as sparse

ahead_of_time.main(sys.argv[1], "80", "90")
sparse.main("80", "90")
"""


# Options of the decorator, the kernel's name, its parameters.
KERNEL = re.compile(r"@triton\.jit(\([^)]*\))?.*\ndef (\w+_kernel)\(([^)]*)\)")


def jitted(sources: dict[str, str]) -> set[str]:
    return {
        f"{file}.{name}"
        for file, source in sources.items()
        for _, name, _ in KERNEL.findall(source)
    }


def test_compiles_for_sm_80_and_sm_90(capsys):
    """One process compiles all kernels: its imports take longer than most kernels. Lines' numbers
    take a tenth more."""
    variables = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    operations = ",".join(name for name, source in SOURCES.items() if "@triton.jit" in source)
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, operations],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    with capsys.disabled():
        print(f"\n{process.stdout}", end="")
    compiled = {"sm_80": set(), "sm_90": set()}
    for line in process.stdout.splitlines():
        name, gpu, spilled, shared = re.match(
            r"(\S+) (\S+): .* (\d+) bytes spilled, (\d+) bytes shared", line
        ).groups()
        assert int(spilled) <= MOST_SPILLED and int(shared) <= MOST_SHARED[gpu], line
        compiled[gpu.removesuffix("_wide")].add(name)
    kernels = jitted(SOURCES) | jitted(SPARSE)
    assert kernels == compiled["sm_90"], "kernels that nothing compiles ahead of time"
    assert kernels - compiled["sm_80"] == jitted({"fp8": SOURCES["fp8"]}), "Ampere has no FP8"


def test_kernels_compiled_for_one_length_serve_all():
    """Triton compiles anew for multiples of 16 and for 1, unless an argument is kept from it."""
    counts = {
        "T",
        "num_rows",
        "num_tokens",
        "num_blocks",
        "num_windows",
        "num_items",
        "num_queries",
    }
    seen = set()
    for source in (*SOURCES.values(), *SPARSE.values()):
        for options, name, parameters in KERNEL.findall(source):
            specialised = counts.intersection(re.findall(r"\w+", parameters)) - {
                *re.findall(r"\w+", options)
            }
            assert not specialised, (
                f"{name} is compiled anew for {specialised}: name them in do_not_specialize"
            )
            seen.add(name)
    assert seen == {kernel.split(".")[1] for kernel in jitted(SOURCES) | jitted(SPARSE)}
