"""Forms of rows: each has the tokens and masks of the chat, or of the prompt and completion, that
it stands for."""

import json
import logging

import pytest

from tests.training.data.templates import CHATML
from tests.training.data.test_packing import load_documents
from tests.training.data.test_tokenizer import write_tokenizer
from training.data.corpus import open_stores
from training.data.sources import Reading, read_documents
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.host.errors import UserError

ASK, ANSWER, MORE, LAST = (
    {"role": role, "content": content}
    for role, content in (
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("user", "1+1?"),
        ("assistant", "2"),
    )
)
TOOLS = [{"name": "add"}]
SYSTEM = {"role": "system", "content": "Be brief"}
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n"
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
    [document] = load_documents(
        str(tmp_path / "a.jsonl"), tokenizer, max(300, tokenizer.vocab_size)
    )
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
        ({"messages": json.dumps([ASK, ANSWER]), "tools": json.dumps(TOOLS)}, [ASK, ANSWER], TOOLS, "messages"),
        ({"conversations": json.dumps(said([("human", "Hi"), ("model", "Yes?")]))}, [ASK, ANSWER], None, "ShareGPT"),
        ({"prompt": json.dumps([ASK]), "completion": json.dumps([{"id": 1, **ANSWER}], indent=1)}, [ASK, ANSWER],
         None, "prompt and completion"),
        ({"messages": said([("human", "Hi"), ("gpt", "Yes?")])}, [ASK, ANSWER], None, "messages"),
        ({"messages": [ASK, {**ANSWER, "role": "model"}]}, [ASK, ANSWER], None, "messages"),
        ({"prompt": said([("human", "Hi")]), "completion": said([("gpt", "Yes?")])}, [ASK, ANSWER], None,
         "prompt and completion"),
        ({"instruction": "Hi", "input": "", "output": "Yes?", "text": "# Hi # Yes?"}, [ASK, ANSWER], None, "Alpaca"),
        ({"instruction": "Hi", "input": "you", "output": "Yes?", "system": "Be brief"},
         [SYSTEM, {**ASK, "content": "Hi\nyou"}, ANSWER], None, "Alpaca"),
        ({"instruction": "1+1?", "output": "2", "history": [["Hi", "Yes?"]]}, [ASK, ANSWER, MORE, LAST], None,
         "Alpaca"),
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
    targets = tokenizer.decode(
        [i for i, masked in zip(tokens, is_masked) if not masked], with_special=True
    )
    answers = [m["content"] for m in messages if m["role"] == "assistant" and m.get("weight") != 0]
    assert targets.replace("\n", "") == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_calls_of_sharegpt_and_of_openai_before_there_were_several(tmp_path, tokenizer):
    (tokenizer.folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    call = {"name": "add", "arguments": {"a": 1}}
    expected = [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        LAST,
    ]
    said_so = [
        ("human", "Hi"),
        ("function_call", json.dumps(call)),
        ("observation", "2"),
        ("gpt", "2"),
    ]
    older = {
        "role": "assistant",
        "content": None,
        "function_call": {**call, "arguments": '{"a": 1}'},
    }
    rows = [
        {"conversations": said(said_so)},
        {
            "messages": [
                {"role": {"human": "user"}.get(role, role), "content": text}
                for role, text in said_so
            ]
        },
        {"messages": [ASK, older, {"role": "function", "name": "add", "content": "2"}, LAST]},
        {"messages": [ASK, {"role": "assistant", "tool_calls": json.dumps([call])}, *expected[2:]]},
    ]
    tokens = read(tmp_path, tokenizer, {"messages": expected})
    assert '"name": "add"' in tokenizer.decode([i for i, masked in zip(*tokens) if not masked])
    assert all(read(tmp_path, tokenizer, row) == tokens for row in rows)


@pytest.mark.parametrize(
    "pair", [("query", "response"), ("question", "answer"), ("prompt", "response")]
)
def test_pairs_are_prompts_with_completions(tmp_path, caplog, pair):
    caplog.set_level(logging.INFO)
    tokens, is_masked = read(
        tmp_path, ByteTokenizer(), dict(zip(pair, ("Hi", "Yes?"))) | {"id": 7, "history": []}
    )
    assert bytes(tokens) == b"HiYes?" and is_masked == [True] * 2 + [False] * 4
    what = f"1 row of {pair[0]} and {pair[1]}, as prompts with completions"
    assert caplog.messages == [f"data: {tmp_path}/a.jsonl: {what}"]


@pytest.mark.parametrize(
    "columns, row, same",
    [
        ("prompt=q,completion=a", {"q": "Hi", "a": "Yes?", "prompt": "b"}, {"prompt": "Hi", "completion": "Yes?"}),
        ("prompt=completion, completion=prompt", {"prompt": "a", "completion": "b"},
         {"prompt": "b", "completion": "a"}),
        ("prompt=q,completion=a", {"q": "Hi", "a": "Yes?", "context": "b"}, {"prompt": "Hi", "completion": "Yes?"}),
        ("text=body", {"body": "a", "title": "b"}, {"text": "a"}),
        ("messages=dialog", {"dialog": [ASK, ANSWER]}, {"messages": [ASK, ANSWER]}),
        ("conversations=dialog,system=s", {"dialog": said([("human", "Hi"), ("gpt", "Yes?")]), "s": "Be brief"},
         {"messages": [SYSTEM, ASK, ANSWER]}),
        ("output=response,input=context", {"instruction": "Hi", "context": "you", "response": "b"},
         {"instruction": "Hi", "input": "you", "output": "b"}),
        ("messages=chosen", {"chosen": [ASK, ANSWER], "rejected": [ASK, LAST]}, {"messages": [ASK, ANSWER]}),
        ("completion=chosen", {"prompt": [ASK], "chosen": [ANSWER], "rejected": [LAST]}, {"messages": [ASK, ANSWER]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns(tmp_path, tokenizer, columns, row, same, suffix):
    (tmp_path / "same.jsonl").write_text(json.dumps(same))
    if suffix == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet"
        )
    [expected] = read_documents(str(tmp_path / "same.jsonl"), tokenizer, 300)
    [document] = read_documents(
        str(tmp_path / f"a.{suffix}"), tokenizer, 300, Reading(columns=columns)
    )
    assert document.tokens.tolist() == expected.tokens.tolist() and str(document.masked) == str(
        expected.masked
    )


def test_empty_fields_beside_a_form_are_no_other_meaning(tmp_path, tokenizer):
    row = {"messages": [ASK, ANSWER]}
    row_of_pair = {"prompt": "you say Hi", "completion": "Yes?"}
    shown = {"context": "Hi", "options": []}  # the prompt has it
    assert read(tmp_path, tokenizer, row_of_pair | shown) == read(tmp_path, tokenizer, row_of_pair)
    beside = {
        "functions": "[]",
        "images": [],
        "system": "",
        "documents": "null",
        "chat_template_kwargs": "{}",
    }
    assert read(tmp_path, tokenizer, row | beside) == read(tmp_path, tokenizer, row)


def test_columns_that_name_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "a", "text": "b"}')
    for columns, message in (
        ("text=body", "columns names 'body', which no row has"),
        ("history=q,text=x", "columns names 'x', which no row has"),
        (
            "txt=q",
            "columns must name each field once, .* got 'txt=q'; before each = stands one of "
            "completion, conv",
        ),
        ("text", "columns must name each field once"),
        ("text=", "columns must name each field once"),
        ("text=q,", "columns must name each field once"),
        ("text=q,text=r", "columns must name each field once"),
        ("text=q,prompt=q", "columns must name each field once"),
    ):
        with pytest.raises(UserError, match=message):
            open_stores([str(tmp_path / "a.jsonl")], ByteTokenizer(), 256, Reading(columns=columns))
    (tmp_path / "b.jsonl").write_text(
        '{"text": "c"}'
    )  # names of one path need not be those of another
    stores = open_stores(
        [str(tmp_path / f"{n}.jsonl") for n in "ba"],
        ByteTokenizer(),
        256,
        Reading(columns="text=q"),
    )
    assert [bytes(store.read(0, 0, 1).tolist()) for store in stores] == [b"c", b"a"]


def test_values_of_null_are_no_text(tmp_path, caplog):
    rows = [
        {"text": "a"},
        {"text": None, "id": 3},
        {"prompt": "a", "completion": None},
        {"messages": None},
    ]
    rows += [
        {"instruction": "a", "output": None},
        {"messages": []},
        {"question": "a", "answer": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(load_documents(str(tmp_path / "a.jsonl"), ByteTokenizer(), 256)) == 1
    assert [message.rpartition(", the")[0] for message in caplog.messages] == [
        "data: left out rows without text: 5",
        "data: left out chats without messages: 1",
    ]


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"instruction": "Hi", "output": "Yes?"}, ALPACA.format("") + "### Instruction:\nHi\n\n### Response:\n"),
        ({"instruction": "Hi", "input": "{you}", "output": "Yes?", "system": "Be brief"},
         "Be brief\n\n" + ALPACA.format(WITH_INPUT) + "### Instruction:\nHi\n\n### "
                                                      "Input:\n{you}\n\n### Response:\n"),
    ],
)  # fmt: skip
def test_alpaca_without_a_chat_template(tmp_path, caplog, row, prompt):
    caplog.set_level(logging.INFO)
    tokens, is_masked = read(tmp_path, ByteTokenizer(), row)
    assert (
        bytes(tokens).decode() == prompt + "Yes?"
        and is_masked == [True] * len(prompt) + [False] * 4
    )
    assert caplog.messages == [
        f"data: {tmp_path}/a.jsonl: 1 row of Alpaca, as prompts with completions"
    ]


@pytest.mark.parametrize("row, message", [
    ({"q": "a", "a": "b"}, 'has the fields "q", "a"; known are "text"; "prompt" and .*; --columns '
                           'text=NAME gives'),
    ({"question": "a", "answer": "b", "context": "c"}, 'has "context" beside "question" and '
                                                       '"answer", where it would'),
    ({"prompt": "a", "completion": "b", "context": "c"}, 'has "context" beside "completion", .*; '
                                                         'remove one, or give'),
    ({"instruction": "a", "output": "b", "context": "c"}, 'has "context" beside "instruction", '
                                                          'where it would be'),
    ({"instruction": "a", "output": "b", "options": ["c"]}, 'has "options" beside "instruction", '
                                                            'where it would'),
    ({"query": "a", "response": "b", "history": [["c", "d"]]},
     'has "history" beside "query" and "response", where it would be ignored; .*; --columns '
     'instruction=q'),
    ({"question": "a", "answer": "b", "context": "c"}, ".* or remove it by --columns "
                                                       "prompt=question,completion=answ"),
    ({"instruction": "a", "input": "i", "output": "b", "context": "c"}, 'has "context" .*; remove one; mend'),
    ({"input": "a", "output": "b"}, 'has the fields "input", "output"; .*; --columns '
                                    'prompt=input,completion=output'),
    ({"query": "a", "answers": "[{}]", "tools": TOOLS}, 'has the fields .*; no --columns reads '
                                                        'such rows: write what'),
    ({"input": [ASK], "output": "b", "system_prompt": "c"}, "has the fields .*; no --columns reads "
                                                            "such rows"),
    ({"one": [ASK, ANSWER], "other": [ASK, LAST]}, "has the fields .*; no --columns reads such "
                                                   "rows"),
    ({"system": "a", "chat": "USER: b"}, "has the fields .*; no --columns reads such rows"),
    ({"one,two": [ASK, ANSWER]}, 'has the fields "one,two"; .*; no --columns reads such rows'),
    ({"messages": [ASK, ANSWER, {"role": "tool", "content": "b"}]},
     'message 3 .tool. follows assistant, which calls no tool; give its calls as "tool_calls", or '
     'this message'),
    ({"prompt": "a", "completion": "b", "reasoning": "c"},
     'has "reasoning" beside its answer: \'c\', which would be ignored; write it .*, or give '
     '--columns prompt=prompt'),
    ({"query": "a", "response": "b", "Complex_CoT": "c"}, 'has "Complex_CoT" beside its answer'),
    ({"question": "a", "answer": "b", "tool_calls": [{"name": "c"}]}, 'has "tool_calls" beside its answer'),
    ({"query": "a", "response": 3}, 'needs strings "query" and "response"'),
    ({"prompt": "a", "completion": "b", "response": "c"}, 'has "response" beside "completion", '
                                                          'where it would be'),
    ({"query": "a", "response": "b", "question": "c", "answer": "d"}, 'has "answer" beside "response"'),
    ({"messages": [{"role": "model", "parts": [{"text": "a"}]}]}, 'message 1 of "messages" has '
                                                                  '"parts" and no con'),
    ({"messages": [{"role": "system", "text": "a"}, ASK, ANSWER]}, 'message 1 of "messages" has '
                                                                   '"text" and no con'),
    ({"messages": [{"role": "system", "content": "", "text": "a"}, ASK]}, 'message 1 of "messages" has "text" and'),
    ({"messages": [ASK, {"role": "assistant", "value": "a"}]}, 'message 2 of "messages" has '
                                                               '"value" and no con'),
    ({"messages": [ASK, {**ANSWER, "text": "b"}]}, 'message 2 of "messages" has "text" beside its '
                                                   'content'),
    ({"conversations": [{"from": "gpt", "value": "a", "text": "b"}]}, 'message 1 .* "text" beside its content'),
    ({"messages": [{"from": "human", "value": "a", "content": "b"}, ANSWER]}, 'message 1 of "messages" must be an'),
    ({"messages": [ASK, ANSWER], "functions": TOOLS}, 'has "functions" beside "messages", .*; give '
                                                      '--columns tools=f'),
    ({"conversations": [ASK, ANSWER], "system_prompt": "a"}, 'has "system_prompt" beside '
                                                             '"conversations"'),
    ({"messages": [ASK, ANSWER], "chat_template_kwargs": {"a": False}}, 'has "chat_template_kwargs" beside'),
    ({"question": "a", "answer": "b", "images": ["c.png"]}, 'has "images" beside "answer", where '
                                                            'it would be'),
    ({}, "has the fields none; known are"),
    ({"prompt": [ASK], "chosen": [ANSWER]}, 'has the fields "prompt", "chosen"; known are'),
    ({"conversations": "x"}, '"conversations" must be a list of objects'),
    ({"conversations": [{"from": "human"}]}, 'message 1 of "conversations" must be an object with '
                                             '"role" and'),
    ({"messages": "x"}, '"messages" must be a list of objects, or JSON of one'),
    ({"messages": '{"role": "user"}'}, '"messages" must be a list of objects, or JSON of one'),
    ({"conversations": said([("human", "a"), (["x"], "b")])}, "message 2 .* has a role that is not "
                                                              "known; known are"),
    ({"conversations": said([("human", "a"), ("function_call", "x")])}, 'calls of message 2 of "conversations" must'),
    ({"messages": [ASK, {**ANSWER, "tool_calls": [{}], "function_call": {}, "role": "tool_call"}]},
     ".* under two names"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"},
     'is a preference row, with "chosen" and "rejected": give an --objective such as dpo; or '
     '--columns comp'),
    ({"chosen": [ASK, ANSWER], "rejected": [ASK, LAST]}, "is a preference row, .*; or --columns "
                                                         "completion=chosen"),
    ({"conversations": [ASK], "chosen": ANSWER, "rejected": LAST}, "is a preference row"),
    ({"prompt": "a", "completion": "b", "label": False},
     'is a preference row, with "label": give --objective kto; or rows of the good'),
    ({"prompt": "a", "completion": "b", "kto_tag": True}, ".*give --objective kto; or rows"),
    ({"prompt": "a", "response": "b", "label": True}, 'is a preference row, with "label"'),
    ({"messages": [ASK, ANSWER], "label": True}, 'is a preference row, with "label"'),
    ({"prompt": "a", "completions": ["b"], "labels": [True]}, 'is a preference row, with '
                                                              '"completions" and "labels"'),
    ({"messages": [ASK, ANSWER], "rejected_response": "b"}, "is a preference row"),
    ({"conversations": [ASK, ANSWER], "tools": "{"}, '"tools" must be a list of objects, or JSON '
                                                     'of one'),
    ({"conversations": [ASK, ANSWER], "text": "other"}, 'has "text" beside "conversations", where '
                                                        'it would be'),
    ({"prompt": [ASK, {**ANSWER, "train": True}, MORE], "completion": [LAST]}, "message 2 .* and that it is not"),
    ({"text": "a", "weight": 0.5}, 'the row has "weight": 0.5; it must be true, false, 1 or 0'),
    ({"messages": [ASK, ANSWER], "loss_mask": [0, 1]}, r'the row has "loss_mask": \[0, 1\]; it '
                                                       r'must be true'),
    ({"prompt": "a", "completion": "b", "completion_mask": [0, 1]}, 'has "completion_mask", which '
                                                                    'is not obeyed'),
    ({"conversations": said([("human", "a"), ("gpt", "b")]), "mask": "User"}, 'has "mask", which is not obeyed'),
    ({"messages": [ASK, ANSWER], "masks": [0, 1]}, 'has "masks", which is not obeyed'),
    ({"messages": [ASK, ANSWER], "is_trained": False}, 'has "is_trained", which is not obeyed'),
    ({"messages": [ASK, ANSWER], "loss_on_turns": [0, 1]}, 'has "loss_on_turns", which is not '
                                                           'obeyed'),
    ({"instruction": "a", "output": "b", "response": "c"}, 'has "response" beside "instruction", '
                                                           'where it would'),
    ({"prompt": "a", "completion": "b", "output": "c"}, 'has "output" beside "completion", where '
                                                        'it would'),
    ({"prompt": "a", "completion": "b", "sample_weight": 0}, 'has "sample_weight", which is not '
                                                             'obeyed'),
    ({"text": "a b", "input_ids": [3, 4], "labels": [-100, 4]}, 'has "labels", which is not '
                                                                'obeyed'),
    ({"prompt": "a", "completion": [ANSWER]}, 'needs a list of messages as "prompt"'),
    ({"prompt": [ASK], "completion": "a"}, 'needs a string "prompt", where "completion" is one'),
    ({"prompt": [3], "completion": [ANSWER]}, 'message 1 of "prompt" must be an object'),
    ({"prompt": "a", "completion": "b", "tools": TOOLS}, 'has "tools" beside "completion"'),
    ({"prompt": "a", "completion": "b", "system": "c"}, 'has "system" beside "completion"'),
    ({"instruction": "a", "response": "b"}, 'needs strings "instruction" and "output"'),
    ({"instruction": "a", "output": "b", "history": [["c"]]}, 'has a "history" that is not a list '
                                                              'of pairs'),
    ({"instruction": "a", "output": "b", "text": "other"}, 'has "text" beside "instruction"'),
    ({"messages": [ASK, ANSWER], "text": "a"}, 'has "text" beside "messages"'),
    ({"prompt": json.dumps([ASK]), "completion": "a"}, 'needs a string "prompt"'),
    ({"prompt": "a", "completion": json.dumps([ANSWER])}, 'needs a list of messages as "prompt"'),
    ({"text": json.dumps([ASK, ANSWER])}, 'has messages as a text in "text"; --columns '
                                          'messages=text reads'),
    ({"prompt": "a", "response": json.dumps([ANSWER])},
     'has messages as a text in "response"; write them as "messages", with the question'),
    ({"messages": str([ASK, ANSWER])}, '"messages" has messages that are no JSON, as of pandas; '
                                       'write them by json'),
    ({"prompt": str([ASK]), "completion": str([ANSWER])}, 'has messages in "prompt" that are no '
                                                          'JSON, as of pandas'),
])  # fmt: skip
def test_refusals(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: {message}") as error:
        read(tmp_path, tokenizer, row)
    assert "\n" not in str(error.value)


PREFERRED = {"chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("row", [
    {"prompt": "a", **PREFERRED},
    {"prompt": [ASK], "chosen": [ANSWER], "rejected": [LAST]},
    {"question": "a", **PREFERRED},
    {"query": "a", **PREFERRED},
    {"system": "s", "question": "a", **PREFERRED},
    {"instruction": "a", "input": "i", **PREFERRED},
])  # fmt: skip
def test_the_hint_of_a_preference_row_reads_its_good_answer(tmp_path, tokenizer, row):
    with pytest.raises(UserError, match="an --objective such as dpo; or --columns") as error:
        read(tmp_path, tokenizer, row)
    columns = str(error.value).partition("--columns ")[2].partition(" ")[0]
    [document] = read_documents(str(tmp_path / "a.jsonl"), tokenizer, 300, Reading(columns=columns))
    answer = tokenizer.decode(document.tokens[~document.masked])
    good = row["chosen"] if isinstance(row["chosen"], str) else ANSWER["content"]
    assert answer.strip().startswith(good)


@pytest.mark.parametrize("row", [
    {"conversations": said([("human", "a")]), "chosen": ANSWER, "rejected": LAST},
    {"prompt": "a", "chosen": [ANSWER], "rejected": [LAST]},
    {"messages": [ASK, ANSWER], "rejected_response": "b"},
])  # fmt: skip
def test_no_hint_names_columns_that_would_be_refused(tmp_path, tokenizer, row):
    with pytest.raises(UserError, match="give an --objective such as dpo") as error:
        read(tmp_path, tokenizer, row)
    assert "--columns" not in str(error.value)


@pytest.mark.parametrize(("row", "columns"), [
    ({"conversation": [ASK, ANSWER], "model": "m", "redacted": False}, "messages=conversation"),
    ({"Prompt": "Hi", "Completion": "Yes?"}, "prompt=Prompt,completion=Completion"),
    ({"input": "Hi", "output": "Yes?"}, "prompt=input,completion=output"),
    ({"problem": "Hi", "solution": "Yes?", "source": "s"}, "prompt=problem,completion=solution"),
    ({"Question": "Hi", "Complex_CoT": "so", "Response": "Yes?"}, "prompt=Question,completion=Response"),
    ({"id": 1, "system_prompt": "Be", "question": "Hi", "response": "Yes?"},
     "instruction=question,output=response,system=system_prompt"),
    ({"instruction": "Hi", "context": "", "response": "Yes?"}, "output=response,input=context"),
    ({"instruction": "Hi", "context": "there", "response": "Yes?"}, "output=response,input=context"),
    ({"query": "Hi", "response": "Yes?", "history": [["a", "b"]]}, "instruction=query,output=response"),
    ({"question": "Hi", "answer": "Yes?", "cot": "so"}, "prompt=question,completion=answer"),
    ({"prompt": "Hi", "completion": "Yes?", "cot": "so"}, "prompt=prompt,completion=completion"),
])  # fmt: skip
def test_the_columns_of_a_refusal_read_the_row(tmp_path, tokenizer, caplog, row, columns):
    """A refusal ends the search. Reasoning that is left out by --columns is counted."""
    with pytest.raises(ValueError, match=f"--columns {columns}[ ;]"):
        read(tmp_path, tokenizer, row)
    caplog.clear()
    reading = Reading(columns=columns)
    [store] = open_stores(
        [str(tmp_path / "a.jsonl")], tokenizer, max(300, tokenizer.vocab_size), reading
    )
    tokens, masked = store.read_masked(0, 0, int(store.lengths[0]))
    text = tokenizer.decode([i for i, is_masked in zip(tokens.tolist(), masked) if not is_masked])
    assert "Yes?" in text and ("of rows: 1, the first in" in caplog.text) == bool(
        {"cot", "Complex_CoT"} & row.keys()
    )


def test_questions_with_a_system_message_are_chats(tmp_path, tokenizer):
    chat = read(tmp_path, tokenizer, {"messages": [SYSTEM, ASK, ANSWER]})
    row = {"question": ASK["content"], "answer": ANSWER["content"], "system": SYSTEM["content"]}
    assert read(tmp_path, tokenizer, row) == chat
    tokens, is_masked = read(tmp_path, ByteTokenizer(), row)
    prompt = f"{SYSTEM['content']}\n\n{ASK['content']}"
    assert bytes(tokens).decode() == prompt + ANSWER["content"] and sum(is_masked) == len(prompt)
    (tmp_path / "b.jsonl").write_text('{"question": "a", "answer": "b", "system_prompt": "c"}')
    with pytest.raises(UserError, match="give --columns system=system_prompt"):
        [*read_documents(str(tmp_path / "b.jsonl"), tokenizer, 300)]
    [document] = read_documents(
        str(tmp_path / "b.jsonl"), tokenizer, 300, Reading(columns="system=system_prompt")
    )
    assert "c" in tokenizer.decode(document.tokens)


@pytest.mark.parametrize(
    "row", [{"token_ids": [1], "logprobs": [-1]}, {"completion_ids": [1], "advantage": 1}]
)
def test_a_rollout_without_an_objective_is_named(tmp_path, tokenizer, row):
    with pytest.raises(UserError, match=r"is a rollout, .* give an --objective such as grpo; mend"):
        read(tmp_path, tokenizer, row)


def test_texts_of_json_that_are_no_messages_stay_texts(tmp_path, tokenizer):
    for text in ('[{"role": "CEO", "name": "Ann"}]', '[{"value": 3}]', "[{}]", "[{role: 'user'}]"):
        tokens, masked = read(tmp_path, ByteTokenizer(), {"prompt": "a", "completion": text})
        assert bytes(tokens[1:]).decode() == text and masked == [True] + [False] * len(text)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_that_say_they_are_not_trained_on(tmp_path, caplog, suffix):
    rows = [
        {"text": "a", "loss": True},
        {"text": "b", "loss": False},
        {"text": "c"},
        {"text": "d", "loss": False},
    ]
    file = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    texts = [
        bytes(document.tokens.tolist())
        for document in load_documents(str(file), ByteTokenizer(), 256)
    ]
    assert texts == [b"a", b"c"]
    assert "data: left out rows that say they are not trained on: 2, the first in " in caplog.text
