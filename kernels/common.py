"""The choice of Triton or the PyTorch reference, and what operations declare to checkpointing."""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

IMPLEMENTATIONS = ("auto", "triton", "torch")
DTYPES = torch.float32, torch.bfloat16, torch.float16  # Triton's kernels take these
SKIPPABLE: set[str] = set()
# Functions of operations that are made of other operations, by the operation's name.
BODIES: dict[str, Callable] = {}


class Keepable(NamedTuple):
    """Declaration of an operation's results that are worth keeping, see `operation`."""

    roles: tuple[str, ...]  # "results", "choices" or both
    choice: int | None  # position of the argument that takes a kept choice


KEEPABLE: dict[str, Keepable] = {}  # by the operation's name


def operation(
    name: str, fake: Callable | None = None, *, keepable: str | None = None,
    chooses: str | None = None, skippable: bool = False, composed: bool = False,
    mutates: Sequence[str] = (),
) -> Callable:  # fmt: skip
    """Decorator that makes a `torch.library.custom_op` and declares it to activation checkpointing.

    Activation checkpointing runs the forward of a transformer block again in backward. Operations
    that are declared keepable or skippable need not run in this second forward.

    Args:
        name: "fathom::...".
        fake: takes the operation's arguments and returns empty outputs; None for an operation that
            returns nothing.
        keepable: results worth keeping from forward to backward, where they replace a second run:
            "results" are kept if the block's placement says so, "choices" always and on the GPU.
        chooses: name of an argument, for an operation that returns "results" and, last, a choice.
            The argument is None where the operation is to choose. If only the choice was kept, the
            second run gets it as this argument, and its own last result is ignored.
        skippable: True where no gradient depends on the operation's result, which is only added to
            the residual stream.
        composed: True for a function that calls other operations, also on the meta device: a dry
            run of it shows the memory that it takes.
        mutates: names of arguments that the operation writes to.
    """

    def register(function: Callable):
        if keepable:
            choice = [*inspect.signature(function).parameters].index(chooses) if chooses else None
            KEEPABLE[name] = Keepable((keepable, "choices") if chooses else (keepable,), choice)
        if skippable:
            SKIPPABLE.add(name)
        if composed:
            BODIES[name] = function
        registered = torch.library.custom_op(name, function, mutates_args=mutates)
        if fake is not None:
            registered.register_fake(fake)
        return registered

    return register


def first_derivative(backward: Callable) -> Callable:
    """Decorator of an autograd function's backward that cannot be differentiated.

    With create_graph=True it raises RuntimeError. PyTorch's once_differentiable would take the
    gradients for constants where nothing asks for their own gradients.
    """

    @functools.wraps(backward)
    def once(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("this function has no second derivative (create_graph=True)")
        return backward(ctx, *gradients)

    return once


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype of sums of a tensor's elements: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def shown(*tensors: torch.Tensor) -> str:
    """Returns tensors as errors show them: "[2, 3] torch.float32 and [3] torch.int64"."""
    return " and ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors)


def runs_as_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or on the meta device.

    No kernel runs on the meta device, and any size is taken there.
    """
    return tensor.is_cuda or tensor.is_meta


def rounds(number: int, tensor: torch.Tensor) -> range:
    """Returns the rounds of a loop over a tensor.

    On the meta device these are the first two: later rounds take as much memory.
    """
    return range(min(number, 2) if tensor.is_meta else number)


def use_triton(impl: str, tensor: torch.Tensor) -> bool:
    """Returns True if Triton's kernels are to run on `tensor`, False if the PyTorch reference is.

    "auto" is Triton on CUDA and on the meta device, and the reference elsewhere. "triton" on a CPU
    tensor needs Triton's interpreter.

    Raises:
        ValueError: unknown `impl`; Triton on a device where it cannot run, or for a dtype that its
            kernels do not take.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "torch" or (impl == "auto" and not runs_as_on_gpu(tensor)):
        return False
    if not runs_as_on_gpu(tensor) and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'impl="triton" needs CUDA tensors, got {tensor.device}; '
            'use impl="torch", or set TRITON_INTERPRET=1 before the import to run Triton\'s '
            "interpreter"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"Triton's kernels take float32, bfloat16 or float16, got {tensor.dtype}; use "
            'impl="torch"'
        )
    return True


def cast_by_autocast(*tensors: torch.Tensor | None) -> tuple:
    """Casts arguments of a custom operation as autocast casts the arguments of F.linear.

    None stays None.
    """
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(
        tensor if tensor is None else tensor.to(torch.get_autocast_dtype(device))
        for tensor in tensors
    )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns x as descriptors take it: contiguous, from an address that is a multiple of 16."""
    x = x.contiguous()
    return x if x.is_meta or x.data_ptr() % 16 == 0 else x.clone()


def describe(x: torch.Tensor, width: int, rows: int, columns: int) -> TensorDescriptor:
    """Describes x as a matrix of rows of `width` elements, read in blocks of `rows` x `columns`."""
    return TensorDescriptor.from_tensor(x.view(-1, width), [rows, columns])
