"""--show_batch of rows that objectives read, of small data, and of tokenizers without a model."""

import json

import pytest

import train
from tests.training.data.test_tokenizer import write_tokenizer

PAIRS = [{"prompt": f"what {i}? ", "chosen": "good", "rejected": "bad"} for i in range(3)]
PAIR = """trunk: 7 tokens, shared by 2 answers
what 2?
leaf 1: chosen, 5 of 6 tokens trained on
 [[good ]]
leaf 2: rejected, 4 of 5 tokens trained on
 [[bad ]]
"""
LABELLED = [{"prompt": f"q{i % 2}", "completion": "a" * i, "label": i > 2} for i in range(1, 5)]
IDS = {"prompt_ids": [65, 66], "completion_ids": [67, 68]}
GROUP = [IDS | {"reward": reward, "group": "g"} for reward in (1, 3)]
OF_TOKENS = [IDS | {"advantage": [0.5, -2]}] * 2


def show(tmp_path, capsys, rows, *flags):
    file, run = tmp_path / "a.jsonl", tmp_path / "run"
    file.write_text("\n".join(map(json.dumps, rows)))
    where = ["--data", str(file), "--output_dir", str(run), "--device", "cpu"]
    capsys.readouterr()
    status = train.main([*where, "--context_length", "64", "--show_batch", *flags])
    assert not run.exists()
    return status, "".join(capsys.readouterr())


@pytest.mark.parametrize(("objective", "rows", "texts"), [
    *((name, PAIRS, [PAIR]) for name in ("dpo", "ipo", "simpo", "orpo")),
    ("kto", LABELLED, ["leaf 1: desirable, 4 of 5", "leaf 3: undesirable, 2 of 3",
                       "leaf 2: answer to another prompt, for the KL, 3 of 4"]),
    ("grpo", GROUP * 2, ["leaf 1: advantage -0.866, reward 1, group g, 2 of 3",
                         "leaf 2: advantage 0.866, reward 3, group g, 2 of 3"]),
    ("dr_grpo", [GROUP[0], IDS | {"reward": 1, "group": "g"}], ["advantage 0, reward 1, group g"]),
    *((name, OF_TOKENS, ["trained on: advantages -2 to 0.5\nAB[[CD]]"])
      for name in ("dapo", "gspo", "cispo", "importance_sampling")),
    ("weighted", [{"text": "abc", "weight": 0.5}], ["3 of them trained on: weight 0.5\na[[bc ]]"]),
    ("distill", [{"text": "abc"}], ["a[[bc ]]"]),
])  # fmt: skip
def test_an_objective_needs_no_stored_numbers_to_be_looked_at(
    tmp_path, capsys, objective, rows, texts
):
    """Nor do rollouts need old log-probabilities."""
    flags = ["--beta", "0.1"] if objective == "gspo" else []
    status, shown = show(tmp_path, capsys, rows, "--objective", objective, *flags)
    assert status == 0 and "sequence 0: " in shown
    assert all(text.replace(" ]]", "\0]]") in shown for text in texts), shown


@pytest.mark.parametrize(("count", "others"), [
    (20, ""), (21, "1 more document: --show_batch batch.html shows all"),
    (30, "10 more documents: --show_batch"),
])  # fmt: skip
def test_a_terminal_shows_the_first_documents_of_a_sequence_and_counts_the_others(
    tmp_path, capsys, count, others
):
    (tmp_path / "held_out.jsonl").write_text('{"text": "B"}\n')
    packed = [
        "--packing",
        "best_fit",
        "--batch_size",
        "1",
        "--validation_data",
        str(tmp_path / "held_out.jsonl"),
    ]
    status, shown = show(tmp_path, capsys, [{"text": "A"}] * count, *packed)
    documents = shown.split("\n--- ")[1:]
    assert status == 0 and sum("tokens 0 to 1" in each for each in documents) == 20
    assert documents[20:] == [] if not others else documents[20].startswith(others)
    page = tmp_path / "batch.html"
    assert (
        show(tmp_path, capsys, [{"text": "A"}] * count, *packed, "--show_batch", str(page))[0] == 0
    )
    assert page.read_text().count("<pre>") == count


def test_a_page_has_a_heading_for_each_answer(tmp_path, capsys):
    page = tmp_path / "batch.html"
    status, _ = show(tmp_path, capsys, PAIRS, "--objective", "dpo", "--show_batch", str(page))
    text = page.read_text()
    leaf = "<h4>leaf 1: chosen, 5 of 6 tokens trained on</h4>\n<pre>\n <mark>good"
    assert status == 0 and text.count("<h4>") == 6 and leaf in text
    assert text.count("<pre>") == text.count("</pre>") == 6


def test_numbers_of_rollouts_are_checked_where_they_are(tmp_path, capsys):
    rows = [IDS | {"advantage": 1, "old_logprobs": [-1]}]
    status, shown = show(tmp_path, capsys, rows, "--objective", "grpo")
    assert status == 1 and '"old_logprobs" has 1 numbers, the completion 2 tokens' in shown


@pytest.mark.parametrize(("rows", "flags", "text"), [
    ([{"text": f"text {i}"} for i in range(10)], [], "do not fill one context_length of 64"),
    ([{"text": "one"}], [], "o[[n]]"),
    ([{"prompt": "a", "completion": "b"}], [], "a[[b\0]]"),
    ([{"text": "long " * 40}] * 3, ["--overlong", "split", "--packing", "best_fit"], "one step takes 8 sequences"),
    ([{"text": "long " * 40}] * 3, ["--packing", "concatenate"], "one step takes 8 sequences"),
    (PAIRS[:1], ["--objective", "dpo"], "leaf 2: rejected"),
    (LABELLED[:1], ["--objective", "kto"], "2 of them trained on: undesirable\nq1[[a\0]]"),
    ([row | {"prompt": "q"} for row in LABELLED], ["--objective", "kto"], "kto needs rows of two prompts"),
])  # fmt: skip
def test_few_rows_are_shown_all(tmp_path, capsys, caplog, rows, flags, text):
    """A run of them is refused. A step takes eight sequences."""
    status, shown = show(tmp_path, capsys, rows, *flags)
    assert status == 0 and "sequence 0: " in shown
    assert text in shown + caplog.text


def test_words_are_shown_whatever_ids_the_model_has(tmp_path, capsys):
    """A tokenizer has more ids than the model of no --init_from."""
    tokenizer = write_tokenizer(tmp_path / "words.json", filler=400)
    status, shown = show(tmp_path, capsys, [{"text": "he"}] * 3, "--tokenizer", tokenizer)
    assert status == 0 and "trained on" in shown
