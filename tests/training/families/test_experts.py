"""Mixtures of experts: runs, files in both forms, the auxiliary loss, adapters beside them, ranks,
and refusals."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import train
from kernels.compact_adamw import GROUP
from kernels.experts.part import ExpertsPart
from kernels.gated_mlp import GatedMLPPart
from kernels.head_loss import NextToken
from model import MODEL_SIZES, Transformer
from tests.runs import GIB, arguments, metrics, only_resume
from tests.shapes import model_of
from training.checkpoint.carried import read_carried
from training.checkpoint.manifest import WEIGHTS
from training.checkpoint.weights import (
    _read_weight,
    find_weights,
    load_model_weights,
    shape_of_weights,
)
from training.data.loader import make_batch
from training.data.sources import Document
from training.data.tokens import TokenStore
from training.export.__main__ import main as export_main
from training.families.config_json import from_config_json, to_config_json
from training.families.decide import decide_trained
from training.families.lora import Adapters, read_adapters, to_adapter_config
from training.families.names import name_in_file
from training.families.trained import ALL, WithoutRouters
from training.host.errors import UserError
from training.memory.cost_model import forward_flops
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.machine import DRIVER_BYTES, GPUS
from training.memory.placement import apply_execution
from training.memory.planner import make_plan
from training.parallel.tensor import check_matrix_sharing
from training.parallel.world import World
from training.run.build import step_on_meta
from training.run.decide import decide
from training.run.settings import TrainConfig, check_config

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1], "norm_topk_prob": True, "max_position_embeddings": 128,
}  # fmt: skip


def make(**settings):
    """Returns transformers' random model, and ours of the same weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **SIZES | settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(
                0.3 * torch.randn_like(parameter)
            )
    ours = Transformer(from_config_json(json.loads(json.dumps(config.to_dict(), default=str))))
    ours.load_state_dict(
        {name.removeprefix("model."): p.detach() for name, p in theirs.named_parameters()}
    )
    return theirs, ours


def test_the_auxiliary_loss_equals_transformers_wherever_activations_are():
    theirs, ours = make(output_router_logits=True, router_aux_loss_coef=0.5)
    ids = torch.randint(256, (2, 90), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, labels=ids)
    (3 * expected.loss).backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    placed = (Placement("gpu"), Placement("recompute"), Placement("gpu", "gpu"))
    for placements in ((WHOLE,) * 3, placed):
        apply_execution(ours, Execution(placements, 32, 1))
        ours.zero_grad()
        output = ours(ids, loss=NextToken.from_labels(ids))
        (3 * output.loss).backward()
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            output.auxiliary_loss, 0.5 * expected.aux_loss, rtol=1e-6, atol=0
        )
        for name, p in ours.named_parameters():
            atol = 1e-5 * float(gradients[name].abs().max())
            torch.testing.assert_close(p.grad, gradients[name], rtol=0, atol=atol, msg=name)
    assert output.expert_load.shape == (2, 8) and torch.equal(
        output.expert_load.sum(1), torch.full((2,), 3.0 * 180)
    )
    with torch.no_grad():
        validation = ours(ids, loss=NextToken.from_labels(ids)).loss
        assert validation < output.loss - 0.5  # has no such part


def test_padding_is_no_text_to_the_auxiliary_loss():
    """Texts of 40 and 71 tokens in rows of 90 equal transformers with an attention mask, and ranks
    get their part."""
    theirs, ours = make(output_router_logits=True, router_aux_loss_coef=0.5)
    lengths, T = torch.tensor([40, 71]), 90
    tokens = (
        torch.randint(1, 256, (2, T), generator=torch.Generator().manual_seed(1))
        .numpy()
        .astype("uint32")
    )
    store = TokenStore([Document(row[:length]) for row, length in zip(tokens, lengths)], 0)
    batch = make_batch(store, [[(i, 0, int(length))] for i, length in enumerate(lengths)], T)
    is_text = torch.arange(T) < lengths[:, None]
    labels = batch.input_ids.where(is_text, -100)
    expected = theirs(batch.input_ids, attention_mask=is_text.long(), labels=labels)
    expected.loss.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    for placement in (WHOLE, Placement("gpu")):
        apply_execution(ours, Execution((placement,) * 3, 32, 1))
        ours.zero_grad()
        output = ours(batch.input_ids, batch.documents, NextToken(batch.targets))
        output.loss.backward()
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            output.auxiliary_loss, 0.5 * expected.aux_loss, rtol=1e-6, atol=0
        )
        for name, p in ours.named_parameters():
            atol = 1e-5 * float(gradients[name].abs().max())
            torch.testing.assert_close(p.grad, gradients[name], rtol=0, atol=atol, msg=name)
    assert torch.equal(output.expert_load.sum(1), torch.full((2,), 3.0 * lengths.sum()))
    shares = [batch.slice(rank, 4).documents.is_padding_BT for rank in range(4)]
    assert torch.equal(torch.cat(shares, 1), F.pad(~is_text, (0, 2), value=True))
    assert make_batch(store, [[(1, 0, 71)]], 71).documents.is_padding_BT is None


def test_patterns_of_layers():
    """config.json names layers without experts in two ways; all are read, and one is written."""
    content = to_config_json(MODEL_SIZES["qwen3-30B-A3B"]) | SIZES | {"num_hidden_layers": 4}
    experts, dense = ExpertsPart(8, 3, 32), GatedMLPPart(96)
    for settings, mlps, written in (
        ({"mlp_only_layers": []}, (experts,), []),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, (dense, experts), [0, 2]),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (dense, experts, dense), [0, 2, 3]),
        ({"num_experts": 0}, (dense,), None),
        (
            {"norm_topk_prob": False, "mlp_only_layers": []},
            (replace(experts, normalizes=False),),
            [],
        ),
    ):
        read = from_config_json({**content, **settings})
        assert tuple(parts.mlp for parts in read.layers) == mlps
        assert to_config_json(read).get("mlp_only_layers") == written
        assert from_config_json(to_config_json(read)) == read
    for settings, message in (
        ({"num_experts_per_tok": 9}, "at most num_experts of them per token"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "experts have SiLU"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers is '1'"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers is .True"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a whole number above 0"),
        ({"output_router_logits": True, "router_aux_loss_coef": -1}, "router_aux_loss_coef is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            from_config_json({**content, **settings})


def test_a_token_counts_the_experts_that_it_goes_to():
    """30.5 billion parameters, of which 3.3 multiply a token, embedding included."""
    model = MODEL_SIZES["qwen3-30B-A3B"]
    assert model.num_parameters() == 30_532_122_624
    ends = 2 * model.vocab_size * model.hidden_size
    active = ends + sum(map(model.layer_active_parameters, range(48)))
    assert active == 48 * (8 * 3 * 768 * 2048 + 128 * 2048 + 2 * 2048 * 128 * (32 + 4)) + ends
    assert active / 1e9 == pytest.approx(3.35, abs=0.01)
    products = (
        forward_flops(model, [1]) - model.kinds[0].forward_flops([1], *model.attention.heads) * 48
    )
    assert products == 2 * (active - ends / 2)


def test_every_weight_of_30b_on_one_h200():
    """At 131,072 tokens with 128 GiB of host memory: compact state, gradients and weights of some
    layers wait there.

    A layer's gradients leave while the layer before runs, all 1.2 GB.
    """
    step = step_on_meta(
        MODEL_SIZES["qwen3-30B-A3B"], 131_072, given=Execution(state_format="compact")
    )
    plan = make_plan(step, GPUS["H200"].memory_bytes - DRIVER_BYTES, 128 * GIB)
    execution = plan.execution
    inventory, experts = step.inventory(execution), 3 * 768 * 2048 * 128
    assert plan.seconds < 60 and plan.host_bytes < 128 * GIB
    assert experts * 2 < inventory.leaving_limit < 1.1 * experts * 2
    assert {row.format.group for row in inventory if ".experts." in row.name} == {GROUP}
    waiting = sum(placement.weights == "host" for placement in execution.placements)
    assert 0 < waiting < 48 and sum(inventory.waiting.values()) > waiting * 2 * experts
    adapters = replace(step, trained=Adapters(16, 16.0, ("q_proj", "v_proj", "gate", "experts")))
    experts = 128 * (2048 + 2 * 768 + 768 + 2048)
    assert adapters.trained_elements == 48 * 16 * (2048 + 4096 + 2048 + 512 + 2048 + 128 + experts)


def test_plans_count_no_state_of_frozen_routers():
    config = model_of(64, 32, 48, 3, 2, 1, 16, mlps=(ExpertsPart(6, 2, 24), GatedMLPPart(48)))
    whole, frozen = (
        step_on_meta(config, 512, trained=trained) for trained in (ALL, WithoutRouters())
    )
    assert whole.trained_elements - frozen.trained_elements == 2 * 6 * 32
    sizes = [step.inventory(step.unplanned(WHOLE)).gpu_state for step in (whole, frozen)]
    assert sizes[0] - sizes[1] == 2 * 6 * 32 * 12
    assert sum(whole.layer_shares) < 1 and frozen.elements == whole.elements
    for flags, message in (
        ({}, "on a model without experts"),
        ({"lora": 2}, "only by lora_targets gate"),
    ):
        with pytest.raises(UserError, match=message):
            settings = TrainConfig(freeze_routers=True, init_from="base", **flags)
            check_config(settings, ["freeze_routers"])
            decide_trained(settings, MODEL_SIZES["tiny"])


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The folder of a released mixture, each expert's matrices by themselves, in two files."""
    folder = tmp_path_factory.mktemp("released")
    make(output_router_logits=True, router_aux_loss_coef=0.01)[0].save_pretrained(
        folder, max_shard_size="250KB"
    )
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


def tensors_of(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def joined(tensors):
    """Returns the same tensors with one for all experts of a layer."""
    found = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in (0, 2):
        start = f"model.layers.{layer}.mlp.experts."
        each = {
            name: [tensors[f"{start}{e}.{name}_proj.weight"] for e in range(8)]
            for name in ("gate", "up", "down")
        }
        found[f"{start}gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(each["gate"], each["up"])]
        )
        found[f"{start}down_proj"] = torch.stack(each["down"])
    return found


@pytest.mark.parametrize("form", ["apart", "joined"])
def test_a_run_writes_the_form_that_it_reads(form, released, corpus, tmp_path, capsys):
    """A run of two steps, stopped after the first, equals one that is not; transformers opens what
    it saves.

    Its files have an expert's matrices apart or joined, as the start has them. Beside joined ones
    routers are frozen.
    """
    from transformers import AutoModelForCausalLM

    folder, tensors = released, tensors_of(released)
    if form == "joined":
        folder, tensors = tmp_path / "joined", joined(tensors)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_bytes((released / "config.json").read_bytes())
    assert export_main([str(folder), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    exported = tensors_of(tmp_path / "out")
    assert exported.keys() == tensors.keys() and all(
        torch.equal(exported[name], x) for name, x in tensors.items()
    )
    start = [
        "--init_from",
        str(folder),
        "--validation_sequences",
        "0",
        "--checkpoint_interval",
        "1",
    ]
    start += ["--optimizer_state", "compact", "--gradient_checkpointing", "--learning_rate", "1e-2"]
    start += ["--warmup_steps", "0", "--final_learning_rate_ratio", "1"]
    start += ["--freeze_routers"] if form == "joined" else []
    assert train.main(arguments(corpus, tmp_path / "run", *start, steps=1)) == 0
    assert train.main(only_resume(tmp_path / "run", "--max_steps", "2")) == 0
    last, once = (tmp_path / run / "step_00000002" for run in ("run", "once"))
    saved = load_file(last / WEIGHTS)
    assert saved.keys() == tensors.keys()
    is_frozen = {name: form == "joined" and name.endswith("mlp.gate.weight") for name in tensors}
    assert all(torch.equal(saved[name], x) == is_frozen[name] for name, x in tensors.items())
    state = {name.rpartition(".")[0] for name in load_file(last / "optimizer.safetensors")}
    assert len(state) == 36 - 2 * (form == "joined")
    ids = torch.randint(256, (1, 50), generator=torch.Generator().manual_seed(1))
    shape = from_config_json(json.loads((last / "config.json").read_text()))
    ours = Transformer(shape)
    ours.load_state_dict(dict(load_model_weights(last, ours.declared)))
    assert train.main(arguments(corpus, tmp_path / "once", *start, steps=2)) == 0
    assert all(torch.equal(saved[name], x) for name, x in load_file(once / WEIGHTS).items())
    if form == "apart":
        theirs = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
        torch.testing.assert_close(
            ours(ids, return_logits=True).logits, theirs(ids).logits, rtol=0, atol=1e-4
        )
    other = "--no-freeze_routers" if form == "joined" else "--freeze_routers"
    assert train.main(only_resume(tmp_path / "run", "--max_steps", "3", other)) == 1
    assert (
        f"was trained with {'frozen' if form == 'joined' else 'trained'} routers"
        in capsys.readouterr().err
    )
    lines = metrics(tmp_path / "run")
    assert all(1 < line["expert_load"] <= line["expert_load_max"] <= 8 / 3 for line in lines)
    assert all(0.02 < line["auxiliary_loss"] < 0.1 for line in lines)


def test_experts_that_are_not_trained_do_not_say_the_form_of_files(released, tmp_path):
    """Heads that predict several tokens may have their experts in one tensor, beside others in a
    tensor each."""
    (tmp_path / "config.json").write_bytes((released / "config.json").read_bytes())
    for is_joined in (False, True):
        own = tensors_of(released)
        own = joined(own) if is_joined else own
        save_file(
            own | {"mtp.layers.0.mlp.experts.down_proj": torch.zeros(8, 4, 4)},
            tmp_path / "model.safetensors",
        )
        assert read_carried(tmp_path).joins_experts == is_joined


def test_a_run_says_that_the_auxiliary_loss_and_adapters_of_experts_are_left_out(
    released, tmp_path, caplog
):
    caplog.set_level("INFO")
    given = {
        "init_from": str(released),
        "lora": 2,
        "output_dir": str(tmp_path / "run"),
        "data": ["rows.jsonl"],
    }
    every = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,gate,experts"
    for targets, count in (("all-linear", 1), (every, 0)):
        caplog.clear()
        decide({**given, "lora_targets": targets}, World(0, 1, torch.device("cpu")))
        said = (
            "lora: all-linear leaves out routers and experts; to adapt them, give --lora_targets "
            f"{every}"
        )
        assert caplog.messages.count(said) == count
    for objective, count in (("next_token", 0), ("dpo", 1)):
        decide({**given, "objective": objective}, World(0, 1, torch.device("cpu")))
        assert caplog.text.count("objective dpo is minimised without the auxiliary loss") == count


def test_an_expert_that_is_not_finite_is_named_with_its_file(released, tmp_path):
    """Its layer's other experts are in files before."""
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    (damaged,) = (file for file in released.glob("*.safetensors") if name in load_file(file))
    first = "model.layers.2.mlp.experts.0.gate_proj.weight"
    assert first not in load_file(damaged)
    for file in released.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(damaged)
    tensors[name][3, 4] = float("nan")
    save_file(tensors, tmp_path / damaged.name)
    shapes = shape_of_weights(tmp_path).parameters()
    with pytest.raises(UserError, match=f"{name} in {tmp_path / damaged.name} is not finite"):
        dict(load_model_weights(tmp_path, shapes))


def test_adapters_of_attention_beside_experts(released, corpus, tmp_path, capsys):
    run = tmp_path / "run"
    start = ["--init_from", str(released), "--validation_sequences", "0", "--lora", "4"]
    assert train.main(arguments(corpus, run, *start, steps=1)) == 0
    folder = run / "step_00000001"
    saved = load_file(folder / "adapter_model.safetensors")
    own = {name.split(".")[-3] for name in saved}
    assert own == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }  # layer 1 has an MLP
    assert not any("experts" in name for name in saved)
    merged = str(tmp_path / "merged")
    assert export_main([str(folder), merged, "--merge", "--dtype", "float32"]) == 0
    found, before = tensors_of(tmp_path / "merged"), tensors_of(released)
    assert found.keys() == before.keys()
    changed = {name for name, x in found.items() if not torch.equal(x, before[name])}
    assert changed and all(".self_attn." in name or ".layers.1.mlp." in name for name in changed)
    for flags, message in (
        (
            ["--lora", "4", "--lora_bits", "4"],
            "and layers.0.mlp.experts.down_proj has 32 columns; give lora_bits 16",
        ),
        (
            ["--linear", "fp8"],
            "linear fp8 is not supported: experts multiply in bf16; give linear bf16, or drop it",
        ),
        (["--compile"], "compile True is not supported: experts are not compiled"),
    ):
        assert (
            train.main(arguments(corpus, tmp_path / "none", "--init_from", str(released), *flags))
            == 1
        )
        assert message in capsys.readouterr().err
    with pytest.raises(
        UserError, match="experts over ranks are not there yet; use context_parallel_size"
    ):
        check_matrix_sharing(2, MODEL_SIZES["qwen3-30B-A3B"])


def test_peft_opens_adapters_of_routers_experts_and_mlps_beside_them(released, corpus, tmp_path):
    """They train, peft computes the same with them, and gives them back."""
    import peft
    from transformers import AutoModelForCausalLM

    targets = "q_proj,gate_proj,down_proj,gate,experts"
    start = [
        "--init_from",
        str(released),
        "--validation_sequences",
        "0",
        "--lora",
        "3",
        "--learning_rate",
        "0.1",
    ]
    run, ids = (
        tmp_path / "run",
        torch.randint(256, (2, 50), generator=torch.Generator().manual_seed(1)),
    )
    assert train.main(arguments(corpus, run, *start, "--lora_targets", targets, steps=2)) == 0
    assert train.main(only_resume(run, "--max_steps", "3")) == 0
    folder = run / "step_00000003"
    base = AutoModelForCausalLM.from_pretrained(released, dtype=torch.float32)
    unlike = base(ids).logits
    theirs = peft.PeftModel.from_pretrained(base, folder)
    expected = theirs(ids).logits
    assert (expected - unlike).abs().max() > 0.1
    shape, adapters = shape_of_weights(folder), read_adapters(folder)[0]
    merged, model = Transformer(shape), Transformer(shape)
    merged.load_state_dict(dict(load_model_weights(folder, shape.parameters())))
    torch.testing.assert_close(
        merged(ids, return_logits=True).logits, expected, rtol=1e-4, atol=1e-4
    )
    adapters.prepare(model)
    entries = find_weights(folder, model.declared)
    model.load_state_dict({name: _read_weight(entry) for name, entry in entries.items()})
    torch.testing.assert_close(
        model(ids, return_logits=True).logits, expected, rtol=1e-4, atol=1e-4
    )
    theirs.save_pretrained(tmp_path / "peft")
    found, saved = (
        load_file(each / "adapter_model.safetensors") for each in (tmp_path / "peft", folder)
    )
    assert found.keys() == saved.keys() and all(
        torch.equal(found[name], x) for name, x in saved.items()
    )
    content = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    content["base_model_name_or_path"] = str(released)
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(content))
    assert (
        read_adapters(tmp_path / "peft")[0]
        == adapters
        == Adapters(3, 6.0, tuple(targets.split(",")))
    )


def test_peft_takes_mlps_for_mlps_where_no_layer_has_experts(tmp_path):
    """As it opens a folder, it takes gate_proj in this family's target_modules for experts'."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    content = to_config_json(replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    content |= {"model_type": "qwen3_moe", "mlp_only_layers": [0]}
    model, base = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**content)),
        tmp_path / "base",
    )
    model.save_pretrained(base)
    shape, adapters = shape_of_weights(base), Adapters(4, 8.0)
    factors = adapters.added(shape.parameters())
    save_file(
        {name_in_file(n, is_adapter=True): 0.1 * torch.randn(p.shape) for n, p in factors.items()},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(to_adapter_config(adapters, base)))
    merged, ids = Transformer(shape), torch.arange(30)[None]
    merged.load_state_dict(dict(load_model_weights(tmp_path, shape.parameters())))
    expected = peft.PeftModel.from_pretrained(model, tmp_path)(ids).logits
    torch.testing.assert_close(
        merged(ids, return_logits=True).logits, expected, rtol=1e-4, atol=1e-5
    )


def test_adapters_that_peft_joins_are_trained_on(released, corpus, tmp_path):
    """peft takes targets of experts' own modules, as transformers 4 had them: gate and up have
    twice the rank then."""
    import peft
    from transformers import AutoModelForCausalLM

    def theirs():
        return AutoModelForCausalLM.from_pretrained(released, dtype=torch.float32)

    modules = ["v_proj", "gate", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules, task_type="CAUSAL_LM")
    model = peft.get_peft_model(theirs(), lora)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1) if parameter.requires_grad else None
    model.save_pretrained(tmp_path / "peft")
    content = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    content["base_model_name_or_path"] = str(released)
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(content))
    assert read_adapters(tmp_path / "peft")[0] == Adapters(
        3, 5.0, ("v_proj", "gate", "experts"), joined=2
    )
    start = [
        "--init_from",
        str(tmp_path / "peft"),
        "--validation_sequences",
        "0",
        "--checkpoint_interval",
        "1",
    ]
    assert train.main(arguments(corpus, tmp_path / "run", *start, steps=1)) == 0
    assert train.main(only_resume(tmp_path / "run", "--max_steps", "2")) == 0
    ids = torch.randint(256, (2, 50), generator=torch.Generator().manual_seed(1))
    found = []
    for folder in (tmp_path / "peft", tmp_path / "run/step_00000002"):
        shape = shape_of_weights(folder)
        merged = Transformer(shape)
        merged.load_state_dict(dict(load_model_weights(folder, shape.parameters())))
        found.append(merged(ids, return_logits=True).logits)
        expected = peft.PeftModel.from_pretrained(theirs(), folder)(ids).logits
        torch.testing.assert_close(found[-1], expected, rtol=1e-4, atol=1e-4)
    assert (found[0] - found[1]).abs().max() > 1e-3
    for name in ("rank_pattern", "alpha_pattern"):
        (tmp_path / "peft/adapter_config.json").write_text(
            json.dumps(content | {name: {"q_proj": 8}})
        )
        with pytest.raises(
            UserError, match=r"has .*_pattern .*q_proj.*, which this decoder does not compute"
        ):
            read_adapters(tmp_path / "peft")


def test_no_gradient_goes_to_an_expert_without_tokens():
    """Its router's row gets some. Experts in another order are the same model."""
    config = model_of(
        64, 32, 48, 2, 2, 1, 16, mlps=(ExpertsPart(6, 2, 24),), model_type="qwen3_moe"
    )
    torch.manual_seed(0)
    model = Transformer(config)
    ids = torch.randint(64, (1, 60))
    with torch.no_grad():
        model.layers[0].mlp.gate.weight[4] = -100 * model.layers[0].mlp.gate.weight[:4].abs().sum(0)
    model.layers[0].post_attention_layernorm.weight.data.abs_()
    order = torch.randperm(6)
    output = model(ids, loss=NextToken.from_labels(ids))
    output.loss.backward()
    idle = (output.expert_load[0] == 0).nonzero().flatten().tolist()
    experts = model.layers[0].mlp.experts
    for e in idle:
        assert not experts["gate_up_proj"].grad[e].any() and not experts["down_proj"].grad[e].any()
    with torch.no_grad():
        for block in model.layers:
            for parameter in block.mlp.parameters():
                parameter.copy_(parameter[order].clone())
    torch.testing.assert_close(model(ids, loss=NextToken.from_labels(ids)).loss, output.loss)
