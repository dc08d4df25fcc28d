"""Native sparse attention: the mathematics in ../README.md, the whole in nsa.py, a file a piece."""
