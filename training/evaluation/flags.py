"""Flags of an evaluation. No torch is imported here."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from training.data.flags import BAD_ROWS
from training.flags import SMALLEST, Rule, flag, read_flags
from training.generate.flags import ModelFlags
from training.objectives.flags import PAIR_OBJECTIVES, REFERENCE_OBJECTIVES

LONGEST = 2**27  # tokens
JUDGES = "next_token", *PAIR_OBJECTIVES, "kto"


@dataclass
class EvaluationFlags(ModelFlags):
    """Judge what a model makes of its context: losses by position, needles by length and depth."""

    context_length: int | None = flag(
        None,
        "tokens read at most; default: as trained, else up to 32768",
        least=2,
        most=LONGEST,
        group="evaluation",
        tokens=True,
    )
    output_dir: Path | None = flag(
        None, "evaluation.json and pictures go there; else nothing is written"
    )
    beside: list[Path] = flag(list, "evaluation.json of earlier ones, to be shown beside")
    objective: str = flag(
        "next_token",
        "judge answers of data in place of texts: accuracy and margin of pairs",
        JUDGES,
    )
    beta: float | None = flag(None, "of the objective, as train.py's", least=SMALLEST, most=1e6)
    reference_logprobs: str | None = flag(
        None, "of data, made by training.logprobs with the reference's weights"
    )
    sequences: int = flag(
        16, "the longest pieces of the data, so many; 0: no losses", group="losses"
    )
    data: list[str] = flag(
        list, "as train.py's; default: what the run held out, else Python's standard library"
    )
    suffixes: str | None = flag(None, "of texts in data, as train.py's")
    columns: str | None = flag(None, "names of rows' fields in data, as train.py's")
    bad_rows: str | None = flag(None, "rows of data that cannot be read; default: refuse", BAD_ROWS)
    short_context: int | None = flag(
        None, "tokens; default: 4096, at most a quarter of context_length", least=2, tokens=True
    )
    margin: float = flag(
        2.0, "nats by which a token that needs the context is better with it", most=1e6
    )
    ceiling: float = flag(2.0, "nats of loss that such a token has at most", most=1e6)
    evaluator: Path | None = flag(
        None, "folder of a model that says which tokens need the context; default: this one"
    )
    samples: int = flag(20, "for each length; 0: no needles", group="needles")
    lengths: list[int] = flag(
        list,
        "tokens; default: a quarter, half and all of context_length",
        least=2,
        most=LONGEST,
        tokens=True,
    )
    seed: int = flag(0, "of the samples")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "sequences samples suffixes short_context margin ceiling evaluator lengths seed beside",
            "with objective {objective}, which judges answers alone; drop one",
            lambda f: f.objective != "next_token",
        ),
        Rule(
            "beta",
            "without objective; drop it, or give that",
            lambda f: f.objective == "next_token",
        ),
        Rule(
            "reference_logprobs",
            "with objective {objective}, which reads no reference; drop it",
            lambda f: f.objective not in REFERENCE_OBJECTIVES,
        ),
        Rule(
            "",
            "objective {objective} needs data, whose answers it judges",
            lambda f: f.objective != "next_token" and not f.data,
        ),
        Rule(
            "",
            "objective {objective} needs log-probabilities of a reference: make them by "
            "{program} -m "
            "training.logprobs, and give --reference_logprobs",
            lambda f: f.objective in REFERENCE_OBJECTIVES and not f.reference_logprobs,
        ),
        Rule(
            "data suffixes columns bad_rows short_context margin ceiling evaluator",
            "with sequences 0; drop one",
            lambda f: not f.sequences,
        ),
        Rule(
            "suffixes columns bad_rows",
            "without data; drop it, or give those",
            lambda f: not f.data,
        ),
        Rule("lengths seed", "with samples 0; drop one", lambda f: not f.samples),
        Rule(
            "context_length",
            "with sequences 0 and lengths; drop one",
            lambda f: f.lengths and not f.sequences,
        ),
    )


read_evaluation_flags = partial(
    read_flags, EvaluationFlags, program="python -m training.evaluation"
)
