"""The configuration of a decoder: its sizes, the parts of its layers, their parameters; and named
sizes.

Sizes have the letters of `model.py`: D hidden_size, H query heads, G key/value heads, K head_dim, F
intermediate_size, V vocab_size.
"""

from dataclasses import dataclass, fields, replace

from .attention.full import FULL
from .experts.part import ExpertsPart
from .gated_delta_net import DeltaNet
from .gated_mlp import GatedMLPPart
from .linear_cross_entropy import WORDS_MULTIPLE
from .parts import AttentionKind, LayerParts, Parameter
from .qkv_attention import AttentionPart
from .rope import RopeScaling

# Above this size the projected logits are never materialised (GB = 2**30 bytes).
CHUNKED_LOSS_THRESHOLD_BYTES = 10 * 2**30


@dataclass(frozen=True)
class Share:
    """Sizes of what one rank has of a decoder, whose matrices several ranks may share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    hidden_act: str = "silu"  # SwiGLU; "gelu_tanh" is GeGLU
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    # RMSNorms of q and k before rotary positions: of each "head", of all heads together ("width"),
    # or none.
    qk_norm: str | None = "head"
    norms_before: bool = True  # RMSNorms of what attention and the MLP read
    norms_after: bool = False  # RMSNorms of what they add to the residual stream
    norm_weight_offset: float = 0.0  # added to the weights of all norms; Gemma's is 1
    norm_cast_before_weight: bool = (
        True  # norms round before they multiply by the weight, as Llama's do
    )
    has_qkv_biases: bool = False
    has_output_gate: bool = (
        False  # attention's output is multiplied by sigmoid(gate), a gate for each element
    )
    rotary_dim: int | None = None  # elements of each head that are rotated; None: all
    # Granite's scalars.
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # multiplies what attention and MLP add to the residual stream
    attention_multiplier: float | None = (
        None  # multiplies queries times keys; None: 1 / sqrt(head_dim)
    )
    logits_scaling: float = 1.0  # divides the logits
    # Both repeat over the layers: (window, window, window, full) is a pattern of four.
    layer_kinds: tuple[AttentionKind | DeltaNet, ...] = (FULL,)
    layer_rotates: tuple[bool, ...] = (True,)  # whether a layer has rotary positions
    # Layers with a window have rotary frequencies of this theta, which rope_scaling leaves alone;
    # None: no own ones.
    local_rope_theta: float | None = None
    # MLPs that repeat over the layers, where not all are of intermediate_size and hidden_act.
    layer_mlps: tuple[GatedMLPPart | ExpertsPart, ...] = ()

    @property
    def kinds(self) -> tuple[AttentionKind | DeltaNet, ...]:
        """The kind of attention, or of another mixer, of each layer."""
        return tuple(
            self.layer_kinds[i % len(self.layer_kinds)] for i in range(self.num_hidden_layers)
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head width."""
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim

    @property
    def rotary_width(self) -> int:
        """Elements of each head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def has_experts(self) -> bool:
        """Whether some layer has a mixture of experts."""
        return any(
            isinstance(self.parts(layer).mlp, ExpertsPart)
            for layer in range(self.num_hidden_layers)
        )

    @property
    def attends_in_groups(self) -> bool:
        """Whether the attention of some layer may work on some key/value heads at a time."""
        return any(
            self.parts(layer).mixer.works_in_groups for layer in range(self.num_hidden_layers)
        )

    @property
    def num_ends(self) -> int:
        """Matrices of embedding and head."""
        return 1 if self.tie_word_embeddings else 2

    def projected_logits_bytes(self, num_tokens: int, bytes_per_logit: int = 2) -> int:
        """Size of the [num_tokens, V] logits that the standard loss materialises."""
        return num_tokens * self.vocab_size * bytes_per_logit

    def uses_chunked_loss(
        self, num_tokens: int, bytes_per_logit: int = 2, loss_impl: str = "auto"
    ) -> bool:
        """The switch: chunked above `CHUNKED_LOSS_THRESHOLD_BYTES`, unless `loss_impl` is "chunked"
        or "standard".

        Chunked too where the vocabulary is no multiple of 8: products with whole logits take twice
        as long.
        """
        if loss_impl != "auto":
            return loss_impl == "chunked"
        is_odd = self.vocab_size % WORDS_MULTIPLE != 0
        return (
            is_odd
            or self.projected_logits_bytes(num_tokens, bytes_per_logit)
            > CHUNKED_LOSS_THRESHOLD_BYTES
        )

    def parts(self, layer: int) -> LayerParts:
        """The parts of a layer."""
        kind = self.layer_kinds[layer % len(self.layer_kinds)]
        rotates = self.layer_rotates[layer % len(self.layer_rotates)]
        mlps = self.layer_mlps or (GatedMLPPart(self.intermediate_size, self.hidden_act),)
        mixer: AttentionPart | DeltaNet
        if isinstance(kind, DeltaNet):
            mixer = kind
        else:
            mixer = AttentionPart(
                *self.heads,
                kind,
                self.qk_norm,
                self.has_qkv_biases,
                rotates,
                self.has_output_gate,
                self.rotary_dim,
            )
        return LayerParts(mixer, mlps[layer % len(mlps)])

    def layer_parameters(self, layer: int) -> dict[str, Parameter]:
        """The parameters of a block by their names in it, in the model's order."""
        D, before, after = self.hidden_size, self.norms_before, self.norms_after
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
        return {name: parameter for name, parameter in declared.items() if parameter}

    def parameters(self) -> dict[str, Parameter]:
        """All parameters by name, in the model's order; a tied head is not among them."""
        table, D = Parameter((self.vocab_size, self.hidden_size), shared_dim=0), self.hidden_size
        blocks = enumerate(map(self.layer_parameters, range(self.num_hidden_layers)))
        return {
            "embed_tokens.weight": table,
            **{
                f"layers.{i}.{name}": parameter
                for i, block in blocks
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
            name.split(".")[-2]: p.shape
            for name, p in self.layer_parameters(layer).items()
            if p.is_map
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


@dataclass(frozen=True)
class ModelConfig(Share):
    """A decoder, whole; `MODEL_SIZES` holds the named ones.

    Raises ValueError for a size, activation, norm or pattern of layers that does not exist, heads
    that do not divide, an odd head_dim, an attention_multiplier beside layers without rotary
    positions.
    """

    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    initializer_range: float = 0.02
    router_aux_loss_coef: float = (
        0.0  # factor of the loss that balances experts; 0: it is not added
    )
    max_position_embeddings: int = (
        40_960  # only declared, for Hugging Face's tools; no length is refused here
    )
    model_type: str = "qwen3"  # the family's name in config.json, see training/families/rows.py

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}), "
                f"got {self.num_attention_heads}"
            )
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_dim:
            raise ValueError(
                "head_dim and rotary_dim must be even for rotary positions, got "
                f"{self.rotary_width}"
            )
        GatedMLPPart(self.intermediate_size, self.hidden_act)  # refuses an unknown activation
        if self.hidden_act != "silu" and any(
            isinstance(kind, DeltaNet) for kind in self.layer_kinds
        ):
            raise ValueError(
                f"gated delta nets have SiLU, so hidden_act must be silu, got {self.hidden_act!r}"
            )
        if self.hidden_act != "silu" and self.has_experts:
            raise ValueError(
                f"experts have SiLU, so hidden_act must be silu, got {self.hidden_act!r}"
            )
        if not self.layer_kinds or not self.layer_rotates:
            raise ValueError("layer_kinds and layer_rotates must not be empty")
        if self.attention_multiplier is not None and not all(self.layer_rotates):
            raise ValueError(
                "attention_multiplier is part of the rotary positions, which layer_rotates leaves "
                "out"
            )
        if self.attention_multiplier is not None and self.rotary_dim is not None:
            raise ValueError(
                "attention_multiplier is part of the rotary positions, which rotary_dim has in part"
            )
        if self.qk_norm not in ("head", "width", None) or not (
            self.norms_before or self.norms_after
        ):
            raise ValueError(
                f"qk_norm must be head, width or None, got {self.qk_norm!r}, and a block must have "
                "norms"
            )

    def share(self, ranks: int = 1) -> Share:
        """The sizes of each of `ranks` that share all matrices; they must divide heads, MLP and
        vocabulary."""
        sizes = {field.name: getattr(self, field.name) for field in fields(Share)}
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        ):
            sizes[name] //= ranks
        return Share(**sizes | {"layer_mlps": tuple(mlp.share(ranks) for mlp in self.layer_mlps)})


_QWEN3 = ModelConfig(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
_UNTIED = replace(_QWEN3, tie_word_embeddings=False)
_QWEN35 = ModelConfig(
    vocab_size=248_320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4, head_dim=256, norm_weight_offset=1.0, norm_cast_before_weight=False,
    has_output_gate=True,
    rotary_dim=64, layer_kinds=(*3 * (DeltaNet(16, 32),), FULL), rope_theta=1e7,
    max_position_embeddings=262_144,
    model_type="qwen3_5_text",
)  # fmt: skip
_QWEN35_SMALL = replace(
    _QWEN35, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
    layer_kinds=(*3 * (DeltaNet(16, 16),), FULL),
)  # fmt: skip
_30B_A3B = replace(
    _UNTIED, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_key_value_heads=4,
    layer_mlps=(ExpertsPart(128, 8, 768),), model_type="qwen3_moe",
)  # fmt: skip
_35B_A3B = replace(
    _QWEN35, hidden_size=2048, intermediate_size=512, num_hidden_layers=40, num_key_value_heads=2,
    tie_word_embeddings=False, layer_mlps=(ExpertsPart(256, 8, 512, shared_size=512),),
    model_type="qwen3_5_moe_text",
)  # fmt: skip
MODEL_SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=1e4,
    ),
    "0.6B": replace(
        _QWEN3,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
    ),
    "1.7B": replace(
        _QWEN3,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
    ),
    "4B": _QWEN3,
    "8B": replace(_UNTIED, hidden_size=4096, intermediate_size=12288),
    "14B": replace(
        _UNTIED,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "32B": replace(
        _UNTIED,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
    ),
    "qwen3-30B-A3B": _30B_A3B,
    "qwen3.5-0.8B": replace(_QWEN35_SMALL, hidden_size=1024, intermediate_size=3584),
    "qwen3.5-2B": replace(_QWEN35_SMALL, hidden_size=2048, intermediate_size=6144),
    "qwen3.5-4B": _QWEN35,
    "qwen3.5-9B": replace(
        _QWEN35, hidden_size=4096, intermediate_size=12_288, tie_word_embeddings=False
    ),
    "qwen3.5-27B": replace(
        _QWEN35,
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=64,
        num_attention_heads=24,
        layer_kinds=(*3 * (DeltaNet(16, 48),), FULL),
        tie_word_embeddings=False,
    ),
    "qwen3.5-35B-A3B": _35B_A3B,
}
