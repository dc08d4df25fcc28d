"""Packages that some tests need, which requirements-dev.txt lists."""

import importlib.metadata
import re
from contextlib import suppress

import pytest


def needs(package: str, least: str) -> pytest.MarkDecorator:
    """Returns a mark that skips tests where a package is missing or older than `least`, such as
    "0.50"."""
    version = ""
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(package)
    is_old = release(version) < release(least)
    there = f"version {version} is here" if version else "it is missing"
    return pytest.mark.skipif(
        is_old, reason=f"needs {package} {least} or newer, and {there}; see requirements-dev.txt"
    )


def release(version: str) -> list[int]:
    """Returns the first numbers of a version: [0, 50] of "0.50.2"; none of ""."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
