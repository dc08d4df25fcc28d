import json
import math
from dataclasses import replace
from random import Random

import pytest
import torch

from kernels.attention.full import FULL
from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.rope import LinearScaling, Llama3Scaling, YarnScaling, rope_frequencies
from model import MODEL_SIZES, Transformer
from tests.shapes import reshape
from training.families.config_json import from_config_json, in_family, to_config_json
from training.families.rope import beyond, extend
from training.families.rows import FAMILIES, SCALARS, TOKEN_IDS, WRAPPERS
from training.host.errors import UserError
from training.host.sizes import MOST

TINY = MODEL_SIZES["tiny"]


def test_config_json_round_trip():
    extended = replace(MODEL_SIZES["4B"], rope_scaling=YarnScaling(4.0, 32_768))
    scaled = replace(
        TINY, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), max_position_embeddings=777
    )
    untied = reshape(TINY, tie_word_embeddings=False, activation="gelu_tanh", kinds=(NSA(),))
    others = [
        in_family(config, model_type) for config in (scaled, untied) for model_type in FAMILIES
    ]
    beta = YarnScaling(4.0, 64, llama_4_scaling_beta=0.1)
    no_gates = [
        each for each in others if each.local_rope_theta or each.model_type.startswith("qwen3_5")
    ]
    others = [each for each in others if {*each.kinds} != {NSA()} or each not in no_gates]
    others = [
        replace(each, rope_scaling=beta) if each.model_type == "ministral3" else each
        for each in others
    ]
    for config in (MODEL_SIZES["4B"], extended, *others):
        content = to_config_json(config)
        assert from_config_json(json.loads(json.dumps(content))) == config
        assert content["model_type"] == config.model_type + "_nsa" * (NSA() in config.kinds)
        assert content["max_position_embeddings"] == config.max_position_embeddings
    newer = {
        k: v
        for k, v in to_config_json(MODEL_SIZES["4B"]).items()
        if k not in ("rope_theta", "rope_scaling")
    }
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    assert from_config_json(newer).rope_theta == 5e6
    with pytest.raises(
        ValueError, match=rf"model_type 'gemma2' \(it takes {', '.join([*FAMILIES, *WRAPPERS])}\)"
    ):
        from_config_json({**newer, "model_type": "gemma2"})
    with pytest.raises(ValueError, match="rope_type yarn lacks factor"):
        from_config_json({**newer, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}})


@pytest.mark.parametrize(("settings", "message"), [
    ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type 'longrope' .it takes "
                                                            "linear, llama3, yarn"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0, "turns": 3}}, "turns of rope_type linear"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor of rope_type linear must be at "
                                                          "least 1, got 0.5"),
    ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor of rope_type yarn is '4'"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ({"model_type": "qwen3_5_text", "partial_rotary_factor": 0.007}, "0.007; of 128 elements 1 to all must rotate"),
    ({"model_type": "mixtral"}, "model_type 'mixtral'"),
    ({"model_type": None}, "model_type None"),
    ({"num_experts": 8}, "num_experts"),
    ({"attention_bias": True}, "attention_bias"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}, "code of its own in auto_map"),
    ({"rope_scaling": {"type": "default", "mrope_section": [8, 8]}}, "mrope_section"),
    ({"use_sliding_window": True, "sliding_window": 0}, "window must be from 1 to 1073741824, got "
                                                        "0"),
    ({"use_sliding_window": True, "sliding_window": True}, "of the wrong type or out "
                                                           ".*sliding_window is True"),
    ({"use_sliding_window": True, "sliding_window": 64.0}, "of the wrong type or out "
                                                           ".*sliding_window is 64.0"),
    ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}, "layer_types names 3 layers of 36"),
    ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 36}, "layers of chunked_attention"),
    ({"use_sliding_window": True, "model_type": "qwen3_nsa"}, "windows in layers of nsa"),
    ({"use_sliding_window": True, "num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824; "
                                                               "at most 4096"),
    ({"model_type": "llama", "layer_types": ["sliding_attention"] * 36}, "layers of sliding_attention"),
    ({"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}, "layers of sliding_attention"),
    ({"is_causal": False}, "is_causal"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* give the model's "
                                                       "weights in bf16"),
    ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ({"rope_theta": None}, "lacks rope_theta"),
    ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window True"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers of 36"),
    ({"model_type": "smollm3", "no_rope_layers": []}, "no_rope_layers names 0 layers of 36"),
    ({"model_type": "smollm3", "no_rope_layers": [2] * 36}, "of the wrong type .*no_rope_layers is "
                                                            ".2, 2"),
    ({"model_type": "smollm3", "no_rope_layer_interval": 0, "no_rope_layers": None}, "of the wrong type or out of"),
    ({"model_type": "smollm3", "num_hidden_layers": 0}, "num_hidden_layers is 0; it must be as 36"),
    ({"use_sliding_window": True, "num_hidden_layers": 0}, "num_hidden_layers is 0; it must be as"),
    ({"model_type": "granite", "head_dim": 0}, "head_dim is 0; it must be as 128 is"),
    ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier is 0; it must be a "
                                                          "number above 0"),
    ({"model_type": "granite", "logits_scaling": "8"}, "logits_scaling is '8'; it must be a number "
                                                       "above 0"),
])  # fmt: skip
def test_settings_that_would_compute_something_else_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        from_config_json({**to_config_json(MODEL_SIZES["4B"]), **settings})


@pytest.mark.parametrize("settings", [
    {"rope_scaling": {"type": "default"}},
    {"use_sliding_window": False, "sliding_window": 4096},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": True, "max_window_layers": 36},
    {"layer_types": ["full_attention"] * 36, "attention_dropout": 0.1, "head_dim": None},
    {"rope_scaling": {"rope_type": "default", "type": "default", "attention_factor": None}},
])  # fmt: skip
def test_settings_without_effect_are_taken(settings):
    config = MODEL_SIZES["4B"]
    assert from_config_json({**to_config_json(config), **settings}) == config


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"max_window_layers": 2, "sliding_window": 100}, [FULL] * 2 + [Window(100)] * 34),
        ({}, [FULL] * 28 + [Window(4096)] * 8),  # transformers' max_window_layers is 28
        ({"layer_types": ["sliding_attention", "full_attention"] * 18}, [Window(4096), FULL] * 18),
        ({"layer_types": ["full_attention"] * 36}, [FULL] * 36),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2"])
def test_layers_with_a_window(settings, kinds, model_type):
    content = {
        **to_config_json(in_family(MODEL_SIZES["4B"], model_type)),
        "use_sliding_window": True,
        **settings,
    }
    config = from_config_json(content)
    assert config.kinds == tuple(kinds)
    written = to_config_json(config)
    assert from_config_json(written).kinds == config.kinds
    assert written.get("layer_types") == (
        ["full_attention" if kind == FULL else "sliding_attention" for kind in kinds]
        if {*kinds} != {FULL}
        else None
    )
    with pytest.raises(
        ValueError, match=r"model_type 'llama' has no config.json for these kinds of layers"
    ):
        to_config_json(in_family(config.with_kinds(Window(64)), "llama"))


@pytest.mark.parametrize("layers", [1, 4, 6, 7, 8])
@pytest.mark.parametrize(
    "kinds", [(FULL,), (Window(64),), (Window(64),) * 3 + (FULL,), (FULL, Window(64), Window(64))]
)
def test_a_pattern_of_layers_comes_back_as_it_was(kinds, layers):
    config = reshape(MODEL_SIZES["tiny"], kinds=kinds, num_hidden_layers=layers)
    read = from_config_json(to_config_json(config))
    assert read.kinds == config.kinds and len(read.layers) <= len(kinds)
    assert read == config or layers < len(kinds)


@pytest.mark.parametrize("change", [
    {"kinds": (Window(64), Window(128))}, {"kinds": (NSA(), FULL)},
    {"kinds": (Window(64), NSA())},
    {"kinds": (Sparse(),)}, {"rotates": (True, False)}, {"multiplier": 0.5},
    {"attention_multiplier": 0.5},
])  # fmt: skip
def test_kinds_of_layers_that_no_file_can_say_are_not_written(change):
    with pytest.raises(
        ValueError, match=r"model_type 'qwen3' has no config.json for these kinds of layers"
    ):
        to_config_json(reshape(TINY, **change))


def test_layers_without_rotary_positions():
    config = reshape(in_family(MODEL_SIZES["4B"], "smollm3"), rotates=(True, True, True, False))
    content = to_config_json(config)
    assert content["no_rope_layers"] == [1, 1, 1, 0] * 9 and content["architectures"] == [
        "SmolLM3ForCausalLM"
    ]
    assert from_config_json(content) == config
    del content["no_rope_layers"]  # transformers then leaves out every fourth layer
    assert from_config_json(content) == config
    every_second = from_config_json({**content, "no_rope_layer_interval": 2})
    assert every_second == reshape(config, rotates=(True, False))
    every = from_config_json({**content, "no_rope_layers": [1] * 40})  # some are never read
    assert every == reshape(config, rotates=(True,))
    with pytest.raises(ValueError, match="attention_multiplier is part of the rotary positions"):
        replace(config, attention_multiplier=0.5)


def test_scalars_come_back_as_they_were():
    scalars = {"embedding_multiplier": 12.0, "multiplier": 0.22, "logits_scaling": 8.0}
    for multiplier in (None, 0.015625):
        config = reshape(in_family(TINY, "granite"), **scalars, attention_multiplier=multiplier)
        content = to_config_json(config)
        assert content["attention_multiplier"] == (multiplier or TINY.attention.head_dim**-0.5)
        assert from_config_json(json.loads(json.dumps(content))) == config
    for name in SCALARS:
        del content[name]  # transformers' are 1, attention's too
    assert from_config_json(content) == replace(
        in_family(TINY, "granite"), attention_multiplier=1.0
    )


# config.json of released models, by shape, and the published number of parameters in millions
RELEASED = {
    "MiniCPM5-1B": (  # widths that the published numbers allow, 679.6 million without embeddings
        {
            "model_type": "llama",
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 130_560,
            "max_position_embeddings": 131_072,
            "hidden_act": "silu",
        },
        1081,
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "vocab_size": 128_256,
            "max_position_embeddings": 65_536,
            "hidden_act": "silu",
        },
        3075,
    ),
    "granite-3.3-2b": (
        {
            "model_type": "granite",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49_159,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131_072,
            "hidden_act": "silu",
            "rope_theta": 1e7,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
        2534,
    ),
    "Ministral-3-3B": (  # the text model
        {
            "model_type": "mistral3",
            "tie_word_embeddings": True,
            "vision_config": {},
            "text_config": {
                "model_type": "ministral3",
                "hidden_size": 3072,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
            },
        },
        3429,
    ),
    "OLMo-3-7B": (
        {
            "model_type": "olmo3",
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 100_278,
            "max_position_embeddings": 65_536,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "rope_theta": 500_000,
            "sliding_window": 4096,
        },
        7298,
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "vocab_size": 262_144,
            "sliding_window": 512,
            "max_position_embeddings": 32_768,
            "rope_local_base_freq": 10_000,
            "sliding_window_pattern": 6,
        },
        1000,
    ),
    "gemma-3-4b": (  # the text model; config.json leaves the rest to transformers
        {
            "model_type": "gemma3",
            "vision_config": {},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        3880,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_have_the_published_number_of_parameters(name):
    content, millions = RELEASED[name]
    config = from_config_json(content)
    with torch.device("meta"):
        found = sum(parameter.numel() for parameter in Transformer(config).parameters())
    assert found == config.num_parameters() and round(found / 1e6) == millions


def test_windows_and_frequencies_of_olmo_and_gemma():
    """Windows in all but each fourth or sixth layer; scaled frequencies in the others alone."""
    olmo, gemma = (from_config_json(RELEASED[name][0]) for name in ("OLMo-3-7B", "gemma-3-4b"))
    assert olmo.kinds == (*[Window(4096)] * 3, FULL) * 8 and len(olmo.layers) == 4
    assert gemma.kinds[:6] == (*[Window(1024)] * 5, FULL)
    assert (olmo.rope_theta, olmo.local_rope_theta, gemma.rope_theta, gemma.local_rope_theta) == (
        5e5,
        5e5,
        1e6,
        1e4,
    )
    for name, value in {
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 1e4,
    }.items():  # Gemma's
        assert from_config_json({**RELEASED["OLMo-3-7B"][0], name: value}) == olmo
    truncated = replace(in_family(TINY, "olmo3"), rope_scaling=YarnScaling(4.0, 64, truncate=False))
    for config in (replace(gemma, attention_multiplier=0.3), truncated):
        with pytest.raises(ValueError, match=r"no config\.json for these kinds of layers"):
            to_config_json(config)
    assert gemma.rope_scaling == LinearScaling(8.0) and gemma.embedding_multiplier == 2560**0.5
    model = Transformer(
        reshape(in_family(TINY, "gemma3_text"), kinds=(Window(64), FULL), local_rope_theta=100.0)
    )
    rotations = model.rotations(8, torch.device("cpu"), slice(8))
    full, local = rotations.full, rotations.windowed
    assert model.layers[0].self_attn.is_windowed and not model.layers[1].self_attn.is_windowed
    torch.testing.assert_close(local[0][3, 4], torch.tensor(3 * 100 ** (-4 / 16)).cos())
    torch.testing.assert_close(full[0][3, 4], torch.tensor(3 * 1e4 ** (-4 / 16)).cos())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"sliding_window": 2**40}, "window must be from 1 to 1073741824, got 1099511627776"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window_pattern": "six"}, "sliding_window_pattern is 'six'; it must"),
        ({"sliding_window_pattern": -1}, "sliding_window_pattern is -1; it must"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a whole"),
        ({"query_pre_attn_scalar": 168.5}, "query_pre_attn_scalar is 168.5; it must be a whole "
                                           "number"),
        ({"rope_local_base_freq": None}, "rope_local_base_freq None"),
        ({"rope_theta": None}, "lacks rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "lacks rope_theta"),
        ({"rope_local_base_freq": 0}, "rope_theta must be above 1, got 0"),
        ({"rope_parameters": {"rope_theta": 1234.0}}, "rope_parameters .'rope_theta': 1234.0."),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters .'rope_type': 'linear'"),
        ({"rope_parameters": {"full_attention": {}, "truncate": False}}, "rope_parameters .'full_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate of layers without a"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": None}}}, "truncate"),
        ({"model_type": "olmo3", "rope_scaling": {"type": "yarn", "factor": 2.0}}, "type 'yarn', which transformers"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear', which transformers "
                                                              "does not read here"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {"factor": 2.0}}}, "factor 2.0 of"),
        ({"rope_local_base_freq": 1.0}, "rope_theta must be above 1, got 1.0"),
        ({"rope_local_base_freq": "1e4"}, "rope_theta must be above 1, got '1e4'"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn'"),
        ({"model_type": "gemma3", "text_config": 3}, "wrong type or out of range"),
        ({"model_type": "gemma3_text_nsa"}, "windows in layers of nsa"),
        ({"model_type": "ministral3", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lack llama_4_scaling"),
        ({"model_type": "llama", "hidden_act": "silu",
          "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1,
                           "original_max_position_embeddings": 64}},
         "llama_4_scaling_beta of rope_type yarn"),
    ],
)  # fmt: skip
def test_settings_of_gemma_and_ministral_that_are_refused(settings, message):
    content = {"model_type": "gemma3_text", **settings}
    with pytest.raises(ValueError, match=message):
        from_config_json(content)


@pytest.mark.parametrize(("model_type", "theta", "settings"), [
    ("olmo3", 5e5, {"rope_type": "default"}),
    ("olmo3", 5e5, {"rope_type": "default", "rope_theta": 500_000.0}),
    ("gemma3_text", 1e6, {"type": "default", "rope_theta": 1e6}),
    ("gemma3_text", 1e6, {"sliding_attention": None}),
    ("gemma3_text", 1e6, {"full_attention": {"type": "default"}, "rope_theta": None}),
])  # fmt: skip
def test_flat_rope_parameters_of_families_whose_layers_have_their_own(model_type, theta, settings):
    """transformers passes over them, so that they may only say what holds without them."""
    content = to_config_json(in_family(replace(TINY, rope_theta=theta), model_type))
    content |= {"rope_parameters": None, "rope_scaling": None}
    assert from_config_json({**content, "rope_parameters": settings}) == from_config_json(content)


def test_default_positions_of_ministral_3():
    """They are YaRN of factor 1; queries are scaled by position if the file says so."""
    content = {"model_type": "ministral3"}
    for beta in (0.0, 0.5):
        rope = {"rope_type": "default", "rope_theta": 1e5, "original_max_position_embeddings": 64}
        rope |= {"llama_4_scaling_beta": beta} if beta else {}
        config = from_config_json({**content, "rope_parameters": rope})
        assert (
            config.rope_scaling == YarnScaling(1.0, 64, llama_4_scaling_beta=beta)
            and config.rope_theta == 1e5
        )
        assert from_config_json(to_config_json(config)) == config
        frequencies = rope_frequencies(128, 1e5, config.rope_scaling)
        assert (
            torch.equal(frequencies, rope_frequencies(128, 1e5))
            and config.rope_scaling.table_factor == 1
        )


def test_other_names_of_activations():
    content = to_config_json(TINY)
    for name, ours in {
        "swish": "silu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }.items():
        config = from_config_json({**content, "hidden_act": name})
        assert config.parts(0).mlp.activation == ours and to_config_json(config)["hidden_act"] in (
            "silu",
            "gelu_pytorch_tanh",
        )


def test_what_a_file_leaves_out_is_what_transformers_takes():
    sizes = {
        name: 8
        for name in (
            "vocab_size",
            "intermediate_size",
            "num_hidden_layers",
            "max_position_embeddings",
        )
    }
    older = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "num_attention_heads": 4,
        **sizes,
    }
    config = from_config_json(older)
    assert (*config.attention.heads, config.rope_theta) == (4, 4, 16, 1e4)
    assert (config.tie_word_embeddings, config.rms_norm_eps) == (False, 1e-6)
    for model_type in ("qwen2", "mistral"):
        with pytest.raises(ValueError, match="lacks num_key_value_heads"):
            from_config_json({**older, "model_type": model_type, "sliding_window": None})
    with pytest.raises(ValueError, match="sliding_window 4096"):
        from_config_json({**older, "model_type": "mistral"})
    yarn = from_config_json({**older, "rope_scaling": {"type": "yarn", "factor": 4.0}}).rope_scaling
    assert yarn == YarnScaling(4.0, original_max_position_embeddings=8)


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "gemma"}, r"no family has model_type 'gemma'.*has a row for "
                              rf"{', '.join(FAMILIES)}"),
    ({"model_type": "llama"}, "model_type 'llama' has no config.json for .*: qk_norm 'head'$"),
    ({"has_biases": True}, "model_type 'qwen3' has no config.json for .*: has_biases True$"),
    ({"after": True, "logits_scaling": 2.0}, "for .*: logits_scaling 2.0, after True$"),
    ({"initializer_range": 0.0}, "for .*: initializer_range is 0.0; it must be as 0.02 is$"),
    ({"kinds": (NSA(selected_blocks=8),)}, r"for .*: kind NSA.selected_blocks=8"),
])  # fmt: skip
def test_a_model_that_would_be_read_back_otherwise_is_not_written(change, message):
    with pytest.raises(ValueError, match=message):
        to_config_json(reshape(TINY, **change))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_written_is_read_back(model_type):
    """Changes one or two fields at random: the file says the same model, or is refused."""
    random, written = Random(0), 0
    choices = {
        "kinds": [
            (FULL,),
            (Window(64),),
            (Window(64), FULL),
            (Window(64), Window(96)),
            (NSA(),),
            (Sparse(),),
        ],
        "rope_scaling": [
            LinearScaling(2.0),
            YarnScaling(4.0, 64),
            YarnScaling(4.0, 64, llama_4_scaling_beta=0.1),
        ],
        "num_hidden_layers": [1, 2, 5],
        "head_dim": [16],
        "activation": ["gelu_tanh"],
        "qk_norm": [None, "head"],
        "attention_multiplier": [0.25, 0.3, 32**-0.5],
        "embedding_multiplier": [12.0],
        "local_rope_theta": [None, 1e3],
        "rotates": [(True, False), (True, True, False)],
        "multiplier": [0.2],
    }
    for _ in range(60):
        changes = {
            name: random.choice(choices[name])
            for name in random.sample([*choices], random.choice((1, 2)))
        }
        changes.pop("attention_multiplier" if "rotates" in changes else "", None)
        scaling = (
            YarnScaling(4.0, 64, llama_4_scaling_beta=0.1) if model_type == "ministral3" else None
        )
        config = reshape(in_family(replace(TINY, rope_scaling=scaling), model_type), **changes)
        try:
            read = from_config_json(json.loads(json.dumps(to_config_json(config))))
        except ValueError as error:
            assert "has no config.json for these kinds of layers or scalars: " in str(error)
            continue
        written += 1
        with torch.device("meta"):
            models = Transformer(read), Transformer(config)
        parts = [[layer.self_attn for layer in model.layers] for model in models]
        first, second = ([(part.part, part.is_windowed) for part in each] for each in parts)
        assert first == second and read.all_parts() == config.all_parts()
        first, second = (
            each.attention_multiplier or each.attention.head_dim**-0.5 for each in (read, config)
        )
        assert first == second
        in_other_forms = ("layers", "attention_multiplier")
        assert read == replace(config, **{name: getattr(read, name) for name in in_other_forms})
    assert 8 < written < 52


@pytest.mark.parametrize(("settings", "message"), [
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be as 1e-06 is"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be as True is"),
    ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
    ({"hidden_size": "many"}, "hidden_size is 'many'; it must be as 2560 is"),
    ({"rope_scaling": 1}, "a value is of the wrong type"),
    ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor of rope_type linear is "
                                                              "'10000"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 5e-324}},
     "beta_slow of rope_type yarn must be at least 1e-30, got 5e-324"),
    ({"rope_theta": 1}, "rope_theta must be above 1, got 1"),
    ({"rope_theta": 2**63}, "rope_theta must be above 1"),
    ({"rope_theta": float("inf")}, "rope_theta is inf; it must be as 1000000.0 is"),
    ({"rope_theta": 1e-300}, "rope_theta must be above 1, got 1e-300"),
    ({"num_hidden_layers": 4097}, "num_hidden_layers is 4097; at most 4096 are built"),
])  # fmt: skip
def test_values_of_the_wrong_type_or_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        from_config_json({**to_config_json(TINY), **settings})


def settings_of(model_type):
    """Returns a small config.json of a family, with each size that the family has."""
    family = FAMILIES[model_type]
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "original_max_position_embeddings": 9,
    }
    named = {**family.defaults, **family.fixed}
    return {
        **to_config_json(TINY),
        **named,
        **{k: v for k, v in sizes.items() if k in named or "_layers" in k},
        "model_type": model_type,
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_sizes_have_bounds(model_type):
    """No size takes time, or overflows where elements are counted, before it is refused by its
    name."""
    content = settings_of(model_type)
    sizes = [name for name in MOST if name in content]
    assert {"vocab_size", "hidden_size", "head_dim", "num_hidden_layers"} <= {*sizes}
    for name in sizes:
        for size in (MOST[name] + 1, 10**6 * MOST[name], 10**30, float("inf"), 1e300):
            with pytest.raises(ValueError, match=f"^{name} is .*; at most {MOST[name]} are built$"):
                from_config_json(content | {name: size})
            if model_type in WRAPPERS.values():
                wrapper = next(key for key, value in WRAPPERS.items() if value == model_type)
                with pytest.raises(
                    ValueError, match=f"^{name} is .*; at most {MOST[name]} are built$"
                ):
                    from_config_json({"model_type": wrapper, "text_config": content | {name: size}})


def test_experts_of_all_layers_together_have_a_bound():
    content = {
        **to_config_json(TINY),
        "model_type": "qwen3_moe",
        "num_hidden_layers": 64,
        "num_experts": 2048,
    }
    assert from_config_json(content).parts(0).mlp.num_experts == 2048
    with pytest.raises(
        ValueError, match="65 layers have 2048 experts each; at most 131072 are built together"
    ):
        from_config_json(content | {"num_hidden_layers": 65})
    for name in ("num_experts", "num_local_experts"):
        with pytest.raises(
            ValueError, match="is 1000000000000000000000000000000; at most 4096 are built"
        ):
            from_config_json({**content, "num_experts": None, name: 10**30})


def test_a_second_factor_is_of_the_original_length():
    config = replace(TINY, max_position_embeddings=512)
    for kind in ("linear", "yarn"):
        twice = extend(extend(config, f"{kind}:2"), f"{kind}:4")
        assert twice == extend(config, f"{kind}:4") and twice.max_position_embeddings == 2048
    attentive = YarnScaling(
        8.0, 64, attention_factor=0.1 * math.log(8) + 1
    )  # as OLMo 3's files spell the usual one
    scalings = {  # Ministral 3's, others
        YarnScaling(16.0, 64, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1): {},
        YarnScaling(8.0, 64, beta_fast=16, beta_slow=2, truncate=False, attention_factor=1.5): {},
        attentive: {"attention_factor": None},
    }
    for scaling, changes in scalings.items():
        extended = extend(replace(config, rope_scaling=scaling), "yarn:32").rope_scaling
        assert extended == replace(scaling, factor=32.0, **changes)
    with pytest.raises(
        UserError, match="rope_scaling: max_position_embeddings must be at least 1, got 0"
    ):
        extend(replace(config, rope_scaling=LinearScaling(1e9)), "linear:4")


@pytest.mark.parametrize(
    "scaling", [None, YarnScaling(4.0, 128), LinearScaling(2.0), Llama3Scaling(8.0, 1.0, 4.0, 64)]
)
def test_the_offered_factor_reaches_the_longest_text_and_a_smaller_one_does_not(scaling):
    config = replace(TINY, max_position_embeddings=512, rope_scaling=scaling)
    assert beyond(config, 512, 512) == ""
    for longest in (513, 1024, 1025, 5000):
        text = beyond(config, 512, longest)
        assert text.startswith(
            f"texts of up to {longest:,} tokens, and the weights declare a context of 512"
        )
        if isinstance(scaling, Llama3Scaling):  # which has no factor to raise
            assert "rope_scaling" not in text
            continue
        kind, factor = text.split("--rope_scaling ")[1].split()[0].split(":")
        for enough, given in ((True, int(factor)), (False, int(factor) - 1)):
            extended = extend(config, f"{kind}:{given}")
            assert (beyond(extended, extended.max_position_embeddings, longest) == "") == enough


def test_qwen3_is_stretched_from_the_length_that_it_was_made_for():
    """Its files declare 40,960 tokens, and its model card gives 32,768 as the original length."""
    offered = {
        longest: beyond(MODEL_SIZES["4B"], 40_960, longest) for longest in (40_961, 65_537, 131_072)
    }
    found = {
        longest: text.split("--rope_scaling ")[1].split()[0] for longest, text in offered.items()
    }
    assert found == {40_961: "yarn:2:32768", 65_537: "yarn:3:32768", 131_072: "yarn:4:32768"}
    others = (
        replace(TINY, model_type="llama"),
        replace(MODEL_SIZES["4B"], max_position_embeddings=32_768),
    )
    assert "yarn:2 " in beyond(others[0], 40_960, 65_537) and "yarn:4 " in beyond(
        others[1], 32_768, 131_072
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_text_model_without_a_name_is_what_transformers_takes_it_for(wrapper):
    import transformers

    found = transformers.AutoConfig.for_model(
        wrapper, text_config={"hidden_size": 64}
    ).text_config.model_type
    assert WRAPPERS[wrapper] == found and found in FAMILIES


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_token_ids_but_a_tokenizers_own(model_type):
    """SmolLM3's default pad_token_id, 128004, is beyond the vocabulary: transformers would not make
    the embedding."""
    import transformers

    beta = 0.1 if model_type == "ministral3" else None
    config = replace(TINY, rope_scaling=YarnScaling(4.0, 64, llama_4_scaling_beta=beta))
    opened = transformers.AutoConfig.for_model(**to_config_json(in_family(config, model_type)))
    assert [getattr(opened, name) for name in TOKEN_IDS] == [None] * 3
    with torch.device("meta"):
        assert (
            transformers.AutoModelForCausalLM.from_config(opened).model.embed_tokens.padding_idx
            is None
        )
