"""Names of tensors in files: Hugging Face's of weights, peft's of adapters.

A weight's name in a file is ours behind "model.": model.norm.weight for norm.weight. Only lm_head.weight has one name.
"""

import re

from training.families.lora import ADAPTERS

PEFT_PREFIX = "base_model.model."  # begins adapters' names in peft's files
NOT_WEIGHTS = "rotary_emb.inv_freq"  # tables in older files of Llama
# Models of text and images have these prefixes before their text model's names, and parts that are left out.
TEXT_MODEL = re.compile(r"^(model\.language_model\.|language_model\.)?(model\.)?")
OTHER_MODELS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")


def name_in_file(name: str) -> str:
    """Returns a weight's name in Hugging Face's files, or an adapter's in peft's."""
    if ADAPTERS in name:
        return f"{PEFT_PREFIX}model.{name}"
    return name if name == "lm_head.weight" else f"model.{name}"


def name_of(key: str) -> str | None:
    """Returns our name of a tensor in a file; None if it belongs to a part of the model that is left out."""
    return None if OTHER_MODELS.match(key) else TEXT_MODEL.sub("", key.removeprefix(PEFT_PREFIX))
