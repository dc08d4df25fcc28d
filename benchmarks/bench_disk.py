"""What a disk takes and gives past the page cache, and what a checkpoint makes of it.

`python -m benchmarks.bench_disk DIR`

Threads write and read a file's pieces of 8 MiB in turn, alone and at once (of two files). Then a checkpoint of random
state in host memory is written, flushed and read back, beside a thread that sleeps and one that runs Python all the
time, as a training step's may. Everything lies in a new folder in DIR, which is deleted.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import print_json, print_table
from training.checkpoint.saver import Saver
from training.host.direct import BUFFER_BYTES, DirectFile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=6.0, help="of a file, and of the checkpoint")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_disk_", dir=arguments.folder))
    try:
        size = int(arguments.gb * 1e9) // BUFFER_BYTES * BUFFER_BYTES
        disk = {threads: bench_disk(folder, size, threads) for threads in arguments.threads}
        saver = {beside: bench_saver(folder / beside, arguments.gb, beside) for beside in ("sleeps", "runs Python")}
    finally:
        shutil.rmtree(folder)
    columns = ["threads", "write", "read", "write, at once", "read, at once"]
    print_table("GB/s past the page cache", columns, [[threads, *rates] for threads, rates in disk.items()])
    columns = ["beside a thread that", "GB/s until read", "GB/s read back", "seconds in all"]
    print_table(f"a checkpoint of {arguments.gb:g} GB", columns, [[beside, *row] for beside, row in saver.items()])
    print_json("disk", torch.device("cpu"), gb=arguments.gb, disk=disk, saver=saver)


def bench_disk(folder: Path, size: int, threads: int) -> tuple[float, float, float, float]:
    """GB/s of writing, of reading, and of each where both go on."""
    first, second = folder / "first", folder / "second"
    write = size / timed(writer(first, size, threads)) / 1e9
    read = size / timed(reader(first, size, threads)) / 1e9
    with ThreadPoolExecutor(2) as pool:
        seconds = list(pool.map(timed, (writer(second, size, threads), reader(first, size, threads))))
    first.unlink()
    second.unlink()
    return write, read, size / seconds[0] / 1e9, size / seconds[1] / 1e9


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def writer(path: Path, size: int, threads: int) -> Callable[[], None]:
    with path.open("wb") as file:
        file.truncate(size)

    def write_all() -> None:
        content = memoryview(np.random.default_rng(0).bytes(BUFFER_BYTES))
        with closing(DirectFile(path, writes=True)) as file, ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda start: file.write(content, start), range(0, size, BUFFER_BYTES)))
        with path.open("rb") as opened:
            os.fsync(opened.fileno())

    return write_all


def reader(path: Path, size: int, threads: int) -> Callable[[], None]:
    def read_all() -> None:
        with closing(DirectFile(path)) as file, ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda start: sum(map(len, file.read(start, BUFFER_BYTES))), range(0, size, BUFFER_BYTES)))

    return read_all


def bench_saver(folder: Path, gb: float, beside: str) -> tuple[float, float, float]:
    """GB/s until the state is read, GB/s of reading it back, and seconds in all, of a checkpoint."""
    torch.manual_seed(0)
    rows = int(gb * 1e9 / 4 / 4 / 4096)
    state = {f"layer_{i}": {"master": torch.randn(rows, 4096)} for i in range(4)}
    saver, done = Saver(folder, keep=1), threading.Event()

    def go_on() -> None:
        while not done.is_set():
            if beside == "sleeps":
                time.sleep(0.001)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        saver.begin(1, weights={"w": torch.zeros(1)}, model_config={}, optimizer_state=state, trainer_state={})
        saver.wait()
    finally:
        done.set()
        thread.join()
    if saver.error is not None:
        raise saver.error
    return gb / saver.seconds_read, gb / (saver.seconds - saver.seconds_read), saver.seconds


if __name__ == "__main__":
    main()
