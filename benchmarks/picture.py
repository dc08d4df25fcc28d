"""Draw the picture of README.md and MEMORY_REPORT.md anew: `python -m benchmarks.picture`.

Its peer is the last that benchmarks.bench_train_step measured, in benchmarks/results/train_step_*.jsonl. Its measured
step is the last of profile_step_*.json there, which profile_memory.py measured with all layers.
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace

from benchmarks.report import RESULTS
from model import MODEL_SIZES
from training.host.sizes import parse_bytes
from training.memory.execution import Execution
from training.memory.profiler import MeasuredStage, draw_stages
from training.memory.reports import compared_executions
from training.memory.stages import Stage
from training.run.build import step_on_meta

PICTURE = RESULTS / "step_of_131072_tokens.png"
PEER = "peer"


def main(argv: list[str]) -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(argv)  # no flags
    draw_picture()


def results(pattern: str) -> list[dict]:
    """Returns the JSON object of each line of the files that match, in the order of their names."""
    return [json.loads(line) for path in sorted(RESULTS.glob(pattern)) for line in path.open()]


def latest_of_peer() -> dict:
    """Returns the last run in which the peer trained the whole 4B."""
    runs = results("train_step_*.jsonl")
    return [run for run in runs if (run["model_size"], run.get("lora")) == ("4B", None) and PEER in run["results"]][-1]


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
