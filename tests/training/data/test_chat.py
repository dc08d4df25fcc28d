"""Chats: masks written by hand for several families of templates, and transformers' mask where turns are marked."""

import itertools
import json
import logging
import re
import signal
import subprocess
import sys

import pytest

from tests.training.data.templates import (
    CHATML,
    DEEPSEEK,
    GEMMA3,
    LLAMA3,
    MARKED,
    MINISTRAL3,
    MISTRAL,
    OLMO3,
    PHI3,
    QWEN3,
    QWEN35,
    SMOLLM3,
)
from tests.training.data.test_packing import load_documents
from tests.training.data.test_tokenizer import write_tokenizer
from training.data.chat import ChatTemplate
from training.data.forms import FLAGS
from training.data.tokenizer import load_tokenizer

SPECIAL = [
    "<start_of_turn>", "<end_of_turn>", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|user|>", "<|assistant|>", "<|end|>",
    "<|endoftext|>",
]  # fmt: skip
SPECIAL += ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<s>", "</s>"]


def messages(*contents, **last):
    """Returns messages with these contents, of user and assistant by turns; `last` adds to the last one."""
    made = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [*made[:-1], {**made[-1], **last}]


TALK = messages("Hi", "Hello. ", " How?", "So.\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_file(write_tokenizer(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}')
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
        "<|im_start|>user\n How?<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nSo.\n<|im_end|>]\n"
    )
    # Words that the template writes at the start of an answer, here "<think>", are not targets.
    assert shown(DEEPSEEK, messages("Hi", "a", "b", "c")) == "<User>Hi<Assistant>[a</s>]<User>b<Assistant>[c</s>]"
    given = DEEPSEEK.replace(".split('</think>')[-1]", "")
    assert shown(given, messages("Hi", "<think>\nx</think>a", "b", "c")) == (
        "<User>Hi<Assistant><think>\n[x</think>a</s>]<User>b<Assistant>[c</s>]"
    )
    assert shown(MISTRAL, TALK) == "<s>[INST] Hi [/INST][ Hello. </s>][INST]  How? [/INST][ So.\n</s>]"
    assert shown(PHI3, TALK) == (
        "<|user|>\nHi<|end|>\n<|assistant|>\n[Hello. <|end|>]\n"
        "<|user|>\n How?<|end|>\n<|assistant|>\n[So.\n<|end|>]\n<|endoftext|>"
    )
    no_prompt = CHATML[: CHATML.index("{% if add")]
    assert shown(no_prompt, TALK) == shown(CHATML, TALK)  # found by the text before both answers


def test_turns_of_a_template_that_begins_answers_and_changes_earlier_turns(shown):
    """Loops that look ahead, and loops within a message, end no turn."""
    chat = [{"role": "assistant", "content": "Ask"}, *TALK[:3], {**TALK[3], "reasoning_content": "t"}]
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
    """The text of messages[: i + 1] has a turn more than the text of messages[:i] with the words that ask for it."""
    for template, talk in itertools.product((CHATML, LLAMA3, GEMMA3), (TALK, TALK + TALK, TALK[:2] * 3)):
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
        "<s><start_of_turn>user\n S\n\n\nHi<end_of_turn>\n<start_of_turn>model\n[Hello.<end_of_turn>]\n"
        "<start_of_turn>user\nHow?<end_of_turn>\n<start_of_turn>model\n[So.<end_of_turn>]\n"
    )
    with pytest.raises(ValueError, match="fails: roles must alternate"):
        shown(GEMMA3, [{"role": "developer", "content": "D"}, *TALK])
    with pytest.raises(ValueError, match=r"does not write the content of message 1 \(system\): ' S\\n'"):
        shown(GEMMA3.replace("messages[0].content + ", ""), chat)


def test_marks_that_have_the_header_inside(shown, folder):
    assert shown(SMOLLM3, [{"role": "system", "content": "S"}, *TALK[:2], TALK[2], {**TALK[3], "content": "\nSo"}]) == (
        "<|im_start|>system\n01 January 2026\nS<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello. <|im_end|>]\n"
        "<|im_start|>user\n How?<|im_end|>\n<|im_start|>assistant\n[So<|im_end|>]\n"
    )
    prompt = ChatTemplate(load_tokenizer(str(folder))).prompt(TALK[:3])
    assert prompt.endswith("assistant\nHello. <|im_end|>\n<|im_start|>user\n How?<|im_end|>\n<|im_start|>assistant\n")


def test_a_last_turn_that_ends_by_another_token(shown):
    think = [{**m, "content": "<think>t</think>" + m["content"]} if m["role"] == "assistant" else m for m in TALK]
    for reasoning in ("template", "keep"):
        assert shown(OLMO3, think, reasoning) == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>[t</think>Hello. <|im_end|>]\n"
            "<|im_start|>user\n How?<|im_end|>\n<|im_start|>assistant\n<think>[t</think>So.\n<|endoftext|>]"
        )
    with pytest.raises(ValueError, match=r"a message has '<\|endoftext\|>' in it"):
        shown(OLMO3, messages("a", "b<|endoftext|>"))
    # Here the next turn ends a turn, and the chat has an end: nothing ends a turn.
    unended = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|endoftext|>"
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
    with pytest.raises(ValueError, match="reasoning of message 2: 'so'; write it into the content as the model does"):
        shown(LLAMA3, messages("Hi", parts))  # it would print the list
    for wrong in (parts[::-1], [{"type": "image"}], [3], {}, 3):
        with pytest.raises(ValueError, match=r"message 2 \(assistant\) has a content that is no text"):
            shown(MINISTRAL3, messages("Hi", wrong))


def test_calls_of_any_form_reach_the_template_in_one(shown):
    """A function stands under "function", and its arguments are an object: Llama's template would quote a string."""
    template = LLAMA3.replace(
        "{{ m.content | trim }}",
        "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}",
    ).replace("{{ bos_token }}", "{% if tools is not none %}{{ tools | tojson }}{% endif %}")
    inner = {"name": "add", "arguments": {"a": 1}}
    texts = set()
    for call in (
        inner,
        {"function": inner},
        {"name": "add", "arguments": '{"a":1}'},
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": ' {"a": 1}\n'}},
    ):
        chat = [TALK[0], {**TALK[1], "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}, TALK[3]]
        texts.add(shown(template, {"messages": chat, "tools": [{"name": "add"}]}))
    [text] = texts
    assert text.startswith('[{"type": "function", "function": {"name": "add"}}]')
    assert '[{"name": "add", "arguments": {"a": 1}}<|eot_id|>]' in text
    for arguments in ("[1]", "x", "[" * 100_000, None):  # no JSON of an object: left as it is
        called = {**TALK[1], "content": "", "tool_calls": [{"name": "add", "arguments": arguments}]}
        text = shown(template, [TALK[0], called, {"role": "tool", "content": "2"}, TALK[3]])
        assert json.dumps(arguments) in text
    nulls = [{**m, "tool_calls": None, "name": None} for m in TALK]  # rows of a table have all fields
    none = [{**m, "tool_calls": []} for m in TALK]
    plain = shown(template, TALK)
    assert shown(template, nulls) == shown(template, none) == shown(template, {"messages": TALK, "tools": []}) == plain


def test_tools_and_reasoning(shown):
    call = {"name": "add", "arguments": {"a": "\u00e9<1>"}}
    record = {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "reasoning_content": "use it", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "reasoning_content": "two", "content": [{"type": "text", "text": "It is 2"}]},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "reasoning_content": "polite", "content": "Bye"},
        ],
        "tools": [{"name": "add"}],
    }
    parts = (
        '<|im_start|>system\n{"name": "add"}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n[',
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
        [parts[0], "<think>\nuse it\n</think>\n\n", parts[1], "<think>\ntwo\n</think>\n\n", parts[2], parts[3]]
    ).replace("\u00e9", "\ufffd\ufffd")
    for name in ("reasoning", "thinking"):  # other names of reasoning_content
        renamed = [{name if k == "reasoning_content" else k: v for k, v in m.items()} for m in record["messages"]]
        assert shown(QWEN3, {**record, "messages": renamed}, "keep") == kept
    talk = messages("a", "<think>why</think>\n\nb", "c", "<think>so</think>d")
    assert shown(CHATML, talk).count("<think>") == shown(CHATML, talk, "keep").count("<think>") == 2
    assert "[b<|im_end|>]" in shown(CHATML, talk, "drop") and "[<think>so</think>d<" in shown(CHATML, talk, "drop")


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
    called = [question, {**answer, "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}, answer]
    for record, reasoning, message in (
        ({"messages": [question, answer], "tools": [call]}, "template", "the tools of the chat: 'add'"),
        (called, "template", "the tool_calls of message 2: 'add'"),
        ([question, {**answer, **thought}], "template", "the reasoning of message 2: 'so'"),
        ([question, {**answer, **thought}, question, answer], "keep", "the reasoning of message 2"),
    ):
        with pytest.raises(ValueError, match=f"chat_template.jinja does not write {message}.*"):
            shown(template, record, reasoning)
    earlier = [question, {**answer, **thought}, question, answer]
    assert shown(template, earlier, "drop") == shown(template, earlier) == shown(template, [question, answer] * 2)


def test_a_message_that_the_template_drops_is_refused(shown, folder):
    """Each chat is looked at, whether its words stand elsewhere in the text or not."""
    drops = QWEN3.replace("{%- else %}\n  ", "{%- elif m.role in ('user', 'system') %}\n  ")
    assert drops != QWEN3
    chat = [{"role": "developer", "content": "Hi"}, *TALK]
    assert "developer\nHi" in shown(QWEN3, chat)
    prompt = lambda: ChatTemplate(load_tokenizer(str(folder))).prompt(chat[:2])  # noqa: E731
    for reads in (lambda: shown(drops, chat), prompt):
        with pytest.raises(ValueError, match=r"not write the content of message 1 \(developer\): 'Hi'; remove it"):
            reads()
    called = [TALK[0], {**TALK[1], "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": 'a "b"\n'}, TALK[3]]
    quoted = QWEN3.replace("<tool_response>' + m.content", "<tool_response>' + (m.content | tojson)")
    assert 'a \\"b\\"\\n' in shown(quoted, called)
    with pytest.raises(ValueError, match=r"the content of message 2 \(assistant\): 'Hello\. '"):
        shown(QWEN3.replace("{{- m.content }}", "{{- '' if m.tool_calls else m.content }}"), called)


def test_words_that_a_template_takes_for_reasoning_are_refused(shown):
    """It cuts contents at "</think>", in an answer about the tag, too, and drops the reasoning of the last answer."""
    plain = shown(DEEPSEEK, messages("Hi", "<think>t</think>a", "b", "c"))
    assert plain == "<User>Hi<Assistant>[a</s>]<User>b<Assistant>[c</s>]"
    for answer in ("Use the </think> tag", "<think>t</think>Use the </think> tag"):
        with pytest.raises(ValueError, match="the content beside </think> of message 2: 'Use the '; remove it"):
            shown(DEEPSEEK, messages("Hi", answer, "b", "c"))
        assert "[" + answer + "<|im_end|>]" in shown(CHATML, messages("Hi", answer, "b", "c"))
    with pytest.raises(ValueError, match="the reasoning of message 4: 't'"):
        shown(DEEPSEEK, messages("Hi", "a", "b", "<think>t</think>c"))


def test_answers_that_say_they_are_not_trained_on(shown):
    expected = shown(CHATML, TALK).replace("[Hello. <|im_end|>]", "Hello. <|im_end|>")
    for name, untrue in itertools.product(FLAGS, (False, 0, 0.0)):
        untrue = not untrue if name == "masked" else untrue
        flags = [{name: untrue, "id": 7}, {name: not untrue, "weight": None}]
        chat = [{**TALK[0], name: untrue}, {**TALK[1], **flags[0]}, {**TALK[2], name: None}, {**TALK[3], **flags[1]}]
        assert shown(CHATML, chat) == shown(MARKED, chat) == expected
    joined = MARKED.replace("{% for m in messages %}", "{% for m in messages[:1] + messages[2:] %}")
    joined = joined.replace("m.content +", "(messages[1].content if m.role == 'assistant' else '') + m.content +")
    with pytest.raises(ValueError, match='joins messages into turns: "weight" cannot be obeyed'):
        shown(joined, chat)


def test_empty_results_of_tools_and_system_messages(shown):
    call = {**TALK[1], "content": "true", "tool_calls": [{"name": "f"}]}
    last = {**TALK[3], "reasoning_content": None, "tool_calls": None, "weight": None}  # tables are written out so
    chat = [{"role": "system", "content": ""}, TALK[0], call, {"role": "tool", "content": None}, last]
    text = shown(QWEN3, chat)
    assert "<|im_start|>system\n<|im_end|>" in text and "<tool_response></tool_response>" in text


def test_the_day_is_the_same_on_every_day(shown, caplog):
    caplog.set_level(logging.INFO)
    dated = "{{ strftime_now('%d %b %Y') }}|" + CHATML
    assert shown(dated, TALK).startswith("01 Jan 2026|") and "is told 2026-01-01 on every day" in caplog.text
    own = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024|{% endif %}" + CHATML
    assert shown(own, TALK).startswith("26 Jul 2024|")


def test_marked_templates_have_the_mask_of_transformers(theirs, folder):
    talks = [TALK, messages("a", "b"), messages("x\n", "\u00e9\u4e2d \U0001f600 he", "a", " z", "q", "r")]
    for talk in talks:
        expected = theirs.apply_chat_template(
            talk, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        for template in (MARKED, CHATML):  # CHATML has no marks, and the same turns
            (folder / "chat_template.jinja").write_text(template)
            ids, masked = ChatTemplate(load_tokenizer(str(folder))).encode({"messages": talk})
            assert ids.tolist() == expected["input_ids"]
            assert (~masked).astype(int).tolist() == expected["assistant_masks"]
        for template in (CHATML, LLAMA3, QWEN3, DEEPSEEK, GEMMA3, OLMO3, MINISTRAL3):
            (folder / "chat_template.jinja").write_text(template)
            ids, _ = ChatTemplate(load_tokenizer(str(folder))).encode({"messages": talk})
            assert ids.tolist() == theirs.apply_chat_template(talk, chat_template=template, return_dict=False)


def test_bad_messages(folder, tmp_path, caplog):
    (folder / "chat_template.jinja").write_text(CHATML)
    good, tokenizer = json.dumps({"messages": TALK}), load_tokenizer(str(folder))
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    tool, calls = {"role": "tool", "content": "c"}, {**assistant, "tool_calls": [{"name": "f"}]}
    cases = [
        ("x", '"messages" must be a list of objects, or JSON of one'),
        ([3], 'message 1 of "messages" must be an object with "role" and "content", or "from" and "value"'),
        ([user, {"role": "critic", "content": "b"}],
         r"message 2 \(critic\) has a role that is not known; known are sys"),
        ([user, assistant, tool], r"message 3 \(tool\) follows assistant"),
        ([user, calls, assistant], r"message 3 \(assistant\) follows an assistant that calls tools, .* tool"),
        ([user, {**assistant, "reasoning": ["so"]}], r"message 2 \(assistant\) has reasoning that is not one string"),
        ([user, {**assistant, "reasoning": "a", "thinking": "b"}], "has reasoning that is not one string"),
        ([{**user, "thinking": "a"}, assistant], r"message 1 \(user\) has tool_calls, reasoning or a weight"),
        ([{**user, "tool_calls": [{"name": "f"}]}, assistant], r"message 1 \(user\) has tool_calls, reasoning or a"),
        ([user, {**assistant, "weight": 0.5}], r'message 2 \(assistant\) has "weight": 0.5; it must be true, false, 1'),
        ([user, {**assistant, "loss": "false"}],
         r'message 2 \(assistant\) has "loss": "false"; it must be true, false'),
        ([user, {**assistant, "train": True, "weight": 0}], "says that it is trained on, and that it is not"),
        ([{**user, "train": True}, assistant], r"message 1 \(user\) has tool_calls, reasoning or a weight, which only"),
        ([user, calls, {**tool, "loss": 1}, assistant], r"message 3 \(tool\) has tool_calls, reasoning or a weight"),
        ([user, {**assistant, "learn": False}], r'message 2 \(assistant\) has "learn": false, which is not known here'),
        ([user, {**assistant, "skip": "Yes"}], r'message 2 \(assistant\) has "skip": "Yes", which is not known here'),
        ([{**user, "score": 0.7}, assistant], r'message 1 \(user\) has "score": 0.7, which is not known here; remove'),
        ([user, {**assistant, "ignored": "true"}],
         r'message 2 \(assistant\) has "ignored": "true", which is not known'),
        ([user, {**assistant, "train_detail": [{"train": 0}]}], r'has "train_detail": .*, which is not known here'),
        ([user, {**assistant, "content": [{"type": "text", "text": "b", "loss": False}]}],
         'a part of message 2 .* "lo'),
        ([user, {**calls, "tool_calls": [{"name": "f", "weight": 0}]}], 'a call of message 2 .* has "weight": 0'),
        ([user, {**assistant, "tool_calls": [{"function": {"name": 3}}]}], 'tool_calls" must be a list of objects'),
        ([{**user, "content": [{"type": "image"}]}, assistant], r"message 1 \(user\) has a content that is no text"),
        ([user, {**assistant, "content": 3}], "content that is no text"),
        ([user, {**assistant, "tool_calls": "f"}], 'calls of message 2 of "messages" must be a list'),
        ([{**user, "content": "x<|im_end|>"}, assistant], r"a message has '<\|im_end\|>' in it, which begins or ends"),
        ([{**user, "content": "<|im_start|>assistant\nx"}, assistant], r"a message has '<\|im_start\|>"),
        ([user, {**assistant, "name": "\ud800"}], "escaped NUL or lone surrogate in the messages"),
    ]  # fmt: skip
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
    lines = [{"messages": TALK, "prompt": TALK[0]["content"], "text": None}, *({"messages": each} for each in nothing)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert len(load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)) == 1
    assert [record.getMessage().rpartition("/")[::2] for record in caplog.records] == [
        (f"data: left out chats with an empty question or answer: 2, the first in {tmp_path}", "a.jsonl:2"),
        (f"data: left out chats without a target: 2, the first in {tmp_path}", "a.jsonl:4"),
    ]
    depth = sys.getrecursionlimit() - 40  # torch.compile raises it, if an earlier test has used that
    (tmp_path / "a.jsonl").write_text(good[:-1] + ', "tools": [{"a": ' + "[" * depth + "]" * depth + "}]}")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: (objects within objects|not JSON)"):
        load_documents(str(tmp_path / "a.jsonl"), tokenizer, 300)
    (folder / "chat_template.jinja").write_text(MARKED.replace("{{ m.content + '<|im_end|>' }}{% endg", "{% endg"))
    (tmp_path / "a.jsonl").write_text(good)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: chat template .* does not write the content of message 2"):
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
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show where the assistant's turns begin"),
])  # fmt: skip
def test_hostile_templates(shown, template, message):
    with pytest.raises(ValueError, match=message) as error:
        shown(template, TALK)
    assert "chat_template.jinja" in str(error.value) and len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_sigterm_ends_a_template_that_does_not_end(folder):
    """The template compares huge strings, in a loop of C code that runs none of Python's handlers of signals."""
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
    unended = CHATML.replace("'<|im_end|>\n' }}", "('' if m.content == 'Hello. ' else '<|im_end|>\n') }}")
    with pytest.raises(ValueError, match=r"turn 1 of the assistant does not end with '<\|im_end\|>'"):
        shown(unended, TALK)
    skipped = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.content != 'Hello. ' %}")
    with pytest.raises(ValueError, match=r"the template shows 1 turns of the assistant, the messages are 2"):
        shown(skipped, TALK)
    nested = MARKED.replace("{{ m.content + '<", "{% generation %}{{ m.content }}{% endgeneration %}{{ '<")
    half = MARKED.replace("{% generation %}", "{% set turn %}{% generation %}")
    half = half.replace("{% endgeneration %}", "{% endgeneration %}{% endset %}{{ turn[:-1] }}")
    for template in (nested, half):
        with pytest.raises(ValueError, match=r"nests {% generation %}, or writes half of it"):
            shown(template, TALK)


def test_turns_in_any_order_are_as_transformers_writes_them(shown, theirs):
    user, assistant, system = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))
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
    for reasoning in ("keep", "drop"):  # the thought stands before the last question, but "keep" keeps it
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
            (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=message):
            ChatTemplate(load_tokenizer(str(tmp_path)))
    (tmp_path / "chat_template.jinja").unlink()
    odd = [{"name": ["x"], "template": "x"}, 3, {"name": {}}]
    for value in (CHATML, [*odd, {"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        ids, _ = ChatTemplate(load_tokenizer(str(tmp_path / "tokenizer.json"))).encode({"messages": TALK})
        assert len(ids) > 10
