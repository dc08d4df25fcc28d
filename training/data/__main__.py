"""Tokenize a corpus once, for any number of runs: `python -m training.data prepare IN OUT
--tokenizer DIR`."""

import sys

from training.flags import answer_early, flag, read_command

if __name__ == "__main__":
    answer_early(packages=["tqdm"])

import logging
import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from training.data.chat import open_tokenizer
from training.data.flags import BAD_ROWS, REASONING, SUFFIXES
from training.data.prepare import histogram, prepare
from training.data.prepared import PreparedStore, verify
from training.data.sources import Reading
from training.host.processes import command


@dataclass
class PrepareFlags:
    """Tokenize a corpus into a folder; after a stop, the same command goes on."""

    source: Path = flag(
        help="a file or folder of texts, JSON, Parquet or datasets' Arrow", positional=True
    )
    out: Path = flag(help="the set's folder, to be given to train.py as --data", positional=True)
    tokenizer: str = flag(help="a tokenizer.json or its folder, or bytes")
    chat_reasoning: str | None = flag(
        None, "reasoning before the last user message, as train.py has it", REASONING
    )
    chat_template: str | None = flag(
        None, "a Jinja file, or chatml, as train.py has it; default: the folder's"
    )
    suffixes: str | None = flag(None, f"of texts, as train.py has it; default: {SUFFIXES}")
    columns: str | None = flag(
        None, "names of fields, as train.py has them: prompt=question,completion=answer"
    )
    bad_rows: str | None = flag(None, "rows that cannot be read; default: refuse", BAD_ROWS)
    workers: int | None = flag(None, "processes; default: one per core", least=1)


@dataclass
class VerifyFlags:
    """Compare every byte of a set with its hashes."""

    out: Path = flag(help="the set's folder", positional=True)


@command
def main(argv: list[str]) -> int:
    """Returns the exit status: 0, 1 after an error, 130 after an interrupt."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    flags = read_command(
        {"prepare": PrepareFlags, "verify": VerifyFlags}, argv, "python -m training.data"
    )
    if isinstance(flags, VerifyFlags):
        verify(flags.out)
        print(f"{flags.out}: every byte is as it was written")
        return 0
    try:
        workers = flags.workers or len(os.sched_getaffinity(0))
        reading = Reading(
            reasoning=flags.chat_reasoning,
            suffixes=flags.suffixes,
            columns=flags.columns,
            bad_rows=flags.bad_rows,
            needs_chats=flags.chat_reasoning is not None,
        )
        prepare(flags.source, flags.out, flags.tokenizer, workers, reading, flags.chat_template)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise
    tokenizer = open_tokenizer(flags.tokenizer, flags.chat_template)
    print(histogram(PreparedStore(flags.out, tokenizer, tokenizer.vocab_size).lengths))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends as `head` does
    # Workers are forked from a server that has imported prepare.py once:
    # importing it takes seconds.
    multiprocessing.set_forkserver_preload(["training.data.prepare"])
    sys.exit(main(sys.argv[1:]))
