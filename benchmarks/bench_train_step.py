"""A whole training step of ours, under any memory budget, and the peer's, in one run.

`python -m benchmarks.bench_train_step --settings auto 24GB checkpointing peer --host_budget 84GB`

Our step is train.py's, with float32 masters and its looks between blocks for a signal to stop. A
setting is "auto" or a size, taken as --memory_budget (a hard cap), or "checkpointing", which is
--gradient_checkpointing. After either, "+flash-attn-4" names another attention kernel, "+sparse"
and "+nsa" are --attention_type, and "+fp8" and its like --linear. "+windows" gives three layers of
four a window of 4,096 tokens.

"peer" is transformers' Qwen3 with Liger's kernels and loss, gradient checkpointing and fused AdamW
on bf16 weights (no float32 masters). "peer+kept" is the same without checkpointing. "titan" is
torchtitan's Qwen3 (0.2.2) with compiled blocks and loss, without checkpointing, with the peer's
optimizer. All train on the same text as one document: the Python standard library, bytes. With
`--lora 16` ours and the peer, by peft, train adapters of that rank alone, in bf16, or with
`--lora_bits 4` beside 4-bit linear maps, the peer's by bitsandbytes.

A step of `--batch_size 8` has 8 sequences, and "/2" after a setting runs them as 2 micro-batches of
4: "auto/2", "peer+kept/2". What runs out of memory has NaN seconds. `--settings auto peer
peer+kept/2 titan/2 --context_length 4096 --batch_size 8 --steps 6` compares short sequences.

The first of a setting's `--steps` compiles kernels and makes workspaces and optimizer state. It has
`--warm_up_tokens`; by default 16,384 above 131,072 tokens, and else as many as the others. The last
half of them is timed, of 3 the last: the mean of the seconds from the end of the backward before to
the end of their own. An update of state on the host goes on beside the next forward, and the peer's
step has ended by then.

With `--packed` each step takes other sequences of documents, packed as train.py packs them. Timed
steps are predicted from their own documents' lengths, of most of which cuDNN has built its plans by
then. Peers take the same sequences as one document each: their tokens see the documents before,
which ours do not. `--mean_length 800` cuts the text into documents with exponentially distributed
lengths. `--heavy_tailed` cuts it into documents with log-normal ones: their median is 85 tokens,
and half of all tokens are in documents above 5,000. Under torchrun each rank has its own sequences,
or ranks share them by `--context_parallel_size` or matrices by `--tensor_parallel_size`; the first
rank's results are printed.

With `--save_to DIR` as many steps follow again with nothing else, and as many beside each of which
a full checkpoint is written to a folder in DIR, which is deleted at the end: what train.py does
with --checkpoint_interval 1. DIR's disk must hold two checkpoints. A step's time then counts what
it waits for the checkpoint before it to be written.

With `--communication` one more step runs under PyTorch's profiler. It gives the seconds in which
NCCL's kernels ran on each rank, and the part of them in which no other kernel ran. A rank waits for
slower ranks in such a kernel.
"""

import argparse
import gc
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.common import peer_model, print_json, print_table
from kernels.attention.documents import all_segments, find_documents
from kernels.attention.full import FULL
from kernels.attention.window import Window
from kernels.head_loss import IGNORE_INDEX
from model import MODEL_SIZES, ModelConfig
from training.checkpoint.files import SPARE_BYTES
from training.checkpoint.pieces import SAVING_BYTES
from training.checkpoint.saver import Saver
from training.data.loader import Batch, PackedLoader
from training.data.packing import ConcatenatedPacking
from training.data.sources import Document, read_documents
from training.data.tokenizer import load_tokenizer
from training.data.tokens import TokenStore
from training.families.config_json import to_config_json
from training.families.flags import LORA_BITS, LORA_TARGETS
from training.host.files import size_on_disk
from training.host.sizes import GIB
from training.memory.cost_model import forward_flops, step_seconds
from training.memory.flags import LINEARS
from training.memory.plan import Plan
from training.memory.planner import make_plan
from training.memory.step import PackedDocuments
from training.optim.adamw import MasterAdamW
from training.optim.flags import OPTIMIZER_STATES, PEAK_LEARNING_RATE
from training.parallel.world import World, join_world
from training.run.build import build
from training.run.decide import choose_model, recipe_of
from training.run.metrics import peak_flops
from training.run.recipe import Recipe, check_machine
from training.run.settings import TrainConfig
from training.run.stopping import Stopping
from training.run.train_step import train_step

PEERS = {"peer", "titan"}
LONGEST_REPEATED, WARM_UP_TOKENS = 131_072, 16_384
WINDOWS = (Window(4096), Window(4096), Window(4096), FULL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_size", default="4B", choices=MODEL_SIZES)
    parser.add_argument("--num_layers", type=int, help="default: all of the model's")
    parser.add_argument("--context_length", type=int, default=131_072)
    parser.add_argument(
        "--batch_size", type=int, default=1, help="sequences of a micro-batch, or of N with /N"
    )
    parser.add_argument("--settings", nargs="+", default=["auto", "checkpointing", "peer"])
    parser.add_argument("--host_budget", help="for settings with a memory budget")
    parser.add_argument(
        "--optimizer_state", default="float32", choices=OPTIMIZER_STATES, help="as train.py's"
    )
    parser.add_argument("--linear", default="bf16", choices=LINEARS, help="as train.py's")
    parser.add_argument(
        "--lora", type=int, help="rank of adapters of all projections, which alone are trained"
    )
    parser.add_argument(
        "--lora_bits",
        type=int,
        default=16,
        choices=LORA_BITS,
        help="as train.py's; the peer takes 16 and 4",
    )
    parser.add_argument(
        "--weights_on_host",
        action="store_true",
        help="the same plan, with weights and optimizer state of all its blocks on the host, "
        "whatever --host_budget is",
    )
    parser.add_argument(
        "--steps", type=int, default=2, help="at least 2; see above for which are timed"
    )
    parser.add_argument("--warm_up_tokens", type=int, help="tokens of the first step; see above")
    parser.add_argument(
        "--context_parallel_size", type=int, default=1, help="ranks that share each sequence"
    )
    parser.add_argument(
        "--tensor_parallel_size", type=int, default=1, help="ranks that share each matrix"
    )
    parser.add_argument(
        "--replicate", type=int, default=1, help="copies of the weights, each sharded over ranks"
    )
    parser.add_argument("--communication", action="store_true", help="on GPUs; see above")
    parser.add_argument(
        "--save_to", type=Path, help="a folder of the disk that checkpoints go to; see above"
    )
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument(
        "--packed", action="store_true", help="several documents a sequence, another one each step"
    )
    parser.add_argument(
        "--mean_length",
        type=int,
        help="with --packed: tokens per document; default: the text's own",
    )
    parser.add_argument(
        "--heavy_tailed", action="store_true", help="with --packed: lengths as said above"
    )
    parser.add_argument(
        "--in_order",
        action="store_true",
        help="with --packed: sequences go to ranks in turn, not by cost",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    arguments = parser.parse_args()
    names = {name_of(setting) for setting in arguments.settings}
    if arguments.steps < 2 or any(
        arguments.batch_size % split_of(setting) for setting in arguments.settings
    ):
        parser.error("--steps must be at least 2, and /N after a setting must divide --batch_size")
    if arguments.weights_on_host and {"checkpointing", *PEERS} & names:
        parser.error("--weights_on_host changes plans, and checkpointing and peers have none")
    if arguments.save_to is not None and (not arguments.save_to.is_dir() or PEERS & names):
        parser.error("--save_to must be a folder that exists, and peers save nothing")
    if "titan" in names and (
        arguments.lora is not None or MODEL_SIZES[arguments.model_size].model_type != "qwen3"
    ):
        parser.error("titan takes sizes of Qwen3, without --lora")
    if arguments.save_to is not None:
        # Bytes per parameter: a bf16 weight, and a float32 master and two float32 moments or
        # compact state.
        each = 2 + (4.2 if arguments.optimizer_state == "compact" else 12)
        needed = 2 * each * MODEL_SIZES[arguments.model_size].num_parameters() + 2 * SPARE_BYTES
        if (free := shutil.disk_usage(arguments.save_to).free) < needed:
            parser.error(
                f"--save_to needs {needed / GIB:.0f} GiB for two checkpoints, its disk has "
                f"{free / GIB:.0f}"
            )
    if arguments.num_layers is not None and arguments.num_layers < 1:
        parser.error("--num_layers must be at least 1")
    if arguments.mean_length is not None and (arguments.mean_length < 2 or not arguments.packed):
        parser.error("--mean_length must be at least 2, and needs --packed")
    if arguments.heavy_tailed and (arguments.mean_length or not arguments.packed):
        parser.error("--heavy_tailed needs --packed, without --mean_length")
    if arguments.lora_bits < 16 and arguments.lora is None:
        parser.error("--lora_bits needs --lora")
    if arguments.lora_bits == 8 and "peer" in names:
        parser.error("the peer takes --lora_bits 16 or 4: its 8 bits are of products too")
    results = {}
    sizes = arguments.context_parallel_size, arguments.tensor_parallel_size, arguments.replicate
    with join_world(arguments.device, *sizes) as world:
        splits = {split_of(setting) for setting in arguments.settings}
        steps = {
            split: standard_library(arguments, split, world.data_size) for split in sorted(splits)
        }
        for setting in arguments.settings:
            results[setting] = measure(setting, arguments, steps[split_of(setting)], world)
            if world.is_main:
                print(f"\n{setting}\n{results[setting]['plan']}", flush=True)
            release(world)
        if not world.is_main:
            return
        columns = [name for name in next(iter(results.values())) if name not in ("plan", "saving")]
        print_table(
            f"one step, {arguments.model_size}, {shape_of(arguments).num_hidden_layers} layers, "
            f"{arguments.batch_size} x {arguments.context_length} tokens, {world.size} GPUs, "
            f"{world.context_size} of which share a sequence, {world.tensor_size} a matrix",
            ["", *columns],
            [[name, *(values[column] for column in columns)] for name, values in results.items()],
        )
        for setting, values in results.items():
            if arguments.save_to is not None:
                print_table(
                    f"{setting}: a checkpoint beside each step",
                    ["", "value"],
                    [*values["saving"].items()],
                )
        settings = {"ranks": world.size, **vars(arguments), "save_to": str(arguments.save_to or "")}
        print_json("train_step", world.device, **settings, results=results)


def name_of(setting: str) -> str:
    """Returns "peer" of "peer+kept/2"."""
    return setting.partition("/")[0].split("+")[0]


def options_of(setting: str) -> list[str]:
    """Returns ["kept"] of "peer+kept/2"."""
    return setting.partition("/")[0].split("+")[1:]


def split_of(setting: str) -> int:
    """Returns the micro-batches into which --batch_size is split, 2 of "peer+kept/2"."""
    return int(setting.partition("/")[2] or 1)


def shape_of(arguments: argparse.Namespace, setting: str = "") -> ModelConfig:
    """The model's shape with as many layers as --num_layers asks for, and the setting's windows."""
    shape = MODEL_SIZES[arguments.model_size]
    if "windows" in options_of(setting):
        shape = shape.with_kinds(*WINDOWS)
    return replace(shape, num_hidden_layers=arguments.num_layers or shape.num_hidden_layers)


def standard_library(
    arguments: argparse.Namespace, split: int, num_ranks: int
) -> list[list[list[Batch]]]:
    """[step][rank] -> its micro-batches, [batch_size / split, context_length] of the Python
    standard library's text."""
    count, rows = split * arguments.gradient_accumulation_steps, arguments.batch_size // split
    tokenizer, length = load_tokenizer(None), arguments.context_length
    documents = read_documents(None, tokenizer, MODEL_SIZES[arguments.model_size].vocab_size)
    if arguments.packed:
        if arguments.mean_length or arguments.heavy_tailed:
            documents = cut_documents(documents, arguments.mean_length)
        store = TokenStore(documents, tokenizer.eos_id)
        packing = ConcatenatedPacking(store.lengths, length, seed=0)
        loaders = [PackedLoader(store, packing, rows, rank, num_ranks) for rank in range(num_ranks)]
        with (
            mock.patch("training.data.loader.deal", in_order)
            if arguments.in_order
            else nullcontext()
        ):
            return [[loader.next_step(count) for loader in loaders] for _ in range(arguments.steps)]
    tokens, steps = np.concatenate([document.tokens for document in documents]), []
    default = WARM_UP_TOKENS if length > LONGEST_REPEATED else length
    for step in range(arguments.steps):
        first = length if step else arguments.warm_up_tokens or default
        all_ids = torch.from_numpy(tokens[: arguments.batch_size * first].astype("int64")).view(
            -1, first
        )
        batches = []
        for ids in all_ids.split(rows):
            targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
            batches.append(
                Batch(ids, targets, find_documents(torch.zeros_like(ids)), rows * (first - 1))
            )
        steps.append([batches * arguments.gradient_accumulation_steps] * num_ranks)
    return steps


def cut_documents(documents: Iterable[Document], mean_length: int | None) -> list[Document]:
    """Cut all tokens into documents of exponential length, at least two tokens with the end of
    text.

    None: log-normal lengths. Half of the standard library's text is then in documents above 5,000
    tokens.
    """
    tokens = np.concatenate([document.tokens for document in documents])
    random, count = np.random.default_rng(0), 2 * len(tokens) // (mean_length or 85)
    lengths = (
        random.exponential(mean_length - 2, count)
        if mean_length
        else random.lognormal(np.log(85), 2.08, count)
    )
    ends = np.cumsum(1 + lengths.astype(int))
    return [Document(part) for part in np.split(tokens, ends[ends < len(tokens)])]


def in_order(costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Replaces `packing.deal`: ignores the costs."""
    return np.arange(len(costs)).reshape(-1, num_ranks)


def documents_of(ranks: list[list[Batch]]) -> PackedDocuments:
    """The documents of one step, all ranks and micro-batches."""
    every = [batch for batches in ranks for batch in batches]
    B, T = every[0].input_ids.shape
    rows = [
        all_segments(batch.documents.segments, B, T)[:, 0].numpy() + B * i
        for i, batch in enumerate(every)
    ]
    sizes = {"batch_size": B, "num_ranks": len(ranks), "micro_batches": len(ranks[0])}
    lengths, sequences = (
        np.concatenate([batch.documents.lengths for batch in every]),
        np.concatenate(rows),
    )
    return PackedDocuments.average(lengths, sequences, int(lengths.max()), **sizes)


def measure(
    setting: str, arguments: argparse.Namespace, steps: list[list[list[Batch]]], world: World
) -> dict:
    """Run a setting's steps. Returns seconds per step, tokens/s, MFU, peaks, host memory, the plan
    and each loss.

    Seconds, peak_gib and host_gib are NaN if memory runs out. Host memory is of this process: its
    peak since before the model was built, the bytes that the plan pins, and the difference, which
    Python, torch, CUDA and the data take.
    """
    on_gpu, plan, saving = world.device.type == "cuda", None, {}
    config = shape_of(arguments, setting)
    communication: list[dict] = []
    restart_peak()
    losses, every, peaks, timed = [], [], [0], steps[-(len(steps) // 2) :]
    try:
        if name_of(setting) in PEERS:
            step = peer_step(setting, config, arguments, world)
        else:
            step, plan, optimizer = our_step(setting, arguments, steps, world)
        gc.collect()
        # train.py does so too: a full collection within a step would look at all that was imported
        gc.freeze()
        synchronize(world)
        returned = time.perf_counter()
        for ranks in steps:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            # has waited for all but our update
            losses.append(round(step(ranks[world.data_rank]), 3))
            began, returned = returned, time.perf_counter()
            every.append(returned - began)
            peaks.append(torch.cuda.max_memory_allocated() if on_gpu else 0)
            if world.is_main:
                peak = f", {peaks[-1] / GIB:.2f} GiB" if on_gpu else ""
                print(
                    f"{setting}, step {len(every)}: {every[-1]:.2f} s{peak}, loss {losses[-1]}",
                    file=sys.stderr,
                )
        seconds = statistics.mean(every[-len(timed) :])
        host_peak = resident_bytes("VmHWM")
        if arguments.save_to is not None:
            batches = [ranks[world.data_rank] for ranks in timed] * arguments.steps
            saving = time_saving(
                step, batches[: arguments.steps], optimizer, config, arguments.save_to, world
            )
        if arguments.communication and on_gpu:
            communication = communication_seconds(lambda: step(steps[-1][world.data_rank]), world)
    except torch.OutOfMemoryError as error:
        print(f"{setting}: {str(error).splitlines()[0]}", file=sys.stderr)
        seconds, host_peak = float("nan"), resident_bytes("VmHWM")
    flops, length, predicted = peak_flops(world.device), arguments.context_length, 0.0
    pinned = plan.host_bytes if plan else 0
    if plan:
        predicted = statistics.mean(
            step_seconds(plan.step.at(length, documents_of(ranks)), plan.execution, plan.rates)
            for ranks in timed
        )
    own = [batch for ranks in timed for batch in ranks[world.data_rank]]
    kinds = plan.execution.kinds if plan else ()
    whole, is_done = arguments.lora is None, not math.isnan(seconds)
    flops_of = [
        forward_flops(config, b.text_lengths, kinds, b.num_valid_tokens, trains_matrices=whole)
        for b in own
    ]
    model_flops = 3 * sum(flops_of) / len(timed)
    return {
        "seconds": seconds,
        "predicted_seconds": predicted,
        "tokens_per_second": arguments.gradient_accumulation_steps
        * arguments.batch_size
        * length
        / seconds,
        "mfu": model_flops / (world.context_size * world.tensor_size) / seconds / flops
        if flops
        else 0.0,
        "peak_gib": max(*peaks, torch.cuda.max_memory_allocated() if on_gpu else 0) / GIB
        if is_done
        else math.nan,
        "predicted_gib": plan.peak.bytes / GIB if plan else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0,
        "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"] if on_gpu else 0,
        "host_gib": resident_bytes() / GIB if is_done else math.nan,
        "predicted_host_gib": pinned / GIB,
        "host_process_bytes": host_peak,
        "host_pinned_bytes": pinned,
        "host_other_bytes": host_peak - pinned,
        "losses": losses,
        **({"communication": communication} if communication else {}),
        **({"saving": saving} if saving else {}),
        "timed_steps": len(timed),
        "seconds_of_each_step": [round(value, 2) for value in every],
        "plan": str(plan) if plan else "",
    }


def recipe_of_setting(setting: str, arguments: argparse.Namespace, world: World) -> Recipe:
    """Returns the recipe that train.py would have with a setting's flags."""
    placement, names, split = name_of(setting), options_of(setting), split_of(setting)
    linear = next((name for name in names if name in LINEARS), arguments.linear)
    backend = "".join(name for name in names if name not in ("windows", *LINEARS))
    settings = TrainConfig(
        model_size=arguments.model_size,
        context_length=arguments.context_length,
        batch_size=arguments.batch_size // split,
        gradient_accumulation_steps=split * arguments.gradient_accumulation_steps,
        context_parallel_size=arguments.context_parallel_size,
        tensor_parallel_size=arguments.tensor_parallel_size,
        replicate=arguments.replicate,
        optimizer_state=arguments.optimizer_state,
        linear=linear,
        lora=arguments.lora,
        lora_bits=arguments.lora_bits,
        attention_backend=backend if backend not in ("", "sparse", "nsa") else "auto",
        attention_type=backend if backend in ("sparse", "nsa") else "full",
        gradient_checkpointing=placement == "checkpointing",
        memory_budget=None if placement == "checkpointing" else placement,
        host_budget=None if placement == "checkpointing" else arguments.host_budget,
    )
    num_layers, shape = shape_of(arguments, setting).num_hidden_layers, choose_model(settings)
    if "windows" in options_of(setting):
        shape = shape.with_kinds(*WINDOWS)
    return recipe_of(settings, replace(shape, num_hidden_layers=num_layers), world)


def our_step(
    setting: str, arguments: argparse.Namespace, steps: list[list[list[Batch]]], world: World
) -> tuple[Callable, Plan, MasterAdamW]:
    """(function that makes one step from its micro-batches and returns the loss, the plan, the
    optimizer)."""
    recipe = recipe_of_setting(setting, arguments, world)
    check_machine(recipe, world)  # raises on a CPU
    documents = max(map(documents_of, steps), key=lambda documents: documents.longest)
    with (
        mock.patch("training.run.build.make_plan", with_weights_on_host)
        if arguments.weights_on_host
        else nullcontext()
    ):
        model, optimizer, plan = build(recipe, documents, world)
    stopping = Stopping(
        [], world, model.layers, recipe.batch.micro_batches, world.min(plan.seconds)[0]
    )

    def step(batches: list[Batch], before_update: Callable[[], None] = lambda: None) -> float:
        rate, norm = PEAK_LEARNING_RATE, recipe.optim.max_grad_norm
        with stopping.looking():
            return train_step(model, optimizer, batches, world, rate, norm, before_update)[0]

    return step, plan, optimizer


def with_weights_on_host(*arguments) -> Plan:
    """Replaces `make_plan`: its plan, with the weights of all blocks on the host. The plan has no
    whole blocks."""
    plan = make_plan(*arguments)
    placements = tuple(
        replace(placement, weights="host") for placement in plan.execution.placements
    )
    return replace(plan, execution=replace(plan.execution, placements=placements))


def time_saving(
    step: Callable, steps: list[list[Batch]], optimizer: MasterAdamW, config: ModelConfig,
    save_to: Path,
    world: World,
) -> dict:  # fmt: skip
    """Time steps with nothing saved, and as many while a full checkpoint is written during each."""
    name = tempfile.mkdtemp(prefix="bench_train_step_", dir=save_to) if world.is_main else ""
    folder, seconds, waited = Path(world.broadcast(name)), {False: [], True: []}, []
    saver, peaks = Saver(folder, keep=1), {}
    try:
        for saving, every in seconds.items():
            restart_peak()
            synchronize(world)
            returned = time.perf_counter()
            for number, batches in enumerate(steps, 1):
                began = returned
                if saving:
                    saver.begin(
                        number, weights=optimizer.weights(), model_config=to_config_json(config),
                        optimizer_state=optimizer.state_dict(), trainer_state={},
                    )  # fmt: skip
                    waited.append(time.perf_counter() - began)
                    check_saved(saver, number - 1)
                step(batches, saver.before_update)
                returned = time.perf_counter()
                every.append(returned - began)
                if world.is_main:
                    print(
                        f"{'a save beside it' if saving else 'nothing saved'}: {every[-1]:.2f} s",
                        file=sys.stderr,
                    )
            saver.wait()
            check_saved(saver, len(steps) * saving)
            peaks[saving] = resident_bytes("VmHWM")
        size = size_on_disk([folder])
    finally:
        if world.is_main:
            shutil.rmtree(folder)
    without, beside = statistics.mean(seconds[False]), statistics.mean(seconds[True])
    return {
        "seconds_without": without,
        "seconds_beside": beside,
        "ratio": beside / without,
        "seconds_of_each_without": [round(value, 2) for value in seconds[False]],
        "seconds_of_each_beside": [round(value, 2) for value in seconds[True]],
        "seconds_waited_for_the_save_before": [round(value, 2) for value in waited],
        "checkpoint_gb": size / 1e9,  # the last checkpoint, the only one kept
        "seconds_until_read": saver.seconds_read,
        "written_gb_per_second": size / 1e9 / saver.seconds_read,
        "seconds_of_a_save": saver.seconds,  # until it is flushed and renamed
        "host_peak_gib_without": peaks[False] / GIB,
        "host_peak_gib_beside": peaks[True] / GIB,
        "predicted_more_gib": SAVING_BYTES / GIB,
    }


def check_saved(saver: Saver, step: int) -> None:
    """End the benchmark if the save of that step failed: its seconds would say nothing."""
    if step and saver.last != saver.output_dir / f"step_{step:08d}":
        raise RuntimeError(f"the checkpoint of step {step} failed, as a line above says")


def peer_step(
    setting: str, config: ModelConfig, arguments: argparse.Namespace, world: World
) -> Callable:
    """A function that makes one step from its micro-batches, each row one document, and returns the
    mean loss."""
    if not all(kind.has_keys for kind in config.kinds) and world.device.type == "cuda":
        use_fla()
    make = titan_loss if name_of(setting) == "titan" else liger_loss
    model, loss_of = make(setting, config, arguments, world.device)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=PEAK_LEARNING_RATE, fused=True)

    def step(batches: list[Batch]) -> float:
        losses = []
        for batch in batches:
            loss = loss_of(batch.input_ids.to(world.device)) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(sum(losses))

    return step


def liger_loss(
    setting: str, config: ModelConfig, arguments: argparse.Namespace, device: torch.device
) -> tuple[torch.nn.Module, Callable]:
    """transformers' model with Liger's kernels, and the function from ids to its loss.

    With --lora its adapters are trained alone, beside frozen matrices of --lora_bits.
    """
    model = peer_model(config, device)
    if arguments.lora is not None:
        from peft import LoraConfig, get_peft_model

        if arguments.lora_bits == 4:
            quantize_peer(model)
        rank = arguments.lora
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[*LORA_TARGETS])
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if "kept" not in options_of(setting):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


def titan_loss(
    setting: str, config: ModelConfig, arguments: argparse.Namespace, device: torch.device
) -> tuple[torch.nn.Module, Callable]:
    """torchtitan's Qwen3 in bf16 with blocks and loss compiled as there, and the function from ids
    to its loss."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

    attention = config.attention
    shape = Qwen3ModelArgs(
        vocab_size=config.vocab_size, max_seq_len=arguments.context_length,
        head_dim=attention.head_dim,
        dim=config.hidden_size, n_layers=config.num_hidden_layers,
        n_heads=attention.num_heads,
        n_kv_heads=attention.num_key_value_heads, qk_norm=True,
        hidden_dim=config.parts(0).mlp.intermediate_size,
        rope_theta=config.rope_theta, norm_eps=config.rms_norm_eps,
        enable_weight_tying=config.tie_word_embeddings,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Model(shape).to(torch.bfloat16)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    loss_of = torch.compile(cross_entropy_loss, backend=backend)
    # a sum of all tokens'
    return (model, lambda ids: loss_of(model(ids)[:, :-1], ids[:, 1:]) / ids[:, 1:].numel())


def use_fla() -> None:
    """Have transformers' Qwen3.5 convolve by fla, and let fla run its delta rule on any Triton: for
    the time alone.

    Its gradients may be wrong on Hopper with Triton before 3.7.1.
    """
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.ops.common import chunk_o
    from transformers.models.qwen3_5 import modeling_qwen3_5

    def convolve(x_BCT, weight, bias=None, activation=None, **options):
        return causal_conv1d(x_BCT.transpose(1, 2), weight, bias, activation=activation)[
            0
        ].transpose(1, 2)

    chunk_o.TRITON_ABOVE_3_7_1 = True
    modeling_qwen3_5.causal_conv1d_fn = convolve


def quantize_peer(model: torch.nn.Module) -> None:
    """Turn the linear maps of a transformers model's blocks into bitsandbytes' of NF4, as peft
    knows them."""
    import bitsandbytes

    layers = model.model.layers
    for name, module in [*layers.named_modules()]:
        if isinstance(module, torch.nn.Linear):
            sizes, device = (module.in_features, module.out_features), module.weight.device
            quantized = bitsandbytes.nn.Linear4bit(
                *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
            )
            weight = bitsandbytes.nn.Params4bit(
                module.weight.detach(), requires_grad=False, quant_type="nf4"
            )
            quantized.weight = weight.to(device)
            layers.set_submodule(name, quantized)
    model.is_loaded_in_4bit = True


def communication_seconds(step: Callable, world: World) -> list[dict[str, float]]:
    """Profile one step. Returns each rank's seconds by kind of NCCL kernel, and seconds in which
    nothing else ran."""
    synchronize(world)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        synchronize(world)
    spans = [
        (
            event.time_range.start,
            event.time_range.end,
            event.name if event.name.startswith("ncclDevKernel") else "",
        )
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    seconds, alone, running, last = Counter(), 0.0, Counter(), 0.0
    for time_, change, name in sorted(
        [(start, 1, n) for start, _, n in spans] + [(end, -1, n) for _, end, n in spans]
    ):
        kinds = [kind for kind, count in running.items() if count and kind]
        for kind in kinds:
            seconds[kind.removeprefix("ncclDevKernel_").partition("_")[0].partition("(")[0]] += (
                time_ - last
            ) / 1e6
        alone += (time_ - last) / 1e6 if kinds and not running[""] else 0.0
        running[name] += change
        last = time_
    every: list = [None] * world.size
    if world.size > 1:
        torch.distributed.all_gather_object(every, {**seconds, "nothing_else_runs": alone})
    return every


def synchronize(world: World) -> None:
    torch.get_device_module(world.device).synchronize()


def resident_bytes(kind: str = "VmRSS") -> int:
    """Host memory of this process, pinned pages included; "VmHWM" is the peak."""
    return 1024 * int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def restart_peak() -> None:
    """Start the peak of resident memory anew, where the kernel allows it; else the peak is the
    whole process's."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release(world: World) -> None:
    """Free the GPU memory of the last setting, and lift its cap."""
    gc.unfreeze()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
