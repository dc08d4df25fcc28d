"""Rotary position embedding of 32 query and 8 key heads of 128: `python -m
benchmarks.bench_rope`."""

import torch

from benchmarks.common import (
    compare_with_copy,
    compiled,
    copy_bytes_per_second,
    liger,
    parse_flags,
    print_json,
    require_close,
)
from kernels.rope import rope, rope_reference

K = 128


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=256)
    device, tokens = arguments.device, arguments.tokens

    inv_freq = 1e6 ** -(torch.arange(0, K, 2, dtype=torch.float64, device=device) / K)
    angles = torch.arange(tokens, device=device)[:, None] * inv_freq
    cos, sin = angles.cos().float(), angles.sin().float()
    q, k = (
        torch.randn(1, tokens, heads, K, device=device).bfloat16().requires_grad_()
        for heads in (32, 8)
    )
    check(q[:, :300].detach(), k[:, :300].detach(), cos[:300], sin[:300])

    implementations = {
        "ours": (lambda q, k: rope(q, k, cos, sin), [q, k]),
        "eager": (lambda q, k: rope_reference(q, k, cos, sin), [q, k]),
        "torch.compile": (compiled(lambda q, k: rope_reference(q, k, cos, sin), device), [q, k]),
    }
    if module := liger("rope", device):
        # Liger takes [B, H, T, K] and tables as wide as a head. It rotates in place, so it gets its
        # own copies.
        doubled = [torch.cat([table, table], dim=-1)[None] for table in (cos, sin)]
        own = [x.detach().clone().transpose(1, 2).requires_grad_() for x in (q, k)]
        implementations["Liger"] = (
            lambda q, k: module.LigerRopeFunction.apply(q, k, *doubled),
            own,
        )
    copy_rate = copy_bytes_per_second(device)
    num_bytes = 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
    results = compare_with_copy(
        f"rope, q {list(q.shape)}, k {list(k.shape)}",
        implementations,
        num_bytes,
        num_bytes,
        copy_rate,
        device,
    )
    print_json("rope", device, copy_bytes_per_second=copy_rate, results=results)


def check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Exit with status 1 if the rotation or its gradient is far from float64's."""
    q, k = q.requires_grad_(), k.requires_grad_()
    found = rope(q, k, cos, sin)
    exact = rope_reference(q.double(), k.double(), cos, sin)
    # turned back: q and k themselves
    gradients = torch.autograd.grad(found, [q, k], [x.detach() for x in found])
    require_close("rope", (*found, *gradients), (*exact, q, k), 1e-2)


if __name__ == "__main__":
    main()
