"""Scheduling: the state of a sequence, the order in which sequences are admitted, and the composition of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from manylora.core.config import SchedulerConfig
from manylora.core.plugins import made_by, options_for, takes
from manylora.core.scheduling.policies.adapter_aware import AdapterAwarePolicy
from manylora.core.scheduling.policies.boost import BoostPolicy
from manylora.core.scheduling.policies.chameleon.policy import ChameleonPolicy, StaticQueuesPolicy
from manylora.core.scheduling.policies.fair import FairPolicy
from manylora.core.scheduling.policies.fifo import FifoPolicy, StrictFifoPolicy
from manylora.core.scheduling.policies.keyed import KeyedPolicy, PriorityPolicy, ShortestFirstPolicy
from manylora.core.scheduling.policy import Nearness, Outcome, Policy, PolicyContext, QueueStatus
from manylora.core.scheduling.prediction.predictor import (
    LengthEstimate,
    LengthPredictor,
    NoisyPredictor,
    OraclePredictor,
)
from manylora.core.scheduling.prediction.quantile import QuantilePredictor
from manylora.core.scheduling.sequence import Sequence, SequenceStatus
from manylora.core.scheduling.step_composition import (
    ChunkedSLoraSteps,
    MixedSteps,
    SeparatePromptSteps,
    SLoraSteps,
    StepComposition,
    WholePromptSteps,
)

__all__ = [
    "POLICIES",
    "PREDICTORS",
    "STEP_COMPOSITIONS",
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
    "StepComposition",
    "make_policy",
    "make_predictor",
    "make_step_composition",
]

POLICIES: dict[str, Callable[[PolicyContext], Policy]] = {
    "adapter-aware": AdapterAwarePolicy,
    "boost": BoostPolicy,
    "chameleon": ChameleonPolicy,
    "fair": FairPolicy,
    "fifo": FifoPolicy,
    "priority": PriorityPolicy,
    "sjf": ShortestFirstPolicy,
    "static-queues": StaticQueuesPolicy,
    "strict-fifo": StrictFifoPolicy,
}


PREDICTORS: dict[str, Callable[..., LengthPredictor]] = {
    "noisy": takes(NoisyPredictor.Options)(lambda config, seed, options: NoisyPredictor(options.accuracy, seed)),
    "oracle": lambda config, seed: OraclePredictor(),
    "quantile": lambda config, seed: QuantilePredictor(),
}

STEP_COMPOSITIONS: dict[str, Callable[[], StepComposition]] = {
    "mixed": MixedSteps,
    "s-lora": SLoraSteps,
    "s-lora-chunked": ChunkedSLoraSteps,
    "s-lora-each-step": partial(SLoraSteps, steps_between_admissions=0),
    "s-lora-prefetch": partial(SLoraSteps, prefetch_steps=(5, 7)),
    "separate-prompts": SeparatePromptSteps,
    "whole-prompts": WholePromptSteps,
}


def make_policy(name: str, context: PolicyContext) -> Policy:
    """Make a scheduling policy by its name in ``POLICIES``, or a plug-in (``plugins.py``).

    ``options`` and ``inner`` of the context are set here, from the configuration. ``ConfigError`` if no policy has that
    name, it lacks a method, or an option of it is wrong.
    """
    return _policy_maker(name, context)()


def _policy_maker(name: str, context: PolicyContext) -> Callable[[], Policy]:
    options = options_for("policy", name, POLICIES, context.config.policy_options)
    own = replace(context, options=options, inner=lambda inner: _policy_maker(inner, context))
    return partial(made_by, "policy", name, POLICIES, own, seam=Policy)


def make_step_composition(name: str) -> StepComposition:
    """Make a step composition by its name in ``STEP_COMPOSITIONS``, or a plug-in (``plugins.py``), in its first state.

    ``ConfigError`` if no step composition has that name, or it lacks a method.
    """
    return made_by("step_composition", name, STEP_COMPOSITIONS, seam=StepComposition)


def make_predictor(config: SchedulerConfig, seed: int) -> LengthPredictor:
    """Make the predictor that the configuration names, one of ``PREDICTORS`` or a plug-in (``plugins.py``).

    ``ConfigError`` if no predictor has that name, or an option is wrong.
    """
    options = options_for("predictor", config.predictor, PREDICTORS, config.predictor_options)
    taken = () if options is None else (options,)
    return made_by("predictor", config.predictor, PREDICTORS, config, seed, *taken, seam=LengthPredictor)
