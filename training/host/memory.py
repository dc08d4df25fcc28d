"""Offload: tensors go to page-locked host memory and back while the GPU does other work.

`PinnedArena` is the host memory, one range given out in slots. `HostCopies` makes the copies, on
its own streams. Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857.
"""

import math
import mmap
import resource
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from training.host.errors import UserError
from training.host.sizes import GIB, available_host_bytes

# Every slot starts at a multiple of 512 bytes,
# so that copies move whole cache lines and whole sectors.
SLOT_ALIGNMENT = 512


class PinnedArena:
    """A range of host memory, given out in slots that are never freed; page-locked where `device`
    is a GPU.

    The arena maps and registers its own pages: PyTorch's pinned allocator would round sizes up to
    powers of two. It raises UserError if the host does not let this much be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes = num_bytes
        self.used_bytes = 0
        self.device = device
        try:
            pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as refusal:
            raise _refused(num_bytes, str(refusal)) from None
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        # A forked child would share the pages until one side writes; the writer then gets new
        # pages, not pinned.
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
        """Returns an uninitialised tensor in the arena, on the CPU; raises ValueError if it does
        not fit."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = -(-self.used_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if start + num_bytes > self.num_bytes:
            left = self.num_bytes - self.used_bytes
            raise ValueError(
                f"the pinned arena of {self.num_bytes} bytes has {left} left, {num_bytes} are "
                "asked for"
            )
        self.used_bytes = start + num_bytes
        return self._bytes[start : self.used_bytes].view(dtype).view(shape)


def _refused(num_bytes: int, why: str) -> UserError:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "is unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.3f} GB"
    left = f"{available_host_bytes() / GIB:.1f} GB are left to this process, and ulimit -l {locked}"
    cure = "lower --host_budget, or raise ulimit -l where that is less"
    return UserError(f"cannot pin {num_bytes / GIB:.1f} GB of host memory ({why}): {left}; {cure}")


class HostCopies:
    """Copies tensors to slots of the arena and back, on one stream for each direction; on a CPU,
    copies are plain.

    The GPU memory of every tensor here is allocated and freed on the compute stream, which waits
    for a copy before the memory can be used again. With record_stream in place of these waits, peak
    memory would depend on how far the host runs ahead of the GPU.
    """

    def __init__(self, arena: PinnedArena):
        self.arena = arena
        # By the key of `send`, in this pass.
        self.slots: dict[tuple[int, str, int], list[Tensor]] = {}
        # References until the copies are made, so that the memory is not reused while it is read.
        self.leaving: dict[tuple[int, str, int], tuple[Sequence[Tensor], torch.Event]] = {}
        self.device_module = torch.get_device_module(arena.device)  # torch.cpu's streams do nothing
        self.to_host = self.device_module.Stream()
        self.to_gpu = self.device_module.Stream()

    def begin_pass(self) -> None:
        """Gives out the whole arena anew: the tensors of the last forward were fetched, or are not
        needed any more."""
        self.finish_sending()
        self.finish_fetching()
        self.slots.clear()
        self.arena.used_bytes = 0

    def send(self, key: tuple[int, str, int], tensors: Sequence[Tensor]) -> None:
        slots = self.slots[key] = [self.arena.allocate(t.shape, t.dtype) for t in tensors]
        # The copy waits for the kernels that make the tensors,
        # and for all fetches of the last pass.
        self._copy(slots, tensors, self.to_host)
        self.leaving[key] = tensors, self.to_host.record_event()

    def finish_sending(self, but: int | None = None) -> None:
        """Releases the tensors that were sent, other than block `but`'s.

        Kernels queued later wait for the copies: they may reuse the memory.
        """
        for key in [key for key in self.leaving if key[0] != but]:
            _, left = self.leaving.pop(key)
            self.device_module.current_stream().wait_event(left)

    def fetch(self, key: tuple[int, str, int]) -> list[Tensor]:
        """Returns tensors on the device that hold what was sent, after `finish_fetching`."""
        slots = self.slots[key]
        tensors = [
            torch.empty(slot.shape, dtype=slot.dtype, device=self.arena.device) for slot in slots
        ]
        # The copy waits until the memory of `tensors` is free. After finish_sending, it waits for
        # full slots as well.
        self._copy(tensors, slots, self.to_gpu)
        return tensors

    def finish_fetching(self) -> None:
        """Makes kernels queued from now on wait for all fetches.

        Only they may use or free the fetched tensors.
        """
        self.device_module.current_stream().wait_stream(self.to_gpu)

    def _copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: torch.Stream
    ) -> None:
        stream.wait_stream(self.device_module.current_stream())
        with self.device_module.stream(stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
