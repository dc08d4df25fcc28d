"""The settings of a run: one flat dataclass, whose fields are flags and keys of a TOML file, and
which are refused.

Each room has the flags that it decides by, and their rules; here they are joined.
"""

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import ClassVar

from training.checkpoint.flags import RULES as CHECKPOINT_RULES
from training.checkpoint.flags import CheckpointFlags
from training.data.flags import RULES as DATA_RULES
from training.data.flags import DataFlags
from training.families import flags as families
from training.families.flags import AdapterFlags, WeightFlags
from training.flags import Rule, flag, given_flags, refuse
from training.host.errors import UserError, import_optional
from training.host.files import check_can_write
from training.host.other_trainers import ABSENT
from training.memory import flags as memory
from training.memory.flags import (
    LONG_CONTEXT,
    AttentionFlags,
    BatchFlags,
    KernelFlags,
    MemoryFlags,
)
from training.objectives.flags import RULES as OBJECTIVE_RULES
from training.objectives.flags import ObjectiveFlags
from training.optim import flags as optim
from training.optim.flags import OptimizerFlags, StateFlags
from training.parallel.flags import MeshFlags, WaitFlags

VALIDATION_SEQUENCES, VALIDATION_TOKENS = 128, 2**20
STEP_RULES = families.STEP_RULES + optim.STEP_RULES
VALIDATION_RULES = (
    Rule(
        "validation_interval validation_data",
        "without validation; drop it, or raise validation_sequences",
        lambda s: s.validation_sequences == 0,
    ),
)
# A run may take other settings from its checkpoint or from the adapters of init_from: these hold
# for flags alone.
RUN_RULES = (
    *STEP_RULES,
    *families.RUN_RULES,
    *CHECKPOINT_RULES,
    *DATA_RULES,
    *memory.RUN_RULES,
    *VALIDATION_RULES,
    *optim.RUN_RULES,
)
# These hold once the start of the run is known.
STARTED_RULES = (*OBJECTIVE_RULES, *families.STARTED_RULES)


@dataclass
class StepFlags(MeshFlags, StateFlags, MemoryFlags, AttentionFlags, BatchFlags, WeightFlags):
    """Flags of a training step, which train.py takes and profile_memory.py profiles."""

    # flags of other trainers and of older versions, and why there is nothing like them
    absent: ClassVar[dict[str, str]] = ABSENT | memory.REMOVED


@dataclass
class TrainConfig(
    CheckpointFlags,
    OptimizerFlags,
    DataFlags,
    WaitFlags,
    KernelFlags,
    AdapterFlags,
    ObjectiveFlags,
    StepFlags,
):
    """Train a decoder; torchrun --nproc_per_node=N train.py trains it on N GPUs."""

    validation_interval: int = flag(
        100, "steps between validations; 0: only at the end", group="while it runs"
    )
    validation_sequences: int | None = flag(
        None, "in a validation; 0: none; default: 128, at most 2^20 tokens"
    )
    sample_tokens: int = flag(
        200, "tokens to generate at the end; 0: none", most=2**27, tokens=True
    )
    tensorboard: bool = flag(
        False, "also write TensorBoard's event files, into output_dir/tensorboard"
    )
    wandb: str | None = flag(
        None, "also send metrics to this project of Weights & Biases; files: output_dir/wandb"
    )
    trackio: str | None = flag(
        None, "also send metrics to this project of Trackio, on this machine or in a Space"
    )
    log_file: str | None = flag(None, "what is printed is also appended to it, with times")

    rules: ClassVar[tuple[Rule, ...]] = RUN_RULES + STARTED_RULES
    translator: ClassVar[str] = "training.config"  # prints settings of other trainers as TOML

    @property
    def steps(self) -> int | None:
        """Steps of the run in all; None: a checkpoint or the data say so."""
        return self.max_steps or (
            optim.DEFAULT_STEPS if self.resume == "no" and self.epochs is None else None
        )

    @property
    def goal(self) -> str:
        return "max_steps" if self.epochs is None else "epochs"

    def __post_init__(self):
        """Fills in what follows from other settings.

        Targets have the order that adapters have them in.
        """
        if self.batch_size is None:
            self.batch_size = 8 if self.context_length < LONG_CONTEXT else 1
        if self.validation_sequences is None:
            self.validation_sequences = max(
                1, min(VALIDATION_SEQUENCES, VALIDATION_TOKENS // self.context_length)
            )
        if self.learning_rate is None:
            is_tiny = self.model_size == "tiny" or not (self.model_size or self.init_from)
            if self.lora is not None:
                self.learning_rate = optim.LORA_PEAK_LEARNING_RATE
            elif is_tiny:
                self.learning_rate = optim.TINY_PEAK_LEARNING_RATE
            else:
                self.learning_rate = optim.PEAK_LEARNING_RATE
        if self.lora is not None:
            self.lora_alpha = self.lora_alpha or 2.0 * self.lora
            self.lora_targets = "all-linear" if self.lora_targets is None else self.lora_targets
        if self.lora_targets is not None:
            order = {name: i for i, name in enumerate(families.TARGETS)}
            self.lora_targets = ",".join(
                sorted(self.lora_targets.split(","), key=lambda name: order.get(name, -1))
            )


# the settings of flags and --config, by name
given_settings = partial(given_flags, TrainConfig, program="train.py")


def check_config(
    config: TrainConfig, flag_names: Iterable[str], rules: Iterable[Rule] = RUN_RULES
) -> None:
    """Refuses flags that contradict each other or would have no effect; `given_flags` has checked
    each value alone.

    Args:
        flag_names: flags that were given. A resumed run has its other settings from the run
            before.
        rules: RUN_RULES, or all of TrainConfig.rules once the start of the run is known.
    """
    refuse(config, flag_names, rules)
    for package, module in (
        ("tensorboard", "torch.utils.tensorboard"),
        ("wandb", "wandb"),
        ("trackio", "trackio"),
    ):
        if getattr(config, package) and not config.show_batch:  # which sends nothing
            import_optional(module, f"--{package}", package)
    if isinstance(config.show_batch, str):
        if not config.show_batch.endswith(".html"):
            shown = f"show_batch {config.show_batch} is no name of a page"
            raise UserError(f"{shown}; give a FILE.html, or --show_batch alone to print the batch")
        check_can_write(Path(config.show_batch), "--show_batch")
    names = ("show_batch",) if config.show_batch else ("output_dir", "log_file")
    for path, name in itertools.product(config.data + config.validation_data, names):
        written = getattr(config, name)
        if isinstance(written, str) and Path(realpath(written)).is_relative_to(realpath(path)):
            why = (
                f"{name} {written} lies in data {path}, "
                "which would be read with what the run writes"
            )
            raise UserError(f"{why}; give another {name}")
    optim.check_warmup(config, flag_names)


def differing(record: dict) -> dict:
    """Returns the settings that a run of the same model, adapters and context length does not have
    by default."""
    names = "model_size", "init_from", "lora", "context_length"  # other defaults follow from these
    usual = TrainConfig(**{name: record[name] for name in names})
    defaults = asdict(usual) | {name: getattr(TrainConfig(), name) for name in names}
    defaults["max_steps"] = usual.steps
    resolved = {
        "model_size": "tiny",
        "tokenizer": "bytes",
        "memory_budget": "auto",
        "optimizer_state": "float32",
    }
    return {
        name: value
        for name, value in record.items()
        if value not in (defaults[name], resolved.get(name, defaults[name]))
    }
