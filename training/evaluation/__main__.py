"""Evaluate how a model uses its context: loss by position, loss on tokens that need it, needles by
length and depth.

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
    """Settings of the checkpoint's run that say which texts it held out. Somebody may have edited
    them."""

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
    names = [each.name for each in fields(RunSettings)]
    given = {
        name: value for name in names if (value := opened.settings.get(name)) not in (None, [])
    }
    with refused_as_user_error(f"{opened.folder}/trainer.json is damaged, give another folder: "):
        return read_flags(RunSettings, as_words(given, names), "")


class Questions(NamedTuple):
    """Everything that a model is asked, made before its weights are read; the longest pieces come
    first."""

    pieces: list[positions.Piece]
    short_context: int
    samples: list[Samples]


def context_length_of(flags: EvaluationFlags, opened: Opened) -> int:
    """Returns the tokens that are read at most."""
    settings, declared = (
        settings_of(opened),
        min(opened.shape.max_position_embeddings, LARGEST_DEFAULT_CONTEXT),
    )
    return flags.context_length or (settings and settings.context_length) or declared


def make_questions(flags: EvaluationFlags, opened: Opened, world: World) -> Questions:
    """Raises UserError for data that cannot be read, and where no text or needle is as long as
    asked."""
    settings, context_length = settings_of(opened), context_length_of(flags, opened)
    lengths = flags.lengths or [
        max(2, context_length // 4),
        max(2, context_length // 2),
        context_length,
    ]
    budget = memory_budget(flags.memory_budget, world.device)
    check_memory(opened.shape, max(lengths) if flags.samples else 0, world.device, budget)
    pieces, samples = [], []
    if flags.sequences:
        pieces = positions.longest_pieces(
            open_texts(flags, opened, settings), context_length, flags.sequences
        )
        if not pieces:
            raise UserError(
                "no document of the data has a token to be predicted (prompts do not count); give "
                "--data"
            )
    short = flags.short_context or max(2, min(SHORT_CONTEXT, context_length // 4))
    if flags.short_context is not None and len(pieces[0].ids) <= short:
        has = (
            f"no text is longer than short_context {short}, the longest has {len(pieces[0].ids)} "
            "tokens"
        )
        raise UserError(f"{has}; lower it, or give longer --data and a larger --context_length")
    if flags.samples:
        samples = [
            Samples(length, opened.tokenizer, flags.seed, flags.samples)
            for length in sorted({*lengths})
        ]
        if not samples[-1].size:
            fits = f"no needle fits {max(lengths)} tokens of this tokenizer"
            raise UserError(f"{fits}; give larger --lengths, or --samples 0")
    return Questions(pieces, short, samples)


def open_texts(flags: EvaluationFlags, opened: Opened, settings: RunSettings | None) -> Store:
    own = settings.validation_data if settings and not flags.data else []
    paths, of = (
        flags.data or own or (settings.data if settings else []),
        flags if flags.data else settings,
    )
    reading = Reading(settings.chat_reasoning if settings else None)
    if of:
        reading = reading._replace(suffixes=of.suffixes, columns=of.columns, bad_rows=of.bad_rows)
    if not flags.data and settings is None:
        logger.warning(
            "data: Python's standard library, because %s is of no run; --data reads others",
            opened.folder,
        )
    store = join(open_stores(paths, opened.tokenizer, opened.shape.vocab_size, reading))
    if flags.data or own or settings is None:
        return store
    trained_on, held_out = split(store, settings.validation_fraction, settings.seed)
    if trained_on.identity != opened.corpus_crc32:
        raise UserError(
            f"the data of {opened.folder}'s run have changed: which it held out is not known; give "
            "--data"
        )
    return held_out


def evaluator_losses(
    flags: EvaluationFlags, opened: Opened, questions: Questions, world: World
) -> tuple[positions.Losses, positions.Losses]:
    """The losses of --evaluator, which has the memory before the judged model and attends as it was
    trained."""
    assert flags.evaluator is not None, (
        "without it the judged model says which tokens need the context"
    )
    other = open_folder(ModelFlags(flags.evaluator, tokenizer=flags.tokenizer), world)
    if other.tokenizer.identity != opened.tokenizer.identity:
        raise UserError(
            f"evaluator {flags.evaluator} has another tokenizer: its tokens are not this model's"
        )
    verify_weights(
        opened.folder
    )  # `load` does so as well, but only after the evaluator has read everything
    model = load(other, len(questions.pieces[0].ids), 0, world, flags.memory_budget)
    return positions.read_all(
        model, Progress(questions.pieces, desc="evaluator", unit="text"), questions.short_context
    )


@dataclass
class Evaluation:
    """The answers so far; JSON has the same names."""

    loss_by_position: list[positions.Bucket] = field(default_factory=list)
    key_tokens: positions.KeyTokens | None = None
    tasks: list[Result] = field(default_factory=list)
    answers: dict[str, float] = field(default_factory=dict)


def evaluate(
    flags: EvaluationFlags, opened: Opened, questions: Questions, world: World, found: Evaluation
) -> None:
    """Add the answers to `found` one after the other, so that an error in the needles leaves it the
    losses."""
    theirs = evaluator_losses(flags, opened, questions, world) if flags.evaluator else None
    gc.collect()  # the evaluator's weights are gone before the model's are read
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    cached = max((samples.length for samples in questions.samples if samples.size), default=0)
    longest = max([cached, *(len(piece.ids) for piece in questions.pieces)])
    warn_beyond(opened.shape, longest)
    model = load(opened, longest, cached, world, flags.memory_budget)
    if questions.pieces:
        bar = Progress(questions.pieces, desc="loss", unit="text")
        long, short = positions.read_all(model, bar, None if theirs else questions.short_context)
        their_long, their_short = theirs or (long, short)
        found.loss_by_position = positions.by_position(questions.pieces, long)
        limits = questions.short_context, flags.margin, flags.ceiling
        found.key_tokens = positions.key_token_losses(
            questions.pieces, long, their_long, their_short, *limits
        )
    asked = sum(samples.count for samples in questions.samples if samples.size)
    with Progress(total=asked, desc="needles", unit="sample", disable=not asked) as bar:
        for samples in questions.samples:
            bar.set_postfix_str(f"{samples.length:,} tokens")
            answer = lambda ids, count: [*write(model, ids, count, opened.stop_ids)]  # noqa: E731
            found.tasks.append(judge(answer, samples, bar.update))


def format_needles(results: Sequence[Result]) -> str:
    lines = ["share of the needles found, by tokens of the prompt"]
    lines.append(f"{'':<28}" + "".join(f"{result.length:>9,}" for result in results))
    rows = {"all depths": [result.score for result in results]}
    for depth in DEPTHS:
        rows[f"depth {depth:.0%}"] = [(result.by_depth or {}).get(depth) for result in results]
    for name, scores in rows.items():
        if any(score is not None for score in scores):
            lines.append(
                f"{name:<28}" + "".join(f"{'-':>9}" if s is None else f"{s:9.2f}" for s in scores)
            )
    if None in rows["all depths"]:
        lines.append("-: too short for a needle with this tokenizer")
    return "\n".join(lines)


def read_earlier(files: Sequence[Path]) -> list[tuple[str, dict]]:
    """(name of its folder, content) of each evaluation.json."""
    earlier = [(file.absolute().parent.name, read_json(file)) for file in files]
    for file, (_, content) in zip(files, earlier):
        try:
            content["tasks"] = [
                row for row in content["tasks"] if row["task"] == "needle"
            ]  # earlier versions had more
            numbers = [
                row[name]
                for row in content["loss_by_position"]
                for name in ("first", "last", "loss")
            ]
            numbers += [row[name] or 0 for row in content["tasks"] for name in ("length", "score")]
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
        draw_losses(
            folder / "loss_by_position.png",
            [(name, one["loss_by_position"]) for name, one in curves],
            unit,
        )
    if rows := [row for row in content["tasks"] if row["by_depth"]]:
        draw_needles(folder / "needles.png", [(name, one["tasks"]) for name, one in curves])
        draw_depths(folder / "needle_depths.png", rows)


def report(
    flags: EvaluationFlags, found: Evaluation, is_complete: bool, earlier: list[tuple], unit: str
) -> None:
    """Write JSON, print the tables, draw the pictures. Losses are per `unit`: token or byte."""
    content = {
        "settings": vars(flags),
        "torch": torch.__version__,
        **asdict(found),
        "is_complete": is_complete,
    }
    columns = [
        (name, {row["first"]: row["loss"] for row in one["loss_by_position"]})
        for name, one in earlier
    ]
    tables = (
        [positions.format_positions(found.loss_by_position, columns, unit)]
        if found.loss_by_position
        else []
    )
    if found.key_tokens:
        tables.append(positions.format_key_tokens(found.key_tokens, flags.margin, flags.ceiling))
    if found.tasks:
        tables.append(format_needles(found.tasks))
    if found.answers:
        tables.append("\n".join(f"{name:<28}{value:9.4f}" for name, value in found.answers.items()))
    if flags.output_dir:
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
    shape_of_weights(
        flags.checkpoint
    )  # refuses a folder without a model, before anything else is looked at
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
        found = Evaluation()
        try:
            with interrupted_by_signals(), mending_out_of_memory():
                evaluate(flags, opened, questions, world, found)
        finally:  # also of an evaluation that ends early, as when memory runs out in the needles
            if found.loss_by_position or found.tasks:
                unit = "byte" if opened.tokenizer.name == "bytes" else "token"
                report(flags, found, len(found.tasks) == len(questions.samples), earlier, unit)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends as `head` does
    sys.exit(main(sys.argv[1:]))
