"""Figures without a simulated run: requests on an idle engine, one step by kernel family, and a bound on eviction.

*The bound* is the most that any eviction policy could save, knowing the future, for variable sizes and costs.
With one size and one cost, dropping the item that is used furthest in the future is best (Belady). With sizes and costs
the best choice is NP-hard, so this is its linear relaxation, which is solved exactly. Between two uses of an
item it is either kept, which saves one load and takes its size all the while, or not:

::

    maximise    sum over gaps of saving * x                     x = 1: kept from one use to the next, 0: dropped
    such that   sum over gaps across use t of size * x  <=  capacity - size of the item used at t       for every t
                0 <= x <= 1                                     <- the relaxation: the truth is 0 or 1

*Why it bounds.* A policy is a point with every x in {0, 1}, and at each use all items that it keeps have to fit
beside the item in use; so it satisfies the constraints, and the maximum over a larger set is no smaller. A policy
that loads ahead of time gains nothing here: loads avoided count, not when they happen. Items in use over a
span of time only leave less room than assumed, and so does KV.

An experiment asks for it with a setup whose eviction is ``clairvoyant``.

Source: Berger, Beckmann and Harchol-Balter, "Practical bounds on optimal caching with variable object sizes"
(SIGMETRICS 2018), the flow-based offline optimum; there an item may bypass the cache, here it must be in it when used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from manylora.lab.costs.idle import times_on_idle_engine
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.experiments.cases import Case, Result, cdf, prepare
from manylora.lab.experiments.spec import merge

__all__ = ["CALCULATIONS", "is_clairvoyant", "most_saved", "run_clairvoyant"]

NAME = "clairvoyant"

Item = TypeVar("Item", bound=Hashable)


def idle_engine(case: Case) -> Result:
    """Return the times of every request of a workload on an idle engine, by part."""
    workload, versions, config = prepare(case)
    times = times_on_idle_engine(workload.requests, versions, config.cost)
    count = len(times)
    ttft = sum(one.ttft_s for one in times) / count
    figures = {
        "ttft_mean": ttft,
        "e2e_mean": sum(one.e2e_s for one in times) / count,
        "load_s": sum(one.load_s for one in times) / count,
        "base_s": sum(one.base_s for one in times) / count,
        "adapter_s": sum(one.adapter_s for one in times) / count,
        "compute_s": sum(one.base_s + one.adapter_s for one in times) / count,
    }
    figures["load_share"] = figures["load_s"] / ttft
    figures["adapter_share"] = (figures["load_s"] + figures["adapter_s"]) / ttft
    for name, values in (("ttft", [one.ttft_s for one in times]), ("e2e", [one.e2e_s for one in times])):
        figures |= {f"{name}_p50": float(np.quantile(values, 0.5)), f"{name}_p99": float(np.quantile(values, 0.99))}
    return Result(figures, {"ttft_cdf": cdf(one.ttft_s for one in times), "e2e_cdf": cdf(one.e2e_s for one in times)})


def kernels(case: Case) -> Result:
    """Price one decoding step: every request of the workload has its prompt behind it and generates one token.

    With CPU workers, the adapter of the last request is on its way to the device, and they compute it.
    """
    workload, versions, config = prepare(case)
    base = [SyntheticSequence(one.num_prompt_tokens, 1) for one in workload.requests]
    step = []
    for part, request in zip(base, workload.requests, strict=True):
        version = versions.get(request.adapter or "")
        step.append(part._replace(adapter=version.key, rank=version.rank) if version is not None else part)
    plan = synthetic_plan(step)
    base_s = config.cost.step_time_s(synthetic_plan(base))
    if config.assist is not None:
        step_s = config.assist.step_time_s(plan, plan.sequences[-1:])
    else:
        step_s = config.cost.step_time_s(plan)
    return Result(
        {
            "step_s": step_s,
            "base_s": base_s,
            "adapters_s": step_s - base_s,
            "adapters_share": (step_s - base_s) / base_s,
            "num_adapters": len({one.adapter for one in workload.requests} - {None}),
        }
    )


CALCULATIONS: dict[str, Callable[[Case], Result]] = {"alone": idle_engine, "kernels": kernels}


def is_clairvoyant(case: Case) -> bool:
    """Whether a case asks for the bound instead of an eviction policy."""
    adapters = case.setup.get("adapters", {})
    return isinstance(adapters, Mapping) and adapters.get("eviction") == NAME


def run_clairvoyant(case: Case) -> Result:
    """Return the bounds for a case: the most loading that can be avoided, and the most hits.

    They are two maxima, and no policy need reach both at once. ``ConfigError`` if something in its description is
    wrong, or a trace is missing.
    """
    setup = merge(case.setup, {"adapters": {"eviction": "lru"}})
    workload, versions, config = prepare(replace(case, setup=setup))
    sizes = {name: version.num_pages for name, version in versions.items()}
    uses = [one.adapter for one in workload.requests if one.adapter is not None]
    saved = most_saved(uses, sizes, sizes, config.num_pages)
    num_hits = most_saved(uses, sizes, dict.fromkeys(sizes, 1), config.num_pages)
    return Result({"loading_avoided": saved / sum(sizes[name] for name in uses), "hit_rate": num_hits / len(uses)})


def most_saved(
    uses: Sequence[Item],
    sizes: Mapping[Item, int],
    savings: Mapping[Item, float],
    capacity: int,
    *,
    whole: bool = False,
) -> float:
    """Return the most that keeping items between their ``uses`` can save, each by its size and the worth of finding it.

    ``whole`` solves for whole x instead, the true optimum; exponential, for a hundred uses or so.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix, diags, hstack

    size_at = np.array([sizes[item] for item in uses], dtype=float)
    last: dict[Item, int] = {}
    free = 0.0
    gaps: list[tuple[int, int]] = []
    for at, item in enumerate(uses):
        begin = last.get(item)
        if begin is not None and at == begin + 1:
            free += savings[item]  # nothing happens in between
        elif begin is not None:
            gaps.append((begin, at))
        last[item] = at
    if not gaps:
        return free
    # Row t, less row t - 1: only gaps that begin at t - 1 or end at t appear, so the matrix stays sparse.
    # The slack y(t) >= 0 of each constraint carries over: y(t) - y(t - 1) + added - ended = size(t - 1) - size(t).
    begins, ends = (np.array(column) for column in zip(*gaps, strict=True))
    sizes_of = size_at[begins]
    columns = np.arange(len(gaps))
    changes = coo_matrix(
        (
            np.concatenate([sizes_of, -sizes_of]),
            (np.concatenate([begins + 1, ends]), np.concatenate([columns, columns])),
        ),
        shape=(len(uses), len(gaps)),
    )
    slack = diags([np.ones(len(uses)), -np.ones(len(uses) - 1)], [0, -1])
    right = np.array([capacity - size_at[0], *(before - after for before, after in pairwise(size_at))])
    result = milp(
        np.concatenate([[-savings[uses[begin]] for begin in begins], np.zeros(len(uses))]),
        constraints=LinearConstraint(hstack([changes, slack]).tocsc(), right, right),
        bounds=Bounds(0.0, np.concatenate([np.ones(len(gaps)), np.full(len(uses), np.inf)])),
        integrality=np.concatenate([np.full(len(gaps), int(whole)), np.zeros(len(uses))]),
    )
    assert result.success, result.message
    return free - float(result.fun)
