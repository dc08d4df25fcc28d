"""What a machine does in a second: the seconds of training.memory.cost_model are amounts of work over these."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.attention import choose_backend
from training.memory.host_copies import PinnedArena


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second; the defaults are one H200's."""

    matrix_flops: float = 650e12
    attention_forward_flops: float = 570e12
    attention_backward_flops: float = 535e12
    # Packed documents; a call for each costs this besides its floating-point operations.
    forward_documents: float = 12_000
    backward_documents: float = 5_000
    memory_bytes: float = 4.2e12  # read and written
    link_bytes: float = 50e9  # each way between host and GPU, both at once


H200 = Rates()


def measure_rates(config, device: torch.device, context_length: int) -> Rates:
    """The rates of this GPU at the model's shapes; for the 4B it takes 1.2 to 5 GiB meanwhile. On a CPU, an H200's.

    Args:
        config: the model's shape, as model.ModelConfig names it.
        context_length: tokens.
    """
    if device.type != "cuda":
        return H200
    flops = _matrix_rate(config, device), *_attention_rates(config, device, context_length)
    return Rates(*flops, *_document_rates(config, device, *flops[1:]), *_copy_rates(device))


def _matrix_rate(config, device: torch.device) -> float:
    x, weight = (
        torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        for rows, columns in ((16_384, config.hidden_size), (config.hidden_size, config.intermediate_size))
    )
    return 2 * len(x) * weight.numel() / _seconds(lambda: x @ weight)


def _attention_rates(config, device: torch.device, context_length: int) -> tuple[float, float]:
    """Forward and backward. Past 131,072 tokens, where forward gets slower, of one key/value head at such a length."""
    T, G, K = 16_384, config.num_key_value_heads, config.head_dim
    if context_length > 131_072:
        T, G = min(context_length, 524_288), 1
    H = G * (config.num_attention_heads // config.num_key_value_heads)
    q, k, v = (torch.randn(1, T, heads, K, device=device, dtype=torch.bfloat16) for heads in (H, G, G))
    backend = choose_backend(config.attention_backend, device)
    ops, flops = torch.ops.fathom, 4 * H * K * (T * (T + 1) // 2)
    out, lse = ops.attention_forward(q, k, v, None, backend)
    return (
        flops / _seconds(lambda: ops.attention_forward(q, k, v, None, backend)),
        2.5 * flops / _seconds(lambda: ops.attention_backward(q, q, k, v, out, lse, None, backend)),
    )


def _document_rates(config, device: torch.device, forward_flops: float, backward_flops: float) -> tuple[float, float]:
    """Forward and backward, of short documents packed in a sequence."""
    count, length, H, G, K = 32, 512, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (torch.randn(1, count * length, n, K, device=device, dtype=torch.bfloat16) for n in (H, G, G))
    segments = torch.tensor([[0, i * length, (i + 1) * length] for i in range(count)])
    backend, ops = choose_backend(config.attention_backend, device), torch.ops.fathom
    flops = 4 * H * K * count * length * (length + 1) // 2
    out, lse = ops.attention_forward(q, k, v, segments, backend)
    forward = _seconds(lambda: ops.attention_forward(q, k, v, segments, backend)) - flops / forward_flops
    backward = _seconds(lambda: ops.attention_backward(q, q, k, v, out, lse, segments, backend))
    backward -= 2.5 * flops / backward_flops
    return tuple(count / max(seconds, 1e-9) for seconds in (forward, backward))


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Within the GPU's memory, and to and from the host at once."""
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
    """Of one call, over enough of them for the clock that the GPU settles at under load."""
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
