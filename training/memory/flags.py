"""Flags of a step: its batch, its attention, and what trades memory for speed; and which of them
exclude each other. No torch is imported here: --help is to be quick."""

from dataclasses import dataclass

from training.flags import Rule, flag

ATTENTION_TYPES = ("full", "sparse", "nsa")  # kinds of attention that a flag can ask for
# kernels.attention.libraries.BACKENDS but cpu
GPU_BACKENDS = ("auto", "cudnn", "flash", "flash-attn-4")
LOSSES = ("auto", "chunked", "standard")
LINEARS = ("bf16", "fp8", "fp8-all")  # names of kernels.mixed.linear_maps
IMPLEMENTATIONS = ("auto", "triton", "torch")  # kernels.common.IMPLEMENTATIONS
LONG_CONTEXT = 16_384  # tokens
REMOVED = {  # flags of older versions, and what to do without them
    "selected_blocks_start selected_blocks_steps": "chosen blocks are as many in every step; give "
    "selected_blocks alone"
}


@dataclass
class BatchFlags:
    """Tokens of a step."""

    context_length: int = flag(
        512, "tokens in a sequence", least=2, most=2**27, group="batch", tokens=True
    )
    batch_size: int = flag(
        None, f"sequences at a time; default: 8, from {LONG_CONTEXT} tokens 1", least=1, most=2**20
    )
    gradient_accumulation_steps: int = flag(1, "micro-batches in a step", least=1, most=2**20)

    @property
    def lengths(self) -> tuple[int, int, int]:
        """(tokens in a sequence, sequences in a micro-batch, micro-batches in a step)."""
        return self.context_length, self.batch_size, self.gradient_accumulation_steps


@dataclass
class AttentionFlags:
    """How layers attend, which training/memory/kinds.py reads."""

    attention_type: str = flag(
        "full", "sparse, nsa: to chosen blocks", ATTENTION_TYPES, group="attention"
    )
    selected_blocks: str | None = flag(
        None, "blocks of 64 a token chooses, by layer: 64x4,32; default: 32, nsa: 16"
    )
    dense_below: int | None = flag(
        None, "sparse: shorter documents attend to everything; default: 8192", least=1, tokens=True
    )
    attention_backend: str = flag(
        "auto", "attention kernel: auto, cudnn, flash, flash-attn-4 or cpu"
    )


@dataclass
class MemoryFlags:
    """What trades memory, speed and precision."""

    loss_impl: str = flag(
        "auto",
        "auto: chunked above 10 GB of logits, and where 8 does not divide the vocabulary",
        LOSSES,
        group="memory and speed",
    )
    linear: str = flag(
        "bf16",
        "others: blocks' products in 8 bits, fp8 in backward alone; see docs/memory.md",
        LINEARS,
    )
    device: str = flag("auto", "auto: a GPU if there is one", ("auto", "cuda", "cpu"))
    gradient_checkpointing: bool = flag(
        False, "no plan: keep each block's input, recompute the rest in backward"
    )
    memory_budget: str | None = flag(
        None, "GPU memory to plan for and keep to: 24GB; default: auto, what is free"
    )
    host_budget: str | None = flag(
        None, "host memory each process may pin; default: its share of 80% of what is free"
    )


@dataclass
class KernelFlags:
    """How a step's operations are computed."""

    kernels: str = flag(
        "auto", "auto: Triton on GPUs, PyTorch on CPUs", IMPLEMENTATIONS, group="memory and speed"
    )
    compile: bool = flag(False, "no plan: torch.compile each block")


RUN_RULES = (
    Rule(
        "gradient_checkpointing compile",
        "with memory_budget; drop one",
        lambda s: s.memory_budget is not None,
    ),
    Rule(
        "host_budget", "with gradient_checkpointing; drop one", lambda s: s.gradient_checkpointing
    ),
    Rule("host_budget", "with compile; drop one", lambda s: s.compile),
)
