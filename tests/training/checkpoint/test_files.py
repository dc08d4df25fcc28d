"""Checkpoints: exact round trips on any number of ranks, and every kind of damage is seen."""

import json
import random
import shutil
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from training.checkpoint import files, weights
from training.checkpoint.files import (
    latest_checkpoint,
    load_optimizer_state,
    load_trainer_state,
    restore_rng,
    save_checkpoint,
    verify_checkpoint,
)
from training.checkpoint.weights import load_model_weights
from training.parallel.fsdp import copy_weights

CONFIG = {"model_type": "qwen3", "hidden_size": 6}


class Model(nn.Module):
    """Parameters under our names, odd sizes that no number of ranks divides."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(11, 6, dtype=dtype)
        self.norm = nn.RMSNorm(6, dtype=dtype)
        nn.init.normal_(self.norm.weight)


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_state_of(model, value=None):
    """Nested as the optimizer's: tensors by parameter name, and plain numbers."""

    def moments(i, parameter):
        fill = torch.full_like(parameter, i if value is None else value)
        return {"exp_avg": fill, "exp_avg_sq": fill / 3, "step": torch.tensor(7.0 if value is None else value)}

    states = {name: moments(i, p) for i, (name, p) in enumerate(weights_of(model).items(), start=1)}
    return {
        "state": states,
        "learning_rate": 0.1 + 0.2 if value is None else value,
        "skipped": 3 if value is None else 0,
    }


def save(output_dir, step, model=None, **changes):
    model = model or Model()
    arguments = {
        "model_state": weights_of(model),
        "model_config": CONFIG,
        "optimizer_state": optimizer_state_of(model),
        "trainer_state": {"tokens_seen": 2**40, "loader": {"next_sequence": 12}},
    }
    return save_checkpoint(output_dir, step, **{**arguments, **changes})


def steps_in(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_state(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_in_one_process(tmp_path, dtype):
    model = Model(1, dtype)
    path = save(tmp_path / "run", 100, model)
    assert path == latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step_00000100"
    verify_checkpoint(path)
    other = Model(2, dtype)
    embedding = other.embed_tokens.weight
    copy_weights(other, load_model_weights(path, {n: p.shape for n, p in other.named_parameters()}))
    assert_same_state(weights_of(other), weights_of(model))
    assert other.embed_tokens.weight is embedding
    state = optimizer_state_of(model, value=-1.0)
    tensor = state["state"]["norm.weight"]["exp_avg"]
    load_optimizer_state(path, state)
    assert_same_state(state, optimizer_state_of(model))
    assert state["state"]["norm.weight"]["exp_avg"] is tensor
    assert load_trainer_state(path) == {"step": 100, "tokens_seen": 2**40, "loader": {"next_sequence": 12}}
    assert json.loads((path / "config.json").read_text()) == CONFIG


def test_without_optimizer_state(tmp_path):
    path = save(tmp_path, 1, optimizer_state=None)
    verify_checkpoint(path)
    with pytest.raises(ValueError, match="no optimizer state; start from its weights with --init_from"):
        load_optimizer_state(path, optimizer_state_of(Model()))


def test_random_generators_go_on_exactly(tmp_path):
    def draw():
        return random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()

    draw()  # an odd number of Gaussians: a second value waits inside the generator
    path = save(tmp_path, 1)
    expected = draw()
    assert draw() != expected
    assert restore_rng(path) and draw() == expected
    (path / "rng_0.json").unlink()
    assert not restore_rng(path)


def test_every_damaged_file_is_named(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert {*manifest, "manifest.json"} == names
    assert {"model.safetensors", "config.json", "trainer.json", "rng_0.json", "optimizer/.metadata"} <= set(manifest)
    assert any(name.endswith(".distcp") for name in manifest)
    for name in manifest:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1])
        with pytest.raises(ValueError, match=f"{name} is truncated or changed: {len(content) - 1} bytes"):
            verify_checkpoint(path)
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        (path / name).write_bytes(flipped)
        with pytest.raises(ValueError, match=f"{name} is corrupted"):
            verify_checkpoint(path)
        (path / name).unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            verify_checkpoint(path)
        (path / name).write_bytes(content)
    verify_checkpoint(path)
    (path / "manifest.json").write_bytes(b'{"model.safe')
    with pytest.raises(ValueError, match=r"manifest\.json is missing or damaged"):
        verify_checkpoint(path)


def test_damaged_or_foreign_trainer_state(tmp_path):
    path = save(tmp_path, 1)
    trainer = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps({**trainer, "format_version": 99}))
    with pytest.raises(ValueError, match="has format 99, this code 1"):
        load_trainer_state(path)
    (path / "trainer.json").unlink()
    with pytest.raises(ValueError, match=r"trainer\.json is missing or damaged"):
        load_trainer_state(path)


def test_optimizer_state_of_another_model(tmp_path):
    path = save(tmp_path, 1)
    state = optimizer_state_of(Model())
    del state["state"]["norm.weight"]["exp_avg"]
    with pytest.raises(ValueError, match=r"another model or optimizer: state/norm\.weight/exp_avg is only in one"):
        load_optimizer_state(path, state)
    state["state"]["norm.weight"]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"cannot read the optimizer state of .*[Ss]ize"):
        load_optimizer_state(path, state)


def test_keeps_the_newest_and_never_a_later_one(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step, keep=4)
    assert len(steps_in(tmp_path)) == 3
    save(tmp_path, 10, keep=2)
    assert steps_in(tmp_path) == ["step_00000002", "step_00000010"]
    save(tmp_path, 5, keep=1)  # a run resumed from step 2: step 10 is not its own to delete
    assert steps_in(tmp_path) == ["step_00000005", "step_00000010"]
    save(tmp_path, 10, Model(3), keep=2)  # replaced
    assert steps_in(tmp_path) == ["step_00000005", "step_00000010"]
    verify_checkpoint(latest_checkpoint(tmp_path))
    found = load_file(tmp_path / "step_00000010" / "model.safetensors")
    assert torch.equal(found["model.norm.weight"], Model(3).norm.weight)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save(tmp_path, 11, keep=0)


def test_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None


def test_full_disk_is_found_before_anything_changes(tmp_path, monkeypatch):
    save(tmp_path, 1, keep=1)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 2**26))
    with pytest.raises(ValueError, match=r"needs 0\.06 GB, .* has 0\.06 GB free; free some space"):
        save(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == ["step_00000001"]
    verify_checkpoint(tmp_path / "step_00000001")


@pytest.mark.parametrize(
    "module, victim",
    [(files, "safetensors_header"), (weights, "_bytes_of"), (files, "_checksums"), (files, "_put_in_place")],
)
def test_failed_save_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, module, victim):
    save(tmp_path, 1, keep=1)

    def fail(*args, **kwargs):
        raise OSError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(module, victim, fail)
        with pytest.raises(OSError, match="disk on fire"):
            save(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == ["step_00000001"]
    save(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == ["step_00000002"]


def save_and_die(world, output_dir, victim):
    def die(*args, **kwargs):
        files.os.kill(files.os.getpid(), 9)

    owner = {"_put_in_place": files, "save": files.dcp, "rmtree": files.shutil}[victim]
    setattr(owner, victim, die)
    save(output_dir, 2, keep=1)


@pytest.mark.parametrize("victim, latest", [("save", 1), ("_put_in_place", 1), ("rmtree", 2)])
def test_killed_save_is_no_checkpoint(tmp_path, victim, latest):
    save(tmp_path, 1, keep=1)
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(1, save_and_die, tmp_path, victim)
    assert latest_checkpoint(tmp_path).name == f"step_{latest:08d}"
    verify_checkpoint(latest_checkpoint(tmp_path))
    assert any(name.endswith(".tmp") for name in steps_in(tmp_path))  # killed in the act
    save(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == ["step_00000003"]


def shard(model, mesh, placements):
    for module, name in ((model.embed_tokens, "weight"), (model.norm, "weight")):
        setattr(module, name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, placements)))
    return model


def save_sharded(world, folder):
    torch.manual_seed(world.rank)
    model = shard(Model(1), world.fsdp_mesh, [Shard(0)])
    random.seed(world.rank)
    save(folder / "run", 3, model)
    verify_checkpoint(folder / "run" / "step_00000003")
    (folder / f"draw_{world.rank}").write_text(str(random.random()))


def load_sharded(world, folder):
    for placements in ([Shard(0)], [Replicate()]):
        model = shard(Model(2), world.fsdp_mesh, placements)
        copy_weights(
            model,
            load_model_weights(folder / "run" / "step_00000003", {n: p.shape for n, p in model.named_parameters()}),
        )
        state = optimizer_state_of(model, value=-1.0)
        load_optimizer_state(folder / "run" / "step_00000003", state)
        expected = Model(1)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and parameter.placements == tuple(placements)
            assert torch.equal(parameter.full_tensor(), expected.get_parameter(name))
            moment = state["state"][name]["exp_avg"]
            assert torch.equal(moment.full_tensor(), optimizer_state_of(expected)["state"][name]["exp_avg"])
        assert state["learning_rate"] == 0.1 + 0.2
        assert restore_rng(folder / "run" / "step_00000003") == (world.rank < 2)
        if world.rank < 2:
            assert str(random.random()) == (folder / f"draw_{world.rank}").read_text()


def damage_in_a_group(world, folder):
    path = folder / "run" / "step_00000003"
    manifest = sorted(json.loads((path / "manifest.json").read_text()))
    dist.barrier()
    if world.rank == 0:  # a file whose content rank 1 checks
        content = bytearray((path / manifest[1]).read_bytes())
        content[-1] ^= 1
        (path / manifest[1]).write_bytes(content)
    dist.barrier()
    with pytest.raises((ValueError, RuntimeError), match=f"{manifest[1]} is corrupted"):
        verify_checkpoint(path)
    if world.rank == 1:
        files._rng_state = lambda: 1 / 0
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
        save(folder / "run", 4, shard(Model(1), world.fsdp_mesh, [Shard(0)]))
    dist.barrier()
    assert steps_in(folder / "run") == ["step_00000003"]


def save_with_few_full_weights(world, folder):
    model = shard(Model(1), world.fsdp_mesh, [Shard(0)])
    gather, alive = DTensor.full_tensor, []

    def full_tensor(self):
        # A tensor made from an array refers to it until its memory is free, whatever else looks at that memory.
        assert [array for array in alive if array() is not None] == []
        array = gather(self).numpy().copy()
        alive.append(weakref.ref(array))
        return torch.from_numpy(array)

    DTensor.full_tensor = full_tensor
    path = save(folder / "run", 3, model)
    assert len(alive) == 2
    assert torch.equal(load_file(path / "model.safetensors")["model.norm.weight"], Model(1).norm.weight)


def full_disk_in_a_group(world, folder):
    model = shard(Model(1), world.fsdp_mesh, [Shard(0)])
    gather, gathered = DTensor.full_tensor, []
    DTensor.full_tensor = lambda self: gathered.append(1) or gather(self)

    def no_room(tensor):
        raise OSError(28, "No space left on device")

    weights._bytes_of = no_room
    with pytest.raises((OSError, RuntimeError), match="No space left on device"):
        save(folder / "run", 4, model)
    assert len(gathered) == 2  # on both ranks: rank 0 did not leave rank 1 waiting in the second
    dist.barrier()
    assert steps_in(folder / "run") == ["step_00000003"]


def test_saved_by_two_ranks_loaded_by_one_and_three(tmp_path):
    run_ranks(2, save_sharded, tmp_path)
    path = latest_checkpoint(tmp_path / "run")
    verify_checkpoint(path)
    assert {"rng_0.json", "rng_1.json"} <= json.loads((path / "manifest.json").read_text()).keys()
    model = Model(2)
    copy_weights(model, load_model_weights(path, {n: p.shape for n, p in model.named_parameters()}))
    assert_same_state(weights_of(model), weights_of(Model(1)))
    state = optimizer_state_of(model, value=-1.0)
    load_optimizer_state(path, state)
    assert_same_state(state, optimizer_state_of(model))
    run_ranks(3, load_sharded, tmp_path)


def test_one_full_weight_at_a_time_and_a_full_disk_in_the_middle(tmp_path):
    run_ranks(2, save_with_few_full_weights, tmp_path)
    run_ranks(2, full_disk_in_a_group, tmp_path)
    verify_checkpoint(latest_checkpoint(tmp_path / "run"))


def test_saved_by_one_rank_loaded_by_two_and_errors_reach_both(tmp_path):
    random.seed(0)
    save(tmp_path / "run", 3, Model(1))
    (tmp_path / "draw_0").write_text(str(random.random()))
    path = tmp_path / "run" / "step_00000003"
    shutil.copy(path / "rng_0.json", path / "rng_1.json")
    shutil.copy(tmp_path / "draw_0", tmp_path / "draw_1")
    run_ranks(2, load_sharded, tmp_path)
    (path / "rng_1.json").unlink()
    run_ranks(2, damage_in_a_group, tmp_path)
