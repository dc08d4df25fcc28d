"""Tests that what is not trained goes from a run's start into its checkpoints, adapters and
exports, bit for bit."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from model import MODEL_SIZES
from tests.checkpoints import damage
from tests.ranks import run_ranks
from tests.runs import arguments, losses, only_resume
from tests.wrappers import EXACT, TEXT, bits_of, is_trained, not_trained, release, whole_model
from training.checkpoint.carried import read_carried
from training.checkpoint.files import SPARE_BYTES
from training.checkpoint.manifest import verify_checkpoint
from training.checkpoint.saver import Saver
from training.checkpoint.weights import (
    Companions,
    load_model_weights,
    shape_of_weights,
)
from training.evaluation import __main__ as evaluation
from training.export.__main__ import DTYPES
from training.export.__main__ import main as export_main
from training.families.config_json import to_config_json
from training.families.names import name_in_file, name_of
from training.families.rope import extend
from training.families.rows import PREFIX, WRAPPED_PREFIX
from training.generate import __main__ as generate
from training.host.errors import UserError

IDS = torch.randint(256, (1, 90), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text(Path(train.__file__).read_text())
    return str(file)


def export(source, target, *extra):
    assert export_main([str(source), str(target), *extra]) == 0
    return load_file(target / "model.safetensors")


def text_weights(folder):
    """Returns a folder's trained weights by our names, in float32."""
    shape = shape_of_weights(folder)
    return {name: weight.float() for name, weight in load_model_weights(folder, shape.parameters())}


def logits(folder, weights):
    from model import Transformer

    model = Transformer(shape_of_weights(folder))
    model.load_state_dict(weights)
    return model(IDS, return_logits=True).logits


@pytest.mark.parametrize("wrapper", TEXT)
def test_a_run_is_resumed_and_exported_whole(wrapper, corpus, tmp_path, capsys, caplog):
    """Its checkpoints rotate: the checkpoint that it goes on from is deleted before the last one is
    written."""
    caplog.set_level(logging.INFO)
    source, run = (
        release(wrapper, tmp_path / "source", is_newer=wrapper == "gemma3"),
        tmp_path / "run",
    )
    (source / "preprocessor_config.json").write_text(
        '{"size": 16}'
    )  # goes along with any tokenizer, as "bytes" here
    others = not_trained(source)
    interval = [
        "--checkpoint_interval",
        "1",
        "--keep_checkpoints",
        "1",
        "--validation_sequences",
        "0",
    ]
    command = arguments(
        corpus, run, "--init_from", str(source), "--learning_rate", "0.01", *interval, steps=3
    )
    assert train.main(command) == 0
    assert f"checkpoints carry {len(others)} tensors that are not trained" in caplog.text
    shutil.rmtree(source)
    before = text_weights(run / "step_00000003")
    assert train.main(only_resume(run, "--max_steps", "6")) == 0
    assert [path.name for path in sorted(run.glob("step_*"))] == ["step_00000006"] and len(
        losses(run)
    ) == 6
    last = run / "step_00000006"
    assert (last / "preprocessor_config.json").read_text() == '{"size": 16}'
    verify_checkpoint(last)
    assert not_trained(last) == others
    assert not torch.equal(text_weights(last)["norm.weight"], before["norm.weight"])
    for dtype, target in (("float32", tmp_path / "exported"), ("bf16", tmp_path / "half")):
        found = export(last, target, "--dtype", dtype)
        assert "tensors that are not trained, as they were" in capsys.readouterr().out
        assert not_trained(target) == others
        kinds = {
            found[name].dtype for name in found if is_trained(name) and not name.endswith(EXACT)
        }
        assert kinds == {DTYPES[dtype]}
        assert found.keys() == load_file(last / "model.safetensors").keys()
    theirs, ours = whole_model(tmp_path / "exported"), logits(last, text_weights(last))
    torch.testing.assert_close(ours, theirs(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    # Other commands pass them over.
    for folder in (last, tmp_path / "exported"):
        assert generate.main([str(folder), "--device", "cpu", "abc", "--max_new_tokens", "3"]) == 0
    texts = [
        "--data",
        corpus,
        "--context_length",
        "64",
        "--samples",
        "0",
        "--sequences",
        "1",
        "--device",
        "cpu",
    ]
    assert evaluation.main([str(last), *texts]) == 0
    further = arguments(corpus, tmp_path / "further", "--init_from", str(last), steps=1)
    assert train.main(further) == 0 and not_trained(tmp_path / "further/step_00000001") == others


def test_room_is_made_for_what_is_carried_and_its_damage_is_found(
    corpus, tmp_path, capsys, monkeypatch
):
    source, run, sizes = release("gemma3", tmp_path / "source"), tmp_path / "run", []
    monkeypatch.setattr(train, "check_disk", lambda *args: sizes.append(args[-1]))
    assert train.main(arguments(corpus, run, "--init_from", str(source), steps=1)) == 0
    file = run / "step_00000001/model.safetensors"
    tensors = [load_file(each).items() for each in file.parent.glob("*.safetensors")]
    assert sizes == [
        SPARE_BYTES
        + sum(t.nbytes for each in tensors for name, t in each if not name.endswith(".step"))
    ]
    name = "vision_tower.post_layernorm.weight"
    content, expected = file.read_bytes(), load_file(file)[name]
    damage(file, content.index(bits_of({name: expected})[name][2]))
    with pytest.raises(UserError, match=r"model\.safetensors is corrupted"):
        verify_checkpoint(run / "step_00000001")
    assert export_main([str(run / "step_00000001"), str(tmp_path / "out")]) == 1
    assert "model.safetensors is corrupted" in capsys.readouterr().err


def test_tensors_are_mapped(tmp_path):
    """A mapping that cannot be written to is no memory of the process, and outlives its file."""
    source = release("mistral3", tmp_path)
    others = not_trained(source)
    carried = read_carried(source)
    with open("/proc/self/maps") as maps:
        kinds = {line.split()[1] for line in maps if str(source / "model.safetensors") in line}
    assert kinds == {"r--s"}
    shutil.rmtree(source)
    assert bits_of(carried.tensors) == others


def save_on_two_ranks(world, folder):
    companions = Companions(carried=read_carried(folder / "source"))
    saver = Saver(folder / "run", 1, companions=companions)
    weights = {"norm.weight": torch.ones(5), "embed_tokens.weight": torch.ones(4, 5)}
    saver.begin(1, weights=weights, model_config={}, optimizer_state=None, trainer_state={})
    saver.finish()


def test_two_ranks_write_each_tensor_once(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tensors = {
        "model.embed_tokens.weight": torch.zeros(4, 5),
        "mtp.fc.weight": torch.randn(3, 5, dtype=torch.bfloat16),
        "mtp.norm.weight": torch.randn(3),
        "model.visual.scale": torch.randn(1, dtype=torch.float16),
    }  # fmt: skip
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(to_config_json(MODEL_SIZES["tiny"])))
    run_ranks(2, save_on_two_ranks, tmp_path)
    verify_checkpoint(tmp_path / "run/step_00000001")
    found = load_file(tmp_path / "run/step_00000001/model.safetensors")
    expected = {
        name: tensor for name, tensor in tensors.items() if not name.startswith("model.embed")
    }
    ones = {"model.norm.weight": torch.ones(5), "model.embed_tokens.weight": torch.ones(4, 5)}
    assert bits_of(found) == bits_of(expected | ones)


def test_adapters_of_the_text_model(corpus, tmp_path):
    """peft finds them in the whole model, and nothing beside. What peft saves is read. Merged, they
    make the whole."""
    import peft

    for wrapper, is_newer in (("gemma3", False), ("gemma3", True), ("mistral3", False)):
        folder = tmp_path / f"{wrapper}{is_newer}"
        source, run = release(wrapper, folder / "source", is_newer=is_newer), folder / "run"
        lora = [
            "--init_from",
            str(source),
            "--lora",
            "2",
            "--learning_rate",
            "0.01",
            "--checkpoint_interval",
            "2",
        ]
        assert train.main(arguments(corpus, run, *lora, steps=2)) == 0
        assert train.main(only_resume(run, "--max_steps", "4")) == 0
        last = run / "step_00000004"
        assert not (last / "model.safetensors").exists()
        names = load_file(last / "adapter_model.safetensors")
        assert all(
            name.startswith("base_model.model.model.language_model.layers.") for name in names
        )
        model = peft.PeftModel.from_pretrained(whole_model(source), last)
        assert {name for name, _ in model.named_parameters() if ".lora_" in name} == {
            name.replace(".weight", ".default.weight") for name in names
        }
        ours, theirs = logits(last, text_weights(last)), model(input_ids=IDS).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(ours, logits(source, text_weights(source)), atol=1e-3)
        # Adapters as peft saves them, and with the prefix of a text model alone.
        model.save_pretrained(folder / "peft")
        plain = {
            name.replace("model.language_model.", "model."): tensor
            for name, tensor in names.items()
        }
        shutil.copytree(folder / "peft", folder / "plain")
        save_file(plain, folder / "plain/adapter_model.safetensors")
        for each in ("peft", "plain"):
            assert bits_of(text_weights(folder / each)) == bits_of(text_weights(last)), each
        merged = export(last, folder / "merged", "--merge", "--dtype", "float32")
        assert not_trained(folder / "merged") == not_trained(source)
        assert merged.keys() == load_file(source / "model.safetensors").keys()
        torch.testing.assert_close(
            whole_model(folder / "merged")(input_ids=IDS).logits, theirs, rtol=1e-4, atol=1e-5
        )


def test_a_longer_context_is_written_into_the_whole_models_settings(tmp_path):
    for wrapper in TEXT:
        source, target = release(wrapper, tmp_path / wrapper), tmp_path / f"{wrapper} longer"
        content = json.loads((source / "config.json").read_text())
        content["text_config"]["original_max_position_embeddings"] = 8  # only YaRN reads it
        (source / "config.json").write_text(json.dumps(content))
        export(source, target, "--rope_scaling", "yarn:8:64", "--dtype", "float32")
        content, before = (
            json.loads((each / "config.json").read_text()) for each in (target, source)
        )
        assert content["text_config"]["setting_of_others"] == 3
        assert content["text_config"]["eos_token_id"] == before["text_config"]["eos_token_id"] == 7
        assert {**content, "text_config": 0, "torch_dtype": 0} == {
            **{name: value for name, value in before.items() if name != "dtype"}, "text_config": 0,
            "torch_dtype": 0,
        }  # fmt: skip
        shape = shape_of_weights(target)
        assert shape == extend(shape_of_weights(source), "yarn:8:64") != shape_of_weights(source)
        ours = logits(target, text_weights(target))
        torch.testing.assert_close(
            ours, whole_model(target)(input_ids=IDS).logits, rtol=1e-4, atol=1e-5
        )
        assert not torch.allclose(ours, logits(source, text_weights(source)), atol=1e-5)


def test_names_go_into_files_and_back():
    names = (
        "embed_tokens.weight", "layers.0.mlp.up_proj.weight",
        "layers.1.self_attn.q_proj.lora_A.weight", "norm.weight",
    )  # fmt: skip
    for prefix in (PREFIX, WRAPPED_PREFIX, "language_model.model."):
        both = [*names, "lm_head.weight"]
        assert [name_of(name_in_file(name, prefix)) for name in both] == both
    heads = [
        name_in_file("lm_head.weight", prefix)
        for prefix in (WRAPPED_PREFIX, "language_model.model.")
    ]
    assert heads == ["lm_head.weight", "language_model.lm_head.weight"]
    for name in ("model.visual.blocks.0.norm1.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight",
                 "model.vision_tower.a", "vision_tower.a",
                 "model.multi_modal_projector.norm.weight"):  # fmt: skip
        assert name_of(name) is None


@pytest.mark.parametrize("damaged_by", ["other weights", "a shorter file", "nothing"])
@pytest.mark.parametrize("has_last", [True, False])
def test_a_source_that_is_written_over_is_noticed(damaged_by, has_last, tmp_path):
    """Its tensors are those that the run began with: the last checkpoint has them, or there is no
    checkpoint."""
    source = release("gemma3", tmp_path / "source")
    file, others = source / "model.safetensors", not_trained(source)
    start = None
    if has_last:
        shutil.copytree(source, tmp_path / "run/step_00000001")
        start = tmp_path / "run/step_00000001"
    saver = Saver(tmp_path / "run", 2, start, Companions(carried=read_carried(source)))
    content = bytearray(file.read_bytes())
    if damaged_by == "other weights":
        name = "vision_tower.post_layernorm.weight"
        at = content.index(others[name][2])
        content[at] ^= 1
    with file.open("rb+") as opened:  # in place, as cp does it
        opened.write(content)
        if damaged_by == "a shorter file":
            opened.truncate(len(content) // 2)
    weights = {"norm.weight": torch.ones(48)}
    saver.begin(2, weights=weights, model_config={}, optimizer_state=None, trainer_state={})
    saver.wait()
    if damaged_by == "nothing" or has_last:
        assert saver.error is None and saver.last == tmp_path / "run/step_00000002"
        verify_checkpoint(saver.last)
        found = load_file(saver.last / "model.safetensors")
        assert bits_of(found, lambda name: name != "norm.weight" and name in others) == others
    else:
        assert isinstance(saver.error, OSError)
        assert f"of {file} is not what it was when the run began: bring that file back" in str(
            saver.error
        )
        assert not (tmp_path / "run/step_00000002").exists()
