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


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NO_LIMIT = {V2: "max", V1: str(2**63 - 4096)}


def group_files(folder, names, limit):
    """Of a control group in which 10 GiB are used, 4 of them files that can be dropped."""
    max_name, current, inactive = names
    return {
        f"{folder}/{max_name}": NO_LIMIT[names] if limit is None else str(limit * 2**30),
        f"{folder}/{current}": str(10 * 2**30),
        f"{folder}/memory.stat": f"active_file 5\n{inactive} {4 * 2**30}\n",
    }


@pytest.mark.parametrize(
    ("line", "root", "names"),
    [("0::/{}", "/sys/fs/cgroup", V2), ("4:cpuset,memory:/{}", "/sys/fs/cgroup/memory", V1)],
)
@pytest.mark.parametrize(
    ("path", "limits", "expected"),
    [
        ("", {"": None}, 80),
        ("", {"": 50}, 0.8 * (50 - 6)),
        ("slurm/job_7/step_0", {"": None, "/slurm/job_7": 30, "/slurm/job_7/step_0": None}, 0.8 * (30 - 6)),
        ("user.slice/run.scope", {"/user.slice": 60, "/user.slice/run.scope": 20}, 0.8 * (20 - 6)),
        ("docker/of_the_host", {"": 40}, 0.8 * (40 - 6)),
    ],
)
def test_host_memory_is_that_of_the_control_groups(line, root, names, path, limits, expected, monkeypatch):
    """100 GiB are available on the machine."""
    files = {
        "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:  {100 * 2**20} kB\n",
        "/proc/self/cgroup": "9:name=systemd:/\n" + line.format(path) + "\n",
    }
    for folder, limit in limits.items():
        files |= group_files(root + folder, names, limit)

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_host_bytes() / 2**30 == pytest.approx(expected)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_host_bytes() / 2**30 == pytest.approx(expected / 2)
