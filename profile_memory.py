"""Profile the memory of a training step, stage by stage: `python profile_memory.py --context_length 131072`.

On a GPU a step is predicted and measured, side by side: a whole step as train.py runs it on one GPU (bf16 weights,
float32 masters and Adam moments), of random tokens, one document per sequence. Without a GPU, or for another GPU that
--gpu names, a step is predicted. The step follows the plan that train.py would make for the memory at hand;
--gradient_checkpointing and --no-gradient_checkpointing profile a step without a plan instead.

`--nproc 8 --context_parallel_size 4` predicts the step that train.py would run under torchrun on 8 GPUs of one machine,
4 sharing each sequence: bytes of one GPU, and seconds; with `--nnodes 2` on 8 GPUs each of 2 machines.
benchmarks.bench_train_step measures such a step.

`--find_max_context` says how long a context fits, `--compare` what the chunked loss, checkpointing and offloading save.
`--measure` confirms either on the GPU. training/memory/reports.py answers these questions. Memory sizes are in GiB,
2**30 bytes; "24GB" on the command line means 24 GiB.
"""

import dataclasses
import functools
import json
import math
import signal
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch

from kernels.attention.full import BACKENDS
from model import MODEL_SIZES, ModelConfig
from training.attention_flags import kinds_of
from training.checkpoint.weights import shape_of_weights
from training.flags import Idle, flag, read_flags
from training.host.errors import UserError
from training.host.files import check_can_write
from training.host.processes import command
from training.host.sizes import available_host_bytes, parse_bytes
from training.memory.cost_model import gib
from training.memory.execution import Execution
from training.memory.machine import DRIVER_BYTES, cap_gpu_memory, gpu_budget, measure_rates, parse_gpu, scale_rates
from training.memory.reports import Machine, report_comparison, report_max_context, report_step
from training.parallel.tensor import check_matrix_sharing
from training.parallel.ulysses import check_sharing
from training.parallel.world import World, join_world
from training.run.build import build_bench, settled_execution, shape_with, step_on_meta, without_plan
from training.run.settings import StepFlags

CONTEXT_LENGTH = 131_072
FOR_ONE_STEP = "context_length gradient_checkpointing num_layers all_stages timeline snapshot"
MOST_LAYERS = 256  # a plan for more would take minutes


@dataclass
class ProfileFlags(StepFlags):
    """Profile the memory of a training step, stage by stage."""

    model_size: str | None = flag(None, "default: 4B, unless init_from is given", MODEL_SIZES)
    context_length: int | None = flag(None, f"tokens in a sequence; default: {CONTEXT_LENGTH}", least=2, most=2**27)
    batch_size: int = flag(1, "sequences in a micro-batch", least=1, most=2**20)
    attention_backend: str = flag("auto", "attention kernel", [name for name in BACKENDS if name != "cpu"])
    gradient_checkpointing: bool | None = flag(None, "no plan: checkpoint every block, or keep all")
    nproc: int = flag(1, "predict for so many GPUs of a machine, as torchrun's --nproc_per_node", least=1, most=2**10)
    nnodes: int = flag(1, "predict for so many machines, as torchrun's --nnodes", least=1, most=2**16)
    gpu: str | None = flag(None, "predict for another GPU: RTX4090, A100-80GB, H100 ..., or a size such as 24GB")
    find_max_context: bool = flag(False, "the longest context that fits")
    compare: bool = flag(False, "with and without chunked loss, checkpointing, a plan; 32k to 256k")
    measure: bool = flag(False, "with find_max_context and compare: confirm on the GPU")
    num_layers: int | None = flag(None, "measure so many of the layers, where a whole step takes too long", least=1)
    all_stages: bool = flag(False, "a row for each stage; else equal neighbouring layers share rows")
    timeline: Path | None = flag(None, "draw the step there (.png, .svg)")
    snapshot: Path | None = flag(None, "write PyTorch's memory snapshot of the step there (.pickle)")
    json: Path | None = flag(None, "write everything there")

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle("model_size", "with init_from; drop one", lambda f: f.init_from is not None),
        Idle("find_max_context loss_impl", "with compare; drop one", lambda f: f.compare),
        Idle(FOR_ONE_STEP, "with find_max_context; drop one", lambda f: f.find_max_context),
        Idle(FOR_ONE_STEP, "with compare; drop one", lambda f: f.compare),
        Idle("memory_budget host_budget", "with gradient_checkpointing; drop one",
             lambda f: f.gradient_checkpointing is not None),
        Idle("device", "with gpu, which predicts for another; drop one", lambda f: f.gpu and f.device == "cuda"),
        Idle("measure", "but with find_max_context or compare: a step is measured anyway",
             lambda f: not (f.find_max_context or f.compare)),
    )  # fmt: skip

    @property
    def lengths(self) -> tuple[int, int, int]:
        """(tokens in a sequence, sequences in a micro-batch, micro-batches in a step)."""
        return self.context_length or CONTEXT_LENGTH, self.batch_size, self.gradient_accumulation_steps

    @property
    def shape(self) -> ModelConfig:
        """The shape of --init_from's weights or of --model_size, with the parameters of --attention_type."""
        size = shape_of_weights(self.init_from) if self.init_from else MODEL_SIZES[self.model_size]
        return shape_with(self.attention_type, size)


def check_flags(flags: ProfileFlags, can_measure: bool) -> None:
    """Refuse flags without effect, sizes that do not fit each other, and files that could not be written."""
    layers = flags.shape.num_hidden_layers
    if layers > MOST_LAYERS:
        raise UserError(f"{flags.init_from} has {layers} layers; up to {MOST_LAYERS} are profiled, give other weights")
    if flags.num_layers is not None and flags.num_layers > layers:
        raise UserError(f"num_layers must be at most {layers}, got {flags.num_layers}")
    kinds_of(flags, flags.shape)
    check_mesh(flags)
    for name in ("measure", "num_layers", "snapshot"):
        if getattr(flags, name) and not can_measure:
            raise UserError(
                f"{name} needs one GPU to measure on, not --gpu, --nproc, --nnodes or --device cpu; drop it"
            )
    for name in ("timeline", "snapshot", "json"):
        if path := getattr(flags, name):
            check_can_write(path, f"--{name}")
    if flags.timeline and flags.timeline.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--timeline draws .png, .svg or .pdf, got {flags.timeline}")
    if flags.timeline and find_spec("matplotlib") is None:
        raise UserError("--timeline needs matplotlib: pip install matplotlib")


def check_mesh(flags: ProfileFlags) -> None:
    """Refuse numbers of GPUs that cannot share sequences or matrices, and those for which no prediction is made."""
    context, tensor, shape = flags.context_parallel_size, flags.tensor_parallel_size, flags.shape
    if flags.nproc % (context * tensor):
        sizes = f"context_parallel_size {context} x tensor_parallel_size {tensor}"
        raise UserError(f"{sizes} must divide nproc {flags.nproc}; give other numbers of GPUs")
    check_matrix_sharing(tensor, shape)
    check_sharing(context, shape, any(kind.list_length for kind in kinds_of(flags, shape)), tensor)
    if message := without_plan(flags, shape.share(tensor)):
        raise UserError(f"{message}; lower context_parallel_size")


def choose_machine(flags: ProfileFlags, memory_budget: str | None, world: World) -> Machine:
    """The machine to plan for: the GPU at hand, or the one that --gpu names; without either an H200."""
    model = flags.shape
    kinds, loss_impl = kinds_of(flags, model), flags.loss_impl
    if world.device.type == "cuda":
        given = settled_execution(loss_impl, flags.attention_backend, world.device, kinds)
        gpu_bytes = gpu_budget(memory_budget or "auto", world.device)
        part = model.share(flags.tensor_parallel_size)
        rates = measure_rates(part, given.attention_backend, world.device, flags.lengths[0], given.kinds)
        torch.cuda.empty_cache()
        name = torch.cuda.get_device_name(world.device)
        host_bytes = parse_bytes(flags.host_budget) if flags.host_budget else available_host_bytes() / flags.nproc
        return Machine(name, gpu_bytes, host_bytes, rates, model, given)
    gpu, name = parse_gpu(flags.gpu or "H200"), flags.gpu or "no GPU in use, so an H200"
    gpu_bytes = gpu.memory_bytes - DRIVER_BYTES
    if memory_budget not in (None, "auto"):
        gpu_bytes = parse_bytes(memory_budget)
        if flags.gpu and gpu_bytes > gpu.memory_bytes:
            raise UserError(f"memory_budget {gib(gpu_bytes)} is more than the {gib(gpu.memory_bytes)} of {flags.gpu}")
    backend = gpu.attention_backend if flags.attention_backend == "auto" else flags.attention_backend
    if backend == "flash-attn-4" and gpu.attention_backend == "flash":
        raise UserError(f"flash-attn-4 needs compute capability 9.0, which {flags.gpu} has not; use auto")
    given = Execution(loss_impl=loss_impl, attention_backend=backend, kinds=kinds)
    description = f"{name}; its speed is an H200's scaled by data sheets, not measured"
    host_bytes = math.inf if flags.host_budget is None else parse_bytes(flags.host_budget)
    return Machine(description, gpu_bytes, host_bytes, scale_rates(gpu, backend, given.kinds), model, given)


def report(flags: ProfileFlags, machine: Machine, can_measure: bool, world: World) -> dict:
    """Print the answer that the flags ask for, and return what --json writes."""
    mesh = flags.nproc * flags.nnodes, flags.context_parallel_size, flags.tensor_parallel_size, flags.nnodes
    step = step_on_meta(machine.model, *flags.lengths, machine.given, *mesh)
    measures = flags.measure if flags.find_max_context or flags.compare else can_measure
    build = functools.partial(build_bench, world=world) if measures else None
    if flags.compare:
        return report_comparison(step, machine, flags.memory_budget, world.device, build)
    if measures and (flags.find_max_context or flags.memory_budget is not None):
        cap_gpu_memory(int(machine.gpu_bytes), world.device)
    if flags.find_max_context:
        return report_max_context(step, machine, build)
    part = None
    if flags.num_layers is not None:
        shape = dataclasses.replace(machine.model, num_hidden_layers=flags.num_layers)
        part = step_on_meta(shape, *flags.lengths, machine.given)
    return report_step(step, machine, flags, part, build)


@command
def main(argv: list[str]) -> None:
    flags = read_flags(ProfileFlags, argv, "profile_memory.py")
    if not flags.init_from:
        flags.model_size = flags.model_size or "4B"
    with join_world("cpu" if flags.gpu else flags.device) as world:
        if world.size > 1:
            raise UserError("profile_memory.py profiles one GPU: start it with python, not torchrun")
        can_measure = world.device.type == "cuda" and flags.nproc * flags.nnodes == 1
        check_flags(flags, can_measure)
        # In a comparison memory_budget is the budget of the planned way only.
        machine = choose_machine(flags, None if flags.compare else flags.memory_budget, world)
        print(f"machine: {machine.description}; attention kernel {machine.given.attention_backend}")
        if (gpus := flags.nproc * flags.nnodes) > 1:
            print(f"{gpus} GPUs, predicted only: memory is of one GPU, host memory of its process")
        print(f"model: {flags.init_from or flags.model_size}, {machine.model.num_parameters():,} parameters")
        results = report(flags, machine, can_measure, world)
    if flags.json:
        settings = {name: value for name, value in vars(flags).items() if not isinstance(value, Path)}
        environment = {**dataclasses.asdict(machine), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        written = json.dumps({"settings": settings, "environment": environment, **results})
        finite = json.loads(written, parse_constant=lambda infinite: None)  # JSON does not know infinity
        flags.json.write_text(json.dumps(finite) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python profile_memory.py | head` ends as `head` does
    sys.exit(main(sys.argv[1:]))
