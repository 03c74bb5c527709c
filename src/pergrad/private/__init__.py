"""Trains with differential privacy: one plan makes the sampler, the noise and the account."""

from pergrad.private.drawing.loading import PlanLoader
from pergrad.private.drawing.sampling import PlanSampler
from pergrad.private.drawing.users import UserDataset
from pergrad.private.planning.plan import Adaptive, Plan
from pergrad.private.proving.one_run import one_run_audit
from pergrad.private.proving.selftest import Finding, selftest
from pergrad.private.proving.sensitivity import sensitivities
from pergrad.private.stepping.adam import AdamBC
from pergrad.private.stepping.step import Released, Step
from pergrad.private.stepping.summing import NotPrivate

__all__ = [
    "AdamBC",
    "Adaptive",
    "Finding",
    "NotPrivate",
    "Plan",
    "PlanLoader",
    "PlanSampler",
    "Released",
    "Step",
    "UserDataset",
    "one_run_audit",
    "selftest",
    "sensitivities",
]
