"""Decides what a run minimises: the objective, its rows' reader, and columns they lack."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from training.data.sources import RowReader
from training.data.tokens import PROMPT, TokenStore
from training.host.errors import UserError
from training.objectives.flags import PAIR_OBJECTIVES, ROLLOUT_OBJECTIVES, ObjectiveFlags
from training.objectives.kto import KTO
from training.objectives.preferences import Preference
from training.objectives.rollout_rows import Rollouts, advantages
from training.objectives.rollouts import Rollout
from training.objectives.rows import Labelled, Pairs, Weighted
from training.objectives.scored import Objective
from training.objectives.stored import TEACHER, Stored

logger = logging.getLogger(__name__)
CLIPS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


def choose(flags: ObjectiveFlags, context_length: int) -> Objective | None:
    """Returns the objective; None: the loss of next tokens, with or without weights."""
    name, beta = flags.objective, flags.beta
    if name in PAIR_OBJECTIVES:
        margin = 0.0
        if name == "simpo":
            margin = 0.5 if flags.margin is None else flags.margin
        beta = beta or (2.0 if name == "simpo" else 0.1)
        return Preference(name, beta, flags.label_smoothing, flags.nll_weight, margin)
    if name == "kto":
        return KTO(beta or 0.1, flags.desirable_weight, flags.undesirable_weight)
    if name in ROLLOUT_OBJECTIVES:
        low, high = CLIPS.get(name, (0.2, 0.2))
        low = low if flags.clip_low is None else flags.clip_low
        high = high if flags.clip_high is None else flags.clip_high
        return Rollout(name, beta or 0.0, low, high, flags.truncation or 1.0, context_length)
    return None


@dataclass(frozen=True)
class Aim:
    """What a run minimises, the rows that it reads, and where log-probabilities of them are stored.

    `rollout_columns` are the columns of log-probabilities that the rows of rollouts must have, by
    the fields of the rows.
    """

    name: str
    context_length: int
    objective: Objective | None = None  # None: the loss of next tokens, with or without weights
    rollout_columns: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)  # of what is stored, by column

    @property
    def has_rollouts(self) -> bool:
        return self.name in ROLLOUT_OBJECTIVES

    @property
    def reads_weights(self) -> bool:
        return self.name in ("weighted", "distill")

    def reader(self, eos_id: int, may_lack: bool = False) -> RowReader | None:
        """Returns the reader of the objective's rows; None: forms.py reads them.

        Args:
            may_lack: the rows are only looked at, and may lack log-probabilities.
        """
        if self.name in PAIR_OBJECTIVES:
            return Pairs(eos_id, self.context_length)
        if self.name == "kto":
            return Labelled(eos_id, self.context_length, may_lack=may_lack)
        if self.has_rollouts:
            columns = self.rollout_columns
            return Rollouts(eos_id, columns, self.context_length, may_lack=may_lack)
        return Weighted(eos_id) if self.reads_weights else None

    def read_stored(
        self, tokenizer: str, start: str | None, attention: str | None
    ) -> dict[str, Stored]:
        """Returns what is stored, by columns. Raises UserError for log-probabilities of something
        else, and for a teacher without words.

        Args:
            tokenizer: the identity of the run's tokenizer.
            start: the folder of weights that a run starts from; None: it goes on from a checkpoint,
                and what is stored was compared when it started.
            attention: stored.attention_in_words the run; None: any, as in an evaluation.
        """
        stored = {column: Stored.read(folder) for column, folder in self.folders.items()}
        for column, part in stored.items():
            if column == TEACHER and not part.top_k:
                raise UserError(
                    f"{part.folder} was made without --top_k; make it anew with that, such as "
                    "--top_k 16"
                )
            # Rollouts that follow others keep the reference of the first,
            # whatever was trained since.
            if column == TEACHER or (column == "reference" and self.has_rollouts):
                part.check(tokenizer, None, None)
            else:
                part.check(tokenizer, start, attention)
        return stored

    def complete(
        self,
        stores: Sequence[TokenStore],
        vocab_size: int,
        stored: dict[str, Stored],
        is_shown: bool = False,
    ) -> None:
        """Gives documents the columns that their rows lack: advantages of groups, and what
        `read_stored` returns.

        Args:
            is_shown: the data are only looked at: rewards and groups stay, and a warning takes the
                place of a refusal.
        """
        if self.has_rollouts:
            give_advantages(stores, self.name != "dr_grpo", keep_rewards=is_shown)
        if why := self._without_effect(stores):
            if not is_shown:
                raise UserError(why)
            logger.warning("data: %s", why)
        for column, part in stored.items():
            part.give(stores, column, self.context_length, vocab_size)

    def _without_effect(self, stores: Sequence[TokenStore]) -> str | None:
        """Returns why a run learns nothing of the rows; None if it does."""
        if self.reads_weights and not any(store.column("weight").any() for store in stores):
            return "all weights are 0, so nothing is learnt; give others"
        if not self.has_rollouts:
            return None
        if not any(store.has_targets for store in stores):
            return "all rollouts are masked or empty, so nothing is learnt; give others"
        assert self.objective is not None
        if not self.objective.needs_reference and not any(
            store.column("advantage").any() for store in stores
        ):
            return "all advantages are 0, so nothing is learnt; give groups whose rewards differ"
        return None


def decide_aim(flags: ObjectiveFlags, context_length: int, has_adapters: bool = False) -> Aim:
    """Returns what the flags ask for.

    The base of adapters is the reference, where none is stored.
    """
    stored = {
        "reference": flags.reference_logprobs,
        "old": flags.old_logprobs,
        TEACHER: flags.teacher_logprobs,
    }
    columns: dict[str, str] = {}
    if flags.old_logprobs is None:
        columns["old_logprobs"] = "old"
    elif flags.truncation:
        columns["old_logprobs"] = "written"
    if flags.beta and not flags.reference_logprobs and not has_adapters:
        columns["ref_logprobs"] = "reference"
    folders = {column: folder for column, folder in stored.items() if folder}
    objective = choose(flags, context_length)
    return Aim(flags.objective, context_length, objective, columns, folders)


def text_reader(objective: str, eos_id: int, context_length: int) -> RowReader | None:
    """Returns the reader of an objective's texts, which may lack log-probabilities."""
    flags = ObjectiveFlags(objective=objective, old_logprobs="elsewhere")
    return decide_aim(flags, context_length).reader(eos_id)


def give_advantages(stores: Sequence[TokenStore], scaled: bool, keep_rewards: bool = False) -> None:
    """Makes advantages of rewards, over the groups of all stores."""
    stores = [store for store in stores if "reward" in store.columns and len(store.lengths)]
    if not stores:
        return
    lasts = [_last_tokens(store) for store in stores]
    rewards, groups = (
        np.concatenate([store.column(name)[places] for store, places in zip(stores, lasts)])
        for name in ("reward", "group")
    )
    values = advantages(rewards, groups, scaled)
    _, firsts, place = np.unique(groups, return_index=True, return_inverse=True)
    is_equal = np.bincount(place, rewards != rewards[firsts][place]) == 0
    values[is_equal[place]] = 0  # not a rounding error
    if is_equal.any():
        logger.warning(
            "data: %d of %d groups have one answer, or answers of one reward: "
            "their advantages are 0",
            is_equal.sum(),
            len(is_equal),
        )
    borders = np.cumsum([*map(len, lasts)])[:-1]
    for store, places, part in zip(stores, lasts, np.split(values, borders)):
        store.add_column("advantage", np.repeat(part, np.diff(places, prepend=-1)))
        for name in () if keep_rewards else ("reward", "group"):
            store.drop_column(name)


def _last_tokens(store: TokenStore) -> np.ndarray:
    """Returns the place of each answer's last token, int64."""
    answer = store.column("answer")
    is_last = np.append(answer[1:] != answer[:-1], True)
    is_last[np.cumsum(store.lengths) - 1] = True
    return (is_last & (answer != PROMPT)).nonzero()[0]
