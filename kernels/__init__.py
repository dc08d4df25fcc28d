"""Fused operations for training decoders: each a Triton kernel and its PyTorch reference behind one
function.

`impl` of a function is "auto", "triton" or "torch", see `kernels.common.use_triton`.

Installed, this package is `fathom_kernels`; the names below are its public face. In a checkout it
is `kernels`, and hides Hugging Face's package of that name. transformers may want it, so its names
and files are found here as well.
"""

import functools
import importlib.util
import pkgutil
from importlib.machinery import ModuleSpec, SourceFileLoader

from .apply_to import apply_to
from .attention import Full, Sparse, Window
from .attention.attend import packed_attention
from .convolution import qkv_convolution
from .cross_entropy import CrossEntropyLoss, cross_entropy
from .delta_net import delta_rule
from .experts import expert_mlp, route
from .gated_activation import geglu, swiglu
from .gated_mlp import gated_mlp
from .linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from .rms_norm import rms_norm
from .rope import rope
from .transformers_attention import register_attention

__all__ = [
    "CrossEntropyLoss", "Full", "LinearCrossEntropyLoss", "Sparse", "Window", "apply_to",
    "cross_entropy",
    "delta_rule", "expert_mlp", "gated_mlp", "geglu", "linear_cross_entropy", "packed_attention",
    "qkv_convolution",
    "register_attention", "rms_norm", "rope", "route", "swiglu",
]  # fmt: skip
__version__ = "0.6.0"  # CHANGELOG.md says what is new; pyproject.toml reads it here

if __name__ == "kernels":
    __path__ = pkgutil.extend_path(__path__, __name__)

    @functools.cache
    def _hugging_face():
        """Returns Hugging Face's `kernels`, or None where it is not installed. Its imports lead
        here and on by path."""
        if len(__path__) == 1:
            return None
        loader = SourceFileLoader(__name__, f"{__path__[1]}/__init__.py")
        module = importlib.util.module_from_spec(
            ModuleSpec(__name__, loader, origin=loader.path, is_package=True)
        )
        loader.exec_module(module)
        return module

    def __getattr__(name: str):
        if name.startswith("__") or not hasattr(_hugging_face(), name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_hugging_face(), name)
