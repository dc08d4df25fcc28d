"""Writes the model card of trained weights: README.md, as the Hugging Face Hub reads it."""

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
SHOWN = """
    context_length batch_size gradient_accumulation_steps max_steps learning_rate
    final_learning_rate_ratio warmup_steps weight_decay max_grad_norm lora lora_alpha lora_targets
    lora_bits lora_plus attention_type selected_blocks dense_below linear optimizer_state objective
    beta margin clip_low clip_high rope_scaling packing overlong data_weights chat_reasoning seed
"""


def card_of(
    source: Path, title: str, model: ModelConfig, dtype: torch.dtype, extension: str | None
) -> dict[str, bytes]:
    """Returns README.md by its name: the source's, or a card if a run has written the source.

    Without either, or if the run's trainer.json does not say enough, there is none. The card of an
    earlier export gets this export's title, dtype and extension.
    """
    size = f"{model.num_parameters():,} parameters of type {model.model_type}, {str(dtype)[6:]}."
    head = f"# {printable(title)}\n\n{size}"
    earlier = rb"^# .*\n\n[\d,]+ parameters of type \w+, \w+\."
    if extension:
        head += (
            f" Its context was extended by {extension} afterwards, which no loss below has seen."
        )
        earlier += rb"( Its context .*)?"
    if (source / CARD).is_file():
        card = read_file(source / CARD, "move it elsewhere", JSON_BYTES)
        if not re.search(rb"^library_name: *peft", card, re.MULTILINE):
            pattern = re.compile(earlier, re.MULTILINE)
            return {CARD: pattern.sub(lambda _: head.encode(), card, count=1)}
        about = "%s is about adapters (library_name: peft), not about merged weights: left out"
        logger.warning(about, source / CARD)
    if not (source / "trainer.json").is_file():
        return {}
    try:
        return {CARD: model_card(source, head).encode()}
    except UserError as error:
        logger.warning("no %s is written: %s", CARD, error)
        return {}


def model_card(checkpoint: Path, head: str) -> str:
    """Returns the card of a run's checkpoint: base, data, settings, losses and their measurement.

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
    measured, rows = [], losses(checkpoint, state)
    if any("validation" in row for row in rows):
        most = f"{config.validation_sequences} sequences of {config.context_length:,} {unit}s"
        measured.append(
            f"A validation is the mean over at most {most} that were held out, "
            "computed as in training."
        )
    settings = []
    for name in SHOWN.split():
        value = getattr(config, name)
        if value is not None and (config.lora or not name.startswith("lora_")):
            settings.append(f"| {name} | {value} |")
    data = names(config.data) or "Sources of the Python standard library"
    sections = [
        "\n".join(["---", *about, "---"]),
        f"{head}\nFathom {__version__} trained {what} from {base}, {took}.",
        "## Data",
        f"{data}. Held out: {held_out}.",
        "## Losses",
        "\n".join([f"| after step | {loss} |", "| --- | --- |", *rows]),
        "\n".join([*measured, "Nothing else was measured: no benchmark, and no safety."]),
        "## Settings",
        "\n".join(["| setting | value |", "| --- | --- |", *settings]),
    ]
    return "\n\n".join(sections) + "\n"


def losses(checkpoint: Path, state: dict) -> list[str]:
    """Returns rows of a table of losses, up to the checkpoint.

    They are of the first and last steps, and of the first, lowest and last validations.
    """
    rows = []
    with suppress(UserError):  # the checkpoint may have been moved away from its run
        rows = read_metrics(checkpoint.absolute().parent)
    rows = [row for row in rows if row["step"] <= state["step"]]
    steps, values = points(rows, "loss")
    table = []
    if steps:
        count = max(1, len(steps) // 20)
        table.append(f"| {steps[0]} | {values[0]:.4f} |")
        table.append(f"| {steps[-1]}, mean of {count} | {mean(values[-count:]):.4f} |")
    validations = dict(zip(*points(rows, "validation_loss")))
    if validations:
        lowest = min(validations, key=validations.__getitem__)
        for step in sorted({min(validations), lowest, max(validations)}):
            table.append(f"| {step}, validation | {validations[step]:.4f} |")
    elif state["validation_loss"] is not None:  # of any step up to here
        loss = state["validation_loss"]
        table.append(f"| {state['step']} or before, validation | {loss:.4f} |")
    return table


def names(paths: list[str]) -> str:
    """Returns the names of files and folders, without folders that may have a user's name.

    Equal names are counted, as `train.jsonl` (1 of 2), `train.jsonl` (2 of 2).
    """
    bare = []
    for path in paths:
        bare.append(hub_name(path) or printable(Path(path).name or path).replace("`", "'"))
    total, seen, shown = Counter(bare), Counter[str](), []
    for name in bare:
        seen[name] += 1
        number = f" ({seen[name]} of {total[name]})" if total[name] > 1 else ""
        shown.append(f"`{name}`{number}")
    return ", ".join(shown)


def base_of(folder: Path) -> list[str]:
    """Returns lines of a card about the weights that were trained: their name and license."""
    name = hub_name(folder)
    lines = [f"base_model: {name}"] if name else []
    if (folder / CARD).is_file():
        text = read_file(folder / CARD, "move it elsewhere", JSON_BYTES).decode(errors="replace")
        head = re.match(r"\ufeff?---\n(.*?)\n---\n", text.replace("\r\n", "\n"), re.DOTALL)
        if head:
            lines += re.findall(r"^license(?:_name|_link)?: *\S.*$", head[1], re.MULTILINE)
    return lines
