"""Causal attention: to everything, to a window, to chosen blocks, and native sparse attention."""
