"""Sets up pytest. Tests without the mark `gpu` run as on a machine without a GPU; `pytest -m gpu`
runs the others.

Triton's kernels run in Triton's interpreter where no GPU is seen. That is set before anything
imports torch or triton, so this file imports them in its functions. `pytest -n` has as many
processes as cores, each with one thread; NumPy's thread is set before anything imports NumPy.
"""

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests import gpu

FREEZE = gc.freeze  # runs do not, see pytest_collection_finish
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
# for `deterministic`; PyTorch's own size on Hopper GPUs
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ.setdefault(
    "PYTORCH_ALLOC_CONF", "expandable_segments:True"
)  # every command sets it before CUDA starts


def pytest_addoption(pluginmanager):
    """Hide the GPU, or choose it. Pytest calls this first, and imports other conftest.py files
    after it."""
    if worker := os.environ.get(
        "PYTEST_XDIST_WORKER"
    ):  # it has the environment of the process that started it
        gpu.take_turn(worker)
    else:
        gpu.choose(pluginmanager.get_plugin("pytestconfig").known_args_namespace.markexpr)


def pytest_configure(config):
    import torch

    # until tests are collected: looking for garbage among their imports takes a second
    gc.disable()
    # Commands that a shell script starts in the background ignore SIGINT, and so would the runs
    # that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup
    if not torch.cuda.is_available():
        from tests.interpreter import patch_interpreter

        patch_interpreter()
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        torch.set_num_threads = lambda _: (
            None
        )  # training.parallel.world.join_world would take all cores


def pytest_report_header():
    return gpu.describe()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers():
    return gpu.count_processes()


def pytest_collection_modifyitems(items):
    for item in items:
        if (mark := item.get_closest_marker("gpu")) and (
            reason := gpu.why_not(gpu.Need(**mark.kwargs))
        ):
            item.add_marker(pytest.mark.skip(reason=f"{item.name} {reason}"))


@pytest.fixture(autouse=True)
def gpu_share(request, tmp_path_factory):
    """Holds a GPU test's part of the GPU, alone where it must be; what tests before left there is
    freed."""
    mark = request.node.get_closest_marker("gpu")
    if mark is None:
        yield
        return
    with gpu.held(gpu.Need(**mark.kwargs), tmp_path_factory.getbasetemp().parent):
        yield


@pytest.fixture(autouse=True, scope="module")
def few_objects_are_looked_at():
    """Has no collection of a file's tests look at what lives before it: their runs collect garbage
    many times."""
    gc.collect()
    FREEZE()


@pytest.fixture(autouse=True)
def seeded():
    """Draws the same numbers in each run of a test: PyTorch begins each process with a seed of its
    own."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def device():
    """The GPU, or the CPU where no GPU is seen and kernels run in the interpreter."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_memory():
    """Fills `torch.empty` with NaN during a test."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def deterministic():
    """Has a GPU give the same bits from run to run during a test, and fills `torch.empty` with
    NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def corpus(tmp_path):
    """A file with words of this repository. Indentation is left out: tied embeddings predict it
    without training."""
    root, path = Path(__file__).parents[1], tmp_path / "corpus.txt"
    path.write_text(
        " ".join(
            word for name in ("model.py", "train.py") for word in (root / name).read_text().split()
        )
    )
    return str(path)


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A folder as transformers saves a model, without a tokenizer; its vocabulary has room for more
    than bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from model import MODEL_SIZES
    from training.families.config_json import to_config_json

    shape = replace(MODEL_SIZES["tiny"], vocab_size=300)
    monkeypatch.setitem(MODEL_SIZES, "tiny", shape)
    Qwen3ForCausalLM(Qwen3Config(**to_config_json(shape))).save_pretrained(tmp_path / "released")
    return tmp_path / "released"


def pytest_collection_finish():
    """Have no garbage collection look at all imports, which takes 0.3 s. A run would thaw them when
    it ends."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch._dynamo  # noqa: F401  some test of each worker imports it

    gc.freeze()
    gc.enable()
    gc.freeze = gc.unfreeze = lambda: None
