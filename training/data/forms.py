"""Forms of a row, told by its fields: messages, ShareGPT, Alpaca, prompts with completions, text."""

import json
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from training.host.errors import UserError

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
ALPACA = (
    "Below is an instruction that describes a task{further}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
FURTHER = ", paired with an input that provides further context"


# Fields of a message by which trainers say whether it is trained on, and the truth that says so: OpenAI's, axolotl's,
# ms-swift's, LLaMA-Factory's, slime's and torchtune's.
FLAGS = {
    "weight": True, "train": True, "training": True, "loss": True, "loss_scale": True, "loss_weight": True,
    "loss_mask": True, "step_loss_mask": True, "masked": False,
}  # fmt: skip
# Fields of a row that mask some of its tokens.
MASKS = {"mask", "completion_mask", "assistant_mask", "assistant_masks", "train_on_inputs", "train_on_input"}
NUMBERS = {"id", "index", "turn", "timestamp", "tool_call_id"}  # fields of a message that may be numbers
FLAG_WORDS = re.compile("(^|_)(loss|train|training|mask|masked|weight|weights)(_|$)", re.IGNORECASE)


class NothingToLearn(Exception):
    """A row is in order, but has nothing to learn. The message says what is counted, such as "blank lines"."""


class Form(NamedTuple):
    """A form of rows. The first in FORMS whose field `decides` has a value of type `kind` is a row's form."""

    name: str  # in the log: "1,234 rows of NAME"
    decides: str
    takes: tuple[str, ...]  # other fields of the form; fields of no form, such as an id, are ignored
    kind: type
    convert: Callable[[dict], dict]  # its fields to "messages" and "tools", "prompt" and "completion", or "text"


def recognise(row: object) -> tuple[Form, dict]:
    """Returns a row's form, and the row as "messages" and "tools", as "prompt" and "completion", or as "text".

    A row of Alpaca has both "messages" and "completion": it is a chat for a tokenizer with a chat template.

    Raises:
        UserError: the row has no field that decides, or fields of two forms, or values that its form does not take.
        NothingToLearn: the row says that it is not trained on.
    """
    if not isinstance(row, dict):
        raise UserError(f"is not an object but a {type(row).__name__}; known are objects with {KNOWN}")
    given = [name for name, value in row.items() if value is not None]
    form = next((f for f in FORMS if f.decides in given and isinstance(row[f.decides], f.kind)), None)
    if form is None:
        names = ", ".join(f'"{str(name)[:30]}"{" (null)" * (name not in given)}' for name in [*row][:20]) or "none"
        raise UserError(f"has the fields {names}; known are {KNOWN}")
    _refuse_masked(row)
    own = {name: row.get(name) for name in (form.decides, *form.takes)}
    made = form.convert(own)
    for name in CLASHING.intersection(given).difference(own):
        if row[name] and not _is_repeated(row[name], own, made):
            raise UserError(f'has "{name}" beside "{form.decides}", where it would be ignored; remove one')
    if isinstance(made.get("tools"), str):  # a table cannot hold tools of several kinds otherwise
        try:
            made = {**made, "tools": json.loads(made["tools"] or "null")}
        except (ValueError, RecursionError):
            raise UserError('"tools" must be a list of objects, or JSON of one') from None
    return form, made


def says_trained(fields: dict, what: str) -> bool | None:
    """Returns whether fields such as "weight" or "loss" say that `what` is trained on; None if it has none of them."""
    said = set()
    for name in FLAGS:
        if (value := fields.get(name)) is not None:
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise UserError(f'{what} has "{name}": {json.dumps(value)[:40]}; it must be true, false, 1 or 0')
            said.add(bool(value) == FLAGS[name])
    if len(said) > 1:
        raise UserError(f"{what} says that it is trained on, and that it is not: {', '.join(FLAGS)} must agree")
    return said.pop() if said else None


def refuse_unknown_flags(fields: dict, what: str, known: Collection[str]) -> None:
    """Refuses a field that may ask for another mask: its value is a number or a truth, or its name speaks of losses."""
    for name, value in fields.items():
        may_mask = isinstance(value, bool | int | float) or (value is not None and FLAG_WORDS.search(name))
        if may_mask and name not in known:
            raise UserError(
                f'{what} has "{name[:40]}": {json.dumps(value)[:40]}, which is not known here; remove it, or name it '
                f"as one of {', '.join(FLAGS)} if it says whether the message is trained on"
            )


def _refuse_masked(row: dict) -> None:
    """Raises UserError for a row that masks some of its tokens, and NothingToLearn for one that is not trained on."""
    if masks := [name for name in MASKS if row.get(name) is not None]:
        raise UserError(f'has "{min(masks)}", which is not obeyed; remove it')
    if says_trained(row, "the row") is False:
        raise NothingToLearn("rows that say they are not trained on")


def _is_repeated(value, own: dict, made: dict) -> bool:
    """Whether a field repeats one text of the row, as a "prompt" beside "messages", or all, as "text" beside Alpaca."""
    parts = [*own.values()]
    if isinstance(messages := made.get("messages"), list) and "completion" not in made:
        parts = [message.get("content") for message in messages if isinstance(message, dict)]
    texts = [part for part in parts if part and isinstance(part, str)]
    if not texts or not isinstance(value, str):
        return False
    return any(value in text for text in texts) or all(text in value for text in texts)


def _as_it_is(row: dict) -> dict:
    return row


def _from_sharegpt(row: dict) -> dict:
    messages = []
    for turn in row["conversations"] if isinstance(row["conversations"], list) else [None]:
        if isinstance(turn, dict) and {"from", "value"} <= turn.keys():
            rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
            messages.append({**rest, "role": ROLES.get(str(turn["from"]), turn["from"]), "content": turn["value"]})
        elif isinstance(turn, dict) and {"role", "content"} <= turn.keys():
            messages.append(turn)
        else:
            raise UserError('"conversations" must be a list of objects, each with "from" and "value", or as "messages"')
    return {"messages": _system(row) + messages, "tools": row.get("tools")}


def _from_lists(row: dict) -> dict:
    """Makes a chat of a prompt and a completion that are lists of messages. Answers in the prompt are no targets."""
    if not isinstance(row.get("prompt"), list):
        raise UserError('needs a list of messages as "prompt", where "completion" is one')
    is_answer = (isinstance(message, dict) and message.get("role") == "assistant" for message in row["prompt"])
    prompt = [{**message, "masked": True} if masked else message for message, masked in zip(row["prompt"], is_answer)]
    return {"messages": prompt + row["completion"], "tools": row.get("tools")}


def _from_alpaca(row: dict) -> dict:
    instruction, given, output = row["instruction"], row.get("input") or "", row.get("output")
    if not all(isinstance(text, str) for text in (instruction, given, output, row.get("system") or "")):
        raise UserError('needs strings "instruction" and "output", and "input" and "system" if it has them')
    if row.get("history"):
        raise UserError('has a "history", which is not read: give it and this turn as "messages"')
    system = _system(row)
    question = f"{instruction}\n{given}" if given.strip() else instruction
    pair = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    further, shown = (FURTHER, f"### Input:\n{given}\n\n") if given.strip() else ("", "")
    prompt = ALPACA.format(further=further, instruction=instruction, input=shown)
    return {
        "messages": system + pair,
        "prompt": "".join(f"{message['content']}\n\n" for message in system) + prompt,
        "completion": output,
    }


def _system(row: dict) -> list[dict]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


FORMS = (
    Form("messages", "messages", ("tools",), object, _as_it_is),
    Form("ShareGPT", "conversations", ("system", "tools"), object, _from_sharegpt),
    Form("prompt and completion", "completion", ("prompt", "tools"), list, _from_lists),
    Form("prompt and completion", "completion", ("prompt",), object, _as_it_is),
    Form("Alpaca", "instruction", ("input", "output", "system", "history"), object, _from_alpaca),
    Form("text", "text", (), object, _as_it_is),
)
OF_FORMS = frozenset(name for form in FORMS for name in (form.decides, *form.takes))
FIELDS = OF_FORMS.union(FLAGS, MASKS)  # all that decide what a row means
CLASHING = OF_FORMS - {"input", "output", "history"}  # words that fields of other meanings often have
KNOWN = '"text"; "prompt" and "completion"; "messages"; "conversations" (ShareGPT); "instruction" and "output" (Alpaca)'
