"""Private parts of PyTorch that model.py and kernels/ use, with the first version of torch that has
them as used here.

tests/kernels/test_torch_internals.py checks each of them, so that a new version of torch fails in
that test first.
"""

from collections.abc import Callable

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

# Attention kernels behind F.scaled_dot_product_attention, which hides their log-sum-exp (flash 2.0,
# for CPUs 2.2, cuDNN 2.5).
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
# The flash kernel for documents in a row:
# takes [tokens, heads, K] and the start of each document (2.11).
varlen_flash_attention = torch.ops.aten._flash_attention_forward
varlen_flash_attention_backward = torch.ops.aten._flash_attention_backward
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Products of FP8 factors with a scale per row of both (2.5).
scaled_mm = torch._scaled_mm

# assert_async(condition, message) raises if the condition is False. On CUDA the device asserts, and
# the host never waits (2.1).
assert_async = torch._assert_async

# Process group by name, for custom operations, which take strings but no groups (2.2).
resolve_process_group = _resolve_process_group

# True while a backward runs that keeps its graph, as under retain_graph=True (2.5).
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns how often a tensor was written in place; None of an inference tensor, which does not
    count (1.9)."""
    return None if tensor.is_inference() else tensor._version


def untraced_in_8_bits(function: Callable) -> Callable:
    """Has torch.compile call an autograd function of 8-bit products as it is, until 2.13: its
    gradients were zeros."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return function if version >= (2, 13) else torch.compiler.disable(function)


def assume_constant(function: Callable) -> Callable:
    """Marks a function as torch.compiler.assume_constant_result does, without its import of
    torch._dynamo (2.1)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
