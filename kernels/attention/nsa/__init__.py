"""Native sparse attention, which nsa.py puts together; ../README.md has the mathematics."""
