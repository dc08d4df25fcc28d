"""The decoder: configuration, sizes, attention, MLP, block, transformer, loss, generation.

Shapes: B batch, T tokens, D model width, H query heads, G key/value heads, K head width, F feed-forward width, V vocab.
The architecture is Qwen3's (arXiv 2505.09388): RMSNorm before each half of a block, RMSNorm on each query and key head
before rotary positions, grouped-query attention, a gated MLP, no biases. Other families differ by what a `ModelConfig`
has: other norms, biases of q, k and v, layers without rotary positions or with frequencies of their own, scalars.
Parameter names are Hugging Face's.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention.cache import KeyValueCache
from kernels.attention.documents import Documents
from kernels.attention.full import FULL
from kernels.convolution import WIDTH
from kernels.cross_entropy import cross_entropy
from kernels.gated_delta_net import DeltaNet, DeltaNetParameters, StateCache, gated_delta_net
from kernels.gated_mlp import GatedMLPPart, gated_mlp
from kernels.head_exchange import HeadExchange
from kernels.linear import PLAIN
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.lora import adapted
from kernels.parts import AttentionKind, LayerParts, Linear, Parameter
from kernels.qkv_attention import AttentionPart, QKVParameters, gated, project_heads, qkv_attention
from kernels.rms_norm import rms_norm
from kernels.rope import RopeScaling, RotaryTables
from kernels.sampling import choose_tokens
from kernels.tensor_parallel import TensorRanks, local
from kernels.torch_internals import assert_async

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
# Above this size the projected logits are never materialised (GB = 2**30 bytes).
CHUNKED_LOSS_THRESHOLD_BYTES = 10 * 2**30
GATES = ".g_proj."  # in the names of the gates' parameters


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
    # RMSNorms of q and k before rotary positions: of each "head", of all heads together ("width"), or none.
    qk_norm: str | None = "head"
    norms_before: bool = True  # RMSNorms of what attention and the MLP read
    norms_after: bool = False  # RMSNorms of what they add to the residual stream
    norm_weight_offset: float = 0.0  # added to the weights of all norms; Gemma's is 1
    norm_cast_before_weight: bool = True  # norms round before they multiply by the weight, as Llama's do
    has_qkv_biases: bool = False
    has_output_gate: bool = False  # attention's output is multiplied by sigmoid(gate), a gate for each element
    rotary_dim: int | None = None  # elements of each head that are rotated; None: all
    # Granite's scalars.
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # multiplies what attention and MLP add to the residual stream
    attention_multiplier: float | None = None  # multiplies queries times keys; None: 1 / sqrt(head_dim)
    logits_scaling: float = 1.0  # divides the logits
    # Both repeat over the layers: (window, window, window, full) is a pattern of four.
    layer_kinds: tuple[AttentionKind | DeltaNet, ...] = (FULL,)
    layer_rotates: tuple[bool, ...] = (True,)  # whether a layer has rotary positions
    # Layers with a window have rotary frequencies of this theta, which rope_scaling leaves alone; None: no own ones.
    local_rope_theta: float | None = None
    # MLPs that repeat over the layers, where not all are of intermediate_size and hidden_act.
    layer_mlps: tuple[GatedMLPPart, ...] = ()

    @property
    def kinds(self) -> tuple[AttentionKind | DeltaNet, ...]:
        """The kind of attention, or of another mixer, of each layer."""
        return tuple(self.layer_kinds[i % len(self.layer_kinds)] for i in range(self.num_hidden_layers))

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head width."""
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim

    @property
    def rotary_width(self) -> int:
        """Elements of each head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def attends_in_groups(self) -> bool:
        """Whether the attention of some layer may work on some key/value heads at a time."""
        return any(self.parts(layer).mixer.works_in_groups for layer in range(self.num_hidden_layers))

    def projected_logits_bytes(self, num_tokens: int, bytes_per_logit: int = 2) -> int:
        """Size of the [num_tokens, V] logits that the standard loss materialises."""
        return num_tokens * self.vocab_size * bytes_per_logit

    def uses_chunked_loss(self, num_tokens: int, bytes_per_logit: int = 2, loss_impl: str = "auto") -> bool:
        """The switch: chunked above `CHUNKED_LOSS_THRESHOLD_BYTES`, unless `loss_impl` is "chunked" or "standard"."""
        if loss_impl != "auto":
            return loss_impl == "chunked"
        return self.projected_logits_bytes(num_tokens, bytes_per_logit) > CHUNKED_LOSS_THRESHOLD_BYTES

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
                *self.heads, kind, self.qk_norm, self.has_qkv_biases, rotates, self.has_output_gate, self.rotary_dim
            )
        return LayerParts(mixer, mlps[layer % len(mlps)])

    def layer_parameters(self, layer: int) -> dict[str, Parameter]:
        """The parameters of a block by their names in it, in the model's order."""
        D, before, after = self.hidden_size, self.norms_before, self.norms_after
        norm, parts = Parameter((D,), "neutral"), self.parts(layer)
        mixer, mlp = ({f"{part.module}.{name}": p for name, p in part.parameters(D).items()} for part in parts)
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
            **{f"layers.{i}.{name}": parameter for i, block in blocks for name, parameter in block.items()},
            "norm.weight": Parameter((D,), "neutral"),
            **({} if self.tie_word_embeddings else {"lm_head.weight": table}),
        }

    def maps(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Rows and columns of the matrices of a block's linear maps, by projection."""
        return {name.split(".")[-2]: p.shape for name, p in self.layer_parameters(layer).items() if p.is_map}

    def layer_matrix_parameters(self, layer: int = 0) -> int:
        """Elements of one block's matrices."""
        return sum(p.numel for p in self.layer_parameters(layer).values() if len(p.shape) == 2)

    def num_parameters(self) -> int:
        """All trained elements; a tied head counts once."""
        return sum(parameter.numel for parameter in self.parameters().values())


@dataclass(frozen=True)
class ModelConfig(Share):
    """A decoder, whole; `MODEL_SIZES` holds the named ones.

    Raises:
        ValueError: a size, activation, norm or pattern of layers that does not exist, heads that do not divide, an odd
            head_dim, an attention_multiplier beside layers without rotary positions.
    """

    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    initializer_range: float = 0.02
    max_position_embeddings: int = 40_960  # only declared, for Hugging Face's tools; no length is refused here
    model_type: str = "qwen3"  # the family's name in config.json, see training/families/rows.py

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads ({self.num_key_value_heads}), "
                f"got {self.num_attention_heads}"
            )
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_dim:
            raise ValueError(f"head_dim and rotary_dim must be even for rotary positions, got {self.rotary_width}")
        GatedMLPPart(self.intermediate_size, self.hidden_act)  # refuses an unknown activation
        if self.hidden_act != "silu" and any(isinstance(kind, DeltaNet) for kind in self.layer_kinds):
            raise ValueError(f"gated delta nets have SiLU, so hidden_act must be silu, got {self.hidden_act!r}")
        if not self.layer_kinds or not self.layer_rotates:
            raise ValueError("layer_kinds and layer_rotates must not be empty")
        if self.attention_multiplier is not None and not all(self.layer_rotates):
            raise ValueError("attention_multiplier is part of the rotary positions, which layer_rotates leaves out")
        if self.attention_multiplier is not None and self.rotary_dim is not None:
            raise ValueError("attention_multiplier is part of the rotary positions, which rotary_dim has in part")
        if self.qk_norm not in ("head", "width", None) or not (self.norms_before or self.norms_after):
            raise ValueError(f"qk_norm must be head, width or None, got {self.qk_norm!r}, and a block must have norms")

    def share(self, ranks: int = 1) -> Share:
        """The sizes of each of `ranks` that share all matrices; they must divide heads, MLP and vocabulary."""
        sizes = {field.name: getattr(self, field.name) for field in fields(Share)}
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            sizes[name] //= ranks
        return Share(**sizes | {"layer_mlps": tuple(mlp.share(ranks) for mlp in self.layer_mlps)})


_QWEN3 = ModelConfig(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
_UNTIED = replace(_QWEN3, tie_word_embeddings=False)
_QWEN35 = ModelConfig(
    vocab_size=248_320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16,
    num_key_value_heads=4, head_dim=256, norm_weight_offset=1.0, norm_cast_before_weight=False, has_output_gate=True,
    rotary_dim=64, layer_kinds=(*3 * (DeltaNet(16, 32),), FULL), rope_theta=1e7, max_position_embeddings=262_144,
    model_type="qwen3_5_text",
)  # fmt: skip
_QWEN35_SMALL = replace(
    _QWEN35, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
    layer_kinds=(*3 * (DeltaNet(16, 16),), FULL),
)  # fmt: skip
MODEL_SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, rope_theta=1e4,
    ),
    "0.6B": replace(_QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "1.7B": replace(_QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "4B": _QWEN3,
    "8B": replace(_UNTIED, hidden_size=4096, intermediate_size=12288),
    "14B": replace(_UNTIED, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40),
    "32B": replace(_UNTIED, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64),
    "qwen3.5-0.8B": replace(_QWEN35_SMALL, hidden_size=1024, intermediate_size=3584),
    "qwen3.5-2B": replace(_QWEN35_SMALL, hidden_size=2048, intermediate_size=6144),
    "qwen3.5-4B": _QWEN35,
    "qwen3.5-9B": replace(_QWEN35, hidden_size=4096, intermediate_size=12_288, tie_word_embeddings=False),
    "qwen3.5-27B": replace(
        _QWEN35, hidden_size=5120, intermediate_size=17_408, num_hidden_layers=64, num_attention_heads=24,
        layer_kinds=(*3 * (DeltaNet(16, 48),), FULL), tie_word_embeddings=False,
    ),
}  # fmt: skip


Cache = KeyValueCache | StateCache
Rotation = tuple[Tensor, Tensor]  # cos and sin as `rope` takes them, [T, K/2] or [B, T, K/2] float32


@dataclass
class Context:
    """Tokens as every block must know them: their rotations, documents and caches."""

    rotations: tuple[Rotation, Rotation]  # first of layers that see everything, then of layers with a window
    longest: int  # tokens of the longest document, the cached ones included
    segments: Tensor | None = None  # the packed documents, see kernels/attention/documents.py
    caches: list[Any] | None = None

    def cache(self, layer: int) -> Any:
        """Returns a layer's cache, of the kind that its mixer makes."""
        return self.caches[layer] if self.caches else None


class RMSNorm(nn.Module):
    impl = "auto"  # see kernels.common.IMPLEMENTATIONS; set from outside

    def __init__(self, size: int, share: Share):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1 - share.norm_weight_offset))
        self.eps, self.offset, self.casts_first = (
            share.rms_norm_eps, share.norm_weight_offset, share.norm_cast_before_weight
        )  # fmt: skip

    def forward(self, x: Tensor, residual: Tensor | None = None):
        return rms_norm(
            x, local(self.weight), self.eps, residual=residual, weight_offset=self.offset,
            cast_before_weight=self.casts_first, impl=self.impl,
        )  # fmt: skip


class Embedding(nn.Embedding):
    tensor_ranks = TensorRanks(None)  # ranks that share its matrix; set from outside

    def reset_parameters(self) -> None:
        """Leaves a weight on the meta device alone: PyTorch would import its compiler, a second, to draw nothing."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tensor_ranks.embed(input_ids, local(self.weight))


class Attention(nn.Module):
    def __init__(self, share: Share, layer: int):
        super().__init__()
        D, part = share.hidden_size, share.parts(layer).mixer
        (H, G, K), bias = part.heads, part.has_biases
        q_heads = H * (1 + part.has_output_gate)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, heads * K, bias=bias) for heads in (q_heads, G, G))
        self.o_proj = nn.Linear(H * K, D, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(size, share) if size else None for size in part.norm_sizes)
        self.g_proj = nn.Linear(D, part.num_gates) if part.num_gates else None
        self.layer, self.head_dim, self.eps = layer, K, share.rms_norm_eps
        self.rotates, self.is_local = part.rotates, part.kind.reach is not None
        self.has_output_gate, self.rotary_dim = part.has_output_gate, part.rotary_dim
        # Knobs, set from outside.
        self.kind = part.kind
        self.linear: Linear = PLAIN
        self.backend = "auto"  # see kernels.attention.full.BACKENDS
        self.impl = "auto"  # see kernels.common.IMPLEMENTATIONS
        self.heads_at_a_time: int | None = None  # key/value heads; None: all
        self.exchange: HeadExchange | None = None  # between ranks that share sequences; `documents` are then given
        self.tensor_ranks = TensorRanks(None)  # ranks that share its matrices

    def qkv_parameters(self) -> QKVParameters:
        """This rank's part of the projections to q, k and v, and the norms of their heads."""
        projections, norms = (self.q_proj, self.k_proj, self.v_proj), (self.q_norm, self.k_norm)
        return QKVParameters(
            [adapted(projection) for projection in projections],
            [local(projection.bias) for projection in projections if projection.bias is not None],
            [self.tensor_ranks.enter(self._scale(norm)) for norm in norms if norm is not None],
            self.eps,
            self.head_dim,
            self.has_output_gate,
            self.rotary_dim,
        )

    def _scale(self, norm: RMSNorm) -> Tensor:
        """Returns what a norm of heads multiplies by: its weight; in float32 where it rounds only after the weight."""
        weight = local(norm.weight)
        return weight if norm.casts_first else weight.float() + norm.offset

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        ranks, qkv, o_weight = self.tensor_ranks, self.qkv_parameters(), adapted(self.o_proj)
        kind, linear, impl = self.kind.for_longest(context.longest), self.linear, self.impl
        cos, sin = context.rotations[self.is_local] if self.rotates else (None, None)
        x_BTD, gates = ranks.enter(x_BTD), None
        if self.g_proj is not None:
            gates = PLAIN(x_BTD, *map(local, self.g_proj.parameters())).unflatten(-1, (-1, kind.gates_per_head))
        cache = context.cache(self.layer)
        if cache is None or cache.length == 0:
            attended_BTD = qkv_attention(
                x_BTD, qkv, o_weight, cos, sin, context.segments, kind=kind, gates=gates, linear=linear, impl=impl,
                heads_at_a_time=self.heads_at_a_time, exchange=None if cache is not None else self.exchange,
                backend=self.backend,
            )  # fmt: skip
            if cache is not None:  # a whole prompt: keys and values once more, with one query head that is not used
                one_head = qkv.with_one_query_head()
                cache.append(*project_heads(x_BTD, one_head, cos, sin, linear, impl)[1:3])
            return ranks.leave(attended_BTD)
        q_BTHK, *new, output_gate = project_heads(x_BTD, qkv, cos, sin, linear, impl)
        attended_BTHK = gated(kind.decode(q_BTHK, *cache.append(*new), gates), output_gate, impl)
        return ranks.leave(linear(attended_BTHK.flatten(2), o_weight))

    def new_cache(self, max_length: int) -> KeyValueCache:
        return KeyValueCache(max_length, self.kind.reach)


class GatedDeltaNet(nn.Module):
    def __init__(self, share: Share, layer: int):
        super().__init__()
        self.kind, self.layer, self.eps = share.parts(layer).mixer, layer, share.rms_norm_eps
        D, (_, H, _, V), C = share.hidden_size, self.kind.sizes, self.kind.channels
        self.dt_bias, self.A_log = (nn.Parameter(torch.zeros(H)) for _ in range(2))
        self.in_proj_qkv, self.in_proj_z = (nn.Linear(D, rows, bias=False) for rows in (C, H * V))
        self.in_proj_b, self.in_proj_a = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.conv1d = nn.Conv1d(C, C, WIDTH, groups=C, bias=False)
        self.norm = nn.RMSNorm(V)
        self.out_proj = nn.Linear(H * V, D, bias=False)
        # Knobs, set from outside; see Attention.
        self.linear: Linear = PLAIN
        self.impl = "auto"

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        projections = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a, self.out_proj
        vectors = self.A_log, self.dt_bias, self.norm.weight
        qkv, z, b, a, out = map(adapted, projections)
        A_log, dt_bias, norm = map(local, vectors)
        convolution = local(self.conv1d.weight).squeeze(1)
        parameters = DeltaNetParameters(qkv, z, b, a, convolution, A_log, dt_bias, norm, out, self.eps)
        return gated_delta_net(
            x_BTD, parameters, self.kind, context.segments, cache=context.cache(self.layer),
            linear=self.linear, impl=self.impl,
        )  # fmt: skip

    def new_cache(self, max_length: int) -> StateCache:
        return StateCache()


class GatedMLP(nn.Module):
    def __init__(self, share: Share, layer: int):
        super().__init__()
        D, part = share.hidden_size, share.parts(layer).mlp
        F_, self.activation = part.intermediate_size, part.activation
        self.skippable = not share.norms_after  # whether no gradient depends on the result
        self.gate_proj = nn.Linear(D, F_, bias=False)
        self.up_proj = nn.Linear(D, F_, bias=False)
        self.down_proj = nn.Linear(F_, D, bias=False)
        # Knobs, set from outside.
        self.linear: Linear = PLAIN
        self.impl = "auto"  # see kernels.common.IMPLEMENTATIONS
        self.tile_size: int | None = None  # rows at a time, where memory is short
        self.tensor_ranks = TensorRanks(None)  # ranks that share its matrices

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights = [adapted(projection) for projection in (self.gate_proj, self.up_proj, self.down_proj)]
        y_BTD = gated_mlp(
            self.tensor_ranks.enter(x_BTD), *weights, activation=self.activation, tile_size=self.tile_size,
            skippable=self.skippable, linear=self.linear, impl=self.impl,
        )  # fmt: skip
        return self.tensor_ranks.leave(y_BTD, skippable=self.skippable)


class Block(nn.Module):
    def __init__(self, share: Share, layer: int):
        super().__init__()
        before, after = share.norms_before, share.norms_after
        self.input_layernorm = RMSNorm(share.hidden_size, share) if before else None
        part = share.parts(layer).mixer
        mixer = GatedDeltaNet(share, layer) if isinstance(part, DeltaNet) else Attention(share, layer)
        self.add_module(part.module, mixer)
        self._mixer = part.module
        self.post_attention_layernorm = RMSNorm(share.hidden_size, share)  # before the MLP, unless norms come after
        self.pre_feedforward_layernorm = RMSNorm(share.hidden_size, share) if before and after else None
        self.mlp = GatedMLP(share, layer)
        self.post_feedforward_layernorm = RMSNorm(share.hidden_size, share) if after else None
        self.norms_after, self.multiplier = after, share.residual_multiplier

    @property
    def mixer(self) -> nn.Module:
        """The part that reads other tokens: self_attn or linear_attn."""
        return getattr(self, self._mixer)

    @property
    def mlp_norm(self) -> RMSNorm | None:
        """The norm of what the MLP reads."""
        return self.pre_feedforward_layernorm if self.norms_after else self.post_attention_layernorm

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        # No name holds what attention reads, so that it is freed once attention has read it.
        before = self.input_layernorm or nn.Identity()
        attended_BTD = scaled(self.mixer(before(x_BTD), context), self.multiplier)
        if self.norms_after:
            attended_BTD = self.post_attention_layernorm(attended_BTD)
        if self.mlp_norm is None:
            normed_BTD = x_BTD = x_BTD + attended_BTD
        else:
            normed_BTD, x_BTD = self.mlp_norm(attended_BTD, residual=x_BTD)
        if self.post_feedforward_layernorm is None:
            return x_BTD + scaled(self.mlp(normed_BTD), self.multiplier)
        return x_BTD + self.post_feedforward_layernorm(scaled(self.mlp(normed_BTD), self.multiplier))


def _shifted_targets(labels: Tensor | None, targets: Tensor | None, documents: Documents | None) -> Tensor | None:
    """Returns the targets of the loss, from labels or as `Transformer.forward` was given them.

    The last position of a whole sequence has no target and is left out. Were it kept, the chunked loss would have to
    gather the rows that have a target.
    """
    if labels is not None:
        if documents is not None:
            labels = labels.masked_fill(documents.positions_BT.to(labels.device) == 0, IGNORE_INDEX)
        return labels[:, 1:]
    if targets is None or (documents is not None and not documents.are_whole):
        return targets
    has_none = (targets[:, -1] == IGNORE_INDEX).all()
    assert_async(has_none, "targets must be -100 at the last position of a whole sequence")
    return targets[:, :-1]


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a scalar of the family; x itself where it has none."""
    return x if factor == 1 else x * factor


@dataclass
class ModelOutput:
    loss: Tensor | None = None  # float32 scalar
    logits: Tensor | None = None  # [B, T, V]; without a gradient where ranks share the head
    hidden_states: Tensor | None = None  # [B, T, D], what the head gets


torch.export.register_dataclass(ModelOutput)  # so that FSDP finds the tensors in it


class Transformer(nn.Module):
    """The decoder with its loss. Parallelism, activation placement and compilation are applied from outside.

    Args:
        config: the whole decoder.
        tensor_ranks: ranks that share each matrix; this model has one rank's share.
    """

    def __init__(self, config: ModelConfig, tensor_ranks: int = 1):
        super().__init__()
        self.config, self.share, self.declared = config, (share := config.share(tensor_ranks)), config.parameters()
        self.embed_tokens = Embedding(share.vocab_size, share.hidden_size)
        self.layers = nn.ModuleList(Block(share, layer) for layer in range(share.num_hidden_layers))
        self.norm = RMSNorm(share.hidden_size, share)
        if not share.tie_word_embeddings:
            self.lm_head = nn.Linear(share.hidden_size, share.vocab_size, bias=False)
        # Queries and keys have one factor each, whose square turns attention's 1 / sqrt(head_dim) into the multiplier.
        multiplier = config.attention_multiplier
        factor = 1.0 if multiplier is None else (multiplier * config.head_dim**0.5) ** 0.5
        width = config.rotary_width
        self.rotary = self.local_rotary = RotaryTables(width, config.rope_theta, config.rope_scaling, factor)
        if config.local_rope_theta is not None:
            self.local_rotary = RotaryTables(width, config.local_rope_theta, factor=factor)
        # Knobs, set from outside.
        self.loss_impl = "auto"  # "chunked" or "standard" force one
        self.linear: Linear = PLAIN  # the head's
        self.impl = "auto"  # see kernels.common.IMPLEMENTATIONS
        self.tensor_ranks = TensorRanks(None)  # ranks that share the head's matrix
        self.head_visit: Callable[[], AbstractContextManager] = nullcontext  # in it the head's matrix is on the device
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                self.initialize_parameter(name, parameter)

    @torch.no_grad()
    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill `tensor` with the initial value of the parameter `name`, as `kernels.parts.Parameter` declares it.

        Matrices that write into the residual stream are scaled by 1/sqrt(2 x layers), as in GPT-2. Gates of attention
        start near 1/2, as in flash-linear-attention: a small matrix and no bias. An adapter, which no part declares,
        starts as in peft: A is uniform within 1 / sqrt(width), B is zero.
        """
        declared = self.declared.get(name)
        start = declared.start if declared else "adapter"
        if start in ("neutral", "one"):
            tensor.fill_(1.0 - self.config.norm_weight_offset * (start == "neutral"))
        elif start == "decay":
            tensor.uniform_(0.01, 16, generator=generator).log_()
        elif start == "zero" or name.endswith("lora_B.weight"):
            tensor.zero_()
        elif start == "adapter":
            bound = tensor.shape[-1] ** -0.5
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            scale = (2 * self.config.num_hidden_layers) ** -0.5 if start == "residual" else 1.0
            tensor.normal_(0.0, scale * self.config.initializer_range, generator=generator)

    def cast(self, dtype: torch.dtype, *, only_frozen: bool = False) -> Self:
        """Casts the parameters but those declared exact, or of these the frozen ones alone."""
        exact = {id(p) for name, p in self.named_parameters() if name in self.declared and self.declared[name].is_exact}
        return self._apply(
            lambda p: p if id(p) in exact or (only_frozen and p.requires_grad) else p.to(dtype), recurse=True
        )

    @property
    def output_weight(self) -> Tensor:
        """The head's matrix [V, D], or this rank's part of it."""
        return local((self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        documents: Documents | None = None,
        denominator: Tensor | float | None = None,
        num_targets: int | None = None,
        return_logits: bool = False,
        return_hidden_states: bool = False,
        caches: list[Cache] | None = None,
    ) -> ModelOutput:
        """Run the decoder.

        Args:
            input_ids: int64 [B, T].
            labels: int64 [B, T], unshifted: position t is trained to predict labels[t + 1]; -100 is ignored.
            targets: int64 [B, T], in place of `labels`: position t is trained to predict targets[t]; -100 is ignored.
                Nothing is masked here. The last position of a whole sequence must have -100.
            documents: the documents packed in each row. They do not see each other, positions start at 0 in each,
                and no label is predicted by a token of the document before its own. None: each row is one.
            denominator: divides the summed loss (valid targets of all micro-batches and ranks); None: the valid
                targets of this call.
            num_targets: number of targets that are not -100; a caller that knows it spares the host a wait for the GPU.
            return_logits, return_hidden_states: fill those fields of the output.
            caches: one `KeyValueCache` per layer, while generating.

        Raises:
            ValueError: both labels and targets; tensors of unequal shape; documents together with caches.
            RuntimeError: a target at the last position of a whole sequence.
        """
        if labels is not None and targets is not None:
            raise ValueError("give either labels or targets")
        positions_BT = None if documents is None else documents.positions_BT
        for name, tensor in (("labels", labels), ("targets", targets), ("documents", positions_BT)):
            if tensor is not None and tensor.shape != input_ids.shape:
                expected, got = tuple(input_ids.shape), tuple(tensor.shape)
                raise ValueError(f"{name} must have input_ids' shape {expected}, got {got}")
        targets = _shifted_targets(labels, targets, documents)
        x_BTD, context = self.embed(input_ids), self.context(input_ids, documents, caches)
        for layer in self.layers:
            x_BTD = layer(x_BTD, context)
        x_BTD = self.head_input(x_BTD)
        with self.head_visit():
            logits_BTV = self.linear(self.tensor_ranks.enter(x_BTD), self.output_weight) if return_logits else None
            loss = None if targets is None else self._loss(x_BTD, targets, logits_BTV, denominator, num_targets)
        return ModelOutput(
            loss=loss,
            logits=self.tensor_ranks.gather(logits_BTV) if logits_BTV is not None else None,
            hidden_states=x_BTD if return_hidden_states else None,
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """Returns the first block's input."""
        x_BTD, multiplier = self.embed_tokens(input_ids), self.share.embedding_multiplier
        return x_BTD if multiplier == 1 else x_BTD * torch.tensor(multiplier, dtype=x_BTD.dtype)  # rounds as Gemma does

    def head_input(self, x_BTD: Tensor) -> Tensor:
        """Returns what the head multiplies, of the last block's output."""
        return scaled(self.norm(x_BTD), 1 / self.share.logits_scaling)

    def context(
        self,
        input_ids: Tensor,
        documents: Documents | None = None,
        caches: list[Cache] | None = None,
    ) -> Context:
        """Returns what every block must know of the tokens; arguments as `forward`."""
        (_, T), device = input_ids.shape, input_ids.device
        start = caches[0].length if caches else 0
        if caches and (documents is not None or (start and T > 1)):
            raise ValueError("with a key/value cache, give one document, and one token at a time after the prompt")
        if documents is None:
            rotations = self.rotations(start + T, device, slice(start, start + T))
            return Context(rotations, start + T, caches=caches)
        # The positions in a share of a sequence reach as far as the whole sequence's longest document.
        longest, positions_BT = max(documents.lengths), documents.positions_BT.to(device, non_blocking=True)
        return Context(self.rotations(max(T, longest), device, positions_BT), longest, documents.segments)

    def rotations(
        self, length: int, device: torch.device, rows: slice | Tensor = slice(0)
    ) -> tuple[Rotation, Rotation]:
        """Returns `Context.rotations` at `rows` of tables that are made for positions 0 to length - 1 at least."""
        tables = [rotary.tables(length, device) for rotary in dict.fromkeys((self.rotary, self.local_rotary))]
        found = [(cos[rows], sin[rows]) for cos, sin in tables]
        return found[0], found[-1]

    def _loss(
        self, x_BTD: Tensor, targets: Tensor, logits_BTV: Tensor | None, denominator, num_targets: int | None
    ) -> Tensor:
        """Cross-entropy of the first positions against their targets [B, T or T - 1], float32 scalar.

        The loss reads `logits_BTV` where they are given. Without them, `Share.uses_chunked_loss` chooses.
        """
        ranks, size = self.tensor_ranks, (x_BTD.shape[:2].numel(), x_BTD.element_size(), self.loss_impl)
        options = dict(ignore_index=IGNORE_INDEX, denominator=denominator, process_group=ranks.group, impl=self.impl)
        num_without = x_BTD.shape[1] - targets.shape[1]
        x_BTD = x_BTD[:, : targets.shape[1]]
        is_chunked = logits_BTV is None and self.share.uses_chunked_loss(*size)
        log_loss_choice(is_chunked, self.share, *size)
        if is_chunked:
            options["num_valid_tokens"] = num_targets
            return linear_cross_entropy(x_BTD, self.output_weight, targets, linear=self.linear, **options)
        if logits_BTV is None:  # no caller reads these logits, so their gradient may overwrite them
            logits_BTV = self.linear(ranks.enter(x_BTD), self.output_weight)
            return cross_entropy(logits_BTV, targets, inplace=True, **options)
        return cross_entropy(logits_BTV, F.pad(targets, (0, num_without), value=IGNORE_INDEX), **options)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """`input_ids` [B, T >= 1] and what `next_tokens` yields after them, int64 [B, T + max_new_tokens]."""
        return torch.cat([input_ids, *self.next_tokens(input_ids, max_new_tokens, **options)], dim=1)

    @torch.no_grad()
    def next_tokens(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Continue `input_ids` [B, T >= 1] with a key/value cache; greedy at temperature 0, else sampled.

        Args:
            top_p: sampled from the most likely tokens that have this share of the probability together, at least one.

        Yields:
            The next token of each row as it is known, int64 [B, 1].

        Raises:
            ValueError: an empty prompt, a negative temperature, a top_p out of range.
        """
        if input_ids.shape[1] < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(
                "generate needs a prompt of at least one token, a temperature of at least 0 and a top_p above 0 and "
                f"up to 1, got {input_ids.shape[1]} tokens, temperature {temperature} and top_p {top_p}"
            )
        length = input_ids.shape[1] + max_new_tokens
        caches = [layer.mixer.new_cache(length) for layer in self.layers]
        if input_ids.shape[1] > 1:  # all but the last token only fill the cache: no logits
            self(input_ids[:, :-1], caches=caches)
        next_ids = input_ids[:, -1:]
        for _ in range(max_new_tokens):
            logits_BV = self(next_ids, return_logits=True, caches=caches).logits[:, -1].float()
            next_ids = choose_tokens(logits_BV, temperature, top_p, generator)
            yield next_ids


@functools.lru_cache(maxsize=64)
def log_loss_choice(is_chunked: bool, share: Share, num_tokens: int, bytes_per_logit: int, loss_impl: str) -> None:
    """Say once for each size which loss runs, and why."""
    gb = share.projected_logits_bytes(num_tokens, bytes_per_logit) / 2**30
    choice = "chunked" if is_chunked else "standard"
    reason = "forced by loss_impl" if loss_impl != "auto" else "the threshold is 10 GB"
    logger.info("loss: %s (%d tokens would project to %.2f GB of logits; %s)", choice, num_tokens, gb, reason)
