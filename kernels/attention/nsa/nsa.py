"""Native sparse attention (Yuan et al., arXiv 2502.11089): three attentions, each with a softmax of
its own, gated.

    out[t] = g[compressed] out[compressed] + g[selected] out[selected] + g[window] out[window]

../README.md has the mathematics: compressed is compression.py, selected ../sparse/, and window an
exact band of ../sparse/band.py. g is a sigmoid of logits, for every token, query head and branch
(gates.py), which the caller computes from the layer's input. No gradient flows through the choice
of blocks.

Kept for backward, per token: q, k and v, (H + 2G) K elements; each branch's output, H K, and its
float32 log-sum-exp, H; the logits, 3 H; and the lists of blocks, G * (selected_blocks - 3) int16.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...common import operation
from ...parts import AttentionBytes, AttentionFlops, AttentionKind, sum_to
from ..documents import all_segments
from ..full import BACKWARD_FLOPS, FULL, attention_flops, put
from ..reference import attend_written_out
from ..sparse.band import band_dkv, band_dq, band_forward
from ..sparse.layout import EMPTY, LONGEST_DOCUMENT, Layout, make_layout
from ..sparse.selection import choose_blocks, top_blocks_reference
from ..sparse.sparse_attention import (
    HEAD_DIMS,
    Sparse,
    check_inputs,
    flat,
    scores_bytes,
    sparse_backward,
    sparse_flops,
    sparse_forward,
    sparse_workspace,
)
from .compression import (
    WINDOW_KEYS,
    WINDOW_STRIDE,
    add_unpooled,
    compressed_backward,
    compressed_forward,
    head_bytes,
    heads_at_a_time,
    make_windows,
    pool_windows,
    pool_windows_reference,
)
from .gates import BRANCHES, gate_backward, gated_sum, gated_sum_reference
from .window_scores import score_windows, window_scores_reference

# tokens of a block, and of the selected branch's two local blocks
BLOCK_SIZE, LOCAL_TOKENS = (64, 128)
FORCED_BLOCKS = 3  # the first block and the two local blocks
SCORES_BYTES = 2**29  # bytes of the scores that exist at a time, about
# holds one key/value head's slots at 131,072 tokens, 13 chosen blocks: 1.65 GiB
WORKSPACE_BYTES = 7 * 2**28


# Reference, for one document: queries q [T, H, K] are the last T of its S tokens. A branch gives
# out and lse.


def _attend(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, K] and lse [T, H], for q [T, H, K], k and v [S, G, K], and is_visible [T,
    G or 1, S]."""
    out, lse = attend_written_out(
        q[None], k[None], v[None], is_visible.transpose(0, 1)[None, :, None]
    )
    return out[0], lse[0]


def nsa_attention_reference(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, gates_BTHC: Tensor,
    segments: Tensor | None = None, *,
    selected_blocks: int = 16, window: int = 512, blocks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attends with all scores written out, in the inputs' dtype. q may have the last T of the S
    tokens alone."""
    (B, T), S = q_BTHK.shape[:2], k_BSGK.shape[1]
    out = torch.empty_like(q_BTHK)
    for row, start, stop in all_segments(segments, B, S).tolist():
        queries, keys = (row, slice(max(0, start - S + T), stop - S + T)), (row, slice(start, stop))
        lists = selected_blocks - FORCED_BLOCKS if blocks is None else blocks[queries]
        outs = branches_reference(q_BTHK[queries], k_BSGK[keys], v_BSGK[keys], lists, window)
        out[queries] = gated_sum_reference(outs[:BRANCHES], gates_BTHC[queries])
    return out


def branches_reference(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor | int, window: int
) -> list[Tensor]:
    """Returns the branches' outputs, their log-sum-exps, and the lists; `lists` may be a number of
    blocks to choose."""
    # positions of the keys [S] and of the queries [T, 1, 1]
    key = torch.arange(len(k), device=q.device)
    token = key[len(k) - len(q) :, None, None]
    key_block, token_block, is_earlier = key // BLOCK_SIZE, token // BLOCK_SIZE, key <= token
    keys, values = pool_windows_reference(k), pool_windows_reference(v)
    # each window's last token
    last = torch.arange(len(keys), device=q.device) * WINDOW_STRIDE + WINDOW_KEYS - 1
    compressed, lse = _attend(q, keys, values, token >= last)
    if isinstance(lists, int):
        with torch.no_grad():
            first_local, num_blocks = token_block[:, 0, 0] - 1, -(-len(k) // BLOCK_SIZE)
            scores = window_scores_reference(q, keys, lse, first_local, num_blocks)
            lists = top_blocks_reference(scores, lists)
    is_listed = (lists[..., None] == key_block).any(2)  # [T, G, S]
    is_forced = (key_block == 0) | (key_block >= token_block - 1)
    selected = _attend(q, k, v, is_earlier & (is_forced | is_listed))
    in_window = _attend(q, k, v, is_earlier & (key > token - window))
    outs, lses = zip((compressed, lse), selected, in_window)
    return [*outs, *lses, lists]


# The operation and the kind


@operation("fathom::nsa_gated_sum", lambda outs, *_: outs[0].new_empty(outs[0].shape))
def _nsa_gated_sum(outs: list[Tensor], gates: Tensor, triton_kernels: bool) -> Tensor:
    """Returns the gated sum [B, T, H, K] of three outs [B, T, H, K].

    Gates are logits [B, T, H, 3].
    """
    if not triton_kernels:
        return gated_sum_reference(outs, gates)
    return gated_sum([flat(out) for out in outs], flat(gates)).view(outs[0].shape)


@dataclass(frozen=True)
class NSA(AttentionKind):
    """Native sparse attention, for documents of all lengths.

    Raises ValueError for too few selected blocks.
    """

    # blocks of 64 tokens, the first and the two local ones included; at least 4
    selected_blocks: int = 16
    window: int = 512  # tokens of the window branch, a multiple of 64
    # tiles and slots at a time; with fewer bytes, launches are more and smaller
    workspace_bytes: int = WORKSPACE_BYTES
    name: ClassVar[str] = "nsa"
    gpu_head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS
    takes: ClassVar[tuple[str, ...]] = ("selected_blocks",)
    branches: ClassVar[int] = BRANCHES
    gates_per_head: ClassVar[int] = BRANCHES
    h200_rates: ClassVar[dict[str, float]] = {
        "nsa forward": 313e12,
        "nsa choice": 259e12,
        "nsa backward": 328e12,
    }

    def __post_init__(self):
        if self.selected_blocks <= FORCED_BLOCKS:
            raise ValueError(
                f"selected_blocks must be at least {FORCED_BLOCKS + 1}, "
                f"got {self.selected_blocks}: "
                f"{self.name} forces {FORCED_BLOCKS}"
            )
        super().__post_init__()

    @property
    def list_length(self) -> int:
        return self.selected_blocks - FORCED_BLOCKS

    @property
    def longest_document(self) -> int:
        return LONGEST_DOCUMENT * BLOCK_SIZE

    def describe(self, selected_blocks: str) -> str:
        return (
            f"windows of {WINDOW_KEYS} compressed, {selected_blocks} blocks of {BLOCK_SIZE}, "
            f"{self.window} tokens"
        )

    def check(self, q, k, v, segments, impl):
        on_triton = check_inputs(q, k, v, segments, BLOCK_SIZE, self.window, impl)
        if q.is_cuda and on_triton and q.dtype == torch.float32:
            raise ValueError(
                "the compressed branch on CUDA needs bfloat16 or float16, got float32; "
                "cast q, k and v"
            )
        return on_triton

    def forward(self, q, k, v, segments, lists, backend, on_triton):
        if not on_triton:
            return self._reference_forward(q, k, v, segments, lists)
        shape, layout, windows = q.shape, _layout(q, segments), make_windows(q, segments)
        q, k, v = map(flat, (q, k, v))
        pooled_k, pooled_v = (pool_windows(x, windows) for x in (k, v))
        compressed = compressed_forward(
            q, pooled_k, pooled_v, windows, backend, self.workspace_bytes
        )
        del pooled_v
        if lists is None:
            lists = torch.full(
                (*k.shape[:2], self.list_length), EMPTY, dtype=torch.int16, device=q.device
            )
            if layout.has_candidates:
                first_window = windows.first_window[layout.block_start]
                score = functools.partial(
                    score_windows, q, pooled_k, compressed[1], first_window, layout
                )
                choose_blocks(score, layout, lists, SCORES_BYTES)
                del score
            lists = lists.view(*shape[:2], *lists.shape[1:])
        del pooled_k
        selected = sparse_forward(q, k, v, flat(lists), layout, self.workspace_bytes)
        in_window = band_forward(q, k, v, _window_layout(layout, self.window), exact=True)
        outs, lses = zip(compressed, selected, in_window)
        return [out.view(shape) for out in outs], [lse.view(shape[:3]) for lse in lses], lists

    def _reference_forward(self, q, k, v, segments, lists):
        """Computes `forward` in PyTorch, one document after the other.

        Returns three outputs, three log-sum-exps, and the lists of blocks, chosen here if `lists`
        is None.
        """
        results: list[Tensor] = []
        for row, start, stop in all_segments(segments, *q.shape[:2]).tolist():
            tokens = row, slice(start, stop)
            # the number of blocks to choose, or this document's lists
            blocks = self.list_length if lists is None else lists[tokens]
            parts = branches_reference(q[tokens], k[tokens], v[tokens], blocks, self.window)
            # tensors for all tokens, made at the first document
            results = results or [part.new_empty(*q.shape[:2], *part.shape[1:]) for part in parts]
            put(parts, [x[tokens] for x in results])
        return results[:BRANCHES], results[BRANCHES:-1], results[-1]

    def backward(self, dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton):
        """Takes one branch after the other, so that only one branch's d_out exists. Each adds to
        dq, dk and dv."""
        if not on_triton:
            with torch.enable_grad():
                q, k, v, gates = (x.detach().requires_grad_() for x in (q, k, v, gates))
                out = nsa_attention_reference(
                    q, k, v, gates, segments, window=self.window, blocks=lists
                )
            return torch.autograd.grad(out, (q, k, v, gates), dout)
        shapes, layout = (q.shape, k.shape, v.shape, gates.shape), _layout(q, segments)
        windows = make_windows(q, segments)
        dout, q, k, v, gates, lists = map(flat, (dout, q, k, v, gates, lists))
        outs, lses = [flat(out) for out in outs], [flat(lse) for lse in lses]
        d_gates, dq, dk, dv = (torch.empty_like(x) for x in (gates, q, k, v))

        in_window = _window_layout(layout, self.window)
        d_out = gate_backward(dout, outs[2], gates, 2, d_gates)
        delta = band_dq(d_out, q, k, v, outs[2], lses[2], dq, in_window, exact=True)
        band_dkv(d_out, q, k, v, lses[2], delta, None, dk, dv, in_window, range(k.shape[1]))
        del d_out, delta  # before the next branch's d_out is made
        d_out = gate_backward(dout, outs[1], gates, 1, d_gates)
        size = self.workspace_bytes
        sparse_backward(d_out, q, k, v, outs[1], lses[1], lists, layout, size, add_to=(dq, dk, dv))
        del d_out
        d_out = gate_backward(dout, outs[0], gates, 0, d_gates)
        pooled_k, pooled_v = (pool_windows(x, windows) for x in (k, v))
        kept = outs[0], lses[0], windows, backend, size
        add_unpooled(dk, dv, compressed_backward(d_out, q, pooled_k, pooled_v, *kept, dq), windows)
        return [x.view(shape) for x, shape in zip((dq, dk, dv, d_gates), shapes)]

    def output(self, outs, gates, on_triton):
        return torch.ops.fathom.nsa_gated_sum(list(outs), gates, on_triton)

    def normalise_lists(self, lists, q, segments):
        return self.selected.normalise_lists(lists, q, segments)

    def decode(self, q, k, v, gates):
        """Pools all windows anew, in plain PyTorch: one query is too little work for kernels."""
        options = {"selected_blocks": self.selected_blocks, "window": self.window}
        return nsa_attention_reference(q, k, v, gates, **options)

    def footprint(
        self, T, H, G, K, *, element_size=2, backend="auto", context_length=None, longest=None
    ):
        """Counts three outputs with log-sum-exps as `results`; `forward` is without those that do
        not exist yet."""
        selected_forward, selected_backward = sparse_workspace(
            T, H, G, K, self.selected, element_size
        )
        windows, row_windows = T // WINDOW_STRIDE, (context_length or T) // WINDOW_STRIDE
        longest_windows = None if longest is None else longest // WINDOW_STRIDE
        one_head = head_bytes(backend, windows, row_windows, longest_windows, K, element_size)
        heads = heads_at_a_time(H, G, one_head, self.workspace_bytes)
        # keys of all windows, one query head
        pooled, head = windows * G * K * element_size, T * K * element_size
        compressed = 2 * pooled + 2 * heads * head
        blocks = -(-T // BLOCK_SIZE), BLOCK_SIZE, LOCAL_TOKENS // BLOCK_SIZE
        scores = scores_bytes(*blocks, G, self.list_length, SCORES_BYTES)
        sums = 8 * windows * G * K  # float32 gradients of pooled keys and values
        compressed_backward = 2 * pooled + sums + heads * one_head
        result = H * K * element_size + 4 * H
        forward = max(
            H * head,
            selected_forward - T * result,
            max(pooled + scores, compressed) - 2 * T * result,
        )
        backward = H * head + max(selected_backward, compressed_backward)
        return AttentionBytes(BRANCHES * result, 2 * G * self.list_length, forward, backward)

    def flops(self, length, H, G, K):
        num_blocks, num_windows = -(-length // BLOCK_SIZE), max(0, length // WINDOW_STRIDE - 1)
        product = 2 * BLOCK_SIZE * BLOCK_SIZE * H * K  # one block of queries with one block of keys
        # Each query of tile n sees n + 1 windows.
        # Tiles have 16 queries, but the last tile may have fewer.
        pairs = WINDOW_STRIDE * num_windows * (num_windows + 1) // 2
        missing = WINDOW_STRIDE * (num_windows + 1) + WINDOW_STRIDE - 1 - length
        pairs -= num_windows * missing
        compressed = attention_flops(H, K, pairs)
        candidates = sum_to(num_blocks - LOCAL_TOKENS // BLOCK_SIZE)
        choice = BLOCK_SIZE // WINDOW_STRIDE * candidates * product // BLOCK_SIZE
        selected = sparse_flops(length, H, G, K, self.selected)
        in_window = (num_blocks + sum_to(num_blocks, self.window // BLOCK_SIZE)) * product
        backward = BACKWARD_FLOPS * compressed + selected.backward + 7 * in_window
        return AttentionFlops(compressed + selected.forward + 2 * in_window, choice, backward)

    def work(self, lengths, H, G, K, *, backend, steps, is_packed=True, prompts=()):
        """Adds the compressed branch's library calls, one for each long packed document."""
        lengths = self.with_copies(lengths, prompts)
        work = super().work(lengths, H, G, K, backend=backend, steps=steps)
        calls = FULL.work(lengths, H, G, K, backend=backend, steps=steps, is_packed=is_packed)
        for amounts, part in ((work.forward, "forward"), (work.backward, "backward")):
            amounts[f"full calls {part}"] = getattr(calls, part)[f"full calls {part}"]
        return work

    def rates_with(self, backend, native, head_dim):
        return FULL.rates_with(backend, native, head_dim) | self.h200_rates

    def measure_rates(self, H, G, K, context_length, backend, seconds, device):
        """Measures at the context's length; past 131,072 tokens, with one key/value head."""
        T = max(16_384, min(context_length, 524_288))
        h, g = (H, G) if T <= 131_072 else (H // G, 1)
        flops, rates = self.flops(T, h, g, K), self.rates_at(T, h, g, K, backend, seconds, device)
        q, k, v = (torch.randn(1, T, n, K, device=device, dtype=torch.bfloat16) for n in (h, g, g))
        both = seconds(lambda: self.forward(q, k, v, None, None, backend, True))
        rates["nsa choice"] = flops.choice / max(both - flops.forward / rates["nsa forward"], 1e-9)
        return FULL.measure_rates(H, G, K, context_length, backend, seconds, device) | rates

    @property
    def selected(self) -> Sparse:
        """The selected branch as a kind of its own."""
        return Sparse(self.list_length, BLOCK_SIZE, LOCAL_TOKENS, 0, self.workspace_bytes)


def _layout(q: Tensor, segments: Tensor | None) -> Layout:
    return make_layout(q, segments, BLOCK_SIZE, LOCAL_TOKENS)


def _window_layout(layout: Layout, window: int) -> Layout:
    """Returns the window branch's layout: its number of window blocks alone differs."""
    return layout._replace(window_blocks=window // BLOCK_SIZE)
