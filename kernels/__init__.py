"""Fused operations for training decoders: each a Triton kernel and its PyTorch reference behind one function.

A function hides the module of its name here: `kernels.rope` is the function, and whatever else is in kernels/rope.py
is imported from there, `from kernels.rope import rope_reference`.
"""

from kernels.apply_to import apply_to
from kernels.attention import attention
from kernels.common import set_default_implementation
from kernels.cross_entropy import cross_entropy
from kernels.gated_mlp import gated_mlp, geglu, swiglu
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.rms_norm import rms_norm
from kernels.rope import rope

__all__ = [
    "apply_to",
    "attention",
    "cross_entropy",
    "gated_mlp",
    "geglu",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "set_default_implementation",
    "swiglu",
]
