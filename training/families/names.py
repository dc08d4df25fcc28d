"""Names of tensors in files: Hugging Face's of weights, peft's of adapters.

A weight's name in a file is ours behind a prefix: model.norm.weight for norm.weight. Only
lm_head.weight has none.
"""

import re
from typing import NamedTuple

from kernels.parts import Parameter
from training.families.rows import PREFIX

PEFT_PREFIX = "base_model.model."  # begins adapters' names in peft's files
NOT_WEIGHTS = "rotary_emb.inv_freq"  # tables in older files of Llama
# Models of text and images have other prefixes before their text model's names, and parts that are
# not trained.
TEXT_MODEL = re.compile(r"^(model\.language_model\.|language_model\.)?(model\.)?")
NOT_TRAINED = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\.")


class Rows(NamedTuple):
    """Rows of a tensor in files, which hold a parameter or a part of it."""

    tensor: str  # the tensor's name
    shape: tuple[int, ...]  # the tensor's
    first: int = 0


def in_files(name: str, parameter: Parameter, by_expert: bool) -> list[Rows]:
    """Returns where files have a parameter, in the order of its elements, by our names of tensors.

    With `by_expert` files have a tensor for each matrix of each expert. These are
    layers.0.mlp.experts.0.down_proj.weight [8, 4] and layers.0.mlp.experts.1.down_proj.weight
    [8, 4] in place of layers.0.mlp.experts.down_proj [2, 8, 4].
    """
    shape, matrices = parameter.shape, parameter.matrices
    if fused := parameter.fused:
        tensor = f"layers.{parameter.block}.{fused.tensor}"
        return [Rows(tensor, (fused.num_rows, *shape[1:]), fused.first_row)]
    if not (by_expert and matrices):
        return [Rows(name, shape)]
    module, _, _ = name.rpartition(".")
    num_experts, num_rows, num_columns = shape
    matrix_shape = num_rows // len(matrices), num_columns
    return [
        Rows(f"{module}.{expert}.{matrix}.weight", matrix_shape)
        for expert in range(num_experts)
        for matrix in matrices
    ]


def name_in_file(name: str, prefix: str = PREFIX, is_adapter: bool = False) -> str:
    """Returns a weight's name in Hugging Face's files, or an adapter's in peft's.

    Older files have "language_model.model." as their prefix, and language_model.lm_head.weight.
    """
    if is_adapter:
        return f"{PEFT_PREFIX}{prefix}{name}"
    if name == "lm_head.weight":
        return f"language_model.{name}" if prefix.startswith("language_model.") else name
    return prefix + name


def name_of(key: str) -> str | None:
    """Returns our name of a tensor in a file; None if it belongs to a part that is not trained."""
    return None if NOT_TRAINED.match(key) else TEXT_MODEL.sub("", key.removeprefix(PEFT_PREFIX))
