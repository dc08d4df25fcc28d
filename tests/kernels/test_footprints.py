"""Compares each operation's `Footprint` with what it allocates, on fake tensors and on a GPU."""

import gc
import time
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from kernels.attention.full import FULL
from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.cross_entropy import cross_entropy, cross_entropy_footprint
from kernels.gated_mlp import gated_mlp, gated_mlp_footprint
from kernels.head_exchange import HeadExchange
from kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_footprint
from kernels.qkv_attention import QKVParameters, _qkv_attention, qkv_attention, qkv_attention_footprint
from tests.storage_counter import StorageCounter
from training.memory.profiler import CudaCounter

T, D, F, V, H, G, K = 16_384, 2560, 9728, 151_936, 32, 8, 128  # the 4B's
OPS = torch.ops.fathom
SMALL_BYTES = 2**23


def tensor(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def forward_as_an_operation(kind, q, k, v, segments, lists, backend, on_triton):
    """`AttentionKind.forward` on fake tensors."""
    *results, chosen = OPS.attend(q, k, v, segments, lists, kind.number, backend, on_triton)
    return results[: kind.branches], results[kind.branches :], chosen


def attention_case(heads_at_a_time, num_ranks=1, kind=FULL, has_norms=True):
    """Makes a case of `qkv_attention`. Where ranks share sequences, the counter sees inside the operation.

    The logits of NSA's gates, which the model makes, are inputs here.
    """
    inputs = [tensor(1, T, D), *(tensor(size, D) for size in (H * K, G * K, G * K)), tensor(D, H * K)]
    inputs += [tensor(K), tensor(K)] if has_norms else [tensor(size) for size in (H * K, G * K, G * K)]  # biases
    inputs += [tensor(1, T, H, kind.gates_per_head)] if kind.gates_per_head else []
    cos, sin = torch.rand(T, K // 2), torch.rand(T, K // 2)
    options = {"heads_at_a_time": heads_at_a_time, "kind": kind}
    lengths = {"context_length": num_ranks * T, "num_ranks": num_ranks, "qk_norm": "head" if has_norms else None}
    footprint = qkv_attention_footprint(T, D, H, G, K, **options, **lengths)
    exchange = HeadExchange(dist.group.WORLD) if num_ranks > 1 else None
    # Key/value heads of one call, and the call's shape.
    heads = heads_at_a_time or G // num_ranks
    of_call = num_ranks * T, H // G * heads, heads, K
    attention = kind.footprint(*of_call, context_length=num_ranks * T)
    heads_of_qkv = 3 * H + 4 * G if has_norms else 2 * H + 3 * G  # before and after norms, and rotated
    heads_of_attention = H + 2 * G + kind.branches * H  # q, k, v and outputs
    projecting, attending = (2 * T * n * K * heads // G for n in (heads_of_qkv, heads_of_attention))
    own = {
        OPS.attend.default: attention.forward,
        OPS.attend_backward.default: attention.backward,
        OPS.qkv_attention.default: max(projecting, attending + attention.forward),
    }

    def run(x, *weights):
        with ExitStack() as inside:
            if exchange:
                inside.enter_context(mock.patch.object(OPS, "qkv_attention", _qkv_attention._init_fn))
                inside.enter_context(mock.patch.object(type(kind), "forward", forward_as_an_operation))
            qkv, (o_weight, *rest) = weights[:3], weights[3:]
            biases, norms = ([], rest[:2]) if has_norms else (rest[:3], [])
            gates = rest[-1] if kind.gates_per_head else None
            parameters = QKVParameters([*qkv], biases, norms, 1e-6, K)
            options_of_run = {**options, "gates": gates, "exchange": exchange, "impl": "triton"}
            return qkv_attention(x, parameters, o_weight, cos, sin, **options_of_run)

    return run, inputs, footprint, own


def mlp_case(tile_size):
    inputs = [tensor(T, D), tensor(F, D), tensor(F, D), tensor(D, F)]
    footprint, weights = gated_mlp_footprint(T, D, F, tile_size=tile_size), 2 * 3 * D * F
    own = {
        OPS.tiled_gated_mlp.default: footprint.forward - 2 * T * D,
        OPS.tiled_gated_mlp_backward.default: footprint.backward - 2 * T * D - weights,
    }
    return lambda *inputs: gated_mlp(*inputs, tile_size=tile_size, impl="triton"), inputs, footprint, own


def chunked_loss_case():
    footprint = linear_cross_entropy_footprint(T, D, V)
    targets = torch.zeros(T, dtype=torch.long)
    own = {OPS.linear_cross_entropy.default: footprint.forward - footprint.saved}
    run = lambda *inputs: linear_cross_entropy(*inputs, targets, impl="triton")  # noqa: E731
    return run, [tensor(T, D), tensor(V, D)], footprint, own


def standard_loss_case():
    targets = torch.zeros(T, dtype=torch.long)

    def run(x, head):
        return cross_entropy(torch.nn.functional.linear(x, head), targets, inplace=True, impl="triton")

    return run, [tensor(T, D), tensor(V, D)], cross_entropy_footprint(T, V), {}


CASES = {
    "attention": lambda: attention_case(None),
    "attention by heads": lambda: attention_case(1),
    "attention without norms": lambda: attention_case(None, has_norms=False),
    "attention by heads, without norms": lambda: attention_case(1, has_norms=False),
    "window": lambda: attention_case(None, kind=Window()),
    "window by heads": lambda: attention_case(1, kind=Window()),
    "sparse": lambda: attention_case(None, kind=Sparse()),
    "sparse by heads": lambda: attention_case(1, kind=Sparse()),
    "nsa": lambda: attention_case(None, kind=NSA()),
    "nsa by heads": lambda: attention_case(1, kind=NSA()),
    "MLP": lambda: mlp_case(None),
    "MLP in tiles": lambda: mlp_case(2048),
    "chunked loss": chunked_loss_case,
    "standard loss": standard_loss_case,
}


def check(case, counter):
    """Checks bytes to within 2%. Backward may also hold the gradients of inputs and weights."""
    run, inputs, footprint, own = CASES[case]()
    counter.own_bytes = own
    torch.autograd.grad(run(*inputs).sum(), inputs)  # lets libraries make their workspaces
    gc.collect()  # frees cycles that earlier tests left
    time.sleep(0.1)  # lets autograd's own thread free its graph, for which it needs Python's lock
    before = counter.read().allocated
    with torch.set_grad_enabled("loss" in case):  # a loss makes its gradients in forward
        run(*inputs)
    forward = counter.read().peak - before
    output = run(*inputs)
    saved = counter.read().allocated - before - output.nbytes
    if "loss" not in case:
        saved += inputs[0].nbytes  # already there before the call
    d_output = torch.ones_like(output)
    alive = counter.read().allocated
    torch.autograd.grad(output, inputs, d_output)
    backward = counter.read().peak - alive
    assert saved == pytest.approx(footprint.saved, rel=0.02, abs=SMALL_BYTES)
    assert forward == pytest.approx(footprint.forward, rel=0.02, abs=SMALL_BYTES)
    gradients = sum(x.nbytes for x in inputs)
    assert 0.98 * footprint.backward <= backward <= 1.02 * footprint.backward + gradients + SMALL_BYTES


@pytest.mark.parametrize("case", CASES)
def test_on_fake_tensors(case):
    with FakeTensorMode(), StorageCounter() as counter:
        check(case, counter)


@pytest.mark.parametrize("kind", [FULL, Sparse(), NSA()], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("num_ranks", "heads_at_a_time", "has_norms"),
    [(2, None, True), (2, 1, True), (8, 1, True), (2, 2, False), (4, None, False)],
)
def test_shared_sequences_on_fake_tensors(num_ranks, heads_at_a_time, has_norms, kind, monkeypatch):
    """8 key/value heads; the process group exchanges nothing."""
    monkeypatch.setitem(CASES, "shared", lambda: attention_case(heads_at_a_time, num_ranks, kind, has_norms))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with FakeTensorMode(), StorageCounter() as counter:
            check("shared", counter)
    finally:
        gc.collect()
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    with torch.device("cuda"):
        check(case, CudaCounter())
