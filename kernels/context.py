"""Tokens as the blocks of a decoder must know them: rotations, documents, caches."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention.cache import KeyValueCache
from .attention.documents import Documents
from .config import ModelConfig
from .experts.balance import Routing
from .gated_delta_net import StateCache
from .head_loss import check_shape
from .rope import RotaryTables

Cache = KeyValueCache | StateCache
# Cosine and sine as `rope` takes them, float32 [T, K/2] or [B, T, K/2].
Rotation = tuple[Tensor, Tensor]


@dataclass
class Rotations:
    """The rotations of tokens in both kinds of layers."""

    full: Rotation  # layers that see everything
    windowed: Rotation  # layers with a window


@dataclass
class Context:
    """Facts of the tokens that blocks read beside hidden states."""

    rotations: Rotations
    longest: int  # tokens of the longest document, the cached ones included
    segments: Tensor | None = None  # the packed documents, see kernels/attention/documents.py
    caches: list[Any] | None = None
    routing: Routing | None = None  # notes of the layers that have experts; None: nobody reads them

    def cache(self, layer: int) -> Any:
        """Returns a layer's cache, of the kind that its mixer makes."""
        return self.caches[layer] if self.caches else None


class ContextMaker:
    """Mixin of a decoder, which makes contexts from its tables of rotations."""

    rotary: RotaryTables  # layers that see everything
    local_rotary: RotaryTables  # layers with a window; `rotary` itself if both rotate alike

    def make_tables(self, config: ModelConfig) -> None:
        """Makes `rotary` and `local_rotary` of a configuration."""
        # Queries and keys have one factor each, whose square turns attention's 1 / sqrt(head_dim)
        # into the multiplier.
        multiplier = config.attention_multiplier
        factor = 1.0 if multiplier is None else (multiplier * config.attention.head_dim**0.5) ** 0.5
        width = config.rotary_width
        self.rotary = RotaryTables(width, config.rope_theta, config.rope_scaling, factor)
        self.local_rotary = self.rotary
        if config.local_rope_theta is not None:
            self.local_rotary = RotaryTables(width, config.local_rope_theta, factor=factor)

    def context(
        self,
        input_ids: Tensor,
        documents: Documents | None = None,
        caches: list[Cache] | None = None,
    ) -> Context:
        """Returns what every block must know of the tokens; arguments as
        `model.Transformer.forward`.

        Raises:
            ValueError: documents of another shape, or together with caches.
        """
        (_, T), device = input_ids.shape, input_ids.device
        if documents is not None:
            check_shape("documents", documents.positions_BT, input_ids.shape)
        start = caches[0].length if caches else 0
        if caches and (documents is not None or (start and T > 1)):
            raise ValueError(
                "with a key/value cache, give one document, "
                "and one token at a time after the prompt"
            )
        if documents is None:
            rotations = self.rotations(start + T, device, slice(start, start + T))
            return Context(rotations, start + T, caches=caches)
        # Positions in a share of a sequence reach as far as the sequence's longest document.
        longest, positions_BT = documents.longest, documents.positions_BT
        positions_BT = positions_BT.to(device, non_blocking=True)
        rotations = self.rotations(max(T, longest), device, positions_BT)
        return Context(rotations, longest, documents.segments)

    def rotations(
        self, length: int, device: torch.device, rows: slice | Tensor = slice(0)
    ) -> Rotations:
        """Returns `Context.rotations` at `rows` of tables of at least `length` positions."""
        distinct = dict.fromkeys((self.rotary, self.local_rotary))
        tables = [rotary.tables(length, device) for rotary in distinct]
        rotations = [(cos[rows], sin[rows]) for cos, sin in tables]
        return Rotations(full=rotations[0], windowed=rotations[-1])
