"""Chats as tokens, with the assistant's turns as targets.

A chat is rendered whole by the tokenizer's own chat template.
"""

import contextlib
import json
import logging
import re
from pathlib import Path
from typing import NoReturn

import numpy as np

from training.data.forms import VARIABLES, parsed
from training.data.masks import NothingToLearn
from training.data.messages import check_messages, function_names, nested
from training.data.template import Template, Turn, read_templates
from training.data.tokenizer import FileTokenizer, load_tokenizer
from training.data.turns import TALK
from training.data.unread import EMPTY, cure_of, find_lost, is_of_a_last_answer, said_by
from training.data.writer import ChatWriter
from training.host.errors import UserError
from training.host.files import JSON_BYTES, read_file

logger = logging.getLogger(__name__)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = re.compile(r"<\|\w+\|>")  # strings of a template that are meant to be tokens
WRITERS = 100  # writers that are kept, for rows with chat_template_kwargs of their own
# Variables that say nothing to a template without reasoning.
SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
# Arguments of transformers' apply_chat_template that are no variables for a row to give.
ARGUMENTS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)


class NoTemplate(UserError):
    """A template is missing or damaged, or does not show where turns begin: no chat can be read."""


class ChatTemplate:
    """Renders and tokenizes chats by the templates in a tokenizer's folder, and finds the
    assistant's turns.

    The turns are found in the whole text, and the whole text is tokenized at once. A chat whose own
    words look like the border of a turn is refused. Raises UserError: there is no template or no
    jinja2; the template fails, or does not show where turns begin and end.

    Args:
        tokenizer: a FileTokenizer; see read_templates for the files.
        reasoning: treatment of the reasoning in turns before the last user message. "template":
            left to the template; Qwen3's drops it. "drop": removed. "keep": each turn is rendered
            as if its user message were the last one.

    Attributes:
        unread: fields of the last chat that the template does not write, such as "source".
    """

    def __init__(self, tokenizer, reasoning: str = "template"):
        if not isinstance(tokenizer, FileTokenizer):
            raise UserError(
                "chats need a chat template: "
                f"give --tokenizer a folder with one, not {tokenizer.name}"
            )
        self._tokenizer, self._reasoning = tokenizer, reasoning
        self._templates = read_templates(tokenizer)
        self._opened: dict[str, Template] = {}
        self._writers: dict[tuple[str, str], ChatWriter] = {}
        self.unread: set[str] = set()
        if not self._templates:
            has_flag = tokenizer.has_template_flag
            usual = ", for a base model --chat_template chatml," if has_flag else ""
            raise UserError(
                f"chats need a chat template{usual} and {tokenizer.folder} has none: add "
                "chat_template.jinja, or give "
                f"{'--chat_template' if has_flag else '--tokenizer a folder that has one'}"
            )
        name = self._choose(has_tools=False) or self._choose(has_tools=True)
        if name is None:
            self._refuse_unnamed()
        self._writer(name, {})  # "tool_use" waits for a chat with tools

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of tokens that end a turn.

        An end of several tokens has the last token's id, if that is an added token.
        """
        if (name := self._choose(has_tools=True)) is not None:
            with contextlib.suppress(UserError):  # no chat has tools, or each is refused
                self._writer(name, {})
        ends = dict.fromkeys(end for writer in self._writers.values() for end in writer.turns.stops)
        last_ids = set()
        for end in ends:
            ids = self._tokenizer.encode(end).tolist()
            last = self._tokenizer.decode(ids[-1:], with_special=True)
            if len(ids) == 1 or last in self._tokenizer.added_tokens:
                last_ids.add(ids[-1])
        return frozenset(last_ids)

    def encode(self, record: dict) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, is_masked) of a chat, uint32 and bool [N]. A token that begins before its
        turn is masked.

        Args:
            record: {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}. A message of
                the assistant that says so, as by "weight": 0 or "loss": false, has no targets; see
                says_trained. "chat_template_kwargs" are variables of the template, and "beside" the
                row's fields that no form has.

        Raises:
            UserError: the messages are not a chat; the template refuses them, or leaves out a part
                of them.
            NothingToLearn: a question or an answer is empty, or nothing is a target.
        """
        try:
            writer, text, turns, trained = self._write(record)
        except RecursionError:
            raise UserError("objects within objects, too deep; remove the line") from None
        if False in trained:
            if len(trained) != len(turns):
                file = writer.template.file
                raise UserError(
                    f'chat template {file} joins messages into turns: "weight" cannot be obeyed'
                )
            turns = [turn for turn, is_trained in zip(turns, trained) if is_trained]
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        starts = offsets[:, 0]
        masked = np.ones(len(ids), dtype=bool)
        for start, stop in turns:
            masked[np.searchsorted(starts, start) : np.searchsorted(starts, stop)] = False
        if masked[1:].all():
            raise NothingToLearn("chats without a target")
        return ids, masked

    def _write(self, record: dict) -> tuple[ChatWriter, str, list[Turn], list[bool]]:
        """Returns a chat's writer, its text, its turns, and which answers are trained on."""
        tools = record.get("tools") or None  # a template may announce an empty list
        function_names(tools, '"tools"')
        tools = tools and [nested(tool) for tool in tools]
        name = self._choose(tools is not None)
        if name is None:
            self._refuse_unnamed()
        variables, unread = self._variables(name, record.get(VARIABLES))
        writer = self._writer(name, variables)
        messages, trained = check_messages(record["messages"], writer.template.forms)
        text, turns = writer.write(messages, tools, variables)
        unread |= writer.unread_fields(messages, tools)
        self.unread = unread | _unread_of_row(record.get("beside") or {}, messages)
        return writer, text, turns, trained

    def prompt(self, messages: list[dict]) -> str:
        """Returns the messages as text, and the words that the template begins an answer with."""
        if (name := self._choose(has_tools=False)) is None:
            self._refuse_unnamed()
        return self._writer(name, {}).prompt(messages)

    def _choose(self, has_tools: bool) -> str | None:
        """Returns the name of the template for a chat, as transformers chooses; None if none."""
        names = ("tool_use", "default") if has_tools else ("default",)
        return next((name for name in names if name in self._templates), None)

    def _refuse_unnamed(self) -> NoReturn:
        names = ", ".join(sorted(self._templates))[:100]
        raise UserError(
            f'{self._tokenizer.folder} has the chat templates {names}, and none that is "default": '
            'add chat_template.jinja, which is "default"'
        )

    def _variables(self, name: str, values) -> tuple[dict, set[str]]:
        """Returns a row's variables of the template, and names of SWITCHES that it lacks.

        They are in "chat_template_kwargs", which TRL gives to the template.
        """
        values = parsed(values, f'"{VARIABLES}"', "an object") or {}
        if not isinstance(values, dict):
            raise UserError(f'"{VARIABLES}" must be an object, or JSON of one')
        template = self._open(name)
        read, unread = dict[str, object](), set[str]()
        for key, value in values.items():
            if isinstance(value, str) and value.strip().lower() in ("true", "false"):
                raise UserError(
                    f'"{VARIABLES}" has "{str(key)[:40]}": {json.dumps(value)}, a text, which '
                    f"templates take for true; write {value.strip().lower()}"
                )
            if key in template.variables and key not in ARGUMENTS:
                read |= {key: value} if value is not None else {}
            elif key in SWITCHES and value is not None:
                unread.add(key)
            elif value not in EMPTY:
                raise UserError(
                    f'has "{VARIABLES}" beside "messages", where "{str(key)[:40]}" would be '
                    f"ignored: chat template {template.file} reads no such variable; remove it"
                )
        return read, unread

    def _open(self, name: str) -> Template:
        if name not in self._opened:
            file, source = self._templates[name]
            self._opened[name] = Template(source, file, self._tokenizer.special_tokens)
        return self._opened[name]

    def _writer(self, name: str, variables: dict) -> ChatWriter:
        key = name, json.dumps(variables, sort_keys=True, default=str)
        if key not in self._writers:
            if len(self._writers) > WRITERS:
                self._writers = {
                    known: writer for known, writer in self._writers.items() if known[1] == "{}"
                }
            template = self._open(name).with_values(variables)
            self._writers[key] = ChatWriter(template, self._tokenizer, self._reasoning)
        return self._writers[key]


def _unread_of_row(fields: dict, messages: list[dict]) -> set[str]:
    """Returns names of a row's fields with words that its chat does not have.

    Raises UserError for a field that may be a part of an answer, as "reasoning" beside "messages",
    or the answer to a chat that ends with a question, as "response".
    """
    if not fields:
        return set()
    said = [text for message in messages for text in said_by(message)]
    is_open = messages[-1]["role"] != "assistant"
    unread = set()
    for name, value in fields.items():
        lost = find_lost(name, value, said)
        if lost is None:
            continue
        beside = f"has {json.dumps(name[:40])} beside its messages: {lost.text[:40]!r}"
        has = f"{beside}, which no chat template writes"
        if lost.is_answer:
            raise UserError(f"{has}; {cure_of(name)}, or remove it")
        if is_open and is_of_a_last_answer(name):
            raise UserError(
                f"{has}; write it as the last message if it answers the question there, "
                "or remove it"
            )
        unread.add(name)
    return unread


def has_template(tokenizer) -> bool:
    return isinstance(tokenizer, FileTokenizer) and bool(read_templates(tokenizer))


def stop_ids(tokenizer, are_samples: bool) -> frozenset[int]:
    """Returns the ids at which a run's model learns to stop: ends of documents and of turns.

    Turns are the chat template's. Data without prompts and chats have no turns.
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
        logger.warning(
            "chat: turns end with no token of their own, and programs will not stop there"
        )
    return ids | ends


def _refuse_names(chat_template: str, tokenizer: FileTokenizer) -> None:
    """Refuses what is no file: a template's name in other programs, its text, or a folder."""
    file = Path(chat_template)
    what = f"chat_template {chat_template[:80]!r}"
    if "{%" in chat_template or "{{" in chat_template:
        raise UserError(f"{what} is a template's text; write it to a file, and give that")
    if file.is_dir():
        raise UserError(
            f"{what} is a folder; give its chat_template.jinja, or --tokenizer {chat_template}"
        )
    if len(file.parts) == 1 and not file.suffix and not file.exists():
        cure = f"{tokenizer.folder} has no template: give chatml, or a Jinja file"
        if has_template(tokenizer):
            cure = f"{tokenizer.folder} has a template of its own: drop the flag"
        raise UserError(f"{what} is no file, and of names there is chatml alone; {cure}")


def open_tokenizer(path: str | None, chat_template: str | None):
    """Returns the tokenizer at a path, with a --chat_template in place of its folder's.

    Strings such as <|im_start|> that the template writes become special tokens, where the tokenizer
    lacks them.
    """
    tokenizer = load_tokenizer(path)
    if chat_template is None:
        return tokenizer
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            f"chat_template {chat_template} needs a tokenizer of words, not {tokenizer.name}; "
            "give one"
        )
    file, beginning = Path(chat_template), tokenizer.beginning
    if chat_template == "chatml":
        source = f"{{{{ {json.dumps(beginning)} }}}}{CHATML}" if beginning else CHATML
    else:
        _refuse_names(chat_template, tokenizer)
        try:
            source = read_file(
                file, "give --chat_template a file of a template, or chatml", JSON_BYTES
            ).decode()
        except UnicodeDecodeError:
            raise UserError(f"chat template {file} is not UTF-8") from None
    template = Template(source, file, tokenizer.special_tokens)
    texts = [source, template.render(TALK), template.render(TALK[:1], asks=True)]
    with contextlib.suppress(UserError):  # many templates refuse a system's message
        texts.append(template.render([{"role": "system", "content": "SsS"}, *TALK]))
    tokenizer.give_chats(file, source, [*dict.fromkeys(SPECIAL.findall("\n".join(texts)))])
    return tokenizer
