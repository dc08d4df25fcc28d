"""The parts of PyTorch that training/ uses although they are not public.

The number in parentheses is the first version of torch with the form used here.
tests/training/host/test_torch_internals.py checks each part, so a new version of torch fails in
that test first.
"""

import dataclasses
import datetime

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as tensor_utils
from torch.utils import _python_dispatch

# A context in which __torch_dispatch__ sees each operation before it runs (1.13).
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# One kernel for an AdamW update of a list of tensors (2.0; on CPUs 2.4).
# torch.optim.AdamW(fused=True) calls it, but decides itself where state lives.
fused_adamw_ = torch._fused_adamw_

# Shape and offset of this rank's part of a DTensor, from the DTensor's shape,
# mesh and placements (2.0).
compute_local_shape_and_global_offset = tensor_utils.compute_local_shape_and_global_offset


def dtensor_like(sharded: DTensor, local: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """Returns a DTensor sharded like `sharded`, with `local` as this rank's part on any device
    (2.5).

    `shape` is the whole's, where it differs from the shape of `sharded`.
    DTensor.from_local would copy `local` to the mesh's device. FSDP's CPU offload makes its
    DTensors in this way.
    """
    meta = torch.empty(shape or sharded.shape, dtype=local.dtype, device="meta")
    spec = torch.empty_like(sharded, dtype=local.dtype, device="meta")._spec
    meta = spec.tensor_meta._replace(shape=meta.shape, stride=meta.stride())
    return DTensor(local, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def set_timeout(group: ProcessGroup, seconds: float) -> None:
    """Makes the group's collectives fail, from now on, if a rank waits so long (2.0)."""
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns `mesh`, some named axes of a larger mesh, flattened into one axis of that mesh under
    a new name (2.5)."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh of one axis, cut into several: of sizes (2, 4), ranks 0 to 3 become the first
    row of two (2.9)."""
    return mesh._unflatten(0, sizes, names)
