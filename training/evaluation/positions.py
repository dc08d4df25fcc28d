"""Loss by position in the context, and loss on the tokens that need the long context.

**Position** p of a token counts the tokens before it that the model sees. Where a model uses its
context, the loss falls with p. Where the context was extended badly, the loss rises from the
position at which the extension begins.

**Key tokens** are tokens that an evaluator predicts well only with the long context. After LongPPL
(Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?", ICLR 2025, arXiv
2410.23771), a token is one if

    short - long > margin   and   long < ceiling

`long` is its loss given the whole context, `short` its loss given the last K tokens alone.
LongPPL's values are used: margin 2 nats, ceiling 2 nats, K = 4,096. Windows of K tokens give
`short`. Only the last quarter of each window is taken, so a token sees 3/4 K to K tokens. LongPPL
is exp(mean loss of key tokens given the long context). Compare two models on the key tokens of a
single evaluator: every model predicts its own key tokens well, by their definition.

Only tokens that training would train on count. The rest of a prompt and its completion, or of a
chat, is context.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kernels.head_loss import IGNORE_INDEX
from model import Transformer
from training.data.tokens import Store
from training.generate.inference import token_losses

FIRST_BUCKET = 16  # positions: the first bucket is 0 to 15, the next ones 16 to 31, 32 to 63, ...


Losses = Sequence[np.ndarray]  # float32 [T - 1] for each piece, or [T - short context]


class Piece(NamedTuple):
    """A stretch of a document."""

    ids: np.ndarray  # int64 [T]
    is_masked: np.ndarray  # bool [T], True for tokens that are not targets

    @property
    def is_target(self) -> np.ndarray:
        """Whether tokens count, bool [T - 1], from the second on: nothing predicts the first."""
        return ~self.is_masked[1:]


def longest_pieces(store: Store, context_length: int, count: int) -> list[Piece]:
    """Returns the longest pieces of documents that are cut every `context_length` tokens.

    Each piece is read as a separate document, without the token that ends the document. Among
    pieces of one length the starts of documents come first: a book does not take the place of all
    others. Pieces without a target are left out.
    """
    all_places = (
        (document, start, min(start + context_length, length - 1))
        for document, length in enumerate(store.lengths.tolist())
        for start in range(0, length - 2, context_length)
    )
    places = np.fromiter(all_places, dtype=np.dtype((np.int64, 3)))
    _, start, stop = places.T
    pieces = (
        Piece(*store.read_masked(*places[i].tolist())) for i in np.lexsort((start, start - stop))
    )
    return list(islice((piece for piece in pieces if piece.is_target.any()), count))


@torch.no_grad()
def losses_of(model: Transformer, ids_BT: np.ndarray) -> np.ndarray:
    """Returns losses of the tokens at positions 1 to T - 1, float32 [B, T - 1].

    Each row is a document.
    """
    ids = torch.from_numpy(ids_BT.astype(np.int64))
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    hidden = model(ids.to(model.embed_tokens.weight.device)).hidden_states
    return token_losses(model, hidden, targets).view(ids.shape)[:, :-1].numpy()


def windows(length: int, short: int) -> Iterator[tuple[int, int]]:
    """Yields the start of a window of `short` tokens, and the first position that it gives.

    Windows give positions `short` to length - 1. Each window gives its last quarter, the last
    window what is left. Length 20 and short 8, for example: windows start at 2, 4, 6, 8, 10, 12 and
    give positions 8 and 9, 10 and 11, and so on.
    """
    quarter = max(1, short // 4)
    for first in range(short, length, quarter):
        yield min(first + quarter, length) - short, first


def short_losses_of(model: Transformer, ids: np.ndarray, short: int) -> np.ndarray:
    """Returns losses of the tokens at positions `short` to T - 1, float32 [T - short].

    Each token is given fewer than `short` tokens. Windows are read in batches with about as many
    tokens as the whole document.
    """
    places = [*windows(len(ids), short)]
    at_a_time, parts = max(1, len(ids) // short), []
    for i in range(0, len(places), at_a_time):
        batch = places[i : i + at_a_time]
        losses = losses_of(model, np.stack([ids[start : start + short] for start, _ in batch]))
        parts += [row[first - start - 1 :] for row, (start, first) in zip(losses, batch)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


@dataclass
class Bucket:
    """Tokens at the positions `first` to `last`, both included, and their mean loss in nats."""

    first: int
    last: int
    tokens: int
    loss: float


def by_position(pieces: Sequence[Piece], losses: Losses) -> list[Bucket]:
    """Groups the targets of all pieces by position, in powers of two.

    Args:
        losses: `losses_of` each piece, [T - 1].
    """
    positions = np.concatenate([1 + piece.is_target.nonzero()[0] for piece in pieces])
    values = np.concatenate([x[piece.is_target] for piece, x in zip(pieces, losses)])
    first = np.where(positions < FIRST_BUCKET, 0, 2 ** np.log2(positions).astype(np.int64))
    buckets = []
    for start in np.unique(first).tolist():
        inside = values[first == start]
        last = max(2 * start, FIRST_BUCKET) - 1
        buckets.append(Bucket(start, last, len(inside), float(inside.mean(dtype=np.float64))))
    return buckets


@dataclass
class KeyTokens:
    """Key tokens: their number, and mean losses in nats given the long and the short context.

    The losses given the short context are the evaluator's.
    """

    tokens: int  # targets past `short_context`, key tokens or not
    key_tokens: int
    short_context: int
    long_of_all: float  # over all targets past `short_context`
    short_of_all: float
    long: float | None = None  # None where no token is a key token
    short: float | None = None
    long_ppl: float | None = None


def key_token_losses(
    pieces: Sequence[Piece],
    long: Losses,
    evaluator_long: Losses,
    evaluator_short: Losses,
    short_context: int,
    margin: float,
    ceiling: float,
) -> KeyTokens | None:
    """Returns the judged model's losses on the evaluator's key tokens.

    Returns None if no piece has a target past the short context.

    Args:
        long, evaluator_long: `losses_of` each piece, by the judged model and by the evaluator.
        evaluator_short: `short_losses_of` each piece.
    """
    past = slice(short_context - 1, None)
    is_target = np.concatenate([piece.is_target[past] for piece in pieces])
    judged = np.concatenate([x[past] for x in long])[is_target].astype(np.float64)
    theirs = np.concatenate([x[past] for x in evaluator_long])[is_target]
    short = np.concatenate(evaluator_short)[is_target]
    if not len(judged):
        return None
    is_key = (short - theirs > margin) & (theirs < ceiling)
    short = short.astype(np.float64)
    losses = KeyTokens(
        tokens=len(judged),
        key_tokens=int(is_key.sum()),
        short_context=short_context,
        long_of_all=float(judged.mean()),
        short_of_all=float(short.mean()),
    )
    if is_key.any():
        losses.long, losses.short = float(judged[is_key].mean()), float(short[is_key].mean())
        losses.long_ppl = math.exp(losses.long)
    return losses


def read_all(
    model: Transformer, pieces: Iterable[Piece], short_context: int | None
) -> tuple[Losses, Losses]:
    long, short = [], []
    for piece in pieces:
        long.append(losses_of(model, piece.ids[None])[0])
        if short_context is not None:
            short.append(short_losses_of(model, piece.ids, short_context))
    return long, short


def format_positions(
    buckets: Sequence[Bucket],
    earlier: Sequence[tuple[str, dict[int, float]]] = (),
    unit: str = "token",
) -> str:
    """Returns a table of losses per `unit`.

    Args:
        earlier: further columns, each a name and losses by first position.
    """
    lines = [f"loss, nats per {unit}, by the number of {unit}s before it"]
    names = "".join(f"{name:>14}" for name, _ in earlier)
    lines.append(f"{'positions':>22}{unit + 's':>12}{'loss':>9}{names}")
    for bucket in buckets:
        beside = (losses.get(bucket.first) for _, losses in earlier)
        shown = ("-" if loss is None else f"{loss:.4f}" for loss in beside)
        columns = "".join(f"{loss:>14}" for loss in shown)
        where = f"{bucket.first:,} to {bucket.last:,}"
        lines.append(f"{where:>22}{bucket.tokens:>12,}{bucket.loss:9.4f}{columns}")
    return "\n".join(lines)


def format_key_tokens(losses: KeyTokens, margin: float, ceiling: float) -> str:
    lines = [
        "tokens that need the context (LongPPL, arXiv 2410.23771): the loss falls by more than "
        f"{margin:g} nats from {losses.short_context:,} tokens of context to all of it, to less "
        f"than {ceiling:g}",
        f"{losses.key_tokens:,} of {losses.tokens:,} tokens past {losses.short_context:,}",
        f"all of these        {losses.long_of_all:8.4f} nats; "
        f"with the short context {losses.short_of_all:.4f}",
    ]
    if losses.long is not None:
        short = f"with the short context {losses.short:.4f}; LongPPL {losses.long_ppl:.3f}"
        lines.append(f"tokens that need it {losses.long:8.4f} nats; {short}")
    return "\n".join(lines)
