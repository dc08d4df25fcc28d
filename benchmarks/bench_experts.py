"""Experts of Qwen3-30B-A3B, first every gradient, then times: `python -m benchmarks.bench_experts`.

With --tiles it first times each product in several tiles, and goes on with the fastest. The floor
is six dense matrix products of the same operations.
"""

import functools
import itertools
import multiprocessing
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import Autotuner

from benchmarks.common import (
    extra_gib,
    liger,
    parse_flags,
    print_json,
    print_table,
    relative_error,
    time_interleaved,
)
from kernels.experts import expert_mlp, expert_mlp_reference, products, tokens_per_expert
from kernels.experts.products import Tile

E, TOP_K, D, WIDTH = 128, 8, 2048, 768
PROCESSES = 12  # they compile Liger's kernels
TOLERANCE = 1e-2
NAMES = "y", "dx", "d_gate_up", "d_down", "d_weights"
ONE_PER_TILE = [
    Tile(256, 64, 3, 8),
    Tile(256, 64, 4, 8),
    Tile(256, 128, 2, 8),
    Tile(128, 64, 3, 4),
    Tile(128, 64, 3, 8),
]
PERSISTENT = [Tile(256, 64, 3, 8, True), Tile(128, 64, 4, 8, True)]
CANDIDATES = {
    "gate_up": [Tile(128, 64, 3, 8), Tile(128, 64, 4, 8), Tile(128, 128, 2, 8), Tile(64, 64, 3, 4)],
    "down": ONE_PER_TILE + PERSISTENT,
    "d_hidden": ONE_PER_TILE,
    "d_down": ONE_PER_TILE,
    "d_gate_up": ONE_PER_TILE,
    "dx": ONE_PER_TILE + PERSISTENT,
}


def main() -> None:
    tokens = {"type": int, "default": 32768, "help": "default: 32768, on a CPU 24"}
    arguments = parse_flags(__doc__, tokens=tokens, tiles={"action": "store_true"})
    device = arguments.device
    is_gpu = device.type == "cuda"
    sizes = (arguments.tokens, E, TOP_K, D, WIDTH) if is_gpu else (24, 5, 2, 32, 16)
    errors = check(device, arguments.tiles)
    tensors = inputs(*sizes, device)
    results = {"products": time_products(tensors, device, arguments.tiles)}
    for title, spread in (("even", 0.0), ("random", 1.0), ("skewed", 4.0)):
        results[title] = compare(title, inputs(*sizes, device, spread), device, is_gpu)
    print_json("experts", device, tokens=sizes[0], errors=errors, results=results)


def inputs(
    N: int, E: int, k: int, D: int, width: int, device: torch.device, spread: float = 1.0
) -> list[Tensor]:
    """Returns x, gate_up, down, weights and experts. An expert's logits have their mean from
    -spread / 2 to spread / 2.

    Without spread each expert has as many tokens as the others, as far as they divide.
    """
    random = functools.partial(torch.randn, device=device)
    logits = random(N, E) + spread * torch.linspace(-0.5, 0.5, E, device=device)
    weights, experts = logits.softmax(-1).topk(k)
    if not spread:
        experts = (
            torch.arange(N * k, device=device).view(N, k)[torch.randperm(N, device=device)] % E
        )
    tensors = (
        random(N, D),
        D**-0.5 * random(E, 2 * width, D),
        width**-0.5 * random(E, D, width),
        weights,
    )
    return [*(x.bfloat16().requires_grad_() for x in tensors), experts.int()]


def gradients(function: Callable, tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    x, gate_up, down, weights, experts = tensors
    leaves = [t.detach().requires_grad_() for t in (x, gate_up, down, weights)]
    y = function(*leaves[:3], experts, leaves[3])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check(device: torch.device, goes_on: bool) -> dict[str, dict[str, float]]:
    """Returns relative errors against float64, and exits with status 1 if one is above TOLERANCE,
    or `goes_on`."""
    errors, faults = {}, []
    cases = [
        (1, 8, 2, 64, 32, 1.0),
        (3, 5, 3, 96, 40, 1.0),
        (127, 8, 1, 256, 24, 9.0),
        (700, 16, 4, 200, 136, 9.0),
    ]
    cases += (
        [(4096, 128, 8, 512, 768, 6.0), (2000, 4, 4, 2048, 768, 1.0)]
        if device.type == "cuda"
        else []
    )
    for *sizes, spread in cases if device.type == "cuda" else cases[:0]:
        tensors = inputs(*sizes, device, spread)
        dy = torch.randn_like(tensors[0])
        exact = gradients(
            expert_mlp_reference, [t if t.dtype == torch.int32 else t.double() for t in tensors], dy
        )
        for tile_size in (None, sizes[0], sizes[0] // 2 + 1):
            ours = functools.partial(expert_mlp, tile_size=tile_size)
            found, again = (gradients(ours, tensors, dy) for _ in range(2))
            title = f"{', '.join(map(str, sizes))}; tile {tile_size}"
            errors[title] = {
                name: relative_error(*pair) for name, *pair in zip(NAMES, found, exact)
            }
            if not all(error <= TOLERANCE for error in errors[title].values()):
                faults.append(f"the experts are wrong on this machine: {title}: {errors[title]}")
            if not all(torch.equal(*pair) for pair in zip(found, again)):
                faults.append(f"the experts differ from run to run: {title}")
    rows = [
        [title, *(f"{error:.1e}" for error in found.values())] for title, found in errors.items()
    ]
    print_table("relative errors against float64; tokens, experts, k, D, F", ["", *NAMES], rows)
    print("\n".join(faults))
    if faults and not goes_on:
        sys.exit(1)
    return errors


class Part(NamedTuple):
    run: Callable
    out: Tensor | None = None
    flops: float = 0


def parts_of(tensors: list[Tensor]) -> dict[str, Part]:
    """Returns each part of forward and backward. Parts read what parts before have written."""
    x, gate_up, down, weights, experts = (t.detach() for t in tensors)
    D, (E, width), R = x.shape[1], down.shape[::2], experts.numel()
    groups = products.group(experts, E, x)
    kept, d_kept = (x.new_empty(R, 2 * width) for _ in range(2))
    hidden, hidden_again, rows, d_rows = (x.new_empty(R, n) for n in (width, width, D, D))
    rows, d_rows = (t.view(*experts.shape, D) for t in (rows, d_rows))
    y, dy, d_gate_up, d_down = (torch.empty_like(t) for t in (x, x, gate_up, down))
    dy.normal_()
    flops = 2 * R * D * width

    def d_hidden():
        products.gate_up_gradients(dy, down, groups, weights, kept, d_kept, hidden_again)

    return {
        "group": Part(lambda: products.group(experts, E, x)),
        "gate_up": Part(
            lambda: products.gate_up_product(x, gate_up, groups, weights, kept, hidden),
            hidden,
            2 * flops,
        ),
        "down": Part(lambda: products.project(hidden, down, groups, rows), rows, flops),
        "sum": Part(lambda: products.sum_entries(rows, y)),
        "d_hidden": Part(d_hidden, d_kept, flops),
        "d_down": Part(lambda: products.weight_gradient(dy, hidden, groups, d_down), d_down, flops),
        "d_gate_up": Part(
            lambda: products.weight_gradient(x, d_kept, groups, d_gate_up, transposed=True),
            d_gate_up,
            2 * flops,
        ),
        "dx": Part(
            lambda: products.project(d_kept, gate_up, groups, d_rows, transposed=True),
            d_rows,
            2 * flops,
        ),
    }


def time_products(tensors: list[Tensor], device: torch.device, with_tiles: bool) -> dict[str, dict]:
    """Times the parts; with tiles, each product in all its candidates, of which the fastest stays
    set."""
    parts, tried = parts_of(tensors), []
    for name, part in parts.items():
        part.run()
        if with_tiles and name in CANDIDATES and device.type == "cuda":
            exact = part.out.clone()
            found = {
                t: time_tile(name, part, t, exact, device)
                for t in {products.HOPPER[name], *CANDIDATES[name]}
            }
            products.HOPPER[name] = min(found, key=found.__getitem__)
            part.run()
            for tile, ms in sorted(found.items(), key=lambda item: item[1]):
                tried.append([name, *tile, ms, part.flops / ms / 1e9])
                print(*tried[-1], flush=True)
    if tried:
        print_table("tiles", ["product", *Tile._fields, "ms", "TFLOP/s"], tried)
    times = time_interleaved({name: part.run for name, part in parts.items()}, device)
    results = {
        name: {"ms": ms, "tflops": parts[name].flops / ms / 1e9} for name, ms in times.items()
    }
    rows = [
        [name, *row.values(), str(products.HOPPER.get(name, ""))] for name, row in results.items()
    ]
    print_table("parts of forward and backward", ["", "ms", "TFLOP/s", "tiles"], rows)
    return results


def time_tile(name: str, part: Part, tile: Tile, exact: Tensor, device: torch.device) -> float:
    kept, products.HOPPER[name] = products.HOPPER[name], tile
    try:
        part.out.zero_()
        ms = time_interleaved({name: part.run}, device, repeats=7, warmup=2)[name]
        if not relative_error(part.out, exact) < TOLERANCE:
            raise ArithmeticError("another result")
        return ms
    except Exception as error:  # such as too much shared memory
        print(f"{name} {tile}: {type(error).__name__}: {str(error)[:100]}")
        return float("inf")
    finally:
        products.HOPPER[name] = kept


def grouped_mm(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """The experts by PyTorch's grouped product, as transformers does: sorted copies, which go back
    into order."""
    order = experts.flatten().long().argsort(stable=True)
    ends = tokens_per_expert(experts, len(down)).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[order // experts.shape[1]], gate_up.mT, offs=ends).chunk(2, dim=-1)
    rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends) * weights.flatten()[order, None]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return rows[inverse].view(*experts.shape, -1).sum(1)


@functools.cache
def compile_liger() -> None:
    """Compiles the kernels that Liger's tuner tries, in processes side by side; one after another
    takes 6 minutes."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(compile_part, range(PROCESSES))


def compile_part(part: int) -> None:
    from liger_kernel.ops import fused_moe, fused_moe_kernels

    for kernel in vars(fused_moe_kernels).values():
        if isinstance(kernel, Autotuner):
            kernel.configs = kernel.configs[part::PROCESSES] or kernel.configs[:1]
    x, gate_up, down, weights, experts = inputs(1024, E, TOP_K, D, WIDTH, torch.device("cuda"))
    y = fused_moe.LigerFusedMoEFunction.apply(x, gate_up, down, experts, weights)
    torch.autograd.grad(y, (x, gate_up, down, weights), y.detach())


def dense(tensors: list[Tensor]) -> tuple[Callable, Callable]:
    """Returns forward's two, and all six, matrix products of the same operations without
    experts."""
    x, gate_up, down, _, experts = (t.detach() for t in tensors)
    R, (D, width) = experts.numel(), down.shape[1:]
    rows, pair, hidden = (
        x.new_empty(R, D).normal_(),
        x.new_empty(R, 2 * width).normal_(),
        x.new_empty(R, width),
    )
    into, out_of = gate_up[0], down[0]
    forward = [(rows, into.t(), pair), (pair[:, :width].contiguous(), out_of.t(), rows)]
    backward = [
        (rows, out_of, hidden), (rows.t(), hidden, torch.empty_like(out_of)),
        (pair.t(), rows, torch.empty_like(into)), (pair, into, rows),
    ]  # fmt: skip

    def run(factors):
        for a, b, out in factors:
            torch.mm(a, b, out=out)

    return functools.partial(run, forward), functools.partial(run, forward + backward)


def compare(
    title: str, tensors: list[Tensor], device: torch.device, is_gpu: bool
) -> dict[str, dict[str, float]]:
    x, gate_up, down, weights, experts = tensors
    implementations: dict[str, Callable] = {
        "ours": expert_mlp,
        "ours, gate and up made again": functools.partial(expert_mlp, tile_size=len(x)),
    }
    if is_gpu:
        implementations["ours, four tiles"] = functools.partial(expert_mlp, tile_size=len(x) // 4)
        implementations["torch grouped_mm"] = grouped_mm
    if peer := liger("fused_moe", device):
        compile_liger()
        implementations["Liger"] = lambda x, a, b, e, w: peer.LigerFusedMoEFunction.apply(
            x, a, b, e, w
        )
    dy, leaves = torch.randn_like(x), (x, gate_up, down, weights)
    forward = {
        n: functools.partial(f, x, gate_up, down, experts, weights)
        for n, f in implementations.items()
    }
    both = {n: lambda f=f: torch.autograd.grad(f(), leaves, dy) for n, f in forward.items()}
    y = {n: f() for n, f in itertools.islice(forward.items(), 1, None)}
    apart = {n: relative_error(other, forward["ours"]()) for n, other in y.items()}
    if not all(error < 2e-2 for error in apart.values()):
        sys.exit(f"the implementations differ: {apart}")
    del y
    gib = {n: extra_gib(f, device) for n, f in both.items()}
    floor = "six dense products"
    forward[floor], both[floor] = dense(tensors)
    times = [time_interleaved(functions, device) for functions in (forward, both)]
    flops = 2 * 3 * experts.numel() * x.shape[1] * down.shape[2]
    results = {
        n: {
            "forward_ms": times[0][n], "forward_tflops": flops / times[0][n] / 1e9,
            "both_ms": times[1][n], "both_tflops": 3 * flops / times[1][n] / 1e9,
            "extra_gib": gib.get(n, 0.0),
        } for n in both
    }  # fmt: skip
    counts = tokens_per_expert(experts, len(down))
    print_table(
        f"{title}: {len(x)} tokens, {int(counts.min())} to {int(counts.max())} an expert",
        [
            "",
            "forward ms",
            "TFLOP/s",
            "forward + backward ms",
            "TFLOP/s",
            "extra GiB, gradients included",
        ],
        [[name, *row.values()] for name, row in results.items()],
    )
    return results


if __name__ == "__main__":
    main()
