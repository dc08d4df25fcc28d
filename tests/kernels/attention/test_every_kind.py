"""What holds for attention of every kind: equal bits, causality, custom operations, compilation,
refusals."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.attention import NSA, Sparse, Window
from kernels.attention.attend import attention
from kernels.attention.full import FULL
from kernels.attention.libraries import choose_backend
from tests.kernels.attention.inputs import make_qkv, random_lists, segments_of
from tests.kernels.compare import outputs_and_gradients, random

bf16, fp32 = torch.bfloat16, torch.float32
BLOCKS = {"block_size": 32, "window": 32}
SPARSE = Sparse(2, **BLOCKS, dense_below=0)
KINDS = pytest.mark.parametrize(
    "kind", [Window(64), SPARSE, NSA(4, window=64)], ids=lambda kind: kind.name
)


def make_inputs(kind, T, device, dtype=fp32, H=2, G=1):
    """q, k, v and, for a kind that has them, gates; in a dtype that the kind's kernels take on the
    device."""
    dtype = bf16 if kind.name in ("nsa", "full") and device.type == "cuda" else dtype
    gates = [random(1, T, H, 3, seed=9, dtype=dtype, device=device)] if kind.name == "nsa" else []
    return [*make_qkv(1, T, H, G, 64, dtype, device), *gates]


def attend(kind, segments=None, impl="triton"):
    def function(q, k, v, gates=None):
        return attention(q, k, v, segments, kind=kind, gates=gates, impl=impl)

    return function


@KINDS
def test_two_runs_are_bitwise_equal(kind, device, poisoned_memory):
    segments, inputs = segments_of([230, 31]), make_inputs(kind, 261, device, bf16)
    first, second = (outputs_and_gradients(attend(kind, segments), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@KINDS
def test_a_token_changes_nothing_before_it_nor_in_another_document(kind, device):
    segments, inputs = segments_of([280, 80]), make_inputs(kind, 360, device)
    before = attend(kind, segments)(*inputs)
    for x in inputs:
        x[:, 70] += 3
    changed = (before != attend(kind, segments)(*inputs)).any(-1).any(-1)[0]
    assert not changed[:70].any() and not changed[280:].any() and changed[70]
    if kind.name == "window":
        assert changed[70:134].all() and not changed[134:].any()
    else:
        assert changed[134:].any()


@pytest.mark.parametrize("kind", [FULL, Window(64), SPARSE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("given", [False, True])
def test_custom_operations(kind, given, device):
    """AOT dispatch is covered by the test of compilation. CPU attention is not bitwise between
    strides."""
    q, k, v = (x.requires_grad_() for x in make_inputs(kind, 100, device))
    segments = segments_of([70, 30]) if given else None
    lists = random_lists(q, 1, segments, 2, **BLOCKS) if given and kind is SPARSE else None
    options = (
        kind.number,
        choose_backend("auto", device) if kind is FULL else "cpu",
        kind is not FULL,
    )
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.fathom.attend, (q, k, v, segments, lists, *options), test_utils=utils
    )
    out, lse, chosen = torch.ops.fathom.attend(q, k, v, segments, lists, *options)
    if kind is SPARSE:
        assert chosen.dtype == torch.int16 and chosen.shape == (1, 100, 1, 0 if given else 2)
        assert given or torch.equal(chosen, kind.choose(q, k, segments, True))
    kept = out, q, k, v, None, [out], [lse], chosen if lists is None else lists, segments, *options
    torch.library.opcheck(torch.ops.fathom.attend_backward, kept, test_utils=utils)
    attended = attention(q, k, v, segments, kind=kind, lists=lists, impl="triton")
    assert attended.requires_grad and torch.equal(attended, out)


@pytest.mark.parametrize(
    "kind", [FULL, Window(64), SPARSE, NSA(4, window=64)], ids=lambda kind: kind.name
)
def test_under_compile_and_checkpoint_and_no_second_derivative(kind, device):
    inputs = [x.requires_grad_() for x in make_inputs(kind, 100, device)]
    function = attend(kind, segments_of([80, 20]), impl="auto" if kind is FULL else "triton")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    plain = outputs_and_gradients(function, inputs)
    for wrapped in (compiled, functools.partial(checkpoint, function, use_reentrant=False)):
        assert all(torch.equal(a, b) for a, b in zip(plain, outputs_and_gradients(wrapped, inputs)))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize(("shape", "kind", "message"), [
    ((1, 8, 3, 2, 32), lambda: FULL, "H = n G"),
    ((1, 8, 3, 2, 64), lambda: SPARSE, "H = n G"),
    ((1, 8, 2, 2, 48), lambda: SPARSE, "head_dim"),
    ((1, 8, 32, 1, 64), lambda: SPARSE, "up to 16 query heads"),
    ((1, 8, 2, 2, 64), lambda: Sparse(dense_below=0, block_size=48), "block_size must be one of"),
    ((1, 8, 2, 2, 64), lambda: Sparse(dense_below=0, window=500), "multiple of block_size"),
    ((1, 8, 2, 2, 64), lambda: Sparse(dense_below=0, window=0), "multiple of block_size"),
    ((1, 8, 3, 2, 64), lambda: Window(64), "H = n G"),
    ((1, 8, 2, 2, 48), lambda: Window(64), "head_dim"),
    ((1, 8, 32, 1, 64), lambda: Window(64), "up to 16"),
    *(((1, 8, 2, 1, 64), lambda size=size: Window(size), "window must be from 1 to 1073741824, "
                                                         f"got {size}")
      for size in (0, -64, 2**30 + 1)),
    ((1, 8, 2, 1, 64), lambda: NSA(3), "at least 4, got 3: nsa forces 3"),
    ((1, 8, 2, 1, 64), lambda: NSA(window=500), "multiple of block_size"),
    ((1, 8, 2, 1, 64), lambda: NSA(), r"gates must be \[B, T, H, 3\]"),
])  # fmt: skip
def test_refused(shape, kind, message, device):
    B, T, H, G, K = shape
    q, k, v = make_qkv(B, T, H, G, K, bf16 if G == 1 else fp32, device)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, kind=kind(), gates=torch.zeros(1, 8, 3, 2, device=device), impl="triton")


@pytest.mark.parametrize("kind", [FULL, Window(4), SPARSE], ids=lambda kind: kind.name)
def test_results_on_a_cpu_have_the_strides_that_compiled_blocks_expect(kind):
    """Window's reference gave log-sum-exps by head: `--compile` on a CPU ended in a traceback."""
    inputs = make_qkv(2, 96, 4, 2, 8, fp32, torch.device("cpu"))
    arguments = *inputs, None, None, kind.number, "cpu", False
    torch.library.opcheck(torch.ops.fathom.attend, arguments, test_utils="test_faketensor")
