"""Flags of the weights that a step trains, and which of them exclude each other. No torch is
imported here: --help is to be quick."""

from dataclasses import dataclass

from training.flags import SMALLEST, Rule, flag

MODEL_SIZES = (  # names of model.MODEL_SIZES
    "tiny",
    "0.6B",
    "1.7B",
    "4B",
    "8B",
    "14B",
    "32B",
    "qwen3-30B-A3B",
    "qwen3.5-0.8B",
    "qwen3.5-2B",
    "qwen3.5-4B",
    "qwen3.5-9B",
    "qwen3.5-27B",
    "qwen3.5-35B-A3B",
)
LORA_TARGETS = (  # projections of a block
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
# Projections of a block with a gated delta net.
DELTA_NET_TARGETS = ("in_proj_qkv", "in_proj_z", "out_proj")
# A mixture's router, and the matrices of all its experts; all-linear leaves them out.
EXPERTS_TARGETS = ("gate", "experts")
# All that may have adapters, in the order of a list.
TARGETS = (*LORA_TARGETS, *DELTA_NET_TARGETS, *EXPERTS_TARGETS)
# Narrow projections of a delta net and of a shared expert. peft's adapters of them are read and
# merged, not trained.
READ_TARGETS = ("in_proj_b", "in_proj_a", "shared_expert_gate")
LORA_BITS = (16, 8, 4)  # per element of a frozen matrix


@dataclass
class WeightFlags:
    """The model, the weights to start from, and the part of them that is trained."""

    model_size: str | None = flag(
        None,
        "shape of a model: 4B is Qwen3-4B's; default: init_from's, else tiny",
        MODEL_SIZES,
        group="model",
    )
    init_from: str | None = flag(
        None, "weights to start from: folder of a released model, or a checkpoint"
    )
    lora: int | None = flag(
        None, "train adapters of this rank; default: init_from's, if it has", least=1, most=2**13
    )
    lora_targets: str | None = flag(
        None, "such as q_proj,gate,experts; default: all-linear, all of a block"
    )
    lora_bits: int = flag(
        16, "bits per element of frozen matrices; 8, 4 (NF4) cost some loss", LORA_BITS
    )
    freeze_routers: bool = flag(False, "routers of a mixture of experts keep their weights")
    rope_scaling: str | None = flag(
        None, "extends the context of init_from: yarn:4, yarn:4:32768 or linear:4"
    )


@dataclass
class AdapterFlags:
    """Numbers of adapters that no plan reads."""

    lora_alpha: float | None = flag(
        None, "scale x rank; default: 2 x rank", least=SMALLEST, most=1e9, group="model"
    )


# Rules of a step, in train.py and profile_memory.py.
STEP_RULES = (
    Rule(
        "",
        "lora with tensor_parallel_size is not supported: ranks have whole adapters; "
        "give context_parallel_size, or neither",
        lambda s: s.lora and s.tensor_parallel_size > 1,
    ),
    Rule(
        "freeze_routers",
        "with lora, which adapts routers only by lora_targets gate; drop it",
        lambda s: s.lora,
    ),
    Rule(
        "rope_scaling",
        "without init_from, whose weights it extends; drop it, or give those",
        lambda s: s.init_from is None,
    ),
    Rule(
        "",
        "rope_scaling {rope_scaling} with lora: peft would compute without it, as the base "
        "does; extend the base: "
        "{program} -m training.export BASE OUT --rope_scaling {rope_scaling}",
        lambda s: s.rope_scaling and s.lora,
    ),
)
# Rules of a run. A checkpoint or the adapters of init_from may say otherwise:
# these hold for flags alone.
RUN_RULES = (
    Rule("init_from", "with resume; drop one, or give --resume auto", lambda s: s.resume == "yes"),
    Rule(
        "lora lora_alpha lora_targets lora_bits lora_plus",
        "without init_from, which it adapts; drop it, or give that",
        lambda s: s.init_from is None and s.resume == "no",
    ),
    Rule(
        "",
        "lora_bits {lora_bits} with compile is not supported: weights come and go; drop "
        "compile, or give lora_bits 16",
        lambda s: s.lora_bits < 16 and s.compile,
    ),
)
# Rules of a run whose start is known.
STARTED_RULES = (
    Rule(
        "lora_alpha lora_targets lora_bits lora_plus",
        "without lora; drop it, or give lora",
        lambda s: not s.lora,
    ),
)
