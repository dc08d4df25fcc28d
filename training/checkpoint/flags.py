"""Flags of checkpoints, and which of them have no effect.

No torch is imported here: --help is to be quick.
"""

from dataclasses import dataclass

from training.flags import Rule, flag

RESUME = ("no", "yes", "auto")
CHECKPOINT_INTERVAL, KEPT_CHECKPOINTS = "30min", 2


@dataclass
class CheckpointFlags:
    """The folder of checkpoints, and what is saved there when."""

    output_dir: str = flag(
        "runs/default", "checkpoints and metrics.jsonl go there", group="checkpoints"
    )
    resume: str = flag(
        "no", "go on from output_dir's newest checkpoint; auto: if there is one", RESUME, bare="yes"
    )
    save: str = flag(
        "full",
        "a checkpoint holds: full, to resume from; model; or none",
        ("full", "model", "none"),
    )
    checkpoint_interval: str | None = flag(
        None, f"steps, or minutes; 0: at the end; default: {CHECKPOINT_INTERVAL}"
    )
    keep_checkpoints: int | None = flag(
        None, f"last ones, besides the best; default: {KEPT_CHECKPOINTS}", least=1
    )


RULES = (
    Rule(
        "checkpoint_interval keep_checkpoints",
        "with save none; drop one",
        lambda s: s.save == "none",
    ),
    Rule(
        "",
        "a run that goes on with resume auto needs checkpoints of save full; drop one",
        lambda s: s.resume == "auto" and s.save == "model",
    ),
)
