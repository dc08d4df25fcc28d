"""llama.cpp's own converter takes what is exported, and finds every weight."""

import pytest
import torch
from safetensors.torch import load_file

from tests.test_released_models import release
from tests.training.data.test_tokenizer import write_tokenizer
from training.checkpoint.weights import shape_of_weights
from training.export.__main__ import main as export

conversion, gguf = pytest.importorskip("conversion"), pytest.importorskip("gguf")
# it knows tokenizers of released models alone; their files go along as they are
NO_TOKENIZER = "_set_vocab_none"


def elements(tensors):
    return (
        torch.cat([torch.as_tensor(tensor, dtype=torch.float32).flatten() for tensor in tensors])
        .sort()
        .values
    )


@pytest.mark.parametrize("form", [
    "Qwen3", "Qwen3, YaRN", "Qwen3 MoE", "Qwen2.5", "Llama 3", "Mistral", "SmolLM3", "Granite",
    "OLMo 3", "Qwen 3.5",
    "Qwen 3.5 MoE", "Gemma 3",
])  # fmt: skip
def test_the_converter_finds_every_weight(form, tmp_path, monkeypatch):
    """It permutes rows of q and k, joins experts, adds RoPE's frequencies, and changes delta nets
    and Gemma's norms."""
    release(form, tmp_path / "released")
    write_tokenizer(
        tmp_path / "released/tokenizer.json"
    )  # Gemma 3's embedding is cut to the tokens of this
    folder, file = tmp_path / "exported", tmp_path / "model.gguf"
    assert export([str(tmp_path / "released"), str(folder), "--dtype", "float32"]) == 0
    settings = conversion.ModelBase.load_hparams(folder, False)
    architecture = conversion.get_model_architecture(settings, conversion.ModelType.TEXT)
    converter = conversion.get_model_class(architecture)
    monkeypatch.setattr(converter, "set_vocab", getattr(converter, NO_TOKENIZER))
    monkeypatch.setattr(
        converter, "no_mtp", True
    )  # the option --no-mtp: these models predict one token
    with torch.inference_mode():
        converter(folder, gguf.LlamaFileType.ALL_F32, file).write()
    read = gguf.GGUFReader(file)
    found = elements(
        tensor.data.copy() for tensor in read.tensors if tensor.name != "rope_freqs.weight"
    )
    expected = elements(load_file(folder / "model.safetensors").values())
    assert found.shape == expected.shape and (
        form.startswith(("Qwen 3.5", "Gemma")) or torch.equal(found, expected)
    )
    name = read.fields["general.architecture"].contents()
    assert (
        read.fields[f"{name}.context_length"].contents()
        == shape_of_weights(folder).max_position_embeddings
    )
