"""Adapters of Qwen3.5 as peft makes them are read, and merged weights compute what peft
computes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from model import Transformer
from tests.runs import arguments
from tests.wrappers import release, whole_model
from training.checkpoint.weights import load_model_weights, shape_of_weights
from training.export.__main__ import main as export
from training.families.lora import read_adapters
from training.host.errors import UserError

IDS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
SHARED = [f"shared_expert.{name}" for name in MLP]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FULL_NAMES = [f"layers.{layer}.{name}" for layer in range(2) for name in EXPERTS]
# delta nets inside alone
OTHERS = r".*(?:language|text).*(?:attn|mlp).*_proj|model\.layers\.\d+\.mlp\.\w+_proj"
TOWER = r".*\bvisual\b.*"
DENSE = {
    "all-linear": {"target_modules": "all-linear", "exclude_modules": TOWER},
    "list": {"target_modules": [*DELTA_NET, *MLP, "q_proj", "k_proj", "v_proj", "o_proj"]},
    "narrow": {"target_modules": ["in_proj_b", "linear_attn.in_proj_a"]},
    "pattern": {"target_modules": r".*layers\.\d+\.(linear_attn\.in_proj_[ab]|self_attn\.q_proj)"},
    "pattern of others": {
        "target_modules": r".*(?:language|text).*(?:attn|mlp).*_proj|model\.layers\.\d+\.mlp\.\w+_proj"
    },
    "orthogonal": {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "orthogonal"},
    "mica": {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "mica"},
    "gaussian": {"target_modules": ["o_proj"], "init_lora_weights": "gaussian"},
    "untouched": {"target_modules": ["o_proj"], "init_lora_weights": False},
}
SPARSE = {
    "all-linear": {"target_modules": "all-linear", "exclude_modules": TOWER},
    "shared experts": {"target_modules": [*SHARED, "shared_expert_gate", "in_proj_a"]},
    "shared experts' full names": {"target_modules": [f"mlp.{name}" for name in SHARED]},
    "MLPs": {"target_modules": MLP},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "parameters alone": {"target_parameters": ["mlp.gate.weight", *EXPERTS]},
    "parameters' full names": {"target_modules": ["in_proj_z"], "target_parameters": FULL_NAMES},
}
CASES = [("qwen3_5", name, case) for name, case in DENSE.items()]
CASES += [("qwen3_5_moe", name, case) for name, case in SPARSE.items()]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Released models of text and images by their type."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: release(name, folder / name) for name in ("qwen3_5", "qwen3_5_moe")}


def text_model(base):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def make_adapters(base, folder, model, **changes):
    """Saves random adapters by peft; returns what the model computes with them."""
    import peft

    torch.manual_seed(0)
    lora = {"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM", **changes}
    theirs = peft.get_peft_model(model, peft.LoraConfig(**lora))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.requires_grad else None
    theirs.save_pretrained(folder)
    edit(folder, base_model_name_or_path=str(base))
    return theirs(input_ids=IDS).logits


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def merged_logits(folder):
    model = Transformer(shape_of_weights(folder))
    model.load_state_dict(dict(load_model_weights(folder, model.config.parameters())))
    return model(IDS, return_logits=True).logits


@pytest.mark.parametrize(
    ("base", "name", "changes"), CASES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_adapters_are_read_as_peft_makes_them(base, name, changes, bases, tmp_path):
    """On the text model alone, and inside of the whole model, where a vision tower is."""
    folder = bases[base]
    unlike = text_model(folder)(input_ids=IDS).logits
    for opened in (text_model, whole_model):
        saved = tmp_path / opened.__name__
        expected = make_adapters(folder, saved, opened(folder), **changes)
        assert (expected - unlike).abs().max() > 1e-3
        torch.testing.assert_close(merged_logits(saved), expected, rtol=1e-4, atol=1e-4)


def test_merged_adapters_of_narrow_projections_are_exported_and_not_trained(
    bases, tmp_path, capsys
):
    folder, out = tmp_path / "adapters", tmp_path / "out"
    base = bases["qwen3_5_moe"]
    expected = make_adapters(
        base, folder, whole_model(base), target_modules=["in_proj_a", "q_proj"]
    )
    (tmp_path / "text.txt").write_text("words " * 200)
    run = arguments(
        str(tmp_path / "text.txt"), tmp_path / "run", "--init_from", str(folder), steps=1
    )
    assert train.main(run) == 1
    error = capsys.readouterr().err
    start = ["--init_from", str(base), "--lora", "2", "--lora_targets", "q_proj,in_proj_a"]
    assert train.main(arguments(str(tmp_path / "text.txt"), tmp_path / "run", *start, steps=1)) == 1
    assert "lora_targets in_proj_a: this model has q_proj," in capsys.readouterr().err
    assert "has adapters of in_proj_a, which are read and not trained; merge them first: " in error
    assert export([str(folder), str(out), "--merge", "--dtype", "float32"]) == 0
    torch.testing.assert_close(
        whole_model(out)(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga"]
)
def test_adapters_whose_base_was_changed_are_refused_with_the_reason(init, bases, tmp_path):
    base = bases["qwen3_5"]
    make_adapters(base, tmp_path / "adapters", text_model(base), target_modules=["q_proj"])
    edit(tmp_path / "adapters", init_lora_weights=init)
    with pytest.raises(
        UserError, match=f"has init_lora_weights '{init}' .it changed the base's matrices too"
    ):
        read_adapters(tmp_path / "adapters")


def test_adapters_of_other_modules_or_of_some_blocks_are_refused(bases, tmp_path):
    base = bases["qwen3_5"]
    make_adapters(base, tmp_path / "tower", whole_model(base), target_modules="all-linear")
    with pytest.raises(
        UserError,
        match=r"visual.*, this model does not; choose adapters of the text model's blocks",
    ):
        merged_logits(tmp_path / "tower")
    edit(tmp_path / "tower", exclude_modules=[1])
    with pytest.raises(UserError, match=r"has exclude_modules \[1\]"):
        read_adapters(tmp_path / "tower")
    moe = bases["qwen3_5_moe"]
    some = ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    make_adapters(moe, tmp_path / "some", text_model(moe), target_parameters=some)
    with pytest.raises(
        UserError, match=r"has target_parameters .*no layers\.1\.mlp\.experts\.gate_up_proj\.lora_A"
    ):
        read_adapters(tmp_path / "some")
    only = ["q_proj", "in_proj_qkv"]
    make_adapters(
        base,
        tmp_path / "excluded",
        text_model(base),
        target_modules=only,
        exclude_modules=["in_proj_qkv"],
    )
    assert read_adapters(tmp_path / "excluded")[0].targets == ("q_proj",)


def test_missing_tensors_name_no_flag(bases, tmp_path):
    """A folder's config.json has its sizes: no flag chooses others."""
    base, adapters = bases["qwen3_5_moe"], tmp_path / "adapters"
    make_adapters(base, adapters, text_model(base), target_modules=SHARED)
    shutil.copytree(base, tmp_path / "whole")
    for folder, file, message in (
        (adapters, "adapter_model.safetensors", "choose adapters of the text model's blocks alone"),
        (
            tmp_path / "whole",
            "model.safetensors",
            "choose a folder whose tensors are those that its config.json declares",
        ),
    ):
        tensors = load_file(folder / file)
        del tensors[next(name for name in tensors if "shared_expert.up_proj" in name)]
        save_file(tensors, folder / file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message) as error:
            merged_logits(folder)
        assert "model_size" not in str(error.value)
