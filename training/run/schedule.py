"""The events of a run by its steps, and how far it has come."""

import logging
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from training.data.loader import PackedLoader
from training.flags import LARGE, refuse
from training.host.errors import UserError
from training.optim.flags import WITHIN_WARMUP, check_warmup

logger = logging.getLogger(__name__)
MANY_EPOCHS = 10  # a run of more is warned of


@dataclass
class Progress:
    """Progress of a run after a step that was taken.

    A step that is dropped half way leaves it alone.
    """

    max_steps: int = 0  # the run's last step; with epochs LARGE until `count_steps` knows it
    cosine_steps: int = 0  # steps from the run's first to the end of the learning rate's cosine
    step: int = 0
    tokens: int = 0
    loader: dict = field(default_factory=dict)  # the loader's state: its position in the data
    validation_loss: float | None = None  # the last that was measured
    skipped: int = 0  # steps that were not finite and were left out
    # The last step, if a signal or an error cut its validation short.
    unvalidated: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.step >= self.max_steps


@dataclass(frozen=True)
class Schedule:
    """The events of a run by its steps. `Progress.max_steps` is the last step."""

    epochs: float | None  # passes over the data; None: `steps` says how many steps there are
    steps: int | None  # of the run in all; None: a checkpoint or the data say so
    warmup_steps: int
    validation_interval: int  # steps; 0: a validation at the end alone
    validation_sequences: int  # in a validation; 0: there are none
    sample_tokens: int  # tokens to generate at the end; 0: none
    flag_names: frozenset[str]  # names of the settings that flags and --config give
    must_go_on: bool  # a run without a step left is refused

    @property
    def goal(self) -> str:
        return "max_steps" if self.epochs is None else "epochs"

    def validates_after(self, step: int) -> bool:
        """Whether a validation is due after a step that is not the last."""
        return self.validation_interval > 0 and step % self.validation_interval == 0


def count_steps(
    schedule: Schedule,
    progress: Progress,
    loader: PackedLoader,
    micro_batches: int,
    checkpoint: Path | None,
) -> Progress:
    """Returns the start with the steps that epochs need, and logs how many epochs the run makes.

    An epoch is `loader.sequences_per_epoch` sequences of the loader's order. The steps left are
    counted from its position, so that ranks, batch_size and gradient_accumulation_steps may change
    at a resume. Raises UserError if no step is left, or for settings that do not fit the number of
    steps.
    """
    sequences_per_step = loader.batch_size * micro_batches * loader.world_size
    if schedule.epochs is not None:
        max_steps = _steps_of_epochs(schedule, progress, loader, sequences_per_step, checkpoint)
        if checkpoint and max_steps != progress.cosine_steps:
            logger.info(
                "learning rate: its cosine ends at step %s, where the epochs do", f"{max_steps:,}"
            )
        progress = replace(progress, max_steps=max_steps, cosine_steps=max_steps)
        counted = replace(schedule, steps=max_steps)
        refuse(counted, schedule.flag_names, (WITHIN_WARMUP,))
        check_warmup(counted, schedule.flag_names)
    steps_left = progress.max_steps - progress.step
    epochs = loader.epoch + steps_left * sequences_per_step / loader.sequences_per_epoch
    _describe_epochs(progress.max_steps, epochs, loader.sequences_per_epoch)
    steps, warmup_steps = progress.cosine_steps, schedule.warmup_steps
    if steps < warmup_steps:
        end = f"within a warm-up of {warmup_steps:,}, at {steps / warmup_steps:.0%} of the peak"
        logger.warning(
            "learning rate: %s steps end %s; give --warmup_steps %d", f"{steps:,}", end, steps // 10
        )
    return progress


def _steps_of_epochs(
    schedule: Schedule,
    progress: Progress,
    loader: PackedLoader,
    sequences_per_step: int,
    checkpoint: Path | None,
) -> int:
    epochs = schedule.epochs
    assert epochs is not None
    # The decimal number that was given: 0.1 epochs of 30 sequences are 3 sequences, which as floats
    # are above 3.
    sequences_left = Fraction(str(epochs)) * loader.sequences_per_epoch - loader.next_sequence
    max_steps = progress.step + max(0, math.ceil(sequences_left / sequences_per_step))
    if max_steps == progress.step and schedule.must_go_on:
        seen = f"{loader.epoch:.4g} epochs are behind it"
        raise UserError(f"{checkpoint}: {seen}, epochs is {epochs:g}; raise epochs to go on")
    if max_steps > LARGE:
        raise UserError(f"epochs {epochs:g} are {max_steps:,} steps, more than {LARGE:,}; lower it")
    return max_steps


def _describe_epochs(max_steps: int, epochs: float, sequences_per_epoch: int) -> None:
    count = f"{epochs:,.2f}" if epochs >= 0.1 else f"{epochs:.2g}"
    logger.info(
        "data: %s steps make %s epochs of %s sequences",
        f"{max_steps:,}",
        count,
        f"{sequences_per_epoch:,}",
    )
    if epochs > MANY_EPOCHS:
        logger.warning(
            "data: the model sees each text %.0f times, and soon learns it by heart; "
            "give more --data, or --epochs 3",
            epochs,
        )
