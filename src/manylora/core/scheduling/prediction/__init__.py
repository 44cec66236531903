"""Length prediction: the number of tokens an answer will have."""

from __future__ import annotations

from collections.abc import Callable

from manylora.core.config import SchedulerConfig
from manylora.core.plugins import find_factory, made_by, options_for, takes
from manylora.core.scheduling.prediction.predictor import (
    LengthEstimate,
    LengthPredictor,
    NoisyPredictor,
    OraclePredictor,
)
from manylora.core.scheduling.prediction.quantile import QuantilePredictor
from manylora.core.scheduling.prediction.request_log import RequestLog

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


def _make_quantile(config: SchedulerConfig, seed: int) -> LengthPredictor:
    return QuantilePredictor()


def _make_oracle(config: SchedulerConfig, seed: int) -> LengthPredictor:
    return OraclePredictor()


@takes(NoisyPredictor.Options)
def _make_noisy(config: SchedulerConfig, seed: int, options: NoisyPredictor.Options) -> LengthPredictor:
    return NoisyPredictor(options.accuracy, seed)


PREDICTORS: dict[str, Callable[..., LengthPredictor]] = {
    "noisy": _make_noisy,
    "oracle": _make_oracle,
    "quantile": _make_quantile,
}


def make_predictor(config: SchedulerConfig, seed: int) -> LengthPredictor:
    """Make the predictor that the configuration names.

    Args:
        config: Its ``predictor``, in ``PREDICTORS`` or a plug-in (``plugins.py``), and that one's options.
        seed: Seed of the noisy predictor.

    Raises:
        ConfigError: No predictor has that name, or an option is wrong.
    """
    factory = find_factory("predictor", config.predictor, PREDICTORS)
    options = options_for("predictor", config.predictor, PREDICTORS, config.predictor_options)
    taken = () if options is None else (options,)
    return made_by("predictor", config.predictor, factory, config, seed, *taken, seam=LengthPredictor)
