"""Mixture of experts: the router, the experts' gated MLPs, and the load of each expert."""

from .mlp import expert_mlp, expert_mlp_reference
from .route import Choice, route, tokens_per_expert

__all__ = ["Choice", "expert_mlp", "expert_mlp_reference", "route", "tokens_per_expert"]
