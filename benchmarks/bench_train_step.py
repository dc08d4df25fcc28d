"""A whole training step, ours and the peer's in one run: `python -m benchmarks.bench_train_step`.

The peer is transformers' Qwen3 with Liger's kernels and loss, gradient checkpointing and fused AdamW on bf16 weights
(no float32 masters). Ours is train.py's step with float32 masters and moments: once with gradient checkpointing, and on
a GPU once as `--memory_budget auto` plans it. All see the same random tokens as one document.
"""

import argparse
import functools
import gc
import sys
import time

import torch

from benchmarks.common import environment, print_json, print_table
from model import MODEL_SIZES, ModelConfig, Transformer
from train import PEAK_LEARNING_RATE, Start, TrainConfig, build, choose_model, train_step
from training.data import Batch
from training.distributed import World
from training.metrics import peak_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_size", default="4B", choices=MODEL_SIZES)
    parser.add_argument("--context_length", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=2, help="timed is the last; the first compiles and allocates")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    world = World(0, 1, torch.device(arguments.device))
    config = choose_model(TrainConfig(model_size=arguments.model_size), world.device)
    ids = torch.randint(config.vocab_size, (1, arguments.context_length), generator=torch.Generator().manual_seed(0))
    settings = {"ours, gradient checkpointing": TrainConfig(gradient_checkpointing=True)}
    if world.device.type == "cuda":
        planned = TrainConfig(memory_budget="auto", context_length=arguments.context_length, batch_size=1)
        settings["ours, planned"] = planned
    steps = {name: functools.partial(our_step, s) for name, s in settings.items()}
    results = {}
    for name, make_step in {**steps, "transformers + Liger": peer_step}.items():
        step = make_step(config, ids, world)
        if step is not None:
            results[name] = measure(step, arguments.steps, config, ids, world.device)
        del step
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    print_table(
        f"one step, {arguments.model_size}, {arguments.context_length} tokens",
        ["", "seconds", "tokens/s", "MFU", "peak GiB", "loss of each step"],
        [[name, *values.values()] for name, values in results.items()],
    )
    print_json(operation="train_step", **environment(world.device), **vars(arguments), results=results)


def our_step(settings: TrainConfig, config: ModelConfig, ids: torch.Tensor, world: World):
    model, optimizer = build(settings, config, Start(), world)
    batch = Batch(ids, ids, torch.zeros_like(ids), ids.numel() - 1)
    return lambda: train_step(model, optimizer, [batch], world, PEAK_LEARNING_RATE, settings.max_grad_norm)[0]


def peer_step(config: ModelConfig, ids: torch.Tensor, world: World):
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        print(f"transformers + Liger: not installed ({error})", file=sys.stderr)
        return None
    if world.device.type == "cuda":  # Liger's kernels run nowhere else
        apply_liger_kernel_to_qwen3()
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**config.to_hugging_face())).to(torch.bfloat16)
    rotary = model.model.rotary_emb
    model.to_empty(device=world.device)
    rotary.inv_freq = rotary.original_inv_freq = config.rope_theta ** -(
        torch.arange(0, config.head_dim, 2, device=world.device) / config.head_dim
    )
    with torch.no_grad():
        initializer = Transformer.initialize_parameter
        holder = argparse.Namespace(config=config)
        for name, parameter in model.named_parameters():
            initializer(holder, name, parameter)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, fused=True)
    ids = ids.to(world.device)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def measure(step, num_steps: int, config: ModelConfig, ids: torch.Tensor, device: torch.device) -> dict:
    """Of the last step: seconds, tokens/s, MFU, peak allocated GiB; and every step's loss."""
    losses = []
    for _ in range(num_steps):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(round(step(), 3))
        seconds = time.perf_counter() - start
    flops, peak = peak_flops(device), 0.0
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "seconds": seconds,
        "tokens_per_second": ids.numel() / seconds,
        "mfu": 3 * config.forward_flops([ids.numel()]) / seconds / flops if flops else 0.0,
        "peak_gib": peak,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
