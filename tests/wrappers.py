"""Models of text and images, as transformers and others save them."""

import json

import torch
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None, "eos_token_id": 7,
}  # fmt: skip
TEXT = {
    "gemma3": {
        "model_type": "gemma3_text", **SIZES, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral3": {
        "model_type": "ministral3", **SIZES,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
            "rope_theta": 1e5,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", **SIZES,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
}  # fmt: skip
TEXT["qwen3_5_moe"] = TEXT["qwen3_5"] | {
    "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
VISION = {"gemma3": TOWER, "mistral3": TOWER, "qwen3_5": {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 48,
    "patch_size": 8,
    "num_position_embeddings": 16,
}}  # fmt: skip
VISION["qwen3_5_moe"] = VISION["qwen3_5"]
FORMS = [
    (wrapper, is_newer)
    for wrapper in TEXT
    for is_newer in (False, True)
    if is_newer or "qwen" not in wrapper
]
EXACT = ("A_log", "linear_attn.norm.weight")  # float32 in released files


def release(wrapper, folder, *, is_newer=False, is_tied=True, dtype=torch.float32):
    """Saves a random model of text and images by transformers, as older files or newer ones name
    its tensors.

    Its text model is in `dtype`. What is not trained has unlike dtypes and sizes, an infinity, and
    tables that transformers passes over.
    """
    import transformers

    config = transformers.AutoConfig.for_model(
        wrapper, text_config={**TEXT[wrapper], "tie_word_embeddings": is_tied},
        vision_config=VISION[wrapper],
        tie_word_embeddings=is_tied, mm_tokens_per_image=1, eos_token_id=7,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tensors, others = {}, (torch.float32, torch.bfloat16, torch.float16)
    for i, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        is_own = is_trained(name)
        if is_newer and not name.startswith("model.") and name != "lm_head.weight":
            name = name.replace("language_model.model.", "language_model.")
            name = name.removeprefix("language_model.") if "lm_head" in name else f"model.{name}"
        tensors[name] = tensor.to(
            others[i % 3] if not is_own else torch.float32 if name.endswith(EXACT) else dtype
        )
    tower = "mtp" if wrapper == "qwen3_5" else "model.vision_tower" if is_newer else "vision_tower"
    tensors |= {
        f"{tower}.position_ids": torch.arange(5),
        f"{tower}.mask": torch.tensor([True, False, True]),
        f"{tower}.scale": torch.tensor(float("inf"), dtype=torch.bfloat16),
        f"{tower}.none": torch.empty(0, 3),
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["dtype"] = content["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    content["text_config"]["setting_of_others"] = 3
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def is_trained(name):
    return "language_model" in name or "lm_head" in name


def bits_of(tensors, which=lambda name: True):
    """Returns name -> (dtype, shape, bytes)."""
    return {
        name: (
            t.dtype,
            tuple(t.shape),
            t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in tensors.items()
        if which(name)
    }


def not_trained(folder):
    """Returns the tensors of a folder that no run trains, as `bits_of`."""
    return bits_of(load_file(folder / "model.safetensors"), lambda name: not is_trained(name))


def whole_model(folder):
    """Returns transformers' model of text and images in float32."""
    import transformers

    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
