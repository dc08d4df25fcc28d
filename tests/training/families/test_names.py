"""Tensors in files that hold several parameters: a row as Phi-3's and Phi-4's would be."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Phi3Config, Phi3ForCausalLM

import train
from kernels.parts import Fused, Parameter
from model import MODEL_SIZES, Transformer
from tests.checkpoints import save_checkpoint
from tests.ranks import run_ranks
from tests.runs import arguments, only_resume
from training.checkpoint.manifest import WEIGHTS, verify_checkpoint
from training.checkpoint.pieces import read_tensors
from training.checkpoint.weights import find_weights, load_model_weights
from training.export.__main__ import main as export
from training.families.config_json import from_config_json, in_family, to_config_json
from training.families.names import Rows, in_files
from training.families.rows import FAMILIES
from training.host.errors import UserError

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
FUSED = (
    (QKV, tuple(f"self_attn.{name}_proj.weight" for name in "qkv")),
    (GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
)
SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(autouse=True)
def phi(monkeypatch):
    row = replace(FAMILIES["llama"], fused=FUSED, class_name="Phi3")
    monkeypatch.setitem(FAMILIES, "phi3", row)


@pytest.fixture
def released(tmp_path):
    """A folder as transformers writes it."""
    torch.manual_seed(0)
    config = Phi3Config(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = Phi3ForCausalLM(config)
    model.save_pretrained(tmp_path / "phi")
    settings = to_config_json(
        in_family(replace(from_config_json(config.to_dict()), max_position_embeddings=128), "phi3")
    )
    (tmp_path / "phi/config.json").write_text(json.dumps(settings))
    return tmp_path / "phi"


def test_a_parameter_of_a_family_is_rows_of_a_larger_tensor():
    declared = in_family(replace(MODEL_SIZES["tiny"], num_hidden_layers=2), "phi3").parameters()
    tensor = f"layers.1.{QKV}"
    for name, first in (("q", 0), ("k", 128), ("v", 192)):
        name = f"layers.1.self_attn.{name}_proj.weight"
        for by_expert in (False, True):
            rows = in_files(name, declared[name], by_expert)
            assert rows == [Rows(tensor, (256, 128), first)]
    name = "layers.1.self_attn.o_proj.weight"
    assert in_files(name, declared[name], True) == [Rows(name, (128, 128))]


def test_fused_tensors_are_read_trained_and_written(released, corpus, tmp_path):
    """What is written has the names and the bytes that were read, and transformers opens it."""
    theirs = load_file(released / WEIGHTS)
    model = Transformer(from_config_json(json.loads((released / "config.json").read_text())))
    model.load_state_dict(dict(load_model_weights(released, model.declared)))
    for block, layer in enumerate(model.layers):
        parts = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
        whole = torch.cat([part.weight for part in parts])
        assert torch.equal(whole, theirs[f"model.layers.{block}.{QKV}"])
    ids = torch.randint(256, (1, 40))
    expected = Phi3ForCausalLM.from_pretrained(released, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(model(ids, return_logits=True).logits, expected)

    run, lost = tmp_path / "run", tmp_path / "lost"
    start = "--init_from", str(released), "--checkpoint_interval", "1"
    assert train.main(arguments(corpus, run, *start, steps=2)) == 0
    last = run / "step_00000002"
    shutil.move(last, lost)
    assert train.main(only_resume(run)) == 0
    verify_checkpoint(last)
    written, once = load_file(last / WEIGHTS), load_file(lost / WEIGHTS)
    assert all(torch.equal(written[name], tensor) for name, tensor in once.items())
    assert written.keys() == theirs.keys()
    assert all(written[name].shape == tensor.shape for name, tensor in theirs.items())
    assert not torch.equal(written[f"model.layers.0.{QKV}"], theirs[f"model.layers.0.{QKV}"])
    assert export([str(last), str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / WEIGHTS)
    assert exported.keys() == theirs.keys()
    assert all(torch.equal(x, written[name].to(x.dtype)) for name, x in exported.items())
    model.load_state_dict(dict(load_model_weights(last, model.declared)))
    reopened = Phi3ForCausalLM.from_pretrained(last, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(model(ids, return_logits=True).logits, reopened)


def test_a_fused_tensor_that_is_missing_or_of_another_size_is_named(released):
    declared = from_config_json(json.loads((released / "config.json").read_text())).parameters()
    tensors, name = load_file(released / WEIGHTS), f"model.layers.1.{GATE_UP}"
    short = {**tensors, name: tensors[name][1:].clone()}
    lacking = {other: tensor for other, tensor in tensors.items() if other != name}
    for changed, error in ((short, r"\[95, 32\], this model needs \[96, 32\]"), (lacking, "no")):
        save_file(changed, released / WEIGHTS)
        with pytest.raises(UserError, match=f"{name} has shape {error}|it has {error} {name}"):
            find_weights(released, declared)


def save_and_read_on_two_ranks(world, folder: Path):
    """Ranks have rows of each parameter, or columns."""
    declared = {
        f"layers.0.{name}.weight": Parameter(
            (rows, 6), block=0, fused=Fused("qkv.weight", 9, first)
        )
        for name, rows, first in (("q", 5, 0), ("k", 1, 5), ("v", 3, 6))
    }
    whole = torch.arange(54.0).view(9, 6)
    for dim in (0, 1):
        weights = {
            name: distribute_tensor(
                whole[p.fused.first_row :][: p.shape[0]].contiguous(), world.fsdp_mesh, [Shard(dim)]
            )
            for name, p in declared.items()
        }
        path = save_checkpoint(
            folder / str(dim), 1, weights=weights, declared=declared, model_config={},
            optimizer_state=None, trainer_state={},
        )  # fmt: skip
        verify_checkpoint(path)
        found = load_file(path / WEIGHTS)
        assert found.keys() == {"model.layers.0.qkv.weight"}
        assert torch.equal(found["model.layers.0.qkv.weight"], whole)
        read = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        read_tensors(find_weights(path, declared), read)
        assert all(torch.equal(read[name].to_local(), w.to_local()) for name, w in weights.items())


def test_ranks_write_and_read_their_parts_of_a_fused_tensor(tmp_path):
    run_ranks(2, save_and_read_on_two_ranks, tmp_path)
