"""benchmarks/bench_optimizer.py runs on a CPU: its bytes, clocks and JSON."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import bench_optimizer
from model import MODEL_SIZES, Transformer
from training.optim.inventory import Inventory


def test_times_pieces_and_a_model(monkeypatch, capsys, tmp_path):
    out, seconds = tmp_path / "out.jsonl", 0.0
    flags = f"--device cpu --model_size tiny --num_layers 1 --repeats 1 --pieces 3 --out {out}"
    monkeypatch.setattr(sys, "argv", ["bench_optimizer", *flags.split()])
    monkeypatch.setattr(bench_optimizer, "PIECE_ELEMENTS", 2**12)
    bench_optimizer.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert out.read_text() == line + "\n"
    result = json.loads(line)
    assert result["num_weights"] == 3 * 2**12
    bytes_per_weight = {name: row["bytes_per_weight"] for name, row in result["pieces"].items()}
    assert bytes_per_weight == {"float32": 28, "compact": 14.25, "torch, float32 weights": 28}
    with torch.device("meta"):
        shape = replace(MODEL_SIZES["tiny"], num_hidden_layers=1)
        parameters = list(Transformer(shape).to(torch.bfloat16).named_parameters())
    for name, row in result["model"].items():
        state_format, place = name.split(", ")
        assert row["seconds"] > 0 and (row["pinning_seconds"] > 0) == (place == "host")
        seconds = row["seconds"] if state_format == "float32" else seconds
        assert row["of_float32"] == pytest.approx(row["seconds"] / seconds)
        predicted = Inventory.of(
            parameters, accumulate=False, gpu_state_bytes=bench_optimizer.PLACES[place],
            state_format=state_format,
        )  # fmt: skip
        assert row["pinned_gib"] * 2**30 == pytest.approx(predicted.host)
