"""Causal attention: to everything, to a window, to chosen blocks of keys, and native sparse attention.

A kind of attention is a file or folder that owns everything about itself, see `kernels.parts.AttentionKind`.
"""

from .full import Full
from .nsa.nsa import NSA
from .sparse.sparse_attention import Sparse
from .window import Window

KINDS = {kind.name: kind for kind in (Full, Window, Sparse, NSA)}
