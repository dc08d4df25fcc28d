"""What training/ uses of PyTorch that is not public, and since which version of torch it is as used here.

tests/training/host/test_torch_internals.py checks each, so that a new version of torch fails there first.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as tensor_utils
from torch.utils import _python_dispatch

# A context in which __torch_dispatch__ sees each operation before it runs (1.13).
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# One kernel for an AdamW update of a list of tensors: what torch.optim.AdamW(fused=True) calls, which has its own idea
# of where state is (2.0; on CPUs 2.4).
fused_adamw_ = torch._fused_adamw_

# PyTorch's memory snapshot: the allocator's history since record_memory_history(), written to a file (2.1).
record_memory_history = torch.cuda.memory._record_memory_history
dump_memory_snapshot = torch.cuda.memory._dump_snapshot

# (shape, offset of the first element) of this rank's part of a DTensor, by its shape, mesh and placements (2.0).
compute_local_shape_and_global_offset = tensor_utils.compute_local_shape_and_global_offset


def dtensor_like(sharded: DTensor, local: Tensor) -> DTensor:
    """`local` as this rank's part of a DTensor that is sharded as `sharded` is, wherever `local` lives (2.5).

    DTensor.from_local would copy it to the mesh's device. FSDP's CPU offload makes its DTensors like this, too.
    """
    spec = torch.empty_like(sharded, dtype=local.dtype, device="meta")._spec
    return DTensor(local, spec, requires_grad=False)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of `mesh`, a part of a mesh of named axes, as one axis of that larger mesh (2.5)."""
    return mesh._flatten(name)
