"""The data of a run: the stores at the paths of --data, the held-out share, and the packing."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from training.data.packing import BestFitPacking, ConcatenatedPacking, MixedPacking, Packing
from training.data.prepared import PreparedStore, is_prepared
from training.data.sources import (
    DEFAULT,
    Document,
    Reading,
    find_files,
    read_documents,
    refuse_unused,
)
from training.data.tokens import Selection, TokenStore, join, split, whole
from training.flags import LARGE, SMALLEST
from training.host.errors import UserError

logger = logging.getLogger(__name__)
Stores = list[TokenStore | PreparedStore]


def open_stores(
    paths: list[str] | None,
    tokenizer,
    vocab_size: int,
    reading: Reading = DEFAULT,
    validation_data: Sequence[str] = (),
) -> Stores:
    """Returns a store for each path, or for the default corpus, then for each of --validation_data.

    Looks for the files of all paths before it reads any: to read a corpus takes minutes.
    """
    unused = reading.awaited

    def find(path: str | None) -> list[Path]:
        return [] if path is None or is_prepared(Path(path)) else find_files(Path(path), reading)

    def open_store(path: str | None, files: list[Path]) -> TokenStore | PreparedStore:
        if path is not None and is_prepared(Path(path)):
            if reading.rows is not None:
                raise UserError(
                    f"{path} is a prepared set, which holds no rows of an --objective; "
                    "give the rows"
                )
            return PreparedStore(Path(path), tokenizer, vocab_size)
        documents: Iterable[Document] = read_documents(
            path, tokenizer, vocab_size, reading, unused, files
        )
        if reading.rows:
            documents = reading.rows.join(documents)
        return TokenStore(documents, tokenizer.eos_id)

    trained_on = paths or (None,)
    files = [find(path) for path in trained_on]
    with _naming_validation_data():
        validation_files = [find(path) for path in validation_data]
    if paths:  # without them, rules refuse the flags
        all_paths = map(Path, [*paths, *validation_data])
        reading.refuse_without_effect([path for path in all_paths if not is_prepared(path)])
    stores = [*map(open_store, trained_on, files)]
    with _naming_validation_data():
        stores += map(open_store, validation_data, validation_files)
    refuse_unused(unused)
    return stores


@contextlib.contextmanager
def _naming_validation_data() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--data", "--validation_data")) from None


def refuse_twice(stores: Stores, held_out: Stores, are_given: bool) -> None:
    """Raises UserError if a file or the same documents are read twice, or held out, too.

    A file is the same by another path or a link.

    Args:
        stores: stores of --data.
        held_out: stores of --validation_data.
        are_given: not the default corpus, whose files may have any number of links.
    """
    names: dict[object, str] = {}
    for file in (file for store in stores for file in dict.fromkeys(store.files())):
        name = names.setdefault(file_id(file), file)
        if name is not file and are_given:
            raise UserError(f"data has {name} and {file}, which are one file; leave one out")
    if len({store.identity for store in stores}) < len(stores):
        raise UserError("two paths of data have the same documents; leave one out")
    cure = "take it out of one of them: a loss on what was trained on says nothing"
    for store in held_out:
        for file in store.files():
            if file_id(file) in names:
                raise UserError(f"{file} is in validation_data and in data; {cure}")
        if any(store.identity == trained_on.identity for trained_on in stores):
            raise UserError(
                f"validation_data {store.source(0)} has the documents that a path of data "
                f"has; {cure}"
            )


def warn_of_prompts(stores: Stores, held_out: Stores) -> None:
    """Warns of prompts of an objective's rows that are both held out and trained on."""
    judged = _prompts_in(held_out)
    both = _prompts_in(stores) & judged
    if both:
        count = f"{len(both):,} of {len(judged):,} prompts of validation_data are"
        cure = "take them out of one, to judge answers to new prompts"
        logger.warning("data: %s in data, too; %s", count, cure)


def _prompts_in(stores: Stores) -> set[int | None]:
    prompts: set[int | None] = set()
    for store in stores:
        if store.columns:
            prompts.update(map(store.prompt, range(len(store.lengths))))
    return prompts - {None}


def file_id(file: str) -> object:
    """Returns what is the same for a file by all its paths and links."""
    try:
        status = os.stat(file)
    except OSError:  # moved since it was prepared
        return file
    return status.st_dev, status.st_ino


def parse_weights(text: str, count: int) -> list[float]:
    """Returns `count` numbers above 0 from a text such as "3,1", a weight for each path."""
    if count < 2:
        raise UserError(
            f"data_weights mix several paths of --data: got {count}; drop it, or give more paths"
        )
    with contextlib.suppress(ValueError):
        weights = [float(part) for part in text.split(",")]
        if len(weights) == count and all(SMALLEST <= weight <= LARGE for weight in weights):
            return weights
    raise UserError(
        f"data_weights must be {count} numbers above 0, {LARGE} at most, one for each path of "
        f"--data, as 3,1: got {text[:50]!r}"
    )


def pack(
    train: Selection,
    stores: Stores,
    context_length: int,
    seed: int,
    kind: str | None = None,
    overlong: str | None = None,
    weights: list[float] | None = None,
    may_be_short: bool = False,
) -> Packing:
    """Packs the training documents: all together, or each path by itself if `weights` mix them.

    Args:
        train: the training documents of the joined stores.
        kind: "best_fit", "concatenate", or None: best_fit for data with samples, which must not be
            cut.
        overlong: what best_fit does with documents longer than context_length: "drop", "split", or
            None: refuse them.
        may_be_short: documents that are shorter than one sequence, all together, are no error.
    """
    groups, firsts = [stores], np.array([0, len(train.documents)])
    if weights:
        groups = [[store] for store in stores]
        borders = np.cumsum([0] + [len(store.lengths) for store in stores])
        firsts = np.searchsorted(train.documents, borders)
    packings: list[Packing] = []
    for group, first, stop in zip(groups, firsts.tolist(), firsts[1:].tolist()):
        lengths, are_samples = train.lengths[first:stop], any(store.are_samples for store in group)
        if not len(lengths):
            raise UserError(
                "a path of --data has no document left beside those held out; "
                "give more, or leave it out"
            )
        if kind == "best_fit" or (kind is None and are_samples):
            choice = overlong or "refuse"
            packings.append(_best_fit(train, lengths, first, context_length, seed, choice))
        elif may_be_short and lengths.sum() < context_length:
            logger.warning(
                "data: all documents together do not fill one context_length of %d", context_length
            )
            packings.append(BestFitPacking(lengths, context_length, seed))
        else:
            packings.append(ConcatenatedPacking(lengths, context_length, seed))
    has_best_fit = any(isinstance(packing, BestFitPacking) for packing in packings)
    if overlong is not None and not has_best_fit:
        raise UserError(
            "overlong has no effect where documents are concatenated; "
            "drop it, or --packing best_fit of train.py"
        )
    return MixedPacking(packings, firsts[:-1], weights) if weights else packings[0]


def _best_fit(
    train: Selection, lengths: np.ndarray, first: int, context_length: int, seed: int, overlong: str
) -> BestFitPacking:
    """Packs the documents `first`, `first` + 1, ... of `train`, which have these lengths.

    Logs what it leaves out.
    """
    too_long = (lengths > context_length).nonzero()[0]
    if len(too_long):
        share = f"{lengths[too_long].sum() / lengths.sum():.1%} of the tokens"
        count = f"{len(too_long):,} of {len(lengths):,} training documents"
        what = f"{count}, {share}, are longer than context_length {context_length:,}"
        if overlong == "refuse":
            longest = int(lengths.argmax())
            example = f"the longest {train.source(first + longest)} with {lengths[longest]:,}"
            choices = "drop" if train.columns else "drop or split"  # answers are not cut
            raise UserError(
                f"{what}, {example}; raise --context_length, or choose --overlong {choices}"
            )
        logger.warning("data: %s: %s", what, {"drop": "left out", "split": "split"}[overlong])
    packing = BestFitPacking(lengths, context_length, seed, overlong == "split")
    logger.info(
        "data: best_fit fills %.1f%% of %s sequences",
        100 * packing.filled,
        f"{packing.sequences_per_epoch:,}",
    )
    return packing


def load_corpus(
    paths: list[str],
    tokenizer,
    vocab_size: int,
    *,
    validation_fraction: float,
    context_length: int,
    seed: int,
    reading: Reading = DEFAULT,
    packing: str | None = None,
    overlong: str | None = None,
    weights: str | None = None,
    validation_data: Sequence[str] = (),
    finish: Callable[[Sequence[TokenStore]], None] | None = None,
    may_be_one: bool = False,
) -> tuple[Selection, Selection, Packing]:
    """Returns the training documents of a run, the held-out ones, and the packing of the former.

    With paths of `validation_data` their documents are held out, in random order, and all others
    are trained on. `finish` completes the columns of documents that `reading.rows` has made.
    `may_be_one` is as in `split`.
    """
    shares = None if weights is None else parse_weights(weights, len(paths))
    stores = open_stores(paths, tokenizer, vocab_size, reading, validation_data)
    if finish is not None:
        finish([store for store in stores if isinstance(store, TokenStore)])
    count = max(1, len(paths))
    stores, judged = stores[:count], stores[count:]
    refuse_twice(stores, judged, are_given=bool(paths))
    if judged:
        warn_of_prompts(stores, judged)
        train, held_out = whole(join(stores)), whole(join(judged), seed)
    else:
        train, held_out = split(join(stores), validation_fraction, seed, may_be_one)
    packed = pack(
        train, stores, context_length, seed, packing, overlong, shares, may_be_short=may_be_one
    )
    return train, held_out, packed
