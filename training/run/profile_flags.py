"""The flags of profile_memory.py. No torch is imported here: --help is to be quick."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import ClassVar

from training.data.flags import BAD_ROWS, OVERLONG
from training.families.flags import MODEL_SIZES
from training.flags import Rule, flag, read_flags
from training.memory.flags import GPU_BACKENDS
from training.objectives.flags import CHUNKED_DISTILL, OBJECTIVES, ROLLOUT_OBJECTIVES
from training.run.settings import STEP_RULES, StepFlags, TrainConfig

CONTEXT_LENGTH = 131_072
FOR_ONE_STEP = (
    "context_length gradient_checkpointing num_layers stages timeline picture data rope_scaling"
)
RULES = (
    *STEP_RULES,
    CHUNKED_DISTILL,
    Rule("model_size", "with init_from; drop one", lambda s: s.init_from is not None),
    Rule("find_max_context loss_impl", "with compare; drop one", lambda s: s.compare),
    Rule(FOR_ONE_STEP, "with find_max_context; drop one", lambda s: s.find_max_context),
    Rule(FOR_ONE_STEP, "with compare; drop one", lambda s: s.compare),
    Rule(
        "picture",
        "with data or gradient_checkpointing; drop one",
        lambda s: s.data or s.gradient_checkpointing is not None,
    ),
    Rule("host_memory", "with host_budget; drop one", lambda s: s.host_budget is not None),
    Rule(
        "memory_budget host_budget host_memory",
        "with gradient_checkpointing; drop one",
        lambda s: s.gradient_checkpointing is not None,
    ),
    Rule(
        "device",
        "with gpu, which predicts for another; drop one",
        lambda s: s.gpu and s.device == "cuda",
    ),
    Rule(
        "tokenizer chat_template suffixes columns bad_rows overlong",
        "without data; drop it, or give data",
        lambda s: not s.data,
    ),
    Rule(
        "beta",
        "with objective {objective}, whose plan it leaves alone; drop it",
        lambda s: s.objective not in ROLLOUT_OBJECTIVES,
    ),
    Rule("lora_targets lora_bits", "without lora; drop it, or give lora", lambda s: not s.lora),
    Rule(
        "",
        "--compare keeps blocks whole, which lora_bits {lora_bits} cannot; drop one",
        lambda s: s.lora_bits < 16 and s.compare,
    ),
    Rule(
        "",
        "--no-gradient_checkpointing keeps blocks whole, which lora_bits {lora_bits} cannot; "
        "drop one",
        lambda s: s.lora_bits < 16 and s.gradient_checkpointing is False,
    ),
)


@dataclass
class ProfileFlags(StepFlags):
    """Say whether a training step fits, what memory it takes, and how long it and an epoch of the
    data take."""

    model_size: str | None = flag(
        None,
        "shape of a model: 4B is Qwen3-4B's; default: 4B, unless init_from is given",
        MODEL_SIZES,
    )
    context_length: int | None = flag(  # type: ignore[assignment]
        None, f"tokens in a sequence; default: {CONTEXT_LENGTH}", least=2, most=2**27, tokens=True
    )
    batch_size: int = flag(
        1, "sequences in a micro-batch; train.py takes 8 below 16384 tokens", least=1, most=2**20
    )
    attention_backend: str = flag("auto", "attention kernel", GPU_BACKENDS)
    gradient_checkpointing: bool | None = flag(  # type: ignore[assignment]
        None, "no plan: checkpoint every block, or keep all"
    )
    nproc: int = flag(
        1,
        "predict for so many GPUs of a machine, as torchrun's --nproc_per_node",
        least=1,
        most=2**10,
    )
    nnodes: int = flag(
        1, "predict for so many machines, as torchrun's --nnodes", least=1, most=2**16
    )
    gpu: str | None = flag(
        None,
        "predict for RTX4090, A100-80GB, H100 ...; a size, 24GB: the slowest with as much",
        group="machine",
    )
    host_memory: str | None = flag(None, "predict for a machine of so much, as sold: 64GB")
    objective: str = flag(
        "next_token",
        "as train.py's: what its loss takes is predicted",
        OBJECTIVES,
        group="objective",
    )
    beta: float | None = flag(
        None, "of rollouts, as train.py's; above 0 a reference is read", least=0.0, most=1e6
    )
    data: list[str] = flag(
        list, "as in train.py: predict the hours of an epoch, for its documents", group="data"
    )
    tokenizer: str | None = flag(
        None, "of data, a tokenizer.json or its folder, or bytes; default: init_from's"
    )
    chat_template: str | None = flag(None, "of chats in data, as train.py's")
    suffixes: str | None = flag(None, "of texts in data, as train.py's")
    columns: str | None = flag(None, "names of rows' fields in data, as train.py's")
    bad_rows: str | None = flag(None, "rows of data that cannot be read; default: refuse", BAD_ROWS)
    overlong: str | None = flag(
        None, "documents of data longer than a sequence; default: refuse", OVERLONG
    )
    find_max_context: bool = flag(False, "the longest context that fits", group="answers")
    compare: bool = flag(False, "with and without chunked loss, checkpointing, a plan; 32k to 256k")
    num_layers: int | None = flag(
        None, "measure so many of the layers, where a whole step takes too long", least=1
    )
    stages: str | None = flag(
        None, "memory by stages; all: a row for each layer", ("equal", "all"), bare="equal"
    )
    timeline: Path | None = flag(None, "draw the step there (.png, .svg)")
    picture: Path | None = flag(
        None, "draw memory and seconds by context there, to the longest that fits (.png, .svg)"
    )
    json: Path | None = flag(None, "write everything there")

    rules: ClassVar[tuple[Rule, ...]] = RULES

    @property
    def lengths(self) -> tuple[int, int, int]:
        """(tokens in a sequence, sequences in a micro-batch, micro-batches in a step)."""
        return (
            self.context_length or CONTEXT_LENGTH,
            self.batch_size,
            self.gradient_accumulation_steps,
        )


_TRAIN_ALONE = {entry.name for entry in fields(TrainConfig)} - {
    entry.name for entry in fields(ProfileFlags)
}
ProfileFlags.absent = StepFlags.absent | {
    " ".join(_TRAIN_ALONE): "it is train.py's alone; drop it",
    "measure": "find_max_context and compare predict, within 4% of what was measured; drop it",
}
read_profile_flags = partial(read_flags, ProfileFlags, program="profile_memory.py")
