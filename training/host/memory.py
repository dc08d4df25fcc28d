"""Offload: tensors go to page-locked host memory and back while the GPU does other work.

`PinnedArena` is the host memory, one range given out in slots. `HostCopies` makes the copies, on its own streams.
Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857.
"""

import math
import mmap
import os
import re
import resource
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from training.host.errors import UserError

MIB, GIB = 2**20, 2**30  # bytes
# Every slot starts at a multiple of 512 bytes, so that copies move whole cache lines and whole sectors.
SLOT_ALIGNMENT = 512


def parse_bytes(text: str) -> int:
    """Returns the bytes in "24GB", "24GiB", "512MB" or a plain number. A GB is 2**30 bytes too, as GPUs are sold.

    Raises:
        UserError: the text is not a size, or of 1 PiB or less than 1 MiB, such as gigabytes without their unit.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = 0 if match is None else int(float(match[1]) * 2 ** (10 * " KMGT".index(match[2].upper() or " ")))
    if not MIB <= size < 2**50:
        raise UserError(f'a memory size is between 1MB and 1023TB and looks like "24GB", got {text[:80]!r}')
    return size


def available_host_bytes() -> int:
    """Returns this rank's share of 80% of the host memory that the machine and its control groups have left."""
    available = 1024 * int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0])
    return int(0.8 * min(available, *_bytes_left_in_groups())) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _bytes_left_in_groups() -> Iterator[float]:
    """Yields the bytes left under each memory limit: of the process's control group and its parents.

    cgroup v2 lists one path with an empty controller, v1 one path for the controller "memory". In a container the path
    may be the host's and not exist here. The nearest folder above it that exists then has the limit.
    """
    yield math.inf
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, cache = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = Path(root, path.lstrip("/"))
        for folder in (group, *group.parents[: len(group.parts) - len(Path(root).parts)]):
            with suppress(OSError, ValueError):  # no such folder or file, or no limit, which v2 writes as "max"
                size = int((folder / limit).read_text())
                cached = re.findall(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)[0]
                yield size - (int((folder / usage).read_text()) - int(cached))


class PinnedArena:
    """A range of host memory, given out in slots that are never freed; page-locked where `device` is a GPU.

    The arena maps and registers its own pages: PyTorch's pinned allocator would round sizes up to powers of two. It
    raises UserError if the host does not let this much be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes, self.used_bytes, self.device = num_bytes, 0, device
        try:
            pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as refusal:
            raise _refused(num_bytes, str(refusal)) from None
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        # A forked child would share the pages until one side writes; the writer then gets new pages, not pinned.
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
        """Returns an uninitialised tensor in the arena, on the CPU; raises ValueError if it does not fit."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = -(-self.used_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if start + num_bytes > self.num_bytes:
            left = self.num_bytes - self.used_bytes
            raise ValueError(f"the pinned arena of {self.num_bytes} bytes has {left} left, {num_bytes} are asked for")
        self.used_bytes = start + num_bytes
        return self._bytes[start : self.used_bytes].view(dtype).view(shape)


def _refused(num_bytes: int, why: str) -> UserError:
    """Returns the error for an arena that cannot be made."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "is unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.3f} GB"
    left = available_host_bytes() / GIB
    return UserError(
        f"cannot pin {num_bytes / GIB:.1f} GB of host memory ({why}): {left:.1f} GB are left to this process, and "
        f"ulimit -l {locked}; lower --host_budget, or raise ulimit -l where that is less"
    )


class HostCopies:
    """Copies tensors to slots of the arena and back, on one stream for each direction; on a CPU, copies are plain.

    The GPU memory of every tensor here is allocated and freed on the compute stream. That stream waits for a copy
    before the memory can be used again. If record_stream took the place of these waits, peak memory would depend on how
    far the host runs ahead of the GPU.
    """

    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self.slots: dict[tuple[int, str, int], list[Tensor]] = {}  # by the key of `send`, in this pass
        self.leaving: list[Sequence[Tensor]] = []
        self.device_module = torch.get_device_module(arena.device)  # torch.cpu's streams do nothing
        self.to_host, self.to_gpu = self.device_module.Stream(), self.device_module.Stream()

    def begin_pass(self) -> None:
        """Give out the whole arena anew: the tensors of the last forward were fetched, or are not needed any more."""
        self.finish_fetching()
        self.slots.clear()
        self.arena.used_bytes = 0

    def send(self, key: tuple[int, str, int], tensors: Sequence[Tensor]) -> None:
        """Copy tensors to the host while the compute stream goes on."""
        slots = self.slots[key] = [self.arena.allocate(t.shape, t.dtype) for t in tensors]
        # The copy waits for the kernels that make the tensors, and for all fetches of the last pass.
        self._copy(slots, tensors, self.to_host)
        self.leaving.append(tensors)  # a reference, so that their memory is not reused while it is read

    def finish_sending(self) -> None:
        """Release the tensors that were sent. Kernels queued later wait for the copies: they may reuse the memory."""
        self.device_module.current_stream().wait_stream(self.to_host)
        self.leaving.clear()

    def fetch(self, key: tuple[int, str, int]) -> list[Tensor]:
        """Returns tensors on the device that hold what was sent once `finish_fetching` has been called."""
        slots = self.slots[key]
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=self.arena.device) for slot in slots]
        # The copy waits until the memory of `tensors` is free. After finish_sending, it waits for full slots as well.
        self._copy(tensors, slots, self.to_gpu)
        return tensors

    def finish_fetching(self) -> None:
        """Make kernels queued from now on wait for all fetches. Only they may use or free the fetched tensors."""
        self.device_module.current_stream().wait_stream(self.to_gpu)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: torch.Stream) -> None:
        stream.wait_stream(self.device_module.current_stream())
        with self.device_module.stream(stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
