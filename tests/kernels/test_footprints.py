"""Compares each operation's `Footprint` with what it allocates, on fake tensors and on a GPU."""

import gc
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.cross_entropy import cross_entropy, cross_entropy_footprint
from kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_footprint
from tests.storage_counter import StorageCounter
from training.memory.profiler import CudaCounter

T, D, V = 16_384, 2560, 151_936  # the 4B's
OPS = torch.ops.fathom
SMALL_BYTES = 2**23


def tensor(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


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


CASES = {"chunked loss": chunked_loss_case, "standard loss": standard_loss_case}


def check(case, counter):
    """Checks bytes to within 2%. Backward may also hold the gradients of inputs."""
    run, inputs, footprint, own = CASES[case]()
    counter.own_bytes = own
    torch.autograd.grad(run(*inputs).sum(), inputs)  # lets libraries make their workspaces
    gc.collect()  # frees cycles that earlier tests left
    time.sleep(0.1)  # lets autograd's own thread free its graph, for which it needs Python's lock
    before = counter.read().allocated
    run(*inputs)  # makes the gradients as well
    forward = counter.read().peak - before
    output = run(*inputs)
    saved = counter.read().allocated - before - output.nbytes
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


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    with torch.device("cuda"):
        check(case, CudaCounter())
