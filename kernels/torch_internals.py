"""What model.py and kernels/ use of PyTorch that is not public, and since which version of torch it is as used here.

tests/kernels/test_torch_internals.py checks each, so that a new version of torch fails there first.
"""

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

# The attention kernels behind F.scaled_dot_product_attention, which does not return their log-sum-exp
# (flash 2.0, for CPUs 2.2, cuDNN 2.5).
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
# The same kernel for documents that follow each other, [tokens, heads, K] and where each begins (2.11).
varlen_flash_attention = torch.ops.aten._flash_attention_forward
varlen_flash_attention_backward = torch.ops.aten._flash_attention_backward
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# assert_async(condition, message) raises if the condition is False. On CUDA the device asserts and the host never waits
# (2.1).
assert_async = torch._assert_async

# The process group of a name: custom operations take strings, but no groups (2.2).
resolve_process_group = _resolve_process_group

# Whether the backward that runs at this moment keeps its graph, as under retain_graph=True (2.5).
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
