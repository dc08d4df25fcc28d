"""Checkpoints on disk: exact round trips on any number of ranks, damage that is seen, and which
ones are deleted."""

import errno
import json
import os
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.checkpoints import damage, parameters_of, save_checkpoint, unreadable
from tests.ranks import run_ranks
from training.checkpoint import pieces, saver
from training.checkpoint.files import (
    checkpoints,
    clear_leftovers,
    latest_checkpoint,
    load_trainer_state,
    restore_rng,
    step_of,
)
from training.checkpoint.manifest import verify_checkpoint, verify_weights
from training.checkpoint.pieces import Entry, Piece
from training.checkpoint.state import load_optimizer_state
from training.checkpoint.weights import load_model_weights
from training.host.errors import UserError
from training.parallel.fsdp import copy_weights
from training.parallel.world import make_mesh

CONFIG = {"model_type": "qwen3", "hidden_size": 6}


class Model(nn.Module):
    """Parameters under our names, of odd sizes that no number of ranks divides."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(11, 6, dtype=dtype)
        self.norm = nn.RMSNorm(6, dtype=dtype)
        nn.init.normal_(self.norm.weight)


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_state_of(model, value=None):
    """State by parameter name, as the optimizer has it; every tensor is filled with `value` if that
    is given."""

    def moments(i, parameter):
        fill = torch.full_like(parameter, i if value is None else value, dtype=torch.float32)
        return {
            "exp_avg": fill,
            "exp_avg_sq": fill / 3,
            "step": torch.tensor(7.0 if value is None else value),
        }

    return {name: moments(i, p) for i, (name, p) in enumerate(weights_of(model).items(), start=1)}


def save(output_dir, step, model=None, **changes):
    model = model or Model()
    state = {
        "weights": weights_of(model),
        "model_config": CONFIG,
        "optimizer_state": optimizer_state_of(model),
        "trainer_state": {"tokens_seen": 2**40, "loader": {"next_sequence": 12}},
    }
    return save_checkpoint(output_dir, step, **{**state, **changes})


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
    assert path == latest_checkpoint(tmp_path / "run", {}) == tmp_path / "run" / "step_00000100"
    verify_checkpoint(path)
    other = Model(2, dtype)
    embedding = other.embed_tokens.weight
    copy_weights(other, load_model_weights(path, parameters_of(dict(other.named_parameters()))))
    assert_same_state(weights_of(other), weights_of(model))
    assert other.embed_tokens.weight is embedding
    state = optimizer_state_of(model, value=-1.0)
    tensor = state["norm.weight"]["exp_avg"]
    load_optimizer_state(path, state)
    assert_same_state(state, optimizer_state_of(model))
    assert state["norm.weight"]["exp_avg"] is tensor
    assert load_trainer_state(path) == {
        "step": 100,
        "tokens_seen": 2**40,
        "loader": {"next_sequence": 12},
    }
    written = {**CONFIG, "torch_dtype": str(dtype).removeprefix("torch.")}
    assert json.loads((path / "config.json").read_text()) == written


def test_without_optimizer_state(tmp_path):
    path = save(tmp_path, 1, optimizer_state=None)
    verify_checkpoint(path)
    with pytest.raises(
        ValueError, match="no optimizer state; start from its weights with --init_from"
    ):
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


def test_every_damaged_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)  # two rows of the embedding
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    names = {file.name for file in path.iterdir()}
    expected = {
        "model.safetensors",
        "optimizer.safetensors",
        "config.json",
        "trainer.json",
        "rng_0.json",
    }
    assert manifest["files"].keys() == expected and names == {*expected, "manifest.json"}
    assert len(manifest["blocks"]["model.safetensors"]) == 6 + 1
    draws = random.Random(0)
    for name in sorted(names):
        content = (path / name).read_bytes()
        for flip in range(80):
            flipped = bytearray(content)
            flipped[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
            (path / name).write_bytes(flipped)
            with pytest.raises(
                UserError, match=name.replace("manifest.json", r"manifest\.json|has format")
            ):
                verify_checkpoint(path)
            (path / name).write_bytes(content[: draws.randrange(len(content))] if flip else b"")
            with pytest.raises(UserError, match=name):
                verify_checkpoint(path)
        (path / name).unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            verify_checkpoint(path)
        (path / name).write_bytes(content)
    verify_checkpoint(path)


@pytest.mark.parametrize(
    "name, place",
    [
        ("model.safetensors", -5),
        ("model.safetensors", 30),
        ("config.json", 30),
        ("manifest.json", -5),
    ],
)
def test_weights_are_compared_wherever_a_manifest_lies_beside_them(name, place, tmp_path):
    path = save(tmp_path, 1)
    (path / "tokenizer.json").write_text("{}")  # added by somebody
    (path / "rng_0.json").unlink()
    damage(path / "optimizer.safetensors")  # weights can be used without it
    for given in (path, str(path), path / "model.safetensors"):
        verify_weights(given)
    damage(path / name, place)
    for given in (path, str(path), path / "model.safetensors"):
        with pytest.raises(UserError, match=rf"{path}.*{name} is (corrupted|missing or damaged)"):
            verify_weights(given)
    (path / "manifest.json").unlink()
    verify_weights(path)  # passes, like weights from anywhere


def test_another_programs_manifest_or_an_older_one_says_nothing(tmp_path):
    """An older format starts from its weights alone."""
    path = save(tmp_path, 1)
    for content in ({"files": ["model.safetensors"]}, {"model.safetensors": [1, 2]}):
        (path / "manifest.json").write_text(json.dumps(content))
        verify_weights(path)
    refusal = "has format None, this code 2: it can only start from its weights, with --init"
    with pytest.raises(UserError, match=refusal):
        verify_checkpoint(path)


def test_bytes_that_nobody_wrote_are_seen(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["blocks"]["model.safetensors"].pop()
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"\d+ bytes of model\.safetensors were written by nobody"):
        verify_checkpoint(path)


def test_runs_of_a_piece():
    entry = Entry(Path("file"), torch.bfloat16, (8, 10), 100)
    assert [*Piece("w", (2, 4), (2, 4)).runs(entry)] == [(148, 8), (168, 8)]
    assert [*Piece("w", (2, 0), (3, 10)).runs(entry)] == [(140, 60)]
    assert [*Piece("w", (), ()).runs(Entry(Path("file"), torch.float32, (), 8))] == [(8, 4)]
    whole = Entry(Path("file"), torch.float32, (2, 3, 4), 0)
    assert [*Piece("w", (0, 1, 0), (2, 1, 4)).runs(whole)] == [(16, 16), (64, 16)]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer.json", "rng_0.json", "manifest.json"]
)
def test_a_checkpoint_that_the_disk_cannot_read_is_passed_over(name, tmp_path):
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    passed_over = {}
    with unreadable(newer / name):
        assert latest_checkpoint(tmp_path, passed_over) == older
        with pytest.raises(UserError, match=rf"{newer}.*Input/output error"):
            verify_checkpoint(newer)
    assert f"{newer / name}" in passed_over[newer] and "Input/output error" in passed_over[newer]


def test_tensors_that_the_disk_cannot_read_are_named(tmp_path):
    path, message = (
        save(tmp_path, 1),
        r"optimizer\.safetensors cannot be read: Input/output error, at .*\.weight\.",
    )
    with unreadable(path / "optimizer.safetensors", only_tensors=True):
        assert latest_checkpoint(tmp_path, {}) == path  # looks at headers
        with pytest.raises(UserError, match=message):
            verify_checkpoint(path)
        with pytest.raises(UserError, match=message):
            load_optimizer_state(path, optimizer_state_of(Model()))


def test_a_copy_under_a_newer_name_is_not_the_newest(tmp_path):
    path, passed_over = save(tmp_path, 2), {}
    shutil.copytree(path, tmp_path / "step_00000009")
    assert latest_checkpoint(tmp_path, passed_over) == path
    assert passed_over == {
        tmp_path / "step_00000009": "it is a copy, under another name, of a checkpoint of step 2"
    }


@pytest.mark.parametrize("victim", range(2))
def test_a_rename_that_fails_keeps_the_checkpoint_that_was_there(victim, tmp_path, monkeypatch):
    path, rename, calls = save(tmp_path, 1), Path.rename, []
    before = (path / "model.safetensors").read_bytes()
    monkeypatch.setattr(saver, "ATTEMPTS", 1)

    def fail(self, target):
        calls.append(target)
        if len(calls) == victim + 1:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="could not be written"):
        patch.setattr(Path, "rename", fail)
        save(tmp_path, 1, Model(5))
    assert steps_in(tmp_path) == [path.name] and (path / "model.safetensors").read_bytes() == before
    verify_checkpoint(path)


def test_a_kill_between_two_renames_leaves_the_checkpoint_that_was_there(tmp_path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / ".step_00000001.replaced.tmp")
    clear_leftovers(tmp_path)
    verify_checkpoint(path)
    assert steps_in(tmp_path) == [path.name]


def test_json_files_of_any_length_take_little_memory(tmp_path):
    path = save(tmp_path, 1)
    for name, read in (("trainer.json", load_trainer_state), ("manifest.json", verify_checkpoint)):
        with (path / name).open("r+b") as file:
            file.truncate(3 * 2**30)  # of which the disk stores nothing
        with pytest.raises(
            UserError, match=rf"{name}: it has 3221225472 bytes, at most 268435456 are read"
        ):
            read(path)


def test_an_edited_trainer_state_is_refused(tmp_path):
    path = save(tmp_path, 1)
    (path / "trainer.json").write_text((path / "trainer.json").read_text().replace("12", "13"))
    with pytest.raises(UserError, match=r"trainer\.json is corrupted"):
        load_trainer_state(path)


def test_damaged_trainer_state(tmp_path):
    """No manifest vouches for it, as in checkpoints of before 2026-11-22."""
    path = save(tmp_path, 1)
    (path / "manifest.json").unlink()
    for content in (
        "[]",
        "{}",
        "[" * 100_000,
        '{"trainer_state": 3}',
        '{"trainer_state": {"settings": 3}}',
    ):
        (path / "trainer.json").write_text(content)
        with pytest.raises(UserError, match=r"trainer\.json is (missing or )?damaged"):
            load_trainer_state(path)
    (path / "trainer.json").unlink()
    with pytest.raises(UserError, match=r"trainer\.json is missing or damaged"):
        load_trainer_state(path)


def test_optimizer_state_of_another_model(tmp_path):
    path = save(tmp_path, 1)
    state = optimizer_state_of(Model())
    del state["norm.weight"]["exp_avg"]
    with pytest.raises(
        ValueError, match=r"another model or optimizer: norm\.weight\.exp_avg is only in one"
    ):
        load_optimizer_state(path, state)
    state["norm.weight"]["exp_avg"] = torch.zeros(7)
    with pytest.raises(
        ValueError, match=r"norm\.weight\.exp_avg has shape \[6\], this model needs \[7\]"
    ):
        load_optimizer_state(path, state)


def test_only_a_checkpoints_own_name_is_one(tmp_path):
    names = "step_00000020", "step_123456789"
    for name in (
        *names,
        "step_00000020_best",
        "step_00000020.bad",
        "step_20",
        ".step_00000021.tmp",
        "xstep_00000020",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == [*names]
    assert [step_of(path) for path in checkpoints(tmp_path)] == [20, 123456789]
    assert (
        checkpoints(tmp_path / "nowhere") == []
        and latest_checkpoint(tmp_path / "nowhere", {}) is None
    )


def test_the_latest_without_damage_is_taken(tmp_path):
    one, two, three, four = (save(tmp_path, step, keep=4) for step in range(1, 5))
    (two / "trainer.json").write_text("{}")
    (three / "config.json").unlink()
    (four / "manifest.json").write_text("")
    passed_over = {}
    assert latest_checkpoint(tmp_path, passed_over) == one and [*passed_over] == [four, three, two]
    assert (
        "trainer.json is truncated" in passed_over[two]
        and "config.json is missing" in passed_over[three]
    )
    passed_over[one] = "its tensors are damaged"
    assert latest_checkpoint(tmp_path, passed_over) is None


def test_keeps_the_newest_the_best_and_what_is_not_the_runs_own(tmp_path):
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.5), (4, 7.0), (5, float("nan"))):
        save(tmp_path, step, keep=4, trainer_state={"validation_loss": loss})
        if step == 2:
            shutil.copytree(tmp_path / "step_00000002", tmp_path / "step_00000002_best")
    names = [f"step_{step:08d}" for step in range(2, 6)]
    assert steps_in(tmp_path) == sorted([*names, "step_00000002_best"])
    save(tmp_path, 10, keep=2)
    left = ["step_00000002", "step_00000002_best", "step_00000005", "step_00000010"]
    assert steps_in(tmp_path) == left
    save(tmp_path, 4, keep=1)  # a run resumed from step 2 does not delete the later steps 5 and 10
    assert steps_in(tmp_path) == sorted([*left, "step_00000004"])
    save(tmp_path, 10, Model(3), keep=1)  # replaced
    assert steps_in(tmp_path) == ["step_00000002", "step_00000002_best", "step_00000010"]
    found = load_file(tmp_path / "step_00000010" / "model.safetensors")
    assert torch.equal(found["model.norm.weight"], Model(3).norm.weight)


def test_files_have_the_mode_that_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        path = save(tmp_path, 1)
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}
        assert path.stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)


def shard(model, mesh, placements):
    for module, name in ((model.embed_tokens, "weight"), (model.norm, "weight")):
        setattr(
            module,
            name,
            nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, placements)),
        )
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
        shapes = parameters_of(dict(model.named_parameters()))
        copy_weights(model, load_model_weights(folder / "run" / "step_00000003", shapes))
        state = optimizer_state_of(model, value=-1.0)
        load_optimizer_state(folder / "run" / "step_00000003", state)
        expected = Model(1)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and parameter.placements == tuple(placements)
            assert torch.equal(parameter.full_tensor(), expected.get_parameter(name))
            moment = state[name]["exp_avg"]
            assert torch.equal(moment.full_tensor(), optimizer_state_of(expected)[name]["exp_avg"])
        assert restore_rng(folder / "run" / "step_00000003") == (world.rank < 2)
        if world.rank < 2:
            assert str(random.random()) == (folder / f"draw_{world.rank}").read_text()


def damage_in_a_group(world, folder):
    path = folder / "run" / "step_00000003"
    content = bytearray((path / "model.safetensors").read_bytes())
    dist.barrier()
    if world.rank == 0:  # damages a piece that rank 1 compares
        _, block = json.loads((path / "manifest.json").read_text())["blocks"]["model.safetensors"]
        content[-1 if block[0] == "model.norm.weight" else len(content) - 30] ^= 1
        (path / "model.safetensors").write_bytes(content)
    dist.barrier()
    with pytest.raises(UserError, match=r"model\.safetensors is corrupted"):
        verify_checkpoint(path)
    with pytest.raises(UserError, match=r"model\.safetensors is corrupted"):
        verify_weights(path)
    if world.rank == 1:
        os.pwrite = lambda *_: 1 / 0
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
        save(folder / "run", 4, shard(Model(1), world.fsdp_mesh, [Shard(0)]))
    dist.barrier()
    assert steps_in(folder / "run") == ["step_00000003"]


class TwoMatrices(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.norm = (
            nn.Linear(10, 24),
            nn.Linear(24, 10, bias=False),
            nn.RMSNorm(10),
        )
        nn.init.normal_(self.norm.weight)


def sharded_twice(world, seed):
    """Rows or columns over the tensor axis and rows over the data axis: FSDP2 behind tensor
    parallelism."""
    mesh = make_mesh("cpu", 4, 1, 2)
    model = TwoMatrices(seed)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def save_and_load_sharded_twice(world, folder):
    pieces.PIECE_BYTES = 100
    model, whole = sharded_twice(world, 1), TwoMatrices(1)
    assert len(model.up.weight.placements) == len(model.down.weight.placements) == 2
    path = save(folder, 1, model, optimizer_state={"w": weights_of(model)})
    saved = load_file(path / "optimizer.safetensors")
    for name, parameter in whole.named_parameters():
        assert torch.equal(saved[f"w.{name}"], parameter), name
    other = sharded_twice(world, 2)
    load_optimizer_state(path, {"w": weights_of(other)})
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.to_local(), model.get_parameter(name).to_local()), name
    alone = TwoMatrices(3)
    load_optimizer_state(path, {"w": weights_of(alone)})
    assert_same_state(weights_of(alone), weights_of(whole))


def test_matrices_sharded_along_two_axes(tmp_path):
    run_ranks(4, save_and_load_sharded_twice, tmp_path)


def test_saved_by_two_ranks_loaded_by_one_and_three(tmp_path):
    run_ranks(2, save_sharded, tmp_path)
    path = latest_checkpoint(tmp_path / "run", {})
    verify_checkpoint(path)
    assert {"rng_0.json", "rng_1.json"} <= json.loads((path / "manifest.json").read_text())[
        "files"
    ].keys()
    model = Model(2)
    copy_weights(model, load_model_weights(path, parameters_of(dict(model.named_parameters()))))
    assert_same_state(weights_of(model), weights_of(Model(1)))
    state = optimizer_state_of(model, value=-1.0)
    load_optimizer_state(path, state)
    assert_same_state(state, optimizer_state_of(model))
    run_ranks(3, load_sharded, tmp_path)


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


def test_leftovers_are_deleted_without_following_links_and_what_others_named_alike_stays(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (
        run / ".step_00000003.tmp",
        run / ".step_00000001.old.tmp",
        run / ".step_notes.tmp",
        elsewhere,
    ):
        folder.mkdir(parents=True)
        (folder / "mine").write_text("mine")
    (run / ".step_00000002.tmp").symlink_to(elsewhere)
    (run / ".step_00000003.tmp/link").symlink_to(elsewhere)
    clear_leftovers(run)
    assert steps_in(run) == [".step_notes.tmp"] and (elsewhere / "mine").read_text() == "mine"
    save(run, 2)
    save(run, 3)
    assert steps_in(run) == [".step_notes.tmp", "step_00000002", "step_00000003"]
