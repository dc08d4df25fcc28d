#!/usr/bin/env bash
# torch 2.13.0: RMSNorm without eps adds float32's 1.2e-07 to the mean of squares in bf16 and float16 too. Its page says
# torch.finfo(x.dtype).eps, which is 7.8e-03 in bf16: hidden states of 0.01 would come out as 0.11 and come out as 1.
# A kernel written after the page differs from PyTorch ninefold there.
# Seen: 1.0 in bf16, 0.9995 in float16, 0.9994 in float32. Fails if bf16 follows the page.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat >probe.py <<'PY'
import torch
import torch.nn.functional as F

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    x = torch.full((8,), 0.01, dtype=dtype)
    value = x[0].double().item()
    written = value / (value**2 + torch.finfo(dtype).eps) ** 0.5
    normed = F.rms_norm(x, (8,))[0].item()
    print(dtype, "computed:", round(normed, 4), "as its page says:", round(written, 4))
    if dtype == torch.bfloat16:
        assert abs(normed - written) > 0.5, "the page is followed now"
PY
env/bin/python probe.py
