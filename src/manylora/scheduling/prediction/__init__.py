"""Length prediction: how many tokens an answer will have, behind one port."""

from __future__ import annotations

from collections.abc import Callable

from manylora.config import SchedulerConfig
from manylora.plugins import find_factory, made_by
from manylora.scheduling.prediction.oracle import NoisyPredictor, OraclePredictor
from manylora.scheduling.prediction.port import LengthEstimate, LengthPredictor
from manylora.scheduling.prediction.quantile import QuantilePredictor
from manylora.scheduling.prediction.request_log import RequestLog

__all__ = [
    "PREDICTORS",
    "LengthEstimate",
    "LengthPredictor",
    "NoisyPredictor",
    "OraclePredictor",
    "QuantilePredictor",
    "RequestLog",
    "make_predictor",
]

PREDICTORS: dict[str, Callable[[SchedulerConfig, int], LengthPredictor]] = {
    "noisy": lambda config, seed: NoisyPredictor(config.predictor_accuracy, seed),
    "oracle": lambda config, seed: OraclePredictor(),
    "quantile": lambda config, seed: QuantilePredictor(),
}


def make_predictor(config: SchedulerConfig, seed: int) -> LengthPredictor:
    """Make the predictor that the configuration names.

    Args:
        config: Its ``predictor``, by name in ``PREDICTORS`` or one of your own (``plugins.py``), and its options.
        seed: Of the noisy one's draws.

    Raises:
        ConfigError: There is none of that name.
    """
    factory = find_factory("predictor", config.predictor, PREDICTORS)
    return made_by("predictor", config.predictor, factory, config, seed, seam=LengthPredictor)
