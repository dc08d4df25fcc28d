"""Where activations live: gradient checkpointing applied to the model from outside, and the cap on GPU memory."""

import functools
import re

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_gradient_checkpointing(blocks: nn.ModuleList) -> None:
    """Keep only each block's input; its activations are recomputed in backward (Chen et al., arXiv 1604.06174)."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def parse_bytes(text: str) -> int:
    """Bytes in "24GB" or "24GiB" (both 2**30 bytes a GB, as GPUs are sold), "512MB" or a plain number of bytes.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f'a memory size looks like "24GB", got {text!r}')
    return int(float(match[1]) * 2 ** (10 * " KMGT".index(match[2].upper() or " ")))


def cap_gpu_memory(num_bytes: int, device: torch.device) -> None:
    """Make `num_bytes` the hard limit of this process's GPU allocator, everything reserved included.

    Raises:
        ValueError: more than the GPU has.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    if num_bytes > total:
        raise ValueError(
            f"memory_budget {num_bytes / 2**30:.1f} GB is more than this GPU's {total / 2**30:.1f} GB; lower it"
        )
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)
