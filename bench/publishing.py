"""What every benchmark shares: its arguments, its tables, and results as JSON for programs and Markdown for people.

A result of a comparison by time is worth keeping only from enough rounds on a machine without other work:
`reason_to_refuse` says what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from ratios import median_interval

RESULTS = Path(__file__).resolve().parent / "results"

LEAST_ROUNDS = 5
"""Fewer rounds give no interval worth the name."""

MOST_BUSY = 0.05
"""Most of the machine's processor time that other processes may take during a benchmark."""


def arguments(doc: str | None, *, quick: str = "", processor_time: bool = False) -> argparse.ArgumentParser:
    """Return a parser that shows the script's docstring, with the arguments that it names."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}; writes nothing")
    if processor_time:
        parser.add_argument("--processor-time", action="store_true", help="one thread, and its processor time")
    return parser


def publish(
    name: str, figures: object, text: str, *, is_kept: bool = True, is_shown: bool = True, refused: str | None = None
) -> None:
    """Print a result, and write it to the folder of results; a smoke test writes nothing.

    The page names the command, below its title if the text does not say it.
    ``refused`` is the reason why a comparison by time is not worth keeping (`reason_to_refuse`).
    """
    if "bench/" not in text:
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n`{shlex.join(['python', f'bench/{Path(sys.argv[0]).name}', *sys.argv[1:]])}`.\n{rest}"
    if is_shown:
        print(text)
    if is_kept and refused is not None:
        raise SystemExit(f"{name}: nothing was written: {refused}")
    if is_kept:
        (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=1, default=np.generic.item) + "\n")
        (RESULTS / f"{name}.md").write_text(text.rstrip("\n") + "\n")


class Steps:
    """Says how far a benchmark is, a line for each step, with the time that is left at this rate."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._num_done, self._began_at = num_steps, 0, time.monotonic()

    def done(self, what: str) -> None:
        """Say that a step is over."""
        self._num_done += 1
        took_s = time.monotonic() - self._began_at
        left_s = took_s / self._num_done * max(0, self._num_steps - self._num_done)
        print(f"{self._num_done}/{self._num_steps} {what}; {took_s:.0f} s, about {left_s:.0f} s left", flush=True)


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], *, left: int = 1) -> list[str]:
    """Return the lines of a table whose first ``left`` columns are text and all others numbers."""
    lines = [heads, ["---" if place < left else "---:" for place in range(len(heads))], *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def middle_of_rounds(values: Sequence[float]) -> str:
    """Return a figure that is compared with a limit, not with another side, with a 95 % interval of its median."""
    median, low, high = median_interval(values)
    return f"{median:.3g}" if len(values) == 1 else f"{median:.3g} ({low:.3g} to {high:.3g})"


def clock_of(options: argparse.Namespace, processor: Callable[[], float] = time.process_time) -> Callable[[], float]:
    """Return the clock that ``--processor-time`` asks for, and take one thread if it does."""
    if not options.processor_time:
        return time.perf_counter
    import torch

    torch.set_num_threads(1)
    return processor


def children_s() -> float:
    """Return the processor time of this process's children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Others:
    """The share of the machine's processor time that other processes take, from construction on."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def share(self) -> float:
        """Return the share since construction, 0 to 1.

        Children count as own once they have ended, and while they run if they are still there.
        """
        elapsed_s = (time.monotonic() - self._began_at) * (os.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return min(1.0, max(0.0, others_s / elapsed_s)) if elapsed_s > 0 else 0.0


def _busy_s() -> float:
    import psutil  # an extra: only results worth keeping need it

    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    import psutil

    process = psutil.Process()
    total = sum(process.cpu_times()[:4])  # with those of children that ended
    for child in process.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue
    return float(total)


def reason_to_refuse(num_rounds: int, busy_share: float) -> str | None:
    """Return why a result is not worth keeping, in words; ``None`` if it is."""
    if num_rounds < LEAST_ROUNDS:
        return f"{num_rounds} rounds, and a result needs at least {LEAST_ROUNDS}"
    return reason_if_busy(busy_share)


def reason_if_busy(busy_share: float) -> str | None:
    """Return why a result of one run is not worth keeping, in words; ``None`` if the machine had no other work."""
    if busy_share > MOST_BUSY:
        return (
            f"other processes took {busy_share:.0%} of the machine meanwhile, and a result allows {MOST_BUSY:.0%}: "
            "run it on a quiet machine"
        )
    return None
