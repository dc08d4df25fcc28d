from dataclasses import astuple

import pytest

from training.gpus import GPUS, find_gpu, parse_gpu, scale_rates
from training.memory.machine import H200

GIB = 2**30


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A800-SXM4-80GB", "A100-40GB"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
    ],
)
def test_what_the_driver_calls_them(device_name, name):
    assert find_gpu(device_name) == GPUS.get(name)


def test_what_a_user_calls_them():
    assert parse_gpu("rtx4090") is GPUS["RTX4090"] and parse_gpu("A100-80GB").memory_bytes == 80 * GIB
    assert parse_gpu("24GB").memory_bytes == 24 * GIB and parse_gpu("24GB").flops == GPUS["H200"].flops
    with pytest.raises(ValueError, match=r"no GPU 'RTX4091' in the table: RTX3090, .*B200; or a size such as 24GB"):
        parse_gpu("RTX4091")


def test_rates_are_scaled_by_the_data_sheets():
    assert scale_rates(GPUS["H200"], "cudnn") == H200
    a100 = scale_rates(GPUS["A100-80GB"], "flash")
    assert a100.matrix_flops == pytest.approx(650e12 * 312 / 989)
    assert a100.attention_forward_flops == pytest.approx(570e12 * 312 / 989)
    assert scale_rates(GPUS["H200"], "flash").attention_forward_flops == pytest.approx(328e12, rel=0.01)
    assert a100.link_bytes == 25e9
    assert all(0 < theirs <= ours for theirs, ours in zip(astuple(a100), astuple(H200)))
