"""Messages of a chat: checked, and brought into the one form that templates read."""

import json
import re
from typing import NamedTuple

from training.data.masks import FLAGS, NothingToLearn, refuse_unknown_flags, says_trained
from training.data.unread import EMPTY, cure_of, describes, parts_of_answers, texts_in
from training.host.errors import UserError, as_json

ROLES = ("system", "developer", "user", "assistant", "tool")
CALLS_IN_FIELDS = "an assistant that calls tools"
CALLS_IN_CONTENT = "an assistant that writes calls"
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


def check_messages(messages, forms: Forms) -> tuple[list[dict], list[bool]]:
    """Checks the messages of a chat, and brings them into the form that templates read.

    Each content is one string, and reasoning has one name. Results of tools follow a message that
    calls tools, and nothing else does. Any other order is left to the template.

    Returns:
        The messages; and for each message of the assistant whether it is trained on.

    Raises:
        UserError: the messages are no chat.
        NothingToLearn: a question or an answer is empty.
    """
    if not isinstance(messages, list) or not messages:
        kind = "an empty list" if messages == [] else "no list"
        raise UserError(f'"messages" is {kind}; remove the line')
    checked: list[dict] = []
    trained: list[bool] = []
    before, is_empty = "nothing", False  # the role before; whether a question or an answer is empty
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        what = f"message {number} ({str(role)[:40]})"
        _check_order(role, before, what)
        message = _in_one_form(message, forms, what)
        is_trained = says_trained(message, what)
        refuse_unknown_flags(message, what, FLAGS.keys())
        calls, thought = message.get("tool_calls"), message.get("reasoning_content")
        if role == "assistant":
            trained.append(is_trained is not False)
        elif calls or thought or is_trained:
            raise UserError(
                f"{what} has tool_calls, reasoning or a weight, which only the assistant's have; "
                "remove it"
            )
        message = {name: value for name, value in message.items() if name not in FLAGS}
        is_blank = not (message["content"].strip() or calls or thought)
        is_empty |= role in ("user", "assistant") and is_blank and not _has_other_words(message)
        before = str(role)
        if calls:
            before = CALLS_IN_FIELDS
        elif role == "assistant" and INLINE_CALL in message["content"]:  # rows of ShareGPT do so
            before = CALLS_IN_CONTENT
        checked += _results(message, forms.result_tag) if role == "tool" else [message]
    if is_empty:
        raise NothingToLearn("chats with an empty question or answer")
    return checked, trained


def _check_order(role: object, before: str, what: str) -> None:
    """Refuses roles that are not known, and calls of tools without results or the reverse."""
    if role not in ROLES:
        raise UserError(f"{what} has a role that is not known; known are {', '.join(ROLES)}")
    if role == "tool" and before not in ("tool", CALLS_IN_FIELDS, CALLS_IN_CONTENT):
        raise UserError(
            f'{what} follows {before}, which calls no tool; give its calls as "tool_calls", or '
            "this message the role user"
        )
    if role != "tool" and before == CALLS_IN_FIELDS:
        raise UserError(f"{what} follows {before}, where there should be the result, of role tool")


def _in_one_form(message: dict, forms: Forms, what: str) -> dict:
    message = _without_nulls(message)
    message["content"], thinking = _join_parts(message.get("content"), what)
    return _with_reasoning(_with_calls(message, forms, what), thinking, forms, what)


def _without_nulls(fields: dict) -> dict:
    """Returns fields with a value: tables have all names in all objects of a column."""
    return {name: value for name, value in fields.items() if value is not None}


def _has_other_words(message: dict) -> bool:
    """Whether fields that are not read may have an answer: they are refused, see ChatWriter."""
    unread = [name for name in message if name not in READ]
    return any(True for name in unread for _ in parts_of_answers(name, message[name]))


def _with_calls(message: dict, forms: Forms, what: str) -> dict:
    """Returns a message with its calls in one form, see `nested`, and without nulls in them."""
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
        call = nested(_without_nulls(call))
        function = _without_nulls(call["function"])
        if "arguments" in function:
            function["arguments"] = _as_object(function["arguments"], forms, f"a call of {what}")
        checked.append(call | {"function": function})
    return message | {"tool_calls": checked}


def _as_object(arguments, forms: Forms, what: str):
    """Returns the arguments of a call as an object, or as a text if the template needs it."""
    content = arguments
    if isinstance(arguments, str):
        try:
            content = json.loads(arguments)
        except (ValueError, RecursionError):
            content = None
    if not isinstance(content, dict):
        raise UserError(
            f'{what} has "arguments": {as_json(arguments)}; they must be an object, or JSON of '
            "one: {} for none"
        )
    return arguments if forms.text_arguments else content


def _with_reasoning(message: dict, thinking: str, forms: Forms, what: str) -> dict:
    """Returns a message with its reasoning once, as "reasoning_content" and under its own name.

    Args:
        thinking: reasoning in parts of the content.
    """
    thoughts = {name: message[name] for name in REASONING_FIELDS if message.get(name) is not None}
    texts = [text for text in (thinking, *thoughts.values()) if text]
    if any(text != texts[0] or not isinstance(text, str) for text in texts):
        raise UserError(f"{what} has reasoning that is not one string; mend it, or remove the line")
    if not texts and not thoughts:
        return message
    thought = texts[0] if texts else ""
    message = _without_reasoning_fields(message)
    if inline := THINKING.match(message["content"]):
        written = inline[1].strip()
        if thought and written not in ("", thought.strip()):
            raise UserError(
                f"{what} has reasoning in a field, and other reasoning in its content; "
                "keep one of both"
            )
        if not thought or (written and not forms.reads_reasoning):
            return message  # the content has it all
        message["content"] = message["content"][inline.end() :]
    return message | dict.fromkeys([*thoughts, "reasoning_content"], thought)


def _without_reasoning_fields(message: dict) -> dict:
    return {name: value for name, value in message.items() if name not in REASONING_FIELDS}


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
        is_read = kind == "text" or (kind == "thinking" and not joined["text"])
        if not is_read or not isinstance(part.get(kind), str):
            raise UserError(
                f'{what} has a content that is no text: a string, or parts {{"type": "text", '
                '"text": ...}'
            )
        refuse_unknown_flags(part, f"a part of {what}", ())
        _refuse_other_words(part, kind, f"a part of {what}")
        joined[kind] += part[kind]
    return joined["text"], joined["thinking"]


def _refuse_other_words(part: dict, kind: str, what: str) -> None:
    """Refuses a part of a content that has words beside its text, as of an image."""
    for name, value in part.items():
        if name in ("type", kind) or describes(name) or value in EMPTY:
            continue
        for _, text in texts_in(name, value):
            raise UserError(
                f'{what} has "{name[:40]}": {text[:40]!r}, which is not read; {cure_of(name)}'
            )


def in_parts(message: dict) -> dict:
    """Returns a message with its reasoning as a part of the content, before the text."""
    if not (thought := message.get("reasoning_content")):
        return message
    text = {"type": "text", "text": message["content"]}
    thinking = {"type": "thinking", "thinking": thought}
    return _without_reasoning_fields(message) | {"content": [thinking, text]}


def nested(tool: dict) -> dict:
    """Returns a tool, or a call, with its function under "function", where templates look."""
    if "function" in tool:
        return tool
    outer = {name: value for name, value in tool.items() if name in ("type", "id")}
    inner = {name: value for name, value in tool.items() if name not in outer}
    return {"type": "function"} | outer | {"function": inner}


def function_names(tools, what: str = "tools") -> list[str]:
    """Returns the functions' names of tools or calls: a function itself, or one in "function".

    Raises UserError: `tools` is no list of objects, or one has no string as "name".
    """
    if tools is None:
        return []
    names = []
    for tool in tools if isinstance(tools, list) else [None]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise UserError(f'{what} must be a list of objects, each with a string as "name"')
        names.append(name)
    return names


def without_reasoning(message: dict) -> dict:
    if message["role"] != "assistant":
        return message
    content = THINKING.sub("", message["content"])
    return _without_reasoning_fields(message) | {"content": content}
