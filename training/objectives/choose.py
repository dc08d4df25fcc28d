"""Finds an objective by its flags, the reader of its rows, and what their columns lack."""

import logging
from collections.abc import Sequence

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


def row_reader(
    flags: ObjectiveFlags,
    eos_id: int,
    context_length: int,
    has_adapters: bool = False,
    is_shown: bool = False,
) -> RowReader | None:
    """Returns the reader of the objective's rows; None: forms.py reads them.

    Args:
        is_shown: the rows are only looked at, and may lack log-probabilities.
    """
    if flags.objective in PAIR_OBJECTIVES:
        return Pairs(eos_id, context_length)
    if flags.objective == "kto":
        return Labelled(eos_id, context_length, may_lack=is_shown)
    if flags.objective in ROLLOUT_OBJECTIVES:
        columns = {}
        if flags.old_logprobs is None or flags.truncation:
            columns["old_logprobs"] = "old" if flags.old_logprobs is None else "written"
        if flags.beta and not flags.reference_logprobs and not has_adapters:
            columns["ref_logprobs"] = "reference"
        return Rollouts(eos_id, columns, context_length, may_lack=is_shown)
    return Weighted(eos_id) if flags.objective in ("weighted", "distill") else None


def text_reader(objective: str, eos_id: int, context_length: int) -> RowReader | None:
    """Returns the reader of an objective's texts, beside which log-probabilities may lack."""
    flags = ObjectiveFlags(objective=objective, old_logprobs="elsewhere")
    return row_reader(flags, eos_id, context_length)


def stored_of(
    flags: ObjectiveFlags, tokenizer, start: str | None, attention: str | None
) -> dict[str, Stored]:
    """Returns what is stored, by columns. Raises UserError for others' and a teacher without words.

    Args:
        start: the folder of weights that a run starts from; None: it goes on from a checkpoint, and
        what is stored was compared when it started.
        attention: stored.attention_in_words the run; None: any, as in an evaluation.
    """
    folders = {
        "reference": flags.reference_logprobs,
        "old": flags.old_logprobs,
        TEACHER: flags.teacher_logprobs,
    }
    stored = {column: Stored.read(folder) for column, folder in folders.items() if folder}
    for column, numbers in stored.items():
        if column == TEACHER and not numbers.top_k:
            raise UserError(
                f"{numbers.folder} was made without --top_k; make it anew with that, such as "
                "--top_k 16"
            )
        # Later rollouts keep the reference of the first, whatever was trained since.
        is_first = column == "reference" and flags.objective in ROLLOUT_OBJECTIVES
        if column == TEACHER or is_first:
            numbers.check(tokenizer.identity, None, None)
        else:
            numbers.check(tokenizer.identity, start, attention)
    return stored


def complete(
    flags: ObjectiveFlags,
    context_length: int,
    vocab_size: int,
    stored: dict[str, Stored],
    stores: Sequence[TokenStore],
    is_shown: bool = False,
) -> None:
    """Gives documents the columns that their rows lack: advantages of groups, stored numbers.

    Args:
        stored: see `stored_of`.
        is_shown: the data are only looked at: rewards and groups stay, and a warning takes the
        place of a refusal.
    """
    if flags.objective in ROLLOUT_OBJECTIVES:
        give_advantages(stores, flags.objective != "dr_grpo", keep_rewards=is_shown)
    why = _without_effect(flags, stores)
    if why and not is_shown:
        raise UserError(why)
    if why:
        logger.warning("data: %s", why)
    for column, numbers in stored.items():
        numbers.give(stores, column, context_length, vocab_size)


def _without_effect(flags: ObjectiveFlags, stores: Sequence[TokenStore]) -> str | None:
    """Returns why a run learns nothing of the rows; None if it does."""
    is_weighted = flags.objective in ("weighted", "distill")
    if is_weighted and not any(store.column("weight").any() for store in stores):
        return "all weights are 0, so nothing is learnt; give others"
    if flags.objective not in ROLLOUT_OBJECTIVES:
        return None
    if not any(store.has_targets for store in stores):
        return "all rollouts are masked or empty, so nothing is learnt; give others"
    if not flags.beta and not any(store.column("advantage").any() for store in stores):
        return "all advantages are 0, so nothing is learnt; give groups whose rewards differ"
    return None


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
            "data: %d of %d groups have one answer, or answers of one reward: their advantages are "
            "0",
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
