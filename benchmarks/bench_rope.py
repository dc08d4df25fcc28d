"""Rotary position embedding of 32 query and 8 key heads of 128: `python -m benchmarks.bench_rope`."""

import argparse
import sys

import torch

from benchmarks.common import compare_with_copy, compiled, copy_bytes_per_second, environment, liger, print_json
from kernels.rope import rope, rope_reference

K = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="default: 131072 on a GPU, 256 on a CPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    tokens = arguments.tokens or (131072 if device.type == "cuda" else 256)
    print(environment(device))

    inv_freq = 1e6 ** -(torch.arange(0, K, 2, dtype=torch.float64, device=device) / K)
    angles = torch.arange(tokens, device=device)[:, None] * inv_freq
    cos, sin = angles.cos().float(), angles.sin().float()
    q, k = (torch.randn(1, tokens, heads, K, device=device).bfloat16().requires_grad_() for heads in (32, 8))
    check(q[:, :300].detach(), k[:, :300].detach(), cos[:300], sin[:300])

    implementations = {
        "ours": (lambda q, k: rope(q, k, cos, sin), [q, k]),
        "eager": (lambda q, k: rope_reference(q, k, cos, sin), [q, k]),
        "torch.compile": (compiled(lambda q, k: rope_reference(q, k, cos, sin), device), [q, k]),
    }
    if module := liger("rope", device):
        # Liger takes [B, H, T, K] and tables as wide as a head, and rotates in place: copies of its own.
        doubled = [torch.cat([table, table], dim=-1)[None] for table in (cos, sin)]
        own = [x.detach().clone().transpose(1, 2).requires_grad_() for x in (q, k)]
        implementations["Liger"] = (lambda q, k: module.LigerRopeFunction.apply(q, k, *doubled), own)
    copy_rate = copy_bytes_per_second(device)
    num_bytes = 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
    results = compare_with_copy(
        f"rope, q {list(q.shape)}, k {list(k.shape)}", implementations, num_bytes, num_bytes, copy_rate, device
    )
    print_json(operation="rope", **environment(device), copy_bytes_per_second=copy_rate, results=results)


def check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Exit with status 1 if the rotation or its gradient is far from float64's."""
    q, k = q.requires_grad_(), k.requires_grad_()
    found = rope(q, k, cos, sin)
    exact = rope_reference(q.double(), k.double(), cos, sin)
    gradients = torch.autograd.grad(found, [q, k], [x.detach() for x in found])  # turned back: q and k themselves
    for ours, expected in zip((*found, *gradients), (*exact, q.double(), k.double())):
        if not (ours.double() - expected).norm() <= 1e-2 * expected.norm():
            sys.exit("rope is wrong on this machine: not measured")


if __name__ == "__main__":
    main()
