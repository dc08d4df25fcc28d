"""Offload: tensors copied to page-locked host memory and back, beside the GPU's other work.

`PinnedArena` is the host memory, one block carved up; `HostCopies` are the copies, on streams of their own.
Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857.
"""

import math
import mmap
import resource
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from training.errors import UserError

# Every slot starts at a multiple of 512 bytes, so that copies move whole cache lines and whole sectors.
SLOT_ALIGNMENT = 512


class PinnedArena:
    """One block of host memory, given out in slots that are never freed; page-locked where `device` is a GPU.

    The arena registers pages of its own: PyTorch's pinned allocator would round sizes up to powers of two.

    Args:
        num_bytes: size of the block.
        device: the device that tensors are copied to and from; for a CPU the memory is not page-locked.

    Raises:
        UserError: the host does not let this much be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes, self.used_bytes, self.device = num_bytes, 0, device
        try:
            pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as refusal:
            raise _refused(num_bytes, str(refusal)) from None
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        # A forked child would share the pages until one side writes; the writer then gets others, which are not pinned.
        pages.madvise(mmap.MADV_DONTFORK)
        if device.type == "cuda" and num_bytes:
            with suppress(OSError):  # a kernel without huge pages: small ones take longer to pin
                pages.madvise(mmap.MADV_HUGEPAGE)
            address = self._bytes.data_ptr()
            error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            if error:
                raise _refused(num_bytes, f"CUDA error {error}")
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of the arena, on the CPU.

        Raises:
            ValueError: it does not fit into what is left.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        start = -(-self.used_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if start + num_bytes > self.num_bytes:
            left = self.num_bytes - self.used_bytes
            raise ValueError(f"the pinned arena of {self.num_bytes} bytes has {left} left, {num_bytes} are asked for")
        self.used_bytes = start + num_bytes
        return self._bytes[start : self.used_bytes].view(dtype).view(shape)


def _refused(num_bytes: int, why: str) -> UserError:
    from training.memory.machine import available_host_bytes  # which imports this module

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "is unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.3f} GB"
    left = available_host_bytes() / 2**30
    return UserError(
        f"cannot pin {num_bytes / 2**30:.1f} GB of host memory ({why}): {left:.1f} GB are left to this process, and "
        f"ulimit -l {locked}; lower --host_budget, or raise ulimit -l where that is less"
    )


class HostCopies:
    """Copies tensors to slots of the arena and back, on one stream for each direction; on a CPU, copies are plain.

    The GPU memory of every tensor here is allocated and freed on the compute stream. That stream waits for a copy
    before the memory can be used again. With record_stream in place of waits, peak memory would depend on how far the
    host runs ahead of the GPU.
    """

    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self.slots: dict[tuple[int, str, int], list[Tensor]] = {}
        self.leaving: list[Sequence[Tensor]] = []
        self.device_module = torch.get_device_module(arena.device)  # torch.cpu's streams do nothing
        self.to_host, self.to_gpu = self.device_module.Stream(), self.device_module.Stream()

    def send(self, key: tuple[int, str, int], tensors: Sequence[Tensor]) -> None:
        slots = self.slots.get(key)
        if slots is None or [s.shape for s in slots] != [t.shape for t in tensors]:
            slots = self.slots[key] = [self.arena.allocate(t.shape, t.dtype) for t in tensors]
        # The copy waits for the kernels that compute the tensors, and for backward's last use of what these slots held.
        self._copy(slots, tensors, self.to_host)
        self.leaving.append(tensors)  # a reference, so that their memory is not reused while it is read

    def finish_sending(self) -> None:
        """Release the tensors sent. Kernels queued from here on may reuse their memory, so they wait for the copies."""
        self.device_module.current_stream().wait_stream(self.to_host)
        self.leaving.clear()

    def fetch(self, key: tuple[int, str, int]) -> list[Tensor]:
        """Tensors that may be read after `finish_fetching`."""
        slots = self.slots[key]
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=self.arena.device) for slot in slots]
        # The copy waits for the last use of the memory that `tensors` got, and, after finish_sending, for full slots.
        self._copy(tensors, slots, self.to_gpu)
        return tensors

    def finish_fetching(self) -> None:
        """Kernels queued from here on wait for all fetches; only they use, and may free, what was fetched."""
        self.device_module.current_stream().wait_stream(self.to_gpu)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: torch.Stream) -> None:
        stream.wait_stream(self.device_module.current_stream())
        with self.device_module.stream(stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
