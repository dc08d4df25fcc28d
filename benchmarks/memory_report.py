"""Write the tables of MEMORY_REPORT.md anew: `python -m benchmarks.memory_report`.

Measured tables come from what was left in benchmarks/results/: train_step_*.jsonl, the last lines of
benchmarks.bench_train_step, and profile_max_*.json, of profile_memory.py --find_max_context --measure --json. Predicted
ones are computed here.
A table stands between "<!-- name -->" and "<!-- end -->"; the text around it is written by hand.
"""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from model import MODEL_SIZES
from profile_memory import COMPARED_BUDGET, COMPARED_CONTEXTS, compared_choices, step_of
from training.cost_model import Step
from training.gpus import GPUS, scale_rates
from training.memory import DRIVER_BYTES, parse_bytes
from training.planner import find_max_context, make_plan

ROOT = Path(__file__).parents[1]
REPORT, RESULTS = ROOT / "MEMORY_REPORT.md", ROOT / "benchmarks" / "results"
GIB = 2**30
HOSTS = (64 * GIB, 110 * GIB, math.inf)  # bytes to pin
PEER = "peer"


def main() -> None:
    REPORT.write_text(regenerate(REPORT.read_text()))


def regenerate(report: str) -> str:
    """The report with each table between markers replaced.

    Raises:
        KeyError: a marker that names no table.
    """

    def table(match: re.Match) -> str:
        rows = TABLES[match[1]]()
        header, *body = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([match[0].splitlines()[0], header, "|" + " --- |" * len(rows[0]), *body, "<!-- end -->"])

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, report, flags=re.DOTALL)


# Measured


@functools.cache
def step_results() -> dict[tuple[int, str], dict]:
    """Of each run of benchmarks.bench_train_step with the 4B: by context and setting."""
    runs = [json.loads(line) for path in sorted(RESULTS.glob("train_step_*.jsonl")) for line in path.open()]
    return {
        (run["context_length"], setting): result
        for run in runs
        if run["model_size"] == "4B"
        for setting, result in run["results"].items()
    }


def budgets() -> list[list[str]]:
    rows = [["context", "cap", "peak GiB, predicted", "measured", "reserved", "s a step, predicted", "measured",
             "÷ uncapped", "MFU", "host GiB"]]  # fmt: skip
    results = step_results()
    for (context, setting), result in sorted(results.items()):
        if setting == PEER or "+" in setting:
            continue
        uncapped = results.get((context, "auto"))
        ratio = f"{result['seconds'] / uncapped['seconds']:.2f}" if uncapped else "-"
        peak, predicted = result["peak_gib"], result["predicted_gib"]
        rows.append([
            f"{context:,}", "none" if setting == "auto" else setting.replace("GB", " GiB"),
            f"{predicted:.2f} ({predicted / peak - 1:+.1%})", f"{peak:.2f}", f"{result['reserved_gib']:.2f}",
            f"{result['predicted_seconds']:.1f}", f"{result['seconds']:.1f}", ratio, f"{result['mfu']:.1%}",
            f"{result['host_gib']:.1f}",
        ])  # fmt: skip
    return rows


def against_the_peer() -> list[list[str]]:
    names = {
        "auto": "Fathom, `--memory_budget auto`", "auto+flash-attn-4": "... `--attention_backend flash-attn-4`",
        PEER: "transformers 5 + Liger 0.8.5, gradient checkpointing",
    }  # fmt: skip
    rows = [["131,072 tokens", "s a step", "÷ transformers + Liger", "tokens/s", "MFU", "peak GiB"]]
    peer = step_results()[131_072, PEER]["seconds"]
    for setting, name in names.items():
        result = step_results()[131_072, setting]
        rows.append([
            name, f"{result['seconds']:.2f}", f"{result['seconds'] / peer:.3f}", f"{result['tokens_per_second']:,.0f}",
            f"{result['mfu']:.1%}", f"{result['peak_gib']:.1f}",
        ])  # fmt: skip
    return rows


def longest_measured() -> list[list[str]]:
    rows = [["model, budgets", "predicted", "measured", "measured ÷ predicted"]]
    for path in sorted(RESULTS.glob("profile_max_*.json")):
        result = json.loads(path.read_text())
        settings = result["settings"]
        rows.append([
            f"{settings['model_size']}, {settings['memory_budget']} and {settings['host_budget']} of the host",
            f"{result['predicted_context']:,}", f"{result['measured_context']:,}", f"{result['ratio']:.3f}",
        ])  # fmt: skip
    return rows


# Predicted


def step_of_4b(context_length: int, backend: str = "cudnn") -> Step:
    return step_of(replace(MODEL_SIZES["4B"], attention_backend=backend), context_length)


def long_contexts() -> list[list[str]]:
    """Plans of contexts whose step takes longer than anybody has measured."""
    rows = [["context", "cap GiB", "peak GiB", "pinned host GiB", "s a step", "layer inputs", "attention outputs"]]
    for context, budget in ((524_288, 80), (1_048_576, 139)):
        plan = make_plan(step_of_4b(context), budget * GIB, HOSTS[1])
        places = [
            ", ".join(
                f"{count} {place}"
                for place, count in Counter(getattr(p, name) for p in plan.choices.placements).items()
            )
            for name in ("input", "attention")
        ]
        sizes = plan.peak.bytes, plan.host_bytes
        rows.append(
            [f"{context:,}", str(budget), *(f"{size / GIB:.1f}" for size in sizes), f"{plan.seconds:.0f}", *places]
        )
    return rows


def scenarios() -> list[list[str]]:
    ways = compared_choices(MODEL_SIZES["4B"].num_hidden_layers)
    rows = [["tokens", "logits, bf16", *ways, "planned for 24 GiB: GPU", "pinned host", "s a step"]]
    for context in COMPARED_CONTEXTS:
        step = step_of_4b(context)
        peaks = [f"{step.peak(choices).bytes / GIB:.1f}" for choices in ways.values()]
        logits = f"{step.config.projected_logits_bytes(context) / GIB:.2f}"
        try:
            plan = make_plan(step, parse_bytes(COMPARED_BUDGET), HOSTS[1])
            planned = [f"{plan.peak.bytes / GIB:.1f}", f"{plan.host_bytes / GIB:.1f}", f"{plan.seconds:.1f}"]
        except ValueError:
            planned = ["does not fit", "-", "-"]
        rows.append([f"{context:,}", logits, *peaks, *planned])
    return rows


def hardware() -> list[list[str]]:
    hosts = [f"with {host / GIB:.0f} GiB of host" if host < math.inf else "with any host" for host in HOSTS]
    rows = [["GPU", "usable GiB", *(f"longest context {host}" for host in hosts), "131,072 tokens: s a step"]]
    for name in ("RTX4090", "A100-40GB", "L40S", "A100-80GB", "H100", "H200", "B200"):
        gpu = GPUS[name]
        step, usable = step_of_4b(131_072, gpu.attention_backend), gpu.memory_bytes - DRIVER_BYTES
        longest = [f"{find_max_context(step, usable, host):,}" for host in HOSTS]
        try:
            seconds = f"{make_plan(step, usable, HOSTS[1], scale_rates(gpu, gpu.attention_backend)).seconds:.0f}"
        except ValueError:
            seconds = "does not fit"
        rows.append([name, f"{usable / GIB:.1f}", *longest, seconds])
    return rows


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    table.__name__: table for table in (budgets, against_the_peer, longest_measured, long_contexts, scenarios, hardware)
}


if __name__ == "__main__":
    main()
