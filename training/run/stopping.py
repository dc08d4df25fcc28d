"""Signals that end a run early with nothing lost: noted here, obeyed between steps, and between blocks of long ones."""

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

logger = logging.getLogger(__name__)
# A scheduler's or torchrun's end, Ctrl-C, a closed terminal, and the notice that Slurm sends ahead of a preemption.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SECONDS_TOGETHER = 1.0
SHUTDOWN_SECONDS = 30  # from torchrun's SIGTERM to its SIGKILL, unless it is told otherwise
LONG_STEP_SECONDS = 5.0  # in longer steps the ranks agree between blocks whether to stop,
LOOK_SECONDS = 0.5  # about so often where blocks are shorter: the host waits for the GPU there
LOOKS_BEHIND = 2


class Stopped(Exception):
    """A run was asked to end in the middle of a step, whose gradients are dropped."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The numbers of the signals that have asked this process to end, while it is in the block.

    A signal that was ignored stays so, as SIGHUP under nohup. A second SIGINT ends the process at once, unless it comes
    with the first: torchrun passes on a Ctrl-C that its workers have got themselves.

    A thread takes note of them. Python runs a signal's handler in the main thread alone, once that is back from a
    library call; a GPU's backward, whose hooks run in a thread of autograd's, keeps it there for minutes.
    """
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    noted = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    listener = threading.Thread(target=_listen, args=(reading, noted, received), name="stop signals", daemon=True)
    listener.start()
    wakeup = signal.set_wakeup_fd(writing)  # gets the number of each signal at once, as a byte
    try:
        for number in noted:
            signal.signal(number, lambda *_: None)
        yield received
    finally:
        for number in noted:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        listener.join()
        os.close(reading)


def _listen(reading: int, noted: Container[int], received: list[int]) -> None:
    interrupted = math.inf  # when the first SIGINT came
    while byte := os.read(reading, 1):  # nothing is read once the other end is closed
        [number] = byte
        if number == signal.SIGINT:
            if time.monotonic() > interrupted + SECONDS_TOGETHER:
                os._exit(128 + number)
            interrupted = min(interrupted, time.monotonic())
        if number in noted:
            received.append(number)


class LooksBetweenBlocks:
    """Ends a forward or backward between two blocks, on all ranks between the same two, once a rank was asked to end.

    A step of a million tokens takes minutes, a block seconds. The ranks agree by sums on a gloo group of their own: a
    rank begins one at each look and reads the one that it began LOOKS_BEHIND looks before. All ranks pass the looks in
    one order, and none waits for what another does later: no collective of training can wait for a look in turn. The
    host waits for the GPU likewise; it would else have queued the whole step by the time that the first block is done.
    Nor does it fill the GPU's launch queue, in which other threads' calls would wait as well: a checkpoint of state on
    a GPU takes half as long again then (MEMORY_REPORT.md, "Checkpoints beside training").

    Args:
        blocks: of the model, called as block(x_BTD, ...).
        received: numbers of the signals that this process has got.

    Attributes:
        longest: seconds from one look to the next, at most, since `looking` began.
    """

    def __init__(self, blocks: Iterable[nn.Module], received: list[int]):
        self.received = received
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.every, self.passed, self.last, self.longest = 0, 0, 0.0, 0.0
        self.begun: deque[tuple[Tensor, dist.Work | None, torch.cuda.Event | None]] = deque()
        for block in blocks:
            block.register_forward_pre_hook(lambda _, inputs: self._before(inputs[0]))

    @contextmanager
    def looking(self, every: int) -> Iterator[None]:
        """Look while in here.

        Args:
            every: so many blocks' forwards or backwards lie between two looks, on all ranks alike; 0: nobody looks.

        Raises:
            Stopped: from a block's forward or backward.
        """
        self.every, self.passed, self.last, self.longest = every, 0, time.monotonic(), 0.0
        try:
            yield
            self._note_time()
            self._finish()
        finally:
            self.every = 0

    @staticmethod
    def every_in(step_seconds: float, num_blocks: int) -> int:
        """What `looking` takes for a step that lasts so long; num_blocks counts forwards and backwards of blocks."""
        return max(1, int(LOOK_SECONDS * num_blocks / step_seconds)) if step_seconds > LONG_STEP_SECONDS else 0

    def longest_seconds(self) -> float:
        """From a signal to the end of the step that is dropped, at most, as far as the last `looking` has shown."""
        return self.longest * (1 + LOOKS_BEHIND)

    def _before(self, x_BTD: Tensor) -> None:
        if self.every:
            self._pass()
            if x_BTD.requires_grad:
                x_BTD.register_hook(lambda _: self._pass())  # when this block's backward is done

    def _pass(self) -> None:
        self.passed += 1
        if self.passed % self.every == 0:
            self._look()

    def _look(self) -> None:
        self._note_time()
        asked = torch.tensor([float(bool(self.received))])
        work = None if self.group is None else dist.all_reduce(asked, group=self.group, async_op=True)
        queued = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self.begun.append((asked, work, queued))
        if len(self.begun) > LOOKS_BEHIND and self._read():
            self._finish()
            raise Stopped

    def _read(self) -> bool:
        """Whether any rank had been asked to end at the first look that has not been read."""
        asked, work, queued = self.begun.popleft()
        if work is not None:
            work.wait()
        if queued is not None:
            queued.synchronize()
        return asked.item() > 0

    def _finish(self) -> None:
        while self.begun:
            self._read()

    def _note_time(self) -> None:
        now = time.monotonic()
        self.last, self.longest = now, max(self.longest, now - self.last)


def promise_shutdown(look_seconds: float, save_seconds: float) -> None:
    """Say how long a run goes on after a signal that stops it; warn where torchrun would kill it before.

    A worker reads torchrun's patience from its environment; torchrun's flag --shutdown-timeout is not shown to workers.

    Args:
        look_seconds: until the step is taken or dropped.
        save_seconds: of a checkpoint; one that has begun is ended before the last one.
    """
    needed = math.ceil(look_seconds + 2 * save_seconds)
    logger.info("SIGTERM, SIGINT, SIGHUP and SIGUSR1 save and exit within %d s at most", needed)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    from torch.distributed.launcher.api import LaunchConfig

    can_be_set, timeout = hasattr(LaunchConfig, "shutdown_timeout"), SHUTDOWN_SECONDS
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT") if can_be_set else ():
        timeout = int(os.environ.get(name, timeout))
    if needed > timeout - 5:
        logger.warning(
            "torchrun kills after %d s%s", timeout,
            f": start it with --shutdown-timeout {needed + 60}, unless you did" if can_be_set
            else f", and that of torch {torch.__version__} has no --shutdown-timeout: a newer torch has",
        )  # fmt: skip
