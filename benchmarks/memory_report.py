"""Write the tables of MEMORY_REPORT.md, and the picture of README.md, anew: `python -m benchmarks.memory_report`.

Tables come from files in benchmarks/results/. train_step_*.jsonl holds the last lines that benchmarks.bench_train_step
printed, fp8_step_*.jsonl what it printed with and without FP8. profile_memory.py wrote the others to --json:
profile_step_*.json, profile_compare_*.json (--compare --measure) and profile_max_*.json (--find_max_context --measure).
Where several files measured the same, the last in the order of names is shown. A table stands between "<!-- name -->"
and "<!-- end -->"; the text around it is written by hand.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kernels.attention import KINDS
from model import MODEL_SIZES
from training.host.sizes import GIB, parse_bytes
from training.memory.cost_model import Stage, forward_flops
from training.memory.execution import Execution
from training.memory.machine import GPUS
from training.memory.profiler import CATEGORIES, MeasuredStage, draw_stages
from training.memory.reports import compared_executions
from training.run.build import step_on_meta

ROOT = Path(__file__).parents[1]
REPORT, RESULTS = ROOT / "MEMORY_REPORT.md", ROOT / "benchmarks" / "results"
PICTURE = RESULTS / "step_of_131072_tokens.png"
PEER = "peer"


def main() -> None:
    REPORT.write_text(regenerate(REPORT.read_text()))
    draw_picture()


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


def results(pattern: str) -> list[dict]:
    """The JSON object of each line of the files that match, in the order of their names."""
    return [json.loads(line) for path in sorted(RESULTS.glob(pattern)) for line in path.open()]


def step_runs(packed: bool = False, shared: bool = False) -> list[dict]:
    """Runs of benchmarks.bench_train_step with the 4B; `shared`: GPUs share a sequence or matrices.

    Leaves out runs with --save_to: the report's text compares their steps with and without a save. A setting for which
    "auto" chose flash-attn-4 is named as if it had been asked for: "24GB+flash-attn-4".
    """
    runs = [run for run in results("train_step_*.jsonl") if run["model_size"] == "4B" and run["packed"] == packed]
    runs = [run for run in runs if not run.get("num_layers") and not run.get("save_to")]
    sizes = ("context_parallel_size", "tensor_parallel_size")
    runs = [run for run in runs if any(run.get(size, 1) > 1 for size in sizes) == shared]
    for run in runs:
        run["results"] = {kernel_named(setting, result): result for setting, result in run["results"].items()}
    return runs


def kernel_named(setting: str, result: dict) -> str:
    is_chosen = re.search(r"attention kernel +flash-attn-4", result.get("plan", ""))
    return f"{setting}+flash-attn-4" if is_chosen else setting


def differing(predicted: float, measured: float) -> str:
    return f"{predicted:.2f} ({predicted / measured - 1:+.1%})"


def cap(setting: str, run: dict | None = None) -> str:
    """A memory budget as text. With a run of compact optimizer state, that too, and its host budget."""
    text = "none" if setting == "auto" else setting.replace("GB", " GiB")
    if run and run.get("optimizer_state", "float32") == "compact":
        text += f", compact state, {run['host_budget'].replace('GB', ' GiB')} of the host"
    return text


def cap_and_kind(setting: str, run: dict) -> tuple[str, str]:
    limit, _, kind = setting.partition("+")
    return cap(limit, run), kind


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


def packed_documents() -> list[list[str]]:
    rows = {}
    for run in step_runs(packed=True):
        for setting, result in run["results"].items():
            timed = result["seconds_of_each_step"][-result.get("timed_steps", run["steps"] - 1) :]
            mean, others = run.get("mean_length"), "heavy-tailed" if run.get("heavy_tailed") else "files"
            documents = f"mean {mean:,}" if mean else others
            rows[run["ranks"], run["context_length"], documents, setting] = [  # the last run's
                str(run["ranks"]), f"{run['context_length']:,}", documents, cap(setting),
                ", ".join(f"{seconds:.1f}" for seconds in timed),
                differing(result["predicted_seconds"], result["seconds"]), f"{result['seconds']:.2f}",
                differing(result["predicted_gib"], result["peak_gib"]), f"{result['peak_gib']:.2f}",
                f"{result['mfu']:.1%}", date(run),
            ]  # fmt: skip
    header = ["GPUs", "context", "documents", "cap", "timed steps, s", "mean s per step, predicted", "measured",
              "peak GiB, predicted", "measured", "MFU", "date, commit"]  # fmt: skip
    return [header, *(rows[key] for key in sorted(rows))]


def shared_sequences() -> list[list[str]]:
    """The latest steps of GPUs that share a sequence or matrices.

    They are compared with one GPU's step without a cap, its latest on that day or before.
    """
    rows = {}
    for run in step_runs(shared=True):
        context = run["context_length"]
        alone = {
            (before["context_length"], setting): result["seconds"]
            for before in step_runs() if before["date"] <= run["date"]
            for setting, result in before["results"].items() if setting.startswith("auto")
        }  # fmt: skip
        for setting, result in run["results"].items():
            limit, plus, kind = setting.partition("+")
            one = alone.get((context, f"auto{plus}{kind}"))
            matrices = run.get("tensor_parallel_size", 1) > 1
            split, kernel = ("matrices", "AllReduce") if matrices else ("sequence", "SendRecv")
            sent = min((rank[kernel] for rank in result.get("communication", ())), default=None)
            host = result.get("host_gib")
            rows[run["ranks"], split, kind, context, limit] = [
                str(run["ranks"]), split, kind or "full", f"{context:,}", cap(limit),
                differing(result["predicted_gib"], result["peak_gib"]), f"{result['peak_gib']:.2f}",
                differing(result["predicted_seconds"], result["seconds"]), f"{result['seconds']:.2f}",
                f"{one / result['seconds']:.2f}" if one else "-", f"{sent:.2f}" if sent else "-",
                f"{result['mfu']:.1%}", f"{host:.1f}" if host else "-", date(run),
            ]  # fmt: skip
    header = ["GPUs", "share", "attention", "context", "cap", "peak GiB per GPU, predicted", "measured",
              "s per step, predicted", "measured", "one GPU ÷ it", "exchange, s", "MFU", "host GiB per GPU",
              "date, commit"]  # fmt: skip
    return [header, *(rows[key] for key in sorted(rows))]


def latest_of_peer() -> dict:
    return [run for run in step_runs() if PEER in run["results"]][-1]


def against_the_peer() -> list[list[str]]:
    """The latest steps of the peer, and ours of the same day."""
    names = {
        "auto": "Fathom, cuDNN's attention", "24GB": "the same within 24 GiB",
        "auto+flash-attn-4": "Fathom, flash-attn-4's attention", "24GB+flash-attn-4": "the same within 24 GiB",
        PEER: "transformers 5 + Liger 0.8.5, gradient checkpointing",
    }  # fmt: skip
    rows = [["131,072 tokens", "s per step", "÷ transformers + Liger", "tokens/s", "MFU", "peak GiB", "date, commit"]]
    of_peer = latest_of_peer()
    same = [
        each for each in step_runs()
        if all(each[key] == of_peer[key] for key in ("date", "context_length", "optimizer_state"))
    ]  # fmt: skip
    run = {setting: result | {"date": date(each)} for each in same for setting, result in each["results"].items()}
    for setting, name in names.items():
        result = run[setting]
        rows.append([
            name, f"{result['seconds']:.2f}", f"{result['seconds'] / run[PEER]['seconds']:.3f}",
            f"{result['tokens_per_second']:,.0f}", f"{result['mfu']:.1%}", f"{result['peak_gib']:.1f}", result["date"],
        ])  # fmt: skip
    return rows


def sparse() -> list[list[str]]:
    """The latest steps with chosen blocks or windows, compared with the latest step with attention to everything."""
    rows = [["attention", "context", "cap", "peak GiB, predicted", "measured", "s per step, predicted", "measured",
             "÷ dense", "MFU", "host GiB", "date, commit"]]  # fmt: skip
    latest = {
        (run["context_length"], *cap_and_kind(setting, run)): (run, result)
        for run in step_runs() for setting, result in run["results"].items()
    }  # fmt: skip
    dense_seconds = {  # extrapolated where no whole step was measured
        result["settings"]["context_length"]: result["summary"].get("extrapolated_seconds")
        for result in results("profile_step_*.json") if result["settings"]["attention_type"] == "full"
    }  # fmt: skip
    dense_seconds |= {
        context: result["seconds"] for (context, *rest), (_, result) in latest.items() if rest == ["none", ""]
    }
    for (context, limit, kind), (run, result) in latest.items():
        if kind in KINDS or "windows" in kind:
            dense = dense_seconds[context]
            rows.append([
                kind, f"{context:,}", limit,
                differing(result["predicted_gib"], result["peak_gib"]), f"{result['peak_gib']:.2f}",
                differing(result["predicted_seconds"], result["seconds"]), f"{result['seconds']:.2f}",
                f"{result['seconds'] / dense:.3f}", f"{result['mfu']:.1%}", f"{result['host_gib']:.1f}", date(run),
            ])  # fmt: skip
    for result in results("profile_step_*.json"):
        kind = result["settings"]["attention_type"]
        if kind == "full":
            continue
        context, peak = result["settings"]["context_length"], result["summary"]["measured_peak"] / GIB
        seconds = result["summary"]["measured_seconds"]
        dense = dense_seconds[context]
        flops = 3 * forward_flops(MODEL_SIZES["4B"], [context], 36 * [KINDS[kind]()])
        rows.append([
            kind, f"{context:,}", "none",
            differing(result["summary"]["predicted_peak"] / GIB, peak), f"{peak:.2f}",
            differing(result["summary"]["predicted_seconds"], seconds), f"{seconds:.2f}", f"{seconds / dense:.3f}",
            f"{flops / seconds / GPUS['H200'].flops:.1%}", f"{result['summary']['host'] / GIB:.1f}",
            date(result["environment"]),
        ])  # fmt: skip
    return rows


def fp8() -> list[list[str]]:
    pairs: dict[tuple, dict[str, dict]] = {}
    for run in results("fp8_step_*.jsonl"):
        (setting, result), count = *run["results"].items(), run["gradient_accumulation_steps"]
        pairs.setdefault((run["context_length"], count, setting, run["host_budget"]), {})[run["linear"]] = result | {
            "date": date(run)
        }
    rows = []
    for (context, count, setting, host), of_linear in pairs.items():
        bf16, ours = of_linear["bf16"], of_linear["fp8"]
        rows.append([
            f"{context:,}" if count == 1 else f"{count} x {context:,}", setting.partition("+")[2] or "dense",
            (host or "-").replace("GB", " GiB"), f"{bf16['seconds']:.2f}",
            differing(ours["predicted_seconds"], ours["seconds"]), f"{ours['seconds']:.2f}",
            f"{ours['seconds'] / bf16['seconds']:.3f}", differing(ours["predicted_gib"], ours["peak_gib"]),
            f"{ours['peak_gib']:.2f}", f"{ours['host_gib']:.1f}", ours["date"],
        ])  # fmt: skip
    header = ["tokens", "attention", "host budget", "bf16, s per step", "FP8, predicted", "measured", "÷ bf16",
              "peak GiB, predicted", "measured", "host GiB", "date, commit"]  # fmt: skip
    return [header, *rows]


def longest_measured() -> list[list[str]]:
    rows = [["model, budgets", "predicted", "measured", "measured ÷ predicted"]]
    for result in results("profile_max_*.json"):
        settings = result["settings"]
        rows.append([
            f"{settings['model_size']}, {settings['memory_budget']} and {settings['host_budget']} of the host",
            f"{result['predicted_context']:,}", f"{result['measured_context']:,}", f"{result['ratio']:.3f}",
        ])  # fmt: skip
    return rows


def some_layers() -> list[list[str]]:
    """Steps measured with some of their layers, and the seconds extrapolated to all layers."""
    rows = [["context", "cap", "layers", "their peak GiB, predicted", "measured", "their s, predicted", "measured",
             "all layers: peak GiB, predicted", "pinned host GiB", "s per step, predicted",
             "extrapolated"]]  # fmt: skip
    for result in sorted(results("profile_step_*.json"), key=lambda result: result["settings"]["context_length"]):
        settings, summary = result["settings"], result["summary"]
        if settings["num_layers"] is None:
            continue
        # The plan was printed as text: it has the bytes of all layers.
        peak, host = (re.search(rf"{size} +([\d.]+) GiB", result["plan"])[1] for size in ("GPU peak", "host memory"))
        rows.append([
            f"{settings['context_length']:,}", cap(settings["memory_budget"]),
            str(settings["num_layers"]), differing(summary["predicted_peak"] / GIB, summary["measured_peak"] / GIB),
            f"{summary['measured_peak'] / GIB:.2f}", f"{summary['predicted_seconds']:.1f}",
            f"{summary['measured_seconds']:.1f}", peak, host,
            f"{summary['predicted_seconds_of_all_layers']:,.0f}", f"{summary['extrapolated_seconds']:,.0f}",
        ])  # fmt: skip
    return rows


def whole_step() -> dict:
    """The last step of 131,072 tokens within 24 GiB that profile_memory.py measured with all layers."""
    return [result for result in results("profile_step_*.json") if result["settings"]["num_layers"] is None][-1]


def stages_of(result: dict) -> tuple[list[Stage], list[MeasuredStage]]:
    """(predicted, measured) stages in a file that profile_memory.py wrote."""
    return [Stage(**stage) for stage in result["predicted"]], [MeasuredStage(**stage) for stage in result["measured"]]


def stages() -> list[list[str]]:
    """Some stages of a step that was measured with all layers."""
    result = whole_step()
    last = result["environment"]["model"]["num_hidden_layers"] - 1
    backward = (f"backward of layer {n}, {part}" for n in (last, 0) for part in ("MLP", "attention"))
    shown = {"forward of layer 0", f"forward of layer {last}", "loss", *backward, "update"}
    rows = [["stage", "predicted", "measured", "fragmented", "s", *CATEGORIES]]
    for predicted, measured in zip(*stages_of(result)):
        if measured.name in shown:
            rows.append([
                measured.name, differing(predicted.bytes / GIB, measured.bytes / GIB), f"{measured.bytes / GIB:.2f}",
                f"{(measured.reserved - measured.bytes) / GIB:.2f}", f"{measured.seconds:.2f}",
                *(f"{measured.categories[category] / GIB:.2f}" for category in CATEGORIES),
            ])  # fmt: skip
    return rows


def compared() -> list[list[str]]:
    rows = [["", "tokens", "peak GiB, predicted", "measured", "s per step, predicted", "measured"]]
    for result in results("profile_compare_*.json"):
        for row in result["compared"]:
            if "measured_peak" in row:
                peak = row["measured_peak"] / GIB
                rows.append([
                    row["way"], f"{row['context_length']:,}", differing(row["peak"] / GIB, peak), f"{peak:.2f}",
                    f"{row['predicted_seconds']:.1f}", f"{row['measured_seconds']:.1f}",
                ])  # fmt: skip
    return rows


# The picture


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
    draw_stages(right, *stages_of(result), parse_bytes(result["settings"]["memory_budget"]))
    left.set(
        title=f"transformers + Liger, checkpointed: {peak:.1f} GiB (areas predicted, line measured peak)",
        ylabel="GiB, peak of each stage",
    )
    right.set(title="Fathom, planned for 24 GiB (areas predicted, line measured)")
    right.legend(loc="upper right", fontsize=8)
    figure.savefig(PICTURE)


MEASURED = (
    budgets,
    packed_documents,
    shared_sequences,
    against_the_peer,
    sparse,
    fp8,
    longest_measured,
    some_layers,
    stages,
    compared,
)
TABLES: dict[str, Callable[[], list[list[str]]]] = {table.__name__: table for table in MEASURED}


if __name__ == "__main__":
    main()
