"""Rows of pairs and rollouts as documents, and log-probabilities that are stored and given back."""

import json

import numpy as np
import pytest

from training.data.corpus import open_stores
from training.data.sources import Reading
from training.data.tokenizer import ByteTokenizer
from training.host.errors import UserError
from training.objectives.choose import complete, row_reader
from training.objectives.flags import ObjectiveFlags
from training.objectives.stored import store as write

BYTES = ByteTokenizer()


def read(tmp_path, rows, **flags):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = ObjectiveFlags(**flags)
    [store] = open_stores([str(tmp_path / "a.jsonl")], BYTES, 256, Reading(rows=row_reader(found, 0)))
    return store, found


def texts_of(store, document):
    """The texts of a document with * before each target, and the numbers of its tokens by column."""
    ids, masked = store.read_masked(document, 0, int(store.lengths[document]))
    columns = store.read_columns(document, 0, len(ids))
    shown = "".join(("" if m else "*") + (chr(i) if i else "$") for i, m in zip(ids, masked))
    return shown, {name: x.tolist() for name, x in columns.items()}


def test_a_pair_is_one_document_of_two_texts(tmp_path):
    store, _ = read(tmp_path, [{"prompt": "ab", "chosen": "c", "rejected": "de", "id": 7}], objective="dpo")
    assert texts_of(store, 0) == ("ab*c*$ab*d*e*$", {"answer": [0, 0, 0, 0, 1, 1, 1, 1, 1]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, 'needs "rejected"'),
        ({"chosen": "ab", "rejected": "ac"}, 'needs a "prompt"'),
        ({"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "y"}]}, "in common"),
    ],
)
def test_other_pairs_are_refused(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, [row], objective="simpo")


IDS = {"prompt_ids": [65, 66], "completion_ids": [67, 68, 69], "old_logprobs": [-1, -2, -3]}


def test_rollouts_of_ids_with_tools_masked_and_an_advantage_for_each_token(tmp_path):
    row = IDS | {"completion_mask": [1, 0, 1], "advantage": [0.5, 0, -2]}
    store, _ = read(tmp_path, [row], objective="dapo")
    old, advantage = [0, 0, -1, -2, -3], [0, 0, 0.5, 0, -2]
    assert texts_of(store, 0) == ("AB*CD*E", {"answer": [0] * 5, "old": old, "advantage": advantage})


def test_rewards_become_advantages_of_groups(tmp_path, caplog):
    rows = [IDS | {"reward": reward, "group": group} for reward, group in ((1, "a"), (5, "b"), (3, "a"), (2, None))]
    with pytest.raises(UserError, match='needs "group"'):
        read(tmp_path, rows, objective="dr_grpo")
    store, flags = read(tmp_path, rows[:3], objective="dr_grpo")
    complete(flags, BYTES, None, [store])
    assert [store.read_columns(i, 4, 5)["advantage"][0] for i in range(3)] == [-1, 0, 1]
    assert set(store.columns) == {"answer", "old", "advantage"} and "1 of 2 groups have one answer" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logprobs": None}, 'needs "old_logprobs"'),
        ({"old_logprobs": [1.0]}, "has 1 numbers, the completion 3 tokens"),
        ({"advantage": "high"}, "must be a number"),
        ({"advantage": [1, 2]}, "has 2 numbers"),
        ({"completion_mask": [1, 2, 1]}, "0 or 1"),
        ({"completion_ids": [1, 2.5, 3]}, "token ids"),
        ({"completion_ids": [1, 2, 300]}, "vocab_size"),
    ],
)
def test_other_rollouts_are_refused(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, [IDS | {"advantage": 1.0} | change], objective="grpo")


def test_weights_of_rows(tmp_path):
    rows = [{"text": "ab", "weight": -0.5}, {"prompt": "a", "completion": "b"}, {"text": "left out", "weight": 0}]
    store, _ = read(tmp_path, rows, objective="weighted")
    assert texts_of(store, 0) == ("a*b*$", {"answer": [0] * 3, "weight": [-0.5] * 3}) and len(store.lengths) == 2
    assert texts_of(store, 1)[1]["weight"] == [1, 1, 1]


def test_stored_log_probabilities_belong_to_documents_and_are_checked(tmp_path):
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "de"}]
    store, flags = read(tmp_path, rows, objective="dpo", reference_logprobs=str(tmp_path / "out"))
    values = np.arange(9, dtype=np.float32)
    write(tmp_path / "out", values, "of weights", "bytes", [store.identity])
    complete(flags, BYTES, None, [store])
    assert store.read_columns(0, 2, 9)["reference"].tolist() == [*range(2, 9)]

    other, _ = read(tmp_path, [{**rows[0], "chosen": "x"}], objective="dpo")
    with pytest.raises(UserError, match="other documents"):
        complete(flags, BYTES, None, [other])
    same, _ = read(tmp_path, rows, objective="dpo")
    damaged = bytearray((tmp_path / "out" / "logprobs.f32").read_bytes())
    damaged[5] ^= 1
    (tmp_path / "out" / "logprobs.f32").write_bytes(damaged)
    with pytest.raises(UserError, match=r"logprobs.f32 is damaged"):
        complete(flags, BYTES, None, [same])
    write(tmp_path / "out", values, "of weights", "another tokenizer", [same.identity])
    with pytest.raises(UserError, match="another toke"):
        complete(flags, BYTES, None, [same])
    (tmp_path / "out" / "logprobs.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        complete(flags, BYTES, None, [same])
