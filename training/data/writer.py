"""Chats as text: written by a template, and compared with what the messages have."""

import copy
import itertools
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NoReturn

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
from training.data.unread import EMPTY, PLAIN, cure_of, find_lost_of_message, said_by, texts_in
from training.host.errors import UserError

# Characters that documents must not hold, but escapes in JSON can spell: NUL, and halves of
# surrogate pairs.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
OF_RESULTS = ("name", "tool_call_id")  # fields by which results of tools say what they belong to
OF_CALLS = ("id", "type", "function", "index")
OF_FUNCTIONS = ("name", "arguments")
KINDS = 10_000  # kinds of chats that are kept, at most
# Place of a field: (1, "source"), or (1, "tool_calls", 0, "function", "strict").
Path = tuple[int | str, ...]


@dataclass(frozen=True)
class Probe:
    """A word that stands in place of a part of a message, to be looked for in the text."""

    number: int  # of the message, from 0
    part: str  # "content", "reasoning", "tool_calls", "arguments of the tool_calls"
    word: str
    call: int = 0  # number of the call, from 0


class ChatWriter:
    """Writes chats by one template, and finds the assistant's turns.

    Refuses a chat that is not written whole. What a template writes is learnt once for chats of one
    kind: the same roles with the same fields.
    """

    def __init__(self, template: Template, tokenizer: FileTokenizer, reasoning: str):
        self.template, self._reasoning = template, reasoning
        template.learn_forms()
        self.turns = Turns(template, tokenizer)
        self._shown = set[int]()  # kinds of chats of which all contents are written
        self._unwritten = dict[int, list[Path]]()  # fields that are not written, by kinds

    def prompt(self, messages: list[dict]) -> str:
        """Returns the messages as text, and the words that the template begins an answer with."""
        self._check_contents(messages, None)
        return self.template.render(messages, asks=True)

    def write(
        self, messages: list[dict], tools: list | None, variables: dict
    ) -> tuple[str, list[Turn]]:
        """Returns a chat's text, and the assistant's turns in it.

        Args:
            variables: values of the template's variables that the row gave.
        """
        self._check_words([messages, tools, variables])
        self._check_contents(messages, tools)
        text, turns = self._find_turns(messages, tools)
        self._check_shown(messages, tools, text, turns)
        return text, turns

    def unread_fields(self, messages: list[dict], tools: list | None) -> set[str]:
        """Returns names of fields of messages and calls that the template does not write.

        Raises UserError for a field that may be a part of an answer. Fields whose words the message
        has elsewhere are passed over.
        """
        unread = set()
        for path in self._unwritten_fields(messages, tools):
            message, name, value = messages[int(path[0])], str(path[-1]), _at(messages, path)
            lost = find_lost_of_message(name, value, said_by(message))
            if lost and lost.is_answer:
                raise UserError(
                    f"message {int(path[0]) + 1} ({message['role']}) has {json.dumps(name[:40])}: "
                    f"{lost.text[:40]!r}, which chat template {self.template.file} does not write; "
                    f"{cure_of(name)}, or remove it"
                )
            if lost or not texts_in(name, value):
                unread.add(name)
        return unread

    def _unwritten_fields(self, messages: list[dict], tools: list | None) -> list[Path]:
        """Returns the fields without which the text is the same."""
        paths = list(_other_fields(messages))
        kind = hash((_kind(messages, tools), *paths))
        if paths and kind not in self._unwritten:
            if len(self._unwritten) > KINDS:
                self._unwritten.clear()
            if self._is_same_without(messages, tools, paths):
                self._unwritten[kind] = paths
            else:
                is_same = self._is_same_without
                self._unwritten[kind] = [p for p in paths if is_same(messages, tools, [p])]
        return self._unwritten[kind] if paths else []

    def _is_same_without(self, messages: list[dict], tools: list | None, paths: list[Path]) -> bool:
        without = copy.deepcopy(messages)
        for path in paths:
            del _at(without, path[:-1])[path[-1]]
        try:
            return self.template.render(without, tools) == self.template.render(messages, tools)
        except UserError:  # it needs the field
            return False

    def _find_turns(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        """Returns a chat's text, and its turns, with the reasoning that is asked for."""
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if self._reasoning == "drop":
            last = max(questions, default=0)
            messages = [*map(without_reasoning, messages[:last]), *messages[last:]]
        text, turns = self.turns.find(messages, tools)
        if self._reasoning == "keep":
            text, turns = self._keep_reasoning(text, turns, messages, tools, questions)
        return text, self.turns.behind_given(text, turns, messages)

    def _keep_reasoning(
        self,
        text: str,
        turns: list[Turn],
        messages: list[dict],
        tools: list | None,
        questions: list[int],
    ) -> tuple[str, list[Turn]]:
        """Returns a text whose turns are written as if each user message were the last one."""
        self._check_one_turn_each(turns, messages)
        bodies: list[str] = []
        for stop in questions[1:]:  # messages before this user message make a chat of their own
            earlier, earlier_turns = self.turns.find(messages[:stop], tools)
            self._check_one_turn_each(earlier_turns, messages[:stop])
            bodies += [earlier[start:end] for start, end in earlier_turns[len(bodies) :]]
        borders = itertools.pairwise([0, *itertools.chain(*turns), len(text)])
        parts = [text[start:stop] for start, stop in borders]  # every second part is a turn
        for i, body in enumerate(bodies):
            parts[2 * i + 1] = self._with_end_of(parts[2 * i + 1], body)
        ends = [*itertools.accumulate(map(len, parts))]
        return "".join(parts), [*zip(ends[::2], ends[1::2])]

    def _check_one_turn_each(self, turns: list[Turn], messages: list[dict]) -> None:
        """Refuses to put turns of one rendering into another if answers and turns differ."""
        if len(turns) != sum(message["role"] == "assistant" for message in messages):
            raise UserError(
                f"chat template {self.template.file} marks other turns than one for each answer: "
                "--chat_reasoning keep cannot be obeyed; drop it"
            )

    def _check_shown(
        self, messages: list[dict], tools: list | None, text: str, turns: list[Turn]
    ) -> None:
        """Refuses a chat of which the template leaves out a part. Calls count by their names."""
        for name in function_names(tools):
            if name not in text:
                self._refuse_lost("tools", "the chat", name)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [text[start:stop] for start, stop in turns]
        if len(turns) != len(answers):  # marks of a template may join messages into one turn
            parts = [text] * len(answers)
        last_question = _last_question(messages)
        for i, part in zip(answers, parts):
            message, where = messages[i], f"message {i + 1}"
            inline = THINKING.match(message["content"])
            thought = (message.get("reasoning_content") or (inline[1] if inline else "")).strip()
            # Templates cut contents at "</think>", even in an answer about the tag.
            for piece in THINKING.sub("", message["content"]).split("</think>")[:-1]:
                if piece.strip() not in part:
                    self._refuse_lost("content beside </think>", where, piece)
            for name in function_names(message.get("tool_calls")):
                if name not in part:
                    self._refuse_lost("tool_calls", where, name)
            is_kept = self._reasoning == "keep" or i > last_question
            if is_kept and thought not in part:
                self._refuse_lost("reasoning", where, thought)

    def _check_contents(self, messages: list[dict], tools: list | None) -> None:
        """Refuses a chat of which the template leaves out a message, a call or reasoning.

        A template may trim or quote contents. Other words take their place, and are looked for in
        the text.
        """
        kind = _kind(messages, tools)
        if kind in self._shown:
            return
        chat, probes = _probes(messages)
        try:
            text, turns = self.template.cut(chat, tools)
        except UserError:  # it takes calls of certain names alone
            probes = [probe for probe in probes if probe.part == "content"]
            chat = list(messages)
            for probe in probes:
                chat[probe.number] = messages[probe.number] | {"content": probe.word}
            text, turns = self.template.cut(chat, tools)
        for probe in probes:
            self._check_probe(probe, messages, text, turns)
        self._shown.add(kind)

    def _check_probe(
        self, probe: Probe, messages: list[dict], text: str, turns: list[Turn]
    ) -> None:
        """Refuses a chat that lacks a probe's word, or has it twice, or in another's answer."""
        message, where = messages[probe.number], f"message {probe.number + 1}"
        role, is_lost = message["role"], probe.word not in text
        if probe.part == "reasoning":
            if is_lost and probe.number > _last_question(messages):
                self._refuse_lost("reasoning", where, message["reasoning_content"])
        elif is_lost and probe.part == "content":
            self._refuse_lost("content", f"{where} ({role})", message["content"])
        elif is_lost:
            names = function_names(message["tool_calls"])
            which = f", call {probe.call + 1} of {len(names)}" if len(names) > 1 else ""
            self._refuse_lost(probe.part, where + which, names[probe.call])
        file = self.template.file
        is_text = probe.part in ("content", "reasoning")
        if role == "assistant" and is_text and text.count(probe.word) > 1:
            twice = f"chat template {file} writes the {probe.part} of {where} ({role}) twice"
            cure = "give a --tokenizer or a --chat_template that writes it once"
            raise UserError(f"{twice}; {cure}")
        if role != "assistant" and any(probe.word in text[start:stop] for start, stop in turns):
            within = f"chat template {file} writes {where} ({role}) within an answer"
            cure = "put {% generation %} around the assistant's words in a copy of it"
            raise UserError(f"{within}: it would be trained on; {cure}")

    def _refuse_lost(self, part: str, where: str, value: str) -> NoReturn:
        lost = f"chat template {self.template.file} does not write the {part} of {where}"
        inline = "write it into the content as the model does, " if part == "reasoning" else ""
        raise UserError(
            f"{lost}: {value[:40]!r}; {inline}remove it, or give a --tokenizer whose template does"
        )

    def _with_end_of(self, turn: str, body: str) -> str:
        """Returns `body`, another rendering of a turn, with the end of `turn`.

        A chat's last turn may end otherwise.
        """
        return body.removesuffix(self._end_of(body)) + self._end_of(turn)

    def _end_of(self, turn: str) -> str:
        return next((end for end in self.turns.ends if turn.endswith(end)), "")

    def _check_words(self, value) -> None:
        """Refuses a chat with strings that would read as the border of a turn."""
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list):
            for part in value:
                self._check_words(part)
        if not isinstance(value, str):
            return
        if UNSTORABLE.search(value):
            raise UserError("escaped NUL or lone surrogate in the messages; remove it")
        for border in self.turns.borders:
            if border in value:
                raise UserError(
                    f"a message has {border!r} in it, which begins or ends turns; remove it"
                )


def _last_question(messages: list[dict]) -> int:
    """Returns the index of the last message of the user; -1 if there is none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _other_fields(messages: list[dict]) -> Iterator[Path]:
    """Yields fields of messages and calls that are not read: texts, lists and objects."""
    for i, message in enumerate(messages):
        known = [*READ, *(name for name, value in PLAIN.items() if message.get(name) == value)]
        known += OF_RESULTS if message["role"] == "tool" else ()
        yield from _unknown(message, known, (i,))
        for j, call in enumerate(message.get("tool_calls") or ()):
            place = (i, "tool_calls", j)
            yield from _unknown(call, OF_CALLS, place)
            yield from _unknown(call["function"], OF_FUNCTIONS, (*place, "function"))


def _unknown(fields: dict, known: Collection[str], place: Path) -> Iterator[Path]:
    for name, value in fields.items():
        is_number = isinstance(value, bool | int | float)
        if name not in known and value not in EMPTY and not is_number:
            yield (*place, name)


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
    if not isinstance(value, list):
        return bool(value)
    calls = [call.get("function") if isinstance(call, dict) else None for call in value]
    return tuple(isinstance(call, dict) and bool(call.get("arguments")) for call in calls)


def _probes(messages: list[dict]) -> tuple[list[dict], list[Probe]]:
    """Returns messages whose words are those of probes, and the probes."""
    chat, probes = [], []
    for i, message in enumerate(messages):
        replaced = dict(message)
        if message["content"]:
            replaced["content"] = f"Q{i}q"
            probes.append(Probe(i, "content", f"Q{i}q"))
        if message.get("reasoning_content"):
            replaced |= {name: f"T{i}t" for name in REASONING_FIELDS if name in message}
            probes.append(Probe(i, "reasoning", f"T{i}t"))
        if message.get("tool_calls"):
            replaced["tool_calls"] = []
            for j, call in enumerate(message["tool_calls"]):
                function = call["function"] | {"name": f"F{i}f{j}f"}
                probes.append(Probe(i, "tool_calls", f"F{i}f{j}f", j))
                arguments = function.get("arguments")
                if arguments not in (None, {}, "{}"):
                    value = {"k": f"V{i}v{j}v"}
                    is_text = isinstance(arguments, str)
                    function["arguments"] = json.dumps(value) if is_text else value
                    probes.append(Probe(i, "arguments of the tool_calls", value["k"], j))
                replaced["tool_calls"].append(call | {"function": function})
        chat.append(replaced)
    return chat, probes
