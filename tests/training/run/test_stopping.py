"""Looks between blocks end a forward or a backward, and keep the host few blocks ahead of the
GPU."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from training.parallel.world import World
from training.run.stopping import (
    LOOK_SECONDS,
    LOOKS_BEHIND,
    STOP_SIGNALS,
    Stopped,
    Stopping,
    exit_with,
    stop_signals,
)

BLOCKS = 8


class Slow(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.weight, self.log = nn.Parameter(torch.ones(4)), log

    def forward(self, x):
        if x.is_cuda:
            torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        self.log.append(1)
        return x * self.weight


def blocks_on(device):
    log = []
    blocks = nn.ModuleList(Slow(log) for _ in range(BLOCKS)).to(device)
    return blocks, log, torch.ones(4, device=device, requires_grad=True)


def stopping_of(blocks, received, every=1):
    """Looks after so many forwards and backwards of blocks."""
    return Stopping(
        received,
        World(0, 1, torch.device("cpu")),
        blocks,
        100,
        LOOK_SECONDS * 2 * BLOCKS * 100 / every,
    )


def run(blocks, x):
    for block in blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_signal_ends_forward_and_backward(device):
    blocks, log, x = blocks_on(device)
    received = []
    stopping, seldom = stopping_of(blocks, received), stopping_of(blocks, received, every=2)
    with stopping.looking():
        run(blocks, x).sum().backward()
    stopping.note_step(1000.0)
    assert 0 < stopping.look_seconds < 1000 and len(log) == BLOCKS
    received.append(signal.SIGTERM)
    run(blocks, x)  # nobody looks
    log.clear()
    with pytest.raises(Stopped), stopping.looking():
        run(blocks, x)
    assert len(log) == LOOKS_BEHIND
    log.clear()
    with pytest.raises(Stopped), seldom.looking():
        run(blocks, x)
    assert len(log) == 2 * (LOOKS_BEHIND + 1) - 1
    received.clear()
    with pytest.raises(Stopped), stopping.looking():  # in autograd's own thread, on a GPU
        y = run(blocks, x).sum()
        received.append(signal.SIGTERM)
        y.backward()


def test_a_signal_is_noted_while_the_main_thread_is_in_a_library():
    """Python's own handlers wait until the library returns, which takes minutes in a GPU's
    backward."""
    x, noted = torch.ones(800, 800), []

    def signalled():
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not received:
            time.sleep(0.001)
        noted.append(time.monotonic())

    before = signal.getsignal(signal.SIGUSR1)
    with stop_signals() as received:
        thread = threading.Thread(target=signalled)
        thread.start()
        torch.linalg.matrix_power(x, 2**16)  # one call of about a quarter of a second
        returned = time.monotonic()
        thread.join()
    assert noted[0] < returned and received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_no_signal_changes_the_status_of_a_process_that_ends():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with pytest.raises(SystemExit, match="143"):
            exit_with(143)
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.gpu
def test_the_host_is_few_blocks_ahead_of_the_gpu():
    blocks, _, x = blocks_on("cuda")
    stopping = stopping_of(blocks, [])
    done = []  # an event behind each block
    for block in blocks:
        block.register_forward_hook(
            lambda *_: done.append(torch.cuda.current_stream().record_event())
        )

    @torch.no_grad()
    def blocks_ahead():
        """How many blocks the GPU has still to do when the host has queued all of them."""
        done.clear()
        run(blocks, x)
        return sum(not event.query() for event in done)

    blocks_ahead()  # loads the kernels
    torch.cuda.synchronize()
    assert blocks_ahead() == BLOCKS
    torch.cuda.synchronize()
    with stopping.looking():
        assert blocks_ahead() <= LOOKS_BEHIND + 1


@pytest.mark.gpu
def test_a_signal_ends_a_gpus_backward():
    """Autograd's own thread runs it, while the main thread waits in the library."""
    blocks, _, y = blocks_on("cuda")
    with stop_signals() as received, stopping_of(blocks, received).looking():
        for block in blocks:
            y = block(y)
            y.register_hook(lambda _: torch.cuda._sleep(400_000_000))  # cycles: about 0.2 s of 1.6
        torch.cuda.synchronize()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Stopped):
            y.sum().backward()
