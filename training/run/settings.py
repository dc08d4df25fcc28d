"""The settings of a run: one flat dataclass, whose fields are flags and keys of a TOML file, and
which are refused."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import ClassVar

from training.flags import SMALLEST, Rule, flag, given_flags, refuse
from training.host.choices import (
    ATTENTION_TYPES,
    BAD_ROWS,
    IMPLEMENTATIONS,
    LINEARS,
    LORA_BITS,
    LOSSES,
    MODEL_SIZES,
    OPTIMIZER_STATES,
    PACKINGS,
    REASONING,
    SUFFIXES,
    TARGETS,
)
from training.host.errors import UserError, import_optional
from training.host.files import check_can_write
from training.host.other_trainers import ABSENT
from training.objectives.flags import ObjectiveFlags
from training.run.rules import STARTED, TRAIN

DEFAULT_STEPS = 300
PEAK_LEARNING_RATE = (
    2e-5  # suits continued training; training from scratch wants more, and a far longer warm-up
)
TINY_PEAK_LEARNING_RATE = 3e-3
LORA_PEAK_LEARNING_RATE = 2e-4
USUAL_PEAKS = (
    f"{PEAK_LEARNING_RATE}, with lora {LORA_PEAK_LEARNING_RATE}, for tiny {TINY_PEAK_LEARNING_RATE}"
)
OVERLONG, RESUME = ("refuse", "drop", "split"), ("no", "yes", "auto")
CHECKPOINT_INTERVAL, KEPT_CHECKPOINTS = "30min", 2
VALIDATION_SEQUENCES, VALIDATION_TOKENS = 128, 2**20
LONG_CONTEXT = 16_384  # tokens
MANY_EPOCHS = 10  # a run of more is warned of
COLLECTIVE_TIMEOUT = 10  # minutes


@dataclass
class StepFlags:
    """Flags of a training step, which train.py takes and profile_memory.py profiles."""

    model_size: str | None = flag(
        None,
        "shape of a model: 4B is Qwen3-4B's; default: init_from's, else tiny",
        MODEL_SIZES,
        group="model",
    )
    init_from: str | None = flag(
        None, "weights to start from: folder of a released model, or a checkpoint"
    )
    lora: int | None = flag(
        None, "train adapters of this rank; default: init_from's, if it has", least=1, most=2**13
    )
    lora_targets: str | None = flag(
        None, "such as q_proj,gate,experts; default: all-linear, all of a block"
    )
    lora_bits: int = flag(
        16, "bits per element of frozen matrices; 8, 4 (NF4) cost some loss", LORA_BITS
    )
    freeze_routers: bool = flag(False, "routers of a mixture of experts keep their weights")
    rope_scaling: str | None = flag(
        None, "extends the context of init_from: yarn:4, yarn:4:32768 or linear:4"
    )
    context_length: int = flag(
        512, "tokens in a sequence", least=2, most=2**27, group="batch", tokens=True
    )
    batch_size: int = flag(
        None, f"sequences at a time; default: 8, from {LONG_CONTEXT} tokens 1", least=1, most=2**20
    )
    gradient_accumulation_steps: int = flag(1, "micro-batches in a step", least=1, most=2**20)
    attention_type: str = flag(
        "full", "sparse, nsa: to chosen blocks", ATTENTION_TYPES, group="attention"
    )
    selected_blocks: str | None = flag(
        None, "blocks of 64 a token chooses, by layer: 64x4,32; default: 32, nsa: 16"
    )
    dense_below: int | None = flag(
        None, "sparse: shorter documents attend to everything; default: 8192", least=1, tokens=True
    )
    attention_backend: str = flag(
        "auto", "attention kernel: auto, cudnn, flash, flash-attn-4 or cpu"
    )
    loss_impl: str = flag(
        "auto", "auto: chunked above 10 GB of logits, and where 8 does not divide the vocabulary",
        LOSSES,
        group="memory and speed",
    )  # fmt: skip
    linear: str = flag(
        "bf16",
        "others: blocks' products in 8 bits, fp8 in backward alone; see docs/memory.md",
        LINEARS,
    )
    device: str = flag("auto", "auto: a GPU if there is one", ("auto", "cuda", "cpu"))
    gradient_checkpointing: bool = flag(
        False, "no plan: keep each block's input, recompute the rest in backward"
    )
    memory_budget: str | None = flag(
        None, "GPU memory to plan for and keep to: 24GB; default: auto, what is free"
    )
    host_budget: str | None = flag(
        None, "host memory each process may pin; default: its share of 80% of what is free"
    )
    optimizer_state: str = flag(
        "auto", "compact: 8-bit moments, 4.1 bytes per parameter, not 12", OPTIMIZER_STATES
    )
    context_parallel_size: int = flag(
        1, "GPUs that share each sequence", least=1, most=2**20, group="several GPUs"
    )
    tensor_parallel_size: int = flag(1, "GPUs that share each matrix", least=1, most=2**20)
    replicate: int = flag(
        1, "copies of the weights; 1 per machine spares a slow network", least=1, most=2**20
    )

    absent: ClassVar[dict[str, str]] = (
        ABSENT  # flags of other trainers, and why there is nothing like them
    )


@dataclass
class TrainConfig(ObjectiveFlags, StepFlags):
    """Train a decoder; torchrun --nproc_per_node=N train.py trains it on N GPUs."""

    lora_alpha: float | None = flag(
        None, "scale x rank; default: 2 x rank", least=SMALLEST, most=1e9, group="model"
    )
    selected_blocks_start: str | None = flag(
        None, "of the first step; falls to selected_blocks", group="attention"
    )
    selected_blocks_steps: int | None = flag(
        None, "steps from selected_blocks_start to selected_blocks", least=1
    )
    kernels: str = flag(
        "auto", "auto: Triton on GPUs, PyTorch on CPUs", IMPLEMENTATIONS, group="memory and speed"
    )
    compile: bool = flag(False, "no plan: torch.compile each block")
    collective_timeout: int | None = flag(
        None,
        f"minutes to wait for a process; default: {COLLECTIVE_TIMEOUT}",
        least=1,
        most=2**20,
        group="several GPUs",
    )
    data: list[str] = flag(
        list, "files, folders, prepared sets; default: Python's library", group="data"
    )
    suffixes: str | None = flag(None, f"of texts, such as .rs,.c,.html; default: {SUFFIXES}")
    columns: str | None = flag(
        None, "names of rows' fields in data: prompt=question,completion=answer"
    )
    bad_rows: str | None = flag(None, "rows of data that cannot be read; default: refuse", BAD_ROWS)
    data_weights: str | None = flag(
        None, "shares of the sequences by path of data: 3,1; default: all as one corpus"
    )
    packing: str | None = flag(
        None, "default: best_fit for data with samples, else concatenate", PACKINGS
    )
    overlong: str | None = flag(
        None, "best_fit: documents longer than a sequence; default: refuse", OVERLONG
    )
    chat_reasoning: str | None = flag(
        None, "reasoning before a chat's last user message; default: template", REASONING
    )
    chat_template: str | None = flag(
        None, "a Jinja file, or chatml, with its tokens; default: the folder's"
    )
    tokenizer: str | None = flag(
        None, "a tokenizer.json or its folder, or bytes; default: init_from's, else bytes"
    )
    validation_fraction: float = flag(
        0.02, "share of the tokens held out", least=SMALLEST, most=1 - SMALLEST
    )
    validation_data: list[str] = flag(
        list, "held-out files of your own, as data has them; nothing of data is held out"
    )
    show_batch: bool | str = flag(
        False,
        "print a batch, with what is trained on between [[ and ]], or write it as a page "
        "FILE.html, and exit",
    )
    max_steps: int | None = flag(
        None, f"steps in all; default: {DEFAULT_STEPS} more", least=1, group="optimizer"
    )
    epochs: float | None = flag(
        None, "passes over the data, in place of max_steps: 0.5", least=SMALLEST, most=1e9
    )
    learning_rate: float | None = flag(
        None, f"peak; default: {USUAL_PEAKS}", least=SMALLEST, most=1.0
    )
    lora_plus: float | None = flag(
        None, "learning rate of B over A's, LoRA+; default: 1", least=SMALLEST, most=1e9
    )
    final_learning_rate_ratio: float = flag(
        0.1, "the cosine ends at this share of the peak", least=0.0, most=1.0
    )
    warmup_steps: int = flag(20, "steps of linear warm-up", share_of="steps")
    weight_decay: float = flag(
        0.1, "decay of the matrices, and of nothing else", least=0.0, most=10.0
    )
    max_grad_norm: float = flag(
        1.0, "gradients are scaled down to this global norm", least=SMALLEST, most=1e9
    )
    skip_nonfinite_steps: int = flag(
        0, "steps that may be left out because their loss or gradient is not finite"
    )
    seed: int = flag(0, "draws the initial weights, the data's order and the sample")
    output_dir: str = flag(
        "runs/default", "checkpoints and metrics.jsonl go there", group="checkpoints"
    )
    resume: str = flag(
        "no", "go on from output_dir's newest checkpoint; auto: if there is one", RESUME, bare="yes"
    )
    save: str = flag(
        "full",
        "a checkpoint holds: full, to resume from; model; or none",
        ("full", "model", "none"),
    )
    checkpoint_interval: str | None = flag(
        None, f"steps, or minutes; 0: at the end; default: {CHECKPOINT_INTERVAL}"
    )
    keep_checkpoints: int | None = flag(
        None, f"last ones, besides the best; default: {KEPT_CHECKPOINTS}", least=1
    )
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

    rules: ClassVar[tuple[Rule, ...]] = TRAIN + STARTED
    translator: ClassVar[str] = "training.config"  # prints settings of other trainers as TOML

    @property
    def steps(self) -> int | None:
        """Steps of the run in all; None: a checkpoint or the data say so."""
        return self.max_steps or (
            DEFAULT_STEPS if self.resume == "no" and self.epochs is None else None
        )

    @property
    def goal(self) -> str:
        return "max_steps" if self.epochs is None else "epochs"

    def __post_init__(self):
        """Fill in what follows from other settings. Targets have the order that adapters have them
        in."""
        if self.batch_size is None:
            self.batch_size = 8 if self.context_length < LONG_CONTEXT else 1
        if self.validation_sequences is None:
            self.validation_sequences = max(
                1, min(VALIDATION_SEQUENCES, VALIDATION_TOKENS // self.context_length)
            )
        if self.learning_rate is None:
            is_tiny = self.model_size == "tiny" or not (self.model_size or self.init_from)
            of_weights = TINY_PEAK_LEARNING_RATE if is_tiny else PEAK_LEARNING_RATE
            self.learning_rate = of_weights if self.lora is None else LORA_PEAK_LEARNING_RATE
        if self.lora is not None:
            self.lora_alpha = self.lora_alpha or 2.0 * self.lora
            self.lora_targets = "all-linear" if self.lora_targets is None else self.lora_targets
        if self.lora_targets is not None:
            order = {name: i for i, name in enumerate(TARGETS)}
            self.lora_targets = ",".join(
                sorted(self.lora_targets.split(","), key=lambda name: order.get(name, -1))
            )


given_settings = partial(
    given_flags, TrainConfig, program="train.py"
)  # the settings of flags and --config, by name


def check_config(config: TrainConfig, given: Iterable[str], rules: Iterable[Rule] = TRAIN) -> None:
    """Refuse flags that contradict each other or would have no effect; `given_flags` has checked
    each value alone.

    Args:
        given: names of the flags that were given. A resumed run has its other settings from the run
        before. rules: TRAIN, or all of TrainConfig.rules once the start of the run is known.
    """
    refuse(config, given, rules)
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
                f"{name} {written} lies in data {path}, which would be read with what the run "
                "writes"
            )
            raise UserError(f"{why}; give another {name}")
    ends = {"warmup_steps": "its peak learning rate"}
    if config.selected_blocks_start is not None:  # without it a rule refuses selected_blocks_steps
        ends["selected_blocks_steps"] = "selected_blocks"
    for name, end in ends.items():
        if (
            name in given
            and config.steps is not None
            and (steps := getattr(config, name)) > config.steps
        ):
            what = (
                f"{name} {steps} is longer than the run of {config.steps} steps, which would never "
                f"reach {end}"
            )
            raise UserError(f"{what}; lower it, or raise {config.goal}")
