"""Fields of rows and messages that say, or may say, that tokens are not trained on.

FLAGS are obeyed. Any other field that may be a mask is refused: what it asks for would be ignored.
"""

import re
from collections.abc import Collection

from training.data.unread import words, words_of
from training.host.errors import UserError, as_json

# Names that trainers give to the question whether a message is trained on, and the truth that says
# so. They are OpenAI's, axolotl's, ms-swift's, LLaMA-Factory's, slime's and torchtune's.
FLAGS = {
    "weight": True,
    "train": True,
    "training": True,
    "loss": True,
    "loss_scale": True,
    "loss_weight": True,
    "loss_mask": True,
    "step_loss_mask": True,
    "masked": False,
}
# Fields of a row that mask some of its tokens, whatever their values are.
MASKS = words("""
    mask masks completion_mask assistant_mask assistant_masks loss_masks weights loss_weights
    sample_weight train_on_inputs train_on_input
    """)
IGNORED = -100  # in "labels": a token that is not trained on
TRUTHS = words("true false yes no on off 0 1")  # texts that stand for a truth
# Fields of a message that hold any words, so that a truth in them is a word.
TEXTS = words("role content name text arguments reasoning_content reasoning thinking lang language")
# Fields of a message that hold a truth, and last words of the names of fields that hold a number.
DESCRIBING_TRUTHS = words("toxic redacted truncated synthetic cached")
SAMPLING = ("top_p", "top_k", "min_p")
COUNTS = words("""
    id index turn round step position number num timestamp time created updated modified at date
    duration latency tokens token count counts counter length size temperature seed cost version
    year identifier
    """)
IN_A_SPLIT = re.compile("^(is_)?in_[a-z0-9_]+_train(_set|_split)?$")  # names of another data set
FLAG_WORDS = re.compile(
    "(^|_)(loss|train|trained|training|trainable|mask|masked|weight|weights)(_|$)", re.IGNORECASE
)


class NothingToLearn(Exception):
    """A row is in order, but has nothing to learn.

    The message is a word for the log, such as "blank lines", which counts such rows.
    """


def says_trained(fields: dict, what: str) -> bool | None:
    """Returns whether FLAGS among the fields say that `what` is trained on; None if it has none.

    Raises UserError for another value than a truth, and for flags that contradict each other.
    """
    answers = set()
    for name, trained in FLAGS.items():
        value = fields.get(name)
        if value is None:
            continue
        if not _is_number(value) or value not in (0, 1):
            raise UserError(
                f'{what} has "{name}": {as_json(value)}; it must be true, false, 1 or 0'
            )
        answers.add(bool(value) == trained)
    if len(answers) > 1:
        raise UserError(
            f"{what} says that it is trained on, and that it is not: {', '.join(FLAGS)} must agree"
        )
    return answers.pop() if answers else None


def refuse_unknown_flags(fields: dict, what: str, known: Collection[str]) -> None:
    """Raises UserError for a field of a message that may be a mask of another trainer.

    Its name speaks of losses, or its value is a number or a truth that no usual field has.
    """
    for name, value in fields.items():
        is_text = name in TEXTS and isinstance(value, str)
        if name in known or value is None or is_text:
            continue
        if FLAG_WORDS.search(name) or _may_be_flag(name, value):
            raise UserError(
                f'{what} has "{name[:40]}": {as_json(value)}, which is not known here; remove it, '
                f"or name it as one of {', '.join(FLAGS)} if it is a mask"
            )


def refuse_masked(row: dict, cure: str = "remove it") -> None:
    """Refuses a row that masks some of its tokens.

    Raises UserError for such a row, and NothingToLearn for one that is not trained on.
    """
    labels = row.get("labels")
    masks = [name for name, value in row.items() if _masks_tokens(name, value)]
    if isinstance(labels, list) and IGNORED in labels:
        masks.append("labels")
    if masks:
        raise UserError(f'has "{min(masks)}", which is not obeyed; {cure}')
    if says_trained(row, "the row") is False:
        raise NothingToLearn("rows that say they are not trained on")


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _may_be_flag(name: str, value: object) -> bool:
    """Whether a value of a message is a number or a truth, in a field that usually has none."""
    if isinstance(value, bool):
        return name not in DESCRIBING_TRUTHS
    if not _is_number(value) and str(value).strip().lower() not in TRUTHS:
        return False
    return name not in SAMPLING and words_of(name)[-1] not in COUNTS


def _masks_tokens(name: str, value: object) -> bool:
    """Whether a field of a row masks tokens: by its name, or by a name and a value of masks."""
    if name in MASKS:
        return value is not None
    if name in FLAGS or IN_A_SPLIT.search(name) or not FLAG_WORDS.search(name):
        return False
    is_list = isinstance(value, list) and value and all(map(_is_number, value))
    return isinstance(value, bool) or bool(is_list)
