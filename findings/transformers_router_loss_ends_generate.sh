#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.13.0): a mixture of experts whose config says output_router_logits, as configs of training
# do, cannot generate for a batch with padding. The loss that balances experts is computed in generate too, for a mask
# that has one column more than the new token's logits: RuntimeError. Without a mask of padding, or with
# output_router_logits=False, it generates. Seen: "RuntimeError: The size of tensor a (2) must match the size of tensor b (14) ...".
# Fails if it generates.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 transformers==5.24.0
cat >probe.py <<'PY'
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
config = Qwen3MoeConfig(vocab_size=32, num_key_value_heads=1, head_dim=8, pad_token_id=0, **sizes, **experts)
model = Qwen3MoeForCausalLM(config).eval()
ids = torch.randint(1, 32, (2, 6))
mask = torch.ones_like(ids)
mask[0, :2] = 0
options = {"max_new_tokens": 3, "do_sample": False}
try:
    model.generate(ids, attention_mask=mask, **options)
except RuntimeError as error:
    print("RuntimeError:", str(error)[:90])
else:
    raise SystemExit("it generates now")
model.config.output_router_logits = False
print("without router logits:", tuple(model.generate(ids, attention_mask=mask, **options).shape))
PY
env/bin/python probe.py
