"""Optimizers of tests, whose parameters live where a test says."""

from training.optim.adamw import MasterAdamW
from training.optim.inventory import Inventory


def make_optimizer(named_parameters, *, weight_decay=0.1, rate_ratios=None, impl="auto", **placed):
    """Returns an optimizer of named parameters; `placed` are arguments of Inventory.of."""
    named = dict(named_parameters)
    inventory = Inventory.of(named.items(), **placed)
    return MasterAdamW(named.items(), inventory, weight_decay=weight_decay, rate_ratios=rate_ratios or {}, impl=impl)
