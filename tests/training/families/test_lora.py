"""Adapters against peft's: losses of ten steps, every gradient, merged weights, and files."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from kernels.attention.documents import find_documents
from kernels.experts.part import ExpertsPart
from kernels.gated_mlp import GatedMLPPart
from kernels.head_loss import NextToken
from kernels.lora import LORA
from model import MODEL_SIZES, Transformer
from tests.optimizers import make_optimizer
from tests.packages import needs
from tests.shapes import reshape
from training.checkpoint.state import load_weights
from training.families.config_json import from_config_json
from training.families.flags import LORA_TARGETS
from training.families.lora import Adapters
from training.memory.cost_model import arena_bytes
from training.memory.execution import WHOLE, Execution, Placement, inventory_of
from training.memory.placement import allocate, apply_execution
from training.memory.step import Step
from training.optim.adamw import MasterAdamW
from training.optim.formats import frozen_format
from training.optim.quantized import quantize
from training.parallel.fsdp import initial_weights

SIZES = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN35 = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [1],
}
FORMS = {  # model_type, other settings, adapters
    "Qwen3": ("qwen3", {"tie_word_embeddings": True}, Adapters(4, 8.0)),
    "Llama": ("llama", {}, Adapters(3, 7.0, ("q_proj", "v_proj"))),
    "Qwen2": (
        "qwen2",
        {"tie_word_embeddings": True},
        Adapters(2, 1.0, ("k_proj", "o_proj", "down_proj")),
    ),
    "Qwen3.5": (
        "qwen3_5_text",
        QWEN35,
        Adapters(2, 3.0, ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj")),
    ),
    "Qwen3-MoE": (
        "qwen3_moe",
        QWEN3_MOE,
        Adapters(2, 3.0, ("v_proj", "up_proj", "gate", "experts")),
    ),
    "Granite": ("granite", {"residual_multiplier": 0.5}, Adapters(1, 1.0, ("gate_proj",))),
}
EXECUTIONS = {
    "whole": Execution((Placement("gpu", "gpu", "gpu"),) * 2, linear=LORA),
    "tiles, heads at a time": Execution(
        (Placement(results="gpu"), Placement("recompute")),
        mlp_tile_size=24,
        heads_at_a_time=1,
        linear=LORA,
    ),
    "all heads": Execution((Placement(), Placement("gpu", "gpu", "gpu")), linear=LORA),
}


def adapter_config(adapters, has_experts):
    """Returns peft's rank, alpha and targets. Beside experts it knows MLPs and routers as
    parameters alone."""
    names = [
        f"mlp.{name}.weight"
        for name in adapters.targets
        if name in ("gate_proj", "up_proj", "down_proj", "gate") and has_experts
    ]
    modules = [name for name in adapters.targets if f"mlp.{name}.weight" not in names]
    if "experts" in modules:
        modules.remove("experts")
        names += ["experts.gate_up_proj", "experts.down_proj"]
    targets = {"target_modules": modules, "target_parameters": names or None}
    return {"r": adapters.rank, "lora_alpha": adapters.alpha, **targets}


def peft_model(name):
    """A random model of transformers with random adapters of peft."""
    import peft
    import transformers

    model_type, settings, adapters = FORMS[name]
    config = transformers.AutoConfig.for_model(
        model_type, **SIZES, max_position_embeddings=128, **settings
    )
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    lora = adapter_config(adapters, has_experts="num_experts" in settings)
    theirs = peft.get_peft_model(base, peft.LoraConfig(**lora, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    return theirs


def our_names(theirs):
    """Parameters of a model of peft by our names."""
    names = {
        n: re.sub(r"\.base_layer(?!\.lora_)|\.default", "", n) for n, _ in theirs.named_parameters()
    }
    return {
        names[n].removeprefix("base_model.model.").removeprefix("model."): p
        for n, p in theirs.named_parameters()
    }


def ours_like(theirs, name):
    config = from_config_json(theirs.config.to_dict())
    model = Transformer(config)
    FORMS[name][2].prepare(model)
    model.load_state_dict(our_names(theirs))
    return model


def batches(count):
    """Unlike batches: one long sequence, several short ones, long again."""
    generator = torch.Generator().manual_seed(0)
    shapes = itertools.islice(itertools.cycle([(1, 61), (4, 9), (2, 33), (1, 2)]), count)
    return [torch.randint(SIZES["vocab_size"], shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
@pytest.mark.parametrize("name", FORMS)
def test_losses_and_gradients_are_pefts(name, execution):
    theirs = peft_model(name)
    model = ours_like(theirs, name)
    heads = execution.heads_at_a_time if model.config.attends_in_groups else None
    apply_execution(model, replace(execution, heads_at_a_time=heads))
    reference = {n: p for n, p in our_names(theirs).items() if p.requires_grad}
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert parameters.keys() == reference.keys()
    tolerance = 5e-5 if name == "Qwen3.5" else 1e-5  # a state sums over a document in another order
    # AdamW would make a step of a gradient near zero by its sign, which rounding decides.
    optimizers = [torch.optim.SGD(each.values(), lr=0.1) for each in (reference, parameters)]
    for ids in batches(10):
        expected = theirs(input_ids=ids, labels=ids).loss
        loss = model(ids, loss=NextToken.from_labels(ids)).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        for optimizer, each in zip(optimizers, (expected, loss)):
            optimizer.zero_grad()
            each.backward()
        for n, parameter in parameters.items():
            scale = reference[n].grad.abs().max()
            assert (parameter.grad - reference[n].grad).abs().max() <= tolerance * max(
                1.0, scale
            ), n
        for optimizer in optimizers:
            optimizer.step()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("ratio", [1.0, 8.0])
def test_ten_steps_of_adamw_are_pefts(ratio):
    """Checks losses on unlike batches, with LoRA+ as well: B's rate is `ratio` times A's."""
    theirs = peft_model("Llama")
    model = ours_like(theirs, "Llama")
    apply_execution(model, EXECUTIONS["tiles, heads at a time"])
    optimizer = make_optimizer(model.named_parameters(), declared=model.declared, lora_plus=ratio)
    named = [(n, p) for n, p in theirs.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if f"lora_{side}" in n], "lr": rate}
        for side, rate in (("A", 0.01), ("B", 0.01 * ratio))
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    found, expected = [], []
    for ids in batches(10):
        loss, loss_of_reference = (
            model(ids, loss=NextToken.from_labels(ids)).loss,
            theirs(input_ids=ids, labels=ids).loss,
        )
        for each, losses in ((loss, found), (loss_of_reference, expected)):
            each.backward()
            losses.append(float(each.detach()))
        optimizer.step(0.01)
        reference.step()
        reference.zero_grad()
    assert found == pytest.approx(expected, rel=1e-4)


def test_packed_documents_and_the_chunked_loss_are_as_one_by_one():
    """Checks adapters' gradients of three packed documents, in tiles and by heads, against one
    document at a time."""
    theirs = peft_model("Qwen3")
    model = ours_like(theirs, "Qwen3")
    lengths, ids = (
        [17, 3, 21],
        torch.randint(131, (1, 41), generator=torch.Generator().manual_seed(1)),
    )
    losses = [
        model(part, loss=NextToken.from_labels(part, denominator=1.0)).loss
        for part in ids.split(lengths, dim=1)
    ]
    sum(losses).backward()
    expected = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    apply_execution(model, EXECUTIONS["tiles, heads at a time"])
    model.loss_impl = "chunked"
    documents = find_documents(torch.arange(3).repeat_interleave(torch.tensor(lengths))[None])
    loss = model(ids, documents, NextToken.from_labels(ids, documents, denominator=1.0)).loss
    loss.backward()
    torch.testing.assert_close(loss, sum(losses))
    for found, exact in zip([p.grad for p in model.parameters() if p.requires_grad], expected):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def train_placed(tied, place, bits=16, round_to=16):
    """Losses and adapters of four unlike steps with weights in that place, first rounded to
    `round_to` bits."""
    mlps = GatedMLPPart(384), ExpertsPart(4, 2, 64), GatedMLPPart(384)
    config = reshape(MODEL_SIZES["tiny"], num_hidden_layers=3, tie_word_embeddings=tied, mlps=mlps)
    adapters = Adapters(4, 8.0, ("q_proj", "o_proj", "up_proj", "experts"))
    pair = Placement("gpu", "gpu", weights=place), Placement("recompute", weights=place)
    placements = *pair, Placement("host", "host", weights=place)
    execution = Execution(
        placements, mlp_tile_size=16, heads_at_a_time=1, loss_impl="chunked", ends=place,
        linear=LORA,
        frozen=frozen_format(bits),
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(config)
    adapters.prepare(model)
    inventory = inventory_of(model.named_parameters(), model.declared, execution, accumulate=True)
    on_host = sum(row.weight_on_host for row in inventory)
    assert on_host == (len(inventory.rows) - 1 if place == "host" else 0)  # the last norm's stays
    assert sum(row.format.holds_weight for row in inventory) == (
        7 * 2 + 6 if bits < 16 else 0
    )  # not the router
    allocate(model, inventory, torch.device("cpu"))
    optimizer = MasterAdamW(model.named_parameters(), inventory)

    def rounded(name, weight):
        is_matrix = (
            weight.ndim > 1 and name.startswith("layers.") and not name.endswith("mlp.gate.weight")
        )
        if round_to < 16 and is_matrix and ".lora_" not in name:
            quantize(weight.flatten(), round_to).write_into(weight)
        return name, weight

    load_weights(optimizer, (rounded(*pair) for pair in initial_weights(model, seed=0)))
    arena = Step(
        config, model.named_parameters(), 61, batch_size=4, given=execution, trained=adapters
    )
    apply_execution(model, execution, arena_bytes(arena, execution), optimizer.homes)
    losses = []
    for ids in batches(4):
        loss = model(ids, loss=NextToken.from_labels(ids)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.clip_grad_norm(1.0)
        optimizer.step(1e-2)
        with torch.no_grad():
            losses.append(float(model(ids, loss=NextToken.from_labels(ids)).loss))
    return losses, {name: weight.clone() for name, weight in optimizer.weights().items()}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_visit_train_the_same_adapters(tied):
    """Checks losses and adapters bit by bit, with all weights on the host and with none."""
    (losses, expected), (found_losses, found) = (
        train_placed(tied, "gpu"),
        train_placed(tied, "host"),
    )
    assert found_losses == losses and losses[1] < losses[0]
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


@pytest.mark.parametrize("place", ["gpu", "host"])
@needs("bitsandbytes", "0.50")
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_train_as_the_weights_that_they_round_to(bits, place):
    """Checks losses and adapters bit by bit; weights of other bits train otherwise."""
    losses, expected = train_placed(True, "gpu", round_to=bits)
    found_losses, found = train_placed(True, place, bits)
    assert found_losses == losses != train_placed(True, "gpu")[0]
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


@needs("bitsandbytes", "0.50")
def test_a_whole_block_cannot_have_quantized_weights():
    model, home = (
        Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=1)),
        quantize(torch.zeros(64), 4),
    )
    with pytest.raises(ValueError, match="block 0 is left to autograd, but its weights visit"):
        apply_execution(
            model, Execution((WHOLE,)), homes={model.layers[0].mlp.up_proj.weight: home}
        )


def loss_and_gradients(execution, device, dtype):
    """One step of packed documents; the same weights and adapters, rounded to bfloat16, on any
    device."""
    config = reshape(MODEL_SIZES["tiny"], num_hidden_layers=2, head_dim=64, hidden_size=256)
    with torch.device("meta"):
        model = Transformer(config)
    Adapters(16, 32.0).prepare(model)
    model.to(dtype).to_empty(device=device)
    cpu = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = 0.05 * torch.randn(parameter.shape, generator=cpu) + name.endswith(
                "norm.weight"
            )
            parameter.copy_(drawn.bfloat16())
    apply_execution(model, execution)
    lengths = torch.tensor([700, 3, 250, 71])
    ids = torch.randint(256, (1, 1024), generator=cpu).to(device)
    documents = find_documents(torch.arange(4).repeat_interleave(lengths)[None])
    loss = model(ids, documents, NextToken.from_labels(ids, documents)).loss
    loss.backward()
    return loss.detach().cpu(), {
        n: p.grad.cpu().float() for n, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXECUTIONS)
def test_bfloat16_on_a_gpu_is_float32_to_rounding(name):
    expected_loss, expected = loss_and_gradients(EXECUTIONS[name], "cpu", torch.float32)
    execution = replace(EXECUTIONS[name], mlp_tile_size=EXECUTIONS[name].mlp_tile_size and 300)
    loss, gradients = loss_and_gradients(execution, "cuda", torch.bfloat16)
    assert float(loss) == pytest.approx(float(expected_loss), rel=2e-3)
    for parameter, gradient in gradients.items():
        error = (gradient - expected[parameter]).norm() / expected[parameter].norm()
        assert error < 0.05, (parameter, float(error))


def test_merged_weights_are_pefts_to_rounding():
    for name in FORMS:
        theirs = peft_model(name)
        model = ours_like(theirs, name)
        expected = dict(theirs.merge_and_unload().named_parameters())
        adapters, weights = FORMS[name][2], dict(model.named_parameters())
        for path, weight in model.named_parameters():
            if factors := adapters.factors(path, model.declared[path]):
                found = adapters.merge(weight, *(weights[factor] for factor in factors))
                torch.testing.assert_close(found, expected[f"model.{path}"], rtol=1e-6, atol=1e-6)


def test_fresh_adapters_change_nothing_and_start_as_pefts():
    theirs = peft_model("Llama")
    config = from_config_json(theirs.config.to_dict())
    torch.manual_seed(0)
    model = Transformer(config)
    ids = batches(1)[0]
    before = model(ids, return_logits=True).logits
    Adapters(8, 16.0).prepare(model)
    torch.testing.assert_close(model(ids, return_logits=True).logits, before, rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if "lora_A" in name:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
    assert {name.split(".")[3] for name, p in model.named_parameters() if p.requires_grad} == {
        *LORA_TARGETS
    }


@pytest.mark.parametrize(("rank", "targets", "got"), [
    (0, LORA_TARGETS, "rank 0, alpha 1.0 and q_proj, k_proj, "),
    (4, (), "rank 4, alpha 1.0 and no target$"),
    (4, ("q_proj", "embed_tokens"), "rank 4, alpha 1.0 and q_proj, embed_tokens$"),
])  # fmt: skip
def test_adapters_that_cannot_be_are_refused(rank, targets, got):
    needs = "adapters need a rank and an alpha above 0, and targets among q_proj, k_proj"
    with pytest.raises(ValueError, match=f"{needs}.*, got {got}"):
        Adapters(rank, 1.0, targets)
