"""Builds what a step needs: a model, its optimizer and its memory plan, for train.py, profile_memory.py and benchmarks.

Top to bottom: the machine and the model's shape; the plan; building.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import logging
from pathlib import Path

import torch
import torch.distributed as dist

from kernels.attention import KINDS
from kernels.attention.full import TESTED_FLASH_ATTN_4, choose_backend
from kernels.compact_adamw import GROUP
from kernels.fp8 import FP8, check_fp8
from kernels.linear import PLAIN
from kernels.lora import LORA, LoRA
from kernels.parts import AttentionKind, Linear
from model import GATES, MODEL_SIZES, ModelConfig, Share, Transformer
from training.checkpoint.files import restore_rng
from training.checkpoint.state import load_state, load_weights, read_weights
from training.checkpoint.weights import find_weights, shape_of_weights
from training.families.lora import ADAPTERS, Adapters, adapt, has_adapters, in_bf16
from training.families.rope import extend
from training.host.choices import LORA_TARGETS
from training.host.errors import UserError, refused_as_user_error
from training.host.sizes import available_host_bytes, gib, parse_bytes
from training.memory.cost_model import Step
from training.memory.execution import WHOLE, Execution, Placement, inventory_of
from training.memory.kinds import check_head_dim, kinds_by_step
from training.memory.machine import Rates, cap_gpu_memory, gpu_budget, measure_attention, measure_network, measure_rates
from training.memory.placement import allocate, apply_execution
from training.memory.planner import Plan, has_plan, make_plan
from training.memory.profiler import Bench, format_table
from training.memory.step import PackedDocuments
from training.optim.adamw import MasterAdamW
from training.optim.quantized import GROUP as QUANTIZED_GROUP
from training.optim.quantized import check_library
from training.parallel.fsdp import initial_weights, shard_model
from training.parallel.tensor import check_matrix_sharing, share_matrices
from training.parallel.ulysses import check_sharing, share_sequences
from training.parallel.world import World
from training.run.settings import StepFlags, TrainConfig

logger = logging.getLogger(__name__)


def resolve_memory_budget(config: TrainConfig, device: torch.device) -> str | None:
    """The run's --memory_budget, on a GPU "auto" by default. None: nothing is planned, as on a CPU."""
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


def configure_machine(config: TrainConfig, model_config: ModelConfig, world: World) -> None:
    """Choose which kernels run, and refuse a memory budget that is not free, before anything else takes time."""
    if config.collective_timeout is not None and world.size == 1:
        raise UserError("collective_timeout has no effect on one process, which waits for nobody; drop it")
    if config.kernels == "triton" and world.device.type != "cuda":
        raise UserError('kernels "triton" needs a CUDA GPU; use auto')
    if config.kernels != "torch":
        check_head_dim(kinds_by_step(config, model_config).at(1), model_config.head_dim, world.device)
    settled_execution(config, world.device)  # refuses a backend that is not there
    linear_of(config, model_config.share(world.tensor_size), world.device)  # refuses a map that cannot run
    if config.lora_bits < 16:
        check_library(f"lora_bits {config.lora_bits}")
    if config.memory_budget is not None:
        gpu_budget(config.memory_budget, world.device)


def adapters_of(config: StepFlags) -> Adapters | None:
    """The adapters of --lora and its flags; None: every weight is trained. Raises UserError for other targets."""
    if config.lora is None:
        return None
    targets = LORA_TARGETS if config.lora_targets is None else tuple(config.lora_targets.split(","))
    alpha = getattr(config, "lora_alpha", None)  # no flag of profile_memory.py, where it has no effect
    with refused_as_user_error("lora: "):
        return Adapters(config.lora, 2.0 * config.lora if alpha is None else alpha, targets)


def linear_of(config: StepFlags, share: Share, device: torch.device, impl: str = "auto") -> Linear:
    """The linear maps of --linear and --lora; raises UserError where they cannot run."""
    if config.linear == PLAIN.name:
        return PLAIN if config.lora is None else LORA
    widths = {"head_dim": share.head_dim}  # heads of a step
    for i in range(share.num_hidden_layers):
        for name, (rows, columns) in share.maps(i).items():
            whose = f"of layer {i}'s {name}"
            widths |= {f"number of rows {whose}": rows, f"number of columns {whose}": columns}
    with refused_as_user_error():
        check_fp8(device, widths)
    return FP8(impl) if config.lora is None else LoRA(FP8(impl))


def check_shape(flags: StepFlags, shape: ModelConfig, kinds: tuple[AttentionKind, ...], num_gpus: int) -> None:
    """Refuse settings that do not fit the model's shape or the GPUs' number, whatever the machine."""
    check_matrix_sharing(flags.tensor_parallel_size, shape)
    chooses_blocks = any(kind.list_length for kind in kinds)
    check_sharing(flags.context_parallel_size, shape, chooses_blocks, flags.tensor_parallel_size)
    check_lora_bits(flags, shape.share(), num_gpus)
    state_format_of(flags, shape)  # refuses a format without effect


def check_lora_bits(config: StepFlags, share: Share, num_gpus: int) -> None:
    """Refuse quantized weights on several GPUs, or with rows that are no whole groups."""
    if (bits := config.lora_bits) == 16:
        return
    if num_gpus > 1:
        raise UserError(f"lora_bits {bits} on {num_gpus} GPUs is not supported: FSDP2 shards bf16; give lora_bits 16")
    maps = (map for layer in range(share.num_hidden_layers) for map in share.maps(layer).items())
    for name, (_, columns) in maps:
        if columns % QUANTIZED_GROUP:
            raise UserError(
                f"lora_bits {bits} needs rows of whole groups of {QUANTIZED_GROUP}, and {name} has {columns} columns; "
                "give lora_bits 16"
            )


def state_format_of(config: StepFlags, model_config: ModelConfig) -> str:
    """The run's --optimizer_state. Adapters have float32 state, as has a model whose rows are no whole groups.

    Raises:
        UserError: compact state where there is none.
    """
    if config.lora is None and model_config.hidden_size % GROUP == 0:
        return config.optimizer_state
    if config.lora is None and config.optimizer_state == "compact":  # adapters' a rule refuses
        rows = f"rows of {model_config.hidden_size}, which is no multiple of {GROUP}"
        raise UserError(f"optimizer_state compact has no effect on {rows}; drop it")
    return "float32"


def shape_with(attention_type: str, size: ModelConfig) -> ModelConfig:
    """Returns a size of model with the parameters of --attention_type, where that kind has some."""
    kind = KINDS[attention_type]
    return dataclasses.replace(size, layer_kinds=(kind(),)) if kind.gates_per_head else size


def choose_model(config: TrainConfig, resumed: Path | None = None) -> ModelConfig:
    """The model_size's shape, or the one that the weights to start from declare, extended as --rope_scaling says.

    Args:
        resumed: the checkpoint to go on from; None: the run starts, from the weights of --init_from if it has them.
    """
    size = MODEL_SIZES[config.model_size or "tiny"]
    shape = shape_with(config.attention_type, size)
    if folder := resumed or config.init_from:
        declared = shape_of_weights(folder)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers") if config.model_size else ():
            if getattr(declared, name) != getattr(shape, name):
                raise UserError(
                    f"{folder} is of another size: it has {name} {getattr(declared, name)}, model_size "
                    f"{config.model_size} has {getattr(shape, name)}; drop model_size, to take theirs"
                )
        trained, asked = declared.layer_kinds[0], shape.layer_kinds[0]
        if trained.gates_per_head and not asked.gates_per_head:
            raise UserError(
                f"{folder} was trained with attention_type {trained.name}, and attention_type {config.attention_type} "
                f"would drop its gates; give --attention_type {trained.name}, or other weights"
            )
        if asked.gates_per_head and not trained.gates_per_head:
            if resumed:
                raise UserError(
                    f"{folder} was trained without attention_type {asked.name}; to turn it into that, start from its "
                    f"weights with --init_from {folder} and another --output_dir"
                )
            if any(kind.reach is not None for kind in declared.kinds):
                raise UserError(
                    f"attention_type {asked.name} would take the place of the windows of {folder}; use sparse, which "
                    "leaves windows alone, or full"
                )
            if config.lora is not None:
                raise UserError(
                    f"lora with attention_type {asked.name}: {folder} has no gates of it, which would stay random; "
                    "train all weights, or give another attention_type"
                )
            logger.info("attention: %s has no gates of %s; they are initialised, near 1/2", folder, asked.name)
            declared = dataclasses.replace(declared, layer_kinds=shape.layer_kinds)
        shape = declared
        if config.rope_scaling is not None:
            shape = _extended(shape, config.rope_scaling, resumed)
    length = max(shape.max_position_embeddings, config.context_length) if folder else config.context_length
    return dataclasses.replace(shape, max_position_embeddings=length)


def _extended(shape: ModelConfig, rope_scaling: str, resumed: Path | None) -> ModelConfig:
    """The shape with its context extended; a resumed run's has been, and must be as --rope_scaling says."""
    if resumed is None:
        return extend(shape, rope_scaling)
    scalings = extend(dataclasses.replace(shape, rope_scaling=None), rope_scaling).rope_scaling, shape.rope_scaling
    asked, found = (scaling and (scaling.rope_type, scaling.factor) for scaling in scalings)
    if asked != found:
        raise UserError(f"rope_scaling {rope_scaling}: {resumed} was trained with {found}; drop it, or start afresh")
    return shape


# The plan


def settled_execution(config: StepFlags, device: torch.device, **settled) -> Execution:
    """Returns what flags settle of an execution; raises UserError for a backend that `device` does not have."""
    with refused_as_user_error():
        backend = choose_backend(config.attention_backend, device)
    return Execution(loss_impl=config.loss_impl, attention_backend=backend, **settled)


def step_of(config: TrainConfig, model: Transformer, world: World, documents: PackedDocuments | None) -> Step:
    """The step that the settings ask for; `documents` are None where they are not known yet."""
    lengths = config.context_length, config.batch_size, config.gradient_accumulation_steps
    kinds = kinds_by_step(config, model.config).at(1)
    state_format = state_format_of(config, model.config)
    linear = linear_of(config, model.share, world.device, config.kernels)
    settled = {"kinds": kinds, "linear": linear, "impl": config.kernels, "state_format": state_format}
    given = settled_execution(config, world.device, frozen_bits=config.lora_bits, **settled)
    num_shards = world.data_size * world.context_size // world.replicate if world.size > 1 else 0
    return Step(
        model.share, model.named_parameters(), *lengths, documents, given, num_ranks=config.context_parallel_size,
        num_shards=num_shards, tensor_ranks=config.tensor_parallel_size, num_machines=world.num_machines,
        num_copies=world.replicate, adapters=adapters_of(config),
    )  # fmt: skip


def step_on_meta(
    model_config: ModelConfig,
    context_length: int,
    batch_size: int = 1,
    micro_batches: int = 1,
    given: Execution | None = None,
    num_gpus: int = 1,
    context_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    num_machines: int = 1,
    replicate: int = 1,
    adapters: Adapters | None = None,
) -> Step:
    """A step of a model on the meta device, which takes no memory; each sequence is one document.

    Args:
        num_gpus: the step is of the first of so many, which need not exist: FSDP2 deals the rows of a parameter out as
            torch.chunk does, and gives no GPU more than the first.
        context_parallel_size, tensor_parallel_size: GPUs that share each sequence, and each matrix.
        num_machines: machines that have equally many of the GPUs.
        replicate: copies of the weights.
        adapters: all that is trained; None: every parameter is.
    """
    num_shards = num_gpus // tensor_parallel_size // replicate
    parameters = _parameters_on_meta(model_config, tensor_parallel_size, adapters)
    masters = torch.float32 if num_gpus > 1 else torch.bfloat16
    shards = [
        (name, p.chunk(num_shards)[0].to(masters if p.requires_grad else torch.bfloat16)) for name, p in parameters
    ]
    documents = PackedDocuments.one_each(context_length, batch_size)
    return Step(
        model_config.share(tensor_parallel_size), shards, context_length, batch_size, micro_batches, documents,
        given or Execution(), num_ranks=context_parallel_size, num_shards=num_shards if num_gpus > 1 else 0,
        tensor_ranks=tensor_parallel_size, num_machines=num_machines, num_copies=replicate, adapters=adapters,
    )  # fmt: skip


@functools.cache  # tables and searches ask for one model's parameters many times
def _parameters_on_meta(
    model_config: ModelConfig, tensor_ranks: int, adapters: Adapters | None
) -> list[tuple[str, torch.nn.Parameter]]:
    with torch.device("meta"):
        model = Transformer(model_config, tensor_ranks)
    if adapters is not None:
        adapt(model, adapters)
    return list(model.named_parameters())


def memory_budgets(config: TrainConfig, world: World) -> tuple[float, float]:
    """Bytes of --memory_budget and of --host_budget, each the smallest that any rank has."""
    host_budget = parse_bytes(config.host_budget) if config.host_budget else available_host_bytes()
    gpu_bytes, host_bytes = world.min(gpu_budget(config.memory_budget or "auto", world.device), host_budget)
    return gpu_bytes, host_bytes


def check_fits(config: TrainConfig, model_config: ModelConfig, world: World) -> None:
    """Refuse, before the data are read, a step for which there is no plan even if all documents are short.

    Raises:
        UserError: no plan fits (the largest context that would is named), or ranks have copies of key/value heads.
    """
    if config.memory_budget is None:
        return
    if message := without_plan(config, model_config.share(world.tensor_size)):
        raise UserError(f"{message}; give --gradient_checkpointing, without --memory_budget")
    tokens = config.batch_size * config.context_length
    short = PackedDocuments(longest=1, lengths=((1, tokens),))
    step = step_of(config, model_on_meta(model_config, world, adapters_of(config)), world, short)
    budgets = memory_budgets(config, world)
    if not has_plan(step, *budgets):
        make_plan(step, *budgets)  # raises the error that says why


def without_plan(config: TrainConfig, share: Share) -> str | None:
    """Why no plan counts what `config.context_parallel_size` ranks take of a model; None: plans do."""
    heads, ranks = share.num_key_value_heads, config.context_parallel_size
    return f"no plan counts copies of {heads} key/value heads on {ranks} ranks" if heads % ranks else None


def plan_memory(
    config: TrainConfig, model: Transformer, world: World, documents: PackedDocuments | None = None
) -> Plan:
    """The fastest plan within --memory_budget and --host_budget, the same on every rank; caps the GPU's memory.

    It has the faster of the attention kernels that `attention_backend` may mean. Without a budget nothing is searched:
    blocks keep their input with --gradient_checkpointing, and all without.
    """
    step = step_of(config, model, world, documents)
    if config.memory_budget is None:
        return Plan(step, step.unplanned(Placement() if config.gradient_checkpointing else WHOLE))
    budgets = memory_budgets(config, world)
    backend, kinds = step.given.attention_backend, step.given.kinds
    rates = measure_rates(model.share, backend, world.device, config.context_length, kinds, step.given.linear)
    if world.num_machines > 1:
        rates["network"] = measure_network(dist.group.WORLD, world.num_machines, world.device)
    rates = dict(zip(rates, world.min(*rates.values())))
    others = measure_flash_attn_4(config, backend, model.share, world, kinds)
    torch.cuda.empty_cache()  # frees what the measurements took
    plan = make_plan(step, *budgets, rates)
    if others:
        rival = dataclasses.replace(step, given=dataclasses.replace(step.given, attention_backend="flash-attn-4"))
        plans = [plan, *([make_plan(rival, *budgets, rates | others)] if has_plan(rival, *budgets) else [])]
        compared = {each.execution.attention_backend: each.seconds for each in plans}
        plan = dataclasses.replace(min(plans, key=lambda each: each.seconds), compared=compared)
    plan = dataclasses.replace(plan, execution=world.broadcast(plan.execution))  # unequal shards might plan unequally
    cap_gpu_memory(int(plan.gpu_budget), world.device)
    logger.info("plan for %s of GPU and %s of host memory:\n%s", *map(gib, budgets), plan)
    return plan


def measure_flash_attn_4(
    config: TrainConfig, chosen: str, share: Share, world: World, kinds: tuple[AttentionKind, ...]
) -> Rates:
    """Measures flash-attn-4's attention on all ranks if "auto" chose cuDNN's; {} if a rank cannot run it."""
    rates: Rates = {}
    if (config.attention_backend, chosen) != ("auto", "cudnn"):
        return rates
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version, tested = importlib.metadata.version("flash-attn-4"), ", ".join(TESTED_FLASH_ATTN_4)
        if version not in TESTED_FLASH_ATTN_4:
            advice = "attention is cuDNN's; --attention_backend flash-attn-4 takes this one all the same"
            logger.warning("flash-attn-4 %s is not among the tested versions (%s): %s", version, tested, advice)
        else:
            try:
                rates = measure_attention(share, "flash-attn-4", world.device, config.context_length, kinds)
            except Exception as error:  # a package of it that is missing or does not fit
                logger.warning("attention is cuDNN's: flash-attn-4 %s fails here: %s", version, error)
    (measured,) = world.min(len(rates))
    return dict(zip(rates, world.min(*rates.values()))) if measured else {}


def explain_out_of_memory(config: TrainConfig, plan: Plan, device: torch.device) -> str:
    """A table of what the step was predicted to take, and a plan that should fit; computed without GPU memory."""
    if message := without_plan(config, plan.step.share):
        return f"{message}; raise --context_parallel_size, or lower --context_length"
    try:
        if config.memory_budget is None:
            budgets: tuple[float, float] = gpu_budget("auto", device), available_host_bytes()
            advice = "--gradient_checkpointing and --compile dropped make such a plan; its seconds are an H200's"
        else:
            budgets = 0.9 * plan.gpu_budget, plan.host_budget
            advice = f"--memory_budget {budgets[0] / 2**30:.1f}GB makes such a plan"
        fitting = f"predicted to fit into {gib(budgets[0])}; {advice}:\n{make_plan(plan.step, *budgets, plan.rates)}"
    except UserError as error:  # its message names the largest context, or what is free
        fitting = str(error)
    table = format_table(list(plan.step.stages(plan.execution)))
    return f"predicted for the step as it was placed:\n{table}\n{fitting}"


# Building


def fresh_beside(folder: str | Path) -> tuple[str, ...]:
    """Returns parts of the names of parameters that a run may add to a folder's weights."""
    return (GATES,) if has_adapters(folder) else (GATES, ADAPTERS)


def model_on_meta(model_config: ModelConfig, world: World, adapters: Adapters | None = None) -> Transformer:
    """A model that takes no memory: bf16 on one GPU, else float32, from which FSDP computes in bf16.

    Frozen weights on GPUs are bf16 in any case.
    """
    with torch.device("meta"):
        model = Transformer(model_config, world.tensor_size)
    if adapters is not None:
        adapt(model, adapters)
        if world.device.type == "cuda":
            in_bf16(model)
    if world.size > 1:
        share_matrices(model, world)
        shard_model(model, model.layers, world)
        share_sequences(model, world)
    elif world.device.type == "cuda":
        model.to(torch.bfloat16)
    return model


def build_model(
    config: TrainConfig, model_config: ModelConfig, world: World, documents: PackedDocuments | None = None
) -> tuple[Transformer, MasterAdamW, Plan]:
    """A model and its optimizer, with weights that are not set yet, and the plan that both follow."""
    model = model_on_meta(model_config, world, adapters_of(config))
    plan = plan_memory(config, model, world, documents)
    accumulate = config.gradient_accumulation_steps > 1
    inventory = inventory_of(model.named_parameters(), plan.execution, accumulate=accumulate)
    allocate(model, inventory, world.device)
    optimizer = MasterAdamW(
        model.named_parameters(), inventory, weight_decay=config.weight_decay, impl=plan.execution.impl,
        rate_ratios={"lora_B.weight": config.lora_plus or 1.0},
    )  # fmt: skip
    optimizer.update_beside_forward([model.embed_tokens, *model.layers, model.norm])
    for block in model.layers if config.compile else ():
        block.forward = torch.compile(block.forward)
    apply_execution(model, plan.execution, plan.arena_bytes, optimizer.homes)
    return model, optimizer, plan


def build(
    config: TrainConfig, model_config: ModelConfig, checkpoint: Path | None, documents: PackedDocuments, world: World
) -> tuple[Transformer, MasterAdamW, Plan]:
    """Model, optimizer and plan, with all of their state from `checkpoint`; None: weights of --init_from, or fresh."""
    model, optimizer, plan = build_model(config, model_config, world, documents)
    if checkpoint:
        load_state(optimizer, checkpoint)
        restore_rng(checkpoint)
    elif config.init_from:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        fresh = fresh_beside(config.init_from)
        for part in fresh:  # these stay if the weights have none
            load_weights(optimizer, initial_weights(model, config.seed, only=part))
        read_weights(optimizer, find_weights(config.init_from, shapes, may_lack=fresh))
    else:
        load_weights(optimizer, initial_weights(model, config.seed))
    return model, optimizer, plan


def build_bench(step: Step, execution: Execution, world: World) -> Bench:
    """A model of fresh weights and an optimizer, on which a profiler measures `step`."""
    gc.collect()  # frees the memory of an earlier bench
    model = model_on_meta(ModelConfig(**vars(step.share)), world, step.adapters)
    inventory = inventory_of(model.named_parameters(), execution, accumulate=step.micro_batches > 1)
    allocate(model, inventory, world.device)
    optimizer = MasterAdamW(model.named_parameters(), inventory, impl=execution.impl)
    load_weights(optimizer, initial_weights(model, seed=0))
    return Bench(model, optimizer)
