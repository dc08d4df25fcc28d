"""The probe equals attention with its matrix written out; the command runs on a small checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.experiments import sparsity as probe_module
from benchmarks.experiments.sparsity import (
    Captured,
    choose_blocks,
    load_batches,
    load_model,
    main,
    parse_flags,
    probe,
    probe_model,
    spread_queries,
)
from kernels.attention.sparse.layout import EMPTY, make_layout
from kernels.attention.sparse.sparse_attention import Sparse
from model import MODEL_SIZES, Transformer
from tests.checkpoints import save_checkpoint
from tests.kernels.attention.inputs import all_blocks, make_qkv, segments_of
from training.families import to_config_json

KIND = Sparse(2, block_size=32, window=64)
SEGMENTS, LENGTHS = segments_of([300, 17], [317]), [(0, 0, 300), (0, 300, 317), (1, 0, 317)]


@pytest.fixture
def qk():
    return make_qkv(2, 317, 6, 2, 32, torch.float32, "cpu")[:2]


def probed(q, k, lists):
    targets = torch.zeros(2, 317, dtype=torch.long)
    targets[1, 250:] = -100
    queries = spread_queries(make_layout(q, SEGMENTS, KIND.block_size, KIND.window), targets, 2, 50)
    assert queries.max() < 317 + 250
    captured = Captured(q.shape[2])
    probe(q, k, lists, SEGMENTS, queries, KIND, captured)
    return queries, captured


def test_against_written_out_masses(qk, monkeypatch):
    q, k = qk
    lists = Sparse(2, 32, 64, dense_below=0).choose(q, k, SEGMENTS, False)
    queries, captured = probed(q, k, lists)
    assert 40 <= len(queries) <= 50 and captured.queries == len(queries)
    visible, best, recall = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64), 0.0
    for token in queries.tolist():
        row, t = divmod(token, 317)
        [start] = [a for r, a, b in LENGTHS if r == row and a <= t < b]
        own = (t - start) // 32
        candidates = range(1, own - 1)
        assert len(candidates) > 2
        for g in range(2):
            heads = slice(3 * g, 3 * g + 3)
            scores = q[row, t, heads].double() @ k[row, start : t + 1, g].double().T / 32**0.5
            masses = torch.stack([part.sum(-1) for part in scores.softmax(-1).split(32, dim=-1)], dim=-1)  # [3, blocks]
            band = masses[:, 0] + masses[:, own - 1 :].sum(-1)
            chosen = {block for block in lists[row, t, g].tolist() if block in candidates}
            oracle = set(sorted(candidates, key=lambda block: -masses[:, block].sum())[:2])
            visible[heads] += band + masses[:, sorted(chosen)].sum(-1)
            best[heads] += band + masses[:, sorted(oracle)].sum(-1)
            recall += len(chosen & oracle) / 2 / 2
    torch.testing.assert_close(captured.visible, visible, rtol=1e-5, atol=0)
    torch.testing.assert_close(captured.best, best, rtol=1e-5, atol=0)
    assert captured.recall == pytest.approx(recall) and 0.3 < recall / len(queries) < 1
    shares = captured.shares()
    assert shares["worst"] == pytest.approx(float(visible.min()) / len(queries))
    assert shares["worst"] < shares["captured"] < shares["best"] < 1
    monkeypatch.setattr(probe_module, "MASSES_BYTES", 4 * 3 * 300 * 7)  # seven queries at a time
    torch.testing.assert_close(probed(q, k, lists)[1].visible, captured.visible, rtol=1e-6, atol=0)


def test_all_blocks_capture_everything(qk):
    q, k = qk
    shares = probed(q, k, all_blocks(q, 2, SEGMENTS, 32, 64))[1].shares()
    assert shares["captured"] == pytest.approx(1, abs=1e-6) and shares["recall"] == 1


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    config = replace(MODEL_SIZES["tiny"], num_hidden_layers=2)
    state = {"settings": {"selected_blocks": "2,1"}}
    return str(save_checkpoint(
        tmp_path, 1, weights=Transformer(config).state_dict(), model_config=to_config_json(config),
        optimizer_state=None, trainer_state=state,
    ))  # fmt: skip


def run(tmp_path, *flags):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(200)))
    fixed = "--data", str(tmp_path / "text.txt"), "--json", str(tmp_path / "probe.json"), "--device", "cpu"
    return main([*fixed, "--sequences", "1", "--queries", "20", *flags])


def test_the_command(checkpoint, tmp_path, capsys):
    assert run(tmp_path, checkpoint, "--context_length", "900") == 0
    written = json.loads((tmp_path / "probe.json").read_text())
    assert [row["layer"] for row in written["layers"]] == [0, 1] and written["queries"] == 20
    assert all(0.3 < row["captured"] <= row["best"] < 1 for row in written["layers"])
    assert [row["first"] for row in written["losses"]] == [0, 64, 128, 256, 512]
    assert [row["last"] for row in written["losses"]] == [63, 127, 255, 511, 1023]
    assert sum(row["tokens"] for row in written["losses"]) == 899
    *short, long = written["losses"]
    assert all(row["sparse"] == pytest.approx(row["dense"], rel=1e-6) for row in short)
    assert long["sparse"] != long["dense"]
    out = capsys.readouterr().out
    assert "512 to 1,023" in out and f"{written['layers'][1]['captured']:.4f}" in out


def test_some_layers_and_another_choice(checkpoint, tmp_path):
    """Layer 1 chooses, layer 0 attends to everything; no choice captures less and recalls nothing."""
    flags = "--context_length", "900", "--layers", "1", "--selected_blocks", "1"
    assert run(tmp_path, checkpoint, *flags) == 0
    [row] = json.loads((tmp_path / "probe.json").read_text())["layers"]
    model = load_model(Path(checkpoint), torch.device("cpu"))
    parsed = parse_flags([checkpoint, *flags, "--sequences", "1", "--data", str(tmp_path / "text.txt")])
    batches = load_batches(parsed, Path(checkpoint), 256)
    captured = {1: Captured(4)}
    none = lambda *arguments: choose_blocks(*arguments).fill_(EMPTY)  # noqa: E731
    probe_model(model, batches[0], [None, Sparse(1, dense_below=1)], 20, captured, none)
    without = captured[1].shares()
    assert row["layer"] == 1 and row["recall"] > without["recall"] == 0
    assert without["captured"] < row["captured"] and without["best"] == pytest.approx(row["best"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "of 704 a token sees all with 2 chosen blocks; give longer"),
        (["--selected_blocks", "many"], "selected_blocks must be a number"),
        (["--layers", "2"], "layers must be from 0 to 1, got 2"),
        (["--queries", "0"], "queries must be at least 1, got 0"),
        (["--tokenizer", "no/such.json"], "no/such.json"),
        (["--querys", "1"], "unrecognized arguments: --querys 1"),
        (["--json", "."], "--json .: give a file in a folder that is there"),
    ],
)
def test_bad_input_is_one_line(flags, message, checkpoint, tmp_path, capsys):
    assert run(tmp_path, checkpoint, "--context_length", "640", *flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
