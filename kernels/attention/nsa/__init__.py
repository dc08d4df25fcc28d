"""Native sparse attention: nsa.py puts the other files together, ../README.md has the
mathematics."""
