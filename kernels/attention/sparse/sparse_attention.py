"""Block-sparse causal attention without new parameters: first block, window and chosen blocks share
one softmax.

    out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s],  s <= t, in t's document, in t's blocks

../README.md has the mathematics and the order of work. A document that is shorter than
`dense_below` attends to everything, by full.py. A slot holds a token's attention to one chosen
block. Slots are the largest buffers, so work goes by ranges of key/value heads and tokens whose
slots fit `workspace_bytes`.

Kept for backward, per token: q, k, v and out, (2H + 2G) K elements; the float32 log-sum-exp, H; and
the lists of blocks, G * selected int16. The choice carries no gradient, and backward never chooses
again.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
from torch import Tensor

from ...common import sum_dtype, use_triton
from ...parts import AttentionBytes, AttentionFlops, AttentionKind, AttentionWork, sum_to
from ..documents import Span, as_bytes, from_bytes, has_prompts, split_by_length, table_as_bytes
from ..full import FULL, check_shapes, full_backward, full_forward, put
from ..reference import attend_written_out, backward_written_out, within_documents
from .band import band_dkv, band_dkv_extra, band_dq, band_forward
from .combine import add_partials, combine
from .common import TileConfig
from .decode import attend_to_cache
from .gather import (
    BACKWARD_CONFIG,
    backward_config,
    forward_config,
    gather_backward,
    gather_forward,
    item_tokens,
)
from .inverse_index import SORT_BYTES, build_inverse_index
from .layout import EMPTY, LONGEST_DOCUMENT, Layout, build_layout, make_layout, normalise_lists
from .selection import (
    EARLY,
    LATE,
    WAVE,
    blocks_at_a_time,
    choose_blocks,
    look_from,
    queries_per_token,
    query_bytes,
    ranges,
    round_keys,
    score_blocks,
    score_columns,
    scores_reference,
    scoring_dtype,
    top_blocks_reference,
)

BLOCK_SIZES, HEAD_DIMS, LARGEST_GROUP = (32, 64), (64, 128), 16
WIDE_HEAD_DIMS, WIDE_SHARED_MEMORY = (*HEAD_DIMS, 256), 160 * 1024
# heads of 256, an H100
WIDE_RATES = {"sparse forward": 127e12, "sparse choice": 829e12, "sparse backward": 163e12}
# holds half of one key/value head's slots at 131,072 tokens, 32 blocks: 2.03 GiB
WORKSPACE_BYTES = 9 * 2**28
# limit on scores that exist at a time: no more than the slots after them
SCORES_BYTES = WORKSPACE_BYTES


def visible_keys(
    q: Tensor, blocks_BTGS: Tensor, segments: Tensor | None, block_size: int, window: int
) -> Tensor:
    """Returns which keys a query sees, [B, G, 1, T, T]."""
    (B, T), G = q.shape[:2], blocks_BTGS.shape[2]
    is_earlier, index_BT = within_documents(q, segments)
    block_BT = index_BT // block_size
    in_band = (block_BT[:, None, :] == 0) | (
        block_BT[:, None, :] > block_BT[:, :, None] - window // block_size
    )
    # blocks of the longest document; EMPTY goes to one column more
    num_blocks = int(block_BT.max()) + 1
    chosen = torch.zeros(B, T, G, num_blocks + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter_(-1, blocks_BTGS.long().clamp(max=num_blocks), True)[..., :num_blocks]
    in_lists = chosen.gather(-1, block_BT[:, None, None, :].expand(B, T, G, T))
    in_lists = in_lists.permute(0, 2, 1, 3)  # [B, G, T, T]
    return (is_earlier[:, None] & (in_band[:, None] | in_lists))[:, :, None]


def range_sizes(T: int, G: int, token_bytes: int, workspace_bytes: int) -> tuple[int, int]:
    """Returns the most tokens and key/value heads whose slots, `token_bytes` per token and head,
    fit together."""
    tokens = min(T, max(64, workspace_bytes // token_bytes))
    return tokens, max(1, min(G, workspace_bytes // token_bytes // T))


def work_ranges(
    layout: Layout, q: Tensor, G: int, selected: int, workspace_bytes: int
) -> list[tuple[range, list[range]]]:
    """Returns ranges of key/value heads, and for each its ranges of tokens, see `range_sizes`."""
    if selected == 0 or not layout.has_candidates:
        return [(range(G), [])]
    token_bytes = slot_bytes_per_token(q.shape[1] // G, q.shape[2], selected, q.element_size())
    tokens, heads = range_sizes(layout.num_tokens, G, token_bytes, workspace_bytes)
    return [(some, ranges(layout.num_tokens, tokens)) for some in ranges(G, heads)]


def sparse_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, layout: Layout, workspace_bytes: int,
    config: TileConfig | None = None, *, into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [tokens, H, K], k and v [tokens, G, K], blocks [tokens, G, S] -> out, lse [tokens, H]
    float32, or `into`."""
    (_, H, K), G, S = q.shape, k.shape[1], blocks.shape[-1]
    config = config or forward_config(q)
    out, lse = band_forward(q, k, v, layout, into=into)
    for heads, token_ranges in work_ranges(layout, q, G, S, workspace_bytes):
        indices = build_inverse_index(
            blocks, layout, heads, token_ranges, item_tokens(config, q, k, layout.block_size)
        )
        for tokens, index in zip(token_ranges, indices):
            slots = q.new_empty(len(heads), len(tokens), S, H // G, K)
            slot_lse = lse.new_empty(slots.shape[:-1])
            gather_forward(q, k, v, slots, slot_lse, index, layout, heads, tokens, config)
            combine(out, slots, blocks, heads, tokens, lse, slot_lse)
            del slots, slot_lse  # frees them before the next range allocates its buffers
        del indices  # frees them before the next heads' are built
    return out, lse


def sparse_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Tensor,
    layout: Layout,
    workspace_bytes: int, config: TileConfig | None = None, *,
    add_to: Sequence[Tensor] | None = None,
    into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Returns dq [N, H, K], dk and dv [N, G, K].

    Adds to `add_to`, or writes to `into`, or allocates. Gradients of keys and
    values are summed in float32 over all ranges of tokens.
    """
    (N, H, K), G = q.shape, k.shape[1]
    config = config or backward_config(q)
    dq, dk, dv = add_to or into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    delta = band_dq(dout, q, k, v, out, lse, dq, layout, add=add_to is not None)
    for heads, token_ranges in work_ranges(layout, q, G, blocks.shape[-1], workspace_bytes):
        total = torch.zeros(2, len(heads), N, K, dtype=torch.float32, device=q.device)
        if add_to is not None:
            for sums, gradient in zip(total, (dk, dv)):
                sums.copy_(gradient[:, heads.start : heads.stop].transpose(0, 1))
        indices = build_inverse_index(
            blocks, layout, heads, token_ranges, item_tokens(config, q, k, layout.block_size)
        )
        for tokens, index in zip(token_ranges, indices):
            slots = q.new_empty(len(heads), len(tokens), blocks.shape[-1], H // G, K)
            partial = gather_backward(
                dout, q, k, v, lse, delta, slots, index, layout, heads, tokens, config
            )
            combine(dq, slots, blocks, heads, tokens)
            add_partials(total, partial, index.first_item, layout)
            del slots, partial  # frees them before the next range allocates its buffers
        del indices
        if len(layout.extra_block):
            add_partials(total, *band_dkv_extra(dout, q, k, v, lse, delta, layout, heads), layout)
        band_dkv(dout, q, k, v, lse, delta, total, dk, dv, layout, heads)
    return dq, dk, dv


def flat(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...], contiguous."""
    return x.contiguous().flatten(0, 1)


@functools.lru_cache(maxsize=4)
def _divide_batch(
    B: int, T: int, documents: bytes | None, columns: int, device: torch.device, kind: "Sparse"
) -> tuple[Tensor | None, list[tuple[Span, Layout]]]:
    """Returns segments that attend to everything, if any, and spans of others with their tables,
    which layers share."""
    short, spans = split_by_length(from_bytes(documents, B, T, columns), T, kind.dense_below)
    sizes, layouts = (device, kind.block_size, kind.window), []
    for span in spans:
        prompts = span.segments[:, 3:] if has_prompts(span.segments) else None
        documents, tokens = as_bytes(span.segments), span.stop - span.start
        layouts.append(build_layout(1, tokens, documents, *sizes, prompts))
    return short if len(short) else None, [*zip(spans, layouts)]


@dataclass(frozen=True)
class Sparse(AttentionKind):
    """Attention to a document's first block, a window, and chosen blocks.

    Raises ValueError for negative numbers.
    """

    selected_blocks: int = 32  # the most that a token chooses
    block_size: int = 64  # tokens per block of keys: 32 or 64
    window: int = 512  # tokens, a multiple of block_size
    # tokens; a shorter document attends to everything, whatever it is packed with
    dense_below: int = 8192
    # slots at a time; with fewer bytes, launches are more and smaller
    workspace_bytes: int = WORKSPACE_BYTES
    name: ClassVar[str] = "sparse"
    gpu_head_dims: ClassVar[tuple[int, ...]] = WIDE_HEAD_DIMS
    takes: ClassVar[tuple[str, ...]] = ("selected_blocks", "dense_below")
    sees_uncopied: ClassVar[bool] = True
    h200_rates: ClassVar[dict[str, float]] = {
        "sparse forward": 144e12,
        "sparse choice": 696e12,
        "sparse backward": 235e12,
    }

    def __post_init__(self):
        if self.selected_blocks < 0 or self.dense_below < 0:
            numbers = f"{self.selected_blocks} and {self.dense_below}"
            raise ValueError(f"selected_blocks and dense_below must not be negative, got {numbers}")
        super().__post_init__()

    @property
    def longest_document(self) -> int:
        return LONGEST_DOCUMENT * self.block_size

    def describe(self, selected_blocks: str) -> str:
        window = f"a window of {self.window}; all below {self.dense_below} tokens"
        return f"{selected_blocks} chosen blocks of {self.block_size}, {window}"

    def check(self, q, k, v, segments, impl):
        if self.dense_below:
            FULL.check(q, k, v, segments, impl)
        return check_inputs(q, k, v, segments, self.block_size, self.window, impl, WIDE_HEAD_DIMS)

    def normalise_lists(self, lists, q, segments):
        return normalise_lists(lists, make_layout(q, segments, self.block_size, self.window))

    def copied(self, prompt):
        """Returns the tokens after the last whole block; all if answers may see everything."""
        return prompt if prompt < self.dense_below else prompt % self.block_size

    def for_longest(self, longest):
        return FULL if longest < self.dense_below else self

    def _divide(
        self, q: Tensor, segments: Tensor | None
    ) -> tuple[Tensor | None, list[tuple[Span, Layout]]]:
        table, columns = (
            (None, 3) if segments is None else (table_as_bytes(segments), segments.shape[1])
        )
        return _divide_batch(*q.shape[:2], table, columns, q.device, self)

    def choose(self, q: Tensor, k: Tensor, segments: Tensor | None, on_triton: bool) -> Tensor:
        """Returns the blocks of keys that each token and key/value head attends to, beyond first
        block and window.

        They are int16 [B, T, G, selected_blocks]: indices within the document, ascending, then
        `EMPTY` (32767). In documents below `dense_below` all are EMPTY.
        """
        lists = torch.full(
            (*k.shape[:3], self.selected_blocks), EMPTY, dtype=torch.int16, device=q.device
        )
        tensors = flat(q), flat(k), lists.flatten(0, 1)
        for span, layout in self._divide(q, segments)[1]:
            q_n, k_n, chosen = (x[span.start : span.stop] for x in tensors)
            if not on_triton:
                chosen.copy_(
                    top_blocks_reference(scores_reference(q_n, k_n, layout), self.selected_blocks)
                )
            elif self.selected_blocks and layout.has_candidates:
                keys = functools.cache(functools.partial(round_keys, k_n, layout, scoring_dtype(q)))
                choose_blocks(
                    functools.partial(score_blocks, q_n, keys, layout),
                    layout,
                    chosen,
                    SCORES_BYTES,
                    WAVE,
                )
        return lists

    def forward(self, q, k, v, segments, lists, backend, on_triton):
        short, long = self._divide(q, segments)
        if lists is None:
            lists = self.choose(q, k, segments, on_triton)
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=sum_dtype(q))
        if short is not None:
            full_forward(q, k, v, short, backend, into=(out, lse))
        tensors = [flat(x) for x in (q, k, v, lists, out, lse)]
        for span, layout in long:
            q_n, k_n, v_n, lists_n, *into = (x[span.start : span.stop] for x in tensors)
            if on_triton:
                sparse_forward(q_n, k_n, v_n, lists_n, layout, self.workspace_bytes, into=into)
            else:
                visible = visible_keys(
                    q_n[None], lists_n[None], span.segments, self.block_size, self.window
                )
                put(
                    [x[0] for x in attend_written_out(q_n[None], k_n[None], v_n[None], visible)],
                    into,
                )
        return [out], [lse], lists

    def backward(self, dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton):
        short, long = self._divide(q, segments)
        gradients = [x.new_empty(x.shape) for x in (q, k, v)]
        if short is not None:
            full_backward(dout, q, k, v, outs[0], lses[0], short, backend, into=gradients)
        tensors = [flat(x) for x in (dout, q, k, v, outs[0], lses[0], lists, *gradients)]
        for span, layout in long:
            dout, q, k, v, out, lse, lists, *into = (x[span.start : span.stop] for x in tensors)
            if on_triton:
                sparse_backward(
                    dout, q, k, v, out, lse, lists, layout, self.workspace_bytes, into=into
                )
            else:
                dout, q, k, v, lists = (x[None] for x in (dout, q, k, v, lists))
                visible = visible_keys(q, lists, span.segments, self.block_size, self.window)
                put([x[0] for x in backward_written_out(dout, q, k, v, visible)], into)
        return gradients

    def decode(self, q, k, v, gates):
        return attend_to_cache(q, k, v, self)

    def footprint(
        self, T, H, G, K, *, element_size=2, backend="auto", context_length=None, longest=None
    ):
        """Counts the T tokens as one long document. If documents are packed, it takes the maximum
        with short ones."""
        options = {"element_size": element_size, "backend": backend}
        options |= {"context_length": context_length}
        if longest is not None:
            options |= {"longest": min(longest, self.dense_below - 1)}
        full = FULL.footprint(T, H, G, K, **options)
        if (longest or context_length or T) < self.dense_below:
            return full
        forward, backward = sparse_workspace(T, H, G, K, self, element_size)
        # Output and log-sum-exp do not exist yet while blocks are chosen.
        forward = max(forward, choice_bytes(T, G, K, self, element_size) - T * full.results)
        if longest is not None:
            forward, backward = max(forward, full.forward), max(backward, full.backward)
        return AttentionBytes(full.results, 2 * G * self.selected_blocks, forward, backward)

    def flops(self, length, H, G, K):
        if length < self.dense_below:
            return FULL.flops(length, H, G, K)
        return sparse_flops(length, H, G, K, self)

    def work(self, lengths, H, G, K, *, backend, steps, is_packed=True, prompts=()):
        lengths = self.with_copies(lengths, prompts)
        short = [pair for pair in lengths if pair[0] < self.dense_below]
        long = [pair for pair in lengths if pair[0] >= self.dense_below]
        options = {"backend": backend, "steps": steps, "is_packed": is_packed}
        full, chosen = FULL.work(short, H, G, K, **options), super().work(long, H, G, K, **options)
        return AttentionWork(*(amounts | chosen[i] for i, amounts in enumerate(full)))

    def rates_with(self, backend, native, head_dim):
        chosen = WIDE_RATES if head_dim > max(HEAD_DIMS) else self.h200_rates
        return FULL.rates_with(backend, native, head_dim) | chosen

    def measure_rates(self, H, G, K, context_length, backend, seconds, device):
        """Measures attention at 65,536 tokens, the choice at the context's length, and both past
        131,072 tokens."""
        rates = FULL.measure_rates(H, G, K, context_length, backend, seconds, device)
        sparse = dataclasses.replace(self, dense_below=0)
        length = tokens = max(16_384, min(context_length, 1_048_576))
        if length <= 131_072:
            length = 65_536
        else:
            H, G = H // G, 1
        rates |= sparse.rates_at(length, H, G, K, backend, seconds, device)
        choice = max(1, sparse.flops(tokens, H, G, K).choice)  # 0 where none is chosen
        q, k = (torch.randn(1, tokens, n, K, device=device, dtype=torch.bfloat16) for n in (H, G))
        return rates | {"sparse choice": choice / seconds(lambda: sparse.choose(q, k, None, True))}


def check_inputs(q, k, v, segments, block_size, window, impl, head_dims=HEAD_DIMS) -> bool:
    """Returns whether Triton's kernels run, see `use_triton`.

    Raises ValueError for unsupported inputs.
    """
    check_shapes(q, k, v, segments)
    (_, _, H, K), G = q.shape, k.shape[2]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if window < block_size or window % block_size:
        raise ValueError(
            f"window must be a multiple of block_size, {block_size}, and not 0, got {window}"
        )
    if not use_triton(impl, q):
        return False
    if (
        q.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or not q.dtype == k.dtype == v.dtype
    ):
        raise ValueError(
            "sparse attention's kernels take q, k and v of one dtype, float32, bfloat16 or "
            "float16, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not q.is_meta and (K not in head_dims or H // G > LARGEST_GROUP):
        raise ValueError(
            f"sparse attention's kernels take a head_dim of {head_dims} and up to {LARGEST_GROUP} "
            "query heads a "
            f"key/value head, got {K} and {H // G}"
        )
    if q.is_cuda and K > 128:
        shared_memory = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
        if q.element_size() > 2 or shared_memory < WIDE_SHARED_MEMORY:
            raise ValueError(
                f"sparse attention's kernels for a head_dim of {K} take bfloat16 or float16, and "
                f"{WIDE_SHARED_MEMORY:,} bytes of shared memory, as an A100, H100, H200 or B200 "
                f"has; got {q.dtype} and "
                f"{shared_memory:,} bytes on {torch.cuda.get_device_name(q.device)}; use full"
            )
    return True


def slot_bytes_per_token(group: int, K: int, selected: int, element_size: int) -> int:
    """Returns the bytes of a token's slots in one key/value head, with log-sum-exps."""
    return selected * group * (K * element_size + 4)


def scores_bytes(
    num_blocks: int,
    block_size: int,
    window_blocks: int,
    G: int,
    selected: int,
    workspace_bytes: int,
    wave: int = 1,
) -> int:
    """Returns the bytes of scores that exist at a time.

    The last two arguments are as in `blocks_at_a_time`.
    """
    block_bytes = (
        block_size * G * query_bytes(score_columns(num_blocks - 1, window_blocks), selected)
    )
    return block_bytes * min(
        num_blocks, blocks_at_a_time(workspace_bytes, block_bytes, block_size, G, wave)
    )


@functools.cache
def _pairs(T: int, kind: Sparse) -> tuple[int, int]:
    """Returns how many pairs (block of queries, block of keys) are chosen, and in the band."""
    num_blocks, window_blocks = -(-T // kind.block_size), kind.window // kind.block_size
    # blocks of queries whose window begins after block 0
    with_first_block = max(0, num_blocks - window_blocks)
    return sum_to(with_first_block, kind.selected_blocks), sum_to(
        num_blocks + 1, window_blocks
    ) + with_first_block


@functools.cache
def _scored_pairs(T: int, kind: Sparse, group: int) -> float:
    """Returns how many pairs (block of queries, block of keys) are multiplied to choose, see
    `Look`.

    Means of two keys make a pair half. Where every query head looks, each of the `group` heads
    makes pairs of its own.
    """
    if not kind.selected_blocks:
        return 0
    blocks, size = kind.window // kind.block_size, kind.block_size
    pairs, close, early = (
        sum_to(max(0, -(-min(T, end) // size) - blocks)) for end in (T, LATE, EARLY)
    )
    queries = queries_per_token(group, look_from(0))
    return queries * early + (close - early) + (pairs - close) / 2


def sparse_flops(T: int, H: int, G: int, K: int, kind: Sparse) -> AttentionFlops:
    """Floating-point operations of one document of T tokens that attends to chosen blocks."""
    gathered, band = _pairs(T, kind)
    # one head, one block of queries, one block of keys
    product = 2 * kind.block_size * kind.block_size * K
    choice = _scored_pairs(T, kind, H // G) * product * G
    forward, backward = 2 * (gathered + band), 5 * gathered + 7 * band
    return AttentionFlops(forward * product * H, choice, backward * product * H)


def choice_bytes(T: int, G: int, K: int, kind: Sparse, element_size: int) -> int:
    """Returns the bytes of the scores that exist at a time, and of the keys that are scored."""
    if not _pairs(T, kind)[0]:
        return 0
    num_blocks = -(-T // kind.block_size)
    # FP8 takes half; means of two keys are half as many
    keys = num_blocks * kind.block_size * G * K * element_size
    sizes = num_blocks, kind.block_size, kind.window // kind.block_size, G, kind.selected_blocks
    scores = scores_bytes(*sizes, SCORES_BYTES, WAVE)
    return scores + (keys if T <= LATE else keys * 3 // 2)


@functools.cache
def sparse_workspace(
    T: int, H: int, G: int, K: int, kind: Sparse, element_size: int = 2
) -> tuple[int, int]:
    """Returns the bytes of forward and backward for one document of T tokens, without tables."""
    S, block_size, group = kind.selected_blocks, kind.block_size, H // G
    num_blocks = -(-T // block_size)
    delta = 4 * T * H
    if not _pairs(T, kind)[0]:
        return 0, delta + 8 * T * G * K
    token_bytes = slot_bytes_per_token(group, K, S, element_size)
    tokens, heads = range_sizes(T, G, token_bytes, kind.workspace_bytes)
    slots, entries = heads * tokens * token_bytes, heads * T * S
    chunk = BACKWARD_CONFIG.tiles * min(
        block_size, BACKWARD_CONFIG.rows // triton.next_power_of_2(group)
    )
    items = heads * num_blocks + heads * tokens * S // chunk
    partials = 8 * items * block_size * K  # float32 dk and dv of each item
    slots_of_dq = slots - 4 * heads * tokens * S * group  # no log-sum-exps
    sorting = SORT_BYTES * entries
    totals = delta + 8 * heads * T * K  # float32 dk and dv of all tokens
    forward = max(slots + 4 * entries, sorting)
    return forward, totals + max(slots_of_dq + 4 * entries + partials, sorting)
