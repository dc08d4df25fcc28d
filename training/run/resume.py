"""Where a run starts: at its first step, or at its newest checkpoint, whose settings it inherits."""

import dataclasses
import logging
import typing
from pathlib import Path

import torch

from training.checkpoint.files import checkpoints, latest_checkpoint, load_trainer_state
from training.checkpoint.manifest import OPTIMIZER
from training.data.loader import check_same_data
from training.host.errors import UserError
from training.optimizer import warmup_cosine
from training.parallel.world import World
from training.run.build import Start
from training.run.settings import (
    DEFAULT_STEPS,
    LARGE,
    PEAK_LEARNING_RATE,
    TINY_PEAK_LEARNING_RATE,
    TrainConfig,
    check_config,
    has_type,
)

logger = logging.getLogger(__name__)
# A resumed run takes these from its flags alone, all other settings from the run that it continues.
NOT_INHERITED = ("resume", "init_from", "rope_scaling", "output_dir", "device", "show_batch")
BUDGETS = ("memory_budget", "host_budget")
# A flag given with --resume drops the earlier run's settings that it would contradict.
REPLACED = {name: BUDGETS for name in ("gradient_checkpointing", "compile")}
REPLACED |= {name: ("gradient_checkpointing", "compile") for name in BUDGETS}


def find_start(given: dict, world: World, passed_over: dict[Path, str]) -> tuple[TrainConfig, Start, list[str]]:
    """The settings of a fresh run, or those of the newest checkpoint in output_dir changed by the given ones.

    Also a line for each change, to be logged once the checkpoint is known to be undamaged.

    Nothing larger than the checkpoint's trainer.json is read yet. Without --max_steps a run that was stopped keeps the
    number it had, and a finished one gets DEFAULT_STEPS more at its last learning rate; with --resume auto none.

    Args:
        passed_over: checkpoints that are not to be taken, and why; gets those that can be seen to be damaged.
    """
    config = TrainConfig(**given)
    found = checkpoints(Path(config.output_dir))
    if config.resume == "no" and found:
        raise UserError(f"{found[-1]} is already there: --resume goes on from it, another --output_dir starts afresh")
    last = latest_checkpoint(Path(config.output_dir), passed_over)
    if last is None and found:
        raise UserError(f"no checkpoint in {config.output_dir} can be used; of the newest: {passed_over[found[-1]]}")
    if last is None and config.resume == "yes":
        raise UserError(
            f"--resume: no checkpoint in {config.output_dir}; make it --resume auto to start a run all the same"
        )
    if last is None:
        config = with_defaults(config)
        if config.init_from is None:
            config = dataclasses.replace(config, model_size=config.model_size or "tiny")
        assert config.max_steps is not None, "with_defaults fills it in"
        return config, Start(cosine_steps=config.max_steps), []
    if not (last / OPTIMIZER).is_file():
        raise UserError(f"{last} was saved without optimizer state; use --init_from {last} and another --output_dir")
    state = load_state(last)
    step, steps_before, cosine_before = state["step"], state["max_steps"], state["cosine_steps"]
    saved = {**known_settings(state["settings"]), "max_steps": steps_before}
    before = with_defaults(TrainConfig(**saved))
    config = with_defaults(inherit_settings(saved, given, world.device))
    if "max_steps" not in given and steps_before <= step and config.resume == "yes":
        config = dataclasses.replace(config, max_steps=step + DEFAULT_STEPS)
    if config.max_steps <= step and config.resume == "yes":
        raise UserError(f"{last} is at step {step}, max_steps is {config.max_steps}; raise max_steps to go on")
    check_config(config)
    check_same_data(state["loader"], {"context_length": config.context_length, "seed": config.seed})
    changes = spell_changes(before, config, state, world)
    cosine_steps = given.get("max_steps", cosine_before)
    rates = learning_rate_of(step, before, cosine_before), learning_rate_of(step + 1, config, cosine_steps)
    if step >= cosine_steps:
        changes.append(f"learning rate: held at {rates[1]:.3g}, where its cosine ended; --max_steps stretches it")
    elif rates[1] != learning_rate_of(step + 1, before, cosine_before):
        changes.append(f"learning rate: {rates[0]:.3g} in step {step} -> {rates[1]:.3g} in step {step + 1}")
    start = Start(
        last, step, state["tokens"], cosine_steps, state["tokenizer"], state["validation_loss"], state["loader"],
        state["skipped"],
    )  # fmt: skip
    return config, start, changes


# What a checkpoint's trainer.json holds, as Run.save puts it there.
STATE = {
    "step": int, "tokens": int, "max_steps": int, "cosine_steps": int, "tokens_per_step": int, "ranks": int,
    "settings": dict, "tokenizer": str, "validation_loss": float | None, "loader": dict, "skipped": int,
}  # fmt: skip


def load_state(checkpoint: Path) -> dict:
    """The trainer_state of a checkpoint. Raises UserError where somebody has edited it to what no run has saved."""
    state = {"skipped": 0, **load_trainer_state(checkpoint)}  # checkpoints of before 2026-11-23 do not count them
    wrong = [name for name, kind in STATE.items() if name not in state or not has_type(state[name], kind)]
    if not wrong:
        kinds, settings = typing.get_type_hints(TrainConfig), state["settings"]
        choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(TrainConfig)}
        wrong = [
            name for name, value in settings.items()
            if name in kinds and not (has_type(value, kinds[name]) and value in (None, *(choices[name] or [value])))
        ]  # fmt: skip
        wrong += [] if type(state["loader"].get("next_sequence")) is int else ["next_sequence"]
        wrong += [name for name in ("step", "max_steps", "cosine_steps") if not 0 < state[name] <= LARGE]
    if wrong:
        raise UserError(
            f"{checkpoint}/trainer.json is damaged: {wrong[0]} is missing or has a wrong value; move that checkpoint "
            "elsewhere, or start from its weights with --init_from and another --output_dir"
        )
    return state


def parallel_sizes_of(given: dict) -> dict[str, int]:
    """Those that are given, else those of the run to resume: the ranks' mesh is made before all other settings."""
    config = TrainConfig(**given)
    last = latest_checkpoint(Path(config.output_dir), {}) if config.resume != "no" else None
    saved = {} if last is None else load_state(last)["settings"]
    names = "context_parallel_size", "tensor_parallel_size"
    return {name: {**saved, **given}.get(name, getattr(config, name)) for name in names}


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The settings, with max_steps and learning_rate filled in where they were not given."""
    is_tiny = config.model_size == "tiny" or (config.model_size is None and config.init_from is None)
    default_rate = TINY_PEAK_LEARNING_RATE if is_tiny else PEAK_LEARNING_RATE
    return dataclasses.replace(
        config, max_steps=config.max_steps or DEFAULT_STEPS, learning_rate=config.learning_rate or default_rate
    )


def known_settings(saved: dict) -> dict:
    """Of the settings that a checkpoint's run had, those that this version knows."""
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    if unknown := sorted(saved.keys() - known):
        logger.info("settings of another version, ignored: %s", ", ".join(unknown))
    return {name: value for name, value in saved.items() if name in known}


def inherit_settings(saved: dict, given: dict, device: torch.device) -> TrainConfig:
    """The settings of a resumed run: its own, changed by the given ones and rid of what those contradict."""
    dropped = {*NOT_INHERITED, *(BUDGETS if device.type == "cpu" else ())}
    dropped.update(*(REPLACED.get(name, ()) for name, value in given.items() if value))
    if given.get("save") == "none":
        dropped |= {"checkpoint_interval", "keep_checkpoints"}
    if given.get("attention_type", saved.get("attention_type")) != saved.get("attention_type"):
        dropped |= {"selected_blocks", "selected_blocks_start", "selected_blocks_steps", "dense_below"}
    return TrainConfig(**{**{name: value for name, value in saved.items() if name not in dropped}, **given})


def spell_changes(before: TrainConfig, config: TrainConfig, state: dict, world: World) -> list[str]:
    """A line for each setting of a resumed run that is not what it was."""
    lines = [
        f"{name}: {getattr(before, name)} -> {value}"
        for name, value in dataclasses.asdict(config).items()
        if name not in NOT_INHERITED and value != getattr(before, name)
    ]
    tokens, ranks = state["tokens_per_step"], state["ranks"]
    if tokens != tokens_per_step(config, world):
        because = f" ({ranks} -> {world.data_size} ranks)" if ranks != world.data_size else ""
        lines.append(f"tokens a step: {tokens:,} -> {tokens_per_step(config, world):,}{because}")
    return lines


def tokens_per_step(config: TrainConfig, world: World) -> int:
    """Tokens of one optimizer step, over all data-parallel ranks and micro-batches."""
    return config.context_length * config.batch_size * config.gradient_accumulation_steps * world.data_size


def learning_rate_of(step: int, config: TrainConfig, cosine_steps: int) -> float:
    """The learning rate of a step. Steps count from 1; those after `cosine_steps` have the cosine's last rate."""
    assert config.learning_rate is not None, "with_defaults fills it in"
    return warmup_cosine(
        step - 1, learning_rate=config.learning_rate, warmup_steps=config.warmup_steps, max_steps=cosine_steps,
        final_ratio=config.final_learning_rate_ratio,
    )  # fmt: skip
