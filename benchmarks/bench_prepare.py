"""Prepare a corpus and open it as a run does: `python -m benchmarks.bench_prepare --tokenizer DIR
--gb 1`.

The corpus is this machine's Python sources, the standard library's and installed packages', over
and over. It lies in .jsonl files of a folder that is deleted at the end. Reported are

- the rate of preparing it with all workers, and the rate per second of one process's processor
  time. Workers share the machine and its memory bandwidth with others; processor time does not
  count that,
- the rate per second of one process's processor time by format: the same rows in files of each
  kind, in turns,
- seconds and resident memory of opening the set as train.py does, and of reading steps from it: for
  this set, and for a set of `--started_gb` of text. Its parts are hard links to this set's: it
  takes no disk, but every part is opened.
"""

import argparse
import gzip
import itertools
import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow
from pyarrow import parquet

from benchmarks.common import commit
from training.data import prepare as preparing
from training.data.prepared import INDEX, hash_of_index
from training.data.sources import Reading
from training.host.errors import UserError

GB = 10**9
OPEN = """
import json, resource, sys, time
from training.data.corpus import load_corpus
from training.data.loader import PackedLoader
from training.data.tokenizer import load_tokenizer
def resident():  # anonymous memory, and pages of files that are mapped now
    status = open("/proc/self/status").read()
    return {name: int(status.split(name + ":")[1].split()[0]) >> 10 for name in ("RssAnon", "RssFile")}
folder, file, kind = sys.argv[1:]
tokenizer = load_tokenizer(file)
before, start = resident(), time.perf_counter()
store, _, packing = load_corpus(
    [folder], tokenizer, tokenizer.vocab_size, validation_fraction=0.02, context_length=131072, seed=0, packing=kind,
    overlong="split" if kind == "best_fit" else None,
)
loader = PackedLoader(store, packing, 1)
identity = loader.state_dict()
opened, seconds = resident(), time.perf_counter() - start
start = time.perf_counter()
for _ in range(100):
    loader.next_step()
print(json.dumps({
    "packing": kind, "documents": len(store.lengths), "million_tokens": round(loader.num_tokens / 1e6),
    "open_seconds": round(seconds, 2), "mib_before": before, "mib_opened": opened, "mib_after_100_steps": resident(),
    "milliseconds_a_sequence": round(10 * (time.perf_counter() - start), 1),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json or its folder")
    parser.add_argument("--gb", type=float, default=1.0, help="10^9 bytes of text")
    parser.add_argument("--started_gb", type=float, default=10.0)
    parser.add_argument(
        "--formats_mb", type=float, default=50.0, help="10^6 bytes of text in each format; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=3, help="times that each format is prepared")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--folder",
        help="where the corpus and its set are written; default: the system's for such files",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report(arguments, Path(folder))


def report(arguments: argparse.Namespace, folder: Path) -> None:
    source, made, large = folder / "corpus", folder / "set", folder / "large"
    size = write_corpus(source, int(arguments.gb * GB))
    seconds, peak = run_prepare(source, made, arguments)
    index = json.loads((made / INDEX).read_text())
    core_bytes, core_tokens = rate_of_a_core(source, folder, arguments.tokenizer)
    result = {
        "commit": commit(), "gb": size / GB, "workers": arguments.workers,
        "seconds": round(seconds, 1),
        "mb_per_second": round(size / 1e6 / seconds, 2),
        "tokens_per_second": round(index["tokens"] / seconds),
        "mb_per_core_second": round(core_bytes / 1e6, 2),
        "tokens_per_core_second": round(core_tokens),
        "peak_mib": peak,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    if arguments.formats_mb:
        for result in rates_of_formats(
            folder / "formats", int(arguments.formats_mb * 1e6), arguments
        ):
            print(json.dumps(result), flush=True)
    copy_parts(made, large, round(arguments.started_gb * GB / size))
    for each in (made, large):
        for kind in ("concatenate", "best_fit"):
            command = [sys.executable, "-c", OPEN, str(each), arguments.tokenizer, kind]
            print(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(),
                flush=True,
            )


def run_prepare(source: Path, made: Path, arguments: argparse.Namespace) -> tuple[float, int]:
    """Seconds of the command, and the most MiB of its processes together, sampled every second."""
    command = [sys.executable, "-m", "training.data", "prepare", str(source), str(made)]
    command += ["--tokenizer", arguments.tokenizer, "--workers", str(arguments.workers)]
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(1)
            peak = max(peak, sum(map(anonymous_mib, processes_of(process.pid))))
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - start, peak


def processes_of(group: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True
    ).stdout.split()
    return [int(pid) for pid, of in zip(found[::2], found[1::2]) if int(of) == group]


def anonymous_mib(pid: int) -> int:
    """Anonymous memory of a process, 0 if it has ended. Forks count pages that they share with
    their parent."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) >> 10
    except (OSError, IndexError):
        return 0


def write_corpus(folder: Path, size: int) -> int:
    """Write .jsonl files of at most 250 MB with a line {"text": source} for each source file.
    Returns the bytes."""
    folder.mkdir()
    roots = [Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages())]
    lines = []
    for file in sorted({file for root in roots for file in root.rglob("*.py")}):
        try:
            text = file.read_text()
        except (OSError, ValueError):
            continue
        if text.strip() and "\0" not in text:
            lines.append(
                json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "ignore") + b"\n"
            )
    if not lines:
        raise UserError("this machine has no Python sources")
    written = 0
    for number in range(size // (250 * 10**6) + 1):
        with (folder / f"{number:04}.jsonl").open("wb") as stream:
            while stream.tell() < 250 * 10**6 and written < size:
                written += stream.write(lines[(written * 7919) % len(lines)])
    return written


def rate_of_a_core(source: Path, folder: Path, tokenizer: str) -> tuple[float, float]:
    """(bytes, tokens) per second of processor time, in one process that makes three parts."""
    preparing._open_reader(tokenizer, Reading(), None)
    parts = [pieces for _, pieces in zip(range(3), preparing._plan(sorted(source.iterdir())))]
    start = time.process_time()
    tokens = sum(
        preparing._make_part(folder / f"one-{i}", pieces)["tokens"]
        for i, pieces in enumerate(parts)
    )
    seconds = time.process_time() - start
    return sum(
        piece[4] - piece[3] for pieces in parts for piece in pieces
    ) / seconds, tokens / seconds


def rates_of_formats(folder: Path, size: int, arguments: argparse.Namespace) -> list[dict]:
    """Tokens per second of processor time for the same rows in each format: the median of all
    rounds, and its range."""
    preparing._open_reader(arguments.tokenizer, Reading(), None)
    rows = write_corpus(folder, size) and (folder / "0000.jsonl").read_bytes()
    table = pyarrow.Table.from_pylist([json.loads(line) for line in rows.splitlines()])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows, 6))
    (folder / "a.jsonl.zst").write_bytes(pyarrow.compress(rows, "zstd", asbytes=True))
    (folder / "a.json").write_bytes(b"[" + b",".join(rows.splitlines()) + b"]")
    parquet.write_table(table, folder / "a.parquet", row_group_size=1000)
    with pyarrow.ipc.new_stream(folder / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)  # rows of a batch in files of `datasets`
    found: dict[str, list[float]] = {}
    for number, file in itertools.product(range(arguments.rounds), sorted(folder.iterdir())):
        start = time.process_time()
        made = [
            preparing._make_part(folder / f"{number}-{i}", part)
            for i, part in enumerate(preparing._plan([file]))
        ]
        rate = sum(part["tokens"] for part in made) / (time.process_time() - start)
        found.setdefault("".join(file.suffixes), []).append(rate)
    base = median(found[".jsonl"])
    return [
        {
            "format": name,
            "tokens_per_core_second": round(median(rates)),
            "of_jsonl": round(median(rates) / base, 3),
            "range": [round(min(rates)), round(max(rates))],
        }
        for name, rates in found.items()
    ]


def copy_parts(made: Path, large: Path, times: int) -> None:
    """Make a set that has each part of `made` as often as `times`."""
    large.mkdir()
    index = json.loads((made / INDEX).read_text())
    parts = []
    for number in range(times):
        for part in index["parts"]:
            name = f"part-{number:04x}{part['name'][-12:]}"
            for suffix in (".tokens", ".documents", ".json"):
                os.link(made / (part["name"] + suffix), large / (name + suffix))
            parts.append({**part, "name": name})
    index["parts"] = parts
    (large / INDEX).write_text(json.dumps({**index, "sha256": hash_of_index(index)}))


if __name__ == "__main__":
    main()
