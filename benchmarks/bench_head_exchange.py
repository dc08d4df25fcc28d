"""Attention of one layer whose sequence several GPUs share, and the cost of exchanging tokens for
heads.

`torchrun --nproc_per_node=2 -m benchmarks.bench_head_exchange --tokens 131072`

Forward and backward of a 4B layer's attention are timed, projections included, with all of a rank's
key/value heads at once and with one at a time. "No link" makes the same copies within the GPU: the
difference is the cost of the link. All ranks do the same work; the first rank's times are printed.
"""

import functools
import os
from unittest import mock

import torch

from benchmarks.common import (
    extra_gib,
    parse_flags,
    print_json,
    print_results,
    relative_error,
    time_interleaved,
)
from kernels.attention import KINDS
from kernels.context import Context, Rotations
from kernels.head_exchange import HeadExchange
from kernels.rope import RotaryTables
from model import MODEL_SIZES, Attention
from training.parallel.world import World, join_world

all_to_all = torch.distributed.all_to_all_single


def main() -> None:
    arguments = parse_flags(
        __doc__,
        cpu_tokens=256,
        attention_type={"choices": ("full", "window", "sparse"), "default": "full"},
    )
    with join_world(
        arguments.device.type, context_parallel_size=int(os.environ["WORLD_SIZE"])
    ) as world:
        exchange = HeadExchange(world.mesh.get_group("context"))
        results = {
            "exchange": bench_exchange(arguments.tokens, exchange, world),
            "attention": bench_attention(
                arguments.tokens, arguments.attention_type, exchange, world
            ),
        }
        if world.is_main:
            for name, rows in results.items():
                print_results(f"{name}, {arguments.tokens} tokens over {world.size} ranks", rows)
            settings = {"tokens": arguments.tokens, "attention_type": arguments.attention_type}
            print_json("head_exchange", world.device, ranks=world.size, **settings, results=results)


def bench_exchange(
    tokens: int, exchange: HeadExchange, world: World
) -> dict[str, dict[str, float]]:
    """Time one tensor one way: bfloat16 [1, tokens / ranks, heads, K] to [1, tokens, heads / ranks,
    K]."""
    config, results = MODEL_SIZES["4B" if world.device.type == "cuda" else "tiny"], {}
    for name, heads in (
        ("q or output", config.attention.num_heads),
        ("k or v", config.attention.num_key_value_heads),
    ):
        x = torch.randn(
            1,
            tokens // world.size,
            heads,
            config.attention.head_dim,
            dtype=torch.bfloat16,
            device=world.device,
        )
        ms = time_interleaved({name: lambda x=x: exchange.to_heads(x)}, world.device)[name]
        sent = x.nbytes * (world.size - 1) / world.size
        results[name] = {"ms": ms, "sent_mb": sent / 1e6, "sent_gb_per_second": sent / ms / 1e6}
    return results


def bench_attention(
    tokens: int, attention_type: str, exchange: HeadExchange, world: World
) -> dict[str, dict[str, float]]:
    config, device = MODEL_SIZES["4B" if world.device.type == "cuda" else "tiny"], world.device
    torch.manual_seed(0)
    attention = Attention(config, config.attention, layer=0).to(device, torch.bfloat16)
    attention.exchange = exchange
    kind = KINDS[attention_type]
    attention.kind = kind(**({"dense_below": 0} if "dense_below" in kind.takes else {}))
    own = slice(world.rank * tokens // world.size, (world.rank + 1) * tokens // world.size)
    cos, sin = (
        table[own]
        for table in RotaryTables(config.attention.head_dim, config.rope_theta).tables(
            tokens, device
        )
    )
    context = Context(Rotations((cos, sin), (cos, sin)), longest=tokens)
    x = torch.randn(
        1, len(cos), config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True
    )
    dy = torch.randn_like(x)

    def train(heads: int | None, linked: bool) -> list[torch.Tensor]:
        attention.heads_at_a_time = heads
        with mock.patch("torch.distributed.all_to_all_single", all_to_all if linked else copy):
            y = attention(x, context)
            return [y, *torch.autograd.grad(y, [x, *attention.parameters()], dy, allow_unused=True)]

    ways = {
        "all heads at once": (None, True),
        "all heads at once, no link": (None, False),
        "one head at a time": (1, True),
        "one head at a time, no link": (1, False),
    }
    expected = train(None, True)
    for way in ways.values():
        error = max(relative_error(a, b) for a, b in zip(train(*way), expected)) if way[1] else 0.0
        assert error < 2e-2, f"{way} is wrong on this machine: relative error {error}"
    functions = {name: functools.partial(train, *way) for name, way in ways.items()}
    del expected
    ms = time_interleaved(functions, device, repeats=5, warmup=1)
    return {
        name: {"ms": ms[name], "extra_gib": extra_gib(functions[name], device)} for name in ways
    }


def copy(received: torch.Tensor, sent: torch.Tensor, group) -> None:
    received.copy_(sent)


if __name__ == "__main__":
    main()
