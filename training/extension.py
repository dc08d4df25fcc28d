"""--rope_scaling: released weights at contexts longer than those that they were trained on."""

import re
from dataclasses import replace

from kernels.rope import LinearScaling, RopeScaling, YarnScaling
from model import ModelConfig
from training.host.errors import UserError, refused_as_user_error


def extend(config: ModelConfig, text: str) -> ModelConfig:
    """The model with rotary frequencies scaled, and the length declared that they then reach.

    Args:
        text: "yarn:4", "yarn:4:32768" with the original length where it is not the declared one, or "linear:4".

    Raises:
        UserError: another form, a factor below 1, or a model whose frequencies are scaled in another way already.
    """
    match = re.fullmatch(r"(yarn|linear):(\d+(?:\.\d+)?)(?::(\d{1,9}))?", text)
    if match is None or (match[1] == "linear" and match[3]):
        raise UserError(f"rope_scaling must look like yarn:4, yarn:4:32768 or linear:4, got {text!r}")
    already, factor = config.rope_scaling, float(match[2])
    if already is not None and already.rope_type != match[1]:
        raise UserError(
            f"rope_scaling {text}: these weights have rope_type {already.rope_type}, which does not go together with "
            f"{match[1]}; drop it, or give other weights"
        )
    length = config.max_position_embeddings
    if isinstance(already, YarnScaling):  # another factor, of the same original length
        length = already.original_max_position_embeddings
    elif isinstance(already, LinearScaling):
        length = round(length / already.factor)
    length = int(match[3] or length)
    with refused_as_user_error("rope_scaling: "):
        scaling: RopeScaling = LinearScaling(factor) if match[1] == "linear" else YarnScaling(factor, length)
    if factor * length >= 2**31:
        raise UserError(f"rope_scaling {text}: {factor * length:.0f} tokens are more than config.json takes; give less")
    return replace(config, rope_scaling=scaling, max_position_embeddings=int(factor * length))
