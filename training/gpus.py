"""GPUs by NVIDIA's data sheets: for the model FLOP utilisation of those at hand, and to plan for those that are not."""

import re
from dataclasses import dataclass, replace

from training.budgets import parse_bytes
from training.errors import UserError
from training.memory.machine import H200, Rates

MIB = 2**20
_PCIE_4, _PCIE_5 = 32e9, 64e9  # sixteen lanes, each way


@dataclass(frozen=True)
class GPU:
    """One model of GPU.

    Args:
        device_name: pattern of a word that stands in the driver's name of it.
        memory_bytes: as nvidia-smi shows, which is less than the round number that it is sold by.
        flops: dense bf16 peak of the tensor cores, float32 accumulation, FLOP/s.
        memory_bandwidth, link_bandwidth: of its memory, and of its link to the host each way, bytes/s.
        attention_backend: what kernels.attention chooses there.
    """

    device_name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    attention_backend: str = "flash"


# Of two that match a name, the first counts.
GPUS = {
    "RTX3090": GPU("RTX 3090", 24_576 * MIB, 71e12, 936e9, _PCIE_4),
    "RTX4090": GPU("RTX 4090", 24_564 * MIB, 165e12, 1008e9, _PCIE_4),
    "RTX5090": GPU("RTX 5090", 32_607 * MIB, 210e12, 1792e9, _PCIE_5, "cudnn"),
    "A10G": GPU("A10G", 23_028 * MIB, 70e12, 600e9, _PCIE_4),
    "A40": GPU("A40", 46_068 * MIB, 150e12, 696e9, _PCIE_4),
    "A6000": GPU("A6000", 49_140 * MIB, 155e12, 768e9, _PCIE_4),
    "L40": GPU("L40", 46_068 * MIB, 181e12, 864e9, _PCIE_4),
    "L40S": GPU("L40S", 46_068 * MIB, 362e12, 864e9, _PCIE_4),
    "A100-40GB": GPU("A[18]00", 40_960 * MIB, 312e12, 1555e9, _PCIE_4),
    "A100-80GB": GPU("A[18]00", 81_920 * MIB, 312e12, 2039e9, _PCIE_4),
    "H100-PCIe": GPU("H100 PCIe", 81_559 * MIB, 756e12, 2039e9, _PCIE_5, "cudnn"),
    "H100": GPU("H100", 81_559 * MIB, 989e12, 3350e9, _PCIE_5, "cudnn"),
    "H200": GPU("G?H200", 143_771 * MIB, 989e12, 4800e9, _PCIE_5, "cudnn"),
    "B200": GPU("B200", 183_359 * MIB, 2250e12, 8000e9, _PCIE_5, "cudnn"),
}
# Attention kernels' rates over cuDNN's on an H200, as measured there. FlashAttention-2 is behind where it does not
# use what Hopper brought; on an A100, for which it was written, it reaches the share of peak that cuDNN does on Hopper
# (Dao, arXiv 2307.08691).
_HOPPER_ATTENTION = {"cudnn": 1.0, "flash": 0.58, "flash-attn-4": 1.14}


def find_gpu(device_name: str) -> GPU | None:
    """The GPU that the driver calls so; None if the table does not know it."""
    return next((gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.device_name}\b", device_name)), None)


def parse_gpu(text: str) -> GPU:
    """A GPU of the table by its name, or one of an H200's speed that has another size.

    Raises:
        UserError: neither.
    """
    by_name = {name.lower(): gpu for name, gpu in GPUS.items()}
    if text.lower() in by_name:
        return by_name[text.lower()]
    try:
        return replace(GPUS["H200"], memory_bytes=parse_bytes(text))
    except UserError:
        raise UserError(f"no GPU {text!r} in the table: {', '.join(GPUS)}; or a size such as 24GB") from None


def scale_rates(gpu: GPU, attention_backend: str) -> Rates:
    """What `gpu` would do in a second if it came as near to its data sheet as an H200 does. Not measured."""
    h200 = GPUS["H200"]
    flops, link = gpu.flops / h200.flops, gpu.link_bandwidth / h200.link_bandwidth
    attention = flops * (1 if gpu.attention_backend == "flash" else _HOPPER_ATTENTION[attention_backend])
    return Rates(
        matrix_flops=H200.matrix_flops * flops,
        attention_forward_flops=H200.attention_forward_flops * attention,
        attention_backward_flops=H200.attention_backward_flops * attention,
        memory_bytes=H200.memory_bytes * (gpu.memory_bandwidth / h200.memory_bandwidth),
        link_bytes=H200.link_bytes * link,
    )
