"""FSDP2 in bfloat16 equals one process: on CPUs by gloo, on two GPUs by NCCL."""

import importlib
from dataclasses import replace

import pytest
import torch

from kernels.attention.documents import find_documents
from model import MODEL_SIZES, Transformer
from tests.ranks import run_ranks
from training.families.lora import Adapters, adapt
from training.parallel.fsdp import copy_weights, initial_weights, shard_model
from training.parallel.world import World

# The packed documents' cos and sin, [B, T, K/2], pass through every block; 0.6B's width with two blocks on a GPU.
CONFIGS = {
    "cpu": MODEL_SIZES["tiny"],
    "cuda": replace(MODEL_SIZES["0.6B"], num_hidden_layers=2, vocab_size=1024),
}


def build(device, world=None):
    """The same weights on any number of ranks: bfloat16 values, sharded in float32."""
    with torch.device("meta"):
        model = Transformer(CONFIGS[device.type])
    if world is None:
        model.to(torch.bfloat16)
    else:
        shard_model(model, model.layers, world, compute_dtype=torch.bfloat16)
    model.to_empty(device=device)
    copy_weights(model, initial_weights(model, seed=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def build_adapted(device, world=None):
    """Adapters in float32 beside frozen weights in bfloat16, sharded; for one process, adapters in bfloat16."""
    with torch.device("meta"):
        model = Transformer(CONFIGS[device.type])
    adapt(model, Adapters(4, 8.0))
    if world is None:
        model.to(torch.bfloat16)
    else:
        model.cast(torch.bfloat16, only_frozen=True)
        shard_model(model, model.layers, world, compute_dtype=torch.bfloat16)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(1)
    drawn = dict(initial_weights(model, seed=0))
    for name in drawn:
        if "lora_B" in name:
            drawn[name] = torch.randn(drawn[name].shape, generator=generator, device=device) / 10
    copy_weights(model, ((name, full.bfloat16().to(full.dtype)) for name, full in drawn.items()))
    return model


def make_batch(device):
    T = 100 if device.type == "cpu" else 4096
    ids = torch.randint(256, (2, T), generator=torch.Generator().manual_seed(0))
    return ids.to(device), (torch.arange(T)[None] > torch.tensor([[T // 3], [T // 2]])).long()


def loss_and_gradients(model, ids, documents):
    loss = model(ids, ids, documents=find_documents(documents), denominator=1000).loss
    loss.backward()
    gradients = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).double()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return loss.detach(), gradients


def compare_with_one_process(world: World, build=build) -> None:
    """Each rank has its own sequence; a single process takes both, one after the other."""
    seen = []
    module = importlib.import_module("kernels.qkv_attention")  # the package's attribute of that name is the function
    rope = module.rope
    module.rope = lambda q, k, cos, sin, **options: (
        seen.append((q.dtype, cos.dtype, sin.dtype)) or rope(q, k, cos, sin, **options)
    )
    ids, documents = make_batch(world.device)
    row = slice(world.rank, world.rank + 1)
    sharded = build(world.device, world)
    loss, gradients = loss_and_gradients(sharded, ids[row], documents[row])
    assert seen == [(torch.bfloat16, torch.float32, torch.float32)] * len(sharded.layers), seen

    alone = build(world.device)
    losses = [loss_and_gradients(alone, ids[i : i + 1], documents[i : i + 1])[0] for i in range(2)]
    assert torch.equal(loss, losses[world.rank]), (loss, losses)
    for name, parameter in alone.named_parameters():
        if not parameter.requires_grad:
            continue
        found, expected = gradients[name], parameter.grad.double()  # summed in float32 and in bfloat16
        difference = float((found - expected).norm() / expected.norm())
        assert difference < 5e-3, (name, difference)


def test_two_processes_equal_one_in_bfloat16():
    run_ranks(2, compare_with_one_process)


def test_two_processes_train_the_adapters_of_one():
    run_ranks(2, compare_with_one_process, build_adapted)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("build", [build, build_adapted])
def test_two_gpus_equal_one(build, replicate):
    run_ranks(2, compare_with_one_process, build, device="cuda", replicate=replicate)
