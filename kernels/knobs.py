"""Attributes of model.py's modules that training sets from outside: placement, parallelism, FP8."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from .head_exchange import HeadExchange
from .linear import PLAIN, Linear
from .tensor_parallel import TensorRanks


class Knobs:
    """Mixin of a module. A module reads the attributes that concern it, and ignores the rest."""

    impl = "auto"  # see kernels.common.IMPLEMENTATIONS
    linear: Linear = PLAIN  # the linear maps
    tensor_ranks = TensorRanks(None)  # ranks that share the module's matrices
    exchange: HeadExchange | None = None  # ranks that share sequences; needs `documents`
    backend = "auto"  # attention's kernel, see kernels.attention.libraries.BACKENDS
    heads_at_a_time: int | None = None  # key/value heads that attention computes; None: all
    tile_size: int | None = None  # rows that an MLP computes at a time; None: all
    read_once = False  # whether one operation reads a norm's result, see kernels.rms_norm
    loss_impl = "auto"  # the head's loss; "chunked" or "standard" force one
    head_visit: Callable[[], AbstractContextManager] = nullcontext  # brings the head's matrix
