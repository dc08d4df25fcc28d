"""Bytes that an inventory predicts, and parameters that have no state."""

import functools
import math

import pytest
import torch
from torch import nn

from model import MODEL_SIZES, Transformer
from tests.optimizers import (
    DTYPES,
    PLACEMENTS,
    SHAPES,
    STATE_FORMAT,
    WIDE,
    backward,
    make_optimizer,
    make_parameters,
)
from tests.optimizers import small_pieces as small_pieces  # a fixture of all tests here
from training.optim.inventory import NUM_SLOTS, Inventory


@DTYPES
@STATE_FORMAT
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("placement", "host_weights"), [
    *((placement, ()) for placement in PLACEMENTS), ("device", ("matrix", "norm.weight")),
])  # fmt: skip
def test_bytes_are_predicted(dtype, state_format, accumulate, placement, host_weights, device):
    shapes = WIDE if state_format == "compact" or host_weights else SHAPES
    parameters = make_parameters(dtype, device, shapes)
    arguments = {
        "accumulate": accumulate,
        "gpu_state_bytes": PLACEMENTS[placement],
        "state_format": state_format,
    }
    arguments["host_weights"] = host_weights
    predicted = Inventory.of(((n, p.to("meta")) for n, p in parameters.items()), **arguments)
    optimizer = make_optimizer(parameters, **arguments)
    backward(parameters, 0, optimizer.homes)

    def size(tensors):
        return sum(t.nbytes for t in tensors)

    on_gpu, on_host = (
        [s for s in optimizer.states.values() if s.row.state_on_host == there]
        for there in (False, True)
    )
    assert predicted.gpu_state == size(t for state in on_gpu for t in state.tensors.values())
    assert predicted.gpu_gradients == size(state.gradient for state in on_gpu)
    assert predicted.gpu_scratch == optimizer.scratch.nbytes and not optimizer.ring.slots
    host = size(t for state in on_host for t in (*state.tensors.values(), state.gradient))
    host += size(optimizer.homes.values())
    assert 0 <= predicted.host - host < 14 * 512 and (predicted.host > 0) == bool(on_host)
    if on_host:
        assert (
            optimizer.arena.num_bytes
            == predicted.host
            >= optimizer.arena.used_bytes
            > predicted.host - 512
        )
    partly = 2 if state_format == "compact" else 1 if dtype == torch.bfloat16 else 3
    assert len(on_gpu) == (
        1 if host_weights else {"device": 3, "host": 0, "partly": partly}[placement]
    )
    assert (
        size(optimizer.homes.values())
        == sum(math.prod(shapes[n]) for n in host_weights) * dtype.itemsize
    )
    optimizer.update_beside_forward([nn.Identity()])  # keeps slots
    optimizer.step(1e-3)
    slots = [tensors for ring in optimizer.ring.slots.values() for tensors, _ in ring]
    assert not host_weights or all(tensors["weight"].dtype == dtype for tensors in slots)
    assert predicted.gpu_slots == size(t for tensors in slots for t in tensors.values())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("placement", ["device", "host", "visiting"])
def test_frozen_parameters_have_no_state(placement, accumulate, device):
    """Checks bytes, updates and homes where the first and the last parameter are frozen, and the
    others trained."""
    parameters = make_parameters(torch.float32, device)
    first, *trained, last = parameters
    frozen = {first, last}
    for name in frozen:
        parameters[name].requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    host = frozen if placement == "visiting" else set()
    gpu_state_bytes = math.inf if placement == "device" else 0
    arguments = {"accumulate": accumulate, "gpu_state_bytes": gpu_state_bytes, "host_weights": host}
    predicted, optimizer = (
        Inventory.of(parameters.items(), **arguments),
        make_optimizer(parameters, **arguments),
    )
    numel = sum(parameters[name].numel() for name in trained)
    assert predicted.gpu_state + predicted.gpu_gradients == (
        12 * numel if placement == "device" else 0
    )
    assert predicted.leaving_gradients == (0 if placement == "device" else 4 * numel)
    assert placement == "device" or optimizer.arena.num_bytes == predicted.host
    for _ in range(2):
        for name in trained:
            parameters[name].square().sum().backward()
        assert optimizer.clip_grad_norm(1.0)[0] > 0
        optimizer.step(0.1)
    assert optimizer.weights().keys() == optimizer.state_dict().keys() == {*trained}
    weights = {name: state.weight.to(device) for name, state in optimizer.states.items()}
    assert {name for name in before if torch.equal(weights[name], before[name])} == frozen
    assert {*optimizer.homes} == {parameters[name] for name in host}


def test_bytes_of_4b(monkeypatch):
    """The numbers of the module's docstring."""
    monkeypatch.undo()  # pieces of full size
    with torch.device("meta"):
        parameters = list(Transformer(MODEL_SIZES["4B"]).to(torch.bfloat16).named_parameters())
    one_batch, elements = (
        functools.partial(Inventory.of, parameters, accumulate=False),
        4_022_468_096,
    )
    one, several = (
        one_batch(gpu_state_bytes=0),
        Inventory.of(parameters, accumulate=True, gpu_state_bytes=0),
    )
    assert one.host / 2**30 == pytest.approx(
        52.4, abs=0.1
    ) and several.host / 2**30 == pytest.approx(59.9, abs=0.1)
    assert one.gpu_state == one.gpu_gradients == 0 and (one.gpu_scratch, one.gpu_slots) == (
        0,
        NUM_SLOTS * 14 * 2**23,
    )
    gpu = one_batch()
    assert gpu.gpu_state == 12 * elements and gpu.gpu_gradients == 2 * elements and gpu.host == 0
    half = one_batch(gpu_state_bytes=20 * 2**30)
    assert 19.9 < half.gpu_state / 2**30 <= 20
    assert half.gpu_state / 12 + half.host / 14 == pytest.approx(elements, rel=1e-4)
    compact = one_batch(state_format="compact")
    assert compact.gpu_state == pytest.approx(4.125 * elements, rel=1e-3)
    assert not compact.gpu_scratch and not compact.gpu_slots
    on_host = [
        Inventory.of(parameters, accumulate=a, gpu_state_bytes=0, state_format="compact")
        for a in (False, True)
    ]
    slots = [
        NUM_SLOTS * (2**23 * (4.125 + gradient) + 2560 * (12 + gradient)) for gradient in (2, 4)
    ]
    assert [(each.gpu_scratch, each.gpu_slots) for each in on_host] == [
        (0, slots[0]),
        (2**23 * 4, slots[1]),
    ]


@pytest.mark.parametrize(("state_format", "bytes_each"), [("float32", 12), ("compact", 4.125)])
def test_bytes_of_a_block_of_the_4b_on_the_host(state_format, bytes_each, monkeypatch):
    """The 4B, of which the first block waits on the host with its state, whatever state the GPU has
    room for."""
    monkeypatch.undo()  # pieces of full size
    with torch.device("meta"):
        model = Transformer(MODEL_SIZES["4B"]).to(torch.bfloat16)
    parameters, block = list(model.named_parameters()), list(model.layers[0].parameters())
    names = [name for name, declared in model.declared.items() if declared.block == 0]
    elements, matrices = (sum(p.numel() for p in block if p.ndim >= least) for least in (0, 2))
    predicted = functools.partial(
        Inventory.of, parameters, model.declared, accumulate=False, state_format=state_format
    )
    gpu, one = predicted(), predicted(host_weights=names)
    state = bytes_each * matrices + 12 * (elements - matrices)
    assert (
        one.host == pytest.approx(state + (2 + 2) * elements, abs=512 * 5 * len(block))
        and one.host % 512 == 0
    )
    assert one.gpu_state == gpu.gpu_state - state
    assert one.leaving_gradients == 2 * elements == gpu.gpu_gradients - one.gpu_gradients
    slots = 2**23 * (bytes_each + 2 + 2) + 2560 * (12 + 2 + 2) * (state_format == "compact")
    assert one.gpu_slots == NUM_SLOTS * slots and not gpu.gpu_slots
    rest = predicted(gpu_state_bytes=0), predicted(gpu_state_bytes=0, host_weights=names)
    assert rest[1].host - rest[0].host == pytest.approx(2 * elements, abs=512 * len(block))
