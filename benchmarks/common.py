"""Parts of every benchmark: flags, the check before it, interleaved timing, peak memory, the
table."""

import argparse
import datetime
import functools
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch._functorch.config
import triton

from kernels.rope import rope_frequencies
from model import ModelConfig, Transformer
from training.families.config_json import to_config_json
from training.families.names import name_in_file

ROOT = Path(__file__).parents[1]


def parse_flags(
    description: str, cpu_tokens: int | None = None, **flags: dict
) -> argparse.Namespace:
    """Parse --device (a torch.device), --tokens and the script's own flags, print the environment,
    and seed PyTorch.

    Args:
        cpu_tokens: default of --tokens on a CPU; on a GPU it is 131,072. None: no --tokens. flags:
            name of each other flag, without dashes -> arguments of `add_argument`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    if cpu_tokens is not None:
        parser.add_argument(
            "--tokens", type=int, help=f"default: 131072 on a GPU, {cpu_tokens} on a CPU"
        )
    for name, options in flags.items():
        parser.add_argument(f"--{name}", **options)
    arguments = parser.parse_args()
    if cpu_tokens is not None:
        arguments.tokens = arguments.tokens or (
            131072 if arguments.device.type == "cuda" else cpu_tokens
        )
    print(environment(arguments.device))
    torch.manual_seed(0)  # a check of errors must not fail by a rare draw
    return arguments


def environment(device: torch.device) -> dict[str, str]:
    """GPU, versions, commit and date, to be printed with every number."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """The commit of this code, such as "79ebcb8" or "79ebcb8-dirty"; "" without git or its history.

    Changes of what benchmarks write, MEMORY_REPORT.md and results, are none of the code.
    """
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    with suppress(OSError):
        found = run(["git", "describe", "--always", "--abbrev=7", "--exclude=*"]).stdout.strip()
        written = ":!MEMORY_REPORT.md", ":!benchmarks/results"
        is_dirty = found and run(["git", "diff", "--quiet", "HEAD", "--", ".", *written]).returncode
        return found + "-dirty" * bool(is_dirty)
    return ""


@torch.no_grad()
def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """|found - exact| / |exact|, Euclidean norms in float64."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def require_close(
    operation: str, found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor], tolerance: float
) -> None:
    """Exit with status 1 if the relative error of a tensor in `found` exceeds `tolerance`, or is
    not a number."""
    if not all(relative_error(ours, expected) <= tolerance for ours, expected in zip(found, exact)):
        sys.exit(f"{operation} is wrong on this machine: not measured")


def time_interleaved(
    functions: dict[str, Callable[[], object]],
    device: torch.device,
    repeats: int = 10,
    warmup: int = 2,
) -> dict[str, float]:
    """Median milliseconds of each function; the functions take turns, so that clocks and heat fall
    on all alike."""
    for _ in range(warmup):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(time_once(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


def time_once(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, the GPU's work included."""
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)  # about 1 ms: the host gets ahead, so its time is not measured
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def extra_gib(function: Callable[[], object], device: torch.device) -> float:
    """Peak allocated while `function` runs minus what was allocated before it, GiB (0 on a CPU: not
    measured)."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = function()
    torch.cuda.synchronize(device)
    del result
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def copy_bytes_per_second(device: torch.device, num_bytes: int = 2**32) -> float:
    """Bytes read plus written per second by a device-to-device copy of `num_bytes`: the ceiling set
    by memory."""
    source = torch.randint(
        0, 255, (num_bytes if device.type == "cuda" else 2**24,), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    ms = time_interleaved({"copy": lambda: target.copy_(source)}, device)["copy"]
    return 2 * source.numel() / (ms / 1000)


def compare_with_copy(
    title: str,
    implementations: dict[str, tuple[Callable, list[torch.Tensor]]],
    forward_bytes: int,
    backward_bytes: int,
    copy_rate: float,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Time memory-bound operations forward and backward, and print their share of a copy's bytes
    per second.

    Args:
        implementations: name -> (function, inputs that require gradients). Give separate inputs to
            a function that writes over them.
        forward_bytes, backward_bytes: each input read once and each output written once.
    """
    forward, backward = {}, {}
    for name, (function, inputs) in implementations.items():
        outputs = function(*inputs)
        arriving = [
            torch.randn_like(out) for out in (outputs if isinstance(outputs, tuple) else (outputs,))
        ]
        forward[name] = functools.partial(function, *inputs)
        backward[name] = functools.partial(
            torch.autograd.grad, outputs, inputs, arriving, retain_graph=True
        )
    forward_ms, backward_ms = time_interleaved(forward, device), time_interleaved(backward, device)
    results = {
        name: {
            "forward_ms": forward_ms[name],
            "forward_of_copy": forward_bytes / forward_ms[name] * 1000 / copy_rate,
            "forward_extra_gib": extra_gib(forward[name], device),
            "backward_ms": backward_ms[name],
            "backward_of_copy": backward_bytes / backward_ms[name] * 1000 / copy_rate,
            "backward_extra_gib": extra_gib(backward[name], device),
        }
        for name in implementations
    }
    print_results(title, results)
    return results


def compiled(function: Callable, device: torch.device) -> Callable:
    """`function` under torch.compile, with a backward that can be run again and again."""
    torch._functorch.config.donated_buffer = False  # donated buffers rule out retain_graph=True
    return torch.compile(
        function, dynamic=False, backend="inductor" if device.type == "cuda" else "aot_eager"
    )


def liger(name: str, device: torch.device):
    """The module liger_kernel.ops.`name`; prints why and returns None without a GPU or without
    Liger."""
    if device.type != "cuda":
        print("Liger: needs a GPU")
        return None
    try:
        return importlib.import_module(f"liger_kernel.ops.{name}")
    except ImportError as error:
        print(f"Liger: not installed ({error})")
        return None


def print_results(
    title: str, results: dict[str, dict[str, float]], header: list[str] | None = None
) -> None:
    """Print a table with a row for each name; without `header`, the values' names head the
    columns."""
    header = header or [key.replace("_", " ") for key in next(iter(results.values()))]
    print_table(title, ["", *header], [[name, *row.values()] for name, row in results.items()])


def print_table(title: str, header: list[str], rows: list[list]) -> None:
    """Print a Markdown table, floats with three decimals."""
    cells = [[f"{c:.3f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    print(f"\n### {title}\n")
    for row in (header, ["---"] * len(header), *cells):
        print("| " + " | ".join(row) + " |")


def print_json(operation: str, device: torch.device, out: Path | None = None, /, **results) -> None:
    """Print the last line of a benchmark as JSON: operation, environment and everything measured.

    The line is also appended to the file `out`, if there is one.
    """
    line = json.dumps({"operation": operation, **environment(device), **results})
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


def peer_model(config: ModelConfig, device: torch.device) -> torch.nn.Module:
    """transformers' model with weights drawn as ours, bf16, with Liger's kernels on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if device.type == "cuda":  # Liger's kernels run nowhere else
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_config_json(config))).to(
            torch.bfloat16
        )
    rotary = model.model.rotary_emb
    model.to_empty(device=device)
    model.tie_weights()  # `to_empty` has given the head a matrix of its own
    frequencies = rope_frequencies(config.rotary_width, config.rope_theta, device=device).float()
    rotary.inv_freq = rotary.original_inv_freq = frequencies
    declared = {name_in_file(name): parameter for name, parameter in config.parameters().items()}
    holder = argparse.Namespace(config=config, declared=declared)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            Transformer.initialize_parameter(holder, name, parameter)
    return model
