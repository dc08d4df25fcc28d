"""Rates at which a disk is written past the page cache: a file alone, and a checkpoint beside
training.

`python -m benchmarks.bench_disk DIR`

Threads write a file in chunks of 8 MiB. Then a checkpoint of random state in host memory is written
and flushed, once while another thread sleeps and once while it runs Python all the time, as a
training step may. Everything lies in a new folder in DIR, which is deleted.
"""

import argparse
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import print_json, print_table
from training.checkpoint.saver import Saver
from training.host.direct import BUFFER_BYTES, DirectFile
from training.host.files import flush


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=6.0, help="of a file, and of the checkpoint")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_disk_", dir=arguments.folder))
    try:
        size = int(arguments.gb * 1e9) // BUFFER_BYTES * BUFFER_BYTES
        disk = {
            threads: bench_disk(folder / "file", size, threads) for threads in arguments.threads
        }
        saver = {
            beside: bench_saver(folder / beside, arguments.gb, beside)
            for beside in ("sleeps", "runs Python")
        }
    finally:
        shutil.rmtree(folder)
    print_table(
        "GB/s past the page cache",
        ["threads", "write"],
        [[threads, rate] for threads, rate in disk.items()],
    )
    columns = ["beside a thread that", "GB/s until read", "seconds in all"]
    print_table(
        f"a checkpoint of {arguments.gb:g} GB",
        columns,
        [[beside, *row] for beside, row in saver.items()],
    )
    print_json("disk", torch.device("cpu"), gb=arguments.gb, disk=disk, saver=saver)


def bench_disk(path: Path, size: int, threads: int) -> float:
    """GB/s at which a file of that size is written and flushed; the file is deleted."""
    with path.open("wb") as opened:
        opened.truncate(size)
    content = memoryview(np.random.default_rng(0).bytes(BUFFER_BYTES))
    began = time.perf_counter()
    with closing(DirectFile(path)) as file, ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: file.write(content, start), range(0, size, BUFFER_BYTES)))
    flush(path)
    seconds = time.perf_counter() - began
    path.unlink()
    return size / seconds / 1e9


def bench_saver(folder: Path, gb: float, beside: str) -> tuple[float, float]:
    """GB/s until a checkpoint's state is read, and seconds until it is complete."""
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
        saver.begin(
            1,
            weights={"w": torch.zeros(1)},
            model_config={},
            optimizer_state=state,
            trainer_state={},
        )
        saver.wait()
    finally:
        done.set()
        thread.join()
    if saver.error is not None:
        raise saver.error
    return gb / saver.seconds_read, saver.seconds


if __name__ == "__main__":
    main()
