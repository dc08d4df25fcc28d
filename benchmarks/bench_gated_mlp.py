"""SwiGLU, GEGLU, and the whole gated MLP untiled and in tiles: `python -m
benchmarks.bench_gated_mlp`."""

import functools
import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.common import (
    compare_with_copy,
    compiled,
    copy_bytes_per_second,
    extra_gib,
    liger,
    parse_flags,
    print_json,
    print_results,
    require_close,
    time_interleaved,
)
from kernels.gated_activation import geglu, swiglu
from kernels.gated_mlp import gated_mlp, gated_mlp_reference

TILE_SIZES = (4096, 8192, 16384)


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=256)
    device, tokens = arguments.device, arguments.tokens
    D, F_ = (2560, 9728) if device.type == "cuda" else (64, 160)
    check(device)
    copy_rate = copy_bytes_per_second(device)
    results = {
        **{
            name: bench_activation(name, tokens, F_, copy_rate, device)
            for name in ("swiglu", "geglu")
        },
        "gated_mlp": bench_mlp(tokens, D, F_, device),
    }
    print_json("gated_mlp", device, copy_bytes_per_second=copy_rate, results=results)


def bench_activation(
    name: str, tokens: int, width: int, copy_rate: float, device: torch.device
) -> dict:
    ours, act, function_name = {
        "swiglu": (swiglu, F.silu, "LigerSiLUMulFunction"),
        "geglu": (geglu, functools.partial(F.gelu, approximate="tanh"), "LigerGELUMulFunction"),
    }[name]
    gate, up = (
        torch.randn(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(2)
    )

    def eager(gate, up):
        return act(gate) * up

    implementations = {
        "ours": (ours, [gate, up]),
        "eager": (eager, [gate, up]),
        "torch.compile": (compiled(eager, device), [gate, up]),
    }
    # Liger's backward writes over gate and up, so it gets its own copies
    if module := liger(name, device):
        own = [x.detach().clone().requires_grad_() for x in (gate, up)]
        implementations["Liger"] = (getattr(module, function_name).apply, own)
    return compare_with_copy(
        f"{name}, {list(gate.shape)}",
        implementations,
        3 * gate.nbytes,
        5 * gate.nbytes,
        copy_rate,
        device,
    )


def bench_mlp(tokens: int, D: int, width: int, device: torch.device) -> dict:
    """Time forward, and forward + backward. Backward is the difference, recomputation included."""
    x, *weights = mlp_inputs(tokens, D, width, device)
    d_output = torch.randn_like(x)

    def eager(x, gate_weight, up_weight, down_weight):
        return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)

    functions = {
        "eager": eager,
        "eager, checkpointed": lambda *inputs: checkpoint(eager, *inputs, use_reentrant=False),
        "torch.compile": compiled(eager, device),
        "ours, untiled": gated_mlp,
        **{
            f"ours, tiles of {size}": functools.partial(gated_mlp, tile_size=size)
            for size in TILE_SIZES
        },
    }
    swiglu_module, tiled_module = liger("swiglu", device), liger("tiled_mlp", device)
    if swiglu_module and tiled_module:

        def liger_untiled(x, gate_weight, up_weight, down_weight):
            hidden = swiglu_module.LigerSiLUMulFunction.apply(
                F.linear(x, gate_weight), F.linear(x, up_weight)
            )
            return F.linear(hidden, down_weight)

        # LigerTiledSwiGLUMLP calls it like this; weight gradients go into .grad
        def liger_tiled(x, *weights):
            shards = math.ceil(tokens / D)
            return tiled_module.apply_tiled_mlp(
                lambda _, x: liger_untiled(x, *weights), None, x, shards, weights
            )

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
    print_results(f"gated MLP, {tokens} x ({D}, {width})", results)
    return results


def mlp_inputs(tokens: int, D: int, width: int, device: torch.device) -> list[torch.Tensor]:
    shapes = ((tokens, D), (width, D), (width, D), (D, width))
    return [
        (torch.randn(s, device=device) * s[-1] ** -0.5).bfloat16().requires_grad_() for s in shapes
    ]


def check(device: torch.device) -> None:
    """Exit with status 1 if outputs or gradients are far from float64's."""
    inputs = mlp_inputs(300, 256, 640, device)
    found, exact = [], []
    tiled = functools.partial(gated_mlp, tile_size=128)
    for function, to, into in (
        (tiled, lambda t: t, found),
        (gated_mlp_reference, torch.Tensor.double, exact),
    ):
        output = function(*map(to, inputs))
        into += [output, *torch.autograd.grad(output.sum(), inputs)]
    require_close("gated_mlp", found, exact, 2e-2)


if __name__ == "__main__":
    main()
