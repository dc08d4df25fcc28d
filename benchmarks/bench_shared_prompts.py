"""One block of the 4B's shape on answers that share a prompt, forward and backward, beside the same
answers apart.

`.venv/bin/python -m benchmarks.bench_shared_prompts`

"shared" is one row of the prompt and its answers. "apart" is a row of the prompt and one answer
after the other, and is the reference. Results and gradients of the input are compared with it
first, with the prompt's gradients added up. Mixers are full attention, a window of 4,096 tokens,
sparse attention and a gated delta net.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.common import (
    extra_gib,
    parse_flags,
    print_json,
    print_results,
    relative_error,
    time_interleaved,
)
from kernels.attention.documents import Documents, find_documents
from kernels.attention.full import FULL
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.gated_delta_net import DeltaNet
from kernels.parts import LayerParts
from model import MODEL_SIZES, Transformer


def main() -> None:
    arguments = parse_flags(__doc__, cpu_tokens=96)
    small = arguments.device.type == "cpu"
    delta_net = DeltaNet(2, 4, 32, 32) if small else DeltaNet(16, 32)
    attends = MODEL_SIZES["tiny" if small else "4B"].attention.with_kind
    mixers = {
        "full": attends(FULL),
        "window": attends(Window(20 if small else 4096)),
        "sparse": attends(Sparse()),
        "gated delta net": delta_net,
    }
    results = {}
    for count, length in ((2, arguments.tokens // 64), (8, arguments.tokens // 32)):
        prompt = arguments.tokens - count * length
        title = f"a prompt of {prompt:,} tokens, {count} answers of {length:,}"
        found = {
            name: compare(mixer, prompt, count, length, arguments.device)
            for name, mixer in mixers.items()
        }
        columns = [
            "shared, ms",
            "apart, ms",
            "shared / apart",
            "shared, GiB",
            "apart, GiB",
            "error of y",
            "error of dx",
        ]
        print_results(title, found, columns)
        results[title] = found
    print_json("shared_prompts", arguments.device, results=results)


def compare(mixer, prompt: int, count: int, length: int, device: torch.device) -> dict[str, float]:
    """Returns times, memory and errors of a block with this mixer."""
    is_gpu = device.type == "cuda"
    config = MODEL_SIZES["4B" if is_gpu else "tiny"]
    layer = LayerParts(mixer, config.parts(0).mlp)
    config = replace(config, num_hidden_layers=1, vocab_size=512, layers=(layer,))
    torch.manual_seed(0)
    with device:
        model = Transformer(config).cast(torch.bfloat16 if is_gpu else torch.float32)
    tokens = prompt + count * length
    x, dy = torch.randn(2, 1, tokens, config.hidden_size, device=device).to(model.norm.weight.dtype)
    dy[:, :prompt] = 0
    shared, apart = (
        make_step(model, x, dy, prompt, count, length) for make_step in (shared_step, apart_step)
    )
    errors = [relative_error(ours, exact) for ours, exact in zip(shared(), apart())]
    ms = time_interleaved({"shared": shared, "apart": apart}, device, repeats=2, warmup=1)
    gib = [extra_gib(step, device) for step in (shared, apart)]
    names = "shared_ms", "apart_ms", "ratio", "shared_gib", "apart_gib", "error_y", "error_dx"
    return dict(zip(names, [*ms.values(), ms["shared"] / ms["apart"], *gib, *errors]))


# makes the output of the answers, and the gradient of the input
Step = Callable[[], tuple[Tensor, Tensor]]


def shared_step(
    model: Transformer, x: Tensor, dy: Tensor, prompt: int, count: int, length: int
) -> Step:
    """All answers in one row, [1, prompt + count x length, D]."""
    ids = torch.arange(count + 1).repeat_interleave(torch.tensor([prompt, *[length] * count]))[None]
    documents = find_documents(ids, torch.zeros_like(ids))

    def step() -> tuple[Tensor, Tensor]:
        y, dx = run(model, x, dy, documents)
        return y[:, prompt:], dx

    return step


def apart_step(
    model: Transformer, x: Tensor, dy: Tensor, prompt: int, count: int, length: int
) -> Step:
    """A row [1, prompt + length, D] for each answer."""

    def step() -> tuple[Tensor, Tensor]:
        ys, total = [], torch.zeros_like(x, dtype=torch.float32)
        for start in range(prompt, x.shape[1], length):
            own = slice(start, start + length)
            y, dx = run(
                model, *(torch.cat([each[:, :prompt], each[:, own]], 1) for each in (x, dy)), None
            )
            ys.append(y[:, prompt:])
            total[:, :prompt] += dx[:, :prompt]
            total[:, own] = dx[:, prompt:]
        return torch.cat(ys, 1), total

    return step


def run(
    model: Transformer, x: Tensor, dy: Tensor, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    """Runs the block forward and backward. Returns its output, detached, and the gradient of x."""
    context = model.context(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device), documents)
    x = x.detach().requires_grad_()
    y = model.layers[0](x, context)
    dx, *_ = torch.autograd.grad(y, [x, *(p for p in model.layers[0].parameters())], dy)
    return y.detach(), dx


if __name__ == "__main__":
    main()
