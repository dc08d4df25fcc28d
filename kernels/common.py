"""Which implementation a public function of this package runs: Triton kernels or the PyTorch reference."""

import os

import torch

IMPLEMENTATIONS = ("auto", "triton", "torch")
_default = "auto"


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
