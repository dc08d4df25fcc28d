"""Compiles Triton kernels for GPUs that are not here, and reports registers and spills.

`python -m tests.kernels.ahead_of_time rms_norm,rope 80 90` compiles the `KERNELS_TO_COMPILE` of
tests/kernels/test_rms_norm.py and test_rope.py, and prints a line for each kernel. It runs in a
process of its own, without Triton's interpreter.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass
class KernelToCompile:
    """A specialisation of a kernel: the types of its arguments, and constants.

    The name is a function in kernels/<operation>.py; with a dot, as "chunks._scan_kernel", in a
    file of the operation's folder.
    """

    name: str
    signature: dict[str, str]  # run-time arguments: "*bf16", "*fp32", "i32", "i64", "fp32", ...
    constants: dict[str, Any]  # tl.constexpr arguments
    num_warps: int = 4
    num_stages: int = 3
    least_capability: int = 80  # older GPUs lack a type that the kernel has
    most_capability: int = 90  # newer GPUs launch it in other tiles


@dataclass
class Compiled:
    registers: int
    spill_bytes: int
    shared_bytes: int
    asm: dict = field(repr=False, default_factory=dict)


def compile_kernel(operation: str, kernel: KernelToCompile, capability: int) -> Compiled:
    file, _, name = f"kernels.{operation}.{kernel.name}".rpartition(".")
    function = getattr(importlib.import_module(file), name)
    signature = {name: kernel.signature.get(name, "constexpr") for name in function.arg_names}
    missing = [n for n, t in signature.items() if t == "constexpr" and n not in kernel.constants]
    assert not missing, f"{kernel.name}: neither a type nor a constant for {missing}"
    # Tensors of a launch start at multiples of 16 bytes, and their strides are multiples of 16
    # elements.
    aligned = [
        i
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or "stride" in name
    ]
    compiled = triton.compile(
        ASTSource(
            function,
            signature,
            kernel.constants,
            {(i,): [["tt.divisibility", 16]] for i in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": kernel.num_warps, "num_stages": kernel.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True
        )
    numbers = dict(re.findall(r"(REG|LOCAL|STACK):(\d+)", usage.stdout))
    spills = int(numbers["LOCAL"]) + int(numbers["STACK"])
    return Compiled(int(numbers["REG"]), spills, compiled.metadata.shared, compiled.asm)


def _cuobjdump() -> str:
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def main(operations: str, *capabilities: str) -> None:
    for operation in operations.split(","):
        for kernel in importlib.import_module(f"tests.kernels.test_{operation}").KERNELS_TO_COMPILE:
            launched = range(kernel.least_capability, kernel.most_capability + 1)
            for capability in (n for n in map(int, capabilities) if n in launched):
                c = compile_kernel(operation, kernel, capability)
                print(
                    f"{operation}.{kernel.name.split('.')[-1]} sm_{capability}: {c.registers} "
                    "registers, "
                    f"{c.spill_bytes} bytes spilled, {c.shared_bytes} bytes shared"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
