"""Chats as text: written by a template, with the assistant's turns, and compared with what the
messages have."""

import copy
import itertools
import json
import re
from collections.abc import Iterator

from training.data.messages import (
    READ,
    REASONING_FIELDS,
    THINKING,
    function_names,
    without_reasoning,
)
from training.data.template import Template, Turn
from training.data.tokenizer import FileTokenizer
from training.data.turns import Turns
from training.data.unread import (
    EMPTY,
    are_names_of_tools,
    cure_of,
    describes,
    is_of_a_last_answer,
    is_of_answers,
    is_thought,
    says_kind,
    texts_in,
    texts_of_answers,
    with_texts,
)
from training.host.errors import UserError

# Characters that documents must not hold, but escapes in JSON can spell: NUL, and halves of
# surrogate pairs.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# Texts of fields that are no words.
SETTINGS = {
    "true",
    "false",
    "yes",
    "no",
    "on",
    "off",
    "none",
    "auto",
    "enabled",
    "disabled",
    "low",
    "medium",
    "high",
}
OF_RESULTS = ("name", "tool_call_id")  # fields by which results of tools say what they belong to
KINDS = 10_000  # kinds of chats that are kept, at most
LONG = 16  # characters of a text that another has by no accident
PLAIN = {
    "channel": "final",
    "recipient": "all",
}  # fields of answers that are as others are without these
OF_CALLS = ("id", "type", "function", "index")
OF_FUNCTIONS = ("name", "arguments")
Path = tuple[
    int | str, ...
]  # of a field: (1, "source"), or (1, "tool_calls", 0, "function", "strict")


class ChatWriter:
    """Writes chats by one template, and finds the assistant's turns. Refuses a chat that is not
    written whole."""

    def __init__(self, template: Template, tokenizer: FileTokenizer, reasoning: str):
        self.template, self._reasoning = template, reasoning
        template.learn_forms()
        self.turns = Turns(template, tokenizer)
        self._shown: set[int] = (
            set()
        )  # chats, by their kinds, of which the template writes all contents
        self._fields: dict[
            int, dict[Path, list[bool]]
        ] = {}  # whether texts in fields are written, by kinds

    def prompt(self, messages: list[dict]) -> str:
        """Returns the messages as text, followed by the words that the template begins an answer
        with."""
        self._check_contents(messages, None)
        return self.template.render(messages, asks=True)

    def write(
        self, messages: list[dict], tools: list | None, variables: dict
    ) -> tuple[str, list[Turn]]:
        """Returns a chat's text, and the assistant's turns in it. The row gave `variables` to the
        template."""
        self._check_words([messages, tools, variables])
        self._check_contents(messages, tools)
        text, turns = self._whole(messages, tools)
        self._check_shown(messages, tools, text, turns)
        return text, turns

    def unread_fields(self, messages: list[dict], tools: list | None) -> set[str]:
        """Returns names of fields that describe messages and that the template does not write.

        Raises UserError for other fields whose words it does not write, unless their message has
        the words elsewhere.
        """
        paths = list(_other_fields(messages))
        written = self._written(messages, tools, paths) if paths else {}
        unread = set()
        for path in paths:
            message, name, value = messages[int(path[0])], str(path[-1]), _at(messages, path)
            texts = [*texts_in(name, value)]
            lost = _lost_words(texts, written[path], _said(message))
            is_of_thought = says_kind(name) and isinstance(value, str) and is_thought(value)
            within = describes(name) and _lost_within(value, message)
            if within:
                is_of_thought, lost = True, within
            if (describes(name) and not is_of_thought) or not lost:
                unread.update([name] if lost or not texts else [])
            elif not self._reads(messages, tools, path):
                has = (
                    f"message {int(path[0]) + 1} ({message['role']}) has {json.dumps(name[:40])}: "
                    f"{lost[:40]!r}"
                )
                what = f"which chat template {self.template.file} does not write"
                raise UserError(f"{has}, {what}; {cure_of(name)}, or remove it")
        return unread

    def _written(
        self, messages: list[dict], tools: list | None, paths: list[Path]
    ) -> dict[Path, list[bool]]:
        """Returns for each text in the fields at `paths` whether it is written: another word takes
        its place."""
        counts = tuple(len([*texts_in("", _at(messages, path))]) for path in paths)
        kind = hash((_kind(messages, tools), *paths, counts))
        if kind not in self._fields:
            if len(self._fields) > KINDS:
                self._fields.clear()
            self._fields[kind] = self._probe_fields(messages, tools, paths)
        return self._fields[kind]

    def _probe_fields(
        self, messages: list[dict], tools: list | None, paths: list[Path]
    ) -> dict[Path, list[bool]]:
        probes, numbers = copy.deepcopy(messages), itertools.count()
        for path in paths:
            _at(probes, path[:-1])[path[-1]] = with_texts(
                _at(probes, path), lambda _: f"Z{next(numbers)}z"
            )
        try:
            text = self.template.render(probes, tools)
        except UserError:  # it takes certain words alone
            text = ""
        return {
            path: [word in text for _, word in texts_in("", _at(probes, path))] for path in paths
        }

    def _reads(self, messages: list[dict], tools: list | None, path: Path) -> bool:
        """Whether the text would be another one without a field."""
        if str(path[-1]) not in self.template.source:
            return False
        without = copy.deepcopy(messages)
        del _at(without, path[:-1])[path[-1]]
        try:
            return self.template.render(without, tools) != self.template.render(messages, tools)
        except UserError:
            return True

    def _whole(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if self._reasoning == "drop":
            messages = [
                without_reasoning(m) if i < max(asked, default=0) else m
                for i, m in enumerate(messages)
            ]
        text, turns = self.turns.find(messages, tools)
        if self._reasoning == "keep":
            self._check_one_turn_each(turns, messages)
            bodies: list[str] = []
            for stop in asked[1:]:  # the messages before this user message make a chat of their own
                earlier, turns_of_earlier = self.turns.find(messages[:stop], tools)
                self._check_one_turn_each(turns_of_earlier, messages[:stop])
                bodies += [earlier[a:b] for a, b in turns_of_earlier[len(bodies) :]]
            parts = [
                text[a:b] for a, b in itertools.pairwise([0, *itertools.chain(*turns), len(text)])
            ]
            parts[1::2] = [
                *map(self._with_end_of, parts[1::2], bodies),
                *parts[1::2][len(bodies) :],
            ]
            ends = [*itertools.accumulate(map(len, parts))]
            text, turns = (
                "".join(parts),
                [*zip(ends[::2], ends[1::2])],
            )  # every second part is a turn
        return text, self.turns.behind_given(text, turns, messages)

    def _check_one_turn_each(self, turns: list[Turn], messages: list[dict]) -> None:
        """Refuses to put turns of one rendering into another where a template marks others than the
        messages."""
        if len(turns) != sum(message["role"] == "assistant" for message in messages):
            marks = f"chat template {self.template.file} marks other turns than one for each answer"
            raise UserError(f"{marks}: --chat_reasoning keep cannot be obeyed; drop it")

    def _check_shown(
        self, messages: list[dict], tools: list | None, text: str, turns: list[Turn]
    ) -> None:
        """Refuses a chat of which the template leaves out a part. Tools and calls count by their
        names."""
        answers = [
            (i, message)
            for i, message in enumerate(messages, start=1)
            if message["role"] == "assistant"
        ]
        # A template that marks turns may join several messages into one turn.
        shown = (
            [text[a:b] for a, b in turns] if len(turns) == len(answers) else [text] * len(answers)
        )
        asked = max(
            (i for i, message in enumerate(messages, start=1) if message["role"] == "user"),
            default=0,
        )
        missing = [
            ("tools", "the chat", name) for name in function_names(tools) if name not in text
        ]
        for (i, message), part in zip(answers, shown):
            where, inline = f"message {i}", THINKING.match(message["content"])
            thought = (message.get("reasoning_content") or (inline[1] if inline else "")).strip()
            # Templates cut contents at "</think>", even in an answer about the tag.
            pieces = THINKING.sub("", message["content"]).split("</think>")
            missing += [
                ("content beside </think>", where, p) for p in pieces[:-1] if p.strip() not in part
            ]
            called = function_names(message.get("tool_calls"))
            missing += [("tool_calls", where, name) for name in called if name not in part]
            if (self._reasoning == "keep" or i > asked) and thought not in part:
                missing.append(("reasoning", where, thought))
        for lost in missing:
            self._refuse_lost(*lost)

    def _check_contents(self, messages: list[dict], tools: list | None) -> None:
        """Refuses a chat of which the template leaves out a message, a call or reasoning.

        A template may trim or quote contents. Other words take their place, and are looked for in
        the text.
        """
        kind = _kind(messages, tools)
        if kind not in self._shown:
            probes, words = _probes(messages)
            try:
                text, turns = self.template.cut(probes, tools)
            except UserError:  # it takes calls of certain names alone
                words = {(i, what): word for (i, what), word in words.items() if what == "content"}
                contents = [
                    m | {"content": words.get((i, "content"), m["content"])}
                    for i, m in enumerate(messages)
                ]
                text, turns = self.template.cut(contents, tools)
            self._check_probes(messages, words, text, turns)
            self._shown.add(kind)

    def _check_probes(
        self, messages: list[dict], words: dict, text: str, turns: list[Turn]
    ) -> None:
        """Refuses a chat whose probe has not all words, or words of others within an answer."""
        asked = max(
            (i for i, message in enumerate(messages) if message["role"] == "user"), default=-1
        )
        for (i, what), word in words.items():
            role = messages[i]["role"]
            if what == "content" and word not in text:
                self._refuse_lost("content", f"message {i + 1} ({role})", messages[i]["content"])
            if what == "reasoning" and word not in text and i > asked:
                self._refuse_lost("reasoning", f"message {i + 1}", messages[i]["reasoning_content"])
            if what.startswith("call") and word not in text:
                calls = function_names(messages[i]["tool_calls"])
                j = int(what.split()[1])
                part = "arguments of the tool_calls" if what.endswith("argument") else "tool_calls"
                which = f", call {j + 1} of {len(calls)}" if len(calls) > 1 else ""
                self._refuse_lost(part, f"message {i + 1}{which}", calls[j])
            if role == "assistant" and what in ("content", "reasoning") and text.count(word) > 1:
                twice = (
                    f"chat template {self.template.file} writes the {what} of message {i + 1} "
                    f"({role}) twice"
                )
                raise UserError(
                    f"{twice}; give a --tokenizer or a --chat_template that writes it once"
                )
            if role != "assistant" and any(word in text[start:stop] for start, stop in turns):
                raise UserError(
                    f"chat template {self.template.file} writes message {i + 1} ({role}) within an "
                    "answer: it would be "
                    "trained on; put {% generation %} around the assistant's words in a copy of it"
                )

    def _refuse_lost(self, what: str, where: str, value: str) -> None:
        lost = (
            f"chat template {self.template.file} does not write the {what} of {where}: "
            f"{value[:40]!r}"
        )
        inline = "write it into the content as the model does, " if what == "reasoning" else ""
        raise UserError(f"{lost}; {inline}remove it, or give a --tokenizer whose template does")

    def _with_end_of(self, turn: str, body: str) -> str:
        """Returns `body`, another rendering of a turn, with the end of `turn`: a chat's last turn
        may end otherwise."""
        ends = [
            next((end for end in self.turns.ends if text.endswith(end)), "")
            for text in (turn, body)
        ]
        return body.removesuffix(ends[1]) + ends[0]

    def _check_words(self, value) -> None:
        """Refuse a chat with strings that would read as the border of a turn."""
        if isinstance(value, dict | list):
            for part in [*value, *value.values()] if isinstance(value, dict) else value:
                self._check_words(part)
        if isinstance(value, str):
            if UNSTORABLE.search(value):
                raise UserError("escaped NUL or lone surrogate in the messages; remove it")
            if found := [word for word in self.turns.borders if word in value]:
                raise UserError(
                    f"a message has {found[0]!r} in it, which begins or ends turns; remove it"
                )


def unread_of_row(fields: dict, messages: list[dict]) -> set[str]:
    """Returns names of a row's fields with words that its chat does not have.

    Raises UserError if a field's name says that it is of the answers, as "reasoning" beside
    "messages", or the answer to a chat that ends with a question, as "response".
    """
    unread = set()
    is_open = messages[-1]["role"] != "assistant"
    said = [text for message in messages for text in _said(message)]
    for name, value in fields.items():
        lost = _lost_of_row(name, value, said)
        has = (
            f"has {json.dumps(name[:40])} beside its messages: {lost[:40]!r}, which no chat "
            "template writes"
        )
        if lost and _is_of_answers(name, value):
            raise UserError(f"{has}; {cure_of(name)}, or remove it")
        if lost and is_open and is_of_a_last_answer(name):
            raise UserError(
                f"{has}; write it as the last message if it answers the question there, or remove "
                "it"
            )
        unread.update([name] if lost else [])
    return unread


def unread_of_sample(fields: dict, sample: dict, answer: str, is_chosen: bool) -> set[str]:
    """Returns names of fields of the answer that stand beside a sample, {"prompt": ...,
    "completion": ...}.

    Raises UserError if --columns has not chosen the answer; `answer` is the value of --columns that
    does.
    """
    unread = set()
    said = [
        text.strip() for text in (sample["prompt"], sample["completion"]) if isinstance(text, str)
    ]
    for name, value in fields.items():
        lost = _lost_of_row(name, value, said)
        if not lost or not _is_of_answers(name, value):
            continue
        if not is_chosen:
            has = (
                f"has {json.dumps(name[:40])} beside its answer: {lost[:40]!r}, which would be "
                "ignored"
            )
            leave_out = f"give --columns {answer} to leave it out"
            raise UserError(f"{has}; write it into the prompt or the answer, or {leave_out}")
        unread.add(name)
    return unread


def _lost_of_row(name: str, value: object, said: list[str]) -> str:
    texts = [*texts_in(name, value)]
    return _lost_words(texts, [False] * len(texts), said)


def _is_of_answers(name: str, value: object) -> bool:
    """Whether a field of a row has words that may be of an answer: settings, and names of tools,
    are none."""
    are_settings = all(text.strip().lower() in SETTINGS for _, text in texts_in(name, value))
    return is_of_answers(name) and not are_settings and not are_names_of_tools(name, value)


def _said(message: dict) -> list[str]:
    """Returns the words of a message that are read."""
    texts = [message["content"], *(message.get(name) for name in REASONING_FIELDS)]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _lost_within(value: object, message: dict) -> str:
    """Returns the first text of an answer within a field that describes it, which the message does
    not have."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [json.dumps(call.get("arguments"), ensure_ascii=False) for call in calls]
    texts = (text for _, text in texts_in("", [*_said(message), calls, arguments]))
    said = ["".join(text.split()) for text in texts]  # JSON may have other spaces
    words = (text for text in texts_of_answers(value) if text.strip().lower() not in SETTINGS)
    return next(
        (text for text in words if not any("".join(text.split()) in each for each in said)), ""
    )


def _lost_words(texts: list[tuple[str, str]], written: list[bool], said: list[str]) -> str:
    """Returns the first text of a field that is neither written nor `said` elsewhere; "" if there
    is none.

    A text may describe others, by the name nearest to it, as the "type" of reasoning. It counts if
    all are lost.
    """

    def is_said(text: str) -> bool:
        text = text.strip()
        return any(text == each or (len(text) >= LONG and text in each) for each in said)

    words = [text for near, text in texts if not describes(near)]
    if is_said("".join(words)):
        return ""
    lost = [not is_written and not is_said(text) for (_, text), is_written in zip(texts, written)]
    lost_words = [
        text for (near, text), is_lost in zip(texts, lost) if is_lost and not describes(near)
    ]
    return next(iter(lost_words), texts[0][1] if texts and all(lost) else "")


def _other_fields(messages: list[dict]) -> Iterator[Path]:
    """Yields where messages and their calls have fields with texts, lists or objects that are not
    read as such."""

    def others(fields: dict, known: tuple[str, ...]) -> list[str]:
        values = {
            name: value
            for name, value in fields.items()
            if name not in known and value not in EMPTY
        }
        return [name for name, value in values.items() if not isinstance(value, bool | int | float)]

    for i, message in enumerate(messages):
        plain = [name for name, value in PLAIN.items() if message.get(name) == value]
        known = (*READ, *plain, *(OF_RESULTS if message["role"] == "tool" else ()))
        yield from ((i, name) for name in others(message, known))
        for j, call in enumerate(message.get("tool_calls") or ()):
            yield from ((i, "tool_calls", j, name) for name in others(call, OF_CALLS))
            function = call["function"]
            yield from (
                (i, "tool_calls", j, "function", name) for name in others(function, OF_FUNCTIONS)
            )


def _at(value, path: Path):
    for key in path:
        value = value[key]
    return value


def _kind(messages: list[dict], tools: list | None) -> int:
    """Returns a hash of the roles of a chat's messages, and of which parts they have."""
    parts = (
        (m["role"], *((name, _is_there(value)) for name, value in m.items())) for m in messages
    )
    return hash((tools is None, *parts))


def _is_there(value) -> object:
    """Returns whether a value of a message is empty; for calls, which of them have arguments."""
    if isinstance(value, list):
        calls = [call.get("function") for call in value if isinstance(call, dict)]
        return tuple(
            bool(call.get("arguments")) if isinstance(call, dict) else None for call in calls
        )
    return bool(value)


def _probes(messages: list[dict]) -> tuple[list[dict], dict[tuple[int, str], str]]:
    """Returns messages with other words, and these words by the message's place and what they stand
    for."""
    words: dict[tuple[int, str], str] = {}
    probes = []
    for i, message in enumerate(messages):
        probe = dict(message)
        if message["content"]:
            probe["content"] = words[i, "content"] = f"Q{i}q"
        if message.get("reasoning_content"):
            words[i, "reasoning"] = f"T{i}t"
            probe |= {name: f"T{i}t" for name in REASONING_FIELDS if name in message}
        if calls := message.get("tool_calls"):
            probe["tool_calls"] = []
            for j, call in enumerate(calls):
                function = call["function"] | {"name": f"F{i}f{j}f"}
                words[i, f"call {j}"] = f"F{i}f{j}f"
                if function.get("arguments") not in (None, {}, "{}"):
                    value = words[i, f"call {j} argument"] = f"V{i}v{j}v"
                    is_text = isinstance(function["arguments"], str)
                    function["arguments"] = json.dumps({"k": value}) if is_text else {"k": value}
                probe["tool_calls"].append(call | {"function": function})
        probes.append(probe)
    return probes, words
