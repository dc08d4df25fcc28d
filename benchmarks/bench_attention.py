"""Attention to everything, one document, forward and backward: `python -m benchmarks.bench_attention`.

`--tokens 1048576 --heads 4,1,128` is the share of each GPU, in each layer of the 4B, when eight GPUs share a sequence
of a million tokens. The table has a row for each installed kernel. Each is first compared with float32 on a short
document. `--windows 1024 4096 --selected_blocks 16 32` adds rows of windows and of sparse attention, which
tests/kernels/attention/ compares.
"""

import functools
import statistics

import torch

from benchmarks.common import extra_gib, parse_flags, print_json, print_results, require_close, time_once
from kernels.attention.attend import attention
from kernels.attention.full import BACKWARD_FLOPS, FULL, attention_flops, attention_reference, choose_backend
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.parts import AttentionKind


def main() -> None:
    arguments = parse_flags(
        __doc__,
        cpu_tokens=512,
        heads={"default": "32,8,128", "help": "query heads, key/value heads, head_dim"},
        backends={"nargs": "+", "default": [], "help": "kernels of kernels.attention.full; default: all installed"},
        windows={"type": int, "nargs": "*", "default": [], "help": "tokens of a window, for a row each"},
        selected_blocks={"type": int, "nargs": "*", "default": [], "help": "chosen blocks of sparse, for a row each"},
        repeats={"type": int, "default": 5},
    )
    device, shape = arguments.device, [int(part) for part in arguments.heads.split(",")]
    results = {}
    for backend in arguments.backends or installed(device):
        check(backend, shape, device)
        results[backend] = bench(FULL, backend, arguments.tokens, shape, arguments.repeats, device)
    windows = {f"window of {tokens}": Window(tokens) for tokens in arguments.windows}
    sparse = {f"sparse, {blocks} blocks": Sparse(blocks) for blocks in arguments.selected_blocks}
    for name, kind in {**windows, **sparse}.items():
        results[name] = bench(kind, "auto", arguments.tokens, shape, arguments.repeats, device)
    print_results(f"attention, {arguments.tokens} tokens, heads {arguments.heads}", results)
    settings = {"tokens": arguments.tokens, "heads": arguments.heads}
    print_json("attention", device, **settings, results=results)


def installed(device: torch.device) -> list[str]:
    found = ["cudnn", "flash"] if device.type == "cuda" else ["cpu"]
    try:
        return [*found, choose_backend("flash-attn-4", device)]
    except ValueError as error:
        print(error)
        return found


def make(tokens: int, shape: list[int], device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random q, k and v, and the gradient of the output."""
    torch.manual_seed(0)
    H, G, K = shape
    q, k, v, dout = (torch.randn(1, tokens, n, K, device=device, dtype=torch.bfloat16) for n in (H, G, G, H))
    return [x.requires_grad_() for x in (q, k, v)], dout


def check(backend: str, shape: list[int], device: torch.device) -> None:
    """Exit with status 1 if the kernel differs from attention in float32."""
    inputs, dout = make(777, shape, device)
    found = {}
    for name in (backend, "exact"):
        leaves = [x.detach().to(torch.float32 if name == "exact" else x.dtype).requires_grad_() for x in inputs]
        out = attention_reference(*leaves) if name == "exact" else attention(*leaves, backend=name)
        found[name] = [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]
    require_close(f"attention by {backend}", found[backend], found["exact"], 2e-2)


def bench(
    kind: AttentionKind, backend: str, tokens: int, shape: list[int], repeats: int, device: torch.device
) -> dict[str, float]:
    """Measures a kind by one kernel. TFLOP/s count attention to everything, whatever `kind` leaves out."""
    inputs, dout = make(tokens, shape, device)
    forward = functools.partial(attention, *inputs, kind=kind, backend=backend)
    out = forward()
    backward = functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    backward()
    forward_ms, backward_ms = (
        statistics.median(time_once(run, device) for _ in range(repeats)) for run in (forward, backward)
    )
    flops = attention_flops(shape[0], shape[2], tokens * (tokens + 1) / 2)
    return {
        "forward_ms": forward_ms,
        "forward_tflops": flops / forward_ms / 1e9,
        "backward_ms": backward_ms,
        "backward_tflops": BACKWARD_FLOPS * flops / backward_ms / 1e9,
        "backward_extra_gib": extra_gib(backward, device),
    }


if __name__ == "__main__":
    main()
