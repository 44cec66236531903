"""Run cases: each once for all experiments that need it, in several processes, and kept on disk under its key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from pathlib import Path

from manylora.lab.experiments.calculations import CALCULATIONS, is_clairvoyant, run_clairvoyant
from manylora.lab.experiments.cases import Case, Result
from manylora.lab.experiments.isolated import is_isolated, run_isolated
from manylora.lab.experiments.simulated import run_case
from manylora.lab.pool import start_processes

__all__ = ["Runner", "compute"]

Progress = Callable[[int, int], None]  # told how many cases are done, and of how many


def compute(case: Case) -> Result:
    """Run one case: a calculation, isolated functions, the clairvoyant bound, or engines."""
    if case.calculation is not None:
        return CALCULATIONS[case.calculation](case)
    if is_isolated(case):
        return run_isolated(case)
    return run_clairvoyant(case) if is_clairvoyant(case) else run_case(case)


class Runner:
    """Runs the cases that have no kept result in a folder, some at once; with ``fresh`` all of them."""

    def __init__(self, folder: Path | None, *, num_processes: int = 1, fresh: bool = False) -> None:
        self._folder = folder
        self._num_processes = num_processes
        self._fresh = fresh
        self._done: dict[str, Result] = {}

    def run(self, cases: Iterable[Case], on_progress: Progress | None = None) -> dict[str, Result]:
        """Return the results of all cases by key; equal cases are run once.

        ``on_progress`` is called after each case that had to be run, and once before. ``ConfigError`` if a case's
        description is wrong, or a trace is missing.
        """
        wanted = {case.key: case for case in cases}
        missing = {key: case for key, case in wanted.items() if not self._find(key)}
        num_found = len(wanted) - len(missing)
        report = on_progress or (lambda done, of: None)
        report(num_found, len(wanted))
        if self._num_processes == 1 or len(missing) < 2:
            for place, (key, case) in enumerate(missing.items(), num_found + 1):
                self._keep(key, compute(case))
                report(place, len(wanted))
        else:
            with start_processes(self._num_processes) as pool:
                futures = {pool.submit(compute, case): key for key, case in missing.items()}
                try:
                    for place, future in enumerate(as_completed(futures), num_found + 1):
                        self._keep(futures[future], future.result())
                        report(place, len(wanted))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        return {key: self._done[key] for key in wanted}

    def _find(self, key: str) -> bool:
        if key in self._done:
            return True
        if self._folder is None or self._fresh:
            return False
        path = self._folder / f"{key}.json"
        if path.is_file():
            self._done[key] = Result.from_json(json.loads(path.read_text()))
        return key in self._done

    def _keep(self, key: str, result: Result) -> None:
        # By way of JSON, so that a result is the same to the digit whether it was kept or has just been made.
        text = json.dumps(result.to_json(), separators=(",", ":"))
        self._done[key] = Result.from_json(json.loads(text))
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            half = self._folder / f"{key}.{os.getpid()}.part"
            half.write_text(text)
            half.replace(self._folder / f"{key}.json")
