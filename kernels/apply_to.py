"""One line that gives a Hugging Face model these kernels: RMSNorm, RoPE, the gated MLP and the loss.

Each module that changes gets a `forward` of its own, which hides its class's. Classes, transformers' own modules and
every other model in the process stay as they are. Parameters, and with them checkpoints, keep their names.
transformers is not imported: the new forwards reach it through the model.
"""

import functools
import inspect
import logging
from collections import Counter
from types import FunctionType, MethodType

import torch.nn.functional as F
from torch import nn

from .gated_activation import geglu, swiglu
from .linear_cross_entropy import linear_cross_entropy
from .rms_norm import rms_norm
from .rope import rope

logger = logging.getLogger(__name__)

MODEL_TYPES = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "granite", "olmo3",
)  # fmt: skip
GEMMA = ("gemma2", "gemma3_text")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")  # keywords that transformers' loss takes

# Functions that make a forward are cached, so that all layers share it and torch.compile traces it once.


@functools.cache
def _rms_norm_forward(model_type: str, impl: str):
    def forward(self, hidden_states):
        # Gemma stores the weight minus 1. Gemma and OLMo 3 round only after the weight.
        eps, offset = (self.eps, 1.0) if model_type in GEMMA else (self.variance_epsilon, 0.0)
        casts_first = model_type not in (*GEMMA, "olmo3")
        return rms_norm(
            hidden_states, self.weight, eps, weight_offset=offset, cast_before_weight=casts_first, impl=impl
        )

    return forward


@functools.cache
def _gated_mlp_forward(activation: str, impl: str):
    def forward(self, x):
        # Calls the projections instead of reading their weights: they may have biases, adapters or hooks.
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up, impl=impl) if activation == "silu" else geglu(gate, up, impl=impl))

    return forward


@functools.cache
def _attention_forward(original: FunctionType, impl: str):
    """Returns `original` with a RoPE of its own.

    Attention looks apply_rotary_pos_emb up in the globals of its module. A replacement in these would reach every model
    of the family. The result is therefore the same code over a copy of the globals. The copy lacks `__name__`, so that
    torch.compile guards the copy: with the name, it would guard the module, which has another function.
    """
    original = inspect.unwrap(original)  # without transformers 5.24's decorator for an old keyword
    if "apply_rotary_pos_emb" not in original.__code__.co_names:
        raise ValueError(f"{original.__qualname__} has no apply_rotary_pos_emb: transformers of an unsupported version")

    def apply_rotary_pos_emb(q, k, cos, sin):
        """Rotates q [B, H, T, K] and k [B, G, T, K] by cos and sin [B or 1, T, K], whose halves are equal."""
        cos, sin = (table[..., : table.shape[-1] // 2].squeeze(0) for table in (cos, sin))
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, impl=impl)
        return q.transpose(1, 2), k.transpose(1, 2)

    names = {**original.__globals__, "apply_rotary_pos_emb": apply_rotary_pos_emb}
    del names["__name__"]
    return FunctionType(original.__code__, names, argdefs=original.__defaults__, closure=original.__closure__)


def _loss(model, hidden_states, labels, impl, num_items_in_batch=None, ignore_index=-100, shift_labels=None):
    if not isinstance(model.lm_head, nn.Linear):
        found = type(model.lm_head).__name__
        raise ValueError(f"the fused loss reads lm_head's weight, but lm_head is now a {found}; use loss=False")
    if shift_labels is None:
        shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    config = model.config  # it may have settings of other families, which compute nothing here
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
    output_class = innermost.__globals__["CausalLMOutputWithPast"]
    cache_name = "cache" if "cache" in inspect.signature(innermost).parameters else "past_key_values"  # before 5.24

    @functools.wraps(original)
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        labels=None, use_cache=None, logits_to_keep=0, **kwargs,
    ):  # fmt: skip
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            cache_name: kwargs.pop("cache", past_key_values), "inputs_embeds": inputs_embeds, "use_cache": use_cache,
        }  # fmt: skip
        all_logits = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is None or not all_logits:
            return original(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        asked = kwargs.pop("return_dict", None)
        return_dict = self.config.return_dict if asked is None else asked
        loss_arguments = {name: kwargs.pop(name) for name in LOSS_ARGUMENTS if name in kwargs}
        outputs = self.model(**inputs, **kwargs, return_dict=True)
        loss = _loss(self, outputs.last_hidden_state, labels, impl, **loss_arguments)
        others = {name: getattr(outputs, name) for name in (cache_name, "hidden_states", "attentions")}
        outputs = output_class(loss=loss, **others)
        return outputs if return_dict else outputs.to_tuple()

    return forward


def apply_to(model: nn.Module, *, impl: str = "auto", loss: bool = True) -> dict[str, int]:
    """Replaces RMSNorm, RoPE, the gated MLP and the loss of a Hugging Face model instance, in place.

    Called with `labels`, the model then returns the loss without logits (`logits` is None), in training and evaluation.
    `num_items_in_batch`, `shift_labels` and `ignore_index` mean what they mean in transformers. The model's own forward
    runs without `labels`, and where `logits_to_keep` asks for logits.

    Args:
        model: Llama, Mistral, Ministral 3, Qwen2, Qwen3, Gemma 2, Gemma 3's text model, SmolLM3, Granite or OLMo 3,
            with or without its language-model head, or wrapped by PEFT. accelerate, FSDP and torch.compile come after
            `apply_to`.
        loss: False keeps the model's own loss, and its logits.

    Returns numbers of replacements by kind: {"rms_norm": 9, "rope": 2, "gated_mlp": 2, "loss": 1}. The log has them.

    Raises ValueError for another `model_type`, activation, loss or version of transformers; or a module that already
    has a forward of its own, for instance from an earlier `apply_to`. The model is then unchanged.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in MODEL_TYPES:
        raise ValueError(f"apply_to knows the model types {', '.join(MODEL_TYPES)}, got {model_type!r}")
    activation = model.config.hidden_activation if model_type in GEMMA else model.config.hidden_act
    if activation not in ACTIVATIONS:
        raise ValueError(f"the activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")

    replacements = []
    for module in model.modules():
        class_name, original = type(module).__name__, type(module).forward
        if class_name.endswith("RMSNorm"):
            replacements.append(("rms_norm", module, _rms_norm_forward(model_type, impl)))
        elif class_name.endswith("Attention"):
            replacements.append(("rope", module, _attention_forward(original, impl)))
        elif class_name.endswith("MLP"):
            replacements.append(("gated_mlp", module, _gated_mlp_forward(activation, impl)))
        elif loss and "lm_head" in dict(module.named_children()):
            if module.loss_function.__name__ != "ForCausalLMLoss":
                name = module.loss_function.__name__
                raise ValueError(f"the model's loss is {name}, not ForCausalLMLoss; use loss=False")
            replacements.append(("loss", module, _causal_lm_forward(original, impl)))
    for _, module, _ in replacements:
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} already has a forward of its own, from an earlier apply_to, accelerate or "
                "use_kernels; apply_to goes once, and before them"
            )

    for _, module, forward in replacements:
        module.forward = MethodType(forward, module)
    counts = dict(Counter(what for what, _, _ in replacements))
    logger.info("%s: replaced %s", type(model).__name__, ", ".join(f"{n} {what}" for what, n in counts.items()))
    return counts
