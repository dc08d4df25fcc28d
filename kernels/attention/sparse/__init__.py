"""Block-sparse attention: sparse_attention.py puts the other files together, ../README.md has the
mathematics."""
