"""Without a GPU, Triton kernels run in Triton's interpreter: set before anything imports triton."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # pytest -n: as many processes as cores, of one thread each
        torch.set_num_threads(1)
        torch.set_num_threads = lambda _: None  # training.parallel.world.join_world would take all cores


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU, where kernels run in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_memory():
    """`torch.empty` is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
