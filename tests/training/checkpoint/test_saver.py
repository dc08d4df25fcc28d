"""Saving beside training: files hold the state at `begin`, whatever comes between; failures and
kills."""

import errno
import logging
import math
import os
import shutil
import sys
import time
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from kernels.parts import Parameter
from tests.checkpoints import save_checkpoint
from tests.optimizers import Layer, make_optimizer
from tests.ranks import run_ranks
from tests.training.checkpoint.test_files import (
    CONFIG,
    Model,
    optimizer_state_of,
    save,
    steps_in,
    weights_of,
)
from training.checkpoint import files, pieces, saver
from training.checkpoint.manifest import verify_checkpoint
from training.checkpoint.pieces import Piece
from training.checkpoint.saver import Saver
from training.host.errors import UserError
from training.host.files import flush
from training.parallel.fsdp import shard_model
from training.parallel.world import World


class Layers(nn.Module):
    declared: ClassVar = {}  # no parameter is exact

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(33, 33, bias=i > 0, dtype=dtype) for i in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def save_while_training(world, folder, waits, sharded=True, dtype=torch.float32, host=False):
    """Write three checkpoints, each begun ahead of a step; returns whether the files hold the state
    at `begin`."""
    model = Layers(dtype).to(world.device)
    if sharded:
        shard_model(model, model.layers, world)
    optimizer = make_optimizer(
        model.named_parameters(), accumulate=False, gpu_state_bytes=0 if host else math.inf
    )
    write, writer, equal = Piece.write, Saver(folder, keep=5), []
    patch = pytest.MonkeyPatch()
    patch.setattr(pieces, "PIECE_BYTES", 1024)
    patch.setattr(
        Piece, "write", lambda *args: (time.sleep(0.01), write(*args))
    )  # slower than a step

    def step(before_update):
        model(torch.randn(4, 33, device=world.device, dtype=dtype)).square().sum().backward()
        optimizer.clip_grad_norm(1.0)
        before_update()
        optimizer.step(0.1)

    try:
        for number in range(1, 4):
            step(writer.before_update)
            state = optimizer.state_dict()
            expected = {
                n: {k: whole(t) for k, t in tensors.items()} for n, tensors in state.items()
            }
            weights = {n: whole(p) for n, p in optimizer.parameters.items()}
            writer.begin(
                number, weights=optimizer.parameters, model_config=CONFIG, optimizer_state=state,
                trainer_state={"step": number},
            )  # fmt: skip
            step(writer.before_update if waits else lambda: None)
            writer.finish()
            found = load_file(folder / f"step_{number:08d}" / "optimizer.safetensors")
            equal += [
                torch.equal(found[f"{n}.{k}"], t)
                for n, tensors in expected.items()
                for k, t in tensors.items()
            ]
            found = load_file(folder / f"step_{number:08d}" / "model.safetensors")
            equal += [
                torch.equal(found[f"model.{n}"], t.to(found[f"model.{n}"].dtype))
                for n, t in weights.items()
            ]
    finally:
        patch.undo()
    return all(equal)


def check_ranks(world, folder):
    assert save_while_training(world, folder / "waits", True)
    assert not save_while_training(world, folder / "does not wait", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_checkpoint_holds_what_was_there_when_it_began(tmp_path, dtype, host, device):
    """It does so only if the updates wait."""
    world = World(0, 1, torch.device(device))
    assert save_while_training(world, tmp_path / "waits", True, False, dtype, host)
    assert not save_while_training(world, tmp_path / "does not wait", False, False, dtype, host)


def test_parts_of_two_ranks_are_what_was_there(tmp_path):
    run_ranks(2, check_ranks, tmp_path)


def test_shards_on_gpus_are_rounded_but_for_exact_weights(tmp_path, monkeypatch):
    """Names are Qwen3.5's, whose layers would forget at another rate."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, decay = dist.init_device_mesh("cpu", (1,)), torch.full((4,), 1 + 2**-12)
        weights = {
            name: distribute_tensor(decay, mesh)
            for name in ("norm.weight", "layers.0.linear_attn.A_log")
        }
        with monkeypatch.context() as patch:
            patch.setattr(DTensor, "is_cuda", True)
            path = save(
                tmp_path,
                1,
                weights=weights,
                optimizer_state=None,
                declared={"layers.0.linear_attn.A_log": Parameter((4,), is_exact=True)},
            )
    finally:
        dist.destroy_process_group()
    found = load_file(path / "model.safetensors")
    assert torch.equal(found["model.layers.0.linear_attn.A_log"], decay)
    assert torch.equal(found["model.norm.weight"], decay.bfloat16())


def test_nothing_is_written_that_is_not_finite(tmp_path):
    save(tmp_path, 1)
    for value in (math.nan, math.inf):
        for dtype in (torch.float32, torch.bfloat16):
            weights = {"norm.weight": torch.full((6,), value, dtype=dtype)}
            with pytest.raises(
                UserError,
                match=r"model\.norm\.weight is not finite: no checkpoint of step 2 is written",
            ):
                save(tmp_path, 2, weights=weights)
    assert steps_in(tmp_path) == ["step_00000001"]
    save(
        tmp_path, 2, weights={"norm.weight": torch.full((6,), 3e38)}
    )  # finite, though their sum is not


def test_a_signal_ends_the_attempts_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(Piece, "write", lambda *_: os.close(-1))
    monkeypatch.setattr(saver.time, "sleep", lambda seconds: asked.append(seconds))
    asked, writer = [], Saver(tmp_path, 2)
    writer.begin(
        1, weights=weights_of(Model()), model_config=CONFIG, optimizer_state=None, trainer_state={},
    )  # fmt: skip
    with pytest.raises(
        UserError,
        match=r"the last checkpoint is given up, as a signal asked: .*Bad file descriptor",
    ):
        writer.finish(lambda: len(asked) == 33)
    assert asked == [1] * 33  # a second at a time, in the second wait of 30


def test_threads_of_a_save_get_pythons_lock_soon(tmp_path, monkeypatch):
    usual, seen = sys.getswitchinterval(), []
    monkeypatch.setattr(
        saver, "flush", lambda path: (seen.append(sys.getswitchinterval()), flush(path))
    )
    save(tmp_path, 1)
    assert (
        seen == pytest.approx([saver.SWITCH_SECONDS] * len(seen))
        and seen
        and sys.getswitchinterval() == usual
    )


def free_bytes(monkeypatch, free):
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free(path))
    )


def test_room_is_made_of_old_checkpoints_but_the_last_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saver, "ATTEMPTS", 1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0)):
        save(tmp_path, step, keep=9, trainer_state={"validation_loss": loss})
    writer = Saver(tmp_path, 3, tmp_path / "step_00000003")
    state = {
        "weights": weights_of(Model()),
        "model_config": CONFIG,
        "optimizer_state": None,
        "trainer_state": {},
    }
    with monkeypatch.context() as patch:
        free_bytes(patch, lambda path: 2**26 if len(steps_in(path)) > 2 else 2**27)
        writer.begin(5, **state)
        writer.finish()
    assert steps_in(tmp_path) == [
        "step_00000003",
        "step_00000004",
        "step_00000005",
    ]  # 1 went, then 2, the best
    free_bytes(monkeypatch, lambda path: 2**26)
    writer.begin(6, **state)
    with pytest.raises(
        UserError, match=r"not be written: .*0\.06 GB are needed for checkpoints, .* has 0\.06 GB"
    ):
        writer.finish()
    assert steps_in(tmp_path) == ["step_00000005"]
    verify_checkpoint(tmp_path / "step_00000005")


def test_an_old_checkpoint_goes_once_the_new_one_is_flushed_and_in_place(tmp_path, monkeypatch):
    """Nothing of the new one is read back."""
    save(tmp_path, 1, keep=1)
    calls = []

    def recorded(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (calls.append(name), function(*args))[1])

    for module, name in (
        (saver, "flush"),
        (saver, "write_manifest"),
        (saver, "put_in_place"),
        (files, "_delete"),
    ):
        recorded(module, name)
    for name in ("read", "crc32"):
        monkeypatch.setattr(Piece, name, lambda *_: pytest.fail("the checkpoint is read back"))
    save(tmp_path, 2, keep=1)
    assert calls == ["flush", "flush", "write_manifest", "put_in_place", "_delete"]
    assert steps_in(tmp_path) == ["step_00000002"]


def test_saves_that_follow_each_other_at_once_are_all_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    write, writer, states = Piece.write, Saver(tmp_path, keep=2), [Model(seed) for seed in range(4)]
    monkeypatch.setattr(Piece, "write", lambda *args: (time.sleep(0.02), write(*args)))
    for step, model in enumerate(states, start=1):
        writer.begin(
            step, weights=weights_of(model), model_config=CONFIG,
            optimizer_state=optimizer_state_of(model),
            trainer_state={},
        )  # fmt: skip
        assert writer.last == (tmp_path / f"step_{step - 1:08d}" if step > 1 else None)
    writer.finish()
    assert steps_in(tmp_path) == ["step_00000003", "step_00000004"]
    for path, model in zip(files.checkpoints(tmp_path), states[2:]):
        verify_checkpoint(path)
        assert torch.equal(
            load_file(path / "model.safetensors")["model.norm.weight"], model.norm.weight
        )


@pytest.mark.parametrize(
    "module, victim",
    [(saver, "write_file"), (saver, "flush"), (saver, "write_manifest"), (saver, "put_in_place")],
)
def test_a_failed_save_leaves_the_earlier_one_and_is_tried_again(
    tmp_path, monkeypatch, module, victim
):
    save(tmp_path, 1)
    monkeypatch.setattr(saver, "SECONDS_BETWEEN", 0)
    attempts, function = [], getattr(module, victim)

    def fail(*args, **kwargs):
        attempts.append(steps_in(tmp_path))
        if len(attempts) < 3:
            raise OSError("disk on fire")
        return function(*args, **kwargs)

    monkeypatch.setattr(module, victim, fail)
    save(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == ["step_00000002"] and all(
        "step_00000001" in names for names in attempts[:3]
    )


def test_a_disk_that_refuses_for_good(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(saver, "SECONDS_BETWEEN", 0)
    attempts = []
    monkeypatch.setattr(Piece, "write", lambda *_: attempts.append(1) or os.close(-1))
    with pytest.raises(
        UserError, match=r"the last checkpoint could not be written: .*Bad file descriptor"
    ):
        save(tmp_path, 2)
    assert len(attempts) >= saver.ATTEMPTS and steps_in(tmp_path) == ["step_00000001"]


def test_a_limit_on_the_size_of_files_is_not_waited_for(tmp_path, monkeypatch):
    """Tries once: time makes no room, as it may on a disk."""
    attempts = []

    def refuse(*_):
        attempts.append(1)
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(saver, "write_file", refuse)
    with pytest.raises(
        UserError, match=r"the last checkpoint could not be written: .*File too large"
    ):
        save(tmp_path, 1)
    assert len(attempts) == 1


def test_an_old_checkpoint_that_cannot_be_deleted_ends_nothing(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(path, *_, **__):
        raise PermissionError(f"not {path}")

    monkeypatch.setattr(files.shutil, "rmtree", refuse)
    save(tmp_path, 3, keep=1)
    assert "is a leftover and cannot be deleted" in caplog.text
    assert [name for name in steps_in(tmp_path) if name.startswith("step_")] == ["step_00000003"]


OPERATIONS = "mkdir", "pwrite", "fsync", "rename", "rmtree"


def save_and_die(world, output_dir, operation):
    def die(*args, **kwargs):
        os.kill(os.getpid(), 9)

    for owner in (os, shutil):
        if hasattr(owner, operation):
            setattr(owner, operation, die)
    save(output_dir, 2, keep=1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_save_is_no_checkpoint(tmp_path, operation):
    save(tmp_path, 1, keep=1)
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(1, save_and_die, tmp_path, operation)
    latest = files.latest_checkpoint(tmp_path, {})
    assert latest.name == f"step_{2 if operation == 'rmtree' else 1:08d}"
    verify_checkpoint(latest)
    save(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == ["step_00000003"]


def save_all_on_two_ranks(world, output_dir):
    """A rank whose disk fails does not leave the other one waiting."""
    if world.rank == 1:
        Piece.write = lambda *_: os.close(-1)
    saver.ATTEMPTS = 1
    with pytest.raises(UserError, match=r"Bad file descriptor"):
        save_checkpoint(
            output_dir, 1, weights=weights_of(shard(world)), model_config=CONFIG,
            optimizer_state=optimizer_state_of(Model()), trainer_state={},
        )  # fmt: skip
    dist.barrier()  # rank 0 has cleared what was left
    assert steps_in(output_dir) == []


def shard(world):
    model = Layers()
    shard_model(model, model.layers, world)
    return model


def test_a_disk_that_fails_on_one_rank_fails_on_all(tmp_path):
    run_ranks(2, save_all_on_two_ranks, tmp_path)
