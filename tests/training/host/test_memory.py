import ctypes
import os
import signal

import pytest
import torch

from training.host.memory import PinnedArena


def test_arena_gives_out_what_it_has():
    arena = PinnedArena(4096, torch.device("cpu"))
    tensors = [
        arena.allocate(*spec)
        for spec in (((3, 5), torch.bfloat16), ((), torch.float32), ((7,), torch.int64))
    ]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
        assert tensor.data_ptr() % 64 == 0
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2]]
    used = arena.used_bytes
    with pytest.raises(ValueError, match="4096 bytes has"):
        arena.allocate((4096,), torch.uint8)
    assert arena.used_bytes == used and arena.allocate((2048,), torch.uint8).numel() == 2048


def test_a_forked_child_does_not_get_the_pages():
    arena = PinnedArena(4096, torch.device("cpu"))
    address = arena.allocate((1,), torch.uint8).fill_(1).data_ptr()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
