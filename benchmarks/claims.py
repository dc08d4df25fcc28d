"""The claims of MEMORY_REPORT.md, each with the command that measures it and the place of its
number in a JSON line.

A path names the keys of a value: "results > 24GB > seconds". In a command FILE stands for a file of
JSON that the command writes in place of a line, and that is deleted. Claims of one command share
its run.
"""

from dataclasses import dataclass
from typing import NamedTuple

STEP = "python -m benchmarks.bench_train_step "
ON_TWO = "torchrun --nproc_per_node=2 -m benchmarks.bench_train_step "
LIGER = "transformers + Liger"
PREDICTIONS = {"seconds": "predicted_seconds", "peak_gib": "predicted_gib"}
UNITS = {"seconds": "s", "peak_gib": "GiB", "host_gib": "GiB", "tokens_per_second": "tokens/s"}
# Claims whose names begin so are measured before the others
FIRST = "qwen", "delta", "dpo", "shared", "mixture", "experts", "fp8", "sparse", "short"


@dataclass(frozen=True)
class Claim:
    name: str  # of --only
    says: str
    machine: str  # h200 or cpu
    command: str
    seconds: int  # about what the command takes, compilation included
    number: str  # path of the number
    unit: str
    predicted: str = ""  # path of the prediction
    peer: str = ""  # the peer or the floor that was measured in the same run
    peer_number: str = ""  # path of its number
    gpus: int = 1  # how many it takes


class Run(NamedTuple):
    flags: str
    seconds: int
    gpus: int = 1
    command: str = STEP


def step(
    name: str,
    says: str,
    run: Run,
    setting: str,
    what: str = "seconds",
    peer: str = "",
    peer_setting: str = "peer",
) -> Claim:
    """Returns the claim of a training step: its seconds, peak_gib of GPU memory, host_gib or
    tokens_per_second."""
    number, peer_number = (f"results > {key} > {what}" for key in (setting, peer_setting))
    predicted = f"results > {setting} > {PREDICTIONS[what]}" if what in PREDICTIONS else ""
    return Claim(
        name, says, "h200", run.command + run.flags, run.seconds, number, UNITS.get(what, ""),
        predicted, peer,
        peer_number * bool(peer), run.gpus,
    )  # fmt: skip


def kernel(
    name: str, says: str, bench: str, seconds: int, path: str, unit: str, ours: str = "ours",
    theirs: str = "Liger",
    peer: str = "",
) -> Claim:  # fmt: skip
    """Returns the claim of a kernel. Its path has {} where its line names ours and theirs."""
    command, number, peer_number = (
        f"python -m benchmarks.{bench}",
        path.format(ours),
        path.format(theirs),
    )
    return Claim(
        name, says, "h200", command, seconds, number, unit, "", peer or theirs, peer_number
    )


DENSE = Run("--settings auto 24GB peer --host_budget 102GB", 360)
COMPACT = "--settings 24GB --host_budget 50GB --optimizer_state compact"
TWO = Run("--context_parallel_size 2 --settings auto 34GB --host_budget 50GB", 165, 2, ON_TWO)
QWEN = "--model_size qwen3.5-4B"
QWEN_DENSE = Run(
    f"{QWEN} --settings auto 24GB peer --host_budget 84GB --optimizer_state auto --steps 3 "
    "--warm_up_tokens 16384",
    300,
)
QWEN_TWO = Run(f"{QWEN} --settings auto --context_parallel_size 2", 60, 2, ON_TWO)
QWEN_MILLION = Run(
    f"{QWEN} --context_length 1048576 --settings auto+sparse --host_budget 116GB --optimizer_state "
    "compact --steps 3",
    305,
)
QWEN_9B = Run(
    "--model_size qwen3.5-9B --settings auto --host_budget 99GB --optimizer_state compact", 100
)
QWEN_27B = Run(
    "--model_size qwen3.5-27B --lora 16 --lora_bits 4 --settings 40GB --host_budget 99GB --steps 3 "
    "--warm_up_tokens 16384",
    270,
)
PREFERENCES = "python -m benchmarks.bench_preferences --steps 2 --host_budget 102GB "
LONG = Run(
    "--prompt 120000 --answer 2000 --settings auto auto+apart 24GB", 430, command=PREFERENCES
)
PAIR = Run("--prompt 30720 --answer 2048 --settings auto 22GB trl", 130, command=PREFERENCES)
SHARED = "python -m benchmarks.bench_shared_prompts"
EIGHT_ANSWERS = "results > a prompt of 98,304 tokens, 8 answers of 4,096 > {} > {}"
MIXTURE = "--model_size qwen3-30B-A3B --host_budget 112GB --optimizer_state compact "
MIXTURE_DENSE = Run(f"{MIXTURE}--steps 3 --warm_up_tokens 16384 --settings auto", 220)
MIXTURE_SPARSE = Run(f"{MIXTURE}--steps 3 --warm_up_tokens 16384 --settings auto+sparse", 145)
MIXTURE_64K = Run(f"{MIXTURE}--context_length 65536 --steps 3 --settings auto", 155)
MIXTURE_4_BITS = Run(
    "--model_size qwen3-30B-A3B --lora 16 --lora_bits 4 --settings 23GB --host_budget 38GB "
    "--warm_up_tokens 16384",
    135,
)
MIXTURE_35B = Run(
    "--model_size qwen3.5-35B-A3B --lora 16 --host_budget 100GB --settings auto --steps 3 "
    "--warm_up_tokens 16384",
    140,
)
SHORT = Run("--context_length 32768 --settings auto auto+fp8 auto+fp8-all --steps 3", 130)
EIGHT = Run(
    "--context_length 16384 --gradient_accumulation_steps 8 --settings auto auto+fp8-all --steps 4",
    150,
)
EIGHT_4K = Run(
    "--context_length 4096 --batch_size 8 --optimizer_state auto --settings auto peer peer+kept/2 "
    "--steps 6",
    85,
)
SPARSE = Run("--settings auto+sparse auto+sparse+fp8-all", 90)
LORA = Run("--context_length 32768 --lora 16 --steps 3 --settings auto auto+fp8-all peer", 110)
LORA_4_BITS = Run(
    "--context_length 32768 --lora 16 --lora_bits 4 --steps 3 --settings auto peer", 90
)
EIGHT_BY_4 = Run(
    "--model_size 8B --lora 16 --lora_bits 4 --settings 15GB --host_budget 22GB --warm_up_tokens "
    "16384",
    120,
)
FOURTEEN = Run(
    "--model_size 14B --context_length 32768 --settings 24GB --optimizer_state compact --steps 4 "
    "--host_budget 115GB",
    140,
)
PACKED = Run("--packed --steps 4 --settings 24GB --host_budget 102GB", 140)
MILLION = Run("--context_length 1048576 --settings auto+sparse --host_budget 102GB", 230)
STAGES = "python profile_memory.py --memory_budget 24GB --host_budget 102GB --json FILE"
LOSS = "three bare GEMMs"

CLAIMS = [
    # The 4B on 131,072 tokens
    step("dense", "4B, 131,072 tokens, no cap", DENSE, "auto", peer=LIGER),
    step("dense_memory", "its GPU memory", DENSE, "auto", "peak_gib", LIGER),
    step("24gb", "the same within 24 GiB", DENSE, "24GB", peer=LIGER),
    step("24gb_memory", "its GPU memory", DENSE, "24GB", "peak_gib", LIGER),
    step("24gb_host", "its host memory, of the process", DENSE, "24GB", "host_gib"),
    Claim(
        "stages",
        "the same, read stage by stage",
        "h200",
        STAGES,
        150,
        "summary > measured_seconds",
        "s",
        "summary > predicted_seconds",
    ),
    step("64gb", "within 24 GiB, on a machine of 64 GB (compact state)", Run(COMPACT, 140), "24GB"),
    step("64gb_host", "its host memory, of the process", Run(COMPACT, 140), "24GB", "host_gib"),
    step("two", "on two GPUs", TWO, "auto"),
    step("two_34gb", "on two GPUs, within 34 GiB on each", TWO, "34GB"),
    step("two_34gb_memory", "its GPU memory, on each", TWO, "34GB", "peak_gib"),
    step("sparse", "sparse attention, 32 blocks", SPARSE, "auto+sparse"),
    step(
        "fp8_sparse",
        "the same in FP8",
        SPARSE,
        "auto+sparse+fp8-all",
        "seconds",
        "bf16",
        "auto+sparse",
    ),
    step("million", "1,048,576 tokens, sparse", MILLION, "auto+sparse"),
    # The 4B on other texts, other sizes
    step(
        "fp8_backward",
        "4B, 32,768 tokens, FP8 in backward",
        SHORT,
        "auto+fp8",
        "seconds",
        "bf16",
        "auto",
    ),
    step("fp8", "all products in FP8", SHORT, "auto+fp8-all", "seconds", "bf16", "auto"),
    step(
        "fp8_eight",
        "4B, 8 x 16,384 tokens, all products in FP8",
        EIGHT,
        "auto+fp8-all",
        "seconds",
        "bf16",
        "auto",
    ),
    step(
        "short",
        "4B, 8 x 4,096 tokens",
        EIGHT_4K,
        "auto",
        "tokens_per_second",
        "the peer, nothing made again",
        "peer+kept/2",
    ),
    step(
        "lora",
        "4B, 32,768 tokens, adapters of rank 16",
        LORA,
        "auto",
        peer="peft + transformers + Liger",
    ),
    step(
        "lora_fp8", "the same, all products in FP8", LORA, "auto+fp8-all", "seconds", "bf16", "auto"
    ),
    step(
        "lora_4_bits",
        "adapters beside frozen weights in 4 bits",
        LORA_4_BITS,
        "auto",
        peer="peft + bitsandbytes",
    ),
    step(
        "8b_4_bits", "8B, 131,072 tokens, adapters beside 4 bits, within 15 GiB", EIGHT_BY_4, "15GB"
    ),
    step("14b", "14B, every weight, 32,768 tokens, within 24 GiB", FOURTEEN, "24GB"),
    step("packed", "4B, packed files, within 24 GiB", PACKED, "24GB"),
    # Qwen3.5
    step("qwen", "Qwen3.5-4B, 131,072 tokens", QWEN_DENSE, "auto", peer=f"{LIGER} + fla"),
    step(
        "qwen_24gb",
        "the same within 24 GiB (compact state)",
        QWEN_DENSE,
        "24GB",
        "seconds",
        "no cap",
        "auto",
    ),
    step("qwen_64gb", "within 24 GiB, on a machine of 64 GB", Run(f"{QWEN} {COMPACT}", 95), "24GB"),
    step("qwen_two", "on two GPUs", QWEN_TWO, "auto"),
    step("qwen_million", "Qwen3.5-4B, 1,048,576 tokens, sparse", QWEN_MILLION, "auto+sparse"),
    step("qwen_million_memory", "its GPU memory", QWEN_MILLION, "auto+sparse", "peak_gib"),
    step("qwen_9b", "Qwen3.5-9B, every weight, 131,072 tokens", QWEN_9B, "auto"),
    step(
        "qwen_27b",
        "Qwen3.5-27B, 131,072 tokens, adapters beside 4 bits, within 40 GiB",
        QWEN_27B,
        "40GB",
    ),
    kernel(
        "delta_rule",
        "gated delta rule, backward",
        "bench_delta_net",
        130,
        "results > delta rule > {} > backward_ms",
        "ms",
        theirs="fla 0.6.0",
        peer="fla",
    ),
    # Preferences
    step(
        "dpo_long",
        "4B, DPO on a prompt of 120,000 tokens and two answers of 2,000",
        LONG,
        "auto",
        "seconds",
        "each after its own prompt",
        "auto+apart",
    ),
    step("dpo_long_24gb", "the same within 24 GiB", LONG, "24GB", "seconds", "no cap", "auto"),
    step("dpo_long_reference", "the reference's pass, ÷ a step", LONG, "auto", "reference_of_step"),
    step(
        "dpo",
        "4B, DPO on a prompt of 30,720 tokens and two answers of 2,048",
        PAIR,
        "auto",
        "seconds",
        "TRL",
        "trl",
    ),
    step("dpo_22gb", "the same within 22 GiB", PAIR, "22GB", "seconds", "TRL", "trl"),
    step("dpo_22gb_memory", "its GPU memory", PAIR, "22GB", "peak_gib", "TRL", "trl"),
    Claim(
        "shared_prompts",
        "a block on eight answers after one prompt, ÷ each after its own",
        "h200",
        SHARED,
        110,
        EIGHT_ANSWERS.format("full", "ratio"),
        "",
    ),
    Claim(
        "shared_sparse",
        "the same, sparse",
        "h200",
        SHARED,
        110,
        EIGHT_ANSWERS.format("sparse", "ratio"),
        "",
    ),
    # Mixtures of experts
    step("mixture", "Qwen3-30B-A3B, every weight, 131,072 tokens", MIXTURE_DENSE, "auto"),
    step("mixture_memory", "its GPU memory", MIXTURE_DENSE, "auto", "peak_gib"),
    step("mixture_sparse", "the same, sparse", MIXTURE_SPARSE, "auto+sparse"),
    step("mixture_64k", "65,536 tokens, dense", MIXTURE_64K, "auto", "tokens_per_second"),
    step(
        "mixture_4_bits",
        "131,072 tokens, adapters beside 4 bits, within 23 GiB",
        MIXTURE_4_BITS,
        "23GB",
    ),
    step(
        "mixture_4_bits_host", "its host memory, of the process", MIXTURE_4_BITS, "23GB", "host_gib"
    ),
    step(
        "mixture_35b", "Qwen3.5-35B-A3B, 131,072 tokens, adapters of rank 16", MIXTURE_35B, "auto"
    ),
    kernel(
        "experts",
        "experts of Qwen3-30B-A3B, forward and backward",
        "bench_experts",
        210,
        "results > random > {} > both_ms",
        "ms",
    ),
    # Kernels, at 131,072 tokens
    kernel(
        "loss",
        "the loss over the vocabulary, forward and backward",
        "bench_linear_cross_entropy",
        90,
        "results > chunked > {} > ms",
        "ms",
        theirs=LOSS,
    ),
    kernel(
        "loss_memory",
        "the loss at 32,768 tokens, memory beyond its inputs",
        "bench_linear_cross_entropy",
        90,
        "results > full logits > {} > extra_gib",
        "GiB",
        theirs="eager",
        peer="full logits",
    ),
    # On a CPU
    Claim(
        "released",
        "SmolLM2-135M's loss, difference from transformers",
        "cpu",
        "python -m benchmarks.compare_released SmolLM2-135M",
        120,
        "loss_difference",
        "nats",
    ),
    Claim(
        "prepare",
        "bytes of text tokenized per second and core, in MB",
        "cpu",
        "python -m benchmarks.bench_prepare --tokenizer bytes --gb 0.2 --started_gb 0.2 "
        "--formats_mb 0",
        60,
        "mb_per_core_second",
        "MB",
    ),
]
