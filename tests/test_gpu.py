"""tests.gpu: who sees the GPU, what a test needs of it, and who has it alone."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import gpu


@pytest.fixture
def h200(monkeypatch):
    """Pretends that PyTorch sees one GPU of 141 GB, on which a test took 9 GiB."""
    device = SimpleNamespace(total_memory=139.8 * gpu.GIB)
    fakes = {
        "is_available": True, "device_count": 1, "get_device_name": "NVIDIA H200",
        "get_device_properties": device,
        "set_per_process_memory_fraction": None, "reset_peak_memory_stats": None,
        "memory_allocated": gpu.GIB,
        "max_memory_allocated": 10 * gpu.GIB,
    }  # fmt: skip
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_this_run_sees_no_gpu_and_interprets():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["TRITON_INTERPRET"] == "1"
    assert not torch.cuda.is_available()


def test_the_gpu_is_hidden_before_torch_is_imported():
    program = (
        "import sys; from tests import gpu; gpu.choose('not gpu'); assert 'torch' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=True)


@pytest.mark.parametrize(("expression", "sees"), [
    ("gpu", True), ("gpu and not slow", True), ("(gpu) and slow", True), ("not gpu", False),
    ("not (gpu or slow)", False), ("slow and not gpu", False), ("gpu or not gpu", None), ("", None),
    ("slow", None),
    ("gpu or slow", None), ("gpu and", False),
])  # fmt: skip
def test_a_run_sees_the_gpu_or_hides_it(h200, expression, sees):
    """None: it is refused, because it selects tests of both kinds."""
    if sees is None:
        with pytest.raises(
            pytest.UsageError, match="run the two apart: pytest -m gpu, and pytest without -m"
        ):
            gpu.choose(expression)
    else:
        gpu.choose(expression)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0" if sees else "")
        assert os.environ["TRITON_INTERPRET"] == ("0" if sees else "1")


def test_any_expression_runs_where_there_is_no_gpu(monkeypatch):
    for expression in ("gpu", "gpu or not gpu", ""):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        gpu.choose(expression)
        assert os.environ["TRITON_INTERPRET"] == "1"


def test_what_the_gpu_cannot_hold_is_named(h200, monkeypatch):
    assert gpu.describe().startswith(
        "GPU: 1 x NVIDIA H200, 139.8 GiB; tests need 6 to 44 GiB, and those that"
    )
    assert gpu.why_not(gpu.Need(gib=139)) is None
    assert gpu.why_not(gpu.Need(gib=140)) == "needs 140 GiB of GPU memory, here are 139.8"
    assert gpu.why_not(gpu.Need(gpus=2)) == "needs 2 GPUs, here is 1"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.why_not(gpu.Need()) == "needs a CUDA GPU"


def test_processes_are_as_many_as_the_gpu_holds(h200, monkeypatch):
    for gpus, cores, gib, processes in (
        (1, 64, 139.8, 8),
        (1, 16, 139.8, 8),
        (1, 4, 139.8, 2),
        (1, 1, 139.8, 1),
        (1, 64, 24, 2),
        (1, 64, 8, 1),
        (2, 64, 139.8, 16),
        (2, 16, 139.8, 8),
        (2, 64, 24, 4),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        monkeypatch.setattr(gpu, "memory_gib", lambda gib=gib: gib)
        assert gpu.count_processes() == processes


@pytest.mark.parametrize(("need", "alone"), [
    (gpu.Need(10), False), (gpu.Need(17), False), (gpu.Need(18), True),
    (gpu.Need(10, alone=True), True),
])  # fmt: skip
def test_a_test_has_the_gpu_alone_where_it_takes_more_than_a_part(
    h200, monkeypatch, tmp_path, need, alone
):
    """Of eight processes each has 17.5 GiB."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "8")
    with gpu.held(need, tmp_path), (tmp_path / "gpu0.lock").open("w") as file:
        if alone:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        else:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_test_that_takes_more_than_its_mark_says_fails(h200, tmp_path):
    with (
        pytest.raises(AssertionError, match=r"took 9\.0 GiB; its mark gpu says 8"),
        gpu.held(gpu.Need(8), tmp_path),
    ):
        pass
    with gpu.held(gpu.Need(8, alone=True), tmp_path):  # may take all that is free
        pass


@pytest.mark.parametrize(("gpus", "worker", "visible"), [
    ("0,1", "gw0", "0,1"), ("0,1", "gw3", "1,0"), ("2,5,7", "gw4", "5,7,2"), ("0", "gw3", "0"),
    ("", "gw1", "0"),
])  # fmt: skip
def test_processes_take_the_gpus_in_turn(h200, monkeypatch, gpus, worker, visible):
    monkeypatch.setenv(gpu.GPUS, gpus)
    gpu.take_turn(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_a_test_of_two_gpus_holds_both(h200, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    for need, locks in (
        (gpu.Need(9), ["gpu1.lock"]),
        (gpu.Need(9, gpus=2), ["gpu0.lock", "gpu1.lock"]),
    ):
        with gpu.held(need, tmp_path):
            assert sorted(file.name for file in tmp_path.iterdir()) == locks
