"""Learns made preferences by DPO from a model's weights, once with the prompts of pairs shared and
once apart.

`.venv/bin/python -m benchmarks.experiments.learn_preferences MODEL OUT`

A row asks about a thing. The chosen answer is a sentence. The rejected answer is the sentence
shouted, backwards, or stuttered. `training.logprobs` stores the reference, then train.py runs for
200 steps, and holds rows out. In the run "apart" each answer has a prompt of its own, and the steps
have the same pairs.
"""

import argparse
import itertools
import json
import random
import runpy
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.common import print_json, print_table
from training.data import loader
from training.data.loader import PROMPT, Batch, longest_first, make_batch
from training.data.packing import Span
from training.data.sources import Document
from training.data.tokens import Store, TokenStore
from training.logprobs import __main__ as logprobs
from training.parallel.world import join_world

COLOURS = (
    "red",
    "green",
    "blue",
    "grey",
    "white",
    "black",
    "brown",
    "golden",
    "silver",
    "dark",
    "pale",
    "bright",
)
THINGS = (
    "boat",
    "house",
    "river",
    "letter",
    "garden",
    "engine",
    "window",
    "bridge",
    "lantern",
    "basket",
    "compass",
)
VERBS = (
    "stands",
    "waits",
    "shines",
    "rests",
    "leans",
    "sleeps",
    "hides",
    "shakes",
    "turns",
    "glows",
)
PLACES = (
    "harbour",
    "hill",
    "forest",
    "market",
    "station",
    "field",
    "tower",
    "library",
    "shore",
    "mill",
)
SPOILS = {
    "shouted": str.upper,
    "backwards": lambda text: " ".join(reversed(text.split())),
    "stuttered": lambda text: " ".join(word for word in text.split() for _ in range(2)),
}


def rows(count: int) -> list[dict[str, str]]:
    drawn = random.Random(0)
    found = []
    for _ in range(count):
        colour, thing, verb, place = map(drawn.choice, (COLOURS, THINGS, VERBS, PLACES))
        chosen = f"The {colour} {thing} {verb} near the old {place}."
        spoil = SPOILS[drawn.choice(sorted(SPOILS))]
        question = f"Where is the {colour} {thing}, and what does it do near the {place}?\n"
        found.append({"prompt": question, "chosen": chosen, "rejected": spoil(chosen)})
    return found


def make_batch_apart(store: Store, sequences: list[list[Span]], context_length: int) -> Batch:
    """Takes the place of make_batch: the same pairs in the same rows, each answer behind a prompt
    of its own."""
    documents, numbered = list[Document](), list[list[Span]]()
    for spans in sequences:
        numbered.append([])
        for document, start, stop in longest_first(spans):
            ids, masked = store.read_masked(document, start, stop)
            columns = store.read_columns(document, start, stop)
            answer = columns["answer"]
            borders = (np.diff(answer).nonzero()[0] + 1).tolist()
            shared = np.arange(borders[0] if answer[0] == PROMPT else 0)
            firsts = borders if len(shared) else [0, *borders]
            parts = [
                np.append(shared, np.arange(*own))
                for own in itertools.pairwise([*firsts, len(answer)])
            ]
            places = np.concatenate(parts)
            own = {name: column[places] for name, column in columns.items()}
            own["answer"] = np.repeat(np.float32([0, 1] * (len(parts) // 2)), [*map(len, parts)])
            numbered[-1].append((len(documents), 0, len(places)))
            documents.append(
                Document(ids[places].astype(np.uint32), masked[places], True, columns=own)
            )
    length = max([context_length, *(sum(stop for _, _, stop in spans) for spans in numbered)])
    return make_batch(TokenStore(documents, store.eos_id), numbered, length)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder of weights")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context_length", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    data, reference = arguments.out / "pairs.jsonl", arguments.out / "reference"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(arguments.rows)))
    known = [
        "--data",
        str(data),
        "--objective",
        "dpo",
        "--context_length",
        str(arguments.context_length),
    ]
    exits(logprobs.main([arguments.model, str(reference), *known]))
    known += [
        "--init_from",
        arguments.model,
        "--reference_logprobs",
        str(reference),
        "--save",
        "none",
    ]
    known += ["--max_steps", str(arguments.steps), "--batch_size", str(arguments.batch_size)]
    known += ["--warmup_steps", "10", "--validation_fraction", "0.1"]
    known += [
        "--learning_rate",
        str(arguments.learning_rate),
        "--validation_interval",
        "50",
        "--sample_tokens",
        "0",
    ]
    found = {}
    for name, function in (("shared", make_batch), ("apart", make_batch_apart)):
        with mock.patch.object(loader, "make_batch", function):
            exits(run_train([*known, "--output_dir", str(arguments.out / name)]))
        lines = (arguments.out / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [line for line in map(json.loads, lines) if "loss" in line]
    report(arguments, found)


def run_train(flags: list[str]) -> int | None:
    """Runs train.py in this process, where the batches are patched. Returns its exit status."""
    with mock.patch.object(sys, "argv", ["train.py", *flags]):
        try:
            runpy.run_path(str(Path(__file__).parents[2] / "train.py"), run_name="__main__")
        except SystemExit as ended:
            return ended.code  # type: ignore[return-value]
    return None


def exits(status: int | None) -> None:
    """Ends the experiment where a command has failed."""
    if status:
        sys.exit(status)


def report(arguments: argparse.Namespace, found: dict[str, list[dict]]) -> None:
    """Prints losses, and accuracies and margins of the rows that are held out, beside each
    other."""
    names = (
        "loss",
        "accuracy",
        "margin",
        "validation_loss",
        "validation_accuracy",
        "validation_margin",
    )
    shown = [i for i, row in enumerate(found["shared"]) if i == 0 or "validation_loss" in row]
    table = [
        [run, found[run][i]["step"], *(found[run][i].get(name, "") for name in names)]
        for i in shown for run in found
    ]  # fmt: skip
    print_table("DPO on made preferences", ["prompts", "step", *names], table)
    apart = {
        name: max(
            abs(a[name] - b[name])
            for a, b in zip(found["shared"], found["apart"], strict=True)
            if name in a
        )
        for name in names
    }
    print(
        "largest differences over all steps: "
        + ", ".join(f"{name} {value:.2g}" for name, value in apart.items())
    )
    last = {run: {name: steps[-1][name] for name in names} for run, steps in found.items()}
    settings = {**vars(arguments), "model": Path(arguments.model).name, "out": ""}
    with join_world("auto") as world:
        print_json(
            "learn_preferences", world.device, **settings, last=last, largest_differences=apart
        )


if __name__ == "__main__":
    main()
