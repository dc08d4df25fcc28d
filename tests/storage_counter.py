"""Counts bytes as an allocator would, for tensors that need not be real."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.common import BODIES
from training.memory.profiler import Reading


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of all live tensors, as the GPU's allocator would. Fake and meta tensors
    cost nothing.

    Args:
        own_bytes: bytes that an operation takes inside, where fake tensors do not show them, by
            operation: a number, or a function of the call's arguments.
    """

    def __init__(self, own_bytes=None):
        super().__init__()
        self.allocated = self.peak = 0
        self.own_bytes, self.on_host = own_bytes or {}, False
        self.known = weakref.WeakSet()
        self.watched = (
            weakref.WeakKeyDictionary()
        )  # bytes of storages that are counted, and may be resized

    def watch(self, tensors):
        """Count tensors that it knows by the size that their storages have at any time."""
        for tensor in tensors:
            self.watched[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()

    def _look(self):
        for storage, counted in list(self.watched.items()):
            if storage.nbytes() != counted:
                self.watched[storage] = storage.nbytes()
                self.allocated += storage.nbytes() - counted

    @classmethod
    def _should_skip_dynamo(cls):
        """Nothing is compiled here: PyTorch's wrapper against that costs a tenth of a dry run."""
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.watched:
            self._look()
        if function.name() in BODIES and args[0].is_meta:
            with self:  # made of other operations, which it counts
                return BODIES[function.name()](*args, **(kwargs or {}))
        output = function(*args, **(kwargs or {}))
        for tensor in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        own = self.own_bytes.get(function, 0)
        self.peak = max(self.peak, self.allocated + (own(*args) if callable(own) else own))
        return output

    def _count(self, storage):
        if storage in self.known:
            return
        self.known.add(storage)
        if not self.on_host:
            self.allocated += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes):
        self.allocated -= num_bytes

    def read(self):
        self._look()
        peak, self.peak = self.peak, self.allocated
        return Reading(self.allocated, peak, peak)

    def alloc_retries(self):
        return 0

    def mark(self):
        return 0.0

    def seconds(self, start, stop):
        return stop - start
