"""Draw the picture of README.md and MEMORY_REPORT.md anew: `python -m benchmarks.picture`.

Its peer and its measured step are of the claims "dense" and "stages", as benchmarks.report last
measured them.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace

from benchmarks.report import RESULTS, latest_line
from model import MODEL_SIZES
from training.host.sizes import parse_bytes
from training.memory.execution import Execution
from training.memory.profiler import MeasuredStage, draw_stages
from training.memory.reports import compared_executions
from training.memory.stages import Stage, Stages
from training.plots.curves import save_picture
from training.run.build import step_on_meta

PICTURE = RESULTS / "step_of_131072_tokens.png"
PEER = "peer"


def main(argv: list[str]) -> None:
    # no flags
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(
        argv
    )
    draw_picture()


def peak_of_peer() -> float:
    """Returns the measured peak of the peer's step, in GiB."""
    return latest_line("dense")["results"][PEER]["peak_gib"]


def stages_of_peer() -> list[Stage]:
    """Predicts the peer's step: every layer checkpointed, the loss chunked, two bf16 moments per
    parameter.

    The peer has no float32 masters. In its MLP's backward Liger writes gradients over gate and up,
    so that a tensor of the MLP's width does not exist, and the gradient of the MLP's input comes
    after these.
    """
    model = MODEL_SIZES["4B"]
    step = step_on_meta(model, 131_072, given=Execution(attention_backend="cudnn"))
    stages = Stages(step, compared_executions(step)["checkpointing, chunked loss"])
    moments = 4 * model.num_parameters()
    absent = (
        step.element_size * step.tokens * (model.parts(0).mlp.intermediate_size + model.hidden_size)
    )

    def of_peer(stage: Stage) -> Stage:
        mlp = stage.categories["MLP"] - absent * stage.name.endswith(", MLP")
        return replace(stage, categories=stage.categories | {"optimizer": moments, "MLP": mlp})

    return [*map(of_peer, stages)]


def draw_picture() -> None:
    """Draw a step of 131,072 tokens. Left: the peer, whose peak was measured. Right: within 24 GiB,
    also measured."""
    from matplotlib.figure import Figure  # a dependency of development

    result, peak = latest_line("stages"), peak_of_peer()
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_stages(left, stages_of_peer())
    left.axhline(peak, color="k", label="measured peak")
    predicted = [Stage(**stage) for stage in result["predicted"]]
    measured = [MeasuredStage(**stage) for stage in result["measured"]]
    draw_stages(right, predicted, measured, parse_bytes(result["settings"]["memory_budget"]))
    left.set(
        title=f"transformers + Liger, checkpointed: {peak:.1f} GiB\n(areas predicted, line "
        "measured peak)",
        ylabel="GiB, peak of each stage",
    )
    right.set(title="Fathom, planned for 24 GiB\n(areas predicted, line measured)")
    right.legend(loc="upper right", fontsize=8, ncols=2)
    save_picture(figure, PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
