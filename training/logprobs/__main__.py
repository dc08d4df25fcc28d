"""Stores log-probabilities of a corpus: `python -m training.logprobs MODEL OUT --data pairs.jsonl
--objective dpo`."""

import sys

from training.flags import answer_early
from training.logprobs.flags import LogProbsFlags, read_logprobs_flags

if __name__ == "__main__":
    answer_early(read_logprobs_flags)

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from training.checkpoint.weights import shape_of_weights
from training.data.chat import open_tokenizer
from training.data.corpus import open_stores, refuse_twice
from training.data.loader import longest_first, make_batch
from training.data.packing import BestFitPacking
from training.data.sources import Reading
from training.data.tokens import Store, TokenStore, join
from training.families.rope import extend
from training.generate.inference import (
    load,
    mending_out_of_memory,
    open_folder,
    top_log_probs,
    warn_beyond,
)
from training.host.errors import UserError
from training.host.files import making
from training.host.processes import command
from training.host.progress import Progress
from training.objectives.choose import text_reader
from training.objectives.stored import INDEX, attention_in_words, digest_of, store
from training.parallel.world import World, join_world

logger = logging.getLogger(__name__)


@torch.no_grad()
def log_probabilities(
    run: Callable[..., torch.Tensor], documents: Store, context_length: int, device: torch.device
) -> np.ndarray:
    """Returns the log-probability of each token of all documents, in their order; 0 of what is no
    target.

    Documents longer than `context_length` have NaN, with which no step is taken.

    Args:
        run: takes input ids, targets, documents and the number of targets; returns
        log-probabilities [1, T], or
            several numbers of each token, [1, T, N].
    """
    packing, starts = (
        BestFitPacking(documents.lengths, context_length, seed=0),
        np.cumsum(documents.lengths),
    )
    values, count = np.zeros(0, np.float32), int(starts[-1])
    starts = starts - documents.lengths
    for index in Progress(
        range(packing.sequences_per_epoch), desc="log-probabilities", unit="sequence"
    ):
        spans, position = packing.spans(0, index), 0
        batch = make_batch(documents, [spans], context_length)
        if not batch.num_valid_tokens:
            continue
        given = (x.to(device) for x in (batch.input_ids, batch.targets))
        found = run(*given, batch.documents, batch.num_valid_tokens)[0].float().cpu().numpy()
        if not np.isfinite(found).all():
            raise UserError(
                "some log-probabilities are no numbers: the weights are damaged, or too large for "
                "this dtype"
            )
        if not len(values):
            values = np.zeros((count, *found.shape[1:]), np.float32)
        for document, _, stop in longest_first(spans):
            first = int(starts[document])
            values[first + 1 : first + stop] = found[position : position + stop - 1]
            position += stop
    if not len(values):
        raise UserError("the data have no token to be predicted; give others")
    values[np.repeat(documents.lengths > context_length, documents.lengths)] = np.nan
    return values


def score(flags: LogProbsFlags, folder: Path, world: World) -> None:
    """Writes the log-probabilities into `folder`, which gets the name `flags.out` when it is
    whole."""
    opened = open_folder(flags, world)
    if flags.rope_scaling is not None:
        opened = replace(opened, shape=extend(opened.shape, flags.rope_scaling))
    tokenizer, attention = opened.tokenizer, attention_in_words(opened.shape, opened.kinds)
    if flags.chat_template:
        tokenizer = open_tokenizer(flags.tokenizer or opened.tokenizer.name, flags.chat_template)
    rows = text_reader(flags.objective, tokenizer.eos_id, flags.context_length)
    has_reasoning = flags.chat_reasoning is not None
    reading = Reading(
        flags.chat_reasoning, None, flags.columns, flags.bad_rows, rows, has_reasoning
    )
    stores = open_stores(
        flags.data, tokenizer, opened.shape.vocab_size, reading, flags.validation_data
    )
    in_memory = [each for each in stores if isinstance(each, TokenStore)]
    if len(in_memory) < len(stores):
        raise UserError(
            "prepared sets have no log-probabilities beside them; give the rows that they were "
            "made of"
        )
    refuse_twice(
        stores[: len(flags.data)], stores[len(flags.data) :], are_given=True
    )  # as the run would
    documents = join(stores)
    count, longest = (
        int((documents.lengths > flags.context_length).sum()),
        f"{documents.lengths.max():,}",
    )
    if count == len(documents.lengths):
        raise UserError(
            f"all documents are longer than --context_length {flags.context_length:,}, up to "
            f"{longest}; raise it"
        )
    if count:
        logger.warning(
            "data: %d documents are longer than a sequence, the longest has %s tokens: train with "
            "--overlong drop",
            count, longest,
        )  # fmt: skip
    warn_beyond(
        opened.shape,
        int(documents.lengths[documents.lengths <= flags.context_length].max()),
        command="",
    )
    model = load(opened, flags.context_length, 0, world, flags.memory_budget)

    counts = list[int]()

    def run(ids, targets, packed, num_targets):
        counts.append(num_targets)
        if flags.top_k is not None:
            hidden_BTD = model(ids, documents=packed, return_hidden_states=True).hidden_states
            return top_log_probs(model, hidden_BTD, targets, flags.top_k)
        known = {"documents": packed, "num_targets": num_targets, "denominator": 1.0}
        return model(ids, targets=targets, return_log_probs=True, **known).log_probs

    values = log_probabilities(run, documents, flags.context_length, world.device)
    identities = [each.text_identity for each in in_memory]
    store(folder, values, digest_of(flags.checkpoint), attention, tokenizer.identity, identities)
    own = values if flags.top_k is None else values[:, 0]
    print(
        f"{flags.out}: {sum(counts):,} targets, "
        f"{-np.nansum(own, dtype=np.float64) / sum(counts):.4f} nats each"
    )


@command
def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    flags = read_logprobs_flags(argv)
    if not flags.data or flags.out is None:
        raise UserError(
            "give the folder that is made behind the model's, and --data, the rows that are read"
        )
    shape_of_weights(flags.checkpoint)  # refuses a folder without a model, before another is made
    if (flags.out / INDEX).exists():
        raise UserError(
            f"{flags.out} has log-probabilities; give another folder, or delete it if they are not "
            "needed"
        )
    if flags.out.exists() and not flags.out.is_dir():
        raise UserError(
            f"the folder {flags.out} cannot be made: a file has that name; give another folder"
        )
    with making(flags.out) as folder, join_world(flags.device) as world, mending_out_of_memory():
        score(flags, folder, world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
