"""Cross-entropy of given logits, forward and backward: `python -m benchmarks.bench_cross_entropy
[--sweep]`."""

import importlib
import sys

import torch
import torch.nn.functional as F

from benchmarks.common import (
    compiled,
    copy_bytes_per_second,
    extra_gib,
    liger,
    parse_flags,
    print_json,
    print_results,
    print_table,
    relative_error,
    time_interleaved,
)
from kernels.cross_entropy import (
    RowOptions,
    Shard,
    cross_entropy,
    cross_entropy_reference,
    row_step,
)

# (warps in a program, columns that a thread takes at once)
CONFIGURATIONS = [(32, 8), (32, 16), (16, 8), (16, 16), (16, 32), (8, 16), (8, 32), (8, 64)]


def main() -> None:
    sweep_flag = {
        "action": "store_true",
        "help": "time the row kernel's launch configurations instead",
    }
    arguments = parse_flags(__doc__, sweep=sweep_flag)
    device, on_gpu = arguments.device, arguments.device.type == "cuda"
    check(device)
    copy_rate = copy_bytes_per_second(device)
    if arguments.sweep:
        results = {
            vocab: sweep(4096, vocab, copy_rate, device)
            for vocab in ((151936, 32000) if on_gpu else (500,))
        }
    else:
        results = compare(*((4096, 151936) if on_gpu else (64, 500)), copy_rate, device)
    print_json("cross_entropy", device, copy_bytes_per_second=copy_rate, results=results)


def compare(
    num_rows: int, vocab: int, copy_rate: float, device: torch.device
) -> dict[str, dict[str, float]]:
    """Compare forward and backward with one read and one write of the logits at a copy's rate."""
    target = torch.randint(vocab, (num_rows,), device=device)
    implementations = {
        "ours, in place": lambda x: cross_entropy(x, target, inplace=True),
        "ours": lambda x: cross_entropy(x, target),
        "eager": lambda x: F.cross_entropy(x.float(), target),
        "torch.compile": compiled(lambda x: F.cross_entropy(x.float(), target), device),
    }
    if peer := liger("cross_entropy", device):
        implementations["Liger, in place"] = lambda x: peer.LigerCrossEntropyFunction.apply(
            x, target, None
        )[0]

    def step(function, logits):
        # A new leaf over the same storage. A run in place leaves its gradient behind as the next
        # run's logits.
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf)

    logits = torch.randn(num_rows, vocab, dtype=torch.bfloat16, device=device)
    steps = {name: lambda f=function: step(f, logits) for name, function in implementations.items()}
    times = time_interleaved(steps, device)
    floor = 2 * logits.nbytes / copy_rate * 1000
    results = {
        name: {
            "ms": times[name],
            "of_copy": floor / times[name],
            "extra_gib": extra_gib(steps[name], device),
        }
        for name in steps
    }
    title = f"cross_entropy, {num_rows} x {vocab} bf16; one read and one write: {floor:.3f} ms"
    print_results(title, results, ["forward + backward ms", "of copy rate", "extra GiB"])
    return results


def sweep(num_rows: int, vocab: int, copy_rate: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of the row kernel alone, in place, for each launch configuration."""
    module = importlib.import_module("kernels.cross_entropy")
    logits = torch.randn(num_rows, vocab, dtype=torch.bfloat16, device=device)
    target = torch.randint(vocab, (num_rows,), device=device)
    options = RowOptions(-100, None, use_triton=device.type == "cuda")

    def step(num_warps, per_thread):
        module.launch_configuration = lambda *_: {
            "BLOCK": 32 * num_warps * per_thread,
            "num_warps": num_warps,
        }
        row_step(logits, target, options, Shard(None, 0), gradient=logits)

    chosen = module.launch_configuration
    steps = {
        f"{w} warps, {n} columns a thread": lambda w=w, n=n: step(w, n) for w, n in CONFIGURATIONS
    }
    times = time_interleaved(steps, device, repeats=20)
    module.launch_configuration = chosen
    floor = 2 * logits.nbytes / copy_rate * 1000
    print_table(
        f"row kernel, {num_rows} x {vocab} bf16 in place; now {chosen(vocab, 2)}",
        ["", "ms", "of copy rate"],
        [[name, ms, floor / ms] for name, ms in times.items()],
    )
    return times


def check(device: torch.device) -> None:
    """Exit with status 1 if a loss or gradient is far from float64's."""
    logits = torch.randn(40, 70_001, device=device).bfloat16().requires_grad_()
    target = torch.randint(70_001, (40,), device=device)
    loss = cross_entropy_reference(logits.double(), target)
    (exact,) = torch.autograd.grad(loss, logits)
    for inplace in (False, True):
        leaf = logits.detach().clone().requires_grad_()
        ours = cross_entropy(leaf, target, inplace=inplace)
        (gradient,) = torch.autograd.grad(ours, leaf)
        if not (relative_error(gradient, exact) <= 1e-2 and (ours - loss).abs() <= 1e-4):
            sys.exit("cross_entropy is wrong on this machine: not measured")


if __name__ == "__main__":
    main()
