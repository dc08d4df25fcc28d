#!/usr/bin/env bash
# trl 1.16.0 (transformers 5.24.0, torch 2.13.0): the likelihood in ORPOTrainer's loss is that of the prompt and the
# chosen answer, over all tokens of a batch, where the paper (arXiv 2403.07691) has the answer's given its prompt.
# So the loss moves with a prompt that no answer depends on: below, the same model and the same two answers cost more
# or less behind another prompt, while the odds ratio's part is what the paper says.
# Seen: "answers alone 5.5058, in the loss 4.7542" for a prompt of 12 tokens. Fails if both agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 trl==1.16.0 transformers==5.24.0
cat >probe.py <<'PY'
from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.experimental.orpo import ORPOTrainer

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
config = Qwen3Config(vocab_size=32, num_key_value_heads=1, head_dim=8, initializer_range=0.5, **sizes)
model = Qwen3ForCausalLM(config).eval()
prompt, answers = torch.randint(1, 32, (12,)), torch.randint(1, 32, (2, 3))
batch = {}
for name, answer in zip(("chosen", "rejected"), answers):
    ids = torch.cat([prompt, answer])[None]
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    batch |= {f"{name}_input_ids": ids, f"{name}_attention_mask": torch.ones_like(ids), f"{name}_labels": labels}
accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)
trainer = ORPOTrainer.__new__(ORPOTrainer)
trainer.accelerator, trainer.aux_loss_enabled, trainer.beta = accelerator, False, 0.1
trainer.is_encoder_decoder, trainer.padding_value, trainer.pad_token_id = False, 0, 0
with torch.no_grad():
    _, metrics = trainer.get_batch_loss_metrics(model, batch)
    logits = model(batch["chosen_input_ids"]).logits[0, len(prompt) - 1 : -1]
    alone = torch.nn.functional.cross_entropy(logits, answers[0]).item()
print(f"answers alone {alone:.4f}, in the loss {metrics['nll_loss']:.4f}")
assert abs(alone - metrics["nll_loss"]) > 0.05, "ORPO's likelihood is the answer's now"
assert abs(alone + metrics["logps/chosen"]) < 1e-4, "the odds ratio reads other tokens now"
PY
env/bin/python probe.py
