"""Native sparse attention (Yuan et al., arXiv 2502.11089): three attentions, each with a softmax of its own, gated.

    out[t] = g[compressed] out[compressed] + g[selected] out[selected] + g[window] out[window]

- compressed: the mean keys and values of windows of 32 tokens, one every 16 (compression.py);
- selected: a document's first block of 64, the token's own block and the one before, and the blocks that matter most to
  the compressed branch, `selected_blocks` in all (selection.py; the kernels are those of sparse_attention.py);
- window: the last `window` tokens, the token itself included (band.py).

g is a sigmoid of logits that the caller makes of the layer's input, for every token, query head and branch (gates.py).
README.md has the rest of the mathematics. No gradient flows through the choice of blocks.

Kept for backward, a token: q, k and v, (H + 2G) K elements; of each branch the output, H K, and the float32
log-sum-exp, H; the logits, 3 H; and the lists of blocks, G * (selected_blocks - 3) int16.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...common import operation
from ..full import BACKWARD_FLOPS, attention_flops, choose_backend
from ..sparse.band import band_dkv, band_dq, band_forward
from ..sparse.layout import Layout, make_layout, normalise_lists
from ..sparse.selection import (
    choose_blocks,
    nsa_scores_reference,
    top_blocks_reference,
)
from ..sparse.sparse_attention import (
    SCORES_BYTES,
    AttentionFootprint,
    Sparsity,
    attention_footprint,
    check_inputs,
    flat,
    scores_bytes,
    sparse_backward,
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

BLOCK_SIZE, LOCAL_TOKENS = 64, 128  # tokens of a block, and of the selected branch's two local blocks
FORCED_BLOCKS = 3  # the first one and the local ones
WORKSPACE_BYTES = 7 * 2**28  # one key/value head's slots at 131,072 tokens, 13 chosen blocks: 1.65 GiB


class NSA(NamedTuple):
    """Which tokens the branches attend to.

    Args:
        selected_blocks: of 64 tokens, the first and the two local ones included.
        window: tokens, a multiple of 64.
    """

    selected_blocks: int = 16
    window: int = 512

    @property
    def dense_below(self) -> int:
        """No document attends to everything: the model has learnt its gates."""
        return 0

    @property
    def chosen_blocks(self) -> int:
        """Blocks of a list."""
        return self.selected_blocks - FORCED_BLOCKS

    def describe(self, selected_blocks: str) -> str:
        """For people; `selected_blocks` as they are spelled for all layers."""
        return f"windows of {WINDOW_KEYS} compressed, {selected_blocks} blocks of {BLOCK_SIZE}, {self.window} tokens"

    def footprint(
        self, T: int, H: int, G: int, K: int, *, element_size: int = 2, backend: str = "auto",
        context_length: int | None = None, longest: int | None = None,
    ) -> AttentionFootprint:  # fmt: skip
        """What T tokens cost; the keywords as `kernels.attention.full.backward_workspace` takes them."""
        return nsa_footprint(T, H, G, K, self, element_size, backend, context_length or T, longest)


# Reference: one document, whose last tokens the queries are


def _attend(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, K], k, v [S, G, K], is_visible [T, G or 1, S] -> out [T, H, K], lse [T, H]; 0 where nothing is seen."""
    G = k.shape[1]
    scores = torch.einsum("tgrk,sgk->tgrs", q.unflatten(1, (G, q.shape[1] // G)), k) / math.sqrt(q.shape[-1])
    sees = is_visible.any(-1)[:, :, None, None]
    is_visible = is_visible[:, :, None] | ~sees  # rows that see nothing are computed, without infinities, then dropped
    scores = scores.masked_fill(~is_visible, float("-inf"))
    out = torch.einsum("tgrs,sgk->tgrk", scores.softmax(-1), v).where(sees, 0)
    lse = scores.logsumexp(-1).where(sees[..., 0], 0)
    return out.flatten(1, 2), lse.flatten(1).to(torch.promote_types(lse.dtype, torch.float32))


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Of the queries [T, 1, 1] and of the keys [S] in their document."""
    position = torch.arange(len(k), device=q.device)
    return position[len(k) - len(q) :, None, None], position


def compressed_reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of the compressed branch."""
    token, _ = _positions(q, k)
    keys, values = pool_windows_reference(k), pool_windows_reference(v)
    if len(keys) == 0:
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    last = torch.arange(len(keys), device=q.device) * WINDOW_STRIDE + WINDOW_KEYS - 1  # token of each window
    return _attend(q, keys, values, token >= last)


def choose_reference(q: Tensor, k: Tensor, lse: Tensor, chosen_blocks: int) -> Tensor:
    """Lists [T, G, chosen_blocks] int16 by the compressed branch's lse."""
    token, _ = _positions(q, k)
    left, num_blocks = token[:, 0, 0] // BLOCK_SIZE - 1, -(-len(k) // BLOCK_SIZE)
    return top_blocks_reference(
        nsa_scores_reference(q, pool_windows_reference(k), lse, left, num_blocks), chosen_blocks
    )


def selected_reference(q: Tensor, k: Tensor, v: Tensor, lists: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of the selected branch on lists [T, G, chosen_blocks]."""
    token, key = _positions(q, k)
    block, own = key // BLOCK_SIZE, token // BLOCK_SIZE
    is_listed = (lists[..., None] == block).any(2)  # [T, G, S]
    return _attend(q, k, v, (key <= token) & ((block == 0) | (block >= own - 1) | is_listed))


def window_reference(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """out and lse of the window branch."""
    token, key = _positions(q, k)
    return _attend(q, k, v, (key <= token) & (key > token - window))


def nsa_attention_reference(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, gates_BTHC: Tensor, segments: Tensor | None = None, *,
    selected_blocks: int = 16, window: int = 512, blocks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`nsa_attention` with all scores written out, in the inputs' dtype; the queries may be the last T of S tokens."""
    (B, T), S = q_BTHK.shape[:2], k_BSGK.shape[1]
    out = torch.empty_like(q_BTHK)
    for row, start, stop in segments.tolist() if segments is not None else [(row, 0, S) for row in range(B)]:
        here = row, slice(max(0, start - S + T), stop - S + T)
        q, k, v = q_BTHK[here], k_BSGK[row, start:stop], v_BSGK[row, start:stop]
        compressed, lse = compressed_reference(q, k, v)
        with torch.no_grad():
            lists = choose_reference(q, k, lse, selected_blocks - FORCED_BLOCKS) if blocks is None else blocks[here]
        selected, _ = selected_reference(q, k, v, lists)
        in_window, _ = window_reference(q, k, v, window)
        out[here] = gated_sum_reference([compressed, selected, in_window], gates_BTHC[here])
    return out


def _by_document(function: Callable, segments: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """What `function` returns of each document's part of `tensors` [B, T, ...], put together again."""
    B, T = tensors[0].shape[:2]
    whole: list[Tensor] = []
    for row, start, stop in segments.tolist() if segments is not None else [(row, 0, T) for row in range(B)]:
        parts = function(*(x[row, start:stop] for x in tensors))
        whole = whole or [part.new_empty(B, T, *part.shape[1:]) for part in parts]
        for x, part in zip(whole, parts):
            x[row, start:stop] = part
    return whole


# Operations


@operation("fathom::nsa_compressed", keepable="results")
def _nsa_compressed(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, backend: str, workspace_bytes: int, triton_kernels: bool
) -> tuple[Tensor, Tensor]:
    """The compressed branch's out [B, T, H, K] and lse [B, T, H] float32."""
    if not triton_kernels:
        out, lse = _by_document(compressed_reference, segments, q, k, v)
        return out, lse
    windows = make_windows(q, segments)
    pooled_k, pooled_v = (pool_windows(flat(x), windows) for x in (k, v))
    out, lse = compressed_forward(flat(q), pooled_k, pooled_v, windows, backend, workspace_bytes)
    return out.view(q.shape), lse.view(q.shape[:3])


@_nsa_compressed.register_fake
def _(q, k, v, segments, backend, workspace_bytes, triton_kernels):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@operation("fathom::nsa_select", keepable="choices")
def _nsa_select(
    q: Tensor, k: Tensor, lse: Tensor, segments: Tensor | None, chosen_blocks: int, triton_kernels: bool
) -> Tensor:
    """Lists [B, T, G, chosen_blocks] int16, as `select_blocks` gives them, by the compressed branch's lse."""
    if not triton_kernels:
        return _by_document(lambda q, k, lse: [choose_reference(q, k, lse, chosen_blocks)], segments, q, k, lse)[0]
    layout = make_layout(q, segments, BLOCK_SIZE, LOCAL_TOKENS)
    windows = make_windows(q, segments)
    scores = {"lse": flat(lse), "first_window": windows.first_window[layout.block_start]}
    lists = choose_blocks(flat(q), pool_windows(flat(k), windows), layout, chosen_blocks, SCORES_BYTES, **scores)
    return lists.unflatten(0, q.shape[:2])


@_nsa_select.register_fake
def _(q, k, lse, segments, chosen_blocks, triton_kernels):
    return q.new_empty(*k.shape[:3], chosen_blocks, dtype=torch.int16)


@operation("fathom::nsa_selected", keepable="results")
def _nsa_selected(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, lists: Tensor, workspace_bytes: int, triton_kernels: bool
) -> tuple[Tensor, Tensor]:
    """The selected branch's out [B, T, H, K] and lse [B, T, H] float32."""
    if not triton_kernels:
        out, lse = _by_document(selected_reference, segments, q, k, v, lists)
        return out, lse
    options = BLOCK_SIZE, LOCAL_TOKENS, workspace_bytes, True
    return torch.ops.fathom.sparse_attention_forward(q, k, v, segments, lists, *options)


@_nsa_selected.register_fake
def _(q, k, v, segments, lists, workspace_bytes, triton_kernels):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _window_layout(layout: Layout, window: int) -> Layout:
    """For the window branch: an exact window needs of the tables that its length decides this number alone."""
    return layout._replace(window_blocks=window // BLOCK_SIZE)


@operation("fathom::nsa_window", keepable="results")
def _nsa_window(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, window: int, triton_kernels: bool
) -> tuple[Tensor, Tensor]:
    """The window branch's out [B, T, H, K] and lse [B, T, H] float32."""
    if not triton_kernels:
        out, lse = _by_document(functools.partial(window_reference, window=window), segments, q, k, v)
        return out, lse
    layout = _window_layout(make_layout(q, segments, BLOCK_SIZE, LOCAL_TOKENS), window)
    out, lse = band_forward(flat(q), flat(k), flat(v), layout, exact=True)
    return out.view(q.shape), lse.view(q.shape[:3])


@_nsa_window.register_fake
def _(q, k, v, segments, window, triton_kernels):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("fathom::nsa_gated_sum", mutates_args=())
def _nsa_gated_sum(outs: list[Tensor], gates: Tensor, triton_kernels: bool) -> Tensor:
    """Three of [B, T, H, K], gates [B, T, H, 3] -> [B, T, H, K]."""
    if not triton_kernels:
        return gated_sum_reference(outs, gates)
    return gated_sum([flat(out) for out in outs], flat(gates)).view(outs[0].shape)


@_nsa_gated_sum.register_fake
def _(outs, gates, triton_kernels):
    return outs[0].new_empty(outs[0].shape)


@torch.library.custom_op("fathom::nsa_backward", mutates_args=())
def _nsa_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, outs: list[Tensor], lses: list[Tensor],
    lists: Tensor, segments: Tensor | None, window: int, backend: str, workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and the gates' gradients. A branch at a time adds to dq, dk and dv: one branch's dout exists."""
    shapes, layout = (q.shape, k.shape, v.shape, gates.shape), make_layout(q, segments, BLOCK_SIZE, LOCAL_TOKENS)
    windows = make_windows(q, segments)
    dout, q, k, v, gates, lists = map(flat, (dout, q, k, v, gates, lists))
    outs, lses = [flat(out) for out in outs], [flat(lse) for lse in lses]
    d_gates, dk, dv = torch.empty_like(gates), torch.empty_like(k), torch.empty_like(v)

    in_window = _window_layout(layout, window)
    d_out = gate_backward(dout, outs[2], gates, 2, d_gates)
    dq, delta = band_dq(d_out, q, k, v, outs[2], lses[2], in_window, exact=True)
    band_dkv(d_out, q, k, v, lses[2], delta, None, dk, dv, in_window, range(k.shape[1]))
    del d_out, delta  # before the next branch's
    d_out = gate_backward(dout, outs[1], gates, 1, d_gates)
    sparse_backward(d_out, q, k, v, outs[1], lses[1], lists, layout, workspace_bytes, add_to=(dq, dk, dv))
    del d_out
    d_out = gate_backward(dout, outs[0], gates, 0, d_gates)
    pooled_k, pooled_v = (pool_windows(x, windows) for x in (k, v))
    arguments = d_out, q, pooled_k, pooled_v, outs[0], lses[0], windows
    d_pooled = compressed_backward(*arguments, backend, workspace_bytes, dq)
    add_unpooled(dk, dv, d_pooled, windows)
    return tuple(x.view(shape) for x, shape in zip((dq, dk, dv, d_gates), shapes))


@_nsa_backward.register_fake
def _(dout, q, k, v, gates, outs, lses, lists, segments, window, backend, workspace_bytes):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, gates))


# Autograd


def nsa_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, lists: Tensor | None, nsa: NSA, backend: str,
    workspace_bytes: int, triton_kernels: bool,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:  # fmt: skip
    """Of each branch the output [B, T, H, K] and log-sum-exp [B, T, H]; and the lists, chosen where none are given."""
    ops = torch.ops.fathom
    compressed = ops.nsa_compressed(q, k, v, segments, backend, workspace_bytes, triton_kernels)
    if lists is None:
        lists = ops.nsa_select(q, k, compressed[1], segments, nsa.chosen_blocks, triton_kernels)
    selected = ops.nsa_selected(q, k, v, segments, lists, workspace_bytes, triton_kernels)
    return [compressed, selected, ops.nsa_window(q, k, v, segments, nsa.window, triton_kernels)], lists


def nsa_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor],
    lists: Tensor, segments: Tensor | None, window: int, backend: str, workspace_bytes: int, triton_kernels: bool,
) -> Sequence[Tensor]:  # fmt: skip
    """dq, dk, dv and the gates' gradients; outs and lses in the order of the branches."""
    if triton_kernels:
        kept = list(outs), list(lses), lists, segments
        return torch.ops.fathom.nsa_backward(dout, q, k, v, gates, *kept, window, backend, workspace_bytes)
    with torch.enable_grad():
        q, k, v, gates = (x.detach().requires_grad_() for x in (q, k, v, gates))
        out = nsa_attention_reference(q, k, v, gates, segments, window=window, blocks=lists)
    return torch.autograd.grad(out, (q, k, v, gates), dout)


class _NSAAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gates, segments, lists, nsa, backend, workspace_bytes, triton_kernels):
        results, lists = nsa_forward(q, k, v, segments, lists, nsa, backend, workspace_bytes, triton_kernels)
        outs, lses = zip(*results)
        ctx.save_for_backward(q, k, v, gates, lists, segments, *outs, *lses)
        ctx.options = nsa.window, backend, workspace_bytes, triton_kernels
        return torch.ops.fathom.nsa_gated_sum(list(outs), gates, triton_kernels)

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise RuntimeError("nsa_attention has no second derivative (create_graph=True); its reference has")
        q, k, v, gates, lists, segments, *results = ctx.saved_tensors
        kept = results[:BRANCHES], results[BRANCHES:], lists, segments
        return *nsa_backward(dout, q, k, v, gates, *kept, *ctx.options), *[None] * 6


def nsa_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, gates_BTHC: Tensor, segments: Tensor | None = None, *,
    selected_blocks: int = 16, window: int = 512, blocks: Tensor | None = None, backend: str = "auto",
    workspace_bytes: int = WORKSPACE_BYTES, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Native sparse attention: gated sum of compressed, selected and window attention, each document on its own.

    Args:
        q_BTHK, k_BTGK, v_BTGK: as in `sparse_attention`, after RoPE; bfloat16 or float16 on CUDA.
        gates_BTHC: logits of each head's gates [B, T, H, 3]: compressed, selected, window.
        segments: the documents, as `kernels.attention.full.attention` takes them.
        selected_blocks: of 64 tokens, the first and the two local ones included; at least 4.
        window: tokens of the window branch, a multiple of 64.
        blocks: lists as `select_blocks` returns them, in place of the choice.
        backend: of the compressed branch, as `kernels.attention.full.attention` takes it.
        workspace_bytes: of tiles and slots at a time; fewer take more, smaller launches.
        impl: as in `sparse_attention`.

    Returns:
        [B, T, H, K] in q's dtype.

    Raises:
        ValueError: as `sparse_attention`; too few selected blocks, float32 on CUDA, gates of another shape.
        RuntimeError: as `sparse_attention`.
    """
    on_triton = check_inputs(q_BTHK, k_BTGK, v_BTGK, segments, BLOCK_SIZE, window, impl)
    if gates_BTHC.shape != (*q_BTHK.shape[:3], BRANCHES):
        raise ValueError(f"gates must be [B, T, H, 3] for q {tuple(q_BTHK.shape)}, got {tuple(gates_BTHC.shape)}")
    if selected_blocks <= FORCED_BLOCKS:
        raise ValueError(f"selected_blocks must be at least {FORCED_BLOCKS + 1} for NSA, got {selected_blocks}")
    if q_BTHK.is_cuda and on_triton and q_BTHK.dtype == torch.float32:
        raise ValueError("NSA's compressed branch on CUDA needs bfloat16 or float16, got float32; cast q, k and v")
    if blocks is not None:
        blocks = normalise_lists(blocks, make_layout(q_BTHK, segments, BLOCK_SIZE, LOCAL_TOKENS))
    return _NSAAttention.apply(
        q_BTHK, k_BTGK, v_BTGK, gates_BTHC, segments, blocks, NSA(selected_blocks, window),
        choose_backend(backend, q_BTHK.device), workspace_bytes, on_triton,
    )  # fmt: skip


def attend_to_cache(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, gates_BTHC: Tensor, nsa: NSA) -> Tensor:
    """NSA of a whole prompt, or of one new token to the S cached ones, itself the last of them; T is S or 1.

    One query is too little work for kernels: all windows are pooled anew, in plain PyTorch.
    """
    attend = nsa_attention if q_BTHK.shape[1] == k_BSGK.shape[1] else nsa_attention_reference
    return attend(q_BTHK, k_BSGK, v_BSGK, gates_BTHC, **nsa._asdict())


class NSAWorkspace(NamedTuple):
    """Bytes that the operations take inside, beside their arguments and results."""

    compressed: int
    select: int
    selected: int
    backward: int


@functools.cache
def nsa_workspace(
    T: int, H: int, G: int, K: int, nsa: NSA, element_size: int, backend: str, context_length: int, longest: int | None
) -> NSAWorkspace:
    selected = attention_footprint(
        T, H, G, K, _selected_branch(nsa), workspace_bytes=WORKSPACE_BYTES, element_size=element_size
    )
    windows, longest_windows = T // WINDOW_STRIDE, None if longest is None else longest // WINDOW_STRIDE
    of_a_head = head_bytes(backend, windows, context_length // WINDOW_STRIDE, longest_windows, K, element_size)
    heads = heads_at_a_time(H, G, of_a_head, WORKSPACE_BYTES)
    pooled, head = windows * G * K * element_size, T * K * element_size  # keys of all windows, one query head
    sums = 8 * windows * G * K  # float32 gradients of pooled keys and values
    compressed_backward = 2 * pooled + sums + heads * of_a_head
    return NSAWorkspace(
        compressed=2 * pooled + 2 * heads * head,
        select=pooled + scores_bytes(-(-T // BLOCK_SIZE), BLOCK_SIZE, LOCAL_TOKENS // BLOCK_SIZE, G, nsa.chosen_blocks),
        selected=selected.forward_workspace_bytes,
        backward=H * head + max(selected.backward_workspace_bytes, compressed_backward),
    )


def _selected_branch(nsa: NSA) -> Sparsity:
    return Sparsity(nsa.chosen_blocks, BLOCK_SIZE, LOCAL_TOKENS)


@functools.cache
def nsa_footprint(
    T: int, H: int, G: int, K: int, nsa: NSA, element_size: int, backend: str, context_length: int, longest: int | None
) -> AttentionFootprint:
    """What one document of T tokens costs; the rest as `nsa_workspace`, with the three outputs and the sum's."""
    num_blocks, num_windows = -(-T // BLOCK_SIZE), max(0, T // WINDOW_STRIDE - 1)
    block_flops = 2 * BLOCK_SIZE * BLOCK_SIZE * H * K  # of one product of a block of queries and a block of keys
    # Of a tile's 16 queries, 1 to 16 in the last one, each sees the windows up to the tile's own.
    pairs = WINDOW_STRIDE * num_windows * (num_windows + 1) // 2
    pairs -= num_windows * (WINDOW_STRIDE * (num_windows + 1) + WINDOW_STRIDE - 1 - T) if num_windows else 0
    compressed = int(attention_flops(H, K, pairs))
    blocks = np.arange(num_blocks)
    candidates = int(np.maximum(0, blocks - LOCAL_TOKENS // BLOCK_SIZE).sum())
    choice = BLOCK_SIZE // WINDOW_STRIDE * candidates * block_flops // BLOCK_SIZE
    selected = attention_footprint(T, H, G, K, _selected_branch(nsa), element_size=element_size)
    in_window = int((np.minimum(blocks, nsa.window // BLOCK_SIZE) + 1).sum()) * block_flops

    workspace = nsa_workspace(T, H, G, K, nsa, element_size, backend, context_length, longest)
    out = T * H * K * element_size
    result, choices = H * K * element_size + 4 * H, 2 * G * nsa.chosen_blocks
    # The three results exist from the last operation on, in which the gated sum is made.
    forward_workspace = max(
        out, workspace.selected - T * result, max(workspace.select, workspace.compressed) - 2 * T * result
    )
    return AttentionFootprint(
        kept_bytes_per_token=BRANCHES * result + choices,
        forward_workspace_bytes=forward_workspace,
        backward_workspace_bytes=workspace.backward,
        forward_flops=compressed + choice + selected.forward_flops - selected.choice_flops + 2 * in_window,
        backward_flops=int(BACKWARD_FLOPS * compressed) + selected.backward_flops + 7 * in_window,
        choice_flops=choice,
        choice_bytes_per_token=choices,
    )
