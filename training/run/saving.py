"""Says when a run saves and how large its checkpoints are, and refuses a run that the disk has no room for."""

import logging
from pathlib import Path

from training.checkpoint.files import SPARE_BYTES, check_room, checkpoints
from training.host.errors import UserError
from training.host.files import size_on_disk
from training.optim.formats import bytes_saved
from training.parallel.world import World
from training.run.recipe import Recipe
from training.run.resume import Progress
from training.run.settings import KEPT_CHECKPOINTS

logger = logging.getLogger(__name__)
RETRY_SECONDS = 60  # from a checkpoint that failed to the next attempt


def is_save_due(recipe: Recipe, step: int, since_save: float, has_failed: bool) -> bool:
    """Whether a checkpoint is due after a step, if the last one was begun `since_save` seconds ago, or has failed."""
    steps, seconds = recipe.save_interval
    is_time = 0 < seconds < since_save or (has_failed and since_save > RETRY_SECONDS)
    return is_time or (steps > 0 and step % steps == 0)


def checkpoint_bytes(recipe: Recipe, world: World, planned: str | None = None) -> int:
    """Bytes of a checkpoint on disk: bf16 weights on GPUs, float32 on a CPU; the optimizer's state; what is carried.

    Weights and state are of what is trained. `planned` is the format of the state, once there is a plan.
    """
    numbers, is_cuda = recipe.trained.elements(recipe.model), world.device.type == "cuda"
    state_format = planned or recipe.state_format
    if state_format == "auto":  # until the plan is made, which may choose compact, the least is counted
        state_format = "compact" if recipe.memory_budget else "float32"
    is_half, weight_bytes = is_cuda and world.size == 1, 2 if is_cuda else 4
    saved_format = state_format if recipe.config.save == "full" else None
    tensors = bytes_saved(numbers, saved_format, is_half=is_half, weight_bytes=weight_bytes)
    return tensors + recipe.carried.num_bytes + SPARE_BYTES


def check_disk(recipe: Recipe, progress: Progress, size: int) -> None:
    """Refuse a run for two of whose checkpoints, of `size` bytes, the disk has no room.

    Two are the last one and the one that takes its place. Checkpoints of the steps so far count as free: the run
    deletes them.
    """
    config, (steps, seconds) = recipe.config, recipe.save_interval
    output_dir = Path(config.output_dir)
    found = checkpoints(output_dir, progress.step)
    # Without a step left, a validation that was cut short is made up for.
    steps_left = max(1, progress.max_steps - progress.step)
    saves = steps_left if seconds else 1 + (steps_left - 1) // (steps or steps_left)
    kept = (config.keep_checkpoints or KEPT_CHECKPOINTS) + (config.validation_sequences != 0) + 1
    for least in (2, kept):
        try:
            check_room(output_dir, min(least, saves + len(found)) * size, size_on_disk(found))
        except OSError as error:
            if least == 2:
                or_else = "choose another --output_dir" + ", or --save model" * (config.save == "full")
                raise UserError(f"{error.strerror}; free some space, {or_else}") from None
            logger.warning("%s: old checkpoints will be deleted before new ones are complete", error.strerror)
