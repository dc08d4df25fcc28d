"""A whole training step of ours, under any memory budget, and the peer's, in one run.

`python -m benchmarks.bench_train_step --settings auto 24GB checkpointing peer --host_budget 84GB`

Ours is train.py's step with float32 masters and moments, placed as the setting says: "auto" or a size is a
--memory_budget (a hard cap), "checkpointing" is --gradient_checkpointing; "+flash-attn-4" behind either names another
attention kernel. The peer is transformers' Qwen3 with Liger's kernels and loss, gradient checkpointing and fused AdamW
on bf16 weights (no float32 masters). All see the same text as one document: the Python standard library, bytes. A step
of WARM_UP_TOKENS goes before, which compiles and makes the libraries' workspaces, unless host memory is laid out for
the whole context.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import environment, print_json, print_table
from model import MODEL_SIZES, ModelConfig, Transformer
from train import (
    PEAK_LEARNING_RATE,
    TrainConfig,
    build_model,
    choose_model,
    configure_machine,
    resolve_memory_budget,
    train_step,
)
from training.corpus import load_documents, load_tokenizer
from training.data import Batch
from training.distributed import World, join_world
from training.metrics import peak_flops
from training.optimizer import MasterAdamW
from training.planner import Plan

GIB = 2**30
WARM_UP_TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_size", default="4B", choices=MODEL_SIZES)
    parser.add_argument("--context_length", type=int, default=131_072)
    parser.add_argument("--settings", nargs="+", default=["auto", "checkpointing", "peer"])
    parser.add_argument("--host_budget", help="of settings with a memory budget")
    parser.add_argument("--steps", type=int, default=1, help="timed is the last")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    arguments = parser.parse_args()
    ids = standard_library(arguments.model_size, arguments.context_length)
    results = {}
    with join_world(arguments.device) as world:
        for setting in arguments.settings:
            results[setting] = measure(setting, arguments, ids, world)
            print(f"\n{setting}\n{results[setting]['plan']}", flush=True)
            release(world)
        columns = [name for name in next(iter(results.values())) if name != "plan"]
        print_table(
            f"one step, {arguments.model_size}, {arguments.context_length} tokens",
            ["", *columns],
            [[name, *(values[column] for column in columns)] for name, values in results.items()],
        )
        print_json(operation="train_step", **environment(world.device), **vars(arguments), results=results)


def standard_library(model_size: str, length: int) -> torch.Tensor:
    """int64 [1, length]: as much of the Python standard library, one file after another."""
    documents = load_documents(None, load_tokenizer(None), MODEL_SIZES[model_size].vocab_size)
    return torch.from_numpy(np.concatenate([document.tokens for document in documents])[None, :length].astype("int64"))


def measure(setting: str, arguments: argparse.Namespace, ids: torch.Tensor, world: World) -> dict:
    """Of the last step: seconds, tokens/s, MFU, peaks, host memory; what was planned; the loss of each step.

    Seconds are NaN where memory runs out.
    """
    on_gpu, plan = world.device.type == "cuda", None
    config = choose_model(TrainConfig(model_size=arguments.model_size), world.device)
    losses, seconds = [], 0.0
    try:
        if setting == "peer":
            step = peer_step(config, world)
        else:
            step, plan = our_step(setting, arguments, world)
        if plan is None or plan.arena_bytes == 0:
            step(ids[:, :WARM_UP_TOKENS])
        for _ in range(arguments.steps):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            losses.append(round(step(ids), 3))
            seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        print(f"{setting}: {str(error).splitlines()[0]}", file=sys.stderr)
        seconds = float("nan")
    flops = peak_flops(world.device)
    return {
        "seconds": seconds,
        "predicted_seconds": plan.seconds if plan else 0.0,
        "tokens_per_second": ids.numel() / seconds,
        "mfu": 3 * config.forward_flops([ids.numel()]) / seconds / flops if flops else 0.0,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        "predicted_gib": plan.peak.bytes / GIB if plan else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0,
        "host_gib": resident_bytes() / GIB,
        "predicted_host_gib": plan.host_bytes / GIB if plan else 0.0,
        "losses": losses,
        "plan": str(plan) if plan else "",
    }


def our_step(setting: str, arguments: argparse.Namespace, world: World) -> tuple[Callable, Plan]:
    """(a function of token ids [1, T] that makes one step and returns its loss, the plan)."""
    placement, _, backend = setting.partition("+")
    settings = TrainConfig(
        model_size=arguments.model_size,
        context_length=arguments.context_length,
        batch_size=1,
        attention_backend=backend or "auto",
        gradient_checkpointing=placement == "checkpointing",
        memory_budget=None if placement == "checkpointing" else placement,
        host_budget=None if placement == "checkpointing" else arguments.host_budget,
    )
    settings.memory_budget = resolve_memory_budget(settings, world.device)  # refuses one on a CPU
    configure_machine(settings, world)
    model, plan = build_model(settings, choose_model(settings, world.device), world)
    optimizer = MasterAdamW(model.named_parameters(), accumulate=False, gpu_state_bytes=plan.choices.gpu_state_bytes)

    def step(ids: torch.Tensor) -> float:
        batch = Batch(ids, ids, torch.zeros_like(ids), ids.numel() - 1)
        return train_step(model, optimizer, [batch], world, PEAK_LEARNING_RATE, settings.max_grad_norm)[0]

    return step, plan


def peer_step(config: ModelConfig, world: World) -> Callable:
    """A function of token ids [1, T] that makes one step and returns its loss."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if world.device.type == "cuda":  # Liger's kernels run nowhere else
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

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

    def step(ids: torch.Tensor) -> float:
        ids = ids.to(world.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def resident_bytes() -> int:
    """Host memory of this process, pinned pages included."""
    return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def release(world: World) -> None:
    """Give back what the last setting held, and lift its cap."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
