"""Block-sparse attention, put together by sparse_attention.py; ../README.md has the formulas."""
