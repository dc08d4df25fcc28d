"""Chat templates: read from a tokenizer's folder, run in Jinja's sandbox, with marks around the assistant's turns.

A template is a program from somebody's folder, so it runs in a sandbox and reaches no file. Nothing bounds its time or
memory: a rendering that hangs is ended by SIGTERM.
"""

import functools
import hashlib
import itertools
import json
import logging
import re
from datetime import date
from pathlib import Path

from training.data.messages import ROLES, in_parts
from training.data.tokenizer import FileTokenizer
from training.host.errors import UserError, import_optional
from training.host.files import read_file, read_json

logger = logging.getLogger(__name__)
# Marks before the assistant's words and behind them. Unicode keeps these two for a program's own use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARK = f"[{OPEN}{CLOSE}]"
# Date that templates get as the present day: the same chats have the same tokens on every day.
TODAY = date(2026, 1, 1)

Turn = tuple[int, int]  # characters start .. stop - 1 of a rendered chat


class Template:
    """Writes messages as text, with marks around the assistant's parts.

    {% generation %} marks the parts of a template that has these tags. In another template the loops over messages get
    marks: a part is then the text that a loop writes at a message of the assistant. So the parts are found where a
    template changes earlier turns, too: Qwen3's drops their reasoning.

    Attributes:
        is_marked: whether the template has {% generation %}.
    """

    def __init__(self, source: str, file: Path, special_tokens: dict[str, str]):
        self.file, self._special_tokens = file, special_tokens
        self._compiled, self.is_marked = _compile(source, file)
        self._thinks_in_parts = False  # whether it reads reasoning from parts of the content alone

    def render(self, messages: list[dict], tools: list | None = None, asks: bool = False) -> str:
        """Returns messages as text; if it `asks` for an answer, with the words that an answer begins with."""
        return re.sub(MARK, "", self._render(messages, tools, asks))

    def cut(self, messages: list[dict], tools: list | None = None) -> tuple[str, list[Turn]]:
        """Returns (text of the messages, parts that are marked in it). A loop's parts have the headers of turns."""
        text = self._render(messages, tools)
        marks, parts = re.findall(MARK, text), re.split(MARK, text)
        if self.is_marked and marks != [OPEN, CLOSE] * (len(marks) // 2):
            raise UserError(f"chat template {self.file} nests {{% generation %}}, or writes half of it")
        ends = [*itertools.accumulate(map(len, parts))]
        borders = zip(marks, parts[1:], itertools.pairwise(ends))
        # A loop that writes nothing, as one that looks for the last question, has no words between its marks.
        return "".join(parts), [turn for mark, part, turn in borders if mark == OPEN and part.strip()]

    def learn_parts(self) -> None:
        """Find out whether reasoning is written only where it is a part of the content, as by Ministral 3's."""
        answer = {"role": "assistant", "content": "AaA", "reasoning_content": "TtT"}
        messages = [{"role": "user", "content": "QqQ"}, answer]
        if "TtT" in self.render(messages):
            return
        try:
            found = re.search("TtT(.*?)AaA", self.render(in_parts(messages)), re.DOTALL)
        except UserError:
            return
        self._thinks_in_parts = found is not None and "type" not in found[1]  # a template may print the list itself

    def _render(self, messages: list[dict], tools: list | None, asks: bool = False) -> str:
        messages = in_parts(messages) if self._thinks_in_parts else messages
        given = {"messages": messages, "tools": tools, "add_generation_prompt": asks}
        try:
            return self._compiled.render(**given, **self._special_tokens)
        except Exception as error:
            raise _failure(self.file, "fails", error) from None


def read_template(tokenizer: FileTokenizer) -> tuple[Path, str | None]:
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


def template_hash(tokenizer) -> str | None:
    """Returns a hash of a tokenizer's chat template; None if it has none."""
    source = read_template(tokenizer)[1] if isinstance(tokenizer, FileTokenizer) else None
    return source and hashlib.sha256(source.encode()).hexdigest()


def _compile(source: str, file: Path):
    """Returns (template, whether it has {% generation %}). It reads no file, and leaves its arguments as they are."""
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
    environment.globals |= {"raise_exception": raise_exception, "mark_message": _mark_message}
    environment.globals["mark_end"] = lambda values: CLOSE if any(map(_mark_message, values)) else ""
    if "strftime_now" in source and "strftime_now is defined" not in source:  # Llama's has a date of its own otherwise
        environment.globals["strftime_now"] = TODAY.strftime
        logger.info("chat template %s asks for the day: it is told %s on every day", file, TODAY)
    try:
        tree = environment.parse(source)
        is_marked = any(isinstance(each.call.node, nodes.ExtensionAttribute) for each in tree.find_all(nodes.CallBlock))
        if not is_marked:
            tree.body = _with_marks(tree.body)
            tree.set_environment(environment)
        return environment.from_string(tree), is_marked
    except Exception as error:
        raise _failure(file, "cannot be read", error) from None


def _with_marks(statements: list) -> list:
    """Returns statements of a template whose outermost loops write marks at each message, and behind the last one.

    {% for m in messages %}...{% endfor %} becomes
    {% for m in messages %}{{ mark_message(m) }}...{% endfor %}{{ mark_end(messages) }}.
    """
    from jinja2 import nodes

    def output(function: str, value, line: int):
        call = nodes.Call(nodes.Name(function, "load"), [value], [], None, None)
        return nodes.Output([call]).set_lineno(line)

    made = []
    for each in statements:
        made.append(each)
        if isinstance(each, nodes.For) and isinstance(each.target, nodes.Name):
            each.body.insert(0, output("mark_message", nodes.Name(each.target.name, "load"), each.lineno))
            made.append(output("mark_end", each.iter, each.lineno))
        elif not isinstance(each, nodes.For):
            for name in {"body", "elif_", "else_"}.intersection(each.fields):
                setattr(each, name, _with_marks(getattr(each, name)))
    return made


def _mark_message(value) -> str:
    """Returns the mark before what a loop writes for a message; none for other values, such as a call of a tool."""
    role = value.get("role") if isinstance(value, dict) else None
    return OPEN if role == "assistant" else CLOSE if role in ROLES else ""


def _failure(file: Path, how: str, error: Exception) -> UserError:
    """Returns one line for an error of a template, which may have any type and any length."""
    message = str(error) or type(error).__name__
    return UserError(f"chat template {file} {how}: {message.splitlines()[0][:200]}")
