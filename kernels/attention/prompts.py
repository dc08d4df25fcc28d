"""Prompts that several answers share: [prompt | answer 1 | ... | answer G] in a row, each token
computed once.

Answers are documents that go on from their prompt: their positions count from the prompt's first
token, and they see the prompt and themselves. The prompt's last token predicts the first token of
each answer, so each answer begins with it: the rows [a b c | d e] and [a b c | f] become
[a b | c d e | c f].

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

from ..common import sum_dtype
from ..parts import AttentionKind, MixerKind
from .documents import TOGETHER_TOKENS, from_bytes, has_prompts, table_as_bytes
from .libraries import Kernel

_MERGED = 1024  # tokens that are merged at a time, in float32


class _Document(NamedTuple):
    """A document's first token and the one past its last, and its prompt's; `end` is 0 without a
    prompt. Tokens are counted through all rows."""

    start: int
    stop: int
    first: int
    end: int


def _read_documents(table: bytes, T: int) -> list[_Document]:
    """Returns the documents of `table_as_bytes`, in rows of T tokens."""
    documents = []
    for row, *tokens in from_bytes(table, 0, T, columns=5).tolist():
        has_prompt = tokens[3] > 0
        start, stop, first, end = (row * T + token for token in tokens)
        documents.append(_Document(start, stop, first * has_prompt, end * has_prompt))
    return documents


class _Call(NamedTuple):
    """Prompts whose answers attend to them in one call. Tokens are counted through all rows."""

    prompts: list[slice]
    answers: list[slice]  # all answers of each prompt
    begins_k: Tensor  # where each prompt begins in the call, and their tokens, int32 on the device
    begins_q: Tensor  # the same of answers
    is_alone: bool

    @property
    def lengths_q(self) -> tuple[Tensor, int]:
        """Starts of each prompt's answers, and the most tokens of one prompt's answers."""
        return self.begins_q, max(map(_length, self.answers))

    @property
    def keys(self) -> tuple[Tensor, int]:
        """Starts of prompts, and the tokens of the longest prompt."""
        return self.begins_k, max(map(_length, self.prompts))


def _calls(q: Tensor, segments: Tensor, kernel: Kernel) -> list[_Call]:
    """Returns the calls for q [B, T, H, K].

    A prompt that is too long to attend together has its own call.
    """
    return _cached_calls(table_as_bytes(segments), q.shape[1], kernel.longest_together, q.device)


@functools.lru_cache(maxsize=4)
def _cached_calls(
    documents: bytes, T: int, longest_together: float, device: torch.device
) -> list[_Call]:
    # prompt and all of its answers, by the prompt's first token
    groups: dict[int, tuple[slice, slice]] = {}
    for document in _read_documents(documents, T):
        if document.end:
            first, end = document.first, document.end
            groups[first] = slice(first, end), slice(end, document.stop)
    parts: list[list[tuple[slice, slice]]] = []
    left = 0  # tokens that the last call can still take
    for prompt, answers in groups.values():
        tokens, is_alone = answers.stop - prompt.start, _length(prompt) > longest_together
        if is_alone or tokens > left:
            parts.append([])
            left = TOGETHER_TOKENS
        parts[-1].append((prompt, answers))
        left = 0 if is_alone else left - tokens
    calls = []
    for part in parts:
        prompts, answers_of = [prompt for prompt, _ in part], [answers for _, answers in part]
        both = prompts, answers_of
        begins = [[0, *itertools.accumulate(map(_length, slices))] for slices in both]
        begins_k, begins_q = torch.tensor(begins, dtype=torch.int32).to(device, non_blocking=True)
        is_alone = _length(prompts[0]) > longest_together
        calls.append(_Call(prompts, answers_of, begins_k, begins_q, is_alone))
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
    for call in calls:
        out_n, lse_n = _attend(kernel, call, q, k, v)
        for (tokens, part), (_, part_lse) in zip(
            _with_rows(out_n, call.answers), _with_rows(lse_n.T, call.answers)
        ):
            _merge(out[tokens], lse[tokens], part, part_lse)
        del out_n, lse_n, part, part_lse  # before the next call's are made


def _attend(kernel: Kernel, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what the answers of a call see of their prompts: out [N, H, K] and lse [H, N]."""
    qkv = _joined(q, call.answers), _joined(k, call.prompts), _joined(v, call.prompts)
    if call.is_alone:
        out, lse = kernel.forward(*(x[None] for x in qkv), causal=False)
        return out[0], lse[0]
    return kernel.forward_together(*qkv, *call.lengths_q, keys=call.keys)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges a part of attention, [N, H, K] with log-sum-exps [N, H], into another, some tokens at
    a time."""
    tensors = (x.split(_MERGED) for x in (out, lse, part, part_lse))
    for out_n, lse_n, part_n, part_lse_n in zip(*tensors):
        total = torch.logaddexp(lse_n, part_lse_n)
        share, part_share = ((x - total).exp()[..., None] for x in (lse_n, part_lse_n))
        out_n.copy_(share * out_n + part_share * part_n)
        lse_n.copy_(total)


def add_gradients_of_prompts(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    gradients: Sequence[Tensor],
    segments: Tensor, kernel: Kernel,
) -> None:  # fmt: skip
    """Adds to dq, dk and dv of documents by themselves what answers see of their prompts."""
    calls = _calls(q, segments, kernel)
    dout, q, k, v, out, lse = (x.flatten(0, 1) for x in (dout, q, k, v, out, lse))
    totals = [x.flatten(0, 1) for x in gradients]
    for call in calls:
        parts = call.answers, call.answers, call.prompts, call.prompts, call.answers
        tensors = [_joined(x, slices) for x, slices in zip((dout, q, k, v, out), parts)]
        lse_n = _joined(lse, call.answers).T.contiguous()
        if call.is_alone:
            batched = kernel.backward(*(x[None] for x in tensors), lse_n[None], causal=False)
            added = [x[0] for x in batched]
            del batched
        else:
            added = kernel.backward_together(*tensors, lse_n, *call.lengths_q, keys=call.keys)
        for total, gradient, slices in zip(totals, added, parts[1:4]):
            for tokens, rows in _with_rows(gradient, slices):
                total[tokens] += rows
        del tensors, added, gradient, rows  # before the next call's are made


class Copies(NamedTuple):
    """Documents with copies of the last tokens of their prompts before them, all in one row;
    answers come last."""

    # [N] the token of each place, counted through all rows of the batch, on the device
    rows: Tensor
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
            tokens = total[start:stop]
            dtype = sum_dtype(y)
            tokens.copy_(sum(parts, tokens.to(dtype)))
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
            most tokens.
        continue_prompts: whether the first answer follows its prompt itself, not a copy.
    """
    return _cached_copies(
        table_as_bytes(segments), *x.shape[:2], copied, continue_prompts, x.device
    )


@functools.lru_cache(maxsize=16)
def _cached_copies(
    table: bytes,
    B: int,
    T: int,
    copied: MixerKind | int,
    continue_prompts: bool,
    device: torch.device,
) -> Copies:
    documents = _read_documents(table, T)
    answers = [document for document in documents if document.end]
    before = [document[:2] for document in documents if not document.end]
    if continue_prompts:
        prompts = {answer[2:] for answer in answers}
        before = [document for document in before if document not in prompts]
    tokens = [torch.arange(*document) for document in before]
    stops = [*itertools.accumulate(stop - start for start, stop in before)]
    num_before = stops[-1] if stops else 0
    seen = [(0, 0)] * len(before)  # places of what each document sees of its prompt
    prompt_places: dict[int, int] = {}
    copies: list[tuple[slice, slice]] = []
    for start, stop, first, end in answers:
        place, prompt = stops[-1] if stops else 0, end - first
        if continue_prompts and start == end:
            tail, sees = prompt, False
            prompt_places[first] = place
        else:
            tail, sees = _copied_tokens(copied, prompt)
            copies.append((slice(end - tail, end), slice(place, place + tail)))
        seen.append((0, 0))
        if sees:
            seen[-1] = prompt_places[first], prompt_places[first] + prompt - tail
        tokens += [torch.arange(end - tail, end), torch.arange(start, stop)]
        stops.append(place + tail + stop - start)
    rows = torch.cat(tokens)
    segments = torch.tensor([(0, *row) for row in zip([0, *stops], stops, *zip(*seen))])
    numbers: list[int] = []
    if not continue_prompts:
        numbers = [before.index(answer[2:]) for answer in answers]
    return Copies(
        rows.to(device),
        segments if any(map(any, seen)) else segments[:, :3],
        _places(rows, copies, B * T).to(device),
        copies,
        num_before,
        torch.tensor(numbers, dtype=torch.long).to(device),
    )


def _copied_tokens(copied: MixerKind | int, prompt: int) -> tuple[int, bool]:
    """Returns how many tokens of a prompt are copied, and whether its answers see the others in
    their place."""
    if isinstance(copied, int):
        return min(copied, prompt), False
    tail = copied.copied(prompt)
    return tail, copied.sees_uncopied and tail < prompt


def _places(rows: Tensor, copies: list[tuple[slice, slice]], num_tokens: int) -> Tensor:
    """Returns the place of each token, its copies' aside."""
    is_copy = torch.zeros(len(rows), dtype=torch.bool)
    for _, copy_places in copies:
        is_copy[copy_places] = True
    places = torch.empty(num_tokens, dtype=torch.long)
    places[rows[~is_copy]] = torch.arange(len(rows))[~is_copy]
    return places


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
