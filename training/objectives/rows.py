"""Rows of data that objectives read, with the names that TRL has for their fields.

Pairs have "chosen" and "rejected", and a "prompt" unless they are whole chats. Labelled rows have "prompt",
"completion" and "label", true of a desirable answer. Weighted rows are rows of forms.py with "weight", a number.
Rollouts have "prompt" and "completion", or "prompt_ids" and "completion_ids" with an optional "completion_mask";
"advantage", a number or one per token, or "reward" and "group"; "old_logprobs" and, where asked for, "ref_logprobs", a
number per token of the completion.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from training.data.forms import EMPTY, MEDIA, ROLES, NothingToLearn, parsed, refuse_masked
from training.data.sources import Document, Encoded, RowReader
from training.data.tokens import PROMPT
from training.host.errors import UserError

LARGEST_ID = 2**31 - 1
CHATS = ("messages", "conversations")
Row = tuple[str, Encoded, dict[str, np.ndarray], int | None]
LOGPROBS = ("old_logprobs", "ref_logprobs")
CURES = {  # of rows without numbers, by their columns
    "old": "; or give --old_logprobs, which training.logprobs makes", "written": "; or drop --truncation",
    "reference": "; or give --reference_logprobs, which training.logprobs makes",
}  # fmt: skip
LEAST_LOGPROB, MOST_LOGPROB = -1000.0, 0.01  # engines write -9999 for minus infinity, and round above 0
SMALL = 1e-4  # beside the deviation of a group's rewards, as in TRL


class _Sharing(RowReader):
    """Rows of answers. Rows of one prompt, wherever they stand, become documents: prompt, answers, answers.

    A prompt and its answers are at most `context_length` tokens, unless one row is longer. Each answer begins with the
    prompt's last token, which predicts its next one, see kernels/attention/prompts.py. The column "answer" is `PROMPT`
    in the prompt, and changes from each answer to the next.
    """

    def __init__(self, eos_id: int, context_length: int):
        self._eos_id, self._context_length = eos_id, context_length

    def _answer(self, row: dict, completion, encode: Callable[[dict], Encoded]) -> Document:
        tokens, masked = ended(encode(_sample(row, self.fields, completion)), self._eos_id)
        return Document(tokens, masked, True, columns={"answer": np.zeros(len(tokens), np.float32)})

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields documents in the order of their first rows. They are two at least, for one to be held out."""
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
    """Rows of a chosen and a rejected answer: the column "answer" is 0 in the chosen ones, 1 in the rejected ones."""

    fields: ClassVar[frozenset[str]] = frozenset(("prompt", "chosen", "rejected", "tools"))

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        row = _needs(row, "chosen", "rejected")
        prompt, *answers = _cut(row.get("prompt"), row["chosen"], row["rejected"])
        row = row | {"prompt": prompt}
        chosen, rejected = (self._answer(row, each, encode) for each in answers)
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise NothingToLearn("pairs of equal answers")
        prompts = chosen.tokens[: _prompt_length(chosen)], rejected.tokens[: _prompt_length(rejected)]
        pair = _share([chosen, rejected], max(0, _equal_tokens(*prompts) - 1))
        return "pairs", (pair.tokens, pair.masked, True), pair.columns, _hash(prompt)


def _equal_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens two texts begin with that are the same."""
    length = min(len(one), len(other))
    return int(np.append(one[:length] == other[:length], False).argmin())


def _begin(sample: dict, tokens: np.ndarray, encode: Callable[[dict], Encoded]) -> int:
    """Returns where the answer of a sample begins, if with another's message; else the number of its tokens.

    Another content of that message leaves the tokens before it as they are.
    """
    first, *others = sample["completion"] if isinstance(sample["completion"], list) else [{"role": "assistant"}]
    role, name = str(first.get("role", first.get("from"))), "content" if "content" in first else "value"
    if ROLES.get(role, role) == "assistant":
        return len(tokens)
    content = "b" if str(first.get(name)).startswith("a") else "a"
    return _equal_tokens(tokens, encode(sample | {"completion": [first | {name: content}, *others]})[0])


def _cut(prompt, chosen, rejected) -> tuple:
    """Returns the prompt and both answers of a pair, whose prompt may be what both chats begin with."""
    are_lists = isinstance(chosen, list) and isinstance(rejected, list)
    if prompt is None or (are_lists and isinstance(prompt, str)):
        shared, *answers = _shared_prompt(chosen, rejected)
        if prompt and all(not isinstance(each, dict) or each.get("content") != prompt for each in shared):
            raise UserError('has a "prompt" with which no message before both answers agrees; give it as messages')
        return shared, *answers
    return prompt, chosen, rejected


def _sample(row: dict, fields: frozenset[str], completion) -> dict:
    """Returns a row of forms.py of the prompt, one answer, and all that no reader has in `fields`.

    So forms.py refuses what it would ignore. Chats beside a prompt repeat it, as "messages" in UltraFeedback.
    """
    left_out, prompt = fields.union(CHATS) - {"prompt", "tools"}, row.get("prompt")
    _refuse_more(row, fields)
    if isinstance(prompt, list) and isinstance(completion, list):
        own, theirs = _without_nulls(prompt), _without_nulls(completion)
        if theirs[: len(own)] == own:
            completion = completion[len(own) :]  # a whole chat
        elif own and theirs[:1] == own[-1:]:
            raise UserError('has an answer that begins with the last message of its "prompt"; give one of both')
    return {name: value for name, value in row.items() if name not in left_out} | {"completion": completion}


def _refuse_more(row: dict, fields: frozenset[str]) -> None:
    """Refuses chats beside a prompt and its answers that have another message, which would be ignored."""
    for name in CHATS:
        turns = parsed(row.get(name), f'"{name}"')
        chat = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
        texts = json.dumps([row.get(name) for name in fields] if chat else None, default=str)
        contents = [turn.get("content", turn.get("value")) for turn in chat]
        if any(isinstance(text, str) and json.dumps(text.strip())[1:-1] not in texts for text in contents):
            raise UserError(f'has "{name}" with a message that neither prompt nor answers have; remove one of both')


def _without_nulls(messages: list) -> list:
    """Returns messages without fields of null: tables have all fields in all messages of a column."""
    return [
        {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else message
        for message in messages
    ]


def _shared_prompt(chosen, rejected) -> tuple[list, list, list]:
    """Returns the messages that two chats begin with, and the others of each."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise UserError(
            'needs a "prompt" beside "chosen" and "rejected", unless these are lists of messages; '
            "--columns prompt=NAME renames"
        )
    both = [*zip(_without_nulls(chosen), _without_nulls(rejected))]
    same = next((i for i, pair in enumerate(both) if pair[0] != pair[1]), len(both) - 1)  # each has an answer
    if same < 1:
        raise UserError('"chosen" and "rejected" have no message in common to be the prompt; give it as "prompt"')
    return chosen[:same], chosen[same:], rejected[same:]


class Labelled(_Sharing):
    """Rows of an answer and its label. Each becomes a pair: the answer, and an answer to the prompt before.

    Rows of the first prompt get an answer to the last one, and come last. The column "answer" is as in pairs, "label"
    is 1 or 0.
    """

    fields: ClassVar[frozenset[str]] = frozenset(("prompt", "completion", "label", "tools"))

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        row = _needs(row, "prompt", "completion", "label")
        if row["label"] not in (0, 1):
            raise UserError(f'"label" must be true or false, got {str(row["label"])[:40]}')
        answer = self._answer(row, row["completion"], encode)
        columns = answer.columns | {"label": answer.columns["answer"] + row["label"]}
        return "labelled answers", (answer.tokens, answer.masked, True), columns, _hash(row["prompt"])

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        return super().join(self._beside_others(documents))

    @staticmethod
    def _beside_others(documents: Iterable[Document]) -> Iterator[Document]:
        first, last, other = list[Document](), None, None  # `other` has another prompt than `last`
        for row in documents:
            if last is not None and not _have_one_prompt(row, last):
                other = last
            last = row
            if other is None:
                first.append(row)
            else:
                yield beside_answer_of(row, other)
        for row in first:
            if last is None or other is None:
                raise UserError("kto needs rows of two prompts: it asks for a prompt with an answer to another")
            yield beside_answer_of(row, other if _have_one_prompt(row, last) else last)


def beside_answer_of(row: Document, other: Document) -> Document:
    """Returns a document with the answer of another one behind its own."""
    prompt, theirs = _prompt_length(row), _prompt_length(other)
    tokens, masked = (
        np.concatenate([getattr(row, name)[:prompt], getattr(other, name)[theirs:]]) for name in ("tokens", "masked")
    )
    columns = {name: np.full(len(tokens), column[0]) for name, column in row.columns.items()}
    return _share([row, replace(row, tokens=tokens, masked=masked, columns=columns)], max(0, prompt - 1))


class Weighted(RowReader):
    """Rows of forms.py with a "weight", which multiplies the loss of all their targets; 1 where there is none."""

    fields: ClassVar[frozenset[str]] = frozenset(("weight",))

    def __init__(self, eos_id: int):
        self._eos_id = eos_id

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        row = _needs(row)
        weight = _number(row.get("weight", 1.0), "weight")
        if weight == 0:
            raise NothingToLearn("rows of weight 0")
        tokens, masked = ended(encode({name: value for name, value in row.items() if name != "weight"}), self._eos_id)
        answer = np.zeros(len(tokens), np.float32)
        form = "weighted texts" if "weight" in row else "texts"
        return form, (tokens, masked, True), {"answer": answer, "weight": answer + np.float32(weight)}, None


class Rollouts(_Sharing):
    """Rows of recorded answers. Groups of rewards become advantages by `advantages`."""

    fields: ClassVar[frozenset[str]] = frozenset((
        "prompt", "completion", "prompt_ids", "completion_ids", "completion_mask", "advantage", "reward", "group",
        *LOGPROBS, "tools",
    ))  # fmt: skip

    def __init__(self, eos_id: int, columns: dict[str, str], context_length: int):
        """Reads numbers of each token of the completions from fields, the keys of `columns`."""
        super().__init__(eos_id, context_length)
        self._columns = columns
        self._groups = dict[object, tuple[int, int | None]]()  # number, and hash of the prompt
        self._has_advantages: bool | None = None  # or rewards; None: no row was read

    def __call__(self, row: object, encode: Callable[[dict], Encoded]) -> Row:
        row = _needs(row)
        unread = [name for name in LOGPROBS if name not in self._columns and row.get(name) is not None]
        form = "rollouts" + f" whose {' and '.join(unread)} are not read" * bool(unread)  # the log counts them
        if row.get("completion_ids") is not None:
            refuse_masked(
                {name: value for name, value in row.items() if name not in self.fields},
                "remove it, or give --columns completion_mask=NAME",
            )
            if media := [name for name in MEDIA if row.get(name) not in (None, *EMPTY)]:
                raise UserError(f'has "{media[0]}", which is not read; remove the row')
            tokens, masked = self._from_ids(row)
            prompt = _hash(row["prompt_ids"])
            places = np.arange(begin := len(row["prompt_ids"]), len(tokens))
        else:
            row = _needs(row, "prompt", "completion")
            sample = _sample(row, self.fields, row["completion"])
            try:
                tokens, masked = ended(encode(sample), self._eos_id)
            except NothingToLearn:  # an empty answer, whose reward counts all the same
                tokens, masked = np.full(1, self._eos_id, np.uint32), np.ones(1, bool)
                row |= {name: [] for name in self._columns}
            if row.get("completion_mask") is not None:
                raise UserError('has "completion_mask" without "completion_ids", whose tokens it counts')
            prompt, places = _hash(row["prompt"]), (~masked).nonzero()[0]
            begin = len(tokens) if masked.all() else _begin(sample, tokens, encode)
        columns = {"answer": np.zeros(len(tokens), np.float32)}
        for name, column in self._columns.items():
            values = _list(_needs(row, name, cure=CURES[column])[name], name)
            for value in (min(values, default=0), max(values, default=0)):
                if not LEAST_LOGPROB <= value <= MOST_LOGPROB:
                    raise UserError(f'"{name}" must be log-probabilities, {LEAST_LOGPROB:g} to 0, got {value:g}')
            columns[column] = _put(values, places, len(tokens), name)
        columns |= self._advantage(row, prompt, places, len(tokens))
        if masked.all():  # its reward counts in its group, and the answer in means over answers
            form, tokens, masked = "rollouts without a target", tokens[:1], masked[:1]
            columns = {name: values[:1] for name, values in columns.items()}
        elif begin < masked.argmin():  # masked tokens that begin an answer are no prompt
            columns["answer"][: max(0, begin - 1)] = PROMPT
        return form, (tokens, masked, True), columns, prompt

    def _from_ids(self, row: dict) -> tuple[np.ndarray, np.ndarray]:
        prompt, completion = (_ids(_needs(row, name)[name], name) for name in ("prompt_ids", "completion_ids"))
        given = row.get("completion_mask")
        mask = np.ones(len(completion)) if given is None else np.array(_list(given, "completion_mask"))
        if len(mask) != len(completion) or not np.isin(mask, (0, 1)).all():
            raise UserError(f'"completion_mask" must be {len(completion)} numbers, 0 or 1, as many as completion_ids')
        masked = np.concatenate([np.ones(len(prompt), bool), mask == 0])
        if not len(prompt):
            raise NothingToLearn("rollouts without a prompt")
        return np.concatenate([prompt, completion]), masked

    def _advantage(self, row: dict, prompt: int | None, places: np.ndarray, length: int) -> dict[str, np.ndarray]:
        given = row.get("advantage")
        if self._has_advantages not in (None, given is not None):
            raise UserError('has one of "advantage" and "reward", and rows before it the other; give one in all rows')
        self._has_advantages = given is not None
        if given is not None:
            if isinstance(given, list):
                return {"advantage": _put(_list(given, "advantage"), places, length, "advantage")}
            return {"advantage": np.full(length, _number(given, "advantage"), np.float32)}
        row = _needs(row, "reward", "group")
        if isinstance(row["group"], list | dict) or row["group"] != row["group"]:  # NaN
            raise UserError('"group" must be a number or a text')
        number, first_prompt = self._groups.setdefault(row["group"], (len(self._groups), prompt))
        if prompt != first_prompt:
            group = str(row["group"])[:40]
            raise UserError(f'"group" {group} has another prompt before; give "advantage", or a group to each prompt')
        reward = _number(row["reward"], "reward")
        return {"reward": np.full(length, reward, np.float32), "group": np.full(length, number, np.float32)}


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
    """Returns how many of a row's first tokens other answers can share: all of its prompt but the last one."""
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
    """Returns rewards less the mean of their group, over its deviation if `scaled`; float32, 0 in groups of one."""
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    rewards = rewards.astype(np.float64)
    less = rewards - (np.bincount(place, rewards) / counts)[place]
    if not scaled:
        return less.astype(np.float32)
    deviation = np.sqrt(np.bincount(place, less**2) / np.maximum(counts - 1, 1))
    return (less / (deviation + SMALL)[place]).astype(np.float32)


def ended(encoded: Encoded, eos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens, uint32, with the end-of-text id behind them, and a mask that has the first token."""
    tokens, masked, is_complete = encoded
    tokens = tokens.astype(np.uint32)
    masked = np.zeros(len(tokens), bool) if masked is None else masked.copy()
    if not is_complete:
        tokens, masked = np.append(tokens, np.uint32(eos_id)), np.append(masked, False)
    masked[0] = True  # no token comes before it
    return tokens, masked


def _needs(row: object, *names: str, cure: str = "") -> dict:
    if not isinstance(row, dict):
        raise UserError(f"is not an object but a {type(row).__name__}")
    if missing := [name for name in names if row.get(name) is None]:
        has = ", ".join(f'"{str(name)[:30]}"' for name in [*row][:20]) or "nothing"
        lacks = f'needs "{missing[0]}" for this --objective; it has {has}'
        raise UserError(f"{lacks}; --columns {missing[0]}=NAME renames{cure}")
    return row


def _number(value, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:  # nor NaN
        raise UserError(f'"{name}" must be a number within 1e9 of 0, got {str(value)[:40]}')
    return float(value)


def _list(values, name: str) -> list[float]:
    if not isinstance(values, list):
        raise UserError(f'"{name}" must be a list of numbers, got {str(values)[:40]}')
    return [_number(float(value) if isinstance(value, bool) else value, name) for value in values]


def _ids(values, name: str) -> np.ndarray:
    found = _list(values, name)
    if any(isinstance(value, bool) for value in values) or any(
        value != int(value) or not 0 <= value <= LARGEST_ID for value in found
    ):
        raise UserError(f'"{name}" must be a list of token ids')
    return np.array(found, dtype=np.uint32)


def _put(values: list[float], places: np.ndarray, length: int, name: str) -> np.ndarray:
    """Returns `length` numbers: values at their places, the completion's tokens, and 0 elsewhere."""
    if len(values) != len(places):
        raise UserError(f'"{name}" has {len(values)} numbers, the completion {len(places)} tokens; give ids of both')
    column = np.zeros(length, np.float32)
    column[places] = values
    return column
