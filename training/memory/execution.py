"""How a step is run, apart from the model's shape: what the planner searches, the cost model prices, the plan prints,
`training.memory.placement.apply_execution` applies and the profiler measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.common import IMPLEMENTATIONS
from kernels.parts import AttentionKind

PLACES = ("gpu", "host", "recompute")
LOSSES = ("auto", "chunked", "standard")


@dataclass(frozen=True)
class Placement:
    """Where one block's activations wait for backward.

    Args:
        input: "gpu", "host", or "recompute": from the input of the block before it, by running that block again.
        results: of the operations that `kernels.common.operation` calls keepable, such as attention: "gpu", "host" or
            "recompute".
        rest: all its other activations, "gpu" or "recompute". On the GPU they need the two above there.

    Raises:
        ValueError: another place.
    """

    input: str = "gpu"
    results: str = "recompute"
    rest: str = "recompute"

    def __post_init__(self):
        for name, places in (("input", PLACES), ("results", PLACES), ("rest", ("gpu", "recompute"))):
            if getattr(self, name) not in places:
                raise ValueError(f"{name} must be placed in one of {', '.join(places)}, got {getattr(self, name)!r}")
        if self.is_whole and (self.input, self.results) != ("gpu", "gpu"):
            raise ValueError(
                f"rest on gpu needs input and results there, got {self.input} and {self.results}; "
                "place them on gpu, or rest in recompute"
            )

    @property
    def is_whole(self) -> bool:
        """Whether the block is left to autograd, which keeps all of it."""
        return self.rest == "gpu"


WHOLE = Placement("gpu", "gpu", "gpu")


@dataclass(frozen=True)
class Execution:
    """How a step is run.

    Args:
        placements: one a block; those of a model whose placements are yet to be chosen are ().
        mlp_tile_size: rows that the MLP of a block works on at a time; None: all.
        heads_at_a_time: key/value heads that the attention of a block works on at a time; None: all. Blocks that
            are left whole to autograd work on all heads at once, and on all rows whatever mlp_tile_size is.
        gpu_state_bytes: bytes of the optimizer's masters and moments that stay on the GPU, see
            training.optimizer.MasterAdamW.
        loss_impl: "auto" switches by the size of the logits; "chunked" or "standard" force one.
        attention_backend: kernel that attends, see kernels.attention.full.BACKENDS.
        kinds: how each block attends; (): as the model's configuration says.
        impl: Triton's kernels or their PyTorch references, of kernels.common.IMPLEMENTATIONS.

    Raises:
        ValueError: another loss or implementation.
    """

    placements: tuple[Placement, ...] = ()
    mlp_tile_size: int | None = None
    heads_at_a_time: int | None = None
    gpu_state_bytes: float = math.inf
    loss_impl: str = "auto"
    attention_backend: str = "auto"
    kinds: tuple[AttentionKind, ...] = ()
    impl: str = "auto"

    def __post_init__(self):
        if self.loss_impl not in LOSSES:
            raise ValueError(f"loss_impl must be one of {', '.join(LOSSES)}, got {self.loss_impl!r}")
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {self.impl!r}")


def needed_for_backward(placements: Sequence[Placement], layer: int) -> list[tuple[int, str]]:
    """What block `layer` is rebuilt from: pairs (block, "input" or "results"), the input it starts from first.

    A whole block is not rebuilt: nothing.
    """
    if placements[layer].is_whole:
        return []
    start = layer
    while placements[start].input == "recompute":
        start -= 1
    blocks = range(start, layer + 1)
    return [(start, "input"), *((i, "results") for i in blocks if placements[i].results != "recompute")]
