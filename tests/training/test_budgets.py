from pathlib import Path

import pytest
import torch

from training.budgets import available_host_bytes, gpu_budget, parse_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * 2**30), ("24 GiB", 24 * 2**30), ("1.5g", 3 * 2**29), ("512MB", 2**29), ("1000", 1000)],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "24 gigs", "1e9"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match='looks like "24GB"'):
        parse_bytes(text)


def test_a_gpu_budget_is_of_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 2**30)
    assert gpu_budget("auto", CPU) == 11 * 2**30 and gpu_budget("12GB", CPU) == 12 * 2**30
    with pytest.raises(ValueError, match=r"memory_budget 16GB: 12.0 GB of this GPU are free"):
        gpu_budget("16GB", CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**29)
    with pytest.raises(ValueError, match=r"memory_budget auto: 0\.5 GB"):
        gpu_budget("auto", CPU)


@pytest.mark.parametrize(("limit", "expected"), [("max", 80), (str(50 * 2**30), 0.8 * (50 - 10 + 4))])
def test_host_memory_is_that_of_the_container(limit, expected, monkeypatch):
    """100 GiB available on the machine; of 10 used here, 4 are files that can be dropped."""
    files = {
        "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:  {100 * 2**20} kB\n",
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": str(10 * 2**30),
        "/sys/fs/cgroup/memory.stat": f"active_file 5\ninactive_file {4 * 2**30}\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert available_host_bytes() / 2**30 == pytest.approx(expected)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_host_bytes() / 2**30 == pytest.approx(expected / 2)
