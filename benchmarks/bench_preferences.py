"""A whole step of DPO on one pair of answers to one long prompt: ours, under any memory budget,
beside TRL's.

`.venv/bin/python -m benchmarks.bench_preferences --prompt 30720 --answer 2048 --settings auto 24GB
auto+apart trl`

Our step is train.py's. A setting is "auto" or a size, taken as --memory_budget (a hard cap).
"+apart" gives each answer a prompt of its own, in one row. "trl" is TRL's DPOTrainer on
transformers' model with Liger's kernels: bf16 weights, gradient checkpointing, fused AdamW without
float32 masters, and the two answers in two rows. Weights are random.

The reference's log-probabilities are stored before the first step, by TRL's trainer as well. Our
pass for them is timed. With `--lora 16` all train adapters of that rank alone, and each step runs
its reference, the base. The losses are ln 2 within the rounding of bf16. The steps after the first
are timed.
"""

import argparse
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from benchmarks.common import peer_model, print_json, print_table
from kernels.head_loss import NextToken
from model import MODEL_SIZES, ModelConfig
from training.data.loader import PROMPT, Batch, make_batch, prompts_of
from training.data.sources import Document
from training.data.tokens import TokenStore
from training.families.flags import LORA_TARGETS
from training.host.sizes import GIB
from training.memory.placement import products_in_bf16
from training.memory.step import PackedDocuments
from training.optim.flags import OPTIMIZER_STATES
from training.parallel.world import World, join_world
from training.run.build import build
from training.run.decide import choose_model, recipe_of
from training.run.recipe import check_machine
from training.run.settings import TrainConfig
from training.run.train_step import train_step

# So low a rate leaves the loss at ln 2. With 1e-6 it was 0 in the second step, and gradients were
# zeros, which a GPU multiplies faster, since it draws less power.
BETA, RATE = 0.1, 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_size", default="4B", choices=MODEL_SIZES)
    parser.add_argument("--num_layers", type=int, help="default: all of the model's")
    parser.add_argument("--prompt", type=int, default=30_720, help="tokens")
    parser.add_argument("--answer", type=int, default=2048, help="tokens of each answer")
    parser.add_argument("--settings", nargs="+", default=["auto", "auto+apart", "trl"])
    parser.add_argument("--host_budget", help="for settings with a memory budget")
    parser.add_argument(
        "--optimizer_state", default="auto", choices=OPTIMIZER_STATES, help="as train.py's"
    )
    parser.add_argument(
        "--lora", type=int, help="rank of adapters of all projections, which alone are trained"
    )
    parser.add_argument("--steps", type=int, default=3, help="at least 2")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    results = {}
    with join_world(arguments.device) as world:
        for setting in arguments.settings:
            if world.device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0)
            try:
                results[setting] = (trl if setting == "trl" else ours)(setting, arguments, world)
            except torch.OutOfMemoryError as error:
                print(f"{setting}: {str(error).splitlines()[0]}", flush=True)
                results[setting] = dict.fromkeys(("seconds", "peak_gib"), math.nan)
            print(setting, results[setting], flush=True)
            gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
        columns = list(
            dict.fromkeys(name for values in results.values() for name in values if name != "plan")
        )
        rows = [
            [name, *(values.get(column, "") for column in columns)]
            for name, values in results.items()
        ]
        first, *others = results
        for other in others:
            ratios = [
                results[first][name] / (results[other][name] or math.nan)
                for name in ("seconds", "peak_gib")
            ]
            print(f"{first} / {other}: {ratios[0]:.3f} of the seconds, {ratios[1]:.3f} of the peak")
        title = (
            f"DPO, {arguments.model_size}, a prompt of {arguments.prompt:,} and two answers of "
            f"{arguments.answer:,}"
        )
        print_table(title, ["", *columns], rows)
        print_json("preferences", world.device, **vars(arguments), results=results)


def shape_of(arguments: argparse.Namespace) -> ModelConfig:
    shape = choose_model(
        TrainConfig(model_size=arguments.model_size, context_length=longest(arguments))
    )
    return replace(shape, num_hidden_layers=arguments.num_layers or shape.num_hidden_layers)


def longest(arguments: argparse.Namespace) -> int:
    """Tokens of a prompt and one answer."""
    return arguments.prompt + arguments.answer


def pair_of(arguments: argparse.Namespace) -> list[np.ndarray]:
    """Ids of the prompt, and of both answers."""
    ids = (
        np.random.default_rng(0)
        .integers(0, 256, arguments.prompt + 2 * arguments.answer)
        .astype(np.uint32)
    )
    return np.split(ids, [arguments.prompt, longest(arguments)])


def store_of(arguments: argparse.Namespace, is_apart: bool) -> TokenStore:
    """The pair as one document, as objectives/rows.py makes it; apart: each answer behind a prompt
    of its own."""
    prompt, *answers = pair_of(arguments)
    parts = [(prompt[:-1], PROMPT)] * (not is_apart)
    for number, answer in enumerate(answers):
        parts.append((np.concatenate([prompt if is_apart else prompt[-1:], answer]), number))
    tokens = np.concatenate([own for own, _ in parts])
    masked = [
        np.arange(len(own)) < len(own) - (arguments.answer if number >= 0 else 0)
        for own, number in parts
    ]
    numbers = np.repeat(np.float32([number for _, number in parts]), [len(own) for own, _ in parts])
    return TokenStore(
        [Document(tokens, np.concatenate(masked), True, columns={"answer": numbers})], 0
    )


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    torch.get_device_module(device).synchronize()
    began = time.perf_counter()
    function()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - began


def ours(setting: str, arguments: argparse.Namespace, world: World) -> dict:
    """Seconds of the reference's pass and of a step, peaks, what was predicted of both, and the
    losses."""
    budget, *apart = setting.split("+")
    store, is_gpu = store_of(arguments, bool(apart)), world.device.type == "cuda"
    length = int(store.lengths[0])
    config = TrainConfig(
        model_size=arguments.model_size, context_length=length, batch_size=1, objective="dpo",
        beta=BETA,
        lora=arguments.lora, optimizer_state=arguments.optimizer_state, learning_rate=RATE,
        memory_budget=budget if is_gpu else None,
        host_budget=arguments.host_budget if is_gpu else None,
    )  # fmt: skip
    recipe = recipe_of(config, replace(shape_of(arguments), max_position_embeddings=length), world)
    check_machine(recipe, world)
    documents = PackedDocuments(length, ((length, 1),)).with_prompts(*prompts_of(store))
    if apart:
        documents = PackedDocuments(longest(arguments), ((longest(arguments), 2),))
    model, optimizer, plan = build(recipe, documents, world)
    batch = make_batch(store, [[(0, 0, length)]], length)
    ids, targets = batch.input_ids.to(world.device), batch.targets.to(world.device)
    found: list[torch.Tensor] = []

    @torch.no_grad()
    def reference() -> None:
        loss = NextToken(targets, denominator=1.0, num_targets=batch.num_valid_tokens)
        with products_in_bf16(model):
            found.append(model(ids, batch.documents, loss).log_probs[0, :-1])

    # the first one compiles
    reference_seconds = [timed(reference, world.device) for _ in range(2 - bool(apart))][-1]
    if arguments.lora is None:
        store.add_column("reference", np.append(np.float32(0), found[-1].float().cpu().numpy()))
        batch = make_batch(store, [[(0, 0, length)]], length)
    seconds, losses, peaks = [], list[float](), list[int]()

    def step(batches: list[Batch]) -> None:
        losses.append(
            train_step(model, optimizer, batches, world, RATE, 1.0, objective=recipe.objective)[0]
        )

    for _ in range(arguments.steps):
        restart_peak(world.device)
        seconds.append(timed(lambda: step([batch]), world.device))
        peaks.append(peak_bytes(world.device))
    taken = statistics.mean(seconds[1:])
    return {
        "seconds": taken, "predicted_seconds": plan.seconds if is_gpu else 0.0,
        "peak_gib": max(peaks) / GIB, "predicted_gib": plan.peak.bytes / GIB,
        "reference_seconds": reference_seconds, "reference_of_step": reference_seconds / taken,
        "losses": [round(loss, 5) for loss in losses],
        "seconds_of_each_step": [round(each, 2) for each in seconds],
        "plan": str(plan),
    }  # fmt: skip


def restart_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def trl(_: str, arguments: argparse.Namespace, world: World) -> dict:
    """Seconds and peak of a step of TRL's trainer, and its losses."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):  # it has ids
            return dataset

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.get_device_module(world.device).synchronize()
            restart_peak(world.device)
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            torch.get_device_module(world.device).synchronize()
            seconds.append(time.perf_counter() - self.began)
            peaks.append(peak_bytes(world.device))

    seconds, peaks = list[float](), list[int]()
    is_gpu, (prompt, chosen, rejected) = world.device.type == "cuda", pair_of(arguments)
    ids = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    rows = Dataset.from_dict(
        {name: [each.tolist()] * arguments.steps for name, each in ids.items()}
    )
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"
    )
    model = peer_model(shape_of(arguments), world.device)
    if arguments.lora is not None:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=arguments.lora, lora_alpha=2 * arguments.lora, target_modules=[*LORA_TARGETS]
        )
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            output_dir=folder, per_device_train_batch_size=1, max_steps=arguments.steps,
            max_length=None, beta=BETA,
            learning_rate=RATE, lr_scheduler_type="constant", report_to="none", save_strategy="no",
            logging_steps=1,
            bf16=is_gpu, use_cpu=not is_gpu, gradient_checkpointing=True, optim="adamw_torch_fused",
            gradient_checkpointing_kwargs={"use_reentrant": False},
            precompute_ref_log_probs=arguments.lora is None,
        )  # fmt: skip
        trainer = Trainer(
            model,
            args=settings,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    losses = [round(entry["loss"], 5) for entry in trainer.state.log_history if "loss" in entry]
    return {
        "seconds": statistics.mean(seconds[1:]), "peak_gib": max(peaks) / GIB, "losses": losses,
        "seconds_of_each_step": [round(each, 2) for each in seconds],
    }  # fmt: skip


if __name__ == "__main__":
    main()
