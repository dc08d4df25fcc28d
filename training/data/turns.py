"""The assistant's turns in a chat that a template wrote."""

import functools
import logging
import re
from os.path import commonprefix
from typing import NamedTuple

from training.data.template import (
    ANSWER,
    CLOSE,
    ONE_CALL,
    OPEN,
    QUESTION,
    TWO_CALLS,
    Template,
    Turn,
)
from training.data.tokenizer import FileTokenizer
from training.host.errors import UserError

logger = logging.getLogger(__name__)
TALK = [QUESTION, ANSWER, {**QUESTION, "content": "RrR"}, {**ANSWER, "content": "BbB"}]
# Answers that templates begin in several ways.
SHAPES = [
    ANSWER,
    {**ANSWER, "reasoning_content": "TtT"},
    {**ANSWER, "content": "<think>\nTtT\n</think>\n\nAaA"},
    {**ANSWER, "content": "TtT\n</think>\n\nAaA"},
    ONE_CALL[1],
]
BEFORE = {
    "user": ([QUESTION],),
    "tool": (TWO_CALLS[:-1], ONE_CALL[:-1]),
    "assistant": ([QUESTION, ANSWER],),
}
ENDS_OF_WORDS = "\n>]"  # characters that end a line, or a tag


class Header(NamedTuple):
    """The text that a template writes before an answer."""

    text: str  # before each answer: "<|im_start|>assistant\n"
    prefill: str = ""  # words behind it that a prompt has, and not every answer: "<think>\n"
    calls_without: bool = False  # whether answers that call have none


class Turns:
    """Finds the assistant's turns: what a template writes for each answer, behind its header.

    Marks show which text belongs to which message; see Template. Header and end are learnt from one
    short chat: in ChatML they are "<|im_start|>assistant\\n" and "<|im_end|>". The last turn may
    have an end of its own. Raises UserError if the template does not show where turns begin and
    end.

    Attributes:
        ends: strings that end a turn. Words within {% generation %} may have none.
        borders: words that would begin or end a turn if a message had them.
    """

    def __init__(self, template: Template, tokenizer: FileTokenizer):
        self._template, self._added = template, tokenizer.added_tokens
        self._header = ""
        self._headers: dict[str, Header | None] = {}  # by the role of the message before an answer
        self.ends = tuple[str, ...]()
        # Ends of turns that call, and whether generation stops there.
        self._ends_of_calls: dict[str, bool] = {}
        self.borders: tuple[str, ...] = (OPEN, CLOSE)
        text, parts = template.cut(TALK)
        answers, is_once = _answers(text, parts), len(re.findall("QqQ|AaA|RrR|BbB", text)) == 4
        if len(answers) == 2 and is_once:
            self._learn(text, parts, answers)
        if not template.is_marked and not self.ends:
            fault = "write each message once"
            if is_once:
                fault = "show where the assistant's turns begin and end"
            place = "chat_template.jinja beside the tokenizer"
            if tokenizer.has_template_flag:
                place = "--chat_template"
            raise UserError(
                f"chat template {template.file} does not {fault}: in a copy of it put "
                "{% generation %} and {% endgeneration %} around the assistant's words, and give "
                f"it as {place}"
            )
        bos = tokenizer.special_tokens.get("bos_token", "")
        ends = (*self.ends, *self._ends_of_calls)
        tokens = (token for token in self._added if any(token in end for end in ends))
        words = (*self.borders, *map(str.strip, ends), *tokens, bos if text.startswith(bos) else "")
        self.borders = tuple(word for word in words if word)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings at which generation stops."""
        return (*self.ends, *(end for end, is_stop in self._ends_of_calls.items() if is_stop))

    def find(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        """Returns a chat's text, and the assistant's turns: without headers, with their ends."""
        text, parts = self._template.cut(messages, tools)
        before = _before_answers(messages)
        if len(parts) != len(before) and not self._template.is_marked:
            raise UserError(
                f"the template shows {len(parts)} turns of the assistant, "
                f"the messages are {len(before)}"
            )
        before = before if len(parts) == len(before) else [("user", False)] * len(parts)
        turns = []
        for number, ((start, stop), (role, calls)) in enumerate(zip(parts, before), start=1):
            start = self._behind_header(text, (start, stop), role, calls, number)
            turn = text[start:stop].rstrip()
            is_ended = turn.endswith((*self.ends, *self._ends_of_calls) if calls else self.ends)
            if not is_ended and not self._template.is_marked:
                ends = " or ".join(map(repr, self.ends))
                raise UserError(
                    f"turn {number} of the assistant does not end with {ends} in the template"
                )
            turns.append((start, start + len(turn) if is_ended else stop))
        return text, turns

    def behind_given(self, text: str, turns: list[Turn], messages: list[dict]) -> list[Turn]:
        """Returns turns without words such as "<think>" that the template begins answers with."""
        before = _before_answers(messages)
        if self._template.is_marked or len(turns) != len(before):
            return turns
        headers = [self._header_behind(role) or self._header_behind("user") for role, _ in before]
        prefills = [header.prefill if header else "" for header in headers]
        same = [_same(words, text[start:stop]) for words, (start, stop) in zip(prefills, turns)]
        return [(start + count, stop) for count, (start, stop) in zip(same, turns)]

    def _behind_header(self, text: str, part: Turn, role: str, calls: bool, number: int) -> int:
        """Returns the first character of a part behind its header.

        The message before it has this `role`.
        """
        start, stop = part
        known = (self._header_behind(before) for before in (role, "user"))
        headers = [header for header in known if header is not None]
        for header in headers:
            place = text.find(header.text, start, stop)
            if place >= 0:
                return place + len(header.text)
        if self._template.is_marked or (calls and any(header.calls_without for header in headers)):
            return start
        shown = " or ".join(dict.fromkeys(repr(header.text) for header in headers))
        raise UserError(
            f"turn {number} of the assistant does not begin with {shown} in the template, and its "
            "header is not known: mend that answer, or put {% generation %} around answers in a "
            "copy of the template"
        )

    def _header_behind(self, role: str) -> Header | None:
        """Returns the header of an answer to a message of this role; None if none is shown."""
        if role not in self._headers:
            headers = map(self._learn_header, BEFORE.get(role, ()))
            self._headers[role] = next((header for header in headers if header is not None), None)
        return self._headers[role]

    def _learn_header(self, before: list[dict]) -> Header | None:
        """Returns what the template writes before answers of all shapes and where it asks."""
        try:
            unasked = self._template.render(before)
            prompt = self._template.render(before, asks=True)
        except UserError:
            return None
        shared = []
        for answer in SHAPES:
            for behind in ([], TALK[2:]):
                part = self._find_part(before, answer, behind)
                if part is None:
                    continue
                start, text = part
                # A header within {% generation %} is none if only its end is.
                is_complete = start <= len(unasked) or not self._template.is_marked
                if text[:start] == prompt[:start] and is_complete:
                    length = _same(prompt[start:], text[start:])
                    shared.append((length, start, "tool_calls" in answer))
        if not shared:
            return None
        # The shortest that any answer has; a template may begin calls without.
        length, start, _ = min((entry for entry in shared if entry[0]), default=shared[0])
        # Text before an answer, without a space at its end: the answer's first token has that.
        header = prompt[start : start + length].rstrip(" ")
        calls_without = any(calls and not length for length, _, calls in shared)
        return Header(header, prompt[start + len(header) :].rstrip(" "), calls_without)

    def _find_part(
        self, before: list[dict], answer: dict, behind: list[dict]
    ) -> tuple[int, str] | None:
        """Returns where an answer begins in a chat's text, and the text up to the answer's end."""
        if "tool_calls" in answer:
            behind = [ONE_CALL[2], *behind]
        try:
            text, parts = self._template.cut([*before, answer, *behind])
        except UserError:
            return None
        number = sum(message["role"] == "assistant" for message in before)
        if number >= len(parts):
            return None
        start, stop = parts[number]
        return (start, text[:stop]) if start < stop else None

    def _learn(self, text: str, parts: list[Turn], answers: list[tuple[str, str, str]]) -> None:
        """Learns header, ends and borders of turns from `text`, the rendering of TALK."""
        heads, _, tails = zip(*answers)
        header = self._learn_header(TALK[:1])
        has_prompt = header is not None and header.text
        if not has_prompt and not self._template.is_marked:
            header = Header(heads[0][: _same(*heads)].rstrip(" "))
            if not header.text and any(map(str.strip, heads)):
                return  # the turns begin in two ways
        header = header or Header("")
        self._headers["user"], self._header = header, header.text
        if all(map(str.strip, tails)):
            self.ends = tuple(dict.fromkeys(map(str.rstrip, tails)))
        self.borders += (self._header.strip(),)
        if not self.ends:
            return
        self._learn_ends_of_calls()
        if not self._template.is_marked:
            opener = text[parts[0][1] : text.index("RrR")].strip()
            shared = commonprefix([self._header.strip(), opener])  # noqa: RUF071  no paths
            opener = shared if shared in self._added else opener
            self.borders += (self._beginning(TALK[:2]), opener, self._beginning(TWO_CALLS))

    def _learn_ends_of_calls(self) -> None:
        """Learns what ends turns with calls alone, as gpt-oss's "<|call|>".

        A token that DeepSeek R1's template writes behind one call stands between two calls: it is
        no stop.
        """
        ends: list[str | None] = []  # behind one call, and behind two; None: as other turns
        for chat in (ONE_CALL, TWO_CALLS):
            try:
                text, parts = self._template.cut(chat)
            except UserError:
                continue
            call = text[slice(*parts[0])].rstrip() if parts else ""
            if "NnN" in call and "RrR" not in call:
                tokens = (token for token in self._added if call.endswith(token))
                behind = call.rpartition("VvV")[2].lstrip("\"'}]) \n")
                end = max(tokens, key=len, default=behind)
                ends.append(None if call.endswith(self.ends) else end)
        for end in sorted({end for end in ends if end}):
            self._ends_of_calls[end] = end in self._added and {*ends} == {end}
            if not self._ends_of_calls[end]:
                _warn_of_calls(str(self._template.file), end)

    def _beginning(self, messages: list[dict]) -> str:
        """Returns the text that begins the last message: a header, or the token before it.

        Mistral's templates write "[/INST]" behind a question, and "[/TOOL_RESULTS]" behind a tool's
        result.
        """
        try:
            text, parts = self._template.cut(messages)
        except UserError:  # no tools, or one call at a time
            return ""
        start, stop = parts[-1] if parts else (0, 0)
        if self._header and self._header in text[start:stop]:
            return self._header.strip()
        before = text[:start].rpartition(messages[-2]["content"])[2]
        tokens = [token for token in self._added if token in before]
        return max(tokens, key=before.rfind, default=before.strip())


@functools.cache  # once in a run, which opens a template several times
def _warn_of_calls(file: str, end: str) -> None:
    logger.warning(
        "chat template %s ends a turn with one call by %r, at which generation does not stop: the "
        "model does not learn to stop behind such a call",
        file,
        end,
    )


def _before_answers(messages: list[dict]) -> list[tuple[str, bool]]:
    """Returns for each message of the assistant the role before it, and whether it calls tools."""
    roles = ["", *(message["role"] for message in messages)]
    return [
        (role, bool(message.get("tool_calls")))
        for role, message in zip(roles, messages)
        if message["role"] == "assistant"
    ]


def _same(text: str, second: str) -> int:
    """Returns how many characters both begin with, up to the end of a tag or a line.

    "<think>" and "<table>" share none.
    """
    same = commonprefix([text, second])  # noqa: RUF071  strings, not paths
    if len(same) == len(text):
        return len(same)
    return max(same.rfind(end) for end in ENDS_OF_WORDS) + 1


def _answers(text: str, parts: list[Turn]) -> list[tuple[str, str, str]]:
    """Returns both answers of TALK, each as the text before its word, the word, the text behind."""
    answers, start = [], 0
    for word, stop in (("AaA", text.find("RrR")), ("BbB", len(text))):
        inside = [part for part in parts if start <= part[0] and part[1] <= stop]
        start = stop
        if inside:
            before, word, behind = text[inside[0][0] : inside[-1][1]].partition(word)
            if word:
                answers.append((before, word, behind))
    return answers
