"""Train a decoder: `python train.py`, or `torchrun --nproc_per_node=N train.py` on N GPUs.

Top to bottom: the configuration; what is checked before any work; building; one step; validation; the run.
"""

import dataclasses
import json
import logging
import math
import os
import signal
import sys
import time
import typing
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from kernels.attention import choose_backend
from kernels.common import IMPLEMENTATIONS, set_default_implementation
from model import MODEL_SIZES, ModelConfig, Transformer, find_documents
from training.checkpoint.files import (
    latest_checkpoint,
    load_optimizer_state,
    load_trainer_state,
    restore_rng,
    save_checkpoint,
    verify_checkpoint,
)
from training.checkpoint.weights import load_model_weights, read_json
from training.config import flag, given_settings
from training.data.loader import PackedLoader, check_same_data, validation_batches
from training.data.packing import Batch
from training.data.sources import load_documents, split_documents
from training.data.tokenizer import load_tokenizer
from training.errors import UserError, refused_as_user_error
from training.memory.cost_model import Choices, PackedDocuments, Step, gib
from training.memory.machine import Rates, available_host_bytes, cap_gpu_memory, gpu_budget, measure_rates, parse_bytes
from training.memory.placement import WHOLE, Placement
from training.memory.planner import Plan, has_plan, make_plan, place
from training.memory.profiler import format_table
from training.metrics import MetricsFile, peak_flops, peak_memory_gib
from training.optimizer import MasterAdamW, warmup_cosine
from training.parallel.fsdp import initial_weights, shard_model
from training.parallel.world import World, join_world

logger = logging.getLogger("train")
DEFAULT_STEPS = 300
PEAK_LEARNING_RATE = 2e-5  # of continued training; from scratch wants more, and a far longer warm-up
TINY_PEAK_LEARNING_RATE = 3e-3
PROMPT_TOKENS = 64
SHUTDOWN_SECONDS = 30  # torchrun's, between SIGTERM and SIGKILL
# A resumed run takes these from its flags alone, all other settings from the run that it continues.
NOT_INHERITED = ("resume", "init_from", "output_dir", "device")
BUDGETS = ("memory_budget", "host_budget")
# A flag given with --resume drops the earlier run's settings that it would contradict.
REPLACED = {name: BUDGETS for name in ("gradient_checkpointing", "compile")}
REPLACED |= {name: ("gradient_checkpointing", "compile") for name in BUDGETS}


@dataclass
class TrainConfig:
    """Every setting: field name = flag = key of a --config file. Defaults, then the file, then flags."""

    # model
    model_size: str = flag("tiny", "shape of the model", tuple(MODEL_SIZES))
    context_length: int = flag(512, "tokens in a sequence")
    attention_type: str = flag("full", "nsa (native sparse attention) is not in this version", ("full", "nsa"))
    attention_backend: str = flag("auto", "attention kernel: auto, cudnn, flash, flash-attn-4 or cpu")
    loss_impl: str = flag("auto", "auto: chunked above 10 GB of logits", ("auto", "chunked", "standard"))
    kernels: str = flag("auto", "auto: Triton on GPUs, PyTorch references on CPUs", IMPLEMENTATIONS)
    # data
    data: list[str] = flag(list, "files or folders of .txt .md .py .jsonl; default: Python's standard library")
    tokenizer: str | None = flag(
        None, "a tokenizer.json, or bytes; default: init_from's tokenizer.json, without init_from bytes"
    )
    validation_fraction: float = flag(0.02, "share of the tokens held out, whole documents")
    # run
    init_from: str | None = flag(None, "folder of safetensors weights to start from (Qwen3's form)")
    max_steps: int | None = flag(None, f"steps in all; default: {DEFAULT_STEPS} from where the run starts")
    batch_size: int = flag(8, "sequences in a micro-batch of one data-parallel rank")
    gradient_accumulation_steps: int = flag(1, "micro-batches in a step")
    learning_rate: float | None = flag(
        None, f"peak; default: {TINY_PEAK_LEARNING_RATE} for tiny, {PEAK_LEARNING_RATE} else"
    )
    final_learning_rate_ratio: float = flag(0.1, "the cosine ends at this share of the peak")
    warmup_steps: int = flag(20, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "of the matrices")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this global norm")
    seed: int = flag(0, "of the initial weights, the data's order and the sample")
    # what a run leaves
    output_dir: str = flag("runs/default", "checkpoints, metrics.jsonl and the resolved configuration")
    resume: bool = flag(False, "go on from the last checkpoint in output_dir, with its settings; flags change them")
    save: str = flag("full", "a checkpoint holds: full, to resume from; model; or none", ("full", "model", "none"))
    checkpoint_interval: int = flag(0, "steps between checkpoints; 0: only at the end")
    validation_interval: int = flag(100, "steps between validations; 0: only at the end")
    validation_sequences: int = flag(128, "held-out sequences in one validation at most; 0: no validation")
    sample_tokens: int = flag(200, "tokens to generate at the end; 0: none")
    # machine
    device: str = flag("auto", "auto: a GPU if there is one", ("auto", "cuda", "cpu"))
    gradient_checkpointing: bool = flag(False, "no plan: keep each block's input, recompute the rest in backward")
    memory_budget: str | None = flag(
        None, "GPU memory to plan for and not to exceed: 24GB, or auto for what is free; default on a GPU: auto"
    )
    host_budget: str | None = flag(None, "host memory each process may pin; default: its share of 80% of what is free")
    context_parallel_size: int = flag(1, "GPUs that share one sequence; more than 1 is not in this version")
    compile: bool = flag(False, "no plan: torch.compile each block")


def check_config(config: TrainConfig) -> None:
    """Refuse values out of range, and flags that would have no effect.

    Raises:
        UserError: with the value, the limit and what to do.
    """
    minimum = {"context_length": 2, "batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 1,
               "warmup_steps": 0, "checkpoint_interval": 0, "validation_interval": 0, "validation_sequences": 0,
               "sample_tokens": 0, "context_parallel_size": 1, "weight_decay": 0, "seed": 0,
               "final_learning_rate_ratio": 0}  # fmt: skip
    for name, least in minimum.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    for name in ("learning_rate", "max_grad_norm"):
        value = getattr(config, name)
        if value is not None and not (0 < value < math.inf):
            raise UserError(f"{name} must be positive, got {value}")
    refusals = {
        "attention_type nsa: sparse attention is not in this version; use full": config.attention_type == "nsa",
        "context_parallel_size: only 1 is in this version": config.context_parallel_size > 1,
        "init_from has no effect with resume; drop one": config.init_from is not None and config.resume,
        "checkpoint_interval has no effect with save none; drop one or make it 0": config.checkpoint_interval > 0
        and config.save == "none",
        "gradient_checkpointing has no effect with memory_budget, whose plan decides; drop one": config.memory_budget
        is not None
        and config.gradient_checkpointing,
        "compile has no effect on the blocks that memory_budget places; drop one": config.memory_budget is not None
        and config.compile,
        "host_budget has no effect with gradient_checkpointing or compile; drop one": config.host_budget is not None
        and (config.gradient_checkpointing or config.compile),
    }
    for message, refused in refusals.items():
        if refused:
            raise UserError(message)


def choose_model(config: TrainConfig, device: torch.device, resumed: Path | None = None) -> ModelConfig:
    """The model_size's shape, or the one that the weights to start from declare, with the run's own settings.

    Args:
        resumed: the checkpoint to go on from, if there is one; else the weights are those of --init_from.
    """
    shape = dataclasses.replace(MODEL_SIZES[config.model_size], max_position_embeddings=config.context_length)
    if folder := resumed or config.init_from:
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise UserError(f"init_from {folder} has no config.json; give a folder in Hugging Face's form")
        with refused_as_user_error(f"cannot take {path}: "):
            declared = ModelConfig.from_hugging_face(read_json(path))
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if getattr(declared, name) != getattr(shape, name):
                raise UserError(
                    f"{folder} is of another size: it has {name} {getattr(declared, name)}, model_size "
                    f"{config.model_size} has {getattr(shape, name)}; choose the model_size of those weights"
                )
        length = max(declared.max_position_embeddings, config.context_length)
        shape = dataclasses.replace(declared, max_position_embeddings=length)
    with refused_as_user_error():
        backend = choose_backend(config.attention_backend, device)
    return dataclasses.replace(shape, loss_impl=config.loss_impl, attention_backend=backend)


def model_on_meta(model_config: ModelConfig, world: World) -> Transformer:
    """A model without memory: bf16 on one GPU, else float32 (FSDP computes in bf16 from float32 shards)."""
    with torch.device("meta"):
        model = Transformer(model_config)
    if world.size > 1:
        shard_model(model, model.layers, world)
    elif world.device.type == "cuda":
        model.to(torch.bfloat16)
    return model


def build_model(
    config: TrainConfig, model_config: ModelConfig, world: World, documents: PackedDocuments | None = None
) -> tuple[Transformer, Plan]:
    """A model whose weights are yet to be set, and what is planned for it.

    Its blocks keep for backward what the plan for --memory_budget or --gradient_checkpointing says; else all.
    """
    model = model_on_meta(model_config, world)
    plan = plan_memory(config, model, world, documents)
    model.to_empty(device=world.device)
    for block in model.layers if config.compile else ():
        block.forward = torch.compile(block.forward)
    place(model, plan.choices, plan.arena_bytes)
    return model, plan


def step_of(config: TrainConfig, model: Transformer, documents: PackedDocuments | None) -> Step:
    lengths = config.context_length, config.batch_size, config.gradient_accumulation_steps
    return Step(model.config, model.parameters(), *lengths, documents)


def memory_budgets(config: TrainConfig, world: World) -> list[float]:
    """Bytes of --memory_budget and --host_budget, the least of all ranks."""
    host_budget = parse_bytes(config.host_budget) if config.host_budget else available_host_bytes()
    return world.min(gpu_budget(config.memory_budget, world.device), host_budget)


def check_fits(config: TrainConfig, model_config: ModelConfig, world: World) -> None:
    """Refuse, before the data are read, a step for which there is no plan even if all documents are short.

    Raises:
        UserError: no plan fits; names the largest context that would.
    """
    if config.memory_budget is None:
        return
    short = PackedDocuments(longest=1, count=math.inf, pairs=0)
    step, budgets = step_of(config, model_on_meta(model_config, world), short), memory_budgets(config, world)
    if not has_plan(step, *budgets):
        make_plan(step, *budgets)  # says why


def plan_memory(
    config: TrainConfig, model: Transformer, world: World, documents: PackedDocuments | None = None
) -> Plan:
    """The fastest placement within --memory_budget and --host_budget, the same on every rank; the GPU's is enforced.

    Without a budget: checkpointing of every block, or all left to autograd.
    """
    step = step_of(config, model, documents)
    if config.memory_budget is None:
        placement = Placement() if config.gradient_checkpointing else WHOLE
        return Plan(step, Choices((placement,) * step.layers, loss_impl=config.loss_impl))
    budgets = memory_budgets(config, world)
    rates = measure_rates(model.config, world.device, config.context_length)
    rates = Rates(*world.min(*dataclasses.astuple(rates)))
    torch.cuda.empty_cache()  # what the measurements took
    plan = make_plan(step, *budgets, rates)
    plan = dataclasses.replace(plan, choices=world.broadcast(plan.choices))  # where shards differ, plans might
    cap_gpu_memory(int(plan.gpu_budget), world.device)
    logger.info("plan for %s of GPU and %s of host memory:\n%s", *map(gib, budgets), plan)
    return plan


def explain_out_of_memory(config: TrainConfig, plan: Plan, device: torch.device) -> str:
    """What the step was predicted to take, and a plan that should fit; takes no GPU memory."""
    try:
        if config.memory_budget is None:
            budgets = gpu_budget("auto", device), available_host_bytes()
            advice = "--gradient_checkpointing and --compile dropped make such a plan; its seconds are an H200's"
        else:
            budgets = 0.9 * plan.gpu_budget, plan.host_budget
            advice = f"--memory_budget {budgets[0] / 2**30:.1f}GB makes such a plan"
        fitting = f"predicted to fit into {gib(budgets[0])}; {advice}:\n{make_plan(plan.step, *budgets, plan.rates)}"
    except UserError as error:  # names the largest context, or what is free
        fitting = str(error)
    table = format_table(list(plan.step.stages(plan.choices)))
    return f"predicted for the step as it was placed:\n{table}\n{fitting}"


def run_model(model: Transformer, batch: Batch, world: World, denominator: float | None = None) -> torch.Tensor:
    """Summed loss of a micro-batch over `denominator`; None: over its targets."""
    input_ids, labels = (x.to(world.device, non_blocking=True) for x in (batch.input_ids, batch.labels))
    return model(input_ids, labels, document_ids=find_documents(batch.document_ids), denominator=denominator).loss


def train_step(
    model: Transformer,
    optimizer: MasterAdamW,
    batches: list[Batch],
    world: World,
    learning_rate: float,
    max_grad_norm: float,
) -> tuple[float, float]:
    """One optimizer step over all micro-batches of all ranks; (mean loss a token, gradient norm).

    Raises:
        UserError: a loss or gradient that is not finite; the weights are left as they were.
    """
    [num_valid] = world.sum(sum(batch.num_valid_tokens for batch in batches))
    losses = []
    for batch in batches:
        loss = run_model(model, batch, world, max(num_valid, 1))
        loss.backward()
        losses.append(loss.detach())
    norm = optimizer.clip_grad_norm(max_grad_norm)
    [loss] = world.sum(float(torch.stack(losses).sum()))
    if not math.isfinite(loss + norm):
        raise UserError(
            f"loss {loss}, gradient norm {norm}: stopped before the weights were touched; lower --learning_rate, or "
            "look at the data of this step"
        )
    optimizer.step(learning_rate)
    torch.get_device_module(world.device).synchronize()  # whoever reads a clock now has the update in it
    return loss, norm


@torch.no_grad()
def validate(model: Transformer, batches: typing.Iterable[Batch], world: World) -> float:
    """Mean loss a held-out token, over all ranks."""
    total, count = 0.0, 0
    for batch in batches:
        total += float(run_model(model, batch, world, 1.0))
        count += batch.num_valid_tokens
    total, count = world.sum(total, count)
    return total / max(count, 1)


def resolve_memory_budget(config: TrainConfig, device: torch.device) -> str | None:
    """--memory_budget, by default "auto" on a GPU where no other flag says what blocks keep; None: there is no plan.

    Raises:
        UserError: a budget on a CPU.
    """
    if device.type == "cuda":
        if config.gradient_checkpointing or config.compile:
            return None
        if config.kernels == "torch":
            raise UserError(
                "kernels torch takes more memory than plans count; use auto, or --gradient_checkpointing without a plan"
            )
        return config.memory_budget or "auto"
    for name in ("memory_budget", "host_budget"):
        if getattr(config, name) is not None:
            raise UserError(f"{name} has no effect on a CPU; drop it")
    return None


def configure_machine(config: TrainConfig, world: World) -> None:
    """Which kernels run; and whether the memory asked for is there, before anything else takes time."""
    if config.kernels == "triton" and world.device.type != "cuda":
        raise UserError('kernels "triton" needs a CUDA GPU; use auto')
    set_default_implementation(config.kernels)
    if config.memory_budget is not None:
        gpu_budget(config.memory_budget, world.device)


@dataclass
class Start:
    """Where a run starts: at nothing, or at a checkpoint."""

    checkpoint: Path | None = None
    step: int = 0
    tokens: int = 0
    cosine_steps: int = 0  # from the first step to the end of the learning rate's cosine
    tokenizer: str | None = None  # its identity; older checkpoints do not say it
    loader: dict = dataclasses.field(default_factory=dict)  # the position in the data


def find_start(given: dict, world: World) -> tuple[TrainConfig, Start]:
    """The settings of a fresh run, or those of the last checkpoint in output_dir changed by the given ones.

    Nothing larger than the checkpoint's trainer.json is read yet. Without --max_steps a run that was stopped keeps the
    number it had, and a finished one gets DEFAULT_STEPS more at its last learning rate.
    """
    config = TrainConfig(**given)
    last = latest_checkpoint(Path(config.output_dir))
    if not config.resume:
        if last is not None:
            raise UserError(f"{last} is already there: --resume goes on from it, another --output_dir starts afresh")
        config = with_defaults(config)
        return config, Start(cosine_steps=config.max_steps)
    if last is None:
        raise UserError(f"--resume: no checkpoint in {config.output_dir}; drop --resume to start a run")
    if not (last / "optimizer").is_dir():
        raise UserError(f"{last} was saved without optimizer state; use --init_from {last} and another --output_dir")
    state = load_trainer_state(last)
    step, steps_before = state["step"], state["max_steps"]
    saved = {**saved_settings(last, state), "max_steps": steps_before}
    before = with_defaults(TrainConfig(**saved))
    config = with_defaults(inherit_settings(saved, given, world.device))
    if "max_steps" not in given and steps_before <= step:
        config = dataclasses.replace(config, max_steps=step + DEFAULT_STEPS)
    if config.max_steps <= step:
        raise UserError(f"{last} is at step {step}, max_steps is {config.max_steps}; raise max_steps to go on")
    check_config(config)
    check_same_data(state["loader"], {"context_length": config.context_length, "seed": config.seed})
    log_changes(before, config, state, world)
    cosine_before = state.get("cosine_steps", steps_before)
    cosine_steps = given.get("max_steps", cosine_before)
    rates = learning_rate_of(step, before, cosine_before), learning_rate_of(step + 1, config, cosine_steps)
    if step >= cosine_steps:
        logger.info("learning rate: held at %.3g, where its cosine ended; --max_steps stretches it", rates[1])
    elif rates[1] != learning_rate_of(step + 1, before, cosine_before):
        logger.info("learning rate: %.3g in step %d -> %.3g in step %d", rates[0], step, rates[1], step + 1)
    return config, Start(last, step, state["tokens"], cosine_steps, state.get("tokenizer"), state["loader"])


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The settings, with max_steps and learning_rate filled in where they were not given."""
    default_rate = TINY_PEAK_LEARNING_RATE if config.model_size == "tiny" else PEAK_LEARNING_RATE
    return dataclasses.replace(
        config, max_steps=config.max_steps or DEFAULT_STEPS, learning_rate=config.learning_rate or default_rate
    )


def saved_settings(last: Path, state: dict) -> dict:
    """The settings that the run of a checkpoint had, those that this version knows.

    Checkpoints of older versions do not hold them; output_dir/config.json does.
    """
    file = last.parent / "config.json"
    saved = state.get("settings") or (read_json(file) if file.is_file() else {})
    if not saved:
        logger.info("%s does not say its settings: what is not given now has its default", last)
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    if unknown := sorted(saved.keys() - known):
        logger.info("settings of another version, ignored: %s", ", ".join(unknown))
    return {name: value for name, value in saved.items() if name in known}


def inherit_settings(saved: dict, given: dict, device: torch.device) -> TrainConfig:
    """The settings of a resumed run: its own, changed by the given ones and rid of what those contradict."""
    dropped = {*NOT_INHERITED, *(BUDGETS if device.type == "cpu" else ())}
    dropped.update(*(REPLACED.get(name, ()) for name, value in given.items() if value))
    return TrainConfig(**{**{name: value for name, value in saved.items() if name not in dropped}, **given})


def log_changes(before: TrainConfig, config: TrainConfig, state: dict, world: World) -> None:
    """A line for each setting of a resumed run that is not what it was."""
    for name, value in dataclasses.asdict(config).items():
        if name not in NOT_INHERITED and value != getattr(before, name):
            logger.info("%s: %s -> %s", name, getattr(before, name), value)
    tokens, ranks = state.get("tokens_per_step"), state.get("ranks")
    if tokens not in (None, tokens_per_step(config, world)):
        because = f" ({ranks} -> {world.size} ranks)" if ranks != world.size else ""
        logger.info("tokens a step: %s -> %s%s", f"{tokens:,}", f"{tokens_per_step(config, world):,}", because)


def tokens_per_step(config: TrainConfig, world: World) -> int:
    """Of all ranks and micro-batches."""
    return config.context_length * config.batch_size * config.gradient_accumulation_steps * world.size


def learning_rate_of(step: int, config: TrainConfig, cosine_steps: int) -> float:
    """The rate of a step, counted from 1; after `cosine_steps` the last one of the cosine."""
    return warmup_cosine(
        step - 1, learning_rate=config.learning_rate, warmup_steps=config.warmup_steps, max_steps=cosine_steps,
        final_ratio=config.final_learning_rate_ratio,
    )  # fmt: skip


def choose_tokenizer(config: TrainConfig, model_config: ModelConfig) -> str:
    """--tokenizer; else what the weights of --init_from were trained with; else bytes."""
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer or "bytes"
    file, ours = Path(config.init_from) / "tokenizer.json", Path(config.init_from) / "trainer.json"
    if file.is_file():
        return str(file)
    if ours.is_file():  # a checkpoint; older ones do not say their tokenizer
        trained_with = load_trainer_state(config.init_from).get("tokenizer")
        if trained_with == "bytes" or (trained_with is None and model_config.vocab_size == 256):
            return "bytes"
    raise UserError(
        f"init_from {config.init_from} has no tokenizer.json: give --tokenizer FILE, the one that its weights were "
        "trained with, or --tokenizer bytes"
    )


def open_tokenizer(config: TrainConfig, start: Start):
    """The tokenizer of the run, which a resumed run must have been trained with.

    Raises:
        UserError: the file is missing or invalid, or its content is not what the checkpoint's run had.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if start.tokenizer not in (None, tokenizer.identity):
        raise UserError(
            f"cannot resume: {start.checkpoint} was trained with tokenizer {start.tokenizer[:12]}, {tokenizer.name} is "
            f"{tokenizer.identity[:12]} (first digits of the files' SHA-256); give that --tokenizer"
        )
    return tokenizer


def load_data(config: TrainConfig, tokenizer, vocab_size: int, world: World):
    """(loader of training batches, held-out documents)."""
    documents = load_documents(config.data or None, tokenizer, vocab_size)
    documents, held_out = split_documents(documents, config.validation_fraction, config.seed)
    loader = PackedLoader(
        documents, config.context_length, config.batch_size, tokenizer.eos_id, config.seed, world.rank, world.size
    )
    loader.check_enough_for_step(config.gradient_accumulation_steps)
    return loader, held_out


def check_weights(weights: str | Path, model_config: ModelConfig) -> None:
    """Refuse weights of other names or shapes than the model's, by what the files' headers say."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(model_config).named_parameters()}
    load_model_weights(weights, shapes)  # reads nothing large before the first weight is asked for


def build(
    config: TrainConfig, model_config: ModelConfig, start: Start, documents: PackedDocuments, world: World
) -> tuple[Transformer, MasterAdamW, Plan]:
    """Model and optimizer, with fresh weights, those of --init_from, or the whole state of a checkpoint."""
    model, plan = build_model(config, model_config, world, documents)
    optimizer = MasterAdamW(
        model.named_parameters(),
        weight_decay=config.weight_decay,
        accumulate=config.gradient_accumulation_steps > 1,
        gpu_state_bytes=plan.choices.gpu_state_bytes,
    )
    if start.checkpoint:
        load_optimizer_state(start.checkpoint, optimizer.state_dict())
        optimizer.restore_parameters()
        restore_rng(start.checkpoint)
    elif config.init_from:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        optimizer.load_weights(load_model_weights(config.init_from, shapes))
    else:
        optimizer.load_weights(initial_weights(model, config.seed))
    return model, optimizer, plan


def warn_of_short_shutdown(step_seconds: float) -> None:
    """Under torchrun, say that a step takes longer than the time from its SIGTERM to its SIGKILL.

    A worker sees that time where the environment sets it, and does not see the flag --shutdown-timeout.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    from torch.distributed.launcher.api import LaunchConfig

    can_be_set, timeout = hasattr(LaunchConfig, "shutdown_timeout"), SHUTDOWN_SECONDS
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT") if can_be_set else ():
        timeout = int(os.environ.get(name, timeout))
    if step_seconds < timeout - 5:
        return
    enough = round(2 * step_seconds) + 120  # a step, its validation and a checkpoint
    logger.warning(
        "SIGTERM saves at the end of a step, %.0f s at most; torchrun kills after %d s%s", step_seconds, timeout,
        f": start it with --shutdown-timeout {enough}, unless you did" if can_be_set
        else f", and that of torch {torch.__version__} has no --shutdown-timeout: a newer torch has",
    )  # fmt: skip


def train(given: dict, world: World) -> None:
    """A run, from the checks to the final checkpoint and a sample.

    Args:
        given: settings by field of TrainConfig, as flags and --config name them.
    """
    # What can be refused in seconds comes before the data, which may take minutes to tokenise.
    config, start = find_start(given, world)
    model_config = choose_model(config, world.device, start.checkpoint)
    config = dataclasses.replace(config, tokenizer=choose_tokenizer(config, model_config))
    settings = dataclasses.asdict(config)  # for the checkpoints: a budget of "auto" is chosen anew where one resumes
    config = dataclasses.replace(config, memory_budget=resolve_memory_budget(config, world.device))
    configure_machine(config, world)
    tokenizer = open_tokenizer(config, start)
    if start.checkpoint or config.init_from:
        check_weights(start.checkpoint or config.init_from, model_config)
    check_fits(config, model_config, world)

    loader, held_out = load_data(config, tokenizer, model_config.vocab_size, world)
    if start.checkpoint:
        loader.load_state_dict(start.loader)
        verify_checkpoint(start.checkpoint)  # reads every byte of it
    documents = PackedDocuments.average(
        *loader.document_lengths(), loader.longest_document, config.batch_size, world.size
    )
    model, optimizer, plan = build(config, model_config, start, documents, world)

    output_dir = Path(config.output_dir)
    if world.is_main:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
            metrics = MetricsFile(output_dir / "metrics.jsonl", start.step)
        except OSError as error:
            raise UserError(f"output_dir {output_dir} cannot be written to: {error}; choose another") from None
    step_tokens, tokens, max_steps = tokens_per_step(config, world), start.tokens, config.max_steps
    logger.info("config: %s", json.dumps(dataclasses.asdict(config)))
    logger.info(
        "model: %s, %s parameters; attention kernel: %s; device: %s x %d",
        config.model_size, f"{model_config.num_parameters():,}", model_config.attention_backend,
        world.device.type, world.size,
    )  # fmt: skip
    logger.info(
        "data: %s training tokens, %s held out; %s tokens a step",
        f"{loader.num_tokens:,}", f"{sum(len(d.tokens) for d in held_out):,}", f"{step_tokens:,}",
    )  # fmt: skip

    terminated = []
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    gpu_flops = peak_flops(world.device)
    progress = tqdm(total=max_steps, initial=start.step, unit="step", disable=not world.is_main)
    for step in range(start.step + 1, max_steps + 1):
        began = time.perf_counter()
        batches = [loader.next_batch() for _ in range(config.gradient_accumulation_steps)]
        rate = learning_rate_of(step, config, start.cosine_steps)
        try:
            loss, norm = train_step(model, optimizer, batches, world, rate, config.max_grad_norm)
        except torch.OutOfMemoryError as error:
            progress.close()  # which ends its line
            error.add_note(explain_out_of_memory(config, plan, world.device))
            raise
        seconds = time.perf_counter() - began
        tokens += step_tokens
        values = {
            "step": step, "loss": loss, "gradient_norm": norm, "learning_rate": rate, "seconds": seconds,
            "tokens": tokens, "tokens_per_second": step_tokens / seconds, "epoch": loader.epoch,
        }  # fmt: skip
        if world.device.type == "cuda":
            values["peak_memory_gib"] = peak_memory_gib(world)
        if gpu_flops is not None:
            documents = [find_documents(batch.document_ids) for batch in batches]
            flops = 3 * sum(model_config.forward_flops(d.lengths) for d in documents)
            values["mfu"] = flops / seconds / gpu_flops
        is_last, stop = step == max_steps, world.sum(float(bool(terminated)))[0] > 0
        if config.validation_sequences and (is_last or is_due(step, config.validation_interval)):
            held_out_batches = validation_batches(
                held_out, config.context_length, config.batch_size, tokenizer.eos_id, world.rank, world.size,
                limit=config.validation_sequences,
            )  # fmt: skip
            values["validation_loss"] = validate(model, held_out_batches, world)
        if world.is_main:
            metrics.write(**values)
            if step == start.step + 2:  # the first takes longer
                warn_of_short_shutdown(seconds)
            show(progress, values, "byte" if config.tokenizer == "bytes" else "token")
        if config.save != "none" and (is_last or stop or is_due(step, config.checkpoint_interval)):
            path = save_checkpoint(
                output_dir, step,
                model_state=model.state_dict(), model_config=model_config.to_hugging_face(),
                optimizer_state=optimizer.state_dict() if config.save == "full" else None,
                trainer_state={
                    "tokens": tokens, "max_steps": max_steps, "cosine_steps": start.cosine_steps,
                    "tokens_per_step": step_tokens, "ranks": world.size, "settings": settings,
                    "tokenizer": tokenizer.identity, "loader": loader.state_dict(),
                },
            )  # fmt: skip
            logger.info("checkpoint: %s", path)
        if stop:
            logger.info("SIGTERM: stopped after step %d", step)
            break
    progress.close()
    signal.signal(signal.SIGTERM, before)
    if config.sample_tokens and not terminated:
        log_sample(model, tokenizer, held_out[0].tokens[:PROMPT_TOKENS].astype("int64"), config, world)


def is_due(step: int, interval: int) -> bool:
    """Whether something done every `interval` steps (0: never) falls on this one."""
    return interval > 0 and step % interval == 0


def show(progress: tqdm, values: dict, unit: str) -> None:
    """One step on the progress bar, and a line for a validation."""
    shown = {"loss": f"{values['loss']:.3f}", "tokens/s": f"{values['tokens_per_second']:,.0f}"}
    if "mfu" in values:
        shown["mfu"] = f"{values['mfu']:.1%}"
    if "peak_memory_gib" in values:
        shown["GiB"] = max(values["peak_memory_gib"])
    progress.set_postfix(shown)
    progress.update()
    if "validation_loss" in values:
        progress.write(f"step {values['step']}: validation loss {values['validation_loss']:.4f} nats per {unit}")


def log_sample(model: Transformer, tokenizer, prompt, config: TrainConfig, world: World) -> None:
    """What the model writes after a held-out prompt, an int64 array; every rank of a sharded model takes part."""
    generator = torch.Generator(world.device).manual_seed(config.seed)
    ids = torch.from_numpy(prompt).to(world.device)[None]
    ids = model.generate(ids, config.sample_tokens, temperature=0.8, generator=generator)[0].tolist()
    before, after = tokenizer.decode(ids[: len(prompt)]), tokenizer.decode(ids[len(prompt) :])
    logger.info("sample, after a held-out prompt:\n%s<<<the prompt ends here>>>%s", before, after)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        given = given_settings(TrainConfig, argv, description=__doc__.splitlines()[0])
        config = TrainConfig(**given)
        check_config(config)
        with join_world(config.device) as world:
            if not world.is_main:
                logging.disable(logging.INFO)
            train(given, world)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
