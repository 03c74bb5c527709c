"""The engine: sees every use of a parameter, follows the samples, and feeds the quantities."""

from pergrad.engine.contract import ExpandedWeight, call_for_per_sample_grads
from pergrad.engine.scopes import grads, record

__all__ = ["ExpandedWeight", "call_for_per_sample_grads", "grads", "record"]
