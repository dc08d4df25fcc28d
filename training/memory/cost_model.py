"""The cost model predicts the bytes and seconds of a training step under an execution.

It adds up the bytes of blocks, which `dry_run.py` measures, stage by stage, see `stages.py`; and
the work that parts declare in their own files to seconds, phase by phase, see `timeline.py`.
"""

from collections import Counter
from collections.abc import Sequence

from kernels.parts import MixerKind
from model import ModelConfig
from training.host.memory import SLOT_ALIGNMENT
from training.memory.dry_run import sent_bytes
from training.memory.execution import Execution
from training.memory.machine import Rates
from training.memory.stages import Stage, Stages
from training.memory.step import Step
from training.memory.timeline import timeline


def arena_bytes(step: Step, execution: Execution) -> int:
    """Returns the bytes of `apply_execution`'s pinned arena, with every slot aligned."""
    total = 0
    for (placement, parts), count in Counter(zip(execution.placements, step.parts)).items():
        slots = int(placement.input == "host")
        if placement.results == "host":
            slots += parts.mixer.kind.branches
        total += count * (sum(sent_bytes(step, placement, parts)) + 2 * SLOT_ALIGNMENT * slots)
    return total


def pinned_bytes(step: Step, execution: Execution) -> int:
    """Returns the bytes of pinned host memory, for activations and for the optimizer."""
    return arena_bytes(step, execution) + step.inventory(execution).host


def fullest_stage(step: Step, execution: Execution) -> Stage:
    """Returns the stage with the most bytes."""
    return max(Stages(step, execution), key=lambda stage: stage.bytes)


def step_seconds(step: Step, execution: Execution, rates: Rates) -> float:
    """Returns the seconds of one whole step, its update included."""
    return sum(phase.times * phase.seconds for phase in timeline(step, execution, rates))


def forward_flops(
    shard: ModelConfig,
    document_lengths: Sequence[int],
    kinds: Sequence[MixerKind] = (),
    num_targets: int | None = None,
    trains_matrices: bool = True,
    prompts: Sequence[tuple[int, int, int]] = (),
) -> float:
    """Returns the floating-point operations of one forward over documents of these lengths,
    attention causal.

    They are a third of a training step's, without recomputed activations (model FLOPs). Where
    matrices are frozen, a step needs two products of each. The head predicts `num_targets` tokens;
    None: all. `prompts` are as in `kernels.attention.documents.Documents`; `document_lengths` has
    prompts and answers as well.
    """
    matrices = sum(map(shard.layer_active_parameters, range(shard.num_hidden_layers)))
    tokens = sum(document_lengths)
    head = shard.vocab_size * shard.hidden_size * (tokens if num_targets is None else num_targets)
    mixers = Counter(parts.mixer for parts in shard.all_parts(kinds))
    lengths = document_lengths
    attention = sum(
        n * mixer.kind.forward_flops(lengths, *mixer.heads, prompts) for mixer, n in mixers.items()
    )
    return 2 * (matrices * tokens + head) * (1 if trains_matrices else 2 / 3) + attention
