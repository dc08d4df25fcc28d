"""State in host memory goes through the GPU in pieces, and gradients leave for the host, beside
other work.

A piece comes on one stream, is updated on the next, and leaves on the third. Each format has
NUM_SLOTS slots. With record_stream in place of the waits here, the memory in use would depend on
how far the host runs ahead of the GPU.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from training.optim.formats import Kept, StateFormat
from training.optim.inventory import LEAVING_BYTES, NUM_SLOTS


class Ring:
    """Slots on the GPU that pieces of state from the host pass through. On a CPU, copies are done
    when they return.

    Args:
        device: of the slots.
        sizes: elements and tensors of the largest piece, by format, see `Inventory.slots`.
        leaving_limit: bytes of gradients that are on their way to the host at once.
    """

    def __init__(
        self,
        device: torch.device,
        sizes: Mapping[StateFormat, tuple[int, dict[str, Kept]]],
        leaving_limit: int = LEAVING_BYTES,
    ):
        self.device = device
        self.sizes = sizes
        self.leaving_limit = leaving_limit
        # Streams and events of torch.cpu do nothing.
        self.device_module = torch.get_device_module(device)
        self.compute = self.device_module.current_stream()
        self.inward, self.updating, self.outward = (self.device_module.Stream() for _ in range(3))
        # By format: tensors of a slot, and an event that is recorded once the piece that was here
        # last has gone back.
        self.slots: dict[StateFormat, deque[tuple[dict[str, Tensor], torch.Event]]] = {}
        # Gradients and their arrivals on the host.
        self.leaving: deque[tuple[Tensor, torch.Event]] = deque()

    def open(self) -> None:
        """Allocates the slots."""
        empty = functools.partial(torch.empty, device=self.device)
        for format, (most, kept) in self.sizes.items():
            slots = (allocate(kept, most, empty) for _ in range(NUM_SLOTS))
            self.slots[format] = deque((slot, self.device_module.Event()) for slot in slots)

    def follow(self) -> None:
        """Makes pieces wait for what is queued on the compute stream."""
        self.inward.wait_stream(self.device_module.current_stream())
        self.updating.wait_stream(self.device_module.current_stream())

    def pass_through(
        self,
        format: StateFormat,
        host: dict[str, Tensor],
        update: Callable[[dict[str, Tensor]], None],
    ) -> None:
        """Brings a piece's tensors to the GPU, calls `update` with them, and sends all but the
        gradient back."""
        slots = self.slots[format]
        slot, left = slots[0]
        slots.rotate(-1)
        tensors = {key: slot[key][: len(part)] for key, part in host.items()}
        with self.device_module.stream(self.inward):
            self.inward.wait_event(left)  # the slot is free
            for key, part in host.items():
                tensors[key].copy_(part, non_blocking=True)
        # The piece has arrived: its copies are the last issued there.
        self.updating.wait_stream(self.inward)
        with self.device_module.stream(self.updating):
            update(tensors)
        self.outward.wait_stream(self.updating)  # the piece is updated
        with self.device_module.stream(self.outward):
            for key in host.keys() - {"gradient"}:
                host[key].copy_(tensors[key], non_blocking=True)
            left.record()

    def close(self) -> None:
        """Frees the slots. Kernels queued later find all pieces on the host again, and may reuse
        the slots' memory."""
        if self.slots:
            self.device_module.current_stream().wait_stream(self.outward)
            self.slots.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of all slots."""
        return (
            tensor
            for slots in self.slots.values()
            for tensors, _ in slots
            for tensor in tensors.values()
        )

    def send_gradient(self, gradient: Tensor, send: Callable[[], None]) -> None:
        """Calls `send`, which copies a gradient to the host, on the outward stream while backward
        goes on."""
        self.outward.wait_stream(self.device_module.current_stream())
        with self.device_module.stream(self.outward):
            send()
            self.leaving.append((gradient, self.outward.record_event()))
        self.let_go(self.leaving_limit)

    def let_go(self, num_bytes: int) -> None:
        """Makes the compute stream wait until at most `num_bytes` of gradients are on their way.

        Kernels queued after the wait may write over the memory of the gradients that have left.
        FSDP2's kernels may as well: both of its streams wait for the compute stream, and either may
        have made the gradients.
        """
        while sum(gradient.nbytes for gradient, _ in self.leaving) > num_bytes:
            _, left = self.leaving.popleft()
            self.compute.wait_event(left)


def allocate(
    tensors: dict[str, Kept], numel: int, empty: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Returns tensors for so many elements; `empty` takes arguments of torch.empty."""
    return {name: empty((numel // kept.group,), dtype=kept.dtype) for name, kept in tensors.items()}
