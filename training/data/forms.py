"""Forms of a row, told by its fields: messages, ShareGPT, Alpaca, prompts with completions, text.

Rows that prefer one answer to another are refused by name: an objective reads them.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection
from typing import NamedTuple, NoReturn

from training.data.masks import FLAGS, MASKS, NothingToLearn, refuse_masked
from training.data.unread import EMPTY as EMPTY_TEXTS
from training.data.unread import words
from training.host.errors import UserError

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLERS = ("function_call", "tool_call")  # roles whose content is JSON of a call, or of several
SHAREGPT = {"from": "role", "value": "content"}
EMPTY = (*EMPTY_TEXTS, False)  # values of a row's fields that say nothing
# Fields of a message whose words stand for its content elsewhere, and are not read as such.
CONTENTS = ("parts", "value", "text", "message", "output", "response", "refusal")
ALPACA = (
    "Below is an instruction that describes a task{further}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
FURTHER = ", paired with an input that provides further context"
CHATS = ("prompt", "completion", "chosen", "rejected")  # fields of texts, or of lists of messages
# Fields of texts alone.
PLAIN = ("text", "instruction", "output", "query", "question", "response", "answer")
OTHER_TEXTS = ("input", "system")  # texts beside PLAIN, in a row of a .csv file
LISTS_OR_TEXTS = ("prompts", "responses", "rejected_response")
OBJECTS = re.compile(r"\s*\[\s*\{")  # the beginning of a list of objects as a text, and of messages
MESSAGES = re.compile(OBJECTS.pattern + r"""\s*['"](role|content|from|value)['"]\s*:""")


class Form(NamedTuple):
    """A form of rows: the first in FORMS whose field `decides` has a value of type `kind`."""

    name: str  # in the log: "1,234 rows of NAME"
    decides: str
    takes: tuple[str, ...]  # other fields of the form
    kind: type
    # Makes "messages" and "tools", "prompt" and "completion", or "text" of the form's fields.
    convert: Callable[[dict], dict]
    needs: str | None = None  # another field that a row of the form has

    def is_of(self, row: dict) -> bool:
        has_needed = not self.needs or row.get(self.needs) is not None
        value = row.get(self.decides)
        return value is not None and isinstance(value, self.kind) and has_needed

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.decides, *self.takes)


def recognise(row: object) -> tuple[Form, dict]:
    """Returns a row's form, and the row as "messages" and "tools", "prompt" and "completion", or
    "text".

    A row of Alpaca has both "messages" and "completion": it is a chat for a tokenizer with a chat
    template. A chat has "chat_template_kwargs", too, and as "beside" the row's fields that its form
    does not take.

    Raises:
        UserError: the row has no field that decides, or fields of two forms, or values that its
            form does not take.
        NothingToLearn: the row has no value in the field that decides, or says that it is not
            trained on.
    """
    if not isinstance(row, dict):
        raise UserError(
            f"is not an object but a {type(row).__name__}; known are objects with {KNOWN}"
        )
    _refuse_preferences(row)
    form = next((form for form in FORMS if form.is_of(row)), None)
    if form is None:
        _refuse_unknown(row)
    refuse_masked(row)
    if form.decides == "instruction":
        _refuse_without_output(row)
    fields = {name: row[name] for name in form.fields if name in row}
    sample = form.convert(fields)
    clashing = _clashing(form, row)
    beside = {}
    for name, value in row.items():
        if value is None or name in fields:
            continue
        if name in clashing:
            if value not in EMPTY and not _is_repeated(value, fields, sample):
                _refuse_clash(name, form, row, "messages" in sample)
        elif name not in FLAGS:
            beside[name] = value
    if "messages" in sample or "completion" in sample:
        sample = {**sample, "beside": beside, VARIABLES: fields.get(VARIABLES)}
    if sample.get("tools"):
        sample["tools"] = parsed(sample["tools"], '"tools"')
    return form, sample


def _clashing(form: Form, row: dict) -> frozenset[str]:
    """Returns names of fields that may say another thing than the form's fields."""
    if form.decides == "text":
        return CLASHING
    if form.decides in ("messages", "conversations"):
        return CLASHING.union(UNREAD)
    # An answer is one field, and another one may be meant.
    pairs = [pair.decides for pair in FORMS if pair.needs and pair.is_of(row)]
    return CLASHING.union(UNREAD, SHOWN_WITH, PARTS, pairs)


def _refuse_clash(name: str, form: Form, row: dict, is_chat: bool) -> NoReturn:
    is_left_out = name in SHOWN_WITH and not any(row.get(part) for part in NOT_LEFT_OUT)
    if name == "functions":
        cure = "give --columns tools=functions"
    elif name in SYSTEMS and "system" in form.takes and not row.get("system"):
        cure = f"give --columns system={name}"
    elif name in ("system", *SYSTEMS) and is_chat:
        cure = 'write it as the first message, of the role "system"'
    else:
        cure = f"remove one{LEFT_OUT_BY_NAMING if is_left_out else ''}"
    raise UserError(f'has "{name}" beside "{form.decides}", where it would be ignored; {cure}')


def _refuse_unknown(row: dict) -> NoReturn:
    """Refuses a row of no form, with the --columns that read it."""
    if any(form.decides in row and row[form.decides] is None for form in FORMS):
        raise NothingToLearn("rows without text")
    if not row.keys().isdisjoint(OF_ROLLOUTS):
        raise UserError("is a rollout, of what a model wrote: give an --objective such as grpo")
    names = []
    for name, value in [*row.items()][:20]:
        names.append(f'"{str(name)[:30]}"{" (null)" if value is None else ""}')
    raise UserError(
        f"has the fields {', '.join(names) or 'none'}; known are {KNOWN}; {_cure_of_names(row)}"
    )


def is_row(row: object) -> bool:
    """Whether a value of a .json file is a row of data, in order or not. Settings are none."""
    if not isinstance(row, dict):
        return False
    if any(names <= row.keys() for names in PREFERENCES):
        return True
    return any(form.decides in row and (not form.needs or form.needs in row) for form in FORMS)


def parse_columns(text: str | None, fields: Collection[str] = ()) -> dict[str, str]:
    """Returns names of fields that forms know, by names in the data: {"q": "prompt"} of "prompt=q".

    Args:
        fields: more fields that may be named: an objective's.

    Raises UserError: the text is no such list, or names a field twice, or one that no form has.
    """
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    columns = {theirs.strip(): ours.strip() for ours, _, theirs in pairs}
    known = COLUMNS.union(fields)
    is_once = len(columns) == len({*columns.values()}) == len(pairs)
    if not is_once or "" in columns or not known.issuperset(columns.values()):
        raise UserError(
            "columns must name each field once, as prompt=question,completion=answer: got "
            f"{str(text)[:50]!r}; before each = stands one of {', '.join(sorted(known))}"
        )
    return columns


def columns_of(form: Form) -> str:
    """Returns --columns that read a row of a form, and nothing beside it.

    "prompt=query,completion=response" reads rows of "query" and "response".
    """
    if form.decides == "instruction":
        return "output=output"
    return f"prompt={form.needs or 'prompt'},completion={form.decides}"


def rename(row: object, columns: dict[str, str]) -> object:
    """Returns a row whose fields have the names that forms know.

    If `columns` names an answer, fields that a question is shown with (`SHOWN_WITH`) are left out.

    Args:
        columns: names that forms know, by names in the data, as `parse_columns` returns them.
    """
    if not isinstance(row, dict) or columns.keys().isdisjoint(row):
        return row
    left_out = {*columns}
    if not {"completion", "chosen"}.isdisjoint(columns.values()):
        left_out.update(SHOWN_WITH)
    kept = {name: value for name, value in row.items() if name not in left_out}
    return kept | {ours: row[theirs] for theirs, ours in columns.items() if theirs in row}


def with_values(row: dict[str, str]) -> dict:
    """Returns a row of a .csv file, whose values are texts, with numbers, truths and lists.

    {"text": "5", "weight": "0.5", "label": "True", "history": ""} has the text "5", the weight 0.5,
    the label true, no history.
    """
    return {name: _value_of(name, text) for name, text in row.items()}


def _value_of(name: str, text: str):
    if name in (*CHATS, *PLAIN, *OTHER_TEXTS):
        return text
    if not text.strip():
        return None
    is_truth = text.strip() in ("True", "False", "TRUE", "FALSE")  # pandas', and Excel's
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text.lower() if is_truth else text)
        return value if name not in LISTS_OR_TEXTS or isinstance(value, list) else text
    return text


def with_chats(row: object) -> object:
    """Returns a row in which lists of messages are lists, where they were JSON, as in tables.

    Raises UserError for messages in a field of texts, and for messages that another program wrote.
    """
    if not isinstance(row, dict):
        return row
    chats = {}
    for name in (*CHATS, *PLAIN):
        chat = _chat_in(row.get(name), name)
        if chat is None:
            continue
        if name in PLAIN:
            cure = 'write them as "messages", with the question'
            if _has_answers(chat) and _is_read({**row, name: chat}, f"messages={name}"):
                cure = f"--columns messages={name} reads a whole chat"
            raise UserError(f'has messages as a text in "{name}"; {cure}')
        chats[name] = chat
    return row | chats


def _chat_in(text: object, name: str) -> list | None:
    """Returns the messages that a text has as JSON; None if it is anything else."""
    if not isinstance(text, str) or not OBJECTS.match(text):
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        if not MESSAGES.match(text):
            return None
        raise UserError(
            f'has messages in "{name}" that are no JSON, as of pandas; write them by json.dumps'
        ) from None
    fields = {"role", "content"}, {"role", "tool_calls"}, {*SHAREGPT}
    for value in values:
        if not isinstance(value, dict) or not any(names <= value.keys() for names in fields):
            return None
    return values


def _refuse_preferences(row: dict) -> None:
    """Refuses a row that says which answer is better, or whether its answer is good."""
    preferences = (
        names for names in PREFERENCES if all(row.get(name) is not None for name in names)
    )
    fields = next(preferences, None)
    if fields is None and isinstance(row.get("label"), bool) and row.get("text") is None:
        fields = frozenset(["label"])  # where a text has a label, that is its class
    if fields is None:
        return
    names = " and ".join(f'"{name}"' for name in sorted(fields))
    good_alone = f"rows of the good answers alone, without {names}"
    if fields <= {"label", "kto_tag"}:
        cure = f"give --objective kto; or {good_alone}"
    elif fields == {"completions", "labels"}:
        cure = f"no --objective reads it; give {good_alone}"
    elif fields != {"chosen", "rejected"}:
        cure = f"give an --objective such as dpo; or {good_alone}"
    else:
        cure = "give an --objective such as dpo"
        columns = next((columns for columns in OF_CHOSEN if _is_read(row, columns)), None)
        if columns in OF_CHOSEN[:2]:
            columns = "completion=chosen (or messages=chosen, for whole chats)"
        if columns:
            cure += f"; or --columns {columns} trains on the chosen answers alone"
    raise UserError(f"is a preference row, with {names}: {cure}")


def _cure_of_names(row: dict) -> str:
    """Returns the --columns that read a row with names of no form; what to write without them."""
    chats = [name for name, value in row.items() if _has_answers(value)]
    if len(chats) == 1 and _is_read(row, f"messages={chats[0]}"):
        return f"--columns messages={chats[0]} reads such chats"
    texts = {name.lower(): name for name, value in row.items() if isinstance(value, str) and value}
    question = next((texts[name] for name in QUESTIONS if name in texts), None)
    answer = next((texts[name] for name in ANSWERED if name in texts), None)
    if question and answer:
        system = next((f",system={name}" for name in SYSTEMS if name in row), "")
        shown = next((f",input={name}" for name in SHOWN_WITH if name in row), "")
        columns = f"prompt={question},completion={answer}"
        if system or shown:
            columns = f"instruction={question},output={answer}{system}{shown}"
        if _is_read(row, columns):
            return f"--columns {columns} reads such rows"
    lists = [value for value in row.values() if isinstance(value, list) and value]
    has_chats = any(isinstance(value[0], dict) for value in lists)
    if has_chats or any(row.get(name) for name in ("tools", "system", *SYSTEMS)):
        return 'no --columns reads such rows: write what they say as "messages"'
    return "--columns text=NAME gives others, or prompt=NAME,completion=NAME"


def _has_answers(value: object) -> bool:
    """Whether a value is a list of messages, of a user and of the assistant."""
    turns = [turn for turn in value if isinstance(turn, dict)] if isinstance(value, list) else []
    return {"user", "assistant"} <= {role_of(turn) for turn in turns}


def role_of(turn: dict) -> str:
    """Returns the role of a message in our words: "assistant" of "gpt"."""
    role = str(turn.get("role", turn.get("from")))
    return ROLES.get(role, role)


def _refuse_without_output(row: dict) -> None:
    """Refuses a row of Alpaca that has its answer under another name, as Dolly's "response"."""
    answer = next((name for name in ANSWERED if isinstance(row.get(name), str)), None)
    if answer and "output" not in row and isinstance(row["instruction"], str):
        shown = next((f",input={name}" for name in SHOWN_WITH if name in row), "")
        raise UserError(
            'needs strings "instruction" and "output"; --columns '
            f"output={answer}{'' if row.get('input') else shown} reads such rows"
        )


def _is_read(row: dict, columns: str) -> bool:
    """Whether --columns makes a form of a row."""
    try:
        names = parse_columns(columns)  # a field's name may have a comma
        form, sample = recognise(rename(row, names))
    except (UserError, NothingToLearn):
        return False
    if not {*names.values()}.intersection(form.fields):
        return False
    texts = [sample.get("prompt"), sample.get("completion")] if "completion" in sample else []
    return "messages" in sample or all(isinstance(text, str) for text in texts)


def _is_repeated(value: object, fields: dict, sample: dict) -> bool:
    """Whether a value repeats one text of the row, as a "prompt" beside "messages", or all."""
    parts = [*fields.values()]
    if "messages" in sample and "completion" not in sample:
        parts = [message.get("content") for message in sample["messages"]]
    texts = [part for part in parts if part and isinstance(part, str)]
    if not texts or not isinstance(value, str):
        return False
    return any(value in text for text in texts) or all(text in value for text in texts)


def parsed(value, what: str, kind: str = "a list of objects"):
    """Returns what a text of JSON says, and any other value as it is.

    A table holds objects of several kinds as JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        if MESSAGES.match(value):
            raise UserError(
                f"{what} has messages that are no JSON, as of pandas; write them by json.dumps"
            ) from None
        raise UserError(f"{what} must be {kind}, or JSON of one") from None


def _from_turns(row: dict) -> dict:
    name = "messages" if "messages" in row else "conversations"
    messages = _messages(row[name], f'"{name}"')
    return {"messages": system_of(row) + messages, "tools": row.get("tools")}


def _messages(turns, what: str) -> list[dict]:
    """Returns turns as messages: each has "role" and "content", and its calls as "tool_calls"."""
    turns = parsed(turns, what)
    if turns == []:
        raise NothingToLearn("chats without messages")
    if not isinstance(turns, list):
        raise UserError(f"{what} must be a list of objects, or JSON of one")
    return [_message(turn, f"message {i} of {what}") for i, turn in enumerate(turns, start=1)]


def _message(turn, what: str) -> dict:
    keys = turn.keys() if isinstance(turn, dict) else frozenset[str]()
    if SHAREGPT.keys() <= keys and keys.isdisjoint(SHAREGPT.values()):
        turn = {SHAREGPT.get(name, name): value for name, value in turn.items()}
    elif "role" not in keys:
        raise UserError(
            f'{what} must be an object with "role" and "content", or "from" and "value"'
        )
    content = turn.get("content")
    for name in CONTENTS:
        if turn.get(name) and turn[name] != content:
            beside = "and no content: it would be empty"
            if content:
                beside = "beside its content, where it would be ignored"
            raise UserError(f'{what} has "{name}" {beside}; give it as "content"')
    message = {**turn, "role": ROLES.get(str(turn["role"]), turn["role"])}
    # "function_call" is also OpenAI's name for a call, before there were several.
    calls = [message.pop(name) for name in ("tool_calls", "function_call") if message.get(name)]
    if turn["role"] in CALLERS:
        calls.append(message.pop("content", None))
    if len(calls) > 1:
        raise UserError(f"{what} has calls under two names; keep one")
    for call in calls:
        call = parsed(call, f"calls of {what}")
        message["tool_calls"] = [call] if isinstance(call, dict) else call
    return message


def _from_lists(row: dict) -> dict:
    """Makes a chat of a prompt and a completion that are lists of messages.

    Answers in the prompt are no targets.
    """
    if not isinstance(row.get("prompt"), list):
        raise UserError('needs a list of messages as "prompt", where "completion" is one')
    messages = _messages(row["prompt"], '"prompt"')
    for message in messages:
        if message["role"] == "assistant":
            message["masked"] = True
    messages += _messages(row["completion"], '"completion"')
    return {"messages": messages, "tools": row.get("tools")}


def _from_pair(row: dict) -> dict:
    """Makes a prompt and a completion; with a system message a chat, too, as of Orca."""
    question, answer = next(pair for pair in PAIRS if {*pair} <= row.keys())
    for name, value in row.items():
        if name in (question, answer, "system") or not value:
            continue
        cure = "write it into the question, or remove it"
        if name in SHOWN_WITH:
            cure += f" by --columns prompt={question},completion={answer}"
        if name in ("history", "input"):
            cure += f"; --columns instruction={question},output={answer} reads it"
        raise UserError(
            f'has "{name}" beside "{question}" and "{answer}", where it would be ignored; {cure}'
        )
    prompt, completion, system = row[question], row[answer], row.get("system")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise UserError(f'needs strings "{question}" and "{answer}"')
    if system is None:
        return {"prompt": prompt, "completion": completion}
    if not isinstance(system, str):
        raise UserError('needs a string "system", if it has one')
    messages = [*chat_of_question(row, question), message_of("assistant", completion)]
    prompt = f"{system}\n\n{prompt}" if system else prompt
    return {"messages": messages, "prompt": prompt, "completion": completion}


def _from_alpaca(row: dict) -> dict:
    instruction, output = row["instruction"], row.get("output", 0)
    shown, system = row.get("input") or "", row.get("system") or ""
    if output is None:
        raise NothingToLearn("rows without text")
    if not all(isinstance(text, str) for text in (instruction, shown, output, system)):
        raise UserError(
            'needs strings "instruction" and "output", and "input" and "system" if it has them'
        )
    messages = [*chat_of_question(row, "instruction"), message_of("assistant", output)]
    if row.get("history"):  # Alpaca's text has no place for it
        return {"messages": messages}
    has_input = bool(shown.strip())
    prompt = ALPACA.format(
        further=FURTHER if has_input else "",
        instruction=instruction,
        input=f"### Input:\n{shown}\n\n" if has_input else "",
    )
    prompt = f"{system}\n\n{prompt}" if system else prompt
    return {"messages": messages, "prompt": prompt, "completion": output}


def chat_of_question(row: dict, question: str) -> list[dict]:
    """Returns a row's question as messages, behind its system message and its history."""
    shown = row.get("input") or ""
    text = f"{row[question]}\n{shown}" if shown.strip() else row[question]
    return [*system_of(row), *_history_of(row), message_of("user", text)]


def _history_of(row: dict) -> list[dict]:
    """Returns earlier questions and answers, which are pairs, as messages."""
    history = row.get("history") or []
    if isinstance(history, str) and history.lstrip().startswith("["):  # of a table
        history = parsed(history, '"history"')
    messages: list[dict] = []
    for pair in history if isinstance(history, list) else [history]:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise UserError(
                'has a "history" that is not a list of pairs, each of an instruction and an output'
            )
        messages += map(message_of, ("user", "assistant"), pair)
    return messages


def message_of(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def system_of(row: dict) -> list[dict]:
    """Returns a row's system message, in a list; [] if it has none."""
    return [message_of("system", row["system"])] if row.get("system") else []


ANSWERS = frozenset(("completion", "output", "chosen"))  # fields that are answers
VARIABLES = "chat_template_kwargs"  # a row's variables of the chat template
PAIRS = (("prompt", "response"), ("query", "response"), ("question", "answer"))
SHOWN_WITH = ("choices", "context", "options")  # parts of a question that no form has
LEFT_OUT_BY_NAMING = (
    ", or give --columns prompt=NAME,completion=NAME (pairs: chosen=NAME), with this row's names, "
    "to leave it out"
)
NOT_LEFT_OUT = ("input", "system", "history")  # parts of a question that --columns keeps
PARTS = ("input", "history", "output", "response")  # of a question or an answer
BESIDE = (*SHOWN_WITH, *NOT_LEFT_OUT, "response")
FORMS = (
    Form("messages", "messages", ("tools", VARIABLES), object, _from_turns),
    Form("ShareGPT", "conversations", ("system", "tools", VARIABLES), object, _from_turns),
    Form("prompt and completion", "completion", ("prompt", "tools", VARIABLES), list, _from_lists),
    Form("prompt and completion", "completion", ("prompt",), object, dict),
    Form("Alpaca", "instruction", ("input", "output", "system", "history"), object, _from_alpaca),
    Form("text", "text", (), object, dict),
    *(
        Form(f"{question} and {answer}", answer, (question, *BESIDE), object, _from_pair, question)
        for question, answer in PAIRS
    ),
)
# Names of questions and answers in data sets, of which --columns is told.
QUESTIONS = ("prompt", "question", "query", "instruction", "problem", "input")
ANSWERED = ("completion", "response", "answer", "output", "solution", "generated_solution")
COLUMNS = frozenset(name for form in FORMS if not form.needs for name in form.fields) - {VARIABLES}
CLASHING = COLUMNS - {"input", "output", "history"}  # names that fields of other meanings have
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
SYSTEMS = ("system_prompt", "system_message")
# Parts of a chat or of a question that no form has. Beside a text they may be anything.
UNREAD = frozenset(("functions", VARIABLES, "documents", *SYSTEMS, *MEDIA))
# Values of --columns that may train on chosen answers.
OF_CHOSEN = (
    "completion=chosen",
    "messages=chosen",
    "output=chosen",
    "prompt=question,completion=chosen",
    "instruction=question,output=chosen",
    "prompt=query,completion=chosen",
    "instruction=query,output=chosen",
)
# Fields of preference rows, in which two answers are compared, or steps or answers are judged:
# TRL's, OpenAI's, ms-swift's and LLaMA-Factory's. Any of the sets tells such a row.
PREFERENCES = (
    frozenset(("chosen", "rejected")),
    frozenset(("preferred_output", "non_preferred_output")),
    frozenset(("rejected_response",)),
    frozenset(("rejected_messages",)),
    frozenset(("kto_tag",)),
    frozenset(("completions", "labels")),
)
OF_ROLLOUTS = words("""
    completion_ids token_ids response_ids old_logprobs old_log_probs advantage advantages
    """)
# All fields that decide what a row means.
FIELDS = frozenset(name for form in FORMS for name in form.fields).union(
    FLAGS, MASKS, UNREAD, {"label"}, *PREFERENCES
)
KNOWN = (
    '"text"; "prompt" and "completion"; "messages"; "conversations" (ShareGPT); "instruction" and '
    '"output" (Alpaca); "question" and "answer"'
)
