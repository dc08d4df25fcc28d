"""Forms of rows: each has the tokens and masks of the chat, or of the prompt and completion, that it stands for."""

import json
import logging

import pytest

from tests.training.data.test_chat import CHATML
from tests.training.data.test_packing import load_documents
from tests.training.data.test_tokenizer import write_tokenizer
from training.data.tokenizer import ByteTokenizer, load_tokenizer

ASK, ANSWER, MORE, LAST = (
    {"role": role, "content": content}
    for role, content in (("user", "Hi"), ("assistant", "Yes?"), ("user", "1+1?"), ("assistant", "2"))
)
TOOLS = [{"name": "add"}]
SYSTEM = {"role": "system", "content": "Be brief"}
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
WITH_INPUT = ", paired with an input that provides further context"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder / "tokenizer.json")
    listed = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(listed + CHATML)
    return load_tokenizer(str(folder))


def said(values):
    return [{"from": name, "value": value} for name, value in values]


def read(tmp_path, tokenizer, row):
    """Returns (tokens, is_masked) of a row."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    [document] = load_documents(str(tmp_path / "a.jsonl"), tokenizer, max(300, tokenizer.vocab_size))
    return document.tokens.tolist(), document.masked.tolist()


@pytest.mark.parametrize(
    "row, messages, tools, name",
    [
        ({"conversations": said([("human", "Hi"), ("gpt", "Yes?"), ("user", "1+1?"), ("gpt", "2")])},
         [ASK, ANSWER, MORE, LAST], None, "ShareGPT"),
        ({"conversations": said([("system", "Be brief"), ("human", "Hi"), ("gpt", "Yes?")]), "id": 7},
         [SYSTEM, ASK, ANSWER], None, "ShareGPT"),
        ({"conversations": [ASK, ANSWER], "system": "Be brief", "tools": json.dumps(TOOLS)},
         [SYSTEM, ASK, ANSWER], TOOLS, "ShareGPT"),
        ({"conversations": [said([("human", "Hi")])[0], {"from": "gpt", "value": "Yes?", "loss": False}, MORE, LAST]},
         [ASK, {**ANSWER, "weight": 0}, MORE, LAST], None, "ShareGPT"),
        ({"conversations": said([("human", "Hi"), ("gpt", "<tool_call>a</tool_call>"), ("tool", "b"), ("gpt", "2")])},
         [ASK, {**ANSWER, "content": "<tool_call>a</tool_call>"}, {"role": "tool", "content": "b"}, LAST], None,
         "ShareGPT"),
        ({"prompt": [ASK], "completion": [ANSWER]}, [ASK, ANSWER], None, "prompt and completion"),
        ({"prompt": [SYSTEM, ASK, ANSWER, MORE], "completion": [LAST], "tools": TOOLS},
         [SYSTEM, ASK, {**ANSWER, "weight": 0}, MORE, LAST], TOOLS, "prompt and completion"),
        ({"prompt": [ASK], "completion": [{**ANSWER, "weight": 0}, MORE, LAST]},
         [ASK, {**ANSWER, "weight": 0}, MORE, LAST], None, "prompt and completion"),
        ({"instruction": "Hi", "input": "", "output": "Yes?", "text": "# Hi # Yes?"}, [ASK, ANSWER], None, "Alpaca"),
        ({"instruction": "Hi", "input": "you", "output": "Yes?", "system": "Be brief"},
         [SYSTEM, {**ASK, "content": "Hi\nyou"}, ANSWER], None, "Alpaca"),
        ({"messages": [ASK, ANSWER], "tools": json.dumps(TOOLS), "text": "x Hi y Yes? z"}, [ASK, ANSWER], TOOLS,
         "messages"),
    ],
)  # fmt: skip
def test_chats(tmp_path, tokenizer, caplog, row, messages, tools, name):
    expected = read(tmp_path, tokenizer, {"messages": messages, "tools": tools})
    caplog.set_level(logging.INFO)
    tokens, is_masked = read(tmp_path, tokenizer, row)
    assert (tokens, is_masked) == expected
    assert caplog.messages == [f"data: {tmp_path}/a.jsonl: 1 row of {name}, as chats"]
    targets = tokenizer.decode([i for i, masked in zip(tokens, is_masked) if not masked], with_special=True)
    answers = [m["content"] for m in messages if m["role"] == "assistant" and m.get("weight") != 0]
    assert targets.replace("\n", "") == "".join(f"{answer}<|im_end|>" for answer in answers)


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"instruction": "Hi", "output": "Yes?"}, ALPACA.format("") + "### Instruction:\nHi\n\n### Response:\n"),
        ({"instruction": "Hi", "input": "{you}", "output": "Yes?", "system": "Be brief"},
         "Be brief\n\n" + ALPACA.format(WITH_INPUT) + "### Instruction:\nHi\n\n### Input:\n{you}\n\n### Response:\n"),
    ],
)  # fmt: skip
def test_alpaca_without_a_chat_template(tmp_path, caplog, row, prompt):
    caplog.set_level(logging.INFO)
    tokens, is_masked = read(tmp_path, ByteTokenizer(), row)
    assert bytes(tokens).decode() == prompt + "Yes?" and is_masked == [True] * len(prompt) + [False] * 4
    assert caplog.messages == [f"data: {tmp_path}/a.jsonl: 1 row of Alpaca, as prompts with completions"]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": "a", "answer": "b"}, 'has the fields "question", "answer"; known are "text"; "prompt" and'),
        ({}, "has the fields none; known are"),
        ({"prompt": [ASK], "chosen": [ANSWER]}, 'has the fields "prompt", "chosen"; known are'),
        ({"conversations": "x"}, '"conversations" must be a list of objects'),
        ({"conversations": [{"from": "human"}]}, '"conversations" must be a list of objects'),
        ({"conversations": []}, '"messages" is an empty list'),
        ({"conversations": said([("gpt", "a")])}, "message 1 .assistant. follows nothing"),
        ({"conversations": said([("human", "a"), (["x"], "b")])}, "message 2 .* follows user"),
        ({"conversations": [ASK, ANSWER], "tools": "{"}, '"tools" must be a list of objects, or JSON of one'),
        ({"conversations": [ASK, ANSWER], "text": "other"}, 'has "text" beside "conversations", where it would be'),
        ({"prompt": [ASK, {**ANSWER, "train": True}, MORE], "completion": [LAST]}, "message 2 .* and that it is not"),
        ({"text": "a", "weight": 0.5}, 'the row has "weight": 0.5; it must be true, false, 1 or 0'),
        ({"messages": [ASK, ANSWER], "loss_mask": [0, 1]}, r'the row has "loss_mask": \[0, 1\]; it must be true'),
        ({"prompt": "a", "completion": "b", "completion_mask": [0, 1]}, 'has "completion_mask", which is not obeyed'),
        ({"conversations": said([("human", "a"), ("gpt", "b")]), "mask": "User"}, 'has "mask", which is not obeyed'),
        ({"prompt": "a", "completion": [ANSWER]}, 'needs a list of messages as "prompt"'),
        ({"prompt": [ASK], "completion": "a"}, 'needs a string "prompt"'),
        ({"prompt": [3], "completion": [ANSWER]}, "message 1 .None. follows nothing"),
        ({"prompt": "a", "completion": "b", "tools": TOOLS}, 'has "tools" beside "completion"'),
        ({"prompt": "a", "completion": "b", "system": "c"}, 'has "system" beside "completion"'),
        ({"instruction": "a", "response": "b"}, 'needs strings "instruction" and "output"'),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, 'has a "history", which is not read'),
        ({"instruction": "a", "output": "b", "text": "other"}, 'has "text" beside "instruction"'),
        ({"messages": 3, "text": "a"}, 'has "text" beside "messages"'),
    ],
)
def test_refusals(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: {message}") as error:
        read(tmp_path, tokenizer, row)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_that_say_they_are_not_trained_on(tmp_path, caplog, suffix):
    rows = [{"text": "a", "loss": True}, {"text": "b", "loss": False}, {"text": "c"}, {"text": "d", "loss": False}]
    file = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    texts = [bytes(document.tokens.tolist()) for document in load_documents(str(file), ByteTokenizer(), 256)]
    assert texts == [b"a", b"c"]
    assert "data: left out rows that say they are not trained on: 2, the first in " in caplog.text
