"""Loss and both gradients of the output projection: `python -m
benchmarks.bench_linear_cross_entropy`.

The floor is the loop of the three GEMMs alone: logits, dx, and dW accumulated in float32. Two words
fewer make a vocabulary that is no multiple of 8: the floor's products are then not aligned, and
ours are, but for the last words.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.common import (
    compiled,
    extra_gib,
    liger,
    parse_flags,
    print_json,
    print_results,
    print_table,
    relative_error,
    time_interleaved,
)
from kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

CHUNK_SIZE = 4096


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=64)
    device, tokens = arguments.device, arguments.tokens
    on_gpu = device.type == "cuda"
    hidden, vocab = (2560, 151936) if on_gpu else (32, 301)
    check(device)

    weight = (0.02 * torch.randn(vocab, hidden, device=device)).bfloat16().requires_grad_()
    results = {
        "chunked": compare_chunked(tokens, weight),
        "two words fewer": compare_chunked(tokens, weight[:-2].detach().requires_grad_()),
        "full logits": compare_with_full_logits(tokens // 4, weight),
        "error": compare_errors(8192 if on_gpu else 64, weight),
        "long": measure_long(1_048_576 if on_gpu else 512, weight),
    }
    print_json("linear_cross_entropy", device, tokens=tokens, results=results)


def make_inputs(tokens: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (hidden states [tokens, hidden], labels [tokens])."""
    hidden = torch.randn(
        tokens, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True
    )
    return hidden, torch.randint(len(weight), (tokens,), device=weight.device)


def liger_loss(device: torch.device) -> Callable | None:
    """Liger's (hidden, weight, target, accum_dtype) -> mean loss; None without a GPU or without
    Liger."""
    if not (peer := liger("fused_linear_cross_entropy", device)):
        return None
    apply = peer.LigerFusedLinearCrossEntropyFunction.apply
    return lambda x, w, y, accum_dtype: apply(
        x, w, y, None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype
    )[0]  # fmt: skip


def cut_cross_entropy_loss(device: torch.device) -> Callable | None:
    if device.type != "cuda":
        return None
    try:
        from cut_cross_entropy import linear_cross_entropy as loss
    except ImportError as error:
        print(f"cut-cross-entropy: not installed ({error})")
        return None
    return loss


def gemm_loop(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    """The three GEMMs of each chunk and nothing else, into memory allocated before."""
    x, weight = x.detach(), weight.detach()
    logits = x.new_empty(min(CHUNK_SIZE, len(x)), len(weight))
    d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)

    def run():
        for start in range(0, len(x), CHUNK_SIZE):
            chunk = x[start : start + CHUNK_SIZE]
            g = torch.mm(chunk, weight.T, out=logits[: len(chunk)])
            torch.mm(g, weight, out=d_x[start : start + CHUNK_SIZE])
            if x.is_cuda:
                torch.addmm(d_weight, g.T, chunk, out_dtype=torch.float32, out=d_weight)
            else:
                d_weight.addmm_(g.T.float(), chunk.float())

    return run


def compare_chunked(tokens: int, weight: torch.Tensor) -> dict[str, dict[str, float]]:
    device = weight.device
    x, target = make_inputs(tokens, weight)
    masked = torch.where(torch.rand(tokens, device=device) < 0.75, -100, target)
    num_masked, weights = int((masked != -100).sum()), torch.randn(tokens, device=device)
    losses = {
        "ours": lambda: linear_cross_entropy(x, weight, target, num_valid_tokens=tokens),
        # The last position of a sequence has no target; the denominator counts all micro-batches'
        # targets.
        "ours, as model.py calls it": lambda: linear_cross_entropy(
            x[None, :-1], weight, target[None, 1:], denominator=tokens - 1
        ),
        "ours, 75% of labels -100": lambda: linear_cross_entropy(
            x, weight, masked, num_valid_tokens=num_masked
        ),
        "ours, a weight per token": lambda: linear_cross_entropy(
            x, weight, target, num_valid_tokens=tokens, weights=weights
        ),
    }
    if peer := liger_loss(device):
        losses["Liger, bf16 dW"] = lambda: peer(x, weight, target, None)
        losses["Liger, float32 dW"] = lambda: peer(x, weight, target, torch.float32)
        losses["Liger, float32 dW, 75% of labels -100"] = lambda: peer(
            x, weight, masked, torch.float32
        )
    if cut := cut_cross_entropy_loss(device):
        losses["cut-cross-entropy"] = lambda: cut(x, weight, target)
        losses["cut-cross-entropy, 75% of labels -100"] = lambda: cut(x, weight, masked)
    steps = {name: lambda f=f: torch.autograd.grad(f(), (x, weight)) for name, f in losses.items()}
    floor = "three bare GEMMs"
    steps = {floor: gemm_loop(x, weight), **steps}
    gib = {name: extra_gib(step, device) for name, step in steps.items()}
    times = time_interleaved(steps, device, repeats=3, warmup=1)
    results = {
        name: {"ms": ms, "of_floor": ms / times[floor], "extra_gib": gib[name]}
        for name, ms in times.items()
    }
    shape = " x ".join(map(str, (tokens, weight.shape[1], len(weight))))
    header = ["ms", "/ three bare GEMMs", "extra GiB, gradients included"]
    print_results(f"linear_cross_entropy, {shape} bf16, forward + backward", results, header)
    return results


def full_logits_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def compare_with_full_logits(tokens: int, weight: torch.Tensor) -> dict[str, dict[str, float]]:
    device = weight.device
    x, target = make_inputs(tokens, weight)
    full_compiled = compiled(full_logits_loss, device)
    losses = {
        "ours": lambda: linear_cross_entropy(x, weight, target),
        "eager": lambda: full_logits_loss(x, weight, target),
        "torch.compile": lambda: full_compiled(x, weight, target),
    }
    steps = {name: lambda f=f: torch.autograd.grad(f(), (x, weight)) for name, f in losses.items()}
    times = time_interleaved(steps, device, repeats=3, warmup=1)
    results = {
        name: {"ms": ms, "extra_gib": extra_gib(steps[name], device)} for name, ms in times.items()
    }
    print_results(f"against full logits, {tokens} tokens", results, ["ms", "extra GiB"])
    return results


def compare_errors(tokens: int, weight: torch.Tensor) -> dict[str, float]:
    """Relative error of dW on sampled rows of the head, compared with float64 throughout."""
    x, target = make_inputs(tokens, weight)
    rows = torch.randperm(len(weight), device=weight.device)[:512]
    exact = torch.zeros(len(rows), weight.shape[1], dtype=torch.float64, device=weight.device)
    with torch.no_grad():
        w = weight.double()
        for chunk, labels in zip(x.split(1024), target.split(1024)):
            g = (chunk.double() @ w.T).softmax(1)[:, rows]
            g -= (labels[:, None] == rows).double()
            exact += g.T @ chunk.double() / tokens
    losses = {"ours": lambda: linear_cross_entropy(x, weight, target)}
    if peer := liger_loss(weight.device):
        losses["Liger, bf16 dW"] = lambda: peer(x, weight, target, None)
        losses["Liger, float32 dW"] = lambda: peer(x, weight, target, torch.float32)
    results = {}
    for name, loss in losses.items():
        (d_weight,) = torch.autograd.grad(loss(), weight)
        results[name] = relative_error(d_weight[rows], exact)
    print_table(
        f"relative error of dW against float64, {tokens} tokens, {len(rows)} rows of the head",
        ["", "error"],
        [[name, f"{error:.3e}"] for name, error in results.items()],
    )
    return results


def measure_long(tokens: int, weight: torch.Tensor) -> dict[str, float]:
    """Measure one pass over a context whose full logits exceed 2**31 elements many times; check
    sampled rows."""
    x, target = make_inputs(tokens, weight)
    kept = {}

    def step():
        details = linear_cross_entropy(
            x, weight, target, reduction="sum", num_valid_tokens=tokens, return_details=True
        )
        kept["losses"] = details.per_token_loss
        kept["d_x"], _ = torch.autograd.grad(details.loss, (x, weight))

    ms = time_interleaved({"ours": step}, weight.device, repeats=1, warmup=0)["ours"]
    gib = extra_gib(step, weight.device)
    rows = torch.linspace(0, tokens - 1, 32, device=weight.device).long()
    sample = x.detach()[rows].float().requires_grad_()
    losses = linear_cross_entropy_reference(
        sample, weight.detach().float(), target[rows], reduction="none"
    )
    (d_sample,) = torch.autograd.grad(losses.sum(), sample)
    result = {
        "ms": ms,
        "extra_gib": gib,
        "extra_gib_beyond_dx": gib - kept["d_x"].nbytes / 2**30,
        "loss_error": float((kept["losses"][rows] - losses).detach().abs().max()),
        "dx_error": relative_error(kept["d_x"][rows], d_sample),
    }
    print_table(
        f"{tokens} tokens, sampled rows against float32", list(result), [list(result.values())]
    )
    if not (result["loss_error"] < 0.1 and result["dx_error"] < 2e-2):
        sys.exit("linear_cross_entropy is wrong at this length")
    return result


def check(device: torch.device) -> None:
    """Exit with status 1 if loss or gradients are far from float64's."""
    weight = (0.05 * torch.randn(70_001, 64, device=device)).bfloat16().requires_grad_()
    x, target = make_inputs(200, weight)
    target[::3] = -100
    exact_loss = linear_cross_entropy_reference(x.double(), weight.double(), target)
    exact = torch.autograd.grad(exact_loss, (x, weight))
    loss = linear_cross_entropy(x, weight, target, chunk_size=64)
    errors = map(relative_error, torch.autograd.grad(loss, (x, weight)), exact)
    if not (max(errors) <= 2e-2 and (loss - exact_loss).abs() <= 1e-3):
        sys.exit("linear_cross_entropy is wrong on this machine: not measured")


if __name__ == "__main__":
    main()
