"""Rows of data that objectives read, with the names that TRL has for their fields.

Pairs have "chosen" and "rejected", and a "prompt" unless they are whole chats. Labelled rows have
"prompt", "completion" and "label", true of a desirable answer. Weighted rows are rows of forms.py
with "weight", a number. Rollouts have "prompt" and "completion", or "prompt_ids" and
"completion_ids" with an optional "completion_mask"; "advantage", a number or one per token, or
"reward" and an optional "group"; "old_logprobs" and, where asked for, "ref_logprobs", a number per
token of the completion. dialects.py has the names that others give to these fields.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from training.data.forms import EMPTY, MEDIA, ROLES, SHOWN_WITH, parsed
from training.data.masks import FLAG_WORDS, NothingToLearn, refuse_masked
from training.data.sources import Document, Encoded, RowReader
from training.data.tokens import PROMPT
from training.host.errors import UserError, as_json
from training.objectives.dialects import (
    CHATS,
    ENGINE,
    NAMES,
    POLICY,
    QUESTIONS,
    answer_field,
    as_answer,
    as_pair,
    compare_scores,
    of_sampled,
    question_of,
    rename_rollout,
    with_label,
    without_padding,
)

logger = logging.getLogger(__name__)

LARGEST_ID = 2**31 - 1
Row = tuple[str, Encoded, dict[str, np.ndarray], int | None]
LOGPROBS = ("old_logprobs", "ref_logprobs")
CURES = {  # of rows without numbers, by their columns
    "old": "; or give --old_logprobs, which training.logprobs makes",
    "written": "; or drop --truncation",
    "reference": "; or give --reference_logprobs, which training.logprobs makes",
}  # fmt: skip
LEAST_LOGPROB, MOST_LOGPROB = (
    -1000.0,
    0.01,
)  # engines write -9999 for minus infinity, and round above 0
BITS = {"0", "1", "0.0", "1.0", "True", "False"}  # values of masks, as texts
SEVERAL = (
    "answers",
    "completions",
    "responses",
    "generations",
    "outputs",
    "output",
)  # answers to one prompt
JUDGEMENTS = ("rationale", "rationales", "critique")  # why one answer of a pair is better
ONE_PROMPT = "kto needs rows of two prompts: it asks for a prompt with an answer to another"
SMALL = 1e-4  # beside the deviation of a group's rewards, as in TRL


class _Sharing(RowReader):
    """Rows of answers. Rows of one prompt, wherever they stand, become documents: prompt, answers,
    answers.

    A prompt and its answers are at most `context_length` tokens, unless one row is longer. Each
    answer begins with the prompt's last token, which predicts its next one, see
    kernels/attention/prompts.py. The column "answer" is `PROMPT` in the prompt, and changes from
    each answer to the next.
    """

    others: ClassVar[frozenset[str]] = NAMES

    def __init__(self, eos_id: int, context_length: int):
        self._eos_id, self._context_length = eos_id, context_length

    def _answer(self, row: dict, completion, encode: Callable[[dict], Encoded]) -> Document:
        tokens, masked = ended(encode(_sample(row, self.fields, completion)), self._eos_id)
        return Document(tokens, masked, True, columns={"answer": np.zeros(len(tokens), np.float32)})

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields documents in the order of their first rows. They are two at least, for one to be
        held out."""
        by_prompt, groups = dict[bytes, list[Document]](), list[tuple[list[Document], int]]()
        for row in documents:
            by_prompt.setdefault(row.tokens[: _shareable(row) + 1].tobytes(), []).append(row)
        for rows in by_prompt.values():
            shared, room = _shareable(rows[0]), 0
            for row in rows:
                if shared == 0 or len(row.tokens) - shared > room:
                    groups.append(([], shared))
                    room = self._context_length - shared
                room -= len(row.tokens) - shared
                groups[-1][0].append(row)
        if len(groups) == 1:
            rows, shared = groups.pop()
            groups = [(part, shared) for part in (rows[:-1], rows[-1:]) if part]
        for rows, shared in groups:
            yield _share(rows, shared)


class Pairs(_Sharing):
    """Rows of a chosen and a rejected answer: the column "answer" is 0 in the chosen ones, 1 in the
    rejected ones."""

    fields: ClassVar[frozenset[str]] = frozenset(("prompt", "chosen", "rejected", "tools"))

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        row = as_pair(_needs(row))
        several = next((name for name in SEVERAL if isinstance(row.get(name), list)), "")
        row = _needs(
            row,
            "chosen",
            "rejected",
            cure=f'; or write a row for each pair of "{several}"' * bool(several),
        )
        judged = [name for name in JUDGEMENTS if row.get(name) not in EMPTY]
        row = {name: value for name, value in row.items() if name not in JUDGEMENTS}
        prompt, *answers = row.get("prompt"), row["chosen"], row["rejected"]
        if answer_field(row) == "completion":
            prompt, *answers = _cut(prompt, *answers)
            row = row | {"prompt": prompt}
        chosen, rejected = (self._answer(row, each, encode) for each in answers)
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise NothingToLearn("pairs of equal answers")
        prompts = (
            chosen.tokens[: _prompt_length(chosen)],
            rejected.tokens[: _prompt_length(rejected)],
        )
        pair = _share([chosen, rejected], max(0, _equal_tokens(*prompts) - 1))
        form = f"pairs{compare_scores(row)}"
        form += f" whose {' and '.join(judged)} is not read" * bool(judged)
        return form, (pair.tokens, pair.masked, True), pair.columns, _hash(question_of(row))

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        return "rejected" if columns["answer"][0] else "chosen"


def _equal_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens two texts begin with that are the same."""
    length = min(len(one), len(other))
    return int(np.append(one[:length] == other[:length], False).argmin())


def _begin(sample: dict, tokens: np.ndarray, encode: Callable[[dict], Encoded]) -> int:
    """Returns where the answer of a sample begins, if with another's message; else the number of
    its tokens.

    Another content of that message leaves the tokens before it as they are.
    """
    first, *others = (
        sample["completion"] if isinstance(sample["completion"], list) else [{"role": "assistant"}]
    )
    role, name = (
        str(first.get("role", first.get("from"))),
        "content" if "content" in first else "value",
    )
    if ROLES.get(role, role) == "assistant":
        return len(tokens)
    content = "b" if str(first.get(name)).startswith("a") else "a"
    return _equal_tokens(
        tokens, encode(sample | {"completion": [first | {name: content}, *others]})[0]
    )


def _cut(prompt, chosen, rejected) -> tuple:
    """Returns the prompt and both answers of a pair, whose prompt may be what both chats begin
    with."""
    are_lists = isinstance(chosen, list) and isinstance(rejected, list)
    answers = [chosen, rejected] if are_lists else []
    if isinstance(prompt, str) and answers and all(map(_is_answer_alone, answers)):
        return [{"role": "user", "content": prompt}], chosen, rejected
    if prompt is None or (are_lists and isinstance(prompt, str)):
        shared, *answers = _shared_prompt(chosen, rejected)
        if prompt and all(
            not isinstance(each, dict) or each.get("content") != prompt for each in shared
        ):
            raise UserError(
                'has a "prompt" with which no message before both answers agrees; give it as '
                "messages"
            )
        return shared, *answers
    return prompt, chosen, rejected


def _is_answer_alone(chat: list) -> bool:
    """Whether a chat is one message of the assistant."""
    if len(chat) != 1 or not isinstance(chat[0], dict):
        return False
    role = str(chat[0].get("role", chat[0].get("from")))
    return ROLES.get(role, role) == "assistant"


def _sample(row: dict, fields: frozenset[str], completion) -> dict:
    """Returns a row of forms.py of the prompt, one answer, and all that no reader has in `fields`.

    So forms.py refuses what it would ignore. Chats beside a prompt repeat it, as "messages" in
    UltraFeedback.
    """
    left_out, prompt = fields.union(CHATS) - {"prompt", "tools"}, row.get("prompt")
    _refuse_more(row, fields)
    if isinstance(prompt, list) and isinstance(completion, list):
        own, theirs = _without_nulls(prompt), _without_nulls(completion)
        if theirs[: len(own)] == own:
            completion = completion[len(own) :]  # a whole chat
        elif own and theirs[:1] == own[-1:]:
            raise UserError(
                'has an answer that begins with the last message of its "prompt"; give one of both'
            )
    sample = {name: value for name, value in row.items() if name not in left_out}
    field = answer_field(row)
    shown = [name for name in sorted(SHOWN_WITH) if row.get(name) not in EMPTY]
    if shown and field != "completion":  # forms.py would name columns that the row lacks
        raise UserError(
            f'has "{shown[0]}", which is not read; write it into the question, or remove it'
        )
    return sample | {field: completion}


def _refuse_more(row: dict, fields: frozenset[str]) -> None:
    """Refuses chats beside a prompt and its answers that have another message, which would be
    ignored."""
    for name in CHATS:
        turns = parsed(row.get(name), f'"{name}"')
        chat = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
        texts = json.dumps([row.get(name) for name in fields] if chat else None, default=str)
        contents = [turn.get("content", turn.get("value")) for turn in chat]
        if any(
            isinstance(text, str) and json.dumps(text.strip())[1:-1] not in texts
            for text in contents
        ):
            raise UserError(
                f'has "{name}" with a message that neither prompt nor answers have; remove one of '
                "both"
            )


def _without_nulls(messages: list) -> list:
    """Returns messages without fields of null: tables have all fields in all messages of a
    column."""
    return [
        {name: value for name, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def _shared_prompt(chosen, rejected) -> tuple[list, list, list]:
    """Returns the messages that two chats begin with, and the others of each."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise UserError(
            'needs a "prompt" beside "chosen" and "rejected", unless these are lists of messages; '
            "--columns prompt=NAME renames, or write there what both texts begin with"
        )
    both = [*zip(_without_nulls(chosen), _without_nulls(rejected))]
    same = next(
        (i for i, pair in enumerate(both) if pair[0] != pair[1]), len(both) - 1
    )  # each has an answer
    if same < 1:
        raise UserError(
            '"chosen" and "rejected" have no message in common to be the prompt; give it as '
            '"prompt"'
        )
    return chosen[:same], chosen[same:], rejected[same:]


class Labelled(_Sharing):
    """Rows of an answer and its label. Each becomes a pair: the answer, and an answer to the prompt
    before.

    Rows of the first prompt get an answer to the last one, and come last. The column "answer" is as
    in pairs, "label" is 1 or 0.
    """

    fields: ClassVar[frozenset[str]] = frozenset(("prompt", "completion", "label", "tools"))

    def __init__(self, eos_id: int, context_length: int, may_lack: bool = False):
        """With `may_lack` rows of one prompt stay alone: they are only looked at."""
        super().__init__(eos_id, context_length)
        self._may_lack = may_lack

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        if isinstance(row, dict) and {"completions", "labels"} <= row.keys():
            raise UserError(
                'judges the steps of an answer ("completions"), which no --objective reads'
            )
        row = as_answer(with_label(_needs(row)), tuple(QUESTIONS))
        row = _needs(row, *["prompt"] * (answer_field(row) == "completion"), "completion", "label")
        if row["label"] not in (0, 1):
            raise UserError(f'"label" must be true or false, got {as_json(row["label"])}')
        answer = self._answer(row, row["completion"], encode)
        columns = answer.columns | {"label": answer.columns["answer"] + row["label"]}
        prompt = _hash(question_of(row))
        return "labelled answers", (answer.tokens, answer.masked, True), columns, prompt

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        if columns["answer"][0]:
            return "answer to another prompt, for the KL"
        return "desirable" if columns["label"][0] else "undesirable"

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        return super().join(self._beside_others(documents))

    def _beside_others(self, documents: Iterable[Document]) -> Iterator[Document]:
        first, last, other = list[Document](), None, None  # `other` has another prompt than `last`
        for row in documents:
            if last is not None and not _have_one_prompt(row, last):
                other = last
            last = row
            if other is None:
                first.append(row)
            else:
                yield beside_answer_of(row, other)
        if first and other is None and not self._may_lack:
            raise UserError(ONE_PROMPT)
        if first and other is None:
            logger.warning("data: %s", ONE_PROMPT)
        for row in first:
            if last is None or other is None:
                yield row
                continue
            yield beside_answer_of(row, other if _have_one_prompt(row, last) else last)


def beside_answer_of(row: Document, other: Document) -> Document:
    """Returns a document with the answer of another one behind its own."""
    prompt, theirs = _prompt_length(row), _prompt_length(other)
    tokens, masked = (
        np.concatenate([getattr(row, name)[:prompt], getattr(other, name)[theirs:]])
        for name in ("tokens", "masked")
    )
    columns = {name: np.full(len(tokens), column[0]) for name, column in row.columns.items()}
    return _share(
        [row, replace(row, tokens=tokens, masked=masked, columns=columns)], max(0, prompt - 1)
    )


class Weighted(RowReader):
    """Rows of forms.py with a "weight", which multiplies the loss of all their targets; 1 where
    there is none."""

    fields: ClassVar[frozenset[str]] = frozenset(("weight",))

    def __init__(self, eos_id: int):
        self._eos_id = eos_id

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        row = _needs(row)
        has_weight = row.get("weight") is not None
        weight = _number(row["weight"], "weight") if has_weight else 1.0
        tokens, masked = ended(
            encode({name: value for name, value in row.items() if name != "weight"}), self._eos_id
        )
        answer = np.zeros(len(tokens), np.float32)
        form = "weighted texts" if has_weight else "texts"
        return (
            form,
            (tokens, masked, True),
            {"answer": answer, "weight": answer + np.float32(weight)},
            None,
        )

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        return f"weight {columns['weight'][0]:g}"


class Rollouts(_Sharing):
    """Rows of recorded answers. Groups of rewards become advantages by `advantages`."""

    fields: ClassVar[frozenset[str]] = frozenset((
        "prompt", "completion", "prompt_ids", "completion_ids", "completion_mask", "advantage",
        "reward", "group",
        *LOGPROBS, "tools",
    ))  # fmt: skip

    def __init__(
        self, eos_id: int, columns: dict[str, str], context_length: int, may_lack: bool = False
    ):
        """Reads numbers of each token of the completions from fields, the keys of `columns`.

        With `may_lack` they are checked where a row has them, and given to no document.
        """
        super().__init__(eos_id, context_length)
        self._columns, self._may_lack = columns, may_lack
        # Number, and hash of the prompt, by the name of a group; by that hash where rows have no
        # group.
        self._groups = dict[object, tuple[int, int | None]]()
        self._groups_of_prompts = 0
        self._has_groups: bool | None = (
            None  # whether rows name groups; None: no row with a reward was read
        )
        self._has_advantages: bool | None = None  # or rewards; None: no row was read

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        row, names = rename_rollout(_needs(row), self._columns.get("old_logprobs") == "written")
        unread = [
            names.get(name, name)
            for name in (*LOGPROBS, *POLICY, *ENGINE)
            if name not in self._columns and row.get(name) is not None
        ]
        form = "rollouts" + f" whose {' and '.join(unread)} are not read" * bool(
            unread
        )  # the log counts them
        if names.get("prompt") == "input":
            form += ", of texts without special tokens, as verl writes them"
        if row.get("outputs"):
            raise UserError(
                'has "outputs"; write a row for each answer, with the prompt and a reward'
            )
        if row.get("completion_ids") is not None:
            row = without_padding(_needs(row, "prompt_ids", theirs=names))
            rest = {name: value for name, value in row.items() if name not in self.fields}
            refuse_masked(rest, _cure_of_masks(row, rest))
            if media := [name for name in MEDIA if row.get(name) not in EMPTY]:
                raise UserError(f'has "{media[0]}", which is not read; remove the row')
            tokens, masked = self._from_ids(row, names)
            prompt = _hash(row["prompt_ids"])
            places = np.arange(begin := len(row["prompt_ids"]), len(tokens))
        else:
            has_ids = row.get("prompt_ids") is not None and row.get("prompt") is None
            fields = ("completion_ids",) if has_ids else ("prompt", "completion")
            row = _needs(as_answer(row, ()), *fields, theirs=names)
            sample = _sample(row, self.fields, row["completion"])
            try:
                tokens, masked = ended(encode(sample), self._eos_id)
            except NothingToLearn:  # an empty answer, whose reward counts all the same
                tokens, masked = np.full(1, self._eos_id, np.uint32), np.ones(1, bool)
                row |= {name: [] for name in self._columns}
            if row.get("completion_mask") is not None:
                raise UserError(
                    'has "completion_mask" without "completion_ids", whose tokens it counts'
                )
            prompt, places = _hash(row["prompt"]), (~masked).nonzero()[0]
            begin = len(tokens) if masked.all() else _begin(sample, tokens, encode)
        columns = {"answer": np.zeros(len(tokens), np.float32)}
        is_unread = masked[places]
        for name, column in self._columns.items():
            if self._may_lack and row.get(name) is None:
                continue
            row = _needs(row, name, cure=CURES[column], theirs=names)
            values = self._log_probs(row, name, names.get(name, name), is_unread)
            placed = _put(values, places, len(tokens), names.get(name, name))
            if not self._may_lack:
                columns[column] = placed
        columns |= self._advantage(row, names, prompt, places, is_unread, len(tokens))
        if masked.all():  # its reward counts in its group, and the answer in means over answers
            form, tokens, masked = "rollouts without a target", tokens[:1], masked[:1]
            columns = {name: values[:1] for name, values in columns.items()}
        elif begin < masked.argmin():  # masked tokens that begin an answer are no prompt
            columns["answer"][: max(0, begin - 1)] = PROMPT
        return form, (tokens, masked, True), columns, prompt

    def _log_probs(self, row: dict, field: str, name: str, is_unread: np.ndarray) -> list[float]:
        """Returns the log-probabilities in a field that the row calls `name`; 0 where they are not
        read."""
        values = of_sampled(row[field], row.get("completion_ids"), row, name)
        values = _list(_unmasked(values, is_unread), name)
        read = [value for value, skip in zip(values, is_unread) if not skip]
        for value in (min(read, default=0), max(read, default=0)):
            if not LEAST_LOGPROB <= value <= MOST_LOGPROB:
                limits = f"{LEAST_LOGPROB:g} to 0"
                raise UserError(f'"{name}" must be log-probabilities, {limits}, got {value:g}')
        return values

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        before = self._groups_of_prompts
        yield from super().join(documents)
        if count := self._groups_of_prompts - before:
            logger.info(
                'data: rows without "group": %s of equal prompts',
                f"{count:,} group" + "s" * (count > 1),
            )

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        advantage = columns["advantage"]
        least, most = f"{advantage.min():.4g}", f"{advantage.max():.4g}"
        words = f"advantage {least}" if least == most else f"advantages {least} to {most}"
        if "reward" in columns:
            name = [*self._groups][int(columns["group"][0])]
            number = int(columns["group"][0])
            group = f"{number} of equal prompts" if isinstance(name, _OfPrompt) else str(name)[:40]
            words += f", reward {columns['reward'][0]:.10g}, group {group}"
        return words

    def _from_ids(self, row: dict, names: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
        fields = ("prompt_ids", "completion_ids")
        prompt, completion = (_ids(row[field], names.get(field, field)) for field in fields)
        given, name = row.get("completion_mask"), names.get("completion_mask", "completion_mask")
        mask = np.ones(len(completion)) if given is None else np.array(_list(given, name))
        if len(mask) == len(prompt) + len(completion) and not mask[: len(prompt)].any():
            mask = mask[len(prompt) :]  # of both
        if len(mask) != len(completion) or not np.isin(mask, (0, 1)).all():
            as_many = names.get("completion_ids", "completion_ids")
            raise UserError(
                f'"{name}" must be {len(completion)} numbers, 0 or 1, as many as {as_many}'
            )
        masked = np.concatenate([np.ones(len(prompt), bool), mask == 0])
        if not len(prompt):
            raise NothingToLearn("rollouts without a prompt")
        return np.concatenate([prompt, completion]), masked

    def _advantage(
        self, row: dict, names: dict[str, str], prompt: int | None, places: np.ndarray,
        is_unread: np.ndarray,
        length: int,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        given = row.get("advantage")
        if given is None and row.get("reward") is None:
            is_null = "advantage" in row and "reward" not in row
            lacking, cure = ("advantage", "") if is_null else ("reward", '; or give "advantage"')
            _needs(row, lacking, cure=cure, theirs=names)
        if self._has_advantages not in (None, given is not None):
            raise UserError(
                'has one of "advantage" and "reward", and rows before it the other; give one in '
                "all rows"
            )
        self._has_advantages = given is not None
        if given is not None:
            name = names.get("advantage", "advantage")
            if isinstance(given, list):
                values = _list(_unmasked(given, is_unread), name)
                return {"advantage": _put(values, places, length, name)}
            return {"advantage": np.full(length, _number(given, name), np.float32)}
        reward = _number(row["reward"], names.get("reward", "reward"))
        number = self._group(row.get("group"), prompt)
        # float64 until advantages are made: rewards may be large and close to one another
        return {
            "reward": np.full(length, reward, np.float64),
            "group": np.full(length, number, np.float64),
        }

    def _group(self, group, prompt: int | None) -> int:
        """Returns the number of a group, which is of one prompt. Rows of equal prompts form one if
        they name none."""
        if isinstance(group, list | dict) or group != group:  # NaN
            raise UserError('"group" must be a number or a text')
        count, names_one = len(self._groups), group is not None
        if self._has_groups not in (None, names_one):
            what = "has" if names_one else "needs"
            raise UserError(
                f'{what} "group", unlike rows before it; name a group in all rows, or in none'
            )
        self._has_groups = names_one
        if not names_one:
            number, _ = self._groups.setdefault(_OfPrompt((prompt,)), (count, prompt))
            self._groups_of_prompts += number == count
            return number
        number, first_prompt = self._groups.setdefault(group, (count, prompt))
        if prompt != first_prompt:
            name = str(group)[:40]
            raise UserError(
                f'"group" {name} has another prompt before; give "advantage", or a group to each '
                "prompt"
            )
        return number


def _cure_of_masks(row: dict, rest: dict) -> str:
    """Returns what to do with a mask of another name in `rest`, the fields of a rollout that are
    not read."""
    length = len(row["completion_ids"]) if isinstance(row["completion_ids"], list) else -1
    if row.get("completion_mask") is None:
        for name, value in rest.items():
            is_mask = (
                isinstance(value, list) and len(value) == length and {*map(str, value)} <= BITS
            )
            if is_mask and FLAG_WORDS.search(name):
                return f"remove it, or give --columns completion_mask={name}"
    return "remove it"


class _OfPrompt(tuple):
    """Key of a group whose rows name none: the hash of their prompt."""


def _hash(prompt) -> int | None:
    """Returns `Document.prompt`; None for an empty prompt, which its rows do not share.

    Tables give messages another order of fields, and nulls.
    """
    prompt = _without_nulls(prompt) if isinstance(prompt, list) else prompt
    return hash(json.dumps(prompt, sort_keys=True, default=str)) if prompt else None


def _have_one_prompt(row: Document, other: Document) -> bool:
    """Whether two rows have the same prompt, or the same tokens before their first targets."""
    own, theirs = (each.tokens[: _prompt_length(each)] for each in (row, other))
    return (row.prompt is not None and row.prompt == other.prompt) or np.array_equal(own, theirs)


def _prompt_length(document: Document) -> int:
    """Returns how many tokens stand before a document's first target."""
    assert document.masked is not None
    return int(document.masked.argmin())


def _shareable(row: Document) -> int:
    """Returns how many of a row's first tokens other answers can share: all of its prompt but the
    last one."""
    answer = row.columns["answer"]
    is_one = answer[0] == answer[-1]
    return max(0, _prompt_length(row) - 1) if is_one else int((answer == PROMPT).sum())


def _share(rows: Sequence[Document], shared: int) -> Document:
    """Returns documents as one, whose answers share their first tokens."""
    if len(rows) == 1:
        return rows[0]

    def joined(values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([values[0][:shared], *(own[shared:] for own in values)])

    columns = {name: joined([row.columns[name] for row in rows]) for name in rows[0].columns}
    if columns["answer"].max() == 0:  # each row has one answer
        lengths = [shared, *(len(row.tokens) - shared for row in rows)]
        columns["answer"] = np.repeat(np.arange(PROMPT, len(rows), dtype=np.float32), lengths)
    tokens, masked = (joined([getattr(row, name) for row in rows]) for name in ("tokens", "masked"))
    return replace(rows[0], tokens=tokens, masked=masked, columns=columns)


def advantages(rewards: np.ndarray, groups: np.ndarray, scaled: bool) -> np.ndarray:
    """Returns rewards less the mean of their group, over its deviation if `scaled`; float32, 0 in
    groups of one."""
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    rewards = rewards.astype(np.float64)
    less = rewards - (np.bincount(place, rewards) / counts)[place]
    if not scaled:
        return less.astype(np.float32)
    deviation = np.sqrt(np.bincount(place, less**2) / np.maximum(counts - 1, 1))
    return (less / (deviation + SMALL)[place]).astype(np.float32)


def ended(encoded: Encoded, eos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens, uint32, with the end-of-text id behind them, and a mask that has the first
    token."""
    tokens, masked, is_complete = encoded
    tokens = tokens.astype(np.uint32)
    masked = np.zeros(len(tokens), bool) if masked is None else masked.copy()
    if not is_complete:
        tokens, masked = np.append(tokens, np.uint32(eos_id)), np.append(masked, False)
    masked[0] = True  # no token comes before it
    return tokens, masked


def _needs(row: object, *names: str, cure: str = "", theirs: dict[str, str] | None = None) -> dict:
    """Returns the row. Raises UserError if `names` lack a value; `theirs` are the row's names by
    ours."""
    if not isinstance(row, dict):
        raise UserError(f"is not an object but a {type(row).__name__}")
    if missing := [name for name in names if row.get(name) is None]:
        fields = [(theirs or {}).get(name, name) for name in row]
        has = ", ".join(f'"{str(name)[:30]}"' for name in fields[:20]) or "nothing"
        lacks = f"needs {' and '.join(map(json.dumps, missing))} for this --objective; it has {has}"
        if null := [name for name in missing if name in row]:
            lacks = (
                f'needs "{null[0]}" for this --objective, and has null there; give it a value, or'
            )
            columns = f"{null[0]}=NAME"
            raise UserError(f"{lacks} --columns {columns} renames{cure}")
        columns = ",".join(f"{name}=NAME" for name in missing)
        raise UserError(f"{lacks}; --columns {columns} renames{cure}")
    return row


def _unmasked(values, is_unread: np.ndarray):
    """Returns numbers of an answer's tokens, with 0 for null, NaN or infinity at a masked token."""
    if not isinstance(values, list) or len(values) != len(is_unread):
        return values

    def is_number(value) -> bool:
        return value is not None and not (isinstance(value, float) and not math.isfinite(value))

    return [
        value if is_number(value) or not skip else 0.0 for value, skip in zip(values, is_unread)
    ]


def _number(value, name: str) -> float:
    if (
        isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9
    ):  # nor NaN
        raise UserError(f'"{name}" must be a number within 1e9 of 0, got {as_json(value)}')
    return float(value)


def _list(values, name: str) -> list[float]:
    if not isinstance(values, list):
        raise UserError(f'"{name}" must be a list of numbers, got {as_json(values)}')
    return [_number(float(value) if isinstance(value, bool) else value, name) for value in values]


def _ids(values, name: str) -> np.ndarray:
    found = _list(values, name)
    if any(isinstance(value, bool) for value in values) or any(
        value != int(value) or not 0 <= value <= LARGEST_ID for value in found
    ):
        raise UserError(f'"{name}" must be a list of token ids')
    return np.array(found, dtype=np.uint32)


def _put(values: list[float], places: np.ndarray, length: int, name: str) -> np.ndarray:
    """Returns `length` numbers: values at their places, the completion's tokens, and 0
    elsewhere."""
    if len(values) != len(places):
        raise UserError(
            f'"{name}" has {len(values)} numbers, the completion {len(places)} tokens; give ids of '
            "both"
        )
    column = np.zeros(length, np.float32)
    column[places] = values
    return column
