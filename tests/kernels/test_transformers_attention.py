"""The attention that transformers calls by name, against PyTorch's in the same models."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernels import register_attention

BASE = {
    "vocab_size": 71, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "qwen3": {}, "llama": {}, "qwen2": {}, "mistral": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"attention_multiplier": 0.3},
}  # fmt: skip
DOCUMENTS = [150, 1, 96, 53]  # 300 tokens: blocks of 32 to choose from, beside the window
T = sum(DOCUMENTS)
IS_NEW = hasattr(
    PreTrainedModel, "activation_checkpointing_enable"
)  # transformers 5.17 has the other name alone
CHECKPOINTING = "activation_checkpointing" if IS_NEW else "gradient_checkpointing"


@pytest.fixture(autouse=True)
def every_block_chosen():
    register_attention(selected_blocks=64, window=32, block_size=32, dense_below=0)


def make_model(model_type="qwen3", implementation="sdpa", **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(BASE | FAMILIES.get(model_type, {}) | options))
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=implementation
    )


def make_batch(rows=2):
    input_ids = torch.randint(2, 71, (rows, T), generator=torch.Generator().manual_seed(1))
    position_ids = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(rows, T).contiguous()
    position_ids[1:] = torch.arange(T)  # the second row is one document
    return {"input_ids": input_ids, "labels": input_ids.clone(), "position_ids": position_ids}


def results(model, implementation, batch, **options):
    """Returns logits, and the gradients of all parameters in one vector."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    outputs = model(**batch, use_cache=False, **options)
    outputs.loss.backward()
    return outputs.logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_near(actual, expected, tolerance=1e-5):
    for ours, theirs in zip(actual, expected):
        assert (ours - theirs).abs().max() <= tolerance * max(1, theirs.abs().max())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_packed_logits_and_gradients_equal_those_of_sdpa(model_type):
    model, batch = make_model(model_type).train(), make_batch()
    expected = results(model, "sdpa", batch)
    for name in ("fathom", "fathom_sparse"):
        assert_near(results(model, name, batch), expected)
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # Qwen3's norms give float32 queries, beside bfloat16 values
        assert results(model, "fathom_sparse", batch)[1].isfinite().all()
    getattr(model, f"{CHECKPOINTING}_enable")()
    assert_near(results(model, "fathom_sparse", batch), expected)


@pytest.mark.parametrize("name", ["fathom", "fathom_sparse"])
def test_packed_documents_attend_as_if_alone(name):
    register_attention(
        selected_blocks=1, window=32, block_size=32, dense_below=0
    )  # a choice that leaves blocks out
    model, batch = make_model(), make_batch(rows=1)
    model.set_attn_implementation(name)
    alone = [
        model(ids, use_cache=False).logits for ids in batch["input_ids"].split(DOCUMENTS, dim=1)
    ]
    ends = torch.tensor([0, *DOCUMENTS]).cumsum(0, dtype=torch.int32)
    lengths = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 150,
        "max_length_k": 150,
    }
    for more in ({}, {"use_cache": True}, lengths):
        assert_near([model(**batch, **more).logits], [torch.cat(alone, 1)])


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_the_trainer_takes_the_same_steps_as_with_sdpa(model_type, tmp_path):
    from transformers import (
        Trainer,
        TrainingArguments,
    )  # 3 s, in each process that collects this file

    losses = {}
    batch = make_batch()
    rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(2)]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[],
        save_strategy="no",
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2, optim="sgd", **{CHECKPOINTING: True},
    )  # fmt: skip
    for name in ("sdpa", "fathom_sparse"):
        model = make_model(model_type)
        model.set_attn_implementation(name)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses[name] = torch.tensor(
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        )
    assert len(losses["sdpa"]) == 3 and losses["sdpa"][0] > losses["sdpa"][2]
    torch.testing.assert_close(losses["fathom_sparse"], losses["sdpa"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padding_is_not_attended_to_and_generation_equals_sdpa(padding_side):
    model, ids = make_model().eval(), make_batch()["input_ids"][:, :100].clone()
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    if padding_side == "right":
        mask = mask.flip(1)
    batch = {"input_ids": ids, "attention_mask": mask}
    found = {}
    for name in ("sdpa", "fathom_sparse"):
        model.set_attn_implementation(name)
        found[name] = model(**batch, use_cache=False).logits[mask.bool()]
        batch["attention_mask"] = batch["attention_mask"].clone()
        if padding_side == "left":
            found[name + " tokens"] = model.generate(**batch, max_new_tokens=5, do_sample=False)
    assert_near([found["fathom_sparse"]], [found["sdpa"]])
    if padding_side == "left":
        assert torch.equal(found["fathom_sparse tokens"], found["sdpa tokens"])
    logits = []
    for name in ("sdpa", "fathom_sparse"):  # several new tokens at a time
        model.set_attn_implementation(name)
        cache = model(ids[:, :60]).past_key_values
        logits.append(model(ids[:, 60:], past_key_values=cache).logits)
    assert_near(logits[1:], logits[:1])


@pytest.mark.parametrize(("options", "inputs", "message"), [
    ({"model_type": "mistral", "sliding_window": 8}, {}, "does not support sliding_window"),
    # its mask alone has it
    ({"model_type": "phimoe", "sliding_window": 7}, {}, "does not support windows"),
    ({"model_type": "gpt_oss", "implementation": "eager", "num_local_experts": 4}, {}, "does not support .*s_aux"),
    ({"attention_dropout": 0.1}, {}, "does not support dropout"),
    ({}, {"attention_mask": torch.ones(1, 1, 8, 8)}, "a mask of 4 dimensions"),
    ({}, {"is_causal": False}, "not causal"),
    ({}, {"position_ids": torch.arange(8).expand(3, 1, 8)}, "hands no position_ids"),
    ({}, {"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q must count the tokens"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_in_one_line(options, inputs, message):
    model = make_model(**options).train()
    model.set_attn_implementation("fathom")
    with pytest.raises(ValueError, match=message):
        if "position_ids" in inputs:
            model.model.layers[0].self_attn(
                torch.randn(1, 8, 32), (torch.ones(1, 8, 8),) * 2, None, **inputs
            )
        else:
            model(torch.ones(1, 8, dtype=torch.long), use_cache=False, **inputs)


def test_a_static_cache_is_refused():
    model = make_model()
    model.set_attn_implementation("fathom_sparse")
    with pytest.raises(ValueError, match="dynamic cache"):
        model.generate(
            torch.ones(1, 8, dtype=torch.long), max_new_tokens=2, cache_implementation="static"
        )


def test_a_model_is_read_with_it_and_apply_to_goes_along(tmp_path):
    from kernels import apply_to

    make_model().save_pretrained(tmp_path)
    batch = make_batch()
    plain, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        for name in ("sdpa", "fathom_sparse")
    )
    apply_to(ours, impl="torch")
    loss, expected = ours(**batch, use_cache=False).loss, plain(**batch, use_cache=False).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
