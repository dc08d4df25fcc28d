"""Native sparse attention: each branch and the whole against references that have every score
written out."""

import pytest
import torch

from kernels.attention import libraries
from kernels.attention.attend import attention
from kernels.attention.nsa import compression, gates, nsa, window_scores
from kernels.attention.nsa.compression import (
    add_unpooled,
    compressed_backward,
    compressed_forward,
    head_bytes,
    heads_at_a_time,
    make_windows,
    pool_windows,
)
from kernels.attention.nsa.nsa import (
    BLOCK_SIZE,
    LOCAL_TOKENS,
    NSA,
    branches_reference,
    nsa_attention_reference,
)
from kernels.attention.sparse import band, combine, common, gather, selection, sparse_attention
from kernels.attention.sparse.layout import make_layout
from tests.kernels.attention.inputs import NoLaunch, Peak, make_qkv, random_lists, segments_of
from tests.kernels.compare import compare_with_float64, outputs_and_gradients, random

bf16, fp32 = torch.bfloat16, torch.float32
LENGTHS = [1, 31, 32, 47, 48, 63, 64, 65]  # tokens of documents; those of 32 and more have a window


@pytest.fixture(autouse=True)
def tiles_of_whole_blocks(monkeypatch):
    """In the interpreter, in float32; on a GPU they would not fit."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(common, "FLOAT32_ROWS", 1024)


def make_inputs(B, T, H, G, K, dtype, device):
    return [
        *make_qkv(B, T, H, G, K, dtype, device),
        random(B, T, H, 3, seed=9, dtype=dtype, device=device),
    ]


def compressed(q, k, v, segments, workspace_bytes=2**30):
    """Output and gradients of the compressed branch alone; the gradients are added to ones."""
    windows = make_windows(q, segments)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    pooled = [pool_windows(x, windows) for x in flat[1:]]
    out, lse = compressed_forward(flat[0], *pooled, windows, "cpu", workspace_bytes)
    dout = random(*out.shape, seed=5, dtype=q.dtype, device=q.device)
    dq, dk, dv = (torch.ones_like(x) for x in flat)
    d_pooled = compressed_backward(
        dout, flat[0], *pooled, out, lse, windows, "cpu", workspace_bytes, dq
    )
    add_unpooled(dk, dv, d_pooled, windows)
    return [out, lse, *(d - 1 for d in (dq, dk, dv))]


@pytest.mark.parametrize(("H", "G"), [(2, 2), (3, 1)])
def test_compressed_branch(H, G, poisoned_memory):
    """In float32 through PyTorch's CPU kernel: documents with and without windows, all heads and
    parts of a group."""
    inputs = make_qkv(1, sum(LENGTHS), H, G, 64, fp32, "cpu")
    segments = segments_of(LENGTHS)
    leaves = [x.clone().requires_grad_() for x in inputs]
    parts = [
        branches_reference(*(x[0, a:b] for x in leaves), 1, 64)[::3][:2]
        for _, a, b in segments.tolist()
    ]
    out, lse = (torch.cat(x) for x in zip(*parts))
    gradients = torch.autograd.grad(out, leaves, random(*out.shape, seed=5))
    expected = [out, lse, *(g[0] for g in gradients)]
    for workspace_bytes in (2**30, 1):  # all heads at once, and one
        for e, found in zip(expected, compressed(*inputs, segments, workspace_bytes)):
            torch.testing.assert_close(found, e, rtol=1e-4, atol=1e-5)


def attend_natively(q, k, v, gates, segments=None, *, blocks=None, impl="triton", **options):
    return attention(q, k, v, segments, kind=NSA(**options), gates=gates, lists=blocks, impl=impl)


SMALL = {"selected_blocks": 4, "window": 64}
SIZES = {"block_size": BLOCK_SIZE, "window": LOCAL_TOKENS}


@pytest.mark.parametrize(
    ("H", "G", "K", "dtype", "lengths", "window"),
    [
        (4, 1, 64, bf16, ([200],), 64),
        (2, 2, 64, fp32, ([1, 31, 32, 47, 48, 200],), 64),
        (3, 1, 64, fp32, ([63, 64, 65],), 512),
        (16, 1, 64, fp32, ([200],), 128),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_matches_float64_on_given_lists(H, G, K, dtype, lengths, window, device, poisoned_memory):
    if device.type == "cuda":
        dtype = bf16
    segments = segments_of(*lengths)
    inputs = make_inputs(len(lengths), sum(lengths[0]), H, G, K, dtype, device)
    options = {
        "blocks": random_lists(inputs[0], G, segments, 2, **SIZES),
        "window": window,
        "selected_blocks": 5,
    }
    compare_with_float64(
        lambda *x: nsa_attention_reference(*x, segments, **options),
        lambda *x: attend_natively(*x, segments, **options),
        inputs,
    )


def test_implementations_choose_the_same_blocks(device):
    """In float32, where near-ties are rare."""
    dtype = bf16 if device.type == "cuda" else fp32
    segments, inputs = segments_of([260, 20]), make_inputs(1, 280, 2, 1, 64, dtype, device)
    plain, ours = (
        outputs_and_gradients(
            lambda *x, i=impl: attend_natively(*x, segments, impl=i, **SMALL), inputs
        )
        for impl in ("torch", "triton")
    )
    for expected, found in zip(plain, ours):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 if dtype == fp32 else 5e-2)


def test_the_last_token_alone(device):
    """What generation with a cache computes: the reference for the last of all tokens."""
    q, k, v, gates = make_inputs(1, 300, 4, 2, 64, fp32, device)
    whole = nsa_attention_reference(q, k, v, gates, **SMALL)
    torch.testing.assert_close(
        nsa_attention_reference(q[:, -1:], k, v, gates[:, -1:], **SMALL), whole[:, -1:]
    )


@pytest.mark.parametrize(
    ("T", "selected_blocks", "workspace_bytes", "scores_bytes"),
    [
        (
            8192,
            11,
            2**20,
            2**21,
        ),  # the sum of the branches is most of forward, the selected branch of backward
        (8192, 11, 2**30, 2**21),  # the selected branch is most of both
        (8192, 4, 2**30, 2**21),  # the compressed branch is most of backward
        (32_768, 11, 2**20, 2**28),  # the choice is most of forward
    ],
)
def test_footprint_is_what_is_allocated(
    T, selected_blocks, workspace_bytes, scores_bytes, monkeypatch
):
    """Launches are left out. The library's kernel, whose own workspace is not tested here, returns
    memory."""
    H, G, K = 8, 2, 64

    def forward(q, k, v):
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=fp32)

    def backward(dout, q, k, v, out, lse):
        return [x.new_empty(x.shape) for x in (q, k, v)]

    kernel = libraries.KERNELS["cpu"]._replace(forward=forward, backward=backward, workspace_rows=0)
    monkeypatch.setitem(libraries.KERNELS, "cpu", kernel)
    for module in (band, combine, compression, gates, gather, selection, window_scores):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, NoLaunch())
    for module in (nsa, sparse_attention):
        monkeypatch.setattr(module, "SCORES_BYTES", scores_bytes)
    # Nothing is taken from a cache, whose numbers are for other SCORES_BYTES.
    monkeypatch.setattr(nsa, "sparse_workspace", nsa.sparse_workspace.__wrapped__)
    kind = NSA(selected_blocks, 256, workspace_bytes)
    footprint = kind.footprint(T, H, G, K, backend="cpu")
    q, k, v, dout = (torch.empty(1, T, n, K, dtype=bf16) for n in (H, G, G, H))
    gates_BTHC = torch.empty(1, T, H, 3, dtype=bf16)
    windows = make_windows(q, None)  # tables are made once and kept
    make_layout(q, None, BLOCK_SIZE, LOCAL_TOKENS)

    with Peak() as of_branch:
        pooled = [pool_windows(x[0], windows) for x in (k, v)]
        made = compressed_forward(q[0], *pooled, windows, "cpu", workspace_bytes)
    heads = heads_at_a_time(H, G, head_bytes("cpu", T // 16, T // 16, None, K, 2), workspace_bytes)
    expected = (
        sum(x.nbytes for x in (*made, *pooled)) + 2 * heads * T * K * 2
    )  # a head's tiles and their output
    assert of_branch.peak == pytest.approx(expected, rel=0.03)
    del pooled, made

    with Peak() as in_forward:
        outs, lses, lists = kind.forward(q, k, v, None, None, "cpu", True)
        # A mode does not look into operations.
        out = nsa._nsa_gated_sum._init_fn(outs, gates_BTHC, True)
    assert (
        sum(x.nbytes for x in (*outs, *lses)) == T * footprint.results
        and lists.nbytes == T * footprint.choices
    )
    assert in_forward.peak == pytest.approx(
        T * (footprint.results + footprint.choices) + footprint.forward, rel=0.03
    )
    del out
    with Peak() as in_backward:
        gradients = kind.backward(dout, q, k, v, gates_BTHC, outs, lses, lists, None, "cpu", True)
    made = sum(x.nbytes for x in gradients)
    assert in_backward.peak == pytest.approx(made + footprint.backward, rel=0.03)


def test_flops():
    """Five blocks of 64 tokens: 19 windows, the last of which a single token sees; candidates of
    block b: b - 2."""
    flops = NSA(4, window=64).flops(64 * 5, 2, 1, 64)
    product = 2 * 64 * 64 * 2 * 64
    pairs = sum((t - 15) // 16 for t in range(31, 320))
    selected = sum((1, 2, 3, 3 + 1, 3 + 1))
    in_window = 1 + 2 + 2 + 2 + 2
    choice = 4 * (0 + 0 + 0 + 1 + 2) * product // 64
    assert flops.choice == choice
    assert flops.forward == 4 * 2 * 64 * pairs + 2 * (selected + in_window) * product
    gathered = 2
    backward = (
        2.5 * 4 * 2 * 64 * pairs + (5 * gathered + 7 * (selected - gathered + in_window)) * product
    )
    assert flops.backward == backward
