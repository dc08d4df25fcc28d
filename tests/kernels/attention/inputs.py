"""What the tests of this folder share: documents, random lists of blocks, a count of what is
allocated."""

import itertools

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention.attend import attention
from kernels.attention.sparse.layout import EMPTY, first_local_block, make_layout
from kernels.attention.sparse.sparse_attention import Sparse
from tests.kernels.compare import random


def segments_of(*lengths_by_row):
    """[[37, 63], [100]] -> two documents in row 0, one in row 1."""
    rows = []
    for row, lengths in enumerate(lengths_by_row):
        ends = list(itertools.accumulate(lengths))
        rows += [(row, end - length, end) for length, end in zip(lengths, ends)]
    return torch.tensor(rows)


def segments_of_groups(*rows):
    """[(5, 2, 1), (3,)] -> a prompt of 5 tokens with answers of 2 and 1, and a document of 3, all
    in row 0."""
    found = []
    for row, groups in enumerate(rows):
        place = 0
        for prompt, *answers in groups:
            first, last = place, place + prompt
            found.append((row, first, last, 0, 0))
            place = last
            for answer in answers:
                found.append((row, place, place + answer, first, last))
                place += answer
    return torch.tensor(found)


def make_qkv(B, T, H, G, K, dtype, device, seed=0):
    return [
        random(B, T, n, K, seed=seed + i, dtype=dtype, device=device)
        for i, n in enumerate((H, G, G))
    ]


def attend_sparsely(q, k, v, segments=None, *, blocks=None, impl="auto", **sizes):
    """Attention to chosen blocks, in short documents too."""
    return attention(
        q, k, v, segments, kind=Sparse(dense_below=0, **sizes), lists=blocks, impl=impl
    )


def select_blocks(q, k, segments=None, *, impl="torch", **sizes):
    """The lists that `attend_sparsely` chooses."""
    return Sparse(dense_below=0, **sizes).choose(q, k, segments, impl == "triton")


def random_lists(q, G, segments, selected, block_size, window, seed=0, share=0.8):
    """Random candidates, ascending, of which a `share` is kept: some lists are full, some empty."""
    layout = make_layout(q, segments, block_size, window)
    generator = torch.Generator().manual_seed(seed)
    first_local = first_local_block(layout).cpu()
    longest = max(2, int(layout.index_of_block.max()) + 1)
    scores = torch.rand(layout.num_tokens, G, longest, generator=generator)
    j = torch.arange(longest)
    is_candidate = (j >= 1) & (j < first_local[:, None, None]) & (scores < share)
    values, order = scores.masked_fill(~is_candidate, -1).sort(-1, descending=True)
    order = torch.where(values >= 0, order, EMPTY)[..., :selected]
    lists = torch.full((layout.num_tokens, G, selected), EMPTY)
    lists[..., : order.shape[-1]] = order
    return lists.sort(-1).values.to(torch.int16).view(*q.shape[:2], G, selected).to(q.device)


def all_blocks(q, G, segments, block_size, window):
    """Lists that name every candidate."""
    longest = make_layout(q, segments, block_size, window).index_of_block.max() + 1
    return random_lists(q, G, segments, int(longest), block_size, window, share=2)


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations made and that live at once."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata
            for x in pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for tensor in pytree.tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and (storage := tensor.untyped_storage())._cdata not in given
            ):
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {
            key: value for key, value in self.storages.items() if not value[0].expired()
        }
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.storages.values()))
        return result


class NoLaunch:
    """In place of a kernel."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None
