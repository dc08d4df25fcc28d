"""A small random Qwen3 in TRL's SFTTrainer: rows packed from documents, sparse attention, fused
kernels.

    pip install . trl
    python examples/trl_sft.py

Runs on a CPU in the PyTorch reference; on a GPU in Triton's kernels.
"""

import tempfile

import fathom_kernels
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
tokenizer = Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
)
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
)
# A toy text: each word is the last one and 1, and documents have 50 to 249 words.
texts = [
    " ".join(f"w{(start + i) % 62}" for i in range(50 + start))
    for start in torch.randint(200, (64,)).tolist()
]

# sizes of a toy
fathom_kernels.register_attention(selected_blocks=2, window=64, block_size=32, dense_below=128)
config = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, attn_implementation="fathom_sparse")
print(fathom_kernels.apply_to(model, loss=False))  # SFTTrainer reads the logits, for its metrics
arguments = SFTConfig(
    tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=2, learning_rate=1e-2,
    logging_steps=5, report_to=[],
    save_strategy="no", disable_tqdm=True, bf16=torch.cuda.is_available(),
    use_cpu=not torch.cuda.is_available(),
    packing=True, max_length=512,
)  # fmt: skip
trainer = SFTTrainer(
    model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
)
trainer.train()
