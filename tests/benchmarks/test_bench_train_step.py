"""benchmarks/bench_train_step.py runs on a CPU: its steps, clocks and table."""

import dataclasses
import itertools
import json
import math
import statistics
import sys
from unittest import mock

import pytest
import torch

from benchmarks import bench_train_step
from benchmarks.common import peer_model
from model import MODEL_SIZES
from tests.packages import needs

PACKED = ["--packed", "--steps", "4"]


@pytest.mark.parametrize("flags", [
    ["--save_to"],
    [*PACKED, "--lora", "4"],
    [*PACKED, "--in_order", "--mean_length", "9"],
    [*PACKED, "--heavy_tailed", "--linear", "fp8-all"],
])  # fmt: skip
def test_times_the_last_half_of_the_steps(flags, monkeypatch, capsys, tmp_path):
    arguments = [
        "--model_size",
        "tiny",
        "--context_length",
        "64",
        "--settings",
        "checkpointing",
        "--device",
        "cpu",
    ]
    arguments += [*flags, str(tmp_path)] if flags == ["--save_to"] else flags
    monkeypatch.setattr(sys, "argv", ["bench_train_step", *arguments])
    read = (
        bench_train_step.read_documents
    )  # 609 files; cut to a mean length of 9 they are a million documents
    monkeypatch.setattr(
        bench_train_step, "read_documents", lambda *of: itertools.islice(read(*of), 20)
    )
    bench_train_step.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["checkpointing"]
    assert result["host_process_bytes"] > 10**8 and result["host_pinned_bytes"] == 0
    assert result["host_other_bytes"] == result["host_process_bytes"]
    every = result["seconds_of_each_step"]
    assert (
        len(every)
        == len(result["losses"])
        == 2 * result["timed_steps"]
        == (4 if "--packed" in flags else 2)
    )
    assert result["seconds"] == pytest.approx(statistics.mean(every[len(every) // 2 :]), abs=0.01)
    if flags == ["--save_to"]:
        saving = result["saving"]
        assert saving["checkpoint_gb"] > 0.01 and not list(tmp_path.iterdir())
        assert len(saving["seconds_of_each_without"]) == len(saving["seconds_of_each_beside"]) == 2
        assert 0 < saving["seconds_until_read"] < saving["seconds_of_a_save"]


@pytest.mark.parametrize("packed", [False, True])
def test_splits_of_a_batch_are_one_step(packed, monkeypatch, capsys):
    """Ours and the peer's losses are the same in 1, 2 and 4 micro-batches, after each update as
    well."""
    settings = (
        "checkpointing",
        "checkpointing/2",
        "checkpointing/4",
        "peer",
        "peer+kept",
        "peer+kept/2",
    )
    words = [
        "--model_size",
        "tiny",
        "--context_length",
        "48",
        "--batch_size",
        "4",
        "--device",
        "cpu",
        "--steps",
        "4",
    ]
    words += ["--packed", "--mean_length", "30"] if packed else []
    read, make = bench_train_step.read_documents, bench_train_step.liger_loss
    monkeypatch.setattr(
        bench_train_step, "read_documents", lambda *of: itertools.islice(read(*of), 20)
    )
    monkeypatch.setattr(
        bench_train_step, "liger_loss", lambda *of: torch.manual_seed(0) and make(*of)
    )
    monkeypatch.setattr(sys, "argv", ["bench_train_step", *words, "--settings", *settings])
    bench_train_step.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    for ours, theirs in zip(settings[:3], settings[3:]):
        for name, first in ((ours, settings[0]), (theirs, settings[3])):
            result = results[name]
            assert result["losses"] == pytest.approx(results[first]["losses"], abs=0.02)
            assert result["tokens_per_second"] == pytest.approx(4 * 48 / result["seconds"])
            assert result["timed_steps"] == 2 and len(result["losses"]) == 4
    assert results["peer"]["losses"][0] != results["peer"]["losses"][2]
    monkeypatch.setattr(sys, "argv", ["bench_train_step", *words, "--settings", "peer/3"])
    with pytest.raises(SystemExit):
        bench_train_step.main()
    assert "/N after a setting must divide --batch_size" in capsys.readouterr().err


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_peer_has_as_many_parameters_as_ours(is_tied):
    config = dataclasses.replace(MODEL_SIZES["tiny"], tie_word_embeddings=is_tied)
    model = peer_model(config, torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


def test_a_step_that_runs_out_of_memory_has_no_peak(monkeypatch, capsys):
    monkeypatch.setattr(
        bench_train_step, "our_step", mock.Mock(side_effect=torch.OutOfMemoryError("full"))
    )
    words = [
        "--model_size",
        "tiny",
        "--context_length",
        "64",
        "--settings",
        "auto",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", ["bench_train_step", *words])
    bench_train_step.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["auto"]
    assert all(math.isnan(result[name]) for name in ("seconds", "peak_gib", "host_gib"))


def test_refuses_a_disk_without_room_and_seconds_of_failed_saves(monkeypatch, capsys, tmp_path):
    saver = mock.Mock(last=tmp_path / "step_00000001", output_dir=tmp_path)
    bench_train_step.check_saved(saver, 1)
    with pytest.raises(RuntimeError, match="the checkpoint of step 2 failed"):
        bench_train_step.check_saved(saver, 2)
    monkeypatch.setattr(
        bench_train_step.shutil, "disk_usage", lambda folder: mock.Mock(free=60 * 2**30)
    )
    monkeypatch.setattr(
        sys, "argv", ["bench_train_step", "--settings", "auto", "--save_to", str(tmp_path)]
    )
    with pytest.raises(SystemExit):
        bench_train_step.main()
    assert "--save_to needs 105 GiB for two checkpoints, its disk has 60" in capsys.readouterr().err


@needs("bitsandbytes", "0.50")
def test_the_peer_takes_adapters_beside_4_bits(monkeypatch, capsys):
    flags = [
        "--model_size",
        "tiny",
        "--context_length",
        "64",
        "--device",
        "cpu",
        "--lora",
        "4",
        "--lora_bits",
    ]
    read = bench_train_step.read_documents
    monkeypatch.setattr(
        bench_train_step, "read_documents", lambda *of: itertools.islice(read(*of), 20)
    )
    losses = []
    for bits in ("16", "16", "4"):
        torch.manual_seed(0)
        argv = [
            "bench_train_step",
            *flags,
            bits,
            "--settings",
            "checkpointing",
            "peer",
            "--steps",
            "3",
        ]
        monkeypatch.setattr(sys, "argv", argv)
        bench_train_step.main()
        results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        assert ("frozen matrices        4 bits" in results["checkpointing"]["plan"]) == (
            bits == "4"
        )
        losses.append(results["peer"]["losses"])
    exact, again, rounded = losses
    assert exact == again != rounded == pytest.approx(exact, rel=0.02)
    monkeypatch.setattr(sys, "argv", ["bench_train_step", *flags, "8", "--settings", "peer"])
    with pytest.raises(SystemExit):
        bench_train_step.main()
    assert "the peer takes --lora_bits 16 or 4" in capsys.readouterr().err
