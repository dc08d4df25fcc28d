"""Training on chats, compared: packed, and each chat alone in its sequence.

`python -m benchmarks.bench_chat_training OUT --init_from Qwen3-4B/ --memory_budget 24GB`

The chats are made of the Python standard library's text: a user shows some of it and the assistant
goes on with a third as much, so three quarters are not trained on. They have about 1,000 to 55,000
tokens, half of them fewer than 8,000. Each way is a run of train.py; its steps after the first two
are timed. Tokens per second count the average tokens of a sequence over an epoch, without padding.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.common import print_table
from training.data.corpus import load_corpus
from training.data.loader import PackedLoader
from training.data.sources import find_files
from training.data.tokenizer import load_tokenizer
from training.run.decide import choose_model
from training.run.settings import TrainConfig

WAYS = ("packed", "alone")
CHARACTERS = 4_000, 180_000  # least and most in a chat, about 3.4 per token
# Each run is a separate process: a process keeps the memory that it allocated.
TRAIN = """
import runpy, sys
from benchmarks.bench_chat_training import packed
with packed(sys.argv.pop(1)):
    runpy.run_path("train.py", run_name="__main__")
"""


def packed(way: str):
    """Context manager: chats are packed as train.py packs them, or each is alone in its
    sequence."""
    if way == "packed":
        return contextlib.nullcontext()
    return mock.patch(
        "training.data.packing.best_fit", lambda sizes, capacity: np.arange(len(sizes))
    )


def write_chats(path: Path, count: int, characters: tuple[int, int]) -> None:
    files = find_files(Path(sysconfig.get_path("stdlib")))
    text, random = (
        "".join(file.read_text(errors="ignore") for file in files),
        np.random.default_rng(0),
    )
    with path.open("w") as file:
        for length in np.exp(random.uniform(*np.log(characters), count)).astype(int):
            start = int(random.integers(len(text) - length))
            cut, stop = start + length * 3 // 4, start + length
            messages = [
                {"role": "user", "content": text[start:cut]},
                {"role": "assistant", "content": text[cut:stop]},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def count_tokens(way: str, path: Path, arguments: argparse.Namespace) -> tuple[int, int, int]:
    """(sequences of an epoch, their tokens, tokens trained on), packed by the settings that `main`
    gives train.py."""
    vocab_size = choose_model(TrainConfig(init_from=str(arguments.init_from))).vocab_size
    with packed(way):
        store, _, packing = load_corpus(
            [str(path)], load_tokenizer(str(arguments.init_from)), vocab_size,
            validation_fraction=0.02,
            context_length=arguments.context_length, seed=0, overlong="drop",
        )  # fmt: skip
    loader, count = PackedLoader(store, packing, 1, 0, 1), packing.sequences_per_epoch
    tokens = sum(
        stop - start for index in range(count) for _, start, stop in packing.spans(0, index)
    )
    return count, tokens, sum(batch.num_valid_tokens for batch in loader.next_step(count))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder for the chats and the runs")
    parser.add_argument(
        "--init_from", type=Path, required=True, help="weights, tokenizer.json and a chat template"
    )
    parser.add_argument("--context_length", type=int, default=65_536)
    parser.add_argument("--memory_budget", help="train.py's flag")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument(
        "--characters", type=int, nargs=2, default=CHARACTERS, help="least and most in a chat"
    )
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.steps < 3 or arguments.folder.exists():
        parser.error("--steps must be at least 3 (two are not timed), and the folder must be new")
    arguments.folder.mkdir(parents=True)
    chats = arguments.folder / "chats.jsonl"
    write_chats(chats, arguments.chats, arguments.characters)
    flags = [
        "--init_from",
        arguments.init_from,
        "--data",
        chats,
        "--context_length",
        arguments.context_length,
        "--overlong",
        "drop",
        "--batch_size",
        1,
        "--max_steps",
        arguments.steps,
        "--save",
        "none",
        "--validation_sequences",
        0,
        "--sample_tokens",
        0,
    ]
    flags += [] if arguments.memory_budget is None else ["--memory_budget", arguments.memory_budget]
    rows = []
    for way in WAYS:
        out = arguments.folder / way
        command = [sys.executable, "-c", TRAIN, way, *map(str, flags), "--output_dir", str(out)]
        if subprocess.run(command).returncode:
            sys.exit("the run above failed: nothing is compared")
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds = statistics.mean(step["seconds"] for step in steps[2:])
        peak = max(max(step.get("peak_memory_gib", [0.0])) for step in steps)
        count, tokens, targets = count_tokens(way, chats, arguments)
        rows.append(
            [way, count, tokens / count / arguments.context_length, targets / tokens, seconds,
             tokens / count / seconds, targets / count / seconds, peak]
        )  # fmt: skip
    columns = [
        "",
        "sequences",
        "filled",
        "trained on",
        "s per step",
        "tokens/s",
        "trained tokens/s",
        "peak GiB",
    ]
    print_table(
        f"{arguments.chats} chats in sequences of {arguments.context_length} tokens", columns, rows
    )


if __name__ == "__main__":
    main()
