"""The gated delta rule: a layer's state in place of keys and values, forward and backward in chunks
of tokens."""

from .rule import delta_rule, delta_rule_bytes, delta_rule_reference

__all__ = ["delta_rule", "delta_rule_bytes", "delta_rule_reference"]
