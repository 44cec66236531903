"""Scheduling: the order in which waiting sequences are tried, one file per policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manylora.plugins import find_factory, made_by, options_for
from manylora.scheduling.adapter_aware import AdapterAwarePolicy
from manylora.scheduling.boost import BoostPolicy
from manylora.scheduling.chameleon import ChameleonPolicy, StaticQueuesPolicy
from manylora.scheduling.fifo import FifoPolicy
from manylora.scheduling.keyed_policy import KeyedPolicy
from manylora.scheduling.policy import Nearness, Outcome, Policy, PolicyContext, QueueStatus
from manylora.scheduling.prediction import PREDICTORS, LengthEstimate, LengthPredictor, make_predictor
from manylora.scheduling.sequence import Sequence, SequenceStatus
from manylora.scheduling.sjf import ShortestFirstPolicy
from manylora.scheduling.strict_fifo import StrictFifoPolicy

__all__ = [
    "POLICIES",
    "PREDICTORS",
    "AdapterAwarePolicy",
    "BoostPolicy",
    "ChameleonPolicy",
    "FifoPolicy",
    "KeyedPolicy",
    "LengthEstimate",
    "LengthPredictor",
    "Nearness",
    "Outcome",
    "Policy",
    "PolicyContext",
    "QueueStatus",
    "Sequence",
    "SequenceStatus",
    "ShortestFirstPolicy",
    "StaticQueuesPolicy",
    "StrictFifoPolicy",
    "make_policy",
    "make_predictor",
]

POLICIES: dict[str, Callable[[PolicyContext], Policy]] = {
    "adapter-aware": AdapterAwarePolicy,
    "boost": BoostPolicy,
    "chameleon": ChameleonPolicy,
    "fifo": FifoPolicy,
    "sjf": ShortestFirstPolicy,
    "static-queues": StaticQueuesPolicy,
    "strict-fifo": StrictFifoPolicy,
}


def make_policy(name: str, context: PolicyContext) -> Policy:
    """Make a scheduling policy by name.

    Args:
        name: In ``POLICIES``, or somebody's own (``plugins.py``).
        context: What it may know of the engine it decides for; its options are read from what people chose.

    Raises:
        ConfigError: No policy has that name, it is none, or an option of it is wrong.
    """
    factory = find_factory("policy", name, POLICIES)
    options = options_for("policy", name, POLICIES, context.config.policy_options)
    return made_by("policy", name, factory, replace(context, options=options), seam=Policy)
