"""A run's settings: one flat dataclass, whose fields are the command line's flags and the keys of a TOML file."""

import difflib
import re
import tomllib
import typing
from argparse import ArgumentParser, BooleanOptionalAction
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path

from kernels.common import IMPLEMENTATIONS
from model import MODEL_SIZES
from training.data.chat import REASONING
from training.data.packing import PACKINGS
from training.host.errors import UserError
from training.host.files import read_file

DEFAULT_STEPS = 300
ATTENTION_TYPES = ("full", "sparse", "nsa")  # kinds of attention that a flag can ask for
PEAK_LEARNING_RATE = 2e-5  # for continued training; training from scratch wants more, and a far longer warm-up
TINY_PEAK_LEARNING_RATE = 3e-3
CHECKPOINT_INTERVAL, KEPT_CHECKPOINTS = "30min", 2


def flag(default, help: str, choices: tuple[str, ...] | None = None, bare: str | None = None):
    """A field of a configuration: its default, what `--help` says of it, and its value where a flag stands bare."""
    make = {"default_factory": default} if callable(default) else {"default": default}
    return field(**make, metadata={"help": help, "choices": choices, "bare": bare})


@dataclass
class TrainConfig:
    """Every setting: field name = flag = key of a --config file. The file overrides defaults, flags both."""

    # model
    model_size: str | None = flag(None, "shape of the model; default: init_from's, else tiny", tuple(MODEL_SIZES))
    context_length: int = flag(512, "tokens in a sequence")
    attention_type: str = flag(
        "full", "sparse: to chosen blocks; nsa: native sparse attention; see kernels/attention/sparse", ATTENTION_TYPES
    )
    selected_blocks: str | None = flag(
        None, "blocks of 64 that a token selects, by layer as 64x4,32 (the first four 64); default: 32, nsa: 16"
    )
    selected_blocks_start: str | None = flag(
        None, "as selected_blocks, in the first step; falls to selected_blocks over selected_blocks_steps"
    )
    selected_blocks_steps: int | None = flag(None, "steps from selected_blocks_start to selected_blocks")
    dense_below: int | None = flag(None, "of sparse: shorter documents attend to everything; default: 8192 tokens")
    attention_backend: str = flag("auto", "attention kernel: auto, cudnn, flash, flash-attn-4 or cpu")
    loss_impl: str = flag("auto", "auto: chunked above 10 GB of logits", ("auto", "chunked", "standard"))
    kernels: str = flag("auto", "auto: Triton on GPUs, PyTorch references on CPUs", IMPLEMENTATIONS)
    # data
    data: list[str] = flag(
        list, "files or folders of .txt .md .py .jsonl, or prepared sets; default: Python's standard library"
    )
    data_weights: str | None = flag(None, "shares of the sequences by path of data, as 3,1; default: all as one corpus")
    packing: str | None = flag(
        None, "of documents into sequences; default: best_fit for data with samples, else concatenate", PACKINGS
    )
    overlong: str | None = flag(
        None, "of best_fit: documents longer than context_length; default: refuse", ("refuse", "drop", "split")
    )
    chat_reasoning: str | None = flag(
        None, "of chats before their last user message: as the template does (default), keep or drop", REASONING
    )
    tokenizer: str | None = flag(
        None, "a tokenizer.json or its folder, or bytes; default: init_from's, without init_from bytes"
    )
    validation_fraction: float = flag(0.02, "share of the tokens held out, whole documents")
    # run
    init_from: str | None = flag(
        None, "folder of weights to start from: of Qwen3, Qwen2, Llama or Mistral, or a checkpoint"
    )
    rope_scaling: str | None = flag(
        None, "extends the context of init_from: yarn:4, or yarn:4:32768 with the original length; or linear:4"
    )
    max_steps: int | None = flag(None, f"steps in all; default: {DEFAULT_STEPS} from where the run starts")
    batch_size: int = flag(8, "sequences in a micro-batch of one data-parallel rank")
    gradient_accumulation_steps: int = flag(1, "micro-batches in a step")
    learning_rate: float | None = flag(
        None, f"peak; default: {TINY_PEAK_LEARNING_RATE} for tiny, {PEAK_LEARNING_RATE} else"
    )
    final_learning_rate_ratio: float = flag(0.1, "the cosine ends at this share of the peak")
    warmup_steps: int = flag(20, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "of the matrices")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this global norm")
    skip_nonfinite_steps: int = flag(0, "steps at most, whose loss or gradient is not finite, that are left out")
    seed: int = flag(0, "of the initial weights, the data's order and the sample")
    show_batch: bool = flag(False, "print a batch, with what is trained on between [[ and ]], and exit")
    # what a run leaves
    output_dir: str = flag("runs/default", "checkpoints, metrics.jsonl and the resolved configuration")
    resume: str = flag(
        "no",
        "go on from the newest checkpoint in output_dir that is undamaged, with its settings; flags change them; auto: "
        "where there is none, start",
        ("no", "yes", "auto"),
        bare="yes",
    )
    save: str = flag("full", "a checkpoint holds: full, to resume from; model; or none", ("full", "model", "none"))
    checkpoint_interval: str | None = flag(
        None, f"between checkpoints, in steps or as 30min; 0: only at the end; default: {CHECKPOINT_INTERVAL}"
    )
    keep_checkpoints: int | None = flag(
        None, f"of the last; that of the lowest validation loss is kept besides; default: {KEPT_CHECKPOINTS}"
    )
    validation_interval: int = flag(100, "steps between validations; 0: only at the end")
    validation_sequences: int = flag(128, "held-out sequences in one validation at most; 0: no validation")
    sample_tokens: int = flag(200, "tokens to generate at the end; 0: none")
    tensorboard: bool = flag(False, "also write TensorBoard's event files, into output_dir/tensorboard")
    # machine
    device: str = flag("auto", "auto: a GPU if there is one", ("auto", "cuda", "cpu"))
    gradient_checkpointing: bool = flag(False, "no plan: keep each block's input, recompute the rest in backward")
    memory_budget: str | None = flag(
        None, "GPU memory to plan for and not to exceed: 24GB, or auto for what is free; default on a GPU: auto"
    )
    host_budget: str | None = flag(None, "host memory each process may pin; default: its share of 80% of what is free")
    context_parallel_size: int = flag(1, "GPUs that share each sequence, each with some of the heads in attention")
    tensor_parallel_size: int = flag(1, "GPUs that share each matrix: heads, the MLP's width and the vocabulary")
    compile: bool = flag(False, "no plan: torch.compile each block")


def parse_interval(text: str) -> tuple[int, float]:
    """(steps, seconds) between checkpoints, one of them 0: "200" is every 200 steps, "30min" every 30 minutes.

    Raises:
        UserError: neither.
    """
    match = re.fullmatch(r"(\d{1,9})|(\d{1,6}(?:\.\d{1,6})?)min", text)
    if match is None:
        raise UserError(f"checkpoint_interval must be a number of steps, or of minutes as 30min: got {text!r}")
    return int(match[1] or 0), 60 * float(match[2] or 0)


# Of the numbers among the flags the least and the largest value. Past the largest a step is nonsense, or overflows.
LARGE = 2**31 - 1
SMALLEST = 1e-12  # stands for "above 0"
RANGES = {
    "context_length": (2, 2**27), "batch_size": (1, 2**20), "gradient_accumulation_steps": (1, 2**20),
    "max_steps": (1, LARGE), "warmup_steps": (0, LARGE), "seed": (0, LARGE), "dense_below": (1, LARGE),
    "selected_blocks_steps": (1, LARGE), "keep_checkpoints": (1, LARGE), "validation_interval": (0, LARGE),
    "validation_sequences": (0, LARGE), "sample_tokens": (0, 2**27), "skip_nonfinite_steps": (0, LARGE),
    "context_parallel_size": (1, 2**20), "tensor_parallel_size": (1, 2**20), "learning_rate": (SMALLEST, 1.0),
    "final_learning_rate_ratio": (0.0, 1.0), "weight_decay": (0.0, 10.0), "max_grad_norm": (SMALLEST, 1e9),
    "validation_fraction": (SMALLEST, 1 - SMALLEST),
}  # fmt: skip


def check_config(config: TrainConfig) -> None:
    """Refuse values out of range, and flags that would have no effect.

    Raises:
        UserError: with the value, the limit and what to do.
    """
    for name, (least, most) in RANGES.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"{name} must be between {least} and {most}, got {value}")
    for name, value in vars(config).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (not text or "\0" in text):
                raise UserError(f"{name} is an empty string or has a NUL; give a value, or drop it")
    if config.checkpoint_interval is not None:
        parse_interval(config.checkpoint_interval)
    if config.tensorboard and find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs the tensorboard package: pip install tensorboard")
    for path in config.data or []:
        if not config.show_batch and Path(config.output_dir).resolve().is_relative_to(Path(path).resolve()):
            raise UserError(
                f"output_dir {config.output_dir} lies in data {path}, which would be read with what the run writes; "
                "give another output_dir"
            )
    refusals = {
        "init_from has no effect with resume; drop one, or give --resume auto": (
            config.init_from is not None and config.resume == "yes"
        ),
        "a run that goes on with resume auto needs checkpoints of save full; drop one": (
            config.resume == "auto" and config.save == "model"
        ),
        "rope_scaling has no effect without init_from, whose weights it extends; drop it, or give those": (
            config.rope_scaling is not None and config.init_from is None
        ),
        "checkpoint_interval and keep_checkpoints have no effect with save none; drop them": config.save == "none"
        and (config.checkpoint_interval or config.keep_checkpoints) is not None,
        "gradient_checkpointing has no effect with memory_budget, whose plan decides; drop one": config.memory_budget
        is not None
        and config.gradient_checkpointing,
        "compile has no effect on the blocks that memory_budget places; drop one": config.memory_budget is not None
        and config.compile,
        "selected_blocks_start with compile would compile blocks anew eight times, past PyTorch's limit; drop one": (
            config.selected_blocks_start is not None and config.compile
        ),
        "host_budget has no effect with gradient_checkpointing or compile; drop one": config.host_budget is not None
        and (config.gradient_checkpointing or config.compile),
    }
    for message, refused in refusals.items():
        if refused:
            raise UserError(message)


def given_settings(config_type: type, argv: list[str], description: str) -> dict:
    """The settings that are given, field name -> value: those of --config's TOML file, overridden by flags.

    Args:
        config_type: a dataclass whose fields `flag` made: field name = flag = key of the file.

    Raises:
        UserError: unknown flag or key (the nearest name is offered), a value of the wrong type, an unreadable file.
    """
    parser = Parser(description=description, allow_abbrev=False)
    parser.add_argument("--config", help="TOML file with the same names as the flags")
    types = typing.get_type_hints(config_type)
    for f in fields(config_type):
        kind = _element_type(types[f.name])
        options = {"help": f.metadata["help"].replace("%", "%%"), "default": None, "dest": f.name}
        if kind is bool:
            options["action"] = BooleanOptionalAction
        else:
            options |= {"type": kind, "choices": f.metadata["choices"]}
            if f.metadata["bare"] is not None:
                options |= {"nargs": "?", "const": f.metadata["bare"]}
            if f.metadata["choices"] is None:
                options["metavar"] = kind.__name__.upper()
            if types[f.name] == list[str]:
                options["nargs"] = "+"
        parser.add_argument(f"--{f.name}", **options)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        name, known = unknown[0].split("=")[0], [f"--{f.name}" for f in fields(config_type)] + ["--config"]
        if name == "--pipeline_parallel_size":
            raise UserError(
                "there is no --pipeline_parallel_size: the last stage would hold the loss, and wait or be waited for, "
                "while up to 8B FSDP2 shards all layers; start more processes, or raise --context_parallel_size"
            )
        raise UserError(f"unknown flag {unknown[0]}{_nearest(name, known)}")
    flags = {name: value for name, value in vars(arguments).items() if value is not None and name != "config"}
    return (_read_toml(arguments.config, config_type) if arguments.config else {}) | flags


class Parser(ArgumentParser):
    """An ArgumentParser whose errors are the project's."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def _element_type(annotation) -> type:
    """int for `int` and `int | None`, str for `list[str]`."""
    return next((t for t in typing.get_args(annotation) if t is not type(None)), annotation)


def has_type(value, annotation) -> bool:
    """Whether a value, as TOML or JSON gave it, is what a field of this annotation holds."""
    if typing.get_origin(annotation) is list:
        return isinstance(value, list) and all(has_type(element, *typing.get_args(annotation)) for element in value)
    kinds = typing.get_args(annotation) or (annotation,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_toml(path: str, config_type: type) -> dict:
    types = typing.get_type_hints(config_type)
    try:
        values = tomllib.loads(read_file(Path(path), "give --config a TOML file").decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read --config {path}: {error}") from None
    choices = {f.name: f.metadata["choices"] for f in fields(config_type)}
    for name, value in values.items():
        if name not in types:
            raise UserError(f"unknown key {name!r} in {path}{_nearest(name, list(types))}")
        kind = _element_type(types[name])
        if kind is float and type(value) is int and abs(value) <= LARGE:
            value = values[name] = float(value)
        if kind is str and type(value) is int:
            value = values[name] = str(value)  # as on the command line
        elements = value if types[name] == list[str] and isinstance(value, list) else [value]
        if any(type(e) is not kind for e in elements) or (types[name] == list[str]) != isinstance(value, list):
            expected = f"a list of {kind.__name__}" if types[name] == list[str] else kind.__name__
            raise UserError(f"{name} in {path} must be {expected}, got {value!r}")
        if value == []:
            raise UserError(f"{name} in {path} is an empty list; give at least one, or drop it for the default")
        if choices[name] and value not in choices[name]:
            raise UserError(f"{name} in {path} must be one of {', '.join(choices[name])}, got {value!r}")
    return values
