"""Attention of packed documents, one layer of the 4B forward and backward, with other lengths in
every step.

`python -m benchmarks.bench_packed_attention`

Documents fill 131,072 tokens. Ours has seen other steps before, but not the timed lengths: its time
includes building cuDNN's plans for new lengths, and these plans are counted. Other rows:

- "cuDNN, known lengths": a call for each document of exactly its length, in the second run, so all
  plans exist.
- "cuDNN in 1,024s": a call for each document, its length rounded up to 1,024 tokens, in the second
  run.
- "FlashAttention-2" and "flash-attn-4": one call for all documents.
- "same bits": ours under torch.use_deterministic_algorithms.
- floor: the documents' floating-point operations at the rate of one document of a quarter of the
  tokens.

All rows of a step have the same lengths and take turns; medians are printed. A sweep over documents
of one length, alone and together, sets `kernels.attention.documents.LONGEST_TOGETHER`.
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import parse_flags, print_json, print_table, require_close, time_once
from kernels.attention.attend import attention
from kernels.attention.documents import LONGEST_TOGETHER, document_calls, rounded_length
from kernels.attention.full import BACKWARD_FLOPS, attention_flops, attention_reference
from kernels.attention.libraries import KERNELS, choose_backend
from model import MODEL_SIZES

Inputs = Sequence[Tensor]  # q, k, v and the output's gradient, [1, T, heads, K]
OURS, KNOWN = "ours", "cuDNN, known lengths"


def log_uniform(random: np.random.Generator, tokens: int) -> int:
    return round(tokens / 128 * 64 ** random.random())


MIXES: dict[
    str, Callable[[np.random.Generator, int], int]
] = {  # name -> (random, tokens) -> a document's length
    "64k to 1k": log_uniform,
    "mean 1,000": lambda random, _: 1 + int(random.exponential(999)),
    "mean 300": lambda random, _: 1 + int(random.exponential(299)),
    "1,024 x 128": lambda random, _: 128,
}


def main() -> None:
    arguments = parse_flags(
        __doc__,
        cpu_tokens=512,
        steps={"type": int, "default": 7, "help": "timed steps"},
        other_steps={"type": int, "default": 30, "help": "steps of other lengths before these"},
    )
    device, config = (
        arguments.device,
        MODEL_SIZES["4B" if arguments.device.type == "cuda" else "tiny"],
    )
    shape = config.attention.heads
    check(device)
    inputs = make_inputs(arguments.tokens, *shape, device)
    rate = flops_per_second(inputs, device)
    mixes = {name: bench_mix(name, arguments, inputs, rate) for name in MIXES}
    columns = [
        "documents",
        "new plans",
        "floor",
        *dict.fromkeys(row for mix in mixes.values() for row in mix["ms"]),
    ]
    rows = [
        [
            name,
            mix["documents"],
            mix["new_plans"],
            mix["floor_ms"],
            *(mix["ms"].get(c, "") for c in columns[3:]),
        ]
        for name, mix in mixes.items()
    ]
    print_table(
        f"forward and backward, {arguments.tokens} tokens, ms per step",
        ["documents of", *columns],
        rows,
    )
    sweep = bench_sweep(inputs, device)
    print_table(
        f"alone or together (LONGEST_TOGETHER is {LONGEST_TOGETHER}), ms",
        ["tokens", *next(iter(sweep.values()))],
        [[length, *row.values()] for length, row in sweep.items()],
    )  # fmt: skip
    results = {"tokens": arguments.tokens, "tflops": rate / 1e12, "mixes": mixes, "sweep": sweep}
    print_json("packed_attention", device, **results)


def backends(device: torch.device) -> dict[str, str]:
    """Name in the table -> installed backend with a kernel that attends to all documents in one
    call."""
    if device.type != "cuda":
        return {"CPU": "cpu"}
    found = {"FlashAttention-2": "flash"}
    try:
        found["flash-attn-4"] = choose_backend("flash-attn-4", device)
    except ValueError as error:
        print(error)
    return found


def check(device: torch.device) -> None:
    """Exit with status 1 if attention differs from attention in float32, on long and short
    documents."""
    lengths = [2300, 5, 300, 1, 666] if device.type == "cuda" else [70, 5, 30, 1, 23]
    q, k, v, dout = make_inputs(sum(lengths), 8, 2, 128, device)
    results = {}
    for name in ("exact", "auto", *backends(device).values()):
        leaves = [
            x.detach().to(torch.float32 if name == "exact" else q.dtype).requires_grad_()
            for x in (q, k, v)
        ]
        function = (
            attention_reference if name == "exact" else functools.partial(attention, backend=name)
        )
        out = function(*leaves, segments_of(lengths))
        results[name] = [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]
    exact = results.pop("exact")
    for name, found in results.items():
        require_close(f"packed attention by {name}", found, exact, 2e-2)


def make_inputs(tokens: int, H: int, G: int, K: int, device: torch.device) -> Inputs:
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, tokens, heads, K, device=device, dtype=torch.bfloat16)
        for heads in (H, G, G, H)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def segments_of(lengths: list[int]) -> Tensor:
    stops = np.cumsum(lengths)
    return torch.from_numpy(np.stack([np.zeros_like(stops), stops - lengths, stops], 1))


def draw(mix: str, tokens: int, seed: int) -> list[int]:
    """Lengths of documents that fill `tokens`; the last document is cut."""
    random, lengths = np.random.default_rng(seed), []
    while sum(lengths) < tokens:
        lengths.append(min(MIXES[mix](random, tokens), tokens - sum(lengths)))
    return lengths


def ours(inputs: Inputs, lengths: list[int]) -> None:
    q, k, v, dout = inputs
    torch.autograd.grad(attention(q, k, v, segments_of(lengths)), (q, k, v), dout)


def ours_with_the_same_bits(inputs: Inputs, lengths: list[int]) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        ours(inputs, lengths)
    finally:
        torch.use_deterministic_algorithms(False)


@torch.no_grad()
def document_by_document(backend: str, multiple: int, inputs: Inputs, lengths: list[int]) -> None:
    """Make a call for each document, its length rounded up to a multiple as far as the tokens
    reach."""
    (q, k, v, dout), start = inputs, 0
    for length in lengths:
        rows = slice(start, min(start + -(-length // multiple) * multiple, q.shape[1]))
        of_document = q[:, rows], k[:, rows], v[:, rows]
        out, lse = KERNELS[backend].forward(*of_document)
        KERNELS[backend].backward(dout[:, rows], *of_document, out.contiguous(), lse.contiguous())
        start += length


@torch.no_grad()
def all_together(backend: str, inputs: Inputs, lengths: list[int]) -> None:
    q, k, v, dout = (x[0] for x in inputs)
    begins = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32).to(
        q.device, non_blocking=True
    )
    longest = max(256, -(-max(lengths) // 128) * 128)
    out, lse = KERNELS[backend].forward_together(q, k, v, begins, longest)
    KERNELS[backend].backward_together(dout, q, k, v, out, lse, begins, longest)


def flops_per_second(inputs: Inputs, device: torch.device) -> float:
    """Rate of forward and backward of one document with a quarter of the tokens."""
    quarter = tuple(x.detach()[:, : x.shape[1] // 4] for x in inputs)
    run = functools.partial(
        document_by_document, choose_backend("auto", device), 1, quarter, [quarter[0].shape[1]]
    )
    run()
    milliseconds = statistics.median(time_once(run, device) for _ in range(5))
    return step_flops([quarter[0].shape[1]], inputs) / milliseconds * 1000


def step_flops(lengths: list[int], inputs: Inputs) -> float:
    H, K = inputs[0].shape[2:]
    return (1 + BACKWARD_FLOPS) * attention_flops(H, K, sum(n * (n + 1) / 2 for n in lengths))


def rows_of(mix: str, device: torch.device) -> dict[str, Callable[[Inputs, list[int]], None]]:
    """Name -> a function that attends forward and backward."""
    backend = choose_backend("auto", device)
    rows: dict[str, Callable] = {OURS: ours, "same bits": ours_with_the_same_bits}
    if backend == "cudnn":
        if mix == "64k to 1k":  # other mixes have too many lengths
            rows[KNOWN] = functools.partial(document_by_document, backend, 1)
        rows["cuDNN in 1,024s"] = functools.partial(document_by_document, backend, 1024)
    for name, together in backends(device).items():
        rows[name] = functools.partial(all_together, together)
    return rows


def bench_mix(mix: str, arguments, inputs: Inputs, rate: float) -> dict:
    steps = [draw(mix, arguments.tokens, seed) for seed in range(arguments.steps)]
    others = [draw(mix, arguments.tokens, 1000 + seed) for seed in range(arguments.other_steps)]
    rows = rows_of(mix, arguments.device)
    for name, run in rows.items():
        for lengths in (
            others if name == OURS else steps if name.startswith("cuDNN") else others[:2]
        ):
            run(inputs, lengths)
    times = {name: [] for name in rows}
    for lengths in steps:
        for name, run in rows.items():
            times[name].append(time_once(functools.partial(run, inputs, lengths), arguments.device))
    planned = set().union(*(plans(inputs[0], lengths) for lengths in others))
    return {
        "documents": round(statistics.mean(map(len, steps))),
        "new_plans": len(set().union(*(plans(inputs[0], lengths) for lengths in steps)) - planned),
        "floor_ms": 1000
        * statistics.median(step_flops(lengths, inputs) for lengths in steps)
        / rate,
        "ms": {name: statistics.median(values) for name, values in times.items()},
        "ours_each": times[OURS],
    }


def plans(q: Tensor, lengths: list[int]) -> set[int]:
    """Lengths of calls with a single document: cuDNN builds a plan for each."""
    kernel = KERNELS[choose_backend("auto", q.device)]
    calls = document_calls(q, segments_of(lengths), kernel.longest_together)
    return {
        rounded_length(call.stop - call.start, kernel.length_step)
        for call in calls
        if not call.ends
    }


def bench_sweep(inputs: Inputs, device: torch.device) -> dict[int, dict[str, float]]:
    """Milliseconds by the documents' length, for all heads and for one key/value head with its
    query heads."""
    backend, T, G = choose_backend("auto", device), *inputs[1].shape[1:3]
    results: dict[int, dict[str, float]] = {}
    for length in (T // 256, T // 128, T // 85, T // 64, T // 43, T // 32, T // 16):
        lengths = [length] * (T // length)
        results[length] = {}
        for heads, group in (("all heads", G), ("one", 1)):
            own = [
                x.detach()[:, : sum(lengths), : x.shape[2] * group // G].contiguous()
                for x in inputs
            ]
            own = [x.requires_grad_() for x in own]
            for way, longest in (("alone", 0), ("together", math.inf)):
                with mock.patch.dict(
                    KERNELS, {backend: KERNELS[backend]._replace(longest_together=longest)}
                ):
                    run = functools.partial(ours, own, lengths)
                    run()
                    ms = statistics.median(time_once(run, device) for _ in range(5))
                results[length][f"{heads} {way}"] = ms
    return results


if __name__ == "__main__":
    main()
