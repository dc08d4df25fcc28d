"""Attention to everything, one document, forward and backward: `python -m
benchmarks.bench_attention`.

`--tokens 1048576 --heads 4,1,128` is the share of each GPU, in each layer of the 4B, when eight
GPUs share a sequence of a million tokens. The table has a row for each installed kernel. Each is
first compared with float32 on a short document. `--selected_blocks 16 32` adds rows of sparse
attention, which tests/kernels/attention/ compares.

`--windows 1024 4096` adds rows of windows: our kernels, PyTorch's FlashAttention-2, flash-attn-4
where it is installed, and FlexAttention compiled.
"""

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.common import (
    extra_gib,
    parse_flags,
    print_json,
    print_results,
    require_close,
    time_once,
)
from kernels.attention.attend import attention
from kernels.attention.full import BACKWARD_FLOPS, attention_flops, attention_reference
from kernels.attention.libraries import choose_backend
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window, window_reference

# q [B, T, H, K], k and v [B, T, G, K] to [B, T, H, K]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    arguments = parse_flags(
        __doc__,
        cpu_tokens=512,
        heads={"default": "32,8,128", "help": "query heads, key/value heads, head_dim"},
        backends={
            "nargs": "+",
            "default": [],
            "help": "kernels of kernels.attention.full; default: all installed",
        },
        windows={
            "type": int,
            "nargs": "*",
            "default": [],
            "help": "tokens of a window, for a row each",
        },
        selected_blocks={
            "type": int,
            "nargs": "*",
            "default": [],
            "help": "chosen blocks of sparse, for a row each",
        },
        repeats={"type": int, "default": 5},
    )
    device, shape = arguments.device, [int(part) for part in arguments.heads.split(",")]
    results = {}
    backends = arguments.backends or installed(device)
    for backend in backends:
        run = functools.partial(attention, backend=backend)
        check(backend, run, attention_reference, shape, device)
        results[backend] = bench(run, arguments.tokens, shape, arguments.repeats, device)
    for window in arguments.windows:
        for name, run in windows(window, backends, device).items():
            check(
                name,
                run,
                functools.partial(exact_window, window=window),
                shape,
                device,
                window + 777,
            )
            results[name] = bench(run, arguments.tokens, shape, arguments.repeats, device)
    for blocks in arguments.selected_blocks:
        run = functools.partial(attention, kind=Sparse(blocks))
        results[f"sparse, {blocks} blocks"] = bench(
            run, arguments.tokens, shape, arguments.repeats, device
        )
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


def make(
    tokens: int, shape: list[int], device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random q, k and v, and the gradient of the output."""
    torch.manual_seed(0)
    H, G, K = shape
    q, k, v, dout = (
        torch.randn(1, tokens, n, K, device=device, dtype=torch.bfloat16) for n in (H, G, G, H)
    )
    return [x.requires_grad_() for x in (q, k, v)], dout


def windows(window: int, backends: list[str], device: torch.device) -> dict[str, Attend]:
    """Functions that attend to the last `window` tokens: our kernels and libraries'."""
    run = functools.partial(attention, kind=Window(window))
    found = {f"window of {window}, ours": run}
    if "flash-attn-4" in backends:
        found[f"window of {window}, flash-attn-4"] = functools.partial(run, backend="flash-attn-4")
    if device.type != "cuda":  # FlexAttention has no backward there
        return found
    found[f"window of {window}, FlashAttention-2"] = functools.partial(run, impl="torch")
    torch._functorch.config.donated_buffer = False  # donated buffers rule out retain_graph=True
    compiled = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def mask(T: int):
        def is_visible(b, h, q_index, k_index):
            return (k_index <= q_index) & (q_index - k_index < window)

        # without the T x T matrix
        return torch.compile(create_block_mask)(is_visible, None, None, T, T, device=device)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask(q.shape[2]), enable_gqa=True).transpose(1, 2)

    return {**found, f"window of {window}, FlexAttention": flex}


def exact_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return window_reference(q, k, v, window)[0]


def check(
    name: str, run: Attend, reference: Attend, shape: list[int], device: torch.device,
    tokens: int = 777
) -> None:  # fmt: skip
    """Exit with status 1 if the kernel differs from its reference in float32."""
    inputs, dout = make(tokens, shape, device)
    found = []
    for function, dtype in ((run, torch.bfloat16), (reference, torch.float32)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    require_close(f"attention by {name}", *found, 2e-2)


def bench(
    run: Attend, tokens: int, shape: list[int], repeats: int, device: torch.device
) -> dict[str, float]:
    """Measures a function. TFLOP/s count attention to everything, whatever the function leaves
    out."""
    inputs, dout = make(tokens, shape, device)
    forward = functools.partial(run, *inputs)
    out = forward()
    backward = functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    backward()
    forward_ms, backward_ms = (
        statistics.median(time_once(run, device) for _ in range(repeats))
        for run in (forward, backward)
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
