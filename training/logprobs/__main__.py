"""Stores log-probabilities of a corpus.

`python -m training.logprobs MODEL OUT --data pairs.jsonl --objective dpo`
"""

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

from kernels.head_loss import NextToken
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
from training.objectives.decide import text_reader
from training.objectives.stored import INDEX, attention_in_words, digest_of, store
from training.parallel.world import World, join_world

logger = logging.getLogger(__name__)


@torch.no_grad()
def log_probabilities(
    run: Callable[..., torch.Tensor], documents: Store, context_length: int, device: torch.device
) -> np.ndarray:
    """Returns the log-probability of each token of all documents, in their order.

    It is 0 for what is no target, and NaN in documents longer than `context_length`, with which no
    step is taken.

    Args:
        run: takes input ids, targets, documents and the number of targets; returns
            log-probabilities [1, T], or several numbers of each token, [1, T, N].
    """
    packing = BestFitPacking(documents.lengths, context_length, seed=0)
    starts = np.cumsum(documents.lengths) - documents.lengths
    values = np.zeros(0, np.float32)
    sequences = range(packing.sequences_per_epoch)
    for index in Progress(sequences, desc="log-probabilities", unit="sequence"):
        spans, position = packing.spans(0, index), 0
        batch = make_batch(documents, [spans], context_length)
        if not batch.num_valid_tokens:
            continue
        ids, targets = batch.input_ids.to(device), batch.targets.to(device)
        scores = run(ids, targets, batch.documents, batch.num_valid_tokens)[0].float().cpu().numpy()
        if not np.isfinite(scores).all():
            raise UserError(
                "some log-probabilities are no numbers: the weights are damaged, or too large for "
                "this dtype"
            )
        if not len(values):
            values = np.zeros((int(documents.lengths.sum()), *scores.shape[1:]), np.float32)
        for document, _, stop in longest_first(spans):
            first = int(starts[document])
            values[first + 1 : first + stop] = scores[position : position + stop - 1]
            position += stop
    if not len(values):
        raise UserError("the data have no token to be predicted; give others")
    values[np.repeat(documents.lengths > context_length, documents.lengths)] = np.nan
    return values


def score(flags: LogProbsFlags, folder: Path, world: World) -> None:
    """Writes the log-probabilities into `folder`, which is named `flags.out` when it is whole."""
    opened = open_folder(flags, world)
    if flags.rope_scaling is not None:
        opened = replace(opened, shape=extend(opened.shape, flags.rope_scaling))
    tokenizer, attention = opened.tokenizer, attention_in_words(opened.shape, opened.kinds)
    if flags.chat_template:
        tokenizer = open_tokenizer(flags.tokenizer or opened.tokenizer.name, flags.chat_template)
    stores = _read_data(flags, tokenizer, opened.shape.vocab_size)
    documents = join(stores)
    longest = _longest_that_fits(documents, flags.context_length)
    warn_beyond(opened.shape, longest, command="")
    model = load(opened, flags.context_length, 0, world, flags.memory_budget)
    count = 0

    def run(ids, targets, packed, num_targets):
        nonlocal count
        count += num_targets
        if flags.top_k is not None:
            hidden_BTD = model(ids, packed).hidden_states
            return top_log_probs(model, hidden_BTD, targets, flags.top_k)
        loss = NextToken(targets, denominator=1.0, num_targets=num_targets)
        return model(ids, packed, loss).log_probs

    values = log_probabilities(run, documents, flags.context_length, world.device)
    identities = [part.text_identity for part in stores]
    store(folder, values, digest_of(flags.checkpoint), attention, tokenizer.identity, identities)
    log_probs = values if flags.top_k is None else values[:, 0]
    nats = -np.nansum(log_probs, dtype=np.float64) / count
    print(f"{flags.out}: {count:,} targets, {nats:.4f} nats each")


def _read_data(flags: LogProbsFlags, tokenizer, vocab_size: int) -> list[TokenStore]:
    reading = Reading(
        reasoning=flags.chat_reasoning,
        columns=flags.columns,
        bad_rows=flags.bad_rows,
        rows=text_reader(flags.objective, tokenizer.eos_id, flags.context_length),
        needs_chats=flags.chat_reasoning is not None,
    )
    stores = open_stores(flags.data, tokenizer, vocab_size, reading, flags.validation_data)
    in_memory = [store for store in stores if isinstance(store, TokenStore)]
    if len(in_memory) < len(stores):
        raise UserError(
            "prepared sets have no log-probabilities beside them; give the rows that they were "
            "made of"
        )
    count = len(flags.data)
    refuse_twice(stores[:count], stores[count:], are_given=True)  # as the run would
    return in_memory


def _longest_that_fits(documents: Store, context_length: int) -> int:
    """Returns the tokens of the longest document that fits. Raises UserError if none does."""
    lengths = documents.lengths
    fits = lengths <= context_length
    if not fits.any():
        raise UserError(
            f"all documents are longer than --context_length {context_length:,}, up to "
            f"{lengths.max():,}; raise it"
        )
    if not fits.all():
        logger.warning(
            "data: %d documents are longer than a sequence, the longest has %s tokens: train with "
            "--overlong drop",
            (~fits).sum(),
            f"{lengths.max():,}",
        )
    return int(lengths[fits].max())


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
            f"{flags.out} has log-probabilities; "
            "give another folder, or delete it if they are not needed"
        )
    if flags.out.exists() and not flags.out.is_dir():
        raise UserError(
            f"the folder {flags.out} cannot be made: a file has that name; give another folder"
        )
    with making(flags.out) as folder, join_world(flags.device) as world, mending_out_of_memory():
        score(flags, folder, world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
