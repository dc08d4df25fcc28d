#!/usr/bin/env bash
# triton 3.6.0 with numpy 2.4.6 (torch 2.13.0): Triton's interpreter (TRITON_INTERPRET=1) stops at any loop whose bound is an
# argument: range(0, n) in a kernel asks for int() of an array of one element, which NumPy refuses from 2.4 on. Triton
# names no bound on NumPy, and PyTorch 2.11, which needs Triton 3.6, installs the newest. triton 3.7.1 runs the loop.
# Seen: InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars'), then 128.0 by 3.7.1.
# Fails if 3.6.0 runs the loop, or 3.7.1 does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
cat >probe.py <<'PY'
import numpy
import torch
import triton
import triton.language as tl


@triton.jit
def double(source, target, n, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for row in range(0, n):
        value = tl.load(source + row * BLOCK + columns)
        tl.store(target + row * BLOCK + columns, value * 2)


print("triton", triton.__version__, "numpy", numpy.__version__)
target = torch.zeros(64)
double[(1,)](torch.ones(64), target, 4, BLOCK=16)
print(target.sum().item())
PY
env/bin/pip install -q torch==2.13.0 triton==3.6.0 numpy==2.4.6
if TRITON_INTERPRET=1 env/bin/python probe.py >log 2>&1; then
  echo "triton 3.6.0 runs the loop now" && exit 1
fi
tail -n 1 log
grep -q "only 0-dimensional arrays" log
env/bin/pip install -q torch==2.13.0 triton==3.7.1 numpy==2.4.6
TRITON_INTERPRET=1 env/bin/python probe.py
