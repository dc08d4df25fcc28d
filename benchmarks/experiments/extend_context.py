r"""Extend a released model's context, and evaluate it before and after training, in one command.

    python -m benchmarks.experiments.extend_context SmolLM2-135M/ OUT --context_length 32768
    --rope_scaling yarn:4 \
        --max_steps 80

1. Python's packages are the text, each a document (package_corpus.py); one in ten is held out. The
   others are tokenized once.
2. The model is evaluated as it was released, then with --rope_scaling alone, at the extended
   context.
3. train.py trains it on whole packages at that context.
4. It is evaluated again.
5. With `--selected_blocks 16 32`, `sparse` attention to each number of blocks is evaluated: with
   the same weights, and with the weights after --adaptation_steps of training with that attention.
   As many more steps with attention to everything are the comparison.
6. With `--lora 64`, adapters of that rank are trained as the whole model was, and evaluated.
7. Loss by position and needles of all evaluations are printed, and drawn if matplotlib is
   installed.

Each part is a command of this repository and is printed. OUT gets the evaluations' JSON and
pictures and the runs. A part is skipped if its result is in OUT, so a later command may add the
fifth.
"""

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import print_table


def run(result: Path, *words: object) -> None:
    """Run one command unless its result exists; its output comes before ours. Its failure ends this
    command."""
    if result.exists():
        return
    command = [sys.executable, *map(str, words)]
    start = time.monotonic()
    print("\n$ python " + " ".join(command[1:]), flush=True)
    if subprocess.run(command).returncode:
        if result.is_file():  # an evaluation that ended early has written what it had
            result.unlink()
        sys.exit("the command above failed: nothing after it was run")
    print(f"({time.monotonic() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of released weights")
    parser.add_argument("folder", type=Path, help="gets everything that is made")
    parser.add_argument("--context_length", type=int, default=32_768)
    parser.add_argument("--rope_scaling", default="yarn:4")
    parser.add_argument("--max_steps", type=int, default=80)
    parser.add_argument("--sequences_per_step", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument(
        "--sequences", type=int, default=12, help="held-out texts that are read for their loss"
    )
    parser.add_argument("--samples", type=int, default=12, help="needles per length")
    parser.add_argument(
        "--selected_blocks", type=int, nargs="*", default=[], help="numbers of blocks to try"
    )
    parser.add_argument("--adaptation_steps", type=int, default=40)
    parser.add_argument("--adaptation_learning_rate", type=float, default=5e-5)
    parser.add_argument("--lora", type=int, help="rank of adapters to train beside the whole model")
    parser.add_argument("--lora_learning_rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    length, out = arguments.context_length, arguments.folder
    tokens, held_out = out / "tokens", out / "corpus" / "held_out.jsonl"
    names = []

    def judge(model: Path, name: str, *flags: object) -> None:
        names.append(name)
        run(out / name / "evaluation.json", "-m", "training.evaluation", model, "--data", held_out,
            "--context_length", length, "--lengths", length // 4, length // 2, length,
            "--sequences",
            arguments.sequences, "--samples", arguments.samples, "--output_dir", out / name,
            *flags)  # fmt: skip

    def learn(model: Path, name: str, steps: int, rate: float, *flags: object) -> Path:
        trained = out / name / f"step_{steps:08d}"
        run(
            trained,
            "train.py",
            "--init_from",
            model,
            "--data",
            tokens,
            "--context_length",
            length,
            "--batch_size",
            1,
            "--gradient_accumulation_steps",
            arguments.sequences_per_step,
            "--max_steps",
            steps,
            "--warmup_steps",
            steps // 10,
            "--learning_rate",
            rate,
            "--validation_sequences",
            0,
            "--sample_tokens",
            0,
            "--save",
            "model",
            "--output_dir",
            out / name,
            *flags,
        )
        return trained

    def adapt(name: str, *flags: object) -> None:
        steps, rate = arguments.adaptation_steps, arguments.adaptation_learning_rate
        judge(learn(trained, f"run_{name}", steps, rate, *flags), name, *flags)

    run(held_out, "-m", "benchmarks.experiments.package_corpus", out / "corpus")
    run(
        tokens / "set.json",
        "-m",
        "training.data",
        "prepare",
        out / "corpus" / "train.jsonl",
        tokens,
        "--tokenizer",
        arguments.model,
    )
    judge(arguments.model, "released")
    run(
        out / "scaled",
        "-m",
        "training.checkpoint.weights",
        "export",
        arguments.model,
        out / "scaled",
        "--rope_scaling",
        arguments.rope_scaling,
    )
    judge(out / "scaled", "before_training")
    trained = learn(
        arguments.model,
        "run",
        arguments.max_steps,
        arguments.learning_rate,
        "--rope_scaling",
        arguments.rope_scaling,
    )
    judge(trained, "after_training")
    if arguments.lora:
        steps, rate = arguments.max_steps, arguments.lora_learning_rate
        judge(learn(out / "scaled", "lora", steps, rate, "--lora", arguments.lora), "after_lora")
    if arguments.selected_blocks:
        adapt("trained_on")
    for blocks in arguments.selected_blocks:
        sparse = "--attention_type", "sparse", "--selected_blocks", blocks
        judge(trained, f"sparse_{blocks}", *sparse)
        adapt(f"sparse_{blocks}_adapted", *sparse)

    found = {name: json.loads((out / name / "evaluation.json").read_text()) for name in names}
    first = found["released"]
    print_table(
        "loss, nats per token, by the number of tokens before it",
        ["positions", *names],
        [
            [
                f"{row['first']:,} to {row['last']:,}",
                *(found[name]["loss_by_position"][i]["loss"] for name in names),
            ]
            for i, row in enumerate(first["loss_by_position"])
        ],
    )
    print_table(
        "share of the needles found",
        ["tokens", *names],
        [
            [f"{row['length']:,}", *(found[name]["tasks"][i]["score"] for name in names)]
            for i, row in enumerate(first["tasks"])
        ],
    )
    if find_spec("matplotlib") is not None:
        draw(out, "", {name: found[name] for name in names[: 3 + bool(arguments.lora)]})
        if arguments.selected_blocks:  # sparse attention differs only after many tokens
            draw(
                out,
                "sparse_",
                {name: found[name] for name in names[2:] if name != "after_lora"},
                least=length // 16,
            )


def draw(out: Path, prefix: str, found: dict[str, dict], least: int = 0) -> None:
    """Draw these evaluations, losses from position `least` on."""
    from training.evaluation.pictures import draw_losses, draw_needles

    losses = [
        (name, [r for r in one["loss_by_position"] if r["first"] >= least])
        for name, one in found.items()
    ]
    draw_losses(out / f"{prefix}loss_by_position.png", losses)
    draw_needles(
        out / f"{prefix}needles.png", [(name, one["tasks"]) for name, one in found.items()]
    )


if __name__ == "__main__":
    main()
