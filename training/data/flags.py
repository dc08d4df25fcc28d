"""Flags of the data, and which of them have no effect.

No torch is imported here: --help is to be quick.
"""

from dataclasses import dataclass

from training.flags import SMALLEST, Rule, flag

SUFFIXES = ".txt,.md,.py"  # files that are a document each
BAD_ROWS = ("refuse", "drop")  # of training.data.sources.Reading
PACKINGS = ("best_fit", "concatenate")
OVERLONG = ("refuse", "drop", "split")
REASONING = ("template", "keep", "drop")  # before a chat's last user message


@dataclass
class DataFlags:
    """Files to train on, and how they become sequences."""

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


RULES = (
    Rule(
        "suffixes columns bad_rows chat_reasoning",
        "without data; drop it, or give those",
        lambda s: not s.data + s.validation_data,
    ),
    Rule(
        "overlong",
        "where documents are concatenated; drop it, or --packing best_fit",
        lambda s: s.packing == "concatenate",
    ),
    Rule(
        "validation_fraction",
        "with validation_data, which is held out in its place; drop one",
        lambda s: s.validation_data,
    ),
)
