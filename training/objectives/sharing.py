"""Documents of several answers to one prompt, whose tokens stand once.

A document is a prompt, then its answers. Each answer begins with the prompt's last token, which
predicts its next one, see kernels/attention/prompts.py. The column "answer" is `PROMPT` in the
prompt, and changes from each answer to the next.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from training.data.forms import EMPTY, SHOWN_WITH, parsed
from training.data.sources import Document, RowReader
from training.data.tokens import PROMPT
from training.host.errors import UserError
from training.objectives.dialects import CHATS, NAMES, answer_field

Encode = Callable[[dict], Document]


class AnswerReader(RowReader):
    """Reads rows of answers, and joins the rows of one prompt, wherever they stand.

    A prompt and its answers are at most `context_length` tokens, unless one row is longer.
    """

    foreign: ClassVar[frozenset[str]] = NAMES

    def __init__(self, eos_id: int, context_length: int):
        self._eos_id, self._context_length = eos_id, context_length

    def _answer(self, row: dict, completion, encode: Encode) -> Document:
        """Returns the document of one answer of a row, with the column "answer"."""
        document = ended(encode(sample_of(row, self.fields, completion)), self._eos_id)
        return with_answer(document)

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields documents in the order of their first rows.

        There are two at least if there are two rows, for one to be held out.
        """
        rows_by_prompt: dict[bytes, list[Document]] = {}
        for row in documents:
            prompt = row.tokens[: _shareable(row) + 1].tobytes()
            rows_by_prompt.setdefault(prompt, []).append(row)
        groups: list[list[Document]] = []
        for rows in rows_by_prompt.values():
            shared, free = _shareable(rows[0]), 0
            for row in rows:
                size = len(row.tokens) - shared
                if shared == 0 or size > free:
                    groups.append([])
                    free = self._context_length - shared
                free -= size
                groups[-1].append(row)
        if len(groups) == 1 and len(groups[0]) > 1:
            [rows] = groups
            groups = [rows[:-1], rows[-1:]]
        for rows in groups:
            yield share(rows, _shareable(rows[0]))


def with_answer(document: Document) -> Document:
    """Returns a document whose column "answer" is 0 throughout: it has one answer."""
    answer = np.zeros(len(document.tokens), np.float32)
    return replace(document, columns={**document.columns, "answer": answer})


def sample_of(row: dict, fields: frozenset[str], completion) -> dict:
    """Returns a row with the prompt and one answer, which `forms.recognise` reads.

    Fields that are not in `fields` stay, so that `recognise` refuses what it does not read. Chats
    beside a prompt are left out: they repeat it, as "messages" in UltraFeedback.

    Raises UserError for a row whose answer cannot be told from its prompt, or that has a field
    which a question is shown with.
    """
    prompt, field = row.get("prompt"), answer_field(row)
    _refuse_other_chats(row, fields)
    if isinstance(prompt, list) and isinstance(completion, list):
        questions, answers = without_nulls(prompt), without_nulls(completion)
        repeats_prompt = answers[: len(questions)] == questions
        if repeats_prompt:
            completion = completion[len(questions) :]
        elif questions and answers[:1] == questions[-1:]:
            raise UserError(
                'has an answer that begins with the last message of its "prompt"; give one of both'
            )
    shown = [name for name in SHOWN_WITH if row.get(name) not in EMPTY]
    # A completion is left to `recognise`: of other answers it would name columns the row lacks.
    if shown and field != "completion":
        raise UserError(
            f'has "{shown[0]}", which is not read; write it into the question, or remove it'
        )
    left_out = fields.union(CHATS) - {"prompt", "tools"}
    kept = {name: value for name, value in row.items() if name not in left_out}
    return kept | {field: completion}


def _refuse_other_chats(row: dict, fields: frozenset[str]) -> None:
    """Refuses chats that have a message which neither prompt nor answers have."""
    for name in CHATS:
        turns = parsed(row.get(name), f'"{name}"')
        if not isinstance(turns, list):
            continue
        texts = json.dumps([row.get(name) for name in fields], default=str)
        for turn in turns:
            text = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
            if isinstance(text, str) and json.dumps(text.strip())[1:-1] not in texts:
                raise UserError(
                    f'has "{name}" with a message that neither prompt nor answers have; remove one '
                    "of both"
                )


def without_nulls(messages: list) -> list:
    """Returns messages without fields of null: tables have all fields in all messages."""
    return [
        {name: value for name, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def ended(document: Document, eos_id: int) -> Document:
    """Returns a document with an end of its own: uint32 tokens, the end-of-text id behind them.

    Its first token is masked: no token comes before it.
    """
    tokens, masked = document.tokens.astype(np.uint32), document.masked
    masked = np.zeros(len(tokens), bool) if masked is None else masked.copy()
    if not document.is_complete:
        tokens, masked = np.append(tokens, np.uint32(eos_id)), np.append(masked, False)
    masked[0] = True
    return replace(document, tokens=tokens, masked=masked, is_complete=True)


def hash_of_prompt(prompt) -> int | None:
    """Hashes a prompt, whatever the order of its messages' fields; None if it is empty."""
    prompt = without_nulls(prompt) if isinstance(prompt, list) else prompt
    return hash(json.dumps(prompt, sort_keys=True, default=str)) if prompt else None


def have_one_prompt(first: Document, second: Document) -> bool:
    """Whether two rows have the same prompt, or the same tokens before their first targets."""
    if first.prompt is not None and first.prompt == second.prompt:
        return True
    return np.array_equal(prompt_of(first), prompt_of(second))


def prompt_of(document: Document) -> np.ndarray:
    """Returns the tokens before a document's first target."""
    return document.tokens[: prompt_length(document)]


def prompt_length(document: Document) -> int:
    """Returns how many tokens stand before a document's first target."""
    assert document.masked is not None
    return int(document.masked.argmin())


def _shareable(row: Document) -> int:
    """Returns how many of a row's first tokens other answers can share: its prompt but one."""
    answer = row.columns["answer"]
    is_one = answer[0] == answer[-1]
    return max(0, prompt_length(row) - 1) if is_one else int((answer == PROMPT).sum())


def share(rows: Sequence[Document], shared: int) -> Document:
    """Returns documents as one, whose answers share their first `shared` tokens."""
    if len(rows) == 1:
        return rows[0]
    tokens = _joined([row.tokens for row in rows], shared)
    masked = _joined([row.masked for row in rows], shared)
    columns = {}
    for name in rows[0].columns:
        columns[name] = _joined([row.columns[name] for row in rows], shared)
    if columns["answer"].max() == 0:  # each row has one answer
        lengths = [shared, *(len(row.tokens) - shared for row in rows)]
        columns["answer"] = np.repeat(np.arange(PROMPT, len(rows), dtype=np.float32), lengths)
    return replace(rows[0], tokens=tokens, masked=masked, columns=columns)


def _joined(values: list, shared: int) -> np.ndarray:
    """Returns the first values' beginning, then what stands behind it in all of them."""
    return np.concatenate([values[0][:shared], *(value[shared:] for value in values)])


def beside_answer_of(row: Document, answered: Document) -> Document:
    """Returns a document with the answer of another one behind its own."""
    start, stop = prompt_length(row), prompt_length(answered)
    tokens = np.concatenate([row.tokens[:start], answered.tokens[stop:]])
    masked = np.concatenate([row.masked[:start], answered.masked[stop:]])  # type: ignore[index]
    columns = {name: np.full(len(tokens), column[0]) for name, column in row.columns.items()}
    second = replace(row, tokens=tokens, masked=masked, columns=columns)
    return share([row, second], max(0, start - 1))


def needs(row: object, *names: str, cure: str = "", theirs: dict[str, str] | None = None) -> dict:
    """Returns the row. Raises UserError if it is no object, or `names` lack a value.

    Args:
        theirs: the row's own names, by ours.
    """
    if not isinstance(row, dict):
        raise UserError(f"is not an object but a {type(row).__name__}")
    missing = [name for name in names if row.get(name) is None]
    if not missing:
        return row
    for name in missing:
        if name in row:
            raise UserError(
                f'needs "{name}" for this --objective, and has null there; give it a value, or '
                f"--columns {name}=NAME renames{cure}"
            )
    fields = ", ".join(f'"{str((theirs or {}).get(name, name))[:30]}"' for name in [*row][:20])
    lacks = f"needs {' and '.join(map(json.dumps, missing))} for this --objective"
    columns = ",".join(f"{name}=NAME" for name in missing)
    raise UserError(f"{lacks}; it has {fields or 'nothing'}; --columns {columns} renames{cure}")
