"""The decoder: attention, MLP, block, transformer, generation. Its configuration is
`kernels/config.py`, its losses are `kernels/head_loss.py`.

Shapes: B batch, T tokens, D model width, H query heads, G key/value heads, K head width, F
feed-forward width, V vocab. The architecture is Qwen3's (arXiv 2505.09388): RMSNorm before each
half of a block, RMSNorm on each query and key head before rotary positions, grouped-query
attention, a gated MLP, no biases. Other families differ by what a `ModelConfig` has: other norms,
biases of q, k and v, layers without rotary positions or with frequencies of their own, scalars.
Parameter names are Hugging Face's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.attention.cache import KeyValueCache
from kernels.attention.documents import Documents
from kernels.config import MODEL_SIZES as MODEL_SIZES  # other modules import it from model.py
from kernels.config import ModelConfig
from kernels.context import Cache, Context, ContextMaker, Rotation, Rotations
from kernels.declared import Declared
from kernels.experts import expert_mlp, route
from kernels.experts.balance import Routing
from kernels.experts.part import ExpertsPart
from kernels.gated_delta_net import DeltaNet, DeltaNetParameters, StateCache, gated_delta_net
from kernels.gated_mlp import GatedMLPPart, gated_mlp
from kernels.head_loss import HeadLoss, OutputHead
from kernels.knobs import Knobs
from kernels.linear import PLAIN
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
from kernels.sampling import choose_tokens
from kernels.tensor_parallel import local


def linear_map(declared: dict[str, Parameter], name: str) -> nn.Linear:
    """Returns a linear map of the shape that a part declares, with a bias if it declares one."""
    rows, columns = declared[f"{name}.weight"].shape
    return nn.Linear(columns, rows, bias=f"{name}.bias" in declared)


class RMSNorm(nn.Module, Knobs):
    """Divides by the root mean square, and multiplies by the weight, to which `offset` is added.

    With a residual, it normalises the sum, and returns the sum as well. `read_once` says that
    backward may overwrite the result's gradient, see `rms_norm`.
    """

    def __init__(self, size: int, config: ModelConfig):
        super().__init__()
        self.eps, self.offset = config.rms_norm_eps, config.block.offset
        self.casts_first = config.block.cast
        self.weight = nn.Parameter(torch.full((size,), 1 - self.offset))

    def forward(self, x: Tensor, residual: Tensor | None = None):
        # Hooks are readers too: they may keep the result or its gradient.
        has_hooks = bool(self._forward_hooks or self._backward_hooks or self._backward_pre_hooks)
        return rms_norm(
            x, local(self.weight), self.eps, residual=residual, weight_offset=self.offset,
            cast_before_weight=self.casts_first, read_once=self.read_once and not has_hooks,
            impl=self.impl,
        )  # fmt: skip


class Embedding(nn.Embedding, Knobs):
    def reset_parameters(self) -> None:
        """Draws a weight that has data.

        On meta, PyTorch would import its compiler, which takes a second, to draw nothing.
        """
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tensor_ranks.embed(input_ids, local(self.weight))


class Attention(nn.Module, Knobs):
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
        self.kind: Any = part.kind  # an AttentionKind; set from outside

    def qkv_parameters(self) -> QKVParameters:
        """Returns this rank's projections to q, k and v, and the norms of their heads."""
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
        """Returns the factor of a norm of heads: its weight, in float32 unless it casts first."""
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
            if cache is not None:
                # Keys and values of the prompt once more; the one query head is not used.
                one_head = qkv.with_one_query_head()
                _, k_BTGK, v_BTGK, *_ = project_heads(x_BTD, one_head, cos, sin, linear, impl)
                cache.append(k_BTGK, v_BTGK)
            return ranks.leave(attended_BTD)
        q_BTHK, *new, output_gate = project_heads(x_BTD, qkv, cos, sin, linear, impl)
        attended_BTHK = gated(kind.decode(q_BTHK, *cache.append(*new), gates), output_gate, impl)
        return ranks.leave(linear(attended_BTHK.flatten(2), o_weight))

    def new_cache(self, max_length: int) -> KeyValueCache:
        return KeyValueCache(max_length, self.kind.reach)


class GatedDeltaNet(nn.Module, Knobs):
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
        self.kind = part.kind

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


class GatedMLP(nn.Module, Knobs):
    def __init__(self, config: ModelConfig, part: GatedMLPPart, layer: int):
        super().__init__()
        self.part = part
        # Whether no gradient depends on the result: a norm after the MLP would read it.
        self.skippable = not config.block.after
        declared = part.parameters(config.hidden_size)
        self.gate_proj, self.up_proj, self.down_proj = (
            linear_map(declared, name) for name in ("gate_proj", "up_proj", "down_proj")
        )

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


class Experts(nn.Module, Knobs):
    """A router, and the MLPs of all experts. A token goes through the few that its router names."""

    def __init__(self, config: ModelConfig, part: ExpertsPart, layer: int):
        super().__init__()
        self.part, self.layer, self.skippable = part, layer, not config.block.after
        declared = part.parameters(config.hidden_size)
        self.gate = linear_map(declared, "gate")
        # Pairs keep this order; a dictionary would be sorted.
        self.experts = nn.ParameterDict(
            [
                (name, torch.empty(declared[f"experts.{name}"].shape))
                for name in ("gate_up_proj", "down_proj")
            ]
        )
        self.experts.base_layer = nn.Module()  # has gate_up_proj's adapter, where peft has it
        if part.shared:
            self.shared_expert = GatedMLP(config, part.shared, layer)
            self.shared_expert.skippable = False  # the gradient of its gate needs its result
            self.shared_expert_gate = linear_map(declared, "shared_expert_gate")

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
        gate_up = adapted(self.experts.base_layer, self.experts["gate_up_proj"])
        down = adapted(self.experts, self.experts["down_proj"])
        y_ND = expert_mlp(
            x_ND, gate_up, down, experts_Nk, weights_Nk,
            tile_size=self.tile_size, skippable=self.skippable, impl=self.impl,
        )  # fmt: skip
        if self.part.shared:
            self.shared_expert.linear, self.shared_expert.tile_size = self.linear, self.tile_size
            y_ND = y_ND + self.shared_expert_gate(x_ND).sigmoid() * self.shared_expert(x_ND)
        return y_ND.view_as(x_BTD)


# The module of each kind of part.
# It is made from the configuration, the part and the layer's number.
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
        """The norm before the MLP."""
        return self.pre_feedforward_layernorm if self.form.after else self.post_attention_layernorm

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        # No name holds the mixer's input, so that it is freed once the mixer has read it.
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


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns x times a scalar of the family; x itself, not a copy, if the scalar is 1."""
    return x if factor == 1 else x * factor


@dataclass
class ModelOutput:
    loss: Tensor | None = None  # float32 []
    log_probs: Tensor | None = None  # float32 [B, T], as LossOutput.log_probs_BT
    logits: Tensor | None = None  # [B, T, V]; without a gradient where ranks share the head
    hidden_states: Tensor | None = None  # [B, T, D], the head's input; None with a loss
    # Tokens of each expert, float32 [layers with experts, E], where a loss makes a graph.
    expert_load: Tensor | None = None
    auxiliary_loss: Tensor | None = None  # float32 [], the part of `loss` that balances experts


torch.export.register_dataclass(ModelOutput)  # so that FSDP finds the tensors in it


class Transformer(Declared, ContextMaker, Knobs):
    """The decoder. Its own knobs are of the head. Parallelism, placement of activations and
    compilation are applied from outside.

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
        self.make_tables(config)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                self.initialize_parameter(name, parameter)

    @property
    def output_weight(self) -> Tensor:
        """The head's matrix [V, D], or this rank's part of it."""
        module = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return local(module.weight)

    def forward(
        self,
        input_ids: Tensor,
        documents: Documents | None = None,
        loss: HeadLoss | None = None,
        caches: list[Cache] | None = None,
        return_logits: bool = False,
    ) -> ModelOutput:
        """Runs the decoder.

        Args:
            input_ids: int64 [B, T].
            documents: the documents packed in each row. They do not see each other, and positions
                start at 0 in each. None: each row is one.
            loss: what is computed of the head's input; None: the head's input is returned.
            caches: one for each layer, while generating.
            return_logits: make all logits, at any size, and return them.

        Raises:
            ValueError: documents of another shape, or together with caches; see `HeadLoss`.
        """
        x_BTD, context = self.embed(input_ids), self.context(input_ids, documents, caches)
        if loss is not None and self.shard.has_experts and torch.is_grad_enabled():
            coefficient = self.config.router_aux_loss_coef if loss.balances_experts else 0.0
            is_padding_BT = None if documents is None else documents.is_padding_BT
            context.routing = Routing(coefficient, is_padding_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, context)
        x_BTD = self.head_input(x_BTD)
        output = ModelOutput(hidden_states=x_BTD if loss is None else None)
        with self.head_visit():
            is_whole = documents is None or documents.are_whole
            knobs = self.linear, self.tensor_ranks, self.impl, self.loss_impl
            head = OutputHead(self.output_weight, *knobs, is_whole=is_whole)
            if return_logits:
                head.logits_BTV = head.logits(x_BTD)
                output.logits = self.tensor_ranks.gather(head.logits_BTV)
            if loss is None:
                return output
            result = loss(x_BTD, head)
            output.loss, output.log_probs = result.loss, result.log_probs_BT
            if context.routing is not None:
                exchange = self.layers[0].mixer.exchange
                group = exchange.group if exchange else None
                output.loss, output.expert_load, output.auxiliary_loss = context.routing.finish(
                    result.loss, loss.step_fraction(), group
                )
        return output

    def embed(self, input_ids: Tensor) -> Tensor:
        """Returns the first block's input."""
        x_BTD, multiplier = self.embed_tokens(input_ids), self.shard.embedding_multiplier
        if multiplier == 1:
            return x_BTD
        return x_BTD * torch.tensor(multiplier, dtype=x_BTD.dtype)  # rounds as Gemma does

    def head_input(self, x_BTD: Tensor) -> Tensor:
        """Returns the final norm of the last block's output, divided by `logits_scaling`."""
        return scaled(self.norm(x_BTD), 1 / self.shard.logits_scaling)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """Returns `input_ids` [B, T >= 1] and the tokens that `next_tokens` yields after them.

        The result is int64 [B, T + max_new_tokens]. Other arguments are as in `next_tokens`.
        """
        return torch.cat(
            [input_ids, *self.next_tokens(input_ids, max_new_tokens, **options)], dim=1
        )

    @torch.no_grad()
    def next_tokens(
        self, input_ids: Tensor, max_new_tokens: int, *, temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Continues `input_ids` [B, T >= 1] with a key/value cache.

        Each token is the likeliest one at temperature 0, else it is sampled.

        Args:
            top_p: samples among the most likely tokens whose probabilities sum to at least this
                share.

        Yields:
            The next token of each row as it is known, int64 [B, 1].

        Raises:
            ValueError: an empty prompt, a negative temperature, a top_p out of range.
        """
        if input_ids.shape[1] < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(
                "generate needs a prompt of at least one token, a temperature of at least 0 and a "
                f"top_p above 0 and up to 1, got {input_ids.shape[1]} tokens, temperature "
                f"{temperature} and top_p {top_p}"
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
