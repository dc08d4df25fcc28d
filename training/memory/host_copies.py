"""Host memory that GPUs copy to and from beside their work: one page-locked block, carved up."""

import math
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from training.errors import UserError

# Slots start at multiples of this: whole cache lines, and whole sectors for the copy engines.
SLOT_ALIGNMENT = 512


class PinnedArena:
    """One block of host memory, page-locked where there is a GPU to copy to, given out in slots that are never freed.

    The pages are registered and not taken from PyTorch's pinned allocator, which rounds up to powers of two.

    Args:
        num_bytes: of the whole.
        device: whose copies it serves; a CPU needs plain memory only.

    Raises:
        UserError: the host does not let this much be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes, self.used_bytes, self.device = num_bytes, 0, device
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        # A forked child would share the pages until one side writes; the writer then gets others, which are not pinned.
        pages.madvise(mmap.MADV_DONTFORK)
        if device.type == "cuda" and num_bytes:
            with suppress(OSError):  # a kernel without huge pages: small ones take longer to pin
                pages.madvise(mmap.MADV_HUGEPAGE)
            address = self._bytes.data_ptr()
            error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            if error:
                raise UserError(
                    f"cannot pin {num_bytes / 2**30:.1f} GB of host memory (CUDA error {error}); lower host_budget"
                )
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
