"""Train small decoders from scratch: does attention to chosen blocks learn what attention to everything learns?

    python -m benchmarks.experiments.learn_attention --model 100M --attention_type sparse --out learned.jsonl
    python -m benchmarks.experiments.learn_attention --compare learned.jsonl --picture learned.png

A run trains one kind of attention: `full`, `sparse`, `nsa`, or `window`. The last is `sparse` with no chosen blocks and
must fail. All kinds see the same batches in the same order; `full`, `sparse` and `window` also start from the same
weights. A row is one document of `--context_length` bytes: source text with facts woven in. Each fact is a definition
and a question with its answer, at a distance drawn log-uniformly from a line to the whole context:

    =NhWqZks                  a definition of N: nobody can foretell it, so no byte of it is a target
    ?NhWqZks                  a question: the letters after the name N are targets, like all text

Names are the 128 bytes that are not ASCII. No name occurs in two facts of a row, so a question's definition is the last
place that holds the answer. Every `--evaluate_every` steps, held-out rows give the loss of text by position, and the
share of answer letters that have the highest probability, by distance (chance is 1 of 52). They are appended to `--out`
as a line of JSON; runs may share the file. `--compare` prints tables of all runs and draws their curves.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.common import environment, parse_flags, print_table
from kernels.attention.documents import Documents, find_documents
from kernels.attention.full import FULL, choose_backend
from kernels.attention.nsa.nsa import BLOCK_SIZE, NSA
from kernels.attention.sparse.sparse_attention import Sparse
from model import IGNORE_INDEX, MODEL_SIZES, ModelConfig, Transformer
from training.choices import LINEARS
from training.data.corpus import open_stores
from training.data.loader import Batch
from training.data.tokenizer import ByteTokenizer
from training.data.tokens import join, split
from training.memory.execution import WHOLE, Execution
from training.memory.placement import apply_execution
from training.optimizer import MasterAdamW, warmup_cosine
from training.parallel.fsdp import initial_weights
from training.parallel.world import World
from training.run.build import linear_of, model_on_meta
from training.run.settings import TrainConfig
from training.run.step import train_step


def from_scratch(shape: ModelConfig) -> ModelConfig:
    """The shape with matrices that keep their input's scale: 0.02 is too small for a few thousand steps."""
    return dataclasses.replace(shape, initializer_range=shape.hidden_size**-0.5)


# The GPU's kernels of sparse attention take heads of 64 or 128; micro is for a CPU. At a RoPE theta of 1e6 a third of a
# head's angles turn by less than one radian in 8,192 tokens: they find a name at any distance.
MODELS = {
    "micro": from_scratch(ModelConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=32, rope_theta=1e4,
    )),
    "tiny": from_scratch(dataclasses.replace(MODEL_SIZES["tiny"], head_dim=64, rope_theta=1e6)),
    "100M": from_scratch(ModelConfig(
        vocab_size=256, hidden_size=768, intermediate_size=3072,
        num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=3, head_dim=64, rope_theta=1e6,
    )),
}  # fmt: skip
KINDS = ("full", "sparse", "nsa", "window")
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", dtype=np.uint8)
NAMES = np.arange(128, 256)
ANSWER = slice(2, 8)  # bytes in a fact's line
LINE_BYTES = 9  # "=NhWqZks\n"
SHORTEST_DISTANCE = LINE_BYTES
NEWLINE = 10
ROW_SETTINGS = "context_length", "batch_size", "facts", "window", "seed"
HELD_OUT_SEED = 1  # seed of the rows for evaluation; training rows have 0


class Rows(NamedTuple):
    """A batch, and where its questions are."""

    batch: Batch
    is_text: torch.Tensor  # bool [B, T]: the target at this position is a byte of text
    questions: torch.Tensor  # int64 [B, Q]: the last position before each question's answer
    distances: torch.Tensor  # int64 [B, Q]: bytes from each question back to its definition


def main() -> None:
    arguments = parse_flags(
        __doc__.splitlines()[0],
        model={"default": "tiny", "choices": MODELS},
        attention_type={"default": "full", "choices": KINDS, "help": "window: sparse that chooses no blocks"},
        data={"nargs": "+", "help": "train.py's flag; default: Python's standard library"},
        context_length={"type": int, "default": 8192},
        batch_size={"type": int, "default": 8, "help": "rows per step"},
        facts={"type": int, "help": "per row, at most 128; default: context_length / 64, 28%% of the bytes"},
        selected_blocks={"type": int, "default": 16},
        block_size={"type": int, "default": 64},
        window={"type": int, "default": 512},
        steps={"type": int, "default": 1000},
        warmup_steps={"type": int, "default": 50},
        learning_rate={"type": float, "default": 1e-3},
        optimizer_state={"default": "float32", "choices": ("float32", "compact"), "help": "as train.py's"},
        linear={"default": "bf16", "choices": LINEARS, "help": "as train.py's"},
        seed={"type": int, "default": 0, "help": "for the initial weights and the rows"},
        evaluate_every={"type": int, "default": 100, "help": "steps"},
        evaluation_rows={"type": int, "default": 32},
        out={"type": Path, "help": "file to which each evaluation appends a line of JSON"},
        compare={"type": Path, "nargs": "+", "help": "train nothing: tables of the runs in these files"},
        picture={"type": Path, "help": "with --compare: a file for the curves"},
    )
    if arguments.compare:
        if arguments.out:
            sys.exit("--out has no effect with --compare; drop it")
        compare(arguments)
    else:
        if arguments.picture:
            sys.exit("--picture has no effect without --compare; drop it")
        train(arguments)


def train(arguments: argparse.Namespace) -> None:
    if arguments.facts is None:
        arguments.facts = min(arguments.context_length // 64, len(NAMES))
    # No line may stand in the first block of keys: the text has at least a block of bytes.
    most = min(len(NAMES), (arguments.context_length - arguments.block_size) // (2 * LINE_BYTES))
    if not 1 <= arguments.facts <= most:
        sys.exit(f"--facts must be 1 to {most} at context_length {arguments.context_length}, got {arguments.facts}")
    world = World(0, 1, arguments.device)
    model, optimizer = build(arguments, world)
    training, held_out = streams(arguments.data, arguments.seed)
    batches = math.ceil(arguments.evaluation_rows / arguments.batch_size)
    evaluation = [weave(held_out, arguments, (HELD_OUT_SEED, i)) for i in range(batches)]
    print(f"{model.config.num_parameters():,} parameters, {len(training):,} bytes of text", flush=True)
    seconds = 0.0
    for step in range(1, arguments.steps + 1):
        began = time.perf_counter()
        rows = weave(training, arguments, (0, step))
        rate = warmup_cosine(
            step - 1, learning_rate=arguments.learning_rate, warmup_steps=arguments.warmup_steps,
            max_steps=arguments.steps, final_ratio=0.1,
        )  # fmt: skip
        loss, _ = train_step(model, optimizer, [rows.batch], world, rate, max_grad_norm=1.0)
        seconds += time.perf_counter() - began
        if step % arguments.evaluate_every and step < arguments.steps:
            continue
        result = evaluate(model, evaluation, arguments)
        tokens = step * arguments.batch_size * arguments.context_length
        recall = " ".join(f"{bucket['accuracy']:.2f}" for bucket in result["recall"])
        print(
            f"step {step}: {tokens / 1e6:.1f}M tokens, {seconds:.0f} s ({tokens / seconds:,.0f} tokens/s), "
            f"loss {loss:.3f}, held-out text {result['loss']:.3f}, recall by distance {recall}",
            flush=True,
        )
        if arguments.out:
            settings = {k: v for k, v in vars(arguments).items() if k not in ("device", "out", "compare", "picture")}
            line = {**environment(world.device), **settings, "step": step, "tokens": tokens, "seconds": seconds}
            with arguments.out.open("a") as file:
                file.write(json.dumps({**line, "training_loss": loss, **result}) + "\n")


def build(arguments: argparse.Namespace, world: World) -> tuple[Transformer, MasterAdamW]:
    """The model in train.py's dtype (bf16 on a GPU) and its optimizer; layers keep all their activations."""
    name, window = arguments.attention_type, arguments.window
    if name == "nsa" and arguments.block_size != BLOCK_SIZE:
        sys.exit(f"--block_size {arguments.block_size} has no effect: blocks of nsa have {BLOCK_SIZE} tokens")
    make = {
        "full": lambda: FULL,
        "sparse": lambda: Sparse(arguments.selected_blocks, arguments.block_size, window, dense_below=0),
        "nsa": lambda: NSA(arguments.selected_blocks, window),
        "window": lambda: Sparse(0, arguments.block_size, window, dense_below=0),
    }[name]
    config = dataclasses.replace(MODELS[arguments.model], layer_kinds=(make(),))
    model = model_on_meta(config, world).to_empty(device=world.device)
    backend = choose_backend("auto", world.device)
    linear = linear_of(TrainConfig(linear=arguments.linear), model.share, world.device)
    apply_execution(model, Execution((WHOLE,) * config.num_hidden_layers, attention_backend=backend, linear=linear))
    optimizer = MasterAdamW(model.named_parameters(), accumulate=False, state_format=arguments.optimizer_state)
    optimizer.load_weights(initial_weights(model, arguments.seed))
    return model, optimizer


# Data


def streams(paths: list[str] | None, seed: int) -> list[np.ndarray]:
    """The training and the held-out documents, each as one array of bytes; a zero ends a document."""
    tokenizer = ByteTokenizer()
    stores = split(join(open_stores(paths, tokenizer, tokenizer.vocab_size)), 0.05, seed)
    return [np.concatenate([store.read(i, 0, n) for i, n in enumerate(store.lengths)]) for store in stores]


def weave(stream: np.ndarray, arguments: argparse.Namespace, number: tuple[int, int]) -> Rows:
    """Rows of text with facts, the same for the same seed and `number`.

    A fact's line goes after the first end of line at or after the place drawn for it.
    """
    T, B, num_facts = arguments.context_length, arguments.batch_size, arguments.facts
    generator = np.random.default_rng((arguments.seed, *number))
    ids, targets = np.empty((B, T), dtype=np.int64), np.full((B, T), IGNORE_INDEX, dtype=np.int64)
    is_text = np.zeros((B, T), dtype=bool)
    questions, distances = np.empty((B, num_facts), dtype=np.int64), np.empty((B, num_facts), dtype=np.int64)
    num_lines, num_bytes = 2 * num_facts, T - 2 * num_facts * LINE_BYTES
    for row in range(B):
        lines = np.empty((2, num_facts, LINE_BYTES), dtype=np.int64)  # definitions, questions
        lines[0, :, 0], lines[1, :, 0], lines[:, :, -1] = ord("="), ord("?"), NEWLINE
        lines[:, :, 1] = generator.choice(NAMES, num_facts, replace=False)
        lines[:, :, ANSWER] = generator.choice(LETTERS, (num_facts, ANSWER.stop - ANSWER.start))

        # Nothing is defined in the first block of keys: every token attends to it.
        first, last = arguments.block_size, T - LINE_BYTES
        distance = np.exp(generator.uniform(math.log(SHORTEST_DISTANCE), math.log(last - first), num_facts))
        definition = generator.uniform(first, last - distance)
        places = np.concatenate([definition, definition + distance])
        order = places.argsort()

        # Line i of the row has i lines before it: its offset in the text is its place less their bytes.
        start = generator.integers(len(stream) - num_bytes)
        text = stream[start : start + num_bytes]
        ends = np.append(np.flatnonzero(text == NEWLINE) + 1, num_bytes)
        offsets = (places[order] - np.arange(num_lines) * LINE_BYTES).clip(0, num_bytes)
        offsets = np.maximum.accumulate(ends[np.searchsorted(ends, offsets)])
        starts = np.empty(num_lines, dtype=np.int64)
        starts[order] = offsets + np.arange(num_lines) * LINE_BYTES  # now in the order of `lines`
        cells = starts[:, None] + np.arange(LINE_BYTES)
        is_text[row] = True
        is_text[row, cells] = False
        ids[row, is_text[row]] = text
        ids[row, cells] = lines.reshape(num_lines, LINE_BYTES)
        is_target = is_text[row].copy()
        is_target[cells[num_facts:, ANSWER]] = True
        targets[row, :-1] = np.where(is_target, ids[row], IGNORE_INDEX)[1:]
        questions[row] = starts[num_facts:] + ANSWER.start - 1
        distances[row] = starts[num_facts:] - starts[:num_facts]
    is_text = np.pad(is_text[:, 1:], ((0, 0), (0, 1)))
    ids, targets, is_text, questions, distances = map(torch.from_numpy, (ids, targets, is_text, questions, distances))
    return Rows(
        Batch(ids, targets, whole_rows(B, T), int((targets != IGNORE_INDEX).sum())), is_text, questions, distances
    )


@functools.cache
def whole_rows(num_rows: int, context_length: int) -> Documents:
    """Documents of a batch whose rows are one document each."""
    return find_documents(torch.zeros(num_rows, context_length, dtype=torch.int64))


# Evaluation


def doubling(first: int, last: int) -> list[int]:
    """Edges of buckets: 0, first, 2 first, 4 first, ..., last."""
    edges = [0]
    while first < last:
        edges.append(first)
        first *= 2
    return [*edges, last]


@torch.no_grad()
def evaluate(model: Transformer, evaluation: list[Rows], arguments: argparse.Namespace) -> dict:
    """Loss of the text, overall and by position, and the share of right answer letters by distance."""
    T, device, letters = arguments.context_length, arguments.device, ANSWER.stop - ANSWER.start
    losses, counts, distances, right = torch.zeros(T), torch.zeros(T), [], []
    for rows in evaluation:
        logits = model(rows.batch.input_ids.to(device), return_logits=True).logits
        targets = rows.batch.targets.to(device)
        each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
        losses += (each.cpu() * rows.is_text).sum(0)
        counts += rows.is_text.sum(0)
        is_right = (logits.argmax(-1) == targets).cpu().double()
        right.append(sum(is_right.gather(1, rows.questions + i) for i in range(letters)).flatten() / letters)
        distances.append(rows.distances.flatten())
    all_right, all_distances, recall, by_position = torch.cat(right), torch.cat(distances), [], []
    edges = doubling(arguments.window, T)
    for low, high in pairwise(edges):
        inside = (all_distances >= low) & (all_distances < high)
        if inside.any():
            accuracy = float(all_right[inside].mean())
            recall.append({"from": low, "to": high, "accuracy": accuracy, "questions": int(inside.sum())})
    edges = doubling(T // 64, T)
    for low, high in pairwise(edges):
        loss = float(losses[low:high].sum() / counts[low:high].sum())
        by_position.append({"from": low, "to": high, "loss": loss, "bytes": int(counts[low:high].sum())})
    return {"loss": float(losses.sum() / counts.sum()), "by_position": by_position, "recall": recall}


# Comparison


def compare(arguments: argparse.Namespace) -> None:
    """Print tables of each run's last evaluation, and with --picture draw curves."""
    lines = [json.loads(line) for file in arguments.compare for line in file.read_text().splitlines()]
    if not lines:
        sys.exit(f"--compare: no evaluation in {', '.join(map(str, arguments.compare))}; give a file that --out wrote")
    rows = [(line["model"], *(line[name] for name in ROW_SETTINGS)) for line in lines]
    if len(set(rows)) > 1:
        sys.exit(f"--compare: runs of one model on the same rows, please; got {', '.join(map(str, set(rows)))}")
    runs: dict[str, list[dict]] = {}  # name of a run -> its evaluations
    for line in lines:
        blocks = f" {line['selected_blocks']}" if line["attention_type"] in ("sparse", "nsa") else ""
        name = f"{line['model']} {line['attention_type']}{blocks}, schedule of {line['steps']} steps"
        name += ", compact" if line.get("optimizer_state") == "compact" else ""
        name += ", FP8" if line.get("linear") == "fp8" else ""
        runs.setdefault(name, []).append(line)
    last = {name: evaluations[-1] for name, evaluations in runs.items()}
    print_table(
        "runs", ["", "steps", "tokens", "seconds", "held-out loss of text, nats/byte"],
        [[name, end["step"], f"{end['tokens']:,}", f"{end['seconds']:.0f}", end["loss"]] for name, end in last.items()],
    )  # fmt: skip
    for title, key, value in (
        ("share of the answers' letters that are right, by distance in bytes", "recall", "accuracy"),
        ("held-out loss of text by position, nats/byte", "by_position", "loss"),
    ):
        header = [f"{bucket['from']:,} to {bucket['to']:,}" for bucket in lines[-1][key]]
        print_table(title, ["", *header], [[name, *(b[value] for b in end[key])] for name, end in last.items()])
    if arguments.picture:
        draw(runs, arguments.picture)


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    """Draw each run: recall by distance, loss by position, recall beyond the window by tokens trained on."""
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    by_distance, by_position, by_tokens = figure.subplots(1, 3)
    for name, evaluations in runs.items():
        end = evaluations[-1]
        for axes, key, value in ((by_distance, "recall", "accuracy"), (by_position, "by_position", "loss")):
            axes.plot([bucket["to"] for bucket in end[key]], [bucket[value] for bucket in end[key]], "o-", label=name)
            axes.set_xscale("log", base=2)
        beyond = [np.mean([bucket["accuracy"] for bucket in line["recall"][1:]]) for line in evaluations]
        by_tokens.plot([line["tokens"] / 1e6 for line in evaluations], beyond, "o-", label=name)
    by_distance.set(title="answers' letters that are right", xlabel="distance up to, bytes", ylim=(-0.03, 1.03))
    by_position.set(title="held-out loss of text, nats/byte", xlabel="position up to, bytes")
    title = "the same, mean of the distances beyond the window"
    by_tokens.set(title=title, xlabel="million bytes trained on", ylim=(-0.03, 1.03))
    figure.legend(*by_distance.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 4))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
