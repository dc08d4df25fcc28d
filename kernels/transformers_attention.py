"""Attention of these kernels for models of transformers: the names "fathom" and "fathom_sparse".

transformers calls an attention function for each layer and a mask function for each forward, both
found by name. Here no mask over pairs of tokens is built. Documents come from `position_ids`, from
`cu_seq_lens_q`, and from a mask of padding, whose tokens become documents of their own.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Full, Sparse
from .attention.attend import attention
from .attention.documents import find_documents
from .common import cast_by_autocast
from .parts import AttentionKind
from .torch_internals import version_of

# Keywords of transformers' attention functions that change the result
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "cache", "output_attentions")
# the tensors that segments were found from, their versions, the segments
_last: tuple = ((), (), None)


def register_attention(
    *, selected_blocks: int = 32, window: int = 512, block_size: int = 64, dense_below: int = 8192,
    backend: str = "auto", impl: str = "auto",
) -> None:  # fmt: skip
    """Makes `attn_implementation="fathom"` and `"fathom_sparse"` known to transformers.

    "fathom" is causal attention to everything. "fathom_sparse" is `Sparse`: each token attends to
    the first block of its document, a window, and blocks that it chooses. Both take grouped
    queries, in training and evaluation, with gradient checkpointing. Documents packed into a row
    attend on their own. One begins where `position_ids` do not count on, or as `cu_seq_lens_q`
    says. Padding, on either side, is not attended to.

    Generation with a dynamic cache: a prompt attends as in training. Each new token then attends to
    everything, in PyTorch's scaled_dot_product_attention.

    A second call replaces the options, also for models that exist: four of `Sparse`, and `backend`,
    the library's kernel for attention to everything: "auto", "cudnn", "flash" or "flash-attn-4".

    Raises:
        ImportError: transformers is missing, or older than 5.
        ValueError: options that `Sparse` refuses. In a model's forward: sliding windows, soft caps,
            attention sinks, dropout, attention that is not causal, returned probabilities, masks of
            pairs, static caches, or a model that does not hand its positions to attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    sparse = Sparse(
        selected_blocks=selected_blocks,
        window=window,
        block_size=block_size,
        dense_below=dense_below,
    )
    kinds: dict[str, AttentionKind] = {"fathom": Full(), "fathom_sparse": sparse}
    find_segments = torch.compiler.disable(_segments)  # reads tensors on the host
    for name, kind in kinds.items():
        function = functools.partial(_attend, find_segments, kind=kind, backend=backend, impl=impl)
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _padding_mask)


def _padding_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, use_vmap=False,
    local_size=None,
    **unused,
) -> Tensor | None:  # fmt: skip
    """Returns the mask of padding, bool [B, S], or None if there is none. Layers get it as
    `attention_mask`.

    Where the mask has a window of `local_size` tokens it is an empty mask of pairs: layers that get
    it are refused.
    """
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_length:
        raise ValueError(
            "fathom attention takes a dynamic cache alone, without prefixes; "
            "use attn_implementation=sdpa"
        )
    if use_vmap:
        raise ValueError(
            "fathom attention is causal, without a mask function; use attn_implementation=sdpa"
        )
    if local_size is not None and local_size < kv_length:
        return torch.empty(0, 0, 0, 0)
    return None if attention_mask is None or attention_mask.all() else attention_mask.bool()


def _attend(
    find_segments: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, *, kind: AttentionKind, backend: str, impl: str,
    dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attends as transformers asks: q [B, H, T, K], k and v [B, G, S, K] -> out [B, T, H, K]."""
    values = {name: options.get(name) for name in REFUSED} | {"dropout": dropout}
    refused = [name for name, value in values.items() if isinstance(value, Tensor) or value]
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        refused.append("attention that is not causal")
    if attention_mask is not None and attention_mask.dim() != 2 and not refused:
        refused.append(
            f"a mask of {attention_mask.dim()} dimensions" if attention_mask.numel() else "windows"
        )
    if refused:
        raise ValueError(
            f"fathom attention does not support {', '.join(refused)}; use attn_implementation=sdpa"
        )
    query, key, value = cast_by_autocast(query, key, value)
    (B, _, T, K), S = query.shape, key.shape[2]
    if T < S:  # new tokens, which attend to a cache
        return _decode(query, key, value, attention_mask, scaling).transpose(1, 2), None
    if cu_seq_lens_q is None and (position_ids is None or position_ids.dim() != 2):
        raise ValueError(
            f"{type(module).__name__} hands no position_ids [B, T] to attention: "
            "documents are not known"
        )
    segments = find_segments(B, T, position_ids, cu_seq_lens_q, attention_mask)
    # `attention` scales by 1 / sqrt(K)
    if scaling is not None and abs(scaling * K**0.5 - 1) > 1e-6:
        query = query * (scaling * K**0.5)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    return attention(q, k, v, segments, kind=kind, backend=backend, impl=impl), None


def _decode(
    query: Tensor, key: Tensor, value: Tensor, is_token: Tensor | None, scaling: float | None
) -> Tensor:
    """Attends from the last T of S tokens to all tokens up to each; returns [B, H, T, K]."""
    T, S = query.shape[2], key.shape[2]
    mask = None
    if T > 1 or is_token is not None:
        mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)
        if is_token is not None:
            mask = mask & is_token[:, None, None, :]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )


def _segments(
    B: int, T: int, position_ids: Tensor | None, cu_seq_lens: Tensor | None, is_token: Tensor | None
) -> Tensor | None:
    """Returns the documents, see `attention`.

    All layers of a forward share them: the host waits once.
    """
    global _last
    tensors = position_ids, cu_seq_lens, is_token
    versions = [None if x is None else version_of(x) for x in tensors]
    known, known_versions, segments = _last
    if known and all(a is b for a, b in zip(tensors, known)) and versions == known_versions:
        return segments
    is_first = torch.zeros(B, T, dtype=torch.bool)
    if cu_seq_lens is not None:
        begins = cu_seq_lens.cpu().long()
        if B != 1 or begins[-1] != T:
            raise ValueError(
                f"cu_seq_lens_q must count the tokens of one row, {B} x {T}, got {int(begins[-1])}"
            )
        is_first[0, begins[:-1]] = True
    elif position_ids is not None:
        is_first[:, 1:] = position_ids.diff().cpu() != 1
    if is_token is not None:
        is_first[:, 1:] |= is_token.cpu().diff()
    segments = find_documents(is_first.cumsum(1)).segments
    _last = tensors, versions, segments
    return segments
