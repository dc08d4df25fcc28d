import copy
import functools
import importlib
import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kernels.apply_to import apply_to

module = importlib.import_module("kernels.apply_to")  # the package has the function by this name

VOCAB = 71
# Each family has features that others lack: biases, a sliding window, tied heads, strong softcaps.
# Some also have a setting of another family, without effect.
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": False, "mlp_bias": True, "logits_scaling": 3.0},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "final_logit_softcapping": 2.0},
    "gemma2": {
        "tie_word_embeddings": True,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 3.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "qwen3_moe": {**MIXTURE, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **MIXTURE, "shared_expert_intermediate_size": 20},
}
NUM_NORMS = {
    "llama": 5, "mistral": 5, "qwen2": 5, "qwen3": 9, "gemma2": 9, "smollm3": 5, "granite": 5,
    "ministral3": 5,
    "olmo3": 9, "gemma3_text": 13, "olmo2": 9, "qwen3_moe": 9, "qwen3_5_text": 8,
    "qwen3_5_moe_text": 8,
}  # fmt: skip
COUNTS = {  # beside norms and the loss; most families have two of each
    "qwen3_moe": {"rope": 2, "gated_mlp": 1, "experts": 1},
    "qwen3_5_text": {"rope": 1, "gated_mlp": 2, "delta_rule": 1},
    "qwen3_5_moe_text": {"rope": 1, "gated_mlp": 2, "experts": 2, "delta_rule": 1},
}
DELTA_NETS = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
)  # transformers computes their rule in float32, in any model
every_family = pytest.mark.parametrize("model_type", FAMILIES)


def make_model(model_type, dtype=torch.float32, seed=0, **overrides):
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 256,
            "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
            **FAMILIES[model_type], **overrides,
        },
    )  # fmt: skip
    torch.manual_seed(seed)
    # transformers' own grouped products of experts take no float64
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():  # ones and zeros, the initial norms and biases, would hide a mistake
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype)


def make_pair(model_type, dtype=torch.float32, impl="torch", **overrides):
    plain = make_model(model_type, dtype, **overrides)
    patched = copy.deepcopy(plain)
    apply_to(patched, impl=impl)
    return plain, patched


def make_batch(B=2, T=19, vocab=VOCAB, seed=1):
    input_ids = torch.randint(2, vocab, (B, T), generator=torch.Generator().manual_seed(seed))
    labels = input_ids.clone()
    labels[0, : T // 3] = -100
    return {"input_ids": input_ids, "labels": labels}


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def assert_equal_training(plain, patched, batch, tolerance):
    expected_loss, expected = loss_and_gradients(plain, batch)
    loss, gradients = loss_and_gradients(patched, batch)
    assert relative_error(loss, expected_loss) <= tolerance
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) <= tolerance, name


# transformers computes norms and the loss of a float64 model in float32, hence 1e-6 and not 1e-12.
@every_family
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-6)])
def test_loss_gradients_and_logits_equal_the_unpatched_models(model_type, dtype, tolerance):
    plain, patched = make_pair(model_type, dtype)
    tolerance = 3e-4 if model_type in DELTA_NETS else tolerance
    batch = make_batch()
    assert_equal_training(plain, patched, batch, tolerance)
    positions = torch.arange(19) + torch.tensor([[0], [7]])  # cos and sin differ from row to row
    inputs = {"input_ids": batch["input_ids"], "position_ids": positions}
    with torch.no_grad():
        assert relative_error(patched(**inputs).logits, plain(**inputs).logits) <= tolerance
        assert patched(**inputs, logits_to_keep=3).logits.shape == (2, 3, VOCAB)


@every_family
def test_replaces_all_of_this_model_and_nothing_of_another(model_type, monkeypatch, caplog):
    names = (
        "rms_norm",
        "rope",
        "swiglu",
        "geglu",
        "linear_cross_entropy",
        "expert_mlp",
        "delta_rule",
    )
    calls = dict.fromkeys(names, 0)

    def spy(name, function):
        def counted(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counted

    for name in calls:
        monkeypatch.setattr(module, name, spy(name, getattr(module, name)))

    plain, patched = make_model(model_type), make_model(model_type)
    caplog.clear()  # transformers may warn at the first model of a family
    with caplog.at_level(logging.INFO, logger="kernels.apply_to"):
        counts = apply_to(patched, impl="torch")
    expected = COUNTS.get(model_type, {"rope": 2, "gated_mlp": 2})
    assert counts == {"rms_norm": NUM_NORMS[model_type], "loss": 1, **expected}
    assert len(caplog.records) == 1 and f"{NUM_NORMS[model_type]} rms_norm" in caplog.text

    for other in (plain, make_model(model_type)):
        other(**make_batch())
    assert not any(calls.values())
    assert patched(**make_batch()).logits is None
    activation, absent = ("geglu", "swiglu") if "gemma" in model_type else ("swiglu", "geglu")
    rope = sum(FAMILIES[model_type].get("no_rope_layers", [1] * counts["rope"]))
    assert calls == {
        "rms_norm": NUM_NORMS[model_type], "rope": rope, activation: counts["gated_mlp"], absent: 0,
        "linear_cross_entropy": 1, "expert_mlp": counts.get("experts", 0),
        "delta_rule": counts.get("delta_rule", 0),
    }  # fmt: skip

    copied = copy.deepcopy(patched)  # the copy's forwards are bound to its own modules
    with torch.no_grad():
        copied.model.norm.weight.zero_()
    assert not torch.equal(copied(**make_batch()).loss, patched(**make_batch()).loss)


@every_family
def test_generates_the_same_tokens(model_type):
    # transformers 5.24's balance of experts takes no mask of padding in generation
    settings = {"output_router_logits": False} if "moe" in model_type else {}
    plain, patched = make_pair(model_type, **settings)
    prompt = {
        "input_ids": make_batch()["input_ids"][:, :6],
        "attention_mask": torch.ones(2, 6, dtype=torch.long),
    }
    prompt["attention_mask"][0, :2] = 0
    expected, tokens = (
        m.eval().generate(**prompt, max_new_tokens=12, do_sample=False) for m in (plain, patched)
    )
    assert expected.shape == (2, 18) and torch.equal(tokens, expected)


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 91},
        {"num_items_in_batch": torch.tensor(91)},
        {"shift_labels": torch.arange(38).view(2, 19)},
        {"ignore_index": 2},
        {"logits_to_keep": 4, "labels": torch.arange(8).view(2, 4)},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_loss_arguments_mean_what_they_mean_in_transformers(extra):
    plain, patched = make_pair("gemma2")
    batch = make_batch()
    batch["labels"] = batch["labels"].clamp(min=2)  # -100 would be a class under ignore_index=2
    assert_equal_training(plain, patched, {**batch, **extra}, 3e-6)


def test_shift_labels_of_every_other_token(device):
    """Takes a view of every other label, which a rank has when two share a sequence at batch 1."""
    plain, patched = (model.to(device) for model in make_pair("llama", impl="triton"))
    batch = {name: tensor.to(device) for name, tensor in make_batch(B=1).items()}
    batch["shift_labels"] = torch.arange(38, device=device).view(1, 38)[:, 1::2]
    assert_equal_training(plain, patched, batch, 3e-6)


def test_outputs_beside_the_loss_and_gradient_checkpointing():
    plain, patched = make_pair("qwen3", attn_implementation="eager")
    batch = {**make_batch(), "output_hidden_states": True, "output_attentions": True}
    expected, outputs = plain(**batch), patched(**batch)
    assert len(outputs.hidden_states) == 3 and len(outputs.attentions) == 2
    torch.testing.assert_close(outputs.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.attentions, expected.attentions, rtol=1e-5, atol=1e-5)
    assert outputs.past_key_values.get_seq_length() == 19
    assert torch.equal(patched(**make_batch(), return_dict=None).loss, outputs.loss)
    loss, *_ = patched(**make_batch(), return_dict=False)
    assert torch.equal(loss, outputs.loss)
    patched.gradient_checkpointing_enable()
    assert_equal_training(plain, patched.train(), make_batch(), 3e-6)


def test_loss_can_stay_the_models_own():
    model = make_model("gemma2")
    assert "loss" not in apply_to(model, impl="torch", loss=False)
    assert model(**make_batch()).logits.shape == (2, 19, VOCAB)


def test_wrapped_models_and_adapters_around_projections():
    plain, patched = make_model("qwen3"), make_model("qwen3")
    wrapper = torch.nn.Module()
    wrapper.config, wrapper.wrapped = patched.config, patched
    assert apply_to(wrapper, impl="torch")["loss"] == 1
    for model in (plain, patched):
        mlp = model.model.layers[0].mlp
        mlp.gate_proj = torch.nn.Sequential(mlp.gate_proj, torch.nn.ReLU())
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
    assert_equal_training(plain, patched, make_batch(), 3e-6)


def test_a_qwen3_5_beside_its_images():
    """The text model inside is replaced, and the images' part stays."""
    text = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
        **DELTA_NET,
    }  # fmt: skip
    images = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=images)
    plain = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    patched = copy.deepcopy(plain)
    assert apply_to(patched, impl="torch") == {
        "rms_norm": 8, "rope": 1, "gated_mlp": 2, "delta_rule": 1, "loss": 1,
    }  # fmt: skip
    batch = make_batch()
    for inputs in (batch, {"input_ids": batch["input_ids"]}):
        outputs, expected = patched(**inputs), plain(**inputs)
        assert type(outputs) is type(expected)
        for name in ("loss", "logits"):
            value = getattr(outputs, name)
            if value is not None:
                assert relative_error(value, getattr(expected, name)) < 1e-5


def test_the_delta_rule_of_a_row_of_documents_is_each_documents_own():
    _, patched = make_pair("qwen3_5_text")
    layer = next(m for m in patched.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    rule = functools.partial(
        layer.forward.__func__.__globals__[module.CHUNKED_RULE],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    q, k, v = (torch.randn(1, 24, heads, 16) for heads in (2, 2, 4))
    tensors = q, k, v, -torch.rand(1, 24, 4), torch.rand(1, 24, 4)
    out, states = rule(*tensors, cu_seqlens=torch.tensor([0, 7, 23, 24]))
    apart = [rule(*(x[:, a:b] for x in tensors)) for a, b in ((0, 7), (7, 23), (23, 24))]
    torch.testing.assert_close(out, torch.cat([part for part, _ in apart], 1))
    torch.testing.assert_close(states, torch.cat([state for _, state in apart]))


def test_compiles_without_a_graph_break():
    plain, patched = make_pair("qwen3")
    batch = {**make_batch(), "use_cache": False}
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(patched, backend=backend, fullgraph=True)
    for _ in range(2):
        assert relative_error(compiled(**batch).loss, plain(**batch).loss) <= 3e-6
    assert len(graphs) == 1


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"olmo2, olmo3, qwen3_5, qwen3_5_moe, got 'gpt2'"):
        apply_to(
            AutoModelForCausalLM.from_config(
                AutoConfig.for_model("gpt2", n_embd=8, n_head=1, n_layer=1)
            )
        )
    with pytest.raises(ValueError, match="got None"):
        apply_to(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="silu, gelu_pytorch_tanh, got 'relu'"):
        apply_to(make_model("llama", hidden_act="relu"))

    model = make_model("llama")
    model.loss_function = F.cross_entropy
    with pytest.raises(ValueError, match="the model's loss is cross_entropy"):
        apply_to(model)
    model.model.norm.forward = model.model.norm.forward  # accelerate's hooks do this
    with pytest.raises(ValueError, match="LlamaRMSNorm already has a forward"):
        apply_to(model, loss=False)
    assert "forward" not in vars(model.model.layers[0].mlp), (
        "a refused model must be left as it was"
    )

    _, patched = make_pair("llama")
    with pytest.raises(ValueError, match="already has a forward"):
        apply_to(patched)
    patched.lm_head = torch.nn.Sequential(patched.lm_head)
    with pytest.raises(ValueError, match="lm_head is now a Sequential"):
        patched(**make_batch())


def train(model, steps, device="cpu"):
    text = (
        b"the quick brown fox jumps over the lazy dog; a kernel is as good as the training that it "
        b"leaves alone. "
    )
    corpus = torch.tensor(
        [byte - 32 if byte < 97 else byte - 80 for byte in text * 8], device=device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        starts = torch.randint(
            len(corpus) - 24, (4,), generator=torch.Generator().manual_seed(step)
        )
        input_ids = torch.stack([corpus[start : start + 24] for start in starts])
        loss = model.train()(input_ids=input_ids, labels=input_ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@every_family
def test_training_converges_alike(model_type):
    plain, patched = make_pair(model_type)
    start = copy.deepcopy(plain.state_dict())
    expected, losses = train(plain, 30), train(patched, 30)
    assert expected[-1] < 0.7 * expected[0]
    if model_type in DELTA_NETS:  # rounding grows from step to step
        assert losses[:8] == pytest.approx(expected[:8], rel=1e-4)
        return
    assert losses == pytest.approx(expected, rel=2e-6)
    for (name, trained), weight in zip(plain.named_parameters(), patched.parameters()):
        distance = (weight - trained).norm() / (
            trained - start[name]
        ).norm()  # relative to the way that training went
        assert distance <= 1e-4, (
            name
        )  # Adam magnifies rounding of tiny gradients, like Qwen2's k_proj.bias


def test_triton_kernels(device):
    plain, patched = make_pair(
        "gemma2", impl="triton", hidden_size=16, intermediate_size=24, num_hidden_layers=1
    )
    plain.to(device), patched.to(device)
    batch = {name: tensor.to(device) for name, tensor in make_batch(T=7).items()}
    assert_equal_training(plain, patched, batch, 1e-5)
    assert train(patched, 2, device) == pytest.approx(train(plain, 2, device), rel=1e-5)


@pytest.mark.gpu
@every_family
def test_bf16_on_a_gpu(model_type):
    sizes = {"vocab_size": 1009, "hidden_size": 256, "intermediate_size": 520, "head_dim": 64}
    is_mixture = "moe" in model_type  # its router may choose otherwise after rounding
    settings = {"output_router_logits": False} if is_mixture else {}
    plain, patched = make_pair(
        model_type, torch.bfloat16, impl="auto", initializer_range=0.05, **sizes, **settings
    )
    exact = copy.deepcopy(plain).float().cuda()
    plain.cuda(), patched.cuda()
    batch = {name: tensor.cuda() for name, tensor in make_batch(T=517, vocab=1009).items()}
    exact_loss, expected = loss_and_gradients(exact, batch)
    plain_loss, plain_gradients = loss_and_gradients(plain, batch)
    loss, gradients = loss_and_gradients(patched, batch)
    assert relative_error(loss, exact_loss) <= 3 * relative_error(plain_loss, exact_loss) + 1e-3
    for name, gradient in gradients.items():
        allowed = (6 if is_mixture else 3) * relative_error(
            plain_gradients[name].float(), expected[name]
        )
        assert relative_error(gradient.float(), expected[name]) <= allowed, name

    prompt = {
        "input_ids": batch["input_ids"][:, :9],
        "attention_mask": torch.ones_like(batch["input_ids"][:, :9]),
    }
    with_kernels = copy.deepcopy(exact)
    apply_to(with_kernels)
    tokens, expected = (
        m.eval().generate(**prompt, max_new_tokens=8, do_sample=False)
        for m in (with_kernels, exact)
    )
    assert torch.equal(tokens, expected)
