"""A small random Qwen3 in transformers' Trainer: packed documents, sparse attention, fused kernels
and loss.

    pip install . transformers accelerate
    python examples/transformers_trainer.py

Runs on a CPU in the PyTorch reference; on a GPU in Triton's kernels.
"""

import tempfile

import fathom_kernels
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)

torch.manual_seed(0)
# A toy text: each token is the last one and 1, and documents have 50 to 249 tokens.
documents = [
    {"input_ids": [(start + i) % 64 for i in range(50 + start)]}
    for start in torch.randint(200, (64,)).tolist()
]

# sizes of a toy
fathom_kernels.register_attention(selected_blocks=2, window=64, block_size=32, dense_below=128)
config = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2, head_dim=64,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, attn_implementation="fathom_sparse")
print(fathom_kernels.apply_to(model))

arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2,
    logging_steps=5, report_to=[],
    save_strategy="no", disable_tqdm=True, bf16=torch.cuda.is_available(),
    use_cpu=not torch.cuda.is_available(),
)  # fmt: skip
# The collator packs the documents of a batch into one row, and counts position_ids anew in each.
trainer = Trainer(
    model, arguments, train_dataset=documents, data_collator=DataCollatorWithFlattening()
)
trainer.train()
