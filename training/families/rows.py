"""Released families of models, as rows of data: what each model_type means in config.json.

A new family is a row of `FAMILIES`. Settings that no row names mean the same in every family.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kernels.parts import BlockForm


@dataclass(frozen=True)
class Family:
    """The meaning of one model_type."""

    # AttentionPart's fields of `ATTENTION` that differ from the values there.
    attention: dict = field(default_factory=dict)
    block: BlockForm = BlockForm()  # its multiplier is a model's own
    # transformers' values for settings that config.json leaves out
    defaults: dict = field(default_factory=dict)
    # settings written with these values, and refused with others
    fixed: dict = field(default_factory=dict)
    # settings with these values, whatever config.json says
    constants: dict = field(default_factory=dict)
    rope: dict = field(default_factory=dict)  # rotary settings, if config.json has none
    # rotary settings written with these values, refused with others
    fixed_rope: dict = field(default_factory=dict)
    # config.json's names for settings that most families call otherwise
    names: dict = field(default_factory=dict)
    # Tensors in files that hold several parameters of a block, by names in the block.
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    scales_embedding: bool = False  # whether embedding_multiplier is sqrt(hidden_size)
    # the beginning of transformers' class; None: the model_type with a capital
    class_name: str | None = None
    # model_type of models of text and images whose text model, without a name, is such
    wrapper: str | None = None

    def own(self, content: dict) -> dict:
        """Returns settings without the `SOME_FAMILIES` that this family does not have."""
        absent = SOME_FAMILIES.difference(self.defaults, self.fixed)
        return {name: value for name, value in content.items() if name not in absent}

    def complete(self, content: dict) -> dict:
        """Returns config.json's settings by the usual names, and the names that it leaves out."""
        content = {**DEFAULTS, **self.defaults, **self.own(content), **self.constants}
        return content | {name: content.get(theirs) for name, theirs in self.names.items()}


ATTENTION = {"qk_norm": None, "has_biases": False, "has_output_gate": False}  # most families'
# transformers' values for settings that config.json leaves out, in every family
DEFAULTS = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "is_causal": True,
}
SCALARS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
# Settings without a meaning in families whose rows do not name them. query_pre_attn_scalar is
# 1 / attention_multiplier^2. Each sliding_window_pattern-th layer has no window, and the
# frequencies of layers with a window are of rope_local_base_freq. no_rope_layers has 1 for each
# layer with rotary positions. linear_* are sizes of gated delta nets: all layers but each
# full_attention_interval-th, if layer_types does not name them.
DELTA_NET = (  # in the order of kernels.gated_delta_net.DeltaNet's sizes
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
# Experts, in each decoder_sparse_step-th layer that mlp_only_layers does not name. Only
# output_router_logits makes router_aux_loss_coef count.
EXPERTS = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
SHARED_EXPERT = "shared_expert_intermediate_size"  # of an expert that every token goes through
NUMBER_OF_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"
SOME_FAMILIES = {
    *SCALARS,
    *DELTA_NET,
    *EXPERTS,
    SHARED_EXPERT,
    "query_pre_attn_scalar",
    "use_sliding_window",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "no_rope_layers",
    "no_rope_layer_interval",
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "attn_output_gate",
}
# the same of rotary settings; families that name them need them
SOME_FAMILIES_ROPE = {"llama_4_scaling_beta"}
NO_BIASES = {"attention_bias": False}  # one setting for q, k, v and o
QWEN35_ATTENTION = {"qk_norm": "head", "has_output_gate": True}
QWEN35_BLOCK = BlockForm(offset=1.0, cast=False)
QWEN35_DEFAULTS = {
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    **dict(zip(DELTA_NET, (16, 32, 128, 128))),
}
WINDOW_SWITCH = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES = {
    "qwen3": Family(
        attention={"qk_norm": "head"},
        defaults={"head_dim": 128, "max_position_embeddings": 32_768, **WINDOW_SWITCH},
        fixed=NO_BIASES,
    ),
    "qwen3_moe": Family(
        attention={"qk_norm": "head"},
        defaults={
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "num_experts": 128,
            **EXPERTS,
        },
        fixed={"use_sliding_window": False, **NO_BIASES},
        class_name="Qwen3Moe",
    ),
    "qwen2": Family(
        attention={"has_biases": True},
        defaults={"max_position_embeddings": 32_768, **WINDOW_SWITCH},
    ),
    "llama": Family(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048}, fixed=NO_BIASES
    ),
    "mistral": Family(
        defaults={"sliding_window": 4096, "max_position_embeddings": 131_072},
        fixed={"sliding_window": None, **NO_BIASES},
        wrapper="mistral3",  # ministral3 says its name there
    ),
    "ministral3": Family(
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 34,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262_144,
        },
        fixed={"sliding_window": None},
        rope={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "smollm3": Family(
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "max_position_embeddings": 32_768,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        fixed={"use_sliding_window": False, **NO_BIASES},
        class_name="SmolLM3",
    ),
    "granite": Family(
        defaults={
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            **dict.fromkeys(SCALARS, 1.0),
        },
        fixed=NO_BIASES,
    ),
    "olmo2": Family(
        attention={"qk_norm": "width"},
        block=BlockForm(before=False, after=True, cast=False),
        defaults={
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
        },
        fixed=NO_BIASES,
    ),
    "olmo3": Family(
        attention={"qk_norm": "width"},
        block=BlockForm(before=False, after=True, cast=False),
        defaults={
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "max_position_embeddings": 2048,
        },
        fixed=NO_BIASES,
        constants={"sliding_window_pattern": 4, "rope_local_base_freq": 5e5},
    ),
    "gemma3_text": Family(
        attention={"qk_norm": "head"},
        block=BlockForm(after=True, offset=1.0, cast=False),
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
        },
        fixed={"use_bidirectional_attention": False, **NO_BIASES},
        names={"hidden_act": "hidden_activation"},
        scales_embedding=True,
        class_name="Gemma3",
        wrapper="gemma3",
    ),
    "qwen3_5_text": Family(
        attention=QWEN35_ATTENTION,
        block=QWEN35_BLOCK,
        defaults={
            **QWEN35_DEFAULTS,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        fixed={"attn_output_gate": True, "linear_conv_kernel_dim": 4, **NO_BIASES},
        # of pictures' positions
        fixed_rope={"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        class_name="Qwen3_5",
        wrapper="qwen3_5",
    ),
    "qwen3_5_moe_text": Family(
        attention=QWEN35_ATTENTION,
        block=QWEN35_BLOCK,
        defaults={
            **QWEN35_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 512,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
        fixed={"attn_output_gate": True, "linear_conv_kernel_dim": 4, **NO_BIASES},
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None},
        fixed_rope={"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        class_name="Qwen3_5Moe",
        wrapper="qwen3_5_moe",
    ),
}
WRAPPERS = {family.wrapper: model_type for model_type, family in FAMILIES.items() if family.wrapper}
# Layers that predict further tokens, whose tensors are not trained. GGUF's converter believes what
# it says.
MTP_LAYERS = "mtp_num_hidden_layers"
HAVE_MTP = "qwen3_5_text", "qwen3_5_moe_text"  # families
# transformers' names of text models, alone and inside
PREFIX, WRAPPED_PREFIX = ("model.", "model.language_model.")
OLDER_PREFIX = "language_model.model."  # of text models inside, in transformers 4


def is_wrapper(content: dict) -> bool:
    """Whether a config.json is of text and images, with its text model in `text_config`."""
    return content.get("model_type") in (*WRAPPERS,) and "text_config" in content


TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"  # in config.json
# Other settings of generation that config.json may have.
# They count where there is no generation_config.json.
GENERATION = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "length_penalty",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "early_stopping",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
)


def token_ids(content: dict) -> dict:
    """Returns the token ids that a config.json names.

    A text model's count where the whole model names none.
    """
    return _of_whole_or_text(content, TOKEN_IDS)


def generation_settings(content: dict) -> dict:
    """Returns the token ids and other settings of generation in a config.json, as `token_ids`."""
    return _of_whole_or_text(content, (*TOKEN_IDS, *GENERATION))


def _of_whole_or_text(content: dict, names: Sequence[str]) -> dict:
    text = content.get("text_config") if is_wrapper(content) else None
    places = content, text if isinstance(text, dict) else {}
    entries = {
        name: [place[name] for place in places if place.get(name) is not None] for name in names
    }
    return {name: values[0] for name, values in entries.items() if values}


ACTIVATIONS = {  # config.json's name -> GatedMLPPart's; the first of each is written
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
EMPTY: tuple = None, False, 0, "", [], {}
TAKEN = {  # values of settings, in every family; others are not computed
    **dict.fromkeys(("mlp_bias", "quantization_config", "compression_config"), EMPTY),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), EMPTY),
    **dict.fromkeys(NUMBER_OF_EXPERTS, EMPTY),
    "is_causal": (True,),
    "hidden_act": tuple(ACTIVATIONS),
}
# Settings without which there is no model, each beside Qwen3 4B's value: with one name and meaning
# in config.json and in ModelConfig, and the sizes of its attention and of its dense MLPs.
FIELDS = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 40_960,
}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
NEEDED = {**FIELDS, **HEADS, "intermediate_size": 9728}
