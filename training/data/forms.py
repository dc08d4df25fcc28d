"""Forms of a row, told by its fields: messages, ShareGPT, Alpaca, prompts with completions, text.

Others are refused by name: rows that prefer one answer to another.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from training.data.unread import may_be_number
from training.host.errors import UserError

ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "tool_call": "assistant",
    "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
CALLERS = ("function_call", "tool_call")  # roles whose content is JSON of a call, or of several
SHAREGPT = {"from": "role", "value": "content"}
EMPTY: tuple = (
    "",
    "[]",
    "{}",
    "null",
    [],
    {},
    False,
)  # values of fields that say nothing, also as JSON of tables
CONTENTS = (
    "parts",
    "value",
    "text",
    "message",
    "output",
    "response",
    "refusal",
)  # contents that are not read as such
ALPACA = (
    "Below is an instruction that describes a task{further}. Write a response that appropriately "
    "completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
FURTHER = ", paired with an input that provides further context"


# Fields of a message by which trainers say whether it is trained on, and the truth that says so:
# OpenAI's, axolotl's, ms-swift's, LLaMA-Factory's, slime's and torchtune's.
FLAGS = {
    "weight": True, "train": True, "training": True, "loss": True, "loss_scale": True,
    "loss_weight": True,
    "loss_mask": True, "step_loss_mask": True, "masked": False,
}  # fmt: skip
# Fields of a row that mask some of its tokens.
MASKS = {
    "mask", "masks", "completion_mask", "assistant_mask", "assistant_masks", "loss_masks",
    "weights", "loss_weights",
    "sample_weight", "train_on_inputs", "train_on_input",
}  # fmt: skip
IGNORED = -100  # in "labels": a token that is not trained on
TEXTS = {  # any words
    "role", "content", "name", "text", "arguments", "reasoning_content", "reasoning", "thinking",
    "lang", "language",
}  # fmt: skip
TRUTHS = {"true", "false", "yes", "no", "on", "off", "0", "1"}  # strings that stand for a truth
IN_A_SPLIT = re.compile(
    "^(is_)?in_[a-z0-9_]+_train(_set|_split)?$"
)  # says that another data set has a row, too
FLAG_WORDS = re.compile(
    "(^|_)(loss|train|trained|training|trainable|mask|masked|weight|weights)(_|$)", re.IGNORECASE
)


CHATS = ("prompt", "completion", "chosen", "rejected")  # fields of texts, or of lists of messages
PLAIN = (
    "text",
    "instruction",
    "output",
    "query",
    "question",
    "response",
    "answer",
)  # fields of texts alone
OTHER_TEXTS = ("input", "system")  # texts beside PLAIN, in a row of a .csv file
LISTS_OR_TEXTS = ("prompts", "responses", "rejected_response")
OBJECTS = re.compile(r"\s*\[\s*\{")  # the beginning of a list of objects as a text, and of messages
MESSAGES = re.compile(OBJECTS.pattern + r"""\s*['"](role|content|from|value)['"]\s*:""")


class NothingToLearn(Exception):
    """A row is in order, but has nothing to learn. The message says what is counted, such as "blank
    lines"."""


class Form(NamedTuple):
    """A form of rows. The first in FORMS whose field `decides` has a value of type `kind` is a
    row's form."""

    name: str  # in the log: "1,234 rows of NAME"
    decides: str
    takes: tuple[
        str, ...
    ]  # other fields of the form; fields of no form, such as an id, are ignored
    kind: type
    convert: Callable[
        [dict], dict
    ]  # its fields to "messages" and "tools", "prompt" and "completion", or "text"
    needs: str | None = None  # another field that a row of the form has

    def is_of(self, row: dict) -> bool:
        found = row.get(self.decides)
        is_asked = not self.needs or row.get(self.needs) is not None
        return found is not None and isinstance(found, self.kind) and is_asked


def recognise(row: object) -> tuple[Form, dict]:
    """Returns a row's form, and the row as "messages" and "tools", as "prompt" and "completion", or
    as "text".

    A row of Alpaca has both "messages" and "completion": it is a chat for a tokenizer with a chat
    template. A chat has "chat_template_kwargs", too, and as "beside" the row's fields that its form
    does not take.

    Raises:
        UserError: the row has no field that decides, or fields of two forms, or values that its
        form does not take. NothingToLearn: the row has no value in the field that decides, or says
        that it is not trained on.
    """
    if not isinstance(row, dict):
        raise UserError(
            f"is not an object but a {type(row).__name__}; known are objects with {KNOWN}"
        )
    _refuse_preferences(row)
    given = [name for name, value in row.items() if value is not None]
    form = next((f for f in FORMS if f.is_of(row)), None)
    if form is None:
        if any(form.decides in row and row[form.decides] is None for form in FORMS):
            raise NothingToLearn("rows without text")
        if not row.keys().isdisjoint(OF_ROLLOUTS):
            raise UserError("is a rollout, of what a model wrote: give an --objective such as grpo")
        names = (
            ", ".join(
                f'"{str(name)[:30]}"{" (null)" * (name not in given)}' for name in [*row][:20]
            )
            or "none"
        )
        raise UserError(f"has the fields {names}; known are {KNOWN}; {_cure_of_names(row)}")
    refuse_masked(row)
    if form.decides == "instruction":
        _refuse_without_output(row)
    own = {name: row[name] for name in (form.decides, *form.takes) if name in row}
    made = form.convert(own)
    clashing = CLASHING.union(UNREAD if form.decides != "text" else ())
    if form.decides not in (
        "messages",
        "conversations",
        "text",
    ):  # where an answer is one field, another may be meant
        parts = {"input", "history", "output", "response"}
        clashing = clashing.union(
            SHOWN_WITH,
            parts,
            (other.decides for other in FORMS if other.needs and other.is_of(row)),
        )
    for name in clashing.intersection(given).difference(own):
        if row[name] not in EMPTY and not _is_repeated(row[name], own, made):
            is_left_out = name in SHOWN_WITH and not any(row.get(part) for part in NOT_LEFT_OUT)
            cure = f"remove one{LEFT_OUT_BY_NAMING if is_left_out else ''}"
            if name == "functions":
                cure = "give --columns tools=functions"
            if name in ("system", *SYSTEMS) and "messages" in made:
                cure = 'write it as the first message, of the role "system"'
            if name in SYSTEMS and "system" in form.takes and not row.get("system"):
                cure = f"give --columns system={name}"
            raise UserError(
                f'has "{name}" beside "{form.decides}", where it would be ignored; {cure}'
            )
    if "messages" in made or "completion" in made:
        beside = {name: row[name] for name in given if name not in clashing.union(own, FLAGS)}
        made = {**made, "beside": beside, VARIABLES: own.get(VARIABLES)}
    return form, {**made, "tools": parsed(made["tools"], '"tools"')} if made.get("tools") else made


def is_row(row: object) -> bool:
    """Whether a value of a .json file is a row of data, in order or not. Others, as settings, have
    other fields."""
    return isinstance(row, dict) and (
        any(form.decides in row and (form.needs is None or form.needs in row) for form in FORMS)
        or any(names <= row.keys() for names in PREFERENCES)
    )


def parse_columns(text: str | None, fields: Collection[str] = ()) -> dict[str, str]:
    """Returns names of fields that forms know, by names in the data: {"q": "prompt"} of "prompt=q".

    Raises UserError: the text is not such a list, or names a field twice, or one that no form has.

    Args:
        fields: others that may be named, as an objective's.
    """
    pairs = (
        [[name.strip() for name in pair.partition("=")[::2]] for pair in text.split(",")]
        if text
        else []
    )
    columns, known = {theirs: ours for ours, theirs in pairs}, COLUMNS.union(fields)
    is_once = len(columns) == len({*columns.values()}) == len(pairs)
    if not is_once or "" in columns or not known.issuperset(columns.values()):
        what = (
            "columns must name each field once, as prompt=question,completion=answer: got "
            f"{str(text)[:50]!r}"
        )
        raise UserError(f"{what}; before each = stands one of {', '.join(sorted(known))}")
    return columns


def columns_of(form: Form) -> str:
    """Returns --columns by which a row of a form is read, and nothing beside it:
    "prompt=query,completion=response"."""
    if form.decides == "instruction":
        return "output=output"
    return f"prompt={form.needs or 'prompt'},completion={form.decides}"


def rename(row: object, columns: dict[str, str]) -> object:
    """Returns a row with the names of parse_columns. A field that has such a name already is left
    out.

    Fields that a question may be shown with are left out, too, where an answer is named.
    """
    if not isinstance(row, dict) or columns.keys().isdisjoint(row):
        return row
    left_out = columns.keys() | (
        SHOWN_WITH if {"completion", "chosen"} & {*columns.values()} else ()
    )
    others = {name: value for name, value in row.items() if name not in left_out}
    return others | {columns[name]: value for name, value in row.items() if name in columns}


def with_values(row: dict[str, str]) -> dict:
    """Returns a row of a .csv file, whose values are texts, with numbers, truths and lists where no
    text is meant.

    {"text": "5", "weight": "0.5", "label": "True", "history": ""} has the weight 0.5, the label
    true, no history.
    """
    return {name: _value_of(name, text) for name, text in row.items()}


def _value_of(name: str, text: str):
    if name in (*CHATS, *PLAIN, *OTHER_TEXTS):
        return text
    if not text.strip():
        return None
    with contextlib.suppress(ValueError, RecursionError):
        is_truth = text.strip() in ("True", "False", "TRUE", "FALSE")  # pandas', and Excel's
        value = json.loads(text.lower() if is_truth else text)
        return value if name not in LISTS_OR_TEXTS or isinstance(value, list) else text
    return text


def with_chats(row: object) -> object:
    """Returns a row in which lists of messages are lists, where they were JSON, as in tables.

    Raises UserError for messages in a field of texts, and for messages that another program wrote.
    """
    if not isinstance(row, dict):
        return row
    texts = {name: value for name in (*CHATS, *PLAIN) if isinstance(value := row.get(name), str)}
    chats = {
        name: chat for name, text in texts.items() if (chat := _chat_in(text, name)) is not None
    }
    if plain := [name for name in chats if name in PLAIN]:
        name = plain[0]
        cure = 'write them as "messages", with the question'
        if _has_answers(chats[name]) and _is_read({**row, name: chats[name]}, f"messages={name}"):
            cure = f"--columns messages={name} reads a whole chat"
        raise UserError(f'has messages as a text in "{name}"; {cure}')
    return row | chats


def _chat_in(text: str, name: str) -> list | None:
    """Returns the messages that a text has as JSON; None if it is anything else."""
    if not OBJECTS.match(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        if not MESSAGES.match(text):
            return None
        raise UserError(
            f'has messages in "{name}" that are no JSON, as of pandas; write them by json.dumps'
        ) from None
    fields = {"role", "content"}, {"role", "tool_calls"}, {*SHAREGPT}
    are_messages = all(
        isinstance(each, dict) and any(names <= each.keys() for names in fields) for each in found
    )
    return found if are_messages else None


def _refuse_preferences(row: dict) -> None:
    """Raises UserError for a row that says which of two answers is better, or whether its answer is
    good."""
    found = next(
        (names for names in PREFERENCES if all(row.get(name) is not None for name in names)), None
    )
    if (
        found is None and isinstance(row.get("label"), bool) and row.get("text") is None
    ):  # a text has a class
        found = frozenset(("label",))
    if not found:
        return
    names = " and ".join(f'"{name}"' for name in sorted(found))
    cure = f"give rows of the good answers alone, without {names}"
    if found <= {"label", "kto_tag"}:
        cure = f"give --objective kto; or rows of the good answers alone, without {names}"
    elif found == {"completions", "labels"}:
        cure = f"no --objective reads it; {cure}"
    elif found != {"chosen", "rejected"}:
        cure = f"give an --objective such as dpo; or {cure[5:]}"
    else:
        columns = next(filter(lambda columns: _is_read(row, columns), OF_CHOSEN), None)
        cure = "give an --objective such as dpo"
        if columns:
            cure += f"; or --columns {OF_CHOSEN[columns]} trains on the chosen answers alone"
    raise UserError(f"is a preference row, with {names}: {cure}")


def _cure_of_names(row: dict) -> str:
    """Returns the --columns by which a row with names of no form is read; what to write where there
    are none."""
    texts = [name for name, value in row.items() if isinstance(value, str) and value]
    chats = [name for name, value in row.items() if _has_answers(value)]
    if len(chats) == 1 and _is_read(row, f"messages={chats[0]}"):
        return f"--columns messages={chats[0]} reads such chats"
    by_lower = {name.lower(): name for name in texts}
    asked = next((by_lower[name] for name in ASKED if name in by_lower), None)
    answer = next((by_lower[name] for name in ANSWERED if name in by_lower), None)
    if asked and answer:
        system = next((f",system={name}" for name in SYSTEMS if name in row), "")
        shown = next((f",input={name}" for name in sorted(SHOWN_WITH) if name in row), "")
        columns = f"prompt={asked},completion={answer}"
        if system or shown:
            columns = f"instruction={asked},output={answer}{system}{shown}"
        if _is_read(row, columns):
            return f"--columns {columns} reads such rows"
    has_chats = any(
        isinstance(value, list) and value and isinstance(value[0], dict) for value in row.values()
    )
    if has_chats or any(row.get(name) for name in ("tools", "system", *SYSTEMS)):
        return 'no --columns reads such rows: write what they say as "messages"'
    return "--columns text=NAME gives others, or prompt=NAME,completion=NAME"


def _has_answers(value) -> bool:
    """Whether a value is a list of messages, of a user and of the assistant."""
    turns = [turn for turn in value if isinstance(turn, dict)] if isinstance(value, list) else []
    roles = [str(turn.get("role", turn.get("from"))) for turn in turns]
    return {"user", "assistant"} <= {ROLES.get(role, role) for role in roles}


def _refuse_without_output(row: dict) -> None:
    """Raises UserError for a row of Alpaca that has its answer under another name, as Dolly's
    "response"."""
    if "output" in row or not isinstance(row["instruction"], str):
        return
    answer = next((name for name in ANSWERED if isinstance(row.get(name), str)), None)
    if answer:
        shown = next(
            (
                f",input={name}"
                for name in sorted(SHOWN_WITH)
                if name in row and not row.get("input")
            ),
            "",
        )
        needs = 'needs strings "instruction" and "output"'
        raise UserError(f"{needs}; --columns output={answer}{shown} reads such rows")


def _is_read(row: dict, columns: str) -> bool:
    """Whether --columns makes a form of a row."""
    try:
        form, made = recognise(rename(row, parse_columns(columns)))
    except (UserError, NothingToLearn):
        return False
    if {*parse_columns(columns).values()}.isdisjoint((form.decides, *form.takes)):
        return False
    texts = [made.get(name) for name in ("prompt", "completion")] if "completion" in made else []
    return "messages" in made or all(isinstance(text, str) for text in texts)


def says_trained(fields: dict, what: str) -> bool | None:
    """Returns whether fields such as "weight" or "loss" say that `what` is trained on; None if it
    has none of them."""
    said = set()
    for name in FLAGS:
        if (value := fields.get(name)) is not None:
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise UserError(
                    f'{what} has "{name}": {json.dumps(value, default=str)[:40]}; it must be true, '
                    "false, 1 or 0"
                )
            said.add(bool(value) == FLAGS[name])
    if len(said) > 1:
        raise UserError(
            f"{what} says that it is trained on, and that it is not: {', '.join(FLAGS)} must agree"
        )
    return said.pop() if said else None


def refuse_unknown_flags(fields: dict, what: str, known: Collection[str]) -> None:
    """Refuses a field that may ask for another mask: its value is a number or a truth, or its name
    speaks of losses."""
    for name, value in fields.items():
        is_text = isinstance(value, str) and name in TEXTS
        is_number = isinstance(value, bool | int | float) or str(value).strip().lower() in TRUTHS
        may_mask = is_number and not may_be_number(name, value)
        may_mask |= value is not None and FLAG_WORDS.search(name) is not None
        if may_mask and not is_text and name not in known:
            has = (
                f'{what} has "{name[:40]}": {json.dumps(value, default=str)[:40]}, which is not '
                "known here"
            )
            raise UserError(
                f"{has}; remove it, or name it as one of {', '.join(FLAGS)} if it is a mask"
            )


def _is_mask(value: object) -> bool:
    """Whether a value of a row is a truth, or a list of truths or numbers."""
    return isinstance(value, bool) or (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, bool | int | float) for each in value)
    )


def refuse_masked(row: dict, cure: str = "remove it") -> None:
    """Raises UserError for a row that masks some of its tokens, and NothingToLearn for one that is
    not trained on."""
    masks = [name for name in MASKS if row.get(name) is not None]
    others = {
        name: value
        for name, value in row.items()
        if name not in FLAGS and not IN_A_SPLIT.search(name)
    }
    masks += [name for name, value in others.items() if FLAG_WORDS.search(name) and _is_mask(value)]
    if isinstance(labels := row.get("labels"), list) and IGNORED in labels:
        masks.append("labels")
    if masks:
        raise UserError(f'has "{min(masks)}", which is not obeyed; {cure}')
    if says_trained(row, "the row") is False:
        raise NothingToLearn("rows that say they are not trained on")


def _is_repeated(value, own: dict, made: dict) -> bool:
    """Whether a field repeats one text of the row, as a "prompt" beside "messages", or all, as
    "text" beside Alpaca."""
    parts = [*own.values()]
    if isinstance(messages := made.get("messages"), list) and "completion" not in made:
        parts = [message.get("content") for message in messages if isinstance(message, dict)]
    texts = [part for part in parts if part and isinstance(part, str)]
    if not texts or not isinstance(value, str):
        return False
    return any(value in text for text in texts) or all(text in value for text in texts)


def parsed(value, what: str, kind: str = "a list of objects"):
    """Returns the value of a text of JSON: a table cannot hold objects of several kinds
    otherwise."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        if MESSAGES.match(value):
            why = "has messages that are no JSON, as of pandas"
            raise UserError(f"{what} {why}; write them by json.dumps") from None
        raise UserError(f"{what} must be {kind}, or JSON of one") from None


def _from_turns(row: dict) -> dict:
    name = "messages" if "messages" in row else "conversations"
    return {"messages": _system(row) + _messages(row[name], f'"{name}"'), "tools": row.get("tools")}


def _messages(turns, what: str) -> list[dict]:
    """Returns turns as messages: each has "role" and "content", and its calls as "tool_calls"."""
    turns = parsed(turns, what)
    if turns == []:
        raise NothingToLearn("chats without messages")
    if not isinstance(turns, list):
        raise UserError(f"{what} must be a list of objects, or JSON of one")
    return [
        _message(turn, f"message {number} of {what}") for number, turn in enumerate(turns, start=1)
    ]


def _message(turn, what: str) -> dict:
    if (
        isinstance(turn, dict)
        and SHAREGPT.keys() <= turn.keys()
        and turn.keys().isdisjoint(SHAREGPT.values())
    ):
        turn = {SHAREGPT.get(name, name): value for name, value in turn.items()}
    if not isinstance(turn, dict) or "role" not in turn:
        raise UserError(
            f'{what} must be an object with "role" and "content", or "from" and "value"'
        )
    content = turn.get("content")
    if found := [name for name in CONTENTS if turn.get(name) and turn[name] != content]:
        beside = (
            "beside its content, where it would be ignored"
            if content
            else "and no content: it would be empty"
        )
        raise UserError(f'{what} has "{found[0]}" {beside}; give it as "content"')
    message = {**turn, "role": ROLES.get(str(turn["role"]), turn["role"])}
    # "function_call" is also OpenAI's name for a call, before there were several.
    calls = [message.pop(name) for name in ("tool_calls", "function_call") if message.get(name)]
    if turn["role"] in CALLERS:
        calls.append(message.pop("content", None))
    if len(calls) > 1:
        raise UserError(f"{what} has calls under two names; keep one")
    if calls:
        [found] = [parsed(each, f"calls of {what}") for each in calls]
        message["tool_calls"] = [found] if isinstance(found, dict) else found
    return message


def _from_lists(row: dict) -> dict:
    """Makes a chat of a prompt and a completion that are lists of messages. Answers in the prompt
    are no targets."""
    if not isinstance(row.get("prompt"), list):
        raise UserError('needs a list of messages as "prompt", where "completion" is one')
    prompt, completion = (_messages(row[name], f'"{name}"') for name in ("prompt", "completion"))
    prompt = [
        {**message, "masked": True} if message["role"] == "assistant" else message
        for message in prompt
    ]
    return {"messages": prompt + completion, "tools": row.get("tools")}


def _from_pair(row: dict) -> dict:
    """Makes a prompt and a completion; with a system message a chat, too, as of Orca."""
    question, answer = next(pair for pair in PAIRS if {*pair} <= row.keys())
    for name in row.keys() - {question, answer, "system"}:
        if row[name]:
            cure = "write it into the question, or remove it"
            if name in SHOWN_WITH:
                cure += f" by --columns prompt={question},completion={answer}"
            if name in ("history", "input"):
                cure += f"; --columns instruction={question},output={answer} reads it"
            raise UserError(
                f'has "{name}" beside "{question}" and "{answer}", where it would be ignored; '
                f"{cure}"
            )
    if not isinstance(row[question], str) or not isinstance(row[answer], str):
        raise UserError(f'needs strings "{question}" and "{answer}"')
    if (system := row.get("system")) is None:
        return {"prompt": row[question], "completion": row[answer]}
    if not isinstance(system, str):
        raise UserError('needs a string "system", if it has one')
    messages = [
        {"role": "user", "content": row[question]},
        {"role": "assistant", "content": row[answer]},
    ]
    return {
        "messages": _system(row) + messages,
        "prompt": f"{system}\n\n{row[question]}" if system else row[question],
        "completion": row[answer],
    }


def _from_alpaca(row: dict) -> dict:
    instruction, given, output = row["instruction"], row.get("input") or "", row.get("output", 0)
    if isinstance(history := row.get("history"), str) and history.lstrip().startswith(
        "["
    ):  # of a table
        row = row | {"history": parsed(history, '"history"')}
    if output is None:
        raise NothingToLearn("rows without text")
    if not all(
        isinstance(text, str) for text in (instruction, given, output, row.get("system") or "")
    ):
        raise UserError(
            'needs strings "instruction" and "output", and "input" and "system" if it has them'
        )
    history = row.get("history") or []
    pairs = (
        history
        if isinstance(history, list) and all(isinstance(turn, list) for turn in history)
        else [()]
    )
    if any(len(turn) != 2 or not all(isinstance(text, str) for text in turn) for turn in pairs):
        raise UserError(
            'has a "history" that is not a list of pairs, each of an instruction and an output'
        )
    system = _system(row)
    question = f"{instruction}\n{given}" if given.strip() else instruction
    turns = [*history, (question, output)]
    roles = ("user", "assistant")
    messages = system + [
        {"role": role, "content": text} for turn in turns for role, text in zip(roles, turn)
    ]
    if history:  # Alpaca's text has no place for it
        return {"messages": messages}
    further, shown = (FURTHER, f"### Input:\n{given}\n\n") if given.strip() else ("", "")
    prompt = ALPACA.format(further=further, instruction=instruction, input=shown)
    return {
        "messages": messages,
        "prompt": "".join(f"{message['content']}\n\n" for message in system) + prompt,
        "completion": output,
    }


def _system(row: dict) -> list[dict]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


ANSWERS = frozenset(
    ("completion", "output", "chosen")
)  # fields of forms, and of pairs, that are answers
VARIABLES = "chat_template_kwargs"  # a row's variables of the chat template
PAIRS = (("prompt", "response"), ("query", "response"), ("question", "answer"))
SHOWN_WITH = frozenset(("context", "choices", "options"))  # parts of a question that no form has
LEFT_OUT_BY_NAMING = (
    ", or give --columns prompt=NAME,completion=NAME (pairs: chosen=NAME), with this row's names, "
    "to leave it out"
)
NOT_LEFT_OUT = (
    "input",
    "system",
    "history",
)  # parts of a question that --columns does not leave out
BESIDE = (
    *sorted(SHOWN_WITH),
    "input",
    "system",
    "history",
    "response",
)  # parts of a question or an answer
FORMS = (
    Form("messages", "messages", ("tools", VARIABLES), object, _from_turns),
    Form("ShareGPT", "conversations", ("system", "tools", VARIABLES), object, _from_turns),
    Form("prompt and completion", "completion", ("prompt", "tools", VARIABLES), list, _from_lists),
    Form("prompt and completion", "completion", ("prompt",), object, dict),
    Form("Alpaca", "instruction", ("input", "output", "system", "history"), object, _from_alpaca),
    Form("text", "text", (), object, dict),
    *(
        Form(f"{asked} and {said}", said, (asked, *BESIDE), object, _from_pair, needs=asked)
        for asked, said in PAIRS
    ),
)
# Names of questions and answers in data sets, of which --columns is told.
ASKED = ("prompt", "question", "query", "instruction", "problem", "input")
ANSWERED = ("completion", "response", "answer", "output", "solution", "generated_solution")
OF_FORMS = frozenset(name for form in FORMS for name in (form.decides, *form.takes))
COLUMNS = frozenset(
    name for form in FORMS if not form.needs for name in (form.decides, *form.takes)
) - {VARIABLES}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Parts of a chat or of a question that no form has. Beside a text they may be anything.
UNREAD = {"functions", "system_prompt", "system_message", VARIABLES, "documents", *MEDIA}
SYSTEMS = ("system_prompt", "system_message")
CLASHING = COLUMNS - {
    "input",
    "output",
    "history",
}  # words that fields of other meanings often have
# Fields of preference rows, in which two answers are compared, or steps or answers are judged:
# TRL's, OpenAI's, ms-swift's and LLaMA-Factory's. Any of the sets tells such a row.
EITHER = "completion=chosen (or messages=chosen, for whole chats)"
# Values of --columns that may train on chosen answers, and as they are named.
OF_CHOSEN = {"completion=chosen": EITHER, "messages=chosen": EITHER} | {
    columns: columns
    for columns in (
        "output=chosen", "prompt=question,completion=chosen", "instruction=question,output=chosen",
        "prompt=query,completion=chosen", "instruction=query,output=chosen",
    )
}  # fmt: skip
PREFERENCES = (
    frozenset(("chosen", "rejected")), frozenset(("preferred_output", "non_preferred_output")),
    frozenset(("rejected_response",)), frozenset(("rejected_messages",)), frozenset(("kto_tag",)),
    frozenset(("completions", "labels")),
)  # fmt: skip
OF_ROLLOUTS = frozenset((
    "completion_ids", "token_ids", "response_ids", "old_logprobs", "old_log_probs", "advantage",
    "advantages",
))  # fmt: skip
FIELDS = OF_FORMS.union(
    FLAGS, MASKS, UNREAD, {"label"}, *PREFERENCES
)  # all that decide what a row means
KNOWN = (
    '"text"; "prompt" and "completion"; "messages"; "conversations" (ShareGPT); "instruction" and '
    '"output" (Alpaca); '
    '"question" and "answer"'
)
