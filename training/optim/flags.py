"""Flags of the optimizer and of the learning rate's schedule, and which of them have no effect. No
torch is imported here: --help is to be quick."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from training.flags import SMALLEST, Rule, flag
from training.host.errors import UserError

OPTIMIZER_STATES = ("auto", "float32", "compact")  # training.optim.formats; auto: a plan chooses
DEFAULT_STEPS = 300
# Suits continued training. Training from scratch wants more, and a far longer warm-up.
PEAK_LEARNING_RATE = 2e-5
TINY_PEAK_LEARNING_RATE = 3e-3
LORA_PEAK_LEARNING_RATE = 2e-4
USUAL_PEAKS = (
    f"{PEAK_LEARNING_RATE}, with lora {LORA_PEAK_LEARNING_RATE}, for tiny {TINY_PEAK_LEARNING_RATE}"
)


@dataclass
class StateFlags:
    """The format of the optimizer's state."""

    optimizer_state: str = flag(
        "auto", "compact: 8-bit moments, 4.1 bytes per parameter, not 12", OPTIMIZER_STATES
    )


@dataclass
class OptimizerFlags:
    """Steps, learning rates and other numbers of the optimizer."""

    max_steps: int | None = flag(
        None, f"steps in all; default: {DEFAULT_STEPS} more", least=1, group="optimizer"
    )
    epochs: float | None = flag(
        None, "passes over the data, in place of max_steps: 0.5", least=SMALLEST, most=1e9
    )
    learning_rate: float | None = flag(
        None, f"peak; default: {USUAL_PEAKS}", least=SMALLEST, most=1.0
    )
    lora_plus: float | None = flag(
        None, "learning rate of B over A's, LoRA+; default: 1", least=SMALLEST, most=1e9
    )
    final_learning_rate_ratio: float = flag(
        0.1, "the cosine ends at this share of the peak", least=0.0, most=1.0
    )
    warmup_steps: int = flag(20, "steps of linear warm-up", share_of="steps")
    weight_decay: float = flag(
        0.1, "decay of the matrices, and of nothing else", least=0.0, most=10.0
    )
    max_grad_norm: float = flag(
        1.0, "gradients are scaled down to this global norm", least=SMALLEST, most=1e9
    )
    skip_nonfinite_steps: int = flag(
        0, "steps that may be left out because their loss or gradient is not finite"
    )
    seed: int = flag(0, "draws the initial weights, the data's order and the sample")


# Rules of a step, in train.py and profile_memory.py.
STEP_RULES = (
    Rule(
        "",
        "optimizer_state compact has no effect with lora, whose state is small; drop it",
        lambda s: s.lora and s.optimizer_state == "compact",
    ),
)
WITHIN_WARMUP = Rule(
    "final_learning_rate_ratio",
    "where the run ends with its warm-up; lower warmup_steps, or drop it",
    lambda s: s.steps is not None and s.warmup_steps >= s.steps,
)
RUN_RULES = (
    Rule(
        "max_steps",
        "with epochs, which say how many steps there are; drop one",
        lambda s: s.epochs is not None,
    ),
    WITHIN_WARMUP,
)


class HasSteps(Protocol):
    """The flags of a run, or its schedule."""

    @property
    def steps(self) -> int | None: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def goal(self) -> str: ...


def check_warmup(run: HasSteps, flag_names: Iterable[str]) -> None:
    """Raises UserError for a warm-up, if it was given, that is longer than the run."""
    if "warmup_steps" in flag_names and run.steps is not None and run.warmup_steps > run.steps:
        what = (
            f"warmup_steps {run.warmup_steps} is longer than the run of {run.steps} steps, which "
            "would never reach its peak learning rate"
        )
        raise UserError(f"{what}; lower it, or raise {run.goal}")
