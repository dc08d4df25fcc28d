"""Write the table of MEMORY_REPORT.md, and the picture of README.md, anew: `python -m benchmarks.memory_report`.

The table comes from benchmarks/results/train_step_*.jsonl, which hold the last lines that benchmarks.bench_train_step
printed. Where several measured the same, the last in the order of names is shown. The table stands between
"<!-- budgets -->" and "<!-- end -->"; the text around it is written by hand. The picture comes from the latest
profile_step_*.json that profile_memory.py measured with all layers.
"""

import json
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path

from model import MODEL_SIZES
from training.host.files import replace_file
from training.host.sizes import parse_bytes
from training.memory.execution import Execution
from training.memory.profiler import MeasuredStage, draw_stages
from training.memory.reports import compared_executions
from training.memory.stages import Stage
from training.run.build import step_on_meta

ROOT = Path(__file__).parents[1]
REPORT, RESULTS = ROOT / "MEMORY_REPORT.md", ROOT / "benchmarks" / "results"
PICTURE = RESULTS / "step_of_131072_tokens.png"
PEER = "peer"


def main(argv: list[str]) -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(argv)  # no flags
    replace_file(REPORT, regenerate(REPORT.read_text()))
    draw_picture()


def regenerate(report: str) -> str:
    """Returns the report with the table between its markers replaced."""
    header, *body = [f"| {' | '.join(row)} |" for row in budgets()]
    table = "\n".join(["<!-- budgets -->", header, re.sub(r"[^|]+", " --- ", header), *body, "<!-- end -->"])
    return re.sub("<!-- budgets -->\n.*?<!-- end -->", lambda _: table, report, flags=re.DOTALL)


def results(pattern: str) -> list[dict]:
    """The JSON object of each line of the files that match, in the order of their names."""
    return [json.loads(line) for path in sorted(RESULTS.glob(pattern)) for line in path.open()]


def step_runs() -> list[dict]:
    """Runs of benchmarks.bench_train_step with the whole 4B on one GPU and one document per sequence.

    Leaves out runs with --save_to: the report's text compares their steps with and without a save. A setting for which
    "auto" chose flash-attn-4 is named as if it had been asked for: "24GB+flash-attn-4".
    """
    others = ("packed", "num_layers", "save_to")
    sizes = ("context_parallel_size", "tensor_parallel_size")
    runs = [
        run for run in results("train_step_*.jsonl")
        if run["model_size"] == "4B" and not any(run.get(name) for name in others)
        and all(run.get(size, 1) == 1 for size in sizes)
    ]  # fmt: skip
    for run in runs:
        run["results"] = {kernel_named(setting, result): result for setting, result in run["results"].items()}
    return runs


def kernel_named(setting: str, result: dict) -> str:
    is_chosen = re.search(r"attention kernel +flash-attn-4", result.get("plan", ""))
    return f"{setting}+flash-attn-4" if is_chosen else setting


def differing(predicted: float, measured: float) -> str:
    return f"{predicted:.2f} ({predicted / measured - 1:+.1%})"


def cap(setting: str, run: dict) -> str:
    """A memory budget as text; of a run with compact optimizer state that too, and its host budget."""
    text = "none" if setting == "auto" else setting.replace("GB", " GiB")
    if run.get("optimizer_state", "float32") == "compact":
        text += f", compact state, {run['host_budget'].replace('GB', ' GiB')} of the host"
    return text


def date(run: dict) -> str:
    return ", ".join(filter(None, (run["date"], run.get("commit"))))


def budgets() -> list[list[str]]:
    rows = {}
    for run in step_runs():
        gpu, context = run["gpu"].split()[1], run["context_length"]
        for setting, result in run["results"].items():
            if setting == PEER or "+" in setting:
                continue
            uncapped = run["results"].get("auto")
            limit = cap(setting, run)
            rows[gpu, context, limit] = [  # the last run's
                gpu, f"{context:,}", limit,
                differing(result["predicted_gib"], result["peak_gib"]), f"{result['peak_gib']:.2f}",
                f"{result['reserved_gib']:.2f}", f"{result['predicted_seconds']:.1f}", f"{result['seconds']:.1f}",
                f"{result['seconds'] / uncapped['seconds']:.2f}" if uncapped else "-", f"{result['mfu']:.1%}",
                f"{result['host_gib']:.1f}", date(run),
            ]  # fmt: skip
    header = ["GPU", "context", "cap", "peak GiB, predicted", "measured", "reserved", "s per step, predicted",
              "measured", "÷ uncapped", "MFU", "host GiB", "date, commit"]  # fmt: skip
    return [header, *(rows[key] for key in sorted(rows))]


# The picture


def latest_of_peer() -> dict:
    return [run for run in step_runs() if PEER in run["results"]][-1]


def whole_step() -> dict:
    """The last step of 131,072 tokens within 24 GiB that profile_memory.py measured with all layers."""
    return [result for result in results("profile_step_*.json") if result["settings"]["num_layers"] is None][-1]


def stages_of_peer() -> list[Stage]:
    """Predicts the peer's step: every layer checkpointed, the loss chunked, two bf16 moments per parameter.

    The peer has no float32 masters.
    """
    model = MODEL_SIZES["4B"]
    step = step_on_meta(model, 131_072, given=Execution(attention_backend="cudnn"))
    stages = step.stages(compared_executions(step)["checkpointing, chunked loss"])
    moments = {"optimizer": 4 * model.num_parameters()}
    return [replace(stage, categories=stage.categories | moments) for stage in stages]


def draw_picture() -> None:
    """Draw a step of 131,072 tokens. Left: the peer, whose peak was measured. Right: within 24 GiB, also measured."""
    from matplotlib.figure import Figure  # a dependency of development

    result, peak = whole_step(), latest_of_peer()["results"][PEER]["peak_gib"]
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_stages(left, stages_of_peer())
    left.axhline(peak, color="k", label="measured peak")
    predicted = [Stage(**stage) for stage in result["predicted"]]
    measured = [MeasuredStage(**stage) for stage in result["measured"]]
    draw_stages(right, predicted, measured, parse_bytes(result["settings"]["memory_budget"]))
    left.set(
        title=f"transformers + Liger, checkpointed: {peak:.1f} GiB (areas predicted, line measured peak)",
        ylabel="GiB, peak of each stage",
    )
    right.set(title="Fathom, planned for 24 GiB (areas predicted, line measured)")
    right.legend(loc="upper right", fontsize=8)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
