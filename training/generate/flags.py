"""Flags of the commands that open a trained model, and of training.generate.

No torch is imported here.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from training.flags import SMALLEST, Rule, flag, read_flags
from training.memory.flags import ATTENTION_TYPES


@dataclass
class ModelFlags:
    """Flags that say which model is opened, and how it attends."""

    checkpoint: Path = flag(
        help="a step_ folder, or one of Hugging Face's form", positional=True, group="model"
    )
    attention_type: str | None = flag(
        None, "default: as the checkpoint was trained, else its own", ATTENTION_TYPES
    )
    selected_blocks: str | None = flag(
        None, "by layer as 64x4,32; default: as trained, else as train.py has it"
    )
    dense_below: int | None = flag(
        None, "as train.py has it; default: as trained, else 8192", least=1, tokens=True
    )
    tokenizer: str | None = flag(
        None, "a tokenizer.json, or bytes; default: as the weights were trained with"
    )
    memory_budget: str | None = flag(
        None, "GPU memory, or on a CPU host memory, as 24GB; default: what is free"
    )
    device: str = flag("auto", "auto: a GPU if there is one", ("auto", "cuda", "cpu"))


@dataclass
class GenerateFlags(ModelFlags):
    """Write with a trained model."""

    prompt: str | None = flag(
        None, "default: what --file or standard input holds", positional=True, group="text"
    )
    file: list[Path] = flag(list, "text files, each of which is a prompt")
    chat: bool = flag(False, "each prompt is a user's message, in the folder's chat template")
    system: str | None = flag(None, "with --chat: the system's message before it")
    max_new_tokens: int = flag(256, "tokens to write at most", least=1, tokens=True)
    temperature: float = flag(0.0, "0: the likeliest token each time", most=100)
    top_p: float | None = flag(
        None, "probability of the tokens to sample from; default: 1", least=SMALLEST, most=1
    )
    seed: int | None = flag(None, "of sampling; default: 0", most=2**63 - 1)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "top_p seed",
            "with temperature 0, which is greedy; give --temperature, or drop it",
            lambda f: f.temperature == 0,
        ),
        Rule("system", "without --chat; drop it, or give --chat", lambda f: not f.chat),
        Rule(
            "",
            "both a prompt and --file are given; drop one",
            lambda f: f.prompt is not None and f.file,
        ),
    )


read_generate_flags = partial(read_flags, GenerateFlags, program="python -m training.generate")
