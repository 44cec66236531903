"""Length prediction: how many tokens an answer will have, behind one port."""

from __future__ import annotations

from manylora.config import SchedulerConfig
from manylora.errors import ConfigError
from manylora.scheduling.prediction.oracle import NoisyPredictor, OraclePredictor
from manylora.scheduling.prediction.port import LengthEstimate, LengthPredictor
from manylora.scheduling.prediction.quantile import QuantilePredictor
from manylora.scheduling.prediction.request_log import RequestLog
from manylora.scheduling.prediction.trained import TrainedPredictor, load_trained

__all__ = [
    "PREDICTORS",
    "LengthEstimate",
    "LengthPredictor",
    "NoisyPredictor",
    "OraclePredictor",
    "QuantilePredictor",
    "RequestLog",
    "TrainedPredictor",
    "load_trained",
    "make_predictor",
]

PREDICTORS = ("noisy", "oracle", "quantile", "trained")


def make_predictor(config: SchedulerConfig, seed: int) -> LengthPredictor:
    """Make the predictor that the configuration names.

    Args:
        config: Its ``predictor``, and what belongs to it.
        seed: Of the noisy one's draws.

    Raises:
        ConfigError: There is none of that name, or its file is missing or not a predictor.
    """
    match config.predictor:
        case "quantile":
            return QuantilePredictor()
        case "oracle":
            return OraclePredictor()
        case "noisy":
            return NoisyPredictor(config.predictor_accuracy, seed)
        case "trained":
            if config.predictor_file is None:
                raise ConfigError("Got predictor = 'trained' and no predictor_file, expected a trained predictor")
            return load_trained(config.predictor_file, QuantilePredictor())
    raise ConfigError(f"Got predictor = {config.predictor!r}, expected one of {', '.join(PREDICTORS)}")
