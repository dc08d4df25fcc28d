"""Launches over long texts, recorded and not run: what their grids take, and what Triton compiles
for each length."""

import inspect
from collections import Counter
from functools import partial

import pytest
import torch
import triton.language as tl

from kernels.attention.attend import attention
from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.convolution import qkv_convolution
from kernels.cross_entropy import cross_entropy
from kernels.delta_net.rule import delta_rule
from kernels.experts import expert_mlp
from kernels.fp8 import FP8, quantize_rows, transpose_values
from kernels.gated_activation import swiglu
from kernels.gated_mlp import gated_mlp
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.rms_norm import rms_norm
from kernels.rope import rope

LENGTHS = 1281, 1296, 1500, 2047  # the next powers of two are alike; 16 divides one
LONG = 2**20 + 1


def zeros(*shape):
    return torch.zeros(shape, requires_grad=True)


def attend(kind, T):
    gates = zeros(1, T, 2, 3) if kind.gates_per_head else None
    return attention(
        zeros(1, T, 2, 64),
        zeros(1, T, 1, 64),
        zeros(1, T, 1, 64),
        kind=kind,
        gates=gates,
        impl="triton",
    )


def delta(T):
    gates = zeros(1, T, 1)
    return delta_rule(*(zeros(1, T, 1, 16) for _ in "qkv"), gates, gates, impl="triton")


def experts(T):
    chosen = (torch.arange(T)[:, None] + torch.arange(2)) % 4
    return expert_mlp(
        zeros(T, 16), zeros(4, 32, 16), zeros(4, 16, 16), chosen, zeros(T, 2), impl="triton"
    )


def targets(T):
    return torch.zeros(T, dtype=torch.long)


CASES = {
    "convolution": lambda T: qkv_convolution(
        zeros(1, T, 48), zeros(48, 4), 1, 1, 16, impl="triton"
    ),
    "delta rule": delta,
    "experts": experts,
    "cross-entropy": lambda T: cross_entropy(zeros(T, 2), targets(T), impl="triton"),
    "chunked loss": lambda T: linear_cross_entropy(
        zeros(T, 8), zeros(16, 8), targets(T), impl="triton"
    ),
    "FP8": lambda T: transpose_values(
        *quantize_rows(torch.zeros(T, 16), impl="triton"), impl="triton"
    ),
    "SwiGLU": lambda T: swiglu(zeros(T, 16), zeros(T, 16), impl="triton"),
    "MLP in FP8": lambda T: gated_mlp(
        zeros(T, 16), *(zeros(16, 16) for _ in "gud"), linear=FP8("triton"), impl="triton"
    ),
    "MLP in tiles": lambda T: gated_mlp(
        zeros(T, 8), *(zeros(8, 8) for _ in "gud"), tile_size=8192, impl="triton"
    ),
    "RMSNorm": lambda T: rms_norm(zeros(T, 16), zeros(16), 1e-6, impl="triton"),
    "RoPE": lambda T: rope(
        zeros(1, T, 1, 16), zeros(1, T, 1, 16), zeros(T, 8), zeros(T, 8), impl="triton"
    ),
    "sparse": partial(attend, Sparse(selected_blocks=4, window=64, dense_below=0)),
    "nsa": partial(attend, NSA(selected_blocks=4)),
}


@pytest.fixture
def launches(monkeypatch):
    """Records the name, the specialisation and the grid of each launch."""
    interpreter, found = pytest.importorskip("triton.runtime.interpreter"), []

    def launch(function, grid):
        def record(*arguments, **options):
            shape = grid(options) if callable(grid) else grid
            found.append(
                (function.fn.__name__, specialisation(function, arguments, options), tuple(shape))
            )

        return record

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", launch)
    return found


def specialisation(function, arguments, options):
    """Returns what Triton compiles a kernel anew for: constants, types, and integers that are 1 or
    that 16 divides."""
    free, key = function.kwargs.get("do_not_specialize") or (), []
    unaligned = function.kwargs.get("do_not_specialize_on_alignment") or ()
    given = dict(zip(function.arg_names, arguments)) | options
    for name, parameter in inspect.signature(function.fn).parameters.items():
        x = given[name]
        if parameter.annotation is tl.constexpr:
            key.append((name, x))
        elif isinstance(x, int):
            key.append((name, x >= 2**31, None if name in free else (x == 1, x % 16 == 0)))
        elif isinstance(x, torch.Tensor):
            key.append((name, x.dtype, None if name in unaligned else x.data_ptr() % 16 == 0))
        else:
            key.append((name, type(x)))
    return *key, options.get("num_warps"), options.get("num_stages")


def run(case, T):
    outputs = CASES[case](T)
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        if y.requires_grad:
            y.backward(torch.zeros_like(y), retain_graph=True)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case not in ("chunked loss", "MLP in tiles", "nsa", "sparse")],
)
def test_a_million_tokens_fit_a_grid(case, launches):
    """CUDA takes 65,535 programs along a grid's second and third axis."""
    run(case, LONG)
    assert launches and all(axis <= 65_535 for _, _, grid in launches for axis in grid[1:])


def test_the_chunked_loss_runs_the_kernel_of_the_standard_loss(launches):
    """A longer text has it in place of the other."""
    logits = torch.zeros(4, 16, dtype=torch.bfloat16, requires_grad=True)
    cross_entropy(logits.clone(), targets(4), inplace=True, impl="triton")
    x, head = (torch.zeros(n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (4, 16))
    linear_cross_entropy(x, head, targets(4), impl="triton")
    with torch.no_grad():
        cross_entropy(logits, targets(4), impl="triton")
        linear_cross_entropy(x, head, targets(4), impl="triton")
    (name, key, _), (_, other, _), (_, alone, _), (_, other_alone, _) = launches
    assert name == "_cross_entropy_kernel" and key == other != alone == other_alone


def test_the_choice_of_a_measured_head_serves_all_heads(launches):
    """Plans measure one key/value head of long texts, and compile what training runs."""
    kind, compiled = Sparse(selected_blocks=32, dense_below=0), []
    for heads in (1, 4):
        q, k = (torch.zeros(1, 70_000, n * heads, 64) for n in (4, 1))
        kind.choose(q, k, None, True)
        compiled.append({(name, key) for name, key, _ in launches})
        launches.clear()
    assert (
        compiled[0] == compiled[1] and len(compiled[0]) == 5
    )  # two looks and rounds of each, and the keys' rounding


def test_sparse_attention_compiles_its_choice_alone_for_longer_documents(launches):
    """From 10 to 4,688 blocks, by ranges of them. The first round of the choice is compiled for
    three widths."""
    kind, seen, new = Sparse(selected_blocks=32, dense_below=0), set(), []
    for T in (640, 16_384, 70_000, 180_001, 300_000):
        y = attention(*(zeros(1, T, 2, 64) for _ in "qkv"), kind=kind, impl="triton")
        y.backward(torch.zeros_like(y))
        compiled = {(name, key) for name, key, _ in launches}
        new.append(Counter(name for name, _ in compiled - seen))
        seen |= compiled
        launches.clear()
    assert [found["_top_kernel"] for found in new] == [2, 0, 0, 1, 0]
    assert [found["_scores_kernel"] for found in new] == [
        1,
        0,
        0,
        0,
        1,
    ]  # means of keys from 262,144 tokens on
    assert all(
        {*found} <= {"_top_kernel", "_scores_kernel", "_round_keys_kernel"} for found in new[2:]
    )


@pytest.mark.parametrize("selected", [1, 16, 33, 64])
def test_the_choice_looks_at_no_more_blocks_than_its_chunks_have(selected, launches):
    attend(Sparse(selected_blocks=selected, dense_below=0), 100_000)
    keys = [key for _, key, _ in launches if ("OF_CHUNKS", False) in key]
    columns = [
        part[1] for key in keys for part in key if isinstance(part, tuple) and part[0] == "COLUMNS"
    ]
    assert max(columns) == 16 * 2 ** (selected - 1).bit_length()


@pytest.mark.parametrize("case", CASES)
def test_kernels_compiled_for_one_length_serve_others(case, launches):
    compiled = []
    for T in LENGTHS:
        run(case, T)
        compiled.append({(name, key) for name, key, _ in launches})
        launches.clear()
    assert compiled[0] and compiled == len(LENGTHS) * compiled[:1]
