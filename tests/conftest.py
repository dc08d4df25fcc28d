"""Sets up pytest. Triton's kernels run in Triton's interpreter on a machine without a GPU.

That is set before anything imports triton. `pytest -n` has as many processes as cores, each with one thread; NumPy's
thread is set before anything imports NumPy.
"""

import functools
import gc
import os
import signal
from dataclasses import replace
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for `deterministic`; PyTorch's own size on Hopper GPUs
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # every command sets it before CUDA starts

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def patch_language_once_a_launch():
    """Have Triton's interpreter patch triton.language once in a launch, not for each function that a kernel calls.

    The patching takes half of its time in Triton 3.6 and 3.7. An interpreter with other parts stays as it is.
    """
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return
    patch = interpreter._patch_lang

    @functools.cache
    def languages(function):
        return [value for value in function.__globals__.values() if value is language or value is language.core]

    def patch_unless_patched(function):
        if any(language.core.is_builtin(found.load) for found in languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_unless_patched


def remember_types():
    """Have Triton's interpreter make each type once, and what tensors of one type have alike: a third of its time.

    An interpreter with other parts stays as it is.
    """
    from triton.language import core
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_get_np_dtype"):
        return
    numpy_type, make_type, make_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    numpy_types, types, tensors = {}, {}, {}

    def numpy_type_once(type):
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    def make_type_once(self, element_ty, shape):
        key = element_ty.name, *shape
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {**vars(self)}
        vars(self).update(types[key])

    def make_tensor_of_known_type(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = {**vars(self)}
        vars(self).update(tensors[type.name], handle=handle)

    interpreter._get_np_dtype = numpy_type_once
    core.block_type.__init__, core.tensor.__init__ = make_type_once, make_tensor_of_known_type


def round_to_fp8_by_torch():
    """Have Triton's interpreter convert between float32 and FP8 as GPUs do: its own takes 127 to 64, and NaN to 480."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_or_round(input, input_dtype, output_dtype, rounding_mode):
        if input_dtype.is_fp32() and output_dtype.is_fp8e4nv():
            return torch.from_numpy(input).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if input_dtype.is_fp8e4nv() and output_dtype.is_fp32():
            return torch.from_numpy(input).view(torch.float8_e4m3fn).float().view(torch.int32).numpy()
        return convert(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert_or_round


def patch_interpreter():
    patch_language_once_a_launch()
    remember_types()
    round_to_fp8_by_torch()


def pytest_configure(config):
    gc.disable()  # until tests are collected: looking for garbage among their imports takes a second
    # Commands that a shell script starts in the background ignore SIGINT, and so would the runs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not torch.cuda.is_available():
        patch_interpreter()
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        torch.set_num_threads = lambda _: None  # training.parallel.world.join_world would take all cores


@pytest.fixture(autouse=True)
def seeded():
    """Draws the same numbers in each run of a test: PyTorch begins each process with a seed of its own."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU of a machine without a GPU, where kernels run in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_memory():
    """Fills `torch.empty` with NaN during a test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def deterministic():
    """Has a GPU give the same bits from run to run during a test, and fills `torch.empty` with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def corpus(tmp_path):
    """A file with words of this repository. Indentation is left out: tied embeddings predict it without training."""
    root, path = Path(__file__).parents[1], tmp_path / "corpus.txt"
    path.write_text(" ".join(word for name in ("model.py", "train.py") for word in (root / name).read_text().split()))
    return str(path)


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A folder as transformers saves a model, without a tokenizer; its vocabulary has room for more than bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from model import MODEL_SIZES
    from training.families.config_json import to_config_json

    shape = replace(MODEL_SIZES["tiny"], vocab_size=300)
    monkeypatch.setitem(MODEL_SIZES, "tiny", shape)
    Qwen3ForCausalLM(Qwen3Config(**to_config_json(shape))).save_pretrained(tmp_path / "released")
    return tmp_path / "released"


def pytest_collection_finish():
    """Have no garbage collection look at all imports, which takes 0.3 s. A run would thaw them when it ends."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch._dynamo  # noqa: F401  some test of each worker imports it

    gc.freeze()
    gc.enable()
    gc.freeze = gc.unfreeze = lambda: None


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
