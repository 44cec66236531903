"""The step times of a backend, fitted to the means that its histograms report between two polls.

A server reports no single step. Its histograms tell the mean gap between tokens, which is a decode step, and the mean
time of a prompt from its admission to its first token, and its counters tell the prompts' tokens. A poll with tokens is
one observed step, of the load that this router knows there. After about a minute of traffic a backend has a model
of its own (``core/costs/rank_fit.py``), and the router a price in seconds of this backend.

Gaps with prompts in them count as decode steps: on a busy backend decoding is priced a little high.
"""

from __future__ import annotations

from manylora.core.costs.online import StepLoad
from manylora.core.costs.rank_fit import RankFit, model_of
from manylora.core.costs.step_model import StepModel
from manylora.core.routing import ReplicaView
from manylora.route.report import BackendMetrics

__all__ = ["ReportedTimes"]

LEAST_GAPS = 8  # tokens between two polls from which on their mean gap is one step's


class ReportedTimes:
    """Learns the step times of one backend from its reports."""

    def __init__(self) -> None:
        self._fit = RankFit()
        self._before = BackendMetrics()

    def learn(self, metrics: BackendMetrics, view: ReplicaView) -> StepModel | None:
        """Learn from a report and the requests there; return the model, ``None`` before there were enough reports."""
        before, self._before = self._before, metrics
        load = max(1, metrics.num_running or view.load)
        context = round(view.times().context)
        num_adapted = min(load, view.num_adapted)
        num_gaps, gaps_s = metrics.num_gaps - before.num_gaps, metrics.gaps_s - before.gaps_s
        if num_gaps >= LEAST_GAPS and gaps_s > 0 and before.num_gaps:
            step = StepLoad(load, load, context, num_adapted, view.sum_rank, view.max_rank)
            self._fit.observe(step, gaps_s / num_gaps)
        num_prompts, prompts_s = metrics.num_prefills - before.num_prefills, metrics.prefills_s - before.prefills_s
        if num_prompts > 0 and prompts_s > 0 and before.num_prefills:
            prompt = (metrics.num_prompt_tokens - before.num_prompt_tokens) / num_prompts
            run = round(prompt - (metrics.num_cached_tokens - before.num_cached_tokens) / num_prompts)
            if 0 < run <= prompt + 1:
                rank = view.sum_rank / max(1, view.num_requests)
                adapted = round(run * num_adapted / load)
                step = StepLoad(
                    load + run, load, context + round(prompt), adapted, round(rank * (load + run)), view.max_rank
                )
                self._fit.observe(step, prompts_s / num_prompts)
        return model_of(self._fit.fits())
