"""Decides the model of a run: its shape, the folder of weights that it starts from, and the part of
it that is trained."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernels.attention import KINDS
from model import ModelConfig
from training.families.flags import EXPERTS_TARGETS, READ_TARGETS, TARGETS, WeightFlags
from training.families.lora import (
    ADAPTER_CONFIG,
    Adapters,
    has_adapters,
    read_adapters,
    read_frozen_bits,
    targets_in,
)
from training.families.rope import extend
from training.families.trained import ALL, Trained, WithoutRouters
from training.host.errors import UserError, program, refused_as_user_error
from training.host.files import read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The folder of weights that a run starts from."""

    folder: Path
    base: Path  # the folder of whole weights: another one if the folder holds adapters
    adapters: Adapters | None = None  # None: the folder holds whole weights
    frozen_bits: int = 16  # bits per element of the frozen matrices beside which they were trained

    @classmethod
    def read(cls, folder: str | Path) -> "Source":
        """Reads what adapter_config.json says, if there is one."""
        if not has_adapters(folder):
            return cls(Path(folder), Path(folder))
        adapters, base = read_adapters(folder)
        return cls(Path(folder), base, adapters, read_frozen_bits(folder))

    @property
    def fresh(self) -> tuple[str, ...]:
        """Roles of parameters that the folder may lack; they are initialised."""
        return ("gate",) if self.adapters else ("gate", "adapter")


def start_from(checkpoint: str | Path) -> str:
    return f"start from its weights with --init_from {checkpoint} and another --output_dir"


# The part that is trained


def decide_trained(flags: WeightFlags, model: ModelConfig) -> Trained:
    """Returns what is trained: all weights, or the adapters of --lora and its flags.

    Raises UserError for other targets.
    """
    if flags.freeze_routers and not model.has_experts:
        raise UserError("freeze_routers has no effect on a model without experts; drop it")
    if flags.lora is None:
        return WithoutRouters() if flags.freeze_routers else ALL
    targets = decide_targets(flags.lora_targets, model)
    # profile_memory.py has no lora_alpha, which would have no effect there.
    alpha = getattr(flags, "lora_alpha", 2.0 * flags.lora)
    with refused_as_user_error("lora: "):
        return Adapters(flags.lora, alpha, targets)


def decide_targets(text: str | None, model: ModelConfig) -> tuple[str, ...]:
    """Returns the targets that --lora_targets names, or all linear maps but a mixture's for
    "all-linear" and None."""
    in_model = targets_in(model)
    possible = [name for name in TARGETS if name in in_model]
    if text in (None, "all-linear"):
        return tuple(name for name in possible if name not in EXPERTS_TARGETS)
    targets = tuple(text.split(","))
    known = *TARGETS, *READ_TARGETS
    if missing := ", ".join(name for name in targets if name in known and name not in possible):
        raise UserError(
            f"lora_targets {missing}: this model has {', '.join(possible)}; give some of these"
        )
    return targets


def adapter_settings(
    flags: WeightFlags, flag_names: Iterable[str], source: Source, shape: ModelConfig | None
) -> dict:
    """Returns the settings that the adapters of a source have; {} if it has none.

    Raises UserError if flags say otherwise, or for adapters that are not trained.

    Args:
        flag_names: names of the flags that were given.
        shape: the shape of the source; None: it is not needed, as --lora_targets names targets.
    """
    adapters = source.adapters
    if adapters is None:
        return {}
    merge = f"{program()} -m training.export {source.folder} OUT --merge"
    if untrained := [name for name in adapters.targets if name in READ_TARGETS]:
        has = (
            f"{source.folder} has adapters of {', '.join(untrained)}, "
            "which are read and not trained"
        )
        raise UserError(f"{has}; merge them first: {merge}")
    settings: dict = {
        "lora": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_targets": ",".join(adapters.targets),
    }
    for name, value in settings.items():
        flag = getattr(flags, name)
        is_same = flag == value
        if flag == "all-linear" and shape is not None:
            is_same = ",".join(decide_targets(flag, shape)) == value
        if name in flag_names and not is_same:
            theirs = f"{name} {flag}: the adapters of {source.folder} have {value}"
            raise UserError(f"{theirs}; drop it, or merge them first: {merge}")
    if "lora_bits" not in flag_names:
        settings["lora_bits"] = source.frozen_bits
    _say_bits(settings.get("lora_bits"), flags.lora_bits, source)
    return settings


def warn_of_dropout(source: Source) -> None:
    if source.adapters is None:
        return
    if dropout := read_json(source.folder / ADAPTER_CONFIG).get("lora_dropout"):
        logger.info("adapters: lora_dropout %.20s of %s is left out", dropout, source.folder)


def _say_bits(inherited: int | None, flag: int, source: Source) -> None:
    if inherited is None and flag != source.frozen_bits:
        logger.warning(
            "adapters: trained beside %d bits per weight, and from here on beside %d",
            source.frozen_bits,
            flag,
        )
    elif inherited is not None and inherited < 16:
        logger.info("adapters: lora_bits %d, as those of %s were trained", inherited, source.folder)


# The shape


def shape_with(attention_type: str, size: ModelConfig) -> ModelConfig:
    """Returns a size of model with the parameters of --attention_type, where that kind has some."""
    kind = KINDS[attention_type]
    if not kind.gates_per_head:
        return size
    if not all(layer_kind.has_keys for layer_kind in size.kinds):
        raise UserError(
            f"attention_type {attention_type} is not supported with gated delta nets; "
            "use sparse, or full"
        )
    return size.with_kinds(kind())


def check_size(declared: ModelConfig, size: ModelConfig, name: str, folder: str | Path) -> None:
    """Refuses weights whose shape is not the size of --model_size."""
    for field in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if getattr(declared, field) != getattr(size, field):
            has = (
                f"it has {field} {getattr(declared, field)}, model_size {name} has "
                f"{getattr(size, field)}"
            )
            raise UserError(f"{folder} is of another size: {has}; drop model_size, to take theirs")


def shape_with_gates(
    shape: ModelConfig,
    attention_type: str,
    folder: str | Path,
    is_resumed: bool,
    has_adapters: bool,
) -> ModelConfig:
    """Returns the shape that a folder declares, with gates if --attention_type has some."""
    trained, requested = shape.kinds[0], KINDS[attention_type]
    if bool(trained.gates_per_head) == bool(requested.gates_per_head):
        return shape
    if trained.gates_per_head:
        dropped = (
            f"attention_type {trained.name}, whose gates attention_type {requested.name} would drop"
        )
        raise UserError(
            f"{folder} was trained with {dropped}; "
            f"give --attention_type {trained.name}, or other weights"
        )
    if is_resumed:
        was = f"{folder} was trained without attention_type {requested.name}"
        raise UserError(f"{was}; to turn it into that, {start_from(folder)}")
    if any(kind.reach is not None for kind in shape.kinds):
        why = (
            f"would take the place of the windows of {folder}; use sparse, which leaves windows "
            "alone, or full"
        )
        raise UserError(f"attention_type {requested.name} {why}")
    if has_adapters:
        why = f"{folder} has no gates of it, which would stay random"
        cure = "train all weights, or give another attention_type"
        raise UserError(f"lora with attention_type {requested.name}: {why}; {cure}")
    shape = shape_with(requested.name, shape)
    logger.info(
        "attention: %s has no gates of %s; they are initialised, near 1/2", folder, requested.name
    )
    return shape


def extended(shape: ModelConfig, rope_scaling: str, resumed: Path | None) -> ModelConfig:
    """Returns the shape with its context extended as --rope_scaling says.

    The shape of a resumed run has been extended. Raises UserError if it was extended otherwise.
    """
    longer = extend(shape, rope_scaling)
    if resumed is None:
        return longer
    if longer.rope_scaling != shape.rope_scaling:
        raise UserError(
            f"rope_scaling {rope_scaling}: {resumed} was trained with {shape.rope_scaling}; "
            "drop it, or start afresh"
        )
    return shape
