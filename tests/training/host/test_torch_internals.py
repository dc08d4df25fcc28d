"""Each private part of PyTorch that training/ uses does what training/ takes it to do."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from training.host import torch_internals


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_dispatch_mode():
    class Doubling(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {})) * 2

    seen, x = [], torch.ones(2)
    with Doubling():
        y = x + 1
    assert seen == [torch.ops.aten.add.Tensor] and y.tolist() == [4, 4]


def test_fused_adamw():
    """Bitwise what torch.optim.AdamW(fused=True) does."""
    weight = torch.nn.Parameter(torch.randn(100))
    ours, first, second = weight.detach().clone(), torch.zeros(100), torch.zeros(100)
    optimizer = torch.optim.AdamW(
        [weight], lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3, fused=True
    )
    for step in (1.0, 2.0):
        weight.grad = torch.randn(100)
        optimizer.step()
        torch_internals.fused_adamw_(
            [ours], [weight.grad.clone()], [first], [second], [], [torch.tensor(step)],
            lr=0.1, beta1=0.8, beta2=0.9, weight_decay=0.3, eps=1e-5, amsgrad=False, maximize=False,
        )  # fmt: skip
        assert torch.equal(ours, weight)


def test_dtensor_like(process_group):
    """It wraps the tensor itself, on another device than the mesh's too: of meta tensors here."""
    sharded = distribute_tensor(
        torch.ones(4, 3, dtype=torch.bfloat16), init_device_mesh("cpu", (1,)), [Shard(0)]
    )
    for device in ("cpu", "meta"):
        local = torch.zeros(4, 3, device=device)
        made = torch_internals.dtensor_like(sharded, local)
        assert isinstance(made, DTensor) and made.dtype == torch.float32
        assert made.shape == (4, 3) and made.placements == sharded.placements
        narrow = torch_internals.dtensor_like(sharded, local[:, :1], (4, 1))
        assert narrow.shape == (4, 1) and narrow.dtype == torch.float32
        assert (
            made.to_local().device == local.device
            and made.to_local().data_ptr() == local.data_ptr()
        )


def test_flatten_mesh(process_group):
    """tests/training/parallel/test_world.py has it on four ranks."""
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    flat = torch_internals.flatten_mesh(mesh["a", "b"], "ab")
    assert flat.mesh_dim_names == ("ab",) and flat.mesh.tolist() == [0]
    cut = torch_internals.unflatten_mesh(flat, (1, 1), ("d", "e"))
    assert cut.mesh_dim_names == ("d", "e") and cut.mesh.tolist() == [[0]]


def test_set_timeout(process_group):
    torch_internals.set_timeout(dist.group.WORLD, 7.0)
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7


def test_compute_local_shape_and_global_offset(process_group):
    """tests/training/checkpoint/test_files.py has it on four ranks, where FSDP2 shards what tensor
    parallelism did."""
    place = torch_internals.compute_local_shape_and_global_offset(
        (5, 6), init_device_mesh("cpu", (1,)), [Shard(0)]
    )
    assert place == ((5, 6), (0, 0))
