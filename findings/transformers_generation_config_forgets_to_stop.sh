#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.13.0): where a folder has a generation_config.json, generate reads the ids at which to stop
# there alone. A folder whose config.json names eos_token_id, and whose generation_config.json holds sampling settings
# only, gives a model that never stops, without a warning. Without the second file the ids of config.json count.
# Seen, for a model all of whose 8 ids end a text: 1 new token without generation_config.json, 24 of 24 with one that
# says {"temperature": 0.6}. Fails if the second stops too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 transformers==5.24.0
cat >probe.py <<'PY'
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
config = Qwen3Config(vocab_size=8, num_key_value_heads=1, eos_token_id=[*range(8)], pad_token_id=0, **sizes)
Qwen3ForCausalLM(config).save_pretrained("model")
generation = Path("model", "generation_config.json")
generation.unlink(missing_ok=True)


def new_tokens() -> int:
    model = AutoModelForCausalLM.from_pretrained("model")
    prompt = torch.tensor([[1, 2, 3]])
    return model.generate(prompt, max_new_tokens=24, do_sample=False).shape[1] - prompt.shape[1]


alone = new_tokens()
generation.write_text(json.dumps({"temperature": 0.6}))
beside = new_tokens()
print("new tokens without generation_config.json:", alone, "and with one of sampling settings:", beside)
assert (alone, beside) == (1, 24), "the ids of config.json count now"
PY
env/bin/python probe.py
