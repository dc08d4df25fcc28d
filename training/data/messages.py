"""Messages of a chat: checked, and brought into the one form that templates read."""

import json
import re
from typing import NamedTuple

from training.data.forms import FLAGS, NothingToLearn, refuse_unknown_flags, says_trained
from training.data.unread import EMPTY, cure_of, describes, texts_in
from training.host.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
CALLS = (
    "an assistant that calls tools",
    "an assistant that writes calls",
)  # in fields, or in the content
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINKING = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)
INLINE_CALL = "<tool_call>"  # in contents of ShareGPT
# Fields that check_messages brings into their form. Others are as in the data.
READ = ("role", "content", *REASONING_FIELDS, "tool_calls")


class Forms(NamedTuple):
    """Forms of messages that a template writes."""

    reads_reasoning: bool = False  # from reasoning_content, "thinking" or a part of the content
    thinks_in_parts: bool = False  # from a part of the content alone
    null_content: bool = False  # calls are written beside a content of null alone
    text_arguments: bool = False  # arguments of calls are JSON as a text
    result_tag: str = ""  # "tool_response", where results of tools are written in <tool_response>


def check_messages(messages, forms: Forms = Forms()) -> tuple[list[dict], list[bool]]:  # noqa: B008  immutable
    """Returns the messages of a chat as templates read them, and for each of the assistant whether
    it is trained on.

    Each content is one string, and reasoning has one name. Results of tools follow a message that
    calls tools, and nothing else does. Any other order is left to the template.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f'"messages" is {"an empty list" if messages == [] else "no list"}; remove the line'
        )
    checked: list[dict] = []
    trained: list[bool] = []
    before, is_empty = "nothing", False  # the role before; whether a question or an answer is empty
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        what = f"message {number} ({str(role)[:40]})"
        if role not in ROLES:
            raise UserError(f"{what} has a role that is not known; known are {', '.join(ROLES)}")
        if role == "tool" and before not in ("tool", *CALLS):
            cure = 'give its calls as "tool_calls", or this message the role user'
            raise UserError(f"{what} follows {before}, which calls no tool; {cure}")
        if role != "tool" and before == CALLS[0]:
            raise UserError(
                f"{what} follows {before}, where there should be the result, of role tool"
            )
        message = {
            name: value for name, value in message.items() if value is not None
        }  # tables hold all names
        message["content"], thinking = _join_parts(message.get("content"), what)
        message = _with_calls(message, forms, what)
        message = _with_reasoning(message, thinking, forms, what)
        calls, thought = message.get("tool_calls"), message.get("reasoning_content")
        is_trained = says_trained(message, what)
        refuse_unknown_flags(message, what, FLAGS.keys())
        if role == "assistant":
            trained.append(is_trained is not False)
        elif calls or thought or is_trained:
            raise UserError(
                f"{what} has tool_calls, reasoning or a weight, which only the assistant's have; remove it"
            )
        message = {name: value for name, value in message.items() if name not in FLAGS}
        is_blank = not (message["content"].strip() or calls or thought)
        is_empty |= role in ("user", "assistant") and is_blank and not _has_other_words(message)
        writes = role == "assistant" and INLINE_CALL in message["content"]  # rows of ShareGPT do so
        before = CALLS[0] if calls else CALLS[1] if writes else role
        checked += _results(message, forms.result_tag) if role == "tool" else [message]
    if is_empty:
        raise NothingToLearn("chats with an empty question or answer")
    return checked, trained


def _has_other_words(message: dict) -> bool:
    """Whether a message has words in fields that are not read: it is refused for them, not left out
    as empty."""
    others = {
        name: value for name, value in message.items() if name not in READ and not describes(name)
    }
    return any(True for name, value in others.items() for _ in texts_in(name, value))


def _with_calls(message: dict, forms: Forms, what: str) -> dict:
    """Returns a message with its calls in one form: see nested. Fields of null are left out of
    them."""
    calls = message.get("tool_calls")
    message = {name: value for name, value in message.items() if name != "tool_calls"}
    if not function_names(calls, f'{what}: "tool_calls"'):
        return message
    if INLINE_CALL in message["content"]:
        raise UserError(
            f"{what} has calls in tool_calls, and {INLINE_CALL} in its content; keep one of both"
        )
    checked = []
    for call in calls or ():
        refuse_unknown_flags(call, f"a call of {what}", ("arguments",))
        call = nested({name: value for name, value in call.items() if value is not None})
        function = {name: value for name, value in call["function"].items() if value is not None}
        if "arguments" in function:
            function["arguments"] = _as_object(function["arguments"], forms, f"a call of {what}")
        checked.append(call | {"function": function})
    return message | {"tool_calls": checked}


def _as_object(arguments, forms: Forms, what: str):
    """Returns the arguments of a call as an object: templates write it as JSON. A text stays if
    templates need it."""
    content = arguments
    if isinstance(arguments, str):
        try:
            content = json.loads(arguments)
        except (ValueError, RecursionError):
            content = None
    if not isinstance(content, dict):
        shown = json.dumps(arguments, default=str)[:40]
        raise UserError(
            f'{what} has "arguments": {shown}; they must be an object, or JSON of one: {{}} for none'
        )
    return arguments if forms.text_arguments else content


def _with_reasoning(message: dict, thinking: str, forms: Forms, what: str) -> dict:
    """Returns a message with its reasoning once, as "reasoning_content" and under its own name.

    Args:
        thinking: reasoning in parts of the content.
    """
    in_fields = [text for name in REASONING_FIELDS if (text := message.get(name)) is not None]
    thoughts = [thought for thought in (thinking, *in_fields) if thought]
    if thoughts and any(
        thought != thoughts[0] or not isinstance(thought, str) for thought in thoughts
    ):
        raise UserError(f"{what} has reasoning that is not one string; mend it, or remove the line")
    if not thoughts and not in_fields:
        return message
    thought = thoughts[0] if thoughts else ""
    named = {name: thought for name in REASONING_FIELDS if message.get(name) is not None}
    message = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    if inline := THINKING.match(message["content"]):
        written = inline[1].strip()
        if thought and written not in ("", thought.strip()):
            raise UserError(
                f"{what} has reasoning in a field, and other reasoning in its content; keep one of both"
            )
        if not thought or (written and not forms.reads_reasoning):
            return message  # the content has it all
        message["content"] = message["content"][inline.end() :]
    return message | named | {"reasoning_content": thought}


def _results(message: dict, tag: str) -> list[dict]:
    """Returns results of tools without the tag that the template writes around each.

    "<tool_response>2</tool_response>\n<tool_response>3</tool_response>" has two.
    """
    results_alone = rf"\s*(<{tag}>(?:(?!<{tag}>).)*</{tag}>\s*)+"
    if not tag or not re.fullmatch(results_alone, message["content"], re.DOTALL):
        return [message]
    results = re.findall(rf"<{tag}>(.*?)</{tag}>\s*(?=<{tag}>|\Z)", message["content"], re.DOTALL)
    return [message | {"content": result.strip("\n")} for result in results]


def _join_parts(content, what: str) -> tuple[str, str]:
    """Returns (text, reasoning) of a message's content. None is empty.

    A list has parts {"type": "text", "text": ...}. Parts {"type": "thinking", "thinking": ...} may
    stand before them.
    """
    joined = {"text": "", "thinking": ""}
    text = {"type": "text", "text": "" if content is None else content}
    for part in content if isinstance(content, list) else [text]:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        value = (
            part.get(kind)
            if kind == "text" or (kind == "thinking" and not joined["text"])
            else None
        )
        if not isinstance(value, str):
            raise UserError(
                f'{what} has a content that is no text: a string, or parts {{"type": "text", "text": ...}}'
            )
        refuse_unknown_flags(part, f"a part of {what}", ())
        _refuse_other_words(part, kind, f"a part of {what}")
        joined[kind] += value
    return joined["text"], joined["thinking"]


def _refuse_other_words(part: dict, kind: str, what: str) -> None:
    """Refuses a part of a content that has words beside its text, as of an image."""
    for name, value in part.items():
        if name in ("type", kind) or describes(name) or value in EMPTY:
            continue
        if words := next(texts_in(name, value), None):
            raise UserError(
                f'{what} has "{name[:40]}": {words[1][:40]!r}, which is not read; {cure_of(name)}'
            )


def in_parts(message: dict) -> dict:
    """Returns a message with its reasoning as a part of the content, before the text."""
    if not (thought := message.get("reasoning_content")):
        return message
    rest = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    text = {"type": "text", "text": message["content"]}
    return rest | {"content": [{"type": "thinking", "thinking": thought}, text]}


def nested(tool: dict) -> dict:
    """Returns a tool, or a call of one, with its function under "function", where templates look
    for it."""
    outer = {name: value for name, value in tool.items() if name in ("type", "id")}
    inner = {name: value for name, value in tool.items() if name not in outer}
    return tool if "function" in tool else {"type": "function"} | outer | {"function": inner}


def function_names(tools, what: str = "tools") -> list[str]:
    """Returns the functions' names. A tool, or a call of one, is a function itself or has it under
    "function"."""
    found = [None] if tools is not None else []
    if isinstance(tools, list):
        functions = [
            tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools
        ]
        found = [
            function.get("name") if isinstance(function, dict) else None for function in functions
        ]
    if not all(isinstance(name, str) for name in found):
        raise UserError(f'{what} must be a list of objects, each with a string as "name"')
    return [str(name) for name in found]


def without_reasoning(message: dict) -> dict:
    if message["role"] != "assistant":
        return message
    rest = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return rest | {"content": THINKING.sub("", message["content"])}
