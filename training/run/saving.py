"""Says when a run saves and how large its checkpoints are, and refuses a run that the disk has no room for."""

import logging
import math
from pathlib import Path

from model import ModelConfig
from training.checkpoint.carried import NOTHING, Carried
from training.checkpoint.files import SPARE_BYTES, check_room, checkpoints
from training.checkpoint.weights import parameter_shapes
from training.host.errors import UserError
from training.host.files import size_on_disk
from training.optim.formats import bytes_saved
from training.parallel.world import World
from training.run.build import adapters_of
from training.run.settings import CHECKPOINT_INTERVAL, KEPT_CHECKPOINTS, TrainConfig, parse_interval

logger = logging.getLogger(__name__)
RETRY_SECONDS = 60  # from a checkpoint that failed to the next attempt


def is_save_due(config: TrainConfig, step: int, since_save: float, has_failed: bool) -> bool:
    """Whether a checkpoint is due after a step, if the last one was begun `since_save` seconds ago, or has failed."""
    steps, seconds = parse_interval(config.checkpoint_interval or CHECKPOINT_INTERVAL)
    is_time = 0 < seconds < since_save or (has_failed and since_save > RETRY_SECONDS)
    return is_time or (steps > 0 and step % steps == 0)


def checkpoint_bytes(config: TrainConfig, model_config: ModelConfig, world: World, carried: Carried = NOTHING) -> int:
    """Bytes of a checkpoint on disk: bf16 weights on GPUs, float32 on a CPU; the optimizer's state; what is carried.

    Weights and state are of the adapters alone, if the run trains adapters.
    """
    numbers, is_cuda = model_config.num_parameters(), world.device.type == "cuda"
    if adapters := adapters_of(config):
        numbers = sum(map(math.prod, adapters.shapes(parameter_shapes(model_config)).values()))
    state_format = config.optimizer_state if config.save == "full" else None
    if state_format == "auto":  # until the plan is made, which may choose compact, the least is counted
        state_format = "compact" if config.memory_budget else "float32"
    is_half, weight_bytes = is_cuda and world.size == 1, 2 if is_cuda else 4
    tensors = bytes_saved(numbers, state_format, is_half=is_half, weight_bytes=weight_bytes)
    return tensors + carried.num_bytes + SPARE_BYTES


def check_disk(config: TrainConfig, step: int, size: int) -> None:
    """Refuse a run from `step` on for two of whose checkpoints, of `size` bytes, the disk has no room.

    Two are the last one and the one that takes its place. Checkpoints up to `step` count as free: the run deletes them.
    """
    output_dir = Path(config.output_dir)
    found = checkpoints(output_dir, step)
    steps, seconds = parse_interval(config.checkpoint_interval or CHECKPOINT_INTERVAL)
    assert config.max_steps is not None, "with_defaults fills it in"
    steps_left = max(1, config.max_steps - step)  # without a step left, a validation that was cut short is made up
    saves = steps_left if seconds else 1 + (steps_left - 1) // (steps or steps_left)
    kept = (config.keep_checkpoints or KEPT_CHECKPOINTS) + (config.validation_sequences != 0) + 1
    try:
        check_room(output_dir, min(2, saves + len(found)) * size, size_on_disk(found))
    except OSError as error:
        or_else = "choose another --output_dir" + ", or --save model" * (config.save == "full")
        raise UserError(f"{error.strerror}; free some space, {or_else}") from None
    try:
        check_room(output_dir, min(kept, saves + len(found)) * size, size_on_disk(found))
    except OSError as error:
        logger.warning("%s: old checkpoints will be deleted before new ones are complete", error.strerror)
