"""Chats as tokens: rendered whole by the tokenizer's own chat template, with the assistant's turns as targets."""

import contextlib
import itertools
import json
import logging
import re
from pathlib import Path

import numpy as np

from training.data.forms import NothingToLearn
from training.data.messages import THINKING, check_messages, function_names, nested, without_reasoning
from training.data.template import Template, Turn, read_template
from training.data.tokenizer import FileTokenizer, load_tokenizer
from training.data.turns import TALK, Turns
from training.host.errors import UserError
from training.host.files import JSON_BYTES, read_file

logger = logging.getLogger(__name__)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = re.compile(r"<\|\w+\|>")  # strings of a template that are meant to be tokens
# Characters that documents must not hold, but escapes in JSON can spell: NUL, and halves of surrogate pairs.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class NoTemplate(UserError):
    """A template is missing or damaged, or does not show where turns begin: no chat can be read."""


class ChatTemplate:
    """Renders and tokenizes chats by the template in a tokenizer's folder, and finds the assistant's turns.

    The turns are found in the whole text, and the whole text is tokenized at once. A chat whose own words look like the
    border of a turn is refused. Raises UserError: there is no template or no jinja2; the template fails, or does not
    show where turns begin and end.

    Args:
        tokenizer: a FileTokenizer; its folder has chat_template.jinja, or tokenizer_config.json with a chat_template.
        reasoning: treatment of the reasoning in turns before the last user message. "template": left to the template;
            Qwen3's drops it. "drop": removed. "keep": each turn is rendered as if its user message were the last one.
    """

    def __init__(self, tokenizer, reasoning: str = "template"):
        if not isinstance(tokenizer, FileTokenizer):
            raise UserError(f"chats need a chat template: give --tokenizer a folder with one, not {tokenizer.name}")
        self._tokenizer, self._reasoning = tokenizer, reasoning
        self._file, source = read_template(tokenizer)
        if source is None:
            how = "--chat_template" if tokenizer.has_template_flag else "--tokenizer a folder that has one"
            cure = f"add chat_template.jinja, or give {how}"
            raise UserError(f"chats need a chat template, and {tokenizer.folder} has none: {cure}")
        self._template = Template(source, self._file, tokenizer.special_tokens)
        self._turns = Turns(self._template, tokenizer)
        self._template.learn_parts()
        self._shown: set[int] = set()  # chats, by hashes of roles and parts, of which the template writes all contents

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of tokens that end a turn. An end of several tokens has the last one's id if that is an added token."""
        ids = [self._tokenizer.encode(end).tolist() for end in self._turns.ends]
        added = self._tokenizer.added_tokens
        is_told = (self._tokenizer.decode(each[-1:], with_special=True) in added or len(each) == 1 for each in ids)
        return frozenset(each[-1] for each, is_alone in zip(ids, is_told) if is_alone)

    def encode(self, record: dict) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, is_masked) of a chat, uint32 and bool [N]. A token that begins before its turn is masked.

        Args:
            record: {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}. A message of the assistant that
                says so, as by "weight": 0 or "loss": false, has no targets; see says_trained.

        Raises:
            UserError: the messages are not a chat; the template refuses them, or leaves out a part of them.
            NothingToLearn: a question or an answer is empty, or nothing is a target.
        """
        tools = record.get("tools") or None  # a template may announce an empty list
        function_names(tools, '"tools"')
        tools = tools and [nested(tool) for tool in tools]
        messages, trained = check_messages(record["messages"])
        try:
            self._check_words([messages, tools])
            text, turns = self._whole(messages, tools)
            self._check_shown(messages, tools, text, turns)
        except RecursionError:
            raise UserError("objects within objects, too deep; remove the line") from None
        if False in trained:
            if len(trained) != len(turns):
                raise UserError(f'chat template {self._file} joins messages into turns: "weight" cannot be obeyed')
            turns = [turn for turn, is_trained in zip(turns, trained) if is_trained]
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        starts = offsets[:, 0]
        masked = np.ones(len(ids), dtype=bool)
        for start, stop in turns:
            masked[np.searchsorted(starts, start) : np.searchsorted(starts, stop)] = False
        if masked[1:].all():
            raise NothingToLearn("chats without a target")
        return ids, masked

    def prompt(self, messages: list[dict]) -> str:
        """Returns the messages as text, followed by the words that the template begins an answer with."""
        self._check_contents(messages, None)
        return self._template.render(messages, asks=True)

    def _whole(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        """Returns a chat's text, and the assistant's turns in it."""
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if self._reasoning == "drop":
            messages = [without_reasoning(m) if i < max(asked, default=0) else m for i, m in enumerate(messages)]
        text, turns = self._turns.find(messages, tools)
        if self._reasoning == "keep":
            bodies: list[str] = []
            for stop in asked[1:]:  # the messages before this user message make a chat of their own
                earlier, turns_of_earlier = self._turns.find(messages[:stop], tools)
                bodies += [earlier[a:b] for a, b in turns_of_earlier[len(bodies) :]]
            parts = [text[a:b] for a, b in itertools.pairwise([0, *itertools.chain(*turns), len(text)])]
            parts[1::2] = [*map(self._with_end_of, parts[1::2], bodies), *parts[1::2][len(bodies) :]]
            ends = [*itertools.accumulate(map(len, parts))]
            text, turns = "".join(parts), [*zip(ends[::2], ends[1::2])]  # every second part is a turn
        return text, self._turns.behind_given(text, turns)

    def _check_shown(self, messages: list[dict], tools: list | None, text: str, turns: list[Turn]) -> None:
        """Refuses a chat of which the template leaves out a part. Tools and calls count by their names."""
        self._check_contents(messages, tools)
        answers = [(i, message) for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
        # A template that marks turns may join several messages into one turn.
        shown = [text[a:b] for a, b in turns] if len(turns) == len(answers) else [text] * len(answers)
        asked = max((i for i, message in enumerate(messages, start=1) if message["role"] == "user"), default=0)
        missing = [("tools", "the chat", name) for name in function_names(tools) if name not in text]
        for (i, message), part in zip(answers, shown):
            where, inline = f"message {i}", THINKING.match(message["content"])
            thought = (message.get("reasoning_content") or (inline[1] if inline else "")).strip()
            # Templates cut contents at "</think>", even in an answer about the tag.
            pieces = THINKING.sub("", message["content"]).split("</think>")
            missing += [("content beside </think>", where, p) for p in pieces[:-1] if p.strip() not in part]
            called = function_names(message.get("tool_calls"))
            missing += [("tool_calls", where, name) for name in called if name not in part]
            if (self._reasoning == "keep" or i > asked) and thought not in part:
                missing.append(("reasoning", where, thought))
        for lost in missing:
            self._refuse_lost(*lost)

    def _check_contents(self, messages: list[dict], tools: list | None) -> None:
        """Refuses a chat of which the template leaves out a message.

        A template may trim or quote contents. Other words take their place, and are looked for in the text.
        """
        parts = ((m["role"], *((name, bool(value)) for name, value in m.items())) for m in messages)
        kind = hash((tools is None, *parts))
        if kind not in self._shown:
            words = {i: f"Q{i}q" for i, message in enumerate(messages) if message["content"]}
            probes = [m | {"content": words.get(i, m["content"])} for i, m in enumerate(messages)]
            probe = self._template.render(probes, tools)
            for i in (i for i, word in words.items() if word not in probe):
                self._refuse_lost("content", f"message {i + 1} ({messages[i]['role']})", messages[i]["content"])
            self._shown.add(kind)

    def _refuse_lost(self, what: str, where: str, value: str) -> None:
        lost = f"chat template {self._file} does not write the {what} of {where}: {value[:40]!r}"
        inline = "write it into the content as the model does, " if what == "reasoning" else ""
        raise UserError(f"{lost}; {inline}remove it, or give a --tokenizer whose template does")

    def _with_end_of(self, turn: str, body: str) -> str:
        """Returns `body`, another rendering of a turn, with the end of `turn`: a chat's last turn may end otherwise."""
        ends = [next((end for end in self._turns.ends if text.endswith(end)), "") for text in (turn, body)]
        return body.removesuffix(ends[1]) + ends[0]

    def _check_words(self, value) -> None:
        """Refuse a chat with strings that would read as the border of a turn."""
        if isinstance(value, dict | list):
            for part in [*value, *value.values()] if isinstance(value, dict) else value:
                self._check_words(part)
        if isinstance(value, str):
            if UNSTORABLE.search(value):
                raise UserError("escaped NUL or lone surrogate in the messages; remove it")
            if found := [word for word in self._turns.borders if word in value]:
                raise UserError(f"a message has {found[0]!r} in it, which begins or ends turns; remove it")


def has_template(tokenizer) -> bool:
    return isinstance(tokenizer, FileTokenizer) and read_template(tokenizer)[1] is not None


def stop_ids(tokenizer, are_samples: bool) -> frozenset[int]:
    """Returns the ids at which a run's model learns to stop: the documents' end, and the ends of turns.

    Turns are of the tokenizer's chat template, for data with samples: prompts with completions, or chats.
    """
    ids = frozenset({tokenizer.eos_id})
    if not are_samples or not has_template(tokenizer):
        return ids
    try:
        ends = ChatTemplate(tokenizer).end_ids
    except UserError as error:  # its data may be prompts with completions, which need no template
        logger.warning("chat: the model is not told where turns end: %s", error)
        return ids
    if not ends:
        logger.warning("chat: turns end with no token of their own, and programs will not stop there")
    return ids | ends


def open_tokenizer(path: str | None, chat_template: str | None):
    """Returns the tokenizer at a path, with a --chat_template in place of its folder's.

    Strings such as <|im_start|> that the template writes become special tokens, where the tokenizer lacks them.
    """
    tokenizer = load_tokenizer(path)
    if chat_template is None:
        return tokenizer
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(f"chat_template {chat_template} needs a tokenizer of words, not {tokenizer.name}; give one")
    file, beginning = Path(chat_template), tokenizer.beginning
    if chat_template == "chatml":
        source = f"{{{{ {json.dumps(beginning)} }}}}{CHATML}" if beginning else CHATML
    else:
        try:
            source = read_file(file, "give --chat_template a file of a template, or chatml", JSON_BYTES).decode()
        except UnicodeDecodeError:
            raise UserError(f"chat template {file} is not UTF-8") from None
    template = Template(source, file, tokenizer.special_tokens)
    texts = [source, template.render(TALK), template.render(TALK[:1], asks=True)]
    with contextlib.suppress(UserError):  # many templates refuse a system's message
        texts.append(template.render([{"role": "system", "content": "SsS"}, *TALK]))
    tokenizer.give_chats(file, source, [*dict.fromkeys(SPECIAL.findall("\n".join(texts)))])
    return tokenizer
