"""Ranks that save or load a checkpoint together, in one process group or as a single process."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from training.host.errors import UserError


def rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_gather(value, group: dist.ProcessGroup | None = None) -> list:
    """Returns every rank's value, which may be anything that pickles."""
    values = [value] * rank_and_world_size()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value, group)
    return values


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Makes all ranks leave the block together, with an error if any rank had one.

    So no rank waits for a rank that is gone.

    A rank without an error of its own raises an OSError or UserError as the failing rank did, else
    a RuntimeError.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    kind = next((kind for kind in (OSError, UserError) if isinstance(error, kind)), RuntimeError)
    failures = all_gather(
        None if error is None else (kind, f"{type(error).__name__}: {error}"), group
    )
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, message = failure
            raise kind(f"rank {rank} failed: {message}")
