"""Files beside exported weights."""

import io
import itertools
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

import train
from tests.runs import arguments, only_resume, weights_of_another_shape
from tests.training.data.test_tokenizer import write_tokenizer
from tests.wrappers import release
from training.checkpoint.carried import read_carried
from training.checkpoint.weights import read_companions, shape_of_weights
from training.export.__main__ import main as export
from training.families.config_json import to_config_json
from training.families.rope import extend
from training.host.files import JSON_BYTES, read_json


@pytest.mark.parametrize(("declared", "expected"), [
    (512, 16384), (20000, 20000), (1e30, 1e30), (None, None), ("many", "many"), ("damaged", None),
])  # fmt: skip
def test_tokenizer_declares_the_length_that_weights_reach(declared, expected, tmp_path):
    """Weights of 4,096 tokens are extended to 16,384. vLLM takes the smaller of both declared
    lengths."""
    folder = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1)
    write_tokenizer(folder / "tokenizer.json")
    given = (
        "{"
        if declared == "damaged"
        else json.dumps({"eos_token": "\u00e9", "model_max_length": declared})
    )
    (folder / "tokenizer_config.json").write_text(given)
    assert export([str(folder), str(tmp_path / "out"), "--rope_scaling", "yarn:4"]) == 0
    written = (tmp_path / "out/tokenizer_config.json").read_text()
    assert (
        json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 16384
    )
    if declared == expected or declared == "damaged":
        assert written == given
    else:
        assert json.loads(written) == {"eos_token": "\u00e9", "model_max_length": expected}


def test_what_ends_a_text_goes_along_without_a_tokenizer_and_beside_adapters_with_one(tmp_path):
    """Adapters as peft saves them have no config.json, and TRL puts a tokenizer beside them."""
    folder, adapters = (
        weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1),
        tmp_path / "adapters",
    )
    defaults = b'{"eos_token_id": [7, 5], "top_p": 0.9}'
    (folder / "generation_config.json").write_bytes(defaults)
    ids = {"eos_token_id": 7, "bos_token_id": 3, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **ids}))
    (folder / "manifest.json").unlink()  # it has checksums of config.json
    adapters.mkdir()
    write_tokenizer(adapters / "tokenizer.json")
    content = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (adapters / "adapter_config.json").write_text(
        json.dumps({**content, "base_model_name_or_path": str(folder)})
    )
    a, b = torch.zeros(1, 128), torch.zeros(64, 1)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format("A"): a, name.format("B"): b}, adapters / "adapter_model.safetensors")
    for source, more in ((folder, []), (adapters, ["--merge"])):
        out = tmp_path / f"{source.name} out"
        assert export([str(source), str(out), *more]) == 0
        assert read_json(out / "config.json").items() >= ids.items()
        assert (out / "generation_config.json").read_bytes() == defaults
        assert (out / "tokenizer.json").is_file() == (source == adapters)
    (adapters / "tokenizer.json").rename(folder / "tokenizer.json")
    (adapters / "generation_config.json").write_text('{"top_k": 5}')
    assert export([str(adapters), str(tmp_path / "third"), "--merge"]) == 0
    merged = read_json(tmp_path / "third/generation_config.json")
    assert merged == {"top_k": 5, "eos_token_id": [7, 5]}  # alone it would never stop


def where_transformers_stops(folder):
    """Returns the ids at which models of a folder stop, as `from_pretrained` of a model finds
    them."""
    try:
        found = GenerationConfig.from_pretrained(folder)
    except OSError:
        found = GenerationConfig.from_pretrained(folder, "config.json", _from_model_config=True)
    stops = found.eos_token_id
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


def save_as_a_run(source, target):
    """Writes the small files of a checkpoint of a run that starts from a folder and learns to stop
    at 8."""
    companions, carried = (
        read_companions(source / "tokenizer.json", [source]).stopping_at({8}),
        read_carried(source),
    )
    target.mkdir()
    for name, content in companions.files.items():
        (target / name).write_bytes(content)
    model_config = to_config_json(shape_of_weights(source))
    content = carried.config_json(model_config, companions.settings, torch.float32)
    (target / "config.json").write_text(json.dumps(content))


STOPS = None, 7, [7, 5]  # in config.json
OF_TEXT = {"qwen3": [None], "gemma3": [None, 9]}
SAMPLING = [
    None,
    {"top_p": 0.9},
    {"eos_token_id": None},
    {"eos_token_id": 5},
    {"eos_token_id": [6, 7]},
]


@pytest.mark.parametrize("model_type", OF_TEXT)
def test_what_is_saved_stops_where_transformers_reads_it(model_type, tmp_path):
    """transformers reads no id of config.json where a generation_config.json is, and then a text
    model's last."""
    if model_type == "qwen3":
        folder = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1)
        (folder / "manifest.json").unlink()  # it has checksums of config.json
    else:
        folder = release(model_type, tmp_path / "weights")
    before = read_json(folder / "config.json")
    cases = itertools.product(STOPS, OF_TEXT[model_type], SAMPLING)
    for i, (outer, inner, sampling) in enumerate(cases):
        content = before | {"eos_token_id": outer, "temperature": 0.5}
        if "text_config" in before:
            content["text_config"] = before["text_config"] | {"eos_token_id": inner}
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if sampling is not None:
            (folder / "generation_config.json").write_text(json.dumps(sampling))
        declared = [(sampling or {}).get("eos_token_id"), outer, inner]
        expected = next((ids for ids in declared if ids is not None), [])
        expected = expected if isinstance(expected, list) else [expected]
        out, run = tmp_path / f"out{i}", tmp_path / f"run{i}"
        assert export([str(folder), str(out)]) == 0
        assert where_transformers_stops(out) == expected, (outer, inner, sampling)
        save_as_a_run(folder, run)
        assert where_transformers_stops(run) == [*expected, 8], (outer, inner, sampling)
        if sampling is None:  # the new file says all that config.json said of generation
            assert read_json(run / "generation_config.json")["temperature"] == 0.5


def test_a_full_disk_is_named_with_the_file_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    """Writes to /dev/full fail as on a full disk, of the weights or of a small file."""
    folder, open_file = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1), io.open
    for name in ("model.safetensors", "config.json"):

        def opened(path, mode="r", *args, full=name, **kwargs):
            is_full = "w" in mode and Path(path).name == full
            return open_file("/dev/full" if is_full else path, mode, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(io, "open", opened)
            assert export([str(folder), str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: No space left on device: {tmp_path}/out/{name}; the disk at /"
        ), error
        assert [path.name for path in tmp_path.iterdir()] == ["weights"]


BESIDE = (  # what programs read beside weights
    "tekken.json", "SYSTEM_PROMPT.txt", "params.json", "tokenizer.model", "merges.txt",
    "added_tokens.json",
    "preprocessor_config.json", "LICENSE", "NOTICE.txt", "qwen.tiktoken", "tokenization_own.py",
    "tokenizer.model.v3",
)  # fmt: skip
UNREAD = {
    "id2label": {"0": "LABEL_0"}, "my_own": [1, {"a": None}], "use_cache": False,
    "attention_dropout": 0.1,
    "num_experts_per_tok": 3,  # of other families
    "dual_chunk_attention_config": {"chunk_size": 262144}, "transformers_version": "4.40.0",
}  # fmt: skip
OF_A_MACHINE = {
    "_name_or_path": "/home/me/base",
    "auto_map": {"AutoConfig": "configuration_own.Own"},
}


def source_with_others(folder):
    """Makes a folder of weights with files and settings that a run does not read."""
    folder = weights_of_another_shape(folder, num_hidden_layers=1)
    for name in BESIDE:
        (folder / name).write_text("{}" if name.endswith(".json") else name)
    (folder / "onnx").mkdir()
    for name in ("pytorch_model.bin", ".gitattributes", "original.txt"):
        (folder / name).write_text(name)
    with (folder / "huge.model").open("wb") as file:  # no tokenizer's
        file.truncate(JSON_BYTES + 1)
    content = read_json(folder / "config.json") | UNREAD | OF_A_MACHINE
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "manifest.json").unlink()  # it has checksums of config.json
    return folder


def test_what_others_read_goes_along_and_what_is_left_out_is_said(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    folder, run = source_with_others(tmp_path / "weights"), tmp_path / "run"
    left_out = "huge.model, onnx/, original.txt, pytorch_model.bin"
    text = tmp_path / "text.txt"
    text.write_text("what is trained on " * 200)
    start = arguments(
        str(text), run, "--init_from", str(folder), "--validation_sequences", "0", steps=1
    )
    assert train.main(start) == 0 and train.main(only_resume(run, "--max_steps", "2")) == 0
    assert f"checkpoints leave out of {folder}: {left_out}" in caplog.text
    assert "dual_chunk_attention_config of" in caplog.text
    of_weights = {"params.json", "LICENSE", "NOTICE.txt", "preprocessor_config.json"}
    for name, source, files in (
        ("a", folder, {*BESIDE}), ("b", run / "step_00000002", {*BESIDE}),
        ("c", folder, {*BESIDE} - {"params.json"})
    ):  # fmt: skip
        capsys.readouterr()
        extended = ["--rope_scaling", "yarn:4"] * (name == "c")
        assert export([str(source), str(tmp_path / name), *extended]) == 0
        said, content = capsys.readouterr().out, read_json(tmp_path / name / "config.json")
        settings = {
            key: value for key, value in UNREAD.items() if not extended or key[:4] != "dual"
        }
        assert content.items() >= settings.items() and not content.keys() & OF_A_MACHINE.keys()
        assert f"as they were: {', '.join(settings)}" in said or source != folder
        beside = {file.name for file in (tmp_path / name).iterdir()} & {
            *BESIDE,
            "onnx",
            "pytorch_model.bin",
        }
        assert beside == files if source == folder else beside >= of_weights
        others = f"{left_out[:-19]}, params.json, pytorch_model.bin" if extended else left_out
        assert (f"left out: {others}" in said) == (source == folder)
        assert shape_of_weights(tmp_path / name) == (
            extend(shape_of_weights(source), "yarn:4") if extended else shape_of_weights(source)
        )
    assert "dual_chunk_attention_config was made for the context before: left out" in caplog.text


def test_compressed_weights_are_refused_by_their_setting(tmp_path, capsys):
    folder = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1)
    content = read_json(folder / "config.json") | {
        "compression_config": {"quant_method": "compressed-tensors"}
    }
    (folder / "config.json").write_text(json.dumps(content))
    assert export([str(folder), str(tmp_path / "out")]) == 1
    assert "compression_config {'quant_method'" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_layers_that_are_not_there_are_not_declared(model_type, tmp_path, capsys):
    """transformers saves Qwen3.5 without mtp tensors, and its released config.json says that they
    are there."""
    folder = release(model_type, tmp_path / "weights")
    content = read_json(folder / "config.json")
    content["text_config"]["mtp_num_hidden_layers"] = 1
    content["text_config"]["_name_or_path"] = content["_name_or_path"] = "/home/me/base"
    content["own"] = {"file_path": "runs/home/me/tower"}
    content["vision_config"]["_name_or_path"] = "/home/me/tower"
    (folder / "config.json").write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    for name, layers in (("with", 1), ("without", 0)):
        kept = {
            key: tensor for key, tensor in tensors.items() if layers or not key.startswith("mtp.")
        }
        kept |= {"mtp.norm.weight": torch.ones(3)} if layers else {}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        assert export([str(folder), str(tmp_path / name)]) == 0
        written = read_json(tmp_path / name / "config.json")
        assert written["text_config"]["mtp_num_hidden_layers"] == layers
        assert "home/me" not in json.dumps(written) and written["own"] == {}
        assert ("a GGUF is made with --no-mtp" in capsys.readouterr().out) == (layers == 0)


def test_places_of_a_machine_are_left_out_of_tokenizers_files(tmp_path):
    folder = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1)
    write_tokenizer(folder / "tokenizer.json")
    local = {
        "name_or_path": "/home/alice/base", "special_tokens_map_file": "/root/.cache/a.json",
        "vocab_file": "./v",
        "tokenizer_file": "C:\\Users\\alice", "_name_or_path": "~/base",
        "merges_file": "runs/alice/merges.txt",
    }  # fmt: skip
    named_on_the_hub = {"name_or_path": "Qwen/Qwen3-4B"}
    others = {"eos_token": "</s>", "sep": "/", "tokenizer_class": "A", "vocab_path": "vocab.json"}
    others["nested"] = [named_on_the_hub]
    local["nested"] = [local | named_on_the_hub]
    (folder / "tokenizer_config.json").write_text(json.dumps(others | local))
    named = '{"name_or_path": "Qwen/Qwen3-4B",  "top_p": 0.5}'
    (folder / "generation_config.json").write_text(named)
    assert export([str(folder), str(tmp_path / "out")]) == 0
    assert read_json(tmp_path / "out/tokenizer_config.json") == others
    assert (tmp_path / "out/generation_config.json").read_text() == named
