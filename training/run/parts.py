"""The parts of a run, and its checkpoints: after a step, after an error, at the end."""

import dataclasses
import logging
import time
import typing
from collections import deque
from collections.abc import Iterator

from tqdm import tqdm

from model import Transformer
from training.checkpoint.ranks import failing_together
from training.checkpoint.saver import Saver
from training.data.loader import Batch, PackedLoader
from training.data.tokens import Store
from training.families import to_config_json
from training.memory.planner import Plan
from training.optimizer import MasterAdamW
from training.parallel.world import World
from training.run.metrics import MetricsFile
from training.run.resume import Progress, Start, state_to_save
from training.run.settings import TrainConfig
from training.run.stopping import Stopping

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Run:
    """The parts of a run, and how far it has come."""

    config: TrainConfig  # start.config, its memory budget resolved
    start: Start
    world: World
    tokenizer: typing.Any
    loader: PackedLoader
    held_out: Store
    model: Transformer
    optimizer: MasterAdamW
    plan: Plan
    saver: Saver
    stopping: Stopping
    metrics: MetricsFile | None  # on the main rank
    bar: tqdm
    progress: Progress
    saved: int | None  # the step of the last checkpoint
    saved_at: float  # time.monotonic() when it was begun
    stopped: bool = False
    is_updating: bool = False  # from the start of an update until `progress` counts its step
    began: float = dataclasses.field(default_factory=time.monotonic)
    validation_seconds: float = 0.0  # seconds of all validations together
    recent_losses: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=100))

    def before_update(self) -> None:
        """Wait for what an update may change only then."""
        self.saver.before_update()
        self.is_updating = True

    def save(self) -> None:
        """Begin the checkpoint of the last step, unless it has been begun."""
        step = self.progress.step
        if self.config.save == "none" or self.saved == step:
            return
        self.saved, self.saved_at = step, time.monotonic()
        self.saver.begin(
            step, weights=self.optimizer.parameters, model_config=to_config_json(self.start.model_config),
            optimizer_state=self.optimizer.state_dict() if self.config.save == "full" else None,
            trainer_state=state_to_save(self.start.config, self.progress, self.tokenizer.identity, self.world),
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

    def save_after_error(self) -> None:
        """Save the steps that were done, if this rank is the only one: other ranks would wait in a collective."""
        self.bar.close()  # ends the progress bar's line
        if self.world.size > 1 or self.is_updating:
            return
        try:
            self.save()
        except Exception as error:  # a GPU may answer no more; the first error is the one to show
            logger.warning("no checkpoint of step %d: %s", self.progress.step, error)
