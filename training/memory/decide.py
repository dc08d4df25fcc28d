"""Decides a training step: its batch, how its layers attend and multiply, and the memory that it
may take."""

from dataclasses import dataclass

import torch

from kernels.attention.libraries import choose_backend
from kernels.fp8 import check_fp8
from kernels.linear import PLAIN, Linear
from kernels.mixed import linear_maps
from kernels.parts import MixerKind
from model import ModelConfig
from training.families.decide import decide_trained
from training.families.trained import Trained
from training.host.errors import UserError, refused_as_user_error
from training.memory.execution import Execution
from training.memory.kinds import kinds_of
from training.optim.decide import check_lora_bits, state_format_of
from training.optim.formats import frozen_format
from training.parallel.tensor import check_matrix_sharing
from training.parallel.ulysses import check_sharing


@dataclass(frozen=True)
class Batch:
    """Sizes of a step on one rank, or on the ranks that share sequences."""

    context_length: int  # tokens of a sequence, padding included
    batch_size: int  # sequences of a micro-batch
    micro_batches: int

    @property
    def sequences(self) -> int:
        return self.batch_size * self.micro_batches

    @property
    def tokens(self) -> int:
        return self.context_length * self.sequences


@dataclass(frozen=True)
class StepRecipe:
    """A training step as flags decide it, on any machine."""

    model: ModelConfig
    batch: Batch
    kinds: tuple[MixerKind, ...]  # how each layer attends
    trained: Trained  # the part of the model that is trained
    linear: Linear  # the maps of all blocks
    linear_name: str  # the maps as --linear names them
    frozen_bits: int  # bits per element of frozen matrices
    state_format: str  # format of the optimizer's state; "auto": a plan chooses
    impl: str  # Triton kernels or their references
    loss_impl: str  # "auto": the size of the logits chooses
    attention_backend: str  # "auto": the device chooses, see `backend`
    context_ranks: int  # GPUs that share each sequence
    tensor_ranks: int  # GPUs that share each matrix

    def backend(self, device: torch.device) -> str:
        """Returns the kernel of --attention_backend on `device`, or raises UserError if the device
        lacks it."""
        with refused_as_user_error():
            return choose_backend(self.attention_backend, device)

    def execution(self, attention_backend: str) -> Execution:
        return Execution(
            loss_impl=self.loss_impl,
            attention_backend=attention_backend,
            kinds=self.kinds,
            linear=self.linear,
            frozen=frozen_format(self.frozen_bits),
            state_format=self.state_format,
            impl=self.impl,
        )

    def check_linear(self, device: torch.device) -> None:
        """Refuses products in 8 bits that the device, or the widths of the model, do not have."""
        if self.linear_name == PLAIN.name:
            return
        shard = self.model.shard(self.tensor_ranks)
        widths = {"head_dim": shard.attention.head_dim}  # heads of a step
        for layer in range(shard.num_hidden_layers):
            for name, (rows, columns) in shard.maps(layer).items():
                whose = f"of layer {layer}'s {name}"
                widths[f"number of rows {whose}"] = rows
                widths[f"number of columns {whose}"] = columns
        with refused_as_user_error(f"linear {self.linear_name}: "):
            check_fp8(device, widths)


def decide_step(flags, model: ModelConfig, num_gpus: int) -> StepRecipe:
    """Returns what the flags of a step, of train.py or profile_memory.py, decide for `model`.

    Raises UserError for flags that do not fit the model's shape or the number of GPUs, whatever the
    machine.
    """
    has_adapters = flags.lora is not None
    impl = getattr(flags, "kernels", "auto")
    is_distilled = flags.objective == "distill"  # its loss is always chunked
    kinds = kinds_of(flags, model)
    trained = decide_trained(flags, model)
    check_matrix_sharing(flags.tensor_parallel_size, model)
    check_sharing(flags.context_parallel_size, model, kinds, flags.tensor_parallel_size)
    check_parts(flags, model)
    check_lora_bits(flags.lora_bits, model, num_gpus)
    return StepRecipe(
        model=model,
        batch=Batch(*flags.lengths),
        kinds=kinds,
        trained=trained,
        linear=trained.linear(linear_maps(impl)[flags.linear]),
        linear_name=flags.linear,
        frozen_bits=flags.lora_bits,
        state_format=state_format_of(flags, model.hidden_size, has_adapters),
        impl=impl,
        loss_impl="chunked" if is_distilled else flags.loss_impl,
        attention_backend=flags.attention_backend,
        context_ranks=flags.context_parallel_size,
        tensor_ranks=flags.tensor_parallel_size,
    )


def check_parts(flags, model: ModelConfig) -> None:
    """Refuses what mixtures of experts and gated delta nets do not have."""
    without: dict[str, tuple[object, str]] = {}
    if not all(kind.has_keys for kind in model.kinds):
        without["compile"] = False, "gated delta nets are not compiled"
    if model.has_experts:
        without["linear"] = "bf16", "experts multiply in bf16"
        without["compile"] = False, "experts are not compiled"
    for name, (value, why) in without.items():
        flag = getattr(flags, name, value)
        if flag != value:
            raise UserError(
                f"{name} {flag} is not supported: {why}; give {name} {value}, or drop it"
            )


def decide_memory_budget(flags, device: torch.device) -> str | None:
    """Returns --memory_budget, or "auto"; None: nothing is planned, as on a CPU."""
    is_planned = device.type == "cuda" and not (flags.gradient_checkpointing or flags.compile)
    return flags.memory_budget or "auto" if is_planned else None
