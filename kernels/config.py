"""The configuration of a decoder: its sizes, the parts of its layers, their parameters; and named
sizes.

Sizes have the letters of `model.py`: D hidden_size, H query heads, G key/value heads, K head_dim, F
intermediate_size, V vocab_size.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .experts.part import ExpertsPart
from .gated_delta_net import DeltaNet
from .gated_mlp import GatedMLPPart
from .parts import BlockForm, Fused, LayerParts, MixerKind, Parameter
from .qkv_attention import AttentionPart
from .rope import RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """A decoder; `MODEL_SIZES` holds the named ones. `shard` returns what one rank has of it.

    Raises ValueError for a size below 1, no layers, an attention_multiplier beside layers that do
    not rotate their heads, or not all of each head.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    # Repeat over the model's layers: (windowed, windowed, full) is a pattern of three.
    layers: tuple[LayerParts, ...]
    block: BlockForm = BlockForm()
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    embedding_multiplier: float = 1.0
    # Multiplies queries times keys; None: 1 / sqrt(head_dim). Granite's.
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0  # divides the logits
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    # Layers with a window have rotary frequencies of this theta, which rope_scaling leaves alone;
    # None: the frequencies of other layers.
    local_rope_theta: float | None = None
    initializer_range: float = 0.02
    # Factor of the loss that balances experts; 0: it is not added.
    router_aux_loss_coef: float = 0.0
    # Only declared, for Hugging Face's tools; no length is refused here.
    max_position_embeddings: int = 40_960
    model_type: str = "qwen3"  # the family's name in config.json, see training/families/rows.py
    # Tensors in files that hold several parameters of a block, each with these parameters' names.
    fused: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)

    def __post_init__(self):
        sizes = "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.layers:
            raise ValueError("layers must not be empty")
        mixers = [parts.mixer for parts in self.layers if parts.mixer.kind.has_keys]
        if self.attention_multiplier is not None and any(
            mixer.rotary_width != mixer.head_dim for mixer in mixers
        ):
            raise ValueError(
                "attention_multiplier is part of the rotary positions, which some layers leave out "
                "or have in part of each head"
            )

    def parts(self, layer: int) -> LayerParts:
        """The parts of a layer."""
        return self.layers[layer % len(self.layers)]

    def all_parts(self, kinds: Sequence[MixerKind] = ()) -> list[LayerParts]:
        """The parts of each layer; `kinds` are in place of the layers' own, one for each layer."""
        parts = [self.parts(layer) for layer in range(self.num_hidden_layers)]
        if not kinds:
            return parts
        return [part.with_kind(kind) for part, kind in zip(parts, kinds, strict=True)]

    @property
    def kinds(self) -> tuple[MixerKind, ...]:
        """The kind of attention, or of another mixer, of each layer."""
        return tuple(parts.mixer.kind for parts in self.all_parts())

    @property
    def attention(self) -> AttentionPart:
        """The first attention of the pattern; one head if no layer attends."""
        mixers = (parts.mixer for parts in self.layers if parts.mixer.kind.has_keys)
        return next(mixers, AttentionPart(1, 1))

    def with_attention(self, **changes: Any) -> "ModelConfig":
        """Returns the same model whose attention has other values of these fields in all layers,
        see `AttentionPart`."""
        layers = (
            replace(parts, mixer=replace(parts.mixer, **changes))
            if parts.mixer.kind.has_keys
            else parts
            for parts in self.layers
        )
        return replace(self, layers=tuple(layers))

    def with_kinds(self, *kinds: MixerKind) -> "ModelConfig":
        """Returns the same model with other kinds of attention, a pattern that repeats."""
        length = math.lcm(len(kinds), len(self.layers))
        layers = (self.parts(i).with_kind(kinds[i % len(kinds)]) for i in range(length))
        return replace(self, layers=tuple(layers))

    @property
    def rotary_width(self) -> int:
        """Elements of each head that are rotated; 0: none."""
        return max(parts.mixer.rotary_width for parts in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether some layer has a mixture of experts."""
        return any(parts.mlp.routes for parts in self.all_parts())

    @property
    def attends_in_groups(self) -> bool:
        """Whether the attention of some layer may work on some key/value heads at a time."""
        return any(parts.mixer.works_in_groups for parts in self.all_parts())

    @property
    def num_ends(self) -> int:
        """Matrices of embedding and head."""
        return 1 if self.tie_word_embeddings else 2

    def shard(self, ranks: int) -> "ModelConfig":
        """Returns what each of `ranks` that share all matrices has; they must divide heads, MLPs
        and vocabulary."""
        layers = tuple(parts.shard(ranks) for parts in self.layers)
        return replace(self, vocab_size=self.vocab_size // ranks, layers=layers)

    def layer_parameters(self, layer: int) -> dict[str, Parameter]:
        """The parameters of a block by their names in it, in the model's order."""
        return self._blocks[layer]

    @functools.cached_property
    def _blocks(self) -> list[dict[str, Parameter]]:
        return [*map(self._block_parameters, range(self.num_hidden_layers))]

    def _block_parameters(self, layer: int) -> dict[str, Parameter]:
        D, before, after = self.hidden_size, self.block.before, self.block.after
        norm, parts = Parameter((D,), "neutral"), self.parts(layer)
        mixer, mlp = (
            {f"{part.module}.{name}": p for name, p in part.parameters(D).items()} for part in parts
        )
        declared = {
            "input_layernorm.weight": before and norm,
            **mixer,
            "post_attention_layernorm.weight": norm,
            "pre_feedforward_layernorm.weight": before and after and norm,
            **mlp,
            "post_feedforward_layernorm.weight": after and norm,
        }
        parameters = {
            name: replace(parameter, block=layer)
            for name, parameter in declared.items()
            if parameter
        }
        for tensor, names in self.fused:
            first_row, num_rows = 0, sum(parameters[name].shape[0] for name in names)
            for name in names:
                place = Fused(tensor, num_rows, first_row)
                parameters[name] = replace(parameters[name], fused=place)
                first_row += parameters[name].shape[0]
        return parameters

    def parameters(self) -> dict[str, Parameter]:
        """All parameters by name, in the model's order; a tied head is not among them."""
        table, D = Parameter((self.vocab_size, self.hidden_size), shared_dim=0), self.hidden_size
        return {
            "embed_tokens.weight": table,
            **{
                f"layers.{i}.{name}": parameter
                for i, block in enumerate(self._blocks)
                for name, parameter in block.items()
            },
            "norm.weight": Parameter((D,), "neutral"),
            **({} if self.tie_word_embeddings else {"lm_head.weight": table}),
        }

    @property
    def exact(self) -> set[str]:
        """The names of parameters that stay float32 where the others are bf16."""
        return {name for name, parameter in self.parameters().items() if parameter.is_exact}

    def maps(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Rows and columns of the matrices of a block's linear maps, by projection."""
        return {
            parameter.target: parameter.shape
            for parameter in self.layer_parameters(layer).values()
            if parameter.role == "map" and parameter.target
        }

    def layer_matrix_parameters(self, layer: int = 0) -> int:
        """Elements of one block's matrices."""
        return sum(p.numel for p in self.layer_parameters(layer).values() if p.is_matrix)

    def layer_active_parameters(self, layer: int = 0) -> int:
        """Elements of one block's matrices that one token is multiplied by."""
        return sum(
            round(p.active * p.numel) for p in self.layer_parameters(layer).values() if p.is_matrix
        )

    def num_parameters(self) -> int:
        """All trained elements; a tied head counts once."""
        return sum(parameter.numel for parameter in self.parameters().values())


def _dense(num_heads: int, num_key_value_heads: int, intermediate_size: int) -> LayerParts:
    """Returns Qwen3's layer."""
    return LayerParts(
        AttentionPart(num_heads, num_key_value_heads), GatedMLPPart(intermediate_size)
    )


def _hybrid(
    num_heads: int, num_key_value_heads: int, delta_net: DeltaNet, mlp: GatedMLPPart | ExpertsPart
) -> tuple[LayerParts, ...]:
    """Returns Qwen3.5's pattern: three layers with a state, and a layer that attends."""
    attention = AttentionPart(
        num_heads, num_key_value_heads, head_dim=256, has_output_gate=True, rotary_dim=64
    )
    return (*3 * (LayerParts(delta_net, mlp),), LayerParts(attention, mlp))


_QWEN3 = ModelConfig(
    vocab_size=151_936, hidden_size=2560, num_hidden_layers=36, layers=(_dense(32, 8, 9728),)
)
_UNTIED = replace(_QWEN3, tie_word_embeddings=False)
_QWEN35 = ModelConfig(
    vocab_size=248_320,
    hidden_size=2560,
    num_hidden_layers=32,
    layers=_hybrid(16, 4, DeltaNet(16, 32), GatedMLPPart(9216)),
    block=BlockForm(offset=1.0, cast=False),
    rope_theta=1e7,
    max_position_embeddings=262_144,
    model_type="qwen3_5_text",
)
_QWEN35_SMALL = replace(_QWEN35, num_hidden_layers=24)
MODEL_SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        layers=(LayerParts(AttentionPart(4, 2, head_dim=32), GatedMLPPart(384)),),
        rope_theta=1e4,
    ),
    "0.6B": replace(_QWEN3, hidden_size=1024, num_hidden_layers=28, layers=(_dense(16, 8, 3072),)),
    "1.7B": replace(_QWEN3, hidden_size=2048, num_hidden_layers=28, layers=(_dense(16, 8, 6144),)),
    "4B": _QWEN3,
    "8B": replace(_UNTIED, hidden_size=4096, layers=(_dense(32, 8, 12_288),)),
    "14B": replace(
        _UNTIED, hidden_size=5120, num_hidden_layers=40, layers=(_dense(40, 8, 17_408),)
    ),
    "32B": replace(
        _UNTIED, hidden_size=5120, num_hidden_layers=64, layers=(_dense(64, 8, 25_600),)
    ),
    "qwen3-30B-A3B": replace(
        _UNTIED,
        hidden_size=2048,
        num_hidden_layers=48,
        layers=(LayerParts(AttentionPart(32, 4), ExpertsPart(128, 8, 768)),),
        model_type="qwen3_moe",
    ),
    "qwen3.5-0.8B": replace(
        _QWEN35_SMALL,
        hidden_size=1024,
        layers=_hybrid(8, 2, DeltaNet(16, 16), GatedMLPPart(3584)),
    ),
    "qwen3.5-2B": replace(
        _QWEN35_SMALL,
        hidden_size=2048,
        layers=_hybrid(8, 2, DeltaNet(16, 16), GatedMLPPart(6144)),
    ),
    "qwen3.5-4B": _QWEN35,
    "qwen3.5-9B": replace(
        _QWEN35,
        hidden_size=4096,
        layers=_hybrid(16, 4, DeltaNet(16, 32), GatedMLPPart(12_288)),
        tie_word_embeddings=False,
    ),
    "qwen3.5-27B": replace(
        _QWEN35,
        hidden_size=5120,
        num_hidden_layers=64,
        layers=_hybrid(24, 4, DeltaNet(16, 48), GatedMLPPart(17_408)),
        tie_word_embeddings=False,
    ),
    "qwen3.5-35B-A3B": replace(
        _QWEN35,
        hidden_size=2048,
        num_hidden_layers=40,
        layers=_hybrid(16, 2, DeltaNet(16, 32), ExpertsPart(256, 8, 512, shared_size=512)),
        tie_word_embeddings=False,
        model_type="qwen3_5_moe_text",
    ),
}
