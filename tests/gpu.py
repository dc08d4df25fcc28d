"""The mark `gpu`: what a test needs of a GPU, which GPU is seen, and who has how much of it.

`@pytest.mark.gpu` needs LEAST_GIB of a GPU, `@pytest.mark.gpu(gib=20)` more,
`@pytest.mark.gpu(gpus=2)` two GPUs. `@pytest.mark.gpu(alone=True)` measures time, or takes all
memory: no other process of `pytest -n` has a GPU test then.
"""

import fcntl
import gc
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

# environment variable: the GPUs that a run's processes share, such as 0,1
GPUS = "FATHOM_TEST_GPUS"
LEAST_GIB = 6  # memory of a GPU that a test needs, with CUDA's own
GIB = 2**30
MIXED = (
    "-m {expression!r} selects tests of a GPU and tests that hide it; run the two apart: pytest -m "
    "gpu, "
    "and pytest without -m"
)


@dataclass(frozen=True)
class Need:
    gib: float = LEAST_GIB
    gpus: int = 1
    alone: bool = False


def choose(expression: str) -> None:
    """Hide the GPU, unless the expression of pytest's -m asks for tests with the mark `gpu`.
    Imports torch only then.

    Raises pytest.UsageError if there is a GPU, and the expression selects tests with and without
    the mark.
    """
    if selects(expression, gpu=True):
        import torch

        if torch.cuda.is_available():
            if selects(expression, gpu=False):
                raise pytest.UsageError(MIXED.format(expression=expression))
            os.environ[GPUS] = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
                map(str, range(torch.cuda.device_count()))
            )
            return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"


def take_turn(worker: str) -> None:
    """Have a process of `pytest -n` see another GPU first than the process before it: "gw1" of two
    sees 1,0."""
    gpus = os.environ.get(GPUS, "").split(",")
    first = int(worker.removeprefix("gw")) % len(gpus)
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def selects(expression: str, gpu: bool) -> bool:
    """Whether an expression of pytest's -m can select a test with the mark `gpu`, or one
    without."""
    if not expression.strip():
        return True
    try:
        compiled = Expression.compile(expression)
    except SyntaxError:  # pytest refuses it when it has begun
        return False
    return any(
        compiled.evaluate(lambda name, other=other, **_: gpu if name == "gpu" else other)
        for other in (False, True)
    )


def memory_gib() -> float:
    """Returns the memory of the first GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GIB


def count_processes() -> int | None:
    """Returns how many processes `pytest -n auto` starts: for each GPU one per 12 GiB, two cores
    each, 8 at most."""
    import torch

    if not torch.cuda.is_available():
        return None
    of_each = min(8, int(memory_gib() // (2 * LEAST_GIB)))
    cores = len(os.sched_getaffinity(0))
    return max(1, min(of_each * torch.cuda.device_count(), cores // 2))


def describe() -> str | None:
    """Returns the GPU, and the memory that tests need."""
    import torch

    if not torch.cuda.is_available():
        return None
    sources = (path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    most = max(int(gib) for source in sources for gib in re.findall(r"gpu\(gib=(\d+)", source))
    return (
        f"GPU: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory_gib():.1f} "
        "GiB; tests need "
        f"{LEAST_GIB} to {most} GiB, and those that do not fit are skipped by name"
    )


def why_not(need: Need) -> str | None:
    """Returns why tests of such a need cannot run here, or None."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if torch.cuda.device_count() < need.gpus:
        return f"needs {need.gpus} GPUs, here is {torch.cuda.device_count()}"
    if memory_gib() < need.gib:
        return f"needs {need.gib} GiB of GPU memory, here are {memory_gib():.1f}"
    return None


@contextmanager
def held(need: Need, folder: Path) -> Iterator[None]:
    """Hold the GPU for a test: beside tests of other processes, or alone where it takes more than a
    process's part.

    A test of several GPUs holds them all, and so does one that measures time. What tests before
    left on the GPU is freed. Fails if a test that is not marked alone takes more than its mark
    says.

    Args:
        folder: of the processes' locks, one for each GPU.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    processes = -(-int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) // len(visible))
    alone = need.alone or need.gib > memory_gib() / processes
    names = (
        sorted(visible) if need.alone or need.gpus > 1 else visible[:1]
    )  # in one order, so that nobody waits in a ring
    with ExitStack() as stack:
        for name in names:
            file = stack.enter_context((folder / f"gpu{name}.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        free_memory()
        torch.cuda.set_per_process_memory_fraction(1.0)  # a run in this process may have capped it
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        taken = torch.cuda.max_memory_allocated() - before
        free_memory()
    assert need.alone or taken <= need.gib * GIB, (
        f"took {taken / GIB:.1f} GiB; its mark gpu says {need.gib}"
    )


def free_memory() -> None:
    """Free garbage, and the GPU's cache.

    Autograd's thread of a GPU holds the last graph until it takes the next, which is an empty one
    here.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        nothing = torch.empty(0, device="cuda")
        nothing.detach().requires_grad_().clone().backward(nothing)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
