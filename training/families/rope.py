"""Rotary settings of config.json, read and written, and `extend` for longer contexts."""

import math
import re
from dataclasses import MISSING, asdict, fields, replace

from kernels.rope import ROPE_TYPES, LinearScaling, RopeScaling, YarnScaling
from model import ModelConfig
from training.families.rows import SOME_FAMILIES_ROPE, Family
from training.host.errors import UserError, refused_as_user_error

ROTARY_SETTINGS = (  # in config.json
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "original_max_position_embeddings",
)
# tokens: with room for an answer, and what its positions were made for
QWEN3_DECLARES, QWEN3_LENGTH = (40_960, 32_768)


def write_rope(config: ModelConfig, family: Family) -> dict:
    """Returns the rotary settings of config.json, apart from rope_theta where `rope_scaling` says
    all others."""
    scaling, settings = config.rope_scaling, None
    if scaling is not None:
        declared = {name: value for name, value in asdict(scaling).items() if value is not None}
        settings = {"rope_type": scaling.rope_type, **declared}
    if "partial_rotary_factor" in family.defaults:
        attention = config.attention
        partial = {"partial_rotary_factor": attention.rotary_width / attention.head_dim}
        rope = {"rope_type": "default", **(settings or {}), "rope_theta": config.rope_theta}
        return {"rope_parameters": {**rope, **partial, **family.fixed_rope}}
    if config.local_rope_theta is None:
        return {"rope_scaling": settings}
    full = {"rope_type": "default", **(settings or {}), "rope_theta": config.rope_theta}
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {  # transformers 5 reads rope_parameters, older versions the others
        "rope_scaling": settings,
        "rope_local_base_freq": config.local_rope_theta,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def read_rope(content: dict, family: Family) -> tuple[dict, list[str]]:
    """Returns ModelConfig's rotary fields, and settings that are not computed here, as text."""
    by_type, needed = "rope_local_base_freq" in content, SOME_FAMILIES_ROPE & {*family.rope}
    if by_type:
        settings, local_theta, refused = _rope_by_type(content)
    else:
        tables = [content.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
        forms = [_completed(form, content) for form in tables if form] or [
            _completed(family.rope, content)
        ]
        settings, local_theta = forms[0], None
        refused = ["rope_scaling beside other rope_parameters"] * (forms[0] != forms[-1])
    rope_type, theta = settings.pop("rope_type", "default"), settings.pop("rope_theta", None)
    rotated = settings.pop("partial_rotary_factor", content.get("partial_rotary_factor") or 1.0)
    if "partial_rotary_factor" not in family.defaults and rotated != 1:
        refused.append(f"partial_rotary_factor {rotated}")
    for name, value in family.fixed_rope.items():
        if settings.pop(name, value) != value:
            refused.append(f"{name} of rotary positions other than {value}")
    original, scaling = settings.pop("original_max_position_embeddings", None), None
    if rope_type in ("yarn", "llama3") and not by_type:  # transformers gives the top level priority
        original = content.get("original_max_position_embeddings") or original
    if needed and rope_type == "default":  # YaRN of factor 1 is default positions
        rope_type, settings = "yarn", {"factor": 1.0, "llama_4_scaling_beta": 0.0, **settings}
    for name in needed:
        if settings.get(name) is None:
            raise ValueError(f"config.json's rotary settings lack {name}")
    settings.pop("max_position_embeddings", None)  # Ministral 3's files have it here once more
    if rope_type in ROPE_TYPES:
        names = {field.name: field.default is MISSING for field in fields(ROPE_TYPES[rope_type])}
        if "original_max_position_embeddings" in names:
            settings["original_max_position_embeddings"] = original or content.get(
                "max_position_embeddings"
            )
        if missing := [
            name for name, is_needed in names.items() if is_needed and settings.get(name) is None
        ]:
            raise ValueError(f"config.json's rope_type {rope_type} lacks {', '.join(missing)}")
        computed = {*names} - (SOME_FAMILIES_ROPE - needed)
        refused += [f"{name} of rope_type {rope_type}" for name in settings if name not in computed]
        scaling = None if refused else ROPE_TYPES[rope_type](**settings)
    elif rope_type != "default":
        refused.append(f"rope_type {rope_type!r} (it takes {', '.join(ROPE_TYPES)})")
    else:
        refused += [f"{name} of rotary positions" for name in settings]
    fields_of_model = {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local_theta,
    }
    return fields_of_model | {"partial_rotary_factor": rotated}, refused


def _rope_by_type(content: dict) -> tuple[dict, float, list[str]]:
    """Returns rotary settings of layers that see everything, the theta of layers with a window, and
    what is refused.

    Both kinds of layers have an entry in rope_parameters. rope_scaling adds to the first.
    transformers reads nothing beside the entries but `truncate`.
    """
    older, newer = content.get("rope_scaling") or {}, content.get("rope_parameters") or {}
    full, local = newer.get("full_attention"), {**(newer.get("sliding_attention") or {})}
    is_other = full is not None and any(
        full.get(name) != older[name] for name in older if name != "type"
    )
    refused = ["rope_scaling beside other rope_parameters"] * is_other
    both = {**({"rope_type": "default"} if full is None else full), **older}
    settings, legacy = _completed(both, content), both.get("type")
    if legacy not in (None, settings["rope_type"]):
        refused.append(
            f"type {legacy!r:.40}, which transformers does not read here (it reads rope_type)"
        )
        settings["rope_type"] = legacy
    if settings.pop("truncate", True) is not True:
        refused.append("truncate of layers without a window, which transformers does not read")
    beside = {
        name: value
        for name, value in newer.items()
        if name not in ("full_attention", "sliding_attention")
    }
    without_effect = {
        "rope_type": "default",
        "type": "default",
        "rope_theta": settings.get("rope_theta"),
    }
    if any(value not in (None, without_effect.get(name)) for name, value in beside.items()):
        refused.append(f"rope_parameters {newer!r:.60}")
    local_theta = local.pop("rope_theta", content["rope_local_base_freq"])
    unread = {name: value for name, value in local.items() if value not in (None, "default")}
    refused += [f"{name} {value!r:.40} of layers with a window" for name, value in unread.items()]
    refused += ["rope_local_base_freq None"] * (local_theta is None)
    return settings, local_theta, refused


def _completed(settings: dict, content: dict) -> dict:
    """Returns rotary settings with their type in "rope_type", and with rope_theta, which
    config.json may have beside.

    Some files have "type", or both. transformers takes "truncate": null for false. Every other null
    means nothing.
    """
    theta, rope_type = content.get("rope_theta", 1e4), settings.get("type") or "default"
    settings = {"rope_theta": theta, "rope_type": rope_type, **settings, "type": None}
    return {
        name: value for name, value in settings.items() if value is not None or name == "truncate"
    }


def extend(config: ModelConfig, text: str) -> ModelConfig:
    """Returns the model with scaled rotary frequencies, and with max_position_embeddings set to
    what they now reach.

    `text` is "yarn:4" or "linear:4", or "yarn:4:32768" if the original length is not the declared
    length. Raises UserError for another form, a factor below 1, and a model whose frequencies are
    already scaled in another way.
    """
    match = re.fullmatch(r"(yarn|linear):(\d+(?:\.\d+)?)(?::(\d{1,9}))?", text)
    if match is None or (match[1] == "linear" and match[3]):
        raise UserError(
            f"rope_scaling must look like yarn:4, yarn:4:32768 or linear:4, got {text!r}"
        )
    already, factor = config.rope_scaling, float(match[2])
    if already is not None and already.rope_type != match[1]:
        has = f"these weights have rope_type {already.rope_type}"
        raise UserError(
            f"rope_scaling {text}: {has}, not {match[1]}; drop it, or give other weights"
        )
    if isinstance(already, YarnScaling):
        yarn = already
    else:
        yarn = YarnScaling(1.0, config.max_position_embeddings)
    usual = replace(yarn, attention_factor=None)
    if math.isclose(usual.table_factor, yarn.table_factor):  # a file may spell it
        yarn = usual
    length = yarn.original_max_position_embeddings  # a second factor is of the same length
    if isinstance(already, LinearScaling):
        length = round(length / already.factor)
    length = int(match[3] or length)
    if factor * length >= 2**31:
        raise UserError(
            f"rope_scaling {text}: {factor * length:.0f} tokens are more than config.json takes; "
            "give less"
        )
    with refused_as_user_error("rope_scaling: "):
        longer: dict = {"factor": factor, "original_max_position_embeddings": length}
        scaling: RopeScaling = (
            LinearScaling(factor) if match[1] == "linear" else replace(yarn, **longer)
        )
        return replace(config, rope_scaling=scaling, max_position_embeddings=int(factor * length))


def beyond(config: ModelConfig, declared: int, longest: int, command: str = "") -> str:
    """Says that texts of `longest` tokens go past the declared context, and what stretches it; ""
    if they do not.

    `command` has the flag that stretches it, such as "training.export ": the command at hand, or
    another.
    """
    scaling = config.rope_scaling
    if longest <= declared:
        return ""
    what = f"texts of up to {longest:,} tokens, and the weights declare a context of {declared:,}"
    if isinstance(scaling, YarnScaling):
        cure = f"yarn:{math.ceil(longest / scaling.original_max_position_embeddings)}"
    elif isinstance(scaling, LinearScaling):
        cure = f"linear:{math.ceil(longest * scaling.factor / declared)}"
    elif config.model_type in ("qwen3", "qwen3_moe") and declared == QWEN3_DECLARES and not scaling:
        cure = f"yarn:{math.ceil(longest / QWEN3_LENGTH)}:{QWEN3_LENGTH}"
    else:
        cure = "" if scaling else f"yarn:{math.ceil(longest / declared)}"
    return what + (
        f"; {command}--rope_scaling {cure} stretches it (docs/long_context.md)" if cure else ""
    )
