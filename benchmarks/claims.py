"""The claims of MEMORY_REPORT.md, each with the command that measures it and the place of its number in a JSON line.

A path names the keys of a value: "results > 24GB > seconds". In a command FILE stands for a file of JSON that the
command writes in place of a line, and DIR for a folder; both are deleted. Claims of one command share its run.
"""

from dataclasses import dataclass

STEP = "python -m benchmarks.bench_train_step "
ON_TWO = "torchrun --nproc_per_node=2 -m benchmarks.bench_train_step "
LIGER = "transformers + Liger"
PREDICTIONS = {"seconds": "predicted_seconds", "peak_gib": "predicted_gib"}


@dataclass(frozen=True)
class Claim:
    name: str  # of --only
    says: str
    machine: str  # h200, h100, h100-x2 or cpu
    command: str
    seconds: int  # about what the command takes, compilation included
    number: str  # path of the number
    unit: str
    predicted: str = ""  # path of the prediction
    peer: str = ""  # the peer or the floor that was measured in the same run
    peer_number: str = ""  # path of its number


def step(
    name: str, says: str, flags: str, setting: str, seconds: int, what: str = "seconds", peer: str = "",
    peer_setting: str = "peer", machine: str = "h200",
) -> Claim:  # fmt: skip
    """Returns the claim of a whole training step: its seconds, its peak_gib of GPU memory, or host_gib."""
    command = (ON_TWO if machine == "h100-x2" else STEP) + flags
    paths = [f"results > {key} > {what}" for key in (setting, peer_setting)]
    predicted = f"results > {setting} > {PREDICTIONS[what]}" if what in PREDICTIONS else ""
    unit = "s" if what == "seconds" else "GiB"
    return Claim(name, says, machine, command, seconds, paths[0], unit, predicted, peer, paths[1] if peer else "")


def kernel(
    name: str, says: str, bench: str, seconds: int, path: str, unit: str, ours: str = "ours", theirs: str = "Liger",
    peer: str = "", machine: str = "h200",
) -> Claim:  # fmt: skip
    """Returns the claim of a kernel. Its path has {} where its line names ours and theirs."""
    command, number, peer_number = f"python -m benchmarks.{bench}", path.format(ours), path.format(theirs)
    return Claim(name, says, machine, command, seconds, number, unit, "", peer or theirs, peer_number)


DENSE = "--settings auto 24GB peer --host_budget 102GB"
COMPACT = "--settings 24GB --host_budget 50GB --optimizer_state compact"
FLASH = "--settings auto+flash-attn-4 24GB+flash-attn-4 --host_budget 102GB"
SHORTER = "--context_length 65536 --settings auto 16GB --host_budget 102GB"
MILLION = "--context_length 1048576 --settings auto+sparse --host_budget 102GB"
CAPPED = "--context_length 32768 --settings 24GB --optimizer_state compact --steps 5"
EIGHT = f"{CAPPED} --model_size 8B --host_budget 77GB"
FOURTEEN = f"{CAPPED} --model_size 14B --host_budget 115GB"
LORA = "--context_length 32768 --lora 16 --settings auto peer --steps 4"
EIGHT_BY_4 = "--model_size 8B --lora 16 --lora_bits 4 --settings 15GB --host_budget 22GB"
SAVING = "--settings 24GB --host_budget 70GB --optimizer_state compact --steps 2 --save_to DIR"
QWEN = "--model_size qwen3.5-4B"
CAPPED_QWEN = f"{QWEN} --settings 72GB 24GB --host_budget 84GB"
TWO = "--context_parallel_size 2 --settings auto 34GB --host_budget 100GB --communication"
LOSS = "three bare GEMMs"

CLAIMS = [
    # A step of the 4B on 131,072 tokens
    step("dense", "4B, 131,072 tokens, no cap", DENSE, "auto", 420, peer=LIGER),
    step("dense_memory", "its GPU memory", DENSE, "auto", 420, "peak_gib", LIGER),
    step("24gb", "the same within 24 GiB", DENSE, "24GB", 420, peer=LIGER),
    step("24gb_memory", "its GPU memory", DENSE, "24GB", 420, "peak_gib", LIGER),
    step("24gb_host", "its host memory, of the process", DENSE, "24GB", 420, "host_gib"),
    step("64gb", "within 24 GiB, on a machine of 64 GB (compact state)", COMPACT, "24GB", 180),
    step("64gb_host", "its host memory, of the process", COMPACT, "24GB", 180, "host_gib"),
    step("flash", "no cap, with flash-attn-4", FLASH, "auto+flash-attn-4", 240),
    step("flash_24gb", "within 24 GiB, with flash-attn-4", FLASH, "24GB+flash-attn-4", 240),
    step("windows", "windows of 4,096 in three layers of four", "--settings auto+windows", "auto+windows", 90),
    step("sparse", "sparse attention, 32 blocks", "--settings auto+sparse --steps 3", "auto+sparse", 100),
    step("fp8", "the same with products in FP8", "--settings auto+sparse --steps 3 --linear fp8", "auto+sparse", 100),
    step("nsa", "native sparse attention", "--settings auto+nsa --host_budget 110GB", "auto+nsa", 120),
    Claim(
        "saving", "a step beside a full checkpoint, ÷ a step with nothing saved", "h200", STEP + SAVING, 480,
        "results > 24GB > saving > ratio", "",
    ),
    # Other lengths
    step("64k", "4B, 65,536 tokens within 16 GiB", SHORTER, "16GB", 120, peer="no cap", peer_setting="auto"),
    step("256k", "4B, 262,144 tokens within 40 GiB", "--context_length 262144 --settings 40GB --host_budget 102GB",
         "40GB", 300),
    step("million", "4B, 1,048,576 tokens, sparse", MILLION, "auto+sparse", 240),
    step("million_windows", "4B, 1,048,576 tokens, windows and sparse",
         "--context_length 1048576 --settings auto+windows+sparse", "auto+windows+sparse", 210),
    Claim(
        "longest", "0.6B within 4 GiB and 16 of the host: the longest context", "h200",
        "python profile_memory.py --find_max_context --measure --model_size 0.6B --memory_budget 4GB "
        "--host_budget 16GB --json FILE",
        240, "measured_context", "tokens", "predicted_context",
    ),
    # Packed documents
    step("packed", "4B, packed files within 24 GiB", "--packed --steps 8 --settings 24GB auto --host_budget 102GB",
         "24GB", 360, peer="no cap", peer_setting="auto"),
    # Larger models, adapters
    step("8b", "8B, 32,768 tokens within 24 GiB", EIGHT, "24GB", 120),
    step("14b", "14B, 32,768 tokens within 24 GiB", FOURTEEN, "24GB", 180),
    step("14b_host", "its host memory, of the process", FOURTEEN, "24GB", 180, "host_gib"),
    step("lora", "4B, 32,768 tokens, adapters of rank 16", LORA, "auto", 90, peer="peft + transformers + Liger"),
    step("lora_4_bits", "the same beside frozen weights in 4 bits", f"{LORA} --lora_bits 4", "auto", 90,
         peer="peft + bitsandbytes"),
    step("8b_4_bits", "8B, 131,072 tokens, adapters beside 4 bits, within 15 GiB", EIGHT_BY_4, "15GB", 240),
    step("8b_4_bits_host", "its host memory, of the process", EIGHT_BY_4, "15GB", 240, "host_gib"),
    # Qwen3.5
    step("qwen", "Qwen3.5-4B, 131,072 tokens", f"{QWEN} --settings auto peer", "auto", 400, peer=f"{LIGER} + fla"),
    step("qwen_24gb", "Qwen3.5-4B within 24 GiB", CAPPED_QWEN, "24GB", 150, machine="h100"),
    step("qwen_million", "Qwen3.5-4B, 1,048,576 tokens, sparse", f"{QWEN} --context_length 1048576 --settings "
         "auto+sparse --host_budget 99GB --optimizer_state compact", "auto+sparse", 200),
    # A mixture of experts, preferences
    step("mixture", "Qwen3-30B-A3B, every weight, 131,072 tokens", "--model_size qwen3-30B-A3B --host_budget 112GB "
         "--optimizer_state compact --settings auto --steps 2 --warm_up_tokens 16384", "auto", 300),
    Claim(
        "dpo", "4B, DPO on a prompt of 30,720 tokens and two answers", "h100",
        "python -m benchmarks.bench_preferences --prompt 30720 --answer 2048 --settings auto 24GB trl --steps 2", 240,
        "results > auto > seconds", "s", "results > auto > predicted_seconds", "TRL", "results > trl > seconds",
    ),
    # Two GPUs that share a sequence
    step("two", "4B, 131,072 tokens on two GPUs", TWO, "auto", 150, machine="h100-x2"),
    step("two_34gb", "the same within 34 GiB on each", TWO, "34GB", 150, machine="h100-x2"),
    step("two_34gb_memory", "its GPU memory, on each", TWO, "34GB", 150, "peak_gib", machine="h100-x2"),
    step("two_512k", "4B, 524,288 tokens on two GPUs", "--context_length 524288 --context_parallel_size 2 --settings "
         "auto --host_budget 100GB", "auto", 450, machine="h100-x2"),
    step("two_qwen", "Qwen3.5-4B, 131,072 tokens on two GPUs", f"{QWEN} --settings auto --context_parallel_size 2 "
         "--communication", "auto", 120, machine="h100-x2"),
    # Kernels, at 131,072 tokens
    kernel("loss", "the loss over the vocabulary, forward and backward", "bench_linear_cross_entropy", 90,
           "results > chunked > {} > ms", "ms", theirs=LOSS),
    kernel("loss_masked", "the same, 75% of labels left out", "bench_linear_cross_entropy", 90,
           "results > chunked > {}, 75% of labels -100 > ms", "ms", theirs="Liger, float32 dW", peer="Liger"),
    kernel("loss_odd", "the loss, a vocabulary of two words fewer", "bench_linear_cross_entropy", 90,
           "results > two words fewer > {} > ms", "ms", theirs=LOSS),
    kernel("loss_memory", "the loss at 32,768 tokens, memory beyond its inputs", "bench_linear_cross_entropy", 90,
           "results > full logits > {} > extra_gib", "GiB", theirs="eager", peer="full logits"),
    kernel("cross_entropy", "cross-entropy in place, of a copy's rate", "bench_cross_entropy", 40,
           "results > {}, in place > of_copy", ""),
    kernel("rms_norm", "RMSNorm backward, of a copy's rate", "bench_rms_norm", 40,
           "results > hidden > {} > backward_of_copy", ""),
    kernel("rope", "RoPE forward, of a copy's rate", "bench_rope", 40, "results > {} > forward_of_copy", ""),
    kernel("window", "a layer's window of 4,096, backward", "bench_attention --windows 4096 --backends cudnn", 60,
           "results > window of 4096, {} > backward_ms", "ms", theirs="FlexAttention"),
    kernel("update", "the 4B's update, compact state on the GPU", "bench_optimizer --places gpu", 60,
           "model > {}, gpu > seconds", "s", "compact", "float32", "float32 state"),
    kernel("delta_rule", "gated delta rule, backward", "bench_delta_net", 90, "results > delta rule > {} > backward_ms",
           "ms", theirs="fla 0.6.0", peer="fla", machine="h100"),
    kernel("experts", "experts of Qwen3-30B-A3B, forward and backward", "bench_experts --tiles", 120,
           "results > random > {} > both_ms", "ms", theirs="torch grouped_mm", peer="grouped_mm", machine="h100"),
    Claim(
        "shared_prompts", "eight answers after one prompt, ÷ each after its own", "h100",
        "python -m benchmarks.bench_shared_prompts", 60,
        "results > a prompt of 98,304 tokens, 8 answers of 4,096 > full > ratio", "",
    ),
    # On a CPU
    Claim(
        "released", "SmolLM2-135M's loss, difference from transformers", "cpu",
        "python -m benchmarks.compare_released SmolLM2-135M", 120, "loss_difference", "nats",
    ),
    Claim(
        "prepare", "bytes of text tokenized per second and core, in MB", "cpu",
        "python -m benchmarks.bench_prepare --tokenizer bytes --gb 0.2 --started_gb 0.2 --formats_mb 0", 60,
        "mb_per_core_second", "MB",
    ),
]  # fmt: skip
