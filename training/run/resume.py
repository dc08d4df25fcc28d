"""Finds where a run starts: at its first step, or at its newest undamaged checkpoint, whose settings it inherits."""

import dataclasses
import functools
import json
import logging
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from os.path import exists
from pathlib import Path

import torch

from model import ModelConfig
from training.checkpoint.carried import NOTHING, Carried, read_carried
from training.checkpoint.files import checkpoints, latest_checkpoint, load_trainer_state, step_of, tokenizer_of
from training.checkpoint.manifest import (
    OPTIMIZER,
    settings_beside,
    verify_base,
    verify_checkpoint,
    verify_weights,
)
from training.checkpoint.weights import Companions, find_weights, folders_of, parameter_shapes
from training.data.chat import open_tokenizer as open_with_template
from training.data.loader import PackedLoader, check_same_data
from training.data.tokenizer import ByteTokenizer, FileTokenizer
from training.families.lora import (
    ADAPTER_CONFIG,
    FROZEN_BITS,
    has_adapters,
    read_adapters,
    read_frozen_bits,
    to_adapter_config,
)
from training.flags import LARGE, as_words, given_flags
from training.host.errors import UserError, program
from training.host.files import read_json
from training.memory.kinds import KindsByStep, kinds_by_step
from training.optim.adamw import warmup_cosine
from training.parallel.world import World
from training.run.build import adapters_of, check_shape, choose_model, fresh_beside
from training.run.settings import (
    DEFAULT_STEPS,
    LORA_PEAK_LEARNING_RATE,
    MANY_EPOCHS,
    PEAK_LEARNING_RATE,
    TINY_PEAK_LEARNING_RATE,
    VALIDATION_SEQUENCES,
    VALIDATION_TOKENS,
    TrainConfig,
    check_config,
)

logger = logging.getLogger(__name__)
SHOWN_TOKENS = 5  # of a chat template, in messages
# A resumed run takes these from its flags alone, all other settings from the run that it continues.
NOT_INHERITED = (
    "resume", "init_from", "rope_scaling", "output_dir", "device", "show_batch", "collective_timeout", "log_file",
)  # fmt: skip
BUDGETS = ("memory_budget", "host_budget")
# A flag given with --resume drops the earlier run's settings that it would contradict.
REPLACED: dict[str, tuple[str, ...]] = {name: BUDGETS for name in ("gradient_checkpointing", "compile")}
REPLACED |= {name: ("gradient_checkpointing", "compile") for name in BUDGETS}
REPLACED |= {"epochs": ("max_steps",), "max_steps": ("epochs",)}


@dataclass
class Progress:
    """How far a run has come, after a step that was taken. A step that is dropped half way leaves it alone."""

    cosine_steps: int  # steps from the run's first to the end of the learning rate's cosine
    step: int = 0
    tokens: int = 0
    loader: dict = field(default_factory=dict)  # the loader's state: its position in the data
    validation_loss: float | None = None  # the last that was measured
    skipped: int = 0  # steps that were not finite and were left out
    unvalidated: int | None = None  # the last step, if a signal or an error cut its validation short


@dataclass
class Start:
    """The place where a run starts, and its settings."""

    config: TrainConfig
    model_config: ModelConfig
    progress: Progress
    checkpoint: Path | None = None  # the run goes on from it; None: the run starts at its first step
    tokenizer: str | None = None  # identity of the tokenizer that the checkpoint was trained with
    changes: list[str] = field(default_factory=list)  # a line for each setting that is not what it was

    @property
    def source(self) -> Path | None:
        """The folder of the weights that the run starts from."""
        return self.checkpoint or (Path(self.config.init_from) if self.config.init_from else None)

    @functools.cached_property
    def kinds(self) -> KindsByStep:
        """How each layer attends, by step."""
        return kinds_by_step(self.config, self.model_config)

    @functools.cached_property
    def carried(self) -> Carried:
        """The part of the source that is not trained and goes into checkpoints, and the form of its files."""
        if self.source is None:
            return NOTHING
        carried = read_carried(folders_of(self.source)[-1])
        return carried.beside_adapters() if self.config.lora is not None else carried

    def companions(self) -> Companions:
        """Returns what is carried; adapters' configuration, and settings of config.json that go along with them."""
        if (adapters := adapters_of(self.config)) is None:
            return Companions(carried=self.carried)
        assert self.source is not None, "adapters adapt something"
        base = folders_of(self.source)[-1].absolute()
        content = json.dumps(to_adapter_config(adapters, base), indent=2) + "\n"
        settings = settings_beside(adapters, base) | {FROZEN_BITS: self.config.lora_bits}
        return Companions({ADAPTER_CONFIG: content.encode()}, settings, self.carried)


def choose_start(given: dict, world: World) -> Start:
    """Finds where the run starts; a resumed run goes on from the newest checkpoint without damage.

    Refusals that take seconds come before the checkpoint's bytes are compared. They are a UserError: settings that do
    not fit the model, the checkpoint or each other.

    Args:
        given: the settings that flags and --config give, by the names of TrainConfig's fields.
    """
    passed_over: dict[Path, str] = {}
    while True:
        start = find_start(given, world, passed_over)
        check_same_on_all_ranks({"the checkpoint to go on from": str(start.checkpoint)}, world)
        config, model_config = start.config, start.model_config
        check_shape(config, model_config, start.kinds.at(1), world.size)
        start.config = replace(config, tokenizer=choose_tokenizer(config, start.checkpoint))
        if folder := start.source:
            shapes, adapters = parameter_shapes(model_config), adapters_of(config)
            shapes |= adapters.shapes(shapes) if adapters else {}
            entries = find_weights(folder, shapes, may_lack=fresh_beside(folder))
        open_tokenizer(start)
        if config.init_from and not (start.checkpoint or config.show_batch):
            verify_weights(config.init_from, entries)
        if start.checkpoint:
            try:
                verify_checkpoint(start.checkpoint)  # reads every byte of the checkpoint
            except UserError as error:
                passed_over[start.checkpoint] = str(error)
                continue
            if has_adapters(start.checkpoint):
                verify_base(start.checkpoint, entries)
        for path, why in passed_over.items():
            logger.warning("passed over %s: %s", path, why)
        for line in start.changes:
            logger.info("%s", line)
        return start


def check_same_on_all_ranks(ours: dict, world: World) -> None:
    """Refuse settings or data, by name, that differ from the main rank's."""
    for name, value in world.broadcast(ours).items():
        if ours[name] != value:
            raise UserError(f"{name} is {ours[name]} on rank {world.rank} and {value} on rank 0; start all ranks alike")


def find_start(given: dict, world: World, passed_over: dict[Path, str]) -> Start:
    """Makes a fresh start, or a start from the newest checkpoint in output_dir. Reads small files, and no tensor.

    `passed_over` is as in `latest_checkpoint`.
    """
    config = TrainConfig(**given)
    is_only_shown = config.show_batch and config.resume == "no"  # writes nothing, so a run may be in output_dir
    found = [] if is_only_shown else checkpoints(Path(config.output_dir))
    if config.resume == "no" and found:
        raise UserError(f"{found[-1]} is already there: {how_to_go_on(found)}")
    last = latest_checkpoint(Path(config.output_dir), passed_over) if found else None
    if last is not None:
        return resume(last, given, world)
    if found:
        raise UserError(f"no checkpoint in {config.output_dir} can be used; of the newest: {passed_over[found[-1]]}")
    if config.resume == "yes":
        raise UserError(f"--resume: no checkpoint in {config.output_dir}; --resume auto starts a run all the same")
    config = with_defaults(with_adapters(config, given))
    if config.init_from is None:
        config = replace(config, model_size=config.model_size or "tiny")
    assert config.max_steps is not None, "with_defaults fills it in"
    return Start(config, choose_model(config), Progress(config.max_steps))


def how_to_go_on(found: list[Path]) -> str:
    """Advice for a run whose output_dir has these checkpoints, the newest last."""
    resumable = [path for path in found if (path / OPTIMIZER).is_file()]
    if resumable[-1:] == found[-1:]:
        return "--resume goes on from it, another --output_dir starts afresh"
    or_older = f"; once it is moved elsewhere, --resume goes on from {resumable[-1]}" if resumable else ""
    return (
        f"it has no optimizer state; another --output_dir starts afresh, with --init_from {found[-1]} from its weights"
        f"{or_older}"
    )


def resume(checkpoint: Path, given: dict, world: World) -> Start:
    """Makes a start from a checkpoint, with its settings changed by the given ones.

    Without --max_steps or --epochs a run that was stopped keeps the number it had. A finished one gets DEFAULT_STEPS
    more at its last learning rate, and with --resume auto none.
    """
    if not (checkpoint / OPTIMIZER).is_file():
        found = checkpoints(checkpoint.parent, step_of(checkpoint) or 0)
        raise UserError(f"{checkpoint} cannot be resumed: {how_to_go_on(found)}")
    state = load_state(checkpoint)
    step, steps_before, cosine_before = state["step"], state["max_steps"], state["cosine_steps"]
    saved = state["settings"] | {"max_steps": steps_before}
    if state["ignored"]:
        logger.info("settings of another version, ignored: %s", ", ".join(name[:80] for name in state["ignored"]))
    before = with_defaults(TrainConfig(**saved))
    if given.get("optimizer_state") == "auto":  # the run before has chosen
        given = given | {"optimizer_state": saved["optimizer_state"]}
    config = with_defaults(inherit_settings(saved, given, world.device))
    if not {"max_steps", "epochs"} & {*given} and steps_before <= step and config.resume == "yes":
        config = replace(config, max_steps=step + DEFAULT_STEPS, epochs=None)
    if config.max_steps <= step and config.resume == "yes":
        goal, value = config.goal, getattr(config, config.goal)
        raise UserError(f"{checkpoint} is at step {step}, {goal} is {value:g}; raise {goal} to go on")
    had, asked = adapters_of(before), adapters_of(config)
    if had != asked:
        raise UserError(
            f"{checkpoint} was trained with {had or 'no adapters'}, not {asked}; drop what differs, or start "
            f"from its weights with --init_from {checkpoint} and another --output_dir"
        )
    check_config(config, given, TrainConfig.rules)
    check_same_data(state["loader"], {"context_length": config.context_length, "seed": config.seed})
    cosine_steps = given.get("max_steps", cosine_before)  # `count_steps` sets another for epochs
    changes = spell_changes(before, config, state, world)
    rates = learning_rate_of(step, before, cosine_before), learning_rate_of(step + 1, config, cosine_steps)
    if step >= cosine_steps:
        changes.append(f"learning rate: held at {rates[1]:.3g}, where its cosine ended; --max_steps stretches it")
    elif rates[1] != learning_rate_of(step + 1, before, cosine_before):
        changes.append(f"learning rate: {rates[0]:.3g} in step {step} -> {rates[1]:.3g} in step {step + 1}")
    progress = Progress(cosine_steps, **{name: state[name] for name in PROGRESS})
    return Start(config, choose_model(config, checkpoint), progress, checkpoint, state["tokenizer"], changes)


def state_to_save(config: TrainConfig, progress: Progress, tokenizer: str, world: World) -> dict:
    """The trainer_state of a checkpoint, which `load_state` reads; `tokenizer` is the tokenizer's identity.

    The settings are as given, but with the format of the optimizer's state: a resumed run finds out anew what "auto"
    stands for elsewhere.
    """
    return dataclasses.asdict(progress) | {
        "max_steps": config.max_steps, "tokens_per_step": tokens_per_step(config, world), "ranks": world.data_size,
        "settings": dataclasses.asdict(config), "tokenizer": tokenizer,
    }  # fmt: skip


PROGRESS = "step", "tokens", "loader", "validation_loss", "skipped", "unvalidated"
STATE = {  # names and types of what `state_to_save` returns
    "step": int, "tokens": int, "max_steps": int, "cosine_steps": int, "tokens_per_step": int, "ranks": int,
    "settings": dict, "tokenizer": str, "validation_loss": float | None, "loader": dict, "skipped": int,
    "unvalidated": int | None,
}  # fmt: skip


def load_state(checkpoint: Path) -> dict:
    """The trainer_state of a checkpoint, with the settings that this version knows, and "ignored", names of others.

    Raises UserError if somebody has edited the file to what no run has saved.
    """
    absent = {"skipped": 0, "unvalidated": None}  # in checkpoints before 2026-11-24
    state = absent | load_trainer_state(checkpoint)
    known = [each.name for each in dataclasses.fields(TrainConfig)]
    unnamed = {"optimizer_state": "float32", "linear": "bf16"}  # settings of checkpoints before 2026-11-25
    try:
        for name, kind in STATE.items():
            if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool):
                raise UserError(f"{name} is missing or has a wrong value")
        if type(state["loader"].get("next_sequence")) is not int:
            raise UserError("next_sequence is missing or has a wrong value")
        for name in ("step", "max_steps", "cosine_steps"):
            if not 0 < state[name] <= LARGE:
                raise UserError(f"{name} must be between 1 and {LARGE}, got {state[name]}")
        saved = unnamed | {
            name: value for name, value in state["settings"].items() if name in known and value not in (None, [])
        }
        settings = given_flags(TrainConfig, as_words(saved, known), "train.py")
        return state | {"settings": settings, "ignored": sorted(state["settings"].keys() - {*known})}
    except UserError as error:
        raise UserError(
            f"{checkpoint}/trainer.json is damaged: {error}; move that checkpoint elsewhere, or start from its weights "
            "with --init_from and another --output_dir"
        ) from None


def parallel_sizes_of(given: dict) -> dict[str, int]:
    """Sizes of the ranks' mesh as given, else as the run to resume had them: the mesh comes before other settings."""
    config = TrainConfig(**given)
    last = latest_checkpoint(Path(config.output_dir), {}) if config.resume != "no" else None
    saved = {} if last is None else load_state(last)["settings"]
    names = "context_parallel_size", "tensor_parallel_size", "replicate"
    return {name: {**saved, **given}.get(name, getattr(config, name)) for name in names}


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The settings, with max_steps, learning_rate, validation_sequences and adapters filled in where not given.

    With epochs max_steps is LARGE until the data are open and `count_steps` knows it.
    """
    is_tiny = config.model_size == "tiny" or (config.model_size is None and config.init_from is None)
    default_rate = TINY_PEAK_LEARNING_RATE if is_tiny else PEAK_LEARNING_RATE
    sequences = config.validation_sequences
    if sequences is None:
        sequences = max(1, min(VALIDATION_SEQUENCES, VALIDATION_TOKENS // config.context_length))
    default_rate = default_rate if config.lora is None else LORA_PEAK_LEARNING_RATE
    max_steps = config.max_steps or (DEFAULT_STEPS if config.epochs is None else LARGE)
    rate = config.learning_rate or default_rate
    if adapters := adapters_of(config):
        config = replace(config, lora_alpha=adapters.alpha, lora_targets=",".join(adapters.targets))
    return replace(config, max_steps=max_steps, learning_rate=rate, validation_sequences=sequences)


def with_adapters(config: TrainConfig, given: Iterable[str]) -> TrainConfig:
    """The settings of a fresh run, with the adapters of --init_from if it holds some.

    Raises:
        UserError: flags that say otherwise; adapters and flags that do not fit each other.
    """
    if config.init_from is not None and has_adapters(config.init_from):
        found, bits = read_adapters(config.init_from)[0], read_frozen_bits(config.init_from)
        if dropout := read_json(Path(config.init_from, ADAPTER_CONFIG)).get("lora_dropout"):
            logger.info("adapters: lora_dropout %.20s of %s is left out", dropout, config.init_from)
        targets = ",".join(found.targets)
        own: dict[str, typing.Any] = {"lora": found.rank, "lora_alpha": found.alpha, "lora_targets": targets}
        if sorted((config.lora_targets or "").split(",")) == sorted(found.targets):
            config = replace(config, lora_targets=targets)  # in the order of the folder's
        for name, value in own.items():
            if name in given and getattr(config, name) != value:
                merge = f"{program()} -m training.checkpoint.weights export {config.init_from} OUT --merge"
                raise UserError(
                    f"{name} {getattr(config, name)}: the adapters of {config.init_from} have {value}; drop it, or "
                    f"merge them first: {merge}"
                )
        if "lora_bits" not in given:
            own["lora_bits"] = bits
            if bits < 16:
                logger.info("adapters: lora_bits %d, as those of %s were trained", bits, config.init_from)
        elif config.lora_bits != bits:
            changed = bits, config.lora_bits
            logger.warning("adapters: trained beside %d bits per weight, and from here on beside %d", *changed)
        config = replace(config, **own)
    if config.lora is not None and config.init_from is None:
        raise UserError("lora has no effect without init_from, which it adapts; drop it, or give that")
    check_config(config, given, TrainConfig.rules)
    return config


def inherit_settings(saved: dict, given: dict, device: torch.device) -> TrainConfig:
    """The settings of a resumed run: saved ones, changed by the given ones and rid of what the given contradict."""
    dropped = {*NOT_INHERITED, *(BUDGETS if device.type == "cpu" else ())}
    dropped.update(*(REPLACED.get(name, ()) for name, value in given.items() if value and value != saved.get(name)))
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
        if name not in NOT_INHERITED and value not in (getattr(before, name), LARGE)
    ]
    tokens, ranks = state["tokens_per_step"], state["ranks"]
    if tokens != tokens_per_step(config, world):
        because = f" ({ranks} -> {world.data_size} ranks)" if ranks != world.data_size else ""
        lines.append(f"tokens a step: {tokens:,} -> {tokens_per_step(config, world):,}{because}")
    return lines


def count_steps(start: Start, loader: PackedLoader, given: Iterable[str]) -> None:
    """Put the steps that epochs need into the start, and log how many epochs the run makes.

    An epoch is `loader.sequences_per_epoch` sequences of the loader's order. The steps left are counted from its
    position, so that ranks, batch_size and gradient_accumulation_steps may change at a resume.

    Raises:
        UserError: no step is left; settings that do not fit the number of steps.
    """
    config, step, per_epoch = start.config, start.progress.step, loader.sequences_per_epoch
    per_step = config.batch_size * config.gradient_accumulation_steps * loader.world_size
    if config.epochs is not None:
        # The decimal number that was given: 0.1 epochs of 30 sequences are 3 sequences, which as floats are above 3.
        left = Fraction(str(config.epochs)) * per_epoch - loader.next_sequence
        max_steps = step + max(0, math.ceil(left / per_step))
        if max_steps == step and config.resume == "yes":
            seen = f"{loader.epoch:.4g} epochs are behind it"
            raise UserError(f"{start.checkpoint}: {seen}, epochs is {config.epochs:g}; raise epochs to go on")
        if max_steps > LARGE:
            raise UserError(f"epochs {config.epochs:g} are {max_steps:,} steps, more than {LARGE:,}; lower it")
        if start.checkpoint and max_steps != start.progress.cosine_steps:
            logger.info("learning rate: its cosine ends at step %s, where the epochs do", f"{max_steps:,}")
        start.config = config = replace(config, max_steps=max_steps)
        start.progress = replace(start.progress, cosine_steps=max_steps)
        check_config(config, given)
    assert config.max_steps is not None, "with_defaults fills it in"
    epochs = loader.epoch + (config.max_steps - step) * per_step / per_epoch
    count = f"{epochs:,.2f}" if epochs >= 0.1 else f"{epochs:.2g}"
    logger.info("data: %s steps make %s epochs of %s sequences", f"{config.max_steps:,}", count, f"{per_epoch:,}")
    if epochs > MANY_EPOCHS:
        logger.warning(
            "data: the model sees each text %.0f times, and soon learns it by heart; give more --data, or --epochs 3",
            epochs,
        )


def tokens_per_step(config: TrainConfig, world: World) -> int:
    """Tokens of one optimizer step, over all data-parallel ranks and micro-batches."""
    return config.context_length * config.batch_size * config.gradient_accumulation_steps * world.data_size


def learning_rate_of(step: int, config: TrainConfig, cosine_steps: int) -> float:
    """The learning rate of a step. Steps count from 1; a step after `cosine_steps` has the cosine's last rate."""
    assert config.learning_rate is not None, "with_defaults fills it in"
    return warmup_cosine(
        step - 1, learning_rate=config.learning_rate, warmup_steps=config.warmup_steps, max_steps=cosine_steps,
        final_ratio=config.final_learning_rate_ratio,
    )  # fmt: skip


def choose_tokenizer(config: TrainConfig, checkpoint: Path | None) -> str:
    """--tokenizer, or the checkpoint's copy if that file has gone; else the tokenizer of --init_from, or bytes."""
    if checkpoint and config.tokenizer not in (None, "bytes") and not exists(config.tokenizer):
        own = checkpoint / "tokenizer.json"
        return str(own if own.is_file() else config.tokenizer)
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer or "bytes"
    return tokenizer_of(Path(config.init_from))


def open_tokenizer(start: Start) -> ByteTokenizer | FileTokenizer:
    """Opens the tokenizer of the run, with its chat template.

    Raises:
        UserError: a resumed run was trained with another content; tokens of the chat template would not be trained.
    """
    template = start.config.chat_template
    if template not in (None, "chatml") and start.checkpoint and not exists(template):
        template = str(start.checkpoint / "chat_template.jinja")
    tokenizer = open_with_template(start.config.tokenizer, template)
    if template is not None and tokenizer.added_for_chats:
        _check_are_trained(start, tokenizer)
    if start.checkpoint and start.tokenizer != tokenizer.identity:
        raise UserError(
            f"cannot resume: {start.checkpoint} was trained with tokenizer {str(start.tokenizer)[:12]}, "
            f"{tokenizer.name} is {tokenizer.identity[:12]} (first digits of the files' SHA-256); give that --tokenizer"
        )
    return tokenizer


def _check_are_trained(start: Start, tokenizer: FileTokenizer) -> None:
    """Refuse tokens that a chat template added, where no row of the embedding is trained for them."""
    added, vocab_size = tokenizer.added_for_chats, start.model_config.vocab_size
    names = ", ".join(added[:SHOWN_TOKENS]) + f" and {len(added) - SHOWN_TOKENS} more" * (len(added) > SHOWN_TOKENS)
    needs = f"chat_template {start.config.chat_template} needs the tokens {names}, which {tokenizer.name} lacks"
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{needs}: the model's vocab_size {vocab_size} has no room for {tokenizer.vocab_size} ids; give a template "
            "of plain words or of the tokenizer's tokens"
        )
    if start.config.lora is not None:
        raise UserError(f"{needs}: adapters would not train their embeddings; drop lora, or give another template")
    logger.info("chat: new tokens %s: the embedding's rows of their ids are trained", names)
