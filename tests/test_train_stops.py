"""Runs that are stopped, fail or hang: their messages, their checkpoints and their exit status."""

import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

import train
from model import MODEL_SIZES
from tests.ranks import run_ranks
from tests.runs import ROOT, arguments, losses, metrics, only_resume, weights
from training.checkpoint import files
from training.checkpoint.pieces import Piece
from training.data import __main__ as data_command
from training.host.errors import UserError
from training.optim.adamw import MasterAdamW
from training.parallel.world import World
from training.run import running, stopping, train_step
from training.run.decide import decide, decide_launch, recipe_of
from training.run.schedule import Progress
from training.run.settings import TrainConfig, given_settings
from training.run.stopping import LOOKS_BEHIND, Stopping, promise_shutdown


def start_training(*argv, ranks=1):
    """A run in processes of its own, once it has made its first step."""
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks > 1
        else []
    )
    process = subprocess.Popen(
        [sys.executable, *torchrun, "train.py", *argv], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    file = Path(argv[argv.index("--output_dir") + 1]) / "metrics.jsonl"
    deadline = time.time() + 120
    while (
        time.time() < deadline
        and process.poll() is None
        and not (file.exists() and file.read_text())
    ):
        time.sleep(0.1)
    return process


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_saves_and_the_exit_status_says_unfinished(number, ranks, corpus, tmp_path):
    """torchrun gets the signal, hands it on, and ends with a status of its own."""
    run = tmp_path / "run"
    process = start_training(*arguments(corpus, run, steps=100_000), ranks=ranks)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number if ranks == 1 else process.returncode != 0, output
    last = metrics(run)[-1]["step"]
    assert f"{number.name}: stopped after step {last} of 100000" in output.splitlines()
    python = "python" if ranks == 1 else f"torchrun --nproc_per_node={ranks}"
    goes_on = re.search(
        rf"^to go on: \S*{python}\S* train.py --resume (--.*)$", output, re.MULTILINE
    )
    assert goes_on and f"--output_dir {run}" in goes_on[1], output
    assert [path.name for path in run.glob("*step_*")] == [f"step_{last:08d}"]
    assert train.main([*only_resume(run), "--max_steps", f"{last + 1}"]) == 0


def signalled_at(look, monkeypatch):
    """Makes all steps but a run's first count as long, and sends this process SIGUSR1 at that look
    between blocks."""
    looks, look_between = [], Stopping._look

    def signalled(self):
        looks.append(1)
        if len(looks) == look:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not self.received:  # a thread takes note
                time.sleep(0.001)
        look_between(self)

    monkeypatch.setattr(stopping, "LONG_STEP_SECONDS", 0.0)
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Stopping, "_look", signalled)
    return looks


def test_a_signal_between_blocks_drops_the_step(corpus, tmp_path, monkeypatch):
    """Signals come in the third step: in a forward, and in the backward of a later micro-batch.
    Then the run goes on.

    Four blocks have eight looks in a micro-batch.
    """
    whole = tmp_path / "whole"
    flags = "--gradient_accumulation_steps", "3", "--validation_sequences", "0"
    assert train.main(arguments(corpus, whole, *flags)) == 0
    for look in (2, 8 + 6):
        parts = tmp_path / f"{look}"
        with monkeypatch.context() as patch:
            looks = signalled_at(3 * 8 + look, patch)
            assert train.main(arguments(corpus, parts, *flags)) == 128 + signal.SIGUSR1
        assert len(looks) == 3 * 8 + look + LOOKS_BEHIND and [
            line["step"] for line in metrics(parts)
        ] == [1, 2]
        assert train.main(arguments(corpus, parts, *flags, "--resume", "auto")) == 0
        assert losses(parts) == losses(whole)
        for name, tensor in weights(whole, 4).items():
            assert torch.equal(tensor, weights(parts, 4)[name]), name
    assert (
        train.main(arguments(corpus, parts, *flags, "--resume", "auto")) == 0
    )  # finished: nothing is left to do


@pytest.mark.parametrize(("interval", "last"), [("2", 2), ("0", 4)])
def test_a_signal_in_validation_leaves_it_to_the_resumed_run(
    interval, last, corpus, tmp_path, monkeypatch, caplog
):
    """The checkpoint gets the loss, after the last step, too; nothing is left to do then."""
    is_asked = Stopping.is_asked

    def once_noted(self):
        while not self.received:  # a thread takes note
            time.sleep(0.001)
        return is_asked(self)

    def signalled(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        return iter([1])

    run, whole = tmp_path / "run", tmp_path / "whole"
    command = arguments(corpus, run, "--validation_interval", interval)
    assert train.main(arguments(corpus, whole, "--validation_interval", interval)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "is_asked", once_noted)
        patch.setattr(train, "validation_batches", signalled)
        assert train.main(command) == 128 + signal.SIGTERM
        assert len(metrics(run)) == last and "validation_loss" not in metrics(run)[-1]
        assert [path.name for path in run.glob("*step_*")] == [f"step_0000000{last}"]
        assert (
            caplog.messages[-1]
            == f"the validation of step {last} is cut short; --resume makes up for it"
        )
        assert train.main([*command, "--resume", "auto"]) == 128 + signal.SIGTERM  # and again
    assert train.main([*command, "--resume", "auto"]) == 0
    assert validation_losses(run) == validation_losses(whole)
    caplog.set_level(logging.INFO)
    assert train.main([*command, "--resume", "auto"]) == 0
    assert (
        f"{run}/step_00000004 is of the last of 4 steps: nothing is left to do" in caplog.messages
    )
    saved = [
        json.loads((each / "step_00000004" / "trainer.json").read_text()) for each in (run, whole)
    ]
    assert (
        saved[0]["trainer_state"]["validation_loss"] == saved[1]["trainer_state"]["validation_loss"]
    )


def validation_losses(run):
    return {
        line["step"]: line["validation_loss"] for line in metrics(run) if "validation_loss" in line
    }


def test_an_error_in_validation_saves_the_step_before_it(corpus, tmp_path, monkeypatch, caplog):
    """The resumed run makes up for the validation, and ends as a run without the error."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    flags = "--validation_interval", "2"
    assert train.main(arguments(corpus, whole, *flags)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(train, "validate", mock.Mock(side_effect=RuntimeError("a damaged kernel")))
        with pytest.raises(RuntimeError, match="a damaged kernel"):
            caplog.set_level(logging.INFO)
            train.main(arguments(corpus, run, *flags))
    assert f"train.py --resume --output_dir {run} --device cpu" in caplog.text
    assert [line["step"] for line in metrics(run)] == [1, 2]
    assert [path.name for path in run.glob("*step_*")] == ["step_00000002"]
    assert train.main(arguments(corpus, run, *flags, "--resume", "auto")) == 0
    assert validation_losses(run) == validation_losses(whole)
    for name, tensor in weights(whole, 4).items():
        assert torch.equal(tensor, weights(run, 4)[name]), name


def cut_short_at(step, file, monkeypatch):
    """Cuts off the second half of a file once a run begins to train that step."""
    calls, train_step = [], train.train_step

    def cutting(*args):
        calls.append(1)
        if len(calls) == step - 2:  # the batches of two steps have been read by now
            os.truncate(file, 4)
        return train_step(*args)

    monkeypatch.setattr(train, "train_step", cutting)


def test_data_cut_short_under_a_run_lose_no_step(corpus, tmp_path, monkeypatch, capsys):
    prepared, run = tmp_path / "prepared", tmp_path / "run"
    assert data_command.main(["prepare", corpus, str(prepared), "--tokenizer", "bytes"]) == 0
    [file] = prepared.glob("*.tokens")
    cut_short_at(4, file, monkeypatch)
    assert train.main(arguments(str(prepared), run, "--validation_sequences", "0", steps=9)) == 1
    assert "is cut short or damaged" in capsys.readouterr().err
    last = metrics(run)[-1]["step"]
    assert last < 9 and [path.name for path in run.glob("*step_*")] == [f"step_0000000{last}"]


def test_an_update_that_fails_half_way_is_not_saved(corpus, tmp_path, monkeypatch):
    step_of, calls = MasterAdamW.step, []

    def failing(self, rate):
        calls.append(1)
        step_of(self, rate)
        if len(calls) == 3:
            raise RuntimeError("half way")

    monkeypatch.setattr(MasterAdamW, "step", failing)
    with pytest.raises(RuntimeError, match="half way"):
        train.main(arguments(corpus, tmp_path, "--checkpoint_interval", "2"))
    assert [path.name for path in tmp_path.glob("*step_*")] == ["step_00000002"]


def one_rank_cannot_read_held_out_text(world, corpus, folder):
    make_batches = train.validation_batches

    def failing(*args, **options):
        yield next(make_batches(*args, **options))
        if world.rank == 1:
            raise UserError("a part of the data is damaged")
        yield next(make_batches(*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "validation_batches", failing)
        with pytest.raises(UserError, match="a part of the data is damaged"):
            run_in_rank(world, corpus, folder, "--validation_interval", "3")


def one_rank_cannot_read(world, corpus, folder):
    next_step, calls = train.PackedLoader.next_step, []

    def failing(self, micro_batches):
        calls.append(1)
        if len(calls) == 3 and world.rank == 1:
            raise UserError("a part of the data is damaged")
        return next_step(self, micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.PackedLoader, "next_step", failing)
        message = (
            "a part of the data is damaged"
            if world.rank
            else "rank 1 failed: UserError: a part of the data"
        )
        with pytest.raises(UserError, match=f"^{message}"):
            run_in_rank(world, corpus, folder, "--validation_sequences", "0")


@pytest.mark.parametrize(
    ("fails", "last"), [(one_rank_cannot_read, 2), (one_rank_cannot_read_held_out_text, 3)]
)
def test_data_that_one_rank_cannot_read_lose_no_step(fails, last, corpus, tmp_path):
    run_ranks(2, fails, corpus, tmp_path)
    assert [path.name for path in tmp_path.glob("*step_*")] == [f"step_0000000{last}"]


def test_a_signal_ends_the_sample(corpus, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Stopping, "is_asked", lambda self: True)
    flags = "--sample_tokens", "99", "--validation_sequences", "0"
    assert train.main(arguments(corpus, tmp_path / "run", *flags)) == 0
    [sample] = [message for message in caplog.messages if message.startswith("sample")]
    assert len(sample.split("<<<the prompt ends here>>>")[1]) == 1


class Unread:
    """A pipe whose reader is gone."""

    def write(self, text=""):
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


def test_a_run_outlives_who_reads_its_output(corpus, tmp_path, monkeypatch):
    for number, streams in enumerate([(Unread(), Unread()), (None, None)]):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            assert train.main(arguments(corpus, tmp_path / f"{number}")) == 0
            assert train.main(["--batch_size", "0"]) == 1
        assert [path.name for path in (tmp_path / f"{number}").glob("*step_*")] == ["step_00000004"]


def not_finite_in(steps, monkeypatch):
    """Makes the loss of these calls, counted from 1, NaN."""
    run_model, calls = train_step.run_model, []

    def failing(*args):
        calls.append(1)
        return run_model(*args) * (math.nan if len(calls) in steps else 1.0)

    monkeypatch.setattr(train_step, "run_model", failing)


def test_a_loss_that_is_not_finite_saves_what_was_before(corpus, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        not_finite_in({3}, patch)
        assert train.main(arguments(corpus, run, "--validation_sequences", "0")) == 1
    error = capsys.readouterr().err
    assert "step 3: loss nan, gradient norm nan, stopped before the update" in error
    assert (
        f"the last good checkpoint: {run}/step_00000002. Go on" in error
        and f"documents of the step: {corpus}" in error
    )
    assert train.main(arguments(corpus, run, "--resume")) == 0
    assert train.main(arguments(corpus, tmp_path / "whole")) == 0
    assert losses(run) == losses(tmp_path / "whole")


def test_steps_without_a_target_leave_the_weights_alone(tmp_path, caplog):
    """Each step has one sequence, in the middle of a prompt of 1,000 tokens."""
    file = tmp_path / "samples.jsonl"
    file.write_text((json.dumps({"prompt": "a" * 1000, "completion": "bcd"}) + "\n") * 4)
    command = arguments(
        str(file), tmp_path / "run", "--batch_size", "1", "--validation_sequences", "0", steps=40
    )
    assert train.main([*command, "--packing", "concatenate"]) == 0
    found = losses(tmp_path / "run")
    assert 30 <= found.count(None) < 40 and 0.0 not in found
    assert caplog.text.count(
        "has no token to predict, as in the middle of a prompt"
    ) == found.count(None)


def test_steps_that_are_not_finite_are_left_out_when_told(corpus, tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    not_finite_in({2, 4}, monkeypatch)
    command = arguments(corpus, run, "--skip_nonfinite_steps", "1", "--validation_sequences", "0")
    assert train.main(command) == 1
    assert [line["loss"] is None for line in metrics(run)] == [False, True, False]
    assert [path.name for path in run.glob("*step_*")] == ["step_00000003"]
    assert f"step 2: loss nan, gradient norm nan, left out; documents: {corpus}" in caplog.text
    monkeypatch.undo()
    not_finite_in({1}, monkeypatch)
    assert train.main([*command, "--resume", "auto"]) == 1  # the run has left out as many as it may


def test_resume_auto_starts_goes_on_and_passes_damage_over(corpus, tmp_path, caplog):
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train.main(arguments(corpus, whole, steps=6)) == 0
    command = arguments(corpus, run, "--resume", "auto", "--checkpoint_interval", "2", steps=6)
    assert train.main([*command, "--keep_checkpoints", "3"]) == 0
    damaged = run / "step_00000006" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 4
    damaged.write_bytes(content)
    (run / "step_00000004" / "config.json").unlink()
    (run / "step_00000020.bad").mkdir()
    caplog.clear()
    assert train.main(command) == 0
    passed_over = [message for message in caplog.messages if message.startswith("passed over")]
    assert len(passed_over) == 2 and "config.json is missing" in passed_over[0] + passed_over[1]
    assert any(
        f"{run}/step_00000006: " in message and "optimizer.safetensors" in message
        for message in passed_over
    )
    assert losses(run) == losses(whole)


def test_checkpoints_without_optimizer_state_say_how_to_go_on(corpus, tmp_path, capsys):
    """A run is refused with and without --resume; what a killed save left there is cleared all the
    same."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, "--save", "model", steps=1)) == 0
    (run / ".step_00000009.tmp").mkdir()
    advice = (
        "it has no optimizer state; another --output_dir starts afresh, with --init_from "
        f"{run}/step_0000000"
    )
    for flags in ((), ("--resume",)):
        assert train.main(arguments(corpus, run, *flags, steps=2)) == 1
        error = capsys.readouterr().err
        assert f"{advice}1 from its weights\n" in error and "--resume goes on" not in error
    assert not [*run.glob(".step*")]
    shutil.rmtree(run)
    assert train.main(arguments(corpus, run, steps=1)) == 0
    assert train.main(arguments(corpus, run, "--resume", "--save", "model", steps=2)) == 0
    assert train.main([*only_resume(run), "--max_steps", "3"]) == 1
    error = capsys.readouterr().err
    assert (
        f"{advice}2 from its weights; once it is moved elsewhere, --resume goes on from "
        f"{run}/step_00000001" in error
    )


def test_checkpoints_by_the_clock(corpus, tmp_path):
    run = tmp_path / "run"
    flags = (
        "--checkpoint_interval",
        "0.000001min",
        "--keep_checkpoints",
        "9",
        "--validation_sequences",
        "0",
    )
    assert train.main(arguments(corpus, run, *flags)) == 0
    assert len([*run.glob("step_*")]) == 4


def test_room_on_the_disk_is_looked_at_first(corpus, tmp_path, monkeypatch, capsys, caplog):
    run, free = tmp_path / "run", 2**30
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free)
    )
    monkeypatch.setattr(
        "training.data.decide.load_corpus", lambda *_, **__: pytest.fail("the data were read")
    )
    command = arguments(corpus, run, "--model_size", "0.6B", "--checkpoint_interval", "2")
    assert train.main(command) == 1
    assert (
        f"GB are needed for checkpoints, {run} has 1.00 GB; free some space"
        in capsys.readouterr().err
    )
    monkeypatch.undo()
    (run / "step_00000009").mkdir()  # nobody deletes a later step's checkpoint to make room
    (run / "step_00000009" / "model.safetensors").write_bytes(bytes(2000))
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1500)
    )
    world = World(0, 1, torch.device("cpu"))
    recipe = recipe_of(TrainConfig(output_dir=str(run), save="model"), MODEL_SIZES["tiny"], world)
    with pytest.raises(UserError, match=r"free some space, choose another --output_dir$"):
        running.check_disk(recipe.saving, Progress(max_steps=8, step=4), True, 1000)
    shutil.rmtree(run)
    free = 2 * running.checkpoint_bytes(recipe_of(TrainConfig(), MODEL_SIZES["tiny"], world), world)
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free)
    )
    assert train.main(arguments(corpus, run, "--checkpoint_interval", "1")) == 0
    assert "old checkpoints will be deleted before new ones are complete" in caplog.text


def test_a_save_that_fails_does_not_end_the_run(corpus, tmp_path, monkeypatch, caplog):
    """The next save is complete, and leaves nothing of the failed one."""
    run, write = tmp_path / "run", Piece.write
    monkeypatch.setattr(running, "RETRY_SECONDS", 0)

    def no_room(piece, *args):
        if not caplog.messages:
            raise OSError(28, "No space left on device")
        write(piece, *args)

    monkeypatch.setattr(Piece, "write", no_room)
    assert train.main(arguments(corpus, run, "--checkpoint_interval", "3", steps=8)) == 0
    assert "the checkpoint of step 3 failed: [Errno 28] No space left on device" in caplog.messages
    assert sorted(path.name for path in run.glob("*step_*"))[-1] == "step_00000008"


def test_ranks_go_on_from_one_checkpoint(corpus, tmp_path):
    given, world = {"data": [corpus], "output_dir": str(tmp_path)}, mock.Mock(rank=1)
    world.broadcast = lambda ours: dict.fromkeys(ours, "step_00000004")
    with pytest.raises(
        UserError, match="to go on from is None on rank 1 and step_00000004 on rank 0; start all"
    ):
        decide(given, world)


def run_in_rank(world, corpus, run, *flags):
    return train.train(decide_launch(given_settings(arguments(corpus, run, *flags))), world)


def stop_one_rank_and_start_unlike_ranks(world, corpus, folder):
    flags = "--validation_sequences", "0"
    assert run_in_rank(world, corpus, folder / "whole", *flags) == 0
    with pytest.MonkeyPatch.context() as patch:
        looks = signalled_at(8 + 6 if world.rank == 1 else 0, patch)
        assert run_in_rank(world, corpus, folder / "parts", *flags) == 128 + signal.SIGUSR1
    assert len(looks) == 8 + 6 + LOOKS_BEHIND
    with pytest.raises(UserError, match="own of rank 1 is not the folder that rank 0 writes to"):
        run_in_rank(world, corpus, folder / f"{world.rank}" / "own")
    assert run_in_rank(world, corpus, folder / "parts", *flags, "--resume", "auto") == 0
    try:
        run_in_rank(world, corpus, folder / "unlike", "--seed", str(world.rank))
    except UserError as error:
        (folder / "error.txt").write_text(str(error))
        raise


def test_ranks_stop_together_and_refuse_other_settings(corpus, tmp_path):
    """The second rank alone gets the signal, in the backward of the third step."""
    with pytest.raises(ProcessExitedException):
        run_ranks(2, stop_one_rank_and_start_unlike_ranks, corpus, tmp_path)
    assert (
        tmp_path / "error.txt"
    ).read_text() == "seed is 1 on rank 1 and 0 on rank 0; start all ranks alike"
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "whole", 4).items():
        assert torch.equal(tensor, weights(tmp_path / "parts", 4)[name]), name


def test_a_hang_shows_where_it_is_and_a_spike_is_told(corpus, tmp_path, monkeypatch, capfd, caplog):
    run_model = train_step.run_model

    def slow(*args):
        time.sleep(0.5)
        return run_model(*args)

    monkeypatch.setattr(stopping, "HANG_SECONDS", 0.2)
    monkeypatch.setattr(train_step, "run_model", slow)
    monkeypatch.setattr(train, "is_spike", lambda loss, recent: len(recent) == 1)
    assert (
        train.main(arguments(corpus, tmp_path / "run", "--validation_sequences", "0", steps=2)) == 0
    )
    error = capfd.readouterr().err
    assert (
        "nothing has ended for 0 s" in error
        and "in slow\n" in error
        and "thread MainThread" in error
    )
    assert any(
        re.match(r"step 2: loss \d\.\d+ is a spike above", message) for message in caplog.messages
    )


def test_the_time_that_a_shutdown_takes_is_promised_and_torchruns_patience_compared(
    monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    for name in ("TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    promise = (
        "SIGTERM, SIGINT, SIGHUP and SIGUSR1 save and exit within about 40 s, later on a busy "
        "machine"
    )
    promise_shutdown(20, 10)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    promise_shutdown(4, 10)
    assert caplog.messages == [promise, promise.replace("40", "24")]
    from torch.distributed.launcher.api import LaunchConfig

    caplog.clear()
    monkeypatch.setattr(LaunchConfig, "shutdown_timeout", None, raising=False)
    promise_shutdown(20, 10)
    assert caplog.messages == [
        promise, "torchrun kills after 30 s: start it with --shutdown-timeout 100, unless you did"
    ]  # fmt: skip
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    promise_shutdown(20, 10)
    assert caplog.messages[2:] == [promise]
    monkeypatch.delattr(LaunchConfig, "shutdown_timeout")
    promise_shutdown(20, 10)  # a torch without the flag has no use for the variable
    assert caplog.messages[-1].startswith("torchrun kills after 30 s, and torch")
