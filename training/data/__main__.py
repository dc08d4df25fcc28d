"""`python -m training.data prepare IN OUT --tokenizer DIR`: tokenize a corpus once, for any number of runs."""

import argparse
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from training.data.chat import REASONING
from training.data.prepare import draw_histogram, histogram, prepare
from training.data.prepared import PreparedStore, verify
from training.data.tokenizer import load_tokenizer
from training.host.errors import UserError
from training.host.processes import command


@command
def main(argv: list[str]) -> int:
    """Returns the exit status: 0, 1 after an error, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m training.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "prepare", help="tokenize IN into the folder OUT; after a stop, the same command goes on"
    )
    make.add_argument("source", metavar="IN", type=Path, help="a file or folder of .txt .md .py .jsonl")
    make.add_argument("out", metavar="OUT", type=Path, help="the set's folder, to be given to train.py as --data")
    make.add_argument("--tokenizer", required=True, help="a tokenizer.json or its folder, or bytes")
    make.add_argument("--chat_reasoning", choices=REASONING, default="template", help="as of train.py")
    make.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes; default: a core each"
    )
    check = commands.add_parser("verify", help="compare every byte of a set with its hashes")
    check.add_argument("out", metavar="SET", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.command == "verify":
        verify(arguments.out)
        print(f"{arguments.out}: every byte is as it was written")
        return 0
    if arguments.workers < 1:
        raise UserError(f"workers must be at least 1, got {arguments.workers}")
    try:
        prepare(arguments.source, arguments.out, arguments.tokenizer, arguments.chat_reasoning, arguments.workers)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    tokenizer = load_tokenizer(arguments.tokenizer)
    lengths = PreparedStore(arguments.out, tokenizer, tokenizer.vocab_size).lengths
    print(histogram(lengths))
    if draw_histogram(lengths, arguments.out / "lengths.png"):
        print(f"drawn: {arguments.out / 'lengths.png'}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends as `head` does
    # Workers are forked from a server that has imported what they need, once: that takes seconds.
    multiprocessing.set_forkserver_preload(["training.data.prepare"])
    sys.exit(main(sys.argv[1:]))
