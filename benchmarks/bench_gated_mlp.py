"""SwiGLU, GEGLU, and the whole gated MLP untiled and in tiles: `python -m benchmarks.bench_gated_mlp`."""

import argparse
import functools
import math
import sys

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.common import (
    compare_with_copy,
    compiled,
    copy_bytes_per_second,
    environment,
    extra_gib,
    liger,
    print_json,
    print_table,
    time_interleaved,
)
from kernels.gated_mlp import gated_mlp, gated_mlp_reference, geglu, swiglu

TILE_SIZES = (4096, 8192, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="default: 131072 on a GPU, 256 on a CPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    tokens = arguments.tokens or (131072 if on_gpu else 256)
    D, F_ = (2560, 9728) if on_gpu else (64, 160)
    print(environment(device))
    check(device)
    copy_rate = copy_bytes_per_second(device)
    results = {
        "swiglu": bench_activation("swiglu", tokens, F_, copy_rate, device),
        "geglu": bench_activation("geglu", tokens, F_, copy_rate, device),
        "gated_mlp": bench_mlp(tokens, D, F_, device),
    }
    print_json(operation="gated_mlp", **environment(device), copy_bytes_per_second=copy_rate, results=results)


def bench_activation(name: str, tokens: int, width: int, copy_rate: float, device: torch.device) -> dict:
    ours, act, module_name, function_name = {
        "swiglu": (swiglu, F.silu, "swiglu", "LigerSiLUMulFunction"),
        "geglu": (geglu, functools.partial(F.gelu, approximate="tanh"), "geglu", "LigerGELUMulFunction"),
    }[name]
    gate, up = (torch.randn(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2))

    def eager(gate, up):
        return act(gate) * up

    implementations = {
        "ours": (ours, [gate, up]),
        "eager": (eager, [gate, up]),
        "torch.compile": (compiled(eager, device), [gate, up]),
    }
    if module := liger(module_name, device):  # Liger's backward writes over gate and up: copies of its own
        own = [x.detach().clone().requires_grad_() for x in (gate, up)]
        implementations["Liger"] = (getattr(module, function_name).apply, own)
    return compare_with_copy(
        f"{name}, {list(gate.shape)}", implementations, 3 * gate.nbytes, 5 * gate.nbytes, copy_rate, device
    )


def bench_mlp(tokens: int, D: int, width: int, device: torch.device) -> dict:
    """Forward, and forward + backward; backward is the difference, with whatever it recomputes."""
    x, *weights = mlp_inputs(tokens, D, width, device)
    d_output = torch.randn_like(x)

    def eager(x, gate_weight, up_weight, down_weight):
        return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)

    functions = {
        "eager": eager,
        "eager, checkpointed": lambda *inputs: checkpoint(eager, *inputs, use_reentrant=False),
        "torch.compile": compiled(eager, device),
        "ours, untiled": gated_mlp,
        **{f"ours, tiles of {size}": functools.partial(gated_mlp, tile_size=size) for size in TILE_SIZES},
    }
    swiglu_module, tiled_module = liger("swiglu", device), liger("tiled_mlp", device)
    if swiglu_module and tiled_module:

        def liger_untiled(x, gate_weight, up_weight, down_weight):
            hidden = swiglu_module.LigerSiLUMulFunction.apply(F.linear(x, gate_weight), F.linear(x, up_weight))
            return F.linear(hidden, down_weight)

        def liger_tiled(x, *weights):  # as LigerTiledSwiGLUMLP calls it; weight gradients go into .grad
            shards = math.ceil(tokens / D)
            return tiled_module.apply_tiled_mlp(lambda _, x: liger_untiled(x, *weights), None, x, shards, weights)

        functions |= {"Liger, untiled": liger_untiled, "Liger, tiled": liger_tiled}

    def train(function):
        output = function(x, *weights)
        return output, torch.autograd.grad(output, [x, *weights], d_output, allow_unused=True)

    forward = {name: functools.partial(f, x, *weights) for name, f in functions.items()}
    whole = {name: functools.partial(train, f) for name, f in functions.items()}
    forward_ms = time_interleaved(forward, device, repeats=5)
    whole_ms = time_interleaved(whole, device, repeats=5)
    backward_ms = {name: whole_ms[name] - forward_ms[name] for name in functions}
    results = {
        name: {
            "forward_ms": forward_ms[name],
            "of_eager_forward": forward_ms[name] / forward_ms["eager"],
            "backward_ms": backward_ms[name],
            "of_eager_backward": backward_ms[name] / backward_ms["eager"],
            "whole_ms": whole_ms[name],
            "of_eager_whole": whole_ms[name] / whole_ms["eager"],
            "of_checkpointed_whole": whole_ms[name] / whole_ms["eager, checkpointed"],
            "extra_gib": extra_gib(whole[name], device),  # output and every gradient included
        }
        for name in functions
    }
    header = [key.replace("_", " ") for key in results["eager"]]
    rows = [[name, *row.values()] for name, row in results.items()]
    print_table(f"gated MLP, {tokens} x ({D}, {width})", ["", *header], rows)
    return results


def mlp_inputs(tokens: int, D: int, width: int, device: torch.device) -> list[torch.Tensor]:
    shapes = ((tokens, D), (width, D), (width, D), (D, width))
    return [(torch.randn(s, device=device) * s[-1] ** -0.5).bfloat16().requires_grad_() for s in shapes]


def check(device: torch.device) -> None:
    """Exit with status 1 if outputs or gradients are far from float64's."""
    inputs = mlp_inputs(300, 256, 640, device)
    found, exact = [], []
    tiled = functools.partial(gated_mlp, tile_size=128)
    for function, to, into in ((tiled, lambda t: t, found), (gated_mlp_reference, torch.Tensor.double, exact)):
        output = function(*map(to, inputs))
        into += [output, *torch.autograd.grad(output.sum(), inputs)]
    for ours, expected in zip(found, exact):
        if not (ours.double() - expected).norm() <= 2e-2 * expected.double().norm():
            sys.exit("gated_mlp is wrong on this machine: not measured")


if __name__ == "__main__":
    main()
