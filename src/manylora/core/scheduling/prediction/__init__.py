"""Length prediction: the number of tokens an answer will have."""

from manylora.core.scheduling.prediction.predictor import (
    LengthEstimate,
    LengthPredictor,
    NoisyPredictor,
    OraclePredictor,
)
from manylora.core.scheduling.prediction.quantile import QuantilePredictor
from manylora.core.scheduling.prediction.request_log import RequestLog

__all__ = [
    "LengthEstimate",
    "LengthPredictor",
    "NoisyPredictor",
    "OraclePredictor",
    "QuantilePredictor",
    "RequestLog",
]
