"""The one class for errors that the person who started the program can mend."""

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

SHOWN_OF_A_PATH = 200  # characters


class UserError(ValueError):
    """Bad input: a flag, a file, a machine that is too small. It is shown as one line, and the exit
    status is 1.

    The message names the value, the limit and what to do. Any other exception is a defect and keeps
    its traceback.
    """


def as_json(value: object, most: int = 40) -> str:
    """Returns the beginning of a value as JSON has it, for an error: "1.0" with its quotes is a
    text, 1.0 a number."""
    try:
        return json.dumps(value, ensure_ascii=False)[:most]
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):  # a table's date, or a list that is nested too deeply
        return f"a {type(value).__name__}"


def printable(text: str | Path) -> str:
    """Returns a text of one line that every file takes.

    A byte of a name that is no UTF-8, such as 0xff, is shown as \\udcff.
    """
    encodable = str(text).encode(errors="backslashreplace").decode()
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encodable)


def program(name: str = "python") -> str:
    """Returns a program of this environment as the pages call it, such as .venv/bin/python."""
    path = Path(sys.executable) if name == "python" else Path(sys.executable).with_name(name)
    with suppress(ValueError, OSError):  # it is elsewhere, or the working directory is deleted
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def pip_install(packages: str) -> str:
    return f"{program()} -m pip install {packages}"


def hub_download(arguments: str) -> str:
    """Returns the command that downloads from the Hugging Face Hub, after the command that installs
    it if need be."""
    command = f"{program('hf')} download {arguments}"
    is_there = Path(sys.executable).with_name("hf").exists()
    return command if is_there else f"{pip_install('huggingface_hub')} && {command}"


def is_installed(package: str) -> bool:
    """Whether a package can be found; a folder of that name, such as wandb's logs, is none."""
    try:
        spec = find_spec(package)
    except Exception as error:
        # The package that would hold it is missing, or fails: then its import says why.
        return not (isinstance(error, ModuleNotFoundError) and package.startswith(f"{error.name}."))
    return spec is not None and spec.origin is not None


def import_optional(
    module: str, user: str, package: str | None = None, distribution: str | None = None
) -> ModuleType:
    """Imports a module of an optional package that `user`, such as a flag, needs.

    `package` is its name, if the module's first name is another, and `distribution` the name that
    pip has for it. Raises UserError if it is missing, or there and fails.
    """
    package = package or module.partition(".")[0]
    distribution = distribution or package
    if not is_installed(package):
        raise UserError(f"{user} needs the package {distribution}: {pip_install(distribution)}")
    try:
        return importlib.import_module(module)
    except Exception as error:
        # A file or a library that it needs is missing, or of another version.
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        cure = f"install it anew: {pip_install(f'--force-reinstall {distribution}')}"
        raise UserError(
            f"{user} needs the package {package}, which fails here ({why}); {cure}"
        ) from None


def import_with_variables(package: str, prefix: str) -> None:
    """Imports a package that reads environment variables of a prefix.

    Raises UserError for values that it refuses, and for a package that this Python does not have.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        make = "give .venv/bin/python, which `make environment` makes, or install requirements.txt"
        raise UserError(
            f"the Python at {sys.executable} has no package {package}; {make}"
        ) from None
    except ValueError as error:
        variables = ", ".join(
            f"{name}={value[:40]}" for name, value in os.environ.items() if name.startswith(prefix)
        )
        if not variables:
            raise
        why = " ".join(str(error).split())[:100]
        raise UserError(
            f"{package} refuses {variables} of the environment ({why}); unset it, or mend it"
        ) from None


def whole_number(variable: str, default: int) -> int:
    """Returns the number in an environment variable, `default` if it is not set. Raises UserError
    for other values."""
    value = os.environ.get(variable, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", value, re.ASCII):
        raise UserError(
            f"{variable} is {value[:40]!r} in the environment, not a whole number; "
            "unset it, or mend it"
        )
    return int(value)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether the error is that Python, NumPy or PyTorch's CPU allocator got no memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


@contextmanager
def refused_as_user_error(prefix: str = "") -> Iterator[None]:
    """Turns a ValueError into a UserError with `prefix` and the same words.

    A RecursionError becomes a UserError as well: JSON that is nested too deeply raises it.
    """
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise UserError(f"{prefix}{error}") from None
