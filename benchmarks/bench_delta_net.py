"""Gated delta rule and its convolution, first every gradient, then times: `python -m
benchmarks.bench_delta_net`."""

import functools
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import (
    copy_bytes_per_second,
    extra_gib,
    parse_flags,
    print_json,
    print_results,
    print_table,
    relative_error,
    time_interleaved,
)
from kernels.convolution import qkv_convolution, qkv_convolution_reference
from kernels.delta_net import delta_rule, delta_rule_reference

G, H, K = 16, 32, 128  # heads of the 4B and the 9B
LENGTHS = [[1], [3], [63], [64], [65], [1000], [3, 1, 64, 65, 63, 500, 200]]
TOLERANCE = 1e-2
NAMES = "out", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial"


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=128)
    device, tokens = arguments.device, arguments.tokens
    is_gpu = device.type == "cuda"
    errors = check(device, tokens)
    copy_rate = copy_bytes_per_second(device)

    heads = (G, H) if is_gpu else (1, 2)
    tensors = [x.requires_grad_() for x in inputs(tokens, *heads, device)]
    implementations: dict[str, Callable] = {"ours": delta_rule}
    if is_gpu and (fla := fla_delta_rule()):
        implementations["fla 0.6.0"] = fla
    results = {
        "delta rule": compare(
            f"delta rule, {tokens} tokens, {heads} heads", implementations, tensors, device
        )
    }
    del tensors

    channels = (2 * heads[0] + heads[1]) * K
    x = torch.randn(1, tokens, channels, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(channels, 4, device=device, requires_grad=True)
    implementations = {
        "ours, with norms": functools.partial(qkv_convolution, G=heads[0], H=heads[1], K=K)
    }
    if is_gpu and (fla := fla_convolution()):
        implementations["fla 0.6.0, without norms"] = fla
    results["convolution"] = compare(
        f"convolution, {list(x.shape)}", implementations, [x, weight], device
    )
    print(f"a copy of the input: {2 * x.nbytes / copy_rate * 1000:.3f} ms")
    print_json("delta_net", device, copy_bytes_per_second=copy_rate, errors=errors, results=results)


def inputs(T: int, G: int, H: int, device: torch.device, fastest: float = 0.1) -> list[Tensor]:
    random = functools.partial(torch.randn, device=device)
    q, k = (F.normalize(random(1, T, G, K), dim=-1) for _ in range(2))
    gates = -fastest * torch.rand(1, T, H, device=device), torch.rand(1, T, H, device=device)
    return [(q * K**-0.5).bfloat16(), k.bfloat16(), random(1, T, H, K).bfloat16(), *gates]


def gradients(
    function: Callable, tensors: list[Tensor], arriving: list[Tensor], **options
) -> list[Tensor]:
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, state = function(*tensors[:5], initial_state=tensors[5], **options)
    arriving = [x.to(like.dtype) for x, like in zip(arriving, (out, state))]
    return [out.detach(), state.detach(), *torch.autograd.grad([out, state], tensors, arriving)]


def check(device: torch.device, tokens: int) -> dict[str, dict[str, float]]:
    """Returns relative errors against float64, and exits with status 1 if one is above
    TOLERANCE."""
    errors = {}
    cases = [(lengths, 1.0) for lengths in LENGTHS] + [
        ([300], 50.0),
        ([tokens], 0.01),
        ([tokens], 1.0),
    ]
    cases += [([tokens // 2, 5, tokens // 2 - 5], 0.1)]
    for lengths, fastest in cases if device.type == "cuda" else []:
        T, stops = sum(lengths), torch.tensor(lengths).cumsum(0)
        segments = torch.stack([0 * stops, stops - torch.tensor(lengths), stops], dim=1)
        tensors = [
            *inputs(T, 2, 4, device, fastest),
            torch.randn(len(lengths), 4, K, K, device=device),
        ]
        arriving = [torch.randn_like(tensors[2]), torch.randn_like(tensors[5])]
        run = functools.partial(gradients, arriving=arriving, segments=segments)
        reference = (
            delta_rule_reference
            if T <= 1000
            else functools.partial(delta_rule, impl="torch", with_state=True)
        )
        exact = run(reference, [x.double() for x in tensors])
        found, again = (
            run(functools.partial(delta_rule, with_state=True), tensors) for _ in range(2)
        )
        title = f"{', '.join(map(str, lengths))} tokens, g to -{fastest}"
        errors[title] = {name: relative_error(*pair) for name, *pair in zip(NAMES, found, exact)}
        if not all(error <= TOLERANCE for error in errors[title].values()):
            sys.exit(f"the delta rule is wrong on this machine: {title}: {errors[title]}")
        if not all(torch.equal(*pair) for pair in zip(found, again)):
            sys.exit(f"the delta rule differs from run to run: {title}")
    rows = [
        [title, *(f"{error:.1e}" for error in found.values())] for title, found in errors.items()
    ]
    print_table("relative errors against float64", ["", *NAMES], rows)
    return errors | check_convolution(device)


def check_convolution(device: torch.device) -> dict[str, dict[str, float]]:
    x = torch.randn(1, 1000, 4 * K, device=device, dtype=torch.bfloat16)
    weight, segments = (
        torch.randn(4 * K, 4, device=device),
        torch.tensor([(0, 0, 1), (0, 1, 700), (0, 700, 1000)]),
    )
    if device.type != "cuda":
        return {}
    found, exact = [], []
    for function, into, tensors in (
        (qkv_convolution, found, [x, weight]),
        (qkv_convolution_reference, exact, [x.double(), weight.double()]),
    ):
        tensors = [t.requires_grad_() for t in tensors]
        outs = function(*tensors, 1, 2, K, segments=segments)
        into += [
            *outs,
            *torch.autograd.grad(
                sum(out.square().sum() for out in outs[2:]) + outs[0].sum(), tensors
            ),
        ]
    errors = {
        name: relative_error(*pair)
        for name, *pair in zip(("q", "k", "v", "dx", "dw"), found, exact)
    }
    if not all(error <= TOLERANCE for error in errors.values()):
        sys.exit(f"the convolution is wrong on this machine: {errors}")
    return {"convolution": errors}


def compare(
    title: str, implementations: dict[str, Callable], tensors: list[Tensor], device: torch.device
) -> dict:
    """Times forward and backward in turns, and returns milliseconds and memory."""
    forward, backward = {}, {}
    for name, function in implementations.items():
        outs = function(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        arriving = [torch.randn_like(out) for out in outs]
        forward[name] = torch.no_grad()(functools.partial(function, *tensors))
        backward[name] = functools.partial(
            torch.autograd.grad, outs, tensors, arriving, retain_graph=True
        )
    times = [time_interleaved(functions, device) for functions in (forward, backward)]
    results = {
        name: {
            "forward_ms": times[0][name],
            "forward_extra_gib": extra_gib(forward[name], device),
            "backward_ms": times[1][name],
            "backward_extra_gib": extra_gib(backward[name], device),
        }
        for name in implementations
    }
    print_results(title, results)
    return results


def fla_delta_rule() -> Callable | None:
    """Returns the peer. Its check of Triton's version is off: gradients may be wrong, but their
    time is as it is."""
    try:
        from fla.ops.common import chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        print(f"fla: not installed ({error})")
        return None
    with suppress(AttributeError):
        chunk_o.TRITON_ABOVE_3_7_1 = True
    return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0)[0]


def fla_convolution() -> Callable | None:
    """Returns the peer, which has no norms."""
    try:
        from fla.modules.causal_conv1d.ops import causal_conv1d
    except ImportError as error:
        print(f"fla: not installed ({error})")
        return None
    return lambda x, weight: causal_conv1d(x, weight, activation="silu")[0]


if __name__ == "__main__":
    main()
