"""The one error class for what the person who started the program can mend."""

from collections.abc import Iterator
from contextlib import contextmanager

SHOWN_OF_A_PATH = 200  # characters


class UserError(ValueError):
    """Bad input: a flag, a file, a machine too small. Shown as one line, without a traceback, with exit status 1.

    The message names the value, the limit and what to do. Any other exception is a defect and keeps its traceback.
    """


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether Python, NumPy or PyTorch's allocator for CPUs got no memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


@contextmanager
def refused_as_user_error(prefix: str = "") -> Iterator[None]:
    """A ValueError raised in here refuses a value that the user gave: it becomes a UserError of the same words."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None
