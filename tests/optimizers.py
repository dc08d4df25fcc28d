"""Optimizers whose parameters live where a test says, and the values that tests compare."""

import math
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import training.checkpoint.state
import training.optim.formats
import training.optim.inventory
from tests.checkpoints import save_checkpoint
from training.memory.visiting import VisitingWeights
from training.optim.adamw import MasterAdamW
from training.optim.formats import format_with
from training.optim.inventory import Inventory

ANY_WEIGHTS = {
    "weight": torch.zeros(1)
}  # weights of a checkpoint in which only the optimizer state is looked at
SHAPES = {"matrix": (8, 16), "norm.weight": (16,), "other": (5, 7)}
WIDE = {"matrix": (6, 64), "norm.weight": (64,), "other": (5, 7)}  # the matrix has compact state
PLACEMENTS = {
    "device": math.inf,
    "host": 0,
    "partly": 8 * 16 * 12,
}  # gpu_state_bytes; partly: the matrix stays
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
MICRO_BATCHES = pytest.mark.parametrize("micro_batches", [1, 3])
PLACEMENT = pytest.mark.parametrize("placement", PLACEMENTS)
STATE_FORMAT = pytest.mark.parametrize("state_format", ["float32", "compact"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, request):
    """Small parameters are updated in several pieces as well, and slots are used again and
    again."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(training.optim.inventory, "PIECE_ELEMENTS", 32)


class Layer(nn.Linear):
    """A block of a model that FSDP2 shards: it is its own mixer."""

    mixer = property(lambda self: self)


def make_parameters(dtype, device, shapes=SHAPES):
    generator = torch.Generator(device).manual_seed(0)
    return {
        n: nn.Parameter(torch.randn(s, generator=generator, device=device).to(dtype))
        for n, s in shapes.items()
    }


def backward(parameters, seed, homes=MappingProxyType({})):
    """A loss whose gradients are known: random numbers in the parameters' dtype, returned by
    name."""
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    gradients = {
        n: torch.randn(p.shape, generator=generator, device=device).to(p.dtype)
        for n, p in parameters.items()
    }
    with VisitingWeights({0: homes}, device).visit(0):
        sum((p * gradients[n]).sum() for n, p in parameters.items()).backward()
    return gradients


def copy_of_state(optimizer):
    device = next(iter(optimizer.parameters.values())).device
    return {
        n: {k: t.to(device, copy=True) for k, t in tensors.items()}
        for n, tensors in optimizer.state_dict().items()
    }


def assert_equal_states(found, expected):
    for name, tensors in expected.items():
        assert found[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(found[name][key], tensor), (name, key)


def weights_of(optimizer):
    return {
        name: {"": weight.detach().to(optimizer.device)}
        for name, weight in optimizer.weights().items()
    }


def save_state(folder, step, optimizer_state, weights=MappingProxyType(ANY_WEIGHTS)):
    """A checkpoint of optimizer state, and of weights if those are looked at; returns its
    folder."""
    state = {"weights": weights, "optimizer_state": optimizer_state}
    return save_checkpoint(folder, step, **state, model_config={}, trainer_state={})


def values_of(optimizer):
    """The state in float32 values, and the parameters, whole on every rank and on the CPU."""
    values = {}
    for name, tensors in full(optimizer.state_dict()).items():
        parameter = full({name: {"": optimizer.parameters[name].detach()}})[name][""].cpu()
        kept = {
            key: tensor.cpu().flatten()
            for key, tensor in tensors.items()
            if key not in ("master", "step")
        }
        own = tensors["master"].detach().cpu() if "master" in tensors else parameter
        format = format_with({key: tensor.dtype for key, tensor in kept.items()}, own.dtype)
        values[name] = {**format.read(kept, own.flatten()), "parameter": parameter.flatten()}
    return values


def full(state):
    return {
        name: {
            key: t.full_tensor() if isinstance(t, DTensor) else t.clone()
            for key, t in tensors.items()
        }
        for name, tensors in state.items()
    }


def make_optimizer(named_parameters, *, weight_decay=0.1, lora_plus=1.0, impl="auto", **placed):
    """Returns an optimizer of named parameters; `placed` are arguments of Inventory.of."""
    named = dict(named_parameters)
    inventory = Inventory.of(named.items(), **placed)
    return MasterAdamW(
        named.items(),
        inventory,
        weight_decay=weight_decay,
        lora_plus=lora_plus,
        impl=impl,
    )
