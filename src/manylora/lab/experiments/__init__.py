"""Published evaluations and ours as data: cases to run, published figures, and results."""

from manylora.lab.experiments.cases import Case, cases_of
from manylora.lab.experiments.findings import Comparison, Findings, Verdict, overall
from manylora.lab.experiments.pictures import draw
from manylora.lab.experiments.read import CATALOG, find_experiments, read_experiment
from manylora.lab.experiments.report import (
    WORDS,
    Picture,
    as_html,
    as_json,
    as_markdown,
    format_interval,
    format_published,
)
from manylora.lab.experiments.result import Curve, Result
from manylora.lab.experiments.running import Runner
from manylora.lab.experiments.spec import Claim, Experiment, Plot, Point

__all__ = [
    "CATALOG",
    "WORDS",
    "Case",
    "Claim",
    "Comparison",
    "Curve",
    "Experiment",
    "Findings",
    "Picture",
    "Plot",
    "Point",
    "Result",
    "Runner",
    "Verdict",
    "as_html",
    "as_json",
    "as_markdown",
    "cases_of",
    "draw",
    "find_experiments",
    "format_interval",
    "format_published",
    "overall",
    "read_experiment",
]
