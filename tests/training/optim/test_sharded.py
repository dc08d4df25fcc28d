"""AdamW's state of parameters that FSDP2 shards, over ranks and through checkpoints."""

import itertools
import math
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import training.optim.inventory
from tests.optimizers import Layer, assert_equal_states, full, make_optimizer, save_state, values_of
from tests.ranks import run_ranks
from training.checkpoint.state import load_state
from training.parallel.fsdp import shard_model
from training.parallel.world import World


class Sharded(nn.Module):
    """Odd sizes, which two ranks share unequally; `small` leaves the second rank nothing."""

    declared: ClassVar = {}  # no parameter is exact

    def __init__(self, width=6, hidden=11):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(width, hidden), Layer(hidden, 5)])
        self.small = nn.Parameter(torch.randn(1, 5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return ((x - self.small) ** 2).sum()


def train_sharded(gpu_state_bytes, world, micro_batches, steps=3, state_format="float32"):
    """Returns model, optimizer and norms. For the compact format, the layers' rows are two groups
    and one."""
    model = Sharded() if state_format == "float32" else Sharded(64, 32)
    if world.size > 1:
        shard_model(model, model.layers, world)
    optimizer = make_optimizer(
        model.named_parameters(), accumulate=micro_batches > 1, gpu_state_bytes=gpu_state_bytes,
        state_format=state_format,
    )  # fmt: skip
    norms = []
    for step in range(steps):
        for micro in range(micro_batches):
            generator = torch.Generator().manual_seed(10 * step + micro)
            rows = torch.randn(4, model.layers[0].in_features, generator=generator)
            model(rows[world.rank :: world.size]).backward()
        for state in (
            optimizer.states.values()
        ):  # on the GPU no gradient is a view that keeps a whole layer's
            assert (
                state.row.state_on_host
                or state.gradient.untyped_storage().nbytes() == state.gradient.nbytes
            )
        norms += optimizer.clip_grad_norm(1.0)
        optimizer.step(1e-2)
    return model, optimizer, norms


def check_sharded(world, folder):
    training.optim.inventory.PIECE_ELEMENTS, one = 24, World(0, 1, world.device)
    for micro_batches in (1, 3):
        _, default, norms = train_sharded(math.inf, world, micro_batches)
        expected = full(default.state_dict())
        for gpu_state_bytes in (0, 8 * 30):
            _, optimizer, its_norms = train_sharded(gpu_state_bytes, world, micro_batches)
            assert its_norms == norms
            assert_equal_states(full(optimizer.state_dict()), expected)
        model, single, single_norms = train_sharded(math.inf, one, micro_batches)
        assert norms == pytest.approx(single_norms, rel=1e-5)
        for name, tensors in single.state_dict().items():
            for key, tensor in tensors.items():
                torch.testing.assert_close(
                    expected[name][key], tensor.detach(), rtol=1e-4, atol=1e-6
                )
    path = save_state(folder / "run", 1, optimizer.state_dict())
    model, other, _ = train_sharded(0, world, 3, steps=1)
    load_state(other, path)
    assert_equal_states(full(other.state_dict()), expected)
    assert all(
        torch.equal(p.full_tensor(), expected[n]["master"]) for n, p in model.named_parameters()
    )
    check_compact_sharded(world)
    optimizer = train_sharded(0, world, 1, state_format="compact")[1]
    save_state(folder, 3, optimizer.state_dict(), optimizer.parameters)
    values = values_of(optimizer)
    if world.is_main:
        torch.save(values, folder / "values.pt")


def test_sharded_parameters(tmp_path):
    """Two ranks: placements agree bit for bit, with one process up to rounding, and through a
    checkpoint.

    Compact state, of which one rank has no row of some parameters, is loaded by one rank and by
    three.
    """
    run_ranks(2, check_sharded, tmp_path)
    load_sharded(World(0, 1, torch.device("cpu")), tmp_path)
    run_ranks(3, load_sharded, tmp_path)


def check_compact_sharded(world):
    training.optim.inventory.PIECE_ELEMENTS, one = 32, World(0, 1, world.device)
    _, optimizer, norms = train_sharded(math.inf, world, 1, state_format="compact")
    expected = full(optimizer.state_dict())
    assert [t.dtype for t in expected["layers.1.weight"].values()] == [
        torch.float32, torch.int8, torch.bfloat16, torch.uint8, torch.bfloat16, torch.float32
    ]  # fmt: skip
    assert (
        expected["layers.0.weight"]["exp_avg_scale"].shape == (32, 2)
        and "exp_avg_scale" not in expected["small"]
    )
    _, on_host, its_norms = train_sharded(0, world, 1, state_format="compact")
    assert its_norms == norms
    assert_equal_states(full(on_host.state_dict()), expected)
    _, single, single_norms = train_sharded(math.inf, one, 1, state_format="compact")
    assert norms == pytest.approx(single_norms, rel=1e-5)
    for name, tensors in single.state_dict().items():
        for key, tensor in tensors.items():  # codes next to a tie differ by one
            difference = (expected[name][key].float() - tensor.detach().float()).abs()
            assert difference.max() <= 1e-4 or (
                not tensor.is_floating_point() and difference.max() <= 1
            ), (name, key)


def load_sharded(world, folder):
    """Into whole and sharded parameters; columns too, whose parts are no whole groups."""
    expected = torch.load(folder / "values.pt")
    model = Sharded(64, 32)
    if world.size > 1:
        shard_model(model, model.layers, world)
    named = [dict(model.named_parameters())]
    if world.size > 1:
        whole = {
            n: distribute_tensor(torch.zeros(p.shape), world.fsdp_mesh, [Replicate()])
            for n, p in named[0].items()
        }
        whole["layers.0.weight"] = distribute_tensor(
            torch.zeros(32, 64), world.fsdp_mesh, [Shard(1)]
        )
        named.append({n: nn.Parameter(tensor) for n, tensor in whole.items()})
    for parameters, state_format in itertools.product(named, ("float32", "compact")):
        optimizer = make_optimizer(parameters, state_format=state_format)
        load_state(optimizer, folder / "step_00000003")
        found = values_of(optimizer)
        for name, values in expected.items():
            assert all(torch.equal(found[name][key], value) for key, value in values.items()), name


@contextmanager
def sharded_weight(folder, value, device="cpu"):
    """A function that makes a parameter sharded over a group of this process alone; `value` is its
    shape and dtype."""
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{folder}/group",
        rank=0,
        world_size=1,
    )
    try:
        mesh = init_device_mesh(device, (1,))
        yield lambda fill=1.0: nn.Parameter(
            distribute_tensor(torch.full_like(value, fill), mesh, [Shard(0)])
        )
    finally:
        dist.destroy_process_group()


def test_state_of_sharded_bf16_parameters_is_float32(tmp_path):
    with sharded_weight(tmp_path, torch.ones(4, 3, dtype=torch.bfloat16)) as make:
        state = make_optimizer([("weight", make())], gpu_state_bytes=0).state_dict()["weight"]
        with pytest.raises(ValueError, match="weights of sharded parameters stay on the GPU"):
            make_optimizer([("weight", make())], host_weights=["weight"])
    assert all(
        isinstance(state[key], DTensor) and state[key].dtype == torch.float32
        for key in ("master", "exp_avg")
    )
    assert state["master"].shape == (4, 3) and torch.equal(
        state["master"].to_local(), torch.ones(4, 3)
    )


@pytest.mark.gpu
def test_sharded_state_stays_on_the_host(tmp_path):
    """A DTensor of a GPU mesh whose shard is in host memory: saved and loaded in place."""
    with sharded_weight(tmp_path, torch.ones(40, 3, device="cuda"), "cuda") as make_weight:

        def make(fill):
            weight = make_weight(fill)
            optimizer = make_optimizer([("weight", weight)], gpu_state_bytes=0)
            (weight.to_local() * fill).sum().backward()
            assert optimizer.clip_grad_norm(1.0)[0] == pytest.approx(fill * math.sqrt(120))
            optimizer.step(1e-2)
            return weight, optimizer

        weight, optimizer = make(2.0)
        assert optimizer.state_dict()["weight"]["exp_avg"].to_local().device.type == "cpu"
        path = save_state(tmp_path / "run", 1, optimizer.state_dict())
        other_weight, other = make(3.0)
        load_state(other, path)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                other.states["weight"].tensors[key], optimizer.states["weight"].tensors[key]
            )
        assert torch.equal(other_weight.to_local(), weight.to_local())
