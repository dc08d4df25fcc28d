"""Chats: masks written by hand for several families of templates, and transformers' mask where
turns are marked."""

import itertools
import json
import logging
import re
import signal
import subprocess
import sys
from datetime import datetime
from decimal import Decimal

import pytest

from tests.training.data.templates import (
    CHATML,
    DEEPSEEK,
    DEEPSEEK_R1,
    GEMMA3,
    LLAMA3,
    MARKED,
    MINISTRAL3,
    MISTRAL,
    NEMOTRON3,
    OLMO3,
    PHI3,
    QWEN3,
    QWEN35,
    SMOLLM3,
)
from tests.training.data.test_packing import load_documents
from tests.training.data.test_tokenizer import write_tokenizer
from training.checkpoint.weights import read_companions
from training.data.chat import ChatTemplate
from training.data.masks import FLAGS
from training.data.template import template_hash
from training.data.tokenizer import load_tokenizer

SPECIAL = [
    "<start_of_turn>", "<end_of_turn>", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|user|>",
    "<|assistant|>", "<|end|>",
    "<|endoftext|>",
]  # fmt: skip
SPECIAL += [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<s>",
    "</s>",
]


def messages(*contents, **last):
    """Returns messages with these contents, of user and assistant by turns; `last` adds to the last
    one."""
    made = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return [*made[:-1], {**made[-1], **last}]


TALK = messages("Hi", "Hello. ", " How?", "So.\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_file(write_tokenizer(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}'
    )
    return folder


@pytest.fixture
def shown(folder):
    """A function that returns a chat's text with its trained parts in brackets."""

    def show(template, record, reasoning="template"):
        record = {"messages": record} if isinstance(record, list) else record
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(str(folder))
        ids, masked = ChatTemplate(tokenizer, reasoning).encode(record)
        text, before = "", True
        for i, is_masked in zip([*ids.tolist(), None], [*masked, True]):
            text += "" if is_masked == before else "[]"[int(is_masked)]
            text += "" if i is None else tokenizer.decode([i], with_special=True)
            before = is_masked
        return text

    return show


def test_turns_of_three_families(shown):
    assert shown(CHATML, TALK) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello. <|im_end|>]\n"
        "<|im_start|>user\n How?<|im_end|>\n<|im_start|>assistant\n[So.\n<|im_end|>]\n"
    )
    assert shown(LLAMA3, [{"role": "system", "content": "S"}, *TALK]) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello.<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[So.<|eot_id|>]"
    )
    assert shown(QWEN3, TALK) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello. <|im_end|>]\n"
        "<|im_start|>user\n "
        "How?<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nSo.\n<|im_end|>]\n"
    )
    # Words that the template writes at the start of an answer, here "<think>", are not targets.
    assert (
        shown(DEEPSEEK, messages("Hi", "a", "b", "c"))
        == "<User>Hi<Assistant>[a</s>]<User>b<Assistant>[c</s>]"
    )
    given = DEEPSEEK.replace(".split('</think>')[-1]", "")
    assert shown(given, messages("Hi", "<think>\nx</think>a", "b", "c")) == (
        "<User>Hi<Assistant><think>\n[x</think>a</s>]<User>b<Assistant>[c</s>]"
    )
    assert (
        shown(MISTRAL, TALK) == "<s>[INST] Hi [/INST][ Hello. </s>][INST]  How? [/INST][ So.\n</s>]"
    )
    assert shown(PHI3, TALK) == (
        "<|user|>\nHi<|end|>\n<|assistant|>\n[Hello. <|end|>]\n"
        "<|user|>\n How?<|end|>\n<|assistant|>\n[So.\n<|end|>]\n<|endoftext|>"
    )
    no_prompt = CHATML[: CHATML.index("{% if add")]
    assert shown(no_prompt, TALK) == shown(CHATML, TALK)  # found by the text before both answers


def test_turns_of_a_template_that_begins_answers_and_changes_earlier_turns(shown):
    """Loops that look ahead, and loops within a message, end no turn."""
    chat = [
        {"role": "assistant", "content": "Ask"},
        *TALK[:3],
        {**TALK[3], "reasoning_content": "t"},
    ]
    assert shown(QWEN35, chat) == (
        "<|im_start|>assistant\n[Ask<|im_end|>]\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>]\n"
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n<think>\n[t\n</think>\n\nSo.<|im_end|>]\n"
    )
    with pytest.raises(ValueError, match=r"a message has '\\ufdd0' in it"):
        shown(QWEN35, messages("Hi", "a\ufdd0"))


@pytest.fixture
def theirs(folder):
    """transformers' tokenizer of the folder."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>"
    )
    tokenizer._tokenizer.no_truncation()
    tokenizer._tokenizer.no_padding()
    return tokenizer


def test_turns_are_what_messages_add_to_the_text(shown, theirs):
    """The text of messages[: i + 1] has a turn more than the text of messages[:i] with the words
    that ask for it."""
    for template, talk in itertools.product(
        (CHATML, LLAMA3, GEMMA3), (TALK, TALK + TALK, TALK[:2] * 3)
    ):
        expected, text = "", ""
        for i in range(0, len(talk), 2):
            options = {"chat_template": template, "tokenize": False}
            asked = theirs.apply_chat_template(talk[: i + 1], add_generation_prompt=True, **options)
            answered = theirs.apply_chat_template(talk[: i + 2], **options)
            turn = answered.removeprefix(asked)
            expected += asked.removeprefix(text) + f"[{turn.rstrip()}]" + turn[len(turn.rstrip()) :]
            text = answered
        assert shown(template, talk) == expected


def test_a_system_message_in_the_first_question(shown):
    chat = [{"role": "system", "content": " S\n"}, *TALK]
    assert shown(GEMMA3, chat) == (
        "<s><start_of_turn>user\n "
        "S\n\n\nHi<end_of_turn>\n<start_of_turn>model\n[Hello.<end_of_turn>]\n"
        "<start_of_turn>user\nHow?<end_of_turn>\n<start_of_turn>model\n[So.<end_of_turn>]\n"
    )
    with pytest.raises(ValueError, match="fails: roles must alternate"):
        shown(GEMMA3, [{"role": "developer", "content": "D"}, *TALK])
    with pytest.raises(
        ValueError, match=r"does not write the content of message 1 \(system\): ' S\\n'"
    ):
        shown(GEMMA3.replace("messages[0].content + ", ""), chat)


def test_marks_that_have_the_header_inside(shown, folder):
    assert shown(
        SMOLLM3,
        [{"role": "system", "content": "S"}, *TALK[:2], TALK[2], {**TALK[3], "content": "\nSo"}],
    ) == (
        "<|im_start|>system\n01 January 2026\nS<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello. <|im_end|>]\n"
        "<|im_start|>user\n How?<|im_end|>\n<|im_start|>assistant\n[So<|im_end|>]\n"
    )
    prompt = ChatTemplate(load_tokenizer(str(folder))).prompt(TALK[:3])
    assert prompt.endswith(
        "assistant\nHello. <|im_end|>\n<|im_start|>user\n How?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_last_turn_that_ends_by_another_token(shown):
    think = [
        {**m, "content": "<think>t</think>" + m["content"]} if m["role"] == "assistant" else m
        for m in TALK
    ]
    for reasoning in ("template", "keep"):
        assert shown(OLMO3, think, reasoning) == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>[t</think>Hello. "
            "<|im_end|>]\n"
            "<|im_start|>user\n "
            "How?<|im_end|>\n<|im_start|>assistant\n<think>[t</think>So.\n<|endoftext|>]"
        )
    with pytest.raises(ValueError, match=r"a message has '<\|endoftext\|>' in it"):
        shown(OLMO3, messages("a", "b<|endoftext|>"))
    # Here the next turn ends a turn, and the chat has an end: nothing ends a turn.
    unended = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|endoftext|>"
    )
    with pytest.raises(ValueError, match="does not show where the assistant's turns begin and end"):
        shown(unended + "{% if add_generation_prompt %}<|assistant|>{% endif %}", TALK)


def test_answers_that_follow_results_without_a_header(shown):
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a":1}'}}
    tool = {"role": "tool", "content": "2"}
    asked = [TALK[0], {**TALK[1], "content": None, "tool_calls": [call, call]}, tool, tool]
    assert shown(MINISTRAL3, [*asked, {**TALK[1], "tool_calls": [call]}, tool, TALK[3], *TALK]) == (
        '<s>[INST]Hi[/INST][[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 1}</s>]'
        "[TOOL_RESULTS]2[/TOOL_RESULTS][TOOL_RESULTS]2[/TOOL_RESULTS]"
        '[Hello. [TOOL_CALLS]add{"a": 1}</s>][TOOL_RESULTS]2[/TOOL_RESULTS][So.\n</s>]'
        "[INST]Hi[/INST][Hello. </s>][INST] How?[/INST][So.\n</s>]"
    )
    with pytest.raises(ValueError, match=r"a message has '\[/TOOL_RESULTS\]' in it"):
        shown(MINISTRAL3, [*asked[:3], {**tool, "content": "[/TOOL_RESULTS]"}, TALK[3]])


def test_reasoning_in_parts_of_the_content(shown):
    parts = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Hello."}]
    expected = "<s>[INST]Hi[/INST][[THINK]so[/THINK]Hello.</s>]"
    assert shown(MINISTRAL3, messages("Hi", parts)) == expected
    assert shown(MINISTRAL3, messages("Hi", "Hello.", reasoning_content="so")) == expected
    assert "<think>\nso\n</think>\n\nHello." in shown(QWEN3, messages("Hi", parts))
    with pytest.raises(
        ValueError,
        match="reasoning of message 2: 'so'; write it into the content as the model does",
    ):
        shown(LLAMA3, messages("Hi", parts))  # it would print the list
    for wrong in (parts[::-1], [{"type": "image"}], [3], {}, 3):
        with pytest.raises(
            ValueError, match=r"message 2 \(assistant\) has a content that is no text"
        ):
            shown(MINISTRAL3, messages("Hi", wrong))


def test_calls_of_any_form_reach_the_template_in_one(shown):
    """A function stands under "function", and its arguments are an object: Llama's template would
    quote a string."""
    template = LLAMA3.replace(
        "{{ m.content | trim }}",
        "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | "
        "trim }}{% endif %}",
    ).replace("{{ bos_token }}", "{% if tools is not none %}{{ tools | tojson }}{% endif %}")
    inner = {"name": "add", "arguments": {"a": 1}}
    texts = set()
    for call in (
        inner,
        {"function": inner},
        {"name": "add", "arguments": '{"a":1}'},
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": ' {"a": 1}\n'}},
    ):
        chat = [
            TALK[0],
            {**TALK[1], "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            TALK[3],
        ]
        texts.add(shown(template, {"messages": chat, "tools": [{"name": "add"}]}))
    [text] = texts
    assert text.startswith('[{"type": "function", "function": {"name": "add"}}]')
    assert '[{"name": "add", "arguments": {"a": 1}}<|eot_id|>]' in text
    for arguments in ("[1]", "x", "[" * 100_000, "", "null", "3", [1], 3):
        called = {**TALK[1], "content": "", "tool_calls": [{"name": "add", "arguments": arguments}]}
        with pytest.raises(
            ValueError, match=r'a call of message 2 .* has "arguments": .*; they must be an object'
        ):
            shown(template, [TALK[0], called, {"role": "tool", "content": "2"}, TALK[3]])
    null = {
        **TALK[1],
        "content": "",
        "tool_calls": [{"id": None, "function": {"name": "add", "arguments": None}}],
    }
    text = shown(template, [TALK[0], null, {"role": "tool", "content": "2"}, TALK[3]])
    assert '[{"name": "add"}<|eot_id|>]' in text  # null is no value
    nulls = [
        {**m, "tool_calls": None, "name": None} for m in TALK
    ]  # rows of a table have all fields
    none = [{**m, "tool_calls": []} for m in TALK]
    plain = shown(template, TALK)
    assert (
        shown(template, nulls)
        == shown(template, none)
        == shown(template, {"messages": TALK, "tools": []})
        == plain
    )


def test_tools_and_reasoning(shown):
    call = {"name": "add", "arguments": {"a": "\u00e9<1>"}}
    record = {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {
                "role": "assistant",
                "reasoning_content": "use it",
                "content": "",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "2"},
            {
                "role": "assistant",
                "reasoning_content": "two",
                "content": [{"type": "text", "text": "It is 2"}],
            },
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "reasoning_content": "polite", "content": "Bye"},
        ],
        "tools": [{"name": "add"}],
    }
    parts = (
        '<|im_start|>system\n{"name": '
        '"add"}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n[',
        '<tool_call>{"name": "add", "arguments": {"a": "\u00e9<1>"}}</tool_call><|im_end|>]\n'
        "<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n[",
        "It is 2<|im_end|>]\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n[",
        "<think>\npolite\n</think>\n\nBye<|im_end|>]\n",
    )
    # Each token of a part of a character decodes to a replacement character.
    plain = "".join(parts).replace("\u00e9", "\ufffd\ufffd")
    assert shown(QWEN3, record) == shown(QWEN3, record, "drop") == plain
    kept = shown(QWEN3, record, "keep")
    assert kept == "".join(
        [
            parts[0],
            "<think>\nuse it\n</think>\n\n",
            parts[1],
            "<think>\ntwo\n</think>\n\n",
            parts[2],
            parts[3],
        ]
    ).replace("\u00e9", "\ufffd\ufffd")
    for name in ("reasoning", "thinking"):  # other names of reasoning_content
        renamed = [
            {name if k == "reasoning_content" else k: v for k, v in m.items()}
            for m in record["messages"]
        ]
        assert shown(QWEN3, {**record, "messages": renamed}, "keep") == kept
    talk = messages("a", "<think>why</think>\n\nb", "c", "<think>so</think>d")
    assert shown(CHATML, talk).count("<think>") == shown(CHATML, talk, "keep").count("<think>") == 2
    assert "[b<|im_end|>]" in shown(CHATML, talk, "drop") and "[<think>so</think>d<" in shown(
        CHATML, talk, "drop"
    )


def test_the_token_that_ends_a_turn(folder):
    tokenizer = load_tokenizer(str(folder))
    for template, ends in (
        (CHATML, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (MARKED, "<|im_end|>"),
        (SMOLLM3, "<|im_end|>"),
        (OLMO3, "<|im_end|><|endoftext|>"),
        (GEMMA3, "<end_of_turn>"),
    ):
        (folder / "chat_template.jinja").write_text(template)
        assert ChatTemplate(tokenizer).end_ids == {*tokenizer.encode(ends).tolist()}


def test_a_turn_that_ends_by_two_tokens(shown, folder):
    """The turn has both. A program stops at the last of them, and a message must have neither."""
    template = CHATML.replace("<|im_end|>", "<|end|><|im_end|>")
    assert shown(template, TALK) == shown(CHATML, TALK).replace("<|im_end|>", "<|end|><|im_end|>")
    tokenizer = load_tokenizer(str(folder))
    (folder / "chat_template.jinja").write_text(template)
    assert ChatTemplate(tokenizer).end_ids == {*tokenizer.encode("<|im_end|>").tolist()}
    for word in ("<|end|>", "<|im_end|>"):
        with pytest.raises(ValueError, match=f"a message has {re.escape(repr(word))} in it"):
            shown(template, messages("a", "b" + word))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_what_the_template_leaves_out_is_refused(shown, template):
    """An answer that is only a call would be learnt as an empty answer otherwise."""
    call, thought = {"function": {"name": "add", "arguments": {}}}, {"reasoning_content": "so"}
    question, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    called = [
        question,
        {**answer, "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        answer,
    ]
    for record, reasoning, message in (
        (
            {"messages": [question, answer], "tools": [call]},
            "template",
            "the tools of the chat: 'add'",
        ),
        (called, "template", "the tool_calls of message 2: 'add'"),
        ([question, {**answer, **thought}], "template", "the reasoning of message 2: 'so'"),
        ([question, {**answer, **thought}, question, answer], "keep", "the reasoning of message 2"),
    ):
        with pytest.raises(ValueError, match=f"chat_template.jinja does not write {message}.*"):
            shown(template, record, reasoning)
    earlier = [question, {**answer, **thought}, question, answer]
    assert (
        shown(template, earlier, "drop")
        == shown(template, earlier)
        == shown(template, [question, answer] * 2)
    )


def test_a_message_that_the_template_drops_is_refused(shown, folder):
    """Each chat is looked at, whether its words stand elsewhere in the text or not."""
    drops = QWEN3.replace("{%- else %}\n  ", "{%- elif m.role in ('user', 'system') %}\n  ")
    assert drops != QWEN3
    chat = [{"role": "developer", "content": "Hi"}, *TALK]
    assert "developer\nHi" in shown(QWEN3, chat)
    prompt = lambda: ChatTemplate(load_tokenizer(str(folder))).prompt(chat[:2])  # noqa: E731
    for reads in (lambda: shown(drops, chat), prompt):
        with pytest.raises(
            ValueError, match=r"not write the content of message 1 \(developer\): 'Hi'; remove it"
        ):
            reads()
    called = [
        TALK[0],
        {**TALK[1], "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": 'a "b"\n'},
        TALK[3],
    ]
    quoted = QWEN3.replace(
        "<tool_response>' + m.content", "<tool_response>' + (m.content | tojson)"
    )
    assert 'a \\"b\\"\\n' in shown(quoted, called)
    with pytest.raises(ValueError, match=r"the content of message 2 \(assistant\): 'Hello\. '"):
        shown(QWEN3.replace("{{- m.content }}", "{{- '' if m.tool_calls else m.content }}"), called)


def test_words_that_a_template_takes_for_reasoning_are_refused(shown):
    """It cuts contents at "</think>", in an answer about the tag, too, and drops the reasoning of
    the last answer."""
    plain = shown(DEEPSEEK, messages("Hi", "<think>t</think>a", "b", "c"))
    assert plain == "<User>Hi<Assistant>[a</s>]<User>b<Assistant>[c</s>]"
    for answer in ("Use the </think> tag", "<think>t</think>Use the </think> tag"):
        with pytest.raises(
            ValueError, match="the content beside </think> of message 2: 'Use the '; remove it"
        ):
            shown(DEEPSEEK, messages("Hi", answer, "b", "c"))
        assert "[" + answer + "<|im_end|>]" in shown(CHATML, messages("Hi", answer, "b", "c"))
    with pytest.raises(ValueError, match="the reasoning of message 4: 't'"):
        shown(DEEPSEEK, messages("Hi", "a", "b", "<think>t</think>c"))


def test_answers_that_say_they_are_not_trained_on(shown):
    expected = shown(CHATML, TALK).replace("[Hello. <|im_end|>]", "Hello. <|im_end|>")
    for name, untrue in itertools.product(FLAGS, (False, 0, 0.0)):
        untrue = not untrue if name == "masked" else untrue
        flags = [{name: untrue, "id": 7}, {name: not untrue, "weight": None}]
        chat = [
            {**TALK[0], name: untrue},
            {**TALK[1], **flags[0]},
            {**TALK[2], name: None},
            {**TALK[3], **flags[1]},
        ]
        assert shown(CHATML, chat) == shown(MARKED, chat) == expected
    joined = MARKED.replace("{% for m in messages %}", "{% for m in messages[:1] + messages[2:] %}")
    joined = joined.replace(
        "m.content +", "(messages[1].content if m.role == 'assistant' else '') + m.content +"
    )
    with pytest.raises(ValueError, match='joins messages into turns: "weight" cannot be obeyed'):
        shown(joined, chat)


def test_empty_results_of_tools_and_system_messages(shown):
    call = {**TALK[1], "content": "true", "tool_calls": [{"name": "f"}]}
    last = {
        **TALK[3],
        "reasoning_content": None,
        "tool_calls": None,
        "weight": None,
    }  # tables are written out so
    chat = [
        {"role": "system", "content": ""},
        TALK[0],
        call,
        {"role": "tool", "content": None},
        last,
    ]
    text = shown(QWEN3, chat)
    assert "<|im_start|>system\n<|im_end|>" in text and "<tool_response></tool_response>" in text


def test_the_day_is_the_same_on_every_day(shown, caplog):
    caplog.set_level(logging.INFO)
    dated = "{{ strftime_now('%d %b %Y') }}|" + CHATML
    assert (
        shown(dated, TALK).startswith("01 Jan 2026|")
        and "is told 2026-01-01 on every day" in caplog.text
    )
    own = (
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024|{% endif %}"
        + CHATML
    )
    assert shown(own, TALK).startswith("26 Jul 2024|")


def test_marked_templates_have_the_mask_of_transformers(theirs, folder):
    talks = [
        TALK,
        messages("a", "b"),
        messages("x\n", "\u00e9\u4e2d \U0001f600 he", "a", " z", "q", "r"),
    ]
    for talk in talks:
        expected = theirs.apply_chat_template(
            talk,
            chat_template=MARKED,
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenize=True,
        )
        for template in (MARKED, CHATML):  # CHATML has no marks, and the same turns
            (folder / "chat_template.jinja").write_text(template)
            ids, masked = ChatTemplate(load_tokenizer(str(folder))).encode({"messages": talk})
            assert ids.tolist() == expected["input_ids"]
            assert (~masked).astype(int).tolist() == expected["assistant_masks"]
        for template in (CHATML, LLAMA3, QWEN3, DEEPSEEK, GEMMA3, OLMO3, MINISTRAL3):
            (folder / "chat_template.jinja").write_text(template)
            ids, _ = ChatTemplate(load_tokenizer(str(folder))).encode({"messages": talk})
            assert ids.tolist() == theirs.apply_chat_template(
                talk, chat_template=template, return_dict=False
            )


def test_bad_messages(folder, tmp_path, caplog):
    (folder / "chat_template.jinja").write_text(CHATML)
    good, tokenizer = json.dumps({"messages": TALK}), load_tokenizer(str(folder))
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    tool, calls = {"role": "tool", "content": "c"}, {**assistant, "tool_calls": [{"name": "f"}]}
    cases = [
        ("x", '"messages" must be a list of objects, or JSON of one'),
        (
            [3],
            'message 1 of "messages" must be an object with "role" and "content", or "from" and '
            '"value"',
        ),
        (
            [user, {"role": "critic", "content": "b"}],
            r"message 2 \(critic\) has a role that is not known; known are sys",
        ),
        ([user, assistant, tool], r"message 3 \(tool\) follows assistant"),
        (
            [user, calls, assistant],
            r"message 3 \(assistant\) follows an assistant that calls "
            r"tools, .* tool",
        ),
        (
            [user, {**assistant, "reasoning": ["so"]}],
            r"message 2 \(assistant\) has reasoning that "
            r"is not one string",
        ),
        (
            [user, {**assistant, "reasoning": "a", "thinking": "b"}],
            "has reasoning that is not one string",
        ),
        (
            [{**user, "thinking": "a"}, assistant],
            r"message 1 \(user\) has tool_calls, reasoning or "
            r"a weight",
        ),
        (
            [{**user, "tool_calls": [{"name": "f"}]}, assistant],
            r"message 1 \(user\) has "
            r"tool_calls, reasoning or a",
        ),
        (
            [user, {**assistant, "weight": 0.5}],
            r'message 2 \(assistant\) has "weight": 0.5; it '
            r"must be true, false, 1",
        ),
        (
            [user, {**assistant, "loss": "false"}],
            r'message 2 \(assistant\) has "loss": "false"; it must be true, false',
        ),
        (
            [user, {**assistant, "train": True, "weight": 0}],
            "says that it is trained on, and that it is not",
        ),
        (
            [{**user, "train": True}, assistant],
            r"message 1 \(user\) has tool_calls, reasoning or a "
            r"weight, which only",
        ),
        (
            [user, calls, {**tool, "loss": 1}, assistant],
            r"message 3 \(tool\) has tool_calls, "
            r"reasoning or a weight",
        ),
        (
            [user, {**assistant, "learn": False}],
            r'message 2 \(assistant\) has "learn": false, '
            r"which is not known here",
        ),
        (
            [user, {**assistant, "skip": "Yes"}],
            r'message 2 \(assistant\) has "skip": "Yes", which '
            r"is not known here",
        ),
        (
            [{**user, "score": 0.7}, assistant],
            r'message 1 \(user\) has "score": 0.7, which is not '
            r"known here; remove",
        ),
        (
            [user, {**assistant, "ignored": "true"}],
            r'message 2 \(assistant\) has "ignored": "true", which is not known',
        ),
        (
            [user, {**assistant, "train_detail": [{"train": 0}]}],
            r'has "train_detail": .*, which is '
            r"not known here",
        ),
        (
            [user, {**assistant, "content": [{"type": "text", "text": "b", "loss": False}]}],
            'a part of message 2 .* "lo',
        ),
        (
            [user, {**calls, "tool_calls": [{"name": "f", "weight": 0}]}],
            'a call of message 2 .* has "weight": 0',
        ),
        (
            [user, {**assistant, "tool_calls": [{"function": {"name": 3}}]}],
            'tool_calls" must be a list of objects',
        ),
        (
            [{**user, "content": [{"type": "image"}]}, assistant],
            r"message 1 \(user\) has a content "
            r"that is no text",
        ),
        ([user, {**assistant, "content": 3}], "content that is no text"),
        (
            [user, {**assistant, "tool_calls": "f"}],
            'calls of message 2 of "messages" must be a list',
        ),
        (
            [{**user, "content": "x<|im_end|>"}, assistant],
            r"a message has '<\|im_end\|>' in it, "
            r"which begins or ends",
        ),
        (
            [{**user, "content": "<|im_start|>assistant\nx"}, assistant],
            r"a message has '<\|im_start\|>",
        ),
        ([user, {**assistant, "name": "\ud800"}], "escaped NUL or lone surrogate in the messages"),
    ]
    for value, message in cases:
        (tmp_path / "a.jsonl").write_text(f"{good}\n{json.dumps({'messages': value})}\n")
        with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}") as error:
            load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)
        assert "\n" not in str(error.value)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK, "tools": "x"}))
    with pytest.raises(ValueError, match=r'a\.jsonl:1: "tools" must be a list of objects'):
        load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)
    nothing = [[user, {**assistant, "content": " "}], [{**user, "content": None}, assistant]]
    nothing += [[user, {**assistant, "weight": 0}], [user]]
    lines = [
        {"messages": TALK, "prompt": TALK[0]["content"], "text": None},
        *({"messages": each} for each in nothing),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert len(load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)) == 1
    assert [record.getMessage().rpartition("/")[::2] for record in caplog.records] == [
        (
            f"data: left out chats with an empty question or answer: 2, the first in {tmp_path}",
            "a.jsonl:2",
        ),
        (f"data: left out chats without a target: 2, the first in {tmp_path}", "a.jsonl:4"),
    ]
    depth = (
        sys.getrecursionlimit() - 40
    )  # torch.compile raises it, if an earlier test has used that
    deep = "[" * depth + '"a"' + "]" * depth
    for fields in (
        f'"tools": [{{"name": "f", "a": {deep}}}]',
        f'"metadata": {deep}',
        f'"messages": [{{"role": "user", "a": {deep}}}]',
    ):
        (tmp_path / "a.jsonl").write_text(f"{good[:-1]}, {fields}}}")
        with pytest.raises(ValueError, match=r"a\.jsonl:1: (objects within objects|not JSON)"):
            load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)
    (folder / "chat_template.jinja").write_text(
        MARKED.replace("{{ m.content + '<|im_end|>' }}{% endg", "{% endg")
    )
    (tmp_path / "a.jsonl").write_text(good)
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: chat template .* does not write the content of message 2"
    ):
        load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)
    with pytest.raises(ValueError, match=r"chats need a chat template: .*, not bytes"):
        load_documents(str(tmp_path / "a.jsonl"), load_tokenizer("bytes"), 300)


@pytest.mark.parametrize("template, message", [
    ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    ("{{ messages.__init__.__globals__ }}", "unsafe"),
    ("{% include '/etc/passwd' %}", "fails: no loader"),
    ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{{ raise_exception('no system\nhere') }}", "fails: no system"),
    ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ("{% if %}", r"cannot be read: Expected an expression"),
    ("(" * 100_000, "does not write each message once"),
    ("{{ " + "(" * 100_000, "cannot be read"),
    ("x", "does not write each message once"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show where the assistant's "
                                                           "turns begin"),
])  # fmt: skip
def test_hostile_templates(shown, template, message):
    with pytest.raises(ValueError, match=message) as error:
        shown(template, TALK)
    assert (
        "chat_template.jinja" in str(error.value)
        and len(str(error.value)) < 500
        and "\n" not in str(error.value)
    )


def test_sigterm_ends_a_template_that_does_not_end(folder):
    """The template compares huge strings, in a loop of C code that runs none of Python's handlers
    of signals."""
    endless = "{% set a = 'a' * 10000000 %}{{ (a ~ 'b') in ([a ~ 'c'] * 10000000) }}"
    (folder / "chat_template.jinja").write_text(endless)
    code = "import sys; from training.data import chat, tokenizer; print('opened', flush=True); "
    code += "chat.ChatTemplate(tokenizer.load_tokenizer(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "opened\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM


def test_templates_whose_turns_run_on_or_vanish(shown):
    """The borders learnt from two short chats are looked for in each chat."""
    unended = CHATML.replace(
        "'<|im_end|>\n' }}", "('' if m.content == 'Hello. ' else '<|im_end|>\n') }}"
    )
    with pytest.raises(
        ValueError, match=r"turn 1 of the assistant does not end with '<\|im_end\|>'"
    ):
        shown(unended, TALK)
    skipped = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.content != 'Hello. ' %}"
    )
    with pytest.raises(
        ValueError, match=r"the template shows 1 turns of the assistant, the messages are 2"
    ):
        shown(skipped, TALK)
    nested = MARKED.replace(
        "{{ m.content + '<", "{% generation %}{{ m.content }}{% endgeneration %}{{ '<"
    )
    half = MARKED.replace("{% generation %}", "{% set turn %}{% generation %}")
    half = half.replace("{% endgeneration %}", "{% endgeneration %}{% endset %}{{ turn[:-1] }}")
    for template in (nested, half):
        with pytest.raises(ValueError, match=r"nests {% generation %}, or writes half of it"):
            shown(template, TALK)


def test_turns_in_any_order_are_as_transformers_writes_them(shown, theirs):
    user, assistant, system = (
        {"role": role, "content": role[0]} for role in ("user", "assistant", "system")
    )
    chats = [
        [user, user, assistant],
        [user, assistant, assistant],
        [assistant, user, assistant],
        [system, assistant, user, assistant, user],
        [system, assistant],
        [user, assistant, system, user, assistant],
    ]
    for chat, template in itertools.product(chats, (CHATML, LLAMA3, QWEN3, MARKED)):
        text = shown(template, chat)
        written = theirs.apply_chat_template(chat, chat_template=template, tokenize=False)
        assert text.replace("[", "").replace("]", "") == written
        answers = [part.partition("]")[0] for part in text.split("[")[1:]]
        assert len(answers) == chat.count(assistant) and {*answers} <= {
            "a<|im_end|>", "a<|eot_id|>", "<think>\n\n</think>\n\na<|im_end|>"
        }  # fmt: skip
    for reasoning in (
        "keep",
        "drop",
    ):  # the thought stands before the last question, but "keep" keeps it
        chat = [user, {**assistant, "reasoning_content": "why"}, user]
        assert ("why" in shown(QWEN3, chat, reasoning)) == (reasoning == "keep")
    assert shown(MISTRAL, [user, assistant, user]) == "<s>[INST] u [/INST][ a</s>][INST] u [/INST]"
    with pytest.raises(ValueError, match="fails: roles must alternate"):
        shown(GEMMA3, chats[0])


def test_where_the_template_is(folder, tmp_path):
    for file, content, message in [
        (None, None, "has none: add chat_template.jinja"),
        ("tokenizer_config.json", "[", "is missing or damaged: Expecting value"),
        ("tokenizer_config.json", "[]", "it holds no JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "has none"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
    ]:
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        if file:
            (tmp_path / file).write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
        with pytest.raises(ValueError, match=message):
            ChatTemplate(load_tokenizer(str(tmp_path)))
    (tmp_path / "chat_template.jinja").unlink()
    odd = [{"name": ["x"], "template": "x"}, 3, {"name": {}}]
    for value in (
        CHATML,
        [*odd, {"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}],
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        ids, _ = ChatTemplate(load_tokenizer(str(tmp_path / "tokenizer.json"))).encode(
            {"messages": TALK}
        )
        assert len(ids) > 10


THOUGHT = {"type": "reasoning.text", "text": "THOUGHT", "format": "a", "index": 0}


def test_fields_of_messages_that_no_template_writes(shown, folder, tmp_path, caplog):
    """Words of an answer are refused by name, and what describes a message is counted."""
    refused = {
        "reasoning_details": [THOUGHT],
        "thinking_blocks": [{"type": "thinking", "thinking": "THOUGHT"}],
        "thought": "THOUGHT", "analysis": "T", "cot": "Hello", "rationale": "THOUGHT",
        "reasoning_summary": ["T"],
        "toolCalls": [{"name": "f"}], "tool_call": {"name": "f", "arguments": {}}, "actions": ["f"],
        "function_calls": '[{"name": "f"}]', "images": ["a.png"], "image_url": {"url": "a"},
        "audio": {"id": "a"},
        "channel": "analysis", "recipient": "functions.f",
    }  # fmt: skip
    for (name, value), content in itertools.product(refused.items(), ("Hello. ", "")):
        what = f'message 2 .assistant. has "{name}": .*, which chat template .* does not write'
        with pytest.raises(ValueError, match=what) as error:
            shown(CHATML, messages("Hi", content, **{name: value}))
        assert "\n" not in str(error.value)
        writes = CHATML.replace("m.content", f"(m.{name} | tojson if m.{name} else '') + m.content")
        assert json.dumps(value) in shown(writes, messages("Hi", "Hello. ", **{name: value}))
    described = {
        "id": "a", "uuid": "b", "name": "Ann", "model": "m", "source": "s", "created_at": "now",
        "usage": {"n": 3},
        "annotations": [{"url": "u"}], "metadata": {"a": "b"}, "finish_reason": "stop",
        "scores": [0.5], "notes": "well",
        "logprobs": {"content": [{"token": "a", "logprob": -0.1}]},
    }  # fmt: skip
    nothing = {
        "token_count": 3, "timestamp": 1.5, "channel": "final", "recipient": "all",
        "refusal": None, "audio": None, "function_call": None,
        "reasoning_details": [], "images": [], "tool_calls": None, "summary": "Hello.",
        "annotations": [],
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r'has "message_type": .*, which chat template'
    ):  # a thought is no answer
        shown(CHATML, messages("Hi", "Well.", message_type="reasoning"))
    expected = shown(CHATML, TALK[:2])
    for fields in ({}, described, nothing):
        (tmp_path / "a.jsonl").write_text(
            json.dumps({"messages": [TALK[0], {**TALK[1], **fields}]})
        )
        assert shown(CHATML, [TALK[0], {**TALK[1], **fields}]) == expected
        caplog.clear()
        load_documents(str(tmp_path / "a.jsonl"), load_tokenizer(str(folder)), 300)
        left_out = re.findall('"(\\w+)" of 1', caplog.text)
        assert {*left_out} == {*sorted(fields if fields is described else ())[:8]}
        assert ("are not trained on" in caplog.text) == (fields is described)
    same = {
        "reasoning": "THOUGHT",
        "reasoning_details": [THOUGHT],
    }  # OpenRouter's answers have it twice
    assert "<think>\nTHOUGHT\n</think>" in shown(QWEN3, messages("Hi", "Hello.", **same))


def test_fields_of_parts_and_calls_that_no_template_writes(shown):
    part = {"type": "text", "text": "Hello. "}
    with pytest.raises(
        ValueError, match=r'a part of message 2 .* has "image_url": .*, which is not read'
    ):
        shown(CHATML, messages("Hi", [part | {"image_url": {"url": "a"}}]))
    cached = part | {
        "cache_control": {"type": "ephemeral"},
        "annotations": [{"url": "a"}],
        "image_url": None,
    }
    assert shown(CHATML, messages("Hi", [cached])) == shown(CHATML, TALK[:2])
    names = QWEN3.replace(
        "call.function | tojson", "call.function.name + (call.function.arguments | tojson)"
    )
    for call in (
        {"name": "f", "arguments": {}, "thought": "T"},
        {"function": {"name": "f", "arguments": {}}, "thought": "T"},
    ):
        called = {**TALK[1], "tool_calls": [call]}
        with pytest.raises(ValueError, match=r'message 2 .assistant. has "thought": '):
            shown(names, [TALK[0], called, {"role": "tool", "content": "2"}, TALK[3]])


def test_fields_of_rows_that_no_template_writes(shown, folder, tmp_path, caplog):
    for name, value in (
        ("reasoning", "T"),
        ("rationale", "Hello"),
        ("tool_calls", [{"name": "f"}]),
        ("cot", ["T"]),
    ):
        with pytest.raises(
            ValueError, match=f'has "{name}" beside its messages: .*, which no chat template writes'
        ):
            load_rows(tmp_path, folder, [{"messages": TALK, name: value}])
    fields = {
        "source": "s",
        "generations": ["a", "b"],
        "reasoning": "off",
        "id": 7,
        "answer": "So.",
        "empty": [],
    }
    load_rows(
        tmp_path,
        folder,
        [{"messages": TALK, **fields}, {"messages": TALK}, {"messages": TALK, "source": "t"}],
    )
    [message] = caplog.messages
    assert message.startswith(
        'data: left out fields of chats that are not trained on: "generations" of 1, "reasoning"'
    )
    assert '"source" of 2, the first in ' in message and message.endswith("a.jsonl:1")


def test_an_answer_beside_a_chat_that_ends_with_a_question_is_refused(folder, tmp_path, caplog):
    for chat, name in itertools.product(
        (TALK[:1], TALK[:3]), ("answer", "response", "output", "final_answer")
    ):
        what = f'has "{name}" beside its messages: .*; write it as the last message if it answers'
        with pytest.raises(ValueError, match=what):
            load_rows(tmp_path, folder, [{"messages": chat, name: "THE WORDS"}])
    load_rows(
        tmp_path, folder, [{"messages": TALK, "answer": "4"}, {"messages": TALK[:3], "source": "a"}]
    )
    assert '"answer" of 1, "source" of 1' in caplog.text


def test_reasoning_calls_and_media_within_fields_that_describe(shown, folder, tmp_path, caplog):
    """A field that describes has no words of an answer that its message lacks, however deep they
    stand."""
    raw = {"choices": [{"message": {"content": "Hello.", "reasoning_content": "THOUGHT"}}]}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    for name, value in (
        ("provider_specific_fields", {"thinking_blocks": [{"type": "thinking", "thinking": "THOUGHT"}]}),
        ("extra", {"response": raw}), ("info", {"think_content": "THOUGHT"}),
        ("metadata", {"tool_calls": [call]}),
        ("metadata", {"attachments": [{"name": "a.png", "id": "7"}]}),
        ("metadata", json.dumps({"cot": "THOUGHT"})),
        ("extra", [{"type": "reasoning.text", "text": "THOUGHT"}]),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=f'message 2 .assistant. has "{name}": .*does not write'
        ):
            shown(CHATML, messages("Hi", "Hello.", **{name: value}))
    said = {
        "extra": {"actions": [{"command": "Hello."}], "response": {"content": "Hello."}},
        "metadata": {"tool": "search"}, "usage": {"details": {"reasoning_tokens": 5}},
        "info": {"think_content": None},
        "config": {"thinking": {"type": "enabled"}, "reasoning": "high"}, "stats": "[no JSON",
    }  # fmt: skip
    assert shown(CHATML, messages("Hi", "Hello.", **said)) == shown(
        CHATML, messages("Hi", "Hello.")
    )
    calls = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call],
            "metadata": {"tool_calls": [call]},
        }
    ]
    assert "THOUGHT" not in shown(
        QWEN3, [TALK[0], *calls, {"role": "tool", "content": "2"}, TALK[3]]
    )


def test_names_of_tools_beside_a_chat_are_no_tools(folder, tmp_path, caplog):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for value in ([tool], json.dumps([tool])):
        with pytest.raises(ValueError, match=r'has "available_tools" .*--columns tools=NAME'):
            load_rows(tmp_path, folder, [{"messages": TALK, "available_tools": value}])
    load_rows(
        tmp_path,
        folder,
        [{"messages": TALK, "target_tools": "f,g", "tools_used": ["f"]}, {"messages": TALK}],
    )
    assert '"target_tools" of 1, "tools_used" of 1' in caplog.text


def load_rows(tmp_path, folder, rows):
    """Returns the documents of rows under ChatML."""
    (folder / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_documents(str(tmp_path / "a.jsonl"), load_tokenizer(str(folder)), 300)


def test_columns_of_tables_that_may_be_of_an_answer_are_read(folder, tmp_path):
    table = pytest.importorskip("pyarrow").Table.from_pylist(
        [{"messages": TALK[:2], "rationale": "T", "other": "x"}]
    )
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(ValueError, match='has "rationale" beside its messages'):
        load_documents(str(tmp_path / "a.parquet"), load_tokenizer(str(folder)), 300)


def test_a_header_is_no_target_where_answers_begin_in_several_ways(shown):
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for content, fields, expected in (
        ("Four.", {}, "<think>[</think>Four."),
        ("two\n</think>\n\nFour.", {}, "[two\n</think>\n\nFour."),
        ("<think>\ntwo\n</think>\n\nFour.", {}, "<think>\n[two\n</think>\n\nFour."),
        ("<think>two</think>Four.", {}, "<think>[two</think>Four."),
        ("Four.", {"reasoning_content": "two"}, "<think>\n[two\n</think>\nFour."),
    ):
        assert (
            shown(NEMOTRON3, messages("Hi", content, **fields)) == f"{asked}{expected}<|im_end|>]\n"
        )
        earlier = shown(NEMOTRON3, [*messages("Hi", content, **fields), *messages("Hi", "So")])
        assert earlier == f"{asked}{expected}<|im_end|>]\n{asked}<think>[</think>So<|im_end|>]\n"
    assert shown(
        CHATML.replace("assistant\n'", "assistant\n<think>\n'"), messages("Hi", "<table>")
    ) == (f"{asked}[<table><|im_end|>]\n")
    other = CHATML.replace(
        "'<|im_start|>' + m.role", "('<|' if m.content == 'x' else '<|im_start|>') + m.role"
    )
    with pytest.raises(
        ValueError,
        match=r"turn 1 of the assistant does not begin with '<\|im_start\|>assistant\\n'",
    ):
        shown(other, messages("Hi", "x"))


def test_headers_of_templates_without_a_prompt_and_of_calls(shown):
    no_prompt = QWEN3[: QWEN3.index("{%- if add")]
    assert shown(no_prompt, TALK) == shown(QWEN3, TALK)  # the last answer begins otherwise
    two_ways = (
        "{% for m in messages %}{{ ('<|user|>' if loop.last else '<|end|>') + m.content }}</s>{% "
        "endfor %}"
    )
    with pytest.raises(ValueError, match="does not show where the assistant's turns begin and end"):
        shown(two_ways, TALK)
    calls = CHATML.replace(
        "'<|im_start|>' + m.role + '\n' + m.content", "before(m) + m.content + call(m)"
    ).replace(
        "{% for",
        "{% macro before(m) %}{% if not m.tool_calls %}<|im_start|>{{ m.role }}\n{% endif %}{% "
        "endmacro %}"
        "{% macro call(m) %}{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}{% endfor "
        "%}{% endmacro %}"
        "{% for",
        1,
    )
    written = '[{"name": "add", "arguments": {}}' * 2
    assert f"Hi<|im_end|>\n[{written}<|im_end|>]\n<|im_start|>tool\n2" in shown(
        calls, called({}, content="")
    )
    assert shown(calls, TALK) == shown(CHATML, TALK)


def test_results_of_tools_within_an_answer_are_refused(shown):
    """Gemma 4's template writes them at the message that calls."""
    within = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' + "
        "m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name + messages[loop.index].content }}{% "
        "endif %}"
        "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    called = {**TALK[1], "tool_calls": [{"name": "f"}]}
    with pytest.raises(
        ValueError, match=r"writes message 3 \(tool\) within an answer: it would be trained on"
    ):
        shown(within, [TALK[0], called, {"role": "tool", "content": "2"}, TALK[3]])


def test_several_templates_are_chosen_as_transformers_does(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    record, called = {"messages": TALK}, {"messages": TALK, "tools": tools}
    listed = "{{ '|'.join(tools | map(attribute='function') | map(attribute='name')) }}" + LLAMA3
    for kind in ("list", "folder", "folder without a default"):
        target = tmp_path / kind
        (target / "additional_chat_templates").mkdir(parents=True)
        (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": listed}]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "<|im_end|>",
        }
        config |= {"chat_template": named if kind == "list" else "x"}
        (target / "tokenizer_config.json").write_text(json.dumps(config))
        if kind != "list":
            (target / "additional_chat_templates" / "tool_use.jinja").write_text(listed)
        if kind == "folder":
            (target / "chat_template.jinja").write_text(CHATML)
        saved = tmp_path / f"saved {kind}"
        saved.mkdir()
        for name, content in read_companions(target / "tokenizer.json").files.items():
            (saved / name).write_bytes(content)
        theirs, ours = (
            transformers.AutoTokenizer.from_pretrained(each) for each in (target, saved)
        )
        assert theirs.chat_template == ours.chat_template  # a checkpoint has them all
        assert template_hash(load_tokenizer(str(target))) == template_hash(
            load_tokenizer(str(saved))
        )
        ours = ChatTemplate(load_tokenizer(str(target)))
        assert ours.encode(called)[0].tolist() == theirs.apply_chat_template(
            TALK, tools=tools, return_dict=False
        )
        assert {*ours.end_ids} >= {*theirs.convert_tokens_to_ids(["<|eot_id|>"])}
        if kind == "folder without a default":
            with pytest.raises(
                ValueError, match='has the chat templates tool_use, and none that is "default"'
            ):
                ours.encode(record)
            with pytest.raises(ValueError, match="no default"):
                theirs.apply_chat_template(TALK)
        else:
            assert ours.encode(record)[0].tolist() == theirs.apply_chat_template(
                TALK, return_dict=False
            )
            assert len(ours.end_ids) == 2


def called(arguments, **fields):
    """Returns a chat whose answer calls a tool twice."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    results = [{"role": "tool", "content": "2"}] * 2
    return [
        TALK[0],
        {"role": "assistant", "tool_calls": [call] * 2, **fields},
        *results,
        messages("", "So.")[1],
    ]


def test_calls_by_their_forms_are_as_transformers_writes_them(shown, theirs, folder):
    """Contents of null and "" are one, and so are arguments and their JSON: templates get what they
    write whole."""
    for template in (QWEN3, NEMOTRON3):
        (folder / "chat_template.jinja").write_text(template)
        ours = ChatTemplate(load_tokenizer(str(folder)))
        for content, arguments, thought in itertools.product(
            (None, "", "Well."), ({"a": 1}, '{"a": 1}', "{}"), (None, "", "why")
        ):
            ids, _ = ours.encode(
                {"messages": called(arguments, content=content, reasoning_content=thought)}
            )
            same = called(
                {} if arguments == "{}" else {"a": 1},
                content=content or "",
                reasoning_content=thought,
            )
            assert ids.tolist() == theirs.apply_chat_template(
                same, chat_template=template, return_dict=False
            )
    for content, arguments in itertools.product((None, ""), ({"a": 1}, '{"a":1}')):
        written = json.dumps(arguments) if isinstance(arguments, dict) else arguments
        assert shown(DEEPSEEK_R1, called(arguments, content=content)) == (
            f"<s><|user|>Hi<|assistant|>[<call>add {written}[/CALL]\n<call>add "
            f"{written}[/CALL]</s>]"
            "[TOOL_RESULTS]22[/TOOL_RESULTS][So.</s>]"
        )
        stops = ChatTemplate(load_tokenizer(str(folder))).end_ids
        assert stops == {theirs.convert_tokens_to_ids("</s>")}  # between two calls stands no end
    one = called({}, content=None)
    one[1:4] = [{**one[1], "tool_calls": one[1]["tool_calls"][:1]}, one[2]]
    assert "[<call>add {}[/CALL]][TOOL_RESULTS]2" in shown(DEEPSEEK_R1, one)
    for fields in ({"content": "Well."}, {"content": "", "reasoning_content": "why"}):
        with pytest.raises(
            ValueError, match=r"does not write the (tool_calls|reasoning) of message 2"
        ):
            shown(DEEPSEEK_R1, called({}, **fields))


def test_each_call_is_written_with_its_arguments(shown):
    first = QWEN3.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    with pytest.raises(
        ValueError, match="not write the tool_calls of message 2, call 2 of 2: 'add'"
    ):
        shown(first, called({"a": 1}, content=""))
    names = QWEN3.replace("call.function | tojson", "call.function.name")
    with pytest.raises(
        ValueError,
        match="not write the arguments of the tool_calls of message 2, call 1 of 2: 'add'",
    ):
        shown(names, called({"a": 1}, content=""))
    with pytest.raises(
        ValueError, match=r"message 2 .* has calls in tool_calls, and <tool_call> in its content"
    ):
        shown(QWEN3, called({}, content="<tool_call>{}</tool_call>"))


def test_a_thought_in_two_places_is_written_once(shown):
    inline, asked = (
        "<think>\nwhy\n</think>\n\nSo.",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    )
    once = shown(QWEN3, messages("Hi", "So.", reasoning_content="why"))
    plain = shown(QWEN3, messages("Hi", inline))
    for thought in ("", "why", "why\n"):
        text = shown(QWEN3, messages("Hi", inline, reasoning_content=thought))
        assert text.count("<think>") == 1 + (thought == "") and "why" in text
        assert (
            shown(CHATML, messages("Hi", inline, reasoning=thought))
            == f"{asked}[{inline}<|im_end|>]\n"
        )
    assert shown(QWEN3, messages("Hi", "<think></think>So.", thinking="why")) == once
    assert shown(QWEN3, messages("Hi", inline, reasoning_content="")) == plain
    with pytest.raises(
        ValueError,
        match=r"message 2 .* has reasoning in a field, and other reasoning in its content",
    ):
        shown(QWEN3, messages("Hi", inline, reasoning_content="other"))
    # As in transformers, reasoning has both names: gpt-oss's template reads "thinking".
    named = QWEN3.replace("m.reasoning_content", "m.thinking")
    assert shown(named, messages("Hi", "So.", reasoning_content="why")) == once
    both = QWEN3.replace(
        "(m.reasoning_content or '')", "(m.reasoning_content or '') + (m.thinking or '')"
    )
    with pytest.raises(ValueError, match=r"writes the reasoning of message 2 \(assistant\) twice"):
        shown(both, messages("Hi", "So.", reasoning="why"))


def test_results_in_the_tag_that_the_template_writes(shown):
    chat = called({}, content="")
    expected = shown(
        QWEN3, [*chat[:2], {**chat[2], "content": "a"}, {**chat[2], "content": "b"}, chat[4]]
    )
    for text in ("<tool_response>\na\n</tool_response>\n<tool_response>b</tool_response>\n",):
        assert shown(QWEN3, [*chat[:2], {**chat[2], "content": text}, chat[4]]) == expected
        assert text in shown(MINISTRAL3, [*chat[:2], {**chat[2], "content": text}, chat[4]])
    inside = "a <tool_response>b</tool_response>"
    assert f"<tool_response>{inside}</tool_response>" in shown(
        QWEN3, [*chat[:2], {**chat[2], "content": inside}, chat[4]]
    )


def test_variables_of_rows_are_given_to_the_template(shown, theirs, folder, tmp_path, caplog):
    for values in (
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"enable_thinking": None, "other": ""},
    ):
        for content in ("Four.", "<think>\ntwo\n</think>\n\nFour."):
            chat = messages("Hi", content)
            text = shown(NEMOTRON3, {"messages": chat, "chat_template_kwargs": values})
            given = {name: value for name, value in values.items() if value is not None}
            assert re.sub(r"[\[\]]", "", text) == theirs.apply_chat_template(
                chat, chat_template=NEMOTRON3, tokenize=False, **given
            )
            asked = theirs.apply_chat_template(
                chat[:1],
                chat_template=NEMOTRON3,
                tokenize=False,
                add_generation_prompt=True,
                **given,
            )
            if text.startswith(asked):  # TRL's completions begin where the prompt ends
                assert text.startswith(asked + "[")
    system = CHATML.replace("{% for", "{{ system_of_row | default('') }}{% for", 1)
    assert shown(
        system, {"messages": TALK, "chat_template_kwargs": '{"system_of_row": "S"}'}
    ).startswith("S<|im_start")
    assert not shown(system, TALK).startswith("S")
    for values, name in (({"other": "x"}, "other"), ({"a": False}, "a"), ({"tools": [1]}, "tools")):
        with pytest.raises(
            ValueError,
            match=f'has "chat_template_kwargs" beside "messages", where "{name}" would be',
        ):
            load_rows(tmp_path, folder, [{"messages": TALK, "chat_template_kwargs": values}])
    with pytest.raises(
        ValueError, match=r'"enable_thinking": "False", a text, which .*; write false'
    ):
        shown(NEMOTRON3, {"messages": TALK, "chat_template_kwargs": {"enable_thinking": "False"}})
    with pytest.raises(ValueError, match=r"a message has '<\|im_end\|>' in it"):
        shown(system, {"messages": TALK, "chat_template_kwargs": {"system_of_row": "<|im_end|>"}})
    load_rows(
        tmp_path,
        folder,
        [{"messages": TALK, "chat_template_kwargs": {"enable_thinking": True, "tools": []}}],
    )
    assert (
        'fields of chats that are not trained on: "enable_thinking" of 1, the first in'
        in caplog.text
    )
    for values in ([1], "x", 3):
        with pytest.raises(
            ValueError, match='"chat_template_kwargs" must be an object, or JSON of one'
        ):
            load_rows(tmp_path, folder, [{"messages": TALK, "chat_template_kwargs": values}])
    (folder / "chat_template.jinja").write_text(system)
    for form in ({"conversations": TALK}, {"prompt": TALK[:1], "completion": TALK[1:2]}):
        (tmp_path / "a.jsonl").write_text(
            json.dumps(form | {"chat_template_kwargs": {"system_of_row": "S"}})
        )
        tokenizer = load_tokenizer(str(folder))
        [document] = load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)
        assert tokenizer.decode(document.tokens).startswith("S")


def test_kept_reasoning_needs_a_turn_for_each_answer(shown):
    """Phi 3.5's training template marks its last token, too: earlier answers would become that
    token."""
    marks_more = MARKED + "{% generation %}</s>{% endgeneration %}"
    assert shown(marks_more, TALK).endswith("[So.\n<|im_end|>]\n[</s>]")
    with pytest.raises(
        ValueError, match="marks other turns than one for each answer: --chat_reasoning keep cannot"
    ):
        shown(marks_more, TALK, "keep")


def test_values_of_tables_that_json_does_not_have(shown):
    for value, message in (
        (Decimal(1), "which is not known here"),
        (b"x", "does not write"),
        ([b"x"], "does not write"),
    ):
        with pytest.raises(ValueError, match=f'message 2 .assistant. has "image": .*{message}'):
            shown(CHATML, messages("Hi", "a", image=value))
    day = datetime(2026, 1, 1)
    assert shown(CHATML, messages("Hi", "Hello. ", created=day)) == shown(CHATML, TALK[:2])
    with pytest.raises(
        ValueError, match=r'a call of message 2 .assistant. has "arguments": a datetime'
    ):
        shown(QWEN3, called(day, content=""))
    with pytest.raises(ValueError, match="fails: Object of type datetime is not JSON serializable"):
        shown(QWEN3, called({"a": day}, content=""))
