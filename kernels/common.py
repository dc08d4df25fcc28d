"""What the kernels share: the choice between Triton and the PyTorch reference, and what their operations declare."""

import os
from collections.abc import Callable

import torch

IMPLEMENTATIONS = ("auto", "triton", "torch")
KEEPABLE: set[str] = set()  # names of the operations that `operation` was told so of
SKIPPABLE: set[str] = set()
_default = "auto"


def operation(name: str, *, keepable: bool = False, skippable: bool = False) -> Callable:
    """Decorator: `torch.library.custom_op` without mutated arguments, known to activation checkpointing.

    A checkpointed block runs its forward again in backward, for the graph. What an operation declares saves work there.

    Args:
        name: "fathom::...".
        keepable: its results are worth keeping from forward to backward, where they stand in for a second run.
        skippable: no gradient depends on its result, which is only added to the block's: there it need not run.
    """
    if keepable:
        KEEPABLE.add(name)
    if skippable:
        SKIPPABLE.add(name)
    return torch.library.custom_op(name, mutates_args=())


def set_default_implementation(impl: str) -> None:
    """Make `impl` ("auto", "triton" or "torch") what `impl="auto"` means from now on (train.py's `--kernels`)."""
    global _default
    _check(impl)
    _default = impl


def use_triton(impl: str, tensor: torch.Tensor) -> bool:
    """True if the Triton path is to run on `tensor`'s device, False for the PyTorch reference.

    "auto" is Triton on CUDA and the reference elsewhere. "triton" on a CPU tensor needs Triton's interpreter.

    Raises:
        ValueError: unknown `impl`, or Triton asked for on a device where it cannot run.
    """
    _check(impl)
    if impl == "auto":
        impl = _default
    if impl == "auto":
        return tensor.is_cuda
    if impl == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'impl="triton" needs CUDA tensors, got {tensor.device}; '
            'use impl="torch", or set TRITON_INTERPRET=1 before the import to run Triton\'s interpreter'
        )
    return impl == "triton"


def _check(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
