#!/usr/bin/env bash
# torch 2.13.0: AdamW's weight decay is rounded to steps of 2^-24 = 6e-8 on a CPU, alike for all weights. A step multiplies
# a float32 weight by 1 - learning_rate * weight_decay, which float32 holds with 24 bits: at a learning rate of 1e-6 and a
# decay of 0.1 weights shrink 1.19 times as fast as they should, at 4e-7 1.49 times, and at 2.9e-7 not at all. All three
# implementations do so (one tensor at a time, foreach, fused). Learning rates of reinforcement learning are 1e-6 and less.
# Seen, decay over the right decay after 1,000 steps: 1e-5: 1.01; 1e-6: 1.19; 4e-7: 1.49; 2.9e-7: 0.00.
# Fails if one of them is within 5% of 1 where it was not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat >probe.py <<'PY'
import torch

STEPS, WEIGHT_DECAY = 1000, 0.1
for name, options in {"for": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
    ratios = {}
    for learning_rate in (1e-5, 1e-6, 4e-7, 2.9e-7):
        weight = torch.nn.Parameter(torch.ones(64))
        weight.grad = torch.zeros(64)
        optimizer = torch.optim.AdamW([weight], lr=learning_rate, weight_decay=WEIGHT_DECAY, **options)
        for _ in range(STEPS):
            optimizer.step()
        lost = 1 - weight[0].double().item()
        ratios[learning_rate] = lost / (1 - (1 - learning_rate * WEIGHT_DECAY) ** STEPS)
    print(name, {rate: round(ratio, 2) for rate, ratio in ratios.items()})
    assert all(abs(ratios[rate] - 1) > 0.05 for rate in (1e-6, 4e-7, 2.9e-7)), "the decay is right now"
PY
env/bin/python probe.py
