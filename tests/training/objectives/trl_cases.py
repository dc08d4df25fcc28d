"""Rows, a model and the objectives whose losses record_trl.py computed with TRL, and test_trl.py
compares."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tests.shapes import model_of
from training.objectives.kto import KTO
from training.objectives.preferences import Preference
from training.objectives.rollouts import Rollout
from training.objectives.scored import Objective

RECORDED = Path(__file__).with_name("trl.json")
CONFIG = model_of(16, 8, 12, 1, 2, 1, 4)
CONTEXT_LENGTH, TRUNCATION = 16, 1.2
PROMPTS, COMPLETIONS = (
    (4, 4, 3, 3, 5, 5),
    (3, 6, 1, 4, 2, 5),
)  # tokens of six answers, two to each prompt
# TRL's likelihood of chosen answers is a mean over their tokens, ORPO's over those of prompts too;
# ours is a mean over pairs of means over answers. Chosen answers of one length, behind prompts of
# one token, are all that both have alike.
EVEN_PROMPTS, EVEN_COMPLETIONS = (1, 1, 1, 1, 1, 1), (4, 6, 4, 3, 4, 5)
EVEN = "orpo", "dpo, with likelihood"


class Row(NamedTuple):
    """A prompt and an answer; the numbers are of the answer's tokens."""

    prompt: np.ndarray
    completion: np.ndarray
    mask: np.ndarray  # 0 of a tool's token
    advantage: float
    reference: np.ndarray
    old: np.ndarray
    written: np.ndarray


def rows(name: str = "") -> list[Row]:
    """Returns the rows of an objective. With a better reference the mean log-ratio is negative, and
    z is 0."""
    lengths = (EVEN_PROMPTS, EVEN_COMPLETIONS) if name in EVEN else (PROMPTS, COMPLETIONS)
    better = 2.0 if name == "kto, below the reference" else 0.0
    random, made, prompt = np.random.default_rng(0), list[Row](), np.zeros(0)
    for number, (before, length) in enumerate(zip(*lengths)):
        prompt = random.integers(1, 16, before) if number % 2 == 0 else prompt
        numbers = (-2.8 + 0.4 * random.standard_normal((3, length))).astype(np.float32)
        numbers[0] += better
        mask = np.array([i != 1 or number != 1 for i in range(length)])
        made.append(
            Row(
                prompt,
                random.integers(1, 16, length),
                mask,
                float(random.standard_normal()),
                *numbers,
            )
        )
    return made


def set_weights(parameters: dict[str, torch.Tensor]) -> None:
    """Gives parameters values that depend on their names' order alone."""
    random = np.random.default_rng(1)
    for name in sorted(parameters):
        values = 0.3 * random.standard_normal(parameters[name].shape)
        parameters[name].data = torch.from_numpy(values + ("norm" in name)).float()


PAIRS: dict[str, tuple[Preference, dict]] = {  # ours, and TRL's settings
    "dpo": (Preference("dpo", 0.3), {"loss_types": ["sigmoid"]}),
    "ipo": (Preference("ipo", 0.4), {"loss_types": ["ipo"]}),
    "dpo, with likelihood": (
        Preference("dpo", 0.3, nll_weight=0.5),
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "dpo, smoothed": (Preference("dpo", 0.3, label_smoothing=0.2), {}),
    "simpo": (Preference("simpo", 2.0, margin=0.5), {}),
    "orpo": (Preference("orpo", 0.2), {}),
}
ROLLOUTS: dict[str, tuple[Rollout, dict]] = {
    "grpo": (Rollout("grpo", 0.04), {"loss_type": "grpo"}),
    "dapo": (Rollout("dapo", 0.0, 0.2, 0.28, TRUNCATION), {"loss_type": "dapo"}),
    "dr_grpo": (Rollout("dr_grpo", context_length=CONTEXT_LENGTH), {"loss_type": "dr_grpo"}),
    "gspo": (
        Rollout("gspo", 0.1, 0.05, 0.1),
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "cispo": (Rollout("cispo", 0.0, 1.0, 0.1), {"loss_type": "cispo"}),
}
LABELS = True, False, True, True, False, False  # of the answers
KTOS = {"kto": KTO(0.3, 1.3, 0.8), "kto, below the reference": KTO(0.3, 1.3, 0.8)}
OBJECTIVES: dict[str, Objective] = {
    **{name: ours for name, (ours, _) in (*PAIRS.items(), *ROLLOUTS.items())}, **KTOS
}  # fmt: skip
