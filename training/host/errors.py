"""The one class for errors that the person who started the program can mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

SHOWN_OF_A_PATH = 200  # characters


class UserError(ValueError):
    """Bad input: a flag, a file, a machine that is too small. It is shown as one line, and the exit status is 1.

    The message names the value, the limit and what to do. Any other exception is a defect and keeps its traceback.
    """


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of that name, such as wandb's logs, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def check_installed(package: str, user: str) -> None:
    """Raises UserError if an optional package is missing that `user`, such as a flag, needs."""
    if not is_installed(package):
        raise UserError(f"{user} needs the package {package}: pip install {package}")


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether the error is that Python, NumPy or PyTorch's CPU allocator got no memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


@contextmanager
def refused_as_user_error(prefix: str = "") -> Iterator[None]:
    """Turn a ValueError into a UserError with `prefix` and the same words, for code that checks the user's values."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None
