"""Evaluates how a model uses its context: losses by position and of tokens that need it, needles.

`python -m training.evaluation FOLDER` takes a checkpoint, or weights in Hugging Face's form.
positions.py defines the losses, needle.py the needles, answers.py what --objective judges.
"""

import sys

from training.evaluation.flags import LONGEST, EvaluationFlags, read_evaluation_flags
from training.flags import SMALLEST, answer_early, as_words, flag, read_flags

if __name__ == "__main__":
    answer_early(read_evaluation_flags)

import contextlib
import gc
import json
import logging
import math
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch

from training.checkpoint.manifest import verify_weights
from training.checkpoint.weights import shape_of_weights
from training.data.corpus import open_stores
from training.data.flags import BAD_ROWS, REASONING
from training.data.sources import Reading
from training.data.tokens import Store, join, split
from training.evaluation import positions
from training.evaluation.answers import judge_answers
from training.evaluation.needle import DEPTHS, Result, Samples, judge
from training.generate.flags import ModelFlags
from training.generate.inference import (
    Opened,
    check_memory,
    load,
    memory_budget,
    mending_out_of_memory,
    open_folder,
    warn_beyond,
    write,
)
from training.host.errors import UserError, import_optional, refused_as_user_error
from training.host.files import check_can_write_into, only_writer_of, read_json, replace_file
from training.host.processes import command
from training.host.progress import Progress
from training.host.signals import interrupted_by_signals
from training.parallel.world import World, join_world

logger = logging.getLogger(__name__)
LARGEST_DEFAULT_CONTEXT = 32_768  # tokens
SHORT_CONTEXT = 4096  # LongPPL's, as the defaults of margin and ceiling


@dataclass
class RunSettings:
    """Settings of the checkpoint's run that say which texts it held out. They may be edited."""

    validation_fraction: float = flag(help="share of the tokens", least=SMALLEST, most=1 - SMALLEST)
    seed: int = flag(help="drew the held-out texts")
    context_length: int | None = flag(None, least=2, most=LONGEST)
    data: list[str] = flag(list)
    validation_data: list[str] = flag(list)
    suffixes: str | None = flag(None)
    columns: str | None = flag(None)
    bad_rows: str | None = flag(None, choices=BAD_ROWS)
    chat_reasoning: str = flag("template", choices=REASONING)


def settings_of(opened: Opened) -> RunSettings | None:
    if not opened.settings:
        return None
    names = [field.name for field in fields(RunSettings)]
    saved = {name: opened.settings.get(name) for name in names}
    saved = {name: value for name, value in saved.items() if value not in (None, [])}
    with refused_as_user_error(f"{opened.folder}/trainer.json is damaged, give another folder: "):
        return read_flags(RunSettings, as_words(saved, names), "")


class Questions(NamedTuple):
    """Everything that a model is asked, made before its weights are read."""

    pieces: list[positions.Piece]  # the longest first
    short_context: int
    samples: list[Samples]


def context_length_of(flags: EvaluationFlags, opened: Opened) -> int:
    """Returns the tokens that are read at most."""
    settings = settings_of(opened)
    declared = min(opened.shape.max_position_embeddings, LARGEST_DEFAULT_CONTEXT)
    return flags.context_length or (settings and settings.context_length) or declared


def make_questions(flags: EvaluationFlags, opened: Opened, world: World) -> Questions:
    """Makes texts and needles. Raises UserError for data that cannot be read, or are too short."""
    settings, context_length = settings_of(opened), context_length_of(flags, opened)
    lengths = flags.lengths or [max(2, context_length // part) for part in (4, 2, 1)]
    budget = memory_budget(flags.memory_budget, world.device)
    check_memory(opened.shape, max(lengths) if flags.samples else 0, world.device, budget)
    pieces, samples = [], []
    if flags.sequences:
        texts = open_texts(flags, opened, settings)
        pieces = positions.longest_pieces(texts, context_length, flags.sequences)
        if not pieces:
            raise UserError(
                "no document of the data has a token to be predicted (prompts do not count); "
                "give --data"
            )
    short = flags.short_context or max(2, min(SHORT_CONTEXT, context_length // 4))
    if flags.short_context is not None and len(pieces[0].ids) <= short:
        raise UserError(
            f"no text is longer than short_context {short}, the longest has {len(pieces[0].ids)} "
            "tokens; lower it, or give longer --data and a larger --context_length"
        )
    if flags.samples:
        samples = [
            Samples(length, opened.tokenizer, flags.seed, flags.samples)
            for length in sorted({*lengths})
        ]
        if not samples[-1].size:
            raise UserError(
                f"no needle fits {max(lengths)} tokens of this tokenizer; "
                "give larger --lengths, or --samples 0"
            )
    return Questions(pieces, short, samples)


def open_texts(flags: EvaluationFlags, opened: Opened, settings: RunSettings | None) -> Store:
    """Opens the texts of --data, else those that the checkpoint's run has held out."""
    source: EvaluationFlags | RunSettings | None = flags if flags.data else settings
    held_out = settings.validation_data if settings and not flags.data else []
    reading, paths = Reading(settings.chat_reasoning if settings else None), list[str]()
    if source:
        paths = held_out or source.data
        reading = reading._replace(
            suffixes=source.suffixes, columns=source.columns, bad_rows=source.bad_rows
        )
    else:
        logger.warning(
            "data: Python's standard library, because %s is of no run; --data reads others",
            opened.folder,
        )
    store = join(open_stores(paths, opened.tokenizer, opened.shape.vocab_size, reading))
    if flags.data or held_out or settings is None:
        return store
    trained_on, tail = split(store, settings.validation_fraction, settings.seed)
    if trained_on.identity != opened.corpus_crc32:
        raise UserError(
            f"the data of {opened.folder}'s run have changed: which it held out is not known; "
            "give --data"
        )
    return tail


def evaluator_losses(
    flags: EvaluationFlags, opened: Opened, questions: Questions, world: World
) -> tuple[positions.Losses, positions.Losses]:
    """Returns the losses of --evaluator, as it was trained to attend.

    It has the memory before the judged model.
    """
    assert flags.evaluator is not None, "else the judged model tells which tokens need context"
    evaluator = open_folder(ModelFlags(flags.evaluator, tokenizer=flags.tokenizer), world)
    if evaluator.tokenizer.identity != opened.tokenizer.identity:
        raise UserError(
            f"evaluator {flags.evaluator} has another tokenizer: its tokens are not this model's"
        )
    verify_weights(opened.folder)  # `load` does so, but after the evaluator has read everything
    model = load(evaluator, len(questions.pieces[0].ids), 0, world, flags.memory_budget)
    bar = Progress(questions.pieces, desc="evaluator", unit="text")
    return positions.read_all(model, bar, questions.short_context)


@dataclass
class Evaluation:
    """The answers so far; JSON has the same names."""

    loss_by_position: list[positions.Bucket] = field(default_factory=list)
    key_tokens: positions.KeyTokens | None = None
    tasks: list[Result] = field(default_factory=list)
    answers: dict[str, float] = field(default_factory=dict)


def evaluate(
    flags: EvaluationFlags, opened: Opened, questions: Questions, world: World, result: Evaluation
) -> None:
    """Adds answers to `result` one after the other: an error in the needles leaves the losses.

    Needs of context are judged by the losses of --evaluator, else by the model's own.
    """
    evaluated = evaluator_losses(flags, opened, questions, world) if flags.evaluator else None
    gc.collect()  # frees the evaluator's weights before the model's are read
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    # Samples of size 0 are too short for a needle, and are not asked.
    longest_sample = max(
        (samples.length for samples in questions.samples if samples.size), default=0
    )
    longest = max([longest_sample, *(len(piece.ids) for piece in questions.pieces)])
    warn_beyond(opened.shape, longest)
    model = load(opened, longest, longest_sample, world, flags.memory_budget)
    if questions.pieces:
        bar = Progress(questions.pieces, desc="loss", unit="text")
        short_context = None if evaluated else questions.short_context
        long_losses, short_losses = positions.read_all(model, bar, short_context)
        judge_long, judge_short = evaluated or (long_losses, short_losses)
        result.loss_by_position = positions.by_position(questions.pieces, long_losses)
        limits = questions.short_context, flags.margin, flags.ceiling
        result.key_tokens = positions.key_token_losses(
            questions.pieces, long_losses, judge_long, judge_short, *limits
        )
    total = sum(samples.count for samples in questions.samples if samples.size)
    with Progress(total=total, desc="needles", unit="sample", disable=not total) as bar:
        for samples in questions.samples:
            bar.set_postfix_str(f"{samples.length:,} tokens")
            answer = lambda ids, count: [*write(model, ids, count, opened.stop_ids)]  # noqa: E731
            result.tasks.append(judge(answer, samples, bar.update))


def format_needles(results: Sequence[Result]) -> str:
    lines = ["share of the needles found, by tokens of the prompt"]
    lines.append(f"{'':<28}" + "".join(f"{result.length:>9,}" for result in results))
    rows = {"all depths": [result.score for result in results]}
    for depth in DEPTHS:
        rows[f"depth {depth:.0%}"] = [(result.by_depth or {}).get(depth) for result in results]
    for name, scores in rows.items():
        if any(score is not None for score in scores):
            shown = ("-" if score is None else f"{score:.2f}" for score in scores)
            lines.append(f"{name:<28}" + "".join(f"{score:>9}" for score in shown))
    if None in rows["all depths"]:
        lines.append("-: too short for a needle with this tokenizer")
    return "\n".join(lines)


def read_earlier(files: Sequence[Path]) -> list[tuple[str, dict]]:
    """Returns the name of its folder, and the content, of each evaluation.json."""
    earlier = [(file.absolute().parent.name, read_json(file)) for file in files]
    for file, (_, content) in zip(files, earlier):
        try:
            # Earlier versions had more tasks.
            content["tasks"] = [row for row in content["tasks"] if row["task"] == "needle"]
            numbers = []
            for row in content["loss_by_position"]:
                numbers += [row["first"], row["last"], row["loss"]]
            for row in content["tasks"]:
                numbers += [row["length"] or 0, row["score"] or 0]
            if not (math.isfinite(math.fsum(numbers)) and min(numbers, default=0) >= 0):
                raise ValueError
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            raise UserError(f"--beside {file} is no evaluation.json of this command") from None
    return earlier


def draw(folder: Path, content: dict, earlier: Sequence[tuple[str, dict]], unit: str) -> None:
    try:
        import_optional("matplotlib.figure", "a picture")
    except UserError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return
    from training.evaluation.pictures import draw_depths, draw_losses, draw_needles

    curves = [(folder.absolute().name, content), *earlier]
    if content["loss_by_position"]:
        losses = [(name, result["loss_by_position"]) for name, result in curves]
        draw_losses(folder / "loss_by_position.png", losses, unit)
    rows = [row for row in content["tasks"] if row["by_depth"]]
    if rows:
        draw_needles(folder / "needles.png", [(name, result["tasks"]) for name, result in curves])
        draw_depths(folder / "needle_depths.png", rows)


def report(
    flags: EvaluationFlags, result: Evaluation, is_complete: bool, earlier: list[tuple], unit: str
) -> None:
    """Writes JSON, prints the tables, draws the pictures. Losses are per `unit`: token or byte."""
    tables = []
    if result.loss_by_position:
        columns = []
        for name, content in earlier:
            losses = {row["first"]: row["loss"] for row in content["loss_by_position"]}
            columns.append((name, losses))
        tables.append(positions.format_positions(result.loss_by_position, columns, unit))
    if result.key_tokens:
        tables.append(positions.format_key_tokens(result.key_tokens, flags.margin, flags.ceiling))
    if result.tasks:
        tables.append(format_needles(result.tasks))
    if result.answers:
        lines = [f"{name:<28}{value:9.4f}" for name, value in result.answers.items()]
        tables.append("\n".join(lines))
    if flags.output_dir:
        head = {"settings": vars(flags), "torch": torch.__version__}
        content = head | asdict(result) | {"is_complete": is_complete}
        text = json.dumps(content, indent=1, default=str)
        replace_file(flags.output_dir / "evaluation.json", text + "\n")
    print("\n\n".join(tables))
    if flags.output_dir:
        draw(flags.output_dir, json.loads(text), earlier, unit)


@command
def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    flags = read_evaluation_flags(argv)
    if not flags.sequences and not flags.samples:
        raise UserError("sequences 0 and samples 0 leave nothing to evaluate; give one of them")
    shape_of_weights(flags.checkpoint)  # refuses a folder without a model before all else
    earlier = read_earlier(flags.beside)
    if flags.output_dir:
        check_can_write_into(flags.output_dir, "evaluation.json", "--output_dir")
    alone = only_writer_of(flags.output_dir) if flags.output_dir else contextlib.nullcontext()
    with alone, join_world(flags.device) as world:
        opened = open_folder(flags, world)
        if flags.objective != "next_token":
            settings, context_length = settings_of(opened), context_length_of(flags, opened)
            reasoning = settings.chat_reasoning if settings else None
            with mending_out_of_memory():
                answers = judge_answers(flags, opened, context_length, reasoning, world)
            report(flags, Evaluation(answers=answers), True, [], "")
            return
        questions = make_questions(flags, opened, world)
        result = Evaluation()
        try:
            with interrupted_by_signals(), mending_out_of_memory():
                evaluate(flags, opened, questions, world, result)
        finally:  # reports an evaluation that ends early, too, as when memory runs out in needles
            if result.loss_by_position or result.tasks:
                unit = "byte" if opened.tokenizer.name == "bytes" else "token"
                report(flags, result, len(result.tasks) == len(questions.samples), earlier, unit)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends as `head` does
    sys.exit(main(sys.argv[1:]))
