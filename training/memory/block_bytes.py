"""Bytes of a block of a step: kept for backward, alive at its fullest moment, and sent to the host.

Operations declare their bytes in their own files, see `kernels.parts.Footprint`. This file adds them up.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

from kernels.gated_mlp import gated_mlp_footprint
from kernels.parts import Footprint, LayerParts
from training.families.lora import Adapters
from training.memory.execution import Execution, Placement
from training.memory.step import StepShape

QKV, INTO_MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# A search for a plan asks for the same few footprints many thousand times.
_mlp_footprint = functools.cache(gated_mlp_footprint)


@functools.cache
def _mixer_footprint(mixer, *sizes: int, **options) -> Footprint:
    return mixer.footprint(*sizes, **options)


def results_bytes(step: StepShape, parts: LayerParts) -> int:
    """Returns the bytes of the results that the attention of a block can keep."""
    return footprints(step, step.given, parts)[0].keepable


def sent_bytes(step: StepShape, placement: Placement, parts: LayerParts) -> tuple[int, int]:
    """Returns the bytes that a block sends to the host: its input, results of attention."""
    return (
        step.input_bytes if placement.input == "host" else 0,
        results_bytes(step, parts) if placement.results == "host" else 0,
    )


def norms_bytes(step: StepShape) -> tuple[int, int]:
    """Bytes that a block's norms keep for backward, in its attention and in its MLP.

    They are 1 / rms of each token, float32, the residual sum, and the inputs of norms after attention and MLP.
    Without norms before, attention's input is the block's own, and the MLP's is the residual sum.
    """
    share, x = step.share, step.input_bytes
    same = 0 if share.norms_before else x
    return 4 * step.norms_per_layer * step.tokens - same, x + 2 * x * share.norms_after - same


def footprints(step: StepShape, execution: Execution, parts: LayerParts) -> tuple[Footprint, Footprint]:
    """Returns the footprints of a block's attention and of its MLP under an execution."""
    attention, mlp, share, longest = parts.mixer, parts.mlp, step.share, None
    if step.is_packed:
        longest = step.documents.longest if step.documents else step.context_length
    declared = (
        _mixer_footprint(
            attention, step.tokens, share.hidden_size, element_size=step.element_size,
            backend=execution.attention_backend, context_length=step.context_length, longest=longest,
            heads_at_a_time=execution.heads_at_a_time, num_ranks=step.num_ranks, linear=execution.linear,
        ),
        _mlp_footprint(
            step.tokens, share.hidden_size, mlp.intermediate_size, element_size=step.element_size,
            tile_size=execution.mlp_tile_size, skippable=not share.norms_after, linear=execution.linear,
        ),
    )  # fmt: skip
    return declared if step.adapters is None else with_adapters(step, step.adapters, execution, parts, *declared)


def with_adapters(
    step: StepShape, adapters: Adapters, execution: Execution, parts: LayerParts, attention: Footprint, mlp: Footprint
) -> tuple[Footprint, Footprint]:
    """Returns the footprints where a projection with an adapter keeps x and x A^T, and a frozen one nothing.

    Attention of some heads at a time, and the MLP in tiles, keep their input in any case, and no x A^T.
    """
    share, unit, (H, _, K) = step.share, step.element_size * step.tokens, parts.mixer.heads

    def changed(footprint: Footprint, first: Sequence[str], x: int, last: str, y: int) -> Footprint:
        """Returns a part's footprint. x and y are bytes of inputs that its first and its last projections keep."""
        x, y = (0 if adapts(step, *first) else x), (0 if adapts(step, last) else y)
        thin = unit * adapters.rank * len({*first, last}.intersection(adapters.targets))
        # Backward counts on the end of y, which gives its memory back.
        return replace(footprint, saved=footprint.saved - x - y + thin, backward=footprint.backward + y)

    if not execution.heads_at_a_time:
        # Otherwise the output projection keeps attention's own output, which is there in any case.
        has_own_input = parts.mixer.kind.branches > 1 or step.num_ranks > 1
        output = unit * H * K * has_own_input
        attention = changed(attention, QKV, step.input_bytes * share.norms_before, "o_proj", output)
    if not execution.mlp_tile_size:
        mlp = changed(mlp, INTO_MLP, step.input_bytes, "down_proj", unit * parts.mlp.intermediate_size)
    return attention, mlp


def adapts(step: StepShape, *projections: str) -> bool:
    """Whether one of these projections is trained: by its adapter, or because there are no adapters."""
    return step.adapters is None or not {*projections}.isdisjoint(step.adapters.targets)


def block_bytes(
    step: StepShape, execution: Execution, placement: Placement, parts: LayerParts
) -> list[tuple[int, int]]:
    """Returns bytes (of attention, of the MLP) at a block's fullest: in forward, the MLP's backward, attention's.

    They include the block's kept results, but not its input. `x` are the bytes of the hidden states.
    """
    x, whole = step.input_bytes, placement.is_whole
    attention, mlp = footprints(
        step, replace(execution, heads_at_a_time=None, mlp_tile_size=None) if whole else execution, parts
    )
    norms, mlp_norms = norms_bytes(step)
    saved = attention.saved + norms
    if whole:  # x: the residual sum; 3 x: outputs of attention, MLP and block, the last after the MLP's factors
        linear, D, F = execution.linear, step.share.hidden_size, parts.mlp.intermediate_size
        factors, raw = linear.factor_bytes(D, F), step.element_size * (D + F)
        if linear.kept_bytes(1, D + F, step.element_size) != raw:  # backward keeps factors, not inputs
            factors += step.tokens * raw
        needed = mlp.saved + max(3 * x, 2 * x + factors)
        if step.adapters is not None:  # inputs of frozen projections exist as well, though they are not kept
            running = mlp.forward + (3 - step.share.norms_after) * x  # a norm's input is in mlp_norms
            running += linear.factor_bytes(step.tokens, F) + linear.factor_bytes(D, F)
            needed = max(needed + (0 if adapts(step, *INTO_MLP) else x), running)
        forward = saved, mlp_norms + needed
    else:
        kept = attention.choices + (attention.keepable if placement.results != "recompute" else 0)
        # 3 x: attention's output, the residual sum and its norm. Then the MLP's working memory, or 2 x: the outputs
        # of MLP and block.
        forward = kept, 3 * x + max(mlp.forward, 2 * x)
        attending = x * step.share.norms_before + attention.forward  # attention works on its norm's output
        if step.num_ranks > 1 and not execution.heads_at_a_time:
            # Attention's output, as it is sent and as it is received. The output of a single branch may be kept.
            H, _, K = parts.mixer.heads
            output = step.element_size * H * K * step.tokens
            is_kept = placement.results != "recompute" and parts.mixer.kind.branches == 1
            attending = max(attending, x + kept + (2 if is_kept else 3) * output)
        if attending > sum(forward):
            forward = attending, 0
    # 2 * x: the gradient of the block's output, and the residual sum. A placed block was just rebuilt, and the
    # outputs of its attention and of the block still exist.
    after = x * (step.share.norms_after and whole)  # the MLP's output, gone when its norm has made its gradient
    mlp_backward = saved, x + mlp_norms + mlp.saved + max(mlp.backward - after, after if whole else 2 * x)
    if step.share.residual_multiplier != 1 and not whole:  # gradients of the MLP's and of attention's own outputs
        mlp_backward = saved, mlp_backward[1] + (x if execution.mlp_tile_size else 0)
        saved += x if execution.heads_at_a_time else 0
    if placement.results == "recompute" and attention.forward > sum(mlp_backward) - 2 * x:
        mlp_backward = x + attention.forward, x  # attention runs again
    rebuilt = 0 if whole else x * (1 + (step.norms_per_layer > 2))  # outputs of attention, and of its norm
    return [forward, mlp_backward, (saved + attention.backward, x + rebuilt)]


def waiting_bytes(step: StepShape, placement: Placement, parts: LayerParts) -> tuple[int, int, int]:
    """Returns the bytes that a block keeps on the GPU for backward: its input, of attention and of the MLP."""
    attention, mlp = footprints(step, step.given, parts)
    if placement.is_whole:
        norms, mlp_norms = norms_bytes(step)
        return step.input_bytes, attention.saved + norms, mlp_norms + mlp.saved
    results = attention.keepable if placement.results == "gpu" else 0
    return step.input_bytes if placement.input == "gpu" else 0, results + attention.choices, 0


def adapter_bytes(step: StepShape) -> int:
    """Returns the bytes of x A^T and dy B of q, k and v together, the widest that exist at a time."""
    return 2 * 3 * step.adapters.rank * step.element_size * step.tokens if step.adapters else 0


def adapter_traffic(step: StepShape, layer: int) -> tuple[int, int]:
    """Returns the bytes that adapters of a block read and write, in forward and in backward.

    Forward reads x and writes y. Backward reads dy and writes dx, then reads both factors of each gradient.
    """
    if step.adapters is None:
        return 0, 0
    rows, columns = (sum(sizes) for sizes in zip(*step.adapters.widths(step.share, layer).values()))
    unit = step.element_size * step.tokens
    return unit * (columns + rows), unit * 3 * (columns + rows)
