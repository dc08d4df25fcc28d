"""Writes the model card of trained weights, README.md of their folder as the Hugging Face Hub reads
it."""

import logging
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import mean

import torch

from kernels import __version__
from model import ModelConfig
from training.host.errors import UserError, printable
from training.host.files import JSON_BYTES, hub_name, read_file
from training.plots.panels import points, read_metrics
from training.run.resume import load_state
from training.run.settings import TrainConfig

logger = logging.getLogger(__name__)
CARD = "README.md"
# Settings on which the weights depend. Those that may hold paths of a machine are not shown.
SHOWN = """context_length batch_size gradient_accumulation_steps max_steps learning_rate final_learning_rate_ratio
    warmup_steps weight_decay max_grad_norm lora lora_alpha lora_targets lora_bits lora_plus attention_type
    selected_blocks dense_below linear optimizer_state objective beta margin clip_low clip_high rope_scaling packing
    overlong data_weights chat_reasoning seed"""


def card_of(
    source: Path, title: str, model: ModelConfig, dtype: torch.dtype, extension: str | None
) -> dict[str, bytes]:
    """Returns README.md by its name: the source's own if there is one, else a card if a run has
    written the source.

    Without either, or if the run's trainer.json does not say enough, there is none. The card of an
    earlier export gets this export's title, dtype and extension.
    """
    then = (
        f" Its context was extended by {extension} afterwards, which no loss below has seen."
        if extension
        else ""
    )
    size = f"{model.num_parameters():,} parameters of type {model.model_type}, {str(dtype)[6:]}."
    head = f"# {printable(title)}\n\n{size}"
    if (source / CARD).is_file():
        own = read_file(source / CARD, "move it elsewhere", JSON_BYTES)
        if not re.search(rb"^library_name: *peft", own, re.MULTILINE):
            earlier = (
                rb"^# .*\n\n[\d,]+ parameters of type \w+, \w+\."
                + rb"( Its context .*)?" * bool(extension)
            )
            return {
                CARD: re.sub(
                    earlier, lambda _: (head + then).encode(), own, count=1, flags=re.MULTILINE
                )
            }
        logger.warning(
            "%s is about adapters (library_name: peft), not about merged weights: left out",
            source / CARD,
        )
    if not (source / "trainer.json").is_file():
        return {}
    try:
        return {CARD: model_card(source, head + then).encode()}
    except UserError as error:
        logger.warning("no %s is written: %s", CARD, error)
        return {}


def model_card(checkpoint: Path, head: str) -> str:
    """Returns the card of a run's checkpoint: base, data, settings, losses, and how they were
    measured.

    `head` is its title, with a line about the exported weights.
    """
    state = load_state(checkpoint)
    config = TrainConfig(**state["settings"])
    unit = "byte" if config.tokenizer == "bytes" else "token"
    loss = f"next token, nats per {unit}" if config.objective == "next_token" else config.objective
    about = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [fathom, long-context]",
    ]
    base, held_out = "random weights", f"{config.validation_fraction:.2%} of these {unit}s"
    if config.init_from:
        base = names([config.init_from])
        about += base_of(Path(config.init_from))
    if config.validation_data:
        held_out = names(config.validation_data)
    what = "adapters, merged into the other weights" if config.lora else "every parameter"
    what += ", but no router" if config.freeze_routers else ""
    took = f"for {state['step']:,} steps and {state['tokens']:,} {unit}s, padding included"
    measured, rows = (
        "Nothing else was measured: no benchmark, and no safety.",
        losses(checkpoint, state),
    )
    if any("validation" in row for row in rows):
        most = (
            f"at most {config.validation_sequences} sequences of {config.context_length:,} {unit}s"
        )
        measured = (
            f"A validation is the mean over {most} that were held out, computed as in "
            f"training.\n{measured}"
        )
    shown = [name for name in SHOWN.split() if config.lora or not name.startswith("lora_")]
    settings = {name: getattr(config, name) for name in shown}
    return "\n".join([
        "---", *about, "---", "", head,
        f"Fathom {__version__} trained {what} from {base}, {took}.", "",
        "## Data", "",
        f"{names(config.data) or 'Sources of the Python standard library'}. Held out: {held_out}.",
        "",
        "## Losses", "", f"| after step | {loss} |", "| --- | --- |",
        *rows, "", measured, "",
        "## Settings", "", "| setting | value |", "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in settings.items() if value is not None), "",
    ])  # fmt: skip


def losses(checkpoint: Path, state: dict) -> list[str]:
    """Returns rows of a table up to the checkpoint: first and last steps, first, lowest and last
    validations."""
    rows = []
    with suppress(UserError):  # the checkpoint may have been moved away from its run
        rows = [
            row
            for row in read_metrics(checkpoint.absolute().parent)
            if row["step"] <= state["step"]
        ]
    steps, values = points(rows, "loss")
    last = max(1, len(steps) // 20)
    found = [f"| {steps[0]} | {values[0]:.4f} |"] if steps else []
    found += [f"| {steps[-1]}, mean of {last} | {mean(values[-last:]):.4f} |"] if steps else []
    validations = dict(zip(*points(rows, "validation_loss")))
    if not validations:
        last = state["validation_loss"]  # of any step up to here
        return (
            found
            if last is None
            else [*found, f"| {state['step']} or before, validation | {last:.4f} |"]
        )
    shown = sorted(
        {min(validations), min(validations, key=validations.__getitem__), max(validations)}
    )
    return found + [f"| {step}, validation | {validations[step]:.4f} |" for step in shown]


def names(paths: list[str]) -> str:
    """Returns the names of files and folders, without the folders that they are in: these may hold
    a user's name.

    Equal names are counted, as `train.jsonl` (1 of 2), `train.jsonl` (2 of 2).
    """
    bare = [
        hub_name(path) or printable(Path(path).name or path).replace("`", "'") for path in paths
    ]
    total, seen, shown = Counter(bare), Counter[str](), []
    for name in bare:
        seen[name] += 1
        number = f" ({seen[name]} of {total[name]})" if total[name] > 1 else ""
        shown.append(f"`{name}`{number}")
    return ", ".join(shown)


def base_of(folder: Path) -> list[str]:
    """Returns lines of a card about the weights that were trained: their name on the Hub and
    license, where known."""
    found = [f"base_model: {name}"] if (name := hub_name(folder)) else []
    if (folder / CARD).is_file():
        text = read_file(folder / CARD, "move it elsewhere", JSON_BYTES).decode(errors="replace")
        head = re.match(r"\ufeff?---\n(.*?)\n---\n", text.replace("\r\n", "\n"), re.DOTALL)
        found += (
            re.findall(r"^license(?:_name|_link)?: *\S.*$", head[1], re.MULTILINE) if head else []
        )
    return found
