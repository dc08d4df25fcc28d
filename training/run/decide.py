"""Decides all that a run needs before its data are read, and refuses what does not fit.

Nothing later reads a flag's text or a folder's headers. Top to bottom: the launch, before processes
meet; a run; its start; the model and the tokenizer.
"""

import logging
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from os.path import exists
from pathlib import Path

from kernels.linear import PLAIN
from model import MODEL_SIZES, ModelConfig
from training.checkpoint.carried import NOTHING, Carried, read_carried
from training.checkpoint.decide import decide_saving
from training.checkpoint.files import checkpoints, latest_checkpoint, tokenizer_of
from training.checkpoint.manifest import verify_base, verify_checkpoint
from training.checkpoint.pieces import Entry
from training.checkpoint.weights import find_weights, shape_of_weights
from training.data.decide import (
    Tokenizer,
    check_new_tokens,
    check_tokenizer,
    decide_data,
    open_tokenizer,
)
from training.data.tokenizer import FileTokenizer
from training.families.decide import (
    Source,
    adapter_settings,
    check_size,
    extended,
    shape_with,
    shape_with_gates,
    start_from,
    warn_of_dropout,
)
from training.families.flags import TARGETS
from training.families.lora import Adapters, targets_in
from training.families.trained import ALL, Trained
from training.flags import LARGE
from training.host.errors import UserError
from training.host.sizes import parse_bytes
from training.memory.decide import decide_memory_budget, decide_step
from training.objectives.decide import choose, decide_aim
from training.optim.decide import decide_optim
from training.optim.flags import DEFAULT_STEPS
from training.parallel.world import World, check_same_on_all_ranks
from training.run.metrics import TRACKERS
from training.run.recipe import Outputs, Recipe, Start
from training.run.resume import (
    DROPPED_TO_GO_ON,
    NOT_INHERITED,
    Resolved,
    parallel_sizes_of,
    resume,
)
from training.run.schedule import Progress, Schedule
from training.run.settings import TrainConfig, check_config

logger = logging.getLogger(__name__)


# The launch


@dataclass(frozen=True)
class Launch:
    """Settings that a run knows before its processes meet."""

    flag_values: dict  # settings by the names of TrainConfig's fields, with the sizes of the mesh
    mesh: dict[str, int]  # sizes of the mesh, as `join_world` takes them
    device: str
    output_dir: Path
    log_file: str | None
    only_shows: bool  # a batch is shown, and nothing is written


def decide_launch(flag_values: dict) -> Launch:
    """Checks the settings that flags and --config give, by the names of TrainConfig's fields."""
    flags = TrainConfig(**flag_values)
    check_config(flags, flag_values)
    mesh = parallel_sizes_of(flag_values)
    return Launch(
        {**flag_values, **mesh},
        mesh,
        flags.device,
        Path(flags.output_dir),
        flags.log_file,
        bool(flags.show_batch),
    )


# A run


def decide(flag_values: dict, world: World) -> Recipe:
    """Decides where the run starts, and how; a resumed run goes on from the newest checkpoint
    without damage.

    Refusals that take seconds come before the checkpoint's bytes are compared. They are a
    UserError: settings that do not fit the model, the checkpoint or each other.

    Args:
        flag_values: settings that flags and --config give, by names of TrainConfig's fields.
    """
    flags, passed_over = TrainConfig(**flag_values), dict[Path, str]()
    while True:
        checkpoint = find_checkpoint(flags, passed_over)
        recipe, changes = decide_from(checkpoint, flags, flag_values, world)
        if checkpoint is None:
            break
        try:
            verify_checkpoint(checkpoint)  # reads every byte of the checkpoint
        except UserError as error:
            passed_over[checkpoint] = str(error)
            continue
        source = recipe.start.source
        if source and source.adapters:
            verify_base(checkpoint, recipe.start.weights)
        break
    for path, why in passed_over.items():
        logger.warning("passed over %s: %s", path, why)
    for line in changes:
        logger.info("%s", line)
    _say_what_is_left_out(recipe)
    return recipe


def decide_from(
    checkpoint: Path | None, flags: TrainConfig, flag_values: dict, world: World
) -> tuple[Recipe, list[str]]:
    """Returns the recipe of a run that goes on from a checkpoint, or starts; and a line for each
    setting that is not what it was."""
    folder = checkpoint or flags.init_from
    source = Source.read(folder) if folder else None
    if checkpoint:
        resolved = resume(checkpoint, flag_values, world)
    else:
        resolved = begin(flags, flag_values, source)
    check_same_on_all_ranks({"the checkpoint to go on from": str(checkpoint)}, world)
    config = resolved.config
    shape = choose_model(config, checkpoint)
    longest = max(shape.max_position_embeddings, config.context_length)
    start = Start(
        resolved.progress,
        checkpoint,
        source,
        declared_context=LARGE if checkpoint else shape.max_position_embeddings,
        extends_context=config.rope_scaling is not None,
        seed=config.seed,
    )
    recipe = recipe_of(
        config,
        replace(shape, max_position_embeddings=longest),
        world,
        start,
        frozenset(flag_values),
    )
    recipe = replace(recipe, trained=check_trained(recipe.trained, source, checkpoint))
    config.tokenizer = choose_tokenizer(config, checkpoint)
    start = replace(start, **weights_of(recipe))
    tokenizer = tokenizer_of_run(config, recipe.model.vocab_size, checkpoint, resolved.tokenizer)
    recipe = replace(recipe, start=start, tokenizer=tokenizer, settings=asdict(config))
    return recipe, resolved.changes


def recipe_of(
    config: TrainConfig,
    model: ModelConfig,
    world: World,
    start: Start | None = None,
    flag_names: frozenset[str] = frozenset(),
) -> Recipe:
    """Returns the recipe of a run of `model`, as `decide_step`.

    Args:
        flag_names: names of the settings that flags and --config give.
    """
    start = start or Start(seed=config.seed)
    step = decide_step(config, model, world.size)
    host_budget = None
    memory_budget = decide_memory_budget(config, world.device)
    if config.host_budget is not None:
        host_budget = parse_bytes(config.host_budget, "host_budget")
    for_gpus = [
        name for name in ("memory_budget", "host_budget") if getattr(config, name) is not None
    ]
    trackers = {name: value for name in TRACKERS if (value := getattr(config, name))}
    assert config.validation_sequences is not None, "TrainConfig fills it in"
    return Recipe(
        **vars(step),
        model_name=config.model_size or model.model_type,
        attention_type=config.attention_type,
        memory_budget=memory_budget,
        host_budget=host_budget,
        recomputes_blocks=config.gradient_checkpointing,
        compiles_blocks=config.compile,
        for_gpus=tuple(for_gpus),
        wait_minutes=config.collective_timeout,
        aim=decide_aim(config, config.context_length, config.lora is not None),
        data=decide_data(
            config,
            seed=config.seed,
            batch=config.lengths,
            validation_sequences=config.validation_sequences,
            needs_chats="chat_reasoning" in flag_names,
            is_resumed=start.checkpoint is not None,
        ),
        optim=decide_optim(config),
        schedule=decide_schedule(config, flag_names),
        saving=decide_saving(config),
        outputs=Outputs(Path(config.output_dir), config.resume != "no", trackers),
        start=start,
        settings=asdict(config),
        flags_to_go_on=flags_to_go_on(config, flag_names),
    )


def decide_schedule(config: TrainConfig, flag_names: frozenset[str]) -> Schedule:
    assert config.validation_sequences is not None, "TrainConfig fills it in"
    return Schedule(
        config.epochs,
        config.steps,
        config.warmup_steps,
        config.validation_interval,
        config.validation_sequences,
        config.sample_tokens,
        flag_names,
        must_go_on=config.resume == "yes",
    )


def flags_to_go_on(config: TrainConfig, flag_names: Iterable[str]) -> tuple[str, ...]:
    """Returns the words of the flags that go on with a run, beside --resume: those that were given
    and that a checkpoint does not have."""
    kept = [name for name in NOT_INHERITED if name in flag_names and name not in DROPPED_TO_GO_ON]
    values = [shlex.quote(str(getattr(config, name))) for name in kept]
    return tuple(word for name, value in zip(kept, values) for word in (f"--{name}", value))


def _say_what_is_left_out(recipe: Recipe) -> None:
    """Says what the run does otherwise than its flags and weights let expect."""
    model, aim = recipe.model, recipe.aim
    if recipe.objective and model.router_aux_loss_coef:
        loss = "the auxiliary loss of experts, which config.json asks for"
        logger.warning("objective %s is minimised without %s", aim.name, loss)
    copies = {kind.name for kind in recipe.kinds if not kind.reads_prompts}
    if recipe.objective and copies:
        where = " and ".join(sorted(copies))
        logger.info(
            "objective: layers of %s copy prompts before answers, as docs/preferences.md says",
            where,
        )
    differences = []
    if recipe.frozen_bits < 16:
        differences.append(f"lora_bits {recipe.frozen_bits}")
    if recipe.linear.products[0] != PLAIN:
        differences.append(f"linear {recipe.linear_name}")
    if differences and ("reference" in aim.folders or "old" in aim.folders):
        what = "are of 16-bit weights and products in bf16; this run's have"
        logger.warning(
            "objective: stored log-probabilities %s %s, and differ from them",
            what,
            ", ".join(differences),
        )
    if recipe.settings["lora_targets"] == "all-linear" and model.has_experts:
        in_model = targets_in(model)
        every = ",".join(name for name in TARGETS if name in in_model)
        logger.info(
            "lora: all-linear leaves out routers and experts; "
            "to adapt them, give --lora_targets %s",
            every,
        )


# The start


def find_checkpoint(config: TrainConfig, passed_over: dict[Path, str]) -> Path | None:
    """The newest checkpoint in output_dir, to go on from; None: the run starts. `passed_over`: see
    `latest_checkpoint`.

    Reads small files, and no tensor.
    """
    folder = Path(config.output_dir)
    paths = checkpoints(folder)
    if config.resume == "no":  # check_is_free refuses them, after what is wrong anywhere
        return None
    last = latest_checkpoint(folder, passed_over) if paths else None
    if paths and last is None:
        raise UserError(
            f"no checkpoint in {folder} can be used; of the newest: {passed_over[paths[-1]]}"
        )
    if config.resume == "yes" and last is None:
        raise UserError(
            f"--resume: no checkpoint in {folder}; --resume auto starts a run all the same"
        )
    return last


def begin(flags: TrainConfig, flag_values: dict, source: Source | None) -> Resolved:
    """Resolves the flags of a run at its first step, with the adapters of --init_from if it holds
    some.

    Raises UserError for flags that say otherwise, or do not fit the adapters.
    """
    filled: dict = {
        "max_steps": None if flags.epochs else DEFAULT_STEPS,
        "model_size": None if source else "tiny",
    }
    adapters = adapters_found(flags, flag_values, source) if source else {}
    config = TrainConfig(**{**filled, **flag_values, **adapters})
    if config.lora is not None and source is None:
        raise UserError(
            "lora has no effect without init_from, which it adapts; drop it, or give that"
        )
    check_config(config, flag_values, TrainConfig.rules)
    max_steps = config.max_steps or LARGE
    return Resolved(config, Progress(max_steps, max_steps))


def adapters_found(flags: TrainConfig, flag_names: Iterable[str], source: Source) -> dict:
    """Settings that the adapters in a folder have; {} if it has none.

    Raises UserError if flags say otherwise.
    """
    if source.adapters is None:
        return {}
    warn_of_dropout(source)
    objective = choose(flags, flags.context_length)
    if objective is not None and objective.needs_reference and not flags.reference_logprobs:
        logger.warning(
            "adapters: the reference is the base %s; to have those of %s in it, give "
            "--reference_logprobs of that",
            source.base,
            source.folder,
        )
    shape = None
    if "lora_targets" in flag_names and flags.lora_targets == "all-linear":
        shape = shape_of_weights(source.folder)
    return adapter_settings(flags, flag_names, source, shape)


def check_trained(trained: Trained, source: Source | None, checkpoint: Path | None) -> Trained:
    """Returns what is trained, with adapters joined as the source's are, which no flag says.

    Raises UserError if the checkpoint was trained with something else.
    """
    if source is None:
        return trained
    if source.adapters and isinstance(trained, Adapters):
        trained = replace(trained, joined=source.adapters.joined)
    before = source.adapters or (trained if trained.is_whole else ALL)
    if checkpoint and trained != before:
        was = f"{checkpoint} was trained with {source.adapters or ALL}, not {trained}"
        raise UserError(f"{was}; drop what differs, or {start_from(checkpoint)}")
    return trained


def weights_of(recipe: Recipe) -> dict:
    """Returns the fields of `Start` that the headers of its source say: where each weight is, and
    what is carried."""
    start, trained = recipe.start, recipe.trained
    weights: dict[str, Entry] = {}
    carried: Carried = NOTHING
    # A batch is shown without weights.
    if start.source and not recipe.data.only_shows:
        parameters = recipe.model.parameters()
        parameters |= trained.added(parameters)
        weights = find_weights(start.source.folder, parameters, may_lack=start.source.fresh)
        carried = read_carried(start.source.base)
        if not trained.is_whole:
            carried = carried.beside_adapters()
        if start.extends_context and not start.checkpoint:
            carried = carried.extended()
    return {"weights": weights, "carried": carried}


# The model, and the tokenizer


def choose_model(config: TrainConfig, resumed: Path | None = None) -> ModelConfig:
    """The model_size's shape, or the one that the weights to start from declare, extended as
    --rope_scaling says.

    Args:
        resumed: the checkpoint to go on from; None: the run starts, from the weights of --init_from
            if it has them.
    """
    size = MODEL_SIZES[config.model_size or "tiny"]
    folder = resumed or config.init_from
    if folder is None:
        shape = shape_with(config.attention_type, size)
        return replace(shape, max_position_embeddings=config.context_length)
    shape = shape_of_weights(folder)
    if config.model_size:
        check_size(shape, size, config.model_size, folder)
    shape = shape_with_gates(
        shape, config.attention_type, folder, resumed is not None, config.lora is not None
    )
    return shape if config.rope_scaling is None else extended(shape, config.rope_scaling, resumed)


def choose_tokenizer(flags, checkpoint: Path | None) -> str:
    """--tokenizer, or the checkpoint's copy if that file has gone; else the tokenizer of
    --init_from, or bytes."""
    if checkpoint and flags.tokenizer not in (None, "bytes") and not exists(flags.tokenizer):
        copy = checkpoint / "tokenizer.json"
        return str(copy if copy.is_file() else flags.tokenizer)
    if flags.tokenizer is not None or flags.init_from is None:
        return flags.tokenizer or "bytes"
    return tokenizer_of(Path(flags.init_from))


def tokenizer_of_run(
    config: TrainConfig, vocab_size: int, checkpoint: Path | None, identity: str | None
) -> Tokenizer:
    """Opens the tokenizer of the run, with its chat template.

    `identity` is the tokenizer's that a resumed run was trained with. Raises UserError if the
    tokenizer is another one, or if tokens of the chat template would not be trained.
    """
    tokenizer = open_tokenizer(config.tokenizer, config.chat_template, checkpoint)
    if (
        isinstance(tokenizer, FileTokenizer)
        and config.chat_template is not None
        and tokenizer.added_for_chats
    ):
        check_new_tokens(tokenizer, config.chat_template, vocab_size, config.lora is not None)
    if checkpoint:
        check_tokenizer(tokenizer, checkpoint, identity)
    return tokenizer
