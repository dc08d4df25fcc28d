"""Bytes of a block of a step that wait for backward or are sent to the host, and the work of its parts.

Bytes at a block's fullest moments are measured, see `training.memory.dry_run`.
"""

import functools

from kernels.parts import LayerParts, Work
from training.memory.dry_run import block_bytes
from training.memory.execution import Execution, Placement
from training.memory.step import StepShape


def results_bytes(step: StepShape, parts: LayerParts) -> tuple[int, int]:
    """Returns the bytes of the mixer's results, which a block can keep, and of its choices, which it always keeps."""
    return _results_bytes(parts, step.tokens, step.element_size)


@functools.lru_cache(maxsize=8192)  # a search for a plan asks for the same few many thousand times
def _results_bytes(parts: LayerParts, tokens: int, element_size: int) -> tuple[int, int]:
    return parts.mixer.results_bytes(tokens, element_size)


def sent_bytes(step: StepShape, placement: Placement, parts: LayerParts) -> tuple[int, int]:
    """Returns the bytes that a block sends to the host: its input, results of attention."""
    return (
        step.input_bytes if placement.input == "host" else 0,
        results_bytes(step, parts)[0] if placement.results == "host" else 0,
    )


def waiting_bytes(step: StepShape, placement: Placement, parts: LayerParts) -> tuple[int, int, int]:
    """Returns the bytes that a block keeps on the GPU for backward: its input, of attention and of the MLP."""
    if placement.is_whole:
        return step.input_bytes, *block_bytes(step, step.given, placement, parts).kept
    results, choices = results_bytes(step, parts)
    kept = results if placement.results == "gpu" else 0
    return step.input_bytes if placement.input == "gpu" else 0, kept + choices, parts.mlp.choice_bytes(step.tokens)


def work(step: StepShape, execution: Execution, parts: LayerParts) -> list[Work]:
    """Returns the work of the linear maps in a block's mixer and in its MLP under an execution."""
    sizes, is_skippable = (step.tokens, step.share.hidden_size, step.element_size), not step.share.norms_after
    return [part.linear_work(*sizes, tile_size=execution.mlp_tile_size, is_skippable=is_skippable) for part in parts]
