"""config.json in and out, by the rows of `FAMILIES`.

It is read as transformers does. Each setting that the decoder would compute differently is refused
by name. It is written for transformers to make the same model, and only if it is read back as the
model that was written.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from kernels.attention import KINDS
from kernels.attention.full import FULL, Full
from kernels.attention.window import Window
from kernels.config import ModelConfig
from kernels.experts.part import ExpertsPart
from kernels.gated_delta_net import DeltaNet, DeltaRule
from kernels.gated_mlp import GatedMLPPart
from kernels.parts import BlockForm, LayerParts
from kernels.qkv_attention import AttentionPart
from training.families.rope import ROTARY_SETTINGS, read_rope, write_rope
from training.families.rows import (
    ACTIVATIONS,
    ATTENTION,
    DEFAULTS,
    DELTA_NET,
    EXPERTS,
    FAMILIES,
    FIELDS,
    HEADS,
    NEEDED,
    NUMBER_OF_EXPERTS,
    SCALARS,
    SHARED_EXPERT,
    TAKEN,
    TOKEN_IDS,
    WRAPPERS,
    Family,
    is_wrapper,
)
from training.host.sizes import MOST_EXPERTS, check_sizes

DTYPE_SETTINGS = "dtype", "torch_dtype"
# a folder, and code in files of a folder, that others do not have
LOCAL_SETTINGS = ("_name_or_path", "auto_map")
# Settings that are read in every family, or written anew.
KNOWN = (
    *NEEDED,
    *DEFAULTS,
    *TAKEN,
    *TOKEN_IDS,
    *ROTARY_SETTINGS,
    *DTYPE_SETTINGS,
    *LOCAL_SETTINGS,
    "model_type",
    "architectures",
    "layer_types",
    "partial_rotary_factor",
)
LAYER_TYPES = {  # config.json's names of kinds; all others attend to everything, too
    Window: "sliding_attention",
    DeltaRule: "linear_attention",
}
NOT_COMPUTED = "config.json has {}, which this decoder does not compute"


def in_family(config: ModelConfig, model_type: str) -> ModelConfig:
    """Returns the same sizes with the norms, biases and other forms of a family, which must be a
    row of `FAMILIES`."""
    family = FAMILIES[model_type]
    theta, own_theta = family.complete({}).get("rope_local_base_freq"), config.local_rope_theta
    changes: dict[str, Any] = {
        "block": replace(family.block, multiplier=config.block.multiplier),
        "local_rope_theta": theta if None in (theta, own_theta) else own_theta,
    }
    if family.scales_embedding:
        changes["embedding_multiplier"] = config.hidden_size**0.5
    config = config.with_attention(**{**ATTENTION, **family.attention})
    return replace(config, model_type=model_type, fused=family.fused, **changes)


def to_config_json(config: ModelConfig) -> dict:
    """Returns the config.json of a model. transformers opens it unless attention has parameters of
    its own.

    Raises ValueError: no row of `FAMILIES` has this model_type, or its config.json is not read back
    as this model.
    """
    if config.model_type not in FAMILIES:
        rows = f"training/families/rows.py has a row for {', '.join(FAMILIES)}"
        raise ValueError(f"no family has model_type {config.model_type!r}; {rows}")
    content = _write(config, FAMILIES[config.model_type])
    config = _layer_by_layer(config)
    try:
        read = _layer_by_layer(from_config_json(content))
        if read != config:
            ours, theirs = _fields_as_text(config), _fields_as_text(read)
            lost = [text for text in ours if text not in theirs]
            raise ValueError(", ".join(lost) or "the order of layers")
    except ValueError as error:
        cannot_say = (
            f"model_type {config.model_type!r} has no config.json for these kinds of layers "
            "or scalars"
        )
        raise ValueError(f"{cannot_say}: {error}") from None
    return content


def _layer_by_layer(config: ModelConfig) -> ModelConfig:
    """Returns the same model in one form: parts for each layer, and None for the usual scalar."""
    is_usual = config.attention_multiplier == config.attention.head_dim**-0.5
    multiplier = None if is_usual else config.attention_multiplier
    return replace(config, layers=tuple(config.all_parts()), attention_multiplier=multiplier)


def _fields_as_text(config: ModelConfig) -> dict[str, None]:
    """Returns each field with its value, of the model, its blocks and the parts of its layers."""
    described: tuple[Any, ...] = config, config.block, *itertools.chain(*config.layers)
    return {
        f"{field.name} {getattr(part, field.name)!r:.80}": None
        for part in described
        for field in fields(part)
        if field.name not in ("layers", "block")
    }


def _write(config: ModelConfig, family: Family) -> dict:
    """Returns the config.json of a model, without what its family cannot say.

    Sizes of parts that no layer has are the family's.
    """
    layers, attention = config.all_parts(), config.attention
    mixers = [parts.mixer for parts in layers]
    gated = "".join({kind.name for kind in config.kinds if kind.gates_per_head})
    multiplier = config.attention_multiplier or attention.head_dim**-0.5
    content = {
        "model_type": config.model_type + (gated and f"_{gated}"),
        "architectures": [
            f"{family.class_name or config.model_type.capitalize()}{gated.upper()}ForCausalLM"
        ],
        **{name: getattr(config, name) for name in FIELDS},
        **dict(zip(HEADS, attention.heads)),
        **_write_mlps(config, family),
        **write_rope(config, family),
        **family.fixed,
        **dict.fromkeys(TOKEN_IDS),  # a tokenizer's: null here, for families have defaults
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.block.multiplier,
        "attention_multiplier": multiplier,
        "logits_scaling": config.logits_scaling,
        "query_pre_attn_scalar": round(multiplier**-2),
    }
    if "no_rope_layers" in family.defaults:
        content["no_rope_layers"] = [int(mixer.rotates) for mixer in mixers]
    types = [LAYER_TYPES.get(type(kind), "full_attention") for kind in config.kinds]
    windows = [mixer.kind.reach for mixer in mixers if mixer.kind.reach is not None]
    if windows or "sliding_window_pattern" in family.complete({}):
        window = max(windows, default=4096)
        content |= {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    if "full_attention_interval" in family.defaults:
        delta_nets = (mixer for mixer in mixers if not mixer.kind.has_keys)
        sizes = next(delta_nets, DeltaNet()).sizes
        content |= {"layer_types": types, **dict(zip(DELTA_NET, sizes))}
    if "rope_parameters" in content and config.local_rope_theta is None:
        del content["rope_theta"]
    content |= {theirs: content.pop(name) for name, theirs in family.names.items()}
    return family.own(content)


def _write_mlps(config: ModelConfig, family: Family) -> dict:
    """Returns the settings of dense MLPs, and of experts in families that have some."""
    mlps = [parts.mlp for parts in config.all_parts()]
    dense = next((mlp for mlp in mlps if not mlp.routes), None)
    experts = next((mlp for mlp in mlps if mlp.routes), None)
    if dense is None:
        dense = GatedMLPPart(family.defaults.get("intermediate_size", mlps[0].active_width))
    activations = [theirs for theirs, ours in ACTIVATIONS.items() if ours == dense.activation]
    content = {"intermediate_size": dense.intermediate_size, "hidden_act": activations[0]}
    if "num_experts" not in family.defaults:
        return content
    if experts is None:
        return {**content, "num_experts": 0}
    coefficient = config.router_aux_loss_coef
    return {
        **content,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        SHARED_EXPERT: experts.shared_size,
        "norm_topk_prob": experts.normalizes,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, mlp in enumerate(mlps) if mlp != experts],
        "output_router_logits": coefficient > 0,
        "router_aux_loss_coef": coefficient or EXPERTS["router_aux_loss_coef"],
    }


def from_config_json(content: dict) -> ModelConfig:
    """Returns the model that config.json declares. Rotary settings may be in `rope_scaling` or
    `rope_parameters`.

    A model of text and images has its text model's settings in `text_config`. Raises ValueError for
    a model_type without a row in `FAMILIES`, a setting that the decoder does not compute, and a
    missing or wrong value.
    """
    try:
        config = _read(content)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"a value is of the wrong type or out of range ({error})") from None
    for theta in (config.rope_theta, config.local_rope_theta):
        if theta is not None and not (type(theta) in (int, float) and 1 < theta < 2**63):
            raise ValueError(f"rope_theta must be above 1, got {theta!r:.80}")
    return config


def _read(content: dict) -> ModelConfig:
    """Returns the model for `from_config_json`, which then checks values' types and ranges."""
    if is_wrapper(content):
        content = _text_settings(content)
    declared_type = str(content.get("model_type"))
    kinds = {f"_{name}": kind for name, kind in KINDS.items() if kind.gates_per_head} | {"": Full}
    suffix = next(suffix for suffix in kinds if declared_type.endswith(suffix))
    model_type = declared_type.removesuffix(suffix)
    if model_type not in FAMILIES:
        refused_type = (
            f"model_type {content.get('model_type')!r} (it takes "
            f"{', '.join([*FAMILIES, *WRAPPERS])})"
        )
        raise ValueError(NOT_COMPUTED.format(refused_type))
    family = FAMILIES[model_type]
    # transformers' newer name
    if "num_experts" in family.defaults and "num_local_experts" in content:
        content = {"num_experts": content["num_local_experts"], **content}
    content = family.complete(content)
    check_sizes(content)
    rope, refused = read_rope(content, family)
    refused = _not_computed(content, family) + refused
    if suffix and _has_windows(content):
        refused.append(f"windows in layers of {suffix[1:]}")
    if refused:
        hint = "; give the model's weights in bf16" if content.get("quantization_config") else ""
        raise ValueError(NOT_COMPUTED.format(", ".join(refused)) + hint)
    content |= rope
    heads = content.get("num_attention_heads")
    if content.get("num_key_value_heads", 0) is None:
        content["num_key_value_heads"] = heads
    if content.get("head_dim") is None and heads and content.get("hidden_size"):
        content["head_dim"] = family.defaults.get("head_dim") or content["hidden_size"] // heads
    if missing := [name for name in NEEDED if content.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    _check_needed(content)
    scalars, rotary_dim = _read_scalars(content), _rotary_dim(content)
    num_heads, num_key_value_heads, head_dim = (content[name] for name in HEADS)
    attention = AttentionPart(
        num_heads, num_key_value_heads, head_dim, kinds[suffix](), rotary_dim=rotary_dim
    )
    mixers = _read_mixers(content, attention)
    mlps, coefficient = _read_mlps(content, "num_experts" in family.defaults)
    config = ModelConfig(
        **{name: content[name] for name in (*FIELDS, "rope_scaling", "local_rope_theta")},
        layers=_pattern([*map(LayerParts, mixers, mlps)]),
        block=BlockForm(multiplier=scalars.pop("residual_multiplier", 1.0)),
        router_aux_loss_coef=coefficient,
        **scalars,
    )
    return in_family(config, model_type)


def _text_settings(content: dict) -> dict:
    """Returns the text model's settings of a model of text and images."""
    text_settings = {"model_type": WRAPPERS[content["model_type"]], **content["text_config"]}
    for name in ("tie_word_embeddings", "quantization_config"):
        if name in content:
            text_settings[name] = content[name]
    return text_settings


def _check_needed(content: dict) -> None:
    """Raises ValueError unless each setting in `NEEDED` has its example's type, and is in range."""
    for name, example in NEEDED.items():
        value = content[name]
        types = (int, float) if isinstance(example, float) else (type(example),)
        most = math.inf if name == "rope_theta" else 2**31
        if type(value) not in types or (type(value) in (int, float) and not 0 < value < most):
            raise ValueError(f"{name} is {value!r:.80}; it must be as {example!r} is")


def _not_computed(content: dict, family: Family) -> list[str]:
    """Returns the settings that the decoder does not compute, as text, without rotary settings."""
    computed = NUMBER_OF_EXPERTS if "num_experts" in family.defaults else ()
    taken = {name: some for name, some in TAKEN.items() if name not in computed}
    taken |= {name: (None, value) for name, value in family.fixed.items()}
    refused = [
        f"{name} {content.get(name)!r:.60}"
        for name, some in taken.items()
        if content.get(name) not in some
    ]
    if "AutoModelForCausalLM" in (content.get("auto_map") or ()):
        refused.append("code of its own in auto_map")
    known = {"full_attention"} | ({"sliding_attention"} if _has_windows(content) else set())
    known |= {"linear_attention"} if DELTA_NET[0] in content else set()
    if other_layers := sorted({*(content.get("layer_types") or ())} - known):
        refused.append(f"layers of {', '.join(other_layers)}")
    return refused


def unread_settings(content: dict) -> dict:
    """Returns the settings of a model's config.json that mean nothing to this decoder, such as
    id2label.

    In its family they mean nothing to transformers' model either. Settings of a machine are not
    among them.
    """
    model_type = str(content.get("model_type"))
    family = next((FAMILIES[name] for name in FAMILIES if model_type in _spellings(name)), Family())
    known = {*KNOWN, *family.names.values()}
    known |= {name for part in (family.defaults, family.fixed, family.constants) for name in part}
    return {name: value for name, value in content.items() if name not in known}


def _spellings(model_type: str) -> list[str]:
    """Returns a model_type and, behind it, the kinds of attention with parameters of their own."""
    return [
        model_type,
        *(f"{model_type}_{name}" for name, kind in KINDS.items() if kind.gates_per_head),
    ]


def _has_windows(content: dict) -> bool:
    """Whether layers may have a window."""
    is_on = content.get("use_sliding_window") and content.get("sliding_window") is not None
    return "sliding_window_pattern" in content or bool(is_on)


def _has_types(content: dict) -> bool:
    """Whether layers may be of several types."""
    return _has_windows(content) or DELTA_NET[0] in content


def _rotary_dim(content: dict) -> int | None:
    """Returns AttentionPart's rotary_dim."""
    head_dim, factor = content["head_dim"], content["partial_rotary_factor"]
    if factor == 1:
        return None
    if type(factor) not in (int, float) or not 1 <= head_dim * factor < head_dim:
        raise ValueError(
            f"partial_rotary_factor is {factor!r:.80}; of {head_dim} elements 1 to all must rotate"
        )
    return int(head_dim * factor)


def _read_mixers(content: dict, attention: AttentionPart) -> Sequence[AttentionPart | DeltaNet]:
    """Returns the mixer of each layer. All attention has the same heads."""
    layers = content["num_hidden_layers"]
    if not _has_types(content):
        return [replace(attention, rotates=rotates) for rotates in _read_rotates(content)]
    mixers: dict[str, AttentionPart | DeltaNet] = {"full_attention": attention.with_kind(FULL)}
    if _has_windows(content):
        if type(content["sliding_window"]) is not int:
            raise TypeError(f"sliding_window is {content['sliding_window']!r:.80}")
        usual, every = "sliding_attention", "sliding_window_pattern"
        mixers[usual] = attention.with_kind(Window(content["sliding_window"]))
    else:
        usual, every = "linear_attention", "full_attention_interval"
        mixers[usual] = DeltaNet(*(_size(content, name) for name in DELTA_NET))
    types = content.get("layer_types") or _layer_types(content, usual, every)
    if len(types) != layers:
        raise ValueError(f"layer_types names {len(types)} layers of {layers}")
    return [mixers[name] for name in types]


def _layer_types(content: dict, usual: str, every: str) -> list[str]:
    """Returns the types of layers that layer_types does not name.

    Each so many-th layer attends to everything, by the setting `every`. Behind a switch, layers
    from max_window_layers on have a window.
    """
    layers = range(content["num_hidden_layers"])
    if every in content:
        number = _size(content, every)
        are_full = [(layer + 1) % number == 0 for layer in layers]
    else:
        are_full = [layer < content["max_window_layers"] for layer in layers]
    return ["full_attention" if is_full else usual for is_full in are_full]


def _size(content: dict, name: str) -> int:
    """Returns a setting that must be a whole number above 0."""
    if type(number := content[name]) is not int or number < 1:
        raise ValueError(f"{name} is {number!r:.80}; it must be a whole number above 0")
    return number


def _pattern(layers: list[LayerParts]) -> tuple[LayerParts, ...]:
    """Returns the shortest beginning that repeats through all layers."""
    count = len(layers)
    lengths = (n for n in range(1, count + 1) if layers[n:] == layers[: count - n])
    return tuple(layers[: next(lengths, 0)])


def _read_rotates(content: dict) -> list[bool]:
    """Returns whether each layer has rotary positions: no_rope_layers has 1 where it has."""
    layers = content["num_hidden_layers"]
    if "no_rope_layers" not in content:
        return [True] * layers
    rotates = content["no_rope_layers"]
    if rotates is None:
        rotates = [int((i + 1) % content["no_rope_layer_interval"] != 0) for i in range(layers)]
    if not isinstance(rotates, list) or {*rotates} - {0, 1}:
        raise TypeError(f"no_rope_layers is {rotates!r:.60}")
    if len(rotates) < layers:
        raise ValueError(f"no_rope_layers names {len(rotates)} layers of {layers}")
    return [*map(bool, rotates[:layers])]


def _read_mlps(
    content: dict, may_have_experts: bool
) -> tuple[Sequence[GatedMLPPart | ExpertsPart], float]:
    """Returns the MLP of each layer, and the coefficient of the experts' balance."""
    activation, layers = ACTIVATIONS[content["hidden_act"]], range(content["num_hidden_layers"])
    dense = GatedMLPPart(content["intermediate_size"], activation)
    if activation != "silu" and DELTA_NET[0] in content:
        raise ValueError(
            f"gated delta nets have SiLU, so hidden_act must be silu, got {activation!r}"
        )
    if not may_have_experts or content["num_experts"] == 0:
        return [dense for _ in layers], 0.0
    number, per_token, width = (
        _size(content, name)
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    for name in ("norm_topk_prob", "output_router_logits"):
        if type(content[name]) is not bool:
            raise TypeError(f"{name} is {content[name]!r:.60}")
    shared = _size(content, SHARED_EXPERT) if SHARED_EXPERT in content else 0
    experts = ExpertsPart(number, per_token, width, content["norm_topk_prob"], shared)
    every, without = _size(content, "decoder_sparse_step"), content["mlp_only_layers"] or []
    if type(without) is not list or not all(type(i) is int for i in without):
        raise TypeError(f"mlp_only_layers is {without!r:.60}")
    mlps = [dense if (i + 1) % every or i in without else experts for i in layers]
    if experts not in mlps:
        return mlps, 0.0
    if activation != "silu":
        raise ValueError(f"experts have SiLU, so hidden_act must be silu, got {activation!r}")
    if number * len(layers) > MOST_EXPERTS:
        raise ValueError(
            f"{len(layers)} layers have {number} experts each; "
            f"at most {MOST_EXPERTS} are built together"
        )
    coefficient = content["router_aux_loss_coef"] if content["output_router_logits"] else 0.0
    if type(coefficient) not in (int, float) or not 0 <= coefficient < 2**31:
        raise ValueError(f"router_aux_loss_coef is {coefficient!r:.60}; it must be a number from 0")
    return mlps, float(coefficient)


def _read_scalars(content: dict) -> dict:
    """Returns ModelConfig's scalars; attention's is None where it is 1 / sqrt(head_dim)."""
    query = "query_pre_attn_scalar"
    for name in (*SCALARS, query):
        value, words = content.get(name, 1), "a whole number" if name == query else "a number"
        if type(value) not in (int, None if name == query else float) or not 0 < value < 2**31:
            raise ValueError(f"{name} is {value!r:.80}; it must be {words} above 0")
    scalars: dict[str, float | None] = {
        name: float(content[name]) for name in SCALARS if name in content
    }
    if query in content:
        scalars["attention_multiplier"] = content[query] ** -0.5
    if scalars.get("attention_multiplier") == content["head_dim"] ** -0.5:
        scalars["attention_multiplier"] = None
    return scalars
