"""The assistant's turns in a chat that a template wrote."""

import re
from os.path import commonprefix

from training.data.template import CLOSE, OPEN, Template, Turn
from training.data.tokenizer import FileTokenizer
from training.host.errors import UserError

QUESTION, ANSWER = {"role": "user", "content": "QqQ"}, {"role": "assistant", "content": "AaA"}
TALK = [QUESTION, ANSWER, {**QUESTION, "content": "RrR"}, {**ANSWER, "content": "BbB"}]
CALL = {"id": "callcall1", "type": "function", "function": {"name": "NnN", "arguments": {}}}
RESULT = {"role": "tool", "content": "RrR", "name": "NnN", "tool_call_id": "callcall1"}
CALLED: list[dict] = [QUESTION, {**ANSWER, "content": "", "tool_calls": [CALL, CALL]}, RESULT, RESULT, ANSWER]


class Turns:
    """Finds the assistant's turns: the text that a template writes for each message, from its header to its end.

    Marks show which text belongs to which message; see Template. Header and end are learnt from one short chat: in
    ChatML they are "<|im_start|>assistant\\n" and "<|im_end|>". The last turn may have an end of its own. Raises
    UserError if the template does not show where turns begin and end.

    Attributes:
        ends: strings that end a turn. Words within {% generation %} may have none.
        borders: words that would begin or end a turn if a message had them.
    """

    def __init__(self, template: Template, tokenizer: FileTokenizer):
        self._template, self._added = template, tokenizer.added_tokens
        self._header = ""
        self._given = ""  # words behind the header that the template begins an answer with, such as "<think>"
        self.ends = tuple[str, ...]()
        self.borders: tuple[str, ...] = (OPEN, CLOSE)
        text, parts = template.cut(TALK)
        answers, is_once = _answers(text, parts), len(re.findall("QqQ|AaA|RrR|BbB", text)) == 4
        if len(answers) == 2 and is_once:
            self._learn(text, parts, answers)
        if not template.is_marked and not self.ends:
            fault = "show where the assistant's turns begin and end" if is_once else "write each message once"
            cure = "in a copy of it put {% generation %} and {% endgeneration %} around the assistant's words"
            name = "--chat_template" if tokenizer.has_template_flag else "chat_template.jinja beside the tokenizer"
            raise UserError(f"chat template {template.file} does not {fault}: {cure}, and give it as {name}")
        bos = tokenizer.special_tokens.get("bos_token", "")
        tokens = (token for token in self._added if any(token in end for end in self.ends))
        words = (*self.borders, *map(str.strip, self.ends), *tokens, bos if text.startswith(bos) else "")
        self.borders = tuple(word for word in words if word)

    def find(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        """Returns a chat's text, and the assistant's turns in it: without headers, with the tokens that end them."""
        text, parts = self._template.cut(messages, tools)
        count = sum(message["role"] == "assistant" for message in messages)
        if len(parts) != count and not self._template.is_marked:
            raise UserError(f"the template shows {len(parts)} turns of the assistant, the messages are {count}")
        turns = []
        for number, (start, stop) in enumerate(parts, start=1):
            if self._header in text[start:stop]:
                start = text.index(self._header, start) + len(self._header)
            turn = text[start:stop].rstrip()
            is_ended = turn.endswith(self.ends)
            if not is_ended and not self._template.is_marked:
                ends = " or ".join(map(repr, self.ends))
                raise UserError(f"turn {number} of the assistant does not end with {ends} in the template")
            turns.append((start, start + len(turn) if is_ended else stop))
        return text, turns

    def behind_given(self, text: str, turns: list[Turn]) -> list[Turn]:
        """Returns turns without the words that the template itself begins an answer with, such as "<think>"."""
        if self._template.is_marked:
            return turns
        return [(start + len(self._given) * text.startswith(self._given, start), stop) for start, stop in turns]

    def _learn(self, text: str, parts: list[Turn], answers: list[tuple[str, str, str]]) -> None:
        """Learn header, ends and borders of turns from `text`, the rendering of TALK, and its parts."""
        heads, _, tails = zip(*answers)
        before, asked = self._template.render(TALK[:1]), self._template.render(TALK[:1], asks=True)
        # Text before an answer, without a space at its end: that is part of the answer's first token.
        prompt = asked.removeprefix(before).rstrip(" ") if asked.startswith(before) else ""
        _, first, _, last, _ = re.split("QqQ|AaA|RrR|BbB", text)
        lengths = (n for n in range(len(prompt), 0, -1) if prompt[:n] in first and prompt[:n] in last)
        self._header = prompt[: next(lengths, 0)]
        if not self._header and not self._template.is_marked and heads[0] == heads[1]:  # the template has no prompt
            self._header = prompt = heads[0].rstrip(" ")
        self._given = prompt[len(self._header) :]
        self.ends = tuple(dict.fromkeys(tail.rstrip() for tail in tails)) if all(map(str.strip, tails)) else ()
        self.borders += (self._header.strip(),)
        if not self._template.is_marked and self.ends:
            opener = text[parts[0][1] : text.index("RrR")].strip()
            shared = commonprefix([self._header.strip(), opener])  # noqa: RUF071  strings, not paths
            opener = shared if shared in self._added else opener
            self.borders += (self._beginning(TALK[:2]), opener, self._beginning(CALLED))

    def _beginning(self, messages: list[dict]) -> str:
        """Returns the text that begins the last message: a header, or the token that ends the message before it.

        Mistral's templates write "[/INST]" behind a question, and "[/TOOL_RESULTS]" behind a tool's result.
        """
        try:
            text, parts = self._template.cut(messages)
        except UserError:  # no tools, or one call at a time
            return ""
        start, stop = parts[-1] if parts else (0, 0)
        if self._header and self._header in text[start:stop]:
            return self._header.strip()
        before = text[:start].rpartition(messages[-2]["content"])[2]
        return max((token for token in self._added if token in before), key=before.rfind, default=before.strip())


def _answers(text: str, parts: list[Turn]) -> list[tuple[str, str, str]]:
    """Returns both answers of TALK in three: the text before the answer's word, the word, and the text behind it."""
    found, start = [], 0
    for word, stop in (("AaA", text.find("RrR")), ("BbB", len(text))):
        inside = [part for part in parts if start <= part[0] and part[1] <= stop]
        found += [text[inside[0][0] : inside[-1][1]].partition(word)] if inside else []
        start = stop
    return [answer for answer in found if answer[1]]
