"""Builds what a step needs: a model, its optimizer and its memory plan, for train.py,
profile_memory.py and benchmarks.

Top to bottom: the plan; building.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import logging

import torch
import torch.distributed as dist
from torch.nn import Parameter

from kernels.attention.libraries import TESTED_FLASH_ATTN_4
from model import ModelConfig, Transformer
from training.checkpoint.files import restore_rng
from training.checkpoint.state import load_state, load_weights, read_weights
from training.families.trained import ALL, Trained
from training.host.errors import UserError
from training.host.sizes import available_host_bytes, gib
from training.memory.execution import WHOLE, Execution, Placement, inventory_of
from training.memory.machine import (
    Rates,
    cap_gpu_memory,
    gpu_budget,
    measure_attention,
    measure_network,
    measure_rates,
)
from training.memory.placement import allocate, apply_execution
from training.memory.plan import Plan
from training.memory.planner import has_plan, make_plan
from training.memory.profiler import Bench, format_table
from training.memory.stages import Stages
from training.memory.step import PackedDocuments, Scoring, Step
from training.optim.adamw import MasterAdamW
from training.parallel.fsdp import initial_weights, shard_model
from training.parallel.tensor import share_matrices
from training.parallel.ulysses import share_sequences
from training.parallel.world import World
from training.run.recipe import Recipe

logger = logging.getLogger(__name__)


# The plan


def step_of(
    recipe: Recipe, model: Transformer, world: World, documents: PackedDocuments | None
) -> Step:
    """The step that the settings ask for; `documents` are None where they are not known yet."""
    batch, num_shards = recipe.batch, 0
    if world.size > 1:
        num_shards = world.data_size * world.context_size // world.replicate
    return Step(
        model.shard,
        model.named_parameters(),
        batch.context_length,
        batch.batch_size,
        batch.micro_batches,
        documents,
        recipe.execution(recipe.backend(world.device)),
        num_ranks=recipe.context_ranks,
        num_shards=num_shards,
        tensor_ranks=recipe.tensor_ranks,
        num_machines=world.num_machines,
        num_copies=world.replicate,
        trained=recipe.trained,
        scoring=recipe.scoring,
    )


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
    trained: Trained = ALL,
    scoring: Scoring | None = None,
) -> Step:
    """A step of a model on the meta device, which takes no memory; each sequence is one document.

    Args:
        num_gpus: the step is the first GPU's of so many, which need not exist; no GPU gets more by
            torch.chunk.
        context_parallel_size, tensor_parallel_size: GPUs that share each sequence, and each matrix.
        num_machines: machines that have equally many of the GPUs.
        replicate: copies of the weights.
        scoring: what the loss takes more than the next tokens' does.
    """
    num_shards = num_gpus // tensor_parallel_size // replicate
    parameters = _parameters_on_meta(model_config, tensor_parallel_size, trained)
    exact = model_config.exact
    shards = [
        (
            name,
            p.chunk(num_shards)[0].to(
                torch.float32 if name in exact or is_master else torch.bfloat16
            ),
        )
        for name, p in parameters
        for is_master in (num_gpus > 1 and p.requires_grad,)
    ]
    documents = PackedDocuments.one_each(context_length, batch_size)
    return Step(
        model_config.shard(tensor_parallel_size),
        shards,
        context_length,
        batch_size,
        micro_batches,
        documents,
        given or Execution(),
        num_ranks=context_parallel_size,
        num_shards=num_shards if num_gpus > 1 else 0,
        tensor_ranks=tensor_parallel_size,
        num_machines=num_machines,
        num_copies=replicate,
        trained=trained,
        scoring=scoring or Scoring(),
    )


@functools.cache  # tables and searches ask for one model's parameters many times
def _parameters_on_meta(
    config: ModelConfig, tensor_ranks: int, trained: Trained
) -> list[tuple[str, Parameter]]:
    with torch.device("meta"):
        model = Transformer(config, tensor_ranks)
    trained.prepare(model)
    return list(model.named_parameters())


def memory_budgets(recipe: Recipe, world: World) -> tuple[float, float]:
    """Bytes of --memory_budget and of --host_budget, each the smallest that any rank has."""
    host_bytes = available_host_bytes() if recipe.host_budget is None else recipe.host_budget
    gpu_bytes, host_bytes = world.min(
        gpu_budget(recipe.memory_budget or "auto", world.device), host_bytes
    )
    return gpu_bytes, host_bytes


def check_fits(recipe: Recipe, world: World) -> None:
    """Refuse, before the data are read, a step for which there is no plan even if all documents are
    short.

    Raises UserError: it names the largest context that fits, or says that ranks have copies of
    key/value heads.
    """
    if recipe.memory_budget is None:
        return
    model = model_on_meta(recipe.model, world, recipe.trained)
    if message := without_plan(model.shard, recipe.context_ranks):
        raise UserError(f"{message}; give --gradient_checkpointing, without --memory_budget")
    tokens = recipe.batch.batch_size * recipe.batch.context_length
    short = PackedDocuments(longest=1, lengths=((1, tokens),))
    step, budgets = step_of(recipe, model, world, short), memory_budgets(recipe, world)
    if not has_plan(step, *budgets):
        make_plan(step, *budgets)  # raises the error that says why


def without_plan(shard: ModelConfig, ranks: int) -> str | None:
    """Returns why this model has no plan with shared sequences, or None."""
    heads = shard.attention.num_key_value_heads
    if heads % ranks:
        return f"no plan counts copies of {heads} key/value heads on {ranks} ranks"
    return None


def plan_memory(
    recipe: Recipe, model: Transformer, world: World, documents: PackedDocuments | None = None
) -> Plan:
    """Returns the fastest plan within --memory_budget and --host_budget, and caps the GPU's memory.

    All ranks get the same plan. With --attention_backend auto, cuDNN and flash-attn-4 are compared
    where both run. Without a memory budget, as on a CPU, nothing is searched or capped: blocks keep
    their input alone with --gradient_checkpointing, else all activations.

    Args:
        documents: the documents of a micro-batch; None: they are not known.
    """
    step = step_of(recipe, model, world, documents)
    if recipe.memory_budget is None:
        return Plan(step, step.unplanned(Placement() if recipe.recomputes_blocks else WHOLE))
    budgets, execution = memory_budgets(recipe, world), step.given
    length = recipe.batch.context_length
    # amounts of work per second, each the slowest rank's
    rates = measure_rates(
        model.shard,
        execution.attention_backend,
        world.device,
        length,
        execution.kinds,
        execution.linear,
    )
    if world.num_machines > 1:
        rates["network"] = measure_network(dist.group.WORLD, world.num_machines, world.device)
    rates = dict(zip(rates, world.min(*rates.values())))
    # rates of flash-attn-4; {}: it is not compared
    measured = measure_flash_attn_4(step, world) if recipe.attention_backend == "auto" else {}
    torch.cuda.empty_cache()  # frees what the measurements took
    plan = make_plan(step, *budgets, rates)
    if measured:
        rival = dataclasses.replace(
            step, given=dataclasses.replace(execution, attention_backend="flash-attn-4")
        )
        plans = [
            plan,
            *([make_plan(rival, *budgets, rates | measured)] if has_plan(rival, *budgets) else []),
        ]
        compared = {candidate.execution.attention_backend: candidate.seconds for candidate in plans}
        fastest = min(plans, key=lambda candidate: candidate.seconds)
        plan = dataclasses.replace(fastest, compared=compared)
    # Ranks whose shards differ might choose different plans: all take the main rank's.
    plan = dataclasses.replace(plan, execution=world.broadcast(plan.execution))
    cap_gpu_memory(int(plan.gpu_budget), world.device)
    logger.info("plan for %s of GPU and %s of host memory:\n%s", *map(gib, budgets), plan)
    return plan


def measure_flash_attn_4(step: Step, world: World) -> Rates:
    """Measures flash-attn-4 on all ranks if cuDNN was chosen; {} if a rank cannot run it."""
    rates: Rates = {}
    if step.given.attention_backend != "cudnn":
        return rates
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version, tested = importlib.metadata.version("flash-attn-4"), ", ".join(TESTED_FLASH_ATTN_4)
        if version not in TESTED_FLASH_ATTN_4:
            advice = (
                "attention is cuDNN's; --attention_backend flash-attn-4 takes this one all the same"
            )
            logger.warning(
                "flash-attn-4 %s is not among the tested versions (%s): %s", version, tested, advice
            )
        else:
            try:
                options = step.context_length, step.given.kinds
                rates = measure_attention(step.shard, "flash-attn-4", world.device, *options)
            except Exception as error:  # a package of it that is missing or does not fit
                logger.warning(
                    "attention is cuDNN's: flash-attn-4 %s fails here: %s", version, error
                )
    (measured,) = world.min(len(rates))
    return dict(zip(rates, world.min(*rates.values()))) if measured else {}


def explain_out_of_memory(recipe: Recipe, plan: Plan, device: torch.device) -> str:
    """A table of what the step was predicted to take, and a plan that should fit; computed without
    GPU memory."""
    if message := without_plan(plan.step.shard, plan.step.num_ranks):
        return f"{message}; raise --context_parallel_size, or lower --context_length"
    try:
        if recipe.memory_budget is None:
            budgets: tuple[float, float] = gpu_budget("auto", device), available_host_bytes()
            advice = (
                "--gradient_checkpointing and --compile dropped make such a plan; "
                "its seconds are an H200's"
            )
        else:
            budgets = 0.9 * plan.gpu_budget, plan.host_budget
            advice = f"--memory_budget {budgets[0] / 2**30:.1f}GB makes such a plan"
        fitting = (
            f"predicted to fit into {gib(budgets[0])}; "
            f"{advice}:\n{make_plan(plan.step, *budgets, plan.rates)}"
        )
    except UserError as error:  # its message names the largest context, or what is free
        fitting = str(error)
    table = format_table(list(Stages(plan.step, plan.execution)))
    return f"predicted for the step as it was placed:\n{table}\n{fitting}"


# Building


def model_on_meta(model_config: ModelConfig, world: World, trained: Trained = ALL) -> Transformer:
    """A model that takes no memory: bf16 on one GPU, else float32, from which FSDP computes in
    bf16.

    Frozen weights on GPUs are bf16 in any case.
    """
    with torch.device("meta"):
        model = Transformer(model_config, world.tensor_size)
    trained.prepare(model)
    if world.device.type == "cuda":
        model.cast(torch.bfloat16, only_frozen=True)
    if world.size > 1:
        share_matrices(model, world)
        shard_model(model, model.layers, world)
        share_sequences(model, world)
    elif world.device.type == "cuda":
        model.cast(torch.bfloat16)
    return model


def build_model(
    recipe: Recipe, world: World, documents: PackedDocuments | None = None
) -> tuple[Transformer, MasterAdamW, Plan]:
    """A model and optimizer, with weights that are not set yet, and the plan they follow."""
    model = model_on_meta(recipe.model, world, recipe.trained)
    plan = plan_memory(recipe, model, world, documents)
    accumulate = recipe.batch.micro_batches > 1
    inventory = inventory_of(
        model.named_parameters(), model.declared, plan.execution, accumulate=accumulate
    )
    allocate(model, inventory, world.device)
    optimizer = MasterAdamW(
        model.named_parameters(),
        inventory,
        weight_decay=recipe.optim.weight_decay,
        impl=plan.execution.impl,
        lora_plus=recipe.optim.lora_plus,
    )
    optimizer.update_beside_forward([model.embed_tokens, *model.layers, model.norm])
    for block in model.layers if recipe.compiles_blocks else ():
        block.forward = torch.compile(block.forward)
    apply_execution(model, plan.execution, plan.arena_bytes, optimizer.homes)
    return model, optimizer, plan


def build(
    recipe: Recipe, documents: PackedDocuments, world: World
) -> tuple[Transformer, MasterAdamW, Plan]:
    """Model, optimizer and plan, with all of their state from the checkpoint, or weights of the
    source, or fresh."""
    model, optimizer, plan = build_model(recipe, world, documents)
    start = recipe.start
    if start.checkpoint:
        load_state(optimizer, start.checkpoint)
        restore_rng(start.checkpoint)
    elif start.source:
        for role in start.source.fresh:  # these stay if the weights have none
            load_weights(optimizer, initial_weights(model, start.seed, role))
        read_weights(optimizer, start.weights)
    else:
        load_weights(optimizer, initial_weights(model, start.seed))
    return model, optimizer, plan


def build_bench(step: Step, execution: Execution, world: World) -> Bench:
    gc.collect()  # frees the memory of an earlier bench
    model = model_on_meta(step.shard, world, step.trained)
    inventory = inventory_of(
        model.named_parameters(), model.declared, execution, accumulate=step.micro_batches > 1
    )
    allocate(model, inventory, world.device)
    optimizer = MasterAdamW(model.named_parameters(), inventory, impl=execution.impl)
    load_weights(optimizer, initial_weights(model, seed=0))
    return Bench(model, optimizer)
