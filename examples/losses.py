"""The losses: the logits of a large vocabulary exist for 64 tokens at a time, as functions and as a
module.

    pip install .
    python examples/losses.py

Runs on a CPU in the PyTorch reference; on a GPU in Triton's kernels.
"""

import torch
import torch.nn.functional as F
from fathom_kernels import LinearCrossEntropyLoss, cross_entropy, linear_cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
# [B, T, D], as the model's last layer gives them
hidden = torch.randn(2, 128, 64, device=device, requires_grad=True)
head = torch.nn.Linear(64, 4096, bias=False, device=device)  # [V, D]
labels = torch.randint(4096, (2, 128), device=device)
labels[:, :16] = -100  # not trained on

# holds [256, 4096] logits, and their gradient
plain = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
given = cross_entropy(head(hidden), labels)  # the same loss from logits
fused = linear_cross_entropy(hidden, head.weight, labels, chunk_size=64)  # [64, 4096] at a time
module = LinearCrossEntropyLoss(softcap=30.0, chunk_size=64)
module(hidden, head.weight, labels).backward()

print(
    f"plain {plain:.5f}, from logits {given:.5f}, fused {fused:.5f}, gradient "
    f"{tuple(hidden.grad.shape)}"
)
torch.testing.assert_close(fused, plain, atol=1e-3, rtol=0)
