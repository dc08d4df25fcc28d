"""Rows of data that objectives read, with the names that TRL has for their fields.

Pairs have "chosen" and "rejected", and a "prompt" unless they are whole chats. Labelled rows have
"prompt", "completion" and "label", true of a desirable answer. Weighted rows are rows of forms.py
with "weight", a number. rollout_rows.py has rollouts, and dialects.py the names that others give to
these fields.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from training.data.forms import EMPTY, message_of, role_of
from training.data.masks import NothingToLearn
from training.data.sources import Document, RowReader
from training.host.errors import UserError, as_json
from training.objectives.dialects import (
    QUESTIONS,
    answer_field,
    as_answer,
    as_pair,
    compare_scores,
    question_of,
    with_label,
)
from training.objectives.sharing import (
    AnswerReader,
    Encode,
    beside_answer_of,
    ended,
    hash_of_prompt,
    have_one_prompt,
    needs,
    prompt_of,
    share,
    with_answer,
    without_nulls,
)

logger = logging.getLogger(__name__)
# Fields of several answers to one prompt.
SEVERAL = ("answers", "completions", "responses", "generations", "outputs", "output")
JUDGEMENTS = ("rationale", "rationales", "critique")  # why one answer of a pair is better
ONE_PROMPT = "kto needs rows of two prompts: it asks for a prompt with an answer to another"


class Pairs(AnswerReader):
    """Rows of a chosen and a rejected answer, whose columns "answer" are 0 and 1."""

    fields: ClassVar[frozenset[str]] = frozenset(("prompt", "chosen", "rejected", "tools"))

    def __call__(self, row: object, encode: Encode) -> tuple[str, Document]:
        row = as_pair(needs(row))
        several = next((name for name in SEVERAL if isinstance(row.get(name), list)), None)
        cure = f'; or write a row for each pair of "{several}"' if several else ""
        row = needs(row, "chosen", "rejected", cure=cure)
        judged = [name for name in JUDGEMENTS if row.get(name) not in EMPTY]
        row = {name: value for name, value in row.items() if name not in JUDGEMENTS}
        answers = [row["chosen"], row["rejected"]]
        if answer_field(row) == "completion":
            prompt, *answers = _cut(row.get("prompt"), *answers)
            row = row | {"prompt": prompt}
        chosen, rejected = (self._answer(row, answer, encode) for answer in answers)
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise NothingToLearn("pairs of equal answers")
        shared = max(0, equal_tokens(prompt_of(chosen), prompt_of(rejected)) - 1)
        pair = replace(share([chosen, rejected], shared), prompt=hash_of_prompt(question_of(row)))
        unread = f" whose {' and '.join(judged)} is not read" if judged else ""
        return f"pairs{compare_scores(row)}{unread}", pair

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        return "rejected" if columns["answer"][0] else "chosen"


def equal_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Returns how many tokens two texts begin with that are the same."""
    length = min(len(first), len(second))
    return int(np.append(first[:length] == second[:length], False).argmin())


def _cut(prompt, chosen, rejected) -> tuple:
    """Returns the prompt and both answers of a pair; both chats may begin with the prompt."""
    are_lists = isinstance(chosen, list) and isinstance(rejected, list)
    if isinstance(prompt, str) and are_lists and all(map(_is_answer_alone, (chosen, rejected))):
        return [message_of("user", prompt)], chosen, rejected
    if prompt is not None and not (are_lists and isinstance(prompt, str)):
        return prompt, chosen, rejected
    if not are_lists:
        raise UserError(
            'needs a "prompt" beside "chosen" and "rejected", unless these are lists of messages; '
            "--columns prompt=NAME renames, or write there what both texts begin with"
        )
    both = [*zip(without_nulls(chosen), without_nulls(rejected))]
    differing = (i for i, (first, second) in enumerate(both) if first != second)
    length = next(differing, len(both) - 1)  # each has an answer
    if length < 1:
        has = '"chosen" and "rejected" have no message in common to be the prompt'
        raise UserError(f'{has}; give it as "prompt"')
    shared = chosen[:length]
    if prompt and not any(isinstance(m, dict) and m.get("content") == prompt for m in shared):
        has = 'has a "prompt" with which no message before both answers agrees'
        raise UserError(f"{has}; give it as messages")
    return shared, chosen[length:], rejected[length:]


def _is_answer_alone(chat: list) -> bool:
    """Whether a chat is one message of the assistant."""
    return len(chat) == 1 and isinstance(chat[0], dict) and role_of(chat[0]) == "assistant"


class Labelled(AnswerReader):
    """Rows of an answer and its label. Each becomes a pair with an answer to the prompt before.

    Rows of the first prompt get an answer to the last one, and come last. The column "answer" is as
    in pairs, "label" is 1 or 0.
    """

    fields: ClassVar[frozenset[str]] = frozenset(("prompt", "completion", "label", "tools"))

    def __init__(self, eos_id: int, context_length: int, may_lack: bool = False):
        """Keeps rows of one prompt alone with `may_lack`, as rows that are only looked at."""
        super().__init__(eos_id, context_length)
        self._may_lack = may_lack

    def __call__(self, row: object, encode: Encode) -> tuple[str, Document]:
        row = needs(row)
        if {"completions", "labels"} <= row.keys():
            raise UserError(
                'judges the steps of an answer ("completions"), which no --objective reads'
            )
        row = as_answer(with_label(row), tuple(QUESTIONS))
        question = ["prompt"] if answer_field(row) == "completion" else []
        row = needs(row, *question, "completion", "label")
        if row["label"] not in (0, 1):
            raise UserError(f'"label" must be true or false, got {as_json(row["label"])}')
        answer = self._answer(row, row["completion"], encode)
        answer.columns["label"] = np.full(len(answer.tokens), row["label"], np.float32)
        return "labelled answers", replace(answer, prompt=hash_of_prompt(question_of(row)))

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        if columns["answer"][0]:
            return "answer to another prompt, for the KL"
        return "desirable" if columns["label"][0] else "undesirable"

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        return super().join(self._beside_answers(documents))

    def _beside_answers(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields documents beside the answer of the last document that has another prompt."""
        first_prompt, last, unlike = list[Document](), None, None
        for row in documents:
            if last is not None and not have_one_prompt(row, last):
                unlike = last
            last = row
            if unlike is None:
                first_prompt.append(row)
            else:
                yield beside_answer_of(row, unlike)
        if last is None:
            return
        if unlike is None:
            if not self._may_lack:
                raise UserError(ONE_PROMPT)
            logger.warning("data: %s", ONE_PROMPT)
            yield from first_prompt
            return
        for row in first_prompt:
            yield beside_answer_of(row, unlike if have_one_prompt(row, last) else last)


class Weighted(RowReader):
    """Rows of forms.py with a "weight", which multiplies the loss of their targets; 1 if none."""

    fields: ClassVar[frozenset[str]] = frozenset(("weight",))

    def __init__(self, eos_id: int):
        self._eos_id = eos_id

    def __call__(self, row: object, encode: Encode) -> tuple[str, Document]:
        row = needs(row)
        has_weight = row.get("weight") is not None
        weight = number_in(row["weight"], "weight") if has_weight else 1.0
        sample = {name: value for name, value in row.items() if name != "weight"}
        document = with_answer(ended(encode(sample), self._eos_id))
        document.columns["weight"] = np.full(len(document.tokens), weight, np.float32)
        return "weighted texts" if has_weight else "texts", document

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        return f"weight {columns['weight'][0]:g}"


def number_in(value, name: str) -> float:
    """Returns a field's number. Raises UserError for other values, and above 1e9."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= 1e9:  # nor NaN
        raise UserError(f'"{name}" must be a number within 1e9 of 0, got {as_json(value)}')
    return float(value)
