"""Flags of training.logprobs. No torch is imported here: --help is to be quick."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from training.data.flags import BAD_ROWS, REASONING
from training.flags import flag, read_flags
from training.generate.flags import ModelFlags
from training.objectives.flags import OBJECTIVES


@dataclass
class LogProbsFlags(ModelFlags):
    """Log-probabilities of a corpus under a model, for flags of train.py.

    If it is stopped, it begins anew.
    """

    out: Path | None = flag(None, "the folder that is made", positional=True)
    objective: str = flag(
        "next_token", "whose rows are read, as train.py has it", OBJECTIVES, group="data"
    )
    data: list[str] = flag(list, "files or folders of rows, as train.py has them")
    validation_data: list[str] = flag(list, "as train.py has them")
    top_k: int | None = flag(
        None, "also the likeliest words of each target, so many, for distill", least=1, most=256
    )
    context_length: int = flag(
        4096, "a prompt's answers fit together, as in train.py", least=2, most=2**27, tokens=True
    )
    rope_scaling: str | None = flag(None, "as train.py has it: yarn:4")
    columns: str | None = flag(None, "names of fields, as train.py has them: prompt=question")
    bad_rows: str | None = flag(None, "rows that cannot be read; default: refuse", BAD_ROWS)
    chat_reasoning: str | None = flag(None, "as train.py has it", REASONING)
    chat_template: str | None = flag(None, "as train.py has it")


read_logprobs_flags = partial(read_flags, LogProbsFlags, program="python -m training.logprobs")
