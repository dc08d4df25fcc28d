"""Decides the optimizer of a run: its rates and limits, and the format of its state."""

from dataclasses import dataclass

from kernels.compact_adamw import GROUP
from model import ModelConfig
from training.host.errors import UserError
from training.optim.adamw import warmup_cosine
from training.optim.flags import OptimizerFlags, StateFlags
from training.optim.quantized import GROUP as QUANTIZED_GROUP


@dataclass(frozen=True)
class LearningRate:
    """A linear warm-up to the peak, then a cosine down to a share of it."""

    peak: float
    warmup_steps: int
    final_ratio: float

    def at(self, step: int, cosine_steps: int) -> float:
        """Returns the rate of a step, counted from 1.

        Steps after `cosine_steps` have the cosine's last rate.
        """
        return warmup_cosine(
            step - 1,
            learning_rate=self.peak,
            warmup_steps=self.warmup_steps,
            max_steps=cosine_steps,
            final_ratio=self.final_ratio,
        )


@dataclass(frozen=True)
class OptimRecipe:
    """Numbers of the optimizer that stay the same over a run."""

    learning_rate: LearningRate
    weight_decay: float
    lora_plus: float  # factor of the learning rate of adapters' B
    max_grad_norm: float  # limit of the global norm, to which gradients are scaled down
    most_skipped: int  # steps without a finite loss or gradient that may be left out


def decide_optim(flags: OptimizerFlags) -> OptimRecipe:
    return OptimRecipe(
        decide_learning_rate(flags),
        flags.weight_decay,
        flags.lora_plus or 1.0,
        flags.max_grad_norm,
        flags.skip_nonfinite_steps,
    )


def decide_learning_rate(flags: OptimizerFlags) -> LearningRate:
    assert flags.learning_rate is not None, "TrainConfig fills it in"
    return LearningRate(flags.learning_rate, flags.warmup_steps, flags.final_learning_rate_ratio)


def state_format_of(flags: StateFlags, hidden_size: int, has_adapters: bool) -> str:
    """Returns the format of the optimizer's state, as the flags request it.

    Adapters have float32 state, as has a model whose rows are no whole groups. Raises UserError for
    compact state of such rows; a rule refuses it beside adapters.
    """
    if has_adapters:
        return "float32"
    requested = flags.optimizer_state
    if hidden_size % GROUP == 0:
        return requested
    if requested == "compact":
        rows = f"rows of {hidden_size}, which is no multiple of {GROUP}"
        raise UserError(f"optimizer_state compact has no effect on {rows}; drop it")
    return "float32"


def check_lora_bits(bits: int, model: ModelConfig, num_gpus: int) -> None:
    """Refuses quantized weights on several GPUs, or with rows that are no whole groups."""
    if bits == 16:
        return
    if num_gpus > 1:
        raise UserError(
            f"lora_bits {bits} on {num_gpus} GPUs is not supported: FSDP2 shards bf16; "
            "give lora_bits 16"
        )
    for name, parameter in model.parameters().items():
        columns = parameter.shape[-1]
        if parameter.may_quantize and columns % QUANTIZED_GROUP:
            matrix = f"{name.removesuffix('.weight')} has {columns} columns"
            needs = f"lora_bits {bits} needs rows of whole groups of {QUANTIZED_GROUP}"
            raise UserError(f"{needs}, and {matrix}; give lora_bits 16")
