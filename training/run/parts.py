"""The parts of a run, and its checkpoints: after a step, after an error, at the end."""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator

from model import Transformer
from training.checkpoint.ranks import failing_together
from training.checkpoint.saver import Saver
from training.data.loader import Batch, PackedLoader
from training.data.tokens import Store
from training.families.config_json import to_config_json
from training.host.errors import UserError
from training.memory.planner import Plan
from training.optim.adamw import MasterAdamW
from training.parallel.world import World
from training.run.metrics import Display, Metrics
from training.run.recipe import Recipe
from training.run.resume import Progress, state_to_save, tokens_per_step
from training.run.saving import checkpoint_bytes
from training.run.settings import TrainConfig
from training.run.stopping import Stopping, promise_shutdown

logger = logging.getLogger(__name__)
LONG_FIRST_STEP_SECONDS = 60.0  # compiling kernels is a small part of such a step
SAVED_BYTES_PER_SECOND = 5e8  # guess for a slow disk, before the first checkpoint has been measured


@dataclasses.dataclass
class Run:
    """The parts of a run, and how far it has come."""

    recipe: Recipe
    world: World
    loader: PackedLoader
    held_out: Store
    model: Transformer
    optimizer: MasterAdamW
    plan: Plan
    saver: Saver
    stopping: Stopping
    metrics: Metrics | None  # on the main rank
    display: Display
    progress: Progress
    saved: int | None  # the step of the last checkpoint
    saved_at: float  # time.monotonic() when it was begun
    amounts: list[float] = dataclasses.field(default_factory=list)  # `own_amounts` of the last step
    stopped: bool = False
    is_updating: bool = False  # from the start of an update until `progress` counts its step
    began: float = dataclasses.field(default_factory=time.monotonic)
    validation_seconds: float = 0.0  # seconds of all validations together
    recent_losses: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=100))

    @property
    def config(self) -> TrainConfig:
        return self.recipe.config

    def before_update(self) -> None:
        """Wait for what an update may change only then."""
        self.saver.before_update()
        self.is_updating = True

    def save(self) -> None:
        """Begin the checkpoint of the last step, unless it has been begun."""
        step, world = self.progress.step, self.world
        if self.config.save == "none" or self.saved == step:
            return
        self.saved, self.saved_at = step, time.monotonic()
        self.saver.begin(
            step, weights=self.optimizer.weights(), model_config=to_config_json(self.recipe.model),
            optimizer_state=self.optimizer.state_dict() if self.config.save == "full" else None,
            trainer_state=state_to_save(
                self.recipe.settings(self.progress.max_steps, self.plan.execution.state_format), self.progress,
                tokens_per_step(self.config, world), world.data_size, self.recipe.tokenizer.identity,
            ),
        )  # fmt: skip

    def read_together(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields this rank's batches, as many on each rank. If a rank cannot read its next one, all save and fail."""
        batch: Batch | None
        while True:
            try:
                with failing_together():
                    batch = next(batches, None)
            except Exception:
                self.save()
                raise
            if batch is None:
                return
            yield batch

    def leave_out(self, step: int, error: Exception) -> None:
        """Go on without a step that is not finite, as often as the settings allow; raise UserError after that."""
        sources = ", ".join(self.loader.sources(self.progress.loader["next_sequence"], self.loader.next_sequence)[:10])
        if self.progress.skipped < self.config.skip_nonfinite_steps:
            self.progress.skipped += 1
            logger.warning("step %d: %s, left out; documents: %s", step, error, sources)
            return
        self.save()  # the weights are as before this step, finite or refused
        self.saver.wait()
        last = f"the last good checkpoint: {self.saver.last or 'none'}"
        goes_on = "Go on from it" if self.saver.last else "Start again"
        cure = f"{goes_on} with a lower --learning_rate, or leave such steps out with --skip_nonfinite_steps"
        why = f"step {step}: {error}, stopped before the update; {last}"
        raise UserError(f"{why}. {cure}; documents of the step: {sources}") from None

    def promise_shutdown_once(self, seconds: float) -> None:
        """Say how long the run goes on after a signal, as soon as a step of so many seconds tells."""
        taken = self.progress.step - self.recipe.progress.step
        if taken == 2 or (taken == 1 and seconds > LONG_FIRST_STEP_SECONDS):
            size = checkpoint_bytes(self.recipe, self.world, self.plan.execution.state_format)
            save_seconds = self.saver.seconds or size / SAVED_BYTES_PER_SECOND
            promise_shutdown(self.stopping.look_seconds, save_seconds if self.config.save != "none" else 0.0)

    def save_after_error(self) -> None:
        """Save the steps that were done, if this rank is the only one: other ranks would wait in a collective."""
        self.display.close()  # ends the progress bar's line
        if self.world.size == 1 and not self.is_updating:
            try:
                self.save()
            except Exception as error:  # a GPU may answer no more; the first error is the one to show
                logger.warning("no checkpoint of step %d: %s", self.progress.step, error)
