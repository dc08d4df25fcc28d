"""Variants of the choice: all blocks are dense attention, scores equal a loop, a tail equals its softmax."""

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks.experiments.choices import VARIANTS, main, variant_of
from kernels.attention.attend import attention
from kernels.attention.sparse.layout import EMPTY
from model import MODEL_SIZES, Transformer
from tests.checkpoints import save_checkpoint
from tests.kernels.attention.inputs import make_qkv, segments_of
from training.families import to_config_json

LENGTHS = [(0, 0, 700), (0, 700, 840), (1, 0, 840)]
SEGMENTS = segments_of([700, 140], [840])


@pytest.fixture
def qkv():
    return make_qkv(2, 840, 6, 2, 32, torch.float32, "cpu")


def kind_of(name, blocks, window=128):
    return variant_of(name, blocks, window)


@pytest.mark.parametrize("name", VARIANTS)
def test_all_blocks_are_dense_attention(name, qkv):
    out = attention(*qkv, SEGMENTS, kind=kind_of(name, 14))
    torch.testing.assert_close(out, attention(*qkv, SEGMENTS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["max", "heads"])
def test_scores_against_a_loop(name, qkv):
    q, k, _ = qkv
    lists = kind_of(name, 3).choose(q, k, SEGMENTS, False)
    for row, start, stop in LENGTHS:
        for t in range(start, stop, 13):
            left = (t - start) // 64 - 2 + 1
            for g in range(2):
                queries = q[row, t, 3 * g : 3 * g + 3]
                queries = queries if name == "heads" else queries.mean(0, keepdim=True)
                first = {j: start + 64 * j for j in range(1, left)}
                score = {j: float((k[row, s : s + 64, g] @ queries.T).max()) for j, s in first.items()}
                best = sorted(sorted(score, key=lambda j: -score[j])[:3])
                assert lists[row, t, g].tolist() == best + [EMPTY] * (3 - len(best))


@pytest.mark.parametrize("tails", [1, 2])
def test_tail_written_out(tails, qkv):
    q, k, v = qkv
    kind = kind_of(f"max+tail{tails}", 2)
    out, lists = attention(q, k, v, SEGMENTS, kind=kind), kind.choose(q, k, SEGMENTS, False)
    t, h, part = 655, 4, 64 // tails  # token 655 is in block 10: candidates 1 to 8, two are chosen
    chosen = set(lists[1, t, h // 3].tolist())
    seen = [s for s in range(t + 1) if s // 64 in {0, 9, 10, *chosen}]
    means = [slice(64 * j + i * part, 64 * j + (i + 1) * part)
             for j in range(1, 9) if j not in chosen for i in range(tails)]  # fmt: skip
    keys, values = (
        torch.cat([x[1, seen, h // 3], torch.stack([x[1, here, h // 3].mean(0) for here in means])]) for x in (k, v)
    )
    logits = keys @ q[1, t, h] / math.sqrt(32)
    logits[len(seen) :] += math.log(part)
    assert len(means) == 6 * tails
    torch.testing.assert_close(out[1, t, h], logits.softmax(0) @ values, rtol=1e-5, atol=1e-5)


def test_the_command(tmp_path, capsys):
    torch.manual_seed(0)
    config = replace(MODEL_SIZES["tiny"], num_hidden_layers=2)
    checkpoint = save_checkpoint(
        tmp_path, 1, weights=Transformer(config).state_dict(), model_config=to_config_json(config),
        optimizer_state=None, trainer_state={"settings": {}},
    )  # fmt: skip
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(200)))
    file = tmp_path / "choices.json"
    flags = [str(checkpoint), "--data", str(tmp_path / "text.txt"), "--context_length", "600", "--sequences", "1",
             "--window", "128", "--device", "cpu"]  # fmt: skip
    assert main([*flags, "--selected_blocks", "1", "4", "--json", str(file)]) == 0
    written = json.loads(file.read_text())["variants"]
    assert len(written) == 2 * len(VARIANTS)
    assert all(sum(row["tokens"] for row in one["losses"]) == 599 for one in written)
    assert all(one["losses"][-1]["sparse"] != one["losses"][-1]["dense"] for one in written)
    assert "| heads+tail2 4 | 4 | " in capsys.readouterr().out
    assert main([*flags, "--check"]) == 0
    assert main([*flags, "--variants", "min"]) == 1
    assert "min is no variant" in capsys.readouterr().err
