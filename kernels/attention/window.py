"""Attention to a window: each token attends to the last `window` tokens, itself included.

    out[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K)) v[s],  t - window < s <= t and s in t's document

The kernels are in sparse/band.py, as exact bands. With backend "flash-attn-4" that library's run
instead, and with heads of other widths than 64 and 128 PyTorch's FlashAttention-2. Kept for
backward, per token: q, k, v and out, (2H + 2G) K elements, and the float32 log-sum-exp, H elements.

Method: Beltagy et al., Longformer, arXiv 2004.05150.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import use_triton
from ..parts import AttentionBytes, AttentionFlops, AttentionKind, sum_to
from .documents import as_bytes, document_bounds
from .libraries import KERNELS, Kernel
from .reference import attend_written_out, backward_written_out, within_documents
from .sparse.band import band_dkv, band_dq, band_forward
from .sparse.layout import make_layout
from .sparse.sparse_attention import HEAD_DIMS, check_inputs, check_shapes, flat

BLOCK_SIZE = 64  # tokens of a block of keys
# matrix products of backward: three in dq's kernel, four in dk's and dv's
BAND_BACKWARD_PRODUCTS = 7
FLASH_HEAD_DIMS = tuple(range(8, 257, 8))  # head widths of FlashAttention-2


def window_reference(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: int, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, H, K] and log-sum-exp [B, T, H], with the T x T matrix written out."""
    return attend_written_out(q_BTHK, k_BTGK, v_BTGK, keys_in_window(q_BTHK, window, segments))


def keys_in_window(q: Tensor, window: int, segments: Tensor | None) -> Tensor:
    """Returns which keys a query sees, [B, 1, 1, T, T]."""
    is_earlier, index_BT = within_documents(q, segments)
    return (is_earlier & (index_BT[:, :, None] - index_BT[:, None, :] < window))[:, None, None]


def begins_of(q: Tensor, segments: Tensor | None) -> tuple[Tensor, int]:
    """Returns documents' first tokens and the end, int32, and the longest: [0, 3, 5, 10], 5 for
    lengths 3, 2, 5."""
    return _begins(*q.shape[:2], as_bytes(segments), q.device)


@functools.lru_cache(maxsize=4)
def _begins(B: int, T: int, documents: bytes | None, device: torch.device) -> tuple[Tensor, int]:
    start, length = document_bounds(B, T, documents)
    return F.pad(start.int(), (0, 1), value=B * T).to(device), int(length.max())


@dataclass(frozen=True)
class Window(AttentionKind):
    """Attention to the last `window` tokens, the token itself included. Raises ValueError for 0, or
    more than 2**30."""

    window: int = 4096
    name: ClassVar[str] = "window"
    gpu_head_dims: ClassVar[tuple[int, ...]] = FLASH_HEAD_DIMS
    h200_rates: ClassVar[dict[str, float]] = {"window forward": 381e12, "window backward": 465e12}

    def __post_init__(self):
        if not 1 <= self.window <= 2**30:
            raise ValueError(f"window must be from 1 to {2**30}, got {self.window}")
        super().__post_init__()

    @property
    def reach(self) -> int:
        return self.window

    def describe(self, selected_blocks: str) -> str:
        return f"a window of {self.window} tokens"

    def check(self, q, k, v, segments, impl):
        K = q.shape[-1]
        if not use_triton(impl, q) or K in HEAD_DIMS or not q.is_cuda:
            return check_inputs(q, k, v, segments, BLOCK_SIZE, BLOCK_SIZE, impl)
        check_shapes(q, k, v, segments)
        if K not in FLASH_HEAD_DIMS or q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"windows' GPU kernels take head_dim {HEAD_DIMS}, and in bfloat16 and float16 "
                "multiples of 8 up to "
                f"{FLASH_HEAD_DIMS[-1]}, got {K} in {q.dtype}"
            )
        return False

    def _layout(self, q, segments):
        return make_layout(q, segments, BLOCK_SIZE, self.window)

    def _library(self, q: Tensor, backend: str, on_triton: bool) -> Kernel | None:
        """Returns the library's kernel that runs in place of the bands; None: no library's."""
        if not q.is_cuda or q.dtype.itemsize != 2:
            return None
        if backend == "flash-attn-4":
            return KERNELS[backend]
        return None if on_triton and q.shape[-1] in HEAD_DIMS else KERNELS["flash"]

    def forward(self, q, k, v, segments, lists, backend, on_triton):
        if kernel := self._library(q, backend, on_triton):
            flat_qkv = (x.flatten(0, 1) for x in (q, k, v))
            out, lse = kernel.forward_together(
                *flat_qkv, *begins_of(q, segments), window=self.window
            )
            return [out.contiguous().view(q.shape)], [lse.T.contiguous().view(q.shape[:3])], None
        if not on_triton:
            out, lse = window_reference(q, k, v, self.window, segments)
            return [out], [lse], None
        out, lse = band_forward(flat(q), flat(k), flat(v), self._layout(q, segments), exact=True)
        return [out.view(q.shape)], [lse.view(q.shape[:3])], None

    def backward(self, dout, q, k, v, gates, outs, lses, lists, segments, backend, on_triton):
        if kernel := self._library(q, backend, on_triton):
            rows = (x.contiguous().flatten(0, 1) for x in (dout, q, k, v, outs[0]))
            lse = lses[0].flatten(0, 1).T.contiguous()
            gradients = kernel.backward_together(
                *rows, lse, *begins_of(q, segments), window=self.window
            )
            return [x.contiguous().view(like.shape) for x, like in zip(gradients, (q, k, v))]
        if not on_triton:
            return backward_written_out(dout, q, k, v, keys_in_window(q, self.window, segments))
        layout, shapes = self._layout(q, segments), (q.shape, k.shape, v.shape)
        dout, q, k, v, out, lse = map(flat, (dout, q, k, v, outs[0], lses[0]))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = band_dq(dout, q, k, v, out, lse, dq, layout, exact=True)
        band_dkv(dout, q, k, v, lse, delta, None, dk, dv, layout, range(k.shape[1]))
        return [x.view(shape) for x, shape in zip((dq, dk, dv), shapes)]

    def decode(self, q, k, v, gates):
        q, k, v = (x.transpose(1, 2) for x in (q, k[:, -self.window :], v[:, -self.window :]))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    def footprint(
        self, T, H, G, K, *, element_size=2, backend="auto", context_length=None, longest=None
    ):
        kernel = KERNELS["flash-attn-4" if backend == "flash-attn-4" else "flash"]
        rows = 0 if K in HEAD_DIMS and backend != "flash-attn-4" else kernel.rows_together
        return AttentionBytes(
            H * K * element_size + 4 * H, 0, 0, 4 * T * H + rows * T * H * K * element_size
        )

    def flops(self, length, H, G, K):
        """Counts whole blocks of 64: a block of queries multiplies with one block of keys more than
        its window has."""
        num_blocks = -(-length // BLOCK_SIZE)
        pairs = num_blocks + sum_to(num_blocks, -(-self.window // BLOCK_SIZE))
        product = 2 * BLOCK_SIZE * BLOCK_SIZE * H * K
        return AttentionFlops(2 * pairs * product, 0, BAND_BACKWARD_PRODUCTS * pairs * product)

    def measure_rates(self, H, G, K, context_length, backend, seconds, device):
        return self.rates_at(max(2 * self.window, 65_536), H, G, K, backend, seconds, device)
