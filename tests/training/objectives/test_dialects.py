"""Rows as TRL, vLLM, verl, LLaMA-Factory, ms-swift, OpenAI and Orca write them: the same documents
as ours."""

import json

import numpy as np
import pytest

from tests.training.data.templates import CHATML
from tests.training.data.test_tokenizer import write_tokenizer
from training.data.corpus import open_stores
from training.data.sources import Reading, is_data
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.host.errors import UserError
from training.objectives.decide import decide_aim
from training.objectives.flags import ObjectiveFlags

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("chatml")
    (folder / "chat_template.jinja").write_text(CHATML)
    return load_tokenizer(write_tokenizer(folder / "tokenizer.json"))


def read(tmp_path, tokenizer, rows, **flags):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = decide_aim(ObjectiveFlags(**flags), 1000).reader(tokenizer.eos_id)
    [store] = open_stores([str(tmp_path / "a.jsonl")], tokenizer, 600, Reading(rows=reader))
    return store


def content(store):
    """Everything that a run reads of a store."""
    parts = []
    for i, length in enumerate(store.lengths.tolist()):
        parts += [*map(np.ndarray.tolist, store.read_masked(i, 0, length))]
        parts.append({name: x.tolist() for name, x in store.read_columns(i, 0, length).items()})
    return parts


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


SYSTEM = {"role": "system", "content": "be"}
PAIR = {"prompt": [user("hi")], "chosen": [says("y")], "rejected": [says("n")]}
WITH_SYSTEM = PAIR | {"prompt": [SYSTEM, user("hi")]}
OF_SHAREGPT = {"chosen": gpt("y"), "rejected": gpt("n")}
TEXTS = {"chosen": "y", "rejected": "n"}


@pytest.mark.parametrize(("row", "same"), [
    ({"conversations": [human("hi")], **OF_SHAREGPT}, PAIR),
    ({"conversations": [human("hi")], "chosen": [gpt("y")], "rejected": [gpt("n")]}, PAIR),
    ({"conversations": [human("hi")], **TEXTS}, PAIR),
    ({"conversations": [human("hi")], "system": "be", **OF_SHAREGPT}, WITH_SYSTEM),
    ({name: json.dumps(value) for name, value in (OF_SHAREGPT | {"conversations": [human("hi")]}).items()}, PAIR),
    ({"messages": [user("hi")], "chosen": says("y"), "rejected": says("n")}, PAIR),
    ({"messages": [user("hi"), says("y")], **TEXTS}, PAIR),
    ({"messages": [user("hi"), says("y")], "rejected_response": "n"}, PAIR),
    ({"messages": [user("hi"), says("y")], "rejected_response": [says("n")]}, PAIR),
    ({"messages": [user("hi"), says("y")], "rejected_messages": [user("hi"), says("n")]}, PAIR),
    ({"input": {"messages": [user("hi")], "tools": []}, "preferred_output": [says("y")],
      "non_preferred_output": [says("n")]}, PAIR),
    ({"system": "be", "question": "hi", **TEXTS}, WITH_SYSTEM),
    ({"system": "", "question": "hi", **TEXTS}, PAIR),
    ({"system": "be", "question": "hi", "chosen": [says("y")], "rejected": [says("n")]}, WITH_SYSTEM),
    ({"system": "be", "input": "hi", **TEXTS, "rating": [9, 8], "status": "tie"}, WITH_SYSTEM),
    ({"instruction": "hi", "input": "", **TEXTS}, PAIR),
    ({"instruction": "h", "input": "i", "system": "be", **TEXTS},
     WITH_SYSTEM | {"prompt": [SYSTEM, user("h\ni")]}),
    ({"instruction": "hi", "history": [["a", "b"]], **TEXTS},
     PAIR | {"prompt": [user("a"), says("b"), user("hi")]}),
    ({"prompt": "hi", "chosen": [says("y")], "rejected": [says("n")]}, PAIR),
    ({"prompt": [user("hi")], **TEXTS}, PAIR),
    ({"question": "hi", "chosen": [user("hi"), says("y")], "rejected": [user("hi"), says("n")]}, PAIR),
])  # fmt: skip
def test_pairs_of_others(tmp_path, chatml, row, same):
    wanted = content(read(tmp_path, chatml, [same], objective="simpo"))
    assert content(read(tmp_path, chatml, [row], objective="simpo")) == wanted


@pytest.mark.parametrize(("row", "same"), [
    ({"question": "hi", **TEXTS}, {"prompt": "hi", **TEXTS}),
    ({"query": "hi", **TEXTS}, {"prompt": "hi", **TEXTS}),
    ({"system": "be", "question": "hi", **TEXTS}, {"prompt": "be\n\nhi", **TEXTS}),
])  # fmt: skip
def test_questions_without_a_chat_template_are_texts(tmp_path, row, same):
    wanted = content(read(tmp_path, BYTES, [same], objective="dpo"))
    assert content(read(tmp_path, BYTES, [row], objective="dpo")) == wanted


def test_judgements_of_pairs_are_counted_and_reasoning_is_not_lost(tmp_path, chatml, caplog):
    caplog.set_level("INFO")
    row = {"system": "be", "input": "hi", **TEXTS, "rationale": "clear", "in_gsm8k_train": False}
    wanted = content(read(tmp_path, chatml, [WITH_SYSTEM], objective="simpo"))
    assert content(read(tmp_path, chatml, [row], objective="simpo")) == wanted
    assert "1 row of pairs whose rationale is not read" in caplog.text
    row = {"prompt": "hi", **TEXTS, "chosen_reasoning": "so"}
    what = (
        'has "chosen_reasoning" beside its answer: .*, or give --columns '
        "chosen=chosen,rejected=rejected"
    )
    with pytest.raises(UserError, match=what):
        read(tmp_path, chatml, [row], objective="simpo")
    for objective, fields in (
        ("kto", {"label": True}),
        ("grpo", {"old_logprobs": [-1, -1], "reward": 1}),
    ):
        with pytest.raises(UserError, match='has "thinking" beside its answer'):
            read(
                tmp_path,
                chatml,
                [{"prompt": "hi", "completion": "y", "thinking": "so"} | fields],
                objective=objective,
            )


def test_the_columns_of_a_refused_system_message_read_it(tmp_path, chatml):
    wanted = content(read(tmp_path, chatml, [WITH_SYSTEM], objective="simpo"))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "hi", "system_prompt": "be", **TEXTS}))
    reader = decide_aim(ObjectiveFlags(objective="simpo"), 1000).reader(chatml.eos_id)
    reading = Reading(rows=reader, columns="instruction=prompt,system=system_prompt")
    [store] = open_stores([str(tmp_path / "b.jsonl")], chatml, 600, reading)
    assert content(store) == wanted


OTHER = {"prompt": [user("ho")], "completion": [says("z")], "label": True}
LABELLED = {"prompt": [user("hi")], "completion": [says("y")], "label": False}


@pytest.mark.parametrize(("row", "same"), [
    ({"messages": [user("hi"), says("y")], "label": False}, LABELLED),
    ({"conversations": [human("hi"), gpt("y")], "kto_tag": False}, LABELLED),
    ({"conversations": [human("a"), gpt("b"), human("hi"), gpt("y")], "kto_tag": True},
     LABELLED | {"prompt": [user("a"), says("b"), user("hi")], "label": True}),
    ({"instruction": "hi", "input": "", "output": "y", "kto_tag": False}, LABELLED),
    ({"instruction": "hi", "output": "y", "history": [["a", "b"]], "kto_tag": False},
     LABELLED | {"prompt": [user("a"), says("b"), user("hi")]}),
    ({"system": "be", "question": "hi", "answer": "y", "label": 0}, LABELLED | {"prompt": [SYSTEM, user("hi")]}),
    ({"instruction": "hi", "response": "y", "label": False}, LABELLED),
    ({"prompt": [user("hi")], "completion": "y", "label": 0}, LABELLED),
    ({"prompt": "hi", "response": "y", "kto_tag": False}, {"prompt": "hi", "completion": "y", "label": False}),
])  # fmt: skip
def test_answers_with_labels_of_others(tmp_path, chatml, row, same):
    wanted = content(read(tmp_path, chatml, [same, OTHER], objective="kto"))
    assert content(read(tmp_path, chatml, [row, OTHER], objective="kto")) == wanted


OURS = {
    "prompt_ids": [65, 66],
    "completion_ids": [67, 68],
    "old_logprobs": [-1, -2],
    "advantage": 0.5,
}
IDS = {"prompt_token_ids": [65, 66], "token_ids": [67, 68]}
VERL = {"prompts": [65, 66], "responses": [67, 68], "old_log_probs": [-1, -2]}
PADDED = {"prompts": [0, 65, 66], "responses": [67, 68, 0], "attention_mask": [0, 1, 1, 1, 1, 0]}
RANKED = [
    {"67": {"logprob": -1, "rank": 2}, "5": {"logprob": -0.5}},
    {"68": {"logprob": -2, "rank": 1}},
]
OF_CHAT = {"content": [{"token": "C", "logprob": -1}, {"token": "D", "logprob": -2}]}
MASKED = OURS | {"completion_mask": [1, 0]}


@pytest.mark.parametrize(("row", "same"), [
    (IDS | {"logprobs": [-1, -2], "advantages": 0.5}, OURS),
    (IDS | {"logprobs": [[-1], [-2]], "advantages": [0.5, 1]}, OURS | {"advantage": [0.5, 1]}),
    (IDS | {"logprobs": RANKED, "advantages": 0.5, "text": "CD", "cumulative_logprob": -3}, OURS),
    (IDS | {"logprobs": OF_CHAT, "advantages": 0.5}, OURS),
    (IDS | {"logprobs": {"tokens": ["C", "D"], "token_logprobs": [-1, -2]}, "advantages": 0.5}, OURS),
    (IDS | {"logprobs": [[-1, -9], [-0.1, -2]], "logprob_token_ids": [[67, 1], [5, 68]], "advantages": 0.5}, OURS),
    (VERL | {"advantages": [0.5, 0.5]}, OURS | {"advantage": [0.5, 0.5]}),
    (VERL | {"response_mask": [1, 0], "advantages": 0.5}, MASKED),
    (VERL | {"response_mask": [1, 0], "loss_mask": [1, 0], "advantages": 0.5}, MASKED),
    (VERL | {"loss_mask": [0, 0, 1, 0], "advantages": 0.5}, MASKED),
    (PADDED | {"response_mask": [1, 0, 0], "old_log_probs": [-1, -2, 0], "advantages": 0.5}, MASKED),
    (OURS | {"prompt_ids": [65, 66, 0], "prompt_mask": [1, 1, 0]}, OURS),
    (OURS | {"env_mask": [1, 0]}, MASKED),
    (OURS | {"completion_mask": [1, 0], "old_logprobs": [-1, None], "advantage": [0.5, None]},
     MASKED | {"advantage": [0.5, 0], "old_logprobs": [-1, 0]}),
    (OURS | {"completion_mask": [1, 0], "old_logprobs": [-1, float("-inf")]}, MASKED | {"old_logprobs": [-1, 0]}),
    ({"prompt_ids": [65, 66], "response_ids": [67, 68], "response_logprobs": [-1, -2], "reward_score": 2},
     OURS | {"advantage": None, "reward": 2, "group": 0}),
    (VERL | {"token_level_scores": [0, 2], "uid": "a"}, OURS | {"advantage": None, "reward": 2, "group": 0}),
    ({"input": "ab", "output": "c", "gts": "d", "score": 2.0, "step": 1, "old_logprobs": [-1, -2]},
     {"prompt": "ab", "completion": "c", "reward": 2, "old_logprobs": [-1, -2]}),
    ({"prompt": "ab", "response": "c", "score": 2, "old_log_probs": [-1, -2]},
     {"prompt": "ab", "completion": "c", "reward": 2, "old_logprobs": [-1, -2]}),
])  # fmt: skip
def test_rollouts_of_others(tmp_path, row, same):
    wanted = content(read(tmp_path, BYTES, [same], objective="grpo"))
    assert content(read(tmp_path, BYTES, [row], objective="grpo")) == wanted
    (tmp_path / "b.json").write_text(json.dumps([row]))
    reading = Reading(rows=decide_aim(ObjectiveFlags(objective="grpo"), 9).reader(0))
    assert is_data(tmp_path / "b.json", reading)


def test_of_two_log_probabilities_the_policys_is_old_and_the_engines_is_written(tmp_path, caplog):
    row = VERL | {"rollout_log_probs": [-3, -4], "advantages": 1}
    with caplog.at_level("INFO"):
        store = read(tmp_path, BYTES, [row], objective="grpo")
    assert store.column("old").tolist()[2:] == [-1, -2]
    assert "rollouts whose rollout_log_probs are not read" in caplog.text
    store = read(tmp_path, BYTES, [row], objective="grpo", old_logprobs="any", truncation=2.0)
    assert store.column("written").tolist()[2:] == [-3, -4]


def test_rows_of_equal_prompts_form_groups_whose_number_is_said(tmp_path, caplog):
    rows = [IDS | {"logprobs": [-1, -2], "reward": reward} for reward in (0, 1)]
    rows += [row | {"prompt_token_ids": [66]} for row in rows]
    with caplog.at_level("INFO"):
        store = read(tmp_path, BYTES, rows, objective="dr_grpo")
    assert 'data: rows without "group": 2 groups of equal prompts' in caplog.text
    decide_aim(ObjectiveFlags(objective="dr_grpo"), 9).complete([store], 256, {})
    assert {*store.column("advantage").tolist()} == {-0.5, 0.5}
    with pytest.raises(UserError, match='has "group", unlike rows before it'):
        read(tmp_path, BYTES, [*rows, rows[0] | {"group": 1}], objective="dr_grpo")


def test_large_rewards_that_are_near_each_other_differ(tmp_path):
    rows = [OURS | {"advantage": None, "reward": reward} for reward in (1e8 + 1, 1e8)]
    store = read(tmp_path, BYTES, rows, objective="grpo")
    decide_aim(ObjectiveFlags(objective="grpo"), 9).complete([store], 256, {})
    values = store.column("advantage")
    assert values.dtype == np.float32 and values[-1] == -values[2] == pytest.approx(
        -(0.5**0.5), abs=1e-3
    )


@pytest.mark.parametrize(("scores", "words"), [
    ({"score_chosen": 4.0, "score_rejected": 4}, "pairs whose scores are equal"),
    ({"chosen_score": 4.0, "rejected_score": 4}, "pairs whose scores are equal"),
    ({"chosen_rating": 4.0, "rejected_rating": "4"}, "pairs whose scores are equal"),
    ({"chosen-rating": 1, "rejected-rating": 1}, "pairs whose scores are equal"),
    ({"chosen_avg_rating": 1, "rejected_avg_rating": 2}, "pairs whose rejected answer has the "
                                                         "higher score"),
    ({"score_chosen": 4.0, "score_rejected": 3}, "pairs\n"),
    ({"chosen_length": 4, "rejected_length": 4}, "pairs\n"),
])  # fmt: skip
def test_pairs_whose_scores_say_nothing_are_counted(tmp_path, caplog, scores, words):
    with caplog.at_level("INFO"):
        store = read(tmp_path, BYTES, [{"prompt": "hi", **TEXTS} | scores], objective="dpo")
    assert len(store.lengths) == 1 and f": 1 row of {words}" in caplog.text


def test_a_field_that_is_left_out_of_both_chats_of_a_pair_counts_once(tmp_path, chatml, caplog):
    read(tmp_path, chatml, [PAIR | {"source": "a"}] * 3, objective="dpo")
    assert 'not trained on: "source" of 3, the first in' in caplog.text


@pytest.mark.parametrize(("objective", "row", "message"), [
    ("grpo", OURS | {"advantage": None, "reward": None}, 'needs "reward" for this --objective, and '
                                                         'has null there'),
    ("grpo", OURS | {"advantage": None}, 'needs "advantage" for this --objective, and has null '
                                         'there'),
    ("grpo", IDS | {"logprobs": [-1, -2]}, 'it has "prompt_token_ids", "token_ids", "logprobs"; '
                                           '--columns reward=NAME'),
    ("grpo", IDS | {"logprobs": [[-1, -2], [-1]], "advantages": 1}, '"logprobs" has 2 numbers for '
                                                                    'a token'),
    ("grpo", IDS | {"logprobs": [{"5": -1}, -1], "advantages": 1}, "no number for the sampled "
                                                                   "token 67"),
    ("grpo", IDS | {"logprobs": [[-1, -2]] * 2, "logprob_token_ids": 5, "advantages": 1}, "has 2 numbers for a token"),
    ("grpo", IDS | {"logprobs": [-1, 3], "advantages": 1}, '"logprobs" must be log-probabilities'),
    ("grpo", MASKED | {"loss_mask": [1, 1]}, 'has "completion_mask" and "loss_mask", which differ'),
    ("grpo", OURS | {"loss_mask": [1, 1, 1]}, '"loss_mask" must be 2 numbers'),
    ("grpo", OURS | {"labels": [-100, 68]}, 'has "labels", which is not obeyed; remove it; mend'),
    ("grpo", OURS | {"prompt_mask": [[1], [0]]}, '"prompt_mask" must be 2 numbers, 0 for padding'),
    ("grpo", OURS | {"attention_mask": [1]}, '"attention_mask" must be 4 numbers'),
    ("grpo", {"prompt_token_ids": [65], "text": "a"}, 'needs "completion_ids"'),
    ("grpo", {"prompt_token_ids": [65], "outputs": [{"token_ids": [66]}]}, "write a row for each answer"),
    ("dpo", {"q": "a", "yes": "b", "no": "c"}, 'needs "chosen" and "rejected" .*--columns '
                                               'chosen=NAME,rejected=NAME'),
    ("dpo", {"messages": [user("hi")], "chosen": says("y"), "rejected": 5}, '"rejected" must be a text, a message'),
    ("dpo", {"question": "a", "history": 5, **TEXTS}, 'has a "history" that is not a list of '
                                                      'pairs'),
    ("dpo", {"instruction": "a", "input": 5, "history": [["a", "b"]], **TEXTS}, 'needs a string "input"'),
    ("dpo", {"question": "a", "context": "b", **TEXTS}, 'has "context", which is not read; write '
                                                        'it into'),
    ("dpo", {"prompt": "a", "system": "b", **TEXTS}, '"system" beside "prompt", .*; give --columns '
                                                     'instruction=prompt'),
    ("dpo", {"prompt": "a", "system_prompt": "b", **TEXTS}, "--columns "
                                                            "instruction=prompt,system=system_prompt; mend"),
    ("kto", {"prompt": "a", "completion": "c", "system": "b", "label": True}, "instruction=prompt,output=completion"),
    ("dpo", {"prompt": "a", "answers": [{"answer": "b"}]}, '; or write a row for each pair of '
                                                           '"answers"; mend'),
    ("kto", {"messages": [user("hi")], "label": True}, "last message is not the assistant's"),
    ("kto", {"prompt": "a", "completions": ["b"], "labels": [True]}, "no --objective reads"),
])  # fmt: skip
def test_one_message_ends_the_search(tmp_path, objective, row, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, BYTES, [row], objective=objective)
