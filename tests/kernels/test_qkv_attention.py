"""Refusals of `qkv_attention`; test_dry_run.py and test_placement.py compute with it."""

import pytest
import torch

from kernels.attention.full import FULL
from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.qkv_attention import QKVParameters, qkv_attention

T, D = 70, 32


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
@pytest.mark.parametrize(("kind", "group", "head_dim", "message"), [
    (Sparse(dense_below=0), 2, 48, "head_dim of"),
    (Sparse(dense_below=0), 17, 64, "up to 16 query heads"),
    (Sparse(2, block_size=48, window=96, dense_below=0), 2, 64, "block_size must be one of"),
    (Window(64), 2, 48, "head_dim of"),
    (NSA(), 2, 48, "head_dim of"),
    (NSA(), 2, 64, r"gates must be \[B, T, H, 3\]"),
])  # fmt: skip
def test_a_kind_refuses_what_it_does_not_take(kind, group, head_dim, message, heads_at_a_time):
    """Some heads at a time as well as all at once, before anything is computed."""
    given = inputs(group, head_dim)
    with pytest.raises(ValueError, match=message):
        qkv_attention(*given, None, None, kind=kind, heads_at_a_time=heads_at_a_time, impl="triton")


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
def test_gates_of_another_shape_are_refused(heads_at_a_time):
    given = inputs(2, 64)
    with pytest.raises(
        ValueError,
        match=r"gates must be \[B, T, H, 3\] for \(B, T, H\) \(1, 70, 4\), got \(1, 70, 2, 3\)",
    ):
        gates = torch.zeros(1, T, 2, 3)
        qkv_attention(
            *given,
            None,
            None,
            kind=NSA(),
            gates=gates,
            heads_at_a_time=heads_at_a_time,
            impl="torch",
        )


def test_some_heads_at_a_time_are_all_at_once():
    given = inputs(2, 16)
    whole, some = (
        qkv_attention(*given, None, None, kind=FULL, heads_at_a_time=n) for n in (None, 1)
    )
    torch.testing.assert_close(some, whole)


def inputs(group, head_dim):
    """Input, parameters of two key/value heads and of `group` query heads each, and the output
    projection."""
    heads = 2 * group, 2, 2
    weights = [
        torch.randn(n * head_dim, D, generator=torch.Generator().manual_seed(n)) for n in heads
    ]
    x = torch.randn(1, T, D, generator=torch.Generator().manual_seed(9))
    return x, QKVParameters(weights, [], [], 1e-6, head_dim), weights[0].T.contiguous()
