"""Rows of rollouts: answers that a model wrote, with rewards or advantages.

A row has "prompt" and "completion", or "prompt_ids" and "completion_ids" with an optional
"completion_mask"; "advantage", a number or one per token, or "reward" and an optional "group";
"old_logprobs" and, where they are asked for, "ref_logprobs", a number per token of the completion.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from training.data.forms import EMPTY, MEDIA, role_of
from training.data.masks import FLAG_WORDS, NothingToLearn, refuse_masked
from training.data.sources import Document
from training.data.tokens import PROMPT
from training.host.errors import UserError, as_json
from training.objectives.dialects import (
    ENGINE,
    POLICY,
    as_answer,
    log_probs_of_sampled,
    rename_rollout,
    without_padding,
)
from training.objectives.rows import equal_tokens, number_in
from training.objectives.sharing import (
    AnswerReader,
    Encode,
    ended,
    hash_of_prompt,
    needs,
    sample_of,
)

logger = logging.getLogger(__name__)

LARGEST_ID = 2**31 - 1
LOGPROBS = ("old_logprobs", "ref_logprobs")
CURES = {  # for rows without numbers, by their columns
    "old": "; or give --old_logprobs, which training.logprobs makes",
    "written": "; or drop --truncation",
    "reference": "; or give --reference_logprobs, which training.logprobs makes",
}
# Engines write -9999 for minus infinity, and round above 0.
LEAST_LOGPROB, MOST_LOGPROB = -1000.0, 0.01
BITS = {"0", "1", "0.0", "1.0", "True", "False"}  # values of masks, as texts
SMALL = 1e-4  # beside the deviation of a group's rewards, as in TRL


@dataclass
class RolloutRow:
    """A row's tokens, and the places to which its numbers belong. N tokens, C of the completion."""

    row: dict  # with our names
    names: dict[str, str]  # the names that the row has, by ours
    tokens: np.ndarray  # uint32 [N]
    masked: np.ndarray  # bool [N]
    places: np.ndarray  # int64 [C], the completion's tokens
    begin: int  # first token of the answer; N if it has no target
    prompt: int | None  # a hash

    def name(self, field: str) -> str:
        """Returns the name that the row has for a field of ours."""
        return self.names.get(field, field)

    def numbers(self, values, name: str) -> list[float]:
        """Returns a number per token of the completion, 0 for no number at a masked token."""
        is_unread = self.masked[self.places]
        if isinstance(values, list) and len(values) == len(is_unread):
            pairs = zip(values, is_unread)
            values = [0.0 if skip and not _is_finite(value) else value for value, skip in pairs]
        return _list(values, name)

    def put(self, values: list[float], name: str) -> np.ndarray:
        """Returns values at the completion's tokens and 0 elsewhere, float32 [N]."""
        if len(values) != len(self.places):
            raise UserError(
                f'"{name}" has {len(values)} numbers, the completion {len(self.places)} tokens; '
                "give ids of both"
            )
        column = np.zeros(len(self.tokens), np.float32)
        column[self.places] = values
        return column


class Rollouts(AnswerReader):
    """Rows of recorded answers. Groups of rewards become advantages by `advantages`."""

    fields: ClassVar[frozenset[str]] = frozenset(
        (
            "prompt",
            "completion",
            "prompt_ids",
            "completion_ids",
            "completion_mask",
            "advantage",
            "reward",
            "group",
            *LOGPROBS,
            "tools",
        )
    )

    def __init__(
        self, eos_id: int, columns: dict[str, str], context_length: int, may_lack: bool = False
    ):
        """Reads numbers of each token of the completions from fields, the keys of `columns`.

        With `may_lack` they are checked where a row has them, and given to no document.
        """
        super().__init__(eos_id, context_length)
        self._columns, self._may_lack = columns, may_lack
        # Number of a group, and hash of its prompt, by its name; by the hash where rows name none.
        self._groups: dict[object, tuple[int, int | None]] = {}
        self._groups_of_prompts = 0
        # Whether rows name groups, and have advantages; None: no such row was read.
        self._has_groups: bool | None = None
        self._has_advantages: bool | None = None

    def __call__(self, row: object, encode: Encode) -> tuple[str, Document]:
        row, names = rename_rollout(needs(row), self._columns.get("old_logprobs") == "written")
        form = self._form(row, names)
        if row.get("outputs"):
            raise UserError(
                'has "outputs"; write a row for each answer, with the prompt and a reward'
            )
        if row.get("completion_ids") is not None:
            rollout = self._from_ids(row, names)
        else:
            rollout = self._from_texts(row, names, encode)
        tokens, masked = rollout.tokens, rollout.masked
        columns = {"answer": np.zeros(len(tokens), np.float32)}
        columns |= self._log_probs(rollout) | self._advantage(rollout)
        if masked.all():  # its reward counts in its group, and the answer in means over answers
            form, tokens, masked = "rollouts without a target", tokens[:1], masked[:1]
            columns = {name: values[:1] for name, values in columns.items()}
        elif rollout.begin < masked.argmin():  # masked tokens that begin an answer are no prompt
            columns["answer"][: max(0, rollout.begin - 1)] = PROMPT
        return form, Document(tokens, masked, True, columns=columns, prompt=rollout.prompt)

    def _form(self, row: dict, names: dict[str, str]) -> str:
        """Returns the row's form, in words for the log, which count fields that are not read."""
        fields = [name for name in (*LOGPROBS, *POLICY, *ENGINE) if name not in self._columns]
        unread = [names.get(name, name) for name in fields if row.get(name) is not None]
        form = "rollouts"
        if unread:
            form += f" whose {' and '.join(unread)} are not read"
        if names.get("prompt") == "input":
            form += ", of texts without special tokens, as verl writes them"
        return form

    def _from_ids(self, row: dict, names: dict[str, str]) -> RolloutRow:
        row = without_padding(needs(row, "prompt_ids", theirs=names))
        unread = {name: value for name, value in row.items() if name not in self.fields}
        refuse_masked(unread, _cure_of_masks(row, unread))
        for name in MEDIA:
            if row.get(name) not in EMPTY:
                raise UserError(f'has "{name}", which is not read; remove the row')
        name = names.get("completion_mask", "completion_mask")
        name_of_ids = names.get("completion_ids", "completion_ids")
        prompt = _ids(row["prompt_ids"], names.get("prompt_ids", "prompt_ids"))
        completion = _ids(row["completion_ids"], name_of_ids)
        mask = np.ones(len(completion))
        if row.get("completion_mask") is not None:
            mask = np.array(_list(row["completion_mask"], name))
        if len(mask) == len(prompt) + len(completion) and not mask[: len(prompt)].any():
            mask = mask[len(prompt) :]  # of both
        if len(mask) != len(completion) or not np.isin(mask, (0, 1)).all():
            raise UserError(
                f'"{name}" must be {len(completion)} numbers, 0 or 1, as many as {name_of_ids}'
            )
        if not len(prompt):
            raise NothingToLearn("rollouts without a prompt")
        return RolloutRow(
            row=row,
            names=names,
            tokens=np.concatenate([prompt, completion]),
            masked=np.concatenate([np.ones(len(prompt), bool), mask == 0]),
            places=len(prompt) + np.arange(len(completion)),
            begin=len(prompt),
            prompt=hash_of_prompt(row["prompt_ids"]),
        )

    def _from_texts(self, row: dict, names: dict[str, str], encode: Encode) -> RolloutRow:
        has_ids = row.get("prompt_ids") is not None and row.get("prompt") is None
        fields = ("completion_ids",) if has_ids else ("prompt", "completion")
        row = needs(as_answer(row, ()), *fields, theirs=names)
        sample = sample_of(row, self.fields, row["completion"])
        try:
            document = ended(encode(sample), self._eos_id)
        except NothingToLearn:  # an empty answer, whose reward counts all the same
            document = Document(np.full(1, self._eos_id, np.uint32), np.ones(1, bool))
            row |= {name: [] for name in self._columns}
        if row.get("completion_mask") is not None:
            raise UserError(
                'has "completion_mask" without "completion_ids", whose tokens it counts'
            )
        tokens, masked = document.tokens, document.masked
        assert masked is not None
        begin = len(tokens) if masked.all() else _find_begin(sample, tokens, encode)
        places = (~masked).nonzero()[0]
        return RolloutRow(row, names, tokens, masked, places, begin, hash_of_prompt(row["prompt"]))

    def _log_probs(self, rollout: RolloutRow) -> dict[str, np.ndarray]:
        """Returns the log-probabilities of the row's fields, float32 [N], by their columns."""
        columns = {}
        row = rollout.row
        for field, column in self._columns.items():
            if self._may_lack and row.get(field) is None:
                continue
            needs(row, field, cure=CURES[column], theirs=rollout.names)
            name = rollout.name(field)
            values = log_probs_of_sampled(row[field], row.get("completion_ids"), row, name)
            placed = rollout.put(rollout.numbers(values, name), name)
            targets = placed[~rollout.masked]
            wrong = targets[(targets < LEAST_LOGPROB) | (targets > MOST_LOGPROB)]
            if len(wrong):
                raise UserError(
                    f'"{name}" must be log-probabilities, {LEAST_LOGPROB:g} to 0, got {wrong[0]:g}'
                )
            if not self._may_lack:
                columns[column] = placed
        return columns

    def join(self, documents: Iterable[Document]) -> Iterator[Document]:
        before = self._groups_of_prompts
        yield from super().join(documents)
        count = self._groups_of_prompts - before
        if count:
            groups = "1 group" if count == 1 else f"{count:,} groups"
            logger.info('data: rows without "group": %s of equal prompts', groups)

    def describe(self, columns: dict[str, np.ndarray]) -> str:
        advantage = columns["advantage"]
        least, most = f"{advantage.min():.4g}", f"{advantage.max():.4g}"
        words = f"advantage {least}" if least == most else f"advantages {least} to {most}"
        if "reward" not in columns:
            return words
        number = int(columns["group"][0])
        name = [*self._groups][number]
        group = f"{number} of equal prompts" if isinstance(name, _OfPrompt) else str(name)[:40]
        return f"{words}, reward {columns['reward'][0]:.10g}, group {group}"

    def _advantage(self, rollout: RolloutRow) -> dict[str, np.ndarray]:
        """Returns columns of a row's advantage, float32 [N], or of its reward and its group."""
        row, length = rollout.row, len(rollout.tokens)
        advantage = row.get("advantage")
        has_advantage = advantage is not None
        if not has_advantage and row.get("reward") is None:
            is_null = "advantage" in row and "reward" not in row
            lacking, cure = ("advantage", "") if is_null else ("reward", '; or give "advantage"')
            needs(row, lacking, cure=cure, theirs=rollout.names)
        if self._has_advantages not in (None, has_advantage):
            raise UserError(
                'has one of "advantage" and "reward", and rows before it the other; give one in '
                "all rows"
            )
        self._has_advantages = has_advantage
        name = rollout.name("advantage")
        if isinstance(advantage, list):
            return {"advantage": rollout.put(rollout.numbers(advantage, name), name)}
        if has_advantage:
            return {"advantage": np.full(length, number_in(advantage, name), np.float32)}
        # float64 until advantages are made: rewards may be large and close to one another
        reward = number_in(row["reward"], rollout.name("reward"))
        number = self._number_of_group(row.get("group"), rollout.prompt)
        return {"reward": np.full(length, reward), "group": np.full(length, float(number))}

    def _number_of_group(self, group, prompt: int | None) -> int:
        """Returns the number of a group, whose rows have one prompt.

        Rows of equal prompts form a group if they name none.
        """
        if isinstance(group, list | dict) or group != group:  # NaN
            raise UserError('"group" must be a number or a text')
        has_name = group is not None
        if self._has_groups not in (None, has_name):
            has = "has" if has_name else "needs"
            raise UserError(
                f'{has} "group", unlike rows before it; name a group in all rows, or in none'
            )
        self._has_groups = has_name
        count = len(self._groups)
        key = group if has_name else _OfPrompt((prompt,))
        number, first_prompt = self._groups.setdefault(key, (count, prompt))
        if prompt != first_prompt:
            has = f'"group" {str(group)[:40]} has another prompt before'
            raise UserError(f'{has}; give "advantage", or a group to each prompt')
        self._groups_of_prompts += number == count and not has_name
        return number


def _find_begin(sample: dict, tokens: np.ndarray, encode: Encode) -> int:
    """Returns where a sample's answer begins if another's message does, as a tool's; else N.

    Another content of that message leaves the tokens before it as they are.
    """
    if not isinstance(sample["completion"], list):
        return len(tokens)
    first, *rest = sample["completion"]
    if role_of(first) == "assistant":
        return len(tokens)
    name = "content" if "content" in first else "value"
    changed = first | {name: "b" if str(first.get(name)).startswith("a") else "a"}
    return equal_tokens(tokens, encode(sample | {"completion": [changed, *rest]}).tokens)


def _cure_of_masks(row: dict, unread: dict) -> str:
    """Returns what to do with a mask of another name in the fields that are not read."""
    ids = row["completion_ids"]
    if row.get("completion_mask") is None and isinstance(ids, list):
        for name, value in unread.items():
            is_as_long = isinstance(value, list) and len(value) == len(ids)
            if is_as_long and {*map(str, value)} <= BITS and FLAG_WORDS.search(name):
                return f"remove it, or give --columns completion_mask={name}"
    return "remove it"


class _OfPrompt(tuple):
    """Key of a group whose rows name none: the hash of their prompt."""


def advantages(rewards: np.ndarray, groups: np.ndarray, scaled: bool) -> np.ndarray:
    """Returns rewards less the mean of their group, float32; 0 in groups of one.

    Args:
        scaled: divide by the deviation of the group's rewards.
    """
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    rewards = rewards.astype(np.float64)
    centred = rewards - (np.bincount(place, rewards) / counts)[place]
    if not scaled:
        return centred.astype(np.float32)
    deviation = np.sqrt(np.bincount(place, centred**2) / np.maximum(counts - 1, 1))
    return (centred / (deviation + SMALL)[place]).astype(np.float32)


def _is_finite(value) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _list(values, name: str) -> list[float]:
    if not isinstance(values, list):
        raise UserError(f'"{name}" must be a list of numbers, got {as_json(values)}')
    return [number_in(float(x) if isinstance(x, bool) else x, name) for x in values]


def _ids(values, name: str) -> np.ndarray:
    ids = np.array(_list(values, name))
    are_ids = (ids == np.floor(ids)) & (ids >= 0) & (ids <= LARGEST_ID)
    if not are_ids.all() or any(isinstance(value, bool) for value in values):
        raise UserError(f'"{name}" must be a list of token ids')
    return ids.astype(np.uint32)
