"""Goes on from a checkpoint: what it says of its run, and the settings that the run inherits."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

import torch

import kernels
from training.checkpoint.decide import Saving
from training.checkpoint.files import checkpoints, latest_checkpoint, load_trainer_state, step_of
from training.checkpoint.manifest import OPTIMIZER
from training.data.loader import check_same_data
from training.families.decide import start_from
from training.flags import LARGE, as_words, given_flags
from training.host.errors import UserError, program, whole_number
from training.memory.decide import Batch
from training.memory.flags import REMOVED
from training.optim.decide import decide_learning_rate
from training.optim.flags import DEFAULT_STEPS
from training.parallel.world import World
from training.run.schedule import Progress
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
class Resolved:
    """The settings of a run with what it inherits, and the place where it starts."""

    config: TrainConfig
    progress: Progress
    tokenizer: str | None = None  # identity of the tokenizer that the checkpoint was trained with
    # A line for each setting that is not what it was.
    changes: list[str] = field(default_factory=list)


def how_to_go_on(folders: list[Path]) -> str:
    """Advice for a run whose output_dir has these checkpoints, the newest last."""
    resumable = [path for path in folders if (path / OPTIMIZER).is_file()]
    if resumable[-1:] == folders[-1:]:
        return "--resume goes on from it, another --output_dir starts afresh"
    or_older = (
        f"; once it is moved elsewhere, --resume goes on from {resumable[-1]}" if resumable else ""
    )
    return (
        "it has no optimizer state; another --output_dir starts afresh, with --init_from "
        f"{folders[-1]} from its "
        f"weights{or_older}"
    )


def after_a_stop(saving: Saving, flags: Sequence[str], last: Path | None, world: World) -> str:
    """Returns what to do after a run that was stopped: the command that goes on, if its last
    checkpoint can be resumed.

    `flags` are the words of flags that a checkpoint does not have.
    """
    if not saving.is_on:
        return "nothing is saved, as --save none asks: the same command starts anew"
    if last is None:
        return "no step was done and nothing is saved: the same command starts anew"
    if saving.contents == "model":
        return f"the weights are saved: {start_from(last)}"
    starts = [program()]
    if world.size > 1:
        starts = [program("torchrun"), *_sizes_of_torchrun(world)]
    return f"to go on: {' '.join([*starts, 'train.py', '--resume', *flags])}"


def _sizes_of_torchrun(world: World) -> list[str]:
    local = whole_number("LOCAL_WORLD_SIZE", world.size)
    if local < world.size:
        nodes = [f"--nnodes={world.size // local}", "(and the rest as before)"]
    else:
        nodes = []
    return [f"--nproc_per_node={local}", *nodes]


def resume(checkpoint: Path, flag_values: dict, world: World) -> Resolved:
    """Resolves the settings of a run that goes on from a checkpoint: its own, changed by the given
    ones.

    Without --max_steps or --epochs a run that was stopped keeps the number it had. A finished one
    gets DEFAULT_STEPS more at its last learning rate, and with --resume auto none.
    """
    if not (checkpoint / OPTIMIZER).is_file():
        earlier = checkpoints(checkpoint.parent, step_of(checkpoint) or 0)
        raise UserError(f"{checkpoint} cannot be resumed: {how_to_go_on(earlier)}")
    state = load_state(checkpoint)
    refuse_removed(checkpoint, state["ignored"])
    if state["ignored"]:
        logger.info(
            "settings of another version, ignored: %s",
            ", ".join(name[:80] for name in state["ignored"]),
        )
    refuse_other_weights(checkpoint, state["settings"], flag_values.get("init_from"))
    names = [entry.name for entry in dataclasses.fields(Progress)]
    progress = Progress(**{name: state[name] for name in names})
    saved = state["settings"] | {"max_steps": progress.max_steps}
    before = TrainConfig(**saved)
    if flag_values.get("optimizer_state") == "auto":  # the run before has chosen
        flag_values = flag_values | {"optimizer_state": saved["optimizer_state"]}
    values = inherited_settings(saved, flag_values, world.device)
    if values["linear"] == REMOVED_LINEAR:
        raise UserError(
            f"linear {REMOVED_LINEAR}: {checkpoint} was trained with it, and no version after "
            "0.6.0 has it; give --linear fp8 to go on"
        )
    says_steps = "max_steps" in flag_values or "epochs" in flag_values
    if progress.is_complete and not says_steps and values["resume"] == "yes":
        values |= {"max_steps": progress.step + DEFAULT_STEPS, "epochs": None}
    config = TrainConfig(**values)
    progress.max_steps = config.max_steps or LARGE
    check_goes_on(config, flag_values, before, checkpoint, progress)
    check_same_data(state["loader"], {"context_length": config.context_length, "seed": config.seed})
    changes = spell_changes(before, config, state, world)
    cosine_steps = progress.cosine_steps
    # `count_steps` sets another number for epochs.
    progress.cosine_steps = flag_values.get("max_steps", cosine_steps)
    changes += spell_rates(before, cosine_steps, config, progress)
    return Resolved(config, progress, state["tokenizer"], changes)


def check_goes_on(
    config: TrainConfig,
    flag_values: dict,
    before: TrainConfig,
    checkpoint: Path,
    progress: Progress,
) -> None:
    """Refuses settings that do not fit a resumed run.

    They leave no step, contradict each other, or train other parameters.
    """
    if progress.is_complete and config.resume == "yes":
        goal, value = config.goal, getattr(config, config.goal)
        raise UserError(
            f"{checkpoint} is at step {progress.step}, {goal} is {value:g}; raise {goal} to go on"
        )
    check_config(config, flag_values, TrainConfig.rules)
    if config.freeze_routers != before.freeze_routers:
        routers = "frozen" if before.freeze_routers else "trained"
        was = f"{checkpoint} was trained with {routers} routers"
        raise UserError(
            f"freeze_routers {config.freeze_routers}: {was}; drop it, or {start_from(checkpoint)}"
        )


def spell_rates(
    before: TrainConfig, cosine_steps: int, config: TrainConfig, progress: Progress
) -> list[str]:
    """Returns a line on the learning rate, where it is held or jumps.

    `cosine_steps` are those of the run before, and `progress` has those of the run that goes on.
    """
    step = progress.step
    earlier = decide_learning_rate(before)
    last, expected = earlier.at(step, cosine_steps), earlier.at(step + 1, cosine_steps)
    rate = decide_learning_rate(config).at(step + 1, progress.cosine_steps)
    if step >= progress.cosine_steps:
        return [
            f"learning rate: held at {rate:.3g}, where its cosine ended; --max_steps stretches it"
        ]
    if rate != expected:
        return [f"learning rate: {last:.3g} in step {step} -> {rate:.3g} in step {step + 1}"]
    return []


def refuse_removed(checkpoint: Path, settings: dict) -> None:
    """Refuse a run with settings without which its later steps would be of another function."""
    for names, why in REMOVED.items():
        for name in names.split():
            if name in settings:
                was = f"{checkpoint} was trained with {name} {settings[name]}, which is no more"
                raise UserError(f"{was}: {why}; or {start_from(checkpoint)}")


def refuse_other_weights(checkpoint: Path, saved: dict, path: str | None) -> None:
    """Refuses --init_from beside --resume auto if the run was not started from that folder."""
    started = saved.get("init_from")
    if path is None or started == path or (started is None and saved.get("model_size") is None):
        return
    if started is None or realpath(started) != realpath(path):
        origin = f"{checkpoint} is of a run from {started or 'random weights'}"
        raise UserError(
            f"init_from {path}: {origin}; give that, drop init_from, or give another --output_dir"
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
        "settings": settings,
        "tokens_per_step": tokens_per_step,
        "ranks": ranks,
        "tokenizer": tokenizer,
        "version": kernels.__version__,
    }


STATE = {  # names and types of what `state_to_save` returns
    "step": int,
    "tokens": int,
    "max_steps": int,
    "cosine_steps": int,
    "tokens_per_step": int,
    "ranks": int,
    "settings": dict,
    "tokenizer": str,
    "validation_loss": float | None,
    "loader": dict,
    "skipped": int,
    "unvalidated": int | None,
    "version": str,
}
RENAMED = {"fp8": "fp8-all", "fp8-gradients": "fp8"}  # linear maps in checkpoints without a version
REMOVED_LINEAR = "int8"  # a linear map of checkpoints before 2026-11-29


def load_state(checkpoint: Path) -> dict:
    """The trainer_state of a checkpoint, with the settings that this version knows, and "ignored",
    others that had a value.

    Raises UserError if somebody has edited the file to what no run has saved.
    """
    # In checkpoints before 2026-11-24, and -28;
    # the losses are lost where somebody has taken them out.
    absent = {"skipped": 0, "unvalidated": None, "version": "", "validation_loss": None}
    state = absent | load_trainer_state(checkpoint)
    known = [entry.name for entry in dataclasses.fields(TrainConfig)]
    # settings of checkpoints before 2026-11-25
    unnamed = {"optimizer_state": "float32", "linear": "bf16"}
    try:
        for name, kind in STATE.items():
            if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool):
                raise UserError(f"{name} is missing or has a wrong value")
        if type(state["loader"].get("next_sequence")) is not int:
            raise UserError("next_sequence is missing or has a wrong value")
        for name in ("step", "max_steps", "cosine_steps"):
            if not 0 < state[name] <= LARGE:
                raise UserError(f"{name} must be between 1 and {LARGE}, got {state[name]}")
        entries = state["settings"].items()
        saved = unnamed | {
            name: value for name, value in entries if name in known and value not in (None, [])
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
    unknown = state["settings"].keys() - {*known}
    values = {name: state["settings"][name] for name in sorted(unknown)}
    ignored = {name: value for name, value in values.items() if value is not None}
    return state | {"settings": settings, "ignored": ignored}


def parallel_sizes_of(flag_values: dict) -> dict[str, int]:
    """Sizes of the ranks' mesh as given, else as the run to resume had them: the mesh comes before
    other settings."""
    config = TrainConfig(**flag_values)
    last = latest_checkpoint(Path(config.output_dir), {}) if config.resume != "no" else None
    saved = {} if last is None else load_state(last)["settings"]
    names = "context_parallel_size", "tensor_parallel_size", "replicate"
    return {name: {**saved, **flag_values}.get(name, getattr(config, name)) for name in names}


def inherited_settings(saved: dict, flag_values: dict, device: torch.device) -> dict:
    """The settings of a resumed run: saved ones, changed by the given ones and rid of what the
    given contradict."""
    dropped = {*NOT_INHERITED, *(BUDGETS if device.type == "cpu" else ())}
    dropped.update(
        *(
            REPLACED.get(name, ())
            for name, value in flag_values.items()
            if value and value != saved.get(name)
        )
    )
    if flag_values.get("save") == "none":
        dropped |= {"checkpoint_interval", "keep_checkpoints"}
    if flag_values.get("attention_type", saved.get("attention_type")) != saved.get(
        "attention_type"
    ):
        dropped |= {"selected_blocks", "dense_below"}
    return {name: value for name, value in saved.items() if name not in dropped} | flag_values


def spell_changes(before: TrainConfig, config: TrainConfig, state: dict, world: World) -> list[str]:
    lines = [
        f"{name}: {getattr(before, name)} -> {value}"
        for name, value in dataclasses.asdict(config).items()
        if name not in NOT_INHERITED and value not in (getattr(before, name), LARGE)
    ]
    tokens = Batch(*config.lengths).tokens * world.data_size
    tokens_before, ranks = state["tokens_per_step"], state["ranks"]
    if tokens_before != tokens:
        because = f" ({ranks} -> {world.data_size} ranks)" if ranks != world.data_size else ""
        lines.append(f"tokens a step: {tokens_before:,} -> {tokens:,}{because}")
    return lines
