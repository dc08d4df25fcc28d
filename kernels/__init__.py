"""Fused operations for training decoders: each a Triton kernel and its PyTorch reference behind one function.

Installed, this package is `fathom_kernels`; the names below are its public face.
"""

from .apply_to import apply_to
from .attention import Full, Sparse, Window
from .attention.attend import packed_attention
from .cross_entropy import CrossEntropyLoss, cross_entropy
from .gated_mlp import gated_mlp, geglu, swiglu
from .linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from .rms_norm import rms_norm
from .rope import rope
from .transformers_attention import register_attention

__all__ = [
    "CrossEntropyLoss", "Full", "LinearCrossEntropyLoss", "Sparse", "Window", "apply_to", "cross_entropy", "gated_mlp",
    "geglu", "linear_cross_entropy", "packed_attention", "register_attention", "rms_norm", "rope", "swiglu",
]  # fmt: skip
