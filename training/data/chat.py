"""Chats as tokens: rendered whole by the tokenizer's own chat template, with the assistant's turns as targets.

A template is a program out of somebody's folder. It runs in Jinja's sandbox, with limits on time and memory.
"""

import contextlib
import json
import re
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from training.data.tokenizer import FileTokenizer
from training.host.errors import UserError
from training.host.files import read_file

REASONING = ("template", "keep", "drop")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINKING = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
# JSON can spell in escapes what documents must not hold: NUL, and halves of surrogate pairs.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# Around what a template's {% generation %} renders; Unicode has these two for a program's own use, never for text.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
RENDER_SECONDS = 10.0  # of processor time for one chat
RENDER_BYTES = 2**30  # of memory for one chat
TEMPLATE_CHARACTERS = 2**20  # the longest released ones have 20,000
SHOWN = 200  # characters of a template's error

Turn = tuple[int, int]  # characters start .. stop - 1 of a rendered chat


class ChatTemplate:
    """The template of a tokenizer's folder, and how its rendering shows the assistant's turns.

    A template may mark them by {% generation %}. Of another one, two short chats are rendered, and show what stands
    before each answer (in ChatML "<|im_start|>assistant\\\\n") and what ends it ("<|im_end|>"). In every chat, each of
    the assistant's messages must then have its one header in the rendered whole, and its end before the next turn;
    a chat whose own words look like either is refused. The mask is found in the whole text, which is tokenized once.

    Args:
        tokenizer: one with a folder, which has chat_template.jinja, or tokenizer_config.json with a chat_template.
        reasoning: what happens to the reasoning of turns before the last user message. "template": as the template
            does, and Qwen3's drops it. "drop": it is taken out. "keep": every turn stands in the whole as the template
            renders it while its user message is the last one, which is as the model wrote it.

    Raises:
        UserError: no template, no jinja2, or a template that fails or does not show where turns begin and end.
        Of `encode` also tools, calls or reasoning that the template leaves out: nobody would learn them.
    """

    def __init__(self, tokenizer, reasoning: str = "template"):
        if not isinstance(tokenizer, FileTokenizer):
            raise UserError(
                f'data with "messages" need a chat template: give --tokenizer a folder with one, not {tokenizer.name}'
            )
        self._tokenizer, self._reasoning = tokenizer, reasoning
        self._file, source, self._variables = _read_template(tokenizer.folder)
        self._template = _compile(source, self._file)
        self._header, self._end = "", ""
        self._openers: list[str] = []  # what else stands at the start of turns
        question, answer = {"role": "user", "content": "QqQ"}, {"role": "assistant", "content": "AaA"}
        before, prompt = self._render([question], None), self.prompt([question])
        # What stands before an answer; a space at its end is part of the answer's first token.
        self._prompt = prompt.removeprefix(before).rstrip(" ") if prompt.startswith(before) else ""
        whole = self._render([question, answer, {**question, "content": "RrR"}, {**answer, "content": "BbB"}], None)
        self._is_marked = OPEN in whole
        if not self._is_marked:
            self._learn_turns(whole)

    @property
    def end_ids(self) -> frozenset[int]:
        """The token that ends a turn; none where it takes several, or where the template marks turns."""
        ids = self._tokenizer.encode(self._end).tolist()
        return frozenset(ids if len(ids) == 1 else [])

    def encode(self, record: dict, where: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids, is_masked) of a chat, uint32 and bool [N]; a token that begins before its turn does is masked.

        Args:
            record: {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}.
            where: file and line, for messages.

        Raises:
            UserError: messages that are no chat, or that the template refuses or does not show.
        """
        messages, tools = _check_messages(record, where), record.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise UserError(f'{where}: "tools" must be a list of objects')
        try:
            self._check_words([messages, tools])
            text, turns = self._whole(messages, tools)
            self._check_shown(messages, tools or [], text, turns)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except RecursionError:
            raise UserError(f"{where}: objects within objects, too deep; remove the line") from None
        ids, starts = self._tokenizer.encode_with_starts(text)
        masked = np.ones(len(ids), dtype=bool)
        for start, stop in turns:
            masked[np.searchsorted(starts, start) : np.searchsorted(starts, stop)] = False
        return ids, masked

    def prompt(self, messages: list[dict]) -> str:
        """Messages as text, and behind them what the template writes for the assistant to go on from."""
        return self._render(messages, None, add_generation_prompt=True)

    def _whole(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        """A chat's text, and the assistant's turns in it."""
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if self._reasoning == "drop":
            messages = [_without_reasoning(m) if i < asked[-1] else m for i, m in enumerate(messages)]
        text, turns = self._render_turns(messages, tools)
        if self._reasoning == "keep":
            bodies: list[str] = []
            for stop in asked[1:]:  # all that was answered before this user message
                earlier, of_earlier = self._render_turns(messages[:stop], tools)
                bodies += [earlier[a:b] for a, b in of_earlier[len(bodies) :]]
            text, turns = _with_bodies(text, turns, bodies)
        # Where the template begins an answer itself, as with "<think>", a model is given those words.
        begins = len(self._prompt) - len(self._header)
        given = self._prompt[len(self._header) :]
        return text, [(a + begins * (not self._is_marked and text.startswith(given, a)), b) for a, b in turns]

    def _check_shown(self, messages: list[dict], tools: list[dict], text: str, turns: list[Turn]) -> None:
        """Refuse tools by their names, and calls and reasoning in their turns, that the template leaves out."""
        answers = [(i, message) for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
        # A template that marks turns may take several messages as one.
        shown = [text[a:b] for a, b in turns] if len(turns) == len(answers) else [text] * len(answers)
        asked = max(i for i, message in enumerate(messages, start=1) if message["role"] == "user")
        missing = [("tools", "the chat", name) for name in _names(tools) if name not in text]
        for (i, message), part in zip(answers, shown):
            where, thought, calls = f"message {i}", message.get("reasoning_content"), message.get("tool_calls") or []
            missing += [("tool_calls", where, name) for name in _names(calls) if name not in part]
            is_wanted = self._reasoning == "keep" or i > asked
            if is_wanted and isinstance(thought, str) and thought.strip() not in part:
                missing.append(("reasoning", where, thought.strip()))
        for what, where, value in missing[:1]:
            raise UserError(
                f"chat template {self._file} does not write the {what} of {where} ({value[:40]!r}); remove them, or "
                "give a --tokenizer whose template does"
            )

    def _render_turns(self, messages: list[dict], tools: list | None) -> tuple[str, list[Turn]]:
        text = self._render(messages, tools)
        if self._is_marked:
            return _take_marks(text)
        count = sum(message["role"] == "assistant" for message in messages)
        turns: list[Turn] = []
        position = text.find(self._header)
        while position >= 0:
            start = position + len(self._header)
            end = text.find(self._end, start)
            stop, position = end + len(self._end), text.find(self._header, start)
            crosses = stop > position >= 0 or any(opener in text[start:stop] for opener in self._openers)
            if end < 0 or crosses:
                raise UserError(
                    f"turn {len(turns) + 1} of the assistant does not end with {self._end!r} in the template"
                )
            turns.append((start, stop))
        if len(turns) != count:
            raise UserError(f"the template shows {len(turns)} turns of the assistant, the messages are {count}")
        return text, turns

    def _learn_turns(self, whole: str) -> None:
        """Find, in the rendering of two questions and answers, what stands before and behind each answer."""
        parts = re.split("QqQ|AaA|RrR|BbB", whole)
        if len(parts) != 5:
            raise UserError(
                f"chat template {self._file} does not write each message once; mark turns by {{% generation %}}"
            )
        _, first, between, last, tail = parts
        prompt = self._prompt
        lengths = (n for n in range(len(prompt), 0, -1) if prompt[:n] in first and prompt[:n] in last)
        self._header = prompt[: next(lengths, 0)]
        if not self._header and first == last:  # there is no prompt for an answer, but what stands before both answers
            self._header = self._prompt = first.rstrip(" ")
        end, added = _shared_start(between, tail).rstrip(), self._tokenizer.added_tokens
        ends = [end.find(token) + len(token) for token in added if token in end]
        self._end = end[: min(ends, default=len(end))]  # up to its first special token: "<|end|>" of "<|end|>\n<|"
        opener = between[len(self._end) :].strip()
        if not self._header.strip() or not self._end.strip():
            raise UserError(
                f"chat template {self._file} does not show where the assistant's turns begin and end; "
                "mark them by {% generation %} and {% endgeneration %}"
            )
        shared = _shared_start(self._header.strip(), opener)
        opener = shared if shared in added else opener
        self._openers = [opener] if opener else []

    def _check_words(self, value) -> None:
        """Refuse strings of a chat that would read as the borders of turns."""
        if isinstance(value, dict | list):
            for part in [*value, *value.values()] if isinstance(value, dict) else value:
                self._check_words(part)
        if isinstance(value, str):
            words = (OPEN, CLOSE) if self._is_marked else (self._header.strip(), self._end.strip(), *self._openers)
            if UNSTORABLE.search(value):
                raise UserError("escaped NUL or lone surrogate in the messages; remove it")
            if found := [word for word in words if word in value]:
                raise UserError(f"a message has {found[0]!r} in it, which begins or ends turns; remove it")

    def _render(self, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            with _limits():
                return self._template.render(**given, **self._variables)
        except Exception as error:  # of the template's own making: of any type
            message = str(error) or type(error).__name__
            raise UserError(f"chat template {self._file} fails: {message.splitlines()[0][:SHOWN]}") from None


def _shared_start(one: str, other: str) -> str:
    """The text "ab" for "abc" and "abd"."""
    length = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length]


def _read_template(folder: Path) -> tuple[Path, str, dict[str, str]]:
    """(file, template, the special tokens by the names that templates know them by) of a tokenizer's folder."""
    file, settings_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings: dict = {}
    template = None
    if settings_file.exists():
        try:
            settings = json.loads(read_file(settings_file, "give --tokenizer another folder"))
        except (ValueError, RecursionError) as error:
            raise error if isinstance(error, UserError) else UserError(f"{settings_file} is not JSON") from None
        if not isinstance(settings, dict):
            raise UserError(f"{settings_file} is no JSON object")
    if file.exists():
        try:
            template = read_file(file, "give --tokenizer another folder").decode()
        except UnicodeDecodeError:
            raise UserError(f"chat template {file} is not UTF-8") from None
    else:
        file, template = settings_file, settings.get("chat_template")
        if isinstance(template, list):  # several, each with a name
            named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
            template = named.get("default")
    if not isinstance(template, str):
        raise UserError(f'data with "messages" need a chat template, and {folder} has none: add chat_template.jinja')
    if len(template) > TEMPLATE_CHARACTERS:
        raise UserError(f"chat template {file} has {len(template)} characters, more than {TEMPLATE_CHARACTERS}")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: settings.get(name) for name in names}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return file, template, {name: value for name, value in tokens.items() if isinstance(value, str)}


def _compile(source: str, file: Path):
    """The template in a sandbox: nothing that leads out of it, no other files, no change of what it is given."""
    try:
        import jinja2
        from jinja2 import ext, filters, nodes, sandbox
    except ImportError:
        raise UserError(f"chat template {file} needs the jinja2 package: pip install jinja2") from None

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %}, with which a template marks what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller) -> str:
            return OPEN + caller() + CLOSE

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """Also without powers, products and roundings of huge integers, which no limit on time interrupts."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context, operator, left, right):
            both = isinstance(left, int) and isinstance(right, int)
            if operator == "**" or (both and left.bit_length() + right.bit_length() > 256):
                raise OverflowError("a number too large")
            return super().call_binop(context, operator, left, right)

    def round_to(value, precision=0, method="common"):
        if abs(precision) > 100:  # 10**precision
            raise OverflowError("a number too large")
        return filters.do_round(value, precision, method)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # fmt: skip

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = to_json  # Jinja's own escapes for HTML
    environment.filters["round"] = round_to
    environment.globals["raise_exception"] = raise_exception
    try:
        with _limits():
            return environment.from_string(source)
    except Exception as error:
        message = str(error) or type(error).__name__
        raise UserError(f"chat template {file} cannot be read: {message.splitlines()[0][:SHOWN]}") from None


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """What runs in here ends with an exception after RENDER_SECONDS, and beyond RENDER_BYTES more memory.

    Only a process's main thread can be interrupted; data are read there, also in workers of prepare.py.
    """

    def stop(*_):
        raise TimeoutError(f"it takes longer than {RENDER_SECONDS:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + RENDER_BYTES
    is_main = threading.current_thread() is threading.main_thread()
    limits = [value for value in (soft, hard, limit) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    handler = signal.signal(signal.SIGVTALRM, stop) if is_main else None
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
        yield
    except MemoryError:
        raise MemoryError(f"it takes more than {RENDER_BYTES >> 20} MiB") from None
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _check_messages(record: dict, where: str) -> list[dict]:
    """The messages of a chat: [system], then user and assistant by turns, tools' results behind calls of them.

    A content that is a list of parts of text becomes one string.
    """
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: "messages" is {"an empty list" if messages == [] else "no list"}; remove the line')
    checked: list[dict] = []
    before = "nothing"
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        what = f"{where}: message {number} ({str(role)[:40]})"
        allowed = ROLES_AFTER[before]
        if role not in allowed:
            raise UserError(f"{what} follows {before}, where there should be {' or '.join(allowed)}")
        message = {**message, "content": _join_parts(message.get("content"), what)}
        calls = message.get("tool_calls")
        thoughts = [message[name] for name in REASONING_FIELDS if message.get(name)]
        if thoughts:
            message["reasoning_content"] = thoughts[0]  # the name that templates read
        if not message["content"].strip() and not (role == "assistant" and (calls or thoughts)):
            raise UserError(f"{what} is empty; remove the line")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise UserError(f'{what}: "tool_calls" must be a list of objects')
        before = "an assistant that calls tools" if calls else role
        checked.append(message)
    if role != "assistant":
        raise UserError(f"{where}: the last of {len(messages)} messages is of {role}; it must be the assistant's")
    return checked


# By the role of the message before.
ROLES_AFTER = {
    "nothing": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "an assistant that calls tools": ("tool",),
    "tool": ("tool", "assistant"),
}


def _join_parts(content, what: str) -> str:
    """A message's content as one string: None is empty, and a list is of parts {"type": "text", "text": ...}."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if content is None or isinstance(content, str):
        return content or ""
    raise UserError(f'{what} has a content that is no text: a string, or parts {{"type": "text", "text": ...}}')


def _names(tools: list[dict]) -> list[str]:
    """Of functions, each itself or under "function"."""
    functions = [tool.get("function", tool) for tool in tools]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def _without_reasoning(message: dict) -> dict:
    if message["role"] != "assistant":
        return message
    message = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**message, "content": THINKING.sub("", message["content"])}


def _with_bodies(text: str, turns: list[Turn], bodies: list[str]) -> tuple[str, list[Turn]]:
    """The text with its first turns replaced by `bodies`, and where all turns are then.

    For "a[b]c[d]" with turns (2, 3) and (6, 7), and bodies ["xyz"]: "a[xyz]c[d]", (2, 5) and (8, 9).
    """
    parts, moved, position, length = [], [], 0, 0
    for i, (start, stop) in enumerate(turns):
        body = bodies[i] if i < len(bodies) else text[start:stop]
        length += start - position
        moved.append((length, length + len(body)))
        parts += [text[position:start], body]
        position, length = stop, length + len(body)
    return "".join([*parts, text[position:]]), moved


def _take_marks(text: str) -> tuple[str, list[Turn]]:
    """The text without its marks, and what stood between them. For "a<b>c", with OPEN < and CLOSE >: "abc", (1, 2)."""
    parts = re.split(f"([{OPEN}{CLOSE}])", text)
    plain, turns, length, start = [], [], 0, 0
    for part in parts:
        if part == OPEN:
            start = length
        elif part == CLOSE:
            turns.append((start, length))
        else:
            plain.append(part)
            length += len(part)
    return "".join(plain), turns
