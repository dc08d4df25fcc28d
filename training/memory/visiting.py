"""Weights that visit the GPU: they live in host memory or in fewer bits, and are fetched ahead of a
block's turn.

Forward and backward run one block at a time, so the weights of two blocks are on the GPU at most:
the block that runs, and the next one. The 14B's blocks have 0.66 GB of weights each: at 50 GB/s a
fetch takes 13 ms beside the block before. Embedding and head may visit like blocks, before the
first and after the last. Weights in fewer bits visit from wherever they are kept: a visit has them
in the parameter's own dtype.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from training.optim.formats import Home

Homes = Mapping[nn.Parameter, Home]  # weights between visits, see `MasterAdamW.homes`


class VisitingWeights:
    """Gives parameters their weights for a visit of their block, and takes their GPU memory away
    afterwards.

    A parameter keeps its identity and its shape, and only its storage is empty in between, as under
    FSDP2. A graph that reads it must be made and run backward in one visit: the end of a visit
    counts as a change of the parameter, so autograd refuses to go through an older graph. Memory of
    weights is allocated and freed on the compute stream, which waits for the copies, see
    `HostCopies`. On a CPU, copies are plain.

    `homes` are parameters that visit with their weights, by block. The embedding is block -1, the
    head has the number after the last block's. They may share one parameter: they are never present
    at once.
    """

    def __init__(self, homes: dict[int, Homes], device: torch.device):
        self.homes = homes
        self.present: set[int] = set()  # blocks whose weights are on the GPU, or on their way
        # Streams of the CPU do nothing, as suits tensors without data.
        self.device_module = torch.get_device_module("cpu" if device.type == "meta" else device)
        self.to_gpu = self.device_module.Stream()

    @contextmanager
    def visit(self, block: int, then: int | None = None) -> Iterator[None]:
        """Keeps a block's weights on the GPU in here, and the weights of the next to visit, `then`,
        on their way."""
        self.free(but=(block, then))
        self._fetch(block)
        self._finish_fetching()
        self._fetch(then)
        yield
        self.free(but=(then,))

    def free(self, but: Collection[int | None] = ()) -> None:
        """Frees the GPU memory of all blocks' weights, except for the blocks `but`.

        `but` may hold None for a block that does not exist, such as the next one after the last.
        Kernels that are queued from now on may reuse the memory.
        """
        self._finish_fetching()  # a copy may still be filling it
        for block in self.present.difference(but):
            # Autograd then refuses to run backward through graphs that read these weights.
            torch.autograd.graph.increment_version([*self.homes[block]])
            for parameter in self.homes[block]:
                parameter.untyped_storage().resize_(0)
        self.present.intersection_update(but)

    def _fetch(self, block: int | None) -> None:
        if block is None or block not in self.homes or block in self.present:
            return
        self.present.add(block)
        for parameter in self.homes[block]:
            parameter.untyped_storage().resize_(parameter.nbytes)
        # The copies wait until the memory is free, and until the last update has reached the host.
        self.to_gpu.wait_stream(self.device_module.current_stream())
        with self.device_module.stream(self.to_gpu):
            for parameter, home in self.homes[block].items():
                if isinstance(home, Tensor):
                    parameter.detach().copy_(home, non_blocking=True)
                else:
                    home.write_into(parameter.detach())

    def _finish_fetching(self) -> None:
        """Makes kernels queued from now on wait for all fetches."""
        if self.present:
            self.device_module.current_stream().wait_stream(self.to_gpu)
