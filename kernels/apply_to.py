"""One line that gives a Hugging Face model these kernels: norms, RoPE, MLPs, experts, the delta
rule and the loss.

Each module that changes gets a `forward` of its own, which hides its class's. Classes,
transformers' own modules and every other model in the process stay as they are. Parameters, and
with them checkpoints, keep their names. transformers is not imported: the new forwards reach it
through the model.
"""

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import sum_dtype
from .delta_net import delta_rule
from .experts import expert_mlp
from .gated_activation import geglu, swiglu
from .linear_cross_entropy import linear_cross_entropy
from .rms_norm import rms_norm
from .rope import rope

logger = logging.getLogger(__name__)

MODEL_TYPES = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text",
    "qwen3_5_moe_text", "gemma2", "gemma3_text", "smollm3", "granite", "olmo2", "olmo3",
)  # fmt: skip
WRAPPERS = ("qwen3_5", "qwen3_5_moe")  # beside images: the text model inside is of a type above
GEMMA = ("gemma2", "gemma3_text")
# their files hold the weights of norms minus 1
OFFSET = (*GEMMA, "qwen3_5_text", "qwen3_5_moe_text")
ROUNDED_AFTER_WEIGHT = (*OFFSET, "olmo2", "olmo3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# keywords that transformers' loss takes
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")

# Functions that make a forward are cached,
# so that all layers share it and torch.compile traces it once.


@functools.cache
def _rms_norm_forward(model_type: str, impl: str):
    offset = 1.0 if model_type in OFFSET else 0.0
    casts_first = model_type not in ROUNDED_AFTER_WEIGHT

    def forward(self, hidden_states):
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return rms_norm(
            hidden_states,
            self.weight,
            eps,
            weight_offset=offset,
            cast_before_weight=casts_first,
            impl=impl,
        )

    return forward


@functools.cache
def _gated_rms_norm_forward(impl: str):
    def forward(self, hidden_states, gate):
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, gate=gate, impl=impl)

    return forward


@functools.cache
def _experts_forward(impl: str):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Returns [N, D] for hidden states [N, D], experts and their weights [N, k]."""
        return expert_mlp(
            hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights, impl=impl
        )

    return forward


@functools.cache
def _gated_mlp_forward(activation: str, impl: str):
    def forward(self, x):
        # Calls the projections instead of reading their weights:
        # they may have biases, adapters or hooks.
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(
            swiglu(gate, up, impl=impl) if activation == "silu" else geglu(gate, up, impl=impl)
        )

    return forward


def _with_function(original: FunctionType, name: str, replacement: Callable) -> FunctionType:
    """Returns `original` with another function by a name that it looks up in the globals of its
    module.

    A replacement in these globals would reach every model of the family. The result is therefore
    the same code over a copy of the globals. The copy lacks `__name__`, so that torch.compile
    guards the copy: with the name, it would guard the module, which has another function.
    """
    names = {**original.__globals__, name: replacement}
    del names["__name__"]
    return FunctionType(
        original.__code__, names, argdefs=original.__defaults__, closure=original.__closure__
    )


@functools.cache
def _attention_forward(original: FunctionType, impl: str):
    original = inspect.unwrap(original)  # without transformers 5.24's decorator for an old keyword
    if "apply_rotary_pos_emb" not in original.__code__.co_names:
        raise ValueError(
            f"{original.__qualname__} has no apply_rotary_pos_emb: "
            "transformers of an unsupported version"
        )

    def apply_rotary_pos_emb(q, k, cos, sin):
        """Rotates q [B, H, T, K] and k [B, G, T, K].

        cos and sin are [B or 1, T, R], with equal halves.
        """
        rotary_dim = cos.shape[-1]
        cos, sin = (table[..., : rotary_dim // 2].squeeze(0) for table in (cos, sin))
        q, k = rope(
            q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotary_dim=rotary_dim, impl=impl
        )
        return q.transpose(1, 2), k.transpose(1, 2)

    return _with_function(original, "apply_rotary_pos_emb", apply_rotary_pos_emb)


CHUNKED_RULE = "torch_chunk_gated_delta_rule"  # in the globals of transformers 5.24's modules


@functools.cache
def _delta_net_forward(original: FunctionType, impl: str):
    def gated_delta_rule(
        query, key, value, g, beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **options,
    ):  # fmt: skip
        """Returns out [B, T, H, V] and the states for q and k [B, T, G, K], v [B, T, H, V], g and
        beta [B, T, H]."""
        if use_qk_l2norm_in_kernel:
            query = _normalised(query)
            key = _normalised(key)
        query = query * query.shape[-1] ** -0.5
        state_dtype = sum_dtype(query)
        segments = None if cu_seqlens is None else _segments_between(cu_seqlens)
        if initial_state is not None:
            initial_state = initial_state.to(state_dtype)
        out, states = delta_rule(
            query, key, value, g.to(state_dtype), beta.to(state_dtype), segments=segments,
            initial_state=initial_state, with_state=True, impl=impl,
        )  # fmt: skip
        return out, states if output_final_state else None

    return _with_function(inspect.unwrap(original), CHUNKED_RULE, gated_delta_rule)


def _normalised(x: Tensor) -> Tensor:
    """Returns x / |x| along the last dimension, in x's dtype."""
    x_wide = x.to(sum_dtype(x))
    return (x_wide * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _segments_between(cu_seqlens: Tensor) -> Tensor:
    """Returns the documents of one row: [0, 3, 5] has rows (0, 0, 3) and (0, 3, 5)."""
    bounds = cu_seqlens.cpu().long()
    return torch.stack([torch.zeros_like(bounds[1:]), bounds[:-1], bounds[1:]], 1)


def _loss(
    model,
    hidden_states,
    labels,
    impl,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
):
    if not isinstance(model.lm_head, nn.Linear):
        raise ValueError(
            "the fused loss reads lm_head's weight, but lm_head is now a "
            f"{type(model.lm_head).__name__}; use loss=False"
        )
    if shift_labels is None:
        shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    # It may have settings of other families, which compute nothing here.
    config = model.config.get_text_config()
    scaling = config.logits_scaling if config.model_type == "granite" else 1.0  # divides logits
    return linear_cross_entropy(
        hidden_states if scaling == 1 else hidden_states / scaling,
        model.lm_head.weight,
        shift_labels.to(hidden_states.device),
        linear_bias=model.lm_head.bias,
        ignore_index=ignore_index,
        softcap=config.final_logit_softcapping if config.model_type in GEMMA else None,
        denominator=num_items_in_batch,
        impl=impl,
    )


@functools.cache
def _causal_lm_forward(original, impl: str):
    innermost = inspect.unwrap(original)
    names = innermost.__globals__
    output_class = names[
        next(n for n in innermost.__code__.co_names if n.endswith("CausalLMOutputWithPast"))
    ]
    balance = names.get("load_balancing_loss_func")  # a mixture's loss that balances its experts
    # transformers before 5.24 says past_key_values
    cache_name = (
        "cache" if "cache" in inspect.signature(innermost).parameters else "past_key_values"
    )

    @functools.wraps(original)
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
        inputs_embeds=None, labels=None, use_cache=None, logits_to_keep=0, **kwargs,
    ):  # fmt: skip
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            cache_name: kwargs.pop("cache", past_key_values), "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
        }  # fmt: skip
        all_logits = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is None or not all_logits:
            return original(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = self.config.return_dict
        loss_arguments = {name: kwargs.pop(name) for name in LOSS_ARGUMENTS if name in kwargs}
        if balance is not None:
            config = self.config.get_text_config()
            if kwargs.get("output_router_logits") is None:
                kwargs["output_router_logits"] = config.output_router_logits
        outputs = self.model(**inputs, **kwargs, return_dict=True)
        results = {
            name: getattr(outputs, name)
            for name in output_class.__dataclass_fields__
            if hasattr(outputs, name)
        }
        results["loss"] = _loss(self, outputs.last_hidden_state, labels, impl, **loss_arguments)
        if balance is not None and kwargs["output_router_logits"]:
            aux_loss = balance(
                outputs.router_logits,
                config.num_experts,
                config.num_experts_per_tok,
                attention_mask,
            )
            results["aux_loss"] = aux_loss
            results["loss"] = results["loss"] + config.router_aux_loss_coef * aux_loss.to(
                results["loss"].device
            )
        outputs = output_class(**results)
        return outputs if return_dict else outputs.to_tuple()

    return forward


def _replacement(module: nn.Module, model_type: str, activation: str, impl: str):
    """Returns the kind of a text model's module and its new forward; None if it keeps its own."""
    class_name = type(module).__name__
    original = type(module).forward
    if "Vision" in class_name:
        return None
    if class_name.endswith("RMSNorm"):
        return "rms_norm", _rms_norm_forward(model_type, impl)
    if class_name.endswith("RMSNormGated"):
        return "rms_norm", _gated_rms_norm_forward(impl)
    if class_name.endswith("Attention"):
        return "rope", _attention_forward(original, impl)
    if class_name.endswith("MLP"):
        return "gated_mlp", _gated_mlp_forward(activation, impl)
    if class_name.endswith("Experts") and activation == "silu":
        return "experts", _experts_forward(impl)
    if (
        class_name.endswith("GatedDeltaNet")
        and CHUNKED_RULE in inspect.unwrap(original).__code__.co_names
    ):
        return "delta_rule", _delta_net_forward(original, impl)
    return None


def _type_and_activation(model: nn.Module) -> tuple[str, str]:
    """Returns a text model's type and activation. Raises ValueError for others than are known."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type in WRAPPERS:
        config = config.get_text_config()
        model_type = config.model_type
    if model_type not in MODEL_TYPES:
        known = ", ".join((*MODEL_TYPES, *WRAPPERS))
        raise ValueError(f"apply_to knows the model types {known}, got {model_type!r}")
    activation = config.hidden_activation if model_type in GEMMA else config.hidden_act
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"the activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return model_type, activation


def apply_to(model: nn.Module, *, impl: str = "auto", loss: bool = True) -> dict[str, int]:
    """Replaces norms, RoPE, MLPs, experts, the delta rule and the loss of a Hugging Face model
    instance, in place.

    Called with `labels`, the model then returns the loss without logits (`logits` is None), in
    training and evaluation. `num_items_in_batch`, `shift_labels` and `ignore_index` mean what they
    mean in transformers. The model's own forward runs without `labels`, and where `logits_to_keep`
    asks for logits.

    Args:
        model: Llama, Mistral, Ministral 3, Qwen2, Qwen3, Qwen3 MoE, Qwen3.5's text model, Qwen3.5
            MoE's text model, Gemma 2, Gemma 3's text model, SmolLM3, Granite, OLMo 2 or OLMo 3,
            with or without its language-model head, or wrapped by PEFT. Qwen3.5 beside its images
            too, whose part stays as it is. accelerate, FSDP and torch.compile come after
            `apply_to`.
        loss: False keeps the model's own loss, and its logits.

    Returns numbers of replacements by kind: {"rms_norm": 9, "rope": 2, "gated_mlp": 2, "loss": 1}.
    The log has them.

    Raises ValueError for another `model_type`, activation, loss or version of transformers; or a
    module that already has a forward of its own, for instance from an earlier `apply_to`. The model
    is then unchanged.
    """
    model_type, activation = _type_and_activation(model)
    replacements = []
    for module in model.modules():
        if replacement := _replacement(module, model_type, activation, impl):
            replacements.append((module, *replacement))
        elif loss and "lm_head" in dict(module.named_children()):
            name = module.loss_function.__name__
            if name != "ForCausalLMLoss":
                raise ValueError(f"the model's loss is {name}, not ForCausalLMLoss; use loss=False")
            forward = _causal_lm_forward(type(module).forward, impl)
            replacements.append((module, "loss", forward))
    for module, _, _ in replacements:
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} already has a forward of its own, from an earlier "
                "apply_to, accelerate or use_kernels; apply_to goes once, and before them"
            )

    for module, _, forward in replacements:
        module.forward = MethodType(forward, module)
    counts = dict(Counter(kind for _, kind, _ in replacements))
    shown = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    logger.info("%s: replaced %s", type(model).__name__, shown)
    return counts
