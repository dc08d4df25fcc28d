"""Decides all that a run needs before its data are read. Nothing later reads a flag's text or a
folder's headers.

Top to bottom: a step, for train.py and profile_memory.py; a run; its start, model and tokenizer;
the machine; the data.
"""

import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from os.path import exists
from pathlib import Path

import torch

from kernels.attention import KINDS
from kernels.attention.libraries import choose_backend
from kernels.compact_adamw import GROUP
from kernels.fp8 import check_fp8
from kernels.linear import PLAIN, Linear
from kernels.mixed import linear_maps
from kernels.parts import MixerKind
from model import GATES, MODEL_SIZES, ModelConfig
from training.checkpoint.carried import NOTHING, Carried, read_carried
from training.checkpoint.files import checkpoints, latest_checkpoint, tokenizer_of
from training.checkpoint.flags import CHECKPOINT_INTERVAL
from training.checkpoint.manifest import (
    settings_beside,
    verify_base,
    verify_checkpoint,
    verify_weights,
)
from training.checkpoint.pieces import Entry
from training.checkpoint.weights import Companions, find_weights, parameter_shapes, shape_of_weights
from training.data.chat import open_tokenizer as open_with_template
from training.data.loader import PackedLoader
from training.data.tokenizer import ByteTokenizer, FileTokenizer
from training.families.flags import EXPERTS_TARGETS, READ_TARGETS, TARGETS
from training.families.lora import (
    ADAPTER_CONFIG,
    ADAPTERS,
    FROZEN_BITS,
    Adapters,
    has_adapters,
    read_adapters,
    read_frozen_bits,
    targets_in,
    to_adapter_config,
)
from training.families.rope import extend
from training.families.trained import ALL, Trained, WithoutRouters
from training.flags import LARGE
from training.host.errors import UserError, program, refused_as_user_error
from training.host.files import read_json
from training.host.sizes import parse_bytes
from training.memory.execution import Execution
from training.memory.kinds import check_head_dim, kinds_of
from training.memory.machine import gpu_budget
from training.memory.step import Scoring
from training.objectives.choose import choose
from training.objectives.scored import Objective, scoring
from training.objectives.stored import Stored
from training.optim.flags import DEFAULT_STEPS
from training.optim.formats import frozen_format
from training.optim.quantized import GROUP as QUANTIZED_GROUP
from training.optim.quantized import check_library, is_quantized
from training.parallel.tensor import check_matrix_sharing
from training.parallel.ulysses import check_sharing
from training.parallel.world import World
from training.run.resume import Progress, Start, how_to_go_on, resume, start_from
from training.run.settings import StepFlags, TrainConfig, check_config

logger = logging.getLogger(__name__)
MANY_EPOCHS = 10  # a run of more is warned of
SHOWN_TOKENS = 5  # names of new tokens in a message


# A step


@dataclass(frozen=True)
class StepRecipe:
    """A training step as flags decide it, on any machine."""

    config: StepFlags  # the flags, with what a run inherits and fills in
    model: ModelConfig
    kinds: tuple[MixerKind, ...]  # how each layer attends
    trained: Trained  # the part of the model that is trained
    linear: Linear  # the maps of all blocks
    state_format: str  # format of the optimizer's state; "auto": a plan chooses
    impl: str  # Triton kernels or their references

    def execution(self, attention_backend: str) -> Execution:
        is_distilled = (
            getattr(self.config, "objective", None) == "distill"
        )  # their loss is always chunked
        return Execution(
            loss_impl="chunked" if is_distilled else self.config.loss_impl,
            attention_backend=attention_backend, kinds=self.kinds,
            linear=self.linear, frozen=frozen_format(self.config.lora_bits),
            state_format=self.state_format,
            impl=self.impl,
        )  # fmt: skip


def decide_step(config: StepFlags, model: ModelConfig, num_gpus: int) -> StepRecipe:
    """Returns what the flags decide of a step of `model`.

    Raises UserError for flags that do not fit the model's shape or the number of GPUs, whatever the
    machine.
    """
    kinds, trained, impl = (
        kinds_of(config, model),
        trained_of(config, model),
        getattr(config, "kernels", "auto"),
    )
    check_matrix_sharing(config.tensor_parallel_size, model)
    check_sharing(config.context_parallel_size, model, kinds, config.tensor_parallel_size)
    check_parts(config, model)
    check_lora_bits(config.lora_bits, model, num_gpus)
    linear = trained.linear(linear_maps(impl)[config.linear])
    return StepRecipe(
        config, model, kinds, trained, linear, state_format_of(config, model.hidden_size), impl
    )


def trained_of(config: StepFlags, model: ModelConfig) -> Trained:
    """Every weight, or the adapters of --lora and its flags. Raises UserError for other targets."""
    if config.freeze_routers and not model.has_experts:
        raise UserError("freeze_routers has no effect on a model without experts; drop it")
    if config.lora is None:
        return WithoutRouters() if config.freeze_routers else ALL
    own = targets_in(model)
    has = [name for name in TARGETS if name in own]
    given = "all-linear" if config.lora_targets is None else config.lora_targets
    linear = [name for name in has if name not in EXPERTS_TARGETS]
    targets = tuple(linear if given == "all-linear" else given.split(","))
    known = *TARGETS, *READ_TARGETS
    if missing := ", ".join(name for name in targets if name in known and name not in has):
        raise UserError(
            f"lora_targets {missing}: this model has {', '.join(has)}; give some of these"
        )
    alpha = getattr(
        config, "lora_alpha", 2.0 * config.lora
    )  # no flag of profile_memory.py, where it has no effect
    with refused_as_user_error("lora: "):
        return Adapters(config.lora, alpha, targets)


def check_parts(config: StepFlags, model: ModelConfig) -> None:
    """Refuse what mixtures of experts and gated delta nets do not have."""
    without: dict[str, tuple[object, str]] = {}
    if not all(kind.has_keys for kind in model.kinds):
        without["compile"] = False, "gated delta nets are not compiled"
    if model.has_experts:
        without |= {
            "linear": ("bf16", "experts multiply in bf16"),
            "compile": (False, "experts are not compiled"),
        }
    for name, (value, why) in without.items():
        if getattr(config, name, value) != value:
            raise UserError(
                f"{name} {getattr(config, name)} is not supported: {why}; give {name} {value}, or "
                "drop it"
            )


def check_lora_bits(bits: int, model: ModelConfig, num_gpus: int) -> None:
    """Refuse quantized weights on several GPUs, or with rows that are no whole groups."""
    if bits == 16:
        return
    if num_gpus > 1:
        raise UserError(
            f"lora_bits {bits} on {num_gpus} GPUs is not supported: FSDP2 shards bf16; give "
            "lora_bits 16"
        )
    for name, parameter in model.parameters().items():
        if (
            is_quantized(name, parameter.shape)
            and (columns := parameter.shape[-1]) % QUANTIZED_GROUP
        ):
            matrix = f"{name.removesuffix('.weight')} has {columns} columns"
            needs = f"lora_bits {bits} needs rows of whole groups of {QUANTIZED_GROUP}"
            raise UserError(f"{needs}, and {matrix}; give lora_bits 16")


def state_format_of(config: StepFlags, hidden_size: int) -> str:
    """--optimizer_state. Adapters have float32 state, as has a model whose rows are no whole
    groups.

    Raises UserError for compact state where there is none; a rule refuses it beside adapters.
    """
    if config.lora is None and hidden_size % GROUP == 0:
        return config.optimizer_state
    if config.lora is None and config.optimizer_state == "compact":
        rows = f"rows of {hidden_size}, which is no multiple of {GROUP}"
        raise UserError(f"optimizer_state compact has no effect on {rows}; drop it")
    return "float32"


def backend_of(config: StepFlags, device: torch.device) -> str:
    """Returns the kernel of --attention_backend on `device`, or raises UserError if the device
    lacks it."""
    with refused_as_user_error():
        return choose_backend(config.attention_backend, device)


def check_linear(recipe: StepRecipe, device: torch.device) -> None:
    if recipe.config.linear == PLAIN.name:
        return
    shard = recipe.model.shard(recipe.config.tensor_parallel_size)
    widths = {"head_dim": shard.attention.head_dim}  # heads of a step
    for i in range(shard.num_hidden_layers):
        for name, (rows, columns) in shard.maps(i).items():
            whose = f"of layer {i}'s {name}"
            widths |= {f"number of rows {whose}": rows, f"number of columns {whose}": columns}
    with refused_as_user_error(f"linear {recipe.config.linear}: "):
        check_fp8(device, widths)


# A run


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
        """Parts of the names of parameters that a run may add to the folder's weights."""
        return (GATES,) if self.adapters else (GATES, ADAPTERS)


@dataclass(frozen=True)
class Recipe(StepRecipe):
    """All that a run has decided before its data are read and its memory is planned."""

    config: TrainConfig
    memory_budget: str | None  # None: nothing is planned, as on a CPU
    host_budget: float | None  # bytes that each process may pin; None: a share of what is free
    save_interval: tuple[int, float]  # steps, seconds
    given: frozenset[str] = frozenset()  # names of the settings that flags and --config give
    declared_context: int = LARGE  # tokens of a text that the weights of --init_from are made for
    progress: Progress = field(default_factory=Progress)  # where the run starts
    checkpoint: Path | None = (
        None  # the run goes on from it; None: the run starts at its first step
    )
    source: Source | None = None  # None: weights are drawn
    weights: dict[str, Entry] = field(default_factory=dict)  # where the source has each weight
    carried: Carried = (
        NOTHING  # the part of the source that is not trained and goes into checkpoints
    )
    tokenizer: ByteTokenizer | FileTokenizer = field(default_factory=ByteTokenizer)

    @functools.cached_property
    def objective(self) -> Objective | None:
        """The objective of a step; None: the loss of the next tokens."""
        return choose(self.config, self.config.context_length)

    @property
    def only_shows(self) -> bool:
        """Whether a batch of a run that has not begun is shown: that needs no weights and no stored
        numbers."""
        return bool(self.config.show_batch) and self.checkpoint is None

    @property
    def scoring(self) -> Scoring:
        """The part of a step that the objective takes, for its plan."""
        if self.config.teacher_logprobs is not None:
            return Scoring(token_bytes=Stored.read(self.config.teacher_logprobs).word_bytes)
        return scoring(
            self.objective,
            isinstance(self.trained, Adapters) and not self.config.reference_logprobs,
        )

    def settings(self, max_steps: int, state_format: str) -> dict:
        """The settings by name, with what data and plan have settled: the last step and the format
        of the state."""
        return dataclasses.asdict(self.config) | {
            "max_steps": max_steps,
            "optimizer_state": state_format,
        }

    def companions(self) -> Companions:
        """Returns what is carried; adapters' configuration, and settings of config.json that go
        along with them."""
        if not isinstance(self.trained, Adapters):
            return Companions(carried=self.carried)
        assert self.source is not None, "adapters adapt something"
        base = self.source.base.absolute()
        content = json.dumps(to_adapter_config(self.trained, base), indent=2) + "\n"
        settings = settings_beside(self.trained, base) | {FROZEN_BITS: self.config.lora_bits}
        return Companions({ADAPTER_CONFIG: content.encode()}, settings, self.carried)


def recipe_of(config: TrainConfig, model: ModelConfig, world: World, **more) -> Recipe:
    """The recipe of a run of `model`, as `decide_step`; `more` has the fields of Recipe that have
    defaults."""
    return Recipe(
        **vars(decide_step(config, model, world.size)),
        memory_budget=resolve_memory_budget(config, world.device),
        host_budget=None
        if config.host_budget is None
        else parse_bytes(config.host_budget, "host_budget"),
        save_interval=parse_interval(config.checkpoint_interval or CHECKPOINT_INTERVAL),
        **more,
    )


def parse_interval(text: str) -> tuple[int, float]:
    """(steps, seconds) between checkpoints: "200" is (200, 0), "30min" is (0, 1800). Raises
    UserError for others."""
    match = re.fullmatch(r"(\d{1,9})|(\d{1,6}(?:\.\d{1,6})?)min", text)
    if match is None:
        raise UserError(
            f"checkpoint_interval must be a number of steps, or of minutes as 30min: got {text!r}"
        )
    return int(match[1] or 0), 60 * float(match[2] or 0)


def resolve_memory_budget(config: TrainConfig, device: torch.device) -> str | None:
    is_planned = device.type == "cuda" and not (config.gradient_checkpointing or config.compile)
    return config.memory_budget or "auto" if is_planned else None


def decide(given: dict, world: World) -> Recipe:
    """Decides where the run starts, and how; a resumed run goes on from the newest checkpoint
    without damage.

    Refusals that take seconds come before the checkpoint's bytes are compared. They are a
    UserError: settings that do not fit the model, the checkpoint or each other.

    Args:
        given: the settings that flags and --config give, by the names of TrainConfig's fields.
    """
    asked, passed_over = TrainConfig(**given), dict[Path, str]()
    while True:
        checkpoint = find_checkpoint(asked, passed_over)
        folder = checkpoint or asked.init_from
        source = Source.read(folder) if folder else None
        start = resume(checkpoint, given, world) if checkpoint else begin(asked, given, source)
        check_same_on_all_ranks({"the checkpoint to go on from": str(checkpoint)}, world)
        config, model = start.config, choose_model(start.config, checkpoint)
        declared = LARGE if checkpoint else model.max_position_embeddings
        model = replace(
            model, max_position_embeddings=max(model.max_position_embeddings, config.context_length)
        )
        recipe = recipe_of(
            config, model, world, given=frozenset(given), declared_context=declared,
            progress=start.progress,
            checkpoint=checkpoint, source=source,
        )  # fmt: skip
        if (
            source and source.adapters and isinstance(recipe.trained, Adapters)
        ):  # no flag says how they are joined
            recipe = replace(recipe, trained=replace(recipe.trained, joined=source.adapters.joined))
        whole = recipe.trained if recipe.trained.is_whole else ALL
        if source and checkpoint and recipe.trained != (source.adapters or whole):
            was = f"{checkpoint} was trained with {source.adapters or ALL}, not {recipe.trained}"
            raise UserError(f"{was}; drop what differs, or {start_from(checkpoint)}")
        config.tokenizer = choose_tokenizer(config, checkpoint)
        weights, carried = dict[str, Entry](), NOTHING
        if source and (checkpoint or not config.show_batch):  # a batch is shown without weights
            shapes = parameter_shapes(model)
            shapes |= recipe.trained.shapes(shapes)
            weights = find_weights(source.folder, shapes, may_lack=source.fresh)
            carried = read_carried(source.base)
            carried = carried if recipe.trained.is_whole else carried.beside_adapters()
            carried = carried.extended() if config.rope_scaling and not checkpoint else carried
        tokenizer = open_tokenizer(recipe, start.tokenizer)
        recipe = replace(recipe, weights=weights, carried=carried, tokenizer=tokenizer)
        if source and checkpoint:
            try:
                verify_checkpoint(checkpoint)  # reads every byte of the checkpoint
            except UserError as error:
                passed_over[checkpoint] = str(error)
                continue
            if source.adapters:
                verify_base(checkpoint, weights)
        for path, why in passed_over.items():
            logger.warning("passed over %s: %s", path, why)
        for line in start.changes:
            logger.info("%s", line)
        _say_what_is_left_out(recipe)
        return recipe


def _say_what_is_left_out(recipe: Recipe) -> None:
    """Says what the run does otherwise than its flags and weights let expect."""
    config, model = recipe.config, recipe.model
    if recipe.objective and model.router_aux_loss_coef:
        asked_for = "the auxiliary loss of experts, which config.json asks for"
        logger.warning("objective %s is minimised without %s", config.objective, asked_for)
    copies = {kind.name for kind in recipe.kinds if not kind.reads_prompts}
    if recipe.objective and copies:
        where = " and ".join(sorted(copies))
        logger.info(
            "objective: layers of %s copy prompts before answers, as docs/preferences.md says",
            where,
        )
    others = [f"lora_bits {config.lora_bits}"] * (config.lora_bits < 16)
    others += [f"linear {config.linear}"] * (recipe.linear.products[0] != PLAIN)
    if others and (config.reference_logprobs or config.old_logprobs):
        what = "are of 16-bit weights and products in bf16; this run's have"
        logger.warning(
            "objective: stored log-probabilities %s %s, and differ from them",
            what,
            ", ".join(others),
        )
    if config.lora_targets == "all-linear" and model.has_experts:
        every = ",".join(name for name in TARGETS if name in targets_in(model))
        logger.info(
            "lora: all-linear leaves out routers and experts; to adapt them, give --lora_targets "
            "%s",
            every,
        )


def check_same_on_all_ranks(ours: dict, world: World) -> None:
    """Refuse settings or data, by name, that differ from the main rank's."""
    for name, value in world.broadcast(ours).items():
        if ours[name] != value:
            raise UserError(
                f"{name} is {ours[name]} on rank {world.rank} and {value} on rank 0; start all "
                "ranks alike"
            )


# The start


def find_checkpoint(config: TrainConfig, passed_over: dict[Path, str]) -> Path | None:
    """The newest checkpoint in output_dir, to go on from; None: the run starts. `passed_over`: see
    `latest_checkpoint`.

    Reads small files, and no tensor.
    """
    found = checkpoints(Path(config.output_dir))
    if config.resume == "no":  # check_is_free refuses them, after what is wrong anywhere
        return None
    last = latest_checkpoint(Path(config.output_dir), passed_over) if found else None
    if found and last is None:
        raise UserError(
            f"no checkpoint in {config.output_dir} can be used; of the newest: "
            f"{passed_over[found[-1]]}"
        )
    if config.resume == "yes" and last is None:
        raise UserError(
            f"--resume: no checkpoint in {config.output_dir}; --resume auto starts a run all the "
            "same"
        )
    return last


def check_is_free(recipe: Recipe) -> None:
    """Refuse an output_dir with a run in it, unless that goes on.

    It comes after all that is wrong with flags, folders and the machine: the usual output_dir is
    taken from the second run on, and another one is not what somebody looks for who gave a wrong
    folder of weights.
    """
    found = checkpoints(Path(recipe.config.output_dir))
    if recipe.config.resume == "no" and found:
        raise UserError(f"{found[-1]} is already there: {how_to_go_on(found)}")


def verify_start(recipe: Recipe) -> None:
    """Compares the weights that a run starts from with their checksums: every byte is read."""
    if recipe.source and recipe.checkpoint is None:
        verify_weights(recipe.source.folder, recipe.weights)


def begin(asked: TrainConfig, given: dict, source: Source | None) -> Start:
    """Makes the start of a run at its first step, with the adapters of --init_from if it holds
    some.

    Raises UserError for flags that say otherwise, or do not fit the adapters.
    """
    filled: dict = {
        "max_steps": None if asked.epochs else DEFAULT_STEPS,
        "model_size": None if source else "tiny",
    }
    config = TrainConfig(
        **{**filled, **given, **(adapters_found(asked, given, source) if source else {})}
    )
    if config.lora is not None and source is None:
        raise UserError(
            "lora has no effect without init_from, which it adapts; drop it, or give that"
        )
    check_config(config, given, TrainConfig.rules)
    return Start(config, Progress(config.max_steps or LARGE, config.max_steps or LARGE))


def adapters_found(asked: TrainConfig, given: Iterable[str], source: Source) -> dict:
    """Settings that the adapters in a folder have; {} if it has none. Raises UserError if flags say
    otherwise."""
    if (found := source.adapters) is None:
        return {}
    if dropout := read_json(source.folder / ADAPTER_CONFIG).get("lora_dropout"):
        logger.info("adapters: lora_dropout %.20s of %s is left out", dropout, source.folder)
    objective = choose(asked, asked.context_length)
    if objective is not None and objective.needs_reference and not asked.reference_logprobs:
        logger.warning(
            "adapters: the reference is the base %s; to have those of %s in it, give "
            "--reference_logprobs of that",
            source.base, source.folder,
        )  # fmt: skip
    merge = f"{program()} -m training.export {source.folder} OUT --merge"
    if untrained := [name for name in found.targets if name in READ_TARGETS]:
        has = (
            f"{source.folder} has adapters of {', '.join(untrained)}, which are read and not "
            "trained"
        )
        raise UserError(f"{has}; merge them first: {merge}")
    own: dict = {
        "lora": found.rank,
        "lora_alpha": found.alpha,
        "lora_targets": ",".join(found.targets),
    }
    for name, value in own.items():
        said = getattr(asked, name)
        if name in given and said == "all-linear":
            every = trained_of(replace(asked, lora=found.rank), shape_of_weights(source.folder))
            said = ",".join(every.targets) if isinstance(every, Adapters) else said
        if name in given and said != value:
            theirs = f"{name} {getattr(asked, name)}: the adapters of {source.folder} have {value}"
            raise UserError(f"{theirs}; drop it, or merge them first: {merge}")
    if "lora_bits" not in given:
        own["lora_bits"] = source.frozen_bits
        if source.frozen_bits < 16:
            logger.info(
                "adapters: lora_bits %d, as those of %s were trained",
                source.frozen_bits,
                source.folder,
            )
    elif asked.lora_bits != source.frozen_bits:
        changed = source.frozen_bits, asked.lora_bits
        logger.warning(
            "adapters: trained beside %d bits per weight, and from here on beside %d", *changed
        )
    return own


# The model


def shape_with(attention_type: str, size: ModelConfig) -> ModelConfig:
    """Returns a size of model with the parameters of --attention_type, where that kind has some."""
    kind = KINDS[attention_type]
    if kind.gates_per_head and not all(own.has_keys for own in size.kinds):
        raise UserError(
            f"attention_type {attention_type} is not supported with gated delta nets; use sparse, "
            "or full"
        )
    return size.with_kinds(kind()) if kind.gates_per_head else size


def choose_model(config: TrainConfig, resumed: Path | None = None) -> ModelConfig:
    """The model_size's shape, or the one that the weights to start from declare, extended as
    --rope_scaling says.

    Args:
        resumed: the checkpoint to go on from; None: the run starts, from the weights of --init_from
        if it has them.
    """
    size = MODEL_SIZES[config.model_size or "tiny"]
    if (folder := resumed or config.init_from) is None:
        return replace(
            shape_with(config.attention_type, size), max_position_embeddings=config.context_length
        )
    shape = shape_of_weights(folder)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers") if config.model_size else ():
        if getattr(shape, name) != getattr(size, name):
            has = (
                f"it has {name} {getattr(shape, name)}, model_size {config.model_size} has "
                f"{getattr(size, name)}"
            )
            raise UserError(f"{folder} is of another size: {has}; drop model_size, to take theirs")
    shape = _with_gates(shape, config, folder, resumed)
    return shape if config.rope_scaling is None else _extended(shape, config.rope_scaling, resumed)


def _with_gates(
    shape: ModelConfig, config: TrainConfig, folder: str | Path, resumed: Path | None
) -> ModelConfig:
    """The shape that a folder declares, with gates of the asked kind of attention if that kind has
    some."""
    trained, asked = shape.kinds[0], KINDS[config.attention_type]
    if bool(trained.gates_per_head) == bool(asked.gates_per_head):
        return shape
    if trained.gates_per_head:
        own = f"attention_type {trained.name}, whose gates attention_type {asked.name} would drop"
        raise UserError(
            f"{folder} was trained with {own}; give --attention_type {trained.name}, or other "
            "weights"
        )
    if resumed:
        was = f"{folder} was trained without attention_type {asked.name}"
        raise UserError(f"{was}; to turn it into that, {start_from(folder)}")
    if any(kind.reach is not None for kind in shape.kinds):
        why = (
            f"would take the place of the windows of {folder}; use sparse, which leaves windows "
            "alone, or full"
        )
        raise UserError(f"attention_type {asked.name} {why}")
    if config.lora is not None:
        why = f"{folder} has no gates of it, which would stay random"
        cure = "train all weights, or give another attention_type"
        raise UserError(f"lora with attention_type {asked.name}: {why}; {cure}")
    shape = shape_with(asked.name, shape)
    logger.info(
        "attention: %s has no gates of %s; they are initialised, near 1/2", folder, asked.name
    )
    return shape


def _extended(shape: ModelConfig, rope_scaling: str, resumed: Path | None) -> ModelConfig:
    """The shape with its context extended; a resumed run's has been, and must be as --rope_scaling
    says."""
    extended, found = extend(shape, rope_scaling), shape.rope_scaling
    if resumed and extended.rope_scaling != found:
        raise UserError(
            f"rope_scaling {rope_scaling}: {resumed} was trained with {found}; drop it, or start "
            "afresh"
        )
    return shape if resumed else extended


# The tokenizer


def choose_tokenizer(config: TrainConfig, checkpoint: Path | None) -> str:
    """--tokenizer, or the checkpoint's copy if that file has gone; else the tokenizer of
    --init_from, or bytes."""
    if checkpoint and config.tokenizer not in (None, "bytes") and not exists(config.tokenizer):
        own = checkpoint / "tokenizer.json"
        return str(own if own.is_file() else config.tokenizer)
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer or "bytes"
    return tokenizer_of(Path(config.init_from))


def open_tokenizer(recipe: Recipe, identity: str | None) -> ByteTokenizer | FileTokenizer:
    """Opens the tokenizer of the run, with its chat template.

    `identity` is the tokenizer's that a resumed run was trained with. Raises UserError if the
    tokenizer is another one, or if tokens of the chat template would not be trained.
    """
    config, checkpoint, template = recipe.config, recipe.checkpoint, recipe.config.chat_template
    if template not in (None, "chatml") and checkpoint and not exists(template):
        template = str(checkpoint / "chat_template.jinja")
    tokenizer = open_with_template(config.tokenizer, template)
    if template is not None and tokenizer.added_for_chats:
        _check_are_trained(config, recipe.model.vocab_size, tokenizer)
    if checkpoint and identity != tokenizer.identity:
        was = f"{checkpoint} was trained with tokenizer {str(identity)[:12]}"
        found = (
            f"{tokenizer.name} is {tokenizer.identity[:12]} (first digits of the files' SHA-256)"
        )
        raise UserError(f"cannot resume: {was}, {found}; give that --tokenizer")
    return tokenizer


def _check_are_trained(config: TrainConfig, vocab_size: int, tokenizer: FileTokenizer) -> None:
    """Refuse tokens that a chat template added, where no row of the embedding is trained for
    them."""
    added = tokenizer.added_for_chats
    names = ", ".join(added[:SHOWN_TOKENS]) + f" and {len(added) - SHOWN_TOKENS} more" * (
        len(added) > SHOWN_TOKENS
    )
    needs = (
        f"chat_template {config.chat_template} needs the tokens {names}, which {tokenizer.name} "
        "lacks"
    )
    if tokenizer.vocab_size > vocab_size:
        why = f"the model's vocab_size {vocab_size} has no room for {tokenizer.vocab_size} ids"
        raise UserError(
            f"{needs}: {why}; give a template of plain words or of the tokenizer's tokens"
        )
    if config.lora is not None:
        raise UserError(
            f"{needs}: adapters would not train their embeddings; drop lora, or give another "
            "template"
        )
    logger.info("chat: new tokens %s: the embedding's rows of their ids are trained", names)


# The machine, and the data


def check_machine(recipe: Recipe, world: World) -> None:
    """Refuse what this machine cannot run, and a memory budget that is not free, before anything
    takes time."""
    config, device = recipe.config, world.device
    if device.type == "cuda" and config.kernels == "torch" and recipe.memory_budget is not None:
        raise UserError(
            "kernels torch takes more memory than plans count; use auto, or "
            "--gradient_checkpointing"
        )
    for name in ("memory_budget", "host_budget"):
        if device.type != "cuda" and getattr(config, name) is not None:
            raise UserError(f"{name} has no effect on a CPU; drop it")
    if config.collective_timeout is not None and world.size == 1:
        raise UserError(
            "collective_timeout has no effect on one process, which waits for nobody; drop it"
        )
    if config.kernels == "triton" and device.type != "cuda":
        raise UserError('kernels "triton" needs a CUDA GPU; use auto')
    if config.kernels != "torch":
        check_head_dim(recipe.kinds, recipe.model.attention.head_dim, device)
    backend_of(config, device)  # refuses a backend that is not there
    check_linear(recipe, device)
    if config.lora_bits < 16:
        check_library(f"lora_bits {config.lora_bits}")
    if recipe.memory_budget is not None:
        gpu_budget(recipe.memory_budget, device)


def count_steps(recipe: Recipe, loader: PackedLoader) -> Progress:
    """Returns the start with the steps that epochs need, and logs how many epochs the run makes.

    An epoch is `loader.sequences_per_epoch` sequences of the loader's order. The steps left are
    counted from its position, so that ranks, batch_size and gradient_accumulation_steps may change
    at a resume. Raises UserError if no step is left, or for settings that do not fit the number of
    steps.
    """
    config, progress, per_epoch = recipe.config, recipe.progress, loader.sequences_per_epoch
    per_step = config.batch_size * config.gradient_accumulation_steps * loader.world_size
    if config.epochs is not None:
        # The decimal number that was given: 0.1 epochs of 30 sequences are 3 sequences, which as
        # floats are above 3.
        left = Fraction(str(config.epochs)) * per_epoch - loader.next_sequence
        max_steps = progress.step + max(0, math.ceil(left / per_step))
        if max_steps == progress.step and config.resume == "yes":
            seen = f"{loader.epoch:.4g} epochs are behind it"
            raise UserError(
                f"{recipe.checkpoint}: {seen}, epochs is {config.epochs:g}; raise epochs to go on"
            )
        if max_steps > LARGE:
            raise UserError(
                f"epochs {config.epochs:g} are {max_steps:,} steps, more than {LARGE:,}; lower it"
            )
        if recipe.checkpoint and max_steps != progress.cosine_steps:
            logger.info(
                "learning rate: its cosine ends at step %s, where the epochs do", f"{max_steps:,}"
            )
        progress = replace(progress, max_steps=max_steps, cosine_steps=max_steps)
        check_config(replace(config, max_steps=max_steps), recipe.given)
    epochs = loader.epoch + (progress.max_steps - progress.step) * per_step / per_epoch
    count = f"{epochs:,.2f}" if epochs >= 0.1 else f"{epochs:.2g}"
    logger.info(
        "data: %s steps make %s epochs of %s sequences",
        f"{progress.max_steps:,}",
        count,
        f"{per_epoch:,}",
    )
    if epochs > MANY_EPOCHS:
        logger.warning(
            "data: the model sees each text %.0f times, and soon learns it by heart; give more "
            "--data, or --epochs 3",
            epochs,
        )
    if (steps := progress.cosine_steps) < config.warmup_steps:
        end = (
            f"within a warm-up of {config.warmup_steps:,}, at {steps / config.warmup_steps:.0%} of "
            "the peak"
        )
        logger.warning(
            "learning rate: %s steps end %s; give --warmup_steps %d", f"{steps:,}", end, steps // 10
        )
    return progress
