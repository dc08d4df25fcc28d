"""Files beside exported weights."""

import json

import pytest

from tests.runs import weights_of_another_shape
from tests.training.data.test_tokenizer import write_tokenizer
from training.export.__main__ import main as export


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
