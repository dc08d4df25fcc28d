"""Released models against transformers: logits, loss, every gradient, generated tokens, and
files."""

import copy
import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import profile_memory
import train
from kernels.attention.documents import find_documents
from kernels.attention.full import FULL
from kernels.attention.nsa.nsa import NSA
from kernels.attention.window import Window
from kernels.experts.part import ExpertsPart
from kernels.gated_delta_net import DeltaNet
from kernels.head_loss import NextToken
from kernels.rope import YarnScaling
from model import MODEL_SIZES, Transformer
from tests import wrappers
from tests.runs import arguments, only_resume
from tests.shapes import model_of, reshape
from tests.training.data.test_tokenizer import write_tokenizer
from training.checkpoint.weights import load_model_weights, shape_of_weights
from training.export.__main__ import DTYPES
from training.export.__main__ import main as export_main
from training.families.config_json import from_config_json, in_family, to_config_json
from training.families.rows import FAMILIES
from training.memory.execution import Execution, Placement
from training.memory.placement import apply_execution
from training.memory.step import PackedDocuments
from training.parallel.world import World
from training.run.build import build
from training.run.decide import decide

SIZES = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BETA = {**YARN, "rope_theta": 1e5, "llama_4_scaling_beta": 0.5}
NO_PAD = {"pad_token_id": None, "eos_token_id": 7}
SCALARS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
    "logits_scaling": 8.0
}  # fmt: skip
DELTA_NET = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "tie_word_embeddings": True, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 24}
# Forms of models: model_type, query and key/value heads, other settings of config.json, dtype of
# the files, bytes of a shard.
FORMS = {
    "Qwen3": ("qwen3", 4, 2, {"head_dim": 16, "tie_word_embeddings": True}, "bfloat16", "1GB"),
    "Qwen3, YaRN": (
        "qwen3",
        4,
        1,
        {"head_dim": 32, "rope_scaling": YARN, "rope_theta": 1e6},
        "float32",
        "20KB",
    ),
    "Qwen3 MoE": (
        "qwen3_moe",
        4,
        2,
        {"head_dim": 16, "rope_theta": 1e6, **EXPERTS},
        "bfloat16",
        "30KB",
    ),
    "Qwen2.5": ("qwen2", 6, 1, {"tie_word_embeddings": True, "rope_theta": 1e6}, "bfloat16", "1GB"),
    "Qwen2.5, YaRN": (
        "qwen2",
        3,
        3,
        {"rope_scaling": {**YARN, "beta_fast": 16, "truncate": False}},
        "float16",
        "9KB",
    ),
    "Llama 2": ("llama", 4, 4, {}, "float16", "30KB"),
    "Llama 3": (
        "llama",
        6,
        2,
        {"rope_scaling": LLAMA3, "rope_theta": 5e5, "head_dim": 8},
        "bfloat16",
        "1GB",
    ),
    "Llama, linear": (
        "llama",
        4,
        2,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "float32",
        "1GB",
    ),
    "SmolLM2": ("llama", 3, 1, {"tie_word_embeddings": True, "rope_theta": 1e5}, "bfloat16", "1GB"),
    "SmolLM3": (
        "smollm3",
        4,
        1,
        {"no_rope_layers": [0, 1], "pad_token_id": None},
        "bfloat16",
        "1GB",
    ),
    "Granite": ("granite", 4, 2, {"tie_word_embeddings": True, **SCALARS}, "bfloat16", "20KB"),
    "Ministral 3": (
        "ministral3",
        4,
        2,
        {"head_dim": 16, "rope_parameters": BETA, **NO_PAD},
        "bfloat16",
        "1GB",
    ),
    "OLMo 3": (
        "olmo3",
        4,
        4,
        {"rope_scaling": YARN, "sliding_window": 64, **NO_PAD},
        "bfloat16",
        "20KB",
    ),
    "Gemma 3": (
        "gemma3_text",
        4,
        2,
        {"head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 24, **NO_PAD},
        "bfloat16",
        "1GB",
    ),
    "Qwen 3.5 MoE": (
        "qwen3_5_moe_text",
        4,
        2,
        {**DELTA_NET, **SHARED, "full_attention_interval": 2},
        "float32",
        "1GB",
    ),
    "Qwen 3.5": (
        "qwen3_5_text",
        4,
        2,
        {**DELTA_NET, "layer_types": ["linear_attention", "full_attention"]},
        "float32",
        "1GB",
    ),
    "Mistral": (
        "mistral",
        4,
        2,
        {"head_dim": 16, "sliding_window": None, "rope_theta": 1e6},
        "bfloat16",
        "20KB",
    ),
}


def release(name, folder):
    """Saves a random model of a form by transformers, norms and biases random as well; returns it
    in float32."""
    import transformers

    model_type, H, G, settings, dtype, shard = FORMS[name]
    config = transformers.AutoConfig.for_model(
        model_type,
        **SIZES,
        num_attention_heads=H,
        num_key_value_heads=G,
        max_position_embeddings=128,
        **settings,
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    theirs.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load(folder):
    config = from_config_json(json.loads((folder / "config.json").read_text()))
    model = Transformer(config)
    model.load_state_dict(dict(load_model_weights(folder, model.declared)))
    return model


@pytest.mark.parametrize("name", FORMS)
def test_equals_transformers(name, tmp_path):
    """Heads attend all at once, and then one key/value head at a time, with tiles and the last
    block recomputed."""
    theirs, ours = release(name, tmp_path), load(tmp_path)
    assert sum(p.numel() for p in theirs.parameters()) == ours.config.num_parameters()
    ids = torch.randint(131, (2, 90), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, labels=ids)
    expected.loss.backward()
    gradients = {n.removeprefix("model."): p.grad for n, p in theirs.named_parameters()}
    heads = 1 if ours.config.attends_in_groups else None
    for execution in (None, Execution((Placement("gpu"), Placement("recompute")), 32, heads)):
        if execution is not None:
            apply_execution(ours, execution)
        ours.zero_grad()
        output = ours(ids, loss=NextToken.from_labels(ids), return_logits=True)
        output.loss.backward()
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
        for parameter, p in ours.named_parameters():
            scale = float(gradients[parameter].abs().max())
            torch.testing.assert_close(
                p.grad, gradients[parameter], rtol=0, atol=5e-5 * scale, msg=parameter
            )
    greedy = theirs.generate(
        ids[:, :40], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(ours.generate(ids[:, :40], 8), greedy)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize(("wrapper", "is_newer"), wrappers.FORMS)
def test_a_model_of_text_and_images_is_exported_whole(wrapper, is_newer, dtype, tmp_path):
    """The text model computes as in transformers. Names, dtypes, bytes and config.json are the
    source's."""
    is_tied = dtype == "bf16"
    files = {"is_newer": is_newer, "is_tied": is_tied, "dtype": DTYPES[dtype]}
    source, target = wrappers.release(wrapper, tmp_path / "source", **files), tmp_path / "target"
    expected, theirs = (
        wrappers.bits_of(load_file(source / "model.safetensors")),
        wrappers.whole_model(source),
    )
    assert ("language_model.lm_head.weight" in expected) == (not is_tied and not is_newer)
    if is_newer:  # in several files
        split(source)
    assert export_main([str(source), str(target), "--dtype", dtype]) == 0
    assert wrappers.bits_of(load_file(target / "model.safetensors")) == expected
    content, before = (json.loads((each / "config.json").read_text()) for each in (target, source))
    assert (
        content.pop("torch_dtype")
        == content["text_config"].pop("torch_dtype")
        == before.pop("dtype")
    )
    del before["text_config"]["dtype"]
    if wrapper == "qwen3_5_moe":  # the source has no such tensors, whatever its config.json says
        before["text_config"]["mtp_num_hidden_layers"] = 0
    assert content == before
    reopened = wrappers.whole_model(target)
    assert wrappers.bits_of(reopened.state_dict()) == wrappers.bits_of(theirs.state_dict())
    ids = torch.randint(256, (1, 90), generator=torch.Generator().manual_seed(1))
    ours = load(target)(ids, return_logits=True).logits
    torch.testing.assert_close(ours, reopened(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def split(folder):
    """Splits a folder's file into two with an index."""
    tensors = load_file(folder / "model.safetensors")
    places = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in {*places.values()}:
        save_file(
            {name: tensor for name, tensor in tensors.items() if places[name] == shard},
            folder / shard,
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()


def random_settings(model_type, random):
    """Settings of config.json for a random small model."""

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=random))]

    layers, G, K = pick(1, 2, 3, 5), pick(1, 2), pick(8, 16)
    H = G * pick(1, 2, 3)
    settings = {
        "vocab_size": 131, "hidden_size": pick(24, 48), "intermediate_size": pick(40, 72),
        "num_hidden_layers": layers,
        "num_attention_heads": H, "num_key_value_heads": G, "head_dim": K,
        "tie_word_embeddings": pick(True, False),
        "rope_theta": pick(1e4, 1e6), "rms_norm_eps": pick(1e-6, 1e-5),
        "max_position_embeddings": 128,
        "hidden_act": pick("silu", "gelu_pytorch_tanh"), "pad_token_id": None,
    }  # fmt: skip
    if model_type in ("qwen2", "smollm3", "olmo2", "olmo3", "gemma3_text"):
        settings["hidden_size"] = H * K
    if model_type in ("qwen2", "smollm3", "olmo2", "olmo3"):
        del settings["head_dim"]
    settings["rope_scaling"] = pick(None, YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0})
    if model_type == "mistral":
        settings["sliding_window"] = None
    if model_type == "ministral3":
        settings["rope_scaling"] = {
            **YARN,
            "rope_theta": pick(1e4, 1e6),
            "llama_4_scaling_beta": pick(0.1, 0.7),
        }
    if model_type in ("olmo3", "gemma3_text"):
        types = [pick("sliding_attention", "full_attention") for _ in range(layers)]
        settings |= {"sliding_window": pick(64, 50), "layer_types": pick(None, types)}
    if model_type == "gemma3_text":
        settings["hidden_activation"] = settings.pop("hidden_act")
        settings |= {"query_pre_attn_scalar": pick(K, 24), "rope_local_base_freq": pick(1e3, 1e4)}
    if model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        types = [pick("linear_attention", "full_attention") for _ in range(layers)]
        types[-1] = "full_attention"  # transformers generates with at least one
        settings |= {
            "hidden_act": "silu",
            "layer_types": None if layers > 3 else types,
            "linear_conv_kernel_dim": 4,
        }
        settings |= {"linear_num_key_heads": G, "linear_num_value_heads": H}
        settings |= {"partial_rotary_factor": pick(0.25, 0.5, 1.0)}
        settings |= {"linear_key_head_dim": pick(16, 32), "linear_value_head_dim": pick(16, 24)}
    if model_type == "qwen3_5_moe_text":
        settings |= {
            "num_experts": pick(4, 8),
            "num_experts_per_tok": pick(2, 3),
            "moe_intermediate_size": pick(8, 20),
        }
        # The only head's decay has a gradient of one element, whose sum cancels.
        settings |= {
            "shared_expert_intermediate_size": pick(8, 24),
            "linear_num_value_heads": 2 * H,
        }
    if model_type == "qwen3_moe":
        number, normalizes = pick(2, 4, 8), pick(True, False)
        per_token = (
            pick(2, number) if normalizes else pick(1, 2)
        )  # the only normalised weight has no gradient
        settings |= {
            "num_experts": number,
            "num_experts_per_tok": per_token,
            "norm_topk_prob": normalizes,
        }
        settings |= {
            "moe_intermediate_size": pick(8, 20),
            "decoder_sparse_step": pick(1, 2),
            "hidden_act": "silu",
        }
        settings["mlp_only_layers"] = [layer for layer in range(layers) if pick(True, False, False)]
    if model_type == "smollm3":
        settings["no_rope_layers"] = [pick(0, 1) for _ in range(layers)]
    if model_type == "granite":
        settings |= {name: pick(0.2, 1.0, 3.0) for name in SCALARS}
    if model_type in ("qwen2", "qwen3") and pick(True, False):
        types = [pick("sliding_attention", "full_attention") for _ in range(layers)]
        settings |= {
            "use_sliding_window": True,
            "sliding_window": pick(64, 50),
            "layer_types": types,
        }
    return settings


def gradients_in_float64(theirs, ids):
    theirs = copy.deepcopy(theirs).double()
    theirs.zero_grad()
    sum(
        theirs(part, labels=part).loss * (part.shape[1] - 1) for part in ids.split([70, 30], 1)
    ).backward()
    return {
        name.removeprefix("model."): parameter.grad for name, parameter in theirs.named_parameters()
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_configurations_equal_transformers(model_type, tmp_path):
    """Twenty each, read from the form that transformers writes and from ours: packed documents,
    tokens, gradients."""
    import transformers

    random = torch.Generator().manual_seed(0)
    for number in range(20):
        settings = random_settings(model_type, random)
        torch.manual_seed(number)
        config = transformers.AutoConfig.for_model(
            model_type, **copy.deepcopy(settings)
        )  # it writes into rope_scaling
        theirs = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        read = from_config_json(json.loads(json.dumps(config.to_dict(), default=str)))
        assert from_config_json({**settings, "model_type": model_type}) == read
        assert from_config_json(to_config_json(read)) == read
        ours = Transformer(read)
        state = {n.removeprefix("model."): p.detach() for n, p in theirs.named_parameters()}
        for name, parameter in ours.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else 3 * settings["hidden_size"] ** -0.5
            mean = 1 - read.block.offset if name.endswith("norm.weight") else 0.0
            state[name].normal_(mean, scale / 3, generator=random)
        assert ours.load_state_dict(state) and ours.config.num_parameters() == sum(
            map(torch.numel, state.values())
        )
        ids = torch.randint(131, (1, 100), generator=random)
        expected = [theirs(part, labels=part) for part in ids.split([70, 30], 1)]
        total = sum(
            output.loss * (part.shape[1] - 1)
            for output, part in zip(expected, ids.split([70, 30], 1))
        )
        total.backward()
        documents = find_documents((torch.arange(100)[None] >= 70).long())
        loss = NextToken.from_labels(ids, documents, denominator=1.0)
        output = ours(ids, documents, loss, return_logits=True)
        output.loss.backward()
        logits = torch.cat([each.logits for each in expected], 1)
        torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-4, msg=f"{settings}")
        torch.testing.assert_close(output.loss, total, rtol=1e-5, atol=0)
        wanted = {n.removeprefix("model."): p.grad for n, p in theirs.named_parameters()}
        for name, parameter in ours.named_parameters():
            atol = 1e-4 * float(wanted[name].abs().max())
            if (
                parameter.grad - wanted[name]
            ).abs().max() > atol:  # sharp attention: transformers errs too
                atol += 2 * float(
                    (wanted[name] - gradients_in_float64(theirs, ids)[name]).abs().max()
                )
            torch.testing.assert_close(
                parameter.grad, wanted[name], rtol=0, atol=atol, msg=f"{name} of {settings}"
            )
        prompt = {"input_ids": ids[:, :80], "attention_mask": torch.ones_like(ids[:, :80])}
        greedy = theirs.generate(
            **prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert torch.equal(ours.generate(ids[:, :80], 4), greedy)


# Settings of rotary positions that a file may have in either form, and top-level settings beside
# them.
ROTARY = {
    "YaRN": (YARN, {}),
    "YaRN, an original length beside it": (YARN, {"original_max_position_embeddings": 16}),
    "llama3, an original length beside it": (LLAMA3, {"original_max_position_embeddings": 16}),
    "YaRN without an original length": ({"rope_type": "yarn", "factor": 4.0}, {}),
    "linear, an original length beside it": (
        {"rope_type": "linear", "factor": 2.0},
        {"original_max_position_embeddings": 16},
    ),
    "default": ({"rope_type": "default"}, {}),
    "a large theta": ({"rope_type": "default"}, {"rope_theta": 3_580_165_449}),
    "a theta beside llama3": (
        LLAMA3,
        {"rope_theta": 3e3, "hidden_act": "swish", "hidden_activation": "swish"},
    ),
}


@pytest.mark.parametrize(
    "leaves_out", [(), ("hidden_act", "hidden_activation", "max_position_embeddings")]
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_rotary_settings_of_either_form_are_transformers(model_type, leaves_out):
    """Checks logits with rope_scaling and with rope_parameters, also where a file leaves out what
    has defaults."""
    import transformers

    by_type, defaults = model_type in ("olmo3", "gemma3_text"), FAMILIES[model_type].defaults
    sizes = {
        **SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": None,
    }
    sizes |= {"hidden_act": "silu", "hidden_activation": "silu", "max_position_embeddings": 128}
    sizes |= (
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
        if by_type
        else {}
    )
    sizes |= {"sliding_window": None} if model_type == "mistral" else {}
    delta_nets = {**DELTA_NET, "layer_types": ["linear_attention", "full_attention"]}
    sizes |= delta_nets if "linear_num_key_heads" in defaults else {}
    sizes |= EXPERTS if "num_experts" in defaults else {}
    ids = torch.randint(131, (1, 70), generator=torch.Generator().manual_seed(1))
    for name, (rope, beside) in ROTARY.items():
        if model_type == "ministral3":
            if rope["rope_type"] in ("linear", "llama3"):
                continue
            rope = {"original_max_position_embeddings": 32, **rope, "llama_4_scaling_beta": 0.5}
        for form in (
            {"rope_scaling": rope},
            {"rope_parameters": {"full_attention": rope} if by_type else rope},
        ):
            settings = {**sizes, **form, **beside}
            settings = {
                key: value
                for key, value in settings.items()
                if key not in leaves_out or key in beside
            }
            config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(settings))
            theirs = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                for parameter in theirs.parameters():
                    parameter.mul_(15 if parameter.ndim > 1 else 1)
            read = from_config_json({"model_type": model_type, **settings})
            assert from_config_json(to_config_json(read)) == read
            ours = Transformer(read)
            ours.load_state_dict(
                {n.removeprefix("model."): p for n, p in theirs.named_parameters()}
            )
            with torch.no_grad():
                found, expected = ours(ids, return_logits=True).logits, theirs(ids).logits
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-3, msg=f"{name}, {settings}"
            )


def loss_and_gradients(state, config, device, dtype, execution):
    model = Transformer(config).cast(dtype).to(device)
    model.load_state_dict(state)
    if execution is not None:
        apply_execution(model, execution, 2**26)
    ids = torch.randint(131, (1, 2000), generator=torch.Generator().manual_seed(1)).to(device)
    documents = find_documents((torch.arange(2000)[None] >= 700).long())
    loss = model(ids, documents, NextToken.from_labels(ids, documents)).loss
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.cpu().float() for name, p in model.named_parameters()
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "H", "G", "K"),
    [("qwen2", 14, 2, 64), ("llama", 3, 1, 64), ("ministral3", 4, 1, 128), ("olmo3", 4, 4, 64),
     ("gemma3_text", 4, 2, 256), ("qwen3_5_text", 4, 2, 256), ("qwen3_moe", 4, 2, 64)],
)  # fmt: skip
def test_a_gpu_equals_a_cpu(model_type, H, G, K):
    """Errors of bfloat16 on a GPU are at most three times a CPU's, both against float32, with
    packed documents."""
    scaling = YarnScaling(
        4.0, 512, llama_4_scaling_beta=0.1 if model_type == "ministral3" else None
    )
    config = in_family(
        model_of(131, 256, 384, 2, H, G, head_dim=K, rope_scaling=scaling), model_type
    )
    if config.local_rope_theta:
        config = reshape(config, kinds=(Window(256), FULL))
    if model_type == "qwen3_5_text":
        config = reshape(config, kinds=(DeltaNet(2, 4, 64, 128), FULL), rotary_dim=64)
    if model_type == "qwen3_moe":  # bfloat16 chooses all experts as float32 does
        config = reshape(config, mlps=(ExpertsPart(4, 4, 192),))
    heads = 1 if config.attends_in_groups else None
    state = {
        name: (0.1 * torch.randn(p.shape) if name.endswith("bias") else p.detach()).bfloat16()
        for name, p in Transformer(config).named_parameters()
    }
    loss, exact = loss_and_gradients(state, config, "cpu", torch.float32, None)

    def errors(found):
        return {name: float((found[name] - g).norm() / size_of(name)) for name, g in exact.items()}

    def size_of(name):
        """Terms of a decay's gradient cancel, more or less by seed. in_proj_a's has them too, and
        they do not."""
        decay = re.search(r"(.*)(A_log|dt_bias)$", name)
        return exact[f"{decay[1]}in_proj_a.weight" if decay else name].norm()

    allowed = errors(loss_and_gradients(state, config, "cpu", torch.bfloat16, None)[1])
    for execution in (
        None,
        Execution((Placement("gpu", "host"), Placement("recompute")), 512, heads),
    ):
        found_loss, found = loss_and_gradients(state, config, "cuda", torch.bfloat16, execution)
        assert found_loss == pytest.approx(loss, rel=2e-3)
        wrong = {
            n: (e, allowed[n]) for n, e in errors(found).items() if not e <= 3 * allowed[n] + 0.01
        }
        assert not wrong, (execution, wrong)


COMPANIONS = {
    "tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}",
    "generation_config.json": "{}",
    "preprocessor_config.json": "{}", "video_preprocessor_config.json": "{}",
    "processor_config.json": "{}",
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """The folder of a released Qwen2: several files of float16, a tokenizer, a chat template."""
    folder = tmp_path_factory.mktemp("qwen2")
    release("Qwen2.5", folder)
    settings = {
        **json.loads((folder / "config.json").read_text()),
        "vocab_size": 300,
        "eos_token_id": 7,
    }
    vocabulary = {name: torch.randn(300, 48) for name in ("model.embed_tokens.weight",)}
    content = {**load_file(folder / "model.safetensors"), **vocabulary}
    content = {name: weight.half() for name, weight in content.items()}
    names = sorted(content)
    for shard, own in (("1.safetensors", names[:5]), ("2.safetensors", names[5:])):
        save_file({name: content[name] for name in own}, folder / shard)
    places = {name: "1.safetensors" if name in names[:5] else "2.safetensors" for name in names}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(settings))
    write_tokenizer(folder / "tokenizer.json")
    for name, text in COMPANIONS.items():
        (folder / name).write_text(text)
    return folder


def test_texts_past_the_declared_context_are_warned_of(qwen2, corpus, tmp_path, caplog, capsys):
    start = arguments(corpus, tmp_path / "run", "--init_from", str(qwen2), "--show_batch")
    profile = ["--init_from", str(qwen2), "--gpu", "H100"]
    adapters, extended = ["--lora", "4"], ["--rope_scaling", "yarn:2"]
    for length, more, is_beyond in (
        (128, [], False),
        (256, [], True),
        (256, adapters, True),
        (256, extended, False),
    ):
        caplog.clear()
        assert train.main([*start, "--context_length", str(length), *more]) == 0
        cure = "training.export " * (more == adapters) + "--rope_scaling yarn:2"
        warning = (
            f"texts of up to {length} tokens, and the weights declare a context of 128; {cure}"
        )
        assert (f"positions: {warning}" in caplog.text) == ("positions" in caplog.text) == is_beyond
        capsys.readouterr()
        assert profile_memory.main([*profile, "--context_length", str(length), *more]) == 0
        printed = capsys.readouterr().out
        assert (warning in printed) == ("positions" in printed) == is_beyond


def test_a_run_extends_saves_and_resumes(qwen2, corpus, tmp_path, capsys, caplog):
    """Transformers opens its checkpoints, which also have the files that lay beside the weights."""
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    start = arguments(corpus, run, "--init_from", str(qwen2), "--rope_scaling", "yarn:4", steps=1)
    start += ["--validation_sequences", "0", "--sample_tokens", "0"]
    with caplog.at_level("INFO"):
        assert train.main(start) == 0
    assert "model: qwen2, 46,256 parameters; attention: full" in caplog.text
    (qwen2 / "tokenizer.json").rename(tmp_path / "away")  # the checkpoint's own copy serves
    assert train.main(only_resume(run, "--max_steps", "2")) == 0
    (tmp_path / "away").rename(qwen2 / "tokenizer.json")
    for step in (1, 2):
        folder = run / f"step_{step:08d}"
        content = json.loads((folder / "config.json").read_text())
        assert content["rope_scaling"] == {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1, "truncate": True,
        }  # fmt: skip
        assert (content["max_position_embeddings"], content["eos_token_id"]) == (512, 7)
        assert content["torch_dtype"] == "float32"
        stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert stops[0] == 7 and len(stops) == 2  # and where training ends documents
        for name in {"tokenizer.json", *COMPANIONS} - {"generation_config.json"}:
            assert (folder / name).read_bytes() == (qwen2 / name).read_bytes()
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load(folder)
    ids = torch.randint(300, (1, 200), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        ours(ids, return_logits=True).logits, theirs(ids).logits, rtol=0, atol=1e-4
    )
    auto = [*start, "--max_steps", "3", "--resume", "auto"]
    for other in ("yarn:8", "yarn:4:64"):
        assert train.main([*auto, "--rope_scaling", other]) == 1
        was = "was trained with YarnScaling(factor=4.0, original_max_position_embeddings=128,"
        assert f"rope_scaling {other}: {folder} {was}" in capsys.readouterr().err
    assert train.main(auto) == 0


def test_weights_come_and_go_bit_for_bit(qwen2, tmp_path, capsys):
    """Weights go into masters and out again unchanged. An extended export declares a wider
    length."""
    documents, world = PackedDocuments.one_each(512, 1), World(0, 1, torch.device("cpu"))
    recipe = decide(
        {"init_from": str(qwen2), "save": "none", "output_dir": str(tmp_path / "run")}, world
    )
    model, optimizer, _ = build(recipe, documents, world)
    released = {**load_file(qwen2 / "1.safetensors"), **load_file(qwen2 / "2.safetensors")}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, released[f"model.{name}"].float())
        assert torch.equal(optimizer.state_dict()[name]["master"], parameter)
    assert export_main([str(qwen2), str(tmp_path / "out"), "--dtype", "fp16"]) == 0
    assert (
        "parameters of qwen2, torch.float16, 0.00 GB in model.safetensors; chat_template"
        in capsys.readouterr().out
    )
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == released.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in released.items())
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == COMPANIONS[
        "chat_template.jinja"
    ]
    extended = str(tmp_path / "extended")
    assert export_main([str(qwen2), extended, "--rope_scaling", "yarn:4:64"]) == 0
    expected = replace(recipe.model, rope_scaling=YarnScaling(4.0, 64), max_position_embeddings=256)
    assert load(tmp_path / "extended").config == expected
    assert load_file(f"{extended}/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("flags", "message"), [
    (["--rope_scaling", "yarn"], "rope_scaling must look like yarn:4"),
    (["--rope_scaling", "yarn:0.5"], "factor of rope_type yarn must be at least 1, got 0.5"),
    (["--rope_scaling", "linear:4:64"], "rope_scaling must look like"),
    (["--rope_scaling", "yarn:4:999999999"], "yarn:4:999999999: 3999999996 tokens are more than"),
    (["--model_size", "0.6B"], "it has vocab_size 300, model_size 0.6B has 151936; drop "
                               "model_size"),
    (["--tensor_parallel_size", "2"], "tensor_parallel_size 2 must divide"),
])  # fmt: skip
def test_flags_that_do_not_fit_the_folder(flags, message, qwen2, corpus, tmp_path, capsys):
    assert train.main(arguments(corpus, tmp_path / "run", "--init_from", str(qwen2), *flags)) == 1
    assert message in capsys.readouterr().err


def test_a_plan_is_of_the_folders_shape(qwen2, tmp_path, capsys):
    flags = [
        "--init_from",
        str(qwen2),
        "--gpu",
        "24GB",
        "--context_length",
        "4096",
        "--json",
        str(tmp_path / "json"),
    ]
    assert profile_memory.main(flags) == 0
    shape = shape_of_weights(qwen2)
    assert f"model: {qwen2}, {shape.num_parameters():,} parameters" in capsys.readouterr().out
    summary = json.loads((tmp_path / "json").read_text())
    assert summary["environment"]["model"]["model_type"] == "qwen2"
    assert profile_memory.main([*flags, "--model_size", "4B"]) == 1
    assert "model_size has no effect with init_from" in capsys.readouterr().err


def test_exports_that_are_refused(qwen2, tmp_path, capsys):
    def refused(*arguments):
        assert export_main([*map(str, arguments)]) == 1
        return capsys.readouterr().err

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is already there" in refused(qwen2, tmp_path / "full")
    assert "nowhere does not exist; give a" in refused(tmp_path / "nowhere", tmp_path / "out")
    assert "/bin/hf download Qwen/Qwen3-0.6B --local-dir DIR" in refused(
        "Qwen/Qwen3-0.6B", tmp_path / "out"
    )
    source = tmp_path / "large"
    source.mkdir()
    config = replace(MODEL_SIZES["tiny"], num_hidden_layers=1)
    names = {name: torch.full(p.shape, 1e6) for name, p in Transformer(config).named_parameters()}
    save_file(
        {f"model.{name}": weight for name, weight in names.items()}, source / "model.safetensors"
    )
    (source / "config.json").write_text(json.dumps(to_config_json(config)))
    assert "is not finite in torch.float16; choose another --dtype" in refused(
        source, tmp_path / "out", "--dtype", "fp16"
    )
    (source / "config.json").write_text(
        json.dumps({**to_config_json(config), "num_hidden_layers": 10**7})
    )
    assert "num_hidden_layers is 10000000; at most 4096" in refused(source, tmp_path / "out")
    nsa = to_config_json(config.with_kinds(NSA()))
    (source / "config.json").write_text(json.dumps(nsa))
    assert "attends by nsa, which neither" in refused(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.tmp").exists()


def test_an_export_into_an_empty_folder_has_nothing_of_a_killed_one(qwen2, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for folder in (out, tmp_path / ".out.tmp"):
        folder.mkdir()
    (tmp_path / ".out.tmp" / "left_by_a_kill").touch()
    monkeypatch.chdir(out)
    assert export_main([str(qwen2), "."]) == 1  # a shell would be left in a deleted folder
    monkeypatch.chdir(tmp_path)
    assert export_main([str(qwen2), "out"]) == 0
    assert (out / "model.safetensors").is_file() and not (out / "left_by_a_kill").exists()
