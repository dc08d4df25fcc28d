"""Block-sparse attention: the mathematics in README.md, wholes in sparse_attention.py and nsa.py, a file a piece."""

from kernels.sparse_attention.decode import PooledKeys, attend_to_cache
from kernels.sparse_attention.layout import EMPTY
from kernels.sparse_attention.nsa import NSA, nsa_attention
from kernels.sparse_attention.sparse_attention import Sparsity, attention_footprint, select_blocks, sparse_attention

__all__ = [
    "EMPTY",
    "NSA",
    "PooledKeys",
    "Sparsity",
    "attend_to_cache",
    "attention_footprint",
    "nsa_attention",
    "select_blocks",
    "sparse_attention",
]
