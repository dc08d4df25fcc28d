"""Released families of models: the meaning of their config.json as rows of data, and config.json in and out.

`FAMILIES` has a row for each model_type. config.json is read as transformers does, and each setting that the decoder
would compute differently is refused by name. It is written for transformers to make the same model.
"""

import math
import re
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial

from kernels.attention import KINDS
from kernels.attention.full import Full
from kernels.attention.window import Window
from kernels.parts import AttentionKind
from kernels.rope import ROPE_TYPES, LinearScaling, RopeScaling, YarnScaling
from model import MODEL_SIZES, ModelConfig
from training.host.errors import UserError, refused_as_user_error


@dataclass(frozen=True)
class Family:
    """The meaning of one model_type. Settings that rows do not name mean the same in every family."""

    form: dict = field(default_factory=dict)  # ModelConfig's fields of `FORM` that differ from the values there
    head_dim: int | None = None  # if config.json has none; None: hidden_size / num_attention_heads
    defaults: dict = field(default_factory=dict)  # transformers' values for settings that config.json leaves out
    fixed: dict = field(default_factory=dict)  # settings written with these values, and refused with others
    has_window_switch: bool = False  # whether use_sliding_window gives layers a window, those that layer_types names
    full_every: int | None = None  # layer_types' default: each so many-th layer sees everything, the others a window
    local_rope_theta: float | None = None  # layers with a window have own frequencies, of this theta by default
    has_no_rope_layers: bool = False  # whether no_rope_layers says which layers have rotary positions
    scalars: tuple[str, ...] = ()  # ModelConfig's scalars that config.json has, by the same names
    has_query_scalar: bool = False  # whether query_pre_attn_scalar is 1 / attention_multiplier^2
    scales_embedding: bool = False  # whether embedding_multiplier is sqrt(hidden_size)
    rope_settings: tuple[str, ...] = ()  # settings of rotary positions that this family alone computes, and needs
    rope: dict = field(default_factory=dict)  # rotary settings, if config.json has none
    names: dict = field(default_factory=dict)  # config.json's names for settings that most families call otherwise
    class_name: str | None = None  # the beginning of transformers' class; None: the model_type with a capital


FORM = {  # most families'
    "qk_norm": None, "has_qkv_biases": False, "norms_before": True, "norms_after": False, "norm_weight_offset": 0.0,
    "norm_cast_before_weight": True,
}  # fmt: skip
SCALARS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
NO_BIASES = {"attention_bias": False}  # one setting for q, k, v and o
FAMILIES = {
    "qwen3": Family(
        form={"qk_norm": "head"}, defaults={"max_position_embeddings": 32_768}, head_dim=128, fixed=NO_BIASES,
        has_window_switch=True,
    ),
    "qwen2": Family(
        form={"has_qkv_biases": True}, defaults={"max_position_embeddings": 32_768}, has_window_switch=True
    ),
    "llama": Family(defaults={"num_key_value_heads": None, "max_position_embeddings": 2048}, fixed=NO_BIASES),
    "mistral": Family(
        defaults={"sliding_window": 4096, "max_position_embeddings": 131_072},
        fixed={"sliding_window": None, **NO_BIASES},
    ),
    "ministral3": Family(
        defaults={
            "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262_144,
        },
        head_dim=128, fixed={"sliding_window": None}, rope_settings=("llama_4_scaling_beta",),
        rope={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    ),
    "smollm3": Family(
        defaults={
            "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6, "max_position_embeddings": 32_768,
        },
        fixed={"use_sliding_window": False, **NO_BIASES}, has_no_rope_layers=True, class_name="SmolLM3",
    ),
    "granite": Family(
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048, **dict.fromkeys(SCALARS, 1.0)},
        fixed=NO_BIASES, scalars=SCALARS,
    ),
    "olmo3": Family(
        form={"qk_norm": "width", "norms_before": False, "norms_after": True, "norm_cast_before_weight": False},
        defaults={
            "num_key_value_heads": None, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096,
            "max_position_embeddings": 2048,
        },
        fixed=NO_BIASES, full_every=4, local_rope_theta=5e5,
    ),
    "gemma3_text": Family(
        form={
            "qk_norm": "head", "norms_after": True, "norm_weight_offset": 1.0, "norm_cast_before_weight": False,
        },
        defaults={
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072, "tie_word_embeddings": True, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "sliding_window": 4096, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
        },
        head_dim=256, fixed={"use_bidirectional_attention": False, **NO_BIASES}, full_every=6, local_rope_theta=1e4,
        has_query_scalar=True, scales_embedding=True, names={"hidden_act": "hidden_activation"}, class_name="Gemma3",
    ),
}  # fmt: skip
OWN_ROPE_SETTINGS = {name for family in FAMILIES.values() for name in family.rope_settings}
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "ministral3"}  # models of text and images -> their text model
# transformers' values for settings that config.json leaves out, in every family
DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "hidden_act": "silu"}
NOT_COMPUTED = (
    "mlp_bias", "quantization_config", "attn_logit_softcapping", "final_logit_softcapping",
    "num_experts", "num_local_experts", "n_routed_experts",
)  # fmt: skip
ACTIVATIONS = {  # config.json's name -> ModelConfig's; the first of each is written
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip
FIELDS = (  # settings with one name and meaning in config.json and in ModelConfig
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "rms_norm_eps", "initializer_range",
    "max_position_embeddings",
)  # fmt: skip
MOST_LAYERS = 4096  # a limit, because plans have something for each layer


def in_family(config: ModelConfig, model_type: str) -> ModelConfig:
    """Returns the same sizes with the norms, biases and other forms of a family.

    Raises:
        KeyError: no row of `FAMILIES` has this model_type.
    """
    family = FAMILIES[model_type]
    form, local_theta = {**FORM, **family.form}, family.local_rope_theta
    if local_theta is not None and config.local_rope_theta is not None:
        local_theta = config.local_rope_theta
    if family.scales_embedding:
        form["embedding_multiplier"] = config.hidden_size**0.5
    return replace(config, model_type=model_type, local_rope_theta=local_theta, **form)


def to_config_json(config: ModelConfig) -> dict:
    """Returns the config.json of a model. transformers opens it unless attention has parameters of its own.

    Raises:
        ValueError: no row of `FAMILIES` has this model_type, or config.json of this row cannot say what the model has.
    """
    if config.model_type not in FAMILIES or config != in_family(config, config.model_type):
        unknown = ", ".join(f"{name} {getattr(config, name)!r}" for name in ("model_type", *FORM))
        raise ValueError(f"no family has {unknown}; training/families.py has a row for {', '.join(FAMILIES)}")
    family, scaling = FAMILIES[config.model_type], config.rope_scaling
    own = "".join({kind.name for kind in config.layer_kinds if kind.gates_per_head})
    windows = [kind.window if isinstance(kind, Window) else None for kind in config.kinds]
    is_plain = all(isinstance(kind, (Full, Window)) for kind in config.kinds) and len({*windows} - {None}) <= 1
    can_say = len({kind.name for kind in config.kinds}) == 1 if own else is_plain
    can_say &= family.has_window_switch or family.full_every is not None or not any(windows)
    can_say &= not (own and family.full_every)
    can_say &= family.local_rope_theta is None or getattr(scaling, "truncate", True)
    can_say &= family.has_no_rope_layers or all(config.layer_rotates)
    multiplier = config.attention_multiplier or config.head_dim**-0.5
    query_scalar = round(multiplier**-2)
    can_say &= not family.has_query_scalar or (query_scalar > 0 and query_scalar**-0.5 == multiplier)
    said = {*family.scalars, *_implied_scalars(family)}
    for name in OWN_ROPE_SETTINGS:
        can_say &= (getattr(scaling, name, None) is not None) == (name in family.rope_settings)
    can_say &= all(getattr(config, name) == getattr(MODEL_SIZES["4B"], name) for name in {*SCALARS} - said)
    if not can_say:
        raise ValueError(f"model_type {config.model_type!r} has no config.json for these kinds of layers or scalars")
    content = {
        "model_type": config.model_type + (own and f"_{own}"),
        "architectures": [f"{family.class_name or config.model_type.capitalize()}{own.upper()}ForCausalLM"],
        **{name: getattr(config, name) for name in FIELDS},
        "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.hidden_act),
        "rope_scaling": None,
        **family.fixed,
        **{name: getattr(config, name) for name in family.scalars},
    }
    for name, theirs in family.names.items():
        content[theirs] = content.pop(name)
    if "attention_multiplier" in family.scalars:
        content["attention_multiplier"] = multiplier
    if family.has_query_scalar:
        content["query_pre_attn_scalar"] = query_scalar
    if family.has_no_rope_layers:
        rotates, layers = config.layer_rotates, config.num_hidden_layers
        content["no_rope_layers"] = [int(rotates[i % len(rotates)]) for i in range(layers)]
    if any(windows) or family.full_every:
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        content |= {"sliding_window": max(filter(None, windows), default=4096), "layer_types": types}
        content |= {"use_sliding_window": True} if family.has_window_switch else {}
    if scaling is not None:
        given = {name: value for name, value in asdict(scaling).items() if value is not None}
        content["rope_scaling"] = {"rope_type": scaling.rope_type, **given}
    if family.local_rope_theta is not None:  # transformers 5 reads these, older ones what stands above
        if "rope_local_base_freq" in family.defaults:
            content["rope_local_base_freq"] = config.local_rope_theta
        full = {"rope_type": "default", **(content["rope_scaling"] or {}), "rope_theta": config.rope_theta}
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        content["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return content


def _implied_scalars(family: Family) -> list[str]:
    """Returns ModelConfig's scalars that other settings of config.json imply."""
    return family.has_query_scalar * ["attention_multiplier"] + family.scales_embedding * ["embedding_multiplier"]


def from_config_json(content: dict) -> ModelConfig:
    """Returns the model that config.json declares. Rotary settings may be in `rope_scaling` or `rope_parameters`.

    A model of text and images has its text model's settings in `text_config`.

    Raises:
        ValueError: a model_type without a row in `FAMILIES`, a setting that the decoder does not compute, a missing
            field, or a value of the wrong type or out of range.
    """
    try:
        config = _read(content)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"a value is of the wrong type or out of range ({error})") from None
    for name in FIELDS:
        found, like = getattr(config, name), getattr(MODEL_SIZES["4B"], name)
        types = (int, float) if isinstance(like, float) else (type(like),)
        most = math.inf if name == "rope_theta" else 2**31
        if type(found) not in types or (type(found) in (int, float) and not 0 < found < most):
            raise ValueError(f"{name} is {found!r:.80}; it must be as {like!r} is")
    for theta in (config.rope_theta, config.local_rope_theta):
        if theta is not None and not (type(theta) in (int, float) and 1 < theta < 2**63):
            raise ValueError(f"rope_theta must be above 1, got {theta!r:.80}")
    if config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}; at most {MOST_LAYERS} are built")
    return config


def _read(content: dict) -> ModelConfig:
    """Returns the model for `from_config_json`, which then checks the types and ranges of values."""
    if (wrapper := content.get("model_type")) in WRAPPERS and "text_config" in content:
        outer = {name: content[name] for name in ("tie_word_embeddings", "quantization_config") if name in content}
        content = {"model_type": WRAPPERS[wrapper], **content["text_config"], **outer}
    declared_type = str(content.get("model_type"))
    with_parameters = {f"_{name}": kind for name, kind in KINDS.items() if kind.gates_per_head}
    suffix = next((suffix for suffix in with_parameters if declared_type.endswith(suffix)), "")
    model_type, kind = declared_type.removesuffix(suffix), with_parameters.get(suffix, Full)
    if model_type not in FAMILIES:
        refused = [f"model_type {content.get('model_type')!r} (it takes {', '.join([*FAMILIES, *WRAPPERS])})"]
    else:
        family = FAMILIES[model_type]
        content = {**DEFAULTS, **family.defaults, **content}
        content |= {name: content.get(theirs) for name, theirs in family.names.items()}
        rope = _read_rope(content, family)
        refused = _refused(content, family) + rope.pop("refused")
    if suffix and not refused and _has_windows(content, family):
        refused = [f"windows in layers of {suffix[1:]}"]
    if refused:
        raise ValueError(f"config.json has {', '.join(refused)}, which this decoder does not compute")
    content |= rope
    heads = content.get("num_attention_heads")
    if content.get("num_key_value_heads", 0) is None:
        content["num_key_value_heads"] = heads
    if content.get("head_dim") is None and heads and content.get("hidden_size"):
        content["head_dim"] = family.head_dim or content["hidden_size"] // heads
    if missing := [name for name in FIELDS if content.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    config = ModelConfig(
        **{name: content[name] for name in FIELDS},
        hidden_act=ACTIVATIONS[content["hidden_act"]],
        layer_kinds=_layer_kinds(content, family) if _has_windows(content, family) else (kind(),),
        layer_rotates=_layer_rotates(content) if family.has_no_rope_layers else (True,),
        rope_scaling=content["rope_scaling"],
        local_rope_theta=content["local_rope_theta"],
        **_read_scalars(content, family),
    )
    return in_family(config, model_type)


def _refused(content: dict, family: Family) -> list[str]:
    """Returns the settings that the decoder does not compute, as text, without rotary settings."""
    refused = [f"{name} {content[name]!r:.60}" for name in NOT_COMPUTED if content.get(name)]
    for name, value in family.fixed.items():
        found = content.get(name)
        if found is not None and found != value:
            refused.append(f"{name} {found!r:.60}")
    if not content.get("is_causal", True):
        refused.append("is_causal False")
    if "AutoModelForCausalLM" in (content.get("auto_map") or ()):
        refused.append("code of its own in auto_map")
    if content.get("hidden_act") not in ACTIVATIONS:
        refused.append(f"hidden_act {content.get('hidden_act')!r}")
    known = {"full_attention"} | ({"sliding_attention"} if _has_windows(content, family) else set())
    if other_layers := sorted({*(content.get("layer_types") or ())} - known):
        refused.append(f"layers of {', '.join(other_layers)}")
    return refused


def _has_windows(content: dict, family: Family) -> bool:
    """Whether layers may have a window."""
    has_window = content.get("use_sliding_window") and content.get("sliding_window", 4096) is not None
    return bool(family.full_every or (family.has_window_switch and has_window))


def _layer_kinds(content: dict, family: Family) -> tuple[AttentionKind, ...]:
    """Returns the kinds that repeat through the layers.

    Without layer_types, each so many-th layer has no window. Behind a switch, layers from max_window_layers on have it.
    """
    window, layers = content.get("sliding_window", 4096), content["num_hidden_layers"]
    if type(window) is not int:
        raise TypeError(f"sliding_window is {window!r:.80}")
    if layers > MOST_LAYERS:  # the caller refuses so many
        return (Full(),)
    types = content.get("layer_types")
    if types:
        has_window = [name == "sliding_attention" for name in types]
    elif family.full_every:
        every = content["sliding_window_pattern"] if "sliding_window_pattern" in family.defaults else family.full_every
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"sliding_window_pattern is {every!r:.80}; it must be a whole number above 0")
        has_window = [(i + 1) % every != 0 for i in range(layers)]
    else:
        has_window = [i >= content.get("max_window_layers", 28) for i in range(layers)]
    if len(has_window) != layers:
        raise ValueError(f"layer_types names {len(has_window)} layers of {layers}")
    return tuple(Window(window) if is_window else Full() for is_window in _pattern(has_window))


def _pattern(of_layers: list) -> list:
    """Returns the shortest beginning that repeats through all layers."""
    count = len(of_layers)
    return of_layers[: next((n for n in range(1, count + 1) if of_layers[n:] == of_layers[: count - n]), 0)]


def _layer_rotates(content: dict) -> tuple[bool, ...]:
    """Returns whether layers have rotary positions, a pattern that repeats: no_rope_layers has 1 where they have."""
    layers, interval = content["num_hidden_layers"], content.get("no_rope_layer_interval", 4)
    if layers > MOST_LAYERS:  # the caller refuses so many
        return (True,)
    rotates = content.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotates, list) or {*rotates} - {0, 1}:
        raise TypeError(f"no_rope_layers is {rotates!r:.60}")
    if len(rotates) < layers:
        raise ValueError(f"no_rope_layers names {len(rotates)} layers of {layers}")
    return tuple(map(bool, _pattern(rotates[:layers])))


def _read_scalars(content: dict, family: Family) -> dict:
    """Returns ModelConfig's scalars; attention's is None where it is 1 / sqrt(head_dim)."""
    scalars: dict[str, float | None] = {}
    for name in family.scalars:
        value = content[name]
        if type(value) not in (int, float) or not 0 < value < 2**31:
            raise ValueError(f"{name} is {value!r:.80}; it must be a number above 0")
        scalars[name] = float(value)
    if family.has_query_scalar:
        value = content["query_pre_attn_scalar"]
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(f"query_pre_attn_scalar is {value!r:.80}; it must be a whole number above 0")
        scalars["attention_multiplier"] = value**-0.5
    if scalars.get("attention_multiplier") == content["head_dim"] ** -0.5:
        scalars["attention_multiplier"] = None
    return scalars


def _read_rope(content: dict, family: Family) -> dict:
    """Returns ModelConfig's rotary fields, and "refused", settings that are not computed here."""
    by_type = family.local_rope_theta is not None
    settings, local_theta, refused = (_rope_by_type if by_type else _rope_of_all_layers)(content, family)
    rope_type, theta = settings.pop("rope_type", "default"), settings.pop("rope_theta", None)
    rotated = settings.pop("partial_rotary_factor", content.get("partial_rotary_factor") or 1.0)
    refused += [] if rotated == 1 else [f"partial_rotary_factor {rotated}"]
    original, scaling = settings.pop("original_max_position_embeddings", None), None
    if rope_type in ("yarn", "llama3") and not by_type:  # transformers gives the top level priority
        original = content.get("original_max_position_embeddings") or original
    if family.rope_settings and rope_type == "default":  # YaRN of factor 1 is default positions
        rope_type, settings = "yarn", {"factor": 1.0, "llama_4_scaling_beta": 0.0, **settings}
    for name in family.rope_settings:
        if settings.get(name) is None:
            raise ValueError(f"config.json's rotary settings lack {name}")
    settings.pop("max_position_embeddings", None)  # Ministral 3's files have it here once more
    if rope_type in ROPE_TYPES:
        names = {field.name: field.default is MISSING for field in fields(ROPE_TYPES[rope_type])}
        if "original_max_position_embeddings" in names:
            settings["original_max_position_embeddings"] = original or content.get("max_position_embeddings")
        if missing := [name for name, is_needed in names.items() if is_needed and settings.get(name) is None]:
            raise ValueError(f"config.json's rope_type {rope_type} lacks {', '.join(missing)}")
        computed = {*names} - ({*OWN_ROPE_SETTINGS} - {*family.rope_settings})
        refused += [f"{name} of rope_type {rope_type}" for name in settings if name not in computed]
        scaling = None if refused else ROPE_TYPES[rope_type](**settings)
    elif rope_type != "default":
        refused.append(f"rope_type {rope_type!r} (it takes {', '.join(ROPE_TYPES)})")
    else:
        refused += [f"{name} of rotary positions" for name in settings]
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local_theta, "refused": refused}


def _rope_of_all_layers(content: dict, family: Family) -> tuple[dict, None, list[str]]:
    """Returns rotary settings from rope_scaling or rope_parameters, no theta of windows, and what is refused."""
    found = [content.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    forms = [_completed(each, content) for each in found if each] or [_completed(family.rope, content)]
    return forms[0], None, ["rope_scaling beside other rope_parameters"] if forms[0] != forms[-1] else []


def _rope_by_type(content: dict, family: Family) -> tuple[dict, float, list[str]]:
    """Returns rotary settings of layers that see everything, the theta of layers with a window, and what is refused.

    Both kinds of layers have an entry in rope_parameters. rope_scaling adds to the first. transformers reads nothing
    beside the entries but `truncate`.
    """
    older, newer = content.get("rope_scaling") or {}, content.get("rope_parameters") or {}
    full, local = newer.get("full_attention"), {**(newer.get("sliding_attention") or {})}
    is_other = full is not None and any(full.get(name) != older[name] for name in older if name != "type")
    refused = ["rope_scaling beside other rope_parameters"] * is_other
    both = {**({"rope_type": "default"} if full is None else full), **older}
    settings, legacy = _completed(both, content), both.get("type")
    if legacy not in (None, settings["rope_type"]):
        refused.append(f"type {legacy!r:.40}, which transformers does not read here (it reads rope_type)")
        settings["rope_type"] = legacy
    if settings.pop("truncate", True) is not True:
        refused.append("truncate of layers without a window, which transformers does not read")
    beside = {name: value for name, value in newer.items() if name not in ("full_attention", "sliding_attention")}
    without_effect = {"rope_type": "default", "type": "default", "rope_theta": settings.get("rope_theta")}
    if any(value not in (None, without_effect.get(name)) for name, value in beside.items()):
        refused.append(f"rope_parameters {newer!r:.60}")
    base = content["rope_local_base_freq"] if "rope_local_base_freq" in family.defaults else family.local_rope_theta
    local_theta = local.pop("rope_theta", base)
    others = {name: value for name, value in local.items() if value not in (None, "default")}
    refused += [f"{name} {value!r:.40} of layers with a window" for name, value in others.items()]
    refused += ["rope_local_base_freq None"] * (local_theta is None)
    return settings, local_theta, refused


def _completed(settings: dict, content: dict) -> dict:
    """Returns rotary settings with their type in "rope_type", and with rope_theta, which config.json may have beside.

    Some files have "type", or both. transformers takes "truncate": null for false. Every other null means nothing.
    """
    theta, rope_type = content.get("rope_theta", 1e4), settings.get("type") or "default"
    settings = {"rope_theta": theta, "rope_type": rope_type, **settings, "type": None}
    return {name: value for name, value in settings.items() if value is not None or name == "truncate"}


def extend(config: ModelConfig, text: str) -> ModelConfig:
    """Returns the model with scaled rotary frequencies, and with max_position_embeddings set to what they now reach.

    Args:
        text: "yarn:4" or "linear:4"; "yarn:4:32768" if the original length is not the declared length.

    Raises:
        UserError: another form, a factor below 1, or a model whose frequencies are already scaled in another way.
    """
    match = re.fullmatch(r"(yarn|linear):(\d+(?:\.\d+)?)(?::(\d{1,9}))?", text)
    if match is None or (match[1] == "linear" and match[3]):
        raise UserError(f"rope_scaling must look like yarn:4, yarn:4:32768 or linear:4, got {text!r}")
    already, factor = config.rope_scaling, float(match[2])
    if already is not None and already.rope_type != match[1]:
        has = f"these weights have rope_type {already.rope_type}"
        raise UserError(f"rope_scaling {text}: {has}, not {match[1]}; drop it, or give other weights")
    length, beta = config.max_position_embeddings, None
    if isinstance(already, YarnScaling):  # a new factor for the same original length
        length, beta = already.original_max_position_embeddings, already.llama_4_scaling_beta
    elif isinstance(already, LinearScaling):
        length = round(length / already.factor)
    length = int(match[3] or length)
    if factor * length >= 2**31:
        raise UserError(f"rope_scaling {text}: {factor * length:.0f} tokens are more than config.json takes; give less")
    yarn = partial(YarnScaling, llama_4_scaling_beta=beta)
    with refused_as_user_error("rope_scaling: "):
        scaling: RopeScaling = LinearScaling(factor) if match[1] == "linear" else yarn(factor, length)
        return replace(config, rope_scaling=scaling, max_position_embeddings=int(factor * length))
