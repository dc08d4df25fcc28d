"""Fused operations for training decoders: each a Triton kernel and its PyTorch reference behind one function."""
