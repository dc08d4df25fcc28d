"""Grids of launches over a million tokens: CUDA takes 65,535 programs along their second and third axis."""

import pytest
import torch

from kernels.convolution import qkv_convolution
from kernels.cross_entropy import cross_entropy
from kernels.delta_net.rule import delta_rule
from kernels.fp8 import quantize_rows, transpose_values
from kernels.gated_mlp import swiglu
from kernels.rms_norm import rms_norm
from kernels.rope import rope

TOKENS = 2**20 + 1
# Each with the shapes of its inputs.
CASES = {
    "convolution": (lambda x, weight: qkv_convolution(x, weight, 1, 1, 16, impl="triton"), (1, TOKENS, 48), (48, 4)),
    "delta rule": (
        lambda qk, v, gates: delta_rule(qk, qk, v, gates, gates, impl="triton"),
        (1, TOKENS, 1, 16), (1, TOKENS, 1, 16), (1, TOKENS, 1),
    ),
    "cross-entropy": (
        lambda logits: cross_entropy(logits, torch.zeros(TOKENS, dtype=torch.long), impl="triton"), (TOKENS, 2),
    ),
    "FP8": (lambda x: transpose_values(*quantize_rows(x.detach(), impl="triton"), impl="triton"), (TOKENS, 16)),
    "SwiGLU": (lambda x: swiglu(x, x, impl="triton"), (TOKENS, 16)),
    "RMSNorm": (lambda x, weight: rms_norm(x, weight, 1e-6, impl="triton"), (TOKENS, 16), (16,)),
    "RoPE": (lambda x, table: rope(x, x, table, table, impl="triton"), (1, TOKENS, 1, 16), (TOKENS, 8)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_million_tokens_fit_a_grid(case, monkeypatch):
    """Records the launches of forward and backward, and runs none."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    grids = []

    def launch(function, grid):
        return lambda *arguments, **options: grids.append(grid(options) if callable(grid) else grid)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", launch)
    run, *shapes = CASES[case]
    outputs = run(*(torch.zeros(shape, requires_grad=True) for shape in shapes))
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        if y.requires_grad:
            y.backward(y.detach(), retain_graph=True)
    assert grids and all(axis <= 65_535 for grid in grids for axis in grid[1:])
