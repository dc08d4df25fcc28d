"""Loss by position in the context, and loss on the tokens that need the long context.

**Position** p of a token counts the tokens before it that the model sees. A model that uses its context has a loss that
falls with p; one whose context was extended badly has a loss that rises where the extension begins.

**Key tokens**, after LongPPL (Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?", ICLR
2025, arXiv 2410.23771): a token is one if an evaluator predicts it well, and well only with the long context:

    short - long > margin   and   long < ceiling

`long` is its loss given the whole context, `short` given the last K tokens alone. There as here the margin is 2 nats,
the ceiling 2 nats and K 4,096, and `short` comes from windows of K tokens, of each of which the last quarter is taken:
a token sees 3/4 K to K tokens. LongPPL is exp(mean loss of key tokens given the long context). Two models are compared
on the key tokens of one evaluator: key tokens of a model's own are such as it predicts well, whatever the model.

Only tokens that training would train on count: of a prompt and its completion, or of a chat, the others are context.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from model import IGNORE_INDEX, Transformer
from training.data.tokens import Store
from training.inference import token_losses

FIRST_BUCKET = 16  # positions: the first bucket is 0 to 15, the next ones 16 to 31, 32 to 63, ...


class Piece(NamedTuple):
    """A stretch of a document.

    Args:
        ids: int64 [T].
        is_masked: bool [T], tokens that are no targets.
    """

    ids: np.ndarray
    is_masked: np.ndarray

    @property
    def is_target(self) -> np.ndarray:
        """bool [T - 1]: which of the tokens at positions 1 to T - 1 count; nothing predicts the one at position 0."""
        return ~self.is_masked[1:]


def longest_pieces(store: Store, context_length: int, count: int) -> list[Piece]:
    """The longest `count` pieces of documents that are cut every `context_length` tokens, longest first.

    Each is read as a document of its own, without the document's end. Of pieces of one length those at the starts of
    documents come first, so that a book does not take the place of all others. Pieces without a target are left out.
    """
    places = np.fromiter(
        (
            (document, start, min(start + context_length, length - 1))
            for document, length in enumerate(store.lengths.tolist())
            for start in range(0, length - 2, context_length)
        ),
        dtype=np.dtype((np.int64, 3)),
    )
    _, start, stop = places.T
    longest_first = np.lexsort((start, start - stop))
    pieces = (Piece(*store.read_masked(*places[i].tolist())) for i in longest_first)
    return list(islice((piece for piece in pieces if piece.is_target.any()), count))


@torch.no_grad()
def losses_of(model: Transformer, ids_BT: np.ndarray) -> np.ndarray:
    """float32 [B, T - 1]: of the tokens at positions 1 to T - 1, each row a document."""
    ids = torch.from_numpy(ids_BT.astype(np.int64))
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    hidden = model(ids.to(model.embed_tokens.weight.device), return_hidden_states=True).hidden_states
    return token_losses(model, hidden, targets).view(ids.shape)[:, :-1].numpy()


def windows(length: int, short: int) -> Iterator[tuple[int, int]]:
    """(start of a window of `short` tokens, first position that is taken of it), for positions `short` to length - 1.

    Of each window the last quarter is taken, of the last one what is left: of length 20 and short 8, windows start at
    2, 4, 6, 8, 10, 12, of which positions 8 and 9, 10 and 11, and so on are taken.
    """
    quarter = max(1, short // 4)
    for first in range(short, length, quarter):
        yield min(first + quarter, length) - short, first


def short_losses_of(model: Transformer, ids: np.ndarray, short: int) -> np.ndarray:
    """float32 [T - short]: of the tokens at positions `short` to T - 1, each given fewer than `short` tokens.

    Windows are read together, as many as have the tokens of the whole document.
    """
    places = [*windows(len(ids), short)]
    at_a_time, parts = max(1, len(ids) // short), []
    for some in (places[i : i + at_a_time] for i in range(0, len(places), at_a_time)):
        losses = losses_of(model, np.stack([ids[start : start + short] for start, _ in some]))
        parts += [row[first - start - 1 :] for row, (start, first) in zip(losses, some)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


@dataclass
class Bucket:
    """Tokens at neighbouring positions, `last` included, and their mean loss, nats."""

    first: int
    last: int
    tokens: int
    loss: float


def by_position(pieces: Sequence[Piece], losses: Sequence[np.ndarray]) -> list[Bucket]:
    """Of the pieces' targets, from their `losses_of`, [T - 1] each; buckets are powers of two."""
    positions = np.concatenate([1 + piece.is_target.nonzero()[0] for piece in pieces])
    values = np.concatenate([x[piece.is_target] for piece, x in zip(pieces, losses)]).astype(np.float64)
    first = np.where(positions < FIRST_BUCKET, 0, 2 ** np.log2(positions).astype(np.int64))
    buckets = []
    for start in np.unique(first).tolist():
        here = first == start
        buckets.append(Bucket(start, max(2 * start, FIRST_BUCKET) - 1, int(here.sum()), float(values[here].mean())))
    return buckets


@dataclass
class KeyTokens:
    """What is said of the tokens that need the context: how many, and their mean losses given the two contexts."""

    tokens: int  # targets past `short_context`, key tokens or not
    key_tokens: int
    short_context: int
    long: float | None  # nats; None where there is no key token
    short: float | None  # of the evaluator
    long_ppl: float | None
    long_of_all: float  # over all targets past `short_context`
    short_of_all: float  # of the evaluator


def is_key(long: np.ndarray, short: np.ndarray, margin: float, ceiling: float) -> np.ndarray:
    """Which tokens need the context, by an evaluator's losses."""
    return (short - long > margin) & (long < ceiling)


def key_token_losses(
    pieces: Sequence[Piece], long: Sequence[np.ndarray], evaluator_long: Sequence[np.ndarray],
    evaluator_short: Sequence[np.ndarray], short_context: int, margin: float, ceiling: float,
) -> KeyTokens | None:  # fmt: skip
    """The losses `long` of the judged model on the evaluator's key tokens; None: no piece has a target past the window.

    Args:
        long, evaluator_long: `losses_of` each piece.
        evaluator_short: `short_losses_of` each piece.
    """
    past = slice(short_context - 1, None)
    is_target = np.concatenate([piece.is_target[past] for piece in pieces])
    own, theirs = (np.concatenate([x[past] for x in losses])[is_target] for losses in (long, evaluator_long))
    short = np.concatenate(evaluator_short)[is_target]
    if not len(own):
        return None
    key = is_key(theirs, short, margin, ceiling)
    of_key = _mean(own[key]) if key.any() else None
    return KeyTokens(
        len(own), int(key.sum()), short_context, of_key, _mean(short[key]) if key.any() else None,
        None if of_key is None else math.exp(of_key), _mean(own), _mean(short),
    )  # fmt: skip


def _mean(losses: np.ndarray) -> float:
    return float(losses.astype(np.float64).mean())


@dataclass
class Losses:
    """Of each piece: the losses with the whole context, and with the short one (empty where it is not longer)."""

    long: list[np.ndarray]
    short: list[np.ndarray]


def read_all(
    model: Transformer, pieces: Sequence[Piece], short_context: int | None, tick: Callable[[], None] = lambda: None
) -> Losses:
    """The losses of a model on all pieces; `tick` is called after each. None: no short context is read."""
    losses = Losses([], [])
    for piece in pieces:
        losses.long.append(losses_of(model, piece.ids[None])[0])
        if short_context is not None:
            losses.short.append(short_losses_of(model, piece.ids, short_context))
        tick()
    return losses


def format_positions(buckets: Sequence[Bucket], earlier: Sequence[tuple[str, dict[int, float]]] = ()) -> str:
    """A table; `earlier` results, (name, first position -> loss), are columns beside it."""
    lines = ["loss, nats a token, by the number of tokens before it"]
    names = "".join(f"{name:>14}" for name, _ in earlier)
    lines.append(f"{'positions':>22}{'tokens':>12}{'loss':>9}{names}")
    for bucket in buckets:
        others = (losses.get(bucket.first) for _, losses in earlier)
        columns = "".join(f"{'-':>14}" if loss is None else f"{loss:14.4f}" for loss in others)
        where = f"{bucket.first:,} to {bucket.last:,}"
        lines.append(f"{where:>22}{bucket.tokens:>12,}{bucket.loss:9.4f}{columns}")
    return "\n".join(lines)


def format_key_tokens(found: KeyTokens, margin: float, ceiling: float) -> str:
    """A few lines."""
    lines = [
        f"tokens that need the context (LongPPL, arXiv 2410.23771): the loss falls by more than {margin:g} nats from "
        f"{found.short_context:,} tokens of context to all of it, to less than {ceiling:g}",
        f"{found.key_tokens:,} of {found.tokens:,} tokens past {found.short_context:,}",
        f"all of these        {found.long_of_all:8.4f} nats; with the short context {found.short_of_all:.4f}",
    ]
    if found.long is not None:
        lines.append(
            f"those that need it  {found.long:8.4f} nats; with the short context {found.short:.4f}; "
            f"LongPPL {found.long_ppl:.3f}"
        )
    return "\n".join(lines)
