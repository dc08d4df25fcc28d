"""The parts of a run; its checkpoints, with the room that they need on the disk; its sample."""

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from model import Transformer
from training.checkpoint.decide import Interval, Saving
from training.checkpoint.files import SPARE_BYTES, check_room, checkpoints
from training.checkpoint.ranks import failing_together
from training.checkpoint.saver import Saver
from training.data.chat import stop_ids
from training.data.loader import Batch, PackedLoader
from training.data.tokens import Store
from training.families.config_json import to_config_json
from training.host.errors import UserError
from training.host.files import size_on_disk
from training.host.sizes import GIB
from training.memory.placement import products_in_bf16
from training.memory.plan import Plan
from training.optim.adamw import MasterAdamW
from training.optim.formats import bytes_saved
from training.parallel.world import World
from training.run.metrics import Display, Metrics
from training.run.recipe import Recipe
from training.run.report import NAME as REPORT
from training.run.report import About, RecentWarnings, Report
from training.run.resume import after_a_stop, state_to_save
from training.run.schedule import Progress
from training.run.settings import differing
from training.run.stopping import Stopping, promise_shutdown

logger = logging.getLogger(__name__)
LONG_FIRST_STEP_SECONDS = 60.0  # compiling kernels is a small part of such a step
SAVED_BYTES_PER_SECOND = 5e8  # guess for a slow disk, before the first checkpoint has been measured
RETRY_SECONDS = 60  # from a checkpoint that failed to the next attempt
TEXT_TOKENS = 64  # begin a sample, which the model goes on from
PROMPT_TOKENS = 1024  # at most, the last of a prompt: a chat may be as long as a sequence


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
    report: Report | None = None  # on the main rank
    recent_losses: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=100))

    @property
    def record(self) -> dict:
        """The settings by name, with what data and plan have settled."""
        return self.recipe.record(self.progress.max_steps, self.plan.execution.state_format)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all ranks, padding included."""
        return self.recipe.batch.tokens * self.world.data_size

    def before_update(self) -> None:
        """Waits for what an update may change only then."""
        self.saver.before_update()
        self.is_updating = True

    def save(self) -> None:
        step, world = self.progress.step, self.world
        saving = self.recipe.saving
        if not saving.is_on or self.saved == step:
            return
        self.saved, self.saved_at = step, time.monotonic()
        state = None
        if saving.contents == "full":
            state = self.optimizer.state_dict()
        self.saver.begin(
            step,
            weights=self.optimizer.weights(frozen=self.recipe.trained.is_whole),
            model_config=to_config_json(self.recipe.model),
            declared=self.model.declared,
            optimizer_state=state,
            trainer_state=state_to_save(
                self.record,
                self.progress,
                self.step_tokens,
                world.data_size,
                self.recipe.tokenizer.identity,
            ),
        )

    def read_together(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields this rank's batches, as many on each rank. If a rank cannot read its next one, all
        save and fail."""
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
        """Go on without a step that is not finite, as often as the settings allow; raise UserError
        after that."""
        sources = ", ".join(
            self.loader.sources(self.progress.loader["next_sequence"], self.loader.next_sequence)[
                :10
            ]
        )
        if self.progress.skipped < self.recipe.optim.most_skipped:
            self.progress.skipped += 1
            logger.warning("step %d: %s, left out; documents: %s", step, error, sources)
            return
        self.save()  # the weights are as before this step, finite or refused
        self.saver.wait()
        last = f"the last good checkpoint: {self.saver.last or 'none'}"
        goes_on = "Go on from it" if self.saver.last else "Start again"
        cure = (
            f"{goes_on} with a lower --learning_rate, "
            "or leave such steps out with --skip_nonfinite_steps"
        )
        why = f"step {step}: {error}, stopped before the update; {last}"
        raise UserError(f"{why}. {cure}; documents of the step: {sources}") from None

    def promise_shutdown_once(self, seconds: float) -> None:
        """Says how long the run goes on after a signal, once a step has taken so many seconds."""
        taken = self.progress.step - self.recipe.start.progress.step
        if taken == 2 or (taken == 1 and seconds > LONG_FIRST_STEP_SECONDS):
            size = checkpoint_bytes(self.recipe, self.world, self.plan.execution.state_format)
            save_seconds = self.saver.seconds or size / SAVED_BYTES_PER_SECOND
            if not self.recipe.saving.is_on:
                save_seconds = 0.0
            promise_shutdown(self.stopping.look_seconds, save_seconds)

    def after_a_stop(self, last: Path | None) -> str:
        """Returns what to do after the run was stopped with this last checkpoint."""
        return after_a_stop(self.recipe.saving, self.recipe.flags_to_go_on, last, self.world)

    def save_after_error(self) -> None:
        """Saves the steps done, if this rank is the only one: others would wait in a collective."""
        self.display.close()  # ends the progress bar's line
        if self.world.size == 1 and not self.is_updating:
            try:
                self.save()
                if self.progress.step:
                    saved = self.saver.output_dir / f"step_{self.progress.step:08d}"
                    logger.info(self.after_a_stop(saved))
            except (
                Exception
            ) as error:  # a GPU may answer no more; the first error is the one to show
                logger.warning("no checkpoint of step %d: %s", self.progress.step, error)


def open_report(run: Run, warnings: RecentWarnings, stack: contextlib.ExitStack) -> None:
    """Begins the page of a run, on the main rank; the end of `stack` writes the last one."""
    if run.metrics is None:
        return
    recipe, world, plan = run.recipe, run.world, run.plan
    record = run.record | {"memory_budget": recipe.memory_budget}
    facts = {
        "model": f"{recipe.model_name}, {recipe.model.num_parameters():,} parameters",
        "objective": recipe.aim.name,
        "data": ", ".join(recipe.data.paths) or "sources of Python's standard library",
        "a step": f"{run.step_tokens:,} tokens, padding included",
        "device": f"{world.device.type} x {world.size}",
    }
    about = About(
        record,
        differing(record),
        facts,
        str(plan) if recipe.memory_budget is not None else "",
        run.loader.store.lengths,
        recipe.batch.context_length,
        run.progress.max_steps,
    )
    run.report = Report(recipe.saving.output_dir, about, run.progress.step, warnings)
    run.metrics.add(REPORT, run.report.write)
    stack.push(run.report.finish)


# Checkpoints, and the disk


def is_save_due(interval: Interval, step: int, since_save: float, has_failed: bool) -> bool:
    """Whether a checkpoint is due after a step, if the last one was begun `since_save` seconds ago,
    or has failed."""
    if 0 < interval.seconds < since_save or (has_failed and since_save > RETRY_SECONDS):
        return True
    return interval.steps > 0 and step % interval.steps == 0


def checkpoint_bytes(recipe: Recipe, world: World, planned: str | None = None) -> int:
    """Bytes of a checkpoint on disk: bf16 weights on GPUs, float32 on a CPU; the optimizer's state;
    what is carried.

    Weights and state are of what is trained. `planned` is the format of the state, once there is a
    plan.
    """
    numbers, is_cuda = recipe.trained.elements(recipe.model), world.device.type == "cuda"
    state_format = planned or recipe.state_format
    # Until the plan is made, which may choose compact, the least is counted.
    if state_format == "auto":
        state_format = "compact" if recipe.memory_budget else "float32"
    is_half, weight_bytes = is_cuda and world.size == 1, 2 if is_cuda else 4
    saved_format = state_format if recipe.saving.contents == "full" else None
    tensors = bytes_saved(numbers, saved_format, is_half=is_half, weight_bytes=weight_bytes)
    return tensors + recipe.start.carried.num_bytes + SPARE_BYTES


def check_disk(saving: Saving, progress: Progress, validates: bool, size: int) -> None:
    """Refuses a run for two of whose checkpoints, of `size` bytes, the disk has no room.

    Two are the last one and the one that takes its place. Checkpoints of the steps so far count as
    free: the run deletes them.

    Args:
        validates: whether the best checkpoint by a validation's loss is kept as well.
    """
    earlier = checkpoints(saving.output_dir, progress.step)
    # Without a step left, a validation that was cut short is made up for.
    steps_left = max(1, progress.max_steps - progress.step)
    saves = steps_left
    if not saving.interval.seconds:
        saves = 1 + (steps_left - 1) // (saving.interval.steps or steps_left)
    kept = saving.kept + validates + 1
    for least in (2, kept):
        needed = min(least, saves + len(earlier)) * size
        try:
            check_room(saving.output_dir, needed, size_on_disk(earlier))
        except OSError as error:
            if least == 2:
                or_else = "choose another --output_dir"
                if saving.contents == "full":
                    or_else += ", or --save model"
                raise UserError(f"{error.strerror}; free some space, {or_else}") from None
            logger.warning(
                "%s: old checkpoints will be deleted before new ones are complete", error.strerror
            )


# The sample


def log_sample(run: Run) -> None:
    """Logs what the model writes for a held-out document with a target, until its end or a signal.
    All ranks call this.

    A text is continued from its beginning. A sample or a chat is from its first target, as an
    assistant's turn.
    """
    documents = (
        run.held_out.read_masked(i, 0, length)
        for i, length in enumerate(run.held_out.lengths.tolist())
    )
    sample = next((pair for pair in documents if not pair[1][1:].all()), None)
    if sample is None:  # rollouts may have none
        return
    ids, masked = sample
    start = min(TEXT_TOKENS, len(ids) - 1)  # without the document's end
    if is_sample := bool(masked.any()):
        start = 1 + int(np.argmin(masked[1:]))
    prompt, written = ids[max(0, start - PROMPT_TOKENS) : start], list[int]()
    stops = stop_ids(run.recipe.tokenizer, is_sample)
    homes = run.optimizer.homes.values()
    if (
        fetched := sum(home.nbytes for home in homes if home.device.type != run.world.device.type)
        / GIB
    ):
        logger.info(
            "sample: each token fetches %.1f GiB of weights from the host; --sample_tokens 0: none",
            fetched,
        )
    generator = torch.Generator(run.world.device).manual_seed(run.recipe.start.seed)
    ids_BT = torch.from_numpy(prompt).to(run.world.device)[None]
    # Each layer and length would be compiled anew.
    with torch.compiler.set_stance("force_eager"), products_in_bf16(run.model):
        for next_B1 in run.model.next_tokens(
            ids_BT, run.recipe.schedule.sample_tokens, temperature=0.8, generator=generator
        ):
            if any(run.world.sum(int(next_B1) in stops)):
                break
            written.append(int(next_B1))
            if run.stopping.is_asked():
                break
    before, after = (
        run.recipe.tokenizer.decode(part, with_special=is_sample)
        for part in (prompt.tolist(), written)
    )
    if run.report is not None:
        run.report.sample = before, after
    cut = f"the last {len(prompt):,} tokens of " if len(prompt) < start else ""
    logger.info(
        "sample, after %sa held-out prompt:\n%s<<<the prompt ends here>>>%s", cut, before, after
    )
