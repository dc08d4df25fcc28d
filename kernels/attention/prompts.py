"""Prompts that several answers share: [prompt | answer 1 | ... | answer G] in a row, each token
computed once.

Answers are documents that go on from their prompt: their positions count from the prompt's first
token, and they see the prompt and themselves. The prompt's last token predicts the first token of
each answer, so each answer begins with it: the rows [a b c | d e] and [a b c | f] become [a b | c d
e | c f].

Attention to everything merges two results by their log-sum-exps: of an answer by itself, and of a
call in which all answers of a prompt see all of its tokens. Backward makes both calls with the
merged output and log-sum-exp, and adds up their gradients. Other kinds of attention get `Copies`:
before each answer its prompt, or as much as the kind reaches. Kinds that choose blocks of keys may
see whole blocks of the prompt in place: then less than a block is copied.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..parts import AttentionKind, MixerKind
from .documents import TOGETHER_TOKENS, has_prompts, table_as_bytes
from .libraries import Kernel

_MERGED = 1024  # tokens that are merged at a time, in float32


class _Call(NamedTuple):
    """Prompts whose answers attend to them in one call. Tokens are counted through all rows."""

    prompts: list[slice]
    answers: list[slice]  # all answers of each prompt
    begins_k: Tensor  # where each prompt begins in the call, and their tokens, int32 on the device
    begins_q: Tensor  # the same of answers
    is_alone: bool


def _calls(q: Tensor, segments: Tensor, kernel: Kernel) -> list[_Call]:
    """Returns the calls for q [B, T, H, K]. A prompt that is too long to attend together has its
    own call."""
    return _cached_calls(table_as_bytes(segments), q.shape[1], kernel.longest_together, q.device)


@functools.lru_cache(maxsize=4)
def _cached_calls(
    documents: bytes, T: int, longest_together: float, device: torch.device
) -> list[_Call]:
    groups: dict[int, tuple[slice, slice]] = {}  # prompt and answers, by the prompt's first token
    for row, _, stop, start, end in (
        torch.frombuffer(bytearray(documents), dtype=torch.long).view(-1, 5).tolist()
    ):
        if end:
            start, end, stop = (row * T + token for token in (start, end, stop))
            groups[start] = slice(start, end), slice(end, stop)
    parts: list[list[tuple[slice, slice]]] = []
    room = 0  # tokens that the last call can still take
    for group in groups.values():
        tokens, is_alone = group[1].stop - group[0].start, _length(group[0]) > longest_together
        if is_alone or tokens > room:
            parts.append([])
            room = TOGETHER_TOKENS
        parts[-1].append(group)
        room = 0 if is_alone else room - tokens
    calls = []
    for part in parts:
        prompts, answers = [prompt for prompt, _ in part], [answers for _, answers in part]
        begins = [[0, *itertools.accumulate(map(_length, slices))] for slices in (prompts, answers)]
        begins_k, begins_q = torch.tensor(begins, dtype=torch.int32).to(device, non_blocking=True)
        calls.append(
            _Call(prompts, answers, begins_k, begins_q, _length(prompts[0]) > longest_together)
        )
    return calls


def _length(tokens: slice) -> int:
    return tokens.stop - tokens.start


def _joined(x: Tensor, parts: list[slice]) -> Tensor:
    return x[parts[0]] if len(parts) == 1 else torch.cat([x[part] for part in parts])


def _with_rows(joined: Tensor, parts: list[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Yields each part and its rows in what `_joined` made."""
    return zip(parts, joined.split([*map(_length, parts)]))


def attend_to_prompts(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor, kernel: Kernel
) -> None:
    """Merges what answers see of their prompts into out [B, T, H, K] and lse [B, T, H], which have
    the rest."""
    calls = _calls(q, segments, kernel)
    q, k, v, out, lse = (x.flatten(0, 1) for x in (q, k, v, out, lse))
    for prompts, answers, begins_k, begins_q, is_alone in calls:
        own = _joined(q, answers), _joined(k, prompts), _joined(v, prompts)
        if is_alone:
            out_n, lse_n = (x[0] for x in kernel.forward(*(x[None] for x in own), causal=False))
        else:
            keys = begins_k, max(map(_length, prompts))
            out_n, lse_n = kernel.forward_together(
                *own, begins_q, max(map(_length, answers)), keys=keys
            )
        for (tokens, of_out), (_, of_lse) in zip(
            _with_rows(out_n, answers), _with_rows(lse_n.T, answers)
        ):
            places = zip(*(x.split(_MERGED) for x in (out[tokens], lse[tokens], of_out, of_lse)))
            for place, place_lse, more, more_lse in places:
                total = torch.logaddexp(place_lse, more_lse)
                before, share = ((x - total).exp()[..., None] for x in (place_lse, more_lse))
                place.copy_(before * place + share * more)
                place_lse.copy_(total)
        del own, out_n, lse_n, of_out, of_lse  # before the next call's are made


def add_gradients_of_prompts(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    gradients: Sequence[Tensor],
    segments: Tensor, kernel: Kernel,
) -> None:  # fmt: skip
    """Adds to dq, dk and dv of documents by themselves what answers see of their prompts."""
    calls = _calls(q, segments, kernel)
    dout, q, k, v, out, lse = (x.flatten(0, 1) for x in (dout, q, k, v, out, lse))
    totals = [x.flatten(0, 1) for x in gradients]
    for prompts, answers, begins_k, begins_q, is_alone in calls:
        parts = answers, answers, prompts, prompts, answers
        own = [_joined(x, slices) for x, slices in zip((dout, q, k, v, out), parts)]
        lse_n = _joined(lse, answers).T.contiguous()
        if is_alone:
            made = [
                x[0] for x in kernel.backward(*(x[None] for x in own), lse_n[None], causal=False)
            ]
        else:
            keys = begins_k, max(map(_length, prompts))
            made = kernel.backward_together(
                *own, lse_n, begins_q, max(map(_length, answers)), keys=keys
            )
        for total, gradient, slices in zip(totals, made, (answers, prompts, prompts)):
            for tokens, rows in _with_rows(gradient, slices):
                total[tokens] += rows
        del own, made, gradient, rows  # before the next call's are made


class Copies(NamedTuple):
    """Documents with copies of the last tokens of their prompts before them, all in one row;
    answers come last."""

    rows: (
        Tensor  # [N] the token of each place, counted through all rows of the batch, on the device
    )
    # int64 [S, 3], the documents with their copies; [S, 5] if answers see what is not copied
    segments: Tensor
    places: Tensor  # [B T] the place of each token, its copies' aside, on the device
    copies: list[tuple[slice, slice]]  # tokens, and the places of their copies
    num_before: int  # places before the answers
    # the number, among the documents before the answers, of each answer's prompt; on the device
    prompts: Tensor

    def expand(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, N, ...]"""
        return x.flatten(0, 1).index_select(0, self.rows)[None]

    def drop(self, y: Tensor, like: Tensor) -> Tensor:
        """Returns rows of y [1, N, ...] without copies, as rows of `like` [B, T, ...]."""
        return y[0].index_select(0, self.places).unflatten(0, like.shape[:2])

    def add(self, y: Tensor, like: Tensor) -> Tensor:
        """Returns what `drop` returns, plus the copies, added up in float32 at least."""
        total = self.drop(y, like).flatten(0, 1)
        copies: dict[tuple[int, int], list[Tensor]] = {}
        for tokens, places in self.copies:
            copies.setdefault((tokens.start, tokens.stop), []).append(y[0, places])
        for (start, stop), parts in copies.items():
            own = total[start:stop]
            own.copy_(sum(parts, own.to(torch.promote_types(y.dtype, torch.float32))))
        return total.unflatten(0, like.shape[:2])

    def without_copies(self, y: Tensor) -> Tensor:
        """Sets copies in y [1, N, ...] to 0."""
        for _, places in self.copies:
            y[:, places] = 0
        return y


def copies_of(
    x: Tensor, segments: Tensor, copied: MixerKind | int, *, continue_prompts: bool = False
) -> Copies:
    """Returns the copies for x [B, T, ...]. All layers of a step share them.

    Args:
        copied: a kind whose method of this name says how many tokens of a prompt are copied, or the
        most tokens. continue_prompts: whether the first answer follows its prompt itself, not a
        copy.
    """
    return _cached_copies(
        table_as_bytes(segments), *x.shape[:2], copied, continue_prompts, x.device
    )


@functools.lru_cache(maxsize=16)
def _cached_copies(
    documents: bytes,
    B: int,
    T: int,
    copied: MixerKind | int,
    continue_prompts: bool,
    device: torch.device,
) -> Copies:
    table = torch.frombuffer(bytearray(documents), dtype=torch.long).view(-1, 5).tolist()
    answers = [(row * T + start, row * T + stop, row * T + first, row * T + end)
               for row, start, stop, first, end in table if end]  # fmt: skip
    before = [(row * T + start, row * T + stop) for row, start, stop, _, end in table if not end]
    if continue_prompts:
        continued = {(first, end) for _, _, first, end in answers}
        before = [document for document in before if document not in continued]
    parts, stops, copies = [torch.arange(*document) for document in before], [], []
    prompt_places, seen = (
        dict[int, int](),
        [(0, 0)] * len(before),
    )  # places of prompts, and of what is seen of them
    stops = [*itertools.accumulate(stop - start for start, stop in before)]
    num_before = stops[-1] if stops else 0
    for start, stop, first, end in answers:
        place = stops[-1] if stops else 0
        prompt = end - first
        if continue_prompts and start == end:
            tail = prompt
            prompt_places[first] = place
        else:
            tail = min(copied, prompt) if isinstance(copied, int) else copied.copied(prompt)
            copies.append((slice(end - tail, end), slice(place, place + tail)))
        sees = not isinstance(copied, int) and copied.sees_uncopied and tail < prompt
        seen.append(
            (prompt_places[first], prompt_places[first] + prompt - tail) if sees else (0, 0)
        )
        parts += [torch.arange(end - tail, end), torch.arange(start, stop)]
        stops.append(place + tail + stop - start)
    rows = torch.cat(parts)
    is_copy = torch.zeros(len(rows), dtype=torch.bool)
    for _, there in copies:
        is_copy[there] = True
    places = torch.empty(B * T, dtype=torch.long)
    places[rows[~is_copy]] = torch.arange(len(rows))[~is_copy]
    segments = torch.tensor([(0, *bounds, *own) for *bounds, own in zip([0, *stops], stops, seen)])
    segments = segments if any(map(any, seen)) else segments[:, :3]
    numbers = (
        [] if continue_prompts else [before.index((first, end)) for _, _, first, end in answers]
    )
    prompts = torch.tensor(numbers, dtype=torch.long)
    return Copies(
        rows.to(device), segments, places.to(device), copies, num_before, prompts.to(device)
    )


def copies_for(kind: AttentionKind, q: Tensor, segments: Tensor | None) -> Copies | None:
    """Returns the copies that `kind` needs of prompts; None if it needs none."""
    if not has_prompts(segments) or kind.reads_prompts:
        return None
    return copies_of(q, segments, kind, continue_prompts=True)


class Expand(torch.autograd.Function):
    """`Copies.expand`, differentiable; with `is_blank` copies are 0."""

    @staticmethod
    def forward(ctx, x, copies, is_blank=False):
        ctx.copies, ctx.is_blank, ctx.like = copies, is_blank, x.new_empty(()).expand(x.shape[:2])
        return copies.without_copies(copies.expand(x)) if is_blank else copies.expand(x)

    @staticmethod
    def backward(ctx, dy):
        return (ctx.copies.drop if ctx.is_blank else ctx.copies.add)(dy, ctx.like), None, None


class Drop(torch.autograd.Function):
    """`Copies.drop` to rows of T tokens, differentiable."""

    @staticmethod
    def forward(ctx, y, copies, like):
        ctx.copies = copies
        return copies.drop(y, like)

    @staticmethod
    def backward(ctx, dx):
        return ctx.copies.without_copies(ctx.copies.expand(dx)), None, None
