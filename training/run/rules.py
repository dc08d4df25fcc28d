"""The settings of train.py and profile_memory.py that are refused beside each other; docs/flags.md
lists them.

What depends on the machine, the model or the data is refused elsewhere: recipe.py, memory/kinds.py,
data/corpus.py.
"""

from training.flags import Rule
from training.host.choices import REFERENCE_OBJECTIVES, ROLLOUT_OBJECTIVES
from training.objectives.flags import RULES as OBJECTIVE


def _lacks_reference(s) -> bool:
    has_reference = s.lora or s.reference_logprobs
    return s.objective in REFERENCE_OBJECTIVES and not has_reference and not s.show_batch


FOR_ONE_STEP = (
    "context_length gradient_checkpointing num_layers stages timeline picture data rope_scaling"
)

STEP = (
    Rule(
        "",
        "lora with tensor_parallel_size is not supported: ranks have whole adapters; give "
        "context_parallel_size, "
        "or neither",
        lambda s: s.lora and s.tensor_parallel_size > 1,
    ),
    Rule(
        "freeze_routers",
        "with lora, which adapts routers only by lora_targets gate; drop it",
        lambda s: s.lora,
    ),
    Rule(
        "",
        "optimizer_state compact has no effect with lora, whose state is small; drop it",
        lambda s: s.lora and s.optimizer_state == "compact",
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

DISTILL = Rule("loss_impl", "with objective distill, whose loss is always chunked; drop it",
               lambda s: s.objective == "distill")  # fmt: skip

# A run may take other settings from its checkpoint or from the adapters of init_from: these hold
# for flags alone.
TRAIN = (
    *STEP,
    Rule("init_from", "with resume; drop one, or give --resume auto", lambda s: s.resume == "yes"),
    Rule(
        "lora lora_alpha lora_targets lora_bits lora_plus",
        "without init_from, which it adapts; drop it, or give that",
        lambda s: s.init_from is None and s.resume == "no",
    ),
    Rule(
        "checkpoint_interval keep_checkpoints",
        "with save none; drop one",
        lambda s: s.save == "none",
    ),
    Rule(
        "suffixes columns bad_rows chat_reasoning",
        "without data; drop it, or give those",
        lambda s: not s.data + s.validation_data,
    ),
    Rule(
        "gradient_checkpointing compile",
        "with memory_budget; drop one",
        lambda s: s.memory_budget is not None,
    ),
    Rule(
        "host_budget", "with gradient_checkpointing; drop one", lambda s: s.gradient_checkpointing
    ),
    Rule("host_budget", "with compile; drop one", lambda s: s.compile),
    Rule(
        "overlong",
        "where documents are concatenated; drop it, or --packing best_fit",
        lambda s: s.packing == "concatenate",
    ),
    Rule(
        "validation_fraction",
        "with validation_data, which is held out in its place; drop one",
        lambda s: s.validation_data,
    ),
    Rule(
        "validation_interval validation_data",
        "without validation; drop it, or raise validation_sequences",
        lambda s: s.validation_sequences == 0,
    ),
    Rule(
        "max_steps",
        "with epochs, which say how many steps there are; drop one",
        lambda s: s.epochs is not None,
    ),
    Rule(
        "final_learning_rate_ratio",
        "where the run ends with its warm-up; lower warmup_steps, or drop it",
        lambda s: s.steps is not None and s.warmup_steps >= s.steps,
    ),
    Rule(
        "",
        "a run that goes on with resume auto needs checkpoints of save full; drop one",
        lambda s: s.resume == "auto" and s.save == "model",
    ),
    Rule(
        "",
        "selected_blocks_start with compile would compile blocks anew eight times, past "
        "PyTorch's limit; drop one",
        lambda s: s.selected_blocks_start and s.compile,
    ),
    Rule(
        "",
        "lora_bits {lora_bits} with compile is not supported: weights come and go; drop "
        "compile, or give "
        "lora_bits 16",
        lambda s: s.lora_bits < 16 and s.compile,
    ),
)

# These hold once the start of the run is known.
STARTED = (
    *OBJECTIVE,
    DISTILL,
    Rule(
        "lora_alpha lora_targets lora_bits lora_plus",
        "without lora; drop it, or give lora",
        lambda s: not s.lora,
    ),
    Rule(
        "",
        "objective {objective} needs log-probabilities of a reference: make them by {program} "
        "-m "
        "training.logprobs, and give --reference_logprobs; or train adapters with lora, whose "
        "base is the reference",
        _lacks_reference,
    ),
    Rule(
        "selected_blocks_start selected_blocks_steps",
        "without an attention_type that chooses blocks; drop the one, or give the other",
        lambda s: s.attention_type == "full",
    ),
    Rule(
        "selected_blocks_steps",
        "without selected_blocks_start; drop the one, or give the other",
        lambda s: s.selected_blocks_start is None,
    ),
    Rule(
        "selected_blocks_start",
        "without selected_blocks_steps; drop the one, or give the other",
        lambda s: s.selected_blocks_steps is None,
    ),
)

PROFILE = (
    *STEP,
    DISTILL,
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
    Rule(
        "measure",
        "but with find_max_context or compare: a step is measured anyway",
        lambda s: not (s.find_max_context or s.compare),
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
