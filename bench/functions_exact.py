"""Exact solutions of the two choices about artefacts by integer programming, to measure the greedy ones against.

A choice is a set of artefacts in places; a solution takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from manylora.functions.decisions.artefacts import MemoryKind, Placed, PreloadProblem
from manylora.functions.decisions.offload import Held, values_lost

__all__ = ["solve_offload", "solve_preload", "value_of", "violations"]

_Row = tuple[dict[int, float], float]
"""A constraint: coefficients by variable, and the upper bound of their sum."""


def value_of(problem: PreloadProblem, chosen: Iterable[Placed]) -> float:
    """Return the value of a choice, in seconds saved per second: of each artefact its best copy counts."""
    best: dict[str, float] = {}
    for name, place in chosen:
        value = problem.by_name[name].value(problem.place_by_name[place].memory)
        best[name] = max(value, best.get(name, 0.0))
    return sum(best.values())


def violations(problem: PreloadProblem, chosen: Iterable[Placed]) -> list[str]:
    """Return the rules that a choice breaks, in words; empty if it is feasible."""
    held = set(chosen)
    found = []
    used = dict.fromkeys(problem.place_by_name, 0)
    for name, where in sorted(held):
        artefact, place = problem.by_name[name], problem.place_by_name[where]
        if place.memory not in artefact.num_bytes:
            found.append(f"{name} cannot be in {where}")
            continue
        used[where] += artefact.num_bytes[place.memory]
        parents = problem.parents_of(artefact, place)
        if artefact.parent is not None and held.isdisjoint(parents):
            found.append(f"{name} in {where} lacks {artefact.parent}")
    for where, num_bytes in used.items():
        if num_bytes > problem.place_by_name[where].free_bytes:
            found.append(f"{where} holds {num_bytes} bytes of {problem.place_by_name[where].free_bytes}")
    return found


def solve_preload(problem: PreloadProblem, *, time_limit_s: float = 60.0) -> frozenset[Placed]:
    """Return a choice of greatest value.

    One binary per artefact and place; one more per artefact and kind of memory says that its copy there is the best
    one, and at most one of these has a value.

    Raises:
        RuntimeError: It was not solved to optimality in time.
    """
    items = [
        Placed(artefact.name, place.name)
        for artefact in problem.artefacts
        for place in problem.places
        if place.memory in artefact.num_bytes
    ]
    index = {item: number for number, item in enumerate(items)}
    counted = [(one, memory) for one in problem.artefacts for memory in MemoryKind if memory in one.num_bytes]
    first = len(items)
    rows: list[_Row] = []
    for place in problem.places:
        held = [
            (index[Placed(one.name, place.name)], one) for one in problem.artefacts if place.memory in one.num_bytes
        ]
        rows.append(({i: one.num_bytes[place.memory] / max(1, place.free_bytes) for i, one in held}, 1.0))
    for item in items:
        artefact, place = problem.by_name[item.artefact], problem.place_by_name[item.place]
        if artefact.parent is not None:
            row = {index[item]: 1.0}
            row |= {index[parent]: -1.0 for parent in problem.parents_of(artefact, place)}
            rows.append((row, 0.0))
    for number, (artefact, memory) in enumerate(counted):
        copies = [i for item, i in index.items() if item.artefact == artefact.name]
        here = [i for i in copies if problem.place_by_name[items[i].place].memory is memory]
        rows.append(({first + number: 1.0} | dict.fromkeys(here, -1.0), 0.0))
    for artefact in problem.artefacts:
        rows.append(({first + n: 1.0 for n, (one, _) in enumerate(counted) if one is artefact}, 1.0))
    values = np.zeros(first + len(counted))
    values[first:] = [artefact.value(memory) for artefact, memory in counted]
    solved = _solve(-values, rows, time_limit_s)
    assert solved is not None
    return frozenset(item for item, i in index.items() if solved[i] > 0.5)


def solve_offload(held: Sequence[Held], num_bytes: int, *, host_free_bytes: int) -> tuple[frozenset[str], float] | None:
    """Return the artefacts to take off a device at the least value lost, and that value; ``None`` if none suffices.

    Raises:
        RuntimeError: It was not solved to optimality in time.
    """
    index = {one.name: number for number, one in enumerate(held)}
    count = len(held)  # off the device: [0, count); kept in host memory: [count, 2 count)
    rows: list[_Row] = [({i: -float(one.num_bytes) for i, one in enumerate(held)}, -num_bytes)]
    rows.append(({count + i: float(one.host_bytes) for i, one in enumerate(held)}, host_free_bytes))
    costs = np.zeros(2 * count)
    for i, one in enumerate(held):
        dropped, kept = values_lost(one)
        costs[i], costs[count + i] = dropped, kept - dropped
        rows.append(({count + i: 1.0, i: -1.0}, 0.0))
        if one.in_use:
            rows.append(({i: 1.0}, 0.0))
        if one.parent is not None and one.parent in index:
            rows.append(({index[one.parent]: 1.0, i: -1.0}, 0.0))  # a parent goes only if its children do
    if sum(one.num_bytes for one in held if not one.in_use) < num_bytes:
        return None
    solved = _solve(costs, rows, 60.0, may_fail=True)
    if solved is None:
        return None
    return frozenset(name for name, i in index.items() if solved[i] > 0.5), float(costs @ np.round(solved))


def _solve(
    costs: NDArray[np.float64], rows: Sequence[_Row], time_limit_s: float, *, may_fail: bool = False
) -> NDArray[np.float64] | None:
    matrix = lil_matrix((len(rows), len(costs)))
    for number, (row, _) in enumerate(rows):
        for column, coefficient in row.items():
            matrix[number, column] = coefficient
    result = milp(
        costs,
        constraints=LinearConstraint(matrix.tocsr(), ub=[bound for _, bound in rows]),
        bounds=Bounds(0, 1),
        integrality=np.ones(len(costs)),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    if result.status == 2 and may_fail:
        return None
    if result.status != 0:
        raise RuntimeError(f"the solver ended with {result.message!r}")
    solution: NDArray[np.float64] = result.x
    return solution
