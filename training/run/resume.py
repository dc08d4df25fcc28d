"""Goes on from a checkpoint: what it says of its run, and the settings that the run inherits."""

import dataclasses
import logging
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

import torch

import kernels
from training.checkpoint.files import checkpoints, latest_checkpoint, load_trainer_state, step_of
from training.checkpoint.manifest import OPTIMIZER
from training.data.loader import check_same_data
from training.flags import LARGE, as_words, given_flags
from training.host.errors import UserError, program, whole_number
from training.memory.flags import REMOVED
from training.optim.adamw import warmup_cosine
from training.optim.flags import DEFAULT_STEPS
from training.parallel.world import World
from training.run.settings import TrainConfig, check_config

logger = logging.getLogger(__name__)
# A resumed run takes these from its flags alone, all other settings from the run that it continues.
NOT_INHERITED = (
    "resume",
    "rope_scaling",
    "output_dir",
    "device",
    "show_batch",
    "collective_timeout",
    "log_file",
)
DROPPED_TO_GO_ON = "resume", "rope_scaling", "show_batch"  # the checkpoint has the extended context
BUDGETS = ("memory_budget", "host_budget")
# A flag given with --resume drops the earlier run's settings that it would contradict.
REPLACED: dict[str, tuple[str, ...]] = {
    name: BUDGETS for name in ("gradient_checkpointing", "compile")
}
REPLACED |= {name: ("gradient_checkpointing", "compile") for name in BUDGETS}
REPLACED |= {"epochs": ("max_steps",), "max_steps": ("epochs",)}


@dataclass
class Progress:
    """How far a run has come, after a step that was taken. A step that is dropped half way leaves
    it alone."""

    max_steps: int = 0  # the run's last step; with epochs LARGE until `count_steps` knows it
    cosine_steps: int = 0  # steps from the run's first to the end of the learning rate's cosine
    step: int = 0
    tokens: int = 0
    loader: dict = field(default_factory=dict)  # the loader's state: its position in the data
    validation_loss: float | None = None  # the last that was measured
    skipped: int = 0  # steps that were not finite and were left out
    unvalidated: int | None = (
        None  # the last step, if a signal or an error cut its validation short
    )

    @property
    def is_complete(self) -> bool:
        return self.step >= self.max_steps


@dataclass
class Start:
    """The settings of a run, and the place where it starts."""

    config: TrainConfig
    progress: Progress
    tokenizer: str | None = None  # identity of the tokenizer that the checkpoint was trained with
    changes: list[str] = field(
        default_factory=list
    )  # a line for each setting that is not what it was


def how_to_go_on(found: list[Path]) -> str:
    """Advice for a run whose output_dir has these checkpoints, the newest last."""
    resumable = [path for path in found if (path / OPTIMIZER).is_file()]
    if resumable[-1:] == found[-1:]:
        return "--resume goes on from it, another --output_dir starts afresh"
    or_older = (
        f"; once it is moved elsewhere, --resume goes on from {resumable[-1]}" if resumable else ""
    )
    return (
        "it has no optimizer state; another --output_dir starts afresh, with --init_from "
        f"{found[-1]} from its weights"
        f"{or_older}"
    )


def start_from(checkpoint: str | Path) -> str:
    return f"start from its weights with --init_from {checkpoint} and another --output_dir"


def after_a_stop(config: TrainConfig, given: Iterable[str], last: Path | None, world: World) -> str:
    """Returns what to do after a run that was stopped: the command that goes on, if its last
    checkpoint can be resumed.

    `given` are the names of settings that flags and --config gave: a checkpoint has all but a few
    of them.
    """
    if config.save == "none":
        return "nothing is saved, as --save none asks: the same command starts anew"
    if last is None:
        return "no step was done and nothing is saved: the same command starts anew"
    if config.save == "model":
        return f"the weights are saved: {start_from(last)}"
    starts = [program("torchrun"), *_sizes_of_torchrun(world)] if world.size > 1 else [program()]
    kept = [name for name in NOT_INHERITED if name in given and name not in DROPPED_TO_GO_ON]
    flags = [
        word for name in kept for word in (f"--{name}", shlex.quote(str(getattr(config, name))))
    ]
    return f"to go on: {' '.join([*starts, 'train.py', '--resume', *flags])}"


def _sizes_of_torchrun(world: World) -> list[str]:
    local = whole_number("LOCAL_WORLD_SIZE", world.size)
    nodes = (
        [f"--nnodes={world.size // local}", "(and the rest as before)"]
        if local < world.size
        else []
    )
    return [f"--nproc_per_node={local}", *nodes]


def resume(checkpoint: Path, given: dict, world: World) -> Start:
    """Makes a start from a checkpoint, with its settings changed by the given ones.

    Without --max_steps or --epochs a run that was stopped keeps the number it had. A finished one
    gets DEFAULT_STEPS more at its last learning rate, and with --resume auto none.
    """
    if not (checkpoint / OPTIMIZER).is_file():
        found = checkpoints(checkpoint.parent, step_of(checkpoint) or 0)
        raise UserError(f"{checkpoint} cannot be resumed: {how_to_go_on(found)}")
    state = load_state(checkpoint)
    if state["ignored"]:
        logger.info(
            "settings of another version, ignored: %s",
            ", ".join(name[:80] for name in state["ignored"]),
        )
    refuse_other_weights(checkpoint, state["settings"], given.get("init_from"))
    progress = Progress(**{each.name: state[each.name] for each in dataclasses.fields(Progress)})
    step, saved = progress.step, state["settings"] | {"max_steps": progress.max_steps}
    before = TrainConfig(**saved)
    if given.get("optimizer_state") == "auto":  # the run before has chosen
        given = given | {"optimizer_state": saved["optimizer_state"]}
    values = inherited_settings(saved, given, world.device)
    if values["linear"] == REMOVED_LINEAR:
        raise UserError(
            f"linear {REMOVED_LINEAR}: {checkpoint} was trained with it, and no version after 0.6.0 "
            "has it; give --linear fp8 to go on"
        )
    if (
        not {"max_steps", "epochs"} & {*given}
        and progress.max_steps <= step
        and values["resume"] == "yes"
    ):
        values |= {"max_steps": step + DEFAULT_STEPS, "epochs": None}
    config = TrainConfig(**values)
    progress.max_steps = config.max_steps or LARGE
    if progress.max_steps <= step and config.resume == "yes":
        goal, value = config.goal, getattr(config, config.goal)
        raise UserError(
            f"{checkpoint} is at step {step}, {goal} is {value:g}; raise {goal} to go on"
        )
    check_config(config, given, TrainConfig.rules)
    if config.freeze_routers != before.freeze_routers:
        was = (
            f"{checkpoint} was trained with {'frozen' if before.freeze_routers else 'trained'} "
            "routers"
        )
        raise UserError(
            f"freeze_routers {config.freeze_routers}: {was}; drop it, or {start_from(checkpoint)}"
        )
    check_same_data(state["loader"], {"context_length": config.context_length, "seed": config.seed})
    changes = spell_changes(before, config, state, world)
    rates = [learning_rate_of(number, before, progress.cosine_steps) for number in (step, step + 1)]
    progress.cosine_steps = given.get(
        "max_steps", progress.cosine_steps
    )  # `count_steps` sets another for epochs
    rate = learning_rate_of(step + 1, config, progress.cosine_steps)
    if step >= progress.cosine_steps:
        changes.append(
            f"learning rate: held at {rate:.3g}, where its cosine ended; --max_steps stretches it"
        )
    elif rate != rates[1]:
        changes.append(
            f"learning rate: {rates[0]:.3g} in step {step} -> {rate:.3g} in step {step + 1}"
        )
    return Start(config, progress, state["tokenizer"], changes)


def refuse_other_weights(checkpoint: Path, saved: dict, asked: str | None) -> None:
    """Refuse --init_from beside --resume auto if the run was not started from that folder."""
    started = saved.get("init_from")
    if asked is None or started == asked or (started is None and saved.get("model_size") is None):
        return
    if started is None or realpath(started) != realpath(asked):
        own = f"{checkpoint} is of a run from {started or 'random weights'}"
        raise UserError(
            f"init_from {asked}: {own}; give that, drop init_from, or give another --output_dir"
        )


def state_to_save(
    settings: dict, progress: Progress, tokens_per_step: int, ranks: int, tokenizer: str
) -> dict:
    """The trainer_state of a checkpoint, which `load_state` reads.

    Args:
        settings: as given, but with the format of the optimizer's state.
        ranks: data-parallel ones.
        tokenizer: the tokenizer's identity.
    """
    return dataclasses.asdict(progress) | {
        "settings": settings, "tokens_per_step": tokens_per_step, "ranks": ranks,
        "tokenizer": tokenizer,
        "version": kernels.__version__,
    }  # fmt: skip


STATE = {  # names and types of what `state_to_save` returns
    "step": int, "tokens": int, "max_steps": int, "cosine_steps": int, "tokens_per_step": int,
    "ranks": int,
    "settings": dict, "tokenizer": str, "validation_loss": float | None, "loader": dict,
    "skipped": int,
    "unvalidated": int | None, "version": str,
}  # fmt: skip
RENAMED = {"fp8": "fp8-all", "fp8-gradients": "fp8"}  # linear maps in checkpoints without a version
REMOVED_LINEAR = "int8"  # a linear map of checkpoints before 2026-11-29


def load_state(checkpoint: Path) -> dict:
    """The trainer_state of a checkpoint, with the settings that this version knows, and "ignored",
    names of others.

    Raises UserError if somebody has edited the file to what no run has saved, or if the run had a
    setting that this version has no more.
    """
    # In checkpoints before 2026-11-24, and -28; the losses are lost where somebody has taken them
    # out.
    absent = {"skipped": 0, "unvalidated": None, "version": "", "validation_loss": None}
    state = absent | load_trainer_state(checkpoint)
    known = [each.name for each in dataclasses.fields(TrainConfig)]
    unnamed = {
        "optimizer_state": "float32",
        "linear": "bf16",
    }  # settings of checkpoints before 2026-11-25
    try:
        for name, kind in STATE.items():
            if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool):
                raise UserError(f"{name} is missing or has a wrong value")
        if type(state["loader"].get("next_sequence")) is not int:
            raise UserError("next_sequence is missing or has a wrong value")
        for name in ("step", "max_steps", "cosine_steps"):
            if not 0 < state[name] <= LARGE:
                raise UserError(f"{name} must be between 1 and {LARGE}, got {state[name]}")
        found = state["settings"].items()
        saved = unnamed | {
            name: value for name, value in found if name in known and value not in (None, [])
        }
        if not state["version"]:
            saved["linear"] = RENAMED.get(str(saved["linear"]), saved["linear"])
        linear = saved["linear"]
        if linear == REMOVED_LINEAR:
            saved["linear"] = "bf16"
        settings = given_flags(TrainConfig, as_words(saved, known), "train.py")
        settings["linear"] = linear
    except UserError as error:
        cure = f"move that checkpoint elsewhere, or {start_from(checkpoint)}"
        raise UserError(f"{checkpoint}/trainer.json is damaged: {error}; {cure}") from None
    for names, why in REMOVED.items():
        for name in names.split():
            if (value := state["settings"].get(name)) is not None:
                was = f"{checkpoint} was trained with {name} {value}, which is no more: {why}"
                raise UserError(f"{was}; or {start_from(checkpoint)}")
    ignored = sorted(state["settings"].keys() - {*known})
    return state | {"settings": settings, "ignored": ignored}


def parallel_sizes_of(given: dict) -> dict[str, int]:
    """Sizes of the ranks' mesh as given, else as the run to resume had them: the mesh comes before
    other settings."""
    config = TrainConfig(**given)
    last = latest_checkpoint(Path(config.output_dir), {}) if config.resume != "no" else None
    saved = {} if last is None else load_state(last)["settings"]
    names = "context_parallel_size", "tensor_parallel_size", "replicate"
    return {name: {**saved, **given}.get(name, getattr(config, name)) for name in names}


def inherited_settings(saved: dict, given: dict, device: torch.device) -> dict:
    """The settings of a resumed run: saved ones, changed by the given ones and rid of what the
    given contradict."""
    dropped = {*NOT_INHERITED, *(BUDGETS if device.type == "cpu" else ())}
    dropped.update(
        *(
            REPLACED.get(name, ())
            for name, value in given.items()
            if value and value != saved.get(name)
        )
    )
    if given.get("save") == "none":
        dropped |= {"checkpoint_interval", "keep_checkpoints"}
    if given.get("attention_type", saved.get("attention_type")) != saved.get("attention_type"):
        dropped |= {"selected_blocks", "dense_below"}
    return {name: value for name, value in saved.items() if name not in dropped} | given


def spell_changes(before: TrainConfig, config: TrainConfig, state: dict, world: World) -> list[str]:
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


def tokens_per_step(config: TrainConfig, world: World) -> int:
    return (
        config.context_length
        * config.batch_size
        * config.gradient_accumulation_steps
        * world.data_size
    )


def learning_rate_of(step: int, config: TrainConfig, cosine_steps: int) -> float:
    """The learning rate of a step. Steps count from 1; a step after `cosine_steps` has the cosine's
    last rate."""
    assert config.learning_rate is not None, "TrainConfig fills it in"
    return warmup_cosine(
        step - 1, learning_rate=config.learning_rate, warmup_steps=config.warmup_steps,
        max_steps=cosine_steps,
        final_ratio=config.final_learning_rate_ratio,
    )  # fmt: skip
