"""Causal attention of query heads that share key/value heads, within the documents of a packed
sequence.

    out[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K)) v[s],  s <= t and s in t's document

Libraries' kernels compute it, see libraries.py. Query head h reads key/value head
h // (H / G); keys and values are never repeated in memory. documents.py says which documents
attend together in one call.

Kept for backward, per token: q, k, v and out, (2H + 2G) K elements, and the float32 log-sum-exp, H
elements.

Method: Dao et al., FlashAttention, arXiv 2205.14135; grouped-query attention: Ainslie et al., arXiv
2305.13245.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import sum_dtype
from ..parts import AttentionBytes, AttentionFlops, AttentionKind, AttentionWork
from .documents import (
    LONGEST_TOGETHER,
    SPACING,
    Call,
    document_calls,
    has_prompts,
    is_rows,
    most_tokens_together,
    rounded_length,
)
from .libraries import KERNELS, Kernel
from .prompts import add_gradients_of_prompts, attend_to_prompts
from .reference import attend_written_out, within_documents

# Tokens. A document whose rounded length runs past the end of the batch is copied, to pad it. If
# that length is above this limit, one key/value head is copied at a time.
_LONGEST_COPIED = 32_768
_NEVER_ATTENDS = 1e30  # a log-sum-exp under which every probability is exactly 0
# backward's floating-point operations divided by forward's: five matrix products against two
BACKWARD_FLOPS = 2.5


def attention_reference(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, segments: Tensor | None = None
) -> Tensor:
    """Attention with the T x T matrix written out, in the inputs' dtype.

    Arguments are as in `attention`.
    """
    is_earlier, _ = within_documents(q_BTHK, segments)
    return attend_written_out(q_BTHK, k_BTGK, v_BTGK, is_earlier[:, None, None])[0]


def _rows(x: Tensor, T: int) -> Tensor:
    """Views whole rows, [n T, ...], as [n, T, ...]."""
    return x.unflatten(0, (-1, T))


def _window(x: Tensor, start: int, length: int) -> Tensor:
    """Returns x[start : start + length] as [1, length, heads, K], with zeros past x's end;
    causality hides the rest."""
    window = x[start : start + length]
    if len(window) < length:
        window = F.pad(window, (0, 0, 0, 0, 0, length - len(window)))
    return window[None]


def _padded_length(call: Call, kernel: Kernel, position_tokens: int) -> int:
    """Returns the positions that a document which attends alone is padded to."""
    step = max(1, kernel.length_step // position_tokens)
    return rounded_length(call.stop - call.start, step)


def _head_groups(
    call: Call, q: Tensor, k: Tensor, padded: int, position_tokens: int
) -> list[tuple[slice, slice]]:
    """Returns the query heads and the key/value heads of each call for a document that attends
    alone.

    All heads share a call, unless the document is copied, to pad it, and is long.
    """
    is_copied = call.start + padded > len(q) and padded * position_tokens > _LONGEST_COPIED
    count = k.shape[1] if is_copied else 1
    H, G = q.shape[1] // count, k.shape[1] // count
    return [(slice(i * H, (i + 1) * H), slice(i * G, (i + 1) * G)) for i in range(count)]


def put(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, place in zip(parts, places):
        place.copy_(part)


def full_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, backend: str,
    position_tokens: int = 1,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output [B, T, H, K] and the log-sum-exp [B, T, H] float32, computed by
    `KERNELS[backend]`.

    `into` are both, to be written to at the rows of the documents, which then need not cover all
    tokens. Each position stands for `position_tokens` tokens.
    """
    (B, T), kernel = q.shape[:2], KERNELS[backend]
    if segments is None:
        out, lse = kernel.forward(q, k, v)
        return out.contiguous(), lse.transpose(1, 2).contiguous()
    calls = document_calls(q, segments, kernel.longest_together, position_tokens)
    shape, (q, k, v) = q.shape, (x.flatten(0, 1) for x in (q, k, v))
    if into is None and len(calls) == 1 and calls[0].offsets is not None:
        # one call makes the whole result
        out, lse = kernel.forward_together(q, k, v, calls[0].offsets, calls[0].longest)
        return out.contiguous().view(shape), lse.T.contiguous().view(shape[:3])
    lse_dtype = sum_dtype(q)
    results = into or (q.new_empty(shape), q.new_empty(shape[:3], dtype=lse_dtype))
    out, lse = (x.view(B * T, *x.shape[2:]) for x in results)
    for call in calls:
        tokens = slice(call.start, call.stop)
        if call.offsets is not None:
            qkv = (x[tokens] for x in (q, k, v))
            out_n, lse_n = kernel.forward_together(*qkv, call.offsets, call.longest)
            put((out_n, lse_n.T), (out[tokens], lse[tokens]))
            del out_n, lse_n  # before the next call's are made
        elif is_rows(call, T):
            rows = (_rows(x[tokens], T) for x in (q, k, v))
            places = {"out": _rows(out[tokens], T), "lse": _rows(lse[tokens], T)}
            _forward_rows(kernel, *rows, **places)
        else:
            _forward_alone(kernel, call, q, k, v, (out[tokens], lse[tokens]), position_tokens)
    return results


def _forward_alone(
    kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor, places: tuple[Tensor, Tensor],
    position_tokens: int,
) -> None:  # fmt: skip
    """Writes out and lse of a document that attends alone to `places`; q, k and v [N, heads, K] are
    of all tokens."""
    out, lse = places
    padded = _padded_length(call, kernel, position_tokens)
    for heads, groups in _head_groups(call, q, k, padded, position_tokens):
        parts = q[:, heads], k[:, groups], v[:, groups]
        windows = (_window(x, call.start, padded) for x in parts)
        _forward_rows(kernel, *windows, out=out[None, :, heads], lse=lse[None, :, heads])


def _forward_rows(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
) -> None:
    """Writes out [B, T, H, K] and lse [B, T, H], for one document a row.

    q, k and v may have padding.
    """
    out_n, lse_n = kernel.forward(q, k, v)
    T = out.shape[1]
    put((out_n[:, :T], lse_n.transpose(1, 2)[:, :T]), (out, lse))


def full_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor | None, backend: str,
    position_tokens: int = 1, into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Returns dq, dk and dv from the results of `full_forward`.

    `into` has tensors for all three, as in `full_forward`.
    """
    (B, T), kernel = q.shape[:2], KERNELS[backend]
    dout = dout.contiguous()
    if segments is None:
        gradients = kernel.backward(dout, q, k, v, out, lse.transpose(1, 2).contiguous())
        return [x.contiguous() for x in gradients]
    calls = document_calls(q, segments, kernel.longest_together, position_tokens)
    shapes = q.shape, k.shape, v.shape
    tensors = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
    lse = lse.flatten(0, 1)
    if into is None and len(calls) == 1 and calls[0].offsets is not None:
        options = lse.T.contiguous(), calls[0].offsets, calls[0].longest
        gradients = kernel.backward_together(*tensors, *options)
        return [x.contiguous().view(shape) for x, shape in zip(gradients, shapes)]
    results = into or [q.new_empty(shape) for shape in shapes]
    places = [x.view(B * T, *x.shape[2:]) for x in results]
    for call in calls:
        tokens = slice(call.start, call.stop)
        if call.offsets is None and not is_rows(call, T):
            _backward_alone(kernel, call, tensors, lse, places, position_tokens)
            continue
        tensors_n, lse_n = [x[tokens] for x in tensors], lse[tokens]
        places_n = [x[tokens] for x in places]
        if call.offsets is not None:
            # No name holds the log-sum-exps' copy, so that it is freed before the next call's.
            bounds = call.offsets, call.longest
            put(kernel.backward_together(*tensors_n, lse_n.T.contiguous(), *bounds), places_n)
        else:
            rows, lse_n = [_rows(x, T) for x in tensors_n], _rows(lse_n, T).transpose(1, 2)
            put(kernel.backward(*rows, lse_n.contiguous()), [_rows(x, T) for x in places_n])
    return results


def _backward_alone(
    kernel: Kernel, call: Call, tensors: Sequence[Tensor], lse: Tensor, places: Sequence[Tensor],
    position_tokens: int,
) -> None:  # fmt: skip
    """Writes dq, dk and dv of a document that attends alone to `places`; `tensors` are dout, q, k,
    v and out of all tokens, [N, heads, K]."""
    dout, q, k, v, out = tensors
    tokens, length = slice(call.start, call.stop), call.stop - call.start
    padded = _padded_length(call, kernel, position_tokens)
    for heads, groups in _head_groups(call, q, k, padded, position_tokens):
        parts = q[:, heads], k[:, groups], v[:, groups], out[:, heads]
        windows = [_window(x, call.start, padded) for x in parts]
        # Rows of padding add nothing: their dout is 0, and their log-sum-exp makes all
        # probabilities 0.
        dout_n = _window(dout[tokens, heads], 0, padded)
        lse_n = F.pad(lse[tokens, heads].T, (0, padded - length), value=_NEVER_ATTENDS)
        gradients = kernel.backward(dout_n, *windows, lse_n.contiguous()[None])
        heads_of = heads, groups, groups
        put(
            [x[0, :length] for x in gradients],
            [x[tokens, own_heads] for x, own_heads in zip(places, heads_of)],
        )
        del windows, dout_n, lse_n, gradients  # before the next heads' are made


def check_shapes(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> None:
    """Raises ValueError for shapes that no kind of attention takes, and for segments on a GPU."""
    (B, T, H, K), G = q.shape, k.shape[2]
    if k.shape != (B, T, G, K) or v.shape != k.shape or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"attention needs q [B, T, H, K] and k, v [B, T, G, K] with H = n G, got {shapes}"
        )
    if segments is not None and segments.is_cuda:
        raise ValueError("segments must lie on the CPU: they decide what is launched")


@dataclass(frozen=True)
class Full(AttentionKind):
    """Attention to everything before a token and to the token itself."""

    name: ClassVar[str] = "full"
    reads_prompts: ClassVar[bool] = True
    h200_rates: ClassVar[dict[str, float]] = {
        "full forward": 570e12,
        "full backward": 535e12,
        # Calls per second: long packed documents attend alone,
        # and a call costs time on top of its FLOPs.
        "full calls forward": 12_000,
        "full calls backward": 5_000,
        "together forward": 570e12 * 0.58,
        "together backward": 535e12 * 0.58,
    }
    draws_full_power: ClassVar[bool] = True

    def describe(self, selected_blocks: str) -> str:
        return "everything before a token"

    def check(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, impl: str) -> bool:
        check_shapes(q, k, v, segments)
        K = q.shape[-1]
        if q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"attention on CUDA needs bfloat16 or float16, got {q.dtype}; cast q, k and v"
            )
        if q.is_cuda and (K > 256 or K % 8):
            raise ValueError(
                f"attention on CUDA needs a head_dim that is a multiple of 8 up to 256, got {K}"
            )
        return False

    def forward(self, q, k, v, segments, lists, backend, on_triton):
        out, lse = full_forward(q, k, v, segments, backend)
        if has_prompts(segments):
            attend_to_prompts(q, k, v, out, lse, segments, KERNELS[backend])
        return [out], [lse], None

    def backward(self, dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton):
        gradients = full_backward(dout, q, k, v, outs[0], lses[0], segments, backend)
        if has_prompts(segments):
            add_gradients_of_prompts(
                dout, q, k, v, outs[0], lses[0], gradients, segments, KERNELS[backend]
            )
        return gradients

    def decode(self, q, k, v, gates):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def footprint(
        self, T, H, G, K, *, element_size=2, backend="auto", context_length=None, longest=None
    ):
        q_bytes, k_bytes = H * K * element_size, G * K * element_size
        row = context_length or T
        backward = backward_workspace(
            backend, T, q_bytes, k_bytes, row, longest, num_key_value_heads=G
        )
        # a call's output, before it is copied to the output of all documents
        call_bytes = 0 if longest is None else T * q_bytes
        return AttentionBytes(q_bytes + 4 * H, 0, call_bytes, backward)

    def flops(self, length, H, G, K):
        forward = attention_flops(H, K, length * (length + 1) / 2)
        return AttentionFlops(forward, 0, BACKWARD_FLOPS * forward)

    def prompt_flops(self, prompt, answers, tokens, H, G, K):
        forward = attention_flops(H, K, prompt * tokens)
        return AttentionFlops(forward, 0, BACKWARD_FLOPS * forward)

    def work(self, lengths, H, G, K, *, backend, steps, is_packed=True, prompts=()):
        longest = (
            KERNELS["cudnn" if backend == "auto" else backend].longest_together if is_packed else 0
        )
        alone = [pair for pair in lengths if pair[0] > longest]
        together = [pair for pair in lengths if pair[0] <= longest]
        flops = attention_flops(H, K, sum(count * n * (n + 1) / 2 for n, count in alone))
        pairs = sum(count * together_pairs(n * (n + 1) / 2, n) for n, count in together)
        amounts = {"full": flops, "together": attention_flops(H, K, pairs)}
        for prompt, _, tokens, count in prompts:
            amounts["full" if prompt > longest else "together"] += attention_flops(
                H, K, count * prompt * tokens
            )
        calls = steps * sum(count for _, count in alone) if is_packed else 0
        return AttentionWork(
            {**{f"{name} forward": n for name, n in amounts.items()}, "full calls forward": calls},
            {},
            {
                **{f"{name} backward": BACKWARD_FLOPS * n for name, n in amounts.items()},
                "full calls backward": calls,
            },
        )

    def rates_with(self, backend, native, head_dim):
        alone = 1 if native == "flash" else _HOPPER_RATES[backend]
        # FlashAttention-2 attends to short packed documents where cuDNN attends to long ones.
        together = _HOPPER_RATES["flash"] if native == backend == "cudnn" else alone
        rates = {
            name: rate * (1 if "calls" in name else alone) for name, rate in self.h200_rates.items()
        }
        rates |= {f"together {part}": together * self.h200_rates[f"full {part}"] for part in _PARTS}
        wide = dict(zip(_PARTS, _WIDE_RATES[backend] if head_dim > 128 else (1, 1)))
        return {
            name: rate * (1 if "calls" in name else wide[name.split()[-1]])
            for name, rate in rates.items()
        }

    def measure_rates(self, H, G, K, context_length, backend, seconds, device):
        """Measures one document of 16,384 tokens, and packed documents that attend together and
        alone.

        Past 131,072 tokens forward gets slower: the one document then has the context's length,
        524,288 tokens at most, and one key/value head.
        """
        group, T, groups = H // G, 16_384, G
        if context_length > 131_072:
            T, groups = min(context_length, 524_288), 1
        rates = self.rates_at(T, group * groups, groups, K, backend, seconds, device)

        def packed(count: int, length: int) -> dict[str, float]:
            segments = torch.tensor([[0, i * length, (i + 1) * length] for i in range(count)])
            return dict(
                zip(_PARTS, self.time(count * length, H, G, K, backend, seconds, device, segments))
            )

        count, length = 64, 512
        together = packed(count, length)
        forward = attention_flops(H, K, count * together_pairs(length * (length + 1) / 2, length))
        rates["together forward"] = forward / together["forward"]
        rates["together backward"] = BACKWARD_FLOPS * forward / together["backward"]
        if KERNELS[backend].longest_together == math.inf:  # no document attends alone
            return rates | {
                f"full calls {part}": self.h200_rates[f"full calls {part}"] for part in _PARTS
            }
        count, length = 12, LONGEST_TOGETHER + 256  # just long enough to attend alone
        flops, alone = self.flops(length, H, G, K), packed(count, length)
        for part in _PARTS:
            left = alone[part] - count * getattr(flops, part) / rates[f"full {part}"]
            rates[f"full calls {part}"] = count / max(left, 1e-9)
        return rates


FULL = Full()
_PARTS = "forward", "backward"
# Measured on an H200: the rate of each attention kernel divided by cuDNN's. FlashAttention-2 does
# not use Hopper's new instructions. On an A100, for which it was written, it reaches the share of
# peak that cuDNN reaches on Hopper (Dao, arXiv 2307.08691).
_HOPPER_RATES = {"cudnn": 1.0, "flash": 0.58, "flash-attn-4": 1.14}
# The rates of forward and backward with heads of 256, divided by the rates with heads of 128, on an
# H100 and an H200. flash-attn-4's were not measured: they are as cuDNN's.
_WIDE_RATES = {"cudnn": (1.0, 0.71), "flash": (0.8, 0.86), "flash-attn-4": (0.88, 0.62)}


def together_pairs(pairs: float, tokens: float) -> float:
    """Returns the pairs of query and key to count for documents that attend together and have
    `pairs` of their own.

    Memory traffic and partly filled tiles cost as much as 360 more keys per token. Measured:
    forward and backward of 131,072 tokens in FlashAttention-2 take 8.6 ms in documents of 128, and
    498 ms in documents of up to 65,536 (32 query and 8 key/value heads of 128, one H200).
    """
    return pairs + 360 * tokens


def attention_flops(num_heads: int, head_dim: int, num_pairs: float) -> float:
    """Returns forward's floating-point operations for `num_pairs` pairs of a query and a key that
    the query sees."""
    return 4 * num_heads * head_dim * num_pairs


def backward_workspace(
    backend: str, num_tokens: int, q_bytes: int, k_bytes: int, context_length: int,
    longest: int | None,
    position_tokens: int = 1, num_key_value_heads: int = 1,
) -> int:  # fmt: skip
    """Returns the bytes that backward of all rows takes besides its arguments and results.

    Packed rows run one call after another, each with its own results. All rows but the one with
    several documents may share a call. A document that attends alone also has a padded copy of dout
    and, at the end of the batch, of q, k, v and out. `q_bytes` and `k_bytes` are of one token, a
    row has `context_length` tokens, and `longest` are the longest packed document's; None: each row
    is one document. If a position stands for `position_tokens`, all numbers count positions.
    `num_key_value_heads` attend at a time.
    """
    kernel = KERNELS["cudnn" if backend == "auto" else backend]
    spared = kernel.expanded_rows if q_bytes == k_bytes else 0
    row = (kernel.workspace_rows - spared) * q_bytes
    at_once = row * num_tokens if longest is None or longest >= context_length else 0
    if longest is None:
        return at_once
    longest_together = min(longest, kernel.longest_together / position_tokens)
    counted = max(
        most_tokens_together(num_tokens, position_tokens), int(longest_together) + SPACING
    )
    tokens = min(num_tokens, counted)
    together = (
        tokens * ((kernel.rows_together - spared + 1) * q_bytes + 2 * k_bytes)
        + (counted - tokens) * 2 * q_bytes
    )
    alone = 0
    if longest > longest_together:
        padded = rounded_length(longest, max(1, kernel.length_step // position_tokens))
        copies = 4 if padded * position_tokens <= _LONGEST_COPIED or num_key_value_heads == 1 else 2
        alone = (row + copies * (q_bytes + k_bytes)) * padded
        # else positions of all rows are in one row
        if longest >= context_length and position_tokens == 1:
            alone = max(alone, (row + q_bytes + 2 * k_bytes) * (num_tokens - context_length))
    return max(at_once, together, alone)
