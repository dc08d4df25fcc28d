"""Words that flags choose from. No import stands here: --help is to be quick, and torch takes
seconds."""

MODEL_SIZES = (  # names of model.MODEL_SIZES
    "tiny", "0.6B", "1.7B", "4B", "8B", "14B", "32B", "qwen3-30B-A3B",
    "qwen3.5-0.8B", "qwen3.5-2B", "qwen3.5-4B", "qwen3.5-9B", "qwen3.5-27B", "qwen3.5-35B-A3B",
)  # fmt: skip
ATTENTION_TYPES = ("full", "sparse", "nsa")  # kinds of attention that a flag can ask for
IMPLEMENTATIONS = ("auto", "triton", "torch")  # kernels.common.IMPLEMENTATIONS
OPTIMIZER_STATES = ("auto", "float32", "compact")  # training.optim.formats; auto: a plan chooses
LINEARS = ("bf16", "fp8", "fp8-all", "int8")  # names of kernels.mixed.linear_maps
LORA_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)  # projections of a block
DELTA_NET_TARGETS = (
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
)  # projections of a block with a gated delta net
EXPERTS_TARGETS = (
    "gate",
    "experts",
)  # of a mixture: the router, all experts' matrices; all-linear leaves them out
TARGETS = (
    *LORA_TARGETS,
    *DELTA_NET_TARGETS,
    *EXPERTS_TARGETS,
)  # all that may have adapters, in the order of a list
# Narrow projections of a delta net and of a shared expert. peft's adapters of them are read and
# merged, not trained.
READ_TARGETS = ("in_proj_b", "in_proj_a", "shared_expert_gate")
LORA_BITS = (16, 8, 4)  # per element of a frozen matrix
LOSSES = ("auto", "chunked", "standard")
GPU_BACKENDS = ("auto", "cudnn", "flash", "flash-attn-4")  # kernels.attention.full.BACKENDS but cpu
SUFFIXES = ".txt,.md,.py"  # files that are a document each
BAD_ROWS = ("refuse", "drop")  # of training.data.sources.Reading
PACKINGS = ("best_fit", "concatenate")
REASONING = ("template", "keep", "drop")  # before a chat's last user message
PAIR_OBJECTIVES = ("dpo", "ipo", "simpo", "orpo")  # of training.objectives
CLIPPED_OBJECTIVES = ("grpo", "dapo", "dr_grpo", "gspo")
ROLLOUT_OBJECTIVES = (*CLIPPED_OBJECTIVES, "cispo", "importance_sampling")
REFERENCE_OBJECTIVES = ("dpo", "ipo", "kto")  # whatever their beta is
OBJECTIVES = ("next_token", "weighted", "distill", *PAIR_OBJECTIVES, "kto", *ROLLOUT_OBJECTIVES)
