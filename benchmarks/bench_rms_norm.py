"""RMSNorm of hidden states, with and without the residual, and of q's heads: `python -m
benchmarks.bench_rms_norm`."""

import torch
import torch.nn.functional as F

from benchmarks.common import (
    compare_with_copy,
    compiled,
    copy_bytes_per_second,
    liger,
    parse_flags,
    print_json,
    require_close,
)
from kernels.rms_norm import rms_norm, rms_norm_reference

EPS = 1e-6


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=256)
    device, tokens = arguments.device, arguments.tokens
    dtype = torch.bfloat16
    check(device, dtype)

    copy_rate = copy_bytes_per_second(device)
    liger_norm, liger_fused = liger("rms_norm", device), liger("fused_add_rms_norm", device)
    results = {}
    for title, shape in (("hidden", (1, tokens, 2560)), ("heads", (1, tokens, 32, 128))):
        x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(shape[-1], dtype=dtype, device=device, requires_grad=True)
        implementations = {
            "ours": (lambda x, w: rms_norm(x, w, EPS), [x, weight]),
            "eager": (lambda x, w: rms_norm_reference(x, w, EPS), [x, weight]),
            "torch.compile": (
                compiled(lambda x, w: rms_norm_reference(x, w, EPS), device),
                [x, weight],
            ),
            "F.rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w, EPS), [x, weight]),
        }
        if liger_norm:
            function = liger_norm.LigerRMSNormFunction.apply
            implementations["Liger"] = (
                lambda x, w, f=function: f(x, w, EPS, 0.0, "llama", True, None),
                [x, weight],
            )
        results[title] = compare_with_copy(
            f"rms_norm, {title} {list(shape)}",
            implementations,
            2 * x.nbytes,
            3 * x.nbytes,
            copy_rate,
            device,
        )
        del x, implementations

    x, residual = (
        torch.randn(1, tokens, 2560, dtype=dtype, device=device, requires_grad=True)
        for _ in range(2)
    )
    weight = torch.randn(2560, dtype=dtype, device=device, requires_grad=True)
    inputs = [x, residual, weight]
    implementations = {
        "ours": (lambda x, r, w: rms_norm(x, w, EPS, residual=r), inputs),
        "eager": (lambda x, r, w: rms_norm_reference(x, w, EPS, residual=r), inputs),
        "torch.compile": (
            compiled(lambda x, r, w: rms_norm_reference(x, w, EPS, residual=r), device),
            inputs,
        ),
    }
    if liger_fused:
        function = liger_fused.LigerFusedAddRMSNormFunction.apply
        implementations["Liger"] = (
            lambda x, r, w: function(x, r, w, EPS, 0.0, "llama", True),
            inputs,
        )
    results["hidden + residual"] = compare_with_copy(
        f"rms_norm with residual, {list(x.shape)}",
        implementations,
        4 * x.nbytes,
        4 * x.nbytes,
        copy_rate,
        device,
    )
    print_json("rms_norm", device, copy_bytes_per_second=copy_rate, results=results)


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Exit with status 1 if outputs or gradients are far from float64's."""
    inputs = [
        torch.randn(*shape, device=device).to(dtype).requires_grad_()
        for shape in ((300, 2560), (2560,))
    ]
    residual = torch.randn(300, 2560, device=device).to(dtype).requires_grad_()
    found, exact = [], []
    for function, to, into in (
        (rms_norm, lambda t: t, found),
        (rms_norm_reference, torch.Tensor.double, exact),
    ):
        normed, total = function(to(inputs[0]), to(inputs[1]), EPS, residual=to(residual))
        gradients = torch.autograd.grad((normed.square() / 2 + total).sum(), [*inputs, residual])
        into += [normed, total, *gradients]
    require_close("rms_norm", found, exact, 1e-2)


if __name__ == "__main__":
    main()
