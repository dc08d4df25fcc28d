import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.attention import NSA, Sparse, Window
from kernels.attention.full import FULL
from kernels.lora import LORA
from model import MODEL_SIZES
from tests.ranks import run_ranks
from training.host.sizes import (
    PROCESS_BYTES,
    SYSTEM_BYTES,
    available_host_bytes,
    budget_of_machine,
    parse_bytes,
)
from training.memory import machine
from training.memory.machine import (
    ASSUMED_NETWORK,
    GPUS,
    H200,
    find_gpu,
    gpu_budget,
    measure_network,
    measure_rates,
    parse_gpu,
    scale_rates,
)

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("1.5g", 3 * 2**29),
        ("512MB", 2**29),
        ("1048576", 2**20),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-1GB",
        "24 gigs",
        "1e9",
        "24",
        "4090",
        "1023K",
        "0.5 MB",
        "1024TB",
        "999999999999999T",
    ],
)
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
@pytest.mark.parametrize(("path", "limits", "expected"), [
    ("", {"": None}, 80),
    ("", {"": 50}, 0.8 * (50 - 6)),
    ("slurm/job_7/step_0", {"": None, "/slurm/job_7": 30, "/slurm/job_7/step_0": None}, 0.8 * (30 - 6)),
    ("user.slice/run.scope", {"/user.slice": 60, "/user.slice/run.scope": 20}, 0.8 * (20 - 6)),
    ("docker/of_the_host", {"": 40}, 0.8 * (40 - 6)),
])  # fmt: skip
def test_host_memory_is_that_of_the_control_groups(
    line, root, names, path, limits, expected, monkeypatch
):
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


def test_a_machine_of_a_size_lets_its_processes_pin_80_percent_of_what_they_leave():
    assert budget_of_machine(64 * 2**30, 1) == int(0.8 * (64 - 2 - 2) * 2**30)
    for gib, processes in ((16, 1), (64, 2), (512, 8)):
        whole = budget_of_machine(gib * 2**30, processes) + PROCESS_BYTES
        assert 0 < processes * whole <= gib * 2**30 - SYSTEM_BYTES
    with pytest.raises(
        ValueError, match="host_memory 16GB: the system and nproc 8 take 18GB before any is pinned;"
    ):
        budget_of_machine(16 * 2**30, 8)


@pytest.mark.gpu(gib=8, alone=True)
@pytest.mark.parametrize("context_length", [16_384, 262_144])
def test_measured_rates_are_plausible(context_length):
    config = MODEL_SIZES["4B"]
    rates = measure_rates(config, "auto", torch.device("cuda"), context_length)
    assert 20e12 < rates["full backward"] < 2 * rates["full forward"] < 4e15
    assert 20e12 < rates["together backward"] < 2 * rates["together forward"] < 4e15
    assert 20e12 < rates["products"] < 3e15
    assert 1e9 < rates["link"] < 500e9 < rates["memory"] < 20e12
    assert 1e9 < rates["gpu link"] < 2e12


@pytest.mark.gpu(gib=8, alone=True)
def test_adapters_are_read_and_written_at_a_plausible_rate():
    rates = measure_rates(MODEL_SIZES["4B"], "auto", torch.device("cuda"), 16_384, linear=LORA)
    assert 0.1 * rates["memory"] < rates["adapters"] < 2 * rates["memory"]


def test_all_kernels_but_full_attentions_are_timed_between_products():
    rows = []

    def seconds(work, *, in_a_row=False):
        work()
        rows.append(in_a_row)
        return 1.0

    for kind in (FULL, Window(64), Sparse(1), NSA(4)):
        kind.time(192, 2, 1, 64, "cpu", seconds, CPU)
    assert rows == [True, True] + 6 * [False]


@pytest.mark.parametrize(("device_name", "name"), [
    ("NVIDIA H200", "H200"), ("NVIDIA GH200 480GB", "H200"), ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H100 PCIe", "H100-PCIe"), ("NVIDIA A800-SXM4-80GB", "A100-40GB"),
    ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
    ("NVIDIA A100-PCIE-40GB", "A100-PCIe"), ("NVIDIA A40", "A40"), ("NVIDIA RTX A6000", "A6000"),
    ("NVIDIA L40S", "L40S"), ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4070", "RTX4070"),
    ("NVIDIA GeForce RTX 4070 Ti", "RTX4070Ti"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070TiSuper"),
    ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", None),
    ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None), ("NVIDIA A10", "A10"),
    ("NVIDIA A10G", "A10G"),
    ("NVIDIA RTX A4000", "A4000"), ("NVIDIA RTX A2000", None), ("Tesla T4", None),
])  # fmt: skip
def test_what_the_driver_calls_them(device_name, name):
    assert find_gpu(device_name) == GPUS.get(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX4090"), ("rtx4090", "RTX4090"), ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("3090 24GB", "RTX3090"),
        ("a100", "A100-80GB"), ("A100-40GB", "A100-40GB"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"), ("H100-80GB", "H100"), ("h100 pcie", "H100-PCIe"),
        ("RTX A6000", "A6000"), ("A40 48G", "A40"), ("H200-141GB", "H200"), ("4080", "RTX4080"),
        ("L4", "L4"),
        ("rtx 4070 ti super", "RTX4070TiSuper"), ("4060 Ti", "RTX4060Ti-16GB"),
        ("4060 Ti 8GB", "RTX4060Ti-8GB"),
        ("RTX 6000 Ada", "RTX6000-Ada"), ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("RTX A5000", "A5000"),
        ("RTX PRO 6000 Blackwell", "RTX-PRO-6000"), ("RTX PRO 6000", "RTX-PRO-6000"),
        ("Quadro A6000", "A6000"),
    ],
)  # fmt: skip
def test_what_a_user_calls_them(text, name):
    assert parse_gpu(text) == (name, GPUS[name])


def test_each_gpu_is_found_by_its_own_name():
    assert {name: parse_gpu(name) for name in GPUS} == {
        name: (name, gpu) for name, gpu in GPUS.items()
    }
    for name in ("4080", "4070", "3080", "3060", "5080", "5090", "L4", "A10", "A5000", "A6000"):
        assert 7.9 * GIB < parse_gpu(name)[1].memory_bytes < 50 * GIB


@pytest.mark.parametrize(
    ("text", "slowest"),
    [("8GB", "RTX3060"), ("12G", "RTX3060"), ("16GB", "RTX4060Ti-16GB"), ("24GB", "A10G"), ("32GB", "A40"),
     ("48GB", "A40"), ("80GB", "A100-PCIe"), ("141GB", "H200")],
)  # fmt: skip
def test_a_size_has_the_speed_of_the_slowest_gpu_with_as_much(text, slowest):
    name, gpu = parse_gpu(text)
    assert name == f"{text} (assumed: {slowest}, the slowest known GPU with as much)"
    assert gpu == replace(GPUS[slowest], memory_bytes=parse_bytes(text))
    sold = {each for each in GPUS.values() if each.memory_bytes >= 0.9 * gpu.memory_bytes}
    assert gpu.flops == min(each.flops for each in sold)


@pytest.mark.parametrize(
    "text",
    [
        "T4",
        "Tesla T4",
        "V100",
        "Tesla V100-SXM2-32GB",
        "P100",
        "RTX 2080 Ti",
        "GTX 1080",
        "Quadro RTX 8000",
    ],
)
def test_gpus_without_bf16_are_refused(text):
    with pytest.raises(ValueError, match=rf"^{text} has no bf16, in which Fathom trains"):
        parse_gpu(text)


@pytest.mark.parametrize(
    ("maker", "names"),
    [("Apple's", "M2,M1 Pro,M3 Max,m4ultra,Apple M4 Ultra 192GB,mps"), ("Google's", "TPU,TPU v5e,v5p,Trillium"),
     ("AMD's", "MI300X,mi250,8xMI355X,AMD Instinct MI300A,RX 7900 XTX,7900XTX,Radeon Pro "
               "W7900,W7900,amd"),
     ("Intel's", "Gaudi,Gaudi2,Arc A770,A770,B580,Intel Max 1550"), ("Amazon's", "Trainium2,inf2"),
     ("Huawei's", "Ascend 910B,910b"), ("Other makers'", "Cerebras,Groq,MTT S4000")],
)  # fmt: skip
def test_gpus_of_other_makers_are_refused(maker, names):
    for text in names.split(","):
        with pytest.raises(
            ValueError,
            match=rf": {maker} GPUs and accelerators are not supported; give one of NVIDIA",
        ):
            parse_gpu(text)


@pytest.mark.parametrize(
    ("text", "cure"),
    [("2x4090", "--gpu 4090 --nproc 2"), ("8 x H100", "--gpu H100 --nproc 8"), ("4*24GB", "--gpu 24GB --nproc 4"),
     ("rtx4090x2", "--gpu rtx4090 --nproc 2"), ("H100:8", "--gpu H100 --nproc 8"),
     ("2x RTX 4090", "--gpu 'RTX 4090' --nproc 2"), ("A100-80GB x 4", "--gpu A100-80GB --nproc 4")],
)  # fmt: skip
def test_several_gpus_are_another_flag(text, cure):
    with pytest.raises(
        ValueError, match=re.escape(f"gpu names one GPU, got {text!r}; give {cure}") + "$"
    ):
        parse_gpu(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [("2xRTX4091", "no GPU 'RTX4091' .* did you mean RTX4090"), ("rtx 20", "no GPU 'rtx 20'"),
                      ("2xT4", "T4 has no bf16")],
)  # fmt: skip
def test_several_of_no_gpu(text, why):
    with pytest.raises(ValueError, match=why):
        parse_gpu(text)


def test_a_geforce_has_half_the_speed_of_its_sums_in_half_precision():
    """An RTX A5000 and a GeForce RTX 3080 Ti have one chip: 64 and 80 multiprocessors at about the
    same clock."""
    ratio = GPUS["A5000"].flops / 64 / (GPUS["RTX3080Ti"].flops / 80)
    assert ratio == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("RTX4091", ", did you mean RTX4090"), ("4096", ", did you mean"),
        ("200GB", ", did you mean H200"),
        ("A100-60GB", ", did you mean A100-80GB or"), ("24", ""), ("1GB", ""), ("512MB", ""),
        ("2TB", ""),
    ],
)  # fmt: skip
def test_what_nobody_calls_them(text, near):
    """A card's number is no size, and the driver takes 1 GB."""
    with pytest.raises(
        ValueError,
        match=rf"no GPU '{text}' in the table{near}.*; give one of RTX3060, .*B200; or a size",
    ):
        parse_gpu(text)


def test_rates_are_scaled_by_the_data_sheets():
    assert measure_rates(MODEL_SIZES["4B"], "auto", torch.device("cpu"), 4096) is H200
    assert scale_rates(GPUS["H200"], "cudnn") == H200
    a100 = scale_rates(GPUS["A100-80GB"], "flash")
    assert a100["products"] == pytest.approx(650e12 * 312 / 989)
    assert a100["full forward"] == pytest.approx(570e12 * 312 / 989)
    assert scale_rates(GPUS["H200"], "flash")["full forward"] == pytest.approx(328e12, rel=0.01)
    wide = scale_rates(GPUS["H200"], "cudnn", head_dim=256)
    assert (
        wide["full backward"] == pytest.approx(380e12, rel=0.01)
        and wide["full forward"] == H200["full forward"]
    )
    assert (
        wide["sparse choice"] == 829e12
        and wide["full calls backward"] == H200["full calls backward"]
    )
    assert a100["together forward"] == a100["full forward"]
    assert a100["link"] == 25e9 and a100["gpu link"] == pytest.approx(H200["gpu link"] * 300 / 450)
    assert a100.keys() == H200.keys() and all(0 < rate <= H200[name] for name, rate in a100.items())


def test_the_network_is_measured_by_all_ranks():
    run_ranks(2, measure_in_ranks)


def measure_in_ranks(world):
    """Two processes on two pretended machines: half of what is gathered comes from the other."""
    assert world.num_machines == 1
    os.environ["LOCAL_WORLD_SIZE"], machine._GATHERED_BYTES = "1", 2**23
    assert world.num_machines == 2
    measured = measure_network(world.fsdp_mesh.get_group(), world.num_machines, world.device)
    assert 1e6 < measured < 1e12 and measured != ASSUMED_NETWORK


def test_without_nvlink_gpus_exchange_over_their_links_to_the_host():
    with_nvlink = {name for name, gpu in GPUS.items() if gpu.nvlink_bandwidth}
    assert with_nvlink == {"A100-40GB", "A100-80GB", "H100", "H200", "B200"}
    for name, gpu in GPUS.items():
        rates = scale_rates(gpu, gpu.attention_backend)
        assert (rates["gpu link"] == rates["link"]) == (name not in with_nvlink)
    assert scale_rates(GPUS["H100"], "cudnn")["gpu link"] == H200["gpu link"]
