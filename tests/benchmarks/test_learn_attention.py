"""Rows of learn_attention are as its docstring says; kinds of attention train and are compared."""

import json
import sys
from argparse import Namespace

import numpy as np
import pytest

from benchmarks.experiments import learn_attention
from benchmarks.experiments.learn_attention import ANSWER, LINE_BYTES, NAMES, doubling, weave
from model import IGNORE_INDEX

TEXT = np.frombuffer(b"def f(x):\n    return x\n" * 100, dtype=np.uint8)
ROWS = Namespace(context_length=512, batch_size=3, facts=10, block_size=32, seed=0)


@pytest.mark.parametrize("facts", [10, 26])  # a row takes at most 26
def test_a_question_is_the_last_place_but_one_of_its_name(facts):
    settings = Namespace(**{**vars(ROWS), "facts": facts})
    rows = weave(TEXT, settings, (0, 1))
    ids, targets = rows.batch.input_ids.numpy(), rows.batch.targets.numpy()
    for row, target, questions, distances in zip(ids, targets, rows.questions.tolist(), rows.distances.tolist()):
        for question, distance in zip(questions, distances):
            assert np.flatnonzero(row == row[question]).tolist() == [question - distance, question]
            letters = ANSWER.stop - ANSWER.start
            asked, defined = row[question + 1 :][:letters], row[question - distance + 1 :][:letters]
            assert asked.tolist() == defined.tolist() == target[question:][:letters].tolist()
            assert question - distance > settings.block_size
            assert row[[question - 1, question - distance - 1]].tolist() == [ord("?"), ord("=")]
            assert set(target[question - distance - 2 :][: LINE_BYTES - 1]) == {IGNORE_INDEX}
        assert np.isin(row, NAMES).sum() == 2 * facts
    is_text = rows.is_text.numpy()
    assert (targets[is_text] == ids[:, 1:][is_text[:, :-1]]).all() and not np.isin(targets[is_text], NAMES).any()
    assert is_text.sum() + rows.questions.numel() * letters == rows.batch.num_valid_tokens


def test_rows_depend_on_seed_and_number_alone():
    first, again, other = (weave(TEXT, ROWS, (0, step)).batch.input_ids for step in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_buckets_double():
    assert doubling(64, 300) == [0, 64, 128, 256, 300] and doubling(64, 256) == [0, 64, 128, 256]


def test_kinds_train_on_the_same_rows_and_are_compared(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    texts, out, picture = (tmp_path / name for name in ("texts", "out.jsonl", "picture.png"))
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.txt").write_bytes(TEXT.tobytes())
    sizes = "--model micro --device cpu --context_length 128 --batch_size 2 --window 32 --block_size 32 --facts 4"
    for kind in ("full", "sparse", "window", "full --linear fp8"):
        flags = f"{sizes} --selected_blocks 1 --steps 2 --evaluate_every 1 --evaluation_rows 2 --attention_type {kind}"
        arguments = [*flags.split(), "--data", str(texts), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["learn_attention", *arguments])
        learn_attention.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] * 4
    assert len({line["training_loss"] for line in lines[::2]}) == 4  # The kinds differ from the first step on.
    arguments = ["--device", "cpu", "--compare", str(out), "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", ["learn_attention", *arguments])
    capsys.readouterr()
    learn_attention.main()
    printed = capsys.readouterr().out
    assert all(f"| micro {name}, schedule of 2 steps |" in printed for name in ("full", "sparse 1", "window"))
    assert "| micro full, schedule of 2 steps, FP8 |" in printed
    assert picture.stat().st_size > 10_000
