"""Messages of a chat: checked, and brought into the one form that templates read."""

import json
import re

from training.data.forms import FLAGS, NUMBERS, NothingToLearn, refuse_unknown_flags, says_trained
from training.host.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
CALLS = ("an assistant that calls tools", "an assistant that writes calls")  # in fields, or in the content
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINKING = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


def check_messages(messages) -> tuple[list[dict], list[bool]]:
    """Returns the messages of a chat as templates read them, and for each of the assistant whether it is trained on.

    Each content is one string, and reasoning has one name. Results of tools follow a message that calls tools, and
    nothing else does. Any other order is left to the template.
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
        calls = function_names(message.get("tool_calls"), f'{what}: "tool_calls"')
        if calls:
            for call in message["tool_calls"]:
                refuse_unknown_flags(call, f"a call of {what}", NUMBERS)
            message["tool_calls"] = [_with_object(nested(call)) for call in message["tool_calls"]]
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
    text = {"type": "text", "text": "" if content is None else content}
    for part in content if isinstance(content, list) else [text]:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        value = part.get(kind) if kind == "text" or (kind == "thinking" and not joined["text"]) else None
        if not isinstance(value, str):
            raise UserError(f'{what} has a content that is no text: a string, or parts {{"type": "text", "text": ...}}')
        refuse_unknown_flags(part, f"a part of {what}", ())
        joined[kind] += value
    return joined["text"], joined["thinking"]


def in_parts(messages: list[dict]) -> list[dict]:
    """Returns messages with their reasoning as a part of the content, before the text."""
    made = []
    for message in messages:
        if thought := message.get("reasoning_content"):
            text = {"type": "text", "text": message["content"]}
            message = {**message, "content": [{"type": "thinking", "thinking": thought}, text]}
        made.append(message)
    return made


def nested(tool: dict) -> dict:
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


def function_names(tools, what: str = "tools") -> list[str]:
    """Returns the functions' names. A tool, or a call of one, is a function itself or has it under "function"."""
    found = [None] if tools is not None else []
    if isinstance(tools, list):
        functions = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools]
        found = [function.get("name") if isinstance(function, dict) else None for function in functions]
    if not all(isinstance(name, str) for name in found):
        raise UserError(f'{what} must be a list of objects, each with a string as "name"')
    return [str(name) for name in found]


def without_reasoning(message: dict) -> dict:
    if message["role"] != "assistant":
        return message
    rest = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return rest | {"content": THINKING.sub("", message["content"])}
