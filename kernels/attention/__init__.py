"""Causal attention: to everything, to a window, to chosen blocks of keys, and native sparse
attention.

Each kind is a file or a folder that owns everything about itself, see
`kernels.parts.AttentionKind`.
"""

from .full import Full
from .nsa.nsa import NSA
from .sparse.sparse_attention import Sparse
from .window import Window

KINDS = {kind.name: kind for kind in (Full, Window, Sparse, NSA)}
