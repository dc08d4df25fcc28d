"""Files beside exported weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.runs import weights_of_another_shape
from tests.training.data.test_tokenizer import write_tokenizer
from training.export.__main__ import main as export
from training.host.files import read_json


@pytest.mark.parametrize(("declared", "expected"), [
    (512, 16384), (20000, 20000), (1e30, 1e30), (None, None), ("many", "many"), ("damaged", None),
])  # fmt: skip
def test_tokenizer_declares_the_length_that_weights_reach(declared, expected, tmp_path):
    """Weights of 4,096 tokens are extended to 16,384. vLLM takes the smaller of both declared lengths."""
    folder = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1)
    write_tokenizer(folder / "tokenizer.json")
    given = "{" if declared == "damaged" else json.dumps({"eos_token": "\u00e9", "model_max_length": declared})
    (folder / "tokenizer_config.json").write_text(given)
    assert export([str(folder), str(tmp_path / "out"), "--rope_scaling", "yarn:4"]) == 0
    written = (tmp_path / "out/tokenizer_config.json").read_text()
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 16384
    if declared == expected or declared == "damaged":
        assert written == given
    else:
        assert json.loads(written) == {"eos_token": "\u00e9", "model_max_length": expected}


def test_what_ends_a_text_goes_along_without_a_tokenizer_and_beside_adapters_with_one(tmp_path):
    """Adapters as peft saves them have no config.json, and TRL puts a tokenizer beside them."""
    folder, adapters = weights_of_another_shape(tmp_path / "weights", num_hidden_layers=1), tmp_path / "adapters"
    defaults = b'{"eos_token_id": [7, 5], "top_p": 0.9}'
    (folder / "generation_config.json").write_bytes(defaults)
    ids = {"eos_token_id": 7, "bos_token_id": 3, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **ids}))
    (folder / "manifest.json").unlink()  # it has checksums of config.json
    adapters.mkdir()
    write_tokenizer(adapters / "tokenizer.json")
    content = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (adapters / "adapter_config.json").write_text(json.dumps({**content, "base_model_name_or_path": str(folder)}))
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
    (adapters / "generation_config.json").write_text("{}")
    assert export([str(adapters), str(tmp_path / "third"), "--merge"]) == 0
    assert (tmp_path / "third/generation_config.json").read_text() == "{}"
