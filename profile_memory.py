"""Say whether a training step fits, what it takes, and how long: `python profile_memory.py
--context_length 131072`.

The answer comes first, then the plan. The exit status is 1 where a step does not fit, and the
changes that would make it fit are listed with their flags. docs/memory.md shows what else it
answers, from training/memory/reports.py.

On a GPU a step is predicted and measured: a whole step as train.py runs it on one GPU, of random
tokens, one document per sequence. Without a GPU, for another GPU that --gpu names, for several
GPUs, for the documents of --data or the loss of --objective, it is predicted. Memory sizes are in
GiB, 2**30 bytes; "24GB" on the command line means 24 GiB.
"""

import sys

from training.flags import answer_early, refuse
from training.run.profile_flags import ProfileFlags, read_profile_flags

if __name__ == "__main__":
    answer_early(read_profile_flags)

import bisect
import dataclasses
import functools
import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from model import MODEL_SIZES
from training.checkpoint.carried import read_carried
from training.checkpoint.weights import shape_of_weights
from training.data.chat import open_tokenizer
from training.data.corpus import open_stores, pack
from training.data.loader import PackedLoader, prompts_of
from training.data.packing import Packing
from training.data.prepared import is_prepared
from training.data.sources import Reading
from training.data.tokens import Selection, Store, join, split
from training.families.decide import Source, shape_with
from training.families.flags import LORA_BITS
from training.families.lora import Adapters
from training.families.rope import beyond, extend
from training.host.errors import UserError, import_optional
from training.host.files import check_can_write, replace_file
from training.host.processes import command
from training.host.sizes import GIB, available_host_bytes, budget_of_machine, gib, parse_bytes
from training.memory.contexts import draw_contexts, plan_contexts
from training.memory.decide import StepRecipe, decide_step
from training.memory.kinds import check_head_dim
from training.memory.machine import (
    DRIVER_BYTES,
    GPUS,
    cap_gpu_memory,
    find_gpu,
    gpu_budget,
    measure_rates,
    parse_gpu,
    scale_rates,
)
from training.memory.plan import Plan
from training.memory.planner import find_max_context, has_plan, make_plan
from training.memory.reports import (
    Epoch,
    Machine,
    choose_plan,
    report_comparison,
    report_max_context,
    report_step,
)
from training.memory.step import PackedDocuments, Scoring, Step
from training.objectives.decide import choose, text_reader
from training.objectives.flags import ObjectiveFlags
from training.objectives.scored import scoring
from training.optim.quantized import check_library
from training.parallel.world import World, check_replicate, join_world
from training.run.build import build_bench, step_on_meta, without_plan
from training.run.decide import choose_tokenizer
from training.run.settings import TrainConfig

MOST_HOST_GB = 4096  # host memory that is tried where a step does not fit
# host memory of machines: 16, 24, 32
SOLD_GB = sorted([2**n for n in range(4, 13)] + [3 * 2**n for n in range(3, 12)])
OFFERED_RANK = 16  # adapters of this rank are offered where every weight does not fit
MOST_LAYERS = 256  # a plan for more would take minutes


def decide(flags: ProfileFlags) -> StepRecipe:
    """Decides a step as `decide_step`; refuses numbers of GPUs that have no prediction."""
    context = flags.context_parallel_size
    tensor = flags.tensor_parallel_size
    num_gpus = flags.nproc * flags.nnodes
    if flags.nproc % (context * tensor):
        sizes = f"context_parallel_size {context} x tensor_parallel_size {tensor}"
        raise UserError(f"{sizes} must divide nproc {flags.nproc}; give other numbers of GPUs")
    check_replicate(num_gpus, flags.nproc, tensor, flags.replicate)
    shape = shape_of_weights(flags.init_from) if flags.init_from else MODEL_SIZES[flags.model_size]
    shape = extend(shape, flags.rope_scaling) if flags.rope_scaling else shape
    recipe = decide_step(flags, shape_with(flags.attention_type, shape), num_gpus)
    if message := without_plan(recipe.model.shard(tensor), flags.context_parallel_size):
        raise UserError(f"{message}; lower context_parallel_size")
    return recipe


def check_flags(flags: ProfileFlags, layers: int, can_measure: bool) -> None:
    """Refuses flags without effect, unsuited models, and files that could not be written."""
    if layers > MOST_LAYERS:
        raise UserError(
            f"{flags.init_from} has {layers} layers; "
            f"up to {MOST_LAYERS} are profiled, give other weights"
        )
    if flags.num_layers is not None and flags.num_layers > layers:
        raise UserError(f"num_layers must be at most {layers}, got {flags.num_layers}")
    if flags.init_from and (source := Source.read(flags.init_from)).adapters:
        bits = f" --lora_bits {source.frozen_bits}" if source.frozen_bits < 16 else ""
        rank, targets = source.adapters.rank, ",".join(source.adapters.targets)
        flags_of_adapters = (
            f"--init_from {source.base} --lora {rank} --lora_targets {targets}{bits}"
        )
        raise UserError(f"{flags.init_from} holds adapters; give {flags_of_adapters}")
    if flags.lora_bits < 16 and can_measure:
        check_library(f"lora_bits {flags.lora_bits} that is measured")
    if flags.num_layers is not None and not can_measure:
        why = (
            "needs a GPU in this machine, and no --gpu, --nproc, --nnodes, --data, --objective "
            "or --device cpu"
        )
        raise UserError(f"num_layers {why}; drop it")
    for name in ("timeline", "picture", "json"):
        if not (path := getattr(flags, name)):
            continue
        check_can_write(path, f"--{name}")
        if name != "json" and path.suffix not in (".png", ".svg", ".pdf"):
            raise UserError(f"--{name} draws .png, .svg or .pdf, got {path}")
        if name != "json":
            import_optional("matplotlib.figure", f"--{name}")


def carried_bytes(folder: str | None) -> int:
    """Returns the bytes that a checkpoint of every weight carries untrained from --init_from, if
    that is whole."""
    with suppress(UserError):  # config.json alone is enough for a prediction
        return read_carried(Path(folder)).num_bytes if folder else 0
    return 0


def choose_machine(
    flags: ProfileFlags, recipe: StepRecipe, memory_budget: str | None, world: World
) -> Machine:
    """Returns the machine to plan for: the GPU at hand, the GPU of --gpu, or else an H200."""
    recipe.check_linear(world.device)
    host = parse_bytes(flags.host_memory, "host_memory") if flags.host_memory else None, flags.nproc
    device = torch.device("cuda") if flags.gpu else world.device
    check_head_dim(recipe.kinds, recipe.model.attention.head_dim, device)
    if world.device.type == "cuda":
        return machine_at_hand(flags, recipe, memory_budget, host, world.device)
    return machine_by_data_sheet(flags, recipe, memory_budget, host)


def machine_at_hand(
    flags: ProfileFlags,
    recipe: StepRecipe,
    memory_budget: str | None,
    host: tuple[int | None, int],
    device: torch.device,
) -> Machine:
    """Returns this machine, with the rates of its GPU as measured.

    Args:
        host: bytes of --host_memory, None without it, and the processes that share them.
    """
    execution = recipe.execution(recipe.backend(device))
    gpu_bytes = gpu_budget(memory_budget or "auto", device)
    shard = recipe.model.shard(flags.tensor_parallel_size)
    backend, length = execution.attention_backend, flags.lengths[0]
    rates = measure_rates(shard, backend, device, length, recipe.kinds, recipe.linear)
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(device)
    known, host_bytes = find_gpu(name), host_limit(flags, available_host_bytes() / flags.nproc)
    return Machine(
        name,
        gpu_bytes,
        host_bytes,
        rates,
        recipe.model,
        execution,
        known and known.flops,
        *host,
    )


def machine_by_data_sheet(
    flags: ProfileFlags,
    recipe: StepRecipe,
    memory_budget: str | None,
    host: tuple[int | None, int],
) -> Machine:
    """Returns a machine with the GPU of --gpu, or an H200; its rates are an H200's, scaled.

    `host` is as in `machine_at_hand`. Raises UserError for a GPU that cannot run the recipe.
    """
    model, kinds = recipe.model, recipe.kinds
    name, gpu = parse_gpu(flags.gpu or "H200")
    gpu_bytes = gpu.memory_bytes - DRIVER_BYTES
    if memory_budget not in (None, "auto"):
        gpu_bytes = parse_bytes(memory_budget, "memory_budget")
        if flags.gpu and gpu_bytes > gpu.memory_bytes:
            most = f"the {gib(gpu.memory_bytes)} of {name}"
            raise UserError(f"memory_budget {memory_budget} is more than {most}; lower it")
    backend = (
        gpu.attention_backend if flags.attention_backend == "auto" else flags.attention_backend
    )
    if backend == "flash-attn-4" and gpu.attention_backend == "flash":
        raise UserError(
            f"flash-attn-4 needs compute capability 9.0, which {name} has not; use auto"
        )
    if flags.linear != "bf16" and not gpu.has_fp8:
        needs = "FP8 needs compute capability 8.9 (Ada, Hopper) or newer"
        raise UserError(f"linear {flags.linear}: {needs}, {name} is older; use linear bf16")
    speed = "is an H200's scaled by data sheets, not measured"
    if gpu.device_name == GPUS["H200"].device_name:
        speed = "was measured on another H200"
    description = f"{name if flags.gpu else 'no GPU in use, so an H200'}; its speed {speed}"
    rates = scale_rates(gpu, backend, kinds, model.attention.head_dim)
    host_bytes, execution = host_limit(flags, math.inf), recipe.execution(backend)
    return Machine(
        description,
        gpu_bytes,
        host_bytes,
        rates,
        model,
        execution,
        gpu.flops,
        *host,
    )


def host_limit(flags: ProfileFlags, default: float) -> float:
    if flags.host_memory:
        return budget_of_machine(parse_bytes(flags.host_memory), flags.nproc)
    return parse_bytes(flags.host_budget, "host_budget") if flags.host_budget else default


# The step, and the data


def scoring_of(flags: ProfileFlags, recipe: StepRecipe) -> Scoring:
    """Returns what the loss of --objective takes."""
    objective = choose(ObjectiveFlags(objective=flags.objective, beta=flags.beta), flags.lengths[0])
    return scoring(objective, isinstance(recipe.trained, Adapters))


def make_step(
    flags: ProfileFlags, recipe: StepRecipe, machine: Machine
) -> tuple[Step, Epoch | None]:
    """Returns the step that flags ask for, with an epoch of --data, or a document per sequence."""
    num_gpus = flags.nproc * flags.nnodes
    mesh = num_gpus, flags.context_parallel_size, flags.tensor_parallel_size, flags.nnodes
    step = step_on_meta(
        machine.model,
        *flags.lengths,
        machine.given,
        *mesh,
        flags.replicate,
        recipe.trained,
        scoring_of(flags, recipe),
    )
    if not flags.data:
        return step, None
    reading = Reading(None, flags.suffixes, flags.columns, flags.bad_rows)
    # answers to a prompt, up to so many tokens
    joined = 0 if flags.objective == "next_token" else step.context_length
    texts = (
        (*flags.data,),
        choose_tokenizer(flags, None),
        flags.chat_template,
        machine.model.vocab_size,
        reading,
        flags.objective,
        joined,
    )
    train, packing = pack_data(texts, step.context_length, flags.overlong)
    num_ranks = num_gpus // (flags.context_parallel_size * flags.tensor_parallel_size)
    loader = PackedLoader(train, packing, flags.batch_size, world_size=num_ranks)
    loader.check_enough_for_step(flags.gradient_accumulation_steps)
    documents = PackedDocuments.average(
        *packing.document_lengths(),
        packing.longest_document,
        flags.batch_size,
        num_ranks,
        step.micro_batches,
    ).with_prompts(*prompts_of(train))
    epoch = Epoch(
        loader.num_tokens,
        loader.sequences_per_epoch,
        getattr(packing, "filled", 1.0),
        step.context_length,
    )
    return step.at(step.context_length, documents), epoch


@functools.cache  # changes of a step that does not fit ask for them again
def open_data(
    paths: tuple[str, ...],
    tokenizer_path: str,
    chat_template: str | None,
    vocab_size: int,
    reading: Reading,
    objective: str,
    context_length: int,
) -> tuple[Selection, list[Store]]:
    """Returns the documents that train.py would train on, and the stores of all, as
    training.data.corpus.pack takes."""
    if texts := [path for path in paths if Path(path).exists() and not is_prepared(Path(path))]:
        what = f"tokenizing {', '.join(texts)} with {tokenizer_path}"
        # other objectives read rows
        hint = "; a prepared set is quicker (docs/data.md)" * (objective == "next_token")
        print(f"{what}{hint}", file=sys.stderr, flush=True)
    tokenizer = open_tokenizer(tokenizer_path, chat_template)
    rows = text_reader(objective, tokenizer.eos_id, context_length)
    stores = open_stores([*paths], tokenizer, vocab_size, reading._replace(rows=rows))
    return split(join(stores), TrainConfig.validation_fraction, TrainConfig.seed)[0], stores


@functools.cache
def pack_data(texts: tuple, context_length: int, overlong: str | None) -> tuple[Selection, Packing]:
    """Returns the documents and sequences that `open_data` makes of the arguments `texts`."""
    train, stores = open_data(*texts)
    return train, pack(train, stores, context_length, TrainConfig.seed, overlong=overlong)


# Changes


def change(flags: ProfileFlags, machine: Machine, world: World, **values) -> dict[str, Plan]:
    """Returns the plan of the step with other values of some flags, by the words to give; {} if it
    has none."""
    changed = dataclasses.replace(flags, **values)
    with suppress(UserError):  # numbers that do not go together, too few data, or no plan
        recipe = decide(changed)
        refuse(changed, (), changed.rules)
        if changed.attention_type != flags.attention_type:
            machine = choose_machine(changed, recipe, flags.memory_budget, world)
        execution = recipe.execution(machine.given.attention_backend)
        machine = dataclasses.replace(
            machine, given=execution, host_bytes=host_limit(changed, machine.host_bytes)
        )
        given_words = " ".join(
            f"--{name} {value}" for name, value in values.items() if value is not None
        )
        dropped = (f"drop --{name}" for name, value in values.items() if value is None)
        words = ", ".join([*filter(None, [given_words]), *dropped])
        step, _ = make_step(changed, recipe, machine)
        if has_plan(step, *machine.limits[:2]):  # make_plan would look for what to say
            return {words: make_plan(step, *machine.limits)}
    return {}


def find_changes(flags: ProfileFlags, machine: Machine, world: World) -> dict[str, Plan]:
    """Returns the changes that make a step fit, as `change` does, the cheapest first.

    If a plan is enough where the flags ask for none, nothing else is tried. Then come fewer
    sequences at a time, and if one does not fit, with one: attention to everything, compact state,
    adapters or their fewest bits, the least host memory that is enough, 2, 4 or 8 times as many
    GPUs that share each sequence, and the longest context that fits.
    """
    base: dict[str, Any] = {}  # changes that all others come on top of
    if flags.gradient_checkpointing is not None:
        base["gradient_checkpointing"] = None
        if plans := change(flags, machine, world, **base):
            return plans
    attempt = functools.partial(change, flags, machine, world, **base)
    plans = fewer_sequences(flags, attempt)
    if flags.batch_size > 1 and not plans:
        base["batch_size"] = 1
        attempt = functools.partial(attempt, batch_size=1)
    if flags.attention_type != "full":
        plans |= attempt(attention_type="full")
    if flags.optimizer_state == "float32":
        plans |= attempt(optimizer_state="compact")
    adapters = offered_adapters(flags, machine)
    if adapters:
        plans |= attempt(**adapters)
        plans |= attempt(**adapters, lora_bits=4)
    if flags.lora is not None:
        plans |= fewer_bits(flags, attempt)
    if math.isfinite(machine.host_bytes):
        plans |= more_host_memory(flags, base, machine, attempt)
    plans |= more_gpus(flags, machine, attempt)
    ways = [base]
    if adapters and not plans:
        ways.append(base | adapters)
    for way in ways:
        if longest := longest_context(dataclasses.replace(flags, **way), machine):
            plans |= change(flags, machine, world, **way, context_length=longest)
    return plans


Attempt = Callable[..., dict[str, Plan]]  # `change` on top of some changes


def fewer_sequences(flags: ProfileFlags, attempt: Attempt) -> dict[str, Plan]:
    """Returns the most sequences at a time that fit, with as many in a step."""
    batch_size = flags.batch_size
    for fewer in range(batch_size - 1, 0, -1):
        if batch_size % fewer == 0:
            times = flags.gradient_accumulation_steps * batch_size // fewer
            if plans := attempt(batch_size=fewer, gradient_accumulation_steps=times):
                return plans
    return {}


def offered_adapters(flags: ProfileFlags, machine: Machine) -> dict[str, Any]:
    """Returns the flags that train adapters in place of every weight; {}: there are adapters, or
    gates of attention would stay random beside them."""
    if flags.lora is not None or machine.model.kinds[0].gates_per_head:
        return {}
    adapters: dict[str, Any] = {"lora": OFFERED_RANK}
    if flags.optimizer_state == "compact":
        adapters["optimizer_state"] = "auto"
    if flags.rope_scaling:
        adapters["rope_scaling"] = None
    return adapters


def fewer_bits(flags: ProfileFlags, attempt: Attempt) -> dict[str, Plan]:
    """Returns the most bits of frozen matrices that fit."""
    for bits in LORA_BITS:
        if bits < flags.lora_bits and (plans := attempt(lora_bits=bits)):
            return plans
    return {}


def more_host_memory(
    flags: ProfileFlags, base: dict[str, Any], machine: Machine, attempt: Attempt
) -> dict[str, Plan]:
    """Returns the least host memory that is enough."""
    changed = dataclasses.replace(flags, **base)
    step, _ = make_step(changed, decide(changed), machine)
    sizes = range(int(machine.host_bytes / GIB) + 1, MOST_HOST_GB)
    enough = bisect.bisect_left(
        sizes, True, key=lambda size: has_plan(step, machine.gpu_bytes, size * GIB)
    )
    if enough == len(sizes):
        return {}
    return attempt(**host_flag(flags, sizes[enough] * GIB))


def more_gpus(flags: ProfileFlags, machine: Machine, attempt: Attempt) -> dict[str, Plan]:
    """Returns the fewest GPUs that are enough if they share each sequence."""
    for times in (2, 4, 8):
        mesh: dict[str, Any] = {
            "nproc": times * flags.nproc,
            "context_parallel_size": times * flags.context_parallel_size,
        }
        if flags.lora_bits < 16:  # several GPUs take no other
            mesh["lora_bits"] = 16
        # --host_memory is of all processes anyway.
        if math.isfinite(machine.host_bytes) and not flags.host_memory:
            mesh["host_budget"] = f"{int(machine.host_bytes / GIB / times)}GB"
        if plans := attempt(**mesh):
            return plans
    return {}


def longest_context(flags: ProfileFlags, machine: Machine) -> int:
    """Returns the tokens of the longest sequence that fits; 0: none does."""
    recipe = decide(flags)
    execution = recipe.execution(machine.given.attention_backend)
    step, _ = make_step(flags, recipe, dataclasses.replace(machine, given=execution))
    return find_max_context(step, machine.gpu_bytes, machine.host_bytes)


def host_flag(flags: ProfileFlags, num_bytes: float) -> dict[str, str]:
    """Returns the flag, and its value, by which each process may pin so many bytes."""
    if flags.host_memory is None:
        return {"host_budget": f"{math.ceil(num_bytes / GIB)}GB"}
    larger = (size for size in SOLD_GB if size * GIB > parse_bytes(flags.host_memory))
    enough = (size for size in larger if budget_of_machine(size * GIB, flags.nproc) >= num_bytes)
    return {"host_memory": f"{next(enough, SOLD_GB[-1])}GB"}


def find_faster(flags: ProfileFlags, machine: Machine, world: World, plan: Plan) -> dict[str, Plan]:
    """Returns changes that save a tenth of the seconds of `plan` and more, as `change` does.

    Smaller micro-batches change no loss: the fastest are named where they save a twentieth.
    Attention to chosen blocks is not tried on a GPU at hand: its kernels would have to be compiled
    and measured.
    """
    plans = {}
    if flags.optimizer_state == "float32":
        plans |= change(flags, machine, world, optimizer_state="compact")
    if flags.lora is not None and flags.lora_bits > 4:
        plans |= change(flags, machine, world, lora_bits=4)
    if math.isfinite(machine.host_bytes):
        # auto might need more, for float32 state
        step = plan.step.with_format(plan.execution.state_format)
        roomy = make_plan(step, machine.gpu_bytes, math.inf, machine.rates)
        plans |= change(flags, machine, world, **host_flag(flags, roomy.host_bytes))
    if flags.attention_type == "full" and world.device.type == "cpu":
        plans |= change(flags, machine, world, attention_type="sparse")
    splits: dict[str, Plan] = {}
    # experts' auxiliary loss is of a micro-batch
    for n in (2, 4, 8) if not plan.step.shard.has_experts else ():
        if flags.batch_size % n == 0:
            sizes = {"batch_size": flags.batch_size // n}
            sizes["gradient_accumulation_steps"] = n * flags.gradient_accumulation_steps
            splits |= change(flags, machine, world, **sizes)
    least = min((candidate.seconds for candidate in splits.values()), default=math.inf)
    fastest = {
        words: candidate
        for words, candidate in splits.items()
        if candidate.seconds == least < 0.95 * plan.seconds
    }
    return fastest | {
        words: candidate
        for words, candidate in plans.items()
        if candidate.seconds < 0.9 * plan.seconds
    }


# The answer


def report(
    flags: ProfileFlags, recipe: StepRecipe, machine: Machine, can_measure: bool, world: World
) -> dict:
    about = f"machine: {machine.description}; attention kernel {machine.given.attention_backend}\n"
    if (gpus := flags.nproc * flags.nnodes) > 1:
        about += f"{gpus} GPUs, predicted only: memory is of one GPU, host memory of its process\n"
    about += (
        f"model: {flags.init_from or flags.model_size}, "
        f"{machine.model.num_parameters():,} parameters"
    )
    step, epoch = make_step(flags, recipe, machine)
    if flags.init_from and not (flags.compare or flags.find_max_context):
        longest = step.documents.longest if step.documents else step.context_length
        extends = "training.export " if flags.lora else ""  # adapters need an extended base
        if text := beyond(machine.model, machine.model.max_position_embeddings, longest, extends):
            about += f"\npositions: {text}"
    if flags.compare:
        print(about)
        return report_comparison(step, machine, flags.memory_budget)
    if flags.find_max_context:
        print(about)
        return report_max_context(step, machine)
    part = None
    if flags.num_layers is not None:
        shape = dataclasses.replace(machine.model, num_hidden_layers=flags.num_layers)
        kinds = machine.given.kinds[: flags.num_layers]
        part = step_on_meta(
            shape,
            *flags.lengths,
            dataclasses.replace(machine.given, kinds=kinds),
            trained=recipe.trained,
            scoring=scoring_of(flags, recipe),
        )
    plan, fits = choose_plan(step, machine, flags.gradient_checkpointing)
    if fits and flags.gradient_checkpointing is None:
        changes = find_faster(flags, machine, world, plan)
    else:
        changes = {} if fits else find_changes(flags, machine, world)
    if can_measure and flags.memory_budget is not None:
        cap_gpu_memory(int(machine.gpu_bytes), world.device)
    build = functools.partial(build_bench, world=world) if can_measure else None
    results = report_step(step, machine, flags, about, plan, fits, changes, epoch, part, build)
    if flags.picture:
        plans = plan_contexts(step, *machine.limits)
        if plans:
            draw_contexts(
                flags.picture,
                f"{flags.init_from or flags.model_size} on {machine.description}",
                plans,
            )
        else:
            print("no context fits, so --picture draws nothing", file=sys.stderr)
        results["contexts"] = {
            n: {"peak": p.peak.bytes, "host_bytes": p.host_bytes, "seconds": p.seconds}
            for n, p in plans.items()
        }
    return results


@command
def main(argv: list[str]) -> int:
    """Returns the exit status: 1 where a step does not fit, or after an error."""
    flags = read_profile_flags(argv)
    if not flags.init_from:
        flags.model_size = flags.model_size or "4B"
    with join_world("cpu" if flags.gpu else flags.device) as world:
        if world.size > 1:
            raise UserError(
                "profile_memory.py profiles one GPU: start it with python, not torchrun"
            )
        is_plain = (
            flags.nproc * flags.nnodes == 1 and not flags.data and flags.objective == "next_token"
        )
        is_of_one_step = not (flags.find_max_context or flags.compare)
        can_measure = world.device.type == "cuda" and is_plain and is_of_one_step
        recipe = decide(flags)
        check_flags(flags, recipe.model.num_hidden_layers, can_measure)
        # In a comparison memory_budget is the budget of the planned way only.
        memory_budget = None if flags.compare else flags.memory_budget
        machine = choose_machine(flags, recipe, memory_budget, world)
        machine = dataclasses.replace(machine, carried_bytes=carried_bytes(flags.init_from))
        results = report(flags, recipe, machine, can_measure, world)
    if flags.json:
        settings = {
            name: value for name, value in vars(flags).items() if not isinstance(value, Path)
        }
        environment = {
            **dataclasses.asdict(machine),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        # `str` writes dtypes
        written = json.dumps(
            {"settings": settings, "environment": environment, **results}, default=str
        )
        # JSON does not know infinity
        finite = json.loads(written, parse_constant=lambda infinite: None)
        replace_file(flags.json, json.dumps(finite) + "\n")
    return 0 if results.get("answer", {}).get("fits", True) else 1


if __name__ == "__main__":
    # `python profile_memory.py | head` ends as `head` does
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
