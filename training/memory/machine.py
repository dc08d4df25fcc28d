"""The machine that a step is planned for: its free memory, the rates of its GPU, and GPUs by data
sheet.

The cost model divides amounts of work by `Rates`. The rates of the GPU at hand are measured. For
any other GPU, an H200's rates are scaled by NVIDIA's data sheets. The peak on a data sheet is also
the base of a run's model FLOP utilisation (MFU).
"""

import difflib
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.attention import KINDS
from kernels.attention.libraries import choose_backend
from kernels.config import ModelConfig
from kernels.experts.part import ExpertsPart
from kernels.fp8 import FP8_LINEAR
from kernels.gated_delta_net import DeltaRule
from kernels.linear import PLAIN, Linear
from kernels.lora import LORA, LoRA
from kernels.parts import Adapted, MixerKind
from training.host.errors import UserError
from training.host.memory import PinnedArena
from training.host.sizes import GIB, MIB, parse_bytes

DRIVER_BYTES = GIB  # GPU memory that CUDA and NCCL take for themselves
_PCIE_4, _PCIE_5 = 32e9, 64e9  # bytes/s each way over sixteen lanes


# Memory


def gpu_budget(text: str, device: torch.device) -> int:
    """Returns the bytes of a --memory_budget: a size, or "auto" for everything free on the GPU but
    DRIVER_BYTES.

    Memory that this process has already reserved counts as free.

    Raises UserError for more than is free.
    """
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    budget = free - DRIVER_BYTES if text == "auto" else parse_bytes(text, "memory_budget")
    if not 0 < budget <= free:
        raise UserError(
            f"memory_budget {text}: {free / GIB:.1f} GB of this GPU are free, of which the driver "
            "needs one; lower it, or end what else runs there"
        )
    return budget


def cap_gpu_memory(num_bytes: int, device: torch.device) -> None:
    """Makes `num_bytes` the hard limit of all that this process's GPU allocator reserves."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)


# Rates


# Work per second, by name. Matrix products ("products") and attention ("full forward") are in
# FLOP/s, and names with "calls" in calls/s. The names of _BYTES are in bytes/s. "memory": bytes
# read plus bytes written in the GPU's memory. "adapters": the same by products with adapters, which
# are too thin for the tensor cores to be what they wait for. "link": bytes each way between GPU and
# host, copied in both directions at once. "gpu link": bytes each way between GPUs of one host that
# exchange heads, including the copies that order the heads. "network": bytes each way per GPU to
# other hosts.
Rates = dict[str, float]
# measured on an H200
_BYTES: Rates = {"memory": 4.2e12, "adapters": 4.2e12, "link": 50e9, "gpu link": 170e9}
ASSUMED_NETWORK = 25e9  # bytes/s: an adapter of 200 Gbit/s per GPU
_GATHERED_BYTES = 2**28
# FLOP/s
_H200_PRODUCTS, _H200_FP8_PRODUCTS, _H200_FP8_GRADIENTS = 650e12, 978e12, 860e12


def measure_rates(
    shard: ModelConfig,
    attention_backend: str,
    device: torch.device,
    context_length: int,
    kinds: Sequence[MixerKind] = (),
    linear: Linear = PLAIN,
) -> Rates:
    """Measures this GPU's rates at the shapes of a rank's shard; on a CPU, returns an H200's.

    The measurement takes 2 to 6 GiB of the GPU for the 4B. Of layers whose kinds of attention have
    one name, the most common setting is measured. Rates of linear maps have the making of factors
    in them.
    """
    if device.type != "cuda":
        return H200
    rates = _copy_rates(device) | measure_attention(
        shard, attention_backend, device, context_length, kinds
    )
    x, weight = _factors(shard, device)
    hidden = x @ weight
    flops = 2 * len(x) * weight.numel()
    rates[PLAIN.rate] = flops / _seconds(lambda: x @ weight)
    y, dx, d_weight = linear.products
    for product in {y, dx} - {PLAIN}:
        rates[product.rate] = _measure_products(product, x, weight, hidden)
    if d_weight != PLAIN:
        factors = d_weight.factor(hidden), d_weight.factor(x)
        rates[d_weight.weight_rate] = flops / _seconds(
            lambda: d_weight.weight_gradient(*map(d_weight.transpose, factors))
        )
    for mlp in {parts.mlp for parts in shard.all_parts()}:
        rates |= mlp.measure_rates(shard.hidden_size, _seconds, device)
    rates["adapters"] = rates["memory"]
    if isinstance(linear, LoRA):
        a, b = x.new_zeros(16, x.shape[1]), x.new_zeros(hidden.shape[1], 16)
        adapted = Adapted(weight.t(), a, b)
        factors_t = LORA.factor(hidden.t()), LORA.factor(x.t())

        def use_adapter() -> None:
            torch.mm(x @ a.t(), b.t(), out=hidden)
            torch.mm(hidden @ b, a, out=x)
            LORA.weight_gradients(*factors_t, adapted, [False, True, True])

        # Both are read or written four times, as in a map's forward and backward.
        rates["adapters"] = 4 * (x.nbytes + hidden.nbytes) / _seconds(use_adapter)
    gpu_link = _gpu_link_rate(find_gpu(torch.cuda.get_device_name(device)), rates["link"])
    return rates | {"gpu link": gpu_link, "network": ASSUMED_NETWORK}


def measure_attention(
    shard: ModelConfig,
    attention_backend: str,
    device: torch.device,
    context_length: int,
    kinds: Sequence[MixerKind] = (),
) -> Rates:
    """Measures the rates of attention alone, on a GPU. Arguments are as in `measure_rates`.

    Each measurement stands between matrix products, as in a model: the GPU's clock is then as low
    as theirs leave it.
    """
    backend, rates = choose_backend(attention_backend, device), Rates()
    x, weight = _factors(shard, device)
    product = x @ weight
    # Products with as much work as a layer's matrices have at 65,536 tokens.
    count = 65_536 * shard.layer_active_parameters(0) // (len(x) * weight.numel())

    def run_products() -> None:
        for _ in range(count):
            torch.mm(x, weight, out=product)

    def seconds(work: Callable[[], object], *, in_a_row: bool = False) -> float:
        return _seconds(work) if in_a_row else _seconds_between(work, run_products)

    mixers = Counter(parts.mixer for parts in shard.all_parts(kinds))
    most_common = {mixer.kind.name: mixer for mixer, _ in reversed(mixers.most_common())}
    for mixer in most_common.values():
        kind = mixer.kind.for_longest(context_length)
        rates |= kind.measure_rates(*mixer.heads, context_length, backend, seconds, device)
    return rates


def _measure_products(linear: Linear, x: Tensor, weight: Tensor, hidden: Tensor) -> float:
    """Measures a linear map's products along rows; x @ weight has the shape of `hidden`.

    The making of x's factor counts; of an activation's factor what it adds to writing the
    activation.
    """
    into, back = linear.factor(weight.t().contiguous()), linear.factor(weight)
    activation = hidden, hidden, "silu", True

    def products() -> None:
        linear.forward(linear.factor(x), into)
        linear.forward(linear.activated(*activation), back)

    taken = _seconds(products) - _seconds(lambda: PLAIN.activated(*activation))
    return 4 * len(x) * weight.numel() / taken


def measure_network(group: dist.ProcessGroup, num_machines: int, device: torch.device) -> float:
    """Returns bytes/s each way per GPU between machines of equally many ranks.

    All ranks of `group` call this.
    """
    part = torch.empty(_GATHERED_BYTES // group.size(), dtype=torch.uint8, device=device)
    gathered = torch.empty(len(part) * group.size(), dtype=torch.uint8, device=device)
    wait = torch.get_device_module(device).synchronize
    for repeats in (1, 5):  # NCCL connects in the first
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_gather_into_tensor(gathered, part, group=group)
        wait()
        seconds = (time.perf_counter() - start) / repeats
    # a machine's ranks share what comes from other machines
    return (num_machines - 1) * len(part) / seconds


def _copy_rates(device: torch.device) -> Rates:
    """Returns the rates "memory" and "link", bytes/s, of copies of 64 MiB."""
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
    return {"memory": memory, "link": source.numel() / _seconds(copy_both_ways)}


def _factors(shard: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns random factors of a product of the MLP, for 16,384 tokens."""
    width = shard.parts(0).mlp.active_width
    shapes = (16_384, shard.hidden_size), (shard.hidden_size, width)
    return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)


def _seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of one call, averaged over 200 ms of calls: the GPU settles at its clock
    under load."""
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


def _seconds_between(work: Callable[[], object], products: Callable[[], object]) -> float:
    """Returns the seconds of one call of `work` after `products`, the matrix products of a layer.

    A GPU lowers its clock where its power would pass a limit. In a step, kernels that need less
    power than products run at a clock near the products': an H200 had 1.55 GHz then, and 1.98 GHz
    where such kernels ran in a row.
    """
    work()  # libraries choose their kernels
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
    for start, stop in spans:
        products()
        start.record()
        work()
        stop.record()
    stop.synchronize()
    # the first heat it up
    return sum(start.elapsed_time(stop) for start, stop in spans[2:]) / len(spans[2:]) / 1000


# GPUs by data sheet


@dataclass(frozen=True)
class GPU:
    """One model of GPU, by its data sheet."""

    # a regular expression that finds the GPU in the driver's name for it, as whole words
    device_name: str
    memory_bytes: int  # memory that nvidia-smi shows: less than the round number in the GPU's name
    flops: float  # FLOP/s, dense bf16 peak of the tensor cores with float32 accumulation
    memory_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s each way between GPU and host
    # the backend that `kernels.attention.libraries.choose_backend` chooses on it
    attention_backend: str = "flash"
    # Bytes/s each way of all its links to other GPUs together. 0: GPUs exchange over their links to
    # the host. A bridge between two GPUs counts as 0 too: a host of more GPUs gains nothing by it.
    nvlink_bandwidth: float = 0
    has_fp8: bool = True


# The first entry that matches the driver's name counts. "NVIDIA A100 80GB PCIe" matches all entries
# of an A100. GeForce cards sum products in float32 at half the speed of sums in half precision, so
# their `flops` are half of what is often quoted. Half a link is a link of eight lanes.
GPUS = {
    "RTX3060": GPU("RTX 3060", 12_288 * MIB, 25.5e12, 360e9, _PCIE_4, has_fp8=False),
    "RTX3060Ti": GPU("RTX 3060 Ti", 8_192 * MIB, 32.4e12, 448e9, _PCIE_4, has_fp8=False),
    "RTX3070": GPU("RTX 3070", 8_192 * MIB, 40.6e12, 448e9, _PCIE_4, has_fp8=False),
    "RTX3080": GPU("RTX 3080", 10_240 * MIB, 59.5e12, 760e9, _PCIE_4, has_fp8=False),
    "RTX3080Ti": GPU("RTX 3080 Ti", 12_288 * MIB, 68.2e12, 912e9, _PCIE_4, has_fp8=False),
    "RTX3090": GPU("RTX 3090", 24_576 * MIB, 71e12, 936e9, _PCIE_4, has_fp8=False),
    "RTX3090Ti": GPU("RTX 3090 Ti", 24_564 * MIB, 80e12, 1008e9, _PCIE_4, has_fp8=False),
    "RTX4060": GPU("RTX 4060", 8_188 * MIB, 30.2e12, 272e9, _PCIE_4 / 2),
    "RTX4060Ti-8GB": GPU("RTX 4060 Ti", 8_188 * MIB, 44.1e12, 288e9, _PCIE_4 / 2),
    "RTX4060Ti-16GB": GPU("RTX 4060 Ti", 16_380 * MIB, 44.1e12, 288e9, _PCIE_4 / 2),
    "RTX4070": GPU("RTX 4070", 12_282 * MIB, 58.3e12, 504e9, _PCIE_4),
    "RTX4070Super": GPU("RTX 4070 SUPER", 12_282 * MIB, 71e12, 504e9, _PCIE_4),
    "RTX4070Ti": GPU("RTX 4070 Ti", 12_282 * MIB, 80.2e12, 504e9, _PCIE_4),
    "RTX4070TiSuper": GPU("RTX 4070 Ti SUPER", 16_376 * MIB, 88.2e12, 672e9, _PCIE_4),
    "RTX4080": GPU("RTX 4080", 16_376 * MIB, 97.5e12, 717e9, _PCIE_4),
    "RTX4080Super": GPU("RTX 4080 SUPER", 16_376 * MIB, 104e12, 736e9, _PCIE_4),
    "RTX4090": GPU("RTX 4090", 24_564 * MIB, 165e12, 1008e9, _PCIE_4),
    "RTX5060Ti-8GB": GPU("RTX 5060 Ti", 8_151 * MIB, 47.4e12, 448e9, _PCIE_5 / 2, "cudnn"),
    "RTX5060Ti-16GB": GPU("RTX 5060 Ti", 16_311 * MIB, 47.4e12, 448e9, _PCIE_5 / 2, "cudnn"),
    "RTX5070": GPU("RTX 5070", 12_227 * MIB, 61.7e12, 672e9, _PCIE_5, "cudnn"),
    "RTX5070Ti": GPU("RTX 5070 Ti", 16_303 * MIB, 87.9e12, 896e9, _PCIE_5, "cudnn"),
    "RTX5080": GPU("RTX 5080", 16_303 * MIB, 113e12, 960e9, _PCIE_5, "cudnn"),
    "RTX5090": GPU("RTX 5090", 32_607 * MIB, 210e12, 1792e9, _PCIE_5, "cudnn"),
    "A10": GPU("A10", 23_028 * MIB, 125e12, 600e9, _PCIE_4, has_fp8=False),
    "A10G": GPU("A10G", 23_028 * MIB, 70e12, 600e9, _PCIE_4, has_fp8=False),
    "A40": GPU("A40", 46_068 * MIB, 150e12, 696e9, _PCIE_4, has_fp8=False),
    "A4000": GPU("RTX A4000", 16_376 * MIB, 76.7e12, 448e9, _PCIE_4, has_fp8=False),
    "A5000": GPU("RTX A5000", 24_564 * MIB, 111e12, 768e9, _PCIE_4, has_fp8=False),
    "A6000": GPU("RTX A6000", 49_140 * MIB, 155e12, 768e9, _PCIE_4, has_fp8=False),
    "RTX6000-Ada": GPU("RTX 6000 Ada", 49_140 * MIB, 364e12, 960e9, _PCIE_4),
    "RTX-PRO-6000": GPU(
        "RTX PRO 6000 Blackwell (Workstation|Server)",
        97_887 * MIB,
        504e12,
        1792e9,
        _PCIE_5,
        "cudnn",
    ),
    "L4": GPU("L4", 23_034 * MIB, 121e12, 300e9, _PCIE_4),
    "L40": GPU("L40", 46_068 * MIB, 181e12, 864e9, _PCIE_4),
    "L40S": GPU("L40S", 46_068 * MIB, 362e12, 864e9, _PCIE_4),
    "A100-PCIe": GPU(
        "A[18]00[- ](80GB )?PCI[Ee]", 81_920 * MIB, 312e12, 1935e9, _PCIE_4, has_fp8=False
    ),
    "A100-40GB": GPU(
        "A[18]00", 40_960 * MIB, 312e12, 1555e9, _PCIE_4, nvlink_bandwidth=300e9, has_fp8=False
    ),
    "A100-80GB": GPU(
        "A[18]00", 81_920 * MIB, 312e12, 2039e9, _PCIE_4, nvlink_bandwidth=300e9, has_fp8=False
    ),
    "H100-PCIe": GPU("H100 PCIe", 81_559 * MIB, 756e12, 2039e9, _PCIE_5, "cudnn"),
    "H100": GPU("H100", 81_559 * MIB, 989e12, 3350e9, _PCIE_5, "cudnn", 450e9),
    "H200": GPU("G?H200", 143_771 * MIB, 989e12, 4800e9, _PCIE_5, "cudnn", 450e9),
    "B200": GPU("B200", 183_359 * MIB, 2250e12, 8000e9, _PCIE_5, "cudnn", 900e9),
}
_ROUNDED = 0.1  # share by which a size as sold may be off: 48 GB are on an A40, which shows 45
# after a card's name, these words name another: "RTX 4070 Ti"
_OTHER_CARD = r"(?! (Ti|SUPER|D|Laptop)\b)"
# Short names, as `_read_name` makes them, of GPUs older than Ampere: T4, V100, P100, RTX 2080 Ti,
# GTX 1080.
_WITHOUT_BF16 = r"t4g?|[kmp]\d+|v100s?|titan.*|gtx.*|(10|16|20)\d0(ti)?(super)?"

# Short names of what other makers sell, and those makers' words for it.
_OTHER_MAKERS = {
    "Apple's": r"(apple.*)?m[1-5](pro|max|ultra)?|apple.*|mac.*|mps|metal",
    "AMD's": r"mi\d{2,3}[axp]?|.*radeon.*|rx[5-9]\d{3}.*|[679]\d{3}(xtx?|gre)|w[67]\d00"
    r"|(amd|instinct|ryzen|rocm).*",
    "Intel's": r"(intel|habana)*gaudi.*|habana.*|hpu|arc.*|a[357][1-8]0m?|b5[78]0|intel.*"
    r"|max1[15]50|pontevecchio|xpu",
    "Google's": r"(google)?(cloud)?tpu.*|v[2-9](e|p|lite.*)|trillium|ironwood",
    "Amazon's": r"(aws|amazon)*(trainium|inferentia)\d?.*|trn\d.*|inf\d.*|neuron.*",
    "Huawei's": r"(huawei)?ascend.*|910[abc]\d?|npu",
    "Other makers'": r"cerebras.*|wse\d|groq.*|lpu|cambricon.*|mlu\d+.*|(moorethreads)?mtts?\d+"
    r"|graphcore.*|ipu",
}
_USUAL = "RTX4090", "A100", "H100", "H200"


def find_gpu(device_name: str) -> GPU | None:
    """Returns the GPU that has this name in the driver; None if the table does not have it."""
    pattern = r"\b{}\b" + _OTHER_CARD
    return next(
        (gpu for gpu in GPUS.values() if re.search(pattern.format(gpu.device_name), device_name)),
        None,
    )


def parse_gpu(text: str) -> tuple[str, GPU]:
    """Returns a GPU of the table and its name there, or for a size ("24GB") the slowest GPU of the
    table that has it.

    "RTX4090" may be written "rtx 4090", "4090" or "NVIDIA GeForce RTX 4090". Memory may follow:
    "H100-80GB". Without it, the GPU with the most memory is meant: "A100" is the A100-80GB. The
    name of a size says which GPU is assumed.

    Raises:
        UserError: neither a name of the table nor a size from DRIVER_BYTES to the largest GPU's; a
            GPU without bf16.
    """
    short_name, size = _read_name(text)
    named = {}
    for name, gpu in GPUS.items():
        if _read_name(name)[0] == short_name and _has_size(gpu, size):
            named[name] = gpu
    if named:
        return max(named.items(), key=lambda item: item[1].memory_bytes)
    for maker, names in _OTHER_MAKERS.items():
        if re.fullmatch(names, short_name):
            why = f"{maker} GPUs and accelerators are not supported"
            raise UserError(f"gpu {text[:80]}: {why}; give one of NVIDIA's, as {', '.join(_USUAL)}")
    if re.fullmatch(_WITHOUT_BF16, short_name) or "quadro" in text.lower():
        raise UserError(
            f"{text[:80]} has no bf16, in which Fathom trains on a GPU; "
            "give an Ampere GPU or a newer one"
        )
    with suppress(UserError):
        if slowest := _slowest_with(parse_bytes(text)):
            name, gpu = slowest
            return f"{text} (assumed: {name}, the slowest known GPU with as much)", gpu
    _refuse_several(text)
    names_by_short = {_read_name(name)[0]: name for name in GPUS}
    near = difflib.get_close_matches(short_name, names_by_short, cutoff=0.65)
    meant = f", did you mean {' or '.join(names_by_short[short] for short in near)}" if near else ""
    most = max(gpu.memory_bytes for gpu in GPUS.values()) / GIB
    raise UserError(
        f"no GPU {text[:80]!r} in the table{meant}; give one of {', '.join(GPUS)}; "
        f"or a size above 1GB and up to {most:.0f}GB, such as 24GB"
    )


def _has_size(gpu: GPU, gigabytes: int | None) -> bool:
    """Whether a GPU has about so much memory; None: any."""
    return gigabytes is None or abs(gpu.memory_bytes / GIB / gigabytes - 1) < _ROUNDED


def _slowest_with(num_bytes: int) -> tuple[str, GPU] | None:
    """Returns the slowest GPU of the table with so much memory, cut to it, if there is one."""
    enough = (1 - _ROUNDED) * num_bytes
    large = {name: gpu for name, gpu in GPUS.items() if gpu.memory_bytes > enough}
    if not large or num_bytes <= DRIVER_BYTES:
        return None
    name = min(large, key=lambda name: large[name].flops)
    return name, replace(large[name], memory_bytes=num_bytes)


def _refuse_several(text: str) -> None:
    """Raises UserError for a text that names several GPUs, such as "2x4090"."""
    several = r"([1-9]\d?) ?[x*] ?(.{2,40})|(.{,40}\d.{,40}?) ?[x*:] ?([1-9]\d?)"
    if match := re.fullmatch(several, text.strip()):
        number, name = match[1] or match[4], match[2] or match[3]
        parse_gpu(name)  # refuses others by their name
        raise UserError(
            f"gpu names one GPU, got {text[:80]!r}; give --gpu {shlex.quote(name)} --nproc {number}"
        )


def _read_name(text: str) -> tuple[str, int | None]:
    """Returns a GPU's short name and gigabytes, if named: "NVIDIA A100-40GB" is ("a100", 40)."""
    text = re.sub(r"generation|blackwell|(workstation|server) edition", "", text.lower())
    size = re.search(r"(?<=[a-z0-9][- ])(\d{1,4}) ?gi?b?\b", text)
    if size:
        text = text.replace(size[0], "")
    name = re.sub(r"nvidia|geforce|quadro|tesla|rtx|sxm\d?|hbm\d?e?|[- _]", "", text)
    return name, int(size[1]) or None if size else None


def scale_rates(
    gpu: GPU, attention_backend: str, kinds: Iterable[MixerKind] | None = None, head_dim: int = 128
) -> Rates:
    """Returns the rates of a GPU that is not here: it is assumed to come as near to its data sheet
    as an H200 does.

    Args:
        attention_backend: a name in kernels.attention.libraries.BACKENDS.
        kinds: the kinds of attention to have rates for; None: all.
        head_dim: width of attention's heads.
    """
    h200 = GPUS["H200"]
    flops, link = gpu.flops / h200.flops, _BYTES["link"] * gpu.link_bandwidth / h200.link_bandwidth
    products = {
        PLAIN.rate: _H200_PRODUCTS,
        FP8_LINEAR.rate: _H200_FP8_PRODUCTS,
    }
    products |= {
        FP8_LINEAR.weight_rate: _H200_FP8_GRADIENTS,
        ExpertsPart.rate: ExpertsPart.h200_rate,
    }
    rates = {name: rate * flops for name, rate in products.items()}
    for kind in [kind() for kind in (*KINDS.values(), DeltaRule)] if kinds is None else {*kinds}:
        for name, rate in kind.rates_with(
            attention_backend, gpu.attention_backend, head_dim
        ).items():
            rates[name] = rate * (1 if "calls" in name else flops)
    memory = _BYTES["memory"] * gpu.memory_bandwidth / h200.memory_bandwidth
    links = {"link": link, "gpu link": _gpu_link_rate(gpu, link), "network": ASSUMED_NETWORK}
    return rates | {
        "memory": memory,
        "adapters": _BYTES["adapters"] * memory / _BYTES["memory"],
        **links,
    }


def _gpu_link_rate(gpu: GPU | None, link_bytes: float) -> float:
    """Returns bytes/s each way to the other GPUs of a host: over NVLink, else `link_bytes`, the
    link to the host."""
    if gpu is None or not gpu.nvlink_bandwidth:
        return link_bytes
    return _BYTES["gpu link"] * gpu.nvlink_bandwidth / GPUS["H200"].nvlink_bandwidth


H200 = scale_rates(GPUS["H200"], "cudnn")
