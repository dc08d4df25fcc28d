"""Gated MLPs of a mixture's experts: each token goes through k of E, and none is dropped.

For a token x with experts e_1 ... e_k and weights w_1 ... w_k, and gate_e and up_e the two halves of gate_up[e],

    y = sum over j of down_e (w_j silu(gate_e x) * up_e x),  e = e_j

The sum is in float32, in the order of j.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import cast_by_autocast


def expert_mlp_reference(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """A loop over experts in plain PyTorch, with the contract of `expert_mlp`; float64 stays float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(*experts.shape, x.shape[1])
    for e, (into, out_of) in enumerate(zip(gate_up, down)):
        token, j = (experts == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], into).chunk(2, dim=-1)
        hidden = F.silu(gate.to(dtype)) * up.to(dtype) * weights[token, j, None].to(dtype)
        rows = rows.index_put((token, j), F.linear(hidden.to(x.dtype), out_of))
    return rows.sum(1, dtype=dtype).to(x.dtype)


def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, *, tile_size: int | None = None,
    skippable: bool = False, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Returns the sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        x: [N, D].
        gate_up: [E, 2 I, D], an expert's gate rows before its up rows.
        down: [E, D, I].
        experts: [N, k], integers, the experts of each token.
        weights: [N, k], any floating dtype.
        tile_size: tokens of a tile; None runs all at once and keeps gate and up, [N k, 2 I], for backward. In tiles
            backward makes these again, one third of forward's work, and adds weight gradients up in float32; a single
            tile needs no such sums.
        skippable: whether a second forward may leave tiles out, because no gradient depends on the result, see
            `kernels.common.operation`.
        impl: "auto", "triton" or "torch".

    Returns:
        [N, D].

    Raises:
        ValueError: shapes or dtypes that do not fit together, or tile_size below 1.
    """
    x, gate_up, down = cast_by_autocast(x, gate_up, down)
    (N, D), (E, I) = x.shape, (len(down), down.shape[-1])
    if gate_up.shape != (E, 2 * I, D) or down.shape[1] != D or not x.dtype == gate_up.dtype == down.dtype:
        got = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (gate_up, down))
        raise ValueError(f"for {x.dtype} and width {D}, weights must be [E, 2 I, {D}] and [E, {D}, I], got {got}")
    if experts.dim() != 2 or len(experts) != N or weights.shape != experts.shape or experts.is_floating_point():
        got = " and ".join(f"{list(t.shape)} {t.dtype}" for t in (experts, weights))
        raise ValueError(f"experts and weights must be [{N}, k], integers and numbers, got {got}")
    if tile_size is not None and tile_size < 1:
        raise ValueError(f"tile_size must be at least 1 token, got {tile_size}")
    return expert_mlp_reference(x, gate_up, down, experts, weights)
