"""Rows of pairs and rollouts as documents, and log-probabilities that are stored and given back."""

import contextlib
import json
import os
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kernels.head_loss import NextToken, Scored
from model import MODEL_SIZES, Transformer
from tests.training.data.templates import CHATML
from tests.training.data.test_tokenizer import write_tokenizer
from training.data.corpus import open_stores
from training.data.loader import PROMPT, PackedLoader, make_batch, prompts_of
from training.data.packing import BestFitPacking
from training.data.show import show_batch
from training.data.sources import Document, Reading
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.data.tokens import TokenStore, split
from training.host.errors import UserError
from training.host.files import making
from training.logprobs import __main__ as logprobs
from training.logprobs.__main__ import log_probabilities
from training.objectives.decide import choose, decide_aim
from training.objectives.flags import ObjectiveFlags
from training.objectives.rows import Labelled, Pairs
from training.objectives.scored import Minimised
from training.objectives.sharing import without_nulls
from training.objectives.stored import TEACHER, Stored
from training.objectives.stored import store as write

BYTES = ByteTokenizer()
ASKS, SAYS = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def read(tmp_path, rows, context_length=1, columns=None, **flags):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = ObjectiveFlags(**flags)
    reading = Reading(columns=columns, rows=decide_aim(found, context_length).reader(0))
    [store] = open_stores([str(tmp_path / "a.jsonl")], BYTES, 256, reading)
    return store, found


def finish(flags, context_length, stores, start=None):
    aim = decide_aim(flags, context_length)
    aim.complete(stores, 256, aim.read_stored(BYTES.identity, start, None))


def texts_of(store, document):
    """The texts of a document with * before each target, and the numbers of its tokens by
    column."""
    ids, masked = store.read_masked(document, 0, int(store.lengths[document]))
    columns = store.read_columns(document, 0, len(ids))
    shown = "".join(("" if m else "*") + (chr(i) if i else "$") for i, m in zip(ids, masked))
    return shown, {name: x.tolist() for name, x in columns.items()}


def test_a_pair_is_one_document_of_two_texts(tmp_path):
    store, _ = read(
        tmp_path, [{"prompt": "ab", "chosen": "c", "rejected": "de", "id": 7}], objective="dpo"
    )
    assert texts_of(store, 0) == ("ab*c*$b*d*e*$", {"answer": [-1, 0, 0, 0, 1, 1, 1, 1]})
    store, _ = read(tmp_path, [{"prompt": "a", "chosen": "ab", "rejected": "b"}], objective="dpo")
    assert texts_of(store, 0) == (
        "a*a*b*$a*b*$",
        {"answer": [0, 0, 0, 0, 1, 1, 1]},
    )  # too short to be shared
    assert prompts_of(store) == (0.0, 2.0)


def test_pairs_with_an_empty_answer_or_equal_answers_are_left_out_and_counted(tmp_path, caplog):
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "d"}]
    rows += [rows[0] | {name: text} for name in ("chosen", "rejected") for text in ("", " ")]
    rows += [rows[0] | {"rejected": "c"}]
    with caplog.at_level("INFO"):
        store, _ = read(tmp_path, rows, objective="orpo")
    assert texts_of(store, 0)[0] == "ab*c*$b*d*$" and len(store.lengths) == 1
    assert "a.jsonl: 1 row of pairs\n" in caplog.text
    assert (
        f"data: left out rows with an empty answer: 4, the first in {tmp_path}/a.jsonl:2"
        in caplog.text
    )
    assert (
        f"data: left out pairs of equal answers: 1, the first in {tmp_path}/a.jsonl:6"
        in caplog.text
    )


def test_an_answer_with_a_label_stands_beside_an_answer_to_the_prompt_before(tmp_path):
    """The first row gets the last one's answer, and comes last. Pairs may be unrolled to two rows
    of a prompt."""
    rows = [
        {"prompt": "ab", "completion": "c", "label": True},
        {"prompt": "d", "completion": "ef", "label": 0},
    ]
    store, _ = read(
        tmp_path, [*rows, {"prompt": "gh", "completion": "i", "label": False}], objective="kto"
    )
    assert [texts_of(store, i)[0] for i in range(3)] == [
        "d*e*f*$d*c*$",
        "gh*i*$h*e*f*$",
        "ab*c*$b*i*$",
    ]
    assert texts_of(store, 1)[1] == {"answer": [-1, 0, 0, 0, 1, 1, 1, 1], "label": [0] * 8}
    assert texts_of(store, 2)[1]["label"] == [1] * 7
    without = [{"prompt": "", "completion": text, "label": True} for text in ("ab", "cd")]
    store, _ = read(tmp_path, without, objective="kto")
    assert [texts_of(store, i)[0] for i in (0, 1)] == ["c*d*$c*b*$", "a*b*$a*d*$"]
    both = [{**row, "completion": answer} for row in rows for answer in ("x", "y")]
    store, _ = read(tmp_path, both, objective="kto")
    assert [texts_of(store, i)[0] for i in range(4)] == [
        "d*x*$d*y*$",
        "d*y*$d*y*$",
        "ab*x*$b*y*$",
        "ab*y*$b*y*$",
    ]
    for bad, message in (
        (rows[:1] * 2, "of two prompts"),
        ([rows[0] | {"label": "good"}], "must be true or false"),
    ):
        with pytest.raises(UserError, match=message):
            read(tmp_path, bad, objective="kto")


def test_pairs_share_their_prompt_and_keep_loss_and_gradients(tmp_path):
    """Against pairs whose answers each have the prompt before them: packed, of a short prompt, of
    one-token answers."""
    rows = [
        {"prompt": "what is it? " * n, "chosen": "it is good"[:m], "rejected": "bad"[:m]}
        for n, m in ((3, 10), (1, 1), (2, 9))
    ]  # fmt: skip
    store, flags = read(
        tmp_path, [*rows, {"prompt": "a", "chosen": "b", "rejected": "c"}], objective="simpo"
    )
    apart = TokenStore([_apart(store, document) for document in range(4)], store.eos_id)
    assert apart.lengths.sum() - store.lengths.sum() == 12 * (3 + 1 + 2) - 3
    share, answers = prompts_of(store)
    assert answers == 2 and share == (12 * (3 + 1 + 2) - 3) / store.lengths.sum()
    batch, _ = compare_losses(flags, store, [[0, 3], [1, 2]], apart, [[0, 3], [1, 2]], 160)
    assert [answers for _, answers, _ in batch.documents.prompts] == [2, 2, 2]


@pytest.mark.parametrize("objective", ["simpo", "dpo", "kto"])
def test_rows_of_one_prompt_share_it_and_keep_loss_and_gradients(tmp_path, objective):
    """Pairs and labelled answers of one prompt, not all of them neighbours, as many as fit; apart
    in sequences of 1."""
    answers = ["it is good", "b", "no", "a longer answer", "x"]
    rows = [
        {"prompt": "what is it? " * 2, "chosen": answers[i], "rejected": answers[i - 1] + "!"}
        for i in range(5)
    ]
    rows.insert(3, {"prompt": "and so?", "chosen": "c", "rejected": "d"})
    if objective == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": i < 2}
            for i, row in enumerate(rows)
        ]
    (apart, _), (store, flags) = (
        read(tmp_path, rows, length, objective=objective) for length in (1, 110)
    )
    for each in (apart, store):
        each.add_column("reference", np.zeros(each.lengths.sum(), np.float32))
    first, last = int((store.lengths > 60).sum()), len(store.lengths)
    assert (
        len(apart.lengths) == 6
        and first < last < 6
        and store.lengths.sum() < apart.lengths.sum() - 2 * 22
    )
    own = [[*range(first)], [*range(first, last)]]
    batch, metrics = compare_losses(flags, store, own, apart, [[0, 1, 2], [3, 4, 5]], 200)
    counts = [answers for _, answers, _ in batch.documents.prompts]
    assert sum(counts) == 12 and max(counts) > 2 and prompts_of(store)[1] == 12 / last
    assert metrics["accuracy" if objective != "kto" else "kl"][1] == 6


def compare_losses(flags, store, sequences, apart, sequences_apart, context_length):
    """Compares loss, gradients and metrics of documents in sequences, all in a batch. Returns the
    first one's batch."""
    torch.manual_seed(0)
    model = Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=2))
    found = []
    for each, rows in ((apart, sequences_apart), (store, sequences)):
        spans = [[(i, 0, int(each.lengths[i])) for i in row] for row in rows]
        batch, objective = make_batch(each, spans, context_length), choose(flags, context_length)
        objective = Minimised(objective, batch, objective.count(batch), torch.device("cpu"))
        loss = model(batch.input_ids, batch.documents, Scored(objective, batch.targets)).loss
        found.append(
            (loss, torch.autograd.grad(loss, [*model.parameters()]), batch, objective.terms.means)
        )
    (expected, wanted, _, metrics), (loss, gradients, batch, own) = found
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(own, metrics, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, wanted):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    return batch, own


def _apart(store, document):
    """A pair as its two answers, each behind the prompt."""
    ids, masked = store.read_masked(document, 0, int(store.lengths[document]))
    answer = store.read_columns(document, 0, len(ids))["answer"]
    places = [i for number in (0, 1) for i in range(len(ids)) if answer[i] in (PROMPT, number)]
    numbers = [
        number for number in (0, 1) for i in range(len(ids)) if answer[i] in (PROMPT, number)
    ]
    return Document(
        ids[places].astype(np.uint32), masked[places], True, columns={"answer": np.float32(numbers)}
    )


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "a", "chosen": "b"}, 'needs "rejected"'),
    ({"chosen": "ab", "rejected": "ac"}, 'needs a "prompt" .*; --columns prompt=NAME renames'),
    ({"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "y"}]}, "in common"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "be brief"}, '"system" beside'),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "input": "of LLaMA-Factory"}, '"input" beside'),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]}, '"images" beside'),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "loss_masks": [1]}, '"loss_masks", which is not obeyed'),
    ({"prompt": [SAYS, ASKS], "chosen": [ASKS, SAYS], "rejected": [ASKS, SAYS | {"content": "y"}]}, "the last message"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": [ASKS]}, 'has "messages" with a message that neither'),
    ({"prompt": "hi", "chosen": "b", "rejected": "c", "conversations": json.dumps([ASKS, SAYS])}, "with a message"),
    ({"prompt": "z", "chosen": [ASKS, SAYS], "rejected": [ASKS, SAYS | {"content": "y"}]}, "agrees"),
])  # fmt: skip
def test_other_pairs_are_refused(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, [row], objective="simpo")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [ASKS, SAYS], "rejected": [ASKS, SAYS | {"content": "other"}]},
        {"prompt": [ASKS], "chosen": [ASKS, SAYS], "rejected": [ASKS, SAYS | {"content": "other"}]},
        {
            "prompt": [ASKS],
            "chosen": [ASKS | {"name": None}, SAYS],
            "rejected": [ASKS, SAYS | {"content": "other"}],
        },
        {"chosen": [ASKS | {"name": None}, SAYS], "rejected": [ASKS, SAYS | {"content": "other"}]},
        {
            "prompt": "hi",
            "chosen": [ASKS, SAYS],
            "rejected": [ASKS, SAYS | {"content": "other"}],
            "messages": [ASKS, SAYS],
        },
        {
            "prompt": [ASKS],
            "chosen": [SAYS],
            "rejected": [SAYS | {"content": "other"}],
            "tools": [],
        },
    ],
)
def test_whole_chats_have_their_prompt_once(row):
    """TRL's implicit prompts, and UltraFeedback's, which has the question beside both chats."""
    given = []

    def encode(part):
        given.append(part)
        return Document(np.arange(1 + len(given)), None, True)

    Pairs(0, 1)(row, encode)
    chats = [[ASKS, SAYS], [ASKS, SAYS | {"content": "other"}]]
    assert [without_nulls(part["prompt"] + part["completion"]) for part in given] == chats
    assert without_nulls(given[0]["prompt"]) == [ASKS] and "messages" not in given[0]


@pytest.mark.parametrize("objective", ["dpo", "kto", "grpo"])
def test_messages_may_be_json_as_in_tables(tmp_path, objective):
    """Bytes have no chat template, so they refuse chats. Before they trained on the JSON as a
    text."""
    answers = (
        {"chosen": [SAYS], "rejected": [ASKS]} if objective == "dpo" else {"completion": [SAYS]}
    )
    row = {"prompt": [ASKS], **answers}
    others = {"label": True} if objective == "kto" else {"advantage": 1, "old_logprobs": [-1]}
    for chats in (row, {name: json.dumps(chat) for name, chat in row.items()}):
        with pytest.raises(UserError, match="chat template"):
            read(tmp_path, [chats | others], objective=objective)


@pytest.mark.parametrize("objective", ["kto", "grpo"])
def test_what_rows_of_one_answer_would_ignore_is_refused(tmp_path, objective):
    row = {
        "prompt": "a",
        "completion": "b",
        "system": "be",
        "old_logprobs": [-1, -1],
        "advantage": 1,
    }
    row |= {"label": True} if objective == "kto" else {}
    with pytest.raises(UserError, match='"system" beside'):
        read(tmp_path, [row], objective=objective)


def test_an_objective_reads_no_texts(tmp_path, caplog):
    (tmp_path / "README.md").write_text("of the pairs beside it")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    reading = Reading(rows=decide_aim(ObjectiveFlags(objective="simpo"), 8).reader(0))
    [store] = open_stores([str(tmp_path)], BYTES, 256, reading)
    assert len(store.lengths) == 1 and "left out files of other kinds" in caplog.text
    with pytest.raises(UserError, match="objective reads rows"):
        open_stores([str(tmp_path / "README.md")], BYTES, 256, reading)


def test_whole_chats_with_a_label_have_their_prompt_once():
    given = []

    def encode(part):
        given.append(part)
        return Document(np.arange(2), None, True)

    Labelled(0, 1)({"prompt": [ASKS], "completion": [ASKS, SAYS], "label": True}, encode)
    assert given == [{"prompt": [ASKS], "completion": [SAYS]}]


def test_columns_rename_the_fields_of_an_objective(tmp_path):
    row = {"q": "a", "better": "b", "worse": "c", "context": "left out where answers are named"}
    store, _ = read(
        tmp_path, [row], columns="prompt=q,chosen=better,rejected=worse", objective="simpo"
    )
    assert texts_of(store, 0)[0] == "a*b*$a*c*$"
    with pytest.raises(UserError, match="stands one of"):
        read(tmp_path, [row], columns="prompt=q,completion_ids=better", objective="simpo")


IDS = {"prompt_ids": [65, 66], "completion_ids": [67, 68, 69], "old_logprobs": [-1, -2, -3]}


def test_rollouts_of_ids_with_tools_masked_and_an_advantage_for_each_token(tmp_path):
    row = IDS | {"completion_mask": [1, 0, 1], "advantage": [0.5, 0, -2]}
    store, _ = read(tmp_path, [row], objective="dapo")
    old, advantage = [0, 0, -1, -2, -3], [0, 0, 0.5, 0, -2]
    assert texts_of(store, 0) == (
        "AB*CD*E",
        {"answer": [0] * 5, "old": old, "advantage": advantage},
    )


def test_log_probabilities_that_are_not_read_are_said(tmp_path, caplog):
    """Adapters have their base as the reference, whatever the rows have. A folder's .json files
    hold rollouts, too."""
    rows = [IDS | {"ref_logprobs": [-1, -1, -1], "advantage": 1}] * 2
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for has_adapters in (False, True):
        reader = decide_aim(ObjectiveFlags("grpo", 0.1), 16, has_adapters).reader(0)
        with caplog.at_level("INFO"):
            [store] = open_stores([str(tmp_path)], BYTES, 256, Reading(rows=reader))
        assert ("reference" in store.columns) != has_adapters
        assert ("2 rows of rollouts whose ref_logprobs are not read" in caplog.text) == has_adapters


def test_rewards_become_advantages_of_groups(tmp_path, caplog):
    rows = [
        IDS | {"reward": reward, "group": group}
        for reward, group in ((1, "a"), (5, "b"), (3, "a"), (2, None))
    ]
    with pytest.raises(UserError, match='needs "group"'):
        read(tmp_path, rows, objective="dr_grpo")
    store, flags = read(tmp_path, rows[:3], objective="dr_grpo")
    finish(flags, 16, [store])
    assert [store.read_columns(i, 4, 5)["advantage"][0] for i in range(3)] == [-1, 0, 1]
    assert (
        set(store.columns) == {"answer", "old", "advantage"}
        and "1 of 2 groups have one answer" in caplog.text
    )


def test_an_answer_without_a_target_counts_in_its_group_and_in_the_mean(tmp_path, caplog):
    """As in TRL, where answers that were cut are masked: they have rewards, and a loss of 0."""
    rows = [IDS | {"reward": reward, "group": 0} for reward in (1, 3, 8, 4)]
    rows[2] |= {"completion_mask": [0, 0, 0]}
    rows[3] |= {"completion_ids": [], "old_logprobs": []}
    with caplog.at_level("INFO"):
        store, flags = read(tmp_path, rows, 16, objective="dr_grpo")
    assert "2 rows of rollouts without a target" in caplog.text
    finish(flags, 16, [store])
    assert store.lengths.tolist() == [9, 1, 1] and store.read_columns(0, 8, 9)["advantage"] == -1
    batch = make_batch(store, [[(i, 0, int(n)) for i, n in enumerate(store.lengths)]], 16)
    assert (
        batch.num_valid_tokens == 6
        and choose(replace(flags, objective="grpo"), 16).count(batch) == 4
    )
    texts = [
        {
            "prompt": "a",
            "completion": text,
            "reward": i,
            "group": 0,
            "old_logprobs": [-1.0] * (1 + len(text)),
        }
        for i, text in enumerate(("b", "", "cd", " "))
    ]
    store, flags = read(tmp_path, texts, 16, objective="dr_grpo")
    finish(flags, 16, [store])
    assert store.lengths.tolist() == [3, 4, 1, 1]
    assert store.column("advantage")[[0, 3, 7, 8]].tolist() == [-1.5, 0.5, -0.5, 1.5]
    with pytest.raises(UserError, match="all rollouts are masked or empty"):
        finish(flags, 16, [read(tmp_path, rows[2:], 16, objective="dr_grpo")[0]])


def test_rollouts_of_one_prompt_are_one_document_while_they_fit(tmp_path):
    """Advantages, what is shown, and log-probabilities stay those of the rows."""
    rows = [
        IDS | {"reward": reward, "group": group} for reward, group in ((1, "a"), (5, "b"), (3, "a"))
    ]
    rows += [
        rows[0] | {"prompt_ids": [66, 66], "group": "c"},
        *[rows[1] | {"prompt_ids": [66], "group": "d"}] * 2,
    ]
    store, flags = read(tmp_path, rows, 9, objective="dr_grpo")
    apart, _ = read(tmp_path, rows, objective="dr_grpo")
    assert store.lengths.tolist() == [9, 5, 5, 4, 4] and apart.lengths.tolist() == [
        5,
        5,
        5,
        5,
        4,
        4,
    ]
    torch.manual_seed(0)
    model = Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=1)).requires_grad_(False)

    def run(ids, targets, packed, _):
        return model(ids, packed, NextToken(targets, denominator=1.0)).log_probs

    found, wanted = (
        log_probabilities(run, each, 9, torch.device("cpu")) for each in (store, apart)
    )
    torch.testing.assert_close(
        *(torch.from_numpy(x[x != 0]) for x in (found, wanted)), rtol=1e-5, atol=0
    )
    assert (found[[0, 1, 5]] == 0).all() and (found != 0).sum() == 18
    shown = show_batch(PackedLoader(store, BestFitPacking(store.lengths, 9, seed=0), 5), BYTES)
    assert "tokens 0 to 8, 6 of them trained on\nAB[[CDE]]B[[CDE]]\n" in shown
    finish(flags, 16, [store])
    advantage = [-1] * 5 + [0.0] * 4
    assert texts_of(store, 0) == (
        "AB*C*D*EB*C*D*E",
        {
            "answer": [-1, 0, 0, 0, 0, 1, 1, 1, 1], "old": [0, 0, -1, -2, -3, 0, -1, -2, -3],
            "advantage": advantage,
        },
    )  # fmt: skip
    assert store.read_columns(1, 4, 5)["advantage"][0] == 1


def test_rollouts_share_a_prompt_wherever_they_stand_and_one_is_left_to_be_held_out(tmp_path):
    rows = [
        IDS | {"prompt_ids": prompt, "advantage": number}
        for number, prompt in enumerate(([65, 66], [67, 68]) * 2)
    ]
    store, _ = read(tmp_path, rows, 16, objective="grpo")
    assert [texts_of(store, i)[1]["advantage"] for i in (0, 1)] == [
        [0] * 5 + [2] * 4,
        [1] * 5 + [3] * 4,
    ]
    assert [store.source(i) for i in (0, 1)] == [f"{tmp_path}/a.jsonl:{line}" for line in (1, 2)]
    one, _ = read(tmp_path, [rows[0]] * 3, 16, objective="grpo")
    assert one.lengths.tolist() == [9, 5] and all(len(part.lengths) for part in split(one, 0.1, 0))


def test_answers_to_a_prompt_are_held_out_together(tmp_path):
    """Of six prompts with two pairs each, apart in the data. Texts without a prompt are held out
    one by one."""
    rows = [
        {"prompt": f"what is {i % 6}?", "chosen": f"it is {i}", "rejected": "no"} for i in range(12)
    ]
    store, _ = read(tmp_path, rows, objective="simpo")
    kept, held_out = split(store, 0.4, 0)
    assert len(kept.lengths) == 8 and sorted([*kept.documents, *held_out.documents]) == [*range(12)]
    prompts = [{store.read(i, 8, 9).item() for i in part.documents} for part in (kept, held_out)]
    assert [*map(len, prompts)] == [4, 2] and prompts[0].isdisjoint(prompts[1])
    texts, _ = read(tmp_path, [{"text": f"a {i}"} for i in range(10)], objective="weighted")
    assert len(split(texts, 0.5, 0)[1].lengths) == 5
    # Six prompts have two rollouts each, of which the first begins with masked tokens.
    rows = [
        IDS | {"prompt_ids": [65 + i % 6, 66], "completion_ids": [i, 70, 71], "advantage": 1.0}
        for i in range(12)
    ]
    for row in rows[:6]:
        row["completion_mask"] = [0, 1, 1]
    for length, documents in ((5, 12), (9, 6)):
        store, _ = read(tmp_path, rows, length, objective="grpo")
        assert len(store.lengths) == documents
        prompts = [
            {store.read(i, 0, 1).item() for i in part.documents} for part in split(store, 0.4, 0)
        ]
        assert [*map(len, prompts)] == [4, 2] and prompts[0].isdisjoint(prompts[1])


@pytest.mark.parametrize("names", [("role", "content"), ("from", "value")])
def test_chats_that_go_on_with_a_users_message_share_what_stands_before_it(tmp_path, names):
    """Users may go on before a model answers. Answers that begin by themselves are another
    document."""
    pytest.importorskip("jinja2")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer, rows = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json")), []
    for begin in (["Hi"], ["a"], ["ab"], []):
        texts = [("user", "1+1?"), *(("user", text) for text in begin), ("assistant", "2")]
        chat = [dict(zip(names, each)) for each in texts]
        rows.append({"prompt": chat[:1], "completion": chat[1:], "advantage": 1.0})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = decide_aim(ObjectiveFlags("grpo", old_logprobs="any"), 1000).reader(tokenizer.eos_id)
    [store] = open_stores(
        [str(tmp_path / "a.jsonl")], tokenizer, tokenizer.vocab_size, Reading(rows=reader)
    )
    ids, answer = store.read(0, 0, int(store.lengths[0])), store.column("answer")
    assert len(store.lengths) == 2 and answer.max() == 2
    shared = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>user"
    assert tokenizer.decode(ids[answer[: len(ids)] == PROMPT]) == shared
    assert [tokenizer.decode(ids[answer[: len(ids)] == i]).split("<")[0] for i in range(3)] == [
        "\nHi",
        "\na",
        "\nab",
    ]


@pytest.mark.parametrize("objective", ["simpo", "kto", "grpo"])
def test_a_tokenizer_that_joins_a_prompt_with_an_answer_leaves_them_one_prompt(tmp_path, objective):
    """With h and e as one token, half of the answers to each prompt begin a token earlier than the
    others."""
    pytest.importorskip("tokenizers")
    tokenizer, rows = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json")), []
    for i in range(12):
        answer, others = (
            "ei"[i // 6] + str(i),
            {"simpo": {}, "kto": {"label": True}, "grpo": {"advantage": 1.0}},
        )
        answers = (
            {"chosen": answer, "rejected": "en"[i // 6] + "o"}
            if objective == "simpo"
            else {"completion": answer}
        )
        rows.append({"prompt": f"what is {i % 6} h"} | answers | others[objective])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = decide_aim(ObjectiveFlags(objective, old_logprobs="any"), 1).reader(tokenizer.eos_id)
    [store] = open_stores(
        [str(tmp_path / "a.jsonl")], tokenizer, tokenizer.vocab_size, Reading(rows=reader)
    )
    prompts = [
        {store.read(i, 8, 9).item() for i in part.documents} for part in split(store, 0.4, 0)
    ]
    assert [*map(len, prompts)] == [4, 2] and prompts[0].isdisjoint(prompts[1])


def test_a_prompt_is_the_same_in_files_with_other_orders_of_fields_and_nulls(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    prompts = [ASKS], [{"content": "hi", "name": None, "role": "user"}], [ASKS | {"content": "ho"}]
    rows = [
        {"prompt": prompt, "chosen": [SAYS], "rejected": [SAYS | {"content": "no"}]}
        for prompt in prompts
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = Reading(rows=Pairs(tokenizer.eos_id, 1))
    [store] = open_stores([str(tmp_path / "a.jsonl")], tokenizer, tokenizer.vocab_size, reading)
    one, same, other = map(store.prompt, range(3))
    assert one == same != other


def test_kto_asks_for_an_answer_to_another_prompt_whatever_tokens_it_ends_with():
    columns, rows = {name: np.zeros(3, np.float32) for name in ("answer", "label")}, []
    for prompt, ids, masked in (
        (1, [9, 9, 1], [1, 1, 0]),
        (2, [5, 6, 2], [1, 1, 0]),
        (2, [5, 7, 3], [1, 0, 0]),
    ):
        rows.append(
            Document(np.uint32(ids), np.bool_(masked), True, columns=columns, prompt=prompt)
        )
    found = [document.tokens.tolist() for document in Labelled(0, 1).join(rows)]
    assert found == [[5, 6, 2, 6, 1], [5, 7, 3, 5, 1], [9, 9, 1, 9, 7, 3]]


@pytest.mark.parametrize(("change", "message"), [
    ({"old_logprobs": None}, 'needs "old_logprobs"'),
    ({"old_logprobs": [-1.0]}, "has 1 numbers, the completion 3 tokens"),
    ({"advantage": "high"}, "must be a number"),
    ({"advantage": [1, 2]}, "has 2 numbers"),
    ({"completion_mask": [1, 2, 1]}, "0 or 1"),
    ({"completion_ids": [1, 2.5, 3]}, "token ids"),
    ({"completion_ids": [1, 2, 300]}, "vocab_size"),
    ({"prompt_ids": [300]}, "vocab_size"),
    ({"completion_ids": [1, 2, 10**400]}, "within 1e9 of 0"),
    ({"completion_ids": [True, False, True]}, "token ids"),
    ({"advantage": 10**400}, "within 1e9 of 0"),
    ({"advantage": float("nan")}, "within 1e9 of 0"),
    ({"old_logprobs": [1.0, 2.0, 3.0]}, "-1000 to 0, got 1"),
    ({"old_logprobs": [-1.0, -9999.0, -1.0]}, "-1000 to 0, got -9999"),
    ({"images": ["a.png"]}, 'has "images", which is not read'),
    ({"token_mask": [1, 0, 1]}, "give --columns completion_mask="),
    ({"token_mask": [1, 0, 1], "completion_mask": [1, 1, 1]}, '"token_mask", which is not obeyed; '
                                                              'remove it; mend'),
    ({"advantage": None, "reward": 1, "group": 0}, "give one in all rows"),
])  # fmt: skip
def test_other_rollouts_are_refused(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read(
            tmp_path,
            [IDS | {"advantage": 1.0}, IDS | {"advantage": 1.0} | change],
            objective="grpo",
        )


@pytest.mark.parametrize(("flags", "cure"), [
    ({}, "or give --old_logprobs, which training.logprobs makes"),
    ({"old_logprobs": "any", "truncation": 2.0}, "or drop --truncation"),
    ({"old_logprobs": "any", "beta": 0.1}, "or give --reference_logprobs, which training.logprobs "
                                           "makes"),
])  # fmt: skip
def test_rollouts_without_numbers_say_which_flag_needs_them(tmp_path, flags, cure):
    with pytest.raises(UserError, match=f"_logprobs=NAME renames; {cure}; mend"):
        read(tmp_path, [IDS | {"advantage": 1.0, "old_logprobs": None}], objective="grpo", **flags)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_rollouts_of_tables(tmp_path, suffix):
    """A table's columns are read whole, a mask of another name too."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = IDS | {"advantage": 0.5, "completion_mask": [1, 0, 1]}
    reading = Reading(rows=decide_aim(ObjectiveFlags(objective="grpo"), 9).reader(0))
    for rows in (
        [row, row | {"advantage": -0.5}, row | {"prompt_ids": [66]}],
        [row | {"token_mask": [1, 0, 1]}],
    ):
        table, file = pyarrow.Table.from_pylist(rows), tmp_path / f"{len(rows)}.{suffix}"
        if suffix == "parquet":
            parquet.write_table(table, file)
        else:
            with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
                stream.write_table(table)
    [store] = open_stores([str(tmp_path / f"3.{suffix}")], BYTES, 256, reading)
    shown, columns = texts_of(store, 0)
    assert shown == "AB*CD*EB*CD*E" and columns["advantage"] == [0.5] * 5 + [-0.5] * 4
    with pytest.raises(UserError, match='"token_mask", which is not obeyed'):
        open_stores([str(tmp_path / f"1.{suffix}")], BYTES, 256, reading)


def test_groups_of_one_reward_have_no_advantage_and_are_said(tmp_path, caplog):
    """The mean of 0.1 three times is another number. A run that has nothing else is refused, unless
    it has a KL."""
    rows = [
        IDS | {"reward": reward, "group": group}
        for reward, group in ((0.1, 0), (0.1, 0), (0.1, 0), (2, 1), (3, 1))
    ]
    store, flags = read(tmp_path, rows, 6, objective="grpo")
    finish(flags, 16, [store])
    assert "1 of 2 groups have one answer, or answers of one reward" in caplog.text
    assert (
        store.column("advantage")[:15].tolist() == [0] * 15 and store.column("advantage")[15:].all()
    )
    rows = [row | {"ref_logprobs": row["old_logprobs"]} for row in rows[:3]]
    finish(flags := ObjectiveFlags("grpo", 0.1), 16, [read(tmp_path, rows, **vars(flags))[0]])
    with pytest.raises(UserError, match="all advantages are 0"):
        finish(ObjectiveFlags("grpo"), 16, [read(tmp_path, rows, objective="grpo")[0]])
    with pytest.raises(UserError, match="must be a number or a text"):
        read(tmp_path, [rows[0] | {"group": float("nan")}], objective="grpo")


def test_chats_that_end_in_others_have_a_prompt():
    """The prompt of such chats is all but the last message of the shorter one, as in TRL."""
    given = []
    Pairs(0, 1)(
        {"chosen": [ASKS, SAYS], "rejected": [ASKS, SAYS, ASKS, SAYS]},
        lambda part: (given.append(part), Document(np.arange(1 + len(given)), None, True))[1],
    )
    assert [part["prompt"] for part in given] == [[ASKS], [ASKS]]
    assert [part["completion"] for part in given] == [[SAYS], [SAYS, ASKS, SAYS]]


def test_groups_of_two_prompts_are_refused(tmp_path):
    """Files of several steps may each number their groups from 0."""
    rows = [IDS | {"reward": 1, "group": 0}, IDS | {"reward": 2, "group": 0, "prompt_ids": [66]}]
    with pytest.raises(UserError, match='"group" 0 has another prompt before'):
        read(tmp_path, rows, objective="grpo")


def test_weights_of_rows(tmp_path, caplog):
    """A weight of null is as none. A row of weight 0 has targets, which count in the mean."""
    rows = [{"text": "ab", "weight": -0.5}, {"prompt": "a", "completion": "b"}]
    rows += [{"text": "cd", "weight": 0}, {"text": "ef", "weight": None}]
    with caplog.at_level("INFO"):
        store, _ = read(tmp_path, rows, objective="weighted")
    assert "2 rows of weighted texts, 2 rows of texts" in caplog.text
    assert texts_of(store, 0) == ("a*b*$", {"answer": [0] * 3, "weight": [-0.5] * 3})
    weights = [texts_of(store, i)[1]["weight"] for i in range(4)]
    assert weights == [[-0.5] * 3, [1] * 3, [0] * 3, [1] * 3]
    with pytest.raises(UserError, match="all weights are 0"):
        finish(ObjectiveFlags("weighted"), 8, [read(tmp_path, rows[2:3], objective="weighted")[0]])


def test_a_weight_near_0_and_one_of_0_have_the_same_loss(tmp_path):
    losses = []
    for least in (0, 1e-9):
        rows = [{"text": text, "weight": w} for text, w in (("ab", 2), ("cdefg", least), ("hi", 1))]
        store, _ = read(tmp_path, rows, objective="weighted")
        spans = [[(i, 0, int(n)) for i, n in enumerate(store.lengths)]]
        batch = make_batch(store, spans, 16)
        torch.manual_seed(0)
        model = Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
        weights = batch.answers.columns_BT["weight"]
        loss = NextToken(batch.targets, weights, num_targets=batch.num_valid_tokens)
        losses.append(model(batch.input_ids, batch.documents, loss).loss)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_documents_longer_than_a_sequence_have_log_probabilities_that_are_no_numbers(tmp_path):
    """A run drops them, as --overlong says, or is refused if its own sequences are longer."""
    rows = [{"prompt": "a" * n, "chosen": "b", "rejected": "c"} for n in (20, 2, 3)]
    store, flags = read(tmp_path, rows, objective="dpo", reference_logprobs=str(tmp_path / "out"))
    found = log_probabilities(
        lambda ids, *_: -torch.ones(ids.shape), store, 12, torch.device("cpu")
    )
    is_first = np.repeat([True, False, False], store.lengths)
    assert (
        np.isnan(found[is_first]).all()
        and np.isfinite(found[~is_first]).all()
        and found[~is_first].any()
    )
    write(tmp_path / "out", found, "of weights", "full", "bytes", [store.text_identity])
    finish(flags, 24, [store])
    with pytest.raises(
        UserError,
        match="1 documents did not fit, the longest of 25 tokens; make it anew with "
        "--context_length 25",
    ):
        finish(flags, 25, [read(tmp_path, rows, objective="dpo")[0]])


def test_data_without_targets_and_weights_that_give_no_numbers_have_no_log_probabilities(tmp_path):
    """The first of several sequences shows that weights give no numbers."""
    rows = [IDS | {"completion_mask": [0, 0, 0], "advantage": 1}, IDS | {"advantage": 1}]
    for row, runs, message in zip(rows, (0, 1), ("no token to be predicted", "are no numbers")):
        store, lengths = read(tmp_path, [row] * 3, 5, objective="grpo")[0], []

        def run(ids, *_, lengths=lengths):
            lengths.append(ids.shape[1])
            return torch.full(ids.shape, float("nan"))

        with pytest.raises(UserError, match=message):
            log_probabilities(run, store, 5, torch.device("cpu"))
        assert lengths == [5] * runs


def test_a_folder_that_cannot_be_made_is_refused_before_a_model_is_read(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        logprobs, "shape_of_weights", lambda folder: None
    )  # a folder with a config.json
    (tmp_path / "file").write_text("")
    assert logprobs.main(["no model", str(tmp_path / "file"), "--data", "no data"]) == 1
    assert "the folder " in (error := capsys.readouterr().err) and "cannot be made" in error
    (tmp_path / "logprobs.json").write_text(
        "{}"
    )  # of hours, which another model's would take the place of
    assert logprobs.main(["no model", str(tmp_path), "--data", "no data"]) == 1
    assert f"{tmp_path} has log-probabilities; give another folder" in capsys.readouterr().err
    with making(tmp_path / "out"):
        assert logprobs.main(["no model", str(tmp_path / "out"), "--data", "no data"]) == 1
        assert (
            f"another run, process {os.getpid()}, writes into {tmp_path}/out: wait"
            in capsys.readouterr().err
        )
    (tmp_path / "out/note").touch()
    assert logprobs.main(["no model", str(tmp_path / "out"), "--data", "no data"]) == 1
    assert "is already there" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "logprobs.json", "out"}


def test_what_a_stop_leaves_is_not_taken_for_whole(tmp_path, monkeypatch):
    """In a folder of earlier numbers too; --help says that the command begins anew."""
    write(tmp_path, np.zeros(4, np.float32), "of weights", "full", "bytes", [1])
    for call in ("pathlib.Path.write_bytes", "training.objectives.stored.replace_file"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(call, MagicMock(side_effect=KeyboardInterrupt))
            write(tmp_path, np.ones(4, np.float32), "of weights", "full", "bytes", [1])
        with pytest.raises(UserError, match=r"has no logprobs\.json"):
            Stored.read(tmp_path)
    assert "If it is stopped, it begins anew" in " ".join(logprobs.LogProbsFlags.__doc__.split())


def test_stored_log_probabilities_belong_to_rows_whose_numbers_may_change(tmp_path):
    """Made without the engine's log-probabilities, and read beside them; other prompts in a
    document are refused."""
    rows = [IDS | {"advantage": number} for number in (1.0, 2.0, 3.0)]
    plain, _ = read(tmp_path, rows, 9, objective="grpo", old_logprobs="any")
    write(
        tmp_path / "out",
        -np.arange(14, dtype=np.float32),
        "of weights",
        "full",
        "bytes",
        [plain.text_identity],
    )
    known = {"objective": "grpo", "old_logprobs": str(tmp_path / "out"), "truncation": 2.0}
    store, flags = read(tmp_path, [row | {"advantage": -1.0} for row in rows], 9, **known)
    finish(flags, 16, [store])
    assert set(store.columns) == {"answer", "written", "old", "advantage"}
    save_file({"embed_tokens.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="is of weights"):
        finish(flags, 16, [read(tmp_path, rows, 9, **known)[0]], str(tmp_path))
    for_kl = {"objective": "grpo", "reference_logprobs": str(tmp_path / "out"), "beta": 0.1}
    store, flags = read(tmp_path, [row | {"ref_logprobs": None} for row in rows], 9, **for_kl)
    finish(flags, 16, [store], str(tmp_path))
    assert set(store.columns) == {"answer", "old", "reference", "advantage"}
    apart, flags = read(tmp_path, rows, 8, **known)
    with pytest.raises(UserError, match="--context_length"):
        finish(flags, 16, [apart])


def test_stored_log_probabilities_belong_to_documents_and_are_checked(tmp_path):
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "de"}]
    store, flags = read(tmp_path, rows, objective="dpo", reference_logprobs=str(tmp_path / "out"))
    values = -np.arange(8, dtype=np.float32)
    write(tmp_path / "out", values, "of weights", "full", "bytes", [store.text_identity])
    finish(flags, 16, [store])
    assert store.read_columns(0, 2, 8)["reference"].tolist() == [*range(-2, -8, -1)]

    other, _ = read(tmp_path, [{**rows[0], "chosen": "x"}], objective="dpo")
    with pytest.raises(UserError, match="other documents"):
        finish(flags, 16, [other])
    same, _ = read(tmp_path, rows, objective="dpo")
    damaged = bytearray((tmp_path / "out" / "logprobs.f32").read_bytes())
    damaged[5] ^= 1
    (tmp_path / "out" / "logprobs.f32").write_bytes(damaged)
    with pytest.raises(UserError, match=r"logprobs.f32 is damaged"):
        finish(flags, 16, [same])
    write(tmp_path / "out", values, "of weights", "full", "another tokenizer", [same.text_identity])
    with pytest.raises(UserError, match="another toke"):
        finish(flags, 16, [same])
    index = json.loads((tmp_path / "out" / "logprobs.json").read_text())
    for spoiled in (
        {},
        index | {"tokenizer": 5},
        index | {"tokens": "8"},
        index | {"documents": None},
    ):
        (tmp_path / "out" / "logprobs.json").write_text(json.dumps(spoiled))
        with pytest.raises(UserError, match="damaged"):
            finish(flags, 16, [same])


def test_stored_numbers_of_an_earlier_version_belong_to_the_words_of_their_attention(tmp_path):
    """The digest beside the words is of names in the program, which change between versions."""
    folder, values = tmp_path / "out", np.zeros(8, np.float32)
    write(folder, values, "of weights", "everything (00000001)", "bytes", [1])
    with pytest.raises(UserError, match="attention"):
        Stored.read(folder).check("bytes", None, "everything (00000002)")
    index = json.loads((folder / "logprobs.json").read_text())
    (folder / "logprobs.json").write_text(json.dumps(index | {"format": "fathom logprobs 2"}))
    Stored.read(folder).check("bytes", None, "everything (00000002)")
    with pytest.raises(UserError, match="attention"):
        Stored.read(folder).check("bytes", None, "everything, yarn (00000001)")


@pytest.mark.parametrize(("place", "value", "top_k"), [
    *(((3, 0), value, 0) for value in (0.5, 90.0, -1001.0, np.inf, -np.inf, np.nan)),
    *(((3, 0), value, 2) for value in (0.5, np.inf, np.nan)),
    *(((3, 2), value, 2) for value in (-1.0, 0.5, 2.0**31, np.inf, -np.inf, np.nan)),
    *(((3, 4), value, 2) for value in (0.5, -1001.0, np.inf, -np.inf, np.nan)),
    (3, np.nan, 2),  # a whole token of a document that fits
    ((0, 1), -1.0, 2), ((7, 3), 1.0, 2),
])  # fmt: skip
def test_stored_numbers_that_nobody_computes_are_refused_though_checksums_are_right(
    tmp_path, place, value, top_k
):
    store, _ = read(tmp_path, [{"prompt": "ab", "completion": "cdefg"}], objective="next_token")
    values = np.full((int(store.lengths.sum()), 1 + 2 * top_k), -1.0, np.float32)
    values[:, 1 : 1 + top_k] = 5
    known = ("of weights", "full", "bytes", [store.text_identity])
    column = "reference" if top_k == 0 else TEACHER
    for spoiled in (False, True):
        if spoiled:
            values[place] = value
        write(tmp_path / "out", values if top_k else values[:, 0], *known)
        refusal = pytest.raises(
            UserError, match=r"logprobs.f32 has \S+ in the .*: make the folder anew"
        )
        with refusal if spoiled else contextlib.nullcontext():
            Stored.read(tmp_path / "out").give([store], column, 16, 256)


@pytest.mark.parametrize(("objective", "field", "value", "shown"), [
    ("kto", "label", "True", '"label" must be true or false, got "True"'),
    ("grpo", "advantage", "1.0", '"advantage" must be a number within 1e9 of 0, got "1.0"'),
    ("grpo", "advantage", {"a": 1}, '"advantage" must be a number within 1e9 of 0, got {"a": 1}'),
    ("grpo", "old_logprobs", ["-1", -1], '"old_logprobs" must be a number within 1e9 of 0, got '
                                         '"-1"'),
    ("grpo", "old_logprobs", "[-1, -1]", '"old_logprobs" must be a list of numbers, got "[-1, '
                                         '-1]"'),
])  # fmt: skip
def test_a_text_in_the_place_of_a_number_is_shown_with_its_quotes(
    tmp_path, objective, field, value, shown
):
    row = (
        {"prompt": "a", "completion": "b", "label": True}
        if objective == "kto"
        else IDS | {"advantage": 1}
    )
    with pytest.raises(UserError) as error:
        read(tmp_path, [row | {field: value}], 9, objective=objective)
    assert shown in str(error.value)
