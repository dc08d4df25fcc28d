"""Ends a run early with nothing lost: signals are noted, and obeyed between steps, or between
blocks of long steps."""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.host.errors import whole_number
from training.host.processes import Watchdog
from training.parallel.world import World

logger = logging.getLogger(__name__)
# Signals of a scheduler or torchrun, of Ctrl-C, of a closed terminal,
# and of Slurm ahead of a preemption.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SECONDS_TOGETHER = 1.0
SHUTDOWN_SECONDS = 30  # from torchrun's SIGTERM to its SIGKILL, unless it is told otherwise
# without an end of a step, or ten times as long as the last one where that is more
HANG_SECONDS = 600.0
LONG_STEP_SECONDS = 5.0  # in longer steps the ranks agree between blocks whether to stop
# from one look between blocks to the next, about; the host waits for the GPU in a look
LOOK_SECONDS = 0.5
LOOKS_BEHIND = 2  # looks begun since the look whose answer is read


class Stopped(Exception):
    """A run was asked to end in the middle of a step, whose gradients are dropped."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Notes the numbers of the signals that ask this process to end while it is in the block.

    A signal that was ignored stays so, such as SIGHUP under nohup. A second SIGINT ends the process
    at once, unless it comes with the first: torchrun passes on a Ctrl-C that its workers have got
    themselves. A thread takes note: Python runs a signal's handler in the main thread alone, after
    the library call that it is in, and the backward of a GPU is a single call of minutes.
    """
    received: list[int] = []
    noted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    listener = threading.Thread(
        target=_listen, args=(reading, noted, received), name="stop signals", daemon=True
    )
    listener.start()
    wakeup = signal.set_wakeup_fd(writing)  # gets the number of each signal at once, as a byte
    before = {number: signal.signal(number, lambda *_: None) for number in noted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        listener.join()
        os.close(reading)


def exit_with(status: int) -> NoReturn:
    """Ends the process with this exit status, which no further signal changes while Python ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


def _listen(reading: int, noted: Container[int], received: list[int]) -> None:
    interrupted = math.inf  # when the first SIGINT came
    while byte := os.read(reading, 1):  # nothing is read once the other end is closed
        [number] = byte
        if number == signal.SIGINT:
            if time.monotonic() > interrupted + SECONDS_TOGETHER:
                os.write(
                    2,
                    b"SIGINT again: ended at once; --resume goes on from the last checkpoint, if "
                    b"any\n",
                )
                os._exit(128 + number)
            interrupted = min(interrupted, time.monotonic())
        if number in noted:
            received.append(number)


class Stopping:
    """Knows whether a rank was asked to end, ends long steps between two blocks, and shows where a
    rank hangs.

    A step of a million tokens takes minutes, a block seconds. So in long steps the ranks look
    between blocks whether to end, all between the same two, by sums on a gloo group of their own: a
    rank begins a sum at each look and reads the sum that it began LOOKS_BEHIND looks before. No
    collective of training waits for a look.

    In a look the host waits for the GPU, LOOKS_BEHIND looks back. Otherwise it would queue the
    whole step at once and fill the GPU's launch queue, in which calls of other threads wait: a
    checkpoint would take half as long again.

    Args:
        received: numbers of the signals that this rank has got, as `stop_signals` notes them.
        blocks: of the model, called as block(x_BTD, ...).
        micro_batches: of a step.
        seconds: predicted for the first step; 0: not known.
    """

    def __init__(
        self,
        received: list[int],
        world: World,
        blocks: nn.ModuleList,
        micro_batches: int,
        seconds: float,
    ):
        self.received, self.world = received, world
        self.step_seconds = seconds  # predicted, then the main rank's last step
        self.look_seconds = 0.0  # from a signal to the end of the last step, at most
        self.watchdog = Watchdog()
        # forwards and backwards of blocks in a step
        self._num_blocks = 2 * len(blocks) * micro_batches
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._every = 0  # forwards and backwards from one look to the next; 0: nobody looks
        self._passed, self._last, self._longest = 0, 0.0, 0.0
        self._begun: deque[tuple[Tensor, dist.Work | None, torch.cuda.Event | None]] = deque()
        for block in blocks:
            block.register_forward_pre_hook(lambda _, inputs: self._before(inputs[0]))

    def watch(self) -> None:
        """Prints this rank's stacks if `watch` is not called again for long: the rank hangs."""
        self.watchdog.expect(max(HANG_SECONDS, 10 * self.step_seconds))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look between blocks in here, if the last step was long: a rank that was asked to end ends
        them all.

        Raises Stopped: from a block's forward or backward.
        """
        if self.step_seconds > LONG_STEP_SECONDS:
            self._every = max(1, int(LOOK_SECONDS * self._num_blocks / self.step_seconds))
        self._passed, self._last, self._longest = 0, time.monotonic(), 0.0
        try:
            yield
            self._note_time()
            self._finish()
        finally:
            self._every = 0

    def note_step(self, seconds: float) -> None:
        """Notes the seconds of a step, right after `looking`, and with them how soon a signal would
        have ended it."""
        self.look_seconds = (
            self._longest * (1 + LOOKS_BEHIND) if self.step_seconds > LONG_STEP_SECONDS else seconds
        )

    # All ranks call the next four together, and get the same answer.

    def is_asked(self) -> bool:
        self.watch()
        return self.num_signals() > 0

    def num_signals(self) -> float:
        return self.world.sum(len(self.received))[0]

    def agree(
        self, is_due: bool, seconds: float, amounts: list[float]
    ) -> tuple[bool, bool, list[float]]:
        """Returns what ranks agree on after a step of so many seconds, by a single collective.

        It is (whether any rank has been asked to end, the main rank's `is_due`, `amounts` summed
        over the ranks).
        """
        request = (is_due, seconds) if self.world.is_main else (0, 0)
        signals, due, self.step_seconds, *sums = self.world.sum(
            len(self.received), *request, *amounts
        )
        return signals > 0, due > 0, sums

    def first_signal(self) -> signal.Signals:
        return signal.Signals(-int(self.world.min(-max(self.received, default=0))[0]))

    def _before(self, x_BTD: Tensor) -> None:
        if self._every:
            self._pass()
            if x_BTD.requires_grad:
                x_BTD.register_hook(lambda _: self._pass())  # when this block's backward is done

    def _pass(self) -> None:
        self._passed += 1
        if self._passed % self._every == 0:
            self._look()

    def _look(self) -> None:
        self._note_time()
        is_asked = torch.tensor([float(bool(self.received))])
        if self._group is None:
            work = None
        else:
            work = dist.all_reduce(is_asked, group=self._group, async_op=True)
        queued = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self._begun.append((is_asked, work, queued))
        if len(self._begun) > LOOKS_BEHIND and self._read():
            self._finish()
            raise Stopped

    def _read(
        self,
    ) -> bool:  # whether any rank had been asked to end, at the first look that has not been read
        is_asked, work, queued = self._begun.popleft()
        if work is not None:
            work.wait()
        if queued is not None:
            queued.synchronize()
        return is_asked.item() > 0

    def _finish(self) -> None:
        while self._begun:
            self._read()

    def _note_time(self) -> None:
        now = time.monotonic()
        self._last, self._longest = now, max(self._longest, now - self._last)


def promise_shutdown(look_seconds: float, save_seconds: float) -> None:
    """Says how long a run goes on after a signal that stops it; warns if torchrun would kill it
    before.

    `look_seconds` pass until the step is taken or dropped, `save_seconds` in a checkpoint. A
    checkpoint that has begun is finished before the last one is saved.
    """
    needed = math.ceil(look_seconds + 2 * save_seconds)
    logger.info(
        "SIGTERM, SIGINT, SIGHUP and SIGUSR1 save and exit within about %d s, "
        "later on a busy machine",
        needed,
    )
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    from torch.distributed.launcher.api import LaunchConfig

    timeout = SHUTDOWN_SECONDS
    advice = f", and torch {torch.__version__} has no --shutdown-timeout: a newer torch has"
    # the flag is not shown to workers, the environment is
    if hasattr(LaunchConfig, "shutdown_timeout"):
        for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"):
            timeout = whole_number(name, timeout)
        advice = f": start it with --shutdown-timeout {needed + 60}, unless you did"
    if needed > timeout - 5:
        logger.warning("torchrun kills after %d s%s", timeout, advice)
