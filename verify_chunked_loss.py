"""Checks that the chunked loss is the standard loss: `python verify_chunked_loss.py`, on a CPU or a
GPU.

It has four parts: the loss that a model really runs on each side of the 10 GB switch; errors of
both losses and of their gradients; gradient accumulation against one batch; peak memory. The exit
status is 1 if any check fails.
"""

import sys

from training.flags import answer_early

if __name__ == "__main__":
    answer_early()

import dataclasses
import functools
import math
import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile

from kernels.attention.documents import find_documents
from kernels.config import ModelConfig
from kernels.cross_entropy import cross_entropy
from kernels.gated_mlp import GatedMLPPart
from kernels.head_loss import IGNORE_INDEX, NextToken
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.parts import LayerParts
from kernels.qkv_attention import AttentionPart
from model import MODEL_SIZES, Transformer

VOCAB_SIZE = MODEL_SIZES["4B"].vocab_size
# the contract; written out, because the code under test must not be asked
SWITCH_BYTES = 10 * 2**30
# measured
COSTS = {
    "cpu": "2 GiB of memory, and about a minute of two free cores",
    "cuda": "10 GiB of GPU memory",
}
RESULTS = ("loss", "hidden gradient", "head gradient")


@dataclasses.dataclass
class Check:
    """A line of the table. It passes if value <= limit. Without a value it was skipped, and `limit`
    is the reason."""

    name: str
    value: float | None
    limit: float | str

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "skipped"
        return "pass" if self.value <= self.limit else "FAIL"  # NaN fails


def small_config(vocab_size: int, **changes):
    """Returns the shape of a model of one block, so narrow that the loss is nearly all the work."""
    layer = LayerParts(AttentionPart(1, 1, head_dim=32), GatedMLPPart(64))
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 1}
    return ModelConfig(**sizes, layers=(layer,), rope_theta=1e4, **changes)


def run_model(model: Transformer, ids: Tensor, labels: Tensor) -> None:
    # Documents of 512 tokens let attention take little time.
    documents = find_documents(torch.arange(ids.shape[1])[None] // 512)
    loss = NextToken.from_labels(labels, documents)
    model(ids, documents, loss).loss.backward()
    model.zero_grad()


def observed_logits_rows(model: Transformer, ids: Tensor, labels: Tensor) -> int:
    """Returns the rows of the largest [rows, V] tensor of any operation, from the profiler."""
    with profile(record_shapes=True) as recorded:
        run_model(model, ids, labels)
    shapes = (shape for event in recorded.function_events for shape in event.input_shapes)
    vocab_size = model.config.vocab_size
    return max((math.prod(s[:-1]) for s in shapes if len(s) > 1 and s[-1] == vocab_size), default=0)


def extra_gib(function: Callable[[], object], device: torch.device) -> float:
    """Returns the peak of GPU memory in `function`, in GiB above the memory allocated before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def switch(
    device: torch.device, vocab_size: int = VOCAB_SIZE, switch_bytes: float = SWITCH_BYTES
) -> Iterator[Check]:
    """Checks that a model makes all logits if they take up to 10 GB, and never all of them beyond
    that.

    Two lengths, 4,096 and 40,000 tokens, are run in bf16 and observed from outside. So are the
    exact borders on the meta device: its tensors have no memory, and the chunked loss shows no
    logits. With the 4B's vocabulary the border is 35,335 tokens in bf16 and 17,667 in float32,
    whose logits take twice the bytes.
    """
    config = small_config(vocab_size)
    for dtype in (torch.bfloat16, torch.float32):
        last = int(switch_bytes // (dtype.itemsize * vocab_size))
        with torch.device("meta"):
            model, ids = Transformer(config).to(dtype), torch.zeros(1, last + 1, dtype=torch.long)
        seen = [observed_logits_rows(model, x, x) for x in (ids[:, :last], ids)]
        name = f"{str(dtype).removeprefix('torch.')}: wrong choices at {last} and {last + 1} tokens"
        yield Check(name, (seen[0] != last - 1) + (seen[1] != 0), 0)
    torch.manual_seed(0)
    model = Transformer(config).to(device, torch.bfloat16)
    for number, length in ((1, 4096), (2, 40_000)):
        size = 2 * length * vocab_size
        should_chunk = size > switch_bytes
        print(
            f"Test {number}: seq_len={length}, "
            f"logits={size / 2**30:.2f}GB, should_chunk={should_chunk}",
            flush=True,
        )
        ids = torch.randint(vocab_size, (1, length), device=device)
        labels, note = ids, "every token has a label"
        # labels on all tokens would take most of two minutes
        if should_chunk and device.type == "cpu":
            labels = ids.masked_fill(torch.arange(length) % 8 > 0, IGNORE_INDEX)
            note = "one token in 8 has a label"
        rows = observed_logits_rows(model, ids, labels)
        # the last position has no target and no logits
        used = "standard" if rows == length - 1 else "chunked"
        print(
            f"  {used} loss used: the largest logits tensor seen in forward and backward was "
            f"[{rows}, {vocab_size}]"
        )
        if device.type == "cuda":
            note += (
                "; peak memory "
                f"{extra_gib(functools.partial(run_model, model, ids, labels), device):.2f} GiB"
            )
        print(f"  ({note})\n")
        if should_chunk:
            yield Check(f"rows of the largest logits at {length} tokens", rows or math.nan, 4096)
        else:
            yield Check(f"rows missing from the logits at {length} tokens", length - 1 - rows, 0)


def losses_and_gradients(
    loss: Callable, hidden: Tensor, head: Tensor, targets: Tensor
) -> tuple[Tensor, ...]:
    """Returns the loss [], and its gradients of hidden [tokens, hidden_size] and of head
    [vocab_size, hidden_size]."""
    hidden, head = (x.detach().clone().requires_grad_() for x in (hidden, head))
    value = loss(hidden, head, targets)
    value.backward()
    return value.detach(), hidden.grad, head.grad


def standard_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        F.linear(hidden, head).to(torch.promote_types(hidden.dtype, torch.float32)), targets
    )


def equivalence(device: torch.device) -> Iterator[Check]:
    """Compares errors against float64: gradients may have twice, the loss three times the standard
    loss's error."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden_size, vocab_size = 1357, 96, 5003
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    head = torch.randn(vocab_size, hidden_size, generator=generator) * 2 / hidden_size**0.5
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < 1 / 6] = IGNORE_INDEX
    targets = targets.to(device)

    def chunked_loss(hidden, head, targets, chunk_size=512):
        return linear_cross_entropy(
            hidden, head, targets, ignore_index=IGNORE_INDEX, chunk_size=chunk_size
        )

    for dtype in (torch.float32, torch.bfloat16):
        x, w = (t.to(device, dtype) for t in (hidden, head))
        exact = losses_and_gradients(standard_loss, x.double(), w.double(), targets)
        standard = losses_and_gradients(standard_loss, x, w, targets)
        chunked = losses_and_gradients(chunked_loss, x, w, targets)
        # An error below this floor is rounding of the last bit.
        floor = {torch.float32: 1e-6, torch.bfloat16: 1e-4}[dtype]
        name = str(dtype).removeprefix("torch.")
        for what, reference, ours, theirs in zip(RESULTS, exact, chunked, standard):
            factor = 3 if what == "loss" else 2
            limit = max(factor * relative_error(theirs, reference), floor)
            yield Check(f"{name}: error of the {what}", relative_error(ours, reference), limit)

    # Chunks of 16 tokens make the head's gradient a sum of 71 terms. A sum in float32 is as exact
    # as a single chunk: 0.2% off, because the loss's gradient is rounded to bf16. A sum in bf16
    # would be nearly four times as far off.
    one, many = (
        relative_error(
            losses_and_gradients(functools.partial(chunked_loss, chunk_size=n), x, w, targets)[2],
            exact[2],
        )
        for n in (tokens, 16)
    )
    yield Check("bfloat16: error of the head gradient, chunks of 16", many, 1.1 * one)


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def accumulation(device: torch.device) -> Iterator[Check]:
    """Compares unequal sequences in 4 and in 8 micro-batches with one batch: a mean of means would
    show."""
    torch.manual_seed(0)
    config = small_config(1009, tie_word_embeddings=False)
    model = Transformer(config).to(device)
    model.loss_impl = "chunked"
    # attention has no float32 kernel on GPUs; the loss is checked without blocks
    model.layers = nn.ModuleList()
    ids = torch.randint(config.vocab_size, (8, 129), device=device)
    labels = ids.clone()
    for row in range(8):
        labels[row, : 15 * row] = IGNORE_INDEX
    num_valid_tokens = int((labels[:, 1:] != IGNORE_INDEX).sum())

    def run(micro_batches: int) -> list[Tensor]:
        model.zero_grad()
        total = torch.zeros((), device=device)
        for rows in torch.arange(8, device=device).chunk(micro_batches):
            head_loss = NextToken.from_labels(labels[rows], denominator=num_valid_tokens)
            loss = model(ids[rows], loss=head_loss).loss
            loss.backward()
            total += loss.detach()
        return [total, model.embed_tokens.weight.grad, model.output_weight.grad]

    expected = [x.clone() for x in run(1)]
    for micro_batches in (4, 8):
        for what, parts, one in zip(RESULTS, run(micro_batches), expected):
            limit = 1e-6 if what == "loss" else 2e-6  # float32 rounding of sums in another order
            yield Check(
                f"{micro_batches} micro-batches: error of the {what}",
                relative_error(parts, one),
                limit,
            )


def memory(device: torch.device) -> Iterator[Check]:
    """Compares the peak memory of both losses, forward and backward, at 32,768 tokens: the standard
    loss still fits."""
    name = "GiB of the chunked loss, limit half the standard's"
    if device.type != "cuda":
        yield Check(name, None, "needs a GPU")
        return
    tokens = 32_768
    hidden, head = (
        torch.randn(rows, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
        for rows in (tokens, VOCAB_SIZE)
    )
    targets = torch.randint(VOCAB_SIZE, (tokens,), device=device)

    def peak_of(loss: Callable) -> float:
        def run():
            loss(hidden, head, targets).backward()
            hidden.grad = head.grad = None

        run()  # compiles kernels, and allocates cuBLAS's workspace
        return extra_gib(run, device)

    standard = peak_of(lambda x, w, y: cross_entropy(F.linear(x, w), y, inplace=True))
    chunked = peak_of(linear_cross_entropy)
    print(
        f"peak memory at {tokens} tokens: standard {standard:.2f} GiB, chunked {chunked:.2f} GiB\n"
    )
    yield Check(name, chunked, standard / 2)


def main(parts=(switch, equivalence, accumulation, memory)) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages
    # huge pages: small ones take half of the time on a CPU
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"device: {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}")
    print(f"this takes {COSTS[device.type]}\n", flush=True)
    checks = [check for part in parts for check in part(device)]
    for check in checks:
        value, limit = (
            f"{x:.4g}" if isinstance(x, (int, float)) else x or "-"
            for x in (check.value, check.limit)
        )
        print(f"{check.name:<52} {value:>10}  limit {limit:>11}  {check.verdict}")
    verdicts = [check.verdict for check in checks]
    print(
        f"\n{verdicts.count('pass')} passed, {verdicts.count('FAIL')} failed, "
        f"{verdicts.count('skipped')} skipped"
    )
    return int("FAIL" in verdicts)


if __name__ == "__main__":
    ArgumentParser(
        description=__doc__.split("\n\n")[0]
    ).parse_args()  # refuses any flag: there are none
    sys.exit(main())
