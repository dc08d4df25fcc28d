"""Weights: files that Hugging Face's tools read and write; damage and what does not fit are
refused."""

import itertools
import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import train
from kernels.experts.part import ExpertsPart
from kernels.parts import Parameter
from model import MODEL_SIZES, Transformer
from tests.checkpoints import damage, parameters_of, save_checkpoint, unreadable
from tests.training.checkpoint.test_files import Model, assert_same_state, save, weights_of
from training.checkpoint import weights as weights_module
from training.checkpoint.carried import read_carried
from training.checkpoint.manifest import fingerprint, verify_checkpoint
from training.checkpoint.pieces import read_header
from training.checkpoint.saver import Saver
from training.checkpoint.weights import Companions, find_weights, load_model_weights
from training.evaluation import __main__ as evaluation
from training.export.__main__ import main as export_main
from training.families.config_json import in_family, to_config_json
from training.generate import __main__ as generate
from training.host.errors import UserError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_a_safetensors_file(tmp_path, dtype):
    model = {
        **weights_of(Model(1, dtype)),
        "lm_head.weight": torch.randn(6, 11).to(dtype).t(),
    }  # not contiguous
    file = save(tmp_path, 1, weights=model, optimizer_state=None) / "model.safetensors"
    expected = {
        "model.embed_tokens.weight": model["embed_tokens.weight"],
        "model.norm.weight": model["norm.weight"],
    }
    expected["lm_head.weight"] = model["lm_head.weight"]
    assert_same_state(load_file(file), expected)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"} and set(opened.keys()) == set(expected)
        assert all(opened.get_tensor(name).dtype == dtype for name in expected)
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_files_are_hugging_faces(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    for tied in (True, False):
        theirs = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=tied))
        ours = {name.removeprefix("model."): p.detach() for name, p in theirs.named_parameters()}
        assert ("lm_head.weight" in ours) == (not tied)
        path = save(
            tmp_path, 1, weights=ours, model_config=theirs.config.to_dict(), optimizer_state=None
        )
        reloaded = Qwen3ForCausalLM.from_pretrained(path)
        assert_same_state(reloaded.state_dict(), theirs.state_dict())
        for shard_size in ("1GB", "4KB"):
            theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
            found = dict(load_model_weights(tmp_path / "theirs", parameters_of(ours)))
            assert_same_state(found, ours)
            assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (
                shard_size == "4KB"
            )
            shutil.rmtree(tmp_path / "theirs")


def test_weights_of_another_size(tmp_path):
    path = save(tmp_path, 1)
    shapes = parameters_of({"embed_tokens.weight": (11, 6), "norm.weight": (6,)})
    assert dict(load_model_weights(path, shapes)).keys() == shapes.keys()
    assert dict(load_model_weights(path / "model.safetensors", shapes)).keys() == shapes.keys()
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight has shape \[6\], this model needs \[8\]; choose"
    ):
        load_model_weights(path, {**shapes, "norm.weight": Parameter((8,))})
    with pytest.raises(
        ValueError, match=r"it has no model\.layers\.0\.mlp\.up_proj\.weight, this model needs it"
    ):
        load_model_weights(path, {**shapes, "layers.0.mlp.up_proj.weight": Parameter((1, 2))})
    with pytest.raises(ValueError, match=r"it has model\.norm\.weight, this model does not"):
        load_model_weights(path, parameters_of({"embed_tokens.weight": (11, 6)}))


@pytest.mark.parametrize(
    "name", ["foo.bar", "language_model.model.layers.9.norm.weight", "model.norm.bias"]
)
def test_a_tensor_that_no_model_has_is_named_as_in_its_file(name, tmp_path):
    save_file(
        {"model.norm.weight": torch.ones(4), name: torch.ones(4)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError, match=f"it has {re.escape(name)}, this model does not"):
        find_weights(tmp_path, parameters_of({"norm.weight": (4,)}))


def test_copy_of_a_tied_head_is_dropped_and_another_head_refused(tmp_path):
    file = tmp_path / "weights.safetensors"
    embedding = torch.randn(3, 2)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}, file)
    assert_same_state(
        dict(load_model_weights(file, parameters_of({"embed_tokens.weight": (3, 2)}))),
        {"embed_tokens.weight": embedding},
    )
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}, file)
    with pytest.raises(
        ValueError, match="weight of its own, this model ties it to the embedding; set tie_word"
    ):
        load_model_weights(file, parameters_of({"embed_tokens.weight": (3, 2)}))
    untied = dict(
        load_model_weights(
            file, parameters_of({"embed_tokens.weight": (3, 2), "lm_head.weight": (3, 2)})
        )
    )
    assert torch.equal(untied["lm_head.weight"], embedding + 1)


def test_weights_that_cannot_be_read(tmp_path):
    shapes = parameters_of(weights_of(Model()))
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_model_weights(tmp_path / "nowhere", shapes)
    with pytest.raises(
        ValueError, match=r"has no model\.safetensors; give a checkpoint's step_ folder"
    ):
        load_model_weights(tmp_path, shapes)
    path = save(tmp_path, 1)
    with (
        unreadable(path / "model.safetensors"),
        pytest.raises(UserError, match="cannot be read: Input/output error"),
    ):
        load_model_weights(path, shapes)
    content = (path / "model.safetensors").read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        (path / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(
            ValueError, match=r"model\.safetensors is missing, truncated or no safetensors file"
        ):
            load_model_weights(path, shapes)
    (path / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002\.safetensors is missing, truncated"
    ):
        load_model_weights(path, shapes)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", "a\0b"]
)
def test_an_index_names_files_of_its_folder(shard, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": shard}})
    )
    with pytest.raises(ValueError, match="which is no file of its folder"):
        load_model_weights(tmp_path, parameters_of({"norm.weight": (8,)}))


def test_a_fingerprint_is_of_the_models_own_files(tmp_path):
    folder = save(tmp_path, 1)
    before = fingerprint(folder)
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "broken.safetensors").write_bytes(b"no header")
    save_file({"model.norm.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    assert fingerprint(folder) == before
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {
        "weight_map": {
            name: "model-1.safetensors"
            for name in ("model.embed_tokens.weight", "model.norm.weight")
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(folder) == before
    at = len(read_header(folder / "model-1.safetensors"))
    (folder / "model-1.safetensors").write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    assert fingerprint(folder) != before
    (folder / "model-1.safetensors").unlink()
    os.mkfifo(folder / "model-1.safetensors")  # a reader would wait for a writer
    with pytest.raises(
        UserError, match="is missing, truncated or no safetensors file; copy or download it anew"
    ):
        fingerprint(folder)


def test_weights_that_no_decoder_here_reads(tmp_path):
    """Quantized ones, one that two files have, and a header that would fill memory; older files'
    tables are dropped."""
    file = tmp_path / "model.safetensors"
    embedding = parameters_of({"embed_tokens.weight": (3, 2)})
    weights = {
        "model.embed_tokens.weight": torch.zeros(3, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(weights, file)
    assert [name for name, _ in load_model_weights(tmp_path, embedding)] == ["embed_tokens.weight"]
    save_file({"model.embed_tokens.weight": torch.zeros(3, 2, dtype=torch.int8)}, file)
    with pytest.raises(
        ValueError, match=r"embed_tokens\.weight is of dtype I8, weights must be of F32, BF16, F16"
    ):
        load_model_weights(tmp_path, embedding)
    save_file(
        {"model.embed_tokens.weight": torch.zeros(3, 2), "embed_tokens.weight": torch.ones(3, 2)},
        file,
    )
    with pytest.raises(ValueError, match="twice"):
        load_model_weights(tmp_path, embedding)
    with file.open("wb") as opened:  # 200 MB, of which the disk stores nothing
        opened.write((2 * 10**8).to_bytes(8, "little"))
        opened.truncate(3 * 10**8)
    with pytest.raises(
        ValueError, match=r"model\.safetensors is missing, truncated or no safetensors file; copy"
    ):
        load_model_weights(tmp_path, embedding)
    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        read_header(file)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_damaged_weights_are_refused_by_every_command(name, tmp_path, monkeypatch, capsys):
    """train.py refuses them ahead of the data, evaluation ahead of what an evaluator reads;
    --resume is in storm.py."""
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"line {i}\n" for i in range(600)))
    good, bad = (
        save_checkpoint(
            tmp_path / folder, 1, weights=Transformer(MODEL_SIZES["tiny"]).state_dict(),
            model_config=to_config_json(MODEL_SIZES["tiny"]), optimizer_state=None,
            trainer_state={},
        )
        for folder in ("good", "bad")
    )  # fmt: skip
    digit = (bad / "config.json").read_bytes().index(b'"rope_theta": 1') + len(
        '"rope_theta": '
    )  # 1 becomes 5
    damage(bad / name, digit if name == "config.json" else -2)
    monkeypatch.setattr(
        "training.data.decide.load_corpus", lambda *_, **__: pytest.fail("the data were read")
    )
    monkeypatch.setattr(
        evaluation.positions, "read_all", lambda *_: pytest.fail("the texts were read")
    )
    data, cpu = ("--data", str(text)), ("--device", "cpu")
    out = tmp_path / "out"
    commands = [
        (
            train.main,
            [
                "--init_from",
                str(bad),
                *data,
                *cpu,
                "--output_dir",
                str(out),
                "--context_length",
                "64",
            ],
        ),
        (export_main, [str(bad), str(out / "exported")]),
        (generate.main, [str(bad), *cpu, "abc"]),
        (evaluation.main, [str(bad), *data, *cpu, "--samples", "0"]),
        (evaluation.main, [str(bad), *data, *cpu, "--samples", "0", "--evaluator", str(good)]),
        (evaluation.main, [str(good), *data, *cpu, "--samples", "0", "--evaluator", str(bad)]),
    ]
    for main, argv in commands:
        assert main(argv) == 1
        [error] = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert f"{bad}" in error and (
            f"{name} is corrupted" in error or f"{name} is missing or damaged" in error
        ), argv
    assert not (out / "exported").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_by_name_by_every_command(
    value, dtype, tmp_path, monkeypatch, capsys
):
    """No manifest lies beside them. train.py refuses them ahead of the data."""
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"line {i}\n" for i in range(600)))
    weights = {
        f"model.{name}": tensor.to(dtype)
        for name, tensor in Transformer(MODEL_SIZES["tiny"]).state_dict().items()
    }
    weights["model.layers.1.mlp.up_proj.weight"][5, 7] = value
    folder, out = tmp_path / "weights", tmp_path / "out"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_config_json(MODEL_SIZES["tiny"])))
    monkeypatch.setattr(
        "training.data.decide.load_corpus", lambda *_, **__: pytest.fail("the data were read")
    )
    data, cpu, context = ("--data", str(text)), ("--device", "cpu"), ("--context_length", "64")
    for main, argv in [
        (train.main, ["--init_from", str(folder), *data, *cpu, *context, "--output_dir", str(out)]),
        (export_main, [str(folder), str(out / "exported"), "--dtype", "float32"]),
        (generate.main, [str(folder), *cpu, "abc"]),
        (evaluation.main, [str(folder), *data, *cpu, *context, "--samples", "0"]),
    ]:
        assert main(argv) == 1
        [error] = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert (
            f"model.layers.1.mlp.up_proj.weight in {folder}/model.safetensors is not finite"
            in error
        ), argv


def test_only_the_header_is_read_before_the_check(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    shapes = parameters_of(weights_of(Model()))
    reads = []
    real = weights_module._read_weight
    monkeypatch.setattr(
        weights_module, "_read_weight", lambda entry: reads.append(entry.shape) or real(entry)
    )
    weights = load_model_weights(path, shapes)
    assert reads == []
    list(itertools.islice(weights, 1))
    assert reads == [(11, 6)]


def test_files_have_a_single_expert_apart(tmp_path):
    """The expert's matrix has a dimension less than the parameter that it is all of."""
    name = "layers.0.mlp.experts.down_proj"
    declared = {name: Parameter((1, 4, 6), block=0, matrices=("down_proj",))}
    weights = {name: torch.randn(1, 4, 6)}
    saver = Saver(tmp_path, 1)
    saver.begin(
        1, weights=weights, declared=declared, model_config={}, optimizer_state={},
        trainer_state={},
    )  # fmt: skip
    saver.finish()
    written = load_file(saver.last / "model.safetensors")
    assert {key: tensor.shape for key, tensor in written.items()} == {
        "model.layers.0.mlp.experts.0.down_proj.weight": (4, 6)
    }
    verify_checkpoint(saver.last)
    assert_same_state(dict(load_model_weights(saver.last, declared)), weights)


def test_files_have_experts_apart_or_together(tmp_path):
    """A checkpoint has the form of the folder that it comes from; each expert's matrices are read
    into their places."""
    E, D, F = 3, 4, 6
    [parts] = MODEL_SIZES["tiny"].layers
    layers = (replace(parts, mlp=ExpertsPart(E, 1, F)),)
    tiny = replace(MODEL_SIZES["tiny"], hidden_size=D, num_hidden_layers=1, layers=layers)
    config = in_family(tiny, "qwen3_moe")
    names = {
        "norm.weight",
        *(f"layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")),
    }
    declared = {name: p for name, p in config.parameters().items() if name in names}
    together = {name: torch.randn(p.shape).bfloat16() for name, p in declared.items()}
    gate_up, down = ([*together.values()][i] for i in (0, 1))
    apart = {"model.norm.weight": together["norm.weight"]}
    for e in range(E):
        each = {"gate_proj": gate_up[e, :F], "up_proj": gate_up[e, F:], "down_proj": down[e]}
        apart |= {
            f"model.layers.0.mlp.experts.{e}.{name}.weight": x.contiguous()
            for name, x in each.items()
        }
    forms = {
        "apart": apart,
        "together": {f"model.{name}": weight for name, weight in together.items()},
    }
    for form, tensors in forms.items():
        folder = tmp_path / form
        folder.mkdir()
        for i in range(2):  # a matrix's neighbours are in another file
            save_file(
                {name: tensors[name] for name in sorted(tensors)[i::2]}, folder / f"{i}.safetensors"
            )
        places = {name: f"{i}.safetensors" for i in range(2) for name in sorted(tensors)[i::2]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        (folder / "config.json").write_text(json.dumps(to_config_json(config)))
        assert_same_state(dict(load_model_weights(folder, declared)), together)
        companions = Companions(carried=read_carried(folder))
        for dtype in (torch.float32, torch.bfloat16):
            state = {name: weight.to(dtype) for name, weight in together.items()}
            saver = Saver(folder / str(dtype), 1, companions=companions)
            saver.begin(
                1, weights=state, declared=declared, model_config={}, optimizer_state={},
                trainer_state={},
            )  # fmt: skip
            saver.finish()
            written = {name: weight.to(dtype) for name, weight in tensors.items()}
            assert_same_state(load_file(saver.last / "model.safetensors"), written)
            verify_checkpoint(saver.last)
            assert_same_state(dict(load_model_weights(saver.last, declared)), state)
    name = "layers.0.mlp.experts.gate_up_proj"
    wider = {**declared, name: replace(declared[name], shape=(E + 1, 2 * F, D))}
    with pytest.raises(
        UserError,
        match=r"it has no model\.layers\.0\.mlp\.experts\.3\.gate_proj\.weight, this model",
    ):
        load_model_weights(tmp_path / "apart", wider)
    with pytest.raises(
        UserError,
        match=r"experts\.gate_up_proj has shape \[3, 12, 4\], this model needs \[4, 12, 4\]",
    ):
        load_model_weights(tmp_path / "together", wider)
    apart["model.layers.0.mlp.experts.1.up_proj.weight"] = torch.zeros(F, D)
    save_file(apart, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"5 others of model\.layers\.0\.mlp\.experts\.gate_up_proj are of"
    ):
        load_model_weights(tmp_path, declared)
