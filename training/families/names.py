"""Names of tensors in files: Hugging Face's of weights, peft's of adapters.

A weight's name in a file is ours behind a prefix: model.norm.weight for norm.weight. Only
lm_head.weight has none.
"""

import re

from training.families.lora import ADAPTERS
from training.families.rows import PREFIX

PEFT_PREFIX = "base_model.model."  # begins adapters' names in peft's files
NOT_WEIGHTS = "rotary_emb.inv_freq"  # tables in older files of Llama
# Models of text and images have other prefixes before their text model's names, and parts that are
# not trained.
TEXT_MODEL = re.compile(r"^(model\.language_model\.|language_model\.)?(model\.)?")
NOT_TRAINED = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\.")

# A parameter of all experts. Files may have a matrix for each expert in its place, in the order of
# its elements.
EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")
OF_EACH_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def by_expert(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the matrices of each expert that files may have in place of a parameter of all, with
    their shapes.

    For layers.0.mlp.experts.down_proj of [2, 8, 4] these are
    layers.0.mlp.experts.0.down_proj.weight [8, 4] and layers.0.mlp.experts.1.down_proj.weight [8,
    4]. Other parameters have none.
    """
    if not (found := EXPERTS.fullmatch(name)):
        return {}
    each = OF_EACH_EXPERT[found[2]]
    rows = shape[1] // len(each), shape[2]
    return {
        f"{found[1]}{expert}.{matrix}.weight": rows for expert in range(shape[0]) for matrix in each
    }


def name_in_file(name: str, prefix: str = PREFIX) -> str:
    """Returns a weight's name in Hugging Face's files, or an adapter's in peft's.

    Older files have "language_model.model." as their prefix, and language_model.lm_head.weight.
    """
    if ADAPTERS in name:
        return f"{PEFT_PREFIX}{prefix}{name}"
    if name == "lm_head.weight":
        return f"language_model.{name}" if prefix.startswith("language_model.") else name
    return prefix + name


def name_of(key: str) -> str | None:
    """Returns our name of a tensor in a file; None if it belongs to a part of the model that is not
    trained."""
    return None if NOT_TRAINED.match(key) else TEXT_MODEL.sub("", key.removeprefix(PEFT_PREFIX))
