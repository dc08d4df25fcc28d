"""Chat templates: read from a tokenizer's folder, and run with marks around answers.

A template is a program from somebody's folder, so it runs in a sandbox and reaches no file. Nothing
bounds its time or memory: a rendering that hangs is ended by SIGTERM.
"""

import copy
import functools
import hashlib
import itertools
import json
import logging
import re
from datetime import date
from pathlib import Path

from training.data.messages import ROLES, Forms, in_parts
from training.data.tokenizer import FileTokenizer
from training.host.errors import UserError, import_optional
from training.host.files import read_file, read_json

logger = logging.getLogger(__name__)
# Marks before the assistant's words and behind them. Unicode keeps both for a program's own use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARK = f"[{OPEN}{CLOSE}]"
# Date that templates get as the present day: the same chats have the same tokens on every day.
TODAY = date(2026, 1, 1)

ADDITIONAL = "additional_chat_templates"  # folder of templates beside chat_template.jinja
NAMES = ("default", "tool_use")  # templates that are used
Turn = tuple[int, int]  # characters start .. stop - 1 of a rendered chat


QUESTION, ANSWER = {"role": "user", "content": "QqQ"}, {"role": "assistant", "content": "AaA"}
CALL = {
    "id": "callcall1",
    "type": "function",
    "function": {"name": "NnN", "arguments": {"KkK": "VvV"}},
}
RESULT = {"role": "tool", "content": "RrR", "name": "NnN", "tool_call_id": "callcall1"}
ONE_CALL: list[dict] = [QUESTION, {**ANSWER, "content": "", "tool_calls": [CALL]}, RESULT, ANSWER]
TWO_CALLS: list[dict] = [
    QUESTION,
    {**ANSWER, "content": "", "tool_calls": [CALL, CALL]},
    RESULT,
    RESULT,
    ANSWER,
]


class Template:
    """Writes messages as text, with marks around the assistant's parts.

    {% generation %} marks the parts of a template that has these tags. In another template the
    loops over messages get marks: a part is then the text that a loop writes at a message of the
    assistant. So the parts are found where a template changes earlier turns, too: Qwen3's drops
    their reasoning.

    Attributes:
        is_marked: whether the template has {% generation %}.
        variables: names that the template reads, such as "messages" and "enable_thinking".
        values: values of variables, by name, beside the messages.
        forms: forms of messages that the template writes; see `learn_forms`.
    """

    def __init__(self, source: str, file: Path, special_tokens: dict[str, str]):
        self.file, self.source = file, source
        self._compiled, self.is_marked, self.variables = _compile(source, file)
        self.values: dict = dict(special_tokens)
        self.forms = Forms()

    def with_values(self, values: dict) -> "Template":
        """Returns this template with values of variables, such as {"enable_thinking": False}."""
        template = copy.copy(self)
        template.values = self.values | values
        return template

    def render(self, messages: list[dict], tools: list | None = None, asks: bool = False) -> str:
        """Returns messages as text; if it `asks` for an answer, with the words that begin one."""
        return re.sub(MARK, "", self._render(messages, tools, asks))

    def cut(self, messages: list[dict], tools: list | None = None) -> tuple[str, list[Turn]]:
        """Returns the text of messages, and its marked parts. A loop's parts have headers."""
        text = self._render(messages, tools)
        marks, parts = re.findall(MARK, text), re.split(MARK, text)
        if self.is_marked and marks != [OPEN, CLOSE] * (len(marks) // 2):
            raise UserError(
                f"chat template {self.file} nests {{% generation %}}, or writes half of it"
            )
        ends = [*itertools.accumulate(map(len, parts))]
        borders = zip(marks, parts[1:], itertools.pairwise(ends))
        # A loop that only looks for the last question has no words between its marks.
        turns = [turn for mark, part, turn in borders if mark == OPEN and part.strip()]
        return "".join(parts), turns

    def learn_forms(self) -> None:
        """Finds out how the template reads reasoning, calls and results of tools."""
        thinks, thinks_in_parts = self._reads_reasoning()
        self.forms = Forms(reads_reasoning=thinks, thinks_in_parts=thinks_in_parts)
        forms = itertools.product((False, True), (False, True), (TWO_CALLS, ONE_CALL))
        for has_null_content, has_text_arguments, chat in forms:
            self.forms = self.forms._replace(
                null_content=has_null_content, text_arguments=has_text_arguments
            )
            text = self._text_of(chat)
            if "NnN" in text and "KkK" in text and "VvV" in text:
                wrapped = re.search(r"<(\w+)>\s*RrR\s*</\1>", text)
                self.forms = self.forms._replace(result_tag=wrapped[1] if wrapped else "")
                return
        self.forms = self.forms._replace(null_content=False, text_arguments=False)

    def _reads_reasoning(self) -> tuple[bool, bool]:
        """Returns whether reasoning is written, and whether only as a part of the content.

        Ministral 3's template asks for parts.
        """
        messages = [QUESTION, ANSWER | {"reasoning_content": "TtT"}]
        if "TtT" in self._text_of(messages):
            return True, False
        self.forms = Forms(thinks_in_parts=True)
        match = re.search("TtT(.*?)AaA", self._text_of(messages), re.DOTALL)
        # A template may print the list itself.
        is_written = match is not None and "type" not in match[1]
        return is_written, is_written

    def _text_of(self, messages: list[dict]) -> str:
        """Returns messages as text; none where the template refuses them."""
        try:
            return self.render(messages)
        except UserError:
            return ""

    def _render(self, messages: list[dict], tools: list | None, asks: bool = False) -> str:
        try:
            messages = [self._as_read(message) for message in messages]
            arguments = {"messages": messages, "tools": tools, "add_generation_prompt": asks}
            return self._compiled.render(**self.values | arguments)
        except Exception as error:
            raise _failure(self.file, "fails", error) from None

    def _as_read(self, message: dict) -> dict:
        """Returns a message in the forms that the template reads.

        In transformers reasoning_content is also "thinking". Where a template asks for them, calls
        stand beside a content of None and have arguments as text: DeepSeek R1's drops calls beside
        an empty text.
        """
        if message.get("reasoning_content") is not None:
            if self.forms.thinks_in_parts:
                message = in_parts(message)
            else:
                message = {"thinking": message["reasoning_content"], **message}
        if calls := message.get("tool_calls"):
            if self.forms.null_content and not message["content"]:
                message = message | {"content": None}
            if self.forms.text_arguments:
                message = message | {"tool_calls": [_with_text_arguments(call) for call in calls]}
        return message


def _with_text_arguments(call: dict) -> dict:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, dict):
        return call
    return call | {
        "function": call["function"] | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    }


def read_templates(tokenizer: FileTokenizer) -> dict[str, tuple[Path, str]]:
    """Returns a tokenizer's chat templates, each as (file, source), by name, as transformers does.

    The tokenizer was given them, or they are its folder's.

    Most tokenizers have one template, "default". "tool_use" is for chats with tools. Files take the
    place of all that tokenizer_config.json has: chat_template.jinja is "default",
    additional_chat_templates/tool_use.jinja "tool_use".
    """
    if tokenizer.chat_template is not None:
        return {"default": tokenizer.chat_template}
    folder = tokenizer.folder
    files = {file.stem: file for file in sorted((folder / ADDITIONAL).glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").exists():
        files = {"default": file} | files
    if files:
        return {name: (file, _read_source(file)) for name, file in files.items()}
    file = folder / "tokenizer_config.json"
    templates = read_json(file).get("chat_template") if file.exists() else None
    if isinstance(templates, str):
        templates = {"default": templates}
    if isinstance(templates, list):  # several templates, each with a name
        named = [
            entry
            for entry in templates
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        ]
        templates = {entry["name"]: entry.get("template") for entry in named}
    sources = templates.items() if isinstance(templates, dict) else ()
    return {name: (file, source) for name, source in sources if isinstance(source, str)}


def _read_source(file: Path) -> str:
    try:
        return read_file(file, "give --tokenizer another folder").decode()
    except UnicodeDecodeError:
        raise UserError(f"chat template {file} is not UTF-8") from None


def template_hash(tokenizer) -> str | None:
    """Returns a hash of a tokenizer's chat templates; None if it has none."""
    templates = read_templates(tokenizer) if isinstance(tokenizer, FileTokenizer) else {}
    sources = {name: source for name, (_, source) in templates.items() if name in NAMES}
    if not sources:
        return None
    content = json.dumps(sources, sort_keys=True)
    if [*sources] == ["default"]:
        content = sources["default"]
    return hashlib.sha256(content.encode()).hexdigest()


def _compile(source: str, file: Path):
    """Returns (template, whether it has {% generation %}, the variables that it reads).

    The template reads no file, and leaves its arguments as they are.
    """
    import_optional("jinja2.sandbox", f"chat template {file}")
    import jinja2
    from jinja2 import ext, meta, nodes, sandbox

    class Generation(ext.Extension):
        """The tags {% generation %} ... {% endgeneration %}, by which a template marks the
        assistant's words."""

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
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": raise_exception,
        "mark_message": _mark_message,
        "mark_end": lambda values: CLOSE if any(map(_mark_message, values)) else "",
    }
    # Llama's template has a date of its own if it is not told one.
    if "strftime_now" in source and "strftime_now is defined" not in source:
        environment.globals["strftime_now"] = TODAY.strftime
        logger.info("chat template %s asks for the day: it is told %s on every day", file, TODAY)
    try:
        tree = environment.parse(source)
        variables = meta.find_undeclared_variables(environment.parse(source))
        calls = (block.call.node for block in tree.find_all(nodes.CallBlock))
        is_marked = any(isinstance(call, nodes.ExtensionAttribute) for call in calls)
        if not is_marked:
            tree.body = _with_marks(tree.body)
            tree.set_environment(environment)
        return environment.from_string(tree), is_marked, variables
    except Exception as error:
        raise _failure(file, "cannot be read", error) from None


def _with_marks(statements: list) -> list:
    """Returns statements of a template whose outermost loops write marks at each message, and
    behind the last one.

    {% for m in messages %}...{% endfor %} becomes
    {% for m in messages %}{{ mark_message(m) }}...{% endfor %}{{ mark_end(messages) }}.
    """
    from jinja2 import nodes

    def output(function: str, value, line: int):
        call = nodes.Call(nodes.Name(function, "load"), [value], [], None, None)
        return nodes.Output([call]).set_lineno(line)

    marked = []
    for statement in statements:
        marked.append(statement)
        line = statement.lineno
        if isinstance(statement, nodes.For) and isinstance(statement.target, nodes.Name):
            message = nodes.Name(statement.target.name, "load")
            statement.body.insert(0, output("mark_message", message, line))
            marked.append(output("mark_end", statement.iter, line))
        elif not isinstance(statement, nodes.For):
            for name in {"body", "elif_", "else_"}.intersection(statement.fields):
                setattr(statement, name, _with_marks(getattr(statement, name)))
    return marked


def _mark_message(value) -> str:
    """Returns the mark before what a loop writes for a message; "" for values such as a call."""
    role = value.get("role") if isinstance(value, dict) else None
    if role == "assistant":
        return OPEN
    return CLOSE if role in ROLES else ""


def _failure(file: Path, how: str, error: Exception) -> UserError:
    """Returns one line for an error of a template, which may have any type and any length."""
    message = str(error) or type(error).__name__
    return UserError(f"chat template {file} {how}: {message.splitlines()[0][:200]}")
