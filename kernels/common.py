"""What the kernels share: the choice between Triton and the PyTorch reference, and what their operations declare."""

import inspect
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

IMPLEMENTATIONS = ("auto", "triton", "torch")
DTYPES = torch.float32, torch.bfloat16, torch.float16  # that Triton's kernels take
SKIPPABLE: set[str] = set()
_default = "auto"


class Keepable(NamedTuple):
    """What `operation` was told of the results of an operation that are worth keeping."""

    kind: str  # "results" or "choices"
    choice: int | None  # the position of the argument that takes a kept choice

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,) if self.choice is None else (self.kind, "choices")


KEEPABLE: dict[str, Keepable] = {}  # by the operation's name


def operation(
    name: str, *, keepable: str | None = None, chooses: str | None = None, skippable: bool = False
) -> Callable:
    """Decorator: `torch.library.custom_op` without mutated arguments, known to activation checkpointing.

    Activation checkpointing runs a block's forward again in backward, to rebuild the block's graph. Operations that are
    declared keepable or skippable need not run in this second forward.

    Args:
        name: "fathom::...".
        keepable: its results are worth keeping from forward to backward, where they stand in for a second run:
            "results" where a block's placement says so, "choices" always and on the GPU.
        chooses: name of an argument, for an operation whose last result is a choice and whose others are "results".
            It is None where the operation chooses. Where only the choice was kept, it is given to the second run,
            whose own last result is of no importance.
        skippable: no gradient depends on the operation's result, which is only added to the residual stream.
    """

    def register(function: Callable):
        if keepable:
            choice = [*inspect.signature(function).parameters].index(chooses) if chooses else None
            KEEPABLE[name] = Keepable(keepable, choice)
        if skippable:
            SKIPPABLE.add(name)
        return torch.library.custom_op(name, function, mutates_args=())

    return register


def set_default_implementation(impl: str) -> None:
    """Make `impl` ("auto", "triton" or "torch") what `impl="auto"` means from now on (train.py's `--kernels`)."""
    global _default
    _check(impl)
    _default = impl


def use_triton(impl: str, tensor: torch.Tensor) -> bool:
    """True if the Triton path is to run on `tensor`'s device, False for the PyTorch reference.

    "auto" is Triton on CUDA and the reference elsewhere. "triton" on a CPU tensor needs Triton's interpreter.

    Raises:
        ValueError: unknown `impl`, or Triton for a device where it cannot run or a dtype that its kernels do not take.
    """
    _check(impl)
    if impl == "auto":
        impl = _default
    if impl == "torch" or (impl == "auto" and not tensor.is_cuda):
        return False
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'impl="triton" needs CUDA tensors, got {tensor.device}; '
            'use impl="torch", or set TRITON_INTERPRET=1 before the import to run Triton\'s interpreter'
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(f'Triton\'s kernels take float32, bfloat16 or float16, got {tensor.dtype}; use impl="torch"')
    return True


def _check(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
