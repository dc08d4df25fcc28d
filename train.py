"""Train a decoder: `python train.py`, or `torchrun --nproc_per_node=N train.py` on N GPUs.

This file reads from top to bottom: what is refused; where a run starts, and what a resumed run inherits; tokenizer and
data; validation; the run; what is shown. training/run.py builds the model and makes a step, training/config.py has the
settings.
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
from pathlib import Path

import torch
from tqdm import tqdm

from model import NSA_GATES, ModelConfig, Transformer
from training.checkpoint.files import latest_checkpoint, load_trainer_state, save_checkpoint, verify_checkpoint
from training.checkpoint.weights import load_model_weights, read_json
from training.config import DEFAULT_STEPS, PEAK_LEARNING_RATE, TINY_PEAK_LEARNING_RATE, TrainConfig, given_settings
from training.data.loader import Batch, PackedLoader, check_same_data, validation_batches
from training.data.packing import ConcatenatedPacking
from training.data.sources import load_documents, split_documents
from training.data.tokenizer import load_tokenizer
from training.data.tokens import TokenStore
from training.errors import UserError, message_of
from training.memory.cost_model import PackedDocuments
from training.memory.placement import set_sparsity
from training.metrics import MetricsFile, peak_flops, peak_memory_gib
from training.optimizer import warmup_cosine
from training.parallel.tensor import check_matrix_sharing
from training.parallel.ulysses import check_sharing
from training.parallel.world import World, join_world
from training.run import (
    Start,
    build,
    check_fits,
    choose_model,
    configure_machine,
    explain_out_of_memory,
    resolve_memory_budget,
    run_model,
    sparsity_at,
    train_step,
)
from training.sparsity import spell_by_layer

logger = logging.getLogger("train")
PROMPT_TOKENS = 64
SHUTDOWN_SECONDS = 30  # from torchrun's SIGTERM to its SIGKILL, unless it is told otherwise
# A resumed run takes these from its flags alone, all other settings from the run that it continues.
NOT_INHERITED = ("resume", "init_from", "output_dir", "device")
BUDGETS = ("memory_budget", "host_budget")
# A flag given with --resume drops the earlier run's settings that it would contradict.
REPLACED = {name: BUDGETS for name in ("gradient_checkpointing", "compile")}
REPLACED |= {name: ("gradient_checkpointing", "compile") for name in BUDGETS}


def check_config(config: TrainConfig) -> None:
    """Refuse values out of range, and flags that would have no effect.

    Raises:
        UserError: with the value, the limit and what to do.
    """
    minimum = {"context_length": 2, "batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 1,
               "warmup_steps": 0, "checkpoint_interval": 0, "validation_interval": 0, "validation_sequences": 0,
               "sample_tokens": 0, "context_parallel_size": 1, "tensor_parallel_size": 1, "weight_decay": 0, "seed": 0,
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
        "init_from has no effect with resume; drop one": config.init_from is not None and config.resume,
        "checkpoint_interval has no effect with save none; drop one or make it 0": config.checkpoint_interval > 0
        and config.save == "none",
        "gradient_checkpointing has no effect with memory_budget, whose plan decides; drop one": config.memory_budget
        is not None
        and config.gradient_checkpointing,
        "compile has no effect on the blocks that memory_budget places; drop one": config.memory_budget is not None
        and config.compile,
        "selected_blocks_start with compile would compile blocks anew eight times, past PyTorch's limit; drop one": (
            config.selected_blocks_start is not None and config.compile
        ),
        "host_budget has no effect with gradient_checkpointing or compile; drop one": config.host_budget is not None
        and (config.gradient_checkpointing or config.compile),
    }
    for message, refused in refusals.items():
        if refused:
            raise UserError(message)
    sparsity_at(config, step=1)


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


def parallel_sizes_of(given: dict) -> dict[str, int]:
    """Those that are given, else those of the run to resume: the ranks' mesh is made before all other settings."""
    config = TrainConfig(**given)
    last = latest_checkpoint(Path(config.output_dir)) if config.resume else None
    saved = {} if last is None else load_trainer_state(last).get("settings") or {}
    names = "context_parallel_size", "tensor_parallel_size"
    return {name: {**saved, **given}.get(name, getattr(config, name)) for name in names}


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
        because = f" ({ranks} -> {world.data_size} ranks)" if ranks != world.data_size else ""
        logger.info("tokens a step: %s -> %s%s", f"{tokens:,}", f"{tokens_per_step(config, world):,}", because)


def tokens_per_step(config: TrainConfig, world: World) -> int:
    """Tokens of one optimizer step, over all data-parallel ranks and micro-batches."""
    return config.context_length * config.batch_size * config.gradient_accumulation_steps * world.data_size


def learning_rate_of(step: int, config: TrainConfig, cosine_steps: int) -> float:
    """The learning rate of a step. Steps count from 1; those after `cosine_steps` have the cosine's last rate."""
    return warmup_cosine(
        step - 1, learning_rate=config.learning_rate, warmup_steps=config.warmup_steps, max_steps=cosine_steps,
        final_ratio=config.final_learning_rate_ratio,
    )  # fmt: skip


def choose_tokenizer(config: TrainConfig, model_config: ModelConfig) -> str:
    """The tokenizer to open: --tokenizer's, else what the weights of --init_from were trained with, else bytes."""
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer or "bytes"
    file, ours = Path(config.init_from) / "tokenizer.json", Path(config.init_from) / "trainer.json"
    if file.is_file():
        return str(file)
    if ours.is_file():  # a checkpoint of Fathom; older checkpoints do not name their tokenizer
        trained_with = load_trainer_state(config.init_from).get("tokenizer")
        if trained_with == "bytes" or (trained_with is None and model_config.vocab_size == 256):
            return "bytes"
    raise UserError(
        f"init_from {config.init_from} has no tokenizer.json: give --tokenizer FILE, the one that its weights were "
        "trained with, or --tokenizer bytes"
    )


def open_tokenizer(config: TrainConfig, start: Start):
    """Open the tokenizer of the run. A resumed run must have the one that it was trained with.

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
    """Returns (loader of training batches, store of the held-out documents)."""
    documents = load_documents(config.data or None, tokenizer, vocab_size)
    shares = split_documents(documents, config.validation_fraction, config.seed)
    store, held_out = (TokenStore(share, tokenizer.eos_id) for share in shares)
    packing = ConcatenatedPacking(store.lengths, config.context_length, config.seed)
    loader = PackedLoader(store, packing, config.batch_size, world.data_rank, world.data_size)
    loader.check_enough_for_step(config.gradient_accumulation_steps)
    return loader, held_out


def check_weights(weights: str | Path, model_config: ModelConfig) -> None:
    """Refuse weights whose names or shapes, as the files' headers say, are not the model's."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(model_config).named_parameters()}
    load_model_weights(weights, shapes, may_lack=NSA_GATES)  # reads nothing large before the first weight is asked for


@torch.no_grad()
def validate(model: Transformer, batches: typing.Iterable[Batch], world: World) -> float:
    """Mean loss per held-out token, over all ranks."""
    total, count = 0.0, 0
    for batch in batches:
        batch = batch.slice(world.context_rank, world.context_size)
        total += float(run_model(model, batch, world, 1.0))
        count += batch.num_valid_tokens
    total, count = world.sum(total, count)
    return total / max(count, 1)


def warn_of_short_shutdown(step_seconds: float) -> None:
    """Under torchrun, warn where a step takes longer than the time from torchrun's SIGTERM to its SIGKILL.

    A worker reads that time from its environment; torchrun's flag --shutdown-timeout is not shown to workers.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    from torch.distributed.launcher.api import LaunchConfig

    can_be_set, timeout = hasattr(LaunchConfig, "shutdown_timeout"), SHUTDOWN_SECONDS
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT") if can_be_set else ():
        timeout = int(os.environ.get(name, timeout))
    if step_seconds < timeout - 5:
        return
    enough = round(2 * step_seconds) + 120  # seconds for a step, its validation and a checkpoint
    logger.warning(
        "SIGTERM saves at the end of a step, %.0f s at most; torchrun kills after %d s%s", step_seconds, timeout,
        f": start it with --shutdown-timeout {enough}, unless you did" if can_be_set
        else f", and that of torch {torch.__version__} has no --shutdown-timeout: a newer torch has",
    )  # fmt: skip


def train(given: dict, world: World) -> None:
    """A run, from the checks to the final checkpoint and a sample.

    Args:
        given: the settings that flags and --config give, by the names of TrainConfig's fields.
    """
    # What can be refused in seconds comes before the data, which may take minutes to tokenise.
    config, start = find_start(given, world)
    model_config = choose_model(config, start.checkpoint)
    check_matrix_sharing(world.tensor_size, model_config)
    check_sharing(world.context_size, model_config, config.attention_type != "full", world.tensor_size)
    config = dataclasses.replace(config, tokenizer=choose_tokenizer(config, model_config))
    settings = dataclasses.asdict(config)  # goes into checkpoints; a budget of "auto" is resolved where a run resumes
    config = dataclasses.replace(config, memory_budget=resolve_memory_budget(config, world.device))
    configure_machine(config, world)
    tokenizer = open_tokenizer(config, start)
    if start.checkpoint or config.init_from:
        check_weights(start.checkpoint or config.init_from, model_config)
    check_fits(config, model_config, world)

    loader, held_out = load_data(config, tokenizer, model_config.vocab_size, world)
    if start.checkpoint:
        loader.load_state_dict(start.loader)
        verify_checkpoint(start.checkpoint)  # reads every byte of the checkpoint
    documents = PackedDocuments.average(
        *loader.document_lengths(), loader.longest_document,
        config.batch_size, world.data_size, config.gradient_accumulation_steps,
    )  # fmt: skip
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
        "model: %s, %s parameters; attention: %s, kernel: %s; device: %s x %d (data x context x tensor: %d x %d x %d)",
        config.model_size, f"{model_config.num_parameters():,}", config.attention_type,
        plan.execution.attention_backend, world.device.type, world.size,
        world.data_size, world.context_size, world.tensor_size,
    )  # fmt: skip
    logger.info(
        "data: %s training tokens, %s held out; %s tokens a step",
        f"{loader.num_tokens:,}", f"{(held_out.lengths - 1).sum():,}", f"{step_tokens:,}",
    )  # fmt: skip

    terminated = []
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    gpu_flops = peak_flops(world.device)
    progress = tqdm(total=max_steps, initial=start.step, unit="step", disable=not world.is_main)
    for step in range(start.step + 1, max_steps + 1):
        began = time.perf_counter()
        batches = loader.next_step(config.gradient_accumulation_steps)
        rate = learning_rate_of(step, config, start.cosine_steps)
        sparsity = sparsity_at(config, step)
        set_sparsity(model, sparsity)
        try:
            loss, norm = train_step(model, optimizer, batches, world, rate, config.max_grad_norm)
        except torch.OutOfMemoryError as error:
            progress.close()  # ends the progress bar's line
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
            forward = sum(model_config.forward_flops(batch.documents.lengths, sparsity) for batch in batches)
            flops = 3 * world.sum(forward)[0] / world.size  # of a rank, on average
            values["mfu"] = flops / (world.context_size * world.tensor_size) / seconds / gpu_flops
        if config.selected_blocks_start is not None:
            values["selected_blocks"] = spell_by_layer([of_layer.selected_blocks for of_layer in sparsity])
        is_last, stop = step == max_steps, world.sum(float(bool(terminated)))[0] > 0
        if config.validation_sequences and (is_last or is_due(step, config.validation_interval)):
            held_out_batches = validation_batches(
                held_out, config.context_length, config.batch_size, world.data_rank, world.data_size,
                limit=config.validation_sequences,
            )  # fmt: skip
            values["validation_loss"] = validate(model, held_out_batches, world)
        if world.is_main:
            metrics.write(**values)
            if step == start.step + 2:  # the first step of a run compiles kernels
                warn_of_short_shutdown(seconds)
            show(progress, values, "byte" if config.tokenizer == "bytes" else "token")
        if config.save != "none" and (is_last or stop or is_due(step, config.checkpoint_interval)):
            path = save_checkpoint(
                output_dir, step,
                model_state=model.state_dict(), model_config=model_config.to_hugging_face(),
                optimizer_state=optimizer.state_dict() if config.save == "full" else None,
                trainer_state={
                    "tokens": tokens, "max_steps": max_steps, "cosine_steps": start.cosine_steps,
                    "tokens_per_step": step_tokens, "ranks": world.data_size, "settings": settings,
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
        prompt = held_out.read(0, 0, min(PROMPT_TOKENS, int(held_out.lengths[0]) - 1))  # without the document's end
        log_sample(model, tokenizer, prompt, config, world)


def is_due(step: int, interval: int) -> bool:
    """Whether something done every `interval` steps (0: never) falls on this one."""
    return interval > 0 and step % interval == 0


def show(progress: tqdm, values: dict, unit: str) -> None:
    """Show a step on the progress bar, and its validation on a line."""
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
    """Log what the model writes after `prompt`, held-out ids (int64). All ranks of a sharded model must call this."""
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
        with join_world(config.device, **parallel_sizes_of(given)) as world:
            if not world.is_main:
                logging.disable(logging.INFO)
            train(given, world)
    except (UserError, torch.OutOfMemoryError) as error:
        print(message_of(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
