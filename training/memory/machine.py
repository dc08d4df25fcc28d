"""The machine that a step is planned for: what memory is free, what the GPU does in a second, and GPUs by data sheet.

The cost model divides amounts of work by `Rates`: measured on the GPU at hand, or, for a GPU that is not here, an
H200's scaled by NVIDIA's data sheets. The data sheets' peak also serves to compute a run's model FLOP utilisation.
"""

import functools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention.documents import LONGEST_TOGETHER
from kernels.attention.full import (
    BACKWARD_FLOPS,
    attention,
    attention_flops,
    choose_backend,
    longest_together,
    together_pairs,
)
from kernels.attention.nsa.nsa import NSA, nsa_attention
from kernels.attention.sparse.sparse_attention import Sparsity, select_blocks, sparse_attention
from training.host.errors import UserError
from training.host.memory import GIB, MIB, PinnedArena, parse_bytes

DRIVER_BYTES = GIB  # GPU memory that CUDA and NCCL take for themselves
_PCIE_4, _PCIE_5 = 32e9, 64e9  # bytes/s each way of a link of sixteen lanes


# Memory


def gpu_budget(text: str, device: torch.device) -> int:
    """Bytes of a --memory_budget: a size, or "auto" for what is free or already this process's, less DRIVER_BYTES.

    Raises:
        UserError: that much is not free.
    """
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    budget = free - DRIVER_BYTES if text == "auto" else parse_bytes(text)
    if not 0 < budget <= free:
        raise UserError(
            f"memory_budget {text}: {free / GIB:.1f} GB of this GPU are free, of which the driver needs one; "
            "lower it, or end what else runs there"
        )
    return budget


def cap_gpu_memory(num_bytes: int, device: torch.device) -> None:
    """Make `num_bytes` the hard limit of this process's GPU allocator, everything reserved included."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)


# Rates


@dataclass(frozen=True)
class Rates:
    """What a machine does in one second; the defaults are one H200's."""

    matrix_flops: float = 650e12
    attention_forward_flops: float = 570e12
    attention_backward_flops: float = 535e12
    # Long packed documents attend alone: calls a second, besides their floating-point operations. Short ones attend
    # together, see `kernels.attention.full.together_pairs`.
    forward_documents: float = 12_000
    backward_documents: float = 5_000
    memory_bytes: float = 4.2e12  # bytes read plus bytes written
    link_bytes: float = 50e9  # bytes each way between host and GPU, in both directions at once
    choice_flops: float = 270e12  # of choosing blocks: their scores, and the highest of these
    # Bytes each way between GPUs of one host in an exchange of heads, the copies that order them included.
    gpu_link_bytes: float = 170e9
    together_forward_flops: float = 570e12 * 0.58
    together_backward_flops: float = 535e12 * 0.58


H200 = Rates()


def measure_rates(
    config, attention_backend: str, device: torch.device, context_length: int, sparsity: Sequence[Sparsity | NSA] = ()
) -> Rates:
    """The rates of this GPU at the model's shapes; for the 4B it takes 1.2 to 5 GiB meanwhile. On a CPU, an H200's.

    Args:
        config: the model's shape, as model.ModelConfig names it.
        attention_backend: as `kernels.attention.full.choose_backend` takes it.
        context_length: tokens.
        sparsity: one a layer. Attention's rates are then those of chosen blocks, or of NSA, as most layers have it.
    """
    if device.type != "cuda":
        return H200
    backend = choose_backend(attention_backend, device)
    dense = _attention_rates(config, backend, device, context_length)
    documents = _document_rates(config, backend, device, *dense)
    together = _together_rates(config, backend, device)
    forward, backward, choice = *dense, H200.choice_flops
    if sparsity and context_length >= sparsity[0].dense_below:
        forward, backward, choice = _sparse_attention_rates(
            config, statistics.mode(sparsity), backend, device, context_length
        )
    memory, link = _copy_rates(device)
    gpu_link = _gpu_link_rate(find_gpu(torch.cuda.get_device_name(device)), link)
    return Rates(_matrix_rate(config, device), forward, backward, *documents, memory, link, choice, gpu_link, *together)


def _matrix_rate(config, device: torch.device) -> float:
    x, weight = (
        torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        for rows, columns in ((16_384, config.hidden_size), (config.hidden_size, config.intermediate_size))
    )
    return 2 * len(x) * weight.numel() / _seconds(lambda: x @ weight)


def _attention_rates(config, backend: str, device: torch.device, context_length: int) -> tuple[float, float]:
    """FLOP/s of forward and backward; past 131,072 tokens, where forward gets slower, of one key/value head."""
    T, G, R = 16_384, config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    if context_length > 131_072:
        T, G = min(context_length, 524_288), 1
    flops = attention_flops(G * R, config.head_dim, T * (T + 1) // 2)
    attend = functools.partial(attention, backend=backend)
    forward, backward = _attention_seconds(attend, T, G * R, G, config.head_dim, device)
    return flops / forward, BACKWARD_FLOPS * flops / backward


def _sparse_attention_rates(
    config, sparsity: Sparsity | NSA, backend: str, device: torch.device, context_length: int
) -> tuple[float, float, float]:
    """FLOP/s of forward, backward and choice. Forward and backward of `Sparsity` are measured at 65,536 tokens.

    The choice, whose share grows with the context, is measured at the context's length, and so is all of NSA.
    """
    T, H, G, K = 65_536, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    long = max(16_384, min(context_length, 524_288 if isinstance(sparsity, NSA) else 1_048_576))
    of_long: tuple[int, int, int] = (H, G, K) if long <= 131_072 else (H // G, 1, K)
    if isinstance(sparsity, NSA):
        T, (H, G, K) = long, of_long
        gates = torch.randn(1, T, H, 3, device=device, dtype=torch.bfloat16)
        attend = functools.partial(nsa_attention, gates_BTHC=gates, backend=backend, **sparsity._asdict())
    else:
        blocks, block_size, window, _ = sparsity
        attend = functools.partial(sparse_attention, selected_blocks=blocks, block_size=block_size, window=window)
    forward, backward = _attention_seconds(attend, T, H, G, K, device)
    footprint = sparsity.footprint(T, H, G, K)
    if isinstance(sparsity, NSA):
        rate = footprint.forward_flops / forward
        return rate, footprint.backward_flops / backward, rate
    forward -= _choice_seconds(sparsity, T, H, G, K, device)
    choice_flops = max(1, sparsity.footprint(long, *of_long).choice_flops)  # 0 where no block is chosen
    choice = choice_flops / _choice_seconds(sparsity, long, *of_long, device)
    return (footprint.forward_flops - footprint.choice_flops) / forward, footprint.backward_flops / backward, choice


def _choice_seconds(sparsity: Sparsity, T: int, H: int, G: int, K: int, device: torch.device) -> float:
    blocks, block_size, window, _ = sparsity
    q, k = (torch.randn(1, T, n, K, device=device, dtype=torch.bfloat16) for n in (H, G))
    return _seconds(lambda: select_blocks(q, k, selected_blocks=blocks, block_size=block_size, window=window))


def _document_rates(
    config, backend: str, device: torch.device, forward_flops: float, backward_flops: float
) -> tuple[float, float]:
    """Calls a second of forward and backward, from packed documents that are just long enough to attend alone."""
    if longest_together(backend) == math.inf:
        return H200.forward_documents, H200.backward_documents  # there are no such calls
    count, length = 12, LONGEST_TOGETHER + 256
    flops, forward, backward = _packed_seconds(config, backend, device, count, length, length * (length + 1) / 2)
    forward -= flops / forward_flops
    backward -= BACKWARD_FLOPS * flops / backward_flops
    return count / max(forward, 1e-9), count / max(backward, 1e-9)


def _together_rates(config, backend: str, device: torch.device) -> tuple[float, float]:
    """FLOP/s of forward and backward of short packed documents: 64 of 512 tokens."""
    pairs = together_pairs(512 * 513 / 2, 512)
    flops, forward, backward = _packed_seconds(config, backend, device, 64, 512, pairs)
    return flops / forward, BACKWARD_FLOPS * flops / backward


def _packed_seconds(
    config, backend: str, device: torch.device, count: int, length: int, pairs: float
) -> tuple[float, float, float]:
    """Of `count` documents in a sequence: FLOPs of forward, for `pairs` each, and seconds of forward and backward."""
    segments = torch.tensor([[0, i * length, (i + 1) * length] for i in range(count)])
    attend = functools.partial(attention, segments=segments, backend=backend)
    shape = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    seconds = _attention_seconds(attend, count * length, *shape, device)
    return attention_flops(shape[0], shape[2], count * pairs), *seconds


def _attention_seconds(
    attend: Callable[..., Tensor], T: int, H: int, G: int, K: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of one forward, without a graph, and of one backward of `attend(q, k, v)`."""
    q, k, v = (torch.randn(1, T, n, K, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (H, G, G))
    with torch.no_grad():
        forward = _seconds(lambda: attend(q, k, v))
    out = attend(q, k, v)
    return forward, _seconds(lambda: torch.autograd.grad(out, (q, k, v), q.detach(), retain_graph=True))


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes/s of copies within the GPU's memory, and each way of copies to and from the host at once."""
    source, target = (torch.empty(2**26, dtype=torch.uint8, device=device) for _ in range(2))
    arena, side = PinnedArena(2 * source.numel(), device), torch.cuda.Stream(device)
    sent, fetched = (arena.allocate(source.shape, torch.uint8) for _ in range(2))

    def copy_both_ways() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sent.copy_(source, non_blocking=True)
        target.copy_(fetched, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    memory = 2 * source.numel() / _seconds(lambda: target.copy_(source))
    return memory, source.numel() / _seconds(copy_both_ways)


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of one call, averaged over enough calls (200 ms) for the GPU to settle at its clock under load."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()  # libraries choose their kernels
    calls, milliseconds = 1, 0.0
    while milliseconds < 200:
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        milliseconds, calls = start.elapsed_time(stop), 4 * calls
    return milliseconds / (calls // 4) / 1000


# GPUs by data sheet


@dataclass(frozen=True)
class GPU:
    """One model of GPU.

    Args:
        device_name: pattern of a word that stands in the driver's name of it.
        memory_bytes: what nvidia-smi shows, which is less than the round number in the name.
        flops: dense bf16 peak of the tensor cores, float32 accumulation, FLOP/s.
        memory_bandwidth, link_bandwidth: bytes/s of its memory, and each way of its link to the host.
        attention_backend: what kernels.attention.full chooses there.
        nvlink_bandwidth: bytes/s each way of all its links to other GPUs. 0: none, or a bridge of two GPUs, which a
            host of more does not profit from; GPUs then exchange over their links to the host.
    """

    device_name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    attention_backend: str = "flash"
    nvlink_bandwidth: float = 0


# The driver's name of a GPU may match two entries; the first of them counts.
GPUS = {
    "RTX3090": GPU("RTX 3090", 24_576 * MIB, 71e12, 936e9, _PCIE_4),
    "RTX4090": GPU("RTX 4090", 24_564 * MIB, 165e12, 1008e9, _PCIE_4),
    "RTX5090": GPU("RTX 5090", 32_607 * MIB, 210e12, 1792e9, _PCIE_5, "cudnn"),
    "A10G": GPU("A10G", 23_028 * MIB, 70e12, 600e9, _PCIE_4),
    "A40": GPU("A40", 46_068 * MIB, 150e12, 696e9, _PCIE_4),
    "A6000": GPU("A6000", 49_140 * MIB, 155e12, 768e9, _PCIE_4),
    "L40": GPU("L40", 46_068 * MIB, 181e12, 864e9, _PCIE_4),
    "L40S": GPU("L40S", 46_068 * MIB, 362e12, 864e9, _PCIE_4),
    "A100-PCIe": GPU("A[18]00[- ](80GB )?PCI[Ee]", 81_920 * MIB, 312e12, 1935e9, _PCIE_4),
    "A100-40GB": GPU("A[18]00", 40_960 * MIB, 312e12, 1555e9, _PCIE_4, nvlink_bandwidth=300e9),
    "A100-80GB": GPU("A[18]00", 81_920 * MIB, 312e12, 2039e9, _PCIE_4, nvlink_bandwidth=300e9),
    "H100-PCIe": GPU("H100 PCIe", 81_559 * MIB, 756e12, 2039e9, _PCIE_5, "cudnn"),
    "H100": GPU("H100", 81_559 * MIB, 989e12, 3350e9, _PCIE_5, "cudnn", 450e9),
    "H200": GPU("G?H200", 143_771 * MIB, 989e12, 4800e9, _PCIE_5, "cudnn", 450e9),
    "B200": GPU("B200", 183_359 * MIB, 2250e12, 8000e9, _PCIE_5, "cudnn", 900e9),
}
# Measured on an H200: the rate of each attention kernel divided by cuDNN's. FlashAttention-2 does not use Hopper's new
# instructions; on an A100, for which it was written, it reaches the share of peak that cuDNN reaches on Hopper (Dao,
# arXiv 2307.08691).
_HOPPER_ATTENTION = {"cudnn": 1.0, "flash": 0.58, "flash-attn-4": 1.14}

# Likewise, forward and backward, of attention to chosen blocks and of NSA at 131,072 tokens; without the choice.
_SPARSE_ATTENTION, _NSA = (0.28, 0.45), (0.55, 0.62)


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


def scale_rates(gpu: GPU, attention_backend: str, sparsity: Sequence[Sparsity | NSA] = ()) -> Rates:
    """Rates of a `gpu` that is not here, if it comes as near to its data sheet as an H200 does to its own."""
    h200 = GPUS["H200"]
    flops, link = gpu.flops / h200.flops, gpu.link_bandwidth / h200.link_bandwidth
    dense = 1 if gpu.attention_backend == "flash" else _HOPPER_ATTENTION[attention_backend]
    # FlashAttention-2 attends to short packed documents where cuDNN attends to long ones.
    together = _HOPPER_ATTENTION["flash"] if gpu.attention_backend == attention_backend == "cudnn" else dense
    forward, backward = dense, dense
    if sparsity:
        forward, backward = _NSA if isinstance(sparsity[0], NSA) else _SPARSE_ATTENTION
    return Rates(
        matrix_flops=H200.matrix_flops * flops,
        attention_forward_flops=H200.attention_forward_flops * flops * forward,
        attention_backward_flops=H200.attention_backward_flops * flops * backward,
        memory_bytes=H200.memory_bytes * (gpu.memory_bandwidth / h200.memory_bandwidth),
        link_bytes=H200.link_bytes * link,
        choice_flops=H200.choice_flops * flops,
        gpu_link_bytes=_gpu_link_rate(gpu, H200.link_bytes * link),
        together_forward_flops=H200.attention_forward_flops * flops * together,
        together_backward_flops=H200.attention_backward_flops * flops * together,
    )


def _gpu_link_rate(gpu: GPU | None, link_bytes: float) -> float:
    """Bytes/s each way to the other GPUs of a host: by NVLink, or by the link to the host, which has `link_bytes`."""
    if gpu is None or not gpu.nvlink_bandwidth:
        return link_bytes
    return H200.gpu_link_bytes * gpu.nvlink_bandwidth / GPUS["H200"].nvlink_bandwidth
