"""The execution of a step: how the step is run, apart from the model's shape.

The planner searches executions, the cost model prices them, and the plan prints the chosen one.
`training.memory.placement.apply_execution` applies it to a model, and the profiler measures it.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.linear import PLAIN, Linear
from kernels.parts import MixerKind, Parameter
from training.memory.flags import LOSSES
from training.optim.formats import FROZEN, StateFormat
from training.optim.inventory import Inventory

PLACES = ("gpu", "host", "recompute")


@dataclass(frozen=True)
class Placement:
    """The places where one block's activations wait for backward, and where its weights live.

    Places are "gpu", "host", and for activations "recompute", to be computed again. The last norm
    has no placement: its weights stay on the GPU. So do all weights on several GPUs.
    `Execution.ends` places embedding and head.

    Raises ValueError for a place that does not exist, or `rest` on the GPU without input, results
    and weights.
    """

    input: str = "gpu"  # "recompute" runs the block before it again
    results: str = "recompute"  # results of the operations that `kernels.common` calls keepable
    # all other activations; "gpu" needs input and results there, "host" does not exist
    rest: str = "recompute"
    # on the "host" with their optimizer's state; on the GPU while the block runs
    weights: str = "gpu"

    def __post_init__(self):
        allowed = {"rest": ("gpu", "recompute"), "weights": ("gpu", "host")}
        for name, place in vars(self).items():
            places = allowed.get(name, PLACES)
            if place not in places:
                raise ValueError(
                    f"{name} must be placed in one of {', '.join(places)}, got {place!r}"
                )
        if self.is_whole and (self.input, self.results) != ("gpu", "gpu"):
            got = f"{self.input} and {self.results}"
            raise ValueError(
                f"rest on gpu needs input and results there, got {got}; place them on gpu"
            )
        if self.is_whole and self.weights != "gpu":
            raise ValueError("rest on gpu needs weights there, got host; place them on gpu")

    @property
    def is_whole(self) -> bool:
        """Whether the block is left to autograd, which keeps all of its activations."""
        return self.rest == "gpu"


WHOLE = Placement("gpu", "gpu", "gpu")


@dataclass(frozen=True)
class Execution:
    """Choices of how a step is run.

    Raises ValueError for unknown values, or ends on the host without the chunked loss.
    """

    placements: tuple[Placement, ...] = ()  # one per block; () as long as none are chosen
    # tokens that a block's MLP works on at a time; None, and in whole blocks: all
    mlp_tile_size: int | None = None
    # key/value heads that attend at a time; None, and in whole blocks: all
    heads_at_a_time: int | None = None
    # masters and moments that stay on the GPU, see `Inventory.of`
    gpu_state_bytes: float = math.inf
    # the optimizer's, see training.optim.formats; "auto": not chosen yet
    state_format: str = "float32"
    # "auto" switches by the size of the logits; "chunked" and "standard" force a loss
    loss_impl: str = "auto"
    # the library kernel that attends, a name in kernels.attention.libraries.BACKENDS
    attention_backend: str = "auto"
    # how each block attends; (): as the model's configuration says
    kinds: tuple[MixerKind, ...] = ()
    linear: Linear = PLAIN  # the linear map of all blocks, which names the head's
    # Format of the blocks' frozen matrices. Where it holds the weight, the parameter has memory
    # during a visit alone, so no block can be whole.
    frozen: StateFormat = FROZEN
    # Triton kernels or their PyTorch references, a name in kernels.common.IMPLEMENTATIONS
    impl: str = "auto"
    # Place of the weights of embedding and head, as `Placement.weights`. On the "host" they need
    # the chunked loss, which runs the head forward and backward in one visit.
    ends: str = "gpu"

    def __post_init__(self):
        if self.loss_impl not in LOSSES:
            raise ValueError(
                f"loss_impl must be one of {', '.join(LOSSES)}, got {self.loss_impl!r}"
            )
        if self.ends not in ("gpu", "host"):
            raise ValueError(f"ends must be one of gpu, host, got {self.ends!r}")
        if self.ends == "host" and self.loss_impl != "chunked":
            raise ValueError(
                f"ends on the host need loss_impl chunked, got {self.loss_impl}; place them on gpu"
            )

    @functools.cached_property
    def places_of_weights(self) -> tuple[str, ...]:
        """Places of each block's weights."""
        return tuple(placement.weights for placement in self.placements)

    @property
    def num_visiting(self) -> int:
        """Blocks whose weights wait on the host."""
        return self.places_of_weights.count("host")

    @functools.cached_property
    def needed(self) -> list[list[tuple[int, str]]]:
        """Activations that backward needs to rebuild each block, see `needed_for_backward`."""
        layers = range(len(self.placements))
        return [needed_for_backward(self.placements, layer) for layer in layers]

    @property
    def maps_in_words(self) -> str | None:
        """Names the linear maps of blocks and head; None: all are bf16's."""
        if self.linear.products == PLAIN.products:
            return None
        costs = "; costs some loss, see docs/memory.md" * (self.linear.products[0] != PLAIN)
        return f"{self.linear.name}, head {self.linear.head.name}{costs}"


def inventory_of(
    named_parameters: Iterable[tuple[str, Tensor]],
    declared: Mapping[str, Parameter],
    execution: Execution,
    *,
    accumulate: bool,
) -> Inventory:
    """Returns this rank's parameters of a model.Transformer under an execution."""
    return Inventory.of(
        named_parameters,
        declared,
        accumulate=accumulate,
        gpu_state_bytes=execution.gpu_state_bytes,
        state_format=execution.state_format,
        host_weights=host_weights(declared, execution.places_of_weights, execution.ends),
        frozen=execution.frozen,
    )


def host_weights(declared: Mapping[str, Parameter], places: Sequence[str], ends: str) -> list[str]:
    """Returns names of weights on the host, by the `places` of each block's and `ends` of embedding
    and head."""
    away: set[int | None] = {block for block, place in enumerate(places) if place == "host"}
    if ends == "host":
        away.add(None)
    return [
        name
        for name, parameter in declared.items()
        if parameter.block in away and (parameter.block is not None or parameter.is_matrix)
    ]


def needed_for_backward(placements: Sequence[Placement], layer: int) -> list[tuple[int, str]]:
    """Returns what backward needs to rebuild block `layer`: pairs (block, "input" or "results"), an
    input first.

    If the input of block 2 is recomputed from block 1, and both blocks keep their results, then
    block 2 needs [(1, "input"), (1, "results"), (2, "results")]. A whole block is not rebuilt: [].
    """
    if placements[layer].is_whole:
        return []
    start = layer
    while placements[start].input == "recompute":
        start -= 1
    blocks = range(start, layer + 1)
    return [
        (start, "input"),
        *((i, "results") for i in blocks if placements[i].results != "recompute"),
    ]
