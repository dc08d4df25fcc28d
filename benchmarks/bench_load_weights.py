"""Seconds and host memory of starting from a released folder: `python -m
benchmarks.bench_load_weights --folder DIR`.

If the folder does not exist, random weights in the shape of --model_size are written first: bf16,
in shards, as released. Then a model and its optimizer are built as train.py builds them, and
filled. Only the filling is timed: from the files to masters and weights in their places.
`--drop_cache` asks the kernel to drop the files from its page cache.
"""

import contextlib
import json
import os
import threading
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
from safetensors.torch import save_file

from model import MODEL_SIZES, Transformer
from training.checkpoint.state import read_weights
from training.checkpoint.weights import find_weights
from training.families.config_json import to_config_json
from training.families.names import name_in_file
from training.memory.step import PackedDocuments
from training.parallel.world import join_world
from training.run.build import build_model
from training.run.decide import choose_model, recipe_of
from training.run.recipe import check_machine
from training.run.settings import TrainConfig

SHARD_BYTES = 4 * 2**30


def write_folder(folder: Path, size: str, device: torch.device) -> None:
    """Write random weights of that shape, a shard at a time, drawn on the device."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        parameters = dict(Transformer(MODEL_SIZES[size]).named_parameters())
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        shard[name_in_file(name)] = weight.cpu()
        if (
            sum(weight.nbytes for weight in shard.values()) > SHARD_BYTES
            or name == list(parameters)[-1]
        ):
            file = f"model-{len(set(places.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(to_config_json(MODEL_SIZES[size])))


def forget(folder: Path) -> None:
    """Have the kernel drop the folder's files from its page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def watching_memory():
    """A list of one number: the most bytes by which the process's resident memory has grown."""
    peak, done = [0], threading.Event()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def watch(start: int) -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], resident() - start)

    thread = threading.Thread(target=watch, args=(resident(),))
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="is written if it does not exist"
    )
    parser.add_argument(
        "--model_size", default="4B", choices=MODEL_SIZES, help="shape of a folder that is written"
    )
    parser.add_argument("--context_length", type=int, default=65_536)
    parser.add_argument("--memory_budget", help="train.py's flag")
    parser.add_argument("--host_budget")
    parser.add_argument("--drop_cache", action="store_true")
    flags = parser.parse_args()
    lengths = {"context_length": flags.context_length, "batch_size": 1}
    budgets = {"memory_budget": flags.memory_budget, "host_budget": flags.host_budget}
    config = TrainConfig(init_from=str(flags.folder), **lengths, **budgets)
    with join_world("auto") as world:
        if world.is_main and not flags.folder.exists():
            write_folder(flags.folder, flags.model_size, world.device)
        world.sum(0.0)  # all ranks find it written
        recipe = recipe_of(config, choose_model(config), world)
        check_machine(recipe, world)
        documents = PackedDocuments.one_each(flags.context_length, 1)
        model, optimizer, plan = build_model(recipe, world, documents)
        for (
            weight
        ) in optimizer.weights().values():  # a CPU provides memory only when it is written to
            weight.detach().zero_()
        if flags.drop_cache:
            forget(flags.folder)
        torch.get_device_module(world.device).synchronize()
        with watching_memory() as peak:
            began = time.perf_counter()
            read_weights(optimizer, find_weights(flags.folder, model.declared))
            torch.get_device_module(world.device).synchronize()
            seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in flags.folder.glob("*.safetensors"))
        cache = "dropped from" if flags.drop_cache else "perhaps in"
        if not world.is_main:
            return
        print(
            f"{size / 1e9:.2f} GB, {cache} the page cache: {seconds:.1f} s, "
            f"{size / seconds / 1e9:.2f} GB/s; "
            f"host memory {peak[0] / 2**20:.0f} MiB above what was there; state on "
            f"{world.device.type}: "
            f"{plan.execution.gpu_state_bytes:.3g} bytes; torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
