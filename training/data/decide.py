"""Decides what a run reads, and opens it: documents, held-out documents, packing and loader."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import exists
from pathlib import Path

from training.data.chat import open_tokenizer as open_with_template
from training.data.corpus import load_corpus
from training.data.flags import DataFlags
from training.data.loader import PackedLoader, check_can_validate, count_sequences
from training.data.packing import Packing
from training.data.sources import Reading
from training.data.tokenizer import ByteTokenizer, FileTokenizer
from training.data.tokens import Store, TokenStore
from training.host.errors import UserError
from training.parallel.world import World

logger = logging.getLogger(__name__)
SHOWN_TOKENS = 5  # names of new tokens in a message
Tokenizer = ByteTokenizer | FileTokenizer


@dataclass(frozen=True)
class DataRecipe:
    """The files of a run, and how they become sequences."""

    paths: list[str]  # to train on; []: sources of Python's standard library
    held_out_paths: list[str]  # []: a share of the documents is held out
    held_out_share: float
    weights: str | None  # of the sequences of each path
    packing: str | None
    overlong: str | None
    seed: int
    context_length: int  # tokens of a sequence
    batch_size: int  # sequences of a micro-batch
    micro_batches: int  # of a step
    validation_sequences: int  # 0: there are no validations
    reading: Reading  # without a reader of rows, which the tokenizer's ids make
    has_template: bool  # whether a chat template was given
    # A batch is printed (True) or written as this page, and nothing is trained.
    show_batch: bool | str
    only_shows: bool  # the batch is shown without weights: the run has not begun

    @property
    def is_shown(self) -> bool:
        return bool(self.show_batch)


@dataclass(frozen=True)
class Corpus:
    """Documents of a run."""

    train: Store
    held_out: Store
    packing: Packing


def decide_data(
    flags: DataFlags,
    *,
    seed: int,
    batch: tuple[int, int, int],
    validation_sequences: int,
    needs_chats: bool,
    is_resumed: bool,
) -> DataRecipe:
    """Returns what the flags say of the data.

    Args:
        batch: tokens of a sequence, sequences of a micro-batch, micro-batches of a step.
        needs_chats: whether --chat_reasoning was given, which data without chats do not heed.
    """
    reading = Reading(
        flags.chat_reasoning,
        flags.suffixes,
        flags.columns,
        flags.bad_rows,
        needs_chats=needs_chats,
    )
    context_length, batch_size, micro_batches = batch
    return DataRecipe(
        paths=flags.data,
        held_out_paths=flags.validation_data,
        held_out_share=flags.validation_fraction,
        weights=flags.data_weights,
        packing=flags.packing,
        overlong=flags.overlong,
        seed=seed,
        context_length=context_length,
        batch_size=batch_size,
        micro_batches=micro_batches,
        validation_sequences=validation_sequences,
        reading=reading,
        has_template=bool(flags.chat_template),
        show_batch=flags.show_batch,
        only_shows=bool(flags.show_batch) and not is_resumed,
    )


# The tokenizer


def open_tokenizer(path: str | None, template: str | None, checkpoint: Path | None) -> Tokenizer:
    """Opens a tokenizer with --chat_template, or with the checkpoint's copy if that is gone."""
    if template not in (None, "chatml") and checkpoint and not exists(template):
        template = str(checkpoint / "chat_template.jinja")
    return open_with_template(path, template)


def check_tokenizer(tokenizer: Tokenizer, checkpoint: Path, identity: str | None) -> None:
    """Refuses another tokenizer than the one that a checkpoint was trained with."""
    if identity == tokenizer.identity:
        return
    was = f"{checkpoint} was trained with tokenizer {str(identity)[:12]}"
    name = f"{tokenizer.name} is {tokenizer.identity[:12]} (first digits of the files' SHA-256)"
    raise UserError(f"cannot resume: {was}, {name}; give that --tokenizer")


def check_new_tokens(
    tokenizer: FileTokenizer, template: str, vocab_size: int, has_adapters: bool
) -> None:
    """Refuses tokens of a chat template for which no row of the embedding would be trained."""
    added = tokenizer.added_for_chats
    names = ", ".join(added[:SHOWN_TOKENS])
    if len(added) > SHOWN_TOKENS:
        names += f" and {len(added) - SHOWN_TOKENS} more"
    needs = f"chat_template {template} needs the tokens {names}, which {tokenizer.name} lacks"
    if tokenizer.vocab_size > vocab_size:
        why = f"the model's vocab_size {vocab_size} has no room for {tokenizer.vocab_size} ids"
        raise UserError(
            f"{needs}: {why}; give a template of plain words or of the tokenizer's tokens"
        )
    if has_adapters:
        raise UserError(
            f"{needs}: adapters would not train their embeddings; "
            "drop lora, or give another template"
        )
    logger.info("chat: new tokens %s: the embedding's rows of their ids are trained", names)


# Documents and batches


def open_corpus(
    data: DataRecipe,
    tokenizer: Tokenizer,
    vocab_size: int,
    reading: Reading,
    finish: Callable[[Sequence[TokenStore]], None],
) -> Corpus:
    """Reads and packs the documents.

    Args:
        reading: the recipe's, with a reader of rows.
        finish: completes the columns of documents that the reader has made.
    """
    train, held_out, packing = load_corpus(
        data.paths,
        tokenizer,
        vocab_size,
        validation_fraction=data.held_out_share,
        context_length=data.context_length,
        seed=data.seed,
        packing=data.packing,
        overlong=data.overlong,
        weights=data.weights,
        reading=reading,
        validation_data=data.held_out_paths,
        finish=finish,
        may_be_one=data.only_shows,
    )
    if data.has_template and not train.are_samples:
        raise UserError("chat_template has no effect without chats; drop it")
    return Corpus(train, held_out, packing)


def make_loader(data: DataRecipe, corpus: Corpus, world: World) -> PackedLoader:
    """Returns the loader of training batches, at the beginning of the data.

    Raises UserError for too few sequences for a step, of which a shown batch is warned.
    """
    state = {"validation_crc32": corpus.held_out.identity} if data.held_out_paths else {}
    loader = PackedLoader(
        corpus.train,
        corpus.packing,
        data.batch_size,
        world.data_rank,
        world.data_size,
        True,
        state,
    )
    try:
        loader.check_enough_for_step(data.micro_batches)
    except UserError as error:
        if not data.is_shown:
            raise
        logger.warning("data: %s", error)
    return loader


def check_held_out(data: DataRecipe, held_out: Store) -> None:
    """Warns of held-out documents that no validation reads; raises UserError if a validation has no
    token to predict."""
    num_longer = int((held_out.lengths > data.context_length).sum())
    if held_out.columns and num_longer:
        logger.warning(
            "data: %s held-out documents, longer than a sequence, are in no validation",
            f"{num_longer:,}",
        )
    if data.validation_sequences and (data.held_out_paths or not data.is_shown):
        check_can_validate(held_out, data.context_length, data.validation_sequences)


def describe_data(data: DataRecipe, loader: PackedLoader, held_out: Store) -> None:
    """Logs tokens of the data, of a step and of a validation."""
    sequence_tokens = loader.sequences_per_epoch * data.context_length
    padded = " with padding" if loader.num_tokens < sequence_tokens else ""
    sequences = data.batch_size * data.micro_batches * loader.world_size
    logger.info(
        "data: %s training tokens, %s held out; %s tokens a step%s",
        f"{loader.num_tokens:,}",
        f"{(held_out.lengths - 1).sum():,}",
        f"{data.context_length * sequences:,}",
        padded,
    )
    limit = data.validation_sequences
    if not limit or not len(held_out.lengths):
        return
    num_sequences = count_sequences(held_out, data.context_length)
    if limit < num_sequences:
        reads = f"{limit:,} of {num_sequences:,} held-out sequences"
        logger.info("data: a validation reads %s, --validation_sequences more", reads)
