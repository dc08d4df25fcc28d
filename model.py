"""The decoder: attention, MLP, block, transformer, loss, generation. Its configuration is
`kernels/config.py`.

Shapes: B batch, T tokens, D model width, H query heads, G key/value heads, K head width, F
feed-forward width, V vocab. The architecture is Qwen3's (arXiv 2505.09388): RMSNorm before each
half of a block, RMSNorm on each query and key head before rotary positions, grouped-query
attention, a gated MLP, no biases. Other families differ by what a `ModelConfig` has: other norms,
biases of q, k and v, layers without rotary positions or with frequencies of their own, scalars.
Parameter names are Hugging Face's.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention.cache import KeyValueCache
from kernels.attention.documents import Documents
from kernels.config import MODEL_SIZES as MODEL_SIZES  # other modules import it from model.py
from kernels.config import ModelConfig
from kernels.cross_entropy import Details, cross_entropy
from kernels.experts import expert_mlp, route
from kernels.experts.balance import Routing
from kernels.experts.part import ExpertsPart
from kernels.gated_delta_net import DeltaNet, DeltaNetParameters, StateCache, gated_delta_net
from kernels.gated_mlp import GatedMLPPart, gated_mlp
from kernels.head_exchange import HeadExchange
from kernels.linear import PLAIN, Linear
from kernels.linear_cross_entropy import WORDS_MULTIPLE, linear_cross_entropy
from kernels.lora import adapted
from kernels.parts import Parameter
from kernels.qkv_attention import (
    AttentionPart,
    QKVParameters,
    gated,
    project_heads,
    qkv_attention,
)
from kernels.rms_norm import rms_norm
from kernels.rope import RotaryTables
from kernels.sampling import choose_tokens
from kernels.tensor_parallel import TensorRanks, local
from kernels.top_k_divergence import top_k_divergence
from kernels.torch_internals import assert_async

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
GATES = ".g_proj."  # in the names of the gates' parameters

Cache = KeyValueCache | StateCache
# cos and sin as `rope` takes them, [T, K/2] or [B, T, K/2] float32
Rotation = tuple[Tensor, Tensor]


@dataclass
class Rotations:
    """The rotations of tokens in both kinds of layers."""

    full: Rotation  # of layers that see everything
    windowed: Rotation


@dataclass
class Context:
    """Tokens as every block must know them: their rotations, documents and caches."""

    rotations: Rotations
    longest: int  # tokens of the longest document, the cached ones included
    segments: Tensor | None = None  # the packed documents, see kernels/attention/documents.py
    caches: list[Any] | None = None
    routing: Routing | None = None  # notes of the layers that have experts; None: nobody reads them

    def cache(self, layer: int) -> Any:
        """Returns a layer's cache, of the kind that its mixer makes."""
        return self.caches[layer] if self.caches else None


def linear_map(declared: dict[str, Parameter], name: str) -> nn.Linear:
    """Returns the linear map whose weight [rows, columns] a part declares by its name, with a bias
    if the part declares that as well."""
    rows, columns = declared[f"{name}.weight"].shape
    return nn.Linear(columns, rows, bias=f"{name}.bias" in declared)


class RMSNorm(nn.Module):
    # Set from outside.
    impl = "auto"  # see kernels.common.IMPLEMENTATIONS
    read_once = False  # see kernels.rms_norm

    def __init__(self, size: int, config: ModelConfig):
        super().__init__()
        self.eps, self.offset = config.rms_norm_eps, config.block.offset
        self.casts_first = config.block.cast
        self.weight = nn.Parameter(torch.full((size,), 1 - self.offset))

    def forward(self, x: Tensor, residual: Tensor | None = None):
        # Hooks may read the result's gradient, or keep it.
        is_seen = bool(self._forward_hooks or self._backward_hooks or self._backward_pre_hooks)
        return rms_norm(
            x, local(self.weight), self.eps, residual=residual, weight_offset=self.offset,
            cast_before_weight=self.casts_first, read_once=self.read_once and not is_seen,
            impl=self.impl,
        )  # fmt: skip


class Embedding(nn.Embedding):
    tensor_ranks = TensorRanks(None)  # ranks that share its matrix; set from outside

    def reset_parameters(self) -> None:
        """Leaves a weight on the meta device alone: PyTorch would import its compiler, a second, to
        draw nothing."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tensor_ranks.embed(input_ids, local(self.weight))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, part: AttentionPart, layer: int):
        super().__init__()
        self.part, self.layer, self.eps = part, layer, config.rms_norm_eps
        declared = part.parameters(config.hidden_size)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            linear_map(declared, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self.q_norm, self.k_norm = (
            RMSNorm(size, config) if size else None for size in part.norm_sizes
        )
        self.g_proj = linear_map(declared, "g_proj") if part.num_gates else None
        self.is_windowed = part.kind.reach is not None
        # Knobs, set from outside.
        self.kind: Any = part.kind  # an AttentionKind
        self.linear: Linear = PLAIN
        self.backend = "auto"  # see kernels.attention.libraries.BACKENDS
        self.impl = "auto"  # see kernels.common.IMPLEMENTATIONS
        self.heads_at_a_time: int | None = None  # key/value heads; None: all
        self.exchange: HeadExchange | None = (
            None  # between ranks that share sequences; `documents` are then given
        )
        self.tensor_ranks = TensorRanks(None)  # ranks that share its matrices

    def qkv_parameters(self) -> QKVParameters:
        """This rank's part of the projections to q, k and v, and the norms of their heads."""
        projections, norms = (self.q_proj, self.k_proj, self.v_proj), (self.q_norm, self.k_norm)
        return QKVParameters(
            [adapted(projection) for projection in projections],
            [local(projection.bias) for projection in projections if projection.bias is not None],
            [self.tensor_ranks.enter(self._scale(norm)) for norm in norms if norm is not None],
            self.eps,
            self.part.head_dim,
            self.part.has_output_gate,
            self.part.rotary_dim,
        )

    def _rotation(self, rotations: Rotations) -> Rotation | tuple[None, None]:
        if not self.part.rotates:
            return None, None
        return rotations.windowed if self.is_windowed else rotations.full

    def _scale(self, norm: RMSNorm) -> Tensor:
        """Returns what a norm of heads multiplies by: its weight; in float32 where it rounds only
        after the weight."""
        weight = local(norm.weight)
        return weight if norm.casts_first else weight.float() + norm.offset

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        ranks, qkv, o_weight = self.tensor_ranks, self.qkv_parameters(), adapted(self.o_proj)
        kind, linear, impl = self.kind.for_longest(context.longest), self.linear, self.impl
        cos, sin = self._rotation(context.rotations)
        x_BTD, gates = ranks.enter(x_BTD), None
        if self.g_proj is not None:
            gates = PLAIN(x_BTD, *map(local, self.g_proj.parameters())).unflatten(
                -1, (-1, kind.gates_per_head)
            )
        cache = context.cache(self.layer)
        if cache is None or cache.length == 0:
            attended_BTD = qkv_attention(
                x_BTD, qkv, o_weight, cos, sin, context.segments, kind=kind, gates=gates,
                linear=linear, impl=impl,
                heads_at_a_time=self.heads_at_a_time,
                exchange=None if cache is not None else self.exchange,
                backend=self.backend,
            )  # fmt: skip
            if (
                cache is not None
            ):  # a whole prompt: keys and values once more, with one query head that is not used
                one_head = qkv.with_one_query_head()
                cache.append(*project_heads(x_BTD, one_head, cos, sin, linear, impl)[1:3])
            return ranks.leave(attended_BTD)
        q_BTHK, *new, output_gate = project_heads(x_BTD, qkv, cos, sin, linear, impl)
        attended_BTHK = gated(kind.decode(q_BTHK, *cache.append(*new), gates), output_gate, impl)
        return ranks.leave(linear(attended_BTHK.flatten(2), o_weight))

    def new_cache(self, max_length: int) -> KeyValueCache:
        return KeyValueCache(max_length, self.kind.reach)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: ModelConfig, part: DeltaNet, layer: int):
        super().__init__()
        self.part, self.layer, self.eps = part, layer, config.rms_norm_eps
        declared = part.parameters(config.hidden_size)
        H, (C, _, width) = part.num_value_heads, declared["conv1d.weight"].shape
        self.dt_bias, self.A_log = (nn.Parameter(torch.zeros(H)) for _ in range(2))
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = (
            linear_map(declared, f"in_proj_{name}") for name in ("qkv", "z", "b", "a")
        )
        self.conv1d = nn.Conv1d(C, C, width, groups=C, bias=False)
        self.norm = nn.RMSNorm(part.value_dim)
        self.out_proj = linear_map(declared, "out_proj")
        # Knobs, set from outside; see Attention.
        self.kind = part.kind
        self.linear: Linear = PLAIN
        self.impl = "auto"
        self.exchange: HeadExchange | None = None

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        projections = (
            self.in_proj_qkv,
            self.in_proj_z,
            self.in_proj_b,
            self.in_proj_a,
            self.out_proj,
        )
        vectors = self.A_log, self.dt_bias, self.norm.weight
        qkv, z, b, a, out = map(adapted, projections)
        A_log, dt_bias, norm = map(local, vectors)
        convolution = local(self.conv1d.weight).squeeze(1)
        parameters = DeltaNetParameters(
            qkv, z, b, a, convolution, A_log, dt_bias, norm, out, self.eps
        )
        cache = context.cache(self.layer)
        return gated_delta_net(
            x_BTD, parameters, self.part, context.segments, cache=cache,
            exchange=None if cache is not None else self.exchange, linear=self.linear,
            impl=self.impl,
        )  # fmt: skip

    def new_cache(self, max_length: int) -> StateCache:
        return StateCache()


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, part: GatedMLPPart, layer: int):
        super().__init__()
        self.part = part
        self.skippable = not config.block.after  # whether no gradient depends on the result
        declared = part.parameters(config.hidden_size)
        self.gate_proj, self.up_proj, self.down_proj = (
            linear_map(declared, name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        # Knobs, set from outside.
        self.linear: Linear = PLAIN
        self.impl = "auto"  # see kernels.common.IMPLEMENTATIONS
        self.tile_size: int | None = None  # rows at a time, where memory is short
        self.tensor_ranks = TensorRanks(None)  # ranks that share its matrices

    def forward(self, x_BTD: Tensor, context: Context | None = None) -> Tensor:
        weights = [
            adapted(projection) for projection in (self.gate_proj, self.up_proj, self.down_proj)
        ]
        y_BTD = gated_mlp(
            self.tensor_ranks.enter(x_BTD), *weights, activation=self.part.activation,
            tile_size=self.tile_size,
            skippable=self.skippable, linear=self.linear, impl=self.impl,
        )  # fmt: skip
        return self.tensor_ranks.leave(y_BTD, skippable=self.skippable)


class Experts(nn.Module):
    """A router, and the MLPs of all experts, in the MLP's place. A token goes through a few of
    them."""

    def __init__(self, config: ModelConfig, part: ExpertsPart, layer: int):
        super().__init__()
        self.part, self.layer, self.skippable = part, layer, not config.block.after
        declared = part.parameters(config.hidden_size)
        self.gate = linear_map(declared, "gate")
        names = "gate_up_proj", "down_proj"  # in this order; a dictionary would be sorted
        self.experts = nn.ParameterDict(
            [(name, torch.empty(declared[f"experts.{name}"].shape)) for name in names]
        )
        if part.shared:
            self.shared_expert = GatedMLP(config, part.shared, layer)
            self.shared_expert.skippable = False  # the gradient of its gate needs its result
            self.shared_expert_gate = linear_map(declared, "shared_expert_gate")
        # Knobs, set from outside; see GatedMLP.
        self.linear: Linear = PLAIN
        self.impl = "auto"
        self.tile_size: int | None = None  # tokens at a time

    def forward(self, x_BTD: Tensor, context: Context | None = None) -> Tensor:
        x_ND, routing = x_BTD.flatten(0, 1), context.routing if context else None
        logits_NE = self.linear.plain(x_ND, adapted(self.gate))
        if routing is not None:
            logits_NE = routing.balanced(logits_NE)
        experts_Nk, weights_Nk = route(
            logits_NE, self.part.per_token, normalize=self.part.normalizes
        )
        if routing is not None:
            routing.note(self.layer, logits_NE, experts_Nk)
        inner = getattr(
            self.experts, "base_layer", self.experts
        )  # has gate_up_proj's adapter, where peft has it
        gate_up, down = (
            adapted(inner, self.experts["gate_up_proj"]),
            adapted(self.experts, self.experts["down_proj"]),
        )
        y_ND = expert_mlp(
            x_ND, gate_up, down, experts_Nk, weights_Nk,
            tile_size=self.tile_size, skippable=self.skippable, impl=self.impl,
        )  # fmt: skip
        if self.part.shared:
            self.shared_expert.linear, self.shared_expert.tile_size = self.linear, self.tile_size
            y_ND = y_ND + self.shared_expert_gate(x_ND).sigmoid() * self.shared_expert(x_ND)
        return y_ND.view_as(x_BTD)


# The module of each kind of part. It is made from the configuration, the part and the layer's
# number.
MODULES: dict[type, Callable[[ModelConfig, Any, int], nn.Module]] = {
    AttentionPart: Attention,
    DeltaNet: GatedDeltaNet,
    GatedMLPPart: GatedMLP,
    ExpertsPart: Experts,
}


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        parts, form, D = config.parts(layer), config.block, config.hidden_size
        self.form, self._mixer = form, parts.mixer.module
        self.input_layernorm = RMSNorm(D, config) if form.before else None
        self.add_module(self._mixer, MODULES[type(parts.mixer)](config, parts.mixer, layer))
        # Before the MLP, unless norms come after.
        self.post_attention_layernorm = RMSNorm(D, config)
        self.pre_feedforward_layernorm = RMSNorm(D, config) if form.before and form.after else None
        self.mlp = MODULES[type(parts.mlp)](config, parts.mlp, layer)
        self.post_feedforward_layernorm = RMSNorm(D, config) if form.after else None
        for norm in filter(None, (self.input_layernorm, self.mlp_norm)):
            norm.read_once = True

    @property
    def mixer(self) -> nn.Module:
        """The part that reads other tokens: self_attn or linear_attn."""
        return getattr(self, self._mixer)

    @property
    def mlp_norm(self) -> RMSNorm | None:
        """The norm of what the MLP reads."""
        return self.pre_feedforward_layernorm if self.form.after else self.post_attention_layernorm

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        # No name holds what attention reads, so that it is freed once attention has read it.
        before, multiplier = self.input_layernorm or nn.Identity(), self.form.multiplier
        attended_BTD = scaled(self.mixer(before(x_BTD), context), multiplier)
        if self.form.after:
            attended_BTD = self.post_attention_layernorm(attended_BTD)
        if self.mlp_norm is None:
            normed_BTD = x_BTD = x_BTD + attended_BTD
        else:
            normed_BTD, x_BTD = self.mlp_norm(attended_BTD, residual=x_BTD)
        if self.post_feedforward_layernorm is None:
            return x_BTD + scaled(self.mlp(normed_BTD, context), multiplier)
        return x_BTD + self.post_feedforward_layernorm(
            scaled(self.mlp(normed_BTD, context), multiplier)
        )


def _shifted_targets(
    labels: Tensor | None, targets: Tensor | None, documents: Documents | None
) -> Tensor | None:
    """Returns the targets of the loss, from labels or as `Transformer.forward` was given them.

    The last position of a whole sequence has no target and is left out. Were it kept, the chunked
    loss would have to gather the rows that have a target.
    """
    if labels is not None:
        if documents is not None:
            follows = (
                documents.positions_BT.diff(dim=1) == 1
            )  # the token before is its document's or its prompt's
            labels = labels.masked_fill(~F.pad(follows, (1, 0)).to(labels.device), IGNORE_INDEX)
        return labels[:, 1:]
    if targets is None or (documents is not None and not documents.are_whole):
        return targets
    has_none = (targets[:, -1] == IGNORE_INDEX).all()
    assert_async(has_none, "targets must be -100 at the last position of a whole sequence")
    return targets[:, :-1]


def _check_shapes(input_ids: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != input_ids.shape:
            expected, got = tuple(input_ids.shape), tuple(tensor.shape)
            raise ValueError(f"{name} must have input_ids' shape {expected}, got {got}")


def _padding(documents: Documents | None) -> Tensor | None:
    """Returns whether tokens are padding, [B T]; None: none is."""
    return (
        None
        if documents is None or documents.is_padding_BT is None
        else documents.is_padding_BT.flatten()
    )


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a scalar of the family; x itself where it has none."""
    return x if factor == 1 else x * factor


class Objective(Protocol):
    """A loss of log-probabilities, which `Transformer.forward` takes in place of cross-entropy."""

    reads_entropy: bool

    def __call__(self, log_probs_BT: Tensor, entropy_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the loss [] and minus its derivative by each log-probability, float32 [B, T].

        Where there is no target, the log-probability is 0, and the derivative is not read.
        """


class _Valued(torch.autograd.Function):
    """Returns `value`, whose gradient goes to `surrogate`: a sum of another size, but of the same
    derivatives."""

    @staticmethod
    def forward(ctx, surrogate, value):
        return value.clone()

    @staticmethod
    def backward(ctx, d_loss):
        return d_loss, None


@dataclass
class ModelOutput:
    loss: Tensor | None = None  # float32 scalar
    log_probs: Tensor | None = (
        None  # float32 [B, T], of the targets; 0 where there is none; without a gradient
    )
    logits: Tensor | None = None  # [B, T, V]; without a gradient where ranks share the head
    hidden_states: Tensor | None = None  # [B, T, D], what the head gets
    expert_load: Tensor | None = (
        None  # text of each expert, float32 [layers with experts, E], where a graph is made
    )
    auxiliary_loss: Tensor | None = (
        None  # the part of `loss` that balances experts, of all tokens, float32 []
    )


torch.export.register_dataclass(ModelOutput)  # so that FSDP finds the tensors in it


class Transformer(nn.Module):
    """The decoder with its loss. Parallelism, activation placement and compilation are applied from
    outside.

    Args:
        config: the whole decoder.
        tensor_ranks: ranks that share each matrix; this model has one rank's shard.
    """

    def __init__(self, config: ModelConfig, tensor_ranks: int = 1):
        super().__init__()
        shard = config.shard(tensor_ranks)
        self.config, self.shard, self.declared = config, shard, config.parameters()
        self.embed_tokens = Embedding(shard.vocab_size, shard.hidden_size)
        self.layers = nn.ModuleList(Block(shard, layer) for layer in range(shard.num_hidden_layers))
        self.norm = RMSNorm(shard.hidden_size, shard)
        if not shard.tie_word_embeddings:
            self.lm_head = nn.Linear(shard.hidden_size, shard.vocab_size, bias=False)
        # Queries and keys have one factor each, whose square turns attention's 1 / sqrt(head_dim)
        # into the multiplier.
        multiplier = config.attention_multiplier
        factor = 1.0 if multiplier is None else (multiplier * config.attention.head_dim**0.5) ** 0.5
        width = config.rotary_width
        self.rotary = self.local_rotary = RotaryTables(
            width, config.rope_theta, config.rope_scaling, factor
        )
        if config.local_rope_theta is not None:
            self.local_rotary = RotaryTables(width, config.local_rope_theta, factor=factor)
        # Knobs, set from outside.
        self.loss_impl = "auto"  # "chunked" or "standard" force one
        self.linear: Linear = PLAIN  # the head's
        self.impl = "auto"  # see kernels.common.IMPLEMENTATIONS
        self.tensor_ranks = TensorRanks(None)  # ranks that share the head's matrix
        self.head_visit: Callable[[], AbstractContextManager] = (
            nullcontext  # in it the head's matrix is on the device
        )
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                self.initialize_parameter(name, parameter)

    @torch.no_grad()
    def initialize_parameter(
        self, name: str, tensor: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fill `tensor` with the initial value of the parameter `name`, as
        `kernels.parts.Parameter` declares it.

        Matrices that write into the residual stream are scaled by 1/sqrt(2 x layers), as in GPT-2.
        Gates of attention start near 1/2, as in flash-linear-attention: a small matrix and no bias.
        An adapter, which no part declares, starts as in peft: A is uniform within 1 / sqrt(width),
        B is zero.
        """
        declared = self.declared.get(name)
        start = declared.start if declared else "adapter"
        if start in ("neutral", "one"):
            tensor.fill_(1.0 - self.config.block.offset * (start == "neutral"))
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
        exact = {
            id(p)
            for name, p in self.named_parameters()
            if name in self.declared and self.declared[name].is_exact
        }
        return self._apply(
            lambda p: p if id(p) in exact or (only_frozen and p.requires_grad) else p.to(dtype),
            recurse=True,
        )

    @property
    def output_weight(self) -> Tensor:
        """The head's matrix [V, D], or this rank's part of it."""
        return local(
            (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight
        )

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, *, targets: Tensor | None = None,
        documents: Documents | None = None, denominator: Tensor | float | None = None,
        num_targets: int | None = None,
        weights: Tensor | None = None, objective: Objective | None = None,
        teacher: tuple[Tensor, Tensor] | None = None, return_log_probs: bool = False,
        return_logits: bool = False, return_hidden_states: bool = False,
        caches: list[Cache] | None = None,
    ) -> ModelOutput:  # fmt: skip
        """Run the decoder.

        Args:
            input_ids: int64 [B, T].
            labels: int64 [B, T], unshifted: position t is trained to predict labels[t + 1]; -100 is
            ignored. targets: int64 [B, T], in place of `labels`: position t is trained to predict
            targets[t]; -100 is ignored.
                Nothing is masked here. The last position of a whole sequence must have -100.
            documents: the documents packed in each row. They do not see each other, positions start
            at 0 in each,
                and no label is predicted by a token of the document before its own. None: each row
                is one.
            denominator: divides the sum of losses: valid targets of all micro-batches and ranks;
            None: of this call. num_targets: number of targets that are not -100; a caller that
            knows it spares the host a wait for the GPU. weights: float32 [B, T], multiply the
            targets' losses.
            objective: the loss, in place of cross-entropy. Without logits the head runs twice, and
            the blocks once. teacher: ids and log-probabilities [B, T, k] of the likeliest words;
            the loss is the divergence from these. return_log_probs, return_logits,
            return_hidden_states: fill those fields of the output. caches: one `KeyValueCache` per
            layer, while generating.

        Raises:
            ValueError: both labels and targets; tensors of unequal shape; documents together with
            caches. RuntimeError: a target at the last position of a whole sequence.
        """
        if labels is not None and targets is not None:
            raise ValueError("give either labels or targets")
        positions_BT = None if documents is None else documents.positions_BT
        _check_shapes(
            input_ids, labels=labels, targets=targets, documents=positions_BT, weights=weights
        )
        targets = _shifted_targets(labels, targets, documents)
        x_BTD, context = self.embed(input_ids), self.context(input_ids, documents, caches)
        if self.shard.has_experts and targets is not None and torch.is_grad_enabled():
            coefficient = self.config.router_aux_loss_coef if objective is None else 0.0
            context.routing = Routing(coefficient, _padding(documents))
        for layer in self.layers:
            x_BTD = layer(x_BTD, context)
        x_BTD = self.head_input(x_BTD)
        with self.head_visit():
            logits_BTV = (
                self.linear(self.tensor_ranks.enter(x_BTD), self.output_weight)
                if return_logits
                else None
            )
            loss, log_probs_BT, load, auxiliary = None, None, None, None
            if targets is not None:
                loss, log_probs_BT = self._loss(
                    x_BTD, targets, logits_BTV, objective, teacher,
                    denominator=denominator, num_targets=num_targets, weights=weights,
                )  # fmt: skip
                if context.routing is not None:
                    share = (
                        1.0 if denominator is None else targets.ne(IGNORE_INDEX).sum() / denominator
                    )
                    exchange = self.layers[0].mixer.exchange
                    loss, load, auxiliary = context.routing.finish(
                        loss, share, exchange.group if exchange else None
                    )
        return ModelOutput(
            loss=loss,
            log_probs=log_probs_BT if return_log_probs else None,
            logits=self.tensor_ranks.gather(logits_BTV) if logits_BTV is not None else None,
            hidden_states=x_BTD if return_hidden_states else None,
            expert_load=load,
            auxiliary_loss=auxiliary,
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """Returns the first block's input."""
        x_BTD, multiplier = self.embed_tokens(input_ids), self.shard.embedding_multiplier
        return (
            x_BTD if multiplier == 1 else x_BTD * torch.tensor(multiplier, dtype=x_BTD.dtype)
        )  # rounds as Gemma does

    def head_input(self, x_BTD: Tensor) -> Tensor:
        """Returns what the head multiplies, of the last block's output."""
        return scaled(self.norm(x_BTD), 1 / self.shard.logits_scaling)

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
            raise ValueError(
                "with a key/value cache, give one document, and one token at a time after the "
                "prompt"
            )
        if documents is None:
            rotations = self.rotations(start + T, device, slice(start, start + T))
            return Context(rotations, start + T, caches=caches)
        # The positions in a share of a sequence reach as far as the whole sequence's longest
        # document.
        longest, positions_BT = (
            documents.longest,
            documents.positions_BT.to(device, non_blocking=True),
        )
        return Context(
            self.rotations(max(T, longest), device, positions_BT), longest, documents.segments
        )

    def rotations(
        self, length: int, device: torch.device, rows: slice | Tensor = slice(0)
    ) -> Rotations:
        """Returns `Context.rotations` at `rows` of tables that are made for positions 0 to length -
        1 at least."""
        tables = [
            rotary.tables(length, device)
            for rotary in dict.fromkeys((self.rotary, self.local_rotary))
        ]
        rotations = [(cos[rows], sin[rows]) for cos, sin in tables]
        return Rotations(full=rotations[0], windowed=rotations[-1])

    def _loss(
        self, x_BTD: Tensor, targets: Tensor, logits_BTV: Tensor | None,
        objective: Objective | None,
        teacher: tuple[Tensor, Tensor] | None, *,
        denominator: Tensor | float | None, num_targets: int | None, weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the loss of the first positions against their targets [B, T or T - 1], and
        log-probabilities [B, T].

        The loss reads `logits_BTV` where they are given. Without them,
        `ModelConfig.uses_chunked_loss` chooses.
        """
        ranks, size = (
            self.tensor_ranks,
            (x_BTD.shape[:2].numel(), x_BTD.element_size(), self.loss_impl),
        )
        own, num_without = targets.shape[1], x_BTD.shape[1] - targets.shape[1]
        if teacher is not None:
            found = top_k_divergence(
                x_BTD[:, :own], self.output_weight, targets, *(x[:, :own] for x in teacher),
                weights=None if weights is None else weights[:, :own], denominator=denominator,
                num_valid_tokens=num_targets, linear=self.linear, impl=self.impl,
            )  # fmt: skip
            return found.loss, F.pad(-found.per_token_loss, (0, num_without))
        options: dict = dict(
            ignore_index=IGNORE_INDEX,
            process_group=ranks.group,
            impl=self.impl,
            return_details=True,
        )
        is_chunked = logits_BTV is None and self.shard.uses_chunked_loss(*size)
        log_loss_choice(is_chunked, self.shard, *size)
        function: Callable[..., Details]
        if is_chunked:
            options |= {"num_valid_tokens": num_targets, "linear": self.linear}
            function = functools.partial(
                linear_cross_entropy, x_BTD[:, :own], self.output_weight, targets, **options
            )
        elif (
            logits_BTV is None
        ):  # no caller reads these logits, so their gradient may overwrite them
            logits_BTV = self.linear(ranks.enter(x_BTD[:, :own]), self.output_weight)
            function = functools.partial(
                cross_entropy, logits_BTV, targets, inplace=True, **options
            )
        else:
            targets = F.pad(targets, (0, num_without), value=IGNORE_INDEX)
            own, num_without = own + num_without, 0
            function = functools.partial(cross_entropy, logits_BTV, targets, **options)
        if objective is None:
            found = function(
                denominator=denominator, weights=None if weights is None else weights[:, :own]
            )
            return found.loss, F.pad(-found.per_token_loss, (0, num_without))
        with torch.no_grad():
            found = function(return_entropy=objective.reads_entropy)
        log_probs_BT = F.pad(-found.per_token_loss, (0, num_without))
        entropy_BT = None if found.entropy is None else F.pad(found.entropy, (0, num_without))
        value, weights = objective(log_probs_BT, entropy_BT)
        if torch.is_grad_enabled():
            value = _Valued.apply(function(reduction="sum", weights=weights[:, :own]).loss, value)
        return value, log_probs_BT

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """`input_ids` [B, T >= 1] and what `next_tokens` yields after them, int64 [B, T +
        max_new_tokens]."""
        return torch.cat(
            [input_ids, *self.next_tokens(input_ids, max_new_tokens, **options)], dim=1
        )

    @torch.no_grad()
    def next_tokens(
        self, input_ids: Tensor, max_new_tokens: int, *, temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Continue `input_ids` [B, T >= 1] with a key/value cache; greedy at temperature 0, else
        sampled.

        Args:
            top_p: sampled from the most likely tokens that have this share of the probability
            together, at least one.

        Yields:
            The next token of each row as it is known, int64 [B, 1].

        Raises:
            ValueError: an empty prompt, a negative temperature, a top_p out of range.
        """
        if input_ids.shape[1] < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(
                "generate needs a prompt of at least one token, a temperature of at least 0 and a "
                "top_p above 0 and "
                f"up to 1, got {input_ids.shape[1]} tokens, temperature {temperature} and top_p "
                f"{top_p}"
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
def log_loss_choice(
    is_chunked: bool, shard: ModelConfig, num_tokens: int, bytes_per_logit: int, loss_impl: str
) -> None:
    """Say once for each size which loss runs, and why."""
    gb = shard.projected_logits_bytes(num_tokens, bytes_per_logit) / 2**30
    choice = "chunked" if is_chunked else "standard"
    is_odd, is_forced = shard.vocab_size % WORDS_MULTIPLE != 0, loss_impl != "auto"
    words = f"{shard.vocab_size:,} words are no multiple of {WORDS_MULTIPLE}"
    reason = "forced by loss_impl" if is_forced else words if is_odd else "the threshold is 10 GB"
    logger.info(
        "loss: %s (%d tokens would project to %.2f GB of logits; %s)",
        choice,
        num_tokens,
        gb,
        reason,
    )
