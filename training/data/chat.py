"""Chats as tokens: rendered whole by the tokenizer's own chat template, with the assistant's turns as targets.

A template is a program from somebody's folder, so it runs in Jinja's sandbox and reaches no file. Nothing bounds its
time or memory: a rendering that hangs is ended by SIGTERM.
"""

import functools
import itertools
import json
import logging
import re
from datetime import date
from pathlib import Path

import numpy as np

from training.data.forms import FLAGS, NUMBERS, NothingToLearn, refuse_unknown_flags, says_trained
from training.data.tokenizer import FileTokenizer, load_tokenizer
from training.host.errors import UserError, import_optional
from training.host.files import JSON_BYTES, read_file, read_json

logger = logging.getLogger(__name__)
REASONING = ("template", "keep", "drop")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINKING = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = re.compile(r"<\|\w+\|>")  # strings of a template that are meant to be tokens
# Characters that documents must not hold, but escapes in JSON can spell: NUL, and halves of surrogate pairs.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# Marks around the output of a template's {% generation %}. Unicode keeps these two for a program's own use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARK = f"[{OPEN}{CLOSE}]"
CALLS = ("an assistant that calls tools", "an assistant that writes calls")  # in fields, or in the content
ROLES = ("system", "developer", "user", "assistant", "tool")

# Date that templates get as the present day: the same chats have the same tokens on every day.
TODAY = date(2026, 1, 1)

Turn = tuple[int, int]  # characters start .. stop - 1 of a rendered chat


class NoTemplate(UserError):
    """A template is missing or damaged, or does not show where turns begin: no chat can be read."""


class ChatTemplate:
    """Renders and tokenizes chats by the template in a tokenizer's folder, and finds the assistant's turns.

    A template may mark the turns by {% generation %}. For other templates short chats are rendered, from which strings
    are learnt: the header before each answer (in ChatML "<|im_start|>assistant\\n") and the end behind it
    ("<|im_end|>"). In the text of any chat, each message of the assistant must then have one header, and one end before
    the next turn begins. A chat whose own words look like a header or an end is refused. The mask is found in the whole
    text, and the whole text is tokenized at once.

    Args:
        tokenizer: a FileTokenizer; its folder has chat_template.jinja, or tokenizer_config.json with a chat_template.
        reasoning: treatment of the reasoning in turns before the last user message. "template": left to the template;
            Qwen3's drops it. "drop": removed. "keep": each turn is rendered as if its user message were the last one,
            so that it stands in the text as the model wrote it.

    Raises:
        UserError: there is no template or no jinja2; the template fails, or does not show where turns begin and end.
    """

    def __init__(self, tokenizer, reasoning: str = "template"):
        if not isinstance(tokenizer, FileTokenizer):
            raise UserError(f"chats need a chat template: give --tokenizer a folder with one, not {tokenizer.name}")
        self._tokenizer, self._reasoning = tokenizer, reasoning
        self._file, source = _read_template(tokenizer)
        if source is None:
            raise UserError(
                f"chats need a chat template, and {tokenizer.folder} has none: add chat_template.jinja, or give "
                "--chat_template"
            )
        self._template = _compile(source, self._file)
        self._header = ""
        self._ends: tuple[str, ...] = ()  # strings that end a turn; the last turn may end by another one
        self._openers: tuple[str, ...] = ()  # other strings that begin a turn, such as "<|im_start|>"
        self._result_end = ""  # text that ends a tool's result, where an answer follows it without a header
        self._thinks_in_parts = False  # whether the template reads reasoning from parts of the content
        self._shown: set[int] = set()  # chats, by hashes of roles and parts, of which the template writes all contents
        question, answer = {"role": "user", "content": "QqQ"}, {"role": "assistant", "content": "AaA"}
        before, prompt = self._render([question], None), self._render([question], None, add_generation_prompt=True)
        # Text before an answer, without a space at its end: that is part of the answer's first token.
        self._prompt = prompt.removeprefix(before).rstrip(" ") if prompt.startswith(before) else ""
        whole = self._render([question, answer, {**question, "content": "RrR"}, {**answer, "content": "BbB"}], None)
        self._is_marked = OPEN in whole
        bos = tokenizer.special_tokens.get("bos_token", "")
        self._beginning = bos if whole.startswith(bos) else ""  # the token before the first turn
        try:
            self._learn_turns(re.sub(MARK, "", whole))
        except UserError:
            if not self._is_marked:
                raise
        if not self._is_marked:
            self._learn_results(question, answer)
        self._thinks_in_parts = self._reads_parts([question, {**answer, "reasoning_content": "TtT"}])

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of tokens that end a turn. An end of several tokens has the last one's id if that is an added token."""
        ids = [self._tokenizer.encode(end).tolist() for end in self._ends]
        added = self._tokenizer.added_tokens
        is_told = (self._tokenizer.decode(each[-1:], with_special=True) in added or len(each) == 1 for each in ids)
        return frozenset(each[-1] for each, is_alone in zip(ids, is_told) if is_alone)

    def encode(self, record: dict) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, is_masked) of a chat, uint32 and bool [N]. A token that begins before its turn is masked.

        Args:
            record: {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}. A message of the assistant that
                says so, as by "weight": 0 or "loss": false, has no targets; see says_trained.

        Raises:
            UserError: the messages are not a chat; the template refuses them, or leaves out a message, tools, calls or
                reasoning, which nobody would learn then.
            NothingToLearn: a question or an answer is empty, or nothing is a target.
        """
        tools = record.get("tools") or None  # a template may announce an empty list
        _names(tools, '"tools"')
        tools = tools and [_nested(tool) for tool in tools]
        messages, trained = _check_messages(record["messages"])
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
        return re.sub(MARK, "", self._render(messages, None, add_generation_prompt=True))

    def _whole(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        """Returns a chat's text, and the assistant's turns in it."""
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if self._reasoning == "drop":
            messages = [_without_reasoning(m) if i < max(asked, default=0) else m for i, m in enumerate(messages)]
        text, turns = self._render_turns(messages, tools)
        if self._reasoning == "keep":
            bodies: list[str] = []
            for stop in asked[1:]:  # the messages before this user message make a chat of their own
                earlier, turns_of_earlier = self._render_turns(messages[:stop], tools)
                bodies += [earlier[a:b] for a, b in turns_of_earlier[len(bodies) :]]
            parts = [text[a:b] for a, b in itertools.pairwise([0, *itertools.chain(*turns), len(text)])]
            parts[1::2] = [*map(self._with_end_of, parts[1::2], bodies), *parts[1::2][len(bodies) :]]
            text, turns = _join(parts)
        # Words behind the header that the template itself begins an answer with, such as "<think>", are not targets.
        begins = len(self._prompt) - len(self._header)
        given = self._prompt[len(self._header) :]
        return text, [(a + begins * (not self._is_marked and text.startswith(given, a)), b) for a, b in turns]

    def _check_shown(self, messages: list[dict], tools: list | None, text: str, turns: list[Turn]) -> None:
        """Refuses a chat of which the template leaves out a part. Tools and calls count by their names."""
        self._check_contents(messages, tools)
        answers = [(i, message) for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
        # A template that marks turns may join several messages into one turn.
        shown = [text[a:b] for a, b in turns] if len(turns) == len(answers) else [text] * len(answers)
        asked = max((i for i, message in enumerate(messages, start=1) if message["role"] == "user"), default=0)
        missing = [("tools", "the chat", name) for name in _names(tools) if name not in text]
        for (i, message), part in zip(answers, shown):
            where, inline = f"message {i}", THINKING.match(message["content"])
            thought = (message.get("reasoning_content") or (inline[1] if inline else "")).strip()
            # Templates cut contents at "</think>", even in an answer about the tag.
            pieces = THINKING.sub("", message["content"]).split("</think>")
            missing += [("content beside </think>", where, p) for p in pieces[:-1] if p.strip() not in part]
            missing += [("tool_calls", where, name) for name in _names(message.get("tool_calls")) if name not in part]
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
            probe = self._render([m | {"content": words.get(i, m["content"])} for i, m in enumerate(messages)], tools)
            for i in (i for i, word in words.items() if word not in probe):
                self._refuse_lost("content", f"message {i + 1} ({messages[i]['role']})", messages[i]["content"])
            self._shown.add(kind)

    def _refuse_lost(self, what: str, where: str, value: str) -> None:
        inline = "write it into the content as the model does, " if what == "reasoning" else ""
        raise UserError(
            f"chat template {self._file} does not write the {what} of {where}: {value[:40]!r}; {inline}remove it, or "
            "give a --tokenizer whose template does"
        )

    def _render_turns(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        text = self._render(messages, tools)
        if self._is_marked:
            marks = re.findall(MARK, text)
            if marks != [OPEN, CLOSE] * (len(marks) // 2):
                raise UserError(f"chat template {self._file} nests {{% generation %}}, or writes half of it")
            text, marked = _join(re.split(MARK, text))
            return text, [self._without_header(text, *turn) for turn in marked]
        count = sum(message["role"] == "assistant" for message in messages)
        turns: list[Turn] = []
        headers = [*self._headers.finditer(text)]
        if (
            headers and not text[headers[-1].end() :].strip()
        ):  # a last question of Mistral's ends as a header, "[/INST]"
            headers.pop()
        for header, following in itertools.zip_longest(headers, headers[1:]):
            end = self._end.search(text, header.end())
            stop = end.end() if end else len(text)
            crosses = following and stop > following.start()
            if not end or crosses or any(opener in text[header.end() : stop] for opener in self._openers):
                number, ends = len(turns) + 1, " or ".join(map(repr, self._ends))
                raise UserError(f"turn {number} of the assistant does not end with {ends} in the template")
            turns.append((header.end(), stop))
        if len(turns) != count:
            raise UserError(f"the template shows {len(turns)} turns of the assistant, the messages are {count}")
        return text, turns

    def _with_end_of(self, turn: str, body: str) -> str:
        """Returns `body`, another rendering of a turn, with the end of `turn`: a chat's last turn may end otherwise."""
        ends = [next((end for end in self._ends if text.endswith(end)), "") for text in (turn, body)]
        return body.removesuffix(ends[1]) + ends[0]

    def _without_header(self, text: str, start: int, stop: int) -> Turn:
        """Returns a marked turn without its header and the space behind its end, which SmolLM3's template marks."""
        start += len(self._header) * text.startswith(self._header, start)
        turn = text[start:stop].rstrip()
        return start, start + len(turn) if turn.endswith(self._ends) else stop

    def _learn_turns(self, whole: str) -> None:
        """Find header, ends and opener of turns in `whole`, the rendering of two questions and two answers."""
        parts = re.split("QqQ|AaA|RrR|BbB", whole)
        if len(parts) != 5:
            raise UserError(
                f"chat template {self._file} does not write each message once; mark turns by {{% generation %}}"
            )
        _, first, between, last, tail = parts
        prompt = self._prompt
        lengths = (n for n in range(len(prompt), 0, -1) if prompt[:n] in first and prompt[:n] in last)
        header = prompt[: next(lengths, 0)]
        if not header and first == last:  # the template has no prompt; the same text stands before both answers
            header = self._prompt = first.rstrip(" ")
        # Text up to the first special token: "<|end|>" of "<|end|>\n<|user|>". OLMo's last turn ends by another one.
        ends = [*dict.fromkeys(self._until_token(text) for text in (between, tail))]
        if "" in ends:
            ends = [_shared_start(between, tail).rstrip()]
        opener = between[len(ends[0]) :].strip()
        # The first of two ends may begin the next turn: then the chat has an end, and turns have none.
        is_open = len(ends) == 2 and (not opener or header.strip().startswith(ends[0].strip()))
        if not header.strip() or not all(end.strip() for end in ends) or is_open:
            raise UserError(
                f"chat template {self._file} does not show where the assistant's turns begin and end; "
                "mark them by {% generation %} and {% endgeneration %}"
            )
        shared = _shared_start(header.strip(), opener)
        opener = shared if shared in self._tokenizer.added_tokens else opener
        self._openers = (opener,) if opener else ()
        self._header, self._ends = header, tuple(ends)
        self._headers, self._end = re.compile(re.escape(header)), re.compile("|".join(map(re.escape, ends)))

    def _learn_results(self, question: dict, answer: dict) -> None:
        """Find the token that ends a tool's result, if answers follow it without a header, as in Mistral's templates.

        Another result may follow it, too, whose first token tells it from an answer: "[TOOL_RESULTS]".
        """
        call = {"id": "callcall1", "type": "function", "function": {"name": "NnN", "arguments": {}}}
        calls = {"role": "assistant", "content": "", "tool_calls": [call, call]}
        results = [
            {"role": "tool", "content": word, "name": "NnN", "tool_call_id": "callcall1"} for word in ("RrR", "SsS")
        ]
        try:
            parts = re.split("RrR|SsS|AaA", self._render([question, calls, *results, answer], None))
        except UserError:  # no tools, or one call at a time
            return
        if len(parts) != 4 or self._header in parts[2]:
            return
        _, between, behind, _ = parts
        end = next((token for token in self._tokenizer.added_tokens if behind.rstrip().endswith(token)), "")
        if end:
            another = self._until_token(between.partition(end)[2])
            not_another = f"(?!{re.escape(another)})" * (end in between)
            self._result_end = end
            self._headers = re.compile(f"{re.escape(self._header)}|{re.escape(end)}{not_another}")

    def _reads_parts(self, messages: list[dict]) -> bool:
        """Whether the template writes reasoning only where it is a part of the content, as Ministral 3's does."""
        if "TtT" in self._render(messages, None):
            return False
        try:
            text = self._render(_in_parts(messages), None)
        except UserError:
            return False
        found = re.search("TtT(.*?)AaA", text, re.DOTALL)
        return found is not None and "type" not in found[1]  # a template may print the list itself

    def _until_token(self, text: str) -> str:
        """Returns a text up to its first special token, with it: "\n<|end|>" of "\n<|end|>\n". Empty without one."""
        tokens = [token for token in self._tokenizer.added_tokens if token in text]
        first = min(tokens, key=text.index, default="")
        return text[: text.index(first) + len(first)]

    def _check_words(self, value) -> None:
        """Refuse a chat with strings that would read as the border of a turn."""
        if isinstance(value, dict | list):
            for part in [*value, *value.values()] if isinstance(value, dict) else value:
                self._check_words(part)
        if isinstance(value, str):
            borders = [self._header.strip(), *self._openers, self._result_end]
            words = [*([OPEN, CLOSE] if self._is_marked else borders), *map(str.strip, self._ends), self._beginning]
            if UNSTORABLE.search(value):
                raise UserError("escaped NUL or lone surrogate in the messages; remove it")
            if found := [word for word in words if word and word in value]:
                raise UserError(f"a message has {found[0]!r} in it, which begins or ends turns; remove it")

    def _render(self, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
        messages = _in_parts(messages) if self._thinks_in_parts else messages
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**given, **self._tokenizer.special_tokens)
        except Exception as error:
            raise _failure(self._file, "fails", error) from None


def _failure(file: Path, how: str, error: Exception) -> UserError:
    """Returns one line for an error of a template, which may have any type and any length."""
    message = str(error) or type(error).__name__
    return UserError(f"chat template {file} {how}: {message.splitlines()[0][:200]}")


def _shared_start(one: str, other: str) -> str:
    """Returns what both texts begin with: "ab" for "abc" and "abd"."""
    return "".join(a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def has_template(tokenizer) -> bool:
    """Whether the folder of a tokenizer has a chat template."""
    return isinstance(tokenizer, FileTokenizer) and _read_template(tokenizer)[1] is not None


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
    chat = [{"role": "user", "content": "QqQ"}, {"role": "assistant", "content": "AaA"}]
    template, texts = _compile(source, file), [source]
    system = {"role": "system", "content": "SsS"}
    for messages, asks in ((chat, False), (chat[:1], True), ([system, *chat], False)):
        try:
            given = {"messages": messages, "tools": None, "add_generation_prompt": asks}
            texts.append(template.render(**given, **tokenizer.special_tokens))
        except Exception as error:
            if messages[0] is not system:  # which many templates refuse
                raise _failure(file, "fails", error) from None
    tokenizer.give_chats(file, source, [*dict.fromkeys(SPECIAL.findall("\n".join(texts)))])
    return tokenizer


def _read_template(tokenizer: FileTokenizer) -> tuple[Path, str | None]:
    """Returns (file, template) of a tokenizer: what it was given, or its folder's."""
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    folder = tokenizer.folder
    file, settings_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    template: object = None
    if file.exists():
        try:
            template = read_file(file, "give --tokenizer another folder").decode()
        except UnicodeDecodeError:
            raise UserError(f"chat template {file} is not UTF-8") from None
    else:
        file, template = settings_file, settings.get("chat_template")
        if isinstance(template, list):  # several templates, each with a name
            named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
            template = named[0].get("template") if named else None
    return file, template if isinstance(template, str) else None


def _compile(source: str, file: Path):
    """Compiles a template in a sandbox: it reads no file, and leaves its arguments as they are."""
    import_optional("jinja2.sandbox", f"chat template {file}")
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """The tags {% generation %} ... {% endgeneration %}, by which a template marks the assistant's words."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller) -> str:
            return OPEN + caller() + CLOSE

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    extensions = [Generation, ext.loopcontrols]
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = raise_exception
    if "strftime_now" in source and "strftime_now is defined" not in source:  # Llama's has a date of its own otherwise
        environment.globals["strftime_now"] = TODAY.strftime
        logger.info("chat template %s asks for the day: it is told %s on every day", file, TODAY)
    try:
        return environment.from_string(source)
    except Exception as error:
        raise _failure(file, "cannot be read", error) from None


def _check_messages(messages) -> tuple[list[dict], list[bool]]:
    """Returns the messages of a chat as templates read them, and for each of the assistant whether it is trained on.

    Each content is one string, and reasoning has one name.

    Results of tools follow a message that calls tools, and nothing else does. Any other order is left to the template.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(f'"messages" is {"an empty list" if messages == [] else "no list"}; remove the line')
    checked: list[dict] = []
    trained: list[bool] = []
    before, empty = "nothing", False  # the role before; whether a question or an answer is empty
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        what = f"message {number} ({str(role)[:40]})"
        if role not in ROLES:
            raise UserError(f"{what} has a role that is not known; known are {', '.join(ROLES)}")
        if role == "tool" and before not in ("tool", *CALLS):
            raise UserError(f"{what} follows {before}, which calls no tool")
        if role != "tool" and before == CALLS[0]:
            raise UserError(f"{what} follows {before}, where there should be the result, of role tool")
        content, thinking = _join_parts(message.get("content"), what)
        message = {name: value for name, value in message.items() if value is not None}  # tables hold all names
        message["content"] = content
        calls = _names(message.get("tool_calls"), f'{what}: "tool_calls"')
        if calls:
            for call in message["tool_calls"]:
                refuse_unknown_flags(call, f"a call of {what}", NUMBERS)
            message["tool_calls"] = [_with_object(_nested(call)) for call in message["tool_calls"]]
        else:
            message.pop("tool_calls", None)
        thoughts = [each for each in (thinking, *(message.get(name) for name in REASONING_FIELDS)) if each]
        if thoughts and any(thought != thoughts[0] or not isinstance(thought, str) for thought in thoughts):
            raise UserError(f"{what} has reasoning that is not one string; mend it, or remove the line")
        is_trained = says_trained(message, what)
        refuse_unknown_flags(message, what, FLAGS.keys() | NUMBERS)
        if role == "assistant":
            trained.append(is_trained is not False)
        elif calls or thoughts or is_trained:
            raise UserError(f"{what} has tool_calls, reasoning or a weight, which only the assistant's have; remove it")
        message = {name: value for name, value in message.items() if name not in FLAGS}
        if thoughts:
            message["reasoning_content"] = thoughts[0]
        empty |= role in ("user", "assistant") and not (message["content"].strip() or calls or thoughts)
        writes = role == "assistant" and "<tool_call>" in message["content"]  # rows of ShareGPT do so
        before = CALLS[0] if calls else CALLS[1] if writes else role
        checked.append(message)
    if empty:
        raise NothingToLearn("chats with an empty question or answer")
    return checked, trained


def _join_parts(content, what: str) -> tuple[str, str]:
    """Returns (text, reasoning) of a message's content. None is empty.

    A list has parts {"type": "text", "text": ...}. Parts {"type": "thinking", "thinking": ...} may stand before them.
    """
    joined = {"text": "", "thinking": ""}
    for part in (
        content if isinstance(content, list) else [{"type": "text", "text": "" if content is None else content}]
    ):
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        value = part.get(kind) if kind == "text" or (kind == "thinking" and not joined["text"]) else None
        if not isinstance(value, str):
            raise UserError(f'{what} has a content that is no text: a string, or parts {{"type": "text", "text": ...}}')
        refuse_unknown_flags(part, f"a part of {what}", ())
        joined[kind] += value
    return joined["text"], joined["thinking"]


def _in_parts(messages: list[dict]) -> list[dict]:
    """Returns messages with their reasoning as a part of the content, before the text."""
    made = []
    for message in messages:
        if thought := message.get("reasoning_content"):
            text = {"type": "text", "text": message["content"]}
            message = {**message, "content": [{"type": "thinking", "thinking": thought}, text]}
        made.append(message)
    return made


def _nested(tool: dict) -> dict:
    """Returns a tool, or a call of one, with its function under "function", where templates look for it."""
    outer = {name: value for name, value in tool.items() if name in ("type", "id")}
    inner = {name: value for name, value in tool.items() if name not in outer}
    return tool if "function" in tool else {"type": "function"} | outer | {"function": inner}


def _with_object(call: dict) -> dict:
    """Returns a call whose arguments are an object, where they were JSON of one: templates write them as JSON."""
    try:
        arguments = json.loads(call["function"].get("arguments"))
    except (TypeError, ValueError, RecursionError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _names(tools, what: str = "tools") -> list[str]:
    """Returns the functions' names. A tool, or a call of one, is a function itself or has it under "function"."""
    names = [_name(tool) for tool in tools] if isinstance(tools, list) else [None] * (tools is not None)
    if not all(isinstance(name, str) for name in names):
        raise UserError(f'{what} must be a list of objects, each with a string as "name"')
    return [str(name) for name in names]


def _name(tool):
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _without_reasoning(message: dict) -> dict:
    if message["role"] != "assistant":
        return message
    rest = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return rest | {"content": THINKING.sub("", message["content"])}


def _join(parts: list[str]) -> tuple[str, list[Turn]]:
    """Returns (text, turns) of parts, every second of which is a turn: ["a", "bc", "d"] gives "abcd" and (1, 3)."""
    ends = [*itertools.accumulate(map(len, parts))]
    return "".join(parts), [*zip(ends[::2], ends[1::2])]
