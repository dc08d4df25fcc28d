"""Compares the bytes of both losses that a plan counts with what they allocate, on fake tensors and
on a GPU."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import linear_cross_entropy, logits_bytes
from tests.gpu import free_memory
from tests.storage_counter import StorageCounter
from training.memory.profiler import CudaCounter

T, D, V = 16_384, 2560, 151_936  # the 4B's
OPS = torch.ops.fathom
SMALL_BYTES = 2**23


def tensor(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def chunked_loss(x, head, targets):
    return linear_cross_entropy(x, head, targets, impl="triton")


def standard_loss(x, head, targets):
    return cross_entropy(torch.nn.functional.linear(x, head), targets, inplace=True, impl="triton")


# Bytes kept for backward, and bytes in forward alone. The chunked loss makes gradients, the head's
# in float32.
CASES = {chunked_loss: (2 * T * D + 4 * V * D, logits_bytes(T, V)), standard_loss: (2 * T * V, 0)}


def check(case, counter):
    """Checks bytes to within 2%. Backward may also hold the gradients of inputs."""
    (kept, inside), inputs, targets = (
        CASES[case],
        [tensor(T, D), tensor(V, D)],
        torch.zeros(T, dtype=torch.long),
    )
    run = functools.partial(case, targets=targets)
    counter.own_bytes = {OPS.linear_cross_entropy.default: inside}
    torch.autograd.grad(run(*inputs).sum(), inputs)  # lets libraries make their workspaces
    free_memory()
    before = counter.read().allocated
    run(*inputs)  # makes the gradients as well
    forward = counter.read().peak - before
    output = run(*inputs)
    saved = counter.read().allocated - before - output.nbytes
    d_output = torch.ones_like(output)
    alive = counter.read().allocated
    torch.autograd.grad(output, inputs, d_output)
    backward = counter.read().peak - alive
    assert saved == pytest.approx(kept, rel=0.02, abs=SMALL_BYTES)
    assert forward == pytest.approx(kept + inside, rel=0.02, abs=SMALL_BYTES)
    assert backward <= sum(x.nbytes for x in inputs) + SMALL_BYTES


@pytest.mark.parametrize("case", CASES)
def test_on_fake_tensors(case):
    with FakeTensorMode(), StorageCounter() as counter:
        check(case, counter)


@pytest.mark.gpu(gib=10)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    with torch.device("cuda"):
        check(case, CudaCounter())
