"""Block-sparse attention: the mathematics in ../README.md, the whole in sparse_attention.py, a file a piece."""
